"""`sample` and the draws it returns."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import torchrex as tr
from assertions import assert_mean_is
from densities import assert_same_draws
from torchrex import diagnostics
from torchrex.density.drawing import Drawing, DrawRecorder
from torchrex.errors import (
    DeviceError,
    InvalidArgumentError,
    LadderError,
    NonFiniteEnergyError,
    RunFolderError,
    RunInterrupted,
    TargetError,
)
from torchrex.exchange import PairReport
from torchrex.posterior import mean_error


def gaussian(x):
    return -0.5 * x.square().sum(-1)


PAIR = tr.Ladder((1.0, 2.0), 0.1)


def test_thinned_draws_are_those_of_the_full_run():
    ladder = tr.Ladder((1.0, 2.0, 4.0), 0.1)
    common = {"dim": 3, "ladder": ladder, "n_steps": 90, "n_runs": 5, "seed": 4}
    full, thinned = tr.sample(gaussian, **common), tr.sample(gaussian, thin=9, burn_in=30, **common)
    assert thinned.steps.tolist() == list(range(39, 91, 9))
    assert torch.equal(thinned.values, full.values[:, 38::9])
    for name in ("replica_at", "energy", "noise_variance"):
        assert torch.equal(getattr(thinned, name), getattr(full, name)[38::9])
    assert torch.equal(thinned.accepted, full.accepted)
    assert torch.equal(full.after(50).values, full.values[:, 50:])
    assert full.values.shape == (5, 90, 3)
    assert full.replica_at.shape == full.energy.shape == (90, 3, 5)
    assert full.accepted.shape == full.proposed.shape == (2, 5)
    assert full.status == "finished"
    assert not torch.equal(tr.sample(gaussian, **{**common, "seed": 5}).values, full.values)


def test_draws_that_do_not_fit_into_memory_are_one_line_that_says_what_helps(tmp_path, monkeypatch):
    """A petabyte is refused at once; what is saved is not called damage when it cannot be read."""
    common = {"dim": 2, "ladder": PAIR, "compiled": False, "checkpoints": tmp_path}
    with pytest.raises(DeviceError, match=r"2 dimensions with 1,000,000,000,000,000 .*raise thin"):
        tr.sample(gaussian, n_steps=10**15, **common)
    tr.sample(gaussian, n_steps=20, **common)
    expected = tr.sample(gaussian, n_steps=40, **{**common, "checkpoints": None})

    def full(data):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("torchrex.checkpoint.folder.load_tensors", full)
        with pytest.raises(DeviceError, match="not enough memory"):
            tr.sample(gaussian, n_steps=40, **common)
    assert_same_draws(tr.sample(gaussian, n_steps=40, **common), expected)


def test_recorder_does_not_care_how_steps_are_cut_into_blocks():
    full = tr.sample(gaussian, dim=1, ladder=PAIR, n_steps=60, n_runs=2)
    ensemble = tr.TensorEnsemble.start(tr.LogDensity(gaussian, 1), n_rungs=2, n_runs=2)
    run, recorder = tr.DensityExchange(ensemble, PAIR), DrawRecorder(60, thin=4, burn_in=3)
    for n in (1, 2, 3, 5, 8, 13, 21, 7):
        for info in run.advance(n):
            recorder.record(info)
    draws = recorder.draws("finished", {})
    assert draws.steps.tolist() == list(range(7, 61, 4))
    assert torch.equal(draws.values, full.values[:, 6::4])
    assert torch.equal(draws.accepted, full.accepted)


def test_summary_and_repr():
    draws = tr.sample(gaussian, dim=12, ladder=PAIR, n_steps=50, n_runs=2)
    text = draws.summary()
    assert "2 chains x 50 draws" in text
    assert "2 more" in text
    assert "0 - 1" in text
    assert f"{100 * float(draws.acceptance_rate):.3g} %" in text
    assert "swaps accepted" in repr(draws)
    alone = tr.sample(gaussian, dim=1, temperatures=(1.0,), lr=0.1, n_steps=5)
    assert "swaps" not in alone.summary()


def test_draws_are_saved_and_loaded_and_other_files_refused(tmp_path):
    draws = tr.sample(gaussian, dim=2, ladder=PAIR, n_steps=50, n_runs=3)
    path, file = tmp_path / "other", tmp_path / "draws.safetensors"
    draws.save(file)
    assert_same_draws(tr.Draws.load(file), draws)
    whole = file.read_bytes()

    def refused(content=None, at=path):
        """The one line that is said of a file with this content."""
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, dict):
            replace(draws, **content).save(path)
        with pytest.raises(RunFolderError) as caught:
            tr.Draws.load(at)
        assert "\n" not in str(caught.value)
        assert str(at) in str(caught.value)
        return str(caught.value)

    assert "there is no file" in refused()
    assert f"is a folder; load {file}" in refused(at=tmp_path)
    for size in (50, len(whole) // 2, len(whole) - 1):
        assert f"cut off: it ends after {size:,} bytes" in refused(whole[:size])
    assert "is empty" in refused(b"")
    for text in (
        b"\x80\x04pickle",
        b"a text that is long enough to have a header",
        b'{"a": 1}' * 2,
    ):
        assert "is not a safetensors file" in refused(text)
    save_file({name: torch.ones(1) for name in "abcdef"}, path)
    assert "of another kind: it holds a, b, c, d and 2 more" in refused()
    assert "energy of shape (49, 2, 3)" in refused({"energy": draws.energy[1:]})
    assert "n_steps, settings" in refused({"n_steps": "50", "settings": []})
    for place in (tmp_path, tmp_path / "no" / "d"):
        with pytest.raises(RunFolderError, match="cannot write"):
            draws.save(place)


def test_settings_say_what_ran_and_not_where_it_stood():
    ensemble = tr.TensorEnsemble.start(tr.LogDensity(gaussian, 1), n_rungs=2)
    run = tr.DensityExchange(ensemble, PAIR, seed=3)
    first, second = tr.collect(run, 20), tr.collect(run, 20)
    assert "Ladder((1, 2), lrs=0.1)" in first.settings["run"]
    assert "step 0" not in str(first.settings) + first._repr_html_() + first.summary()
    assert second.settings == {**first.settings, "steps_before": 20}


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_ctrl_c_keeps_what_is_done(on_interrupt):
    """By default it goes on as KeyboardInterrupt: a loop over seeds must not begin the next one."""
    calls = []

    def interrupt(done, total):
        calls.append((done, total))
        if len(calls) == 2:
            raise KeyboardInterrupt

    sizes = {"dim": 1, "n_steps": 100_000, "n_runs": 2_000, "thin": 8, "compiled": False}
    options = {**sizes, "ladder": PAIR, "progress": interrupt, "on_interrupt": on_interrupt}
    if on_interrupt == "return":
        draws = tr.sample(gaussian, **options)
    else:
        with pytest.raises(KeyboardInterrupt) as caught:
            tr.sample(gaussian, **options)
        assert isinstance(caught.value, RunInterrupted)
        draws = caught.value.draws
    assert draws.status == "interrupted"
    assert draws.n_steps == calls[1][0] < 100_000
    assert draws.n_draws == draws.n_steps // 8
    assert calls[0][1] == 100_000


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step(monkeypatch, caplog, number, on_interrupt):
    """There are no draws to return: the same errors as later."""
    monkeypatch.setattr(Drawing, "prepare", lambda self, shared: signal.raise_signal(number))
    options = {"dim": 1, "n_steps": 10, "ladder": PAIR, "on_interrupt": on_interrupt}
    with pytest.raises(RunInterrupted if number == signal.SIGINT else SystemExit) as caught:
        tr.sample(gaussian, **options)
    if number == signal.SIGINT:
        assert "before the first of 10 steps" in str(caught.value)
        assert caught.value.draws is None
    else:
        assert caught.value.code == 143
        assert "before the first of 10 steps" in caplog.text


@pytest.mark.parametrize("compiled", [False, True])
def test_nan_energy_names_replica_rung_and_step_and_keeps_the_draws(compiled):
    def breaks(x):
        return torch.where(x[:, 0] > 2.5, float("nan"), gaussian(x))

    common = {"dim": 1, "ladder": PAIR, "n_runs": 4, "dtype": torch.float64, "compiled": compiled}
    words = r"replica \d on rung \d became nan at step \d+ \(run \d+\)"
    with pytest.raises(NonFiniteEnergyError, match=words) as caught:
        tr.sample(breaks, n_steps=5000, **common)
    error = caught.value
    assert error.draws.n_draws == error.step > 0
    assert error.draws.values.isfinite().all()
    assert error.draws.status == "failed"
    # The draw before is where it broke, if it was the coldest rung; in any case the same density
    # run to one step less is fine.
    fine = tr.sample(breaks, n_steps=error.step, **common)
    assert torch.equal(fine.values, error.draws.values)


def test_a_broken_replica_is_never_swapped_in():
    """NaN compares false, so a replica with a NaN energy keeps its rung."""
    target = tr.LogDensity(lambda x: torch.where(x[:, 0] > 5.0, float("nan"), gaussian(x)), 1)
    start = torch.tensor([0.0, 9.0]).view(2, 1, 1)
    run = tr.DensityExchange(
        tr.TensorEnsemble.start(target, n_rungs=2, initial=start),
        tr.Ladder((1.0, 2.0), 1e-12),
        compiled=False,
    )
    with pytest.raises(NonFiniteEnergyError, match="replica 1 on rung 1"):
        run.step()
    assert run.state.replica_at[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"dim": None}, InvalidArgumentError, "needs its dimension"),
        ({"temperatures": None}, InvalidArgumentError, "temperatures=... and lr"),
        ({"ladder": tr.Ladder((1.0,), 0.1)}, InvalidArgumentError, "not both"),
        ({"n_steps": 0}, InvalidArgumentError, "n_steps must be a whole number >= 1, got 0"),
        ({"thin": 0}, InvalidArgumentError, "thin"),
        ({"burn_in": -1}, InvalidArgumentError, "burn_in"),
        ({"correction_factor": 0.0}, InvalidArgumentError, "F must be positive"),
        ({"swap_interval": 0}, InvalidArgumentError, "swap_interval"),
        ({"swap_intensity": 100.0}, InvalidArgumentError, "r \\* lr <= 1"),
        ({"momentum": "forget"}, InvalidArgumentError, "rescale, keep, refresh"),
        ({"initial": torch.zeros(3)}, InvalidArgumentError, "broadcast to"),
        ({"initial": float("nan")}, InvalidArgumentError, "finite"),
        ({"seed": -1}, InvalidArgumentError, "seed"),
        ({"burn_in": 10}, InvalidArgumentError, "keeps no draw"),
        ({"temperatures": 1.0}, LadderError, r"one rung is \(1.0,\)"),
        ({"sampler": "sghmc"}, InvalidArgumentError, "SGHMC"),
        ({"pairing": tr.RandomPair}, InvalidArgumentError, "EvenOdd"),
        ({"noise": 4.0}, InvalidArgumentError, "KnownVariance"),
        ({"target": tr.GaussianMixture([1.0], [0.0], [1.0])}, InvalidArgumentError, "has dim=1"),
        ({"device": "gpu0"}, InvalidArgumentError, "device must be"),
        ({"target": lambda x: x}, TargetError, "must return a tensor of shape"),
    ],
)
def test_bad_arguments(changes, error, word):
    sizes = {"target": gaussian, "dim": 2, "n_steps": 10}
    arguments = {**sizes, "temperatures": (1.0, 2.0), "lr": 0.1, **changes}
    with pytest.raises(error, match=word):
        tr.sample(arguments.pop("target"), **arguments)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a CUDA device is present, so it may be asked for"
)
def test_cuda_asked_for_and_absent():
    with pytest.raises(InvalidArgumentError, match="no CUDA device"):
        tr.sample(gaussian, dim=1, temperatures=(1.0,), lr=0.1, n_steps=5, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_runs_eagerly():
    draws = tr.sample(gaussian, dim=2, ladder=PAIR, n_steps=200, n_runs=1000, device="cuda")
    assert abs(float(draws.values[:, 50:].var()) - 1 / 0.95) < 0.05


def test_ladder_and_ensemble_must_fit():
    ladder, target = tr.Ladder((1.0, 2.0, 3.0), 0.1), tr.LogDensity(gaussian, 1)
    ensembles = [tr.TensorEnsemble.start(target, n_rungs=3, n_runs=n) for n in (1, 2)]
    with pytest.raises(LadderError, match="2 rungs but the ensemble 3"):
        tr.DensityExchange(ensembles[0], PAIR)
    run, other = (tr.DensityExchange(ensemble, ladder) for ensemble in ensembles)
    with pytest.raises(InvalidArgumentError, match="rungs, runs, dim"):
        run.load_state_dict(other.state_dict())


def autoregressive(n_chains, n_draws, correlation, n, seed=0):
    """(chains, draws, n): n independent sets of stationary chains with mean 0 and variance 1."""
    x = torch.randn(
        n_chains, n_draws, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    for k in range(1, n_draws):
        x[:, k] = correlation * x[:, k - 1] + math.sqrt(1 - correlation**2) * x[:, k]
    return x


@pytest.mark.parametrize("n_chains", [1, 2, 8, 32])
@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_two_standard_errors_cover_95_percent(n_chains, correlation):
    """2,000 sets of chains: between 92 and 98 %, five standard errors of this test to either side
    of 94.5 %.

    The mutant, the spread between chains without degrees of freedom, covers 70 % with two chains,
    and is NaN for one."""
    x = autoregressive(n_chains, 1000 if n_chains < 32 else 400, correlation, 2000)
    error = mean_error(x)
    covers = float((x.mean((0, 1)).abs() < 1.96 * error).double().mean())
    assert 0.92 < covers < 0.98
    if n_chains == 2:
        between = x.mean(1).std(0) / math.sqrt(2)
        assert float((x.mean((0, 1)).abs() < 1.96 * between).double().mean()) < 0.8


def test_mean_sd_and_standard_error(monkeypatch):
    draws = tr.sample(gaussian, dim=3, ladder=PAIR, n_steps=40, n_runs=6)
    chains = draws.values.double()
    assert torch.allclose(draws.mean(), chains.mean((0, 1)))
    assert torch.allclose(draws.std(), chains.flatten(0, 1).std(0))
    whole = draws.standard_error()
    independent = chains.flatten(0, 1).std(0) / 240**0.5
    assert (whole > independent).all()  # the draws of a chain are correlated
    monkeypatch.setattr("torchrex.posterior.standard_error.AT_ONCE", 300)
    assert torch.allclose(draws.standard_error(), whole)
    assert torch.equal(mean_error(torch.ones(2, 10, 1)), torch.zeros(1, dtype=torch.float64))
    few = replace(draws, values=draws.values[:, :3])
    assert torch.allclose(few.standard_error(), chains[:, :3].mean(1).std(0) / 6**0.5)
    assert mean_error(draws.values[:1, :3]).isnan().all()
    apart = torch.tensor([-1.0, -1.0, 1.0, 1.0]).view(4, 1, 1)  # chains in modes of their own
    assert 0.3 < float(mean_error(0.1 * autoregressive(4, 1000, 0.5, 1) + apart)) < 2.0


# How the pairs of rungs did


def noisy_ladder(noise_std, **options):
    """Three rungs; the first pair has the noise s = noise_std, the second a fifth of it."""
    target = tr.Noisy(tr.LogDensity(gaussian, 1), tr.Gaussian(noise_std))
    common = {"noise": tr.KnownVariance(noise_std**2), "n_steps": 400, "n_runs": 2, "lr": 0.01}
    cold = 1 / 2**0.5  # of the inverse gaps, the first of which makes s that noise_std
    return tr.sample(
        target, temperatures=(1.0, 1 / (1 - cold), 1 / (1 - 1.2 * cold)), **{**common, **options}
    )


def test_summary_tells_s_f_and_round_trips(caplog):
    draws = noisy_ladder(1.5)
    first, second = draws.pairs()
    assert first.accepted == int(draws.accepted[0].sum())
    assert first.proposed == int(draws.proposed[0].sum())
    assert (first.noise_std, second.noise_std) == (pytest.approx(1.5), pytest.approx(0.3))
    assert first.expected == pytest.approx(float(tr.expected_acceptance(0.0, 1.5)))
    assert first.factor == 1.0
    history = diagnostics.History.from_draws(draws, tr.Ladder(draws.settings["temperatures"], 0.01))
    trips = float(diagnostics.round_trips(history).round_trips.sum(0).double().mean())
    assert trips > 0
    assert f" {trips:.3g} round trips" in draws.summary()
    assert f" {trips:.3g} round trips" in draws._repr_html_()
    assert "at least" in replace(draws, steps=2 * draws.steps, n_steps=800).summary()
    assert "warning" not in draws.summary()
    assert not caplog.records


def test_a_pair_that_never_swaps_is_named(caplog):
    draws = noisy_ladder(20.0)
    assert [pair.is_dead for pair in draws.pairs()] == [True, False]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "rungs 0 and 1 (s = 20)" in said
    assert "closer temperatures" in said
    assert f"warning: {said}"[:50] in draws.summary()
    caplog.clear()
    noisy_ladder(20.0, pairing=tr.NoSwaps())
    noisy_ladder(20.0, correction_factor=math.inf)
    noisy_ladder(20.0, n_steps=8)  # too early to tell
    assert not caplog.records


def test_a_pair_that_was_never_tested_is_named(caplog):
    common = {"dim": 1, "temperatures": (1.0, 2.0, 4.0), "lr": 0.01, "n_steps": 30}
    tr.sample(gaussian, **common, pairing=tr.NoSwaps())
    tr.sample(gaussian, **common, swap_start=20)
    assert not caplog.records
    tr.sample(gaussian, **common, swap_start=29)
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.search(r"no swap was ever tested between rungs \d and \d; .*swap_start", said)


def test_s_of_an_annealed_ladder_is_that_of_the_last_draw():
    """Its temperatures are those of the last step, so its noise variance must be too."""
    target = tr.Noisy(tr.LogDensity(gaussian, 1), tr.Gaussian(3.0))
    ladder = tr.Ladder((1.0, 2.0), 0.01, anneal=tr.schedules.geometric(0.99))
    noise = tr.Smoothing(0.3, tr.RepeatedDraws(4, every=10))
    draws = tr.sample(target, ladder=ladder, n_steps=100, noise=noise)
    (pair,) = draws.pairs()
    cold, hot = draws.settings["temperatures"]
    sigma2 = float(draws.noise_variance[-1])
    assert pair.noise_std == pytest.approx(math.sqrt(2 * sigma2) * (1 / cold - 1 / hot), rel=1e-4)


@pytest.mark.parametrize(
    ("accepted", "proposed", "expected", "dead"),
    [
        (0, 150, 0.3, True),
        (0, 149, 0.3, False),
        (0, 20, 1e-4, True),
        (0, 19, 1e-4, False),
        (2, 450, 0.3, True),  # one swap of each run
        (2, 449, 0.3, False),
        (2, 60, 1e-4, True),
        (3, 10_000, 1e-4, False),
    ],
)
def test_when_a_pair_is_dead(accepted, proposed, expected, dead):
    assert PairReport(0, accepted, proposed, 1.0, 1.0, expected, n_runs=2).is_dead == dead
    assert not PairReport(0, accepted, proposed, math.nan, math.nan, math.nan).is_dead


def unit_normal(batch_size):
    """The mean of 1,000 numbers; s of its two rungs is proportional to their inverse gap."""
    data = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    return tr.TallPosterior(
        lambda x, d: -0.5 * (x[..., 0] - d) ** 2, gaussian, (data,), 1, batch_size=batch_size
    )


def test_a_dead_pair_that_swapped_once_because_replicas_start_alike(caplog):
    ladder = tr.Ladder((1.0, 1e6), 1e-4)
    draws = tr.sample(unit_normal(20), ladder=ladder, n_steps=800, initial=torch.zeros(1))
    assert int(draws.accepted.sum()) == 1
    (said,) = [record.getMessage() for record in caplog.records if "swap" in record.getMessage()]
    assert said.startswith("1 swap in 800 tests between rungs 0 and 1")
    s = draws.pairs()[0].noise_std
    assert f"between 0 and 1 about {math.ceil(s / 2) - 1:,})" in said


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_data_that_are_not_finite_are_named(value):
    target = unit_normal(20)
    target.data[0][7] = value
    with pytest.raises(NonFiniteEnergyError, match="data of the target") as caught:
        tr.sample(target, temperatures=(1.0, 1.1), lr=3e-4, n_steps=2000, seed=1)
    assert "learning rate" not in str(caught.value)


def test_the_noise_of_a_pair_is_that_of_all_draws():
    draws = tr.sample(
        unit_normal(20), temperatures=(1.0, 1.1), lr=3e-4, n_steps=2000, n_runs=1, seed=1
    )
    (pair,) = draws.pairs()
    assert abs(pair.expected - pair.rate) < 0.05
    s = 2**0.5 * (1 - 1 / 1.1) * draws.noise_variance.double().sqrt()
    assert pair.noise_std == pytest.approx(float(s.square().mean().sqrt()))
    assert pair.expected == pytest.approx(float(tr.expected_acceptance(0.0, s).mean()))
    assert f"{float(draws.noise_variance.double().mean()):.4g}" in draws.summary()


def test_a_learnt_factor_is_told():
    draws = noisy_ladder(20.0, correction_factor=tr.TargetAcceptance(0.2), n_steps=2000)
    wanted = float(diagnostics.factor_for_noise(20.0, 0.2))
    assert draws.pairs()[0].factor == pytest.approx(wanted, rel=0.3)
    assert f"{draws.pairs()[0].factor:.3g}" in draws.summary()
    parts = noisy_ladder(20.0, correction_factor=tr.TargetAcceptance(0.2), n_steps=200, shards=2)
    assert parts.pairs()[0].factor > 2.0


# Where runs start


def first_points(target, **options):
    """After one step that goes nowhere."""
    sizes = {"n_steps": 1, "n_runs": 4000, "dtype": torch.float64}
    still = {"ladder": tr.Ladder((1.0, 2.0), 1e-30), "pairing": tr.NoSwaps()}
    return tr.sample(target, **{**sizes, **still, **options})


def test_runs_start_at_draws_of_the_prior_or_of_a_distribution():
    x, y, _ = tr.targets.simulate_logistic(50, 3)
    target = tr.logistic_regression(x, y, prior_precision=4.0, batch_size=10)
    before = torch.get_rng_state()
    draws = first_points(target)
    assert_mean_is(draws.values.flatten(), 0.0)
    assert_mean_is(draws.values.square().flatten(), 0.25)
    assert "started_at_one_point" not in draws.settings
    parts = first_points(target, shards=3)
    assert torch.allclose(parts.values, draws.values)  # shards divide the runs, not their starts
    assert not torch.allclose(first_points(target, seed=1).values, draws.values)
    assert torch.allclose(first_points(tr.Noisy(target, tr.Gaussian(1.0))).values, draws.values)
    at_one = first_points(target, initial=0.5)
    assert torch.allclose(at_one.values, torch.tensor(0.5, dtype=torch.float64))
    assert at_one.settings["started_at_one_point"] is True
    normal = first_points(gaussian, dim=2, initial=torch.distributions.Normal(3.0, 2.0))
    assert_mean_is(normal.values.flatten(), 3.0)
    assert_mean_is((normal.values - 3.0).square().flatten(), 4.0)
    wide = torch.distributions.MultivariateNormal(torch.tensor([1.0, -1.0]), torch.eye(2))
    assert_mean_is(first_points(gaussian, dim=2, initial=wide).values[..., 1].flatten(), -1.0)
    with pytest.raises(InvalidArgumentError, match="broadcast to"):
        first_points(gaussian, dim=3, initial=wide)
    assert torch.equal(torch.get_rng_state(), before)


def test_r_hat_knows_of_one_starting_point():
    pytest.importorskip("arviz")
    common = {"dim": 1, "temperatures": (1.0,), "lr": 0.1, "n_steps": 50, "n_runs": 4}
    at_one = diagnostics.convergence(tr.sample(gaussian, **common))
    assert at_one.started_at_one_point
    assert "started at one point" in at_one.summary()
    apart = diagnostics.convergence(
        tr.sample(gaussian, **common, initial=torch.distributions.Normal(0.0, 2.0))
    )
    assert not apart.started_at_one_point
    assert "started at one point" not in apart.summary()


def test_nan_at_the_very_first_step():
    infinite = tr.LogDensity(lambda x: x.sum(-1) * float("inf"), 1)
    with pytest.raises(NonFiniteEnergyError, match="step 0") as caught:
        tr.sample(infinite, temperatures=(1.0,), lr=0.1, n_steps=5, initial=1.0)
    assert caught.value.draws is None


def test_the_standard_error_is_that_of_arviz():
    pytest.importorskip("arviz")
    x = autoregressive(4, 500, 0.8, 5)
    assert torch.allclose(mean_error(x), diagnostics.convergence(x).mcse_mean, rtol=0.02)


@pytest.mark.parametrize(
    ("name", "ours"), [("learning_rate", "lr"), ("n_chains", "n_runs"), ("temps", "temperatures")]
)
def test_names_of_other_libraries_are_understood(name, ours):
    """By spelling alone `temps` is nearest to n_steps."""
    with pytest.raises(InvalidArgumentError, match=f"unknown argument '{name}'.* mean {ours}?"):
        tr.sample(lambda x: -0.5 * x.square().sum(-1), dim=1, n_steps=5, **{name: 1})
