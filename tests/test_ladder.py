"""Ladders, pairing rules, and who stands where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchrex as tr
from assertions import assert_mean_is
from torchrex.errors import LadderError
from torchrex.exchange.standing import change_places, invert, take

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: tr.Ladder((), 0.1), "at least one"),
        (lambda: tr.Ladder((2.0, 1.0), 0.1), r"rise from cold to hot, but rung 1 \(1\).*from_inverse"),
        (lambda: tr.Ladder((1.0, 1.0), 0.1), "rise"),
        (lambda: tr.Ladder((0.0, 1.0), 0.1), "rung 0 has 0.*descent"),
        (lambda: tr.Ladder((-1.0,), 0.1), "positive"),
        (lambda: tr.Ladder((1.0, float("nan")), 0.1), "positive and finite"),
        (lambda: tr.Ladder((1.0, float("inf")), 0.1), "positive and finite"),
        (lambda: tr.Ladder((1.0, 2.0), 0.0), "lrs must be positive"),
        (lambda: tr.Ladder((1.0, 2.0), (0.1, -0.1)), "rung 1 has -0.1"),
        (lambda: tr.Ladder((1.0, 2.0), (0.1, 0.1, 0.1)), "3 lrs for 2"),
        (lambda: tr.Ladder.geometric(1.0, 0.5, 3, lrs=0.1), "0 < cold < hot"),
        (lambda: tr.Ladder.from_inverse((1.0, -0.5), 0.1), "positive"),
        (lambda: tr.Ladder((1.0,), 0.1, decay=lambda step: -1.0).table(0, 3, device=CPU, dtype=torch.float32), "step 0"),
    ],
)
def test_bad_ladders(make, word):
    with pytest.raises(LadderError, match=word):
        make()


def test_constructors():
    assert tr.Ladder.geometric(1.0, 8.0, 4, lrs=0.1).temperatures == pytest.approx((1.0, 2.0, 4.0, 8.0))
    assert tr.Ladder.from_inverse((1.0, 0.5), 0.1).temperatures == (1.0, 2.0)
    assert repr(tr.Ladder((0.01, 0.05), (2e-6, 3e-6))) == "Ladder((0.01, 0.05), lrs=(2e-06, 3e-06))"
    assert tr.Ladder.descent(0.1).temperatures == (0.0,)


def test_annealing_multiplies_every_rung():
    ladder = tr.Ladder((1.0, 5.0), (0.1, 0.2), anneal=tr.schedules.geometric(0.5), decay=tr.schedules.hold_then_decay(1, 0.1))
    temperature, lr, _ = ladder.table(1, 2, device=CPU, dtype=torch.float64)
    assert torch.allclose(temperature, torch.tensor([[0.5, 2.5], [0.25, 1.25]], dtype=torch.float64))
    assert torch.allclose(lr, torch.tensor([[0.1, 0.2], [0.01, 0.02]], dtype=torch.float64))


def propose(rule, attempts, n_pairs, n_runs=4):
    return rule.propose(torch.Generator().manual_seed(0), torch.arange(attempts), n_pairs, n_runs)


def test_even_odd_alternates():
    proposed = propose(tr.EvenOdd(), 2, 5)[:, 0, :, 0]
    assert proposed.tolist() == [[True, False, True, False, True], [False, True, False, True, False]]
    assert propose(tr.EvenOdd(), 3, 1).all()  # two rungs: the one pair is tested at every attempt


def test_random_pair_is_uniform():
    proposed = propose(tr.RandomPair(), 1, 3, n_runs=90_000)[0, 0]
    assert (proposed.sum(0) == 1).all()
    for pair in range(3):
        assert_mean_is(proposed[pair], 1 / 3)


def test_all_in_turn_takes_one_pair_a_round():
    proposed = propose(tr.AllInTurn(), 1, 3)[0, :, :, 0]
    assert torch.equal(proposed, torch.eye(3, dtype=torch.bool))
    assert tr.AllInTurn().n_rounds(3) == 3


@given(st.permutations(range(5)), st.lists(st.booleans(), min_size=4, max_size=4))
def test_changing_places_keeps_a_permutation(standing, wanted):
    replica_at = torch.tensor(standing, dtype=torch.int32)[:, None]
    accepted = torch.tensor(wanted)[:, None]
    for pair in range(1, 4):  # a round has disjoint pairs
        accepted[pair] &= ~accepted[pair - 1]
    after = change_places(replica_at, accepted)
    expected = list(standing)
    for pair in range(4):
        if accepted[pair]:
            expected[pair], expected[pair + 1] = expected[pair + 1], expected[pair]
    assert after[:, 0].tolist() == expected
    rung_of = invert(after)
    assert all(rung_of[replica, 0] == expected.index(replica) for replica in range(5))


@pytest.mark.parametrize("n", [2, 5, 16, 17, 40])
def test_take_is_indexing(n):
    values = torch.randn(n, 7, 3)
    index = torch.randint(n, (4, 7), dtype=torch.int32)
    expected = values[index.long(), torch.arange(7)]
    assert torch.equal(take(values, index), expected)
    assert torch.equal(take(values[:, :1, 0], index), values[:, 0, 0][index.long()])


def test_replicas_travel_the_whole_ladder():
    draws = tr.sample(
        lambda x: -0.5 * x.square().sum(-1), dim=1, ladder=tr.Ladder.geometric(1.0, 4.0, 20, lrs=0.1), n_steps=1500, n_runs=2
    )
    visited = [{int(r) for r in draws.replica_at[:, 0, run]} for run in range(2)]
    assert all(len(v) > 10 for v in visited)
    assert torch.equal(draws.replica_at.long().sort(dim=1).values[-1, :, 0], torch.arange(20))


def test_swap_interval_and_proposals_are_counted():
    common = {"dim": 1, "lr": 0.1, "n_steps": 100, "n_runs": 3}
    density = lambda x: -0.5 * x.square().sum(-1)  # noqa: E731
    draws = tr.sample(density, temperatures=(1.0, 2.0), swap_interval=7, **common)
    assert (draws.proposed == 15).all()  # steps 0, 7, ..., 98
    draws = tr.sample(density, temperatures=(1.0, 2.0, 4.0), swap_interval=2, **common)
    assert (draws.proposed == 25).all()  # 50 attempts, alternating
    draws = tr.sample(density, temperatures=(1.0, 2.0, 4.0), pairing=tr.AllInTurn(), **common)
    assert (draws.proposed == 100).all()
