"""HTML reports on one run or several runs: ``lightning-fl report RUN [RUN ...]``."""

from lightning_fl.extras import imported

imported("matplotlib", "lightning_fl.report", "report")

from lightning_fl.report.groups import Group, group  # noqa: E402  # after the error message
from lightning_fl.report.run import Outcomes, Run, find_runs, read_run  # noqa: E402
from lightning_fl.report.tracking import LogFiles  # noqa: E402
from lightning_fl.report.write import report  # noqa: E402

__all__ = ["Group", "LogFiles", "Outcomes", "Run", "find_runs", "group", "read_run", "report"]
