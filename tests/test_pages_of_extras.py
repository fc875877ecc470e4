"""Code of pages that needs packages of extras, which `make extras` installs."""

import re
from pathlib import Path

import pytest

import pages

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
NEED = {
    page: needed
    for page in sorted(TUTORIALS.glob("*.md"))
    if (needed := re.findall(r"needs=(\w+)", page.read_text()))
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("page", NEED, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, here):
    for package in NEED[page]:
        pytest.importorskip(package, reason="needs an extra: make extras")
    pages.run(page)
