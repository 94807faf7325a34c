"""Checks of the ladder: are there swaps, what do they cost, and do replicas travel?

The evidence is the history of a run, or the curves in its result.json (nearly as good), or only
the counts of swaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrex.diagnostics import (
    Estimate,
    History,
    Swaps,
    Travel,
    acceptance_from_energies,
    allowed_acceptance,
    correction_against_spread,
    effective_noise,
    factor_for_acceptance,
    factor_for_noise,
    noise_level,
    observed_acceptance,
    round_trips,
    rungs_for_noise,
)
from torchrex.diagnostics.history import temperatures_at
from torchrex.experiments.config import ExperimentConfig
from torchrex.report.findings import Finding, Severity, about, number, percent, several, times
from torchrex.report.reader import LoadedRun

WANTED = (0.02, 0.10)  # acceptance that the advice about F aims at
UNSEEN = 3.0  # no swap in n tests: the rate is below 3 / n with 95 % confidence
# Rungs that swap at 2 % of their tests make no swap in 150 tests one time in twenty.
FEWEST_TESTS = round(UNSEEN / WANTED[0])  # of a pair, all chains together
HARDLY_ANY = 1e-3  # accepted of the proposed
FEW_SWAPS = 10  # of a chain: fewer leave the mixing between modes to chance
FEW_TRIPS = 10  # round trips of a chain
LOUD = 4.0  # noise s: an unbiased test accepts less than 4.6 % of swaps between equal energies
NEARLY_ALL = 0.9
BEYOND_UNBIASED = 2.0  # times the swaps of F = 1
SAME = 0.01  # an F from curves is rounded, and a mean where an epoch has a swap
MISSING = ("no swaps", "hardly any swaps", "few swaps")  # titles, the worst first
TOO_FEW_TESTS = "too few swap tests to say"  # a title
MOST_RUNGS = 100  # a longer ladder is no advice
NOTABLY = 1.1  # times the F that a run has: less is no advice
HALVINGS = 20  # of log F: right to one part in 10,000
ENOUGH_ROWS = 40_000  # recorded energies, all chains together, for rates of a per cent and more
FAR_OUTSIDE = 3.0  # correction in spreads of the energy difference
UNSETTLED = 0.2  # relative change of sigma2 between the third and the last quarter
OF_CURVES = ("energy", "noise_variance", "correction")  # of result.json, by rung or pair
COUNTS = ("accepted", "proposed")
ROWS = ("steps", "replica_at", "temperature", *OF_CURVES)

Advice = tuple[str, dict[str, Any]]  # one sentence, and its numbers


@dataclass(frozen=True)
class Evidence:
    """The history of the ladder of a run that swaps."""

    history: History
    energies: History  # from the first swap test on, as noisy as the tests saw them
    late: History  # the last quarter of `energies`
    settings: ExperimentConfig
    factor: float  # F at the start
    annealed: bool
    has_paths: bool = True  # the rung of each replica is known, not only the energies

    @property
    def follows_gap(self) -> bool:
        return self.settings.factor_follows_gap

    @property
    def scaled(self) -> History:
        """What the advice about F rests on.

        Where F follows the gap it is the last quarter, with sigma2 such that a constant F here is
        one that is counted as at the start: swaps may lower F, so parts of a run differ.
        """
        if not self.follows_gap:
            return downsampled(self.energies)
        late = downsampled(self.late)
        return replace(late, noise_variance=late.noise_variance * self._since_the_start(late))

    @property
    def factor_now(self) -> float:
        """The median F of the last quarter, counted as at the start."""
        factors = self.late.correction_factor
        if not self.follows_gap or factors is None:
            return self.factor
        return float((factors * self._since_the_start(self.late)).nanmedian())

    def factor_at_the_end(self, pair: int) -> float:
        """F after the last swap, counted as at the start."""
        n = int(self.history.accepted[pair].sum())
        return self.factor * self.settings.factor_per_swap**n

    @property
    def swapped_late(self) -> tuple[int, int] | None:
        """Swaps and tests of the last quarter, of all pairs, with tests spread evenly over the
        steps; None where not all swaps are listed.
        """
        if self.history.swaps is None:
            return None
        first, start = int(self.late.steps[0]), int(self.energies.steps[0])
        made = int((self.history.swaps.step >= first).sum())
        n = self.history.n_steps
        return made, round(int(self.history.proposed.sum()) * (n - first) / max(1, n - start))

    def _since_the_start(self, part: History) -> Tensor:
        return (self.history.inverse_gap[0] / part.inverse_gap)[:, :, None]

    @cached_property
    def travel(self) -> Travel:
        return round_trips(self.history)

    @property
    def trips(self) -> tuple[float, float]:
        """Round trips and restarts of a chain, all its replicas together; NaN if not known."""
        if not self.has_paths:
            return (math.nan, math.nan) if int(self.history.accepted.sum()) else (0.0, 0.0)
        both = (self.travel.round_trips, self.travel.restarts)
        trips, restarts = (float(n.sum(0).double().mean()) for n in both)
        return trips, restarts

    def temperatures(self, pair: int, row: int) -> str:
        """Of a pair at the first row of the run (0) or the last (-1)."""
        history = self.history if row == 0 else self.late
        cold, hot = history.temperature[row, pair : pair + 2].tolist()
        return f"{number(cold)} and {number(hot)}"


def gather(run: LoadedRun) -> Evidence | None:
    """None where nothing is exchanged, or no more is known of it than `count` says."""
    factor, history = run.correction_factor, run.history
    if factor is None or run.settings is None or run.ladder is None:
        return None
    averaged = history is None
    history = history_from_curves(run) if history is None else history
    if history is None or history.n_pairs == 0 or int(history.proposed.sum()) == 0:
        return None
    energies = while_swapping(run, history)
    if averaged:
        energies = _with_noise(energies, run.settings.swap_noise)
    annealed, has_paths = run.ladder.anneal is not None, not averaged or history.swaps is not None
    late = last_quarter(energies)
    return Evidence(history, energies, late, run.settings, factor, annealed, has_paths)


def while_swapping(run: LoadedRun, history: History) -> History:
    """Its rows from the first swap test on."""
    rows = history.after(0 if run.settings is None else run.settings.swap_start)
    return rows if len(rows.steps) else history


def last_quarter(history: History) -> History:
    first, last = int(history.steps[0]), int(history.steps[-1])
    return history.after(first + 3 * (last - first) // 4)


def settled_noise(late: History) -> tuple[Estimate, Tensor]:
    """sigma2 of every pair in a last quarter, and s, the sd of the noise in log S."""
    variance = noise_level(late)
    return variance, effective_noise(late.inverse_gap.mean(0), variance.value)


def _rows(history: History, keep: Tensor | slice) -> History:
    kept: dict[str, Any] = {name: getattr(history, name) for name in ROWS}
    kept = {name: None if x is None else x[keep] for name, x in kept.items()}
    return replace(history, **kept)


def downsampled(history: History) -> History:
    """Every n-th row, so that ENOUGH_ROWS are left: means over rows stay right."""
    return _rows(
        history, slice(None, None, -(-len(history.steps) * history.n_chains // ENOUGH_ROWS))
    )


def history_from_curves(run: LoadedRun) -> History | None:
    """A history from the curves in result.json, which committed results have in place of a trace.

    Energies are means over an epoch, or over the steps between two points. The first swaps are
    listed: where there were more, the rung of each replica is not known.
    """
    curves, pairs = run.curves, (run.result or {}).get("swaps") or []
    if run.ladder is None or run.settings is None or len(pairs) > 1:
        return None
    unit, scale = ("epoch", run.settings.steps_per_epoch) if "epoch" in curves else ("step", 1)
    names = (unit, f"swap_{unit}s", *OF_CURVES)
    try:
        when, swapped, energy, noise_variance, correction = (
            torch.tensor(curves[name], dtype=torch.float64) for name in names
        )
        n, n_pairs = len(when), len(pairs)
        energy = energy.reshape(n_pairs + 1, n).T[:, :, None]
        noise_variance, correction = (
            x.reshape(n_pairs, n).T[:, :, None] for x in (noise_variance, correction)
        )
    except (KeyError, TypeError, ValueError, RuntimeError):  # older, or of another shape
        return None
    if n == 0:
        return None
    steps, swapped = ((each * scale).round().long() for each in (when, swapped))
    turns = (swapped[None, :] <= steps[:, None]).sum(1) % 2
    turns[0] = 0  # swaps are counted from here
    counts = {k: torch.tensor([[p[k]] for p in pairs]).reshape(n_pairs, 1) for k in COUNTS}
    zeros = torch.zeros_like(swapped)
    return History(
        steps=steps,
        energy=energy,
        replica_at=torch.stack([turns, 1 - turns], dim=1)[:, : n_pairs + 1, None],
        noise_variance=noise_variance,
        temperature=temperatures_at(run.ladder, steps),
        correction=correction,
        n_steps=int((run.result or {}).get("steps_done") or int(steps[-1]) + 1),
        swaps=Swaps(swapped, zeros, zeros) if len(swapped) == counts["accepted"].sum() else None,
        **counts,
    )


def _with_noise(history: History, part: float, n: int = 64) -> History:
    """Means over an epoch lack the noise of single steps: it is drawn `n` times for each, Gaussian
    of `part` of sigma2.
    """
    names = ("energy", "replica_at", "noise_variance", "correction")
    wide = {name: getattr(history, name).expand(-1, -1, n) for name in names}
    variance = wide["noise_variance"]
    variance = torch.cat([variance, variance[:, -1:]], dim=1)  # of the pair a rung belongs to
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(*wide["energy"].shape, generator=generator, dtype=torch.float64)
    wide["energy"] = wide["energy"] + z * (part * variance).sqrt()
    counts = {name: getattr(history, name).expand(-1, n) for name in COUNTS}
    return replace(history, swaps=None, **wide, **counts)


class Counted(NamedTuple):
    """How often one pair was tested and swapped, all chains together, and which file says so."""

    pair: int
    accepted: int
    proposed: int
    source: str

    def words(self, n_pairs: int) -> str:
        """The rungs swapped once in 2,000 tests (0.05 %)."""
        which = f"Rungs {self.pair} and {self.pair + 1}" if n_pairs > 1 else "The rungs"
        rate = f" ({percent(self.accepted / self.proposed)})" if self.accepted else ""
        return f"{which} {_swapped(self.accepted)} in {several(self.proposed, 'test')}{rate}"


def count(run: LoadedRun) -> list[Counted]:
    """The counts of every pair; none where no file has them."""
    if pairs := (run.result or {}).get("swaps"):
        counts, source = [(each["accepted"], each["proposed"]) for each in pairs], "result.json"
    else:
        rows = (run.trace.get(name, torch.zeros(0)).long() for name in COUNTS)
        counts, source = list(zip(*(each.tolist() for each in rows), strict=False)), "the trace"
    return [Counted(k, *each, source) for k, each in enumerate(counts)]


# The checks


def check_ladder(run: LoadedRun) -> Iterable[Finding]:
    """Everything about the swaps of a run, from the best evidence there is."""
    evidence, counts = gather(run), count(run)
    if evidence is not None:
        swaps = swap_findings(evidence)
        yield from swaps
        yield from settled_findings(evidence)
        # Where swaps are missing, what follows from that need not be said.
        if not any(finding.title in (*MISSING, TOO_FEW_TESTS) for finding in swaps):
            yield from correction_findings(evidence)
            yield from travel_findings(evidence) if evidence.has_paths else ()
    elif run.ladder is None:
        return
    elif len(run.ladder.temperatures) < 2:
        if run.ladder.temperatures[0] > 0:  # else it descends, and samples nothing
            words = (
                "A run at one temperature knows only the modes that it has visited. Runs that start"
                " far apart, or a ladder with a hotter rung, would show others."
            )
            yield Finding("note", "one rung", words)
    elif run.correction_factor is None:
        words = "Swaps are off in this run: its rungs exchange no temperatures."
        yield Finding("note", "no swaps by design", words)
    elif counts:
        yield from count_findings(run, counts)
    else:
        yield Finding("note", "swaps not known", "No file of this run counts them.")


def swap_findings(evidence: Evidence) -> list[Finding]:
    """No swaps, too many of them, or swaps bought with bias: all are about the noise and F."""
    history, late, factor = evidence.history, evidence.late, evidence.factor
    observed = observed_acceptance(history).value.nan_to_num(nan=0.0)
    rate, pair = float(observed.min()), int(observed.argmin())
    at_one = float(acceptance_from_energies(evidence.energies, correction_factor=1.0).value[pair])
    variance, noise = settled_noise(late)
    s, allowed = float(noise[pair]), float(allowed_acceptance(noise[pair]))
    accepted, proposed = int(history.accepted[pair].sum()), int(history.proposed[pair].sum())
    numbers: dict[str, Any] = {
        "pair": [pair, pair + 1],
        "accepted": accepted,
        "proposed": proposed,
        "acceptance_rate": rate,
        "acceptance_at_F_1": at_one,
        "noise_variance": float(variance.value[pair]),
        "noise_s": s,
        "allowed_acceptance": allowed,
        "correction_factor": factor,
    }
    made = Counted(pair, accepted, proposed, "").words(history.n_pairs)
    made += f", {history.n_chains} chains together" if history.n_chains > 1 else ""
    here = f"Noise s = {number(s)} at temperatures {evidence.temperatures(pair, -1)}"
    left = f"{percent(allowed) if allowed > 0 else 'none'} of the swaps between equal energies"
    told = f"{here} leaves {left} at F = 1"
    found: list[Finding] = []
    short = accepted / history.n_chains < FEW_SWAPS or rate < HARDLY_ANY
    early = short and int(history.proposed.sum(1).max()) < FEWEST_TESTS
    if early:
        found.append(_too_early(made, f"{told}." if s > LOUD else "", numbers))
    elif short:
        found.append(_few(evidence, pair, made, told, numbers))
    elif float(observed.max()) > NEARLY_ALL:
        most = int(observed.argmax())
        numbers["largest_rate"] = float(observed[most])
        why = "F is too large" if factor > 1 else "they are close together"
        words = (
            f"Rungs {most} and {most + 1} swap at {percent(numbers['largest_rate'])} of the tests:"
            f" {why}. A hotter top rung would explore more at the same cost."
        )
        severity: Severity = "warning" if factor > 1 else "note"
        found.append(Finding(severity, "swaps at nearly every step", words, numbers))
    if math.isinf(factor) or not early:  # a rate of so few tests proves no bias
        found += _price_of_factor(evidence, made if not found else "", rate, at_one, numbers)
    if found:
        return found
    if s > LOUD:
        advice, more = advise(evidence, pair, rate)
        words = f"{made}, but {told[0].lower()}{told[1:]}; s should be below {LOUD:g}. {advice}"
        title = "too much noise for these temperatures"
        return [Finding("warning", title, words, {**numbers, **more})]
    expected = math.nan
    if not evidence.follows_gap:
        rows = downsampled(evidence.energies)
        expected = float(acceptance_from_energies(rows).value[pair])
        made += f"; {percent(expected)} expected from the energies" if expected >= 0 else ""
    sigma2 = number(numbers["noise_variance"])
    words = f"{made}. {here} is below {LOUD:g} (sigma2 = {sigma2}, F = {number(factor)})."
    return [Finding("fine", "swaps", words, {**numbers, "acceptance_expected": expected})]


def _swapped(count: int) -> str:
    return "never swapped" if count == 0 else f"swapped {times(count)}"


def _missing(accepted: int, rate: float) -> str:
    """Six swaps in 200 tests are few because the run is short; of 10,000 hardly any passed."""
    return MISSING[0 if accepted == 0 else 1 if rate <= HARDLY_ANY else 2]


def _too_early(made: str, noise: str, numbers: dict[str, Any]) -> Finding:
    words = (
        f"{made}. It takes {FEWEST_TESTS} tests to know whether swaps are missing: in fewer, rungs"
        f" that swap at {percent(WANTED[0])} may have made none. Run longer. {noise}"
    )
    return Finding("note", TOO_FEW_TESTS, words.rstrip(), {**numbers, "fewest_tests": FEWEST_TESTS})


def _few(evidence: Evidence, pair: int, made: str, noise: str, numbers: dict[str, Any]) -> Finding:
    trips, restarts = evidence.trips
    rate, loud = numbers["acceptance_rate"], numbers["noise_s"] > LOUD
    numbers = {**numbers, "round_trips_per_chain": trips, "restarts_per_chain": restarts}
    compared, end = rate, ""
    if evidence.follows_gap:
        numbers["factor_in_the_last_quarter"] = evidence.factor_now
        numbers["factor_at_the_end"] = evidence.factor_at_the_end(pair)
        end = _at_the_end(evidence, pair)
        if evidence.swapped_late is not None:
            some, tests = evidence.swapped_late
            compared = some / max(1, tests)
            numbers |= {"swaps_in_the_last_quarter": some, "tests_in_the_last_quarter": tests}
            end += f" It {_swapped(some)} in about {about(tests)} tests there."
    advice, more = advise(evidence, pair, compared)
    if numbers["accepted"] > 0 and trips < FEW_SWAPS:
        of = " of a chain" if evidence.history.n_chains > 1 else ""
        made += f". Rung 0{of} got something new {times(restarts)}: too few to mix between modes"
    if not loud and rate >= HARDLY_ANY:  # the run is short, and noise is not in the way
        advice = "Run longer." if rate >= WANTED[0] else f"Run longer. {advice}"
    if end:
        words = f"{made}. {end} {advice} {noise}."
    else:
        words = f"{made}. {noise}; this run has F = {number(evidence.factor)}. {advice}"
    severity: Severity = "warning" if trips < FEW_SWAPS or loud else "note"
    severity = "problem" if trips < 1 else severity
    return Finding(severity, _missing(numbers["accepted"], rate), words, {**numbers, **more})


def _at_the_end(evidence: Evidence, pair: int) -> str:
    """What annealing and swaps have made of temperatures and F by the last quarter."""
    left, middle, lowered = evidence.factor_at_the_end(pair), evidence.factor_now, ""
    if left < evidence.factor:
        per_swap = number(evidence.settings.factor_per_swap, 2)
        lowered = f", of which the factor {per_swap} a swap has left {number(left)} at the end"
        if not math.isclose(left, middle, rel_tol=SAME):  # the advice compares with this one
            lowered += f", about {about(middle)} in the middle of that quarter"
    return (
        f"In its last quarter the ladder is annealed from temperatures"
        f" {evidence.temperatures(pair, 0)} to {evidence.temperatures(pair, -1)}; F was"
        f" {number(evidence.factor)} at the start{lowered} (it grows as the ladder cools, and is"
        f" counted as at the start here)."
    )


def _price_of_factor(
    evidence: Evidence, made: str, rate: float, at_one: float, numbers: dict[str, Any]
) -> Iterable[Finding]:
    """F above 1 buys swaps with bias; how many would there be without?"""
    factor, s, ladder = evidence.factor, numbers["noise_s"], ""
    if made and s > LOUD:  # else noise is no obstacle, or has been named
        ladder = (
            f", but needs {_needed_ladder(evidence)[0]}: noise s = {number(s)} is above {LOUD:g}"
        )
    # These states were reached with the bias of this F: a run at F = 1 would come to others.
    accepts = f"about {percent(at_one)}" if at_one > 0 else "none"
    against = f"On the states of this run F = 1 would accept {accepts}."
    against = f"{made}. {against}" if made else against
    if math.isinf(factor):
        words = (
            f"F is infinite: the naive test takes noise for real differences, so bias is expected."
            f" {against} Set a finite correction_factor; 1 is unbiased{ladder}."
        )
        yield Finding("problem", "naive swaps: biased", words, numbers)
    elif factor > 1 and rate > BEYOND_UNBIASED * at_one:
        grows = " and grows with the inverse gap" if evidence.follows_gap else ""
        words = (
            f"F = {number(factor)}{grows}, so swaps are bought with bias. {against}"
            f" A smaller F costs swaps; 1 is unbiased{ladder}."
        )
        yield Finding("warning", "F above 1: bias expected", words, numbers)


def count_findings(run: LoadedRun, counts: Sequence[Counted]) -> Iterable[Finding]:
    """Where only the numbers of swaps are known: energies are written when a run ends."""
    worst = min(counts, key=lambda each: each.accepted / max(1, each.proposed))
    factor, rate = run.correction_factor, worst.accepted / max(1, worst.proposed)
    numbers = {**worst._asdict(), "acceptance_rate": rate, "correction_factor": factor}
    made = f"{worst.words(len(counts))}, says {worst.source}"
    chains = 1 if run.settings is None else max(1, run.settings.n_runs)
    short = worst.accepted / chains < FEW_SWAPS or rate < HARDLY_ANY
    if worst.proposed == 0:
        done = (run.result or {}).get("steps_done")
        first = 0 if run.settings is None else run.settings.swap_start
        if isinstance(done, int) and done <= first:
            made = f"Swaps are tested from step {first:,} on; the run has made {done:,} steps"
        yield Finding("note", "no swap was tested", f"{made}.", numbers)
    elif short and max(each.proposed for each in counts) < FEWEST_TESTS:
        yield _too_early(made, "", numbers)
    elif short:
        advice, more = "", dict[str, Any]()
        if run.ladder is not None and factor is not None:
            advice, more = advise_from_counts(worst, run.ladder.temperatures, factor)
        lost = run.status == "finished" and worst.accepted == 0
        words = f"{made}. {advice}".rstrip()
        severity: Severity = "problem" if lost else "warning"
        yield Finding(severity, _missing(worst.accepted, rate), words, {**numbers, **more})
    else:
        yield Finding("fine", "swaps", f"{made}. Their noise needs the energies.", numbers)
    if factor == math.inf:
        words = "F is infinite, the naive test: bias is expected. 1 is unbiased."
        yield Finding("problem", "naive swaps: biased", words, numbers)


def correction_findings(evidence: Evidence) -> Iterable[Finding]:
    """Does the correction decide about the swaps?"""
    size = correction_against_spread(evidence.late)
    worst = int(size.ratio.nan_to_num(0.0).argmax())
    numbers = {
        name: float(getattr(size, name)[worst]) for name in ("correction", "spread", "ratio")
    }
    if numbers["ratio"] > FAR_OUTSIDE:
        words = (
            f"The correction is {number(numbers['correction'])}, and the energy difference"
            f" fluctuates by {number(numbers['spread'])}: only a fluctuation of"
            f" {about(numbers['ratio'])} standard deviations swaps. A larger F, less noise or a"
            f" smaller gap helps."
        )
        yield Finding("warning", "the correction is far outside the energies", words, numbers)


def settled_findings(evidence: Evidence) -> Iterable[Finding]:
    """Does the estimate of sigma2 still move? Under annealing it should."""
    history, last = evidence.energies, evidence.late
    if evidence.annealed or len(history.steps) < 16:
        return
    begin, end = int(history.steps[0]), int(history.steps[-1])
    middle = begin + (end - begin) // 2
    third = _rows(history, (history.steps >= middle) & (history.steps < last.steps[0]))
    if len(third.steps) < 4:
        return
    was, now = noise_level(third), noise_level(last)
    change = (now.value - was.value) / now.value
    error = (was.error.square() + now.error.square()).sqrt() / now.value
    pair = int(change.abs().argmax())
    if bool(((change.abs() > UNSETTLED) & (change.abs() > 3.0 * error)).any()):
        values = (float(was.value[pair]), float(now.value[pair]), float(change[pair]))
        numbers = dict(zip(("third_quarter", "last_quarter", "change"), values, strict=True))
        words = (
            f"It was {number(values[0])} in the third quarter of the run and {number(values[1])} in"
            f" the last: swaps before had another correction. Run longer, or drop the beginning."
        )
        yield Finding("warning", "sigma2 has not settled", words, numbers)


def travel_findings(evidence: Evidence) -> Iterable[Finding]:
    """Do replicas travel from the hottest rung to the coldest and back?"""
    (trips, restarts), history = evidence.trips, evidence.history
    exact = evidence.travel.exact
    numbers = {"round_trips_per_chain": trips, "restarts_per_chain": restarts, "exact": exact}
    least = "" if exact or restarts == 0 else "at least "
    mean = "on average " if history.n_chains > 1 else ""
    made = f"A chain made {mean}{least}{several(trips, 'round trip')} over the ladder"
    made += f", its {history.n_rungs} replicas together"
    if trips >= FEW_TRIPS:
        yield Finding("fine", "round trips", f"{made}.", numbers)
        return
    often = float(observed_acceptance(history).value.nan_to_num(nan=0.0).min()) >= WANTED[0]
    words = (
        f"{made}. Something new came to rung 0 {least}{times(restarts)}: so often it could see"
        f" another mode. Run longer{'' if often else ', or make swaps likelier'}."
    )
    severity: Severity = "problem" if trips < 1 and exact else "warning"
    yield Finding(severity, "too few round trips", words, numbers)


# What would give swaps


def advise(evidence: Evidence, pair: int, rate: float) -> Advice:
    """From the recorded energies and sigma2; `rate` is the acceptance at the present F."""
    energies = evidence.scaled
    low, high = (
        float(factor_for_acceptance(energies, wanted, iterations=HALVINGS)[pair])
        for wanted in WANTED
    )
    ladder, rungs = _needed_ladder(evidence)
    numbers = {"factor_for_2_percent": low, "factor_for_10_percent": high, "rungs_for_F_1": rungs}
    there = " there, by a rough estimate" if evidence.follows_gap else ""
    return sentence(low, high, ladder, evidence.factor_now, rate, there), numbers


def advise_from_counts(counted: Counted, temperatures: Sequence[float], factor: float) -> Advice:
    """From the rate alone, at F = 1: equal energies at noise s are swapped at the rate 2 Phi(-s/2).

    A rough answer, as the energies of the rungs differ; without a swap s is a lower bound.
    """
    if factor != 1 or counted.proposed == 0:
        return "Which F it needs is known when it has ended: then its energies are kept.", {}
    none = counted.accepted == 0
    rate = min(0.5, UNSEEN / counted.proposed) if none else counted.accepted / counted.proposed
    s = float(-2.0 * torch.special.ndtri(torch.tensor(0.5 * rate, dtype=torch.float64)))
    if len(temperatures) > 2:  # then the pair is not the ladder
        return f"A noise of about s = {about(s)} would explain it.", {"noise_s_from_counts": s}
    low, high = (float(factor_for_noise(s, wanted)) for wanted in WANTED)
    cold, hot = temperatures
    variance = (s / float(effective_noise(1.0 / cold - 1.0 / hot, 1.0))) ** 2
    rungs = rungs_for_noise(cold, hot, variance)
    numbers = {"factor_for_2_percent": low, "factor_for_10_percent": high, "rungs_for_F_1": rungs}
    advice = sentence(low, high, _ladder_words(rungs, 2, cold, hot), factor, rate)
    least = "at least " if none else ""
    words = f"Noise of {least}about s = {about(s)} would explain it. {advice}"
    return words, {"noise_s_from_counts": s, **numbers}


def _needed_ladder(evidence: Evidence) -> tuple[str, int | None]:
    """The ladder that F = 1 needs from the coldest to the hottest rung, at the largest sigma2."""
    late = evidence.late
    cold, hot = float(late.temperature[-1, 0]), float(late.temperature[-1, -1])
    variance = float(settled_noise(late)[0].value.max())
    rungs = rungs_for_noise(cold, hot, variance) if math.isfinite(variance) else None
    return _ladder_words(rungs, late.n_rungs, cold, hot), rungs


def _ladder_words(rungs: int | None, n_rungs: int, cold: float, hot: float) -> str:
    if rungs is not None and rungs > MOST_RUNGS:
        return "larger batches or closer temperatures: no ladder of sensible length would do"
    if rungs is not None and rungs > n_rungs:
        return f"a ladder of about {rungs} rungs from {number(cold)} to {number(hot)}"
    return "less noise: larger batches, or minibatches that the rungs share"


def sentence(
    low: float, high: float, ladder: str, factor: float, rate: float, there: str = ""
) -> str:
    """`low` and `high` are the F of WANTED. What the run has already is no advice."""
    if not math.isfinite(low):
        return f"No F gives {percent(WANTED[0])}: energies are too far apart; F = 1 needs {ladder}."
    each = zip((low, high), WANTED, strict=True)
    wanted = [(f, share) for f, share in each if NOTABLY * factor < f < math.inf and share > rate]
    if not wanted:
        return f"To have more at F = 1 takes {ladder}."
    named = " to ".join(f"{about(f)} ({percent(share)} accepted)" for f, share in wanted)
    bias = ", with bias" if wanted[-1][0] > 1 else ""
    return f"An F of about {named} would swap{there}{bias}; F = 1 needs {ladder}."
