"""What doctor says of the runs on a page, as plain data: the only place where the page calls
doctor.

A page is never lost because doctor stumbles over one run: the page then says so. And it does not
wait long: long draws take doctor about a second each, so the quick runs are asked first, and those
left when the time is used up are named as not asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torchrex.report.runs import LoadedRun

SECONDS = 8.0  # for all runs of a page together; importing ArviZ takes half of it on a busy machine
NOT_ASKED = "doctor was not asked, to keep this page quick; `torchrex doctor` with its folder tells, or `report --doctor all`"
# "verdict"; whether it was a "quick" look, which left something out; how many
# "problems" and "warnings", None if not known; "findings": severity, title, words
Advice = dict[str, Any]


def advice_for(runs: Sequence[LoadedRun], seconds: float = SECONDS) -> dict[int, Advice]:
    """By `id` of the run. No run is begun after so many seconds."""
    found = {}
    until = time.monotonic() + seconds
    for run in sorted(runs, key=_size):
        found[id(run)] = (
            advice_of(run, quick=math.isfinite(seconds))
            if time.monotonic() < until
            else _unknown(NOT_ASKED)
        )
    return found


def advice_of(run: LoadedRun, *, quick: bool = False) -> Advice:
    """All findings about one run, the gravest first; what the page says of missing and damaged
    files anyway is left out.
    """
    # Imported here, because doctor itself takes the command that repeats a run from this package.
    try:
        from torchrex.report.doctor import diagnose

        diagnosis = diagnose(run, quick=quick)
        findings = [(each.severity, each.title, each.words) for each in diagnosis.findings]
    except Exception as error:  # whatever it is, the page goes on
        return _unknown(f"doctor failed on this run ({type(error).__name__}: {error})")
    told = [
        [*each]
        for each in findings
        if not any(each[2].startswith(problem) for problem in run.problems)
    ]
    counts = {
        word: sum(severity == word for severity, _, _ in findings)
        for word in ("problem", "warning")
    }
    seen = {"verdict": diagnosis.verdict, "quick": diagnosis.quick}
    return {**seen, "problems": counts["problem"], "warnings": counts["warning"], "findings": told}


def _unknown(why: str) -> Advice:
    return {"verdict": why, "quick": False, "problems": None, "warnings": None, "findings": []}


def _size(run: LoadedRun) -> int:
    return run.draws.values.numel() if run.draws is not None else 0
