"""Stochastic gradient Hamiltonian Monte Carlo in the form of Saatci and Wilson (2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.samplers.base import Momentum, Sampler, State


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

    def __post_init__(self) -> None:
        if not 0.0 < self.friction <= 1.0:
            raise InvalidArgumentError(
                f"friction must lie in (0, 1], got {self.friction}; momentum 0.9 is friction 0.1"
            )

    @property
    def velocity_std(self) -> float:  # type: ignore[override]
        return math.sqrt(2.0 / (2.0 - self.friction))

    def init(self, position: Tensor) -> Momentum:
        return Momentum(torch.zeros_like(position))

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
        rates = {"lr": lr, "temperature": temperature}
        moved = sghmc(position, state[0], gradient, noise, friction=self.friction, **rates)
        return moved[0], Momentum(moved[1])

    def rescale(self, state: State, changed: Tensor, ratio: Tensor) -> Momentum:
        return Momentum(state[0] * torch.where(changed, ratio, 1.0))

    def refresh(self, state: State, changed: Tensor, scale: Tensor, noise: Tensor) -> Momentum:
        return Momentum(torch.where(changed, scale * (self.velocity_std * noise), state[0]))
