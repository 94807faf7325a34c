"""How scaling.py looks into a step: which collectives it makes, with how many bytes, and when each
began and was there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchrex.distributed import ReplicaMesh

WAYS = (
    "overlapped",
    "at once",
    "silent",
)  # of making the gather of a step; scaling.py says what they are


class Counted:
    """Counts the collectives of torch.distributed and the bytes that this rank gives to each."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __enter__(self) -> Counted:
        self._before = {
            name: getattr(dist, name) for name in ("all_gather", "all_reduce", "broadcast")
        }

        def counting(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                tensor = arguments[1] if name == "all_gather" else arguments[0]
                self.seen.append((name, tensor.numel() * tensor.element_size()))
                return self._before[name](*arguments, **options)

            return call

        for name in self._before:
            setattr(dist, name, counting(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def summary(self) -> dict[str, dict[str, int]]:
        """Calls and bytes by kind."""
        kinds = dict.fromkeys(name for name, _ in self.seen)
        sizes = {kind: [size for name, size in self.seen if name == kind] for kind in kinds}
        return {kind: {"calls": len(of), "bytes": sum(of)} for kind, of in sizes.items()}


class Stopwatch:
    """Stands between an ensemble and its mesh: when a collective of a step began, was posted, was
    asked for and was there.
    """

    def __init__(self) -> None:
        self.way = "overlapped"
        self.stamps: list[list[float]] = []
        begin_gather, sum_over_examples = ReplicaMesh.begin_gather, ReplicaMesh.sum_over_examples

        def timed_gather(mesh: ReplicaMesh, mine: Tensor, n: int) -> Callable[[], Tensor]:
            if self.way == "silent":
                return lambda: mine[:1, :1].expand(mesh.n_replicas, 1 + n).clone()
            cpu, began = time.thread_time(), time.perf_counter()
            finish = begin_gather(mesh, mine, n)
            posted, posting = time.perf_counter(), time.thread_time() - cpu

            def timed_finish() -> Tensor:
                cpu, called = time.thread_time(), time.perf_counter()
                numbers = finish()
                self.stamps.append(
                    [began, posted, called, time.perf_counter(), posting + time.thread_time() - cpu]
                )
                return numbers

            if self.way == "overlapped":
                return timed_finish
            numbers = timed_finish()
            return lambda: numbers

        def timed_sum(mesh: ReplicaMesh, tensor: Tensor) -> None:
            if self.way == "silent" or not mesh.shares_examples:
                return
            cpu, began = time.thread_time(), time.perf_counter()
            sum_over_examples(mesh, tensor)
            self.stamps.append([began, began, began, time.perf_counter(), time.thread_time() - cpu])

        ReplicaMesh.begin_gather, ReplicaMesh.sum_over_examples = timed_gather, timed_sum  # type: ignore[method-assign]
