"""The doctor reads every checkpoint of a run, names damaged ones, and says what a resume does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

import torchrex as tr
from torchrex.errors import CheckpointError
from torchrex.experiments import get_recipe, run_recipe
from torchrex.report import doctor
from torchrex.report.doctor import diagnose, findings_of, look_at_checkpoints
from torchrex.report.page import page_of
from torchrex.report.reader import load_run

OLD, NEW = "checkpoints/step=000000380", "checkpoints/step=000000400"


def finding_of(findings, title):
    (found,) = [finding for finding in findings if finding.title == title]
    return found


def spoil(file):
    """One bit of the last byte, as a bad disk does."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run of the digits with checkpoints of steps 380 and 400."""
    short = {"epochs": 20, "burn_in_epochs": 10, "hidden": 8, "checkpoint_every": 380}
    config = replace(get_recipe("digits/resghmc"), **short)
    return run_recipe(config, 0, tmp_path_factory.mktemp("digits")).path


@pytest.fixture
def run(digits, tmp_path):
    """A copy of it, finished or paused."""

    def get(status="paused"):
        path = shutil.copytree(digits, tmp_path / "digits" / "resghmc" / "seed=0")
        result = json.loads((path / "result.json").read_text())
        (path / "result.json").write_text(json.dumps({**result, "status": status}))
        return path

    return get


def resumed(path):
    """The step from which a resume continues, None if it refuses."""
    try:
        return tr.Checkpoints(path / "checkpoints").load_newest().step
    except CheckpointError:
        return None


def test_sound_checkpoints_are_fine(run):
    found = finding_of(diagnose(load_run(run("finished"))).findings, "checkpoints")
    assert found.severity == "fine"
    assert found.words == "2 checkpoints are sound; the newest has step 400."
    assert found.numbers == {"whole": ["step=000000380", "step=000000400"], "damaged": []}


@pytest.mark.parametrize(
    ("damaged", "words", "step", "option"),
    [
        (
            [f"{NEW}/replica=1.safetensors"],
            "continues from step 380 and repeats 20 steps",
            380,
            "resume",
        ),
        ([f"{OLD}/shared.safetensors"], "The newest is sound", 400, "resume"),
        (
            [f"{OLD}/manifest.json", f"{NEW}/replica=0.safetensors"],
            "No checkpoint can be used",
            None,
            "overwrite",
        ),
    ],
)
def test_damage_of_an_unfinished_run(run, damaged, words, step, option):
    path = run()
    for name in damaged:
        spoil(path / name)
    findings = findings_of(load_run(path))
    found = finding_of(findings, "damaged checkpoint" + ("s" if len(damaged) > 1 else ""))
    assert found.severity == "warning"
    assert all(name.rpartition("/")[0] in found.words for name in damaged)
    assert words in found.words
    assert len(found.numbers["damaged"]) == len(damaged)
    assert resumed(path) == step
    state = finding_of(findings, "the run is not finished").words
    assert [f"--{each}`" in state for each in ("resume", "overwrite")] == [
        option == each for each in ("resume", "overwrite")
    ]
    assert not [finding for finding in findings if finding.title == "checkpoints"]


def test_a_finished_run_does_not_need_them(run):
    path = run("finished")
    for folder in (OLD, NEW):
        spoil(path / folder / "DONE")
    diagnosis = diagnose(load_run(path))
    assert finding_of(diagnosis.findings, "damaged checkpoints").severity == "note"
    assert diagnosis.status == "finished"


def test_those_of_another_version_are_not_damaged(run, monkeypatch):
    path = run()
    monkeypatch.setattr("torchrex.checkpoint.folder.VERSION", 6)
    findings = findings_of(load_run(path))
    words = finding_of(findings, "checkpoints that cannot be used").words
    assert "version 5, but this torchrex reads version 6" in words
    assert "--overwrite` begins anew" in finding_of(findings, "the run is not finished").words


def test_nothing_is_said_of_what_is_not_there_or_half_written(run):
    path = run()
    for folder in (OLD, NEW):
        (path / folder / "DONE").unlink()
    assert look_at_checkpoints(load_run(path)) == []
    shutil.rmtree(path / "checkpoints")
    assert look_at_checkpoints(load_run(path)) == []
    assert not [finding for finding in findings_of(load_run(path)) if "checkpoint" in finding.title]


def test_large_ones_are_left_out_of_a_quick_look(run, monkeypatch, tmp_path):
    path = run()
    spoil(path / NEW / "shared.safetensors")
    assert finding_of(findings_of(load_run(path), quick=True), "damaged checkpoint")
    monkeypatch.setattr(doctor, "LARGE", 1000)
    found = finding_of(findings_of(load_run(path), quick=True), "only a quick look")
    assert "whether its checkpoints are sound" in found.words
    assert finding_of(findings_of(load_run(path)), "damaged checkpoint")
    page = page_of([load_run(path)], tmp_path / "page.html", title="t")
    assert "only a quick look at 1;" in page


def test_shards_resume_one_by_one(tmp_path):
    """A run in shards is judged by the worst shard."""
    short = {"n_steps": 400, "n_runs": 4, "shards": 2, "checkpoint_every": 100}
    config = replace(get_recipe("figure1/case1-resgld"), **short)
    path = run_recipe(config, 0, tmp_path, budget=1e-9).path
    for _ in range(2):  # one shard, then the other
        run_recipe(config, 0, tmp_path, budget=1e-9, resume=True)
    shard = path / "checkpoints" / "shard=1"
    old, new = tr.Checkpoints(shard).steps()
    found = finding_of(findings_of(load_run(path)), "checkpoints")
    assert found.words.endswith(f"of 2 shards are sound; all shards have reached step {new:,}.")
    spoil(shard / f"step={new:09d}" / "shared.safetensors")
    words = finding_of(findings_of(load_run(path)), "damaged checkpoint").words
    assert words.startswith(f"checkpoints/shard=1/step={new:09d} has a damaged shared.safetensors")
    assert f"continues from step {old:,} in shard=1 and repeats {new - old} steps" in words
    spoil(shard / f"step={old:09d}" / "shared.safetensors")
    words = finding_of(findings_of(load_run(path)), "damaged checkpoints").words
    assert "No checkpoint of shard=1 can be used" in words
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*shard=1 can be used"):
        run_recipe(config, 0, tmp_path, resume=True)
