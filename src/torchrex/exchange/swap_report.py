"""How the pairs of a ladder did over a run: swaps, noise, F, and which pairs are dead.

`Draws.summary`, `sample` and `train` report from here.
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

# A pair that swaps at 2 % of its tests makes no swap in 150 of them one time in twenty; a few tests
# are enough where the noise leaves next to nothing. Replicas that start alike swap for certain at
# first: one swap of every run proves nothing, but takes as many tests again.
ENOUGH_TESTS, SOME_TESTS, HARDLY_ANY = 150, 20, 1e-3
LOUD = 2.0  # s above which the noise is the first thing to change
MOST_LOOKED_AT = 2**20  # noise variances whose acceptance is computed


class PairReport(NamedTuple):
    """One pair of neighbouring rungs, all runs together."""

    pair: int  # of the rungs `pair` and `pair + 1`
    accepted: int
    proposed: int
    noise_std: float  # s = sqrt(2) * gap * sigma, of the noise in log S: rms over steps and runs
    factor: float  # F
    expected: float  # acceptance between equal energies at F and s: mean over steps and runs
    n_runs: int = 1

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else math.nan

    @property
    def is_dead(self) -> bool:
        """It was tested often enough to have swapped, and has not, but for one swap of each run."""
        enough = (SOME_TESTS if self.expected < HARDLY_ANY else ENOUGH_TESTS) * (1 + self.accepted)
        tested = self.proposed >= enough and math.isfinite(self.noise_std)
        return self.accepted <= self.n_runs and tested


def report_pairs(
    accepted: Tensor,
    proposed: Tensor,
    noise_variance: Tensor,
    *,
    inverse_gap: Tensor,
    factor: Tensor,
    n_runs: int,
) -> list[PairReport]:
    """Of any device: the noise variances of some steps, (k, pairs, runs), and the rest (pairs,):
    counts over all steps and runs, gaps and F as they are now.
    """
    per_s2, factor = 2.0 * inverse_gap.double().cpu().square(), factor.double().cpu()
    rms = (per_s2 * noise_variance.mean((0, 2), dtype=torch.float64).cpu()).sqrt()
    some = noise_variance[:: -(-noise_variance.numel() // MOST_LOOKED_AT) or 1].double().cpu()
    expected = expected_acceptance(0.0, (per_s2[:, None] * some).sqrt(), factor[:, None])
    columns = (accepted.long(), proposed.long(), rms, factor, expected.mean((0, 2)))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [PairReport(k, a, p, s, f, e, n_runs) for k, (a, p, s, f, e) in enumerate(rows)]


def percent(share: float) -> str:
    """As 100 %, 58.3 % or < 0.001 %."""
    return f"{100 * share:.3g} %" if share >= 1e-5 else "< 0.001 %"


def in_words(pairs: Sequence[PairReport]) -> str:
    """What is wrong with dead pairs and what to change; nothing where none is dead."""
    dead = [pair for pair in pairs if pair.is_dead]
    if not dead:
        return ""
    named = ", ".join(
        f"{each.pair} and {each.pair + 1} (s = {each.noise_std:.3g})" for each in dead[:4]
    )
    more = f" and {len(dead) - 4} more pairs" if len(dead) > 4 else ""
    worst = max(dead, key=lambda each: each.noise_std)
    noise_std, factor = worst.noise_std, worst.factor
    if noise_std > LOUD:
        chance = percent(float(expected_acceptance(0.0, noise_std, factor)))
        at = f"at s = {noise_std:.3g} and F = {factor:.3g} equal energies swap with "
        at += f"probability {chance}"
        between = math.ceil(noise_std / LOUD) - 1  # s is proportional to the gap
        cure = (
            f"use closer temperatures (more rungs: between {worst.pair} and {worst.pair + 1} about "
            f"{between:,}), or larger or shared minibatches, until s is {LOUD:g} or less"
        )
    else:
        at = "their noise is small, so their energies lie too far apart"
        cure = "use closer temperatures (more rungs)"
    made = worst.accepted
    swaps = f"{made:,} swap{'s' if made > 1 else ''}" if made else "no swap"
    return f"{swaps} in {worst.proposed:,} tests between rungs {named}{more}: {at}; {cure}"


def warn_of_dead_pairs(
    pairs: Sequence[PairReport], name: str = "", *, all_steps: bool = True
) -> None:
    """A line in the log, where there is something to say. `all_steps` says that the pairs were
    counted from the first step on: then one without any test is named too.
    """
    untested = [f"{each.pair} and {each.pair + 1}" for each in pairs if not each.proposed]
    never = (
        f"no swap was ever tested between rungs {', '.join(untested[:4])}"
        f"{f' and {len(untested) - 4} more pairs' if len(untested) > 4 else ''}; raise the number "
        "of steps, or lower swap_start or swap_interval"
    )
    for words in (in_words(pairs), never if all_steps and untested else ""):
        if words:
            logger.warning("%s%s", f"{name}: " if name else "", words)


def rung_of(replica_at: Tensor) -> Tensor:
    """The rung of each replica, (k, replicas, chains), from the replica at each rung."""
    return replica_at.long().argsort(dim=1)


def count_trips(path: Tensor) -> tuple[Tensor, Tensor]:
    """Restarts and round trips, each (replicas, chains), of paths over the rungs (k, replicas,
    chains).

    A restart is a visit to rung 0 by a replica that has seen the top since its last one; a round
    trip is a restart of one that had been on rung 0 before. Only the order of visits to the two
    ends matters.
    """
    top = path.shape[1] - 1
    if top < 1 or len(path) == 0:
        none = torch.zeros(path.shape[1:], dtype=torch.long)
        return none, none.clone()
    at_end = (path == 0) | (path == top)
    when = torch.arange(len(path)).view(-1, 1, 1)
    # The last visit to an end so far, -1 before the first.
    latest = torch.where(at_end, when, -1).cummax(0).values
    end = torch.where(latest >= 0, path.gather(0, latest.clamp(min=0)), -1)
    restarts = ((end[1:] == 0) & (end[:-1] == top)).sum(0)
    first = end.gather(0, at_end.long().argmax(0, keepdim=True))[0]
    return restarts, restarts - ((first == top) & (restarts > 0)).long()
