"""Rows of numbers that the parameters of modules are views of, with the memory that moving them
takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrex.network.flat import FlatLayout


@dataclass
class Rows:
    """Positions, gradients, momenta and means of squares; (rows, size) each."""

    layout: FlatLayout
    position: Tensor
    gradient: Tensor
    velocity: Tensor | None
    squares: Tensor | None

    @staticmethod
    def of(
        layout: FlatLayout,
        n: int,
        device: torch.device,
        *,
        gradients: int,
        momenta: bool,
        squares: bool,
    ) -> Rows:
        """`n` rows of zeros, and as many rows of gradients as there are replicas that have some."""
        return Rows(
            layout,
            layout.empty_rows(n, device),
            layout.empty_rows(gradients, device),
            layout.empty_rows(n, device) if momenta else None,
            layout.empty_rows(n, device) if squares else None,
        )

    def moved(self) -> list[Tensor]:
        """What a move changes."""
        return [rows for rows in (self.position, self.velocity, self.squares) if rows is not None]

    def parts_of(self, k: int) -> dict[str, dict[str, Tensor]]:
        """A row's numbers by name, not copied: positions under `parameters`, and `velocity` and
        `squares` where there are any.
        """
        parts = {"parameters": self.position, "velocity": self.velocity, "squares": self.squares}
        return {
            part: self.layout.views(rows[k]) for part, rows in parts.items() if rows is not None
        }
