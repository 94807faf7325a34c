"""What the environment and the operating system say to this process: which rank it is, when to
stop, and that torchrun is gone.

Only the standard library is imported here, so that it works while everything else loads.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from torchrex.errors import InvalidArgumentError

# SIGHUP (the terminal or the connection is gone) does what SIGTERM does; Windows has none.
TERMINATING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)
BETWEEN_LOOKS = 0.5  # seconds between looks at the parent
GRACE = 6.0  # seconds that a rank without torchrun has to leave by itself

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"  # only there is this variable set

_parent: int | None = None
_is_stopping = False  # this is a rank of torchrun, and a signal has come


# Ranks


def number_from(name: str, *, least: int = 0, most: int | None = None) -> int:
    """The whole number in an environment variable of torchrun."""
    text = os.environ.get(name, "")
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        got = f"it is {text!r}" if name in os.environ else "it is not set"
        raise InvalidArgumentError(
            f"the environment variable {name} must be a whole number {bounds}, but {got}; unset "
            "WORLD_SIZE for one process, or start several with torchrun"
        )
    return value


def rank_and_size() -> tuple[int, int]:
    """Which process of how many this is; (0, 1) if the environment says nothing."""
    size = number_from("WORLD_SIZE", least=1) if "WORLD_SIZE" in os.environ else 1
    return (number_from("RANK", most=size - 1), size) if size > 1 else (0, 1)


def is_main_process() -> bool:
    """Of several processes only the first prints. Where the environment cannot be read, this one
    does, to say so.
    """
    try:
        return rank_and_size()[0] == 0
    except InvalidArgumentError:
        return True


def cores() -> int:
    """That this process may use; 1 of several ranks, which share them."""
    if rank_and_size()[1] > 1:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def restart_count() -> int:
    """How often torchrun has restarted the ranks of this node; it may differ between nodes."""
    name = "TORCHELASTIC_RESTART_COUNT"
    return number_from(name) if name in os.environ else 0


# The parent


def leave_with_parent() -> None:
    """Under torchrun: end this process within 10 s after torchrun, which cannot do that itself if
    it is killed. A process that torchrun did not start may outlive its parent.
    """
    global _parent
    if _parent is None and UNDER_TORCHRUN in os.environ:
        _parent = os.getppid()
        threading.Thread(target=_watch_parent, name="torchrex-parent", daemon=True).start()


def parent_is_gone() -> bool:
    return _parent is not None and os.getppid() != _parent


def _watch_parent() -> None:
    global _parent
    if _was_orphan():
        _parent = 0  # not the parent of now
    while not parent_is_gone():
        time.sleep(BETWEEN_LOOKS)
    time.sleep(GRACE)  # the main thread may say more, and end what it does
    if os.environ.get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError):
            os.write(2, b"torchrex: torchrun is gone, so its ranks leave; what was saved is kept\n")
    os._exit(1)


def _was_orphan() -> bool:
    """Was torchrun killed before this process could look? Then its parent is the first process,
    which is not Python, or nobody answers where torchrun's store was.
    """
    import socket

    try:
        with open("/proc/1/cmdline", "rb") as file:
            if os.getppid() == 1 and not re.search(rb"python|torch", file.read()):
                return True
    except OSError:
        pass  # not Linux
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        address = (os.environ["MASTER_ADDR"], number_from("MASTER_PORT"))
        socket.create_connection(address, timeout=GRACE).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError, OverflowError):
        pass  # it is not known
    return False


# Signals


@contextlib.contextmanager
def terminating() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP interrupt as Ctrl-C does, unless they are ignored (nohup) or the program
    has a handler of its own; the list holds the number of the one that came.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _is_stopping:
            _begin_to_stop()
            received.append(number)
            raise KeyboardInterrupt

    mine = []
    if threading.current_thread() is threading.main_thread():
        mine = [each for each in TERMINATING if signal.getsignal(each) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_IGN if _is_stopping else signal.SIG_DFL)


@contextlib.contextmanager
def stopping_signals() -> Iterator[list[int]]:
    """Collect the first SIGINT, SIGTERM or SIGHUP instead of dying of it; a second one acts as
    usual, but not under torchrun. SIGTERM and SIGHUP stay ignored where they are, as by nohup.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *TERMINATING)}
    for number in TERMINATING:
        if before[number] is signal.SIG_IGN:
            del before[number]

    def restore() -> None:
        for number, handler in before.items():
            ends_now = _is_stopping and number in TERMINATING and handler is signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if ends_now else handler)

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if UNDER_TORCHRUN not in os.environ:
            restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        if received:
            _begin_to_stop()
        restore()


def _begin_to_stop() -> None:
    """From now on a rank of torchrun takes no further SIGTERM or SIGHUP.

    Slurm sends one to every process of a job step, torchrun sends its own to its ranks, and other
    nodes do so a moment later: all mean the same stop. torchrun kills what does not end in 30 s.
    """
    global _is_stopping
    _is_stopping = UNDER_TORCHRUN in os.environ
