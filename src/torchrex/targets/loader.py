"""A data set of tensors on the device, in minibatches, with a position that can be restored.

Selecting a batch needs nothing from the host except, once an epoch, a new order; so it can be part
of a captured step. The order of an epoch is a function of (seed, epoch) alone, the same on every
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchrex.errors import InvalidArgumentError
from torchrex.rng import derive_seed

LastBatch = Literal["drop", "wrap", "keep"]
Augment = Callable[[Any, torch.Generator], Any]


class Twice(NamedTuple):
    """The same examples, augmented twice."""

    batch: Any
    repeated: Any


class DeviceLoader:
    """Minibatches of tensors that are on one device.

    `tensors` is a sequence (inputs..., targets) or a dict; batches have the same form. `last` says
    what happens to the examples that do not fill a batch: "drop" leaves them out of the epoch,
    "wrap" fills up with the first of the next epoch, "keep" gives a smaller batch. `augment(batch,
    generator)` changes a batch on the device; all its random numbers must come from the generator.

    Iterating gives one epoch, or the rest of it after `load_state_dict`.

    >>> loader = DeviceLoader((torch.randn(100, 3), torch.arange(100)), batch_size=32, seed=0)
    >>> [len(y) for x, y in loader]
    [32, 32, 32]
    """

    def __init__(
        self,
        tensors: Sequence[Tensor] | Mapping[str, Tensor],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: LastBatch = "drop",
        augment: Augment | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        named = _named_tensors(tensors)
        first = next(iter(named.values()))
        self.n_data = len(first)
        is_whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
        if not is_whole or not 1 <= batch_size <= self.n_data:
            raise InvalidArgumentError(
                f"batch_size must lie between 1 and the {self.n_data} examples, got {batch_size!r}"
            )
        if last not in ("drop", "wrap", "keep"):
            raise InvalidArgumentError(f"last must be drop, wrap or keep, got {last!r}")
        self.device = torch.device(first.device if device is None else device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise InvalidArgumentError(
                f"device {self.device} was given, but torch finds no CUDA device; leave device out"
            )
        self._tensors = {name: t.to(self.device) for name, t in named.items()}
        self._is_dict = isinstance(tensors, Mapping)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.last, self.augment = last, augment
        self.epoch, self.position = 0, 0  # where the next batch begins in the order of this epoch
        self.generator, self.repeat_generator = (
            torch.Generator(self.device).manual_seed(derive_seed(seed, name))
            for name in ("augment", "augment.repeat")
        )
        self._order = torch.empty(self.n_data + batch_size, dtype=torch.int64, device=self.device)
        # The position, where a captured step can read it.
        self.cursor = torch.zeros((), dtype=torch.int64, device=self.device)
        self._places = torch.arange(batch_size, device=self.device)
        self._set_order()

    def __len__(self) -> int:
        """Batches of a complete epoch, rounded down where epochs overlap."""
        n_full = self.n_data // self.batch_size
        return n_full + (self.last == "keep" and self.n_data % self.batch_size > 0)

    def __iter__(self) -> Iterator[Any]:
        if self._epoch_is_over():
            self._begin_epoch()
        epoch = self.epoch
        while self.epoch == epoch and not self._epoch_is_over():
            yield self.next()

    def next(self, *, twice: bool = False) -> Any:
        """The next batch, over the ends of epochs."""
        size = self.prepare()
        batch = self.select(size, twice=twice)
        self.advanced(size)
        return batch

    def prepare(self) -> int:
        """Begin a new epoch if this one is over; the size of the next batch. Host work."""
        if self._epoch_is_over():
            self._begin_epoch()
        left = self.n_data - self.position
        return min(self.batch_size, left) if self.last == "keep" else self.batch_size

    def select(self, size: int, *, twice: bool = False) -> Any:
        """The batch at the cursor, which moves on. Device work only: this may be captured.

        With `twice` its examples are also augmented a second time, by other random numbers.
        """
        index = self._order.index_select(0, self.cursor + self._places[:size])
        self.cursor += size
        first = self._chosen(index, self.generator)
        return Twice(first, self._chosen(index, self.repeat_generator)) if twice else first

    def swap_batches(self, step: int, size: int, *, twice: bool = False) -> Iterator[Any]:
        """`size` different examples on which to compare replicas before a step, in parts of at most
        `batch_size`. They depend on the seed and the step alone, and the position stays.
        """
        if size > self.n_data:
            raise InvalidArgumentError(
                f"swap_batch={size} is more than the {self.n_data} examples of the data"
            )
        order, *augment = (
            torch.Generator(device).manual_seed(derive_seed(self.seed, f"{name}.{step}"))
            for name, device in (
                ("swap", "cpu"),
                ("swap.augment", self.device),
                ("swap.augment.repeat", self.device),
            )
        )
        index = torch.randperm(self.n_data, generator=order)[:size].to(
            self.device, non_blocking=True
        )
        for part in index.tensor_split(-(-size // self.batch_size)):
            first = self._chosen(part, augment[0])
            yield Twice(first, self._chosen(part, augment[1])) if twice else first

    def _chosen(self, index: Tensor, generator: torch.Generator) -> Any:
        batch = {name: t.index_select(0, index) for name, t in self._tensors.items()}
        form = batch if self._is_dict else tuple(batch.values())
        return form if self.augment is None else self.augment(form, generator)

    def advanced(self, size: int) -> None:
        """Count a batch that `select` has given, here or in a replay."""
        self.position += size

    def _epoch_is_over(self) -> bool:
        needed = self.batch_size if self.last == "drop" else 1
        return self.position + needed > self.n_data

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.position = self.position - self.n_data if self.last == "wrap" else 0
        self._set_order()

    def _set_order(self) -> None:
        """Write the order of this epoch and the first of the next; a captured step reads them."""
        following = self._permutation(self.epoch + 1)[: self.batch_size]
        self._order.copy_(torch.cat([self._permutation(self.epoch), following]))
        self.cursor.fill_(self.position)

    def _permutation(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.n_data)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, f"order.{epoch}"))
        return torch.randperm(self.n_data, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """The position; together with the settings it decides all batches to come."""
        return {
            "setting": repr(self),
            "epoch": self.epoch,
            "position": self.position,
            "generator": self.generator.get_state(),
            "repeat_generator": self.repeat_generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken."""
        if state["setting"] != repr(self):
            raise InvalidArgumentError(f"the state is that of {state['setting']}, this is {self!r}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.generator.set_state(state["generator"])
        self.repeat_generator.set_state(state["repeat_generator"])
        self._set_order()

    def __repr__(self) -> str:
        shapes = ", ".join("x".join(map(str, t.shape)) for t in self._tensors.values())
        order = f"seed={self.seed}" if self.shuffle else "in order"
        # A dataclass prints its settings, so that a state of others is refused; the repr of a
        # function is its address.
        augment = repr(self.augment) if is_dataclass(self.augment) else "augmented"
        settings = [f"batch_size={self.batch_size}", order, f"last={self.last!r}"]
        settings += [] if self.augment is None else [augment]
        return f"DeviceLoader({shapes}; {', '.join(settings)})"


def _named_tensors(tensors: Any) -> dict[Any, Tensor]:
    if isinstance(tensors, Tensor):
        raise InvalidArgumentError(
            "tensors must be a sequence or a dict of tensors, got one tensor; give a tuple: (x,)"
        )
    named = dict(tensors) if isinstance(tensors, Mapping) else dict(enumerate(tensors))
    if not named or not all(isinstance(t, Tensor) and t.ndim for t in named.values()):
        advice = "; pass dataset.tensors" if hasattr(tensors, "tensors") else ""
        raise InvalidArgumentError(
            f"tensors must be a sequence or a dict of tensors with one row per example, got "
            f"{type(tensors).__name__}{advice}"
        )
    if len({len(t) for t in named.values()}) > 1:
        shapes = [tuple(t.shape) for t in named.values()]
        raise InvalidArgumentError(f"the tensors must have the same first size, got {shapes}")
    return named


def require_no_dataset(data: Any, *, shuffle: bool) -> None:
    """Refuse what gives single examples, and name the loader to use."""
    if isinstance(data, Dataset) and not hasattr(data, "__iter__"):
        in_order = "" if shuffle else ", shuffle=False"
        tensors = f", or DeviceLoader(dataset.tensors, batch_size{in_order})"
        raise InvalidArgumentError(
            f"data must give batches, got a {type(data).__name__} of single examples: use "
            f"DataLoader(dataset, batch_size=..., shuffle={shuffle})"
            f"{tensors if hasattr(data, 'tensors') else ''}"
        )
