"""Stochastic gradient Hamiltonian Monte Carlo in the form of Saatci and Wilson (2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.samplers.base import Sampler


def sghmc(
    position: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    lr: Tensor,
    temperature: Tensor,
    friction: float,
) -> tuple[Tensor, Tensor]:
    """One SGHMC move.

        v' = (1 - friction) * v - lr * gradient + sqrt(2 * lr * friction * temperature) * noise
        x' = x + v'

    At temperature 0 this is exactly SGD with momentum 1 - friction. As lr -> 0 the stationary
    variance of v tends to 2 * lr * temperature / (2 - friction), whatever the energy; momenta are
    carried across rungs by it.
    """
    kick = (2.0 * friction * lr * temperature).sqrt() * noise
    velocity = (1.0 - friction) * velocity - lr * gradient + kick
    return position + velocity, velocity


@dataclass(frozen=True)
class SGHMC(Sampler):
    """SGHMC with a friction in (0, 1]; the paper uses 0.1, that is momentum 0.9."""

    friction: float = 0.1
    has_momentum = True

    def __post_init__(self) -> None:
        if not 0.0 < self.friction <= 1.0:
            raise InvalidArgumentError(
                f"friction must lie in (0, 1], got {self.friction}; momentum 0.9 is friction 0.1"
            )

    @property
    def velocity_std(self) -> float:  # type: ignore[override]
        return math.sqrt(2.0 / (2.0 - self.friction))

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
        assert velocity is not None
        return sghmc(
            position,
            velocity,
            gradient,
            noise,
            lr=lr,
            temperature=temperature,
            friction=self.friction,
        )
