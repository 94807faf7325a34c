"""A finished run that is overwritten waits beside its folder, as `seed=S.replaced`, until the new
one is finished.

Whatever kills a process in between, the finished run is not lost: it comes back the next time the
folder is used, unless steps have been done in its place.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from torchrex.checkpoint import Checkpoints
from torchrex.experiments.run_folder import RunFolder, is_finished

logger = logging.getLogger("torchrex")


def waiting(folder: RunFolder) -> Path:
    return folder.path.with_name(f"{folder.path.name}.replaced")


def set_aside(folder: RunFolder) -> None:
    """Move a finished run out of the way of the one that replaces it."""
    shutil.rmtree(waiting(folder), ignore_errors=True)
    os.replace(folder.path, waiting(folder))


def let_go(folder: RunFolder) -> None:
    """The new run is finished."""
    shutil.rmtree(waiting(folder), ignore_errors=True)


def put_back(folder: RunFolder) -> bool:
    """The run that waits takes its place again; False if none does."""
    if not waiting(folder).is_dir():
        return False
    shutil.rmtree(folder.path, ignore_errors=True)
    os.replace(waiting(folder), folder.path)
    return True


def tidy(folder: RunFolder) -> None:
    """After a process that was killed: what waits is removed, comes back, or waits on for a run
    that has begun.
    """
    if not waiting(folder).is_dir():
        return
    if is_finished(folder):  # it was killed in the last moment
        let_go(folder)
        return
    begun = any(Checkpoints(folder.path / "checkpoints").steps())
    if not begun and not (folder.path / "result.json").exists() and put_back(folder):
        logger.warning(
            "the last attempt to overwrite %s was stopped before its first step; the finished run of before is back",
            folder.path,
        )
