"""What a sampler is: one move of all replicas, given gradients, learning rates and temperatures."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Sampler(ABC):
    """Moves positions (..., dim); learning rates and temperatures broadcast against them and may
    change at every step.
    """

    has_momentum: bool = False
    has_squares: bool = False  # does it keep a mean of squared gradients besides?
    velocity_std: float = (
        0.0  # of the stationary velocity as lr -> 0, in units of sqrt(lr * temperature)
    )

    @abstractmethod
    def move(
        self,
        position: Tensor,
        velocity: Tensor | None,
        gradient: Tensor,
        noise: Tensor,
        *,
        lr: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """New position and velocity; `noise` is standard normal and shaped like `position`."""

    def numbers_at(self, step: Tensor) -> Tensor | None:
        """What `move_at` has to know of the step, counted from 0: a few numbers, made once and not
        for each weight.
        """
        return None

    def move_at(
        self,
        now: Tensor | None,
        position: Tensor,
        velocity: Tensor | None,
        squares: Tensor | None,
        gradient: Tensor,
        noise: Tensor,
        *,
        lr: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`move` for a sampler that changes with the step; also the new mean of squares."""
        return *self.move(
            position, velocity, gradient, noise, lr=lr, temperature=temperature
        ), squares
