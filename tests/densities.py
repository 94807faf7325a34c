"""Runs on densities in all their kinds, small enough to be run whole: every sampler, pairing, noise
estimator and rule for F.

`SETUPS` are arguments of `sample`, and of `DensityExchange` once target, sampler and ladder are
taken out.
"""

from __future__ import annotations

import torch

import torchrex as tr
from torchrex.targets import logistic_regression, simulate_logistic

MIXTURE = tr.GaussianMixture([0.4, 0.6], [-3.0, 2.0], [0.7, 0.5])


def tall():
    return logistic_regression(*simulate_logistic(500, 3)[:2], batch_size=32)


def with_prior():
    features, labels, _ = simulate_logistic(500, 3)
    return logistic_regression(features, labels, batch_size=32, prior_precision=0.25)


SETUPS = {
    "the paper's": {
        "target": lambda: tr.Noisy(MIXTURE, tr.Gaussian(2.0)),
        "ladder": tr.Ladder((1.0, 10.0), 0.03),
        "noise": tr.RunningMean(tr.RepeatedDraws(10, 37), initial=100.0),
    },
    "one rung": {"target": lambda: MIXTURE, "ladder": tr.Ladder((1.0,), 0.03)},
    "one rung, tall data": {"target": tall, "ladder": tr.Ladder((1.0,), 1e-4)},
    "sghmc, refreshed, random pairs": {
        "target": lambda: tr.Noisy(MIXTURE, tr.StudentT(5.0), gradient=tr.Gaussian(0.3)),
        "sampler": tr.SGHMC(0.2),
        "ladder": tr.Ladder.geometric(1.0, 10.0, 4, lrs=(0.01, 0.01, 0.02, 0.03)),
        "momentum": "refresh",
        "pairing": tr.RandomPair(),
        "swap_interval": 2,
    },
    "all in turn, adaptive factor": {
        "target": lambda: tr.Noisy(MIXTURE, tr.Gaussian(1.0)),
        "ladder": tr.Ladder((1.0, 3.0, 9.0), 0.03),
        "pairing": tr.AllInTurn(),
        "correction_factor": tr.TargetAcceptance(0.4),
        "swap_intensity": 20.0,
    },
    "the authors' rules": {
        "target": lambda: tr.Noisy(MIXTURE, tr.Gaussian(2.0)),
        "sampler": tr.SGHMC(0.2),
        "ladder": tr.Ladder((1.0, 3.0, 9.0), 0.03, noise=lambda step: 1.0 + 0.01 * step),
        "noise": tr.Smoothing(0.3, tr.RepeatedDraws(10, every=50)),
        "correction_factor": tr.ProportionalToGap(4.0, per_swap=0.99),
        "swap_start": 20,
        "swap_rest": 3,
    },
    "tall data, swap batch": {
        "target": tall,
        "sampler": tr.SGHMC(0.1),
        "ladder": tr.Ladder((1.0, 1.5, 2.0), (1e-4, 2e-4, 3e-4)),
        "momentum": "refresh",
        "swap_batch": 100,
        "swap_interval": 3,
        "swap_start": 10,
    },
    "tall data, all data in turn, likelihood": {
        "target": with_prior,
        "ladder": tr.Ladder.for_likelihood((1.0, 10.0, float("inf")), 1e-4, prior_variance=4.0),
        "tempering": "likelihood",
        "pairing": tr.AllInTurn(),
        "swap_batch": "full",
        "swap_interval": 7,
    },
    "tall data, paired, annealed": {
        "target": tall,
        "sampler": tr.SGHMC(0.1),
        "ladder": tr.Ladder(
            (1.0, 1.2),
            (1e-4, 2e-4),
            anneal=tr.schedules.geometric(0.999),
            decay=tr.schedules.cyclical(50, end=0.1),
        ),
        "correction_factor": tr.ProportionalToGap(2.0),
        "noise": tr.PairedVariance(0.3),
    },
}

DRAWN = ("values", "steps", "noise_variance", "replica_at", "energy", "accepted", "proposed")


def assert_same_draws(a, b):
    for name in DRAWN:
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.n_steps, a.status, a.settings) == (b.n_steps, b.status, b.settings)
