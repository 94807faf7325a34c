"""Gaussian mixtures with noisy energies (section 5.1 of the paper, figure 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from torchrex.density import few_threads
from torchrex.exchange import Ladder, RepeatedDraws, RunningMean
from torchrex.experiments.density import DensityConfig
from torchrex.posterior import Draws
from torchrex.runs.config import Column, columns
from torchrex.targets import Gaussian, GaussianMixture, NoiseModel, Noisy, StudentT


@dataclass(frozen=True)
class EnergyNoise:
    """The law of the noise on every energy estimate: N(0, scale^2), or scale * t(degrees)."""

    law: Literal["gaussian", "student"] = "gaussian"
    scale: float = 1.0
    degrees: float = 5.0

    def model(self) -> NoiseModel:
        if self.law == "gaussian":
            return Gaussian(self.scale)
        return StudentT(self.degrees, self.scale)


@dataclass(frozen=True)
class MixtureConfig(DensityConfig):
    """One method on one mixture."""

    weights: tuple[float, ...] = (0.4, 0.6)
    means: tuple[float, ...] = (-3.0, 2.0)
    stds: tuple[float, ...] = (0.7, 0.5)
    noise: EnergyNoise = EnergyNoise("gaussian", 2.0)
    temperatures: tuple[float, ...] = (1.0, 10.0)
    lr: float = 0.03
    correction_factor: float = 1.0
    measure_every: int = 100  # SA step every so many steps ...
    measure_draws: int = 10  # ... from the variance of so many energies
    initial_variance: float = 100.0
    n_steps: int = 100_000
    n_runs: int = 64
    thin: int = 10
    start: float = 0.0
    shards: int = field(default=1, metadata={"added_later": True})  # groups of runs (>= processes)
    checkpoint_every: int = field(default=25_000, metadata={"added_later": True})  # steps
    paper: dict[str, float] = field(default_factory=dict, metadata={"settable": False})

    @property
    def columns(self) -> tuple[Column, ...]:
        return columns("left_weight", "left_weight_true", "w2", "w1", "acceptance_rate")

    @property
    def method_name(self) -> str:
        return self.recipe.split("-", 1)[-1]

    @property
    def paper_numbers(self) -> dict[str, tuple[float, float | None]]:
        return {metric: (value, None) for metric, value in self.paper.items()}

    def check(self) -> None:
        self.mixture()

    def mixture(self) -> GaussianMixture:
        return GaussianMixture(self.weights, self.means, self.stds)

    def exact_density(self) -> Callable[[Tensor], Tensor]:
        mixture = self.mixture()
        return lambda x: mixture.log_density(x[:, None]).exp()

    def energy_gradient(self) -> Callable[[Tensor], Tensor]:
        mixture = self.mixture()
        return lambda x: mixture.energy_and_gradient(x, {})[1]

    def energy_noise(self) -> Callable[[int], Tensor]:
        target = Noisy(self.mixture(), self.noise.model())
        generator = torch.Generator().manual_seed(0)
        return lambda n: target.draw_noise(generator, n, (1, 1), torch.float64)["energy"]

    def ladder(self) -> Ladder:
        return Ladder(self.temperatures, self.lr)

    def problem(self, seed: int) -> dict[str, Any]:
        energies = RepeatedDraws(self.measure_draws, self.measure_every)
        return {
            "target": Noisy(self.mixture(), self.noise.model()),
            "noise": RunningMean(energies, initial=self.initial_variance),
            "initial": self.start,
        }

    def measure(self, draws: Draws) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Means over runs with their standard errors, and what the figure is drawn from."""
        with few_threads(0):
            return self._measure(draws, self.mixture())

    def _measure(
        self, draws: Draws, mixture: GaussianMixture
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        from torchrex.diagnostics import distance_curve, mean_and_error  # scipy loads slowly

        metrics: dict[str, Any] = {"n_steps": draws.n_steps, "n_runs": draws.n_chains}

        def add(name: str, per_run: Tensor) -> None:
            metrics[name], metrics[f"{name}_se"] = mean_and_error(per_run)

        values = draws.values[:, :, 0]
        boundary = sum(self.means) / len(self.means)
        add("left_weight", (values < boundary).double().mean(1))
        metrics["left_weight_true"] = float(mixture.cdf(torch.tensor(boundary)))
        at = log_spaced(10 * self.thin, draws.n_steps)  # fewer than ten draws say nothing
        curve = distance_curve(values, draws.steps, mixture, at)
        add("w1", curve["w1"][-1])
        add("w2", curve["w2"][-1])
        for pair in range(len(draws.accepted)):
            suffix = "" if len(draws.accepted) == 1 else f"_{pair}"
            add(f"acceptance_rate{suffix}", draws.accepted[pair] / draws.proposed[pair])
            add(f"noise_variance{suffix}", draws.noise_variance[-1, pair])
        low, high = min(self.means) - 4 * max(self.stds), max(self.means) + 4 * max(self.stds)
        edges = torch.linspace(low, high, 201)
        counts = torch.stack([torch.histogram(row.float(), edges).hist for row in values])
        density = counts / (values.shape[1] * (edges[1] - edges[0]))
        steps = torch.tensor(at)
        return metrics, {"curve_steps": steps, **curve, "edges": edges, "density": density}


def log_spaced(first: int, last: int, n: int = 25) -> list[int]:
    """About `n` integers, evenly spaced in the logarithm; `last` alone if it comes first."""
    if last <= first:
        return [last]
    return sorted({round(first * (last / first) ** (k / (n - 1))) for k in range(n)})


CASES = {
    "case1": MixtureConfig("", means=(-3.0, 2.0), noise=EnergyNoise("gaussian", 2.0)),
    "case2": MixtureConfig("", means=(-4.0, 3.0), noise=EnergyNoise("student", 1.0, 5.0)),
    "case3": MixtureConfig("", means=(-6.0, 4.0), noise=EnergyNoise("student", 7.0, 10.0)),
}
# The paper's acceptance rates by F. It states that F = 1 makes no swaps in case 3, and gives none
# for the first two cases.
CASE3_ACCEPTANCE = {1.0: 0.0, 2.0: 0.004, 4.0: 0.071, math.inf: 0.46}


def figure1_recipes() -> dict[str, MixtureConfig]:
    """Every curve of figure 1: SGLD, naive and corrected reSGLD; all F on the third case."""
    recipes = {}
    for case, config in CASES.items():
        factors = {"resgld": 1.0}
        if case == "case3":
            factors = {f"resgld-F{factor:g}": factor for factor in (1.0, 2.0, 4.0)}
        methods = {"sgld": replace(config, temperatures=(1.0,))}
        for method, factor in {"naive": math.inf, **factors}.items():
            paper = {"acceptance_rate": CASE3_ACCEPTANCE[factor]} if case == "case3" else {}
            methods[method] = replace(config, correction_factor=factor, paper=paper)
        for method, chosen in methods.items():
            name = f"figure1/{case}-{method}"
            recipes[name] = replace(chosen, recipe=name)
    return recipes
