"""A job of NVFlare trains as the loop does: in its simulator, and message by message."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.types import FederationError
from tutorial import trainer
from two_classes import samples

pytest.importorskip("nvflare", reason='needs pip install ".[nvflare]"')

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "nvflare_job"))

import nvflare_case as case  # noqa: E402  # imports nvflare
from nvflare.app_common.abstract.fl_model import FLModel  # noqa: E402

from lightning_fl.integrations import nvflare  # noqa: E402


def by_the_loop(rule, folder, clients=2, sampled=None, rounds=5):
    module = case.Net()
    loop = FederatedLoop(
        case.RULES[rule](), case.policy(), clients_per_round=sampled, seed=3, buffers="average"
    )
    trainer(folder, loop, rounds=rounds).fit(module, datamodule=samples(clients))
    return module.state_dict()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(torch.as_tensor(found[name]), expected[name])


@pytest.mark.parametrize(("rule", "exchanged"), [("FedAdam", "numpy"), ("Scaffold", "pytorch")])
def test_the_simulator_gives_the_weights_of_the_loop(tmp_path, rule, exchanged):
    paths = [str(HERE.parent), str(HERE / "nvflare_job"), *sys.path]
    with (tmp_path / "log.txt").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, str(HERE / "nvflare_job" / "run.py"), rule, exchanged],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # with the processes that it starts
        )
        try:
            job.wait(240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, (tmp_path / "log.txt").read_text()[-5000:]
    written = tmp_path / "job/server/simulate_job/app_server/FL_global_model.pt"
    found = torch.load(written, weights_only=True)["model"]
    assert_same(found, by_the_loop(rule, tmp_path))


class Controller:
    """What NVFlare's FedAvg does, in one process: messages to each site, one after another."""

    def __init__(self, folder, monkeypatch, rule="FedAvg", sites=3, rounds=5, **options):
        self.folder, self.rounds, self.sites, self.at = folder, rounds, sites, 0
        self.aggregator = case.Server(rule, **options)
        weights = {"weights": case.Net().state_dict()}
        self.aggregator.fl_ctx = SimpleNamespace(get_prop=lambda name: weights)
        self.clients = [
            RemoteClient(case.Net(), samples(sites), case.RULES[rule](), {"accelerator": "cpu"})
            for _ in range(sites)
        ]
        self.model = FLModel(params=weights["weights"], total_rounds=rounds + 1)
        self.monkeypatch = monkeypatch

    def ask(self, site):
        """Return the reply of a site."""
        waiting, sent = [self.model], []
        api = SimpleNamespace(
            init=lambda: None,
            get_site_name=lambda: f"site-{site + 1}",
            is_running=lambda: bool(waiting),
            receive=waiting.pop,
            send=sent.append,
        )
        self.monkeypatch.setattr(nvflare, "flare", api)
        nvflare.run_client(self.clients[site], folder=self.folder)
        sent[0].meta["client_name"] = f"site-{site + 1}"
        return sent[0]

    def round(self):
        self.model.current_round = self.at
        self.aggregator.reset_stats()
        for site in range(self.sites):
            self.aggregator.accept_model(self.ask(site))
        self.model, self.at = self.aggregator.aggregate_model(), self.at + 1

    def run(self, rounds=None):
        for _ in range(self.rounds + 1 if rounds is None else rounds):
            self.round()
        return self.model.params


@pytest.mark.parametrize("rule", ["FedAvg", "CoordinateMedian", "Scaffold"])
def test_a_part_of_the_sites_takes_part_in_each_round(tmp_path, monkeypatch, rule):
    found = Controller(tmp_path, monkeypatch, rule, sampled=2).run()
    assert_same(found, by_the_loop(rule, tmp_path, 3, 2))


def test_a_job_resumes_from_the_checkpoint(tmp_path, monkeypatch):
    path = str(tmp_path / "runs" / "server.pt")
    Controller(tmp_path / "kept", monkeypatch, "Scaffold", checkpoint=path).run(4)
    again = Controller(tmp_path / "kept", monkeypatch, "Scaffold", checkpoint=path)
    found = again.run()  # three rounds are in the checkpoint, and the last ones do nothing
    assert_same(found, by_the_loop("Scaffold", tmp_path, 3))


def test_the_initial_model_is_that_of_the_job(tmp_path, monkeypatch):
    job = Controller(tmp_path, monkeypatch, rounds=0)
    given = {name: tensor + 1 for name, tensor in case.Net().state_dict().items()}
    job.aggregator.fl_ctx = SimpleNamespace(
        get_prop=lambda name: {"weights": {name: t.numpy() for name, t in given.items()}}
    )
    assert_same(job.run(), given)


def test_metrics_of_a_round_are_those_of_the_server(tmp_path, monkeypatch):
    job = Controller(tmp_path, monkeypatch, sampled=2)
    job.run(2)
    assert job.model.metrics["clients"] == 2
    assert job.model.metrics["train_loss"] > 0


def test_rules_that_send_several_models_are_refused_at_the_start():
    with pytest.raises(FederationError, match="ClusteredFL starts clients from models of their"):
        case.Server("ClusteredFL")
    case.Server("Staged")


def other_script(reply):
    reply.meta.pop(nvflare.KEY)


def other_version(reply):
    reply.meta[nvflare.KEY]["version"] = "0.0.1"


def other_rounds(reply):
    reply.meta[nvflare.KEY]["num_rounds"] = "many"


@pytest.mark.filterwarnings("ignore:site .* is not used")
@pytest.mark.parametrize(
    ("site", "spoil", "why"),
    [
        (1, other_script, r"; site site-2 is not used: its num_rounds is not the int"),
        (1, other_version, r"site-2 is not used: client 1 has version 0\.0\.1 of .* the server"),
        (1, other_rounds, "site-2 is not used: its num_rounds is not the int"),
        (0, lambda reply: None, "site-1-b is not used: client 0 is site site-1, which came first"),
        (2, lambda reply: None, r"the sites are clients \[0, 2\]: give run_client the numbers"),
    ],
)
def test_a_first_answer_that_is_wrong_ends_the_job_before_its_first_round(
    tmp_path, monkeypatch, site, spoil, why
):
    job = Controller(tmp_path, monkeypatch)
    job.aggregator.accept_model(job.ask(0))
    reply = job.ask(site)
    reply.meta["client_name"] += "-b" * (not site)
    spoil(reply)
    job.aggregator.accept_model(reply)
    with pytest.raises(FederationError, match=why):
        job.aggregator.aggregate_model()


@pytest.mark.filterwarnings("ignore:site .* is not used|round 1:")
def test_a_site_that_sends_something_else_later_is_dropped(tmp_path, monkeypatch):
    job = Controller(tmp_path, monkeypatch)
    job.run(1)
    replies = [job.ask(site) for site in range(3)]
    other_script(replies[1])
    replies[2].params = {"weights": object()}
    for reply in replies:
        job.aggregator.accept_model(reply)
    assert job.aggregator.aggregate_model().metrics["dropped"] == 2


def test_a_reply_that_comes_late_is_not_used(tmp_path, monkeypatch):
    job = Controller(tmp_path, monkeypatch)
    job.run(1)
    late = job.ask(0)
    job.round()
    job.aggregator.reset_stats()
    job.aggregator.accept_model(late)
    assert not job.aggregator._replies
    job.aggregator.accept_model(job.ask(0))
    assert list(job.aggregator._replies) == [0]


def test_a_site_that_comes_late_is_not_used(tmp_path, monkeypatch):
    job = Controller(tmp_path, monkeypatch)
    job.run(1)
    reply = job.ask(0)
    reply.meta["client_name"] = "site-9"
    with pytest.warns(UserWarning, match="site-9 is not used: it has joined after the first"):
        job.aggregator.accept_model(reply)


@pytest.mark.parametrize("site", ["hospital", "site-0"])
def test_a_site_without_a_number_needs_one(site):
    with pytest.raises(FederationError, match="give run_client the number"):
        nvflare.number_of(site)
