"""Wasserstein distances: from draws to a known law on the line, and between two clouds of points.

| function        | exact             | cost                 | for                                |
|-----------------|-------------------|----------------------|------------------------------------|
| `wasserstein`   | yes, dim 1        | n log n              | draws and a law of known quantiles |
| `line_distance` | yes, dim 1        | n log n              | one coordinate, any two sizes      |
| `sliced_w2`     | of its directions | directions x n log n | many points, many dimensions       |
| `assigned_w2`   | yes               | n^3                  | equal sizes, up to thousands       |
| `transported`   | yes, with weights | n^3                  | unequal sizes, weights; needs POT  |

Two clouds (n, dim) and (m, dim) of the same law are not at distance 0. Their distance shrinks
slowly with their size, as n^(-1/dim) for the exact ones: compare with `same_law_distance`. The
Monte Carlo error of a distance is its spread over independent chains (`mean_and_error`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from torchrex.diagnostics.history import Estimate, over_chains
from torchrex.errors import InvalidArgumentError, import_extra
from torchrex.targets import GaussianMixture


def wasserstein(draws: Tensor, quantiles: Tensor, order: int) -> Tensor:
    """Wasserstein distance of order 1 or 2 between each row of draws (chains, n) and a law.

        W_p = (integral |F_n^{-1}(u) - F^{-1}(u)|^p du)^(1/p)

    `quantiles` holds the law's quantiles at (i + 1/2) / n, i = 0 ... n - 1.
    """
    gap = (draws.double().sort(dim=1).values - quantiles).abs()
    return gap.mean(1) if order == 1 else gap.square().mean(1).sqrt()


class MixtureQuantiles:
    """Quantiles of a one-dimensional mixture, interpolated in a fine table of its cdf."""

    def __init__(self, mixture: GaussianMixture, *, size: int = 50_000) -> None:
        reach = 7.0 * float(mixture.factor.max())
        low, high = float(mixture.means.min()) - reach, float(mixture.means.max()) + reach
        self._quantile = torch.linspace(low, high, size, dtype=torch.float64)
        self._level = mixture.cdf(self._quantile)

    def at_midpoints(self, n: int) -> Tensor:
        u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        right = torch.searchsorted(self._level, u).clamp(1, len(self._level) - 1)
        low, high = self._level[right - 1], self._level[right]
        weight = ((u - low) / (high - low).clamp(min=1e-300)).clamp(0.0, 1.0)
        return torch.lerp(self._quantile[right - 1], self._quantile[right], weight)


def distance_curve(
    draws: Tensor, steps: Tensor, mixture: GaussianMixture, at: Sequence[int]
) -> dict[str, Tensor]:
    """`w1` and `w2` of all draws (chains, n) up to each step in `at`: (len(at), chains)."""
    table = MixtureQuantiles(mixture)
    curve: dict[str, list[Tensor]] = {"w1": [], "w2": []}
    for step in at:
        n = int((steps <= step).sum())
        for order, distances in enumerate(curve.values(), start=1):
            distances.append(wasserstein(draws[:, :n], table.at_midpoints(n), order))
    return {name: torch.stack(distances) for name, distances in curve.items()}


def mean_and_error(per_run: Tensor) -> tuple[float, float]:
    """Mean over independent runs and its standard error."""
    mean, error = over_chains(per_run.flatten())
    return float(mean), float(error)


def line_distance(x: Tensor, y: Tensor, order: int = 2) -> Tensor:
    """Exact W1 or W2 on the line between samples (..., n) and (..., m), as a tensor (...).

        W_p^p = integral over u in (0, 1) of |F_x^{-1}(u) - F_y^{-1}(u)|^p

    Both quantile functions are steps, so the integral is a sum over the merged levels i/n and j/m.
    """
    _require_order(order)
    n, m = x.shape[-1], y.shape[-1]
    x, y = x.double().sort(-1).values, y.double().sort(-1).values
    if n == m:
        return (x - y).abs().pow(order).mean(-1).pow(1.0 / order)
    # Levels in whole numbers of 1 / (n * m); where two coincide one has width 0.
    levels = torch.cat([torch.arange(1, n + 1) * m, torch.arange(1, m + 1) * n]).sort().values
    width = torch.diff(levels, prepend=levels.new_zeros(1)).double() / (n * m)
    gap = (x[..., (levels - 1) // m] - y[..., (levels - 1) // n]).abs()
    return (gap.pow(order) * width).sum(-1).pow(1.0 / order)


def sliced_w2(x: Tensor, y: Tensor, *, n_directions: int = 256, seed: int = 0) -> Estimate:
    """Sliced W2 over random directions, with the Monte Carlo error of their finite number.

        SW2^2 = mean over unit vectors t of W2^2(t . x, t . y)
        error = std(W2^2) / sqrt(directions) / (2 * SW2)

    The directions depend on seed and dimension alone, so distances with the same seed are
    comparable. SW2 <= W2 / sqrt(dim).
    """
    _require_clouds(x, y)
    if n_directions < 2:
        raise InvalidArgumentError(f"n_directions must be 2 or more, got {n_directions}")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(n_directions, x.shape[1], generator=generator, dtype=torch.float64)
    directions = directions / directions.norm(dim=1, keepdim=True)
    distances = line_distance(directions @ x.double().cpu().T, directions @ y.double().cpu().T)
    mean, error = over_chains(distances.square())
    value = mean.sqrt()
    return Estimate(value, torch.where(value > 0, error / (2.0 * value), 0.0))


def assigned_w2(x: Tensor, y: Tensor) -> float:
    """Exact W2 between two clouds of equal size: the cheapest pairing of their points."""
    _require_clouds(x, y)
    if len(x) != len(y):
        raise InvalidArgumentError(
            f"give clouds of equal size, got {len(x)} and {len(y)}; or use transported"
        )
    cost = _squared_distances(x, y).numpy()
    return float(math.sqrt(cost[linear_sum_assignment(cost)].mean()))


def transported(
    x: Tensor,
    y: Tensor,
    *,
    x_weights: Tensor | None = None,
    y_weights: Tensor | None = None,
    order: int = 2,
) -> float:
    """Exact W1 or W2 between weighted clouds of any sizes, by POT; weights are normalised."""
    _require_clouds(x, y)
    _require_order(order)
    pot = import_extra("ot", "diagnostics")
    weights = []
    for name, cloud, given in (("x_weights", x, x_weights), ("y_weights", y, y_weights)):
        weight = torch.ones(len(cloud)).double() if given is None else given.double().cpu()
        fits = weight.shape == (len(cloud),) and bool((weight >= 0).all())
        if not fits or not float(weight.sum()) > 0:
            raise InvalidArgumentError(
                f"{name} must be one weight >= 0 for each of {len(cloud)} points, "
                f"got {weight.tolist()[:5]}"
            )
        weights.append((weight / weight.sum()).numpy())
    cost = _squared_distances(x, y) if order == 2 else _squared_distances(x, y).sqrt()
    total = float(pot.emd2(*weights, cost.numpy(), numItermax=10_000_000))
    return float(max(total, 0.0) ** (1.0 / order))


def same_law_distance(
    cloud: Tensor, distance: Callable[[Tensor, Tensor], float], *, repeats: int = 10, seed: int = 0
) -> Estimate:
    """What `distance` shows between two clouds of one law: between random halves of `cloud`.

    Only a distance well above it means a difference. The error is that of the mean over the splits
    of this one cloud, and so too small by what another cloud would change.
    """
    half = len(cloud) // 2
    if half < 1 or repeats < 2:
        raise InvalidArgumentError(f"need 2 points and 2 repeats, got {len(cloud)} and {repeats}")
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(len(cloud), generator=generator) for _ in range(repeats))
    distances = [distance(cloud[order[:half]], cloud[order[half : 2 * half]]) for order in orders]
    return over_chains(torch.tensor(distances, dtype=torch.float64))


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    # Differences, because the expanded square loses half the digits of near points.
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(x.double().cpu(), y.double().cpu(), compute_mode=exact).square()


def _require_order(order: int) -> None:
    if order not in (1, 2):
        raise InvalidArgumentError(f"the order of a Wasserstein distance is 1 or 2, got {order}")


def _require_clouds(x: Tensor, y: Tensor) -> None:
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or len(x) == 0 or len(y) == 0:
        raise InvalidArgumentError(
            f"give two clouds (n, dim) and (m, dim), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
