"""Three thermometers against laws of known temperature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.diagnostics import (
    equipartition_temperature,
    hypervirial_temperature,
    kinetic_temperature,
)
from torchrex.errors import InvalidArgumentError
from torchrex.samplers import sgld

CHAINS, DRAWS, DIM, TAU = 400, 50, 3, 1.7
LR, FRICTION = 0.04, 0.3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def each_chain(thermometer, *tensors, **options):
    """Readings of independent chains, one by one."""
    return torch.stack(
        [thermometer(*(t[c : c + 1] for t in tensors), **options).value for c in range(CHAINS)]
    )


def quartic():
    """Draws of exp(-U / tau), U = sum x^4, which is far from quadratic: x^4 / tau is Gamma(1/4)."""
    generator = np.random.default_rng(0)
    size = torch.from_numpy(generator.gamma(0.25, TAU, (CHAINS, DRAWS, DIM)) ** 0.25)
    x = size * torch.from_numpy(generator.choice([-1.0, 1.0], (CHAINS, DRAWS, DIM)))
    return x, 4 * x**3, (12 * x**2).sum(-1)


def mixture():
    """Two unlike modes: nothing is centred, and the temperature is 1."""
    target = tr.GaussianMixture(
        [0.3, 0.7], [[-4.0, 0.0, 1.0], [3.0, 1.0, 1.0]], [[0.7, 0.5, 1.0], [1.0, 1.2, 0.4]]
    )
    x = target.sample(CHAINS * DRAWS, generator=torch.Generator().manual_seed(0))
    _, gradient = target.energy_and_gradient(x, {})
    hessian = torch.func.vmap(
        torch.func.hessian(lambda point: -target.log_density(point[None])[0])
    )(x)
    shape = (CHAINS, DRAWS, DIM)
    return (
        x.view(shape),
        gradient.view(shape),
        hessian.diagonal(dim1=-2, dim2=-1).sum(-1).view(CHAINS, DRAWS),
    )


@pytest.mark.parametrize(("draws", "tau"), [(quartic, TAU), (mixture, 1.0)])
def test_configurational_temperatures_of_exact_draws(draws, tau):
    x, gradient, laplacian = draws()
    zero = torch.zeros(DIM)
    assert_mean_is(each_chain(equipartition_temperature, x, gradient, centre=zero), tau)
    # Any centre will do.
    assert_mean_is(each_chain(equipartition_temperature, x, gradient, centre=zero + 5.0), tau)
    assert_mean_is_not(each_chain(equipartition_temperature, x, 1.3 * gradient, centre=zero), tau)
    # Of other positions.
    assert_mean_is_not(
        each_chain(equipartition_temperature, x, gradient.roll(1, 1), centre=zero), tau
    )
    value, error = hypervirial_temperature(gradient, laplacian)
    assert abs(float(value) - tau) < 5 * float(error)
    assert abs(float(hypervirial_temperature(gradient, 1.1 * laplacian).value) - tau) > 5 * float(
        error
    )
    assert float(error) < 0.02 * tau


def test_the_mean_of_the_draws_as_centre_costs_one_draw():
    x, gradient, _ = quartic()
    assert_mean_is(each_chain(equipartition_temperature, x, gradient), TAU * (1 - 1 / DRAWS))
    x = x + 30.0
    far = equipartition_temperature(x, gradient, centre=torch.zeros(DIM))
    near = equipartition_temperature(x, gradient)
    assert abs(float(far.value) - TAU) < 5 * float(far.error)
    assert abs(float(near.value) - TAU) < 5 * float(near.error)
    assert float(near.error) < 0.1 * float(far.error)


def test_the_stated_errors_are_those_of_repetitions():
    """Blocks of 8 chains: the mean square of the stated error is the variance of the reading."""
    x, gradient, laplacian = quartic()
    blocks = [slice(c, c + 8) for c in range(0, CHAINS, 8)]
    for thermometer, tensors in (
        (equipartition_temperature, (x, gradient)),
        (hypervirial_temperature, (gradient, laplacian)),
    ):
        readings = [thermometer(*(tensor[block] for tensor in tensors)) for block in blocks]
        spread = torch.stack([reading.value for reading in readings]).std()
        stated = torch.stack([reading.error for reading in readings]).square().mean().sqrt()
        # 50 blocks: 10 % each way, times 5.
        assert float(stated) == pytest.approx(float(spread), rel=0.5)


def test_minibatch_gradients():
    """Noise leaves equipartition alone, spoils |g|^2, and a second minibatch mends it."""
    x, gradient, laplacian = mixture()
    first, second = (gradient + 0.8 * normal(*gradient.shape, seed=seed) for seed in (1, 2))
    assert_mean_is(each_chain(equipartition_temperature, x, first, centre=torch.zeros(DIM)), 1.0)
    value, error = hypervirial_temperature(first, laplacian)
    assert float(value) - 1.0 > 10 * float(error)
    value, error = hypervirial_temperature(first, laplacian, other_gradient=second)
    assert abs(float(value) - 1.0) < 5 * float(error)


def test_sgld_is_as_hot_as_its_step_makes_it():
    """Stiffness a: tau / (1 - lr a / 2), and the thermometers say so."""
    stiffness, lr = 2.0, 0.3
    true = TAU / (1 - lr * stiffness / 2)
    x = math.sqrt(true / stiffness) * normal(CHAINS, 20, DIM)
    for step in range(5):
        noise, rates = normal(*x.shape, seed=step + 1), {"lr": torch.tensor(lr)}
        x = sgld(x, stiffness * x, noise, temperature=torch.tensor(TAU), **rates)
    readings = each_chain(equipartition_temperature, x, stiffness * x, centre=torch.zeros(DIM))
    assert_mean_is(readings, true)
    assert_mean_is_not(readings, TAU)


def stationary_velocities(stiffness, lr):
    """Exact draws of v under the stationary law of the SGHMC recursion, and its variance."""
    keep, pull = 1 - FRICTION, lr * stiffness
    transition = np.array([[1 - pull, keep], [-pull, keep]])
    variance = scipy.linalg.solve_discrete_lyapunov(
        transition, 2 * FRICTION * lr * TAU * np.ones((2, 2))
    )[1, 1]
    return math.sqrt(variance) * normal(CHAINS, DRAWS, DIM), variance


def test_kinetic_temperature():
    sampler = tr.SGHMC(friction=FRICTION)
    soft, _ = stationary_velocities(1e-4, LR)
    assert_mean_is(each_chain(kinetic_temperature, soft, lr=LR, sampler=sampler), TAU)
    # The mutant: without the factor 2 / (2 - friction).
    assert_mean_is_not(soft.square().mean((1, 2)) / LR, TAU)
    stiff, variance = stationary_velocities(8.0, LR)
    assert_mean_is(
        each_chain(kinetic_temperature, stiff, lr=LR, sampler=sampler),
        variance * (2 - FRICTION) / 2 / LR,
    )
    # A step too large shows.
    assert_mean_is_not(each_chain(kinetic_temperature, stiff, lr=LR, sampler=sampler), TAU)


def test_kinetic_temperature_of_a_run():
    """All rungs at once, from the recursion itself."""
    sampler = tr.SGHMC(friction=FRICTION)
    temperature = torch.tensor([1.0, 4.0], dtype=torch.float64).view(2, 1, 1, 1)
    rates = {"lr": torch.tensor(0.01), "temperature": temperature}
    x = torch.zeros(2, 100, 1, DIM, dtype=torch.float64)
    state, kept = sampler.init(x), []
    for step in range(300):
        noise = normal(*x.shape, seed=step)
        x, state = sampler.move(x, state, 0.1 * x, noise, step=step, **rates)
        kept += [state.velocity] if step >= 100 else []
    value, error = kinetic_temperature(torch.cat(kept, dim=2), lr=0.01, sampler=sampler)
    assert value.shape == error.shape == (2,)
    assert bool(((value - torch.tensor([1.0, 4.0])).abs() < 5 * error).all())
    assert bool((error < 0.03 * value).all())


FLAT, POINTS = torch.zeros(3, 4), torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: kinetic_temperature(POINTS, lr=0.1, sampler=tr.SGLD()), "velocities"),
        (lambda: kinetic_temperature(POINTS, lr=0.0, sampler=tr.SGHMC()), "positive"),
        (lambda: equipartition_temperature(FLAT, FLAT), "chains, draws, dim"),
        (lambda: equipartition_temperature(POINTS, POINTS[..., :1]), "equal shape"),
        (lambda: hypervirial_temperature(POINTS, torch.zeros(2, 4)), "one number per draw"),
    ],
)
def test_bad_input(make, word):
    with pytest.raises(InvalidArgumentError, match=word):
        make()
