"""HTML reports on one run or several runs: ``lightning-fl report RUN [RUN ...]``."""

from lightning_fl.report.groups import Group, group
from lightning_fl.report.run import Outcomes, Run, find_runs, read_run
from lightning_fl.report.tracking import LogFiles
from lightning_fl.report.write import report

__all__ = ["Group", "LogFiles", "Outcomes", "Run", "find_runs", "group", "read_run", "report"]
