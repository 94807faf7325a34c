"""Tables 1 and 2 and figure 2 from run folders that are written here, with numbers whose means and
errors are known by hand.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure

from command import run_command
from modules import same
from torchrex.cli import consoles, reproducing
from torchrex.cli.reproducing import trained_ones
from torchrex.experiments.image_recipes import (
    PAPER_TABLE1,
    PAPER_TABLE2,
    cell,
    image_recipes,
    table1_recipes,
    table2_recipes,
)
from torchrex.experiments.images import ImageConfig
from torchrex.experiments.recipes import matches
from torchrex.experiments.run_folder import RunFolder
from torchrex.report.figure2 import other_settings
from torchrex.report.image_numbers import z_score
from torchrex.report.image_pictures import plot_energies, plot_factors, ticks
from torchrex.report.images import NUMBERS, row_of, tabulate
from torchrex.report.series import p_of_pairs
from written_runs import write_run_on_gpu

HEADLINE = "logits_best_accuracy"
R20 = "icml2020/cifar10-resnet20"
PAPER = PAPER_TABLE1["cifar10", "resnet20"]


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def call(*words, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(
            consoles.stdout, "_width", columns
        )  # it is as wide as it was when it was made
        return run_command(monkeypatch, capsys, *words)

    return call


@pytest.fixture
def rebuild(cli, tmp_path):
    """Rebuilds from tmp_path: what is printed, and what is in the JSON and the markdown."""

    def call(what, *words, name=None, columns=100):
        code, out, err = cli(
            "reproduce", what, "--rebuild", "--out", tmp_path, *words, columns=columns
        )
        assert code == 0, err
        path = tmp_path / (name or what)
        assert path.with_name(f"{path.name}.png").read_bytes().startswith(b"\x89PNG")
        return (
            out,
            json.loads(path.with_name(f"{path.name}.json").read_text()),
            path.with_name(f"{path.name}.md").read_text(),
        )

    return call


@pytest.fixture
def write(tmp_path):
    """Writes a finished run of a recipe. `headline` and `pooled` are accuracies in %: the sum of
    logits at its best.
    """

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
        config = replace(image_recipes()[recipe], **({"epochs": 6} | settings))
        n_epochs = config.epochs
        numbers, curves = (
            {"n_draws": 2},
            {"epoch": list(range(n_epochs)), "draw_epoch": [n_epochs - 1, n_epochs]},
        )
        for prefix, best in (("", headline), ("pooled_", pooled))[: config.n_rungs]:
            # The last value of each kind of average lies its own distance below the best of the
            # logits.
            below = {
                HEADLINE: 0.0,
                "logits_accuracy": 0.1,
                "best_accuracy": 0.3,
                "accuracy": 0.5,
                "single_accuracy": 2.0,
            }
            numbers |= {f"{prefix}{name}": (best - less) / 100 for name, less in below.items()}
            numbers |= {f"{prefix}nll": 0.25, f"{prefix}ece": 0.031, f"{prefix}brier": 0.125}
            curves[f"{prefix}probabilities_accuracy"] = [(best - 1.5) / 100, (best - 0.5) / 100]
        curves["energy"] = [
            [100.0 - epoch for epoch in range(n_epochs)] for _ in range(config.n_rungs)
        ]
        paired = config.variance == "paired"
        variance = [float(epoch) for epoch in range(n_epochs)] if not paired else [2.0] * n_epochs
        curves["noise_variance"] = curves["correction"] = [variance] if config.n_rungs > 1 else []
        curves["swap_epochs"] = [1.5] * swaps
        given = {
            "status": status,
            "metrics": numbers | (metrics or {}),
            "swaps": swaps,
            "curves": curves,
        }
        return write_run_on_gpu(
            tmp_path, config, seed, **given, versions={"torchrex": "0.1.0", "torch": "2.0"}
        )

    return one


def the(rows, **wanted):
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


# The numbers of a row


def test_z_score_by_hand():
    """The paper's sd is half its ±, over five seeds; ours is that of our seeds."""
    assert z_score([94.0, 96.0, 98.0], (95.0, 2.0)) == pytest.approx(
        1.0 / math.sqrt(4.0 / 3 + 1.0 / 5)
    )


def test_a_row_has_mean_and_two_sd_over_seeds(write, rebuild):
    for seed, accuracy in enumerate((94.0, 94.3, 94.6)):
        write(R20, seed, accuracy, accuracy + 1, swaps=seed + 2, epochs=500)
    out, numbers, markdown = rebuild("table1")
    row = the(numbers["rows"], method="reSGHMC")
    assert (row["n"], row["seeds"], row["recipes"], row["epochs"]) == (3, [0, 1, 2], [R20], 500)
    assert row["ours"]["mean"] == pytest.approx(94.3)
    assert row["ours"]["two_sd"] == pytest.approx(0.6)  # sd 0.3 with n - 1
    paper, two_sd = PAPER[2]
    assert row["paper"] == {"mean": paper, "two_sd": two_sd}
    assert row["z"] == pytest.approx((94.3 - paper) / math.sqrt(0.3**2 / 3 + (two_sd / 2) ** 2 / 5))
    means = {name: row[name]["mean"] for name in NUMBERS}
    assert means == pytest.approx(
        {
            HEADLINE: 94.3,
            "logits_accuracy": 94.2,
            "best_accuracy": 94.0,
            "accuracy": 93.8,
            "single_accuracy": 92.3,
        }
        | {"nll": 0.25, "ece": 3.1, "brier": 0.125}
    )
    assert row["swaps"] == [2, 3, 4]
    assert row["wall_minutes"] == [1.5] * 3
    assert (row["devices"], row["versions"]) == (["a GPU"], [{"torchrex": "0.1.0", "torch": "2.0"}])
    both = the(numbers["rows"], method="reSGHMC, both rungs")
    assert both["ours"]["mean"] == pytest.approx(95.3)
    assert both["single_accuracy"]["mean"] == pytest.approx(93.3)
    assert (both["paper"], both["z"]) == (None, None)
    line = next(line for line in markdown.splitlines() if "| reSGHMC |" in line)
    cells = [each.strip() for each in line.strip("|").split("|")]
    assert cells[4:8] == [f"{paper:.2f}±{two_sd:.2f}", "94.30±0.60", "3", f"{row['z']:+.1f}"]
    assert cells[8:] == [
        "94.20",
        "94.30",
        "93.80",
        "94.00",
        "92.30",
        "0.250",
        "3.10",
        "2, 3, 4",
        "500",
        "1.5",
    ]
    assert "94.30±0.60" in out


def test_the_families_report_what_they_say(write, rebuild):
    write(R20, headline=90.0)
    write("clean/cifar10-resnet20", headline=90.0)
    rows = rebuild("table1")[1]["rows"]
    assert the(rows, method="reSGHMC", family="icml2020")["ours"]["mean"] == pytest.approx(90.0)
    assert the(rows, method="reSGHMC", family="clean")["ours"]["mean"] == pytest.approx(
        89.5
    )  # probabilities, last value


def test_one_seed_has_no_error_and_no_test(write, rebuild):
    write(f"{R20}-msgd", headline=94.0, epochs=500)
    out, numbers, markdown = rebuild("table1")
    assert "one seed is not tested" in " ".join(markdown.split())
    row = the(numbers["rows"], method="M-SGD")
    assert (row["ours"]["two_sd"], row["z"], row["swaps"]) == (None, None, None)
    assert "| 94.00 | 1 |  |" in markdown
    for text in (out, markdown):
        assert "94.00±" not in text


def test_table_2_has_its_own_recipes_and_numbers(write, rebuild):
    write("icml2020/cifar100-resnet20-batch1024", headline=75.0)
    write(R20)  # of table 1
    _, numbers, markdown = rebuild("table2")
    assert {row["data"] for row in numbers["rows"]} == {"cifar100"}
    assert (
        the(numbers["rows"], method="reSGHMC")["paper"]["mean"]
        == PAPER_TABLE2["cifar100", "resnet20"][2][0]
    )
    assert "batch size 1024" in markdown


# Runs that are another one's


def test_sghmc_is_rung_0_of_the_pair_where_it_was_not_run(write, rebuild):
    write(f"{R20}-sghmc", 0, 94.0, epochs=500)
    write(f"{R20}-independent", 0, 80.0, 95.0, epochs=500)  # its rung 0 gives way to the own run
    write(f"{R20}-independent", 1, 94.4, 95.2, epochs=500)
    out, numbers, markdown = rebuild("table1")
    row = the(numbers["rows"], method="SGHMC")
    assert row["ours"]["values"] == pytest.approx({"0": 94.0, "1": 94.4})
    assert row["borrowed_seeds"] == [1]
    assert row["recipes"] == [f"{R20}-independent", f"{R20}-sghmc"]
    assert row["z"] == pytest.approx(
        (94.2 - PAPER[1][0]) / math.sqrt(0.08 / 2 + (PAPER[1][1] / 2) ** 2 / 5)
    )
    pair = the(numbers["rows"], method="no swaps, both rungs")
    assert pair["ours"]["values"] == pytest.approx({"0": 95.0, "1": 95.2})
    assert (pair["swaps"], pair["borrowed_seeds"]) == ([0, 0], [])
    for text in (out, markdown):
        assert "SGHMC†" in text
        assert "† rung 0 of the pair" in text
        assert "‡" not in text


def test_an_own_run_of_sghmc_has_no_mark(write, rebuild):
    write(f"{R20}-sghmc")
    assert "†" not in "".join(rebuild("table1")[::2])


def test_clean_msgd_is_that_of_icml2020(write, rebuild):
    write(f"{R20}-msgd", 0, 94.0)
    write("clean/cifar10-resnet20", 3)
    write(f"{R20}-msgd", 1, 70.0, epochs=9)  # not with other settings
    _, numbers, markdown = rebuild("table1")
    row = the(numbers["rows"], method="M-SGD", family="clean")
    assert row["ours"]["mean"] == pytest.approx(93.5)
    assert (row["recipes"], row["borrowed_seeds"]) == ([f"{R20}-msgd"], [0])
    assert "M-SGD‡" in markdown
    assert "‡ the run of icml2020" in markdown
    assert the(numbers["rows"], method="M-SGD", family="icml2020", epochs=6)["borrowed_seeds"] == []


def test_msgd_alone_does_not_make_a_clean_cell(write, rebuild):
    write(f"{R20}-msgd")
    _, numbers, _ = rebuild("table1")
    assert {row["family"] for row in numbers["rows"]} == {"icml2020"}
    assert "clean cifar10 resnet20" in numbers["not_run"]


def test_msgd_of_both_families_is_the_same_run():
    """As the footnote says. The other methods differ, or this would say nothing."""

    def train(family, method):
        config = replace(
            cell(family, "cifar10", "resnet20", method),
            net="resnet8",
            subset=64,
            batch_size=16,
            epochs=3,
        )
        run = config.run(0, torch.device("cpu"), config.energy())
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            run.step(
                (
                    torch.randn(16, 3, 32, 32, generator=generator),
                    torch.randint(10, (16,), generator=generator),
                )
            )
        return run.state_dict()["replicas"]

    assert same(train("icml2020", "msgd"), train("clean", "msgd"))
    assert not same(train("icml2020", "sghmc"), train("clean", "sghmc"))


# What the swaps did


def test_differences_are_paired_by_seed(write, rebuild):
    for seed, (accuracy, pooled) in {
        0: (94.0, 95.0),
        1: (95.0, 96.1),
        2: (96.0, 97.2),
        7: (50.0, 51.0),
    }.items():
        write(R20, seed, accuracy, pooled)
    for seed, (accuracy, pooled) in {
        0: (93.0, 94.9),
        1: (93.5, 95.9),
        2: (94.0, 96.9),
        8: (60.0, 61.0),
    }.items():
        write(f"{R20}-independent", seed, accuracy, pooled)
    out, numbers, markdown = rebuild("table1")
    both = the(numbers["swaps"], of="reSGHMC, both rungs", metric=HEADLINE)
    assert both["minus"] == "no swaps, both rungs"
    assert both["differences"] == pytest.approx({"0": 0.1, "1": 0.2, "2": 0.3})  # neither 7 nor 8
    assert (both["n"], both["mean"], both["se"]) == (
        3,
        pytest.approx(0.2),
        pytest.approx(0.1 / math.sqrt(3)),
    )
    rung_0 = the(numbers["swaps"], of="reSGHMC", metric=HEADLINE)
    assert rung_0["minus"] == "SGHMC"
    assert (rung_0["mean"], rung_0["se"]) == (pytest.approx(1.5), pytest.approx(0.5 / math.sqrt(3)))
    words = "both rungs minus no swaps +0.20 ± 0.06 (n=3, p = 0.074); rung 0 minus SGHMC +1.50 ± 0.29 (n=3, p = 0.035)"
    for text in (out, markdown):
        assert words in " ".join(text.split())


def test_p_of_pairs_by_hand():
    """t = 3 with two degrees of freedom has p = 1 - 3 / sqrt(11); where all differences are equal
    there is no test.
    """
    assert p_of_pairs(3.0, 1.0, 3) == pytest.approx(1.0 - 3.0 / math.sqrt(11.0))
    assert p_of_pairs(-3.0, 1.0, 3) == p_of_pairs(3.0, 1.0, 3)
    assert p_of_pairs(0.1, 1e-15, 3) is None  # rounding
    assert p_of_pairs(0.0, 0.0, 3) == 1.0


def test_few_seeds_claim_nothing(write, rebuild):
    for seed, more in ((0, 0.4), (1, 0.2)):
        write(R20, seed, 94.0, 95.0 + more)
        write(f"{R20}-independent", seed, 93.0, 95.0)
    write("clean/cifar10-resnet20", 0, 94.0)
    write("clean/cifar10-resnet20-sghmc", 0, 93.9)
    markdown = rebuild("table1")[2]
    assert (
        "both rungs minus no swaps +0.30 ± 0.10 (n=2); rung 0 minus SGHMC +1.00 ± 0.00 (n=2)"
        in markdown
    )
    assert (
        "both rungs minus no swaps - (no seed was run with both); rung 0 minus SGHMC +0.10 (n=1)"
        in markdown
    )


# Runs as they are


def test_compressed_epochs_are_seen_and_not_mixed(write, rebuild):
    write(R20, 0, 94.6, epochs=500)
    write(R20, 3, 94.4, epochs=500)
    write(R20, 1, 92.0, epochs=150)
    write(R20, 2, 92.2, epochs=150)
    write(f"{R20}-independent", 0, 92.0, epochs=150)
    out, numbers, markdown = rebuild("table1")
    rows = [row for row in numbers["rows"] if row["method"] == "reSGHMC"]
    assert [(row["epochs"], row["seeds"]) for row in rows] == [(500, [0, 3]), (150, [1, 2])]
    assert [row["z"] is None for row in rows] == [
        False,
        True,
    ]  # another experiment than the paper's
    assert {effect["n"] for effect in numbers["swaps"]} == {
        0
    }  # seed 0 is not paired with other settings
    for text in (out, markdown):
        assert "150/500" in text
        assert "Compressed: 150 epochs in place of the paper's 500" in " ".join(text.split())
    assert "500/500" not in markdown


def test_other_settings_are_told(write, rebuild):
    write(R20, net="resnet8", subset=1024, checkpoint_every=5)
    out, numbers, markdown = rebuild("table1")
    assert numbers["rows"][0]["settings"] == {"net": "resnet8", "subset": 1024}
    for text in (out, markdown):
        assert "resnet20§" in text
        assert "not the recipe's settings (net=resnet8, subset=1024)" in text


def test_what_was_not_run_or_not_finished_is_told(write, rebuild, tmp_path):
    write(R20)
    write(R20, 1, status="paused")
    (tmp_path / f"{R20}-msgd/seed=0").mkdir(parents=True)  # no result yet
    (tmp_path / R20 / "seed=4.failed").mkdir()  # an attempt that left its folder to another
    out, numbers, markdown = rebuild("table1")
    assert numbers["unfinished"] == [f"{R20}-msgd seed 0 (no result)", f"{R20} seed 1 (paused)"]
    assert "seed 1 (paused)" in " ".join(out.split())
    (line,) = [line for line in markdown.splitlines() if line.startswith("not run: ")]
    names = line.removeprefix("not run: ").split(", ")
    assert "icml2020 cifar10 resnet20 at 6 epochs (M-SGD)" in names
    assert "icml2020 cifar10 resnet20 at 6 epochs (reSGHMC" not in line
    assert {"clean cifar10 resnet20", "icml2020 cifar100 wrn-28-10"} <= set(names)
    assert len([name for name in names if name.startswith("clean")]) == 10


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_table_fits_the_terminal(write, rebuild, columns):
    for seed in (0, 1, 2):
        write("icml2020/cifar100-wrn-28-10", seed, 60.0 + seed, swaps=30, epochs=150)
        write("icml2020/cifar100-wrn-28-10-independent", seed, 60.0 + seed / 3, epochs=150)
    out, _, markdown = rebuild("table1", columns=columns)
    assert "…" not in out
    assert all(len(line) <= columns for line in out.splitlines() if "table1" not in line)
    assert "reSGHMC, both rungs" in out
    assert "61.00±2.00" in out
    assert ("NLL " in out.split("What")[0]) == (columns >= 100)
    assert "0.250" in markdown


def test_only_what_is_shown_is_explained(write, rebuild):
    """In a narrow terminal some columns are not there; neither are their notes, nor those of rows
    that nobody has.
    """
    write(f"{R20}-msgd", 0, epochs=150)
    narrow, _, markdown = rebuild("table1", columns=64)
    wide = rebuild("table1", columns=120)[0]
    narrow, wide = (" ".join(text.split()) for text in (narrow, wide))
    for words, seen in (
        ("NLL and ECE: of the average", (False, True, True)),
        ("one net: the newest network alone.", (False, True, True)),
        ("prob. last: ", (False, True, False)),
        ("logits, prob.: ", (False, False, True)),
        ("min: of the group", (False, False, True)),
        ("clean: the average", (False, False, False)),
        ("/ sqrt(sd_ours", (False, False, False)),  # no row is beside the paper's
        ("Rules of icml2020: as in the authors' code", (True, True, True)),
    ):
        assert tuple(words in text for text in (narrow, wide, markdown)) == seen, words
    for seed, accuracy in ((0, 94.0), (1, 94.2)):
        write("clean/cifar10-resnet20", seed, accuracy, epochs=500)
    said = " ".join(rebuild("table1", columns=64)[0].split())
    assert "s.e. off: (ours - paper) / sqrt" in said
    assert "One seed is not tested." in said
    assert "clean: the average of probabilities at the end" in said


@pytest.mark.parametrize(
    ("damage", "words"),
    [("{", "cannot read"), ("[1]", "cannot read"), ('{"status": "finished"}', "has no 'metrics'")],
)
def test_a_damaged_result_is_one_line(write, cli, tmp_path, damage, words):
    folder = write(R20)
    (folder / "result.json").write_text(damage)
    for what in ("table1", "figure2"):
        code, _, err = cli("reproduce", what, "--rebuild", "--out", tmp_path)
        assert code == 2
        assert len(err.strip().splitlines()) == 1
        assert words in err
        assert str(folder) in err
        assert not list(tmp_path.glob("*.md"))


@pytest.mark.parametrize("what", ["table1", "figure2"])
def test_a_number_or_a_curve_that_is_missing_is_named(write, cli, tmp_path, what):
    folder = write(R20, metrics={HEADLINE: None})
    code, _, err = cli("reproduce", what, "--rebuild", "--out", tmp_path)
    assert (code, HEADLINE in err, len(err.strip().splitlines())) == (2, True, 1)
    result = json.loads((folder / "result.json").read_text())
    result["metrics"][HEADLINE] = 0.9
    del result["curves"][{"table1": "draw_epoch", "figure2": "correction"}[what]]
    (folder / "result.json").write_text(json.dumps(result))
    code, _, err = cli("reproduce", what, "--rebuild", "--out", tmp_path)
    assert (code, "has no curve" in err, len(err.strip().splitlines())) == (2, True, 1)
    (folder / "config.json").unlink()
    code, _, err = cli("reproduce", what, "--rebuild", "--out", tmp_path)
    assert (code, "how many epochs" in err) == (2, True)


# The command


@pytest.mark.parametrize("what", ["table1", "table2", "figure2"])
def test_nothing_to_rebuild_from(cli, write, tmp_path, what):
    for out in (tmp_path, tmp_path / "absent"):
        code, printed, err = cli("reproduce", what, "--rebuild", "--out", out)
        assert (code, printed, len(err.strip().splitlines())) == (2, "", 1)
        assert f"no finished run of {what} below" in err
    assert not list(tmp_path.iterdir())
    write({"table2": f"{R20}-batch1024"}.get(what, R20), status="paused")
    assert "(but 1 unfinished)" in cli("reproduce", what, "--rebuild", "--out", tmp_path)[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["figure1"], "--rebuild is for table1, table2, figure2, table3, figure3"),
        (["table1", "--set", "epochs=3"], "leave out --set"),
        (["table1", "--seeds", "2"], "leave out --seeds"),
        (["table1", "--overwrite"], "leave out --overwrite"),
        (["table1", "--only", "resnet20/mnist"], "no recipe of table1 has 'resnet20/mnist'"),
    ],
)
def test_rebuild_refuses_what_it_would_ignore(cli, tmp_path, words, expected):
    code, _, err = cli("reproduce", *words, "--rebuild", "--out", tmp_path)
    assert code == 2
    assert expected in err
    assert len(err.strip().splitlines()) == 1


def test_only_matches_every_part():
    assert [
        name
        for name in table1_recipes()
        if matches("resnet20/cifar10", name) and name.startswith("clean")
    ] == [f"clean/cifar10-resnet20{method}" for method in ("-msgd", "-sghmc", "", "-independent")]
    assert not matches("cifar10", "icml2020/cifar100-resnet20")  # numbers are whole
    assert matches("100", "icml2020/cifar100-resnet20")
    assert not matches("00", "icml2020/cifar100-resnet20")
    assert matches("case1", "figure1/case1-resgld")
    assert matches("figure1/case1", "figure1/case1-resgld")
    assert matches("wrn-16-8", "clean/cifar10-wrn-16-8-msgd")
    assert matches("", "anything")
    assert not matches("c.far10", "icml2020/cifar10-resnet20")


def test_only_makes_a_part_beside_the_whole(write, rebuild, tmp_path):
    for recipe in (R20, "icml2020/cifar100-resnet20", "icml2020/cifar10-resnet32"):
        write(recipe)
    _, numbers, markdown = rebuild(
        "table1", "--only", "resnet20/cifar10", name="table1-resnet20-cifar10"
    )
    assert {(row["data"], row["net"]) for row in numbers["rows"]} == {("cifar10", "resnet20")}
    assert "resnet32" not in markdown
    assert "cifar100" not in markdown
    assert not (tmp_path / "table1.md").exists()


def test_only_sghmc_shows_the_borrowed_run(write, rebuild):
    write(f"{R20}-independent", headline=94.0)
    (row,) = rebuild("table1", "--only", "sghmc", name="table1-sghmc")[1]["rows"]
    assert (row["method"], row["ours"]["mean"]) == ("SGHMC", pytest.approx(94.0))
    rows = rebuild("table1", "--only", "independent", name="table1-independent")[1]["rows"]
    assert [row["method"] for row in rows] == ["SGHMC", "no swaps, both rungs"]


def test_what_is_run():
    """Three methods in every cell; SGHMC and M-SGD of the clean family are runs of others, unless
    they are asked for.
    """
    names = list(trained_ones(table1_recipes()))
    assert len(names) == 10 * 3 + 10 * 2
    assert not [
        name for name in names if "-sghmc" in name or (name.endswith("-msgd") and "clean" in name)
    ]
    assert len(trained_ones(table2_recipes())) == 2 * 3 + 2 * 2
    only = {
        name: config for name, config in table1_recipes().items() if matches("clean/msgd", name)
    }
    assert len(trained_ones(only)) == 10
    only = {name: config for name, config in table1_recipes().items() if matches("sghmc", name)}
    assert len(trained_ones(only)) == 20


@pytest.fixture
def trained(write, monkeypatch):
    """Nothing is trained: a run that is asked for writes its folder, and is listed here."""
    listed = []

    def run_group(each, out, **_):
        for config, seed in each.jobs:
            listed.append((config.recipe, seed, config.epochs))
            write(config.recipe, seed, epochs=config.epochs, hot_lr=config.hot_lr)
        return [RunFolder.of(out, config.recipe, seed) for config, seed in each.jobs]

    monkeypatch.setattr(reproducing, "run_group", run_group)
    return listed


def test_what_is_missing_is_announced_and_run(cli, write, tmp_path, trained):
    write(f"{R20}-msgd", 0, epochs=150)
    arguments = [
        "reproduce",
        "table1",
        "--only",
        "resnet20/cifar10",
        "--set",
        "epochs=150",
        "--out",
        tmp_path,
    ]
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert "to run: 4 runs in 1 group side by side" in out
    wanted = [
        R20,
        f"{R20}-independent",
        "clean/cifar10-resnet20",
        "clean/cifar10-resnet20-independent",
    ]
    assert trained == [(name, 0, 150) for name in wanted]
    assert "nothing was run again" in cli(*arguments)[1]
    code, _, err = cli(*arguments[:4], "--out", tmp_path)  # 500 epochs
    assert code == 2
    assert "other settings" in err
    numbers = json.loads((tmp_path / "table1-resnet20-cifar10.json").read_text())
    assert len(numbers["rows"]) == 10


def test_settings_of_figure_2_are_told(cli, tmp_path, trained):
    words = ["--only", "cifar10", "--seeds", 2, "--set", "epochs=9", "--set", "hot_lr=2"]
    code, out, err = cli("reproduce", "figure2", *words, "--out", tmp_path)
    assert code == 0, err
    assert (
        "to run: 14 runs in 2 groups side by side" in out
    )  # six F0 and the clean run; 16 replicas at a time
    assert "cifar10§, 9 epochs: not the recipes' settings (hot_lr=2.0)" in out
    assert "9/500" in out
    assert len(set(trained)) == 14


# Figure 2


def test_figure_2_by_hand(write, rebuild):
    for factor, recipe in ((1e5, f"{R20}-F1e5"), (3e5, R20)):
        for seed, more in ((0, 0.0), (1, 0.2)):
            write(recipe, seed, 94.0 + factor / 1e6 + more, 95.0 + more, swaps=2 + 2 * seed)
    write("clean/cifar10-resnet20", 0)
    write(f"{R20}-independent", 0, 93.0, 94.5)
    write(
        f"{R20}-independent", 1, 50.0, 50.0, epochs=150
    )  # a row of its own, and no level for the others
    write(f"{R20}-F5e5", 0, 50.0, epochs=150)
    out, numbers, markdown = rebuild("figure2")
    longer, data = numbers["rows"]
    assert (longer["data"], longer["epochs"], longer["course"]) == ("cifar10", 150, {})
    assert [(one["f0"], one["accuracy"]["mean"]) for one in longer["factors"]] == [
        (5e5, pytest.approx(50.0))
    ]
    assert {title: level["mean"] for title, level in longer["levels"].items()} == {
        "SGHMC": 50.0,
        "no swaps, both rungs": 50.0,
    }
    assert [one["f0"] for one in data["factors"]] == [1e5, 3e5]
    first = data["factors"][0]
    assert (first["accuracy"]["mean"], first["accuracy"]["two_sd"]) == (
        pytest.approx(94.2),
        pytest.approx(0.2 * math.sqrt(2)),
    )
    assert (first["both_rungs"]["mean"], first["swaps"], first["n"]) == (
        pytest.approx(95.1),
        [2, 4],
        2,
    )
    levels = {title: level["mean"] for title, level in data["levels"].items()}
    assert levels == pytest.approx({"SGHMC": 93.0, "no swaps, both rungs": 94.5})
    medians = {family: course["median_noise_variance"] for family, course in data["course"].items()}
    assert medians == {"icml2020": 3.0, "clean": 2.0}  # before the first estimate there is none
    assert data["course"]["icml2020"]["seed"] == 0
    for text in (out, markdown):
        flat = " ".join(text.split())
        assert (
            "cifar10, 6 epochs: median noise variance over epochs unpaired 3, paired 2: 1.5 times smaller"
            in flat
        )
        assert "94.20±0.28" in flat
        assert "6/500" in flat
        assert "150/500" in flat
        assert "not run: cifar100" in flat


def test_runs_without_swaps_make_no_row_of_figure_2(write, rebuild):
    write(R20, 0)
    write(f"{R20}-independent", 0, epochs=9)
    assert [row["epochs"] for row in rebuild("figure2")[1]["rows"]] == [6]


def test_energies_of_figure_2(write, rebuild):
    """The clean energies have the prior in them; swaps in every part of the axis leave no room for
    their numbers.
    """
    write(R20, 0)
    write("clean/cifar10-resnet20", 0)
    (row,) = rebuild("figure2")[1]["rows"]
    row["course"]["icml2020"]["swap_epochs"] = [1.0, 1.01, 4.0, 4.01]
    row["course"]["clean"]["swap_epochs"] = [k / 100 for k in range(600)]
    axis = Figure().add_subplot()
    plot_energies(row, axis)
    assert [text.get_text() for text in axis.texts] == ["2×", "2×"]
    named = [text.get_text() for text in axis.get_legend().get_texts()]
    assert named == [
        *("icml2020, cold", "icml2020, hot", "icml2020, swaps: 0"),
        *("clean, cold with the prior", "clean, hot with the prior", "clean, swaps: 0"),
    ]
    plot_factors(row, axis := Figure().add_subplot())
    assert axis.get_xlabel() == "F0 (one was run; above it: swaps)"


def test_rows_of_figure_2_with_other_settings_have_marks(write, rebuild):
    """Two of one length are two rows that a reader can tell apart, in the picture too."""
    write(R20, 0)
    write(R20, 1, hot_lr=2.0)
    write(R20, 2, hot_lr=3.0)
    out, numbers, markdown = rebuild("figure2")
    assert [row["mark"] for row in numbers["rows"]] == ["", "§", "§§"]
    assert [
        line.split(" |")[0] for line in markdown.splitlines() if line.startswith("| cifar10")
    ] == ["| cifar10", "| cifar10§", "| cifar10§§"]
    said = [
        "cifar10§, 6 epochs: not the recipes' settings (hot_lr=2.0)",
        "cifar10§§, 6 epochs: not the recipes' settings (hot_lr=3.0)",
    ]
    assert other_settings(numbers) == said
    assert all(words in " ".join(out.split()) for words in said)


def test_swaps_that_cannot_be_told_apart_share_a_tick():
    assert ticks([10.0, 100.5, 288.0, 290.0, 421.0], 500) == [
        (10.0, 1),
        (100.5, 1),
        (289.0, 2),
        (421.0, 1),
    ]
    assert ticks([], 500) == []
    many = ticks([k / 10 for k in range(5000)], 500)  # a swap at nearly every step
    assert len(many) == 50
    assert sum(n for _, n in many) == 5000


def test_figure_2_without_some_panels(write, rebuild):
    """Of one data set only an F0 away from the authors', of the other only the clean run."""
    write(f"{R20}-F1e6")
    write("clean/cifar100-resnet20")
    numbers = rebuild("figure2")[1]
    assert [
        (row["data"], row["course"] == {}, row["factors"] == []) for row in numbers["rows"]
    ] == [("cifar10", True, False), ("cifar100", False, True)]


def test_the_paper_s_numbers_are_those_of_the_recipes(write, tmp_path):
    """Every method of every cell finds its own column."""
    for (data, net), columns in PAPER_TABLE1.items():
        for method, (mean, _) in zip(("msgd", "sghmc", "resghmc"), columns, strict=True):
            config: ImageConfig = cell("icml2020", data, net, method)
            for seed, apart in ((0, -0.1), (1, 0.1)):
                write(config.recipe, seed, mean + apart, epochs=500)
    table = tabulate("table1", tmp_path, table1_recipes())
    rows = [
        row_of(each, line) for each in table.cells for line in each.lines if line.paper is not None
    ]
    assert len(rows) == 3 * len(PAPER_TABLE1) == 30
    assert max(abs(row["z"]) for row in rows) < 1e-9
