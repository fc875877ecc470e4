"""Check federations with ``check_federation``, and write tables of the results.

    python benchmarks/checks.py configs --markdown configs.md
    python benchmarks/checks.py troubles --markdown troubles.md

``configs`` checks the configurations of the package whose data are there (``LIGHTNING_FL_DATA``).
``troubles`` shows how state that clients share is found, for the modules and callbacks of
``tests/troubles.py`` and ``benchmarks/hook_troubles.py``. ``benchmarks/foreign.py`` checks modules
of other packages.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from lightning.pytorch import Trainer

from lightning_fl.check import COLUMNS
from lightning_fl.cli.parts import checked
from lightning_fl.testing import CheckResult, Run, check_federation

ROOT = Path(__file__).resolve().parents[1]
#: Configurations whose data are downloaded elsewhere.
WITHOUT_DATA = ("fed_isic2019", "femnist", "newsgroups", "sentiment140", "shakespeare")
#: Configurations that are made of several files.
PAPER = tuple(
    ("mostafa2019/mnist.yaml", "mostafa2019/noniid.yaml", f"mostafa2019/{method}.yaml")
    for method in ("fa", "fa_rm", "fa_ah", "fa_rm_ah", "fa_rm_same", "fa_wd")
)


def cell(result: CheckResult) -> str:
    """Return the text of a result."""
    if result.outcome == "equal":
        return f"equal, {result.difference:.0e}" if result.difference else "equal"
    if result.outcome == "different":
        return f"different, {result.difference:.0e} in {result.tensor}"
    detail = result.detail.partition("not at once: ")
    return f"{result.outcome}: {shortened(detail[2] or detail[0])}"


def shortened(text: str) -> str:
    """Return a text that fits into a cell."""
    return " ".join(text.split()).replace("|", "/")[:200]


def cells(results: Callable[[], Sequence[CheckResult]]) -> list[str]:
    """Return the texts of the results of a check: a cell per column."""
    try:
        return [cell(result) for result in results()]
    except Exception as error:  # of many kinds: each is a result
        return [f"{type(error).__name__}: {shortened(str(error))}", *["" for _ in COLUMNS][1:]]


def write_table(rows: Iterator[Sequence[str]], path: Path | None) -> None:
    """Print the rows of a table, of which the first is its head, and write them to a file."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    lines: list[str] = []
    for row in rows:
        new = [f"| {' | '.join(row)} |"]
        if not lines:
            new.append("|" + "---|" * len(row))
        print(*new, sep="\n", flush=True)
        lines += new
    if path is not None:
        path.write_text("\n".join(lines) + "\n")


def configurations(only: Sequence[str] = ()) -> Iterator[Sequence[str]]:
    """Yield the head of a table, and a row for each configuration."""
    yield "configuration", *COLUMNS, "seconds"
    folder = ROOT / "configs"
    files = [*folder.glob("*.yaml"), *folder.glob("natural/*.yaml")]
    names = [str(file.relative_to(folder)) for file in sorted(files)]
    groups = [(name,) for name in names if Path(name).stem not in WITHOUT_DATA]
    for group in (*groups, *PAPER):
        name = " + ".join(Path(each).stem for each in group)
        if only and name not in only:
            continue
        words = ["fit", *(word for each in group for word in ("--config", str(folder / each)))]
        start = time.perf_counter()
        found = cells(lambda words=words: list(checked(words, 2, 4, list(COLUMNS))))
        yield name, *found, f"{time.perf_counter() - start:.0f}"


def warned(make: Callable[[], Run]) -> str:
    """Return whether the check of the first round warns in a fit."""
    torch.manual_seed(0)
    run = make()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    run.loop.table_name = None
    trainer = Trainer(
        max_epochs=2,
        limit_val_batches=0,
        enable_checkpointing=False,
        callbacks=[run.loop, *run.callbacks],
        **quiet,
        **run.trainer,
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(run.module, run.data)
    return "warning" if any("lightning-fl check" in str(w.message) for w in seen) else "-"


def troubles() -> Iterator[Sequence[str]]:
    """Yield the head of a table, and a row for each trouble."""
    sys.path.insert(0, str(ROOT / "tests"))
    from hook_troubles import CALLBACKS, MODULES
    from troubles import CALLBACKS_CARRY, CARRIED, HARMLESS, HOOKED, Watches, made

    yield "kind", "what clients share", "round 1", "`lightning-fl check --columns order`"
    cases = [("state that a step reads", name, made(factor)) for name, factor in CARRIED.items()]
    hooked = (*HOOKED, *MODULES)
    cases += [("hook of the module", kind.__name__, made(kind=kind)) for kind in hooked]
    cases += [
        ("callback", kind.__name__, made(lambda m: 1.0 + m.late, [kind]))
        for kind in (*CALLBACKS_CARRY, *CALLBACKS)
    ]
    cases += [("harmless", name, made(factor)) for name, factor in HARMLESS.items()]
    cases += [("harmless", "callback that looks", made(callbacks=[Watches]))]
    for kind, name, make in cases:
        (result,) = check_federation(make, columns=["order"])
        yield kind, name, warned(make), cell(result)


def main(words: Sequence[str] | None = None) -> None:
    """Check and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["configs", "troubles"])
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations")
    parser.add_argument("--markdown", type=Path, help="file of the table")
    options = parser.parse_args(words)
    rows = configurations(options.only) if options.what == "configs" else troubles()
    write_table(rows, options.markdown)


if __name__ == "__main__":
    main()
