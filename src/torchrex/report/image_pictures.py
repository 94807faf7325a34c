"""Pictures of the runs on images: figure 2, and beside tables 1 and 2 the accuracy of the average
against epochs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrex.experiments.image_recipes import AUTHORS_F0
from torchrex.report.figure2 import VARIANCES, not_run, other_settings, title
from torchrex.report.image_curves import Panel, draw_panels, mean_curve, pyplot
from torchrex.report.images import EXCHANGING, INDEPENDENT, MSGD, RESGHMC, SGHMC, Cell, Line

# Distinct in grey as well: a line style goes with every colour.
STYLES: dict[Line, dict[str, Any]] = {
    MSGD: {"color": "0.6", "ls": ":", "lw": 1.6},
    SGHMC: {"color": "0.35", "ls": "-.", "lw": 1.3},
    RESGHMC: {"color": "#1b6ca8", "ls": "-", "lw": 1.8},
    EXCHANGING: {"color": "black", "ls": "-", "lw": 1.0},
    INDEPENDENT: {"color": "#d95f02", "ls": "--", "lw": 1.6},
}
TICKS = 50  # swaps that can be told apart on an axis
LABELS = 16  # numbers that an axis has room for
FAMILY_STYLES: dict[str, dict[str, Any]] = {
    "icml2020": {"color": "0.45", "ls": "--"},
    "clean": {"color": "#1b6ca8", "ls": "-"},
}


def draw(figure: Mapping[str, Any], path: Path) -> None:
    """A row of panels for every data set and length that was run; a panel without runs says so."""
    plt = pyplot()
    panels = (
        (plot_variance, "course"),
        (plot_correction, "course"),
        (plot_energies, "course"),
        (plot_factors, "factors"),
    )
    rows = figure["rows"]
    drawn, axes = plt.subplots(
        len(rows), 4, figsize=(18, 4.3 * len(rows)), constrained_layout=True, squeeze=False
    )
    for row, of in zip(axes, rows, strict=True):
        for axis, (plot, needs) in zip(row, panels, strict=True):
            if of[needs]:
                plot(of, axis)
                axis.set_title(f"{title(of)}: {axis.get_title()}", fontsize=10)
            else:
                axis.axis("off")
                axis.text(
                    0.5, 0.5, f"{title(of)}: no runs for this panel", ha="center", color="0.4"
                )
    missing = not_run(figure)
    missed = f"; not run: {', '.join(missing)}" if missing else ""
    drawn.suptitle("\n".join([f"ResNet-20{missed}", *other_settings(figure)]), fontsize=11)
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def _plot_course(of: Mapping[str, Any], axis: Any, name: str, label: str) -> None:
    for family, course in of["course"].items():
        values = [value if value else math.nan for value in course[name][0]]
        axis.plot(
            course["epoch"],
            values,
            label=f"{VARIANCES[family]}, seed {course['seed']}",
            lw=1.4,
            **FAMILY_STYLES[family],
        )
    axis.set(xlabel="epoch", ylabel=label, yscale="log")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * (top / bottom) ** 0.2)  # room for the legend
    axis.legend(fontsize=7.5, frameon=False, loc="upper right")


def plot_variance(of: Mapping[str, Any], axis: Any) -> None:
    _plot_course(of, axis, "noise_variance", "variance of an energy")
    axis.set_title("(a) noise variance σ²")


def plot_correction(of: Mapping[str, Any], axis: Any) -> None:
    _plot_course(of, axis, "correction", "energy")
    axis.set_title("(a) correction of the swap test")


def plot_energies(of: Mapping[str, Any], axis: Any) -> None:
    """Mean training energy of each epoch on both rungs, and every swap as a tick, a row of ticks
    for each family.

    Swaps too close to be told apart share a tick, with their number above it where there is room
    for one.
    """
    for height, (family, course) in enumerate(of["course"].items()):
        colour = FAMILY_STYLES[family]["color"]
        for rung, values in enumerate(course["energy"]):
            prior = " with the prior" if family == "clean" else ""
            name = f"{family}, {'cold' if rung == 0 else 'hot'}{prior}"
            axis.plot(
                course["epoch"],
                values,
                color=colour,
                ls="-" if rung == 0 else ":",
                lw=1.3,
                label=name,
            )
        low = 0.02 + 0.1 * height
        marks = ticks(course["swap_epochs"], len(course["epoch"]))
        for when, n_swaps in marks:
            axis.axvline(when, ymin=low, ymax=low + 0.045, color=colour, lw=1.1)
            if n_swaps > 1 and all(
                abs(when - other) >= len(course["epoch"]) / LABELS
                for other, _ in marks
                if other != when
            ):
                above = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "bottom"}
                axis.text(when, low + 0.047, f"{n_swaps}×", color=colour, fontsize=6.5, **above)
        axis.plot(
            [], [], color=colour, marker="|", ls="", label=f"{family}, swaps: {course['n_swaps']:,}"
        )
    top = axis.get_ylim()[1]
    axis.set(xlabel="epoch", ylabel="energy (summed)", yscale="log", title="(b) energies and swaps")
    lowest = min(min(values) for course in of["course"].values() for values in course["energy"])
    axis.set_ylim(lowest / 1.6 ** max(1, len(of["course"])), top * 1.3)  # room for the ticks
    axis.legend(fontsize=7.5, frameon=False)


def ticks(epochs: Sequence[float], n_epochs: int) -> list[tuple[float, int]]:
    """Where ticks are drawn, and for how many swaps each: those nearer than 1/50 of the axis to the
    first of a tick share it.
    """
    drawn: list[list[float]] = []
    for epoch in sorted(epochs):
        if drawn and epoch - drawn[-1][0] < n_epochs / TICKS:
            drawn[-1].append(epoch)
        else:
            drawn.append([epoch])
    return [(statistics.fmean(each), len(each)) for each in drawn]


def plot_factors(of: Mapping[str, Any], axis: Any) -> None:
    """Accuracy of rung 0 and of both rungs against F0, with the mean number of swaps below each
    point.
    """
    f0 = [one["f0"] for one in of["factors"]]
    filled, hollow = (
        {"fmt": "o-", "color": "#1b6ca8"},
        {"fmt": "s--", "color": "black", "mfc": "white"},
    )
    for key, rungs, style in (("accuracy", "rung 0", filled), ("both_rungs", "both rungs", hollow)):
        means = [one[key]["mean"] for one in of["factors"]]
        errors = [one[key]["two_sd"] or 0.0 for one in of["factors"]]
        beside = [
            value * (1.0 if key == "accuracy" else 1.02) for value in f0
        ]  # error bars side by side
        axis.errorbar(
            beside, means, errors, label=f"reSGHMC, {rungs}", lw=1.2, ms=5, capsize=3, **style
        )
    for line in (SGHMC, INDEPENDENT):
        if line.title in of["levels"]:
            axis.axhline(of["levels"][line.title]["mean"], label=line.title, **STYLES[line])
    axis.axvline(AUTHORS_F0, color="0.75", lw=5, alpha=0.5, zorder=0, label="best in the paper")
    bottom, top = axis.get_ylim()
    axis.set_ylim(
        bottom - 0.15 * (top - bottom), top + 0.4 * (top - bottom)
    )  # room for the swaps and the legend
    for one in of["factors"]:
        swaps = f"{statistics.fmean(one['swaps']):.3g}"
        box = {
            "facecolor": "white",
            "edgecolor": "none",
            "pad": 1.0,
        }  # it may stand on the bar of the paper's best
        axis.text(
            one["f0"],
            0.03,
            swaps,
            transform=axis.get_xaxis_transform(),
            fontsize=8,
            ha="center",
            bbox=box,
        )
    axis.set_xlim(min(f0) / 1.5, max(f0) * 1.5)
    one = "one was run; " if len(f0) == 1 else ""
    axis.set(
        xscale="log",
        xlabel=f"F0 ({one}above it: swaps)",
        ylabel="test accuracy in %",
        title="(c, d) accuracy against F0",
    )
    axis.set_xticks(f0, [f"{value:.0e}".replace("e+0", "e") for value in f0], fontsize=8)
    axis.minorticks_off()
    axis.legend(fontsize=7.5, frameon=False, ncols=2, loc="upper center")


def draw_cells(cells: Sequence[Cell], path: Path) -> None:
    """For every cell: accuracy of the average of probabilities against epochs, mean over seeds."""
    panels = []
    for cell in cells:
        name = (
            f"{cell.name}, {cell.settings.length} epoch{'' if cell.settings.length == 1 else 's'}"
        )
        lines = {
            line.title: mean_curve(
                list(by_seed.values()), "draw_epoch", f"{line.prefix}probabilities_accuracy"
            )
            for line, by_seed in cell.lines.items()
        }
        panels.append(Panel(name, str(cell.settings), lines))
    draw_panels(
        panels, path, xlabel="epoch", styles={line.title: style for line, style in STYLES.items()}
    )
