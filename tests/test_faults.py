"""Processes that are killed, stopped, slow, told to stop, failing, cut off, out of disk: who is
named, and that nothing is lost.

Every strike is followed by a resume on several processes and by one on this process alone; both
must end, byte for byte, like the run that was never disturbed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchrex as tr
from faults import jobs, script, strikes
from faults.killing import LONGEST, Killer, left_over, processes
from ranks import Ranks, run_ranks

SOON = 4.0  # seconds that a rank waits where a rank will not come
N, EVERY = jobs.N_STEPS, jobs.EVERY


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that is never disturbed, with all its checkpoints; the server of forks is there from
    now on, too.
    """
    place = tmp_path_factory.mktemp("undisturbed")
    said = jobs.alone(jobs.network, place / "whole", keep=100)
    assert said["status"] == "finished"
    assert said["swaps"] > 0
    run_ranks(1, os.getpid, place)
    return place / "whole"


@pytest.fixture(autouse=True)
def _no_orphans(whole):
    before = processes()
    yield
    assert not left_over(before)


def assert_goes_on(folder, whole, n, newest):
    """The newest complete checkpoint survived, and a run that goes on from it ends like the one
    never disturbed.
    """
    assert (
        tr.Checkpoints(folder).steps()[-1] == newest
    )  # and nothing that is not whole counts as newer
    assert tr.Checkpoints(folder).load_newest().step == newest
    if newest % EVERY == 0:
        assert jobs.contents_of(folder, newest) == jobs.contents_of(whole, newest)
    shutil.copytree(folder, copy := folder.with_name("copy"))
    assert jobs.alone(jobs.network, copy)["status"] == "finished"
    said = run_ranks(n, jobs.network, folder.parent, str(folder))
    assert [each.get("status") for each in said] == ["finished"] * n
    for ended in (folder, copy):
        assert jobs.contents_of(ended, N) == jobs.contents_of(whole, N)
        assert sorted(path.name for path in ended.iterdir()) == [
            f"step={step:09d}" for step in (N - EVERY, N)
        ]


def assert_named(said, victim, words):
    """All others say the same of one rank, and one of them says it aloud."""
    others = [each for rank, each in enumerate(said) if rank != victim]
    for each in others:
        assert each["error"] == "RankError"
        assert re.fullmatch(rf"rank {victim} \(process \d+ on \S+\) {words}", each["said"]), each[
            "said"
        ]
    assert sum(each["speaks"] for each in others) == 1


GONE = "is gone: killed, stopped, or out of reach"


@pytest.mark.parametrize(("n", "victim"), [(3, 0), (4, 2)])
def test_a_rank_is_killed(tmp_path, whole, n, victim):
    said = run_ranks(
        n, strikes.struck, tmp_path, jobs.network, [victim], "killed", str(tmp_path / "run")
    )
    assert said[victim] is None
    assert_named(said, victim, GONE)
    assert_goes_on(tmp_path / "run", whole, n, newest=20)


def test_two_ranks_are_killed_at_once(tmp_path, whole):
    said = run_ranks(
        4, strikes.struck, tmp_path, jobs.network, [1, 3], "killed", str(tmp_path / "run")
    )
    assert said[1] is None
    assert said[3] is None
    for each in (said[0], said[2]):
        assert re.fullmatch(
            r"rank 1 \(.*\), rank 3 \(.*\) are gone: killed, stopped, or out of reach", each["said"]
        )
    assert said[0]["speaks"] != said[2]["speaks"]
    assert_goes_on(tmp_path / "run", whole, 3, newest=20)


def hosting(port, *arguments):
    """As without torchrun: rank 0 is host to the store."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    return strikes.struck(*arguments)


def test_the_rank_that_hosts_the_store_is_killed(tmp_path, whole):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    said = run_ranks(3, hosting, tmp_path, port, jobs.network, [0], "killed", str(tmp_path / "run"))
    assert [each and each["said"] for each in said[1:]] == [
        f"rank 0 is gone, and the store of the job with it: {GONE[9:]}"
    ] * 2
    assert [each["speaks"] for each in said[1:]] == [True, False]
    assert_goes_on(tmp_path / "run", whole, 2, newest=20)


def test_a_rank_is_stopped_until_the_others_give_up(tmp_path, whole):
    ranks = Ranks(
        3,
        strikes.struck,
        tmp_path,
        jobs.network,
        [1],
        "stopped",
        str(tmp_path / "run"),
        timeout=SOON,
    )
    for rank in (0, 2):
        ranks.processes[rank].join(LONGEST)
        assert not ranks.processes[rank].is_alive()
    assert ranks.processes[1].is_alive()
    ranks.send(signal.SIGCONT, 1)  # and when it wakes up, it ends as well
    said = ranks.wait()
    assert_named(said, 1, GONE)
    assert said[1]["error"] == "RankError"
    assert not said[1]["speaks"]
    assert_goes_on(tmp_path / "run", whole, 2, newest=20)


def test_a_rank_is_too_slow(tmp_path, whole):
    said = run_ranks(
        3, strikes.struck, tmp_path, jobs.network, [2], "slow", str(tmp_path / "run"), timeout=SOON
    )
    words = (
        "did not come to the gather of the energies in time; TORCHREX_TIMEOUT=SECONDS waits longer"
    )
    assert_named(said, 2, words)
    assert said[2]["error"] == "RankError"  # it finds nobody there
    assert not said[2]["speaks"]
    assert_goes_on(tmp_path / "run", whole, 3, newest=20)


def test_a_rank_is_slow_and_the_others_wait(tmp_path, whole):
    said = run_ranks(2, strikes.struck, tmp_path, jobs.network, [1], "slow", str(tmp_path / "run"))
    assert [each["status"] for each in said] == ["finished"] * 2
    assert jobs.contents_of(tmp_path / "run", N) == jobs.contents_of(whole, N)


def test_one_rank_is_told_to_stop_and_all_do_at_the_same_step(tmp_path, whole):
    said = run_ranks(
        3, strikes.struck, tmp_path, jobs.network, [1], "terminated", str(tmp_path / "run")
    )
    assert said == said[:1] * 3
    assert (said[0]["status"], said[0]["signal"]) == ("interrupted", signal.SIGTERM)
    assert 20 < said[0]["stands_at"] < N
    assert_goes_on(tmp_path / "run", whole, 3, newest=said[0]["stands_at"])


def test_the_users_loss_fails_on_one_rank(tmp_path, whole):
    said = run_ranks(
        4, strikes.struck, tmp_path, jobs.network, [1], "raises", str(tmp_path / "run")
    )
    assert (said[1]["error"], said[1]["said"]) == (
        "ArithmeticError",
        "this loss\ndoes not like these labels",
    )
    assert_named(said, 1, "failed with ArithmeticError: this loss does not like these labels")
    assert_goes_on(tmp_path / "run", whole, 4, newest=20)


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_loses_its_connections(tmp_path, whole, n):
    said = run_ranks(
        n, strikes.struck, tmp_path, jobs.network, [1], "cut off", str(tmp_path / "run"), timeout=30
    )
    for rank, each in enumerate(said):
        words = rf"the connection of rank {rank} \(process \d+ on \S+\) to the other ranks broke in the \w[\w ]+ \(.+\)"
        assert re.fullmatch(words, each["said"]), each["said"]
    assert sum(each["speaks"] for each in said) == 1
    assert_goes_on(tmp_path / "run", whole, n, newest=20)


# In the middle of saving


@pytest.mark.parametrize("victim", [0, 1])
def test_the_disk_is_full_for_one_rank(tmp_path, whole, victim):
    said = run_ranks(
        2, strikes.struck, tmp_path, jobs.network, [victim], "full disk", str(tmp_path / "run")
    )
    words = f"cannot save {tmp_path / 'run' / 'step=000000040'} (No space left on device); earlier checkpoints are unchanged. "
    assert all(each["error"] == "CheckpointError" for each in said)
    assert said[victim]["said"].startswith(words)
    assert said[1 - victim]["said"].startswith(f"rank {victim}: {words}")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "step=000000000",
        "step=000000020",
    ]
    assert_goes_on(tmp_path / "run", whole, 2, newest=20)


@pytest.mark.parametrize(
    ("strike", "victim", "newest"),
    [
        ("killed in a file", 1, 20),
        ("killed in a file", 0, 20),
        ("killed after its files", 0, 20),
        ("killed before DONE", 0, 20),
        ("killed after DONE", 0, 40),
    ],
)
def test_a_rank_is_killed_while_it_saves(tmp_path, whole, strike, victim, newest):
    said = run_ranks(
        2, strikes.struck, tmp_path, jobs.network, [victim], strike, str(tmp_path / "run")
    )
    assert said[victim] is None
    assert_named(said, victim, GONE)
    assert_goes_on(tmp_path / "run", whole, 2, newest)


# Under torchrun


class Torchrun:
    """A user's script on two processes."""

    def __init__(self, folder, *arguments, restarts=0):
        torchrun = Path(sys.executable).with_name("torchrun")
        command = [
            torchrun,
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            str(restarts),
            script.__file__,
            folder,
        ]
        self.log = folder.with_name("torchrun.log")
        with open(self.log, "w") as file:
            options = {
                "stdout": file,
                "stderr": subprocess.STDOUT,
                "env": {**os.environ, "OMP_NUM_THREADS": "1"},
            }
            self.process = subprocess.Popen([*map(str, command), *map(str, arguments)], **options)

    def wait(self):
        """What was said until all had ended; its workers are in sessions of their own, and known by
        what they say.
        """
        try:
            self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(LONGEST)
            raise AssertionError(f"torchrun hangs: {self.log.read_text()}") from None
        deadline = time.monotonic() + LONGEST
        workers = [
            Path(f"/proc/{pid}") for pid in re.findall(r"process (\d+)\n", self.log.read_text())
        ]
        assert len(workers) >= 2
        while (
            left := [worker for worker in workers if worker.exists()]
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        for worker in left:
            os.kill(int(worker.name), signal.SIGKILL)
        assert not left
        return self.log.read_text()

    def wait_for(self, path):
        deadline = time.monotonic() + LONGEST
        while not path.exists():
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)


def test_torchrun_gives_a_killed_rank_another_life(tmp_path, whole):
    one = Torchrun(tmp_path / "run", N, "killed", restarts=3)
    said = one.wait()
    assert one.process.returncode == 0, said
    ends = re.findall(r"rank (\d) life (\d) ends (.*)", said)
    assert {rank for rank, _, _ in ends} == {"0", "1"}, said
    # On a busy machine a rank may be late on its way out, and torchrun gives both one more life,
    # with nothing left to do.
    assert all(int(life) >= 1 and how == f"finished at step {N}" for _, life, how in ends), said
    assert jobs.contents_of(tmp_path / "run", N) == jobs.contents_of(whole, N)


def test_torchrun_is_told_to_stop(tmp_path, whole):
    one = Torchrun(tmp_path / "run", 10**6)
    one.wait_for(tmp_path / "run" / "step=000000040" / "DONE")
    one.process.terminate()
    said = one.wait()
    ends = re.findall(r"rank \d life 0 ends interrupted at step (\d+)", said)
    assert len(ends) == 2, said
    assert len(set(ends)) == 1
    assert tr.Checkpoints(tmp_path / "run").steps()[-1] == int(ends[0])


def test_torchrun_is_killed_and_leaves_no_orphans(tmp_path, whole):
    """They would write into a folder that another job may use by then."""
    one = Torchrun(tmp_path / "run", 10**6)
    one.wait_for(tmp_path / "run" / "step=000000040" / "DONE")
    one.process.kill()
    said = one.wait()
    words = "torchrex: torchrun is gone, and the store of the job with it: killed, stopped, or out of reach"
    assert said.count(words) == said.count("torchrex: ") == 1, said


# And at random


def test_twenty_random_kills(tmp_path):
    """The same as benchmarks/kills.py, which does a hundred."""
    killer = Killer(jobs.digits, tmp_path, seed=int.from_bytes(os.urandom(4)))
    assert len(killer.kill(20)) == 20, killer.summary()
