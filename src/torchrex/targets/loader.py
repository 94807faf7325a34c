"""A whole data set of tensors on the device, in minibatches: seeded order, batched augmentation, a
position that can be restored.

Selecting a batch needs nothing from the host but, once an epoch, a new order; so it can be part of
a captured step. The order of an epoch is a function of (seed, epoch) alone and the same on every
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
    """Minibatches of tensors that live on one device.

    `tensors` is a sequence (inputs..., targets) or a dict; batches have the same form. `last` says
    what happens to the examples that do not fill a batch: "drop" leaves them out of the epoch,
    "wrap" fills up with the next epoch's first, "keep" gives a smaller batch. `augment(batch,
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
        if isinstance(tensors, Tensor):  # type: ignore[unreachable]
            raise InvalidArgumentError(
                "tensors must be a sequence or a dict of tensors, got one tensor; put it into a tuple: (x,)"
            )
        named: dict[Any, Tensor] = (
            dict(tensors) if isinstance(tensors, Mapping) else dict(enumerate(tensors))
        )
        if not named or not all(isinstance(t, Tensor) and t.ndim for t in named.values()):
            advice = "; pass dataset.tensors" if hasattr(tensors, "tensors") else ""
            raise InvalidArgumentError(
                f"tensors must be a sequence or a dict of tensors with one row per example, got {type(tensors).__name__}{advice}"
            )
        sizes = {len(t) for t in named.values()}
        if len(sizes) > 1:
            shapes = [tuple(t.shape) for t in named.values()]
            raise InvalidArgumentError(f"the tensors must have the same first size, got {shapes}")
        (self.n_data,) = sizes
        if (
            isinstance(batch_size, bool)
            or not isinstance(batch_size, int)
            or not 1 <= batch_size <= self.n_data
        ):
            raise InvalidArgumentError(
                f"batch_size must lie between 1 and the {self.n_data} examples, got {batch_size!r}"
            )
        if last not in ("drop", "wrap", "keep"):
            raise InvalidArgumentError(f"last must be drop, wrap or keep, got {last!r}")
        self.device = (
            torch.device(device) if device is not None else next(iter(named.values())).device
        )
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise InvalidArgumentError(
                f"device {self.device} was asked for, but torch finds no CUDA device here; leave device out"
            )
        self._tensors = {name: t.to(self.device) for name, t in named.items()}
        self._is_dict = isinstance(tensors, Mapping)
        self.batch_size, self.seed, self.shuffle, self.last, self.augment = (
            batch_size,
            seed,
            shuffle,
            last,
            augment,
        )
        self.epoch, self.position = (
            0,
            0,
        )  # the next batch begins at this place of this epoch's order
        self.generator = torch.Generator(self.device).manual_seed(derive_seed(seed, "augment"))
        self.repeat_generator = torch.Generator(self.device).manual_seed(
            derive_seed(seed, "augment.repeat")
        )
        self._order = torch.empty(self.n_data + batch_size, dtype=torch.int64, device=self.device)
        self.cursor = torch.zeros(
            (), dtype=torch.int64, device=self.device
        )  # the position, where a captured step can read it
        self._places = torch.arange(batch_size, device=self.device)
        self._set_order()

    def __len__(self) -> int:
        """Batches of a whole epoch, rounded down where epochs overlap."""
        return (
            -(-self.n_data // self.batch_size)
            if self.last == "keep"
            else self.n_data // self.batch_size
        )

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
        """Begin a new epoch if this one is over; the size of the next batch. Host work, before
        `select`.
        """
        if self._epoch_is_over():
            self._begin_epoch()
        return (
            self.batch_size
            if self.last != "keep"
            else min(self.batch_size, self.n_data - self.position)
        )

    def select(self, size: int, *, twice: bool = False) -> Any:
        """The batch at the cursor, which moves on. Device work only: this may be captured.

        With `twice` its examples are augmented a second time too, by random numbers of their own.
        """
        index = self._order.index_select(0, self.cursor + self._places[:size])
        self.cursor += size

        def chosen(generator: torch.Generator) -> Any:
            batch = {name: t.index_select(0, index) for name, t in self._tensors.items()}
            form = batch if self._is_dict else tuple(batch.values())
            return form if self.augment is None else self.augment(form, generator)

        first = chosen(self.generator)
        return Twice(first, chosen(self.repeat_generator)) if twice else first

    def advanced(self, size: int) -> None:
        """Count a batch that `select` has given, here or in a replay."""
        self.position += size

    def _epoch_is_over(self) -> bool:
        if self.last == "drop":
            return self.position + self.batch_size > self.n_data
        return self.position >= self.n_data

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.position = self.position - self.n_data if self.last == "wrap" else 0
        self._set_order()

    def _set_order(self) -> None:
        """Write this epoch's order, and the beginning of the next one's behind it, where the
        captured step reads it.
        """
        following = self._permutation(self.epoch + 1)[: self.batch_size]
        self._order.copy_(torch.cat([self._permutation(self.epoch), following]))
        self.cursor.fill_(self.position)

    def _permutation(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.n_data)
        return torch.randperm(
            self.n_data,
            generator=torch.Generator().manual_seed(derive_seed(self.seed, f"order.{epoch}")),
        )

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
        """Go on where the state was taken."""
        if state["setting"] != repr(self):
            raise InvalidArgumentError(f"the state is that of {state['setting']}, this is {self!r}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.generator.set_state(state["generator"])
        self.repeat_generator.set_state(state["repeat_generator"])
        self._set_order()

    def __repr__(self) -> str:
        shapes = ", ".join("x".join(map(str, t.shape)) for t in self._tensors.values())
        order = f"seed={self.seed}" if self.shuffle else "in order"
        # A dataclass says how it augments, so that a state of other settings is refused; a
        # function's repr is its address.
        said = repr(self.augment) if is_dataclass(self.augment) else "augmented"
        augmented = "" if self.augment is None else f", {said}"
        return f"DeviceLoader({shapes}; batch_size={self.batch_size}, {order}, last={self.last!r}{augmented})"


def require_no_dataset(data: Any, *, shuffle: bool) -> None:
    """Refuse what gives single examples, with the loader to put around it."""
    if isinstance(data, Dataset) and not hasattr(data, "__iter__"):
        in_order = "" if shuffle else ", shuffle=False"
        tensors = (
            f", or DeviceLoader(dataset.tensors, batch_size{in_order})"
            if hasattr(data, "tensors")
            else ""
        )
        raise InvalidArgumentError(
            f"data must give batches, got a {type(data).__name__}, which gives single examples: use DataLoader(dataset, "
            f"batch_size=..., shuffle={shuffle}){tensors}"
        )
