"""What a captured step leaves of itself on the device, for a stretch of steps, until somebody
looks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrex.exchange.algorithm import Rules, StepInfo

RECORDED = ("energy", "accepted", "proposed", "noise_variance", "correction", "replica_at")


class Records:
    """StepInfo of a block of steps, on the device, written by the captured step itself."""

    def __init__(self, rules: Rules, length: int, device: torch.device) -> None:
        rungs, pairs = rules.ladder.n_rungs, rules.ladder.n_pairs

        def rows(n: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(length, n, 1, dtype=dtype, device=device)

        self.info = StepInfo(
            position=torch.zeros(length, 0, device=device),
            energy=rows(rungs, torch.float64),
            accepted=rows(pairs, torch.bool),
            proposed=rows(pairs, torch.bool),
            noise_variance=rows(pairs, torch.float64),
            correction=rows(pairs, torch.float64),
            replica_at=rows(rungs, torch.int64),
        )

    def write(self, row: int, info: StepInfo) -> None:
        """The information of a step that was not captured."""
        for name in RECORDED:
            getattr(self.info, name)[row].copy_(getattr(info, name))

    def read(self, first: int, last: int) -> StepInfo:
        """A copy of rows [first, last)."""
        return StepInfo(*(values[first:last].clone() for values in self.info))
