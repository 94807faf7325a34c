"""`torchrex report`: one HTML page from run folders. What reads and draws them is loaded when the
arguments are understood.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrex.cli.interrupts import loading

if TYPE_CHECKING:
    from torchrex.report.page import Written

SECONDS = 8.0  # for a quick look of doctor at all runs of a page; the page's own, which would take seconds to load


class Doctor(StrEnum):
    """How much time doctor gets."""

    QUICK = "quick"
    ALL = "all"
    NONE = "none"


TIME = {Doctor.QUICK: SECONDS, Doctor.ALL: math.inf, Doctor.NONE: 0.0}


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Run folders, or folders that hold some, as --out of a run."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The page to write; an older page there is replaced."),
    ] = Path("page.html"),
    title: Annotated[
        str, typer.Option(help="Heading of the page; by default the names of the folders.")
    ] = "",
    doctor: Annotated[
        Doctor,
        typer.Option(
            help=f"Ask doctor about runs for {SECONDS:g} s, about all of them, or about none."
        ),
    ] = Doctor.QUICK,
) -> None:
    """Write one page about all runs in DIR: tables beside the paper's numbers, charts, advice, and
    how to repeat each run.
    """
    with loading():
        from rich.console import Console

        from torchrex.report.page import write_page
    written = write_page(folders, out, title=title, doctor_seconds=TIME[doctor])
    line = f"page: {out} ({in_words(written)}; {size_in_words(out.stat().st_size)}, opens without a network)"
    Console().print(line, markup=False, highlight=False, soft_wrap=True)


def in_words(written: Written) -> str:
    """`3 runs, 1 of them not whole (the page says what is missing), 2 empty folders`."""
    parts = [_count(written.runs, "run")]
    if written.not_whole:
        which = "not whole" if written.runs == 1 else "none of them whole"
        which = (
            which if written.not_whole == written.runs else f"{written.not_whole} of them not whole"
        )
        parts.append(f"{which} (the page says what is missing)")
    parts += [_count(written.empty, "empty folder")] if written.empty else []
    return ", ".join(parts)


def size_in_words(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 999_500 else f"{n_bytes / 1e3:.0f} kB"


def _count(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"
