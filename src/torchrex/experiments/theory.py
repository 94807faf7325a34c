"""Section 4 of the paper, measured: acceleration, discretisation, noise and the adaptive sigma2.

Every recipe has many independent runs of the library on a target whose law is known, and next to
them what the statement's own objects give on a grid (`grid_law.py`). The targets are minus the log
of Gaussian mixtures: they have two wells, or three, and fulfil the paper's assumptions, smoothness
and dissipativity. (A polynomial double well does not: its gradient is not Lipschitz.)
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.distributions import Normal

from torchrex.errors import ConfigError
from torchrex.exchange import KnownVariance, Ladder, RepeatedDraws, RunningMean, Smoothing
from torchrex.experiments import grid_law
from torchrex.experiments.grid_law import Array, Grid
from torchrex.experiments.law_distance import (
    N_GROUPS,
    chi_square,
    chi_square_of,
    deviations,
    jackknife,
    log_slope,
    quantiles,
    root,
    slope,
    w2_of,
    w2_squared,
)
from torchrex.posterior import Draws
from torchrex.rng import derive_seed
from torchrex.runs.config import Column, ExperimentConfig, Outcome, RunOptions
from torchrex.runs.folder import Run, RunResult
from torchrex.sampling import sample
from torchrex.targets import Gaussian, GaussianMixture, NoiseModel, Noisy, StudentT

WELLS = GaussianMixture([0.4, 0.6], [-1.5, 1.5], [0.7, 0.5])
PLANE = GaussianMixture(
    [0.5, 0.3, 0.2], [[-1.6, -0.6], [1.2, -0.8], [0.8, 1.0]], [[0.6, 0.6], [0.5, 0.5], [0.7, 0.7]]
)
START = (-1.5, 0.7)  # all runs begin in the left well, or the lower left one: mean and std
REACH, PLANE_REACH = 8.0, 7.0  # of the grids

Draw = Callable[..., Draws]


@dataclass(frozen=True)
class TheoryConfig(ExperimentConfig):
    """One statement: many independent runs, next to the exact law."""

    keeps_checkpoints: ClassVar[bool] = False
    shown: ClassVar[tuple[str, str]]  # the metric for reports, and its title
    temperatures: tuple[float, ...] = (1.0, 5.0)
    n_steps: int = 800
    n_runs: int = 2000

    def check(self) -> None:
        fine = len(self.temperatures) == 2 and self.temperatures[0] == 1.0 < self.temperatures[1]
        self.require("temperatures", fine, "1 and one that is hotter")
        self.require("n_steps", self.n_steps >= 20, "at least 20")
        fine = self.n_runs >= 2 * N_GROUPS and self.n_runs % N_GROUPS == 0
        self.require("n_runs", fine, f"a multiple of {N_GROUPS}, at least {2 * N_GROUPS}")

    @property
    def columns(self) -> tuple[Column, ...]:
        return (Column(*self.shown, decimals=3),)

    @property
    def pair(self) -> tuple[float, float]:
        return self.temperatures[0], self.temperatures[1]

    def ladder(self) -> Ladder:
        return Ladder(self.temperatures, 0.01)

    def measure(self, draw: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
        """Metrics, and curves for the picture; `draw(name, target, **options)` calls `sample`."""
        raise NotImplementedError

    def execute(
        self, runs: Sequence[Run], options: RunOptions
    ) -> tuple[Outcome, Sequence[RunResult]]:
        (run,), began = runs, time.perf_counter()
        if options.budget is not None or options.log:
            raise ConfigError(f"{self.recipe} keeps its curves alone; leave out --budget and --log")

        def draw(name: str, target: Any, **more: Any) -> Draws:
            seed = derive_seed(run.seed, f"{self.recipe} {name}")
            temperatures = more.pop("temperatures", self.temperatures)
            more = {"n_steps": self.n_steps, "n_runs": self.n_runs, **more}
            device = self.device(options.device)
            return sample(target, temperatures=temperatures, seed=seed, device=device, **more)

        # It warns of biased rules, and their bias is what is measured.
        logger = logging.getLogger("torchrex")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            metrics, curves = self.measure(draw)
        finally:
            logger.setLevel(level)
        result = RunResult(metrics=_plain(metrics), curves=_plain(curves))
        return Outcome("finished", total_seconds=time.perf_counter() - began), [result]


def _plain(value: Any) -> Any:
    """As JSON, to six digits."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if np.ndim(value):
        return [_plain(each) for each in value]
    return float(f"{float(value):.6g}")


def start_of(mixture: GaussianMixture) -> Normal:
    where = mixture.means[0].float()
    return Normal(where, torch.full_like(where, START[1]))


def start_on(grid: Grid) -> Array:
    law = np.exp(-((grid.axis - START[0]) ** 2) / (2 * START[1] ** 2))
    return np.asarray(law / law.sum())


@dataclass(frozen=True)
class Acceleration(TheoryConfig):
    """Lemma 2: the distance to the law falls exponentially, and faster with swaps."""

    shown: ClassVar = ("rate", "largest decay rate")
    n_runs: int = 60_000
    lr: float = 0.01
    intensities: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0)  # r of the runs
    plane_intensities: tuple[float, ...] = (0.0, 1.0, 10.0)  # r of the runs in two dimensions
    thin: int = 20  # steps between two times at which the distance is measured
    fit_from: float = 1.5  # time from which the decay is taken to be that of the slowest function,
    fit_until: float = 0.06  # and what is left of it at the end

    def check(self) -> None:
        super().check()
        for name in ("intensities", "plane_intensities"):
            r = getattr(self, name)
            self.require(name, len(r) > 1 and r[0] == 0 == min(r), "0 and others, rising")

    def measure(self, draw: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
        times = np.arange(1.0, self.n_steps // self.thin + 1) * (self.thin * self.lr)
        wells, plane = self.on_the_line(draw, times), self.in_the_plane(draw, times)
        metrics = {"rate": max(wells["rate"]), "rate_without_swaps": wells["rate"][0]}
        return metrics, {"time": times, **wells, **{f"plane_{k}": v for k, v in plane.items()}}

    def on_the_line(self, draw: Draw, times: Array) -> dict[str, Any]:
        grid = Grid(WELLS, REACH, 160)
        law, accepted = grid.gibbs_pair(self.pair), grid.acceptance(self.pair)
        r = sorted({0.0, *np.logspace(-2, 2, 17), *self.intensities})
        rate = {
            each: grid_law.gap_of(grid.pair_generator(self.pair, each * accepted)) for each in r
        }
        found: dict[str, list[Any]] = {}
        for each in self.intensities:
            values = self.computed(grid, each * self.lr * accepted, law.sum(1), times, rate[each])
            values["delta"] = self.delta(grid, each * accepted, law, times[-1])
            values |= self.observed(draw, "wells", WELLS, each, times, rate[each])
            for name, value in values.items():
                found.setdefault(name, []).append(value)
        return {"r": r, "rate": list(rate.values()), "runs_r": self.intensities, **found}

    def in_the_plane(self, draw: Draw, times: Array) -> dict[str, Any]:
        """The rates alone: the law of four coordinates over time is not computed."""
        grid = Grid(PLANE, PLANE_REACH, 36)
        accepted = grid.acceptance(self.pair)
        r = sorted({0.0, 0.1, 0.3, 1.0, 3.0, 10.0, *self.plane_intensities})
        rate = [grid_law.gap_of_split(grid, self.pair, each * accepted) for each in r]
        found: dict[str, list[Any]] = {}
        for each in self.plane_intensities:
            values = self.observed(draw, "plane", PLANE, each, times, rate[r.index(each)])
            for name in ("w2_rate", "w2_rate_se", "chi2_rate", "chi2_rate_se"):
                found.setdefault(name, []).append(values[name])
        return {"r": r, "rate": rate, "runs_r": self.plane_intensities, **found}

    def weight(self, times: Array, rate: float) -> Array:
        """One over the variance of the log of a distance, while enough of the distance is left."""
        left = np.exp(-rate * (times - self.fit_from))
        return np.where((times >= self.fit_from) & (left > self.fit_until), left**2, 0.0)

    def computed(
        self, grid: Grid, swap: Array, target: Array, times: Array, rate: float
    ) -> dict[str, Any]:
        """The exact law of the chain at this lr: distances of rung 0 over time, and their rates."""
        moves = (grid.euler(self.pair[0], self.lr), grid.euler(self.pair[1], self.lr))
        joint, w2, chi2 = np.outer(start_on(grid), start_on(grid)), [], []
        for _ in times:
            joint = grid_law.chain(joint, moves, swap, self.thin)
            w2.append(w2_of(joint.sum(1), target, grid))
            chi2.append(chi_square_of(joint.sum(1), target, grid))
        weight = self.weight(times, rate)
        return {
            "w2_exact": w2,
            "chi2_exact": chi2,
            "w2_rate_exact": -slope(times, np.log(w2), weight),
            "chi2_rate_exact": -slope(times, 0.5 * np.log(chi2), weight),
        }

    def delta(self, grid: Grid, rate: Array, law: Array, until: float) -> float:
        """The paper's delta_S, from the start to a late time.

        delta_S = inf over t of E_S(f) / E(f) - 1,    f = sqrt(law at t / stationary law)
        """
        step, start = 0.02, np.outer(start_on(grid), start_on(grid))
        moves = (grid.flow(self.pair[0], step), grid.flow(self.pair[1], step))
        alone, gains = grid.pair_generator(self.pair, 0.0 * rate), []
        laws = grid_law.diffuse(start, moves, rate, step)
        for joint in itertools.islice(laws, 0, round(until / step), 10):
            f = np.sqrt(np.maximum(joint, 0.0) / law)
            swaps = 0.5 * (law * rate * (f.T - f) ** 2).sum()
            gains.append(swaps / -((law * f).ravel() @ (alone @ f.ravel())))
        return float(min(gains))

    def observed(
        self, draw: Draw, name: str, mixture: GaussianMixture, r: float, times: Array, rate: float
    ) -> dict[str, Any]:
        """Distances over time, and the rates of their decay; that of chi-square is halved."""
        rule = {"swap_intensity": r} if r else {"temperatures": self.temperatures[:1]}
        common = {"lr": self.lr, "thin": self.thin, "initial": start_of(mixture)}
        gaps, counts = deviations(draw(f"{name} r={r:g}", mixture, **common, **rule), mixture)
        weight = self.weight(times, rate)
        found: dict[str, Any] = {}
        found["w2"], found["w2_se"] = root(*jackknife(w2_squared, gaps))
        found["chi2"], found["chi2_se"] = jackknife(chi_square, counts)
        for what, of, groups in (("w2", w2_squared, gaps), ("chi2", chi_square, counts)):
            falls, found[f"{what}_rate_se"] = log_slope(of, groups, times, weight)
            found[f"{what}_rate"] = -falls
        return found


@dataclass(frozen=True)
class Discretisation(TheoryConfig):
    """Theorem 1: at a fixed time, the learning rate costs at most O(lr^1/2) in W2."""

    shown: ClassVar = ("slope_with", "slope of log W2 in log lr")
    n_steps: int = 560  # at the smallest lr; the others take as many as the same time needs
    n_runs: int = 150_000
    lrs: tuple[float, ...] = (0.2, 0.1, 0.07, 0.05, 0.035, 0.025)
    intensity: float = 4.0  # r
    fit_to: float = 0.1  # the largest lr in the fit of the slope

    def check(self) -> None:
        super().check()
        few = sum(0 < lr <= self.fit_to for lr in self.lrs) < 2
        self.require("lrs", not few and min(self.lrs) > 0, "positive, two or more up to fit_to")

    def measure(self, draw: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
        """Three distances: to the target with and without swaps, and without swaps to the law of
        the diffusion at that time (`limit`). With swaps the last is the target, nearly.
        """
        until, lrs = self.n_steps * min(self.lrs), np.array(self.lrs)
        pair, alone = Grid(WELLS, REACH, 240), Grid(WELLS, REACH, 960)
        accepted, both, target = pair.acceptance(self.pair), start_on(pair), alone.gibbs(1.0)
        limit = start_on(alone) @ alone.flow(1.0, until)
        levels = (np.arange(self.n_runs // N_GROUPS) + 0.5) * N_GROUPS / self.n_runs
        moved = quantiles(target, alone, levels) - quantiles(limit, alone, levels)
        exact: dict[str, list[float]] = {"with": [], "without": [], "to_limit": []}
        gaps: dict[str, list[Array]] = {"with": [], "without": [], "to_limit": []}
        for lr in self.lrs:
            steps = round(until / lr)
            kernels = (pair.euler(self.pair[0], lr), pair.euler(self.pair[1], lr))
            swap = self.intensity * lr * accepted
            law = grid_law.chain(np.outer(both, both), kernels, swap, steps).sum(1)
            exact["with"].append(w2_of(law, pair.gibbs(1.0), pair))
            law = start_on(alone) @ np.linalg.matrix_power(alone.euler(1.0, lr), steps)
            exact["without"].append(w2_of(law, target, alone))
            exact["to_limit"].append(w2_of(law, limit, alone))
            common = {"lr": lr, "n_steps": steps, "thin": steps, "initial": start_of(WELLS)}
            exchange = draw(f"with lr={lr}", WELLS, **common, swap_intensity=self.intensity)
            single = draw(f"without lr={lr}", WELLS, **common, temperatures=(1.0,))
            gaps["with"].append(deviations(exchange, WELLS)[0])
            gaps["without"].append(deviations(single, WELLS)[0])
            gaps["to_limit"].append(gaps["without"][-1] + moved)
        fit = lrs <= self.fit_to * (1 + 1e-9)
        metrics: dict[str, Any] = {"time": until, "limit": w2_of(limit, target, alone)}
        curves: dict[str, Any] = {"lr": lrs}
        for name, computed in exact.items():
            groups = np.concatenate(gaps[name], axis=2)  # lrs in the place of times
            w2, error = root(*jackknife(w2_squared, groups))
            weight = np.where(fit, (w2 / error) ** 2, 0.0)
            curves |= {name: w2, f"{name}_se": error, f"{name}_exact": computed}
            found = log_slope(w2_squared, groups, np.log(lrs), weight)
            metrics[f"slope_{name}"], metrics[f"slope_{name}_se"] = found
            metrics[f"slope_{name}_exact"] = slope(np.log(lrs), np.log(computed), weight)
        return metrics, curves


@dataclass(frozen=True)
class Noise(TheoryConfig):
    """Section 3.2: what the noise of the energies does to rung 0, by F and by the noise's law."""

    shown: ClassVar = ("largest_bias", "largest bias of the left weight")
    n_steps: int = 10_000
    n_runs: int = 1000
    lr: float = 0.02
    intensity: float = 10.0  # r
    stds: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)  # of one energy with Gaussian noise
    std: float = 2.0  # of one energy where the laws of the noise are compared
    degrees: tuple[float, ...] = (10.0, 5.0, 3.0)  # of Student's t
    factors: tuple[float, ...] = (1.0, 2.0, 4.0, math.inf)
    burn_in: int = 500
    thin: int = 10

    def check(self) -> None:
        super().check()
        self.require("factors", {1.0, math.inf} <= {*self.factors}, "several, 1 and inf among them")
        self.require("degrees", min(self.degrees, default=0) > 2, "above 2: a finite variance")

    def measure(self, draw: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
        """Biases of the left weight: computed for the jump process and for the chain at this lr,
        and observed. By F, and for each by std; then by law, and for each by F.
        """
        exact = Exact(self)
        laws = [Gaussian(self.std), *(student(self.std, degrees) for degrees in self.degrees)]
        lines = np.linspace(0.25, max(self.stds), 13)
        inverse = np.linspace(0.0, 1.0, 11)
        curves: dict[str, Any] = {
            "std": lines,
            "bias_by_std": [
                [exact.bias(exact.law(Gaussian(std), factor)) for std in lines]
                for factor in self.factors
            ],
            "inverse_factor": inverse,
            "bias_by_factor": [
                [exact.bias(exact.law(law, _inverse(each))) for each in inverse] for law in laws
            ],
            "rate_by_factor": [exact.rate(laws[0], _inverse(each)) for each in inverse],
            "runs_std": self.stds,
            "runs_inverse_factor": [1.0 / factor for factor in self.factors],
            "degrees": self.degrees,
        }
        tables: dict[str, list[list[tuple[NoiseModel, float]]]] = {
            "std": [[(Gaussian(std), factor) for std in self.stds] for factor in self.factors],
            "factor": [[(law, factor) for factor in self.factors] for law in laws],
        }
        settings = {one for table in tables.values() for row in table for one in row}
        found = {one: self.compare(draw, exact, *one) for one in settings}
        for name, rows in tables.items():
            for k, what in enumerate(("chain", "runs", "runs_se")):
                curves[f"{what}_by_{name}"] = [[found[one][k] for one in row] for row in rows]
        small = [exact.distance(exact.law(Gaussian(std), math.inf)) for std in (0.1, 0.2)]
        metrics = {
            "largest_bias": max(map(max, curves["bias_by_std"])),
            "naive_slope": math.log2(small[1] / small[0]),
            "chain_offset": exact.bias(exact.chain_law(None, 1.0)),
        }
        return metrics, curves

    def compare(
        self, draw: Draw, exact: Exact, noise: NoiseModel, factor: float
    ) -> tuple[float, float, float]:
        """The bias of the chain's exact law at this lr, that of the runs, and its error."""
        common = {"lr": self.lr, "burn_in": self.burn_in, "thin": self.thin}
        rules = {"noise": KnownVariance(noise.variance), "swap_intensity": self.intensity}
        draws = draw(
            f"{noise} F={factor:g}",
            Noisy(WELLS, noise),
            **common,
            **rules,
            correction_factor=factor,
            initial=WELLS.sample(self.n_runs, generator=torch.Generator().manual_seed(0)),
        )
        left = (draws.values[:, :, 0] < 0).double().mean(1).numpy() - exact.left
        bias, error = left.mean(), left.std(ddof=1) / math.sqrt(len(left))
        return exact.bias(exact.chain_law(noise, factor)), float(bias), float(error)


class Exact:
    """Laws of rung 0 with noisy swaps."""

    def __init__(self, config: Noise) -> None:
        self.config, self.grid = config, Grid(WELLS, REACH, 160)
        self.gibbs = self.grid.gibbs_pair(config.pair)
        self.left = float(WELLS.cdf(torch.zeros(())))
        self.kernels = tuple(self.grid.euler(tau, config.lr) for tau in config.pair)

    def generator(self, noise: NoiseModel | None, factor: float) -> Any:
        rate = self.config.intensity * self.grid.acceptance(self.config.pair, noise, factor)
        return self.grid.pair_generator(self.config.pair, rate)

    def law(self, noise: NoiseModel | None, factor: float) -> Array:
        """The stationary law of the pair in continuous time."""
        found = grid_law.stationary(self.generator(noise, factor), int(self.gibbs.argmax()))
        return found.reshape(self.gibbs.shape)

    def chain_law(self, noise: NoiseModel | None, factor: float) -> Array:
        """That of the chain at this lr: from the one above, until nothing changes."""
        accepted = self.grid.acceptance(self.config.pair, noise, factor)
        swap = self.config.intensity * self.config.lr * accepted
        cold, hot = self.kernels
        return grid_law.chain(
            self.law(noise, factor), (cold, hot), swap, round(12 / self.config.lr)
        )

    def rate(self, noise: NoiseModel | None, factor: float) -> float:
        """The decay rate with noise; the jumps need not be reversible."""
        return grid_law.gap_of(self.generator(noise, factor))

    def bias(self, law: Array) -> float:
        return float(law.sum(1)[self.grid.axis < 0].sum()) - self.left

    def distance(self, law: Array) -> float:
        return w2_of(law.sum(1), self.gibbs.sum(1), self.grid)


def student(std: float, degrees: float) -> StudentT:
    return StudentT(degrees, std * math.sqrt((degrees - 2) / degrees))


def _inverse(value: float) -> float:
    return 1.0 / value if value else math.inf


@dataclass(frozen=True)
class AdaptiveVariance(TheoryConfig):
    """Section 3.3: how fast the adaptive sigma2 finds the noise variance."""

    shown: ClassVar = ("slope_mean", "slope of the error, running mean")
    n_steps: int = 2000
    lr: float = 0.02
    std: float = 2.0  # of one energy
    n_draws: int = 10  # energies in one SA step
    every: int = 2  # steps
    gamma: float = 0.3  # of the smoothing
    fit_from: int = 5  # the first SA step in the fit of the slope

    def measure(self, draw: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
        """Errors relative to the variance, after m SA steps: root mean square over runs, and the
        median where the noise has no fourth moment, t(3).
        """
        feed, last = RepeatedDraws(self.n_draws, self.every), self.n_steps // self.every
        m = np.unique(np.round(np.logspace(0, math.log10(last), 25)).astype(int))
        mean, smooth = RunningMean(feed), Smoothing(self.gamma, feed)
        cases = {
            "mean": (Gaussian(self.std), mean),
            "smoothing": (Gaussian(self.std), smooth),
            "mean_t5": (student(self.std, 5.0), mean),
            "mean_t3": (student(self.std, 3.0), mean),
        }
        metrics: dict[str, Any] = {"last": last}
        curves: dict[str, Any] = {"m": m}
        fit = np.where(m >= self.fit_from, 1.0, 0.0)
        for name, (noise, rule) in cases.items():
            common = {"lr": self.lr, "thin": self.every, "initial": start_of(WELLS)}
            draws = draw(name, Noisy(WELLS, noise), **common, noise=rule)
            error = draws.noise_variance[m - 1, 0].double().numpy() / self.std**2 - 1
            groups = error.reshape(len(m), N_GROUPS, -1).swapaxes(0, 1)  # (groups, m, runs)
            square = median_square if name == "mean_t3" else mean_square
            curves[name], curves[f"{name}_se"] = root(*jackknife(square, groups))
            found = log_slope(square, groups, np.log(m), fit)
            metrics[f"slope_{name}"], metrics[f"slope_{name}_se"] = found
        for name, excess in (("mean", 0.0), ("mean_t5", 6.0)):  # fourth cumulant over variance^2
            curves[f"{name}_exact"] = np.sqrt(self.one_step(excess) / m)
        kept, g = (1 - self.gamma) ** (2 * (m - 1)), self.gamma / (2 - self.gamma)
        curves["smoothing_exact"] = np.sqrt(self.one_step(0.0) * (kept + g * (1 - kept)))
        return metrics, curves

    def one_step(self, excess: float) -> float:
        """Variance of one SA sample over sigma^4: it is the mean of two sample variances."""
        return (2 / (self.n_draws - 1) + excess / self.n_draws) / 2


def mean_square(groups: Array) -> Array:
    return np.asarray((groups**2).mean((0, 2)))


def median_square(groups: Array) -> Array:
    return np.asarray(np.median(groups**2, axis=(0, 2)))


def theory_recipes() -> dict[str, TheoryConfig]:
    configs = (
        Acceleration("theory/acceleration"),
        Discretisation("theory/discretisation"),
        Noise("theory/noise"),
        AdaptiveVariance("theory/variance"),
    )
    return {config.recipe: config for config in configs}
