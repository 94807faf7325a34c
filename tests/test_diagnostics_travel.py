"""Round trips, restarts, their rates, and occupancy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.diagnostics import (
    Estimate,
    History,
    Swaps,
    Travel,
    even_odd_rate,
    optimal_rate,
    round_trips,
    rung_occupancy,
)
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import count_trips, rung_of


def test_trips_of_written_paths():
    paths = {
        (0, 1, 2, 1, 0): (1, 1),
        (0, 2, 0, 2, 0): (2, 2),
        (0, 1, 0, 1, 0): (0, 0),  # never at the top
        (2, 1, 0, 1, 2): (1, 0),  # a restart, but it had not been on rung 0 before
        (2, 0, 2, 0, 0): (2, 1),
        (1, 2, 1, 0, 1): (1, 0),
        (1, 0, 2, 1, 0): (1, 1),
        (0, 2, 2, 1, 2): (0, 0),  # not yet back
        (1, 1, 1, 1, 1): (0, 0),
    }
    path = torch.tensor(list(paths)).T[:, None, :].expand(5, 3, -1)  # three rungs, one path a chain
    restarts, trips = count_trips(path)
    assert [(int(r), int(t)) for r, t in zip(restarts[0], trips[0], strict=True)] == list(
        paths.values()
    )


def test_no_trips_on_one_rung():
    restarts, trips = count_trips(torch.zeros(5, 1, 2, dtype=torch.long))
    assert restarts.tolist() == trips.tolist() == [[0, 0]]


def even_odd_path(rejection, attempts, chains, seed=0):
    """replica_at (attempts, rungs, chains) where every test is an independent coin flip."""
    generator = torch.Generator().manual_seed(seed)
    pairing, n_pairs = tr.EvenOdd(), len(rejection)
    proposed = pairing.propose(generator, torch.arange(attempts), n_pairs, chains)[:, 0]
    heads = (
        torch.rand(attempts, n_pairs, chains, generator=generator)
        >= torch.tensor(rejection)[:, None]
    )
    standing, rows = torch.arange(n_pairs + 1)[:, None].repeat(1, chains), []
    for tested, head in zip(proposed, heads, strict=True):
        for pair in range(n_pairs):
            swap = tested[pair] & head[pair]
            cold, hot = standing[pair].clone(), standing[pair + 1].clone()
            standing[pair], standing[pair + 1] = (
                torch.where(swap, hot, cold),
                torch.where(swap, cold, hot),
            )
        rows.append(standing.clone())
    return torch.stack(rows), (proposed & heads), proposed.expand(attempts, n_pairs, chains)


def mean_round_trip(rejection):
    """Exact mean number of attempts from a first arrival on rung 0 to the next by way of the top:
    linear equations.

    A replica at rung i with attempt parity p tries to go up if i and p agree and down otherwise; a
    state is (rung, goes up, has seen the top).
    """
    top = len(rejection)
    states = [
        (rung, up, seen)
        for rung in range(top + 1)
        for up in (False, True)
        for seen in (False, True)
    ]
    where = {state: k for k, state in enumerate(states)}
    matrix, one = np.eye(len(states)), np.ones(len(states))
    for (rung, up, seen), row in where.items():
        step = 1 if up else -1
        pair = rung if up else rung - 1
        chance = 1.0 - rejection[pair] if 0 <= pair < top else 0.0
        for probability, target, direction in (
            (chance, rung + step, up),
            (1.0 - chance, rung, not up),
        ):
            # Where a move ends, the other parity is next: who moved up goes on up, who was refused
            # turns round.
            if probability > 0 and not (target == 0 and seen):
                matrix[row, where[target, direction, seen or target == top]] -= probability
    return np.linalg.solve(matrix, one)[where[0, False, False]]  # it arrived going down


@pytest.mark.parametrize("rejection", [(0.0, 0.0), (0.3, 0.6), (0.2, 0.5, 0.1, 0.7), (0.9,) * 5])
def test_even_odd_rate_is_that_of_the_exact_walk(rejection):
    exact = (len(rejection) + 1) / mean_round_trip(rejection)
    assert even_odd_rate(torch.tensor(rejection, dtype=torch.float64)) == pytest.approx(
        exact, rel=1e-9
    )


@pytest.mark.parametrize("rejection", [(0.4,), (0.3, 0.6), (0.2, 0.5, 0.1)])
def test_counted_round_trips_have_the_exact_rate(rejection):
    """Counts of a later stretch, start of the walk forgotten, over independent chains."""
    replica_at, _, _ = even_odd_path(rejection, 500, 2000)
    path = rung_of(replica_at)
    stretch = (count_trips(path)[1].sum(0) - count_trips(path[:200])[1].sum(0)) / 300
    rate = even_odd_rate(torch.tensor(rejection))
    assert_mean_is(stretch, rate)
    assert_mean_is_not(stretch, 2 * rate)
    rather = torch.tensor(
        rejection
    ).sum()  # the mutant: the sum of rejections, right for many rungs alone
    if len(rejection) > 1:
        assert_mean_is_not(stretch, float(1 / (2 + 2 * rather)))


def test_the_optimum_is_approached_by_more_rungs():
    """Rejections that share a barrier of 1.2 evenly: the rate rises to 1 / (2 + 2 * 1.2)."""
    rates = [
        even_odd_rate(torch.full((n,), 1.2 / n, dtype=torch.float64)) for n in (2, 4, 16, 1000)
    ]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(1 / 4.4, rel=1e-3)
    assert optimal_rate(torch.tensor([0.7, 0.5])) == pytest.approx(1 / 4.4)
    assert even_odd_rate(torch.tensor([1.0, 0.2])) == 0.0
    for bad in (torch.tensor([1.2]), torch.tensor([])):
        with pytest.raises(InvalidArgumentError, match="rejection rate"):
            optimal_rate(bad)


def history_of(replica_at, made, proposed, *, every=1, with_swaps=False):
    k, rungs, chains = replica_at.shape
    when, pair, chain = made.nonzero(as_tuple=True)
    kept = slice(0, k, every)
    n = len(range(k)[kept])
    return History(
        steps=torch.arange(k)[kept],
        energy=torch.zeros(n, rungs, chains),
        replica_at=replica_at[kept],
        noise_variance=torch.zeros(n, rungs - 1, chains),
        temperature=torch.arange(1.0, rungs + 1).expand(n, rungs),
        accepted=made.sum(0),
        proposed=proposed.sum(0),
        n_steps=k,
        swaps=Swaps(when, pair, chain) if with_swaps else None,
    )


def test_a_list_of_swaps_tells_what_thinning_hides():
    walk = even_odd_path((0.3, 0.4, 0.2), 300, 5)
    full = round_trips(history_of(*walk))
    listed = round_trips(history_of(*walk, every=50, with_swaps=True))
    thinned = round_trips(history_of(*walk, every=50))
    assert full.exact
    assert listed.exact
    assert not thinned.exact
    assert torch.equal(full.round_trips, listed.round_trips)
    assert torch.equal(full.restarts, listed.restarts)
    assert bool((thinned.round_trips <= full.round_trips).all())
    assert int(thinned.round_trips.sum()) < int(full.round_trips.sum())
    trips = full.round_trips.sum(0).double()
    assert float(full.per_step.value) == pytest.approx(float(trips.mean() / 300))
    assert float(full.per_attempt.value) == pytest.approx(
        float(trips.mean() / 300)
    )  # an attempt at every step
    assert float(full.per_step.error) == pytest.approx(float(trips.std() / 300 / 5**0.5))


@pytest.mark.parametrize("pairing", [tr.EvenOdd(), tr.AllInTurn(), tr.RandomPair()])
def test_the_trace_of_a_run_replays_to_where_its_replicas_stood(pairing):
    """The swaps a trace lists, made in their order, give the path that the same run recorded step
    by step.
    """
    ladder = tr.Ladder((1.0, 1.5, 2.0, 2.5), 0.05)
    target = tr.GaussianMixture([1.0], [0.0], [1.0])
    ensemble = tr.TensorEnsemble.start(
        target, n_rungs=4, n_runs=1, device=torch.device("cpu"), dtype=torch.float32
    )
    run = tr.DensityExchange(
        ensemble, ladder, pairing=pairing, seed=0, compiled=False, swap_interval=2
    )
    fine, coarse = tr.Trace(1), tr.Trace(100)
    for infos in run.advance(400):
        fine.record(infos)
        coarse.record(infos)
    every_step = replace(History.from_traces([fine.tensors()], ladder), swaps=None)
    listed = History.from_traces([coarse.tensors()], ladder, n_steps=400)
    assert torch.equal(round_trips(every_step).round_trips, round_trips(listed).round_trips)
    assert int(round_trips(listed).restarts.sum()) > 0
    late = History.from_traces([fine.tensors()], ladder).after(150)
    assert torch.equal(
        round_trips(late).round_trips, round_trips(replace(late, swaps=None)).round_trips
    )
    assert int(round_trips(late).round_trips.sum()) < int(round_trips(listed).round_trips.sum())
    assert float(round_trips(late).per_step.value) == pytest.approx(
        int(round_trips(late).round_trips.sum()) / 250
    )
    with pytest.raises(InvalidArgumentError, match="no recorded step"):
        round_trips(late.after(400))
    if isinstance(pairing, tr.EvenOdd):
        travelled = round_trips(listed)
        assert float(travelled.per_attempt.value) == pytest.approx(
            2 * float(travelled.per_step.value)
        )


def test_occupancy():
    replica_at = torch.tensor([[0, 1, 2], [1, 0, 2], [1, 0, 2], [0, 1, 2]])[:, :, None]
    share, deviation = rung_occupancy(
        history_of(replica_at, torch.zeros(4, 2, 1).bool(), torch.zeros(4, 2, 1).bool())
    )
    assert share.value.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    assert deviation[:, 0].tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3])
    uneven = torch.tensor([[0, 1, 2], [1, 2, 0], [1, 2, 0], [1, 2, 0]])[
        :, :, None
    ]  # replica 0 is mostly on rung 2
    share, _ = rung_occupancy(
        history_of(uneven, torch.zeros(4, 2, 1).bool(), torch.zeros(4, 2, 1).bool())
    )
    assert share.value[0].tolist() == [0.25, 0.0, 0.75]


def test_occupancy_becomes_even():
    walk = even_odd_path((0.3, 0.4, 0.2), 600, 300)
    replica_at = walk[0][100:]
    occupancy = rung_occupancy(history_of(replica_at, *(part[100:] for part in walk[1:])))
    assert float((occupancy.share.value - 0.25).abs().max()) < 5 * float(
        occupancy.share.error.max()
    )
    assert torch.allclose(occupancy.share.value.sum(1), torch.ones(4, dtype=torch.float64))
    assert 0 < float(occupancy.deviation.mean()) < 0.1


def test_travel_prints_what_a_chain_did():
    """Two replicas of three chains: 4, 2 and 0 round trips, all replicas together, make 2 a chain."""
    trips = torch.tensor([[2, 1, 0], [2, 1, 0]])
    rate = Estimate(
        torch.tensor(0.0125, dtype=torch.float64), torch.tensor(0.001, dtype=torch.float64)
    )
    said = repr(Travel(trips, trips + 1, rate, rate, False))
    assert said == (
        "Travel(at least 2 round trips and 4 restarts a chain, its 2 replicas together, mean over 3 chains; "
        "0.0125 round trips a step)"
    )
    assert "at least" not in repr(Travel(trips, trips, rate, rate, True))


def test_draws_after_the_end_are_refused():
    draws = tr.sample(
        tr.GaussianMixture([1.0], [0.0], [1.0]), temperatures=(1.0,), lr=0.1, n_steps=20
    )
    assert draws.after(19).n_draws == 1
    with pytest.raises(InvalidArgumentError, match="there is no step 21: the run has 20"):
        draws.after(21)
