"""Wasserstein distances and disagreement, against closed forms and brute force."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from scipy import stats

from assertions import assert_mean_is, assert_mean_is_not
from torchrex.diagnostics import (
    assigned_w2,
    line_distance,
    replica_disagreement,
    same_law_distance,
    sliced_w2,
    transported,
)
from torchrex.errors import InvalidArgumentError, MissingDependencyError


def cloud(n, dim, seed=0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHIFT = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def test_line_distance_of_a_shift_and_of_unequal_sizes():
    x = cloud(50, 1)[:, 0]
    for order in (1, 2):
        assert float(line_distance(x, x.flip(0) + 3.0, order)) == pytest.approx(3.0)
        # The same law.
        assert float(line_distance(x, x.repeat(3), order)) == pytest.approx(0.0, abs=1e-12)
    y = cloud(73, 1, seed=1)[:, 0]
    assert float(line_distance(x, y, 1)) == pytest.approx(stats.wasserstein_distance(x, y))
    # The same laws with equal sizes.
    once = line_distance(x.repeat_interleave(73), y.repeat_interleave(50), 2)
    assert float(line_distance(x, y, 2)) == pytest.approx(float(once))
    # Masses 1/2, 1/2 at 0, 1 against 1/3 at 0, 1, 2: moved by hand, 1/6 from 0 to 1 and 1/3 from 1
    # to 2.
    assert float(
        line_distance(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0, 2.0]), 2)
    ) == pytest.approx(math.sqrt(0.5))
    with pytest.raises(InvalidArgumentError, match="1 or 2"):
        line_distance(x, y, 3)


def test_sliced_distance_of_a_shift():
    """W2 along t is |t . c|, so SW2^2 = |c|^2 / dim: exact over directions, and the stated error is
    that of repetitions.
    """
    x = cloud(40, 3)
    y = (x + SHIFT)[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    estimates = [sliced_w2(x, y, n_directions=64, seed=seed) for seed in range(1000)]
    value, error = (torch.stack(part) for part in zip(*estimates, strict=True))
    exact = math.sqrt(float(SHIFT.square().sum()) / 3)
    assert_mean_is(value.square(), exact**2)
    assert float((2 * value * error).square().mean().sqrt()) == pytest.approx(
        float(value.square().std()), rel=0.12
    )
    # The mutant: directions that are not of length 1.
    assert_mean_is_not(value.square(), float(SHIFT.square().sum()))
    assert torch.equal(sliced_w2(x, y, seed=3).value, sliced_w2(x, y, seed=3).value)
    same = sliced_w2(x, x)
    assert (float(same.value), float(same.error)) == (0.0, 0.0)


def test_assignment_is_the_cheapest_of_all_pairings():
    x, y = cloud(6, 2), cloud(6, 2, seed=1)
    cost = (x[:, None] - y[None]).square().sum(-1)
    cheapest = min(
        float(sum(cost[i, j] for i, j in enumerate(order))) / 6
        for order in itertools.permutations(range(6))
    )
    assert assigned_w2(x, y) == pytest.approx(math.sqrt(cheapest))
    assert assigned_w2(x.float() + 1e4, x.float() + 1e4) == 0.0
    far = cloud(200, 3)
    assert assigned_w2(far, far.flip(0) + SHIFT) == pytest.approx(float(SHIFT.norm()))
    line = cloud(50, 1)
    assert assigned_w2(line, 2 * line.flip(0)) == pytest.approx(
        float(line_distance(line[:, 0], 2 * line[:, 0]))
    )


def test_weighted_transport():
    pytest.importorskip("ot", reason="POT is not installed (pip install 'torchrex[diagnostics]')")
    x, y = cloud(7, 2), cloud(7, 2, seed=1)
    assert transported(x, y) == pytest.approx(assigned_w2(x, y), rel=1e-6)
    a, b = cloud(5, 1), cloud(8, 1, seed=2)
    for order in (1, 2):
        on_the_line = float(line_distance(a[:, 0], b[:, 0], order))
        assert transported(a, b, order=order) == pytest.approx(on_the_line, rel=1e-6)
    # Weight 3 : 1 is the same as the point three times.
    heavy = transported(a[:2], b, x_weights=torch.tensor([3.0, 1.0]))
    assert heavy == pytest.approx(transported(torch.cat([a[:1]] * 3 + [a[1:2]]), b), rel=1e-6)
    for weights in (torch.ones(3), -torch.ones(8), torch.zeros(8), torch.full((8,), math.nan)):
        with pytest.raises(InvalidArgumentError, match="y_weights"):
            transported(a, b, y_weights=weights)


def test_without_pot(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(MissingDependencyError, match=r"torchrex\[diagnostics\]"):
        transported(cloud(2, 2), cloud(3, 2))


def test_same_law_distance_is_the_floor():
    """W2 between two samples of 500 of N(0, 1): far from 0, near what fresh samples show."""

    def on_the_line(x, y):
        return float(line_distance(x[:, 0], y[:, 0]))

    fresh = torch.tensor(
        [on_the_line(cloud(500, 1, seed=2 * k), cloud(500, 1, seed=2 * k + 1)) for k in range(300)]
    )
    floors = torch.stack(
        [
            same_law_distance(cloud(1000, 1, seed=1000 + k), on_the_line, seed=k).value
            for k in range(300)
        ]
    )
    assert float(floors.mean()) == pytest.approx(
        float(fresh.mean()), abs=5 * float((fresh.var() / 300 + floors.var() / 300).sqrt())
    )
    assert float(fresh.mean()) > 0.05
    shifted = on_the_line(cloud(500, 1), cloud(500, 1, seed=1) + 1.0)
    assert shifted > 5 * float(floors.mean())
    estimate = same_law_distance(cloud(100, 2), assigned_w2, repeats=5)
    assert float(estimate.error) > 0


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: sliced_w2(cloud(4, 2), cloud(4, 3)), "two clouds"),
        (lambda: sliced_w2(cloud(4, 2), cloud(4, 2), n_directions=1), "n_directions"),
        (lambda: assigned_w2(cloud(4, 2), cloud(5, 2)), "equal size"),
        (lambda: assigned_w2(cloud(0, 2), cloud(0, 2)), "two clouds"),
        (lambda: same_law_distance(cloud(1, 2), assigned_w2), "2 points"),
    ],
)
def test_bad_clouds(make, word):
    with pytest.raises(InvalidArgumentError, match=word):
        make()


SURE = torch.eye(3, dtype=torch.float64)  # row c: class c for certain


def test_certain_replicas():
    """Three replicas, four examples: 0 and 1 differ on one, 0 and 2 on all, 1 and 2 on three."""
    choices = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 2], [1, 2, 0, 2]])
    result = replica_disagreement(SURE[choices])
    expected = torch.tensor(
        [[0.0, 0.25, 1.0], [0.25, 0.0, 0.75], [1.0, 0.75, 0.0]], dtype=torch.float64
    )
    assert torch.allclose(result.differing, expected)
    # Two different certainties: log 2.
    assert torch.allclose(result.divergence, expected * math.log(2))
    assert float(result.mean_differing.value) == pytest.approx(2 / 3)
    split = math.log(3) - 2 / 3 * math.log(2)  # entropy of 1/3, 2/3
    # Every example splits the three 1 : 2.
    assert float(result.mutual_information.value) == pytest.approx(split)


def test_two_probabilities_by_hand_and_two_replicas_have_one_number():
    p, q = torch.tensor([0.9, 0.1]), torch.tensor([0.4, 0.6])
    result = replica_disagreement(torch.stack([p, q])[:, None])

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    middle = [0.65, 0.35]
    exact = 0.5 * kl([0.9, 0.1], middle) + 0.5 * kl([0.4, 0.6], middle)
    assert float(result.divergence[0, 1]) == pytest.approx(exact, rel=1e-6)
    assert float(result.mutual_information.value) == pytest.approx(exact, rel=1e-6)
    assert result.mutual_information.error.isnan()  # of one example there is no spread


def test_the_information_of_independent_guesses():
    """Two replicas certain of random classes of three differ with probability 2/3."""
    choices = torch.randint(3, (400, 2, 100), generator=torch.Generator().manual_seed(0))
    results = [replica_disagreement(SURE[choice]) for choice in choices]
    differing = torch.stack([result.mean_differing.value for result in results])
    information = torch.stack([result.mutual_information.value for result in results])
    assert_mean_is(differing, 2 / 3)
    assert_mean_is(information, 2 / 3 * math.log(2))
    assert_mean_is_not(information, 2 / 3)  # in bits
    stated = torch.stack([result.mean_differing.error for result in results]).square()
    assert_mean_is(stated, (2 / 9) / 100)


@pytest.mark.parametrize(
    "probabilities",
    [
        torch.full((1, 4, 2), 0.5),
        torch.full((4, 2), 0.5),
        torch.randn(2, 4, 3),
        torch.full((2, 4, 3), math.nan),
        torch.ones(2, 4, 3),
    ],
)
def test_bad_probabilities(probabilities):
    with pytest.raises(InvalidArgumentError, match="probabilities"):
        replica_disagreement(probabilities)
