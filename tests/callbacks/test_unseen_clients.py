"""Evaluation of the server model on clients that never train."""

import copy
import csv
import json
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from by_hand import descended
from keeping import keep, resume
from lightning_fl import ClientModule
from lightning_fl.aggregators import ClusteredFL, FedAvg, FedDyn, Gossip
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation, RunReport
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.objectives import Ditto, FedLC
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import PersonalizedPolicyGradient, Schedule
from lightning_fl.report import report
from lightning_fl.types import FederationError


@pytest.fixture
def data(blobs):
    def make(unseen=0.4, **options):
        rule = Dirichlet(0.5, min_size=10)
        options = {"partition": rule, "local_test_size": 0.3, "batch_size": 8} | options
        return FederatedDataModule(
            blobs(160), num_clients=5, seed=1, unseen_clients=unseen, **options
        )

    return make


def unseen(callback):
    return [row for row in callback.rows if "unseen" in row]


def accuracy(module, x, y):
    return (module(x).argmax(1) == y).double().mean().item()


def test_the_scores_by_hand(train, data):
    """The server model, and after one full-batch step of SGD, on samples that nobody trains on."""
    federation, callback = data(batch_size=None), PersonalizedEvaluation(steps=1)
    module, loop, _ = train(callback, datamodule=federation)
    rows = unseen(callback)
    assert [row["client"] for row in rows] == [3, 4]
    wanted = []
    for row, part, test in zip(
        rows, federation.unseen_parts, federation.local_tests[3:], strict=True
    ):
        personal = copy.deepcopy(module)
        server = module.net.state_dict()
        personal.net.load_state_dict(descended(server, federation.train.fetch(part), 1, 0.5))
        of_client = federation.train.fetch(test)
        wanted.append((accuracy(module, *of_client), accuracy(personal, *of_client)))
        assert (row["train_samples"], row["test_samples"]) == (len(part), len(test))
        assert (row["server"], row["personal"]) == pytest.approx(wanted[-1])
    last = loop.rows[-1]
    assert last["unseen_server/mean"] == pytest.approx((wanted[0][0] + wanted[1][0]) / 2)
    assert last["unseen_personal/worst"] == pytest.approx(min(after for _, after in wanted))
    assert last["unseen_personal/hurt"] == sum(b > a for b, a in wanted) / 2
    seen = [row["server"] for row in callback.rows[:3]]
    assert last["server/mean"] == pytest.approx(sum(seen) / 3)


def test_training_is_that_of_a_federation_without_them(train, data):
    """No sampler draws them, and no weight or count of the rule knows them."""
    alone = data()
    alone.setup("fit")
    alone.split = replace(alone.split, unseen=[], local_tests=[])
    alone._present(alone.parts)

    def trained(datamodule):
        rule = FedDyn(alpha=0.1)
        loop = FederatedLoop(rule, Schedule(lr=0.1), seed=3, client_fraction=0.7)
        torch.manual_seed(0)
        module = ClientModule(nn.Linear(6, 3), [FedLC(0.5)]).double()
        train(RunReport(0), module=module, datamodule=datamodule, loop=loop, rounds=3)
        return torch.cat([p.detach().flatten() for p in module.parameters()]), loop

    (with_them, loop), (without, _) = trained(data()), trained(alone)
    assert torch.equal(with_them, without)
    assert all(row["clients"] == 2 for row in loop.rows)


@pytest.mark.parametrize(
    ("rule", "local"),
    [(lambda: Gossip("ring"), ()), (ClusteredFL, ()), (FedAvg, ()), (FedAvg, ["net.1.*"])],
)
def test_they_start_from_the_model_of_the_server(train, data, rule, local):
    """Tensors that stay with clients have their initial values, which the module keeps."""
    federation, callback = data(), PersonalizedEvaluation(steps=0)
    torch.manual_seed(0)
    module = ClientModule(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))).double()
    loop = FederatedLoop(rule(), Schedule(lr=0.5), seed=0, local_parameters=local)
    train(callback, datamodule=federation, loop=loop, module=module)
    for row in unseen(callback):
        x, y = federation.train.fetch(federation.local_tests[int(row["client"])])
        assert row["server"] == pytest.approx(accuracy(module, x, y))
        assert local or "global" not in row


def test_every_kind_of_model_and_a_policy_that_knows_its_clients(train, data):
    policy = PersonalizedPolicyGradient([{"lr": 0.1, "num_steps": 2}, {"lr": 0.3, "num_steps": 4}])
    callback = PersonalizedEvaluation(steps=2, local_steps=9)
    torch.manual_seed(0)
    module, loop = ClientModule(nn.Linear(6, 3), [Ditto(0.1)]), FederatedLoop(policy=policy, seed=0)
    train(callback, datamodule=data(val_size=20), loop=loop, module=module.double())
    names = "client round train_samples test_samples unseen server kept personal local"
    assert [{*row} for row in unseen(callback)] == 2 * [{*names.split()}]


def test_a_resume_with_other_unseen_clients_is_refused(train, data, tmp_path):
    def resumed(**split):
        callback = PersonalizedEvaluation(steps=1)
        module, *_ = train(callback, datamodule=data(**split), **resume(tmp_path))
        return module, callback.rows

    train(PersonalizedEvaluation(steps=1), rounds=1, **keep(tmp_path))
    with pytest.raises(FederationError, match="its num_clients is"):
        resumed(unseen=0.2)
    with pytest.raises(FederationError, match="split of the data over clients"):
        resumed(unseen=["0", "1"])
    again, rows = resumed()
    whole = PersonalizedEvaluation(steps=1)
    module, *_ = train(whole)
    assert torch.equal(module.net.weight, again.net.weight)
    assert rows == whole.rows


def test_the_tables_and_the_report(train, data, tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    train(PersonalizedEvaluation(steps=1), callbacks=[RunReport()], logger=logger)
    rows = list(csv.DictReader((tmp_path / "clients.csv").read_text().splitlines()))
    assert [row["unseen"] for row in rows] == ["", "", "", "1", "1"]
    assert len((tmp_path / "participation.csv").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "environment.json").read_text())["clients"] == 3
    report([tmp_path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<dt>2 unseen clients, server (worst tenth" in page
    assert "<dt>2 unseen clients, personal (worst tenth" in page
    assert "<dt>unseen clients that fine-tuning made worse</dt>" in page
    assert "of 3 clients per round" in page
