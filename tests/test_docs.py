from pathlib import Path

import pages
import pytest

DOCS = Path(__file__).parent.parent / "docs"
#: Pages whose code blocks run.
PAGES = [*sorted(DOCS.glob("tutorials/*.md")), DOCS / "sweeps.md"]


@pytest.mark.filterwarnings("ignore:.*bottleneck", "ignore:Starting from v1.9.0")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # pages write modules of their own
    pages.run(page)
