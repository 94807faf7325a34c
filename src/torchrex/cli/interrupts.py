"""Ctrl-C and SIGTERM: what they mean while something loads, and while something runs. Never a
traceback.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from torchrex.cli.leave import leave


class Interrupted(Exception):  # noqa: N818 - not an error
    """A signal during a command, after what was done has been written; its words are for the person
    who sent it.
    """

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around imports: Ctrl-C leaves at once, with one line.

    A KeyboardInterrupt in the middle of an import may be swallowed, or printed as "Exception
    ignored in ...", by whatever library is being loaded. Nothing is written at that time, so that
    there is nothing to tidy up.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def told(words: str = "interrupted") -> Iterator[None]:
    """Ctrl-C is one line."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(words) from None


@contextlib.contextmanager
def terminating() -> Iterator[list[int]]:
    """SIGTERM interrupts as Ctrl-C does, so that what is begun is tidied up; the list holds it once
    it came.
    """
    received: list[int] = []
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not ours:
        yield received
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
