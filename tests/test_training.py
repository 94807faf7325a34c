"""Nothing is lost: killed, interrupted, paused or damaged, a run ends bit for bit as if nothing had
happened.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchrex
from modules import batches, classes, make_run
from torchrex.errors import (
    CheckpointError,
    InvalidArgumentError,
    NonFiniteEnergyError,
    RunFolderError,
    RunInterrupted,
)
from torchrex.experiments import get_recipe, run_recipe
from torchrex.experiments.config import override
from torchrex.network.training import stopping_signals

SETTINGS = ["epochs=24", "burn_in_epochs=4", "checkpoint_every=37"]
TORCHREX = [sys.executable, "-m", "torchrex"]


def small(recipe="digits/resghmc", *more):
    return override(get_recipe(recipe), [*SETTINGS, *more])


def digits_run(out, resume):
    run_recipe(small(), 0, Path(out), device="cpu", resume=resume)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The run that nothing happened to."""
    out = tmp_path_factory.mktemp("untouched")
    return run_recipe(small(), 0, out, device="cpu")


def assert_same_run(folder, other):
    """Weights, momenta, averages and generators of the final checkpoint, the trace and the result,
    bit for bit.
    """
    mine, theirs = (
        torchrex.Checkpoints(f.path / "checkpoints").load_newest() for f in (folder, other)
    )
    assert mine.step == theirs.step == small().n_steps
    for (path, left), (_, right) in zip(leaves(mine.state), leaves(theirs.state), strict=True):
        assert (
            torch.equal(left, right)
            if isinstance(left, torch.Tensor)
            else left == right or path.endswith("seconds")
        ), path
    a, b = folder.trace(), other.trace()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert {k: folder.result[k] for k in ("metrics", "swaps", "status")} == {
        k: other.result[k] for k in ("metrics", "swaps", "status")
    }


def leaves(tree, path=""):
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key], f"{path}/{key}")]
    if isinstance(tree, list):
        return [leaf for k, item in enumerate(tree) for leaf in leaves(item, f"{path}/{k}")]
    return [(path, tree)]


def test_killed_at_twenty_random_moments(tmp_path, untouched):
    """SIGKILL, at moments from before the first checkpoint to the last steps; the dice are thrown
    anew at every test run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torchrex.experiments.digits", "sklearn.datasets", "torchrex.cli"]
    )
    folder = untouched.__class__.of(tmp_path, small().recipe, 0)
    began = time.perf_counter()
    warm = context.Process(target=digits_run, args=(str(tmp_path / "warm"), False))
    warm.start()
    warm.join()
    assert warm.exitcode == 0
    typical = time.perf_counter() - began
    kills, lives = 0, 0
    while kills < 20:
        process = context.Process(target=digits_run, args=(str(tmp_path), True))
        process.start()
        lives += 1
        process.join(random.uniform(0.02, typical / 4))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        elif process.exitcode == 0:  # it got to the end: begin again in another place
            assert_same_run(folder, untouched)
            folder.path.rename(tmp_path / f"finished{lives}")
        assert process.exitcode in (0, -signal.SIGKILL)
    digits_run(str(tmp_path), True)
    assert_same_run(folder, untouched)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_write_a_checkpoint_and_exit(tmp_path, untouched, number, code):
    arguments = [*TORCHREX, "run", "digits/resghmc", "--out", str(tmp_path), "--device", "cpu"]
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    long = [
        part.replace("epochs=24", "epochs=2400") if part == "epochs=24" else part
        for part in settings
    ]
    process = subprocess.Popen([*arguments, *long], stderr=subprocess.PIPE, text=True)
    folder = untouched.__class__.of(tmp_path, "digits/resghmc", 0)
    deadline = time.monotonic() + 60
    while (
        not torchrex.Checkpoints(folder.path / "checkpoints").steps()
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "interrupted" in errors
    assert "--resume" in errors
    assert folder.result["status"] == "interrupted"
    step = torchrex.Checkpoints(folder.path / "checkpoints").steps()[-1]
    assert step > 0
    again = subprocess.run([*arguments, *long], capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    other = subprocess.run(
        [*arguments, *settings, "--resume"], capture_output=True, text=True, timeout=60
    )
    assert other.returncode == 2
    assert "epochs 2400 there, 24 here" in " ".join(other.stderr.split())


def test_a_budget_pauses_and_the_next_call_goes_on(tmp_path, untouched):
    folder = run_recipe(small(), 0, tmp_path, device="cpu", budget=0.0)
    assert folder.result["status"] == "paused"
    calls = 0
    while not folder.finished:
        run_recipe(small(), 0, tmp_path, device="cpu", resume=True, budget=0.1)
        calls += 1
    assert calls > 1
    assert_same_run(folder, untouched)


@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    tmp_path, untouched, harm, caplog
):
    folder = run_recipe(small(), 0, tmp_path, device="cpu", budget=0.15)
    while (
        folder.result["status"] == "paused"
        and len(torchrex.Checkpoints(folder.path / "checkpoints").steps()) < 2
    ):
        run_recipe(small(), 0, tmp_path, device="cpu", resume=True, budget=0.15)
    newest = sorted((folder.path / "checkpoints").iterdir())[-1]
    file = newest / "replica=1.safetensors"
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 1
    else:
        del data[len(data) // 2 :]
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        run_recipe(small(), 0, tmp_path, device="cpu", resume=True)
    (record,) = [each for each in caplog.records if "damaged" in each.message]
    assert newest.name in record.getMessage()
    assert_same_run(folder, untouched)


def test_resuming_a_finished_run_does_nothing(untouched):
    before = untouched.result
    assert (
        run_recipe(small(), 0, untouched.path.parents[2], device="cpu", resume=True).result
        == before
    )


def test_overwriting_keeps_the_finished_run_until_the_new_one_is_finished(tmp_path, untouched):
    folder = run_recipe(small(), 0, tmp_path, device="cpu")
    before = folder.result["steps_done"]
    with pytest.raises(RunFolderError, match="already holds"):
        run_recipe(small(), 0, tmp_path, device="cpu")
    run_recipe(
        small("digits/resghmc", "epochs=30"), 0, tmp_path, device="cpu", overwrite=True, budget=0.0
    )
    new = folder.path.with_name("seed=0.new")
    assert folder.finished
    assert json.loads((new / "result.json").read_text())["status"] == "paused"
    run_recipe(small("digits/resghmc", "epochs=30"), 0, tmp_path, device="cpu", resume=True)
    assert not new.exists()
    assert folder.result["steps_done"] > before


# The library


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


def parts(ladder=(1.0, 1.1), store=None, lr=1e-4, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 4, generator=generator)
    y = torch.randint(3, (90,), generator=generator)
    energy = torchrex.PosteriorEnergy(F.cross_entropy, n_data=90, prior=torchrex.GaussianPrior(1.0))
    run = torchrex.ModuleExchange(
        torchrex.ModuleEnsemble(network, energy, torchrex.SGHMC(0.1)),
        torchrex.Ladder(ladder, lr),
        seed=2,
        **options,
    )
    average = torchrex.PosteriorAverage([(x, y)], every=7, burn_in=10, rungs=(0, 1), store=store)
    return run, torchrex.DeviceLoader((x, y), 16, seed=4), average, torchrex.Trace(every=3)


def go(folder, n_steps, store=None, **options):
    run, loader, average, trace = parts(store=store)
    outcome = torchrex.train(
        run,
        loader,
        n_steps,
        average=average,
        trace=trace,
        checkpoints=folder,
        checkpoint_every=20,
        **options,
    )
    return run, average, trace, outcome


def test_train_resumes_averages_traces_and_stored_draws(tmp_path):
    whole = go(
        tmp_path / "whole", 100, torchrex.DrawStore(tmp_path / "a", capacity=5, keep="reservoir")
    )
    stores = [torchrex.DrawStore(tmp_path / "b", capacity=5, keep="reservoir")]
    for stop in (13, 50, 51, 100):
        last = go(tmp_path / "parts", stop, stores[-1])
        stores.append(torchrex.DrawStore.load(tmp_path / "b"))
    assert torch.equal(whole[0].ensemble.position, last[0].ensemble.position)
    assert torch.equal(whole[1].probabilities(), last[1].probabilities())
    assert whole[1].n_draws == last[1].n_draws == 12
    a, b = whole[2].tensors(), last[2].tensors()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert a["steps"].tolist() == list(range(0, 100, 3))
    assert torchrex.DrawStore.load(tmp_path / "a").draws == stores[-1].draws


def test_where_it_looks_does_not_matter(tmp_path, monkeypatch):
    runs = []
    for seconds in (0.0, 1e9):
        monkeypatch.setattr("torchrex.network.training.SECONDS_BETWEEN_LOOKS", seconds)
        runs.append(go(None, 300)[0])
    assert torch.equal(runs[0].ensemble.position, runs[1].ensemble.position)


def test_a_checkpoint_of_another_ladder_or_seed_is_refused(tmp_path):
    go(tmp_path, 40)
    for what, ladder, other in (
        ("ladder", (1.0, 1.2), {}),
        ("ladder", (1.0, 1.1), {"lr": 2e-4}),
        ("momentum", (1.0, 1.1), {"momentum": "keep"}),
    ):
        run, loader, average, trace = parts(ladder, **other)
        with pytest.raises(CheckpointError, match=rf"another setting: {what}.* was .* and is now "):
            torchrex.train(run, loader, 80, average=average, trace=trace, checkpoints=tmp_path)


def test_divergence_names_the_last_checkpoint(tmp_path):
    run, loader, average, trace = parts()
    torchrex.train(
        run, loader, 40, average=average, trace=trace, checkpoints=tmp_path, checkpoint_every=20
    )
    run, loader, average, trace = parts()
    torchrex.train(
        run, loader, 45, average=average, trace=trace, checkpoints=tmp_path, checkpoint_every=20
    )
    run.ensemble.position[0].fill_(float("nan"))
    with pytest.raises(
        NonFiniteEnergyError, match=r"replica 0 on rung .* at step 45 .*step=000000045"
    ):
        torchrex.train(
            run,
            loader,
            90,
            average=average,
            trace=trace,
            checkpoints=tmp_path,
            checkpoint_every=20,
            resume=False,
        )
    assert torchrex.Checkpoints(tmp_path).steps()[-1] == 45


def test_a_pickle_in_a_checkpoint_is_refused(tmp_path):
    go(tmp_path, 20)
    marker = tmp_path / "executed"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (marker,))

    for step in torchrex.Checkpoints(tmp_path).steps():
        torch.save(Trap(), tmp_path / f"step={step:09d}" / "replica=0.safetensors")
    with pytest.raises(CheckpointError):
        go(tmp_path, 40)
    assert not marker.exists()


def test_plain_batches_go_on_within_an_epoch_and_resume_with_a_new_one(tmp_path, caplog):
    run, _, _, _ = parts()
    x, y = torch.randn(90, 4), torch.randint(3, (90,))
    batches = [(x[k : k + 30], y[k : k + 30]) for k in (0, 30, 60)]
    seen = []

    class Counting(list):
        def __iter__(self):
            for k, batch in enumerate(list.__iter__(self)):
                seen.append(k)
                yield batch

    data = Counting(batches)
    torchrex.train(run, data, 4, checkpoints=tmp_path)
    torchrex.train(run, data, 7, checkpoints=tmp_path, resume=False)
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    again, _, _, _ = parts()
    torchrex.train(again, data, 8, checkpoints=tmp_path)
    assert "new epoch" in caplog.text


SIGNALS = [(signal.SIGINT, RunInterrupted, None), (signal.SIGTERM, SystemExit, 143)]


@pytest.mark.parametrize(("number", "kind", "code"), SIGNALS)
@pytest.mark.parametrize("at", [7, 20])
def test_a_signal_ends_a_loop_over_seeds(tmp_path, number, kind, code, at):
    """After the checkpoint, even if that is the last one. The mutant returns, and the next seed
    begins.
    """

    begun, stopped = [], []

    def signalled(done, total):
        if done >= at and not stopped:
            stopped.append(done)
            signal.raise_signal(number)

    def all_seeds():
        for seed in range(3):
            begun.append(seed)
            run = make_run(seed=seed)
            torchrex.train(
                run, batches(7), 20, checkpoints=tmp_path / str(seed), progress=signalled
            )

    with pytest.raises(kind) as caught:
        all_seeds()
    assert begun == [0]
    assert torchrex.Checkpoints(tmp_path / "0").steps()[-1] == stopped[0]
    assert getattr(caught.value, "code", None) == code
    assert isinstance(caught.value, KeyboardInterrupt) == (number == signal.SIGINT)
    if number == signal.SIGINT:
        assert (caught.value.outcome.total_steps, caught.value.outcome.signal) == (
            stopped[0],
            number,
        )


@pytest.mark.parametrize(("number", "kind", "code"), SIGNALS)
def test_a_signal_may_return_how_far_it_came(tmp_path, number, kind, code):
    run = make_run()
    outcome = torchrex.train(
        run,
        batches(7),
        20,
        progress=lambda done, total: done == 1 and signal.raise_signal(number),
        on_interrupt="return",
    )
    assert (outcome.status, outcome.signal, outcome.steps) == ("interrupted", number, 1)
    with pytest.raises(InvalidArgumentError, match="on_interrupt must be raise or return"):
        torchrex.train(run, batches(7), 20, on_interrupt="ignore")


def test_steps_and_seconds_of_this_call_and_of_all(tmp_path):
    """The mutant gives the seconds of all calls beside the steps of this one."""
    loader = torchrex.DeviceLoader(classes(), 8, seed=1)

    def go(n_steps):
        began = time.monotonic()
        outcome = torchrex.train(make_run(), loader, n_steps, checkpoints=tmp_path)
        return outcome, time.monotonic() - began

    first, _ = go(400)
    second, took = go(410)
    assert (first.steps, first.total_steps) == (400, 400)
    assert (second.steps, second.total_steps) == (10, 410)
    assert first.seconds == first.total_seconds
    assert 0 < second.seconds <= took
    assert second.total_seconds >= first.seconds + second.seconds - 1e-9


@pytest.mark.parametrize(
    ("n_averages", "trace", "words"),
    [
        (0, True, "1 average and a trace, but this call has no average and a trace"),
        (1, False, "this call has 1 average and no trace"),
    ],
)
def test_a_checkpoint_with_other_averages_or_traces_says_which(tmp_path, n_averages, trace, words):
    go(tmp_path, 20)
    run, loader, average, of_steps = parts()
    with pytest.raises(CheckpointError, match=words):
        torchrex.train(
            run,
            loader,
            40,
            average=[average] * n_averages,
            trace=of_steps if trace else None,
            checkpoints=tmp_path,
        )


def test_a_checkpoint_with_another_average_or_batch_size_names_the_folder(tmp_path):
    loader = torchrex.DeviceLoader(classes(), 8, seed=1)
    torchrex.train(
        make_run(),
        loader,
        20,
        average=torchrex.PosteriorAverage(batches(2), every=5),
        checkpoints=tmp_path,
    )
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*every.*another folder"):
        torchrex.train(
            make_run(),
            loader,
            40,
            average=torchrex.PosteriorAverage(batches(2), every=4),
            checkpoints=tmp_path,
        )
    other = torchrex.DeviceLoader(classes(), 4, seed=1)
    average = torchrex.PosteriorAverage(batches(2), every=5)
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path}.*batch_size=8.*batch_size=4.*another folder"
    ):
        torchrex.train(make_run(), other, 40, average=average, checkpoints=tmp_path)


def test_a_trace_takes_single_steps():
    run, blocks, single, stacked = (
        make_run(),
        batches(6),
        torchrex.Trace(every=2),
        torchrex.Trace(every=2),
    )
    for batch in blocks:
        single.record(run.step(batch))
    for infos in make_run().advance(6, blocks):
        stacked.record(infos)
    assert single.tensors().keys() == stacked.tensors().keys()
    assert all(
        torch.equal(tensor, stacked.tensors()[name]) for name, tensor in single.tensors().items()
    )


def test_signals_outside_the_main_thread_are_left_alone():
    import threading

    caught = []
    thread = threading.Thread(target=lambda: caught.append(stopping_signals().__enter__()))
    thread.start()
    thread.join()
    assert caught == [[]]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_progress_bar_and_bad_arguments():
    run, loader, _, _ = parts()
    assert torchrex.train(run, loader, 3, progress=True).status == "finished"
    seen = []
    torchrex.train(run, loader, 6, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)
    for bad in ({"n_steps": "10"}, {"n_steps": 9, "checkpoint_every": 0}):
        with pytest.raises(torchrex.errors.InvalidArgumentError, match="whole number"):
            torchrex.train(run, loader, **bad)
    with pytest.raises(torchrex.errors.InvalidArgumentError, match="one tuple of tensors"):
        torchrex.train(run, (torch.randn(4, 4), torch.randn(4)), 9)


def test_an_overwriting_run_that_fails_before_it_begins_leaves_the_old_one(tmp_path, monkeypatch):
    folder = run_recipe(small(), 0, tmp_path, device="cpu")
    before = folder.result

    def broken():
        raise RunFolderError("no digits today")

    monkeypatch.setattr("torchrex.experiments.digits.digits", broken)
    with pytest.raises(RunFolderError, match="no digits"):
        run_recipe(small("digits/resghmc", "epochs=30"), 0, tmp_path, device="cpu", overwrite=True)
    assert folder.result == before
    assert not folder.path.with_name("seed=0.new").exists()


def test_a_run_that_begins_anew_does_not_hide_behind_later_checkpoints(tmp_path):
    go(tmp_path, 60)
    with pytest.raises(CheckpointError, match="checkpoints up to step 60"):
        go(tmp_path, 30, resume=False)
    with pytest.raises(torchrex.errors.InvalidArgumentError, match="step 60, beyond n_steps=30"):
        go(tmp_path, 30)


def test_draws_of_another_run_are_not_thrown_away(tmp_path):
    go(tmp_path / "a", 60, torchrex.DrawStore(tmp_path / "draws", capacity=50))
    with pytest.raises(CheckpointError, match="holds draws of another run"):
        go(tmp_path / "b", 60, torchrex.DrawStore.load(tmp_path / "draws"))
    assert len(torchrex.DrawStore.load(tmp_path / "draws")) == 14


def test_a_last_move_into_nowhere_is_not_called_finished(tmp_path):
    run, loader, average, trace = parts()
    update = run._network.functions.update

    def last_one_fails(position, *rest):
        update(position, *rest)
        if run.n_steps == 29:
            position[1].fill_(float("inf"))

    functions = run._network.functions._replace(update=last_one_fails)
    run._network = dataclasses.replace(run._network, functions=functions)
    with pytest.raises(
        NonFiniteEnergyError, match=r"replica 1 on rung . .* at step 30 .*step=000000020"
    ):
        torchrex.train(
            run, loader, 30, average=average, trace=trace, checkpoints=tmp_path, checkpoint_every=20
        )
    assert torchrex.Checkpoints(tmp_path).steps() == [0, 20]


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


def test_going_back_in_the_same_process_is_exact_with_the_same_objects(tmp_path):
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    data = Remembering((x[k : k + 10], y[k : k + 10]) for k in range(0, 60, 10))
    run, _, _, _ = parts()
    torchrex.train(run, data, 8, checkpoints=tmp_path)
    torchrex.train(run, data, 15, checkpoints=None)
    there = run.ensemble.position.clone()
    torchrex.train(run, data, 15, checkpoints=tmp_path)  # back to step 8, and on
    assert torch.equal(run.ensemble.position, there)


def test_leaving_advance_early_does_not_begin_the_data_anew():
    x, y = torch.randn(300, 4), torch.randint(3, (300,))
    data = Remembering((x[k : k + 1], y[k : k + 1]) for k in range(300))
    run, _, _, _ = parts()
    for _ in run.advance(280, data):
        break
    assert data.position == 256
    list(run.advance(2, data))
    assert data.position == 258
    assert data.begun == 1


def test_stored_draws_follow_to_the_older_checkpoint(tmp_path):
    """With the newest checkpoint damaged, the draws that were replaced since the one before are
    still there.
    """
    whole = go(tmp_path / "whole", 100, torchrex.DrawStore(tmp_path / "a", capacity=3))
    go(tmp_path / "run", 95, torchrex.DrawStore(tmp_path / "b", capacity=3))
    file = tmp_path / "run" / "step=000000095" / "shared.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    last = go(tmp_path / "run", 100, torchrex.DrawStore.load(tmp_path / "b"))
    assert torch.equal(whole[0].ensemble.position, last[0].ensemble.position)
    a, b = (torchrex.DrawStore.load(tmp_path / name) for name in "ab")
    assert a.draws == b.draws
    for (_, _, left), (_, _, right) in zip(a, b, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("trace", [None, "kept"])
def test_a_pair_that_never_swaps_is_named(caplog, trace):
    """Replicas with minibatches of their own have noisy differences; the run is resumed, and all
    its tests are counted.
    """
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    energy = torchrex.PosteriorEnergy(
        F.cross_entropy, n_data=200, prior=torchrex.GaussianPrior(1.0)
    )
    loader = torchrex.DeviceLoader((x, (x.sum(1) > 0).long()), 10)

    def run_on(*temperatures, **options):
        ensemble = torchrex.ModuleEnsemble(lambda: nn.Linear(3, 2), energy, shared_batches=False)
        kept = torchrex.Trace() if trace else None
        run = torchrex.ModuleExchange(
            ensemble,
            torchrex.Ladder(temperatures, 1e-5),
            noise=torchrex.KnownVariance(500.0),
            **options,
        )
        for n_steps in (30, 60):
            torchrex.train(run, loader, n_steps=n_steps, trace=kept)
        return [record.getMessage() for record in caplog.records]

    *_, said = run_on(0.5, 1.0)
    assert "rungs 0 and 1 (s = 31.6)" in said
    assert f"no swap in {60 if trace else 30} tests" in said
    caplog.clear()
    assert not run_on(1.0, 1.001)
    assert not run_on(0.5, 1.0, pairing=torchrex.NoSwaps())


def test_a_dead_pair_that_swapped_once_because_replicas_start_alike(caplog):
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    energy = torchrex.PosteriorEnergy(
        F.cross_entropy, n_data=1000, prior=torchrex.GaussianPrior(1.0)
    )
    ensemble = torchrex.ModuleEnsemble(nn.Linear(3, 2), energy)
    run = torchrex.ModuleExchange(ensemble, torchrex.Ladder((1.0, 1e5), 1e-4))
    torchrex.train(run, torchrex.DeviceLoader((x, (x.sum(1) > 0).long()), 10), n_steps=400)
    said = [
        record.getMessage() for record in caplog.records if "rungs 0 and 1" in record.getMessage()
    ]
    assert len(said) == 1
    assert said[0].startswith("1 swap in 400 tests")
