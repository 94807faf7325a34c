"""The doctor tells the three cases of figure 1 apart, says what to change, and gives a healthy run a clean bill."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from torchrex.cli.doctor import doctor
from torchrex.errors import MissingDependencyError, RunFolderError
from torchrex.experiments import get_recipe, run_recipe
from torchrex.report import doctor_draws
from torchrex.report.doctor import as_json, as_text, diagnose, diagnose_folder
from torchrex.report.doctor_draws import check_average, check_convergence, check_tail
from torchrex.report.doctor_swaps import check_correction, check_swaps, check_travel, gather, history_from_curves
from torchrex.report.runs import load_run

RESULTS = Path(__file__).parents[1] / "results" / "images" / "icml2020"


@pytest.fixture(scope="module")
def figure1(tmp_path_factory):
    """Small runs of figure 1: 16 chains of 20,000 steps."""
    out, cache = tmp_path_factory.mktemp("figure1"), {}

    def get(name):
        if name not in cache:
            config = replace(get_recipe(f"figure1/{name}"), n_steps=20_000, n_runs=16)
            cache[name] = load_run(run_recipe(config, 0, out).path)
        return cache[name]

    return get


@pytest.fixture(scope="module")
def images():
    return load_run(RESULTS / "cifar10-resnet20" / "seed=0")


def titles(diagnosis, *severities):
    return {finding.title for finding in diagnosis.findings if finding.severity in severities}


def finding_of(findings, title):
    (found,) = [finding for finding in findings if finding.title == title]
    return found


def with_curve(run, accuracy, **metrics):
    result = {**run.result, "metrics": {**run.metrics, **metrics}, "curves": {"probabilities_accuracy": accuracy}}
    return replace(run, result=result)


# The three cases


def test_case_1_is_fine(figure1):
    diagnosis = diagnose(figure1("case1-resgld"))
    assert diagnosis.healthy, as_text(diagnosis)
    assert diagnosis.verdict == "nothing wrong was found"
    assert titles(diagnosis, "fine") == {"swaps", "round trips", "convergence", "temperature", "noise"}
    swaps = finding_of(diagnosis.findings, "swaps").numbers
    assert swaps["acceptance_rate"] == pytest.approx(0.112, abs=0.01)
    assert swaps["acceptance_expected"] == pytest.approx(swaps["acceptance_rate"], abs=0.015)
    assert swaps["noise_s"] == pytest.approx(2**0.5 * 0.9 * 2.0, rel=0.03)
    assert finding_of(diagnosis.findings, "temperature").numbers["ratio"] == pytest.approx(1.05, abs=0.12)


def test_case_3_at_f_1_has_no_swaps_and_is_told_what_would_give_them(figure1):
    diagnosis = diagnose(figure1("case3-resgld-F1"))
    assert titles(diagnosis, "problem") & {"no swaps", "hardly any swaps"}
    found = next(f for f in diagnosis.findings if f.title in ("no swaps", "hardly any swaps"))
    assert found.numbers["noise_s"] == pytest.approx(9.95, rel=0.05)
    assert 2.0 < found.numbers["factor_for_2_percent"] < 3.5 < found.numbers["factor_for_10_percent"] < 6.0
    assert found.numbers["rungs_for_F_1"] in (11, 12)
    assert "An F of about 2." in found.words
    assert f"a ladder of about {found.numbers['rungs_for_F_1']} rungs from 1 to 10 at F = 1" in found.words
    assert {"too few round trips", "the correction is far outside the energies"} <= titles(diagnosis, "problem", "warning")
    assert "naive swaps: biased" not in titles(diagnosis, "problem", "warning", "note")


def test_the_advised_factor_does_what_it_says(figure1, tmp_path):
    """Run it: an F for 10 % found on energies at F = 1 gives 10 % to within the change that swaps themselves make."""
    numbers = next(iter(check_swaps(figure1("case3-resgld-F1")))).numbers
    config = replace(get_recipe("figure1/case3-resgld-F1"), n_steps=10_000, n_runs=8)
    run = load_run(run_recipe(replace(config, correction_factor=numbers["factor_for_10_percent"]), 0, tmp_path).path)
    assert float(run.draws.acceptance_rate) == pytest.approx(0.10, abs=0.03)


@pytest.mark.parametrize("case", ["case1", "case3"])
def test_the_naive_test_is_biased_and_rung_0_hotter(figure1, case):
    diagnosis = diagnose(figure1(f"{case}-naive"))
    assert {"naive swaps: biased", "rung 0 is hotter than nominal"} <= titles(diagnosis, "problem", "warning")
    found = finding_of(diagnosis.findings, "naive swaps: biased")
    assert found.severity == "problem"
    assert found.numbers["acceptance_rate"] > 2 * found.numbers["acceptance_at_F_1"]
    hotter = finding_of(diagnosis.findings, "rung 0 is hotter than nominal")
    assert "lower F" in hotter.words
    assert "learning rate" not in hotter.words


def test_a_finite_factor_is_priced(figure1):
    found = finding_of(check_swaps(figure1("case3-resgld-F2")), "F above 1: bias expected")
    assert found.severity == "warning"
    assert found.numbers["acceptance_rate"] > 20 * found.numbers["acceptance_at_F_1"]


def test_heavy_tails_are_told_where_energies_can_be_drawn_again(figure1):
    heavy, light = (next(iter(check_tail(figure1(name)))) for name in ("case2-resgld", "case1-resgld"))
    assert (heavy.severity, light.severity) == ("warning", "fine")
    assert heavy.numbers["tail_index"] < 4.5 < 5.5 < light.numbers["tail_index"]


def test_chains_that_stay_apart(figure1):
    diagnosis = diagnose(figure1("case1-sgld"))
    assert {"chains have not converged", "chains stay apart"} <= titles(diagnosis, "problem")
    assert finding_of(diagnosis.findings, "chains stay apart").numbers["share_between_chains"] > 0.5
    assert "no swaps" not in titles(diagnosis, "problem", "warning")  # there is nothing to exchange with one rung


def test_a_learning_rate_that_is_too_large(tmp_path):
    config = replace(get_recipe("figure1/case1-resgld"), n_steps=10_000, n_runs=16, lr=0.2)
    diagnosis = diagnose(load_run(run_recipe(config, 0, tmp_path).path))
    assert "lower it" in finding_of(diagnosis.findings, "rung 0 is hotter than nominal").words


def test_the_temperature_of_tall_data_is_read(tmp_path):
    config = replace(get_recipe("tall/logistic"), n_data=1_000, n_steps=2_000, n_runs=8, lr_of_mean=0.1)
    diagnosis = diagnose(load_run(run_recipe(config, 0, tmp_path).path))
    numbers = finding_of(diagnosis.findings, "temperature").numbers
    assert numbers["temperature"] == pytest.approx(1.0, abs=0.15)
    assert finding_of(diagnosis.findings, "swaps at nearly every step").severity == "note"  # at F = 1 that is no bias


# Single checks on made-up runs


def test_swaps_at_nearly_every_step_with_a_large_factor(figure1):
    run = figure1("case3-resgld-F2")
    many = replace(run.history, accepted=(0.95 * run.history.proposed).long())
    found = finding_of(check_swaps(replace(run, history=many)), "swaps at nearly every step")
    assert found.severity == "warning"
    assert "F is too large" in found.words


def test_replicas_that_keep_to_their_own_mode(figure1):
    run = figure1("case1-resgld")
    assert not [f for f in check_convergence(run) if f.title == "replicas in different modes"]
    stuck = torch.where(run.draws.replica_at[:, 0].T == 0, -3.0, 2.0)[:, :, None] + 0.1 * torch.randn(16, 2000, 1)
    found = finding_of(check_convergence(replace(run, draws=replace(run.draws, values=stuck))), "replicas in different modes")
    assert found.numbers["share_between_replicas"] > 0.95


def test_a_variance_that_still_moves(figure1):
    run = figure1("case1-resgld")
    assert not list(check_correction(run))
    ramp = torch.linspace(1.0, 4.0, len(run.history.steps))[:, None, None].expand_as(run.history.noise_variance)
    moving = replace(run.history, noise_variance=ramp * (1 + 0.01 * torch.rand(16)))
    found = finding_of(check_correction(replace(run, history=moving)), "sigma2 has not settled")
    assert (found.numbers["third_quarter"], found.numbers["last_quarter"]) == pytest.approx((2.9, 3.6), rel=0.03)
    small = replace(run.history, noise_variance=4.0 + 0.1 * ramp)
    assert not list(check_correction(replace(run, history=small)))


def test_one_chain_tells_no_agreement(figure1):
    run = figure1("case1-resgld")
    alone = replace(run.draws, values=run.draws.values[:1])
    (found,) = [f for f in check_convergence(replace(run, draws=alone, history=None)) if "conver" in f.title]
    assert "no R-hat, for there is one chain" in found.words


def test_the_average_of_a_network(images):
    rising = [0.90 + 0.0001 * k for k in range(90)]
    found = finding_of(check_average(with_curve(images, rising)), "the average has not converged")
    assert found.numbers["gained"] == pytest.approx(0.0029)
    assert "extend" in found.words
    flat = [*rising[:60], *[0.906] * 30]
    assert finding_of(check_average(with_curve(images, flat)), "average").severity == "fine"
    worse = check_average(with_curve(images, flat, nll=0.3, single_nll=0.2))
    assert finding_of(worse, "the average is worse than one network").severity == "warning"
    risen_and_fallen = [*[0.90 + 0.0002 * k for k in range(80)], *[0.9158 - 0.0001 * k for k in range(10)]]
    assert risen_and_fallen[-1] - risen_and_fallen[60] > 0.002  # more than in two thirds of the run, but not rising now
    assert not [f for f in check_average(with_curve(images, risen_and_fallen)) if "not converged" in f.title]


def test_committed_images_from_their_curves(images):
    """No trace is there; swaps, noise and travel are told from the curves in result.json."""
    history = history_from_curves(images)
    assert (history.n_rungs, history.n_chains, history.n_steps) == (2, 1, 97_500)
    # Swaps at epochs 11.5, 99.8, 290.06, 290.07 and 422.4: who stood on rung 0 when the epochs around them began.
    assert history.replica_at[[0, 11, 12, 99, 100, 290, 291, 422, 423], 0, 0].tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1]
    found = list(check_swaps(images))
    few = finding_of(found, "hardly any swaps")
    assert (few.numbers["accepted"], few.numbers["proposed"]) == (5, 95_550)
    assert few.numbers["noise_s"] > 1e6
    assert "rungs, so larger batches" in few.words  # no ladder of that many rungs is advised
    assert 1e4 < few.numbers["factor_for_2_percent"] < few.numbers["factor_for_10_percent"] < 1e7
    assert finding_of(found, "F above 1: bias expected").numbers["acceptance_at_F_1"] < 1e-6
    travel = finding_of(check_travel(images), "too few round trips").numbers
    assert (travel["round_trips_per_chain"], travel["restarts_per_chain"]) == (4.0, 5.0)  # five swaps of one pair
    hotter = finding_of(diagnose(images).findings, "rung 0 is hotter than nominal")
    assert hotter.numbers["times_nominal_at_the_end"] == pytest.approx(0.984**-299, rel=1e-6)


def test_runs_without_swaps_are_not_blamed():
    independent = diagnose(load_run(RESULTS / "cifar10-resnet20-independent" / "seed=0"))
    assert "no swaps by design" in titles(independent, "note")
    descent = diagnose(load_run(RESULTS / "cifar10-resnet20-msgd" / "seed=0"))
    assert not {title for title in titles(descent, "problem", "warning") if "swap" in title or "hotter" in title}
    assert gather(load_run(RESULTS / "cifar10-resnet20-msgd" / "seed=0")) is None


# Folders


def test_failed_unfinished_damaged_and_empty(figure1, tmp_path):
    whole = figure1("case1-resgld").path
    for seed in range(4):
        shutil.copytree(whole, tmp_path / f"seed={seed}")
    result = json.loads((whole / "result.json").read_text())
    (tmp_path / "seed=0" / "result.json").write_text(json.dumps({**result, "status": "failed", "error": "the energy was nan"}))
    (tmp_path / "seed=1" / "result.json").unlink()
    data = (whole / "draws.safetensors").read_bytes()
    (tmp_path / "seed=2" / "draws.safetensors").write_bytes(data[: len(data) // 3])
    (tmp_path / "seed=3" / "config.json").write_text("{")
    (tmp_path / "seed=9").mkdir()
    failed, unfinished, damaged, no_config, empty = diagnose_folder(tmp_path)
    assert "the energy was nan" in finding_of(failed.findings, "the run failed").words
    assert finding_of(unfinished.findings, "the run is not finished").severity == "warning"
    assert "swaps" in titles(unfinished, "fine")  # the part that is there is looked at
    assert any("ends at byte" in finding.words for finding in damaged.findings)
    assert any("config.json is damaged at line 1" in finding.words for finding in no_config.findings)
    assert (empty.status, titles(empty, "problem")) == ("empty", {"empty"})


def test_a_missing_dependency_is_a_note_that_names_the_extra(figure1, monkeypatch):
    def absent(draws):
        raise MissingDependencyError("pip install 'torchrex[diagnostics]'")

    monkeypatch.setattr(doctor_draws, "convergence", absent)
    diagnosis = diagnose(figure1("case1-resgld"))
    assert "torchrex[diagnostics]" in finding_of(diagnosis.findings, "not told").words
    assert diagnosis.healthy


def test_our_own_mistakes_are_not_hidden(figure1, monkeypatch):
    def broken(draws):
        raise ValueError("a bug")

    monkeypatch.setattr(doctor_draws, "convergence", broken)
    with pytest.raises(ValueError, match="a bug"):
        diagnose(figure1("case1-resgld"))
    assert "not told" in titles(diagnose(replace(figure1("case1-resgld"), problems=("damaged",))), "note")


def test_the_command(figure1, tmp_path):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(doctor)
    shown = CliRunner().invoke(app, [str(figure1("case1-naive").path)])
    assert shown.exit_code == 0  # whatever is found
    assert "problem: naive swaps: biased." in shown.output
    told = CliRunner().invoke(app, [str(figure1("case1-naive").path), "--json"])
    (machine,) = json.loads(told.output)
    assert machine == json.loads(json.dumps(as_json([diagnose(figure1("case1-naive"))])[0]))
    assert machine["findings"][0]["numbers"]["correction_factor"] == "inf"
    for bad in (tmp_path, tmp_path / "none"):
        assert isinstance(CliRunner().invoke(app, [str(bad)]).exception, RunFolderError)
