import re
import runpy
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT.get("urls", {}).get("Repository")
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

#: What the text of a notebook says of its results, as conditions on its variables.
CLAIMS = {
    "quickstart": [
        "result['test_acc'] > 0.8",
        "loop.rows[-1]['train_loss'] < loop.rows[-1]['val_loss'] / 2",
    ],
    "own_module": [
        "(x[:1400].mean(0) - images['running mean, \"average\"']).abs().max() < 2",
        "not images['running mean, \"server\"'].any()",
        "len(wrong) >= 8",
    ],
    "comparing_methods": [
        "differences['SCAFFOLD'].min() > 0.03 > differences['FedProx'].abs().max()"
    ],
    "personalization": [
        "sum(accuracies['fine-tuned']) > max(map(sum, accuracies.values())) - 0.1",
        "sum(accuracies['fine-tuned']) > sum(accuracies['global']) + 0.3",
        "sum(fedavg['local'][c] for c in order[:3]) < sum(fedavg['local'][c] for c in order[-3:])",
    ],
    "private": [
        "private[1.0][-1]['epsilon'] > private[2.0][-1]['epsilon'] > private[4.0][-1]['epsilon']",
        "plain[-1]['val_acc'] > private[4.0][-1]['val_acc'] + 0.03",
        "all(a['epsilon'] < b['epsilon'] for a, b in zip(private[1.0], private[1.0][1:]))",
    ],
}


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_notebook_is_in_the_list_of_pages():
    index = (NOTEBOOKS[0].parent / "index.md").read_text()
    pages = index.partition("```{toctree}")[2].split()
    assert sorted(page for page in pages if page.isidentifier()) == [p.stem for p in NOTEBOOKS]
    assert sorted(CLAIMS) == [path.stem for path in NOTEBOOKS]


@every_notebook
def test_it_is_valid_and_stored_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in code_of(notebook):
        hint = f"clear the outputs of {path.name} and save it (Jupyter: Edit > Clear Outputs)"
        assert (cell.outputs, cell.execution_count) == ([], None), hint
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"tags"}


@every_notebook
def test_it_begins_with_a_title_and_installs_what_is_missing(path):
    title, install = read(path).cells[:2]
    assert re.match(r"# \w[^\n]*\n\n", title.source)
    extra = "[all,privacy]" if path.stem == "private" else "[all]"
    checkout = f"../..{extra}"  # all that there is where the project names no repository
    package = f"lightning_fl{extra} @ git+{REPOSITORY}" if REPOSITORY else checkout
    assert f'    %pip install -q "{package}"' in install.source.splitlines()
    assert install.metadata.tags == ["remove-cell"]


@every_notebook
def test_its_code_compiles_in_short_cells(path):
    for cell in code_of(read(path)):
        compile(TransformerManager().transform_cell(cell.source), path.name, "exec")
        assert len(cell.source.splitlines()) <= 36


@pytest.fixture
def site(monkeypatch):
    """The configuration of the site, and the environment that it gives to notebooks."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "")
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


def test_the_site_puts_a_badge_below_the_title(site, monkeypatch):
    link = site["link_to_colab"]
    path = NOTEBOOKS[0]
    page, source = f"notebooks/{path.stem}", [path.read_text()]
    monkeypatch.setitem(link.__globals__, "REPOSITORY", None)
    link(None, page, source)
    assert source == [path.read_text()]  # no address, no badge
    monkeypatch.setitem(link.__globals__, "REPOSITORY", "https://github.com/owner/name")
    link(None, page, source)
    first, *others = nbformat.reads(source[0], as_version=nbformat.NO_CONVERT).cells
    address = f"colab.research.google.com/github/owner/name/blob/main/docs/{page}.ipynb"
    title, badge, *_ = first.source.split("\n\n")
    assert title.startswith("# ")
    assert badge.endswith(f"](https://{address})")
    assert others == read(path).cells[1:]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client; those of the notebook are outputs
@pytest.mark.usefixtures("site")
@every_notebook
def test_it_runs_without_a_warning_and_its_text_is_true(path, tmp_path):
    notebook = read(path)
    claims = "\n".join(f"assert {claim}, {claim!r}" for claim in CLAIMS[path.stem])
    notebook.cells.append(nbformat.v4.new_code_cell(claims))
    place = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
