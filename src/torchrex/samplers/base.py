"""What a sampler is: a pure function that moves all replicas, and the state that it carries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from torchrex.errors import InvalidArgumentError

# A named tuple of the sampler's own, of tensors shaped like the position.
State = tuple[Tensor, ...]


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
        """The state after a swap; `ratio` is sqrt(lr * temperature) of the new rung over old.

        `changed` is true for replicas that changed rungs: only their states may change.
        """
        return state  # without momentum

    def refresh(self, state: State, changed: Tensor, scale: Tensor, noise: Tensor) -> State:
        """The state after a swap, with momenta drawn anew; `scale` is the new square root."""
        return state  # without momentum

    def first_state(self, position: Tensor) -> State:
        """The state of `init`, checked: everything else stores its tensors by their names."""
        state = self.init(position)
        if not hasattr(type(state), "_fields") or any(
            not isinstance(each, Tensor) or each.shape != position.shape for each in state
        ):
            raise InvalidArgumentError(
                f"init of {self!r} must return a NamedTuple of tensors shaped like the position "
                f"{tuple(position.shape)}, or NoState(), got {type(state).__name__}"
            )
        return state

    def require_policy(self, policy: str) -> None:
        """Refuse a sampler with momentum that lacks what the policy asks for at a swap."""
        missing = getattr(type(self), policy, None) is getattr(Sampler, policy, self)
        if self.velocity_std and missing:
            raise InvalidArgumentError(
                f"momentum={policy!r} needs the method {policy} of {self!r}, which has momentum "
                "(velocity_std > 0); write it, or choose another policy"
            )

    def check(self, *, n_data: int | None, swap_start: int | None) -> None:  # noqa: B027
        """Refuse a target or a first swap (None without swaps) that do not fit this sampler."""
