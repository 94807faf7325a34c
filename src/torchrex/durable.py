"""Writing files that survive a power cut, and reading files that may come from a stranger.

Nothing counts as written before it is synced. A pipe would wait for ever and a device never end, so
only regular files are opened. JSON must have the form that is written here: UTF-8, whole numbers of
at most 64 bits, no NaN and no infinities. Python's own reader accepts more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any


def write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync and rename it: it is complete or absent."""
    part = path.with_name(f"{path.name}.part")
    write_synced(part, data)
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, as fsync does for the bytes of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and keep its names all the same.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_folder(path: Path, *, first: str) -> None:
    """Remove a folder, and before all else the file `first` in it, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path / first)
        sync_folder(path)
    shutil.rmtree(path)


MOST_JSON = 2**28  # bytes; far more than any JSON file of ours has
MOST_OBJECT = 2**25  # bytes of config.json or result.json
DEEPEST_JSON = 256  # lists and objects in each other; a checkpoint has two per level of its tree
LONGEST_NAME = 256  # characters of a name in config.json or result.json
LONGEST_TEXT = 20_000  # characters of any other text there
LONGEST_LINE = 400  # characters of a message


def open_file(path: Path, most: int | None = None, *, follow: bool = False) -> BufferedReader:
    """Open a regular file of at most `most` bytes for reading; OSError for anything else.

    Everything of a stranger is opened here. A link is refused unless `follow`: it would show the
    content of another file. It is looked at before it is opened: opening a device may act on it.
    """
    _require_regular(os.stat(path, follow_symlinks=follow), path, most)
    link = 0 if follow else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | link)
    file = open(descriptor, "rb")  # noqa: SIM115 - the caller closes it
    try:
        _require_regular(os.fstat(descriptor), path, most)  # another one may be there by now
    except OSError:
        file.close()
        raise
    return file


def _require_regular(found: os.stat_result, path: Path, most: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link, and links are not followed", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device and not a file", str(path))
    if most is not None and found.st_size > most:
        reason = f"it has {found.st_size:,} bytes, and at most {most:,} are read"
        raise OSError(errno.EFBIG, reason, str(path))


def require_file(path: Path, most: int | None = None, *, follow: bool = False) -> int:
    """The size of a file that `open_file` opens; for readers that take a path."""
    with open_file(path, most, follow=follow) as file:
        return os.fstat(file.fileno()).st_size


def read_file(path: Path, most: int = MOST_JSON, *, follow: bool = False) -> bytes:
    """All bytes of a file of at most `most` bytes."""
    with open_file(path, most, follow=follow) as file:
        return file.read(most)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run folder, with each control character as its escape."""
    found = parse_json(read_file(path, MOST_OBJECT))
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__} and not an object")
    for level in _levels(found):
        names = [name for each in level if isinstance(each, dict) for name in each]
        texts = [each for each in level if isinstance(each, str)]
        for most, some in ((LONGEST_NAME, names), (LONGEST_TEXT, texts)):
            if (length := max(map(len, some), default=0)) > most:
                raise ValueError(f"it has a text of {length:,} characters where {most:,} may be")
    shown: dict[str, Any] = printable(found)
    return shown


def parse_json(data: bytes) -> Any:
    """The value of a JSON text; ValueError for a text of another form."""
    try:
        found = json.loads(
            data.decode(), parse_int=_integer, parse_float=_finite, parse_constant=_no_constant
        )
    except RecursionError:
        found, depth = None, DEEPEST_JSON + 1
    else:
        depth = _depth_of(found)
    if depth > DEEPEST_JSON:
        raise ValueError(f"it is nested more than {DEEPEST_JSON} deep")
    return found


def printable(value: Any) -> Any:
    """The same value with each control character as its escape (\\x1b), so that no terminal or page
    obeys it.
    """
    if isinstance(value, str):
        escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
        return value if value.isprintable() else "".join(escaped)
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    return [printable(each) for each in value] if isinstance(value, list) else value


def one_line(words: object, most: int = LONGEST_LINE) -> str:
    """Text from a file for a message: one line, without control characters, not endless."""
    text: str = printable(" ".join(str(words).split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _integer(digits: str) -> int:
    if len(digits) > 21 or abs(int(digits)) >= 2**64:  # a very long one takes time to read
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"the number {one_line(digits, 80)}, which is too large")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name}, which is not JSON")


def _levels(value: Any) -> Iterator[list[Any]]:
    """The value, then what is in it, then what is in that; without recursion."""
    level = [value]
    while level:
        yield level
        inner = [each for each in level if isinstance(each, dict | list)]
        children = (each.values() if isinstance(each, dict) else each for each in inner)
        level = [child for group in children for child in group]


def _depth_of(value: Any) -> int:
    """How many lists and objects are in each other."""
    return sum(any(isinstance(each, dict | list) for each in level) for level in _levels(value))
