"""Several torchrun agents on this machine, as if they were nodes: a lost rank, nodes that come, the
signals of a preemption, and the Slurm script of docs/scaling.md with stand-ins for Slurm.

Each ends, byte for byte, like the run that was never disturbed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import torchrex as tr
from faults import jobs, script
from faults.killing import LONGEST
from ranks import run_ranks

pytestmark = pytest.mark.slow

N = jobs.N_STEPS
BIN = Path(sys.executable).parent
PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Nodes:
    """One torchrun for each node, all at one rendezvous."""

    def __init__(self, folder, how_many, n_steps, *arguments, restarts, **environment):
        self.folder, self.agents = Path(folder), []
        self.words = [BIN / "torchrun", "--nnodes", how_many, "--nproc-per-node", 1]
        self.words += ["--max-restarts", restarts, "--rdzv-backend", "c10d"]
        self.words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
        self.words += ["--rdzv-conf", "last_call_timeout=3"]
        self.words += [script.__file__, self.folder / "run", n_steps, *arguments]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}

    def start(self):
        log = self.folder / f"node-{len(self.agents)}.log"
        with open(log, "w") as file:
            words = [str(word) for word in self.words]
            agent = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, env=self.environment
            )
        self.agents.append(agent)

    @property
    def said(self):
        logs = [self.folder / f"node-{k}.log" for k in range(len(self.agents))]
        return "\n".join(log.read_text() for log in logs)

    def ranks(self):
        """The process of each that is there."""
        pids = [int(pid) for pid in re.findall(r"process (\d+)\n", self.said)]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def wait_until(self, happened):
        deadline = time.monotonic() + LONGEST
        while not happened():
            assert time.monotonic() < deadline, self.said
            assert all(agent.poll() is None for agent in self.agents), self.said
            time.sleep(0.05)

    def wait(self):
        """The exit code of each agent."""
        try:
            return [agent.wait(LONGEST) for agent in self.agents]
        finally:
            self.end()

    def end(self):
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def nodes(tmp_path):
    started = []

    def make(*arguments, **options):
        started.append(Nodes(tmp_path, *arguments, **options))
        return started[-1]

    yield make
    for each in started:
        each.end()


def test_a_rank_is_killed_on_one_of_two_nodes(tmp_path, nodes):
    """One node counts a restart, the other a change of members: one restart must be enough."""
    two = nodes(2, N, "killed", restarts=1)
    two.start()
    two.start()
    assert two.wait() == [0, 0], two.said
    assert "found another job" not in two.said
    assert len(re.findall(rf"ends finished at step {N}", two.said)) == 2
    jobs.alone(jobs.network, tmp_path / "alone")
    assert jobs.contents_of(tmp_path / "run", N) == jobs.contents_of(tmp_path / "alone", N)


def test_a_node_comes_and_all_are_preempted(tmp_path, nodes):
    """SIGTERM to every process at once, as Slurm does it; torchrun sends its own, too."""
    some = nodes("1:3", 10**6, restarts=9, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    for _ in range(2):
        some.start()
    some.wait_until((tmp_path / "run" / "step=000000040" / "DONE").exists)
    some.start()
    some.wait_until(lambda: "rank 2 life 0" in some.said)
    newest = tr.Checkpoints(tmp_path / "run").steps()[-1]
    some.wait_until(lambda: tr.Checkpoints(tmp_path / "run").steps()[-1] >= newest + 40)
    for pid in (*some.ranks(), *(agent.pid for agent in some.agents)):
        os.kill(pid, signal.SIGTERM)
    some.wait()
    stopped = tr.Checkpoints(tmp_path / "run").steps()[-1]
    assert some.said.count(f"ends interrupted at step {stopped}\n") == 3, some.said
    jobs.alone(jobs.network, tmp_path / "alone", stopped)
    ended = jobs.contents_of(tmp_path / "alone", stopped)
    assert jobs.contents_of(tmp_path / "run", stopped) == ended


# The store of torchrun, which outlives the ranks


def life(port, restarts, victim):
    """A rank in the store at a port, on a node that has counted so many restarts."""
    rank = int(os.environ["RANK"])
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_RESTART_COUNT=str(restarts[rank]))
    said = tr.distributed.join().gather([rank, restarts[rank]])
    if rank == victim:
        os._exit(1)
    return said


def test_ranks_of_a_new_life_meet_whatever_their_nodes_count(tmp_path):
    """The mutants take the number of restarts for that of the life."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restarts in ((0, 0), (0, 1), (1, 1, 0), (1, 1)):
        said = run_ranks(len(restarts), life, tmp_path, store.port, restarts, 1, timeout=20.0)
        met = [[rank, count] for rank, count in enumerate(restarts)]
        assert said == [None if rank == 1 else met for rank in range(len(restarts))]
