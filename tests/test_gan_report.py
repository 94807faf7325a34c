"""Table 3 and figure 3 from run folders that are written here, with numbers whose means and errors
are known by hand.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import test_image_report as images
from torchrex.cli import reproducing
from torchrex.cli.reproducing import trained_ones
from torchrex.experiments.gan_recipes import (
    GAN_FAMILIES,
    GAN_METHODS,
    N_LABELLED,
    PAPER_TABLE3,
    PAPER_TWO_SD,
    figure3_recipes,
    gan_recipes,
    table3_recipes,
)
from torchrex.experiments.run_folder import RunFolder
from torchrex.report.gan import METHODS, PAPER_STEPS, tabulate
from torchrex.report.gan_figure import numbers as figure_numbers
from written_runs import write_run_on_gpu

cli, rebuild, the = images.cli, images.rebuild, images.the  # fixtures, and a row by its values

C10 = "gan/cifar10-4000"
SGHMC, RESGHMC = PAPER_TABLE3["cifar10", 4000]


@pytest.fixture
def write(tmp_path):
    """Writes a finished run of a recipe; `accuracy` and `pooled` are in %. Other numbers lie a
    known distance from them.
    """

    def one(
        recipe,
        seed=0,
        accuracy=80.0,
        pooled=81.0,
        *,
        swaps=0,
        status="finished",
        metrics=None,
        curves=None,
        **settings,
    ):
        config = replace(gan_recipes()[recipe], **settings)
        numbers = {
            "n_draws": 2,
            "nll": 0.625,
            "ece": 0.031,
            "brier": 0.25,
            "called_fake": 0.125,
            "seconds_per_step": 0.03,
        }
        below = {
            "accuracy": 0.0,
            "best_accuracy": -0.25,
            "single_accuracy": 2.0,
            "paper_accuracy": -3.0,
            "training_mode_accuracy": -4.0,
        }
        numbers |= {name: (accuracy - less) / 100 for name, less in below.items()}
        numbers |= {} if config.method == "supervised" else {"variety": 0.375}
        courses = {
            "step": [0],
            "draw_step": [9_000, 15_000],
            "probabilities_accuracy": [0.7, accuracy / 100],
        }
        if config.n_rungs > 1:
            numbers |= {"pooled_accuracy": pooled / 100, "pooled_nll": 0.5}
        given = {"status": status, "metrics": numbers | (metrics or {}), "swaps": swaps}
        given["curves"] = courses if curves is None else curves
        return write_run_on_gpu(tmp_path, config, seed, **given, versions={"torch": "2.0"})

    return one


def cells_of(markdown, name):
    """The cells of the row of a method, by the heads of the table."""
    heads, row = (
        next(line for line in markdown.splitlines() if f"| {word} |" in line)
        for word in ("method", name)
    )
    return dict(
        zip(
            *([each.strip() for each in line.strip("|").split("|")] for line in (heads, row)),
            strict=True,
        )
    )


# The numbers of a row


def test_a_row_by_hand(write, rebuild):
    for seed, accuracy in enumerate((79.0, 80.0, 81.0)):
        write(C10, seed, accuracy, accuracy + 1.5, swaps=seed + 2)
    out, numbers, markdown = rebuild("table3")
    (row,) = numbers["rows"]
    assert (row["data"], row["n_labelled"], row["method"], row["recipe"]) == (
        "cifar10",
        4000,
        "reSGHMC",
        C10,
    )
    assert (row["n"], row["seeds"], row["steps"], row["settings"], row["swaps"]) == (
        3,
        [0, 1, 2],
        15_000,
        {},
        [2, 3, 4],
    )
    assert row["ours"] == {
        "mean": pytest.approx(80.0),
        "two_sd": pytest.approx(2.0),
        "values": pytest.approx({"0": 79, "1": 80, "2": 81}),
    }
    assert row["paper"] == {"mean": 81.61, "two_sd": 0.24}
    assert row["z"] == pytest.approx((80.0 - 81.61) / math.sqrt(1 / 3 + 0.12**2 / 5))
    means = {
        name: row[name]["mean"]
        for name in ("single_accuracy", "paper_accuracy", "called_fake", "best_accuracy")
    }
    assert means == pytest.approx(
        {
            "single_accuracy": 78.0,
            "paper_accuracy": 83.0,
            "called_fake": 12.5,
            "best_accuracy": 80.25,
        }
    )
    assert (row["pooled_accuracy"]["mean"], row["pooled_nll"]["mean"]) == pytest.approx((81.5, 0.5))
    assert (row["nll"]["mean"], row["ece"]["mean"], row["brier"]["mean"]) == pytest.approx(
        (0.625, 3.1, 0.25)
    )
    assert (row["wall_minutes"], row["devices"], row["versions"]) == (
        [1.5] * 3,
        ["a GPU"],
        [{"torch": "2.0"}],
    )
    assert cells_of(markdown, "reSGHMC") == {
        **{
            "data": "cifar10",
            "labels": "4000",
            "settings": "paper's",
            "method": "reSGHMC",
            "paper %": "81.61±0.24",
            "ours %": "80.00±2.00",
        },
        **{
            "n": "3",
            "off by (s.e.)": f"{row['z']:+.1f}",
            "both rungs %": "81.50±2.00",
            "one net %": "78.00",
        },
        **{
            "their score %": "83.00",
            "called fake %": "12.5",
            "training mode %": "84.00",
            "variety": "0.38",
            "NLL": "0.625",
            "ECE %": "3.10",
        },
        **{"swaps": "2, 3, 4", "min": "1.5"},
    }
    assert "80.00±2.00" in out
    assert "as the authors' code scores" in markdown


def test_one_rung_has_no_pair_and_no_swaps(write, rebuild):
    write(f"{C10}-sghmc", accuracy=79.0)
    write(f"{C10}-supervised", accuracy=60.0)
    write(f"{C10}-noswaps", accuracy=78.0, pooled=79.5)
    _, numbers, markdown = rebuild("table3")
    assert [row["method"] for row in numbers["rows"]] == ["SGHMC", "no swaps", "supervised only"]
    alone = the(numbers["rows"], method="SGHMC")
    assert (alone["pooled_accuracy"], alone["swaps"], alone["ours"]["two_sd"]) == (None, None, None)
    assert alone["z"] is None  # one seed
    assert the(numbers["rows"], method="no swaps")["swaps"] == [0]
    for method in ("no swaps", "supervised only"):
        assert the(numbers["rows"], method=method)["paper"] is None
        assert cells_of(markdown, method)["paper %"] == "-"
    assert (
        cells_of(markdown, "SGHMC")["both rungs %"] == cells_of(markdown, "SGHMC")["swaps"] == "-"
    )
    assert cells_of(markdown, "no swaps")["both rungs %"] == "79.50"
    assert cells_of(markdown, "SGHMC")["off by (s.e.)"] == ""


def test_the_paper_s_numbers_are_those_of_the_recipes(write, tmp_path):
    """Every cell finds its own column, and no cell but those of the paper has one."""
    assert set(PAPER_TWO_SD) == set(PAPER_TABLE3)
    spreads = {
        data: [[two_sd[k] for at, two_sd in PAPER_TWO_SD.items() if at[0] == data] for k in (0, 1)]
        for data, _ in PAPER_TABLE3
    }
    assert {
        data: [round(sum(column), 2) for column in columns] for data, columns in spreads.items()
    } == {
        **{
            "cifar10": [1.36, 1.06],
            "cifar100": [2.65, 2.82],
            "svhn": [1.72, 1.39],
        }  # added up on the paper's page
    }
    for (data, n), (sghmc, resghmc) in PAPER_TABLE3.items():
        for seed, apart in ((0, -0.1), (1, 0.1)):
            write(f"gan/{data}-{n}-sghmc", seed, sghmc + apart)
            write(f"gan/{data}-{n}", seed, resghmc + apart)
    rows = tabulate(tmp_path, table3_recipes()).rows
    assert len(rows) == 24
    assert max(abs(row["z"]) for row in rows) < 1e-9
    write("gan/svhn-2500")
    assert (
        the(tabulate(tmp_path, figure3_recipes()).rows, data="svhn", n_labelled=2500)["paper"]
        is None
    )


# What swaps and unlabelled images contribute


def test_contributions_are_paired_by_seed(write, rebuild):
    for seed, (accuracy, pooled) in {
        0: (80.0, 82.0),
        1: (81.0, 83.1),
        2: (82.0, 84.2),
        7: (50.0, 51.0),
    }.items():
        write(C10, seed, accuracy, pooled)
    for seed, (accuracy, pooled) in {
        0: (79.0, 81.9),
        1: (79.5, 82.9),
        2: (80.0, 83.9),
        8: (60.0, 61.0),
    }.items():
        write(f"{C10}-noswaps", seed, accuracy, pooled)
    for seed, accuracy in {0: 78.0, 1: 78.4}.items():
        write(f"{C10}-sghmc", seed, accuracy)
        write(f"{C10}-supervised", seed, 70.0)
    out, numbers, markdown = rebuild("table3")
    swaps = the(numbers["contributions"], contribution="swaps, rung 0", metric="accuracy")
    assert (swaps["of"], swaps["minus"], swaps["paper"]) == ("reSGHMC", "no swaps", None)
    assert swaps["differences"] == pytest.approx({"0": 1.0, "1": 1.5, "2": 2.0})  # neither 7 nor 8
    assert (swaps["n"], swaps["mean"], swaps["se"]) == (
        3,
        pytest.approx(1.5),
        pytest.approx(0.5 / math.sqrt(3)),
    )
    both = the(numbers["contributions"], contribution="swaps, both rungs", metric="pooled_accuracy")
    assert (both["mean"], both["se"]) == (pytest.approx(0.2), pytest.approx(0.1 / math.sqrt(3)))
    unlabelled = the(numbers["contributions"], contribution="unlabelled images", metric="accuracy")
    assert (unlabelled["of"], unlabelled["minus"], unlabelled["mean"]) == (
        "SGHMC",
        "supervised only",
        pytest.approx(8.2),
    )
    claimed = the(
        numbers["contributions"], contribution="swaps and a second rung", metric="accuracy"
    )
    assert claimed["paper"] == pytest.approx(RESGHMC - SGHMC)
    words = (
        "cifar10 4000: swaps, rung 0 +1.50 ± 0.29 (n=3, p = 0.035); swaps, both rungs +0.20 ± 0.06 (n=3, p = 0.074); "
        "unlabelled images +8.20 ± 0.20 (n=2); swaps and a second rung +2.30 ± 0.30 (n=2), the paper +2.55"
    )
    for text in (out, markdown):
        assert words in " ".join(text.split())


def test_one_seed_has_no_error_and_no_common_seed_no_number(write, rebuild):
    write(C10, 0, 80.0)
    write(f"{C10}-noswaps", 3, 79.0)
    write("gan/svhn-4000-sghmc", 0, 92.0)
    write("gan/svhn-4000-supervised", 0, 90.0)
    write("gan/cifar100-4000", 0, 60.0)  # nothing to compare it with
    markdown = rebuild("table3")[2]
    assert (
        "- cifar10 4000: swaps, rung 0 - (no seed was run with both); swaps, both rungs - (no seed"
        in markdown
    )
    assert "- svhn 4000: unlabelled images +2.00 (n=1)\n" in markdown
    assert "- cifar100 4000:" not in markdown


def test_nothing_to_compare_says_nothing_of_it(write, rebuild):
    write(C10)
    for text in rebuild("table3")[::2]:
        assert "What the swaps contribute" not in text


# Runs as they are


def test_other_steps_and_settings_are_seen_and_not_mixed(write, rebuild):
    write(C10, 0, 80.0)
    write(C10, 4, 80.4)
    write(C10, 1, 70.0, steps=6_000)
    write(C10, 2, 71.0, steps=6_000, checkpoint_every=500)  # which changes nothing
    write(C10, 3, 60.0, hot_temperature=2.0, lr_time=2000.0)
    write(f"{C10}-noswaps", 3, 75.0)
    out, numbers, markdown = rebuild("table3")
    rows = [row for row in numbers["rows"] if row["method"] == "reSGHMC"]
    assert [(row["steps"], row["seeds"], row["settings"]) for row in rows] == [
        (15_000, [0, 4], {}),
        (15_000, [3], {"lr_time": 2000.0, "hot_temperature": 2.0}),
        (6_000, [1, 2], {}),
    ]
    assert [row["z"] is None for row in rows] == [False, True, True]
    assert {row["paper"]["mean"] for row in rows} == {RESGHMC}  # it stands beside all of them
    assert {effect["n"] for effect in numbers["contributions"]} == {
        0
    }  # seed 3 is not paired with other settings
    for text in (out, markdown):
        flat = " ".join(text.split())
        assert "6,000 steps in place of the paper's 15,000" in flat
        assert (
            "§ cifar10 4000: not the recipe's settings (lr_time=2000.0, hot_temperature=2.0)"
            in flat
        )
    assert "cifar10 4000§" in out
    assert "cifar10 4000 at 6,000 steps" in out
    assert "| 6,000 of 15,000 steps |" in markdown
    assert "| lr_time=2000.0, hot_temperature=2.0 |" in markdown


def test_what_was_not_run_or_not_finished_is_told(write, rebuild, tmp_path):
    write(C10)
    write(C10, 1, status="paused")
    (tmp_path / f"{C10}-sghmc/seed=0").mkdir(parents=True)
    out, numbers, markdown = rebuild("table3")
    assert sorted(numbers["unfinished"]) == [
        f"{C10} seed 1 (paused)",
        f"{C10}-sghmc seed 0 (no result)",
    ]
    assert "seed 1 (paused)" in " ".join(out.split())
    (line,) = [line for line in markdown.splitlines() if line.startswith("not run: ")]
    names = line.removeprefix("not run: ").split(", ")
    assert {
        "cifar10 4000: SGHMC",
        "cifar10 4000: no swaps",
        "cifar10 4000: supervised only",
        "svhn 2000",
    } <= set(names)
    assert len(names) == 3 + 11 + 12
    assert "cifar10 4000 tuned" in names


@pytest.mark.parametrize("columns", [56, 80, 100, 140])
def test_the_table_fits_the_terminal(write, rebuild, columns):
    for seed, method in (
        (seed, method) for seed in (0, 1, 2) for method in ("", "-sghmc", "-noswaps", "-supervised")
    ):
        write(f"gan/cifar100-4000{method}", seed, 60.0 + seed, swaps=30)
    out, _, markdown = rebuild("table3", columns=columns)
    assert "…" not in out
    assert all(len(line) <= columns for line in out.splitlines() if "table3" not in line)
    assert "supervised only" in out
    assert "61.00±2.00" in out
    head = out.split("What")[0]
    assert ("ECE" in head, "their" in head) == (columns >= 100, columns >= 80)
    assert ("their score: as the authors' code scores" in " ".join(out.split())) == (columns >= 80)
    assert "their score:" in markdown


@pytest.mark.parametrize("what", ["table3", "figure3"])
def test_damaged_runs_are_one_line(write, cli, tmp_path, what):
    folder = write(C10, metrics={"accuracy": None})
    (config, result) = (folder / name for name in ("config.json", "result.json"))

    def fails():
        code, printed, err = cli("reproduce", what, "--rebuild", "--out", tmp_path)
        assert (code, printed, len(err.strip().splitlines()), str(folder) in err) == (
            2,
            "",
            1,
            True,
        ), err
        assert not list(tmp_path.glob("*.md"))
        return err

    assert "'accuracy'" in fails()
    result.write_text('{"status": "finished"}')
    assert "has no 'metrics'" in fails()
    result.write_text("{")
    assert "cannot read" in fails()
    result.write_text(
        json.dumps(
            {
                "status": "finished",
                "metrics": {},
                "swaps": [],
                "curves": {},
                "versions": {},
                "device": "",
                "date": "",
                "wall_seconds": 1,
            }
        )
    )
    config.unlink()
    assert "how many steps" in fails()


def test_a_curve_that_is_missing_is_named(write, cli, tmp_path):
    folder = write(C10, curves={"draw_step": [1, 2], "probabilities_accuracy": [0.5]})
    code, _, err = cli("reproduce", "table3", "--rebuild", "--out", tmp_path)
    assert (code, "has no curve 'probabilities_accuracy'" in err, str(folder) in err) == (
        2,
        True,
        True,
    )


# The command


@pytest.mark.parametrize("what", ["table3", "figure3"])
def test_nothing_to_rebuild_from(cli, write, tmp_path, what):
    code, printed, err = cli("reproduce", what, "--rebuild", "--out", tmp_path)
    assert (code, printed, len(err.strip().splitlines())) == (2, "", 1)
    assert f"no finished run of {what} below" in err
    write(C10, status="paused")
    assert "(but 1 unfinished)" in cli("reproduce", what, "--rebuild", "--out", tmp_path)[2]


def test_help_names_them(cli):
    code, out, _ = cli("reproduce", "--help", columns=140)
    assert (code, "table3" in out, "figure3" in out) == (0, True, True)


def test_every_method_has_its_own_run():
    """SGHMC too: the rungs of the pair without swaps share their generators."""
    assert set(METHODS) == set(GAN_METHODS)
    assert list(trained_ones(table3_recipes())) == list(table3_recipes())
    assert len(trained_ones(figure3_recipes())) == 2 * 3 * 7 * 4
    assert {config.steps for config in figure3_recipes().values()} == {PAPER_STEPS}


def test_what_is_missing_is_run_once(cli, write, tmp_path, monkeypatch):
    listed = []

    def run_group(each, out, **_):
        for config, seed in each.jobs:
            listed.append((config.recipe, seed, config.steps))
            write(config.recipe, seed, steps=config.steps)
        return [RunFolder.of(out, config.recipe, seed) for config, seed in each.jobs]

    monkeypatch.setattr(reproducing, "run_group", run_group)
    write(f"{C10}-sghmc", 1, steps=6_000)
    arguments = [
        "reproduce",
        "table3",
        "--only",
        "cifar10/4000",
        "--set",
        "steps=6000",
        "--seeds",
        2,
        "--out",
        tmp_path,
    ]
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert "to run: 15 runs in 2 groups" in out  # both families of a seed on the same batches
    cells = [
        f"{family}/cifar10-4000{method}"
        for family in GAN_FAMILIES
        for method in ("", "-sghmc", "-noswaps", "-supervised")
    ]
    wanted = {(name, seed, 6_000) for name in cells for seed in (0, 1)}
    assert set(listed) == wanted - {(f"{C10}-sghmc", 1, 6_000)}
    assert len(listed) == 15
    assert "nothing was run again" in cli(*arguments)[1]
    numbers = json.loads((tmp_path / "table3-cifar10-4000.json").read_text())
    assert [row["n"] for row in numbers["rows"]] == [2] * 8
    code, _, err = cli(*arguments[:4], "--out", tmp_path)  # 15,000 steps
    assert (code, "other settings" in err) == (2, True)
    assert (
        "must be at least 0 and less than steps=100"
        in cli("reproduce", "table3", "--set", "steps=100", "--out", tmp_path)[2]
    )


def test_only_makes_a_part_beside_the_whole(write, rebuild, tmp_path):
    for recipe in (C10, "gan/cifar100-4000", "gan/cifar10-2000", f"{C10}-supervised"):
        write(recipe)
    _, numbers, markdown = rebuild("table3", "--only", "cifar10/4000", name="table3-cifar10-4000")
    assert [(row["data"], row["n_labelled"], row["method"]) for row in numbers["rows"]] == [
        ("cifar10", 4000, "reSGHMC"),
        ("cifar10", 4000, "supervised only"),
    ]
    assert "cifar100" not in markdown
    assert not (tmp_path / "table3.md").exists()


def test_families_are_rows_of_their_own(write, rebuild):
    """The tuned one is beside the paper's numbers, but not tested against them."""
    for seed in (0, 1):
        write(C10, seed, 50.0 + seed)
        write("gan-tuned/cifar10-4000", seed, 60.0 + seed)
        write("gan-tuned/cifar10-4000-noswaps", seed, 57.0 + seed, 58.0)
    out, numbers, markdown = rebuild("table3")
    paper, tuned, _ = (
        the(numbers["rows"], recipe=name)
        for name in (C10, "gan-tuned/cifar10-4000", "gan-tuned/cifar10-4000-noswaps")
    )
    assert (paper["ours"]["mean"], tuned["ours"]["mean"]) == pytest.approx((50.5, 60.5))
    assert paper["z"] is not None
    assert tuned["z"] is None
    assert tuned["paper"] == paper["paper"]
    (swaps,) = [
        each
        for each in numbers["contributions"]
        if (each["contribution"], each["metric"]) == ("swaps, rung 0", "accuracy")
    ]
    assert (swaps["family"], swaps["mean"]) == ("gan-tuned", pytest.approx(3.0))
    assert "cifar10 4000 tuned" in " ".join(out.split())
    assert "steady learning rate" in markdown


def test_columns_that_no_run_has_are_left_out(write, rebuild):
    folder = write(C10)
    result = json.loads((folder / "result.json").read_text())
    for name in ("variety", "training_mode_accuracy"):  # as in results of before they were counted
        del result["metrics"][name]
    (folder / "result.json").write_text(json.dumps(result))
    _, numbers, markdown = rebuild("table3")
    assert numbers["rows"][0]["variety"] is numbers["rows"][0]["training_mode_accuracy"] is None
    assert not {"variety", "training mode %", "not as the recipe"} & set(
        cells_of(markdown, "reSGHMC")
    )
    assert "variety:" not in markdown
    write("gan/cifar10-4000-sghmc")
    assert cells_of(rebuild("table3")[2], "reSGHMC")["variety"] == "-"


def test_only_takes_a_family_by_its_name(write, rebuild):
    for recipe in (C10, "gan-tuned/cifar10-4000", "gan/svhn-4000"):
        write(recipe)
    for only, found in (
        ("gan/", [C10, "gan/svhn-4000"]),
        ("gan/cifar10", [C10]),
        ("gan-tuned/", ["gan-tuned/cifar10-4000"]),
    ):
        _, numbers, _ = rebuild("table3", "--only", only, name=f"table3-{only.replace('/', '-')}")
        assert [row["recipe"] for row in numbers["rows"]] == found
    _, numbers, _ = rebuild("table3", "--only", "cifar10/4000", name="table3-cifar10-4000")
    assert len(numbers["rows"]) == 2


# Figure 3


def test_figure_3_by_hand(write, rebuild):
    for seed, more in ((0, 0.0), (1, 0.2)):
        write("gan/svhn-2500", seed, 91.0 + more, 92.0 + more, swaps=2 + seed)
        write("gan/svhn-4000", seed, 93.0 + more)
        write("gan/svhn-4000-sghmc", seed, 92.0 + more)
        write("gan/svhn-4000-supervised", seed, 88.0 + more)
    write("gan/svhn-4000-noswaps", 0, 50.0, steps=9_000)
    out, numbers, markdown = rebuild("figure3")
    (svhn,) = numbers["data"].values()
    points = {(point["method"], point["n_labelled"]): point for point in svhn["points"]}
    assert list(points) == [
        ("SGHMC", 4000),
        ("reSGHMC", 2500),
        ("reSGHMC", 4000),
        ("supervised only", 4000),
    ]
    first = points["reSGHMC", 2500]
    assert (first["ours"]["mean"], first["ours"]["two_sd"]) == (
        pytest.approx(91.1),
        pytest.approx(0.2 * math.sqrt(2)),
    )
    assert (first["paper"], first["n"], first["swaps"]) == (None, 2, [2, 3])
    assert first["both_rungs"]["mean"] == pytest.approx(92.1)
    assert points["SGHMC", 4000]["both_rungs"] is None
    assert points["SGHMC", 4000]["paper"] == {"mean": 91.92, "two_sd": 0.41}
    assert {title: list(by_n) for title, by_n in svhn["paper"].items()} == {
        "SGHMC": ["2000", "3000", "4000", "5000"],
        "reSGHMC": ["2000", "3000", "4000", "5000"],
    }
    assert svhn["paper"]["reSGHMC"]["5000"] == {"mean": 94.33, "two_sd": 0.34}
    assert numbers["left_out"] == ["gan/svhn-4000-noswaps seed 0 (9000 steps)"]
    for text in (out, markdown):
        flat = " ".join(text.split())
        assert "91.10±0.28" in flat
        assert (
            "not run: cifar10; cifar100; svhn 2000 2500 3000 3500 4500 5000 (SGHMC, supervised only); svhn 2000 3000"
            in flat
        )
        assert "left out, with other settings: gan/svhn-4000-noswaps" in flat
    assert "| svhn | 2500 | reSGHMC | - | 91.10±0.28 | 92.10±0.28 | 2 | 2, 3 |" in markdown


def test_figure_3_fits_the_terminal(write, rebuild):
    for seed in (0, 1):
        write("gan/svhn-4000", seed, 93.0 + seed, 94.0 + seed, swaps=1_000)
    wide, narrow = (rebuild("figure3", columns=columns)[0].splitlines() for columns in (80, 40))
    assert "both rungs" in wide[0]
    assert "swaps" not in narrow[0]
    assert any("93.50±1.41" in line for line in narrow)  # numbers are not cut
    only = rebuild("figure3", "--only", "svhn-4000", name="figure3-svhn-4000")[0]
    assert "not run: svhn 4000 (SGHMC, no swaps, supervised only)" in " ".join(only.split())


def test_figure_3_tells_steps_and_settings(write, rebuild):
    for n in N_LABELLED[:2]:
        write(f"gan/cifar10-{n}", steps=9_000, momentum=0.9)
    out, numbers, _ = rebuild("figure3", "--only", "cifar10", name="figure3-cifar10", columns=140)
    assert (numbers["data"]["cifar10"]["steps"], numbers["data"]["cifar10"]["settings"]) == (
        9_000,
        {"momentum": 0.9},
    )
    assert "cifar10: 9,000 steps in place of the paper's 15,000" in out
    assert "§ cifar10: not the recipes' settings (momentum=0.9)" in out
    assert "cifar10§" in out
    assert "cifar100" not in out


def test_figure_3_takes_what_is_chosen(write, tmp_path):
    write(C10)
    write("gan/svhn-4000")
    chosen = {name: config for name, config in figure3_recipes().items() if config.data == "svhn"}
    assert list(figure_numbers(tmp_path, chosen)["data"]) == ["svhn"]
