"""Observers get everything once and change nothing; logs survive a resume; the display is clean."""

from __future__ import annotations

import errno
import importlib
import io
import json
import logging
import math
import sys

import pytest
import torch
from rich.console import Console

import torchrex as tr
from modules import batches, classes, make_run, same
from torchrex.errors import (
    ConfigError,
    InvalidArgumentError,
    MissingDependencyError,
    NonFiniteEnergyError,
)
from torchrex.exchange import StepInfo
from torchrex.experiments import get_recipe, run_recipe
from torchrex.recording import (
    JsonLines,
    LiveDisplay,
    Observer,
    TensorBoard,
    Watched,
    live,
    progress_bar,
    read_log,
)
from torchrex.runs.config import override

N_STEPS = 90


class Recorder(Observer):
    """Writes down every call; `stop_at` is a crash."""

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

    def of(self, kind):
        return [event[1:] for event in self.events if event[0] == kind]


def go(run=None, *, folder=None, observers=(), every=30, **options):
    """A short run with draws every 20 steps and checkpoints every `every`."""
    run, trace = make_run() if run is None else run, tr.Trace()
    options |= {"average": tr.PosteriorAverage(batches(2), every=20), "trace": trace}
    options |= {"checkpoints": folder, "checkpoint_every": every, "observers": observers}
    tr.train(run, tr.DeviceLoader(classes(), 8, seed=0), N_STEPS, **options)
    return run, trace


def crash(at, *, observers=(), **options):
    with pytest.raises(RuntimeError, match="crash"):
        go(observers=[*observers, Recorder(stop_at=at)], **options)


def test_observers_get_everything_once_and_change_nothing(tmp_path):
    seen = Recorder()
    run, trace = go(folder=tmp_path / "c", observers=seen)
    bare, its_trace = go()
    assert same(run.state_dict()["replicas"], bare.state_dict()["replicas"])
    assert same(trace.tensors(), its_trace.tensors())
    assert seen.events[0] == ("start", 0, N_STEPS)
    assert seen.events[-1] == ("end", N_STEPS, "finished")
    steps = seen.of("steps")
    assert [first for first, _ in steps] == [0, *(last for _, last in steps[:-1])]
    assert steps[-1][1] == N_STEPS
    energies = torch.cat([info.energy for info in seen.infos])[..., 0]
    assert torch.equal(energies, trace.tensors()["energy"])
    assert seen.of("draw") == [(20, 1), (40, 2), (60, 3), (80, 4)]
    assert seen.of("save") == [(0,), (30,), (60,), (90,)]


def test_every_observer_gets_the_end_even_of_a_crash():
    watching = Recorder(), Recorder(stop_at=50), Recorder()
    with pytest.raises(RuntimeError, match="crash"):
        go(observers=watching)
    for seen in watching:
        assert seen.events[-1][0] == "end"
        assert [status for _, status in seen.of("end")] == ["failed"]
    with pytest.raises(InvalidArgumentError, match="Observer"):
        go(observers=[print])


def test_a_run_that_fails_ends_alone():
    class Breaks(Recorder):
        def on_steps(self, watched, infos):
            super().on_steps(watched, infos)
            watched.run.ensemble.position[0, 0] = math.nan

    healthy, broken = Recorder(), Breaks()
    runs = [
        tr.TrainingRun(make_run(seed=seed), observers=[seen])
        for seed, seen in enumerate((healthy, broken))
    ]
    assert tr.train_together(runs, batches(7), N_STEPS).status == "finished"
    assert isinstance(runs[1].failure, NonFiniteEnergyError)
    assert [status for _, status in healthy.of("end")] == ["finished"]
    assert [status for _, status in broken.of("end")] == ["failed"]


def some_infos(n, *, rungs=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (n, rungs - 1, 1)
    return StepInfo(
        position=torch.zeros(n, 0),
        energy=torch.randn(n, rungs, 1, generator=generator, dtype=torch.float64),
        accepted=torch.rand(size, generator=generator) < 0.3,
        proposed=torch.ones(size, dtype=torch.bool),
        noise_variance=torch.rand(size, generator=generator, dtype=torch.float64),
        correction=torch.rand(size, generator=generator, dtype=torch.float64),
        replica_at=torch.arange(rungs).repeat(n, 1)[..., None],
    )


# JSON lines


def lines_of(log, kind="steps"):
    return [line for line in log if line["kind"] == kind]


def assert_covers(log, trace):
    """No step is missing and none is there twice."""
    lines, kept = lines_of(log), trace.tensors()
    assert [line["first"] for line in lines] == [1, *(line["step"] + 1 for line in lines[:-1])]
    assert lines[-1]["step"] == trace.n_steps
    for name in ("accepted", "proposed"):
        assert [sum(line[name][0] for line in lines)] == kept[name].tolist()
    for line in lines:
        rows, last = slice(line["first"] - 1, line["step"]), line["step"] - 1
        assert line["energy"] == pytest.approx(kept["energy"][rows].mean(0).tolist())
        assert line["replica_at"] == kept["replica_at"][last].tolist()
        assert line["noise_variance"] == pytest.approx(kept["noise_variance"][last].tolist())


def test_the_log_agrees_with_the_trace(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    ladder = tr.Ladder((0.5, 1.0), 1e-3, anneal=tr.schedules.geometric(0.99))
    _, trace = go(make_run(ladder=ladder), observers=JsonLines(path, every=25))
    log = read_log(path)
    assert_covers(log, trace)
    assert [log[0]["kind"], log[-1]["kind"]] == ["start", "end"]
    assert [log[0]["n_steps"], log[-1]["status"]] == [N_STEPS, "finished"]
    # Draws end a line as well.
    assert [line["step"] for line in lines_of(log)] == [20, 25, 40, 50, 60, 75, 80, 90]
    last = 0.99 ** (N_STEPS - 1)
    assert lines_of(log)[-1]["temperature"] == pytest.approx([0.5 * last, last])
    assert [line["n_draws"] for line in lines_of(log, "draw")] == [1, 2, 3, 4]
    assert all(0 <= line["accuracy"] <= 1 for line in lines_of(log, "draw"))
    assert [line["step"] for line in log] == sorted(line["step"] for line in log)


@pytest.mark.parametrize("crash_at", [5, 37, 65])
def test_a_resumed_log_equals_one_that_never_stopped(tmp_path, crash_at):
    """Also after a crash in the middle of a line."""
    path = tmp_path / "log.jsonl"
    go(observers=JsonLines(tmp_path / "whole.jsonl", every=25), folder=tmp_path / "whole")
    crash(crash_at, observers=[JsonLines(path, every=25)], folder=tmp_path / "c")
    with open(path, "a") as file:
        file.write('{"kind": "steps", "first": 1')
    assert read_log(path)[-1]["kind"] == "end"
    _, trace = go(observers=JsonLines(path, every=25), folder=tmp_path / "c")
    assert_covers(read_log(path), trace)
    whole, mine = (
        [
            {key: value for key, value in line.items() if key not in ("seconds", "time")}
            for line in read_log(file)
            if line["kind"] in ("steps", "draw")
        ]
        for file in (tmp_path / "whole.jsonl", path)
    )
    assert mine == whole


def test_a_run_that_begins_anew_begins_its_log_anew_and_a_log_is_of_one_run(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    go(observers=log)
    _, trace = go(observers=log)
    assert_covers(read_log(log.path), trace)
    assert len(lines_of(read_log(log.path), "start")) == 1
    runs = [tr.TrainingRun(make_run(seed=seed), observers=[log]) for seed in range(2)]
    with pytest.raises(InvalidArgumentError, match="its own JsonLines"):
        tr.train_together(runs, batches(7), 10)


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
        path.write_bytes(whole.replace(b'"steps", "first": 6', b'"steps" first 6'))
        assert read_log(path) == lines[:2]
    assert "line 3" in caplog.text


# TensorBoard


@pytest.fixture
def in_order(monkeypatch):
    """TensorBoard sorts files of one second by the text of a number, in which 10 is before 9."""
    writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(1000))


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def test_tensorboard_agrees_with_the_trace(tmp_path):
    """Energies follow the replicas through the swaps."""
    ladder = tr.Ladder((0.5, 1.0), (1e-3, 2e-3), decay=tr.schedules.geometric(0.99))
    _, trace = go(make_run(ladder=ladder), observers=TensorBoard(tmp_path, every=30))
    found, kept = events_of(tmp_path), trace.tensors()
    scalars, histograms = found.Tags()["scalars"], found.Tags()["histograms"]
    for name in ("energy/rung_1", "rung_of/replica_0", "sigma2/pair_0", "correction/pair_0"):
        assert [event.step for event in found.Scalars(name)] == [30, 60, 90]
    assert {"average/accuracy/rung_0", "average/n_draws", "temperature/rung_0"} <= set(scalars)
    assert {"energy/rung_1", "difference_minus_correction/pair_0"} <= set(histograms)
    # The replica of each rung when the energies were computed.
    before = torch.cat([torch.arange(2)[None], kept["replica_at"][:-1]])
    of_replica = torch.empty_like(kept["energy"]).scatter_(1, before, kept["energy"])
    assert kept["accepted"].item() > 0
    for replica in range(2):
        shown = [event.value for event in found.Scalars(f"energy/replica_{replica}")]
        assert shown == pytest.approx(of_replica[:, replica].view(3, 30).mean(1).tolist(), rel=1e-5)
        rungs = [event.value for event in found.Scalars(f"rung_of/replica_{replica}")]
        assert rungs == kept["replica_at"].argsort(1)[29::30, replica].tolist()
    assert found.Scalars("swaps/pair_0")[-1].value == kept["accepted"].item()
    assert found.Scalars("lr/rung_0")[-1].value == pytest.approx(1e-3 * 0.99**89, rel=1e-5)


def swaps_shown(folder):
    found = events_of(folder)
    tags = [
        tag for tag in found.Tags()["scalars"] if tag.startswith("swaps") and found.Scalars(tag)
    ]
    assert len(tags) == 1
    return tags[0].partition("/")[0], {event.step: event.value for event in found.Scalars(tags[0])}


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize(("crash_at", "every"), [(70, 50), (37, 15), (5, 50)])
def test_tensorboard_counts_swaps_on_after_a_resume(tmp_path, crash_at, every):
    """Between checkpoints, and before the first one; then once more after another crash."""
    path, where = tmp_path / "t", {"folder": tmp_path / "c", "every": every}
    for at in (crash_at, 80):
        crash(at, observers=[TensorBoard(path, every=20)], **where)
    _, trace = go(observers=[TensorBoard(path, every=20)], **where)
    name, shown = swaps_shown(path)
    steps = trace.tensors()["swap_steps"]
    assert name == "swaps"
    assert shown == {step: int((steps < step).sum()) for step in shown}
    assert {20, 40, 60, 80, N_STEPS} <= set(shown)
    assert len(steps) > shown[20] > 0
    energies = [event.step for event in events_of(path).Scalars("energy/rung_0")]
    assert energies == sorted(set(energies)), "points that were done again are hidden"


@pytest.mark.usefixtures("in_order")
def test_tensorboard_counts_all_swaps_if_it_comes_late_and_says_since_when_if_the_run_cannot(
    tmp_path,
):
    path, where = tmp_path / "t", {"folder": tmp_path / "c", "every": 40}
    crash(45, **where)
    _, trace = go(observers=[TensorBoard(path, every=20)], **where)
    steps = trace.tensors()["swap_steps"]
    assert swaps_shown(path) == ("swaps", {at: int((steps < at).sum()) for at in (60, 80, 90)})
    # A run that begins anew in the same folder hides all that.
    go(observers=[TensorBoard(path, every=20)], folder=tmp_path / "new", every=40)
    anew = {step: int((steps < step).sum()) for step in (20, 40, 60, 80, 90)}
    assert swaps_shown(path) == ("swaps", anew)
    old = make_run()  # its state has no counts, as those of older versions
    go(old)
    run = make_run()
    run.load_state_dict({name: part for name, part in old.state_dict().items() if name != "counts"})
    log = TensorBoard(tmp_path / "old", every=20)
    tr.train(run, tr.DeviceLoader(classes(), 8), N_STEPS + 20, observers=log)
    assert swaps_shown(log.path)[0] == f"swaps_since_step_{N_STEPS}"


# Logs of run folders


def small(*more):
    options = ["epochs=4", "burn_in_epochs=1", "checkpoint_every=30", *more]
    return override(get_recipe("digits/resghmc"), options)


def test_problems_before_the_first_step_leave_nothing(tmp_path, monkeypatch):
    class Refuses(Observer):
        def on_start(self, watched):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_recipe(small(), 0, tmp_path, log=["jsonl"], observers=[Refuses()])
    assert not list(tmp_path.rglob("*.json*"))
    with pytest.raises(ConfigError, match="jsonl"):
        run_recipe(small(), 1, tmp_path, log=["json"])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match=r"torchrex\[log\]"):
        run_recipe(small(), 1, tmp_path, log=["tensorboard"])
    assert not list(tmp_path.rglob("seed=1*"))


def test_run_folders_hold_their_logs(tmp_path, caplog):
    config = small()
    folder = run_recipe(config, 0, tmp_path, log=["jsonl", "jsonl"], budget=0.01)
    assert folder.result["status"] == "paused"
    folder = run_recipe(config, 0, tmp_path, log=["jsonl"], resume=True)
    log, trace = read_log(folder.path / "log.jsonl"), folder.trace()
    assert [line["status"] for line in lines_of(log, "end")] == ["paused", "finished"]
    assert sum(line["accepted"][0] for line in lines_of(log)) == trace["accepted"].item()
    assert sum(line["proposed"][0] for line in lines_of(log)) == config.n_steps
    assert [line["name"] for line in lines_of(log, "start")] == [config.recipe] * 2
    run_recipe(config, 1, tmp_path, log=["jsonl"], budget=0.01)
    again = run_recipe(config, 1, tmp_path, overwrite=True)
    assert not (again.path / "log.jsonl").exists()  # that of the run before it
    density = override(get_recipe("figure1/case1-resgld"), ["n_steps=200", "n_runs=2"])
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        run_recipe(density, 0, tmp_path, log=["jsonl"])
    assert "--log is for networks" in caplog.text


# The live display


def terminal(width=120, height=30, *, force_terminal=True, **environ):
    return Console(
        file=io.StringIO(),
        force_terminal=force_terminal,
        width=width,
        height=height,
        color_system=None,
        _environ=environ,
    )


@pytest.fixture
def eager(monkeypatch):
    """A picture after every stretch of steps."""
    monkeypatch.setattr(live, "AT_LEAST", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)


def shown_at(width, n_runs, rungs=2):
    """The picture of runs after 50 of 1,000 steps."""
    display = LiveDisplay("a recipe", console=terminal(width))
    for seed in range(n_runs):
        run = make_run(ladder=tr.Ladder([0.5 * 1.1**k for k in range(rungs)], 1e-3), seed=seed)
        watched = Watched(f"icml2020/cifar10-resnet20-method{seed}", run, 1000)
        display.on_start(watched)
        run.n_steps = 50
        display._lines[watched].pending.append(some_infos(50, rungs=rungs))
        display._lines[watched].update()
    display._close()
    display._bar.update(display._task, completed=50)
    with display.console.capture() as captured:
        display.console.print(display.picture())
    return captured.get().splitlines()


def test_the_picture_at_several_widths():
    infos = some_infos(50)
    rate = f"{100 * int(infos.accepted.sum()) / 50:.3g} %"
    energy, sigma2 = infos.energy[..., 0].mean(0)[1], infos.noise_variance[-1, 0, 0]
    for width in (72, 80, 100, 120):
        shown = "\n".join(shown_at(width, 1))
        words = ("50 of 1,000 steps", "5%", "left", "temperature", "0.55", rate)
        assert all(word in shown for word in (*words, f"{energy:#.5g}", f"{sigma2:#.5g}"))
        assert ("correction" in shown) == (width >= 100)
    for width in (80, 120):
        shown = shown_at(width, 6)
        assert len(shown) == 4 + 6
        assert rate in shown[-1]
        assert [line.split()[1] for line in shown[4:]] == list("012345")
        assert max(map(len, shown)) <= width
    for n_runs in (1, 6):
        title, bar = shown_at(50, n_runs)  # a narrow terminal has no table
        assert title == "a recipe"
        assert "5%" in bar
    assert len(shown_at(100, 1, rungs=1)) == 4 + 1


@pytest.mark.parametrize("n_runs", [1, 2])
def test_the_display_says_that_a_captured_step_is_compiled(n_runs):
    """Until the first steps are reported, and once where no terminal is."""
    screen = LiveDisplay("t", console=terminal())
    lines = LiveDisplay("t", console=terminal(force_terminal=False), reports=True)
    screen.__enter__()  # as the command line does, before a run is there
    for display in (screen, lines):
        for seed in range(n_runs):
            run = make_run(seed=seed)
            run.capturing = True  # as on a GPU
            display.on_start(Watched("a run", run, 1000))
    assert lines.console.file.getvalue() == live.COMPILING + "\n"
    assert live.COMPILING in screen.console.file.getvalue()
    screen._close()

    def shown():
        with screen.console.capture() as captured:
            screen.console.print(screen.picture())
        return captured.get()

    assert live.COMPILING in shown()
    for watched in screen._lines:
        screen._lines[watched].pending.append(some_infos(50))
        screen._lines[watched].update()
    assert live.COMPILING not in shown()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("crash_at", [math.inf, 70])
def test_the_display_shows_the_run_and_leaves_the_screen_clean(crash_at):
    console = terminal()
    observers = [LiveDisplay("a title", console=console), Recorder(stop_at=crash_at)]
    try:
        go(observers=observers)
    except RuntimeError:
        assert crash_at == 70
    shown = console.file.getvalue()
    for words in ("a title", "temperature", "average of 3 draws, accuracy of rung 0"):
        assert words in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert shown.endswith("\x1b[2K")  # and the last thing was to erase
    assert console._live_stack == []


def test_a_resumed_run_counts_its_swaps_on(tmp_path):
    """With a trace or without; if its state has no counts, the display says since when."""

    class Keeps(LiveDisplay):
        def on_end(self, watched, status):
            self._draw()
            self.kept = self._lines[watched]
            super().on_end(watched, status)

    hot = {"ladder": tr.Ladder([0.5, 0.6], 1e-3)}
    crash(70, run=make_run(**hot), folder=tmp_path / "c")
    display = Keeps(console=terminal())
    _, trace = go(make_run(**hot), folder=tmp_path / "c", observers=[display])
    (swaps,) = trace.swaps()
    assert display.kept.accepted == [swaps["accepted"]]
    assert display.kept.proposed == [swaps["proposed"]] == [N_STEPS]
    assert "since step" not in display.console.file.getvalue()

    for known in (True, False):
        before, data = make_run(**hot), tr.DeviceLoader(classes(), 8, seed=0)
        tr.train(before, data, 40)
        state, run = before.state_dict(), make_run(**hot)
        if not known:  # as in the states of older versions
            del state["counts"]
        run.load_state_dict(state)
        display = Keeps(console=terminal())
        tr.train(run, data, N_STEPS, observers=[display])
        shown = "swaps are counted since step 40" in display.console.file.getvalue()
        assert shown == (not known)
        assert display.kept.proposed == [N_STEPS if known else N_STEPS - 40]


def test_the_display_is_silent_where_nobody_looks(capfd):
    go(progress=True)
    assert capfd.readouterr() == ("", "")
    for console in (terminal(force_terminal=False), terminal(TERM="dumb")):
        with LiveDisplay("t", 100, console=console) as display:
            display.progress(50, 100)
            go(observers=display)
        with progress_bar("t", 100, console) as callback:
            assert callback is None
        assert console.file.getvalue() == ""
        assert "silent" in repr(display)


@pytest.mark.parametrize("kind", ["closed pipe", "lost terminal", "full disk", "none"])
def test_a_screen_that_is_lost_does_not_end_the_run(monkeypatch, kind):
    class Lost(io.StringIO):
        written = 0

        def isatty(self):
            return True

        def write(self, text):
            self.written += 1
            codes = {"closed pipe": errno.EPIPE, "lost terminal": errno.EIO}
            raise OSError(codes.get(kind, errno.ENOSPC), "lost")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := None if kind == "none" else Lost())
    assert go(progress=True)[0].n_steps == N_STEPS
    draws = tr.sample(
        lambda x: -x.square().sum(1),
        dim=1,
        ladder=tr.Ladder((1.0, 2.0), 0.1),
        n_steps=9,
        progress=True,
    )
    assert draws.status == "finished"
    assert sys.stderr is stream
    assert stream is None or stream.written == 2  # each display tries once


@pytest.mark.parametrize("junk", ['{"kind": "steps", "step": "9"}', "[1]", "not JSON"])
def test_a_resumed_run_cuts_its_log_where_it_is_damaged(tmp_path, junk):
    path = tmp_path / "log.jsonl"
    crash(65, observers=[JsonLines(path, every=25)], folder=tmp_path / "c")
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, junk, "\n", *rest]))
    go(observers=JsonLines(path, every=25), folder=tmp_path / "c")
    log = read_log(path)
    assert [line["kind"] for line in log[:3]] == ["start", "start", "steps"]
    assert [line["first"] for line in lines_of(log)] == [61, 76, 81]
