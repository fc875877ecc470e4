"""Everything on a pretend accelerator, with the CPU's results: in a process of its own."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import pretend

#: Torch cannot have a device in Python before 2.10.
IS_OLD = not hasattr(pretend.backend_registration, pretend.SETUP)
CASES = Path(__file__).with_name("accelerator_cases.py")


@pytest.mark.skipif(IS_OLD, reason="needs PyTorch 2.10")
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_federations_give_the_same_on_the_pretend_accelerator(subtests, tmp_path, cases):
    """Once it is known to torch it stays, so another process runs ``accelerator_cases.py``."""
    report = tmp_path / "cases.xml"
    options = ["-n0", "-q", "--tb=short", "-m", cases, f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, CASES]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.exists(), run.stdout + run.stderr
    found = list(ElementTree.parse(report).iter("testcase"))
    assert len(found) > 10, run.stdout
    for case in found:
        with subtests.test(case.get("name")):
            for problem in [*case.findall("failure"), *case.findall("error")]:
                pytest.fail(problem.text or problem.get("message", ""))
    assert run.returncode == 0, run.stdout


def test_pretend_accelerator_stays_out_of_this_process():
    assert not pretend.install.cache_info().currsize
