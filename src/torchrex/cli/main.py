"""The entry point, and what Ctrl-C does: never a traceback.

Only the standard library is imported here, so that Ctrl-C is handled before anything else loads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

WHILE_LOADING = b"torchrex: interrupted while it was starting; nothing was written\n"
ERASE = "\r\x1b[K"  # the line in which the cursor is


class Interrupted(Exception):  # noqa: N818 - not an error
    """A signal during a command, after what was done has been written."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def main() -> None:
    """The `torchrex` command."""
    with loading():
        from torchrex.cli.app import call
        from torchrex.screen import Screens
    with Screens():
        call()


def leave(number: int, frame: object) -> None:
    """Exit at once with one line, not with a traceback through half-loaded modules."""
    try:
        erase = os.isatty(2) and os.environ.get("TERM") != "dumb"
        os.write(2, ERASE.encode() * erase + WHILE_LOADING)
    finally:
        os._exit(128 + number)


@contextlib.contextmanager
def loading_torch(*, quiet: bool = False) -> Iterator[None]:
    """Around imports of what needs torch, which takes seconds: a line on a terminal says so."""
    from torchrex.processes import is_main_process

    screen, erases = sys.stderr, os.environ.get("TERM") != "dumb"
    looks = screen is not None and screen.isatty() and is_main_process()
    shows = looks and not quiet and "torch" not in sys.modules
    if shows:
        screen.write("loading torch ..." if erases else "loading torch ...\n")
        screen.flush()
    try:
        with loading():
            yield
    finally:
        if shows and erases:
            screen.write(ERASE)
            screen.flush()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around imports: Ctrl-C exits at once.

    A library that is being imported may swallow a KeyboardInterrupt, or print it as "Exception
    ignored in ...". Nothing is written at that time, so there is nothing to clean up.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not in_main_thread or before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interruptible(message: str = "interrupted") -> Iterator[None]:
    """Ctrl-C becomes one line."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message) from None
