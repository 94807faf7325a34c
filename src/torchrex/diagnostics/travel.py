"""How replicas travel along the ladder: round trips, restarts, and time on each rung.

Exchange helps rung 0 by bringing it states that the hottest rung made independent of their past:
arrivals from there count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.diagnostics.history import Estimate, History, over_chains
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import count_trips, rung_of


class Travel(NamedTuple):
    """Counts per replica, (replicas, chains), and the rate of round trips of all replicas."""

    round_trips: Tensor  # rung 0 -> top -> rung 0
    restarts: Tensor  # top -> rung 0; at most one more than the round trips
    per_step: Estimate  # round trips per step, over chains
    per_attempt: Estimate  # per swap attempt of an even-odd pairing; compare with the rates below
    exact: bool  # False: steps are missing and swaps are not listed, so trips may have been missed

    def __repr__(self) -> str:
        """Means over chains, of all replicas of a chain together."""
        replicas, chains = self.round_trips.shape
        trips, restarts = (
            float(count.sum(0).double().mean()) for count in (self.round_trips, self.restarts)
        )
        least, plural = "" if self.exact else "at least ", "" if chains == 1 else "s"
        return (
            f"Travel({least}{trips:.4g} round trips and {restarts:.4g} restarts a chain, its "
            f"{replicas} replicas together, mean over {chains} chain{plural}; "
            f"{float(self.per_step.value):.3g} round trips a step)"
        )


def round_trips(history: History) -> Travel:
    """Round trips from the first recorded step on (`history.after` leaves the burn-in out).

    Needs every step, or the list of swaps of a trace; otherwise the counts are lower bounds.
    Attempts are counted over all steps and taken to be spread evenly over them.
    """
    if len(history.steps) == 0:
        raise InvalidArgumentError(f"{history} has no recorded step to begin at")
    first = int(history.steps[0])
    if history.swaps is None:
        restarts, trips = count_trips(rung_of(history.replica_at))
    else:
        paths = [count_trips(_replay(history, chain)) for chain in range(history.n_chains)]
        restarts, trips = (torch.cat(counts, dim=1) for counts in zip(*paths, strict=True))
    total, n_steps = trips.sum(0).double(), history.n_steps - first
    # Even and odd pairs take turns, so two neighbouring pairs see every attempt between them.
    attempts = history.proposed[:2].sum(0).double() * (n_steps / history.n_steps)
    rates = over_chains(total / n_steps), over_chains(total / attempts)
    return Travel(trips, restarts, *rates, history.has_every_step)


def _replay(history: History, chain: int) -> Tensor:
    """The path of every replica of one chain, (1 + swaps, replicas, 1), from the first row on."""
    assert history.swaps is not None
    mine = (history.swaps.chain == chain) & (history.swaps.step > history.steps[0])
    replica_at = history.replica_at[0, :, chain].tolist()
    rows = [list(replica_at)]
    for pair in history.swaps.pair[mine].tolist():
        replica_at[pair], replica_at[pair + 1] = replica_at[pair + 1], replica_at[pair]
        rows.append(list(replica_at))
    return rung_of(torch.tensor(rows)[:, :, None])


def even_odd_rate(rejection: Tensor) -> float:
    """Round trips per attempt, all replicas together, of an even-odd pairing, from (pairs,).

        rate = 1 / (2 + 2 * sum_i r_i / (1 - r_i))        (Syed et al. 2022, non-reversible case)

    It takes a replica's energy to be new at every attempt; replicas that move slowly make fewer
    trips. Two rungs have one pair, tested at every attempt, and then the rate is 1 - r.
    """
    r = _rejections(rejection)
    if len(r) == 1:
        return float(1.0 - r[0])
    return float(1.0 / (2.0 + 2.0 * (r / (1.0 - r)).sum()))


def optimal_rate(rejection: Tensor) -> float:
    """The rate that ever more rungs between the same temperatures approach.

        rate = 1 / (2 + 2 Lambda),    Lambda = sum of the rejections

    Lambda belongs to the target and its noise and hardly changes with the ladder, as long as
    rejection rates are not near 1 (Syed et al. 2022); of a coarse ladder the sum is too small.
    Where `even_odd_rate` is far below it, add rungs.
    """
    return float(1.0 / (2.0 + 2.0 * _rejections(rejection).sum()))


def _rejections(rejection: Tensor) -> Tensor:
    r = rejection.double().flatten()
    if len(r) == 0 or not bool(((r >= 0) & (r <= 1)).all()):
        raise InvalidArgumentError(f"rejection rates must be in [0, 1], got {r.tolist()}")
    return r


class Occupancy(NamedTuple):
    """How long each replica was on each rung."""

    share: Estimate  # (replicas, rungs): of the recorded steps, mean over chains
    deviation: Tensor  # (replicas, chains): half the sum over rungs of |share - 1 / rungs|, 0 even


def rung_occupancy(history: History) -> Occupancy:
    """Share of the recorded steps that each replica spent on each rung; in the long run 1 / rungs.

    Any thinning is fine.
    """
    replicas = torch.arange(history.n_rungs).view(1, -1, 1, 1)
    at_rung = history.replica_at.unsqueeze(1) == replicas  # (steps, replicas, rungs, chains)
    share = at_rung.double().mean(0)
    return Occupancy(over_chains(share), 0.5 * (share - 1.0 / history.n_rungs).abs().sum(1))
