"""Predators and prey, of which only the prey are counted, ten times and badly.

The system of Lotka and Volterra in units of its equilibrium, u = log prey and v = log predators:

    u' = a (1 - exp v),    v' = c (exp u - 1)

Counts once a year of a cycle that takes 1.6 years look much like those of a slower cycle that runs
the other way round. The posterior of the constants has two modes, with a cycle of 1.6 and of about
2.5 years, and many local maxima without mass. The constants are bounded smoothly, so that the
integrator is stable wherever a sampler goes.

Every count needs the trajectory before it: a step on some of the counts costs as much as one on
all. Steps use all of them, and energies have no noise. The cost is counted in examples, as in the
other problems; the ten counts of one trajectory are ten.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from torchrex.experiments.gallery import METHODS, FullData, Problem

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
NEAR_TRUTH, NEAR_OTHER = (1.4, 1.85), (2.1, 3.0)  # periods of small cycles in the two modes

LR = 0.01  # of rung 0
GRID = (800, 48, 48)  # intervals of the quadrature
SHOWN = 400  # numbers in a picture


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

    Data and posterior have the same steps, and the answer is exact for them. From the differential
    equations they differ by up to 0.4 in ten years of the true cycle, which is 1 % too fast here.
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


def simulate(seed: int = DATA_SEED) -> Tensor:
    """Logs of the counts, (N_COUNTS,)."""
    generator = torch.Generator().manual_seed(seed)
    log_frequency = torch.tensor(math.log(2.0 * math.pi / TRUE_PERIOD), dtype=torch.float64)
    prey = log_prey(log_frequency, log_frequency, torch.full_like(log_frequency, TRUE_PREDATORS))
    error = torch.randn(N_COUNTS, generator=generator, dtype=torch.float64)
    return torch.stack(prey) + NOISE * error


def dynamics() -> Problem:
    """The probability of the true mode."""
    return Problem(
        posterior(),
        LR,
        estimate=share_in_true_mode,
        exact=lambda: (exact(), abs(exact() - exact(coarser=2))),
        words=f"probability that a cycle takes {NEAR_TRUTH[0]:g} to {NEAR_TRUTH[1]:g} years",
        hot=10.0,
        found=share_in_modes,
        shown=lambda x: period(x).flatten()[:: max(1, x[..., 0].numel() // SHOWN)],
        plot=plot,
    )


def posterior(seed: int = DATA_SEED) -> FullData:
    def log_likelihood(position: Tensor, count: Tensor) -> Tensor:
        expected = torch.cat(log_prey(*constants(position)), -1)
        return -0.5 * ((count - expected) / NOISE).square()

    prior = Normal(torch.zeros(3), torch.tensor(PRIOR_SD))
    return FullData(log_likelihood, prior, (simulate(seed),), 3, batch_size=N_COUNTS)


def share_in_true_mode(x: Tensor) -> Tensor:
    """Of draws (runs, draws, 3): one number for each run."""
    return _is_between(period(x), NEAR_TRUTH).double().mean(-1)


def share_in_modes(x: Tensor) -> Tensor:
    """The same for both modes, which have nearly all of the mass."""
    years = period(x)
    return (_is_between(years, NEAR_TRUTH) | _is_between(years, NEAR_OTHER)).double().mean(-1)


def exact(seed: int = DATA_SEED, *, coarser: int = 1) -> float:
    """The probability of the true mode by quadrature, over 5 sds of the prior to either side."""
    points, density = density_on_grid(seed, coarser)
    return float((density * share_in_true_mode(points[:, None])).sum())


@functools.cache
def density_on_grid(seed: int = DATA_SEED, coarser: int = 1) -> tuple[Tensor, Tensor]:
    """Points (n, 3) and the posterior mass of each. The density is smooth and vanishes at the ends,
    where a plain sum converges faster than any power of the spacing.
    """
    target = posterior(seed).to("cpu", torch.float64)
    axes = [
        sd * torch.linspace(-5.0, 5.0, n // coarser + 1, dtype=torch.float64)
        for sd, n in zip(PRIOR_SD, GRID, strict=True)
    ]
    points = torch.cartesian_prod(*axes)
    energy = torch.cat([target.full_energy(part) for part in points.chunk(16)])
    return points, torch.softmax(-energy, 0)


def plot(axis: Any, numbers: dict[str, Tensor], styles: Mapping[str, Any]) -> None:
    """The law of the period: exact, and what two methods found."""
    points, density = density_on_grid()
    bins = torch.linspace(1.2, 4.0, 113, dtype=torch.float64)
    mass, _ = torch.histogram(period(points), bins, weight=density)
    width = float(bins[1] - bins[0])
    axis.stairs(mass / width, bins, fill=True, color="0.8", label="exact")
    for method in ("pooled", "tuned"):
        if method in numbers:
            count, _ = torch.histogram(numbers[method].double(), bins)
            share = count / max(1, len(numbers[method]))
            color = styles[method]["color"]
            axis.stairs(share / width, bins, color=color, lw=1.2, label=METHODS[method])
    axis.set(xlabel="years of a cycle", ylabel="density")
    axis.legend()


def _is_between(years: Tensor, ends: tuple[float, float]) -> Tensor:
    return (years > ends[0]) & (years < ends[1])
