"""A run on a density into its folder: the config at the start, draws as soon as they are there, then what is measured on them.

A finished run is replaced by a finished one alone: an attempt that is interrupted or fails goes into a folder beside it.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

from torchrex.errors import NonFiniteEnergyError, RunFolderError
from torchrex.experiments import beside
from torchrex.experiments.config import dumps
from torchrex.experiments.recipes import DrawingConfig
from torchrex.experiments.run_folder import RunFolder, header, is_finished, named, remove_if_empty, save_tensors
from torchrex.posterior import Draws
from torchrex.posterior.progress import Callback
from torchrex.recording import count_swaps


def draw_into(folder: RunFolder, config: DrawingConfig, seed: int, *, device: str, progress: Callback | None) -> RunFolder:
    """Draw, measure and write; the folder that it went to."""
    fresh = not (folder.path / "result.json").exists()
    folder.make()  # before the work, not after it
    began, error = time.perf_counter(), None
    try:
        if fresh:  # a process that is killed leaves an unfinished run, not an empty folder
            folder.write_text("config.json", dumps(config))
        draws = config.draw(seed, device=device, progress=progress)
    except NonFiniteEnergyError as failure:
        named(failure, f"run {failure.run} of {config.recipe}, seed {seed}")
        if failure.draws is None:
            _undo(folder, fresh=fresh)
            raise
        draws, error = failure.draws, failure
    except BaseException:
        _undo(folder, fresh=fresh)
        raise
    seconds = time.perf_counter() - began
    replaces = is_finished(folder)
    end = "new" if draws.status == "finished" else draws.status
    target = RunFolder(folder.path.with_name(f"{folder.path.name}.{end}")) if replaces else folder
    try:
        status = _write(target, config, seed, draws, error, seconds, device)
        if replaces and end == "new":
            if status != "finished":  # interrupted while it was measured
                kept = RunFolder(folder.path.with_name(f"{folder.path.name}.{status}"))
                shutil.rmtree(kept.path, ignore_errors=True)
                os.replace(target.path, kept.path)
                return kept
            beside.set_aside(folder)
            os.replace(target.path, folder.path)
            beside.let_go(folder)
            target = folder
    except OSError as failure:
        raise RunFolderError(f"cannot write {target.path} ({failure}); choose another --out") from None
    if error is not None:
        raise error
    return target


def _write(
    folder: RunFolder,
    config: DrawingConfig,
    seed: int,
    draws: Draws,
    error: NonFiniteEnergyError | None,
    seconds: float,
    device: str,
) -> str:
    """Everything of a run; the status it has then."""
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.path.mkdir()
    folder.write_text("config.json", dumps(config))
    draws.save(folder.path / "draws.safetensors")  # safe before anything is computed from them
    metrics: dict[str, Any] = {}
    if error is None:
        try:
            metrics, trace = config.measure(draws)
            save_tensors(trace, folder.path / "trace.safetensors")
        except KeyboardInterrupt:
            draws.status = "interrupted"
    swaps = count_swaps(draws.accepted.sum(1), draws.proposed.sum(1))
    result = header(config, seed, draws.status, metrics, swaps, seconds, config.place(device))
    folder.write_text("result.json", dumps(result if error is None else {**result, "error": str(error)}))
    return draws.status


def _undo(folder: RunFolder, *, fresh: bool) -> None:
    """Nothing came of it: as if nothing had happened."""
    if fresh:
        (folder.path / "config.json").unlink(missing_ok=True)
    remove_if_empty(folder)
