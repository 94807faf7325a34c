from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# A shell starts background jobs with SIGINT ignored, and their children inherit that. Tests send
# Ctrl-C to themselves and to processes they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests kill processes, but cut no power: syncing would take most of the time of some of them.
os.fsync = lambda descriptor: None


@pytest.fixture
def fill_disk(monkeypatch):
    """No room for files whose name has `name` in it, until `monkeypatch.undo()`."""

    def fill(name):
        def fsync(descriptor):
            if name in Path(os.readlink(f"/proc/self/fd/{descriptor}")).name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fsync)

    return fill
