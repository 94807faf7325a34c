"""The rules of the paper's code that the paper does not spell out, held against its logs, its
schedules and exact laws.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchrex as tr
from assertions import FALSE_ALARM_SIGMAS, assert_mean_is, assert_mean_is_not
from modules import joined, same
from torchrex.exchange import PerExample, ProportionalToGap, RepeatedDraws, draw_exchange_inputs
from torchrex.exchange.algorithm import ExchangeState, StepInputs, exchange_rungs
from torchrex.experiments.recipes import get_recipe
from torchrex.rng import Streams
from torchrex.runs.config import override
from torchrex.schedules import constant
from torchrex.targets import Energy

CPU = torch.device("cpu")
EPOCH = 195  # steps


def rules_of(config):
    return config.run(0, CPU, config.energy()).rules


# The threshold of the swap rule


LOGGED = 6678.8
# The variances are given to three digits: 6.41e6 and 5.86e6 are right to 5e3 each, which is 5.4 of
# the threshold.
ROUNDING = LOGGED * (0.005 + 0.005) / (6.41 + 5.86) + LOGGED * 0.005 / 97.52


def corrections_of(rules, epoch, variance, n_swaps=1):
    """The correction in each of the first tests of an epoch, all of which swap."""
    state = ExchangeState.start(rules, 1, device=CPU, dtype=torch.float64)
    state = state._replace(noise_variance=torch.full_like(state.noise_variance, variance))
    table = draw_exchange_inputs(
        Streams(0), rules, epoch * EPOCH, n_swaps, runs=1, device=CPU, dtype=torch.float64
    )
    found = []
    for k in range(n_swaps):
        inputs = StepInputs(*(values[k] for values in table), torch.tensor(k), ({},), move_noise={})
        higher_on_rung_0 = torch.where(state.replica_at.argsort(0) == 0, 1e9, 0.0)  # by replica
        energy = Energy(higher_on_rung_0.double())
        new, _, info = exchange_rungs(state, energy, [energy], inputs, rules, 50_000, False)
        state = new._replace(noise_variance=state.noise_variance)
        assert bool(info.accepted)
        found.append(float(info.correction))
    return found


def threshold_in_the_log(rules):
    """Two swaps at the first steps of epoch 10, then the correction with the logged variances."""
    return corrections_of(rules, 10, (6.41e6 + 5.86e6) / 2, n_swaps=3)[-1]


def test_the_threshold_is_the_one_the_authors_logged():
    config = get_recipe("icml2020/cifar10-resnet20")
    assert threshold_in_the_log(rules_of(config)) == pytest.approx(LOGGED, abs=ROUNDING)
    exact = 80 * 1.02**10 * (6.41e6 + 5.86e6) / (3e5 * 1.02**10 * 0.7**2)
    assert threshold_in_the_log(rules_of(config)) == pytest.approx(exact, rel=1e-9)


def test_the_threshold_does_not_change_when_the_ladder_cools():
    """F follows the annealing. Without that the correction would grow 1.02 times an epoch."""
    rules = rules_of(get_recipe("icml2020/cifar10-resnet20"))
    constant_factor = replace(rules, factor=tr.ConstantFactor(1.5e5))
    for each, growth in ((rules, 1.0), (constant_factor, 1.02**400)):
        (early,), (late,) = (corrections_of(each, epoch, 1e6) for epoch in (50, 450))
        assert late / early == pytest.approx(growth, rel=1e-9)


@pytest.mark.parametrize(
    "mutant",
    [{"factor_per_swap": 1.0}, {"factor_per_swap": 0.8}, {"correction_factor": 3e5}],
    ids=["not lowered", "by the other factor", "with the mean of the variances for the sum"],
)
def test_other_rules_do_not_give_it(mutant):
    config = replace(get_recipe("icml2020/cifar10-resnet20"), **mutant)
    assert abs(threshold_in_the_log(rules_of(config)) - LOGGED) > 100 * ROUNDING


# F per swap, a late first swap, a rest after a swap: on a density of energy 0, where every test
# accepts


def flat():
    return tr.LogDensity(lambda x: 0.0 * x.sum(-1), 1, gradient=torch.zeros_like)


def flat_run(n_rungs=4, n_runs=1, **rules):
    rules = {"noise": tr.KnownVariance(0.0), **rules}
    ensemble = tr.TensorEnsemble.start(flat(), n_rungs=n_rungs, n_runs=n_runs, dtype=torch.float64)
    return tr.DensityExchange(ensemble, tr.Ladder([1.0 + k for k in range(n_rungs)], 0.1), **rules)


def advance(run, n_steps):
    blocks = run.advance(n_steps)
    return joined([type(info)(*(values.clone() for values in info)) for info in blocks])


def test_every_swap_lowers_the_factor_of_its_own_pair():
    run = flat_run(
        correction_factor=ProportionalToGap(8.0, per_swap=0.5), pairing=tr.RandomPair(), n_runs=3
    )
    swaps = torch.zeros(3, 3, dtype=torch.float64)
    for _ in range(20):
        swaps += run.step().accepted
        assert torch.equal(run.state.correction_factor, 8.0 * 0.5**swaps)
    assert swaps.unique().numel() > 3, "all pairs alike: nothing was told apart"
    kept = flat_run(correction_factor=ProportionalToGap(8.0))
    assert advance(kept, 10).accepted.any()
    assert (kept.state.correction_factor == 8.0).all()
    # A correction far above the energy difference of 0: no test is accepted, and F stays.
    refused = flat_run(
        noise=tr.KnownVariance(1e9), correction_factor=ProportionalToGap(8.0, per_swap=0.5)
    )
    info = advance(refused, 10)
    assert info.proposed.any()
    assert not info.accepted.any()
    assert (refused.state.correction_factor == 8.0).all()
    for per_swap in (0.0, -0.5, 1.1, math.nan):
        with pytest.raises(tr.TorchrexError, match=r"\(0, 1\]"):
            ProportionalToGap(1.0, per_swap=per_swap)


@pytest.mark.parametrize(
    ("start", "interval", "first"), [(0, 1, 0), (7, 1, 7), (300, 1, 300), (7, 5, 10), (10, 5, 10)]
)
def test_no_swap_is_tested_before_its_time(start, interval, first):
    info = advance(flat_run(n_rungs=2, swap_start=start, swap_interval=interval), 320)
    tested = info.proposed[:, 0, 0].nonzero()[:, 0].tolist()
    assert tested == list(range(first, 320, interval))
    assert info.accepted[:, 0, 0].nonzero()[:, 0].tolist() == tested


def times(mask):
    return [mask[:, pair, 0].nonzero()[:, 0].tolist() for pair in range(mask.shape[1])]


def test_a_pair_that_has_swapped_rests():
    """Exactly so many steps, in which it is not counted as tested; pairs that have not swapped go
    on."""
    info = advance(flat_run(n_rungs=2, swap_rest=4), 21)
    assert times(info.proposed) == times(info.accepted) == [[0, 5, 10, 15, 20]]
    assert times(advance(flat_run(n_rungs=2, swap_rest=1), 6).proposed) == [[0, 2, 4]]
    # Pairs 0 and 2 are due at even steps and pair 1 at odd ones, each on its own clock.
    info = advance(flat_run(n_rungs=4, swap_rest=2), 13)
    assert times(info.proposed) == times(info.accepted) == [[0, 4, 8, 12], [1, 5, 9], [0, 4, 8, 12]]
    # A rest counts steps, however many rounds a step has.
    info = advance(flat_run(n_rungs=4, swap_rest=4, pairing=tr.AllInTurn()), 11)
    assert times(info.proposed) == times(info.accepted) == [[0, 5, 10]] * 3


def test_only_a_swap_is_followed_by_a_rest():
    """Pair 0 is refused for ever: its hot replica's energy is higher. The other pairs swap and
    rest."""
    target = tr.LogDensity(lambda x: -1e6 * x[:, 0], 1, gradient=torch.zeros_like)
    start = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64).view(4, 1, 1)
    ensemble = tr.TensorEnsemble.start(target, n_rungs=4, initial=start, dtype=torch.float64)
    run = tr.DensityExchange(
        ensemble, tr.Ladder((1.0, 2.0, 3.0, 4.0), 1e-60), noise=tr.KnownVariance(), swap_rest=3
    )
    info = advance(run, 9)
    assert times(info.proposed)[0] == [0, 2, 4, 6, 8]
    assert times(info.accepted)[0] == []
    assert times(info.proposed)[1:] == times(info.accepted)[1:] == [[1, 5], [0, 4, 8]]


def test_a_rest_outlives_a_stop():
    whole, parts = flat_run(n_rungs=2, swap_rest=6), flat_run(n_rungs=2, swap_rest=6)
    info = advance(whole, 30)
    before = advance(parts, 10)
    resumed = flat_run(n_rungs=2, swap_rest=6)
    resumed.load_state_dict(parts.state_dict())
    assert torch.equal(joined([before, advance(resumed, 20)]).proposed, info.proposed)
    assert same(resumed.state._asdict(), whole.state._asdict())
    for name, other in (("swap_rest", 5), ("swap_start", 1)):
        with pytest.raises(tr.TorchrexError, match=name):
            flat_run(n_rungs=2, **{"swap_rest": 6, name: other}).load_state_dict(parts.state_dict())


# Noise that does not follow the learning rate


def quadratic():
    return tr.LogDensity(lambda x: -0.5 * x.square().sum(-1), 1)


def variance_with(noise, lr=0.5, temperature=2.0, n_runs=50_000):
    """x^2 of independent runs of SGLD at stiffness 1, begun with exact draws, so that a few steps
    suffice to see a mutant."""
    ladder = tr.Ladder((temperature,), lr, noise=noise)
    ensemble = tr.TensorEnsemble.start(quadratic(), n_rungs=1, n_runs=n_runs, dtype=torch.float64)
    run = tr.DensityExchange(ensemble, ladder, seed=3)
    advance(run, 40)  # (1 - lr)^80 of the start is left, which is nothing
    return run.ensemble.position.square().flatten()


def test_noise_multiplies_the_variance_of_the_moves():
    """SGLD on a quadratic: temperature / (1 - lr / 2), times the schedule's value."""
    law = 2.0 / (1 - 0.5 / 2)
    assert_mean_is(variance_with(constant(4.0)), 4.0 * law)
    assert_mean_is(variance_with(None), law)
    # The mutant: a ladder that forgets its noise.
    assert_mean_is_not(variance_with(None), 4.0 * law)


def first_acceptance(**ladder):
    """Which of many runs swap at the first step, when the hot replica's energy is higher by 1."""
    start = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    ensemble = tr.TensorEnsemble.start(
        tr.LogDensity(lambda x: -x[:, 0], 1), n_rungs=2, n_runs=200_000, initial=start
    )
    return tr.DensityExchange(ensemble, tr.Ladder((1.0, 2.0), 0.1, **ladder)).step().accepted[0]


def test_swaps_know_nothing_of_it():
    """The gap is 1 - 1/2 with or without it; a test at the temperature of the moves would have a
    quarter of that."""
    swaps = first_acceptance(noise=constant(4.0))
    assert_mean_is(swaps, math.exp(-0.5))
    assert_mean_is_not(swaps, math.exp(-0.5 / 4))
    assert_mean_is(first_acceptance(noise=constant(4.0), anneal=constant(0.5)), math.exp(-1.0))


def test_swaps_and_kept_noise_together_move_with_both():
    """After a swap a replica has the noise of its new rung: temperature * noise of that rung."""
    ladder = tr.Ladder((1.0, 3.0), (0.1, 0.2), noise=constant(5.0))
    ensemble = tr.TensorEnsemble.start(flat(), n_rungs=2, n_runs=100_000, dtype=torch.float64)
    run = tr.DensityExchange(ensemble, ladder, noise=tr.KnownVariance(0.0))
    assert run.step().accepted.all()
    for replica, (lr, temperature) in enumerate(((0.2, 3.0), (0.1, 1.0))):
        assert_mean_is(run.ensemble.position[replica].square(), 2 * lr * temperature * 5.0)


# The prior outside the swaps


def nothing(output, target):
    """A loss of 0 that depends on the parameters."""
    return 0.0 * output.sum(1)


def pulled(prior, **options):
    """A run on no data but a prior, at temperatures at which nothing random is left."""
    energy = tr.PosteriorEnergy(nothing, n_data=100, prior=prior, **options)
    ensemble = tr.ModuleEnsemble(
        lambda: nn.Linear(3, 2, dtype=torch.float64), energy, initial="independent"
    )
    return tr.ModuleExchange(
        ensemble, tr.Ladder((1e-30, 2e-30), (0.01, 0.01)), noise=tr.KnownVariance()
    )


BATCH = (torch.ones(5, 3, dtype=torch.float64), torch.zeros(5, dtype=torch.int64))
PRIORS = {
    "gaussian": tr.GaussianPrior(8.0),
    "grouped": tr.GaussianPrior(8.0, groups={"bias": 8.0}),
    "function": lambda parameters: sum(4.0 * p.square().sum() for p in parameters.values()),
}


@pytest.mark.parametrize("prior", PRIORS)
def test_the_prior_pulls_but_does_not_enter_the_swaps(prior):
    inside, outside = pulled(PRIORS[prior]), pulled(PRIORS[prior], prior_in_swaps=False)
    before = outside.ensemble.position.clone()
    assert torch.equal(before, inside.ensemble.position)
    squares = before.square().sum(1, keepdim=True)
    assert not outside.energies(BATCH).total.any()
    info = inside.step(BATCH)
    torch.testing.assert_close(info.energy, 4.0 * squares)
    torch.testing.assert_close(inside.ensemble.position, 0.92 * before)
    info = outside.step(BATCH)
    assert torch.equal(info.energy, torch.zeros(2, 1, dtype=torch.float64))
    assert bool(info.accepted), "equal energies are always exchanged"
    torch.testing.assert_close(outside.ensemble.position, 0.92 * before)  # 1 - lr * precision


def test_the_recipes_say_where_the_prior_is():
    clean, theirs = (
        get_recipe(f"{family}/cifar10-resnet20").energy() for family in ("clean", "icml2020")
    )
    assert (clean.prior_in_swaps, theirs.prior_in_swaps) == (True, False)
    assert clean.prior == theirs.prior == tr.GaussianPrior(25.0)
    assert repr(clean) != repr(theirs)  # they must not share one compiled energy


# The schedules of the image recipes


def at_epoch(config, *epochs):
    """Temperatures, learning rates and temperatures of the moves at the first steps of some epochs:
    each (epochs, rungs)."""
    rows = [
        config.ladder().table(epoch * config.steps_per_epoch, 1, device=CPU, dtype=torch.float64)
        for epoch in epochs
    ]
    return [torch.cat(values) for values in zip(*rows, strict=True)]


EPOCHS = torch.tensor([0, 199, 200, 201, 499], dtype=torch.float64)


@pytest.mark.parametrize("family", ["clean", "icml2020"])
def test_the_ladder_is_that_of_the_paper(family):
    config = get_recipe(f"{family}/cifar10-resnet20")
    temperature, lr, of_moves = at_epoch(config, *EPOCHS.int().tolist())
    rungs = torch.tensor([[1.0, 5.0]], dtype=torch.float64)
    torch.testing.assert_close(
        temperature, 0.01 / 1.02 ** EPOCHS[:, None] * rungs, rtol=1e-12, atol=0.0
    )
    decay = torch.tensor([1.0, 1.0, 1.0, 0.984, 0.984**299], dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        lr, 2e-6 * decay * torch.tensor([[1.0, 1.5]], dtype=torch.float64), rtol=1e-12, atol=0.0
    )
    assert float(lr[0, 0] / lr[-1, 0]) == pytest.approx(124.0, rel=0.005)
    # The kick of SGHMC is sqrt(2 lr a temperature of the move): with the initial lr in the authors'
    # code, else with the lr.
    with_lr = lr[:1] if family == "icml2020" else lr
    torch.testing.assert_close(lr * of_moves, with_lr * temperature, rtol=1e-12, atol=0.0)
    last = at_epoch(config, 499)
    within = config.ladder().table(500 * EPOCH - 1, 1, device=CPU, dtype=torch.float64)
    assert same(last, list(within))  # it changes with the epoch, not with the step


def test_the_other_methods_are_rungs_of_it():
    epochs = EPOCHS.int().tolist()
    for family in ("clean", "icml2020"):
        pair = at_epoch(get_recipe(f"{family}/cifar100-wrn-16-8"), *epochs)
        assert same(at_epoch(get_recipe(f"{family}/cifar100-wrn-16-8-independent"), *epochs), pair)
        assert same(
            at_epoch(get_recipe(f"{family}/cifar100-wrn-16-8-sghmc"), *epochs),
            [values[:, :1] for values in pair],
        )
        temperature, lr, of_moves = at_epoch(
            get_recipe(f"{family}/cifar100-wrn-16-8-msgd"), *epochs
        )
        assert not temperature.any()
        assert not of_moves.any()
        assert torch.equal(lr, pair[1][:, :1])


@pytest.mark.parametrize("family", ["clean", "icml2020"])
def test_a_compressed_schedule_has_the_same_shape(family):
    """Epoch 3 k of 150 is epoch 10 k of 500; between them it follows the same curves."""
    whole = get_recipe(f"{family}/cifar10-resnet20")
    short = override(whole, ["epochs=150"])
    matching = range(0, 50, 7)
    for mine, paper in zip(
        at_epoch(short, *(3 * k for k in matching)),
        at_epoch(whole, *(10 * k for k in matching)),
        strict=True,
    ):
        torch.testing.assert_close(mine, paper, rtol=1e-9, atol=0.0)
    temperature, lr, _ = at_epoch(short, 100)
    assert float(temperature[0, 0]) == pytest.approx(0.01 * 1.02 ** (-1000 / 3))
    assert float(lr[0, 0]) == pytest.approx(2e-6 * 0.984 ** (1000 / 3 - 200))
    assert (short.n_steps, short.swap_start, short.intervals.burn_in) == (
        150 * EPOCH,
        3 * EPOCH,
        59 * EPOCH,
    )


def test_times_of_the_paper():
    config = get_recipe("icml2020/cifar10-wrn-28-10")
    assert config.steps_per_epoch == EPOCH
    assert config.intervals.burn_in == 199 * EPOCH
    assert (config.n_steps - config.intervals.burn_in) / config.steps_per_epoch == 301
    assert config.swap_start == 10 * EPOCH
    rules = rules_of(get_recipe("icml2020/cifar10-resnet20"))
    proposed = draw_exchange_inputs(
        Streams(0), rules, 0, 12 * EPOCH, runs=1, device=CPU, dtype=torch.float64
    ).proposed
    assert int(proposed.flatten().nonzero()[0]) == 10 * EPOCH
    assert (config.steps_of(config.rest_after_swap), rules.swap_rest) == (20 * EPOCH, 0)
    assert rules.noise == tr.Smoothing(0.3, RepeatedDraws(10, every=EPOCH))
    assert rules_of(get_recipe("clean/cifar10-resnet20")).noise == tr.PairedVariance(0.3)
    # However short a run, a swap waits for a variance.
    one = override(config, ["epochs=1", "net=resnet8"])
    assert (one.swap_start, override(one, ["variance=paired"]).swap_start) == (EPOCH, 4)
    assert override(one, ["variance=paired", "swaps_after=0"]).swap_start == 1


# The variance, by each of its estimators

N, SIZE = 2000, 800


@pytest.fixture(scope="module")
def estimates():
    """Samples of sigma2 by every feed, each from minibatches of its own, at two replicas of a
    network that was trained."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 10, generator=generator)
    y = (x[:, :4] + 0.5 * x[:, 4:8].square() + 0.5 * torch.randn(N, 4, generator=generator)).argmax(
        1
    )
    energy = tr.PosteriorEnergy(F.cross_entropy, n_data=N, prior=tr.GaussianPrior(1.0))
    ensemble = tr.ModuleEnsemble(
        lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)), energy
    )
    ladder = tr.Ladder((1.0, 30.0), (1e-4, 3e-4))
    run = tr.ModuleExchange(ensemble, ladder, noise=tr.PairedVariance(0.3), pairing=tr.NoSwaps())
    for _ in run.advance(400, tr.DeviceLoader((x, y), 100)):
        pass
    assert run.ensemble.n_data == N

    def batches(n):
        """Energies (n, replicas, 1) and terms (n, replicas, 1, SIZE) of independent minibatches
        without replacement."""
        index = [torch.randperm(N, generator=generator)[:SIZE] for _ in range(n)]
        seen = [run.energies((x[i], y[i])) for i in index]
        return torch.stack([each.total for each in seen]), torch.stack(
            [each.per_example for each in seen]
        )

    standing = run.state.replica_at
    found = {}
    for paired in (True, False):
        totals, _ = batches(2000)
        feed = RepeatedDraws(n_draws=20, paired=paired)
        found["repeated", paired] = torch.cat(
            [feed.sample(some, standing)[0] for some in totals.split(20)]
        )
        _, terms = batches(200)
        feed = PerExample(paired=paired)
        assert run._network.finite_population
        variance, n = torch.cat([feed.sample(one, standing)[0] for one in terms]), terms.shape[-1]
        found["per example", paired] = feed.scale(n, N, finite_population=True) * variance
        found["mutant", paired] = feed.scale(n, N) * variance
    return found


def distance(one, other):
    """In standard errors, of two sets of independent values."""
    error = (one.var() / len(one) + other.var() / len(other)).sqrt()
    return abs(float((one.mean() - other.mean()) / error))


@pytest.mark.parametrize("paired", [True, False])
def test_estimators_of_the_variance_agree(estimates, paired):
    repeated, mutant = estimates["repeated", paired], estimates["mutant", paired]
    assert distance(repeated, estimates["per example", paired]) < FALSE_ALARM_SIGMAS
    # The mutant: minibatches of 800 out of 2,000 without replacement vary by 0.6 of those with it.
    assert distance(repeated, mutant) > 2 * FALSE_ALARM_SIGMAS


@pytest.mark.parametrize("feed", ["repeated", "per example"])
def test_paired_and_unpaired_ask_different_questions(estimates, feed):
    paired, unpaired = estimates[feed, True], estimates[feed, False]
    assert distance(paired, unpaired) > 2 * FALSE_ALARM_SIGMAS
    assert paired.mean() < unpaired.mean()  # what replicas share on a minibatch cancels
