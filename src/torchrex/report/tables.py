"""Tables of the paper from run folders: our mean over seeds next to the paper's number, and
differences of methods paired by seed.

What is in a table is declared by its experiment (`PaperTable`, and the config of every recipe);
nothing here knows one. Runs are taken as they are. Runs of one recipe that differ in more than the
seed are different rows, and every setting that is not the recipe's is shown.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from torchrex.durable import read_object
from torchrex.experiments import RunFolder
from torchrex.experiments.networks import Difference, Line, NetworkConfig, PaperTable
from torchrex.report.plots import FEWEST_SEEDS, legend_below, look, p_of_pairs, panels
from torchrex.report.reader import config_from_json, why
from torchrex.runs.config import Column, to_json
from torchrex.runs.folder import LARGEST, OF_ANOTHER_CONFIG, belongs_to, read_result, seed_in

PAPER_SEEDS = 5
FARTHEST = 2.0  # the height of an axis with the paper's lines over that without
POINTS = 100  # of a line, at most
BAND = "lowest to highest seed"
NO_MATTER = ("recipe", "epochs", "steps", "checkpoint_every")  # the length is shown in any case


# Runs


class Settings(NamedTuple):
    """What runs must have in common to be one row."""

    length: int  # in epochs or steps
    others: tuple[tuple[str, Any], ...] = ()  # those that are not the recipe's

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.others)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run as its folder has it."""

    recipe: Any  # the NetworkConfig of that name
    seed: int
    config: dict[str, Any]
    result: dict[str, Any]

    @property
    def settings(self) -> Settings:
        usual = {k: value for k, value in to_json(self.recipe).items() if k not in NO_MATTER}
        others = ((name, self.config.get(name, value)) for name, value in usual.items())
        differ = tuple((name, _plain(value)) for name, value in others if value != usual[name])
        return Settings(self.config[f"{self.recipe.unit}s"], differ)

    @property
    def swaps(self) -> int:
        return sum(pair.get("accepted", 0) for pair in self.result.get("swaps") or ())

    def number(self, metric: str, *, percent: bool = True) -> float | None:
        value = (self.result.get("metrics") or {}).get(metric)
        if not isinstance(value, int | float) or abs(value) > LARGEST:
            return None
        return float(value) * (100 if percent else 1)

    def curve(self, name: str) -> list[Any]:
        found = (self.result.get("curves") or {}).get(name)
        return found if isinstance(found, list) else []


def _plain(value: Any) -> Any:
    """Something that can be compared and hashed."""
    return str(value) if isinstance(value, list | dict) else value


def finished_runs(
    out: Path, recipes: Mapping[str, NetworkConfig]
) -> tuple[list[FinishedRun], list[str]]:
    """The finished runs of these recipes, with any settings, and the others in words."""
    runs, unfinished = [], []
    for name, recipe in recipes.items():
        seeds = (re.fullmatch(r"seed=(\d+)", path.name) for path in (out / name).glob("seed=*"))
        for seed in sorted(int(found[1]) for found in seeds if found):
            path = RunFolder.of(out, name, seed).path
            try:
                status, found = _read_run(path, recipe)
            except (OSError, ValueError, TypeError, ArithmeticError) as error:
                status, found = f"unreadable: {why(error, path)}", None
            if found is None:
                unfinished.append(f"{name} seed {seed} ({status})")
            else:
                runs.append(FinishedRun(recipe, seed, *found))
    return runs, unfinished


def _read_run(path: Path, recipe: NetworkConfig) -> tuple[str, tuple[Any, Any] | None]:
    """Status, and the config and result of a finished run; raises if one of them cannot be used."""
    try:
        result = read_result(path / "result.json", complete=False)
    except FileNotFoundError:
        return "no result", None
    if (status := result.get("status", "no status")) != "finished":
        return status, None
    if (seed := result.get("seed", seed_in(path))) != seed_in(path):
        raise ValueError(f"result.json is not used: it is the result of seed {seed}")
    config = read_object(path / "config.json")
    if not isinstance(config.get(f"{recipe.unit}s"), int):
        raise ValueError(f"config.json does not say how many {recipe.unit}s were run")
    if not belongs_to(result, config):
        raise ValueError(f"result.json is not used: {OF_ANOTHER_CONFIG}")
    config_from_json(recipe, config, [])  # its settings are of the right types
    return status, (config, result)


def devices(runs: Iterable[FinishedRun]) -> list[str]:
    return sorted({str(run.result.get("device")) for run in runs})


def longest_first(settings: Settings) -> tuple[int, str]:
    return -settings.length, str(settings)


# Numbers


def summary(values: Mapping[int, float | None]) -> dict[str, Any] | None:
    """Mean, twice the standard deviation over seeds (None for one seed), and the values by seed."""
    known = {str(seed): value for seed, value in values.items() if value is not None}
    if not known:
        return None
    each = list(known.values())
    two_sd = 2 * statistics.stdev(each) if len(each) > 1 else None
    return {"mean": statistics.fmean(each), "two_sd": two_sd, "values": known}


def in_percent(runs: Iterable[FinishedRun], metric: str) -> dict[str, Any] | None:
    return summary({run.seed: run.number(metric) for run in runs})


def papers(config: NetworkConfig) -> dict[str, Any] | None:
    """The paper's number for the headline in %, as `summary` has ours."""
    if config.headline not in config.paper_numbers:
        return None
    mean, sd = config.paper_numbers[config.headline]
    return {"mean": round(100 * mean, 6), "two_sd": None if sd is None else round(200 * sd, 6)}


def z_score(ours: Sequence[float], paper: Mapping[str, float]) -> float:
    """Our mean minus the paper's in standard errors of the difference."""
    variance = statistics.variance(ours) / len(ours) + (paper["two_sd"] / 2) ** 2 / PAPER_SEEDS
    return (statistics.fmean(ours) - paper["mean"]) / math.sqrt(variance)


def paired(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, Any]:
    """Differences of common seeds: n, mean, standard error, p (None for too few seeds)."""
    differences = {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}
    each, n = list(differences.values()), len(differences)
    mean = statistics.fmean(each) if n else None
    se = statistics.stdev(each) / math.sqrt(n) if n > 1 else None
    tested = mean is not None and se is not None and n >= FEWEST_SEEDS
    p = p_of_pairs(mean, se, n) if tested else None  # type: ignore[arg-type]
    return {"n": n, "mean": mean, "se": se, "p": p, "differences": differences}


@dataclass(frozen=True)
class Cell:
    """The methods on one problem with one choice of settings."""

    recipes: dict[str, NetworkConfig]  # by method
    settings: Settings
    lines: dict[Line, dict[int, FinishedRun]]  # by seed; a line without runs is not there

    @property
    def config(self) -> NetworkConfig:
        return next(iter(self.recipes.values()))

    @property
    def is_full(self) -> bool:
        """Whether the schedule is as long as the paper's."""
        return self.settings.length == self.config.paper_length

    @property
    def title(self) -> str:
        name, length = " ".join(map(str, self.config.cell.values())), self.settings.length
        marked = "§" if self.settings.others else ""
        shorter = "" if self.is_full else f", {length:,} {self.config.unit}s"
        return f"{name}{marked}{shorter}"

    @property
    def head(self) -> dict[str, Any]:
        """What all rows of the cell have in common."""
        length = {f"{self.config.unit}s": self.settings.length}
        return {**self.config.cell, **length, "settings": dict(self.settings.others)}

    def summary(self, line: Line, column: Column) -> dict[str, Any] | None:
        runs, metric = self.lines[line].values(), line.prefix + column.metric
        return summary({run.seed: run.number(metric, percent=column.percent) for run in runs})

    def row(self, line: Line) -> dict[str, Any]:
        """Everything known of a row; shares are in percent."""
        runs, recipe = list(self.lines[line].values()), self.recipes[line.method]
        columns = {column.metric: column for column in recipe.columns}
        ours = self.summary(line, columns[recipe.headline])
        paper = None if line.prefix or self.settings.others else papers(recipe)
        same = recipe.tested_against_paper and self.is_full
        values = list(ours["values"].values()) if ours else []
        z = z_score(values, paper) if paper and same and len(values) > 1 else None
        return {
            **self.head,
            "method": line.title,
            "recipes": sorted({run.recipe.recipe for run in runs}),
            "borrowed_seeds": [run.seed for run in runs if run.recipe != recipe],
            "seeds": [run.seed for run in runs],
            "n": len(runs),
            "headline": recipe.headline,
            "paper": paper,
            "ours": ours,
            "z": z,
            **{metric: self.summary(line, column) for metric, column in columns.items()},
            "swaps": [run.swaps for run in runs] if recipe.n_rungs > 1 else None,
            "wall_minutes": [run.result.get("wall_seconds", math.nan) / 60 for run in runs],
            "devices": devices(runs),
            "versions": [dict(each) for each in dict.fromkeys(map(_versions, runs))],
            "dates": sorted({str(run.result.get("date")) for run in runs}),
        }

    def difference(self, of: Difference, metric: str) -> dict[str, Any]:
        columns = {column.metric: column for column in self.config.columns}
        column = columns[metric]._replace(metric=of.prefix + metric)
        ours, theirs = (self.summary(line, column) or {} for line in (of.of, of.minus))
        more, less = (papers(self.recipes[line.method]) for line in (of.of, of.minus))
        claimed = more and less and metric == self.config.headline and not of.of.prefix
        return {
            **self.head,
            "contribution": of.title,
            "of": of.of.title,
            "minus": of.minus.title,
            "metric": column.metric,
            "paper": more["mean"] - less["mean"] if more and less and claimed else None,
            **paired(ours.get("values", {}), theirs.get("values", {})),
        }


def _versions(run: FinishedRun) -> tuple[tuple[str, str], ...]:
    return tuple((run.result.get("versions") or {}).items())


@dataclass(frozen=True)
class BuiltTable:
    """A table of the paper, filled in."""

    of: PaperTable
    cells: list[Cell] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [cell.row(line) for cell in self.cells for line in cell.lines]

    def differences(self, cell: Cell, *metrics: str) -> list[dict[str, Any]]:
        both = [of for of in self.of.differences if {of.of, of.minus} <= cell.lines.keys()]
        return [cell.difference(of, metric) for of in both for metric in dict.fromkeys(metrics)]

    def as_numbers(self) -> dict[str, Any]:
        differences = [
            each
            for cell in self.cells
            for each in self.differences(cell, cell.config.headline, "accuracy", "nll")
        ]
        return {
            "rows": self.rows,
            self.of.differences_key: differences,
            "not_run": self.not_run,
            "unfinished": self.unfinished,
        }


def build(table: PaperTable, out: Path, chosen: Mapping[str, NetworkConfig]) -> BuiltTable:
    """The table of the chosen recipes from the runs below `out`.

    Where a line was not run, the run of the recipe that has the same numbers takes its place.
    """
    every = table.recipes()
    cells: dict[tuple[Any, ...], dict[str, NetworkConfig]] = {}
    for config in every.values():
        cells.setdefault(tuple(config.cell.values()), {})[config.method] = config
    shown: dict[tuple[Any, ...], list[Line]] = {}
    needed: dict[str, NetworkConfig] = {}
    for key, recipes in cells.items():
        names = {config.recipe for config in recipes.values()}
        for line in table.lines:
            own = recipes.get(line.method)
            if own is None:  # not every cell has all methods
                continue
            if own.recipe in chosen or (own.same_run_as in names and own.same_run_as in chosen):
                shown.setdefault(key, []).append(line)
                needed[own.recipe] = own
                if own.same_run_as in every and own.same_run_as is not None:
                    needed[own.same_run_as] = every[own.same_run_as]
    runs, unfinished = finished_runs(out, needed)
    built = BuiltTable(table, unfinished=[one for one in unfinished if one.split()[0] in chosen])
    for key, lines in shown.items():
        recipes = cells[key]
        here = {config.recipe for config in recipes.values()}
        found = {run.settings for run in runs if run.recipe.recipe in here}
        for settings in sorted(found, key=longest_first):
            same = [run for run in runs if run.settings == settings]
            of_lines = {line: _runs_of(recipes[line.method], same) for line in lines}
            there = {line: by_seed for line, by_seed in of_lines.items() if by_seed}
            cell = Cell(recipes, settings, there)
            built.cells.append(cell)
            lacking = [line.title for line in lines if line not in there]
            built.not_run.extend(f"{cell.title} ({title})" for title in lacking)
        if not found:
            built.not_run.append(" ".join(map(str, key)))
    built.cells.sort(key=lambda cell: not cell.is_full)
    return built


def _runs_of(recipe: NetworkConfig, runs: Sequence[FinishedRun]) -> dict[int, FinishedRun]:
    """By seed. The recipe's own run replaces that of the recipe with the same numbers."""
    names = (recipe.same_run_as, recipe.recipe)
    by_seed = {run.seed: run for name in names for run in runs if run.recipe.recipe == name}
    return dict(sorted(by_seed.items()))


# Words


def plus_minus(number: Mapping[str, Any] | None, decimals: int = 2, *, spread: bool = True) -> str:
    """Such as 94.21±0.16; "-" for a number that no run has."""
    if number is None:
        return "-"
    has_spread = spread and number["two_sd"] is not None
    two_sd = f"±{number['two_sd']:.{decimals}f}" if has_spread else ""
    return f"{number['mean']:.{decimals}f}{two_sd}"


def difference_words(of: Mapping[str, Any]) -> str:
    """Such as `+0.12 ± 0.05 (n=3, p = 0.14)`."""
    if not of["n"]:
        return "- (no seed was run with both)"
    error = "" if of["se"] is None else f" ± {of['se']:.2f}"
    p = "" if of["p"] is None else f", p = {of['p']:.2g}"
    return f"{of['mean']:+.2f}{error} (n={of['n']}{p})"


def difference_lines(built: BuiltTable) -> list[str]:
    """One line for each cell in which two methods can be compared."""
    lines = []
    for cell in built.cells:
        words = []
        for each in built.differences(cell, cell.config.headline):
            claim = "" if each["paper"] is None else f", the paper {each['paper']:+.2f}"
            words.append(f"{each['contribution']} {difference_words(each)}{claim}")
        settings = f" ({cell.settings})" if cell.settings.others else ""
        lines += [f"{cell.title}{settings}: {'; '.join(words)}"] if words else []
    if lines:
        lines.insert(
            0, f"{built.of.differences_title}; in points, paired by seed, ± standard error:"
        )
    return lines


def _words(built: BuiltTable, *, full: bool) -> list[dict[str, str]]:
    """Every row by the heads of its columns, the important ones first; `full` for a page."""
    config, prefixes = built.cells[0].config, {line.prefix for line in built.of.lines} - {""}
    headlines = {cell.config.headline for cell in built.cells}
    columns = [
        column
        for column in config.columns
        if headlines != {column.metric} and not column.metric.startswith(tuple(prefixes))
    ]
    rows = []
    for row in built.rows:
        length, swaps = row[f"{config.unit}s"], row["swaps"] or []
        counts = ", ".join(map(str, swaps)) if full else f"{statistics.fmean(swaps or [0]):.3g}"
        shorter = "" if length == config.paper_length else f"/{config.paper_length:,}"
        words = {
            "method": f"{row['method']}{'†' if row['borrowed_seeds'] else ''}",
            "paper %": plus_minus(row["paper"]),
            "ours %": plus_minus(row["ours"]),
            "n": str(row["n"]),
            "off by (s.e.)": "-" if row["z"] is None else f"{row['z']:+.1f}",
            "swaps": counts if swaps else "-",
        }
        for column in columns:
            number, spread = row[column.metric], full and column.percent
            title = f"{column.title} %" if column.percent else column.title
            words[title] = plus_minus(number, column.decimals, spread=spread)
        words[f"{config.unit}s"] = f"{length:,}{shorter}"
        words["minutes"] = f"{statistics.fmean(row['wall_minutes']):.1f}"
        rows.append(words)
    heads = [head for head in rows[0] if {row[head] for row in rows} != {"-"}]
    return [{head: row[head] for head in heads} for row in rows]


def as_table(built: BuiltTable, console: Console) -> Table:
    titles = [cell.title for cell in built.cells for _ in cell.lines]
    rows = [dict(row) for row in _words(built, full=False)]
    body = [[title, *row.values()] for title, row in zip(titles, rows, strict=True)]
    return fitted_table(list(rows[0])[1:], body, console)


def fitted_table(heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> Table:
    """As many columns as fit the console; the last ones are dropped first.

    A row is the title of its section, its own title, and a cell for each head.
    """
    for n_shown in range(len(heads), 1, -1):
        table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.add_column("", no_wrap=True)
        for head in heads[:n_shown]:
            table.add_column("\n".join(textwrap.wrap(head, 10)), justify="right", no_wrap=True)
        for section, members in itertools.groupby(rows, key=lambda row: row[0]):
            table.add_row(section, style="bold")
            for row in members:
                table.add_row(f" {row[1]}", *row[2 : 2 + n_shown])
            table.add_section()
        wide = console.options.update(width=1000)
        if console.measure(table, options=wide).maximum <= console.width:
            break
    return table


def notes(built: BuiltTable) -> list[str]:
    """What a reader must know of the rows that are there."""
    rows, config = built.rows, built.cells[0].config
    spread = any(row["ours"] and row["ours"]["two_sd"] for row in rows)
    said = [f"ours: {'± 2 standard deviations over n seeds' if spread else 'one seed'}."]
    if any(row["z"] is not None for row in rows):
        said.append(
            f"off by: (ours - paper) / sqrt(sd_ours²/n + sd_paper²/{PAPER_SEEDS}), the paper's sd "
            f"being half its ±. One seed is not tested."
        )
    words = {str(row[key]) for row in rows for key in (*config.cell, "method")}
    said += [f"{word}: {text}" for word, text in built.of.notes.items() if word in words]
    if any(row["borrowed_seeds"] for row in rows):
        said.append(
            "† for some seeds the run of another recipe, which has the same numbers bit for bit."
        )
    unit, full = f"{config.unit}s", config.paper_length
    if shorter := sorted({row[unit] for row in rows} - {full}):
        said.append(
            f"{', '.join(f'{length:,}' for length in shorter)} {unit} in place of the paper's "
            f"{full:,}: not the paper's experiment, and not tested against it."
        )
    said += [
        f"§ {cell.title}: not the recipe's settings ({cell.settings})"
        for cell in built.cells
        if cell.settings.others
    ]
    return said + missing_words((), built.unfinished)


def missing_words(not_run: Sequence[str], unfinished: Sequence[str]) -> list[str]:
    both = (("not run", not_run), ("not finished", unfinished))
    return [f"{head}: {', '.join(names)}" for head, names in both if names]


def in_markdown(text: str) -> str:
    """Text that no reader of Markdown takes for a table, a link, HTML or code."""
    return re.sub(r"([\\`|<>\[\]*&])", r"\\\1", text)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *([in_markdown(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def markdown_page(title: str, table: Sequence[str], said: Sequence[str]) -> str:
    notes = [f"- {in_markdown(note)}" for note in said]
    return "\n".join([f"# {title}", "", *table, "", *notes]) + "\n"


def as_markdown(built: BuiltTable) -> str:
    """The full table for a page, a part for each kind of schedule; the differences, the notes."""
    words, keys = iter(_words(built, full=True)), list(built.cells[0].config.cell)
    body: list[str] = []
    for kind, cells in _by_schedule(built).items():
        rows = [
            {**{key: str(row[key]) for key in keys}, **next(words)}
            for cell in cells
            for row in map(cell.row, cell.lines)
        ]
        table = markdown_table(list(rows[0]), [list(row.values()) for row in rows])
        body += [*([""] if body else []), f"## {kind}", "", *table]
    said = difference_lines(built) + notes(built) + missing_words(built.not_run, ())
    return markdown_page(built.of.title, body, said)


# Pictures


def _by_schedule(built: BuiltTable) -> dict[str, list[Cell]]:
    """The cells with full and with compressed schedules under their headings."""
    config, found = built.cells[0].config, dict[str, list[Cell]]()
    full = f"Full schedules ({config.paper_length:,} {config.unit}s)"
    for cell in built.cells:
        found.setdefault(full if cell.is_full else "Compressed schedules", []).append(cell)
    return found


def draw(built: BuiltTable, path: Path) -> None:
    """A panel for each cell: accuracy of the average as it grows, mean over seeds."""
    groups = _by_schedule(built)
    n_rows = sum(math.ceil(len(cells) / 2) for cells in groups.values())
    handles: dict[str, Any] = {}
    with panels(path, n_rows, 2, (7.5, 2.75 * n_rows + 0.5)) as (figure, axes):
        place = 0
        for kind, cells in groups.items():
            above = {"xycoords": "axes fraction", "textcoords": "offset points", "weight": "bold"}
            axes.flat[place].annotate(kind, (0, 1), (0, 24), **above)
            for axis, cell in zip(axes.flat[place:], cells, strict=False):
                handles |= draw_cell(cell, axis)
            place += len(cells) + len(cells) % 2
        order = [line.title for line in built.of.lines] + [BAND, "the paper"]
        in_order = {title: handles[title] for title in order if title in handles}
        legend_below(figure, in_order, 3)


def draw_cell(cell: Cell, axis: Any) -> dict[str, Any]:
    """Means over bands of seeds. The paper's numbers are lines where the schedule is the paper's
    and the axis can hold them.
    """
    axis.set(xlabel=cell.config.unit, ylabel="accuracy, %")
    handles: dict[str, Any] = {}
    late: list[float] = []
    theirs: dict[str, float] = {}
    # The authors sum logits.
    kind = "logits" if cell.config.headline.startswith("logits") else "probabilities"
    for line, by_seed in cell.lines.items():
        paper = None if line.prefix or cell.settings.others else papers(cell.recipes[line.method])
        theirs |= {line.title: paper["mean"]} if paper else {}
        curves = [run.curve(f"{line.prefix}{kind}_accuracy") for run in by_seed.values()]
        times = next(iter(by_seed.values())).curve(f"draw_{cell.config.unit}")
        each = [[100 * value for value in values] for values in zip(*curves, strict=False)]
        if not each or len(each) != len(times):
            continue
        thin = math.ceil(len(times) / POINTS)
        times, each = times[::-thin][::-1], each[::-thin][::-1]  # with the last
        mean, style = list(map(statistics.fmean, each)), look(line.title).line
        marker = "o" if len(mean) == 1 else None
        (handles[line.title],) = axis.plot(times, mean, marker=marker, **style)
        if len(curves) > 1:
            ends, fill = (list(map(min, each)), list(map(max, each))), {"alpha": 0.18, "lw": 0}
            handles[BAND] = axis.fill_between(times, *ends, color=style["color"], **fill)
        late += mean[len(mean) // 4 :]  # the first draws are far below
    if late:
        low, high, top = min(late), max(late), max([*late, *theirs.values()])
        if theirs and cell.is_full and top - low < FARTHEST * (high - low):
            for title, value in theirs.items():
                style = {"color": look(title).color, "lw": 0.9, "ls": (0, (1, 1.5))}
                handles["the paper"] = axis.axhline(value, **style)
            high = top
        elif theirs:
            words = ", ".join(f"{title} {value:.2f}" for title, value in theirs.items())
            after = f"{cell.config.unit}; the paper after {cell.config.paper_length:,}:"
            axis.set_xlabel(f"{after}\n{words}", fontsize=8.5)
        margin = 0.1 * (high - low) + 0.05
        axis.set_ylim(low - margin, high + margin)
    extra = f"\n{textwrap.fill(str(cell.settings), 50)}" if cell.settings.others else ""
    axis.set_title(f"{cell.title}{extra}")
    return handles


# Small helpers of the other reports


def pool_seeds(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics averaged over seeds; a `_se` of a metric is pooled as the error of that average."""
    pooled = {}
    for name in results[0]["metrics"]:
        found = (result["metrics"].get(name) for result in results)
        values = [value for value in found if value is not None]
        if values and name.endswith("_se"):
            pooled[name] = math.sqrt(sum(value * value for value in values)) / len(values)
        elif values:
            pooled[name] = sum(values) / len(values)
    return pooled
