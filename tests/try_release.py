"""Try a release as its users get it: `make release-check`.

Builds the sdist and from it the wheel, installs the wheel in an empty environment for each Python
and each resolution of the dependencies, and runs commands and code there, in an empty folder:

- ``newest``: what pip chooses;
- ``lowest``: the lower bound of every dependency of the package itself.

An environment is removed before the next one is made, as it takes up to 6 GB. Needs a package index
and the extra ``dev``. Ends with a table, and with exit code 1 if an environment was not right.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ("python3.11", "python3.12", "python3.13")
RESOLUTIONS = ("newest", "lowest")
#: The lowest numpy and scipy have no wheels for it.
NEWEST_ONLY = "python3.13"
#: Packages whose versions the table shows.
SHOWN = ("torch", "lightning", "numpy")
HEAD = ("Python", "resolution", *SHOWN, "result", "seconds")
FEW_ROUNDS = "--trainer.max_epochs=2"
#: Constraints that the lowest versions would need to declare themselves.
OLD = ("pyparsing<3.1",)  # matplotlib 3.9 uses names that newer ones warn of


def requirements() -> list[Requirement]:
    """Return what a user of the README installs: the dependencies and the extra ``demo``."""
    return expanded([*PROJECT["dependencies"], f"{PROJECT['name']}[demo]"])


def expanded(lines: Sequence[str]) -> list[Requirement]:
    """Return requirements, with those of the extras in place of the package's own name."""
    found = []
    for requirement in map(Requirement, lines):
        extras = sorted(requirement.extras) if requirement.name == PROJECT["name"] else ()
        for extra in extras:
            found += expanded(PROJECT["optional-dependencies"][extra])
        found += [] if extras else [requirement]
    return found


def lowest(requirement: Requirement) -> str:
    """Return a constraint to the lower bound of a requirement.

    Example:
        >>> lowest(Requirement("torch>=2.11,<2.15"))
        'torch==2.11'
    """
    (bound,) = (s.version for s in requirement.specifier if s.operator == ">=")
    return f"{requirement.name}=={bound}"


def constraints(resolution: str) -> str:
    """Return the constraints of pip for a resolution."""
    lines = [*map(lowest, requirements()), *OLD] if resolution == "lowest" else []
    return "\n".join(lines)


def own_module() -> str:
    """Return the README's code that federates a module of one's own, for a few rounds."""
    page = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Federate your own module")
    blocks = re.findall(r"^```python\n(.*?)^```$", page[2], re.DOTALL | re.MULTILINE)
    return "\n".join(blocks).replace("max_epochs=30", "max_epochs=3")


def commands_of(page: str) -> list[str]:
    """Return the commands of the README that ``lightning-fl init`` writes, for a few rounds."""
    commands = re.findall(r"^    (lightning-fl .+)$", page, re.MULTILINE)
    return [
        f"{command} {FEW_ROUNDS}" if " fit --config" in command else command for command in commands
    ]


@dataclass
class Environment:
    """An environment with the package, and an empty folder to work in."""

    folder: Path

    def run(self, command: str, folder: str = "empty") -> str:
        """Run a command, with the programs of the environment first; return what it prints."""
        cwd = self.folder / folder
        cwd.mkdir(exist_ok=True)
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env["PATH"] = f"{self.folder / 'env' / 'bin'}{os.pathsep}{env['PATH']}"
        done = subprocess.run(
            shlex.split(command),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command}\n{done.stdout}")
        return done.stdout

    def version(self, package: str) -> str:
        """Return the version of an installed package."""
        code = f"from importlib.metadata import version; print(version({package!r}))"
        return self.run(f"python -c {shlex.quote(code)}").strip()


def install(python: str, resolution: str, wheel: Path, folder: Path) -> Environment:
    """Make an environment and install the wheel with the extra ``demo``."""
    environment = Environment(folder)
    environment.run(f"{shlex.quote(python)} -m venv {shlex.quote(str(folder / 'env'))}")
    file = folder / "constraints.txt"
    file.write_text(constraints(resolution), encoding="utf-8")
    environment.run(
        f"python -m pip install --constraint {shlex.quote(str(file))}"
        f" {shlex.quote(f'{wheel}[demo]')}"
    )
    return environment


def try_package(environment: Environment) -> None:
    """Run what a user tries first."""
    run = environment.run
    run("python -m pip check")
    said = run("lightning-fl --version").strip()
    if said != f"lightning-fl {PROJECT['version']}":
        raise RuntimeError(f"lightning-fl --version\n{said}, expected {PROJECT['version']}")
    run("lightning-fl methods")
    run("lightning-fl configs")

    run("lightning-fl init demo")
    page = environment.folder / "empty" / "demo" / "README.md"
    for command in commands_of(page.read_text(encoding="utf-8")):
        run(command, "empty/demo")
    run("lightning-fl partition config.yaml", "empty/demo")

    run(f"lightning-fl fit --config digits.yaml {FEW_ROUNDS}")
    run(f"lightning-fl fit --config digits.yaml {FEW_ROUNDS} --vectorize=5")
    run("lightning-fl test --config digits.yaml")
    run("lightning-fl report runs/digits")

    (environment.folder / "empty" / "own_module.py").write_text(own_module(), encoding="utf-8")
    run("python own_module.py")


def row(python: str, resolution: str, wheel: Path) -> list[str]:
    """Try one environment; return its row of the table."""
    name, versions, result = python, ["-"] * len(SHOWN), "passed"
    start = time.monotonic()
    with TemporaryDirectory(prefix="try_release_") as temporary:
        try:
            if shutil.which(python) is None:
                raise RuntimeError(f"{python} was not found")
            environment = install(python, resolution, wheel, Path(temporary))
            name = environment.run("python --version").removeprefix("Python ").strip()
            versions = [environment.version(package) for package in SHOWN]
            try_package(environment)
        except RuntimeError as error:
            print(f"--- {python}, {resolution}\n{error}", file=sys.stderr, flush=True)
            result = f"failed: {str(error).splitlines()[0]}"
    return [name, resolution, *versions, result, f"{time.monotonic() - start:.0f}"]


def build(folder: Path) -> Path:
    """Build the sdist, and the wheel from the sdist; return the wheel."""
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> None:
    """Try the release and print a table."""
    parser = ArgumentParser(description="Try a release as its users get it.")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="default: %(default)s")
    parser.add_argument(
        "--resolution", nargs="+", choices=RESOLUTIONS, default=RESOLUTIONS, help="default: both"
    )
    parser.add_argument("--wheel", type=Path, help="an existing wheel; by default, one is built")
    parser.add_argument(
        "--constraints", action="store_true", help="only print the lowest versions, for pip"
    )
    asked = parser.parse_args()
    if asked.constraints:
        print(constraints("lowest"))
        return
    failed = False
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    with TemporaryDirectory(prefix="try_release_") as folder:
        wheel = asked.wheel.resolve(strict=True) if asked.wheel else build(Path(folder))
        for resolution, python in product(asked.resolution, asked.python):
            if (resolution, python) == ("lowest", NEWEST_ONLY):
                continue
            cells = row(python, resolution, wheel)
            print("| " + " | ".join(cells) + " |", flush=True)
            failed |= "passed" not in cells
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
