"""The check of a whole run: what it finds, what it leaves alone, and what it prints."""

import os
from dataclasses import replace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor

from grids import others_slow
from hidden_state import GlobalNorm
from lightning_fl import ClientModule
from lightning_fl.callbacks import RoundCheckpoint
from lightning_fl.check import COLUMNS
from lightning_fl.objectives import FedDecorr, WeightDivergence
from lightning_fl.testing import check_federation
from lightning_fl.types import FederationError
from troubles import CALLBACKS_CARRY, CARRIED, HARMLESS, HOOKED, Troubled, Watches, made


def outcome(make, *columns, **options):
    (result,) = check_federation(make, columns=columns, **options)
    return result


# Each case is a run of two fits, in two processes.
@pytest.mark.parametrize("name", others_slow(("attribute", "closure", "logged loss"), CARRIED))
def test_order_finds_what_a_client_leaves_to_the_next(name):
    result = outcome(made(CARRIED[name]), "order")
    assert result.outcome == "different"
    assert result.difference > 0
    assert result.client is not None
    assert result.tensor in dict(Troubled().named_parameters()) | dict(Troubled().named_buffers())
    assert "store such a value in a buffer" in result.detail
    assert name != "attribute" or "Troubled.steps" in result.detail


@pytest.mark.parametrize("name", others_slow(("buffer", "list of losses", "dropout"), HARMLESS))
def test_order_accepts_what_no_client_leaves(name):
    assert outcome(made(HARMLESS[name], [Watches]), "order").outcome == "equal"


@pytest.mark.parametrize("kind", HOOKED)
@pytest.mark.parametrize("is_carried", [True, False])
def test_order_finds_state_of_hooks(kind, is_carried):
    kind = type(kind.__name__, (kind,), {"is_carried": is_carried})
    assert outcome(made(kind=kind), "order").outcome == ("different" if is_carried else "equal")


@pytest.mark.parametrize("kind", others_slow(CALLBACKS_CARRY[:1], CALLBACKS_CARRY))
def test_order_finds_state_of_callbacks(kind):
    result = outcome(made(lambda m: 1.0 + m.late, [kind]), "order")
    assert result.outcome == "different"
    assert f"{kind.__name__}." in result.detail or kind.__name__.startswith("Reads")


def test_order_names_first_what_differs_at_the_end():
    """Five attributes count steps, which is the same in any order, and one is of the last step."""

    def factor(module):
        for name in "abcde":
            setattr(module, name, getattr(module, name, 0) + 1)
        return CARRIED["previous loss"](module)

    assert "Troubled.late" in outcome(made(factor), "order").detail


class Warms(Troubled):
    """It counts rounds in an attribute, which no checkpoint has."""

    def on_train_epoch_start(self):
        self.steps += 1


def test_resume_finds_what_is_not_saved():
    make = made(lambda m: 1.0 + 0.1 * m.steps, kind=Warms)
    results = check_federation(make, columns=["order", "resume"])
    assert [result.outcome for result in results] == ["equal", "different"]
    assert "Warms.steps" in results[1].detail


def test_processes_finds_what_depends_on_the_rank():
    result = outcome(made(lambda m: 1.0 + m.global_rank), "processes")
    assert result.outcome == "different"
    assert outcome(made(), "processes").outcome == "equal"


def test_plain_finds_what_depends_on_the_loop():
    def factor(module):
        return 1.0 + any("Federated" in type(c).__name__ for c in module.trainer.callbacks)

    assert outcome(made(factor), "plain").outcome == "different"


class Simple(ClientModule):
    terms_of_loss = ()

    def __init__(self, factor):
        super().__init__(Troubled().net, self.terms_of_loss)


def test_a_module_passes_all_columns():
    results = check_federation(made(kind=Simple), rounds=3)
    assert [result.column for result in results] == list(COLUMNS)
    assert {result.outcome for result in results} == {"equal"}
    assert max(result.difference for result in results) < 1e-10


def test_refusals_have_a_reason_and_count_as_equal():
    result = outcome(made(lambda m: 1.0 + m.loss.item()), "vectorized")
    assert result.outcome == "refused"
    assert result.is_equal
    assert result.detail


class Mixes(Simple):
    """Its optimizer says that its steps are elementwise, and they are not."""

    def configure_optimizers(self):
        kind = type("Norm", (GlobalNorm,), {"federated_elementwise": True})
        return kind(self.parameters())


def test_vectorized_finds_an_optimizer_that_mixes_clients():
    assert outcome(made(kind=Mixes), "vectorized").outcome == "different"


def breaks(module):
    if module.global_rank == 1:
        raise RuntimeError("no second process [please]")
    return 1.0


def dies(module):
    return os._exit(3) if torch.distributed.is_initialized() else 1.0


@pytest.mark.parametrize(("step", "words"), [(breaks, "no second process"), (dies, "exit code 3")])
def test_an_error_of_one_process_is_reported(step, words):
    result = outcome(made(step), "processes")
    assert (result.outcome, result.is_equal) == ("failed", False)
    assert words in result.detail


class Stops(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = True


def test_fits_have_one_thread():
    """OpenMP may hang in a forked process."""

    def one_thread(module):
        assert torch.get_num_threads() == 1
        return 1.0

    def threaded():
        torch.set_num_threads(2)
        return made(one_thread)()

    assert outcome(threaded, "order").outcome == "equal"


def test_a_run_of_one_round_cannot_be_resumed():
    result = outcome(made(callbacks=[Stops]), "resume")
    assert (result.outcome, result.is_equal) == ("refused", True)
    assert "ends in its first round" in result.detail


@pytest.mark.slow
def test_checkpoints_loggers_and_workers_of_a_federation_are_no_obstacle(tmp_path):
    def make():
        run = made()()
        run.data.num_workers = 1
        checkpoint = RoundCheckpoint(dirpath=str(tmp_path))
        return replace(run, callbacks=LearningRateMonitor(), trainer={"callbacks": [checkpoint]})

    (tmp_path / "last.ckpt").write_text("of another run")
    assert outcome(make, "order").outcome == "equal"
    assert (tmp_path / "last.ckpt").read_text() == "of another run"


def test_a_federation_that_cannot_be_trained_is_refused():
    with pytest.raises(FederationError, match="its fit fails: client_fraction"):
        check_federation(made(client_fraction=2.0))
    with pytest.raises(FederationError, match=r"each of columns must be .* or plain, got 'all'"):
        check_federation(made(), columns=["all"])
    with pytest.raises(FederationError, match="rounds"):
        check_federation(made(), rounds=1)


# --- the command ----------------------------------------------------------------------------------


class Leaky(Troubled):
    """For a configuration."""

    def __init__(self, leaks: bool = False):
        super().__init__(CARRIED["attribute"] if leaks else HARMLESS["nothing"])


@pytest.mark.parametrize("leaks", [False, True])
def test_the_command_prints_a_table_and_exits_with_1_if_a_result_differs(leaks, tmp_path, cli):
    (tmp_path / "config.yaml").write_text(
        f"model: {{class_path: test_check.Leaky, init_args: {{leaks: {leaks}}}}}\n"
        "data: {class_path: Digits, init_args: {num_clients: 4}}\n"
        "federation: {buffers: average}\n"
        "trainer: {accelerator: cpu}\n"
    )
    words = ["check", "--config", "config.yaml", "--rounds=2", "--columns", "order", "resume"]
    table = cli(*words, "--data.init_args.batch_size=16", expect=int(leaks))
    assert [word in table for word in ("different", "Leaky.steps")] == [leaks, leaks]
    assert ("equal" in table) != leaks


@pytest.mark.parametrize(
    ("term", "expected"), [(WeightDivergence(0.1), "refused"), (FedDecorr(0.1), "equal")]
)
def test_terms_that_compare_with_the_round_are_no_error_of_plain(term, expected):
    result = outcome(made(kind=type("Pulled", (Simple,), {"terms_of_loss": [term]})), "plain")
    assert (result.outcome, result.is_equal) == (expected, True)
    assert ("start of the round" in result.detail) is (expected == "refused")


def test_mistakes_in_options_are_shown_before_anything_is_trained(cli):
    command = ("check", "--config", "digits.yaml")
    assert "each of columns must be order, " in cli(*command, "--columns", "sideways", expect=2)
    assert "max_epoch" in cli(*command, "--trainer.max_epoch=3", expect=2)
