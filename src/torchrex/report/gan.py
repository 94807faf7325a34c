"""Table 3 from run folders: which runs stand behind a row, its numbers beside the paper's, what
swaps and unlabelled images add.

Runs are taken as they are. Those of one recipe that differ in more than the seed are different
rows, and every setting that is not the recipe's is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchrex.experiments.gan import GanConfig
from torchrex.experiments.gan_recipes import PAPER_TABLE3, PAPER_TWO_SD
from torchrex.report.image_numbers import (
    Run,
    Settings,
    beside_the_paper,
    finished_runs,
    origin,
    paired,
    summary,
)

PAPER_STEPS = 15_000
FAMILIES = {"gan": "", "gan-tuned": "tuned"}  # the first has the paper's settings
METHODS = {
    "sghmc": "SGHMC",
    "resghmc": "reSGHMC",
    "noswaps": "no swaps",
    "supervised": "supervised only",
}
PAPER_COLUMN = {"sghmc": 0, "resghmc": 1}
NUMBERS = (
    "accuracy",
    "best_accuracy",
    "single_accuracy",
    "paper_accuracy",
    "called_fake",
    "nll",
    "ece",
    "brier",
)
NOT_IN_ALL = (
    "training_mode_accuracy",
    "variety",
)  # older results have neither, discriminators alone no variety

GanRun = Run[GanConfig]


class Contribution(NamedTuple):
    """The difference of two methods, and what it is the contribution of."""

    of: str
    method: str
    without: str
    prefix: str = ""  # of the metrics


CONTRIBUTIONS = (
    Contribution("swaps, rung 0", "resghmc", "noswaps"),
    Contribution("swaps, both rungs", "resghmc", "noswaps", "pooled_"),
    Contribution("unlabelled images", "sghmc", "supervised"),
    Contribution("swaps and a second rung", "resghmc", "sghmc"),  # what the paper claims
)


def paper_number(data: str, n_labelled: int, method: str) -> tuple[float, float] | None:
    """Mean and two standard deviations, where the paper has them."""
    if method not in PAPER_COLUMN or (data, n_labelled) not in PAPER_TABLE3:
        return None
    column = PAPER_COLUMN[method]
    return PAPER_TABLE3[data, n_labelled][column], PAPER_TWO_SD[data, n_labelled][column]


@dataclass(frozen=True)
class GanCell:
    """One data set with some labels and one choice of settings."""

    family: str
    data: str
    n_labelled: int
    settings: Settings
    methods: dict[str, dict[int, GanRun]]  # by seed; a method without runs is not there

    @property
    def name(self) -> str:
        """Such as `cifar10 4000 tuned`, with the number of steps where it is not the paper's."""
        shorter = (
            "" if self.settings.length == PAPER_STEPS else f" at {self.settings.length:,} steps"
        )
        return (
            " ".join(filter(None, (self.data, str(self.n_labelled), FAMILIES[self.family])))
            + shorter
        )

    @property
    def as_the_paper(self) -> bool:
        """Whether these are the paper's settings and all its steps; others are another experiment."""
        return self.family == "gan" and self.settings == Settings(PAPER_STEPS)

    def values(self, method: str, metric: str) -> dict[int, float]:
        return {seed: run.number(metric) for seed, run in self.methods.get(method, {}).items()}


@dataclass(frozen=True)
class GanTable:
    """All that is said of table 3."""

    cells: list[GanCell] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row_of(cell, method) for cell in self.cells for method in cell.methods]

    def as_numbers(self) -> dict[str, Any]:
        effects = [effect for cell in self.cells for effect in contributions(cell)]
        return {
            "rows": self.rows,
            "contributions": effects,
            "not_run": self.not_run,
            "unfinished": self.unfinished,
        }


def tabulate(out: Path, chosen: Mapping[str, GanConfig]) -> GanTable:
    """The table of the chosen recipes from the runs below `out`."""
    runs, unfinished = finished_runs(out, chosen, unit="steps")
    table = GanTable(unfinished=unfinished)
    for at in dict.fromkeys(map(_cell_of, chosen.values())):
        here = {config.method for config in chosen.values() if _cell_of(config) == at}
        own = [run for run in runs if _cell_of(run.recipe) == at]
        for settings in sorted(
            {run.settings for run in own}, key=lambda each: (-each.length, str(each))
        ):
            same = [run for run in own if run.settings == settings]
            by_method = {
                method: {run.seed: run for run in same if run.recipe.method == method}
                for method in METHODS
            }
            cell = GanCell(
                *at, settings, {method: by_seed for method, by_seed in by_method.items() if by_seed}
            )
            table.cells.append(cell)
            missing = [
                title
                for method, title in METHODS.items()
                if method in here and method not in cell.methods
            ]
            table.not_run.extend(
                f"{cell.name}{f' ({settings})' if settings.others else ''}: {title}"
                for title in missing
            )
        if not own:
            table.not_run.append(GanCell(*at, Settings(PAPER_STEPS), {}).name)
    return table


def _cell_of(config: GanConfig) -> tuple[str, str, int]:
    return config.family, config.data, config.n_labelled


def row_of(cell: GanCell, method: str) -> dict[str, Any]:
    """Everything known of a row. Accuracies, the calibration error and the share called fake are in
    percent.
    """
    runs = list(cell.methods[method].values())
    paper, rungs = paper_number(cell.data, cell.n_labelled, method), runs[0].recipe.n_rungs
    return {
        "family": cell.family,
        "data": cell.data,
        "n_labelled": cell.n_labelled,
        "method": METHODS[method],
        "recipe": runs[0].recipe.recipe,
        "seeds": [run.seed for run in runs],
        "n": len(runs),
        "steps": cell.settings.length,
        "settings": dict(cell.settings.others),
        **beside_the_paper(cell.values(method, "accuracy"), paper, tested=cell.as_the_paper),
        **{name: summary(cell.values(method, name)) for name in NUMBERS},
        **{name: summary(values) if (values := _told(runs, name)) else None for name in NOT_IN_ALL},
        **{
            f"pooled_{name}": summary(cell.values(method, f"pooled_{name}")) if rungs > 1 else None
            for name in ("accuracy", "nll")
        },
        "swaps": [run.swaps for run in runs] if rungs > 1 else None,
        **origin(runs),
    }


def _told(runs: list[GanRun], metric: str) -> dict[int, float]:
    """The metric by seed, as far as results have it."""
    return {run.seed: run.number(metric) for run in runs if metric in run.result["metrics"]}


def contributions(cell: GanCell) -> list[dict[str, Any]]:
    """What swaps and unlabelled images contribute, seed by seed, as far as both methods were run."""
    effects = []
    for of, method, without, prefix in CONTRIBUTIONS:
        if method not in cell.methods or without not in cell.methods:
            continue
        claims = (
            paper_number(cell.data, cell.n_labelled, method),
            paper_number(cell.data, cell.n_labelled, without),
        )
        for metric in ("accuracy", "nll"):
            ours, theirs = (
                cell.values(method, prefix + metric),
                cell.values(without, prefix + metric),
            )
            more, less = claims if metric == "accuracy" else (None, None)
            effects.append(
                {
                    **{
                        "family": cell.family,
                        "data": cell.data,
                        "n_labelled": cell.n_labelled,
                        "steps": cell.settings.length,
                    },
                    **{"settings": dict(cell.settings.others), "contribution": of},
                    **{"of": METHODS[method], "minus": METHODS[without], "metric": prefix + metric},
                    "paper": None if more is None or less is None else more[0] - less[0],
                    **paired(ours, theirs),
                }
            )
    return effects
