"""One seed gives named, independent random generators, and all of them can be saved and restored.

Which name feeds what: `initial` the starting points, `move` the samplers' noise, `target`
minibatches and energy noise, `pairing` which rungs meet, `swap` the swap decisions, `measure` the
repeated draws of the noise estimator. A new consumer takes a new name, so that the streams of the
others, and with them old results, stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchrex.errors import require_whole

T = TypeVar("T")

# All threads share torch's default generators, from which dropout, the first weights of layers and
# distributions draw. Code that puts them into a state of its own holds this lock meanwhile.
DEFAULT_GENERATORS = threading.RLock()


@contextlib.contextmanager
def default_seed(seed: int, devices: Sequence[int] | None = None) -> Iterator[None]:
    """Torch's default generators begin at `seed`; afterwards they are as they were before."""
    with DEFAULT_GENERATORS, torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def taken(data: Iterable[T]) -> Iterator[T]:
    """What `data` gives, taken while no other thread uses the default generators: loaders and
    transforms draw from them.
    """
    with DEFAULT_GENERATORS:
        source = iter(data)
    while True:
        with DEFAULT_GENERATORS:
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


def derive_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the stream `name`; a hash, so that neighbouring seeds share nothing."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Streams:
    """Named generators of one seed, made when first asked for.

    >>> streams = Streams(0)
    >>> torch.rand(2, generator=streams["move"]).shape
    torch.Size([2])
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        require_whole("seed", seed, least=0)
        self.seed = seed
        self.device = torch.device(device)
        self._generators: dict[str, torch.Generator] = {}

    def __getitem__(self, name: str) -> torch.Generator:
        if name not in self._generators:
            generator = torch.Generator(self.device)
            generator.manual_seed(derive_seed(self.seed, name))
            self._generators[name] = generator
        return self._generators[name]

    def state_dict(self) -> dict[str, Tensor]:
        """The state of every generator in use, as byte tensors."""
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the generators of `state`; every other one starts afresh."""
        self._generators.clear()
        for name, generator_state in state.items():
            self[name].set_state(generator_state)

    def __repr__(self) -> str:
        return f"Streams(seed={self.seed}, device={str(self.device)!r})"
