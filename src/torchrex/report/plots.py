"""What pictures and tables share: the look of a method, files, smooth lines, errors and tests."""

from __future__ import annotations

import contextlib
import io
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy import special
from torch import Tensor

from torchrex.durable import new_file
from torchrex.errors import InvalidArgumentError, import_extra


class Look(NamedTuple):
    """Of a method in every picture. Lines and markers differ too, for prints in grey."""

    color: str
    dash: Any
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.color, "ls": self.dash}

    @property
    def points(self) -> dict[str, Any]:
        return {"color": self.color, "marker": self.marker, "ls": ""}


# Each can be read on a light and on a dark ground.
BLUE, RED, GREEN, PURPLE, OCHRE, PINK, TEAL, GREY = COLOURS = (
    *("#2f7fd0", "#d5552b", "#2b9a63", "#9468d0", "#a07a1e", "#cf4f97", "#1b93a8", "#7d868c"),
)
# By the names of a method in recipes, in tables and in the gallery.
LOOKS = {
    name: Look(*look)
    for names, *look in (
        ("resgld, reSGLD, reSGLD F=1, resghmc, reSGHMC, corrected, tuned", BLUE, "-", "o"),
        ("reSGLD F=2, F2, F4", TEAL, "--", "v"),
        ("reSGLD F=4", "#0f5561", "-.", "^"),
        ("reSGHMC both rungs", PURPLE, (0, (6, 1)), "P"),
        ("naive, naive reSGLD", OCHRE, "--", "D"),
        ("sgld, SGLD, sghmc, SGHMC, one", RED, "-.", "s"),
        ("independent, pooled, best, noswaps, no swaps, no swaps both rungs", GREEN, "--", "X"),
        ("full, consistency only", PINK, "-", "h"),
        ("msgd, M-SGD, supervised, supervised only, ensemble, restarts", GREY, ":", "^"),
    )
    for name in names.split(", ")
}
DPI = 140
CROWDED = 500.0  # ends of a logarithmic axis, one over the other
PLACES, DIGITS = re.compile(rb"(?m)^ *(<use|[CLMQ]) .*"), re.compile(rb"(\.\d\d)\d+")  # in an SVG
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.color": "0.92",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",  # text
    "svg.hashsalt": "torchrex",  # the same file for the same data
}


def look(method: str) -> Look:
    return LOOKS[method.replace(",", "")]


@contextlib.contextmanager
def panels(
    path: Path, n_rows: int, n_columns: int, size: tuple[float, float], **more: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes (n_rows, n_columns), written to `path` as PNG and SVG at the end."""
    matplotlib = import_extra("matplotlib", "plots")
    with matplotlib.rc_context(STYLE):
        figure = import_extra("matplotlib.figure", "plots").Figure(size, layout="constrained")
        axes = figure.subplots(n_rows, n_columns, **{"squeeze": False, **more})
        yield figure, axes
        for axis in axes.flat:
            axis.axis("on" if axis.has_data() else "off")
        figure.savefig(drawn := io.BytesIO(), dpi=DPI)
        image = import_extra("PIL.Image", "plots").open(drawn).convert("RGB")
        with new_file(path) as file:  # with 256 colours it is a third as large
            image.quantize(256, dither=0).save(file, "png", optimize=True)
        undated = {"Date": None, "Creator": None}
        figure.savefig(drawn := io.BytesIO(), format="svg", dpi=DPI, metadata=undated)
        svg = PLACES.sub(lambda line: DIGITS.sub(rb"\1", line[0]), drawn.getvalue())
        with new_file(path.with_suffix(".svg")) as file:
            file.write(svg)


def log_axis(axis: Any, form: Any = "{x:g}") -> None:
    """A logarithmic y axis with plain numbers at 1, or at 1, 2 and 5 where they have space."""
    axis.set_yscale("log", subs=(2, 5))
    axis.yaxis.set_major_formatter(form)
    low, high = axis.get_ylim()
    axis.yaxis.set_minor_formatter(form if high < CROWDED * low else "")


def legend_below(figure: Any, handles: Mapping[str, Any], n_columns: int, **more: Any) -> None:
    how = {"loc": "outside lower center", "ncols": n_columns, **more}
    figure.legend(list(handles.values()), list(handles), **how)


def rung_name(rung: int, n_rungs: int) -> str:
    end = " (coldest)" if rung == 0 else " (hottest)" if rung == n_rungs - 1 else ""
    return f"rung {rung}{end if n_rungs > 1 else ''}"


FEWEST_SEEDS = 3  # for a test: two seeds can agree by chance whatever their spread


def running_mean(values: Tensor, window: int) -> Tensor:
    """Mean over the last `window` values along the first axis, over fewer at the beginning."""
    sums = values.double().cumsum(0)
    shifted = sums.clone()
    shifted[window:] -= sums[:-window]
    counts = torch.arange(1, len(values) + 1, dtype=torch.float64).clamp(max=window)
    return shifted / counts.view(-1, *[1] * (values.ndim - 1))


def smoothing_window(n_rows: int) -> int:
    """How many recorded rows a smooth line averages: a hundredth of them."""
    return max(1, math.ceil(n_rows / 100))


class Calibration(NamedTuple):
    """Bins of a reliability diagram that hold anything."""

    confidence: Tensor  # mean probability of the predicted class
    accuracy: Tensor  # how often it was right
    n: Tensor  # predictions in the bin


def calibration(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """Predictions (n, classes) in bins of equal width by the probability of the predicted class."""
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        given = f"{tuple(probabilities.shape)} and {tuple(labels.shape)}"
        raise InvalidArgumentError(f"need probabilities (n, classes) and labels (n,), got {given}")
    confidence, predicted = probabilities.double().max(1)
    right = (predicted == labels).double()
    # (a, b], as the calibration error counts
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1
    count = torch.bincount(which, minlength=bins)
    there = count > 0
    n = count[there].double()
    mean = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, confidence)[there] / n
    accuracy = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, right)[there] / n
    return Calibration(mean, accuracy, count[there])


def error_of_mean(values: Sequence[float], errors: Sequence[float | None]) -> float | None:
    """Standard error of a mean over runs; `errors` are those that the runs know of themselves.

    A run of many chains knows its own far better than two or three seeds show by their spread, so
    where every run has one they are combined: sqrt(sum e^2) / n. Else it is the spread over runs;
    of a single run nothing is known.
    """
    known = [error for error in errors if error is not None]
    if values and len(known) == len(values):
        return math.sqrt(sum(error * error for error in known)) / len(values)
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def p_of_pairs(mean: float, error: float, n: int) -> float | None:
    """Two-sided p of a mean difference of n pairs: t with n - 1 degrees of freedom.

    Equal differences leave no spread to test against: the sides are the same, or rounding hides the
    spread (None).
    """
    if error > 1e-9 * abs(mean):  # less is rounding
        return float(2 * special.stdtr(n - 1, -abs(mean) / error))
    return 1.0 if mean == 0 else None
