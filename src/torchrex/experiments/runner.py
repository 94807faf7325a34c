"""Run folders: `OUT/<recipe>/seed=<s>/` with config.json, draws or traces, checkpoints on the way, and result.json at last."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import time
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
from torchrex.experiments.recipes import Config, DrawingConfig, TrainingConfig
from torchrex.posterior import Draws
from torchrex.posterior.progress import Callback
from torchrex.recording import count_swaps

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

    def can_resume(self, config: Config) -> bool:
        """Is there an unfinished run with these settings and with checkpoints?"""
        return (self.path / "checkpoints").is_dir() and not self.finished and bool(same_config(self, config))

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
) -> RunFolder:
    """Run one config with one seed into its folder.

    A folder that holds a run already is left alone unless `overwrite` or `resume` says otherwise. Resuming goes on from the
    checkpoints of an unfinished run, and does nothing about a finished one.
    """
    folder = RunFolder.of(out, config.recipe, seed)
    there = None if overwrite else folder.result
    if resume and there is not None and there.get("status") == "finished" and same_config(folder, config):
        return folder
    if there is not None and not (resume and isinstance(config, TrainingConfig)):
        advice = "add --resume to go on, or " if isinstance(config, TrainingConfig) and there["status"] != "finished" else ""
        raise RunFolderError(
            f"{folder.path} already holds a run that {'is' if there['status'] == 'finished' else 'was'} {there['status']}; "
            f"{advice}choose another --out or --seed, or add --overwrite"
        )
    try:
        folder.path.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    except OSError as failure:
        raise RunFolderError(f"cannot make {folder.path} ({failure.strerror}); choose another --out") from None
    if isinstance(config, TrainingConfig):
        return _train(config, seed, folder, device=device, overwrite=overwrite, resume=resume, budget=budget, progress=progress)
    if resume:
        logger.warning("%s samples a density and keeps no checkpoints: it begins anew", config.recipe)
    if budget is not None:
        logger.warning("%s samples a density and keeps no checkpoints: it runs to its end whatever --budget says", config.recipe)
    assert isinstance(config, DrawingConfig)
    return _draw(config, seed, folder, device=device, progress=progress)


def _train(
    config: TrainingConfig,
    seed: int,
    folder: RunFolder,
    *,
    device: str,
    overwrite: bool,
    resume: bool,
    budget: float | None,
    progress: Callback | None,
) -> RunFolder:
    """A run with checkpoints. A finished run that is overwritten waits beside it until the new one is finished too."""
    checkpoints, replaced = folder.path / "checkpoints", folder.path.with_name(f"{folder.path.name}.replaced")
    finished = _is_finished(folder)
    unfinished = checkpoints.exists() and not finished
    if overwrite and finished:
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(folder.path, replaced)
        folder.path.mkdir()
    elif overwrite:
        shutil.rmtree(checkpoints, ignore_errors=True)
    elif unfinished and not resume:
        raise RunFolderError(
            f"{folder.path} holds an unfinished run; add --resume to go on with it, or --overwrite to begin anew"
        )
    elif resume and folder.config is not None and not same_config(folder, config):
        raise RunFolderError(
            f"{folder.path} holds a run with other settings ({_differences(folder.config, to_json(config))}); resume it with the "
            f"same --set, or choose another --out"
        )
    try:
        folder.write_text("config.json", dumps(config))
        began = time.perf_counter()
        try:
            outcome, metrics, trace, more = config.execute(
                seed, checkpoints, device=device, resume=resume, budget=budget, progress=progress
            )
        except NonFiniteEnergyError as failure:
            seconds = time.perf_counter() - began
            folder.write_text(
                "result.json", dumps({**_header(config, seed, "failed", {}, [], seconds, device), "error": str(failure)})
            )
            raise
        except BaseException:
            if not any(Checkpoints(checkpoints).steps()):  # not a step is done: as if nothing had happened
                shutil.rmtree(checkpoints, ignore_errors=True)
                if replaced.exists():
                    shutil.rmtree(folder.path, ignore_errors=True)
                    os.replace(replaced, folder.path)
                elif folder.result is None:
                    (folder.path / "config.json").unlink(missing_ok=True)
                    _remove_if_empty(folder)
            raise
        if outcome.status == "finished":
            _save_tensors({**trace.tensors(), **more}, folder.path / "trace.safetensors")
        result = _header(config, seed, outcome.status, metrics, trace.swaps(), outcome.seconds, device)
        result["steps_done"] = trace.n_steps
        interrupted = outcome.status == "interrupted"
        folder.write_text("result.json", dumps(result | ({"signal": outcome.signal} if interrupted else {})))
        if outcome.status == "finished":
            shutil.rmtree(replaced, ignore_errors=True)
            if outcome.signal:  # it came during the last save: this run is done, the next one is not begun
                raise KeyboardInterrupt
    except OSError as failure:
        if isinstance(failure, TorchrexError):
            raise
        raise RunFolderError(f"cannot write {folder.path} ({failure}); choose another --out") from None
    return folder


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
