"""Predators and prey: the integrator, the quadrature and the estimates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import torch
from torch.distributions import Normal

from torchrex.experiments import dynamics
from torchrex.experiments.dynamics import (
    FIRST_PREY,
    N_COUNTS,
    NOISE,
    PRIOR_SD,
    constants,
    exact,
    log_prey,
    period,
    posterior,
    share_in_modes,
    share_in_true_mode,
    simulate,
)


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


@pytest.mark.parametrize(("a", "c", "predators"), [(3.9, 3.9, 0.3), (2.0, 3.0, -0.5)])
def test_the_integrator_converges_to_scipys_solution(a, c, predators):
    """By the square of the step. Without its first half step a leapfrog is of first order."""
    years = np.arange(1, N_COUNTS + 1)
    solution = scipy.integrate.solve_ivp(
        lambda t, s: [a * (1 - np.exp(s[1])), c * (np.exp(s[0]) - 1)],
        (0, N_COUNTS), [FIRST_PREY, predators], t_eval=years, rtol=1e-11, atol=1e-11,
    )  # fmt: skip

    def error(steps_a_year: int) -> float:
        state = numbers(math.log(a), math.log(c), predators)
        prey = torch.stack(log_prey(*state, steps_a_year=steps_a_year))
        return float((prey - torch.from_numpy(solution.y[0])).abs().max())

    assert error(64) / error(128) == pytest.approx(4.0, rel=0.02)
    assert error(512) < 2e-3


def test_a_small_cycle_has_the_period_of_the_equilibrium(monkeypatch):
    monkeypatch.setattr(dynamics, "FIRST_PREY", 0.01)
    position = torch.tensor([5.0, 1.0, 0.0], dtype=torch.float64)
    log_a, log_c, _ = constants(position)
    prey = torch.stack(log_prey(log_a, log_c, 0 * log_a, steps_a_year=400))
    years = torch.arange(1, N_COUNTS + 1, dtype=torch.float64)
    expected = 0.01 * torch.cos(2 * math.pi * years / period(position))
    assert torch.allclose(prey, expected, atol=5e-4)


def test_the_integrator_is_stable_wherever_the_prior_goes():
    x = 10 * torch.randn(10_000, 3, generator=torch.Generator().manual_seed(0))
    energy = posterior().full_energy(x * torch.tensor(PRIOR_SD))
    assert bool(energy.isfinite().all())


def test_the_target_is_the_posterior_of_the_counts():
    """Energy by hand in numpy, and no other with all the data at every step."""
    target = posterior().to("cpu", torch.float64)
    x = torch.tensor([12.0, -0.5, 1.0], dtype=torch.float64)
    log_a, log_c, v = (float(each) for each in constants(x))
    u, h = FIRST_PREY, 1.0 / dynamics.STEPS_A_YEAR
    a, c, prey = math.exp(log_a), math.exp(log_c), []
    for step in range(N_COUNTS * dynamics.STEPS_A_YEAR):
        v += 0.5 * h * c * (math.exp(u) - 1.0)
        u += h * a * (1.0 - math.exp(v))
        v += 0.5 * h * c * (math.exp(u) - 1.0)
        if (step + 1) % dynamics.STEPS_A_YEAR == 0:
            prey.append(u)
    away = (simulate().numpy() - np.array(prey)) / NOISE
    prior = Normal(torch.zeros(3), torch.tensor(PRIOR_SD)).log_prob(x).sum()
    expected = 0.5 * float((away**2).sum()) - float(prior)
    assert float(target.full_energy(x)) == pytest.approx(expected, rel=1e-6)
    assert not target.has_noise
    assert float(target.energy(x[None, None], {}).total) == pytest.approx(expected, rel=1e-6)


def test_the_exact_answer_by_importance_sampling():
    """Draws of the prior, weighted by the likelihood: another way, with a known standard error."""
    target, n = posterior(), 400_000
    x = torch.tensor(PRIOR_SD) * torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    energy = torch.cat(
        [target.full_energy(part) + target.log_prior(part) for part in x.split(2**16)]
    )
    weight = torch.softmax(-energy.double(), 0)
    inside = share_in_true_mode(x[:, None])
    share = float((weight * inside).sum())
    error = float((weight * (inside - share)).square().sum().sqrt())
    assert error < 0.02
    assert abs(share - exact()) < 5 * error
    assert exact(coarser=2) == pytest.approx(exact(), abs=1e-6)


def test_both_modes_have_mass_and_nothing_lies_between():
    points, density = dynamics.density_on_grid()
    outside = 1.0 - float((density * share_in_modes(points[:, None])).sum())
    assert 0.4 < exact() < 0.7
    assert outside < 1e-3
    assert float(density.sum()) == pytest.approx(1.0)


def test_estimates_of_known_points():
    def at(years: float) -> list[float]:
        away = math.log(dynamics.MIDDLE_PERIOD / years) / dynamics.WIDEST[0]
        return [dynamics.SCALE[0] * math.atanh(away), 0.0, 0.0]

    x = torch.tensor([[at(1.6), at(1.6), at(2.4), at(5.0)]])
    assert torch.allclose(period(x), torch.tensor([[1.6, 1.6, 2.4, 5.0]]))
    assert share_in_true_mode(x).tolist() == [0.5]
    assert share_in_modes(x).tolist() == [0.75]
