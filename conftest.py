"""Examples in docstrings that need an extra are collected where it is installed."""

import os
from importlib.util import find_spec

# LightningCLI 2.6 calls much of what jsonargparse 5 will take away: hence pyproject's cap.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
#: Files that need a package.
NEEDED_BY = {
    "peft": ["lightning_fl/models/lora.py", "lightning_fl/models/timm_model.py"],
    "flwr": ["lightning_fl/integrations/flower.py"],
    "nvflare": ["lightning_fl/integrations/nvflare.py"],
}
#: Files that processes of other libraries import.
OF_OTHERS = ["tests/integrations/flower_apps.py", "tests/integrations/nvflare_job"]
#: Changes names of the whole process.
ALIAS = "lightning_fl/compat.py"
collect_ignore = [
    ALIAS,
    *OF_OTHERS,
    *(file for package, files in NEEDED_BY.items() if not find_spec(package) for file in files),
]
