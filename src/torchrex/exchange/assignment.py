"""The rung of each replica: looking values up by rung or by replica, and swapping neighbours.

Two ways to do the same, which the ensemble chooses between. `Selects` is for many runs at once:
for a handful of rungs a chain of selects vectorises and fuses into the step's kernel. A gather does
neither (2.3 times the step time at 64 runs). `Indexing` is for a single run of modules: it takes
the fewest operations from Python.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_SELECTS = 16  # beyond this many rungs a gather is cheaper than the chain


class Selects:
    """By comparison, for any number of runs; indices are int32."""

    dtype = torch.int32

    @staticmethod
    def take(values: Tensor, index: Tensor) -> Tensor:
        """`values[index[k, b], b, ...]`: for each entry of index (k, runs) the row it names of
        values (n, runs or 1, ...).
        """
        trailing = values.shape[2:]
        index = index.view(*index.shape, *(1 for _ in trailing))
        if len(values) > MOST_SELECTS:
            shape = (*index.shape[:2], *trailing)
            return values.expand(len(values), *shape[1:]).gather(0, index.long().expand(shape))
        taken = values[:1].expand(*index.shape[:2], *trailing)
        for row in range(1, len(values)):
            taken = torch.where(index == row, values[row], taken)
        return taken

    @staticmethod
    def invert(replica_at: Tensor) -> Tensor:
        """rung_of from replica_at (rungs, runs), or the other way round."""
        n = len(replica_at)
        places = torch.arange(n, device=replica_at.device, dtype=replica_at.dtype)[:, None]
        inverse = torch.zeros_like(replica_at)
        for place in range(1, n):
            inverse = torch.where(replica_at[place] == places, place, inverse)
        return inverse

    @staticmethod
    def swap(replica_at: Tensor, accepted: Tensor) -> Tensor:
        """replica_at after the accepted pairs (pairs, runs) swapped; pair p is rungs p, p + 1."""
        rungs = list(replica_at)
        moved = []
        for rung, here in enumerate(rungs):
            if rung + 1 < len(rungs):
                here = torch.where(accepted[rung], rungs[rung + 1], here)
            if rung > 0:
                here = torch.where(accepted[rung - 1], rungs[rung - 1], here)
            moved.append(here)
        return torch.stack(moved)


class Indexing:
    """The same by indexing, for one run; indices are int64."""

    dtype = torch.int64

    @staticmethod
    def take(values: Tensor, index: Tensor) -> Tensor:
        return values.index_select(0, index[:, 0])

    @staticmethod
    def invert(replica_at: Tensor) -> Tensor:
        places = torch.arange(len(replica_at), device=replica_at.device)[:, None]
        return torch.zeros_like(replica_at).scatter(0, replica_at, places)

    @staticmethod
    def swap(replica_at: Tensor, accepted: Tensor) -> Tensor:
        up, down = F.pad(accepted.long(), (0, 0, 0, 1)), F.pad(accepted.long(), (0, 0, 1, 0))
        places = torch.arange(len(replica_at), device=replica_at.device)[:, None]
        return replica_at.gather(0, places + up - down)


Assignment = type[Selects] | type[Indexing]
