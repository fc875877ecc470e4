"""Tests of what needs the extra ``peft`` or Opacus, which the tests' environment may lack.

The packages of ``peft`` bring transformers, which torchmetrics imports wherever it is installed:
every process of the tests would start two seconds later.
"""

from importlib.util import find_spec

import pytest

#: Marks a test that needs the extra.
PEFT = pytest.mark.skipif(find_spec("peft") is None, reason='needs pip install ".[peft]"')

#: Marks a test that needs Opacus.
OPACUS = pytest.mark.skipif(find_spec("opacus") is None, reason='needs pip install ".[privacy]"')

#: How the names of configs and pages begin that need an extra.
FIRST = {"lora_": PEFT, "adapters.": PEFT, "dp_sgd_": OPACUS}


def marked(names, *marks):
    """Mark the parameters that need an extra: configs, and the page of adapters."""
    files = {name: str(name).rpartition("/")[2] for name in names}
    return [
        pytest.param(name, marks=[*marks, *(m for p, m in FIRST.items() if file.startswith(p))])
        for name, file in files.items()
    ]
