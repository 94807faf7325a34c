"""A mixture of clusters in the plane, of which only the centres are unknown.

    p(y | x) = 1/k sum_j N(y; x_j, 1)

Two centres in one cluster, and one between two others, are a mode that a chain does not leave; from
random starts the global mode is reached with a probability that falls exponentially with k. The
answer is the loss of the predictive law on held-out points, above that of the truth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from torchrex.experiments.gallery import METHODS, Problem
from torchrex.targets import TallPosterior, laplace

APART = 5.0  # least distance of two centres
SIDE = 24.0  # of the square with the centres of 8 clusters; larger ones have the same density
HELD_OUT = 3_000
LAPLACE_DRAWS = 400
NEAR = 1.0  # a centre is found if one of x is within this distance


def clusters(k: int = 8, n_data: int = 3_000, batch_size: int = 100, lr: float = 5e-5) -> Problem:
    """Held-out loss above that of the truth."""
    centres, data, held_out = simulate(k, n_data)
    log_likelihood = log_mixture(k)
    best = log_likelihood(centres.flatten(), held_out).mean()

    def excess(x: Tensor) -> Tensor:
        """Of the predictive law, the mean over the draws of each run: (runs, draws, dim)."""
        predictive = torch.stack([_log_mean(log_likelihood, each, held_out) for each in x])
        return best - predictive.mean(1)

    def found(x: Tensor) -> Tensor:
        """Share of draws with a centre at every cluster."""
        away = torch.cdist(centres, x.view(*x.shape[:-1], k, 2))  # (runs, draws, clusters, centres)
        return (away.amin(-1) < NEAR).all(-1).double().mean(1)

    target = TallPosterior(
        log_likelihood, Normal(0.0, side(k) / 3.0), (data,), 2 * k, batch_size=batch_size
    )

    def plot(axis: Any, numbers: dict[str, Tensor], styles: Mapping[str, Any]) -> None:
        axis.plot(*data[:2_000].T, ".", color="0.8", markersize=2, zorder=0, rasterized=True)
        for method in ("best", "tuned"):
            if method in numbers:
                at = numbers[method].view(k, 2)
                axis.plot(*at.T, **styles[method], label=METHODS[method], markersize=8)
        axis.set(xlabel="centres at the end of the first run", aspect="equal")
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return Problem(
        target,
        lr,
        estimate=excess,
        exact=lambda: predictive_by_laplace(target, centres, excess),
        words=f"held-out loss above that of the truth, {k} clusters",
        lower_is_better=True,
        hot=300.0,
        found=found,
        shown=lambda x: x[0, -1],
        plot=plot,
    )


def side(k: int) -> float:
    return SIDE * math.sqrt(k / 8.0)


def simulate(k: int, n_data: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centres (k, 2), data and held-out points."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.zeros(0, 2)
    while len(centres) < k:
        centre = side(k) * (torch.rand(1, 2, generator=generator) - 0.5)
        if not len(centres) or float(torch.cdist(centre, centres).min()) > APART:
            centres = torch.cat([centres, centre])

    def points(n: int) -> Tensor:
        which = torch.randint(k, (n,), generator=generator)
        return centres[which] + torch.randn(n, 2, generator=generator)

    return centres, points(n_data), points(HELD_OUT)


def log_mixture(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    def log_likelihood(x: Tensor, y: Tensor) -> Tensor:
        """Cluster by cluster, so that the compiler makes loops over the examples."""
        away = [(y - x[..., 2 * j : 2 * j + 2]).square() for j in range(k)]
        logs = [-0.5 * (each[..., 0] + each[..., 1]) for each in away]
        largest = functools.reduce(torch.maximum, logs).detach()
        total = functools.reduce(torch.add, [(each - largest).exp() for each in logs])
        return largest + total.log() - math.log(2.0 * math.pi * k)

    return log_likelihood


def _log_mean(
    log_likelihood: Callable[[Tensor, Tensor], Tensor], draws: Tensor, y: Tensor
) -> Tensor:
    """Log of the predictive density at each of the points y."""
    parts = [
        log_likelihood(part[:, None], y).logsumexp(0)
        for part in draws.chunk(math.ceil(len(draws) / 100))
    ]
    return torch.stack(parts).logsumexp(0) - math.log(len(draws))


def predictive_by_laplace(
    target: TallPosterior, centres: Tensor, excess: Callable[[Tensor], Tensor]
) -> tuple[float, float]:
    """The answer and its error from normal draws at the global mode. All its copies, with the
    clusters in another order, have the same.
    """
    mode, covariance = laplace(target, start=centres.flatten())
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(4, LAPLACE_DRAWS, len(mode), generator=generator, dtype=torch.float64)
    each = excess((mode + z @ torch.linalg.cholesky(covariance).T).to(centres.dtype))
    return float(each.mean()), float(each.std() / 2.0)
