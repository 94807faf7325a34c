"""Files that may come from a stranger: what is opened at all, what counts as JSON, and how words
out of them are shown.

A pipe would wait for ever and a device never end, so nothing but a file is opened. JSON is taken as
it is written here: UTF-8, every name once in an object, whole numbers of at most 64 bits, no NaN
and no infinities; Python's own reader is more lenient.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

MOST_JSON = 2**28  # bytes; far more than any JSON file of ours has
DEEPEST_JSON = (
    256  # lists and objects in each other; a checkpoint nests two for every level of its tree
)
LONGEST_LINE = 400  # characters of a message
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_file(path: Path) -> int:
    """The size of a file; an OSError for whatever is none. Links are followed."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(
            errno.EINVAL,
            f"it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')} and not a file",
            str(path),
        )
    return found.st_size


def read_file(path: Path, most: int = MOST_JSON) -> bytes:
    """All bytes of a file of at most so many."""
    if (size := require_file(path)) > most:
        raise OSError(
            errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", str(path)
        )
    with open(path, "rb") as file:
        return file.read(size)


def parse_json(data: bytes) -> Any:
    """The value in a JSON text; ValueError for all that is not written here, whatever Python's
    reader would make of it.
    """
    try:
        found = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
        _require_shallow(found)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST_JSON} deep") from None
    return found


def printable(value: Any) -> Any:
    """The same value with every character that a terminal or a page would obey, not show, as its
    escape: \\x1b and the like.
    """
    if isinstance(value, str):
        return value if value.isprintable() else "".join(map(_shown, value))
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    return [printable(each) for each in value] if isinstance(value, list) else value


def one_line(words: object, most: int = LONGEST_LINE) -> str:
    """What a message says of something found in a file: one line, nothing that a terminal obeys,
    and not endless.
    """
    text: str = printable(" ".join(str(words).split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{one_line(name, 80)!r} is twice in one object")
        found[name] = value
    return found


def _whole(digits: str) -> int:
    value = (
        int(digits) if len(digits) <= 21 else 2**64
    )  # reading a very long one takes time by itself
    if abs(value) >= 2**64:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return value


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"the number {one_line(digits, 80)}, which is too large")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name}, which is no JSON")


def _require_shallow(value: Any) -> None:
    level, depth = [value], 0
    while level := [
        inner for each in level if isinstance(each, dict | list) for inner in _inside(each)
    ]:
        if (depth := depth + 1) > DEEPEST_JSON:
            raise RecursionError


def _inside(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
