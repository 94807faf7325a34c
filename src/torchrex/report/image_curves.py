"""Curves of runs on images, a panel for each cell of a table: the accuracy of the average as it
grows, mean over seeds.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrex.errors import MissingDependencyError, RunFolderError
from torchrex.report.image_numbers import C, Run

Curve = tuple[list[int], list[float]]


class Panel(NamedTuple):
    """What is drawn of a cell."""

    title: str
    settings: str  # as far as they are not the recipe's
    lines: Mapping[str, Curve]


def pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise MissingDependencyError(
            "drawing needs matplotlib: pip install 'torchrex[plots]'"
        ) from None
    return plt


def mean_curve(runs: Sequence[Run[C]], when: str, name: str) -> Curve:
    """The curve of that name in percent, mean over the runs, and when its values were taken."""
    curves = []
    for run in runs:
        times, values = run.result["curves"].get(when), run.result["curves"].get(name)
        if (
            not isinstance(values, list)
            or not values
            or not isinstance(times, list)
            or len(times) != len(values)
        ):
            raise RunFolderError(
                f"{run.path / 'result.json'} has no curve {name!r}; run it again with --overwrite"
            )
        curves.append(values)
    return times, [100 * statistics.fmean(each) for each in zip(*curves, strict=True)]


def draw_panels(
    panels: Sequence[Panel], path: Path, *, xlabel: str, styles: Mapping[str, Mapping[str, Any]]
) -> None:
    """All panels in a picture, with one legend in the order of the styles."""
    plt = pyplot()
    n_columns = min(4, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    size = (max(6.0, 4.2 * n_columns), 3.4 * n_rows + 0.6)
    figure, axes = plt.subplots(
        n_rows, n_columns, figsize=size, constrained_layout=True, squeeze=False
    )
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        late = []
        for title, (times, mean) in panel.lines.items():
            marker = "o" if len(mean) == 1 else None
            (handles[title],) = axis.plot(times, mean, label=title, marker=marker, **styles[title])
            late.append(mean[len(mean) // 4 :])
        low, high = min(map(min, late)), max(map(max, late))
        axis.set_ylim(
            low - 0.1 * (high - low) - 0.05, high + 0.1 * (high - low) + 0.05
        )  # the first draws are far below
        extra = f"\n{textwrap.fill(panel.settings, 60)}" if panel.settings else ""
        axis.set_title(f"{panel.title}{extra}", fontsize=9)
        axis.set(xlabel=xlabel, ylabel="accuracy of the average, %")
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    order = [title for title in styles if title in handles]
    figure.legend(
        [handles[title] for title in order],
        order,
        loc="outside lower center",
        ncols=3 if n_columns == 1 else 5,
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
