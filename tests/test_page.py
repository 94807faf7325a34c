"""The report page: what it says, that nothing runs on it but its own script, its size, and that it works in a real browser."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from chromium import chromium, find_chromium
from torchrex.cli.report import report
from torchrex.errors import RunFolderError
from torchrex.experiments.config import dumps, override, to_json
from torchrex.experiments.recipes import get_recipe
from torchrex.posterior import Draws
from torchrex.report.page import page_of, write_page
from torchrex.report.page.command import command_to_repeat
from torchrex.report.page.overview import families, paper_of
from torchrex.report.page.thin import number, rows_to_keep
from torchrex.report.runs import load_run

HOSTILE = "<!--<script x</script ></script/><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\"'&amp;"
needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="there is no Chromium: apt-get install chromium, to test the page in a real browser"
)


def header(recipe, seed, **more):
    about = {"date": "2026-01-02T03:04:05+00:00", "wall_seconds": 1.5, "device": "CPU", "versions": {"torch": "2"}}
    return {"recipe": recipe, "seed": seed, "status": "finished", "metrics": {}, "swaps": [], **about, **more}


def write_json(folder: Path, config, result) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(dumps(config))
    if result is not None:
        (folder / "result.json").write_text(dumps(result))
    return folder


def write_mixture(out: Path, recipe="figure1/case3-resgld-F4", seed=0, *, draws=200, chains=4, **more) -> Path:
    """A run folder as the runner leaves it, filled with noise."""
    config = get_recipe(recipe)
    rungs = len(config.temperatures)
    made = torch.Generator().manual_seed(seed)
    energy = torch.randn(draws, rungs, chains, generator=made) * 7
    replica_at = torch.randint(2, (draws, 1, chains), generator=made)
    pairs = rungs - 1
    counts = {"accepted": torch.full((pairs, chains), 70), "proposed": torch.full((pairs, chains), 1000)}
    result = header(
        recipe,
        seed,
        metrics={"acceptance_rate": 0.07, "acceptance_rate_se": 0.002, "w1": 1.25 + seed, "w2": 2.5, "left_weight": 0.5},
        swaps=[{"pair": [0, 1], "accepted": 70 * chains, "proposed": 1000 * chains, "acceptance_rate": 0.07}] * pairs,
        **more,
    )
    folder = write_json(out / recipe / f"seed={seed}", config, result)
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
    when = torch.arange(swap_every, rows, swap_every) if rungs > 1 and config.swaps else torch.zeros(0, dtype=torch.long)
    turned = torch.bucketize(torch.arange(rows), when, right=True) % 2
    replica_at = torch.stack([turned, 1 - turned], 1) if rungs == 2 else torch.zeros(rows, 1, dtype=torch.long)
    tested = rows if config.swaps else 0
    result = header(
        recipe,
        seed,
        metrics={"accuracy": 0.97 + 0.001 * seed, "nll": 0.1, "ece": 0.01},
        swaps=[{"pair": [0, 1], "accepted": len(when), "proposed": tested, "acceptance_rate": None}] * (rungs - 1),
        steps_done=rows,
    )
    folder = write_json(out / recipe / f"seed={seed}", config, result)
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
    save_file({name: tensor.contiguous() for name, tensor in trace.items()}, folder / "trace.safetensors")
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
        return json.loads(self.scripts[[attrs.get("id") for tag, attrs in self.tags if tag == "script"].index(name)])


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
    assert write_page([out], page) == (7, 0)
    return page


def test_everything_that_is_asked_for_is_on_the_page(demo):
    page = Elements(demo)
    text = page.text
    assert text.index("Summary") < text.index("digits") < text.index("Runs one by one")
    assert "7.1" in text  # the paper's acceptance at F = 4, in percent
    assert "none" in text  # and at F = 1
    assert '<td data-v="7.1" class=n>7.1</td>' in demo.read_text().replace("7.1000000000000005", "7.1")  # sorted as it is shown
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
    assert not [attrs for _, attrs in page.tags if attrs.get("src") or (attrs.get("href") or "").startswith(("http", "//"))]
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object")]
    assert "url(" not in demo.read_text().split("<body>")[0].replace("url(#", "")
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
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
    assert [(len(row.runs), row.label) for row in family.rows] == [(2, "resghmc (hidden=64)"), (1, "resghmc (hidden=32)")]


def test_numbers_of_the_paper_stand_beside_image_runs(tmp_path):
    recipe = "icml2020/cifar10-resnet20"
    curves = {"epoch": [0, 1, 2], "energy": [[3, 2, 1], [4, 3, 2]], "noise_variance": [[1, 1, 1]], "correction": [[1, 2, 1]]}
    curves |= {"swap_epochs": [1.5], "logits_accuracy": [0.9, 0.91]}
    result = header(recipe, 0, metrics={"logits_best_accuracy": 0.944}, curves=curves)
    run = load_run(write_json(tmp_path / recipe / "seed=0", get_recipe(recipe), result))
    (family,) = families([run])
    assert paper_of(family.rows[0])["logits_best_accuracy"][:2] == (94.62, "94.62 ± 0.18")
    write_page([tmp_path], tmp_path / "page.html")
    page = Elements(tmp_path / "page.html")
    kinds = [chart["kind"] for chart in page.data("run-0")["charts"]]
    assert kinds == ["energy", "sigma2", "correction", "accuracy"]  # from the curves: there is no trace
    assert page.data("run-0")["charts"][2]["series"][0]["y"] == [-1, -1, -1]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("figure1/case1-resgld", ["noise.scale=3", "temperatures=1,5,25", "correction_factor=inf", "n_steps=500"]),
        ("digits/resghmc", ["swaps=false", "epochs=60"]),
        ("icml2020/cifar10-resnet20", ["subset=none", "validation=100", "variance=paired", "lr_of_mean=0.05"]),
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
    assert command_to_repeat(unknown) == ("", "This version has no recipe of that name; the config below is all there is.")


def damaged_runs(out: Path) -> None:
    write_mixture(out)
    cut = write_mixture(out, seed=1) / "draws.safetensors"
    cut.write_bytes(cut.read_bytes()[:4000])
    (write_digits(out) / "result.json").unlink()
    (write_digits(out, seed=1) / "result.json").write_text("{")
    (write_digits(out, seed=2) / "trace.safetensors").unlink()
    write_json(
        out / "digits/resghmc/seed=3", get_recipe("digits/resghmc"), header("digits/resghmc", 3, status="failed", error="NaN!")
    )
    odd = header("digits/resghmc", 4, metrics=[1], swaps={"a": 1}, curves=[], date=7, wall_seconds="long", versions=3)
    write_json(out / "digits/resghmc/seed=4", {"recipe": "digits/resghmc", "temperatures": "hot", "paper": 3}, odd)
    (out / "digits/resghmc/seed=5").mkdir()


def test_unfinished_and_damaged_runs_are_shown_as_such(tmp_path):
    damaged_runs(tmp_path)
    assert write_page([tmp_path], tmp_path / "page.html") == (7, 5)
    page = Elements(tmp_path / "page.html")
    for words in ("draws.safetensors is damaged: it ends at byte 4,000", "there is no result.json", "NaN!", "line 1, column 2"):
        assert words in page.text
    assert "seed=5" in page.text
    assert "6 of 8 folders are not whole" in page.text
    by_name = {run["name"]: run for run in (page.data(f"run-{k}") for k in range(7))}
    assert by_name["digits/resghmc, seed 0"]["status"] == "unfinished"
    assert by_name["digits/resghmc, seed 0"]["charts"]  # what is there is drawn
    assert by_name["digits/resghmc, seed 1"]["status"] == "damaged"


def hostile_run(out: Path) -> None:
    write_mixture(out)
    config = {**to_json(get_recipe("digits/resghmc")), "recipe": HOSTILE, HOSTILE: HOSTILE}
    result = header(HOSTILE, 0, status=HOSTILE, device=HOSTILE, versions={HOSTILE: HOSTILE}, error=HOSTILE, date=HOSTILE)
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
    assert (number(1234567.8), number(0.1 + 0.2), number(float("nan")), number(True)) == (1234600, 0.3, None, None)


def many(out: Path, n_mixtures: int, n_digits: int, **sizes):
    mixture = load_run(write_mixture(out, draws=sizes["draws"], chains=64))
    network = load_run(write_digits(out, rows=sizes["rows"], swap_every=sizes["rows"] // 700))
    runs = [replace(mixture, recipe=f"figure1/case3-{k}") for k in range(n_mixtures)]
    return runs + [replace(network, seed=k) for k in range(n_digits)]


def test_the_page_of_the_demo_is_under_5_mb(tmp_path):
    """Its runs as large as those of `make demo`, filled with noise, which is the worst case."""
    text = page_of(many(tmp_path, 11, 20, draws=2000, rows=2000), tmp_path / "page.html", title="demo")
    assert len(text.encode()) < 5e6


def test_fifty_long_runs_are_under_20_mb(tmp_path):
    text = page_of(many(tmp_path, 25, 25, draws=10_000, rows=100_000), tmp_path / "page.html", title="fifty")
    assert len(text.encode()) < 20e6


def test_command(tmp_path):
    app = typer.Typer()
    app.command()(report)
    write_mixture(tmp_path)
    done = CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path / "new" / "page.html"), "--title", "A & B"])
    assert done.exit_code == 0, done.output
    assert "1 run;" in done.output
    assert "<title>A &amp; B</title>" in (tmp_path / "new" / "page.html").read_text()
    again = CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path / "new" / "page.html")])
    assert again.exit_code == 0, "a page is replaced by a newer one"


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(RunFolderError, match="there is no folder"):
        write_page([tmp_path / "none"], tmp_path / "page.html")
    (tmp_path / "digits/resghmc/seed=0").mkdir(parents=True)
    with pytest.raises(RunFolderError, match=r"there is no run in .* \(1 folders are named like runs but are empty\)"):
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
    assert browser.run("document.querySelectorAll('svg[data-view] path.s').length") > 0, "something is drawn"


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
    box = browser.run(f"(() => {{ const b = {SVG}.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()")
    left, middle = box[0], box[1] + box[3] / 2
    browser.mouse("mouseMoved", left + box[2] / 2, middle)
    readout = browser.run("document.querySelector('.panel .chart[data-kind=energy] output').textContent")
    assert readout.startswith("step 1")
    assert "rung 0 (coldest)" in readout
    assert view(browser) == [0, 299]
    browser.mouse("mousePressed", left + box[2] * 0.4, middle, button="left", clickCount=1)
    browser.mouse("mouseMoved", left + box[2] * 0.6, middle, button="left", buttons=1)
    browser.mouse("mouseReleased", left + box[2] * 0.6, middle, button="left", clickCount=1)
    low, high = view(browser)
    assert 60 < low < 130
    assert 130 < high < 200
    others = browser.run("[...document.querySelectorAll('.panel .chart[data-kind=paths] > svg')].map(s => s.dataset.view)")
    assert others == [browser.run(f"{SVG}.dataset.view")], "charts over the same steps zoom together"
    browser.click(".panel .chart[data-kind=energy] .bar button:nth-child(3)")  # whole
    assert view(browser) == [0, 299]
    for swap in (50, 100):  # from swap to swap
        browser.click(".panel .chart[data-kind=energy] .next")
        low, high = view(browser)
        assert (low + high) / 2 == pytest.approx(swap, abs=1)
        assert high - low < 60
    paths = browser.run(f"{SVG}.querySelectorAll('path.s').length")
    browser.click(".panel .chart[data-kind=energy] .legend button")
    assert browser.run(f"{SVG}.querySelectorAll('path.s').length") < paths, "the legend hides a line"
    assert browser.errors == []


@needs_chromium
def test_a_chart_obeys_the_keyboard(browser, demo):
    panel_of_digits(browser, demo)
    browser.run(f"{SVG}.focus()")
    for key, wanted in (("+", (74.75, 224.25)), ("ArrowRight", (104.65, 254.15)), ("0", (0, 299))):
        browser.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        assert view(browser) == pytest.approx(wanted)


@needs_chromium
def test_tables_sort_by_number_and_back(browser, demo):
    browser.look()
    browser.open(demo)

    def column(k):
        return browser.run(f"[...document.querySelectorAll('#all-runs tbody tr')].map(r => r.cells[{k}].textContent)")

    before = column(4)
    browser.click("#all-runs th:nth-child(5) button")
    there = [int(text.replace(",", "")) for text in column(4) if text]
    assert there == sorted(there)
    assert column(4)[-1] == "", "what is not known comes last"
    browser.click("#all-runs th:nth-child(5) button")
    there = [int(text.replace(",", "")) for text in column(4) if text]
    assert there == sorted(there, reverse=True)
    assert column(4)[-1] == ""
    assert sorted(before) == sorted(column(4))
    assert browser.run("document.querySelector('#all-runs th:nth-child(5)').ariaSort") == "descending"
    browser.run("(() => { const f = document.getElementById('filter'); f.value = 'F4'; f.dispatchEvent(new Event('input')); })()")
    assert browser.run("[...document.querySelectorAll('#all-runs tbody tr')].filter(r => !r.hidden).length") == 1


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 400, 1280])
def test_layouts_hold(browser, demo, width, dark):
    """No sideways scrolling of the page, nothing beyond its edge but what scrolls by itself, and text against its ground."""
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
    browser.run("document.querySelectorAll('#all-runs input:not(:checked)').forEach(box => box.click())")
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == HOSTILE
    assert browser.errors == []


@needs_chromium
def test_damaged_runs_open_too(browser, tmp_path):
    damaged_runs(tmp_path)
    write_page([tmp_path], tmp_path / "page.html")
    browser.look()
    browser.open(tmp_path / "page.html")
    browser.run("document.querySelectorAll('#all-runs input:not(:checked)').forEach(box => box.click())")
    assert browser.run("document.querySelectorAll('.panel').length") == 7
    assert browser.errors == []
