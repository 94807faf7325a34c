"""What diagnostics read of a run, and what they return: a history of the ladder, estimates, and
how replicas travel between the rungs.

Draws and traces thin what they keep. Means over recorded steps (acceptance expected from the
energies, noise level, occupancy) are right with any thinning. Counts of swaps are totals over all
steps. Round trips need every step: a trace lists every swap and so gives them exactly, while
thinned draws give a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.exchange import Ladder, count_trips, rung_of
from torchrex.posterior import Draws

FEWEST_BATCHES = 4


class Estimate(NamedTuple):
    """A value and its standard error, of equal shape; NaN is an error that the data cannot show."""

    value: Tensor
    error: Tensor


def over_chains(per_chain: Tensor) -> Estimate:
    """Mean over the last axis, one value per independent chain, and its standard error.

        error = std / sqrt(chains),    NaN for one chain

    It is right whatever the correlation within each chain.
    """
    values = per_chain.double()
    n, mean = values.shape[-1], values.mean(-1)
    error = values.std(-1) / math.sqrt(n) if n > 1 else torch.full_like(mean, math.nan)
    return Estimate(mean, error)


def batch_means(series: Tensor) -> Estimate:
    """Mean of a stationary series along the last axis, with an error from about sqrt(k) batches.

        error = std(batch means) / sqrt(batches)

    Batches must be long against the correlation time; otherwise the error is too small. Fewer than
    16 values give no error (NaN). Values that do not fill a batch count in the mean alone.
    """
    values = series.double()
    n, mean = values.shape[-1], values.mean(-1)
    n_batches = math.isqrt(n)
    if n_batches < FEWEST_BATCHES:
        return Estimate(mean, torch.full_like(mean, math.nan))
    length = n // n_batches
    batches = values[..., n - n_batches * length :].reshape(*values.shape[:-1], n_batches, length)
    return Estimate(mean, over_chains(batches.mean(-1)).error)


def mean_of(values: Tensor) -> Estimate:
    """Mean of values (..., chains, k): the error is between chains, or by batches of one chain."""
    if values.shape[-2] > 1:
        return over_chains(values.double().mean(-1))
    return batch_means(values.squeeze(-2))


class Swaps(NamedTuple):
    """Every swap made, in the order in which they happened in each chain."""

    step: Tensor  # (n,)
    pair: Tensor  # (n,)
    chain: Tensor  # (n,)


@dataclass(frozen=True, repr=False)
class History:
    """How the ladder of a run behaved. Steps count from 0; row i belongs to step `steps[i]`."""

    steps: Tensor  # (k,): the recorded ones
    energy: Tensor  # (k, rungs, chains): estimates that the swap tests saw, before the swaps
    replica_at: Tensor  # (k, rungs, chains): the replica on each rung, after the swaps
    noise_variance: Tensor  # (k, pairs, chains): sigma2
    temperature: Tensor  # (k, rungs)
    accepted: Tensor  # (pairs, chains): over all steps
    proposed: Tensor  # (pairs, chains): over all steps
    n_steps: int  # all of them, recorded or not
    correction: Tensor | None = None  # (k, pairs, chains): gap * sigma2 / F, where known
    swaps: Swaps | None = None  # every one, where known

    def __post_init__(self) -> None:
        k, rungs, chains = self.energy.shape
        by_pair = (k, rungs - 1, chains)
        wanted: dict[str, tuple[int, ...]] = {
            "steps": (k,),
            "replica_at": (k, rungs, chains),
            "noise_variance": by_pair,
            "temperature": (k, rungs),
            "accepted": by_pair[1:],
            "proposed": by_pair[1:],
            "correction": by_pair,
        }
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise InvalidArgumentError(
                    f"with energies (steps, rungs, chains) = {(k, rungs, chains)}, {name} must "
                    f"have shape {shape}, got {tuple(tensor.shape)}; is it the ladder of this run?"
                )

    @classmethod
    def from_draws(
        cls, draws: Draws, ladder: Ladder, *, correction_factor: float | None = None
    ) -> History:
        """From the draws of `sample`. They do not record F: give it if it was a constant."""
        steps = draws.steps - 1  # draws count the steps done, a history numbers steps from 0
        temperature = temperatures_at(ladder, steps)
        correction = None
        if correction_factor is not None:
            if not correction_factor > 0:
                raise InvalidArgumentError(f"F must be positive, got {correction_factor}")
            sigma2 = draws.noise_variance.double()
            correction = _gaps(temperature)[:, :, None] * sigma2 / correction_factor
            correction[draws.energy.isnan().any(1).any(1)] = math.nan  # before the first test
        names = ("energy", "replica_at", "noise_variance", "accepted", "proposed", "n_steps")
        same = {name: getattr(draws, name) for name in names}
        return cls(steps=steps, temperature=temperature, correction=correction, **same)

    @classmethod
    def from_traces(
        cls, traces: Sequence[Mapping[str, Tensor]], ladder: Ladder, *, n_steps: int | None = None
    ) -> History:
        """From `Trace.tensors()` of one run, or of several with the same recorded steps, as chains.

        `n_steps` defaults to the last step recorded or swapped at; give it for a thinned trace.
        """
        if not traces or any("steps" not in trace for trace in traces):
            raise InvalidArgumentError("nothing to read: give Trace.tensors() after some steps")
        steps = traces[0]["steps"]
        for chain, trace in enumerate(traces):
            if not torch.equal(trace["steps"], steps):
                raise InvalidArgumentError(
                    f"trace {chain} has recorded {len(trace['steps'])} steps, not the {len(steps)} "
                    "of trace 0; read runs of different length or thinning one by one"
                )
        chains = [torch.full_like(trace["swap_steps"], k) for k, trace in enumerate(traces)]
        swaps = Swaps(
            step=torch.cat([trace["swap_steps"] for trace in traces]),
            pair=torch.cat([trace["swap_pairs"] for trace in traces]),
            chain=torch.cat(chains),
        )
        names = ("energy", "replica_at", "noise_variance", "correction", "accepted", "proposed")
        return cls(
            steps=steps,
            temperature=temperatures_at(ladder, steps),
            n_steps=int(torch.cat([steps, swaps.step]).max()) + 1 if n_steps is None else n_steps,
            swaps=swaps,
            **{name: torch.stack([trace[name] for trace in traces], dim=-1) for name in names},
        )

    @property
    def n_rungs(self) -> int:
        return self.energy.shape[1]

    @property
    def n_pairs(self) -> int:
        return self.n_rungs - 1

    @property
    def n_chains(self) -> int:
        return self.energy.shape[2]

    @property
    def has_every_step(self) -> bool:
        """Is the path of every replica known from the first recorded step on?"""
        if len(self.steps) == 0:
            return False
        return self.swaps is not None or len(self.steps) == self.n_steps - int(self.steps[0])

    @property
    def inverse_gap(self) -> Tensor:
        """(k, pairs): 1 / tau_cold - 1 / tau_hot."""
        return _gaps(self.temperature)

    @property
    def energy_difference(self) -> Tensor:
        """(k, pairs, chains): cold minus hot, in double because it is a small difference."""
        return -self.energy.double().diff(dim=1)

    @property
    def correction_factor(self) -> Tensor | None:
        """(k, pairs, chains): F = gap * sigma2 / correction; NaN where sigma2 = 0."""
        if self.correction is None:
            return None
        full = self.inverse_gap[:, :, None] * self.noise_variance.double()
        return full / self.correction.double()

    def after(self, step: int) -> History:
        """The rows of steps >= `step` (no burn-in); swaps and totals stay those of all steps."""
        return self._rows(self.steps >= step)

    def with_tests(self) -> History:
        """The rows of steps at which swaps were tested: between the tests of swap batches a row has
        the energies of a minibatch, and no correction.
        """
        if self.correction is None:
            return self
        return self._rows(~self.correction.isnan().flatten(1).all(1))

    def _rows(self, kept: Tensor) -> History:
        names = ("steps", "energy", "replica_at", "noise_variance", "temperature", "correction")
        rows = {name: getattr(self, name) for name in names}
        return replace(self, **{name: x[kept] for name, x in rows.items() if x is not None})

    def __repr__(self) -> str:
        recorded = f"{len(self.steps):,} of {self.n_steps:,} steps recorded"
        return f"History({self.n_rungs} rungs x {self.n_chains} chains, {recorded})"


def temperatures_at(ladder: Ladder, steps: Tensor) -> Tensor:
    """Temperatures of every rung at the given steps, annealing included: (k, rungs)."""
    base = torch.tensor(ladder.temperatures, dtype=torch.float64)
    anneal = ladder.anneal or (lambda step: 1.0)
    return torch.tensor([anneal(step) for step in steps.tolist()], dtype=base.dtype)[:, None] * base


def _gaps(temperature: Tensor) -> Tensor:
    return -(1.0 / temperature).diff(dim=1)


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
        paths = [count_trips(replay(history, chain)) for chain in range(history.n_chains)]
        restarts, trips = (torch.cat(counts, dim=1) for counts in zip(*paths, strict=True))
    total, n_steps = trips.sum(0).double(), history.n_steps - first
    # Even and odd pairs take turns, so two neighbouring pairs see every attempt between them.
    attempts = history.proposed[:2].sum(0).double() * (n_steps / history.n_steps)
    rates = over_chains(total / n_steps), over_chains(total / attempts)
    return Travel(trips, restarts, *rates, history.has_every_step)


def replay(history: History, chain: int) -> Tensor:
    """The path of every replica of one chain, (1 + swaps, replicas, 1), from the first row on.

    Needs the list of all swaps.
    """
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
