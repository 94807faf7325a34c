"""Estimators of the noise variance: unbiased feeds, exact update rules."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import nn

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.errors import NoiseError
from torchrex.exchange.criterion import finite_sample_term
from torchrex.exchange.noise import NoiseShape, default_estimator
from torchrex.targets import logistic_regression, simulate_logistic

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from variance_of_rung0 import ESTIMATORS, bias_on_exponential_data, variance_of_rung0

RUNS = 20_000


def two_positions(shared):
    features, labels, _ = simulate_logistic(400, 3, seed=2)
    target = logistic_regression(features, labels, batch_size=32, shared=shared)
    x = torch.tensor([[0.3, -0.2, 0.1], [0.5, 0.4, -0.6]], dtype=torch.float64)[:, None].expand(
        2, RUNS, 3
    )
    noise = target.draw_noise(torch.Generator().manual_seed(0), 1, (2, RUNS), torch.float64)
    return target, x, target.energy(x, {"index": noise["index"][0]})


STANDING = torch.tensor([[0], [1]], dtype=torch.int32).expand(2, RUNS)


@pytest.mark.parametrize("paired", [True, False])
def test_estimators_are_unbiased_for_half_the_variance_of_the_difference(paired):
    """The mutant is unpaired on a minibatch that the replicas share."""
    target, x, energy = two_positions(shared=paired)
    terms = -target.log_likelihood(x[:, 0, None], *target.data)  # (2, 400): all examples
    variance = (
        (terms[0] - terms[1]).var(correction=0) / 2
        if paired
        else terms.var(dim=1, correction=0).mean()
    )
    exact = 400**2 / 32 * float(variance)
    feed, scale = tr.PerExample(paired=paired), tr.PerExample().scale(32, 400)
    assert_mean_is(scale * feed.sample(energy.per_example, STANDING)[0], exact)
    difference = energy.total[0] - energy.total[1]  # what the energies really do
    assert_mean_is((difference - difference.mean()).square() / 2, exact)
    if paired:
        unpaired = tr.PerExample(paired=False).sample(energy.per_example, STANDING)
        assert_mean_is_not(scale * unpaired[0], exact)


@pytest.mark.parametrize("paired", [False, True])
def test_repeated_draws_are_unbiased(paired):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(10, 2, RUNS, generator=generator, dtype=torch.float64)
    scale, level = (torch.tensor(each).view(1, 2, 1) for each in ([1.0, 2.0], [5.0, -3.0]))
    feed = tr.RepeatedDraws(10, paired=paired)
    assert_mean_is(feed.sample(noise * scale + level, STANDING)[0], 2.5)  # (1 + 4) / 2
    shared = feed.sample(noise[:, :1] + 0.1 * noise, STANDING)[0]
    (assert_mean_is if paired else assert_mean_is_not)(shared, 0.01)


def test_feeds_follow_the_replicas():
    """Variances belong to the replicas on the rungs of the pair, not to fixed rows."""
    per_example = torch.randn(3, 1, 50, dtype=torch.float64)
    standing = torch.tensor([[2], [0], [1]], dtype=torch.int32)
    expected = (per_example[2] - per_example[0]).var(dim=-1) / 2
    assert torch.allclose(tr.PerExample(paired=True).sample(per_example, standing)[0], expected)
    energies = torch.randn(6, 3, 1, dtype=torch.float64)
    expected = (energies[:, 0].var(0) + energies[:, 1].var(0)) / 2
    assert torch.allclose(tr.RepeatedDraws(6).sample(energies, standing)[1], expected)


def test_updates_of_an_estimate():
    """The gain 1 / m is the plain mean; smoothing is exponential, from the first sample on."""
    samples = torch.rand(20, 1, 3, dtype=torch.float64)
    mean, smoothing = tr.RunningMean(initial=100.0), tr.Smoothing(0.3)
    average = smooth = torch.full((1, 3), 100.0, dtype=torch.float64)
    expected = samples[0]
    for m, sample in enumerate(samples, start=1):
        average = mean.update(average, torch.tensor(float(m)), sample)
        assert torch.allclose(average, samples[:m].mean(0))
        smooth = smoothing.update(smooth, torch.tensor(float(m)), sample)
        expected = 0.7 * expected + 0.3 * sample
        assert torch.allclose(smooth, expected)


def test_defaults_fit_the_target():
    mixture = tr.GaussianMixture([1.0], [0.0], [1.0])
    features, labels, _ = simulate_logistic(50, 2)
    shared = logistic_regression(features, labels, batch_size=8)
    alone = logistic_regression(features, labels, batch_size=8, shared=False)
    repeated = tr.RunningMean(tr.RepeatedDraws())
    assert default_estimator(mixture) == tr.KnownVariance(0.0)
    assert default_estimator(shared) == tr.PairedVariance()
    assert default_estimator(alone) == tr.BatchVariance(tr.PerExample(paired=False))
    for target in (mixture, alone):
        assert default_estimator(tr.Noisy(target, tr.Gaussian(1.0))) == repeated
    for target, words in ((mixture, "per-example"), (alone, "same minibatch")):
        with pytest.raises(NoiseError, match=words):
            tr.sample(target, temperatures=(1.0, 2.0), lr=0.1, n_steps=5, noise=tr.PairedVariance())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: tr.KnownVariance(-1.0), "finite and >= 0"),
        (lambda: tr.RunningMean(initial=float("nan")), "finite and >= 0"),
        (lambda: tr.Smoothing(0.0), "smoothing factor"),
        (lambda: tr.RepeatedDraws(n_draws=1), "n_draws >= 2"),
        (lambda: tr.Smoothing(0.3, ...), "feed must be"),
        (lambda: tr.RepeatedDraws(every=0), "every >= 1"),
        (lambda: tr.BatchVariance(tr.RepeatedDraws()), "feed must be PerExample"),
    ],
)
def test_bad_estimators(make, word):
    with pytest.raises(NoiseError, match=word):
        make()


@pytest.mark.parametrize(
    "noise", [None, tr.PairedVariance(), tr.Smoothing(0.3, tr.PerExample(paired=False))], ids=str
)
def test_one_example_has_no_variance(noise):
    """Its sigma2 would be 0 for ever, and the test the naive one. Repeated draws compare
    minibatches, and one rung needs none."""
    features, labels, _ = simulate_logistic(50, 2)
    target = logistic_regression(features, labels, batch_size=1)
    common = {"ladder": tr.Ladder((1.0, 2.0), 1e-4), "n_steps": 40}
    with pytest.raises(NoiseError, match="batch_size=1"):
        tr.sample(target, noise=noise, **common)
    tr.sample(target, ladder=tr.Ladder((1.0,), 1e-4), n_steps=40, noise=noise)
    repeated = tr.sample(target, noise=tr.RunningMean(tr.RepeatedDraws(10, 10)), **common)
    two = tr.sample(logistic_regression(features, labels, batch_size=2), noise=noise, **common)
    for draws in (repeated, two):
        assert bool((draws.noise_variance[-1] > 0).all())


# The law of rung 0


@pytest.mark.parametrize("n_rungs", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise_std", [1.0, 1.5, 2.0])
def test_the_variance_of_the_compared_replicas_keeps_the_law_of_rung_0(noise_std, n_rungs):
    """Exact replicas that do not move, tested again and again on minibatches of 40 of 1,000: rung 0
    keeps its variance."""
    n_runs = {2: 4_000, 4: 6_000, 8: 6_000}[n_rungs]
    ratio, error, rate = variance_of_rung0(
        ESTIMATORS["present replicas"], noise_std, n_rungs, n_runs=n_runs, tests=24
    )
    assert error < 0.013
    assert rate > 0.4
    assert abs(ratio - 1.0) < 4 * error, f"{ratio:.4f} +- {error:.4f}"


@pytest.mark.parametrize(
    ("mutant", "n_rungs"),
    [("smoothing 0.3", 4), ("running mean", 4), ("naive", 2)],
    ids=["smoothing", "running mean", "naive"],
)
def test_the_variance_of_other_replicas_does_not(mutant, n_rungs):
    """A memory per pair of rungs holds the variance of replicas that have left; without correction
    the hot ones come down."""
    ratio, error, _ = variance_of_rung0(
        ESTIMATORS[mutant], 2.0, n_rungs, n_runs=4_000, tests=80, pairing=tr.EvenOdd()
    )
    assert (ratio - 1.0) / error > 10, f"{ratio:.4f} +- {error:.4f}"


class FromTheSameExamples(tr.BatchVariance):
    own_share = 1.0


def test_a_variance_from_the_same_examples_alone_is_biased_by_skewed_ones():
    """Exponential data: the mean of rung 0 stays. The mutant takes all of sigma2 from the minibatch
    of the comparison."""
    bias, error = bias_on_exponential_data(tr.PairedVariance(), 1.5, 2, n_runs=6_000, tests=30)
    assert abs(bias) < 4 * error, f"{bias:+.3f} +- {error:.3f}"
    assert error < 0.013
    bias, error = bias_on_exponential_data(FromTheSameExamples(), 1.5, 2, n_runs=6_000, tests=30)
    assert abs(bias) > 8 * error, f"{bias:+.3f} +- {error:.3f}"


def test_sigma2_is_a_third_of_this_minibatch_and_two_thirds_of_the_one_before():
    """For the replicas that are neighbours now, whoever was there before."""
    features, labels, _ = simulate_logistic(60, 3)
    target = logistic_regression(features, labels, batch_size=12)
    start = torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ensemble = tr.TensorEnsemble.start(target, n_rungs=4, initial=start, dtype=torch.float64)
    run = tr.DensityExchange(ensemble, tr.Ladder((1.0, 1.001, 1.002, 1.003), 1e-30), seed=1)
    feed, terms, stood = tr.PerExample(), [], []
    for step in range(8):
        stood.append(run.state.replica_at.clone())
        info = run.step()
        index = run._block.inputs.target_noise[0]["index"][step]
        terms.append(target.energy(start, {"index": index}).per_example)
        own = feed.sample(terms[-1], stood[-1])
        expected = own if step == 0 else own / 3 + 2 / 3 * feed.sample(terms[-2], stood[-1])
        assert torch.allclose(info.noise_variance, feed.scale(12, 60) * expected)
    assert len({tuple(each[:, 0].tolist()) for each in stood}) > 2  # neighbours have changed


@pytest.mark.parametrize(
    ("dim", "n_rungs", "shared", "pairing"),
    [
        (2, 4, True, tr.RandomPair()),
        (2, 3, True, tr.EvenOdd()),  # one pair at a time as it is
        (2, 4, False, tr.EvenOdd()),
        (3, 4, True, tr.EvenOdd()),
    ],
)
def test_pairs_of_small_models_are_tested_one_at_a_time(dim, n_rungs, shared, pairing):
    """Pairs tested on one minibatch share its noise, which biases rung 0 of small models."""
    features, labels, _ = simulate_logistic(50, dim)
    target = logistic_regression(features, labels, batch_size=8, shared=shared)
    ladder = tr.Ladder.geometric(1.0, 2.0, n_rungs, lrs=1e-4)
    ensemble = tr.TensorEnsemble.start(target, n_rungs=n_rungs)
    assert tr.DensityExchange(ensemble, ladder).rules.pairing == pairing


@pytest.mark.parametrize("variance", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("difference", [0.5, 1.0, 3.0])
def test_an_estimated_variance_needs_the_finite_sample_term(variance, difference):
    """Detailed balance on average, by quadrature: E[min(1, S)] at D over that at -D is exp(D).

    log S = D + Gaussian noise - what the test subtracts, with s^2 estimated from 40 examples. With
    the term the logarithm is right to 0.005; the mutant without it is at least five times further
    away."""
    nu = 39
    estimates = variance * torch.tensor(stats.chi2.ppf((np.arange(20_000) + 0.5) / 20_000, nu) / nu)
    s = math.sqrt(variance)

    def mean_acceptance(d, subtracted):
        away = d - subtracted
        below = np.exp(away + variance / 2) * special.ndtr(-away / s - s)
        return float((special.ndtr(away / s) + below).mean())

    def violation(subtracted):
        up, down = (mean_acceptance(d, subtracted) for d in (difference, -difference))
        return math.log(up / down) - difference

    corrected = violation(estimates / 2 + finite_sample_term(estimates, nu))
    assert abs(corrected) < 0.005
    assert abs(violation(estimates / 2)) > 5 * abs(corrected)


# Batches of several sizes, and losses that are random by themselves

N_SMALL = 200


def regression_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_SMALL, 5, generator=generator)
    return x, x[:, :1] + 0.3 * torch.randn(N_SMALL, 1, generator=generator)


def squares(n_data):
    return tr.PosteriorEnergy(lambda out, target: 0.5 * (out - target).square(), n_data=n_data)


def two_networks(dropout=0.0, noise=None, **options):
    """Two different networks that do not move and do not swap."""

    def make():
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))

    ensemble = tr.ModuleEnsemble(make, squares(N_SMALL), initial="independent", **options)
    rules = {"noise": noise, "pairing": tr.NoSwaps()}
    return tr.ModuleExchange(ensemble, tr.Ladder((1.0, 2.0), 1e-30), **rules, seed=0)


def reported_and_true(run, data, n_steps=600):
    """sigma2 of every step, and half the square of the energy difference less its mean, whose mean
    is the truth."""
    infos = list(run.advance(n_steps, data))
    difference = torch.cat([info.energy[:, 0, 0] - info.energy[:, 1, 0] for info in infos])
    truth = 0.5 * (difference - difference.mean()).square() * n_steps / (n_steps - 1)
    return torch.cat([info.noise_variance[:, 0, 0] for info in infos]), truth


def jitter(batch, generator):
    x, y = batch
    return x + 0.3 * torch.randn(x.shape, generator=generator), y


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["dropout", "augmentation", "both", "none"])
def test_sigma2_of_losses_that_are_random_by_themselves(kind, share):
    """Only the choice of examples loses its noise as n tends to N; dropout and augmentation do not.

    The mutants: the factor 1 - n / N for all of it, and for none of it."""
    n = int(share * N_SMALL)
    augment = jitter if kind in ("augmentation", "both") else None
    dropout = 0.5 if kind in ("dropout", "both") else 0.0
    loader = tr.DeviceLoader(regression_data(), n, seed=1, augment=augment)
    reported, truth = reported_and_true(two_networks(dropout), loader)
    if kind == "none" and share == 1.0:
        assert float(reported.max()) == 0.0
        assert float(truth.max()) < 1e-15
        return
    error = math.hypot(float(reported.std()), float(truth.std())) / math.sqrt(len(truth))
    # Below a share of 5 % the factor is left out where the losses are random: sigma2 is too large
    # by less than that share.
    allowed = 5 * error + (0.053 * float(truth.mean()) if share == 0.05 else 0.0)
    assert abs(float(reported.mean() - truth.mean())) < allowed
    if share == 1.0:
        for mutant in (True, False):
            wrong, _ = reported_and_true(two_networks(dropout, random_losses=mutant), loader, 20)
            assert abs(float(wrong.mean() - truth.mean())) > 10 * error


def test_random_losses_leave_the_run_as_it_is():
    """The second forward pass and the second augmentation take no random numbers of the first ones,
    nor count in BatchNorm."""

    def make():
        return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

    def weights(noise):
        ensemble, ladder = tr.ModuleEnsemble(make, squares(N_SMALL)), tr.Ladder((1.0, 2.0), 1e-5)
        run = tr.ModuleExchange(ensemble, ladder, noise=noise, pairing=tr.NoSwaps(), seed=0)
        list(run.advance(20, tr.DeviceLoader(regression_data(), 100, seed=1, augment=jitter)))
        return run.state_dict()["replicas"][0]

    one, other = weights(tr.PairedVariance()), weights(tr.KnownVariance(1.0))
    for part in ("parameters", "buffers"):
        assert all(torch.equal(one[part][name], other[part][name]) for name in one[part])


@pytest.mark.parametrize("noise", [None, tr.PairedVariance(0.3)], ids=["this batch", "smoothing"])
def test_sigma2_belongs_to_the_size_of_the_batch(noise):
    """Batches of 60, 60, 60 and 20: sigma2 is that of the batch's own size, not that of the one
    before.

    The mutant: smoothing sigma2 itself."""
    loader = tr.DeviceLoader(regression_data(), 60, seed=1, last="keep")
    run = two_networks(noise=noise)
    infos = list(run.advance(1_600, loader))
    reported = torch.cat([info.noise_variance[:, 0, 0] for info in infos])
    x, y = regression_data()
    with torch.no_grad():
        cold, hot = (0.5 * (net(x) - y).square()[:, 0].double() for net in run.ensemble.modules)
    variance = 0.5 * float((cold - hot).var())
    for first, n in ((0, 60), (1, 60), (2, 60), (3, 20)):
        exact = N_SMALL**2 / n * (1 - n / N_SMALL) * variance
        of_this_size = reported[first::4]
        assert float(of_this_size.mean()) == pytest.approx(exact, rel=0.1)


# Noise that is not Gaussian


def test_heavy_tails_are_seen_and_gaussian_noise_is_not():
    """Of 200 samples of each: t(5) noise in most, Gaussian noise in fewer than 2 %."""
    generator = torch.Generator().manual_seed(5)

    def seen(degrees, runs=16, m=250):
        gaussian = torch.randn(2, runs, m, generator=generator, dtype=torch.float64)
        if degrees is not None:
            half = torch.full((2, runs, m), degrees / 2, dtype=torch.float64)
            gaussian /= (torch._standard_gamma(half, generator=generator) / half).sqrt()
        return bool(NoiseShape.of(gaussian, torch.tensor([0.9]), paired=True).is_seen[0])

    assert sum(seen(None) for _ in range(200)) < 4
    assert sum(seen(5.0) for _ in range(200)) > 150


def test_the_shape_is_that_of_the_mean_of_the_examples():
    """Exponential terms have skewness 2 and excess kurtosis 6; a mean of n has 2 / sqrt(n) and 6 /
    n."""
    n, generator = 100, torch.Generator().manual_seed(1)
    terms = -torch.rand(2, 4_000, n, generator=generator, dtype=torch.float64).log()
    terms[1] = 0.0
    shape = NoiseShape.of(terms, torch.tensor([0.2]), paired=True, scale=50.0, n_summed=n)
    assert float(shape.noise_std) == pytest.approx(0.2 * 50.0 / math.sqrt(n), rel=0.02)
    # Of samples of 100, somewhat less.
    assert float(shape.skewness) == pytest.approx(2.0 / math.sqrt(n), rel=0.25)
    assert 0 < float(shape.kurtosis) < 6.0 / n
    assert bool(shape.is_seen)
    terms[0, 0] = 0.0  # a run in which nothing varies says nothing, and must not silence the others
    again = NoiseShape.of(terms, torch.tensor([0.2]), paired=True, scale=50.0, n_summed=n)
    assert float(again.skewness) == pytest.approx(float(shape.skewness), rel=0.01)
    assert bool(again.is_seen)


@pytest.mark.parametrize(
    ("noise", "warned"),
    [(tr.StudentT(3.0), True), (tr.Gaussian(1.5), False)],
    ids=["t", "gaussian"],
)
def test_sample_warns_of_noise_that_is_not_gaussian(noise, warned, caplog):
    mixture = tr.GaussianMixture([0.4, 0.6], [-4.0, 3.0], [0.7, 0.5])
    common = {"temperatures": (1.0, 10.0), "lr": 0.03, "n_steps": 200, "n_runs": 32}
    draws = tr.sample(tr.Noisy(mixture, noise), **common)
    assert ("is not Gaussian" in caplog.text) == warned
    again = tr.sample(tr.Noisy(mixture, noise), **common)
    assert torch.equal(draws.values, again.values)


@pytest.mark.parametrize("skewed", [True, False])
def test_train_warns_of_noise_that_is_not_gaussian(skewed, caplog):
    """One example in forty carries most of the difference of the replicas."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 1, generator=generator), torch.randn(400, 1, generator=generator)
    if skewed:
        x[::40] *= 30.0
    ensemble = tr.ModuleEnsemble(lambda: nn.Linear(1, 1), squares(400), initial="independent")
    ladder = tr.Ladder((1.0, 1.0 + (0.0006 if skewed else 0.02)), 1e-12)
    run = tr.ModuleExchange(ensemble, ladder, seed=0)
    tr.train(run, tr.DeviceLoader((x, y), 40, seed=1), 20)
    assert ("is not Gaussian" in caplog.text) == skewed


# Warnings that name the cure


def test_unequal_learning_rates_on_the_minibatch_of_the_swap_are_warned_of(caplog):
    features, labels, _ = simulate_logistic(50, 3)
    target = logistic_regression(features, labels, batch_size=8)

    def warned(lrs, **options):
        caplog.clear()
        start = tr.TensorEnsemble.start(options.pop("target", target), n_rungs=2)
        ladder = tr.Ladder((1.0, 2.0), lrs, anneal=options.pop("anneal", None))
        tr.DensityExchange(start, ladder, **options)
        return "or a swap_batch" in caplog.text

    assert warned((1e-4, 3e-4))
    assert not warned(1e-4)
    assert not warned((1e-4, 3e-4), swap_interval=20)
    assert not warned((1e-4, 3e-4), swap_batch=20)
    assert warned(1e-4, tempering="likelihood")  # the gradient of the data is multiplied by lr / T
    assert not warned((1e-4, 2e-4), tempering="likelihood")
    assert not warned((1e-4, 3e-4), pairing=tr.NoSwaps())
    assert not warned((1e-4, 3e-4), anneal=tr.schedules.geometric(0.99))
    exact = tr.GaussianMixture([1.0], [0.0], [1.0])
    assert not warned((1e-4, 3e-4), target=exact)
