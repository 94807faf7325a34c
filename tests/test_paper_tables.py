"""Tables 1 to 3, figures 2 and 3 from written run folders, with numbers known by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from command import refused, run_command
from torchrex.cli import console, outputs
from torchrex.cli.outputs import _without_same_runs as trained_ones
from torchrex.experiments import recipes
from torchrex.experiments.gan import PAPER_TABLE3, TABLE3, figure3_recipes, table3_recipes
from torchrex.experiments.images import (
    PAPER_TABLE1,
    PAPER_TABLE2,
    TABLE1,
    TABLE2,
    figure2_recipes,
    image_config,
    table1_recipes,
    table2_recipes,
)
from torchrex.names import matches
from torchrex.report import figure2, figure3
from torchrex.report.figure2 import plot_energies, plot_factors, ticks
from torchrex.report.plots import look, p_of_pairs
from torchrex.report.tables import build, draw_cell, z_score
from torchrex.runs.config import dumps
from written_runs import write_run_on_gpu

HEADLINE = "logits_best_accuracy"
R20, C10 = "icml2020/cifar10-resnet20", "gan/cifar10-4000"
PAPER = PAPER_TABLE1["cifar10", "resnet20"]
RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def call(*words, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(console.stdout, "_width", columns)  # it keeps the first width
        return run_command(monkeypatch, capsys, *words)

    return call


@pytest.fixture
def rebuild(cli, tmp_path):
    """Rebuilds from tmp_path: what is printed, in one line, and what JSON and markdown say."""

    def call(what, *words, name=None, columns=100):
        arguments = ("reproduce", what, "--rebuild", "--out", tmp_path, *words)
        code, out, err = cli(*arguments, columns=columns)
        assert code == 0, err
        file = str(tmp_path / (name or what))
        assert Path(f"{file}.png").read_bytes().startswith(b"\x89PNG")
        assert "</text>" in Path(f"{file}.svg").read_text()
        numbers = json.loads(Path(f"{file}.json").read_text())
        return " ".join(out.split()), numbers, Path(f"{file}.md").read_text()

    return call


@pytest.fixture
def write(tmp_path):
    """Writes a finished run; `headline` and `pooled` are in %, the others known from them."""

    def one(
        recipe,
        seed=0,
        headline=90.0,
        pooled=91.0,
        *,
        swaps=0,
        status="finished",
        metrics=None,
        **settings,
    ):
        image = not recipe.startswith("gan")
        config = replace(recipes()[recipe], **({"epochs": 6} if image else {}) | settings)
        below = {"accuracy": 0.5 if image else 0.0, "best_accuracy": 0.3, "single_accuracy": 2.0}
        below |= {HEADLINE: 0.0, "logits_accuracy": 0.1} if image else {"paper_accuracy": -2.0}
        numbers, curves = {"n_draws": 2}, {}
        for prefix, best in (("", headline), ("pooled_", pooled))[: config.n_rungs]:
            numbers |= {f"{prefix}{name}": (best - less) / 100 for name, less in below.items()}
            numbers |= {f"{prefix}nll": 0.25, f"{prefix}ece": 0.031, f"{prefix}brier": 0.125}
            curves[f"{prefix}probabilities_accuracy"] = [(best - 1.5) / 100, (best - 0.5) / 100]
            if image:
                curves[f"{prefix}logits_accuracy"] = [(best - 1.4) / 100, (best - 0.4) / 100]
        if image:
            n = config.epochs
            variance = [2.0] * n if config.variance == "paired" else [float(k) for k in range(n)]
            pair = [variance] if config.n_rungs > 1 else []
            energies = [[100.0 - k for k in range(n)]] * config.n_rungs
            curves |= {"epoch": list(range(n)), "draw_epoch": [n - 1, n], "energy": energies}
            curves |= {"noise_variance": pair, "correction": pair, "swap_epochs": [1.5] * swaps}
        else:
            curves |= {"step": [0], "draw_step": [9_000, 15_000]}
            numbers |= {"called_fake": 0.125, "variety": 0.375}
        given = {"status": status, "metrics": numbers | (metrics or {}), "curves": curves}
        versions = {"torchrex": "0.1.0", "torch": "2.0"}
        return write_run_on_gpu(tmp_path, config, seed, swaps=swaps, versions=versions, **given)

    return one


def the(rows, **wanted):
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


def cells_of(markdown, *words):
    """The cells of the one row that has these words, by the heads of the table."""
    lines = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in markdown.splitlines()
        if line.startswith("| ")
    ]
    (row,) = [line for line in lines[1:] if set(words) <= set(line)]
    return dict(zip(lines[0], row, strict=True))


# The numbers of a row


def test_z_score_by_hand():
    """The paper's sd is half its ±, over five seeds; ours is that of our seeds."""
    expected = 1.0 / math.sqrt(4.0 / 3 + 1.0 / 5)
    assert z_score([94.0, 96.0, 98.0], {"mean": 95.0, "two_sd": 2.0}) == pytest.approx(expected)


def test_p_of_pairs_by_hand():
    """t = 3 with 2 degrees of freedom: p = 1 - 3 / sqrt(11); equal differences: no test."""
    assert p_of_pairs(3.0, 1.0, 3) == pytest.approx(1.0 - 3.0 / math.sqrt(11.0))
    assert p_of_pairs(-3.0, 1.0, 3) == p_of_pairs(3.0, 1.0, 3)
    assert p_of_pairs(0.1, 1e-15, 3) is None  # rounding
    assert p_of_pairs(0.0, 0.0, 3) == 1.0


@pytest.mark.parametrize(
    ("what", "recipe", "paper", "extra"),
    [
        ("table1", R20, PAPER[2], {"epochs": 500}),
        ("table3", C10, PAPER_TABLE3["cifar10", 4000]["resghmc"], {}),
    ],
)
def test_a_row_has_mean_and_two_sd_over_seeds(write, rebuild, what, recipe, paper, extra):
    for seed, accuracy in enumerate((94.0, 94.3, 94.6)):
        write(recipe, seed, accuracy, accuracy + 1, swaps=seed + 2, **extra)
    out, numbers, markdown = rebuild(what)
    row = the(numbers["rows"], method="reSGHMC")
    assert (row["n"], row["seeds"], row["recipes"]) == (3, [0, 1, 2], [recipe])
    assert row["ours"]["mean"] == pytest.approx(94.3)
    assert row["ours"]["two_sd"] == pytest.approx(0.6)  # sd 0.3 with n - 1
    assert row["ours"]["values"] == pytest.approx({"0": 94.0, "1": 94.3, "2": 94.6})
    mean, two_sd = paper
    assert row["paper"] == {"mean": mean, "two_sd": two_sd}
    assert row["z"] == pytest.approx((94.3 - mean) / math.sqrt(0.3**2 / 3 + (two_sd / 2) ** 2 / 5))
    assert row["swaps"] == [2, 3, 4]
    assert (row["wall_minutes"], row["devices"]) == ([1.5] * 3, ["a GPU"])
    assert row["versions"] == [{"torchrex": "0.1.0", "torch": "2.0"}]
    means = {name: row[name]["mean"] for name in ("single_accuracy", "nll", "ece", "brier")}
    assert means == pytest.approx(
        {"single_accuracy": 92.3, "nll": 0.25, "ece": 3.1, "brier": 0.125}
    )
    shown = cells_of(markdown, "reSGHMC")
    assert (shown["paper %"], shown["ours %"]) == (f"{mean:.2f}±{two_sd:.2f}", "94.30±0.60")
    assert (shown["n"], shown["off by (s.e.)"]) == ("3", f"{row['z']:+.1f}")
    assert (shown["swaps"], shown["NLL"], shown["ECE %"]) == ("2, 3, 4", "0.2500", "3.10±0.00")
    assert "94.30±0.60" in out


def test_both_rungs_are_a_row_or_a_column(write, rebuild):
    write(R20, 0, 90.0, 95.3)
    write(C10, 0, 80.0, 81.5)
    write(f"{C10}-sghmc")
    both = the(rebuild("table1")[1]["rows"], method="reSGHMC, both rungs")
    assert both["ours"]["mean"] == pytest.approx(95.3)
    assert both["single_accuracy"]["mean"] == pytest.approx(93.3)
    assert (both["paper"], both["z"]) == (None, None)
    _, numbers, markdown = rebuild("table3")
    assert the(numbers["rows"], method="reSGHMC")["pooled_accuracy"]["mean"] == pytest.approx(81.5)
    alone = the(numbers["rows"], method="SGHMC")
    assert (alone["pooled_accuracy"], alone["swaps"], alone["ours"]["two_sd"]) == (None, None, None)
    assert cells_of(markdown, "SGHMC")["accuracy, all rungs %"] == "-"


def test_the_families_report_what_they_say(write, rebuild):
    write(R20, headline=90.0)
    write("clean/cifar10-resnet20", headline=90.0)
    rows = rebuild("table1")[1]["rows"]
    assert the(rows, method="reSGHMC", family="icml2020")["ours"]["mean"] == pytest.approx(90.0)
    last = the(rows, method="reSGHMC", family="clean")  # of probabilities
    assert last["ours"]["mean"] == pytest.approx(89.5)


def test_one_seed_has_no_error_and_no_test(write, rebuild):
    write(f"{R20}-msgd", headline=94.0, epochs=500)
    out, numbers, markdown = rebuild("table1")
    row = the(numbers["rows"], method="M-SGD")
    assert (row["ours"]["two_sd"], row["z"], row["swaps"]) == (None, None, None)
    assert "94.00" in out
    assert "94.00±" not in out + markdown


def test_a_missing_metric_is_a_dash(write, rebuild):
    """Results of before it was counted load; a column that no run has is not shown."""
    folder = write(C10, metrics={"variety": None})
    _, numbers, markdown = rebuild("table3")
    assert numbers["rows"][0]["variety"] is None
    assert not [head for head in cells_of(markdown, "reSGHMC") if "variety" in head]
    write(f"{C10}-sghmc")
    variety = "variety of a generator (real images: 1)"
    assert cells_of(rebuild("table3")[2], "reSGHMC")[variety] == "-"
    write(R20, metrics={HEADLINE: None})
    _, numbers, markdown = rebuild("table1")
    assert the(numbers["rows"], method="reSGHMC")["ours"] is None
    assert cells_of(markdown, "reSGHMC")["ours %"] == "-"
    (folder / "result.json").write_text('{"status": "finished"}')
    assert cells_of(rebuild("table3")[2], "reSGHMC")["ours %"] == "-"
    assert rebuild("figure3")[1]["data"]["cifar10"]["points"][-1]["ours"] is None


def test_table_2_has_its_own_recipes_and_numbers(write, rebuild):
    write("icml2020/cifar100-resnet20-batch1024", headline=75.0)
    write(R20)  # of table 1
    _, numbers, markdown = rebuild("table2")
    assert {row["data"] for row in numbers["rows"]} == {"cifar100"}
    paper = the(numbers["rows"], method="reSGHMC")["paper"]
    assert paper["mean"] == PAPER_TABLE2["cifar100", "resnet20"][2][0]
    assert "batch size 1024" in markdown


def test_the_paper_s_numbers_are_those_of_the_recipes(write, tmp_path):
    """Every method of every cell finds its own number, and no other cell has one."""
    for (data, net), columns in PAPER_TABLE1.items():
        for method, (mean, _) in zip(("msgd", "sghmc", "resghmc"), columns, strict=True):
            for seed, apart in ((0, -0.1), (1, 0.1)):
                name = image_config("icml2020", data, net, method).recipe
                write(name, seed, mean + apart, epochs=500)
    for (data, n), by_method in PAPER_TABLE3.items():
        for method, (mean, _) in by_method.items():
            for seed, apart in ((0, -0.1), (1, 0.1)):
                end = "" if method == "resghmc" else f"-{method}"
                write(f"gan/{data}-{n}{end}", seed, mean + apart)
    for table, n_rows in ((TABLE1, 30), (TABLE3, 24)):
        rows = [row for row in build(table, tmp_path, table.recipes()).rows if row["paper"]]
        assert len(rows) == n_rows
        assert max(abs(row["z"]) for row in rows) < 1e-9
    assert recipes()["gan/svhn-2500"].paper_numbers == {}
    assert recipes()[f"{R20}-F1e5"].paper_numbers == {}
    spreads = {data: [0.0, 0.0] for data, _ in PAPER_TABLE3}
    for (data, _), by_method in PAPER_TABLE3.items():
        for k, method in enumerate(("sghmc", "resghmc")):
            spreads[data][k] = round(spreads[data][k] + by_method[method][1], 2)
    expected = {"cifar10": [1.36, 1.06], "cifar100": [2.65, 2.82], "svhn": [1.72, 1.39]}
    assert spreads == expected  # added up on the paper's page


def test_committed_results_give_the_committed_numbers():
    """All runs of the repository load, whatever their version."""
    images, gan = RESULTS / "images", RESULTS / "gan"
    made = {
        images / f"{what}.json": build(table, images, table.recipes()).as_numbers()
        for what, table in (("table1", TABLE1), ("table2", TABLE2))
    }
    made[gan / "table3.json"] = build(TABLE3, gan, table3_recipes()).as_numbers()
    made[images / "figure2.json"] = figure2.numbers(images, figure2_recipes())
    made[gan / "figure3.json"] = figure3.numbers(gan, figure3_recipes())
    for path, numbers in made.items():
        assert json.loads(path.read_text()) == json.loads(dumps(numbers)), path


# Runs that are another one's


def test_sghmc_is_rung_0_of_the_pair_where_it_was_not_run(write, rebuild):
    write(f"{R20}-sghmc", 0, 94.0, epochs=500)
    write(f"{R20}-independent", 0, 80.0, 95.0, epochs=500)  # the own run replaces its rung 0
    write(f"{R20}-independent", 1, 94.4, 95.2, epochs=500)
    out, numbers, markdown = rebuild("table1")
    row = the(numbers["rows"], method="SGHMC")
    assert row["ours"]["values"] == pytest.approx({"0": 94.0, "1": 94.4})
    assert (row["borrowed_seeds"], row["recipes"]) == ([1], [f"{R20}-independent", f"{R20}-sghmc"])
    variance = 0.08 / 2 + (PAPER[1][1] / 2) ** 2 / 5
    assert row["z"] == pytest.approx((94.2 - PAPER[1][0]) / math.sqrt(variance))
    pair = the(numbers["rows"], method="no swaps, both rungs")
    assert pair["ours"]["values"] == pytest.approx({"0": 95.0, "1": 95.2})
    assert (pair["swaps"], pair["borrowed_seeds"]) == ([0, 0], [])
    assert "SGHMC†" in out
    assert "SGHMC†" in markdown
    rows = rebuild("table1", "--only", "independent", name="table1-independent")[1]["rows"]
    assert [row["method"] for row in rows] == ["SGHMC", "no swaps, both rungs"]


def test_clean_msgd_is_that_of_icml2020(write, rebuild):
    write(f"{R20}-msgd", 0, 94.0)
    numbers = rebuild("table1")[1]  # which does not make a cell of the clean family
    assert {row["family"] for row in numbers["rows"]} == {"icml2020"}
    assert "clean cifar10 resnet20" in numbers["not_run"]
    assert "†" not in rebuild("table1")[2]
    write("clean/cifar10-resnet20", 3)
    write(f"{R20}-msgd", 1, 70.0, epochs=9)  # not with other settings
    numbers = rebuild("table1")[1]
    row = the(numbers["rows"], method="M-SGD", family="clean")
    assert row["ours"]["mean"] == pytest.approx(93.5)
    assert (row["recipes"], row["borrowed_seeds"]) == ([f"{R20}-msgd"], [0])
    assert the(numbers["rows"], method="M-SGD", family="icml2020", epochs=6)["borrowed_seeds"] == []


# Differences


def test_differences_are_paired_by_seed(write, rebuild):
    pairs = {0: (94.0, 95.0), 1: (95.0, 96.1), 2: (96.0, 97.2), 7: (50.0, 51.0)}
    others = {0: (93.0, 94.9), 1: (93.5, 95.9), 2: (94.0, 96.9), 8: (60.0, 61.0)}
    for recipe, without in ((R20, f"{R20}-independent"), (C10, f"{C10}-noswaps")):
        for seed, accuracies in pairs.items():
            write(recipe, seed, *accuracies)
        for seed, accuracies in others.items():
            write(without, seed, *accuracies)
    for seed, accuracy in {0: 78.0, 1: 78.4}.items():
        write(f"{C10}-sghmc", seed, accuracy)
        write(f"{C10}-supervised", seed, 70.0)
    out, numbers, markdown = rebuild("table1")
    both = the(numbers["swaps"], of="reSGHMC, both rungs", metric=HEADLINE)
    assert both["minus"] == "no swaps, both rungs"
    assert both["differences"] == pytest.approx({"0": 0.1, "1": 0.2, "2": 0.3})  # neither 7 nor 8
    expected = (3, pytest.approx(0.2), pytest.approx(0.1 / math.sqrt(3)))
    assert (both["n"], both["mean"], both["se"]) == expected
    words = (
        "both rungs minus no swaps +0.20 ± 0.06 (n=3, p = 0.074); "
        "rung 0 minus SGHMC +1.50 ± 0.29 (n=3, p = 0.035)"
    )
    assert words in out
    assert words in markdown
    out, numbers, markdown = rebuild("table3")
    unlabelled = the(numbers["contributions"], contribution="unlabelled images", metric="accuracy")
    assert (unlabelled["of"], unlabelled["minus"]) == ("SGHMC", "supervised only")
    assert unlabelled["mean"] == pytest.approx(8.2)
    swaps = the(
        numbers["contributions"], contribution="swaps, both rungs", metric="pooled_accuracy"
    )
    assert (swaps["mean"], swaps["paper"]) == (pytest.approx(0.2), None)
    words = "swaps, rung 0 +1.50 ± 0.29 (n=3, p = 0.035); swaps, both rungs +0.20 ± 0.06"
    assert words in out
    claim = "swaps and a second rung +16.30 ± 0.30 (n=2), the paper +2.55"
    assert claim in markdown


def test_few_seeds_claim_nothing(write, rebuild):
    write(C10, 0, 80.0)
    write(f"{C10}-noswaps", 3, 79.0)
    write("gan/svhn-4000-sghmc", 0, 92.0)
    write("gan/svhn-4000-supervised", 0, 90.0)
    write("gan/cifar100-4000", 0, 60.0)  # nothing to compare it with
    markdown = rebuild("table3")[2]
    assert "gan cifar10 4000: swaps, rung 0 - (no seed was run with both)" in markdown
    assert "gan svhn 4000: unlabelled images +2.00 (n=1)\n" in markdown
    assert "cifar100 4000:" not in markdown


def test_the_picture_has_bands_over_seeds_and_the_paper_s_lines(write, tmp_path):
    """The paper's lines are where the schedule is the paper's and the axis can hold them."""
    for seed, accuracy in enumerate((94.0, 94.6)):
        write(R20, seed, accuracy, accuracy + 0.5, epochs=500)
        write(f"{R20}-msgd", seed, accuracy - 0.5, epochs=500)
    write(f"{R20}-msgd", 2, 94.0)
    write("icml2020/cifar10-resnet32", 0, 50.0, 51.0, epochs=500)  # far below
    near, far, short = build(TABLE1, tmp_path, table1_recipes()).cells
    axis = Figure().add_subplot()
    handles = draw_cell(near, axis)
    titles = ["M-SGD", "lowest to highest seed", "reSGHMC", "reSGHMC, both rungs", "the paper"]
    assert list(handles) == titles
    assert len(axis.collections) == 3
    low, high = axis.collections[1].get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((94.0 - 1.4, 94.6 - 0.4))  # of the sums of logits
    drawn = {line.get_ydata()[-1]: line.get_color() for line in axis.lines}
    expected = (94.3 - 0.4, 93.8 - 0.4, PAPER[0][0], PAPER[2][0])
    assert all(min(abs(y - value) for y in drawn) < 1e-9 for value in expected)
    assert drawn[PAPER[2][0]] == look("reSGHMC").color != drawn[PAPER[0][0]]
    for cell, words in ((far, "reSGHMC 95.35"), (short, f"M-SGD {PAPER[0][0]:.2f}")):
        axis = Figure().add_subplot()
        assert "the paper" not in draw_cell(cell, axis)
        assert axis.get_xlabel() == f"epoch; the paper after 500:\n{words}"


# Runs as they are


@pytest.mark.parametrize(
    ("what", "recipe", "unit", "full", "short", "other"),
    [
        ("table1", R20, "epochs", 500, 150, {"hot_lr": 2.0, "subset": 1024}),
        ("table3", C10, "steps", 15_000, 6_000, {"hot_temperature": 2.0, "lr_time": 2000.0}),
    ],
)
def test_lengths_and_settings_are_seen_and_not_mixed(
    write, rebuild, what, recipe, unit, full, short, other
):
    write(recipe, 0, 94.6, **{unit: full})
    write(recipe, 4, 94.4, **{unit: full})
    write(recipe, 1, 92.0, **{unit: short})
    write(recipe, 2, 92.2, **{unit: short}, checkpoint_every=5)  # which changes nothing
    write(recipe, 3, 60.0, **{unit: full}, **other)
    write(f"{recipe}-{'independent' if what == 'table1' else 'noswaps'}", 3, **{unit: full})
    out, numbers, markdown = rebuild(what)
    rows = [row for row in numbers["rows"] if row["method"] == "reSGHMC"]
    assert [(row[unit], row["seeds"], row["settings"]) for row in rows] == [
        (full, [0, 4], {}),
        (full, [3], other),
        (short, [1, 2], {}),
    ]
    assert [row["z"] is None for row in rows] == [False, True, True]  # another experiment
    differences = numbers["swaps" if what == "table1" else "contributions"]
    assert {each["n"] for each in differences} == {0}  # seed 3 has other settings
    parts = markdown.split("\n## ")[1:]
    assert [part.partition("\n")[0] for part in parts] == [
        f"Full schedules ({full:,} {unit})",
        "Compressed schedules",
    ]
    assert [f"{short:,}/{full:,}" in part.split("\n\n- ")[0] for part in parts] == [False, True]
    for text in (out, " ".join(markdown.split())):
        assert f"{short:,} {unit} in place of the paper's {full:,}" in text
        assert all(f"{name}={value}" in text for name, value in other.items())
        assert "§" in text


def test_what_was_not_run_or_not_finished_is_named(write, rebuild, tmp_path):
    write(R20)
    write(R20, 1, status="paused")
    (tmp_path / f"{R20}-msgd/seed=0").mkdir(parents=True)  # no result yet
    (tmp_path / R20 / "seed=4.failed").mkdir()  # an attempt that left its folder to another
    out, numbers, _ = rebuild("table1")
    assert numbers["unfinished"] == [f"{R20}-msgd seed 0 (no result)", f"{R20} seed 1 (paused)"]
    assert "seed 1 (paused)" in out
    assert "icml2020 cifar10 resnet20, 6 epochs (M-SGD)" in numbers["not_run"]
    assert "icml2020 cifar10 resnet20, 6 epochs (reSGHMC)" not in numbers["not_run"]
    assert {"clean cifar10 resnet20", "icml2020 cifar100 wrn-28-10"} <= {*numbers["not_run"]}
    assert len([name for name in numbers["not_run"] if name.startswith("clean")]) == 10


@pytest.mark.parametrize("columns", [64, 80, 140])
def test_tables_fit_the_terminal(write, cli, tmp_path, columns):
    for seed in (0, 1, 2):
        write("icml2020/cifar100-wrn-28-10", seed, 60.0 + seed, swaps=30, epochs=150)
        write("gan/cifar100-4000", seed, 60.0 + seed, swaps=1_000)
    for what in ("table1", "table3", "figure3"):
        _, out, _ = cli("reproduce", what, "--rebuild", "--out", tmp_path, columns=columns)
        assert "…" not in out
        assert all(len(line) <= columns for line in out.splitlines() if "table" not in line)
        assert "61.00±2.00" in out
        head = out.split("61.00±2.00")[0]
        assert ("NLL" in head) == (columns == 140 and what != "figure3")


@pytest.mark.parametrize("what", ["table1", "figure2", "table3", "figure3"])
def test_what_cannot_be_read_is_one_line(write, cli, tmp_path, what):
    folder = write(R20 if what in ("table1", "figure2") else C10)
    for file, text, words in (
        ("result.json", "{", "Expecting property name"),
        ("config.json", "{}", "does not say how many"),
    ):
        before = (folder / file).read_text()
        (folder / file).write_text(text)
        answer = cli("reproduce", what, "--rebuild", "--out", tmp_path)
        refused(answer, "no finished run", "seed 0 (unreadable: ", words)
        assert not list(tmp_path.glob("*.md"))
        (folder / file).write_text(before)


# The command


@pytest.mark.parametrize("what", ["table1", "table2", "figure2", "table3", "figure3"])
def test_nothing_to_rebuild_from(cli, write, tmp_path, what):
    for out in (tmp_path, tmp_path / "absent"):
        answer = cli("reproduce", what, "--rebuild", "--out", out)
        refused(answer, f"no finished run of {what} below")
    assert not list(tmp_path.iterdir())
    recipe = {"table2": f"{R20}-batch1024", "table3": C10, "figure3": C10}.get(what, R20)
    write(recipe, status="paused")
    refused_line = cli("reproduce", what, "--rebuild", "--out", tmp_path)[2]
    assert "(but 1 unfinished, such as " in refused_line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["figure1"], "--rebuild is for theory, table1"),
        (["table1", "--set", "epochs=3"], "--set"),
        (["table1", "--seeds", "2"], "--seeds"),
        (["table1", "--overwrite"], "--overwrite"),
        (["table1", "--only", "resnet20/mnist"], "'resnet20/mnist'"),
    ],
)
def test_rebuild_refuses_what_it_would_ignore(cli, tmp_path, words, expected):
    refused(cli("reproduce", *words, "--rebuild", "--out", tmp_path), expected)
    assert not list(tmp_path.iterdir())


def test_only_matches_every_part():
    assert [
        name
        for name in table1_recipes()
        if matches("resnet20/cifar10", name) and name.startswith("clean")
    ] == [f"clean/cifar10-resnet20{method}" for method in ("-msgd", "-sghmc", "", "-independent")]
    assert not matches("cifar10", "icml2020/cifar100-resnet20")  # numbers are complete
    assert matches("100", "icml2020/cifar100-resnet20")
    assert not matches("00", "icml2020/cifar100-resnet20")
    assert matches("figure1/case1", "figure1/case1-resgld")
    assert matches("wrn-16-8", "clean/cifar10-wrn-16-8-msgd")
    assert matches("", "anything")
    assert not matches("c.far10", "icml2020/cifar10-resnet20")


def test_only_makes_a_part_next_to_the_complete_table(write, rebuild, tmp_path):
    for recipe in (C10, "gan-tuned/cifar10-4000", "gan/svhn-4000", "gan/cifar10-2000"):
        write(recipe)
    for only, found in (
        ("gan/", [C10, "gan/cifar10-2000", "gan/svhn-4000"]),
        ("gan-tuned/", ["gan-tuned/cifar10-4000"]),
        ("cifar10/4000", [C10, "gan-tuned/cifar10-4000"]),
    ):
        numbers = rebuild("table3", "--only", only, name=f"table3-{only.replace('/', '-')}")[1]
        assert sorted(name for row in numbers["rows"] for name in row["recipes"]) == sorted(found)
    assert not (tmp_path / "table3.md").exists()


def test_what_is_run():
    """SGHMC and M-SGD of the clean family are runs of others, unless they alone are asked for. GANs
    all have their own: rungs that share generators are not independent.
    """
    names = list(trained_ones(table1_recipes()))
    assert len(names) == 10 * 3 + 10 * 2
    assert not [name for name in names if "-sghmc" in name]
    assert not [name for name in names if name.endswith("-msgd") and "clean" in name]
    assert len(trained_ones(table2_recipes())) == 2 * 3 + 2 * 2
    for only, n in (("clean/msgd", 10), ("sghmc", 20)):
        chosen = {name: each for name, each in table1_recipes().items() if matches(only, name)}
        assert len(trained_ones(chosen)) == n
    assert list(trained_ones(table3_recipes())) == list(table3_recipes())
    assert len(trained_ones(figure3_recipes())) == 3 * 7 * (4 + 4 + 5 + 5)


@pytest.fixture
def trained(write, monkeypatch):
    """Nothing is trained: a run that is asked for writes its folder, and is listed here."""
    listed = []

    def run_all(self, adapted):
        for group in self.groups:
            for run in group.runs:
                config = run.config
                length = {f"{config.unit}s": getattr(config, f"{config.unit}s")}
                listed.append((config.recipe, run.seed, *length.values()))
                write(config.recipe, run.seed, **length, hot_lr=config.hot_lr)
            yield group, [run.folder for run in group.runs]

    monkeypatch.setattr(outputs.Session, "run_all", run_all)
    return listed


@pytest.mark.parametrize(
    ("what", "only", "length", "there", "n_runs"),
    [
        ("table1", "resnet20/cifar10", "epochs=150", f"{R20}-msgd", 9),
        ("table3", "gan/cifar10/4000", "steps=6000", f"{C10}-sghmc", 7),
    ],
)
def test_what_is_missing_is_run_once(
    cli, write, tmp_path, trained, what, only, length, there, n_runs
):
    name, value = length.split("=")
    write(there, 1, **{name: int(value)})
    words = ["reproduce", what, "--only", only, "--out", tmp_path]
    more = ["--set", length, "--seeds", 2]
    code, out, err = cli(*words, *more)
    assert code == 0, err
    assert f"to run: {n_runs} runs in " in out
    assert len(trained) == len(set(trained)) == n_runs
    assert (there, 1, int(value)) not in trained
    assert "nothing was run again" in cli(*words, *more)[1]
    assert len(trained) == n_runs
    refused(cli(*words), "other settings")  # of full length


# Figure 2


def test_figure_2_by_hand(write, rebuild):
    for factor, recipe in ((1e5, f"{R20}-F1e5"), (3e5, R20)):
        for seed, more in ((0, 0.0), (1, 0.2)):
            write(recipe, seed, 94.0 + factor / 1e6 + more, 95.0 + more, swaps=2 + 2 * seed)
    write("clean/cifar10-resnet20", 0)
    write(f"{R20}-independent", 0, 93.0, 94.5)
    write(f"{R20}-independent", 1, 50.0, 50.0, epochs=150)  # a level of the other row
    write(f"{R20}-F5e5", 0, 50.0, epochs=150)
    out, numbers, markdown = rebuild("figure2")
    longer, data = numbers["rows"]
    assert (longer["data"], longer["epochs"], longer["course"]) == ("cifar10", 150, {})
    found = [(one["f0"], one["accuracy"]["mean"]) for one in longer["factors"]]
    assert found == [(5e5, pytest.approx(50.0))]
    levels = {title: level["mean"] for title, level in longer["levels"].items()}
    assert levels == {"SGHMC": 50.0, "no swaps, both rungs": 50.0}
    assert [one["f0"] for one in data["factors"]] == [1e5, 3e5]
    first = data["factors"][0]
    assert first["accuracy"]["mean"] == pytest.approx(94.2)
    assert first["accuracy"]["two_sd"] == pytest.approx(0.2 * math.sqrt(2))
    assert first["both_rungs"]["mean"] == pytest.approx(95.1)
    assert (first["swaps"], first["n"]) == ([2, 4], 2)
    levels = {title: level["mean"] for title, level in data["levels"].items()}
    assert levels == pytest.approx({"SGHMC": 93.0, "no swaps, both rungs": 94.5})
    medians = {family: each["median_noise_variance"] for family, each in data["course"].items()}
    assert medians == {"icml2020": 3.0, "clean": 2.0}  # before the first estimate there is none
    assert data["course"]["icml2020"]["seed"] == 0
    for text in (out, " ".join(markdown.split())):
        assert (
            "cifar10, 6 epochs: median noise variance over epochs unpaired 3, paired 2: 1.5" in text
        )
        assert all(
            words in text for words in ("94.20±0.28", "6/500", "150/500", "not run: cifar100")
        )


def test_the_pictures_of_figure_2(write, rebuild):
    """Crowded swaps have no numbers; rows with other settings have marks."""
    write(R20, 0)
    write("clean/cifar10-resnet20", 0)
    write(R20, 1, hot_lr=2.0)
    write(R20, 2, hot_lr=3.0)
    write(f"{R20}-independent", 0, epochs=9)  # runs without swaps make no row
    out, numbers, _ = rebuild("figure2")
    assert [(row["mark"], row["epochs"]) for row in numbers["rows"]] == [
        ("", 6),
        ("§", 6),
        ("§§", 6),
    ]
    assert "cifar10§§, 6 epochs: not the recipes' settings (hot_lr=3.0)" in out
    row = numbers["rows"][0]
    row["course"]["icml2020"]["swap_epochs"] = [1.0, 1.01, 4.0, 4.01]
    row["course"]["clean"]["swap_epochs"] = [k / 100 for k in range(600)]
    plot_energies(row, axis := Figure().add_subplot())
    assert [text.get_text() for text in axis.texts] == ["2×", "2×"]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        *("icml2020, cold", "icml2020, hot", "icml2020, swaps: 0"),
        *("clean, cold with the prior", "clean, hot with the prior", "clean, swaps: 0"),
    ]
    plot_factors(row, axis := Figure().add_subplot())
    assert axis.get_xlabel() == "F0 (one was run; above it: swaps)"


def test_swaps_that_are_too_near_share_a_tick():
    expected = [(10.0, 1), (100.5, 1), (289.0, 2), (421.0, 1)]
    assert ticks([10.0, 100.5, 288.0, 290.0, 421.0], 500) == expected
    assert ticks([], 500) == []
    many = ticks([k / 10 for k in range(5000)], 500)  # a swap at nearly every step
    assert (len(many), sum(n for _, n in many)) == (50, 5000)


def test_figure_2_without_some_panels(write, rebuild):
    """Of one data set only an F0 away from the authors', of the other only the clean run."""
    write(f"{R20}-F1e6")
    write("clean/cifar100-resnet20")
    rows = rebuild("figure2")[1]["rows"]
    assert [(row["data"], bool(row["course"]), bool(row["factors"])) for row in rows] == [
        ("cifar10", False, True),
        ("cifar100", True, False),
    ]


# Figure 3


def test_figure_3_by_hand(write, rebuild):
    for seed, more in ((0, 0.0), (1, 0.2)):
        write("gan/svhn-2500", seed, 91.0 + more, 92.0 + more, swaps=2 + seed)
        write("gan/svhn-4000", seed, 93.0 + more)
        write("gan/svhn-4000-sghmc", seed, 92.0 + more)
        write("gan/svhn-4000-supervised", seed, 88.0 + more)
    write("gan/svhn-4000-noswaps", 0, 50.0, steps=9_000)
    for n in (2000, 2500):
        write(f"gan/cifar10-{n}", steps=9_000, momentum=0.9)
    out, numbers, markdown = rebuild("figure3")
    other = "cifar10, 9,000 steps, momentum=0.9"
    assert list(numbers["data"]) == ["svhn", other, "svhn, 9,000 steps"]  # full length first
    svhn, cifar10 = numbers["data"]["svhn"], numbers["data"][other]
    points = {(point["method"], point["n_labelled"]): point for point in svhn["points"]}
    methods = [("SGHMC", 4000), ("reSGHMC", 2500), ("reSGHMC", 4000), ("supervised only", 4000)]
    assert list(points) == methods
    first = points["reSGHMC", 2500]
    assert first["ours"]["mean"] == pytest.approx(91.1)
    assert first["ours"]["two_sd"] == pytest.approx(0.2 * math.sqrt(2))
    assert (first["paper"], first["n"], first["swaps"]) == (None, 2, [2, 3])
    assert first["both_rungs"]["mean"] == pytest.approx(92.1)
    assert points["SGHMC", 4000]["both_rungs"] is None
    assert points["SGHMC", 4000]["paper"] == {"mean": 91.92, "two_sd": 0.41}
    assert list(svhn["paper"]["SGHMC"]) == ["2000", "3000", "4000", "5000"]
    assert svhn["paper"]["reSGHMC"]["5000"] == {"mean": 94.33, "two_sd": 0.34}
    assert (cifar10["steps"], cifar10["settings"]) == (9_000, {"momentum": 0.9})
    assert other in out
    assert "gan svhn 4000 (no swaps)" in numbers["not_run"]
    row = cells_of(markdown, "svhn", "2500")
    assert (row["ours %"], row["both rungs %"], row["swaps"]) == (
        "91.10±0.28",
        "92.10±0.28",
        "2, 3",
    )
