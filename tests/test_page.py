"""The report page: what it says, that only its own script runs, and that it works in a browser."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import time
from dataclasses import replace
from html import escape, unescape
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
from torchrex.report import doctor, figures
from torchrex.report.doctor import diagnose, findings_of
from torchrex.report.figures import rows_to_keep
from torchrex.report.page import build, page_of, write_page
from torchrex.report.page.build import in_words, total_seconds
from torchrex.report.page.details import swaps_of
from torchrex.report.page.drawn import of_answers, of_ladder
from torchrex.report.page.ladder import pooled
from torchrex.report.page.rows import cell, columns, groups, settings_that_differ, shown
from torchrex.report.plots import error_of_mean, look
from torchrex.report.reader import NotRead, command_to_repeat, find_runs, load_run
from torchrex.runs.config import override, to_json
from written_runs import header, write_json, write_run

HOSTILE = (
    "<!--<script x</script ></script/><script>window.hacked=1</script>"
    "<img src=x onerror='window.hacked=2'>\"'&amp;<a href='javascript:window.hacked=4'>b</a>%{x}"
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


def figures_in(page: Path, family: str = "") -> list[tuple[str, dict]]:
    """Kind and data of the figures of the page, or of those within the section of a family."""
    html = page.read_text()
    if family:
        html = re.search(rf"<h2><span[^>]*></span>{family}<.*?</section>", html, re.DOTALL)[0]
    found = re.findall(r'<figure data-kind="(\w+)">.*?json">(.*?)</script>', html, re.DOTALL)
    return [(kind, json.loads(text)) for kind, text in found]


def run_in(page: Path, name: str) -> str:
    """What the page says of one run."""
    parts = page.read_text().split('<details class="run">')[1:]
    (mine,) = (
        part.split("</section>")[0] for part in parts if part.startswith(f"<summary>{name} ")
    )
    return unescape(mine)


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
    text, html = page.text, demo.read_text()
    assert text.index("Verdict") < text.index("Means over finished seeds") < text.index("Swaps")
    # The paper's acceptance at F = 4, and at F = 1.
    assert '<td data-v="7.1" class=n>7.1</td>' in html
    assert "none" in text
    links = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    assert "./figure1/case3-resgld-F4/seed%3D0/" in links
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {link[1:] for link in links if link.startswith("#")} <= ids, "links lead somewhere"
    kinds = [kind for kind, _ in figures_in(demo, "digits/resghmc")]
    assert kinds == ["acceptance", "flow", "energy", "noise", "reliability"]
    kinds = {kind for kind, _ in figures_in(demo, "figure1/case3-resgld-F4")}
    assert {"acceptance", "flow", "energy", "density", "distance"} <= kinds
    assert {"density", "distance"} <= {kind for kind, _ in figures_in(demo)}
    run = run_in(demo, "digits/resghmc, seed 1")
    assert "torchrex run digits/resghmc --seed 1 --out runs/again" in run
    config = re.search("config.json</summary><pre>(.*?)</pre>", run, re.DOTALL)[1]
    assert json.loads(config) == to_json(get_recipe("digits/resghmc"))
    assert all(f"<h4>{title}</h4>" in run for title in ("Ladder", "Numbers"))
    assert "before annealing" not in text
    wanted = diagnose(load_run(demo.parent / "figure1/case3-resgld-F4/seed=0"))
    mixture = run_in(demo, "figure1/case3-resgld-F4, seed 0")
    assert all(each.words in mixture for each in wanted.findings)
    for each in wanted.of("problem"):
        assert f"<b>{escape(each.title)}</b>: " in html.split('id="families"')[0], "in the verdict"
    assert "Doctor looked at 7 runs: " in text


def test_a_page_of_one_run_is_a_string(tmp_path):
    """As a notebook asks for it; the same each time."""
    run = load_run(write_digits(tmp_path))
    page = page_of([run])
    assert "<title>torchrex: digits/resghmc, seed 0</title>" in page
    assert page == page_of([load_run(run.path)])


def test_the_page_needs_no_network_and_allows_no_foreign_script(demo):
    page = Elements(demo)
    addresses = [attrs.get("src") or attrs.get("href") or "" for _, attrs in page.tags]
    assert not [address for address in addresses if address.startswith(("http", "//"))]
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object")]
    assert "url(" not in demo.read_text().split("<body>")[0].replace("url(#", "")
    policies = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    assert "default-src 'none'" in policies[0]
    assert policies[0].count("unsafe") == 1, "style attributes, which Plotly sets"
    assert "style-src-attr 'unsafe-inline';" in policies[0]


# Rows


def rows_of(*roots):
    (group,) = groups([load_run(path) for root in roots for path in find_runs(root)])
    return group.families


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
    large = (shown(498_128.0, 36_794.0), shown(-498_128.0, 367.0), shown(30.0, 500.0))
    assert large == ("5.0(4)e5", "-4.981(4)e5", "0(5)e2")
    assert (shown(155.0, 10.0), shown(52.0, 120.0)) == ("155(10)", "1(1)e2")


def test_posterior_means_are_values_with_errors(tmp_path):
    """A run of `sample`: twelve pairs, of which the table of families shows the first few."""
    metrics = {"ess": 812.5, "log_evidence": -33_512.25, "log_evidence_se": 0.31}
    for k in range(12):
        metrics |= {
            f"mean_{k}": k + 0.123,
            f"mean_{k}_se": 0.004,
            f"sd_{k}": 2.5,
            f"sd_{k}_se": 0.1,
        }
    folder = write_mixture(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "metrics": metrics}))
    write_page([tmp_path], tmp_path / "page.html", doctor_seconds=0)
    run = run_in(tmp_path / "page.html", "figure1/case3-resgld-F4, seed 0")
    numbers = run.split("<h4>Numbers</h4>")[1].split("</table>")[0]
    cells = [re.sub("<[^>]*>", "|", row).strip("|").split("|") for row in numbers.split("<tr>")]
    read = {cell[0]: cell[2] for cell in cells if len(cell) > 2}
    assert len(read) == 27
    assert (read["mean 11"], read["sd 0"]) == ("11.123(4)", "2.5(1)")
    assert (read["log evidence"], read["effective draws"]) == ("-33512.2(3)", "812.5")


def test_a_family_shows_the_columns_of_its_configs(tmp_path):
    metrics = {"n_steps": 200_000, "largest_mean_error_in_sd": 0.01, "smallest_sd_ratio": 1.02}
    write_run(tmp_path, get_recipe("tall/logistic"), metrics=metrics)
    (group,) = groups([load_run(path) for path in find_runs(tmp_path)])
    assert columns(group) == (["largest_mean_error_in_sd", "smallest_sd_ratio"], 2)


def test_a_method_has_one_colour_and_settings_that_differ_are_shown(tmp_path):
    write_digits(tmp_path)
    write_digits(tmp_path, "digits/sghmc")
    write_digits(tmp_path / "b", hidden=32)
    write_run(tmp_path, get_recipe("icml2020/cifar10-resnet20"))
    digits, images = groups([load_run(path) for path in find_runs(tmp_path)])
    colours = {family.label: family.colour for family in digits.families}
    assert colours["resghmc (hidden=64)"] == colours["resghmc (hidden=32)"] != colours["sghmc"]
    assert images.families[0].colour == colours["resghmc (hidden=32)"] == look("reSGHMC").color
    for name in ("case3-resgld-F1", "case3-resgld-F2", "case3-sgld"):
        write_run(tmp_path / "c", get_recipe(f"figure1/{name}"))
    (mixtures,) = groups([load_run(path) for path in find_runs(tmp_path / "c")])
    of = {family.short: family.colour for family in mixtures.families}
    assert of["case3-resgld-F1"] == look("reSGHMC").color
    assert of["case3-resgld-F2"] == look("reSGLD, F=2").color
    assert of["case3-sgld"] == colours["sghmc"]
    different = settings_that_differ(digits)
    assert sorted(different["hidden"]) == [32, 64, 64]
    assert "recipe" not in different
    write_page([tmp_path], tmp_path / "page.html")
    table = (
        (tmp_path / "page.html").read_text().split("Settings that differ")[1].split("</table>")[0]
    )
    assert '<td data-v="32" class=n>32</td>' in table


def test_seeds_are_pooled_as_chains(tmp_path):
    """Two seeds of four chains: swaps add up, errors are those of eight chains, and a seed that
    recorded other steps is left out and counted.
    """
    runs = [load_run(write_mixture(tmp_path, seed=seed)) for seed in (0, 1)]
    other = load_run(write_mixture(tmp_path, seed=2, draws=100))
    both = pooled([*runs, other])
    assert (both.history.n_chains, both.runs) == (8, {"seed 0": 0, "seed 1": 4})
    (pair,) = both.pairs
    assert (pair.accepted, pair.proposed) == (8 * 70, 8 * 1000)
    assert pair.observed[0] == pytest.approx(0.07)
    assert both.barrier == pytest.approx((0.93, 0), abs=1e-6)
    assert "1 more recorded nothing of it or other steps: left out" in both.words
    assert torch.equal(both.history.energy[:, :, 4:], runs[1].history.energy)
    digits = [load_run(write_digits(tmp_path, seed=seed, swap_every=40 + seed)) for seed in (0, 1)]
    swaps = pooled(digits).history.swaps
    assert swaps.step[swaps.chain == 1].tolist() == digits[1].history.swaps.step.tolist()
    assert pooled(digits[:1]).barrier[0] == pytest.approx(1 - 7 / 300)


CURVES = {
    "epoch": [0, 1, 2],
    "energy": [[3, 2, 1], [4, 3, 2]],
    "noise_variance": [[1, 1, 1]],
    "correction": [[1, 2, 1]],
    "swap_epochs": [1.5, 1.7],
}


def test_energies_without_noise_have_no_figure_of_it(tmp_path):
    write_mixture(tmp_path)
    (row,) = rows_of(tmp_path)
    exact = replace(row.ladder.history, noise_variance=torch.zeros(200, 1, 4))
    ladder = replace(row.ladder, history=exact)
    assert "noise" not in dict(of_ladder(ladder, "#000000"))
    assert "energies have no noise" in swaps_of(ladder)
    assert "noise" in dict(of_ladder(row.ladder, "#000000"))
    assert "energies have no noise" not in swaps_of(row.ladder)


@pytest.mark.parametrize("made", [2, 1_374])
def test_image_runs_are_drawn_from_their_curves(tmp_path, made):
    """There is no trace. A result.json lists the first swaps: they are not all."""
    curves = {**CURVES, "logits_accuracy": [0.1, *[0.93] * 19], "last_accuracy": [0.1] * 20}
    swaps = [{"pair": [0, 1], "accepted": made, "proposed": 5_000, "acceptance_rate": None}]
    numbers = {"logits_best_accuracy": 0.944}
    config = get_recipe("icml2020/cifar10-resnet20")
    run = load_run(write_run(tmp_path, config, curves=curves, swaps=swaps, metrics=numbers))
    (group,) = groups([run])
    drawn = dict(of_ladder(group.families[0].ladder, "#000000"))
    known = ["flow"] if made == 2 else []
    assert list(drawn) == ["acceptance", *known, "energy", "noise"]
    assert drawn["acceptance"].data[0].y.tolist() == pytest.approx([made / 50])
    steps = [each * config.steps_per_epoch for each in (1.5, 1.7)]
    marks = [trace.x.tolist() for trace in drawn["energy"].data if trace.name == "swaps"]
    assert marks == ([[round(each) for each in steps]] if made == 2 else [])
    assert drawn["noise"].data[0].y.tolist() == [1, 1, 1]
    ((kind, averages),) = of_answers(group.families)
    assert kind == "averages"
    assert 92 < averages.layout.yaxis.range[0] < 93  # the first draws are far below
    assert "At the first step, before annealing." in page_of([run], doctor_seconds=0)


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
    for seed, status in enumerate(("unfinished", "damaged", "finished", "failed", "damaged")):
        said = run_in(tmp_path / "page.html", f"digits/resghmc, seed {seed}")
        assert f'class="badge {status}"' in said.split("</summary>")[0]
    assert "energy" in dict(figures_in(tmp_path / "page.html", "digits/resghmc"))
    cut = run_in(tmp_path / "page.html", "figure1/case3-resgld-F4, seed 1")
    assert 'class="badge damaged"' in cut.split("</summary>")[0]
    listed = html.split('class="problems"')[1].split("</section>")[0]
    empty = [line for line in listed.split("<li>") if 'class="badge empty"' in line]
    assert sum("digits/resghmc/seed=5" in line for line in empty) == 1
    assert len(empty) == 2
    assert "1 of 6, 2 damaged, 1 empty" in html  # the others: one failed, one is unfinished


@pytest.mark.parametrize("text", ["{", "[]", None, '{"recipe": "digits/resghmc", "hidden": "hot"}'])
def test_a_run_without_its_config_stays_with_its_recipe(tmp_path, text):
    for seed in (0, 1, 2):
        folder = write_digits(tmp_path, seed=seed)
    broken = tmp_path / "digits/resghmc/seed=0/config.json"
    broken.unlink() if text is None else broken.write_text(text)
    runs = [load_run(path) for path in find_runs(tmp_path)]
    empty = NotRead(tmp_path / "digits/resghmc/seed=3", "empty", "")
    ((row,),) = (group.families for group in groups(runs, [empty]))
    assert [run.seed for run in row.runs] == [0, 1, 2]
    assert [run.seed for run in row.finished] == [1, 2]
    assert row.config == json.loads((folder / "config.json").read_text())
    assert row.seeds == f"2 of 4, 1 {'without config.json' if text is None else 'damaged'}, 1 empty"
    (alone,) = groups(runs[:1])
    assert (alone.families[0].recipe, alone.families[0].label) == ("digits/resghmc", "resghmc")


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
    ladder = pooled([run])
    (pair,) = ladder.pairs
    assert pair.noise == pytest.approx(wanted["noise_s"])
    assert pair.allowed == pytest.approx(wanted["allowed_acceptance"])
    assert pair.noise_variance[0] == pytest.approx(wanted["noise_variance"])
    cells = re.findall("<td[^>]*>(.*?)</td>", swaps_of(ladder))
    assert cells[-1] == f"{100 * wanted['allowed_acceptance']:.3g}"
    assert ("4 chains of 1 run" in swaps_of(ladder)) == (write == "mixture")


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
    assert "doctor failed on this run (ZeroDivisionError: by <b>zero</b>)" in page.text
    assert "<b>zero" not in (tmp_path / "page.html").read_text()
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
    """Texts of a stranger in every place, in names of curves too."""
    write_mixture(out)
    config = {**to_json(get_recipe("digits/resghmc")), "recipe": HOSTILE, HOSTILE: HOSTILE}
    words = dict.fromkeys(("status", "device", "error", "date"), HOSTILE)
    more = {"versions": {HOSTILE: HOSTILE}, "metrics": {HOSTILE: 1.0}}
    result = header(HOSTILE, 0, **words, **more)
    write_json(out / "<img src=x onerror=window.hacked=3>" / "seed=0", config, result)
    for name, hidden in (("a", 64), ("b", 32)):
        folder = write_digits(out / name, hidden=hidden)
        config = json.loads((folder / "config.json").read_text()) | {HOSTILE: HOSTILE + name}
        (folder / "config.json").write_text(json.dumps(config))


def test_names_from_files_are_text_and_not_markup(tmp_path):
    hostile_run(tmp_path)
    page = page_in(tmp_path, title=HOSTILE)
    kinds = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    assert kinds.count(None) == 1, "one script of ours and no other"
    assert set(kinds) == {None, "application/json", "text/plain"}
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert all(link.startswith(("./", "#")) for link in links)
    assert HOSTILE in page.text
    drawn = figures_in(tmp_path / "page.html")
    names = [trace.get("name", "") for _, each in drawn for trace in each["data"]]
    assert sum("onerror" in name for name in names) >= 2
    assert not [name for name in names if "<" in name]


def test_long_traces_keep_their_extremes_and_the_rows_around_swaps(tmp_path):
    history = load_run(write_digits(tmp_path, rows=50_000, swap_every=9_999)).history
    history.energy[31_234, 0, 0] = 1e6
    rows = rows_to_keep(history).tolist()
    assert len(rows) < 4000
    assert 31_234 in rows
    for swap in (9_999, 49_995):
        assert set(range(swap - 8, swap + 5)) <= set(rows)
    assert rows == sorted(set(rows))


def many(out: Path, n_mixtures: int, n_digits: int, **sizes):
    mixture = load_run(write_mixture(out, draws=sizes["draws"], chains=64))
    network = load_run(write_digits(out, rows=sizes["rows"], swap_every=sizes["rows"] // 700))
    runs = [replace(mixture, recipe=f"figure1/case3-{k}") for k in range(n_mixtures)]
    return runs + [replace(network, seed=k) for k in range(n_digits)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "draws", "rows", "most"), [((11, 20), 2000, 2000, 5e6), ((25, 25), 10_000, 100_000, 8e6)]
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
    assert re.search(r"\(1 run; \d\.\d MB, opens without", done.output)
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


OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true })"
DRAWN = "document.querySelectorAll('figure[data-drawn]').length"
FIGURES = "[...document.querySelectorAll('figure')]"


def wait(browser, condition, seconds=30):
    """Until a condition holds on the page."""
    script = f"""new Promise((done, fail) => {{
        const until = performance.now() + 1000 * {seconds};
        const look = () => ({condition}) ? done(true)
            : performance.now() > until ? fail(new Error("it never held")) : setTimeout(look, 50);
        look();
    }})"""
    browser.run(script)


def open_with_figures(browser, page, **how):
    """As tall as the page, so that every figure of what is open is in sight and drawn."""
    browser.look(**how)
    browser.open(page)
    browser.run(OPEN_ALL)
    height = browser.run("document.documentElement.scrollHeight")
    browser.look(**{**how, "height": height})
    wait(browser, f"{DRAWN} === document.querySelectorAll('figure').length")


@in_browser
def test_a_page_of_fifty_runs_loads_without_a_complaint(browser, tmp_path):
    """Only what is in sight is drawn; what is closed is drawn when it is opened."""
    page = tmp_path / "page.html"
    page.write_text(page_of(many(tmp_path, 25, 25, draws=2000, rows=2000), page, title="demo"))
    browser.look(height=1600)
    browser.open(page)
    wait(browser, f"{DRAWN} > 0")
    there = browser.run("document.querySelectorAll('figure').length")
    assert 0 < browser.run(DRAWN) < there / 4
    before = browser.run(DRAWN)
    browser.run("location.hash = document.querySelectorAll('details.family > div')[9].id")
    wait(browser, f"{DRAWN} > {before}")
    assert browser.run("document.querySelectorAll('details.family')[9].open"), "a link opens it"
    assert browser.errors == []


@in_browser
def test_the_first_two_figures_do_not_wait_to_be_seen(browser, demo):
    browser.look(height=100)
    browser.open(demo)
    wait(browser, f"{DRAWN} === 2")
    assert browser.run(f"{FIGURES}.slice(0, 3).map(f => 'drawn' in f.dataset)") == [
        True,
        True,
        False,
    ]


@in_browser
def test_every_figure_is_drawn_and_those_over_the_steps_zoom_together(browser, demo):
    open_with_figures(browser, demo, width=1400)
    marks = browser.run(f"{FIGURES}.map(f => f.querySelectorAll('.main-svg path').length)")
    assert min(marks) > 0
    family = "[...document.querySelectorAll('.family')].find(f => f.querySelector('h2')"
    family += ".textContent.includes('digits/resghmc'))"
    plot = f"{family}.querySelector('figure[data-kind={{}}] .plot')"
    energy, others = plot.format("energy"), ("noise",)
    browser.run(f"Plotly.relayout({energy}, {{'xaxis.range': [90, 110]}}).then(() => 1)")
    for kind in others:
        wait(browser, f"Math.abs({plot.format(kind)}.layout.xaxis.range[0] - 90) < 1")
    browser.run(f"Plotly.relayout({energy}, {{'xaxis.autorange': true}}).then(() => 1)")
    wait(browser, f"{plot.format('noise')}.layout.xaxis.range[1] > 200")
    assert browser.errors == []


@in_browser
def test_figures_follow_the_colour_scheme(browser, demo):
    ground = "document.querySelector('figure[data-drawn] .plot')._fullLayout.paper_bgcolor"
    browser.look(height=1600)
    browser.open(demo)
    wait(browser, f"{DRAWN} > 0")
    assert browser.run(ground) == figures.LIGHT["ground"]
    browser.look(height=1600, dark=True)
    wait(browser, f"{ground} === '{figures.DARK['ground']}'")


@in_browser
def test_without_scripts_texts_and_tables_are_there(browser, demo):
    browser.look()
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.send("Page.navigate", url=demo.resolve().as_uri())
        time.sleep(2)
        document = browser.send("DOM.getDocument", depth=0)["root"]["nodeId"]
        for selector, shown in (
            ("table", True),
            (".verdict, #verdict p", True),
            (".figures", False),
        ):
            node = browser.send("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
            try:
                box = browser.send("DOM.getBoxModel", nodeId=node)["model"]
            except AssertionError:
                box = {"height": 0}
            assert (box["height"] > 0) == shown, selector
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)


@in_browser
def test_tables_sort_by_number_and_back(browser, demo):
    browser.look()
    browser.open(demo)
    table = "[...document.querySelectorAll('table.sortable')]"
    table += ".find(t => t.tHead.textContent.includes('acceptance rate'))"
    head, rows = f"{table}.tHead.rows[0]", f"[...{table}.tBodies[0].rows]"
    column = browser.run(f"[...{head}.cells].findIndex(c => c.textContent.includes('noise'))")
    for descending in (False, True):
        browser.run(f"{head}.cells[{column}].querySelector('button').click()")
        cells = browser.run(f"{rows}.map(r => r.cells[{column}].textContent)")
        there = [float(text) for text in cells if text]
        assert there == sorted(there, reverse=descending) != []
        assert cells[-1] == "", "what is not known comes last"
    assert browser.run(f"{head}.cells[{column}].ariaSort") == "descending"


@in_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 1400])
def test_layouts_hold(browser, demo, width, dark):
    """Nothing is beyond the edge but what scrolls by itself, and text contrasts with its ground."""
    open_with_figures(browser, demo, width=width, dark=dark)
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
    open_with_figures(browser, tmp_path / "page.html")
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelectorAll('svg a, svg image').length") == 0
    legends = browser.run("[...document.querySelectorAll('.legendtext')].map(e => e.textContent)")
    assert any(HOSTILE in text for text in legends), "shown as it is"
    assert browser.run("document.querySelector('h1').textContent") == HOSTILE
    assert browser.errors == []


@in_browser
def test_damaged_runs_open_too(browser, tmp_path):
    damaged_runs(tmp_path)
    write_page([tmp_path], tmp_path / "page.html")
    open_with_figures(browser, tmp_path / "page.html")
    assert browser.run("document.querySelectorAll('details.run').length") == 7
    assert browser.errors == []
