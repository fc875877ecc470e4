"""Examples in docstrings that need the extra ``peft`` are collected where it is installed."""

from importlib.util import find_spec

NEEDED_BY = ["lightning_fl/models/lora.py", "lightning_fl/models/timm_model.py"]
collect_ignore = [] if find_spec("peft") else NEEDED_BY
