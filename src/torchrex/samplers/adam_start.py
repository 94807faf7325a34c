"""A descent by Adam before the sampling begins, for targets that plain gradients do not get into:
GANs above all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.samplers.base import Sampler


@dataclass(frozen=True)
class AdamStart(Sampler):
    """Adam for the first `steps` steps, then `sampler`, from rest. For ensembles of modules.

        m' = b1 m + (1 - b1) g,   s' = b2 s + (1 - b2) g^2,   x' = x - lr n_data (m' / (1 - b1^k)) / (sqrt(s' / (1 - b2^k)) + eps)

    at the k-th step, that is torch.optim.Adam on the mean loss with the learning rate lr * n_data,
    which is what the ladder's lr is on that scale. There is no noise in it and no temperature: it
    says where the sampling begins, and its steps belong to the burn-in, as swaps do not belong into
    it (`swap_start=steps`).
    """

    sampler: Sampler
    steps: int
    n_data: int
    betas: tuple[float, float] = (
        0.5,
        0.999,
    )  # 0.5 is usual where networks are trained against each other
    eps: float = 1e-8
    has_momentum = True
    has_squares = True

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, Sampler) or self.sampler.has_squares:
            raise InvalidArgumentError(
                f"sampler must be what follows, such as SGHMC(0.5), got {self.sampler!r}"
            )
        for name, value in (("steps", self.steps), ("n_data", self.n_data)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgumentError(f"{name} must be a whole number >= 1, got {value!r}")
        pair = self.betas if isinstance(self.betas, tuple | list) else ()
        if len(pair) != 2 or not all(
            isinstance(beta, int | float) and 0.0 <= beta < 1.0 for beta in pair
        ):
            raise InvalidArgumentError(
                f"betas must be two numbers from 0 to below 1, got {self.betas!r}"
            )
        if not isinstance(self.eps, int | float) or not 0.0 < self.eps < math.inf:
            raise InvalidArgumentError(f"eps must be positive and finite, got {self.eps!r}")

    @property
    def velocity_std(self) -> float:  # type: ignore[override]
        return self.sampler.velocity_std

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
        raise InvalidArgumentError(
            "AdamStart needs to know the step: it moves an ensemble of modules, not a density"
        )

    def numbers_at(self, step: Tensor) -> Tensor:
        """The two corrections of Adam's means, whether the step descends, and whether one that
        sampled came before it.
        """
        k = step.to(torch.float64) + 1.0
        b1, b2 = self.betas
        return torch.stack(
            [1.0 - b1**k, 1.0 - b2**k, (step < self.steps).double(), (step > self.steps).double()]
        )

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
        """Both moves are computed and one is taken, because the step is a number on the device."""
        assert now is not None
        assert velocity is not None
        assert squares is not None
        b1, b2 = self.betas
        first, second, descends, sampled = now.to(position.dtype).unbind()
        # The mean's gradient, so that eps means what it means in torch.optim.Adam.
        mean_gradient = gradient / self.n_data
        momentum = b1 * velocity + (1.0 - b1) * mean_gradient
        grown = b2 * squares + (1.0 - b2) * mean_gradient.square()
        descended = position - (lr * self.n_data) * (momentum / first) / (
            (grown / second).sqrt() + self.eps
        )
        at_rest = torch.where(sampled > 0, velocity, torch.zeros_like(velocity))
        moved, kicked = self.sampler.move(
            position, at_rest, gradient, noise, lr=lr, temperature=temperature
        )
        kicked = torch.zeros_like(velocity) if kicked is None else kicked
        return (
            torch.where(descends > 0, descended, moved),
            torch.where(descends > 0, momentum, kicked),
            torch.where(descends > 0, grown, squares),
        )
