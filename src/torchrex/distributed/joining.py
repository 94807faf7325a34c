"""Becoming one of several processes, as `torchrun` describes them in the environment, and leaving
again.

gloo carries what lies on CPUs, NCCL what lies on GPUs. Time-outs are bounded: a rank that does not
come ends the job.
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from torchrex.distributed.process_group import ALONE, ProcessGroup
from torchrex.distributed.watch import Watch, short
from torchrex.errors import InvalidArgumentError, RankError

TIMEOUT = 300.0  # seconds that a rank waits for the others; TORCHREX_TIMEOUT says otherwise

_process_group: ProcessGroup = ALONE


def join() -> ProcessGroup:
    """All processes of this job: those of torchrun, those of a process group that is there already,
    or this one alone.
    """
    global _process_group
    if _process_group.size > 1:
        return _process_group
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return ALONE
        on_gpus = torch.cuda.is_available()
        if on_gpus:
            torch.cuda.set_device(
                int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
            )
        _open_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
        atexit.register(leave)  # a script need not say that it is over
    if dist.get_world_size() == 1:
        return ALONE
    _process_group = ProcessGroup(
        dist.get_rank(), dist.get_world_size(), Watch(dist.get_rank(), dist.get_world_size())
    )
    return _process_group


def _open_process_group(backend: str) -> None:
    seconds = _timeout()
    timeout = timedelta(seconds=seconds)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it starts the ranks again: the addresses of an earlier life
        # must not be found there.
        store = PrefixStore(f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {os.environ.get('RANK', '?')} did not meet the other {int(os.environ['WORLD_SIZE']) - 1} within {seconds:g} s "
            f"({short(error)}); look whether one of them failed to start, or give TORCHREX_TIMEOUT=SECONDS",
            speaks=os.environ.get("RANK", "0") == "0",
        ) from None


def is_main_process() -> bool:
    """Does this process write what is written once? Known before it has joined the others, too."""
    if _process_group.size > 1:
        return _process_group.is_main
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return int(os.environ.get("WORLD_SIZE", "1")) < 2 or os.environ.get("RANK", "0") == "0"


def leave() -> None:
    """End what `join` began; torch complains about a process group that is left open."""
    global _process_group
    if _process_group.watch is not None:
        _process_group.watch.stop()
    _process_group = ALONE
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _timeout() -> float:
    said = os.environ.get("TORCHREX_TIMEOUT", "")
    try:
        seconds = float(said) if said else TIMEOUT
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InvalidArgumentError(
            f"TORCHREX_TIMEOUT must be a number of seconds > 0, got {said!r}"
        )
    return seconds
