"""The command that repeats a run: the recipe, the seed, and every setting that is not the recipe's."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchrex.errors import RecipeError, TorchrexError
from torchrex.experiments.config import override, to_json
from torchrex.experiments.recipes import get_recipe
from torchrex.report.runs import LoadedRun


class Command(NamedTuple):
    """A line for a shell, empty if there is none, and what is to be known about it."""

    line: str
    note: str


def command_to_repeat(run: LoadedRun, out: str = "runs/again") -> Command:
    """Checked: applied to the recipe, the settings give back the config of the run, or the note
    says which do not.
    """
    try:
        recipe = get_recipe(run.recipe)
    except RecipeError:
        return Command(
            "", "This version has no recipe of that name; the config below is all there is."
        )
    if not run.config:
        return Command("", "Its config.json is missing or damaged, so the settings are not known.")
    usual = to_json(recipe)
    assignments = list(_differences(recipe, usual, run.config))
    try:
        again = to_json(override(recipe, assignments))
    except (TorchrexError, ValueError, TypeError, ArithmeticError) as error:
        return Command(
            "", f"The settings of its config.json cannot be given to this version ({error})."
        )
    different = sorted(
        key for key in {*again, *run.config} if again.get(key) != run.config.get(key)
    )
    note = f"Not the same in this version: {', '.join(different)}." if different else ""
    words = ["torchrex", "run", run.recipe, "--seed", str(max(0, run.seed))]
    for assignment in assignments:
        words += ["--set", assignment]
    return Command(shlex.join([*words, "--out", out]), note)


def _differences(
    recipe: Any, usual: Mapping[str, Any], there: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for field in dataclasses.fields(recipe):
        name, value = field.name, there.get(field.name)
        if not field.metadata.get("settable", True) or name not in there or value == usual[name]:
            continue
        part = getattr(recipe, name)
        if dataclasses.is_dataclass(part) and isinstance(value, dict):
            yield from _differences(part, usual[name], value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_text(each) for each in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
