"""Where clients train: the tensors of a module, loaded and collected."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl.lanes import ModuleLane, TensorList
from lightning_fl.types import FederationError, ServerState


class Mixed(LightningModule):
    """Two parameters, a floating buffer, one buffer that counts and one of flags."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.bias = nn.Parameter(torch.tensor(5.0))
        self.register_buffer("mean", torch.tensor([6.0]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False]))


def sgd(module, **options):
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1} | options)


@pytest.fixture
def lane():
    def make(module=None, buffers="average", keep=False, **options):
        module = Mixed() if module is None else module
        made = ModuleLane(module, buffers, sgd(module, **options), keep)
        made.module = module
        return made

    return make


def step(lane, gradient=1.0):
    for parameter in lane.module.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    lane.optimizer.step()


# --- vectors --------------------------------------------------------------------------------------


def test_tensors_are_read_and_written_as_one_vector():
    tensors = [torch.arange(4.0).view(2, 2), torch.tensor(9.0), torch.zeros(0)]
    vector = TensorList(tensors, torch.float32)
    assert vector.read().tolist() == [0, 1, 2, 3, 9]
    vector.write(torch.tensor([5.0, 6.0, 7.0, 8.0, 1.0]))
    assert tensors[0].tolist() == [[5, 6], [7, 8]]
    assert tensors[1].item() == 1


def test_what_is_read_is_a_copy():
    tensor = torch.ones(2)
    for tensors in ([tensor], [tensor, torch.ones(1)]):
        vector = TensorList(tensors, torch.float32)
        vector.read().zero_()
        assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("dtypes", "wide"),
    [
        ([torch.float32, torch.float64], torch.float64),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.bfloat16], torch.bfloat16),
        ([torch.complex64, torch.float64], torch.float64),
        ([torch.bool, torch.uint8, torch.int32], torch.int32),
    ],
)
def test_the_vector_has_a_dtype_that_holds_all_of_them(dtypes, wide):
    tensors = [torch.tensor([1, 0], dtype=dtype) for dtype in dtypes]
    vector = TensorList(tensors, torch.float32)
    assert vector.dtype == wide
    vector.write(vector.read())
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        assert tensor.dtype == dtype
        assert tensor.tolist() == [1, 0]


def test_a_complex_number_is_two_real_ones():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    vector = TensorList([tensor], torch.float32)
    assert vector.read().tolist() == [1, 2, 3, -4]
    vector.write(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    assert tensor.tolist() == [5 + 6j, 7 + 8j]


def test_strides_do_not_matter():
    tensor = torch.arange(6.0).view(2, 3).T
    vector = TensorList([tensor], torch.float32)
    assert vector.read().tolist() == [0, 3, 1, 4, 2, 5]
    vector.write(torch.arange(6.0))
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_no_tensors_are_an_empty_vector_of_the_given_dtype():
    vector = TensorList([], torch.int64)
    assert vector.read().shape == (0,)
    assert vector.read().dtype == torch.int64
    vector.write(vector.read())


# --- a module's state -----------------------------------------------------------------------------


def test_the_state_is_parameters_then_floating_buffers_and_counters_apart(lane):
    state = lane().read()
    assert state.vector.tolist() == [1, 2, 3, 4, 5, 6]
    assert state.counters.tolist() == [7, 1, 0]


def test_a_state_that_is_written_is_the_modules_and_the_optimiser_begins_anew(lane):
    made = lane(momentum=0.9)
    step(made)
    assert len(made.optimizer.state) == 2
    made.write(ServerState(torch.arange(6.0), torch.tensor([1, 0, 1])))
    assert made.module.weight.tolist() == [[0, 1], [2, 3]]
    assert made.module.mean.tolist() == [5]
    assert (made.module.count.item(), made.module.flags.tolist()) == (1, [False, True])
    assert len(made.optimizer.state) == 0


def test_a_parameter_that_is_used_twice_is_one():
    module = LightningModule()
    module.first = nn.Linear(2, 2, bias=False)
    module.second = nn.Linear(2, 2, bias=False)
    module.second.weight = module.first.weight
    assert ModuleLane(module, "average", sgd(module), False).read().vector.shape == (4,)


@pytest.mark.parametrize(
    ("buffers", "delta", "counters"),
    [
        ("average", [1, 1, 1, 1, 1, 10], [9, 1, 0]),
        ("server", [1, 1, 1, 1, 1, 0], [7, 1, 0]),
        ("local", [1, 1, 1, 1, 1, 10], [9, 1, 0]),
    ],
)
def test_a_client_returns_how_far_it_moved(lane, buffers, delta, counters):
    made = lane(buffers=buffers)
    start = made.read()
    made.load(start, {}, 0.1)
    step(made, gradient=-10)
    made.module.mean += 10
    made.module.count += 2
    found, counted = made.collect(start)
    assert found.shape == (1, 6)
    assert found[0].tolist() == pytest.approx(delta)
    assert counted.tolist() == counters
    assert start.vector.tolist() == [1, 2, 3, 4, 5, 6]


# --- the learning rate ----------------------------------------------------------------------------


def test_a_clients_learning_rate_holds_inside_the_step_only(lane):
    made = lane()
    made.load(made.read(), {}, 0.5)
    step(made)
    assert made.module.bias.item() == pytest.approx(5 - 0.5)
    assert made.optimizer.param_groups[0]["lr"] == 0.1
    made.load(made.read(), {}, 0.1)
    step(made)
    assert made.module.bias.item() == pytest.approx(5 - 0.5 - 0.1)


def test_other_groups_keep_their_ratio_to_the_first(lane):
    module = Mixed()
    groups = [{"params": [module.weight], "lr": 0.2}, {"params": [module.bias], "lr": 0.8}]
    made = ModuleLane(module, "average", torch.optim.SGD(groups), False)
    made.module = module
    made.load(made.read(), {}, 0.1)
    step(made)
    assert module.weight[0, 0].item() == pytest.approx(1 - 0.1)
    assert module.bias.item() == pytest.approx(5 - 0.4)
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.2, 0.8]


def test_a_scheduler_stays_in_force(lane):
    module = Mixed()
    optimizer = sgd(module)
    # It begins at half of the rate and ends at the whole.
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=1)
    made = ModuleLane(module, "average", optimizer, False)
    made.module = module
    assert made.base_lr == 0.1
    made.load(made.read(), {}, 0.2)
    step(made)
    scheduler.step()
    step(made)
    assert module.bias.item() == pytest.approx(5 - 0.1 - 0.2)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_no_learning_rate_can_have_no_ratio(lane):
    made = lane(lr=0.0)
    made.load(made.read(), {}, 0.0)
    with pytest.raises(FederationError, match=r"sets lr=0.5 .* give the optimiser a positive lr"):
        made.load(made.read(), {}, 0.5)


def test_a_closed_lane_leaves_the_optimiser_alone(lane):
    made = lane()
    made.load(made.read(), {}, 0.5)
    made.close()
    step(made)
    assert made.module.bias.item() == pytest.approx(5 - 0.1)


# --- what clients keep for themselves -------------------------------------------------------------


def test_a_client_keeps_nothing_by_default(lane):
    made = lane(momentum=0.9)
    step(made)
    assert made.rows() == {}


def test_a_client_finds_its_buffers_again(lane):
    made = lane(buffers="local")
    server = made.read()
    made.module.mean += 10
    made.module.count += 2
    made.module.flags[1] = True
    rows = {name: row.clone() for name, row in made.rows().items()}
    assert rows.keys() == {"buffer.mean", "buffer.count", "buffer.flags"}
    made.load(server, {}, 0.1)
    assert made.module.mean.tolist() == [6]
    made.load(server, rows, 0.1)
    assert (made.module.mean.tolist(), made.module.count.item()) == ([16], 9)
    assert made.module.flags.tolist() == [True, True]
    assert made.module.bias.item() == 5


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
    ],
)
def test_a_client_goes_on_with_its_optimisers_state(kind, options):
    """Two steps in two rounds are two steps in one, where the server does not move."""
    ends = []
    for rounds in (1, 2):
        module = Mixed()
        made = ModuleLane(
            module, "average", kind(module.parameters(), lr=0.1, **options), keep_optimizer=True
        )
        made.module = module
        step(made, 1.0)
        if rounds == 2:
            now, rows = made.read(), {n: r.clone() for n, r in made.rows().items()}
            made.write(ServerState(torch.zeros(6), now.counters))
            kept = {name: row.clone() for name, row in rows.items()}
            made.load(now, rows, 0.1)
        step(made, 3.0)
        ends.append(made.read().vector)
    assert torch.equal(*ends)
    # What was kept is another round's too: a step must not reach into it.
    assert all(torch.equal(rows[name], kept[name]) for name in kept)


def test_a_state_that_is_not_a_tensor_cannot_be_kept(lane):
    made = lane(keep=True)
    made.optimizer.state[made.module.bias] = {"momentum_buffer": None}
    assert made.rows() == {}
    made.optimizer.state[made.module.bias] = {"history": [1, 2]}
    with pytest.raises(FederationError, match=r"keep cannot keep history of SGD.* Choose reset"):
        made.rows()
