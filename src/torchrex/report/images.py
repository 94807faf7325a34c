"""Tables 1 and 2 from run folders: which runs stand behind a row, its numbers beside the paper's, and what the swaps did.

Runs are taken as they are. Those of one recipe that differ in more than the seed are different rows, and every setting that is
not the recipe's is shown: a run of 150 epochs is not the paper's 500.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchrex.errors import RunFolderError
from torchrex.experiments.config import to_json
from torchrex.experiments.image_recipes import PAPER_TABLE1, PAPER_TABLE2, table1_recipes, table2_recipes
from torchrex.experiments.images import PAPER_EPOCHS, ImageConfig
from torchrex.experiments.run_folder import RunFolder

FAMILIES = ("icml2020", "clean")
HEADLINE = {"icml2020": "logits_best_accuracy", "clean": "accuracy"}  # what a family reports: the authors took the best epoch
PAPER_SEEDS = 5
NUMBERS = ("logits_accuracy", "logits_best_accuracy", "accuracy", "best_accuracy", "single_accuracy", "nll", "ece", "brier")
NEEDED: dict[str, Any] = {"metrics": dict, "swaps": list, "curves": dict, "versions": dict, "device": str, "date": str}
NEEDED["wall_seconds"] = int | float
NO_MATTER = ("recipe", "epochs", "checkpoint_every")  # epochs are shown in any case

Paper = Mapping[tuple[str, str], tuple[tuple[float, float], ...]]
TABLES: dict[str, tuple[Callable[[], dict[str, ImageConfig]], Paper]] = {
    "table1": (table1_recipes, PAPER_TABLE1),
    "table2": (table2_recipes, PAPER_TABLE2),
}


class Settings(NamedTuple):
    """What runs must have in common to be one row."""

    epochs: int
    others: tuple[tuple[str, Any], ...] = ()  # as far as they are not the recipe's

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.others)


class Line(NamedTuple):
    """A row of every cell."""

    title: str
    method: str
    prefix: str = ""  # of its metrics
    paper: int | None = None  # the column of the paper


MSGD, SGHMC, RESGHMC = Line("M-SGD", "msgd", "", 0), Line("SGHMC", "sghmc", "", 1), Line("reSGHMC", "resghmc", "", 2)
EXCHANGING, INDEPENDENT = (
    Line("reSGHMC, both rungs", "resghmc", "pooled_"),
    Line("no swaps, both rungs", "independent", "pooled_"),
)
LINES = (MSGD, SGHMC, RESGHMC, EXCHANGING, INDEPENDENT)


@dataclass(frozen=True)
class Run:
    """A finished run as its folder has it."""

    recipe: ImageConfig
    seed: int
    path: Path
    config: dict[str, Any]
    result: dict[str, Any]

    @property
    def family(self) -> str:
        return self.recipe.recipe.split("/")[0]

    @property
    def settings(self) -> Settings:
        usual = {name: value for name, value in to_json(self.recipe).items() if name not in NO_MATTER}
        others = ((name, self.config.get(name, value)) for name, value in usual.items())
        return Settings(self.config["epochs"], tuple((name, value) for name, value in others if value != usual[name]))

    @property
    def swaps(self) -> int:
        return sum(pair["accepted"] for pair in self.result["swaps"])

    def number(self, name: str) -> float:
        """A metric; accuracies and the calibration error in percent, as in the paper."""
        value = self.result["metrics"].get(name)
        if not isinstance(value, int | float):
            raise RunFolderError(f"{self.path / 'result.json'} has no number {name!r}; run it again with --overwrite")
        return float(value) * (100 if name.endswith(("accuracy", "ece")) else 1)


def finished_runs(out: Path, recipes: Mapping[str, ImageConfig]) -> tuple[list[Run], list[str]]:
    """The finished runs of these recipes, with any settings, and the others in words."""
    runs, unfinished = [], []
    for name, recipe in recipes.items():
        seeds = (re.fullmatch(r"seed=(\d+)", path.name) for path in (out / name).glob("seed=*"))
        for seed in sorted(int(found[1]) for found in seeds if found):
            folder = RunFolder.of(out, name, seed)
            config, result = folder.config, folder.result
            if result is None or result.get("status") != "finished":
                unfinished.append(f"{name} seed {seed} ({'no result' if result is None else result.get('status')})")
                continue
            for key, kind in NEEDED.items():
                if not isinstance(result.get(key), kind):
                    raise RunFolderError(f"{folder.path / 'result.json'} has no {key!r}; run it again with --overwrite")
            if config is None or not isinstance(config.get("epochs"), int):
                raise RunFolderError(f"{folder.path / 'config.json'} does not say how many epochs were run; restore it")
            runs.append(Run(recipe, seed, folder.path, config, result))
    return runs, unfinished


@dataclass(frozen=True)
class Cell:
    """One network on one data set under the rules of one family, with one choice of settings."""

    family: str
    data: str
    net: str
    settings: Settings
    lines: dict[Line, dict[int, Run]]  # by seed; a line without runs is not there
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
        return [seed for seed, run in runs if (run.family, run.recipe.method) != (self.family, line.method)]

    def values(self, line: Line, metric: str) -> dict[int, float]:
        return {seed: run.number(line.prefix + metric) for seed, run in self.lines.get(line, {}).items()}


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
        return {"rows": self.rows, "swaps": self.effects, "not_run": self.not_run, "unfinished": self.unfinished}


def tabulate(what: str, out: Path, chosen: Mapping[str, ImageConfig]) -> ImageTable:
    """The table of the chosen recipes from the runs below `out`.

    SGHMC is rung 0 of the pair without swaps where it was not run by itself. Nothing that the families do differently touches a
    run at temperature 0, so that M-SGD of `clean` is that of `icml2020` where it was not run.
    """
    recipes, paper = TABLES[what]
    names: dict[tuple[str, str, str, str], str] = {
        (name.split("/")[0], c.data, c.net, c.method): name for name, c in recipes().items()
    }
    beside = {(c.data, c.net) for c in chosen.values()}
    runs, unfinished = finished_runs(out, {name: c for name, c in recipes().items() if (c.data, c.net) in beside})
    table = ImageTable(unfinished=[words for words in unfinished if words.split()[0] in chosen])

    def runs_of(name: str, settings: Settings) -> dict[int, Run]:
        return {run.seed: run for run in runs if run.recipe.recipe == name and run.settings == settings}

    for data, net in (cell for cell in paper if cell in beside):
        for family in FAMILIES:
            own = {line: names[family, data, net, line.method] for line in LINES}
            pair, descent = own[INDEPENDENT], names["icml2020", data, net, "msgd"]
            shown = [line for line in LINES if own[line] in chosen or (line == SGHMC and pair in chosen)]
            asked = {own[line] for line in shown} | ({pair} if SGHMC in shown else set())
            found = {run.settings for run in runs if run.recipe.recipe in asked}
            for settings in sorted(found, key=lambda each: (-each.epochs, str(each))):
                lines = {line: runs_of(own[line], settings) for line in shown}
                for line, same in ((SGHMC, pair), (MSGD, descent)):
                    if line in lines:
                        lines[line] = dict(sorted({**runs_of(same, settings), **lines[line]}.items()))
                there = {line: by_seed for line, by_seed in lines.items() if by_seed}
                cell = Cell(family, data, net, settings, there, paper[data, net])
                table.cells.append(cell)
                table.not_run.extend(
                    f"{cell.name} at {settings.epochs} epochs ({line.title})" for line in shown if line not in there
                )
            if shown and not found:
                table.not_run.append(f"{family} {data} {net}")
    return table


def z_score(ours: Sequence[float], paper: tuple[float, float]) -> float:
    """Our mean minus the paper's in standard errors of the difference; one seed is given the paper's standard deviation."""
    mean, sd = paper[0], paper[1] / 2
    own = statistics.stdev(ours) if len(ours) > 1 else sd
    return (statistics.fmean(ours) - mean) / math.sqrt(own**2 / len(ours) + sd**2 / PAPER_SEEDS)


def summary(values: Mapping[int, float]) -> dict[str, Any]:
    """Mean, twice the standard deviation over seeds (None for one seed), and the values by seed."""
    each = list(values.values())
    return {
        "mean": statistics.fmean(each),
        "two_sd": 2 * statistics.stdev(each) if len(each) > 1 else None,
        "values": {str(seed): value for seed, value in values.items()},
    }


def row_of(cell: Cell, line: Line) -> dict[str, Any]:
    """Everything known of a row. Accuracies and the calibration error are in percent."""
    runs = list(cell.lines[line].values())
    ours = cell.values(line, cell.headline)
    paper = None if line.paper is None or cell.settings.others else cell.paper[line.paper]  # of another setting it has none
    beside = paper if cell.settings.epochs == PAPER_EPOCHS else None  # shorter runs are another experiment
    return {
        "family": cell.family,
        "data": cell.data,
        "net": cell.net,
        "method": line.title,
        "recipes": sorted({run.recipe.recipe for run in runs}),
        "borrowed_seeds": cell.borrowed(line),
        "seeds": [run.seed for run in runs],
        "n": len(runs),
        "epochs": cell.settings.epochs,
        "settings": dict(cell.settings.others),
        "paper": None if paper is None else {"mean": paper[0], "two_sd": paper[1]},
        "headline": cell.headline,
        "ours": summary(ours),
        "z": None if beside is None else z_score(list(ours.values()), beside),
        "z_has_the_papers_sd": beside is not None and len(runs) == 1,
        **{name: summary(cell.values(line, name)) for name in NUMBERS},
        "swaps": [run.swaps for run in runs] if line.method in ("resghmc", "independent") else None,
        "wall_minutes": [run.result["wall_seconds"] / 60 for run in runs],
        "devices": sorted({run.result["device"] for run in runs}),
        "versions": [dict(each) for each in dict.fromkeys(tuple(run.result["versions"].items()) for run in runs)],
        "dates": sorted({run.result["date"] for run in runs}),
    }


def effects_of(cell: Cell) -> list[dict[str, Any]]:
    """What the swaps did, seed by seed: beyond the ensemble of equal compute, and for rung 0 beyond SGHMC."""
    effects = []
    for more, less in ((EXCHANGING, INDEPENDENT), (RESGHMC, SGHMC)):
        for metric in dict.fromkeys((cell.headline, "accuracy", "nll")):
            ours, theirs = cell.values(more, metric), cell.values(less, metric)
            differences = {str(seed): ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
            each, n = list(differences.values()), len(differences)
            effects.append(
                {
                    **{"family": cell.family, "data": cell.data, "net": cell.net, "epochs": cell.settings.epochs},
                    **{"settings": dict(cell.settings.others), "of": more.title, "minus": less.title, "metric": metric, "n": n},
                    "mean": statistics.fmean(each) if n else None,
                    "se": statistics.stdev(each) / math.sqrt(n) if n > 1 else None,
                    "differences": differences,
                }
            )
    return effects
