"""Stochastic gradient Langevin dynamics (Welling and Teh 2011; Eq. 7 of Deng et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchrex.samplers.base import NoState, Sampler, State


def sgld(
    position: Tensor, gradient: Tensor, noise: Tensor, *, lr: Tensor, temperature: Tensor
) -> Tensor:
    """One SGLD move.

        x' = x - lr * gradient + sqrt(2 * lr * temperature) * noise

    At temperature 0 this is exactly SGD. On a quadratic energy of stiffness a the stationary
    variance is temperature / (a * (1 - lr * a / 2)), not temperature / a: the step size is part of
    the law.
    """
    return position - lr * gradient + (2.0 * lr * temperature).sqrt() * noise


@dataclass(frozen=True)
class SGLD(Sampler):
    """SGLD; it has no parameters of its own, learning rate and temperature belong to the rung."""

    def init(self, position: Tensor) -> NoState:
        return NoState()

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
        return sgld(position, gradient, noise, lr=lr, temperature=temperature), state
