"""Processes that are killed, stopped, slow, failing, cut off, out of disk: which rank is named, and
that nothing is lost.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import torchrex as tr
from faults import jobs, script, strikes
from faults.killing import LONGEST, Killer, left_over, processes
from ranks import Ranks, run_ranks
from torchrex.distributed.watch import Watch

pytestmark = pytest.mark.slow

SOON = 4.0  # seconds that a rank waits where a rank will not come
N, EVERY = jobs.N_STEPS, jobs.EVERY
GONE = "is gone: killed, stopped, or out of reach"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run that is never disturbed, with all its checkpoints; it starts the server of forks."""
    place = tmp_path_factory.mktemp("undisturbed")
    said = jobs.alone(jobs.network, place / "run", keep=100)
    assert said["status"] == "finished"
    assert said["swaps"] > 0
    run_ranks(1, os.getpid, place)
    return place / "run"


@pytest.fixture(autouse=True)
def _no_orphans(undisturbed):
    before = processes()
    yield
    assert not left_over(before)


@pytest.fixture
def strike(tmp_path):
    """Start a job of n ranks, some of which are struck."""

    def start(n, victims, name, **options):
        folder = str(tmp_path / "run")
        return Ranks(n, strikes.struck, tmp_path, jobs.network, victims, name, folder, **options)

    return start


def assert_goes_on(folder, undisturbed, n, newest):
    """The newest complete checkpoint survived; a run that goes on from it ends like the other."""
    assert tr.Checkpoints(folder).steps()[-1] == newest
    assert tr.Checkpoints(folder).load_newest().step == newest
    if newest % EVERY == 0:
        assert jobs.contents_of(folder, newest) == jobs.contents_of(undisturbed, newest)
    shutil.copytree(folder, copy := folder.with_name("copy"))
    assert jobs.alone(jobs.network, copy)["status"] == "finished"
    said = run_ranks(n, jobs.network, folder.parent, str(folder))
    assert [each.get("status") for each in said] == ["finished"] * n
    for ended in (folder, copy):
        assert jobs.contents_of(ended, N) == jobs.contents_of(undisturbed, N)
        names = [f"step={step:09d}" for step in (N - EVERY, N)]
        assert sorted(path.name for path in ended.iterdir()) == names


def assert_named(said, victim, words):
    """All others say the same of one rank, and one of them reports it."""
    others = [each for rank, each in enumerate(said) if rank != victim]
    pattern = rf"rank {victim} \(process \d+ on \S+\) {words}"
    for each in others:
        assert each["error"] == "RankError"
        assert re.fullmatch(pattern, each["said"]), each["said"]
    assert sum(each["speaks"] for each in others) == 1


@pytest.mark.parametrize(
    ("name", "n", "victim", "newest"),
    [
        ("killed", 3, 0, 20),
        ("killed", 4, 2, 20),
        ("killed in a file", 2, 1, 20),
        ("killed after its files", 2, 0, 20),
        ("killed before DONE", 2, 0, 20),
        ("killed after DONE", 2, 0, 40),
    ],
)
def test_a_rank_is_killed(tmp_path, undisturbed, strike, name, n, victim, newest):
    said = strike(n, [victim], name).wait()
    assert said[victim] is None
    assert_named(said, victim, GONE)
    assert_goes_on(tmp_path / "run", undisturbed, n, newest)


def test_two_ranks_are_killed_at_once(tmp_path, undisturbed, strike):
    said = strike(4, [1, 3], "killed").wait()
    assert said[1] is said[3] is None
    for each in (said[0], said[2]):
        assert re.fullmatch(r"rank 1 \(.*\), rank 3 \(.*\) are gone: .*", each["said"])
    assert said[0]["speaks"] != said[2]["speaks"]
    assert_goes_on(tmp_path / "run", undisturbed, 3, newest=20)


def hosting(port, *arguments):
    """As without torchrun: rank 0 is host to the store."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    return strikes.struck(*arguments)


def test_the_rank_that_hosts_the_store_is_killed(tmp_path, undisturbed):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    said = run_ranks(3, hosting, tmp_path, port, jobs.network, [0], "killed", str(tmp_path / "run"))
    assert all("rank 0 is gone, and the store of the job" in each["said"] for each in said[1:])
    assert [each["speaks"] for each in said[1:]] == [True, False]
    assert_goes_on(tmp_path / "run", undisturbed, 2, newest=20)


def test_a_rank_is_stopped_until_the_others_give_up(tmp_path, undisturbed, strike):
    ranks = strike(3, [1], "stopped", timeout=SOON)
    for rank in (0, 2):
        ranks.processes[rank].join(LONGEST)
        assert not ranks.processes[rank].is_alive()
    assert ranks.processes[1].is_alive()
    ranks.send(signal.SIGCONT, 1)  # and when it wakes up, it ends as well
    said = ranks.wait()
    assert_named(said, 1, GONE)
    assert (said[1]["error"], said[1]["speaks"]) == ("RankError", False)
    assert_goes_on(tmp_path / "run", undisturbed, 2, newest=20)


def test_a_rank_is_too_slow(tmp_path, undisturbed, strike):
    said = strike(3, [2], "slow", timeout=SOON).wait()
    assert_named(said, 2, "did not come to the gather of the energies in time; TORCHREX_TIMEOUT.*")
    assert (said[2]["error"], said[2]["speaks"]) == ("RankError", False)  # it finds nobody there
    assert_goes_on(tmp_path / "run", undisturbed, 3, newest=20)


def test_a_rank_is_slow_and_the_others_wait(tmp_path, undisturbed, strike):
    said = strike(2, [1], "slow").wait()
    assert [each["status"] for each in said] == ["finished"] * 2
    assert jobs.contents_of(tmp_path / "run", N) == jobs.contents_of(undisturbed, N)


def test_one_rank_is_told_to_stop_and_all_do_at_the_same_step(tmp_path, undisturbed, strike):
    said = strike(3, [1], "terminated").wait()
    assert said == said[:1] * 3
    assert (said[0]["status"], said[0]["signal"]) == ("interrupted", signal.SIGTERM)
    assert 20 < said[0]["stands_at"] < N
    assert_goes_on(tmp_path / "run", undisturbed, 3, newest=said[0]["stands_at"])


def test_the_users_loss_fails_on_one_rank(tmp_path, undisturbed, strike):
    said = strike(4, [1], "raises").wait()
    assert said[1]["error"] == "ArithmeticError"
    assert_named(said, 1, "failed with ArithmeticError: this loss does not like these labels")
    assert_goes_on(tmp_path / "run", undisturbed, 4, newest=20)


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_loses_its_connections(tmp_path, undisturbed, strike, n):
    said = strike(n, [1], "cut off", timeout=30).wait()
    for rank, each in enumerate(said):
        words = rf"the connection of rank {rank} \(.*\) to the other ranks broke in the .*"
        assert re.fullmatch(words, each["said"]), each["said"]
    assert sum(each["speaks"] for each in said) == 1
    assert_goes_on(tmp_path / "run", undisturbed, n, newest=20)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_disk_is_full_for_one_rank(tmp_path, undisturbed, strike, victim):
    said = strike(2, [victim], "full disk").wait()
    words = f"cannot save {tmp_path / 'run' / 'step=000000040'} (No space left on device)"
    assert all(each["error"] == "CheckpointError" for each in said)
    assert said[victim]["said"].startswith(words)
    assert said[1 - victim]["said"].startswith(f"rank {victim}: {words}")
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["step=000000000", "step=000000020"]
    assert_goes_on(tmp_path / "run", undisturbed, 2, newest=20)


# Under torchrun


class Torchrun:
    """A user's script on two processes."""

    def __init__(self, folder, *arguments, restarts=0):
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", restarts]
        command = [Path(sys.executable).with_name("torchrun"), *options, script.__file__, folder]
        self.log = folder.with_name("torchrun.log")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                [str(word) for word in (*command, *arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def wait(self):
        """The log, after all have ended; workers are in sessions of their own, and known by it."""
        try:
            self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(LONGEST)
            raise AssertionError(f"torchrun hangs: {self.log.read_text()}") from None
        deadline = time.monotonic() + LONGEST
        pids = re.findall(r"process (\d+)\n", self.log.read_text())
        assert len(pids) >= 2
        while (left := [p for p in pids if Path(f"/proc/{p}").exists()]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
        assert not left
        return self.log.read_text()

    def wait_for(self, path):
        deadline = time.monotonic() + LONGEST
        while not path.exists():
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)


def test_torchrun_gives_a_killed_rank_another_life(tmp_path, undisturbed):
    one = Torchrun(tmp_path / "run", N, "killed", restarts=3)
    said = one.wait()
    assert one.process.returncode == 0, said
    ends = re.findall(r"rank (\d) life (\d) ends (.*)", said)
    assert {rank for rank, _, _ in ends} == {"0", "1"}, said
    assert all(int(life) >= 1 and how == f"finished at step {N}" for _, life, how in ends), said
    assert jobs.contents_of(tmp_path / "run", N) == jobs.contents_of(undisturbed, N)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_torchrun_is_told_to_stop(tmp_path, number):
    one = Torchrun(tmp_path / "run", 10**6)
    one.wait_for(tmp_path / "run" / "step=000000040" / "DONE")
    one.process.send_signal(number)
    said = one.wait()
    ends = re.findall(r"rank \d life 0 ends interrupted at step (\d+)", said)
    assert len(ends) == 2, said
    assert len(set(ends)) == 1
    assert tr.Checkpoints(tmp_path / "run").steps()[-1] == int(ends[0])


def test_torchrun_is_killed_and_leaves_no_orphans(tmp_path):
    """They would write into a folder that another job may use by then."""
    one = Torchrun(tmp_path / "run", 10**6)
    one.wait_for(tmp_path / "run" / "step=000000040" / "DONE")
    one.process.kill()
    said = one.wait()
    assert said.count("torchrex: torchrun is gone") == said.count("torchrex: ") == 1, said


def test_torchrun_is_killed_while_its_ranks_load(tmp_path):
    """They have no process group yet, which would notice. The mutant waits for the others."""
    one = Torchrun(tmp_path / "run", N, "loads")
    deadline = time.monotonic() + LONGEST
    while one.log.read_text().count("process ") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    one.process.kill()
    killed = time.monotonic()
    said = one.wait()
    assert time.monotonic() - killed < 10.0
    assert said.count("torchrex: torchrun is gone") == said.count("torchrex: ") == 1, said


def test_a_rank_that_comes_after_the_end_of_torchrun(tmp_path):
    """Nobody listens at the port of its store; its parent of now says nothing about that."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    told = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": "0"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", "import torchrex, time; time.sleep(60)"]
    ended = subprocess.run(
        command, env={**os.environ, **told}, capture_output=True, text=True, timeout=40
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("torchrex: torchrun is gone")


def in_one_store(folder, stranger):
    """Processes 0 and 1 are a job; process 2 comes later with the identity of its second rank."""
    name, folder = int(os.environ["RANK"]), Path(folder)
    of_job = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_ERROR_FILE": "/t/x/a_1/attempt_0/0/e.json"}
    os.environ.update(WORLD_SIZE="2", RANK=str(min(name, 1)), **of_job)
    while name == 2 and len(list(folder.glob("joined-*"))) < 2:
        time.sleep(0.05)
    if name == 2:
        os.environ.update(stranger)
    said = tr.distributed.join().gather(name)
    (folder / f"joined-{name}").touch()
    while name != 2 and not (folder / "refused").exists():
        time.sleep(0.05)
    return said


@pytest.mark.parametrize(
    ("stranger", "words"),
    [
        ({"TORCHELASTIC_RUN_ID": "b"}, "its job is 'a' of 2 processes, not 'b' of 2 processes"),
        ({"WORLD_SIZE": "3"}, "its job is 'a' of 2 processes, not 'a' of 3 processes"),
        ({"TORCHELASTIC_ERROR_FILE": "/t/y/a_2/attempt_0/1/e.json"}, "torchrun as x/a_1, not "),
        ({}, r"its rank 1 is process \d+ on \S+, not process \d+ on "),
    ],
)
def test_a_stranger_does_not_join_the_job(tmp_path, stranger, words):
    """It finds the store of another job at its port, for example that of an earlier torchrun."""
    ranks = Ranks(3, in_one_store, tmp_path, str(tmp_path), stranger)
    began = time.monotonic()
    ranks.processes[2].join(LONGEST)
    (tmp_path / "refused").touch()
    said = ranks.wait()
    assert time.monotonic() - began < 60.0
    assert said[:2] == [[0, 1], [0, 1]]
    assert said[2]["error"] == "RankError"
    assert re.search(rf"found another job at 127.0.0.1:\d+: .*{words}", said[2]["said"]), said[2]


def test_ranks_that_are_one_call_apart_name_a_dead_rank_once(monkeypatch):
    """The death cut off a collective that rank 1 had completed and rank 0 had not."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    watches = [Watch(rank, 3) for rank in range(3)]
    watches[1].forget_faults()  # it has begun the next call
    watches[2].stop()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda watch: watch.find_fault("x", OSError()), watches[:2]))
    for watch in watches[:2]:
        watch.stop()
    assert all(str(error).startswith("rank 2 ") for error in found), found
    assert sum(error.speaks for error in found) == 1


def test_twenty_random_kills(tmp_path):
    """The same as benchmarks/kills.py, which does a thousand."""
    killer = Killer(jobs.digits, tmp_path, seed=int.from_bytes(os.urandom(4)))
    assert len(killer.kill(20)) == 20, killer.summary()
