"""What a sampler is: one move of all replicas, given gradients, learning rates and temperatures."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Sampler(ABC):
    """Moves positions (..., dim); learning rates and temperatures broadcast against them and may change at every step."""

    has_momentum: bool = False
    velocity_std: float = 0.0  # of the stationary velocity as lr -> 0, in units of sqrt(lr * temperature)

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
