"""`torchrex reproduce`: its arguments. What it does is in `reproducing`, which is loaded when they
are understood.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchrex.cli.budget import seconds_of
from torchrex.cli.interrupts import loading
from torchrex.cli.options import Budget, Device, Log, Out, Overwrite, Seed, Set
from torchrex.errors import ConfigError

THINGS = ("figure1", "digits", "table1", "table2", "figure2", "table3", "figure3")


def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(THINGS)}.")],
    set_: Set = None,
    seed: Seed = 0,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="How many seeds; by default 5 for digits, 1 for the others."),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            help="Only recipes with this in their name, e.g. case1, or with all of resnet20/cifar10."
        ),
    ] = "",
    out: Out = Path("runs"),
    device: Device = "auto",
    overwrite: Overwrite = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Run nothing, use the runs that are there.")
    ] = False,
    budget: Budget = "",
    log: Log = None,
) -> None:
    """Run what is missing of a figure or table, draw it, and print the numbers, beside the paper's
    where it has some.
    """
    if rebuild and log:
        raise ConfigError(
            "--rebuild runs nothing and takes the runs as they are; leave out --log, or --rebuild"
        )
    seconds = seconds_of(budget)
    with loading():
        from torchrex.cli.reproducing import How, reproduce_it
    how = How(
        out,
        device=device,
        overwrite=overwrite,
        rebuild=rebuild,
        budget=seconds,
        log=tuple(log or ()),
    )
    reproduce_it(what, set_ or [], seed, seeds, only, how)
