"""What strikes a rank, and when: each is a function that arms the process it is called in.

A strike from within hits the same moment every time, which a signal from outside cannot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time

import torchrex as tr
from faults import jobs
from torchrex.checkpoint import folder as checkpoint_folder

BATCH = 30  # between the checkpoints of steps 20 and 40
SAVE = 3  # that of step 40, after those of steps 0 and 20
SLEEP = 10.0  # seconds, of a rank that is slow


def struck(job, victims, strike, *arguments):
    """A job, some of whose ranks are struck."""
    if int(os.environ["RANK"]) in victims:
        STRIKES[strike]()
    return job(*arguments)


def at_call(owner, name, n, act):
    """Do something just before the n-th call of a function."""
    original, calls = getattr(owner, name), 0

    def counting(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == n:
            act(*arguments)
        return original(*arguments, **options)

    setattr(owner, name, counting)


def send_myself(number):
    return lambda *_: os.kill(os.getpid(), number)


def at_batch(act):
    return lambda: at_call(tr.DeviceLoader, "select", BATCH, act)


def raising():
    """The user's loss fails."""
    calls, right = 0, jobs.loss

    def wrong(outputs, labels):
        nonlocal calls
        calls += 1
        if calls == BATCH + 5:  # more than one a step, where energies are repeated
            raise ArithmeticError("this loss\ndoes not like these labels")
        return right(outputs, labels)

    jobs.loss = wrong


def at_write(name, act):
    """Do something when a file of the checkpoint of step 40 is about to be written."""

    def arm():
        write = checkpoint_folder.write_synced

        def striking(path, data):
            if "step=000000040" in str(path) and path.name.startswith(name):
                act(path, data)
            write(path, data)

        checkpoint_folder.write_synced = striking

    return arm


def fill_the_disk(path, data):
    path.write_bytes(data[: len(data) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die_in_a_file(path, data):
    path.write_bytes(data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def cut_off(*_):
    """Close the connections to the other ranks, but not that to the store."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] != int(
                os.environ["MASTER_PORT"]
            ):
                one.shutdown(socket.SHUT_RDWR)


STRIKES = {
    "killed": at_batch(send_myself(signal.SIGKILL)),
    "stopped": at_batch(send_myself(signal.SIGSTOP)),
    "terminated": at_batch(send_myself(signal.SIGTERM)),
    "slow": at_batch(lambda *_: time.sleep(SLEEP)),
    "cut off": at_batch(cut_off),
    "raises": raising,
    "full disk": at_write("replica=", fill_the_disk),
    "killed in a file": at_write("replica=", die_in_a_file),
    "killed after its files": at_write("shared", send_myself(signal.SIGKILL)),
    "killed before DONE": at_write("DONE", send_myself(signal.SIGKILL)),
    "killed after DONE": lambda: at_call(
        tr.Checkpoints, "_remove_surplus", SAVE, send_myself(signal.SIGKILL)
    ),
}
