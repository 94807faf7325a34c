"""Runs compared seed by seed: differences with standard errors, and verdicts that do not overclaim.

Runs of one seed share what the seed decides, so differences are taken seed by seed:

    d_s = other_s - first_s,    se = std(d) / sqrt(n),    t = mean(d) / se with n - 1 degrees

One comparison looks at many metrics. Verdicts rest on Holm's adjusted p: with k tests and
p_(1) <= ... <= p_(k),

    adjusted p_(i) = max over j <= i of min(1, (k - j + 1) p_(j))

so that the probability of any false verdict among them is at most LEVEL.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrex.durable import one_line
from torchrex.errors import InvalidArgumentError, RunFolderError
from torchrex.report.plots import FEWEST_SEEDS, p_of_pairs
from torchrex.report.reader import LoadedRun, NotRead, read_tree
from torchrex.report.tables import in_markdown, markdown_table
from torchrex.runs.config import to_json

LEVEL = 0.05
HIGHER = {"accuracy", "ess"}
LOWER = {"nll", "brier", "ece", "w1", "w2", "error", "rhat", "rmse", "crps"}
# Settings, not outcomes; and the time, which is that of all replicas that ran together.
NOT_COMPARED = {
    *("n_steps", "n_runs", "n_draws", "n_test", "seconds_per_epoch", "seconds_per_step"),
    "examples",
}
NOT_USED, ABSENT = "not used", "absent"
NAMES = ("recipe", "paper", "checkpoint_every")  # nothing of a run depends on them
# The density that is sampled, or the data that are learned and measured on. `subset` is not one
# of them: fewer training images are measured on the same test images.
PROBLEM = {
    *("weights", "means", "stds", "n_data", "dim", "prior_precision"),
    *("data", "validation", "test_subset"),
}
OF_SWAPS = {
    *("correction_factor", "factor_per_swap", "swaps_after", "rest_after_swap", "prior_in_swaps"),
    *("momentum_at_swap", "variance", "smoothing", "measure_every", "measure_draws"),
    "initial_variance",
}
COLUMNS = ("metric", "better", "first", "other", "difference", "seeds", "verdict")
GAP = "  "
MARK = "<!-- torchrex compare -->\n"  # by which a Markdown file of ours is known
MOST_SHOWN = 12  # values of a setting
LEAST_FOR_VERDICT = 12  # columns

Better = Literal["higher", "lower", ""]
Differences = dict[str, tuple[Any, Any]]


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
    p_adjusted: float | None = None  # by Holm, for all metrics: the verdict rests on it
    verdict: str = ""


@dataclass(frozen=True)
class Comparison:
    """`other` against `first`, on the seeds that both have."""

    first: Side
    other: Side
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    settings: Differences  # config fields that differ and matter: (first, other)
    notes: tuple[str, ...]  # what was left out, and why
    apart: tuple[str, ...] = ()  # those of `settings` that make them different problems
    settings_known: bool = True  # of both sides

    @property
    def tested(self) -> bool:
        return not self.apart and len(self.seeds) >= FEWEST_SEEDS

    @property
    def test(self) -> str:
        """What was done, in words, so that a reader can correct for it."""
        n = len(self.seeds)
        if self.apart:
            return f"no test: different {', '.join(self.apart)} make them different problems"
        if not self.tested:
            return f"no test: {'one seed' if n == 1 else f'{n} seeds'}; {FEWEST_SEEDS} are needed"
        k = sum(row.p_adjusted is not None for row in self.rows)
        together = "" if k == 1 else f" for all {k} tests together (Holm's adjusted p)"
        return f"paired t-test over {n} common seeds, two-sided, level {LEVEL:g}{together}"


def compare_folders(paths: Sequence[Path]) -> list[Comparison]:
    """Every further folder against the first: run folders, or folders of a recipe with seed=*."""
    if len(paths) < 2:
        raise InvalidArgumentError(f"give at least two folders to compare, got {len(paths)}")
    sides = [load_side(path) for path in paths]
    names = Counter(side.name for side in sides)
    for k, side in enumerate(sides):
        if names[side.name] > 1:  # the same recipe is named by its folder
            sides[k] = dataclasses.replace(side, name=f"{side.name} ({side.path})")
    return [compare(sides[0], other) for other in sides[1:]]


def load_side(path: Path) -> Side:
    """The finished runs in a folder of one recipe."""
    tree = list(read_tree(path))
    found = [each for each in tree if isinstance(each, LoadedRun)]
    left_out = [
        f"{one_line(each.path.name)} is unreadable ({each.words})"
        for each in tree
        if isinstance(each, NotRead) and each.status == "unreadable"
    ]
    if not found:
        reasons = f" ({left_out[0]})" if left_out else ""
        raise RunFolderError(
            f"{one_line(path)} holds no run{reasons}; give OUT/RECIPE or OUT/RECIPE/seed=S"
        )
    usable = with_known_settings([run for run in found if run.status == "finished"])
    recipes = sorted({run.recipe for run in usable or found})
    if len(recipes) > 1:
        shown = ", ".join(recipes[:3]) + (", ..." if len(recipes) > 3 else "")
        several = f"{len(recipes)} recipes ({shown})"
        raise RunFolderError(f"{path} holds runs of {several}; give the folder of one of them")
    runs: dict[int, LoadedRun] = {}
    for run in found:
        name = run.path.name
        if run.status != "finished":
            left_out.append(f"{name} is {run.status}")
        elif run not in usable:
            left_out.append(f"{name} has no sound config.json, so its settings are not known")
        elif run.seed < 0:
            left_out.append(f"{name} does not say its seed")
        elif run.seed in runs:
            left_out.append(f"{name} has the seed {run.seed} of {runs[run.seed].path.name}")
        else:
            runs[run.seed] = run
    if not runs:
        why = "; ".join(left_out)
        raise RunFolderError(f"{path} has no finished run ({why}); finish one first")
    return Side(recipes[0], path, runs, tuple(left_out))


def compare(first: Side, other: Side) -> Comparison:
    """Pair the seeds that both sides have, and compare every metric that all of those runs have.
    Single runs are compared whatever their seeds are.
    """
    notes = [f"{s.name}: {words}, left out" for s in (first, other) for words in s.left_out]
    if len(first.runs) == len(other.runs) == 1 and first.runs.keys() != other.runs.keys():
        (seed,), (its_seed,) = first.runs, other.runs
        notes.append(f"{other.name} has seed {its_seed}: the runs are not paired")
        other = dataclasses.replace(other, runs={seed: other.runs[its_seed]})
    sides = (first, other)
    seeds = tuple(sorted(set(first.runs) & set(other.runs)))
    for side, against in (sides, sides[::-1]):
        if alone := sorted(set(side.runs) - set(against.runs)):
            plural = "s" if len(alone) > 1 else ""
            notes.append(f"seed{plural} {', '.join(map(str, alone))} only in {side.name}, left out")
    if not seeds:
        have = " and ".join(f"{s.name} has {', '.join(map(str, sorted(s.runs)))}" for s in sides)
        raise RunFolderError(f"{have}: no seed in common, nothing to pair; run the same seeds")
    metrics = [[run_metrics(side.runs[seed]) for seed in seeds] for side in sides]
    somewhere = dict.fromkeys(name for side in metrics for each in side for name in each)
    common = [name for name in somewhere if all(name in each for side in metrics for each in side)]
    if not common:
        names = [", ".join(list(each[0])[:3]) or "no metric" for each in metrics]
        have = f"{first.name} has {names[0]} and {other.name} has {names[1]}"
        raise RunFolderError(f"{have}: no metric in common; compare runs of one kind")
    if missing := sorted(set(somewhere) - set(common)):
        notes.append(f"not in all of the runs, left out: {', '.join(missing)}")
    configs = [[side.runs[seed].config for seed in seeds] for side in sides]
    known = all(side.runs[seed].settings_known for side in sides for seed in seeds)
    settings: Differences = {}
    if known:
        for pair in zip(*configs, strict=True):
            settings = {**differing_that_matter(*pair), **settings}
        for side, own in zip(sides, configs, strict=True):
            fields = {key for each in own for key in differing_that_matter(own[0], each)}
            if fields:
                notes.append(f"{side.name}: its own seeds differ in {', '.join(sorted(fields))}")
    every = [config for own in configs for config in own]
    apart = tuple(k for k in settings if any(decides_the_problem(k, each) for each in every))
    one, two = metrics
    rows = compare_metrics({x: ([m[x] for m in one], [m[x] for m in two]) for x in common})
    if apart:
        gone: dict[str, Any] = dict.fromkeys(("error", "p_value", "p_adjusted"))
        words = f"not comparable: different {', '.join(apart)}"
        rows = [dataclasses.replace(row, better="", verdict=words, **gone) for row in rows]
    return Comparison(first, other, seeds, tuple(rows), settings, tuple(notes), apart, known)


def run_metrics(run: LoadedRun) -> dict[str, float]:
    """The outcomes of a run: its metrics without settings and standard errors, and its swaps."""
    numbers = run.numbers
    names = [name for name in numbers if not name.endswith(("_true", "_se"))]
    chosen = {name: numbers[name] for name in names if name not in NOT_COMPARED}
    if not any(name.startswith("acceptance_rate") for name in numbers):
        for pair in (run.result or {}).get("swaps") or []:
            if pair.get("acceptance_rate") is not None:
                cold, hot = pair["pair"]
                chosen[f"swaps of rungs {cold} and {hot}"] = float(pair["accepted"])
    return chosen


def compare_metrics(values: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> list[Row]:
    """The paired differences of all metrics, both sequences in the order of the same seeds."""
    rows = [_difference(metric, first, other) for metric, (first, other) in values.items()]
    tested = [(x.p_value, k) for k, x in enumerate(rows) if x.p_value is not None and x.error]
    largest = 0.0
    for rank, (p_value, k) in enumerate(sorted(tested)):
        largest = max(largest, min(1.0, (len(tested) - rank) * p_value))
        rows[k] = dataclasses.replace(rows[k], p_adjusted=largest)
    return [dataclasses.replace(row, verdict=_verdict(row)) for row in rows]


def _difference(metric: str, first: Sequence[float], other: Sequence[float]) -> Row:
    differences = [b - a for a, b in zip(first, other, strict=True)]
    n = len(differences)
    mean = math.fsum(differences) / n
    error = p_value = None
    if n > 1:
        error = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
        p_value = p_of_pairs(mean, error, n) if n >= FEWEST_SEEDS else None
    means = (math.fsum(first) / n, math.fsum(other) / n)
    return Row(metric, direction(metric), *means, mean, error, n, p_value)


def _verdict(row: Row) -> str:
    mean, n = row.difference, row.n
    if row.error == 0 and mean == 0:
        return f"the same on all {n} seeds"
    if n == 1:
        return ("the same on one seed, which" if mean == 0 else "one seed") + " shows nothing"
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
    """Which direction is good, by the words of the name: `pooled_logits_nll` is an NLL."""
    words = set(re.split(r"[_ ]", metric.lower()))
    if words & {"swaps", "acceptance"}:  # more swaps may be bought with bias
        return ""
    return "higher" if words & HIGHER else "lower" if words & LOWER else ""


# Settings


def with_known_settings(runs: Sequence[LoadedRun]) -> list[LoadedRun]:
    """Those that may be averaged or compared: without a config.json nobody knows whether a run was
    made like the others. If no run has one, all.
    """
    return [run for run in runs if run.settings_known] or list(runs)


def decides_the_problem(key: str, config: Mapping[str, Any]) -> bool:
    """Are runs that differ in `key` different problems? `data_seed` is only in some configs."""
    if key == "data_seed":
        chosen = config.get("validation") or config.get("test_subset") is not None
        return "n_data" in config or bool(chosen)
    return key in PROBLEM


def differing_that_matter(one: Mapping[str, Any], other: Mapping[str, Any]) -> Differences:
    """Fields that differ, without those that neither run uses; "not used" where one does not."""
    idle, idle_other = unused(one), unused(other)
    found = {}
    for key, (a, b) in differing(one, other).items():
        a = NOT_USED if key in idle else a
        b = NOT_USED if key in idle_other else b
        if not all(each in (NOT_USED, ABSENT) for each in (a, b)):
            found[key] = (a, b)
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Differences:
    """Fields of two configs that differ, nested ones joined by dots, without NAMES."""
    found: Differences = {}
    for key in {**one, **other}:
        a, b, name = one.get(key, ABSENT), other.get(key, ABSENT), f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping) and name not in NAMES:
            found |= differing(a, b, f"{name}.")
        elif name not in NAMES and a != b:
            found[name] = (a, b)
    return found


def unused(config: Mapping[str, Any]) -> set[str]:
    """Settings that nothing of the run depends on, given its others: without swaps the noise of the
    energies moves nothing, and a single rung has no hotter one.
    """
    noise, method, rungs = (config.get(name) for name in ("noise", "method", "temperatures"))
    noise = noise if isinstance(noise, Mapping) else {}
    single = method in ("msgd", "sghmc", "supervised", "consistency")
    single = single or (isinstance(rungs, list) and len(rungs) < 2)
    idle = {"noise.degrees"} if noise.get("law") == "gaussian" else set()
    if single or method in ("independent", "noswaps") or config.get("swaps") is False:
        idle |= OF_SWAPS | {f"noise.{part}" for part in noise}
    if method != "consistency":
        idle |= {"consistency"}
    if single:
        idle |= {"hot_temperature", "hot_lr", "swaps", "generators"}
    return idle | {"temperature", "noise_follows_lr"} if method == "msgd" else idle


# Text


def lines(comparison: Comparison, width: int | None = None) -> list[str]:
    """The comparison as lines of at most `width` columns; for a pipe (None) a row is a line."""
    head, *rest = _about(comparison)
    below = [line for each in rest for line in wrapped(each, width)]
    return [*wrapped(head, width), "", *_table(comparison, width), "", *below]


def wrapped(text: str, width: int | None) -> list[str]:
    """Lines of complete words: one that is too long is alone and goes beyond the width."""
    if width is None:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _cells(comparison: Comparison) -> tuple[list[list[str]], list[int]]:
    """The rows as text, and the columns that have any. Different problems have no difference."""
    rows = []
    for row in comparison.rows:
        error = "" if row.error is None else f" +- {row.error:.2g}"
        end = [f"{row.difference:+.4g}{error}", str(row.n), row.verdict]
        end = ["", end[1], ""] if comparison.apart else end
        rows.append([row.metric, row.better, f"{row.first:.6g}", f"{row.other:.6g}", *end])
    return rows, [k for k in range(len(COLUMNS)) if k == 0 or any(row[k] for row in rows)]


def _table(comparison: Comparison, width: int | None) -> list[str]:
    """Aligned columns, the verdict wrapped. If that is too wide: without the number of seeds and
    the direction, and then a block for each metric.
    """
    rows, filled = _cells(comparison)
    verdict = COLUMNS.index("verdict")
    for spared in ((), ("seeds",), ("seeds", "better")):
        shown = [k for k in filled if k != verdict and COLUMNS[k] not in spared]
        widths = [max(len(each[k]) for each in (COLUMNS, *rows)) for k in shown]
        left = None if width is None else width - sum(widths) - len(GAP) * len(widths)
        if left is None or left >= LEAST_FOR_VERDICT:
            break
    else:
        made = []
        for row in rows:
            given = [k for k in filled[1:] if k != verdict and row[k]]
            words = ", ".join(f"{COLUMNS[k]} {row[k]}" for k in given)
            words += f": {row[verdict]}" if row[verdict] else ""
            made += [row[0], *(GAP + line for line in wrapped(words, max(1, (width or 0) - 2)))]
        return made
    made = []
    head = [name if k in filled else "" for k, name in enumerate(COLUMNS)]
    for row in (head, *rows):
        start = "".join(row[k].ljust(n) + GAP for k, n in zip(shown, widths, strict=True))
        first, *more = wrapped(row[verdict], left)
        made += [(start + first).rstrip(), *(" " * len(start) + line for line in more)]
    return made


def _about(comparison: Comparison) -> list[str]:
    """Sentences: what is compared, which settings differ, what was left out, and the test."""
    first, other = comparison.first.name, comparison.other.name
    head = f"first: {first}; other: {other}; seeds {', '.join(map(str, comparison.seeds))}"
    said = []
    if comparison.apart:
        fields = ", ".join(comparison.apart)
        said = [f"they are not comparable: they differ in {fields}; neither is better or worse"]
    else:
        errors = any(row.error is not None for row in comparison.rows)
        head += f"; difference = other - first{', +- its standard error' if errors else ''}"
    both = {key: pair for key, pair in comparison.settings.items() if ABSENT not in pair}
    if both:
        each = (f"{key}: {_shown(a)} / {_shown(b)}" for key, (a, b) in both.items())
        said.append(f"settings that differ: {'; '.join(each)}")
    for which, k in (("first", 1), ("other", 0)):
        if alone := [key for key, pair in comparison.settings.items() if pair[k] == ABSENT]:
            said.append(f"settings that only {which} has: {', '.join(alone)}")
    if not comparison.settings_known:
        said.append("settings are not known: a config.json is missing or damaged")
    elif not comparison.settings:
        said.append("no setting that matters differs")
    notes = [f"note: {each}" for each in comparison.notes]
    return [head, *said, *notes, f"test: {comparison.test}"]


def _shown(value: Any) -> str:
    if not isinstance(value, list):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    more = f",... ({len(value)} values)" if len(value) > MOST_SHOWN else ""
    return ",".join(map(_shown, value[:MOST_SHOWN])) + more


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    parts = [MARK]
    for each in comparisons:
        rows, shown = _cells(each)
        made = ["## " + in_markdown(f"{each.other.name} against {each.first.name}"), ""]
        made += [*(f"- {in_markdown(line)}" for line in _about(each)), ""]
        body = ([row[k] for k in shown] for row in rows)
        parts.append("\n".join([*made, *markdown_table([COLUMNS[k] for k in shown], body)]) + "\n")
    return "\n".join(parts)


def as_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [
        {
            "first": {"recipe": each.first.name, "path": str(each.first.path)},
            "other": {"recipe": each.other.name, "path": str(each.other.path)},
            "seeds": list(each.seeds),
            "comparable": not each.apart,
            "not_comparable_because_of": list(each.apart),
            "test": {
                "kind": "paired t" if each.tested else "none",
                "two_sided": True,
                "level": LEVEL,
                "adjustment": "Holm",
                "metrics": len(each.rows),
                "words": each.test,
            },
            "settings_known": each.settings_known,
            "settings": {key: {"first": a, "other": b} for key, (a, b) in each.settings.items()},
            "notes": list(each.notes),
            "rows": [to_json(row) for row in each.rows],
        }
        for each in comparisons
    ]
