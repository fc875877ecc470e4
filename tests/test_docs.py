import sys
from pathlib import Path

import pages
import pytest

DOCS = Path(__file__).parent.parent / "docs"
#: Pages whose code blocks run.
PAGES = [*sorted(DOCS.glob("tutorials/*.md")), DOCS / "sweeps.md"]
SLOW = [page for page in PAGES if "slow\n" in page.read_text()]
expected = pytest.mark.filterwarnings(
    "ignore:.*bottleneck", "ignore:Starting from v1.9.0", "ignore:round .* skipped"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in; pages write modules of their own there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page"])  # the command line reads it
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@expected
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, here):
    pages.run(page)


@pytest.mark.slow
@expected
@pytest.mark.parametrize("page", SLOW, ids=lambda page: page.stem)
def test_the_slow_code_of_a_page_runs_too(page, here):
    pages.run(page, slow=True)


@expected
def test_the_sweep_ends_trials_that_go_badly(here):
    Path("sweep.py").write_text(pages.blocks(DOCS / "sweeps.md", "python")[0])
    import optuna
    from sweep import objective

    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=2.0))
    study.optimize(objective, n_trials=1)
    assert study.trials[0].state == optuna.trial.TrialState.PRUNED
    assert len(study.trials[0].intermediate_values) == 1
    assert [path.name for path in Path("runs/sweep/0").iterdir()] == ["1"]  # the first seed alone
