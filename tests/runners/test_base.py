"""What every runner does, sequential or vectorized."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl.runners import SequentialRunner, TensorList, VectorizedClients, client_runner
from lightning_fl.runners.vectorized_runner import VectorizedRunner
from lightning_fl.types import FederationError, ServerState


class Mixed(LightningModule):
    """Two parameters, a floating buffer, one buffer that counts and one of flags."""

    def __init__(self, kind=torch.optim.SGD, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.bias = nn.Parameter(torch.tensor(5.0))
        self.register_buffer("mean", torch.tensor([6.0]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("absent", None)
        self.configure_optimizers = lambda: kind(self.parameters(), **{"lr": 0.1} | options)


@pytest.fixture(params=["plain", "vectorized"])
def runner(request):
    """A module's runner, sequential or vectorized; ``lr`` and others are the optimizer's."""

    def make(module=None, buffers="average", keep=False, **options):
        user = Mixed(**options) if module is None else module
        user = user if request.param == "plain" else VectorizedClients(user)
        made = client_runner(user, buffers, [user.configure_optimizers()], keep)
        made.group_size = user
        return made

    return make


def load(runner, lr=0.1, rows=None):
    """Begin one client, from where the server is."""
    server = runner.read()
    state = ServerState(server.vector[None], server.counters)
    runner.load(state, [{} if rows is None else rows], [lr])
    return state


def parameters(runner):
    return runner.stacks.params if isinstance(runner, VectorizedRunner) else runner.named_parameters


def buffers(runner):
    """The client's buffers, to be changed in place."""
    if isinstance(runner, VectorizedRunner):
        return {name: buffer[0] for name, buffer in runner.stacks.buffers.items()}
    return runner.named_buffers


def step(runner, gradient=1.0):
    for parameter in parameters(runner).values():
        parameter.grad = torch.full_like(parameter, gradient)
    if isinstance(runner, VectorizedRunner):
        active = torch.ones(runner.count, dtype=torch.bool)
        before = runner.before_step(active)
        runner.optimizer.step()
        runner.after_step(before, active)
    else:
        runner.optimizer.step()


def ends(runner, state):
    """Where the client is."""
    return (state.vector + runner.collect(state)[0])[0].tolist()


# --- vectors --------------------------------------------------------------------------------------


def test_tensors_are_read_and_written_as_one_vector():
    tensors = [torch.tensor([[0.0, 2], [1, 3]]).T, torch.tensor(9.0), torch.zeros(0)]
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


# --- a module's state -----------------------------------------------------------------------------


def test_the_state_is_parameters_then_floating_buffers_and_counters_apart(runner):
    state = runner().read()
    assert state.vector.tolist() == [1, 2, 3, 4, 5, 6]
    assert state.counters.tolist() == [7, 1, 0]


def test_a_parameter_that_is_used_twice_is_one(runner):
    module = Mixed()
    module.again = nn.Linear(2, 2, bias=False)
    module.again.weight = module.weight
    made = runner(module)
    state = load(made, lr=1.0)
    assert state.vector.shape == (1, 6)
    step(made)
    assert ends(made, state) == pytest.approx([0, 1, 2, 3, 4, 6])


@pytest.mark.parametrize(
    ("kind", "delta", "counters"),
    [
        ("average", [1, 1, 1, 1, 1, 10], [9, 1, 0]),
        ("server", [1, 1, 1, 1, 1, 0], [7, 1, 0]),
        ("local", [1, 1, 1, 1, 1, 10], [9, 1, 0]),
    ],
)
def test_a_client_returns_how_far_it_moved(runner, kind, delta, counters):
    made = runner(buffers=kind)
    start = load(made)
    step(made, gradient=-10)
    buffers(made)["mean"] += 10
    buffers(made)["count"] += 2
    found, counted = made.collect(start)
    assert found.shape == (1, 6)
    assert found[0].tolist() == pytest.approx(delta)
    assert counted.tolist() == [counters]
    assert start.vector.tolist() == [[1, 2, 3, 4, 5, 6]]


# --- the learning rate ----------------------------------------------------------------------------


def test_a_clients_learning_rate_holds_inside_the_step_only(runner):
    made = runner()
    start = load(made, lr=0.5)
    step(made)
    assert ends(made, start)[4] == pytest.approx(5 - 0.5)
    assert made.optimizer.param_groups[0]["lr"] == 0.1
    start = load(made, lr=0.1)
    step(made)
    assert ends(made, start)[4] == pytest.approx(start.vector[0, 4].item() - 0.1)


def test_no_learning_rate_can_have_no_ratio(runner):
    made = runner(lr=0.0)
    load(made, lr=0.0)
    with pytest.raises(FederationError, match=r"sets lr=0.5.* Give the optimizer a positive lr"):
        load(made, lr=0.5)


def test_a_closed_runner_leaves_the_optimiser_alone(runner):
    made = runner()
    start = load(made, lr=0.5)
    made.close()
    step(made)
    assert ends(made, start)[4] == pytest.approx(5 - 0.1)


# --- what clients keep for themselves -------------------------------------------------------------


def test_a_module_has_what_its_client_started_from_until_the_fit_ends():
    module = Mixed()
    module.federated_global_parameters = {}
    made = client_runner(module, "average", [module.configure_optimizers()], False)
    assert type(made) is SequentialRunner
    load(made)
    step(made)
    assert module.federated_global_parameters["bias"].item() == 5
    assert module.bias.item() != 5
    made.close()
    assert module.federated_global_parameters == {}


def copies(rows):
    return {name: row.clone() for name, row in rows.items()}


def test_strides_do_not_matter():
    tensor = torch.arange(6.0).view(2, 3).T
    vector = TensorList([tensor], torch.float32)
    assert vector.read().tolist() == [0, 3, 1, 4, 2, 5]
    vector.write(torch.arange(6.0))
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_client_starts_from_its_local_buffers(runner):
    made = runner(buffers="local")
    load(made)
    buffers(made)["mean"] += 10
    buffers(made)["count"] += 2
    buffers(made)["flags"][1] = True
    rows = copies(made.rows()[0])
    assert rows.keys() == {"buffer.mean", "buffer.count", "buffer.flags"}
    made.write(ServerState(torch.tensor([1.0, 2, 3, 4, 5, 6]), torch.tensor([7, 1, 0])))
    load(made)
    assert buffers(made)["mean"].tolist() == [6]
    start = load(made, rows=rows)
    assert (buffers(made)["mean"].tolist(), buffers(made)["count"].item()) == ([16], 9)
    assert buffers(made)["flags"].tolist() == [True, True]
    assert ends(made, start)[4] == 5
