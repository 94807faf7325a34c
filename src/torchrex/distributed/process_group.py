"""What several processes say to each other outside a step: plain values as JSON, agreement, and
errors that reach everybody.

Nothing is pickled. With one process every verb is its trivial case, so that there is one path.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrex.distributed.watch import Watch
from torchrex.errors import RankError, TorchrexError

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one job."""

    rank: int = 0
    size: int = 1
    watch: Watch | None = None

    @property
    def is_main(self) -> bool:
        """Does this process speak for all: print, write what is written once?"""
        return self.rank == 0

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """A collective. If it fails, the error names the rank that was the reason."""
        if self.watch is None:
            yield
            return
        if self.watch.is_orphan:
            raise self.watch.without_store()
        self.watch.begun += 1
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, TorchrexError):
                raise
            raise self.watch.find_fault(what, error) from None

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """If this process leaves by an error, the others learn which."""
        if self.watch is not None:
            self.watch.begin_anew()
        try:
            yield
        except BaseException as error:
            if self.watch is not None and not isinstance(error, RankError):
                self.watch.fail(error)
            raise

    def gather(self, value: T, what: str = "agreement") -> list[T]:
        """The plain value of every rank, in their order, on every rank."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with self.collective(what):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(data)]))
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = data
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(texts, padded)
        pairs = zip(texts, lengths, strict=True)
        return [json.loads(bytes(text[: int(length)].tolist()).decode()) for text, length in pairs]

    def from_main(self, value: T, what: str = "agreement") -> T:
        """What rank 0 says."""
        return self.gather(value if self.is_main else None, what)[0]  # type: ignore[return-value]

    def maximum(self, values: Sequence[float], what: str = "agreement") -> list[float]:
        """The largest over all ranks of each number."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(list(values), dtype=torch.float64)
        with self.collective(what):
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()

    @contextlib.contextmanager
    def all_or_none(self, what: str, kind: type[TorchrexError]) -> Iterator[None]:
        """A block that every rank gets through, or all leave with one error: what some rank met,
        with its name.
        """
        met: TorchrexError | OSError | None = None
        try:
            yield
        except (TorchrexError, OSError) as error:
            met = error
        if self.size > 1:
            said = self.gather(None if met is None else str(met), what)
            wrong = {rank: text for rank, text in enumerate(said) if text is not None}
            if wrong and (met is None or len(wrong) > 1):
                raise kind("; ".join(f"rank {rank}: {text}" for rank, text in wrong.items()))
        if met is not None:
            raise met

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Tensor:
        """Overwrite a tensor, which must be contiguous, with that of one rank."""
        if self.size > 1:
            with self.collective(what):
                dist.broadcast(tensor, src=source)
        return tensor


ALONE = ProcessGroup()
