"""Runs compared seed by seed: differences with their standard errors, and verdicts that claim no
more than the seeds allow.

Runs of one seed share what the seed decides, so the difference is taken seed by seed and its spread
over seeds is the error:

    d_s = other_s - first_s,    se = std(d) / sqrt(n),    t = mean(d) / se,    p two-sided with n - 1 degrees of freedom

One comparison looks at many metrics. Verdicts rest on Holm's adjusted p: with k tests and p_(1) <=
... <= p_(k),

    adjusted p_(i) = max over j <= i of min(1, (k - j + 1) p_(j))

so that the probability of any false verdict among them is at most LEVEL.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrex.errors import InvalidArgumentError, RunFolderError
from torchrex.report.runs import LoadedRun, find_runs, load_run
from torchrex.report.series import FEWEST_SEEDS, p_of_pairs
from torchrex.report.settings_that_matter import (
    decides_the_problem,
    differing_that_matter,
    with_known_settings,
)

LEVEL = 0.05
HIGHER, LOWER = ("accuracy", "ess"), ("nll", "brier", "ece", "w1", "w2", "error", "rhat")
# Settings, not outcomes; and the time, which is that of all replicas that ran side by side.
NOT_COMPARED = ("n_steps", "n_runs", "n_draws", "seconds_per_epoch", "seconds_per_step")

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
    error: float | None  # its standard error; None for one seed, and between different problems
    n: int
    p_value: float | None  # of this metric by itself
    p_adjusted: float | None = (
        None  # by Holm, for all metrics of the comparison: the verdict rests on it
    )
    verdict: str = ""


@dataclass(frozen=True)
class Comparison:
    """`other` against `first`, on the seeds that both have."""

    first: Side
    other: Side
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    settings: dict[str, tuple[Any, Any]]  # config fields that differ and matter: (first, other)
    notes: tuple[str, ...]  # what was left out, and why
    apart: tuple[
        str, ...
    ] = ()  # those of `settings` that make the two different problems: nothing is better or worse then
    settings_known: bool = True  # of both sides; else nobody knows what differs

    @property
    def test(self) -> str:
        """What was done, in words, so that a reader can correct for it."""
        if self.apart:
            return f"no test: different {', '.join(self.apart)} make them different problems"
        if not self.tested:
            return f"no test: {'one seed' if len(self.seeds) == 1 else f'{len(self.seeds)} seeds'}; {FEWEST_SEEDS} are needed"
        n = sum(row.p_adjusted is not None for row in self.rows)
        together = "" if n == 1 else f" for all {n} tests together (Holm's adjusted p)"
        return f"paired t-test over {len(self.seeds)} common seeds, two-sided, level {LEVEL:g}{together}"

    @property
    def tested(self) -> bool:
        """Whether there was anything to test: the same problem, on enough seeds."""
        return not self.apart and len(self.seeds) >= FEWEST_SEEDS


def compare_folders(paths: Sequence[Path]) -> list[Comparison]:
    """Every further folder against the first. Each is a run folder, or a recipe's folder that holds
    seed=*.
    """
    if len(paths) < 2:
        raise InvalidArgumentError(f"give at least two folders to compare, got {len(paths)}")
    sides = _with_own_names([load_side(path) for path in paths])
    return [compare(sides[0], other) for other in sides[1:]]


def load_side(path: Path) -> Side:
    """The finished runs in a folder. Several recipes below it are refused, for they would be mixed
    up.
    """
    found = [load_run(each) for each in find_runs(path)]
    if not found:
        raise RunFolderError(f"{path} holds no run; give OUT/RECIPE or OUT/RECIPE/seed=S")
    recipes = sorted({run.recipe for run in found})
    if len(recipes) > 1:
        shown = ", ".join(recipes[:3]) + (", ..." if len(recipes) > 3 else "")
        raise RunFolderError(
            f"{path} holds runs of {len(recipes)} recipes ({shown}); give the folder of one of them"
        )
    runs: dict[int, LoadedRun] = {}
    left_out = []
    finished = [run for run in found if run.status == "finished"]
    usable = {id(run) for run in with_known_settings(finished)}
    for run in found:
        where = run.path.name
        if run.status != "finished":
            left_out.append(f"{where} is {run.status}")
        elif id(run) not in usable:
            left_out.append(
                f"config.json of {where} is missing or damaged, so that its settings are not known"
            )
        elif run.seed < 0:
            left_out.append(f"{where} does not tell its seed")
        elif run.seed in runs:
            left_out.append(f"{where} has the seed {run.seed} of {runs[run.seed].path.name}")
        else:
            runs[run.seed] = run
    if not runs:
        raise RunFolderError(
            f"{path} has no finished run ({'; '.join(left_out)}); finish one first"
        )
    return Side(recipes[0], path, runs, tuple(left_out))


def _with_own_names(sides: list[Side]) -> list[Side]:
    """Sides of the same recipe are told apart by their folders."""
    names = [side.name for side in sides]
    return [
        side
        if names.count(side.name) == 1
        else dataclasses.replace(side, name=f"{side.name} ({side.path})")
        for side in sides
    ]


def compare(first: Side, other: Side) -> Comparison:
    """Pair the seeds that both sides have, and compare every metric that all of those runs have."""
    seeds = tuple(sorted(set(first.runs) & set(other.runs)))
    notes = [
        f"{side.name}: {words}, left out" for side in (first, other) for words in side.left_out
    ]
    for side, against in ((first, other), (other, first)):
        if alone := sorted(set(side.runs) - set(against.runs)):
            plural = "s" if len(alone) > 1 else ""
            notes.append(f"seed{plural} {', '.join(map(str, alone))} only in {side.name}, left out")
    if not seeds:
        raise RunFolderError(
            f"{first.name} has seeds {_listed(first.runs)} and {other.name} {_listed(other.runs)}: none in common, so there is "
            f"nothing to pair; run the same seeds"
        )
    metrics = [[run_metrics(side.runs[seed]) for seed in seeds] for side in (first, other)]
    everywhere = [
        name for name in metrics[0][0] if all(name in each for side in metrics for each in side)
    ]
    somewhere = {name for side in metrics for each in side for name in each}
    if not everywhere:
        have = " and ".join(
            f"{side.name} has {_few(each[0])}"
            for side, each in zip((first, other), metrics, strict=True)
        )
        raise RunFolderError(
            f"{have}: no metric in common, so there is nothing to compare; compare runs of one kind"
        )
    if missing := sorted(somewhere - set(everywhere)):
        notes.append(f"not in all of the runs, left out: {', '.join(missing)}")
    known = all(side.runs[seed].settings_known for side in (first, other) for seed in seeds)
    settings = _settings(first, other, seeds, notes) if known else {}
    configs = [side.runs[seed].config for side in (first, other) for seed in seeds]
    apart = tuple(
        key for key in settings if any(decides_the_problem(key, config) for config in configs)
    )
    ours, theirs = metrics
    rows = compare_metrics(
        {name: ([m[name] for m in ours], [m[name] for m in theirs]) for name in everywhere}
    )
    rows = [_without_verdict(row, apart) for row in rows] if apart else rows
    return Comparison(first, other, seeds, tuple(rows), settings, tuple(notes), apart, known)


def _settings(
    first: Side, other: Side, seeds: Sequence[int], notes: list[str]
) -> dict[str, tuple[Any, Any]]:
    """What differs between the sides; what differs within a side becomes a note."""
    found: dict[str, tuple[Any, Any]] = {}
    for seed in seeds:
        for key, pair in differing_that_matter(
            first.runs[seed].config, other.runs[seed].config
        ).items():
            found.setdefault(key, pair)
    for side in (first, other):
        configs = [side.runs[seed].config for seed in seeds]
        if fields := sorted(
            {key for config in configs for key in differing_that_matter(configs[0], config)}
        ):
            notes.append(f"{side.name}: its own seeds differ in {', '.join(fields)}")
    return found


def _without_verdict(row: Row, apart: Sequence[str]) -> Row:
    words = f"not comparable: different {', '.join(apart)}"
    return dataclasses.replace(
        row, better="", error=None, p_value=None, p_adjusted=None, verdict=words
    )


def run_metrics(run: LoadedRun) -> dict[str, float]:
    """The numbers of a run that can be compared: its metrics without settings and standard errors,
    and its rate of swaps.
    """
    numbers = {
        name: float(value)
        for name, value in run.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    names = [
        name for name in numbers if name not in NOT_COMPARED and not name.endswith(("_true", "_se"))
    ]
    chosen = {name: numbers[name] for name in names}
    for pair in (run.result or {}).get("swaps") or []:
        if pair.get("acceptance_rate") is not None and not any(
            name.startswith("acceptance_rate") for name in numbers
        ):
            chosen[f"swaps of rungs {pair['pair'][0]} and {pair['pair'][1]}"] = float(
                pair["accepted"]
            )
    return chosen


def compare_metrics(values: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> list[Row]:
    """The paired differences of all metrics; both sequences of a metric are in the order of the
    same seeds.
    """
    rows = [_difference(metric, first, other) for metric, (first, other) in values.items()]
    tested = sorted(
        (row.p_value, k) for k, row in enumerate(rows) if row.p_value is not None and row.error
    )
    adjusted, largest = dict[int, float](), 0.0
    for rank, (p_value, k) in enumerate(tested):
        adjusted[k] = largest = max(largest, min(1.0, (len(tested) - rank) * p_value))
    rows = [dataclasses.replace(row, p_adjusted=adjusted.get(k)) for k, row in enumerate(rows)]
    return [dataclasses.replace(row, verdict=_verdict(row)) for row in rows]


def _difference(metric: str, first: Sequence[float], other: Sequence[float]) -> Row:
    differences = [b - a for a, b in zip(first, other, strict=True)]
    n = len(differences)
    mean = math.fsum(differences) / n
    error = p_value = None
    if n > 1:
        error = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
        p_value = p_of_pairs(mean, error, n) if n >= FEWEST_SEEDS else None
    return Row(
        metric,
        direction(metric),
        math.fsum(first) / n,
        math.fsum(other) / n,
        mean,
        error,
        n,
        p_value,
    )


def _verdict(row: Row) -> str:
    mean, n = row.difference, row.n
    if row.error == 0 and mean == 0:
        return f"the same on all {n} seeds"
    if n == 1:
        return (
            "the same on one seed, which tells nothing" if mean == 0 else "one seed tells nothing"
        )
    if n < FEWEST_SEEDS:
        return f"no claim at n={n}"
    if row.p_adjusted is None:
        return f"the same difference on all {n} seeds: no spread to test against"
    if row.p_adjusted >= LEVEL:
        return f"not distinguishable at n={n}"
    word = "higher" if mean > 0 else "lower"
    if row.better:
        word += ", better" if word == row.better else ", worse"
    return f"{word} (adjusted p = {row.p_adjusted:.2g}, n={n})"


def direction(metric: str) -> Better:
    """Which direction is good, told from the words of the name: `pooled_logits_nll` is an NLL."""
    words = set(re.split(r"[_ ]", metric.lower()))
    if "swaps" in words or "acceptance" in words:  # more swaps may be bought with bias
        return ""
    return "higher" if words & set(HIGHER) else "lower" if words & set(LOWER) else ""


def _listed(runs: Mapping[int, Any]) -> str:
    return ", ".join(map(str, sorted(runs)))


def _few(metrics: Mapping[str, float]) -> str:
    return (
        ", ".join(list(metrics)[:3]) + (", ..." if len(metrics) > 3 else "")
        if metrics
        else "no metric"
    )
