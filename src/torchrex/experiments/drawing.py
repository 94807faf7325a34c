"""A run on a density into its folder: the config at the start, checkpoints on the way, draws as
soon as they are there, then what is measured on them.

The checkpoints go when the run is finished: all they hold is in `draws.safetensors` then, and
nothing goes on from them. A finished run that is overwritten waits beside the new one; if that
fails it comes back, and the failed attempt goes beside it.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, cast

from torchrex.checkpoint import Checkpoints
from torchrex.density import shard_folders
from torchrex.distributed import join
from torchrex.errors import NonFiniteEnergyError, RunFolderError, TorchrexError
from torchrex.experiments import beside
from torchrex.experiments.config import dumps
from torchrex.experiments.recipes import DrawingConfig
from torchrex.experiments.run_folder import (
    RunFolder,
    header,
    is_finished,
    named,
    remove_if_empty,
    save_tensors,
)
from torchrex.experiments.slot import Slot
from torchrex.posterior import Draws
from torchrex.recording import Callback, count_swaps

FEWEST_DRAWS = 2  # of an unfinished run that are worth measuring


def slot_of(folder: RunFolder, config: DrawingConfig, seed: int) -> Slot:
    """Its room and its beginning are those of a run that trains; nothing there looks at more than
    what all configs have.
    """
    return Slot(cast(Any, config), seed, folder)


def draw_into(
    folder: RunFolder,
    config: DrawingConfig,
    seed: int,
    *,
    device: str,
    overwrite: bool,
    resume: bool,
    budget: float | None,
    progress: Callback | None,
) -> RunFolder:
    """Draw, measure and write; the folder that it went to. Of several processes the first keeps the
    folder.
    """
    process_group, checkpoints = join(), folder.path / "checkpoints"
    earlier = 0.0
    with process_group.all_or_none("making of the run folder", RunFolderError):
        if process_group.is_main:
            folder.make()  # before the work, not after it
            earlier = _seconds_in(checkpoints) if resume else 0.0
            _begin(folder, config, seed, overwrite=overwrite)
    began, error, draws = time.perf_counter(), None, None
    try:
        draws = config.draw(
            seed,
            device=device,
            progress=progress,
            checkpoints=checkpoints,
            resume=resume,
            budget=budget,
        )
    except NonFiniteEnergyError as failure:
        named(failure, f"run {failure.run} of {config.recipe}, seed {seed}")
        draws, error = failure.draws, failure
        if draws is None and process_group.is_main:
            _undo(folder)
    except BaseException as failure:
        if process_group.is_main:
            _undo(folder)
        if isinstance(failure, OSError) and not isinstance(failure, TorchrexError):
            raise RunFolderError(
                f"cannot write {folder.path} ({failure}); choose another --out"
            ) from None
        raise
    seconds = earlier + time.perf_counter() - began
    with process_group.all_or_none("writing of the results", RunFolderError):
        if draws is not None and process_group.is_main:
            try:
                _write(folder, config, seed, draws, error, seconds, device)
                _put_in_order(folder, draws.status)
            except OSError as failure:
                if isinstance(failure, TorchrexError):
                    raise
                raise RunFolderError(
                    f"cannot write {folder.path} ({failure}); choose another --out"
                ) from None
    if error is not None:
        raise error
    return folder


def is_begun(checkpoints: Path) -> bool:
    """Has a step been saved there, in one piece or in shards?"""
    return any(
        any(Checkpoints(path).steps()) for path in (checkpoints, *shard_folders(checkpoints))
    )


def tidy(folder: RunFolder) -> None:
    """After a process that was killed, what waits beside the folder; not while a run in shards has
    begun there.
    """
    if (
        is_finished(folder)
        or not shard_folders(folder.path / "checkpoints")
        or not is_begun(folder.path / "checkpoints")
    ):
        beside.tidy(folder)


def _begin(folder: RunFolder, config: DrawingConfig, seed: int, *, overwrite: bool) -> None:
    slot_of(folder, config, seed).begin(overwrite=overwrite)
    if overwrite:  # what an unfinished run left
        for name in ("draws.safetensors", "trace.safetensors"):
            (folder.path / name).unlink(missing_ok=True)


def _seconds_in(checkpoints: Path) -> float:
    """The seconds that the slowest shard of an unfinished run has taken."""
    found = [Checkpoints(path).load_newest() for path in (checkpoints, *shard_folders(checkpoints))]
    seconds = [each.state.get("seconds") for each in found if each is not None]
    return max((float(each) for each in seconds if isinstance(each, int | float)), default=0.0)


def _write(
    folder: RunFolder,
    config: DrawingConfig,
    seed: int,
    draws: Draws,
    error: NonFiniteEnergyError | None,
    seconds: float,
    device: str,
) -> None:
    """Everything of a run; the result, which says what the rest is, comes last."""
    draws.save(folder.path / "draws.safetensors")  # safe before anything is computed from them
    metrics: dict[str, Any] = {}
    if error is None and (draws.status == "finished" or draws.n_draws >= FEWEST_DRAWS):
        try:
            metrics, trace = config.measure(draws)
            save_tensors(trace, folder.path / "trace.safetensors")
        except KeyboardInterrupt:
            draws.status = "interrupted"
    swaps = count_swaps(draws.accepted.sum(1), draws.proposed.sum(1))
    result = header(config, seed, draws.status, metrics, swaps, seconds, config.place(device))
    result["processes"] = join().size
    if draws.status in ("paused", "interrupted"):
        result["steps_done"] = draws.n_steps
    folder.write_text(
        "result.json", dumps(result if error is None else {**result, "error": str(error)})
    )


def _put_in_order(folder: RunFolder, status: str) -> None:
    """When all is written."""
    if status == "finished":
        shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)
        beside.let_go(folder)
    elif status == "failed" and beside.waiting(folder).is_dir():
        failed = folder.path.with_name(f"{folder.path.name}.failed")
        shutil.rmtree(failed, ignore_errors=True)
        os.replace(folder.path, failed)
        beside.put_back(folder)


def _undo(folder: RunFolder) -> None:
    """Nothing came of it: as if nothing had happened, unless steps have been saved."""
    if is_begun(folder.path / "checkpoints"):
        return
    shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)
    if not beside.put_back(folder) and not (folder.path / "result.json").exists():
        (folder.path / "config.json").unlink(missing_ok=True)
        remove_if_empty(folder)
