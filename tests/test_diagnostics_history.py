"""What diagnostics read of a run, and honest standard errors."""

from __future__ import annotations

import math

import pytest
import torch

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.diagnostics import History, batch_means, mean_of, over_chains
from torchrex.errors import InvalidArgumentError

LADDER = tr.Ladder((1.0, 2.0, 5.0), 0.05, anneal=tr.schedules.geometric(0.99))
MIXTURE = tr.GaussianMixture([0.4, 0.6], [-2.0, 2.0], [1.0, 1.0])


def traced(every, *, seed=0, n_steps=60, factor=2.0, pairing=None, ladder=LADDER):
    ensemble = tr.TensorEnsemble.start(
        tr.Noisy(MIXTURE, tr.Gaussian(0.5)),
        n_rungs=ladder.n_rungs,
        n_runs=1,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    run = tr.DensityExchange(
        ensemble,
        ladder,
        noise=tr.KnownVariance(0.25),
        correction_factor=factor,
        pairing=pairing,
        seed=seed,
        compiled=False,
    )
    trace = tr.Trace(every)
    for infos in run.advance(n_steps):
        trace.record(infos)
    return trace.tensors()


def test_a_trace_and_the_draws_of_the_same_run_are_one_history():
    common = {
        "ladder": LADDER,
        "n_steps": 60,
        "noise": tr.KnownVariance(0.25),
        "dtype": torch.float64,
        "compiled": False,
    }
    draws = tr.sample(tr.Noisy(MIXTURE, tr.Gaussian(0.5)), correction_factor=2.0, **common)
    from_draws = History.from_draws(draws, LADDER, correction_factor=2.0)
    from_trace = History.from_traces([traced(1)], LADDER)
    for name in ("steps", "energy", "noise_variance", "temperature", "accepted", "proposed"):
        assert torch.equal(
            getattr(from_draws, name).double(), getattr(from_trace, name).double()
        ), name
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
    assert torch.allclose(
        history.correction_factor, torch.tensor(2.0, dtype=torch.float64)
    )  # as the run recorded it
    cold, hot = history.energy[:, 1], history.energy[:, 2]
    assert torch.allclose(history.energy_difference[:, 1], cold - hot)
    late = history.after(28)
    assert late.steps.tolist() == [28, 35, 42, 49, 56]
    assert late.energy.shape == (5, 3, 2)
    assert torch.equal(late.accepted, history.accepted)
    assert repr(history) == "History(3 rungs x 2 chains, 9 of 60 steps recorded)"


def test_the_naive_factor_is_infinite():
    history = History.from_traces([traced(1, factor=math.inf)], LADDER)
    assert bool(history.correction_factor.isinf().all())


def test_a_float_energy_keeps_its_digits_in_the_difference():
    draws = tr.sample(MIXTURE, ladder=LADDER, n_steps=4)
    assert History.from_draws(draws, LADDER).energy_difference.dtype == torch.float64


def test_one_rung_has_no_pairs():
    ladder = tr.Ladder((1.0,), 0.1)
    history = History.from_draws(
        tr.sample(MIXTURE, ladder=ladder, n_steps=5), ladder, correction_factor=1.0
    )
    assert history.n_pairs == 0
    assert history.inverse_gap.shape == (5, 0)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (
            lambda: History.from_traces([traced(1)], tr.Ladder((1.0, 2.0), 0.1)),
            "is the ladder the one of this run",
        ),
        (lambda: History.from_traces([], LADDER), "nothing to read"),
        (lambda: History.from_traces([tr.Trace().tensors()], LADDER), "nothing to read"),
        (lambda: History.from_traces([traced(1), traced(2)], LADDER), "60 of trace 0"),
        (
            lambda: History.from_draws(
                tr.sample(MIXTURE, ladder=LADDER, n_steps=5), LADDER, correction_factor=0.0
            ),
            "must be positive",
        ),
    ],
)
def test_bad_histories(make, word):
    with pytest.raises(InvalidArgumentError, match=word):
        make()


def autoregressive(phi, n, length, seed=0):
    """Stationary AR(1) series of variance 1, (n, length)."""
    noise = torch.randn(
        length, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    rows = [noise[0]]
    for fresh in noise[1:]:
        rows.append(phi * rows[-1] + math.sqrt(1 - phi**2) * fresh)
    return torch.stack(rows, dim=1)


def test_batch_means_know_of_autocorrelation():
    """The expected square of the error is known exactly: (v_batch - v_all) / (b - 1), v the
    variance of a mean of an AR(1).
    """
    phi, length = 0.8, 400  # 20 batches of 20

    def variance_of_mean(n):
        lags = torch.arange(1, n, dtype=torch.float64)
        return float((n + 2 * ((n - lags) * phi**lags).sum()) / n**2)

    series = autoregressive(phi, 4000, length)
    mean, error = batch_means(series)
    assert_mean_is(mean.square(), variance_of_mean(length))
    assert_mean_is(error.square(), (variance_of_mean(20) - variance_of_mean(length)) / 19)
    assert float(error.square().mean()) == pytest.approx(
        variance_of_mean(length), rel=0.25
    )  # batches of 20 are long enough
    assert_mean_is_not(
        series.var(1) / length, variance_of_mean(length)
    )  # the mutant: as if independent


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
