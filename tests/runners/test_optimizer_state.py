import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD, Adam

import hidden_state as hidden
from grids import diagonal
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule
from lightning_fl.runners.fresh import check_fresh
from lightning_fl.samplers import ClientSampler

#: Those whose step for one client does not depend on others.
SEPARABLE = hidden.LEARNERS[:3]


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


@pytest.mark.parametrize("kind", hidden.LEARNERS)
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
def test_vectorized_an_optimizer_that_learns_outside_of_its_state_agrees(kind, agree, tiny, train):
    policy = train.policy(lr=kind is not hidden.Lookahead)  # its step is not linear in the rate
    agree(
        lambda: tiny(optimizer=kind),
        group_size=(3,),
        steps_per_batch=2,
        federation={"policy": policy},
    )


def scheduled(kind):
    """An optimizer with a schedule over steps, whose state holds parameter groups too."""

    def make(params):
        optimizer = kind(params)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return make


@pytest.mark.parametrize(("kind", "keep"), diagonal(hidden.LEARNERS, ["reset", "keep"]))
def test_what_an_optimizer_learned_is_resumed(kind, keep, train, tiny, flat, tmp_path):
    make = scheduled(kind) if keep == "reset" else kind

    def run(rounds, **options):
        module = tiny(optimizer=make)
        federation = {"policy": Schedule(num_steps=4), "optimizer_state": keep}
        loop = train(module, federation=federation, rounds=rounds, **options)
        loop.fit.trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return flat(module)

    undisturbed, _ = run(3), run(1)
    assert torch.equal(run(3, ckpt_path=str(tmp_path / "1.ckpt")), undisturbed)


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


def test_what_is_set_between_steps_stays_and_what_a_step_changes_goes_back():
    learner = hidden.state_of(hidden.Learned)
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
    assert hidden.state_of(kind, lr=0.1).is_simple
    assert not hidden.state_of(type("Own", (kind,), {"__module__": "own"}), lr=0.1).is_simple


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
