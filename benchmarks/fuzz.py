"""Throw hostile files at what reads manifests, traces and checkpoints, for some minutes each.

With atheris (``pip install atheris``) inputs follow what code they reach, else they are random.

    python benchmarks/fuzz.py --minutes 10
    python benchmarks/fuzz.py --minutes 1 --target checkpoint --seed 3
    python benchmarks/fuzz.py --replay fuzz/checkpoint-1a2b3c4d

Whatever raises anything but a clear error, takes too long or ends the process is written to a
file in ``--out``, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

NAMES = ("manifest", "trace", "checkpoint")
#: What is followed.
FOLLOWED = ["lightning_fl", "json", "zipfile"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of each target")
    parser.add_argument("--target", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz"), help="inputs that are found")
    parser.add_argument("--replay", type=Path, help="run a file of --out again, once")
    args = parser.parse_args(arguments)
    if args.replay:
        print(_hostile(False).TARGETS[args.replay.name.partition("-")[0]](args.replay.read_bytes()))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    return max(_in_a_process(name, args) for name in args.target)


def _hostile(follow: bool) -> Any:
    """Import the targets; followed, so that atheris sees what they reach."""
    sys.path.insert(0, str(Path(__file__).parent))
    context: Any = nullcontext()
    if follow:
        context = importlib.import_module("atheris").instrument_imports(include=FOLLOWED)
    with context:
        found = importlib.import_module("hostile")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return found


def _in_a_process(name: str, args: argparse.Namespace) -> int:
    """Run a target in a process of its own: what ends that is a finding, too."""
    report, last = args.out / f"{name}.json", args.out / f".{name}"
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as place:
        pid = os.fork()
        if pid == 0:
            tempfile.tempdir = place
            _Run(name, args.minutes * 60, args.out).run(args.seed)
        _, status = os.waitpid(pid, 0)
    if not report.exists():
        found = _keep(args.out, name, last.read_bytes() if last.exists() else b"")
        print(f"{name}: the process ended with status {status}, by {found}")
        return 1
    result = json.loads(report.read_text())
    last.unlink()
    outcomes, findings = result["outcomes"], result["findings"]
    refused = sum(count for outcome, count in outcomes.items() if outcome != "accepted")
    print(
        f"{name}: {result['runs']} inputs in {result['seconds']:.0f} s ({result['engine']}),"
        f" {refused} refused in {len(outcomes.keys() - {'accepted'})} ways,"
        f" {outcomes.get('accepted', 0)} accepted, {len(findings)} findings"
    )
    for found, what in findings.items():
        print(f"  {found}: {what}")
    return int(bool(findings))


def _keep(out: Path, name: str, data: bytes) -> Path:
    path = out / f"{name}-{hashlib.sha256(data).hexdigest()[:8]}"
    path.write_bytes(data)
    return path


class _Run:
    """A target, until its time is over."""

    def __init__(self, name: str, seconds: float, out: Path) -> None:
        self.name, self.seconds, self.out = name, seconds, out
        self.start, self.runs = time.monotonic(), 0
        self.outcomes: Counter[str] = Counter()
        self.findings: dict[str, str] = {}
        self.places: set[Any] = set()

    def run(self, seed: int) -> NoReturn:
        """Go through inputs; it ends the process."""
        self.engine = "atheris" if find_spec("atheris") else "random"
        hostile = _hostile(self.engine == "atheris")
        self.target: Callable[[bytes], str] = hostile.TARGETS[self.name]
        self.start = time.monotonic()
        if self.engine == "atheris":
            atheris = importlib.import_module("atheris")
            options = [f"-seed={seed + 1}", "-max_len=128", "-len_control=0", "-rss_limit_mb=0"]
            atheris.Setup([sys.argv[0], *options, "-verbosity=0", "-timeout=600"], self.once)
            atheris.Fuzz()
        for data in hostile.noise(seed):
            self.once(data)
        raise AssertionError("inputs have no end")

    def once(self, data: bytes) -> None:
        """Try an input."""
        self.runs += 1
        (self.out / f".{self.name}").write_bytes(data)
        try:
            self.outcomes[self.target(data)] += 1
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = type(error), frames[-1].filename, frames[-1].lineno
            if place not in self.places:
                self.places.add(place)
                path = _keep(self.out, self.name, data)
                at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
                self.findings[str(path)] = f"{type(error).__name__} at {at}: {error}"[:300]
        if time.monotonic() - self.start > self.seconds:
            report = {
                "engine": self.engine,
                "runs": self.runs,
                "seconds": time.monotonic() - self.start,
                "outcomes": dict(self.outcomes.most_common()),
                "findings": self.findings,
            }
            (self.out / f"{self.name}.json").write_text(json.dumps(report, indent=1))
            os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
