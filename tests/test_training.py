"""Nothing is lost: killed, interrupted, paused or damaged, a run ends bit for bit as if nothing had
happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchrex as tr
from modules import batches, classes, make_run
from torchrex import processes
from torchrex.errors import (
    CheckpointError,
    InvalidArgumentError,
    NonFiniteEnergyError,
    RunFolderError,
    RunInterrupted,
)
from torchrex.experiments import RunFolder, get_recipe, run_recipe
from torchrex.processes import stopping_signals, terminating
from torchrex.runs.config import override

SETTINGS = ["epochs=24", "burn_in_epochs=4", "checkpoint_every=37"]


def small(*more):
    return override(get_recipe("digits/resghmc"), [*SETTINGS, *more])


def digits_run(out, **options):
    return run_recipe(small(), 0, Path(out), device="cpu", **options)


def checkpoints_of(folder):
    return tr.Checkpoints(folder.path / "checkpoints")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The run that nothing happened to."""
    return digits_run(tmp_path_factory.mktemp("untouched"))


def assert_same_run(folder, other):
    """The final checkpoint, the trace and the result, bit for bit."""
    mine, theirs = (checkpoints_of(each).load_newest() for each in (folder, other))
    assert mine.step == theirs.step == small().n_steps
    for (path, left), (_, right) in zip(leaves(mine.state), leaves(theirs.state), strict=True):
        is_tensor = isinstance(left, torch.Tensor)
        same = torch.equal(left, right) if is_tensor else left == right
        assert same or path.endswith("seconds"), path
    a, b = folder.trace(), other.trace()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    for key in ("metrics", "swaps", "status"):
        assert folder.result[key] == other.result[key]


def leaves(tree, path=""):
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key], f"{path}/{key}")]
    if isinstance(tree, list):
        return [leaf for k, item in enumerate(tree) for leaf in leaves(item, f"{path}/{k}")]
    return [(path, tree)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_write_a_checkpoint_and_exit(tmp_path, number, code):
    command = [sys.executable, "-m", "torchrex", "run", "digits/resghmc", "--device", "cpu"]
    command += ["--out", str(tmp_path), *(f"--set={setting}" for setting in SETTINGS[1:])]
    process = subprocess.Popen([*command, "--set=epochs=2400"], stderr=subprocess.PIPE, text=True)
    folder = RunFolder.of(tmp_path, "digits/resghmc", 0)
    deadline = time.monotonic() + 120
    while not checkpoints_of(folder).steps() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert "interrupted" in errors
    assert "--resume" in errors
    assert folder.result["status"] == "interrupted"
    assert checkpoints_of(folder).steps()[-1] > 0
    for more, words in (
        (["--set=epochs=2400"], "--resume"),
        (["--set=epochs=24", "--resume"], "epochs 2400 there, 24 here"),
    ):
        again = subprocess.run([*command, *more], capture_output=True, text=True, timeout=120)
        assert again.returncode == 2
        assert words in " ".join(again.stderr.split())


@pytest.mark.slow
def test_a_budget_pauses_and_the_next_call_goes_on(tmp_path, untouched):
    folder = digits_run(tmp_path, budget=0.0)
    assert folder.result["status"] == "paused"
    calls = 0
    while not folder.finished:
        digits_run(tmp_path, resume=True, budget=0.1)
        calls += 1
    assert calls > 1
    assert_same_run(folder, untouched)
    before = folder.result
    assert digits_run(tmp_path, resume=True).result == before  # a finished run is left alone


@pytest.mark.slow
def test_overwriting_keeps_the_finished_run_until_the_new_one_is_finished(tmp_path, monkeypatch):
    folder = digits_run(tmp_path)
    before = folder.result
    with pytest.raises(RunFolderError, match="already holds"):
        digits_run(tmp_path)
    new, longer = folder.path.with_name("seed=0.new"), (small("epochs=30"), 0, tmp_path)

    def no_data():
        raise RunFolderError("no digits today")

    with monkeypatch.context() as patch:
        patch.setattr("torchrex.experiments.digits.digits", no_data)
        with pytest.raises(RunFolderError, match="no digits"):
            run_recipe(*longer, device="cpu", overwrite=True)
    assert folder.result == before
    assert not new.exists()
    run_recipe(*longer, device="cpu", overwrite=True, budget=0.0)
    assert folder.finished
    assert json.loads((new / "result.json").read_text())["status"] == "paused"
    run_recipe(*longer, device="cpu", resume=True)
    assert not new.exists()
    assert folder.result["steps_done"] > before["steps_done"]


# The library


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


def parts(ladder=(1.0, 1.1), store=None, lr=1e-4, prior=1.0, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 4, generator=generator)
    y = torch.randint(3, (90,), generator=generator)
    energy = tr.PosteriorEnergy(F.cross_entropy, n_data=90, prior=tr.GaussianPrior(prior))
    ensemble = tr.ModuleEnsemble(network, energy, tr.SGHMC(0.1))
    run = tr.ModuleExchange(ensemble, tr.Ladder(ladder, lr), seed=2, **options)
    average = tr.PosteriorAverage([(x, y)], every=7, burn_in=10, rungs=(0, 1), store=store)
    return run, tr.DeviceLoader((x, y), 16, seed=4), average, tr.Trace(every=3)


def go(folder, n_steps, store=None, made=None, **options):
    run, loader, average, trace = made or parts(store=store)
    records = {"average": average, "trace": trace, "checkpoints": folder, "checkpoint_every": 20}
    outcome = tr.train(run, loader, n_steps, **{**records, **options})
    return run, average, trace, outcome


def test_train_resumes_averages_traces_and_stored_draws(tmp_path):
    options = {"capacity": 5, "keep": "reservoir"}
    whole = go(tmp_path / "whole", 100, tr.DrawStore(tmp_path / "a", **options))
    store = tr.DrawStore(tmp_path / "b", **options)
    for stop in (13, 50, 51, 100):
        last = go(tmp_path / "parts", stop, store)
        store = tr.DrawStore.load(tmp_path / "b")
    assert torch.equal(whole[0].ensemble.position, last[0].ensemble.position)
    assert torch.equal(whole[1].probabilities(), last[1].probabilities())
    assert whole[1].n_draws == last[1].n_draws == 12
    a, b = whole[2].tensors(), last[2].tensors()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert a["steps"].tolist() == list(range(0, 100, 3))
    assert tr.DrawStore.load(tmp_path / "a").draws == store.draws


def test_where_it_looks_does_not_matter(monkeypatch):
    runs = []
    for seconds in (0.0, 1e9):
        monkeypatch.setattr("torchrex.network.training.SECONDS_BETWEEN_LOOKS", seconds)
        runs.append(go(None, 100)[0])
    assert torch.equal(runs[0].ensemble.position, runs[1].ensemble.position)


IMPOSSIBLE = {
    "seconds": (["seconds"], -1e300),
    "the step": (["run", "n_steps"], -1),
    "the number of draws": (["averages", 0, "n_draws"], 10**15),
    "the last draw": (["averages", 0, "last_step"], 10**9),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_sealed_checkpoint_with_impossible_numbers_is_refused_by_its_name(tmp_path, what):
    go(tmp_path, 40)
    newest = max(tmp_path.glob("step=*"))
    manifest = json.loads((newest / "manifest.json").read_text())
    (*way, last), value = IMPOSSIBLE[what]
    node = manifest["state"]["dict"]
    for key in way:
        node = node[key]
        node = node.get("dict", node) if isinstance(node, dict) else node
    assert last in node
    node[last] = value
    data = json.dumps(manifest).encode()
    (newest / "manifest.json").write_bytes(data)
    (newest / "DONE").write_text(hashlib.sha256(data).hexdigest() + "\n")
    with pytest.raises(CheckpointError, match=f"{newest.name} is not a checkpoint of such a run"):
        go(tmp_path, 80)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    """Down to the last digit, which no repr shows."""
    go(tmp_path, 40)
    for what, other in (
        ("ladder.temperatures.1", {"ladder": (1.0, 1.2)}),
        ("ladder.lrs.0", {"lr": 1.0000001e-4}),
        ("energy.prior.precision", {"prior": 1.0000001}),
        ("momentum", {"momentum": "keep"}),
    ):
        with pytest.raises(CheckpointError, match=rf"another setting: {what} was .* and is now "):
            go(tmp_path, 80, made=parts(**other))


def test_a_checkpoint_with_other_averages_traces_or_batches_is_refused(tmp_path):
    go(tmp_path, 20)
    x = torch.randn(90, 4)
    for more, words in (
        ({"average": ()}, "1 average and a trace, but this call has no average"),
        ({"trace": None}, "this call has 1 average and no trace"),
        ({"average": tr.PosteriorAverage([(x, x)], every=4)}, rf"{tmp_path}.*every.*another fold"),
    ):
        with pytest.raises(CheckpointError, match=words):
            go(tmp_path, 40, **more)
    run, _, average, trace = parts()
    loader = tr.DeviceLoader((x, torch.randint(3, (90,))), 4, seed=4)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*batch_size=16.*batch_size=4"):
        go(tmp_path, 40, made=(run, loader, average, trace))


def test_a_run_that_begins_anew_is_the_newest_in_its_folder(tmp_path):
    go(tmp_path, 60)
    with pytest.raises(CheckpointError, match="checkpoints up to step 60"):
        go(tmp_path, 30, resume=False)
    with pytest.raises(InvalidArgumentError, match="step 60, beyond n_steps=30"):
        go(tmp_path, 30)


def test_draws_of_another_run_are_not_thrown_away(tmp_path):
    go(tmp_path / "a", 60, tr.DrawStore(tmp_path / "draws", capacity=50))
    with pytest.raises(CheckpointError, match="holds draws of another run"):
        go(tmp_path / "b", 60, tr.DrawStore.load(tmp_path / "draws"))
    assert len(tr.DrawStore.load(tmp_path / "draws")) == 14


def test_stored_draws_follow_to_the_older_checkpoint(tmp_path):
    """Draws that were replaced since the older checkpoint are still there."""
    whole = go(tmp_path / "whole", 100, tr.DrawStore(tmp_path / "a", capacity=3))
    go(tmp_path / "run", 95, tr.DrawStore(tmp_path / "b", capacity=3))
    file = tmp_path / "run" / "step=000000095" / "shared.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    last = go(tmp_path / "run", 100, tr.DrawStore.load(tmp_path / "b"))
    assert torch.equal(whole[0].ensemble.position, last[0].ensemble.position)
    a, b = (tr.DrawStore.load(tmp_path / name) for name in "ab")
    assert a.draws == b.draws
    for (_, _, left), (_, _, right) in zip(a, b, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


# Divergence


def test_divergence_names_the_last_checkpoint(tmp_path):
    made = parts()
    go(tmp_path, 45, made=made)
    made[0].ensemble.position[0].fill_(float("nan"))
    words = r"replica 0 on rung .* at step 45 .*step=000000045"
    with pytest.raises(NonFiniteEnergyError, match=words):
        go(tmp_path, 90, made=made, resume=False)
    assert tr.Checkpoints(tmp_path).steps()[-1] == 45


def test_a_last_move_that_is_not_finite_is_not_called_finished(tmp_path):
    made = parts()
    run = made[0]
    update = run._network.functions.update

    def last_one_fails(position, *rest):
        update(position, *rest)
        if run.n_steps == 29:
            position[1].fill_(float("inf"))

    functions = run._network.functions._replace(update=last_one_fails)
    run._network = dataclasses.replace(run._network, functions=functions)
    words = r"replica 1 on rung . .* at step 30 .*step=000000020"
    with pytest.raises(NonFiniteEnergyError, match=words):
        go(tmp_path, 30, made=made)
    assert tr.Checkpoints(tmp_path).steps() == [0, 20]


# Data


class Remembering(list):
    """A list of batches with a position, begun where it was restored."""

    position = begun = 0

    def __iter__(self):
        self.begun += 1
        for k in range(self.position, len(self)):
            self.position = k + 1
            yield self[k]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_plain_batches_go_on_within_an_epoch_and_resume_with_a_new_one(tmp_path, caplog):
    run, seen = make_run(), []

    class Counting(list):
        def __iter__(self):
            for k, batch in enumerate(list.__iter__(self)):
                seen.append(k)
                yield batch

    data = Counting(batches(3))
    tr.train(run, data, 4, checkpoints=tmp_path)
    tr.train(run, data, 7, checkpoints=tmp_path, resume=False)
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    tr.train(make_run(), data, 8, checkpoints=tmp_path)
    assert "new epoch" in caplog.text


def test_leaving_advance_early_does_not_begin_the_data_anew():
    run, data = make_run(), Remembering(batches(300, size=1))
    for _ in run.advance(280, data):
        break
    assert data.position == 256
    list(run.advance(2, data))
    assert data.position == 258
    assert data.begun == 1


# Signals


SIGNALS = [
    (signal.SIGINT, RunInterrupted, None),
    (signal.SIGTERM, SystemExit, 143),
    (signal.SIGHUP, SystemExit, 129),
]


@pytest.mark.parametrize(("number", "kind", "code"), SIGNALS)
@pytest.mark.parametrize("at", [7, 20])
def test_a_signal_ends_a_loop_over_seeds(tmp_path, number, kind, code, at):
    """After the checkpoint, even the last. The mutant returns, and the next seed begins."""
    begun, stopped = [], []

    def signalled(done, total):
        if done >= at and not stopped:
            stopped.append(done)
            signal.raise_signal(number)

    def all_seeds():
        for seed in range(3):
            begun.append(seed)
            folder = tmp_path / str(seed)
            tr.train(make_run(seed=seed), batches(7), 20, checkpoints=folder, progress=signalled)

    with pytest.raises(kind) as caught:
        all_seeds()
    assert begun == [0]
    assert tr.Checkpoints(tmp_path / "0").steps()[-1] == stopped[0]
    assert getattr(caught.value, "code", None) == code
    assert isinstance(caught.value, KeyboardInterrupt) == (number == signal.SIGINT)
    if number == signal.SIGINT:
        outcome = caught.value.outcome
        assert (outcome.total_steps, outcome.signal) == (stopped[0], number)
    stopped.clear()
    more = {"progress": signalled, "on_interrupt": "return"}
    outcome = tr.train(make_run(), batches(7), 20, **more)
    assert (outcome.status, outcome.signal, outcome.steps) == ("interrupted", number, stopped[0])


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_signals() as noted, terminating() as received:
            signal.raise_signal(signal.SIGHUP)
        assert noted == received == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_under_torchrun_only_the_first_signal_counts(monkeypatch, under_torchrun):
    """Slurm sends SIGTERM to every process of a job, and torchrun sends its own a moment later."""
    monkeypatch.setattr(processes, "_is_stopping", False)
    monkeypatch.delenv(processes.UNDER_TORCHRUN, raising=False)
    if under_torchrun:
        monkeypatch.setenv(processes.UNDER_TORCHRUN, "a")
    before, later = signal.signal(signal.SIGTERM, signal.SIG_DFL), []
    try:
        with terminating() as received, stopping_signals() as noted:
            signal.raise_signal(signal.SIGTERM)
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            assert noted[0] == signal.SIGTERM
            assert received == ([] if under_torchrun else [signal.SIGTERM])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with stopping_signals() as noted:
            noted.append(signal.SIGTERM)  # it came to another rank
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_IGN) == under_torchrun
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with terminating(), contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
            later.append("goes on")
        assert bool(later) == under_torchrun
        # Results are written after the last block of this kind.
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_IGN) == under_torchrun
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_outside_the_main_thread_are_left_alone():
    before, caught = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: caught.append(stopping_signals().__enter__()))
    thread.start()
    thread.join()
    assert caught == [[]]
    assert signal.getsignal(signal.SIGINT) is before


# Outcome, trace, arguments


def test_steps_and_seconds_of_this_call_and_of_all(tmp_path):
    """The mutant gives the seconds of all calls with the steps of this one."""
    loader = tr.DeviceLoader(classes(), 8, seed=1)

    def train(n_steps):
        began = time.monotonic()
        outcome = tr.train(make_run(), loader, n_steps, checkpoints=tmp_path)
        return outcome, time.monotonic() - began

    first, _ = train(400)
    second, took = train(410)
    assert (first.steps, first.total_steps) == (400, 400)
    assert (second.steps, second.total_steps) == (10, 410)
    assert first.seconds == first.total_seconds
    assert 0 < second.seconds <= took
    assert second.total_seconds >= first.seconds + second.seconds - 1e-9


def test_progress_and_bad_arguments():
    run, loader, _, _ = parts()
    assert tr.train(run, loader, 3, progress=True).status == "finished"
    seen = []
    tr.train(run, loader, 6, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)
    for words, bad in (
        ("whole number", {"n_steps": 9, "checkpoint_every": 0}),
        ("on_interrupt", {"n_steps": 9, "on_interrupt": "ignore"}),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            tr.train(run, loader, **bad)
    with pytest.raises(InvalidArgumentError, match="one tuple of tensors"):
        tr.train(run, (torch.randn(4, 4), torch.randn(4)), 9)


# Pairs without swaps


def two_classes(n):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    energy = tr.PosteriorEnergy(F.cross_entropy, n_data=n, prior=tr.GaussianPrior(1.0))
    return energy, tr.DeviceLoader((x, (x.sum(1) > 0).long()), 10)


@pytest.mark.parametrize("traced", [False, True])
def test_a_pair_that_never_swaps_is_named(caplog, traced):
    """Own minibatches give noisy differences; the tests of an earlier call count too."""
    energy, loader = two_classes(200)

    def warnings_on(*temperatures, **options):
        caplog.clear()
        ensemble = tr.ModuleEnsemble(lambda: nn.Linear(3, 2), energy, shared_batches=False)
        trace = tr.Trace() if traced else None
        noise = tr.KnownVariance(500.0)
        run = tr.ModuleExchange(ensemble, tr.Ladder(temperatures, 1e-5), noise=noise, **options)
        for n_steps in (30, 60):
            tr.train(run, loader, n_steps=n_steps, trace=trace)
        return [record.getMessage() for record in caplog.records]

    *_, said = warnings_on(0.5, 1.0)
    assert "rungs 0 and 1 (s = 31.6)" in said
    assert "no swap in 60 tests" in said
    assert not warnings_on(1.0, 1.001)
    assert not warnings_on(0.5, 1.0, pairing=tr.NoSwaps())


def test_a_dead_pair_that_swapped_once_because_replicas_start_alike(caplog):
    energy, loader = two_classes(1000)
    ensemble = tr.ModuleEnsemble(nn.Linear(3, 2), energy)
    tr.train(tr.ModuleExchange(ensemble, tr.Ladder((1.0, 1e5), 1e-4)), loader, n_steps=400)
    said = [record.getMessage() for record in caplog.records]
    (about_pair,) = [words for words in said if "rungs 0 and 1" in words]
    assert about_pair.startswith("1 swap in 400 tests")


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path, untouched):
    """SIGKILL, from before the first checkpoint to the last steps; other moments at every test."""
    context = multiprocessing.get_context("forkserver")
    modules = ["torchrex.experiments.digits", "sklearn.datasets", "torchrex.cli"]
    context.set_forkserver_preload(modules)
    folder = RunFolder.of(tmp_path, small().recipe, 0)
    began = time.perf_counter()
    warm = context.Process(target=resumed_in_a_process, args=(tmp_path / "warm",))
    warm.start()
    warm.join()
    assert warm.exitcode == 0
    typical = time.perf_counter() - began
    kills, lives = 0, 0
    while kills < 20:
        process = context.Process(target=resumed_in_a_process, args=(tmp_path,))
        process.start()
        lives += 1
        process.join(random.uniform(0.02, typical / 4))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        elif process.exitcode == 0:  # it finished: begin again in another folder
            assert_same_run(folder, untouched)
            folder.path.rename(tmp_path / f"finished{lives}")
        assert process.exitcode in (0, -signal.SIGKILL)
    assert_same_run(digits_run(tmp_path, resume=True), untouched)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, untouched, caplog):
    folder = digits_run(tmp_path, budget=0.15)
    while folder.result["status"] == "paused" and len(checkpoints_of(folder).steps()) < 2:
        digits_run(tmp_path, resume=True, budget=0.15)
    newest = sorted((folder.path / "checkpoints").iterdir())[-1]
    file = newest / "replica=1.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        digits_run(tmp_path, resume=True)
    (record,) = [each for each in caplog.records if "damaged" in each.message]
    assert newest.name in record.getMessage()
    assert_same_run(folder, untouched)


def test_going_back_in_the_same_process_is_exact_with_the_same_objects(tmp_path):
    run, data = make_run(), Remembering(batches(6))
    tr.train(run, data, 8, checkpoints=tmp_path)
    tr.train(run, data, 15, checkpoints=None)
    there = run.ensemble.position.clone()
    tr.train(run, data, 15, checkpoints=tmp_path)  # back to step 8, and on
    assert torch.equal(run.ensemble.position, there)


def resumed_in_a_process(out):
    digits_run(out, resume=True)
