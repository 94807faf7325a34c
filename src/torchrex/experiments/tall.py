"""Bayesian logistic regression on tall data, compared with the Laplace approximation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrex.exchange import Ladder, PairedVariance
from torchrex.experiments.density import DensityConfig
from torchrex.posterior import Draws
from torchrex.runs.config import Column, columns
from torchrex.targets import TallPosterior, laplace, logistic_regression, simulate_logistic


@dataclass(frozen=True)
class LogisticConfig(DensityConfig):
    """Simulated data, so that it runs anywhere; the learning rate is that of a mean loss.

    The gap between the temperatures is small because of the noise: with minibatches of n out of N
    the paired noise of the energy difference is about sqrt(2 dim N / n), and an unbiased test
    (F = 1) accepts only at inverse gaps of the order of its inverse.
    """

    n_data: int = 100_000
    dim: int = 4
    batch_size: int = 256
    prior_precision: float = 1.0
    temperatures: tuple[float, ...] = (1.0, 1.02)
    lr_of_mean: float = 0.004  # on the mean loss; on the summed energy it is this over n_data
    correction_factor: float = 1.0
    smoothing: float = 0.05
    n_steps: int = 40_000
    n_runs: int = 32
    thin: int = 20
    data_seed: int = 0
    shards: int = field(default=1, metadata={"added_later": True})  # groups of runs (>= processes)
    checkpoint_every: int = field(default=5_000, metadata={"added_later": True})  # steps

    @property
    def columns(self) -> tuple[Column, ...]:
        return columns(
            "largest_mean_error_in_sd", "smallest_sd_ratio", "largest_sd_ratio", "acceptance_rate"
        )

    def ladder(self) -> Ladder:
        return Ladder(self.temperatures, self.lr_of_mean / self.n_data)

    def target(self) -> TallPosterior:
        features, labels, _ = simulate_logistic(self.n_data, self.dim, seed=self.data_seed)
        return logistic_regression(
            features, labels, prior_precision=self.prior_precision, batch_size=self.batch_size
        )

    def energy_gradient(self) -> Callable[[Tensor], Tensor]:
        target = self.target().to("cpu", torch.float64)
        gradient = torch.func.grad(lambda x: target.full_energy(x).sum())
        return lambda x: torch.cat([gradient(each[None]) for each in x])

    @property
    def gradient_cost(self) -> int:
        return self.n_data

    def problem(self, seed: int) -> dict[str, Any]:
        """Runs start from draws of the Laplace approximation, so that no burn-in is needed."""
        target = self.target()
        mode, covariance = laplace(target)
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(self.n_runs, self.dim, generator=generator, dtype=torch.float64)
        return {
            "target": target,
            "noise": PairedVariance(self.smoothing),
            "initial": mode + z @ torch.linalg.cholesky(covariance).T,
        }

    def measure(self, draws: Draws) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Errors of the posterior means in posterior sds, and ratios of sds to the reference."""
        from torchrex.diagnostics import mean_and_error  # scipy loads slowly

        mode, covariance = laplace(self.target())
        sd = covariance.diagonal().sqrt()
        ratio = draws.std() / sd
        metrics: dict[str, Any] = {
            "n_steps": draws.n_steps,
            "n_runs": draws.n_chains,
            "largest_mean_error_in_sd": float(((draws.mean() - mode) / sd).abs().max()),
            "largest_mean_error_se": float((draws.standard_error() / sd).max()),
            "smallest_sd_ratio": float(ratio.min()),
            "largest_sd_ratio": float(ratio.max()),
        }
        if len(draws.accepted):
            rate, rate_error = mean_and_error(draws.accepted[0] / draws.proposed[0])
            metrics |= {"acceptance_rate": rate, "acceptance_rate_se": rate_error}
            metrics["paired_noise_std"] = math.sqrt(2.0 * float(draws.noise_variance[:, 0].mean()))
        return metrics, {"mode": mode, "covariance": covariance}


def tall_recipes() -> dict[str, LogisticConfig]:
    return {"tall/logistic": LogisticConfig("tall/logistic")}
