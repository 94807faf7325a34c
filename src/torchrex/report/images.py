"""Tables 1 and 2 from run folders: which runs stand behind a row, its numbers beside the paper's,
and what the swaps did.

Runs are taken as they are. Those of one recipe that differ in more than the seed are different
rows, and every setting that is not the recipe's is shown: a run of 150 epochs is not the paper's
500.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchrex.experiments.image_recipes import (
    PAPER_TABLE1,
    PAPER_TABLE2,
    table1_recipes,
    table2_recipes,
)
from torchrex.experiments.images import PAPER_EPOCHS, ImageConfig
from torchrex.report.image_numbers import PAPER_SEEDS as PAPER_SEEDS
from torchrex.report.image_numbers import (
    Run,
    Settings,
    beside_the_paper,
    finished_runs,
    origin,
    paired,
    summary,
)

FAMILIES = ("icml2020", "clean")
HEADLINE = {
    "icml2020": "logits_best_accuracy",
    "clean": "accuracy",
}  # what a family reports: the authors took the best epoch
NUMBERS = (
    "logits_accuracy",
    "logits_best_accuracy",
    "accuracy",
    "best_accuracy",
    "single_accuracy",
    "nll",
    "ece",
    "brier",
)

ImageRun = Run[ImageConfig]
Paper = Mapping[tuple[str, str], tuple[tuple[float, float], ...]]
TABLES: dict[str, tuple[Callable[[], dict[str, ImageConfig]], Paper]] = {
    "table1": (table1_recipes, PAPER_TABLE1),
    "table2": (table2_recipes, PAPER_TABLE2),
}


class Line(NamedTuple):
    """A row of every cell."""

    title: str
    method: str
    prefix: str = ""  # of its metrics
    paper: int | None = None  # the column of the paper


MSGD, SGHMC, RESGHMC = (
    Line("M-SGD", "msgd", "", 0),
    Line("SGHMC", "sghmc", "", 1),
    Line("reSGHMC", "resghmc", "", 2),
)
EXCHANGING, INDEPENDENT = (
    Line("reSGHMC, both rungs", "resghmc", "pooled_"),
    Line("no swaps, both rungs", "independent", "pooled_"),
)
LINES = (MSGD, SGHMC, RESGHMC, EXCHANGING, INDEPENDENT)


def family_of(run: ImageRun) -> str:
    return run.recipe.recipe.split("/")[0]


@dataclass(frozen=True)
class Cell:
    """One network on one data set under the rules of one family, with one choice of settings."""

    family: str
    data: str
    net: str
    settings: Settings
    lines: dict[Line, dict[int, ImageRun]]  # by seed; a line without runs is not there
    paper: tuple[tuple[float, float], ...]

    @property
    def name(self) -> str:
        return f"{self.family} {self.data} {self.net}"

    @property
    def headline(self) -> str:
        return HEADLINE[self.family]

    def borrowed(self, line: Line) -> list[int]:
        """Seeds whose run is another one's, because the two are the same run."""
        runs = self.lines[line].items()
        return [
            seed
            for seed, run in runs
            if (family_of(run), run.recipe.method) != (self.family, line.method)
        ]

    def values(self, line: Line, metric: str) -> dict[int, float]:
        return {
            seed: run.number(line.prefix + metric) for seed, run in self.lines.get(line, {}).items()
        }


@dataclass(frozen=True)
class ImageTable:
    """All that is said of table 1 or 2."""

    cells: list[Cell] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row_of(cell, line) for cell in self.cells for line in cell.lines]

    @property
    def effects(self) -> list[dict[str, Any]]:
        return [effect for cell in self.cells for effect in effects_of(cell)]

    def as_numbers(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "swaps": self.effects,
            "not_run": self.not_run,
            "unfinished": self.unfinished,
        }


def tabulate(what: str, out: Path, chosen: Mapping[str, ImageConfig]) -> ImageTable:
    """The table of the chosen recipes from the runs below `out`.

    SGHMC is rung 0 of the pair without swaps where it was not run by itself. Nothing that the
    families do differently touches a run at temperature 0, so that M-SGD of `clean` is that of
    `icml2020` where it was not run.
    """
    recipes, paper = TABLES[what]
    names: dict[tuple[str, str, str, str], str] = {
        (name.split("/")[0], c.data, c.net, c.method): name for name, c in recipes().items()
    }
    beside = {(c.data, c.net) for c in chosen.values()}
    runs, unfinished = finished_runs(
        out, {name: c for name, c in recipes().items() if (c.data, c.net) in beside}
    )
    table = ImageTable(unfinished=[words for words in unfinished if words.split()[0] in chosen])

    def runs_of(name: str, settings: Settings) -> dict[int, ImageRun]:
        return {
            run.seed: run for run in runs if run.recipe.recipe == name and run.settings == settings
        }

    for data, net in (cell for cell in paper if cell in beside):
        for family in FAMILIES:
            own = {line: names[family, data, net, line.method] for line in LINES}
            pair, descent = own[INDEPENDENT], names["icml2020", data, net, "msgd"]
            shown = [
                line for line in LINES if own[line] in chosen or (line == SGHMC and pair in chosen)
            ]
            asked = {own[line] for line in shown} | ({pair} if SGHMC in shown else set())
            found = {run.settings for run in runs if run.recipe.recipe in asked}
            for settings in sorted(found, key=lambda each: (-each.length, str(each))):
                lines = {line: runs_of(own[line], settings) for line in shown}
                for line, same in ((SGHMC, pair), (MSGD, descent)):
                    if line in lines:
                        lines[line] = dict(
                            sorted({**runs_of(same, settings), **lines[line]}.items())
                        )
                there = {line: by_seed for line, by_seed in lines.items() if by_seed}
                cell = Cell(family, data, net, settings, there, paper[data, net])
                table.cells.append(cell)
                table.not_run.extend(
                    f"{cell.name} at {settings.length} epochs ({line.title})"
                    for line in shown
                    if line not in there
                )
            if shown and not found:
                table.not_run.append(f"{family} {data} {net}")
    return table


def row_of(cell: Cell, line: Line) -> dict[str, Any]:
    """Everything known of a row. Accuracies and the calibration error are in percent."""
    runs = list(cell.lines[line].values())
    paper = (
        None if line.paper is None or cell.settings.others else cell.paper[line.paper]
    )  # of another setting it has none
    return {
        "family": cell.family,
        "data": cell.data,
        "net": cell.net,
        "method": line.title,
        "recipes": sorted({run.recipe.recipe for run in runs}),
        "borrowed_seeds": cell.borrowed(line),
        "seeds": [run.seed for run in runs],
        "n": len(runs),
        "epochs": cell.settings.length,
        "settings": dict(cell.settings.others),
        "headline": cell.headline,
        # shorter runs are another experiment
        **beside_the_paper(
            cell.values(line, cell.headline), paper, tested=cell.settings.length == PAPER_EPOCHS
        ),
        **{name: summary(cell.values(line, name)) for name in NUMBERS},
        "swaps": [run.swaps for run in runs] if line.method in ("resghmc", "independent") else None,
        **origin(runs),
    }


def effects_of(cell: Cell) -> list[dict[str, Any]]:
    """What the swaps did, seed by seed: beyond the ensemble of equal compute, and for rung 0 beyond
    SGHMC.
    """
    effects = []
    for more, less in ((EXCHANGING, INDEPENDENT), (RESGHMC, SGHMC)):
        for metric in dict.fromkeys((cell.headline, "accuracy", "nll")):
            ours, theirs = cell.values(more, metric), cell.values(less, metric)
            effects.append(
                {
                    **{
                        "family": cell.family,
                        "data": cell.data,
                        "net": cell.net,
                        "epochs": cell.settings.length,
                    },
                    **{
                        "settings": dict(cell.settings.others),
                        "of": more.title,
                        "minus": less.title,
                        "metric": metric,
                    },
                    **paired(ours, theirs),
                }
            )
    return effects
