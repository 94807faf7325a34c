"""Figure 2 of the paper from run folders: the course of ResNet-20, accuracy against F0."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchrex.experiments.images import (
    AUTHORS_F0,
    DATA,
    FAMILIES,
    INDEPENDENT,
    PAIRED,
    PAPER_EPOCHS,
    SGHMC_ALONE,
    ImageConfig,
    image_config,
)
from torchrex.experiments.networks import Line
from torchrex.report.plots import BLUE, log_axis, look, panels
from torchrex.report.tables import (
    FinishedRun,
    devices,
    finished_runs,
    fitted_table,
    in_percent,
    longest_first,
    markdown_page,
    markdown_table,
    missing_words,
    plus_minus,
)

METRIC = "logits_best_accuracy"  # what the authors report
COURSE = ("epoch", "noise_variance", "correction", "energy", "swap_epochs")
VARIANCES = {"icml2020": "unpaired", "clean": "paired"}
TICKS = 50  # swaps that can be distinguished on an axis
LABELS = 16  # numbers that fit an axis
SHADES = {"icml2020": "#12355b", "clean": BLUE}  # both exchange
HEADS = ("data", "F0", "rung 0 %", "both rungs %", "n", "swaps", "epochs")


def numbers(out: Path, chosen: Mapping[str, ImageConfig]) -> dict[str, Any]:
    """One row for every length of runs on a data set; the curves are of the lowest seed."""
    alone = [
        image_config("icml2020", data, "resnet20", method)
        for data in DATA
        for method in ("sghmc", "independent")
    ]
    runs, unfinished = finished_runs(out, {**chosen, **{each.recipe: each for each in alone}})
    rows: list[dict[str, Any]] = []
    for data in DATA:
        own = [run for run in runs if run.recipe.data == data]
        kinds = {run.settings for run in own if run.recipe.recipe in chosen}
        for settings in sorted(kinds, key=longest_first):
            same = [run for run in own if run.settings == settings]
            swapping = [run for run in same if run.recipe.recipe in chosen]
            theirs = [run for run in same if run.recipe.family == "icml2020"]
            factors = {
                f0: [run for run in swapping if run in theirs and f0_of(run) == f0]
                for f0 in sorted({f0_of(run) for run in swapping if run in theirs})
            }
            levels = {line.title: _level(line, theirs) for line in (SGHMC_ALONE, INDEPENDENT)}
            courses = {family: _course(family, swapping) for family in FAMILIES}
            rows.append(
                {
                    "data": data,
                    "epochs": settings.length,
                    "settings": dict(settings.others),
                    "mark": "§" * (1 + sum(bool(row["settings"]) for row in rows))
                    if settings.others
                    else "",
                    "factors": [_factor(f0, each) for f0, each in factors.items()],
                    "levels": {title: level for title, level in levels.items() if level},
                    "course": {family: course for family, course in courses.items() if course},
                }
            )
    return {"rows": rows, "unfinished": [one for one in unfinished if one.split()[0] in chosen]}


def f0_of(run: FinishedRun) -> float:
    """F0 as the authors count it: their threshold has the sum of two unpaired variances."""
    factor = float(run.config.get("correction_factor", run.recipe.correction_factor))
    return 2 * factor / (PAIRED if run.recipe.family == "clean" else 1.0)


def _factor(f0: float, runs: Sequence[FinishedRun]) -> dict[str, Any]:
    return {
        "f0": f0,
        "recipe": runs[0].recipe.recipe,
        "n": len(runs),
        "accuracy": in_percent(runs, METRIC),
        "both_rungs": in_percent(runs, f"pooled_{METRIC}"),
        "swaps": [run.swaps for run in runs],
        "devices": devices(runs),
    }


def _level(line: Line, runs: Sequence[FinishedRun]) -> dict[str, Any] | None:
    """Accuracy without swaps; SGHMC is rung 0 of the pair where it was not run by itself."""
    by_seed = {run.seed: run for run in runs if run.recipe.method == "independent"}
    by_seed |= {run.seed: run for run in runs if run.recipe.method == line.method}
    return in_percent(by_seed.values(), line.prefix + METRIC)


def _course(family: str, runs: Sequence[FinishedRun]) -> dict[str, Any] | None:
    """The curves of the lowest seed at the authors' F0."""
    own = [run for run in runs if run.recipe.family == family]
    own = [run for run in own if math.isclose(f0_of(run), AUTHORS_F0) and run.curve("energy")]
    if not own:
        return None
    run = min(own, key=lambda run: run.seed)
    curves = {name: run.curve(name) for name in COURSE}
    variances = [value for value in curves["noise_variance"][0] if value]  # 0: no estimate yet
    about = {"recipe": run.recipe.recipe, "seed": run.seed, "n_swaps": run.swaps}
    return {**about, **curves, "median_noise_variance": statistics.median(variances or [math.nan])}


# Words


def title(row: Mapping[str, Any]) -> str:
    return f"{row['data']}{row['mark']}, {row['epochs']} epoch{'' if row['epochs'] == 1 else 's'}"


def _rows(figure: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for of in figure["rows"]:
        data, epochs = of["data"] + of["mark"], of["epochs"]
        length = f"{epochs}" if epochs == PAPER_EPOCHS else f"{epochs}/{PAPER_EPOCHS}"
        for one in of["factors"]:
            accuracies = [plus_minus(one["accuracy"]), plus_minus(one["both_rungs"])]
            swaps = ", ".join(map(str, one["swaps"]))
            rows.append([data, power(one["f0"]), *accuracies, str(one["n"]), swaps, length])
        for name, level in of["levels"].items():
            shown = [plus_minus(level), "-"]
            if name == INDEPENDENT.title:
                shown.reverse()
            n = str(len(level["values"]))
            rows.append([data, name.partition(",")[0], *shown, n, "-", length])
    return rows


def power(f0: float) -> str:
    return f"{f0:.0e}".replace("e+0", "e")


def as_table(figure: Mapping[str, Any], console: Console) -> Table:
    return fitted_table(HEADS[2:], _rows(figure), console)


def notes(figure: Mapping[str, Any]) -> list[str]:
    said = [
        "ResNet-20; rules of icml2020: sum of logits, best epoch on the test images; ± 2 standard "
        "deviations over n seeds."
    ]
    for of in figure["rows"]:
        medians = {name: course["median_noise_variance"] for name, course in of["course"].items()}
        shown = ", ".join(f"{VARIANCES[family]} {value:.3g}" for family, value in medians.items())
        ratio = ""
        if len(medians) == 2 and medians["clean"]:
            ratio = f": {medians['icml2020'] / medians['clean']:.1f} times smaller"
        if medians:
            said.append(f"{title(of)}: median noise variance over epochs {shown}{ratio}")
    return said + other_settings(figure) + missing_words(not_run(figure), figure["unfinished"])


def other_settings(figure: Mapping[str, Any]) -> list[str]:
    return [
        f"{title(of)}: not the recipes' settings "
        f"({', '.join(f'{name}={value}' for name, value in of['settings'].items())})"
        for of in figure["rows"]
        if of["settings"]
    ]


def not_run(figure: Mapping[str, Any]) -> list[str]:
    return [data for data in DATA if data not in {row["data"] for row in figure["rows"]}]


def as_markdown(figure: Mapping[str, Any]) -> str:
    return markdown_page("Figure 2", markdown_table(HEADS, _rows(figure)), notes(figure))


# Pictures


def draw(figure: Mapping[str, Any], path: Path) -> None:
    """A row of panels for every data set and length that was run; a panel without runs says so."""
    shown = [(of, plot) for of in figure["rows"] for plot in PLOTS]
    with panels(path, len(shown) // 2, 2, (7.5, 1.45 * len(shown) + 0.4)) as (drawn, axes):
        for axis, (of, plot) in zip(axes.flat, shown, strict=True):
            if of["factors" if plot is plot_factors else "course"]:
                plot(of, axis)
                axis.set_title(f"{title(of)}: {axis.get_title('left')}")
            else:
                axis.text(
                    0.5, 0.5, f"{title(of)}: no runs for this panel", ha="center", color="0.4"
                )
        missed = f"; not run: {', '.join(not_run(figure))}" if not_run(figure) else ""
        drawn.suptitle("\n".join([f"ResNet-20{missed}", *other_settings(figure)]), fontsize=11)


def _plot_course(name: str, label: str, title: str, of: Mapping[str, Any], axis: Any) -> None:
    for family, course in of["course"].items():
        values = [value if value else math.nan for value in course[name][0]]
        words = f"{family}: {VARIANCES[family]}, seed {course['seed']}"
        axis.plot(course["epoch"], values, label=words, lw=1.0, color=SHADES[family])
    axis.set(xlabel="epoch", ylabel=label, title=title)
    log_axis(axis, lambda x, _: power(x))
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * (top / bottom) ** 0.35)  # space for the legend
    axis.legend(fontsize=8, loc="upper right")


def plot_energies(of: Mapping[str, Any], axis: Any) -> None:
    """Mean training energy of each epoch on both rungs, and a row of ticks for each family: a tick
    for every swap, or for several with their number above it where it fits.
    """
    for height, (family, course) in enumerate(of["course"].items()):
        colour, n_epochs = SHADES[family], len(course["epoch"])
        prior = " with the prior" if family == "clean" else ""
        for name, ls, values in zip(("cold", "hot"), ("-", ":"), course["energy"], strict=False):
            style = {"color": colour, "ls": ls, "lw": 1.3, "label": f"{family}, {name}{prior}"}
            axis.plot(course["epoch"], values, **style)
        low = 0.02 + 0.1 * height
        marks = ticks(course["swap_epochs"], n_epochs)
        for when, n_swaps in marks:
            axis.axvline(when, ymin=low, ymax=low + 0.045, color=colour, lw=1.1)
            gaps = (abs(when - other) for other, _ in marks if other != when)
            if n_swaps > 1 and all(gap >= n_epochs / LABELS for gap in gaps):
                above = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "bottom"}
                axis.text(when, low + 0.047, f"{n_swaps}×", color=colour, fontsize=7, **above)
        swaps = f"{family}, swaps: {course['n_swaps']:,}"
        axis.plot([], [], color=colour, marker="|", ls="", label=swaps)
    every = [x for course in of["course"].values() for values in course["energy"] for x in values]
    axis.set(xlabel="epoch", ylabel="energy (summed)", title="(b) energies and swaps")
    log_axis(axis, lambda x, _: power(x))
    low = min(every) / 2.2 ** len(of["course"])
    axis.set_ylim(low, max(every) * (max(every) / low) ** 0.5)  # ticks below, legend above
    how = {"handlelength": 1.3, "columnspacing": 0.8, "loc": "upper right"}
    axis.legend(fontsize=7.5, ncols=len(of["course"]), **how)


def ticks(epochs: Sequence[float], n_epochs: int) -> list[tuple[float, int]]:
    """Places of ticks, and their numbers of swaps: swaps within 1/50 of the axis share a tick."""
    drawn: list[list[float]] = []
    for epoch in sorted(epochs):
        if drawn and epoch - drawn[-1][0] < n_epochs / TICKS:
            drawn[-1].append(epoch)
        else:
            drawn.append([epoch])
    return [(statistics.fmean(each), len(each)) for each in drawn]


def plot_factors(of: Mapping[str, Any], axis: Any) -> None:
    """Accuracy of rung 0 and of both rungs against F0, with the mean number of swaps below each."""
    f0 = [one["f0"] for one in of["factors"]]
    for key, method, shift in (
        ("accuracy", "reSGHMC", 1.0),
        ("both_rungs", "reSGHMC, both rungs", 1.03),
    ):
        known = [one for one in of["factors"] if one[key]]
        x = [one["f0"] * shift for one in known]  # error bars side by side
        means, errors = ([one[key][name] or 0.0 for one in known] for name in ("mean", "two_sd"))
        style = look(method).points | look(method).line
        axis.errorbar(x, means, errors, label=method, lw=1.2, ms=5, capsize=3, **style)
    for line in (SGHMC_ALONE, INDEPENDENT):
        if line.title in of["levels"]:
            axis.axhline(
                of["levels"][line.title]["mean"], label=line.title, **look(line.title).line
            )
    axis.axvline(AUTHORS_F0, color="0.75", lw=5, alpha=0.5, zorder=0, label="best in the paper")
    bottom, top = axis.get_ylim()
    height = top - bottom
    axis.set_ylim(bottom - 0.2 * height, top + 1.2 * height)  # for the swaps and the legend
    for one in of["factors"]:
        words = f"{statistics.fmean(one['swaps']):.3g}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        at = {"transform": axis.get_xaxis_transform(), "ha": "center", "bbox": box}
        axis.text(one["f0"], 0.04, words, fontsize=8, **at)
    axis.set_xlim(min(f0) / 1.5, max(f0) * 1.5)
    one_run = "one was run; " if len(f0) == 1 else ""
    axis.set(xscale="log", xlabel=f"F0 ({one_run}above it: swaps)", ylabel="test accuracy in %")
    axis.set_title("(c, d) accuracy")
    axis.set_xticks(f0, [power(value) for value in f0], fontsize=8, rotation=40)
    axis.minorticks_off()
    axis.legend(fontsize=8, loc="upper left", frameon=True, edgecolor="none")


COURSES = (
    ("noise_variance", "variance of an energy", "(a) noise variance σ²"),
    ("correction", "energy", "(a) correction"),
)
PLOTS: tuple[Callable[[Mapping[str, Any], Any], None], ...] = (  # a panel for each
    *(partial(_plot_course, *course) for course in COURSES),
    *(plot_energies, plot_factors),
)
