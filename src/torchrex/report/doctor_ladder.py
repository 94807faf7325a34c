"""Checks of the ladder: its swaps, whether the correction or a moving sigma2 decides about them,
and whether replicas travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torchrex.diagnostics import (
    History,
    correction_against_spread,
    noise_level,
    observed_acceptance,
)
from torchrex.experiments.gan import GanConfig
from torchrex.report.doctor_advice import WANTED
from torchrex.report.doctor_evidence import FEW_TRIPS, Evidence, count, gather
from torchrex.report.doctor_swaps import count_findings, swap_findings, too_few
from torchrex.report.doctor_words import number, several, times
from torchrex.report.findings import Finding, Severity
from torchrex.report.runs import LoadedRun

FAR_OUTSIDE = 3.0  # correction in spreads of the energy difference
UNSETTLED = 0.2  # relative change of sigma2 between the third and the last quarter


def check_ladder(run: LoadedRun) -> Iterable[Finding]:
    """Everything about the swaps of a run, from the best evidence there is."""
    evidence, counts = gather(run), count(run)
    if evidence is not None:
        swaps = swap_findings(run, evidence)
        yield from swaps
        yield from settled_findings(evidence)
        if not too_few(swaps):  # else the correction and the travel have been told
            yield from correction_findings(evidence)
            yield from travel_findings(evidence) if evidence.has_paths else ()
    elif run.ladder is not None and len(run.ladder.temperatures) < 2:
        if run.ladder.temperatures[0] > 0:  # else it descends, and samples nothing
            words = (
                "A run at one temperature knows only the modes that it has visited: nothing in it shows that it missed others. "
                "Runs that start far apart, or a ladder with a hotter rung, would show it."
            )
            yield Finding("note", "one rung", words)
    elif run.ladder is not None and run.correction_factor is None:
        shared = isinstance(run.settings, GanConfig) and run.settings.generators == "shared"
        how = (
            "share their generators and exchange nothing else"
            if shared
            else "are independent: nothing is exchanged"
        )
        yield Finding("note", "no swaps by design", f"The replicas of this run {how}.")
    elif counts:
        yield from count_findings(run, counts)
    elif run.ladder is not None:
        yield Finding("note", "swaps not told", "Nothing that is left of this run counts them.")


def correction_findings(evidence: Evidence) -> Iterable[Finding]:
    """Does the correction decide about the swaps?"""
    size = correction_against_spread(evidence.late)
    worst = int(size.ratio.nan_to_num(0.0).argmax())
    ratio = float(size.ratio[worst])
    numbers = {
        "correction": float(size.correction[worst]),
        "spread": float(size.spread[worst]),
        "ratio": ratio,
    }
    if ratio > FAR_OUTSIDE:
        words = (
            f"The correction is {number(numbers['correction'])}, and the energy difference fluctuates by "
            f"{number(numbers['spread'])}: only a fluctuation of {number(ratio, 2)} standard deviations swaps. A larger F, less "
            f"noise or a smaller gap helps."
        )
        yield Finding("warning", "the correction is far outside the energies", words, numbers)


def settled_findings(evidence: Evidence) -> Iterable[Finding]:
    """Does the estimate of sigma2 still move? Under annealing it is meant to."""
    history = evidence.energies
    if evidence.annealed or len(history.steps) < 16:
        return
    first, last = int(history.steps[0]), int(history.steps[-1])
    middle = history.after(first + (last - first) // 2)
    before = _rows_before(middle, evidence.late)
    if before is None:
        return
    was, now = noise_level(before), noise_level(evidence.late)
    change = (now.value - was.value) / now.value
    error = (was.error.square() + now.error.square()).sqrt() / now.value
    moved = (change.abs() > UNSETTLED) & (change.abs() > 3.0 * error)
    pair = int(change.abs().argmax())
    if bool(moved.any()):
        numbers = {
            "third_quarter": float(was.value[pair]),
            "last_quarter": float(now.value[pair]),
            "change": float(change[pair]),
        }
        words = (
            f"It was {number(numbers['third_quarter'])} in the third quarter of the run and {number(numbers['last_quarter'])} in "
            f"the last, so swaps before were tested with another correction. Run longer, or leave the beginning out."
        )
        yield Finding("warning", "sigma2 has not settled", words, numbers)


def _rows_before(history: History, without: History) -> History | None:
    """The rows of `history` before those of `without`."""
    kept = history.steps < without.steps[0]
    if int(kept.sum()) < 4:
        return None
    rows = {
        name: getattr(history, name)[kept]
        for name in ("steps", "energy", "replica_at", "noise_variance", "temperature")
    }
    return replace(history, correction=None, **rows)


def travel_findings(evidence: Evidence) -> Iterable[Finding]:
    """Do replicas travel from the hottest rung to the coldest and back?"""
    trips, restarts = evidence.trips
    exact = evidence.travel.exact
    numbers = {"round_trips_per_chain": trips, "restarts_per_chain": restarts, "exact": exact}
    least = "" if exact or restarts == 0 else "at least "
    mean = "on average " if evidence.history.n_chains > 1 else ""
    made = f"A chain made {mean}{least}{several(trips, 'round trip')}, its {evidence.history.n_rungs} replicas together,"
    if trips < FEW_TRIPS:
        often = (
            float(observed_acceptance(evidence.history).value.nan_to_num(nan=0.0).min())
            >= WANTED[0]
        )
        severity: Severity = "problem" if trips < 1 and exact else "warning"
        words = (
            f"{made} between the coldest and the hottest rung, and something new came to rung 0 {least}{times(restarts)}: so "
            f"often it could see another mode. Run longer{'' if often else ', or make swaps likelier'}."
        )
        yield Finding(severity, "too few round trips", words, numbers)
    else:
        yield Finding("fine", "round trips", f"{made} over the ladder.", numbers)
