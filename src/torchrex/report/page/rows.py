"""Runs next to each other: which of them are one row of a table, and the numbers of a row.

Runs of one recipe that differ in more than the seed are different rows, and what differs is in
their names. A run whose config.json is missing or damaged stays with the runs of its folder, but
not in their numbers: nobody knows whether it was made as they were.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrex.experiments import recipes
from torchrex.report.compare import ABSENT, differing, with_known_settings
from torchrex.report.plots import error_of_mean
from torchrex.report.reader import LoadedRun, NotRead
from torchrex.report.tables import value_and_error
from torchrex.runs.config import COLUMNS, Column, ExperimentConfig, to_json

MANY = 10_000  # from here on a number without an error is written out
PERCENT = ("accuracy", "ece", "acceptance_rate", "called_fake")  # of metrics without a column
MOST_COLUMNS = 8
MOST_SETTINGS = 4  # in the name of a row


@dataclass
class Row:
    """Runs with the same settings, one a seed."""

    recipe: str
    config: dict[str, Any]
    runs: list[LoadedRun] = field(default_factory=list)
    difference: str = ""  # to the other rows of the recipe
    title: str = ""  # in the table, with all settings that are not the recipe's
    others: list[NotRead] = field(default_factory=list)  # folders of further seeds, not read

    @property
    def short(self) -> str:
        return self.recipe.split("/", 1)[-1]

    @property
    def label(self) -> str:
        return f"{self.short} ({self.difference})" if self.difference else self.short

    @property
    def settings(self) -> ExperimentConfig | None:
        return next((run.settings for run in self.runs if run.settings is not None), None)

    @property
    def finished(self) -> list[LoadedRun]:
        """The runs whose numbers are shown: of a seed in several folders, the first."""
        return _one_of_each_seed(self._all_finished)

    @property
    def drawn(self) -> list[LoadedRun]:
        """The runs whose curves are shown, unfinished ones too."""
        return _one_of_each_seed(sorted(self.runs, key=lambda run: run.status != "finished"))

    @property
    def again(self) -> int:
        """How many finished runs are left out because their seed is there already."""
        return len(self._all_finished) - len(self.finished)

    @property
    def _all_finished(self) -> list[LoadedRun]:
        return [run for run in with_known_settings(self.runs) if run.status == "finished"]

    @property
    def seeds(self) -> str:
        """How many seeds are in the means, and what became of the others."""
        finished, n = self.finished, len(self.runs) + len(self.others)
        out = [run for run in self.runs if run not in finished]
        damaged = [run for run in out if run.status == "damaged" or "config.json" in run.damaged]
        counts = {
            "damaged": len(damaged),
            "without config.json": sum(not run.config and run not in damaged for run in out),
            **Counter(each.status for each in self.others),
            "of the same seed": self.again,
        }
        marks = [f"{count} {word}" for word, count in counts.items() if count]
        return str(n) if len(finished) == n else ", ".join([f"{len(finished)} of {n}", *marks])


def _one_of_each_seed(runs: Iterable[LoadedRun]) -> list[LoadedRun]:
    by_seed: dict[int | Path, LoadedRun] = {}
    for run in runs:
        by_seed.setdefault(run.seed if run.seed >= 0 else run.path, run)
    return list(by_seed.values())


@dataclass
class Family:
    """Recipes with the same first word."""

    name: str
    rows: list[Row] = field(default_factory=list)


def families(runs: Sequence[LoadedRun], others: Sequence[NotRead] = ()) -> list[Family]:
    """Rows of runs with the same settings, in families, each with the other folders next to it."""
    rows: list[Row] = []
    for run in sorted(runs, key=lambda run: not run.settings_known):  # those that join others last
        row = _row_of(run, rows)
        if row is None:
            row = Row(run.recipe, run.config if run.settings_known else {})
            rows.append(row)
        row.runs.append(run)
    place = {id(run): k for k, run in enumerate(runs)}
    found: dict[str, Family] = {}
    for row in rows:
        row.runs.sort(key=lambda run: place[id(run)])
        row.others = [each for each in others if each.path.parent == row.runs[0].path.parent]
    for row in sorted(rows, key=lambda row: place[id(row.runs[0])]):
        name = row.recipe.split("/", 1)[0]
        found.setdefault(name, Family(name)).rows.append(row)
    for family in found.values():
        _name_differences(family)
    return list(found.values())


def _row_of(run: LoadedRun, rows: Sequence[Row]) -> Row | None:
    """The row with the settings of a run; if they are not known, one with runs in the same folder,
    or of the same recipe.
    """
    same = [row for row in rows if row.recipe == run.recipe]
    if run.settings_known:
        return next((row for row in same if not differing(row.config, run.config)), None)
    near = [row for row in rows if any(x.path.parent == run.path.parent for x in row.runs)]
    return next(iter([*near, *same]), None)


def _name_differences(family: Family) -> None:
    known = recipes()
    for row in family.rows:
        others = [each for each in family.rows if each.recipe == row.recipe and each is not row]
        found = (differing(row.config, other.config).items() for other in others)
        # What distinguishes the rows comes first.
        named = dict(sorted((key, own) for each in found for key, (own, _) in each))
        row.difference = _in_words(named) or ("no config" if others else "")
        if row.recipe in known and row.config:
            usual = differing(row.config, to_json(known[row.recipe]))
            # A setting that the run's version did not have yet is none of the run's.
            named |= {key: own for key, (own, _) in sorted(usual.items()) if own != ABSENT}
        row.title = f"{row.short} ({_in_words(named)})" if named else row.label


def _in_words(settings: Mapping[str, Any]) -> str:
    words = [f"{name}={value}" for name, value in settings.items()]
    more = f", and {len(words) - MOST_SETTINGS} more" if len(words) > MOST_SETTINGS else ""
    return ", ".join(words[:MOST_SETTINGS]) + more


# Numbers


def column(metric: str) -> Column:
    percent = metric.endswith(PERCENT)
    return COLUMNS.get(metric) or Column(metric, metric.replace("_", " "), percent)


def label(metric: str) -> str:
    shown = column(metric)
    return shown.title + (", %" if shown.percent else "")


def scale(metric: str) -> float:
    return 100.0 if column(metric).percent else 1.0


def columns(family: Family) -> list[str]:
    """The metrics of a table: those that the configs ask for, else the first few."""
    there = {name for row in family.rows for run in row.runs for name in run.numbers}
    configs = [row.settings for row in family.rows if row.settings is not None]
    wanted = dict.fromkeys(each.metric for config in configs for each in config.columns)
    chosen = [name for name in wanted if name in there]
    others = sorted(name for name in there if not name.endswith("_se"))
    return (chosen or others)[:MOST_COLUMNS]


def cell(row: Row, metric: str) -> tuple[str, float | None]:
    """`94.20(8)` and the value to sort by: the mean over finished seeds with its error."""
    known = [run.numbers for run in row.finished if metric in run.numbers]
    if not known:
        return "-", None
    values = [each[metric] * scale(metric) for each in known]
    errors = [each.get(f"{metric}_se") for each in known]
    mean = statistics.fmean(values)
    error = error_of_mean(values, [None if e is None else e * scale(metric) for e in errors])
    return shown(mean, error), float(f"{mean:.8g}")


def shown(value: float, error: float | None) -> str:
    """To the digits that the error leaves; large numbers without one are written out."""
    if not error and MANY <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return value_and_error(value, error)


def paper_of(config: ExperimentConfig | None) -> dict[str, tuple[str, float]]:
    """The paper's numbers by metric, in the unit in which it is shown: as text, and to sort by."""
    found = {}
    for metric, (value, sd) in ({} if config is None else config.paper_numbers).items():
        there = float(f"{value * scale(metric):.8g}")
        text = "none" if metric == "acceptance_rate" and value == 0 else f"{there:g}"
        if sd is not None:
            text = f"{there:.2f} ± {2 * sd * scale(metric):.2f}"
        found[metric] = (text, there)
    return found
