"""The doctor tells the three cases of figure 1 apart, says what to change, and gives a healthy run
a clean bill.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from torchrex.cli.look import doctor
from torchrex.diagnostics import Estimate, round_trips
from torchrex.errors import MissingDependencyError, RunFolderError
from torchrex.experiments import get_recipe, run_recipe
from torchrex.report import doctor_advice, doctor_draws
from torchrex.report.doctor import as_json, as_text, diagnose, diagnose_folder, findings_of, roll_up
from torchrex.report.doctor_average import check_average
from torchrex.report.doctor_draws import (
    check_convergence,
    check_tail,
    check_temperature,
    check_truth,
)
from torchrex.report.doctor_evidence import Counted, count, gather, history_from_curves
from torchrex.report.doctor_generators import check_generators
from torchrex.report.doctor_ladder import check_ladder
from torchrex.report.doctor_swaps import count_findings
from torchrex.report.doctor_words import about, measured, number, percent, several, times
from torchrex.report.findings import SEVERITIES, Diagnosis, Finding
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


def with_curve(run, curve, **metrics):
    result = {
        **run.result,
        "metrics": {**run.metrics, **metrics},
        "curves": {"probabilities_accuracy": curve},
    }
    return replace(run, result=result)


# The three cases


def test_case_1_is_fine(figure1):
    diagnosis = diagnose(figure1("case1-resgld"))
    assert diagnosis.healthy, as_text(diagnosis)
    assert diagnosis.verdict == "nothing wrong was found"
    assert titles(diagnosis, "fine") == {
        "truth",
        "swaps",
        "round trips",
        "convergence",
        "temperature",
        "noise",
    }
    swaps = finding_of(diagnosis.findings, "swaps").numbers
    assert swaps["acceptance_rate"] == pytest.approx(0.112, abs=0.01)
    assert swaps["acceptance_expected"] == pytest.approx(swaps["acceptance_rate"], abs=0.015)
    assert swaps["noise_s"] == pytest.approx(2**0.5 * 0.9 * 2.0, rel=0.03)
    assert finding_of(diagnosis.findings, "temperature").numbers["ratio"] == pytest.approx(
        1.05, abs=0.12
    )


def test_a_known_truth_is_used(figure1):
    """Chains that all stay in one mode agree with each other, and R-hat is 1; the left weight is 0,
    and the truth 0.4.
    """
    diagnosis = diagnose(figure1("case3-sgld"))
    found = finding_of(diagnosis.findings, "the answer is wrong")
    assert found.severity == "problem"
    assert (found.numbers["value"], found.numbers["truth"]) == (0.0, pytest.approx(0.4))
    assert "temperatures=1,10" in found.words  # what would cross
    agreed = finding_of(diagnosis.findings, "convergence")  # which is all that was said of it
    assert (agreed.severity, agreed.numbers["started_at_one_point"]) == ("fine", True)
    assert titles(diagnosis, "note") >= {"one rung"}
    assert "one rung" not in titles(diagnose(figure1("case1-resgld")), *SEVERITIES)


@pytest.mark.parametrize(
    ("value", "error", "n_runs", "severity"),
    [
        (0.43, 0.001, 64, "fine"),  # off by 7.5 %: a learning rate does as much
        (0.45, 0.010, 64, "problem"),  # five standard errors
        (0.45, 0.020, 64, "warning"),  # two and a half of them
        (0.45, 0.010, 2, "warning"),  # five of two runs: Student's t with one degree of freedom
        (0.0, 0.0, 64, "problem"),
        (0.0, None, 1, "problem"),
    ],
)
def test_how_far_from_the_truth(figure1, value, error, n_runs, severity):
    run = figure1("case1-resgld")
    metrics = {
        "left_weight": value,
        "left_weight_se": error,
        "left_weight_true": 0.4,
        "n_runs": n_runs,
    }
    (found,) = check_truth(replace(run, result={**run.result, "metrics": metrics}))
    assert found.severity == severity


def test_case_3_at_f_1_has_no_swaps_and_is_told_what_would_give_them(figure1):
    diagnosis = diagnose(figure1("case3-resgld-F1"))
    assert titles(diagnosis, "problem") & {"no swaps", "hardly any swaps"}
    found = next(f for f in diagnosis.findings if f.title in ("no swaps", "hardly any swaps"))
    assert found.numbers["noise_s"] == pytest.approx(9.95, rel=0.05)
    assert (
        2.0
        < found.numbers["factor_for_2_percent"]
        < 3.5
        < found.numbers["factor_for_10_percent"]
        < 6.0
    )
    assert found.numbers["rungs_for_F_1"] in (11, 12)
    assert "An F of about 2." in found.words
    assert (
        f"F = 1 needs a ladder of about {found.numbers['rungs_for_F_1']} rungs from 1 to 10."
        in found.words
    )
    # What follows from that is not said again.
    assert not {"too few round trips", "the correction is far outside the energies"} & titles(
        diagnosis, *SEVERITIES
    )
    assert "naive swaps: biased" not in titles(diagnosis, "problem", "warning", "note")


def test_the_advised_factor_does_what_it_says(figure1, tmp_path):
    """Run it: an F for 10 % found on energies at F = 1 gives 10 % to within the change that swaps
    themselves make.
    """
    numbers = next(iter(check_ladder(figure1("case3-resgld-F1")))).numbers
    config = replace(get_recipe("figure1/case3-resgld-F1"), n_steps=10_000, n_runs=8)
    run = load_run(
        run_recipe(
            replace(config, correction_factor=numbers["factor_for_10_percent"]), 0, tmp_path
        ).path
    )
    assert float(run.draws.acceptance_rate) == pytest.approx(0.10, abs=0.03)


@pytest.mark.parametrize("case", ["case1", "case3"])
def test_the_naive_test_is_biased_and_rung_0_hotter(figure1, case):
    diagnosis = diagnose(figure1(f"{case}-naive"))
    assert {"naive swaps: biased", "rung 0 is hotter than nominal"} <= titles(
        diagnosis, "problem", "warning"
    )
    found = finding_of(diagnosis.findings, "naive swaps: biased")
    assert found.severity == "problem"
    assert found.numbers["acceptance_rate"] > 2 * found.numbers["acceptance_at_F_1"]
    hotter = finding_of(diagnosis.findings, "rung 0 is hotter than nominal")
    assert "lower F" in hotter.words
    assert "learning rate" not in hotter.words
    assert "lower F" in finding_of(diagnosis.findings, "the answer is wrong").words


def test_a_finite_factor_is_priced(figure1):
    found = finding_of(check_ladder(figure1("case3-resgld-F2")), "F above 1: bias expected")
    assert re.search(
        r"needs a ladder of about 1[12] rungs from 1 to 10, for noise s = 9\.\d+ is above 4",
        found.words,
    )
    assert found.severity == "warning"
    assert found.numbers["acceptance_rate"] > 20 * found.numbers["acceptance_at_F_1"]


def test_heavy_tails_are_told_where_energies_can_be_drawn_again(figure1):
    heavy, light = (
        next(iter(check_tail(figure1(name)))) for name in ("case2-resgld", "case1-resgld")
    )
    assert (heavy.severity, light.severity) == ("warning", "fine")
    assert heavy.numbers["tail_index"] < 4.5 < 5.5 < light.numbers["tail_index"]


def test_chains_that_stay_apart(figure1):
    diagnosis = diagnose(figure1("case1-sgld"))
    assert {"chains have not converged", "chains stay apart"} <= titles(diagnosis, "problem")
    assert finding_of(diagnosis.findings, "chains stay apart").numbers["share_between_chains"] > 0.5
    assert "no swaps" not in titles(
        diagnosis, "problem", "warning"
    )  # there is nothing to exchange with one rung


def test_a_learning_rate_that_is_too_large(tmp_path):
    config = replace(get_recipe("figure1/case1-resgld"), n_steps=10_000, n_runs=16, lr=0.2)
    diagnosis = diagnose(load_run(run_recipe(config, 0, tmp_path).path))
    assert "lower it" in finding_of(diagnosis.findings, "rung 0 is hotter than nominal").words


def test_the_temperature_of_tall_data_is_read(tmp_path):
    config = replace(
        get_recipe("tall/logistic"), n_data=1_000, n_steps=2_000, n_runs=8, lr_of_mean=0.1
    )
    diagnosis = diagnose(load_run(run_recipe(config, 0, tmp_path).path))
    numbers = finding_of(diagnosis.findings, "temperature").numbers
    assert numbers["temperature"] == pytest.approx(1.0, abs=0.15)
    assert (
        finding_of(diagnosis.findings, "swaps at nearly every step").severity == "note"
    )  # at F = 1 that is no bias


# Single checks on made-up runs


def test_swaps_at_nearly_every_step_with_a_large_factor(figure1):
    run = figure1("case3-resgld-F2")
    many = replace(run.history, accepted=(0.95 * run.history.proposed).long())
    found = finding_of(check_ladder(replace(run, history=many)), "swaps at nearly every step")
    assert found.severity == "warning"
    assert "F is too large" in found.words


def test_replicas_that_keep_to_their_own_mode(figure1):
    run = figure1("case1-resgld")
    assert not [f for f in check_convergence(run) if f.title == "replicas in different modes"]
    stuck = torch.where(run.draws.replica_at[:, 0].T == 0, -3.0, 2.0)[
        :, :, None
    ] + 0.1 * torch.randn(16, 2000, 1)
    found = finding_of(
        check_convergence(replace(run, draws=replace(run.draws, values=stuck))),
        "replicas in different modes",
    )
    assert found.numbers["share_between_replicas"] > 0.95


def test_a_variance_that_still_moves(figure1):
    run = figure1("case1-resgld")
    assert "sigma2 has not settled" not in {found.title for found in check_ladder(run)}
    ramp = torch.linspace(1.0, 4.0, len(run.history.steps))[:, None, None].expand_as(
        run.history.noise_variance
    )
    moving = replace(run.history, noise_variance=ramp * (1 + 0.01 * torch.rand(16)))
    found = finding_of(check_ladder(replace(run, history=moving)), "sigma2 has not settled")
    assert (found.numbers["third_quarter"], found.numbers["last_quarter"]) == pytest.approx(
        (2.9, 3.6), rel=0.03
    )
    small = replace(run.history, noise_variance=4.0 + 0.1 * ramp)
    assert "sigma2 has not settled" not in {
        found.title for found in check_ladder(replace(run, history=small))
    }


def test_noise_above_4_is_not_fine_whatever_was_accepted(figure1):
    """At sigma2 = 16 the noise is s = sqrt(2) * 0.9 * 4 = 5.09, which needs 7 rungs; the counts are
    those of a lively run.
    """
    run = figure1("case1-resgld")

    def swaps(sigma2, **changes):
        noisy = replace(
            run.history,
            noise_variance=torch.full_like(run.history.noise_variance, sigma2),
            correction=None,
            **changes,
        )
        gap = noisy.inverse_gap[:, :, None]
        return list(
            check_ladder(
                replace(run, history=replace(noisy, correction=gap * noisy.noise_variance.double()))
            )
        )

    found = finding_of(swaps(16.0), "too much noise for these temperatures")
    assert found.severity == "warning"
    assert found.numbers["noise_s"] == pytest.approx(5.0912, abs=1e-3)
    assert found.numbers["rungs_for_F_1"] == 7
    assert "To have more at F = 1 takes a ladder of about 7 rungs from 1 to 10." in found.words
    assert "An F of about" not in found.words  # 11 % of its tests swap already
    some = {"accepted": torch.full((1, 16), 1_000)}  # 5 %
    found = finding_of(swaps(16.0, **some), "too much noise for these temperatures")
    assert (
        f"An F of about {about(found.numbers['factor_for_10_percent'])} (10 % accepted) would swap, with bias;"
        in found.words
    )
    assert finding_of(swaps(9.0), "swaps").severity == "fine"  # s = 3.8
    # The same noise of 9, with 9 or 10 swaps of each chain in 2,000 tests, 0.5 %.
    for n, title in ((9, "few swaps"), (10, "swaps")):
        some = {"accepted": torch.full((1, 16), n), "proposed": torch.full((1, 16), 2_000)}
        (told,) = (each for each in swaps(9.0, **some) if "accepted" in each.numbers)
        assert told.title == title
        assert (". Run longer. " in told.words) == (n == 9)  # the noise is not what is in the way


TOO_FEW_TESTS = "too few swap tests to say"


def test_a_handful_of_tests_is_no_fault(figure1):
    """Rungs that accept 2 % make no swap in 149 tests with probability 0.98^149 = 0.049: up to
    there nothing is missing.
    """
    run = figure1("case1-resgld")
    nobody_moved = run.history.replica_at[:1].expand_as(run.history.replica_at)

    def told(accepted, proposed, chains=1, sigma2=4.0, factor=1.0):
        variance = torch.full_like(run.history.noise_variance[..., :chains], sigma2)
        counts = {
            "accepted": torch.full((1, chains), accepted),
            "proposed": torch.full((1, chains), proposed),
        }
        rows = {
            "energy": run.history.energy[..., :chains],
            "replica_at": nobody_moved[..., :chains],
            "noise_variance": variance,
        }
        correction = run.history.inverse_gap[:, :, None] * variance.double() / factor
        history = replace(run.history, **rows, **counts, correction=correction)
        settings = replace(run.settings, correction_factor=factor)
        return list(check_ladder(replace(run, history=history, settings=settings)))

    for accepted, proposed in ((1, 1), (1, 2), (5, 15), (0, 149)):
        (found,) = told(accepted, proposed)  # nor is it said that replicas did not travel
        assert (found.severity, found.title) == ("note", TOO_FEW_TESTS)
        assert f" in {several(proposed, 'test')}" in found.words
        assert "It takes 150 tests to tell" in found.words
        assert found.words.endswith("Run longer.")
    (found,) = told(0, 149, sigma2=16.0)
    assert found.words.endswith(
        "Run longer. Noise s = 5.091 at temperatures 1 and 10 leaves 1.09 % of the swaps between equal energies at F = 1."
    )
    assert [each.title for each in told(2, 2, factor=50.0)] == [
        TOO_FEW_TESTS
    ]  # two of two prove no bias of F
    assert finding_of(told(0, 150), "no swaps").severity == "problem"
    assert finding_of(told(9, 150), "few swaps")
    assert (
        finding_of(told(10, 20), "swaps").severity == "fine"
    )  # enough swaps are enough, however few the tests
    assert finding_of(told(0, 10, chains=16), "no swaps")  # 160 tests of one law


def test_a_handful_of_counted_tests_is_no_fault(digits, tmp_path):
    few = TOO_FEW_TESTS
    for accepted, proposed, title in (
        (1, 2, few),
        (0, 149, few),
        (0, 150, "no swaps"),
        (9, 150, "few swaps"),
    ):
        found = findings_of(
            unfinished(digits, tmp_path / f"{accepted}-{proposed}", accepted, proposed)
        )
        assert finding_of(found, title).severity == ("note" if title == few else "warning")
    # Of a ladder, the pair that is tested most tells how long it is: one that is hardly ever tested
    # is a fault.
    (found,) = count_findings(
        load_run(digits), [Counted(0, 0, 5, "a test"), Counted(1, 500, 5_000, "a test")]
    )
    assert found.title == "no swaps"


def test_one_chain_tells_no_agreement(figure1):
    run = figure1("case1-resgld")
    alone = replace(run.draws, values=run.draws.values[:1])
    (found,) = [
        f for f in check_convergence(replace(run, draws=alone, history=None)) if "conver" in f.title
    ]
    assert "no R-hat, for there is one chain" in found.words


def test_the_average_of_a_network(images):
    rising = [0.90 + 0.0001 * k for k in range(90)]
    found = finding_of(check_average(with_curve(images, rising)), "the average has not converged")
    assert found.numbers["gained"] == pytest.approx(0.0029)
    assert "extend" in found.words
    flat = [*rising[:60], *[0.906] * 30]
    assert finding_of(check_average(with_curve(images, flat)), "average").severity == "fine"
    risen_and_fallen = [
        *[0.90 + 0.0002 * k for k in range(80)],
        *[0.9158 - 0.0001 * k for k in range(10)],
    ]
    assert (
        risen_and_fallen[-1] - risen_and_fallen[60] > 0.002
    )  # more than in two thirds of the run, but not rising now
    (found,) = check_average(with_curve(images, risen_and_fallen))
    assert found.severity == "fine"
    # By hand: 0.9149 - 0.9120, and 0.9149 - 0.9158.
    assert (
        "it rose by 0.29 points, but not in their last tenth (-0.09 points): it has stopped rising."
        in found.words
    )
    assert "still rising would be" not in found.words
    (found,) = check_average(with_curve(images, flat))
    assert "it changed by +0.00 points; still rising would be more than 0.20 points" in found.words


def test_an_average_is_worse_only_beyond_the_error_of_its_test_images(images):
    """By hand, 10,000 images: sqrt((0.94 * 0.06 + 0.945 * 0.055) / 10,000) = 0.33 points, so 0.5
    are noise and 0.8 are not.
    """
    flat = [0.94] * 9

    def told(accuracy, single, run=images, **metrics):
        (found,) = check_average(
            with_curve(run, flat, accuracy=accuracy, single_accuracy=single, **metrics)
        )
        return found

    within, beyond = told(0.94, 0.945), told(0.94, 0.948)
    assert (within.severity, within.title) == ("fine", "average")
    assert within.numbers["standard_error"] == pytest.approx(0.0032920, abs=1e-6)
    assert "-0.50 +- 0.33 points (binomial, 10,000 test images), within noise" in within.words
    assert (beyond.severity, beyond.title) == ("warning", "the average is worse than one network")
    assert "-0.80 +- 0.33 points" in beyond.words
    assert told(0.948, 0.94).severity == "fine"
    few = replace(images, settings=replace(images.settings, test_subset=200))
    assert told(0.94, 0.948, few).severity == "fine"  # of 200 images that is one or two
    # A larger NLL alone has no known error: it is told, and not blamed.
    nll = told(0.94, 0.94, nll=0.3, single_nll=0.2)
    assert nll.severity == "note"
    assert "0.3000 against 0.2000" in nll.words


@pytest.mark.parametrize(
    "damage",
    [
        {"energy": None},
        {"swap_epochs": None},
        {"correction": [[1.0, 2.0]]},
        {"energy": [[1.0], [2.0, 3.0]]},
        {"epoch": ["a"]},
    ],
)
def test_damaged_curves_tell_nothing(images, damage):
    curves = {
        name: values
        for name, values in {**images.result["curves"], **damage}.items()
        if values is not None
    }
    assert history_from_curves(replace(images, result={**images.result, "curves": curves})) is None


def test_committed_images_from_their_curves(images):
    """No trace is there; swaps, noise and travel are told from the curves in result.json."""
    history = history_from_curves(images)
    assert (history.n_rungs, history.n_chains, history.n_steps) == (2, 1, 97_500)
    # Swaps at epochs 11.5, 99.8, 290.06, 290.07 and 422.4: who stood on rung 0 when the epochs
    # around them began.
    assert history.replica_at[[0, 11, 12, 99, 100, 290, 291, 422, 423], 0, 0].tolist() == [
        0,
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        1,
    ]
    more = [
        {**images.result["swaps"][0], "accepted": 6}
    ]  # than are listed: who stood where is not known
    unlisted = replace(images, result={**images.result, "swaps": more})
    assert history_from_curves(unlisted).swaps is None
    words = finding_of(check_ladder(unlisted), "hardly any swaps").words
    assert "F was 150,000 at the start" in words
    assert "tests there" not in words  # when they came is not known either
    found = list(check_ladder(images))
    few = finding_of(found, "hardly any swaps")
    assert (few.numbers["accepted"], few.numbers["proposed"]) == (5, 95_550)
    assert few.numbers["noise_s"] > 1e6
    assert "no ladder of sensible length would do" in few.words  # 3e9 rungs are no advice
    assert "e9 rungs" not in few.words
    assert "annealed from temperatures 0.01 and 0.05 to 5.111e-7 and 2.556e-6" in few.words
    assert (
        "F was 150,000 at the start, of which the factor 0.7 a swap has left 25,210 at the end (it grows"
        in few.words
    )
    assert "It swapped once in about 24,000 tests there." in few.words
    # What is advised is more than the run has, and both are of the last quarter.
    assert few.numbers["factor_in_the_last_quarter"] == pytest.approx(150_000 * 0.7**5, rel=1e-3)
    assert few.numbers["factor_for_2_percent"] > 2 * few.numbers["factor_in_the_last_quarter"]
    assert "Rung 0 got something new 5 times: mixing between modes is left to chance." in few.words
    assert 1e4 < few.numbers["factor_for_2_percent"] < few.numbers["factor_for_10_percent"] < 1e7
    assert finding_of(found, "F above 1: bias expected").numbers["acceptance_at_F_1"] < 1e-6
    assert (few.numbers["round_trips_per_chain"], few.numbers["restarts_per_chain"]) == (
        4.0,
        5.0,
    )  # five swaps of one pair
    hotter = finding_of(diagnose(images).findings, "rung 0 is hotter than nominal")
    assert hotter.numbers["times_nominal_at_the_end"] == pytest.approx(0.984**-299, rel=1e-6)


@pytest.mark.parametrize(
    ("run", "swaps", "start", "left"),
    [  # by hand: the first F times 0.7 for every swap; in the middle of the quarter it was another if a swap came later
        (
            "cifar10-resnet20/seed=1",
            6,
            150_000,
            "17,650 at the end, about 25,000 in the middle of that quarter",
        ),
        (
            "cifar10-resnet20/seed=2",
            5,
            150_000,
            "25,210 at the end, about 36,000 in the middle of that quarter",
        ),
        (
            "cifar10-resnet20-F1e5/seed=3",
            1,
            50_000,
            "35,000 at the end, about 50,000 in the middle of that quarter",
        ),
        ("cifar10-resnet20-batch1024/seed=0", 4, 150_000, "36,010 at the end"),
        ("cifar10-wrn-28-10/seed=0", 0, 150_000, ""),
    ],
)
def test_the_factor_that_swaps_have_left(run, swaps, start, left):
    found = next(
        found
        for found in check_ladder(load_run(RESULTS / run))
        if "factor_at_the_end" in found.numbers
    )
    assert found.numbers["accepted"] == swaps
    assert found.numbers["factor_at_the_end"] == pytest.approx(start * 0.7**swaps)
    told = f", of which the factor 0.7 a swap has left {left}" if left else ""
    assert f"; F was {start:,} at the start{told} (it grows as the ladder cools" in found.words


def test_generators_that_make_one_image_or_a_few(images):
    one, few = (
        "nearly one image",
        "few different images",
    )  # what samples.png of the runs with these varieties shows
    for variety, makes in ((0.006, one), (0.0515, one), (0.15, few), (0.23, few)):
        (found,) = check_generators(
            replace(images, result={**images.result, "metrics": {"variety": variety}})
        )
        assert (found.severity, found.title) == ("warning", "the generators have collapsed")
        assert f"less than 0.25: each makes {makes}, as samples.png shows" in found.words


def test_runs_without_swaps_are_not_blamed():
    independent = diagnose(load_run(RESULTS / "cifar10-resnet20-independent" / "seed=0"))
    assert "no swaps by design" in titles(independent, "note")
    descent = diagnose(load_run(RESULTS / "cifar10-resnet20-msgd" / "seed=0"))
    assert not {
        title
        for title in titles(descent, "problem", "warning")
        if "swap" in title or "hotter" in title
    }
    assert gather(load_run(RESULTS / "cifar10-resnet20-msgd" / "seed=0")) is None


def test_a_temperature_is_judged_by_a_tolerance_that_is_told(figure1, monkeypatch):
    run = figure1("case1-resgld")

    def told(tau, error):
        monkeypatch.setattr(
            doctor_draws,
            "equipartition_temperature",
            lambda *_: Estimate(torch.tensor(tau), torch.tensor(error)),
        )
        (found,) = check_temperature(run)
        return found.severity, found.title, found.words

    severity, _, words = told(1.054, 0.006)  # nine standard errors, but small
    assert severity == "fine"
    assert (
        "reads 1.0540 +- 0.0060 on rung 0, 5.4 % above its temperature 1: within the 10 % tolerated."
        in words
    )
    severity, _, words = told(1.3, 0.15)  # large, but not sure
    assert severity == "fine"
    assert "within 3 standard errors" in words
    assert told(1.12, 0.01)[:2] == ("warning", "rung 0 is hotter than nominal")
    assert told(1.6, 0.01)[:2] == ("problem", "rung 0 is hotter than nominal")
    severity, title, words = told(0.8, 0.01)
    assert (severity, title) == ("warning", "rung 0 is colder than nominal")
    assert "20 % below" in words


def test_numbers_look_the_same_everywhere():
    assert [
        number(x)
        for x in (0.1025, 0.102, 150_000.0, 25210.4, 9.957, 1000, 2.5556e-6, 0.0, float("inf"))
    ] == [*("0.1025", "0.102", "150,000", "25,210", "9.957", "1,000", "2.556e-6", "0", "inf")]
    assert [
        number(x) for x in (1.1384e9, 7.842e8, -1e6, 999_999_999.0, 2.5e11, 3e12, 9.9996e11)
    ] == [
        *(
            "1.138 billion",
            "784.2 million",
            "-1 million",
            "1 billion",
            "250 billion",
            "3e12",
            "1e12",
        )
    ]
    assert [about(x) for x in (2.53, 1.6e5, 11.4, 123.0)] == ["2.5", "160,000", "11", "120"]
    assert [percent(x) for x in (0.1117, 0.42, 5.23e-5, 1e-9, 0.0, 1.0)] == [
        *("11.2 %", "42 %", "0.00523 %", "less than 0.0001 %", "0 %", "100 %")
    ]
    assert [times(n) for n in (0, 1, 2, 3, 2.52, 12345)] == [
        "never",
        "once",
        "twice",
        "3 times",
        "2.5 times on average",
        "12,345 times",
    ]
    assert [times(x) for x in (1.04, 0.75, 12.3)] == [
        "1.0 times on average",
        "0.75 times on average",
        "12 times on average",
    ]
    assert [several(n, "test") for n in (0, 1, 2_000)] == ["0 tests", "1 test", "2,000 tests"]
    assert measured(1.0523, 0.0061) == "1.0523 +- 0.0061"
    assert measured(1.0, float("nan")) == "1 (its error is not known)"


def test_what_a_run_has_already_is_no_advice(figure1):
    """At F = 1 with 3 % of few tests: not an F of 1, no bias, and nothing to change but the length."""
    run = figure1("case1-resgld")
    short = replace(run.history, accepted=torch.full((1, 16), 3), proposed=torch.full((1, 16), 100))
    found = finding_of(check_ladder(replace(run, history=short)), "few swaps")
    assert found.words.endswith("this run has F = 1. Run longer.")
    sentence = doctor_advice._sentence
    for factor, rate, low, high, wanted in (
        (
            1.0,
            0.01,
            1.0004,
            3.0,
            "An F of about 3 (10 % accepted) would swap, with bias; F = 1 needs a ladder.",
        ),
        (1.0, 0.01, 1.0, 1.0, "To have more at F = 1 takes a ladder."),
        (
            0.5,
            0.001,
            1.0,
            1.0,
            "An F of about 1 (2 % accepted) to 1 (10 % accepted) would swap; F = 1 needs a ladder.",
        ),
        (
            2.0,
            0.03,
            2.5,
            4.0,
            "An F of about 4 (10 % accepted) would swap, with bias; F = 1 needs a ladder.",
        ),
        (5.0, 0.001, 2.5, 4.0, "To have more at F = 1 takes a ladder."),
    ):
        assert sentence(low, high, "a ladder", factor, rate) == wanted


def test_one_temperature_is_told_to_add_one(figure1):
    found = finding_of(check_convergence(figure1("case1-sgld")), "chains stay apart")
    assert "add a hotter rung (temperatures=1,10)" in found.words
    assert "swap" not in found.words
    run = figure1("case1-resgld")
    apart = run.draws.values + 100 * torch.arange(16.0)[:, None, None]
    found = finding_of(
        check_convergence(replace(run, draws=replace(run.draws, values=apart))), "chains stay apart"
    )
    assert "It swaps often enough: run longer" in found.words
    few = replace(
        run.history,
        accepted=torch.ones_like(run.history.accepted),
        proposed=torch.full_like(run.history.proposed, 9),
    )
    few = replace(
        run, history=few, draws=replace(run.draws, values=apart)
    )  # 16 swaps in 144 tests tell no rate
    assert "often enough" not in finding_of(check_convergence(few), "chains stay apart").words


def test_a_few_trips_of_a_run_that_swaps_often(figure1):
    run = figure1("case1-resgld")
    names = ("steps", "energy", "replica_at", "noise_variance", "temperature", "correction")
    short = replace(run.history, **{name: getattr(run.history, name)[:20] for name in names})
    found = finding_of(check_ladder(replace(run, history=short)), "too few round trips")
    assert found.words.endswith("Run longer.")
    assert "A chain made on average at least " in found.words
    assert "its 2 replicas together" in found.words


def test_no_temperature_of_chains_that_have_not_converged(figure1, monkeypatch):
    monkeypatch.setattr(
        doctor_draws,
        "equipartition_temperature",
        lambda *_: Estimate(torch.tensor(2.0), torch.tensor(0.01)),
    )
    (found,) = check_temperature(figure1("case1-sgld"))
    assert (found.severity, found.title) == ("note", "temperature not told")
    assert "ask again when they have" in found.words
    assert "learning rate" not in found.words
    monkeypatch.setattr(doctor_draws, "BAD_RHAT", 100.0)
    (found,) = check_temperature(figure1("case1-sgld"))
    assert "learning rate" in found.words


def test_what_follows_from_f_1_is_said_of_these_states(figure1):
    found = finding_of(check_ladder(figure1("case3-resgld-F2")), "F above 1: bias expected")
    assert "on the states of this run F = 1 would accept about" in found.words


def test_effective_draws_are_a_lower_bound_by_name(figure1, monkeypatch):
    monkeypatch.setattr(doctor_draws, "ENOUGH", 8_000)
    found = next(iter(check_convergence(figure1("case1-resgld"))))
    n = found.numbers["ess_from_draws"]
    assert n < found.numbers["n_draws"]
    assert (
        f"worth at least {found.numbers['ess_at_least']:,.0f} independent ones (from {n:,} of them, thinned)"
        in found.words
    )
    assert "least_ess" not in found.numbers


# Folders


def test_failed_unfinished_damaged_and_empty(figure1, tmp_path):
    whole = figure1("case1-resgld").path
    for seed in range(4):
        shutil.copytree(whole, tmp_path / f"seed={seed}")
    result = json.loads((whole / "result.json").read_text())
    (tmp_path / "seed=0" / "result.json").write_text(
        json.dumps({**result, "status": "failed", "error": "the energy was nan"})
    )
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
    assert any(
        "config.json is damaged at line 1" in finding.words for finding in no_config.findings
    )
    assert (empty.status, titles(empty, "problem")) == ("empty", {"empty"})


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run of the digits that is through, of 400 steps."""
    config = replace(get_recipe("digits/resghmc"), epochs=20, burn_in_epochs=10)
    return run_recipe(config, 0, tmp_path_factory.mktemp("digits")).path


def unfinished(digits, folder, accepted, proposed=1_000, **config):
    """As a run that was paused leaves it: counts, and neither trace nor metrics."""
    path = folder / "digits" / "resghmc" / "seed=0"
    path.mkdir(parents=True)
    settings = json.loads((digits / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, **config}))
    result = json.loads((digits / "result.json").read_text())
    swaps = [
        {
            "pair": [0, 1],
            "proposed": proposed,
            "accepted": accepted,
            "acceptance_rate": accepted / proposed,
        }
    ]
    (path / "result.json").write_text(
        json.dumps({**result, "status": "paused", "metrics": {}, "steps_done": 40, "swaps": swaps})
    )
    return load_run(path)


def test_an_unfinished_network_is_told_by_the_counts_of_its_result(digits, tmp_path):
    many = findings_of(unfinished(digits, tmp_path / "many", 63))
    assert (
        "The rungs swapped 63 times in 1,000 tests (6.3 %), says result.json."
        in finding_of(many, "swaps").words
    )
    assert "--resume` goes on" in finding_of(many, "the run is not finished").words
    # 2 Phi(-s/2) = 1 / 1,000 at s = 6.581, which is 7 pairs of s below 1.
    few = finding_of(findings_of(unfinished(digits, tmp_path / "few", 1)), "hardly any swaps")
    assert few.severity == "warning"
    assert "swapped once in 1,000 tests (0.1 %)" in few.words
    assert few.numbers["noise_s_from_counts"] == pytest.approx(6.581, abs=1e-3)
    assert "a ladder of about 8 rungs from 0.1 to 0.1025" in few.words
    assert 1 < few.numbers["factor_for_2_percent"] < few.numbers["factor_for_10_percent"] < 4
    none = finding_of(findings_of(unfinished(digits, tmp_path / "none", 0)), "no swaps")
    assert (
        "never swapped in 1,000 tests, says result.json. That is what noise of at least about s = 5.9 leaves."
        in none.words
    )
    other = finding_of(
        findings_of(unfinished(digits, tmp_path / "other", 1, correction_factor=3.0)),
        "hardly any swaps",
    )
    assert "told when it has ended" in other.words  # the rate alone does not tell s at another F
    naive = findings_of(unfinished(digits, tmp_path / "naive", 500, correction_factor="inf"))
    assert finding_of(naive, "naive swaps: biased").severity == "problem"


def test_the_energies_of_draws_that_were_cut_short_are_used(figure1, tmp_path):
    """Who stood where comes last in the file: swaps and noise are told without it, trips are not."""
    whole = diagnose(figure1("case1-resgld"))
    shutil.copytree(figure1("case1-resgld").path, tmp_path / "seed=0")
    data = (tmp_path / "seed=0" / "draws.safetensors").read_bytes()
    (tmp_path / "seed=0" / "draws.safetensors").write_bytes(data[: int(0.7 * len(data))])
    diagnosis = diagnose(load_run(tmp_path / "seed=0"))
    swaps, same = (finding_of(each.findings, "swaps").numbers for each in (diagnosis, whole))
    assert swaps["noise_s"] == pytest.approx(same["noise_s"], rel=0.02)
    assert (swaps["accepted"], swaps["proposed"]) == (same["accepted"], same["proposed"])
    assert "round trips" not in {found.title for found in diagnosis.findings}
    words = " ".join(found.words for found in diagnosis.findings)
    assert "still has its counts, energies and sigma2, which are used; its draws are not" in words
    assert "too little" not in words
    (tmp_path / "seed=0" / "draws.safetensors").write_bytes(data[:5])
    words = " ".join(found.words for found in diagnose(load_run(tmp_path / "seed=0")).findings)
    assert "unpack" not in words


def test_a_trace_that_is_gone_is_told(digits, tmp_path):
    assert "missing" not in titles(diagnose(load_run(digits)), *SEVERITIES)
    shutil.copytree(digits, tmp_path / "digits" / "resghmc" / "seed=0")
    (tmp_path / "digits" / "resghmc" / "seed=0" / "trace.safetensors").unlink()
    found = finding_of(
        diagnose(load_run(tmp_path / "digits" / "resghmc" / "seed=0")).findings, "missing"
    )
    assert found.severity == "note"
    assert found.words.startswith("There is no trace.safetensors")
    committed = diagnose(load_run(RESULTS / "cifar10-resnet20" / "seed=0"))
    assert "missing" not in titles(committed, *SEVERITIES)


def test_networks_are_not_blamed_for_a_temperature_that_nobody_can_tell(digits):
    assert "temperature not told" not in titles(diagnose(load_run(digits)), *SEVERITIES)


def test_damage_is_told_with_its_place_and_counts_are_read_up_to_it(digits, tmp_path):
    (whole,) = (
        found.numbers for found in findings_of(load_run(digits)) if "accepted" in found.numbers
    )
    assert 0 < whole["accepted"] < whole["proposed"] == 400
    for name in ("trace", "result", "config"):
        shutil.copytree(digits, tmp_path / name / "digits" / "resghmc" / "seed=0")
    trace, result, config = (
        tmp_path / name / "digits" / "resghmc" / "seed=0" for name in ("trace", "result", "config")
    )
    data = (digits / "trace.safetensors").read_bytes()
    (trace / "trace.safetensors").write_bytes(data[: len(data) // 2])
    text = (digits / "result.json").read_text()
    (result / "result.json").write_text(text[: text.index('"wall_seconds"')])
    (result / "trace.safetensors").unlink()
    (config / "config.json").write_text('{"recipe": ')
    for path, place, status in (
        (
            trace,
            f"trace.safetensors is damaged: it ends at byte {len(data) // 2:,} of {len(data):,}",
            "finished, damaged",
        ),
        (result, "result.json is damaged at line ", "damaged"),
        (config, "config.json is damaged at line 1, column 12", "finished, damaged"),
    ):
        diagnosis = diagnose(load_run(path))
        assert diagnosis.status == status
        assert finding_of(diagnosis.findings, "damaged").words.startswith(place)
        (swaps,) = (found.numbers for found in diagnosis.findings if "accepted" in found.numbers)
        assert (swaps["accepted"], swaps["proposed"]) == (whole["accepted"], whole["proposed"])
    assert count(load_run(result))[0].source == "result.json before its damage"
    (result / "result.json").write_text(text[: text.index('"acceptance_rate"')])
    assert count(load_run(result)) == []
    assert "swaps not told" in titles(diagnose(load_run(result)), "note")


def test_findings_are_sorted_and_quick_leaves_out_the_slow_one(tmp_path, figure1):
    for name in ("case1-naive", "case3-resgld-F1", "case3-resgld-F2"):
        order = [SEVERITIES.index(found.severity) for found in findings_of(figure1(name))]
        assert order == sorted(order)
        assert len(set(order)) > 1
        assert findings_of(figure1(name), quick=True) == findings_of(figure1(name))
    config = replace(
        get_recipe("tall/logistic"), n_data=1_000, n_steps=2_000, n_runs=8, lr_of_mean=0.1
    )
    run = load_run(run_recipe(config, 0, tmp_path).path)
    quick, full = (
        {found.title for found in findings_of(run, quick=quick)} for quick in (True, False)
    )
    assert quick - full == {"only a quick look"}
    assert len(full - quick) == 1
    assert diagnose(run, quick=True).quick
    assert not diagnose(run).quick


def test_trips_are_counted_as_if_every_row_and_chain_were_looked_at(figure1):
    for name in ("case1-resgld", "case3-resgld-F1"):
        evidence = gather(figure1(name))
        every = round_trips(evidence.history)
        assert torch.equal(evidence.travel.round_trips, every.round_trips)
        assert torch.equal(evidence.travel.restarts, every.restarts)
        assert evidence.travel.exact == every.exact


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
    damaged = diagnose(replace(figure1("case1-resgld"), problems=("damaged",)))
    words = [found.words for found in damaged.findings if found.title == "not told"]
    assert (
        words[0] == "What is left of this run does not tell whether it has converged."
    )  # and nothing of our insides


def test_runs_are_counted_by_what_was_found():
    def run(*findings):
        return Diagnosis(
            Path("a"),
            "a",
            "finished",
            tuple(Finding(severity, title, "") for severity, title in findings),
        )

    rare, common, same = ("warning", "rare"), ("warning", "common"), ("problem", "common")
    runs = [
        run(rare, common),
        run(common, ("fine", "swaps")),
        run(same, common, common),
        run(("note", "warm start")),
        run(same),
    ]
    assert roll_up(runs) == [
        ("", "5 runs: 2 with problems, 2 with warnings alone, 1 with neither"),
        ("problem", "2 of 5 runs: common"),  # the gravest first, by severity and title
        ("warning", "3 of 5 runs: common"),  # runs, not findings: one run has two
        ("warning", "1 of 5 runs: rare"),
        ("note", "1 of 5 runs: warm start"),  # and nothing of what is fine
    ]
    assert roll_up(runs[3:4] * 2)[0] == ("", "2 runs: nothing wrong was found")


def test_the_command_ends_with_the_count_of_several_runs():
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(doctor)
    shown = CliRunner().invoke(app, [str(RESULTS / "cifar10-resnet20")]).output
    _, _, end = shown.rpartition("seed=3\n\n")
    assert end.splitlines()[0] == "4 runs: 4 with warnings alone"
    assert "  warning: 4 of 4 runs: F above 1: bias expected" in end.splitlines()
    assert (
        " of 1 runs"
        not in CliRunner().invoke(app, [str(RESULTS / "cifar10-resnet20" / "seed=0")]).output
    )
    told = json.loads(CliRunner().invoke(app, [str(RESULTS / "cifar10-resnet20"), "--json"]).output)
    assert [each["run"] for each in told] == [
        f"icml2020/cifar10-resnet20, seed {seed}" for seed in range(4)
    ]


def test_the_command(figure1, tmp_path):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(doctor)
    shown = CliRunner().invoke(app, [str(figure1("case1-naive").path)])
    assert shown.exit_code == 0  # whatever is found
    assert "problem: naive swaps: biased." in shown.output
    assert all(
        line == line.rstrip() and len(line) <= 80
        for line in shown.output.splitlines()
        if "seed=0" not in line
    )
    assert "Exit code: 0" in CliRunner().invoke(app, ["--help"]).output
    told = CliRunner().invoke(app, [str(figure1("case1-naive").path), "--json"])
    (machine,) = json.loads(told.output)
    assert machine == json.loads(json.dumps(as_json([diagnose(figure1("case1-naive"))])[0]))
    naive = next(each for each in machine["findings"] if each["title"] == "naive swaps: biased")
    assert naive["numbers"]["correction_factor"] == "inf"
    for bad in (tmp_path, tmp_path / "none"):
        assert isinstance(CliRunner().invoke(app, [str(bad)]).exception, RunFolderError)
