"""Waiting for the other processes of a job, which sample by themselves and come when they are done,
be it hours later.

A collective would give up after its time-out. Here the signs of life that every rank leaves in the
job's store say whether there is somebody to wait for. While ranks sample nothing is exchanged; they
look into the store, twice a second, whether to stop.
"""

from __future__ import annotations

import time
from typing import Any

from torchrex.distributed.process_group import ProcessGroup

BETWEEN_LOOKS = 0.5  # seconds
SILENCE = 10.0  # seconds without a sign of life after which a rank is taken for gone; it gives two a second


class Rendezvous:
    """A meeting of all ranks at the end of their own work. All of them make it after the same
    collectives.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group, self.watch = process_group, process_group.watch
        self._name = "" if self.watch is None else str(self.watch.begun)  # as many on every rank
        self._looked = time.monotonic()

    def request_stop(self) -> None:
        """The others need not go on."""
        if self.watch is not None:
            self.watch.say(f"stop {self._name}", True)

    def stop_requested(self) -> bool:
        """Has any rank asked to stop, or is there no job any more?"""
        if self.watch is None or time.monotonic() - self._looked < BETWEEN_LOOKS:
            return False
        self._looked = time.monotonic()
        return self.watch.is_orphan or any(self._all(f"stop {self._name}"))

    def wait(self, what: str) -> None:
        """Until all ranks are here; RankError if one never will be. Ctrl-C asks the others to stop,
        and waits on for them.
        """
        if self.watch is None:
            return
        self.watch.say(f"came {self._name}", True)
        interrupted = False
        beats: dict[int, Any] = {}
        heard = dict.fromkeys(range(self.process_group.size), time.monotonic())
        while missing := [
            rank for rank, came in enumerate(self._all(f"came {self._name}")) if not came
        ]:
            try:
                self._look_at(missing, beats, heard, what)
                time.sleep(BETWEEN_LOOKS / 5)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self.request_stop()
        if self.watch.is_orphan:
            raise self.watch.without_store()

    def _look_at(
        self, missing: list[int], beats: dict[int, Any], heard: dict[int, float], what: str
    ) -> None:
        assert self.watch is not None
        if self.watch.is_orphan:
            raise self.watch.without_store()
        mine = self.watch.hear(
            "failed", self.process_group.rank
        )  # an error of all ranks, some time ago, is no news
        for rank in missing:
            beat = self.watch.hear("beat", rank)
            if beat != beats.get(rank):
                beats[rank], heard[rank] = beat, time.monotonic()
            failed = self.watch.hear("failed", rank)
            if (failed is not None and failed != mine) or time.monotonic() - heard[rank] > SILENCE:
                raise self.watch.find_fault(what, RuntimeError("it does not answer"))

    def _all(self, what: str) -> list[bool]:
        assert self.watch is not None
        return [self.watch.hear(what, rank) is not None for rank in range(self.process_group.size)]
