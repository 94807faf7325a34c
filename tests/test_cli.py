"""The command line, as a person meets it: files, words, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch

from torchrex import Draws
from torchrex.cli.main import main
from torchrex.experiments import recipes
from torchrex.experiments.mixtures import MixtureConfig

SMALL = ["--set", "n_steps=400", "--set", "n_runs=4"]


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["torchrex", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return call


def test_list_and_help(cli):
    code, out, _ = cli("list")
    assert code == 0
    assert all(name in out for name in recipes())
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
        assert set(result) >= {"recipe", "seed", "status", "metrics", "swaps", "wall_seconds", "device", "versions"}
        assert (result["recipe"], result["seed"], result["status"]) == ("figure1/case1-resgld", seed, "finished")
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
        "run", "tall/logistic", "--set", "n_data=2000", "--set", "n_steps=100", "--set", "n_runs=2", "--out", tmp_path
    )
    assert code == 0, err
    assert "largest_sd_ratio" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "figure1/case1-regsld"], "did you mean figure1/case1-resgld"),
        (["run", "figure1/case1-sgld", "--set", "n_stepz=3"], "did you mean n_steps"),
        (["run", "figure1/case1-sgld", "--set", "n_steps=three"], "'n_steps' must be a whole number, got 'three'"),
        (["run", "figure1/case1-sgld", "--set", "n_steps=0"], "n_steps"),
        (["run", "figure1/case1-sgld", "--set", "thin=1000", "--set", "n_steps=10"], "keeps no draw"),
        (["run", "figure1/case1-sgld", "--set", "temperatures=3,1"], "rise from cold to hot"),
        (["run", "figure1/case1-sgld", "--set", "lr=0"], "lrs must be positive"),
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
    code, _, err = cli("run", "figure1/case1-sgld", *SMALL, "--set", "lr=3", "--set", "thin=1", "--out", tmp_path)
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
    arguments = ["reproduce", "figure1", *SMALL, "--out", tmp_path]
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
    assert all(len(line) <= 80 for line in out.splitlines() if "figure1" not in line), "the table does not fit a terminal"
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
    command = [sys.executable, "-m", "torchrex", "run", "figure1/case1-resgld", "--out", str(tmp_path)]
    settings = ["--set", "n_steps=100000000", "--set", "thin=1000"]  # would take minutes
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, stderr=terminal, text=True, env=environment)
    seen, signalled, deadline = "", False, time.monotonic() + 180
    try:
        while process.poll() is None:  # keeps reading to the end: a terminal that nobody reads would block the process
            assert time.monotonic() < deadline, f"signalled: {signalled}; the terminal shows {seen[-500:]!r}"
            if select.select([controller], [], [], 0.2)[0]:
                seen += os.read(controller, 4096).decode(errors="replace")
            if not signalled and re.search(r"[1-9][\d,]* of [\d,]+ steps", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)):
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
    assert "interrupted in" in out


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
    metrics = [json.loads((tmp_path / f"digits/sghmc/seed={s}/result.json").read_text())["metrics"] for s in (0, 1)]
    assert rows[1]["nll"]["mean"] == pytest.approx(sum(m["nll"] for m in metrics) / 2)
    assert rows[1]["nll"]["se"] == pytest.approx(abs(metrics[0]["nll"] - metrics[1]["nll"]) / 2)
    assert all(0.5 < row["accuracy"]["mean"] / 100 <= 1 for row in rows)
    assert rows[-1]["swaps"]["mean"] == 0
    assert len((tmp_path / "digits.md").read_text().splitlines()) == 7
    assert all(len(line) <= 80 for line in out.splitlines() if "digits" not in line), "the table does not fit a terminal"
    assert "nothing was run again" in cli("reproduce", "digits", *short)[1]


def test_a_budget_stops_reproduce_and_the_next_call_goes_on(cli, tmp_path):
    arguments = ["reproduce", "digits", "--only", "sghmc", "--seeds", "1", "--out", tmp_path]
    arguments += ["--set", "burn_in_epochs=5", "--set", "epochs=20"]
    code, out, _ = cli(*arguments, "--budget", "0.01s")
    assert code == 0
    assert "budget is used up" in out
    assert json.loads((tmp_path / "digits/sghmc/seed=0/result.json").read_text())["status"] == "paused"
    before = (tmp_path / "digits/sghmc/seed=0/checkpoints").stat().st_ino
    assert cli(*arguments)[0] == 0
    assert json.loads((tmp_path / "digits/sghmc/seed=0/result.json").read_text())["status"] == "finished"
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
    assert cli("run", "digits/sghmc", "--set", "epochs=150", "--budget", "0.01s", "--out", tmp_path)[0] == 0
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


def test_a_density_says_that_it_cannot_stop_in_time(cli, tmp_path, caplog):
    code, _, _ = cli("run", "figure1/case1-sgld", *SMALL, "--budget", "1s", "--resume", "--out", tmp_path)
    assert code == 0
    assert "whatever --budget says" in caplog.text
    assert "begins anew" in caplog.text


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
