"""Flower trains as the loop does: with its simulation engine, and as separate processes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from apart import CONFIG, CPU, replies_of
from lightning_fl import __version__
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.messages import Reply
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.types import FederationError
from tutorial import trainer
from two_classes import samples

pytest.importorskip("flwr", reason='needs pip install ".[flower]"')

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import flower_apps  # noqa: E402  # imports flwr
from flwr.app import RecordDict  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from lightning_fl.integrations import flower  # noqa: E402
from lightning_fl.integrations.flower import FederationStrategy, packed  # noqa: E402


def by_the_loop(name, folder, rounds=5, clients=5, sampled=3):
    module = flower_apps.module(name)
    loop = FederatedLoop(
        flower_apps.RULES[name](), flower_apps.policy(), clients_per_round=sampled, seed=3
    )
    trainer(folder, loop, rounds=rounds).fit(module, datamodule=samples(clients))
    return module.state_dict()


def largest_difference(first, second):
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).abs().max()) for key in first)


def environment(**more):
    """Return the environment of a process that imports the tests' helpers and reports nothing."""
    paths = [str(HERE), str(HERE.parent), *sys.path]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths), "PATH": found} | more


@pytest.mark.parametrize("name", flower_apps.RULES)
def test_the_simulation_engine_gives_the_weights_of_the_loop(tmp_path, name):
    pytest.importorskip("ray", reason='needs pip install "flwr[simulation]"')
    command = [sys.executable, str(HERE / "flower_apps.py"), name, str(tmp_path / "model.pt")]
    subprocess.run(command, env=environment(), cwd=tmp_path, check=True, timeout=300)
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert largest_difference(found, by_the_loop(name, tmp_path)) == 0


APP = """
[project]
name = "case"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "case.server:app"
clientapp = "case.client:app"
"""


class Deployment:
    """A SuperLink and SuperNodes on the loopback address, each a process of its own."""

    def __init__(self, folder, case, rounds):
        self.folder, self.result = folder, folder / "model.pt"
        self.ports = free_ports(3)
        self.environment = environment(
            FLWR_HOME=str(folder / "flwr"),
            **({} if case is None else {"FLOWER_CASE": case}),
            FLOWER_RESULT=str(self.result),
            FLOWER_ROUNDS=str(rounds),
        )
        self.processes = {}
        if case is not None:
            self.write_app()
        (folder / "flwr").mkdir()
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{self.ports[0]}"\ninsecure = true\n'
            "options.num-supernodes = 4\n"  # of a simulation
        )

    def write_app(self):
        folder = self.folder / "app" / "case"
        folder.mkdir(parents=True)
        (self.folder / "app" / "pyproject.toml").write_text(APP)
        for name in ("server", "client"):
            source = "server_app" if name == "server" else "client_app_of_case"
            (folder / f"{name}.py").write_text(
                f"from flower_apps import {source}\n\napp = {source}\n"
            )
        (folder / "__init__.py").write_text("")

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [str(Path(sys.executable).parent / command[0]), *command[1:]],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # with the processes that it starts
            )

    def link(self, *more):
        port = str(self.ports[0])
        more = ("--disable-runtime-dependency-installation", *more)
        self.start(
            "link", "flower-superlink", "--insecure", "--host=127.0.0.1", "--port", port, *more
        )

    def node(self, client):
        link, port = f"127.0.0.1:{self.ports[0]}", str(self.ports[1 + client])
        self.start(
            f"node{client}",
            *("flower-supernode", "--insecure", "--superlink", link, "--host=127.0.0.1"),
            *("--port", port, "--node-config", f"partition-id={client} num-partitions=2"),
        )

    def begin(self):
        """Start a link and two nodes, and run the app on them."""
        self.link()
        for client in (0, 1):
            self.node(client)
        self.run()

    def run(self):
        command = [str(Path(sys.executable).parent / "flwr"), "run", "app", "here"]
        for _ in range(30):  # until the SuperLink listens
            done = subprocess.run(
                command, env=self.environment, cwd=self.folder, capture_output=True, text=True
            )
            if done.returncode == 0:
                return
            time.sleep(1)
        raise AssertionError(done.stdout + done.stderr)

    def wait_for(self, condition, seconds=240):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.5)

    def wait(self):
        self.wait_for(self.result.exists)
        time.sleep(0.5)  # the file is being written
        return torch.load(self.result, weights_only=True)

    def logs(self):
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*.log"))

    def kill(self, name):
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self):
        for name in list(self.processes):
            self.kill(name)


def free_ports(count):
    """Return ports of the loopback address that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def deployed(tmp_path):
    made = []

    def make(case, rounds=1):
        """``case=None``: the test writes the app."""
        made.append(Deployment(tmp_path, case, rounds))
        return made[0]

    yield make
    for each in made:  # none if the test is skipped
        each.close()


def test_separate_processes_give_the_weights_of_the_loop(tmp_path, deployed):
    sites = deployed("SCAFFOLD", rounds=3)
    sites.begin()
    expected = by_the_loop("SCAFFOLD", tmp_path, rounds=3, clients=2, sampled=2)
    assert largest_difference(sites.wait(), expected) == 0


def test_a_run_whose_superlink_was_killed_resumes(tmp_path, deployed):
    """The server repeats the round in which it was killed, and the clients begin it again."""
    sites = deployed("SCAFFOLD", rounds=4)
    sites.begin()
    sites.wait_for(lambda: rounds_in(sites.result.with_suffix(".ckpt")) >= 1)
    sites.kill("link")
    assert not sites.result.exists()
    for client in (0, 1):  # their link does not know them any more: a service starts them again
        sites.kill(f"node{client}")
    sites.begin()
    expected = by_the_loop("SCAFFOLD", tmp_path, rounds=4, clients=2, sampled=2)
    assert largest_difference(sites.wait(), expected) == 0


@pytest.mark.filterwarnings("ignore:.*dropped 1 of 2 client updates")
def test_a_round_completes_whose_supernode_was_killed(deployed):
    """The others train on without its client."""
    sites = deployed(flower_apps.HANGS, rounds=3)
    sites.begin()
    sites.wait_for(sites.result.with_suffix(".hangs").exists)
    sites.kill("node1")
    found = sites.wait()
    module = flower_apps.module(flower_apps.HANGS)
    server = RemoteServer(module, policy=flower_apps.policy(), seed=3)
    server.begin([12, 12], [3, 3])
    client = RemoteClient(flower_apps.module(flower_apps.HANGS), samples(2), trainer=CPU)
    clients = [client, client]
    kept = {}
    for round in range(3):
        tasks = [task for task in server.tasks() if round == 0 or task.client == 0]
        server.finish(replies_of(clients, tasks, kept))
    assert largest_difference(found, module.state_dict()) == 0


def new():
    server = RemoteServer(flower_apps.module("FedAvg"), policy=flower_apps.policy(), seed=3)
    return FederationStrategy(server, num_clients=2)


def begun():
    """A strategy whose two clients are known, without nodes."""
    made = new()
    for at in (0, 1):
        made.members.admit(70 + at, node(at))
    return made


def answer(node, content=None, error=None, to=None):
    """A message of a node, which may be an error."""
    return SimpleNamespace(
        has_error=lambda: error is not None,
        error=SimpleNamespace(reason=error),
        metadata=SimpleNamespace(src_node_id=node, reply_to_message_id=to),
        content=content,
    )


class Nodes:
    """A grid whose nodes answer a query with their client, an error, or not at all."""

    def __init__(self, answers):
        self.answers, self.sent, self.asked = answers, [], []

    def get_node_ids(self):
        return list(self.answers)

    def push_messages(self, messages):
        for i, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"{len(self.asked) + i}"
        self.sent += messages
        self.asked += [message.metadata.dst_node_id for message in messages]
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids):
        found, self.sent = self.sent, []
        for message in found:
            node, to = message.metadata.dst_node_id, message.metadata.message_id
            about = self.answers[node]
            if about is None:
                self.sent.append(message)
            elif isinstance(about, str):
                yield answer(node, error=about, to=to)
            else:
                yield answer(node, {"about": about}, to=to)


def node(client, num_samples=12, version=__version__):
    about = {"client": client, "num_samples": num_samples, "batches_per_epoch": 3}
    return {**about, "version": version}


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower sets in the process of a ServerApp, which messages need."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("lightning_fl.integrations.flower.PAUSE", 0.01)
    monkeypatch.setattr("lightning_fl.integrations.flower.NOTICE", 0.05)


def test_missing_clients_are_named_with_what_nodes_have_said(quick, caplog):
    grid = Nodes({70: node(0), 71: "no file train.h5", 72: None})
    with (
        pytest.warns(UserWarning, match=r"node 71 is not used: no file train\.h5"),
        caplog.at_level("INFO", "flwr"),
        pytest.raises(FederationError, match=r"clients \[1\] of 2 have not connected; node 71 is"),
    ):
        new().start(grid, timeout=0.3)
    assert grid.asked[:3] == [70, 71, 72]
    assert grid.asked.count(70) == grid.asked.count(72) == 1
    assert "clients [1] of 2 have not connected; node 71" in caplog.text


class Changing(Nodes):
    """Nodes that change when they have been looked for several times."""

    def __init__(self, answers, later):
        super().__init__(answers)
        self.later, self.looks = later, 0

    def get_node_ids(self):
        self.looks += 1
        if self.looks == 5:
            self.answers = self.later
        return super().get_node_ids()


@pytest.mark.filterwarnings("ignore:node .* is not used")
@pytest.mark.parametrize(
    ("answers", "later", "clients"),
    [
        # Of two nodes of client 0, the first was killed, which the SuperLink still has to see.
        ({70: node(0), 80: node(0)}, {80: node(0), 81: node(1)}, {80: 0, 81: 1}),
        ({70: node(0), 71: "no file"}, {70: node(0), 71: node(1)}, {70: 0, 71: 1}),
        ({70: node(0), 71: {"client": "x"}}, {70: node(0), 72: node(1)}, {70: 0, 72: 1}),
        ({70: node(0, version="0"), 71: node(7)}, {72: node(0), 73: node(1)}, {72: 0, 73: 1}),
    ],
)
def test_a_first_answer_that_is_wrong_is_waited_for(quick, answers, later, clients):
    made = new()
    made._meet(Changing(answers, later), 10)
    assert made.members.clients == clients


def in_the_run(made):
    """Begin a run without Flower's loop."""
    made.server.begin(*made.members.work(), num_rounds=5)
    return made


def test_a_client_that_comes_back_takes_part_again():
    """Its node may be new, and take long to answer; while it is there, no other one is it."""
    made = in_the_run(begun())
    grid = Nodes({70: node(0), 71: node(1)})
    sent = made.configure_train(1, None, None, grid)
    assert sorted(message.metadata.dst_node_id for message in sent) == [70, 71]
    grid.answers = {70: node(0)}
    with pytest.warns(UserWarning, match=r"clients \[1\] are not connected and are dropped"):
        sent = made.configure_train(2, None, None, grid)
    assert [message.metadata.dst_node_id for message in sent] == [70]
    grid.answers = {70: node(0), 80: None}
    with pytest.warns(UserWarning, match=r"clients \[1\] are not connected"):
        made.configure_train(3, None, None, grid)
    grid.answers[80] = node(1)
    sent = made.configure_train(4, None, None, grid)
    assert sorted(message.metadata.dst_node_id for message in sent) == [70, 80]
    grid.answers[90] = node(1)
    with pytest.warns(UserWarning, match="node 90 is not used: client 1 is node 80, which came"):
        sent = made.configure_train(5, None, None, grid)
    assert sorted(message.metadata.dst_node_id for message in sent) == [70, 80]


def test_a_run_without_nodes_ends():
    made = in_the_run(begun())
    with pytest.raises(FederationError, match=r"clients \[0, 1\] are not connected, and no other"):
        made.configure_train(1, None, None, Nodes({}))


def test_a_round_without_a_reply_ends_the_run():
    made = in_the_run(begun())
    made.configure_train(1, None, None, Nodes({70: node(0), 71: node(1)}))
    with (
        pytest.warns(UserWarning, match=r"clients \[0, 1\] have not replied within 3600 seconds"),
        pytest.raises(FederationError, match=r"failed. round 1: clients \[0, 1\] have not replied"),
    ):
        made.aggregate_train(1, [])


def reply(client, made):
    update = made.server._exchange.update
    tensors = torch.ones(44).double(), torch.zeros(0).long(), {}
    return packed(Reply(client, update, 12, 0.2, 0.5, "", *tensors))


@pytest.mark.parametrize(
    ("node_and_client", "match"),
    [
        ((71, 0), "client 1 is dropped: it sent an earlier reply, or that of client 0"),
        ((71, None), "client 1 has failed and is dropped: its message is not a reply"),
        ((72, 1), "node 72 has failed and is dropped: it does not train in this round"),
        ((), r"round 1: clients \[1\] have not replied within 3600 seconds and are dropped"),
        ((70, 0), "node 70 has failed and is dropped: it does not train in this round"),
    ],
)
def test_a_message_counts_for_the_client_of_its_node_alone(node_and_client, match):
    made, expected = in_the_run(begun()), in_the_run(begun())
    for each in (made, expected):
        each.configure_train(1, None, None, Nodes({70: node(0), 71: node(1)}))
    more = []
    if node_and_client:
        sender, client = node_and_client
        content = RecordDict() if client is None else reply(client, made)
        more = [answer(sender, content)]
    with pytest.warns(UserWarning, match="round 1: ") as caught:
        made.aggregate_train(1, [answer(70, reply(0, made)), *more])
    assert any(re.search(match, str(each.message)) for each in caught)
    with pytest.warns(UserWarning, match="round 1: "):
        expected.aggregate_train(1, [answer(70, reply(0, expected))])
    assert largest_difference(made.server.module.state_dict(), expected.server.model()) == 0


def test_options_that_do_not_reach_clients_are_refused():
    with pytest.raises(FederationError, match="do not reach clients"):
        new().start(Nodes({}), train_config={"lr": 0.1})


def test_a_first_round_in_which_all_clients_fail_ends_the_run():
    """An option that clients refuse would otherwise leave the model as it is in every round."""
    made = in_the_run(begun())
    made.configure_train(1, None, None, Nodes({70: node(0), 71: node(1)}))
    failed = [answer(node, error="a learning rate scheduler") for node in (70, 71)]
    with (
        pytest.warns(UserWarning, match=r"client \d has failed and is dropped"),
        pytest.raises(FederationError, match=r"all clients have failed.* a learning rate"),
    ):
        made.aggregate_train(1, failed)
    made._is_proven = True  # a round with a reply has come before
    with pytest.warns(UserWarning, match="has failed and is dropped|dropped 2 of 2|0 of 2 clients"):
        made.aggregate_train(1, failed)
    assert made.server.rows[0]["dropped"] == 2


def test_a_finished_checkpoint_says_that_nothing_is_trained(tmp_path, monkeypatch):
    file = tmp_path / "server.pt"
    server = begun().server
    server.begin([12, 12], [3, 3], checkpoint=file)
    server.tasks()
    with pytest.warns(UserWarning, match="dropped 2 of 2|0 of 2 clients returned"):
        server.finish({})
    said, made = [], begun()
    made.checkpoint = file
    monkeypatch.setattr(flower.LOG, "info", lambda text, *values: said.append(text % values))
    made.start(Nodes({70: node(0), 71: node(1)}), num_rounds=1)
    assert f"resuming after round 1 of 1: {file}" in said


def test_an_exported_app_gives_the_model_of_its_configuration(tmp_path, deployed):
    """In Flower's simulation engine, as ``flwr run`` starts it."""
    pytest.importorskip("ray", reason='needs pip install "flwr[simulation]"')
    engine = deployed(None)
    (tmp_path / "case.yaml").write_text(CONFIG)
    # Clients have a part of this rule, which allows neither clipping nor momentum.
    options = ["--federation.aggregator=Scaffold", "--trainer.gradient_clip_val=null"]
    options += ["--model.init_args.optimizer.init_args.momentum=0"]
    for command in (("fit", "--config", "case.yaml"), ("export", "flower", "case.yaml")):
        subprocess.run(
            [sys.executable, "-m", "lightning_fl", *command, *options],
            env=engine.environment,
            cwd=tmp_path,
            timeout=240,
            check=True,
        )
    project = tmp_path / "app" / "pyproject.toml"
    text = project.read_text()
    assert 'model = "model.pt"' in text  # relative to the folder of the SuperLink
    engine.link("--simulation")
    engine.run()
    last = torch.load(tmp_path / "runs" / "version_0" / "last.ckpt", weights_only=True)
    assert largest_difference(engine.wait(), last["state_dict"]) == 0


def rounds_in(path):
    """Return the number of rounds in a checkpoint of the server."""
    return torch.load(path, weights_only=True)["epoch"] if path.exists() else 0
