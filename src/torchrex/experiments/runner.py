"""Running recipes into run folders: one by itself, or several that train side by side."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrex.errors import NonFiniteEnergyError, RunFolderError, TorchrexError
from torchrex.experiments.config import dumps
from torchrex.experiments.jobs import Job
from torchrex.experiments.recipes import Config, DrawingConfig, TrainingConfig
from torchrex.experiments.run_folder import RunFolder, header, is_finished, remove_if_empty, same_config, save_tensors
from torchrex.experiments.slot import Slot
from torchrex.posterior import Draws
from torchrex.posterior.progress import Callback
from torchrex.recording import Observer, count_swaps, open_logs

logger = logging.getLogger("torchrex")


def run_recipe(
    config: Config,
    seed: int,
    out: Path,
    *,
    device: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    budget: float | None = None,
    progress: Callback | None = None,
    observers: Sequence[Observer] = (),
    log: Sequence[str] = (),
) -> RunFolder:
    """Run one config with one seed into its folder.

    A folder that holds a run already is left alone unless `overwrite` or `resume` says otherwise. Resuming goes on from the
    checkpoints of an unfinished run, and does nothing about a finished one. `observers` watch, and logs of the names in `log`
    ("jsonl", "tensorboard") are written into the folder; both are for networks.
    """
    if isinstance(config, TrainingConfig):
        (folder,) = run_together(
            [(config, seed)],
            out,
            device=device,
            overwrite=overwrite,
            resume=resume,
            budget=budget,
            progress=progress,
            observers=observers,
            log=log,
        )
        return folder
    folder = RunFolder.of(out, config.recipe, seed)
    if open_logs(log, folder.path):
        logger.warning("%s samples a density and keeps all its draws: --log is for networks, and writes nothing", config.recipe)
    if _is_done(folder, config, overwrite=overwrite, resume=resume):
        return folder
    _make(folder)
    if resume:
        logger.warning("%s samples a density and keeps no checkpoints: it begins anew", config.recipe)
    if budget is not None:
        logger.warning("%s samples a density and keeps no checkpoints: it runs to its end whatever --budget says", config.recipe)
    assert isinstance(config, DrawingConfig)
    return _draw(config, seed, folder, device=device, progress=progress)


def run_together(
    jobs: Sequence[tuple[TrainingConfig, int]],
    out: Path,
    *,
    device: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    budget: float | None = None,
    progress: Callback | None = None,
    observers: Sequence[Observer] = (),
    log: Sequence[str] = (),
) -> list[RunFolder]:
    """Train configs of one company, each with its seed, side by side; no result depends on the others."""
    folders = [RunFolder.of(out, config.recipe, seed) for config, seed in jobs]
    todo = [
        (config, seed, folder)
        for (config, seed), folder in zip(jobs, folders, strict=True)
        if not _is_done(folder, config, overwrite=overwrite, resume=resume)
    ]
    if not todo:
        return folders
    slots = [Slot(config, seed, folder) for config, seed, folder in todo]
    for slot in slots:
        slot.require_room(overwrite=overwrite, resume=resume)
    watching = [(*observers, *open_logs(log, slot.folder.path)) for slot in slots]
    for slot in slots:
        _make(slot.folder)
    try:
        began = time.perf_counter()
        try:
            for slot in slots:
                slot.begin(overwrite=overwrite)
            outcome, trained = todo[0][0].execute(
                [Job(slot.config, slot.seed, slot.checkpoints, each) for slot, each in zip(slots, watching, strict=True)],
                device=device,
                resume=resume,
                budget=budget,
                progress=progress,
            )
        except NonFiniteEnergyError as failure:
            for slot in slots:
                slot.write_failure(failure, time.perf_counter() - began, device)
            raise
        except BaseException:
            for slot in slots:
                slot.undo_if_nothing_is_done()
            raise
        for slot, one in zip(slots, trained, strict=True):
            if one.failure is not None:
                slot.write_failure(one.failure, outcome.seconds, one.device)
            else:
                slot.write(outcome, one, sum(each.config.n_rungs for each in slots))
        if trained[-1].failure is not None and all(one.failure is not None for one in trained):
            raise trained[-1].failure
        if outcome.status == "finished" and outcome.signal:  # it came during the last save: the next one is not begun
            raise KeyboardInterrupt(outcome.signal)
    except OSError as failure:
        if isinstance(failure, TorchrexError):
            raise
        raise RunFolderError(f"cannot write {slots[0].folder.path} ({failure}); choose another --out") from None
    return folders


def _is_done(folder: RunFolder, config: Config, *, overwrite: bool, resume: bool) -> bool:
    """Is there nothing to do? Or is there something in the way?"""
    there = None if overwrite else folder.result
    if there is None:
        return False
    training = isinstance(config, TrainingConfig)
    if resume and there.get("status") == "finished" and same_config(folder, config):
        return True
    if not (resume and training):
        advice = "add --resume to go on, or " if training and there["status"] != "finished" else ""
        raise RunFolderError(
            f"{folder.path} already holds a run that {'is' if there['status'] == 'finished' else 'was'} {there['status']}; "
            f"{advice}choose another --out or --seed, or add --overwrite"
        )
    return False


def _make(folder: RunFolder) -> None:
    try:
        folder.path.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    except OSError as failure:
        raise RunFolderError(f"cannot make {folder.path} ({failure.strerror}); choose another --out") from None


def _draw(config: DrawingConfig, seed: int, folder: RunFolder, *, device: str, progress: Callback | None) -> RunFolder:
    """A run that returns draws. A finished run is replaced by a finished one alone: an attempt that is interrupted or fails
    goes into a folder beside it.
    """
    began = time.perf_counter()
    error = None
    try:
        draws = config.draw(seed, device=device, progress=progress)
    except NonFiniteEnergyError as failure:
        if failure.draws is None:
            remove_if_empty(folder)
            raise
        draws, error = failure.draws, failure
    except BaseException:
        remove_if_empty(folder)
        raise
    seconds = time.perf_counter() - began
    if draws.status != "finished" and is_finished(folder):
        folder = RunFolder(folder.path.with_name(f"{folder.path.name}.{draws.status}"))
    try:
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
        result = _result(config, seed, draws, metrics, seconds, device)
        folder.write_text("result.json", dumps(result if error is None else {**result, "error": str(error)}))
    except OSError as failure:
        raise RunFolderError(f"cannot write {folder.path} ({failure}); choose another --out") from None
    if error is not None:
        raise error
    return folder


def _result(config: Config, seed: int, draws: Draws, metrics: dict[str, Any], seconds: float, device: str) -> dict[str, Any]:
    swaps = count_swaps(draws.accepted.sum(1), draws.proposed.sum(1))
    return header(config, seed, draws.status, metrics, swaps, seconds, device)
