"""What a target is: energies at positions, with all its randomness handed in.

An energy is a minibatch estimate of the negative log posterior, a SUM over the data. A target draws
its randomness (minibatch indices, energy noise) in blocks ahead of time and is otherwise a pure
function. So the eager and the compiled loop consume the same random numbers, and a block can be
drawn again when a run is resumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Noise = Mapping[str, Tensor]


class Energy(NamedTuple):
    """Energies of a batch of positions, and the per-example terms where the target has data."""

    total: Tensor  # (...)
    per_example: Tensor | None = (
        None  # (..., n): minus log likelihood of each example of the minibatch
    )
    repeated: Tensor | None = (
        None  # (..., n): the same with other random numbers, for models that draw some (dropout)
    )


class Target(ABC):
    """Base of all targets. Positions have shape (..., rungs, runs, dim); energies have (..., rungs,
    runs).
    """

    dim: int
    n_data: int | None = None  # how many examples stand behind a minibatch energy
    batch_size: int | None = None  # how many are in a minibatch, where that is known beforehand
    has_noise: bool = False  # are energies only estimates?
    shares_minibatch: bool = False  # do the replicas of a run see the same minibatch?

    @abstractmethod
    def energy(self, position: Tensor, noise: Noise) -> Energy:
        """Energy at each position. Must be traceable: no branch on values, no random numbers of its
        own.
        """

    def energy_and_gradient(self, position: Tensor, noise: Noise) -> tuple[Energy, Tensor]:
        """Energy and its gradient, by automatic differentiation unless the target knows better."""

        def summed(position: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            energy = self.energy(position, noise)
            return energy.total.sum(), tuple(term for term in energy if term is not None)

        gradient, terms = torch.func.grad(summed, has_aux=True)(position)
        return Energy(*terms), gradient

    def draw_noise(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Noise:
        """Randomness of `n` evaluations at positions of batch shape `shape`, stacked along a first
        axis.
        """
        return {}

    def draw_initial(self, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor | None:
        """Starting points (*shape, dim), wider than the target: draws of its prior. None if it has
        none to draw from.
        """
        return None

    def check(self, position: Tensor) -> None:  # noqa: B027 - most targets need none
        """Raise a TargetError if this target cannot work at such positions (rungs, runs, dim);
        called once before a run.
        """

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Target:
        """This target with its tensors on `device`; floating tensors become `dtype`."""
        return self
