"""`sample` and the draws it returns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import torchrex as tr
from torchrex.errors import InvalidArgumentError, LadderError, NonFiniteEnergyError, RunFolderError, RunInterrupted, TargetError
from torchrex.posterior.draw_recorder import DrawRecorder
from torchrex.posterior.draws_file import SHAPES


def gaussian(x):
    return -0.5 * x.square().sum(-1)


def test_shapes_thinning_and_burn_in():
    draws = tr.sample(gaussian, dim=3, temperatures=(1.0, 2.0, 4.0), lr=0.1, n_steps=100, n_runs=5, thin=7, burn_in=20)
    assert draws.values.shape == (5, 11, 3)
    assert draws.steps.tolist() == list(range(27, 98, 7))
    assert draws.noise_variance.shape == (11, 2, 5)
    assert draws.replica_at.shape == (11, 3, 5)
    assert draws.energy.shape == (11, 3, 5)
    assert draws.accepted.shape == draws.proposed.shape == (2, 5)
    assert draws.status == "finished"


def test_thinned_draws_are_those_of_the_full_run():
    common = {"dim": 1, "temperatures": (1.0, 2.0), "lr": 0.1, "n_steps": 90, "n_runs": 2, "seed": 4}
    full, thinned = tr.sample(gaussian, **common), tr.sample(gaussian, thin=9, burn_in=30, **common)
    assert torch.equal(thinned.values, full.values[:, 38::9])
    assert torch.equal(thinned.replica_at, full.replica_at[38::9])
    assert torch.equal(thinned.accepted, full.accepted)
    assert torch.equal(full.after(50).values, full.values[:, 50:])


def test_recorder_does_not_care_how_steps_are_cut_into_blocks():
    full = tr.sample(gaussian, dim=1, temperatures=(1.0, 2.0), lr=0.1, n_steps=60, n_runs=2)
    run = tr.ReplicaExchange(tr.TensorEnsemble.start(tr.LogDensity(gaussian, 1), n_rungs=2, n_runs=2), tr.Ladder((1.0, 2.0), 0.1))
    recorder = DrawRecorder(60, thin=4, burn_in=3)
    for n in (1, 2, 3, 5, 8, 13, 21, 7):
        for info in run.advance(n):
            recorder.record(info)
    draws = recorder.draws("finished", {})
    assert draws.steps.tolist() == list(range(7, 61, 4))
    assert torch.equal(draws.values, full.values[:, 6::4])
    assert torch.equal(draws.accepted, full.accepted)


def test_same_seed_same_draws_other_seed_other_draws():
    common = {"dim": 1, "temperatures": (1.0, 2.0), "lr": 0.1, "n_steps": 50}
    a, b, c = (tr.sample(gaussian, seed=seed, **common).values for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_summary_and_repr():
    draws = tr.sample(gaussian, dim=12, temperatures=(1.0, 2.0), lr=0.1, n_steps=50, n_runs=2)
    text = draws.summary()
    assert "2 chains x 50 draws" in text
    assert "2 more" in text
    assert "0 - 1" in text
    assert f"{100 * float(draws.acceptance_rate):.3g} %" in text
    assert "swaps accepted" in repr(draws)
    alone = tr.sample(gaussian, dim=1, temperatures=(1.0,), lr=0.1, n_steps=5)
    assert "swaps" not in alone.summary()


def test_save_and_load(tmp_path):
    draws = tr.sample(gaussian, dim=2, temperatures=(1.0, 2.0), lr=0.1, n_steps=50, n_runs=2)
    draws.save(tmp_path / "d.safetensors")
    back = tr.Draws.load(tmp_path / "d.safetensors")
    assert torch.equal(back.values, draws.values)
    assert torch.equal(back.replica_at, draws.replica_at)
    assert (back.n_steps, back.status, back.settings) == (draws.n_steps, draws.status, draws.settings)


def refused(path):
    """The one line that is said of it."""
    with pytest.raises(RunFolderError) as caught:
        tr.Draws.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_files_that_are_not_draws(tmp_path):
    tr.sample(gaussian, dim=2, temperatures=(1.0, 2.0), lr=0.1, n_steps=50).save(tmp_path / "draws.safetensors")
    whole, path = (tmp_path / "draws.safetensors").read_bytes(), tmp_path / "other"
    assert refused(path) == f"there is no file {path}"
    assert f"is a folder; load {tmp_path / 'draws.safetensors'}" in refused(tmp_path)
    (tmp_path / "empty folder").mkdir()
    assert "is a folder; give the file itself" in refused(tmp_path / "empty folder")
    for size in (50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert f"is damaged, perhaps cut off: it ends after {size:,} bytes" in refused(path)
    path.write_bytes(b"")
    assert "is empty" in refused(path)
    for text in (b"\x80\x04pickle", b"a text that is long enough to have a header", b'{"a": 1}{"a": 1}'):
        path.write_bytes(text)
        assert "is not a safetensors file; give what Draws.save wrote" in refused(path)
    save_file({name: torch.ones(1) for name in "abcdef"}, path)
    assert "is a safetensors file of another kind: it holds a, b, c, d and 2 more" in refused(path)
    save_file({"a": torch.ones(1)}, path, {"torchrex": "{}"})
    assert "of another kind: it holds a;" in refused(path)


def test_files_whose_tensors_do_not_fit_each_other(tmp_path):
    draws, path = tr.sample(gaussian, dim=2, temperatures=(1.0, 2.0), lr=0.1, n_steps=50, n_runs=3), tmp_path / "d"
    replace(draws, energy=draws.energy[1:]).save(path)
    assert "see its energy of shape (49, 2, 3)" in refused(path)
    replace(draws, accepted=draws.accepted[0]).save(path)
    assert "see its accepted of shape (3,)" in refused(path)
    replace(draws, replica_at=draws.replica_at[:, :1], energy=draws.energy[:, :1]).save(path)
    assert "does not hold draws" in refused(path)
    replace(draws, n_steps="50", settings=[]).save(path)
    assert "see its n_steps, settings" in refused(path)
    save_file({name: getattr(draws, name).contiguous() for name in SHAPES}, path, {"torchrex": "[1]"})
    assert "see its n_steps, status, settings" in refused(path)


def test_places_where_draws_cannot_be_saved(tmp_path):
    draws = tr.sample(gaussian, dim=1, temperatures=(1.0,), lr=0.1, n_steps=5)
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "absent" / "d", "No such file or directory")):
        with pytest.raises(RunFolderError, match=f"cannot write .* \\({why}\\); give the name of a file") as caught:
            draws.save(path)
        assert "\n" not in str(caught.value)


def test_settings_say_what_ran_and_not_where_it_stood():
    draws = tr.sample(gaussian, dim=1, temperatures=(1.0, 2.0), lr=0.1, n_steps=20, seed=3)
    assert draws.settings["seed"] == 3
    assert "Ladder((1, 2), lrs=0.1)" in draws.settings["run"]
    for text in (str(draws.settings), draws._repr_html_(), draws.summary(), repr(draws)):
        assert "step 0" not in text
    assert "steps_before" not in draws.settings
    ensemble = tr.TensorEnsemble.start(tr.LogDensity(gaussian, 1), n_rungs=2)
    run = tr.ReplicaExchange(ensemble, tr.Ladder((1.0, 2.0), 0.1))
    first, second = tr.collect(run, 20), tr.collect(run, 20)
    assert second.settings == {**first.settings, "steps_before": 20}


def test_every_text_rounds_the_rate_alike():
    """634 of 800 is 79.25 %, which single precision and double round to different sides."""
    draws = tr.sample(gaussian, dim=1, temperatures=(1.0, 2.0), lr=0.1, n_steps=20)
    for made in (0, 634, 218, 800):
        draws = replace(draws, accepted=torch.tensor([[made]]), proposed=torch.tensor([[800]]))
        shown = f"{100 * (made / 800):.3g} %"
        assert all(shown in text for text in (draws._repr_html_(), repr(draws), draws.summary()))


def draws_until_ctrl_c(on_interrupt, **arguments):
    if on_interrupt == "return":
        return tr.sample(gaussian, on_interrupt="return", **arguments)
    with pytest.raises(KeyboardInterrupt) as caught:
        tr.sample(gaussian, **arguments)
    assert isinstance(caught.value, RunInterrupted)
    return caught.value.draws


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_ctrl_c_keeps_what_is_done(on_interrupt):
    """By default it goes on as KeyboardInterrupt: a loop over seeds must not begin the next one."""
    calls = []

    def interrupt(done, total):
        calls.append((done, total))
        if len(calls) == 2:
            raise KeyboardInterrupt

    settings = {"temperatures": (1.0, 2.0), "lr": 0.1, "n_steps": 100_000, "n_runs": 20_000, "thin": 8}
    draws = draws_until_ctrl_c(on_interrupt, dim=1, progress=interrupt, **settings)
    assert draws.status == "interrupted"
    assert draws.n_steps == calls[1][0] < 100_000
    assert draws.n_draws == draws.n_steps // 8
    assert calls[0][1] == 100_000


@pytest.mark.parametrize("compiled", [False, True])
def test_nan_energy_names_replica_rung_and_step_and_keeps_the_draws(compiled):
    def breaks(x):
        return torch.where(x[:, 0] > 2.5, float("nan"), gaussian(x))

    with pytest.raises(NonFiniteEnergyError, match=r"replica \d on rung \d became nan at step \d+ \(run \d+\)") as caught:
        tr.sample(breaks, dim=1, temperatures=(1.0, 2.0), lr=0.1, n_steps=5000, n_runs=4, dtype=torch.float64, compiled=compiled)
    error = caught.value
    assert error.draws.n_draws == error.step > 0
    assert error.draws.values.isfinite().all()
    assert error.draws.status == "failed"
    # The draw before is where it broke, if it was the coldest rung; in any case the same density run to one step less is fine.
    fine = tr.sample(
        breaks, dim=1, temperatures=(1.0, 2.0), lr=0.1, n_steps=error.step, n_runs=4, dtype=torch.float64, compiled=compiled
    )
    assert torch.equal(fine.values, error.draws.values)


def test_nan_at_the_very_first_step():
    with pytest.raises(NonFiniteEnergyError, match="step 0") as caught:
        tr.sample(lambda x: x.sum(-1) * float("inf"), dim=1, temperatures=(1.0,), lr=0.1, n_steps=5, initial=1.0)
    assert caught.value.draws is None


def test_a_broken_replica_is_never_swapped_in():
    """NaN compares false, so a replica with a NaN energy keeps its rung."""
    target = tr.LogDensity(lambda x: torch.where(x[:, 0] > 5.0, float("nan"), gaussian(x)), 1)
    start = torch.tensor([0.0, 9.0]).view(2, 1, 1)
    run = tr.ReplicaExchange(
        tr.TensorEnsemble.start(target, n_rungs=2, initial=start), tr.Ladder((1.0, 2.0), 1e-12), compiled=False
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
        ({"n_steps": 10.5}, InvalidArgumentError, "n_steps"),
        ({"n_runs": 0}, InvalidArgumentError, "n_runs"),
        ({"thin": 0}, InvalidArgumentError, "thin"),
        ({"burn_in": -1}, InvalidArgumentError, "burn_in"),
        ({"lr": -0.1}, LadderError, "lrs must be finite and >= 0"),
        ({"temperatures": (2.0, 1.0)}, LadderError, "rise"),
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
        ({"sampler": tr.SGHMC}, InvalidArgumentError, "SGHMC"),
        ({"pairing": tr.RandomPair}, InvalidArgumentError, "EvenOdd"),
        ({"noise": 4.0}, InvalidArgumentError, "RunningMean"),
        ({"target": tr.GaussianMixture([1.0], [0.0], [1.0])}, InvalidArgumentError, "has dim=1"),
        ({"device": "gpu0"}, InvalidArgumentError, "device must be"),
        ({"target": lambda x: x}, TargetError, "must return a tensor of shape"),
    ],
)
def test_bad_arguments(changes, error, word):
    arguments = {"target": gaussian, "dim": 2, "temperatures": (1.0, 2.0), "lr": 0.1, "n_steps": 10} | changes
    with pytest.raises(error, match=word):
        tr.sample(arguments.pop("target"), **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present, so it may be asked for")
def test_cuda_asked_for_and_absent():
    with pytest.raises(InvalidArgumentError, match="no CUDA device"):
        tr.sample(gaussian, dim=1, temperatures=(1.0,), lr=0.1, n_steps=5, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_runs_eagerly():
    draws = tr.sample(gaussian, dim=2, temperatures=(1.0, 2.0), lr=0.1, n_steps=200, n_runs=1000, device="cuda")
    assert abs(float(draws.values[:, 50:].var()) - 1 / 0.95) < 0.05


def test_ladder_and_ensemble_must_fit():
    ensemble = tr.TensorEnsemble.start(tr.LogDensity(gaussian, 1), n_rungs=3)
    with pytest.raises(LadderError, match="2 rungs but the ensemble 3"):
        tr.ReplicaExchange(ensemble, tr.Ladder((1.0, 2.0), 0.1))
    run = tr.ReplicaExchange(ensemble, tr.Ladder((1.0, 2.0, 3.0), 0.1))
    other = tr.ReplicaExchange(
        tr.TensorEnsemble.start(tr.LogDensity(gaussian, 1), n_rungs=3, n_runs=2), tr.Ladder((1.0, 2.0, 3.0), 0.1)
    )
    with pytest.raises(InvalidArgumentError, match="rungs, runs, dim"):
        run.load_state_dict(other.state_dict())


def test_infinite_factor_is_the_naive_test():
    target = tr.Noisy(tr.LogDensity(gaussian, 1), tr.Gaussian(5.0))
    common = {"temperatures": (1.0, 3.0), "lr": 0.1, "n_steps": 200, "n_runs": 50, "noise": tr.KnownVariance(25.0)}
    naive, corrected = tr.sample(target, correction_factor=math.inf, **common), tr.sample(target, **common)
    assert naive.acceptance_rate > 0.4
    assert corrected.acceptance_rate < 0.05


def test_mean_sd_and_standard_error():
    draws = tr.sample(gaussian, dim=2, temperatures=(1.0, 2.0), lr=0.1, n_steps=200, n_runs=6)
    chains = draws.values.double()
    assert torch.allclose(draws.mean(), chains.mean((0, 1)))
    assert torch.allclose(draws.standard_error(), chains.mean(1).std(0) / 6**0.5)
    assert torch.allclose(draws.std(), chains.reshape(-1, 2).std(0))
