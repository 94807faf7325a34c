"""Predators and prey, of which only the prey are counted, ten times and badly.

The system of Lotka and Volterra in units of its equilibrium, u = log prey and v = log predators:

    u' = a (1 - exp v),    v' = c (exp u - 1)

Counts once a year of a cycle that takes 1.6 years look much like those of a slower cycle that runs
the other way round. The posterior of the constants has two modes, with a cycle of 1.6 and of about
2.4 years, and many local maxima without mass. The constants are bounded smoothly, so that the
integrator is stable wherever a sampler goes.

Every count needs the trajectory before it: a step on some of the counts costs as much as one on all.
Steps use all of them, and energies have no noise; one example is one count of a whole trajectory.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.distributions import Normal

from torchrex.targets import Noise, TallPosterior

N_COUNTS = 10  # one a year
STEPS_A_YEAR = 8  # of the integrator
FIRST_PREY = 0.7  # u at year 0, which is known; the predators are not
NOISE = 0.4  # standard deviation of a log count
TRUE_PERIOD, TRUE_PREDATORS = 1.6, 0.3
DATA_SEED = 0

# Prior of the position: normal, in units in which a mode has about the same width everywhere.
PRIOR_SD = (20.0, 2.0, 2.0)
MIDDLE_PERIOD = 3.0
WIDEST = (0.9, 0.5, 0.8)  # log frequency from the middle; log(a / c) / 2; v at year 0
SCALE = (40.0, 4.0, 4.0)  # of the positions at which the bounds are felt
NEAR_TRUTH = (1.4, 1.85)  # periods of small cycles in the true mode


def constants(position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log a, log c and v at year 0, of positions (..., 3); the frequency is sqrt(a c)."""
    frequency, ratio, predators = (
        width * torch.tanh(position[..., k] / scale)
        for k, (width, scale) in enumerate(zip(WIDEST, SCALE, strict=True))
    )
    frequency = frequency + math.log(2.0 * math.pi / MIDDLE_PERIOD)
    return frequency + ratio, frequency - ratio, predators


def period(position: Tensor) -> Tensor:
    """In years, of small cycles; large ones take a little longer."""
    log_a, log_c, _ = constants(position)
    return 2.0 * math.pi * (-0.5 * (log_a + log_c)).exp()


def log_prey(
    log_a: Tensor,
    log_c: Tensor,
    predators: Tensor,
    *,
    n_years: int = N_COUNTS,
    steps_a_year: int = STEPS_A_YEAR,
) -> list[Tensor]:
    """u after each year, by leapfrog with steps h, an error of order h^2.

    With p = u + log(h c) and q = v + log(h a) a step has two exponentials and no product:

        p <- p + h a - exp q,    q <- q + exp p - h c
    """
    log_h = -math.log(steps_a_year)
    ha, hc = (log_a + log_h).exp(), (log_c + log_h).exp()
    p = log_c + log_h + FIRST_PREY
    q = log_a + log_h + predators + 0.5 * (p.exp() - hc)
    years = []
    for _ in range(n_years):
        for _ in range(steps_a_year):
            p = p + ha - q.exp()
            q = q + p.exp() - hc
        years.append(p - log_c - log_h)
    return years


def simulate(seed: int = DATA_SEED, noise: float = NOISE) -> Tensor:
    """Logs of the counts, (N_COUNTS,)."""
    generator = torch.Generator().manual_seed(seed)
    log_frequency = torch.tensor(math.log(2.0 * math.pi / TRUE_PERIOD), dtype=torch.float64)
    prey = log_prey(log_frequency, log_frequency, torch.full_like(log_frequency, TRUE_PREDATORS))
    error = torch.randn(N_COUNTS, generator=generator, dtype=torch.float64)
    return torch.stack(prey) + noise * error


class Trajectory(TallPosterior):
    """All data at every step: no minibatch, and no noise."""

    has_noise = False

    def draw_noise(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Noise:
        return {}


def predators_and_prey(seed: int = DATA_SEED, noise: float = NOISE) -> Trajectory:
    def log_likelihood(position: Tensor, count: Tensor) -> Tensor:
        expected = torch.cat(log_prey(*constants(position)), -1)
        return -0.5 * ((count - expected) / noise).square()

    prior = Normal(torch.zeros(3), torch.tensor(PRIOR_SD))
    counts = simulate(seed, noise).float()
    return Trajectory(log_likelihood, prior, (counts,), 3, batch_size=N_COUNTS)


def estimate(values: Tensor) -> Tensor:
    """Of draws (runs, draws, 3): the share of each run in the true mode."""
    short, long = NEAR_TRUTH
    years = period(values)
    return ((years > short) & (years < long)).double().mean(-1)


@functools.cache
def exact(seed: int = DATA_SEED, noise: float = NOISE, *, n_grid: int = 401) -> float:
    """The probability of the true mode by quadrature, from 5 sds of the prior to 5 in each
    coordinate; the integrand is smooth and vanishes there, so that the sum converges fast.
    """
    target = predators_and_prey(seed, noise).to("cpu", torch.float64)
    inside = total = torch.zeros((), dtype=torch.float64)
    sizes = (2 * n_grid - 1, n_grid // 8, n_grid // 8)
    axes = [
        sd * torch.linspace(-5.0, 5.0, n, dtype=torch.float64)
        for sd, n in zip(PRIOR_SD, sizes, strict=True)
    ]
    points = torch.cartesian_prod(*axes)
    energy = torch.cat([target.full_energy(part) for part in points.split(2**16)])
    density = (energy.min() - energy).exp()
    weight = estimate(points[:, None])
    inside, total = (density * weight).sum(), density.sum()
    return float(inside / total)
