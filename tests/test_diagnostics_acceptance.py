"""Acceptance observed and expected, the noise behind it, its tails, and cures."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.diagnostics import (
    History,
    acceptance_from_energies,
    allowed_acceptance,
    correction_against_spread,
    effective_noise,
    factor_for_acceptance,
    factor_for_noise,
    hill,
    ladder_for_noise,
    noise_level,
    observed_acceptance,
    rungs_for_noise,
)
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import expected_acceptance

TEMPERATURES, SIGMA2 = (1.0, 2.0), 1.5  # gap 0.5, s^2 = 2 * 0.25 * 1.5 = 0.75


def made_up(energy, *, noise_variance=SIGMA2, temperatures=TEMPERATURES, factor=1.0, **counts):
    """A history of given energies (k, rungs, chains)."""
    k, rungs, chains = energy.shape
    temperature = torch.tensor(temperatures, dtype=torch.float64).expand(k, rungs)
    variance = torch.full((k, rungs - 1, chains), float(noise_variance), dtype=torch.float64)
    full = -(1.0 / temperature).diff(dim=1)[:, :, None] * variance
    one = torch.ones(rungs - 1, chains)
    return History(
        steps=torch.arange(k),
        energy=energy,
        replica_at=torch.arange(rungs)[None, :, None].expand(k, rungs, chains),
        noise_variance=variance,
        temperature=temperature,
        n_steps=k,
        correction=None if factor is None else full / factor,
        **({"accepted": one, "proposed": one} | counts),
    )


def noisy_energies(cold, hot, *, k=200, chains=500, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(k, 2, chains, generator=generator, dtype=torch.float64)
    return torch.tensor([cold, hot], dtype=torch.float64)[None, :, None] + math.sqrt(SIGMA2) * noise


def each_chain(history, function):
    """`function` of every chain alone: independent values."""
    by_chain = {
        name: values
        for name, values in vars(history).items()
        if isinstance(values, torch.Tensor) and name not in ("steps", "temperature")
    }
    chains = (slice(chain, chain + 1) for chain in range(history.n_chains))
    return torch.stack(
        [
            function(replace(history, **{name: x[..., one] for name, x in by_chain.items()}))
            for one in chains
        ]
    )


def test_observed_rate_and_its_error():
    energy, ladder = torch.zeros(1, 3, 2), {"temperatures": (1.0, 2.0, 3.0)}
    accepted = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    proposed = torch.tensor([[10.0, 10.0], [0.0, 0.0]])
    rate, error = observed_acceptance(
        made_up(energy, accepted=accepted, proposed=proposed, **ladder)
    )
    assert float(rate[0]) == pytest.approx(0.2)
    assert float(error[0]) == pytest.approx(0.1)  # rates 0.1 and 0.3: std / sqrt(2)
    assert rate[1].isnan()  # never tested
    alone = observed_acceptance(made_up(energy[..., :1], accepted=accepted[:, :1], **ladder))
    assert alone.error.isnan().all()


def test_the_error_of_the_observed_rate_is_the_spread_of_repetitions():
    """Chains with rates of their own: what a binomial error would miss."""
    generator = torch.Generator().manual_seed(0)
    own = torch.rand(2000, 1, 8, generator=generator, dtype=torch.float64)
    proposed = torch.full((1, 8), 100.0)
    accepted = torch.binomial(proposed.expand(2000, 1, 8).double(), own, generator=generator)
    estimates = [
        observed_acceptance(made_up(torch.zeros(1, 2, 8), accepted=a, proposed=proposed))
        for a in accepted
    ]
    squares = torch.stack([estimate.error[0].square() for estimate in estimates])
    exact = (1 / 12 + (1 / 2 - 1 / 3) / 100) / 8  # variance of the rate of a chain, over 8 chains
    assert_mean_is(squares, exact)
    values = torch.stack([estimate.value[0] for estimate in estimates])
    assert_mean_is((values - 0.5).square(), exact)


@pytest.mark.parametrize("factor", [1.0, 3.0, math.inf])
def test_acceptance_from_energies_has_its_closed_form(factor):
    def rates(history, factor=None):
        return each_chain(
            history, lambda one: acceptance_from_energies(one, correction_factor=factor).value[0]
        )

    history = made_up(noisy_energies(1.0, 2.0), factor=factor)
    exact = float(expected_acceptance(0.5 * (1.0 - 2.0), effective_noise(0.5, SIGMA2), factor))
    per_chain = rates(history)
    assert_mean_is(per_chain, exact)
    estimate = acceptance_from_energies(history)
    assert float(estimate.value[0]) == pytest.approx(float(per_chain.mean()))
    assert float(estimate.error[0]) == pytest.approx(float(per_chain.std() / math.sqrt(500)))
    # The mutants: sigma2 of the difference, and half of it.
    for mutant in (0.5 * factor, 2 * factor) if math.isfinite(factor) else (4.0,):
        assert_mean_is_not(rates(history, mutant), exact)
    upside_down = made_up(noisy_energies(2.0, 1.0), factor=factor)
    assert_mean_is_not(rates(upside_down), exact)


def test_expected_and_observed_agree_on_a_real_run():
    """Given the energies, acceptances are coin flips with exactly these chances."""
    ladder = tr.Ladder((1.0, 2.5), 0.05)
    target = tr.Noisy(tr.GaussianMixture([0.4, 0.6], [-2.0, 2.0], [0.7, 0.5]), tr.Gaussian(1.0))
    options = {"n_steps": 400, "n_runs": 256, "noise": tr.KnownVariance(1.0), "compiled": False}
    draws = tr.sample(target, ladder=ladder, **options)
    history = History.from_draws(draws, ladder, correction_factor=1.0)

    def luck(one, factor=None):
        expected = acceptance_from_energies(one, correction_factor=factor)
        return (observed_acceptance(one).value - expected.value)[0]

    assert_mean_is(each_chain(history, luck), 0.0)
    assert_mean_is_not(each_chain(history, lambda one: luck(one, math.inf)), 0.0)  # naive


def test_a_broken_replica_and_a_swap_intensity():
    energy = torch.tensor([[0.0], [-5.0]]).repeat(4, 1, 1)  # cold is worse: accepted for sure
    energy[0, 0], energy[1, 1] = math.inf, math.nan
    history = made_up(energy, noise_variance=0.0)
    assert float(acceptance_from_energies(history).value) == 0.5
    assert float(acceptance_from_energies(history, swap_rate=0.3).value) == pytest.approx(0.15)
    with pytest.raises(InvalidArgumentError, match="does not know F"):
        acceptance_from_energies(made_up(torch.zeros(2, 2, 1), factor=None))


def test_expected_acceptance_is_the_known_form_and_does_not_overflow():
    d = torch.linspace(-8, 8, 33, dtype=torch.float64)
    s = torch.tensor([[0.3], [2.0], [9.0]], dtype=torch.float64)
    known = torch.special.ndtr(d / s - s / 2) + (d + torch.special.log_ndtr(-d / s - s / 2)).exp()
    assert torch.allclose(expected_acceptance(d, s), known, rtol=1e-9)
    assert torch.allclose(expected_acceptance(d, 0.0), d.clamp(max=0.0).exp())
    huge = expected_acceptance(
        torch.tensor([-1e6, 0.0, 1e12]), 4.5e5, torch.tensor([1.0, math.inf, 1.0])
    )
    assert huge.tolist() == pytest.approx([0.0, 0.5, 1.0], abs=1e-5)
    quadrature = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    weight = (-0.5 * quadrature.square()).exp() / math.sqrt(2 * math.pi)
    for difference, std, factor in ((-1.0, 1.5, 2.0), (0.5, 3.0, 7.0), (-6.0, 2.0, math.inf)):
        chance = (difference + std * quadrature - std**2 / (2 * factor)).clamp(max=0.0).exp()
        exact = float(torch.trapezoid(chance * weight, quadrature))
        assert float(expected_acceptance(difference, std, factor)) == pytest.approx(exact, rel=1e-7)


def test_correction_against_spread():
    """F = 3: correction gap * sigma2 / 3 = 0.25; the difference spreads by sqrt(2 sigma2)."""
    size = correction_against_spread(made_up(noisy_energies(1.0, 2.0), factor=3.0))
    assert float(size.correction[0]) == pytest.approx(0.25)
    assert float(size.spread[0]) == pytest.approx(math.sqrt(3.0), rel=0.01)  # 100,000 values
    assert float(size.ratio[0]) == pytest.approx(0.25 / math.sqrt(3.0), rel=0.01)
    history = made_up(noisy_energies(0.0, 9.0))
    assert float(correction_against_spread(history, correction_factor=1.0).correction) == 0.75


def test_the_factor_that_recorded_energies_need():
    history = made_up(noisy_energies(0.0, 1.0, chains=50))
    rate = float(acceptance_from_energies(history, correction_factor=5.0).value)
    assert float(factor_for_acceptance(history, rate)) == pytest.approx(5.0, rel=1e-6)
    assert float(factor_for_acceptance(history, 1e-3)) == 1.0
    far = made_up(noisy_energies(0.0, 50.0, chains=50))
    assert float(factor_for_acceptance(far, 0.5)) == math.inf


def test_a_trace_that_drifts_far_still_gives_its_factor():
    """The size of an image run: gap 80, sigma2 1e7, so F is about 1e5 and more."""
    generator = torch.Generator().manual_seed(0)
    energy = 1e5 + 3e3 * torch.randn(4000, 2, 1, generator=generator, dtype=torch.float64)
    history = made_up(energy, noise_variance=1e7, temperatures=(0.01, 0.05))
    factor = factor_for_acceptance(history, 0.1)
    assert float(factor) > 1e5
    estimate = acceptance_from_energies(history, correction_factor=float(factor))
    assert float(estimate.value) == pytest.approx(0.1, rel=0.01)


def test_effective_noise_and_what_it_allows():
    assert float(effective_noise(0.5, 1.5)) == pytest.approx(math.sqrt(0.75))
    s = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0])
    assert torch.allclose(allowed_acceptance(s), expected_acceptance(0.0, s), rtol=1e-9)
    assert allowed_acceptance(s).tolist() == pytest.approx(
        [1.0, 0.617, 0.317, 0.0455, 6.33e-5], rel=2e-3
    )


def test_the_factor_that_noise_needs():
    s = torch.tensor([4.0, 60.0, 4.5e5])
    factor = factor_for_noise(s, 0.2)
    assert torch.allclose(
        expected_acceptance(0.0, s, factor), torch.tensor(0.2, dtype=torch.float64), rtol=1e-6
    )
    # For large s: Phi(-s / (2 F)) = 0.2.
    assert float(factor[2]) == pytest.approx(4.5e5 / (2 * 0.8416), rel=1e-3)
    assert factor_for_noise(torch.tensor([0.5]), 0.2).tolist() == [1.0]
    assert factor_for_noise(torch.tensor([9.0]), 0.9).tolist() == [math.inf]
    with pytest.raises(InvalidArgumentError, match="between 0 and 1"):
        factor_for_noise(1.0, 0.0)


def test_the_ladder_that_noise_allows():
    """1/1 - 1/10 = 0.9, sigma 7.8: s = 9.9 over the whole ladder, so ten pairs of 0.99 each."""
    temperatures = ladder_for_noise(1.0, 10.0, 61.0)
    assert len(temperatures) == rungs_for_noise(1.0, 10.0, 61.0) == 11
    inverse = 1.0 / torch.tensor(tr.Ladder(temperatures, 0.1).temperatures, dtype=torch.float64)
    s = effective_noise(-inverse.diff(), 61.0)
    assert torch.allclose(s, s[:1])
    assert 0.9 < float(s[0]) <= 1.0
    assert rungs_for_noise(1.0, 10.0, 61.0, noise_std=2.0) == 6
    assert ladder_for_noise(1.0, 2.0, 0.0) == (1.0, 2.0)
    assert rungs_for_noise(1.0, 2.0, 2.0) == 2  # exactly s = 1
    for bad in (
        {"cold": 2.0, "hot": 1.0, "noise_variance": 1.0},
        {"cold": 1.0, "hot": 2.0, "noise_variance": -1.0},
    ):
        with pytest.raises(InvalidArgumentError, match="got"):
            rungs_for_noise(**bad)


def test_noise_level_of_a_smoothed_trace():
    """Smoothing with 0.3 makes an AR(1) of 0.7; batch means of one chain know that."""
    generator = torch.Generator().manual_seed(0)
    squares = torch.randn(400, 300, 9, generator=generator, dtype=torch.float64).square()
    sample = 4.0 * squares.mean(2)
    level = [4.0 + math.sqrt(0.3 / 1.7) * (sample[0] - 4.0)]  # of the stationary variance at once
    for fresh in sample[1:]:
        level.append(level[-1] + 0.3 * (fresh - level[-1]))
    history = replace(made_up(torch.zeros(400, 2, 300)), noise_variance=torch.stack(level)[:, None])
    values = each_chain(history, lambda one: noise_level(one).value[0])
    errors = each_chain(history, lambda one: noise_level(one).error[0])
    assert_mean_is(values, 4.0)
    spread = float(values.std())
    # 4 % of it is that of the spread itself.
    assert float(errors.square().mean().sqrt()) == pytest.approx(spread, rel=0.25)
    assert float(noise_level(history).error) == pytest.approx(spread / math.sqrt(300))
    last = noise_level(history, last=True)
    assert float(last.value) == pytest.approx(float(level[-1].mean()))
    as_if_independent = torch.stack(level).std(0) / math.sqrt(400)
    assert_mean_is_not(as_if_independent, spread)


def student(df, shape, seed=0):
    generator = np.random.default_rng(seed)
    normal = df == math.inf
    return torch.from_numpy(
        generator.standard_normal(shape) if normal else generator.standard_t(df, shape)
    )


def test_hill_is_exact_for_a_power_law():
    """1 / index of a Pareto law has mean 1/a and variance 1/(a^2 m); zeros pin the median."""
    a, repetitions, n = 2.5, 4000, 400
    generator = torch.Generator().manual_seed(0)
    pareto = torch.rand(repetitions, 160, generator=generator, dtype=torch.float64).pow(-1 / a)
    sign = torch.where(torch.rand(repetitions, 160, generator=generator) < 0.5, -1.0, 1.0)
    zeros = torch.zeros(repetitions, n - 160, dtype=torch.float64)
    samples = torch.cat([zeros, sign * pareto], dim=1)
    tails = [hill(7.0 + 3.0 * sample) for sample in samples]
    inverse = torch.tensor([1 / tail.index for tail in tails], dtype=torch.float64)
    assert {tail.n_tail for tail in tails} == {20}
    assert_mean_is(inverse, 1 / a)
    assert_mean_is((inverse - 1 / a).square(), 1 / (a**2 * 20))
    assert_mean_is_not(inverse * 20 / 21, 1 / a)  # the mutant: divides by m + 1
    assert all(tail.error == pytest.approx(tail.index / math.sqrt(20)) for tail in tails)


def test_a_gaussian_sample_shows_its_own_index():
    """The reference and the standard deviation of the verdict are those of Gaussian samples."""
    tails = [hill(5.0 - 2.0 * sample) for sample in student(math.inf, (400, 20_000))]
    sigmas = torch.tensor([tail.sigmas for tail in tails])
    assert abs(float(sigmas.mean())) < 0.02 + 5 / math.sqrt(400)  # 0.02: the bias at this size
    assert float(sigmas.std()) == pytest.approx(1.0, abs=5 / math.sqrt(800))
    assert tails[0].gaussian_index == pytest.approx(6.0, abs=0.01)


def test_the_threshold_of_the_tail_is_uncertain_too():
    """At half the sample it is 59 % of the variance; without it the deviation would be 1.55."""
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


def test_thin_tails_and_no_noise_raise_no_alarm():
    tail = hill(torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    assert tail.index > tail.gaussian_index
    assert not tail.too_heavy
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
