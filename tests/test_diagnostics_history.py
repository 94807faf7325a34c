"""What diagnostics read of a run, honest standard errors, round trips and occupancy."""

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
    Swaps,
    batch_means,
    even_odd_rate,
    mean_of,
    optimal_rate,
    over_chains,
    round_trips,
    rung_occupancy,
)
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import count_trips, rung_of

LADDER = tr.Ladder((1.0, 2.0, 5.0), 0.05, anneal=tr.schedules.geometric(0.99))
MIXTURE = tr.GaussianMixture([0.4, 0.6], [-2.0, 2.0], [1.0, 1.0])


def traced(every, *, seed=0, n_steps=60, factor=2.0):
    ensemble = tr.TensorEnsemble.start(
        tr.Noisy(MIXTURE, tr.Gaussian(0.5)), n_rungs=3, n_runs=1, dtype=torch.float64
    )
    rules = {"noise": tr.KnownVariance(0.25), "correction_factor": factor}
    run = tr.DensityExchange(ensemble, LADDER, seed=seed, compiled=False, **rules)
    trace = tr.Trace(every)
    for infos in run.advance(n_steps):
        trace.record(infos)
    return trace.tensors()


def test_a_trace_and_the_draws_of_the_same_run_are_one_history():
    common = {"ladder": LADDER, "n_steps": 60, "noise": tr.KnownVariance(0.25)}
    common |= {"dtype": torch.float64, "compiled": False}
    draws = tr.sample(tr.Noisy(MIXTURE, tr.Gaussian(0.5)), correction_factor=2.0, **common)
    from_draws = History.from_draws(draws, LADDER, correction_factor=2.0)
    from_trace = History.from_traces([traced(1)], LADDER)
    for name in ("steps", "energy", "noise_variance", "temperature", "accepted", "proposed"):
        one, other = getattr(from_draws, name), getattr(from_trace, name)
        assert torch.equal(one.double(), other.double()), name
    assert torch.equal(from_draws.replica_at.long(), from_trace.replica_at.long())
    assert torch.allclose(from_draws.correction, from_trace.correction)
    assert from_draws.n_steps == from_trace.n_steps == 60
    assert from_draws.has_every_step
    assert from_trace.has_every_step
    thin = tr.sample(tr.Noisy(MIXTURE, tr.Gaussian(0.5)), thin=7, **common)
    assert not History.from_draws(thin, LADDER).has_every_step
    assert History.from_draws(thin, LADDER).correction is None


def test_annealed_temperatures_gaps_and_the_factor():
    history = History.from_traces([traced(7), traced(7, seed=1)], LADDER, n_steps=60)
    assert history.steps.tolist() == [0, 7, 14, 21, 28, 35, 42, 49, 56]
    assert (history.n_rungs, history.n_pairs, history.n_chains, history.n_steps) == (3, 2, 2, 60)
    assert history.temperature[2].tolist() == pytest.approx([0.99**14 * t for t in (1.0, 2.0, 5.0)])
    assert history.inverse_gap[2].tolist() == pytest.approx([0.5 / 0.99**14, 0.3 / 0.99**14])
    # As the run recorded it.
    assert torch.allclose(history.correction_factor, torch.tensor(2.0, dtype=torch.float64))
    cold, hot = history.energy[:, 1], history.energy[:, 2]
    assert torch.allclose(history.energy_difference[:, 1], cold - hot)
    late = history.after(28)
    assert late.steps.tolist() == [28, 35, 42, 49, 56]
    assert late.energy.shape == (5, 3, 2)
    assert torch.equal(late.accepted, history.accepted)
    assert repr(history) == "History(3 rungs x 2 chains, 9 of 60 steps recorded)"


def test_naive_swaps_floats_and_one_rung():
    history = History.from_traces([traced(1, factor=math.inf)], LADDER)
    assert bool(history.correction_factor.isinf().all())
    draws = tr.sample(MIXTURE, ladder=LADDER, n_steps=4)
    # A difference of float32 energies keeps its digits.
    assert History.from_draws(draws, LADDER).energy_difference.dtype == torch.float64
    alone = tr.Ladder((1.0,), 0.1)
    draws = tr.sample(MIXTURE, ladder=alone, n_steps=5)
    history = History.from_draws(draws, alone, correction_factor=1.0)
    assert history.n_pairs == 0
    assert history.inverse_gap.shape == (5, 0)


def test_bad_histories():
    draws = tr.sample(MIXTURE, ladder=LADDER, n_steps=5)
    for make, word in (
        (lambda: History.from_traces([traced(1)], tr.Ladder((1.0, 2.0), 0.1)), "ladder"),
        (lambda: History.from_traces([], LADDER), "nothing to read"),
        (lambda: History.from_traces([tr.Trace().tensors()], LADDER), "nothing to read"),
        (lambda: History.from_traces([traced(1), traced(2)], LADDER), "of trace 0"),
        (lambda: History.from_draws(draws, LADDER, correction_factor=0.0), "positive"),
    ):
        with pytest.raises(InvalidArgumentError, match=word):
            make()


def autoregressive(phi, n, length, seed=0):
    """Stationary AR(1) series of variance 1, (n, length)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(length, n, generator=generator, dtype=torch.float64)
    rows = [noise[0]]
    for fresh in noise[1:]:
        rows.append(phi * rows[-1] + math.sqrt(1 - phi**2) * fresh)
    return torch.stack(rows, dim=1)


def test_batch_means_know_of_autocorrelation():
    """The expected square of the error is exactly (v_batch - v_all) / (b - 1)."""
    phi, length = 0.8, 400  # 20 batches of 20

    def variance_of_mean(n):
        lags = torch.arange(1, n, dtype=torch.float64)
        return float((n + 2 * ((n - lags) * phi**lags).sum()) / n**2)

    series = autoregressive(phi, 4000, length)
    mean, error = batch_means(series)
    assert_mean_is(mean.square(), variance_of_mean(length))
    assert_mean_is(error.square(), (variance_of_mean(20) - variance_of_mean(length)) / 19)
    # Batches of 20 are long enough.
    assert float(error.square().mean()) == pytest.approx(variance_of_mean(length), rel=0.25)
    # The mutant: as if independent.
    assert_mean_is_not(series.var(1) / length, variance_of_mean(length))


def test_errors_over_chains_and_for_one():
    values = torch.tensor([[1.0, 2.0, 6.0]])
    assert over_chains(values).value.tolist() == [3.0]
    assert over_chains(values).error.tolist() == pytest.approx([math.sqrt(7.0 / 3.0)])
    assert over_chains(values[:, :1]).error.isnan().all()
    assert batch_means(torch.rand(15)).error.isnan()
    uneven = torch.rand(103, dtype=torch.float64)  # ten batches of ten, and three left over
    assert torch.equal(batch_means(uneven).value, uneven.mean())
    assert torch.equal(
        batch_means(uneven).error, uneven[3:].view(10, 10).mean(1).std() / math.sqrt(10)
    )
    series = torch.rand(3, 1, 100, dtype=torch.float64)
    assert torch.equal(mean_of(series).error, batch_means(series[:, 0]).error)
    several = torch.rand(3, 4, 100, dtype=torch.float64)
    assert torch.equal(mean_of(several).error, over_chains(several.mean(-1)).error)


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


def even_odd_path(rejection, attempts, chains, seed=0):
    """replica_at (attempts, rungs, chains) where every test is an independent coin flip."""
    generator = torch.Generator().manual_seed(seed)
    pairing, n_pairs = tr.EvenOdd(), len(rejection)
    proposed = pairing.propose(generator, torch.arange(attempts), n_pairs, chains)[:, 0]
    heads = (
        torch.rand(attempts, n_pairs, chains, generator=generator)
        >= torch.tensor(rejection)[:, None]
    )
    replica_at, rows = torch.arange(n_pairs + 1)[:, None].repeat(1, chains), []
    for tested, head in zip(proposed, heads, strict=True):
        for pair in range(n_pairs):
            swap = tested[pair] & head[pair]
            cold, hot = replica_at[pair].clone(), replica_at[pair + 1].clone()
            replica_at[pair], replica_at[pair + 1] = (
                torch.where(swap, hot, cold),
                torch.where(swap, cold, hot),
            )
        rows.append(replica_at.clone())
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
    # The mutant: the sum of rejections, right for many rungs alone.
    rather = torch.tensor(rejection).sum()
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
    # An attempt at every step.
    assert float(full.per_attempt.value) == pytest.approx(float(trips.mean() / 300))
    assert float(full.per_step.error) == pytest.approx(float(trips.std() / 300 / 5**0.5))


@pytest.mark.parametrize("pairing", [tr.EvenOdd(), tr.AllInTurn(), tr.RandomPair()])
def test_the_trace_of_a_run_replays_to_where_its_replicas_stood(pairing):
    """The swaps of a trace, made in their order, give the path recorded step by step."""
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
    never = torch.zeros(4, 2, 1).bool()
    replica_at = torch.tensor([[0, 1, 2], [1, 0, 2], [1, 0, 2], [0, 1, 2]])[:, :, None]
    share, deviation = rung_occupancy(history_of(replica_at, never, never))
    assert share.value.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    assert deviation[:, 0].tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3])


def test_occupancy_becomes_even():
    walk = even_odd_path((0.3, 0.4, 0.2), 600, 300)
    replica_at = walk[0][100:]
    occupancy = rung_occupancy(history_of(replica_at, *(part[100:] for part in walk[1:])))
    assert float((occupancy.share.value - 0.25).abs().max()) < 5 * float(
        occupancy.share.error.max()
    )
    assert torch.allclose(occupancy.share.value.sum(1), torch.ones(4, dtype=torch.float64))
    assert 0 < float(occupancy.deviation.mean()) < 0.1
