"""Random `kill -9` of random ranks at random moments, and the proof that nothing was lost.

`Killer` kills a call of `train` or `sample`, which resumes, perhaps on another number of ranks,
until it finishes; then it begins anew. After every kill the survivors must end by themselves and
name the rank, no process may be left, and the newest checkpoint that counts must be, byte for byte,
one of the run that was never disturbed.

`CommandKiller` kills the command line, alone or under torchrun, from its first instruction on,
while it replaces a finished run. After every kill all processes must end by themselves, and a
finished run must be there: the old one or the new one, nothing mixed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torchrex as tr
from command import set_words
from faults.jobs import alone, contents_of, folders_of
from ranks import Ranks
from torchrex.experiments import RunFolder
from torchrex.report.reader import load_run

LONGEST = 120.0  # seconds in which a run or its survivors must end
ALL = 10**6  # checkpoints to keep
SOON = 15.0  # seconds after a kill in which all processes of a command must be gone
MARK = "TORCHREX_KILLED_JOB"  # in the environment of a command, by which its processes are known


def announced(job, sign, folder):
    """The job, after a sign that all ranks have joined: if one is killed before, the others
    wait for their time-out.
    """
    process_group = tr.distributed.join()
    process_group.gather(None)
    Path(f"{sign}-{process_group.rank}").touch()
    return job(folder)


def processes():
    """All there are."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def left_over(before, seconds=10.0):
    """Processes started by this one, or by those, that were not there before; some may be orphans.
    They have some time to be reaped.
    """
    deadline = time.monotonic() + seconds
    while (left := _descendants(before) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _descendants(before):
    known = {}
    for pid in processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, parent, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
            known[pid] = (int(parent), int(group))

    def is_mine(pid):
        asked = top = pid
        while pid in known and pid != os.getpid():
            top = pid
            pid, group = known[pid]
            if pid == 1:  # an orphan is a child of the first process, but stays in our group
                ours = top not in before and group == os.getpgrp()
                return ours and not _is_of_another_worker(asked)
        return pid == os.getpid()

    return {pid for pid in known if is_mine(pid)}


def _is_of_another_worker(pid):
    """Other workers of pytest have orphans of their own."""
    mine = f"PYTEST_XDIST_WORKER={os.environ.get('PYTEST_XDIST_WORKER')}".encode()
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        told = [entry for entry in entries if entry.startswith(mine[:20])]
        return bool(told) and told != [mine]
    return False


class Killer:
    """Kills a job until there were `n_kills` kills, each followed by an exact resume."""

    def __init__(self, job, folder, *, sizes=(1, 2, 4), seed=0, timeout=60.0):
        self.job, self.folder, self.sizes, self.timeout = job, Path(folder), sizes, timeout
        self.random = random.Random(seed)
        self.whole = self.folder / "whole"
        alone(job, self.whole, keep=ALL)
        self.last = tr.Checkpoints(folders_of(self.whole)[0]).steps()[-1]
        self.kills, self.missed, self.runs, self.moves = [], 0, 0, Counter()
        self._took = dict.fromkeys(sizes, 1.0)  # seconds from joining to the end; corrected later
        Ranks(1, os.getpid, self.folder).wait(LONGEST)  # the server of forks is there from now on
        self._before = processes()

    def kill(self, n_kills, tell=None):
        self._tell = tell or (lambda kill: None)
        while len(self.kills) < n_kills:
            self._one_run(n_kills)
        return self.kills

    def _one_run(self, n_kills):
        place = self.folder / f"run-{self.runs}"
        size, finished = self.random.choice(self.sizes), False
        while not finished:
            finished = self._one_life(place, size, len(self.kills) < n_kills)
            before, size = size, self.random.choice(self.sizes)
            self.moves[before, size] += not finished
        self.runs += 1
        for here in folders_of(self.whole):
            there = place / here.relative_to(self.whole)
            assert contents_of(there, self.last) == contents_of(here, self.last), (
                f"run {self.runs - 1} ended otherwise"
            )

    def _one_life(self, place, size, kills):
        """Whether the job finished before it was killed."""
        sign = self.folder / f"joined-{time.monotonic_ns()}"
        ranks = Ranks(
            size, announced, self.folder, self.job, str(sign), str(place), timeout=self.timeout
        )
        deadline = time.monotonic() + LONGEST
        while not all(Path(f"{sign}-{rank}").exists() for rank in range(size)):
            assert time.monotonic() < deadline, "the ranks did not join"
            time.sleep(0.002)
        began, victim = time.monotonic(), self.random.randrange(size)
        wait = self.random.uniform(0, self._took[size]) if kills else LONGEST
        ranks.processes[victim].join(wait)
        was_alive = ranks.processes[victim].is_alive()
        if was_alive:
            ranks.processes[victim].kill()
        struck = time.monotonic()
        said = ranks.wait(LONGEST)
        assert not (left := left_over(self._before)), f"processes {left} are left"
        finished = [each is not None and each.get("status") == "finished" for each in said]
        if any(finished):
            self._took[size] = 0.8 * self._took[size] + 0.2 * (struck - began)
            self.missed += kills
            # One that was killed on its way out has done its work, and so have those that saw it
            # go: all of them saved the last step before the first could leave. Whether it is the
            # right one is seen when the run has ended.
            others = [each or {} for rank, each in enumerate(said) if rank != victim]
            rest = [each for each in others if each.get("status") != "finished"]
            saw_it = [
                each.get("error") == "RankError" and f"rank {victim} " in each["said"]
                for each in rest
            ]
            assert all(finished) or (was_alive and all(saw_it)), said
            return True
        self._took[size] = max(self._took[size], struck - began)
        self._judge(place, said, victim)
        newest = [self._newest(here) or 0 for here in folders_of(place)]
        self.kills.append(
            {
                "ranks": size,
                "victim": victim,
                "seconds_after_joining": round(struck - began, 3),
                "seconds_until_all_had_ended": round(time.monotonic() - struck, 3),
                "resumes_from_step": min(newest, default=0),
            }
        )
        self._tell(self.kills[-1])
        return False

    def _judge(self, place, said, victim):
        others = [each for rank, each in enumerate(said) if rank != victim]
        assert said[victim] is None, said
        for each in others:
            assert each["error"] == "RankError", said
            assert each["said"].startswith(f"rank {victim} "), said
        assert sum(each["speaks"] for each in others) == min(1, len(others)), said
        for here in folders_of(place):
            newest, whole = self._newest(here), self.whole / here.relative_to(place)
            if newest is not None:
                assert contents_of(here, newest) == contents_of(whole, newest), f"step {newest}"

    def _newest(self, place):
        """The step from which it goes on; nothing that counts as complete may turn out damaged."""
        records = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = records.append
        logging.getLogger("torchrex").addHandler(handler)
        try:
            found = tr.Checkpoints(place).load_newest()
        finally:
            logging.getLogger("torchrex").removeHandler(handler)
        assert not records, [record.getMessage() for record in records]
        return None if found is None else found.step

    def summary(self):
        kills = self.kills
        moved = sum(n for (before, after), n in self.moves.items() if before != after)
        return {
            "kills": len(kills),
            "exact_resumes": len(kills),  # another would have raised
            "runs": self.runs,
            "kills_on_ranks": {n: sum(kill["ranks"] == n for kill in kills) for n in self.sizes},
            "kills_of_rank_0": sum(kill["victim"] == 0 for kill in kills),
            "resumes_on_another_number_of_ranks": moved,
            "before_the_first_checkpoint": sum(kill["resumes_from_step"] == 0 for kill in kills),
            "too_late_to_hit": self.missed,
            "longest_seconds_until_all_had_ended": max(
                kill["seconds_until_all_had_ended"] for kill in kills
            ),
        }


class CommandKiller:
    """Kills `torchrex run RECIPE --overwrite` where a finished run of other settings is."""

    def __init__(self, recipe, settings, old, folder, *, sizes=(1, 2, 4), seed=0):
        self.recipe, self.settings, self.sizes = recipe, settings, sizes
        self.folder, self.random = Path(folder), random.Random(seed)
        self.kills, self.missed, self.runs = [], 0, 0
        self._took = {}
        for size in sizes:
            began = time.monotonic()
            self._start(size, f"whole-{size}", "--overwrite").wait(LONGEST)
            self._took[size] = time.monotonic() - began
        self._start(1, "old", settings=[*settings, *old]).wait(LONGEST)
        self.old, self.new = self._content("old"), self._content("whole-1")
        assert self.old != self.new
        for size in sizes:
            assert self._content(f"whole-{size}") == self.new

    def kill(self, n_kills, tell=lambda kill: None):
        while len(self.kills) < n_kills:
            out = f"run-{self.runs}"
            shutil.copytree(self.folder / "old", self.folder / out)
            while self._content(out) != self.new:
                self._one_life(out, tell, kills=len(self.kills) < n_kills)
            shutil.rmtree(self.folder / out)
            self.runs += 1
        return self.kills

    def _one_life(self, out, tell, *, kills):
        size, found = self.random.choice(self.sizes), RunFolder.of(*self._run(out))
        how = "--resume" if found.active != found else "--overwrite"
        job, began = self._start(size, out, how), time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(self.random.uniform(0, 1.1 * self._took[size]) if kills else LONGEST)
        if (code := job.poll()) is not None:
            assert code == 0, self._said(out)
            self.missed += kills
            assert not self._processes(out)
            return
        victim = self.random.choice(self._processes(out) or [job.pid])
        before = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        while left := self._processes(out):
            assert time.monotonic() - before < SOON, f"processes {left} are left: {self._said(out)}"
            time.sleep(0.02)
        job.wait()
        if job.returncode == 0:  # the victim was on its way out
            self.missed += 1
            return
        ours = f'File "{Path(tr.__file__).parent}'  # torchrun has a traceback of its own
        assert ours not in self._said(out), self._said(out)
        assert self._content(out) in (self.old, self.new)
        kill = {"ranks": size, "how": how, "torchrun": size > 1 and victim == job.pid}
        kill["seconds_after_start"] = round(before - began, 3)
        kill["seconds_until_all_had_ended"] = round(time.monotonic() - before, 3)
        self.kills.append(kill)
        tell(kill)

    def _start(self, size, out, *how, settings=None):
        python = [sys.executable, "-m", "torchrex"]
        if size > 1:
            python = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            python += ["--nproc-per-node", str(size), "-m", "torchrex"]
        words = [*python, "run", self.recipe, *set_words(settings or self.settings), *how]
        environment = {**os.environ, MARK: str(self.folder / out), "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"{out}.log", "w") as log:
            return subprocess.Popen(
                [*words, "--out", str(self.folder / out)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def _processes(self, out):
        """Those of a command that live. Ranks of torchrun are in sessions of their own."""
        mark, found = f"{MARK}={self.folder / out}".encode(), []
        for pid in processes():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def _said(self, out):
        return (self.folder / f"{out}.log").read_text()

    def _run(self, out):
        return self.folder / out, self.recipe, 0

    def _content(self, out):
        """All numbers of the finished run that is there, and its settings."""
        run = load_run(RunFolder.of(*self._run(out)).path)
        assert (run.status, run.problems) == ("finished", ()), (run.status, run.problems)
        names = ("metrics", "swaps", "curves", "steps_done", "config_sha256")
        numbers = {name: run.result.get(name) for name in names}
        arrays = {file.name: file.read_bytes() for file in run.path.glob("*.safetensors")}
        saved = sorted(run.path.glob("checkpoints/step=*"))
        weights = [contents_of(each.parent, int(each.name[5:])) for each in saved]
        return json.dumps([run.config, numbers]), arrays, weights

    def summary(self):
        ends = [kill["seconds_until_all_had_ended"] for kill in self.kills]
        return {
            "kills": len(self.kills),
            "exact_resumes": len(self.kills),  # another would have raised
            "runs": self.runs,
            "kills_on_ranks": {n: sum(k["ranks"] == n for k in self.kills) for n in self.sizes},
            "kills_of_torchrun": sum(kill["torchrun"] for kill in self.kills),
            "kills_in_the_first_two_seconds": sum(
                kill["seconds_after_start"] < 2 for kill in self.kills
            ),
            "kills_of_a_run_that_resumed": sum(kill["how"] == "--resume" for kill in self.kills),
            "too_late_to_hit": self.missed,
            "longest_seconds_until_all_had_ended": max(ends),
        }
