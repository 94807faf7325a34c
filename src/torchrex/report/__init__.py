"""Read run folders and say what came out: tables, figures, doctor, compare, the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrex.posterior import Draws
    from torchrex.report.run_report import RunReport


def of_folder(path: Path | str) -> RunReport:
    """What doctor says of the run in a folder; in a notebook, with its page."""
    from torchrex.report.reader import load_run  # this folder is imported by every command
    from torchrex.report.run_report import RunReport

    return RunReport(load_run(path))


def of_draws(draws: Draws) -> RunReport:
    """The same for draws in memory."""
    from torchrex.report.run_report import RunReport, run_of

    return RunReport(run_of(draws))
