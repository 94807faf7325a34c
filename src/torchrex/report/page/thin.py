"""How a long run becomes small: which recorded rows the page keeps, and how many digits of a
number.

Rows are chosen, never averaged, so that every point on the page was really recorded: the lowest and
highest energies of each stretch, and every row near the first swaps, into which a reader zooms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchrex.diagnostics import History

MOST_VALUES = 6000  # rows times rungs
MOST_MARKS = 2000
NEAR_A_SWAP = 8  # rows on either side
SWAPS_IN_FULL = 40
DIGITS = 5


def rows_to_keep(history: History, chain: int = 0) -> Tensor:
    """Indices of the recorded rows that the page shows of one chain, rising."""
    n, rungs = len(history.steps), history.n_rungs
    most = max(200, MOST_VALUES // rungs)
    if n <= most:
        return torch.arange(n)
    energy = history.energy[:, :, chain].double().nan_to_num()
    n_stretches = max(1, most // (2 * rungs))
    edges = torch.linspace(0, n, n_stretches + 1).long().tolist()
    kept = {0, n - 1}
    for begin, end in pairwise(edges):
        if end > begin:
            part = energy[begin:end]
            kept.update((begin + part.argmin(0)).tolist() + (begin + part.argmax(0)).tolist())
    for swap in swaps_of(history, chain)[:SWAPS_IN_FULL].tolist():
        row = int(torch.searchsorted(history.steps, swap))
        kept.update(range(max(0, row - NEAR_A_SWAP), min(n, row + NEAR_A_SWAP + 1)))
    return torch.tensor(sorted(kept))


def swaps_of(history: History, chain: int = 0) -> Tensor:
    """The steps at which one chain swapped; of draws none is known."""
    if history.swaps is None:
        return torch.zeros(0, dtype=torch.long)
    return history.swaps.step[history.swaps.chain == chain]


def few_marks(steps: Tensor) -> Tensor:
    """At most MOST_MARKS of them, evenly chosen."""
    if len(steps) <= MOST_MARKS:
        return steps
    return steps[torch.linspace(0, len(steps) - 1, MOST_MARKS).long()]


def numbers(values: Tensor | Iterable[Any], digits: int = DIGITS) -> list[float | int | None]:
    """For JSON: so many significant digits, whole numbers without a point, None for what is not a
    finite number.
    """
    each = values.tolist() if isinstance(values, Tensor) else values
    return [number(value, digits) for value in each]


def number(value: Any, digits: int = DIGITS) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if isinstance(value, int):
        return value
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
