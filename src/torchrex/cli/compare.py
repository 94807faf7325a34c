"""`torchrex compare`: runs side by side, paired by seed. What compares them is loaded when the
arguments are understood.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchrex.cli.interrupts import loading
from torchrex.durable import replace_file
from torchrex.errors import ConfigError, RunFolderError

SUFFIXES = (".md", ".json")


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="A B ...", help="Run folders, or folders of recipes with seed=*."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the tables to this file, .md or .json.")
    ] = None,
) -> None:
    """Compare runs with the first, paired by seed: differences, standard errors, verdicts that do
    not overclaim.
    """
    if out is not None and out.suffix not in SUFFIXES:
        raise ConfigError(f"--out must end in {' or '.join(SUFFIXES)}, got {out}")
    with loading():
        from rich.console import Console

        from torchrex.experiments.config import dumps
        from torchrex.report.compare import compare_folders
        from torchrex.report.compare_text import MARK, as_json, as_markdown, lines
    ours = (MARK, '"not_comparable_because_of"', "paired t")  # every file of ours has one of them
    if (
        out is not None
        and out.exists()
        and not any(mark in out.read_text(errors="replace") for mark in ours)
    ):
        raise ConfigError(
            f"--out {out} is a file that `torchrex compare` did not write; choose another name"
        )
    comparisons = compare_folders(folders)
    console = Console()
    width = console.width if console.is_terminal else None  # what reads a pipe has no edge
    for k, comparison in enumerate(comparisons):
        for line in [""] * (k > 0) + lines(comparison, width):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            text = as_markdown(comparisons) if out.suffix == ".md" else dumps(as_json(comparisons))
            replace_file(out, text.encode())
        except OSError as error:
            raise RunFolderError(
                f"cannot write {out} ({error.strerror}); choose another --out"
            ) from None
        console.print(f"written: {out}", soft_wrap=True, markup=False, highlight=False)
