"""The names of the package itself."""

import pkgutil
import re
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


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("imported", "left_out"),
    [
        (
            "lightning_fl",
            [f"lightning_fl.{n}" for n in ("callbacks", "datamodules", "report", "cli")],
        ),
        # The compiler takes a second to import, and most runs compile nothing.
        pytest.param(
            "lightning_fl.callbacks, lightning_fl.datamodules, lightning_fl.cli.run",
            ["torch._inductor.compile_fx"],
            marks=SLOW,
        ),
        # ``--help`` lists all classes that are imported.
        pytest.param("lightning_fl.cli.run", ["lightning_fl.integrations"], marks=SLOW),
    ],
)
def test_an_import_leaves_out_what_is_not_asked_for(imported, left_out):
    python("-c", f"import sys, {imported}; assert not {{*{left_out}}} & sys.modules.keys()")
