"""What people see while a federation trains, in a file and in a terminal."""

import functools
import io
from types import SimpleNamespace

import pytest
import rich.console
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop, OnUpdates, RoundProgress, progress
from lightning_fl.policies import Schedule


@pytest.fixture(autouse=True)
def _no_wishes_of_the_environment(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(train):
    """Fit a classifier of blobs and show it; return the loop."""

    def fit(progress, rounds=3, callbacks=(), **options):
        loop = FederatedLoop(policy=Schedule(lr=0.1, num_steps=1))
        options |= {"rounds": rounds, "enable_progress_bar": True}
        train(*callbacks, progress, loop=loop, **options)
        return loop

    return fit


@pytest.fixture
def terminal(monkeypatch):
    """A terminal, as a file."""
    file = io.StringIO()
    console = functools.partial(rich.console.Console, force_terminal=True, file=file, width=150)
    monkeypatch.setattr(rich.console, "Console", console)
    return file


# --- elsewhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "rounds", "shown"),
    [
        (20, 3, [1, 2, 3]),
        (4, 4, [1, 2, 3, 4]),
        (4, 9, [3, 6, 9]),
        (4, 10, [3, 6, 9, 10]),
        (1, 7, [7]),
    ],
)
def test_there_are_few_lines_however_many_rounds(run, capsys, lines, rounds, shown):
    run(RoundProgress(lines), rounds)
    found = capsys.readouterr().out.splitlines()
    assert [line.split(" · ")[0] for line in found] == [f"round {r}/{rounds}" for r in shown]


def test_a_line_has_no_metrics_of_earlier_rounds(run, capsys):
    run(RoundProgress(), rounds=4, check_val_every_n_epoch=2)
    found = capsys.readouterr().out.splitlines()
    assert ["val_acc" in line for line in found] == [False, True, False, True]
    assert all("train_loss" in line for line in found)


def test_a_line_has_the_time_of_a_round_and_what_is_left(run, capsys, monkeypatch):
    clock = iter([0.0, 40.0, 42.0, 45.0, 47.0])  # the start, and the ends of rounds: one compiles
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    run(RoundProgress(), rounds=4)
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.endswith(" · 40 s per round")
    assert second.endswith(" · 2 s per round · 0:00:04 left")
    assert third.endswith(" · 3 s per round · 0:00:02 left")
    assert fourth.endswith(" · 2 s per round")


class Late(OnUpdates):
    def on_client_updates(self, plan, clients, delta, dropped):
        causes = {0: "late", 2: "low_battery"}
        dropped.update({c: causes[c] for c in clients.tolist() if c in causes})
        return delta


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_a_line_counts_dropped_clients(run, capsys):
    run(RoundProgress(), rounds=1, callbacks=[Late()])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("dropped 2 of 4 clients")


def test_a_resumed_run_goes_on_where_it_was(run, trainer, data, tmp_path, capsys):
    path = tmp_path / "two.ckpt"
    module = ClientModule(nn.Linear(6, 3)).double()
    first = trainer(FederatedLoop(), 2)
    first.fit(module, datamodule=data())
    first.save_checkpoint(path)
    again = trainer(FederatedLoop(), 4, callbacks=[RoundProgress()], enable_progress_bar=True)
    again.fit(module, datamodule=data(), ckpt_path=path)
    found = capsys.readouterr().out.splitlines()
    assert [line.split(" · ")[0] for line in found] == ["round 3/4", "round 4/4"]


def test_progress_is_switched_off_and_on(run, capsys):
    progress = RoundProgress()
    progress.disable()
    run(progress)
    progress.print("a word")
    assert capsys.readouterr().out == ""
    progress.enable()
    progress.print("a word")
    assert capsys.readouterr().out == "a word\n"
    run(progress)
    assert len(capsys.readouterr().out.splitlines()) == 3


# --- in a terminal --------------------------------------------------------------------------------


class Look(RoundProgress):
    """Notes every line that is drawn, and draws as often as it may."""

    def __init__(self):
        super().__init__()
        self.drawn, self.completed = [], []

    def on_train_batch_end(self, *args):
        self._drawn = 0.0
        super().on_train_batch_end(*args)

    def _line(self, *args):
        self.drawn.append(super()._line(*args))
        return self.drawn[-1]

    def _draw(self, *args):
        super()._draw(*args)
        self.completed.append(self._bar.tasks[0].completed)


def test_a_line_in_a_terminal_moves_with_rounds_and_clients(run, terminal):
    progress = Look()
    loop = run(progress, rounds=2)
    assert {line.partition(" · ")[0] for line in progress.drawn} >= {"round 1/2", "round 2/2"}
    inside = [line for line in progress.drawn if "client" in line]
    for round in (1, 2):
        for client in range(1, 5):
            assert any(
                line.startswith(f"round {round}/2 · {client} of 4 clients done") for line in inside
            )
    accuracy = f"val_acc {loop.rows[0]['val_acc']:.4g}"
    assert not any(accuracy in line for line in inside if "round 1/2 · 1 of" in line)
    assert all(accuracy in line for line in inside if "round 2/2 · 1 of" in line)
    assert f"val_acc {loop.rows[1]['val_acc']:.4g}" in progress.drawn[-1]
    assert sorted(set(progress.completed)) == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
    assert progress.completed == sorted(progress.completed)
    # What was drawn is what is there to see.
    text = terminal.getvalue()
    assert all(line in text for line in inside)
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.filterwarnings("ignore:.*max_epochs")
def test_without_a_last_round_the_bar_has_no_end(run, terminal):
    from lightning.pytorch.callbacks import EarlyStopping

    progress = Look()
    stop = EarlyStopping("val_loss", patience=1, min_delta=99)
    run(progress, rounds=-1, callbacks=[stop])
    assert progress._bar.tasks[0].total is None
    assert "round 2 · 1 of 4 clients done" in terminal.getvalue()


class Break(ClientModule):
    def validation_step(self, batch, batch_idx):
        raise ZeroDivisionError


def test_after_an_exception_the_terminal_is_given_back(run, terminal):
    progress = RoundProgress()
    with pytest.raises(ZeroDivisionError):
        run(progress, module=Break(nn.Linear(6, 3)).double())
    assert not progress._bar.live.is_started
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")
