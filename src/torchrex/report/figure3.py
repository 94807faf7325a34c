"""Figure 3 of the paper from run folders: accuracy against the number of labels."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchrex.experiments.gan import (
    N_LABELLED,
    PAPER_STEPS,
    PAPER_TABLE3,
    RESGHMC,
    SGHMC_ALONE,
    TABLE3,
    GanConfig,
    figure3_recipes,
)
from torchrex.report.plots import legend_below, look, panels
from torchrex.report.tables import (
    build,
    fitted_table,
    markdown_page,
    markdown_table,
    missing_words,
    plus_minus,
)

METHODS = [line.title for line in TABLE3.lines]
SHIFTS = dict(zip(METHODS, (-75, -25, 25, 75, 125), strict=True))  # error bars side by side
HEADS = ("data", "labels", "method", "paper %", "ours %", "n", "both rungs %", "swaps")
KEPT = ("method", "n_labelled", "n", "paper", "ours", "swaps", "devices")


def numbers(out: Path, chosen: Mapping[str, GanConfig]) -> dict[str, Any]:
    """By panel: `points` (accuracy by method and number of labels) and the paper's, `paper`."""
    built = build(replace(TABLE3, recipes=figure3_recipes), out, chosen)
    by_name: dict[str, Any] = {}
    for row in built.rows:
        family = row["family"].removeprefix("gan-")
        name = row["data"] if family == "gan" else f"{row['data']}, {family}"
        name += "" if row["steps"] == PAPER_STEPS else f", {row['steps']:,} steps"
        name += "".join(f", {setting}={value}" for setting, value in row["settings"].items())
        same = {"steps": row["steps"], "settings": row["settings"]}
        panel = by_name.setdefault(name, {**same, "points": [], "paper": _paper(row["data"])})
        kept = {key: row[key] for key in KEPT}
        more = {"recipe": row["recipes"][0], "both_rungs": row["pooled_accuracy"]}
        panel["points"].append({**kept, **more})
    for panel in by_name.values():
        panel["points"].sort(key=lambda point: METHODS.index(point["method"]))
    return {"data": by_name, "not_run": built.not_run, "unfinished": built.unfinished}


def _paper(data: str) -> dict[str, dict[str, Any]]:
    here = {n: of for (of_data, n), of in PAPER_TABLE3.items() if of_data == data}
    return {
        line.title: {
            str(n): dict(zip(("mean", "two_sd"), of[line.method], strict=True))
            for n, of in here.items()
        }
        for line in (SGHMC_ALONE, RESGHMC)
    }


# Words


def _rows(figure: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            data,
            str(point["n_labelled"]),
            point["method"],
            plus_minus(point["paper"]),
            plus_minus(point["ours"]),
            str(point["n"]),
            plus_minus(point["both_rungs"]),
            "-" if point["swaps"] is None else ", ".join(map(str, point["swaps"])),
        ]
        for data, of in figure["data"].items()
        for point in of["points"]
    ]


def as_table(figure: Mapping[str, Any], console: Console) -> Table:
    rows = [[data, f"{n} {method}", *cells] for data, n, method, *cells in _rows(figure)]
    return fitted_table(HEADS[3:], rows, console)


def notes(figure: Mapping[str, Any]) -> list[str]:
    said = (
        "ours: accuracy on all test images of the average over draws on rung 0; ± 2 standard "
        "deviations over n seeds. The authors' code leaves out images that are called fake; "
        "table 3 has both scores."
    )
    return [said, *missing_words((), figure["unfinished"])]


def as_markdown(figure: Mapping[str, Any]) -> str:
    table = markdown_table(HEADS, _rows(figure))
    said = notes(figure) + missing_words(figure["not_run"], ())
    return markdown_page("Figure 3: accuracy against the number of labels", table, said)


# Picture


def draw(figure: Mapping[str, Any], path: Path) -> None:
    """A panel for every data set that was run."""
    sets = figure["data"]
    n_columns = min(2, len(sets))
    n_rows = math.ceil(len(sets) / n_columns)
    with panels(path, n_rows, n_columns, (7.5, 3 * n_rows + 0.6)) as (drawn, axes):
        handles: dict[str, Any] = {}
        for axis, (data, of) in zip(axes.flat, sets.items(), strict=False):
            handles |= plot_labels(of, axis)
            axis.set_title("\n".join(textwrap.wrap(data, 42)))
        order = sorted(handles, key=lambda title: title.endswith("the paper"))
        legend_below(drawn, {title: handles[title] for title in order}, 3)


def plot_labels(of: Mapping[str, Any], axis: Any) -> dict[str, Any]:
    """Accuracy ± 2 standard deviations over seeds; the paper's as open markers, dashed."""
    handles: dict[str, Any] = {}
    for title in METHODS:
        points = [
            (point["n_labelled"], point["ours"])
            for point in of["points"]
            if point["method"] == title and point["ours"]
        ]
        theirs = [(int(n), each) for n, each in of["paper"].get(title, {}).items()]
        style = look(title).points
        dashed = {**style, "ls": (0, (4, 3)), "lw": 0.9, "mfc": "white"}
        solid = {**style, "ls": "-", "zorder": 3}
        for name, values, shape, size in (
            (title, points, solid, 5.0),
            (f"{title}, the paper", theirs, dashed, 6.5),
        ):
            if values:
                x = [n + SHIFTS[title] for n, _ in values]
                # One seed has no spread, and no bar.
                y = [each["mean"] for _, each in values]
                errors = [each["two_sd"] or math.nan for _, each in values]
                bars = {"ms": size, "capsize": 3, "elinewidth": 1}
                handles[name] = axis.errorbar(x, y, errors, **bars, **shape)
    axis.set_xticks(N_LABELLED, [str(n) for n in N_LABELLED], fontsize=8)
    axis.set_xlim(N_LABELLED[0] - 200, N_LABELLED[-1] + 200)
    axis.set(xlabel="labelled images", ylabel="test accuracy, %")
    return handles
