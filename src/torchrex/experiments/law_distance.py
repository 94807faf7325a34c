"""Distances between the law of many runs at a fixed time and a known law.

There is no long chain to average over, so the runs are divided into groups, and a squared distance
is estimated without the bias of a finite number of draws:

    W2^2  = mean over pairs of groups a != b of integral (q_a - q) (q_b - q) du     q: quantiles
    chi^2 = K sum_i n_i (n_i - 1) / (n (n - 1)) - 1             in K cells of equal probability

Errors are those of the jackknife over groups. In two dimensions both are means over the marginals
along some directions (sliced).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from torchrex.experiments.grid_law import Array, Grid
from torchrex.posterior import Draws
from torchrex.targets import GaussianMixture

N_GROUPS, N_CELLS = 10, 40
ANGLES = (0.0, 45.0, 90.0, 135.0)  # of the marginals in two dimensions
LEVELS = (np.arange(20_000) + 0.5) / 20_000  # at which two computed laws are compared
TINY = 1e-12

Statistic = Callable[[Array], Array]


def jackknife(statistic: Statistic, groups: Array) -> tuple[Array, Array]:
    """The statistic of all groups (the first axis), and its standard error from leaving out one."""
    n = len(groups)
    without = np.stack([statistic(np.delete(groups, g, axis=0)) for g in range(n)])
    error = np.sqrt((n - 1) / n * ((without - without.mean(0)) ** 2).sum(0))
    return np.asarray(statistic(groups)), error


def w2_squared(gaps: Array) -> Array:
    """From deviations of quantiles (groups, marginals, times, n), see above: (times,)."""
    n = len(gaps)
    pairs = gaps.sum(0) ** 2 - (gaps**2).sum(0)
    return np.asarray(pairs.mean((0, -1)) / (n * (n - 1)))


def chi_square(counts: Array) -> Array:
    """From counts in cells of equal probability (groups, marginals, times, cells): (times,)."""
    cells = counts.sum(0)
    n = cells.sum(-1)
    mean = (cells * (cells - 1)).sum(-1) / (n * (n - 1))
    return np.asarray((cells.shape[-1] * mean - 1).mean(0))


def marginals(mixture: GaussianMixture) -> list[tuple[torch.Tensor, GaussianMixture]]:
    """Directions and the law of the target along each."""
    if mixture.dim == 1:
        return [(torch.ones(1, dtype=torch.float64), mixture)]
    found = []
    for angle in map(math.radians, ANGLES):
        way = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        stds = (mixture.factor.mT @ way).norm(dim=1)
        found.append((way, GaussianMixture(mixture.weights, mixture.means @ way, stds)))
    return found


def deviations(draws: Draws, mixture: GaussianMixture) -> tuple[Array, Array]:
    """Gaps for `w2_squared` and counts for `chi_square`, of every kept time."""
    from torchrex.diagnostics import MixtureQuantiles  # scipy loads slowly

    gaps, counts = [], []
    for way, law in marginals(mixture):
        x = (draws.values.double() @ way).T  # (times, runs)
        x = x.reshape(len(x), N_GROUPS, -1).movedim(1, 0)  # (groups, times, n)
        gaps.append(x.sort(-1).values - MixtureQuantiles(law).at_midpoints(x.shape[-1]))
        cell = (law.cdf(x) * N_CELLS).long().clamp(max=N_CELLS - 1)
        ones = torch.ones_like(x)
        zeros = torch.zeros(*x.shape[:2], N_CELLS, dtype=torch.float64)
        counts.append(zeros.scatter_add_(-1, cell, ones))
    return torch.stack(gaps, 1).numpy(), torch.stack(counts, 1).numpy()


def slope(x: Array, y: Array, weight: Array) -> Array:
    """Of the weighted straight line through points; `weight` is one over a variance."""
    away = x - np.average(x, weights=weight)
    return np.asarray((weight * away * y).sum() / (weight * away**2).sum())


def log_slope(of: Statistic, groups: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    """Slope of the log of a distance in x, and its error; `of` gives squares, which may be negative
    by chance.
    """

    def statistic(some: Array) -> Array:
        return slope(x, 0.5 * np.log(np.maximum(of(some), TINY)), weight)

    return jackknife(statistic, groups)


def root(squares: Array, error: Array) -> tuple[Array, Array]:
    """A distance and its error from those of its square."""
    distance = np.sqrt(np.maximum(squares, TINY))
    return distance, error / (2 * distance)


def quantiles(law: Array, grid: Grid, levels: Array) -> Array:
    """Of a law on the cells of a line, spread evenly over each of them."""
    edges = np.append(grid.axis - grid.width / 2, grid.axis[-1] + grid.width / 2)
    return np.asarray(np.interp(levels, np.append(0.0, law.cumsum()), edges))


def w2_of(law: Array, other: Array, grid: Grid) -> float:
    gap = quantiles(law, grid, LEVELS) - quantiles(other, grid, LEVELS)
    return float(np.sqrt((gap**2).mean()))


def chi_square_of(law: Array, target: Array, grid: Grid) -> float:
    """In the cells of equal probability under the target in which draws are counted."""
    levels = np.arange(1, N_CELLS) / N_CELLS
    edges = np.append(grid.axis - grid.width / 2, grid.axis[-1] + grid.width / 2)
    at = np.interp(quantiles(target, grid, levels), edges, np.append(0.0, law.cumsum()))
    mass = np.diff(np.concatenate([[0.0], at, [1.0]]))
    return float(N_CELLS * (mass**2).sum() - 1)
