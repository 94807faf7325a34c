"""Tempering the likelihood alone: the law of every rung, up to the prior, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Cauchy, Normal

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.errors import InvalidArgumentError, LadderError, TargetError
from torchrex.exchange.algorithm import Energy

# The mean of Gaussian data with the prior N(0, 1/2): at temperature T the law is
# N(N c / T / a, 1 / a) with a = N / T + 2.
N, CENTRE, PRIOR = 64, 1.5, 0.5
TEMPERATURES = (1.0, 4.0, 30.0, math.inf)
LADDER = tr.Ladder.for_likelihood(TEMPERATURES, 0.1 / N, prior_variance=PRIOR)
STIFFNESS = torch.tensor([N / t + 1 / PRIOR for t in TEMPERATURES], dtype=torch.float64)
MEAN = torch.tensor([N * CENTRE / t for t in TEMPERATURES], dtype=torch.float64) / STIFFNESS
STILL = tr.Ladder(TEMPERATURES, 1e-30)


def conjugate(spread=0.0, batch_size=16):
    y = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = CENTRE + spread * (y - y.mean()) / y.std(correction=0)
    prior = Normal(*torch.tensor([0.0, math.sqrt(PRIOR)], dtype=torch.float64))
    return tr.TallPosterior(
        lambda x, y: -0.5 * (y - x.squeeze(-1)).square(), prior, (y,), 1, batch_size=batch_size
    )


def exact_start(n_runs, widen=1.0):
    z = torch.randn(4, n_runs, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return MEAN[:, None, None] + z * (widen / STIFFNESS).sqrt()[:, None, None]


def at_rungs(run):
    """Positions (rungs, runs)."""
    return run.ensemble.position[..., 0].gather(0, run.state.replica_at.long())


def after_moves(tempering):
    """Without swaps and with exact gradients, from the law of SGLD on each rung."""
    lrs = torch.tensor(LADDER.lrs, dtype=torch.float64)
    exact = 1.0 / (1.0 - lrs * STIFFNESS / 2.0)  # over 1 / stiffness
    start = exact_start(4_000, widen=exact)
    ensemble = tr.TensorEnsemble.start(
        conjugate(), n_rungs=4, n_runs=4_000, initial=start, dtype=torch.float64
    )
    ladder = LADDER if tempering == "likelihood" else tr.Ladder((1.0, 4.0, 30.0, 1e6), LADDER.lrs)
    run = tr.DensityExchange(ensemble, ladder, pairing=tr.NoSwaps(), tempering=tempering, seed=2)
    list(run.advance(30))
    return at_rungs(run), exact / STIFFNESS


def test_moves_keep_the_law_of_every_rung():
    """The mutant tempers the prior too: its hot rungs are wider."""
    x, variance = after_moves("likelihood")
    for rung in range(4):
        assert_mean_is(x[rung], float(MEAN[rung]))
        assert_mean_is((x[rung] - MEAN[rung]).square(), float(variance[rung]))
    x, _ = after_moves("posterior")
    assert_mean_is_not((x[2] - MEAN[2]).square(), float(variance[2]))


def after_swaps(n_runs=4_000, **rules):
    """Exact replicas that do not move, on minibatches or swap batches of noisy data."""
    start = exact_start(n_runs)
    ensemble = tr.TensorEnsemble.start(
        conjugate(spread=0.25), n_rungs=4, n_runs=n_runs, initial=start, dtype=torch.float64
    )
    rules = {"pairing": tr.RandomPair(), "tempering": "likelihood", **rules}
    run = tr.DensityExchange(ensemble, STILL, seed=3, **rules)
    list(run.advance(60))
    moved = (run.state.replica_at != torch.arange(4)[:, None]).double().mean(1)
    return at_rungs(run), moved


@pytest.mark.parametrize("rules", [{}, {"swap_batch": 32}, {"swap_batch": "full"}])
def test_swaps_keep_the_law_of_every_rung(rules):
    x, moved = after_swaps(**rules)
    assert float(moved.min()) > 0.2
    for rung in range(4):
        assert_mean_is(x[rung], float(MEAN[rung]))
        assert_mean_is((x[rung] - MEAN[rung]).square() * STIFFNESS[rung], 1.0)


def test_swaps_compare_the_likelihood_alone(monkeypatch):
    """The mutant compares energies with their prior."""
    monkeypatch.setattr(Energy, "data_term", property(lambda energy: energy.total))
    x, _ = after_swaps(12_000, swap_batch="full")
    assert_mean_is_not(x[0], float(MEAN[0]))


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x))


def of_module(n_steps, ladder, **rules):
    """The weight on every rung after some steps of many runs."""
    data = tr.DeviceLoader((torch.zeros(N), torch.full((N,), CENTRE, dtype=torch.float64)), 16)
    energy = tr.PosteriorEnergy(
        lambda out, y: 0.5 * (out - y).square(), n_data=N, prior=tr.GaussianPrior(1 / PRIOR)
    )
    ensemble = tr.ModuleEnsemble(Weight, energy)
    found = []
    start = exact_start(150)
    for seed in range(150):
        run = tr.ModuleExchange(ensemble, ladder, tempering="likelihood", seed=seed, **rules)
        for k, module in enumerate(run.ensemble.modules):
            module.w.data.copy_(start[k, seed])
        list(run.advance(n_steps, data))
        found.append([run.live_module_at(rung).w.item() for rung in range(4)])
    return torch.tensor(found, dtype=torch.float64).T, start


def test_modules_move_and_swap_by_the_same_rules():
    """The data are all alike, so that energies are exact; without moves swaps keep every rung's
    law, without swaps one step is that of the formula."""
    x, start = of_module(30, STILL)
    assert float((x != start[..., 0]).double().mean()) > 0.3
    for rung in range(4):
        assert_mean_is(x[rung], float(MEAN[rung]))
        assert_mean_is((x[rung] - MEAN[rung]).square() * STIFFNESS[rung], 1.0)
    x, start = of_module(1, LADDER, pairing=tr.NoSwaps())
    step = x - start[..., 0]
    for rung, (lr, a) in enumerate(zip(LADDER.lrs, STIFFNESS.tolist(), strict=True)):
        drift = -lr * a * (start[rung, :, 0] - MEAN[rung])
        assert_mean_is(step[rung] - drift, 0.0)
        assert_mean_is((step[rung] - drift).square() / (2 * lr), 1.0)


def test_learning_rates_rise_with_the_temperature_up_to_what_the_prior_bears():
    ladder = tr.Ladder.for_likelihood((1.0, 100.0, math.inf), 1e-6, prior_variance=4.0)
    assert ladder.lrs[0] == pytest.approx(1e-6, rel=1e-5)
    assert ladder.lrs[1] == pytest.approx(1e-4, rel=1e-3)
    assert ladder.lrs[2] == pytest.approx(0.4)
    draws = tr.sample(
        conjugate(), temperatures=TEMPERATURES, lr=0.1 / N, n_steps=20, tempering="likelihood"
    )
    assert str(LADDER) in draws.settings["run"]
    assert draws.settings["temperatures"] == [1.0, 4.0, 30.0, math.inf]


def test_saved_and_loaded(tmp_path):
    """An infinite temperature comes back."""
    options = {"temperatures": TEMPERATURES, "lr": 0.1 / N, "tempering": "likelihood"}
    draws = tr.sample(conjugate(), n_steps=40, checkpoints=tmp_path / "c", **options)
    draws.save(tmp_path / "draws.safetensors")
    assert tr.Draws.load(tmp_path / "draws.safetensors").settings == draws.settings
    again = tr.sample(conjugate(), n_steps=40, checkpoints=tmp_path / "c", **options)
    assert torch.equal(again.values, draws.values)
    assert "inf" in draws.summary() or draws.pairs()


def without_prior():
    return tr.TallPosterior(
        lambda x, y: -0.5 * (y - x.squeeze(-1)).square(),
        lambda x: 0.0 * x.sum(-1),
        (torch.zeros(9),),
        1,
        batch_size=3,
    )


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"tempering": "prior"}, InvalidArgumentError, "posterior or likelihood, got 'prior'"),
        ({"temperatures": (1.0, math.inf)}, InvalidArgumentError, 'tempering="likelihood"'),
        (
            {"target": tr.GaussianMixture([1.0], [0.0], [1.0]), "tempering": "likelihood"},
            InvalidArgumentError,
            "a prior apart from them",
        ),
        (
            {
                "target": without_prior(),
                "tempering": "likelihood",
                "temperatures": (1.0, math.inf),
                "lr": (1e-3, 1e-3),
            },
            InvalidArgumentError,
            "not known to be proper",
        ),
        (
            {"target": without_prior(), "tempering": "likelihood", "temperatures": (1.0, math.inf)},
            LadderError,
            "one lr per rung",
        ),
        ({"temperatures": (1.0, math.inf, math.inf)}, LadderError, "rise from cold to hot"),
    ],
)
def test_bad_input(options, kind, words):
    options = {"target": conjugate(), "temperatures": (1.0, 2.0), "lr": 1e-3, **options}
    with pytest.raises(kind, match=words):
        tr.sample(n_steps=5, **options)


def test_modules_without_a_gaussian_prior_are_refused():
    def run(prior, ladder=STILL):
        energy = tr.PosteriorEnergy(lambda out, y: (out - y).square(), n_data=N, prior=prior)
        return tr.ModuleExchange(tr.ModuleEnsemble(Weight, energy), ladder, tempering="likelihood")

    for prior in (None, lambda parameters: parameters["w"].square().sum()):
        with pytest.raises(InvalidArgumentError, match="a module with a GaussianPrior"):
            run(prior)
    with pytest.raises(InvalidArgumentError, match="not known to be proper"):
        run(tr.GaussianPrior(1.0, groups={"w": 0.0}))
    run(tr.GaussianPrior(1.0, groups={"w": 0.0}), tr.Ladder((1.0, 2.0), 1e-3))


def test_a_prior_without_a_variance():
    """That of a Cauchy law is not known; a finite temperature will do."""
    target = tr.TallPosterior(
        lambda x, y: -0.5 * (y - x.squeeze(-1)).square(),
        Cauchy(torch.tensor(0.0), torch.tensor(1.0)),
        (torch.zeros(9),),
        1,
        batch_size=3,
    )
    options = {"lr": 1e-3, "n_steps": 20, "tempering": "likelihood"}
    assert tr.sample(target, temperatures=(1.0, 10.0), **options).n_draws == 20


def test_the_step_on_the_prior_is_that_of_its_narrowest_direction():
    narrow = torch.distributions.MultivariateNormal(
        torch.zeros(2), torch.tensor([[1.0, 0.99], [0.99, 1.0]])
    )
    data = [torch.zeros(10)]

    def target(prior):
        return tr.TallPosterior(lambda x, y: 0 * y * x.sum(-1), prior, data, 2, batch_size=5)

    assert target(narrow).prior_variance == pytest.approx(0.01, rel=1e-3)
    # These have no formula; 10,000 draws of a variance, 4 sigmas.
    to_log = torch.distributions.ExpTransform().inv
    log = torch.distributions.TransformedDistribution(
        torch.distributions.Exponential(1.0), [to_log]
    )
    assert target(log).prior_variance == pytest.approx(math.pi**2 / 6, rel=0.08)
    same = torch.distributions.TransformedDistribution(narrow, [])
    assert target(same).prior_variance == pytest.approx(0.01, rel=0.08)
    with pytest.raises(TargetError, match=r"of one coordinate or of 2 .* Normal of shape \(3,\)"):
        target(torch.distributions.Normal(torch.zeros(3), 1.0))
    heavy = target(torch.distributions.StudentT(1.5))
    assert math.isinf(heavy.prior_variance)
    with pytest.raises(LadderError, match="a prior whose variance is known"):
        tr.sample(heavy, temperatures=(1.0, math.inf), lr=0.01, tempering="likelihood", n_steps=10)
    ladder = tr.Ladder.descent(0.1)
    with pytest.raises(InvalidArgumentError, match="temperatures above 0"):
        tr.sample(target(narrow), ladder=ladder, tempering="likelihood", n_steps=10)


def test_a_schedule_that_ends_is_named():
    """Past its end the temperature is NaN, though that of the moves is 1."""
    target = tr.TallPosterior(
        lambda x, y: -0.5 * (y - x.sum(-1)).square(), torch.distributions.Normal(0.0, 1.0),
        [torch.zeros(10)], 1, batch_size=5,
    )  # fmt: skip
    ladder = tr.Ladder((1.0, 2.0), 0.01, anneal=lambda step: ([1.0] * 5)[step])
    with pytest.raises(LadderError, match="the schedule anneal failed at step 5"):
        tr.sample(target, ladder=ladder, tempering="likelihood", n_steps=10, swap_batch=5)
