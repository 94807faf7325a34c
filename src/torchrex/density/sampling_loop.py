"""Drawing until all is done, the time is up, or somebody says stop: several runs in turn, so that
they stay level.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchrex.density.sampling_drawing import Drawing
from torchrex.errors import NonFiniteEnergyError
from torchrex.recording import Callback

logger = logging.getLogger("torchrex")


class End(NamedTuple):
    """How it ended."""

    status: str  # "finished"; "paused", its budget used up; "interrupted"; or "failed"
    failure: NonFiniteEnergyError | None = None
    failed: int = 0  # which of the runs did


def draw_all(
    drawings: Sequence[Drawing],
    *,
    budget: float | None = None,
    progress: Callback | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> End:
    """Bring all runs to their end, always the one that is furthest behind. Ctrl-C saves all of
    them.
    """
    began, at = time.monotonic(), 0
    n_steps = drawings[0].n_steps
    try:
        for k, drawing in enumerate(drawings):
            drawing.prepare(beside=drawings[k - 1].run if k else None)
        at = _furthest_behind(drawings)
        while drawings[at].n_done < n_steps:
            for _ in drawings[at].go_on():
                if progress is not None:
                    progress(sum(each.n_done for each in drawings) // len(drawings), n_steps)
            at = _furthest_behind(drawings)
            used_up, stop = (
                budget is not None and time.monotonic() - began >= budget,
                stop_requested(),
            )
            if (used_up or stop) and 0 < drawings[
                at
            ].n_done < n_steps:  # all of them have something to show
                for drawing in drawings:
                    drawing.save()
                return End("interrupted" if stop else "paused")
    except KeyboardInterrupt:
        for drawing in drawings:
            drawing.save()
        return End("interrupted")
    except NonFiniteEnergyError as failure:
        return End("failed", failure, at)
    return End("finished")


def _furthest_behind(drawings: Sequence[Drawing]) -> int:
    return min(range(len(drawings)), key=lambda k: drawings[k].n_done)
