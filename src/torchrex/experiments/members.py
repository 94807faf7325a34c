"""A job as a member of a group that trains together: its run with an average over the evaluated
images, trace and checkpoints.
"""

from __future__ import annotations

from typing import Any

from torchrex.checkpoint import Checkpoints
from torchrex.experiments.jobs import Job
from torchrex.network import ModuleExchange, TrainingRun
from torchrex.posterior import PosteriorAverage
from torchrex.recording import Trace


def member_of(
    job: Job, run: ModuleExchange, evaluated: list[Any], *, every: int, burn_in: int, traced: int
) -> TrainingRun:
    """A draw every `every` steps after `burn_in`, of all rungs, and a row of the trace every
    `traced`.
    """
    average = PosteriorAverage(
        evaluated, every=every, burn_in=burn_in, rungs=tuple(range(run.n_rungs)), history=True
    )
    checkpoints = None if job.checkpoints is None else Checkpoints(job.checkpoints)
    return TrainingRun(
        run,
        [average],
        Trace(traced),
        checkpoints,
        {"recipe": job.config.recipe},
        observers=job.observers,
    )
