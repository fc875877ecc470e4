"""The names of the package itself."""

import subprocess
import sys

import pytest

import lightning_fl


def test_every_name_of_the_package_can_be_imported_from_it():
    from lightning_fl.callbacks import FederatedLoop
    from lightning_fl.datamodules import FederatedDataModule

    assert lightning_fl.FederatedLoop is FederatedLoop
    assert lightning_fl.FederatedDataModule is FederatedDataModule
    for name in lightning_fl.__all__:
        assert getattr(lightning_fl, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Fedavg'"):
        _ = lightning_fl.Fedavg


def test_an_import_of_the_package_leaves_out_what_is_not_asked_for():
    rooms = [f"lightning_fl.{name}" for name in ("callbacks", "datamodules", "report", "cli")]
    code = f"import sys, lightning_fl; print([room for room in {rooms} if room in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
