"""SGLD and SGHMC have the stationary law of their own recursion, and are plain descent at
temperature 0.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.samplers import sghmc, sgld

RUNS, STIFFNESS, LR, TEMPERATURE, FRICTION = 400_000, 2.0, 0.3, 1.7, 0.25


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


def after_sgld(variance, *, slip=1.0, steps=5):
    """x^2 after some moves from N(0, variance); a stationary variance comes back unchanged."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RUNS, generator=generator, dtype=torch.float64) * variance**0.5
    for _ in range(steps):
        noise = slip * torch.randn(RUNS, generator=generator, dtype=torch.float64)
        x = sgld(x, STIFFNESS * x, noise, lr=tensor(LR), temperature=tensor(TEMPERATURE))
    return x.square()


def test_sgld_keeps_the_variance_of_its_recursion():
    exact = TEMPERATURE / (STIFFNESS * (1 - LR * STIFFNESS / 2))
    assert_mean_is(after_sgld(exact), exact)
    assert_mean_is_not(
        after_sgld(TEMPERATURE / STIFFNESS), TEMPERATURE / STIFFNESS
    )  # the law without step size is not its own
    assert_mean_is_not(
        after_sgld(exact, slip=0.5**0.5), exact
    )  # the mutant: sqrt(lr tau) instead of sqrt(2 lr tau)


def sghmc_covariance():
    """Stationary covariance of (x, v) from the discrete Lyapunov equation of the recursion."""
    keep, pull = 1 - FRICTION, LR * STIFFNESS
    transition = np.array([[1 - pull, keep], [-pull, keep]])
    kick = 2 * FRICTION * LR * TEMPERATURE * np.ones((2, 2))  # the same noise enters v' and x'
    return scipy.linalg.solve_discrete_lyapunov(transition, kick)


def after_sghmc(covariance, *, friction=FRICTION, steps=5):
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(RUNS, 2, generator=generator, dtype=torch.float64)
    x, v = (z @ torch.as_tensor(np.linalg.cholesky(covariance)).T).unbind(-1)
    for _ in range(steps):
        noise = torch.randn(RUNS, generator=generator, dtype=torch.float64)
        x, v = sghmc(
            x,
            v,
            STIFFNESS * x,
            noise,
            lr=tensor(LR),
            temperature=tensor(TEMPERATURE),
            friction=friction,
        )
    return x, v


def test_sghmc_keeps_the_covariance_of_its_recursion():
    covariance = sghmc_covariance()
    x, v = after_sghmc(covariance)
    assert_mean_is(x.square(), covariance[0, 0])
    assert_mean_is(v.square(), covariance[1, 1])
    assert_mean_is(x * v, covariance[0, 1])
    x, v = after_sghmc(covariance, friction=0.7 * FRICTION)  # the mutant
    assert_mean_is_not(v.square(), covariance[1, 1])


def test_sghmc_covariance_tends_to_gibbs():
    """As lr -> 0, Var x -> tau / a and Var v -> 2 lr tau / (2 - friction): what momentum rescaling
    relies on.
    """
    global LR
    before, LR = LR, 1e-6
    try:
        covariance = sghmc_covariance()
        assert covariance[0, 0] == pytest.approx(TEMPERATURE / STIFFNESS, rel=1e-4)
        assert covariance[1, 1] == pytest.approx(2 * LR * TEMPERATURE / (2 - FRICTION), rel=1e-4)
    finally:
        LR = before


def quadratic(x):
    return -0.5 * (torch.tensor([1.0, 3.0], dtype=x.dtype) * x.square()).sum(-1)


@pytest.mark.parametrize(("sampler", "momentum"), [(tr.SGLD(), 0.0), (tr.SGHMC(friction=0.1), 0.9)])
def test_temperature_zero_is_exactly_sgd(sampler, momentum):
    draws = tr.sample(
        quadratic, dim=2, ladder=tr.Ladder.descent(0.1), sampler=sampler, n_steps=50, initial=torch.tensor([1.0, -2.0]),
        dtype=torch.float64,
    )  # fmt: skip
    x = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimiser = torch.optim.SGD([x], lr=0.1, momentum=momentum)
    for step in range(50):
        optimiser.zero_grad()
        (-quadratic(x)).backward()
        optimiser.step()
        assert torch.allclose(draws.values[0, step], x.detach(), rtol=1e-12, atol=1e-14)


def test_lr_may_be_a_tensor_per_element():
    x, lr = torch.ones(3), torch.tensor([0.0, 0.1, 0.2])
    assert torch.allclose(sgld(x, x, torch.zeros(3), lr=lr, temperature=torch.zeros(3)), 1 - lr)


@pytest.mark.parametrize("friction", [0.0, 1.5, float("nan")])
def test_bad_friction(friction):
    with pytest.raises(ValueError, match="friction"):
        tr.SGHMC(friction=friction)
