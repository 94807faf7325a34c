"""The doctor reads every checkpoint of a run, names those that are damaged, and says what a resume
would do about them.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest

import torchrex as tr
from torchrex.errors import CheckpointError
from torchrex.experiments import get_recipe, run_recipe
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.report import doctor as doctor_checkpoints
from torchrex.report.doctor import are_large, diagnose, findings_of, look_at_checkpoints
from torchrex.report.page import page_of
from torchrex.report.reader import load_run


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
    config = replace(
        get_recipe("digits/resghmc"), epochs=20, burn_in_epochs=10, hidden=8, checkpoint_every=380
    )
    path = run_recipe(config, 0, tmp_path_factory.mktemp("digits")).path
    assert tr.Checkpoints(path / "checkpoints").steps() == [380, 400]
    return path


@pytest.fixture
def run(digits, tmp_path):
    """A copy of it, finished or paused."""

    def get(status="paused"):
        path = tmp_path / "digits" / "resghmc" / "seed=0"
        shutil.copytree(digits, path)
        result = json.loads((path / "result.json").read_text())
        (path / "result.json").write_text(json.dumps({**result, "status": status}))
        return path

    return get


def resumed(path):
    """What a resume does: the step it goes on from, or the error it ends with."""
    try:
        return tr.Checkpoints(path / "checkpoints").load_newest().step
    except CheckpointError as error:
        return str(error)


def test_whole_checkpoints_are_fine(run):
    diagnosis = diagnose(load_run(run("finished")))
    found = finding_of(diagnosis.findings, "checkpoints")
    assert (found.severity, found.words) == (
        "fine",
        "2 checkpoints are sound; the newest has step 400.",
    )
    assert found.numbers == {"whole": ["step=000000380", "step=000000400"], "damaged": []}
    assert not {finding.title for finding in diagnosis.findings} & {
        "damaged checkpoint",
        "damaged checkpoints",
    }


def test_an_older_one_serves_where_the_newest_is_damaged(run):
    path = run()
    spoil(path / "checkpoints" / "step=000000400" / "replica=1.safetensors")
    findings = findings_of(load_run(path))
    found = finding_of(findings, "damaged checkpoint")
    assert found.severity == "warning"
    assert found.words.startswith(
        "checkpoints/step=000000400 has a damaged replica=1.safetensors: its checksum is not"
    )
    assert "continues from step 380 and repeats 20 steps" in found.words
    assert resumed(path) == 380
    assert found.numbers == {"whole": ["step=000000380"], "damaged": ["step=000000400"]}
    assert "--resume` continues" in finding_of(findings, "the run is not finished").words
    assert not [finding for finding in findings if finding.title == "checkpoints"]


def test_an_older_one_that_is_damaged_costs_nothing(run):
    path = run()
    (path / "checkpoints" / "step=000000380" / "shared.safetensors").unlink()
    found = finding_of(findings_of(load_run(path)), "damaged checkpoint")
    assert "step=000000380 has no shared.safetensors. The newest is sound" in found.words
    assert resumed(path) == 400


def test_where_none_can_be_used_a_resume_is_not_advised(run):
    path = run()
    spoil(path / "checkpoints" / "step=000000380" / "manifest.json")
    (path / "checkpoints" / "step=000000400" / "replica=0.safetensors").write_bytes(
        b"PK\x03\x04" + bytes(20)
    )
    (path / "result.json").unlink()
    findings = findings_of(load_run(path))
    found = finding_of(findings, "damaged checkpoints")
    assert found.severity == "warning"
    assert "No checkpoint can be used" in found.words
    assert "has a pickle in place of replica=0.safetensors" in found.words
    assert "no checkpoint in" in resumed(path)
    state = finding_of(findings, "the run is not finished").words
    assert "--overwrite` begins anew" in state
    assert "--resume" not in state


def test_a_finished_run_does_not_need_them(run):
    path = run("finished")
    for step in (380, 400):
        spoil(path / "checkpoints" / f"step={step:09d}" / "DONE")
    diagnosis = diagnose(load_run(path))
    found = finding_of(diagnosis.findings, "damaged checkpoints")
    assert found.severity == "note"
    assert "does not need them" in found.words
    assert diagnosis.status == "finished"


def test_those_of_another_version_are_not_damaged(run, monkeypatch):
    path = run()
    monkeypatch.setattr("torchrex.checkpoint.folder.VERSION", 6)
    findings = findings_of(load_run(path))
    found = finding_of(findings, "checkpoints that cannot be used")
    assert "version 5, but this torchrex reads version 6" in found.words
    assert "--overwrite` begins anew" in finding_of(findings, "the run is not finished").words


def test_nothing_is_said_of_what_is_not_there_or_half_written(run, tmp_path):
    path = run()
    for step in (380, 400):
        os.unlink(path / "checkpoints" / f"step={step:09d}" / "DONE")
    assert look_at_checkpoints(load_run(path)) == []
    shutil.rmtree(path / "checkpoints")
    assert look_at_checkpoints(load_run(path)) == []
    assert not [finding for finding in findings_of(load_run(path)) if "checkpoint" in finding.title]


def test_large_ones_are_left_out_of_a_quick_look(run, monkeypatch, tmp_path):
    path = run()
    spoil(path / "checkpoints" / "step=000000400" / "shared.safetensors")
    assert not are_large(load_run(path))
    assert finding_of(findings_of(load_run(path), quick=True), "damaged checkpoint")
    monkeypatch.setattr(doctor_checkpoints, "LARGE", 1000)
    found = finding_of(findings_of(load_run(path), quick=True), "only a quick look")
    assert found.words.startswith("To know whether its checkpoints are sound takes seconds")
    assert finding_of(findings_of(load_run(path)), "damaged checkpoint")
    page = page_of([load_run(path)], tmp_path / "page.html", title="t")
    assert "only a quick look at 1;" in page


def test_shards_go_on_each_by_itself(tmp_path):
    """A run in shards is told by the shard that is worst off."""
    config = replace(
        get_recipe("figure1/case1-resgld"), n_steps=400, n_runs=4, shards=2, checkpoint_every=100
    )
    assert isinstance(config, MixtureConfig)
    path = run_recipe(config, 0, tmp_path, budget=1e-9).path
    for _ in range(2):  # one shard, then the other
        run_recipe(config, 0, tmp_path, budget=1e-9, resume=True)
    steps = tr.Checkpoints(path / "checkpoints" / "shard=1").steps()
    assert len(steps) == 2
    found = finding_of(findings_of(load_run(path)), "checkpoints")
    assert (
        found.words
        == f"4 checkpoints of 2 shards are sound; all shards have reached step {steps[-1]:,}."
    )
    newest = path / "checkpoints" / "shard=1" / f"step={steps[-1]:09d}"
    spoil(newest / "shared.safetensors")
    found = finding_of(findings_of(load_run(path)), "damaged checkpoint")
    assert found.words.startswith(
        f"checkpoints/shard=1/step={steps[-1]:09d} has a damaged shared.safetensors"
    )
    assert (
        f"continues from step {steps[0]:,} in shard=1 and repeats {steps[1] - steps[0]} steps"
        in found.words
    )
    spoil(newest.with_name(f"step={steps[0]:09d}") / "shared.safetensors")
    found = finding_of(findings_of(load_run(path)), "damaged checkpoints")
    assert "No checkpoint of shard=1 can be used" in found.words
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*shard=1 can be used"):
        run_recipe(config, 0, tmp_path, resume=True)
