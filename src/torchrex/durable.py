"""Files and folders that survive a power cut: nothing counts as written before it is synced."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path


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
