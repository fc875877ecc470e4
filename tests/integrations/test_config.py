"""A configuration gives the server and the clients of its federation, and an app of Flower."""

import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import Subset, TensorDataset

import quick_cli
from apart import CONFIG, run
from lightning_fl.cli.parts import read_config
from lightning_fl.integrations.exchange import Kept

DIGITS = {"class_path": "Digits"}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "with", "--its-own", "arguments"])
    Path("config.yaml").write_text(CONFIG)
    return Path("config.yaml")


def changed(**parts):
    """Write a variant of the configuration."""
    path = Path("changed.yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(CONFIG), **parts}))
    return path


def test_server_and_clients_train_as_lightning_fl_fit_does(config):
    quick_cli.call("fit", "--config", config, "--trainer.enable_progress_bar=false")
    expected = torch.load("runs/version_0/last.ckpt", weights_only=True)["state_dict"]
    server = read_config(config).server()
    clients = [read_config(config).client() for _ in range(4)]
    server.begin(*zip(*(client.work(i) for i, client in enumerate(clients)), strict=True))
    run(server, clients, rounds=3)
    found = server.module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_clients_get_every_option_of_theirs(config):
    given = {
        "optimizer_state": "keep",
        "buffers": "local",
        "update_transforms": [{"class_path": "TopK", "init_args": {"fraction": 0.5}}],
        "local_parameters": ["net.3.*"],
    }
    phases = [
        {"class_path": "Phase", "init_args": {"train": "local", "num_steps": 2}},
        {"class_path": "Phase", "init_args": {"train": "shared"}},
    ]
    policy = {"class_path": "Schedule", "init_args": {"phases": phases}}
    found = read_config(changed(federation={**given, "policy": policy}))
    options = found.client().options
    assert options == {name: getattr(found.loop.options, name) for name in [*given, "phases"]}
    assert [phase.train for phase in options["phases"]] == ["local", "shared"]
    assert options["update_transforms"][0].fraction == 0.5


def train_own(path, samples_of):
    """Train a site with its own samples as its client of the simulation; return its work.

    Args:
        path: File of the configuration.
        samples_of: Function of the training data and numbers of samples.
    """
    found, data = read_config(path), read_config(path).data
    data.prepare_data()
    data.setup("fit")
    server, clients = found.server(), range(data.num_clients)
    server.begin(*zip(*(found.client().work(i) for i in clients), strict=True), num_rounds=1)
    task = server.tasks()[0]
    client = found.client(samples_of(data.train, data.parts[task.client].tolist()))
    own, _ = client.train(task, Kept())
    simulated, _ = read_config(path).client().train(task, Kept())
    assert torch.equal(own.delta, simulated.delta)
    return client.work(task.client)


def test_a_site_has_the_loader_and_the_hooks_of_the_configuration(config):
    data = {"class_path": "Digits", "init_args": {"batch_size": 32, "drop_last": True}}
    path = changed(data=data, federation={"aggregator": "FedAvg"})
    num_samples, batches = train_own(path, Subset)  # whole numbers of pixels
    assert batches == num_samples // 32


OWN_HOOK = """
import torch
from torch.utils.data import TensorDataset

from lightning_fl import ClientModule
from lightning_fl.datamodules import FederatedDataModule


class Scaled(ClientModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x / 16, y


class Numbers(FederatedDataModule):
    def __init__(self, num_clients: int = 4):
        x = torch.arange(64 * 40).view(40, 64) % 17
        super().__init__(TensorDataset(x.float(), torch.arange(40) % 10), num_clients=num_clients)
"""


@pytest.mark.filterwarnings("ignore:You have overridden")  # Lightning's, as in a simulation
def test_a_hook_of_the_module_is_called_at_a_site(config, monkeypatch):
    Path("own_hook.py").write_text(OWN_HOOK)
    monkeypatch.syspath_prepend(".")
    model = {**yaml.safe_load(CONFIG)["model"], "class_path": "own_hook.Scaled"}
    path = changed(model=model, data={"class_path": "own_hook.Numbers"})
    train_own(path, lambda train, part: TensorDataset(*train[part]))
    monkeypatch.delitem(sys.modules, "own_hook")


def test_the_app_has_the_configuration_and_the_modules_that_it_names(config, monkeypatch):
    Path("my_rule.py").write_text(
        "from lightning_fl.aggregators import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n"
    )
    monkeypatch.syspath_prepend(".")
    federation = {"aggregator": "my_rule.Mine", "seed": 5}
    quick_cli.call("export", "flower", str(changed(federation=federation)), "--output", "app")
    monkeypatch.delitem(sys.modules, "my_rule")
    written = sorted(path.name for path in Path("app").iterdir())
    assert written == [
        *("README.md", "client_app.py", "config.yaml", "my_rule.py", "pyproject.toml"),
        "server_app.py",
    ]
    project = tomllib.loads(Path("app/pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"]["num-clients"] == 4
    assert project["tool"]["flwr"]["app"]["config"]["num-rounds"] == 3
    assert project["tool"]["flwr"]["app"]["config"]["timeout"] == 3600
    assert project["project"]["name"] == "changed"
    again = read_config("app/config.yaml")
    assert type(again.loop.options.aggregator).__name__ == "Mine"
    assert again.server().seed == 5
    assert again.trainer["gradient_clip_val"] == 0.5
    assert "torch.zeros([2, 1, 8, 8], dtype=torch.float32)" in Path("app/server_app.py").read_text()
    for name in ("server_app", "client_app"):
        compile(Path(f"app/{name}.py").read_text(), name, "exec")


def test_what_an_app_does_not_have_is_said(config, capsys):
    options = {"accelerator": "cpu", "max_epochs": 3, "limit_train_batches": 5, "devices": 1}
    faults = {"class_path": "lightning_fl.callbacks.ClientFaults", "init_args": {"dropout": 0.1}}
    path = changed(trainer={**options, "callbacks": [faults]}, vectorize=2)
    quick_cli.call("export", "flower", str(path), "--output", "app")
    *_, left_out, last = capsys.readouterr().out.splitlines()
    assert left_out == "The app leaves out: ClientFaults, trainer.limit_train_batches, vectorize"
    assert last == "It waits for 4 SuperNodes: see its README.md"
    assert 'federation-config "num-supernodes=4"' in Path("app/README.md").read_text()


def test_further_options_change_the_configuration(config):
    words = ("--trainer.max_epochs=7", "--output", "app", "--data.init_args.num_clients=3")
    quick_cli.call("export", "flower", str(config), *words)
    settings = tomllib.loads(Path("app/pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert settings["config"]["num-rounds"] == 7
    assert settings["config"]["num-clients"] == 3
    assert read_config("app/config.yaml").num_rounds == 7


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"federation": {"aggregator": "PFNM"}}, "PFNM replaces the network"),
        ({"federation": {"policy": "RepresentationMatchingReinforce"}}, "error: "),
        ({"trainer": {"max_epochs": -1}}, "no number of rounds"),
        ({"data": {**DIGITS, "init_args": {"stream_steps": 2}}}, "stream_steps=2 changes"),
    ],
)
def test_what_an_app_cannot_do_is_refused_before_anything_is_written(
    config, capsys, parts, message
):
    with pytest.raises(SystemExit):
        quick_cli.call("export", "flower", str(changed(**parts)), "--output", "app")
    assert message in capsys.readouterr().err
    assert not Path("app").exists()


def test_app_needs_the_file_of_a_configuration(config, capsys):
    with pytest.raises(SystemExit, match="2"):
        quick_cli.call("export", "flower", "--config", CONFIG)
    assert "export takes the file of a configuration" in capsys.readouterr().err


def test_a_folder_with_files_is_not_overwritten(config):
    Path("app").mkdir()
    Path("app/notes.txt").write_text("mine")
    with pytest.raises(SystemExit):
        quick_cli.call("export", "flower", str(config), "--output", "app")
    assert [path.name for path in Path("app").iterdir()] == ["notes.txt"]
