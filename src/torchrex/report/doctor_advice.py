"""What would give swaps: the F, or the number of rungs, computed from what a run recorded or
counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchrex.diagnostics import (
    effective_noise,
    factor_for_acceptance,
    factor_for_noise,
    rungs_for_noise,
)
from torchrex.report.doctor_evidence import Counted, Evidence, settled_noise
from torchrex.report.doctor_words import about, number, percent

WANTED = (0.02, 0.10)  # acceptance that the advice about F aims at
MOST_RUNGS = 100  # a longer ladder is no advice
NOTABLY = 1.1  # times the F that a run has: less is what it has already
HALVINGS = 20  # of log F: right to one part in 10,000
UNSEEN = 3.0  # no swap in n tests: the rate is below 3 / n with 95 % confidence

Advice = tuple[str, dict[str, Any]]  # one sentence, and its numbers


def advise(evidence: Evidence, pair: int, rate: float) -> Advice:
    """From the recorded energies and sigma2; `rate` is the acceptance at the F that is compared
    with.
    """
    energies = evidence.scaled
    low, high = (
        float(factor_for_acceptance(energies, wanted, iterations=HALVINGS)[pair])
        for wanted in WANTED
    )
    ladder, rungs = ladder_in_words(evidence)
    numbers = {"factor_for_2_percent": low, "factor_for_10_percent": high, "rungs_for_F_1": rungs}
    return _sentence(low, high, ladder, evidence.factor_now, rate, there=evidence.image), numbers


def ladder_in_words(evidence: Evidence) -> tuple[str, int | None]:
    """The ladder that F = 1 needs between the coldest and the hottest rung, at the largest sigma2."""
    late = evidence.late
    cold, hot = (float(late.temperature[-1, rung]) for rung in (0, late.n_rungs - 1))
    variance = float(settled_noise(late).variance.value.max())
    rungs = rungs_for_noise(cold, hot, variance) if math.isfinite(variance) else None
    return _ladder(rungs, late.n_rungs, cold, hot), rungs


def advise_from_counts(counted: Counted, temperatures: Sequence[float], factor: float) -> Advice:
    """From the rate alone, at F = 1: equal energies at noise s are swapped at the rate 2 Phi(-s/2),
    which gives s.

    A rough answer, for the energies of the rungs differ; where no swap was seen it is a lower
    bound.
    """
    if factor != 1 or counted.proposed == 0:
        return (
            "The energies of an unfinished run are not kept, so what F it needs is told when it has ended.",
            {},
        )
    rate = (
        counted.accepted / counted.proposed
        if counted.accepted
        else min(0.5, UNSEEN / counted.proposed)
    )
    s = float(-2.0 * torch.special.ndtri(torch.tensor(0.5 * rate, dtype=torch.float64)))
    low, high = (float(factor_for_noise(s, wanted)) for wanted in WANTED)
    if len(temperatures) > 2:  # then the pair is not the ladder
        return f"A noise of about s = {about(s)} would explain it.", {"noise_s_from_counts": s}
    cold, hot = temperatures
    rungs = rungs_for_noise(
        cold, hot, (s / float(effective_noise(1.0 / cold - 1.0 / hot, 1.0))) ** 2
    )
    least = "at least " if counted.accepted == 0 else ""
    words = f"That is what noise of {least}about s = {about(s)} leaves. " + _sentence(
        low, high, _ladder(rungs, 2, cold, hot), factor, rate
    )
    numbers = {
        "noise_s_from_counts": s,
        "factor_for_2_percent": low,
        "factor_for_10_percent": high,
        "rungs_for_F_1": rungs,
    }
    return words, numbers


def _ladder(rungs: int | None, n_rungs: int, cold: float, hot: float) -> str:
    if rungs is not None and rungs > MOST_RUNGS:
        return "less noise (larger batches) or temperatures closer together: no ladder of sensible length would do"
    if rungs is not None and rungs > n_rungs:
        return f"a ladder of about {rungs} rungs from {number(cold)} to {number(hot)}"
    return "less noise: larger batches, or minibatches that the rungs share"


def _sentence(
    low: float, high: float, ladder: str, factor: float, rate: float, *, there: bool = False
) -> str:
    """`low` and `high` are the F of WANTED, of the last quarter if `there`. What the run has
    already is no advice.
    """
    if not math.isfinite(low):
        first = f"No F gives {percent(WANTED[0])}, for the energies of the rungs lie too far apart"
        return f"{first}; F = 1 needs {ladder}."
    each = zip((low, high), WANTED, strict=True)
    wanted = [(f, share) for f, share in each if NOTABLY * factor < f < math.inf and share > rate]
    if not wanted:
        return f"To have more at F = 1 takes {ladder}."
    named = " to ".join(f"{about(f)} ({percent(share)} accepted)" for f, share in wanted)
    when = " would have swapped there, by a rough estimate" if there else " would swap"
    bias = ", with bias" if wanted[-1][0] > 1 else ""
    return f"An F of about {named}{when}{bias}; F = 1 needs {ladder}."
