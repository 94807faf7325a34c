"""`torchrex list`: which recipes there are, and what can be set."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from torchrex.cli.interrupts import loading
from torchrex.cli.reproduce import THINGS

MOST_OF_A_FAMILY = 20  # recipes; larger ones are shown on demand


def list_recipes(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Show the settings of this one, or all with this in their name, with all of resnet20/cifar10, or of table1."
        ),
    ] = "",
) -> None:
    """Show all recipes, those with a word in their name, or the settings of one."""
    with loading():
        from rich.table import Table

        from torchrex.cli.consoles import stdout
        from torchrex.experiments.config import descriptions, to_json
        from torchrex.experiments.recipes import families_of, get_recipe, matches, recipes
    known = recipes()
    shown = {name: config for name, config in known.items() if recipe in name}
    made = not shown and recipe in THINGS
    if made:
        with loading():
            from torchrex.cli.reproducing import RECIPES
        shown = dict(RECIPES[recipe]())
    elif not shown:  # as --only of reproduce
        begins = families_of(known)
        shown = {name: config for name, config in known.items() if matches(recipe, name, begins)}
    if recipe and (recipe in shown or not shown):
        settings = Table("setting", "value", "", box=None, header_style="bold")
        config = get_recipe(recipe)
        said = descriptions(config)
        for name, value in to_json(config).items():
            settings.add_row(
                name,
                ",".join(map(_short, value)) if isinstance(value, list) else _short(value),
                said.get(name, ""),
            )
        stdout.print(settings)
        stdout.print(f" {config.n_steps:,} steps in all", highlight=False)
        return
    table = Table("recipe", "rungs", "F", "steps", "runs", box=None, header_style="bold")
    families = Counter(name.split("/")[0] for name in shown)
    folded = {family: n for family, n in families.items() if not recipe and n > MOST_OF_A_FAMILY}
    one_by_one = {
        name: config for name, config in shown.items() if name.split("/")[0] not in folded
    }
    table.columns[0].no_wrap, table.columns[0].min_width = True, max(map(len, one_by_one))
    for name, config in one_by_one.items():
        rungs = len(getattr(config, "temperatures", ())) or 1
        swaps = rungs > 1 and getattr(config, "swaps", True)
        factor = f"{getattr(config, 'correction_factor', 1.0):g}" if swaps else "-"
        table.add_row(
            name, str(rungs), factor, f"{config.n_steps:,}", str(getattr(config, "n_runs", 1))
        )
    stdout.print(table)
    for family, n in folded.items():
        first = next(name for name in shown if name.startswith(f"{family}/"))
        stdout.print(
            f" {family}/...  {n} recipes like {first}: `torchrex list {family}/`",
            highlight=False,
            soft_wrap=True,
        )
    if made:
        stdout.print(
            f" `torchrex reproduce {recipe}` makes {recipe} of these",
            highlight=False,
            soft_wrap=True,
        )


def _short(value: Any) -> str:
    """Numbers to six digits: 14/9 is 1.55556."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
