"""Options that `run` and `reproduce` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of `torchrex list RECIPE`. May be repeated.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="First seed.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds to run, counted up from --seed.")]
Out = Annotated[Path, typer.Option(help="Folder for run folders.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace finished runs.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with unfinished runs from their checkpoints, and leave finished ones as they are.",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="KIND",
        help="Networks only (a density keeps all its draws): write a log into each run folder, jsonl or tensorboard. "
        "May be repeated.",
    ),
]
Budget = Annotated[
    str, typer.Option(metavar="TIME", help="Stop in time with a checkpoint, e.g. 9m, 90s, 1.5h.")
]
