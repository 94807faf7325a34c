"""The logs that a run folder may hold, by the names that `--log` knows."""

from __future__ import annotations

import contextlib
import difflib
import shutil
from collections.abc import Iterable
from pathlib import Path

from torchrex.errors import ConfigError
from torchrex.recording import jsonlines, tensorboard
from torchrex.recording.observer import Observer

LOGS = ("jsonl", "tensorboard")


def open_logs(names: Iterable[str], folder: Path) -> list[Observer]:
    """Observers that will write logs of these names into a run folder; nothing is written before a
    run starts.
    """
    chosen: list[Observer] = []
    for name in dict.fromkeys(names):
        if name == "jsonl":
            chosen.append(jsonlines.JsonLines(folder / jsonlines.FILE))
        elif name == "tensorboard":
            chosen.append(tensorboard.TensorBoard(folder / tensorboard.FOLDER))
        else:
            near = difflib.get_close_matches(name, LOGS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--log must be {' or '.join(LOGS)}, got {name!r}{hint}")
    return chosen


def remove_logs(folder: Path) -> None:
    """Before a run begins anew in a folder: the logs of the one before it."""
    with contextlib.suppress(FileNotFoundError):
        (folder / jsonlines.FILE).unlink()
    shutil.rmtree(folder / tensorboard.FOLDER, ignore_errors=True)
