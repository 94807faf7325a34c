"""Run folders are read up to the damage, and it is said where that is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torchrex.errors import RunFolderError
from torchrex.experiments import get_recipe, recipes, run_recipe
from torchrex.experiments.config import to_json
from torchrex.report.runs import (
    config_from_json,
    find_empty,
    find_runs,
    ladder_of,
    load_run,
    salvage,
)

RESULTS = Path(__file__).parents[1] / "results" / "images"


@pytest.fixture(scope="module")
def density(tmp_path_factory):
    config = replace(get_recipe("figure1/case1-naive"), n_steps=200, n_runs=4, thin=2)
    return run_recipe(config, 3, tmp_path_factory.mktemp("density")).path


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    pytest.importorskip("sklearn")
    config = replace(get_recipe("digits/resghmc"), epochs=2, burn_in_epochs=1, hidden=8)
    return run_recipe(config, 1, tmp_path_factory.mktemp("network")).path


def cut(path: Path, to: Path, name: str, keep: float) -> Path:
    """A copy of a run folder whose file `name` ends early."""
    shutil.copytree(path, to)
    data = (to / name).read_bytes()
    (to / name).write_bytes(data[: int(keep * len(data))])
    return to


def test_every_recipe_comes_back_from_its_json():
    for name, config in recipes().items():
        problems: list[str] = []
        length = next(each for each in ("epochs", "steps", "n_steps") if hasattr(config, each))
        other = replace(config, **{length: 7_000})
        back = config_from_json(config, json.loads(json.dumps(to_json(other))), problems)
        assert (back, problems) == (other, []), name
        assert ladder_of(back) is not None


def test_a_density(density):
    run = load_run(density)
    assert (run.recipe, run.seed, run.status, run.problems) == (
        "figure1/case1-naive",
        3,
        "finished",
        (),
    )
    assert run.ladder.temperatures == (1.0, 10.0)
    assert run.correction_factor == float("inf")
    assert run.draws.n_draws == 100
    assert run.history.n_chains == 4
    assert run.history.n_steps == 200
    assert bool((run.history.correction == 0).all())  # F is infinite, so it came back as a number
    assert "w2" in run.trace
    assert run.metrics["n_runs"] == 4


def test_a_network(network):
    run = load_run(network)
    assert (run.recipe, run.seed, run.problems) == ("digits/resghmc", 1, ())
    assert run.draws is None
    assert run.history.n_steps == run.result["steps_done"] == 40
    assert run.history.swaps is not None
    assert run.ladder.temperatures == (0.1, 0.1025)


def test_committed_results_without_a_trace():
    found = find_runs(RESULTS)
    assert len(found) > 4
    assert found == sorted(found)
    run = load_run(found[0])
    assert run.history is None
    assert run.trace == {}
    assert run.problems == ()
    assert run.ladder.anneal is not None
    assert run.settings.epochs == run.config["epochs"]


def test_rows_up_to_the_damage_of_a_trace(network, tmp_path):
    whole = load_run(network)
    for keep in (0.9, 0.5, 0.3):
        run = load_run(cut(network, tmp_path / str(keep), "trace.safetensors", keep))
        (problem,) = run.problems
        size = (network / "trace.safetensors").stat().st_size
        assert f"it ends at byte {int(keep * size):,} of {size:,}" in problem
        assert "lost are" in problem
        assert run.metrics == whole.metrics
        for (
            name,
            tensor,
        ) in run.trace.items():  # a beginning of what was there, never something else
            assert torch.equal(tensor, whole.trace[name][: len(tensor)])


def test_a_list_of_swaps_that_is_cut_stays_a_list_and_gives_no_history(network, tmp_path):
    folder = tmp_path / "seed=1"
    shutil.copytree(network, folder)
    trace = {**load_run(network).trace, "accepted": torch.tensor([10])}
    save_file(
        {**trace, "swap_steps": torch.arange(10), "swap_pairs": torch.zeros(10, dtype=torch.int64)},
        folder / "trace.safetensors",
    )
    assert load_run(folder).history.swaps.step.tolist() == list(range(10))
    save_file(
        {**trace, "swap_steps": torch.arange(9), "swap_pairs": torch.zeros(9, dtype=torch.int64)},
        folder / "trace.safetensors",
    )
    assert load_run(folder).history is None  # one swap of ten is missing
    save_file(
        {"swap_pairs": torch.zeros(10, dtype=torch.int64), "swap_steps": torch.arange(10)},
        folder / "trace.safetensors",
    )
    data = (folder / "trace.safetensors").read_bytes()
    (folder / "trace.safetensors").write_bytes(data[:-20])
    cut_short = load_run(folder).trace
    assert (len(cut_short["swap_pairs"]), cut_short["swap_steps"].tolist()) == (7, list(range(7)))


def test_draws_cut_in_their_last_tensor_keep_whole_rows(density, tmp_path):
    whole = load_run(density).draws
    size = (density / "draws.safetensors").stat().st_size
    lost = whole.replica_at.nbytes // 2 + 3  # bytes; the standings come last in the file
    run = load_run(cut(density, tmp_path / "cut", "draws.safetensors", (size - lost) / size))
    assert run.draws.n_draws == 49
    assert run.history.n_steps == 200
    assert torch.equal(run.draws.values, whole.values[:, :49])
    assert torch.equal(run.draws.replica_at, whole.replica_at[:49])
    assert "replica_at after row 49 of 100" in run.problems[0]


def test_draws_cut_earlier_are_not_used_but_the_rest_is(density, tmp_path):
    run = load_run(cut(density, tmp_path / "cut", "draws.safetensors", 0.5))
    assert run.draws is None
    assert run.history is None
    assert run.metrics
    assert any("too little of draws.safetensors" in problem for problem in run.problems)


def test_a_table_of_contents_that_lies(tmp_path):
    header = json.dumps(
        {
            "x": {"dtype": "F32", "shape": [-1, 2], "data_offsets": [0, 8]},
            "y": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        }
    )
    (tmp_path / "t").write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\0" * 8)
    problems: list[str] = []
    assert salvage(tmp_path / "t", problems)[0] == {}
    assert "contradict" in problems[0]
    (tmp_path / "t").write_bytes(b"\xff" * 20)
    assert salvage(tmp_path / "t", problems)[0] == {}
    assert "table of contents" in problems[1]


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_damaged_json_says_where(density, tmp_path, name):
    run = load_run(cut(density, tmp_path / "seed=3", name, 0.5))
    assert any(problem.startswith(f"{name} is damaged at line ") for problem in run.problems)
    assert (run.seed, run.recipe) == (3, "figure1/case1-naive")
    assert run.draws is not None
    assert run.status == ("damaged" if name == "result.json" else "finished")


def test_unfinished_unknown_and_newer(density, tmp_path):
    folder = tmp_path / "mine" / "case1" / "seed=7"
    folder.mkdir(parents=True)
    values = json.loads((density / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "recipe": "mine/case1"}))
    run = load_run(folder)
    assert (run.status, run.seed, run.ladder) == ("unfinished", 7, None)
    assert any("no recipe 'mine/case1'" in problem for problem in run.problems)
    assert any("there is no result.json" in problem for problem in run.problems)
    del values["lr"]
    (folder / "config.json").write_text(
        json.dumps({**values, "shine": 3, "temperatures": [1.0, 5.0]})
    )
    run = load_run(folder)
    assert run.ladder.temperatures == (1.0, 5.0)
    assert run.ladder.lrs == (0.03, 0.03)
    assert "does not know: shine" in run.problems[0]
    assert "lacks lr" in run.problems[1]
    (folder / "config.json").write_text(json.dumps({**values, "temperatures": [5.0, 1.0]}))
    assert load_run(folder).ladder is None
    assert "must rise" in load_run(folder).problems[1]


def test_nothing_at_all(tmp_path):
    with pytest.raises(RunFolderError, match="holds nothing of a run"):
        load_run(tmp_path)
    with pytest.raises(RunFolderError, match="there is no run folder"):
        load_run(tmp_path / "none")
    with pytest.raises(RunFolderError, match="there is no folder"):
        find_runs(tmp_path / "none")


def test_finding(density, tmp_path):
    for seed in (10, 9):
        shutil.copytree(density, tmp_path / "a" / f"seed={seed}")
    shutil.copytree(density, tmp_path / "a" / "seed=9.replaced")
    shutil.copytree(density, tmp_path / "a" / "seed=9" / "checkpoints" / "inner")
    (tmp_path / "a" / "seed=4").mkdir()
    assert [path.name for path in find_runs(tmp_path)] == ["seed=9", "seed=10"]
    assert find_runs(tmp_path / "a" / "seed=9") == [tmp_path / "a" / "seed=9"]
    assert find_empty(tmp_path) == [tmp_path / "a" / "seed=4"]
