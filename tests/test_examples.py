"""The scripts of the gallery print the figures in their docstrings."""

import ast
import os
import re
from importlib.util import find_spec
from pathlib import Path

import joblib
import numpy as np
import pytest
from sklearn.datasets import get_data_home

from child import python

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
GALLERY = (EXAMPLES / "README.md").read_text()
#: Packages beyond the dependencies of lightning_fl.
NEEDS = {"lora": ["timm", "peft"], "sweep": ["optuna"], "timm_finetuning": ["timm"]}
#: Largest difference between a printed figure and the docstring's. Other processors and releases of
#: the libraries round differently, and training amplifies it.
TOLERANCE = 0.05
NUMBER = re.compile(r"\b\d+(?:\.\d+)?\b")


def docstring(script):
    return ast.get_docstring(ast.parse(script.read_text()))


def promised(script):
    """Return the line that a script prints last, according to its docstring."""
    return re.search(r"^Prints .*:\n\n    (.+)\Z", docstring(script), re.MULTILINE)[1]


def run(script, folder, *options, **environment):
    """Run a script in a folder; return the last line that it prints."""
    environment = {**os.environ, **environment}
    done = python(script, *options, cwd=folder, env=environment, timeout=1800)
    return done.stdout.splitlines()[-1]


def assert_as_promised(script, printed):
    expected = promised(script)
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", expected)
    for figure, of_the_docstring in zip(*map(NUMBER.findall, (printed, expected)), strict=True):
        assert float(figure) == pytest.approx(float(of_the_docstring), abs=TOLERANCE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_short_and_says_how_to_run_it_and_what_it_prints(script):
    assert len(script.read_text().splitlines()) <= 65
    text = docstring(script)
    assert f"\n    python examples/{script.name}" in text
    assert re.search(r"^Prints \(seed \d.* s on one core.*\):$", text, re.MULTILINE)
    assert all(name in text for name in NEEDS.get(script.stem, []))
    assert NUMBER.search(promised(script))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_gallery_has_a_row_for_a_script(script):
    (row,) = [line for line in GALLERY.splitlines() if f"(./{script.name})" in line]
    assert promised(script) in row
    assert all(name in row for name in NEEDS.get(script.stem, []))
    seconds = re.search(r"(\d+) s on one core", docstring(script))[1]
    assert f"| {seconds} s |" in row


def test_the_site_shows_every_script():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    shown = re.findall(r"\{literalinclude\} \.\./examples/(\w+\.py)", page)
    assert sorted(shown) == [script.name for script in SCRIPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [script for script in SCRIPTS if script.stem not in ("audio", "gan", "tabular")],
    ids=lambda script: script.stem,
)
def test_a_script_prints_its_figure(script, tmp_path):
    for name in NEEDS.get(script.stem, []):
        if find_spec(name) is None:
            pytest.skip(f"needs pip install {name}")
    assert_as_promised(script, run(script, tmp_path))


@pytest.mark.slow
def test_the_spoken_digits_are_recognized(data_root, tmp_path):
    script = EXAMPLES / "audio.py"
    if not Path(data_root, "free-spoken-digit-dataset").is_dir():
        pytest.skip("real data: LIGHTNING_FL_DATA has no free-spoken-digit-dataset")
    assert_as_promised(script, run(script, tmp_path, "--root", data_root))


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--local-generator"]])
def test_digits_are_drawn(tmp_path, options):
    script = EXAMPLES / "gan.py"
    printed = run(script, tmp_path, *options)
    if not options:
        assert_as_promised(script, printed)
    assert len(list(tmp_path.rglob("*.png"))) == 20


CALIFORNIA = "cal_housing_py3.pkz"  # what fetch_california_housing keeps in its data home


@pytest.mark.slow
def test_house_values_are_predicted_where_the_data_were_fetched(tmp_path):
    if not Path(get_data_home(), CALIFORNIA).is_file():
        pytest.skip("real data: call sklearn.datasets.fetch_california_housing() once")
    assert_as_promised(EXAMPLES / "tabular.py", run(EXAMPLES / "tabular.py", tmp_path))


@pytest.mark.slow
def test_house_values_are_predicted_on_generated_data(tmp_path):
    random, count = np.random.default_rng(0), 20_640
    households = random.integers(1, 2_000, count)
    income, age = random.uniform(0.5, 15, count), random.uniform(1, 52, count)
    per_household = random.uniform([3, 0.8, 1], [8, 1.5, 5], (count, 3))
    latitude, longitude = random.uniform(32, 42, count), random.uniform(-124, -114, count)
    value = 30_000 * income + 20_000 * (latitude - 37)
    # As in the file: rooms, bedrooms and population in total; the values are in dollars.
    totals = per_household * households[:, None]
    columns = [value, income, age, *totals.T, households, latitude, longitude]
    joblib.dump(np.stack(columns, 1), tmp_path / CALIFORNIA)
    printed = run(EXAMPLES / "tabular.py", tmp_path, SCIKIT_LEARN_DATA=str(tmp_path))
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", promised(EXAMPLES / "tabular.py"))
    assert all(float(figure) > 0.9 for figure in re.findall(r"\d\.\d+", printed))
