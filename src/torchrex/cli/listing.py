"""What `torchrex list` shows: which recipes there are, and what can be set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from torchrex.cli.console import say, stdout
from torchrex.cli.outputs import OUTPUTS
from torchrex.experiments import ExperimentConfig, get_recipe, recipes, to_json
from torchrex.experiments.config import descriptions
from torchrex.experiments.recipes import families_of, matches

MOST_OF_A_FAMILY = 20  # recipes; larger ones are shown on demand


def show_recipes(word: str) -> None:
    known = recipes()
    shown: Mapping[str, ExperimentConfig]
    shown = {name: config for name, config in known.items() if word in name}
    output = OUTPUTS.get(word) if not shown else None
    if output is not None:
        shown = output.recipes()
    elif not shown:  # as --only of reproduce
        begins = families_of(known)
        shown = {name: config for name, config in known.items() if matches(word, name, begins)}
    if word and (word in shown or not shown):
        _show_settings(get_recipe(word))
        return
    families = Counter(name.split("/")[0] for name in shown)
    folded = {family: n for family, n in families.items() if not word and n > MOST_OF_A_FAMILY}
    one_by_one = {name: c for name, c in shown.items() if name.split("/")[0] not in folded}
    table = Table("recipe", "rungs", "F", "steps", "runs", box=None, header_style="bold")
    table.columns[0].no_wrap, table.columns[0].min_width = True, max(map(len, one_by_one))
    for name, config in one_by_one.items():
        swaps = config.n_rungs > 1 and config.swaps
        factor = f"{config.correction_factor:g}" if swaps else "-"
        table.add_row(name, str(config.n_rungs), factor, f"{config.n_steps:,}", str(config.n_runs))
    stdout.print(table)
    for family, n in folded.items():
        first = next(name for name in shown if name.startswith(f"{family}/"))
        say(f" {family}/...  {n} recipes like {first}: `torchrex list {family}/`")
    if output is not None:
        say(f" `torchrex reproduce {word}` makes {word} of these")


def _show_settings(config: ExperimentConfig) -> None:
    settings = Table("setting", "value", "", box=None, header_style="bold")
    said = descriptions(config)
    for name, value in to_json(config).items():
        text = ",".join(map(_short, value)) if isinstance(value, list) else _short(value)
        settings.add_row(name, text, said.get(name, ""))
    stdout.print(settings)
    stdout.print(f" {config.n_steps:,} steps in all", highlight=False)


def _short(value: Any) -> str:
    """Numbers to six digits: 14/9 is 1.55556."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
