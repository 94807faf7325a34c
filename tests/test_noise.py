"""Estimators of the noise variance: unbiased feeds, exact update rules."""

from __future__ import annotations

import pytest
import torch

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.errors import NoiseError
from torchrex.exchange.noise import default_estimator
from torchrex.targets import logistic_regression, simulate_logistic

RUNS = 20_000


def two_positions(shared):
    """A logistic posterior, two replicas at different places, and one minibatch for each of many runs."""
    features, labels, _ = simulate_logistic(400, 3, seed=2)
    target = logistic_regression(features, labels, batch_size=32, shared=shared)
    x = torch.tensor([[0.3, -0.2, 0.1], [0.5, 0.4, -0.6]], dtype=torch.float64)[:, None].expand(2, RUNS, 3)
    noise = target.draw_noise(torch.Generator().manual_seed(0), 1, (2, RUNS), torch.float64)
    return target, x, target.energy(x, {"index": noise["index"][0]})


STANDING = torch.tensor([[0], [1]], dtype=torch.int32).expand(2, RUNS)


def test_paired_estimator_is_unbiased_for_half_the_variance_of_the_difference():
    target, x, energy = two_positions(shared=True)
    terms = -target.log_likelihood(x[:, 0, None], *target.data)  # (2, 400): all examples
    exact = 400**2 / 32 * (terms[0] - terms[1]).var(correction=0) / 2
    estimate = tr.PerExample(paired=True).sample(energy.per_example, STANDING, 400)
    assert_mean_is(estimate[0], float(exact))
    difference = energy.total[0] - energy.total[1]
    assert_mean_is((difference - difference.mean()).square() / 2, float(exact))  # it is what the energies really do
    unpaired = tr.PerExample(paired=False).sample(energy.per_example, STANDING, 400)
    assert_mean_is_not(unpaired[0], float(exact))  # the mutant: ignores that the replicas share their minibatch


def test_unpaired_estimator_is_unbiased_for_independent_minibatches():
    target, x, energy = two_positions(shared=False)
    terms = -target.log_likelihood(x[:, 0, None], *target.data)
    exact = 400**2 / 32 * terms.var(dim=1, correction=0).mean()
    assert_mean_is(tr.PerExample(paired=False).sample(energy.per_example, STANDING, 400)[0], float(exact))
    difference = energy.total[0] - energy.total[1]
    assert_mean_is((difference - difference.mean()).square() / 2, float(exact))


@pytest.mark.parametrize("paired", [False, True])
def test_repeated_draws_are_unbiased(paired):
    noise = torch.randn(10, 2, RUNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    energies = noise * torch.tensor([1.0, 2.0]).view(1, 2, 1) + torch.tensor([5.0, -3.0]).view(1, 2, 1)
    assert_mean_is(tr.RepeatedDraws(10, paired=paired).sample(energies, STANDING)[0], 2.5)  # (1 + 4) / 2
    shared = noise[:, :1] + 0.1 * noise
    if paired:
        assert_mean_is(tr.RepeatedDraws(10, paired=True).sample(shared.expand(10, 2, RUNS) * 1.0, STANDING)[0], 0.01)
    else:
        assert_mean_is_not(tr.RepeatedDraws(10).sample(shared, STANDING)[0], 0.01)


def test_feeds_follow_the_replicas():
    """Variances belong to the replicas on the rungs of the pair, not to fixed rows."""
    per_example = torch.randn(3, 1, 50, dtype=torch.float64)
    standing = torch.tensor([[2], [0], [1]], dtype=torch.int32)
    expected = 100**2 / 50 * (per_example[2] - per_example[0]).var(dim=-1) / 2
    assert torch.allclose(tr.PerExample(paired=True).sample(per_example, standing, 100)[0], expected)
    energies = torch.randn(6, 3, 1, dtype=torch.float64)
    expected = (energies[:, 0].var(0) + energies[:, 1].var(0)) / 2
    assert torch.allclose(tr.RepeatedDraws(6).sample(energies, standing)[1], expected)


def test_gain_one_over_m_is_the_plain_mean():
    samples = torch.rand(20, 1, 3, dtype=torch.float64)
    rule, estimate = tr.RunningMean(initial=100.0), torch.full((1, 3), 100.0, dtype=torch.float64)
    for m, sample in enumerate(samples, start=1):
        estimate = rule.update(estimate, torch.tensor(float(m)), sample)
        assert torch.allclose(estimate, samples[:m].mean(0))


def test_smoothing_is_exponential():
    rule, estimate = tr.Smoothing(0.3), torch.zeros(1)
    for m, sample in enumerate((2.0, 4.0, 8.0), start=1):
        estimate = rule.update(estimate, torch.tensor(float(m)), torch.tensor([sample]))
    assert float(estimate) == pytest.approx(0.7 * (0.7 * 2.0 + 0.3 * 4.0) + 0.3 * 8.0)


def test_the_paired_correction_is_smaller_and_swaps_more_often():
    features, labels, _ = simulate_logistic(2000, 3)
    target = logistic_regression(features, labels, batch_size=128)
    common = {"temperatures": (1.0, 1.5), "lr": 2e-5, "n_steps": 400, "n_runs": 16, "seed": 0}
    paired = tr.sample(target, noise=tr.PairedVariance(0.1), **common)
    unpaired = tr.sample(target, noise=tr.Smoothing(0.1, tr.PerExample(paired=False)), **common)
    assert paired.noise_variance[-1].mean() < 0.5 * unpaired.noise_variance[-1].mean()
    assert paired.acceptance_rate > 2 * unpaired.acceptance_rate


def test_defaults_fit_the_target():
    mixture = tr.GaussianMixture([1.0], [0.0], [1.0])
    features, labels, _ = simulate_logistic(50, 2)
    assert default_estimator(mixture) == tr.KnownVariance(0.0)
    assert default_estimator(tr.Noisy(mixture, tr.Gaussian(1.0))) == tr.RunningMean(tr.RepeatedDraws())
    assert default_estimator(logistic_regression(features, labels, batch_size=8)) == tr.Smoothing(0.3, tr.PerExample(paired=True))
    alone = logistic_regression(features, labels, batch_size=8, shared=False)
    assert default_estimator(alone) == tr.Smoothing(0.3, tr.PerExample(paired=False))
    assert default_estimator(tr.Noisy(alone, tr.Gaussian(1.0))) == tr.RunningMean(tr.RepeatedDraws())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: tr.KnownVariance(-1.0), "finite and >= 0"),
        (lambda: tr.RunningMean(initial=float("nan")), "finite and >= 0"),
        (lambda: tr.Smoothing(0.0), "smoothing factor"),
        (lambda: tr.RepeatedDraws(n_draws=1), "n_draws >= 2"),
        (lambda: tr.Smoothing(0.3, ...), "feed must be"),
        (lambda: tr.RepeatedDraws(every=0), "every >= 1"),
    ],
)
def test_bad_estimators(make, word):
    with pytest.raises(NoiseError, match=word):
        make()


@pytest.mark.parametrize("noise", [None, tr.PairedVariance(), tr.Smoothing(0.3, tr.PerExample(paired=False))], ids=str)
def test_one_example_has_no_variance(noise):
    """Its sigma2 would be 0 for ever, and the test the naive one. Repeated draws compare minibatches, and one rung needs none."""
    features, labels, _ = simulate_logistic(50, 2)
    target = logistic_regression(features, labels, batch_size=1)
    common = {"lr": 1e-4, "n_steps": 40}
    with pytest.raises(NoiseError, match="at least 2 examples in a minibatch, got batch_size=1"):
        tr.sample(target, temperatures=(1.0, 2.0), noise=noise, **common)
    repeated = tr.sample(target, temperatures=(1.0, 2.0), noise=tr.RunningMean(tr.RepeatedDraws(10, every=10)), **common)
    assert bool((repeated.noise_variance[-1] > 0).all())
    tr.sample(target, temperatures=(1.0,), noise=noise, **common)
    two = logistic_regression(features, labels, batch_size=2)
    assert bool((tr.sample(two, temperatures=(1.0, 2.0), noise=noise, **common).noise_variance[-1] > 0).all())


def test_a_feed_the_target_cannot_serve_is_refused():
    mixture = tr.GaussianMixture([1.0], [0.0], [1.0])
    with pytest.raises(NoiseError, match="per-example"):
        tr.sample(mixture, temperatures=(1.0, 2.0), lr=0.1, n_steps=5, noise=tr.PairedVariance())
    features, labels, _ = simulate_logistic(50, 2)
    alone = logistic_regression(features, labels, batch_size=8, shared=False)
    with pytest.raises(NoiseError, match="same minibatch"):
        tr.sample(alone, temperatures=(1.0, 2.0), lr=0.1, n_steps=5, noise=tr.PairedVariance())
