"""A run on disk: `OUT/<recipe>/seed=<s>/` with config.json, result.json and tensors, and what every result.json has."""

from __future__ import annotations

import contextlib
import json
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save
from torch import Tensor

import torchrex
from torchrex.durable import replace_file
from torchrex.errors import NonFiniteEnergyError, RunFolderError
from torchrex.experiments.config import to_json
from torchrex.experiments.place import Place
from torchrex.experiments.recipes import Config


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
            values = json.loads(path.read_text())
            if not isinstance(values, dict):
                raise ValueError(f"a {type(values).__name__} in place of an object")
            return values
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot read {path} ({error}); remove it or run again with --overwrite") from None

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise RunFolderError(f"cannot make {self.path} ({failure.strerror}); choose another --out") from None

    def write_text(self, name: str, text: str) -> None:
        replace_file(self.path / name, text.encode())


def is_finished(folder: RunFolder) -> bool:
    try:
        return folder.finished
    except RunFolderError:  # damaged, and about to be replaced
        return False


def remove_if_empty(folder: RunFolder) -> None:
    """The folder and the recipe's folders above it, as far as nothing is in them."""
    with contextlib.suppress(OSError):
        for path in (folder.path, *folder.path.parents[:2]):
            path.rmdir()


def header(
    config: Config,
    seed: int,
    status: str,
    metrics: dict[str, Any],
    swaps: list[dict[str, Any]],
    seconds: float,
    place: Place,
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
        "device": place.name,
        "precision": place.precision,
        "versions": versions(),
    }


def named(failure: NonFiniteEnergyError, name: str) -> NonFiniteEnergyError:
    """The same error, saying whose it is as a person knows it, by recipe and seed."""
    failure.args = (str(failure).replace(f"(run {failure.run})", f"({name})"),)
    return failure


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    replace_file(path, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def same_config(folder: RunFolder, config: Config) -> bool:
    return bool(folder.config == to_json(config))


def versions() -> dict[str, str]:
    return {"torchrex": torchrex.__version__, "torch": torch.__version__, "python": platform.python_version()}
