import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Import a script of the benchmarks, which import each other."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    yield load
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def bench(script, request):
    """The script that a test file is about."""
    return script(request.path.stem.removeprefix("test_"))


@pytest.fixture
def page(bench, tmp_path):
    """Run the script with further options; return the page that it writes into ``docs``."""

    def run(*options):
        place = tmp_path / "docs" / f"{bench.__name__}.md"
        bench.main(["--out", str(tmp_path), "--markdown", str(place), *options])
        return place.read_text()

    return run


@pytest.fixture
def command_line(bench, monkeypatch):
    """Stand in for ``lightning-fl``; returns the lines that it was called with.

    Args:
        rounds: The table of rounds that a fit leaves.
        printed: What it prints, or a function of the run's folder.
        leave: Called with the line and the run's folder after a fit.
    """

    def install(rounds, printed="│ test_acc │ 0.9 │", leave=lambda line, run: None):
        seen = []

        def run(line, environment=None):
            seen.append(line)
            if "fail" in line:
                return subprocess.CompletedProcess(line, 1, "no data")
            folder = Path(next(a for a in line if "root_dir" in a).partition("=")[2])
            if "fit" in line:
                (folder / "version_0").mkdir(parents=True)
                (folder / "version_0" / "rounds.csv").write_text(rounds)
                leave(line, folder / "version_0")
            text = printed(folder) if callable(printed) else printed
            return subprocess.CompletedProcess(line, 0, text)

        monkeypatch.setattr(sys.modules["runs"], "call", run)
        return seen

    return install
