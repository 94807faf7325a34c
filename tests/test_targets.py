"""Targets have the density, the sampler and the noise they claim."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import scipy.stats
import torch

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.errors import NonFiniteEnergyError, TargetError
from torchrex.targets import laplace, logistic_regression, simulate_logistic


def full_covariance_mixture():
    root = torch.tensor([[[1.0, 0.0], [0.8, 0.5]], [[0.5, 0.0], [-0.2, 0.4]]], dtype=torch.float64)
    covariances, means = root @ root.mT, [[0.0, 1.0], [3.0, -2.0]]
    return tr.GaussianMixture([1.0, 3.0], means, covariances=covariances), covariances


def test_mixture_density_is_scipys():
    mixture, covariances = full_covariance_mixture()
    x = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = zip((0.25, 0.75), ([0.0, 1.0], [3.0, -2.0]), covariances.numpy(), strict=True)
    expected = sum(w * scipy.stats.multivariate_normal(m, c).pdf(x.numpy()) for w, m, c in parts)
    assert torch.allclose(mixture.log_density(x).exp(), torch.as_tensor(expected), rtol=1e-12)
    stds = torch.tensor([[0.5, 2.0], [1.0, 0.3]], dtype=torch.float64)
    diagonal = tr.GaussianMixture([0.3, 0.7], x[:2], stds)
    full = tr.GaussianMixture([0.3, 0.7], x[:2], covariances=torch.diag_embed(stds**2))
    assert torch.allclose(diagonal.log_density(x), full.log_density(x), rtol=1e-12)


def test_mixture_sampler_has_the_mixtures_moments():
    mixture, covariances = full_covariance_mixture()
    x = mixture.sample(200_000, generator=torch.Generator().manual_seed(1))
    assert_mean_is(x[:, 0], 0.75 * 3.0)
    second = 0.25 * (covariances[0, 0, 1] + 0.0) + 0.75 * (covariances[1, 0, 1] - 6.0)
    assert_mean_is(x[:, 0] * x[:, 1], float(second))


def test_mixture_cdf_and_quantile_are_inverse_and_exact():
    mixture = tr.GaussianMixture([0.4, 0.6], [-3.0, 2.0], [0.7, 0.5])
    x = torch.linspace(-6, 5, 23, dtype=torch.float64)
    left, right = scipy.stats.norm(-3, 0.7), scipy.stats.norm(2, 0.5)
    exact = 0.4 * left.cdf(x.numpy()) + 0.6 * right.cdf(x.numpy())
    assert torch.allclose(mixture.cdf(x), torch.as_tensor(exact), atol=1e-14)
    p = torch.tensor([0.001, 0.2, 0.4, 0.5, 0.999], dtype=torch.float64)
    assert torch.allclose(mixture.cdf(mixture.quantile(p)), p, atol=1e-12)


@pytest.mark.parametrize(
    "target",
    [tr.GaussianMixture([0.4, 0.6], [-3.0, 2.0], [0.7, 0.5]), full_covariance_mixture()[0]],
)
def test_gradient_is_that_of_the_energy(target):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 5, target.dim, dtype=torch.float64, generator=generator)
    energy, gradient = target.energy_and_gradient(x, {})
    h = 1e-6
    for k in range(target.dim):
        step = h * torch.eye(target.dim, dtype=torch.float64)[k]
        slope = (target.energy(x + step, {}).total - target.energy(x - step, {}).total) / (2 * h)
        assert torch.allclose(gradient[..., k], slope, atol=1e-6)
    assert torch.equal(energy.total, target.energy(x, {}).total)


def test_given_gradient_is_used_and_single_point_density_is_mapped():
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    # A gradient that is wrong on purpose.
    given = tr.LogDensity(lambda p: -0.5 * p.square().sum(-1), 3, gradient=lambda p: -2.0 * p)
    assert torch.allclose(given.energy_and_gradient(x, {})[1], 2.0 * x)
    single = tr.LogDensity(lambda p: -0.5 * p @ p, 3, batched=False)
    energy, gradient = single.energy_and_gradient(x, {})
    assert torch.allclose(energy.total, 0.5 * x.square().sum(-1))
    assert torch.allclose(gradient, x)


@pytest.mark.parametrize(
    ("model", "variance", "cdf"),
    [
        (tr.Gaussian(2.0), 4.0, scipy.stats.norm(0, 2).cdf),
        (tr.StudentT(5.0), 5 / 3, scipy.stats.t(5).cdf),
        (tr.StudentT(10.0, 7.0), 61.25, lambda x: scipy.stats.t(10).cdf(x / 7)),
    ],
)
def test_noise_models_have_their_law(model, variance, cdf):
    draws = model.draw(torch.Generator().manual_seed(3), (100_000,), torch.float64)
    assert model.variance == pytest.approx(variance)
    assert scipy.stats.kstest(draws.numpy(), cdf).pvalue > 5.7e-7
    # The mutant: a slightly wrong law.
    assert scipy.stats.kstest(1.06 * draws.numpy(), cdf).pvalue < 1e-7


def test_noisy_adds_noise_to_energy_and_gradient():
    exact = tr.LogDensity(lambda x: -0.5 * x.square().sum(-1), 2)
    noisy = tr.Noisy(exact, tr.Gaussian(2.0), gradient=tr.Gaussian(0.5))
    x = torch.ones(2, 50_000, 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    drawn = noisy.draw_noise(generator, 1, (2, 50_000), torch.float64)
    energy, gradient = noisy.energy_and_gradient(x, {k: v[0] for k, v in drawn.items()})
    assert_mean_is((energy.total - 1.0).square(), 4.0)
    assert_mean_is((gradient - 1.0).square(), 0.25)
    # Replicas are independent.
    assert_mean_is((energy.total[0] - 1.0) * (energy.total[1] - 1.0), 0.0)


def test_tall_energy_is_unbiased_and_gradient_too():
    features, labels, _ = simulate_logistic(500, 3, seed=1)
    target = logistic_regression(features, labels, batch_size=16)
    x = torch.randn(1, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    noise = target.draw_noise(torch.Generator().manual_seed(6), 1, (1, 20_000), torch.float64)
    positions = x.expand(1, 20_000, 3).contiguous()
    energy, gradient = target.energy_and_gradient(positions, {"index": noise["index"][0]})
    assert_mean_is(energy.total, float(target.full_energy(x)))
    exact = torch.func.grad(lambda p: target.full_energy(p).sum())(x)
    for k in range(3):
        assert_mean_is(gradient[..., k], float(exact[..., k]))
    # The mutant forgets the factor N / n.
    assert_mean_is_not(energy.total * 16 / 500, float(target.full_energy(x)))


def test_replicas_share_a_minibatch_but_runs_do_not():
    features, labels, _ = simulate_logistic(500, 3)
    shared = logistic_regression(features, labels, batch_size=8)
    index = shared.draw_noise(torch.Generator().manual_seed(0), 2, (4, 5), torch.float32)["index"]
    assert index.shape == (2, 1, 5, 8)
    assert not torch.equal(index[:, :, 0], index[:, :, 1])
    alone = logistic_regression(features, labels, batch_size=8, shared=False)
    index = alone.draw_noise(torch.Generator(), 2, (4, 5), torch.float32)["index"]
    assert index.shape == (2, 4, 5, 8)


def test_laplace_finds_the_mode():
    features, labels, truth = simulate_logistic(20_000, 3)
    target = logistic_regression(features, labels)
    mode, covariance = laplace(target)
    assert torch.func.grad(target.full_energy)(mode).abs().max() < 1e-6
    assert (((mode - truth) / covariance.diagonal().sqrt()).abs() < 5).all()


PLANE = [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: tr.GaussianMixture([0.5, -0.5], [0.0, 1.0], [1.0, 1.0]), "positive weight"),
        (lambda: tr.GaussianMixture([0.5, 0.5], [0.0, 1.0], [1.0, 0.0]), "stds must be positive"),
        (lambda: tr.GaussianMixture([0.5, 0.5], [0.0, 1.0]), "either stds or covariances"),
        (lambda: tr.GaussianMixture([1.0], PLANE, covariances=-torch.eye(2)[None]), "definite"),
        (lambda: tr.GaussianMixture([1.0], PLANE, covariances=torch.eye(2)), "covariances must"),
        (lambda: tr.GaussianMixture([1.0], PLANE, [1.0]).cdf(torch.zeros(1)), "one dimension"),
        (lambda: tr.LogDensity(lambda x: x, dim=0), "dim"),
        (lambda: tr.Gaussian(-1.0), "positive"),
        (lambda: tr.StudentT(degrees=math.nan), "positive"),
        (lambda: tr.Noisy(lambda x: -x, energy=tr.Gaussian(1.0)), r"LogDensity\(f, dim\)"),
        (lambda: tr.Noisy(3.0, energy=tr.Gaussian(1.0)), r"must be a Target .* got 3.0$"),
        (
            lambda: logistic_regression(torch.zeros(5, 2), torch.zeros(5), batch_size=6),
            "batch_size",
        ),
        (lambda: tall((torch.zeros(3), torch.zeros(4))), "same first size"),
        (lambda: tall(torch.zeros(3)), "tuple of tensors"),
    ],
)
def test_bad_targets(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def tall(data):
    return tr.TallPosterior(lambda x, d: d, lambda x: x, data, 1, batch_size=1)


def banana_of_one_point(x):
    return -0.5 * (x[0] ** 2 / 4 + (x[1] + 0.25 * x[0] ** 2 - 1) ** 2 / 0.25)


def tall_of(likelihood, prior):
    return tr.TallPosterior(likelihood, prior, (torch.randn(50, 3),), 3, batch_size=5)


def product(b, x):
    return -(x * b).sum(-1)


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (banana_of_one_point, r"shape \(3,\).*batched=False"),
        (lambda x: -0.5 * x[5].square().sum(), r"\(3, 2\): IndexError.*batched=False"),
        (lambda x: -0.5 * x.detach().square().sum(-1), "does not depend on its points"),
        (lambda x: -0.5 * x.square().sum(-1) + torch.randn(len(x)), "different values"),
        (lambda x: None, "got NoneType"),
        (tall_of(product, lambda b: -b.square().sum()), r"log_prior .*shape \(\)"),
        (tall_of(product, lambda b: -b.square()), "log_prior"),
        (tall_of(lambda b, x: (b @ x).sum(-1), lambda b: -b.square().sum(-1)), r"\(2, 1, 1, 3\)"),
    ],
)
def test_a_target_is_tried_before_the_run(target, word):
    """Two rungs, one run, two dimensions: the shape check alone would accept one point."""
    dim = {} if isinstance(target, tr.TallPosterior) else {"dim": 2}
    with pytest.raises(TargetError, match=word):
        tr.sample(target, **dim, temperatures=(1.0, 5.0), lr=1e-3, n_steps=100)


@pytest.mark.parametrize("dim", [1, 2, 7, 8, 9, 10, 30_000])
def test_a_function_of_one_point_is_found_out_at_the_cost_of_a_few_points(dim):
    tried = []

    def of_one_point(x):
        tried.append(x.numel())
        return -0.5 * x[0].square() - x[-1].square()

    with pytest.raises(TargetError, match="batched=False"):
        tr.LogDensity(of_one_point, dim).check(torch.zeros(2, 1, dim))
    assert max(tried) <= 9 * dim


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["of a coordinate", "of a point"])
def test_a_prior_given_as_a_distribution_is_evaluated_and_drawn_from(kind, compiled):
    """The same law as with a function; each run starts at its own point, decided by the seed."""
    data = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    normal = torch.distributions.Normal(1.0, 3.0)
    of_point = torch.distributions.Independent(normal.expand((2,)), 1)

    def likelihood(x, y):
        return -0.5 * (y - x).square().sum(-1)

    def target(log_prior):
        return tr.TallPosterior(likelihood, log_prior, (data,), 2, batch_size=10)

    law = target(normal if kind == "of a coordinate" else of_point)
    function = target(lambda x: normal.log_prob(x).sum(-1))
    common = {"temperatures": (1.0, 1.1), "lr": 1e-3, "n_steps": 40, "n_runs": 500, "seed": 3}
    x = torch.randn(7, 2)
    assert torch.allclose(law.full_energy(x), function.full_energy(x))
    draws = tr.sample(law, **common, compiled=False)
    if compiled:
        again = tr.sample(law, **common, compiled=True)
        assert torch.allclose(draws.values, again.values, rtol=1e-3, atol=1e-3)
    first = draws.values[:, 0]
    assert len(first[:, 0].unique()) == 500
    assert 2.0 < float(first.std()) < 4.0  # one small step after the prior
    given = tr.sample(function, **common, compiled=False)
    # A function cannot be drawn from: all start at 0.
    assert bool((given.values[:, 0].abs() < 1.0).all())


@pytest.mark.parametrize("checks", [True, False], ids=["checked", "after torch.compile"])
def test_a_distribution_is_not_left_outside_its_support(checks, monkeypatch):
    """Exponential.log_prob(-1) is a number if nothing checks it, and so a law on negative numbers
    would be sampled in silence. There the energy is NaN, of that point alone, in each kind of use.
    """
    # torch.compile switches the checks off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", checks)
    law = torch.distributions.Exponential(torch.tensor(1.0))
    x = torch.tensor([[[0.5], [-0.5], [2.0]]])
    data = (torch.zeros(10),)
    energies = [
        tr.LogDensity(lambda x: law.log_prob(x).sum(-1), 1).energy(x, {}).total,
        tr.LogDensity(lambda x: law.log_prob(x).sum(), 1, batched=False).energy(x, {}).total,
        tr.TallPosterior(lambda w, y: 0.0 * w[..., 0] * y, law, data, 1, batch_size=5).full_energy(
            x
        ),
        tr.TallPosterior(
            lambda w, y: torch.distributions.Normal(0.0, w[..., 0]).log_prob(y),
            lambda w: 0.0 * w[..., 0],
            data,
            1,
            batch_size=5,
        ).full_energy(x),
    ]
    for energy in energies:
        assert energy.isnan().tolist() == [[False, True, False]]
    to_zero = tr.TallPosterior(
        lambda w, y: -0.5 * (w[..., 0] - y).square(), law, data, 1, batch_size=5
    )
    common = {"temperatures": (1.0, 2.0), "lr": 0.01, "n_steps": 500, "n_runs": 8}
    likelihoods = {"tempering": "likelihood", "swap_batch": "full"}
    for rules in {}, likelihoods:
        with pytest.raises(NonFiniteEnergyError, match="sample the log of a positive one"):
            tr.sample(to_zero, **common, **rules)
    with pytest.raises((TargetError, NonFiniteEnergyError), match="the support"):
        tr.sample(lambda x: law.log_prob(x).sum(-1), dim=1, initial=-1.0, **common)


class OfTheUser(torch.distributions.Distribution):
    """Two coordinates, each with its own normal law. It says neither support nor variance."""

    arg_constraints: ClassVar = {}

    def __init__(self):
        super().__init__(event_shape=torch.Size([2]))

    def sample(self, shape=()):
        return torch.randn(*shape, 2) * torch.tensor([1.0, 2.0])

    def log_prob(self, x):
        return torch.distributions.Normal(0.0, torch.tensor([1.0, 2.0])).log_prob(x).sum(-1)


def test_a_prior_of_a_class_of_the_user_needs_no_support():
    data = (torch.zeros(10),)
    target = tr.TallPosterior(lambda w, y: 0.0 * w[..., 0] * y, OfTheUser(), data, 2, batch_size=5)
    x = torch.tensor([[1.0, 2.0]])
    assert torch.allclose(target.full_energy(x), -OfTheUser().log_prob(x))
    assert target.prior_variance == pytest.approx(1.0, rel=0.08)  # of 10,000 draws


def test_a_density_that_mixes_the_points_of_a_batch_is_refused():
    """Runs would depend on each other. A density that refuses other points is none of these."""

    def mixes(x):
        return -0.5 * x.square().sum(-1) - x.mean(0).square().sum()

    def refuses(x):
        if bool((x > 0.5).any()):
            raise ValueError("outside")
        return -0.5 * x.square().sum(-1)

    options = {"dim": 2, "temperatures": (1.0, 2.0), "lr": 0.01, "n_steps": 2}
    with pytest.raises(TargetError, match="depends on the other points of its batch"):
        tr.sample(mixes, **options)
    tr.sample(refuses, **options)
