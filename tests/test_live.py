"""Who watches a run is told everything once, changes nothing, costs little, and leaves the screen
and its log clean.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
import re
import sys
import time

import pytest
import torch
from rich.console import Console

import torchrex as tr
from modules import batches, classes, flat_energy, linear, make_run, same
from torchrex.errors import (
    ConfigError,
    InvalidArgumentError,
    MissingDependencyError,
    NonFiniteEnergyError,
)
from torchrex.exchange import StepInfo
from torchrex.experiments import get_recipe, run_recipe
from torchrex.experiments.config import override
from torchrex.recording import (
    JsonLines,
    LiveDisplay,
    Observer,
    TensorBoard,
    Watched,
    Windows,
    live,
    read_log,
)
from torchrex.recording.live_picture import Line, draw
from torchrex.recording.live_resize import extra_rows, reflows

N_STEPS = 90


class Told(Observer):
    """Writes down what it is told; `stop_at` is a crash."""

    def __init__(self, stop_at=math.inf):
        self.events, self.infos, self.stop_at = [], [], stop_at

    def on_start(self, watched):
        self.events.append(("start", watched.run.n_steps, watched.n_steps))

    def on_steps(self, watched, infos):
        assert all(values.device.type == "cpu" for values in infos)
        self.infos.append(infos)
        self.events.append(("steps", watched.run.n_steps - len(infos.energy), watched.run.n_steps))
        if watched.run.n_steps >= self.stop_at:
            raise RuntimeError("crash")

    def on_draw(self, watched, average):
        self.events.append(("draw", watched.run.n_steps, average.n_draws))

    def on_save(self, watched):
        self.events.append(("save", watched.run.n_steps))

    def on_end(self, watched, status):
        self.events.append(("end", watched.run.n_steps, status))


def go(run=None, *, folder=None, observers=(), n_steps=N_STEPS, trace=None, every=30, **options):
    """A short run with draws every 20 steps and checkpoints every `every`."""
    run = make_run() if run is None else run
    average = tr.PosteriorAverage(batches(2), every=20)
    trace = tr.Trace() if trace is None else trace
    options = {
        "average": average,
        "trace": trace,
        "checkpoints": folder,
        "checkpoint_every": every,
        **options,
    }
    outcome = tr.train(
        run, tr.DeviceLoader(classes(), 8, seed=0), n_steps, observers=observers, **options
    )
    return run, trace, outcome


def test_observers_are_told_everything_once_and_change_nothing(tmp_path):
    told = Told()
    run, trace, _ = go(folder=tmp_path / "c", observers=told)
    bare, its_trace, _ = go()
    assert same(run.state_dict()["replicas"], bare.state_dict()["replicas"])
    assert same(trace.tensors(), its_trace.tensors())
    assert told.events[0] == ("start", 0, N_STEPS)
    assert told.events[-1] == ("end", N_STEPS, "finished")
    steps = [event[1:] for event in told.events if event[0] == "steps"]
    assert [first for first, _ in steps] == [0, *(last for _, last in steps[:-1])]
    assert steps[-1][1] == N_STEPS
    assert torch.equal(
        torch.cat([info.energy for info in told.infos])[..., 0], trace.tensors()["energy"]
    )
    assert [event[1:] for event in told.events if event[0] == "draw"] == [
        (20, 1),
        (40, 2),
        (60, 3),
        (80, 4),
    ]
    assert [event[1] for event in told.events if event[0] == "save"] == [0, 30, 60, 90]


def test_every_observer_hears_the_end_even_of_a_crash():
    first, crashing, last = Told(), Told(stop_at=50), Told()
    with pytest.raises(RuntimeError, match="crash"):
        go(observers=[first, crashing, last])
    for told in (first, crashing, last):
        assert told.events[-1][0] == "end"
        assert told.events[-1][2] == "failed"
        assert sum(event[0] == "end" for event in told.events) == 1
    with pytest.raises(InvalidArgumentError, match="must derive from"):
        go(observers=[print])


def test_a_member_that_fails_ends_alone():
    class Breaks(Told):
        def on_steps(self, watched, infos):
            super().on_steps(watched, infos)
            watched.run.ensemble.position[0, 0] = math.nan

    healthy, broken = Told(), Breaks()
    members = [
        tr.TrainingRun(make_run(seed=seed), observers=[told])
        for seed, told in enumerate((healthy, broken))
    ]
    assert tr.train_together(members, batches(7), N_STEPS).status == "finished"
    assert isinstance(members[1].failure, NonFiniteEnergyError)
    assert [event[2] for event in healthy.events if event[0] == "end"] == ["finished"]
    assert [event[2] for event in broken.events if event[0] == "end"] == ["failed"]


def some_infos(n, *, rungs=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pairs = rungs - 1
    accepted = torch.rand(n, pairs, 1, generator=generator) < 0.3
    return StepInfo(
        position=torch.zeros(n, 0),
        energy=torch.randn(n, rungs, 1, generator=generator, dtype=torch.float64),
        accepted=accepted,
        proposed=torch.ones(n, pairs, 1, dtype=torch.bool),
        noise_variance=torch.rand(n, pairs, 1, generator=generator, dtype=torch.float64),
        correction=torch.rand(n, pairs, 1, generator=generator, dtype=torch.float64),
        replica_at=torch.arange(rungs).repeat(n, 1)[..., None],
    )


@pytest.mark.parametrize("stretches", [[100], [1] * 100, [3, 37, 9, 51], [25, 25, 50]])
def test_windows_do_not_depend_on_the_stretches(stretches):
    infos, windows, done, found = some_infos(100), Windows(25), 0, []
    for n in stretches:
        found += windows.add(StepInfo(*(values[done : done + n] for values in infos)), done + n)
        done += n
    assert [(window.first, window.last) for window in found] == [
        (1, 25),
        (26, 50),
        (51, 75),
        (76, 100),
    ]
    assert torch.equal(torch.cat([window.energy for window in found]), infos.energy[..., 0])
    assert not list(windows.rest())


# JSON lines


def steps_of(log):
    return [line for line in log if line["kind"] == "steps"]


def assert_covers(log, trace):
    """No step is missing and none is told twice."""
    lines, kept = steps_of(log), trace.tensors()
    assert [line["first"] for line in lines] == [1, *(line["step"] + 1 for line in lines[:-1])]
    assert lines[-1]["step"] == trace.n_steps
    assert [sum(line["accepted"][0] for line in lines)] == kept["accepted"].tolist()
    assert [sum(line["proposed"][0] for line in lines)] == kept["proposed"].tolist()
    for line in lines:
        rows = slice(line["first"] - 1, line["step"])
        assert line["energy"] == pytest.approx(kept["energy"][rows].mean(0).tolist())
        assert line["replica_at"] == kept["replica_at"][line["step"] - 1].tolist()
        assert line["noise_variance"] == pytest.approx(
            kept["noise_variance"][line["step"] - 1].tolist()
        )


def test_the_log_says_what_the_trace_says(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    ladder = tr.Ladder((0.5, 1.0), 1e-3, anneal=tr.schedules.geometric(0.99))
    _, trace, _ = go(make_run(ladder=ladder), observers=JsonLines(path, every=25))
    log = read_log(path)
    assert_covers(log, trace)
    assert [log[0]["kind"], log[-1]["kind"]] == ["start", "end"]
    assert log[0]["n_steps"] == N_STEPS
    assert log[-1]["status"] == "finished"
    assert [line["step"] for line in steps_of(log)] == [
        20,
        25,
        40,
        50,
        60,
        75,
        80,
        90,
    ]  # draws end a line as well
    line = steps_of(log)[-1]
    assert line["temperature"] == pytest.approx(
        [0.5 * 0.99 ** (N_STEPS - 1), 0.99 ** (N_STEPS - 1)]
    )
    assert [line["n_draws"] for line in log if line["kind"] == "draw"] == [1, 2, 3, 4]
    assert all(0 <= line["accuracy"] <= 1 for line in log if line["kind"] == "draw")
    assert [line["step"] for line in log] == sorted(line["step"] for line in log)


@pytest.mark.parametrize("crash_at", [5, 37, 65])
def test_a_resumed_run_goes_on_where_its_checkpoint_is(tmp_path, crash_at):
    """After a crash in the middle of a line, too."""
    path = tmp_path / "log.jsonl"
    go(observers=JsonLines(tmp_path / "whole.jsonl", every=25), folder=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="crash"):
        go(observers=[JsonLines(path, every=25), Told(stop_at=crash_at)], folder=tmp_path / "c")
    with open(path, "a") as file:
        file.write('{"kind": "steps", "first": 1')
    assert read_log(path)[-1]["kind"] == "end"
    _, trace, _ = go(observers=JsonLines(path, every=25), folder=tmp_path / "c")
    log = read_log(path)
    assert_covers(log, trace)
    times = ("seconds", "time")
    whole, mine = (
        [
            {k: v for k, v in line.items() if k not in times}
            for line in lines
            if line["kind"] in ("steps", "draw")
        ]
        for lines in (read_log(tmp_path / "whole.jsonl"), log)
    )
    assert mine == whole


@pytest.mark.parametrize(
    "junk", ['{"kind": "odd"}', '{"kind": "steps", "step": "9"}', "[1]", "not JSON"]
)
def test_a_resumed_run_cuts_its_log_where_it_is_damaged(tmp_path, junk):
    """What another program wrote into it stops nobody, and what follows it counts no more."""
    path = tmp_path / "log.jsonl"
    with pytest.raises(RuntimeError, match="crash"):
        go(observers=[JsonLines(path, every=25), Told(stop_at=65)], folder=tmp_path / "c")
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, junk, "\n", *rest]))
    go(observers=JsonLines(path, every=25), folder=tmp_path / "c")
    log = read_log(path)
    assert [line["kind"] for line in log[:3]] == ["start", "start", "steps"]
    assert [line["first"] for line in steps_of(log)] == [61, 76, 81]


def test_a_run_that_begins_anew_begins_its_log_anew_and_a_log_is_of_one_run(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    go(observers=log)
    _, trace, _ = go(observers=log)
    assert_covers(read_log(log.path), trace)
    assert sum(line["kind"] == "start" for line in read_log(log.path)) == 1
    members = [tr.TrainingRun(make_run(seed=seed), observers=[log]) for seed in range(2)]
    with pytest.raises(InvalidArgumentError, match="give each run its own"):
        tr.train_together(members, batches(7), 10)


def test_a_log_is_json_whatever_the_numbers_and_is_read_up_to_the_damage(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    infos = some_infos(10)
    infos.energy[3] = math.nan
    log, watched = JsonLines(path, every=5), Watched("broken", make_run(), 10)
    log.on_start(watched)
    watched.run.n_steps = 10
    log.on_steps(watched, infos)
    assert [line["step"] for line in read_log(path)] == [0, 5, 10]  # flushed while it goes
    log.on_end(watched, "failed")

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[1]["energy"] == [None, None]
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        assert read_log(path) == lines[:-1]
    assert not caplog.records
    path.write_bytes(whole.replace(b'{"kind": "steps", "first": 6', b'{"kind": "steps" first 6'))
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        assert read_log(path) == lines[:2]
    assert "line 3" in caplog.text


# TensorBoard


@pytest.fixture
def in_order(monkeypatch):
    """TensorBoard sorts files of one second and one process by the text of a number: 10 comes
    before 9, but 1001 after 1000.
    """
    writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(1000))


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def test_tensorboard_says_what_the_trace_says(tmp_path):
    """Energies follow the replicas through the swaps."""
    ladder = tr.Ladder((0.5, 1.0), (1e-3, 2e-3), decay=tr.schedules.geometric(0.99))
    _, trace, _ = go(make_run(ladder=ladder), observers=TensorBoard(tmp_path, every=30))
    found, kept = events_of(tmp_path), trace.tensors()
    tags = found.Tags()
    for name in (
        "energy/rung_1",
        "energy/replica_1",
        "rung_of/replica_0",
        "sigma2/pair_0",
        "correction/pair_0",
    ):
        assert [event.step for event in found.Scalars(name)] == [30, 60, 90]
    assert {"average/accuracy/rung_0", "average/n_draws", "temperature/rung_0", "lr/rung_1"} <= set(
        tags["scalars"]
    )
    assert {"energy/rung_0", "energy/rung_1", "difference_minus_correction/pair_0"} <= set(
        tags["histograms"]
    )
    before = torch.cat(
        [torch.arange(2)[None], kept["replica_at"][:-1]]
    )  # who stood there when the energies were taken
    of_replica = torch.empty_like(kept["energy"]).scatter_(1, before, kept["energy"])
    assert kept["accepted"].item() > 0
    for replica in range(2):
        shown = [event.value for event in found.Scalars(f"energy/replica_{replica}")]
        assert shown == pytest.approx(of_replica[:, replica].view(3, 30).mean(1).tolist(), rel=1e-5)
        stands = [event.value for event in found.Scalars(f"rung_of/replica_{replica}")]
        assert stands == kept["replica_at"].argsort(1)[29::30, replica].tolist()
    assert found.Scalars("swaps/pair_0")[-1].value == kept["accepted"].item()
    assert found.Scalars("lr/rung_0")[-1].value == pytest.approx(1e-3 * 0.99**89, rel=1e-5)


@pytest.mark.usefixtures("in_order")
def test_tensorboard_hides_what_is_done_again(tmp_path):
    with pytest.raises(RuntimeError, match="crash"):
        go(
            observers=[TensorBoard(tmp_path / "t", every=10), Told(stop_at=70)],
            folder=tmp_path / "c",
            every=50,
        )
    go(observers=[TensorBoard(tmp_path / "t", every=10)], folder=tmp_path / "c", every=50)
    assert [event.step for event in events_of(tmp_path / "t").Scalars("energy/rung_0")] == list(
        range(10, 91, 10)
    )


def swaps_shown(folder):
    found = events_of(folder)
    names = {
        tag.partition("/")[0]
        for tag in found.Tags()["scalars"]
        if tag.startswith("swaps") and found.Scalars(tag)
    }
    assert len(names) == 1
    name = names.pop()
    return name, {event.step: event.value for event in found.Scalars(f"{name}/pair_0")}


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize(("crash_at", "every"), [(70, 50), (37, 15), (5, 50)])
def test_tensorboard_counts_swaps_on_after_a_resume(tmp_path, crash_at, every):
    """Between checkpoints, at points that are none, and before the first one; then once more after
    it was interrupted.
    """
    path = tmp_path / "t"
    with pytest.raises(RuntimeError, match="crash"):
        go(
            observers=[TensorBoard(path, every=20), Told(stop_at=crash_at)],
            folder=tmp_path / "c",
            every=every,
        )
    with pytest.raises(RuntimeError, match="crash"):
        go(
            observers=[TensorBoard(path, every=20), Told(stop_at=80)],
            folder=tmp_path / "c",
            every=every,
        )
    _, trace, _ = go(observers=[TensorBoard(path, every=20)], folder=tmp_path / "c", every=every)
    name, shown = swaps_shown(path)
    steps = trace.tensors()["swap_steps"]
    assert name == "swaps"
    assert shown == {step: int((steps < step).sum()) for step in shown}
    assert set(range(20, N_STEPS, 20)) | {N_STEPS} <= set(shown)
    assert len(steps) > shown[20] > 0


@pytest.mark.usefixtures("in_order")
def test_tensorboard_says_since_when_it_counts_if_it_came_late(tmp_path):
    path = tmp_path / "t"
    with pytest.raises(RuntimeError, match="crash"):
        go(observers=[Told(stop_at=45)], folder=tmp_path / "c", every=40)
    with pytest.raises(RuntimeError, match="crash"):
        go(
            observers=[TensorBoard(path, every=20), Told(stop_at=85)],
            folder=tmp_path / "c",
            every=40,
        )
    _, trace, _ = go(observers=[TensorBoard(path, every=20)], folder=tmp_path / "c", every=40)
    name, shown = swaps_shown(path)
    steps = trace.tensors()["swap_steps"]
    assert name == "swaps_since_step_40"
    assert shown == {step: int(((steps >= 40) & (steps < step)).sum()) for step in (60, 80, 90)}
    # A run that begins anew in the same folder hides all that, whatever steps it had.
    go(observers=[TensorBoard(path, every=20)], folder=tmp_path / "new", every=40)
    assert swaps_shown(path) == (
        "swaps",
        {step: int((steps < step).sum()) for step in (20, 40, 60, 80, 90)},
    )


@pytest.mark.usefixtures("in_order")
def test_tensorboard_does_not_count_on_from_points_of_another_run(tmp_path):
    path = tmp_path / "t"
    go(observers=[TensorBoard(path, every=20)], folder=tmp_path / "another", every=40)
    with pytest.raises(RuntimeError, match="crash"):
        go(
            observers=[TensorBoard(path, every=20), Told(stop_at=25)],
            folder=tmp_path / "c",
            every=20,
        )
    with pytest.raises(RuntimeError, match="crash"):
        go(
            observers=[Told(stop_at=45)], folder=tmp_path / "c", every=20
        )  # not logged: the point at 40 is the other run's
    go(observers=[TensorBoard(path, every=20)], folder=tmp_path / "c", every=20)
    scalars = events_of(path).Tags()["scalars"]
    assert "swaps_since_step_40/pair_0" in scalars


def small(*more):
    return override(
        get_recipe("digits/resghmc"), ["epochs=4", "burn_in_epochs=1", "checkpoint_every=30", *more]
    )


def test_missing_tensorboard_names_the_extra_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match=r"torchrex\[log\]"):
        run_recipe(small(), 0, tmp_path, log=["tensorboard"])
    with pytest.raises(ConfigError, match="did you mean jsonl"):
        run_recipe(small(), 0, tmp_path, log=["json"])
    assert not list(tmp_path.iterdir())


def test_run_folders_hold_their_logs(tmp_path, caplog):
    config = small()
    folder = run_recipe(config, 0, tmp_path, log=["jsonl", "jsonl"], budget=0.01)
    assert folder.result["status"] == "paused"
    folder = run_recipe(config, 0, tmp_path, log=["jsonl"], resume=True)
    log, trace = read_log(folder.path / "log.jsonl"), folder.trace()
    assert [line["status"] for line in log if line["kind"] == "end"] == ["paused", "finished"]
    assert sum(line["accepted"][0] for line in steps_of(log)) == trace["accepted"].item()
    assert (
        sum(line["proposed"][0] for line in steps_of(log))
        == trace["proposed"].item()
        == config.n_steps
    )
    assert [line["name"] for line in log if line["kind"] == "start"] == [config.recipe] * 2
    run_recipe(config, 1, tmp_path, log=["jsonl"], budget=0.01)
    again = run_recipe(config, 1, tmp_path, overwrite=True)
    assert not (again.path / "log.jsonl").exists()  # that of the run before it
    density = override(get_recipe("figure1/case1-resgld"), ["n_steps=200", "n_runs=2"])
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        run_recipe(density, 0, tmp_path, log=["jsonl"])
    assert "--log is for networks" in caplog.text


def test_a_failure_before_the_first_step_leaves_nothing(tmp_path):
    class Refuses(Observer):
        def on_start(self, watched):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_recipe(small(), 0, tmp_path, log=["jsonl"], observers=[Refuses()])
    assert not list(tmp_path.rglob("*.json*"))


# The live display


def terminal(width=120, height=30):
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        color_system=None,
        _environ={},
    )


def text_of(picture, width, height=30):
    console = Console(
        file=io.StringIO(), width=width, height=height, color_system=None, _environ={}
    )
    console.print(picture)
    return console.file.getvalue()


def lines_of(n_runs, rungs=2, *, steps=50):
    found = []
    for seed in range(n_runs):
        run = make_run(ladder=tr.Ladder([0.5 * 1.1**k for k in range(rungs)], 1e-3), seed=seed)
        line = Line(Watched(f"icml2020/cifar10-resnet20-method{seed}", run, 1000))
        for window in Windows(steps).add(some_infos(steps, rungs=rungs), steps):
            line.take(window, 200)
        run.n_steps = steps
        found.append(line)
    return found


def test_a_picture_for_every_room():
    one, six = lines_of(1), lines_of(6)
    swaps = int(some_infos(50).accepted.sum())
    shown = text_of(draw("training", 50, 1000, 61.0, one, 120, 30), 120)
    assert all(
        word in shown
        for word in ("50 of 1,000 steps", "5 %", "0:01:01 left", "temperature", "0.55", "sigma2")
    )
    assert f"{100 * swaps / 50:.3g} %" in shown
    assert f"{float(some_infos(50).energy.mean(0)[1]):#.5g}" in shown
    assert f"{float(some_infos(50).noise_variance[-1, 0]):#.5g}" in shown
    shown = text_of(draw("training", 50, 1000, 61.0, six, 80, 30), 80).splitlines()
    assert len(shown) == 3 + 6
    assert all(f"method{k} " in line for k, line in enumerate(shown[3:]))
    for width in (80, 100, 120):
        for runs in (one, six, lines_of(1, 8), lines_of(2, 1)):
            for height in (5, 9, 30):
                shown = text_of(
                    draw("a recipe with a long name, seed 0", 50, 1000, 61.0, runs, width, height),
                    width,
                )
                assert len(shown.splitlines()) < height
                assert "…" not in shown.replace("…", "", len(runs) + 1), "only names are shortened"
    for width in (20, 40, 60, 79):
        assert (
            len(
                text_of(
                    draw("a recipe with a long name", 999, 1000, 3601.0, [], width, 30), width
                ).splitlines()
            )
            == 1
        )
    assert "1:00:01 left" in text_of(draw("t", 999, 1000, 3601.0, six, 40, 30), 40)
    assert (
        len(text_of(draw("training", 50, 1000, None, six, 120, 6), 120).splitlines()) == 1
    )  # no room: the bar


def test_the_display_shows_the_run_and_leaves_the_screen_clean(monkeypatch):
    monkeypatch.setattr(live, "AT_LEAST", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    for crash in (math.inf, 70):
        console = terminal()
        display = LiveDisplay("a title", console=console)
        try:
            go(observers=[display, Told(stop_at=crash)])
        except RuntimeError:
            assert crash == 70
        shown = console.file.getvalue()
        assert "a title" in shown
        assert "temperature" in shown
        assert "average of 3 draws, accuracy of rung 0" in shown
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
        assert shown.endswith("\x1b[2K")  # and the last thing was to erase
        assert console._live_stack == []


def test_a_resumed_run_counts_its_swaps_on(tmp_path):
    """From the trace where there is one; without one the display says since when it counts."""

    class Keeps(LiveDisplay):
        def on_end(self, watched, status):
            self._draw()
            self.kept = self._lines[watched]
            self.picture = text_of(draw("t", 1, 2, None, [self.kept], 100, 30), 100)
            super().on_end(watched, status)

    hot = {"ladder": tr.Ladder([0.5, 0.6], 1e-3)}
    with pytest.raises(RuntimeError, match="crash"):
        go(make_run(**hot), folder=tmp_path / "c", observers=[Told(stop_at=70)])
    display = Keeps(console=terminal())
    _, trace, _ = go(make_run(**hot), folder=tmp_path / "c", observers=[display])
    assert trace.n_steps == N_STEPS
    assert [(display.kept.accepted[0], display.kept.proposed[0])] == [
        (s["accepted"], s["proposed"]) for s in trace.swaps()
    ]
    assert display.kept.proposed == [N_STEPS]
    assert "since step" not in display.picture

    run = make_run(**hot)
    tr.train(run, tr.DeviceLoader(classes(), 8, seed=0), 40)
    display = Keeps(console=terminal())
    tr.train(run, tr.DeviceLoader(classes(), 8, seed=0), N_STEPS, observers=[display])
    assert "swaps are counted since step 40" in display.picture
    assert display.kept.proposed == [N_STEPS - 40]


class Screen(io.StringIO):
    """A terminal that breaks lines when it becomes narrower, as far as the display uses it; it
    never scrolls.
    """

    def __init__(self, width):
        super().__init__()
        self.width, self.rows, self.row, self.column = width, [""], 0, 0

    def write(self, text):
        for part in re.findall(r"\x1b\[[?\d]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row == len(self.rows))
            elif part == "\x1b[2K":
                self.rows[self.row] = ""
            elif part == "\x1b[1A":
                assert self.row > 0, "above the top of the terminal"
                self.row -= 1
            elif part[0] != "\x1b":
                line = self.rows[self.row]
                self.rows[self.row] = (
                    line[: self.column].ljust(self.column) + part + line[self.column + len(part) :]
                )
                self.column += len(part)
                assert self.column <= self.width, "a line too long"
            else:
                assert part in ("\x1b[?25l", "\x1b[?25h"), repr(part)
        return len(text)

    def narrow(self, width):
        broken = [
            [row[k : k + width] for k in range(0, len(row), width)] or [""] for row in self.rows
        ]
        self.row = (
            sum(map(len, broken[: self.row + 1])) - 1
        )  # the display leaves the cursor at the end of its last line
        self.rows, self.width = [row for rows in broken for row in rows], width
        self.column = len(self.rows[self.row])


@pytest.mark.parametrize("ends_at", [120, 99, 75, 40, 20])
def test_a_terminal_that_becomes_narrower_keeps_no_pieces(monkeypatch, ends_at):
    """Neither of pictures before, nor are lines erased that were there before the display."""
    monkeypatch.setattr(live, "AT_LEAST", 0.0)
    for name in ("XTERM_VERSION", "STY"):
        monkeypatch.delenv(name, raising=False)
    screen = Screen(120)
    console = Console(
        file=screen, force_terminal=True, width=120, height=30, color_system=None, _environ={}
    )
    screen.write("what was there\nbefore\n")

    class Narrows(Observer):
        def on_steps(self, watched, infos):
            if screen.width > ends_at:
                width = next(width for width in (99, 75, 40, 20) if width < screen.width)
                screen.narrow(width)
                console.size = (width, 30)

    go(observers=[LiveDisplay("bar", console=console), SeesTheScreen(screen), Narrows()])
    assert screen.width == ends_at
    while screen.rows and not screen.rows[-1]:
        screen.rows.pop()
    assert screen.rows == ["what was there", "before"]


def test_a_terminal_that_becomes_narrower_just_before_the_end_is_left_clean(monkeypatch):
    monkeypatch.setattr(live, "AT_LEAST", 0.0)
    for name in ("XTERM_VERSION", "STY"):
        monkeypatch.delenv(name, raising=False)
    screen = Screen(120)
    console = Console(
        file=screen, force_terminal=True, width=120, height=30, color_system=None, _environ={}
    )
    screen.write("before\n")
    with LiveDisplay("a title", 1000, console=console) as display:
        display.progress(10, 1000)
        screen.narrow(20)
        console.size = (20, 30)
    assert "".join(screen.rows) == "before"


class SeesTheScreen(Observer):
    """After every picture there is one bar on it."""

    def __init__(self, screen):
        self.screen = screen

    def on_steps(self, watched, infos):
        text = "\n".join(self.screen.rows)
        assert text.startswith("what was there\nbefore\n")
        assert text.count("bar") == 1, text
        assert text.count("temperature") == (self.screen.width >= 72), text


def test_a_terminal_that_does_not_break_lines_keeps_what_was_there():
    picture = draw("training", 50, 1000, 61.0, lines_of(1), 120, 30)
    widths = [len(line) for line in text_of(picture, 120).splitlines()]
    for width in (99, 75, 40, 20):
        rows = sum(-(-n // width) for n in widths)
        assert extra_rows(terminal(width), picture, drawn_for=120, width=width) == rows - len(
            widths
        )
    assert reflows({})
    assert not reflows({"XTERM_VERSION": "XTerm(388)"})
    assert not reflows({"STY": "1.pts"})
    assert reflows({"TMUX": "x", "XTERM_VERSION": "XTerm(388)"})


def test_a_new_size_is_drawn_at_once(monkeypatch):
    """Also when pictures are dear and the next one would be far away."""
    monkeypatch.setattr(live, "AT_LEAST", 0.0)
    console = terminal()
    with LiveDisplay("t", 100, console=console) as display:
        display._cost = 100.0
        display.progress(10, 100)
        assert "10 of 100" not in console.file.getvalue()
        console.size = (80, 30)
        display.progress(11, 100)
        assert "11 of 100" in console.file.getvalue()


def test_the_display_is_silent_where_nobody_looks(capfd):
    go(progress=True)
    out, err = capfd.readouterr()
    assert out == err == ""
    for console in (
        Console(file=io.StringIO(), _environ={}),
        Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}),
    ):
        with LiveDisplay("t", 100, console=console) as display:
            display.progress(50, 100)
            go(observers=display)
        assert console.file.getvalue() == ""
        assert "silent" in repr(display)


def test_the_display_of_work_without_observers(monkeypatch):
    monkeypatch.setattr(live, "AT_LEAST", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    console = terminal()
    with LiveDisplay("sampling", 1000, console=console) as display:
        assert display.seconds_left() is None
        display.progress(100, 1000)
        time.sleep(0.02)
        display.progress(600, 1000)
        assert 0.8 * 0.02 <= display.seconds_left() < 1.0
    assert "600 of 1,000 steps" in console.file.getvalue()


def test_a_slow_picture_is_drawn_seldom(monkeypatch):
    """However slow the terminal is, drawing takes a fixed share of the time."""
    drawn = []

    def slow(*_):
        drawn.append(time.perf_counter())
        time.sleep(0.004)
        return "picture"

    monkeypatch.setattr(live, "draw", slow)
    with LiveDisplay("t", 10**6, console=terminal()) as display:
        began = time.perf_counter()
        n = 0
        while time.perf_counter() - began < 1.5:
            n += 1
            display.progress(n, 10**6)
        elapsed = time.perf_counter() - began
        assert 2 <= len(drawn) <= 4, (drawn, elapsed)


def test_runs_side_by_side_are_drawn_at_one_step(monkeypatch):
    monkeypatch.setattr(live, "AT_LEAST", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    seen = []
    monkeypatch.setattr(
        live, "draw", lambda *a: (seen.append([sum(line.proposed) for line in a[4]]), "")[1]
    )
    display = LiveDisplay(console=terminal())
    members = [
        tr.TrainingRun(make_run(linear, flat_energy(), seed=seed), observers=[display])
        for seed in range(3)
    ]
    tr.train_together(members, batches(7), 40)
    assert [40, 40, 40] in seen
    assert all(len(set(counts)) == 1 for counts in seen if len(counts) == 3)
