import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.optim import SGD, Adam

import hidden_state as hidden
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.lanes.optimizer_state import OptimizerState, check_fresh
from lightning_fl.policies import Schedule
from lightning_fl.samplers import ClientSampler
from lightning_fl.types import FederationError

#: Optimizers that learn outside of their state, and can be made fresh.
LEARNERS = [hidden.Counting, hidden.Attribute, hidden.Lookahead, hidden.Learned]
#: Those whose step for one client does not depend on others.
SEPARABLE = LEARNERS[:3]


class Deltas(Callback):
    """Notes each client's update of the first round."""

    def __init__(self):
        self.by_client = {}

    def on_client_updates(self, plan, clients, delta, dropped):
        if plan.round == 0:
            self.by_client |= dict(zip(clients.tolist(), delta.clone(), strict=True))
        return delta


class Only(ClientSampler):
    def __init__(self, *clients):
        self.clients = clients

    def sample(self, round, count, num_samples, generator):
        return torch.tensor(self.clients)


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_client_does_not_see_what_the_optimizer_learned_from_others(kind, train, tiny):
    found = []
    for clients in ((2, 3, 5), (5,)):
        deltas = Deltas()
        federation = {"policy": Schedule(num_steps=4), "sampler": Only(*clients)}
        module = tiny(optimizer=kind)
        train(module, federation=federation, rounds=1, callbacks=[deltas])
        found.append(deltas.by_client[5])
    assert found[0].abs().max() > 1e-3
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", SEPARABLE)
def test_lanes_agree_with_an_optimizer_that_learns_outside_of_its_state(kind, agree, tiny, train):
    policy = train.policy(lr=kind is not hidden.Lookahead)  # its step is not linear in the rate
    agree(
        lambda: tiny(optimizer=kind), lanes=(3,), steps_per_batch=2, federation={"policy": policy}
    )


def scheduled(kind):
    """An optimizer with a schedule over steps, whose state holds parameter groups too."""

    def make(params):
        optimizer = kind(params)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return make


@pytest.mark.parametrize("keep", ["reset", "keep"])
@pytest.mark.parametrize("kind", LEARNERS)
def test_what_an_optimizer_learned_is_resumed(kind, keep, train, tiny, flat, tmp_path):
    make = scheduled(kind) if keep == "reset" else kind

    def run(rounds, **options):
        module = tiny(optimizer=make)
        federation = {"policy": Schedule(num_steps=4), "optimizer_state": keep}
        loop = train(module, federation=federation, rounds=rounds, **options)
        loop._trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return flat(module)

    undisturbed, _ = run(4), run(2)
    assert torch.equal(run(4, ckpt_path=str(tmp_path / "2.ckpt")), undisturbed)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (hidden.Counting, "number.0.group.0.step"),
        (hidden.Attribute, "number.0.attribute.0.calls"),
        (hidden.Lookahead, "number.0.group.0.count"),
    ],
)
def test_a_client_keeps_all_that_its_optimizer_learned(kind, row, train, tiny):
    policy = Schedule(num_steps=4)
    federation = {"policy": policy, "optimizer_state": "keep", "sampler": Only(2, 5)}
    loop = train(tiny(optimizer=kind), federation=federation)
    steps = 8 * (4 if kind is hidden.Attribute else 1)  # it counts parameters, too
    assert [loop.store.get(client)[row].item() for client in (2, 5)] == [steps] * 2


def state(kind, **options):
    params = [
        nn.Parameter(torch.rand(3, 2)),
        nn.Parameter(torch.rand(2)),
        nn.Parameter(torch.rand(())),
    ]
    return OptimizerState(kind(params, **options))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", [*LEARNERS, hidden.Matrices, hidden.GlobalNorm, hidden.Sharpness])
def test_an_optimizer_that_can_be_made_fresh_is_left_alone(kind, keep):
    learner = state(kind)
    before = [p.detach().clone() for g in learner.optimizer.param_groups for p in g["params"]]
    check_fresh(learner, keep)
    after = [p for g in learner.optimizer.param_groups for p in g["params"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert learner.optimizer.state == {}
    assert all("step" not in group for group in learner.optimizer.param_groups)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (hidden.SlowCopy, "SlowCopy cannot start fresh .* slow, a copy of its parameters"),
        (hidden.AnchorAttribute, "AnchorAttribute cannot start fresh .* slow, a copy of its"),
        (hidden.Closed, "Closed cannot start fresh .* hidden state .* Choose another optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_made_fresh_is_refused(kind, why):
    with pytest.raises(FederationError, match=why):
        check_fresh(state(kind), keep=False)


def test_an_optimizer_that_cannot_be_tried_is_refused():
    class Broken(hidden.Counting):
        def update(self, p, group):
            raise KeyError("hessian")

    with pytest.raises(FederationError, match=r"Broken cannot be tried .*KeyError: 'hessian'"):
        check_fresh(state(Broken), keep=False)


def test_what_is_not_a_tensor_or_a_number_cannot_be_kept():
    class Named(hidden.Counting):
        def update(self, p, group):
            group["phase"] = f"step {group['step']}"
            return p.grad

    check_fresh(state(Named), keep=False)
    with pytest.raises(FederationError, match=r"keep cannot keep all that Named learns.* phase"):
        check_fresh(state(Named), keep=True)


def test_a_rate_that_the_optimizer_changes_itself_goes_with_no_scheduler():
    class Decaying(hidden.Counting):
        def update(self, p, group):
            group["lr"] *= 0.9
            return p.grad

    learner = state(Decaying)
    check_fresh(learner, keep=False)
    torch.optim.lr_scheduler.ExponentialLR(learner.optimizer, 0.9)
    with pytest.raises(FederationError, match=r"Decaying changes lr .* leave the scheduler out"):
        check_fresh(learner, keep=False)


def test_what_is_set_between_steps_stays_and_what_a_step_changes_goes_back():
    learner = state(hidden.Learned)
    check_fresh(learner, keep=False)
    learner.watch()
    (group,) = learner.optimizer.param_groups
    for p in group["params"]:
        p.grad = torch.ones_like(p)
    learner.optimizer.step()
    group["lr"], group["momentum"] = 0.5, 0.3
    learner.optimizer.note = "set by a callback"
    assert group["d"] > 0.5
    learner.reset()
    assert (group["lr"], group["momentum"], group["d"]) == (0.5, 0.3, 1e-3)
    assert learner.optimizer.note == "set by a callback"
    group["d"] = 0.25  # by a callback, for the next clients
    learner.optimizer.step()
    learner.reset()
    assert group["d"] == 0.25


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_torch_optimizers_are_not_watched(kind):
    assert state(kind, lr=0.1).is_simple
    assert not state(type("Own", (kind,), {"__module__": "own"}), lr=0.1).is_simple


def test_a_policy_sets_the_rate_of_an_optimizer_without_step_hooks(train, tiny, flat):
    found = []
    for lr in (0.1, 0.01):
        module = tiny(optimizer=hidden.Lookahead)
        train(module, federation={"policy": Schedule(num_steps=3, lr=lr)}, rounds=1)
        found.append(flat(module))
    same = tiny(optimizer=lambda params: hidden.Lookahead(params, lr=0.01))
    train(same, federation={"policy": Schedule(num_steps=3)}, rounds=1)
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1], flat(same), rtol=0, atol=1e-12)


def test_the_step_of_an_optimizer_is_its_own_again_after_the_fit(trainer, tiny, data):
    module = tiny(optimizer=hidden.Lookahead)
    made = trainer(FederatedLoop(buffers="average"), rounds=1)
    made.fit(module, datamodule=data())
    assert "step" not in vars(made.optimizers[0])
