"""Ladders, schedules, pairing rules, who stands where, and steps of runs of both kinds."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchrex as tr
from assertions import assert_mean_is
from modules import batches, cross_entropy, make_run, mlp, same
from torchrex.errors import InvalidArgumentError, LadderError, NonFiniteEnergyError
from torchrex.exchange.assignment import Indexing, Selects
from torchrex.exchange.momentum import after_swap
from torchrex.network import ModuleExchange
from torchrex.samplers import Momentum

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: tr.Ladder((), 0.1), "at least one"),
        (
            lambda: tr.Ladder((2.0, 1.0), 0.1),
            r"rise from cold to hot, but rung 1 \(1\).*from_inverse",
        ),
        (lambda: tr.Ladder((0.0, 1.0), 0.1), "rung 0 has 0.*descent"),
        (lambda: tr.Ladder((1.0, float("nan")), 0.1), "positive, but rung 1 has nan"),
        (lambda: tr.Ladder((1.0, 2.0), (0.1, -0.1)), "rung 1 has -0.1"),
        (lambda: tr.Ladder((1.0, 2.0), (0.1, 0.1, 0.1)), "3 lrs for 2"),
        (lambda: tr.Ladder((1.0, 2.0), "12"), "lrs must be numbers"),
        (lambda: tr.Ladder("12", 0.1), "temperatures must be numbers"),
        (lambda: tr.Ladder.geometric(1.0, 0.5, 3, lrs=0.1), "0 < cold < hot"),
        (lambda: tr.Ladder.from_inverse((1.0, -0.5), 0.1), "positive"),
        (lambda: tr.Ladder((1.0,), 0.1, decay=lambda step: -1.0).refuse(0), "gave -1.0 at step 0"),
    ],
)
def test_bad_ladders(make, word):
    with pytest.raises(LadderError, match=word):
        make()


def test_constructors():
    geometric = tr.Ladder.geometric(1.0, 8.0, 4, lrs=0.1)
    assert geometric.temperatures == pytest.approx((1.0, 2.0, 4.0, 8.0))
    assert tr.Ladder.from_inverse((1.0, 0.5), 0.1).temperatures == (1.0, 2.0)
    assert repr(tr.Ladder((0.01, 0.05), (2e-6, 3e-6))) == "Ladder((0.01, 0.05), lrs=(2e-06, 3e-06))"
    assert tr.Ladder.descent(0.1).temperatures == (0.0,)


def test_annealing_multiplies_every_rung():
    anneal, decay = tr.schedules.geometric(0.5), tr.schedules.hold_then_decay(1, 0.1)
    ladder = tr.Ladder((1.0, 5.0), (0.1, 0.2), anneal=anneal, decay=decay)
    temperature, lr, _ = ladder.table(1, 2, device=CPU, dtype=torch.float32)
    assert torch.allclose(temperature, torch.tensor([[0.5, 2.5], [0.25, 1.25]]))
    assert torch.allclose(lr, torch.tensor([[0.1, 0.2], [0.01, 0.02]]))


def propose(rule, attempts, n_pairs, n_runs=4):
    return rule.propose(torch.Generator().manual_seed(0), torch.arange(attempts), n_pairs, n_runs)


def test_pairs_of_each_rule():
    proposed = propose(tr.EvenOdd(), 2, 5)[:, 0, :, 0]
    assert proposed.int().tolist() == [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]
    assert propose(tr.EvenOdd(), 3, 1).all()  # two rungs: the one pair is tested at every attempt
    assert torch.equal(propose(tr.AllInTurn(), 1, 3)[0, :, :, 0], torch.eye(3, dtype=torch.bool))
    assert tr.AllInTurn().n_rounds(3) == 3
    proposed = propose(tr.RandomPair(), 1, 3, n_runs=90_000)[0, 0]
    assert (proposed.sum(0) == 1).all()
    for pair in range(3):
        assert_mean_is(proposed[pair], 1 / 3)


@pytest.mark.parametrize("assignment", [Selects, Indexing])
@given(st.permutations(range(5)), st.lists(st.booleans(), min_size=4, max_size=4))
def test_swaps_keep_a_permutation(assignment, standing, wanted):
    replica_at = torch.tensor(standing, dtype=assignment.dtype)[:, None]
    accepted = torch.tensor(wanted)[:, None]
    for pair in range(1, 4):  # a round has disjoint pairs
        accepted[pair] &= ~accepted[pair - 1]
    after = assignment.swap(replica_at, accepted)
    expected = list(standing)
    for pair in range(4):
        if accepted[pair]:
            expected[pair], expected[pair + 1] = expected[pair + 1], expected[pair]
    assert after[:, 0].tolist() == expected
    rung_of = assignment.invert(after)
    assert all(rung_of[replica, 0] == expected.index(replica) for replica in range(5))


@pytest.mark.parametrize("n", [2, 5, 16, 17, 40])
def test_take_is_indexing(n):
    values = torch.randn(n, 7, 3)
    index = torch.randint(n, (4, 7), dtype=torch.int32)
    expected = values[index.long(), torch.arange(7)]
    assert torch.equal(Selects.take(values, index), expected)
    assert torch.equal(Selects.take(values[:, :1, 0], index), values[:, 0, 0][index.long()])
    one = index[:, :1].long()
    assert torch.equal(Indexing.take(values[:, :1], one), values[one, 0])


def test_swap_interval_and_proposals_are_counted():
    common = {"dim": 1, "lr": 0.1, "n_steps": 100, "n_runs": 3}
    density = lambda x: -0.5 * x.square().sum(-1)  # noqa: E731
    draws = tr.sample(density, temperatures=(1.0, 2.0), swap_interval=7, **common)
    assert (draws.proposed == 15).all()  # steps 0, 7, ..., 98
    draws = tr.sample(density, temperatures=(1.0, 2.0, 4.0), swap_interval=2, **common)
    assert (draws.proposed == 25).all()  # 50 attempts, alternating
    draws = tr.sample(density, temperatures=(1.0, 2.0, 4.0), pairing=tr.AllInTurn(), **common)
    assert (draws.proposed == 100).all()


# Schedules

T = 40


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / T))


def ends(step):
    """A table of values, as people write them: there is nothing beyond."""
    return [1.0 - k / T for k in range(T)][step]


def turns_negative(step):
    return 1.0 - step / (T - 0.5)


def warm_up(step):
    return min(1.0, step / 10)


def of_torch(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=15, eta_min=0.1)


def density_run(ladder, **options):
    target = tr.GaussianMixture([0.4, 0.6], means=[-3.0, 2.0], stds=[0.7, 0.5])
    ensemble = tr.TensorEnsemble.start(
        target, tr.SGHMC(0.3), n_rungs=ladder.n_rungs, n_runs=3, dtype=torch.float64
    )
    return tr.DensityExchange(ensemble, ladder, noise=tr.KnownVariance(), seed=1, **options)


def network_run(ladder, **options):
    return make_run(mlp, cross_entropy(), ladder, sampler=tr.SGHMC(0.3), seed=1, **options)


def go(run, n_steps):
    """Steps of either kind; (steps, rungs) energies."""
    data = batches(7) if isinstance(run, ModuleExchange) else None
    blocks = [block.energy.clone() for block in run.advance(n_steps, data)]
    return torch.cat(blocks)


def position_of(run):
    return run.ensemble.position.clone()


@pytest.mark.parametrize("make", [density_run, network_run])
@pytest.mark.parametrize(
    "schedule", [cosine, ends, turns_negative, warm_up, tr.schedules.from_torch(of_torch, lr=1.0)]
)
def test_a_schedule_is_asked_for_steps_that_are_taken(make, schedule):
    """As a decay, and as an annealing where it is positive; also stopped and resumed."""
    for kind in ["decay"] if schedule is warm_up else ["decay", "anneal"]:
        ladder = tr.Ladder((0.5, 1.0), (1e-3, 2e-3), **{kind: schedule})
        run, resumed = make(ladder), make(ladder)
        energies = go(run, T)
        assert bool(energies.isfinite().all())
        assert bool(position_of(run).isfinite().all())
        go(resumed, 17)
        other = make(ladder)
        other.load_state_dict(resumed.state_dict())
        for _ in range(T - 17):
            go(other, 1)
        if make is density_run:  # a list of batches begins anew with every call of `advance`
            assert torch.equal(position_of(run), position_of(other))
        assert run._repr_html_()  # which asks for the next step
        assert ladder.settings()


@pytest.mark.parametrize("make", [density_run, network_run])
@pytest.mark.parametrize(
    ("kind", "schedule", "step", "words"),
    [
        ("decay", ends, T, "decay failed at step 40 .*IndexError"),
        ("decay", turns_negative, T, r"decay must be finite and >= 0.* at step 40"),
        ("anneal", warm_up, 0, r"anneal must be finite and > 0.* gave 0.0 at step 0"),
        ("noise", ends, T, "noise failed at step 40"),
        ("anneal", lambda step: None, 0, "anneal failed at step 0 .*TypeError"),
        ("decay", lambda step: math.nan if step == 7 else 1.0, 7, "gave nan at step 7"),
    ],
)
def test_a_schedule_without_a_value_is_an_error_at_that_step(make, kind, schedule, step, words):
    run = make(tr.Ladder((0.5, 1.0), 1e-3, **{kind: schedule}))
    if step:
        go(run, step)
    before = run.state_dict()
    for _ in range(2):
        with pytest.raises(LadderError, match=words):
            go(run, 5)
        assert run.n_steps == step
    assert same(run.state_dict(), before)


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_before_the_end_of_a_schedule_are_taken(compiled):
    run, energies = density_run(tr.Ladder((0.5, 1.0), 1e-3, decay=ends), compiled=compiled), []
    with pytest.raises(LadderError):
        energies.extend(block.energy.clone() for block in run.advance(100))
    assert run.is_compiled == compiled
    assert len(torch.cat(energies)) == run.n_steps == T
    assert bool(torch.cat(energies).isfinite().all())


@pytest.mark.parametrize("make", [density_run, network_run])
def test_with_a_learning_rate_of_0_nothing_moves(make):
    run = make(tr.Ladder((0.5, 0.5001), 0.0))
    before = position_of(run)
    go(run, 20)
    assert torch.equal(position_of(run), before)
    # Swaps come all the time.
    run = make(tr.Ladder((0.5, 0.5001), 1e-3, decay=lambda step: float(step >= 3)))
    before = position_of(run)
    go(run, 3)
    assert torch.equal(position_of(run), before)
    go(run, 10)
    assert bool(position_of(run).isfinite().all())
    assert not torch.equal(position_of(run), before)


@pytest.mark.parametrize("policy", ["rescale", "keep", "refresh"])
@pytest.mark.parametrize("make", [density_run, network_run])
def test_swaps_with_rungs_that_do_not_move_make_no_nan(make, policy):
    """The mutant divides by the scale of a rung whose lr is 0."""
    pauses = lambda step: float(step % 5 != 0)  # noqa: E731
    for lrs, decay in (((0.0, 1e-3), None), ((1e-3, 0.0), None), ((1e-3, 2e-3), pauses)):
        ladder = tr.Ladder((0.5, 0.5001), lrs, decay=decay)
        run = make(ladder, momentum=policy, correction_factor=math.inf)
        go(run, 40)
        assert bool(position_of(run).isfinite().all())
        assert bool(run.ensemble.sampler_state.velocity.isfinite().all())


def test_the_velocity_of_a_swap_with_a_rung_that_does_not_move():
    """It stops where nothing moves; from there, and while nothing moves anywhere, it stays as it
    is."""
    state = Momentum(torch.full((4, 1), 3.0))
    swapped = torch.tensor([True, True, True, False])[:, None]
    scales = {"scale_before": torch.tensor([2.0, 0.0, 0.0, 0.0])[:, None]}
    scales["scale_after"] = torch.tensor([0.0, 2.0, 0.0, 0.0])[:, None]
    (new,) = after_swap(tr.SGHMC(0.5), state, swapped, policy="rescale", **scales)
    assert new.flatten().tolist() == [0.0, 3.0, 3.0, 3.0]


def test_ladders_are_told_apart_by_their_schedules():
    def words(decay):
        return tr.Ladder((1.0,), 0.1, decay=decay).settings()["decay"]

    assert words(ends) == words(lambda step: ends(step))
    schedules = (cosine, ends, turns_negative, warm_up, None)
    assert len({str(words(schedule)) for schedule in schedules}) == 5
    assert words(lambda step: 1 / (step - 100)) != words(lambda step: 1 / (step - 10))


# Looking every so many steps


@pytest.mark.parametrize("make", [density_run, network_run])
@pytest.mark.parametrize(("every", "first"), [(40, 0), (7, 5), (300, 0), (1, 0), (1000, 3)])
def test_advance_stops_at_every_kth_step(make, every, first):
    """Whatever the blocks of the run are, with the same numbers; the mutant stops at the ends of
    blocks."""
    ladder = tr.Ladder((0.5, 0.51), 1e-3)
    runs = [make(ladder) for _ in range(2)]
    data = [batches(7)] if make is network_run else [None]
    for run in runs:
        for _ in run.advance(first, *data):
            pass
    total = 700 if every > 1 else 20
    stops, blocks = [], []
    for block in runs[0].advance(total, *data, every=every):
        stops.append(runs[0].n_steps)
        blocks.append(type(block)(*(values.clone() for values in block)))
    last = first + total
    expected = [k for k in range(first + 1, last + 1) if k % every == 0 or k == last]
    assert stops == expected
    lengths = [b - a for a, b in pairwise([first, *expected])]
    assert [len(block.energy) for block in blocks] == lengths
    other = torch.cat([block.energy.clone() for block in runs[1].advance(total, *data)])
    assert torch.equal(torch.cat([block.energy for block in blocks]), other)
    assert torch.equal(position_of(runs[0]), position_of(runs[1]))
    for bad in (0, 1.5, True):
        with pytest.raises(InvalidArgumentError, match="every must be a whole number"):
            next(runs[0].advance(3, *data, every=bad))


def test_a_failure_comes_after_the_steps_before_it():
    def breaks(x):
        return torch.where(x[:, 0] > 2.5, math.nan, -0.5 * x.square().sum(-1))

    ensemble = tr.TensorEnsemble.start(tr.LogDensity(breaks, 1), n_rungs=2, n_runs=4)
    run = tr.DensityExchange(ensemble, tr.Ladder((1.0, 2.0), 0.1), seed=1)
    seen = []
    with pytest.raises(NonFiniteEnergyError) as caught:
        seen.extend(len(block.energy) for block in run.advance(100_000, every=200_000))
    assert seen == [caught.value.step]
