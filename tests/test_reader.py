"""One reader of run folders: a damaged file is a problem in words, and the rest is used."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import torchrex
from torchrex.durable import open_file, read_file, read_object, require_file
from torchrex.errors import RunFolderError
from torchrex.experiments import get_recipe, recipes, run_recipe
from torchrex.posterior.draws_file import SHAPES, WHOLE
from torchrex.report.compare import compare_folders, lines
from torchrex.report.doctor import as_text, diagnose, diagnose_folder
from torchrex.report.page import write_page
from torchrex.report.reader import (
    checkpoints_of,
    config_from_json,
    find_runs,
    load_run,
    read_tree,
    require_ours,
)
from torchrex.runs.config import to_json

RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture(scope="module")
def density(tmp_path_factory):
    config = replace(get_recipe("figure1/case1-naive"), n_steps=200, n_runs=4, thin=2)
    return run_recipe(config, 3, tmp_path_factory.mktemp("density")).path


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    pytest.importorskip("sklearn")
    config = replace(get_recipe("digits/resghmc"), epochs=2, burn_in_epochs=1, hidden=8)
    return run_recipe(config, 1, tmp_path_factory.mktemp("network")).path


@pytest.fixture
def copy(tmp_path):
    """A copy of a run folder, in a folder of the same name."""
    return lambda path: shutil.copytree(path, tmp_path / Path(*path.parts[-3:]))


def test_every_recipe_comes_back_from_its_json():
    for name, config in recipes().items():
        problems: list[str] = []
        changes = {"epochs": 70} if hasattr(config, "epochs") else {"n_steps": 70, "n_runs": 30}
        changes = {"steps": config.steps + 1} if hasattr(config, "steps") else changes
        other = replace(config, **changes)
        back = config_from_json(config, json.loads(json.dumps(to_json(other))), problems)
        assert (back, problems) == (other, []), name
        assert len(back.ladder().temperatures) == back.n_rungs
    values = {**to_json(get_recipe("clean/cifar10-resnet20")), "method": "sghmc"}
    assert config_from_json(get_recipe("clean/cifar10-resnet20"), values, []).method == "sghmc"


def test_a_density(density):
    run = load_run(density)
    about = (run.recipe, run.seed, run.status, run.problems)
    assert about == ("figure1/case1-naive", 3, "finished", ())
    assert run.ladder.temperatures == (1.0, 10.0)
    assert run.correction_factor == float("inf")
    assert run.draws.n_draws == 100
    assert (run.history.n_chains, run.history.n_steps) == (4, 200)
    assert bool((run.history.correction == 0).all())  # F is infinite, so it came back as a number
    assert "w2" in run.trace
    assert run.metrics["n_runs"] == 4
    assert load_run(str(density)).history.n_steps == 200


def test_a_network(network):
    run = load_run(network)
    about = (run.recipe, run.seed, run.problems, run.draws, run.ladder.temperatures)
    assert about == ("digits/resghmc", 1, (), None, (0.1, 0.1025))
    assert run.history.n_steps == run.result["steps_done"] == 40
    assert run.history.swaps is not None


def test_all_committed_results_load():
    found = find_runs(RESULTS)
    assert len(found) > 40
    for path in found:
        run = load_run(path)
        about = (run.status, run.problems, run.damaged, run.history, run.trace)
        assert about == ("finished", (), (), None, {}), path
        assert run.settings.headline in run.numbers


@pytest.mark.parametrize("keep", [0.9, 0.3, 0.0])
@pytest.mark.parametrize(
    "name", ["config.json", "result.json", "draws.safetensors", "trace.safetensors"]
)
def test_a_damaged_file_is_one_problem_and_the_others_are_used(density, copy, name, keep):
    folder, complete = copy(density), load_run(density)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(keep * len(data))])
    run = load_run(folder)
    (problem,) = run.problems
    assert problem.startswith(f"{name} is damaged and not used: ")
    assert str(folder) not in problem
    assert run.damaged == (name,)
    assert (run.seed, run.recipe) == (3, "figure1/case1-naive")
    assert run.status == ("damaged" if name == "result.json" else "finished")
    assert run.metrics == ({} if name == "result.json" else complete.metrics)
    assert (run.draws is None) == (name == "draws.safetensors")
    assert (run.trace == {}) == (name == "trace.safetensors")
    assert (run.settings is None) == (name == "config.json")


def test_a_flipped_bit_is_found(density, copy):
    folder = copy(density)
    for name in ("draws.safetensors", "trace.safetensors"):
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(bytes(data))
    assert " ".join(load_run(folder).problems).count("another sha256") == 2


NEEDED = {"recipe": "digits/resghmc", "seed": 0, "status": "finished", "metrics": {}, "swaps": []}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([], "it holds a list"),
        (None, "it holds a NoneType"),
        ({}, "it lacks recipe, seed, status, metrics, swaps"),
        ({**NEEDED, "seed": "0"}, "seed is '0'"),
        ({**NEEDED, "status": None}, "status is None"),
        ({**NEEDED, "metrics": [1]}, "metrics is [1]"),
        ({**NEEDED, "metrics": {"nll": {}}}, "metrics has a value that no run gives"),
        ({**NEEDED, "swaps": [{"pair": [0, 1]}]}, "swaps has a value that no run gives"),
        ({**NEEDED, "wall_seconds": "long"}, "wall_seconds is 'long'"),
        ({**NEEDED, "steps_done": True}, "steps_done is True"),
        ({**NEEDED, "curves": {"energy": ["a"]}}, "curves has a value that no run gives"),
    ],
)
def test_a_result_of_another_shape_is_damaged(network, copy, result, words):
    folder = copy(network)
    (folder / "result.json").write_text(json.dumps(result))
    run = load_run(folder)
    assert (run.status, run.damaged, run.result) == ("damaged", ("result.json",), None)
    assert words in run.problems[0]
    assert run.history is not None, "its trace is there"


def test_a_list_of_swaps_with_gaps_gives_no_history(network, copy):
    folder = copy(network)
    trace = {**load_run(network).trace, "accepted": torch.tensor([10])}
    for n in (10, 9):
        swaps = {"swap_steps": torch.arange(n), "swap_pairs": torch.zeros(n, dtype=torch.int64)}
        save_file({**trace, **swaps}, folder / "trace.safetensors")
        history = load_run(folder).history
        assert (history is None) == (n == 9)
    assert load_run(network).history.swaps.step.shape == load_run(network).trace["swap_steps"].shape


def test_unfinished_unknown_and_newer(density, tmp_path):
    folder = tmp_path / "mine" / "case1" / "seed=7.new"
    folder.mkdir(parents=True)
    values = json.loads((density / "config.json").read_text())

    def loaded(**changes):
        (folder / "config.json").write_text(json.dumps({**values, **changes}))
        run = load_run(folder)
        return run, " | ".join(run.problems)

    run, problems = loaded(recipe="mine/case1")
    assert (run.status, run.seed, run.ladder) == ("unfinished", 7, None)
    assert "no recipe 'mine/case1'" in problems
    assert "there is no result.json" in problems
    del values["lr"]
    run, problems = loaded(shine=3, temperatures=[1.0, 5.0])
    assert (run.ladder.temperatures, run.ladder.lrs) == ((1.0, 5.0), (0.03, 0.03))
    assert "does not know: shine" in problems
    assert "lacks lr" in problems
    run, problems = loaded(temperatures=[5.0, 1.0])
    assert (run.ladder, run.settings, run.damaged) == (None, None, ("config.json",))
    assert "must rise" in problems


def test_nothing_at_all(tmp_path):
    for call, path, words in (
        (load_run, tmp_path, "holds no run"),
        (load_run, tmp_path / "none", "holds no run"),
        (find_runs, tmp_path / "none", "there is no folder"),
    ):
        with pytest.raises(RunFolderError, match=words):
            call(path)


def test_finding(density, tmp_path):
    for name in ("seed=10", "seed=9", "seed=9.replaced", "seed=9/checkpoints/inner"):
        shutil.copytree(density, tmp_path / "a" / name)
    (tmp_path / "a" / "seed=4").mkdir()
    assert [path.name for path in find_runs(tmp_path)] == ["seed=9", "seed=10"]
    assert find_runs(tmp_path / "a" / "seed=9") == [tmp_path / "a" / "seed=9"]
    assert [each.status for each in read_tree(tmp_path)] == ["empty", "finished", "finished"]


# Files of strangers


def put(path: Path, kind: str) -> None:
    """Something that is no file of ours."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            before = os.getcwd()
            os.chdir(path.parent)  # the name of a socket may have 108 bytes
            server.bind(path.name)
            os.chdir(before)
    else:
        path.symlink_to({"device": "/dev/zero", "circle": path.name}.get(kind, kind))


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device", "circle", "/etc/passwd"])
def test_only_regular_files_are_opened(tmp_path, kind):
    put(tmp_path / "file", kind)
    for follow in (False, True):
        if kind != "/etc/passwd" or not follow:
            with pytest.raises(OSError):
                open_file(tmp_path / "file", follow=follow)
    with pytest.raises(OSError):
        read_object(tmp_path / "file")


def test_limits_come_before_reading(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 2**40)  # it takes no space on the disk
    for read in (read_file, read_object, lambda path: require_file(path, 2**30)):
        with pytest.raises(OSError, match="are read"):
            read(path)
    for text in ({"a" * 300: 1}, {"a": {"b": ["c" * 30_000]}}, ["not an object"]):
        path.write_text(json.dumps(text))
        with pytest.raises(ValueError, match="it h"):
            read_object(path)


# Trees in which something cannot be read

ESCAPE = "\x1b[2J\x1b]0;owned\x07"


def one_bad(tree: Path, kind: str) -> None:
    """Something that cannot be read, next to the run in seed=3."""
    bad = tree / "seed=4"
    if kind == "control characters":
        shutil.copytree(tree / "seed=3", tree / f"seed=4{ESCAPE}")
        return
    if kind == "deep":
        os.makedirs(bad)
        before = os.getcwd()
        os.chdir(bad)
        for _ in range(1500):  # longer than a path may be
            os.mkdir("deep")
            os.chdir("deep")
        os.chdir(before)
        return
    if kind == "circle":
        bad.symlink_to(bad.name)
        return
    shutil.copytree(tree / "seed=3", bad)
    for name in ("config.json", "result.json", "draws.safetensors", "trace.safetensors"):
        if kind == "damage":
            (bad / name).write_bytes(b"{")
        else:
            (bad / name).unlink()
            put(bad / name, kind)


@pytest.mark.parametrize(
    "kind",
    [
        *("damage", "pipe", "folder", "socket", "device", "/etc/passwd"),
        *("control characters", "deep", "circle"),
    ],
)
def test_one_bad_run_does_not_hide_the_others(density, tmp_path, kind):
    """It is named with the reason in page, doctor and comparison; the sound run is shown."""
    tree = tmp_path / "figure1" / "case1-naive"
    shutil.copytree(density, tree / "seed=3")
    one_bad(tree, kind)
    page = tmp_path / "page.html"
    written = write_page([tmp_path], page, doctor_seconds=0.0)
    text = page.read_text()
    assert "figure1/case1-naive, seed 3" in text
    assert "\x1b" not in text
    assert "root:" not in text  # what /etc/passwd holds
    named = written.not_whole + written.unreadable
    assert named == 1  # a link too, which is not followed, wherever it leads
    diagnoses = diagnose_folder(tmp_path)
    assert [each.name for each in diagnoses if each.status == "finished"] == [
        "figure1/case1-naive, seed 3"
    ]
    assert len(diagnoses) == 1 + named + written.empty
    said = [words for each in diagnoses for pair in as_text(each) for words in pair]
    (comparison,) = compare_folders([tree, tree])
    assert comparison.seeds == (3,)
    assert len(comparison.notes) == 2 * named
    assert all(words.isprintable() for words in (*said, *lines(comparison)))
    if kind == "deep":  # too deep for what removes old folders of tests
        subprocess.run(["rm", "-r", tree / "seed=4"], check=True)


def test_folders_without_permission_are_named(density):
    """As root as well: the rights of another user are taken for the time of the test."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        for name in ("seed=3", "seed=4", "seed=5"):
            shutil.copytree(density, Path(root) / "figure1" / "case1-naive" / name)
        closed, listed = (Path(root) / "figure1" / "case1-naive" / f"seed={k}" for k in (4, 5))
        closed.chmod(0)
        listed.chmod(0o444)
        is_root = os.geteuid() == 0
        try:
            if is_root:
                os.seteuid(65534)
            found = list(read_tree(Path(root)))
            statuses = [each.status for each in found]
            with pytest.raises(RunFolderError, match="Permission denied"):
                diagnose_folder(closed)
        finally:
            if is_root:
                os.seteuid(0)
            closed.chmod(0o755)
            listed.chmod(0o755)
    assert statuses == ["finished", "unreadable", "damaged"]
    assert found[1].words == "Permission denied"
    assert "config.json cannot be read: Permission denied" in found[2].problems


def test_links_in_a_run_folder_are_not_followed(density, copy, tmp_path):
    """A run folder itself may be reached by a link."""
    folder = copy(density)
    (tmp_path / "link").symlink_to(folder)
    assert load_run(tmp_path / "link").problems == ()
    (tmp_path / "secret.json").write_text('{"secret": "sesame"}')
    for name in ("config.json", "result.json", "samples.png"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret.json")
    (folder / "checkpoints").symlink_to(tmp_path)
    write_page([folder], tmp_path / "page.html", doctor_seconds=0.0)
    page = (tmp_path / "page.html").read_text()
    assert "sesame" not in page
    assert page.count("it is a link, and links are not followed") >= 3
    assert checkpoints_of(folder) == []


def test_a_huge_draws_file_is_not_read(density, copy):
    """Its header is sound, and its zeros take no space on the disk."""
    folder = copy(density)
    path = folder / "draws.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    (chains, _, dim), draws = table["values"]["shape"], 2**26
    axes = {"chains": chains, "draws": draws, "dim": dim, "rungs": 2, "pairs": 1}
    end = 0
    for name, names in SHAPES.items():
        shape = [axes[axis] for axis in names]
        size = math.prod(shape) * (8 if name in WHOLE else 4)
        dtype = "I64" if name in WHOLE else "F32"
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(table).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + end)
    (problem,) = load_run(folder).problems
    assert problem.startswith("draws.safetensors cannot be read: it has ")


@pytest.mark.parametrize("text", [{"recipe": "x" * 5_000_000}, {"recipe": "x" * 15_000}])
def test_a_long_name_takes_no_time(density, copy, text):
    folder = copy(density)
    for name in ("config.json", "result.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, **text}))
    began = time.monotonic()
    assert load_run(folder).recipe == "figure1/case1-naive"
    assert time.monotonic() - began < 5


def test_a_recipe_of_another_version_is_not_damage(density, copy):
    folder = copy(density)
    values = json.loads((folder / "config.json").read_text())
    result = json.loads((folder / "result.json").read_text())
    result.pop("config_sha256", None)  # as an older version wrote it
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.json").write_text(json.dumps({**values, "recipe": "figure9/case1"}))
    run = load_run(folder)
    assert run.damaged == ()
    assert "of another version" in [each.title for each in diagnose(run).findings]
    (folder / "config.json").write_text(json.dumps({**values, "temperatures": [5.0, 1.0]}))
    for version, title in ((torchrex.__version__, "damaged"), ("9.0", "of another version")):
        result["versions"]["torchrex"] = version
        (folder / "result.json").write_text(json.dumps(result))
        titles = [each.title for each in diagnose(load_run(folder)).findings]
        assert title in titles


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "circle", "/etc/passwd"])
def test_something_else_in_the_place_of_an_output(density, tmp_path, kind):
    page = tmp_path / "page.html"
    put(page, kind)
    with pytest.raises(RunFolderError):
        write_page([density], page)
    with pytest.raises(RunFolderError):
        require_ours(page, ["x"], "compare")
    with pytest.raises(RunFolderError, match="File name too long"):
        write_page([density], tmp_path / ("a" * 300))
    with pytest.raises(RunFolderError, match="there is no folder"):
        write_page([tmp_path / ("a" * 300)], tmp_path / "other.html")
