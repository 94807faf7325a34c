"""The command line, as a person meets it: files, words, exit codes."""

from __future__ import annotations

import ast
import importlib
import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import torchrex
from command import refused, run_command, set_words
from torchrex import Draws
from torchrex.cli import look, outputs, running
from torchrex.cli import run as run_arguments
from torchrex.cli.main import Interrupted
from torchrex.cli.running import Number
from torchrex.experiments import RunFolder, dumps, get_recipe, override, recipes, run_recipe
from torchrex.experiments.digits import DigitsConfig
from torchrex.experiments.gan import GAN_FAMILIES
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.report import figure1
from torchrex.report.page import build
from written_runs import write_run

SMALL = ("n_steps=400", "n_runs=4")
QUICK = ("epochs=2", "burn_in_epochs=1", "hidden=8")
SGLD, RESGLD, SGHMC = "figure1/case1-sgld", "figure1/case1-resgld", "digits/sghmc"


def words_of(line, settings, out):
    """`torchrex LINE --set A --set B --out OUT` as a list of words."""
    words = [*line.split(), *set_words(settings)]
    return words if out is None else [*words, "--out", str(out)]


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def call(line, *settings, out=None):
        return run_command(monkeypatch, capsys, *words_of(line, settings, out))

    return call


@pytest.fixture
def ok(cli):
    """The same for a command that succeeds: stdout."""

    def call(line, *settings, out=None, code=0):
        ended, printed, err = cli(line, *settings, out=out)
        assert ended == code, err
        return printed

    return call


@pytest.fixture
def stops(ok):
    """The same for a command whose budget is used up: exit code 75."""
    return partial(ok, code=75)


def folder_of(out, recipe, seed=0):
    return RunFolder.of(out, recipe, seed)


# Starting


ANSWERS = [
    ("--version", 0, f"torchrex {torchrex.__version__}"),
    ("--help", 0, "compare"),
    ("run --help", 0, "--budget"),
    ("reproduce --help", 0, "figure1, digits"),
    ("data import --help", 0, "cifar10, cifar100, svhn"),
    ("report --help", 0, f"Ask doctor about runs for {build.SECONDS:g} s"),
    ("rnu", 2, "Did you mean 'run'?"),
    ("run digits/sghmc --seedz 3", 2, "--seedz"),
    (f"run digits/sghmc --seed {2**64}", 2, "'--seed': Input should be less than"),
    ("run digits/sghmc --seeds 99999999999", 2, "'--seeds': Input should be less than"),
    ("run digits/sghmc --set a=1 b=1 c", 2, "(b=1 c); repeat --set for each setting: --set b=1"),
    ("run digits/sghmc sgld", 2, "Got unexpected extra argument(s) (sgld)"),
    ("doctor . epochs=1", 2, "Got unexpected extra argument(s) (epochs=1)"),  # has no --set
    ("run table1", 2, "`torchrex reproduce table1` runs them"),
    ("run digits/sghmc --budget soon", 2, "--budget must be a time"),
    ("report . --doctor some", 2, "'some' is not one of 'quick', 'all', 'none'"),
    ("doctor", 2, "Missing argument 'DIR'"),
    ("doctor nowhere", 2, "there is no folder nowhere"),
    ("report nowhere", 2, "there is no folder nowhere"),
    ("compare nowhere there", 2, "there is no folder nowhere"),
    ("run", 2, "give a recipe of `torchrex list`"),
    ("run digits/sghcm", 2, "did you mean digits/sghmc"),
    ("run digits/sghmc --set epocs=3", 2, "did you mean epochs"),
    ("run clean/cifar10-resnet20 --set method=sgld", 2, "belongs to the recipe and is fixed"),
    ("run --config nowhere.json", 2, "cannot read --config nowhere.json"),
    ("reproduce figure7", 2, "did you mean figure3?"),
    ("compare a b --out table.txt", 2, "--out must end in .md or .json"),
]
ANSWERING = """
import contextlib, io, json, sys
from torchrex.cli import main
for line in sys.argv[1:]:
    sys.argv, printed = ["torchrex", *line.split()], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try: main()
        except SystemExit as end: code = end.code or 0
    slow = [name for name in ("torch", "scipy", "numpy", "rich") if name in sys.modules]
    lines = printed.getvalue().splitlines()
    print(json.dumps([code, " ".join(" ".join(lines).split()), slow, len(lines)]))"""


def test_help_and_typing_errors_are_answered_without_torch():
    """torch, scipy and rich take seconds to load."""
    command = [sys.executable, "-c", ANSWERING, *(line for line, _, _ in ANSWERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answers = map(json.loads, done.stdout.splitlines())
    for (line, code, expected), (found, printed, slow, n) in zip(ANSWERS, answers, strict=True):
        assert (found, slow) == (code, []), (line, printed)
        assert (n == 1 and printed.startswith("torchrex: ")) == (code == 2), printed
        assert expected in printed
        assert ("repeat --set" in printed) == ("repeat --set" in expected), line


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: no memory")])
def test_exhausted_memory_is_one_line(monkeypatch, capsys, tmp_path, error):
    def full(*given):
        raise error

    monkeypatch.setattr("torchrex.cli.running.run_group", full)
    answer = run_command(monkeypatch, capsys, "run", "digits/msgd", "--out", tmp_path)
    refused(answer, "not enough memory", "batch size")


def test_what_is_written_out_for_quick_help_is_what_the_modules_have():
    assert tuple(outputs.OUTPUTS) == run_arguments.THINGS
    assert look.SECONDS == build.SECONDS


def test_names_of_the_package_are_there_before_they_are_loaded():
    """Editors, type checkers and `from torchrex import *` see the same names."""
    tree = ast.parse(Path(torchrex.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    static = {alias.name for node in block.body if node.module != "typing" for alias in node.names}
    assert static == set(torchrex.__all__) == {*torchrex._HOME_OF, "schedules"}
    assert set(dir(torchrex)) >= {*torchrex.__all__, "__version__", "exchange"}
    for name, home in torchrex._HOME_OF.items():
        assert getattr(torchrex, name) is getattr(importlib.import_module(f"torchrex.{home}"), name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = torchrex.nonsense
    assert torchrex.__getattr__("exchange") is sys.modules["torchrex.exchange"]


AT_TORCH = """
class Finder:
    def find_spec(self, name, *_):
        try: name == "torch" and os.kill(os.getpid(), 2)
        except BaseException: pass
sys.meta_path.insert(0, Finder())"""
AT_PARSING = """
import torchrex.cli.app as app
def kill(*words, **settings): os.kill(os.getpid(), 2)
app.TyperGroup.make_context = kill"""
WHEN_LOADED = """
import torchrex.cli.running as running
def kill(*words, **settings): os.kill(os.getpid(), 2)
running.require_logs = kill"""


@pytest.mark.slow
@pytest.mark.parametrize("when", [AT_TORCH, AT_PARSING, WHEN_LOADED])
def test_ctrl_c_while_loading_is_one_line(tmp_path, when):
    """Even where an import swallows a KeyboardInterrupt. Also if the suite ignores SIGINT."""
    code = (
        "import os, signal, sys\nsignal.signal(2, signal.default_int_handler)\n"
        f"{when}\nfrom torchrex.cli import main\nmain()"
    )
    command = [sys.executable, "-c", code, "run", SGHMC, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("torchrex: interrupted")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# Listing


def names_in(out):
    return [line.split()[0] for line in out.splitlines()[1:] if not line.startswith(" `")]


def test_list_folds_large_families(ok):
    out, large = ok("list"), ("icml2020", "clean", *GAN_FAMILIES)
    assert all((name in out.split()) == (name.split("/")[0] not in large) for name in recipes())
    for family in large:
        assert f"{family}/..." in out
        assert names_in(ok(f"list {family}/")) == [
            n for n in recipes() if n.startswith(family + "/")
        ]


def test_list_shows_settings_and_what_they_mean(ok):
    """From the comments at the fields; what --set cannot change is fixed."""
    out = ok("list digits/resghmc")
    assert "burn_in_epochs" in out
    assert "0.1,0.1025" in out
    out = ok("list clean/cifar10-resnet20")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert lines["method"].split() == ["method", "resghmc", "fixed"]
    assert "does not change the number of steps" in lines["batch_size"]
    assert "97,500 steps in all" in out
    assert re.search(r"^ hot_lr +1\.55556 ", ok("list gan/cifar10-4000"), re.MULTILINE)


def test_list_takes_words_as_only_of_reproduce_does(cli, ok):
    known = list(recipes())
    assert names_in(ok("list cifar100-wrn")) == [name for name in known if "cifar100-wrn" in name]
    assert names_in(ok("list cifar10")) == [name for name in known if "cifar10" in name]
    wanted = [name for name in known if "/cifar10-resnet20" in name]
    assert names_in(ok("list resnet20/cifar10")) == wanted
    wanted = [name for name in wanted if name.startswith("icml2020/")]
    assert names_in(ok("list icml2020/resnet20/cifar10")) == wanted
    refused(cli("list cifar1000"), "did you mean")
    refused(cli("run icml2020/resnet20/cifar10"), "`torchrex list icml2020/resnet20/cifar10` shows")


def test_list_shows_what_a_table_is_made_of(ok):
    for thing, output in outputs.OUTPUTS.items():
        out = ok(f"list {thing}")
        assert set(names_in(out)) >= set(output.recipes()), thing
        in_names = thing in ("figure1", "digits", "theory", "gallery")
        assert (f"`torchrex reproduce {thing}` makes" in out) == (not in_names)


# Running


def test_run_writes_complete_folders(cli, tmp_path):
    code, out, err = cli(f"run {RESGLD} --seeds 2", *SMALL, out=tmp_path)
    assert code == 0
    assert all(re.match(r"\d+%, \d:\d\d:\d\d left: ", line) for line in err.splitlines())
    for seed in (0, 1):
        folder = folder_of(tmp_path, RESGLD, seed)
        assert str(folder.path) in out
        files = ["config.json", "draws.safetensors", "result.json", "trace.safetensors"]
        assert sorted(path.name for path in folder.path.iterdir()) == files
        result = folder.result
        assert {"metrics", "wall_seconds", "versions", "date"} <= set(result)
        assert (result["precision"], result["device"][:5]) == ("float32", "CPU, ")
        assert [result[key] for key in ("recipe", "seed", "status")] == [RESGLD, seed, "finished"]
        assert result["swaps"][0]["proposed"] == 1600
        assert all(v is None or isinstance(v, int | float) for v in result["metrics"].values())
        assert (folder.config["n_steps"], folder.config["temperatures"]) == (400, [1.0, 10.0])


def test_a_finished_run_is_not_replaced_by_accident(cli, ok, tmp_path):
    ok(f"run {SGLD}", *SMALL, out=tmp_path)
    folder = folder_of(tmp_path, SGLD)
    before = (folder.path / "result.json").read_bytes()
    refused(cli(f"run {SGLD}", *SMALL, out=tmp_path), "already holds a run", "--overwrite")
    assert (folder.path / "result.json").read_bytes() == before
    ok(f"run {SGLD} --overwrite", *SMALL, "n_steps=300", out=tmp_path)
    assert folder.result["metrics"]["n_steps"] == 300
    assert [path.name for path in folder.path.parent.iterdir()] == ["seed=0"]


def test_other_recipes_run(ok, tmp_path):
    settings = ("n_data=2000", "n_steps=100", "n_runs=2")
    assert "largest ratio of sds" in ok("run tall/logistic", *settings, out=tmp_path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run figure1/case1-regsld", "did you mean figure1/case1-resgld"),
        (f"run {SGLD} --set n_stepz=3", "did you mean n_steps"),
        (f"run {SGLD} --set n_steps=three", "'n_steps' must be a whole number < 2^63, got 'three'"),
        (f"run {SGLD} --set n_steps=0", "n_steps"),
        (f"run {SGLD} --set checkpoint_every=1e30", "must be a whole number < 2^63, got '1e30'"),
        (f"run {SGLD} --set n_steps={'9' * 5000}", "must be a whole number < 2^63, got '999"),
        (f"run {SGLD} --set n_steps=1e18", "has not enough memory for"),
        (f"run {SGLD} --set n_runs=1e18", "has not enough memory for"),
        (f"run {SGLD} --set thin=1000 --set n_steps=10", "keeps no draw"),
        (f"run {SGLD} --set temperatures=3,1", "rise from cold to hot"),
        (f"run {SGLD} --set lr=-1", "lrs must be finite and >= 0"),
        (f"run {RESGLD} --set correction_factor=-1", "F must be positive"),
        (f"run {SGLD} --device tpu7", "device must be auto, cpu or cuda"),
        (f"run {SGHMC} --set epochs=20", "'burn_in_epochs' must be at least 0 and less than"),
        (f"run {SGLD} --resume --overwrite", "give one of them"),
        ("reproduce figure7", "only figure1"),
        ("reproduce figure1 --only case9", "no recipe of figure1 has 'case9'"),
        (f"run {SGLD} --log jsonl", f"--log is for networks; {SGLD} samples a density"),
        ("reproduce figure1 --log jsonl", "--log is for networks"),
        *(
            (f"run {SGHMC} --budget={time}", "9m")
            for time in ("soon", "-3m", "0s", "m", "nan", "infh")
        ),
    ],
)
def test_bad_input_is_one_clear_line_and_writes_nothing(cli, tmp_path, line, expected):
    refused(cli(line, out=tmp_path), expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
@pytest.mark.parametrize("line", [f"run {SGHMC}", "run tall/logistic", "reproduce digits"])
def test_a_device_that_is_not_there_leaves_nothing(cli, tmp_path, line):
    refused(cli(f"{line} --device cuda", out=tmp_path / "runs"), "no CUDA device")
    assert not list(tmp_path.iterdir())


def test_out_that_is_a_file(cli, tmp_path):
    (tmp_path / "file").write_text("")
    refused(cli(f"run {SGLD}", *SMALL, out=tmp_path / "file"), "choose another --out")
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


@pytest.mark.parametrize("damage", ["{", "{}", "[1]", "3", '{"status": 3}'])
def test_a_damaged_result_is_reported_and_can_be_overwritten(cli, ok, tmp_path, damage):
    folder = folder_of(tmp_path, SGHMC)
    folder.make()
    folder.write_text("config.json", dumps(get_recipe(SGHMC)))
    folder.write_text("result.json", damage)
    refused(cli(f"run {SGHMC}", *QUICK, out=tmp_path), "--overwrite")
    ok(f"run {SGHMC} --overwrite", *QUICK, out=tmp_path)
    assert folder.finished


def test_divergence_keeps_the_draws_and_names_the_run(cli, ok, tmp_path):
    """A failed attempt does not replace a finished run."""
    wrong = (*SMALL, "lr=3", "thin=1")
    code, _, err = cli(f"run {SGLD} --seed 4", *wrong, out=tmp_path)
    assert code == 2
    assert re.search(r"\(run \d of figure1/case1-sgld, seed 4\)", err)
    failed = folder_of(tmp_path, SGLD, 4)
    assert failed.status == "failed"
    assert "at step" in failed.result["error"]
    assert "seed 4)" in failed.result["error"]
    assert (failed.path / "draws.safetensors").exists()
    ok(f"run {SGLD}", *SMALL, out=tmp_path)
    assert cli(f"run {SGLD} --overwrite", *wrong, out=tmp_path)[0] == 2
    folder = folder_of(tmp_path, SGLD)
    assert (folder.status, folder.replacement.status) == ("finished", "failed")
    code, _, err = cli(f"run {SGHMC} --seed 3", *QUICK, "lr_of_mean=1e20", out=tmp_path)
    assert (code, "(digits/sghmc, seed 3)" in err) == (2, True)
    assert "(digits/sghmc, seed 3)" in folder_of(tmp_path, SGHMC, 3).result["error"]


def test_ctrl_c_while_measuring_keeps_the_draws(cli, tmp_path, monkeypatch):
    def interrupted(self, draws):
        raise KeyboardInterrupt

    monkeypatch.setattr(MixtureConfig, "measure", interrupted)
    assert cli(f"run {SGLD}", *SMALL, out=tmp_path)[0] == 130
    folder = folder_of(tmp_path, SGLD)
    assert Draws.load(folder.path / "draws.safetensors").n_draws == 40
    assert folder.status == "interrupted"


@pytest.mark.slow
def test_ctrl_c_writes_what_is_done_and_exits_130(tmp_path):
    """On a terminal there is a progress bar; Ctrl-C once it moves keeps the draws so far."""
    controller, terminal = pty.openpty()
    # Too few steps to be compiled, enough for half a minute.
    words = words_of(f"run {RESGLD}", ("n_steps=9900", "n_runs=4000"), tmp_path)
    restore = "import signal; signal.signal(2, signal.default_int_handler); "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{restore}from torchrex.cli import main; main()", *words],
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    seen, signalled, deadline = "", False, time.monotonic() + 180
    try:
        while process.poll() is None:  # a terminal that nobody reads would block the process
            assert time.monotonic() < deadline, (signalled, seen[-500:])
            if select.select([controller], [], [], 0.2)[0]:
                seen += os.read(controller, 4096).decode(errors="replace")
            plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
            if not signalled and re.search(r"[1-9][\d,]* of [\d,]+ steps", plain):
                process.send_signal(signal.SIGINT)
                signalled = True
        out = process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(terminal)
        os.close(controller)
    assert process.returncode == 130
    result = folder_of(tmp_path, RESGLD).result
    assert result["status"] == "interrupted"
    assert result["metrics"]["n_steps"] > 0
    assert re.search(r"interrupted at step [\d,]+ of 9,900 in", out)


@pytest.mark.parametrize(("n", "more", "are"), [(1, "", "is"), (3, " and 2 more", "are")])
def test_ctrl_c_says_how_many_runs_go_on(tmp_path, n, more, are):
    """When their steps were interrupted, before or after them, and when all were done."""
    folders = [folder_of(tmp_path, SGHMC, seed) for seed in range(n)]
    for folder in folders:
        folder.checkpoints.mkdir(parents=True)
        folder.write_text("result.json", dumps({"status": "interrupted"}))
    where = f"in {folders[0].path}{more}"
    with pytest.raises(Interrupted, match=f"^interrupted; .* {where}; `the same` goes on$"):
        running.paused_of(folders, "the same")
    early = running.explained_if_early
    with pytest.raises(Interrupted, match=f"{where}, and `the same`"), early(folders, "the same"):
        raise KeyboardInterrupt
    for folder in folders:
        folder.write_text("result.json", dumps({"status": "finished"}))
    done = f"^interrupted; {folders[0].path}{more} {are} finished$"
    with pytest.raises(Interrupted, match=done), early(folders, "the same"):
        raise KeyboardInterrupt(signal.SIGINT)


# Output that fails


def broken_stream(kind):
    """A stream that cannot be written, or not all of it."""
    if kind == "full disk":
        return open("/dev/full", "w")
    if kind == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
        return os.fdopen(writer, "w")
    if kind == "lost terminal":
        controller, terminal = pty.openpty()
        os.close(controller)
        return os.fdopen(terminal, "w")
    return None if kind == "none" else io.TextIOWrapper(io.BytesIO(), "ascii")


BROKEN = [("full disk", 74), ("closed pipe", 0), ("lost terminal", 0), ("ascii", 0), ("none", 0)]


@pytest.mark.parametrize(("kind", "code"), BROKEN)
@pytest.mark.parametrize("both", [False, True])
def test_losing_the_screen_does_not_lose_the_run(tmp_path, monkeypatch, capsys, kind, code, both):
    """All seeds run; the exit code says whether output was lost that somebody waits for."""
    stream, other = broken_stream(kind), broken_stream(kind)
    words = words_of(f"run {SGHMC} --seeds 2", QUICK, tmp_path)
    with stream or nullcontext(), other or nullcontext():
        monkeypatch.setattr(sys, "stdout", stream)
        if both:
            monkeypatch.setattr(sys, "stderr", other)
        ended, _, err = run_command(monkeypatch, capsys, *words)
        assert sys.stdout is stream
        printed = stream.buffer.getvalue() if kind == "ascii" else b" +- "
    monkeypatch.undo()
    assert (ended, b" +- " in printed) == (code, True)
    assert [folder_of(tmp_path, SGHMC, seed).status for seed in range(2)] == ["finished"] * 2
    assert both or (code == 74) == ("torchrex: stdout cannot be written" in err)
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("line", ["list", "--help", "run nosuch"])
def test_a_closed_pipe_is_no_error(line):
    """As in `torchrex list | head -1`, also where Python flushes its streams at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchrex", *line.split()]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert ended.returncode == (2 if "nosuch" in line else 0)
    assert len(ended.stderr.splitlines()) == (1 if "nosuch" in line else 0)


@pytest.mark.parametrize("columns", ["0", "", "000", "x"])
def test_a_width_of_zero_prints_everything(ok, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert SGHMC in ok("list")


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_no_colours_where_they_are_not_wanted(monkeypatch, name):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for value, has_red in ((None, True), ("dumb", False)):
        if value:
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stderr", Terminal())
        monkeypatch.setattr(sys, "argv", ["torchrex", "run", "nosuch"])
        with pytest.raises(SystemExit):
            torchrex.cli.main()
        assert ("\x1b" in sys.stderr.getvalue()) == has_red


TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be a whole number >= 1, but it is ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number >= 1"),
        ({"WORLD_SIZE": "2"}, "RANK must be a whole number from 0 to 1, but it is not set"),
        ({**TWO, "RANK": "abc"}, "RANK must be a whole number from 0 to 1, but it is 'abc'"),
        ({**TWO, "RANK": "2"}, "RANK must be a whole number from 0 to 1, but it is '2'"),
        ({**TWO, "MASTER_PORT": "x"}, "MASTER_PORT must be a whole number from 1 to 65535"),
        ({**TWO, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({**TWO, "TORCHREX_TIMEOUT": "inf"}, "TORCHREX_TIMEOUT must be a number of seconds"),
        ({**TWO, "TORCHREX_TIMEOUT": "1e300"}, "TORCHREX_TIMEOUT must be a number of seconds"),
    ],
)
def test_an_environment_that_makes_no_sense_is_one_line(
    cli, tmp_path, monkeypatch, environment, words
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused(cli(f"run {SGHMC}", *QUICK, out=tmp_path), words)
    with pytest.raises(torchrex.errors.InvalidArgumentError, match=re.escape(words)):
        torchrex.distributed.join()


# Numbers


def test_the_numbers_that_matter_and_their_mean_over_seeds(ok, tmp_path):
    out = ok("run digits/resghmc --seeds 3", *QUICK, out=tmp_path)
    each = [folder_of(tmp_path, "digits/resghmc", seed).result["metrics"] for seed in range(3)]
    nll = torch.tensor([metrics["nll"] for metrics in each], dtype=torch.float64)
    shown, mean = out.split("mean ± standard error over 3 seeds")
    assert f"{nll[1]:.4g}" in shown
    assert str(Number(float(nll.mean()), float(nll.std() / 3**0.5))) in mean
    assert shown.count("swaps of rungs 0 and 1") == 3
    assert "0 of 40" in shown
    assert "mutual_information" not in out
    assert len(mean.strip().splitlines()) == 7, "the few that matter, and what to do next"
    assert "all numbers: result.json" in out
    assert "mean ±" not in ok("run digits/resghmc --seed 3", *QUICK, out=tmp_path)
    assert ok("run digits/independent --seeds 2", *QUICK, out=tmp_path).count("none tested") == 3


def test_the_time_of_runs_that_trained_together_is_that_of_all(tmp_path, capsys):
    config = get_recipe("digits/resghmc")
    folder = RunFolder(write_run(tmp_path, config, replicas_side_by_side=6))
    running.show([folder], config, {})
    assert "finished in 1.5 s next to 4 other replicas" in capsys.readouterr().out


def test_the_error_of_a_mean_of_densities_is_that_of_their_chains(ok, tmp_path):
    out = ok(f"run {RESGLD} --seeds 2", *SMALL, out=tmp_path)
    each = [folder_of(tmp_path, RESGLD, seed).result["metrics"] for seed in range(2)]
    error = sum(metrics["left_weight_se"] ** 2 for metrics in each) ** 0.5 / 2
    _, mean = out.split("mean ± standard error over 2 seeds, from the chains of each run")
    assert str(Number(sum(metrics["left_weight"] for metrics in each) / 2, error)) in mean
    assert re.search(r"left weight, exact +0\.3999 *\n", mean)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (Number(0.40123, 0.0031), "0.4012 ± 0.0031"),
        (Number(12.3, 0.0), "12.3"),
        (Number(94.126, 1.26), "94.1 ± 1.3"),
        (Number(1234.5, 40.0), "1,234 ± 40"),
        (Number(0.399929, exact=True), "0.3999"),
        (Number(0, of=0), "none tested"),
        (Number(3, of=4000), "3 of 4,000 (0.075 %)"),
        (Number(float("inf"), 1.0), "inf"),
    ],
)
def test_numbers_have_the_digits_of_their_error(number, text):
    assert str(number) == text


# Reproducing


def test_reproduce_runs_what_is_missing_and_draws(cli, ok, tmp_path):
    settings = ("n_steps=120", "n_runs=4")
    ok("reproduce figure1 --only case3", *settings, out=tmp_path)
    assert (tmp_path / "figure1-case3.png").read_bytes().startswith(b"\x89PNG")
    first = folder_of(tmp_path, "figure1/case3-naive")
    stamp = (first.path / "result.json").stat().st_mtime_ns
    out = ok("reproduce figure1", *settings, out=tmp_path)
    assert (first.path / "result.json").stat().st_mtime_ns == stamp, "it was run again"
    assert "case3-naive, seed" not in out
    assert "case1-naive, seed 0" in out
    assert (tmp_path / "figure1.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "figure1.json").read_text())["rows"]
    assert len(rows) == 11
    assert len((tmp_path / "figure1.md").read_text().splitlines()) == 13
    naive = next(row for row in rows if row["recipe"] == "figure1/case3-naive")
    assert naive["paper_acceptance_rate"] == 0.46
    rate = first.result["metrics"]["acceptance_rate"]
    assert naive["acceptance_rate"] == pytest.approx(rate)
    assert "…" not in out, "numbers are cut off"
    assert all(len(line) <= 80 for line in out.splitlines() if "figure1" not in line)
    refused(cli("reproduce figure1", *settings, "n_steps=500", out=tmp_path), "other settings")


def test_reproduce_digits_makes_a_table_and_a_picture(ok, tmp_path):
    line, settings = "reproduce digits --seeds 2", ("epochs=3", "burn_in_epochs=1")
    out = ok(line, *settings, out=tmp_path)
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "digits.json").read_text())["rows"]
    methods = ("msgd", "sghmc", "resghmc", "resghmc pooled", "independent")
    assert [row["method"] for row in rows] == [f"digits/{method}" for method in methods]
    nll = [folder_of(tmp_path, SGHMC, seed).result["metrics"]["nll"] for seed in (0, 1)]
    assert rows[1]["nll"]["mean"] == pytest.approx(sum(nll) / 2)
    assert rows[1]["nll"]["se"] == pytest.approx(abs(nll[0] - nll[1]) / 2)
    assert all(0.5 < row["accuracy"]["mean"] / 100 <= 1 for row in rows)
    assert rows[-1]["swaps"]["mean"] == 0
    assert len((tmp_path / "digits.md").read_text().splitlines()) == 7
    assert all(len(line) <= 80 for line in out.splitlines() if "digits" not in line)
    assert "nothing was run again" in ok(line, *settings, out=tmp_path)


def test_reproduce_does_not_touch_an_unfinished_run_with_other_settings(cli, stops, tmp_path):
    stops(f"run {SGHMC} --budget 0.01s", "epochs=150", out=tmp_path)
    folder = folder_of(tmp_path, SGHMC)
    before = folder.config
    answer = cli("reproduce digits --only sghmc --seeds 1", out=tmp_path)
    refused(answer, "unfinished run with other settings")
    assert folder.config == before


# Stopping and going on


def tensors_of(folder):
    """Bit for bit; the order of the words in a safetensors file differs from one to the next."""
    files = {name: load_file(folder.path / f"{name}.safetensors") for name in ("draws", "trace")}
    kept = {
        (file, name): tensor.numpy().tobytes()
        for file, tensors in files.items()
        for name, tensor in tensors.items()
    }
    draws = Draws.load(folder.path / "draws.safetensors")
    return kept, draws.n_steps, draws.status, draws.settings


def test_a_density_stops_in_time_and_goes_on(cli, ok, stops, tmp_path):
    """To the same bytes as a run that was not disturbed."""
    settings = (*SMALL, "checkpoint_every=100")
    whole, paused = (folder_of(tmp_path / name, RESGLD) for name in ("whole", "paused"))
    ok(f"run {RESGLD}", *settings, out=tmp_path / "whole")
    out = stops(f"run {RESGLD} --budget 0.0001s", *settings, out=tmp_path / "paused")
    assert "paused at step 100 of 400 in" in out
    assert "0 of 1 run finished" in out
    assert f"{paused.path} is at step 100 of 400\n" in out
    again = words_of(f"run {RESGLD} --budget 0.0001s", settings, tmp_path / "paused")
    assert f"go on with: torchrex {shlex.join(again)} --resume\n" in out
    assert paused.result["metrics"]["n_steps"] == 100
    once_more = f"run {RESGLD}", *settings
    refused(
        cli(*once_more, out=tmp_path / "paused"), "unfinished", "paused", "--resume", "--overwrite"
    )
    other = cli(f"run {RESGLD} --resume", *settings, "lr=0.01", out=tmp_path / "paused")
    refused(other, "with other settings (lr 0.03 there, 0.01 here)")
    ok(f"run {RESGLD} --resume", *settings, out=tmp_path / "paused")
    assert tensors_of(paused) == tensors_of(whole)
    assert paused.result["metrics"] == whole.result["metrics"]
    assert paused.result.keys() == whole.result.keys()
    files = [sorted(path.name for path in each.path.iterdir()) for each in (paused, whole)]
    assert files[0] == files[1]
    assert "checkpoints" not in files[0], "all they hold is in the draws"


def test_a_budget_stops_reproduce_and_the_next_call_goes_on(ok, stops, tmp_path):
    line, settings = "reproduce digits --only digits/sghmc --seeds 1", QUICK
    assert "budget is used up" in stops(f"{line} --budget 0.01s", *settings, out=tmp_path)
    folder = folder_of(tmp_path, SGHMC)
    assert folder.status == "paused"
    before = folder.checkpoints.stat().st_ino
    assert re.search(r"seed 0: [\d.]+ s in all\n", ok(line, *settings, out=tmp_path))
    assert folder.finished
    assert folder.checkpoints.stat().st_ino == before, "it began anew"


@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_reproduce_goes_on_with_an_unfinished_density(ok, stops, tmp_path, monkeypatch, shards):
    """Nothing that is saved is drawn again; what never got to a step begins anew."""
    line = "reproduce figure1 --only case1-resgld"
    settings = (*SMALL, "checkpoint_every=100", f"shards={shards}")
    seen, draw = [], MixtureConfig.draw

    def looking(config, seed, checkpoints, options):
        seen.append((options.resume, RunFolder(checkpoints.parent).begun))
        return draw(config, seed, checkpoints, options)

    monkeypatch.setattr(MixtureConfig, "draw", looking)
    monkeypatch.setattr(figure1, "draw", lambda configs, folders, path: None)
    whole, paused = (folder_of(tmp_path / name, RESGLD) for name in ("whole", "paused"))
    ok(line, *settings, out=tmp_path / "whole")
    out = stops(f"{line} --budget 0.0001s", *settings, out=tmp_path / "paused")
    assert (
        "is at step 100 of 400\ngo on with: torchrex reproduce figure1 --only case1-resgld" in out
    )
    assert seen == [(False, False)] * 2
    (paused.path / "result.json").unlink()  # as after kill -9
    ok(line, *settings, out=tmp_path / "paused")
    assert seen[2:] == [(True, True)]
    assert tensors_of(paused) == tensors_of(whole)
    assert (tmp_path / "paused/figure1-case1-resgld.json").exists()
    stops(f"{line} --overwrite --budget 0.0001s", *settings, out=tmp_path / "paused")
    assert (paused.status, paused.replacement.status) == ("finished", "paused")
    ok(f"{line} --overwrite", *settings, out=tmp_path / "paused")
    assert seen[3:] == [(False, False)] * 2
    stops(f"{line} --overwrite --budget 0.0001s", *settings, out=tmp_path / "paused")
    ok(line, *settings, out=tmp_path / "paused")  # continues the replacement
    assert seen[5:] == [(False, False), (True, True)]
    assert [path.name for path in paused.path.parent.iterdir()] == ["seed=0"]


@pytest.mark.parametrize(
    ("recipe", "settings"), [(SGHMC, QUICK), (SGLD, (*SMALL, "checkpoint_every=100"))]
)
def test_the_time_of_a_run_is_that_of_all_calls(ok, tmp_path, recipe, settings):
    def run(more):
        code = 75 if "--budget" in more else 0
        return ok(f"run {recipe} {more}", *settings, out=tmp_path, code=code)

    assert "s in all" not in run("--resume --budget 0.001s")  # there was nothing to resume
    paused = r"seed 0: paused at step [\d,]+ of [\d,]+ in [\d.]+ s in all\n"
    assert re.search(paused, run("--resume --budget 0.001s"))
    assert re.search(r"seed 0: finished in [\d.]+ s in all\n", run("--resume"))
    out = run("--resume --seeds 2")
    assert re.search(r"seed 0: finished already \(in [\d.]+ s\)\n", out)
    assert re.search(r"seed 1: finished in [\d.]+ s\n", out)
    assert re.search(r"seed 0: finished in [\d.]+ s\n", run("--overwrite"))
    run("--overwrite --budget 0.001s")
    assert re.search(r"seed 0: finished in [\d.]+ s in all\n", run("--resume"))


@pytest.mark.parametrize(("recipe", "settings"), [(SGHMC, QUICK), (SGLD, SMALL)])
def test_what_is_missing_of_some_seeds(cli, ok, tmp_path, recipe, settings):
    """The refusal comes before anything runs, and names both ways out."""
    ok(f"run {recipe} --seed 1", *settings, out=tmp_path)
    answer = cli(f"run {recipe} --seeds 3", *settings, out=tmp_path)
    refused(answer, "--resume to keep it and run only what is missing, --overwrite to replace it")
    assert not folder_of(tmp_path, recipe).path.exists()
    file = folder_of(tmp_path, recipe, 1).path / "result.json"
    stamp = file.stat().st_mtime_ns
    assert "over 3 seeds" in ok(f"run {recipe} --seeds 3 --resume", *settings, out=tmp_path)
    assert file.stat().st_mtime_ns == stamp


def test_a_density_without_checkpoints_cannot_go_on(cli, ok, tmp_path):
    line, folder = f"run {SGLD} --resume", folder_of(tmp_path, SGLD)
    ok(line, *SMALL, out=tmp_path)
    refused(cli(line, *SMALL, "n_steps=300", out=tmp_path), "with other settings")
    folder.write_text("result.json", dumps({**folder.result, "status": "interrupted"}))
    refused(cli(line, *SMALL, out=tmp_path), "without checkpoints", "--overwrite")
    assert folder.result["status"] == "interrupted"  # and the draws are as they were


def test_a_density_that_is_killed_is_unfinished_and_not_empty(tmp_path, monkeypatch):
    """The config is there while it draws; after an error nothing is."""
    seen, draw = [], MixtureConfig.draw

    def looking(config, seed, *how):
        folder = folder_of(tmp_path, config.recipe, seed)
        seen.append((folder.config is not None, folder.result))
        if len(seen) == 2:
            raise RuntimeError("no")
        return draw(config, seed, *how)

    monkeypatch.setattr(MixtureConfig, "draw", looking)
    config = override(get_recipe(SGLD), SMALL)
    run_recipe(config, 0, tmp_path)
    with pytest.raises(RuntimeError):
        run_recipe(config, 1, tmp_path)
    assert seen == [(True, None)] * 2
    assert [path.name for path in (tmp_path / config.recipe).iterdir()] == ["seed=0"]


def test_a_budget_says_what_was_not_reached(ok, stops, tmp_path):
    """The old runs are still there, and must not be taken for new ones."""
    ok(f"run {SGHMC} --seeds 2", *QUICK, out=tmp_path)
    out = stops(f"run {SGHMC} --seeds 3 --overwrite --budget 0.001s", *QUICK, out=tmp_path)
    assert "not reached: digits/sghmc seed 1 (still the old run), digits/sghmc seed 2\n" in out
    assert "1 of them would be taken for finished: give --overwrite again" in out
    line = "reproduce digits --only sghmc --seeds 4 --budget 0.001s"
    out = stops(line, *QUICK, out=tmp_path)  # seed 0 is unfinished, seed 1 is there
    assert "not reached: digits/sghmc seed 2, digits/sghmc seed 3, digits/resghmc seed 0" in out
    assert "old run" not in out
    ok(f"run {SGHMC} --seed 3", *QUICK, out=tmp_path)
    out = stops(f"run {SGHMC} --seeds 4 --resume --budget 0.001s", *QUICK, out=tmp_path)
    assert "not reached: digits/sghmc seed 2\n" in out  # seeds 1 and 3 are finished
    assert "old run" not in out


def test_a_budget_that_is_used_up_between_two_runs_pauses_the_next(stops, tmp_path, monkeypatch):
    """The next run makes its first steps, and the same command goes on."""
    # A second passes whenever somebody looks at the clock.
    monkeypatch.setattr(time, "monotonic", iter(range(10**9)).__next__)
    line = "reproduce figure1 --only case1-resgld --budget 0.5s"
    out = stops(line, *SMALL, "checkpoint_every=100", out=tmp_path)
    assert "is at step 100 of 400\ngo on with: torchrex reproduce figure1" in out


# A finished run stays until the one that replaces it is finished


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_kill_while_a_finished_density_is_overwritten(cli, ok, tmp_path, shards):
    settings = ("n_steps=6000", "n_runs=4", "checkpoint_every=500", f"shards={shards}")
    folder = folder_of(tmp_path, RESGLD)
    ok(f"run {RESGLD}", *settings, out=tmp_path)
    whole, new = tensors_of(folder), folder.replacement
    words = words_of(f"run {RESGLD} --overwrite", settings, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "torchrex", *words], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list(new.checkpoints.rglob("step=*/DONE")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert (new.status, tensors_of(folder)) == (None, whole)
    refused(cli(f"run {RESGLD}", *settings, out=tmp_path), "unfinished run; add --resume")
    ok(f"run {RESGLD} --resume", *settings, out=tmp_path)
    assert tensors_of(folder) == whole
    assert [each.name for each in folder.path.parent.iterdir()] == ["seed=0"]
    assert "finished already" in ok(f"run {RESGLD} --resume", *settings, out=tmp_path)


def test_sigterm_before_the_first_step_leaves_the_finished_run(cli, ok, tmp_path, monkeypatch):
    ok(f"run {SGHMC}", *QUICK, out=tmp_path)
    folder = folder_of(tmp_path, SGHMC)
    before, execute = (folder.path / "result.json").read_bytes(), DigitsConfig.execute

    def terminated(config, runs, options):
        assert runs[0].folder == folder.replacement
        os.kill(os.getpid(), signal.SIGTERM)
        return execute(config, runs, options)

    monkeypatch.setattr(DigitsConfig, "execute", terminated)
    code, _, err = cli(f"run {SGHMC} --overwrite", *QUICK, out=tmp_path)
    assert (code, "nothing was written" in err) == (143, True)
    assert (folder.path / "result.json").read_bytes() == before
    assert [path.name for path in folder.path.parent.iterdir()] == ["seed=0"]


def test_what_a_killed_process_left_is_completed(cli, ok, tmp_path, caplog):
    """Killed before the first step of a replacement, and at each moment of the last rename."""
    ok(f"run {SGHMC}", *QUICK, out=tmp_path)
    folder, again = folder_of(tmp_path, SGHMC), (f"run {SGHMC} --resume", *QUICK)
    new, old = folder.replacement, folder.path.with_name(".seed=0.old")
    before = (folder.path / "result.json").read_bytes()

    def names():
        return sorted(path.name for path in folder.path.parent.iterdir())

    new.make()
    new.write_text("config.json", "{}")  # while it compiled
    ok(*again, out=tmp_path)
    assert names() == ["seed=0"]
    folder.path.rename(new.path)  # seed=S was moved away, seed=S.new not yet renamed
    old.mkdir()
    ok(*again, out=tmp_path)
    assert (names(), (folder.path / "result.json").read_bytes()) == (["seed=0"], before)
    old.mkdir()  # both renamed, the old run not yet removed
    ok(*again, out=tmp_path)
    assert names() == ["seed=0"]
    folder.path.with_name("seed=0.replaced").mkdir()  # of an older version
    ok(*again, out=tmp_path)
    assert "an older version kept" in caplog.text


def test_what_somebody_else_put_there_stays(cli, ok, tmp_path):
    """Next to a run, inside of it, and where a replacement is written."""
    ok(f"run {SGHMC}", *QUICK, out=tmp_path)
    folder = folder_of(tmp_path, SGHMC)
    for name in ("seed=0.old", "seed=0/notes", "seed=0.new"):
        (folder.path.parent / name).mkdir()
        (folder.path.parent / name / "mine.txt").write_text(name)
    shutil.copy(folder.path / "config.json", folder.path.parent / "seed=0.old")
    before = (folder.path / "result.json").read_bytes()
    for more in ("", " --resume", " --resume --set epochs=3", " --overwrite"):
        cli(f"run {SGHMC}{more}", *QUICK, out=tmp_path)
    names = sorted(str(each.relative_to(folder.path.parent)) for each in tmp_path.rglob("mine.txt"))
    # The replacement has taken its place with what was put into it.
    assert names == ["seed=0.old/mine.txt", "seed=0/mine.txt", "seed=0/notes/mine.txt"]
    assert (folder.path / "result.json").read_bytes() != before
    assert (folder.path.with_name("seed=0.old") / "config.json").exists()


def test_an_interrupt_before_the_first_step_removes_only_what_this_process_made(
    tmp_path, monkeypatch
):
    """A run that was copied by half: its checkpoints are not complete."""
    config = override(get_recipe(SGHMC), QUICK)
    folder = RunFolder.of(tmp_path, config.recipe, 0)
    folder.checkpoints.mkdir(parents=True)
    (folder.checkpoints / "mine.txt").write_text("x")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(config), "execute", interrupted)
    for written in (False, True):
        if written:
            folder.write_text("config.json", dumps(config))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(config, 0, tmp_path, resume=True)
        assert (folder.checkpoints / "mine.txt").exists()
        assert (folder.path / "config.json").exists() == written


def test_checkpoints_that_are_no_folder_are_refused(cli, tmp_path):
    folder = folder_of(tmp_path, SGHMC)
    folder.path.mkdir(parents=True)
    os.mkfifo(folder.checkpoints)
    code, _, said = cli(f"run {SGHMC} --resume", *QUICK, out=tmp_path)
    assert (code, said.count("\n")) == (2, 1)
    assert "is no folder" in said


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"seed": 3}, "the result of seed 3"), ({"metrics": {"accuracy": 7.5}}, "no run gives")],
)
def test_a_result_that_is_not_of_this_run_is_not_taken(cli, ok, tmp_path, changed, words):
    """A copy of another seed counted as a run of this one, and 7.5 as an accuracy."""
    ok(f"run {SGHMC}", *QUICK, out=tmp_path)
    folder = folder_of(tmp_path, SGHMC)
    folder.write_text("result.json", json.dumps({**folder.result, **changed}))
    code, _, said = cli(f"run {SGHMC} --resume", *QUICK, out=tmp_path)
    assert code == 2
    assert words in said
    assert "--overwrite" in said
    ok(f"run {SGHMC} --overwrite", *QUICK, out=tmp_path)


# Several processes


@pytest.mark.slow
def test_a_density_on_several_processes_under_torchrun(ok, tmp_path):
    """One set of folders, one process that prints, and the draws of one process."""
    ok(f"run {RESGLD}", *SMALL, "shards=4", out=tmp_path / "alone")
    torchrun = Path(sys.executable).with_name("torchrun")

    def on_two(shards, out):
        words = words_of(f"run {RESGLD}", (*SMALL, f"shards={shards}"), tmp_path / out)
        return subprocess.run(
            [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "torchrex", *words],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    done = on_two(4, "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished in") == 1
    alone, two = (folder_of(tmp_path / name, RESGLD) for name in ("alone", "two"))
    assert tensors_of(two) == tensors_of(alone)
    assert two.result["processes"] == 2
    done = on_two(1, "refused")
    assert done.returncode != 0
    assert done.stderr.count("torchrex: 2 processes cannot share 1 shard") == 1
    assert not (tmp_path / "refused" / "figure1").exists()
