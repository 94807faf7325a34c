"""The doctor separates the cases of figure 1, says what to change, passes healthy runs, and reads
every checkpoint.
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

import torchrex as tr
from torchrex.cli.look import doctor as command
from torchrex.diagnostics import Estimate
from torchrex.errors import CheckpointError, MissingDependencyError, RunFolderError
from torchrex.experiments import get_recipe, run_recipe
from torchrex.report import doctor, findings, swap_checks
from torchrex.report.doctor import check_average, check_convergence, diagnose, findings_of
from torchrex.report.findings import SEVERITIES, Diagnosis, Finding, about, several
from torchrex.report.page import page_of
from torchrex.report.reader import load_run
from torchrex.report.swap_checks import Counted, check_ladder, history_from_curves
from torchrex.runs.folder import config_sha256

RESULTS = Path(__file__).parents[1] / "results" / "images" / "icml2020"
TOO_FEW_TESTS = "too few swap tests to say"


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
def tall(tmp_path_factory):
    short = {"n_data": 1_000, "n_steps": 2_000, "n_runs": 8, "lr_of_mean": 0.1}
    config = replace(get_recipe("tall/logistic"), **short)
    return load_run(run_recipe(config, 0, tmp_path_factory.mktemp("tall")).path)


@pytest.fixture(scope="module")
def images():
    return load_run(RESULTS / "cifar10-resnet20" / "seed=0")


def titles(diagnosis, *severities):
    return {finding.title for finding in diagnosis.findings if finding.severity in severities}


def finding_of(findings, title):
    (found,) = [finding for finding in findings if finding.title == title]
    return found


def factors(numbers):
    return numbers["factor_for_2_percent"], numbers["factor_for_10_percent"]


# The three cases


def test_case_1_is_fine(figure1):
    diagnosis = diagnose(figure1("case1-resgld"))
    assert diagnosis.healthy, doctor.as_text(diagnosis)
    assert diagnosis.verdict == "nothing wrong was found"
    passed = {"truth", "swaps", "round trips", "convergence", "temperature", "noise"}
    assert titles(diagnosis, "fine") == passed
    swaps = finding_of(diagnosis.findings, "swaps").numbers
    assert swaps["acceptance_rate"] == pytest.approx(0.112, abs=0.01)
    assert swaps["acceptance_expected"] == pytest.approx(swaps["acceptance_rate"], abs=0.015)
    assert swaps["noise_s"] == pytest.approx(2**0.5 * 0.9 * 2.0, rel=0.03)
    ratio = finding_of(diagnosis.findings, "temperature").numbers["ratio"]
    assert ratio == pytest.approx(1.05, abs=0.12)


def test_a_known_truth_is_used(figure1):
    """Chains that all stay in one mode agree with each other, and R-hat is 1; the left weight is 0,
    and the truth 0.4.
    """
    diagnosis = diagnose(figure1("case3-sgld"))
    found = finding_of(diagnosis.findings, "the answer is wrong")
    assert found.severity == "problem"
    assert (found.numbers["value"], found.numbers["truth"]) == (0.0, pytest.approx(0.4))
    assert "temperatures=1,10" in found.words  # what would cross
    agreed = finding_of(diagnosis.findings, "convergence")
    assert (agreed.severity, agreed.numbers["started_at_one_point"]) == ("fine", True)
    assert "one rung" in titles(diagnosis, "note")
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
    metrics = {"left_weight": value, "left_weight_se": error, "left_weight_true": 0.4}
    result = {**run.result, "metrics": {**metrics, "n_runs": n_runs}}
    (found,) = doctor.check_truth(replace(run, result=result))
    assert found.severity == severity


@pytest.mark.parametrize(("hot", "off"), [(128.0, True), (1.2, False)])
def test_an_excess_that_shifts_the_weights_of_modes(hot, off):
    """N(0, 1) in 10 dimensions at lr 0.15 has 8 % more than its variance (exact: 8.1 %). Over a
    ladder to 128 that changes the log of its mass by 1.9; over one to 1.2 by 0.07.
    """
    ladder = tr.Ladder.geometric(1.0, hot, 8, lrs=0.15)
    options = {"dim": 10, "n_steps": 5_000, "n_runs": 16, "thin": 5}
    draws = tr.sample(lambda x: -0.5 * x.square().sum(-1), ladder=ladder, **options)
    found = titles(draws.report().diagnosis, "warning")
    assert ("the learning rate shifts modes" in found) == off


def test_case_3_at_f_1_has_no_swaps_and_what_would_give_them(figure1):
    diagnosis = diagnose(figure1("case3-resgld-F1"))
    missing = {"no swaps", "hardly any swaps"} & titles(diagnosis, "problem", "warning")
    found = finding_of(diagnosis.findings, *missing)
    # Of a chain with a swap, thinned draws may have missed a round trip.
    assert (found.severity == "problem") == (found.numbers["accepted"] < 16)
    low, high = factors(found.numbers)
    assert found.numbers["noise_s"] == pytest.approx(9.95, rel=0.05)
    assert 2.0 < low < 3.5 < high < 6.0
    assert found.numbers["rungs_for_F_1"] in (11, 12)
    assert "An F of about 2." in found.words
    assert f"a ladder of about {found.numbers['rungs_for_F_1']} rungs from 1 to 10" in found.words
    # What follows from that is not said again.
    consequences = {"too few round trips", "the correction is far outside the energies"}
    assert not consequences & titles(diagnosis, *SEVERITIES)
    assert "naive swaps: biased" not in titles(diagnosis, *SEVERITIES)
    order = [SEVERITIES.index(found.severity) for found in diagnosis.findings]
    assert order == sorted(order)


def test_the_advised_factor_does_what_it_says(figure1, tmp_path):
    """Run it: an F for 10 % found on energies at F = 1 gives 10 % to within the change that swaps
    themselves make.
    """
    factor = next(iter(check_ladder(figure1("case3-resgld-F1")))).numbers["factor_for_10_percent"]
    config = replace(get_recipe("figure1/case3-resgld-F1"), n_steps=10_000, n_runs=8)
    run = load_run(run_recipe(replace(config, correction_factor=factor), 0, tmp_path).path)
    assert float(run.draws.acceptance_rate) == pytest.approx(0.10, abs=0.03)


@pytest.mark.parametrize("case", ["case1", "case3"])
def test_the_naive_test_is_biased_and_rung_0_hotter(figure1, case):
    diagnosis = diagnose(figure1(f"{case}-naive"))
    found = finding_of(diagnosis.findings, "naive swaps: biased")
    assert found.severity == "problem"
    assert found.numbers["acceptance_rate"] > 2 * found.numbers["acceptance_at_F_1"]
    hotter = finding_of(diagnosis.findings, "rung 0 is hotter than nominal")
    assert hotter.severity in ("problem", "warning")
    assert "lower F" in hotter.words
    assert "learning rate" not in hotter.words
    assert "lower F" in finding_of(diagnosis.findings, "the answer is wrong").words


def test_a_finite_factor_is_priced(figure1):
    found = finding_of(check_ladder(figure1("case3-resgld-F2")), "F above 1: bias expected")
    assert re.search(r"about 1[12] rungs from 1 to 10: noise s = 9\.\d+ is above 4", found.words)
    assert "On the states of this run F = 1 would accept about" in found.words
    assert found.severity == "warning"
    assert found.numbers["acceptance_rate"] > 20 * found.numbers["acceptance_at_F_1"]


def test_heavy_tails_are_found_where_energies_can_be_drawn_again(figure1):
    heavy, light = (next(iter(doctor.check_tail(figure1(f"case{k}-resgld")))) for k in (2, 1))
    assert (heavy.severity, light.severity) == ("warning", "fine")
    assert heavy.numbers["tail_index"] < 4.5 < 5.5 < light.numbers["tail_index"]


@pytest.mark.slow
def test_the_temperature_of_tall_data_is_read_but_not_in_a_quick_look(tall):
    full, quick = diagnose(tall), diagnose(tall, quick=True)
    numbers = finding_of(full.findings, "temperature").numbers
    assert numbers["temperature"] == pytest.approx(1.0, abs=0.15)
    often = finding_of(full.findings, "swaps at nearly every step")
    assert often.severity == "note"  # at F = 1 that is no bias
    assert titles(quick, *SEVERITIES) - titles(full, *SEVERITIES) == {"only a quick look"}
    assert titles(full, *SEVERITIES) - titles(quick, *SEVERITIES) == {"temperature"}
    assert (full.quick, quick.quick) == (False, True)


# Single checks on made-up runs


def test_swaps_at_nearly_every_step_with_a_large_factor(figure1):
    run = figure1("case3-resgld-F2")
    many = replace(run.history, accepted=(0.95 * run.history.proposed).long())
    found = finding_of(check_ladder(replace(run, history=many)), "swaps at nearly every step")
    assert found.severity == "warning"
    assert "F is too large" in found.words


def test_replicas_that_keep_to_their_own_mode(figure1):
    run, title = figure1("case1-resgld"), "replicas in different modes"
    assert title not in {found.title for found in check_convergence(run)}
    modes = torch.where(run.draws.replica_at[:, 0].T == 0, -3.0, 2.0)[:, :, None]
    stuck = replace(run.draws, values=modes + 0.1 * torch.randn(16, 2000, 1))
    found = finding_of(check_convergence(replace(run, draws=stuck)), title)
    assert found.numbers["share_between_replicas"] > 0.95


def test_a_variance_that_still_moves(figure1):
    run, title = figure1("case1-resgld"), "sigma2 has not settled"

    def found(variance):
        history = replace(run.history, noise_variance=variance)
        return list(check_ladder(replace(run, history=history)))

    ramp = torch.linspace(1.0, 4.0, len(run.history.steps))[:, None, None]
    ramp = ramp.expand_as(run.history.noise_variance)
    numbers = finding_of(found(ramp * (1 + 0.01 * torch.rand(16))), title).numbers
    quarters = (numbers["third_quarter"], numbers["last_quarter"])
    assert quarters == pytest.approx((2.9, 3.6), rel=0.03)
    for small in (run.history.noise_variance, 4.0 + 0.1 * ramp):
        assert title not in {each.title for each in found(small)}


def test_noise_above_4_is_not_fine_whatever_was_accepted(figure1):
    """At sigma2 = 16 the noise is s = sqrt(2) * 0.9 * 4 = 5.09, which needs 7 rungs; the counts are
    those of a lively run.
    """
    run, title = figure1("case1-resgld"), "too much noise for these temperatures"

    def swaps(sigma2, **changes):
        variance = torch.full_like(run.history.noise_variance, sigma2)
        correction = run.history.inverse_gap[:, :, None] * variance.double()
        noisy = replace(run.history, noise_variance=variance, correction=correction, **changes)
        return list(check_ladder(replace(run, history=noisy)))

    found = finding_of(swaps(16.0), title)
    assert found.severity == "warning"
    assert found.numbers["noise_s"] == pytest.approx(5.0912, abs=1e-3)
    assert found.numbers["rungs_for_F_1"] == 7
    assert "An F of about" not in found.words  # 11 % of its tests swap already
    found = finding_of(swaps(16.0, accepted=torch.full((1, 16), 1_000)), title)  # 5 %
    factor = about(found.numbers["factor_for_10_percent"])
    assert f"An F of about {factor} (10 % accepted) would swap, with bias;" in found.words
    assert finding_of(swaps(9.0), "swaps").severity == "fine"  # s = 3.8
    # The same noise of 9, with 9 or 10 swaps of each chain in 2,000 tests, 0.5 %.
    for n, title in ((9, "few swaps"), (10, "swaps")):
        some = {"accepted": torch.full((1, 16), n), "proposed": torch.full((1, 16), 2_000)}
        (found,) = (each for each in swaps(9.0, **some) if "accepted" in each.numbers)
        assert found.title == title
        assert (". Run longer. " in found.words) == (n == 9)  # the noise is not what is in the way


def test_a_handful_of_tests_is_no_fault(figure1):
    """Rungs that accept 2 % make no swap in 149 tests with probability 0.98^149 = 0.049: up to
    there nothing is missing.
    """
    run = figure1("case1-resgld")
    nobody_moved = run.history.replica_at[:1].expand_as(run.history.replica_at)

    def found(accepted, proposed, chains=1, sigma2=4.0, factor=1.0):
        variance = torch.full_like(run.history.noise_variance[..., :chains], sigma2)
        history = replace(
            run.history,
            energy=run.history.energy[..., :chains],
            replica_at=nobody_moved[..., :chains],
            noise_variance=variance,
            accepted=torch.full((1, chains), accepted),
            proposed=torch.full((1, chains), proposed),
            correction=run.history.inverse_gap[:, :, None] * variance.double() / factor,
        )
        settings = replace(run.settings, correction_factor=factor)
        return list(check_ladder(replace(run, history=history, settings=settings)))

    for accepted, proposed in ((1, 1), (1, 2), (5, 15), (0, 149)):
        (note,) = found(accepted, proposed)  # nor is it said that replicas did not travel
        assert (note.severity, note.title) == ("note", TOO_FEW_TESTS)
        assert f" in {several(proposed, 'test')}" in note.words
        assert note.words.endswith("Run longer.")
    (note,) = found(0, 149, sigma2=16.0)
    assert "s = 5.091 at temperatures 1 and 10 leaves 1.09 %" in note.words
    # Two of two prove no bias of F.
    assert [each.title for each in found(2, 2, factor=50.0)] == [TOO_FEW_TESTS]
    assert finding_of(found(0, 150), "no swaps").severity == "problem"
    assert finding_of(found(9, 150), "few swaps")
    assert finding_of(found(10, 20), "swaps").severity == "fine"  # enough swaps are enough
    assert finding_of(found(0, 10, chains=16), "no swaps")  # 160 tests of one law


def test_a_handful_of_counted_tests_is_no_fault(digits, tmp_path):
    cases = {(1, 2): TOO_FEW_TESTS, (0, 149): TOO_FEW_TESTS, (0, 150): "no swaps"}
    for counts, title in {**cases, (9, 150): "few swaps"}.items():
        found = finding_of(findings_of(unfinished(digits, tmp_path / str(counts), *counts)), title)
        assert found.severity == ("note" if title == TOO_FEW_TESTS else "warning")
    # Of a ladder, the pair that is tested most says how long it is: a pair that is hardly ever
    # tested is a fault.
    counts = [Counted(0, 0, 5, "a test"), Counted(1, 500, 5_000, "a test")]
    (found,) = swap_checks.count_findings(load_run(digits), counts)
    assert found.title == "no swaps"


def test_the_average_of_a_network(images):
    def check(curve):
        curves = {"probabilities_accuracy": curve}
        (found,) = check_average(replace(images, result={**images.result, "curves": curves}))
        return found

    rising = [0.90 + 0.0001 * k for k in range(90)]
    found = check(rising)
    assert (found.severity, found.title) == ("warning", "the average has not converged")
    assert found.numbers["gained"] == pytest.approx(0.0029)
    assert check([*rising[:60], *[0.906] * 30]).severity == "fine"
    # More than in two thirds of the run, but not rising now: 0.9149 - 0.9120, and 0.9149 - 0.9158.
    fallen = [0.90 + 0.0002 * k for k in range(80)] + [0.9158 - 0.0001 * k for k in range(10)]
    found = check(fallen)
    assert found.severity == "fine"
    assert "by +0.29 points, over the last tenth by -0.09" in found.words


def test_an_average_is_worse_only_beyond_the_error_of_its_test_images(images):
    """By hand, 10,000 images: sqrt((0.94 * 0.06 + 0.945 * 0.055) / 10,000) = 0.33 points, so 0.5
    are noise and 0.8 are not.
    """

    def check(accuracy, single, run=images, **more):
        metrics = {**run.metrics, "accuracy": accuracy, "single_accuracy": single, **more}
        curves = {"probabilities_accuracy": [0.94] * 9}
        result = {**run.result, "metrics": metrics, "curves": curves}
        (found,) = check_average(replace(run, result=result))
        return found

    within, beyond = check(0.94, 0.945), check(0.94, 0.948)
    assert (within.severity, within.title) == ("fine", "average")
    assert within.numbers["standard_error"] == pytest.approx(0.0032920, abs=1e-6)
    assert "of -0.5(3) points (binomial, 10,000 test images), within noise" in within.words
    assert (beyond.severity, beyond.title) == ("warning", "the average is worse than one network")
    assert "-0.8(3) points" in beyond.words
    assert check(0.948, 0.94).severity == "fine"
    few = replace(images, settings=replace(images.settings, test_subset=200))
    assert check(0.94, 0.948, few).severity == "fine"  # of 200 images that is one or two
    # A larger NLL alone has no known error: it is a note.
    nll = check(0.94, 0.94, nll=0.3, single_nll=0.2)
    assert nll.severity == "note"
    assert "0.3000 against 0.2000" in nll.words


ODD = ({"energy": None}, {"swap_epochs": None}, {"correction": [[1.0]]}, {"energy": [[1.0], []]})


@pytest.mark.parametrize("damage", ODD)
def test_curves_that_do_not_fit_show_nothing(images, damage):
    curves = {name: x for name, x in {**images.curves, **damage}.items() if x is not None}
    assert history_from_curves(replace(images, result={**images.result, "curves": curves})) is None


def test_committed_images_from_their_curves(images):
    """No trace is there; swaps, noise and travel come from the curves in result.json."""
    history = history_from_curves(images)
    assert (history.n_rungs, history.n_chains, history.n_steps) == (2, 1, 97_500)
    # Swaps at epochs 11.5, 99.8, 290.06, 290.07 and 422.4: the replica on rung 0 when the epochs
    # around them began.
    epochs = [0, 11, 12, 99, 100, 290, 291, 422, 423]
    assert history.replica_at[epochs, 0, 0].tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1]
    more = [{**images.result["swaps"][0], "accepted": 6}]  # than are listed
    unlisted = replace(images, result={**images.result, "swaps": more})
    assert history_from_curves(unlisted).swaps is None
    words = finding_of(check_ladder(unlisted), "hardly any swaps").words
    assert "F was 150,000 at the start" in words
    assert "tests there" not in words  # when they came is not known either
    found = list(check_ladder(images))
    few = finding_of(found, "hardly any swaps")
    numbers = few.numbers
    assert (numbers["accepted"], numbers["proposed"]) == (5, 95_550)
    assert numbers["noise_s"] > 1e6
    for words in (
        "no ladder of sensible length would do",  # 3e9 rungs are no advice
        "annealed from temperatures 0.01 and 0.05 to 5.111e-7 and 2.556e-6",
        "It swapped once in about 24,000 tests there.",
        "Rung 0 got something new 5 times",
    ):
        assert words in few.words
    # What is advised is more than the run has, and both are of the last quarter.
    now, low, high = numbers["factor_in_the_last_quarter"], *factors(numbers)
    assert now == pytest.approx(150_000 * 0.7**5, rel=1e-3)
    assert 1e4 < 2 * now < low < high < 1e7
    assert finding_of(found, "F above 1: bias expected").numbers["acceptance_at_F_1"] < 1e-6
    # Five swaps of one pair.
    assert (numbers["round_trips_per_chain"], numbers["restarts_per_chain"]) == (4.0, 5.0)
    hotter = finding_of(diagnose(images).findings, "rung 0 is hotter than nominal")
    assert hotter.numbers["times_nominal_at_the_end"] == pytest.approx(0.984**-299, rel=1e-6)


@pytest.mark.parametrize(
    ("run", "swaps", "start", "left"),
    [  # by hand: the first F times 0.7 for every swap
        ("cifar10-resnet20/seed=0", 5, 150_000, "25,210 at the end ("),
        ("cifar10-resnet20/seed=1", 6, 150_000, "17,650 at the end, about 25,000 in the middle"),
        ("cifar10-resnet20-F1e5/seed=3", 1, 50_000, "35,000 at the end, about 50,000 in the mid"),
        ("cifar10-resnet20-batch1024/seed=0", 4, 150_000, "36,010 at the end"),
        ("cifar10-wrn-28-10/seed=0", 0, 150_000, ""),
    ],
)
def test_the_factor_that_swaps_have_left(run, swaps, start, left):
    found = list(check_ladder(load_run(RESULTS / run)))
    (found,) = [each for each in found if "factor_at_the_end" in each.numbers]
    assert found.numbers["accepted"] == swaps
    assert found.numbers["factor_at_the_end"] == pytest.approx(start * 0.7**swaps)
    lowered = f", of which the factor 0.7 a swap has left {left}" if left else " ("
    assert f"F was {start:,} at the start{lowered}" in found.words


def test_runs_without_swaps_are_not_blamed():
    independent = diagnose(load_run(RESULTS / "cifar10-resnet20-independent" / "seed=0"))
    assert "no swaps by design" in titles(independent, "note")
    run = load_run(RESULTS / "cifar10-resnet20-msgd" / "seed=0")
    blamed = titles(diagnose(run), "problem", "warning")
    assert not [title for title in blamed if "swap" in title or "hotter" in title]
    assert swap_checks.gather(run) is None


@pytest.mark.parametrize(
    ("tau", "error", "severity", "title", "words"),
    [
        (1.054, 0.006, "fine", "temperature", "1.054(6) on rung 0, 5.4 % above"),
        (1.3, 0.15, "fine", "temperature", "within 3 standard errors"),  # large, but not sure
        (1.12, 0.01, "warning", "rung 0 is hotter than nominal", "learning rate"),
        (1.6, 0.01, "problem", "rung 0 is hotter than nominal", "learning rate"),
        (0.8, 0.01, "warning", "rung 0 is colder than nominal", "20 % below"),
    ],
)
def test_a_temperature_is_judged_by_a_tolerance(
    figure1, monkeypatch, tau, error, severity, title, words
):
    read = Estimate(torch.tensor(tau), torch.tensor(error))
    monkeypatch.setattr(doctor, "equipartition_temperature", lambda *_: read)
    (found,) = doctor.check_temperature(figure1("case1-resgld"))
    assert (found.severity, found.title) == (severity, title)
    assert words in found.words
    (found,) = doctor.check_temperature(figure1("case1-sgld"))  # its chains have not converged
    assert (found.severity, found.title) == ("note", "temperature not known")
    assert "learning rate" not in found.words


def test_numbers_look_the_same_everywhere():
    values = (0.1025, 150_000.0, 25210.4, 9.957, 1000, 2.5556e-6, 0.0, float("inf"))
    written = ["0.1025", "150,000", "25,210", "9.957", "1,000", "2.556e-6", "0", "inf"]
    assert [findings.number(x) for x in values] == written
    values = (1.1384e9, 7.842e8, -1e6, 999_999_999.0, 3e12, 9.9996e11)
    written = ["1.138 billion", "784.2 million", "-1 million", "1 billion", "3e12", "1e12"]
    assert [findings.number(x) for x in values] == written
    assert [about(x) for x in (2.53, 1.6e5, 11.4, 123.0)] == ["2.5", "160,000", "11", "120"]
    rates = ["11.2 %", "0.00523 %", "less than 0.0001 %", "0 %", "100 %"]
    assert [findings.percent(x) for x in (0.1117, 5.23e-5, 1e-9, 0.0, 1.0)] == rates
    counts = ["never", "once", "twice", "3 times", "2.5 times on average", "12,345 times"]
    assert [findings.times(n) for n in (0, 1, 2, 3, 2.52, 12345)] == counts
    assert findings.times(1.04) == "1.0 times on average"
    assert [several(n, "test") for n in (0, 1, 2_000)] == ["0 tests", "1 test", "2,000 tests"]
    assert findings.measured(1.0523, 0.0061) == "1.052(6)"
    assert findings.measured(1.0, float("nan")) == "1 (its error is not known)"


def test_what_a_run_has_already_is_no_advice(figure1):
    """At F = 1 with 3 % of few tests there is nothing to change but the length."""
    run = figure1("case1-resgld")
    short = replace(run.history, accepted=torch.full((1, 16), 3), proposed=torch.full((1, 16), 100))
    found = finding_of(check_ladder(replace(run, history=short)), "few swaps")
    assert found.words.endswith("this run has F = 1. Run longer.")
    more = "To have more at F = 1 takes X."
    for factor, rate, low, high, wanted in (
        (1.0, 0.01, 1.0004, 3.0, "An F of about 3 (10 % accepted) would swap, with bias; F = 1"),
        (1.0, 0.01, 1.0, 1.0, more),
        (0.5, 0.001, 1.0, 1.0, "An F of about 1 (2 % accepted) to 1 (10 % accepted) would swap;"),
        (2.0, 0.03, 2.5, 4.0, "An F of about 4 (10 % accepted) would swap, with bias; F = 1"),
        (5.0, 0.001, 2.5, 4.0, more),
    ):
        assert swap_checks.sentence(low, high, "X", factor, rate).startswith(wanted)


def test_chains_that_stay_apart(figure1):
    diagnosis = diagnose(figure1("case2-sgld"))
    assert {"chains have not converged", "chains stay apart"} <= titles(diagnosis, "problem")
    found = finding_of(diagnosis.findings, "chains stay apart")
    assert found.numbers["share_between_chains"] > 0.5
    assert "add a hotter rung (temperatures=1,10)" in found.words
    assert "swap" not in found.words
    assert "no swaps" not in titles(diagnosis, *SEVERITIES)
    run = figure1("case1-resgld")
    apart = replace(run.draws, values=run.draws.values + 100 * torch.arange(16.0)[:, None, None])
    counts = {"accepted": torch.ones(1, 16).long(), "proposed": torch.full((1, 16), 9)}
    few = replace(run.history, **counts)  # 16 swaps in 144 tests show no rate
    for history, often in ((run.history, True), (few, False)):
        found = check_convergence(replace(run, history=history, draws=apart))
        words = finding_of(found, "chains stay apart").words
        assert ("It swaps often enough" in words) == often


def test_a_few_trips_of_a_run_that_swaps_often(figure1):
    run = figure1("case1-resgld")
    names = ("steps", "energy", "replica_at", "noise_variance", "temperature", "correction")
    short = replace(run.history, **{name: getattr(run.history, name)[:20] for name in names})
    found = finding_of(check_ladder(replace(run, history=short)), "too few round trips")
    assert found.words.endswith("Run longer.")
    assert "on average at least " in found.words


def test_effective_draws_are_a_lower_bound(figure1, monkeypatch):
    monkeypatch.setattr(doctor, "ENOUGH", 8_000)
    run = figure1("case1-resgld")
    found = next(iter(check_convergence(run)))
    n, ess = found.numbers["ess_from_draws"], found.numbers["ess_at_least"]
    assert n < found.numbers["n_draws"]
    assert f"at least {ess:,.0f} independent ones (from {n:,} of them" in found.words
    alone = replace(run, draws=replace(run.draws, values=run.draws.values[:1]), history=None)
    assert "no R-hat: there is one chain" in next(iter(check_convergence(alone))).words


# Folders


def test_failed_unfinished_damaged_and_empty(figure1, tmp_path):
    complete = figure1("case1-resgld").path
    for seed in range(4):
        shutil.copytree(complete, tmp_path / f"seed={seed}")
    result = json.loads((complete / "result.json").read_text())
    failed = {**result, "status": "failed", "error": "the energy was nan"}
    (tmp_path / "seed=0" / "result.json").write_text(json.dumps(failed))
    (tmp_path / "seed=1" / "result.json").unlink()
    data = (complete / "draws.safetensors").read_bytes()
    (tmp_path / "seed=2" / "draws.safetensors").write_bytes(data[: len(data) // 3])
    (tmp_path / "seed=3" / "config.json").write_text("{")
    (tmp_path / "seed=9").mkdir()
    failed, unfinished, no_draws, no_config, empty = doctor.diagnose_folder(tmp_path)
    assert "the energy was nan" in finding_of(failed.findings, "the run failed").words
    assert finding_of(unfinished.findings, "the run is not finished").severity == "warning"
    assert "swaps" in titles(unfinished, "fine")  # the part that is there is looked at
    for diagnosis, name in ((no_draws, "draws.safetensors"), (no_config, "config.json")):
        assert diagnosis.status == "finished, damaged"
        found = finding_of(diagnosis.findings, "damaged")
        assert (found.severity, found.numbers) == ("warning", {"file": name})
    assert "truth" in titles(no_draws, "fine")  # result.json is sound
    assert (empty.status, titles(empty, "problem")) == ("empty", {"empty"})


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A finished run of the digits, with checkpoints of steps 380 and 400."""
    short = {"epochs": 20, "burn_in_epochs": 10, "hidden": 8, "checkpoint_every": 380}
    config = replace(get_recipe("digits/resghmc"), **short)
    return run_recipe(config, 0, tmp_path_factory.mktemp("digits")).path


def unfinished(digits, folder, accepted, proposed=1_000, **config):
    """As a run that was paused leaves it: counts, and neither trace nor metrics."""
    path = folder / "digits" / "resghmc" / "seed=0"
    path.mkdir(parents=True)
    settings = {**json.loads((digits / "config.json").read_text()), **config}
    (path / "config.json").write_text(json.dumps(settings))
    result = json.loads((digits / "result.json").read_text())
    result["config_sha256"] = config_sha256(settings)
    pair = {"pair": [0, 1], "proposed": proposed, "accepted": accepted}
    swaps = [{**pair, "acceptance_rate": accepted / proposed}]
    changed = {"status": "paused", "metrics": {}, "steps_done": 40, "swaps": swaps}
    (path / "result.json").write_text(json.dumps({**result, **changed}))
    return load_run(path)


def test_an_unfinished_network_is_known_by_the_counts_of_its_result(digits, tmp_path):
    def found(title, accepted, **config):
        run = unfinished(digits, tmp_path / f"{accepted}{config}", accepted, **config)
        return finding_of(findings_of(run), title)

    assert "--resume` continues it" in found("the run is not finished", 64).words
    words = found("swaps", 63).words
    assert words.startswith("The rungs swapped 63 times in 1,000 tests (6.3 %), says result.json.")
    # 2 Phi(-s/2) = 1 / 1,000 at s = 6.581, which is 7 pairs of s below 1.
    few = found("hardly any swaps", 1)
    assert few.severity == "warning"
    assert few.numbers["noise_s_from_counts"] == pytest.approx(6.581, abs=1e-3)
    assert "a ladder of about 8 rungs from 0.1 to 0.1025" in few.words
    low, high = factors(few.numbers)
    assert 1 < low < high < 4
    assert "Noise of at least about s = 5.9" in found("no swaps", 0).words
    # The rate alone does not give s at another F.
    assert "when it has ended" in found("hardly any swaps", 1, correction_factor=3.0).words
    naive = found("naive swaps: biased", 500, correction_factor="inf")
    assert naive.severity == "problem"


def test_a_trace_that_is_gone_is_a_note(digits, tmp_path):
    complete = diagnose(load_run(digits))
    assert not {"missing", "temperature not known"} & titles(complete, *SEVERITIES)
    copy = shutil.copytree(digits, tmp_path / "digits" / "resghmc" / "seed=0")
    (copy / "trace.safetensors").unlink()
    found = finding_of(diagnose(load_run(copy)).findings, "missing")
    assert (found.severity, found.numbers) == ("note", {"file": "trace.safetensors"})
    committed = diagnose(load_run(RESULTS / "cifar10-resnet20" / "seed=0"))
    assert "missing" not in titles(committed, *SEVERITIES)
    (copy / "result.json").write_text("{")
    assert "swaps not known" in titles(diagnose(load_run(copy)), "note")


def test_a_missing_dependency_is_a_note_and_our_own_mistakes_are_not_hidden(figure1, monkeypatch):
    def fails(error):
        def call(draws):
            raise error

        monkeypatch.setattr(doctor, "convergence", call)

    run = figure1("case1-resgld")
    fails(MissingDependencyError("pip install 'torchrex[diagnostics]'"))
    diagnosis = diagnose(run)
    assert "torchrex[diagnostics]" in finding_of(diagnosis.findings, "not known").words
    assert diagnosis.healthy
    fails(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        diagnose(run)
    damaged = diagnose(replace(run, problems=("damaged",)))
    words = [found.words for found in damaged.findings if found.title == "not known"]
    assert "whether it has converged" in words[0]
    assert "a bug" not in words[0]


def test_runs_are_counted_by_what_was_found():
    def run(*findings):
        found = tuple(Finding(severity, title, "") for severity, title in findings)
        return Diagnosis(Path("a"), "a", "finished", found)

    rare, common, same = ("warning", "rare"), ("warning", "common"), ("problem", "common")
    healthy = run(("note", "warm start"))
    runs = [run(rare, common), run(common, ("fine", "swaps")), run(same, common, common)]
    assert doctor.roll_up([*runs, healthy, run(same)]) == [
        ("", "5 runs: 2 with problems, 2 with warnings alone, 1 with neither"),
        ("problem", "2 of 5 runs: common"),  # the gravest first, by severity and title
        ("warning", "3 of 5 runs: common"),  # runs, not findings: one run has two
        ("warning", "1 of 5 runs: rare"),
        ("note", "1 of 5 runs: warm start"),  # and nothing of what is fine
    ]
    assert doctor.roll_up([healthy] * 2)[0] == ("", "2 runs: nothing wrong was found")


def test_the_command(figure1, tmp_path):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)

    def invoke(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

    naive = figure1("case1-naive")
    shown = invoke(naive.path)
    assert shown.exit_code == 0  # whatever is found
    assert "problem: naive swaps: biased." in shown.output
    lines = [line for line in shown.output.splitlines() if "seed=0" not in line]
    assert all(line == line.rstrip() and len(line) <= 80 for line in lines)
    (machine,) = json.loads(invoke(naive.path, "--json").output)
    assert machine == json.loads(json.dumps(doctor.as_json([diagnose(naive)])[0]))
    found = next(each for each in machine["findings"] if each["title"] == "naive swaps: biased")
    assert found["numbers"]["correction_factor"] == "inf"
    for bad in (tmp_path, tmp_path / "none"):
        assert isinstance(invoke(bad).exception, RunFolderError)
    # Of several runs the last lines say how many have each finding.
    _, _, end = invoke(RESULTS / "cifar10-resnet20").output.rpartition("seed=3\n\n")
    assert end.splitlines()[0] == "4 runs: 4 with warnings alone"
    assert "  warning: 4 of 4 runs: F above 1: bias expected" in end.splitlines()


# Checkpoints


OLD, NEW = "checkpoints/step=000000380", "checkpoints/step=000000400"


def spoil(file):
    """One bit of the last byte, as a bad disk does."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


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
        ([f"{NEW}/replica=1.safetensors"], "from step 380 and repeats 20 steps", 380, "resume"),
        ([f"{OLD}/shared.safetensors"], "The newest is sound", 400, "resume"),
        ([f"{OLD}/DONE", f"{NEW}/DONE"], "No checkpoint can be used", None, "overwrite"),
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
    assert re.findall(r"--(resume|overwrite)`", state) == [option]
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
    assert doctor.look_at_checkpoints(load_run(path)) == []
    shutil.rmtree(path / "checkpoints")
    assert doctor.look_at_checkpoints(load_run(path)) == []
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
