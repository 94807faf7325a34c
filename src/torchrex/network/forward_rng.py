"""Randomness inside a module's forward pass (dropout) comes from torch's default generators; a run
gives them its own states.

So the same seed gives the same masks, a resumed run goes on with them, and the rest of the process
is not disturbed. On a CPU each replica has a state of its own, so that its masks do not depend on
where the other replicas are computed. A captured step on a GPU draws the masks of all replicas
there from one. Ranks that share a replica's minibatch draw different masks for their shares, from a
number that they draw together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor

from torchrex.distributed import ReplicaMesh
from torchrex.rng import Streams, derive_seed


class ForwardRandomness:
    """A context in which the default generators are at the run's own states; entering and leaving
    cost some microseconds.
    """

    def __init__(self, streams: Streams, device: torch.device, mesh: ReplicaMesh) -> None:
        self._cpu = torch.default_generator
        self._gpu: torch.Generator | None = None
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._gpu = torch.cuda.default_generators[index]
        self._share = mesh.data_rank if mesh.shares_examples else None
        seeds = [derive_seed(streams.seed, f"forward.{replica}") for replica in mesh.mine]
        self._states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self._gpu_state = (
            None
            if self._gpu is None
            else torch.Generator(self._gpu.device).manual_seed(seeds[0]).get_state()
        )
        self._outside: list[Tensor] = []

    def __enter__(self) -> None:
        self._outside = [self._cpu.get_state()]
        if self._gpu is not None and self._gpu_state is not None:
            self._outside.append(self._gpu.get_state())
            self._gpu.set_state(self._gpu_state)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cpu.set_state(self._outside[0])
        if self._gpu is not None:
            try:
                self._gpu_state = self._gpu.get_state()
            finally:  # a capture that failed may have left a generator that cannot be asked
                self._gpu.set_state(self._outside[1])

    @contextlib.contextmanager
    def turn_of(self, k: int) -> Iterator[None]:
        """The forward pass of the k-th replica of this process."""
        self._cpu.set_state(self._states[k])
        if self._share is not None:
            number = int(torch.randint(2**62, ()))
            self._states[k] = self._cpu.get_state()
            self._cpu.manual_seed(derive_seed(number, f"share.{self._share}"))
            yield
            return
        try:
            yield
        finally:
            self._states[k] = self._cpu.get_state()

    def state_dict(self) -> dict[str, list[Tensor]]:
        gpu = [] if self._gpu_state is None else [self._gpu_state.clone()]
        return {"cpu": [state.clone() for state in self._states], "gpu": gpu}

    def now(self) -> list[Tensor]:
        """The states of the default generators, inside of the context: they change if a forward
        pass draws random numbers.
        """
        return [
            generator.get_state() for generator in (self._cpu, self._gpu) if generator is not None
        ]

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        self._states = [each.clone() for each in state["cpu"]]
        self._gpu_state = state["gpu"][0].clone() if state["gpu"] else None

    def state_of(self, k: int) -> dict[str, Tensor]:
        """What the masks of the k-th replica of this process go on from."""
        state = {"cpu": self._states[k].clone()}
        return state if self._gpu_state is None else {**state, "gpu": self._gpu_state.clone()}

    def load_state_of(self, k: int, state: dict[str, Tensor]) -> None:
        self._states[k] = state["cpu"].clone()
        if self._gpu_state is not None and k == 0:
            self._gpu_state = state["gpu"].clone()
