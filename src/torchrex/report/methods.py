"""Methods compared on the same data: what their predictions are worth, and what they have cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrex import notebook
from torchrex.diagnostics import mean_and_error
from torchrex.errors import InvalidArgumentError
from torchrex.network import MethodResult
from torchrex.report.compare import LEVEL, Row, compare_metrics, load_side, run_metrics
from torchrex.report.findings import value_and_error
from torchrex.report.reader import LoadedRun

EQUAL = 0.05  # costs that differ by more are pointed out
Given = MethodResult | Path | str
Numbers = dict[int, dict[str, float]]  # of a method, by seed
COST = ("examples", "seconds")
BESIDES = ("single_", "pooled_", "swaps ", "clipped_share")  # of a run folder, next to its answer


@dataclass(frozen=True, repr=False)
class MethodTable:
    """Methods next to each other, for `print` and notebooks.

    `values` has of each method the means over seeds and their standard errors: the metrics, the
    cost as examples evaluated relative to the first method, seconds and the number of seeds.
    `differences` are those from the first method, seed by seed. 0.410(2) is 0.410 with error 0.002.
    """

    values: dict[str, dict[str, tuple[float, float]]]
    differences: dict[str, dict[str, Row]]
    notes: tuple[str, ...]

    def tables(self) -> list[list[list[str]]]:
        """The two as text, each with its head."""
        first = next(iter(self.values))
        tables = [[["method", *self.values[first]]]]
        for name, values in self.values.items():
            cells = (_cell(value, error, value) for value, error in values.values())
            tables[0].append([name, *("?" if cell == "nan" else cell for cell in cells)])
        for name, rows in self.differences.items():
            if len(tables) == 1:
                tables.append([[f"minus {first}", *rows]])
            words = (_cell(row.difference, row.error, row.first) for row in rows.values())
            tables[1].append([name, *(x if x.startswith("-") else f"+{x}" for x in words)])
        return tables

    def __str__(self) -> str:
        lines: list[str] = []
        for rows in self.tables():
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for name, *cells in rows:
                lines.append("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
            lines.append("")
        return "\n".join([*lines, *self.notes]).rstrip()

    def _repr_html_(self) -> str:
        tables = (notebook.table(head, rows) for head, *rows in self.tables())
        return notebook.panel(
            "Methods", ", ".join(self.values), *tables, *map(notebook.paragraph, self.notes)
        )

    def __repr__(self) -> str:
        return f"MethodTable({', '.join(self.values)})"


def compare(methods: Mapping[str, Given | Sequence[Given]]) -> MethodTable:
    """A table of methods by name: the metrics of their averages and their cost.

    A value is what `deep_ensemble`, `swag` or `MethodResult.of` returned, a run folder, the folder
    of a recipe with its seeds, or a list of these for several seeds. Differences from the first
    method are taken seed by seed; three seeds and more are tested (paired t, Holm's adjustment for
    the metrics).
    """
    if not isinstance(methods, Mapping) or not methods:
        raise InvalidArgumentError(f"compare takes {{name: result, ...}}, got {methods!r}")
    notes: list[str] = []
    found = {str(name): _numbers(str(name), given, notes) for name, given in methods.items()}
    every = [each for numbers in found.values() for each in numbers.values()]
    names = [x for x in every[0] if x not in COST and all(x in each for each in every)]
    if not names:
        have = "; ".join(", ".join(list(each)[:4]) for each in every)
        raise InvalidArgumentError(f"the methods have no metric in common, but {have}")
    first, reference = next(iter(found.items()))
    values: dict[str, dict[str, tuple[float, float]]] = {}
    differences: dict[str, dict[str, Row]] = {}
    for name, numbers in found.items():
        means = {x: _mean(numbers, x) for x in (*names, "seconds")}
        cost = _mean(numbers, "examples")[0] / (_mean(reference, "examples")[0] or math.nan)
        values[name] = {**means, "cost": (cost, 0.0), "seeds": (len(numbers), 0.0)}
        if abs(cost - 1.0) > EQUAL:
            notes.append(f"not at equal cost: {name} has {cost:.3g} times the examples of {first}")
        elif math.isnan(cost):
            notes.append(f"the cost of {name} is not known")
        seeds = sorted(set(reference) & set(numbers))
        if name != first and len(seeds) > 1:
            pairs = [(reference[seed], numbers[seed]) for seed in seeds]
            both = {x: ([a[x] for a, _ in pairs], [b[x] for _, b in pairs]) for x in names}
            rows = compare_metrics(both)
            differences[name] = {row.metric: row for row in rows}
            clear = [row for row in rows if (row.p_adjusted or 1.0) < LEVEL]
            notes += [f"{name}: {row.metric} {row.verdict}" for row in clear]
    if len(differences) < len(found) - 1:
        notes.append("fewer than two seeds in common: such a difference has no error, so no claim")
    return MethodTable(values, differences, tuple(notes))


def _cell(value: float, error: float | None, scale: float) -> str:
    """Less than a billionth of the scale is rounding, and no error."""
    return value_and_error(value, error if error and error > 1e-9 * abs(scale) else None)


def _mean(numbers: Numbers, name: str) -> tuple[float, float]:
    values = [float(each[name]) for each in numbers.values()]
    return mean_and_error(torch.tensor(values, dtype=torch.float64))


def _numbers(name: str, given: Any, notes: list[str]) -> Numbers:
    """Metrics, examples and seconds by seed."""
    numbers: Numbers = {}
    for each in given if isinstance(given, list | tuple) else [given]:
        found: Numbers = {}
        if isinstance(each, str | Path):
            side = load_side(Path(each))
            notes += [f"{name}: {words}, left out" for words in side.left_out]
            for seed, run in side.runs.items():
                seconds = float((run.result or {}).get("wall_seconds", math.nan))
                cost = {"examples": _examples_of(run), "seconds": seconds}
                found[seed] = {**_answer_of(run), **cost}
        elif isinstance(each, MethodResult):
            cost = {"examples": each.examples, "seconds": each.seconds}
            found[each.seed] = {**each.metrics(), **cost}
        else:
            raise InvalidArgumentError(
                f"{name!r} must be a MethodResult, a run folder or a list of them, got {each!r}; "
                "for a run of your own: MethodResult.of(run, outcome, average)"
            )
        if twice := set(found) & set(numbers):
            raise InvalidArgumentError(f"{name!r} has two results of seed {min(twice)}; give one")
        numbers |= found
    if not numbers:
        raise InvalidArgumentError(f"{name!r} has no result; give one or more")
    return numbers


def _answer_of(run: LoadedRun) -> dict[str, float]:
    """The metrics of rung 0, or of all rungs where they do not exchange and their average has them
    all.
    """
    metrics, pooled = run_metrics(run), "pooled_"
    swaps = run.settings is None or run.settings.swaps
    if not swaps and any(name.startswith(pooled) for name in metrics):
        return {x.removeprefix(pooled): v for x, v in metrics.items() if x.startswith(pooled)}
    return {x: v for x, v in metrics.items() if not x.startswith(BESIDES)}


def _examples_of(run: LoadedRun) -> float:
    """As the run has counted; else steps times batch times rungs, with those of swap batches; NaN
    where nothing says it.
    """
    if (counted := run.numbers.get("examples")) is not None:
        return counted
    sizes = [getattr(run.settings, name, None) for name in ("n_steps", "batch_size", "n_rungs")]
    swap_cost = ((run.result or {}).get("exchange") or {}).get("swap_cost") or 0.0
    known = [float(size) for size in sizes if isinstance(size, int)]
    return math.prod(known) * (1.0 + swap_cost) if len(known) == len(sizes) else math.nan
