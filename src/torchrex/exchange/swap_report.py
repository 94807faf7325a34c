"""How the exchange of a run did: swaps, noise and F of every pair, the barrier, round trips, cost.

A run counts as it goes (`SwapCounts`); `run.exchange()`, `draws.exchange()` and the commands report
from here, and the log names pairs that are dead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchrex import notebook
from torchrex.exchange.algorithm import StepInfo
from torchrex.exchange.criterion import expected_acceptance

logger = logging.getLogger("torchrex")

# A pair that swaps at 2 % of its tests makes no swap in 150 of them one time in twenty; a few tests
# are enough where the noise leaves next to nothing. Replicas that start alike swap for certain at
# first: one swap of every run proves nothing, but takes as many tests again.
ENOUGH_TESTS, SOME_TESTS, HARDLY_ANY = 150, 20, 1e-3
LOUD = 2.0  # s above which the noise is the first thing to change
MOST_LOOKED_AT = 2**20  # noise variances whose acceptance is computed
RUNS_FOLLOWED = 8  # of a run on a density, whose round trips are counted as it goes
PAIRS = ("rungs", "accepted", "proposed", "rate", "barrier", "noise allows", "s", "F", "sigma2")


class PairReport(NamedTuple):
    """One pair of neighbouring rungs, all runs together."""

    pair: int  # of the rungs `pair` and `pair + 1`
    accepted: int
    proposed: int
    noise_std: float  # s = sqrt(2) * gap * sigma, of the noise in log S: rms over steps and runs
    factor: float  # F
    expected: float  # acceptance between equal energies at F and s: mean over steps and runs
    n_runs: int = 1
    noise_variance: float = math.nan  # sigma2: mean over steps and runs

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else math.nan

    @property
    def barrier(self) -> float:
        """The rejection rate (Syed et al. 2021)."""
        return 1.0 - self.rate

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
    sigma2 = noise_variance.mean((0, 2), dtype=torch.float64).cpu()
    some = noise_variance[:: -(-noise_variance.numel() // MOST_LOOKED_AT) or 1].double().cpu()
    expected = expected_acceptance(0.0, (per_s2[:, None] * some).sqrt(), factor[:, None])
    rms = (per_s2 * sigma2).sqrt()
    columns = (accepted.long(), proposed.long(), rms, factor, expected.mean((0, 2)), sigma2)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [PairReport(k, a, p, s, f, e, n_runs, v) for k, (a, p, s, f, e, v) in enumerate(rows)]


def percent(share: float) -> str:
    """As 100 %, 58.3 %, < 0.001 % or 0 %."""
    return f"{100 * share:.3g} %" if share >= 1e-5 or share == 0 else "< 0.001 %"


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


DISAGREE = 3.0  # standard errors


class LogEvidence(NamedTuple):
    """Log of the integral of likelihood times prior, with standard errors; see `log_evidence`."""

    integration: float  # thermodynamic integration
    integration_error: float
    stepping_stones: float = math.nan  # NaN where the energies are noisy
    stepping_stones_error: float = math.nan
    note: str = ""  # why there are no stepping stones

    def __str__(self) -> str:
        by = [f"{_with_error(self.integration, self.integration_error)} by integration"]
        if math.isfinite(self.stepping_stones):
            stones = _with_error(self.stepping_stones, self.stepping_stones_error)
            by.insert(0, f"{stones} by stepping stones")
        notes = [self.note] if self.note else []
        error = math.hypot(self.integration_error, self.stepping_stones_error)
        if abs(self.integration - self.stepping_stones) > DISAGREE * error:
            notes.append("the two disagree: lower the learning rate, or take more rungs")
        notes.append("errors leave out the bias of the learning rate")
        return f"log evidence: {', '.join(by)} ({'; '.join(notes)})"


def _with_error(value: float, error: float) -> str:
    """With as many digits as the error has."""
    places = max(0, 1 - math.floor(math.log10(error))) if 0 < error < math.inf else 3
    return f"{value:.{places}f} ± {error:.2g}"


@dataclass(frozen=True, repr=False)
class ExchangeReport:
    """What the exchange of a run did; `print` shows a table of the pairs and one line about all.

    The barrier of a pair is its rejection rate, that of the ladder the sum over its pairs (Syed et
    al. 2021): the number of rungs that the ladder needs is about twice the barrier. A round trip
    is a replica's way from rung 0 to the top and back, a restart its way from the top to rung 0.
    """

    pairs: tuple[PairReport, ...]
    n_steps: int  # that were counted
    round_trips: float  # of one chain, its replicas together: mean over chains
    restarts: float
    exact: bool = True  # False: the two are lower bounds, because not every step was looked at
    swap_cost: float = math.nan  # examples for swaps over examples for moves; NaN without data
    steps_before: int = 0  # steps of the run that were not counted
    log_evidence: LogEvidence | None = None  # of draws whose ladder reaches the prior

    @property
    def barrier(self) -> float:
        """The sum of the rejection rates; NaN if a pair was never tested."""
        return sum(pair.barrier for pair in self.pairs)

    @property
    def numbers(self) -> dict[str, Any]:
        """As in result.json; nothing where no swap was tested."""
        if not any(pair.proposed for pair in self.pairs):
            return {}
        rates = [pair.rate for pair in self.pairs]
        return {
            "barrier": self.barrier,
            "least_acceptance_rate": math.nan if any(map(math.isnan, rates)) else min(rates),
            "mean_acceptance_rate": sum(rates) / len(rates),
            "round_trips": self.round_trips,
            "restarts": self.restarts,
            "exact": self.exact,
            "swap_cost": self.swap_cost,
        }

    def rows(self, dash: str = "-") -> list[tuple[str, ...]]:
        """A row for each pair, in words."""
        rows: list[tuple[str, ...]] = []
        for pair in self.pairs:
            rate, barrier = "", ""
            if pair.proposed:
                rate, barrier = percent(pair.rate), f"{pair.barrier:.3g}"
            expected = percent(pair.expected) if math.isfinite(pair.expected) else ""
            s, factor = (
                f"{value:.3g}" if math.isfinite(pair.noise_std) else ""
                for value in (pair.noise_std, pair.factor)
            )
            counts = (f"{pair.accepted:,}", f"{pair.proposed:,}", rate, barrier)
            rungs = f"{pair.pair} {dash} {pair.pair + 1}"
            rows.append((rungs, *counts, expected, s, factor, f"{pair.noise_variance:.4g}"))
        return rows

    @property
    def lines(self) -> list[str]:
        """What belongs to the whole ladder."""
        if not self.numbers:
            return ["no swap was tested"]
        some = self.steps_before > 0
        counted = f" (of the last {self.n_steps:,} steps)" if some else ""
        dead = in_words(self.pairs)
        lines = [f"{exchange_line(self.numbers)}{counted}"]
        lines += [str(self.log_evidence)] if self.log_evidence is not None else []
        return [*lines, f"warning: {dead}"] if dead else lines

    @property
    def table(self) -> str:
        """The rows as text."""
        rows = [PAIRS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)).rstrip() for row in rows)

    def __str__(self) -> str:
        return "\n".join([*([self.table] if self.pairs else ()), *self.lines])

    def __repr__(self) -> str:
        return f"ExchangeReport({len(self.pairs) + 1} rungs: {self.lines[0]})"

    def _repr_html_(self) -> str:
        table = notebook.table(PAIRS, self.rows("–"))
        line, *more = self.lines
        return notebook.panel("Exchange", line, table, *map(notebook.paragraph, more))


def exchange_line(numbers: Mapping[str, Any]) -> str:
    """The numbers of a report, which may come from a file, as one line."""

    def short(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"

    def known(name: str, form: Callable[[float], str] = short) -> str:
        value = numbers.get(name)
        return form(value) if isinstance(value, int | float) and math.isfinite(value) else "?"

    def share(cost: float) -> str:
        return percent(cost) if cost < 2 else f"{cost:.3g} times that"

    mean, least = (known(f"{name}_acceptance_rate", percent) for name in ("mean", "least"))
    trips, restarts = (known(name, _count) for name in ("round_trips", "restarts"))
    cost = known("swap_cost", share)
    bound = "at least " if numbers.get("exact") is False else ""
    return (
        f"barrier {known('barrier')}, {mean} accepted"
        f"{'' if least == mean else f' ({least} in the worst pair)'}, "
        f"{bound}{trips} round trips and {restarts} restarts of a chain"
        f"{'' if cost == '?' else f', swap cost {cost} of the moves'}"
    )


def _count(mean: float) -> str:
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


class SwapCounts(NamedTuple):
    """What a run has counted of its swaps: information, which no step reads. All of it stays on the
    device, and is the same wherever a run was stopped and resumed.
    """

    first_step: int  # that was counted
    accepted: Tensor  # (pairs, runs)
    proposed: Tensor  # (pairs, runs)
    noise: Tensor  # (2, pairs, runs): the sum of sigma2, and of how many tests
    end: Tensor  # (replicas, runs followed): the end that it saw last, 0 or the top; -1 before
    first_end: Tensor  # the end that it saw first
    restarts: Tensor
    examples: Tensor  # (2,): of a network, on the host: evaluated for moves and for swaps

    @classmethod
    def start(cls, replica_at: Tensor, step: int = 0) -> Self:
        rungs, runs = replica_at.shape
        pairs = replica_at.new_zeros(max(0, rungs - 1), runs, dtype=torch.int64)
        unseen = replica_at.new_full((rungs, min(runs, RUNS_FOLLOWED)), -1, dtype=torch.int32)
        noise = pairs.new_zeros((2, *pairs.shape), dtype=torch.float64)
        examples = torch.zeros(2, dtype=torch.int64)
        none = torch.zeros_like(unseen, dtype=torch.int64)
        return cls(step, pairs, pairs, noise, unseen, unseen, none, examples)

    def after(
        self, infos: StepInfo, *, step: int = 0, every: int = 1, latest: bool = False
    ) -> Self:
        """With the steps from `step` on, stacked along a first axis. Noise and trips are seen at
        every `every`-th one; the noise of the `latest` alone counts if the temperatures change.
        """
        if not len(self.accepted):
            return self
        counts = self._replace(
            accepted=self.accepted + infos.accepted.sum(0, dtype=torch.int32),
            proposed=self.proposed + infos.proposed.sum(0, dtype=torch.int32),
        )
        some = StepInfo(*(values[-step % every :: every] for values in infos))
        if not len(some.energy):
            return counts
        known = ~some.correction.isnan()  # of a step without a test nothing is known
        sigma2 = torch.where(known, some.noise_variance.double(), 0.0)
        rows = torch.cat([self.noise[None], torch.stack([sigma2, known.double()], 1)])
        if latest:
            last = (rows[:, 1:] > 0).cumsum(0).argmax(0, keepdim=True)  # the first of the largest
            noise = rows.gather(0, last.expand(1, 2, -1, -1))[0]
        else:  # one after the other: where a run is cut must not change a digit
            noise = rows.cumsum(0)[-1]
        path = ends_of(some.replica_at[..., : self.end.shape[1]])
        end, restarts, first = follow_ends(torch.cat([self.end[None], path]))
        return counts._replace(
            noise=noise,
            end=end,
            first_end=torch.where(self.first_end >= 0, self.first_end, first),
            restarts=self.restarts + restarts,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            name: x.clone() if isinstance(x, Tensor) else x for name, x in self._asdict().items()
        }

    def loaded(self, state: Mapping[str, Any] | None, replica_at: Tensor, step: int) -> Self:
        """From a state; from `step` on if there is none, as in states of older versions."""
        if state is None:
            return self.start(replica_at, step)
        mine = {
            name: x.to(getattr(self, name), copy=True)
            for name, x in state.items()
            if name != "first_step"
        }
        return type(self)(first_step=int(state["first_step"]), **mine)


def rung_of(replica_at: Tensor) -> Tensor:
    """The rung of each replica, (k, replicas, chains), from the replica at each rung."""
    return replica_at.long().argsort(dim=1)


def ends_of(replica_at: Tensor) -> Tensor:
    """0 where a replica is on rung 0, the top where it is there, else -1: (k, replicas, chains)."""
    top = replica_at.shape[1] - 1
    replica = torch.arange(top + 1, device=replica_at.device, dtype=replica_at.dtype)[:, None]
    at_top = torch.where(replica_at[:, -1:] == replica, top, -1)
    return torch.where(replica_at[:, :1] == replica, 0, at_top).int()


def follow_ends(path: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last end that each replica saw (-1: none), its restarts, and the first end, each
    (replicas, chains), of paths (k, replicas, chains) of which only the two ends matter.
    """
    top = path.shape[1] - 1
    at_end = (path == 0) | (path == top)
    when = torch.arange(len(path), device=path.device, dtype=torch.int32).view(-1, 1, 1)
    # The last visit to an end so far, -1 before the first.
    latest = torch.where(at_end, when, -1).cummax(0).values
    end = torch.where(latest >= 0, path.gather(0, latest.clamp(min=0).long()), -1)
    restarts = ((end[1:] == 0) & (end[:-1] == top)).sum(0)
    first = end.gather(0, at_end.long().argmax(0, keepdim=True))[0]
    return end[-1], restarts, first


def trips_from(restarts: Tensor, first_end: Tensor, top: int) -> Tensor:
    """Round trips: all restarts, but not the first of a replica that began at the top."""
    return restarts - ((first_end == top) & (restarts > 0)).long()


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
    _, restarts, first = follow_ends(path)
    return restarts, trips_from(restarts, first, top)
