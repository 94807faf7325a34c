"""Paired by seed, with numbers by hand, and verdicts that claim no more than the seeds allow."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from torchrex.cli.look import compare as command
from torchrex.errors import ConfigError, InvalidArgumentError, RunFolderError
from torchrex.experiments import get_recipe
from torchrex.report.compare import (
    LEVEL,
    as_json,
    as_markdown,
    compare_folders,
    compare_metrics,
    differing,
    differing_that_matter,
    direction,
    lines,
    run_metrics,
    wrapped,
)
from torchrex.report.reader import load_run
from torchrex.runs.config import to_json
from written_runs import header, write_json

RESULTS = Path(__file__).parents[1] / "results" / "images" / "icml2020"


def write(out, recipe, metrics, *, status="finished", swaps=(), **changes):
    """Run folders of a recipe, one a seed: `metrics` maps seeds to their numbers."""
    config = {**to_json(get_recipe(recipe)), **changes}
    for seed, numbers in metrics.items():
        result = header(recipe, seed, status=status, metrics=numbers, swaps=list(swaps))
        write_json(out / recipe / f"seed={seed}", config, result)
    return out / recipe


def compared(tmp_path, first, other, recipes=("digits/sghmc", "digits/resghmc"), **changes):
    """Runs of the second recipe, with `changes` of its settings, against those of the first."""
    folders = (
        write(tmp_path / "a", recipes[0], first),
        write(tmp_path / "b", recipes[1], other, **changes),
    )
    (comparison,) = compare_folders(folders)
    return comparison


def compare_metric(metric, first, other):
    (row,) = compare_metrics({metric: (first, other)})
    return row


def test_by_hand():
    """Differences 1, 2, 6: mean 3, variance 7, error sqrt(7/3), t = 3 / sqrt(7/3) = 1.964.

    p = 2 (1 - F(t)) with F(t) = 1/2 + t / (2 sqrt(2 + t^2)) for 2 degrees of freedom: 0.188.
    """
    row = compare_metric("nll", [1.0, 1.0, 1.0], [2.0, 3.0, 7.0])
    t = 3.0 / math.sqrt(7.0 / 3.0)
    assert (row.first, row.other, row.difference, row.n) == (1.0, 4.0, 3.0, 3)
    assert row.error == pytest.approx(math.sqrt(7.0 / 3.0))
    assert row.p_value == pytest.approx(1.0 - t / math.sqrt(2.0 + t * t))
    assert row.verdict == "not distinguishable at n=3"


def test_pairing_sees_what_the_spread_over_seeds_hides():
    first, other = [0.10, 0.50, 0.90], [0.11, 0.52, 0.91]
    row = compare_metric("accuracy", first, other)
    assert row.difference == pytest.approx(0.04 / 3)
    assert row.error == pytest.approx(0.01 / 3)
    assert row.p_value == pytest.approx(1.0 - 4.0 / math.sqrt(18.0))  # t = 4
    assert row.verdict == "not distinguishable at n=3"  # 0.057: nearly is not
    first, other = [*first, 0.3], [*other, 0.315]
    for metric, a, b, verdict in (
        ("accuracy", first, other, "higher, better (adjusted p = "),
        ("nll", first, other, "higher, worse"),
        ("nll", other, first, "lower, better"),
        ("left_weight", first, other, "higher (adjusted p"),
    ):
        assert compare_metric(metric, a, b).verdict.startswith(verdict)


@pytest.mark.parametrize(
    ("first", "other", "verdict"),
    [
        ([1.0], [2.0], "one seed shows nothing"),
        ([1.0], [1.0], "the same on one seed, which shows nothing"),
        ([1.0, 1.0], [9.0, 9.000001], "no claim at n=2"),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "the same on all 3 seeds"),
        ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], "the same difference on all 3 seeds: no spread"),
        ([1.0, 2.0, 3.0], [3.0, 2.5, 1.0], "not distinguishable at n=3"),
    ],
)
def test_verdicts_do_not_overclaim(first, other, verdict):
    row = compare_metric("nll", first, other)
    assert row.verdict.startswith(verdict)
    assert (row.error is None) == (len(first) == 1)


def test_false_claims_come_at_the_stated_rate():
    """Under no difference any of 8 metrics is claimed in 5 % of 1,000 comparisons of 3 seeds: 50 +-
    7 expected, 5 sigma allowed.

    The mutant, p of each metric by itself, makes a claim in 1 - 0.95^8 = 34 % of them.
    """
    noise = torch.randn(1000, 8, 2, 3, generator=torch.Generator().manual_seed(0)).double().tolist()
    rows = [compare_metrics({str(k): pair for k, pair in enumerate(each)}) for each in noise]
    claims = sum(any("p = " in row.verdict for row in each) for each in rows)
    alone = sum(any(row.p_value < LEVEL for row in each) for each in rows)
    assert abs(claims - 50) < 5 * math.sqrt(1000 * 0.05 * 0.95)
    assert alone > 250


def differences(p):
    """Of 3 seeds, with mean 1 and this p by itself: p = 1 - t / sqrt(2 + t^2), and t = mean *
    sqrt(3) / standard deviation.
    """
    t = math.sqrt(2 * (1 - p) ** 2 / (1 - (1 - p) ** 2))
    return [1 - math.sqrt(3) / t, 1.0, 1 + math.sqrt(3) / t]


def test_holm_by_hand(tmp_path):
    """p of 0.01, 0.04, 0.03: adjusted 3 * 0.01, then 2 * 0.03, then max(0.06, 0.04). A metric that
    never differs is no test.
    """
    values = {f"p={p}": ([0.0] * 3, differences(p)) for p in (0.01, 0.04, 0.03)}
    rows = compare_metrics({**values, "same": ([1.0] * 3, [1.0] * 3)})
    assert [row.p_value for row in rows[:3]] == pytest.approx([0.01, 0.04, 0.03])
    assert [row.p_adjusted for row in rows[:3]] == pytest.approx([0.03, 0.06, 0.06])
    assert ["p = " in row.verdict for row in rows] == [True, False, False, False]
    assert rows[3].p_adjusted is None
    # One metric of nine has p = 0.016 by itself: no claim is made of it.
    metrics = {"nll": differences(0.016), **{f"m{k}": differences(0.5) for k in range(8)}}
    zeros = {s: dict.fromkeys(metrics, 0.0) for s in range(3)}
    numbers = {s: {name: each[s] for name, each in metrics.items()} for s in range(3)}
    comparison = compared(tmp_path, zeros, numbers)
    row = comparison.rows[0]
    assert (row.p_value, row.p_adjusted) == pytest.approx((0.016, 9 * 0.016))
    assert row.verdict == "not distinguishable at n=3"
    assert "all 9 tests together (Holm" in comparison.test
    assert as_json([comparison])[0]["test"]["adjustment"] == "Holm"


def test_which_direction_is_better():
    for better, metrics in (
        ("higher", ("accuracy", "pooled_logits_best_accuracy")),
        ("lower", ("w2", "single_ece", "largest_mean_error_in_sd")),
        ("", ("acceptance_rate", "left_weight", "noise_variance", "swaps of rungs 0 and 1")),
    ):
        assert {direction(metric) for metric in metrics} == {better}


def test_seeds_in_one_only_are_named_and_left_out(tmp_path):
    write(tmp_path / "b", "digits/resghmc", {8: {"nll": 0.0}}, status="paused")
    numbers = {s: {"nll": 1.0 + s + 0.1 * s} for s in (2, 0, 1, 7)}
    comparison = compared(tmp_path, {s: {"nll": 1.0 + s} for s in (0, 1, 2, 5)}, numbers)
    assert comparison.seeds == (0, 1, 2)
    (row,) = comparison.rows
    assert row.difference == pytest.approx(0.1)  # 0, 0.1 and 0.2, seed by seed
    assert row.error == pytest.approx(0.1 / math.sqrt(3))
    notes = " | ".join(comparison.notes)
    for words in ("seed 5 only in digits/sghmc", "seed 7 only in digits/resghmc", "8 is paused"):
        assert f"{words}, left out" in notes
    assert "3 common seeds" in comparison.test


def test_fields_that_differ(tmp_path):
    recipes = ("figure1/case1-resgld", "figure1/case2-naive")
    assert compared(tmp_path, {0: {"w2": 1.0}}, {0: {"w2": 2.0}}, recipes).settings == {
        "means": ([-3.0, 2.0], [-4.0, 3.0]),
        "noise.law": ("gaussian", "student"),
        "noise.scale": (2.0, 1.0),
        "correction_factor": (1.0, "inf"),
    }
    only = {"b": (None, "absent"), "c": ("absent", None)}
    assert differing({"a": 1, "b": None}, {"a": 1, "c": None}) == only


def changed(recipe, **changes):
    """The config.json of a recipe with other values; dots become two underscores."""
    config = to_json(get_recipe(recipe))
    for name, value in changes.items():
        part, _, key = name.rpartition("__")
        (config[part] if part else config)[key] = value
    return config


LAW = {"noise.law": ("gaussian", "student"), "noise.degrees": ("not used", 7.0)}
IDLE_OF_SGLD = {"correction_factor": 9.0, "measure_every": 5, "noise__scale": 7.0}


@pytest.mark.parametrize(
    ("recipe", "one", "other", "wanted"),
    [
        ("figure1/case1-resgld", {}, {"noise__degrees": 7.0}, {}),  # the noise is normal
        ("figure1/case2-resgld", {}, {"noise__degrees": 7.0}, {"noise.degrees": (5.0, 7.0)}),
        ("figure1/case2-resgld", {"noise__law": "gaussian"}, {"noise__degrees": 7.0}, LAW),
        ("figure1/case1-sgld", {}, IDLE_OF_SGLD, {}),  # one rung
        ("figure1/case1-resgld", {}, {"correction_factor": 9.0}, {"correction_factor": (1.0, 9.0)}),
        ("digits/independent", {}, {"correction_factor": 9.0, "smoothing": 0.5}, {}),
        ("digits/resghmc", {}, {"smoothing": 0.5}, {"smoothing": (0.05, 0.5)}),
        ("digits/sghmc", {}, {"hot_lr": 3.0, "checkpoint_every": 7}, {}),
        ("digits/resghmc", {}, {"hot_lr": 3.0}, {"hot_lr": (1.0, 3.0)}),
        ("clean/cifar10-resnet20-msgd", {}, {"temperature": 1.0, "variance": "repeated"}, {}),
        ("clean/cifar10-resnet20-sghmc", {}, {"temperature": 1.0}, {"temperature": (0.01, 1.0)}),
        (
            "clean/cifar10-resnet20-independent",
            {},
            {"hot_lr": 2, "swaps_after": 3},
            {"hot_lr": (1.5, 2)},
        ),
    ],
)
def test_settings_that_cannot_matter_are_no_differences(recipe, one, other, wanted):
    assert differing_that_matter(changed(recipe, **one), changed(recipe, **other)) == wanted


@pytest.mark.parametrize(
    ("recipe", "changes", "apart"),
    [
        ("figure1/case1-naive", {"means": [-4.0, 2.0]}, ("means",)),
        ("figure1/case1-naive", {"weights": [0.5, 0.5], "stds": [0.7, 0.7]}, ("weights", "stds")),
        ("figure1/case1-naive", {"correction_factor": 2.0}, ()),
        ("clean/cifar10-resnet20", {"data": "cifar100"}, ("data",)),
        ("clean/cifar10-resnet20", {"test_subset": 100}, ("test_subset",)),
        ("clean/cifar10-resnet20", {"subset": 500, "epochs": 7}, ()),  # measured on the same images
        ("clean/cifar10-resnet20", {"data_seed": 3}, ()),  # of the order alone
        ("tall/logistic", {"data_seed": 3}, ("data_seed",)),  # of the data
        ("tall/logistic", {"n_data": 1000}, ("n_data",)),
    ],
)
def test_different_problems_get_no_verdict(tmp_path, recipe, changes, apart):
    numbers = [{s: {"nll": k + (1 + 0.01 * k) * s} for s in range(3)} for k in range(2)]
    comparison = compared(tmp_path, *numbers, (recipe, recipe), **changes)
    (row,) = comparison.rows
    assert comparison.apart == apart
    if not apart:
        assert row.verdict.startswith("higher, worse")
        return
    assert row.verdict == f"not comparable: different {', '.join(apart)}"
    assert (row.better, row.p_value, row.error) == ("", None, None)
    assert as_json([comparison])[0]["not_comparable_because_of"] == list(apart)
    for width in (None, 100, 30):
        text = " ".join(" ".join(lines(comparison, width)).split())
        assert text.count("not comparable") == 1
        assert "verdict" not in text
        assert "p = " not in text
    markdown = as_markdown([comparison])
    assert f"they are not comparable: they differ in {', '.join(apart)}" in markdown
    assert "p = " not in markdown


def test_different_kinds_that_share_a_metric(tmp_path):
    recipes = ("digits/sghmc", "clean/cifar10-resnet20")
    comparison = compared(tmp_path, {0: {"nll": 1.0}}, {0: {"nll": 2.0}}, recipes)
    assert "data" in comparison.apart
    text = "\n".join(lines(comparison))
    assert "settings that only other has: data, net, method" in text
    assert "absent" not in text


def test_a_damaged_config_is_no_difference(tmp_path):
    first = write(tmp_path / "a", "digits/sghmc", {0: {"nll": 1.0}, 1: {"nll": 1.0}})
    other = write(tmp_path / "b", "digits/sghmc", {0: {"nll": 2.0}, 1: {"nll": 1.0}})
    (other / "seed=0" / "config.json").write_text("{")
    (comparison,) = compare_folders([first, other])
    assert comparison.settings == {}
    assert comparison.seeds == (1,)
    assert any("seed=0 has no sound config.json" in note for note in comparison.notes)
    assert "no setting that matters differs" in "\n".join(lines(comparison))
    (other / "seed=1" / "config.json").unlink()  # now none is known: they are compared all the same
    (comparison,) = compare_folders([first, other])
    text = "\n".join(lines(comparison))
    assert comparison.seeds == (0, 1)
    assert "settings are not known" in text
    assert "differ" not in text.replace("difference", "")
    assert not as_json([comparison])[0]["settings_known"]


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_said_of_a_test_that_was_not_made(tmp_path, n):
    numbers = [{s: {"nll": k + (1 + 0.1 * k) * s} for s in range(n)} for k in range(2)]
    comparison = compared(tmp_path, *numbers)
    text = "\n".join(lines(comparison))
    assert f"no test: {'one seed' if n == 1 else '2 seeds'}; 3 are needed" in text
    assert "Holm" not in text
    assert ("+- its standard error" in text) == (n == 2)
    assert as_json([comparison])[0]["test"]["kind"] == "none"
    for _ in range(2):  # a file of ours is known without the name of a test
        command([comparison.first.path, comparison.other.path], out=tmp_path / "table.md")


LONG = "pooled_logits_best_accuracy_of_all_the_rungs_together"


@pytest.mark.parametrize("width", [None, 200, 120, 80, 60, 30])
def test_no_name_is_cut_at_any_width(tmp_path, width):
    numbers = {s: {LONG: 0.123456 + s, "nll": 1.0} for s in range(3)}
    made = lines(compared(tmp_path, numbers, numbers, epochs=70), width)
    words = [word.rstrip(",;:") for word in " ".join(made).split()]
    wanted = (LONG, "digits/sghmc", "digits/resghmc", "temperatures", "1.12346", "nll", "same")
    assert set(wanted) <= set(words)
    if width is None:
        assert sum(LONG in line and line.endswith("on all 3 seeds") for line in made) == 1
    else:
        assert all(len(line) <= width or len(line.split()) == 1 for line in made)
    assert wrapped(f"of {LONG} and semi-detached", 30) == ["of", LONG, "and semi-detached"]
    assert any(line.startswith("metric ") for line in made) == (width is None or width > 100)


def test_the_same_recipe_with_other_settings_is_named_by_folder(tmp_path):
    first = write(tmp_path / "a", "digits/sghmc", {0: {"nll": 1.0}})
    other = write(tmp_path / "b", "digits/sghmc", {0: {"nll": 2.0}}, epochs=70)
    (comparison,) = compare_folders([first, other])
    assert comparison.settings == {"epochs": (100, 70)}
    assert str(other) in comparison.other.name
    write(tmp_path / "b", "digits/sghmc", {1: {"nll": 2.0}}, epochs=80)
    write(tmp_path / "a", "digits/sghmc", {1: {"nll": 2.0}})
    (comparison,) = compare_folders([first, other])
    assert any("its own seeds differ in epochs" in note for note in comparison.notes)


def test_only_outcomes_that_all_runs_have_are_compared(tmp_path):
    numbers = {"n_draws": 3, "w1": 1.0, "w1_se": 0.1, "left_weight_true": 0.4, "nan": None}
    pair = {"pair": [0, 1], "proposed": 10, "accepted": 4, "acceptance_rate": 0.4}
    first = write(tmp_path, "digits/sghmc", {0: {**numbers, "flag": True}}, swaps=[pair])
    other = write(tmp_path, "digits/resghmc", {0: {"w1": 1.0, "pooled_nll": 1.0}})
    kept = {"w1": 1.0, "swaps of rungs 0 and 1": 4.0}
    assert run_metrics(load_run(first / "seed=0")) == kept
    (comparison,) = compare_folders([first, other])
    assert [row.metric for row in comparison.rows] == ["w1"]
    assert any("left out: pooled_nll, swaps of rungs" in note for note in comparison.notes)


def test_two_runs_of_different_seeds_are_compared_and_not_paired(tmp_path):
    one = write(tmp_path, "digits/sghmc", {0: {"nll": 1.0}, 1: {"nll": 3.0}})
    (found,) = compare_folders([one / "seed=0", one / "seed=1"])
    assert [(row.first, row.other, row.error) for row in found.rows] == [(1.0, 3.0, None)]
    assert not found.tested
    assert any("has seed 1: the runs are not paired" in note for note in found.notes)


def test_bad_input(tmp_path):
    one = write(tmp_path, "digits/sghmc", {0: {"nll": 1.0}})
    other = write(tmp_path, "digits/resghmc", {1: {"nll": 1.0}, 2: {"nll": 2.0}})
    paused = write(tmp_path / "c", "digits/msgd", {0: {}}, status="paused")
    strange = write(tmp_path / "d", "figure1/case1-naive", {0: {"w2": 1.0}})
    (tmp_path / "empty").mkdir()
    for paths, kind, words in (
        ([one], InvalidArgumentError, "at least two"),
        ([one, other], RunFolderError, "no seed in common"),
        ([one, tmp_path / "digits"], RunFolderError, "2 recipes"),
        ([one, paused], RunFolderError, "no finished run"),
        ([one, strange], RunFolderError, "no metric in common"),
        ([one, tmp_path / "empty"], RunFolderError, "holds no run"),
        ([one, tmp_path / "none"], RunFolderError, "there is no folder"),
    ):
        with pytest.raises(kind, match=words) as caught:
            compare_folders(paths)
        assert "\n" not in str(caught.value)


def test_committed_images_against_their_files():
    folders = [RESULTS / f"cifar10-resnet20{method}" for method in ("-msgd", "")]
    (comparison,) = compare_folders(folders)
    row = next(row for row in comparison.rows if row.metric == "accuracy")

    def mean(folder):
        files = [folder / f"seed={s}" / "result.json" for s in comparison.seeds]
        numbers = [json.loads(file.read_text())["metrics"]["accuracy"] for file in files]
        return sum(numbers) / len(numbers)

    assert len(comparison.seeds) >= 2
    assert row.difference == pytest.approx(mean(folders[1]) - mean(folders[0]))
    assert comparison.settings == {"method": ("msgd", "resghmc")}


def test_the_command(tmp_path):
    first = write(tmp_path, "digits/sghmc", {s: {"nll": 1.0 + s} for s in range(3)})
    other = write(tmp_path, "digits/resghmc", {s: {"nll": 1.0 + s - 0.1 * s} for s in range(3)})
    third = write(tmp_path, "digits/msgd", {1: {"nll": 1.0}})
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    arguments = [str(first), str(other), str(third)]
    shown = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "new" / "table.md")])
    assert shown.exit_code == 0, shown.output
    printed = shown.output.splitlines()  # a pipe has no edge: nothing is wrapped
    wanted = ("not distinguishable at n=3", "temperatures: 0.1 / 0.1,0.1025", "seeds 0, 2 only")
    assert all(any(words in line for line in printed) for words in wanted)
    comparisons = compare_folders([first, other, third])
    markdown = (tmp_path / "new" / "table.md").read_text()
    assert markdown == as_markdown(comparisons)
    assert "| nll | lower | 2 | 1.9 | -0.1 +- 0.058 | 3 | not distinguishable at n=3 |" in markdown
    CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "table.json")])
    written = json.loads((tmp_path / "table.json").read_text())
    assert written == json.loads(json.dumps(as_json(comparisons)))
    wrong = CliRunner().invoke(app, [*arguments, "--out", "x.csv"])
    assert isinstance(wrong.exception, ConfigError)


@pytest.mark.parametrize("suffix", [".md", ".json"])
def test_only_its_own_files_are_overwritten(tmp_path, suffix):
    numbers = {s: {"nll": 1.0 + s} for s in range(3)}
    folders = [write(tmp_path / name, "digits/sghmc", numbers) for name in ("a", "b")]
    mine = tmp_path / f"notes{suffix}"
    mine.write_text("my notes")
    for precious in (mine, *folders[1].rglob("result.json")) if suffix == ".json" else (mine,):
        before = precious.read_text()
        with pytest.raises(RunFolderError, match="did not write"):
            command(folders, out=precious)
        assert precious.read_text() == before
    for _ in range(2):
        command(folders, out=tmp_path / f"table{suffix}")
