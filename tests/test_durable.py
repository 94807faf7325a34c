"""Writing: a file is complete or absent, and nothing but that file changes, whatever lies there."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from command import refused, run_command
from fuzzing import limited, standing
from torchrex.checkpoint import Checkpoints
from torchrex.durable import new_file, replace_file, restart_file, write_synced, writing
from torchrex.errors import CheckpointError, RunFolderError
from torchrex.experiments import RunFolder, get_recipe, override, run_recipe
from torchrex.posterior.draws_file import with_another_sha256, write_draws
from torchrex.recording import JsonLines, TensorBoard
from written_runs import write_run

PACKAGE = Path(__file__).parents[1] / "src" / "torchrex"
TOKEN = "0123456789abcdef"
QUICK = ("epochs=2", "burn_in_epochs=1", "hidden=2")
SMALL = ("n_steps=400", "n_runs=4")


def plant(path, kind, other):
    """Puts something in the place of a file; it leads to `other`, or never ends."""
    if kind == "link":
        path.symlink_to(other)
    elif kind == "second name":
        os.link(other, path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server, working_in(path.parent):
            server.bind(path.name)  # a long path is refused


class working_in:  # noqa: N801 - as contextlib.chdir
    def __init__(self, folder):
        self.folder, self.before = folder, Path.cwd()

    def __enter__(self):
        os.chdir(self.folder)

    def __exit__(self, *_):
        os.chdir(self.before)


@pytest.fixture
def mine(tmp_path):
    """Somebody's file, which must stay as it is."""
    path = tmp_path / "mine"
    path.write_text("mine")
    path.chmod(0o600)
    yield path
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("mine", 0o600)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# One file


@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "folder", "socket"])
@pytest.mark.parametrize("name", ["page.html.part", f"page.html.{TOKEN}.part"])
def test_nothing_is_written_through_what_has_a_temporary_name(
    folder, mine, monkeypatch, kind, name
):
    """Not even if the random part was guessed."""
    plant(folder / name, kind, mine)
    draws = iter([TOKEN])
    monkeypatch.setattr(secrets, "token_hex", lambda n: next(draws))
    with limited(5.0):
        if TOKEN in name and kind != "second name":  # a stale regular file is removed
            with pytest.raises(FileExistsError):
                replace_file(folder / "page.html", b"new")
            assert names(folder) == [name]
        else:
            replace_file(folder / "page.html", b"new")
            assert (folder / "page.html").read_bytes() == b"new"


def test_a_link_or_a_second_name_is_replaced_itself(folder, mine):
    plant(folder / "a", "link", mine)
    plant(folder / "b", "second name", mine)
    for name in "ab":
        replace_file(folder / name, b"new")
        assert not (folder / name).is_symlink()
        assert (folder / name).read_bytes() == b"new"


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_what_is_not_a_file_is_not_replaced(folder, mine, kind):
    plant(folder / "a", kind, mine)
    error = pytest.raises(RunFolderError, match=r"a \(.*\); give another name$")
    with limited(5.0), error, writing(folder / "a", RunFolderError, "give another name"):
        replace_file(folder / "a", b"new")
    assert names(folder) == ["a"]
    assert not (folder / "a").is_file()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(folder, fill_disk):
    path = folder / "a"
    replace_file(path, b"old")
    with contextlib.suppress(KeyboardInterrupt), new_file(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    fill_disk("a")
    error = pytest.raises(RunFolderError, match=r"No space left.*; make room, then try again$")
    with error, writing(path, RunFolderError, "choose another"):
        replace_file(path, b"new")
    assert (names(folder), path.read_bytes()) == (["a"], b"old")


WRITER = """
import os, sys, time
from pathlib import Path
from torchrex.durable import new_file
with new_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print(flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_but_not_what_another_writes(folder):
    path = folder / "a"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        (part,) = names(folder)
        replace_file(path, b"new")
        assert names(folder) == ["a", part], "its process lives"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    others = [f"b.{TOKEN}.part", "a.part", f"a.{TOKEN}0.part", f"a.{TOKEN}.part"]
    for name in others[:-1]:
        (folder / name).write_text("")
    (folder / others[-1]).symlink_to(path)
    replace_file(path, b"newer")
    assert names(folder) == sorted(["a", *others])


def test_modes_follow_the_umask_and_long_names_have_room(folder):
    before = os.umask(0o027)
    try:
        for name in ("a", "a" * 255, "ä" * 127):
            replace_file(folder / name, b"")
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o640
        write_synced(folder / "b", b"")
        assert stat.S_IMODE((folder / "b").stat().st_mode) == 0o640
    finally:
        os.umask(before)
    with pytest.raises(OSError, match="too long"):
        replace_file(folder / ("a" * 300), b"")
    assert len(names(folder)) == 4


def test_a_file_of_a_checkpoint_is_new(folder, mine):
    for kind in ("link", "second name", "pipe"):
        plant(folder / kind, kind, mine)
        with limited(5.0), pytest.raises(FileExistsError):
            write_synced(folder / kind, b"new")


@pytest.mark.parametrize("kind", ["link", "second name"])
def test_a_log_that_is_continued_is_a_file_of_its_own(folder, mine, kind):
    """A copy made of hard links (cp -al) keeps what it had."""
    plant(folder / "log", kind, mine)
    with restart_file(folder / "log", b"kept\n") as log:
        log.write(b"more\n")
    assert (folder / "log").read_bytes() == b"kept\nmore\n"


# Everything that is written goes through it


def writes(call):
    """Whether a call in the source opens a file for writing."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    if name == "open":
        return any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes)
    return name in ("write_bytes", "save_file", "copyfile", "copy2", "copytree", "tofile") or (
        name == "save" and isinstance(call.func, ast.Attribute) and ast.unparse(call.func) in SAVES
    )


SAVES = ("np.save", "numpy.save", "torch.save")


def test_no_other_module_opens_files_for_writing():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and writes(node)
    }
    assert found == {"durable.py"}


# Runs and commands


def test_files_of_a_run_have_the_same_mode_and_others_stay(tmp_path, mine):
    """A second name of somebody's file, in the place of an old temporary name."""
    config = override(get_recipe("figure1/case1-resgld"), SMALL)
    path = RunFolder.of(tmp_path / "out", config.recipe, 0).path
    path.mkdir(parents=True)
    for name in ("config.json", "result.json", "draws.safetensors", "trace.safetensors"):
        plant(path / f"{name}.part", "second name", mine)
    run_recipe(config, 0, tmp_path / "out")
    files = [each for each in path.iterdir() if each.suffix != ".part" and each.is_file()]
    umask = os.umask(0)
    os.umask(umask)
    assert {"config.json", "result.json", "draws.safetensors"} <= {each.name for each in files}
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o666 & ~umask}


def test_draws_are_a_safetensors_file(tmp_path):
    """Tensors of any size and type are where the library looks for them."""
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(5).half(),
        "brain": torch.randn(2, 3).bfloat16(),
        "none": torch.empty(0, 4),
        "real": torch.randn(4, 2).T,
        "whole": torch.arange(7),
        "double": torch.randn(1, 1, 1).double(),
    }
    path = tmp_path / "draws.safetensors"
    write_draws(tensors, {"n_steps": 3}, path)
    found = load_file(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(path, framework="pt") as file:
        words = file.metadata()
    assert json.loads(words["torchrex"]) == {"n_steps": 3}
    assert with_another_sha256(found, words) == []


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
@pytest.mark.parametrize("name", ["page.html", "c.md", "c.json"])
def test_looking_at_runs_writes_one_file(tmp_path, mine, monkeypatch, capsys, name, kind):
    config = get_recipe("digits/sghmc")
    folders = [write_run(tmp_path / out, config, metrics={"nll": 1.0}) for out in "ab"]
    plant(tmp_path / f"{name}.part", kind, mine)
    before = standing(tmp_path)
    words = ["report", tmp_path / "a", "--doctor", "none"] if "page" in name else ["compare"]
    words += folders if "page" not in name else []
    with limited(60.0):
        code, _, err = run_command(monkeypatch, capsys, *words, "--out", tmp_path / name)
    assert code == 0, err
    after = standing(tmp_path)
    assert {key for key in before | after if before.get(key) != after.get(key)} == {name}


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_a_run_with_something_else_in_the_place_of_its_file(tmp_path, mine, kind):
    pytest.importorskip("sklearn")
    config = override(get_recipe("digits/sghmc"), QUICK)
    path = RunFolder.of(tmp_path / "out", config.recipe, 0).path
    for name in ("config.json", "log.jsonl"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        path.mkdir(parents=True)
        plant(path / name, kind, mine)
        with limited(30.0), pytest.raises(RunFolderError) as error:
            run_recipe(config, 0, tmp_path / "out", log=["jsonl"])
        assert len(str(error.value).splitlines()) == 1


def numbers_of(path):
    result = json.loads((path / "result.json").read_bytes())
    metrics = {k: v for k, v in result["metrics"].items() if not k.startswith("seconds_per_")}
    tensors = {each.name: load_file(each) for each in path.glob("*.safetensors")}
    return metrics, {
        name: {key: tensor.tolist() for key, tensor in each.items()}
        for name, each in tensors.items()
    }


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("digits/sghmc", "trace.safetensors"),
        ("digits/sghmc", "result.json"),
        ("figure1/case1-resgld", "draws.safetensors"),
        ("figure1/case1-resgld", "result.json"),
    ],
)
def test_a_full_disk_at_the_end_says_what_helps(tmp_path, monkeypatch, fill_disk, recipe, name):
    pytest.importorskip("sklearn")
    config = override(get_recipe(recipe), QUICK if "digits" in recipe else SMALL)
    alone = numbers_of(run_recipe(config, 0, tmp_path / "alone").path)
    fill_disk(name)
    with pytest.raises(RunFolderError, match=r"No space left.*; make room, then .*resume") as e:
        run_recipe(config, 0, tmp_path / "out")
    monkeypatch.undo()
    assert len(str(e.value).splitlines()) == 1
    assert not list((tmp_path / "out").rglob("*.part"))
    assert numbers_of(run_recipe(config, 0, tmp_path / "out", resume=True).path) == alone


def test_a_full_disk_during_a_log(tmp_path):
    """One line, and an error of ours."""
    log = JsonLines(tmp_path / "log.jsonl")
    log._out, log._began = open("/dev/full", "wb", buffering=0), 0.0  # noqa: SIM115
    with pytest.raises(RunFolderError, match=r"log\.jsonl .*make room, then resume the run"):
        log._write(kind="end", step=1)
    log._out.close()


def test_a_pipe_in_the_place_of_a_log_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    os.mkfifo(tmp_path / "tensorboard")
    report = SimpleNamespace(pairs=(), steps_before=0)
    run = SimpleNamespace(n_steps=3, exchange=lambda: report)
    with limited(20.0), pytest.raises(RunFolderError, match="choose another place for the log"):
        TensorBoard(tmp_path / "tensorboard")._open(SimpleNamespace(run=run))


@pytest.mark.parametrize("length", [300, 5000])
def test_names_that_are_too_long(tmp_path, monkeypatch, capsys, length):
    long, config = tmp_path / ("x" * length), get_recipe("digits/sghmc")
    folders = [write_run(tmp_path / out, config, metrics={"nll": 1.0}) for out in "ab"]
    for words in (
        ("run", "digits/sghmc", "--out", long),
        ("report", tmp_path / "a", "--doctor", "none", "--out", long),
        ("reproduce", "table1", "--rebuild", "--out", long),
        ("data", "fetch", "cifar10", "--to", long),
    ):
        refused(run_command(monkeypatch, capsys, *words), "too long")
    code, _, err = run_command(monkeypatch, capsys, "compare", *folders, "--out", f"{long}.md")
    assert (code, len(err.splitlines())) == (2, 1)
    with pytest.raises(CheckpointError, match="too long"):
        Checkpoints(long).save(1, {})
