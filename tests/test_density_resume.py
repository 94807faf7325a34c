"""Checkpoints of runs on densities: stopped and resumed equals never stopped, bit for bit."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch

import torchrex as tr
from densities import MIXTURE, SETUPS
from densities import assert_same_draws as assert_same
from torchrex.density import loop as block
from torchrex.density import run as density_run
from torchrex.density.drawing import DrawRecorder
from torchrex.errors import (
    CheckpointError,
    InvalidArgumentError,
    NonFiniteEnergyError,
    RunInterrupted,
)
from torchrex.xoshiro import VERSION

# Which draws of a setup are kept; of the setups those between which a checkpoint differs.
KEPT = {
    "the paper's": {"thin": 3},
    "sghmc, refreshed, random pairs": {"burn_in": 150, "thin": 7},
    "tall data, paired, annealed": {"burn_in": 5},
    "one rung": {},
}
N_STEPS = 400


def draw(folder=None, name="the paper's", **more):
    sizes = {"n_steps": N_STEPS, "n_runs": 5, "seed": 3, "compiled": False}
    setup = {**sizes, "on_interrupt": "return", **SETUPS[name], **KEPT[name], **more}
    return tr.sample(setup.pop("target")(), checkpoints=folder, **setup)


def stop_after(n):
    """Ctrl-C as soon as so many steps are done."""

    def progress(done, total):
        if done >= n:
            raise KeyboardInterrupt

    return progress


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(block, "LONGEST", 64)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stopped_and_resumed_equals_never_stopped(tmp_path, name, compiled):
    """Every 45 steps: checkpoints lie in the middle of blocks and of stretches."""
    setup = {"name": name, "compiled": compiled}
    whole = draw(**setup)
    assert whole.status == "finished"
    assert name == "one rung" or whole.accepted.sum() > 0
    for n in (1, 64, 200, 399):
        folder = tmp_path / str(n)
        part = draw(folder, **setup, checkpoint_every=45, progress=stop_after(n))
        assert part.status == "interrupted"
        assert n <= part.n_steps < N_STEPS + (n == 399)
        assert torch.equal(part.values, whole.values[:, : part.n_draws])
        assert tr.Checkpoints(folder).steps()[-1] == part.n_steps
        assert_same(draw(folder, **setup, checkpoint_every=45), whole)


@pytest.mark.usefixtures("short_blocks")
def test_after_a_kill_the_newest_checkpoint_serves(tmp_path):
    """As after kill -9: what came after the last whole checkpoint is lost, and drawn again."""

    class KillError(BaseException):
        pass

    def killed(done, total):
        if done > 200:
            raise KillError

    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        with pytest.raises(KillError):
            draw(folder, compiled=compiled, checkpoint_every=90, progress=killed)
        assert tr.Checkpoints(folder).steps() == [90, 180]
        resumed = draw(folder, compiled=compiled, checkpoint_every=30)
        assert_same(resumed, draw(compiled=compiled))
        assert tr.Checkpoints(folder).steps() == [390, 400]


def test_the_loop_is_chosen_by_all_steps_and_not_by_those_that_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(density_run, "STEPS_WORTH_COMPILING", 300)
    whole, eager = draw(compiled=None), draw(compiled=False)
    assert not torch.equal(whole.noise_variance, eager.noise_variance), (
        "the two agree to rounding only"
    )
    draw(tmp_path, compiled=None, checkpoint_every=150, progress=stop_after(150))
    assert_same(draw(tmp_path, compiled=None), whole)
    draw(tmp_path / "short", compiled=None, n_steps=200)
    with pytest.raises(
        CheckpointError, match=r"compiled was False and is now True \(pass compiled=False\)\."
    ):
        draw(tmp_path / "short", compiled=None)
    assert_same(draw(tmp_path / "short", compiled=False), eager)


def test_what_could_not_be_compiled_goes_on_eagerly(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr("torchrex.density.loop.CompiledLoop", fails)
        draw(tmp_path, compiled=True, checkpoint_every=100, progress=stop_after(128))
    assert_same(draw(tmp_path, compiled=True), draw(compiled=False))
    other = tmp_path / "other"
    draw(other, compiled=True, checkpoint_every=100, progress=stop_after(100))
    caplog.clear()
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr("torchrex.density.loop.CompiledLoop", fails)
        assert draw(other, compiled=True).status == "finished"
    assert "is of a compiled run; it goes on eagerly" in caplog.text


def test_a_finished_run_is_read_and_a_longer_one_goes_on(tmp_path, monkeypatch):
    whole = draw(tmp_path)
    longer = draw(n_steps=600)

    def never(*_):
        raise AssertionError("a step was made")

    with monkeypatch.context() as patch:
        patch.setattr(density_run.DensityExchange, "stretch", never)
        assert_same(draw(tmp_path), whole)
    assert_same(draw(tmp_path, n_steps=600), longer)
    with pytest.raises(InvalidArgumentError, match="at step 600 already"):
        draw(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ladder": tr.Ladder((1.0, 10.0), 0.02)}, r"ladder.lrs"),
        ({"seed": 4}, r"seed was 3 and is now 4"),
        ({"n_runs": 6}, r"n_runs was 5 and is now 6"),
        ({"thin": 2}, r"thin was 3 and is now 2"),
        ({"burn_in": 2}, r"burn_in"),
        ({"initial": 0.5}, r"start"),
        ({"dtype": torch.float64}, r"dtype was 'torch.float32' and is now 'torch.float64'"),
        ({"sampler": tr.SGHMC(0.2)}, r"sampler"),
        ({"target": lambda: MIXTURE, "noise": None}, r"target"),
        ({"compiled": True}, r"compiled"),
    ],
)
def test_another_setting_is_refused_and_named(tmp_path, changes, words):
    draw(tmp_path, n_steps=100)
    with pytest.raises(CheckpointError, match=words):
        draw(tmp_path, **changes)


@pytest.mark.parametrize("version", [1, None])
def test_a_checkpoint_with_other_random_numbers_is_refused_in_one_line(
    tmp_path, monkeypatch, version
):
    """None: that of a version that did not count them."""
    setting = density_run.DensityExchange.setting.fget

    def of_before(run):
        other = {"random_numbers": version} if version else {}
        return {**{k: v for k, v in setting(run).items() if k != "random_numbers"}, **other}

    with monkeypatch.context() as patch:
        patch.setattr(density_run.DensityExchange, "setting", property(of_before))
        draw(tmp_path, n_steps=100)
    with pytest.raises(CheckpointError) as caught:
        draw(tmp_path)
    message, was = str(caught.value), version or "absent"
    expected = f"random_numbers was {was} and is now {VERSION} (another version of torchrex, or "
    assert f"{expected}another device, drew other ones: use that)" in message
    assert "\n" not in message


def test_what_is_in_the_way(tmp_path):
    draw(tmp_path, n_steps=100)
    with pytest.raises(CheckpointError, match="holds checkpoints up to step 100"):
        draw(tmp_path, resume=False)
    assert_same(draw(tmp_path / "new", resume=False), draw())
    for name, value in (("checkpoint_every", 0), ("checkpoint_every", 2.5), ("budget", 0.0)):
        with pytest.raises(InvalidArgumentError, match=name):
            draw(tmp_path / "never", **{name: value})


def test_a_checkpoint_of_something_else_is_refused_in_one_line(tmp_path, monkeypatch):
    settings = []

    def keep(self, step, state, *, setting):
        settings.append(setting)

    with monkeypatch.context() as patch:
        patch.setattr(tr.Checkpoints, "save", keep)
        draw(tmp_path / "spied", n_steps=100)
    draw(tmp_path, n_steps=100)
    state = tr.Checkpoints(tmp_path).load_newest().state
    run, recorder = state["run"], state["recorder"]
    broken = {
        "no run": {name: value for name, value in state.items() if name != "run"},
        "no rows": {**state, "recorder": {**recorder, "rows": {}}},
        "short": {**state, "recorder": {**recorder, "n_seen": 50}},
        "shape": {**state, "run": {**run, "position": torch.zeros(3)}},
        "exchange": {**state, "run": {**run, "replica_at": torch.zeros(3)}},
        "streams": {**state, "run": {**run, "streams": {"move": torch.zeros(3)}}},
    }
    for name, other in broken.items():
        tr.Checkpoints(tmp_path / name).save(100, other, setting=settings[0])
        with pytest.raises(CheckpointError, match="is not a checkpoint of such a run") as caught:
            draw(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("short_blocks")
def test_a_budget_pauses(tmp_path):
    part = draw(tmp_path, budget=1e-9)
    assert part.status == "paused"
    assert 0 < part.n_steps < N_STEPS
    assert tr.Checkpoints(tmp_path).steps() == [part.n_steps]
    steps, status = [part.n_steps], part.status
    while status == "paused":
        part = draw(tmp_path, budget=1e-9)
        status = part.status
        steps.append(part.n_steps)
    assert len(steps) > 3
    assert_same(part, draw())
    assert draw(budget=1e-9).status == "paused"  # without a folder, nothing to go on from
    assert draw(budget=1e9).status == "finished"


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_stops(tmp_path, number, code, on_interrupt):
    def terminate(done, total):
        if done >= 100:
            os.kill(os.getpid(), number)

    options = {"progress": terminate, "checkpoint_every": 45, "on_interrupt": on_interrupt}
    if on_interrupt == "raise":
        with pytest.raises(SystemExit) as caught:
            draw(tmp_path, **options)
        assert caught.value.code == code
    else:
        assert draw(tmp_path, **options).status == "interrupted"
    assert 100 <= tr.Checkpoints(tmp_path).steps()[-1] < N_STEPS
    assert signal.getsignal(number) is signal.SIG_DFL
    assert_same(draw(tmp_path), draw())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_in_the_middle_of_recording_and_of_saving(tmp_path, monkeypatch, compiled):
    """The steps that are done are recorded after all, once, and saved."""
    record, calls = DrawRecorder.record, []

    def interrupted(self, info):
        calls.append(len(info.position))
        if len(calls) == 2:
            self._store["values"][:] = -1.0  # something is half done
            self._store["values"][: self._kept] = torch.arange(self._kept)[:, None, None]
            raise KeyboardInterrupt
        record(self, info)

    whole = draw(compiled=compiled)
    with monkeypatch.context() as patch:
        patch.setattr(block, "LONGEST", 64)
        expected = draw(compiled=compiled)
        patch.setattr(DrawRecorder, "record", interrupted)
        part = draw(tmp_path / "a", compiled=compiled, checkpoint_every=50)
        assert part.status == "interrupted"
        assert part.n_steps == sum(calls[:2]) == tr.Checkpoints(tmp_path / "a").steps()[-1]
        assert torch.equal(part.energy, expected.energy[: part.n_draws])
        assert len(calls) == 3
    save = tr.Checkpoints.save

    def interrupted_save(self, step, *more, **options):
        if step == 100 and not calls:
            calls.append(step)
            raise KeyboardInterrupt
        return save(self, step, *more, **options)

    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(tr.Checkpoints, "save", interrupted_save)
        part = draw(tmp_path / "b", compiled=compiled, checkpoint_every=50)
    assert (part.status, part.n_steps) == ("interrupted", 100)
    assert tr.Checkpoints(tmp_path / "b").steps() == [50, 100]
    assert_same(draw(tmp_path / "b", compiled=compiled), whole)


def test_a_nan_leaves_the_checkpoint_before_it(tmp_path):
    def breaks(x):
        return torch.where(x[:, 0] > 2.5, float("nan"), -0.5 * x.square().sum(-1))

    sizes, ladder = {"dim": 1, "n_steps": 5000, "n_runs": 4}, tr.Ladder((1.0, 2.0), 0.1)
    saved = {"checkpoints": tmp_path, "checkpoint_every": 5}
    said = []
    for _ in range(2):  # from the start, and from the checkpoint
        with pytest.raises(NonFiniteEnergyError) as caught:
            tr.sample(breaks, ladder=ladder, seed=1, **sizes, **saved)
        said.append((str(caught.value), caught.value.draws.values.tolist()))
        assert 0 < tr.Checkpoints(tmp_path).steps()[-1] <= caught.value.step
    assert said[0] == said[1]


def test_collect_goes_on_after_steps_of_before(tmp_path):
    def make():
        ensemble = tr.TensorEnsemble.start(tr.Noisy(MIXTURE, tr.Gaussian(2.0)), n_rungs=2, n_runs=3)
        run = tr.DensityExchange(ensemble, tr.Ladder((1.0, 10.0), 0.03), seed=1)
        list(run.advance(70))
        return run

    kept = {"thin": 3, "burn_in": 10}
    whole, every = tr.collect(make(), 200, **kept), {"checkpoint_every": 60}
    with pytest.raises(RunInterrupted) as caught:
        tr.collect(make(), 200, **kept, **every, checkpoints=tmp_path, progress=stop_after(61))
    part = caught.value.draws
    part.settings["equipartition"] = whole.settings["equipartition"]  # of fewer draws
    assert (part.status, part.settings) == ("interrupted", whole.settings)
    run = make()
    assert_same(tr.collect(run, 200, **kept, checkpoints=tmp_path), whole)
    assert run.n_steps == 270
    fresh = tr.DensityExchange(
        tr.TensorEnsemble.start(MIXTURE, n_rungs=2, n_runs=3), tr.Ladder((1.0, 10.0), 0.03), seed=1
    )
    with pytest.raises(CheckpointError, match="is a checkpoint of another setting"):
        tr.collect(fresh, 200, **kept, checkpoints=tmp_path)
    with pytest.raises(InvalidArgumentError, match="n_steps must be a whole number"):
        tr.collect(fresh, 0)


def test_the_energies_of_the_latest_swap_test_survive_a_resume(tmp_path):
    """The checkpoint of step 10 lies between the tests of steps 7 and 14."""
    data = torch.randn(40, generator=torch.Generator().manual_seed(0))
    target = tr.TallPosterior(
        lambda x, y: -0.5 * (y - x[..., 0]).square(), lambda x: -x.square().sum(-1), (data,), 1,
        batch_size=5,
    )  # fmt: skip
    options = {"temperatures": (1.0, 2.0), "lr": 1e-3, "swap_batch": "full", "swap_interval": 7}
    complete = tr.sample(target, **options, n_steps=20)
    tr.sample(target, **options, n_steps=10, checkpoints=tmp_path)
    resumed = tr.sample(target, **options, n_steps=20, checkpoints=tmp_path)
    assert torch.equal(resumed.energy, complete.energy)
    assert len(complete.energy[:, 0, 0].unique()) == 3
