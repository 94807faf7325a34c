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
    temperatures_at,
)
from torchrex.experiments import ExperimentConfig
from torchrex.report.findings import Finding, Severity, about, number, percent, several, times
from torchrex.report.reader import LoadedRun
from torchrex.tuning.model import Lengths, Setting
from torchrex.tuning.rounds import INTERVALS, LONGEST_STEP

WANTED = (0.02, 0.10)  # acceptance that the advice about F aims at
UNSEEN = 3.0  # no swap in n tests: the rate is below 3 / n with 95 % confidence
# Rungs that swap at 2 % of their tests make no swap in 150 tests one time in twenty.
FEWEST_TESTS = round(UNSEEN / WANTED[0])  # of a pair, all chains together
HARDLY_ANY = 1e-3  # accepted of the proposed
FEW_SWAPS = FEW_TRIPS = 10  # of a chain: fewer leave the mixing between modes to chance
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
FEWEST_ROWS = 64  # of the last quarter, for a correlation time
MOST_DOUBLINGS = 12  # of the minibatch, to a swap batch
STOPS = 0.8  # of the tests of a pair that are rejected
WORTH_TUNING = 3.0  # times fewer examples a visit
FAR_OUTSIDE = 3.0  # correction in spreads of the energy difference
UNSETTLED = 0.2  # relative change of sigma2 between the third and the last quarter
COUNTS = ("accepted", "proposed")
ROWS = ("steps", "replica_at", "temperature", "energy", "noise_variance", "correction")

Advice = tuple[str, dict[str, Any]]  # one sentence, and its numbers


@dataclass(frozen=True)
class Evidence:
    """The history of the ladder of a run that swaps."""

    history: History
    energies: History  # from the first swap test on, as noisy as the tests saw them
    settings: ExperimentConfig
    factor: float  # F at the start
    annealed: bool
    has_paths: bool = True  # the rung of each replica is known, not only the energies

    @cached_property
    def late(self) -> History:
        return last_quarter(self.energies)

    @property
    def follows_gap(self) -> bool:
        return self.settings.factor_follows_gap

    def _since_the_start(self, part: History) -> Tensor:
        return (self.history.inverse_gap[0] / part.inverse_gap)[:, :, None]

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

    @property
    def swapped_late(self) -> tuple[int, int] | None:
        """Swaps and tests of the last quarter, with tests spread evenly over the steps; None where
        not all swaps are listed.
        """
        if self.history.swaps is None:
            return None
        first, start = int(self.late.steps[0]), int(self.energies.steps[0])
        made, n = int((self.history.swaps.step >= first).sum()), self.history.n_steps
        return made, round(int(self.history.proposed.sum()) * (n - first) / max(1, n - start))

    @cached_property
    def travel(self) -> Travel:
        return round_trips(self.history)

    @property
    def trips(self) -> tuple[float, float]:
        """Round trips and restarts of a chain, all its replicas together; NaN if not known."""
        if not self.has_paths:
            return (math.nan, math.nan) if int(self.history.accepted.sum()) else (0.0, 0.0)
        trips, restarts = (x.sum(0).double().mean() for x in self.travel[:2])
        return float(trips), float(restarts)

    def temperatures(self, pair: int, row: int) -> str:
        """Of a pair at the first row of the run (0) or the last (-1)."""
        history = self.history if row == 0 else self.late
        return " and ".join(map(number, history.temperature[row, pair : pair + 2].tolist()))


def gather(run: LoadedRun) -> Evidence | None:
    """None where nothing is exchanged, or no more is known of it than `count` says."""
    factor, settings, ladder = run.correction_factor, run.settings, run.ladder
    averaged = run.history is None
    history = history_from_curves(run) if run.history is None else run.history
    if factor is None or settings is None or ladder is None or history is None:
        return None
    if history.n_pairs == 0 or int(history.proposed.sum()) == 0:
        return None
    energies = while_swapping(run, history)
    energies = with_noise(energies, settings.swap_noise) if averaged else energies
    has_paths = not averaged or history.swaps is not None
    return Evidence(history, energies, settings, factor, ladder.anneal is not None, has_paths)


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
    columns: dict[str, Any] = {name: getattr(history, name) for name in ROWS}
    kept: dict[str, Any] = {name: x if x is None else x[keep] for name, x in columns.items()}
    return replace(history, **kept)


def downsampled(history: History) -> History:
    """Every n-th row, so that ENOUGH_ROWS are left: means over rows stay right."""
    every = -(-len(history.steps) * history.n_chains // ENOUGH_ROWS)
    return _rows(history, slice(None, None, every))


def history_from_curves(run: LoadedRun) -> History | None:
    """A history from the curves in result.json, which committed results have in place of a trace.

    Energies are means over an epoch, or over the steps between two points. The first swaps are
    listed: where there were more, the rung of each replica is not known.
    """
    curves, pairs = run.curves, (run.result or {}).get("swaps") or []
    if run.ladder is None or run.settings is None or len(pairs) > 1:
        return None
    unit, scale = ("epoch", run.settings.steps_per_epoch) if "epoch" in curves else ("step", 1)
    names = (unit, f"swap_{unit}s", "energy", "noise_variance", "correction")
    try:
        when, swapped, energy, *of_pairs = (
            torch.tensor(curves[name], dtype=torch.float64) for name in names
        )
        n, n_pairs = len(when), len(pairs)
        energy = energy.reshape(n_pairs + 1, n).T[:, :, None]
        noise_variance, correction = (x.reshape(n_pairs, n).T[:, :, None] for x in of_pairs)
    except (KeyError, TypeError, ValueError, RuntimeError):  # older, or of another shape
        return None
    if n == 0:
        return None
    steps, swapped = ((each * scale).round().long() for each in (when, swapped))
    turns = (swapped[None, :] <= steps[:, None]).sum(1) % 2
    turns[0] = 0  # swaps are counted from here
    counts = {k: torch.tensor([p[k] for p in pairs]).long().reshape(n_pairs, 1) for k in COUNTS}
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


def with_noise(history: History, part: float, n: int = 64) -> History:
    """Means over an epoch lack the noise of single steps: it is drawn `n` times for each, Gaussian
    of `part` of sigma2.
    """
    names = ("energy", "replica_at", "noise_variance", "correction")
    wide = {name: getattr(history, name).repeat(1, 1, n) for name in names}
    variance = wide["noise_variance"]
    variance = torch.cat([variance, variance[:, -1:]], dim=1)  # of the pair a rung belongs to
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(*wide["energy"].shape, generator=generator, dtype=torch.float64)
    wide["energy"] = wide["energy"] + z * (part * variance).sqrt()
    counts = {name: getattr(history, name).repeat(1, n) for name in COUNTS}
    return replace(history, swaps=None, **wide, **counts)


class Counted(NamedTuple):
    """How often one pair was tested and swapped, all chains together, and which file says so."""

    pair: int
    accepted: int
    proposed: int
    source: str

    @property
    def rate(self) -> float:
        return self.accepted / max(1, self.proposed)

    def words(self, n_pairs: int) -> str:
        """The rungs swapped once in 2,000 tests (0.05 %)."""
        which = f"Rungs {self.pair} and {self.pair + 1}" if n_pairs > 1 else "The rungs"
        rate = f" ({percent(self.rate)})" if self.accepted else ""
        return f"{which} {_swapped(self.accepted)} in {several(self.proposed, 'test')}{rate}"

    @property
    def missing(self) -> str:
        """Six swaps in 200 tests are few because the run is short; of 10,000 hardly any passed."""
        return MISSING[0 if self.accepted == 0 else 1 if self.rate <= HARDLY_ANY else 2]

    def is_short(self, n_chains: int) -> bool:
        return self.accepted / n_chains < FEW_SWAPS or self.rate < HARDLY_ANY


def count(run: LoadedRun) -> list[Counted]:
    """The counts of every pair; none where no file has them."""
    if pairs := (run.result or {}).get("swaps"):
        counts, source = [(each["accepted"], each["proposed"]) for each in pairs], "result.json"
    else:
        rows = (run.trace.get(name, torch.zeros(0)).long() for name in COUNTS)
        counts, source = list(zip(*(each.tolist() for each in rows), strict=False)), "the trace"
    return [Counted(k, *each, source) for k, each in enumerate(counts)]


def _swapped(count: int) -> str:
    return "never swapped" if count == 0 else f"swapped {times(count)}"


# The checks


def check_ladder(run: LoadedRun) -> Iterable[Finding]:
    """Everything about the swaps of a run, from the best evidence there is."""
    evidence, counts = gather(run), count(run)
    if evidence is not None:
        swaps = swap_findings(evidence)
        yield from swaps
        yield from settled_findings(evidence)
        yield from tuning_findings(evidence)
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
    history, factor = evidence.history, evidence.factor
    observed = observed_acceptance(history).value.nan_to_num(nan=0.0)
    rate, pair = float(observed.min()), int(observed.argmin())
    at_ones = acceptance_from_energies(evidence.energies, correction_factor=1.0).value
    at_one, least = float(at_ones[pair]), int(at_ones.nan_to_num(nan=0.0).argmin())
    variance, noise = settled_noise(evidence.late)
    s, allowed = float(noise[pair]), float(allowed_acceptance(noise[pair]))
    accepted, proposed = (int(x[pair].sum()) for x in (history.accepted, history.proposed))
    counted = Counted(pair, accepted, proposed, "")
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
    made = counted.words(history.n_pairs)
    made += f", {history.n_chains} chains together" if history.n_chains > 1 else ""
    here = f"Noise s = {number(s)} at temperatures {evidence.temperatures(pair, -1)}"
    left = f"{percent(allowed) if allowed > 0 else 'none'} of the swaps between equal energies"
    noisy = f"{here} leaves {left} at F = 1"
    found: list[Finding] = []
    short = counted.is_short(history.n_chains)
    early = short and int(history.proposed.sum(1).max()) < FEWEST_TESTS
    if early:
        found.append(_too_early(made, f"{noisy}." if s > LOUD else "", numbers))
    elif short:
        found.append(_few(evidence, counted, made, noisy, numbers))
    elif float(observed.max()) > NEARLY_ALL:
        most = int(observed.argmax())
        numbers["largest_rate"] = float(observed[most])
        why = "F is too large" if factor > 1 else "they are close together"
        cure = "A hotter top rung would explore more at the same cost"
        if math.isinf(float(history.temperature[-1, -1])):
            cure = "Fewer rungs would cost less"
        words = (
            f"Rungs {most} and {most + 1} swap at {percent(numbers['largest_rate'])} of the tests:"
            f" {why}. {cure}."
        )
        severity: Severity = "warning" if factor > 1 else "note"
        found.append(Finding(severity, "swaps at nearly every step", words, numbers))
    if math.isinf(factor) or not early:  # a rate of so few tests proves no bias
        worst = {"least_acceptance_at_F_1": float(at_ones[least]), "noise_s": float(noise[least])}
        found += _price_of_factor(evidence, made if not found else "", {**numbers, **worst})
    if found:
        return found
    if s > LOUD:
        advice, more = advise(evidence, pair, rate)
        words = f"{made}. {noisy}; s should be below {LOUD:g}. {advice}"
        title = "too much noise for these temperatures"
        return [Finding("warning", title, words, {**numbers, **more})]
    numbers["acceptance_expected"] = math.nan
    if not evidence.follows_gap:
        expected = float(acceptance_from_energies(downsampled(evidence.energies)).value[pair])
        numbers["acceptance_expected"] = expected
        made += f"; {percent(expected)} expected from the energies"
    sigma2 = number(numbers["noise_variance"])
    words = f"{made}. {here} is below {LOUD:g} (sigma2 = {sigma2}, F = {number(factor)})."
    return [Finding("fine", "swaps", words, numbers)]


def _too_early(made: str, noise: str, numbers: dict[str, Any]) -> Finding:
    words = (
        f"{made}. It takes {FEWEST_TESTS} tests to know whether swaps are missing: in fewer, rungs"
        f" that swap at {percent(WANTED[0])} may have made none. Run longer. {noise}"
    )
    return Finding("note", TOO_FEW_TESTS, words.rstrip(), {**numbers, "fewest_tests": FEWEST_TESTS})


def _few(
    evidence: Evidence, counted: Counted, made: str, noise: str, numbers: dict[str, Any]
) -> Finding:
    (trips, restarts), factor = evidence.trips, evidence.factor
    rate, loud, compared = counted.rate, numbers["noise_s"] > LOUD, counted.rate
    numbers = {**numbers, "round_trips_per_chain": trips, "restarts_per_chain": restarts}
    if counted.accepted > 0 and trips < FEW_SWAPS:
        of = " of a chain" if evidence.history.n_chains > 1 else ""
        when = f"got something new {times(restarts)}" if restarts else "never got something new"
        made += f". Rung 0{of} {when}: too few to mix between modes"
    end = ""
    if evidence.follows_gap:
        # What annealing and swaps have made of temperatures and F by the last quarter.
        now, lowered, per_swap = evidence.factor_now, "", evidence.settings.factor_per_swap
        left = factor * per_swap**counted.accepted
        numbers |= {"factor_in_the_last_quarter": now, "factor_at_the_end": left}
        if left < factor:
            lowered = f", of which the factor {number(per_swap, 2)} a swap has left {number(left)}"
            lowered += " at the end"
            if not math.isclose(left, now, rel_tol=SAME):  # the advice compares with this one
                lowered += f", about {about(now)} in the middle of that quarter"
        start, cold = (evidence.temperatures(counted.pair, row) for row in (0, -1))
        end = (
            f" In its last quarter the ladder is annealed from temperatures {start} to {cold};"
            f" F was {number(factor)} at the start{lowered} (it grows as the ladder cools, and is"
            f" counted as at the start here)."
        )
        if evidence.swapped_late is not None:
            some, tests = evidence.swapped_late
            compared = some / max(1, tests)
            numbers |= {"swaps_in_the_last_quarter": some, "tests_in_the_last_quarter": tests}
            end += f" It {_swapped(some)} in about {about(tests)} tests there."
    advice, more = advise(evidence, counted.pair, compared)
    if not loud and rate >= HARDLY_ANY:  # the run is short, and noise is not in the way
        advice = "Run longer." if rate >= WANTED[0] else f"Run longer. {advice}"
    has = "" if end else f"; this run has F = {number(factor)}"
    words = f"{made}.{end} {noise}{has}. {advice}"
    severity: Severity = "warning" if trips < FEW_SWAPS or loud else "note"
    # Thinned draws show fewer round trips than there were, but none takes less than a swap.
    known = counted.accepted < evidence.history.n_chains
    known = known or (evidence.has_paths and evidence.travel.exact)
    severity = "problem" if trips < 1 and known else severity
    return Finding(severity, counted.missing, words, {**numbers, **more})


def _price_of_factor(evidence: Evidence, made: str, numbers: dict[str, Any]) -> Iterable[Finding]:
    """F above 1 buys swaps with bias; how many would there be without?"""
    factor, s, at_one = evidence.factor, numbers["noise_s"], numbers["least_acceptance_at_F_1"]
    # These states were reached with the bias of this F: a run at F = 1 would come to others.
    accepts = f"about {percent(at_one)}" if at_one > 0 else "none"
    words = f"{made}. " if made else ""
    pair = "" if evidence.history.n_pairs == 1 else " in its worst pair"
    words += f"On the states of this run F = 1 would accept {accepts}{pair}; it is unbiased"
    if made and s > LOUD:  # else noise is no obstacle, or has been named
        needs = _needed_ladder(evidence)[0]
        words += f", but needs {needs}: noise s = {number(s)} is above {LOUD:g}"
    if math.isinf(factor):
        why = "F is infinite: the naive test takes noise for real differences."
        yield Finding("problem", "naive swaps: biased", f"{why} {words}.", numbers)
    elif factor > 1 and numbers["acceptance_rate"] > BEYOND_UNBIASED * at_one:
        grows = " and grows with the inverse gap" if evidence.follows_gap else ""
        why = f"F = {number(factor)}{grows}, so swaps are bought with bias."
        yield Finding("warning", "F above 1: bias expected", f"{why} {words}.", numbers)


def count_findings(run: LoadedRun, counts: Sequence[Counted]) -> Iterable[Finding]:
    """Where only the numbers of swaps are known: energies are written when a run ends."""
    worst, factor = min(counts, key=lambda each: each.rate), run.correction_factor
    numbers = {**worst._asdict(), "acceptance_rate": worst.rate, "correction_factor": factor}
    made = f"{worst.words(len(counts))}, says {worst.source}"
    short = worst.is_short(1 if run.settings is None else max(1, run.settings.n_runs))
    if worst.proposed == 0:
        done = (run.result or {}).get("steps_done", math.inf)
        first = 0 if run.settings is None else run.settings.swap_start
        if done <= first:
            made = f"Swaps are tested from step {first:,} on; the run has made {done:,} steps"
        yield Finding("note", "no swap was tested", f"{made}.", numbers)
    elif short and max(each.proposed for each in counts) < FEWEST_TESTS:
        yield _too_early(made, "", numbers)
    elif short:
        advice, more = "", dict[str, Any]()
        if run.ladder is not None and factor is not None:
            advice, more = advise_from_counts(worst, run.ladder.temperatures, factor)
        lost = run.status == "finished" and worst.accepted == 0
        severity: Severity = "problem" if lost else "warning"
        yield Finding(severity, worst.missing, f"{made}. {advice}".rstrip(), {**numbers, **more})
    else:
        yield Finding("fine", "swaps", f"{made}. Their noise needs the energies.", numbers)
    if factor == math.inf:
        words = "F is infinite, the naive test: bias is expected. 1 is unbiased."
        yield Finding("problem", "naive swaps: biased", words, numbers)


def correction_findings(evidence: Evidence) -> Iterable[Finding]:
    """Does the correction decide about the swaps?"""
    size = correction_against_spread(evidence.late)
    worst = int(size.ratio.nan_to_num(0.0).argmax())
    correction, spread, ratio = (
        float(x[worst]) for x in (size.correction, size.spread, size.ratio)
    )
    if ratio > FAR_OUTSIDE:
        numbers = {"correction": correction, "spread": spread, "ratio": ratio}
        words = (
            f"The correction is {number(correction)}, and the energy difference fluctuates by"
            f" {number(spread)}: only a fluctuation of {about(ratio)} sd swaps."
            f" A larger F, less noise or a smaller gap helps."
        )
        yield Finding("warning", "the correction is far outside the energies", words, numbers)


def settled_findings(evidence: Evidence) -> Iterable[Finding]:
    """Does the estimate of sigma2 still move? Under annealing it should."""
    history, last = evidence.energies, evidence.late
    begin, end = int(history.steps[0]), int(history.steps[-1])
    middle = begin + (end - begin) // 2
    third = _rows(history, (history.steps >= middle) & (history.steps < last.steps[0]))
    if evidence.annealed or len(history.steps) < 16 or len(third.steps) < 4:
        return
    was, now = noise_level(third), noise_level(last)
    change = (now.value - was.value) / now.value
    error = (was.error.square() + now.error.square()).sqrt() / now.value
    pair = int(change.abs().argmax())
    if bool(((change.abs() > UNSETTLED) & (change.abs() > 3.0 * error)).any()):
        before, after = float(was.value[pair]), float(now.value[pair])
        numbers = {"third_quarter": before, "last_quarter": after, "change": float(change[pair])}
        words = (
            f"It was {number(before)} in the third quarter of the run and {number(after)} in the"
            f" last: swaps before had another correction. Run longer, or drop the beginning."
        )
        yield Finding("warning", "sigma2 has not settled", words, numbers)


def tuning_findings(evidence: Evidence) -> Iterable[Finding]:
    """Would `tune` choose a cheaper exchange between the same temperatures? Its model says so from
    the heat and the noise that this run measured.
    """
    settings, late = evidence.settings, evidence.late
    n_data, batch, size = settings.n_data, settings.batch_size, settings.swap_batch
    has_rows = len(late.steps) >= FEWEST_ROWS
    if evidence.annealed or evidence.factor != 1.0 or not (n_data and batch and has_rows):
        return
    finite = size is not None or not settings.is_density
    per_energy = n_data**2 * (1.0 / (size or batch) - (1.0 / n_data if finite else 0.0))
    noise = noise_level(late).value
    if not per_energy > 0 or not bool((noise > 0).all()):
        return
    gap, energy = late.inverse_gap[-1], late.energy.double().mean((0, 2))
    lengths = Lengths(
        inverse=1.0 / late.temperature[-1],
        heat=(2.0 * gap * energy.diff()).clamp(min=0.0).sqrt(),
        variance=2.0 * noise / per_energy,
        relaxation=correlation_time(late),
        batch=batch,
        n_data=n_data,
        finite_population=finite,
    )
    sizes = [batch * 2**k for k in range(MOST_DOUBLINGS) if batch * 2**k < n_data]
    best = lengths.best(MOST_RUNGS, [*sizes, n_data], INTERVALS)
    now = lengths.examples_a_visit(Setting(late.n_rungs, size, settings.swap_interval))
    then = lengths.examples_a_visit(best)
    step = lengths.total(best.swap_batch) / (best.n_rungs - 1)
    if step > LONGEST_STEP or now < WORTH_TUNING * then:
        return
    rungs, tested, interval = best
    share = "less than a thousandth" if then < 1e-3 * now else number(then / now, 2)
    when = "at every step" if interval == 1 else f"every {interval} steps"
    words = (
        f"From the heat and noise of this run the model of torchrex.tune expects a new visit to"
        f" rung 0 for {share} of the examples, with {rungs} rungs and tests on {tested:,} examples"
        f" (swap_batch) {when}. Try torchrex.tune."
    )
    numbers: dict[str, Any] = {"rungs": rungs, "swap_batch": tested, "swap_interval": interval}
    numbers |= {"examples_a_visit_now": now, "examples_a_visit_then": then}
    yield Finding("note", "a cheaper exchange", words, numbers)


def _uneven(rates: Tensor) -> str:
    """A sentence on a pair that stops most replicas, while the others let them pass."""
    rejected = 1.0 - rates.nan_to_num(nan=0.0)
    worst, k = float(rejected.max()), int(rejected.argmax())
    others = float((rejected.sum() - worst) / max(1, len(rejected) - 1))
    if len(rejected) < 2 or worst < STOPS or others > 0.5 * worst:
        return ""
    return (
        f" Rungs {k} and {k + 1} reject {percent(worst)}, the other pairs {percent(others)}: put"
        f" rungs between them."
    )


def correlation_time(history: History) -> float:
    """Steps in which the energy of the hottest rung changes, from its batch means; noise that is
    new at every step makes it too short.

        tau = batch length * variance of the batch means / variance
    """
    energy, spacing = history.energy[:, -1].double(), history.steps.diff().double().mean()
    length = max(1, int(len(energy) ** 0.5))
    batches = energy[: len(energy) // length * length].reshape(-1, length, energy.shape[-1]).mean(1)
    tau = length * batches.var(0).mean() / energy.var(0).mean().clamp(min=1e-300)
    return max(1.0, float(tau * spacing))


def travel_findings(evidence: Evidence) -> Iterable[Finding]:
    """Do replicas travel from the hottest rung to the coldest and back?"""
    (trips, restarts), history = evidence.trips, evidence.history
    exact = evidence.travel.exact
    barrier = float((1.0 - observed_acceptance(history).value).sum())
    numbers = {"round_trips_per_chain": trips, "restarts_per_chain": restarts, "exact": exact}
    numbers["barrier"] = barrier
    least = "" if exact else "at least "
    mean = "on average " if history.n_chains > 1 else ""
    words = f"A chain made {mean}{least}{several(trips, 'round trip')} over the ladder,"
    words += f" its {history.n_rungs} replicas together"
    words += f"; the barrier, its rejection rates summed, is {number(barrier)}."
    if trips >= FEW_TRIPS:
        yield Finding("fine", "round trips", words, numbers)
        return
    often = float(observed_acceptance(history).value.nan_to_num(nan=0.0).min()) >= WANTED[0]
    words += f" A replica came from the hottest rung to rung 0 {least}{times(restarts)}."
    words += _uneven(observed_acceptance(history).value)
    words += f" Run longer{'' if often else ', or make swaps likelier'}."
    severity: Severity = "problem" if trips < 1 and exact else "warning"
    yield Finding(severity, "too few round trips", words, numbers)


# What would give swaps


def advise(evidence: Evidence, pair: int, rate: float) -> Advice:
    """From the recorded energies and sigma2; `rate` is the acceptance at the present F."""
    energies, n = evidence.scaled, HALVINGS
    low, high = (float(factor_for_acceptance(energies, x, iterations=n)[pair]) for x in WANTED)
    ladder, rungs = _needed_ladder(evidence)
    numbers = {"factor_for_2_percent": low, "factor_for_10_percent": high, "rungs_for_F_1": rungs}
    there = " there, by a rough estimate" if evidence.follows_gap else ""
    return sentence(low, high, ladder, evidence.factor_now, rate, there), numbers


def advise_from_counts(counted: Counted, temperatures: Sequence[float], factor: float) -> Advice:
    """From the rate alone, at F = 1: equal energies at noise s are swapped at the rate 2 Phi(-s/2).

    A rough answer, as the energies of the rungs differ; without a swap s is a lower bound.
    """
    if factor != 1:
        return "Which F it needs is known when it has ended: then its energies are kept.", {}
    rate = counted.rate or min(0.5, UNSEEN / counted.proposed)
    s = float(-2.0 * torch.special.ndtri(torch.tensor(0.5 * rate, dtype=torch.float64)))
    least = "" if counted.accepted else "at least "
    words = f"Noise of {least}about s = {about(s)} would explain it."
    numbers: dict[str, Any] = {"noise_s_from_counts": s}
    if len(temperatures) > 2:  # then the pair is not the ladder
        return words, numbers
    low, high = (float(factor_for_noise(s, wanted)) for wanted in WANTED)
    cold, hot = temperatures
    variance = (s / float(effective_noise(1.0 / cold - 1.0 / hot, 1.0))) ** 2
    rungs = rungs_for_noise(cold, hot, variance)
    numbers |= {"factor_for_2_percent": low, "factor_for_10_percent": high, "rungs_for_F_1": rungs}
    ladder = _ladder_words(rungs, 2, cold, hot)
    return f"{words} {sentence(low, high, ladder, factor, rate)}", numbers


def _needed_ladder(evidence: Evidence) -> tuple[str, int | None]:
    """The ladder that F = 1 needs from the coldest to the hottest rung, at the largest sigma2."""
    late = evidence.late
    cold, hot = float(late.temperature[-1, 0]), float(late.temperature[-1, -1])
    variance = float(settled_noise(late)[0].value.max())
    rungs = rungs_for_noise(cold, hot, variance) if math.isfinite(variance) else None
    return _ladder_words(rungs, late.n_rungs, cold, hot), rungs


def _ladder_words(rungs: int | None, n_rungs: int, cold: float, hot: float) -> str:
    if rungs is not None and rungs > MOST_RUNGS:
        return (
            "larger batches (a swap_batch for the tests alone) or closer temperatures: no ladder of"
            " sensible length would do"
        )
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
