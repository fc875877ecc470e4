import hashlib
import signal
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import nn

import processes
from forks import Started
from grids import others_slow
from lightning_fl import ClientModule, ClientParallelStrategy, VectorizedClients
from lightning_fl.aggregators import PFNM, FedAvg
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.context import Federation
from lightning_fl.federation import processes as of_fit
from lightning_fl.objectives import FedProto
from lightning_fl.policies import Schedule
from lightning_fl.types import Cohort, FederationError

#: The others are slow.
QUICK = (
    processes.KEPT, *processes.ACTS,
    "one client, median", "lost clients", "started by hooks",
    "logs of hooks, processes that join", "vectorized, fixed groups",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_group_is_left():
    """A fit in this process leaves its group, and later ones believe in it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="session")
def found(place, request):
    """What each process of 1 and of 3 found in the cases of the session."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    asked = {item.callspec.params.get("case") for item in items if hasattr(item, "callspec")}
    asked |= {processes.KEPT, "lost clients"}
    cases, shared = (
        [case for case in of if case in asked] for of in (processes.CASES, processes.SHARED)
    )
    runs = [
        Started(count, place / f"output.{count}", processes.train_all, count, place, cases, shared)
        for count in (3, 1)
    ]
    for run in runs:
        codes, output = run.finish(timeout=900)
        assert not any(codes), output
    return {count: [load(place, count, rank) for rank in range(count)] for count in (1, 3)}


def load(place, count, rank):
    return torch.load(place / f"found.{count}.{rank}.pt")


def found_by(count, folder, function, *arguments):
    """Run a function of ``processes.py`` on a number of processes; return what each found."""
    run = Started(count, folder / "output", function, count, folder, *arguments)
    codes, output = run.finish()
    assert not any(codes), output
    return [load(folder, count, rank) for rank in range(count)]


def hashed(one):
    """The hash of the parameters and buffers that a run ended with."""
    digest = hashlib.sha256()
    for name, tensor in sorted(one["state"].items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


@pytest.mark.parametrize("case", others_slow(QUICK, processes.CASES))
def test_the_number_of_processes_changes_no_bit_and_each_knows_the_same(found, case):
    alone, together = found[1][0][case], [each[case] for each in found[3]]
    for each in together:
        # Without fixed groups, other clients train at once.
        if case == "vectorized":
            assert difference(each["state"], alone["state"]) < 1e-12
        else:
            assert hashed(each) == hashed(alone)
        assert each["participation"] == alone["participation"]
        assert each["accuracies"] == alone["accuracies"]
        assert each["rows"] == together[0]["rows"]
        assert each["store"].keys() == alone["store"].keys()
        for client, rows in alone["store"].items():
            assert difference(rows, each["store"][client]) < 1e-12
    for one, other in zip(alone["rows"], together[0]["rows"], strict=True):
        # What validation and training log acts on some runs.
        assert other == (one if case in processes.ACTS else pytest.approx(one, abs=1e-6))
    assert together[0]["test"] == [pytest.approx(found, abs=1e-6) for found in alone["test"]]


@pytest.mark.parametrize("case", processes.SHARED)
def test_processes_that_share_samples_train_as_one_and_know_the_same(found, case):
    alone, (first, *others) = found[1][0][case], [each[case] for each in found[3]]
    for other in others:
        assert hashed(other) == hashed(first)
        assert other["store"].keys() == first["store"].keys() == alone["store"].keys()
        for client, rows in first["store"].items():
            assert difference(rows, other["store"][client]) == 0
    if case != "batchnorm":  # whose statistics are those of the samples of process 0
        assert difference(first["state"], alone["state"]) < 1e-12
        for client, rows in alone["store"].items():
            assert difference(rows, first["store"][client]) < 1e-12


@pytest.mark.slow
def test_four_processes_give_the_bits_of_one(tmp_path):
    fixed = ["vectorized, fixed groups", "vectorized, augmented"]
    cases = [processes.ACTS[0], *fixed, "one client, median", "lost clients"]
    (alone,) = found_by(1, tmp_path, processes.train, cases)
    for each in found_by(4, tmp_path, processes.train, cases):
        for case, one in each.items():
            assert hashed(one) == hashed(alone[case])


def test_with_float32_the_bits_are_the_same(found):
    assert hashed(found[1][0]["float32"]) == hashed(found[3][0]["float32"])


def test_the_cases_do_something(found):
    cases = found[1][0]
    assert cases[processes.KEPT]["store"]
    lost = [row["dropped_clients"] for row in cases["lost clients"]["rows"]]
    assert lost == ["1 2 3 4", "0 2 3 4"]
    assert cases[processes.KEPT]["rows"][-1]["largest"] > 0
    names = [name for name in processes.CASES if name in cases]
    assert len({hashed(cases[name]) for name in names}) == len(names)


@pytest.mark.parametrize("count", [1, 3])
def test_a_run_resumes_bit_equal_on_as_many_processes(found, count):
    for each in found[count]:
        assert difference(each[processes.KEPT]["state"], each["resumed"]["state"]) == 0
        assert each[processes.KEPT]["rows"] == each["resumed"]["rows"]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_a_run_resumes_on_another_number_of_processes(found, place, tmp_path, before, after):
    checkpoint = str(place / f"resumed.{before}" / "last.ckpt")
    resumed = found_by(after, tmp_path, processes.resume, checkpoint)[0]["resumed"]
    assert difference(found[1][0][processes.KEPT]["state"], resumed["state"]) == 0
    assert len(resumed["rows"]) == 3


@pytest.fixture(scope="session")
def failed(tmp_path_factory):
    """Runs in which process 1 fails, one after the other and at once."""
    folders = {how: tmp_path_factory.mktemp(how) for how in ("raise", "kill", "freeze")}
    return {
        how: (folder, Started(2, folder / "output", processes.fail, how, 2, folder))
        for how, folder in folders.items()
    }


@pytest.mark.parametrize("how", ["raise", "kill", pytest.param("freeze", marks=pytest.mark.slow)])
def test_a_process_that_fails_ends_the_run(failed, how):
    folder, run = failed[how]
    run.processes[0].join(80)
    assert run.processes[0].exitcode  # it has ended by itself, and not well
    codes, output = run.finish(0 if how == "freeze" else 10)
    assert codes[1]
    if how == "raise":
        assert "a client failed" in output
        assert "In round 2, process 1, client" in output
    if how == "freeze":
        assert "another process failed or did not respond within the timeout" in output
    # The round before is safe, and goes on without the one that failed.
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    assert checkpoint["callbacks"]["FederatedLoop"]["round"] == 1


def test_a_process_that_fails_ends_those_that_it_has_started():
    """They may be frozen, and hold on to what they print to for ever."""
    strategy = ClientParallelStrategy()
    strategy._launcher = _SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    with subprocess.Popen(["sleep", "100"]) as process:
        strategy._launcher.procs = [process]
        strategy.on_exception(ValueError())
        assert process.wait(20) == -signal.SIGKILL


def test_a_metric_that_a_process_never_meets_is_refused(tmp_path):
    run = Started(2, tmp_path / "output", processes.miss_a_metric, 2, tmp_path)
    codes, output = run.finish(timeout=90)
    assert all(codes)
    assert "the metric training_step.train_accuracy was not logged on processes" in output
    assert "[1]" in output


def test_buffers_that_processes_write_differently_are_those_of_the_first(tmp_path):
    first, second = found_by(2, tmp_path, processes.count_in_validation)
    assert first[:2] == second[:2]
    assert first[1] > 0


# --- in this process ------------------------------------------------------------------------------


def client_module():
    return ClientModule(nn.Linear(6, 3), optimizer=partial(torch.optim.SGD, lr=0.1)).double()


@pytest.fixture
def parallel(trainer):
    """A Trainer of this process alone."""

    def make(*callbacks, strategy="client_parallel", **options):
        loop = FederatedLoop(policy=Schedule(num_steps=40))
        return trainer(loop, 2, callbacks, strategy=strategy, devices=1, **options)

    return make


def test_one_process_is_a_federation_as_without_it(parallel, data):
    models = []
    for strategy in ("auto", "client_parallel"):
        L.seed_everything(3, verbose=False)
        model, fit = client_module(), parallel(strategy=strategy)
        fit.fit(model, datamodule=data())
        models.append(model.state_dict())
    assert difference(*models) == 0
    # Everything is as it was.
    assert "log" not in vars(model)
    assert "_broadcast_sigterm_tensor" not in vars(fit.fit_loop.epoch_loop)


def test_ranks_are_not_asked_before_every_batch(parallel, data, monkeypatch):
    asked = []
    kind = type(parallel().fit_loop.epoch_loop)
    monkeypatch.setattr(
        kind, "_broadcast_sigterm_tensor", lambda loop: asked.append(loop.batch_idx)
    )

    class Ask(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()

    parallel(Ask()).fit(client_module(), datamodule=data(num_clients=3))
    assert asked == [0, 50, 100] * 2


@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_loss_of_an_idle_step_is_real(is_hidden):
    """Also in a phase of frozen parameters, which hides all others from the optimizer.

    Otherwise all gradients are zero: hooks of the module may expect each of them.
    """
    strategy, module = ClientParallelStrategy(), L.LightningModule()
    module.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    module.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    module.bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
    strategy.connect(module)
    strategy.is_idle, strategy.optimizers = True, [torch.optim.SGD(module.parameters())]
    if is_hidden:
        strategy.optimizers[0].param_groups[0]["params"] = [module.frozen]
    strategy.training_step().backward()
    assert module.weight.grad.tolist() == [0, 0]
    if not is_hidden:
        assert module.bias.grad.tolist() == [0, 0]


def test_a_failed_fit_leaves_no_idle_process(parallel, data):
    class Fails(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            trainer.strategy.is_idle = True  # as in a process without a client
            raise ValueError("on purpose")

    fit = parallel(Fails())
    with pytest.raises(ValueError, match="on purpose"):
        fit.fit(client_module(), datamodule=data())
    assert not fit.strategy.is_idle


def test_a_process_that_has_failed_saves_and_does_not_wait(parallel, data, tmp_path, monkeypatch):
    waits = []

    class Fails(L.Callback):
        def on_train_batch_end(self, *_):
            for name in ("barrier", "all_reduce"):
                monkeypatch.setattr(torch.distributed, name, lambda *_, **__: waits.append(1))
            raise ValueError("on purpose")

    saves = ModelCheckpoint(tmp_path, save_last=True, save_on_exception=True)
    with pytest.raises(ValueError, match="on purpose"):
        parallel(Fails(), saves, enable_checkpointing=True).fit(client_module(), datamodule=data())
    assert (tmp_path / "last.ckpt").exists()
    assert not waits


def test_without_a_federation_it_is_refused(trainer, data):
    plain = trainer(False, strategy="client_parallel", devices=1)
    with pytest.raises(FederationError, match="requires a FederatedLoop: add one"):
        plain.fit(client_module(), datamodule=data())


@pytest.mark.parametrize("synced", ["by the Trainer", "in the module"])
def test_batches_of_different_clients_are_not_mixed(parallel, data, synced):
    module = client_module()
    module.norm = torch.nn.BatchNorm1d(2)
    if synced == "in the module":
        module.norm = torch.nn.SyncBatchNorm(2)
    fit = parallel(sync_batchnorm=synced == "by the Trainer")
    with pytest.raises(FederationError, match="SyncBatchNorm would mix the batches of different"):
        fit.fit(module, datamodule=data())
    assert isinstance(module.norm, torch.nn.SyncBatchNorm) == (synced == "in the module")


@pytest.mark.parametrize(
    ("strategy", "wrap", "name"),
    [("auto", lambda m: m, "SingleDeviceStrategy"), ("ddp", VectorizedClients, "DDPStrategy")],
)
def test_another_strategy_of_several_processes_is_refused(
    parallel, data, monkeypatch, strategy, wrap, name
):
    fit, module = parallel(strategy=strategy), wrap(client_module())
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    with pytest.raises(FederationError, match=rf"{name} is not supported .*='client_parallel'"):
        fit.callbacks[0].setup(fit, module, "fit")


def test_what_needs_all_samples_of_a_client_is_refused_if_processes_share_them():
    matching = PFNM()
    for refuse, rule in ((FedProto(1.0).check, FedAvg()), (matching.setup, matching)):
        shared = Federation(4, Cohort(4, 4), shares_samples=True, aggregator=rule)
        with pytest.raises(FederationError, match="strategy='client_parallel'"):
            refuse(shared)


def test_values_that_differ_between_processes_are_refused(monkeypatch):
    every = ["a", "a", "b"]
    monkeypatch.setattr(of_fit, "gathered", lambda value: every)
    strategy = ClientParallelStrategy()
    made = of_fit.Processes(SimpleNamespace(global_rank=1, world_size=3, strategy=strategy))
    with pytest.raises(FederationError, match="processes 0 and 2 have different data: seed it"):
        made.check_same("data: seed it", "a")
    every[2] = "a"
    made.check_same("data: seed it", "a")


def test_timeout_is_positive():
    with pytest.raises(FederationError, match="timeout must be a finite number greater than 0"):
        ClientParallelStrategy(timeout=0)
