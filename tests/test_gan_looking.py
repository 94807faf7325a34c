"""Runs of GANs on the page and before the doctor: a warm start is no fault, and what the generators
make is to be seen.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chromium import chromium, find_chromium
from torchrex.diagnostics import acceptance_from_energies
from torchrex.experiments.folder import png
from torchrex.experiments.recipes import get_recipe
from torchrex.report.compare import compare_folders, differing_that_matter
from torchrex.report.doctor import diagnose
from torchrex.report.page import details as page_details
from torchrex.report.page import page_of, write_page
from torchrex.report.page.charts import charts_of, overlays
from torchrex.report.page.details import details_of, pictures_of, size_of, within_the_page
from torchrex.report.page.rows import cell, columns, families, paper_of
from torchrex.report.reader import load_run
from torchrex.report.swap_checks import check_ladder, gather, history_from_curves, while_swapping
from written_runs import write_run

STEPS, WARM_START, EVERY = 1_000, 600, 10
METHODS = ("", "-sghmc", "-noswaps", "-supervised")
needs_chromium = pytest.mark.skipif(
    find_chromium() is None,
    reason="there is no Chromium: apt-get install chromium, to test the page in a real browser",
)


def write_gan(
    out: Path,
    recipe="gan/cifar10-4000",
    seed=0,
    *,
    swap_at=(700, 800),
    with_trace=True,
    status="finished",
    **settings,
):
    """A run folder as the runner leaves it, filled with noise. Energies of the warm start lie far
    apart, as they do.
    """
    config = replace(
        get_recipe(recipe),
        steps=STEPS,
        warm_start=WARM_START,
        correction_factor=1.0,
        lr_floor=0.05,
        **settings,
    )
    made = torch.Generator().manual_seed(seed)
    rungs, rows = config.n_rungs, STEPS // EVERY
    when = torch.tensor(swap_at if config.swaps else (), dtype=torch.long)
    steps = torch.arange(rows) * EVERY
    turned = torch.bucketize(steps, when, right=True) % 2
    energy = 100 + torch.randn(rows, rungs, generator=made)
    energy[steps < WARM_START, 0] -= 90
    proposed = STEPS - WARM_START if config.swaps else 0
    trace = {
        "steps": steps,
        "energy": energy,
        "noise_variance": torch.full((rows, rungs - 1), 1e-4),
        "correction": torch.full((rows, rungs - 1), 1e-4 * (100 - 1)),
        "replica_at": torch.stack([turned, 1 - turned], 1)
        if rungs == 2
        else torch.zeros(rows, 1, dtype=torch.long),
        "swap_steps": when,
        "swap_pairs": torch.zeros_like(when),
        "accepted": torch.full((rungs - 1,), len(when)),
        "proposed": torch.full((rungs - 1,), proposed),
    }
    accuracy = 0.6 + 0.01 * METHODS.index(recipe.removeprefix("gan/cifar10-4000"))
    metrics = {
        "n_draws": 4,
        "accuracy": accuracy,
        "nll": 1.1,
        "ece": 0.03,
        "brier": 0.5,
        "mutual_information": 0.2,
    }
    metrics |= {
        "seconds_per_step": 0.1,
        "single_accuracy": 0.59,
        "single_nll": 1.2,
        "paper_accuracy": 0.71,
        "called_fake": 0.125,
    }
    metrics |= {"pooled_accuracy": 0.63} if rungs > 1 else {}
    curves = {
        "step": steps.tolist(),
        **{name: trace[name].T.tolist() for name in ("energy", "noise_variance", "correction")},
        "swap_steps": when.tolist(),
        "draw_step": [700, 800, 900, 1000],
        "probabilities_accuracy": [accuracy - 0.001, accuracy, accuracy, accuracy],
        "last_accuracy": [0.58, 0.59, 0.58, 0.59],
    }
    swaps = [
        {
            "pair": [0, 1],
            "accepted": len(when),
            "proposed": proposed,
            "acceptance_rate": len(when) / max(1, proposed),
        }
    ]
    given = {
        "status": status,
        "metrics": metrics,
        "swaps": swaps * (rungs - 1),
        "steps_done": STEPS,
        "curves": curves,
    }
    folder = write_run(out, config, seed, **given)
    if with_trace:
        save_file(
            {name: tensor.contiguous() for name, tensor in trace.items()},
            folder / "trace.safetensors",
        )
    if not recipe.endswith("-supervised"):
        (folder / "samples.png").write_bytes(
            png(torch.randint(256, (42, 102, 3), generator=made).to(torch.uint8))
        )
    return folder


def finding_of(findings, title):
    (found,) = [finding for finding in findings if finding.title == title]
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    out = tmp_path_factory.mktemp("gan")
    return {method: load_run(write_gan(out, f"gan/cifar10-4000{method}")) for method in METHODS}


# The doctor


def test_collapsed_generators_are_a_warning(four):
    """Older results and discriminators alone do not say, and then nothing is said."""
    run, title = four["-sghmc"], "the generators have collapsed"
    for variety, warned in ((None, False), (0.24, True), (0.25, False)):
        metrics = {**run.result["metrics"], "variety": variety}
        diagnosis = diagnose(replace(run, result={**run.result, "metrics": metrics}))
        found = [each for each in diagnosis.findings if each.title == title]
        assert bool(found) == warned
        assert all(each.severity == "warning" and "0.24" in each.words for each in found)


@pytest.mark.parametrize("method", METHODS)
def test_a_warm_start_is_told_and_no_fault(four, method):
    diagnosis = diagnose(four[method])
    titles = {
        finding.title
        for finding in diagnosis.findings
        if finding.severity in ("problem", "warning")
    }
    assert titles <= {"hardly any swaps", "few swaps"}, diagnosis.findings
    assert bool(titles) == (method == "")  # two swaps are few, whatever came before
    found = finding_of(diagnosis.findings, "warm start")
    assert found.severity == "note"
    assert found.words.startswith("The first 600 of 1,000 steps descend without noise")
    # By hand: 4.5e-4 * max(0.05, exp(-600 / 800)) over the 46,000 unlabelled images.
    rate = 4.5e-4 * math.exp(-0.75) / 46_000
    assert found.numbers["lr_of_sampler"] == pytest.approx(rate)


def test_without_a_warm_start_there_is_nothing_to_tell(tmp_path):
    run = load_run(write_gan(tmp_path))
    settings = replace(run.settings, warm_start=0)
    assert not [
        found
        for found in diagnose(replace(run, settings=settings)).findings
        if found.title == "warm start"
    ]
    assert settings.swap_start == 1


def test_swaps_are_looked_at_after_the_warm_start(four):
    """Energies of the warm start, 90 nats apart, would drown those of the swap tests."""
    run = four[""]
    assert int(while_swapping(run, run.history).steps[0]) == 600
    evidence = gather(run)
    assert int(evidence.energies.steps[0]) == 600
    assert float(evidence.energies.energy_difference.abs().max()) < 10
    assert not evidence.follows_gap
    words = " ".join(found.words for found in check_ladder(run))
    assert "swapped twice in 400 tests (0.5 %)" in words
    assert "at temperatures 0.01 and 1" in words


def test_rungs_without_swaps_are_not_blamed(four):
    assert [found.title for found in check_ladder(four["-noswaps"])] == ["no swaps by design"]
    assert [found.title for found in check_ladder(four["-sghmc"])] == ["one rung"]


def test_a_run_in_its_warm_start_has_no_swaps_yet(tmp_path):
    path = write_gan(tmp_path, with_trace=False, status="paused")
    result = json.loads((path / "result.json").read_text())
    swaps = [{"pair": [0, 1], "accepted": 0, "proposed": 0, "acceptance_rate": None}]
    (path / "result.json").write_text(
        json.dumps({**result, "steps_done": 300, "swaps": swaps, "curves": {}, "metrics": {}})
    )
    found = finding_of(diagnose(load_run(path)).findings, "no swap was tested")
    assert found.severity == "note"
    assert found.words.startswith("Swaps are tested from step 600 on")


def test_curves_tell_where_the_trace_is_not_there(tmp_path, four):
    run = load_run(write_gan(tmp_path, with_trace=False))
    assert run.history is None
    history = history_from_curves(run)
    assert torch.equal(history.replica_at[:, :, 0], four[""].history.replica_at[:, :, 0])
    assert history.swaps.step.tolist() == [700, 800]
    told, same = (
        next(found.numbers for found in check_ladder(each) if "accepted" in found.numbers)
        for each in (run, four[""])
    )
    assert {name: told[name] for name in ("accepted", "proposed", "round_trips_per_chain")} == {
        name: same[name] for name in ("accepted", "proposed", "round_trips_per_chain")
    }
    assert not [
        found for found in diagnose(run).findings if found.title == "missing"
    ]  # curves are what is committed
    # More swaps than are listed: who stood where is not known, and nothing is made up.
    run.result["swaps"][0]["accepted"] = 40
    assert history_from_curves(run).swaps is None
    assert not gather(run).has_paths
    assert "round trip" not in " ".join(found.title for found in check_ladder(run))


def test_the_test_images_of_every_data_set(four):
    settings = four[""].settings
    for data, validation, subset, n in (
        *(("cifar10", 0, None, 10_000), ("svhn", 0, None, 26_032), ("digits", 0, None, 500)),
        *(("cifar10", 5_000, None, 5_000), ("svhn", 0, 2_000, 2_000), ("digits", 0, 9_999, 500)),
    ):
        changed = replace(settings, data=data, validation=validation, test_subset=subset)
        assert changed.test_size == n
    rising = [0.5 + 0.001 * k for k in range(30)]
    result = {**four[""].result, "curves": {"probabilities_accuracy": rising}}
    words = finding_of(
        diagnose(replace(four[""], result=result)).findings, "the average has not converged"
    ).words
    assert (
        "extend the run, or make the warm start longer" in words
    )  # where it ends the average begins


@pytest.mark.parametrize(
    "changes", [{"temperature": -1.0}, {"lr_time": 0.0}, {"hot_temperature": 0.5}]
)
def test_settings_that_make_no_ladder_are_a_problem_in_words(tmp_path, changes):
    path = write_gan(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    run = load_run(path)
    assert (run.ladder, run.settings, run.damaged) == (None, None, ("config.json",))
    assert any("the settings in config.json cannot be used" in problem for problem in run.problems)
    page_of([run], tmp_path / "page.html", title="t")


# Comparing


def test_methods_are_compared_by_their_numbers(four):
    paths = [four[method].path for method in METHODS]
    for comparison, method in zip(compare_folders(paths), METHODS[1:], strict=True):
        rows = {row.metric: row for row in comparison.rows}
        assert not comparison.apart  # all of them predict the same test images
        assert comparison.settings["method"] == ("resghmc", method[1:])
        assert rows["accuracy"].difference == pytest.approx(0.01 * METHODS.index(method))
        assert (rows["paper_accuracy"].better, rows["called_fake"].better) == ("higher", "")
        assert (
            "seconds_per_step" not in rows
        )  # the time is that of all replicas that ran side by side


def test_settings_that_a_method_does_not_use_do_not_matter(four):
    for method, idle in (
        ("-noswaps", {"correction_factor": 7.0, "smoothing": 0.9}),
        ("-sghmc", {"correction_factor": 7.0, "hot_lr": 3.0, "generators": "own"}),
        (
            "-supervised",
            {"hot_temperature": 7.0, "generators": "own"},
        ),  # the latents are drawn all the same
    ):
        config = four[method].config
        assert differing_that_matter(config, {**config, **idle}) == {}
        assert set(differing_that_matter(four[""].config, {**four[""].config, **idle})) == set(idle)
        assert set(differing_that_matter(config, {**config, "steps": 7, "warm_start": 3})) == {
            "steps",
            "warm_start",
        }


# The page


def test_the_family_shows_what_the_authors_count_and_the_papers_numbers(four):
    (family,) = families(list(four.values()))
    assert family.name == "gan"
    wanted = [each.metric for each in four[""].settings.columns]
    assert columns(family) == [name for name in wanted if name in four[""].numbers][:8]
    first = family.rows[0]
    assert cell(first, "called_fake") == ("12.5", 12.5)
    told = {row.label: paper_of(row.settings) for row in family.rows}
    assert told["cifar10-4000"]["accuracy"][:2] == (81.61, "81.61 ± 0.24")
    assert told["cifar10-4000-sghmc"]["accuracy"].value == 79.06
    assert told["cifar10-4000-noswaps"] == told["cifar10-4000-supervised"] == {}
    assert told["cifar10-4000"]["accuracy"].note == "15,000 steps, 5 seeds, ± 2 standard deviations"


def test_tuned_runs_are_a_family_of_their_own(four, tmp_path):
    run = four[""]
    tuned = replace(run, recipe="gan-tuned/cifar10-4000")
    assert [family.name for family in families([run, tuned])] == ["gan", "gan-tuned"]


def test_methods_are_drawn_over_each_other_and_other_labels_apart(four, tmp_path):
    runs = list(four.values())
    other = load_run(write_gan(tmp_path / "other"))
    fewer = replace(other, recipe="gan/cifar10-2000", config={**other.config, "n_labelled": 2000})
    (family,) = families([*runs, fewer])
    made = overlays(family, {id(run): charts_of(run)[0] for run in [*runs, fewer]})
    (accuracy,) = [chart for chart in made if chart["kind"] == "accuracy"]
    assert (
        accuracy["title"]
        == "cifar10-4000: accuracy of the average of probabilities against number of draws"
    )
    assert [line["name"] for line in accuracy["series"]] == [
        f"cifar10-4000{method}" for method in METHODS
    ]
    assert accuracy["series"][1]["y"] == [60.9, 61, 61, 61]


def test_a_copy_is_not_drawn_twice(four):
    """The mean line of seeds 0 and 1 is that of two runs, with a copy of seed 0 as well and with
    one that is not finished.
    """
    first = four[""]
    curves = first.result["curves"]
    higher = {
        **first.result,
        "curves": {
            **curves,
            "probabilities_accuracy": [x + 0.2 for x in curves["probabilities_accuracy"]],
        },
    }
    second = replace(first, seed=1, result=higher)
    empty = {"metrics": {}, "curves": {}}
    started = replace(
        first, status="unfinished", result={**first.result, **empty}, trace={}, history=None
    )
    for same in ([first, second], [first, second, replace(first)], [started, first, second]):
        runs = [*same, four["-sghmc"]]
        (family,) = families(runs)
        made = overlays(family, {id(run): charts_of(run)[0] for run in runs})
        (accuracy,) = [chart for chart in made if chart["kind"] == "accuracy"]
        assert accuracy["series"][0]["y"] == [69.9, 70, 70, 70]


def test_acceptance_is_that_of_the_tests_after_the_warm_start(four):
    """By hand: ten windows of 100 steps; swaps at 700 and 800, of 100 tests in each window from
    step 600 on, are 1 %.
    """
    run = four[""]
    (chart,) = [each for each in charts_of(run)[0] if each["kind"] == "acceptance"]
    expected, observed = chart["series"]
    assert expected["x"] == [50 + 100 * k for k in range(10)]
    assert observed["y"] == [None] * 6 + [0, 1, 1, 0]
    assert expected["y"][:6] == [None] * 6
    assert all(value is not None for value in expected["y"][6:])
    assert "Swaps are tested from step 600 on." in chart["note"]
    (energy,) = [each for each in charts_of(run)[0] if each["kind"] == "energy"]
    assert energy["note"] == "The first 600 steps descend by Adam, without noise and swaps."


def test_curves_are_drawn_by_steps_where_the_trace_is_not_there(tmp_path):
    charts, shared = charts_of(load_run(write_gan(tmp_path, with_trace=False)))
    assert [chart["kind"] for chart in charts] == ["energy", "sigma2", "correction", "accuracy"]
    assert shared["steps"][:3] == [0, 10, 20]
    assert (charts[0]["xLabel"], charts[0]["over"], charts[0]["marks"]["x"]) == (
        "step",
        "steps",
        [700, 800],
    )
    assert "Means from one step shown" in charts[0]["note"]


def test_the_ladder_has_a_learning_rate_for_each_sampler(four, tmp_path):
    details = details_of(four[""], tmp_path / "page.html")
    ladder = next(table for table in details["tables"] if table["title"] == "Ladder")
    assert ladder["head"] == ["rung", "temperature", "learning rate of Adam", "of SGHMC"]
    lr = 4.5e-4 / 46_000
    assert ladder["rows"] == [
        ["0", "0.01", f"{lr:.4g}", f"{lr * math.exp(-0.75):.4g}"],
        ["1", "1", f"{lr * 7 / 4.5:.4g}", f"{lr * 7 / 4.5 * math.exp(-0.75):.4g}"],
    ]
    assert "Adam, which has no temperature, descends for 600 steps" in ladder["note"]


def test_what_the_energies_promise_is_that_of_the_swap_tests(four, tmp_path):
    """In the warm start the cold energy lies 90 nats below, where none of 60 in 100 rows would
    swap.
    """
    swaps = next(
        table
        for table in details_of(four[""], tmp_path / "page.html")["tables"]
        if table["title"] == "Swaps"
    )
    promised = acceptance_from_energies(four[""].history.after(WARM_START)).value
    assert float(promised) > 2 * float(acceptance_from_energies(four[""].history).value) > 0
    assert swaps["rows"][0][4].startswith(f"{100 * float(promised):.0f}")


def test_what_the_generators_make_is_in_the_page(four, tmp_path):
    (picture,), problem = pictures_of(four[""])
    assert problem == ""
    assert (
        base64.b64decode(picture["src"].partition(",")[2])
        == (four[""].path / "samples.png").read_bytes()
    )
    assert (picture["width"], picture["note"]) == (
        306,
        "Images by the generators on rung 0 at the end, a row for each of 10 of 20 generators.",
    )
    assert pictures_of(four["-supervised"]) == ([], "")
    page = page_of(list(four.values()), tmp_path / "page.html", title="t")
    assert page.count("data:image/png;base64,") == 3
    assert "img-src data:;" in page


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"<svg onload='window.hacked=1'>", "it is no PNG file"),
        (lambda data: data[:-20], "it is cut short"),
        (
            lambda data: png(torch.zeros(5000, 1000, 1, dtype=torch.uint8)),
            "it has 1,000 x 5,000 pixels",
        ),
        (lambda data: data + bytes(2**20), "and at most 1,048,576 are read"),
        (lambda data: b"", "it is no PNG file"),
    ],
)
def test_what_is_no_sound_picture_is_told_and_not_shown(tmp_path, damage, words):
    path = write_gan(tmp_path)
    file = path / "samples.png"
    file.write_bytes(damage(file.read_bytes()))
    run = load_run(path)
    assert pictures_of(run)[0] == []
    assert words in pictures_of(run)[1]
    details = details_of(run, tmp_path / "page.html")
    assert details["pictures"] == []
    assert any(problem.startswith("samples.png is not shown: ") for problem in details["problems"])


def test_a_page_does_not_grow_without_end(four, monkeypatch, tmp_path):
    of_runs = [pictures_of(four[method])[0] for method in METHODS]
    size = len(of_runs[0][0]["src"])
    monkeypatch.setattr(page_details, "MOST_TOGETHER", 2 * size + 10)
    within_the_page(of_runs)
    assert ["src" in picture for each in of_runs for picture in each] == [True, True, False]
    assert "see samples.png in the folder" in of_runs[2][0]["note"]
    page = page_of(list(four.values()), tmp_path / "page.html", title="t")
    assert page.count("data:image/png;base64,") == 2
    assert size_of((four[""].path / "samples.png").read_bytes()) == (102, 42)


@pytest.mark.slow
@needs_chromium
def test_the_picture_is_seen_in_a_browser(four, tmp_path):
    page = tmp_path / "page.html"
    write_page([four[""].path.parents[2]], page)
    with chromium(tmp_path / "profile") as browser:
        browser.look()
        browser.open(page)
        browser.click("#none")
        browser.click('[data-run="0"]')
        browser.run("document.querySelector('img.samples').decode()")
        shown = browser.run(
            "[...document.querySelectorAll('img')].map(each => [each.naturalWidth, each.width, each.alt])"
        )
        assert shown == [
            [
                102,
                306,
                "Images by the generators on rung 0 at the end, a row for each of 10 of 20 generators.",
            ]
        ]
        assert browser.errors == []
