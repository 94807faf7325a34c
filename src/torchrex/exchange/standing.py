"""Who stands where: looking values up by rung or by replica, and letting neighbours change places.

A standing of int32 belongs to many runs side by side and goes by comparison: for a handful of rungs
a chain of selects vectorises and fuses into the step's kernel where a gather does neither (2.3
times the step time at 64 runs). One of int64 belongs to a single run of modules and goes by
indexing, which takes the fewest operations from Python.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_SELECTS = 16  # beyond this many rungs a gather is cheaper than the chain


def take(values: Tensor, index: Tensor) -> Tensor:
    """`values[index[k, b], b, ...]`: for each entry of index (k, runs) the row it names of values
    (n, runs or 1, ...).
    """
    if index.dtype == torch.int64:
        return values.index_select(0, index[:, 0])
    trailing = values.shape[2:]
    index = index.view(*index.shape, *(1 for _ in trailing))
    if len(values) > MOST_SELECTS:
        shape = (*index.shape[:2], *trailing)
        return values.expand(len(values), *shape[1:]).gather(0, index.long().expand(shape))
    taken = values[:1].expand(*index.shape[:2], *trailing)
    for row in range(1, len(values)):
        taken = torch.where(index == row, values[row], taken)
    return taken


def invert(standing: Tensor) -> Tensor:
    """rung_of from replica_at or the other way round: each column of standing (n, runs) is a
    permutation.
    """
    places = torch.arange(standing.shape[0], device=standing.device, dtype=standing.dtype)[:, None]
    if standing.dtype == torch.int64:
        return torch.zeros_like(standing).scatter(0, standing, places)
    inverse = torch.zeros_like(standing)
    for place in range(1, standing.shape[0]):
        inverse = torch.where(standing[place] == places, place, inverse)
    return inverse


def change_places(replica_at: Tensor, accepted: Tensor) -> Tensor:
    """replica_at after the accepted pairs (pairs, runs), which are disjoint, changed places; pair p
    joins rungs p and p + 1.
    """
    if replica_at.dtype == torch.int64:
        up, down = F.pad(accepted.long(), (0, 0, 0, 1)), F.pad(accepted.long(), (0, 0, 1, 0))
        places = torch.arange(len(replica_at), device=replica_at.device)[:, None]
        return replica_at.gather(0, places + up - down)
    rungs = list(replica_at)
    moved = []
    for rung, here in enumerate(rungs):
        if rung + 1 < len(rungs):
            here = torch.where(accepted[rung], rungs[rung + 1], here)
        if rung > 0:
            here = torch.where(accepted[rung - 1], rungs[rung - 1], here)
        moved.append(here)
    return torch.stack(moved)
