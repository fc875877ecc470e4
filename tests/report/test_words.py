"""Numbers as text, in Python and in the script of the page."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_fl.report import write
from lightning_fl.report.words import number

SCRIPT = Path(write.__file__).with_name("page.js").read_text()
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")

#: Numbers and their texts.
TEXTS = {
    0.123456: "0.1235",
    -12.3456: "-12.35",
    999.94: "999.9",
    999.96: "1,000",
    1234.7: "1,235",
    9999.7: "10,000",
    -1234567.0: "-1,234,567",
    3.4e20: "3.4e+20",
}


def test_numbers_have_four_digits_or_separators():
    assert [number(value) for value in TEXTS] == list(TEXTS.values())


def page_js(expression, more=""):
    """The value of an expression in the script of the page, on a page without elements."""
    code = f"const document = {{ querySelectorAll: () => [] }};\n{SCRIPT}\n{more}\n"
    code += f"console.log(JSON.stringify({expression}));"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_node
def test_the_page_writes_the_same_numbers():
    assert page_js(f"{json.dumps(list(TEXTS))}.map(shown)") == list(TEXTS.values())


SORTED = """
let click, order;
document.createElement = () => ({ addEventListener: (_, then) => { click = then; } });
const head = { replaceChildren() {}, getAttribute() {}, setAttribute() {}, removeAttribute() {} };
const rows = TEXTS.map((textContent) => ({ cells: [{ textContent }] }));
const body = { rows, append: (...all) => { order = all.map((row) => row.cells[0].textContent); } };
sortable({ tHead: { rows: [{ cells: [head] }] }, tBodies: [body] });
click();
"""


@needs_node
@pytest.mark.parametrize(
    "texts", [["7.5", "999 ± 20", "1,200 ± 3", "-"], ["a/version_2", "a/version_10"]]
)
def test_a_click_sorts_numbers_and_names(texts):
    assert page_js("order", SORTED.replace("TEXTS", json.dumps(texts[::-1]))) == texts
