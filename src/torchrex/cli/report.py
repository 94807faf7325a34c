"""`torchrex report`: one HTML page from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torchrex.report.page import write_page


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders that hold some, as --out of a run.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write; an older page there is replaced.")] = Path(
        "page.html"
    ),
    title: Annotated[str, typer.Option(help="Heading of the page; by default the names of the folders.")] = "",
) -> None:
    """Write one page about all runs in DIR: tables beside the paper's numbers, charts, and how to repeat each run."""
    shown, not_whole = write_page(folders, out, title=title)
    size = out.stat().st_size / 1e6
    trouble = f", {not_whole} of them not whole (the page says what is missing)" if not_whole else ""
    line = f"page: {out} ({shown} run{'' if shown == 1 else 's'}{trouble}; {size:.1f} MB, opens without a network)"
    Console().print(line, markup=False, highlight=False, soft_wrap=True)
