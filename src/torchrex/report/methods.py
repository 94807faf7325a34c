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
from torchrex.report.reader import LoadedRun
from torchrex.report.tables import value_and_error

EQUAL = 0.05  # costs that differ by more are pointed out

Given = MethodResult | Path | str


@dataclass(frozen=True)
class Method:
    """One method, its numbers by seed."""

    name: str
    metrics: dict[int, dict[str, float]]
    examples: dict[int, float]
    seconds: dict[int, float]

    def mean(self, metric: str) -> tuple[float, float]:
        """Over the seeds, and its standard error: NaN for one seed."""
        return _mean(each[metric] for each in self.metrics.values())


@dataclass(frozen=True, repr=False)
class MethodTable:
    """Methods beside each other. `print` and notebooks show, with standard errors over the seeds as
    in 0.410(2), the metrics, the examples evaluated relative to those of the first method, the
    seconds, and the differences from the first seed by seed.
    """

    methods: tuple[Method, ...]
    metrics: tuple[str, ...]
    differences: dict[str, dict[str, Row]]  # of a method from the first, by metric
    notes: tuple[str, ...]

    def cost(self, method: Method) -> float:
        """Examples evaluated, as a multiple of those of the first; NaN if not known."""
        first, own = (_mean(each.examples.values())[0] for each in (self.methods[0], method))
        return own / first if first > 0 else math.nan

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Heads and rows: of the methods, and of their differences if there are any."""
        rows = []
        for each in self.methods:
            values = [value_and_error(*each.mean(metric)) for metric in self.metrics]
            cost, seconds = self.cost(each), _mean(each.seconds.values())[0]
            spent = ["?" if math.isnan(x) else f"{x:.3g}" for x in (cost, seconds)]
            rows.append([each.name, *values, *spent, str(len(each.metrics))])
        tables = [(["method", *self.metrics, "cost", "seconds", "seeds"], rows)]
        of_pairs = []
        for name, found in self.differences.items():
            words = (value_and_error(found[x].difference, found[x].error) for x in self.metrics)
            signed = [word if word.startswith("-") else f"+{word}" for word in words]
            of_pairs.append([name, *signed, str(found[self.metrics[0]].n)])
        if of_pairs:
            head = [f"minus {self.methods[0].name}", *self.metrics, "seeds"]
            tables.append((head, of_pairs))
        return tables

    def __str__(self) -> str:
        return "\n\n".join([*(_aligned([head, *rows]) for head, rows in self.tables()),
                            "\n".join(self.notes)]).rstrip()  # fmt: skip

    def _repr_html_(self) -> str:
        tables = [notebook.table(head, rows) for head, rows in self.tables()]
        line = ", ".join(each.name for each in self.methods)
        return notebook.panel("Methods", line, *tables, *map(notebook.paragraph, self.notes))

    def __repr__(self) -> str:
        costs = (f"{each.name} at cost {self.cost(each):.3g}" for each in self.methods)
        return f"MethodTable({', '.join(costs)})"


def compare(methods: Mapping[str, Given | Sequence[Given]]) -> MethodTable:
    """A table of methods by name: accuracy, NLL, Brier, ECE or what their averages measure, and
    cost, each relative to the first.

    A value is what `deep_ensemble`, `swag`, `without_swaps` or `MethodResult.of` returned, a run
    folder, the folder of a recipe with its seeds, or a list of such for several seeds. Seeds that
    both have are paired: with three or more the difference from the first is tested (paired t,
    Holm's adjustment for the metrics).
    """
    if not isinstance(methods, Mapping) or not methods:
        raise InvalidArgumentError(f"compare takes {{name: result, ...}}, got {methods!r}")
    notes: list[str] = []
    found = tuple(_method(str(name), given, notes) for name, given in methods.items())
    every = [each for method in found for each in method.metrics.values()]
    common = tuple(name for name in every[0] if all(name in each for each in every))
    if not common:
        have = "; ".join(f"{each.name}: {', '.join(_names(each)[:4])}" for each in found)
        raise InvalidArgumentError(f"the methods have no metric in common ({have})")
    first, *others = found
    differences = {}
    for other in others:
        seeds = sorted(set(first.metrics) & set(other.metrics))
        if len(seeds) < 2:
            continue
        pairs = {
            x: tuple([each.metrics[seed][x] for seed in seeds] for each in (first, other))
            for x in common
        }
        rows = {row.metric: row for row in compare_metrics(pairs)}  # type: ignore[arg-type]
        differences[other.name] = rows
        clear = [row for row in rows.values() if (row.p_adjusted or 1.0) < LEVEL]
        notes += [f"{other.name}: {row.metric} {row.verdict}" for row in clear]
    if len(differences) < len(others):
        notes.append("fewer than two seeds in common with the first: no error, so no claim")
    table = MethodTable(found, common, differences, ())
    for each in others:
        cost = table.cost(each)
        if abs(cost - 1.0) > EQUAL:
            notes.append(f"not at equal cost: {each.name} has {cost:.3g} times the examples")
    if unknown := [each.name for each in found if math.isnan(table.cost(each))]:
        notes.append(f"cost not known: {', '.join(unknown)}")
    return MethodTable(found, common, differences, tuple(notes))


def _method(name: str, given: Any, notes: list[str]) -> Method:
    method = Method(name, {}, {}, {})
    for each in given if isinstance(given, list | tuple) else [given]:
        found: list[tuple[int, dict[str, float], float, float]] = []
        if isinstance(each, str | Path):
            side = load_side(Path(each))
            notes += [f"{name}: {words}, left out" for words in side.left_out]
            for seed, run in side.runs.items():
                seconds = (run.result or {}).get("wall_seconds", math.nan)
                found.append((seed, run_metrics(run), _examples_of(run), seconds))
        elif isinstance(each, MethodResult):
            found = [(each.seed, each.metrics(), each.cost.examples, each.cost.seconds)]
        else:
            raise InvalidArgumentError(
                f"{name!r} must be a MethodResult, a run folder or a list of them, got {each!r}; "
                "for a run of your own: MethodResult.of(run, outcome, average)"
            )
        for seed, metrics, examples, seconds in found:
            if seed in method.metrics:
                raise InvalidArgumentError(f"{name!r} has two results of seed {seed}; give one")
            method.metrics[seed] = metrics
            method.examples[seed], method.seconds[seed] = examples, seconds
    if not method.metrics:
        raise InvalidArgumentError(f"{name!r} has no result; give one or more")
    return method


def _names(method: Method) -> list[str]:
    return list(next(iter(method.metrics.values())))


def _examples_of(run: LoadedRun) -> float:
    """Steps times batch times rungs, with those of swap batches; NaN where nothing says it."""
    sizes = [getattr(run.settings, name, None) for name in ("n_steps", "batch_size", "n_rungs")]
    if not all(isinstance(size, int) for size in sizes):
        return math.nan
    swap_cost = ((run.result or {}).get("exchange") or {}).get("swap_cost") or 0.0
    return math.prod(map(float, sizes)) * (1.0 + swap_cost)  # type: ignore[arg-type]


def _mean(values: Any) -> tuple[float, float]:
    return mean_and_error(torch.tensor([float(value) for value in values], dtype=torch.float64))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
