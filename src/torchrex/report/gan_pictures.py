"""Pictures of the Bayesian GANs: figure 3, and beside table 3 the accuracy of the average as it
grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrex.experiments.gan_recipes import N_LABELLED
from torchrex.report.gan import METHODS, PAPER_STEPS, GanCell
from torchrex.report.image_curves import Panel, draw_panels, mean_curve, pyplot

# Distinct in grey as well: a line style and a marker go with every colour. Those of table 1 where
# the methods are the same.
STYLES: dict[str, dict[str, Any]] = {
    METHODS["sghmc"]: {"color": "0.35", "ls": "-.", "lw": 1.3},
    METHODS["resghmc"]: {"color": "#1b6ca8", "ls": "-", "lw": 1.8},
    METHODS["noswaps"]: {"color": "#d95f02", "ls": "--", "lw": 1.6},
    METHODS["supervised"]: {"color": "0.6", "ls": ":", "lw": 1.6},
}
MARKERS = dict(zip(STYLES, "sov^", strict=True))
BESIDE = dict(
    zip(STYLES, (-75, -25, 25, 75), strict=True)
)  # labels to the right, so that error bars stand side by side


def draw_cells(cells: Sequence[GanCell], path: Path) -> None:
    """For every cell: accuracy of the average over draws against steps, rung 0, mean over seeds."""
    panels = []
    for cell in cells:
        lines = {
            METHODS[method]: mean_curve(
                list(by_seed.values()), "draw_step", "probabilities_accuracy"
            )
            for method, by_seed in cell.methods.items()
        }
        panels.append(Panel(cell.name, str(cell.settings), lines))
    draw_panels(panels, path, xlabel="step", styles=STYLES)


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
        others = ", ".join(f"{name}={value}" for name, value in of["settings"].items())
        axis.set_title(f"{data}{steps}" + (f"\n{others}" if others else ""), fontsize=10)
    order = [title for title in (*STYLES, *map(_of_paper, STYLES)) if title in handles]
    columns = 3 if len(sets) == 1 else 6
    drawn.legend(
        [handles[title] for title in order],
        order,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )
    drawn.savefig(path, dpi=120)
    plt.close(drawn)


def _of_paper(title: str) -> str:
    return f"{title}, the paper"


def plot_labels(of: Mapping[str, Any], axis: Any) -> dict[str, Any]:
    """Accuracy against the number of labels, ± 2 standard deviations over seeds; the paper's as
    open markers, dashed.
    """
    handles = {}
    for title, by_n in of["paper"].items():
        x, colour = [int(n) + BESIDE[title] for n in by_n], STYLES[title]["color"]
        y, errors = ([each[key] for each in by_n.values()] for key in ("mean", "two_sd"))
        style = {
            "ls": (0, (4, 3)),
            "lw": 0.9,
            "color": colour,
            "marker": MARKERS[title],
            "mfc": "white",
            "ms": 6.5,
        }
        handles[_of_paper(title)] = axis.errorbar(x, y, errors, capsize=2, elinewidth=0.9, **style)
    for title, style in STYLES.items():
        points = [point for point in of["points"] if point["method"] == title]
        if points:
            x, y = (
                [each["n_labelled"] + BESIDE[title] for each in points],
                [each["ours"]["mean"] for each in points],
            )
            errors = [each["ours"]["two_sd"] or 0.0 for each in points]
            handles[title] = axis.errorbar(
                x,
                y,
                errors,
                marker=MARKERS[title],
                ms=5,
                capsize=3,
                elinewidth=1.1,
                zorder=3,
                **style,
            )
    axis.set_xticks(N_LABELLED, [str(n) for n in N_LABELLED], fontsize=8)
    axis.set_xlim(N_LABELLED[0] - 200, N_LABELLED[-1] + 200)
    axis.set(xlabel="labelled images", ylabel="test accuracy, %")
    axis.grid(axis="y", color="0.92", lw=0.8)
    axis.set_axisbelow(True)
    return handles
