"""The pages of the methods: every method of a paper has a section, and what it shows runs."""

import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import lightning_fl
import pages
import quick_cli
from layouts import mnist_layout
from lightning_fl import aggregators, objectives, optimizers, policies, samplers, transforms

FOLDER = Path(__file__).parents[1] / "docs" / "methods"
CONFIGS = Path(__file__).parents[1] / "configs"
INDEX = (FOLDER / "index.md").read_text()
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "index")
METHODS = [
    pytest.param(section, id=f"{page.stem}-{section.splitlines()[0]}")
    for page in PAGES
    for section in re.split("^## ", page.read_text(), flags=re.MULTILINE)[1:]
]
PARTS = ["Equation", "When to use it", "Configuration", "Result", "Paper"]
NEEDED = {"LoRA": "peft", "DPFedAvg": "dp_accounting", "DPSGD": "opacus"}


@pytest.fixture
def method(request, tmp_path):
    """The section of a method, as a page."""
    page = tmp_path / "method.md"
    page.write_text(f"# {request.param}")
    return page


each_method = pytest.mark.parametrize("method", METHODS, indirect=True)


def anchor(title):
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def named(page):
    """Return the class names to which a page refers."""
    return set(re.findall(r"\{py:class\}`~lightning_fl\.\w+\.(\w+)`", page.read_text()))


def of_papers():
    """Yield the public classes whose documentation has the year of a paper."""
    for room in (aggregators, objectives, optimizers, policies, samplers, transforms):
        for name in getattr(room, "__all__", dir(room)):
            kind = getattr(room, name)
            is_own = inspect.isclass(kind) and kind.__module__.startswith(room.__name__)
            if is_own and re.search(r"(19|20)\d\d[,):;]", kind.__doc__ or ""):
                yield name


def needs(page):
    """Skip a page whose extra is not installed."""
    for name, package in NEEDED.items():
        if re.search(rf"\b{name}\b", page.read_text()) and find_spec(package) is None:
            pytest.skip(f"needs {package}")


def config(page, folder):
    """Write the configuration of a page to a file; return its path."""
    (text,) = pages.blocks(page, "yaml")
    path = folder / "method.yaml"
    path.write_text(text)
    return path


def test_method_of_a_paper_has_a_section():
    # Bases, which cite a paper for one of their methods, and parts of other methods.
    bases = {"Compression", "Adaptive", "NeuronMatching", "AsynchronousAggregator"}
    missing = set(of_papers()) - set().union(*map(named, PAGES)) - bases
    assert missing == set()


def test_overview_links_every_section():
    toc = re.findall(r"^(\w+)$", INDEX.partition("```{toctree}")[2], re.MULTILINE)
    assert sorted(toc) == [page.stem for page in PAGES]
    sections = {
        (page.stem, anchor(title))
        for page in PAGES
        for title in re.findall("^## (.*)$", page.read_text(), re.MULTILINE)
    }
    assert set(re.findall(r"\]\((\w+)\.md#([\w-]+)\)", INDEX)) == sections


@each_method
def test_section_has_all_parts_and_refers_to_its_classes(method):
    text = method.read_text()
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == PARTS
    assert named(method)
    assert len(text.splitlines()) <= 70
    assert "$$" in text.partition("### Equation")[2].partition("### When")[0]


@each_method
def test_configuration_of_a_section_is_valid(method, tmp_path):
    needs(method)
    quick_cli.parse("--config", CONFIGS / "digits.yaml", "--config", config(method, tmp_path))


@each_method
def test_python_of_a_section_runs(method):
    needs(method)
    names = pages.run(method)
    assert any(type(value).__module__.startswith(lightning_fl.__name__) for value in names.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@each_method
def test_configuration_of_a_section_trains(method, tmp_path, monkeypatch):
    needs(method)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    path = config(method, tmp_path)
    options = ["--trainer.max_epochs=2", f"--trainer.default_root_dir={tmp_path}"]
    if yaml.safe_load(path.read_text()).get("data", {}).get("class_path") == "MNIST":
        mnist_layout(tmp_path, "MNIST", train=1300, test=40)
        options += [f"--data.init_args.root={tmp_path}", "--data.init_args.val_size=20"]
    with quick_cli.no_pictures():
        quick_cli.call(
            *("fit", "--config", CONFIGS / "digits.yaml", "--config", path, *options),
            *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
        )
    (table,) = tmp_path.glob("version_*/rounds.csv")
    assert len(table.read_text().splitlines()) == 3
