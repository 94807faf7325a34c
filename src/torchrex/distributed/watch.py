"""Who is there: every rank leaves a sign of life in the job's store, so that the others can name
the one that is gone.

A failing collective says only that some connection broke. A thread writes, twice a second, how
often it did so and how many collectives this rank has begun; after a failure the survivors look
whose signs have stopped, or who is behind. If the store itself is gone, so is torchrun, or rank 0
that hosted it. A rank without a store meets nobody any more: it would be an orphan.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from torchrex.errors import RankError

BETWEEN_BEATS = 0.5  # seconds
PATIENCE = 2.0  # seconds that a survivor listens for the others
STORE_TIMEOUT = timedelta(seconds=30)  # a store that says nothing for so long is gone


class Watch:
    """The signs of life of this rank, and a look at those of the others."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        # A connection of its own: the one of the process group may be blocked by whoever waits
        # there.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        # torchrun keeps its store when it starts the ranks again: what was said in an earlier life
        # is none of theirs.
        self._store = PrefixStore(
            f"torchrex/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
        )
        self._store.set_timeout(STORE_TIMEOUT)
        self.is_orphan = False  # without a store
        self.begun = 0  # collectives
        self._faults = 0  # of which one tells each
        self._ended = threading.Event()
        self.say("name", {"pid": os.getpid(), "host": socket.gethostname()})
        self._beat(0)
        self._thread = threading.Thread(target=self._beating, name="torchrex-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def begin_anew(self) -> None:
        """What was said of an earlier fault, which the caller has dealt with, does not count any
        more.
        """
        self._faults += 1
        self.say("failed", None)
        self.say("survives", None)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank leaves them."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.say("failed", " ".join(said.split())[:300])

    def find_fault(self, what: str, error: BaseException) -> RankError:
        """After a failed collective: which rank is the reason, in one line."""
        self.say("survives", self.begun)
        before = [self.hear("beat", rank) for rank in range(self._size)]
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not self.is_orphan:
            time.sleep(0.1)
        after = [self.hear("beat", rank) for rank in range(self._size)]
        if self.is_orphan:
            return self.without_store()
        failed = {rank: self.hear("failed", rank) for rank in range(self._size)}
        survivors = [rank for rank in range(self._size) if self.hear("survives", rank) is not None]
        speaks = self._is_first_to_tell()
        names = {rank: self._named(rank) for rank in range(self._size)}
        told = [
            f"{names[rank]} failed with {reason}"
            for rank, reason in failed.items()
            if reason is not None
        ]
        if told:
            return RankError("; ".join(told), speaks=speaks)
        silent = [
            r
            for r in range(self._size)
            if r not in survivors and (after[r] is None or after[r] == before[r])
        ]
        if silent:
            who = ", ".join(names[rank] for rank in silent)
            verb = "is" if len(silent) == 1 else "are"
            return RankError(f"{who} {verb} gone: killed, stopped, or out of reach", speaks=speaks)
        slow = [rank for rank in range(self._size) if rank not in survivors]
        if slow:
            who = ", ".join(names[rank] for rank in slow)
            return RankError(
                f"{who} did not come to the {what} in time; TORCHREX_TIMEOUT=SECONDS waits longer",
                speaks=speaks,
            )
        return RankError(
            f"the connection of {names[self._rank]} to the other ranks broke in the {what} ({short(error)})",
            speaks=speaks,
        )

    def without_store(self) -> RankError:
        """What there is to say when nobody can be asked."""
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        who = "torchrun" if by_torchrun else "rank 0"
        # Nor can it be agreed who speaks: the first on every host, and on that of rank 0, which may
        # be gone, the second.
        first = self._rank == (0 if by_torchrun else 1) or (
            self._rank > 0 and os.environ.get("LOCAL_RANK") == "0"
        )
        return RankError(
            f"{who} is gone, and the store of the job with it: killed, stopped, or out of reach",
            speaks=first,
        )

    def _is_first_to_tell(self) -> bool:
        try:
            return int(self._store.add(f"told/{self._faults}", 1)) == 1
        except RuntimeError:
            return self._rank == 0

    def _named(self, rank: int) -> str:
        name = self.hear("name", rank)
        return (
            f"rank {rank}"
            if not isinstance(name, dict)
            else f"rank {rank} (process {name['pid']} on {name['host']})"
        )

    def _beating(self) -> None:
        beats = 0
        while not self._ended.wait(BETWEEN_BEATS) and not self.is_orphan:
            beats += 1
            self._beat(beats)

    def _beat(self, beats: int) -> None:
        self.say("beat", [beats, self.begun])

    def say(self, what: str, value: Any) -> None:
        if self.is_orphan:
            return
        try:
            self._store.set(f"{what}/{self._rank}", json.dumps(value))
        except RuntimeError:
            self.is_orphan = True

    def hear(self, what: str, rank: int) -> Any:
        key = f"{what}/{rank}"
        if self.is_orphan:
            return None
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:
            self.is_orphan = True
        except ValueError:
            pass
        return None


def short(error: BaseException) -> str:
    """The reason without the place in somebody's C++."""
    text = " ".join(str(error).split())
    text = text.split("] ", 1)[1] if text.startswith("[/") and "] " in text else text
    return text.split(". This is typically", 1)[0][:120]
