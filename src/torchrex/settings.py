"""The settings of an object as plain fields, by which a saved state is known to belong to a run.

Fields and not `repr`, which rounds: runs that differ in the last digit are different runs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import numbers
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchrex.errors import TorchrexError

DEEPEST = 20  # objects in each other
MOST_SAMPLED = 2**16  # numbers of a tensor that go into its hash
MOST_SHOWN = 5  # differences in one message
LONGEST_SHOWN = 80  # characters of a value in a message


def settings_of(value: Any, depth: int = 0) -> Any:
    """A value as a tree of dicts, lists and plain values that a JSON file keeps exactly.

    An object is its class and its fields; `settings()`, if it has that method, says which. Tensors
    are hashed, functions are known by their name.
    """
    inner = functools.partial(settings_of, depth=depth + 1)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, numbers.Number):
        return int(value) if isinstance(value, numbers.Integral) else float(value)  # type: ignore[arg-type]
    if depth > DEEPEST:
        return {"class": type(value).__qualname__}
    if isinstance(value, Tensor):
        return _settings_of_tensor(value)
    if isinstance(value, Mapping):
        return {str(key): inner(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [inner(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((inner(each) for each in value), key=repr)
    if isinstance(value, functools.partial):
        return {"function": inner(value.func), "args": inner(value.args), **inner(value.keywords)}
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return value.__qualname__
    fields = _fields_of(value)
    if fields is None:
        text = repr(value)
        return type(value).__qualname__ if " at 0x" in text else text
    return {"class": type(value).__qualname__, **{name: inner(fields[name]) for name in fields}}


def _fields_of(value: Any) -> Mapping[str, Any] | None:
    """The fields of an object; None where nothing is known of its class."""
    if callable(chosen := getattr(type(value), "settings", None)):
        found: Mapping[str, Any] = chosen(value)
        return found
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    public = {name: v for name, v in getattr(value, "__dict__", {}).items() if name[0] != "_"}
    if isinstance(value, nn.Module):  # a loss: its options
        plain = (bool, int, float, str)
        return {k: v for k, v in public.items() if isinstance(v, plain) and k != "training"}
    # The class of a user may count or cache in its attributes, which are no settings then.
    return public if type(value).__module__.startswith("torchrex.") else None


def _settings_of_tensor(tensor: Tensor) -> dict[str, Any]:
    flat = tensor.detach().reshape(-1)
    sampled = flat[:: max(1, flat.numel() // MOST_SAMPLED)].cpu().contiguous()
    digest = hashlib.sha256(sampled.view(torch.uint8).numpy().tobytes()).hexdigest()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "sha256": digest[:16]}


def fingerprint(settings: Any) -> str:
    """A hash of settings in plain form; equal settings have equal ones, in whatever order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def require_same(
    stored: Any, mine: Any, *, what: str, cure: str, error: type[TorchrexError]
) -> None:
    """Refuse a state whose settings are not `mine`, naming the fields that differ."""
    if different := list(differences(stored, mine)):
        more = f"; and {len(different) - MOST_SHOWN} more" if len(different) > MOST_SHOWN else ""
        raise error(f"{what} of another setting: {'; '.join(different[:MOST_SHOWN])}{more}. {cure}")


def differences(stored: Any, mine: Any, path: tuple[str | int, ...] = ()) -> Iterator[str]:
    """Where two settings differ, with both values."""
    if isinstance(stored, dict) and isinstance(mine, dict):
        for key in {**stored, **mine}:
            yield from differences(stored.get(key, ABSENT), mine.get(key, ABSENT), (*path, key))
    elif isinstance(stored, list) and isinstance(mine, list) and len(stored) == len(mine):
        for position, (old, new) in enumerate(zip(stored, mine, strict=True)):
            yield from differences(old, new, (*path, position))
    elif stored != mine and not (stored != stored and mine != mine):  # NaN is the same as NaN
        name = ".".join(map(str, path))
        # Users who did not choose it may not know it: a run compiles where it has enough steps.
        cure = ""
        if path == ("compiled",) and stored in (True, False):
            cure = f" (pass compiled={stored})"
        elif path == ("random_numbers",):
            cure = " (another version of torchrex, or another device, drew other ones: use that)"
        yield f"{name} was {shown(stored)} and is now {shown(mine)}{cure}"


def shown(value: Any) -> str:
    """A value in a message: one line, not all of it if it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # more digits than Python prints, or an object whose own repr fails
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
