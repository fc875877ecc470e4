"""An optimizer is fresh for each client, its state is kept, and stacked clients may share it."""

import threading

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn, optim

import hidden_state as hidden
from grids import diagonal
from lightning_fl.optimizers import Adaptive, Combined, PFedMe
from lightning_fl.policies import Schedule
from lightning_fl.runners.optimizer import why_not_elementwise
from lightning_fl.types import FederationError
from only import Only


class Deltas(Callback):
    """Notes each client's update of the second round."""

    def __init__(self):
        self.by_client = {}

    def on_client_updates(self, plan, clients, delta, dropped):
        if plan.round == 1:
            self.by_client |= dict(zip(clients.tolist(), delta.clone(), strict=True))
        return delta


class Later(Only):
    """Samples the same client in the first round of each run, and then the given ones."""

    def sample(self, round, count, num_samples, generator):
        return self.clients if round else torch.tensor([1])


#: Optimizers that keep what they learn in all kinds of places.
KINDS = {kind.__name__: kind for kind in (*hidden.LEARNERS, hidden.GlobalNorm)}
KINDS |= {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
}


def scheduled(make, interval):
    def made(params):
        optimizer = make(params)
        if interval is None:
            return optimizer
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval},
        }

    return made


@pytest.fixture
def update(train):
    """Return the update of client 5 in the second round, alone or after other clients."""

    def of(module, *others, callbacks=()):
        deltas, federation = Deltas(), {"sampler": Later([*others, 5])}
        train(module, steps=4, federation=federation, callbacks=[deltas, *callbacks])
        return deltas.by_client[5]

    return of


@pytest.mark.parametrize(
    ("name", "interval"), [(n, i) for n in KINDS for i in (None, "epoch", "step")]
)
def test_a_client_starts_with_a_fresh_optimizer(name, interval, update, tiny):
    make = scheduled(KINDS[name], interval)
    found = [update(tiny(optimizer=make), *others) for others in ((2, 3), ())]
    assert found[0].abs().max() > 1e-4
    assert torch.equal(*found)


def test_a_client_draws_the_same_batches_and_dropout_whoever_trains_before(update, tiny):
    def dropping():
        return nn.Sequential(nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 3))

    assert torch.equal(*(update(tiny(net=dropping), *others) for others in ((2, 3), ())))


class Halves:
    """Changes options of the optimizer in a hook."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5


class HalvesFromOutside(Callback):
    def on_train_batch_end(self, trainer, *_):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5


@pytest.mark.parametrize("kind", ["SGD", "Counting"])
@pytest.mark.parametrize("how", [Halves, HalvesFromOutside])
def test_moved_options_go_back_at_the_next_client(how, kind, update, tiny):
    def found(*others):
        if issubclass(how, Callback):
            return update(tiny(optimizer=KINDS[kind]), *others, callbacks=[how()])
        return update(tiny(type("Own", (how, tiny.kind), {}), optimizer=KINDS[kind]), *others)

    assert torch.equal(found(2, 3), found())


def test_the_next_round_continues_from_the_options_of_the_longest_client(train, tiny):
    module = tiny(type("Own", (Halves, tiny.kind), {}))
    loop = train(module, steps=3)
    assert loop.fit.trainer.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**6


@pytest.mark.parametrize(("kind", "keep"), diagonal(hidden.LEARNERS, ["reset", "keep"]))
def test_what_an_optimizer_learned_is_resumed(kind, keep, train, tiny, flat, tmp_path):
    if kind is hidden.Attribute and keep == "keep":
        pytest.skip("its counter is in no state_dict")
    make = scheduled(kind, "step") if keep == "reset" else kind

    def run(rounds, **options):
        module = tiny(optimizer=make)
        federation = {"optimizer_state": keep}
        loop = train(module, steps=4, federation=federation, rounds=rounds, **options)
        loop.fit.trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return flat(module)

    undisturbed, _ = run(3), run(1)
    assert torch.equal(run(3, ckpt_path=str(tmp_path / "1.ckpt")), undisturbed)


@pytest.mark.parametrize(
    ("kind", "row"), [(hidden.Counting, "number.group0.step"), ("Adam", "optimizer.0.step")]
)
def test_a_client_keeps_what_state_dict_saves(kind, row, train, tiny):
    federation = {"optimizer_state": "keep", "sampler": Later([1, 5])}
    loop = train(tiny(optimizer=KINDS.get(kind, kind)), steps=4, federation=federation)
    assert [loop.store.get(client)[row].item() for client in (1, 5)] == [8, 4]


def test_a_kept_state_continues_like_one_optimizer(train, tiny, flat, data, blobs):
    """One client in two rounds of two steps is one round of four steps."""
    found = []
    for rounds, steps in ((2, 2), (1, 4)):
        module = tiny(optimizer=lambda p: optim.Adam(p, lr=0.1))
        options = {"federation": {"optimizer_state": "keep"}, "rounds": rounds, "steps": steps}
        train(module, datamodule=data(blobs(20), num_clients=1, batch_size=None), **options)
        found.append(flat(module))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_what_is_neither_a_tensor_nor_a_number_cannot_be_kept(train, tiny):
    class Named(hidden.Counting):
        def update(self, p, group):
            self.state[p]["phase"] = f"step {group['step']}"
            return p.grad

    train(tiny(optimizer=Named), rounds=1)
    with pytest.raises(FederationError, match=r"keep. does not support Named.* phase"):
        train(tiny(optimizer=Named), federation={"optimizer_state": "keep"}, rounds=1)


@pytest.mark.parametrize("kind", [hidden.SlowCopy, hidden.AnchorAttribute])
def test_an_optimizer_with_a_copy_of_its_parameters_is_refused(kind):
    with pytest.raises(FederationError, match=rf"{kind.__name__} cannot be reset .* a copy"):
        hidden.state_of(kind)


def test_an_optimizer_that_cannot_be_copied_is_refused():
    class Locked(hidden.Counting):
        def __init__(self, params):
            super().__init__(params)
            self.lock = threading.Lock()

    with pytest.raises(FederationError, match=r"Locked cannot be reset .* cannot be copied"):
        hidden.state_of(Locked)


def test_what_is_set_between_rounds_stays_and_what_a_step_changes_goes_back():
    learner = hidden.state_of(hidden.Learned)
    optimizer = learner.optimizer
    (group,) = optimizer.param_groups

    def step():
        learner.enter_step()
        optimizer.step()
        learner.complete_step()

    for p in group["params"]:
        p.grad = torch.ones_like(p)
    learner.reset()
    step()
    assert group["d"] > 0.5
    group["lr"] = 0.5  # of the schedulers, which restore it
    learner.reset()
    assert (group["lr"], group["d"]) == (0.5, 1e-3)
    group["d"], optimizer.note = 0.25, "by a callback"  # for the next clients
    learner.reset()
    step()
    learner.reset()
    assert group["d"] == 0.25
    assert optimizer.note == "by a callback"


def test_a_state_of_none_is_not_kept():
    learner = hidden.state_of(hidden.Counting)
    param, *_ = learner.optimizer.param_groups[0]["params"]
    learner.optimizer.state[param]["momentum_buffer"] = None
    assert learner.rows() == {}


def test_a_client_that_makes_no_step_leaves_nothing_to_the_next():
    learner = hidden.state_of(hidden.Counting)
    learner.reset()
    learner.load({"number.group0.step": torch.tensor(7)})
    learner.reset()
    assert "step" not in learner.optimizer.param_groups[0]


def test_a_policy_sets_the_rate_of_an_optimizer_without_step_hooks(train, tiny, flat):
    found = []
    for lr in (0.1, 0.01):
        module = tiny(optimizer=hidden.Lookahead)
        train(module, federation={"policy": Schedule(num_steps=3, lr=lr)}, rounds=1)
        found.append(flat(module))
    same = tiny(optimizer=lambda params: hidden.Lookahead(params, lr=0.01))
    train(same, steps=3, rounds=1)
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1], flat(same), rtol=0, atol=1e-12)


def test_an_optimizer_without_a_rate_trains_and_a_policy_cannot_set_it(train, tiny, flat):
    module, plain = tiny(optimizer=hidden.Relative), tiny()
    for each in (module, plain):
        train(each, steps=3, rounds=1)
    torch.testing.assert_close(flat(module), flat(plain), rtol=0, atol=1e-12)
    with pytest.raises(FederationError, match="the optimizer's learning rate is 0 or missing"):
        train(tiny(optimizer=hidden.Relative), federation={"policy": Schedule(lr=0.1)}, rounds=1)


def test_the_step_of_an_optimizer_is_its_own_again_after_the_fit(train, tiny):
    loop = train(tiny(optimizer=hidden.Lookahead))
    assert "step" not in vars(loop.fit.trainer.optimizers[0])


# --- stacked clients ------------------------------------------------------------------------------


def declared(kind):
    return type(kind.__name__, (kind,), {"federated_elementwise": True})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
        lambda p: optim.AdamW(p, lr=torch.tensor(0.01, dtype=torch.float64)),
        lambda p: optim.NAdam(p, lr=0.01),
        lambda p: optim.RAdam(p, lr=0.01),
        lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
        lambda p: optim.Adamax(p, lr=0.01, weight_decay=0.1),
        lambda p: Adaptive(p, "yogi", lr=0.01),
        PFedMe,
        lambda p: PFedMe(p, inner_steps=1),
        lambda p: Combined(PFedMe([next(p)]), optim.SGD(p, lr=0.1)),
    ],
)
def test_vectorized_clients_with_an_elementwise_optimizer_agree(make, agree, tiny):
    agree(lambda: tiny(optimizer=make), group_size=(3,), most_steps=2)


class Early(hidden.Counting):
    """State that the constructor makes, as Adagrad's."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.ones_like(p)

    def update(self, p, group):
        self.state[p]["sum"] += p.grad.square()
        return p.grad / self.state[p]["sum"]


def test_state_before_the_first_step_is_fresh_for_each_client(update, tiny, train):
    assert torch.equal(update(tiny(optimizer=Early), 2, 3), update(tiny(optimizer=Early)))
    with pytest.warns(UserWarning, match="Early has state before its first step"):
        train(tiny(optimizer=declared(Early)), 3)


@pytest.mark.parametrize(
    "make", [optim.ASGD, optim.Rprop, *map(declared, (hidden.Lookahead, hidden.Attribute))]
)
def test_different_rates_need_steps_proportional_to_the_rate(make, agree, train, tiny):
    def federation(lr):
        return {"policy": train.policy(lr=lr)}

    agree(lambda: tiny(optimizer=make), federation=federation(lr=False))
    with pytest.raises(FederationError, match="different learning rates"):
        train(tiny(optimizer=make), 3, federation=federation(lr=True))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (hidden.Counting, "Counting are not known to be elementwise"),
        (optim.Adafactor, "Adafactor are not known to be elementwise"),
        (optim.LBFGS, "LBFGS are not known to be elementwise"),
        (lambda p: Combined(optim.LBFGS(p)), "Combined are not known to be elementwise"),
    ],
)
def test_with_another_optimizer_clients_train_one_after_another(make, why, train, tiny, flat):
    plain, module = tiny(optimizer=make), tiny(optimizer=make)
    federation = {"policy": train.policy(lr=False)}
    train(plain, federation=federation)
    with pytest.warns(UserWarning, match=rf"one client after another, not at once: .*{why}"):
        train(module, 3, federation=federation)
    assert torch.equal(flat(plain), flat(module))


@pytest.mark.parametrize(
    ("make", "is_kept"),
    [
        (lambda p: optim.SGD(p, momentum=0.9), True),
        (lambda p: optim.SGD(p, momentum=0.9, dampening=0.1), False),
        (optim.Adam, False),
        (PFedMe, True),
        (lambda p: Adaptive(p, "adam"), True),
    ],
)
def test_only_a_state_of_each_client_can_be_kept(make, is_kept):
    optimizer = make([nn.Parameter(torch.ones(1, 2))])
    assert why_not_elementwise(optimizer, keep=False) is None
    why = why_not_elementwise(optimizer, keep=True)
    assert why is None if is_kept else "would share" in why
