"""The command line, as a person meets it: files, words, exit codes."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torchrex.cli.interrupts import Interrupted
from torchrex.cli.numbers import Number
from torchrex.experiments.drawing import is_begun
from torchrex.experiments.place import Place

import torchrex
from command import run_command
from torchrex import Draws
from torchrex.cli import app, report, reproduce, reproducing, running
from torchrex.experiments import RunFolder, get_recipe, recipes, run_recipe
from torchrex.experiments.config import dumps, override
from torchrex.experiments.digits import DigitsConfig
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.report.page import advice

SMALL = ["--set", "n_steps=400", "--set", "n_runs=4"]


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    return functools.partial(run_command, monkeypatch, capsys)


# Starting


def modules_after(*words):
    """Exit code and what is printed by the command in a process of its own, and which modules it
    loaded.
    """
    code = "import sys; from torchrex.cli import main\ntry: main()\nfinally: print('\\nloaded:', *sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    printed, _, loaded = done.stderr.rpartition("loaded: ")
    return done.returncode, done.stdout, printed, set(loaded.split())


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--version"], 0, f"torchrex {torchrex.__version__}"),
        (["--help"], 0, "compare"),
        (["run", "--help"], 0, "--budget"),
        (["reproduce", "--help"], 0, "figure1, digits"),
        (["data", "import", "--help"], 0, "cifar10, cifar100, svhn"),
        (["report", "--help"], 0, f"Ask doctor about runs for {advice.SECONDS:g} s"),
        (["doctor", "--help"], 0, "2 if DIR holds no run"),
        (["compare", "--help"], 0, "paired by seed"),
        (["rnu"], 2, "Did you mean 'run'?"),
        (["run", "digits/sghmc", "--seedz", "3"], 2, "--seedz"),
        (
            ["run", "digits/sghmc", "--set", "a=1", "epochs=1", "b"],
            2,
            "(epochs=1 b); repeat --set for each setting: --set epochs=1",
        ),
        (["run", "digits/sghmc", "sgld"], 2, "Got unexpected extra argument(s) (sgld)"),
        (["run", "digits/sghmc", "=1"], 2, "Got unexpected extra argument(s) (=1)"),
        (
            ["doctor", ".", "epochs=1"],
            2,
            "Got unexpected extra argument(s) (epochs=1)",
        ),  # it has no --set
        (
            ["run", "table1"],
            2,
            "`torchrex reproduce table1` runs them, `torchrex list table1` shows them",
        ),
        (["run", "digits/sghmc", "--budget", "soon"], 2, "--budget must be a time"),
        (["report", ".", "--doctor", "some"], 2, "'some' is not one of 'quick', 'all', 'none'"),
        (["doctor"], 2, "Missing argument 'DIR'"),
        (
            ["compare", "a", "b", "--out", "table.txt"],
            2,
            "--out must end in .md or .json, got table.txt",
        ),
    ],
)
def test_help_and_slips_are_answered_without_torch(words, code, expected):
    """torch, scipy and rich take seconds to load."""
    found, out, err, loaded = modules_after(*words)
    assert found == code, err
    assert expected in " ".join((out + err).split())
    assert ("repeat --set" in out + err) == ("repeat --set" in expected)
    assert not loaded & {"torch", "scipy", "numpy", "rich"}


def test_the_list_of_commands_says_what_their_help_says():
    for name, place in app.COMMANDS.items():
        assert " ".join(app.load(name).help.split("\n\n")[0].split()) == place.words
    assert tuple(reproducing.RECIPES) == reproduce.THINGS
    assert report.SECONDS == advice.SECONDS


def test_names_of_the_package_are_there_before_they_are_loaded():
    """Editors, type checkers and `from torchrex import *` see the same names; each is what its room
    has.
    """
    tree = ast.parse(Path(torchrex.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    static = {alias.name for node in block.body if node.module != "typing" for alias in node.names}
    assert static == set(torchrex.__all__) == {*torchrex._HOME_OF, "schedules"}
    assert set(dir(torchrex)) >= {*torchrex.__all__, "__version__", "exchange"}
    for name, home in torchrex._HOME_OF.items():
        assert getattr(torchrex, name) is getattr(importlib.import_module(f"torchrex.{home}"), name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = torchrex.nonsense
    assert torchrex.__getattr__("exchange") is sys.modules["torchrex.exchange"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_ctrl_c_while_loading_is_one_line(tmp_path, number):
    """While torch is imported, even where that swallows a KeyboardInterrupt; before the command is
    parsed; when all is loaded.
    """
    when = [
        "class F:\n def find_spec(self, name, *_):\n  try: name == 'torch' and os.kill(os.getpid(), 2)\n"
        "  except BaseException: pass\nsys.meta_path.insert(0, F())",
        "import torchrex.cli.app as a; k = a.Commands.make_context\n"
        "def m(*w, **s): os.kill(os.getpid(), 2); return k(*w, **s)\na.TyperGroup.make_context = m",
        "import torchrex.cli.running as r\ndef m(*w, **s): os.kill(os.getpid(), 2)\nr.require_logs = m",
    ][number]
    code = f"import os, sys\n{when}\nfrom torchrex.cli import main\nmain()"
    command = [sys.executable, "-c", code, "run", "digits/sghmc", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("torchrex: interrupted")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# Running


def test_list_and_help(cli):
    code, out, _ = cli("list")
    assert code == 0
    large = ("icml2020", "clean", "gan", "gan-tuned")
    assert all((name in out.split()) == (name.split("/")[0] not in large) for name in recipes())
    for family in large:  # folded, with how to see them
        assert f"{family}/..." in out
        words = cli("list", f"{family}/")[1].split()
        assert [word for word in words if word.startswith(f"{family}/")] == [
            n for n in recipes() if n.startswith(f"{family}/")
        ]
    code, out, _ = cli("--help")
    assert code == 0
    assert all(command in out for command in ("list", "run", "reproduce"))
    assert cli("--version")[1].startswith("torchrex ")


def test_run_writes_a_complete_folder(cli, tmp_path):
    code, out, err = cli("run", "figure1/case1-resgld", *SMALL, "--out", tmp_path, "--seeds", 2)
    assert code == 0, err
    assert err == ""  # silent when not a terminal
    for seed in (0, 1):
        folder = tmp_path / "figure1" / "case1-resgld" / f"seed={seed}"
        assert str(folder) in out
        assert sorted(p.name for p in folder.iterdir()) == [
            "config.json",
            "draws.safetensors",
            "result.json",
            "trace.safetensors",
        ]
        result = json.loads((folder / "result.json").read_text())
        assert set(result) >= {
            "recipe",
            "seed",
            "status",
            "metrics",
            "swaps",
            "wall_seconds",
            "device",
            "versions",
        }
        assert (result["recipe"], result["seed"], result["status"]) == (
            "figure1/case1-resgld",
            seed,
            "finished",
        )
        assert result["swaps"][0]["proposed"] == 1600
        assert all(v is None or isinstance(v, int | float) for v in result["metrics"].values())
        config = json.loads((folder / "config.json").read_text())
        assert (config["n_steps"], config["temperatures"]) == (400, [1.0, 10.0])


def test_a_finished_run_is_not_replaced_by_accident(cli, tmp_path):
    arguments = ["run", "figure1/case1-sgld", *SMALL, "--out", tmp_path]
    assert cli(*arguments)[0] == 0
    file = tmp_path / "figure1/case1-sgld/seed=0/result.json"
    before = file.read_bytes()
    code, _, err = cli(*arguments)
    assert code == 2
    assert "already holds a run that is finished" in err
    assert "--overwrite" in err
    assert file.read_bytes() == before
    assert cli(*arguments, "--overwrite", "--set", "n_steps=300")[0] == 0
    assert json.loads(file.read_text())["metrics"]["n_steps"] == 300


def test_other_recipes_run(cli, tmp_path):
    code, out, err = cli(
        "run",
        "tall/logistic",
        "--set",
        "n_data=2000",
        "--set",
        "n_steps=100",
        "--set",
        "n_runs=2",
        "--out",
        tmp_path,
    )
    assert code == 0, err
    assert "largest ratio of sds" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "figure1/case1-regsld"], "did you mean figure1/case1-resgld"),
        (["run", "figure1/case1-sgld", "--set", "n_stepz=3"], "did you mean n_steps"),
        (
            ["run", "figure1/case1-sgld", "--set", "n_steps=three"],
            "'n_steps' must be a whole number, got 'three'",
        ),
        (["run", "figure1/case1-sgld", "--set", "n_steps=0"], "n_steps"),
        (
            ["run", "figure1/case1-sgld", "--set", "thin=1000", "--set", "n_steps=10"],
            "keeps no draw",
        ),
        (["run", "figure1/case1-sgld", "--set", "temperatures=3,1"], "rise from cold to hot"),
        (["run", "figure1/case1-sgld", "--set", "lr=-1"], "lrs must be finite and >= 0"),
        (["run", "figure1/case1-resgld", "--set", "correction_factor=-1"], "F must be positive"),
        (["run", "figure1/case1-sgld", "--device", "tpu7"], "device must be auto, cpu or cuda"),
        (["reproduce", "figure7"], "only figure1"),
        (["reproduce", "figure1", "--only", "case9"], "no recipe of figure1 has 'case9'"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_2(cli, tmp_path, words, expected):
    code, out, err = cli(*words, "--out", tmp_path)
    assert code == 2
    assert expected in err
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("torchrex: ")
    assert out == ""
    assert not list(tmp_path.rglob("result.json"))


def test_out_that_is_a_file(cli, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = cli("run", "figure1/case1-sgld", *SMALL, "--out", tmp_path / "file")
    assert code == 2
    assert "choose another --out" in err


def test_damaged_result_is_named(cli, tmp_path):
    arguments = ["run", "figure1/case1-sgld", *SMALL, "--out", tmp_path]
    cli(*arguments)
    (tmp_path / "figure1/case1-sgld/seed=0/result.json").write_text("{")
    code, _, err = cli(*arguments)
    assert code == 2
    assert "result.json" in err


def test_divergence_keeps_the_draws(cli, tmp_path):
    code, _, err = cli(
        "run", "figure1/case1-sgld", *SMALL, "--set", "lr=3", "--set", "thin=1", "--out", tmp_path
    )
    assert code == 2
    assert "became" in err
    assert "at step" in err
    result = json.loads((tmp_path / "figure1/case1-sgld/seed=0/result.json").read_text())
    assert result["status"] == "failed"
    assert "at step" in result["error"]
    assert (tmp_path / "figure1/case1-sgld/seed=0/draws.safetensors").exists()


def test_a_failed_attempt_does_not_replace_a_finished_run(cli, tmp_path):
    arguments = ["run", "figure1/case1-sgld", *SMALL, "--out", tmp_path]
    assert cli(*arguments)[0] == 0
    assert cli(*arguments, "--overwrite", "--set", "lr=3", "--set", "thin=1")[0] == 2
    folder = tmp_path / "figure1/case1-sgld"
    assert json.loads((folder / "seed=0/result.json").read_text())["status"] == "finished"
    assert json.loads((folder / "seed=0.failed/result.json").read_text())["status"] == "failed"


def test_ctrl_c_while_measuring_keeps_the_draws(cli, tmp_path, monkeypatch):
    def interrupted(self, draws):
        raise KeyboardInterrupt

    monkeypatch.setattr(MixtureConfig, "measure", interrupted)
    assert cli("run", "figure1/case1-sgld", *SMALL, "--out", tmp_path)[0] == 130
    folder = tmp_path / "figure1/case1-sgld/seed=0"
    assert Draws.load(folder / "draws.safetensors").n_draws == 40
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"


def test_reproduce_runs_what_is_missing_and_draws(cli, tmp_path):
    arguments = [
        "reproduce",
        "figure1",
        "--set",
        "n_steps=120",
        "--set",
        "n_runs=4",
        "--out",
        tmp_path,
    ]
    code, out, err = cli(*arguments, "--only", "case3")
    assert code == 0, err
    assert (tmp_path / "figure1-case3.png").read_bytes().startswith(b"\x89PNG")
    first = tmp_path / "figure1/case3-naive/seed=0/result.json"
    stamp = first.stat().st_mtime_ns
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert first.stat().st_mtime_ns == stamp, "a finished run was run again"
    assert "case3-naive, seed" not in out
    assert "case1-naive, seed 0" in out
    rows = json.loads((tmp_path / "figure1.json").read_text())["rows"]
    assert (tmp_path / "figure1.png").read_bytes().startswith(b"\x89PNG")
    assert "…" not in out, "numbers are cut off"
    assert len(rows) == 11
    assert len((tmp_path / "figure1.md").read_text().splitlines()) == 13
    naive = next(row for row in rows if row["recipe"] == "figure1/case3-naive")
    assert naive["paper_acceptance_rate"] == 0.46
    result = json.loads(first.read_text())
    assert naive["acceptance_rate"] == pytest.approx(result["metrics"]["acceptance_rate"])
    assert f"{100 * naive['acceptance_rate']:.0f}"[:1] in out
    assert all(len(line) <= 80 for line in out.splitlines() if "figure1" not in line), (
        "the table does not fit a terminal"
    )
    code, _, err = cli(*arguments, "--set", "n_steps=500")
    assert code == 2
    assert "other settings" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_cuda_absent(cli, tmp_path):
    code, _, err = cli("run", "figure1/case1-sgld", *SMALL, "--device", "cuda", "--out", tmp_path)
    assert code == 2
    assert "no CUDA device" in err


def test_ctrl_c_writes_what_is_done_and_exits_130(tmp_path):
    """On a terminal there is a progress bar; Ctrl-C once it moves keeps the draws so far."""
    controller, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "torchrex",
        "run",
        "figure1/case1-resgld",
        "--out",
        str(tmp_path),
    ]
    settings = [
        "--set",
        "n_steps=9900",
        "--set",
        "n_runs=4000",
    ]  # too few steps to be compiled, enough for half a minute
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [*command, *settings], stdout=subprocess.PIPE, stderr=terminal, text=True, env=environment
    )
    seen, signalled, deadline = "", False, time.monotonic() + 180
    try:
        while (
            process.poll() is None
        ):  # keeps reading to the end: a terminal that nobody reads would block the process
            assert time.monotonic() < deadline, (
                f"signalled: {signalled}; the terminal shows {seen[-500:]!r}"
            )
            if select.select([controller], [], [], 0.2)[0]:
                seen += os.read(controller, 4096).decode(errors="replace")
            if not signalled and re.search(
                r"[1-9][\d,]* of [\d,]+ steps", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
            ):
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
    result = json.loads((tmp_path / "figure1/case1-resgld/seed=0/result.json").read_text())
    assert result["status"] == "interrupted"
    assert result["metrics"]["n_steps"] > 0
    assert re.search(r"interrupted at step [\d,]+ of 9,900 in", out)


def test_reproduce_digits_makes_a_table_and_a_picture(cli, tmp_path):
    short = ["--set", "epochs=3", "--set", "burn_in_epochs=1", "--seeds", "2", "--out", tmp_path]
    code, out, err = cli("reproduce", "digits", *short)
    assert code == 0, err
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "digits.json").read_text())["rows"]
    assert [row["method"] for row in rows] == [
        "digits/msgd",
        "digits/sghmc",
        "digits/resghmc",
        "digits/resghmc pooled",
        "digits/independent",
    ]
    metrics = [
        json.loads((tmp_path / f"digits/sghmc/seed={s}/result.json").read_text())["metrics"]
        for s in (0, 1)
    ]
    assert rows[1]["nll"]["mean"] == pytest.approx(sum(m["nll"] for m in metrics) / 2)
    assert rows[1]["nll"]["se"] == pytest.approx(abs(metrics[0]["nll"] - metrics[1]["nll"]) / 2)
    assert all(0.5 < row["accuracy"]["mean"] / 100 <= 1 for row in rows)
    assert rows[-1]["swaps"]["mean"] == 0
    assert len((tmp_path / "digits.md").read_text().splitlines()) == 7
    assert all(len(line) <= 80 for line in out.splitlines() if "digits" not in line), (
        "the table does not fit a terminal"
    )
    assert "nothing was run again" in cli("reproduce", "digits", *short)[1]


def test_a_budget_stops_reproduce_and_the_next_call_goes_on(cli, tmp_path):
    arguments = ["reproduce", "digits", "--only", "sghmc", "--seeds", "1", "--out", tmp_path]
    arguments += ["--set", "burn_in_epochs=5", "--set", "epochs=20"]
    code, out, _ = cli(*arguments, "--budget", "0.01s")
    assert code == 0
    assert "budget is used up" in out
    assert (
        json.loads((tmp_path / "digits/sghmc/seed=0/result.json").read_text())["status"] == "paused"
    )
    before = (tmp_path / "digits/sghmc/seed=0/checkpoints").stat().st_ino
    assert cli(*arguments)[0] == 0
    assert (
        json.loads((tmp_path / "digits/sghmc/seed=0/result.json").read_text())["status"]
        == "finished"
    )
    assert (tmp_path / "digits/sghmc/seed=0/checkpoints").stat().st_ino == before, "it began anew"


@pytest.mark.parametrize("budget", ["soon", "-3m", "0s", "m", "nan", "infh"])
def test_a_budget_must_be_a_time(cli, tmp_path, budget):
    code, _, err = cli("run", "digits/sghmc", f"--budget={budget}", "--out", tmp_path)
    assert code == 2
    assert "9m" in err
    assert not list(tmp_path.iterdir())


def test_a_burn_in_beyond_the_end_is_told_before_the_work(cli, tmp_path):
    code, _, err = cli("run", "digits/sghmc", "--set", "epochs=20", "--out", tmp_path)
    assert code == 2
    assert "'burn_in_epochs' must be at least 0 and less than epochs=20, got 50" in err
    assert not list(tmp_path.iterdir())


def test_reproduce_does_not_touch_an_unfinished_run_with_other_settings(cli, tmp_path):
    assert (
        cli("run", "digits/sghmc", "--set", "epochs=150", "--budget", "0.01s", "--out", tmp_path)[0]
        == 0
    )
    config = (tmp_path / "digits/sghmc/seed=0/config.json").read_text()
    code, _, err = cli("reproduce", "digits", "--only", "sghmc", "--seeds", "1", "--out", tmp_path)
    assert code == 2
    assert "unfinished run with other settings" in " ".join(err.split())
    assert (tmp_path / "digits/sghmc/seed=0/config.json").read_text() == config


def test_list_shows_the_settings_of_a_recipe(cli):
    code, out, _ = cli("list", "digits/resghmc")
    assert code == 0
    assert "burn_in_epochs" in out
    assert "0.1,0.1025" in out


def test_list_says_what_settings_mean(cli):
    """From the comments beside the fields; what --set cannot change is said to be fixed."""
    code, out, _ = cli("list", "clean/cifar10-resnet20")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert lines["method"].split() == ["method", "resghmc", "fixed"]
    assert "does not change the number of steps" in lines["batch_size"]
    assert "97,500 steps in all" in out


def test_list_shows_recipes_by_a_word(cli):
    code, out, _ = cli("list", "cifar100-wrn")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert len(names) == 16
    assert all("cifar100-wrn" in name for name in names)
    code, _, err = cli("list", "cifar1000")
    assert (code, "did you mean" in err) == (2, True)


def names_in(out):
    return [line.split()[0] for line in out.splitlines()[1:] if not line.startswith(" `")]


def test_list_takes_words_as_only_of_reproduce_does(cli):
    """After what is in a name as it stands."""
    known = list(recipes())
    assert names_in(cli("list", "resnet20/cifar10")[1]) == [
        name for name in known if "/cifar10-resnet20" in name
    ]
    wanted = [name for name in known if name.startswith("icml2020/cifar10-resnet20")]
    assert names_in(cli("list", "icml2020/resnet20/cifar10")[1]) == wanted
    assert names_in(cli("list", "cifar10")[1]) == [
        name for name in known if "cifar10" in name
    ]  # and cifar100 is
    code, _, err = cli("run", "icml2020/resnet20/cifar10")
    assert (code, "`torchrex list icml2020/resnet20/cifar10` shows all of them" in err) == (2, True)


def test_list_shows_what_a_table_is_made_of(cli):
    for thing, made_of in reproducing.RECIPES.items():
        out = cli("list", thing)[1]
        assert set(names_in(out)) >= set(made_of()), thing
        assert (f"`torchrex reproduce {thing}` makes" in out) == (
            thing not in ("figure1", "digits")
        )  # which are in names


def test_list_shows_numbers_to_six_digits(cli):
    out = cli("list", "gan/cifar10-4000")[1]
    assert re.search(r"^ hot_lr +1\.55556 ", out, re.MULTILINE)
    assert re.search(r"^ correction_factor +200000 ", out, re.MULTILINE)


def tensors_of(folder):
    """Equal means equal bit for bit; the order of the words in a safetensors file changes from one
    to the next.
    """
    files = {name: load_file(folder / f"{name}.safetensors") for name in ("draws", "trace")}
    kept = {
        (file, name): tensor.numpy().tobytes()
        for file, tensors in files.items()
        for name, tensor in tensors.items()
    }
    draws = Draws.load(folder / "draws.safetensors")
    return kept, draws.n_steps, draws.status, draws.settings


def test_a_density_stops_in_time_and_goes_on(cli, tmp_path):
    """To the same bytes as a run that was not disturbed."""
    words = ["run", "figure1/case1-resgld", *SMALL, "--set", "checkpoint_every=100", "--out"]
    assert cli(*words, tmp_path / "whole")[0] == 0
    whole, path = (tmp_path / name / "figure1/case1-resgld/seed=0" for name in ("whole", "paused"))
    code, out, _ = cli(*words, tmp_path / "paused", "--budget", "0.0001s")
    assert code == 0
    assert "paused at step 100 of 400 in" in out
    assert "the budget is used up at step 100; the same command with --resume goes on with" in out
    assert json.loads((path / "result.json").read_text())["metrics"]["n_steps"] == 100
    code, _, err = cli(*words, tmp_path / "paused")
    assert code == 2
    assert "that was paused; add --resume to go on with it, --overwrite to begin it anew" in err
    assert (
        "with other settings" in cli(*words, tmp_path / "paused", "--resume", "--set", "lr=0.01")[2]
    )
    code, _, err = cli(*words, tmp_path / "paused", "--resume")
    assert code == 0, err
    assert tensors_of(path) == tensors_of(whole)
    results = [json.loads((folder / "result.json").read_text()) for folder in (path, whole)]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0].keys() == results[1].keys()
    assert {file.name for file in path.iterdir()} == {file.name for file in whole.iterdir()}
    assert not (path / "checkpoints").exists(), "all they hold is in the draws"


@pytest.mark.parametrize("shards", [1, 2])
def test_a_density_that_is_killed_goes_on(cli, tmp_path, shards):
    """kill -9 in the middle, also of a run that overwrites a finished one, which waits."""
    settings = [
        "--set",
        "n_steps=6000",
        "--set",
        "n_runs=4",
        "--set",
        "checkpoint_every=500",
        "--set",
        f"shards={shards}",
    ]
    words = ["run", "figure1/case1-resgld", *settings, "--out", str(tmp_path / "run")]
    path = tmp_path / "run/figure1/case1-resgld/seed=0"
    assert cli(*words)[0] == 0
    whole = tensors_of(path)
    process = subprocess.Popen(
        [sys.executable, "-m", "torchrex", *words, "--overwrite"], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list((path / "checkpoints").rglob("step=*/DONE")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (path / "result.json").exists()
    assert (path.with_name("seed=0.replaced") / "result.json").exists()
    assert "holds an unfinished run; add --resume" in cli(*words)[2]
    steps = torchrex.Checkpoints(path / "checkpoints" / ("" if shards == 1 else "shard=0")).steps()
    assert steps
    assert steps[-1] < 6000
    code, _, err = cli(*words, "--resume")
    assert code == 0, err
    assert tensors_of(path) == whole
    assert sorted(each.name for each in path.parent.iterdir()) == ["seed=0"]
    assert "figure1" in cli(*words, "--resume")[1]


@pytest.mark.parametrize("shards", [1, 4])
def test_reproduce_goes_on_with_an_unfinished_density(cli, tmp_path, monkeypatch, shards):
    """Nothing that is saved is drawn again, in one piece or in shards; what never got to a step
    begins anew.
    """
    settings = ["n_steps=400", "n_runs=4", "checkpoint_every=100", f"shards={shards}"]
    words = [
        "reproduce",
        "figure1",
        "--only",
        "case1-resgld",
        *(word for each in settings for word in ("--set", each)),
        "--out",
    ]
    seen, draw = [], MixtureConfig.draw

    def looking(config, seed, **how):
        seen.append((how["resume"], is_begun(how["checkpoints"])))
        return draw(config, seed, **how)

    monkeypatch.setattr(MixtureConfig, "draw", looking)
    assert cli(*words, tmp_path / "whole")[0] == 0
    code, out, _ = cli(*words, tmp_path / "paused", "--budget", "0.0001s")
    assert code == 0
    assert "the budget is used up at step 100; the same command goes on with" in out
    assert seen == [(False, False)] * 2
    whole, path = (tmp_path / name / "figure1/case1-resgld/seed=0" for name in ("whole", "paused"))
    (path / "result.json").unlink()  # as after kill -9
    code, _, err = cli(*words, tmp_path / "paused")
    assert code == 0, err
    assert seen[2:] == [(True, True)]
    assert tensors_of(path) == tensors_of(whole)
    assert (tmp_path / "paused/figure1-case1-resgld.json").exists()
    assert not (path / "checkpoints").exists()
    code, _, err = cli(*words, tmp_path / "paused", "--overwrite", "--budget", "0.0001s")
    assert code == 0, err
    assert (
        cli(*words, tmp_path / "paused", "--overwrite")[0] == 0
    )  # which begins it anew, as it says
    assert seen[3:] == [(False, False)] * 2


def test_a_density_on_several_processes_under_torchrun(cli, tmp_path):
    """One set of folders, one voice, and the draws of one process."""
    words = ["run", "figure1/case1-resgld", *SMALL, "--set", "shards=4", "--out"]
    assert cli(*words, tmp_path / "alone")[0] == 0
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "torchrex",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, *words, str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished in") == 1
    alone, two = (tmp_path / name / "figure1/case1-resgld/seed=0" for name in ("alone", "two"))
    assert tensors_of(two) == tensors_of(alone)
    assert json.loads((two / "result.json").read_text())["processes"] == 2
    done = subprocess.run(
        [*torchrun, *words[:-1], "--set", "shards=1", "--out", str(tmp_path / "refused")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode != 0
    assert (
        done.stderr.count("torchrex: 2 processes cannot share 1 shard; give shards=2 or more") == 1
    )
    assert not (tmp_path / "refused" / "figure1").exists()


def test_what_was_refused_leaves_nothing_and_what_is_damaged_can_be_overwritten(cli, tmp_path):
    short = ["--set", "epochs=2", "--set", "burn_in_epochs=1", "--out", tmp_path]
    assert cli("run", "digits/resghmc", "--set", "correction_factor=-1", *short)[0] == 2
    assert not list(tmp_path.iterdir())
    assert cli("run", "digits/resghmc", *short)[0] == 0
    result = tmp_path / "digits/resghmc/seed=0/result.json"
    result.write_text("{")
    assert cli("run", "digits/resghmc", *short)[0] == 2
    assert cli("run", "digits/resghmc", "--overwrite", *short)[0] == 0
    assert json.loads(result.read_text())["status"] == "finished"
    code, _, err = cli("run", "digits/resghmc", "--overwrite", "--resume", *short)
    assert code == 2
    assert "give one of them" in err


QUICK = ["--set", "epochs=2", "--set", "burn_in_epochs=1", "--set", "hidden=8"]


def test_the_numbers_that_matter_and_their_mean_over_seeds(cli, tmp_path):
    code, out, err = cli("run", "digits/resghmc", *QUICK, "--seeds", 3, "--out", tmp_path)
    assert code == 0, err
    each = [RunFolder.of(tmp_path, "digits/resghmc", seed).result["metrics"] for seed in range(3)]
    nll = torch.tensor([metrics["nll"] for metrics in each], dtype=torch.float64)
    shown, mean = out.split("mean ± standard error over 3 seeds")
    assert f"{nll[1]:.4g}" in shown
    assert str(Number(float(nll.mean()), float(nll.std() / 3**0.5))) in mean
    assert shown.count("swaps of rungs 0 and 1") == 3
    assert "0 of 40" in shown
    assert "mutual_information" not in out
    assert len(mean.strip().splitlines()) == 6, "the handful that matters"
    assert "all numbers: result.json" in out
    code, out, _ = cli("run", "digits/resghmc", *QUICK, "--seed", 3, "--out", tmp_path)
    assert "mean" not in out


def test_the_error_of_a_mean_of_densities_is_that_of_their_chains(cli, tmp_path):
    code, out, err = cli("run", "figure1/case1-resgld", *SMALL, "--seeds", 2, "--out", tmp_path)
    assert code == 0, err
    each = [
        RunFolder.of(tmp_path, "figure1/case1-resgld", seed).result["metrics"] for seed in range(2)
    ]
    error = sum(metrics["left_weight_se"] ** 2 for metrics in each) ** 0.5 / 2
    _, mean = out.split("mean ± standard error over 2 seeds, from the chains of each run")
    assert str(Number(sum(metrics["left_weight"] for metrics in each) / 2, error)) in mean
    assert re.search(r"left weight, exact +0\.3999 *\n", mean)


def test_a_run_that_tests_no_swap_says_so(cli, tmp_path):
    code, out, err = cli("run", "digits/independent", *QUICK, "--seeds", 2, "--out", tmp_path)
    assert code == 0, err
    assert out.count("none tested") == 3
    assert "0 of 0" not in out


def test_numbers_have_the_digits_of_their_error():
    said = {
        Number(0.40123, 0.0031): "0.4012 ± 0.0031",
        Number(12.3, 0.0): "12.3",
        Number(94.126, 1.26): "94.1 ± 1.3",
    }
    said |= {
        Number(0, of=0): "none tested",
        Number(0.4, exact=True): "0.4000",
        Number(0.399929, exact=True): "0.3999",
    }
    said |= {
        Number(3, of=4000): "3 of 4,000",
        Number(float("inf"), 1.0): "inf",
        Number(1234.5, 40.0): "1234 ± 40",
    }
    assert {number: str(number) for number in said} == said


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [("digits/sghmc", QUICK), ("figure1/case1-sgld", [*SMALL, "--set", "checkpoint_every=100"])],
)
def test_the_time_of_a_run_is_that_of_all_sittings(cli, tmp_path, recipe, settings):
    words = ["run", recipe, *settings, "--out", tmp_path]
    assert (
        "s in all" not in cli(*words, "--resume", "--budget", "0.001s")[1]
    )  # there was nothing to go on with
    assert re.search(
        r"seed 0: paused at step [\d,]+ of [\d,]+ in [\d.]+ s in all\n",
        cli(*words, "--resume", "--budget", "0.001s")[1],
    )
    assert re.search(r"seed 0: finished in [\d.]+ s in all\n", cli(*words, "--resume")[1])
    out = cli(*words, "--resume", "--seeds", 2)[1]
    assert re.search(r"seed 0: finished already \(in [\d.]+ s\)\n", out)
    assert re.search(r"seed 1: finished in [\d.]+ s\n", out)
    assert re.search(r"seed 0: finished in [\d.]+ s\n", cli(*words, "--overwrite")[1])


def test_reproduce_says_that_a_time_is_that_of_all_sittings(cli, tmp_path):
    words = [
        "reproduce",
        "digits",
        "--only",
        "digits/sghmc",
        *QUICK,
        "--seeds",
        2,
        "--out",
        tmp_path,
    ]
    assert cli(*words, "--budget", "0.001s")[0] == 0
    assert re.search(r"seed 0: [\d.]+ s in all\n.*seed 1: [\d.]+ s\n", cli(*words)[1])


@pytest.mark.parametrize(("n", "more", "are"), [(1, "", "is"), (3, " and 2 more", "are")])
def test_ctrl_c_says_how_many_runs_go_on(tmp_path, n, more, are):
    """When their steps were interrupted, before or after them, and when all were done."""
    folders = [RunFolder.of(tmp_path, "digits/sghmc", seed) for seed in range(n)]
    for folder in folders:
        (folder.path / "checkpoints").mkdir(parents=True)
        folder.write_text("result.json", dumps({"status": "interrupted"}))
    with pytest.raises(
        Interrupted,
        match=f"^interrupted; what was done is in {folders[0].path}{more}; the same goes on$",
    ):
        running.goes_on(folders, "the same")
    early, words = running.told_if_early, f"in {folders[0].path}{more}, and the same goes on$"
    with pytest.raises(Interrupted, match=words), early(folders, "the same"):
        raise KeyboardInterrupt
    for folder in folders:
        folder.write_text("result.json", dumps({"status": "finished"}))
    with (
        pytest.raises(Interrupted, match=f"^interrupted; {folders[0].path}{more} {are} finished$"),
        early(folders, "the same"),
    ):
        raise KeyboardInterrupt(signal.SIGINT)


@pytest.mark.parametrize(
    ("recipe", "settings"), [("digits/sghmc", QUICK), ("figure1/case1-sgld", SMALL)]
)
def test_what_is_missing_of_some_seeds(cli, tmp_path, recipe, settings):
    """The refusal comes before anything runs, and names both ways out."""
    words = ["run", recipe, *settings, "--out", tmp_path]
    assert cli(*words, "--seed", 1)[0] == 0
    code, out, err = cli(*words, "--seeds", 3)
    assert (code, out) == (2, "")
    assert "--resume to keep it and run only what is missing, --overwrite to replace it" in err
    assert not RunFolder.of(tmp_path, recipe, 0).path.exists()
    stamp = (RunFolder.of(tmp_path, recipe, 1).path / "result.json").stat().st_mtime_ns
    code, out, _ = cli(*words, "--seeds", 3, "--resume")
    assert code == 0
    assert "over 3 seeds" in out
    assert (RunFolder.of(tmp_path, recipe, 1).path / "result.json").stat().st_mtime_ns == stamp


def test_a_density_without_checkpoints_cannot_go_on(cli, tmp_path):
    words = ["run", "figure1/case1-sgld", *SMALL, "--out", tmp_path, "--resume"]
    folder = RunFolder.of(tmp_path, "figure1/case1-sgld", 0)
    assert cli(*words)[0] == 0
    assert "with other settings" in cli(*words, "--set", "n_steps=300")[2]
    folder.write_text("result.json", dumps({**folder.result, "status": "interrupted"}))
    code, _, err = cli(*words)
    assert code == 2
    assert "no checkpoints to go on from; add --overwrite" in err


@pytest.mark.parametrize("damage", ["{}", "[1]", "3", '{"status": 3}'])
def test_a_result_without_a_status_is_told(cli, tmp_path, damage):
    folder = RunFolder.of(tmp_path, "digits/sghmc", 0)
    folder.make()
    folder.write_text("config.json", dumps(get_recipe("digits/sghmc")))
    folder.write_text("result.json", damage)
    code, _, err = cli("run", "digits/sghmc", "--out", tmp_path)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "--overwrite" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
@pytest.mark.parametrize(
    "words", [["run", "digits/sghmc"], ["run", "tall/logistic"], ["reproduce", "digits"]]
)
def test_a_device_that_is_not_there_leaves_nothing(cli, tmp_path, words):
    code, _, err = cli(*words, "--device", "cuda", "--out", tmp_path / "runs")
    assert (code, "no CUDA device" in err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_logs_are_for_networks(cli, tmp_path):
    for words in (["run", "figure1/case1-sgld"], ["reproduce", "figure1"]):
        code, _, err = cli(*words, "--log", "jsonl", "--out", tmp_path / "runs")
        assert code == 2
        assert "--log is for networks; figure1/case1-sgld samples a density" in err
    assert not list(tmp_path.iterdir())
    assert "Networks only" in cli("run", "--help")[1]


def test_a_density_that_is_killed_is_unfinished_and_not_empty(tmp_path, monkeypatch):
    """The config is there while it draws; after an error nothing is."""
    seen = []
    draw = MixtureConfig.draw

    def looking(config, seed, **how):
        folder = RunFolder.of(tmp_path, config.recipe, seed)
        seen.append((folder.config is not None, folder.result))
        if len(seen) == 2:
            raise RuntimeError("no")
        return draw(config, seed, **how)

    monkeypatch.setattr(MixtureConfig, "draw", looking)
    config = override(get_recipe("figure1/case1-sgld"), ["n_steps=400", "n_runs=4"])
    run_recipe(config, 0, tmp_path)
    assert seen == [(True, None)]
    with pytest.raises(RuntimeError):
        run_recipe(config, 1, tmp_path)
    assert seen[1] == (True, None)
    assert [path.name for path in (tmp_path / config.recipe).iterdir()] == ["seed=0"]


def test_results_say_where_and_in_which_precision(cli, tmp_path):
    assert cli("run", "digits/sghmc", *QUICK, "--out", tmp_path)[0] == 0
    result = RunFolder.of(tmp_path, "digits/sghmc", 0).result
    assert (result["precision"], result["device"][:5]) == ("float32", "CPU, ")
    config = get_recipe("clean/cifar10-resnet20")
    assert config.place("cpu").precision == "float32"
    assert Place.of(torch.device("cuda"), config.precision).precision == "bfloat16"


def test_a_budget_says_what_was_not_reached(cli, tmp_path):
    """The old runs are still there, and must not be taken for new ones."""
    words = ["run", "digits/sghmc", *QUICK, "--out", tmp_path]
    assert cli(*words, "--seeds", 2)[0] == 0
    code, out, _ = cli(*words, "--seeds", 3, "--overwrite", "--budget", "0.001s")
    assert code == 0
    assert "not reached: digits/sghmc seed 1 (still the old run), digits/sghmc seed 2\n" in out
    assert "1 of them would be taken for finished: give --overwrite again" in out
    out = cli(
        "reproduce",
        "digits",
        "--only",
        "sghmc",
        *QUICK,
        "--seeds",
        4,
        "--out",
        tmp_path,
        "--budget",
        "0.001s",
    )[1]
    assert (
        "not reached: digits/sghmc seed 2, digits/sghmc seed 3, digits/resghmc seed 0" in out
    )  # seed 0 was unfinished, seed 1 is there
    assert "old run" not in out
    assert cli(*words, "--seed", 3)[0] == 0
    out = cli(*words, "--seeds", 4, "--resume", "--budget", "0.001s")[1]
    assert (
        "not reached: digits/sghmc seed 2\n" in out
    )  # seeds 1 and 3 are finished, and no one's to replace
    assert "old run" not in out


def test_a_budget_that_is_used_up_between_two_runs_pauses_the_next(cli, tmp_path, monkeypatch):
    """It is not refused as a budget of no seconds: the next run makes its first steps, and the same
    command goes on.
    """
    monkeypatch.setattr(
        time, "monotonic", iter(range(10**9)).__next__
    )  # a second passes whenever somebody looks
    words = [
        "reproduce",
        "figure1",
        "--only",
        "case1-resgld",
        *SMALL,
        "--set",
        "checkpoint_every=100",
        "--out",
        tmp_path,
    ]
    code, out, err = cli(*words, "--budget", "0.5s")
    assert code == 0, err
    assert "the budget is used up at step 100; the same command goes on" in out


def test_sigterm_before_the_first_step_brings_the_finished_run_back(cli, tmp_path, monkeypatch):
    words = ["run", "digits/sghmc", *QUICK, "--out", tmp_path]
    assert cli(*words)[0] == 0
    file = tmp_path / "digits/sghmc/seed=0/result.json"
    before = file.read_bytes()
    execute = DigitsConfig.execute

    def terminated(config, jobs, **how):
        assert not file.exists()
        os.kill(os.getpid(), signal.SIGTERM)
        return execute(config, jobs, **how)

    monkeypatch.setattr(DigitsConfig, "execute", terminated)
    code, _, err = cli(*words, "--overwrite")
    assert (code, "nothing was written" in err) == (143, True)
    assert file.read_bytes() == before
    assert [path.name for path in file.parents[1].iterdir()] == ["seed=0"]


def test_what_a_killed_process_left_beside_a_run(cli, tmp_path, caplog):
    """A run that waits comes back if nothing was done in its place, waits on if steps were, and
    goes if the new one is there.
    """
    words = ["run", "digits/sghmc", *QUICK, "--out", tmp_path]
    assert cli(*words)[0] == 0
    path = tmp_path / "digits/sghmc/seed=0"
    waiting, before = path.with_name("seed=0.replaced"), (path / "result.json").read_bytes()
    path.rename(waiting)
    path.mkdir()
    (path / "config.json").write_bytes(
        (waiting / "config.json").read_bytes()
    )  # as after `kill -9` while it compiled
    assert "is finished" in cli(*words)[2]
    assert "the finished run of before is back" in caplog.text
    assert (path / "result.json").read_bytes() == before
    assert not waiting.exists()
    assert cli(*words, "--overwrite", "--budget", "0.001s")[0] == 0  # a step is done
    assert (waiting / "result.json").read_bytes() == before
    assert cli(*words, "--resume")[0] == 0
    assert not waiting.exists()
    path.with_name("seed=0.replaced").mkdir()  # as after `kill -9` in the last moment
    assert cli(*words, "--resume")[0] == 0
    assert not waiting.exists()


def test_a_failure_names_recipe_and_seed(cli, tmp_path):
    code, _, err = cli(
        "run", "digits/sghmc", *QUICK, "--set", "lr_of_mean=1e20", "--seed", 3, "--out", tmp_path
    )
    assert code == 2
    assert "(digits/sghmc, seed 3)" in err
    assert "(run 0)" not in err
    assert "(digits/sghmc, seed 3)" in RunFolder.of(tmp_path, "digits/sghmc", 3).result["error"]
    code, _, err = cli(
        "run",
        "figure1/case1-sgld",
        *SMALL,
        "--set",
        "lr=3",
        "--set",
        "thin=1",
        "--seed",
        4,
        "--out",
        tmp_path,
    )
    assert re.search(r"\(run \d of figure1/case1-sgld, seed 4\)", err)
    assert "seed 4)" in RunFolder.of(tmp_path, "figure1/case1-sgld", 4).result["error"]
