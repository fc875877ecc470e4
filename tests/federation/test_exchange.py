"""Parts of a client's work: what they get, remember, add to gradients and send."""

import pytest
import torch

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedAvg
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.client_part import ClientPart
from lightning_fl.federation.results import is_finite
from lightning_fl.objectives import Proximal
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from written_plainly import Uneven, vector

SIZE, LR = 21, 0.1  # parameters of the module, learning rate


class Noting(ClientPart):
    """Counts the rounds of each client, and moves it by a constant gradient."""

    def __init__(self, shift=0.0, sent=None, left=None):
        self.shift, self.sent, self.left, self.seen = shift, sent, left, []

    def initial_memory(self, federation):
        return {"rounds": torch.zeros((), dtype=torch.int64)}

    def start(self, client, memory, broadcast):
        self.seen.append((client.round, client.clients.tolist(), memory["rounds"].tolist()))
        self.broadcast = broadcast
        layout = client.federation.layout
        rows = torch.full((len(client.clients), layout.num_parameters), self.shift)
        shift = layout.split(rows.double())
        client.add_to_gradients(lambda params, gradients: {n: shift[n] for n in params})

    def end(self, client, memory):
        memory["rounds"] = memory["rounds"] + 1
        if self.left is not None:
            memory |= self.left(len(client.clients))
        if self.sent is not None:
            return {"sent": self.sent(client)}
        return {"lr": client.lr, "steps": client.num_steps, "delta": client.delta.clone()}


class Rule(FedAvg):
    """FedAvg with a part, which notes the updates."""

    def __init__(self, part):
        super().__init__()
        self.part, self.updates = part, []

    def client_parts(self):
        return [self.part]

    def broadcast(self, plan):
        return {"round": torch.tensor([plan.round, 7.0])}

    def update(self, clients):
        self.updates.append(clients)
        super().update(clients)


def module(optimizer=lambda p: torch.optim.SGD(p, lr=LR), terms=()):
    torch.manual_seed(0)
    return ClientModule(torch.nn.Linear(6, 3), terms=terms, optimizer=optimizer).double()


def loss_of(vector, samples, client):
    """The mean loss of a linear model on all samples of a client, and its gradient."""
    vector = vector.clone().requires_grad_()
    weight, bias = vector[:18].view(3, 6), vector[18:]
    x, y = (t[samples.parts[client]] for t in samples.train.tensors)
    loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
    return loss.detach(), torch.autograd.grad(loss, vector)[0]


def run(fit, samples, part, group_size=None, rounds=3, made=None, **options):
    made, rule = made or module(), Rule(part)
    user = made if group_size is None else VectorizedClients(made, group_size, compile=False)
    loop = FederatedLoop(rule, **{"policy": Uneven(), "clients_per_round": 3} | options, seed=1)
    fit(user, loop, samples, rounds=rounds)
    return rule, loop


def one_step(fit, samples, part, group_size=None, **options):
    """Let all clients take a step."""
    options |= {"policy": Schedule(num_steps=1), "clients_per_round": 4}
    return run(fit, samples, part, group_size, rounds=1, **options)


@pytest.mark.parametrize("group_size", [None, 2])
def test_a_part_gets_its_clients_and_sends_with_their_updates(fit, data, group_size):
    part = Noting()
    rule, loop = run(fit, data(), part, group_size)
    assert torch.equal(part.broadcast["round"], torch.tensor([2.0, 7.0]))
    for update in rule.updates:
        clients = update.clients
        assert torch.equal(update.extras["steps"], 1 + clients % 3)
        assert torch.equal(update.num_steps, 1 + clients % 3)
        torch.testing.assert_close(update.extras["lr"], 0.1 + 0.02 * clients.double())
        assert torch.equal(update.lr, update.extras["lr"])
        assert torch.equal(update.extras["delta"], update.delta)
    rounds = {}
    for _, clients, counts in part.seen:
        for client, count in zip(clients, counts, strict=True):
            assert count == rounds.get(client, 0)
            rounds[client] = count + 1
    assert {c: int(rows["part.0.rounds"]) for c, rows in loop.store.rows.items()} == rounds
    assert max(rounds.values()) > 1
    # Two numbers down; a delta and two numbers of 8 bytes up, beside the update.
    assert loop.rows[0]["bytes_down"] == 3 * (8 * SIZE + 8)
    assert loop.rows[0]["bytes_up"] == 3 * (8 * SIZE + 8 * SIZE + 16)


@pytest.mark.parametrize("group_size", [None, 2])
def test_a_term_is_added_to_every_gradient(fit, data, group_size):
    """With plain SGD each local step moves by the rate times the term."""
    plain, shifted = (run(fit, data(), Noting(s), group_size, rounds=1)[0] for s in (0.0, 1e-9))
    for one, other in zip(plain.updates, shifted.updates, strict=True):
        moved = (one.num_steps * one.lr)[:, None] * 1e-9
        torch.testing.assert_close(
            one.delta - other.delta, moved.expand(-1, SIZE), rtol=1e-4, atol=0
        )


def test_a_term_is_gone_in_the_next_round(fit, data):
    """Clients of a later stage train without the part of an earlier one."""

    class Once(Noting):
        def start(self, client, memory, broadcast):
            if client.round == 0:
                super().start(client, memory, broadcast)

    once, never = (run(fit, data(), part, rounds=2)[0] for part in (Once(1.0), Noting(0.0)))
    for one, other in zip(once.updates[3:], never.updates[3:], strict=True):
        assert float((one.delta - other.delta).norm()) < 0.5 * float(other.delta.norm())


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize("group_size", [None, 3])
def test_a_client_that_sends_nan_is_dropped_and_remembers_nothing(fit, data, group_size):
    def sent(client):
        return torch.where(client.clients == 2, torch.nan, 1.0)[:, None].expand(-1, 4)

    rule, loop = run(fit, data(), Noting(sent=sent), group_size)
    taken = {c for update in rule.updates for c in update.clients.tolist()}
    assert 2 not in taken
    assert 2 not in loop.store.rows
    assert any(row["dropped_clients"] == "2" and row["non_finite"] == 1 for row in loop.rows)


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (lambda k: {"more": torch.zeros(k)}, r"stores {.*'more'.* declare every name"),
        (lambda k: {"rounds": torch.zeros(k, 2)}, r"stores {\'rounds\': \(\(\d, 2\), .* declares"),
        (lambda k: {"rounds": torch.zeros(k)}, r"torch.float32\)} .* declares .* torch.int64"),
        (lambda k: {"rounds": torch.zeros(k + 1).long()}, r"\(\(2,\), .* declares .*\(\(1,\)"),
    ],
)
def test_memory_that_was_not_declared_is_refused(fit, data, left, message):
    with pytest.raises(FederationError, match=message):
        run(fit, data(), Noting(left=left))


@pytest.mark.parametrize("group_size", [None, 2])
def test_mean_losses_and_gradients_are_those_of_all_samples(fit, data, group_size):
    found = {}

    class Measuring(ClientPart):
        def start(self, client, memory, broadcast):
            losses, gradients = client.mean_losses(), client.mean_gradients()
            for row, c in enumerate(client.clients.tolist()):
                found.setdefault(c, (losses[row], gradients[row]))

        def end(self, client, memory):
            return {}

    samples, start = data(), vector(module())
    one_step(fit, samples, Measuring(), group_size)
    assert len(found) == 4
    for client, (loss, gradient) in found.items():
        expected, of_all = loss_of(start, samples, client)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, of_all, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group_size", [None, 2])
def test_clients_start_from_other_models(fit, data, group_size):
    """One local step from the other model, with a term that is 0 there."""
    found = {}

    class Moving(ClientPart):
        def start(self, client, memory, broadcast):
            self.shift = torch.stack([torch.arange(SIZE) * 0.01 * (1 + c) for c in client.clients])
            models = client.received + self.shift
            self.seen = client.mean_losses(models), client.batch_gradients(models)
            self.before = client.mean_losses()
            client.start_from(models)

        def end(self, client, memory):
            for row, c in enumerate(client.clients.tolist()):
                seen = *(each[row] for each in self.seen), self.before[row]
                found[c] = self.shift[row], client.delta[row].clone(), *seen
            return {}

    samples, start = data(batch_size=1000), vector(module())
    one_step(fit, samples, Moving(), group_size, made=module(terms=[Proximal(mu=10.0)]))
    assert len(found) == 4
    for client, (shift, delta, loss, batch_gradient, before) in found.items():
        expected, gradient = loss_of(start + shift, samples, client)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(before, loss_of(start, samples, client)[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(delta, shift - LR * gradient, rtol=0, atol=1e-12)
        torch.testing.assert_close(batch_gradient, gradient, rtol=0, atol=1e-12)


def test_batches_before_the_first_step_have_a_stream_of_their_own(fit, data):
    """Each call has the next batch; the batches differ between rounds, and steps are as before."""
    seen = []

    class Reading(ClientPart):
        def start(self, client, memory, broadcast):
            if client.clients.tolist() == [0]:
                for _ in range(2 * int(client.num_batches)):
                    seen.append(client.batch_gradients(torch.zeros_like(client.received))[0])

        def end(self, client, memory):
            return {}

    def train(part):
        made = module()
        policy, samples = Schedule(num_steps=2), data(batch_size=2)
        run(fit, samples, part, None, 2, made, policy=policy, clients_per_round=4)
        return samples, vector(made)

    samples, trained = train(Reading())
    _, expected = train(Noting())
    assert torch.equal(trained, expected)
    per_round = len(seen) // 2
    per_epoch = per_round // 2
    assert per_epoch > 1
    _, whole = loss_of(torch.zeros(SIZE, dtype=torch.float64), samples, 0)
    for first in range(0, len(seen), per_epoch):
        mean = torch.stack(seen[first : first + per_epoch]).mean(0)
        torch.testing.assert_close(mean, whole, rtol=0, atol=1e-12)
    assert not any(torch.equal(a, b) for a, b in zip(seen, seen[per_round:], strict=False))


@pytest.mark.parametrize("group_size", [None, 2])
def test_buffers_that_stay_with_clients_stay_at_a_start(fit, data, group_size):
    found = {}

    class Moving(ClientPart):
        def start(self, client, memory, broadcast):
            client.start_from(torch.zeros_like(client.received))

        def end(self, client, memory):
            for row, c in enumerate(client.clients.tolist()):
                found[c] = client.delta[row] + client.received[row]
            return {}

    net = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3))
    made = ClientModule(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)).double()
    one_step(fit, data(), Moving(), group_size, made=made, buffers="local")
    for model in found.values():
        assert (model[:30] == 0).all()  # parameters and running means
        torch.testing.assert_close(model[30:], torch.full((3,), 0.9).double())  # from 1, not 0


def test_values_are_checked_whatever_their_type():
    delta = torch.zeros(2, 3)
    extras = {"count": torch.tensor([1, 2]), "is": torch.tensor([True, False])}
    assert is_finite(delta, extras).tolist() == [True, True]
    extras["phase"] = torch.tensor([[1.0], [float("inf")]])
    assert is_finite(delta, extras).tolist() == [True, False]
