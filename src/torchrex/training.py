"""`train`: one loop for every run on a module: steps, averages, trace, checkpoints, and stopping without losing anything.

Where the loop pauses to look (for an average, a checkpoint, the clock, a signal) has no influence on the numbers: stopped and
resumed equals never stopped, bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torchrex.checkpoint import Checkpoints
from torchrex.errors import CheckpointError, InvalidArgumentError, NonFiniteEnergyError
from torchrex.exchange import ModuleExchange, ReplicaExchange
from torchrex.exchange.divergence import LOWER_IT
from torchrex.posterior import PosteriorAverage
from torchrex.posterior.progress import progress_bar
from torchrex.recording import Trace

logger = logging.getLogger("torchrex")

SECONDS_BETWEEN_LOOKS = 0.5  # at the clock and for signals


class Outcome(NamedTuple):
    """How a call of `train` ended."""

    status: str  # "finished"; "paused", its budget used up; or "interrupted" by a signal
    signal: int | None = None
    seconds: float = 0.0  # of all calls together, those before a resume included


def train(
    run: ReplicaExchange,
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
) -> Outcome:
    """Advance a run on a module to `n_steps` steps in all, on batches of `data`, feeding averages and the trace.

    Returns how it ended: look at its `status`. `progress=True` shows a bar, a function is called as `progress(done, total)`.

    With `checkpoints` (a folder) everything is saved every `checkpoint_every` steps and at the end, and a call that finds
    checkpoints there goes on from the newest one; with `resume=False` it begins anew, in a folder without later ones. Ctrl-C and
    SIGTERM finish the step, save, and return "interrupted"; after `budget` seconds it saves and returns "paused". `setting` is
    written into the checkpoints, and a run with another one cannot resume from them.
    """
    if not isinstance(run, ModuleExchange):
        raise InvalidArgumentError("train is for runs on modules; a run on a density goes on by run.advance or collect")
    for name, value in (("n_steps", n_steps), ("checkpoint_every", checkpoint_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgumentError(f"{name} must be a whole number >= 1, got {value!r}")
    averages = [average] if isinstance(average, PosteriorAverage) else list(average)
    folder = checkpoints if isinstance(checkpoints, Checkpoints) or checkpoints is None else Checkpoints(Path(checkpoints))
    loop = _Loop(run, data, averages, trace, folder, dict(setting or {}))
    if folder is not None:
        loop.resume() if resume else loop.require_nothing_later()
    if run.n_steps > n_steps:
        raise InvalidArgumentError(f"the run stands at step {run.n_steps} already, beyond n_steps={n_steps}, which is the total")
    began = time.monotonic()
    earlier = loop.seconds

    def elapsed() -> float:
        return earlier + time.monotonic() - began

    def outcome(status: str, number: int | None = None) -> Outcome:
        loop.seconds = elapsed()
        loop.save()
        return Outcome(status, number, loop.seconds)

    stretch = 1
    with contextlib.ExitStack() as stack:
        if progress is True:
            progress = stack.enter_context(progress_bar("training", n_steps))
        received = stack.enter_context(stopping_signals())
        if folder is not None and not folder.steps():
            loop.save()  # so that a crash before the first one has somewhere to go back to, and the stores of draws with it
        while run.n_steps < n_steps:
            due = [n_steps, *(_next_draw(a, run.n_steps) for a in averages)]
            if folder is not None:
                due.append((run.n_steps // checkpoint_every + 1) * checkpoint_every)
            looked = time.monotonic()
            here = min(stretch, min(due) - run.n_steps)
            loop.advance(here)
            for each in averages:
                each.update(run)
            if callable(progress):
                progress(run.n_steps, n_steps)
            if received:
                return outcome("interrupted", received[0])
            if budget is not None and time.monotonic() - began >= budget and run.n_steps < n_steps:
                return outcome("paused")
            if folder is not None and run.n_steps % checkpoint_every == 0 and run.n_steps < n_steps:
                loop.seconds = elapsed()
                loop.save()
            took = time.monotonic() - looked
            stretch = max(1, int(here * min(2.0, SECONDS_BETWEEN_LOOKS / max(took, 1e-9))))
        loop.require_finite()
        return outcome("finished", received[0] if received else None)


class _Loop:
    """The things that go on together, and are saved and restored together."""

    def __init__(
        self,
        run: ModuleExchange,
        data: Any,
        averages: list[PosteriorAverage],
        trace: Trace | None,
        folder: Checkpoints | None,
        setting: dict[str, Any],
    ) -> None:
        self.run, self.data, self.averages, self.trace, self.folder = run, data, averages, trace, folder
        self.setting = {**setting, **run.setting, "seed": run.streams.seed}
        self.seconds = 0.0

    def advance(self, n_steps: int) -> None:
        try:
            for infos in self.run.advance(n_steps, self.data):
                if self.trace is not None:
                    self.trace.record(infos)
        except NonFiniteEnergyError as failure:
            raise failure.with_checkpoint(self._newest()) from None

    def require_finite(self) -> None:
        """The last move is not followed by an energy that would tell."""
        finite = self.run.ensemble.position.isfinite().all(1).tolist()
        if not all(finite) and not self.run.heals:
            replica = finite.index(False)
            rung = next(rung for rung in range(self.run.n_rungs) if self.run.replica_at(rung) == replica)
            failure = NonFiniteEnergyError(
                replica=replica, rung=rung, run=0, step=self.run.n_steps, value=float("nan"), advice=LOWER_IT
            )
            raise failure.with_checkpoint(self._newest())

    def _newest(self) -> Path | None:
        steps = [] if self.folder is None else self.folder.steps()
        return self.folder.path_of(steps[-1]) if self.folder is not None and steps else None

    def require_nothing_later(self) -> None:
        """A run that begins anew must not leave its checkpoints before those of another, which would be taken for the newest."""
        assert self.folder is not None
        later = [step for step in self.folder.steps() if step > self.run.n_steps]
        if later:
            raise CheckpointError(
                f"{self.folder.folder} holds checkpoints up to step {later[-1]}; resume from them, or give another folder"
            )

    def save(self) -> None:
        """Save all of it. Weights that are not finite are worth no checkpoint, unless the run will heal them."""
        if self.folder is None:
            return
        if not self.run.heals and not bool(self.run.ensemble.position.isfinite().all()):
            logger.warning("no checkpoint at step %d, because weights are not finite", self.run.n_steps)
            return
        state = self.run.state_dict()
        state = {
            "replicas": state.pop("replicas"),
            "run": state,
            "averages": [average.state_dict() for average in self.averages],
            "trace": None if self.trace is None else self.trace.state_dict(),
            "data": self.data.state_dict() if hasattr(self.data, "state_dict") else None,
            "seconds": self.seconds,
        }
        self.folder.save(self.run.n_steps, state, setting=self.setting)
        for average in self.averages:
            if average.store is not None:
                average.store.commit(oldest=self.folder.steps()[0])

    def resume(self) -> None:
        """Go on from the newest checkpoint that is whole, if there is one."""
        assert self.folder is not None
        found = self.folder.load_newest(setting=self.setting)
        if found is None:
            for average in self.averages:
                if average.store is not None and average.store.n_seen:
                    raise CheckpointError(
                        f"{average.store.folder} holds draws of another run, for there is no checkpoint in {self.folder.folder}; "
                        f"give another folder for the draws, or the folder of their checkpoints"
                    )
            return
        state = found.state
        if len(state["averages"]) != len(self.averages) or (state["trace"] is None) != (self.trace is None):
            raise CheckpointError(
                f"{found.path} was written with other averages or traces; give the same ones, or another folder"
            )
        self.run.load_state_dict({**state["run"], "replicas": state["replicas"]})
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.load_state_dict(saved)
        if self.trace is not None:
            self.trace.load_state_dict(state["trace"])
        if state["data"] is not None and hasattr(self.data, "load_state_dict"):
            self.data.load_state_dict(state["data"])
        else:
            logger.warning(
                "the data cannot restore their position, so the run goes on with a new epoch; use DeviceLoader for more"
            )
        self.seconds = float(state["seconds"])


def _next_draw(average: PosteriorAverage, step: int) -> int:
    """The next step after `step` at which the average takes a draw."""
    taken = max(0, step - average.burn_in) // average.every
    return average.burn_in + (taken + 1) * average.every


@contextlib.contextmanager
def stopping_signals() -> Iterator[list[int]]:
    """Collect the first SIGINT or SIGTERM instead of dying of it; a second one acts as usual."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
