"""Whether a checkpoint belongs to the run that asks for it: two settings compared, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrex.checkpoint.tree import TreePath, decode, encode, place, short
from torchrex.errors import CheckpointError

MOST_SHOWN = 5  # differences in one message


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


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
    if different := list(differences(there, here)):
        more = f"; and {len(different) - MOST_SHOWN} more" if len(different) > MOST_SHOWN else ""
        raise CheckpointError(
            f"{folder} is a checkpoint of another setting: {'; '.join(different[:MOST_SHOWN])}{more}. "
            f"Go on with the setting it was saved with, or begin again in another folder"
        )


def differences(stored: Any, given: Any, path: TreePath = ()) -> Iterator[str]:
    """Where two settings differ, with both values."""
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in {**stored, **given}:
            yield from differences(stored.get(key, ABSENT), given.get(key, ABSENT), (*path, key))
    elif isinstance(stored, list) and isinstance(given, list) and len(stored) == len(given):
        for position, (old, new) in enumerate(zip(stored, given, strict=True)):
            yield from differences(old, new, (*path, position))
    elif stored != given and not (
        stored != stored and given != given
    ):  # a NaN is no difference to a NaN
        # Of this one a user may not know: unless told, a run compiles where its steps are many
        # enough.
        how = (
            f" (pass compiled={stored})"
            if path == ("compiled",) and isinstance(stored, bool)
            else ""
        )
        yield f"{place('setting', path)} was {short(stored)} and is now {short(given)}{how}"


def _no_tensor(path: TreePath, dtype: str, shape: list[int]) -> Tensor:
    raise ValueError("a tensor in the setting")
