import re
from pathlib import Path

import pytest
import torch

import lightning_fl

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:.*bottleneck", "ignore:Starting from v1.9.0")
def test_the_example_federates_a_module_that_knows_nothing_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, names)
    assert names["loop"].rows[-1]["val_acc"] > 0.9
    assert len(names["loop"].rows) == 30


def test_the_federation_of_a_module_takes_ten_lines():
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    code = [line for line in block.splitlines() if line and "import" not in line]
    assert len(code) <= 10


def test_the_rule_of_the_guide_is_one():
    from lightning_fl.types import ClientUpdate

    guide = (ROOT / "docs" / "adding_a_rule.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1], names)
    rule, server = names["ServerMomentum"](beta=0.5), torch.zeros(2)
    for expected in (1.0, 2.5, 4.25):  # velocity 1, 1.5, 1.75
        rule.start(server)
        rule.update(ClientUpdate(torch.tensor([0]), torch.ones(1, 2), torch.tensor([3])))
        server = rule.compute()
        torch.testing.assert_close(server, torch.full((2,), expected))
    assert "velocity" in rule.state_dict()


def test_every_config_and_link_that_is_named_is_there():
    for name in re.findall(r"`(\w+\.yaml)`", README):
        assert (ROOT / "configs" / name).is_file()
    for target in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / target).exists()


def test_every_name_that_is_promised_can_be_imported():
    import importlib

    table = README.split("## What there is")[1].split("## Good to know")[0]
    rooms = ("callbacks", "aggregators", "objectives", "policies", "samplers", "partition")
    room = None
    for name in re.findall(r"`([\w.]+)`", table):
        if name.split(".")[0] in (*rooms, "datamodules", "models", "transforms"):
            room, name = name.split(".")
        elif not name[0].isupper():
            continue
        elif name in lightning_fl.__all__:
            assert hasattr(lightning_fl, name)
            continue
        assert hasattr(importlib.import_module(f"lightning_fl.{room}"), name), (room, name)
