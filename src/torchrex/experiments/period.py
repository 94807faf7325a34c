"""A period under daily aliases: which frequency does a star have that is seen at night only?

    y = a cos(2 pi f t) + b sin(2 pi f t) + noise of sd 1

The star is observed at about the same hour of some nights. A frequency that differs by one a day
then has almost the same phases: an alias. Between the aliases lie about a hundred narrow modes,
which hold next to nothing of the mass. Given f the parameters a and b are linear, so they are
integrated by hand and the exact answer is an integral over f alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from torchrex.experiments.gallery import METHODS, Problem
from torchrex.targets import TallPosterior

FREQUENCY, PHASE = 1.37, 1.0  # per day; of the truth
SIGNAL = 60.0  # nats: log likelihood of the truth over that of no star
NIGHTS, DAYS, HOURS = 24, 40, 0.12  # nights of so many days; length of each, in days
PRIOR_MEAN, PRIOR_SD = 1.5, 0.5  # of the frequency; those of a and b are 0 and 1
UNIT = 1.0 / 30.0  # of the frequency as a coordinate: about as stiff as a and b
ALIASES = (0, 1)  # those that have the mass, by their distance from the truth
NEAR = 0.02  # half the width of a mode, per day
EDGES = torch.linspace(0.0, 3.0, 201)  # of the histogram that is shown
DATA_SEED = 58  # two aliases have about a third and two thirds of the mass


def period(n_data: int = 2_000, batch_size: int = 200, lr: float = 3e-5) -> Problem:
    """How probable is the true frequency? The other one that may be is an alias."""
    times, values = observations(n_data)

    def log_likelihood(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        phase = 2.0 * math.pi * frequency(x) * t
        return -0.5 * (y - x[..., 1] * phase.cos() - x[..., 2] * phase.sin()).square()

    sds = torch.tensor([PRIOR_SD / UNIT, 1.0, 1.0])
    target = TallPosterior(
        log_likelihood, Normal(torch.zeros(3), sds), (times.float(), values.float()), 3,
        batch_size=batch_size,
    )  # fmt: skip

    def exact() -> tuple[float, float]:
        grid, mass = exact_law(times, values)
        return float(mass[near(grid, 0)].sum()), 0.0

    def shown(x: Tensor) -> Tensor:
        return torch.histogram(frequency(x).flatten().float(), EDGES).hist / x[..., 0].numel()

    def plot(axis: Any, found: dict[str, Tensor], styles: Mapping[str, Any]) -> None:
        grid, mass = exact_law(times, values)
        middle = 0.5 * (EDGES[1:] + EDGES[:-1])
        law = torch.histogram(grid.float(), EDGES, weight=mass.float()).hist
        axis.stairs(law, EDGES, fill=True, color="0.85", label="exact")
        for method in ("pooled", "tuned"):
            if method in found:
                there, style = found[method] > 0, styles[method]
                axis.plot(middle[there], found[method][there], **style, ms=5, label=METHODS[method])
        axis.set(yscale="log", ylim=(1e-4, 1.5), xlabel="frequency (1 / day)", ylabel="probability")
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return Problem(
        target,
        lr,
        estimate=lambda x: near(frequency(x), 0).double().mean(1),
        exact=exact,
        words="probability of the true period",
        hot=30.0,
        found=lambda x: (
            torch.stack([near(frequency(x), k) for k in ALIASES]).any(0).double().mean(1)
        ),
        shown=shown,
        plot=plot,
    )


def frequency(x: Tensor) -> Tensor:
    return PRIOR_MEAN + UNIT * x[..., 0]


def near(frequencies: Tensor, k: int) -> Tensor:
    """Which are at the alias of order k? 0 is the truth; -f and f are the same frequency."""
    return (frequencies.abs() - abs(FREQUENCY + k)).abs() < NEAR


def observations(n_data: int) -> tuple[Tensor, Tensor]:
    """Times in days, with mean 0, and values."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    nights = torch.randperm(DAYS, generator=generator)[:NIGHTS].double()
    within = torch.randint(NIGHTS, (n_data,), generator=generator)
    hour = HOURS * (torch.rand(n_data, generator=generator, dtype=torch.float64) - 0.5)
    times = nights[within] + hour
    times = times - times.mean()
    amplitude = math.sqrt(4.0 * SIGNAL / n_data)
    noise = torch.randn(n_data, generator=generator, dtype=torch.float64)
    return times, amplitude * torch.cos(2.0 * math.pi * FREQUENCY * times + PHASE) + noise


def exact_law(times: Tensor, values: Tensor, step: float = 5e-4) -> tuple[Tensor, Tensor]:
    """Frequencies on a grid and the mass of each, with a and b integrated by hand.

        log p(y | f) = u' M^-1 u / 2 - log det M / 2 + const,  M = F'F + 1,  u = F'y

    where F has the columns cos(2 pi f t) and sin(2 pi f t), and a and b have sd 1.
    """
    ends = (PRIOR_MEAN - 4.5 * PRIOR_SD, PRIOR_MEAN + 4.5 * PRIOR_SD)
    grid = torch.arange(*ends, step, dtype=torch.float64)
    logs = []
    for part in grid.chunk(math.ceil(len(grid) * len(times) / 4_000_000)):
        phase = 2.0 * math.pi * part[:, None] * times
        cos, sin = phase.cos(), phase.sin()
        cc, ss, cs = 1.0 + cos.square().sum(1), 1.0 + sin.square().sum(1), (cos * sin).sum(1)
        cy, sy, det = cos @ values, sin @ values, cc * ss - cs.square()
        squares = (ss * cy.square() - 2.0 * cs * cy * sy + cc * sy.square()) / det
        logs.append(0.5 * squares - 0.5 * det.log())
    log_mass = torch.cat(logs) - 0.5 * ((grid - PRIOR_MEAN) / PRIOR_SD).square()
    return grid, torch.softmax(log_mass, 0)
