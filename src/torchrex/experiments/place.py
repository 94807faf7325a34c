"""Where a run is computed and in which precision: what "auto" became, resolved before anything is written."""

from __future__ import annotations

import platform
from typing import NamedTuple

import torch


class Place(NamedTuple):
    """A device that is there, and the precision of the forward pass."""

    device: torch.device
    precision: str = "float32"

    @property
    def name(self) -> str:
        """Such as NVIDIA H200, or CPU, x86_64, 8 threads."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"
