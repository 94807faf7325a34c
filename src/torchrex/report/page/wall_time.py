"""Whose time the seconds of a run are: runs that trained side by side share theirs, and it is
counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from torchrex.report.runs import LoadedRun


def seconds_of(run: LoadedRun) -> float | None:
    seconds = (run.result or {}).get("wall_seconds")
    return float(seconds) if isinstance(seconds, int | float) and seconds >= 0 else None


def groups(runs: Sequence[LoadedRun]) -> list[list[LoadedRun]]:
    """Runs that tell their time, those that shared it together.

    A group that trains together has one clock, so all its runs have the same seconds to the last
    digit, on the same device. And they ended less than that time apart: runs one after the other
    cannot. Configs without a `batch_key` always run alone.
    """
    clocks: dict[tuple[float, Any], list[list[LoadedRun]]] = {}
    for run in runs:
        seconds = seconds_of(run)
        if seconds is None:
            continue
        found = clocks.setdefault((seconds, (run.result or {}).get("device")), [])
        together = next((group for group in found if _at_once(group[0], run, seconds)), None)
        if together is None:
            found.append([run])
        else:
            together.append(run)
    return [group for each in clocks.values() for group in each]


def sharers(runs: Sequence[LoadedRun]) -> dict[int, int]:
    """How many runs share the time of a run, itself included, by `id`."""
    return {id(run): len(group) for group in groups(runs) for run in group}


def total_seconds(runs: Sequence[LoadedRun]) -> float:
    return sum(seconds_of(group[0]) or 0.0 for group in groups(runs))


def in_words(seconds: float) -> str:
    """`12 s`, `20.7 min`, `1.9 h`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _at_once(one: LoadedRun, other: LoadedRun, seconds: float) -> bool:
    if _alone(one) or _alone(other):
        return False
    ends = [_end(run) for run in (one, other)]
    return (
        ends[0] is not None and ends[1] is not None and abs(ends[0] - ends[1]) < max(seconds, 1.0)
    )


def _alone(run: LoadedRun) -> bool:
    """Newer results tell how many replicas ran side by side; no more than its own means that
    nothing was shared.
    """
    if run.settings is not None and run.settings.batch_key(0) is None:
        return True
    own = getattr(run.settings, "n_rungs", None)
    told = (run.result or {}).get("replicas_side_by_side")
    return isinstance(own, int) and isinstance(told, int) and told <= own


def _end(run: LoadedRun) -> float | None:
    try:
        end = datetime.fromisoformat(str((run.result or {}).get("date")))
    except ValueError:
        return None
    return (end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp()
