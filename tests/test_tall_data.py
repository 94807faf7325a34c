"""Bayesian logistic regression on 100,000 rows from minibatches of 256, swaps and paired correction
on.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from assertions import assert_mean_is, assert_mean_is_not
from torchrex.experiments.recipes import get_recipe
from torchrex.runs.config import override


def stationary_covariance(config, mode, covariance):
    """Of SGLD's own recursion near the mode: S = (1 - lr H) S (1 - lr H) + 2 lr + lr^2 C, C the
    covariance of the gradient."""
    features, signs = config.target().data
    pull = torch.sigmoid(-signs * (features @ mode)) * signs
    noise = config.n_data**2 / config.batch_size * torch.cov((pull[:, None] * features).T)
    lr, eye = config.lr_of_mean / config.n_data, np.eye(config.dim)
    transition = eye - lr * np.linalg.inv(covariance.numpy())
    return scipy.linalg.solve_discrete_lyapunov(transition, 2 * lr * eye + lr**2 * noise.numpy())


@pytest.mark.slow
def test_posterior_of_tall_data():
    """Rung 0 has the mean of the full-data reference and the covariance of its recursion; and swaps
    do happen.

    A run long enough for errors of 1 % of a sd is in results/tall_logistic.json."""
    config = override(get_recipe("tall/logistic"), ["n_steps=8000", "n_runs=64"])
    draws = config.draw(seed=1)
    metrics, trace = config.measure(draws)
    mode, covariance = trace["mode"], trace["covariance"]
    expected = stationary_covariance(config, mode, covariance)
    away = draws.values.double() - mode
    for k in range(config.dim):
        # Minibatch gradients widen the law a little.
        assert 1.01 < expected[k, k] / float(covariance[k, k]) < 1.2
        assert_mean_is(away[..., k].mean(1), 0.0)
        assert_mean_is(away[..., k].square().mean(1), expected[k, k])
    # Temperature 2 would be seen.
    assert_mean_is_not(away.square().mean((1, 2)), 2 * float(np.trace(expected)) / config.dim)
    assert metrics["acceptance_rate"] == pytest.approx(0.6, abs=0.15)
