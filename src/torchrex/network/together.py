"""`train`: one loop for every run on a module, or for several together: steps, averages, trace,
checkpoints, stopping in time.

Where the loop pauses to look (for an average, a checkpoint, the clock, a signal) has no influence
on the numbers: stopped and resumed equals never stopped, bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrex.checkpoint import Checkpoints
from torchrex.errors import InvalidArgumentError, OnInterrupt, RunInterrupted, require_on_interrupt
from torchrex.network.members import Outcome, TrainingRun
from torchrex.network.run import ModuleExchange
from torchrex.network.saving import has_checkpoints, require_nothing_later
from torchrex.network.signals import stopping_signals
from torchrex.network.training_loop import Loop
from torchrex.posterior import PosteriorAverage
from torchrex.recording import LiveDisplay, Observer, Trace

logger = logging.getLogger("torchrex")

SECONDS_BETWEEN_LOOKS = 0.5  # at the clock and for signals


def train(
    run: ModuleExchange,
    data: Any,
    n_steps: int,
    *,
    average: PosteriorAverage | Sequence[PosteriorAverage] = (),
    trace: Trace | None = None,
    checkpoints: Checkpoints | Path | str | None = None,
    checkpoint_every: int = 1000,
    resume: bool = True,
    budget: float | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    setting: Mapping[str, Any] | None = None,
    extra: Any = None,
    observers: Observer | Sequence[Observer] = (),
    on_interrupt: OnInterrupt = "raise",
) -> Outcome:
    """Advance a run on a module to `n_steps` steps in all, on batches of `data`, feeding averages
    and the trace.

    Returns how it ended: look at its `status`. `progress=True` shows the live display, a function
    is called as `progress(done, total)`. `observers` are told what the run does: `JsonLines(path)`,
    `TensorBoard(folder)`, or your own.

    With `checkpoints` (a folder) everything is saved every `checkpoint_every` steps and at the end,
    and a call that finds checkpoints there goes on from the newest one; with `resume=False` it
    begins anew, in a folder without later ones. After `budget` seconds it saves and returns
    "paused". Ctrl-C and SIGTERM finish the step and save; then Ctrl-C goes on as RunInterrupted, a
    KeyboardInterrupt, and SIGTERM as SystemExit(143), so that nothing that was to follow is begun.
    With `on_interrupt="return"` both return "interrupted". `setting` is written into the
    checkpoints, and a run with another one cannot resume from them. `extra` is where repeated
    energies get their batches, if not from `data`.
    """
    if not isinstance(run, ModuleExchange):
        raise InvalidArgumentError(
            "train is for runs on modules; a run on a density goes on by run.advance or collect"
        )
    averages = [average] if isinstance(average, PosteriorAverage) else list(average)
    folder = (
        checkpoints
        if isinstance(checkpoints, Checkpoints) or checkpoints is None
        else Checkpoints(Path(checkpoints))
    )
    watching = [observers] if isinstance(observers, Observer) else list(observers)
    member = TrainingRun(run, averages, trace, folder, dict(setting or {}), observers=watching)
    return train_together(
        [member],
        data,
        n_steps,
        checkpoint_every=checkpoint_every,
        resume=resume,
        budget=budget,
        progress=progress,
        extra=extra,
        on_interrupt=on_interrupt,
    )


def train_together(
    members: Sequence[TrainingRun],
    data: Any,
    n_steps: int,
    *,
    checkpoint_every: int = 1000,
    resume: bool = True,
    budget: float | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    extra: Any = None,
    on_interrupt: OnInterrupt = "raise",
) -> Outcome:
    """`train` for several runs on the same batches, side by side in one captured step; each ends as
    it would alone.

    They go on from the newest step that all of them have a checkpoint of. A member whose energy
    becomes NaN is left behind, with the reason in its `failure`; the others go on. If none is left,
    or there was only one, it is raised.
    """
    for name, value in (("n_steps", n_steps), ("checkpoint_every", checkpoint_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgumentError(f"{name} must be a whole number >= 1, got {value!r}")
    if not all(isinstance(member, TrainingRun) for member in members):
        raise InvalidArgumentError(
            "train_together takes members: [torchrex.TrainingRun(run, ...), ...]"
        )
    if len({member.checkpoints is None for member in members}) > 1:
        raise InvalidArgumentError("give checkpoints to all members or to none")
    require_on_interrupt(on_interrupt)
    loop = Loop(members, data, extra)
    with loop.process_group.reporting_errors():
        outcome = _train(loop, n_steps, checkpoint_every, resume, budget, progress)
    if outcome.signal is not None and on_interrupt == "raise":
        how = f"interrupted after {outcome.total_steps:,} of {n_steps:,} steps"
        if outcome.status != "finished":
            how += (
                "; the same call goes on from there"
                if loop.saves
                else "; nothing was saved, as no checkpoints were asked for"
            )
        if outcome.signal == signal.SIGTERM:
            if loop.process_group.is_main:
                logger.warning("%s", how)
            raise SystemExit(128 + signal.SIGTERM)
        raise RunInterrupted(how, outcome=outcome)
    return outcome


def _train(
    loop: Loop,
    n_steps: int,
    checkpoint_every: int,
    resume: bool,
    budget: float | None,
    progress: Callable[[int, int], None] | bool | None,
) -> Outcome:
    if loop.saves:
        loop.resume() if resume else require_nothing_later(loop.members)
    if loop.n_steps > n_steps:
        raise InvalidArgumentError(
            f"the run stands at step {loop.n_steps} already, beyond n_steps={n_steps}, which is the total"
        )
    began = time.monotonic()
    earlier, first = loop.seconds, loop.n_steps

    def elapsed() -> float:
        return earlier + time.monotonic() - began

    def outcome(status: str, number: int | None = None) -> Outcome:
        loop.seconds = elapsed()
        loop.save()
        loop.status = status
        return Outcome(
            status, number, loop.seconds - earlier, loop.n_steps - first, loop.seconds, loop.n_steps
        )

    process_group, stretch = loop.process_group, 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.observed(n_steps, [LiveDisplay()] if progress is True else []))
        received = stack.enter_context(stopping_signals())
        if loop.saves and not has_checkpoints(loop.members):
            loop.save()  # so that a crash before the first one has somewhere to go back to, and the stores of draws with it
        while loop.n_steps < n_steps:
            due = [n_steps, *(_next_draw(average, loop.n_steps) for average in loop.averages())]
            if loop.saves:
                due.append((loop.n_steps // checkpoint_every + 1) * checkpoint_every)
            looked = time.monotonic()
            here = min(stretch, min(due) - loop.n_steps)
            loop.advance(here)
            if callable(progress) and process_group.is_main:
                progress(loop.n_steps, n_steps)
            # Every process must go on or stop at the same step: a signal to one is a signal to all.
            number, used_up, took = process_group.maximum(
                (
                    received[0] if received else 0,
                    budget is not None and time.monotonic() - began >= budget,
                    time.monotonic() - looked,
                )
            )
            if number:
                return outcome("interrupted", int(number))
            if used_up and loop.n_steps < n_steps:
                return outcome("paused")
            if loop.saves and loop.n_steps % checkpoint_every == 0 and loop.n_steps < n_steps:
                loop.seconds = elapsed()
                loop.save()
            stretch = max(1, int(here * min(2.0, SECONDS_BETWEEN_LOOKS / max(took, 1e-9))))
        loop.require_finite()
        loop.warn_of_swaps()
        (number,) = process_group.maximum((received[0] if received else 0,))
        return outcome("finished", int(number) or None)


def _next_draw(average: PosteriorAverage, step: int) -> int:
    """The next step after `step` at which the average takes a draw."""
    taken = max(0, step - average.burn_in) // average.every
    return average.burn_in + (taken + 1) * average.every
