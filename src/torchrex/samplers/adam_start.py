"""A descent by Adam before the sampling begins, for targets that plain gradients do not get into:
GANs above all.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.samplers.base import Sampler, State, named_tensors


@dataclass(frozen=True)
class AdamStart(Sampler):
    """Adam for the first `steps` steps, then `sampler`, from rest.

        m' = b1 m + (1 - b1) g,   s' = b2 s + (1 - b2) g^2,
        x' = x - lr n_data (m' / (1 - b1^k)) / (sqrt(s' / (1 - b2^k)) + eps)

    at the k-th step: torch.optim.Adam on the mean loss with the learning rate lr * n_data, which is
    the ladder's lr on that scale. There is no noise in it and no temperature, so it belongs to the
    burn-in and swaps begin after it (`swap_start=steps`).
    """

    sampler: Sampler
    steps: int
    n_data: int
    betas: tuple[float, float] = (
        0.5,
        0.999,
    )  # 0.5 is usual for networks trained against each other
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, Sampler) or isinstance(self.sampler, AdamStart):
            raise InvalidArgumentError(
                f"sampler must be what follows, such as SGHMC(0.5), got {self.sampler!r}"
            )
        for name, value in (("steps", self.steps), ("n_data", self.n_data)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgumentError(f"{name} must be a whole number >= 1, got {value!r}")
        pair = self.betas if isinstance(self.betas, tuple | list) else ()
        if len(pair) != 2 or not all(isinstance(b, int | float) and 0.0 <= b < 1.0 for b in pair):
            raise InvalidArgumentError(
                f"betas must be two numbers from 0 to below 1, got {self.betas!r}"
            )
        if not isinstance(self.eps, int | float) or not 0.0 < self.eps < math.inf:
            raise InvalidArgumentError(f"eps must be positive and finite, got {self.eps!r}")

    @property
    def velocity_std(self) -> float:  # type: ignore[override]
        return self.sampler.velocity_std

    def init(self, position: Tensor) -> State:
        """The sampler's own tensors, and Adam's mean of squares.

        Adam's mean of gradients is kept in the first of the sampler's tensors, which has no other
        use before the sampling begins, or in one of its own.
        """
        follower = named_tensors(self.sampler.init(position)) or {
            "mean": torch.zeros_like(position)
        }
        return _state_type(*follower, "squares")(*follower.values(), torch.zeros_like(position))

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
        """Both moves are computed and one is taken, because the step is a number on the device."""
        mean, squares = state[0], state[-1]
        b1, b2 = self.betas
        # 1 - b^k in double. This form is cheap enough to be computed for every weight of a kernel.
        k = step.to(torch.float64) + 1.0
        first, second = (
            -torch.expm1(k * (math.log(b) if b else -math.inf)).to(position.dtype) for b in (b1, b2)
        )
        # The mean's gradient, so that eps means what it means in torch.optim.Adam.
        mean_gradient = gradient / self.n_data
        momentum = b1 * mean + (1.0 - b1) * mean_gradient
        grown = b2 * squares + (1.0 - b2) * mean_gradient.square()
        descended = position - (lr * self.n_data) * (momentum / first) / (
            (grown / second).sqrt() + self.eps
        )
        descends, sampled = step < self.steps, step > self.steps
        at_rest = self.sampler.init(position)
        own = [torch.where(sampled, a, b) for a, b in zip(state, at_rest, strict=False)]
        moved, follower = self.sampler.move(
            position,
            type(at_rest)(*own),
            gradient,
            noise,
            lr=lr,
            temperature=temperature,
            step=step,
        )
        kept = [
            torch.where(descends, momentum, follower[0] if follower else mean),
            *follower[1:],
            torch.where(descends, grown, squares),
        ]
        return torch.where(descends, descended, moved), type(state)(*kept)

    def rescale(self, state: State, changed: Tensor, ratio: Tensor) -> State:
        return type(state)(*[*self.sampler.rescale(state[:-1], changed, ratio), state[-1]])

    def refresh(self, state: State, changed: Tensor, scale: Tensor, noise: Tensor) -> State:
        return type(state)(*[*self.sampler.refresh(state[:-1], changed, scale, noise), state[-1]])

    def check(self, *, n_data: int | None, swap_start: int | None) -> None:
        if n_data is not None and n_data != self.n_data:
            raise InvalidArgumentError(
                f"AdamStart counts n_data={self.n_data} examples and the energy {n_data}; "
                "give both the same"
            )
        if swap_start is not None and swap_start < self.steps:
            raise InvalidArgumentError(
                f"swaps would be tested from step {swap_start} on, while Adam descends for "
                f"{self.steps} steps without temperatures; say swap_start={self.steps}"
            )


@functools.cache  # one type for all runs: the compiler makes another form for another type
def _state_type(*fields: str) -> Callable[..., State]:
    return namedtuple("AdamState", fields)
