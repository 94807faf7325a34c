"""How the pairs of a ladder did over a run: swaps, the noise of their tests, the F they had, and which of them are dead.

One home for what `Draws.summary`, `sample` and `train` say of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.exchange.criterion import expected_acceptance

logger = logging.getLogger("torchrex")

# A pair that swaps at 2 % of its tests makes no swap in 150 of them one time in twenty; a few tests are enough where the noise
# leaves next to nothing.
ENOUGH_TESTS, SOME_TESTS, HARDLY_ANY = 150, 20, 1e-3
LOUD = 2.0  # s above which the noise is the first thing to change


class PairReport(NamedTuple):
    """One pair of neighbouring rungs, all runs together."""

    pair: int  # of the rungs `pair` and `pair + 1`
    accepted: int
    proposed: int
    noise_std: float  # s = sqrt(2) * gap * sigma, the standard deviation of the noise in log S
    factor: float  # F
    expected: float  # acceptance between equal energies at this s and F

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else math.nan

    @property
    def is_dead(self) -> bool:
        """It was tested often enough to have swapped, and never did."""
        enough = SOME_TESTS if self.expected < HARDLY_ANY else ENOUGH_TESTS
        return self.accepted == 0 and self.proposed >= enough and math.isfinite(self.noise_std)


def report_pairs(
    accepted: Tensor, proposed: Tensor, noise_variance: Tensor, *, inverse_gap: Tensor, factor: Tensor
) -> list[PairReport]:
    """All of shape (pairs,), of any device: counts over all steps and runs; the rest as it is now, mean over runs."""
    s = math.sqrt(2.0) * inverse_gap.double().cpu() * noise_variance.double().cpu().sqrt()
    expected = expected_acceptance(0.0, s, factor.double().cpu())
    columns = (accepted.tolist(), proposed.tolist(), s.tolist(), factor.tolist(), expected.tolist())
    return [PairReport(pair, int(a), int(p), *more) for pair, (a, p, *more) in enumerate(zip(*columns, strict=True))]


def in_words(pairs: Sequence[PairReport]) -> str:
    """What is wrong with dead pairs and what to change; nothing where none is dead."""
    dead = [pair for pair in pairs if pair.is_dead]
    if not dead:
        return ""
    named = ", ".join(f"{each.pair} and {each.pair + 1} (s = {each.noise_std:.3g})" for each in dead[:4])
    more = f" and {len(dead) - 4} more pairs" if len(dead) > 4 else ""
    worst = max(dead, key=lambda each: each.noise_std)
    if worst.noise_std > LOUD:
        at = f"at s = {worst.noise_std:.3g} and F = {worst.factor:.3g} equal energies swap with probability {worst.expected:.2g}"
        cure = "use closer temperatures (more rungs), or larger or shared minibatches, until s is 2 or less"
    else:
        at = "their noise is small, so their energies lie too far apart"
        cure = "use closer temperatures (more rungs)"
    return f"no swap in {worst.proposed:,} tests between rungs {named}{more}: {at}; {cure}"


def warn_of_dead_pairs(pairs: Sequence[PairReport], name: str = "") -> None:
    """One line in the log, where there is something to say."""
    if words := in_words(pairs):
        logger.warning("%s%s", f"{name}: " if name else "", words)


def rung_of(replica_at: Tensor) -> Tensor:
    """Where each replica stood, (k, replicas, chains), from who stood on each rung, (k, rungs, chains)."""
    return replica_at.long().argsort(dim=1)


def count_trips(path: Tensor) -> tuple[Tensor, Tensor]:
    """Restarts and round trips, each (replicas, chains), of paths over the rungs (k, replicas, chains).

    A restart is a visit to rung 0 by a replica that has seen the top since its last one; a round trip is a restart of one that
    had been on rung 0 before. Only the order of visits to the two ends matters.
    """
    top = path.shape[1] - 1
    if top < 1 or len(path) == 0:
        none = torch.zeros(path.shape[1:], dtype=torch.long)
        return none, none.clone()
    at_end = (path == 0) | (path == top)
    when = torch.arange(len(path)).view(-1, 1, 1)
    latest = torch.where(at_end, when, -1).cummax(0).values  # the last visit to an end so far, -1 before the first
    end = torch.where(latest >= 0, path.gather(0, latest.clamp(min=0)), -1)
    restarts = ((end[1:] == 0) & (end[:-1] == top)).sum(0)
    first = end.gather(0, at_end.long().argmax(0, keepdim=True))[0]
    return restarts, restarts - ((first == top) & (restarts > 0)).long()
