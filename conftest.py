"""Examples in docstrings that need an extra are collected where it is installed."""

from importlib.util import find_spec

#: Files that need a package.
NEEDED_BY = {
    "peft": ["lightning_fl/models/lora.py", "lightning_fl/models/timm_model.py"],
    "flwr": ["lightning_fl/integrations/flower.py"],
    "nvflare": ["lightning_fl/integrations/nvflare.py"],
}
#: Files that processes of other libraries import.
OF_OTHERS = ["tests/integrations/flower_apps.py", "tests/integrations/nvflare_job"]
collect_ignore = [
    *OF_OTHERS,
    *(file for package, files in NEEDED_BY.items() if not find_spec(package) for file in files),
]
