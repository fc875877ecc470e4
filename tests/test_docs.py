import inspect
import pkgutil
import re
import shutil
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

import extras
import lightning_fl
import pages
from child import python

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXTENSIONS = (
    "myst_nb",
    "sphinx-mathjax-offline",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
)
#: Pages whose code blocks run.
PAGES = [
    *sorted(DOCS.glob("tutorials/*.md")),
    DOCS / "concepts" / "plan.md",
    DOCS / "concepts" / "randomness.md",
    DOCS / "check.md",
    DOCS / "sweeps.md",
    DOCS / "results" / "trust.md",
]
#: Those that train much, or start processes that import everything anew.
LONG = (
    *("deployment", "flower", "lightning_cli", "reading_a_report", "several_gpus", "sweeps"),
    *("your_module", "your_rule"),
)
SLOW = [page for page in PAGES if "slow\n" in page.read_text()]
name_of = attrgetter("stem")
#: A signature in the reference, and what of it nobody could have written.
SIGNATURE = r"<dt class=\"sig.*?</dt>"
INTERNAL = r"lambda&gt;|&lt;function|&lt;class|&lt;object|&lt;factory|0x[0-9a-f]{6,}"
#: What a browser would load from elsewhere.
REMOTE = r'<(script|link|img|iframe)[^>]*(src|href)="(https?:)?//'
expected = pytest.mark.filterwarnings(
    "ignore:.*bottleneck", "ignore:Starting from v1.9.0", "ignore:.*dropped"
)


@expected
@pytest.mark.parametrize(
    "page",
    [
        *extras.marked([p for p in PAGES if p.stem not in LONG]),
        *extras.marked([p for p in PAGES if p.stem in LONG], pytest.mark.slow),
    ],
    ids=name_of,
)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, here, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # of a page before
    pages.run(page)


@pytest.mark.slow
@expected
@pytest.mark.parametrize("page", SLOW, ids=name_of)
def test_the_slow_code_of_a_page_runs_too(page, here):
    pages.run(page, but=("not-run",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("page", [p for p in PAGES if "needs=" in p.read_text()], ids=name_of)
def test_the_code_of_a_page_runs_with_the_extras_that_it_needs(page, here):
    """With `make extras`, which installs them."""
    for package in re.findall(r"needs=(\w+)", page.read_text()):
        pytest.importorskip(package, reason="needs an extra: make extras")
    pages.run(page)


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


def public():
    """Every name that a room says is public, as the room calls it."""
    for room in pkgutil.iter_modules(lightning_fl.__path__, "lightning_fl."):
        if room.name.endswith(("__", ".compat")):  # which changes names of the whole process
            continue
        module = import_module(room.name)
        for name in getattr(module, "__all__", dir(module)):
            thing = getattr(module, name)
            is_own = hasattr(module, "__all__") or getattr(thing, "__module__", "") == room.name
            if is_own and name[0] != "_" and (inspect.isclass(thing) or inspect.isfunction(thing)):
                # Where they are defined: files of the mathematics, and what types repeats.
                own = room.name in ("lightning_fl.functional", "lightning_fl.types")
                yield f"{thing.__module__ if own else room.name}.{name}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Sphinx's own; those of the pages fail the build
def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path, monkeypatch):
    generated = shutil.ignore_patterns("api", "trainer_options.md")
    shutil.copytree(DOCS, tmp_path / "docs", ignore=generated)
    for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"):  # pages include them
        shutil.copy(ROOT / f"{name}.md", tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")  # included by examples.md
    site = tmp_path / "site"
    strict = ["-q", "-W", "--keep-going"]
    # Pages of source code and Furo's navigation cannot warn, and take as long as all the rest.
    quick = ["-D", "html_theme=basic", "-D", f"extensions={','.join(EXTENSIONS)}"]
    quick += ["-D", "nb_execution_mode=off"]  # tests/test_notebooks.py runs them
    for name in ("PYTHONPATH", "PYTHONWARNINGS"):  # conf.py sets them
        monkeypatch.setenv(name, "")
    # Not in this process, where autodoc would leave other default values in all functions.
    python("-m", "sphinx", *strict, *quick, tmp_path / "docs", site, cwd=ROOT)
    api = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    known = set(re.findall(r'<dt [^>]*id="([\w.]+)"', api))
    assert set(public()) - known == set()
    assert (site / "_static" / re.search(r"_static/(mathjax/[\w-]+.js)", api)[1]).is_file()
    assert set(re.findall(INTERNAL, "".join(re.findall(SIGNATURE, api, re.DOTALL)))) == set()
    options = (site / "concepts" / "trainer_options.html").read_text()
    named = set(re.findall(r"<td><p><code[^>]*><span class=\"pre\">(\w+)<", options))
    assert named == set(inspect.signature(Trainer).parameters)
    for page in site.rglob("*.html"):  # the site needs no network
        assert not re.search(REMOTE, page.read_text()), page


def test_every_relative_link_leads_somewhere():
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page} links to {target}"
