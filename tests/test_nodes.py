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
from faults.killing import LONGEST, processes
from ranks import run_ranks
from torchrex.experiments import RunFolder

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


# The Slurm script of the page

STAND_INS = {
    "scontrol": 'case $1 in show) echo 127.0.0.1;; requeue) touch "$OUT/requeued";; esac\n',
    # As srun: one task for each node. The others are ended where one fails.
    "srun": 'shift; for _ in $(seq "$SLURM_NNODES"); do "$@" & done\n'
    'for _ in $(seq "$SLURM_NNODES"); do wait -n || code=$?; done; exit ${code:-0}\n',
}
SMALL = "--set epochs=100 --set burn_in_epochs=5 --set checkpoint_every=100"


def is_of_step(pid, mark):
    """Does a process belong to the step of that job? The script and srun do not."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        is_above = b"srun" in words or b"job.sh" in words
        return f"SLURM_JOB_ID={mark}".encode() in environment and not is_above
    return False


def test_the_slurm_script_of_the_page_comes_to_the_end(tmp_path):
    """Turns that end by the budget, one that is preempted, and another number of nodes."""
    blocks = re.findall(r"^```bash\n(#!/bin/bash.*?)^```", PAGE.read_text(), re.M | re.S)
    (text,) = (block for block in blocks if "#SBATCH" in block)
    assert text.count("--budget 55m") == text.count("29400") == 1
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}")
        (tmp_path / name).chmod(0o755)
    mark, nodes, turns = f"{os.getpid()}-{time.monotonic_ns()}", "2", 0
    folder = RunFolder.of(tmp_path / "runs", "digits/resghmc", 0)
    while not folder.finished:
        turns += 1
        budget = "0.5s" if turns == 1 else "5m"
        words = text.replace("29400", str(free_port()))
        (tmp_path / "job.sh").write_text(
            words.replace("--budget 55m", f"--budget {budget} {SMALL}")
        )
        told = {"SLURM_JOB_ID": mark, "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": "this"}
        path = f"{tmp_path}:{BIN}:{os.environ['PATH']}"
        more = {**told, "PATH": path, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
        (tmp_path / "requeued").unlink(missing_ok=True)
        with open(tmp_path / "job.log", "w") as log:
            job = subprocess.Popen(
                ["bash", "job.sh"],
                cwd=tmp_path,
                env={**os.environ, **more},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if turns == 2:  # all processes of the step, but not the script and srun
            first, deadline = max(folder.steps), time.monotonic() + LONGEST
            while max(folder.steps) == first and time.monotonic() < deadline:
                time.sleep(0.05)
            for pid in processes():
                with contextlib.suppress(ProcessLookupError):  # torchrun has ended it already
                    if is_of_step(pid, mark):
                        os.kill(pid, signal.SIGTERM)
        code, said = job.wait(LONGEST), (tmp_path / "job.log").read_text()
        status = {1: "paused", 2: "interrupted"}.get(turns, "finished")
        assert folder.status == status, said
        assert (code == 0) == (status != "interrupted"), said
        assert (tmp_path / "requeued").exists() == (status != "finished"), said
        nodes = "1"
    assert turns == 3
    command = [BIN / "python", "-m", "torchrex", "run", "digits/resghmc", "--out", "alone"]
    subprocess.run([*command, *SMALL.split()], cwd=tmp_path, check=True, capture_output=True)
    alone = RunFolder.of(tmp_path / "alone", "digits/resghmc", 0)
    numbers = [
        {name: each.result[name] for name in ("metrics", "swaps", "steps_done")}
        for each in (folder, alone)
    ]
    assert numbers[0] == numbers[1]
    last = max(alone.steps)
    assert jobs.contents_of(folder.checkpoints, last) == jobs.contents_of(alone.checkpoints, last)
    trace = "trace.safetensors"
    assert (folder.path / trace).read_bytes() == (alone.path / trace).read_bytes()
