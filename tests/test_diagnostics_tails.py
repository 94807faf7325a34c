"""The tail index, and how often its verdict is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from assertions import assert_mean_is, assert_mean_is_not
from torchrex.diagnostics import hill
from torchrex.errors import InvalidArgumentError


def student(df, shape, seed=0):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(
        generator.standard_normal(shape) if df == math.inf else generator.standard_t(df, shape)
    )


def test_hill_is_exact_for_a_power_law():
    """Log excesses of a Pareto law are exponential: 1 / index has mean 1/a and variance 1/(a^2 m).
    Zeros pin the median.
    """
    a, repetitions, n = 2.5, 4000, 400
    generator = torch.Generator().manual_seed(0)
    pareto = torch.rand(repetitions, 160, generator=generator, dtype=torch.float64).pow(-1 / a)
    sign = torch.where(torch.rand(repetitions, 160, generator=generator) < 0.5, -1.0, 1.0)
    samples = torch.cat(
        [torch.zeros(repetitions, n - 160, dtype=torch.float64), sign * pareto], dim=1
    )
    tails = [hill(7.0 + 3.0 * sample) for sample in samples]
    inverse = torch.tensor([1 / tail.index for tail in tails], dtype=torch.float64)
    assert {tail.n_tail for tail in tails} == {20}
    assert_mean_is(inverse, 1 / a)
    assert_mean_is((inverse - 1 / a).square(), 1 / (a**2 * 20))
    assert_mean_is_not(inverse * 20 / 21, 1 / a)  # the mutant: divides by m + 1
    assert all(tail.error == pytest.approx(tail.index / math.sqrt(20)) for tail in tails)


def test_a_gaussian_sample_shows_its_own_index():
    """The reference value and the standard deviation of the verdict are those of Gaussian samples."""
    tails = [hill(5.0 - 2.0 * sample) for sample in student(math.inf, (400, 20_000))]
    sigmas = torch.tensor([tail.sigmas for tail in tails])
    assert abs(float(sigmas.mean())) < 0.02 + 5 / math.sqrt(400)  # 0.02: the bias at this size
    assert float(sigmas.std()) == pytest.approx(1.0, abs=5 / math.sqrt(800))
    assert tails[0].gaussian_index == pytest.approx(6.0, abs=0.01)


def test_the_threshold_of_the_tail_is_uncertain_too():
    """At half the sample its share of the variance is 59 %; the mutant that forgets it would have a
    deviation of 1.55.
    """
    sigmas = torch.tensor(
        [hill(sample, fraction=0.5).sigmas for sample in student(math.inf, (2000, 1000), seed=1)]
    )
    assert float(sigmas.std()) == pytest.approx(1.0, abs=5 / math.sqrt(4000))
    assert abs(float(sigmas.mean())) < 0.15  # 0.06 is the bias at this size


@pytest.mark.parametrize(
    ("df", "n", "least", "most"),
    [
        (math.inf, 1000, 0.0, 0.005),  # measured with 40,000 samples: 0.0010 ...
        (math.inf, 200, 0.0, 0.008),  # 0.0022
        (10, 1000, 0.14, 0.29),  # 0.214
        (5, 1000, 0.80, 0.94),  # 0.869
        (3, 1000, 0.98, 1.0),  # 0.9994
        (10, 10_000, 0.98, 1.0),  # 0.9995
    ],
)
def test_false_alarms_and_power_are_as_stated(df, n, least, most):
    """Bounds lie 5 standard deviations of the count away from the measured rates."""
    samples = student(df, (2000 if df == math.inf else 400, n), seed=3)
    rate = sum(hill(sample).too_heavy for sample in samples) / len(samples)
    assert least <= rate <= most


def test_thin_tails_raise_no_alarm():
    tail = hill(torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    assert tail.index > tail.gaussian_index
    assert not tail.too_heavy


def test_no_noise_at_all():
    tail = hill(torch.full((500,), 3.0))
    assert math.isnan(tail.index)
    assert not tail.too_heavy


@pytest.mark.parametrize(
    ("sample", "fraction", "word"),
    [
        (torch.rand(100), 0.05, "200 in all, got 100"),
        (torch.rand(1000), 0.0, "got 0.0"),
        (torch.tensor([math.nan] * 3 + [1.0] * 997), 0.05, "3 of 1000"),
    ],
)
def test_bad_samples(sample, fraction, word):
    with pytest.raises(InvalidArgumentError, match=word):
        hill(sample, fraction=fraction)
