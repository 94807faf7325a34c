"""Figure 2 of the paper from run folders, ResNet-20: noise variance, correction and energies over epochs, accuracy against F0.

The picture beside tables 1 and 2 is here too: accuracy of the average against epochs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from torchrex.errors import MissingDependencyError, RunFolderError
from torchrex.experiments.image_recipes import AUTHORS_F0, DATA, cell, figure2_recipes
from torchrex.experiments.images import ImageConfig
from torchrex.report.images import (
    EXCHANGING,
    FAMILIES,
    HEADLINE,
    INDEPENDENT,
    MSGD,
    RESGHMC,
    SGHMC,
    Cell,
    Line,
    Run,
    Settings,
    epochs_words,
    find_runs,
    plus_minus,
    summary,
)

NET = "resnet20"
COURSE = ("noise_variance", "correction", "energy", "swap_epochs")
METRIC = HEADLINE["icml2020"]

# Distinct in grey as well: a line style goes with every colour.
STYLES: dict[Line, dict[str, Any]] = {
    MSGD: {"color": "0.6", "ls": ":", "lw": 1.6},
    SGHMC: {"color": "0.35", "ls": "-.", "lw": 1.3},
    RESGHMC: {"color": "#1b6ca8", "ls": "-", "lw": 1.8},
    EXCHANGING: {"color": "black", "ls": "-", "lw": 1.0},
    INDEPENDENT: {"color": "#d95f02", "ls": "--", "lw": 1.6},
}
VARIANCES = {"icml2020": "unpaired, 10 energies an epoch (icml2020)", "clean": "paired, every step (clean)"}
FAMILY_STYLES: dict[str, dict[str, Any]] = {"icml2020": {"color": "0.45", "ls": "--"}, "clean": {"color": "#1b6ca8", "ls": "-"}}


def figure_recipes() -> dict[str, ImageConfig]:
    """What is run for the figure: every F0, and reSGHMC of the clean family beside them for (a, b)."""
    clean = (cell("clean", data, NET, "resghmc") for data in DATA)
    return {**figure2_recipes(), **{config.recipe: config for config in clean}}


def numbers(out: Path, chosen: Mapping[str, ImageConfig]) -> dict[str, Any]:
    """By data set: `factors` (accuracy against F0), `levels` without swaps, `course` over epochs of the lowest seed."""
    levels = {line: {data: cell("icml2020", data, NET, line.method) for data in DATA} for line in (SGHMC, INDEPENDENT)}  # type: ignore[arg-type]
    beside = {config.recipe: config for each in levels.values() for config in each.values()}
    runs, unfinished = find_runs(out, {**chosen, **beside})
    figure: dict[str, Any] = {"data": {}, "left_out": [], "unfinished": [one for one in unfinished if one.split()[0] in chosen]}
    for data in DATA:
        own = [run for run in runs if run.recipe.data == data and run.recipe.recipe in chosen]
        if not own:
            continue
        settings = _settings_of_most(own)
        left = [run for run in own if run.settings != settings]
        figure["left_out"] += [f"{run.recipe.recipe} seed {run.seed} ({run.settings.epochs} epochs)" for run in left]
        same = [run for run in runs if run.recipe.data == data and run.settings == settings]
        exchanging = [run for run in same if run.recipe.recipe in chosen]
        factors = sorted({f0_of(run) for run in exchanging if run.family == "icml2020"})
        alone = {line: _level(line, [run for run in same if run.family == "icml2020"]) for line in (SGHMC, INDEPENDENT)}
        course = {family: _course([run for run in exchanging if run.family == family]) for family in FAMILIES}
        figure["data"][data] = {
            "epochs": settings.epochs,
            "settings": dict(settings.others),
            "factors": [_factor(f0, [run for run in exchanging if f0_of(run) == f0]) for f0 in factors],
            "levels": {line.title: level for line, level in alone.items() if level},
            "course": {family: curves for family, curves in course.items() if curves},
        }
    return figure


def f0_of(run: Run) -> float:
    """F0 as the authors count it: their threshold has the sum of two variances."""
    return 2 * float(run.config.get("correction_factor", run.recipe.correction_factor))


def _settings_of_most(runs: Sequence[Run]) -> Settings:
    """The settings that most recipes were run with; of equals, most epochs."""
    kinds = {run.settings: {each.recipe.recipe for each in runs if each.settings == run.settings} for run in runs}
    return max(kinds, key=lambda each: (len(kinds[each]), each.epochs, str(each)))


def _factor(f0: float, runs: Sequence[Run]) -> dict[str, Any]:
    runs = [run for run in runs if run.family == "icml2020"]
    return {
        "f0": f0,
        "recipe": runs[0].recipe.recipe,
        "n": len(runs),
        "accuracy": summary({run.seed: run.number(METRIC) for run in runs}),
        "both_rungs": summary({run.seed: run.number(f"pooled_{METRIC}") for run in runs}),
        "swaps": [run.swaps for run in runs],
        "devices": sorted({run.result["device"] for run in runs}),
    }


def _level(line: Line, runs: Sequence[Run]) -> dict[str, Any] | None:
    """Accuracy without swaps; SGHMC is rung 0 of the pair without swaps where it was not run by itself."""
    by_seed = {run.seed: run for run in runs if run.recipe.method == "independent"}
    by_seed |= {run.seed: run for run in runs if run.recipe.method == line.method}
    return summary({seed: run.number(line.prefix + METRIC) for seed, run in by_seed.items()}) if by_seed else None


def _course(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The curves of the lowest seed at the authors' F0."""
    runs = sorted((run for run in runs if f0_of(run) == AUTHORS_F0), key=lambda run: run.seed)
    if not runs:
        return None
    curves = runs[0].result["curves"]
    for name in ("epoch", *COURSE):
        if not isinstance(curves.get(name), list) or (name != "swap_epochs" and not curves[name]):
            raise RunFolderError(f"{runs[0].path / 'result.json'} has no curve {name!r}; run it again with --overwrite")
    course = {name: curves[name] for name in ("epoch", *COURSE)}
    return {
        "recipe": runs[0].recipe.recipe,
        "seed": runs[0].seed,
        "n_swaps": runs[0].swaps,
        **course,
        "median_noise_variance": statistics.median(_positive(curves["noise_variance"][0]) or [math.nan]),
    }


def _positive(values: Sequence[float | None]) -> list[float]:
    """Before the first estimate the variance is 0."""
    return [value for value in values if value]


# Words


def _rows(figure: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for data, of in figure["data"].items():
        for one in of["factors"]:
            many = "" if not of["settings"] else "§"
            swaps = ", ".join(map(str, one["swaps"]))
            accuracies = [plus_minus(one["accuracy"]), plus_minus(one["both_rungs"])]
            rows.append(
                [f"{data}{many}", f"{one['f0']:.0e}".replace("e+0", "e"), *accuracies, str(one["n"]), swaps, epochs_words(of)]
            )
        for title, level in of["levels"].items():
            shown = ["", plus_minus(level)] if title == INDEPENDENT.title else [plus_minus(level), ""]
            rows.append([data, title.partition(",")[0], *shown, str(len(level["values"])), "-", epochs_words(of)])
    return rows


HEADS = ("data", "F0", "rung 0 %", "both rungs %", "n", "swaps", "epochs")


def as_table(figure: Mapping[str, Any]) -> Table:
    table = Table(*HEADS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in _rows(figure):
        table.add_row(*row)
    return table


def notes(figure: Mapping[str, Any]) -> list[str]:
    said = ["ResNet-20; rules of icml2020: sum of logits, best epoch on the test images; ± 2 standard deviations over n seeds."]
    for data, of in figure["data"].items():
        medians = {family: course["median_noise_variance"] for family, course in of["course"].items()}
        shown = ", ".join(f"{VARIANCES[family].partition(',')[0].split()[0]} {value:.3g}" for family, value in medians.items())
        ratio = f": {medians['icml2020'] / medians['clean']:.1f} times smaller" if len(medians) == 2 and medians["clean"] else ""
        said += [f"{data}: median noise variance over epochs {shown}{ratio}"] if medians else []
        said += [f"§ {data}: not the recipes' settings ({', '.join(f'{k}={v}' for k, v in of['settings'].items())})"] * bool(
            of["settings"]
        )
    for head, words in (("left out, with other settings", figure["left_out"]), ("not finished", figure["unfinished"])):
        said += [f"{head}: {', '.join(words)}"] if words else []
    missing = [data for data in DATA if data not in figure["data"]]
    return said + ([f"not run: {', '.join(missing)}"] if missing else [])


def as_markdown(figure: Mapping[str, Any]) -> str:
    lines = ["# Figure 2", "", "| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(figure)] + ["", *(f"- {note}" for note in notes(figure))]
    return "\n".join(lines) + "\n"


# Pictures


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise MissingDependencyError("drawing needs matplotlib: pip install 'torchrex[plots]'") from None
    return plt


def draw(figure: Mapping[str, Any], path: Path) -> None:
    """A row of panels for every data set that was run; a panel without runs says so."""
    plt = _pyplot()
    panels = ((plot_variance, "course"), (plot_correction, "course"), (plot_energies, "course"), (plot_factors, "factors"))
    sets = figure["data"]
    drawn, axes = plt.subplots(len(sets), 4, figsize=(18, 4.3 * len(sets)), constrained_layout=True, squeeze=False)
    for row, (data, of) in zip(axes, sets.items(), strict=True):
        for axis, (plot, needs) in zip(row, panels, strict=True):
            if of[needs]:
                plot(of, axis)
                axis.set_title(f"{data}: {axis.get_title()}", fontsize=10)
            else:
                axis.axis("off")
                axis.text(0.5, 0.5, f"{data}: no runs for this panel", ha="center", color="0.4")
    missing = [data for data in DATA if data not in sets]
    lengths = ", ".join(f"{data} {of['epochs']} epochs" for data, of in sets.items())
    drawn.suptitle(f"ResNet-20, {lengths}" + (f"; not run: {', '.join(missing)}" if missing else ""), fontsize=11)
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def _plot_course(of: Mapping[str, Any], axis: Any, name: str, label: str) -> None:
    for family, course in of["course"].items():
        values = [value if value else math.nan for value in course[name][0]]
        axis.plot(course["epoch"], values, label=f"{VARIANCES[family]}, seed {course['seed']}", lw=1.4, **FAMILY_STYLES[family])
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
    """Mean training energy of each epoch on both rungs, and every swap as a tick, a row of ticks for each family."""
    for height, (family, course) in enumerate(of["course"].items()):
        colour = FAMILY_STYLES[family]["color"]
        for rung, values in enumerate(course["energy"]):
            name = f"{family}, {'cold' if rung == 0 else 'hot'}"
            axis.plot(course["epoch"], values, color=colour, ls="-" if rung == 0 else ":", lw=1.3, label=name)
        low = 0.02 + 0.06 * height
        for when in course["swap_epochs"]:
            axis.axvline(when, ymin=low, ymax=low + 0.045, color=colour, lw=1.1)
        axis.plot([], [], color=colour, marker="|", ls="", label=f"{family}, swaps: {course['n_swaps']:,}")
    top = axis.get_ylim()[1]
    axis.set(xlabel="epoch", ylabel="energy (summed)", yscale="log", title="(b) energies and swaps")
    lowest = min(min(values) for course in of["course"].values() for values in course["energy"])
    axis.set_ylim(lowest / 1.6, top * 1.3)  # room for the ticks
    axis.legend(fontsize=7.5, frameon=False)


def plot_factors(of: Mapping[str, Any], axis: Any) -> None:
    """Accuracy of rung 0 and of both rungs against F0, with the mean number of swaps below each point."""
    f0 = [one["f0"] for one in of["factors"]]
    filled, hollow = {"fmt": "o-", "color": "#1b6ca8"}, {"fmt": "s--", "color": "black", "mfc": "white"}
    for key, title, style in (("accuracy", "rung 0", filled), ("both_rungs", "both rungs", hollow)):
        means = [one[key]["mean"] for one in of["factors"]]
        errors = [one[key]["two_sd"] or 0.0 for one in of["factors"]]
        beside = [value * (1.0 if key == "accuracy" else 1.02) for value in f0]  # error bars side by side
        axis.errorbar(beside, means, errors, label=f"reSGHMC, {title}", lw=1.2, ms=5, capsize=3, **style)
    for line in (SGHMC, INDEPENDENT):
        if line.title in of["levels"]:
            axis.axhline(of["levels"][line.title]["mean"], label=line.title, **STYLES[line])
    axis.axvline(AUTHORS_F0, color="0.75", lw=5, alpha=0.5, zorder=0, label="best in the paper")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom - 0.15 * (top - bottom), top + 0.4 * (top - bottom))  # room for the swaps and the legend
    for one in of["factors"]:
        swaps = f"{statistics.fmean(one['swaps']):.3g}"
        axis.text(one["f0"], 0.03, swaps, transform=axis.get_xaxis_transform(), fontsize=8, ha="center")
    axis.set(xscale="log", xlabel="F0 (above it: swaps)", ylabel="test accuracy in %", title="(c, d) accuracy against F0")
    axis.set_xticks(f0, [f"{value:.0e}".replace("e+0", "e") for value in f0], fontsize=8)
    axis.minorticks_off()
    axis.legend(fontsize=7.5, frameon=False, ncols=2, loc="upper center")


def draw_cells(cells: Sequence[Cell], path: Path) -> None:
    """For every cell: accuracy of the average of probabilities against epochs, mean over seeds."""
    plt = _pyplot()
    n_columns = min(4, len(cells))
    n_rows = math.ceil(len(cells) / n_columns)
    size = (max(6.0, 4.2 * n_columns), 3.4 * n_rows + 0.6)
    figure, axes = plt.subplots(n_rows, n_columns, figsize=size, constrained_layout=True, squeeze=False)
    handles: dict[str, Any] = {}
    for axis, one in zip(axes.flat, cells, strict=False):
        late = []
        for line, by_seed in one.lines.items():
            epochs, mean = _mean_curve(line, list(by_seed.values()))
            (handles[line.title],) = axis.plot(epochs, mean, label=line.title, **STYLES[line])
            late.append(mean[len(mean) // 4 :])
        low, high = min(map(min, late)), max(map(max, late))
        axis.set_ylim(low - 0.1 * (high - low) - 0.05, high + 0.1 * (high - low) + 0.05)  # the first draws are far below
        extra = f" ({one.settings})" if one.settings.others else ""
        axis.set_title(f"{one.name}, {one.settings.epochs} epochs{extra}", fontsize=9)
        axis.set(xlabel="epoch", ylabel="accuracy of the average, %")
    for axis in axes.flat[len(cells) :]:
        axis.axis("off")
    order = [line.title for line in STYLES if line.title in handles]
    figure.legend(
        [handles[title] for title in order], order, loc="outside lower center", ncols=3 if n_columns == 1 else 5, frameon=False
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _mean_curve(line: Line, runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    name = f"{line.prefix}probabilities_accuracy"
    curves = []
    for run in runs:
        epochs, values = run.result["curves"].get("draw_epoch"), run.result["curves"].get(name)
        if not isinstance(values, list) or not values or not isinstance(epochs, list) or len(epochs) != len(values):
            raise RunFolderError(f"{run.path / 'result.json'} has no curve {name!r}; run it again with --overwrite")
        curves.append(values)
    return epochs, [100 * statistics.fmean(each) for each in zip(*curves, strict=True)]
