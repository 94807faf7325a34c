"""The report page: what it says, that nothing runs on it but its own script, its size, and that it
works in a real browser.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from chromium import chromium, find_chromium
from torchrex.cli.look import in_words as command_in_words
from torchrex.cli.look import report, size_in_words
from torchrex.errors import RunFolderError
from torchrex.experiments.config import override, to_json
from torchrex.experiments.recipes import get_recipe
from torchrex.experiments.runner import run_recipe
from torchrex.posterior import Draws
from torchrex.report import doctor
from torchrex.report.doctor import diagnose, findings_of
from torchrex.report.page import Written, advice, page_of, write_page
from torchrex.report.page.command import command_to_repeat
from torchrex.report.page.details import details_of
from torchrex.report.page.overview import cell, columns, families, paper_of, shown
from torchrex.report.page.thin import number, rows_to_keep
from torchrex.report.page.wall_time import groups, in_words, total_seconds
from torchrex.report.runs import find_runs, load_run
from torchrex.report.series import error_of_mean
from written_runs import header, write_json, write_run

HOSTILE = "<!--<script x</script ></script/><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\"'&amp;"
needs_chromium = pytest.mark.skipif(
    find_chromium() is None,
    reason="there is no Chromium: apt-get install chromium, to test the page in a real browser",
)


def write_mixture(
    out: Path, recipe="figure1/case3-resgld-F4", seed=0, *, draws=200, chains=4, **more
) -> Path:
    """A run folder as the runner leaves it, filled with noise."""
    config = get_recipe(recipe)
    rungs = len(config.temperatures)
    made = torch.Generator().manual_seed(seed)
    energy = torch.randn(draws, rungs, chains, generator=made) * 7
    replica_at = torch.randint(rungs, (draws, 1, chains), generator=made)
    pairs = rungs - 1
    counts = {
        "accepted": torch.full((pairs, chains), 70),
        "proposed": torch.full((pairs, chains), 1000),
    }
    folder = write_run(
        out,
        config,
        seed,
        metrics={
            "acceptance_rate": 0.07,
            "acceptance_rate_se": 0.002,
            "w1": 1.25 + seed,
            "w2": 2.5,
            "left_weight": 0.5,
        },
        swaps=[
            {
                "pair": [0, 1],
                "accepted": 70 * chains,
                "proposed": 1000 * chains,
                "acceptance_rate": 0.07,
            }
        ]
        * pairs,
        **more,
    )
    Draws(
        values=torch.randn(chains, draws, 1, generator=made),
        steps=torch.arange(1, draws + 1) * 10,
        noise_variance=torch.rand(draws, pairs, chains, generator=made) + 60,
        replica_at=torch.cat([replica_at, 1 - replica_at], 1)[:, :rungs].to(torch.int16),
        energy=energy,
        n_steps=10 * draws,
        **counts,
    ).save(folder / "draws.safetensors")
    trace = {
        "edges": torch.linspace(-9, 6, 201),
        "density": torch.rand(chains, 200, generator=made) / 10,
        "curve_steps": torch.arange(100, 2100, 100),
        "w2": torch.rand(20, chains, generator=made) + 1,
    }
    save_file(trace, folder / "trace.safetensors")
    return folder


def write_digits(out: Path, recipe="digits/resghmc", seed=0, *, rows=300, swap_every=50) -> Path:
    config = get_recipe(recipe)
    made = torch.Generator().manual_seed(seed)
    rungs = config.n_rungs
    when = (
        torch.arange(swap_every, rows, swap_every)
        if rungs > 1 and config.swaps
        else torch.zeros(0, dtype=torch.long)
    )
    turned = torch.bucketize(torch.arange(rows), when, right=True) % 2
    replica_at = (
        torch.stack([turned, 1 - turned], 1)
        if rungs == 2
        else torch.zeros(rows, 1, dtype=torch.long)
    )
    tested = rows if config.swaps else 0
    folder = write_run(
        out,
        config,
        seed,
        metrics={"accuracy": 0.97 + 0.001 * seed, "nll": 0.1, "ece": 0.01},
        swaps=[{"pair": [0, 1], "accepted": len(when), "proposed": tested, "acceptance_rate": None}]
        * (rungs - 1),
        steps_done=rows,
    )
    trace = {
        "steps": torch.arange(rows),
        "energy": 3000 * torch.rand(rows, rungs, generator=made) + 100,
        "noise_variance": torch.rand(rows, rungs - 1, generator=made) * 300,
        "correction": torch.rand(rows, rungs - 1, generator=made) * 70,
        "replica_at": replica_at,
        "swap_steps": when,
        "swap_pairs": torch.zeros_like(when),
        "accepted": torch.full((rungs - 1,), len(when)),
        "proposed": torch.full((rungs - 1,), tested),
        "probabilities": (4 * torch.randn(500, 10, generator=made)).softmax(1),
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in trace.items()}, folder / "trace.safetensors"
    )
    return folder


class Elements(HTMLParser):
    """What a browser would make of the page: elements, the text of scripts, and the text to read."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text, self._within = "", ""
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within = tag
        self.scripts += [""] if tag == "script" else []

    def handle_data(self, data):
        if self._within == "script":
            self.scripts[-1] += data
        elif self._within != "style":
            self.text += data

    def handle_endtag(self, tag):
        self._within = ""

    def data(self, name: str):
        return json.loads(
            self.scripts[
                [attrs.get("id") for tag, attrs in self.tags if tag == "script"].index(name)
            ]
        )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder with runs that are whole, and a page of it."""
    out = tmp_path_factory.mktemp("demo")
    for recipe in ("figure1/case3-resgld-F1", "figure1/case3-resgld-F4", "figure1/case3-sgld"):
        write_mixture(out, recipe)
    for seed in (0, 1, 2):
        write_digits(out, seed=seed)
    write_digits(out, "digits/independent")
    page = out / "page.html"
    assert write_page([out], page, doctor_seconds=math.inf) == (7, 0, 0)
    return page


def test_everything_that_is_asked_for_is_on_the_page(demo):
    page = Elements(demo)
    text = page.text
    assert text.index("Summary") < text.index("digits") < text.index("Runs one by one")
    assert "7.1" in text  # the paper's acceptance at F = 4, in percent
    assert "none" in text  # and at F = 1
    assert '<td data-v="7.1" class=n>7.1</td>' in demo.read_text().replace(
        "7.1000000000000005", "7.1"
    )  # sorted as it is shown
    links = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    assert "./figure1/case3-resgld-F4/seed%3D0/" in links
    runs = [page.data(f"run-{k}") for k in range(7)]
    run = next(each for each in runs if each["name"] == "digits/resghmc, seed 1")
    kinds = [chart["kind"] for chart in run["charts"]]
    assert kinds == ["energy", "paths", "acceptance", "sigma2", "correction", "reliability"]
    assert run["command"] == "torchrex run digits/resghmc --seed 1 --out runs/again"
    assert json.loads(run["config"]) == to_json(get_recipe("digits/resghmc"))
    assert [table["title"] for table in run["tables"]] == ["Ladder", "Swaps", "Numbers"]
    assert run["charts"][0]["marks"]["x"] == [50, 100, 150, 200, 250]
    mixture = next(each for each in runs if "F4" in each["name"])
    assert {"density", "w2"} <= {chart["kind"] for chart in mixture["charts"]}


def test_the_page_needs_no_network_and_allows_no_foreign_script(demo):
    page = Elements(demo)
    assert not [
        attrs
        for _, attrs in page.tags
        if attrs.get("src") or (attrs.get("href") or "").startswith(("http", "//"))
    ]
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object")]
    assert "url(" not in demo.read_text().split("<body>")[0].replace("url(#", "")
    policy = next(
        attrs["content"]
        for tag, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_seeds_are_one_row_and_other_settings_another(tmp_path):
    for seed in (0, 1):
        write_digits(tmp_path / "a", seed=seed)
    folder = write_digits(tmp_path / "b")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden": 32}))
    paths = [tmp_path / "a/digits/resghmc/seed=0", tmp_path / "a/digits/resghmc/seed=1", folder]
    (family,) = families([load_run(path) for path in paths])
    assert [(len(row.runs), row.label) for row in family.rows] == [
        (2, "resghmc (hidden=64)"),
        (1, "resghmc (hidden=32)"),
    ]
    assert all("hidden=" in row.title for row in family.rows)


def test_the_table_says_what_is_not_as_the_recipe_has_it(tmp_path):
    """A shorter run stands beside the paper's number. How often it was saved makes no difference."""
    whole, short = get_recipe("icml2020/cifar10-resnet20"), get_recipe("icml2020/cifar10-resnet56")
    write_run(tmp_path, replace(whole, checkpoint_every=7))
    write_run(tmp_path, whole, 1)
    folder = write_run(tmp_path, replace(short, epochs=30))
    config = json.loads((folder / "config.json").read_text())
    del config["smoothing"]  # as of a version that had no such setting
    (folder / "config.json").write_text(json.dumps(config))
    (family,) = families([load_run(path) for path in find_runs(tmp_path)])
    assert [(len(row.runs), row.label, row.title) for row in family.rows] == [
        (2, "cifar10-resnet20", "cifar10-resnet20"),
        (1, "cifar10-resnet56", "cifar10-resnet56 (epochs=30)"),
    ]
    write_page([tmp_path], tmp_path / "page.html")
    assert "cifar10-resnet56 (epochs=30)" in (tmp_path / "page.html").read_text()


def test_what_tells_rows_apart_comes_first(tmp_path):
    """A name has room for four settings; how many more there are is said."""
    usual = get_recipe("icml2020/cifar10-resnet20")
    other = replace(usual, batch_size=128, data_seed=3, epochs=30, hot_lr=2.0)
    write_run(tmp_path / "a", replace(other, temperature=0.02))
    write_run(tmp_path / "b", replace(other, temperature=0.03))
    (family,) = families([load_run(path) for path in find_runs(tmp_path)])
    assert [row.title for row in family.rows] == [
        f"cifar10-resnet20 (temperature={value}, batch_size=128, data_seed=3, epochs=30, and 1 more)"
        for value in (0.02, 0.03)
    ]
    assert [row.label for row in family.rows] == [
        "cifar10-resnet20 (temperature=0.02)",
        "cifar10-resnet20 (temperature=0.03)",
    ]


def test_a_whole_number_is_the_same_setting(tmp_path):
    folder = write_run(tmp_path, get_recipe("icml2020/cifar10-resnet20"))
    write_run(tmp_path, get_recipe("icml2020/cifar10-resnet20"), 1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "correction_factor": int(config["correction_factor"])})
    )
    (family,) = families([load_run(path) for path in find_runs(tmp_path)])
    assert [len(row.runs) for row in family.rows] == [2]


def test_a_seed_counts_once(tmp_path):
    """A copy of a run makes no mean more certain; it is told beside the number of seeds."""
    paths = [write_digits(tmp_path / "a", seed=seed) for seed in (0, 1)]
    (family,) = families([load_run(path) for path in paths])
    (two,) = family.rows
    copied = [
        shutil.copytree(path, tmp_path / "b" / path.relative_to(tmp_path / "a"))
        for path in paths[:1]
    ]
    (family,) = families([load_run(path) for path in [*paths, *copied]])
    (row,) = family.rows
    assert (len(row.runs), len(row.finished), row.again, two.again) == (3, 2, 1, 0)
    assert row.drawn == row.runs[:2]
    assert cell(row, "accuracy") == cell(two, "accuracy")
    write_page([tmp_path], tmp_path / "page.html")
    assert "2 of 3, 1 of the same seed" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("made", "words"), [(2, "2 swaps"), (1_374, "the first 2 of 1,374 swaps")])
def test_swaps_that_are_not_listed_are_counted(tmp_path, made, words):
    """A result.json lists so many; their marks must not look as if swaps had ended there."""
    curves = {"epoch": [0, 1, 2], "energy": [[3, 2, 1], [4, 3, 2]], "swap_epochs": [1.5, 1.7]}
    swaps = [{"pair": [0, 1], "accepted": made, "proposed": 5_000, "acceptance_rate": made / 5_000}]
    write_run(tmp_path, get_recipe("icml2020/cifar10-resnet20"), curves=curves, swaps=swaps)
    write_page([tmp_path], tmp_path / "page.html")
    (energies,) = Elements(tmp_path / "page.html").data("run-0")["charts"]
    assert energies["marks"]["name"] == words


def test_numbers_of_the_paper_stand_beside_image_runs(tmp_path):
    recipe = "icml2020/cifar10-resnet20"
    curves = {
        "epoch": [0, 1, 2],
        "energy": [[3, 2, 1], [4, 3, 2]],
        "noise_variance": [[1, 1, 1]],
        "correction": [[1, 2, 1]],
    }
    curves |= {"swap_epochs": [1.5], "logits_accuracy": [0.9, 0.91]}
    run = load_run(
        write_run(
            tmp_path, get_recipe(recipe), metrics={"logits_best_accuracy": 0.944}, curves=curves
        )
    )
    (family,) = families([run])
    assert paper_of(family.rows[0])["logits_best_accuracy"][:2] == (94.62, "94.62 ± 0.18")
    write_page([tmp_path], tmp_path / "page.html")
    page = Elements(tmp_path / "page.html")
    kinds = [chart["kind"] for chart in page.data("run-0")["charts"]]
    assert kinds == [
        "energy",
        "sigma2",
        "correction",
        "accuracy",
    ]  # from the curves: there is no trace
    assert page.data("run-0")["charts"][2]["series"][0]["y"] == [-1, -1, -1]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (
            "figure1/case1-resgld",
            ["noise.scale=3", "temperatures=1,5,25", "correction_factor=inf", "n_steps=500"],
        ),
        ("digits/resghmc", ["swaps=false", "epochs=60"]),
        (
            "icml2020/cifar10-resnet20",
            ["subset=none", "validation=100", "variance=paired", "lr_of_mean=0.05"],
        ),
        ("digits/msgd", []),
    ],
)
def test_the_command_gives_back_the_config(tmp_path, recipe, settings):
    config = override(get_recipe(recipe), settings)
    run = load_run(write_json(tmp_path / "seed=3", config, None))
    command = command_to_repeat(replace(run, recipe=recipe))
    words = shlex.split(command.line)
    assert words[:5] == ["torchrex", "run", recipe, "--seed", "3"]
    given = [words[k + 1] for k, word in enumerate(words) if word == "--set"]
    assert to_json(override(get_recipe(recipe), given)) == to_json(config)
    assert command.note == ""


def test_a_config_of_another_version_is_said(tmp_path):
    config = {**to_json(get_recipe("digits/msgd")), "new_setting": 1}
    command = command_to_repeat(load_run(write_json(tmp_path / "seed=0", config, None)))
    assert "new_setting" in command.note
    unknown = load_run(write_json(tmp_path / "other/seed=0", {"recipe": "no/such"}, None))
    assert command_to_repeat(unknown) == (
        "",
        "This version has no recipe of that name; the config below is all there is.",
    )


def damaged_runs(out: Path) -> None:
    write_mixture(out)
    cut = write_mixture(out, seed=1) / "draws.safetensors"
    cut.write_bytes(cut.read_bytes()[:4000])
    (write_digits(out) / "result.json").unlink()
    (write_digits(out, seed=1) / "result.json").write_text("{")
    (write_digits(out, seed=2) / "trace.safetensors").unlink()
    write_run(out, get_recipe("digits/resghmc"), 3, status="failed", error="NaN!")
    odd = header(
        "digits/resghmc",
        4,
        metrics=[1],
        swaps={"a": 1},
        curves=[],
        date=7,
        wall_seconds="long",
        versions=3,
    )
    write_json(
        out / "digits/resghmc/seed=4",
        {"recipe": "digits/resghmc", "temperatures": "hot", "paper": 3},
        odd,
    )
    (out / "digits/resghmc/seed=5").mkdir()


def test_unfinished_and_damaged_runs_are_shown_as_such(tmp_path):
    damaged_runs(tmp_path)
    assert write_page([tmp_path], tmp_path / "page.html") == (7, 5, 1)
    page = Elements(tmp_path / "page.html")
    for words in (
        "draws.safetensors is damaged: it ends at byte 4,000",
        "there is no result.json",
        "NaN!",
        "line 1, column 2",
    ):
        assert words in page.text
    assert "seed=5" in page.text
    assert "6 of 8 folders are not whole" in page.text
    by_name = {run["name"]: run for run in (page.data(f"run-{k}") for k in range(7))}
    assert by_name["digits/resghmc, seed 0"]["status"] == "unfinished"
    assert by_name["digits/resghmc, seed 0"]["charts"]  # what is there is drawn
    assert by_name["digits/resghmc, seed 1"]["status"] == "damaged"
    assert by_name["digits/resghmc, seed 4"]["status"] == "damaged", (
        "its result.json has parts of the wrong kind"
    )
    assert by_name["figure1/case3-resgld-F4, seed 1"]["damaged"] == ["draws.safetensors"]


def test_empty_folders_have_rows_of_their_own(tmp_path):
    damaged_runs(tmp_path)
    (tmp_path / "nothing").mkdir()
    assert write_page([tmp_path, tmp_path / "nothing"], tmp_path / "page.html").empty == 2
    html = (tmp_path / "page.html").read_text()
    assert "<b>2</b> empty" in html
    rows = [row for row in html.split("<tr>")[1:] if 'class="badge empty"' in row]
    assert len(rows) == 2
    assert "digits/resghmc/seed=5" in rows[0]
    assert ">digits/resghmc<" in rows[0]
    assert "input" not in rows[0], "there is nothing to show"
    assert "./nothing/" in rows[1]
    assert (
        "1 of 6, 2 damaged, 1 empty" in html
    )  # in the table of the digits; of the others one failed and one is unfinished


BROKEN = {
    "[]": "result.json is damaged: it holds a list in place of an object; none of it is used",
    "3": "result.json is damaged: it holds a whole number in place of an object",
    "null": "result.json is damaged: it holds nothing (null) in place of an object",
    "{}": "result.json is damaged: it lacks recipe, seed, status, metrics, swaps",
    '{"recipe": "digits/resghmc", "seed": 0, "metrics": {}, "swaps": []}': "result.json is damaged: it lacks status",
}
WRONG = {
    "seed": ("0", "seed is text in place of a whole number"),
    "status": (None, "status is nothing (null) in place of text"),
    "metrics": ([1], "metrics is a list in place of an object"),
    "metrics ": ({"nll": {}}, "metrics holds other things than numbers"),
    "swaps": ([{"pair": [0, 1]}], "swaps lacks the counts of a pair"),
    "wall_seconds": ("long", "wall_seconds is text in place of a number"),
    "steps_done": (True, "steps_done is true in place of a whole number"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_result_of_another_shape_is_damaged(tmp_path, text):
    folder = write_digits(tmp_path)
    (folder / "result.json").write_text(text)
    run = load_run(folder)
    assert (run.status, run.damaged, run.recipe, run.seed) == (
        "damaged",
        ("result.json",),
        "digits/resghmc",
        0,
    )
    (problem,) = run.problems
    assert problem.startswith(BROKEN[text])
    assert run.history is not None, "its trace is there"


@pytest.mark.parametrize("name", WRONG)
def test_parts_of_the_wrong_kind_are_damage_and_the_others_are_used(tmp_path, name):
    folder = write_digits(tmp_path)
    value, words = WRONG[name]
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, name.strip(): value}))
    run = load_run(folder)
    assert (run.status, run.damaged) == ("damaged", ("result.json",))
    assert run.problems == (f"result.json is damaged: {words}",)
    assert name.strip() not in run.result
    assert run.result["date"] == result["date"]
    write_page([tmp_path], tmp_path / "page.html")


def test_every_result_that_is_written_is_sound(tmp_path):
    pytest.importorskip("sklearn")
    network = run_recipe(
        replace(get_recipe("digits/resghmc"), epochs=2, burn_in_epochs=1, hidden=8), 0, tmp_path
    )
    density = run_recipe(
        replace(get_recipe("figure1/case1-naive"), n_steps=200, n_runs=4), 0, tmp_path
    )
    for folder in (
        network.path,
        density.path,
        *find_runs(Path(__file__).parents[1] / "results" / "images"),
    ):
        run = load_run(folder)
        assert (run.status, run.problems, run.damaged) == ("finished", (), ()), folder


@pytest.mark.parametrize(
    "text", ["{", "[]", None, '{"recipe": "digits/resghmc", "temperatures": "hot"}']
)
def test_a_run_without_its_config_stays_with_its_recipe(tmp_path, text):
    for seed in (0, 1, 2):
        folder = write_digits(tmp_path, seed=seed)
    write_digits(tmp_path, "digits/independent")
    broken = tmp_path / "digits/resghmc/seed=0/config.json"
    broken.unlink() if text is None else broken.write_text(text)
    (tmp_path / "digits/resghmc/seed=3").mkdir()
    runs = [load_run(path) for path in find_runs(tmp_path)]
    (family,) = families(runs, [tmp_path / "digits/resghmc/seed=3"])
    assert [row.label for row in family.rows] == ["independent", "resghmc"]
    row = family.rows[1]
    assert [run.seed for run in row.runs] == [0, 1, 2]
    assert [run.seed for run in row.finished] == [1, 2], (
        "with which settings seed 0 ran is not known"
    )
    assert row.config == json.loads((folder / "config.json").read_text())
    write_page([tmp_path], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert f"2 of 4, 1 {'without config.json' if text is None else 'damaged'}, 1 empty" in html
    marked = [
        row
        for row in html.split("<tr>")[1:]
        if 'class="badge finished"' in row and 'class="badge damaged"' in row
    ]
    assert len(marked) == (0 if text is None else 1)


def test_a_lonely_run_without_config_is_told_by_its_folder(tmp_path):
    folder = write_digits(tmp_path)
    (folder / "config.json").write_text("{")
    (folder / "result.json").write_text("[")
    ((row,),) = (family.rows for family in families([load_run(folder)]))
    assert (row.recipe, row.label) == ("digits/resghmc", "resghmc")


def timed(
    out: Path, seed: int, seconds, minute: int, recipe="clean/cifar10-resnet20", **more
) -> Path:
    given = {"wall_seconds": seconds, "date": f"2026-01-02T03:{minute:02d}:00+00:00", **more}
    return write_run(out, get_recipe(recipe), seed, **given)


def test_time_that_runs_shared_counts_once(tmp_path):
    for seed, minute in (
        (0, 1),
        (1, 1),
        (2, 2),
    ):  # one clock; results are written one after the other
        timed(tmp_path, seed, 600.123456789, minute)
    timed(tmp_path, 3, 600.5, 1)  # another clock
    timed(tmp_path, 4, 600.123456789, 30)  # as long, but later: one after the other
    timed(tmp_path, 5, 600.123456789, 1, device="TPU")
    timed(tmp_path, 6, 600.123456789, 1, replicas_side_by_side=2)  # it says that it was alone
    timed(tmp_path, 7, 600.123456789, 1, replicas_side_by_side=8)
    timed(tmp_path, 0, 600.123456789, 1, recipe="digits/sghmc")  # never trains beside others
    runs = [load_run(path) for path in find_runs(tmp_path)]
    assert sorted(len(group) for group in groups(runs)) == [1, 1, 1, 1, 1, 4]
    assert total_seconds(runs) == pytest.approx(6 * 600.2, abs=1)
    write_page([tmp_path], tmp_path / "page.html")
    page = Elements(tmp_path / "page.html")
    assert "1.0 h of computing" in page.text
    assert "4 runs trained side by side in 1 group" in page.text
    assert page.text.count("600.1*") == 4
    assert (in_words(12.34), in_words(1043.3), in_words(7000.0)) == ("12.3 s", "17.4 min", "1.9 h")


def test_the_time_of_the_committed_images():
    """Six runs on CIFAR-10 trained together in 1,043 s: not in 1.7 h."""
    runs = [
        load_run(path)
        for path in find_runs(Path(__file__).parents[1] / "results" / "images" / "icml2020")
    ]
    chosen = [run for run in runs if run.recipe.startswith("icml2020/cifar10-resnet20")]
    clocks = {run.result["wall_seconds"] for run in chosen}
    assert len(clocks) < len(chosen)
    assert total_seconds(chosen) == pytest.approx(sum(clocks))


def test_what_doctor_says_is_on_the_page(demo):
    page = Elements(demo)
    by_name = {run["name"]: run["doctor"] for run in (page.data(f"run-{k}") for k in range(7))}
    said = by_name["figure1/case3-resgld-F4, seed 0"]
    wanted = diagnose(load_run(demo.parent / "figure1/case3-resgld-F4/seed=0"))
    assert said["findings"] == [[each.severity, each.title, each.words] for each in wanted.findings]
    assert (said["problems"], said["warnings"]) == (
        len(wanted.of("problem")),
        len(wanted.of("warning")),
    )
    assert "Doctor looked at 7 runs: " in page.text


def swaps_table(run):
    (table,) = [
        table for table in details_of(run, Path("page.html"))["tables"] if table["title"] == "Swaps"
    ]
    return dict(zip(table["head"], table["rows"][0], strict=True)), table["note"]


@pytest.mark.parametrize("write", [write_mixture, write_digits])
def test_the_noise_of_the_page_is_that_of_doctor(tmp_path, write):
    """One s, of the last quarter: a sigma2 that was large in the burn-in changes nothing."""
    run = load_run(write(tmp_path))
    n = len(run.history.steps)
    variance = run.history.noise_variance.clone()
    variance[: n // 2] *= 100
    run = replace(run, history=replace(run.history, noise_variance=variance))
    told = next(each.numbers for each in findings_of(run) if "noise_s" in each.numbers)
    row, note = swaps_table(run)
    assert row["noise s"] == f"{told['noise_s']:.3g}"
    assert row["2Φ(−s/2), %"] == f"{100 * told['allowed_acceptance']:.3g}"
    assert row["σ², nats²"].startswith(f"{told['noise_variance']:.3g}"[:3])
    assert "the last quarter of the run" in note
    assert "last step" not in note
    assert ("all 2 replicas of all 4 chains together" in note) == (write is write_mixture)


def test_errors_of_means_are_those_of_the_chains_where_runs_tell_them(tmp_path):
    """By hand: 0.002 of each of two runs makes sqrt(2) * 0.002 / 2 = 0.0014; w1 has no error of its
    own: |1.25 - 2.25| / 2.
    """
    assert error_of_mean([1.0, 2.0], [0.002, 0.002]) == pytest.approx(0.0014142, abs=1e-6)
    assert error_of_mean([1.0, 2.0], [0.002, None]) == pytest.approx(0.5)
    assert error_of_mean([1.0], [None]) is None
    for seed in (0, 1):
        write_mixture(tmp_path, seed=seed)
    (family,) = families([load_run(path) for path in find_runs(tmp_path)])
    assert cell(family.rows[0], "acceptance_rate")[0] == "7.0(1)"
    assert cell(family.rows[0], "w1")[0] == "1.8(5)"


def test_numbers_of_the_page_are_written_out():
    assert shown("n_steps", 20_000.0, None) == "20,000"
    assert shown("left_weight_true", 0.4, None) == "0.4000"
    assert shown("left_weight_true", 0.39992916, None) == "0.3999"
    assert shown("w2", 0.297887, 0.0188717) == "0.30(2)"


def test_tall_data_have_the_numbers_that_run_prints(tmp_path):
    metrics = {
        "n_steps": 200_000,
        "largest_mean_error_in_sd": 0.0098,
        "smallest_sd_ratio": 1.02,
        "largest_sd_ratio": 1.05,
    }
    write_run(tmp_path, get_recipe("tall/logistic"), metrics=metrics)
    (family,) = families([load_run(path) for path in find_runs(tmp_path)])
    assert columns(family) == ["largest_mean_error_in_sd", "smallest_sd_ratio", "largest_sd_ratio"]


def test_a_quick_look_is_seen_on_the_page(tmp_path):
    """Tall data: the slow check is left out, and table, panel and summary say so."""
    config = replace(get_recipe("tall/logistic"), n_data=500, n_steps=400, n_runs=4, lr_of_mean=0.1)
    run_recipe(config, 0, tmp_path)
    write_page([tmp_path], tmp_path / "page.html")
    page = Elements(tmp_path / "page.html")
    assert "(quick look)" in page.text
    assert "Of 1 it took a quick look" in page.text
    assert page.data("run-0")["doctor"]["quick"]
    write_page([tmp_path], tmp_path / "page.html", doctor_seconds=math.inf)
    assert "quick look" not in Elements(tmp_path / "page.html").text


def test_accuracies_are_zoomed_to_the_averages(tmp_path):
    """The first draws and the single ones lie far below."""
    recipe = "icml2020/cifar10-resnet20"
    curves = {
        "logits_accuracy": [0.1] + [0.93] * 19 + [0.94] * 20,
        "last_accuracy": [0.1, 0.5] * 20,
    }
    run = load_run(write_run(tmp_path, get_recipe(recipe), curves=curves))
    (made,) = [
        chart for chart in details_of(run, tmp_path)["charts"] if chart["kind"] == "accuracy"
    ]
    assert made["yLow"] == 93


def test_a_page_does_not_fail_because_doctor_does(tmp_path, monkeypatch):
    write_mixture(tmp_path)
    write_digits(tmp_path)
    real = doctor.diagnose

    def stumbles(run, *, quick):
        if run.recipe.startswith("digits"):
            raise ZeroDivisionError("by <b>zero</b>")
        return real(run, quick=quick)

    monkeypatch.setattr(doctor, "diagnose", stumbles)
    write_page([tmp_path], tmp_path / "page.html")
    page = Elements(tmp_path / "page.html")
    said = [page.data(f"run-{k}")["doctor"] for k in range(2)]
    assert said[0]["verdict"] == "doctor failed on this run (ZeroDivisionError: by <b>zero</b>)"
    assert said[1]["findings"]
    assert "Doctor looked at 1 run" in page.text
    assert "Of 1 it does not tell" in page.text


def test_doctor_is_not_waited_for(tmp_path, monkeypatch):
    """The quick runs come first, and what is not asked is said."""
    write_mixture(tmp_path)
    write_digits(tmp_path)
    asked = []
    monkeypatch.setattr(
        advice, "advice_of", lambda run, quick: asked.append(run.recipe) or advice._unknown("told")
    )
    clock = iter([0.0, 5.0, 15.0])
    monkeypatch.setattr(advice.time, "monotonic", lambda: next(clock))
    runs = [load_run(path) for path in reversed(find_runs(tmp_path))]  # the density first
    found = advice.advice_for(runs, seconds=10.0)
    assert asked == ["digits/resghmc"]
    assert found[id(runs[0])]["verdict"].startswith("doctor was not asked, to keep this page quick")
    monkeypatch.undo()
    write_page([tmp_path], tmp_path / "page.html", doctor_seconds=0)
    page = Elements(tmp_path / "page.html")
    assert "Of 2 it does not tell; `torchrex doctor DIR` does" in page.text


def test_damage_is_told_once(tmp_path):
    folder = write_digits(tmp_path)
    (folder / "result.json").unlink()
    run = load_run(folder)
    said = [words for _, _, words in advice.advice_of(run)["findings"]]
    assert run.problems
    assert not [words for words in said if words.startswith(run.problems[0])]


def hostile_run(out: Path) -> None:
    write_mixture(out)
    config = {**to_json(get_recipe("digits/resghmc")), "recipe": HOSTILE, HOSTILE: HOSTILE}
    result = header(
        HOSTILE,
        0,
        status=HOSTILE,
        device=HOSTILE,
        versions={HOSTILE: HOSTILE},
        error=HOSTILE,
        date=HOSTILE,
    )
    result["metrics"] = {HOSTILE: 1.0}
    write_json(out / "<img src=x onerror=window.hacked=3>" / "seed=0", config, result)


def test_names_from_files_are_text_and_not_markup(tmp_path):
    hostile_run(tmp_path)
    write_page([tmp_path], tmp_path / "page.html", title=HOSTILE)
    page = Elements(tmp_path / "page.html")
    kinds = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    assert kinds.count(None) == 1, "one script of ours and no other"
    assert all("id" in attrs for tag, attrs in page.tags if tag == "script" and attrs.get("type"))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert HOSTILE in [page.data(f"run-{k}")["status"] for k in range(2)]


def test_long_traces_keep_their_extremes_and_the_rows_around_swaps(tmp_path):
    run = load_run(write_digits(tmp_path, rows=50_000, swap_every=9_999))
    history = run.history
    history.energy[31_234, 0, 0] = 1e6
    rows = rows_to_keep(history)
    assert len(rows) < 4000
    assert 31_234 in rows.tolist()
    for swap in (9_999, 49_995):
        assert set(range(swap - 8, swap + 5)) <= set(rows.tolist())
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert (number(1234567.8), number(0.1 + 0.2), number(float("nan")), number(True)) == (
        1234600,
        0.3,
        None,
        None,
    )


def many(out: Path, n_mixtures: int, n_digits: int, **sizes):
    mixture = load_run(write_mixture(out, draws=sizes["draws"], chains=64))
    network = load_run(write_digits(out, rows=sizes["rows"], swap_every=sizes["rows"] // 700))
    runs = [replace(mixture, recipe=f"figure1/case3-{k}") for k in range(n_mixtures)]
    return runs + [replace(network, seed=k) for k in range(n_digits)]


def test_the_page_of_the_demo_is_under_5_mb(tmp_path):
    """Its runs as large as those of `make demo`, filled with noise, which is the worst case."""
    text = page_of(
        many(tmp_path, 11, 20, draws=2000, rows=2000), tmp_path / "page.html", title="demo"
    )
    assert len(text.encode()) < 5e6


def test_fifty_long_runs_are_under_20_mb(tmp_path):
    text = page_of(
        many(tmp_path, 25, 25, draws=10_000, rows=100_000), tmp_path / "page.html", title="fifty"
    )
    assert len(text.encode()) < 20e6


def test_command(tmp_path):
    app = typer.Typer()
    app.command()(report)
    write_mixture(tmp_path)
    done = CliRunner().invoke(
        app, [str(tmp_path), "--out", str(tmp_path / "new" / "page.html"), "--title", "A & B"]
    )
    assert done.exit_code == 0, done.output
    assert "(1 run; " in done.output
    assert re.search(r"; \d+ kB, opens without", done.output), (
        "a small page has kilobytes, not 0.0 MB"
    )
    assert "<title>A &amp; B</title>" in (tmp_path / "new" / "page.html").read_text()
    again = CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path / "new" / "page.html")])
    assert again.exit_code == 0, "a page is replaced by a newer one"
    (tmp_path / "figure1/case3-resgld-F4/seed=0/result.json").unlink()
    alone = CliRunner().invoke(
        app, [str(tmp_path), "--out", str(tmp_path / "page.html"), "--doctor", "none"]
    )
    assert "(1 run, not whole (the page says what is missing); " in alone.output


def test_what_the_command_says():
    for written, words in (
        (Written(1, 0, 0), "1 run"),
        (Written(1, 1, 0), "1 run, not whole (the page says what is missing)"),
        (
            Written(3, 1, 1),
            "3 runs, 1 of them not whole (the page says what is missing), 1 empty folder",
        ),
        (
            Written(3, 3, 2),
            "3 runs, none of them whole (the page says what is missing), 2 empty folders",
        ),
    ):
        assert command_in_words(written) == words
    assert [size_in_words(n) for n in (700, 61_234, 999_499, 999_500, 1_260_000)] == [
        "1 kB",
        "61 kB",
        "999 kB",
        "1.0 MB",
        "1.3 MB",
    ]


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(RunFolderError, match="there is no folder"):
        write_page([tmp_path / "none"], tmp_path / "page.html")
    (tmp_path / "digits/resghmc/seed=0").mkdir(parents=True)
    with pytest.raises(
        RunFolderError, match=r"there is no run in .* \(1 folder is named like a run but empty\)"
    ):
        write_page([tmp_path], tmp_path / "page.html")
    folder = write_mixture(tmp_path)
    with pytest.raises(RunFolderError, match="is a folder"):
        write_page([tmp_path], tmp_path)
    before = (folder / "result.json").read_bytes()
    with pytest.raises(RunFolderError, match="not a report of torchrex"):
        write_page([tmp_path], folder / "result.json")
    assert (folder / "result.json").read_bytes() == before


# In a real browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@needs_chromium
def test_it_loads_fast_and_without_a_complaint(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(page_of(many(tmp_path, 11, 20, draws=2000, rows=2000), page, title="demo"))
    browser.look()
    seconds = min(browser.open(page) for _ in range(2))
    assert browser.errors == []
    assert seconds < 2.0
    assert browser.run("document.querySelectorAll('.panel').length") == 2
    assert browser.run("document.querySelectorAll('svg[data-view] path.s').length") > 0, (
        "something is drawn"
    )


SVG = "document.querySelector('.panel .chart[data-kind=energy] > svg')"


def panel_of_digits(browser, demo):
    browser.look(height=1200)
    browser.open(demo)
    browser.click("#none")
    browser.run(
        "(() => { const rows = [...document.querySelectorAll('#all-runs tbody tr')];"
        " const row = rows.find(r => r.textContent.includes('digits/resghmc'));"
        " row.querySelector('input').click(); document.querySelector('.panel').scrollIntoView(); })()"
    )
    browser.run("new Promise(done => setTimeout(done, 300))")


def view(browser):
    return [float(end) for end in browser.run(f"{SVG}.dataset.view").split()]


@needs_chromium
def test_a_chart_tells_values_and_zooms(browser, demo):
    panel_of_digits(browser, demo)
    box = browser.run(
        f"(() => {{ const b = {SVG}.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()"
    )
    left, middle = box[0], box[1] + box[3] / 2
    browser.mouse("mouseMoved", left + box[2] / 2, middle)
    readout = browser.run(
        "document.querySelector('.panel .chart[data-kind=energy] output').textContent"
    )
    assert readout.startswith("step 1")
    assert "rung 0 (coldest)" in readout
    assert view(browser) == [0, 299]
    browser.mouse("mousePressed", left + box[2] * 0.4, middle, button="left", clickCount=1)
    browser.mouse("mouseMoved", left + box[2] * 0.6, middle, button="left", buttons=1)
    browser.mouse("mouseReleased", left + box[2] * 0.6, middle, button="left", clickCount=1)
    low, high = view(browser)
    assert 60 < low < 130
    assert 130 < high < 200
    others = browser.run(
        "[...document.querySelectorAll('.panel .chart[data-kind=paths] > svg')].map(s => s.dataset.view)"
    )
    assert others == [browser.run(f"{SVG}.dataset.view")], (
        "charts over the same steps zoom together"
    )
    browser.click(".panel .chart[data-kind=energy] .bar button:nth-child(3)")  # whole
    assert view(browser) == [0, 299]
    for swap in (50, 100):  # from swap to swap
        browser.click(".panel .chart[data-kind=energy] .next")
        low, high = view(browser)
        assert (low + high) / 2 == pytest.approx(swap, abs=1)
        assert high - low < 60
    paths = browser.run(f"{SVG}.querySelectorAll('path.s').length")
    browser.click(".panel .chart[data-kind=energy] .legend button")
    assert browser.run(f"{SVG}.querySelectorAll('path.s').length") < paths, (
        "the legend hides a line"
    )
    assert browser.errors == []


@needs_chromium
def test_a_chart_obeys_the_keyboard(browser, demo):
    panel_of_digits(browser, demo)
    browser.run(f"{SVG}.focus()")
    for key, wanted in (("+", (74.75, 224.25)), ("ArrowRight", (104.65, 254.15)), ("0", (0, 299))):
        browser.send(
            "Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else ""
        )
        assert view(browser) == pytest.approx(wanted)


@needs_chromium
def test_tables_sort_by_number_and_back(browser, demo):
    browser.look()
    browser.open(demo)

    def column(k):
        return browser.run(
            f"[...document.querySelectorAll('#all-runs tbody tr')].map(r => r.cells[{k}].textContent)"
        )

    before = column(5)
    browser.click("#all-runs th:nth-child(6) button")
    there = [int(text.replace(",", "")) for text in column(5) if text]
    assert there == sorted(there)
    assert column(5)[-1] == "", "what is not known comes last"
    browser.click("#all-runs th:nth-child(6) button")
    there = [int(text.replace(",", "")) for text in column(5) if text]
    assert there == sorted(there, reverse=True)
    assert column(5)[-1] == ""
    assert sorted(before) == sorted(column(5))
    assert (
        browser.run("document.querySelector('#all-runs th:nth-child(6)').ariaSort") == "descending"
    )
    browser.run(
        "(() => { const f = document.getElementById('filter'); f.value = 'F4'; f.dispatchEvent(new Event('input')); })()"
    )
    assert (
        browser.run(
            "[...document.querySelectorAll('#all-runs tbody tr')].filter(r => !r.hidden).length"
        )
        == 1
    )
    assert browser.run("document.getElementById('no-match').hidden")
    browser.run(
        "(() => { const f = document.getElementById('filter'); f.value = 'zz'; f.dispatchEvent(new Event('input')); })()"
    )
    assert not browser.run("document.getElementById('no-match').hidden")


@needs_chromium
def test_all_charts_are_printed(browser, demo):
    """Those far below have not been in sight."""
    browser.look(height=300)
    browser.open(demo)
    drawn = "document.querySelectorAll('.chart > svg[data-view]').length"
    before, all_ = (
        browser.run(drawn),
        browser.run("document.querySelectorAll('.chart > svg').length"),
    )
    assert before < all_
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run(drawn) == all_


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 400, 1280])
def test_layouts_hold(browser, demo, width, dark):
    """No sideways scrolling of the page, nothing beyond its edge but what scrolls by itself, and
    text against its ground.
    """
    browser.look(width=width, dark=dark)
    browser.open(demo)
    browser.run("document.querySelectorAll('#all-runs input:not(:checked)')[0].click()")
    assert browser.run("document.documentElement.scrollWidth") <= width
    beyond = browser.run(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && !e.closest('pre') && !e.closest('svg')"
        f" && e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert beyond == []
    light = browser.run(
        "['color', 'backgroundColor'].map(p => getComputedStyle(document.body)[p].match(/\\d+/g))"
        ".map(rgb => rgb.slice(0, 3).reduce((a, b) => a + +b, 0))"
    )
    assert (light[0] > 600 and light[1] < 100) if dark else (light[0] < 150 and light[1] > 700)
    assert browser.errors == []


@needs_chromium
def test_a_crafted_run_cannot_run_a_script(browser, tmp_path):
    hostile_run(tmp_path)
    write_page([tmp_path], tmp_path / "page.html", title=HOSTILE)
    browser.look()
    browser.open(tmp_path / "page.html")
    browser.run(
        "document.querySelectorAll('#all-runs input:not(:checked)').forEach(box => box.click())"
    )
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == HOSTILE
    assert browser.errors == []


@needs_chromium
def test_what_doctor_says_is_read_in_the_panel(browser, demo):
    """Problems and warnings stand open, what is fine is folded."""
    panel_of_digits(browser, demo)
    said = json.loads(browser.run("document.getElementById('run-1').textContent"))["doctor"]
    shown = browser.run(
        "[...document.querySelectorAll('.panel .doctor > ul > li')].map(e => e.textContent)"
    )
    grave = [finding for finding in said["findings"] if finding[0] in ("problem", "warning")]
    rest = [finding for finding in said["findings"] if finding[0] not in ("problem", "warning")]
    assert shown == [f"{severity} {title}. {words}" for severity, title, words in grave]
    assert shown
    folded = "[...document.querySelectorAll('.panel .doctor details')].map(e => [e.open, e.querySelectorAll('li').length])"
    assert browser.run(folded) == ([[False, len(rest)]] if rest else [])


@needs_chromium
def test_damaged_runs_open_too(browser, tmp_path):
    damaged_runs(tmp_path)
    write_page([tmp_path], tmp_path / "page.html")
    browser.look()
    browser.open(tmp_path / "page.html")
    browser.run(
        "document.querySelectorAll('#all-runs input:not(:checked)').forEach(box => box.click())"
    )
    assert browser.run("document.querySelectorAll('.panel').length") == 7
    assert browser.errors == []
