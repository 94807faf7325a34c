"""Are there enough swaps, and at what price? No swaps, few of them, noise that leaves none, or swaps bought with bias."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torchrex.diagnostics import (
    acceptance_from_energies,
    allowed_acceptance,
    effective_noise,
    noise_level,
    observed_acceptance,
)
from torchrex.report.doctor_advice import advise, advise_from_counts, ladder_in_words
from torchrex.report.doctor_evidence import Counted, Evidence, thinned
from torchrex.report.doctor_words import number, percent, several, times
from torchrex.report.findings import Finding, Severity
from torchrex.report.runs import LoadedRun

HARDLY_ANY = 1e-3  # accepted of the proposed
FEW_SWAPS = 10  # of a chain: fewer leave the mixing between modes to chance
LOUD = 4.0  # noise s above which an unbiased test accepts less than 4.6 % of swaps between equal energies
NEARLY_ALL = 0.9
BEYOND_UNBIASED = 2.0  # times the swaps of F = 1


def too_few(findings: Iterable[Finding]) -> bool:
    """Do they say that swaps are missing? Then what else follows from that need not be said."""
    return any(finding.title in ("no swaps", "hardly any swaps") for finding in findings)


def swap_findings(run: LoadedRun, evidence: Evidence) -> list[Finding]:
    """No swaps, too many of them, or swaps bought with bias: all three are about the noise and F."""
    history, late, factor = evidence.history, evidence.late, evidence.factor
    observed = observed_acceptance(history).value.nan_to_num(nan=0.0)  # a pair that was never tested has made no swap
    rate, pair = float(observed.min()), int(observed.argmin())
    at_one = float(acceptance_from_energies(evidence.energies, correction_factor=1.0).value[pair])
    variance = noise_level(late).value
    noise = effective_noise(late.inverse_gap.mean(0), variance)
    s = float(noise[pair])
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
    at = f"at temperatures {number(late.temperature[-1, pair].item())} and {number(late.temperature[-1, pair + 1].item())}"
    allowed = numbers["allowed_acceptance"]
    leaves = f"leaves {percent(allowed) if allowed > 0 else 'none'} of the swaps between equal energies at F = 1"
    found: list[Finding] = []
    if accepted / history.n_chains < FEW_SWAPS or rate < HARDLY_ANY:
        found.append(_few(run, evidence, pair, made, f"Noise s = {number(s)} {at} {leaves}", numbers))
    elif float(observed.max()) > NEARLY_ALL:
        most = int(observed.argmax())
        why = "F is too large" if factor > 1 else "they are close together"
        words = (
            f"Rungs {most} and {most + 1} swap at {percent(float(observed[most]))} of the tests: {why}. A hotter top rung would "
            f"explore more at the same cost."
        )
        severity: Severity = "warning" if factor > 1 else "note"
        found.append(Finding(severity, "swaps at nearly every step", words, {**numbers, "largest_rate": float(observed[most])}))
    found += _price_of_factor(evidence, made if not found else "", rate, at_one, numbers)
    if found:
        return found
    if s > LOUD:
        advice, more = advise(evidence, pair)
        words = f"{made}, but noise s = {number(s)} {at} {leaves}; it should be below {LOUD:g}. {advice}"
        return [Finding("warning", "too much noise for these temperatures", words, {**numbers, **more})]
    expected = float(acceptance_from_energies(thinned(evidence.energies)).value[pair]) if not evidence.image else math.nan
    told = f"; {percent(expected)} expected from the energies" if math.isfinite(expected) else ""
    words = f"{made}{told}. Noise s = {number(s)} {at} is below {LOUD:g} (sigma2 = {number(numbers['noise_variance'])}, F = "
    return [Finding("fine", "swaps", f"{words}{number(factor)}).", {**numbers, "acceptance_expected": expected})]


def _few(run: LoadedRun, evidence: Evidence, pair: int, made: str, noise: str, numbers: dict[str, Any]) -> Finding:
    trips, restarts = evidence.trips
    advice, more = advise(evidence, pair)
    seen = ""
    if numbers["accepted"] > 0 and trips < FEW_SWAPS:
        of = " of a chain" if evidence.history.n_chains > 1 else ""
        seen = f" Rung 0{of} got something new {times(restarts)}: mixing between modes is left to chance."
    if numbers["noise_s"] <= LOUD and numbers["acceptance_rate"] >= HARDLY_ANY:
        advice = f"Run longer. {advice}"  # it is short, and noise is not in the way
    words = f"{made}.{seen} {noise}; this run has {_factor_in_words(run, evidence)}. {advice}"
    severity: Severity = "problem" if trips < 1 else "warning" if trips < FEW_SWAPS or numbers["noise_s"] > LOUD else "note"
    title = "no swaps" if numbers["accepted"] == 0 else "hardly any swaps"
    return Finding(severity, title, words, {**numbers, **more, "round_trips_per_chain": trips, "restarts_per_chain": restarts})


def _price_of_factor(evidence: Evidence, made: str, rate: float, at_one: float, numbers: dict[str, Any]) -> Iterable[Finding]:
    """F above 1 buys swaps with bias; how many would there be without?"""
    factor, noise, ladder = evidence.factor, numbers["noise_s"], ""
    if made and noise > LOUD:  # else it is no obstacle, or has been told
        ladder = f", but needs {ladder_in_words(evidence)[0]}, for noise s = {number(noise)} is above {LOUD:g}"
    without = f"with F = 1 {f'it would be {percent(at_one)}' if at_one > 0 else 'there would be none'}"
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
    numbers = {**worst._asdict(), "acceptance_rate": worst.accepted / max(1, worst.proposed), "correction_factor": factor}
    made = f"{swapped_in_words(worst, len(counts))}, says {worst.source}"
    chains = max(1, int(getattr(run.settings, "n_runs", 1)))
    if worst.proposed == 0:
        yield Finding("note", "no swap was tested", f"{made}.", numbers)
    elif worst.accepted / chains < FEW_SWAPS or worst.accepted < HARDLY_ANY * worst.proposed:
        advice, more = "", dict[str, Any]()
        if run.ladder is not None and factor is not None:
            advice, more = advise_from_counts(worst, run.ladder.temperatures, factor)
        title = "no swaps" if worst.accepted == 0 else "hardly any swaps"
        severity: Severity = "problem" if run.status == "finished" and worst.accepted == 0 else "warning"
        yield Finding(severity, title, f"{made}. {advice}".rstrip(), {**numbers, **more})
    else:
        yield Finding("fine", "swaps", f"{made}. Their noise cannot be told without the energies.", numbers)
    if factor == math.inf:
        yield Finding(
            "problem", "naive swaps: biased", "F is infinite, the naive test: bias is expected. 1 is unbiased.", numbers
        )


def swapped_in_words(counted: Counted, n_pairs: int) -> str:
    """The rungs swapped once in 2,000 tests (0.05 %)."""
    which = f"Rungs {counted.pair} and {counted.pair + 1}" if n_pairs > 1 else "The rungs"
    verb = "never swapped" if counted.accepted == 0 else f"swapped {times(counted.accepted)}"
    rate = f" ({percent(counted.accepted / counted.proposed)})" if counted.accepted else ""
    return f"{which} {verb} in {several(counted.proposed, 'test')}{rate}"


def _factor_in_words(run: LoadedRun, evidence: Evidence) -> str:
    """F, with what lowering it at every swap has left of it where a recipe does that."""
    left = float(getattr(run.settings, "factor_per_swap", 1.0)) ** int(evidence.history.accepted.sum())
    lowered = f", of which its swaps left {number(left * evidence.factor)}" if left < 1 else ""
    return f"F = {number(evidence.factor)}{' at the start' if evidence.image else ''}{lowered}"
