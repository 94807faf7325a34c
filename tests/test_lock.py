"""One owner per folder: who is refused, that nobody else ever is, and that no lock stays."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import torchrex as tr
import torchrex.lock
from command import refused, run_command
from densities import MIXTURE
from faults import jobs
from faults.fighting import RECIPE, Fights, at_once, only_run
from ranks import Ranks, run_ranks
from torchrex.errors import RunFolderError
from torchrex.experiments import RunFolder, get_recipe, override, run_recipe
from torchrex.experiments.runner import run_in
from torchrex.lock import one_owner
from torchrex.report.reader import load_run
from torchrex.runs.config import RunOptions, to_json
from torchrex.runs.folder import RunResult, RunWriter, added_later, config_sha256

SOURCE = str(Path(torchrex.lock.__file__).parents[1])
HOLD = """
import os, subprocess, sys
from pathlib import Path
from torchrex.lock import one_owner

with one_owner(Path(sys.argv[1]), Path("folder")):
    {more}
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
FORK = "os.fork() or (os.close(1), os.read(0, 1), os._exit(0))"
EXEC = "subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, close_fds=False)"
TARGET = {"target": MIXTURE, "temperatures": (1.0, 2.0), "lr": 0.01, "n_steps": 60}


@contextlib.contextmanager
def held(lock, more="pass"):
    """Another process holds it; its number."""
    words = [sys.executable, "-c", HOLD.format(more=more), str(lock)]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment, start_new_session=True, **pipes) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def words_of_refusal(lock):
    with pytest.raises(RunFolderError) as refusal, one_owner(lock, Path("folder")):
        pass
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_the_second_process_learns_who_is_first_and_a_killed_one_holds_nothing(tmp_path):
    lock = tmp_path / "a" / "lock"
    with held(lock) as (process, number):
        said = words_of_refusal(lock)
        assert f"is used by process {number} on host {platform.node()} since 20" in said
        assert said.endswith("; wait for it or choose another folder")
        process.kill()
        process.wait()
        assert lock.exists()
        with one_owner(lock, tmp_path):
            assert f"process {os.getpid()} on" in lock.read_text()
    assert os.listdir(lock.parent) == []


@pytest.mark.parametrize("more", [FORK, EXEC], ids=["forked", "started"])
def test_a_child_process_keeps_no_lock(tmp_path, more):
    """Those that load data are forked, and live on for seconds when their parent is killed."""
    with held(tmp_path / "lock", more) as (process, _):
        words_of_refusal(tmp_path / "lock")
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        process.stdout.read()  # ends when the child has begun to run, and closed it
        os.killpg(process.pid, 0)  # the child lives
        with one_owner(tmp_path / "lock", tmp_path):
            pass


def test_a_forked_process_leaves_the_lock_to_its_parent(tmp_path):
    lock = tmp_path / "lock"
    with one_owner(lock, tmp_path):
        stack = contextlib.ExitStack()
        stack.enter_context(one_owner(tmp_path / "second", tmp_path))
        if (child := os.fork()) == 0:
            try:
                stack.close()  # as at the end of a block
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with held(tmp_path / "third"):  # a process that works
            assert (tmp_path / "second").exists()
        script = "from torchrex.lock import *; one_owner(Path('second'), Path('x')).__enter__()"
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": SOURCE},
            capture_output=True,
            text=True,
        )
        assert f"is used by process {os.getpid()}" in done.stderr
        stack.close()
    assert not lock.exists()
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("locks", [True, False], ids=["with flock", "without"])
def test_two_threads_are_two_owners(tmp_path, monkeypatch, caplog, locks):
    if not locks:
        monkeypatch.setattr(fcntl, "flock", _no_locks)
    monkeypatch.setattr(torchrex.lock, "_warned", False)
    said = []
    (tmp_path / "link").symlink_to(tmp_path)
    with one_owner(tmp_path / "lock", tmp_path):
        second = threading.Thread(
            target=lambda: said.append(words_of_refusal(tmp_path / "link" / "lock"))
        )
        second.start()
        second.join()
        with one_owner(tmp_path / "other", tmp_path):
            pass
    assert f"another run in this process ({os.getpid()})" in said[0]
    assert ["without locks" in record.message for record in caplog.records] == [True] * (not locks)


def _no_locks(descriptor, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("what", ["link", "hard link", "pipe", "folder", "link to nothing"])
def test_what_is_no_lock_file_is_not_touched(tmp_path, what):
    other, lock = tmp_path / "other", tmp_path / "lock"
    other.write_text("mine")
    {
        "link": lambda: lock.symlink_to(other),
        "hard link": lambda: os.link(other, lock),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
        "link to nothing": lambda: lock.symlink_to(tmp_path / "nothing"),
    }[what]()
    assert "cannot lock" in words_of_refusal(lock)
    assert other.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["lock", "other"]


def test_a_folder_that_cannot_be_written_is_left_to_whoever_writes_there(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with one_owner(folder / "lock", folder):
            pass
    assert os.listdir(tmp_path) == ["file"]


FIGHT = """
import os, sys
from pathlib import Path
from torchrex.errors import RunFolderError
from torchrex.lock import one_owner

lock, inside, count = (Path(word) for word in sys.argv[1:4])
os.fsync = lambda descriptor: None
print(flush=True), sys.stdin.readline()
done = 0
while done < 50:
    try:
        with one_owner(lock, lock.parent):
            inside.touch(exist_ok=False)  # an error if another is inside
            count.write_text(str(int(count.read_text()) + 1))
            inside.unlink()
            done += 1
    except RunFolderError:
        pass
"""


def test_never_two_inside_although_the_file_and_its_folder_come_and_go(tmp_path):
    lock, inside, count = tmp_path / "a" / "b" / "lock", tmp_path / "inside", tmp_path / "count"
    count.write_text("0")
    words = [sys.executable, "-c", FIGHT, lock, inside, count]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    fighters = [subprocess.Popen(words, env=environment, **pipes) for _ in range(3)]
    for each in fighters:
        each.stdout.readline()
    for each in fighters:
        each.stdin.write(b"\n")
        each.stdin.flush()
    ends = [each.communicate(timeout=60) for each in fighters]
    assert [each.returncode for each in fighters] == [0, 0, 0], ends
    assert count.read_text() == "150"
    assert not list(tmp_path.rglob("lock"))


# Runs


def train_small(folder, **options):
    return jobs.network(folder, n_steps=8, every=4, **options)


def sample_small(folder, **options):
    return tr.sample(**TARGET, checkpoints=folder, compiled=False, **options)


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path):
    alone, said = sample_small(tmp_path / "alone"), []

    def meanwhile(done, total):
        with pytest.raises(RunFolderError) as refusal:
            sample_small(tmp_path / "both", resume=False)
        said.append(str(refusal.value))

    first = sample_small(tmp_path / "both", progress=meanwhile)
    assert first.values.equal(alone.values)
    assert f"{tmp_path / 'both'} is used by another run in this process" in said[0]
    assert sample_small(tmp_path / "both").values.equal(alone.values)  # finished: no lock stays
    names = [sorted(os.listdir(tmp_path / name)) for name in ("both", "alone")]
    assert names[0] == names[1]


@pytest.mark.parametrize("run", [train_small, sample_small])
def test_train_and_sample_refuse_a_folder_that_is_in_use(tmp_path, run):
    with held(tmp_path / "run" / ".torchrex.lock") as (process, number):
        with pytest.raises(RunFolderError, match=f"is used by process {number}"):
            run(tmp_path / "run")
        assert os.listdir(tmp_path / "run") == [".torchrex.lock"]
        process.kill()
        process.wait()
        run(tmp_path / "run")
    assert all(name.startswith("step=") for name in os.listdir(tmp_path / "run"))


SGLD, SMALL = RECIPE, ("n_steps=400", "n_runs=4")


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_command_that_writes_a_run_is_refused(monkeypatch, capsys, tmp_path):
    def cli(*words):
        words = (*words, "--out", tmp_path)
        return run_command(monkeypatch, capsys, *words, settings=SMALL)

    assert cli("run", SGLD)[0] == 0
    folder = RunFolder.of(tmp_path, SGLD, 0)
    folder.replacement.path.mkdir()  # another job is about to write there
    with held(tmp_path / SGLD / ".seed=0.lock") as (_, number):
        before = contents(tmp_path)
        line = f"{folder.path} is used by process {number} on host"
        for how in ((), ("--overwrite",), ("--resume",), ("--resume", "--seeds", "2")):
            refused(cli("run", SGLD, *how), line, "choose another --out")
        refused(cli("reproduce", "figure1", "--only", "case1-sgld", "--overwrite"), line)
        assert contents(tmp_path) == before
        assert folder.replacement.path.is_dir()
    assert cli("run", SGLD, "--resume")[0] == 0  # the killed process has left its file
    assert os.listdir(folder.path.parent) == ["seed=0"]


def test_two_threads_at_once_leave_the_run_of_one(tmp_path):
    barrier, ends = threading.Barrier(2), {}

    def run(n_steps, **options):
        config = override(get_recipe(SGLD), [f"n_steps={n_steps}", "n_runs=4"])
        barrier.wait()
        try:
            ends[n_steps] = run_recipe(config, 0, tmp_path, **options).status
        except RunFolderError as error:
            ends[n_steps] = str(error)

    for _ in range(5):
        both = [threading.Thread(target=run, args=(400,), kwargs={"overwrite": True})]
        both += [threading.Thread(target=run, args=(300,), kwargs={"overwrite": True})]
        for each in both:
            each.start()
        for each in both:
            each.join()
        last = [n_steps for n_steps, end in ends.items() if end == "finished"][-1]
        assert all(end == "finished" or "is used by" in end for end in ends.values()), ends
        assert only_run(tmp_path).draws.n_steps == last


@pytest.mark.slow
def test_two_commands_at_once_leave_the_run_of_one(tmp_path):
    for k in range(8):
        out = tmp_path / str(k) / "out"
        out.parent.mkdir()
        ends = at_once(out, "--set n_steps=400", "--set n_steps=300 --overwrite")
        assert any(code == 0 for code, _ in ends), ends
        assert all(
            code == 0 or "is used by" in words or "already holds" in words for code, words in ends
        ), ends
        assert only_run(out).draws.n_steps == (300 if ends[1][0] == 0 else 400)


@pytest.mark.slow
def test_six_fights_for_one_folder(tmp_path):
    """The same as benchmarks/kills.py, which has a hundred."""
    fights = Fights(tmp_path, random.Random())
    assert all(fights.fight() for _ in range(6))


@pytest.mark.slow
def test_of_three_that_resume_at_once_one_works(tmp_path):
    """One that comes when another has finished finds nothing to do, and says so."""
    out, settings = tmp_path / "out", "--set n_steps=200000 --set checkpoint_every=1000"
    at_once(out, f"{settings} --budget 1s")
    assert RunFolder.of(out, SGLD, 0).status == "paused"
    ends = at_once(out, *[f"{settings} --resume"] * 3)
    assert sorted(code for code, _ in ends) == [0, 2, 2], ends
    assert ["is used by" in words for code, words in ends if code] == [True, True]
    assert RunFolder.of(out, SGLD, 0).status == "finished"


@pytest.mark.slow
def test_all_ranks_learn_of_the_refusal(tmp_path):
    for job in (jobs.network, jobs.mixture):
        folder = tmp_path / job.__name__
        with held(folder / ".torchrex.lock") as (_, number):
            said = run_ranks(2, job, tmp_path, str(folder))
        assert all(f"is used by process {number}" in each["said"] for each in said)
        assert [each["error"] for each in said] == ["RunFolderError"] * 2
        assert run_ranks(2, job, tmp_path, str(folder))[0].get("status") == "finished"


@pytest.mark.slow
def test_a_killed_job_of_two_ranks_leaves_no_lock(tmp_path):
    folder = tmp_path / "run"
    job = Ranks(2, jobs.network, tmp_path, str(folder), 100_000, 20)
    while not list(folder.glob("step=*")):
        assert all(each.is_alive() for each in job.processes)
        time.sleep(0.05)
    with pytest.raises(RunFolderError, match="is used by process"):
        jobs.network(folder, 100_000)
    job.kill()
    n_steps = tr.Checkpoints(folder).steps()[-1] + 20
    said = run_ranks(2, jobs.network, tmp_path, str(folder), n_steps, 20)
    assert [each.get("status") for each in said] == ["finished"] * 2


# A result names its config


def test_a_result_of_another_config_is_not_used(monkeypatch, capsys, tmp_path):
    settings = ["n_steps=60", "n_runs=2"]
    run_recipe(override(get_recipe(SGLD), settings), 0, tmp_path)
    folder = RunFolder.of(tmp_path, SGLD, 0)
    assert load_run(folder.path).result["config_sha256"] == config_sha256(folder.config)
    text = (folder.path / "config.json").read_text()
    (folder.path / "config.json").write_text(text.replace('"n_steps": 60', '"n_steps": 61'))
    run = load_run(folder.path)
    assert (run.status, run.result, run.damaged) == ("damaged", None, ("result.json",))
    assert "it is the result of another config.json" in " ".join(run.problems)
    assert folder.status == "damaged"
    again = ("run", SGLD, "--resume", "--out", tmp_path)
    again = run_command(monkeypatch, capsys, *again, settings=["n_steps=61", "n_runs=2"])
    refused(again, "it is the result of another config.json", "--overwrite")
    result = json.loads((folder.path / "result.json").read_text())
    del result["config_sha256"]  # as older versions wrote it
    (folder.path / "result.json").write_text(json.dumps(result))
    assert (load_run(folder.path).status, folder.status) == ("finished", "finished")


def test_a_run_of_an_older_version_keeps_its_config_when_it_is_resumed(tmp_path):
    """Its result names that file; a kill may come between a new config.json and a new result."""
    run = run_in(tmp_path, get_recipe(SGLD), 0)
    values = {**to_json(run.config)}
    for name in added_later(run.config):
        del values[name]
    run.folder.make()
    run.folder.write_text("config.json", older := json.dumps(values))
    writer = RunWriter(run, RunOptions(resume=True))
    writer.begin()
    writer.write(RunResult(), "paused", 1.0)
    assert (run.folder.path / "config.json").read_text() == older
    assert run.folder.result["config_sha256"] == config_sha256(values)
    RunWriter(run, RunOptions(overwrite=True)).begin()
    assert run.folder.config == to_json(run.config)
