"""The processes of a job: how they join, what they exchange outside a step, how they leave.

Plain values travel as JSON, nothing is pickled, and errors reach every process. With one process
every method is its trivial case, so that there is one code path. gloo carries what is on CPUs, NCCL
what is on GPUs. Time-outs are bounded: a rank that does not come ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from torchrex.distributed.watch import GONE, PATIENCE, Watch, beat_of, short
from torchrex.errors import InvalidArgumentError, RankError, TorchrexError
from torchrex.processes import leave_with_parent, number_from, parent_is_gone, rank_and_size

T = TypeVar("T")

LONGEST_TIMEOUT = 1e7  # 115 days; torch cannot count the milliseconds of much more
TIMEOUT = 300.0  # seconds that a rank waits for the others; TORCHREX_TIMEOUT says otherwise
BETWEEN_LOOKS = 0.5  # seconds between looks into the store, at a rendezvous
BETWEEN_LOOKS_AT_START = 0.1
LIFE = "torchrex life"  # the key of the newest, and the prefix of each
SILENCE = 10.0  # seconds without a sign of life (two a second) after which a rank counts as gone


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one job."""

    rank: int = 0
    size: int = 1
    watch: Watch | None = None

    @property
    def is_main(self) -> bool:
        """Does this process print and write for all?"""
        return self.rank == 0

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """A collective operation. If it fails, the error names the rank that was the reason."""
        if self.watch is None:
            yield
            return
        if self.watch.is_orphan:
            raise self.watch.store_lost()
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
            self.watch.forget_faults()
        try:
            yield
        except BaseException as error:
            if self.watch is not None and not isinstance(error, RankError):
                self.watch.report_failure(error)
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
        return [json.loads(bytes(text[: int(length)].tolist())) for text, length in pairs]

    def from_main(self, value: T, what: str = "agreement") -> T:
        """The value of rank 0, on every rank."""
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
        """A block that every rank completes, or all leave with one error that names the rank."""
        own: TorchrexError | OSError | None = None
        try:
            yield
        except (TorchrexError, OSError) as error:
            own = error
        if self.size > 1:
            texts = self.gather(None if own is None else str(own), what)
            wrong = {rank: text for rank, text in enumerate(texts) if text is not None}
            if wrong and (own is None or len(wrong) > 1):
                raise kind("; ".join(f"rank {rank}: {text}" for rank, text in wrong.items()))
        if own is not None:
            raise own

    def broadcast(self, tensor: Tensor, source: int, what: str) -> Tensor:
        """Overwrite a tensor, which must be contiguous, with that of one rank."""
        if self.size > 1:
            with self.collective(what):
                dist.broadcast(tensor, src=source)
        return tensor


ALONE = ProcessGroup()
_process_group = ALONE


def join() -> ProcessGroup:
    """All processes of this job: those of torchrun, those of a process group that exists already,
    or this one alone.
    """
    global _process_group
    if _process_group.size > 1:
        return _process_group
    if not dist.is_available():
        return ALONE
    store = None
    if not dist.is_initialized():
        if rank_and_size()[1] < 2:
            return ALONE
        leave_with_parent()
        on_gpus = torch.cuda.is_available()
        if on_gpus:
            local = int(os.environ.get("LOCAL_RANK", "0"))
            torch.cuda.set_device(local % torch.cuda.device_count())
        store = _initialize("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
        atexit.register(leave)  # a script need not say that it is over
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return ALONE
    _process_group = ProcessGroup(rank, size, Watch(rank, size, store))
    return _process_group


def leave() -> None:
    """End what `join` began; torch complains about a process group that is left open."""
    global _process_group
    if _process_group.watch is not None:
        _process_group.watch.stop()
    _process_group = ALONE
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def is_main_process() -> bool:
    """Does this process write what is written once? Known before it has joined the others, too."""
    if _process_group.size > 1:
        return _process_group.is_main
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return rank_and_size()[0] == 0


def _initialize(backend: str) -> Store:
    """The part of the store that belongs to this life of the job."""
    seconds, (own, size) = _timeout(), rank_and_size()
    host, port = os.environ.get("MASTER_ADDR"), number_from("MASTER_PORT", least=1, most=65535)
    if not host:
        raise InvalidArgumentError("the environment variable MASTER_ADDR is not set; use torchrun")
    timeout = timedelta(seconds=seconds)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store = _Entrance(store, rank, size, f"{host}:{port}").wait(seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RankError:
        raise
    except (RuntimeError, ValueError) as error:
        text = f"rank {own} did not meet the other {size - 1} within {seconds:g} s "
        text += f"({short(error)}); did one fail to start? TORCHREX_TIMEOUT=SECONDS waits longer"
        if "EADDRINUSE" in str(error):
            text = f"another job uses port {port}; end it, or choose another port"
        raise RankError(text, speaks=own == 0) from None
    return store


class _Entrance:
    """Where the ranks that start together find each other, and nobody else.

    torchrun keeps its store when it starts ranks again, and every node counts restarts for itself.
    So rank 0 opens a life, and all ranks write into it who they are. A place that is taken belongs
    to an earlier life, or to another job whose ranks found the same port, for example because their
    torchrun was killed. Another job gives signs of life, and whoever sees them leaves.
    """

    def __init__(self, store: Store, rank: int, size: int, where: str) -> None:
        self._store, self._rank, self._size, self._where = store, rank, size, where
        self._me = f"process {os.getpid()} on {socket.gethostname()}"
        self._mine = {"job": f"{os.environ.get('TORCHELASTIC_RUN_ID', '')!r} of {size} processes"}
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # It is in a folder that every start of torchrun makes for its ranks on this host.
            start = "/".join(Path(file).parts[-5:-3])
            self._mine[f"host {os.environ.get('GROUP_RANK', '0')}"] = (
                f"started by torchrun as {start}"
            )
        self._mine[f"rank {rank}"] = self._me

    def wait(self, seconds: float) -> Store:
        """The part of the store that belongs to the life in which all ranks are."""
        if parent_is_gone():
            raise RankError(f"torchrun is {GONE}", speaks=self._rank == 0)
        deadline = time.monotonic() + seconds
        return self._follow(deadline) if self._rank else self._open(deadline)

    def _open(self, deadline: float) -> Store:
        if old := self._life():
            before = beat_of(self._store_of(old), 0)
            time.sleep(PATIENCE)
            if self._life() != old or beat_of(self._store_of(old), 0) != before:
                raise self._found_another(self._taken(self._store_of(self._life())))
        life = uuid.uuid4().hex
        here = self._store_of(life)
        self._taken(here)
        self._store.set(LIFE, life)
        places = [f"rank {rank}" for rank in range(self._size)]
        while not here.check(places):
            if self._life() != life:
                raise self._found_another(self._taken(self._store_of(self._life())))
            if time.monotonic() > deadline:
                missing = ", ".join(place for place in places if not here.check([place]))
                raise RuntimeError(f"without {missing}")
            time.sleep(BETWEEN_LOOKS_AT_START)
        here.set("begun", "")
        return here

    def _follow(self, deadline: float) -> Store:
        beats: dict[str, Any] = {}  # of each life, at first sight
        entered, reason = "", "without rank 0"
        while time.monotonic() < deadline:
            life = self._life()
            here = self._store_of(life)
            if life and life != entered:
                if taken := self._taken(here):
                    reason, beat = taken, beat_of(here, 0)
                    if beat != beats.setdefault(life, beat):
                        raise self._found_another(taken)
                else:
                    entered, reason = life, "one is missing"
            if life and life == entered and here.check(["begun"]):
                return here
            time.sleep(BETWEEN_LOOKS_AT_START)
        raise RuntimeError(reason)

    def _life(self) -> str:
        return self._store.get(LIFE).decode() if self._store.check([LIFE]) else ""

    def _store_of(self, life: str) -> Store:
        return PrefixStore(f"{LIFE} {life}", self._store)

    def _taken(self, here: Store) -> str:
        """Enter a life; what in it belongs to someone else, if something does."""
        for what, mine in self._mine.items():
            found = here.compare_set(what, "", mine).decode()
            if found != mine:
                return f"its {what} is {found}, not {mine}"
        return ""

    def _found_another(self, taken: str) -> RankError:
        return RankError(
            f"rank {self._rank} ({self._me}) found another job at {self._where}: {taken}; end that "
            "job, or choose another port"
        )


def _timeout() -> float:
    text = os.environ.get("TORCHREX_TIMEOUT", "")
    try:
        seconds = float(text) if text else TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise InvalidArgumentError(
            f"TORCHREX_TIMEOUT must be a number of seconds > 0 and <= {LONGEST_TIMEOUT:.0f}, got "
            f"{text!r}"
        )
    return seconds


class Rendezvous:
    """Where ranks wait for each other after work of their own, which may take hours.

    A collective would give up after its time-out. Here the signs of life in the job's store decide
    how long to wait. While ranks work nothing is exchanged; they look into the store, twice a
    second, whether to stop. All ranks make one after the same collectives.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group, self.watch = process_group, process_group.watch
        self._name = "" if self.watch is None else str(self.watch.begun)  # the same on every rank
        self._looked = time.monotonic()

    def request_stop(self) -> None:
        """Ask the others to stop."""
        if self.watch is not None:
            self.watch.set(f"stop {self._name}", True)

    def stop_requested(self) -> bool:
        """Has any rank asked to stop, or does the job exist no more?"""
        if self.watch is None or time.monotonic() - self._looked < BETWEEN_LOOKS:
            return False
        self._looked = time.monotonic()
        return self.watch.is_orphan or any(self._all(f"stop {self._name}"))

    def wait(self, what: str) -> None:
        """Until all ranks are here; RankError if one is gone. Ctrl-C asks the others to stop, and
        waits on for them.
        """
        if self.watch is None:
            return
        self.watch.set(f"came {self._name}", True)
        interrupted = False
        beats: dict[int, Any] = {}
        heard = dict.fromkeys(range(self.process_group.size), time.monotonic())
        while not all(came := self._all(f"came {self._name}")):
            missing = [rank for rank, is_here in enumerate(came) if not is_here]
            try:
                self._check(missing, beats, heard, what)
                time.sleep(BETWEEN_LOOKS / 5)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self.request_stop()
        if self.watch.is_orphan:
            raise self.watch.store_lost()

    def _check(
        self, missing: list[int], beats: dict[int, Any], heard: dict[int, float], what: str
    ) -> None:
        assert self.watch is not None
        if self.watch.is_orphan:
            raise self.watch.store_lost()
        mine = self.watch.get("failed", self.process_group.rank)  # an old error of all is not news
        for rank in missing:
            beat = self.watch.get("beat", rank)
            if beat != beats.get(rank):
                beats[rank], heard[rank] = beat, time.monotonic()
            failed = self.watch.get("failed", rank)
            if (failed is not None and failed != mine) or time.monotonic() - heard[rank] > SILENCE:
                raise self.watch.find_fault(what, RuntimeError("it does not answer"))

    def _all(self, what: str) -> list[bool]:
        assert self.watch is not None
        return [self.watch.get(what, rank) is not None for rank in range(self.process_group.size)]
