"""Numbers over the course of a run, few and short enough for result.json."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNIFICANT = 5  # digits
MOST_SWAPS = 10_000  # that are listed; the counts are of all


def binned(values: Tensor, bin_of: Tensor, n_bins: int) -> Tensor:
    """Means over the values of each bin."""
    sums = torch.zeros(n_bins, dtype=torch.float64).index_add_(0, bin_of, values.double())
    return sums / torch.bincount(bin_of, minlength=n_bins)


def rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.{SIGNIFICANT}g}") for value in values.tolist()]
