"""Distances between draws and a known law in one dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrex.targets import GaussianMixture


def wasserstein(draws: Tensor, quantiles: Tensor, order: int) -> Tensor:
    """Wasserstein distance of order 1 or 2 between each row of draws (chains, n) and the law with
    these quantiles.

        W_p = (integral |F_n^{-1}(u) - F^{-1}(u)|^p du)^(1/p)

    `quantiles` holds the law's quantiles at (i + 1/2) / n, i = 0 ... n - 1.
    """
    return _distance(draws.double().sort(dim=1).values, quantiles, order)


def _distance(ordered: Tensor, quantiles: Tensor, order: int) -> Tensor:
    gap = (ordered - quantiles).abs()
    return gap.mean(1) if order == 1 else gap.square().mean(1).sqrt()


class MixtureQuantiles:
    """Quantiles of a one-dimensional mixture at midpoints, by interpolation in a fine table of its
    cdf.
    """

    def __init__(self, mixture: GaussianMixture, *, size: int = 50_000) -> None:
        reach = 7.0 * float(mixture.factor.max())
        self._quantile = torch.linspace(
            float(mixture.means.min()) - reach,
            float(mixture.means.max()) + reach,
            size,
            dtype=torch.float64,
        )
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
    """W1 and W2 of all draws (chains, n) up to each step in `at`, per chain: tensors of shape
    (len(at), chains).
    """
    table = MixtureQuantiles(mixture)
    curve: dict[str, list[Tensor]] = {"w1": [], "w2": []}
    for step in at:
        n = int((steps <= step).sum())
        quantiles, ordered = table.at_midpoints(n), draws[:, :n].double().sort(dim=1).values
        for order, name in ((1, "w1"), (2, "w2")):
            curve[name].append(_distance(ordered, quantiles, order))
    return {name: torch.stack(values) for name, values in curve.items()}


def mean_and_error(per_run: Tensor) -> tuple[float, float]:
    """Mean over independent runs and its standard error."""
    values = per_run.double()
    error = float(values.std() / values.numel() ** 0.5) if values.numel() > 1 else float("nan")
    return float(values.mean()), error
