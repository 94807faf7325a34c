"""Runs side by side: which of them are one row, the numbers of a row beside the paper's, and the
charts with a line for each row.

Runs of one recipe that differ in more than the seed are different rows, and what differs is said.
The table also says what is not as the recipe has it: a shorter run stands beside the paper's number
there. A run whose config.json is missing or damaged stays with the runs of its folder, but not in
their numbers: nobody knows whether it was made as they were.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchrex.experiments.config import to_json
from torchrex.experiments.recipes import recipes
from torchrex.report.page.charts import Chart
from torchrex.report.page.thin import number
from torchrex.report.runs import LoadedRun
from torchrex.report.series import error_of_mean
from torchrex.report.settings_that_matter import ABSENT, NAMES, differing, with_known_settings
from torchrex.report.tables import value_and_error

LABELS = {
    "acceptance_rate": "accepted swaps, %",
    "noise_variance": "σ², nats²",
    "left_weight": "left weight",
    "left_weight_true": "true left weight",
    "w1": "W1",
    "w2": "W2",
    "logits_best_accuracy": "accuracy of logits, best epoch, %",
    "accuracy": "accuracy, %",
    "single_accuracy": "accuracy of one net, %",
    "pooled_accuracy": "accuracy, all rungs, %",
    "paper_accuracy": "accuracy as the authors count, %",
    "called_fake": "called generated, %",
    "nll": "NLL, nats",
    "single_nll": "NLL of one net, nats",
    "ece": "ECE, %",
    "brier": "Brier",
    "mutual_information": "mutual information, nats",
    "training_mode_accuracy": "accuracy as the authors count, BatchNorm in training mode, %",
    "variety": "variety of a generator, real images 1",
    "largest_mean_error_in_sd": "largest error of a mean, sd",
    "smallest_sd_ratio": "smallest ratio of sds",
    "largest_sd_ratio": "largest ratio of sds",
}
MANY = 10_000  # from here on a number without an error is written out
PERCENT = ("accuracy", "ece", "acceptance_rate", "called_fake")
MOST_COLUMNS = 8
MOST_SETTINGS = 4  # that the name of a row has room for


class Paper(NamedTuple):
    """What the paper says of a metric, in the unit in which it is shown."""

    value: float
    text: str
    note: str = ""


@dataclass
class Row:
    """Runs with the same settings, one a seed."""

    recipe: str
    config: dict[str, Any]
    runs: list[LoadedRun] = field(default_factory=list)
    difference: str = ""  # to the other rows of the recipe
    title: str = ""  # in the table, with all settings that are not the recipe's
    empty: list[Path] = field(default_factory=list)  # folders of further seeds that hold nothing

    @property
    def label(self) -> str:
        return f"{self.short} ({self.difference})" if self.difference else self.short

    @property
    def short(self) -> str:
        return self.recipe.split("/", 1)[-1]

    @property
    def finished(self) -> list[LoadedRun]:
        """The runs whose numbers are shown: of a seed that was run or copied into several folders,
        the first.
        """
        return _one_of_each_seed(
            [run for run in with_known_settings(self.runs) if run.status == "finished"]
        )

    @property
    def drawn(self) -> list[LoadedRun]:
        """The runs whose curves are shown, one of a seed likewise; what there is of those that are
        not finished.
        """
        return _one_of_each_seed(sorted(self.runs, key=lambda run: run.status != "finished"))

    @property
    def again(self) -> int:
        """How many finished runs are left out because their seed is there already."""
        return sum(run.status == "finished" for run in with_known_settings(self.runs)) - len(
            self.finished
        )


def _one_of_each_seed(runs: Iterable[LoadedRun]) -> list[LoadedRun]:
    """The first of each; where the seed is not known every run counts."""
    by_seed: dict[int | Path, LoadedRun] = {}
    for run in runs:
        by_seed.setdefault(run.seed if run.seed >= 0 else run.path, run)
    return list(by_seed.values())


@dataclass
class Family:
    """Recipes with the same first word."""

    name: str
    rows: list[Row] = field(default_factory=list)


def families(runs: Sequence[LoadedRun], empty: Sequence[Path] = ()) -> list[Family]:
    """Rows of runs with the same settings, in families; empty run folders are told with the row
    whose runs lie beside them.
    """
    found: dict[str, Family] = {}
    rows: dict[tuple[str, str], Row] = {}
    for run in sorted(
        runs, key=lambda run: not run.settings_known
    ):  # those that join others come last
        row = None if run.settings_known else _row_of_folder(rows.values(), run)
        if row is None:
            matter = {
                name: _as_float(value) for name, value in run.config.items() if name not in NAMES
            }
            key = (
                run.recipe,
                json.dumps(matter, sort_keys=True, default=str) if run.settings_known else "",
            )
            row = rows.setdefault(key, Row(run.recipe, run.config if run.settings_known else {}))
        row.runs.append(run)
    first = {id(run): k for k, run in enumerate(runs)}
    for row in sorted(rows.values(), key=lambda row: min(first[id(run)] for run in row.runs)):
        row.runs.sort(key=lambda run: first[id(run)])
        row.empty = [path for path in empty if path.parent == row.runs[0].path.parent]
        name = row.recipe.split("/", 1)[0]
        found.setdefault(name, Family(name)).rows.append(row)
    for family in found.values():
        _name_differences(family)
    return list(found.values())


def _as_float(value: Any) -> Any:
    """150000 and 150000.0 are one setting."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _row_of_folder(rows: Iterable[Row], run: LoadedRun) -> Row | None:
    """The row with runs beside `run`; in want of that, one of its recipe."""
    beside = [row for row in rows if any(each.path.parent == run.path.parent for each in row.runs)]
    return next(iter([*beside, *(row for row in rows if row.recipe == run.recipe)]), None)


def _name_differences(family: Family) -> None:
    known = recipes()
    for row in family.rows:
        same = [
            other.config for other in family.rows if other.recipe == row.recipe and other is not row
        ]
        told = {
            key: own for other in same for key, (own, _) in differing(row.config, other).items()
        }
        told = dict(sorted(told.items()))  # they come first: by them rows are told apart
        row.difference = _in_words(told) or ("no config" if same else "")
        if row.recipe in known and row.config:
            usual = differing(row.config, to_json(known[row.recipe]))
            # a setting that the run's version did not have yet is none of the run's
            told |= {key: own for key, (own, _) in sorted(usual.items()) if own != ABSENT}
        row.title = row.label if not told else f"{row.short} ({_in_words(told)})"


def _in_words(settings: Mapping[str, Any]) -> str:
    words = [f"{name}={value}" for name, value in settings.items()]
    more = f", and {len(words) - MOST_SETTINGS} more" if len(words) > MOST_SETTINGS else ""
    return ", ".join(words[:MOST_SETTINGS]) + more


def columns(family: Family) -> list[str]:
    """The metrics a table shows: those that have a label here if any run has one, else the first
    few numbers.
    """
    there = {name for row in family.rows for run in row.runs for name in metrics_of(run)}
    chosen = [name for name in LABELS if name in there]
    return (chosen or sorted(name for name in there if not name.endswith("_se")))[:MOST_COLUMNS]


def label(metric: str) -> str:
    return LABELS.get(metric, metric.replace("_", " ") + (", %" if scale(metric) == 100 else ""))


def metrics_of(run: LoadedRun) -> dict[str, float]:
    """The numbers among the metrics of a result, whatever else is in there."""
    found = (run.result or {}).get("metrics")
    each = found.items() if isinstance(found, dict) else ()
    return {
        str(name): float(v)
        for name, v in each
        if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
    }


def scale(metric: str) -> float:
    return 100.0 if metric.endswith(PERCENT) else 1.0


def cell(row: Row, metric: str) -> tuple[str, float | None]:
    """`94.20(8)` and the value to sort by: mean over finished seeds; the error of the mean applies
    to the last digits shown.
    """
    known = [metrics_of(run) for run in row.finished]
    values = [each[metric] * scale(metric) for each in known if metric in each]
    if not values:
        return "", None
    errors = [
        each[f"{metric}_se"] * scale(metric) if f"{metric}_se" in each else None
        for each in known
        if metric in each
    ]
    mean = statistics.fmean(values)
    return shown(metric, mean, error_of_mean(values, errors)), number(mean, 8)


def shown(metric: str, value: float, error: float | None) -> str:
    """A number of the page: to the digits that its error leaves it, what is exact to four decimals,
    large ones written out.
    """
    if not error and metric == "left_weight_true":
        return f"{value:.4f}"
    if not error and MANY <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return value_and_error({"v": value, "v_se": error}, "v")


def paper_of(row: Row) -> dict[str, Paper]:
    """The paper's numbers for a row, by metric."""
    config: Any = next((run.settings for run in row.runs if run.settings is not None), None)
    found: dict[str, Paper] = {}
    for metric, (value, sd) in (config.paper_numbers if config else {}).items():
        shown = value * scale(metric)
        if sd is None:
            text = "none" if metric == "acceptance_rate" and value == 0 else f"{shown:g}"
        else:
            text = f"{shown:.2f} ± {2 * sd * scale(metric):.2f}"
        found[metric] = Paper(round(shown, 6), text, config.paper_note if config else "")
    return found


def overlays(family: Family, charts: dict[int, list[Chart]]) -> list[Chart]:
    """Charts of one kind and key with a line for each row: the mean over seeds where their x agree,
    else the first seed.

    `charts` are those of every run by `id`.
    """
    made: dict[tuple[str, str], Chart] = {}
    members: dict[tuple[str, str], list[str]] = {}
    for row in family.rows:
        own = [[each for each in charts[id(run)] if "key" in each] for run in row.drawn]
        for place, first in enumerate(next((each for each in own if each), [])):
            name = (first["kind"], first["key"])
            same = [
                each[place]
                for each in own
                if len(each) > place and each[place]["kind"] == first["kind"]
            ]
            if name in made and "yLow" in first:
                made[name]["yLow"] = min(made[name].get("yLow", first["yLow"]), first["yLow"])
            if name not in made:
                made[name] = {**first, "series": [s for s in first["series"] if s.get("reference")]}
                made[name].pop("note", None)
            members.setdefault(name, []).append(row.recipe.split("/", 1)[-1])
            style = len(members[name]) - 1
            for k, line in enumerate(first["series"]):
                if line.get("own") and line["type"] != "band":
                    y, pooled = _mean([each["series"][k] for each in same])
                    if not pooled:
                        made[name]["note"] = (
                            "Where the x of several seeds differ, the first seed is drawn."
                        )
                    made[name]["series"].append(
                        {**line, "name": row.label, "y": y, "style": style, "type": line["type"]}
                    )
    for name, chart in made.items():
        if chart["kind"] == "accuracy":
            chart["title"] = f"Accuracy of the {chart['of']} against number of draws"
        common = (
            _common_prefix(members[name]).rstrip("-_ ")
            if len(members[name]) > 1
            else members[name][0]
        )
        title = chart["title"]
        title = title if title[:2].isupper() or title[1].isdigit() else title[0].lower() + title[1:]
        chart["title"] = f"{common}: {title}" if common else chart["title"]
    return [chart for chart in made.values() if len(members[chart["kind"], chart["key"]]) > 1]


def _common_prefix(words: Sequence[str]) -> str:
    first, last = min(words), max(words)
    same = next(
        (k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
    return first[:same]


def _mean(lines: list[dict[str, Any]]) -> tuple[list[Any], bool]:
    """The mean of lines over the same x, and whether all of them are in it."""
    alike = [
        line["y"]
        for line in lines
        if line["x"] == lines[0]["x"] and len(line["y"]) == len(lines[0]["y"])
    ]
    mean = [
        None if None in values else number(statistics.fmean(values))
        for values in zip(*alike, strict=True)
    ]
    return mean, len(alike) == len(lines)
