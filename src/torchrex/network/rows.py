"""Rows of numbers that the parameters of modules are views of, with the memory that moving them
takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrex.network.flat import FlatLayout
from torchrex.samplers import Sampler, State, named_tensors


@dataclass
class Rows:
    """Positions, gradients and the sampler's state; every tensor is (rows, size)."""

    layout: FlatLayout
    position: Tensor
    gradient: Tensor
    state: State

    @staticmethod
    def of(
        layout: FlatLayout, n: int, device: torch.device, *, gradients: int, sampler: Sampler
    ) -> Rows:
        """`n` rows of zeros, and as many rows of gradients as there are replicas that have some."""
        position = layout.empty_rows(n, device)
        at_rest = sampler.init(position)
        state = type(at_rest)(*(layout.empty_rows(n, device).copy_(each) for each in at_rest))
        return Rows(layout, position, layout.empty_rows(gradients, device), state)

    def moved(self) -> list[Tensor]:
        """What a move changes."""
        return [self.position, *self.state]

    def parts_of(self, k: int) -> dict[str, dict[str, Tensor]]:
        """A row's numbers by name, not copied: positions under `parameters`, the sampler's state
        under its own names.
        """
        parts = {"parameters": self.position, **named_tensors(self.state)}
        return {part: self.layout.views(rows[k]) for part, rows in parts.items()}
