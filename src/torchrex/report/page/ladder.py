"""The ladder of a family: all its runs as the chains of one history, and what came of every pair.

Acceptance, noise, barrier and round trips are those of all chains together; an error is between
chains, or between seeds where each knows only itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from torchrex.diagnostics import (
    History,
    Swaps,
    Travel,
    acceptance_from_energies,
    allowed_acceptance,
    observed_acceptance,
    over_chains,
    round_trips,
)
from torchrex.errors import InvalidArgumentError
from torchrex.report.figures import Pair
from torchrex.report.findings import value_and_error
from torchrex.report.reader import LoadedRun
from torchrex.report.swap_checks import (
    history_from_curves,
    last_quarter,
    settled_noise,
    while_swapping,
    with_noise,
)


@dataclass(frozen=True)
class Pooled:
    """The histories of runs with the same settings as one, whose chains are those of all."""

    history: History
    runs: dict[str, int]  # the first chain of every run, by its name
    run: LoadedRun  # one of them, for the settings
    left_out: int  # runs that recorded nothing of it, or other steps
    averaged: bool  # energies are means over the steps between two points

    @cached_property
    def pairs(self) -> list[Pair]:
        """Swaps of every pair with what the energies promise, and the noise that decides it."""
        history = self.history
        if history.n_pairs == 0:
            return []
        swapping = while_swapping(self.run, history)
        if self.averaged and self.run.settings is not None:
            swapping = with_noise(swapping, self.run.settings.swap_noise)
        observed, error = observed_acceptance(history)
        unknown = torch.full_like(observed, math.nan)
        try:
            expected, its_error = acceptance_from_energies(swapping)
        except InvalidArgumentError:  # F is not known
            expected = its_error = unknown
        level, noise = settled_noise(last_quarter(swapping))
        # One chain of a running mean has no known error.
        known = not self.averaged and (self.run.draws is None or history.n_chains > 1)
        columns = (
            *(observed, error, expected, unknown if self.averaged else its_error),
            *(level.value, level.error if known else unknown, noise, allowed_acceptance(noise)),
        )
        counts = torch.stack([history.accepted.sum(1), history.proposed.sum(1)], 1).tolist()
        return [
            Pair(f"{k}–{k + 1}", (x[0], x[1]), (x[2], x[3]), (x[4], x[5]), x[6], x[7], *counts[k])
            for k, x in enumerate(torch.stack([column.double() for column in columns], 1).tolist())
        ]

    @property
    def barrier(self) -> tuple[float, float]:
        """The sum of the rejection rates and its error; NaN where a pair was not tested."""
        rejected = (1 - self.history.accepted / self.history.proposed).sum(0)
        error = float(over_chains(rejected).error)
        return sum(1 - pair.observed[0] for pair in self.pairs), error

    @cached_property
    def travel(self) -> Travel | None:
        """None where the rung of each replica is not known."""
        if self.history.n_pairs == 0 or (self.averaged and self.history.swaps is None):
            return None
        return round_trips(self.history)

    @property
    def trips(self) -> tuple[str, float | None]:
        """Round trips of a chain, all its replicas together: `36.5(3)`, and to sort by."""
        if self.travel is None or not int(self.history.proposed.sum()):
            return "", None
        mean, error = map(float, over_chains(self.travel.round_trips.sum(0)))
        text = value_and_error(mean, error)
        return text if self.travel.exact else f"≥ {text}", mean

    @property
    def words(self) -> str:
        """One line about the ladder."""
        known = self.pairs and not math.isnan(self.barrier[0])
        n = 0 if self.run.settings is None else self.run.settings.warm_start
        parts = [f"the first {n:,} steps descend by Adam, without swaps"] * bool(n)
        parts += [f"barrier {value_and_error(*self.barrier)}"] if known else []
        if self.trips[0]:
            parts.append(f"{self.trips[0]} round trips a chain, all its replicas together")
        n, runs = self.history.n_chains, len(self.runs)
        parts.append(f"{n:,} chain{'s' * (n > 1)} of {runs} run{'s' * (runs > 1)}")
        if self.left_out:
            parts.append(f"{self.left_out} more recorded nothing of it or other steps: left out")
        return "; ".join(parts)


def pooled(runs: Sequence[LoadedRun]) -> Pooled | None:
    """None where no run recorded its ladder; only runs that recorded the steps of the first."""
    averaged = all(run.history is None for run in runs)
    every = [(run, history_from_curves(run) if averaged else run.history) for run in runs]
    found = [(run, history) for run, history in every if history and len(history.steps)]
    alike = [(run, history) for run, history in found if _alike(found[0][1], history)]
    if not alike:
        return None
    names, start = {}, 0
    for run, history in alike:
        names[f"seed {run.seed}" if run.seed >= 0 else run.path.name] = start
        start += history.n_chains
    together = _together([history for _, history in alike])
    return Pooled(together, names, alike[0][0], len(runs) - len(alike), averaged)


def _alike(one: History, other: History) -> bool:
    same = torch.equal(one.steps, other.steps) and one.n_rungs == other.n_rungs
    known = (one.correction is None) == (other.correction is None)
    return same and known and one.n_steps == other.n_steps


def _together(histories: Sequence[History]) -> History:
    if len(histories) == 1:
        return histories[0]
    names = ("energy", "replica_at", "noise_variance", "correction", "accepted", "proposed")
    columns: dict[str, Any] = {name: [getattr(x, name) for x in histories] for name in names}
    some = {name: x for name, x in columns.items() if x[0] is not None}
    joined: dict[str, Any] = {name: torch.cat(x, -1) for name, x in some.items()}
    starts = itertools.accumulate((history.n_chains for history in histories), initial=0)
    moved = [
        history.swaps._replace(chain=history.swaps.chain + start)
        for history, start in zip(histories, starts, strict=False)
        if history.swaps is not None
    ]
    every = len(moved) == len(histories)
    swaps = Swaps(*map(torch.cat, zip(*moved, strict=True))) if every else None
    return replace(histories[0], **joined, swaps=swaps)
