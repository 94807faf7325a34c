"""Who is there: every rank leaves a sign of life in the job's store, so that the others can name the one that is gone.

A failing collective says only that some connection broke. A thread writes, twice a second, how often it did so and how many
collectives this rank has begun; after a failure the survivors look whose signs have stopped, or who is behind.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import Any

import torch.distributed as dist

from torchrex.errors import RankError

BETWEEN_BEATS = 0.5  # seconds
PATIENCE = 2.0  # seconds that a survivor listens for the others


class Watch:
    """The signs of life of this rank, and a look at those of the others."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        # A connection of its own: the one of the process group may be blocked by whoever waits there.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.begun = 0  # collectives
        self._ended = threading.Event()
        self._say("name", {"pid": os.getpid(), "host": socket.gethostname()})
        self._beat(0)
        self._thread = threading.Thread(target=self._beating, name="torchrex-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank leaves them."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._say("failed", " ".join(said.split())[:300])

    def find_fault(self, what: str, error: BaseException) -> RankError:
        """After a failed collective: which rank is the reason, in one line."""
        self._say("survives", self.begun)
        before = [self._hear("beat", rank) for rank in range(self._size)]
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not self._ended.is_set():
            time.sleep(0.1)
        after = [self._hear("beat", rank) for rank in range(self._size)]
        failed = {rank: self._hear("failed", rank) for rank in range(self._size)}
        survivors = [rank for rank in range(self._size) if self._hear("survives", rank) is not None]
        speaks = self._is_first_to_tell()
        names = {rank: self._named(rank) for rank in range(self._size)}
        told = [f"{names[rank]} failed with {reason}" for rank, reason in failed.items() if reason is not None]
        if told:
            return RankError("; ".join(told), speaks=speaks)
        silent = [r for r in range(self._size) if r not in survivors and (after[r] is None or after[r] == before[r])]
        if silent:
            who = ", ".join(names[rank] for rank in silent)
            verb = "is" if len(silent) == 1 else "are"
            return RankError(f"{who} {verb} gone: killed, stopped, or out of reach", speaks=speaks)
        slow = [rank for rank in range(self._size) if rank not in survivors]
        if slow:
            who = ", ".join(names[rank] for rank in slow)
            return RankError(f"{who} did not come to the {what} in time; TORCHREX_TIMEOUT=SECONDS waits longer", speaks=speaks)
        return RankError(
            f"the connection of {names[self._rank]} to the other ranks broke in the {what} ({short(error)})", speaks=speaks
        )

    def _is_first_to_tell(self) -> bool:
        try:
            return int(self._store.add("torchrex/told", 1)) == 1
        except RuntimeError:
            return self._rank == 0

    def _named(self, rank: int) -> str:
        name = self._hear("name", rank)
        return f"rank {rank}" if not isinstance(name, dict) else f"rank {rank} (process {name['pid']} on {name['host']})"

    def _beating(self) -> None:
        beats = 0
        while not self._ended.wait(BETWEEN_BEATS):
            beats += 1
            self._beat(beats)

    def _beat(self, beats: int) -> None:
        self._say("beat", [beats, self.begun])

    def _say(self, what: str, value: Any) -> None:
        try:
            self._store.set(f"torchrex/{what}/{self._rank}", json.dumps(value))
        except RuntimeError:  # the store went with its host; the collectives will tell
            self._ended.set()

    def _hear(self, what: str, rank: int) -> Any:
        key = f"torchrex/{what}/{rank}"
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except (RuntimeError, ValueError):
            return None


def short(error: BaseException) -> str:
    """The reason without the place in somebody's C++."""
    text = " ".join(str(error).split())
    text = text.split("] ", 1)[1] if text.startswith("[/") and "] " in text else text
    return text.split(". This is typically", 1)[0][:120]
