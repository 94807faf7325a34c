"""Where a run is computed and in which precision: what "auto" became, resolved before anything is
written.
"""

from __future__ import annotations

import platform
from typing import Literal, NamedTuple

import torch

Precision = Literal["auto", "float32", "bfloat16"]  # of the forward pass; auto is bfloat16 on a GPU


class Place(NamedTuple):
    """A device that is there, and the precision of the forward pass."""

    device: torch.device
    precision: str = "float32"

    @staticmethod
    def of(device: torch.device, precision: Precision) -> Place:
        """The device, with what "auto" becomes there."""
        auto = "bfloat16" if device.type == "cuda" else "float32"
        return Place(device, auto if precision == "auto" else precision)

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bfloat16" else None

    @property
    def name(self) -> str:
        """Such as NVIDIA H200, or CPU, x86_64, 8 threads."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"
