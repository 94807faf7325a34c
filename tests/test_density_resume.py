"""Checkpoints of runs on densities: stopped anywhere and resumed equals never stopped, bit for bit."""

from __future__ import annotations

import logging

import pytest
import torch

import torchrex as tr
from densities import MIXTURE, SETUPS
from torchrex.density import loop as block
from torchrex.density import run as density_run
from torchrex.density.drawing import DrawRecorder
from torchrex.errors import (
    CheckpointError,
    InvalidArgumentError,
    NonFiniteEnergyError,
    RunInterrupted,
)

NAMES = ("values", "steps", "noise_variance", "replica_at", "energy", "accepted", "proposed")
# Which draws of a setup are kept; of the setups those between which a checkpoint differs.
KEPT = {
    "the paper's": {"thin": 3},
    "sghmc, refreshed, random pairs": {"burn_in": 150, "thin": 7},
    "tall data, paired, annealed": {"burn_in": 5},
    "one rung": {},
}
N_STEPS = 400


def draw(name, folder=None, **more):
    setup = {
        "n_steps": N_STEPS,
        "n_runs": 5,
        "seed": 3,
        "compiled": False,
        **SETUPS[name],
        **KEPT[name],
        **more,
    }
    return tr.sample(setup.pop("target")(), checkpoints=folder, on_interrupt="return", **setup)


def assert_same(a, b):
    for name in NAMES:
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.n_steps, a.status, a.settings) == (b.n_steps, b.status, b.settings)


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
@pytest.mark.parametrize("compiled", [False, True])
def test_stopped_and_resumed_equals_never_stopped(tmp_path, name, compiled):
    """Every 45 steps, so that checkpoints lie in the middle of blocks of random numbers and of
    stretches.
    """
    whole = draw(name, compiled=compiled)
    assert whole.status == "finished"
    assert name == "one rung" or whole.accepted.sum() > 0
    for n in (1, 64, 200, 399):
        folder = tmp_path / str(n)
        part = draw(name, folder, compiled=compiled, checkpoint_every=45, progress=stop_after(n))
        assert part.status == "interrupted"
        assert n <= part.n_steps < N_STEPS + (n == 399)
        assert torch.equal(part.values, whole.values[:, : part.n_draws])
        assert tr.Checkpoints(folder).steps()[-1] == part.n_steps
        assert_same(draw(name, folder, compiled=compiled, checkpoint_every=45), whole)


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
            draw("the paper's", folder, compiled=compiled, checkpoint_every=90, progress=killed)
        assert tr.Checkpoints(folder).steps() == [90, 180]
        assert_same(
            draw("the paper's", folder, compiled=compiled, checkpoint_every=30),
            draw("the paper's", compiled=compiled),
        )
        assert tr.Checkpoints(folder).steps() == [390, 400]


def test_the_loop_is_chosen_by_all_steps_and_not_by_those_that_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(density_run, "STEPS_WORTH_COMPILING", 300)
    whole, eager = draw("the paper's", compiled=None), draw("the paper's", compiled=False)
    assert not torch.equal(whole.noise_variance, eager.noise_variance), (
        "the two agree to rounding only"
    )
    draw("the paper's", tmp_path, compiled=None, checkpoint_every=150, progress=stop_after(150))
    assert_same(draw("the paper's", tmp_path, compiled=None), whole)
    draw("the paper's", tmp_path / "short", compiled=None, n_steps=200)
    with pytest.raises(
        CheckpointError, match=r"compiled was False and is now True \(pass compiled=False\)\."
    ):
        draw("the paper's", tmp_path / "short", compiled=None)
    assert_same(draw("the paper's", tmp_path / "short", compiled=False), eager)


def test_what_could_not_be_compiled_goes_on_eagerly(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr("torchrex.density.loop.CompiledLoop", fails)
        draw("the paper's", tmp_path, compiled=True, checkpoint_every=100, progress=stop_after(128))
    assert_same(draw("the paper's", tmp_path, compiled=True), draw("the paper's", compiled=False))
    draw(
        "the paper's",
        tmp_path / "other",
        compiled=True,
        checkpoint_every=100,
        progress=stop_after(100),
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr("torchrex.density.loop.CompiledLoop", fails)
        assert draw("the paper's", tmp_path / "other", compiled=True).status == "finished"
    assert "is of a compiled run; it goes on eagerly" in caplog.text


def test_a_finished_run_is_read_and_a_longer_one_goes_on(tmp_path, monkeypatch):
    whole = draw("the paper's", tmp_path)
    longer = draw("the paper's", n_steps=600)

    def never(*_):
        raise AssertionError("a step was made")

    with monkeypatch.context() as patch:
        patch.setattr(density_run.DensityExchange, "stretch", never)
        assert_same(draw("the paper's", tmp_path), whole)
    assert_same(draw("the paper's", tmp_path, n_steps=600), longer)
    with pytest.raises(InvalidArgumentError, match="at step 600 already"):
        draw("the paper's", tmp_path)


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
    draw("the paper's", tmp_path, n_steps=100)
    with pytest.raises(CheckpointError, match=words):
        draw("the paper's", tmp_path, **changes)


def test_what_is_in_the_way(tmp_path):
    draw("the paper's", tmp_path, n_steps=100)
    with pytest.raises(
        CheckpointError,
        match="holds checkpoints up to step 100; resume from them, or give another folder",
    ):
        draw("the paper's", tmp_path, resume=False)
    assert_same(draw("the paper's", tmp_path / "new", resume=False), draw("the paper's"))
    for changes in (
        {"checkpoint_every": 0},
        {"checkpoint_every": 2.5},
        {"budget": 0.0},
        {"budget": -1},
    ):
        with pytest.raises(InvalidArgumentError, match=next(iter(changes))):
            draw("the paper's", tmp_path / "never", **changes)


def test_a_checkpoint_of_something_else_is_told_in_one_line(tmp_path):
    draw("the paper's", tmp_path, n_steps=100)
    checkpoints = tr.Checkpoints(tmp_path)
    found = checkpoints.load_newest()
    setting = Spy.setting_of(tmp_path)
    broken = {
        "no run": {name: value for name, value in found.state.items() if name != "run"},
        "no rows": {**found.state, "recorder": {**found.state["recorder"], "rows": {}}},
        "short": {**found.state, "recorder": {**found.state["recorder"], "n_seen": 50}},
        "shape": {**found.state, "run": {**found.state["run"], "position": torch.zeros(3)}},
        "exchange": {**found.state, "run": {**found.state["run"], "replica_at": torch.zeros(3)}},
        "streams": {
            **found.state,
            "run": {**found.state["run"], "streams": {"move": torch.zeros(3)}},
        },
    }
    for name, state in broken.items():
        tr.Checkpoints(tmp_path / name).save(100, state, setting=setting)
        with pytest.raises(CheckpointError, match="is not a checkpoint of such a run") as caught:
            draw("the paper's", tmp_path / name)
        assert "\n" not in str(caught.value)


class Spy:
    """The setting that a run wrote, as `save` was given it."""

    @staticmethod
    def setting_of(folder):
        seen = []
        save = tr.Checkpoints.save
        try:
            tr.Checkpoints.save = lambda self, step, state, *, setting, **more: seen.append(setting)
            draw("the paper's", folder.with_name("spied"), n_steps=100)
        finally:
            tr.Checkpoints.save = save
        return seen[0]


@pytest.mark.usefixtures("short_blocks")
def test_a_budget_pauses(tmp_path):
    part = draw("the paper's", tmp_path, budget=1e-9)
    assert part.status == "paused"
    assert 0 < part.n_steps < N_STEPS
    assert tr.Checkpoints(tmp_path).steps() == [part.n_steps]
    steps, status = [part.n_steps], part.status
    while status == "paused":
        part = draw("the paper's", tmp_path, budget=1e-9)
        status = part.status
        steps.append(part.n_steps)
    assert len(steps) > 3
    assert_same(part, draw("the paper's"))
    assert (
        draw("the paper's", budget=1e-9).status == "paused"
    )  # without a folder there is nothing to go on from
    assert draw("the paper's", budget=1e9).status == "finished"


@pytest.mark.parametrize("compiled", [False, True])
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

    whole = draw("the paper's", compiled=compiled)
    with monkeypatch.context() as patch:
        patch.setattr(block, "LONGEST", 64)
        expected = draw("the paper's", compiled=compiled)
        patch.setattr(DrawRecorder, "record", interrupted)
        part = draw("the paper's", tmp_path / "a", compiled=compiled, checkpoint_every=50)
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
        part = draw("the paper's", tmp_path / "b", compiled=compiled, checkpoint_every=50)
    assert (part.status, part.n_steps, tr.Checkpoints(tmp_path / "b").steps()) == (
        "interrupted",
        100,
        [50, 100],
    )
    assert_same(draw("the paper's", tmp_path / "b", compiled=compiled), whole)


def test_a_nan_leaves_the_checkpoint_before_it(tmp_path):
    def breaks(x):
        return torch.where(x[:, 0] > 2.5, float("nan"), -0.5 * x.square().sum(-1))

    settings = {
        "dim": 1,
        "temperatures": (1.0, 2.0),
        "lr": 0.1,
        "n_steps": 5000,
        "n_runs": 4,
        "seed": 1,
    }
    said = []
    for _ in range(2):  # from the start, and from the checkpoint
        with pytest.raises(NonFiniteEnergyError) as caught:
            tr.sample(breaks, checkpoints=tmp_path, checkpoint_every=5, **settings)
        said.append((str(caught.value), caught.value.draws.values.tolist()))
        assert 0 < tr.Checkpoints(tmp_path).steps()[-1] <= caught.value.step
    assert said[0] == said[1]


def test_collect_goes_on_after_steps_of_before(tmp_path):
    def make():
        ensemble = tr.TensorEnsemble.start(tr.Noisy(MIXTURE, tr.Gaussian(2.0)), n_rungs=2, n_runs=3)
        run = tr.DensityExchange(ensemble, tr.Ladder((1.0, 10.0), 0.03), seed=1)
        list(run.advance(70))
        return run

    whole = tr.collect(make(), 200, thin=3, burn_in=10)
    with pytest.raises(RunInterrupted) as caught:
        tr.collect(
            make(),
            200,
            thin=3,
            burn_in=10,
            checkpoints=tmp_path,
            checkpoint_every=60,
            progress=stop_after(61),
        )
    part = caught.value.draws
    assert (part.status, part.settings) == ("interrupted", whole.settings)
    run = make()
    assert_same(tr.collect(run, 200, thin=3, burn_in=10, checkpoints=tmp_path), whole)
    assert run.n_steps == 270
    fresh = tr.DensityExchange(
        tr.TensorEnsemble.start(MIXTURE, n_rungs=2, n_runs=3), tr.Ladder((1.0, 10.0), 0.03), seed=1
    )
    with pytest.raises(CheckpointError, match="is a checkpoint of another setting"):
        tr.collect(fresh, 200, thin=3, burn_in=10, checkpoints=tmp_path)
    with pytest.raises(InvalidArgumentError, match="n_steps must be a whole number"):
        tr.collect(fresh, 0)


def test_seconds_are_those_of_all_calls(tmp_path):
    draw("the paper's", tmp_path, n_steps=100)
    first = tr.Checkpoints(tmp_path).load_newest().state["seconds"]
    draw("the paper's", tmp_path, n_steps=200)
    assert tr.Checkpoints(tmp_path).load_newest().state["seconds"] > first > 0
