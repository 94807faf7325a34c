"""The report page: what it says, that only its own script runs, and that it works in a browser."""

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
from torchrex.cli.look import report
from torchrex.errors import RunFolderError
from torchrex.experiments.recipes import get_recipe
from torchrex.posterior import Draws
from torchrex.report import doctor
from torchrex.report.doctor import diagnose, findings_of
from torchrex.report.page import build, page_of, write_page
from torchrex.report.page.build import in_words, total_seconds
from torchrex.report.page.charts import number, rows_to_keep
from torchrex.report.page.details import details_of
from torchrex.report.page.rows import cell, columns, families, shown
from torchrex.report.plots import error_of_mean
from torchrex.report.reader import NotRead, command_to_repeat, find_runs, load_run
from torchrex.runs.config import override, to_json
from written_runs import header, write_json, write_run

HOSTILE = (
    "<!--<script x</script ></script/><script>window.hacked=1</script>"
    "<img src=x onerror='window.hacked=2'>\"'&amp;"
)
no_chromium = pytest.mark.skipif(find_chromium() is None, reason="apt-get install chromium")


def in_browser(test):
    return pytest.mark.slow(no_chromium(test))


def write_mixture(out: Path, recipe="figure1/case3-resgld-F4", seed=0, *, draws=200, chains=4):
    """A run folder as the runner leaves it, filled with noise."""
    config = get_recipe(recipe)
    rungs, pairs = config.n_rungs, config.n_rungs - 1
    made = torch.Generator().manual_seed(seed)
    metrics = {"acceptance_rate": 0.07, "acceptance_rate_se": 0.002, "w1": 1.25 + seed, "w2": 2.5}
    pair = {"pair": [0, 1], "accepted": 70 * chains, "proposed": 1000 * chains}
    folder = write_run(out, config, seed, metrics=metrics, swaps=[pair] * pairs)
    replica_at = torch.randint(rungs, (draws, 1, chains), generator=made)
    Draws(
        values=torch.randn(chains, draws, 1, generator=made),
        steps=torch.arange(1, draws + 1) * 10,
        noise_variance=torch.rand(draws, pairs, chains, generator=made) + 60,
        replica_at=torch.cat([replica_at, 1 - replica_at], 1)[:, :rungs].to(torch.int16),
        energy=torch.randn(draws, rungs, chains, generator=made) * 7,
        n_steps=10 * draws,
        accepted=torch.full((pairs, chains), 70),
        proposed=torch.full((pairs, chains), 1000),
    ).save(folder / "draws.safetensors")
    trace = {
        "edges": torch.linspace(-9, 6, 201),
        "density": torch.rand(chains, 200, generator=made) / 10,
        "curve_steps": torch.arange(100, 2100, 100),
        "w2": torch.rand(20, chains, generator=made) + 1,
    }
    save_file(trace, folder / "trace.safetensors")
    return folder


def write_digits(out, recipe="digits/resghmc", seed=0, *, rows=300, swap_every=50, **changes):
    config = replace(get_recipe(recipe), **changes)
    made = torch.Generator().manual_seed(seed)
    rungs, pairs = config.n_rungs, config.n_rungs - 1
    swapping = rungs > 1 and config.swaps
    when = torch.arange(swap_every, rows if swapping else swap_every, swap_every)
    turned = torch.bucketize(torch.arange(rows), when, right=True) % 2
    tested = rows if swapping else 0
    pair = {"pair": [0, 1], "accepted": len(when), "proposed": tested}
    metrics = {"accuracy": 0.97 + 0.001 * seed, "nll": 0.1, "ece": 0.01}
    more = {"metrics": metrics, "swaps": [pair] * pairs, "steps_done": rows}
    folder = write_run(out, config, seed, **more)
    trace = {
        "steps": torch.arange(rows),
        "energy": 3000 * torch.rand(rows, rungs, generator=made) + 100,
        "noise_variance": torch.rand(rows, pairs, generator=made) * 300,
        "correction": torch.rand(rows, pairs, generator=made) * 70,
        "replica_at": torch.stack([turned, 1 - turned], 1)[:, :rungs],
        "swap_steps": when,
        "swap_pairs": torch.zeros_like(when),
        "accepted": torch.full((pairs,), len(when)),
        "proposed": torch.full((pairs,), tested),
        "probabilities": (4 * torch.randn(500, 10, generator=made)).softmax(1),
    }
    contiguous = {name: tensor.contiguous() for name, tensor in trace.items()}
    save_file(contiguous, folder / "trace.safetensors")
    return folder


class Elements(HTMLParser):
    """What a browser would make of the page: elements, texts of scripts, and the text to read."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.text, self._within = "", ""
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data):
        if self._within == "script":
            name = self.tags[-1][1].get("id")
            self.scripts[name] = self.scripts.get(name, "") + data
        elif self._within != "style":
            self.text += data

    def handle_endtag(self, tag):
        self._within = ""

    def data(self, name: str):
        return json.loads(self.scripts[name])


def page_in(folder, **options) -> Elements:
    write_page([folder], folder / "page.html", **options)
    return Elements(folder / "page.html")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder with complete runs, and a page of it."""
    out = tmp_path_factory.mktemp("demo")
    for recipe in ("figure1/case3-resgld-F1", "figure1/case3-resgld-F4", "figure1/case3-sgld"):
        write_mixture(out, recipe)
    for seed in (0, 1, 2):
        write_digits(out, seed=seed)
    write_digits(out, "digits/independent")
    page = out / "page.html"
    assert write_page([out], page, doctor_seconds=math.inf) == (7, 0, 0, 0)
    return page


def test_everything_that_is_asked_for_is_on_the_page(demo):
    page = Elements(demo)
    text = page.text
    assert text.index("Summary") < text.index("digits") < text.index("Runs one by one")
    # The paper's acceptance at F = 4, and at F = 1.
    assert '<td data-v="7.1" class=n>7.1</td>' in demo.read_text()
    assert "none" in text
    links = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    assert "./figure1/case3-resgld-F4/seed%3D0/" in links
    runs = {run["name"]: run for run in (page.data(f"run-{k}") for k in range(7))}
    run = runs["digits/resghmc, seed 1"]
    kinds = [chart["kind"] for chart in run["charts"]]
    assert kinds == ["energy", "paths", "acceptance", "sigma2", "correction", "reliability"]
    assert run["command"] == "torchrex run digits/resghmc --seed 1 --out runs/again"
    assert json.loads(run["config"]) == to_json(get_recipe("digits/resghmc"))
    assert [table["title"] for table in run["tables"]] == ["Ladder", "Swaps", "Numbers"]
    assert run["charts"][0]["marks"]["x"] == [50, 100, 150, 200, 250]
    mixture = runs["figure1/case3-resgld-F4, seed 0"]
    assert {"density", "w2"} <= {chart["kind"] for chart in mixture["charts"]}
    wanted = diagnose(load_run(demo.parent / "figure1/case3-resgld-F4/seed=0"))
    found = [[each.severity, each.title, each.words] for each in wanted.findings]
    assert mixture["doctor"]["findings"] == found
    assert mixture["doctor"]["problems"] == len(wanted.of("problem"))
    assert "Doctor looked at 7 runs: " in text


def test_the_page_needs_no_network_and_allows_no_foreign_script(demo):
    page = Elements(demo)
    addresses = [attrs.get("src") or attrs.get("href") or "" for _, attrs in page.tags]
    assert not [address for address in addresses if address.startswith(("http", "//"))]
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object")]
    assert "url(" not in demo.read_text().split("<body>")[0].replace("url(#", "")
    policies = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    assert "default-src 'none'" in policies[0]
    assert "unsafe" not in policies[0]


# Rows


def rows_of(*roots):
    (family,) = families([load_run(path) for root in roots for path in find_runs(root)])
    return family.rows


def test_seeds_are_one_row_and_other_settings_another(tmp_path):
    """How often a run was saved, and 150000 for 150000.0, make no difference."""
    for seed in (0, 1):
        write_digits(tmp_path / "a", seed=seed)
    write_digits(tmp_path / "b", hidden=32)
    rows = rows_of(tmp_path)
    labels = [(2, "resghmc (hidden=64)"), (1, "resghmc (hidden=32)")]
    assert [(len(row.runs), row.label) for row in rows] == labels
    usual = get_recipe("icml2020/cifar10-resnet20")
    factor = int(usual.correction_factor)
    write_run(tmp_path / "c", replace(usual, checkpoint_every=7))
    write_run(tmp_path / "c", replace(usual, correction_factor=factor), 1)
    short = write_run(tmp_path / "c", replace(get_recipe("icml2020/cifar10-resnet56"), epochs=30))
    config = json.loads((short / "config.json").read_text())
    del config["smoothing"]  # as of a version that had no such setting
    (short / "config.json").write_text(json.dumps(config))
    titles = [(2, "cifar10-resnet20"), (1, "cifar10-resnet56 (epochs=30)")]
    assert [(len(row.runs), row.title) for row in rows_of(tmp_path / "c")] == titles


def test_what_distinguishes_rows_comes_first(tmp_path):
    """A name has room for four settings; how many more there are is said."""
    usual = get_recipe("icml2020/cifar10-resnet20")
    other = replace(usual, batch_size=128, data_seed=3, epochs=30, hot_lr=2.0)
    write_run(tmp_path / "a", replace(other, temperature=0.02))
    write_run(tmp_path / "b", replace(other, temperature=0.03))
    for row, value in zip(rows_of(tmp_path), (0.02, 0.03), strict=True):
        rest = "batch_size=128, data_seed=3, epochs=30, and 1 more"
        assert row.title == f"cifar10-resnet20 (temperature={value}, {rest})"
        assert row.label == f"cifar10-resnet20 (temperature={value})"


def test_a_seed_counts_once(tmp_path):
    """A copy of a run makes no mean more certain."""
    paths = [write_digits(tmp_path / "a", seed=seed) for seed in (0, 1)]
    (two,) = rows_of(tmp_path / "a")
    shutil.copytree(paths[0], tmp_path / "b" / paths[0].relative_to(tmp_path / "a"))
    (row,) = rows_of(tmp_path)
    assert (len(row.runs), len(row.finished), row.again, two.again) == (3, 2, 1, 0)
    assert row.drawn == row.runs[:2]
    assert cell(row, "accuracy") == cell(two, "accuracy")
    assert row.seeds == "2 of 3, 1 of the same seed"


def test_numbers_have_the_errors_of_their_chains(tmp_path):
    """By hand: 0.002 of each of two runs makes sqrt(2) * 0.002 / 2 = 0.0014; w1 has no error of its
    own: |1.25 - 2.25| / 2.
    """
    assert error_of_mean([1.0, 2.0], [0.002, 0.002]) == pytest.approx(0.0014142, abs=1e-6)
    assert error_of_mean([1.0, 2.0], [0.002, None]) == pytest.approx(0.5)
    assert error_of_mean([1.0], [None]) is None
    for seed in (0, 1):
        write_mixture(tmp_path, seed=seed)
    (row,) = rows_of(tmp_path)
    assert cell(row, "acceptance_rate")[0] == "7.0(1)"
    assert cell(row, "w1")[0] == "1.8(5)"
    assert cell(row, "a new metric") == ("-", None)
    assert (shown(20_000.0, None), shown(0.297887, 0.0188717)) == ("20,000", "0.30(2)")


def test_a_family_shows_the_columns_of_its_configs(tmp_path):
    metrics = {"n_steps": 200_000, "largest_mean_error_in_sd": 0.01, "smallest_sd_ratio": 1.02}
    write_run(tmp_path, get_recipe("tall/logistic"), metrics=metrics)
    (family,) = families([load_run(path) for path in find_runs(tmp_path)])
    assert columns(family) == ["largest_mean_error_in_sd", "smallest_sd_ratio"]


CURVES = {
    "epoch": [0, 1, 2],
    "energy": [[3, 2, 1], [4, 3, 2]],
    "noise_variance": [[1, 1, 1]],
    "correction": [[1, 2, 1]],
    "swap_epochs": [1.5, 1.7],
}


@pytest.mark.parametrize(("made", "words"), [(2, "2 swaps"), (1_374, "the first 2 of 1,374 swaps")])
def test_image_runs_are_drawn_from_their_curves(tmp_path, made, words):
    """There is no trace. A result.json lists the first swaps: they are not all."""
    curves = {**CURVES, "logits_accuracy": [0.1, *[0.93] * 19], "last_accuracy": [0.1] * 20}
    swaps = [{"pair": [0, 1], "accepted": made, "proposed": 5_000, "acceptance_rate": None}]
    numbers = {"logits_best_accuracy": 0.944}
    config = get_recipe("icml2020/cifar10-resnet20")
    run = load_run(write_run(tmp_path, config, curves=curves, swaps=swaps, metrics=numbers))
    charts = details_of(run, tmp_path)["charts"]
    assert [each["kind"] for each in charts] == ["energy", "sigma2", "correction", "accuracy"]
    assert charts[0]["marks"] == {"x": [1.5, 1.7], "name": words}
    assert charts[0]["xLabel"] == "epoch"
    assert charts[2]["series"][0]["y"] == [-1, -1, -1]
    assert charts[3]["yLow"] == 93  # the first draws are far below


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("figure1/case1-resgld", ["noise.scale=3", "temperatures=1,5,25", "correction_factor=inf"]),
        ("digits/resghmc", ["swaps=false", "epochs=60"]),
        ("icml2020/cifar10-resnet20", ["subset=none", "validation=100", "lr_of_mean=0.05"]),
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


def test_a_config_of_another_version_has_a_note(tmp_path):
    config = {**to_json(get_recipe("digits/msgd")), "new_setting": 1}
    command = command_to_repeat(load_run(write_json(tmp_path / "seed=0", config, None)))
    assert "new_setting" in command.note
    unknown = write_json(tmp_path / "other/seed=0", {"recipe": "no/such"}, None)
    assert command_to_repeat(load_run(unknown)).line == ""


# Damage


def damaged_runs(out: Path) -> None:
    write_mixture(out)
    cut = write_mixture(out, seed=1) / "draws.safetensors"
    cut.write_bytes(cut.read_bytes()[:4000])
    (write_digits(out) / "result.json").unlink()
    (write_digits(out, seed=1) / "result.json").write_text("{")
    (write_digits(out, seed=2) / "trace.safetensors").unlink()
    write_run(out, get_recipe("digits/resghmc"), 3, status="failed", error="NaN!")
    odd = header("digits/resghmc", 4, metrics=[1], swaps={"a": 1}, curves=[], date=7)
    config = {"recipe": "digits/resghmc", "temperatures": "hot", "paper": 3}
    write_json(out / "digits/resghmc/seed=4", config, odd)
    (out / "digits/resghmc/seed=5").mkdir()


def test_unfinished_damaged_and_empty_are_shown_as_such(tmp_path):
    damaged_runs(tmp_path)
    (tmp_path / "nothing").mkdir()
    assert write_page([tmp_path, tmp_path / "nothing"], tmp_path / "page.html") == (7, 5, 2, 0)
    page, html = Elements(tmp_path / "page.html"), (tmp_path / "page.html").read_text()
    said = ("draws.safetensors is damaged and not used", "there is no result.json", "NaN!")
    assert all(words in page.text for words in (*said, "line 1 column 2", "7 of 9 folders"))
    by_name = {run["name"]: run for run in (page.data(f"run-{k}") for k in range(7))}
    statuses = [by_name[f"digits/resghmc, seed {seed}"]["status"] for seed in range(5)]
    assert statuses == ["unfinished", "damaged", "finished", "failed", "damaged"]
    assert by_name["digits/resghmc, seed 0"]["charts"]  # what is there is drawn
    assert by_name["figure1/case3-resgld-F4, seed 1"]["damaged"] == ["draws.safetensors"]
    rows = [row for row in html.split("<tr>")[1:] if 'class="badge empty"' in row]
    assert ["digits/resghmc/seed=5" in row for row in rows] == [True, False]
    assert "input" not in rows[0], "there is nothing to show"
    assert "1 of 6, 2 damaged, 1 empty" in html  # the others: one failed, one is unfinished


@pytest.mark.parametrize("text", ["{", "[]", None, '{"recipe": "digits/resghmc", "hidden": "hot"}'])
def test_a_run_without_its_config_stays_with_its_recipe(tmp_path, text):
    for seed in (0, 1, 2):
        folder = write_digits(tmp_path, seed=seed)
    broken = tmp_path / "digits/resghmc/seed=0/config.json"
    broken.unlink() if text is None else broken.write_text(text)
    runs = [load_run(path) for path in find_runs(tmp_path)]
    empty = NotRead(tmp_path / "digits/resghmc/seed=3", "empty", "")
    ((row,),) = (family.rows for family in families(runs, [empty]))
    assert [run.seed for run in row.runs] == [0, 1, 2]
    assert [run.seed for run in row.finished] == [1, 2]
    assert row.config == json.loads((folder / "config.json").read_text())
    assert row.seeds == f"2 of 4, 1 {'without config.json' if text is None else 'damaged'}, 1 empty"
    (alone,) = families(runs[:1])
    assert (alone.rows[0].recipe, alone.rows[0].label) == ("digits/resghmc", "resghmc")


def test_time_that_runs_shared_counts_once(tmp_path):
    def timed(seed, seconds, minute, recipe="clean/cifar10-resnet20", **more):
        date = f"2026-01-02T03:{minute:02d}:00+00:00"
        write_run(tmp_path, get_recipe(recipe), seed, wall_seconds=seconds, date=date, **more)

    for seed, minute in ((0, 1), (1, 1), (2, 2)):  # one clock
        timed(seed, 600.123456789, minute)
    timed(3, 600.5, 1)  # another clock
    timed(5, 600.123456789, 1, device="TPU")
    timed(6, 600.123456789, 1, replicas_side_by_side=2)  # it says that it was alone
    timed(7, 600.123456789, 1, replicas_side_by_side=8)
    timed(0, 600.123456789, 1, recipe="digits/sghmc")  # never trains with others
    runs = [load_run(path) for path in find_runs(tmp_path)]
    assert total_seconds(runs) == pytest.approx(5 * 600.2, abs=1)
    page = page_in(tmp_path)
    assert "50.0 min of computing" in page.text
    assert page.text.count("600.1*") == 4
    assert (in_words(12.34), in_words(1043.3), in_words(7000.0)) == ("12.3 s", "17.4 min", "1.9 h")


# What doctor says


@pytest.mark.parametrize("write", ["mixture", "digits"])
def test_the_noise_of_the_page_is_that_of_doctor(tmp_path, write):
    """One s, of the last quarter: a sigma2 that was large in the burn-in changes nothing."""
    run = load_run((write_mixture if write == "mixture" else write_digits)(tmp_path))
    variance = run.history.noise_variance.clone()
    variance[: len(variance) // 2] *= 100
    run = replace(run, history=replace(run.history, noise_variance=variance))
    wanted = next(each.numbers for each in findings_of(run) if "noise_s" in each.numbers)
    tables = {table["title"]: table for table in details_of(run, Path("page.html"))["tables"]}
    row = dict(zip(tables["Swaps"]["head"], tables["Swaps"]["rows"][0], strict=True))
    assert row["noise s"] == f"{wanted['noise_s']:.3g}"
    assert row["2Φ(−s/2), %"] == f"{100 * wanted['allowed_acceptance']:.3g}"
    assert row["σ², nats²"].startswith(f"{wanted['noise_variance']:.3g}"[:3])
    assert ("of all 4 chains together" in tables["Swaps"]["note"]) == (write == "mixture")


def test_a_page_does_not_fail_because_doctor_does(tmp_path, monkeypatch):
    write_mixture(tmp_path)
    write_digits(tmp_path)
    real = doctor.diagnose

    def fails(run, *, quick):
        if run.recipe.startswith("digits"):
            raise ZeroDivisionError("by <b>zero</b>")
        return real(run, quick=quick)

    monkeypatch.setattr(doctor, "diagnose", fails)
    page = page_in(tmp_path)
    said = [page.data(f"run-{k}")["doctor"] for k in range(2)]
    assert said[0]["verdict"] == "doctor failed on this run (ZeroDivisionError: by <b>zero</b>)"
    assert said[1]["findings"]
    assert "Doctor looked at 1 run" in page.text
    assert "It did not look at 1" in page.text


def test_doctor_is_not_waited_for(tmp_path, monkeypatch):
    """The quick runs come first, and what is not asked is said."""
    write_mixture(tmp_path)
    (write_digits(tmp_path) / "result.json").unlink()
    runs = [load_run(path) for path in reversed(find_runs(tmp_path))]  # the density first
    asked = []
    answer = build.unknown("asked")
    monkeypatch.setattr(build, "advice_of", lambda run, quick: asked.append(run.recipe) or answer)
    clock = iter([0.0, 5.0, 15.0])
    monkeypatch.setattr(build.time, "monotonic", lambda: next(clock))
    found = build.advice_for(runs, seconds=10.0)
    assert asked == ["digits/resghmc"]
    assert found[id(runs[0])]["verdict"].startswith("doctor was not asked")
    monkeypatch.undo()
    # What the page says of missing files is not said again.
    said = [words for _, _, words in build.advice_of(runs[1])["findings"]]
    assert runs[1].problems
    assert not [words for words in said if words.startswith(runs[1].problems[0])]


def hostile_run(out: Path) -> None:
    write_mixture(out)
    config = {**to_json(get_recipe("digits/resghmc")), "recipe": HOSTILE, HOSTILE: HOSTILE}
    words = dict.fromkeys(("status", "device", "error", "date"), HOSTILE)
    more = {"versions": {HOSTILE: HOSTILE}, "metrics": {HOSTILE: 1.0}}
    result = header(HOSTILE, 0, **words, **more)
    write_json(out / "<img src=x onerror=window.hacked=3>" / "seed=0", config, result)


def test_names_from_files_are_text_and_not_markup(tmp_path):
    hostile_run(tmp_path)
    page = page_in(tmp_path, title=HOSTILE)
    kinds = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    assert kinds.count(None) == 1, "one script of ours and no other"
    assert all("id" in attrs for tag, attrs in page.tags if tag == "script" and attrs.get("type"))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert HOSTILE in [page.data(f"run-{k}")["status"] for k in range(2)]


def test_long_traces_keep_their_extremes_and_the_rows_around_swaps(tmp_path):
    history = load_run(write_digits(tmp_path, rows=50_000, swap_every=9_999)).history
    history.energy[31_234, 0, 0] = 1e6
    rows = rows_to_keep(history).tolist()
    assert len(rows) < 4000
    assert 31_234 in rows
    for swap in (9_999, 49_995):
        assert set(range(swap - 8, swap + 5)) <= set(rows)
    assert rows == sorted(set(rows))
    values = (1234567.8, 0.1 + 0.2, float("nan"), True)
    assert [number(value) for value in values] == [1234600, 0.3, None, None]


def many(out: Path, n_mixtures: int, n_digits: int, **sizes):
    mixture = load_run(write_mixture(out, draws=sizes["draws"], chains=64))
    network = load_run(write_digits(out, rows=sizes["rows"], swap_every=sizes["rows"] // 700))
    runs = [replace(mixture, recipe=f"figure1/case3-{k}") for k in range(n_mixtures)]
    return runs + [replace(network, seed=k) for k in range(n_digits)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "draws", "rows", "most"), [((11, 20), 2000, 2000, 5e6), ((25, 25), 10_000, 100_000, 20e6)]
)
def test_pages_stay_small(tmp_path, n, draws, rows, most):
    """Runs as large as those of `make demo`, and 50 long ones, filled with noise."""
    runs = many(tmp_path, *n, draws=draws, rows=rows)
    assert len(page_of(runs, tmp_path / "page.html", title="demo").encode()) < most


def test_the_command(tmp_path):
    app = typer.Typer()
    app.command()(report)
    folder, page = write_mixture(tmp_path), tmp_path / "new" / "page.html"
    done = CliRunner().invoke(app, [str(tmp_path), "--out", str(page), "--title", "A & B"])
    assert done.exit_code == 0, done.output
    assert re.search(r"\(1 run; \d+ kB, opens without", done.output)
    assert "<title>A &amp; B</title>" in page.read_text()
    again = CliRunner().invoke(app, [str(tmp_path), "--out", str(page), "--doctor", "none"])
    assert again.exit_code == 0, "a page is replaced by a newer one"
    before = (folder / "result.json").read_bytes()
    (tmp_path / "empty/resghmc/seed=0").mkdir(parents=True)
    for root, out, words in (
        (tmp_path / "none", page, "there is no folder"),
        (tmp_path, tmp_path, "is a folder"),
        (tmp_path, folder / "result.json", "did not write"),
        (tmp_path / "empty", page, "it holds nothing of a run"),
    ):
        with pytest.raises(RunFolderError, match=words):
            write_page([root], out)
    assert (folder / "result.json").read_bytes() == before


# In a real browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


SVG = "document.querySelector('.panel .chart[data-kind=energy] > svg')"
ROWS = "[...document.querySelectorAll('#all-runs tbody tr')]"
CLICK_ALL = "document.querySelectorAll('#all-runs input:not(:checked)').forEach(b => b.click())"


def panel_of_digits(browser, demo):
    browser.look(height=1200)
    browser.open(demo)
    browser.click("#none")
    row = f"{ROWS}.find(r => r.textContent.includes('digits/resghmc'))"
    browser.run(f"{row}.querySelector('input').click()")
    browser.run("document.querySelector('.panel').scrollIntoView()")
    browser.run("new Promise(done => setTimeout(done, 300))")


def view(browser):
    return [float(end) for end in browser.run(f"{SVG}.dataset.view").split()]


@in_browser
def test_it_loads_without_a_complaint_and_prints_all_charts(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(page_of(many(tmp_path, 11, 20, draws=2000, rows=2000), page, title="demo"))
    browser.look(height=1600)
    browser.open(page)
    assert browser.errors == []
    assert browser.run("document.querySelectorAll('.panel').length") == 2
    drawn = "document.querySelectorAll('.chart > svg[data-view]').length"
    browser.run("new Promise(done => setTimeout(done, 300))")
    before = browser.run(drawn)
    there = browser.run("document.querySelectorAll('.chart > svg').length")
    assert 0 < before < there, "those far below have not been in sight"
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run(drawn) == there


@in_browser
def test_a_chart_reads_values_and_zooms(browser, demo):
    panel_of_digits(browser, demo)
    sides = "(b => [b.left, b.top, b.width, b.height])"
    left, top, width, height = browser.run(f"{sides}({SVG}.getBoundingClientRect())")
    middle, energy = top + height / 2, ".panel .chart[data-kind=energy]"
    browser.mouse("mouseMoved", left + width / 2, middle)
    readout = browser.run(f"document.querySelector('{energy} output').textContent")
    assert readout.startswith("step 1")
    assert "rung 0 (coldest)" in readout
    assert view(browser) == [0, 299]
    browser.mouse("mousePressed", left + width * 0.4, middle, button="left", clickCount=1)
    browser.mouse("mouseMoved", left + width * 0.6, middle, button="left", buttons=1)
    browser.mouse("mouseReleased", left + width * 0.6, middle, button="left", clickCount=1)
    low, high = view(browser)
    assert 60 < low < 130 < high < 200
    paths = "document.querySelector('.panel .chart[data-kind=paths] > svg').dataset.view"
    assert browser.run(paths) == browser.run(f"{SVG}.dataset.view"), "they zoom together"
    browser.click(f"{energy} .bar button:nth-child(3)")  # all of it
    assert view(browser) == [0, 299]
    for swap in (50, 100):  # from swap to swap
        browser.click(f"{energy} .next")
        low, high = view(browser)
        assert (low + high) / 2 == pytest.approx(swap, abs=1)
        assert high - low < 60
    lines = browser.run(f"{SVG}.querySelectorAll('path.s').length")
    browser.click(f"{energy} .legend button")
    assert browser.run(f"{SVG}.querySelectorAll('path.s').length") < lines, "the legend hides one"
    browser.click(f"{energy} .bar button:nth-child(3)")
    browser.run(f"{SVG}.focus()")
    for key, wanted in (("+", (74.75, 224.25)), ("ArrowRight", (104.65, 254.15)), ("0", (0, 299))):
        text = key if len(key) == 1 else ""
        browser.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        assert view(browser) == pytest.approx(wanted)
    assert browser.errors == []


@in_browser
def test_tables_sort_by_number_and_back_and_filter(browser, demo):
    browser.look()
    browser.open(demo)
    for descending in (False, True):
        browser.click("#all-runs th:nth-child(6) button")
        cells = browser.run(f"{ROWS}.map(r => r.cells[5].textContent)")
        there = [int(text.replace(",", "")) for text in cells if text]
        assert there == sorted(there, reverse=descending)
        assert cells[-1] == "", "what is not known comes last"
    sort = browser.run("document.querySelector('#all-runs th:nth-child(6)').ariaSort")
    assert sort == "descending"
    for word, n in (("F4", 1), ("zz", 0)):
        browser.run(f"document.getElementById('filter').value = '{word}'")
        browser.run("document.getElementById('filter').dispatchEvent(new Event('input'))")
        assert browser.run(f"{ROWS}.filter(r => !r.hidden).length") == n
        assert browser.run("document.getElementById('no-match').hidden") == (n > 0)


@in_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 400, 1280])
def test_layouts_hold(browser, demo, width, dark):
    """Nothing is beyond the edge but what scrolls by itself, and text contrasts with its ground."""
    browser.look(width=width, dark=dark)
    browser.open(demo)
    browser.run("document.querySelectorAll('#all-runs input:not(:checked)')[0].click()")
    assert browser.run("document.documentElement.scrollWidth") <= width
    beyond = browser.run(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, pre, svg')"
        f" && e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert beyond == []
    text, ground = browser.run(
        "['color', 'backgroundColor'].map(p => getComputedStyle(document.body)[p]"
        ".match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"
    )
    assert (text > 600 and ground < 100) if dark else (text < 150 and ground > 700)
    assert browser.errors == []


@in_browser
def test_a_crafted_run_cannot_run_a_script(browser, tmp_path):
    hostile_run(tmp_path)
    write_page([tmp_path], tmp_path / "page.html", title=HOSTILE)
    browser.look()
    browser.open(tmp_path / "page.html")
    browser.run(CLICK_ALL)
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == HOSTILE
    assert browser.errors == []


@in_browser
def test_what_doctor_says_is_read_in_the_panel(browser, demo):
    """Problems and warnings are open, what is fine is folded."""
    panel_of_digits(browser, demo)
    said = json.loads(browser.run("document.getElementById('run-1').textContent"))["doctor"]
    items = "[...document.querySelectorAll('.panel .doctor > ul > li')].map(e => e.textContent)"
    grave = [each for each in said["findings"] if each[0] in ("problem", "warning")]
    wanted = [f"{severity} {title}. {words}" for severity, title, words in grave]
    assert browser.run(items) == wanted != []
    folded = "[...document.querySelectorAll('.panel .doctor details')]"
    shown = browser.run(f"{folded}.map(e => [e.open, e.querySelectorAll('li').length])")
    rest = len(said["findings"]) - len(grave)
    assert shown == ([[False, rest]] if rest else [])


@in_browser
def test_damaged_runs_open_too(browser, tmp_path):
    damaged_runs(tmp_path)
    write_page([tmp_path], tmp_path / "page.html")
    browser.look()
    browser.open(tmp_path / "page.html")
    browser.run(CLICK_ALL)
    assert browser.run("document.querySelectorAll('.panel').length") == 7
    assert browser.errors == []
