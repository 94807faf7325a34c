"""`torchrex list`, `run` and `reproduce`: their arguments. What they do is in `running` and
`outputs`, which load torch and are imported when the arguments are understood.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from torchrex.cli.main import loading
from torchrex.errors import ConfigError, RecipeError

THINGS = (
    "figure1", "digits", "theory", "table1", "table2", "figure2", "table3", "figure3", "gallery"
)  # fmt: skip
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of `torchrex list RECIPE`. May be repeated.",
    ),
]
MOST_SEEDS = 100_000
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1 - MOST_SEEDS, help="First seed.")]
Seeds = Annotated[
    int, typer.Option(min=1, max=MOST_SEEDS, help="How many seeds to run, counted up from --seed.")
]
Out = Annotated[Path, typer.Option(help="Folder for run folders.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace finished runs.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with unfinished runs from their checkpoints, and leave finished ones as they "
        "are.",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="KIND",
        help="Networks only (a density keeps all its draws): write a log into each run folder, "
        "jsonl, tensorboard, wandb or mlflow. May be repeated.",
    ),
]
Budget = Annotated[
    str, typer.Option(metavar="TIME", help="Stop in time with a checkpoint, e.g. 9m, 90s, 1.5h.")
]


def seconds_of(budget: str) -> float | None:
    """The seconds of a time such as 9m; None for no budget."""
    if not budget:
        return None
    number, unit = (budget[:-1], budget[-1]) if budget[-1] in UNITS else (budget, "s")
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--budget must be a time such as 9m, 90s or 1.5h, got {budget!r}")
    return seconds


def list_recipes(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Show the settings of this one, or all with this in their name, with all of "
            "resnet20/cifar10, or of table1."
        ),
    ] = "",
) -> None:
    """Show all recipes, those with a word in their name, or the settings of one."""
    with loading():
        from torchrex.cli.outputs import show_recipes
    show_recipes(recipe)


def run(
    recipe: Annotated[str, typer.Argument(help="A name from `torchrex list`.")],
    set_: Set = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    out: Out = Path("runs"),
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    budget: Budget = "",
    log: Log = None,
) -> None:
    """Run one recipe into OUT/RECIPE/seed=S/."""
    if resume and overwrite:
        raise ConfigError(
            "--resume continues a run and --overwrite begins it anew; give one of them"
        )
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        resume, overwrite = True, False  # torchrun begins again after a rank was lost
    seconds = seconds_of(budget)
    if recipe in THINGS:
        raise RecipeError(
            f"{recipe} is no recipe but made of several: `torchrex reproduce {recipe}` runs them, "
            f"`torchrex list {recipe}` shows them"
        )
    with loading():
        from torchrex.cli.running import run_seeds
        from torchrex.experiments import RunOptions, get_recipe, override
    options = RunOptions(
        device=device, resume=resume, overwrite=overwrite, budget=seconds, log=tuple(log or ())
    )
    config = override(get_recipe(recipe), set_ or [])
    run_seeds(config, range(seed, seed + seeds), out, options)


def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(THINGS)}.")],
    set_: Set = None,
    seed: Seed = 0,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_SEEDS, help="How many seeds; by default 5 for digits, 1 for the others."
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            help="Only recipes with this in their name, e.g. case1, or with all of "
            "resnet20/cifar10."
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
    """Run what is missing of a figure or table, draw it, and print the numbers, next to the paper's
    where it has some.
    """
    given = {"--log": log, "--set": set_, "--seeds": seeds, "--overwrite": overwrite}
    seconds = seconds_of(budget)
    with loading():
        from torchrex.cli.outputs import reproduce_it, require_rebuildable
        from torchrex.experiments import RunOptions
    if rebuild:
        require_rebuildable(what, [option for option, value in given.items() if value])
    options = RunOptions(device=device, overwrite=overwrite, budget=seconds, log=tuple(log or ()))
    reproduce_it(what, set_ or [], seed, seeds, only, out, options, rebuild=rebuild)
