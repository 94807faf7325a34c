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

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from torchrex.errors import RunFolderError
from torchrex.experiments.config import to_json
from torchrex.experiments.image_recipes import PAPER_TABLE1, PAPER_TABLE2, table1_recipes, table2_recipes
from torchrex.experiments.images import PAPER_EPOCHS, ImageConfig
from torchrex.experiments.runner import RunFolder

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


def find_runs(out: Path, recipes: Mapping[str, ImageConfig]) -> tuple[list[Run], list[str]]:
    """The finished runs of these recipes, with any settings, and the others in words."""
    runs, unfinished = [], []
    for name, recipe in recipes.items():
        seeds = (re.fullmatch(r"seed=(\d+)", path.name) for path in (out / name).glob("seed=*"))
        for seed in sorted(int(found[1]) for found in seeds if found):
            folder = RunFolder.of(out, name, seed)
            try:
                config, result = folder.config, folder.result
            except TypeError:  # JSON, but not an object
                raise RunFolderError(f"cannot read the JSON files in {folder.path}; run it again with --overwrite") from None
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
    runs, unfinished = find_runs(out, {name: c for name, c in recipes().items() if (c.data, c.net) in beside})
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
    paper = None if line.paper is None else cell.paper[line.paper]
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
        "z": None if paper is None else z_score(list(ours.values()), paper),
        "z_has_the_papers_sd": paper is not None and len(runs) == 1,
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


# Words

SWAPS_HEAD = (
    "What the swaps did beyond the equal-compute ensemble (the same pair without swaps), and for rung 0 beyond SGHMC; in points, "
    "paired by seed, ± standard error:"
)


def swap_lines(table: ImageTable) -> list[str]:
    """One line a cell."""
    lines = []
    for cell in table.cells:
        beyond, rung_0 = (in_words(effect) for effect in effects_of(cell) if effect["metric"] == cell.headline)
        more = f", {cell.settings}" if cell.settings.others else ""
        lines.append(
            f"{cell.name}, {cell.settings.epochs} epochs{more}: both rungs minus no swaps {beyond}; rung 0 minus SGHMC {rung_0}"
        )
    return lines


def in_words(effect: Mapping[str, Any]) -> str:
    """Such as `+0.12 ± 0.05 (n=3, 2.4 s.e.)`; two seeds are too few to say how many."""
    if not effect["n"]:
        return "- (no seed was run with both)"
    if effect["se"] is None:
        return f"{effect['mean']:+.2f} (n=1)"
    enough = effect["n"] >= 3 and effect["se"] > 0
    many = f", {abs(effect['mean']) / effect['se']:.1f} s.e." if enough else ""
    return f"{effect['mean']:+.2f} ± {effect['se']:.2f} (n={effect['n']}{many})"


def plus_minus(number: Mapping[str, Any] | None) -> str:
    if number is None:
        return ""
    return f"{number['mean']:.2f}" + ("" if number["two_sd"] is None else f"±{number['two_sd']:.2f}")


def marked(row: Mapping[str, Any]) -> str:
    mark = {MSGD.title: "‡", SGHMC.title: "†"}.get(row["method"], "") if row["borrowed_seeds"] else ""
    return f"{row['method']}{mark}"


def z_words(row: Mapping[str, Any]) -> str:
    return "" if row["z"] is None else f"{row['z']:+.1f}{'*' if row['z_has_the_papers_sd'] else ''}"


def epochs_words(row: Mapping[str, Any]) -> str:
    return str(PAPER_EPOCHS) if row["epochs"] == PAPER_EPOCHS else f"{row['epochs']}/{PAPER_EPOCHS}"


def swaps_words(row: Mapping[str, Any]) -> str:
    return "-" if row["swaps"] is None else f"{statistics.fmean(row['swaps']):.3g}"


def _mean(name: str, digits: int = 2) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row[name]['mean']:.{digits}f}"


WIDE: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "data": lambda row: row["data"],
    "net": lambda row: row["net"] + ("§" if row["settings"] else ""),
    "rules": lambda row: row["family"],
    "method": marked,
    "paper %": lambda row: plus_minus(row["paper"]),
    "ours %": lambda row: plus_minus(row["ours"]),
    "n": lambda row: str(row["n"]),
    "off by (s.e.)": z_words,
    "logits, last": _mean("logits_accuracy"),
    "logits, best": _mean("logits_best_accuracy"),
    "prob., last": _mean("accuracy"),
    "prob., best": _mean("best_accuracy"),
    "one net": _mean("single_accuracy"),
    "NLL": _mean("nll", 3),
    "ECE %": _mean("ece"),
    "swaps": lambda row: "-" if row["swaps"] is None else ", ".join(map(str, row["swaps"])),
    "epochs": epochs_words,
    "min": lambda row: f"{statistics.fmean(row['wall_minutes']):.1f}",
}
NARROW = {
    "paper %": WIDE["paper %"],
    "ours %": WIDE["ours %"],
    "n": WIDE["n"],
    "s.e.\noff": z_words,
    "prob.\nlast": WIDE["prob., last"],
    "one\nnet": WIDE["one net"],
    "NLL": WIDE["NLL"],
    "ECE\n%": WIDE["ECE %"],
    "swaps": swaps_words,
    "epochs": epochs_words,
}
FIRST_TO_GO = ("one\nnet", "ECE\n%", "NLL", "prob.\nlast")  # where a terminal is narrow


def as_table(table: ImageTable, console: Console) -> Table:
    """The most telling columns, as many of them as the console has room for."""
    for n_gone in range(len(FIRST_TO_GO) + 1):
        shown = _table(table, [head for head in NARROW if head not in FIRST_TO_GO[:n_gone]])
        if console.measure(shown, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return shown


def _table(table: ImageTable, heads: Sequence[str]) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    shown.add_column("", no_wrap=True)
    for head in heads:
        shown.add_column(head, justify="right", no_wrap=True)
    for k, cell in enumerate(table.cells):
        if k:
            shown.add_section()
        shown.add_row(f"{cell.name}{'§' if cell.settings.others else ''}", style="bold")
        for row in (row_of(cell, line) for line in cell.lines):
            shown.add_row(f" {marked(row)}", *(NARROW[head](row) for head in heads))
    return shown


def notes(table: ImageTable) -> list[str]:
    """What a reader must know of the rows that are there."""
    rows, said = table.rows, []
    said.append(
        "ours: ± 2 standard deviations over n seeds. Rules icml2020: as in the authors' code, which sums logits and reports the "
        "best epoch on the test images; clean: the average of probabilities at the end. NLL and ECE are those of that average."
    )
    said.append(
        f"off by: (ours - paper) / sqrt(sd_ours²/n + sd_paper²/{PAPER_SEEDS}), the paper's sd being half its ±."
        + (" * one seed only: our sd is taken to be the paper's." if any(row["z_has_the_papers_sd"] for row in rows) else "")
    )
    said.append(
        "one net: the newest network alone, in rows of both rungs the two newest. min: of the group that trained together."
    )
    if any(marked(row).endswith("†") for row in rows):
        said.append("† rung 0 of the pair without swaps, where SGHMC was not run by itself: the same run bit for bit.")
    if any(marked(row).endswith("‡") for row in rows):
        said.append("‡ the run of icml2020: at temperature 0 the two families are the same.")
    compressed = sorted({row["epochs"] for row in rows} - {PAPER_EPOCHS})
    if compressed:
        said.append(
            f"Compressed: {', '.join(map(str, compressed))} epochs in place of the paper's {PAPER_EPOCHS}, every schedule alike; "
            "these rows are not the paper's experiment."
        )
    said.extend(
        f"§ {cell.name}, {cell.settings.epochs} epochs: not the recipe's settings ({cell.settings})"
        for cell in table.cells
        if cell.settings.others
    )
    return said


def as_markdown(what: str, table: ImageTable) -> str:
    """The full table for a page, what the swaps did, notes, and what was not run."""
    batch = "256" if what == "table1" else "1024"
    lines = [f"# Table {what[-1]}: test accuracy in %, batch size {batch}", ""]
    lines += ["| " + " | ".join(WIDE) + " |", "|---" * len(WIDE) + "|"]
    lines += ["| " + " | ".join(words(row) for words in WIDE.values()) + " |" for row in table.rows]
    lines += ["", SWAPS_HEAD, ""]
    lines += [f"- {line}" for line in swap_lines(table)] + ["", *(f"- {note}" for note in notes(table))]
    for head, words in (("not run", table.not_run), ("not finished", table.unfinished)):
        lines += ["", f"{head}: {', '.join(words)}"] if words else []
    return "\n".join(lines) + "\n"
