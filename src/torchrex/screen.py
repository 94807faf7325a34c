"""The streams of a terminal, of which the work must not depend: what cannot be written is dropped.

A closed pipe, a full disk, a terminal that went away or an encoding without "±" never end a run.
Only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any, Self, TextIO

LOST_OUTPUT = 74  # exit code (EX_IOERR): the work is complete, but stdout could not be written
READER_IS_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET)
IN_ASCII = {"±": "+-"}


class Screen:
    """A text stream whose `write` and `flush` do not fail; after an error nothing more is written.

    It has no `buffer`, so that nobody writes past it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | ValueError | None = None  # the one after which nothing is written

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"a text stream takes text, got {type(text).__name__}")
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, what: str, *arguments: str) -> None:
        if self.error is None:
            try:
                getattr(self._stream, what)(*arguments)
            except BlockingIOError:
                pass  # a reader that is too slow misses something
            except UnicodeEncodeError:
                self._try(what, *map(self._in_its_encoding, arguments))
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self.error = error

    def _in_its_encoding(self, text: str) -> str:
        for sign, words in IN_ASCII.items():
            text = text.replace(sign, words)
        encoding = self._stream.encoding
        return text.encode(encoding, "replace").decode(encoding)

    @property
    def lost_output(self) -> bool:
        """Did writing fail although somebody wants to read it? Not at `| head`."""
        return self.error is not None and getattr(self.error, "errno", 0) not in READER_IS_GONE

    def silence(self) -> None:
        """After an error: what is left in the stream's buffer goes nowhere when Python ends."""
        if self.error is not None:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self._stream, name)


class Screens:
    """stdout and stderr that do not fail, for a command; at its end the exit code says if output
    was lost.
    """

    def __enter__(self) -> Self:
        if not os.environ.get("COLUMNS", "").strip("0"):
            os.environ.pop("COLUMNS", None)  # a width of 0 would print nothing
        self._before = sys.stdout, sys.stderr
        self._screens = [None if each is None else Screen(each) for each in self._before]
        sys.stdout, sys.stderr = self._screens
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        stdout, stderr = self._screens
        for screen in (stdout, stderr):
            if screen is not None:
                screen.flush()
        lost = stdout is not None and stdout.lost_output
        if lost and stderr is not None and stdout is not None:
            reason = getattr(stdout.error, "strerror", None) or stdout.error
            stderr.write(f"torchrex: stdout cannot be written ({reason}); its rest is lost\n")
            stderr.flush()
        sys.stdout, sys.stderr = self._before
        for screen in (stdout, stderr):
            if screen is not None:
                screen.silence()
        if lost and (error is None or (isinstance(error, SystemExit) and not error.code)):
            raise SystemExit(LOST_OUTPUT)


def has_colors() -> bool:
    """Do the environment's conventions permit colours?"""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
