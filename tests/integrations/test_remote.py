"""What happens to a server and its clients when something is lost, damaged or wrong."""

import re
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback

from apart import (
    CPU,
    ROUNDS,
    assert_same,
    by_the_loop,
    federation,
    made,
    net,
    replies_of,
    run,
    train,
)
from lightning_fl.aggregators import PFNM, FedAdam, FedBuff, Scaffold
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.exchange import Kept, file_of
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.objectives import ClientModule
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.types import FederationError
from payload import Payload
from two_classes import samples

#: Rounds and clients whose reply is lost.
LOST = {(0, 2), (1, 2), (2, 2), (1, 0)}


def module():
    return ClientModule(net())


class Learning(HyperparameterPolicy):
    """A policy that asks for the validation loss."""

    learns_from = frozenset({"val_loss"})

    def sample(self, round, clients):
        return {"num_steps": torch.tensor(1)}


# --- states and checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", [FedAdam(), Scaffold()])
def test_resumed_server_repeats_the_round_in_which_it_was_killed(tmp_path, rule):
    """The clients have trained in that round, and begin it again from their state before it."""
    file = tmp_path / "server.ckpt"
    first, clients = federation(module, rule, checkpoint=file)
    kept = run(first, clients, rounds=2)
    replies_of(clients, first.tasks(), kept)  # of which the server learns nothing
    again, _ = federation(module, rule, checkpoint=file)
    assert again.round == 2
    run(again, clients, ROUNDS - 2, kept)
    assert_same(again.module, by_the_loop(tmp_path, module, rule))


def test_checkpoint_of_a_server_is_one_of_lightning(tmp_path):
    file = tmp_path / "server.ckpt"
    server, clients = federation(module, checkpoint=file)
    run(server, clients, rounds=1)
    checkpoint = torch.load(file, weights_only=True)
    assert checkpoint["epoch"] == 1
    fresh = module()
    fresh.load_state_dict(checkpoint["state_dict"])
    assert_same(fresh, server.module)


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_replies_lost_in_several_rounds_in_a_row_lose_no_state(tmp_path):
    """The client continues from the state of its last used update, as a dropped one in the loop."""

    class Lost(Callback):
        def on_client_updates(self, plan, clients, delta, dropped):
            dropped.update((i, "late") for i in clients.tolist() if (plan.round, i) in LOST)
            return delta

    server, clients = federation(module, Scaffold())
    kept = {}
    for round in range(ROUNDS):
        replies = replies_of(clients, server.tasks(), kept)
        server.finish({i: reply for i, reply in replies.items() if (round, i) not in LOST})
    assert_same(server.module, by_the_loop(tmp_path, module, Scaffold(), samples, Lost()))
    dropped = [row["dropped"] for row in server.rows]
    assert dropped == [1, 2, 1, 0]


def test_client_keeps_the_states_of_its_last_used_and_its_last_update(tmp_path):
    kept = Kept().after(0, 11, {"c": torch.zeros(1)}).after(11, 13, {}).after(13, 16, {})
    assert sorted(kept.states) == [13, 16]
    assert sorted(kept.after(13, 18, {}).states) == [13, 18]  # update 16 was lost
    with pytest.warns(UserWarning, match="has lost its state after its last used update"):
        assert kept.at(11) == {}
    assert kept.at(0) == {}
    kept.after(16, 17, {"c": torch.ones(1)}).write(tmp_path / "client.pt")
    assert Kept.read(tmp_path / "client.pt").at(17)["c"] == 1


def of_torch(content):
    return lambda path: torch.save(content, path)


def flip_a_bit(path):
    Kept({7: {"c": torch.zeros(9999)}}).write(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b"PK"),
        flip_a_bit,
        of_torch([1, 2]),
        lambda path: torch.save({"states": Payload(path.parent / "ran")}, path),
    ],
)
def test_damaged_or_hostile_state_of_a_client_says_what_to_do(tmp_path, write):
    write(tmp_path / "client-0.pt")
    with pytest.raises(FederationError, match=r"client-0\.pt is damaged: restore it, or delete it"):
        Kept.read(tmp_path / "client-0.pt")
    assert not (tmp_path / "ran").exists()


def test_state_of_another_module_is_refused_before_a_client_trains():
    server, clients = federation(module, Scaffold())
    replies_of(clients, (tasks := server.tasks()), {})
    kept = Kept({5: {"part.0.control": torch.zeros(3)}})
    with pytest.raises(FederationError, match=r"client 0 keeps 'part\.0\.control' of shape \[3\]"):
        clients[0].train(replace(tasks[0], last=5), kept)


def test_file_of_a_killed_client_leaves_nothing(tmp_path):
    (left := tmp_path / ".client-0.pt.abcdefgh.tmp").touch()
    (other := tmp_path / ".client-10.pt.abcdefgh.tmp").touch()
    assert file_of(0, tmp_path) == tmp_path / "client-0.pt"
    assert (left.exists(), other.exists()) == (False, True)


def test_damaged_or_unwritable_checkpoint_is_named_before_clients_train(tmp_path):
    file = tmp_path / "new" / "server.ckpt"
    server, clients = federation(module, FedAdam(), checkpoint=file)
    run(server, clients, rounds=1)
    damaged, other = tmp_path / "damaged.pt", tmp_path / "other.pt"
    damaged.write_bytes(file.read_bytes()[:-500])
    torch.save({"state_dict": {}}, other)
    for path, match in [
        (damaged, r"damaged\.pt is damaged"),
        (other, r"other\.pt is damaged, or not a checkpoint"),
        (tmp_path, "cannot be written .Is a directory.: choose another file"),
        (damaged / "server.pt", r"server\.pt cannot be written .* choose another file"),
    ]:
        with pytest.raises(FederationError, match=match):
            federation(module, FedAdam(), checkpoint=path)


def test_resumed_server_names_a_changed_number_of_samples(tmp_path):
    server, clients = federation(module, checkpoint=tmp_path / "server.pt")
    run(server, clients, rounds=1)
    with pytest.warns(UserWarning, match="training samples is 65, was 60"):
        server.begin([13] * 5, [3] * 5, checkpoint=tmp_path / "server.pt")


def test_abandoned_round_leaves_the_last_global_model():
    server, clients = federation(module, Scaffold())
    run(server, clients, rounds=1)
    before = server.model()
    server.tasks()
    server.close()
    assert all(torch.equal(before[name], value) for name, value in server.model().items())


# --- clients that fail ----------------------------------------------------------------------------


def said(caught):
    """Return the texts of warnings."""
    return "\n".join(str(each.message) for each in caught)


def test_too_few_replies_keep_the_model():
    server, clients = federation(module, min_clients=2)
    before = server.model()
    with pytest.warns(UserWarning, match="round 1: ") as caught:
        metrics = server.finish({0: train(server, clients[0])})
    lost = "round 1: dropped 4 of 5 client updates: clients 1, 2, 3, 4 (dropped out)"
    assert lost in said(caught)
    assert "round 1: 1 of 5 clients returned, too few for min_clients=2 and FedAvg" in said(caught)
    assert (metrics["clients"], metrics["dropped"]) == (5, 4)
    assert all(torch.equal(before[name], value) for name, value in server.model().items())


def with_extra(reply, value):
    return replace(reply, extras={"control_change": value})


SPOILED = {
    "shape": (lambda r: replace(r, delta=r.delta[1:]), "43 values in torch.float64, and"),
    "dtype": (lambda r: replace(r, delta=r.delta.float()), "44 values in torch.float32"),
    "nan": (lambda reply: replace(reply, delta=reply.delta * torch.nan), r"\(non-finite values\)"),
    "nothing more": (lambda reply: replace(reply, extras={}), "requires control_change of the cli"),
    "more": (lambda reply: with_extra(reply, torch.ones(1, 1)), r"of shape \(44,\)"),
    "of two": (lambda reply: with_extra(reply, torch.ones(2, 44)), "not numbers of one client"),
    "number": (lambda reply: with_extra(reply, torch.tensor(torch.nan)), r"shape \[\] in"),
    "complex": (lambda reply: with_extra(reply, torch.ones(1, 44) * 1j), "torch.complex64, not "),
    "rate": (lambda reply: replace(reply, lr=float("nan")), "with the learning rate nan"),
    "large rate": (lambda reply: replace(reply, lr=1e9), r"learning rate 1e\+09, and was sent 0"),
    "samples": (lambda reply: replace(reply, num_samples=13), "it trained 13 .* had 12"),
    "client": (lambda reply: replace(reply, client=1), "reply, or that of client 1"),
    "round": (lambda reply: replace(reply, update=7), "it sent an earlier reply"),
    "cause": (lambda reply: replace(reply, dropped="x" * 999), r"\(dropped out\)"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_update_that_does_not_fit_drops_its_client_alone(name):
    spoil, message = SPOILED[name]
    server, clients = federation(module, Scaffold())
    expected, _ = federation(module, Scaffold())
    replies = replies_of(clients, server.tasks(), {})
    with pytest.warns(UserWarning, match="client 2 ") as caught:
        assert server.finish(replies | {2: spoil(replies[2])})["dropped"] == 1
    assert re.search(f"client 2 .*{message}", said(caught))
    replies = replies_of(clients, expected.tasks(), {})
    del replies[2]
    with pytest.warns(UserWarning, match=r"round 1: dropped 1 of 5 client updates: client 2 \("):
        expected.finish(replies)
    assert_same(server.module, expected.module)
    assert torch.equal(server.aggregator.control, expected.aggregator.control)
    last = {task.client: task.last for task in server.tasks()}
    assert [client for client, update in last.items() if not update] == [2]


class Diverges(ClientModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * torch.nan


def test_diverging_client_says_why_it_sends_nothing():
    server, clients = federation(lambda: Diverges(module().net))
    with pytest.warns(UserWarning, match="non-finite values|0 of 1 clients returned"):
        reply, kept = clients[0].train(server.tasks()[0], Kept())
    assert (reply.dropped, kept) == ("non_finite", Kept())
    with pytest.warns(UserWarning, match="round 1: ") as caught:
        assert server.finish({0: reply})["dropped"] == 5
    assert "clients 1, 2, 3, 4 (dropped out), client 0 (non-finite values)" in said(caught)


def test_sites_with_their_own_data_have_random_numbers_of_their_own():
    server, clients = federation(module, own=True)
    one, other = server.tasks()[:2]
    same = [clients[0].train(task, Kept())[0].delta for task in (one, one, other)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])  # the same samples in another order


# --- what is refused ------------------------------------------------------------------------------


def test_schedulers_are_refused():
    class Scheduled(ClientModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    scheduled = Scheduled(module().net)
    with pytest.raises(FederationError, match="Scheduled has a learning rate scheduler"):
        federation(lambda: scheduled)
    server, _ = federation(module)
    client = RemoteClient(scheduled, samples(), trainer=CPU)
    with pytest.raises(FederationError, match="Scheduled has a learning rate scheduler"):
        train(server, client)


def test_client_of_another_version_is_refused():
    server, clients = federation(module)
    task = replace(server.tasks()[0], version="0.0.1")
    with pytest.raises(FederationError, match=r"server has version 0\.0\.1 of .* the same version"):
        clients[0].train(task, Kept())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seed": 3}, "seed is not an option of a client, which has optimizer_state, buffers"),
        ({"optimizer_state": "keeps"}, "optimizer_state must be"),
        ({"trainer": {"max_epochs": 3}}, "cannot have max_epochs: the server says"),
        ({"trainer": {"min_epochs": 2}}, "cannot have min_epochs: the server says"),
        ({"trainer": {"callbacks": []}}, "cannot have callbacks: the server says"),
        ({"trainer": {"fast_dev_run": True}}, "cannot have fast_dev_run: the server says"),
        ({"trainer": {"accelerator": "cpu", "devices": 2}}, "and its Trainer has 2: set devices=1"),
    ],
)
def test_wrong_option_of_a_client_raises(options, match):
    with pytest.raises(FederationError, match=match):
        RemoteClient(module(), samples(), **options)


def test_client_without_samples_raises():
    client = RemoteClient(module(), samples(), trainer=CPU)
    with pytest.raises(FederationError, match="client 7 has no samples: the data has 5 clients"):
        client.work(7)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"aggregator": PFNM()}, "PFNM replaces the network"),
        ({"aggregator": FedBuff()}, "FedBuff simulates the times"),
        ({"policy": Learning()}, "Learning learns from val_loss"),
        ({"min_clients": 0}, "min_clients must be an integer of at least 1"),
        ({"phases": []}, "phases is not an option of a server, which has clients_per_round"),
    ],
)
def test_wrong_option_of_a_server_raises(options, match):
    with pytest.raises(FederationError, match=match):
        RemoteServer(made(module), **options)
