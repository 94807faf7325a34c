"""A network that learns from another of its own width.

    f(z) = sum_j relu(w_j . z),    y = f*(z) + noise,    z ~ N(0, 1) in k dimensions

The teacher f* has k orthonormal weight vectors, and so many has the student. For k from 6 to 20 the
expected loss has spurious minima (Safran and Shamir, ICML 2018). With fewer data fewer runs of SGD
reach the teacher. The answer is the error of the mean prediction on test points without noise.

Besides the methods of the gallery there are two that do not sample: a deep ensemble, and SGD with
restarts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Normal

from torchrex import schedules
from torchrex.exchange import Ladder
from torchrex.experiments.gallery import Problem
from torchrex.sampling import sample
from torchrex.targets import TallPosterior, laplace

NOISE = 0.15  # standard deviation of y
TEST_POINTS = 2_000
NEAR = 0.5  # a vector of the teacher is found if one of the student is within this distance
LAPLACE_DRAWS = 200
MEMBERS = 20  # of a deep ensemble
RESTART_STEPS = 12_000  # of SGD, each time
RESTART_FACTOR = 6.0  # its first lr over that of rung 0; of 2,400 starts with 10 one diverged


def teacher(k: int = 12, n_data: int = 600, batch_size: int = 25, lr: float = 8e-7) -> Problem:
    """Error on test points, in units in which the teacher's own values have a variance of about
    0.34 k.
    """
    data, (points, outputs) = simulate(k, n_data)
    truth = torch.eye(k).flatten()
    target = TallPosterior(
        log_likelihood(k), Normal(0.0, k**-0.5), data, k * k, batch_size=batch_size
    )

    def error(x: Tensor) -> Tensor:
        """Mean square of the mean prediction of each run, of draws (runs, draws, dim)."""
        mean = torch.stack([predictions(k, draws, points).mean(0) for draws in x])
        return (mean - outputs).square().mean(-1)

    def found(x: Tensor) -> Tensor:
        """Share of draws with a vector of the student at every one of the teacher."""
        away = torch.cdist(torch.eye(k), x.reshape(*x.shape[:-1], k, k))
        return (away.amin(-1) < NEAR).all(-1).double().mean(1)

    return Problem(
        target,
        lr,
        estimate=error,
        exact=functools.partial(error_by_laplace, target, truth, error),
        words=f"test error of the mean prediction, teacher of width {k}",
        lower_is_better=True,
        hot=300.0,
        found=found,
        more={"ensemble": deep_ensemble, "restarts": sgd_restarts},
    )


def simulate(k: int, n_data: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Points and noisy outputs of the teacher, whose vectors are the axes; test points and outputs
    without noise.
    """
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(n_data, k, generator=generator)
    outputs = points.relu().sum(-1) + NOISE * torch.randn(n_data, generator=generator)
    test = torch.randn(TEST_POINTS, k, generator=generator)
    return (points, outputs), (test, test.relu().sum(-1))


def log_likelihood(k: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def log_likelihood(x: Tensor, point: Tensor, output: Tensor) -> Tensor:
        """Vector by vector: the compiled loop takes sums, but no matrix products."""
        units = [(point * x[..., k * j : k * (j + 1)]).sum(-1).relu() for j in range(k)]
        return -0.5 * ((output - functools.reduce(torch.add, units)) / NOISE).square()

    return log_likelihood


def predictions(k: int, x: Tensor, points: Tensor) -> Tensor:
    """Of students x (..., k k) at points (n, k): (..., n)."""
    weights = x.reshape(*x.shape[:-1], k, k)
    return (points @ weights.transpose(-1, -2)).relu().sum(-1)


def error_by_laplace(
    target: TallPosterior, truth: Tensor, error: Callable[[Tensor], Tensor]
) -> tuple[float, float]:
    """The answer and its error from normal draws at the mode near the teacher. Its copies, with
    the vectors in another order, have the same.
    """
    mode, covariance = laplace(target, start=truth)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(4, LAPLACE_DRAWS, len(mode), generator=generator, dtype=torch.float64)
    each = error((mode + z @ torch.linalg.cholesky(covariance).T).to(truth.dtype))
    return float(each.mean()), float(each.std() / 2.0)


def deep_ensemble(
    problem: Problem, examples: float, n_runs: int, *, seed: int = 0, members: int = MEMBERS
) -> Tensor:
    """The members of each run, (runs, members, dim): independent replicas, cooled from temperature
    1 towards 0 in equal ratios, by a factor of 1,000.
    """
    n_steps = int(examples / (members * problem.target.batch_size))
    cooling = schedules.geometric(1e-3 ** (1.0 / n_steps))
    draws = sample(
        problem.target, ladder=Ladder((1.0,), problem.lr, anneal=cooling), n_steps=n_steps,
        n_runs=n_runs * members, burn_in=n_steps - 1, seed=seed,
    )  # fmt: skip
    return draws.values[:, -1].reshape(n_runs, members, -1)


def sgd_restarts(problem: Problem, examples: float, n_runs: int, *, seed: int = 0) -> Tensor:
    """The student of least training energy of each run, (runs, 1, dim), of as many starts from the
    prior as the examples allow. The lr falls to 0 in equal steps; the energy is that of all data.
    """
    target = problem.target
    a_start = RESTART_STEPS * target.batch_size + len(target.data[0])
    starts = max(1, int(examples / a_start))
    draws = sample(
        target, n_steps=RESTART_STEPS, n_runs=n_runs * starts, burn_in=RESTART_STEPS - 1, seed=seed,
        ladder=Ladder.descent(
            RESTART_FACTOR * problem.lr, decay=lambda step: 1.0 - step / RESTART_STEPS
        ),
    )  # fmt: skip
    ends = draws.values[:, -1]
    energy = torch.cat([target.full_energy(part) for part in ends.chunk(starts)])
    best = energy.view(n_runs, starts).argmin(1)
    return ends.reshape(n_runs, starts, -1)[torch.arange(n_runs), best][:, None]
