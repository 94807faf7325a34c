"""Are there enough swaps, and at what price? No swaps, few of them, noise that leaves none, or
swaps bought with bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torchrex.diagnostics import acceptance_from_energies, allowed_acceptance, observed_acceptance
from torchrex.report.doctor_advice import (
    UNSEEN,
    WANTED,
    advise,
    advise_from_counts,
    ladder_in_words,
)
from torchrex.report.doctor_evidence import Counted, Evidence, first_test, settled_noise, thinned
from torchrex.report.doctor_words import about, number, percent, several, times
from torchrex.report.findings import Finding, Severity
from torchrex.report.runs import LoadedRun

HARDLY_ANY = 1e-3  # accepted of the proposed
FEW_SWAPS = 10  # of a chain: fewer leave the mixing between modes to chance
# Rungs that swap at 2 % of their tests, the least that is advised, make no swap in 150 tests one
# time in twenty: before, nothing is known to be missing.
FEWEST_TESTS = round(UNSEEN / WANTED[0])  # of a pair, all chains together
LOUD = 4.0  # noise s above which an unbiased test accepts less than 4.6 % of swaps between equal energies
NEARLY_ALL = 0.9
BEYOND_UNBIASED = 2.0  # times the swaps of F = 1
SAME = 0.01  # an F from curves is rounded, and a mean where an epoch has a swap
MISSING = ("no swaps", "hardly any swaps", "few swaps")  # titles of findings, the worst first
NOT_TOLD = "too few swap tests to say"  # the title of a note


def too_few(findings: Iterable[Finding]) -> bool:
    """Do they say that swaps are missing, or cannot be judged yet? Then what else follows from that
    need not be said.
    """
    return any(finding.title in (*MISSING, NOT_TOLD) for finding in findings)


def _missing(accepted: int, rate: float) -> str:
    """How short it falls: six swaps in 200 tests are few because the run is short, six in 10,000
    because hardly any pass.
    """
    none, hardly_any, few = MISSING
    return none if accepted == 0 else hardly_any if rate <= HARDLY_ANY else few


def swap_findings(run: LoadedRun, evidence: Evidence) -> list[Finding]:
    """No swaps, too many of them, or swaps bought with bias: all three are about the noise and F."""
    history, late, factor = evidence.history, evidence.late, evidence.factor
    observed = observed_acceptance(history).value.nan_to_num(
        nan=0.0
    )  # a pair that was never tested has made no swap
    rate, pair = float(observed.min()), int(observed.argmin())
    at_one = float(acceptance_from_energies(evidence.energies, correction_factor=1.0).value[pair])
    level, noise = settled_noise(late)
    variance, s = level.value, float(noise[pair])
    accepted, proposed = int(history.accepted[pair].sum()), int(history.proposed[pair].sum())
    numbers: dict[str, Any] = {
        "pair": [pair, pair + 1],
        "accepted": accepted,
        "proposed": proposed,
        "acceptance_rate": rate,
        "acceptance_at_F_1": at_one,
        "noise_variance": float(variance[pair]),
        "noise_s": s,
        "allowed_acceptance": float(allowed_acceptance(noise[pair])),
        "correction_factor": factor,
    }
    made = swapped_in_words(Counted(pair, accepted, proposed, ""), history.n_pairs)
    if history.n_chains > 1:
        made += f", {history.n_chains} chains together"
    here = f"at temperatures {_temperatures(evidence, pair, -1)}"
    at = "there" if evidence.image else here
    allowed = numbers["allowed_acceptance"]
    leaves = f"leaves {percent(allowed) if allowed > 0 else 'none'} of the swaps between equal energies at F = 1"
    found: list[Finding] = []
    short = accepted / history.n_chains < FEW_SWAPS or rate < HARDLY_ANY
    early = short and int(history.proposed.sum(1).max()) < FEWEST_TESTS
    if early:
        loud = f"Noise s = {number(s)} {here} {leaves}." if s > LOUD else ""
        found.append(_too_early(made, loud, numbers))
    elif short:
        found.append(
            _few(run, evidence, pair, made, f"Noise s = {number(s)} {at} {leaves}", numbers)
        )
    elif float(observed.max()) > NEARLY_ALL:
        most = int(observed.argmax())
        why = "F is too large" if factor > 1 else "they are close together"
        words = (
            f"Rungs {most} and {most + 1} swap at {percent(float(observed[most]))} of the tests: {why}. A hotter top rung would "
            f"explore more at the same cost."
        )
        severity: Severity = "warning" if factor > 1 else "note"
        found.append(
            Finding(
                severity,
                "swaps at nearly every step",
                words,
                {**numbers, "largest_rate": float(observed[most])},
            )
        )
    if math.isinf(factor) or not early:  # a rate of so few tests proves no bias
        found += _price_of_factor(evidence, made if not found else "", rate, at_one, numbers)
    if found:
        return found
    if s > LOUD:
        advice, more = advise(evidence, pair, rate)
        words = f"{made}, but noise s = {number(s)} {at} {leaves}; it should be below {LOUD:g}. {advice}"
        return [
            Finding("warning", "too much noise for these temperatures", words, {**numbers, **more})
        ]
    expected = (
        float(acceptance_from_energies(thinned(evidence.energies)).value[pair])
        if not evidence.image
        else math.nan
    )
    told = f"; {percent(expected)} expected from the energies" if math.isfinite(expected) else ""
    words = f"{made}{told}. Noise s = {number(s)} {at} is below {LOUD:g} (sigma2 = {number(numbers['noise_variance'])}, F = "
    return [
        Finding(
            "fine",
            "swaps",
            f"{words}{number(factor)}).",
            {**numbers, "acceptance_expected": expected},
        )
    ]


def _too_early(made: str, noise: str, numbers: dict[str, Any]) -> Finding:
    words = (
        f"{made}. It takes {FEWEST_TESTS} tests to tell whether swaps are missing: in fewer, rungs that swap at "
        f"{percent(WANTED[0])} of them may well have made none. Run longer. {noise}"
    )
    return Finding("note", NOT_TOLD, words.rstrip(), {**numbers, "fewest_tests": FEWEST_TESTS})


def _few(
    run: LoadedRun, evidence: Evidence, pair: int, made: str, noise: str, numbers: dict[str, Any]
) -> Finding:
    trips, restarts = evidence.trips
    rate, end = numbers["acceptance_rate"], ""
    if evidence.image:
        numbers = {**numbers, "factor_in_the_last_quarter": evidence.factor_now}
        numbers["factor_at_the_end"] = _factor_at_the_end(run, evidence, pair)
        end = _at_the_end(run, evidence, pair)
        if evidence.swapped_late is not None:
            some, tests = evidence.swapped_late
            rate = some / max(1, tests)
            numbers |= {"swaps_in_the_last_quarter": some, "tests_in_the_last_quarter": tests}
            end += f" It {_swapped(some)} in about {about(tests)} tests there."
    advice, more = advise(evidence, pair, rate)
    seen = ""
    if numbers["accepted"] > 0 and trips < FEW_SWAPS:
        of = " of a chain" if evidence.history.n_chains > 1 else ""
        seen = f" Rung 0{of} got something new {times(restarts)}: mixing between modes is left to chance."
    if numbers["noise_s"] <= LOUD and numbers["acceptance_rate"] >= HARDLY_ANY:
        # It is short, and noise is not in the way; where it swaps often enough there is nothing
        # else to change.
        advice = (
            "Run longer." if numbers["acceptance_rate"] >= WANTED[0] else f"Run longer. {advice}"
        )
    told = (
        f"{end} {advice} {noise}."
        if end
        else f"{noise}; this run has F = {number(evidence.factor)}. {advice}"
    )
    words = f"{made}.{seen} {told}"
    severity: Severity = (
        "problem"
        if trips < 1
        else "warning"
        if trips < FEW_SWAPS or numbers["noise_s"] > LOUD
        else "note"
    )
    title = _missing(numbers["accepted"], numbers["acceptance_rate"])
    return Finding(
        severity,
        title,
        words,
        {**numbers, **more, "round_trips_per_chain": trips, "restarts_per_chain": restarts},
    )


def _price_of_factor(
    evidence: Evidence, made: str, rate: float, at_one: float, numbers: dict[str, Any]
) -> Iterable[Finding]:
    """F above 1 buys swaps with bias; how many would there be without?"""
    factor, noise, ladder = evidence.factor, numbers["noise_s"], ""
    if made and noise > LOUD:  # else it is no obstacle, or has been told
        ladder = f", but needs {ladder_in_words(evidence)[0]}, for noise s = {number(noise)} is above {LOUD:g}"
    # These states were reached with the bias of this F: a run at F = 1 would come to others.
    without = f"on the states of this run F = 1 would accept {f'about {percent(at_one)}' if at_one > 0 else 'none'}"
    against = f"{made}; {without}." if made else f"{without[0].upper()}{without[1:]}."
    if math.isinf(factor):
        words = (
            f"F is infinite, the naive test, which takes the noise of the energies for real differences: bias is expected. "
            f"{against} Set a finite correction_factor; 1 is unbiased{ladder}."
        )
        yield Finding("problem", "naive swaps: biased", words, numbers)
    elif factor > 1 and rate > BEYOND_UNBIASED * at_one:
        words = (
            f"F = {number(factor)}{' and grows with the inverse gap' if evidence.image else ''}, so swaps are bought with bias. "
            f"{against} A smaller F costs swaps; 1 is unbiased{ladder}."
        )
        yield Finding("warning", "F above 1: bias expected", words, numbers)


def count_findings(run: LoadedRun, counts: list[Counted]) -> Iterable[Finding]:
    """Where only the numbers of swaps are known: noise and energies are written when a run ends."""
    worst = min(counts, key=lambda each: each.accepted / max(1, each.proposed))
    factor = run.correction_factor
    numbers = {
        **worst._asdict(),
        "acceptance_rate": worst.accepted / max(1, worst.proposed),
        "correction_factor": factor,
    }
    made = f"{swapped_in_words(worst, len(counts))}, says {worst.source}"
    chains = max(1, int(getattr(run.settings, "n_runs", 1)))
    short = worst.accepted / chains < FEW_SWAPS or worst.accepted < HARDLY_ANY * worst.proposed
    if worst.proposed == 0:
        done, first = (run.result or {}).get("steps_done"), first_test(run)
        waits = isinstance(done, int) and done <= first
        words = (
            f"Swaps are tested from step {first:,} on, and it has come to step {done:,}"
            if waits
            else made
        )
        yield Finding("note", "no swap was tested", f"{words}.", numbers)
    elif short and max(each.proposed for each in counts) < FEWEST_TESTS:
        yield _too_early(made, "", numbers)
    elif short:
        advice, more = "", dict[str, Any]()
        if run.ladder is not None and factor is not None:
            advice, more = advise_from_counts(worst, run.ladder.temperatures, factor)
        title = _missing(worst.accepted, numbers["acceptance_rate"])
        severity: Severity = (
            "problem" if run.status == "finished" and worst.accepted == 0 else "warning"
        )
        yield Finding(severity, title, f"{made}. {advice}".rstrip(), {**numbers, **more})
    else:
        yield Finding(
            "fine", "swaps", f"{made}. Their noise cannot be told without the energies.", numbers
        )
    if factor == math.inf:
        yield Finding(
            "problem",
            "naive swaps: biased",
            "F is infinite, the naive test: bias is expected. 1 is unbiased.",
            numbers,
        )


def swapped_in_words(counted: Counted, n_pairs: int) -> str:
    """The rungs swapped once in 2,000 tests (0.05 %)."""
    which = f"Rungs {counted.pair} and {counted.pair + 1}" if n_pairs > 1 else "The rungs"
    rate = f" ({percent(counted.accepted / counted.proposed)})" if counted.accepted else ""
    return f"{which} {_swapped(counted.accepted)} in {several(counted.proposed, 'test')}{rate}"


def _swapped(count: int) -> str:
    return "never swapped" if count == 0 else f"swapped {times(count)}"


def _at_the_end(run: LoadedRun, evidence: Evidence, pair: int) -> str:
    """Where annealing has brought temperatures and F by the last quarter, in which all that follows
    holds.
    """
    left, middle, lowered = _factor_at_the_end(run, evidence, pair), evidence.factor_now, ""
    if left < evidence.factor:
        lowered = f", of which the factor {number(_per_swap(run), 2)} a swap has left {number(left)} at the end"
        if not math.isclose(left, middle, rel_tol=SAME):  # the advice compares with this one
            lowered += f", about {about(middle)} in the middle of that quarter"
    return (
        f"Where it ends, in its last quarter, the ladder is annealed from temperatures {_temperatures(evidence, pair, 0)} to "
        f"{_temperatures(evidence, pair, -1)}; F was {number(evidence.factor)} at the start{lowered} (it grows as the ladder "
        f"cools, and is counted as at the start here)."
    )


def _factor_at_the_end(run: LoadedRun, evidence: Evidence, pair: int) -> float:
    """F after the last swap, counted as at the start: from the number of swaps, for the last may
    come after the last row.
    """
    return evidence.factor * _per_swap(run) ** int(evidence.history.accepted[pair].sum())


def _per_swap(run: LoadedRun) -> float:
    return float(getattr(run.settings, "factor_per_swap", 1.0))


def _temperatures(evidence: Evidence, pair: int, row: int) -> str:
    """Of a pair, at a recorded row: the first of the run, or the last."""
    cold, hot = (
        (evidence.history if row == 0 else evidence.late).temperature[row, pair : pair + 2].tolist()
    )
    return f"{number(cold)} and {number(hot)}"
