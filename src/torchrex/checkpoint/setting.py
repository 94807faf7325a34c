"""Whether a checkpoint belongs to the run that asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrex import settings
from torchrex.checkpoint.tree import TreePath, decode, encode, place
from torchrex.errors import CheckpointError


def encode_setting(setting: Mapping[str, Any]) -> Any:
    """The JSON form of a setting, which is a tree of plain values."""
    encoded, tensors = encode("setting", setting)
    for path in tensors:
        raise CheckpointError(
            f"cannot save {place('setting', path)}: a setting holds plain values, not tensors; use .tolist()"
        )
    return encoded


def require_same(folder: Path, stored: Any, given: Mapping[str, Any]) -> None:
    """Compare a stored setting, in its JSON form, with the one of the run at hand."""
    there, here = (decode(encoded, _no_tensor) for encoded in (stored, encode_setting(given)))
    cure = "Go on with the setting it was saved with, or begin again in another folder"
    settings.require_same(
        there, here, what=f"{folder} is a checkpoint", cure=cure, error=CheckpointError
    )


def _no_tensor(path: TreePath, dtype: str, shape: list[int]) -> Tensor:
    raise ValueError("a tensor in the setting")
