"""Teacher and student: the target, the answer, and the methods that do not sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from assertions import assert_mean_is, assert_mean_is_not
from torchrex.experiments import teacher as module
from torchrex.experiments.teacher import (
    NOISE,
    deep_ensemble,
    error_by_laplace,
    predictions,
    sgd_restarts,
    simulate,
    teacher,
)
from torchrex.targets import laplace


@pytest.fixture(scope="module")
def problem():
    return teacher(k=3, n_data=300, batch_size=20, lr=3e-6)


def test_the_teacher_is_what_the_data_come_from():
    """The residuals are the noise, and the test outputs have none."""
    (points, outputs), (test, exact) = simulate(5, 20_000)
    away = (outputs - predictions(5, torch.eye(5).flatten(), points)) / NOISE
    assert_mean_is(away, 0.0)
    assert_mean_is(away.square(), 1.0)
    assert_mean_is_not(away.square(), 1.5)
    assert torch.equal(exact, predictions(5, torch.eye(5).flatten(), test))
    # relu(z) of a normal z: mean 1 / sqrt(2 pi).
    assert_mean_is(exact / 5, 1.0 / math.sqrt(2.0 * math.pi))


def test_the_energy_is_that_of_numpy(problem):
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    points, outputs = (each.double().numpy() for each in problem.target.data)
    for each, energy in zip(x.double().numpy(), problem.target.full_energy(x), strict=True):
        network = np.maximum(points @ each.reshape(3, 3).T, 0.0).sum(1)
        prior = 0.5 * 3 * (each**2).sum() + 4.5 * math.log(2 * math.pi / 3)
        expected = 0.5 * (((outputs - network) / NOISE) ** 2).sum() + prior
        assert float(energy) == pytest.approx(expected, rel=1e-5)


def test_estimate_and_found_on_known_students(problem):
    """The order of the vectors does not matter; two at one place are a spurious student."""
    eye = torch.eye(3)
    swapped, doubled = eye[[2, 0, 1]], eye[[0, 0, 1]]
    x = torch.stack([eye, swapped, doubled]).flatten(1)[:, None]  # three runs of one draw
    _, (test, _) = simulate(3, 300)
    spurious = (test[:, 0].relu() - test[:, 2].relu()).square().mean()
    expected = torch.tensor([0.0, 0.0, float(spurious)])
    assert torch.allclose(problem.estimate(x), expected, atol=1e-10)
    assert problem.found(x).tolist() == [1.0, 1.0, 0.0]
    both = torch.cat([x[:1], x[2:]], 1)  # the mean prediction has half the residual
    assert float(problem.estimate(both)) == pytest.approx(float(spurious) / 4, rel=1e-4)
    assert problem.found(both).tolist() == [0.5]


def test_the_answer_at_the_teacher_is_that_of_least_squares():
    """With fixed signs of all units the student is linear in its weights, and the posterior mean is
    known; the error of its prediction is that of the answer, but for curvature.
    """
    k, n = 3, 3_000
    made = teacher(k=k, n_data=n)
    (points, outputs), (test, exact) = simulate(k, n)

    def design(z: torch.Tensor) -> torch.Tensor:
        """(n, k k): the gradient of the student at the teacher."""
        return ((z > 0).double()[:, :, None] * z.double()[:, None]).flatten(1)

    features, precision = design(points), k * NOISE**2
    gram = features.T @ features + precision * torch.eye(k * k)
    mean = torch.linalg.solve(gram, features.T @ outputs.double())
    expected = float((design(test) @ mean - exact).square().mean())
    exact, error = made.answer()
    assert exact == pytest.approx(expected, rel=0.15)
    assert error < 0.05 * exact
    answer, _ = error_by_laplace(made.target, torch.eye(k).flatten(), made.estimate)
    assert answer == exact


def test_sgd_with_restarts_keeps_the_student_of_least_energy(problem, monkeypatch):
    """At this width most starts end at the teacher. The mutant keeps the worst of three."""
    monkeypatch.setattr(module, "RESTART_STEPS", 600)
    best = sgd_restarts(problem, 3 * (600 * 20 + 300), 2, seed=1)
    assert best.shape == (2, 1, 9)
    assert problem.found(best).tolist() == [1.0, 1.0]
    one = sgd_restarts(problem, 600 * 20 + 300, 6, seed=1)  # the same starts, one each
    energy = problem.target.full_energy(one[:, 0]).view(2, 3)
    assert torch.allclose(problem.target.full_energy(best[:, 0]), energy.amin(1))
    assert bool((energy.amax(1) > energy.amin(1)).all())


def test_a_deep_ensemble_is_cooled(problem):
    """Twice the energy above that of the mode is chi-square of 9 degrees at temperature 1. One
    member of a hundred would be below 1; at least half are. Minibatches add the rest.
    """
    members = deep_ensemble(problem, 8 * 20 * 2_000, 2, seed=1, members=8)
    assert members.shape == (2, 8, 9)
    assert scipy.stats.chi2(9).cdf(2 * 1.0) < 0.01
    mode, _ = laplace(problem.target, start=torch.eye(3).flatten())
    energy = problem.target.full_energy(members.flatten(0, 1))
    above = energy - problem.target.full_energy(mode.float())
    assert float(above.min()) > -1e-2
    assert float(above.median()) < 1.0
