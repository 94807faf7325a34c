"""`torchrex run`: its arguments. What it does is in `running`, which is loaded when they are
understood.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from torchrex.cli.budget import seconds_of
from torchrex.cli.interrupts import loading
from torchrex.cli.options import Budget, Device, Log, Out, Overwrite, Resume, Seed, Seeds, Set
from torchrex.cli.reproduce import THINGS
from torchrex.errors import ConfigError, RecipeError


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
            "--resume goes on with a run and --overwrite begins it anew; give one of them"
        )
    if (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    ):  # torchrun begins again after a rank was lost
        resume, overwrite = True, False
    seconds = seconds_of(budget)
    if recipe in THINGS:
        how = f"`torchrex reproduce {recipe}` runs them, `torchrex list {recipe}` shows them"
        raise RecipeError(f"{recipe} is no recipe but made of several: {how}")
    with loading():
        from torchrex.cli.running import run_seeds
        from torchrex.experiments.config import override
        from torchrex.experiments.recipes import get_recipe
    config = override(get_recipe(recipe), set_ or [])
    each = range(seed, seed + seeds)
    run_seeds(
        config,
        each,
        out,
        device=device,
        overwrite=overwrite,
        resume=resume,
        budget=seconds,
        log=log or (),
    )
