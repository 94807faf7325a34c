"""`torchrex list`, `run` and `reproduce`: their arguments. What they do is in `running` and
`outputs`, which load torch and are imported when the arguments are understood.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from torchrex.cli import listing
from torchrex.cli.main import loading_torch
from torchrex.durable import one_line, read_file, read_object
from torchrex.errors import ConfigError, MissingDependencyError, RecipeError
from torchrex.names import require_recipe

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
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only results and errors.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
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
            "resnet20/cifar10, or of table1.",
            autocompletion=listing.complete_recipe,
        ),
    ] = "",
    json_: Json = False,
) -> None:
    """Show all recipes, those with a word in their name, or the settings of one."""
    listing.show_recipes(recipe, json_)


def settings_in(file: Path) -> dict[str, Any]:
    """The settings in a file for --config: a JSON object, or a mapping in YAML."""
    read: Callable[[Path], Any] = read_object
    broken: tuple[type[Exception], ...] = (OSError, ValueError, RecursionError)
    if file.suffix != ".json":
        try:
            import yaml
        except ImportError:
            message = "--config in YAML needs PyYAML: pip install pyyaml, or give a .json file"
            raise MissingDependencyError(message) from None
        read, broken = lambda path: yaml.safe_load(read_file(path)), (*broken, yaml.YAMLError)
    try:
        found = read(file)
    except broken as error:
        why = one_line(getattr(error, "strerror", None) or error)
        raise ConfigError(f"cannot read --config {one_line(file)} ({why})") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"--config {one_line(file)} must hold names and values of settings")
    return found


def recipe_of(file: Path, values: Mapping[str, Any], recipe: str) -> str:
    """The recipe of a --config, after a look at the names in it; the recipe's fixed settings are
    as they are.
    """
    if (made_by := values.get("made_by", "recipe")) != "recipe":
        raise ConfigError(f"--config {file} is of a run of {made_by!r}, which is no recipe")
    named = values.get("recipe", recipe)
    if not isinstance(named, str) or (recipe and named != recipe):
        raise ConfigError(
            f"--config {file} is of recipe {named!r}, not of {recipe!r}; leave it out"
        )
    if named:
        require_recipe(named, listing.index()["recipes"])
        listing.require_settings(named, values, str(file))
    return named


def run(
    recipe: Annotated[
        str,
        typer.Argument(help="A name from `torchrex list`.", autocompletion=listing.complete_recipe),
    ] = "",
    set_: Set = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings of the run, .json or .yaml, such as the config.json of another run, "
            "which it repeats; --set comes after it.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**63 - 1 - MOST_SEEDS,
            help="First seed; by default 0, or that of the run whose config.json --config is.",
        ),
    ] = None,
    seeds: Seeds = 1,
    out: Out = Path("runs"),
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    budget: Budget = "",
    log: Log = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Run one recipe into OUT/RECIPE/seed=S/.

    Exit code: 0 if all runs are finished, 2 for bad input or a run that failed, 75 if --budget
    was used up before the end.
    """
    if resume and overwrite:
        raise ConfigError(
            "--resume continues a run and --overwrite begins it anew; give one of them"
        )
    seconds = seconds_of(budget)
    if recipe in THINGS:
        raise RecipeError(
            f"{recipe} is no recipe but made of several: `torchrex reproduce {recipe}` runs them, "
            f"`torchrex list {recipe}` shows them"
        )
    values = {} if config is None else settings_in(config)
    if config is not None:
        recipe = recipe_of(config, values, recipe)
        if seed is None and config.name == "config.json":
            found = re.match(r"seed=(\d+)", config.absolute().parent.name, re.ASCII)
            seed = int(found[1]) if found else None
    if not recipe:
        raise ConfigError("give a recipe of `torchrex list`, or --config FILE that names one")
    require_recipe(recipe, listing.index()["recipes"])
    names = [each.partition("=")[0].strip() for each in set_ or [] if "=" in each[1:]]
    listing.require_settings(recipe, dict.fromkeys(names, ...))
    with loading_torch(quiet=quiet):
        from torchrex.cli.console import printing
        from torchrex.cli.running import run_seeds
        from torchrex.experiments import RunOptions, get_recipe, override
        from torchrex.report.reader import config_from_json
    options = RunOptions(
        device=device, resume=resume, overwrite=overwrite, budget=seconds, log=tuple(log or ())
    )
    chosen = config_from_json(get_recipe(recipe), values, []) if values else get_recipe(recipe)
    first = seed or 0
    with printing(only_results=quiet, as_json=json_):
        run_seeds(override(chosen, set_ or []), range(first, first + seeds), out, options, json_)


def reproduce(
    what: Annotated[
        str,
        typer.Argument(help=f"One of {', '.join(THINGS)}.", autocompletion=lambda: list(THINGS)),
    ],
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
    quiet: Quiet = False,
) -> None:
    """Run what is missing of a figure or table, draw it, and print the numbers, next to the paper's
    where it has some.

    Exit code: 75 if --budget was used up before the end; the same command goes on.
    """
    if what not in THINGS:
        near = difflib.get_close_matches(what, THINGS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"cannot reproduce {what!r}, only {', '.join(THINGS)}{hint}")
    given = {"--log": log, "--set": set_, "--seeds": seeds, "--overwrite": overwrite}
    seconds = seconds_of(budget)
    with loading_torch(quiet=quiet):
        from torchrex.cli.console import printing
        from torchrex.cli.outputs import reproduce_it, require_rebuildable
        from torchrex.experiments import RunOptions
    if rebuild:
        require_rebuildable(what, [option for option, value in given.items() if value])
    options = RunOptions(device=device, overwrite=overwrite, budget=seconds, log=tuple(log or ()))
    with printing(only_results=quiet):
        reproduce_it(what, set_ or [], seed, seeds, only, out, options, rebuild=rebuild)
