"""Files from strangers: many mutated ones of every kind, and by name what was found with more.

`benchmarks/fuzz.py` does the same with 10,000. Nothing may crash, hang, be executed, or be written
outside of its folder.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fuzzing import (
    SPECIAL,
    Finding,
    checkpoint_state,
    limited,
    look_at_views,
    make_kinds,
    standing,
    try_one,
)
from torchrex.checkpoint import Checkpoints
from torchrex.errors import CheckpointError, RunFolderError, TorchrexError
from torchrex.experiments import RunFolder, get_recipe, run_recipe
from torchrex.experiments.runner import run_in
from torchrex.posterior import Draws, DrawStore
from torchrex.report.reader import load_run

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


def raises(error):
    def look(folder):
        raise error

    return look


def hangs(folder):
    while True:
        pass


FAULTY = {
    "executes": lambda folder: os.mkdir(folder / "made"),
    "crashes": raises(KeyError("a")),
    "hangs": hangs,
    "talks": raises(CheckpointError("two\nlines")),
    "escapes": raises(CheckpointError(ESCAPE)),
    "lies": lambda folder: "something else",
    "warns": lambda folder: np.float32(1) / np.float32(0),
}


@slow
@pytest.mark.parametrize("fault", FAULTY)
def test_a_reader_with_a_fault_is_found(kinds, tmp_path, fault, monkeypatch):
    """Readers with every fault that a trial must see."""
    monkeypatch.setattr("fuzzing.SECONDS", 0.2)
    kind = replace(kinds["draws"], look=FAULTY[fault])
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


@pytest.mark.parametrize("link", ["digits", "digits/sghmc", "digits/sghmc/seed=0"])
@pytest.mark.parametrize("how", [{"overwrite": True}, {"resume": True}, {}])
def test_a_link_between_out_and_the_run_is_refused(tmp_path, link, how):
    """The run it leads to was replaced."""
    pytest.importorskip("sklearn")
    config = replace(get_recipe("digits/sghmc"), epochs=1, burn_in_epochs=0, hidden=2)
    other, out = tmp_path / "other", tmp_path / "out"
    names = ("seed=0", "seed=0.new", ".seed=0.old")
    for name in names:
        folder = RunFolder.of(other, config.recipe, 0).path.with_name(name)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"epochs": 7}')
    for name in names if link.endswith("0") else (Path(link).name,):
        shutil.rmtree(out, ignore_errors=True)
        path = (out / link).with_name(name)
        path.parent.mkdir(parents=True)
        path.symlink_to((other / link).with_name(name))
        before = standing(tmp_path)
        assert "is a link" in message(lambda: run_recipe(config, 0, out, **how), RunFolderError)
        assert standing(tmp_path) == before


def test_out_itself_may_be_a_link(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "out")
    config = get_recipe("digits/sghmc")
    for out in (tmp_path / "out", Path(), Path("../out")):
        assert run_in(out, config, 0).folder.path == out / "digits/sghmc/seed=0"


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


@slow
@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("result.json", {"metrics": {"w2": 10**400}}),
        ("result.json", {"device": "\ud800", "error": ESCAPE, "status": ESCAPE}),
        ("result.json", {"recipe": "<script>", "date": '"><img src=x onerror=alert(1)>'}),
        ("result.json", {"versions": {"<script>": ESCAPE}, "metrics": {ESCAPE: 1.0}}),
        ("config.json", {"n_steps": -5, "n_runs": None}),
        ("config.json", {"weights": [1.0], "means": "abc", "temperatures": {}}),
        ("config.json", {"recipe": f"<script>{ESCAPE}", ESCAPE: "<script>alert(1)</script>"}),
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
        {"metrics": {"accuracy": -0.57, "single_accuracy": 0.43}},
        {"metrics": {"nll": 1.0, "nll_se": -0.1}},
        {"metrics": {"nll": 1e308}},
        {"curves": {"logits_accuracy": [0.5, 7.0]}},
        {"swaps": [pair_of(accepted=5)]},
        {"swaps": [pair_of(pair=[-1, 1])]},
        {"steps_done": -1},
    ],
)
def test_numbers_that_no_run_gives(copy, changes):
    folder = copy("views of a network")
    edit(folder / "result.json", **changes)
    assert look_at_views(folder)
    assert "a value that no run gives" in " ".join(load_run(folder).problems)


@slow
def test_deep_json_and_a_status_that_is_no_text(copy):
    folder = copy("run of a density")
    edit(folder / "result.json", status=["finished"])
    assert "status is ['finished']" in message(lambda: RunFolder(folder).finished, RunFolderError)
    assert load_run(folder).status == "damaged"
    (folder / "result.json").write_text("[" * 100_000)
    assert "cannot read" in message(lambda: RunFolder(folder).result, RunFolderError)
    assert "nested more than" in " ".join(load_run(folder).problems)


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
        {"accepted": lambda x: x + 10**6},
        {"accepted": lambda x: x - 10**6},
        {"steps": lambda x: x.flip(0)},
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


# Image sets and logs


# Nothing is executed

# What executes, or reads pickles: modules, functions, keywords that are not False.
FORBIDDEN = """
    pickle cPickle dill cloudpickle joblib shelve marshal yaml eval exec compile __import__
    torch.load torch.save read_pickle allow_pickle gather_object all_gather_object
    broadcast_object_list scatter_object_list send_object_list recv_object_list loadmat os.system
    os.popen extractall
"""
# MATLAB files of SVHN have no other reader. They are numbers, and their md5 is checked before.
# yaml.safe_load, which a test holds to be what is called, makes plain values alone.
ALLOWED = {("vision/data/importing.py", "loadmat"), ("cli/run.py", "yaml")}


def uses(source: str) -> set[str]:
    """The forbidden modules, calls and keywords of a program; np.load must say allow_pickle."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found |= {called, ".".join(called.split(".")[-2:])}
            method = called.rpartition(".")[2]
            found |= {method} - {"eval", "compile"}
            keywords = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg}
            found |= {name for name, value in keywords.items() if value != "False"}
            if called in ("np.load", "numpy.load", "np.lib.format.read_array"):
                found |= {"allow_pickle"} - set(keywords)
    return found & set(FORBIDDEN.split())


def test_nothing_in_the_package_executes_what_it_reads():
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in uses(path.read_text())
    }
    assert found == ALLOWED
    called = set(re.findall(r"yaml\.\w+", (PACKAGE / "cli" / "run.py").read_text()))
    assert called == {"yaml.safe_load", "yaml.YAMLError"}


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "torch.load(x)", "exec('1')", "eval(x)"),
        *("from torch import load as f; import yaml", "np.load(x, allow_pickle=yes)"),
        *("np.load(x)", "dist.all_gather_object(a, b)", "os.system(x)", "tar.extractall()"),
    ],
)
def test_the_walk_sees_what_is_forbidden_alone(source):
    assert uses(source)
    assert not uses("module.eval(); re.compile(x); np.load(x, allow_pickle=False); a = 'pickle'")
