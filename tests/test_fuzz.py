"""Files from strangers: many mutated ones of every kind, and by name what was found with more.

`benchmarks/fuzz.py` does the same with 10,000. Nothing may crash, hang, be executed, or be written
outside of its folder.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import nn

from fuzzing import (
    SPECIAL,
    TINY,
    Finding,
    checkpoint_state,
    limited,
    look_at_views,
    make_kinds,
    standing,
    try_one,
)
from torchrex.checkpoint import Checkpoints, one_line
from torchrex.errors import CheckpointError, DataError, RunFolderError, TorchrexError
from torchrex.experiments import RunFolder, get_recipe, run_recipe
from torchrex.posterior import Draws, DrawStore
from torchrex.recording import read_log
from torchrex.report.reader import load_run
from torchrex.vision.data import load_images

PACKAGE = Path(__file__).parents[1] / "src" / "torchrex"
INPUTS = 100  # of a kind
NAMES = (
    *("checkpoint", "sealed checkpoint", "run of a density", "run of a network"),
    *("draws and trace of a run", "trace of a network", "views of a density", "views of a network"),
    *("draws", "trace", "store", "sealed store", "cache", "sealed cache", "log"),
)
ESCAPE = "\x1b[2J\x1b]0;owned\x07"
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    pytest.importorskip("sklearn")
    with ExitStack() as stack:
        yield {kind.name: kind for kind in make_kinds(tmp_path_factory.mktemp("specimens"), stack)}


@pytest.fixture
def copy(kinds, tmp_path):
    """A copy of the specimen of a kind."""

    def of(name):
        return Path(shutil.copytree(kinds[name].folder, tmp_path / kinds[name].folder.name))

    return of


def message(call, kind=TorchrexError) -> str:
    """What an error of ours says, in one line, at once."""
    with pytest.raises(kind) as error, limited(20.0):
        call()
    assert str(error.value).isprintable()
    return str(error.value)


# Many inputs


@slow
@pytest.mark.parametrize("name", NAMES)
def test_mutated_files(kinds, name, tmp_path):
    assert set(kinds) == set(NAMES)
    kind = kinds[name]
    original = kind.look(kind.folder)
    outcomes = Counter()
    for k in range(INPUTS // 2 if name.startswith("views") else INPUTS):
        place = tmp_path / str(k)
        place.mkdir()
        outcomes[try_one(kind, original, place, Random(f"{name} {k}")).outcome] += 1
    assert outcomes["equal"] < 0.7 * outcomes.total()  # they were mutated
    assert set(outcomes) <= {"equal", "told", "other", "shown", "refused"}
    for special in SPECIAL if name != "log" else ():
        for file in dict.fromkeys(kind.files):
            place = tmp_path / f"{special} {Path(file).name}"
            place.mkdir()
            trial = try_one(replace(kind, files=(file,)), original, place, Random(0), special)
            is_known = trial.outcome in ("refused", "told")
            assert is_known or special == "gone" or kind.may_differ, trial


class Leaky:
    """Readers with every fault that a trial must see."""

    def executes(self, folder):
        os.mkdir(folder / "made")

    def crashes(self, folder):
        raise KeyError("a")

    def hangs(self, folder):
        while True:
            pass

    def talks(self, folder):
        raise CheckpointError("two\nlines")

    def escapes(self, folder):
        raise CheckpointError(ESCAPE)

    def lies(self, folder):
        return "something else"

    def warns(self, folder):
        np.float32(1) / np.float32(0)


@slow
@pytest.mark.parametrize(
    "fault", ["executes", "crashes", "hangs", "talks", "escapes", "lies", "warns"]
)
def test_a_reader_with_a_fault_is_found(kinds, tmp_path, fault, monkeypatch):
    monkeypatch.setattr("fuzzing.SECONDS", 0.2)
    kind = replace(kinds["draws"], look=getattr(Leaky(), fault))
    with pytest.raises(Finding):
        try_one(kind, None if fault != "lies" else "the original", tmp_path, Random(0), "bytes")


# Checkpoints


@pytest.fixture
def saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (20, 30):
        checkpoints.save(step, checkpoint_state())
    return checkpoints


def test_a_link_in_the_place_of_a_checkpoint_takes_nothing_away_elsewhere(saved, tmp_path):
    """DONE was removed through such a link, wherever it pointed, when the next checkpoint was
    saved.
    """
    other = tmp_path / "precious"
    shutil.copytree(saved.path_of(20), other / "step=000000005")
    (other / "DONE").write_text("mine")
    for name in (".step=000000001.part", "step=000000002", ".step=000000003.old", "step=000000004"):
        (saved.folder / name).symlink_to(other)
    (saved.folder / "step=000000025").symlink_to(other / "step=000000005")
    before = standing(other)
    assert saved.steps() == [20, 30]
    for step in (40, 50, 60):
        saved.save(step, checkpoint_state())
    assert standing(other) == before
    assert saved.steps() == [50, 60]
    (saved.folder / ".step=000000070.part").symlink_to(other)
    assert "cannot save" in message(lambda: saved.save(70, checkpoint_state()), CheckpointError)
    assert standing(other) == before


def test_a_file_that_is_too_long_is_not_read(saved):
    with open(saved.path_of(30) / "shared.safetensors", "r+b") as file:
        file.truncate(2**38)  # it takes no space on the disk, and would in memory
    assert saved.load_newest().step == 20


# Run folders


def test_a_recipe_names_no_folder_outside(tmp_path):
    outside = ("../../x", "/etc/x", "a/../../b", "..", "./a", "~/x", "C:\\x")
    for recipe in (*outside, "", "a//b", "a\0b", "a/", ESCAPE, "a\n"):
        message(lambda recipe=recipe: RunFolder.of(tmp_path, recipe, 0), RunFolderError)
    message(lambda: RunFolder.of(tmp_path, "a", "../1"), RunFolderError)
    good = RunFolder.of(tmp_path, "digits/re-sghmc_2.0", 3).path
    assert good == tmp_path / "digits/re-sghmc_2.0" / "seed=3"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    ["config.json.part", "result.json.part", "log.jsonl", "checkpoints", "trace.safetensors.part"],
)
def test_nothing_is_written_through_a_link_in_a_run_folder(tmp_path, name):
    pytest.importorskip("sklearn")
    config = replace(get_recipe("digits/sghmc"), epochs=1, burn_in_epochs=0, hidden=2)
    folder = RunFolder.of(tmp_path / "out", config.recipe, 0).path
    folder.mkdir(parents=True)
    other = tmp_path / "precious"
    other.mkdir()
    if name == "checkpoints":
        (folder / name).symlink_to(other)
    else:
        (other / "file").write_text("mine")
        (folder / name).symlink_to(other / "file")
    before = standing(tmp_path)
    assert "is a link" in message(
        lambda: run_recipe(config, 0, tmp_path / "out", resume=True, log=["jsonl"]), RunFolderError
    )
    assert standing(other) == {
        k.removeprefix("precious/"): v for k, v in before.items() if k.startswith("precious/")
    }


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


@slow
@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("result.json", {"metrics": {"w2": float("nan")}}),
        ("result.json", {"metrics": {"w2": 10**400}}),
        ("result.json", {"device": "\ud800"}),
        ("result.json", {"error": ESCAPE, "status": ESCAPE, "device": "<script>alert(1)</script>"}),
        ("result.json", {"recipe": "<script>", "date": '"><img src=x onerror=alert(1)>'}),
        (
            "result.json",
            {"versions": {"<script>": ESCAPE}, "metrics": {ESCAPE: 1.0, "<script>": 2}},
        ),
        ("config.json", {"n_steps": "many"}),
        ("config.json", {"n_steps": -5, "n_runs": None}),
        ("config.json", {"weights": [1.0], "means": "abc"}),
        ("config.json", {"recipe": f"<script>{ESCAPE}"}),
        ("config.json", {"lr": True, "temperatures": {}}),
        ("config.json", {ESCAPE: "<script>alert(1)</script>", "noise": 5}),
        ("config.json", {"paper": {"w2": ESCAPE}}),
    ],
)
def test_what_is_shown_of_a_crafted_run(copy, file, changes):
    folder = copy("views of a density")
    edit(folder / file, **changes)
    with limited(30.0):
        assert look_at_views(folder)  # which looks for control characters and for scripts


def pair_of(**changes):
    return {"pair": [0, 1], "proposed": 4, "accepted": 2, "acceptance_rate": 0.5, **changes}


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "metrics": {"accuracy": -0.57, "single_accuracy": 0.43}
        },  # doctor took the root of a negative variance
        {"metrics": {"accuracy": 1.5}},
        {"metrics": {"nll": 1.0, "nll_se": -0.1}},  # the page took its logarithm
        {"metrics": {"nll": 1.0, "nll_se": 1e-320}},
        {"metrics": {"nll": 1e308}},
        {"curves": {"logits_accuracy": [0.5, 7.0]}},
        {"swaps": [pair_of(accepted=5)]},
        {"swaps": [pair_of(accepted=-5)]},
        {"swaps": [pair_of(pair=[-1, 1])]},
        {"seed": -1},
        {"steps_done": -1},
        {"wall_seconds": -1.0},
    ],
)
def test_numbers_that_no_run_gives(copy, changes):
    folder = copy("views of a network")
    edit(folder / "result.json", **changes)
    assert look_at_views(folder)
    assert "a value that no run gives" in " ".join(load_run(folder).problems)


@slow
def test_deep_json_is_refused(copy):
    folder = copy("run of a density")
    for name in ("config.json", "result.json"):
        (folder / name).write_text("[" * 100_000)
        assert "cannot read" in message(
            lambda name=name: RunFolder(folder)._read(name), RunFolderError
        )
    assert "nested more than" in " ".join(load_run(folder).problems)


@slow
def test_a_status_that_is_no_text(copy):
    folder = copy("run of a density")
    edit(folder / "result.json", status=["finished"])
    assert "status is no text" in message(lambda: RunFolder(folder).finished, RunFolderError)
    assert load_run(folder).status == "damaged"


@slow
def test_folder_names_that_a_terminal_would_obey(copy, tmp_path):
    folder = copy("run of a density")
    folder = folder.rename(tmp_path / f"seed=1{ESCAPE}")
    assert "control characters" in message(lambda: load_run(folder), RunFolderError)


@slow
def test_files_without_checksums_are_read(copy):
    """Those of older versions."""
    folder = copy("draws and trace of a run")
    path = folder / "draws.safetensors"
    with safe_open(str(path), "pt") as file:
        words = {"torchrex": file.metadata()["torchrex"]}
    save_file(load_file(path), str(path), words)
    save_file(load_file(folder / "trace.safetensors"), str(folder / "trace.safetensors"))
    assert load_run(folder).problems == ()


@slow
@pytest.mark.parametrize(
    "change",
    [
        {"replica_at": lambda x: x + 7},
        {"replica_at": lambda x: x.float()},
        {"accepted": lambda x: x + 10**6},
        {"accepted": lambda x: x - 10**6},
        {"steps": lambda x: x.flip(0)},
        {"steps": lambda x: x + 10**6},
        {"values": lambda x: x.long()},
    ],
)
def test_draws_that_no_run_can_have_given(copy, change):
    path = copy("draws") / "draws.safetensors"
    draws = Draws.load(path)
    for name, function in change.items():
        setattr(draws, name, function(getattr(draws, name)))
    draws.save(path)
    assert "does not hold draws" in message(lambda: Draws.load(path), RunFolderError)
    run = load_run(path.parent)
    assert run.draws is None or run.problems


# Stores


def test_a_store_does_not_write_through_links(tmp_path):
    store = DrawStore(tmp_path / "store", capacity=3)
    secret = tmp_path / "secret"
    secret.write_text("mine")
    for name in ("index.json.part", "draw-000000000.safetensors.part"):
        (store.folder / name).symlink_to(secret)
    store.add(nn.Linear(1, 1), step=1)
    assert secret.read_text() == "mine"
    assert len(list(DrawStore.load(store.folder))) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update({ESCAPE: 1}), "not known"),
        (lambda raw: raw["draws"][0].update({ESCAPE: 1}), "unexpected keyword"),
        (lambda raw: raw.update(schema="x" * 10_000), "schema"),
        (lambda raw: raw["draws"].reverse(), "order of arrival"),
        (lambda raw: raw["draws"][0].update(left=0), "do not fill|left before"),
    ],
)
def test_indices_that_no_store_has_written(tmp_path, change, words):
    store = DrawStore(tmp_path, capacity=3)
    for step in range(3):
        store.add(nn.Linear(1, 1), step=step)
    raw = json.loads((tmp_path / "index.json").read_bytes())
    change(raw)
    (tmp_path / "index.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=words) as error:
        DrawStore.load(tmp_path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


# Image sets and logs


@slow
def test_a_cache_of_another_form_with_the_right_checksum(kinds, copy):
    folder = copy("cache")
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {name: torch.zeros(5, 2, dtype=dtype) for name in TINY.array_names()}
        content = {name: t.view(torch.uint8).numpy().data for name, t in tensors.items()}
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
        about = {"schema": 1, "name": "cifar10", "provenance": "x", "sha256": sums}
        (folder / "cifar10.safetensors").write_bytes(save(tensors, {"torchrex": json.dumps(about)}))
        assert "cifar10" in message(lambda: load_images("cifar10", folder), DataError)


def test_a_log_of_a_stranger(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n' + "[" * 100_000 + '\n{"step": 2}\n')
    with limited(20.0):
        assert read_log(path) == [{"step": 1}]  # up to the damage
    path.unlink()
    os.mkfifo(path)
    with limited(20.0):
        assert "not a file" in message(lambda: read_log(path), RunFolderError)


def test_one_line():
    assert one_line("a\n\tb\x00") == "a b\\x00"
    assert len(one_line("x" * 10_000)) == 400


# Nothing is executed

# What executes, or reads pickles, and where it is allowed for a reason.
FORBIDDEN = {
    *["pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"],  # modules
    *[
        "eval",
        "exec",
        "compile",
        "__import__",
        "torch.load",
        "torch.save",
        "read_pickle",
        "allow_pickle",
    ],
    *["gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list"],
    *["send_object_list", "recv_object_list", "loadmat", "os.system", "os.popen", "extractall"],
}
ALLOWED = {
    # MATLAB files of SVHN have no other reader. They are numbers, and are held to the official md5
    # before they are opened.
    ("vision/data/importing.py", "loadmat")
}


def uses(source: str) -> set[str]:
    """Modules imported, names called and keywords set to something other than False, as far as they
    are forbidden.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found.add(node.func.id)
            elif isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                found |= {
                    f"{owner}.{node.func.attr}",
                    node.func.attr if node.func.attr not in ("eval", "compile") else "",
                }
            found |= {each.arg for each in node.keywords if each.arg and not _is_false(each.value)}
    return found & FORBIDDEN


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_nothing_in_the_package_executes_what_it_reads():
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in uses(path.read_text())
    }
    assert found == ALLOWED


def test_every_array_file_is_read_without_objects():
    """numpy's reader says so itself wherever it is called."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "np.load",
                "numpy.load",
                "np.lib.format.read_array",
            ):
                assert any(
                    each.arg == "allow_pickle" and _is_false(each.value) for each in node.keywords
                ), path


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "torch.load(x)", "exec('1')", "eval(x)"),
        *("from torch import load as f; import yaml", "np.load(x, allow_pickle=True)"),
        *("np.load(x, allow_pickle=yes)", "dist.all_gather_object(a, b)", "os.system(x)"),
        *("dist.broadcast_object_list(a)", "tar.extractall()", "import os; os.popen(x)"),
    ],
)
def test_the_walk_sees_it(source):
    assert uses(source)


def test_the_walk_does_not_see_what_is_harmless():
    assert not uses("module.eval(); re.compile(x); np.load(x, allow_pickle=False); a = 'pickle'")
