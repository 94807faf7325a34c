"""The command that repeats a run: the recipe, the seed, and every setting that is not the recipe's."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchrex.errors import RecipeError, TorchrexError
from torchrex.experiments import get_recipe
from torchrex.experiments.config import override, to_json
from torchrex.report.reader import LoadedRun


class Command(NamedTuple):
    """A line for a shell, empty if there is none, and what to know about it."""

    line: str
    note: str


def command_to_repeat(run: LoadedRun, out: str = "runs/again") -> Command:
    """Checked: the settings, applied to the recipe, give back the config, or the note says which do
    not.
    """
    try:
        recipe = get_recipe(run.recipe)
    except RecipeError:
        return Command("", "This version has no recipe of that name.")
    if not run.config:
        return Command("", "Its config.json is missing or damaged: its settings are not known.")
    assignments = list(_differences(recipe, to_json(recipe), run.config))
    try:
        again = to_json(override(recipe, assignments))
    except (TorchrexError, ValueError, TypeError, ArithmeticError) as error:
        return Command("", f"This version refuses the settings of its config.json ({error}).")
    keys = {*again, *run.config}
    different = sorted(key for key in keys if again.get(key) != run.config.get(key))
    note = f"Not the same in this version: {', '.join(different)}." if different else ""
    words = ["torchrex", "run", run.recipe, "--seed", str(max(0, run.seed))]
    words += [word for assignment in assignments for word in ("--set", assignment)]
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
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
