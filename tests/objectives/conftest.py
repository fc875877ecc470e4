import functools

import pytest

import by_hand


@pytest.fixture
def run(fit, data, blobs):
    """Train a module on clients, and note what is needed to do the same by hand."""
    return functools.partial(by_hand.federation, fit, data, blobs)
