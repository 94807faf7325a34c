"""What a sampler is: a pure function that moves all replicas, and the state that it carries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

State = tuple[
    Tensor, ...
]  # a named tuple of the sampler's own, of tensors shaped like the position


class NoState(NamedTuple):
    """The state of a sampler that remembers nothing."""


class Momentum(NamedTuple):
    """The state of a sampler with momentum."""

    velocity: Tensor


def named_tensors(state: State) -> dict[str, Tensor]:
    """The tensors of a state by the sampler's own names, for checkpoints."""
    return dict(zip(type(state)._fields, state, strict=True))  # type: ignore[attr-defined]


class Sampler(ABC):
    """Moves positions (..., dim), given gradients, learning rates and temperatures that broadcast.

    A sampler keeps nothing itself: `init` gives the first state, `move` and `rescale` the next one.
    All of them are traced and compiled, so they must not branch on values.
    """

    # Of the stationary velocity as lr -> 0, in units of sqrt(lr * temperature); 0 without momentum.
    velocity_std: float = 0.0

    @abstractmethod
    def init(self, position: Tensor) -> State:
        """The state before the first move: at rest."""

    @abstractmethod
    def move(
        self,
        position: Tensor,
        state: State,
        gradient: Tensor,
        noise: Tensor,
        *,
        lr: Tensor,
        temperature: Tensor,
        step: Tensor,
    ) -> tuple[Tensor, State]:
        """New position and state; `noise` is standard normal, `step` () int64 counts from 0."""

    def rescale(self, state: State, changed: Tensor, ratio: Tensor) -> State:
        """The state after a swap; `ratio` is sqrt(lr * temperature) of the new rung over old."""
        return state

    def refresh(self, state: State, changed: Tensor, scale: Tensor, noise: Tensor) -> State:
        """The state after a swap, with momenta drawn anew; `scale` is the new square root."""
        return state

    def check(self, *, n_data: int | None, swap_start: int | None) -> None:  # noqa: B027
        """Refuse a target or a first swap (None without swaps) that do not fit this sampler."""
