"""`torchrex list`, from an index of all recipes: it answers at once, as torch is not needed.

`python tests/recipe_index.py` writes the index; a test holds it equal to the recipes.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from torchrex.names import families_of, matches, require_free, require_recipe, require_setting

INDEX = Path(__file__).with_name("recipes.json")
FIXED = "fixed"  # the description of a setting that --set cannot change
MOST_OF_A_FAMILY = 20  # recipes; larger ones are shown on demand
ROW = ("recipe", "rungs", "F", "steps", "runs")


@functools.cache
def index() -> dict[str, Any]:
    """`recipes` by name: kind, row, and the settings that are not those `usual` for the kind;
    what is `said` of the settings of a kind; the recipes of the `outputs` of reproduce.
    """
    found: dict[str, Any] = json.loads(INDEX.read_text())
    return found


def settings_of(recipe: str) -> dict[str, Any]:
    about = index()["recipes"][recipe]
    return {**index()["usual"][about["kind"]], "recipe": recipe, **about["other"]}


def require_settings(recipe: str, values: Mapping[str, Any], where: str = "--set") -> None:
    """Refuse settings that the recipe does not have, or has fixed to another value; torch is not
    needed for that. The parts of a setting are joined to it by a dot, or are a mapping.
    """
    settings, said = settings_of(recipe), index()["said"][index()["recipes"][recipe]["kind"]]
    fixed = [name for name in settings if said.get(name) == FIXED]
    for key, value in values.items():
        name = key.split(".")[0]
        if key == "made_by" or (key in settings and value == settings[key]):
            continue
        require_free(name, fixed, key)
        require_setting(name, [each for each in settings if each not in fixed], key, where)
        if isinstance(value, dict) and isinstance(settings[name], dict):
            for part in value:
                require_setting(part, list(settings[name]), f"{name}.{part}", where)


def complete_recipe(incomplete: str) -> list[str]:
    """For a shell: the recipes that begin so."""
    return [name for name in index()["recipes"] if name.startswith(incomplete)]


def show_recipes(word: str, as_json: bool) -> None:
    """All recipes, those with a word in their name, those of an output, or one recipe."""
    known = index()["recipes"]
    shown = [name for name in known if word in name]
    is_output = not shown and word in index()["outputs"]
    if is_output:
        shown = index()["outputs"][word]
    elif not shown:  # as --only of reproduce
        begins = families_of(known)
        shown = [name for name in known if matches(word, name, begins)]
    if word and (word in shown or not shown):
        require_recipe(word, known)
        _show_settings(word, as_json)
    elif as_json:
        rows = [dict(zip(ROW, (name, *known[name]["row"]), strict=True)) for name in shown]
        typer.echo(json.dumps({"recipes": rows}, indent=2))
    else:
        _show_table(shown, fold=not word)
        if is_output:
            typer.echo(f" `torchrex reproduce {word}` makes {word} of these")


def _show_table(shown: list[str], *, fold: bool) -> None:
    from rich.table import Table

    from torchrex.cli.console import say, stdout

    families = Counter(name.split("/")[0] for name in shown)
    folded = {family: n for family, n in families.items() if fold and n > MOST_OF_A_FAMILY}
    one_by_one = [name for name in shown if name.split("/")[0] not in folded]
    table = Table(*ROW, box=None, header_style="bold")
    table.columns[0].no_wrap, table.columns[0].min_width = True, max(map(len, one_by_one))
    for name in one_by_one:
        rungs, factor, n_steps, n_runs = index()["recipes"][name]["row"]
        shown_factor = "-" if factor is None else f"{float(factor):g}"
        table.add_row(name, str(rungs), shown_factor, f"{n_steps:,}", str(n_runs))
    stdout.print(table)
    for family, n in folded.items():
        first = next(name for name in shown if name.startswith(f"{family}/"))
        say(f" {family}/...  {n} recipes like {first}: `torchrex list {family}/`")


def _show_settings(recipe: str, as_json: bool) -> None:
    about, settings = index()["recipes"][recipe], settings_of(recipe)
    said = index()["said"][about["kind"]]
    if as_json:
        row = dict(zip(ROW, (recipe, *about["row"]), strict=True))
        typer.echo(json.dumps({**row, "settings": settings, "about": said}, indent=2))
        return
    from rich.table import Table

    from torchrex.cli.console import stdout

    table = Table("setting", "value", "", box=None, header_style="bold")
    for name, value in settings.items():
        text = ",".join(map(_short, value)) if isinstance(value, list) else _short(value)
        table.add_row(name, text, said.get(name, ""))
    stdout.print(table)
    stdout.print(f" {about['row'][2]:,} steps in all", highlight=False)


def _short(value: Any) -> str:
    """Numbers to six digits: 14/9 is 1.55556."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
