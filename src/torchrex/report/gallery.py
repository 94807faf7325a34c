"""The gallery from run folders: every method on every problem next to the exact answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchrex.diagnostics import mean_and_error
from torchrex.experiments import RunFolder
from torchrex.experiments.gallery import (
    INDEPENDENT,
    METHODS,
    MORE,
    GalleryConfig,
    Problem,
    gallery_recipes,
)
from torchrex.report.plots import look, panels
from torchrex.report.tables import (
    fitted_table,
    markdown_page,
    markdown_table,
    missing_words,
    value_and_error,
)

HEADS = ("problem", "method", "answer", "exact", "in right modes %", "wrong by (SE)")
BEATS, RIGHT = 5.0, 3.0  # standard errors


def numbers(out: Path, chosen: Mapping[str, GalleryConfig]) -> dict[str, Any]:
    """One row for each problem that was run, with the seeds pooled; large ones too where they are
    there.
    """
    rows, unfinished = [], []
    for name, config in {**chosen, **gallery_recipes(large=True)}.items():
        paths = sorted((out / name).glob("seed=*"))
        folders = [RunFolder(path) for path in paths if path.suffix != ".new"]
        finished = [folder for folder in folders if folder.finished]
        unfinished += [f"{name} ({each.path.name})" for each in folders if each not in finished]
        if finished:
            rows.append(_row(config, [folder.result or {} for folder in finished]))
    not_run = [name for name in chosen if name not in {row["recipe"] for row in rows}]
    return {"rows": rows, "unfinished": unfinished, "not_run": not_run}


def _row(config: GalleryConfig, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    problem, first = config.problem(), results[0]["metrics"]
    # As of the run: a later version may know the answer better, or have other data.
    exact, exact_error = first["answer_true"], first["answer_se"]
    methods = {}
    for name, title in {**METHODS, **MORE}.items():
        if name not in first:
            continue
        estimates, found = (_pooled(results, each) for each in (name, f"{name}_found"))
        mean, error = mean_and_error(estimates)
        score, score_error = mean_and_error(scores(problem, estimates, exact))
        methods[name] = {
            "title": title,
            "mean": mean,
            "se": error,
            "score": score,
            "score_se": score_error,
            "found": float(found.mean()) if len(found) else None,
            "off": _over(mean - exact, math.hypot(error, exact_error)),
            "examples": first[f"{name}_examples"],
            "runs": estimates.tolist(),
            "shown": results[0]["curves"].get(f"{name}_shown"),
        }
    row = {
        "recipe": config.recipe,
        "words": problem.words,
        "exact": exact,
        "exact_error": exact_error,
        "n_runs": len(_pooled(results, "tuned")),
        "rungs": first["rungs"],
        "tuning_examples": first["tuning_examples"],
        "seconds": sum(result.get("wall_seconds", 0.0) for result in results),
        "device": results[0].get("device"),
        "methods": methods,
    }
    return row | verdict(methods)


def _pooled(results: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    every = [value for result in results for value in result["curves"].get(name, ())]
    return torch.tensor(every, dtype=torch.float64)


def scores(problem: Problem, estimates: Tensor, exact: float) -> Tensor:
    """What is compared between methods; less is better."""
    if problem.lower_is_better is None:
        return (estimates - exact).abs()
    return estimates if problem.lower_is_better else -estimates


def verdict(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Does the tuned exchange beat the best of the independent baselines, and is it right?"""
    tuned = methods["tuned"]
    there = [name for name in INDEPENDENT if name in methods]
    best = min(there, key=lambda name: methods[name]["score"])
    other = methods[best]
    gain = _over(other["score"] - tuned["score"], math.hypot(other["score_se"], tuned["score_se"]))
    off = tuned["off"]
    wins = "beats" if gain > BEATS else "does not beat"
    right = "within" if abs(off) <= RIGHT else "not within"
    words = (
        f"the tuned exchange {wins} {other['title']} ({gain:+.1f} standard errors, needed "
        f"{BEATS:g}) and is {right} {RIGHT:g} standard errors of the exact answer ({off:+.1f})"
    )
    return {"best_independent": best, "gain": gain, "verdict": words,
            "passes": gain > BEATS and abs(off) <= RIGHT}  # fmt: skip


def _over(difference: float, error: float) -> float:
    """In standard errors; a difference without error counts as none if it is none."""
    if error > 0:
        return difference / error
    return 0.0 if difference == 0 else math.copysign(math.inf, difference)


# Words


def _cells(row: Mapping[str, Any]) -> list[list[str]]:
    name = row["recipe"].partition("/")[2]
    exact = value_and_error(row["exact"], row["exact_error"])
    return [
        [
            name,
            each["title"],
            value_and_error(each["mean"], each["se"]),
            exact,
            "-" if each["found"] is None else f"{100 * each['found']:.1f}",
            f"{each['off']:+.1f}" if math.isfinite(each["off"]) else "-",
        ]
        for each in row["methods"].values()
    ]


def as_table(found: Mapping[str, Any], console: Console) -> Table:
    rows = [cells for row in found["rows"] for cells in _cells(row)]
    return fitted_table(HEADS[2:], rows, console)


def notes(found: Mapping[str, Any]) -> list[str]:
    said = []
    for row in found["rows"]:
        name, cost = row["recipe"].partition("/")[2], row["methods"]["one"]["examples"]
        said.append(
            f"{name}: {row['words']}; {cost:.3g} examples for each of {row['n_runs']} runs of "
            f"every method, {row['rungs']} rungs. Here {row['verdict']}."
        )
    return [*said, *missing_words(found["not_run"], found["unfinished"])]


def as_markdown(found: Mapping[str, Any]) -> str:
    rows = [cells for row in found["rows"] for cells in _cells(row)]
    return markdown_page("Gallery", markdown_table(HEADS, rows), notes(found))


# Pictures


def draw(found: Mapping[str, Any], path: Path) -> None:
    """All problems in one picture, and each in one of its own, PATH-NAME.png."""
    every = found["rows"]
    with panels(path, len(every), 1, (7, 2.8 * len(every))) as (_, axes):
        for axis, row in zip(axes[:, 0], every, strict=True):
            plot_answers(row, axis)
    for row in every:
        name = row["recipe"].partition("/")[2]
        problem = GalleryConfig(row["recipe"]).problem()
        shown = {
            method: torch.tensor(each["shown"])
            for method, each in row["methods"].items()
            if each["shown"] is not None
        }
        has_plot = problem.plot is not None and bool(shown)
        size = (8.0 if has_plot else 6.0, 3.4)
        own = path.with_name(f"{path.stem}-{name}{path.suffix}")
        with panels(own, 1, 2 if has_plot else 1, size) as (_, axes):
            plot_answers(row, axes[0, 0])
            if problem.plot is not None and has_plot:
                styles = {name: look(name).points | {"fillstyle": "none"} for name in shown}
                problem.plot(axes[0, 1], shown, styles)


def plot_answers(row: Mapping[str, Any], axis: Any) -> None:
    """The answer of every run, the mean of each method with two standard errors, the exact one."""
    names = list(row["methods"])[::-1]
    for place, name in enumerate(names):
        each, style = row["methods"][name], look(name).points
        heights = [place + 0.05 * (k % 5 - 2) for k in range(len(each["runs"]))]
        axis.plot(each["runs"], heights, **{**style, "marker": "o"}, alpha=0.35, ms=4, mew=0)
        axis.errorbar(each["mean"], place, xerr=2 * each["se"], **style, ms=5, capsize=3)
    axis.axvline(row["exact"], color="black", lw=1.2, label="exact")
    axis.set_yticks(range(len(names)), [row["methods"][name]["title"] for name in names])
    axis.set_ylim(-0.5, len(names) + 0.1)  # space for the legend
    axis.set_xlabel(row["words"])
    axis.set_title(row["recipe"])
    axis.legend(loc="upper right")
