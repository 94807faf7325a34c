"""Randomness inside a module's forward pass (dropout) comes from torch's default generators; a run gives them its own state.

So the same seed gives the same masks, a resumed run goes on with them, and the rest of the process is not disturbed.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from torchrex.rng import Streams, derive_seed


class ForwardRandomness:
    """A context in which the default generators are at the run's own state; entering and leaving cost some microseconds."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        seed = derive_seed(streams.seed, "forward")
        self._mine = [torch.Generator(generator.device).manual_seed(seed).get_state() for generator in self._generators]
        self._outside: list[Tensor] = []

    def __enter__(self) -> None:
        self._outside = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._mine, strict=True):
            generator.set_state(state)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._mine = [generator.get_state() for generator in self._generators]
        finally:  # a capture that failed may have left a generator that cannot be asked
            for generator, state in zip(self._generators, self._outside, strict=True):
                generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        return {"generators": [state.clone() for state in self._mine]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mine = [tensor.clone() for tensor in state["generators"]]
