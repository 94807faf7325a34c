"""Run folders: `OUT/<recipe>/seed=<s>/` with config.json, draws or traces, checkpoints on the way, and result.json at last."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save
from torch import Tensor

import torchrex
from torchrex.checkpoint import Checkpoints
from torchrex.durable import replace_file
from torchrex.errors import NonFiniteEnergyError, RunFolderError, TorchrexError
from torchrex.experiments.config import dumps, to_json
from torchrex.experiments.jobs import Job, Trained
from torchrex.experiments.recipes import Config, DrawingConfig, TrainingConfig
from torchrex.posterior import Draws
from torchrex.posterior.progress import Callback
from torchrex.recording import Observer, count_swaps, open_logs, remove_logs
from torchrex.training import Outcome

logger = logging.getLogger("torchrex")


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path

    @staticmethod
    def of(out: Path, recipe: str, seed: int) -> RunFolder:
        return RunFolder(out / recipe / f"seed={seed}")

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, or None if there is none yet."""
        return self._read("result.json")

    @property
    def config(self) -> dict[str, Any] | None:
        return self._read("config.json")

    @property
    def finished(self) -> bool:
        result = self.result
        return result is not None and result.get("status") == "finished"

    @property
    def failed(self) -> bool:
        return (self.result or {}).get("status") == "failed"

    def trace(self) -> dict[str, Tensor]:
        try:
            return load_file(self.path / "trace.safetensors")
        except (OSError, safetensors.SafetensorError) as error:
            raise RunFolderError(
                f"cannot read {self.path / 'trace.safetensors'} ({error}); run it again with --overwrite"
            ) from None

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            return dict(json.loads(path.read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot read {path} ({error}); remove it or run again with --overwrite") from None

    def write_text(self, name: str, text: str) -> None:
        replace_file(self.path / name, text.encode())


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
    slots = [_Slot(config, seed, folder) for config, seed, folder in todo]
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


class _Slot:
    """The folder of one run with checkpoints. A finished run that is overwritten waits beside it until the new one is."""

    def __init__(self, config: TrainingConfig, seed: int, folder: RunFolder) -> None:
        self.config, self.seed, self.folder = config, seed, folder
        self.checkpoints = folder.path / "checkpoints"
        self._replaced = folder.path.with_name(f"{folder.path.name}.replaced")

    def require_room(self, *, overwrite: bool, resume: bool) -> None:
        """Refuse to go on with a run that was not asked for, or that is another one."""
        folder = self.folder
        if overwrite:
            return
        if self.checkpoints.exists() and not _is_finished(folder) and not resume:
            raise RunFolderError(
                f"{folder.path} holds an unfinished run; add --resume to go on with it, or --overwrite to begin anew"
            )
        if resume and folder.config is not None and not same_config(folder, self.config):
            raise RunFolderError(
                f"{folder.path} holds a run with other settings ({_differences(folder.config, to_json(self.config))}); resume it "
                f"with the same --set, or choose another --out"
            )

    def begin(self, *, overwrite: bool) -> None:
        path = self.folder.path
        if overwrite and _is_finished(self.folder):
            shutil.rmtree(self._replaced, ignore_errors=True)
            os.replace(path, self._replaced)
            path.mkdir()
        elif overwrite:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            (path / "result.json").unlink(missing_ok=True)  # it speaks of the checkpoints that are gone
            remove_logs(path)
        self.folder.write_text("config.json", dumps(self.config))

    def undo_if_nothing_is_done(self) -> None:
        """Not a step is done: as if nothing had happened."""
        if any(Checkpoints(self.checkpoints).steps()):
            return
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        if self._replaced.exists():
            shutil.rmtree(self.folder.path, ignore_errors=True)
            os.replace(self._replaced, self.folder.path)
        elif self.folder.result is None:
            remove_logs(self.folder.path)
            (self.folder.path / "config.json").unlink(missing_ok=True)
            _remove_if_empty(self.folder)

    def write_failure(self, failure: NonFiniteEnergyError, seconds: float, device: str) -> None:
        header = _header(self.config, self.seed, "failed", {}, [], seconds, device)
        self.folder.write_text("result.json", dumps({**header, "error": str(failure)}))

    def write(self, outcome: Outcome, trained: Trained, n_replicas: int) -> None:
        finished = outcome.status == "finished"
        if finished:
            _save_tensors({**trained.trace.tensors(), **trained.tensors}, self.folder.path / "trace.safetensors")
        result = _header(
            self.config, self.seed, outcome.status, trained.metrics, trained.trace.swaps(), outcome.seconds, trained.device
        )
        result["steps_done"] = trained.trace.n_steps
        result["replicas_side_by_side"] = n_replicas  # whose time the seconds are
        result |= {"curves": trained.curves} if trained.curves else {}
        result |= {"signal": outcome.signal} if outcome.status == "interrupted" else {}
        self.folder.write_text("result.json", dumps(result))
        if finished:
            shutil.rmtree(self._replaced, ignore_errors=True)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The settings that differ, in words."""
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return ", ".join(f"{key} {one.get(key)} there, {other.get(key)} here" for key in keys[:3])


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
            _remove_if_empty(folder)
            raise
        draws, error = failure.draws, failure
    except BaseException:
        _remove_if_empty(folder)
        raise
    seconds = time.perf_counter() - began
    if draws.status != "finished" and _is_finished(folder):
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
                _save_tensors(trace, folder.path / "trace.safetensors")
            except KeyboardInterrupt:
                draws.status = "interrupted"
        result = _result(config, seed, draws, metrics, seconds, device)
        folder.write_text("result.json", dumps(result if error is None else {**result, "error": str(error)}))
    except OSError as failure:
        raise RunFolderError(f"cannot write {folder.path} ({failure}); choose another --out") from None
    if error is not None:
        raise error
    return folder


def _is_finished(folder: RunFolder) -> bool:
    try:
        return folder.finished
    except RunFolderError:  # damaged, and about to be replaced
        return False


def _remove_if_empty(folder: RunFolder) -> None:
    """The folder and the recipe's folders above it, as far as nothing is in them."""
    with contextlib.suppress(OSError):
        for path in (folder.path, *folder.path.parents[:2]):
            path.rmdir()


def _result(config: Config, seed: int, draws: Draws, metrics: dict[str, Any], seconds: float, device: str) -> dict[str, Any]:
    swaps = count_swaps(draws.accepted.sum(1), draws.proposed.sum(1))
    return _header(config, seed, draws.status, metrics, swaps, seconds, device)


def _header(
    config: Config,
    seed: int,
    status: str,
    metrics: dict[str, Any],
    swaps: list[dict[str, Any]],
    seconds: float,
    device: str,
) -> dict[str, Any]:
    """What every result.json has."""
    return {
        "recipe": config.recipe,
        "seed": seed,
        "status": status,
        "metrics": metrics,
        "swaps": swaps,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_seconds": seconds,
        "device": describe_device(device),
        "versions": versions(),
    }


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    replace_file(path, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def same_config(folder: RunFolder, config: Config) -> bool:
    return bool(folder.config == to_json(config))


def describe_device(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    return {"torchrex": torchrex.__version__, "torch": torch.__version__, "python": platform.python_version()}
