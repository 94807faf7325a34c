"""One owner for a folder that is written. Whoever comes second is refused in one line.

The lock is flock's: it ends with the process, however that ends, so a lock file that is left behind
locks nothing. The owner removes the file while it holds the lock. Whoever opened it before that has
the lock of a file without a name, sees so, and tries again with the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from torchrex.durable import one_line, sync_folder
from torchrex.errors import RunFolderError

log = logging.getLogger("torchrex")

TRIES = 100  # to open a file that others remove meanwhile
LONGEST = 300  # bytes of what an owner says of itself
# Nothing can be written into such a folder, and what writes there says why.
NOT_WRITABLE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
}
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

_guard = threading.Lock()
_held: dict[Path, int] = {}  # descriptors; for threads where the file system has no locks
_warned = False


@contextlib.contextmanager
def one_owner(lock: Path, folder: Path, *, other: str = "another folder") -> Iterator[None]:
    """Hold the lock file of a folder. RunFolderError names the process that holds it already, and
    advises `other`.
    """
    made: list[Path] = []
    with contextlib.ExitStack() as ends:
        ends.callback(_remove_empty, made)
        with _guard:
            lock = _in_real_folder(lock)
            if lock in _held:
                raise _in_use(folder, f"another run in this process ({os.getpid()})", other)
            descriptor = _take(lock, folder, made, other)
            if descriptor is not None:
                _held[lock] = descriptor
                ends.callback(_release, lock)
        yield


def _in_real_folder(lock: Path) -> Path:
    """One path for one file, also after a change of the working folder."""
    try:
        return Path(os.path.realpath(lock.parent), lock.name)
    except OSError as error:  # the working folder is gone
        raise _cannot(lock, error.strerror, "another folder") from None


def _take(lock: Path, folder: Path, made: list[Path], other: str) -> int | None:
    """The locked file; None where nothing can be written. Folders that are made for it go into
    `made`, innermost first.
    """
    for _ in range(TRIES):
        try:
            made[:0] = _make(lock.parent)
            descriptor = _open(lock)
        except FileNotFoundError:  # another owner has removed the folder, which was empty
            continue
        except OSError as error:
            if error.errno in NOT_WRITABLE:
                return None
            raise _cannot(lock, error.strerror, other) from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise _cannot(lock, "it is no regular file, or has a second name", other)
            _lock(descriptor, lock, folder, other)
            if _is_same(lock, descriptor):
                _introduce(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise _cannot(lock, "its folder is removed again and again", other)


def _release(lock: Path) -> None:
    with _guard:
        descriptor = _held.pop(lock, None)
        if descriptor is None:  # in a process that was forked meanwhile
            return
        with contextlib.suppress(OSError):
            if _is_same(lock, descriptor):
                os.unlink(lock)
        os.close(descriptor)


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in folders:
            path.rmdir()


def _make(folder: Path) -> list[Path]:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)
    return missing


def _open(lock: Path) -> int:
    """The file of another user may be there to be read only, which is enough for its lock."""
    safely = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | safely, 0o666)
    except PermissionError:
        if not os.path.lexists(lock):
            raise
        return os.open(lock, os.O_RDONLY | safely)


def _lock(descriptor: int, lock: Path, folder: Path, other: str) -> None:
    global _warned
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not os.pread(descriptor, LONGEST, 0):
            time.sleep(0.1)  # the owner writes who it is at once
        words = one_line(os.pread(descriptor, LONGEST, 0).decode(errors="replace"))
        raise _in_use(folder, words or "another process", other) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise _cannot(lock, error.strerror, other) from None
        if not _warned:
            words = "%s is on a file system without locks (%s); use it from one process at a time"
            log.warning(words, folder, error.strerror)
        _warned = True


def _is_same(lock: Path, descriptor: int) -> bool:
    """Is the open file still the one of that name?"""
    try:
        return os.path.samestat(os.stat(lock, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _introduce(descriptor: int) -> None:
    """Write who the owner is; on a full disk the lock is as good without."""
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    words = f"process {os.getpid()} on host {socket.gethostname()} since {since}\n"
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, words.encode(), 0)


def _in_use(folder: Path, who: str, other: str) -> RunFolderError:
    return RunFolderError(f"{folder} is used by {who}; wait for it or choose {other}")


def _cannot(lock: Path, reason: str | None, other: str) -> RunFolderError:
    return RunFolderError(f"cannot lock {lock} ({reason}); remove it or choose {other}")


def _leave_to_parent() -> None:
    """A forked process, such as one that loads data, owns nothing and keeps no lock alive."""
    global _guard
    _guard = threading.Lock()  # another thread may have held it
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
