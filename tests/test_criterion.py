"""The swap test: unbiased ratio, closed-form acceptance, right direction."""

from __future__ import annotations

import math

import pytest
import torch

from assertions import assert_mean_is, assert_mean_is_not
from torchrex.diagnostics import factor_for_noise
from torchrex.exchange.correction import ProportionalToGap, TargetAcceptance, as_rule
from torchrex.exchange.criterion import acceptance_probability, expected_acceptance, log_swap_ratio

N, GAP, SIGMA2 = 1_000_000, 0.9, 0.6  # s^2 = 2 gap^2 sigma2 = 0.97


def noisy_log_ratios(cold, hot, *, correction_factor=1.0, slip=1.0, noise_std=SIGMA2**0.5):
    noise = (
        torch.randn(2, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        * noise_std
    )
    return log_swap_ratio(
        cold + noise[0],
        hot + noise[1],
        inverse_gap=GAP,
        noise_variance=slip * noise_std**2,
        correction_factor=correction_factor,
    )


@pytest.mark.parametrize("difference", [-1.0, 0.0, 2.0])
def test_corrected_ratio_is_unbiased(difference):
    exact = math.exp(GAP * difference)
    assert_mean_is(noisy_log_ratios(difference, 0.0).exp(), exact)
    assert_mean_is_not(noisy_log_ratios(difference, 0.0, correction_factor=math.inf).exp(), exact)
    # Sigma2 taken for that of the difference.
    assert_mean_is_not(noisy_log_ratios(difference, 0.0, slip=2.0).exp(), exact)
    assert_mean_is_not(noisy_log_ratios(difference, 0.0, slip=0.5).exp(), exact)


@pytest.mark.parametrize("difference", [-3.0, 0.0, 1.5])
@pytest.mark.parametrize("noise_std", [0.5, 2.0])
def test_mean_acceptance_has_its_closed_form(difference, noise_std):
    s = torch.tensor(math.sqrt(2) * GAP * noise_std)
    exact = float(expected_acceptance(torch.tensor(GAP * difference), s))
    assert_mean_is(
        acceptance_probability(noisy_log_ratios(difference, 0.0, noise_std=noise_std)), exact
    )
    naive = noisy_log_ratios(difference, 0.0, noise_std=noise_std, correction_factor=math.inf)
    assert_mean_is_not(acceptance_probability(naive), exact)


def test_detailed_balance_of_the_closed_form():
    """a(D) = exp(D) a(-D), exactly."""
    d, s = torch.linspace(-5, 5, 41, dtype=torch.float64), torch.tensor(1.3)
    assert torch.allclose(
        expected_acceptance(d, s), d.exp() * expected_acceptance(-d, s), rtol=1e-9
    )
    assert expected_acceptance(torch.tensor([-2e3, 2e3]), 1.0).tolist() == pytest.approx([0.0, 1.0])
    # Without noise min(1, exp(D)), at equal energies 1: D/s is 0/0 there.
    assert torch.allclose(expected_acceptance(d, 0.0), d.clamp(max=0.0).exp())
    assert float(expected_acceptance(0, 0)) == 1.0


def test_swap_direction():
    """A cold replica of higher energy swaps for sure; of lower, with exp(gap * difference)."""
    worse, better = (
        log_swap_ratio(torch.tensor(e), torch.tensor(5.0), inverse_gap=GAP, noise_variance=0.0)
        for e in (10.0, 0.0)
    )
    assert acceptance_probability(worse) == 1.0
    assert float(acceptance_probability(better)) == pytest.approx(math.exp(-5 * GAP))
    assert float(acceptance_probability(torch.tensor(0.7), swap_rate=0.3)) == pytest.approx(0.3)
    rules = {"inverse_gap": 2.0, "noise_variance": 3.0, "correction_factor": 4.0}
    ratio = log_swap_ratio(torch.tensor(1.0), torch.tensor(0.0), **rules)
    assert float(ratio) == pytest.approx(2.0 * (1.0 - 2.0 * 3.0 / 4.0))


def test_factor_rules():
    first, now = torch.tensor([[2.0]]), torch.tensor([[6.0]])
    rule = ProportionalToGap(5.0)
    factor = rule.factor(torch.full((1, 3), 5.0), now, first)
    # So that the correction gap * sigma2 / F stays the same.
    assert torch.allclose(factor, torch.full((1, 3), 15.0))
    rule = TargetAcceptance(0.2, gain=0.01)
    yes, no = torch.tensor([[True, True]]), torch.tensor([[False, False]])
    learnt = rule.start(torch.ones(1, 2))
    adapted = rule.adapt(2.0 * learnt, torch.tensor([[0.0, 0.3]]), yes, no)
    # Too few swaps: a larger F, by no more than this.
    assert adapted[0, 0, 0] == pytest.approx(2.0 * math.exp(0.5))
    # Gain 3 before anything is known.
    assert adapted[0, 0, 1] == pytest.approx(2.0 * math.exp(-0.3))
    assert adapted[1].tolist() == [[0.0, pytest.approx(0.3)]]
    known = torch.stack([torch.full((1, 2), 2.0), torch.full((1, 2), 999.0)])
    adapted = rule.adapt(known, torch.tensor([[0.0, 1.0]]), yes, no)
    assert adapted[0].tolist() == [
        [pytest.approx(2.0 * math.exp(0.002)), pytest.approx(2.0 * math.exp(-0.008))]
    ]
    assert torch.equal(rule.adapt(known, torch.zeros(1, 2), no, no), known)
    assert torch.equal(rule.adapt(known, torch.full((1, 2), math.nan), yes, no), known)
    assert (rule.adapt(learnt, torch.ones(1, 2), yes, yes)[0] == 1.0).all()  # never below unbiased


@pytest.mark.parametrize("noise_std", [2.0, 10.0, 50.0])
@pytest.mark.parametrize(("rate", "share"), [(0.05, 0.9), (0.2, 0.95), (0.4, 0.68)])
def test_target_acceptance_is_fast_and_settles(noise_std, rate, share):
    """From F = 1, equal energies under Gaussian noise: after 200 tests this share of 4,000 runs is
    within a factor of 1.5 of the F for that rate; the shares found are 0.03 to 0.05 larger, 4
    standard errors and more. After 2,000 tests all but few are.

    The mutant, a constant gain of 0.01, is at F < 1.5 after 200 tests."""
    wanted, learnt = (
        float(factor_for_noise(noise_std, rate)),
        TargetAcceptance(rate).start(torch.ones(1, 4000)),
    )
    rule, generator = TargetAcceptance(rate), torch.Generator().manual_seed(1)
    tested = torch.ones(1, 4000, dtype=torch.bool)
    for n in range(1, 2001):
        noise = noise_std * torch.randn(1, 4000, generator=generator)
        factor = rule.factor(learnt, noise, noise)
        learnt = rule.adapt(
            learnt, (noise - noise_std**2 / (2 * factor)).clamp(max=0.0).exp(), tested, tested
        )
        if n in (200, 2000):
            near = float(((learnt[0] / wanted).log().abs() < math.log(1.5)).double().mean())
            assert near > (share if n == 200 else 0.95), (
                f"{100 * near:.0f} % of the runs after {n} tests"
            )


def test_bad_factors():
    for factor in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"F must be positive.*1 is unbiased"):
            as_rule(factor)
    with pytest.raises(ValueError, match="between 0 and 1"):
        TargetAcceptance(1.2)
