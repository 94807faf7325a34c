"""The law of a module run: a Bayesian line, `nn.Linear(1, 1)`, whose posterior is known, from
minibatches, with corrected swaps.

Every run begins with exact draws of every rung and is independent of the others, so its time
averages are one honest value each. Minibatches are drawn WITH replacement: N^2 / n * var(l_i) is
the variance of such a batch's energy. That of a batch without replacement is smaller by 1 - n / N.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import torchrex as tr
from assertions import FALSE_ALARM_SIGMAS, assert_mean_is, assert_mean_is_not, intercept

N, BATCH, PRECISION, FRICTION = 240, 60, 120.0, 0.5
# Residuals r of two sizes, so that r^2 / 2 varies: noise that replicas on one batch share and that
# does not enter their difference. Its variance, about 2 here, is what the unpaired estimator
# wrongly counts. The prior weighs a third of the Hessian.
RESIDUALS = (0.25, -0.25, 0.5, -0.5)
X = torch.linspace(-1.0, 2.0, N // len(RESIDUALS), dtype=torch.float64).repeat(len(RESIDUALS))[
    :, None
]
Y = (
    0.1 * X
    - 0.05
    + torch.tensor(RESIDUALS, dtype=torch.float64).repeat_interleave(N // len(RESIDUALS))[:, None]
)
FEATURES = torch.cat([X, torch.ones_like(X)], dim=1)  # of the weight and the bias
# The energy is sum (y - w x - b)^2 / 2 + PRECISION / 2 * |(w, b)|^2, so the law of a rung is
# N(MEAN, temperature / HESSIAN).
HESSIAN = FEATURES.T @ FEATURES + PRECISION * torch.eye(2, dtype=torch.float64)
MEAN = torch.linalg.solve(HESSIAN, FEATURES.T @ Y)[:, 0]
WHITEN = torch.linalg.cholesky(HESSIAN)  # (w - MEAN) @ WHITEN has the covariance temperature * 1
# Learning rates are given in units of 1 / STIFFNESS.
STIFFNESS = float(torch.linalg.eigvalsh(HESSIAN)[-1])


def half_square(prediction, target):
    return 0.5 * (prediction - target).square()


class WithReplacement:
    """Minibatches without end, every example of each drawn independently."""

    def __init__(self, seed, size=BATCH):
        self.generator, self.size = torch.Generator().manual_seed(seed), size

    def __iter__(self):
        while True:
            index = torch.randint(N, (self.size,), generator=self.generator)
            yield X[index], Y[index]


def begin(temperatures, lrs, sampler, seed, **options):
    """A run whose replicas are exact draws of their rungs, momenta included."""
    rungs = iter(temperatures)

    def make_line():  # the engine calls this once for each rung, coldest first, under its own seed
        line = nn.Linear(1, 1, dtype=torch.float64)
        drawn = torch.linalg.solve(WHITEN.T, torch.randn(2, dtype=torch.float64))
        weight, bias = MEAN + math.sqrt(next(rungs)) * drawn
        nn.init.constant_(line.weight, float(weight))
        nn.init.constant_(line.bias, float(bias))
        return line

    energy = tr.PosteriorEnergy(half_square, n_data=N, prior=tr.GaussianPrior(PRECISION))
    ensemble = tr.ModuleEnsemble(
        make_line, energy, sampler, initial="independent", replacement=True
    )
    run = tr.ModuleExchange(ensemble, tr.Ladder(temperatures, lrs), seed=seed, **options)
    if sampler.velocity_std:
        scale = (
            sampler.velocity_std
            * (torch.tensor(lrs) * torch.tensor(temperatures)).double().sqrt()[:, None]
        )
        run.ensemble.sampler_state.velocity.copy_(
            scale * torch.randn(2, 2, generator=torch.Generator().manual_seed(seed))
        )
    return run


def trace(run, n_steps, batches):
    """Whitened weights of every rung, coldest first, (steps, rungs, 2), momenta of rung 0, (steps,
    2), and swaps per step."""
    weights, momenta, swaps = [], [], 0
    for _ in range(n_steps):
        swaps += int(run.step(next(batches)).accepted.sum())
        standing = [run.replica_at(rung) for rung in range(run.n_rungs)]
        weights.append(run.ensemble.position[standing])
        for velocity in run.ensemble.sampler_state:
            momenta.append(velocity[standing[0]].clone())
    return (
        (torch.stack(weights) - MEAN) @ WHITEN,
        torch.stack(momenta) if momenta else None,
        swaps / n_steps,
    )


# The law with swaps, as lr -> 0

TEMPERATURES = (1.0, 3.0)
LRS = [0.01, 0.02, 0.08]  # of rung 0 in units of 1 / STIFFNESS
# One batch decides the swap and gives the gradient, so the lr a replica gets is correlated with the
# gradient's noise. That pulls replicas together and does not vanish with lr; with this noise and
# this ratio of lrs it is below 1 % of the variance of rung 0.
HOT_LR = 1.5
EXACT = {
    "mean w": 0.0,
    "mean b": 0.0,
    "var w": 1.0,
    "var b": 1.0,
    "cov": 0.0,
    "momentum": 1.0,
    "standing": 0.0,
}


def observe(lr, n_runs, *, n_steps=80, **options):
    """Time averages of each run: the moments of the whitened weights and of the momentum on rung 0,
    and who stands there.

    Given the two positions, the one of energy U stands on rung 0 with odds exp(-gap * U) to that of
    the other, so z_0^2 - E[z_0^2 | positions] has the mean 0. It looks at the swaps alone and
    varies little: it is the sharpest on wrong ones."""
    lrs = (lr / STIFFNESS, HOT_LR * lr / STIFFNESS)
    gap = 1.0 / TEMPERATURES[0] - 1.0 / TEMPERATURES[1]
    options = {"noise": tr.PairedVariance(0.3), "correction_factor": 1.0, **options}
    base = round(lr * 1e6) * 1000
    batches = iter(WithReplacement(base))
    values, swaps = [], 0.0
    for k in range(n_runs):
        run = begin(TEMPERATURES, lrs, tr.SGHMC(FRICTION), base + k, **options)
        z, momentum, rate = trace(run, n_steps, batches)
        swaps += rate / n_runs
        w, b = z[:, 0].unbind(-1)
        square, hot_square = z.square().mean(-1).unbind(-1)
        # Summed over the two coordinates, z^2 / 2 is the energy.
        is_other = torch.sigmoid(gap * (square - hot_square))
        v2 = momentum.square().mean(-1) / (lrs[0] * TEMPERATURES[0] * 2.0 / (2.0 - FRICTION))
        seen = (w, b, w * w, b * b, w * b, v2, is_other * (square - hot_square))
        values.append(torch.stack([x.mean() for x in seen]))
    return dict(zip(EXACT, torch.stack(values).T, strict=True)), swaps


def at_zero_lr(n_runs, **options):
    """Distance of each average from its exact value at lr = 0 in standard errors, the errors, and
    swaps per step."""
    results = [
        observe(lr, n_runs * share, **options) for lr, share in zip(LRS, (3, 2, 1), strict=True)
    ]
    fits = {name: intercept(LRS, [values[name] for values, _ in results]) for name in EXACT}
    z = {name: (value - EXACT[name]) / error for name, (value, error) in fits.items()}
    return z, {name: error for name, (_, error) in fits.items()}, results[0][1]


def test_rung_0_tends_to_the_posterior():
    """Mean and covariance of the weights, the momentum, and the odds of standing on rung 0 are
    exact as lr -> 0."""
    z, errors, swaps = at_zero_lr(40)
    assert all(abs(score) < FALSE_ALARM_SIGMAS for score in z.values()), z
    assert max(errors.values()) < 0.1, errors  # so that the test has power
    assert 0.2 < swaps < 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "seen_in", "n_runs"),
    [
        ({"correction_factor": math.inf}, "standing", 40),  # too many swaps: rung 0 is too warm
        (
            {"noise": tr.Smoothing(0.3, tr.PerExample(paired=False))},
            "standing",
            50,
        ),  # corrected too much: it is too cold
        (
            {"momentum": "keep"},
            "momentum",
            20,
        ),  # too fast: a hot momentum comes down with every swap
    ],
    ids=["naive", "unpaired", "keep"],
)
def test_mutants_miss_it(mutant, seen_in, n_runs):
    """The naive test, an unpaired variance on shared batches, and kept momenta are ten standard
    errors off, and more."""
    z, _, swaps = at_zero_lr(n_runs, **mutant)
    assert abs(z[seen_in]) > 2 * FALSE_ALARM_SIGMAS, f"{mutant} passes: {z}"
    assert swaps > 0.1  # it is not seen because nothing moves


# The law without swaps, at an lr


def covariance_of_sgld(lr, batch_size):
    """Of the recursion w' = w - lr G_b(w) + sqrt(2 lr) xi. G_b(w) = g_b + H_b (w - MEAN) is linear,
    so second moments close:

    S = E[(1 - lr H_b) S (1 - lr H_b)] + lr^2 Cov(g_b) + 2 lr"""
    rows, eye = FEATURES.numpy(), np.eye(2)
    # Of one example, for all N; a batch is the mean of n of them.
    slopes = N * np.einsum("ni,nj->nij", rows, rows)
    pulls = N * rows * (FEATURES @ MEAN - Y[:, 0]).numpy()[:, None]
    away = slopes - slopes.mean(0)
    contraction = eye - lr * HESSIAN.numpy()
    multiplied = lr**2 / batch_size * np.einsum("nij,nkl->ikjl", away, away).reshape(4, 4) / N
    added = 2 * lr * eye + lr**2 / batch_size * np.cov(pulls.T, bias=True)
    return np.linalg.solve(
        np.eye(4) - np.kron(contraction, contraction) - multiplied, added.reshape(4)
    ).reshape(2, 2)


def test_one_rung_has_the_law_of_its_recursion():
    """At a large lr and a small batch the covariance is that of the discretised chain, noise of the
    gradient included."""
    lr, batch_size = 0.4 / STIFFNESS, 10
    batches = iter(WithReplacement(1, batch_size))
    runs = [trace(begin((1.0,), (lr,), tr.SGLD(), seed), 100, batches)[0] for seed in range(100)]
    z = torch.stack(runs)[:, 20:, 0]
    expected, exact_gradient = (
        WHITEN.numpy().T @ covariance_of_sgld(lr, n) @ WHITEN.numpy() for n in (batch_size, 10**9)
    )
    for i in range(2):
        assert_mean_is(z[..., i].mean(1), 0.0)
        for j in range(i + 1):
            assert_mean_is((z[..., i] * z[..., j]).mean(1), expected[i, j])
    assert_mean_is_not(z.square().mean((1, 2)), exact_gradient.trace() / 2)
