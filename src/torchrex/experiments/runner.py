"""Run folders: `OUT/<recipe>/seed=<s>/` with config.json, draws and traces, and result.json, written last."""

from __future__ import annotations

import contextlib
import json
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
from safetensors.torch import load_file, save_file
from torch import Tensor

import torchrex
from torchrex.errors import NonFiniteEnergyError, RunFolderError
from torchrex.experiments.config import dumps, to_json
from torchrex.experiments.recipes import Config
from torchrex.posterior import Draws
from torchrex.posterior.sampling import Progress


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
        """Write through a temporary name, so that a file is there whole or not at all."""
        temporary = self.path / f".{name}.part"
        temporary.write_text(text)
        os.replace(temporary, self.path / name)


def run_recipe(
    config: Config, seed: int, out: Path, *, device: str = "auto", overwrite: bool = False, progress: Progress | None = None
) -> RunFolder:
    """Run one config with one seed into its folder, which holds a run already only if `overwrite` says so.

    A finished run is replaced by a finished one alone: an attempt that is interrupted or fails goes into a folder beside it.
    """
    folder = RunFolder.of(out, config.recipe, seed)
    there = None if overwrite else folder.result
    if there is not None:
        raise RunFolderError(
            f"{folder.path} already holds a run that {'is' if there['status'] == 'finished' else 'was'} {there['status']}; "
            f"choose another --out or --seed, or add --overwrite"
        )
    try:
        folder.path.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    except OSError as failure:
        raise RunFolderError(f"cannot make {folder.path} ({failure.strerror}); choose another --out") from None
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
                save_file({name: tensor.contiguous() for name, tensor in trace.items()}, folder.path / "trace.safetensors")
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
    with contextlib.suppress(OSError):
        folder.path.rmdir()


def _result(config: Config, seed: int, draws: Draws, metrics: dict[str, Any], seconds: float, device: str) -> dict[str, Any]:
    return {
        "recipe": config.recipe,
        "seed": seed,
        "status": draws.status,
        "metrics": metrics,
        "swaps": [
            {
                "pair": [pair, pair + 1],
                "proposed": int(proposed.sum()),
                "accepted": int(accepted.sum()),
                "acceptance_rate": float(accepted.sum() / proposed.sum()),
            }
            for pair, (accepted, proposed) in enumerate(zip(draws.accepted, draws.proposed, strict=True))
        ],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_seconds": seconds,
        "device": describe_device(device),
        "versions": versions(),
    }


def same_config(folder: RunFolder, config: Config) -> bool:
    return bool(folder.config == to_json(config))


def describe_device(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    return {"torchrex": torchrex.__version__, "torch": torch.__version__, "python": platform.python_version()}
