"""Bayesian logistic regression: the standard tall-data test problem, with a full-data reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Normal

from torchrex.targets.tall import TallPosterior


def logistic_regression(
    features: Tensor,
    labels: Tensor,
    *,
    prior_precision: float = 1.0,
    batch_size: int = 256,
    shared: bool = True,
) -> TallPosterior:
    """Posterior of weights w with labels in {0, 1}, P(y = 1) = sigmoid(x . w) and prior N(0, 1 /
    prior_precision).

    `sample` starts its runs at draws of the prior.
    """
    signs = 2.0 * labels.to(features.dtype) - 1.0

    def log_likelihood(weights: Tensor, x: Tensor, sign: Tensor) -> Tensor:
        margin = sign * (x * weights).sum(-1)
        return torch.nn.functional.logsigmoid(margin)

    # Numbers in double: they do not raise the precision of the points, nor lower it.
    mean, deviation = torch.tensor([0.0, 1.0 / math.sqrt(prior_precision)], dtype=torch.float64)
    prior = Normal(mean, deviation)
    return TallPosterior(
        log_likelihood,
        prior,
        (features, signs),
        features.shape[1],
        batch_size=batch_size,
        shared=shared,
    )


def simulate_logistic(n_data: int, dim: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features (with a constant first column), labels and the weights they were made with."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n_data, dim, generator=generator, dtype=torch.float64)
    features[:, 0] = 1.0
    weights = torch.randn(dim, generator=generator, dtype=torch.float64)
    labels = torch.bernoulli(torch.sigmoid(features @ weights), generator=generator)
    return features, labels, weights


def laplace(
    target: TallPosterior, *, start: Tensor | None = None, iterations: int = 50
) -> tuple[Tensor, Tensor]:
    """Mode and covariance of the Laplace approximation from the full data, by Newton's method in
    float64.
    """
    target = target.to("cpu", torch.float64)
    x = torch.zeros(target.dim, dtype=torch.float64) if start is None else start.double()
    for _ in range(iterations):
        gradient = torch.func.grad(target.full_energy)(x)
        step = torch.linalg.solve(torch.func.hessian(target.full_energy)(x), gradient)
        x = x - step
        if float(step.abs().max()) < 1e-12:
            break
    return x, torch.linalg.inv(torch.func.hessian(target.full_energy)(x))
