"""Logs of one run, in windows of steps; and JSON lines, the log for programs.

A line of JSON has its `kind` (start, steps, draw, end) and a `step`: so many steps were done. A
line of kind steps sums up those after the line before: `first` to `step`, counted from 1. Every
checkpoint ends a line, so a resumed run cuts the log at its checkpoint and goes on without a gap
and without saying anything twice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import time
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrex.checkpoint import parse_json
from torchrex.durable import open_file, restart_file, writing
from torchrex.errors import InvalidArgumentError, RunFolderError, require_whole
from torchrex.exchange import StepInfo
from torchrex.posterior import PosteriorAverage
from torchrex.recording.observer import Observer, Watched, Window, Windows, metrics_of

logger = logging.getLogger("torchrex")

JSON_LINES = "log.jsonl"  # in a run folder
LONGEST = 2**24  # bytes of a line; ours have some thousand


class Log(Observer):
    """What all logs share: one run each, a summary of every window of steps."""

    def __init__(self, path: Path | str, *, every: int = 100) -> None:
        require_whole("every", every, 1)
        self.path, self.every = Path(path), every
        self._watched: Watched | None = None  # while it is open
        self._out: Any = None  # the open file, or what a library writes with

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
            self._close(status)

    def _close(self, status: str) -> None:
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


class JsonLines(Log):
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
        return [line for line, _ in lines_of(path, warn=True)]
    except OSError as error:
        raise RunFolderError(
            f"cannot read {path} ({error.strerror}); give the {JSON_LINES} of a run folder"
        ) from None


def _lines_to(path: Path, step: int) -> bytes:
    """The lines up to a step; what follows is damaged or will be done again."""
    end = 0
    if not path.exists():
        return b""
    for line, after in lines_of(path, warn=False):
        if not isinstance(line.get("step"), int) or line["step"] > step:
            break
        end = after
    with open_file(path) as file:
        return file.read(end)


def lines_of(path: Path, *, warn: bool) -> Iterator[tuple[dict[str, Any], int]]:
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
