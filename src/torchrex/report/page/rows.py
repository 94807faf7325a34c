"""Families of runs, which differ in nothing but the seed: a row of a table, and its numbers.

Runs of one recipe that differ in more than the seed are different families, and what differs is in
their names. A run whose config.json is missing or damaged stays with the runs of its folder, but
not in their numbers: nobody knows whether it was made as they were.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrex.experiments import recipes
from torchrex.report.compare import (
    ABSENT,
    NOT_USED,
    differing,
    differing_that_matter,
    unused,
    with_known_settings,
)
from torchrex.report.page.ladder import Pooled, pooled
from torchrex.report.plots import COLOURS, LOOKS, error_of_mean
from torchrex.report.reader import LoadedRun, NotRead
from torchrex.report.tables import value_and_error
from torchrex.runs.config import COLUMNS, Column, ExperimentConfig, to_json

MANY = 10_000  # from here on a number without an error is written out
PERCENT = ("accuracy", "ece", "acceptance_rate", "called_fake")  # of metrics without a column
MOST_COLUMNS = 8
MOST_SETTINGS = 4  # in the name of a family


@dataclass
class Family:
    """Runs with the same settings, one a seed."""

    recipe: str
    config: dict[str, Any]
    runs: list[LoadedRun] = field(default_factory=list)
    difference: str = ""  # to the other rows of the recipe
    title: str = ""  # in the table, with all settings that are not the recipe's
    others: list[NotRead] = field(default_factory=list)  # folders of further seeds, not read
    colour: str = COLOURS[0]  # of its method, on the whole page

    @cached_property
    def ladder(self) -> Pooled | None:
        """How the ladder of all its runs behaved; None where none recorded it."""
        return pooled(with_known_settings(self.drawn))

    @property
    def method(self) -> str:
        """Which has one colour on the whole page."""
        return str(self.config.get("method") or self.short)

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
class Group:
    """Families that are shown in one table: those whose recipes have the same first word."""

    name: str
    families: list[Family] = field(default_factory=list)


def groups(runs: Sequence[LoadedRun], others: Sequence[NotRead] = ()) -> list[Group]:
    """Rows of runs with the same settings, in groups, each with the other folders next to it."""
    every: list[Family] = []
    for run in sorted(runs, key=lambda run: not run.settings_known):  # those that join others last
        family = _family_of(run, every)
        if family is None:
            family = Family(run.recipe, run.config if run.settings_known else {})
            every.append(family)
        family.runs.append(run)
    place = {id(run): k for k, run in enumerate(runs)}
    found: dict[str, Group] = {}
    for family in every:
        family.runs.sort(key=lambda run: place[id(run)])
        family.others = [each for each in others if each.path.parent == family.runs[0].path.parent]
    for family in sorted(every, key=lambda family: place[id(family.runs[0])]):
        name = family.recipe.split("/", 1)[0]
        name = name if family.settings is None else family.settings.group
        found.setdefault(name, Group(name)).families.append(family)
    for group in found.values():
        _name_differences(group)
    _choose_colours([family for group in found.values() for family in group.families])
    return list(found.values())


def _choose_colours(families: Sequence[Family]) -> None:
    """One for each method: its own, or one that is left."""
    known: dict[str, str] = {}
    for family in families:
        names = (family.method, *family.short.split("-")[::-1])  # such as case3-resgld-F2
        if own := next((LOOKS[name].color for name in names if name in LOOKS), None):
            known[family.method] = own
    left = [colour for colour in COLOURS if colour not in known.values()] or COLOURS
    others = dict.fromkeys(family.method for family in families if family.method not in known)
    known |= {method: left[k % len(left)] for k, method in enumerate(others)}
    for family in families:
        family.colour = known[family.method]


def settings_that_differ(group: Group) -> dict[str, list[Any]]:
    """Settings that are not the same in all families of a group: a value for each family."""
    known = [family for family in group.families if family.config]
    names = dict.fromkeys(
        name
        for family in known[1:]
        for name in differing_that_matter(known[0].config, family.config)
    )
    return {name: [_setting(family.config, name) for family in group.families] for name in names}


def _setting(config: Mapping[str, Any], name: str) -> Any:
    """The value of a setting, parts of its name joined by dots; ABSENT where there is none."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part, ABSENT) if isinstance(value, Mapping) else ABSENT
    return NOT_USED if name in unused(config) else value


def _family_of(run: LoadedRun, families: Sequence[Family]) -> Family | None:
    """The family with the settings of a run; if they are not known, one with runs of its folder,
    or of the same recipe.
    """
    same = [family for family in families if family.recipe == run.recipe]
    if run.settings_known:
        return next((family for family in same if not differing(family.config, run.config)), None)
    near = [
        family for family in families if any(x.path.parent == run.path.parent for x in family.runs)
    ]
    return next(iter([*near, *same]), None)


def _name_differences(group: Group) -> None:
    known = recipes()
    for family in group.families:
        others = [
            each for each in group.families if each.recipe == family.recipe and each is not family
        ]
        found = (differing(family.config, other.config).items() for other in others)
        # What distinguishes the rows comes first.
        named = dict(sorted((key, own) for each in found for key, (own, _) in each))
        family.difference = _in_words(named) or ("no config" if others else "")
        if family.recipe in known and family.config:
            usual = differing(family.config, to_json(known[family.recipe]))
            # A setting that the run's version did not have yet is none of the run's.
            named |= {key: own for key, (own, _) in sorted(usual.items()) if own != ABSENT}
        family.title = f"{family.short} ({_in_words(named)})" if named else family.label


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


def columns(group: Group) -> tuple[list[str], int]:
    """The metrics of a table: those that the configs ask for, else the first few of so many."""
    there = {name for family in group.families for run in family.runs for name in run.numbers}
    configs = [family.settings for family in group.families if family.settings is not None]
    wanted = dict.fromkeys(each.metric for config in configs for each in config.columns)
    chosen = [name for name in wanted if name in there]
    others = sorted(name for name in there if not name.endswith("_se"))
    return (chosen or others)[:MOST_COLUMNS], len(chosen or others)


def cell(family: Family, metric: str) -> tuple[str, float | None]:
    """`94.20(8)` and the value to sort by: the mean over finished seeds with its error."""
    known = [run.numbers for run in family.finished if metric in run.numbers]
    if not known:
        return "-", None
    values = [each[metric] * scale(metric) for each in known]
    errors = [each.get(f"{metric}_se") for each in known]
    mean = statistics.fmean(values)
    error = error_of_mean(values, [None if e is None else e * scale(metric) for e in errors])
    return shown(mean, error), float(f"{mean:.8g}")


def shown(value: float, error: float | None) -> str:
    """To the digits that the error leaves; large numbers without one are written out."""
    if (not error or error != error) and MANY <= abs(value) < 1e15:
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
