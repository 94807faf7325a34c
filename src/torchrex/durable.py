"""Writing files that survive a power cut, and reading files that may come from a stranger.

Nothing counts as written before it is synced. A file is created under a random name and renamed.
What is there already is never opened for writing: a link, a pipe or a second name leads elsewhere.
A pipe would wait for ever and a device never end, so only regular files are read. JSON must have
the form that is written here: UTF-8, whole numbers of at most 64 bits, no NaN and no infinities.
Python's own reader accepts more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from torchrex.errors import TorchrexError

PART = r"\.[0-9a-f]{16}\.part"  # what a temporary name has after the name of its file
MOST_OF_NAME = 200  # bytes of that name; file systems take 255 in all


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets the name `path` when it is complete and synced.

    Until then it has a temporary name in the same folder, and if writing fails it is removed.
    """
    _require_replaceable(path)
    _remove_stale_parts(path)
    file = _create_part(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise
    sync_folder(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that is complete or absent; the one before stays until then."""
    with new_file(path) as file:
        file.write(data)


def restart_file(path: Path, kept: bytes) -> BinaryIO:
    """A file that begins with the bytes `kept`, open to append to. An older one is replaced, since
    it may be a link or have a second name.
    """
    replace_file(path, kept)
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW))


def write_synced(path: Path, data: bytes) -> None:
    """Write a file of a name that is free, in a folder of our own that is renamed later."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def writing(
    path: Path, kind: type[TorchrexError], advice: str, *, room: str = "try again"
) -> Iterator[None]:
    """A failed write becomes one line with advice; if the disk is full: make room, then `room`."""
    try:
        yield
    except TorchrexError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = one_line(error.strerror or error)
        cure = f"make room, then {room}" if full else advice
        raise kind(f"cannot write {one_line(path)} ({why}); {cure}") from None


def _part_of(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:MOST_OF_NAME])


def _create_part(path: Path) -> BinaryIO:
    """A new file under a temporary name. Its lock says that its process lives."""
    while True:
        part = path.with_name(f"{_part_of(path.name)}.{secrets.token_hex(8)}.part")
        file = open(part, "xb")  # noqa: SIM115 - "x" follows no link
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process removed it before the lock was there


def _remove_stale_parts(path: Path) -> None:
    """Remove the temporary files of `path` that killed processes left: nobody has their lock."""
    pattern = re.compile(re.escape(_part_of(path.name)) + PART)
    with os.scandir(path.parent) as entries:
        found = [e.path for e in entries if pattern.fullmatch(e.name)]
    for part in found:
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(part).st_mode):
                file = os.open(part, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(part)
                finally:
                    os.close(file)


def _require_replaceable(path: Path) -> None:
    """Refuse to put a file in the place of a folder, a pipe or a device. A link is replaced."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISLNK(found.st_mode):
            _require_regular(found, path, None)


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
