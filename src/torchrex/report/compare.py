"""Runs compared seed by seed: differences with their standard errors, and verdicts that claim no more than the seeds allow.

Runs of one seed share what the seed decides, so the difference is taken seed by seed and its spread over seeds is the error:

    d_s = other_s - first_s,    se = std(d) / sqrt(n),    t = mean(d) / se,    p two-sided with n - 1 degrees of freedom
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scipy import stats

from torchrex.errors import InvalidArgumentError, RunFolderError
from torchrex.experiments.config import to_json
from torchrex.report.runs import LoadedRun, find_runs, load_run

LEVEL = 0.05
FEWEST_SEEDS = 3  # two seeds can agree by chance whatever their spread
HIGHER, LOWER = ("accuracy", "ess"), ("nll", "brier", "ece", "w1", "w2", "error", "rhat")
# Settings, not outcomes; and the time, which is that of all replicas that ran side by side.
NOT_COMPARED = ("n_steps", "n_runs", "n_draws", "seconds_per_epoch")

Better = Literal["higher", "lower", ""]


@dataclass(frozen=True)
class Side:
    """The runs of one folder that take part, by seed."""

    name: str
    path: Path
    runs: dict[int, LoadedRun]
    left_out: tuple[str, ...]  # which runs do not take part, and why


@dataclass(frozen=True)
class Row:
    """One metric of one pair of sides."""

    metric: str
    better: Better  # which direction is good; "" where neither is
    first: float  # means over the common seeds
    other: float
    difference: float  # other - first
    error: float | None  # its standard error; None for one seed
    n: int
    p_value: float | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """`other` against `first`, on the seeds that both have."""

    first: Side
    other: Side
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    settings: dict[str, tuple[Any, Any]]  # config fields that differ: (first, other)
    notes: tuple[str, ...]  # what was left out, and why

    @property
    def test(self) -> str:
        """What was done, in words, so that a reader can correct for it."""
        return (
            f"paired t-test over {len(self.seeds)} common seed{'s' if len(self.seeds) != 1 else ''}, two-sided, level {LEVEL:g} "
            f"for each metric by itself; {len(self.rows)} metrics were looked at, so by chance alone about "
            f"{LEVEL * len(self.rows):.2g} of them would differ (Bonferroni: p < {LEVEL / max(1, len(self.rows)):.2g}); no claim "
            f"below {FEWEST_SEEDS} seeds"
        )


def compare_folders(paths: Sequence[Path]) -> list[Comparison]:
    """Every further folder against the first. Each is a run folder, or a recipe's folder that holds seed=*."""
    if len(paths) < 2:
        raise InvalidArgumentError(f"give at least two folders to compare, got {len(paths)}")
    sides = _with_own_names([load_side(path) for path in paths])
    return [compare(sides[0], other) for other in sides[1:]]


def load_side(path: Path) -> Side:
    """The finished runs in a folder. Several recipes below it are refused, for they would be mixed up."""
    found = [load_run(each) for each in find_runs(path)]
    if not found:
        raise RunFolderError(f"{path} holds no run; give OUT/RECIPE or OUT/RECIPE/seed=S")
    recipes = sorted({run.recipe for run in found})
    if len(recipes) > 1:
        shown = ", ".join(recipes[:3]) + (", ..." if len(recipes) > 3 else "")
        raise RunFolderError(f"{path} holds runs of {len(recipes)} recipes ({shown}); give the folder of one of them")
    runs: dict[int, LoadedRun] = {}
    left_out = []
    for run in found:
        where = run.path.name
        if run.status != "finished":
            left_out.append(f"{where} is {run.status}")
        elif run.seed < 0:
            left_out.append(f"{where} does not tell its seed")
        elif run.seed in runs:
            left_out.append(f"{where} has the seed {run.seed} of {runs[run.seed].path.name}")
        else:
            runs[run.seed] = run
    if not runs:
        raise RunFolderError(f"{path} has no finished run ({'; '.join(left_out)}); finish one first")
    return Side(recipes[0], path, runs, tuple(left_out))


def _with_own_names(sides: list[Side]) -> list[Side]:
    """Sides of the same recipe are told apart by their folders."""
    names = [side.name for side in sides]
    return [
        side if names.count(side.name) == 1 else dataclasses.replace(side, name=f"{side.name} ({side.path})") for side in sides
    ]


def compare(first: Side, other: Side) -> Comparison:
    """Pair the seeds that both sides have, and compare every metric that all of those runs have."""
    seeds = tuple(sorted(set(first.runs) & set(other.runs)))
    notes = [f"{side.name}: {words}, left out" for side in (first, other) for words in side.left_out]
    for side, against in ((first, other), (other, first)):
        if alone := sorted(set(side.runs) - set(against.runs)):
            plural = "s" if len(alone) > 1 else ""
            notes.append(f"seed{plural} {', '.join(map(str, alone))} only in {side.name}, left out")
    if not seeds:
        raise RunFolderError(
            f"{first.name} has seeds {_listed(first.runs)} and {other.name} {_listed(other.runs)}: none in common, so there is "
            f"nothing to pair; run the same seeds"
        )
    rows, metrics = [], [[run_metrics(side.runs[seed]) for seed in seeds] for side in (first, other)]
    everywhere = [name for name in metrics[0][0] if all(name in each for side in metrics for each in side)]
    somewhere = {name for side in metrics for each in side for name in each}
    if missing := sorted(somewhere - set(everywhere)):
        notes.append(f"not in all of the runs, left out: {', '.join(missing)}")
    for name in everywhere:
        rows.append(compare_metric(name, [m[name] for m in metrics[0]], [m[name] for m in metrics[1]]))
    settings: dict[str, tuple[Any, Any]] = {}
    for seed in seeds:
        for key, pair in differing(first.runs[seed].config, other.runs[seed].config).items():
            settings.setdefault(key, pair)
    for side in (first, other):
        configs = [side.runs[seed].config for seed in seeds]
        if fields := sorted({key for config in configs for key in differing(configs[0], config)}):
            notes.append(f"{side.name}: its own seeds differ in {', '.join(fields)}")
    return Comparison(first, other, seeds, tuple(rows), settings, tuple(notes))


def run_metrics(run: LoadedRun) -> dict[str, float]:
    """The numbers of a run that can be compared: its metrics without settings and standard errors, and its rate of swaps."""
    numbers = {
        name: float(value)
        for name, value in run.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    names = [name for name in numbers if name not in NOT_COMPARED and not name.endswith(("_true", "_se"))]
    chosen = {name: numbers[name] for name in names}
    for pair in (run.result or {}).get("swaps") or []:
        if pair.get("acceptance_rate") is not None and not any(name.startswith("acceptance_rate") for name in numbers):
            chosen[f"swaps of rungs {pair['pair'][0]} and {pair['pair'][1]}"] = float(pair["accepted"])
    return chosen


def compare_metric(metric: str, first: Sequence[float], other: Sequence[float]) -> Row:
    """The paired difference of one metric; both sequences are in the order of the same seeds."""
    differences = [b - a for a, b in zip(first, other, strict=True)]
    n = len(differences)
    mean = math.fsum(differences) / n
    error = p_value = None
    if n > 1:
        error = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
        # Equal differences leave no spread to test against: either the sides are the same, or rounding hides it.
        p_value = float(2 * stats.t.sf(abs(mean) / error, n - 1)) if error > 0 else (1.0 if mean == 0 else None)
    better = direction(metric)
    verdict = _verdict(mean, error, p_value, n, better)
    return Row(metric, better, math.fsum(first) / n, math.fsum(other) / n, mean, error, n, p_value, verdict)


def _verdict(mean: float, error: float | None, p_value: float | None, n: int, better: Better) -> str:
    if error == 0 and mean == 0:
        return f"the same on all {n} seeds"
    if n == 1:
        return "the same on one seed, which tells nothing" if mean == 0 else "one seed tells nothing"
    if n < FEWEST_SEEDS:
        return f"no claim at n={n}"
    if p_value is None:
        return f"the same difference on all {n} seeds: no spread to test against"
    if p_value >= LEVEL:
        return f"not distinguishable at n={n}"
    word = "higher" if mean > 0 else "lower"
    if better:
        word += ", better" if word == better else ", worse"
    return f"{word} (p = {p_value:.2g}, n={n})"


def direction(metric: str) -> Better:
    """Which direction is good, told from the words of the name: `pooled_logits_nll` is an NLL."""
    words = set(re.split(r"[_ ]", metric.lower()))
    if "swaps" in words or "acceptance" in words:  # more swaps may be bought with bias
        return ""
    return "higher" if words & set(HIGHER) else "lower" if words & set(LOWER) else ""


def differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Fields of two configs that differ, nested ones joined by dots; the recipe's name and the paper's numbers do not count."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**one, **other}:
        a, b, name = one.get(key), other.get(key), f"{prefix}{key}"
        if name in ("recipe", "paper"):
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= differing(a, b, f"{name}.")
        elif (key in one) != (key in other) or a != b:
            found[name] = (a if key in one else "absent", b if key in other else "absent")
    return found


def _listed(runs: Mapping[int, Any]) -> str:
    return ", ".join(map(str, sorted(runs)))


# Printing


COLUMNS = ("metric", "better", "first", "other", "difference", "seeds", "verdict")


def cells(row: Row) -> list[str]:
    """One row as text, for the columns above."""
    error = "" if row.error is None else f" +- {row.error:.2g}"
    return [
        row.metric,
        row.better,
        f"{row.first:.6g}",
        f"{row.other:.6g}",
        f"{row.difference:+.4g}{error}",
        str(row.n),
        row.verdict,
    ]


def about(comparison: Comparison) -> list[str]:
    """Sentences around the table: what is compared, what differs in settings, what was left out, and the test."""
    settings = "; ".join(f"{key}: {_shown(a)} / {_shown(b)}" for key, (a, b) in comparison.settings.items())
    lines = [
        f"first: {comparison.first.name}; other: {comparison.other.name}; seeds {', '.join(map(str, comparison.seeds))}; "
        f"difference = other - first, +- its standard error",
        f"settings that differ: {settings}" if settings else "their settings are the same",
        *(f"note: {note}" for note in comparison.notes),
        f"test: {comparison.test}",
    ]
    if not comparison.rows:
        lines.append("they have no metric in common, so there is nothing to compare")
    return lines


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    parts = []
    for comparison in comparisons:
        lines = [f"## {comparison.other.name} against {comparison.first.name}", ""]
        lines += [f"- {line}" for line in about(comparison)]
        lines += ["", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in comparison.rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def as_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [
        {
            "first": {"recipe": each.first.name, "path": str(each.first.path)},
            "other": {"recipe": each.other.name, "path": str(each.other.path)},
            "seeds": list(each.seeds),
            "test": {"kind": "paired t", "two_sided": True, "level": LEVEL, "metrics": len(each.rows), "words": each.test},
            "settings": {key: {"first": a, "other": b} for key, (a, b) in each.settings.items()},
            "notes": list(each.notes),
            "rows": [to_json(row) for row in each.rows],
        }
        for each in comparisons
    ]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
