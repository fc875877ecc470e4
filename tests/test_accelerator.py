"""Everything on a pretend accelerator, with the CPU's results: in a process of its own."""

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import pretend
from forks import Started

#: Torch cannot have a device in Python before 2.10.
IS_OLD = not hasattr(pretend.backend_registration, pretend.SETUP)
CASES = Path(__file__).with_name("accelerator_cases.py")


def run(report, cases):
    """Run the cases of a file; exit with the code of pytest."""
    os.environ.pop("PYTEST_XDIST_WORKER", None)
    options = ["-n0", "-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}"]
    sys.exit(pytest.main([*options, "-m", cases, str(CASES)]))


@pytest.mark.skipif(IS_OLD, reason="needs PyTorch 2.10")
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_federations_give_the_same_on_the_pretend_accelerator(subtests, tmp_path, cases):
    """Once it is known to torch it stays, so another process runs ``accelerator_cases.py``."""
    report = tmp_path / "cases.xml"
    (code,), output = Started(1, tmp_path / "output", run, report, cases).finish(timeout=1800)
    assert report.exists(), output
    found = list(ElementTree.parse(report).iter("testcase"))
    assert len(found) > 10, output
    for case in found:
        with subtests.test(case.get("name")):
            for problem in [*case.findall("failure"), *case.findall("error")]:
                pytest.fail(problem.text or problem.get("message", ""))
    assert code == 0, output


def test_pretend_accelerator_stays_out_of_this_process():
    assert not pretend.install.cache_info().currsize
