"""How commands behave: quick answers, progress, what is printed, exit codes, files of settings."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

import recipe_index
from command import refused, run_command, set_words
from torchrex.cli import listing
from torchrex.cli.main import loading_torch
from torchrex.experiments import RunFolder, dumps, get_recipe, recipes, to_json
from torchrex.recording import LiveDisplay, live

QUICK = ("epochs=2", "burn_in_epochs=1", "hidden=8")
SMALL = ("n_steps=400", "n_runs=4", "checkpoint_every=100")
RESGLD, RESGHMC = "figure1/case1-resgld", "digits/resghmc"
MAIN = "from torchrex.cli import main; main()"


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs `torchrex LINE --out OUT` in this process: (exit code, stdout, stderr)."""

    def call(line, *settings, out=None):
        words = [*shlex.split(line), *set_words(settings)]
        words += [] if out is None else ["--out", str(out)]
        return run_command(monkeypatch, capsys, *words)

    return call


# Answers without torch


def test_the_index_is_that_of_the_recipes():
    newest = recipe_index.build()
    assert listing.INDEX.read_text() == newest, "run `python tests/recipe_index.py`"
    for name, config in recipes().items():
        assert listing.settings_of(name) == to_json(config), name


COMMANDS = ("", "list", "run", "reproduce", "report", "doctor", "compare")
HELP = [*COMMANDS, "data", "data fetch", "data import", "data list"]
LISTS = [("list", 0), (f"list {RESGHMC}", 0), ("list table1 --json", 0), ("list nonsense", 2)]
RUNNING = """
import contextlib, io, json, sys
from torchrex.cli import main
for line in sys.argv[1:]:
    sys.argv, printed = ["torchrex", *line.split()], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try: main()
        except SystemExit as end: code = end.code or 0
    slow = [name for name in ("torch", "scipy", "numpy") if name in sys.modules]
    print(json.dumps([code, printed.getvalue(), slow]))"""


def answers_to(lines):
    command = [sys.executable, "-c", RUNNING, *lines]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_h_is_help_everywhere():
    found = answers_to(f"{command} {option}" for command in HELP for option in ("-h", "--help"))
    for command, short, long in zip(HELP, found[::2], found[1::2], strict=True):
        assert short == long, command
        assert short[0] == 0
        assert "-h, --help" in short[1]


def test_list_needs_no_torch():
    for (line, code), found in zip(LISTS, answers_to(line for line, _ in LISTS), strict=True):
        assert (found[0], found[2]) == (code, []), line


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("torchrex re", {"reproduce", "report"}),
        ("torchrex run --re", {"--resume"}),
        ("torchrex run digits/", {name for name in recipes() if name.startswith("digits/")}),
        ("torchrex list digits/r", {"digits/resghmc"}),
        ("torchrex reproduce t", {"theory", "table1", "table2", "table3"}),
        ("torchrex data fetch s", {"svhn"}),
    ],
)
@pytest.mark.parametrize("shell", ["bash", pytest.param("fish", marks=pytest.mark.slow)])
def test_a_shell_completes(typed, expected, shell):
    """Commands, options and recipes; torch is not there to be imported."""
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['torchrex']; {MAIN}"
    asks = {"_TORCHREX_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": typed}
    asks |= {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    asks |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asks},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = {line.split("\t")[0] for line in done.stdout.splitlines()}
    assert found == expected


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("term", "stream", "quiet", "shown"),
    [
        ("xterm", Terminal, False, "loading torch ...\r\x1b[K"),
        ("dumb", Terminal, False, "loading torch ...\n"),
        ("xterm", Terminal, True, ""),
        ("xterm", io.StringIO, False, ""),
    ],
)
def test_a_line_says_that_torch_is_loaded(monkeypatch, term, stream, quiet, shown):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", term)
    with loading_torch(quiet=quiet):
        pass
    assert sys.stderr.getvalue() == "", "it is there already"
    monkeypatch.delitem(sys.modules, "torch")
    with loading_torch(quiet=quiet):
        pass
    assert sys.stderr.getvalue() == shown


def seconds_to_the_first_byte(words):
    controller, terminal = pty.openpty()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "torchrex", *words],
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm"},
    )
    try:
        select.select([controller], [], [], 60)
        return time.monotonic() - began, os.read(controller, 1000).decode()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(controller)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("list", "recipe"),
        (f"run {RESGHMC} --out OUT", "loading"),
        ("report . --out OUT", "loading"),
    ],
)
def test_something_is_on_the_screen_within_a_second(tmp_path, line, shown):
    """The best of five, as the machine may be busy. torch itself takes two to five seconds."""
    words = line.replace("OUT", str(tmp_path / "out")).split()
    found = [seconds_to_the_first_byte(words) for _ in range(5)]
    assert shown in found[0][1]
    assert min(seconds for seconds, _ in found) < 1.0


# Progress


def display_of(total, *, terminal=False, width=100):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    return LiveDisplay("", total, console=console, reports=True)


def test_a_line_for_every_tenth_of_all_the_work(monkeypatch):
    """Of two parts; the second is three runs that go together, with a pace of its own."""
    now = iter(range(10**6)).__next__
    monkeypatch.setattr(time, "monotonic", lambda: float(now()))
    display = display_of(400)
    with display.part("one", 100):
        for step in range(0, 100, 5):
            display.progress(step, 100)
    with display.part("three", 100, copies=3):
        for step in range(0, 101, 5):
            display.progress(step, 100)
    lines = display.console.file.getvalue().splitlines()
    shares = [int(line.split("%")[0]) for line in lines]
    assert all(re.fullmatch(r"\d+%, \d+:\d\d:\d\d left: (one|three)", line) for line in lines)
    assert [line.split(": ")[1] for line in lines[:3]] == ["one", "one", "three"]
    assert [share // 10 for share in shares] == list(range(1, 11))
    assert lines[-1].startswith("100%, 0:00:00 left")


def test_the_time_left_is_that_of_steps_that_were_made():
    """Not of those before a resume, nor of a part with another pace."""
    display, clock = display_of(200), [0.0]
    display._bar.get_time = lambda: clock[0]
    for title, seconds, steps in (("fast", 1, range(0, 101, 10)), ("slow", 10, (80, 81, 82))):
        with display.part(title, 100):
            for step in steps:
                clock[0] += seconds
                display.progress(step, 100)
    assert display._bar.tasks[0].time_remaining == 18 * 10


def test_lines_are_not_more_than_one_a_second_and_only_where_asked():
    display = display_of(100)
    with display.part("fast", 100):
        for step in range(100):
            display.progress(step, 100)
    assert display.console.file.getvalue() == ""
    library = LiveDisplay("", 100, console=Console(file=io.StringIO(), force_terminal=False))
    library._reported -= 3600
    library.progress(50, 100)
    assert library.console.file.getvalue() == ""


@pytest.mark.parametrize("width", [60, 80])
def test_one_bar_over_all_runs_names_the_one_that_goes(monkeypatch, width):
    monkeypatch.setattr(live, "AT_LEAST", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    display = display_of(300, terminal=True, width=width)
    for k in range(3):
        title = f"{k + 1} of 3: icml2020/cifar100-resnet20-F5e5 seed {k}"
        with display.part(title, 100):
            display.progress(50, 100)
            other = display_of(0, width=width).console
            other.print(display.picture())
        shown = other.file.getvalue().splitlines()
        assert shown[0] == title
        assert f"{round(100 * (k + 0.5) / 3)}%" in shown[1]
        assert max(map(len, shown)) <= width


@pytest.mark.slow
def test_a_pipe_gets_lines_and_a_bar_is_for_terminals(tmp_path):
    words = ["run", RESGHMC, "--seeds", "2", *set_words(("epochs=100",)), "--out", str(tmp_path)]
    command = [sys.executable, "-m", "torchrex", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    lines = [line for line in done.stderr.splitlines() if "left: " in line]
    assert len(lines) >= 2
    assert re.fullmatch(rf"\d+%, [\d:]+ left: 1 of 2: {RESGHMC} seed 0", lines[0])
    assert "\x1b" not in done.stdout + done.stderr


# What is printed


@pytest.mark.parametrize(("recipe", "settings"), [(RESGLD, SMALL), (RESGHMC, QUICK)])
def test_a_summary_has_the_swaps_and_the_next_command(cli, tmp_path, recipe, settings):
    code, out, _ = cli(f"run {recipe}", *settings, out=tmp_path)
    folder = RunFolder.of(tmp_path, recipe, 0)
    (pair,) = folder.result["swaps"]
    rate = f"{100 * pair['accepted'] / pair['proposed']:.3g} %"
    swaps = f"{pair['accepted']:,} of {pair['proposed']:,} ({rate})"
    assert code == 0
    assert re.search(rf"swaps of rungs 0 and 1 +{re.escape(swaps)}", out)
    assert "round trips" in " ".join(out.split())
    assert out.splitlines()[-1].startswith(f"next: `torchrex doctor {folder.path}`")


def test_quiet_prints_results_alone(cli, tmp_path):
    code, out, err = cli(f"run {RESGHMC} --seeds 2 --quiet", *QUICK, out=tmp_path)
    assert (code, err) == (0, "")
    assert out.count("swaps of rungs 0 and 1") == 3
    assert not re.search("next:|run folder|result.json", out)
    code, out, _ = cli(f"run {RESGHMC} --seed 5", *QUICK, out=tmp_path)
    assert (code, "next: " in out) == (0, True), "--quiet is of one command"
    line = f"reproduce digits --only {RESGHMC} --seeds 2 --quiet"
    assert cli(line, *QUICK, out=tmp_path)[2] == ""
    answer = cli(f"run {RESGHMC} --quiet", *QUICK, out=tmp_path)
    refused(answer, "already holds a run")


def test_json_of_a_run_is_one_document(cli, tmp_path):
    line = f"run {RESGHMC} --seeds 2 --json"
    code, out, err = cli(f"{line} --budget 0.001s", *QUICK, out=tmp_path)
    first, second = (found := json.loads(out))["runs"]
    assert (code, first["status"], second["status"]) == (75, "paused", "not reached")
    assert second["folder"] == str(tmp_path / RESGHMC / "seed=1")
    assert found["continue_with"].endswith("--resume")
    code, out, err = cli(f"{line} --resume", *QUICK, out=tmp_path)
    assert code == 0, err
    found = json.loads(out)
    assert found["continue_with"] is None
    for seed, document in enumerate(found["runs"]):
        assert document == {"folder": document["folder"], **_result(tmp_path, seed)}
    code, out, err = cli(f"run {RESGHMC} --seed 7 --json", *QUICK, "lr_of_mean=1e20", out=tmp_path)
    assert (code, json.loads(out)["runs"][0]["status"]) == (2, "failed")
    assert err.count("torchrex: ") == 1


def _result(out, seed):
    return RunFolder.of(out, RESGHMC, seed).result


def test_json_of_list_and_compare(cli, tmp_path):
    rows = json.loads(cli("list --json")[1])["recipes"]
    assert [row["recipe"] for row in rows] == list(recipes())
    found = json.loads(cli(f"list {RESGHMC} --json")[1])
    config = get_recipe(RESGHMC)
    assert found["settings"] == to_json(config)
    assert (found["rungs"], found["F"], found["steps"]) == (2, 1.0, config.n_steps)
    cli(f"run {RESGHMC} --seeds 2", *QUICK, out=tmp_path / "a")
    cli(f"run {RESGHMC} --seeds 2", *QUICK, "lr_of_mean=0.02", out=tmp_path / "b")
    a, b = (tmp_path / name / RESGHMC for name in "ab")
    code, out, _ = cli(f"compare {a} {b} --json", out=tmp_path / "t.json")
    assert code == 0
    assert out == (tmp_path / "t.json").read_text()
    assert json.loads(out)[0]["seeds"] == [0, 1]


# Exit code 75


@pytest.mark.parametrize("line", [f"run {RESGHMC} --seeds 2", f"reproduce digits --only {RESGHMC}"])
def test_the_command_that_is_printed_goes_on(cli, tmp_path, line):
    """Word for word but for a larger budget; an exit code of 0 says that nothing is left."""
    code, out, _ = cli(f"{line} --overwrite --budget 0.001s", *QUICK, out=tmp_path)
    (again,) = re.findall(r"^go on with: torchrex (.+)$", out, re.MULTILINE)
    assert (code, "--overwrite" in again) == (75, False)
    code, out, err = cli(again.replace("0.001s", "600s"))
    assert code == 0, err
    assert RunFolder.of(tmp_path, RESGHMC, 0).finished
    assert "go on with" not in out


def test_torchrun_does_not_take_a_budget_for_a_lost_rank(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    code, out, _ = cli(f"run {RESGHMC} --budget 0.001s", *QUICK, out=tmp_path)
    assert code == 0
    assert f"go on with: torchrun ... -m torchrex run {RESGHMC}" in out


def test_a_restart_of_torchrun_goes_on_also_with_overwrite(cli, tmp_path, monkeypatch):
    """The mutant begins anew, or refuses the run that is there."""
    cli(f"run {RESGHMC}", *QUICK, out=tmp_path)
    date = RunFolder.of(tmp_path, RESGHMC, 0).result["date"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for how in ("", "--overwrite"):
        code, out, err = cli(f"run {RESGHMC} {how}", *QUICK, out=tmp_path)
        assert code == 0, err
        assert "finished already" in out
    assert RunFolder.of(tmp_path, RESGHMC, 0).result["date"] == date


@pytest.mark.slow
def test_exit_codes_of_real_processes(tmp_path):
    """75 when the budget is used up, 130 after Ctrl-C with a checkpoint, 0 at the end."""
    words = ["run", RESGHMC, "--out", str(tmp_path), *set_words(("epochs=400",))]
    restore = "import signal; signal.signal(2, signal.default_int_handler); "

    def run(*more):
        command = [sys.executable, "-c", restore + MAIN, *words, *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end_of(process):
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    code, out, _ = end_of(run("--budget", "0.5s"))
    assert (code, "go on with: torchrex run" in out) == (75, True)
    going = run("--resume")
    assert re.match(r"\d+%, ", going.stderr.readline())
    going.send_signal(signal.SIGINT)
    code, out, err = end_of(going)
    assert code == 130
    assert "--resume` goes on\n" in err
    assert RunFolder.of(tmp_path, RESGHMC, 0).status == "interrupted"
    assert RunFolder.of(tmp_path, RESGHMC, 0).begun


# --config


def test_a_config_file_repeats_a_run(cli, tmp_path):
    cli(f"run {RESGHMC} --seed 3", *QUICK, "temperatures=0.1,0.2", out=tmp_path / "a")
    first = RunFolder.of(tmp_path / "a", RESGHMC, 3)
    line = f"run --config {first.path / 'config.json'}"
    assert cli(line, out=tmp_path / "b")[0] == 0
    again = RunFolder.of(tmp_path / "b", RESGHMC, 3)
    assert again.config == first.config
    assert again.result["metrics"] == first.result["metrics"]
    assert cli(f"{line} --seed 4", "epochs=3", out=tmp_path / "b")[0] == 0
    other = RunFolder.of(tmp_path / "b", RESGHMC, 4)
    assert other.config == {**first.config, "epochs": 3}
    refused(cli(line, out=tmp_path / "a"), "already holds a run")


def test_every_config_of_a_recipe_is_read(tmp_path):
    """Infinities, nested settings and fixed ones among them."""
    from torchrex.cli.run import recipe_of, settings_in
    from torchrex.report.reader import config_from_json

    for name, config in recipes().items():
        (tmp_path / "config.json").write_text(dumps(config))
        values = settings_in(tmp_path / "config.json")
        assert recipe_of(tmp_path / "config.json", values, "") == name
        assert config_from_json(config, values, []) == config


def test_a_config_in_yaml(cli, tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 2\nburn_in_epochs: 1\nlr_of_mean: 1e-3\ntemperatures: [0.1, 0.2]\n")
    assert cli(f"run {RESGHMC} --config {file}", "hidden=8", out=tmp_path)[0] == 0
    config = RunFolder.of(tmp_path, RESGHMC, 0).config
    assert [config[key] for key in ("epochs", "lr_of_mean", "hidden")] == [2, 0.001, 8]
    assert config["temperatures"] == [0.1, 0.2]
    monkeypatch.setitem(sys.modules, "yaml", None)
    refused(cli(f"run {RESGHMC} --config {file}", out=tmp_path / "b"), "pip install pyyaml")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.json", '{"recipe": "digits/resghmc", "epocs": 3}', "'epocs' in C; did you mean epochs"),
        ("c.yaml", "recipe: digits/resghmc\nepocs: 3", "'epocs' in C; did you mean epochs?"),
        ("c.yaml", "epochs: 3", "give a recipe of `torchrex list`, or --config FILE that names"),
        ("c.yaml", "recipe: digits/resghcm", "there is no recipe 'digits/resghcm'; did you mean"),
        ("c.yaml", "recipe: [1]", "--config C is of recipe [1]"),
        ("c.yaml", "recipe: clean/cifar10-resnet20\nmethod: sgld", "'method' belongs to the recip"),
        ("c.yaml", "recipe: figure1/case1-sgld\nnoise: {scal: 3}", "'noise.scal' in C; did you me"),
        ("c.yaml", "recipe: digits/resghmc\nepochs: many", "'epochs' must be a whole number"),
        ("c.yaml", "- a", "must hold names and values"),
        ("c.yaml", "a: [1", "cannot read --config C (while parsing"),
        ("c.json", "{", "cannot read --config C"),
        ("c.json", '{"recipe": "x", "made_by": "train"}', "--config C is of a run of 'train'"),
        ("d.json", "", "cannot read --config C (No such file or directory)"),
    ],
)
def test_a_config_that_is_wrong_is_one_line(cli, tmp_path, name, text, words):
    file = tmp_path / name
    if text:
        file.write_text(text)
    answer = cli(f"run --config {file}", out=tmp_path / "runs")
    refused(answer, words.replace("C", str(file), "C" in words))
    assert not (tmp_path / "runs").exists()


def test_a_config_of_another_recipe_is_refused(cli, tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"recipe": RESGHMC}))
    refused(cli(f"run digits/sghmc --config {file}"), f"is of recipe '{RESGHMC}'", "leave it out")
