"""Signs of life of every rank in the job's store, so that the others can name the one that is gone.

A failing collective says only that some connection broke. A thread writes, twice a second, how
often it did so and how many collectives this rank has begun; after a failure the survivors look
whose signs have stopped, or who is behind. If the store itself is gone, so is torchrun, or rank 0
that hosted it; a rank without a store (an orphan) can reach nobody.
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
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchrex.errors import RankError
from torchrex.processes import restart_count

BETWEEN_BEATS = 0.5  # seconds
PATIENCE = 2.0  # seconds that a survivor listens for the others
STORE_TIMEOUT = timedelta(seconds=30)  # a store that says nothing for so long is gone
PREFIX = "torchrex watch"
GONE = "gone: killed, stopped, or out of reach"


class Watch:
    """The signs of life of this rank, and a look at those of the others."""

    def __init__(self, rank: int, size: int, store: Store | None = None) -> None:
        """`store` belongs to this life of the job; by default that of the user's process group."""
        self._rank, self._size = rank, size
        if store is None:
            # torchrun keeps its store when it restarts the ranks, and reports of before are old.
            store = dist.distributed_c10d._get_default_store()
            store = PrefixStore(f"torchrex {restart_count()}", store)
        # A connection of its own: that of the process group may be blocked by someone who waits.
        self._store = PrefixStore(PREFIX, store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(STORE_TIMEOUT)
        self.is_orphan = False
        self.begun = 0  # collectives
        self._faults = 0  # each is reported by one rank
        self._ended = threading.Event()
        self.set("name", {"pid": os.getpid(), "host": socket.gethostname()})
        self.set("beat", [0, 0])
        self._thread = threading.Thread(target=self._beat, name="torchrex-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. It may be waiting for the store, and must not outlive the interpreter: a
        process that aborts on its way out counts as failed, and torchrun starts all ranks again.
        """
        self._ended.set()
        self._thread.join(timeout=2 * STORE_TIMEOUT.total_seconds())

    def forget_faults(self) -> None:
        """An earlier fault, which the caller has dealt with, does not count any more."""
        self._faults += 1
        self.set("failed", None)
        self.set("survives", None)

    def report_failure(self, error: BaseException) -> None:
        """Why this rank leaves the others."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.set("failed", " ".join(text.split())[:300])

    def find_fault(self, what: str, error: BaseException) -> RankError:
        """After a failed collective: which rank is the reason, in one line."""
        self.set("survives", self.begun)
        before = self._of_all("beat")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not self.is_orphan:
            time.sleep(0.1)
        after = self._of_all("beat")
        if self.is_orphan:
            return self.store_lost()
        failed, names = self._of_all("failed"), [self._name_of(r) for r in range(self._size)]
        absent = [r for r, survives in enumerate(self._of_all("survives")) if survives is None]
        silent = [r for r in absent if after[r] is None or after[r] == before[r]]
        reasons = zip(names, failed, strict=True)
        if said := [f"{name} failed with {reason}" for name, reason in reasons if reason]:
            text = "; ".join(said)
        elif silent:
            who = ", ".join(names[rank] for rank in silent)
            text = f"{who} {'is' if len(silent) == 1 else 'are'} {GONE}"
        elif absent:
            who = ", ".join(names[rank] for rank in absent)
            text = (
                f"{who} did not come to the {what} in time; TORCHREX_TIMEOUT=SECONDS waits longer"
            )
        else:
            text = f"the connection of {names[self._rank]} to the other ranks broke in the {what}"
            text += f" ({short(error)})"
        # Ranks may be one call apart when another dies: the first to say so in one of the calls
        # speaks, unless the same was said in the other.
        speaks = self._is_first_to_report(str(self._faults)) and self._is_first_to_report(text)
        return RankError(text, speaks=speaks)

    def store_lost(self) -> RankError:
        """The error where no rank can be asked."""
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Nor can they agree who speaks: the first rank of every host does, and where rank 0, which
        # may be gone, was one, the second.
        is_first = self._rank == (0 if by_torchrun else 1)
        is_first |= self._rank > 0 and os.environ.get("LOCAL_RANK") == "0"
        who = "torchrun" if by_torchrun else "rank 0"
        return RankError(
            f"{who} is gone, and the store of the job with it: {GONE[6:]}", speaks=is_first
        )

    def set(self, what: str, value: Any) -> None:
        """Write a value of this rank into the store."""
        if not self.is_orphan:
            try:
                self._store.set(f"{what}/{self._rank}", json.dumps(value))
            except RuntimeError:
                self.is_orphan = True

    def get(self, what: str, rank: int) -> Any:
        """The value that a rank wrote into the store; None if there is none."""
        key = f"{what}/{rank}"
        try:
            if not self.is_orphan and self._store.check([key]):
                return json.loads(self._store.get(key))
        except RuntimeError:
            self.is_orphan = True
        return None

    def _of_all(self, what: str) -> list[Any]:
        return [self.get(what, rank) for rank in range(self._size)]

    def _is_first_to_report(self, fault: str) -> bool:
        try:
            return int(self._store.add(f"reported/{fault}", 1)) == 1
        except RuntimeError:
            return self._rank == 0

    def _name_of(self, rank: int) -> str:
        name = self.get("name", rank)
        where = f" (process {name['pid']} on {name['host']})" if isinstance(name, dict) else ""
        return f"rank {rank}{where}"

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(BETWEEN_BEATS) and not self.is_orphan:
            beats += 1
            self.set("beat", [beats, self.begun])


def beat_of(store: Store, rank: int) -> Any:
    """The last sign of life of a rank, as it wrote it."""
    store, key = PrefixStore(PREFIX, store), f"beat/{rank}"
    return store.get(key) if store.check([key]) else None


def short(error: BaseException) -> str:
    """The reason without the position in C++ source."""
    text = " ".join(str(error).split())
    text = text.split("] ", 1)[1] if text.startswith("[/") and "] " in text else text
    return text.split(". This is typically", 1)[0][:120]
