"""Modes of CUDA that are set for a while and put back: nothing may wait, convolutions of one kind,
a generator let go.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Let everything that waits for the device raise: a capture that fails in the middle is harder
    to recover from.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that the mode is a prototype, which finds not all that waits
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def convolutions(*, deterministic: bool) -> Iterator[None]:
    """cuDNN held to algorithms that give the same bits in every process, or else free to try all
    and take the fastest.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit = (
        not deterministic,
        deterministic,
        0,
    )
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit = before


def release(generator: torch.Generator, state: Tensor) -> None:
    """Put a generator back to a state, with memory of its own: a capture that failed leaves it
    believing it is being captured.
    """
    if generator.device.type != "cuda":
        generator.set_state(state)
        return
    fresh = torch.Generator(generator.device)
    fresh.set_state(state)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
