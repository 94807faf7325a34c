"""Runs of GANs on the page and before the doctor: warm start, and pictures."""

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
from torchrex.experiments import get_recipe
from torchrex.report.compare import compare_folders, differing_that_matter
from torchrex.report.doctor import diagnose
from torchrex.report.page import details as page_details
from torchrex.report.page import page_of, write_page
from torchrex.report.page.details import pictures_of, size_of, within_the_page
from torchrex.report.page.drawn import of_answers, of_ladder
from torchrex.report.page.ladder import pooled
from torchrex.report.page.rows import cell, columns, groups, paper_of
from torchrex.report.reader import load_run
from torchrex.report.swap_checks import check_ladder, gather, history_from_curves, while_swapping
from torchrex.runs.folder import png
from written_runs import write_run

STEPS, WARM_START, EVERY = 1_000, 600, 10
METHODS = ("", "-sghmc", "-noswaps", "-supervised")
NOTE = "Images by the generators on rung 0 at the end, a row for each of 10 of 20 generators."


def write_gan(out: Path, recipe="gan/cifar10-4000", *, with_trace=True, **more):
    """A run folder as the runner leaves it, filled with noise. Energies of the warm start lie far
    apart, as they do. `more` replaces parts of the result.
    """
    settings = {"steps": STEPS, "warm_start": WARM_START, "correction_factor": 1.0}
    config = replace(get_recipe(recipe), **settings)
    made = torch.Generator().manual_seed(0)
    rungs, rows = config.n_rungs, STEPS // EVERY
    when = torch.tensor((700, 800) if config.swaps else (), dtype=torch.long)
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
        "replica_at": torch.stack([turned, 1 - turned][:rungs], 1) * (rungs - 1),
        "swap_steps": when,
        "swap_pairs": torch.zeros_like(when),
        "accepted": torch.full((rungs - 1,), len(when)),
        "proposed": torch.full((rungs - 1,), proposed),
    }
    accuracy = 0.6 + 0.01 * METHODS.index(recipe.removeprefix("gan/cifar10-4000"))
    metrics = {"n_draws": 4, "accuracy": accuracy, "nll": 1.1, "ece": 0.03, "brier": 0.5}
    metrics |= {"single_accuracy": 0.59, "single_nll": 1.2, "paper_accuracy": 0.71}
    metrics |= {"called_fake": 0.125, "mutual_information": 0.2, "seconds_per_step": 0.1}
    metrics |= {"pooled_accuracy": 0.63} if rungs > 1 else {}
    curves = {
        "step": steps.tolist(),
        **{name: trace[name].T.tolist() for name in ("energy", "noise_variance", "correction")},
        "swap_steps": when.tolist(),
        "draw_step": [700, 800, 900, 1000],
        "probabilities_accuracy": [accuracy - 0.001, accuracy, accuracy, accuracy],
        "last_accuracy": [0.58, 0.59, 0.58, 0.59],
    }
    swaps = {"pair": [0, 1], "accepted": len(when), "proposed": proposed}
    swaps["acceptance_rate"] = len(when) / max(1, proposed)
    given = {"metrics": metrics, "swaps": [swaps] * (rungs - 1), "steps_done": STEPS}
    folder = write_run(out, config, 0, **{**given, "curves": curves, **more})
    if with_trace:
        contiguous = {name: tensor.contiguous() for name, tensor in trace.items()}
        save_file(contiguous, folder / "trace.safetensors")
    if not recipe.endswith("-supervised"):
        picture = torch.randint(256, (42, 102, 3), generator=made).to(torch.uint8)
        (folder / "samples.png").write_bytes(png(picture))
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
def test_a_warm_start_is_a_note_and_no_fault(four, method):
    diagnosis = diagnose(four[method])
    faults = [each for each in diagnosis.findings if each.severity in ("problem", "warning")]
    titles = {fault.title for fault in faults}
    assert titles <= {"hardly any swaps", "few swaps"}, diagnosis.findings
    assert bool(titles) == (method == "")  # two swaps are few, whatever came before
    found = finding_of(diagnosis.findings, "warm start")
    assert found.severity == "note"
    assert "first 600 of 1,000 steps" in found.words
    # By hand: 4.5e-4 * max(0.05, exp(-600 / 800)) over the 46,000 unlabelled images.
    rate = 4.5e-4 * math.exp(-0.75) / 46_000
    assert found.numbers["lr_of_sampler"] == pytest.approx(rate)
    without = replace(four[method], settings=replace(four[method].settings, warm_start=0))
    assert without.settings.swap_start == 1
    assert "warm start" not in {each.title for each in diagnose(without).findings}


def test_swaps_are_looked_at_after_the_warm_start(four):
    """Energies of the warm start, 90 nats apart, would drown those of the swap tests."""
    run = four[""]
    assert int(while_swapping(run, run.history).steps[0]) == 600
    evidence = gather(run)
    assert int(evidence.energies.steps[0]) == 600
    assert float(evidence.energies.energy_difference.abs().max()) < 10
    assert not evidence.follows_gap
    words = " ".join(found.words for found in check_ladder(run))
    assert "twice in 400 tests (0.5 %)" in words
    assert [found.title for found in check_ladder(four["-noswaps"])] == ["no swaps by design"]
    assert [found.title for found in check_ladder(four["-sghmc"])] == ["one rung"]


def test_a_run_in_its_warm_start_has_no_swaps_yet(tmp_path):
    swaps = [{"pair": [0, 1], "accepted": 0, "proposed": 0, "acceptance_rate": None}]
    result = {"status": "paused", "steps_done": 300, "swaps": swaps, "curves": {}, "metrics": {}}
    path = write_gan(tmp_path, with_trace=False, **result)
    found = finding_of(diagnose(load_run(path)).findings, "no swap was tested")
    assert found.severity == "note"
    assert "step 600" in found.words


def test_curves_say_it_where_the_trace_is_not_there(tmp_path, four):
    """As in the committed results. More swaps than are listed: the rungs are not known."""
    run = load_run(write_gan(tmp_path, with_trace=False))
    assert run.history is None
    history = history_from_curves(run)
    assert torch.equal(history.replica_at[:, :, 0], four[""].history.replica_at[:, :, 0])
    assert history.swaps.step.tolist() == [700, 800]
    by_curves, by_trace = (
        next(found.numbers for found in check_ladder(each) if "accepted" in found.numbers)
        for each in (run, four[""])
    )
    for name in ("accepted", "proposed", "round_trips_per_chain"):
        assert by_curves[name] == by_trace[name]
    assert "missing" not in {found.title for found in diagnose(run).findings}
    drawn = dict(of_ladder(pooled([run]), "#000000"))
    assert list(drawn) == ["acceptance", "flow", "energy", "noise"]
    lines = {trace.name: trace.x.tolist() for trace in drawn["energy"].data}
    assert lines["rung 0 (coldest)"][:3] == [0, 10, 20]
    assert lines["swaps"] == [700, 800]
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
    findings = diagnose(replace(four[""], result=result)).findings
    words = finding_of(findings, "the average has not converged").words
    assert "make the warm start longer" in words  # where it ends the average begins


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
        assert "seconds_per_step" not in rows  # it is that of all runs that trained together


@pytest.mark.parametrize(
    ("method", "idle"),
    [
        ("-noswaps", {"correction_factor": 7.0, "smoothing": 0.9}),
        ("-sghmc", {"correction_factor": 7.0, "hot_lr": 3.0, "generators": "own"}),
        ("-supervised", {"hot_temperature": 7.0, "generators": "own"}),  # its batches have latents
    ],
)
def test_settings_that_a_method_does_not_use_do_not_matter(four, method, idle):
    config, used = four[method].config, {"steps": 7, "warm_start": 3}
    assert differing_that_matter(config, {**config, **idle}) == {}
    assert set(differing_that_matter(four[""].config, {**four[""].config, **idle})) == set(idle)
    assert set(differing_that_matter(config, {**config, **used})) == set(used)


# The page


def test_the_family_shows_what_the_authors_count_and_the_papers_numbers(four):
    settings = replace(four[""].settings, recipe="gan-tuned/cifar10-4000")
    tuned = replace(four[""], recipe=settings.recipe, settings=settings)
    family, other = groups([*four.values(), tuned])
    assert (family.name, other.name) == ("gan", "gan-tuned")
    wanted = [each.metric for each in four[""].settings.columns]
    assert columns(family)[0] == [name for name in wanted if name in four[""].numbers][:8]
    assert cell(family.families[0], "called_fake") == ("12.5", 12.5)
    paper = {row.label: paper_of(row.settings) for row in family.families}
    assert paper["cifar10-4000"]["accuracy"] == ("81.61 ± 0.24", 81.61)
    assert "15,000 steps, 5 seeds" in four[""].settings.paper_note
    assert paper["cifar10-4000-sghmc"]["accuracy"][1] == 79.06
    assert paper["cifar10-4000-noswaps"] == paper["cifar10-4000-supervised"] == {}


def overlaid(runs):
    (group,) = groups(runs)
    (made,) = [figure for kind, figure in of_answers(group.families) if kind == "averages"]
    return made


def test_methods_are_drawn_over_each_other_and_other_labels_apart(four, tmp_path):
    other = load_run(write_gan(tmp_path / "other"))
    fewer = replace(other, recipe="gan/cifar10-2000", config={**other.config, "n_labelled": 2000})
    accuracy = overlaid([*four.values(), fewer])
    assert accuracy.layout.title.text.startswith("cifar10-4000: Accuracy of the average")
    assert [line.name for line in accuracy.data] == [f"cifar10-4000{method}" for method in METHODS]
    assert accuracy.data[1].y.tolist() == pytest.approx([60.9, 61, 61, 61])


def test_a_copy_is_not_drawn_twice(four):
    """Neither a copy of seed 0 nor an unfinished run changes the mean of seeds 0 and 1."""
    first = four[""]
    curves = dict(first.result["curves"])
    curves["probabilities_accuracy"] = [x + 0.2 for x in curves["probabilities_accuracy"]]
    second = replace(first, seed=1, result={**first.result, "curves": curves})
    empty = {**first.result, "metrics": {}, "curves": {}}
    started = replace(first, status="unfinished", result=empty, trace={}, history=None)
    for same in ([first, second], [first, second, replace(first)], [started, first, second]):
        accuracy = overlaid([*same, four["-sghmc"]])
        assert accuracy.data[0].y.tolist() == pytest.approx([69.9, 70, 70, 70])


def test_the_tables_of_a_run_know_of_its_warm_start(four, tmp_path):
    """A learning rate for each sampler. What the energies promise is that of the swap tests: in the
    warm start the cold energy lies 90 nats below, where none of 60 in 100 rows would swap.
    """
    page = page_of([four[""]], tmp_path / "page.html")
    lr, later = 4.5e-4 / 46_000, math.exp(-0.75)
    for row in (
        ("0", "0.01", f"{lr:.4g}", f"{lr * later:.4g}"),
        ("1", "1", f"{lr * 7 / 4.5:.4g}", f"{lr * 7 / 4.5 * later:.4g}"),
    ):
        first, *others = row
        cells = "".join(f"<td class=n>{each}</td>" for each in others)
        assert f"<tr><td>{first}</td>{cells}</tr>" in page
    assert "the first 600 steps descend by Adam" in page
    promised = acceptance_from_energies(four[""].history.after(WARM_START)).value
    assert float(promised) > 2 * float(acceptance_from_energies(four[""].history).value) > 0
    assert pooled([four[""]]).pairs[0].expected[0] == pytest.approx(float(promised))


def test_what_the_generators_make_is_in_the_page(four, monkeypatch, tmp_path):
    """As long as the page does not grow too much."""
    (picture,), problem = pictures_of(four[""])
    file = (four[""].path / "samples.png").read_bytes()
    assert (problem, picture["width"], picture["note"]) == ("", 306, NOTE)
    assert base64.b64decode(picture["src"].partition(",")[2]) == file
    assert size_of(file) == (102, 42)
    assert pictures_of(four["-supervised"]) == ([], "")
    page = page_of(list(four.values()), tmp_path / "page.html", title="t")
    assert page.count("data:image/png;base64,") == 3
    assert "img-src data:;" in page
    of_runs = [pictures_of(four[method])[0] for method in METHODS]
    monkeypatch.setattr(page_details, "MOST_TOGETHER", 2 * len(picture["src"]) + 10)
    within_the_page(of_runs)
    assert ["src" in picture for each in of_runs for picture in each] == [True, True, False]
    assert "samples.png in the folder" in of_runs[2][0]["note"]
    page = page_of(list(four.values()), tmp_path / "page.html", title="t")
    assert page.count("data:image/png;base64,") == 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"<svg onload='window.hacked=1'>", "no PNG file"),
        (lambda data: data[:-20], "cut short"),
        (lambda data: png(torch.zeros(5000, 1000, 1, dtype=torch.uint8)), "1,000 x 5,000 pixels"),
        (lambda data: data + bytes(2**20), "at most 1,048,576"),
        (lambda data: b"", "no PNG file"),
    ],
)
def test_a_damaged_picture_is_reported_and_not_shown(tmp_path, damage, words):
    path = write_gan(tmp_path)
    file = path / "samples.png"
    file.write_bytes(damage(file.read_bytes()))
    run = load_run(path)
    assert pictures_of(run)[0] == []
    assert words in pictures_of(run)[1]
    page = page_of([run], tmp_path / "page.html")
    assert "<img" not in page
    assert "<li>samples.png is not shown: " in page


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")
def test_the_picture_is_seen_in_a_browser(four, tmp_path):
    page = tmp_path / "page.html"
    write_page([four[""].path], page)
    with chromium(tmp_path / "profile") as browser:
        browser.look()
        browser.open(page)
        browser.run("document.querySelectorAll('details').forEach(e => { e.open = true })")
        browser.run("document.querySelector('img.samples').decode()")
        shown = "each => [each.naturalWidth, each.width, each.alt]"
        images = "[...document.querySelectorAll('img')]"
        assert browser.run(f"{images}.map({shown})") == [[102, 306, NOTE]]
        assert browser.errors == []
