import re
from pathlib import Path

import pytest
import torch

import lightning_fl
import pages

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
METHODS = (ROOT / "docs" / "methods" / "index.md").read_text()


@pytest.mark.filterwarnings("ignore:.*bottleneck", "ignore:Starting from v1.9.0")
@pytest.mark.parametrize(
    ("rounds", "accuracy"), [(4, 0.5), pytest.param(30, 0.9, marks=pytest.mark.slow)]
)
def test_the_example_federates_a_module_that_knows_nothing_of_it(
    tmp_path, monkeypatch, rounds, accuracy
):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page = tmp_path / "README.md"
    page.write_text(README.replace("max_epochs=30", f"max_epochs={rounds}"))
    names = pages.run(page, but=("bash",))
    assert names["loop"].rows[-1]["val_acc"] > accuracy
    assert len(names["loop"].rows) == rounds


def test_the_first_example_has_eight_lines_and_the_federation_of_a_module_ten():
    first, _, federation, *_ = pages.blocks(ROOT / "README.md", "python")
    assert len([line for line in first.splitlines() if line]) == 8
    assert len([line for line in federation.splitlines() if line and "import" not in line]) <= 10


def test_every_config_that_is_named_is_there():
    for name in {*re.findall(r"`(\w+\.yaml)`", README + METHODS)} - {"config.yaml"}:
        assert (ROOT / "configs" / name).is_file()


def test_every_name_that_is_promised_can_be_imported():
    import importlib

    rooms = ("callbacks", "aggregators", "objectives", "policies", "samplers", "partition")
    room = None
    for name in re.findall(r"`([\w.]+)`", METHODS):
        if name.split(".")[0] in (*rooms, "datamodules", "models", "transforms"):
            room, name = name.split(".")
        elif not name[0].isupper():
            continue
        elif name in lightning_fl.__all__:
            assert hasattr(lightning_fl, name)
            continue
        assert hasattr(importlib.import_module(f"lightning_fl.{room}"), name), (room, name)
