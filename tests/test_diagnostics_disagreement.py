"""Disagreement between replicas, against numbers by hand and a simulated law."""

from __future__ import annotations

import math

import pytest
import torch

from assertions import assert_mean_is, assert_mean_is_not
from torchrex.diagnostics import replica_disagreement
from torchrex.errors import InvalidArgumentError

SURE = torch.eye(3, dtype=torch.float64)  # row c: class c for certain


def test_certain_replicas():
    """Three replicas, four examples: 0 and 1 differ on one, 0 and 2 on all, 1 and 2 on three."""
    choices = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 2], [1, 2, 0, 2]])
    result = replica_disagreement(SURE[choices])
    expected = torch.tensor(
        [[0.0, 0.25, 1.0], [0.25, 0.0, 0.75], [1.0, 0.75, 0.0]], dtype=torch.float64
    )
    assert torch.allclose(result.differing, expected)
    assert torch.allclose(
        result.divergence, expected * math.log(2)
    )  # two different certainties: log 2
    assert float(result.mean_differing.value) == pytest.approx(2 / 3)
    split = math.log(3) - 2 / 3 * math.log(2)  # entropy of 1/3, 2/3
    assert float(result.mutual_information.value) == pytest.approx(
        split
    )  # every example splits the three 1 : 2


def test_no_disagreement():
    p = (
        torch.rand(1, 20, 5, generator=torch.Generator().manual_seed(0))
        .softmax(-1)
        .expand(4, 20, 5)
    )
    result = replica_disagreement(p)
    assert not result.differing.any()
    assert float(result.divergence.abs().max()) < 1e-12
    assert float(result.mutual_information.value) == pytest.approx(0.0, abs=1e-12)


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
    """Two replicas certain of independent random classes of three: they differ with probability
    2/3.
    """
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
    ("probabilities", "word"),
    [
        (torch.full((1, 4, 2), 0.5), "2 replicas or more"),
        (torch.full((4, 2), 0.5), "replicas, n, classes"),
        (torch.randn(2, 4, 3), "softmax"),
        (torch.full((2, 4, 3), math.nan), "softmax"),
        (torch.ones(2, 4, 3), "softmax"),
    ],
)
def test_bad_probabilities(probabilities, word):
    with pytest.raises(InvalidArgumentError, match=word):
        replica_disagreement(probabilities)
