"""A log for machines: one JSON object a line, in the order of the steps.

A line has its `kind` (start, steps, draw, end) and a `step`: so many steps were done. A line of
kind steps sums up those after the line before it: `first` to `step`, counted from 1. Every
checkpoint ends a line, so a resumed run cuts the log at its checkpoint and goes on without a gap
and without saying anything twice.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from torchrex.checkpoint import parse_json, require_file
from torchrex.errors import InvalidArgumentError, RunFolderError
from torchrex.exchange import StepInfo
from torchrex.recording.observer import (
    Average,
    Observer,
    Watched,
    Window,
    Windows,
    metrics_of,
    values_at,
)

logger = logging.getLogger("torchrex")

FILE = "log.jsonl"
LONGEST = 2**24  # bytes of a line; ours have some thousand


class JsonLines(Observer):
    """Writes the log of one run; a line at least every `every` steps. A run that begins at step 0
    begins its file anew.
    """

    def __init__(self, path: Path | str, *, every: int = 100) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidArgumentError(f"every must be a whole number >= 1, got {every!r}")
        self.path, self.every = Path(path), every
        self._file: BinaryIO | None = None
        self._watched: Watched | None = None
        self._began = 0.0

    def on_start(self, watched: Watched) -> None:
        if self._watched is not None:
            raise InvalidArgumentError(
                f"{self.path} is the log of {self._watched.name} already; give each run its own JsonLines"
            )
        step, ladder = watched.run.n_steps, watched.ladder
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut = _end_of(self.path, step) if step else 0
            self._file = open(self.path, "r+b" if self.path.exists() else "w+b")  # noqa: SIM115 - closed in on_end
            self._file.truncate(cut)
            self._file.seek(cut)
        except OSError as error:
            raise RunFolderError(
                f"cannot write {self.path} ({error.strerror}); choose another file for the log"
            ) from None
        self._watched, self._windows, self._began = watched, Windows(self.every), time.monotonic()
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

    def on_steps(self, watched: Watched, infos: StepInfo) -> None:
        for window in self._windows.add(infos, watched.run.n_steps):
            self._sum_up(watched, window)

    def on_draw(self, watched: Watched, average: Average) -> None:
        self._rest(watched)  # lines are in the order of the steps
        self._write(
            kind="draw",
            step=watched.run.n_steps,
            average=watched.number_of(average),
            n_draws=average.n_draws,
            **metrics_of(average, average.rungs[0]),
        )

    def on_save(self, watched: Watched) -> None:
        self._rest(watched)
        if self._file is not None:
            os.fsync(self._file.fileno())

    def on_end(self, watched: Watched, status: str) -> None:
        if self._file is None:
            return
        try:
            self._rest(watched)
            self._write(kind="end", step=watched.run.n_steps, status=status)
        finally:
            self._file.close()
            self._file, self._watched = None, None

    def _rest(self, watched: Watched) -> None:
        for window in self._windows.rest():
            self._sum_up(watched, window)

    def _sum_up(self, watched: Watched, window: Window) -> None:
        temperature, lr = values_at(watched.ladder, window.last - 1)
        self._write(
            kind="steps",
            first=window.first,
            step=window.last,
            energy=_plain(window.energy.mean(0)),
            temperature=temperature,
            lr=lr,
            replica_at=window.replica_at[-1].tolist(),
            proposed=window.proposed.sum(0).tolist(),
            accepted=window.accepted.sum(0).tolist(),
            noise_variance=_plain(window.noise_variance[-1]),
            correction=_plain(window.correction[-1]),
        )

    def _write(self, **line: Any) -> None:
        """One line in one write, and out of our hands at once."""
        if self._file is not None:
            line = {name: _number(value) for name, value in line.items()}
            line["seconds"] = round(time.monotonic() - self._began, 3)  # of this call
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r}, every={self.every})"


def read_log(path: Path | str) -> list[dict[str, Any]]:
    """All lines of a log, up to the first broken one. A last line that is not whole yet is no
    damage; others are warned of.
    """
    path = Path(path)
    try:
        return [line for line, _ in _lines(path, warn=True)]
    except OSError as error:
        raise RunFolderError(
            f"cannot read {path} ({error.strerror}); give the {FILE} of a run folder"
        ) from None


def _end_of(path: Path, step: int) -> int:
    """Where the lines up to a step end: beyond are those of steps that will be done again, or a
    broken one.
    """
    end = 0
    if path.exists():
        for line, after in _lines(path, warn=False):
            if not isinstance(line.get("step"), int) or line["step"] > step:
                break
            end = after
    return end


def _lines(path: Path, *, warn: bool) -> Iterator[tuple[dict[str, Any], int]]:
    """Lines and where they end in bytes, until the first that is not whole."""
    require_file(path)
    with open(path, "rb") as file:
        for number in itertools.count(1):
            raw = file.readline(LONGEST)
            if not raw:
                return
            try:
                line = parse_json(raw)
            except ValueError:
                line = None
            if not isinstance(line, dict) or not raw.endswith(b"\n"):
                if warn and file.read(1):
                    logger.warning(
                        "%s is damaged in line %d; what follows is left out", path, number
                    )
                return
            yield line, file.tell()


def _plain(values: Tensor) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
