"""Figure 3 of the paper from run folders: accuracy against the number of labels, for every data set
and method.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchrex.experiments.gan import (
    GAN_DATA,
    GAN_FAMILIES,
    N_LABELLED,
    PAPER_STEPS,
    PAPER_TABLE3,
    TABLE3,
    GanConfig,
)
from torchrex.report.tables import (
    STYLES,
    FinishedRun,
    Settings,
    devices,
    finished_runs,
    fitted_table,
    in_percent,
    markdown_page,
    markdown_table,
    missing_words,
    papers,
    plus_minus,
    pyplot,
)

METHODS = {line.method: line.title for line in TABLE3.lines}
METHOD_STYLES = dict(
    zip(METHODS.values(), (STYLES[1], STYLES[2], STYLES[4], STYLES[0]), strict=True)
)
MARKERS = dict(zip(METHODS.values(), "sov^", strict=True))
SHIFTS = dict(zip(METHODS.values(), (-75, -25, 25, 75), strict=True))  # error bars side by side
HEADS = ("data", "labels", "method", "paper %", "ours %", "n", "both rungs %", "swaps")


def numbers(out: Path, chosen: Mapping[str, GanConfig]) -> dict[str, Any]:
    """By data set and family: `points` (accuracy of every method and number of labels) and the
    paper's, `paper`.

    A data set is drawn with the settings that most of its recipes were run with; runs with others
    are named in `left_out`.
    """
    runs, unfinished = finished_runs(out, chosen)
    figure: dict[str, Any] = {"data": {}, "left_out": [], "not_run": [], "unfinished": unfinished}
    for family, data in itertools.product(GAN_FAMILIES, GAN_DATA):
        name = data if family == "gan" else f"{data}, tuned"
        here = [each for each in chosen.values() if (each.family, each.data) == (family, data)]
        own = [run for run in runs if run.recipe in here]
        if not own:
            figure["not_run"] += [name] if here else []
            continue
        settings = settings_of_most(own)
        figure["left_out"] += [_left_out(run) for run in own if run.settings != settings]
        same = [run for run in own if run.settings == settings]
        points, missing = [], {}
        for method, method_title in METHODS.items():
            wanted = [config.n_labelled for config in here if config.method == method]
            of = [run for run in same if run.recipe.method == method]
            there = {run.recipe.n_labelled for run in of}
            points += [
                _point([run for run in of if run.recipe.n_labelled == n]) for n in sorted(there)
            ]
            if wanted:
                missing[method_title] = tuple(sorted(set(wanted) - there))
        figure["not_run"] += _not_run(name, missing)
        figure["data"][name] = {
            "steps": settings.length,
            "settings": dict(settings.others),
            "points": points,
            "paper": {
                METHODS[method]: {
                    str(n): {"mean": of[method][0], "two_sd": of[method][1]}
                    for (data_of, n), of in PAPER_TABLE3.items()
                    if data_of == data
                }
                for method in ("sghmc", "resghmc")
            },
        }
    return figure


def settings_of_most(runs: Sequence[FinishedRun]) -> Settings:
    """The settings that most recipes were run with; of equals, the longest runs."""
    kinds: dict[Settings, set[str]] = {}
    for run in runs:
        kinds.setdefault(run.settings, set()).add(run.recipe.recipe)
    return max(kinds, key=lambda each: (len(kinds[each]), each.length, str(each)))


def _not_run(name: str, missing: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Such as `svhn 2000 2500`, with the methods that lack them where others do not."""
    lines = []
    for labels in dict.fromkeys(each for each in missing.values() if each):
        methods = [method for method, each in missing.items() if each == labels]
        some = "" if len(methods) == len(missing) else f" ({', '.join(methods)})"
        lines.append(f"{name} {' '.join(map(str, labels))}{some}")
    return lines


def _left_out(run: FinishedRun) -> str:
    others = f", {run.settings}" if run.settings.others else ""
    return f"{run.recipe.recipe} seed {run.seed} ({run.settings.length} steps{others})"


def _point(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Accuracy of rung 0 over seeds, and of both rungs where there are two."""
    recipe = runs[0].recipe
    return {
        "method": METHODS[recipe.method],
        "n_labelled": recipe.n_labelled,
        "recipe": recipe.recipe,
        "n": len(runs),
        "paper": papers(recipe),
        "ours": in_percent(runs, "accuracy"),
        "both_rungs": in_percent(runs, "pooled_accuracy"),
        "swaps": [run.swaps for run in runs] if recipe.n_rungs > 1 else None,
        "devices": devices(runs),
    }


# Words


def _rows(figure: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            f"{data}{'§' if of['settings'] else ''}",
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
    said = [
        "ours: accuracy on all test images of the average over draws on rung 0; ± 2 standard "
        "deviations over n seeds. The authors' code leaves out images that are called fake; "
        "table 3 has both scores."
    ]
    for data, of in figure["data"].items():
        if of["steps"] != PAPER_STEPS:
            said.append(f"{data}: {of['steps']:,} steps in place of the paper's {PAPER_STEPS:,}")
        if of["settings"]:
            said.append(f"§ {data}: not the recipes' settings ({_settings(of)})")
    if figure["left_out"]:
        said.append(f"left out, with other settings: {'; '.join(figure['left_out'])}")
    return said + missing_words(figure["not_run"], figure["unfinished"])


def _settings(of: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in of["settings"].items())


def as_markdown(figure: Mapping[str, Any]) -> str:
    table = markdown_table(HEADS, _rows(figure))
    return markdown_page("Figure 3: accuracy against the number of labels", table, notes(figure))


# Picture


def draw(figure: Mapping[str, Any], path: Path) -> None:
    """A panel for every data set that was run."""
    plt = pyplot()
    sets = figure["data"]
    size = (max(6.5, 4.9 * len(sets)), 4.8)
    drawn, axes = plt.subplots(1, len(sets), figsize=size, constrained_layout=True, squeeze=False)
    handles: dict[str, Any] = {}
    for axis, (data, of) in zip(axes.flat, sets.items(), strict=True):
        handles |= plot_labels(of, axis)
        steps = "" if of["steps"] == PAPER_STEPS else f", {of['steps']:,} steps"
        others = f"\n{_settings(of)}" if of["settings"] else ""
        axis.set_title(f"{data}{steps}{others}", fontsize=10)
    order = sorted(handles, key=lambda title: title.endswith("the paper"))
    drawn.legend(
        [handles[title] for title in order],
        order,
        loc="outside lower center",
        ncols=3 if len(sets) == 1 else 6,
        frameon=False,
        fontsize=9,
    )
    drawn.savefig(path, dpi=120)
    plt.close(drawn)


def plot_labels(of: Mapping[str, Any], axis: Any) -> dict[str, Any]:
    """Accuracy against the number of labels, ± 2 standard deviations over seeds; the paper's as
    open markers, dashed.
    """
    handles: dict[str, Any] = {}
    for title, style in METHOD_STYLES.items():
        points = [
            (point["n_labelled"], point["ours"])
            for point in of["points"]
            if point["method"] == title and point["ours"]
        ]
        theirs = [(int(n), each) for n, each in of["paper"].get(title, {}).items()]
        dashed = {"color": style["color"], "ls": (0, (4, 3)), "lw": 0.9, "mfc": "white"}
        solid = {**style, "zorder": 3}
        for name, values, look, size in (
            (title, points, solid, 5.0),
            (f"{title}, the paper", theirs, dashed, 6.5),
        ):
            if values:
                x = [n + SHIFTS[title] for n, _ in values]
                y, errors = ([each[k] or 0.0 for _, each in values] for k in ("mean", "two_sd"))
                handles[name] = axis.errorbar(
                    x, y, errors, marker=MARKERS[title], ms=size, capsize=3, elinewidth=1, **look
                )
    axis.set_xticks(N_LABELLED, [str(n) for n in N_LABELLED], fontsize=8)
    axis.set_xlim(N_LABELLED[0] - 200, N_LABELLED[-1] + 200)
    axis.set(xlabel="labelled images", ylabel="test accuracy, %")
    axis.grid(axis="y", color="0.92", lw=0.8)
    axis.set_axisbelow(True)
    return handles
