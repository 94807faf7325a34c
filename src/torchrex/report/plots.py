"""The numbers that plots, figures and tables show: smooth lines, calibration, errors and tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from scipy import special
from torch import Tensor

from torchrex.errors import InvalidArgumentError


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
