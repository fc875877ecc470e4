"""Tests of what needs the extra ``peft``, which the tests' environment may lack.

Its packages bring transformers, which torchmetrics imports wherever it is installed: every process
of the tests would start two seconds later.
"""

from importlib.util import find_spec

import pytest

#: Marks a test that needs the extra.
PEFT = pytest.mark.skipif(find_spec("peft") is None, reason='needs pip install ".[peft]"')


#: How the names of configs and pages begin that need the extra.
FIRST = ("lora_", "adapters.")


def marked(names, *marks):
    """Mark the parameters that need the extra: configs, and the page of adapters."""
    return [
        pytest.param(name, marks=[*marks, *[PEFT] * str(name).rpartition("/")[2].startswith(FIRST)])
        for name in names
    ]
