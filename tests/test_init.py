"""The names of the package itself."""

import os
import pkgutil
import re
import sys
import warnings
from importlib import import_module

import pytest

import lightning_fl
from child import python


def test_every_name_of_the_package_can_be_imported_from_it():
    from lightning_fl.callbacks import FederatedLoop
    from lightning_fl.datamodules import FederatedDataModule

    assert lightning_fl.FederatedLoop is FederatedLoop
    assert lightning_fl.FederatedDataModule is FederatedDataModule
    for name in lightning_fl.__all__:
        assert getattr(lightning_fl, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Fedavg'"):
        _ = lightning_fl.Fedavg


def test_the_package_of_runners_says_where_to_find_each_of_its_modules():
    runners = import_module("lightning_fl.runners")
    modules = {module.name for module in pkgutil.iter_modules(runners.__path__)}
    assert set(re.findall(r"``(\w+)``", runners.__doc__)) == modules


def rooms_imported_anew():
    """Import the package once more; return those of its parts that come along."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_fl"]:
        del sys.modules[name]
    import_module("lightning_fl")
    rooms = [f"lightning_fl.{name}" for name in ("callbacks", "datamodules", "report", "cli")]
    return [room for room in rooms if room in sys.modules]


def test_an_import_of_the_package_leaves_out_what_is_not_asked_for():
    """In a process that has imported torch already, which takes seven seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are not used
        child = os.fork()
    if child == 0:
        failed = True
        try:
            failed = bool(rooms_imported_anew())
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
def test_what_a_federation_needs_does_not_bring_the_compiler():
    """It takes a second to import, and most runs compile nothing."""
    code = "import sys, lightning_fl.callbacks, lightning_fl.datamodules, lightning_fl.cli.run;"
    code += "assert 'torch._inductor.compile_fx' not in sys.modules"
    python("-c", code)


@pytest.mark.slow
def test_help_lists_no_classes_of_remote_clients():
    """``--help`` lists all classes that are imported."""
    code = "import sys, lightning_fl.cli.run; assert 'lightning_fl.integrations' not in sys.modules"
    python("-c", code)
