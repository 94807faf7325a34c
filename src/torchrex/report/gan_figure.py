"""Figure 3 of the paper from run folders: accuracy against the number of labels, for every data set
and method.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchrex.experiments.gan import GanConfig
from torchrex.experiments.gan_recipes import GAN_DATA, N_LABELLED
from torchrex.report.gan import FAMILIES, METHODS, PAPER_COLUMN, PAPER_STEPS, GanRun, paper_number
from torchrex.report.image_numbers import finished_runs, settings_of_most, stated, summary
from torchrex.report.image_words import (
    Columns,
    Section,
    every_seeds_swaps,
    fitted,
    markdown_lines,
    plus_minus,
)


def numbers(out: Path, chosen: Mapping[str, GanConfig]) -> dict[str, Any]:
    """By data set and family: `points` (accuracy of every method and number of labels) and the
    paper's, `paper`.

    A data set is drawn with the settings that most of its recipes were run with; runs with others
    are named in `left_out`.
    """
    runs, unfinished = finished_runs(out, chosen, unit="steps")
    figure: dict[str, Any] = {"data": {}, "left_out": [], "not_run": [], "unfinished": unfinished}
    for family, data in itertools.product(FAMILIES, GAN_DATA):
        title = f"{data}, {FAMILIES[family]}" if FAMILIES[family] else data
        own = [run for run in runs if (run.recipe.family, run.recipe.data) == (family, data)]
        if not own:
            figure["not_run"] += [title] * any(
                (config.family, config.data) == (family, data) for config in chosen.values()
            )
            continue
        settings = settings_of_most(own)
        figure["left_out"] += [_left_out(run) for run in own if run.settings != settings]
        points, missing = [], {}
        for method, method_title in METHODS.items():
            same = [run for run in own if run.settings == settings and run.recipe.method == method]
            found = [
                _point([run for run in same if run.recipe.n_labelled == n]) for n in N_LABELLED
            ]
            points += [point for point in found if point]
            there = {run.recipe.n_labelled for run in same}
            here = [
                config
                for config in chosen.values()
                if (config.family, config.data, config.method) == (family, data, method)
            ]
            if here:
                missing[method_title] = tuple(
                    sorted({config.n_labelled for config in here} - there)
                )
        figure["not_run"] += _not_run(title, missing)
        paper = {
            method: {n: stated(paper_number(data, n, method)) for n in N_LABELLED}
            for method in PAPER_COLUMN
        }
        figure["data"][title] = {
            "steps": settings.length,
            "settings": dict(settings.others),
            "points": points,
            "paper": {
                METHODS[method]: {str(n): known for n, known in by_n.items() if known}
                for method, by_n in paper.items()
            },
        }
    return figure


def _not_run(title: str, missing: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Such as `svhn 2000 2500`, with the methods that lack them where others do not."""
    lines = []
    for labels in dict.fromkeys(each for each in missing.values() if each):
        methods = [method for method, each in missing.items() if each == labels]
        some = "" if len(methods) == len(missing) else f" ({', '.join(methods)})"
        lines.append(f"{title} {' '.join(map(str, labels))}{some}")
    return lines


def _left_out(run: GanRun) -> str:
    others = f", {run.settings}" if run.settings.others else ""
    return f"{run.recipe.recipe} seed {run.seed} ({run.settings.length} steps{others})"


def _point(runs: list[GanRun]) -> dict[str, Any] | None:
    """Accuracy of rung 0 over seeds, and of both rungs where there are two."""
    if not runs:
        return None
    recipe = runs[0].recipe
    pair = recipe.n_rungs > 1
    return {
        "method": METHODS[recipe.method],
        "n_labelled": recipe.n_labelled,
        "recipe": recipe.recipe,
        "n": len(runs),
        "paper": stated(paper_number(recipe.data, recipe.n_labelled, recipe.method)),
        "ours": summary({run.seed: run.number("accuracy") for run in runs}),
        "both_rungs": summary({run.seed: run.number("pooled_accuracy") for run in runs})
        if pair
        else None,
        "swaps": [run.swaps for run in runs] if pair else None,
        "devices": sorted({run.result["device"] for run in runs}),
    }


# Words

COLUMNS: Columns = {
    "paper %": lambda point: plus_minus(point["paper"]) or "-",
    "ours %": lambda point: plus_minus(point["ours"]),
    "both rungs": lambda point: plus_minus(point["both_rungs"]) or "-",
    "n": lambda point: str(point["n"]),
    "swaps": every_seeds_swaps,
}


def _rows(figure: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for data, of in figure["data"].items():
        for point in of["points"]:
            words = [column(point) for column in COLUMNS.values()]
            rows.append([_name(data, of), str(point["n_labelled"]), point["method"], *words])
    return rows


def as_table(figure: Mapping[str, Any], console: Console) -> Table:
    """As many columns as the console has room for."""
    sections = [
        Section(
            _name(data, of),
            [(f"{point['n_labelled']} {point['method']}", point) for point in of["points"]],
        )
        for data, of in figure["data"].items()
    ]
    return fitted(sections, COLUMNS, ("swaps", "both rungs", "n"), console)[0]


def _name(data: str, of: Mapping[str, Any]) -> str:
    return f"{data}{'§' if of['settings'] else ''}"


def notes(figure: Mapping[str, Any]) -> list[str]:
    said = [
        "ours: accuracy on all test images of the average over draws on rung 0; ± 2 standard deviations over n seeds. The "
        "authors' code leaves out images that are called fake; table 3 has both scores."
    ]
    for data, of in figure["data"].items():
        if of["steps"] != PAPER_STEPS:
            said.append(f"{data}: {of['steps']:,} steps in place of the paper's {PAPER_STEPS:,}")
        if of["settings"]:
            said.append(
                f"§ {data}: not the recipes' settings ({', '.join(f'{k}={v}' for k, v in of['settings'].items())})"
            )
    for head in ("left_out", "not_run", "unfinished"):
        words = {
            "left_out": "left out, with other settings",
            "not_run": "not run",
            "unfinished": "not finished",
        }[head]
        said += [f"{words}: {'; '.join(figure[head])}"] if figure[head] else []
    return said


def as_markdown(figure: Mapping[str, Any]) -> str:
    table = markdown_lines(["data", "labels", "method", *COLUMNS], _rows(figure))
    said = [f"- {note}" for note in notes(figure)]
    return (
        "\n".join(["# Figure 3: accuracy against the number of labels", "", *table, "", *said])
        + "\n"
    )
