"""Randomness of a run on a network: counted normal numbers, dropout, and losses that are random.

Counted noise is a pure function of (key, step, place), the same eagerly, compiled and captured, on
any device. Philox2x32-10 of Salmon et al. (2011), in plain tensor operations, so that the compiler
fuses it into the move: noise costs no memory traffic and no generator state, and a resumed run
needs to know the step only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from torchrex.distributed import ReplicaMesh
from torchrex.exchange.algorithm import Rules
from torchrex.exchange.noise import BatchVariance, SwapBatchVariance
from torchrex.rng import DEFAULT_GENERATORS, derive_seed

if TYPE_CHECKING:
    from torchrex.network.replicas import ModuleEnsemble

MULTIPLIER, WEYL, MASK = 0xD256D193, 0x9E3779B9, 0xFFFFFFFF
SMALL_SHARE = 0.05  # of the data: below, the factor 1 - n / N is left out if the losses are random


def philox(low: Tensor, high: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Two words from a counter of two and a key of one; words are int64 below 2^32, broadcast."""
    for _ in range(10):
        product = low * MULTIPLIER  # wraps at 2^64, and the bits are those of the unsigned product
        low, high = ((product >> 32) & MASK) ^ key ^ high, product & MASK
        key = (key + WEYL) & MASK
    return low, high


def keys_of(seeds: list[int], device: torch.device) -> Tensor:
    """Keys (n, 2) from 63-bit seeds: the key proper, and where the counter begins."""
    words = [[seed & MASK, seed >> 32] for seed in seeds]
    return torch.tensor(words, dtype=torch.int64, device=device)


def normals(keys: Tensor, step: Tensor, size: int) -> Tensor:
    """Standard normal numbers (len(keys), size) of one step, by Box and Muller, in float32."""
    # The sum with a loaded number also keeps the compiler from doing the 64-bit arithmetic in the
    # 32 bits of an index.
    place = (torch.arange(size, device=keys.device, dtype=torch.int64) + keys[:, 1:]) & MASK
    first, second = philox(place, step & MASK, keys[:, :1])
    uniform = (first.float() + 1.0) * 2.0**-32  # in (0, 1]
    angle = second.float() * (2.0 * math.pi * 2.0**-32)
    return (-2.0 * uniform.log()).sqrt() * angle.cos()


class RandomLosses:
    """Are losses random by themselves (dropout, augmentation), as the user says or as was seen?"""

    def __init__(self, given: bool | None, rules: Rules) -> None:
        self._given = given
        self._separable = isinstance(rules.noise, BatchVariance | SwapBatchVariance)
        self._tests_steps = rules.swap_batch is None
        self._seen: set[str] = set()

    def note(self, part: Literal["model", "data"]) -> None:
        """The model was seen to draw random numbers, or the data to be augmented."""
        self._seen.add(part)

    @property
    def any(self) -> bool:
        return bool(self._seen) if self._given is None else self._given

    @property
    def in_data(self) -> bool:
        return "data" in self._seen

    def need_a_second_pass(self, n: int, source: ModuleEnsemble, *, swaps: bool = False) -> bool:
        """Does a second pass on the same n examples of a step (of a swap batch, with `swaps`) have
        to separate this noise from their choice?

        Not if they are a small share of the data: the error is below that share.
        """
        seen = self._given is None and bool(self._seen)
        large = n > SMALL_SHARE * source.n_data
        tested = swaps or (self._tests_steps and not source.replacement)
        return seen and self._separable and tested and large


class ForwardRandomness:
    """A context in which torch's default generators, which dropout uses, are at the run's own
    states; entering and leaving cost some microseconds.

    So the same seed gives the same masks, a resumed run goes on with them, and the rest of the
    process is not disturbed. On a CPU each replica has a state of its own, so that its masks do not
    depend on where the other replicas are computed. A captured step on a GPU draws the masks of all
    replicas there from one. Ranks that share a replica's minibatch draw different masks for their
    shares, from a number that they draw together.

    The default generators belong to all threads, so runs in several threads take turns here.
    """

    def __init__(self, seed: int, device: torch.device, mesh: ReplicaMesh) -> None:
        self._cpu = torch.default_generator
        self._gpu: torch.Generator | None = None
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._gpu = torch.cuda.default_generators[index]
        self._share = mesh.data_rank if mesh.shares_examples else None
        seeds = [derive_seed(seed, f"forward.{replica}") for replica in mesh.mine]
        self._states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self._gpu_state: Tensor | None = None
        if self._gpu is not None:
            self._gpu_state = torch.Generator(self._gpu.device).manual_seed(seeds[0]).get_state()
        self._outside: list[Tensor] = []

    def __enter__(self) -> None:
        DEFAULT_GENERATORS.acquire()
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
        try:
            self._cpu.set_state(self._outside[0])
            if self._gpu is not None:
                try:
                    self._gpu_state = self._gpu.get_state()
                finally:  # a capture that failed may have left a generator that cannot be asked
                    self._gpu.set_state(self._outside[1])
        finally:
            DEFAULT_GENERATORS.release()

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

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put all states back to what they were."""
        states = [self.state_of(k) for k in range(len(self._states))]
        try:
            yield
        finally:
            for k, state in enumerate(states):
                self.load_state_of(k, state)

    def now(self) -> list[Tensor]:
        """The states of the default generators now: they change if a forward pass draws."""
        return [
            generator.get_state() for generator in (self._cpu, self._gpu) if generator is not None
        ]

    def state_of(self, k: int) -> dict[str, Tensor]:
        """What the masks of the k-th replica of this process go on from."""
        state = {"cpu": self._states[k].clone()}
        return state if self._gpu_state is None else {**state, "gpu": self._gpu_state.clone()}

    def load_state_of(self, k: int, state: dict[str, Tensor]) -> None:
        self._states[k] = state["cpu"].clone()
        if self._gpu_state is not None and k == 0:
            self._gpu_state = state["gpu"].clone()
