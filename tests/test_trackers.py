"""W&B and MLflow get the numbers of the other logs, once each, and nothing leaves this machine."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import shutil
import socket
import struct
import sys
import time

import pytest

import torchrex as tr
from modules import batches, make_run
from test_live import Recorder, crash, go, lines_of, small
from torchrex.errors import MissingDependencyError, RunFolderError
from torchrex.experiments import run_recipe
from torchrex.recording import read_log
from torchrex.recording.scalars import flattened

EVERY = 10  # draws are at multiples of it: then JSON lines has the same windows
TRACKERS = {"wandb": tr.WandB, "mlflow": tr.MLflow}
KINDS = tuple(TRACKERS)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A database of MLflow, which takes seconds to make."""
    path = tmp_path_factory.mktemp("store") / "runs.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="module")
def proxy():
    """Whoever asks for another host comes here. W&B's own process keeps the first surroundings it
    sees, so it begins and ends with this module.
    """
    library = sys.modules.get("wandb")
    if library is not None:
        library.teardown()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        yield server
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path_factory, request, proxy):
    """Local modes, with an empty database for MLflow; nobody may ask for another host."""
    home, address = tmp_path_factory.mktemp("home"), f"http://127.0.0.1:{proxy.getsockname()[1]}"
    monkeypatch.chdir(home)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        for each in (name, name.lower()):
            monkeypatch.setenv(each, "" if name == "NO_PROXY" else address)
    for name, value in {
        "HOME": str(home),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_BASE_URL": address,
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(name, value)
    if "mlflow" in request.node.name:
        shutil.copy(request.getfixturevalue("empty_store"), home / "runs.db")
        importlib.import_module("mlflow").set_tracking_uri(f"sqlite:///{home}/runs.db")
    yield home / "runs.db"
    with contextlib.suppress(TimeoutError):
        proxy.accept()
        pytest.fail("a connection to the network was tried")


def make_log(kind, folder, **options):
    pytest.importorskip(kind)
    return TRACKERS[kind](folder, every=EVERY, **options)


def wandb_records(path):
    """The records of W&B's file, by its own protocol. In LevelDB's format: blocks of 32 KiB, every
    piece after its checksum, length and kind. W&B 0.31 has no reader in Python.
    """
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):
            return  # it is being written
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of it, or its last piece
            record = records.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def complete_records(path):
    """W&B's own process writes the file: its last record comes a moment after `finish`."""
    for _ in range(200):
        records = list(wandb_records(path))
        if records and records[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.05)
    return records


def values_of(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


class Arrived:
    """What is in the files of one run: `points[name]` are (step, value) in the order of sending."""

    def __init__(self, kind, folder, store=None):
        self.points, self.config, self.summary, self.ids = {}, {}, {}, set()
        getattr(self, kind)(folder, store)

    def wandb(self, folder, _):
        for path in sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns):
            for record in complete_records(path):
                which = record.WhichOneof("record_type")
                if which == "run":
                    self.ids.add(record.run.run_id)
                    self.config |= values_of(record.run.config.update)
                elif which == "config":
                    self.config |= values_of(record.config.update)
                elif which == "history":
                    row = values_of(record.history.item)
                    step = row["_step"]
                    for name, value in row.items():
                        if not name.startswith("_"):
                            self.points.setdefault(name, []).append((step, value))
                elif which == "summary":
                    self.summary |= values_of(record.summary.update)
                elif which == "exit":
                    self.status = record.exit.exit_code

    def mlflow(self, folder, store):
        client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{store}")
        (line, *_) = (folder / "torchrex.jsonl").read_text().splitlines()
        run = client.get_run(json.loads(line)["run"])
        self.ids = {run.info.run_id}
        self.config, self.status = run.data.params, run.info.status
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            if name.startswith("final/"):
                self.summary[name] = history[-1].value
            else:
                self.points[name] = [(point.step, point.value) for point in history]

    def steps(self, name):
        return [step for step, _ in self.points[name]]


def assert_is_that_of_json_lines(arrived, log):
    """All windows and all draws, each once."""
    lines, swaps = lines_of(log), 0
    for line in lines:
        swaps += line["accepted"][0]
        expected = {f"energy/rung_{k}": energy for k, energy in enumerate(line["energy"])}
        expected |= {f"lr/rung_{k}": lr for k, lr in enumerate(line["lr"])}
        expected |= {f"temperature/rung_{k}": t for k, t in enumerate(line["temperature"])}
        expected |= {"sigma2/pair_0": line["noise_variance"][0], "swaps/pair_0": swaps}
        expected |= {"correction/pair_0": line["correction"][0]}
        expected["acceptance_rate/pair_0"] = line["accepted"][0] / line["proposed"][0]
        for replica in range(2):
            expected[f"rung_of/replica_{replica}"] = line["replica_at"].index(replica)
        for name, value in expected.items():
            found = [v for step, v in arrived.points[name] if step == line["step"]]
            assert found == [pytest.approx(value, rel=1e-12)], (name, line["step"])
    assert arrived.steps("energy/rung_0") == [line["step"] for line in lines]
    assert set(arrived.points) >= {"energy/replica_0", "energy/replica_1"}
    draws = [(line["step"], line["accuracy"]) for line in lines_of(log, "draw")]
    assert arrived.points["average/accuracy/rung_0"] == draws
    assert arrived.steps("average/n_draws") == [step for step, _ in draws]


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_json_lines(tmp_path, store, kind):
    log = tr.JsonLines(tmp_path / "log.jsonl", every=EVERY)
    run, trace = go(observers=[log, make_log(kind, tmp_path / "t")])
    arrived = Arrived(kind, tmp_path / "t", store)
    assert_is_that_of_json_lines(arrived, read_log(log.path))
    assert trace.tensors()["accepted"].item() > 0
    assert arrived.status in (0, "FINISHED")
    report = run.exchange()
    assert arrived.summary["final/barrier"] == pytest.approx(report.barrier)
    assert arrived.summary["final/mean_acceptance_rate"] == pytest.approx(report.pairs[0].rate)
    newest = arrived.points["average/nll/rung_0"][-1][1]
    assert arrived.summary["final/average/nll/rung_0"] == pytest.approx(newest)
    if kind == "mlflow":
        assert arrived.config["torchrex.ladder.temperatures"] == "[0.5, 1.0]"
        assert arrived.config["torchrex.energy.n_data"] == "40"
    else:
        assert arrived.config["torchrex"]["ladder"]["temperatures"] == [0.5, 1.0]
        assert arrived.config["torchrex"]["energy"]["n_data"] == 40


@pytest.mark.parametrize("crash_at", [5, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_in_the_same_one_and_repeats_no_step(tmp_path, store, kind, crash_at):
    """A crash leaves one more point, of the window that it cut; the others are those of a run that
    never stopped.
    """
    go(observers=[tr.JsonLines(tmp_path / "log.jsonl", every=EVERY)])
    crash(crash_at, observers=[make_log(kind, tmp_path / "t")], folder=tmp_path / "c", every=20)
    first = Arrived(kind, tmp_path / "t", store)
    assert first.status in (1, "FAILED")
    go(observers=[make_log(kind, tmp_path / "t")], folder=tmp_path / "c", every=20)
    arrived = Arrived(kind, tmp_path / "t", store)
    assert arrived.status in (0, "FINISHED")
    began_anew = crash_at == 5  # before the first checkpoint that has steps
    assert (len(arrived.ids | first.ids) == 2) == began_anew
    if began_anew and kind == "wandb":
        return  # both runs are in the folder; each has steps of its own
    steps = arrived.steps("energy/rung_0")
    assert len(steps) == len(set(steps))
    extra = {step for step in first.steps("energy/rung_0") if step % EVERY} if first.ids else set()
    for points in arrived.points.values():
        points[:] = [point for point in points if point[0] not in extra]
    assert_is_that_of_json_lines(arrived, read_log(tmp_path / "log.jsonl"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_active_run_of_the_user_is_used_and_left_open(tmp_path, store, kind):
    log, mine = tr.JsonLines(tmp_path / "log.jsonl", every=EVERY), make_log(kind, tmp_path / "t")
    library = importlib.import_module(kind)
    if kind == "wandb":
        with library.init(project="mine", dir=str(tmp_path / "t"), config={"seed": 7}) as run:
            go(observers=[log, mine])
            run.log({"mine": 1.0})
    else:
        with library.start_run() as run:
            go(observers=[log, mine])
            library.log_metric("mine", 1.0)
    arrived = Arrived(kind, tmp_path / "t", store)
    assert arrived.ids == {run.id if kind == "wandb" else run.info.run_id}
    assert [value for _, value in arrived.points.pop("mine")] == [1.0]
    assert_is_that_of_json_lines(arrived, read_log(log.path))
    if kind == "wandb":
        assert arrived.config["seed"] == 7, "not replaced by ours"


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_writes_them_into_run_folders(tmp_path, store, kind):
    pytest.importorskip(kind)
    config = small()
    folder = run_recipe(config, 0, tmp_path, log=[kind, "jsonl"], budget=0.01)
    assert Arrived(kind, folder.path / kind, store).status in (0, "SCHEDULED")
    folder = run_recipe(config, 0, tmp_path, log=[kind, "jsonl"], resume=True)
    arrived = Arrived(kind, folder.path / kind, store)
    assert len(arrived.ids) == 1
    steps = arrived.steps("energy/rung_0")
    assert steps == sorted(set(steps))
    assert steps[-1] == config.n_steps
    swaps = sum(line["accepted"][0] for line in lines_of(read_log(folder.path / "log.jsonl")))
    assert arrived.points["swaps/pair_0"][-1] == (config.n_steps, swaps)
    run_recipe(config, 0, tmp_path, overwrite=True)
    assert not (folder.path / kind).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_train_together_have_a_run_each(tmp_path, store, kind):
    runs = [
        tr.TrainingRun(make_run(seed=seed), observers=[make_log(kind, tmp_path / str(seed))])
        for seed in range(2)
    ]
    tr.train_together(runs, batches(5), 20)
    both = [Arrived(kind, tmp_path / str(seed), store) for seed in range(2)]
    assert both[0].ids.isdisjoint(both[1].ids)
    for each in both:
        assert each.steps("energy/rung_0") == [10, 20]
    energies = [[value for _, value in each.points["energy/rung_0"]] for each in both]
    assert energies[0] != energies[1]


def test_a_run_goes_on_while_the_server_of_mlflow_fails(tmp_path, store, monkeypatch, caplog):
    log = make_log("mlflow", tmp_path / "t")
    mlflow = importlib.import_module("mlflow")
    client, real = mlflow.MlflowClient, mlflow.MlflowClient.log_batch
    calls = []

    def fails(self, run_id, metrics=(), **more):
        calls.append(len(metrics))
        if 3 <= len(calls) <= 5:
            raise mlflow.exceptions.MlflowException("no route to host")
        real(self, run_id, metrics=metrics, **more)

    monkeypatch.setattr(client, "log_batch", fails)
    lines = tr.JsonLines(tmp_path / "log.jsonl", every=EVERY)
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        go(observers=[log, lines])
    assert caplog.text.count("they are kept for later: no route to host") == 3
    assert_is_that_of_json_lines(Arrived("mlflow", log.path, store), read_log(lines.path))


@pytest.mark.parametrize("kind", KINDS)
def test_problems_are_one_line_before_the_first_step(tmp_path, monkeypatch, kind):
    if kind == "mlflow":
        importlib.import_module("mlflow").set_tracking_uri("nonsense://x")
    without_key = {"mode": "online"} if kind == "wandb" else {}
    log = make_log(kind, tmp_path / "t", **without_key)
    seen = Recorder()
    with pytest.raises(RunFolderError, match="has no run to write to") as error:
        go(observers=[seen, log])
    assert len(str(error.value).splitlines()) == 1
    assert not seen.of("steps")
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(MissingDependencyError, match=rf"torchrex\[{kind}\]"):
        TRACKERS[kind](tmp_path)


def test_parameters_are_the_leaves_of_a_setting():
    assert flattened({"a": {"b": 1, "c": {"d": [2]}}, "e": {}, "f": math.pi}) == {
        "a.b": 1,
        "a.c.d": [2],
        "e": {},
        "f": math.pi,
    }
