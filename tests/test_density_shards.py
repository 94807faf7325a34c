"""Runs on densities in shards: the number of processes changes nothing, and what one process meets
all of them learn.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import torchrex as tr
from densities import DRAWN
from densities import assert_same_draws as assert_same
from ranks import Ranks, run_ranks
from torchrex.density import loop as block
from torchrex.density.shards import combine, cut
from torchrex.distributed import process_group as processes
from torchrex.errors import CheckpointError, InvalidArgumentError, NonFiniteEnergyError
from torchrex.rng import derive_seed

MIXTURE = tr.Noisy(tr.GaussianMixture([0.4, 0.6], [-3.0, 2.0], [0.7, 0.5]), tr.Gaussian(2.0))
LADDER = tr.Ladder((1.0, 10.0), 0.03)
NOISE = tr.RunningMean(tr.RepeatedDraws(4, 50), initial=10.0)


def draw(folder=None, n_steps=600, n_runs=7, seed=5, shards=4, **more):
    sizes = {"n_steps": n_steps, "n_runs": n_runs, "thin": 7, "burn_in": 30, "shards": shards}
    rules = {"ladder": LADDER, "noise": NOISE, "correction_factor": 2.0}
    start = {"initial": torch.linspace(-2.0, 2.0, n_runs)[:, None], "seed": seed}
    options = {**sizes, **rules, **start, "checkpoint_every": 100, **more}
    return tr.sample(MIXTURE, checkpoints=folder, **options)


def plain(draws):
    """Equal means equal bit for bit."""
    tensors = {name: getattr(draws, name) for name in DRAWN}
    lists = {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in tensors.items()}
    return {**lists, "n_steps": draws.n_steps, "status": draws.status, "settings": draws.settings}


# In one process


def test_runs_are_cut_into_neighbours():
    assert cut(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert cut(4, 4) == [range(k, k + 1) for k in range(4)]


@pytest.mark.parametrize("sampler", [None, tr.SGHMC(0.2)])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_shard_is_a_run_of_its_own_seed_and_its_own_part_of_the_start(
    compiled, sampler, monkeypatch
):
    """7 runs in 3 shards of 3, 2 and 2: the last two share a compiled loop, and take turns in its
    buffers: blocks are short."""
    monkeypatch.setattr(block, "LONGEST", 64)
    whole = draw(shards=3, compiled=compiled, sampler=sampler)
    parts = []
    for k, runs in enumerate(cut(7, 3)):
        start = torch.linspace(-2.0, 2.0, 7)[runs.start : runs.stop, None]
        own = {"seed": derive_seed(5, f"shard.{k}"), "initial": start, "shards": None}
        parts.append(draw(n_runs=len(runs), compiled=compiled, sampler=sampler, **own))
    assert whole.values.shape[0] == 7
    assert whole.settings["shards"] == 3
    assert whole.acceptance_rate > 0
    assert_same(tr.Draws(**{**vars(combine(parts)), "settings": whole.settings}), whole)


def test_one_shard_has_the_seed_itself():
    assert_same(draw(shards=1), draw(shards=None))
    assert not torch.equal(draw(shards=2).values, draw(shards=1).values)


def test_draws_go_as_far_as_all_shards_do(tmp_path):
    """Shards take turns, so that none is more than a stretch ahead of the others."""
    seen = []

    def interrupt(done, total):
        seen.append(done)
        if len(seen) == 7:
            raise KeyboardInterrupt

    part = draw(tmp_path, n_steps=800, progress=interrupt, on_interrupt="return")
    whole = draw(n_steps=800)
    # The first three have done 200 steps.
    assert (part.status, part.n_steps, part.n_draws) == ("interrupted", 100, 10)
    assert torch.equal(part.values, whole.values[:, :10])
    assert torch.equal(part.energy, whole.energy[:10])
    newest = [tr.Checkpoints(tmp_path / f"shard={k}").steps()[-1] for k in range(4)]
    assert newest == [200, 200, 200, 100]
    assert_same(draw(tmp_path, n_steps=800), whole)


def test_a_budget_that_is_used_up_at_once_leaves_something_of_every_shard(tmp_path):
    part = draw(tmp_path, budget=1e-9)
    assert (part.status, part.n_steps) == ("paused", 100)
    assert_same(draw(tmp_path), draw())


def test_what_does_not_fit_is_refused(tmp_path):
    for bad, word in (
        ({"shards": 8}, "shards=8"),
        ({"shards": 0}, "whole number >= 1"),
        ({"shards": True}, "whole number"),
        ({"seed": -1}, "seed"),
        ({"initial": torch.zeros(3, 1)}, "broadcast to"),
    ):
        with pytest.raises(InvalidArgumentError, match=word):
            draw(**bad)
    draw(tmp_path / "four", n_steps=100)
    draw(tmp_path / "one", n_steps=100, shards=None)
    with pytest.raises(CheckpointError, match=r"shard was '0 of 4' and is now '0 of 2'"):
        draw(tmp_path / "four", shards=2)
    with pytest.raises(CheckpointError, match="holds a run in 4 shards; give shards=4"):
        draw(tmp_path / "four", shards=None)
    with pytest.raises(CheckpointError, match="holds a run in one piece; leave out shards=4"):
        draw(tmp_path / "one")


def breaks(x):
    return torch.where(x[:, 0] > 5.5, float("nan"), -0.5 * x.square().sum(-1))


def draw_broken(n_runs=6, shards=4, seed=2):
    ladder, sizes = tr.Ladder((1.0, 2.0), 0.1), {"dim": 1, "n_steps": 5000, "n_runs": n_runs}
    return tr.sample(breaks, ladder=ladder, **sizes, shards=shards, dtype=torch.float64, seed=seed)


def test_a_broken_run_is_counted_among_all():
    with pytest.raises(NonFiniteEnergyError) as caught:
        draw_broken()
    error = caught.value
    assert error.draws.status == "failed"
    assert error.draws.n_chains == 6
    assert error.draws.values.isfinite().all()
    (shard,) = (k for k, runs in enumerate(cut(6, 4)) if error.run in runs)
    runs = cut(6, 4)[shard]
    with pytest.raises(NonFiniteEnergyError) as caught:
        draw_broken(len(runs), None, derive_seed(2, f"shard.{shard}"))
    alone = caught.value
    assert (alone.step, alone.run + runs.start) == (error.step, error.run)
    assert alone.rung == error.rung


# On several


def job(folder, options):
    return plain(draw(folder, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"n_steps": 300, "compiled": True, "sampler": tr.SGHMC(0.2)}],
    ids=["eager", "compiled"],
)
def test_the_number_of_processes_changes_nothing(tmp_path, options):
    alone = plain(draw(**options))
    assert max(max(row) for row in alone["accepted"][1]) > 0
    for n in (2, 4) if "compiled" in options else (1, 2, 3, 4):
        assert run_ranks(n, job, tmp_path, str(tmp_path / str(n)), options) == [alone] * n


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 2), (1, 3)])
def test_a_run_goes_on_on_another_number_of_processes(tmp_path, before, after):
    run_ranks(before, job, tmp_path, str(tmp_path / "run"), {"n_steps": 250})
    assert run_ranks(after, job, tmp_path, str(tmp_path / "run"), {}) == [plain(draw())] * after


def refused(folder, what):
    rank = int(os.environ["RANK"])
    if what == "seeds":
        draw(seed=rank)
    elif what == "shards":
        draw(shards=3)
    elif what == "none":
        draw(shards=None)
    elif what == "other":
        draw(folder, ladder=tr.Ladder((1.0, 10.0), 0.02) if rank == 1 else LADDER)
    elif what == "broken":
        draw_broken()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("seeds", "InvalidArgumentError", "rank 0 has seed 0 and rank 1 1"),
        ("shards", "InvalidArgumentError", "4 processes cannot share 3 shards; give shards=4"),
        ("none", "InvalidArgumentError", "4 processes cannot share 1 shard; give shards=4"),
        ("other", "CheckpointError", "another setting: ladder."),
        ("broken", "NonFiniteEnergyError", "became nan at step"),
    ],
)
def test_what_one_process_meets_all_learn(tmp_path, what, error, words):
    if what == "other":
        draw(tmp_path / "run", n_steps=100)
    said = run_ranks(4, refused, tmp_path, str(tmp_path / "run"), what)
    assert all(each["error"] == error and words in each["said"] for each in said), said
    assert what == "other" or len({each["said"] for each in said}) == 1


STEPS = []


def slow_target(x):
    if os.environ["RANK"] in os.environ["SLOW"].split():
        time.sleep(0.01)
    STEPS.append(1)
    if os.environ.get("RAISES") == os.environ["RANK"] and len(STEPS) > 50:
        raise ZeroDivisionError("of the user's own")
    return -0.5 * x.square().sum(-1)


def slow(folder, slow_ranks, timeout, raises="", n_steps=300):
    """Some ranks take seconds, the others none: more than the time-out of a collective."""
    os.environ |= {"SLOW": slow_ranks, "RAISES": raises}
    processes.SILENCE = 2.0
    sizes = {"dim": 1, "n_steps": n_steps, "n_runs": 4, "shards": 4, "checkpoint_every": 50}
    options = {**sizes, "seed": 2, "compiled": False, "on_interrupt": "return"}
    ladder = tr.Ladder((1.0, 2.0), 0.1)
    draws = tr.sample(slow_target, ladder=ladder, checkpoints=folder, **options)
    total = float(draws.values.double().sum())
    return {"status": draws.status, "sum": total, "n_steps": draws.n_steps}


@pytest.mark.slow
def test_nobody_is_too_slow_as_long_as_he_lives(tmp_path):
    said = run_ranks(2, slow, tmp_path, str(tmp_path / "run"), "1", 2, timeout=2)
    assert [each.get("status") for each in said] == ["finished"] * 2, said
    assert said[0] == said[1]


@pytest.mark.slow
def test_an_error_of_the_users_own_reaches_the_others(tmp_path):
    said = run_ranks(2, slow, tmp_path, str(tmp_path / "run"), "", 2, "1")
    assert said[1]["error"] == "ZeroDivisionError"
    assert said[0]["error"] == "RankError"
    assert "rank 1" in said[0]["said"]
    assert "ZeroDivisionError: of the user's own" in said[0]["said"]


def after_checkpoint(ranks, folder, shard):
    deadline = time.monotonic() + 60
    while not tr.Checkpoints(folder / f"shard={shard}").steps():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_is_named_and_the_rest_goes_on_from_there(tmp_path, number):
    whole = run_ranks(1, slow, tmp_path, str(tmp_path / "whole"), "", 60)
    ranks = Ranks(2, slow, tmp_path, str(tmp_path / "run"), "1", 60)
    after_checkpoint(ranks, tmp_path / "run", 3).send(number, 1)
    ranks.processes[0].join(60)
    said = ranks.wait(1) if number == signal.SIGKILL else None
    if number == signal.SIGSTOP:
        ranks.kill()
        assert ranks.processes[0].exitcode == 0
    else:
        assert said[0]["error"] == "RankError"
        assert "rank 1 (process" in said[0]["said"]
        assert "is gone: killed, stopped, or out of reach" in said[0]["said"]
        assert said[1] is None
    assert run_ranks(1, slow, tmp_path, str(tmp_path / "run"), "", 60) == whole


@pytest.mark.slow
def test_a_signal_to_one_stops_all(tmp_path):
    whole = run_ranks(1, slow, tmp_path, str(tmp_path / "whole"), "", 60, "", 2000)
    ranks = Ranks(2, slow, tmp_path, str(tmp_path / "run"), "0 1", 60, "", 2000)
    after_checkpoint(after_checkpoint(ranks, tmp_path / "run", 1), tmp_path / "run", 3).send(
        signal.SIGINT, 1
    )
    said = ranks.wait(60)
    assert [each.get("status") for each in said] == ["interrupted"] * 2, said
    assert said[0] == said[1]
    assert 0 < said[0]["n_steps"] < 2000
    assert all(tr.Checkpoints(tmp_path / "run" / f"shard={k}").steps()[-1] < 2000 for k in range(4))
    assert run_ranks(1, slow, tmp_path, str(tmp_path / "run"), "", 60, "", 2000) == whole
