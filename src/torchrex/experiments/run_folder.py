"""A run on disk: `OUT/<recipe>/seed=<s>/` with config.json, result.json and tensors, and what every
result.json has.
"""

from __future__ import annotations

import contextlib
import platform
import re
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

import torchrex
from torchrex.checkpoint import one_line, parse_json, printable, read_file, require_file
from torchrex.durable import replace_file
from torchrex.errors import NonFiniteEnergyError, RunFolderError
from torchrex.experiments.config import to_json
from torchrex.experiments.place import Place
from torchrex.experiments.recipes import Config
from torchrex.posterior import checksums, with_another_sha256

RECIPE = re.compile(
    r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*", re.ASCII
)  # it names folders: no way up, none from the root


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path

    @staticmethod
    def of(out: Path, recipe: str, seed: int) -> RunFolder:
        if (
            not isinstance(recipe, str)
            or not RECIPE.fullmatch(recipe)
            or isinstance(seed, bool)
            or not isinstance(seed, int)
        ):
            raise RunFolderError(
                f"recipe {one_line(repr(recipe), 80)} with seed {one_line(repr(seed), 80)} names no run folder; a recipe has "
                f"letters, digits, . _ + - and single slashes, a seed is a whole number"
            )
        return RunFolder(out / recipe / f"seed={seed}")

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, or None if there is none yet."""
        found = self._read("result.json")
        if found is not None and not isinstance(found.get("status"), str | None):
            path = self.path / "result.json"
            raise RunFolderError(
                f"cannot read {path} (its status is no text); remove it or run again with --overwrite"
            )
        return found

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
        path = self.path / "trace.safetensors"
        try:
            return read_tensors(path)
        except UNREADABLE as error:
            raise RunFolderError(
                f"cannot read {path} ({one_line(error)}); run it again with --overwrite"
            ) from None

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            values = parse_json(read_file(path))
            if not isinstance(values, dict):
                raise ValueError(f"a {type(values).__name__} in place of an object")
            shown: dict[str, Any] = printable(values)
            return shown
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"cannot read {path} ({one_line(error)}); remove it or run again with --overwrite"
            ) from None

    def make(self) -> None:
        """Make the folder, or find it. One with links in it is refused: what is written there would
        go to another place.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise RunFolderError(
                f"cannot make {self.path} ({failure.strerror}); choose another --out"
            ) from None
        links = [path for path in (self.path, *self.path.iterdir()) if path.is_symlink()]
        if links:
            raise RunFolderError(
                f"{one_line(links[0])} is a link, and a run writes into its own folder alone; remove it, or choose another --out"
            )

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
    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    replace_file(path, save(plain, checksums(plain)))


UNREADABLE = (
    OSError,
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    RecursionError,
)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `save_tensors` wrote, with its checksums compared; one of UNREADABLE says what is wrong."""
    require_file(path)
    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        words = file.metadata() or {}
    if other := with_another_sha256(tensors, words):
        raise ValueError(f"{', '.join(other[:4])} have another sha256 than the file says")
    return tensors


def same_config(folder: RunFolder, config: Config) -> bool:
    """Was it run with these settings?"""
    there = folder.config
    return isinstance(there, dict) and {**added_later(config), **there} == to_json(config)


def added_later(config: Any) -> dict[str, Any]:
    """Settings that older runs do not know, with the value that leaves everything as it was: marked
    so in the config.
    """
    return {
        field.name: to_json(field.default)
        for field in fields(config)
        if field.metadata.get("added_later")
    }


def versions() -> dict[str, str]:
    return {
        "torchrex": torchrex.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
