"""Logs of one run, in windows of steps: JSON lines for programs, TensorBoard for people.

A line of JSON has its `kind` (start, steps, draw, end) and a `step`: so many steps were done. A
line of kind steps sums up those after the line before: `first` to `step`, counted from 1. Every
checkpoint ends a line, so a resumed run cuts the log at its checkpoint and goes on without a gap
and without saying anything twice.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import logging
import math
import os
import shutil
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrex.checkpoint import parse_json
from torchrex.durable import open_file, require_file, restart_file, writing
from torchrex.errors import (
    ConfigError,
    InvalidArgumentError,
    RunFolderError,
    import_extra,
    require_whole,
)
from torchrex.exchange import StepInfo
from torchrex.posterior import PosteriorAverage
from torchrex.recording.observer import Observer, Watched, Window, Windows, metrics_of

logger = logging.getLogger("torchrex")

JSON_LINES, TENSORBOARD = "log.jsonl", "tensorboard"  # names in a run folder
LONGEST = 2**24  # bytes of a line; ours have some thousand
HISTOGRAMS_EVERY = 10  # windows: a histogram takes ten times the bytes of a scalar


class _Log(Observer):
    """What both logs share: one run each, a summary of every window of steps."""

    def __init__(self, path: Path | str, *, every: int = 100) -> None:
        require_whole("every", every, 1)
        self.path, self.every = Path(path), every
        self._watched: Watched | None = None  # while it is open
        self._out: Any = None  # the open file, or TensorBoard's writer

    def on_start(self, watched: Watched) -> None:
        if self._watched is not None:
            raise InvalidArgumentError(
                f"{self.path} is the log of {self._watched.name} already; give each run its own "
                f"{type(self).__name__}"
            )
        self._windows = Windows(self.every)
        self._open(watched)
        self._watched = watched

    def on_steps(self, watched: Watched, infos: StepInfo) -> None:
        for window in self._windows.add(infos, watched.run.n_steps):
            self._write_window(watched, window)

    def on_end(self, watched: Watched, status: str) -> None:
        if self._watched is None:
            return
        self._watched = None
        try:
            self._write_rest(watched)
            self._write_end(watched, status)
        finally:
            self._out.close()

    def _write_rest(self, watched: Watched) -> None:
        for window in self._windows.rest():
            self._write_window(watched, window)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        advice = "choose another place for the log"
        return writing(self.path, RunFolderError, advice, room="resume the run")

    @abstractmethod
    def _open(self, watched: Watched) -> None: ...

    @abstractmethod
    def _write_window(self, watched: Watched, window: Window) -> None: ...

    @abstractmethod
    def _write_end(self, watched: Watched, status: str) -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, every={self.every})"


class JsonLines(_Log):
    """Writes the log of one run, a line at least every `every` steps.

    A run that begins at step 0 begins its file anew.
    """

    def _open(self, watched: Watched) -> None:
        step, ladder = watched.run.n_steps, watched.ladder
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._out = restart_file(self.path, _lines_to(self.path, step) if step else b"")
        self._began = time.monotonic()
        self._write(
            kind="start",
            step=step,
            name=watched.name,
            seed=watched.seed,
            n_steps=watched.n_steps,
            temperatures=list(ladder.temperatures),
            lrs=list(ladder.lrs),
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def on_draw(self, watched: Watched, average: PosteriorAverage) -> None:
        self._write_rest(watched)  # lines are in the order of the steps
        self._write(
            kind="draw",
            step=watched.run.n_steps,
            average=watched.number_of(average),
            n_draws=average.n_draws,
            **metrics_of(average, average.rungs[0]),
        )

    def on_save(self, watched: Watched) -> None:
        self._write_rest(watched)
        os.fsync(self._out.fileno())

    def _write_window(self, watched: Watched, window: Window) -> None:
        temperature, lr = watched.rungs_at(window.last - 1)
        self._write(
            kind="steps",
            first=window.first,
            step=window.last,
            energy=window.energy.mean(0).tolist(),
            temperature=temperature,
            lr=lr,
            replica_at=window.replica_at[-1].tolist(),
            proposed=window.proposed.sum(0).tolist(),
            accepted=window.accepted.sum(0).tolist(),
            noise_variance=window.noise_variance[-1].tolist(),
            correction=window.correction[-1].tolist(),
        )

    def _write_end(self, watched: Watched, status: str) -> None:
        self._write(kind="end", step=watched.run.n_steps, status=status)

    def _write(self, **line: Any) -> None:
        """One line in one write, flushed at once."""
        line = {name: _plain(value) for name, value in line.items()}
        line["seconds"] = round(time.monotonic() - self._began, 3)  # since on_start
        with self._writing():
            self._out.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._out.flush()


def read_log(path: Path | str) -> list[dict[str, Any]]:
    """All lines of a log up to the first damaged one; an incomplete last line is no damage."""
    path = Path(path)
    try:
        return [line for line, _ in _lines(path, warn=True)]
    except OSError as error:
        raise RunFolderError(
            f"cannot read {path} ({error.strerror}); give the {JSON_LINES} of a run folder"
        ) from None


def _lines_to(path: Path, step: int) -> bytes:
    """The lines up to a step; what follows is damaged or will be done again."""
    end = 0
    if not path.exists():
        return b""
    for line, after in _lines(path, warn=False):
        if not isinstance(line.get("step"), int) or line["step"] > step:
            break
        end = after
    with open_file(path) as file:
        return file.read(end)


def _lines(path: Path, *, warn: bool) -> Iterator[tuple[dict[str, Any], int]]:
    """Lines and where they end in bytes, until the first that is not complete."""
    with open_file(path) as file:
        for number in itertools.count(1):
            if not (raw := file.readline(LONGEST)):
                return
            try:
                line = parse_json(raw)
            except ValueError:
                line = None
            if not isinstance(line, dict) or not raw.endswith(b"\n"):
                if warn and file.read(1):
                    logger.warning("%s is damaged in line %d; the rest is ignored", path, number)
                return
            yield line, file.tell()


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard(_Log):
    """Writes event files of one run into a folder, a point every `every` steps.

    Rungs are temperatures and replicas are walkers: after a swap `replica/0` follows its weights,
    `rung/0` the coldest temperature. A resumed run hides the points beyond its checkpoint, and its
    swaps are counted on from there; if its steps before were not logged here, the name of the count
    says since when it counts.
    """

    def __init__(self, folder: Path | str, *, every: int = 100) -> None:
        super().__init__(folder, every=every)
        self._make = import_extra("torch.utils.tensorboard", "log").SummaryWriter

    def _open(self, watched: Watched) -> None:
        step = watched.run.n_steps
        self._held: list[Window] = []
        with self._writing():
            self._count, swaps = _swaps_so_far(self.path, step, watched.ladder.n_pairs)
            self._swaps = torch.tensor(swaps, dtype=torch.int64)
            # A point is at the number of steps done. At 0 everything that was there is hidden.
            self._out = self._make(str(self.path), purge_step=step + 1 if step else 0)
        self._out.add_text("run", f"{watched.name}, seed {watched.seed}, {watched.run!r}", step)

    def on_draw(self, watched: Watched, average: PosteriorAverage) -> None:
        number, step = watched.number_of(average), watched.run.n_steps
        head = f"average_{number}" if number else "average"
        self._out.add_scalar(f"{head}/n_draws", average.n_draws, step)
        for rung in (*average.rungs, None) if len(average.rungs) > 1 else average.rungs:
            where = "all_rungs" if rung is None else f"rung_{rung}"
            for name, value in metrics_of(average, rung).items():
                self._out.add_scalar(f"{head}/{name}/{where}", value, step)

    def on_save(self, watched: Watched) -> None:
        self._write_rest(watched)
        self._out.flush()

    def _write_window(self, watched: Watched, window: Window) -> None:
        def put(name: str, values: Sequence[float | None]) -> None:
            for k, value in enumerate(values):
                if value is not None:
                    self._out.add_scalar(f"{name}_{k}", value, window.last)

        temperature, lr = watched.rungs_at(window.last - 1)
        put("energy/rung", window.energy.mean(0).tolist())
        put("temperature/rung", temperature)
        put("lr/rung", lr)
        if watched.ladder.n_pairs:
            made, tested = window.accepted.sum(0), window.proposed.sum(0)
            self._swaps += made
            put("energy/replica", _by_replica(window).mean(0).tolist())
            put("rung_of/replica", window.replica_at[-1].argsort().tolist())
            put(f"{self._count}/pair", self._swaps.tolist())
            rates = zip(made.tolist(), tested.tolist(), strict=True)
            put("acceptance_rate/pair", [m / n if n else None for m, n in rates])
            put("sigma2/pair", window.noise_variance[-1].tolist())
            put("correction/pair", window.correction[-1].tolist())
        self._held.append(window)
        if len(self._held) == HISTOGRAMS_EVERY:
            self._write_histograms()

    def _write_histograms(self) -> None:
        """Energies of single steps by rung, and by pair the difference minus its correction."""
        if not self._held:
            return
        held, self._held = self._held, []
        energy = torch.cat([window.energy for window in held])
        correction = torch.cat([window.correction for window in held])
        excess = energy[:, :-1] - energy[:, 1:] - correction
        for name, values in (("energy/rung", energy), ("difference_minus_correction/pair", excess)):
            for k, column in enumerate(values.unbind(1)):
                column = column[column.isfinite()]
                if len(column):
                    self._out.add_histogram(f"{name}_{k}", column, held[-1].last)

    def _write_end(self, watched: Watched, status: str) -> None:
        self._write_histograms()


def _by_replica(window: Window) -> torch.Tensor:
    """Energies (steps, replicas). They are from before a step's swaps, `replica_at` is not."""
    replica_at = window.replica_at.clone()
    for pair in range(window.accepted.shape[1]):  # swaps of one step are of disjoint pairs
        made, both = window.accepted[:, pair, None].bool(), replica_at[:, pair : pair + 2]
        replica_at[:, pair : pair + 2] = torch.where(made, both.flip(1), both)
    return torch.empty_like(window.energy).scatter_(1, replica_at.long(), window.energy)


def _swaps_so_far(folder: Path, step: int, n_pairs: int) -> tuple[str, list[int]]:
    """The name of the count of swaps, and its value by pair at a step.

    A checkpoint has these counts only if the run keeps a trace. The events always have them: every
    checkpoint ends a window, so there is a point at this step, unless the steps before were not
    logged here.
    """
    counts: dict[str, dict[str, float]] = {}  # by the count's name, then by tag
    for event in _events(folder) if step else ():
        log = event.session_log
        if event.HasField("session_log") and log.status == log.START and event.step <= step:
            counts = {}  # a run that began before this step hides what was here
        for value in event.summary.value if event.step == step else ():
            if value.tag.startswith("swaps"):
                counts.setdefault(value.tag.partition("/")[0], {})[value.tag] = value.simple_value
    for name, found in counts.items():
        tags = [f"{name}/pair_{pair}" for pair in range(n_pairs)]
        if set(tags) <= set(found):
            return name, [round(found[tag]) for tag in tags]
    return f"swaps_since_step_{step}" if step else "swaps", [0] * n_pairs


def _events(folder: Path) -> Iterator[Any]:
    """All events of a folder in the order of writing, each file up to where it is damaged."""
    loader = import_extra("tensorboard.backend.event_processing.event_file_loader", "log")
    for path in sorted(folder.glob("events.out.tfevents.*")):  # TensorBoard's order
        require_file(path)
        yield from loader.LegacyEventFileLoader(str(path)).Load()


def open_logs(names: Iterable[str], folder: Path) -> list[Observer]:
    """Observers for the names that `--log` knows; nothing is written before a run starts."""
    logs = {"jsonl": (JsonLines, JSON_LINES), "tensorboard": (TensorBoard, TENSORBOARD)}
    chosen: list[Observer] = []
    for name in dict.fromkeys(names):
        if name not in logs:
            near = difflib.get_close_matches(name, logs, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--log must be {' or '.join(logs)}, got {name!r}{hint}")
        kind, file = logs[name]
        chosen.append(kind(folder / file))
    return chosen


def remove_logs(folder: Path) -> None:
    """Remove the logs of the run before, when a run begins anew in a folder."""
    with contextlib.suppress(OSError):  # what cannot be removed is refused when it is opened
        (folder / JSON_LINES).unlink()
    shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
