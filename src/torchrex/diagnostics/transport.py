"""Wasserstein distances between two clouds of points, (n, dim) and (m, dim); `distance` has those
to a known law on the line.

| function         | exact                | cost               | for                                    |
|------------------|----------------------|--------------------|----------------------------------------|
| `line_distance`  | yes, dim 1           | n log n            | one coordinate, any two sizes          |
| `sliced_w2`      | of its directions    | directions x n log n | many points, many dimensions         |
| `assigned_w2`    | yes                  | n^3                | clouds of equal size, up to thousands  |
| `transported`    | yes, with weights    | n^3                | unequal sizes, weights; needs POT      |

Two clouds of the same law are not at distance 0 but at a distance that shrinks slowly with their
size, n^(-1/dim) for the exact ones: compare with `same_law_distance`. The Monte Carlo error of a
distance is its spread over independent chains (`mean_and_error` of one distance per chain).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from torchrex.diagnostics.estimate import Estimate, over_chains
from torchrex.errors import InvalidArgumentError, MissingDependencyError


def line_distance(x: Tensor, y: Tensor, order: int = 2) -> Tensor:
    """Exact W1 or W2 on the line between samples (..., n) and (..., m), as a tensor (...).

        W_p^p = integral over u in (0, 1) of |F_x^{-1}(u) - F_y^{-1}(u)|^p

    Both quantile functions are steps, so the integral is a sum over the merged levels i/n and j/m.
    """
    _require_order(order)
    n, m = x.shape[-1], y.shape[-1]
    x, y = x.double().sort(-1).values, y.double().sort(-1).values
    if n == m:
        power = (x - y).abs().pow(order).mean(-1)
    else:  # in whole numbers of 1 / (n * m); where two levels coincide one has width 0
        levels = torch.cat([torch.arange(1, n + 1) * m, torch.arange(1, m + 1) * n]).sort().values
        width = torch.diff(levels, prepend=levels.new_zeros(1)).double() / (n * m)
        power = (
            (x[..., (levels - 1) // m] - y[..., (levels - 1) // n]).abs().pow(order) * width
        ).sum(-1)
    return power.pow(1.0 / order)


def sliced_w2(x: Tensor, y: Tensor, *, n_directions: int = 256, seed: int = 0) -> Estimate:
    """Sliced W2 over random directions, with the Monte Carlo error of having taken only so many of
    them.

        SW2^2 = mean over unit vectors t of W2^2(t . x, t . y),    error = std(W2^2) / sqrt(directions) / (2 * SW2)

    The directions depend on seed and dimension alone, so two distances with the same seed are
    comparable. SW2 <= W2 / sqrt(dim).
    """
    _require_clouds(x, y)
    if n_directions < 2:
        raise InvalidArgumentError(f"n_directions must be 2 or more, got {n_directions}")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(n_directions, x.shape[1], generator=generator, dtype=torch.float64)
    directions = directions / directions.norm(dim=1, keepdim=True)
    squared = line_distance(
        directions @ x.double().cpu().T, directions @ y.double().cpu().T
    ).square()
    mean, error = over_chains(squared)
    value = mean.sqrt()
    return Estimate(value, torch.where(value > 0, error / (2.0 * value), 0.0))


def assigned_w2(x: Tensor, y: Tensor) -> float:
    """Exact W2 between two clouds of equal size: the cheapest pairing of their points (scipy's
    linear_sum_assignment).
    """
    _require_clouds(x, y)
    if len(x) != len(y):
        raise InvalidArgumentError(
            f"a pairing needs clouds of equal size, got {len(x)} and {len(y)}; use transported"
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
    """Exact W1 or W2 between weighted clouds of any sizes, by the network simplex of POT; weights
    are normalised.
    """
    _require_clouds(x, y)
    _require_order(order)
    ot = _pot()
    weights = []
    for name, cloud, given in (("x_weights", x, x_weights), ("y_weights", y, y_weights)):
        weight = (
            torch.ones(len(cloud), dtype=torch.float64) if given is None else given.double().cpu()
        )
        if (
            weight.shape != (len(cloud),)
            or not bool((weight >= 0).all())
            or not float(weight.sum()) > 0
        ):
            raise InvalidArgumentError(
                f"{name} must be one weight >= 0 for each of {len(cloud)} points, got {weight.tolist()[:5]}"
            )
        weights.append((weight / weight.sum()).numpy())
    cost = _squared_distances(x, y)
    total = float(
        ot.emd2(*weights, (cost if order == 2 else cost.sqrt()).numpy(), numItermax=10_000_000)
    )
    return float(max(total, 0.0) ** (1.0 / order))


def same_law_distance(
    cloud: Tensor, distance: Callable[[Tensor, Tensor], float], *, repeats: int = 10, seed: int = 0
) -> Estimate:
    """What `distance` shows between two clouds of one law: random halves of `cloud`, independent
    draws, several times.

    A distance between clouds of that size is news only where it is well above. The error is that of
    the mean over the splits of this one cloud, and so too small by what another cloud would change.
    """
    half = len(cloud) // 2
    if half < 1 or repeats < 2:
        raise InvalidArgumentError(
            f"need 2 points and 2 repeats or more, got {len(cloud)} and {repeats}"
        )
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(len(cloud), generator=generator) for _ in range(repeats))
    distances = [distance(cloud[order[:half]], cloud[order[half : 2 * half]]) for order in orders]
    return over_chains(torch.tensor(distances, dtype=torch.float64))


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    # Differences and not the expanded square, which loses half the digits of near points.
    distance = torch.cdist(
        x.double().cpu(), y.double().cpu(), compute_mode="donot_use_mm_for_euclid_dist"
    )
    return distance.square()


def _pot() -> Any:
    try:
        return importlib.import_module("ot")
    except ImportError:
        raise MissingDependencyError(
            "weighted transport needs POT: pip install 'torchrex[diagnostics]'"
        ) from None


def _require_order(order: int) -> None:
    if order not in (1, 2):
        raise InvalidArgumentError(
            f"the order of a Wasserstein distance is 1 or 2 here, got {order}"
        )


def _require_clouds(x: Tensor, y: Tensor) -> None:
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or len(x) == 0 or len(y) == 0:
        raise InvalidArgumentError(
            f"give two clouds (n, dim) and (m, dim), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
