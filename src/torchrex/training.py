"""`train`: one loop for every run on a module, or for several together: steps, averages, trace, checkpoints, stopping in time.

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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchrex.checkpoint import Checkpoints
from torchrex.checkpoint.folder import Checkpoint
from torchrex.errors import CheckpointError, DeviceError, InvalidArgumentError, NonFiniteEnergyError
from torchrex.exchange import ModuleExchange, ReplicaExchange, SideBySide
from torchrex.exchange.divergence import LOWER_IT
from torchrex.exchange.noise import RepeatedDraws
from torchrex.posterior import PosteriorAverage
from torchrex.recording import LiveDisplay, Observer, Trace, Watched
from torchrex.recording.observer import on_host

logger = logging.getLogger("torchrex")

SECONDS_BETWEEN_LOOKS = 0.5  # at the clock and for signals


class Outcome(NamedTuple):
    """How a call of `train` ended."""

    status: str  # "finished"; "paused", its budget used up; or "interrupted" by a signal
    signal: int | None = None
    seconds: float = 0.0  # of all calls together, those before a resume included
    steps: int = 0  # of this call


@dataclass
class Member:
    """One run of a group that trains together, with what belongs to it alone."""

    run: ModuleExchange
    averages: Sequence[PosteriorAverage] = ()
    trace: Trace | None = None
    checkpoints: Checkpoints | None = None  # or a folder for them
    setting: Mapping[str, Any] = field(default_factory=dict)
    failure: NonFiniteEnergyError | None = None  # why it was left behind
    observers: Sequence[Observer] = ()  # one may be shared between members

    def __post_init__(self) -> None:
        run: Any = self.run
        averages: Any = self.averages
        folder: Any = self.checkpoints
        if not isinstance(run, ModuleExchange):
            raise InvalidArgumentError(f"a member is torchrex.Member(run, ...) with a run on a network, got {run!r}")
        self.averages = [averages] if isinstance(averages, PosteriorAverage) else averages
        self.checkpoints = Checkpoints(Path(folder)) if isinstance(folder, Path | str) else folder


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
    extra: Any = None,
    observers: Observer | Sequence[Observer] = (),
) -> Outcome:
    """Advance a run on a module to `n_steps` steps in all, on batches of `data`, feeding averages and the trace.

    Returns how it ended: look at its `status`. `progress=True` shows the live display, a function is called as
    `progress(done, total)`. `observers` are told what the run does: `JsonLines(path)`, `TensorBoard(folder)`, or your own.

    With `checkpoints` (a folder) everything is saved every `checkpoint_every` steps and at the end, and a call that finds
    checkpoints there goes on from the newest one; with `resume=False` it begins anew, in a folder without later ones. Ctrl-C and
    SIGTERM finish the step, save, and return "interrupted"; after `budget` seconds it saves and returns "paused". `setting` is
    written into the checkpoints, and a run with another one cannot resume from them. `extra` is where repeated energies get their
    batches, if not from `data`.
    """
    if not isinstance(run, ModuleExchange):
        raise InvalidArgumentError("train is for runs on modules; a run on a density goes on by run.advance or collect")
    averages = [average] if isinstance(average, PosteriorAverage) else list(average)
    folder = checkpoints if isinstance(checkpoints, Checkpoints) or checkpoints is None else Checkpoints(Path(checkpoints))
    watching = [observers] if isinstance(observers, Observer) else list(observers)
    member = Member(run, averages, trace, folder, dict(setting or {}), observers=watching)
    return train_together(
        [member],
        data,
        n_steps,
        checkpoint_every=checkpoint_every,
        resume=resume,
        budget=budget,
        progress=progress,
        extra=extra,
    )


def train_together(
    members: Sequence[Member],
    data: Any,
    n_steps: int,
    *,
    checkpoint_every: int = 1000,
    resume: bool = True,
    budget: float | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    extra: Any = None,
) -> Outcome:
    """`train` for several runs on the same batches, side by side in one captured step; each ends as it would alone.

    They go on from the newest step that all of them have a checkpoint of. A member whose energy becomes NaN is left behind, with
    the reason in its `failure`; the others go on. If none is left, or there was only one, it is raised.
    """
    for name, value in (("n_steps", n_steps), ("checkpoint_every", checkpoint_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgumentError(f"{name} must be a whole number >= 1, got {value!r}")
    if not all(isinstance(member, Member) for member in members):
        raise InvalidArgumentError("train_together takes members: [torchrex.Member(run, ...), ...]")
    if len({member.checkpoints is None for member in members}) > 1:
        raise InvalidArgumentError("give checkpoints to all members or to none")
    loop = _Loop(members, data, extra)
    if loop.saves:
        loop.resume() if resume else loop.require_nothing_later()
    if loop.n_steps > n_steps:
        raise InvalidArgumentError(f"the run stands at step {loop.n_steps} already, beyond n_steps={n_steps}, which is the total")
    began = time.monotonic()
    earlier, first = loop.seconds, loop.n_steps

    def elapsed() -> float:
        return earlier + time.monotonic() - began

    def outcome(status: str, number: int | None = None) -> Outcome:
        loop.seconds = elapsed()
        loop.save()
        loop.status = status
        return Outcome(status, number, loop.seconds, loop.n_steps - first)

    stretch = 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.observed(n_steps, [LiveDisplay()] if progress is True else []))
        received = stack.enter_context(stopping_signals())
        if loop.saves and not loop.has_checkpoints():
            loop.save()  # so that a crash before the first one has somewhere to go back to, and the stores of draws with it
        while loop.n_steps < n_steps:
            due = [n_steps, *(_next_draw(average, loop.n_steps) for average in loop.averages())]
            if loop.saves:
                due.append((loop.n_steps // checkpoint_every + 1) * checkpoint_every)
            looked = time.monotonic()
            here = min(stretch, min(due) - loop.n_steps)
            loop.advance(here)
            if callable(progress):
                progress(loop.n_steps, n_steps)
            if received:
                return outcome("interrupted", received[0])
            if budget is not None and time.monotonic() - began >= budget and loop.n_steps < n_steps:
                return outcome("paused")
            if loop.saves and loop.n_steps % checkpoint_every == 0 and loop.n_steps < n_steps:
                loop.seconds = elapsed()
                loop.save()
            took = time.monotonic() - looked
            stretch = max(1, int(here * min(2.0, SECONDS_BETWEEN_LOOKS / max(took, 1e-9))))
        loop.require_finite()
        return outcome("finished", received[0] if received else None)


class _Loop:
    """The things that go on together, and are saved and restored together."""

    def __init__(self, members: Sequence[Member], data: Any, extra: Any) -> None:
        self.members, self.data, self.extra = list(members), data, extra
        runs = [member.run for member in members]
        self.together = runs[0].alone if len(runs) == 1 else SideBySide(runs)
        self.saves = members[0].checkpoints is not None
        self.seconds = 0.0
        self.status = "failed"  # unless it ends otherwise
        self._watching: dict[int, tuple[Watched, list[Observer]]] = {}  # by the member's id

    @property
    def going(self) -> list[Member]:
        return [member for member in self.members if member.failure is None]

    @property
    def n_steps(self) -> int:
        return self.going[0].run.n_steps

    def averages(self) -> list[PosteriorAverage]:
        return [average for member in self.going for average in member.averages]

    def has_checkpoints(self) -> bool:
        return any(member.checkpoints is not None and member.checkpoints.steps() for member in self.members)

    # Who watches

    @contextlib.contextmanager
    def observed(self, n_steps: int, more: Sequence[Observer]) -> Iterator[None]:
        """Tell the observers of every member, and some more of all of them, where it begins and how it ends."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._end_all)
            for member in self.members:
                watched = Watched(_recipe_of(member), member.run, n_steps, tuple(member.averages))
                _, told = self._watching[id(member)] = (watched, [])
                for observer in (*member.observers, *more):
                    if not isinstance(observer, Observer):
                        raise InvalidArgumentError(f"observers must derive from torchrex.recording.Observer, got {observer!r}")
                    observer.on_start(watched)
                    told.append(observer)
            try:
                yield
            except KeyboardInterrupt:
                self.status = "interrupted"
                raise

    def _end_all(self) -> None:
        with contextlib.ExitStack() as ends:  # every one of them, even if another fails
            for member in reversed(self.members):
                ends.callback(self._end, member, self.status)

    def _end(self, member: Member, status: str) -> None:
        if id(member) in self._watching:
            watched, told = self._watching.pop(id(member))
            with contextlib.ExitStack() as ends:
                for observer in reversed(told):
                    ends.callback(observer.on_end, watched, status)

    def _is_watched(self, member: Member) -> bool:
        return bool(self._watching.get(id(member), (None, []))[1])

    def _tell(self, member: Member, what: str, *more: Any) -> None:
        watched, told = self._watching.get(id(member), (None, []))
        for observer in told:
            getattr(observer, what)(watched, *more)

    # What happens

    def advance(self, n_steps: int) -> None:
        try:
            for infos in self.together.advance(n_steps, self.data, self.extra):
                for member, info in zip(self.members, infos, strict=True):
                    if info is None:
                        continue
                    here = on_host(info) if self._is_watched(member) else info
                    if member.trace is not None:
                        member.trace.record(here)
                    self._tell(member, "on_steps", here)
        except NonFiniteEnergyError as failure:
            raise failure.with_checkpoint(self._newest(self.members[0])) from None
        except torch.OutOfMemoryError:
            raise self._out_of_memory() from None
        for k, reason in self.together.failures.items():
            self._leave_behind(self.members[k], reason)
        for member in self.going:
            self._draw(member)

    def _draw(self, member: Member) -> None:
        try:
            for average in member.averages:
                if average.update(member.run):
                    self._tell(member, "on_draw", average)
        except InvalidArgumentError:
            failure = self._broken(member.run)
            if failure is None:
                raise
            self._leave_behind(member, failure)  # its last move went nowhere, before an energy could tell

    def _leave_behind(self, member: Member, failure: NonFiniteEnergyError) -> None:
        """A member that failed; if it was the last, this is the end."""
        if member.failure is None:
            member.failure = failure.with_checkpoint(self._newest(member))
            if not self.going:
                raise member.failure
            self._end(member, "failed")
            logger.warning("%s is left behind, the others go on: %s", _name_of(member), member.failure)

    def _out_of_memory(self) -> DeviceError:
        replicas = sum(member.run.n_rungs for member in self.members)
        size = getattr(self.data, "batch_size", None)
        newest = self._newest(self.members[0])
        kept = f"; the state of {newest.name} is saved, and --resume goes on from it" if newest is not None else ""
        return DeviceError(
            f"the device has not enough memory for {replicas} replicas in {len(self.members)} runs side by side"
            f"{'' if size is None else f' on batches of {size}'}; train fewer together, or lower the batch size or the number "
            f"of rungs{kept}"
        )

    def require_finite(self) -> None:
        """The last move is not followed by an energy that would tell."""
        for member in self.going:
            failure = self._broken(member.run)
            if failure is not None:
                self._leave_behind(member, failure)

    @staticmethod
    def _broken(run: ModuleExchange) -> NonFiniteEnergyError | None:
        """What is wrong with weights that are not finite, unless the run will heal them."""
        finite = run.ensemble.position.isfinite().all(1).tolist()
        if all(finite) or run.heals:
            return None
        replica = finite.index(False)
        rung = next(rung for rung in range(run.n_rungs) if run.replica_at(rung) == replica)
        return NonFiniteEnergyError(replica=replica, rung=rung, run=0, step=run.n_steps, value=float("nan"), advice=LOWER_IT)

    @staticmethod
    def _newest(member: Member) -> Path | None:
        steps = [] if member.checkpoints is None else member.checkpoints.steps()
        return member.checkpoints.path_of(steps[-1]) if member.checkpoints is not None and steps else None

    def require_nothing_later(self) -> None:
        """A run that begins anew must not leave its checkpoints before those of another, which would be taken for the newest."""
        for member in self.members:
            assert member.checkpoints is not None
            later = [step for step in member.checkpoints.steps() if step > member.run.n_steps]
            if later:
                raise CheckpointError(
                    f"{member.checkpoints.folder} holds checkpoints up to step {later[-1]}; resume from them, or give another "
                    f"folder"
                )

    def save(self) -> None:
        """Save all of it. Weights that are not finite are worth no checkpoint, unless the run will heal them."""
        for member in self.going:
            if member.checkpoints is None:
                continue
            run = member.run
            if not run.heals and not bool(run.ensemble.position.isfinite().all()):
                logger.warning("no checkpoint at step %d, because weights are not finite", run.n_steps)
                continue
            self._tell(member, "on_save")
            state = run.state_dict()
            state = {
                "replicas": state.pop("replicas"),
                "run": state,
                "averages": [average.state_dict() for average in member.averages],
                "trace": None if member.trace is None else member.trace.state_dict(),
                "data": _position_of(self.data),
                "extra": _position_of(self.extra),
                "seconds": self.seconds,
            }
            member.checkpoints.save(run.n_steps, state, setting=_setting_of(member))
            for average in member.averages:
                if average.store is not None:
                    average.store.commit(oldest=member.checkpoints.steps()[0])

    def resume(self) -> None:
        """Go on from the newest step of which every member has a checkpoint that is whole, if there is one."""
        found = self._newest_common()
        if found is None:
            for member in self.members:
                for average in member.averages:
                    if average.store is not None and average.store.n_seen:
                        assert member.checkpoints is not None
                        raise CheckpointError(
                            f"{average.store.folder} holds draws of another run, for there is no checkpoint in "
                            f"{member.checkpoints.folder}; give another folder for the draws, or the folder of their checkpoints"
                        )
            return
        for member, checkpoint in zip(self.members, found, strict=True):
            state = checkpoint.state
            if len(state["averages"]) != len(member.averages) or (state["trace"] is None) != (member.trace is None):
                raise CheckpointError(
                    f"{checkpoint.path} was written with other averages or traces; give the same ones, or another folder"
                )
            member.run.load_state_dict({**state["run"], "replicas": state["replicas"]})
            for average, saved in zip(member.averages, state["averages"], strict=True):
                average.load_state_dict(saved)
            if member.trace is not None:
                member.trace.load_state_dict(state["trace"])
        state = found[0].state  # the position in the data is the same for all
        # That in the extra batches is known to members that take some; one that trained apart from them has not moved there.
        measuring = [
            checkpoint.state
            for member, checkpoint in zip(self.members, found, strict=True)
            if isinstance(member.run.rules.noise.feed, RepeatedDraws)
        ]
        for source, saved in ((self.data, state["data"]), (self.extra, (measuring or [state])[0].get("extra"))):
            if saved is not None and hasattr(source, "load_state_dict"):
                source.load_state_dict(saved)
            elif source is not None:
                logger.warning(
                    "the data cannot restore their position, so the run goes on with a new epoch; use DeviceLoader for more"
                )
        self.seconds = float(state["seconds"])

    def _newest_common(self) -> list[Checkpoint] | None:
        folders = [member.checkpoints for member in self.members if member.checkpoints is not None]
        common = set.intersection(*(set(folder.steps()) for folder in folders))
        if not common and len(folders) > 1 and self.has_checkpoints():
            raise CheckpointError(
                f"the runs have no checkpoint of the same step: {', '.join(str(folder.steps()[-1:]) for folder in folders)}; "
                f"go on with each by itself"
            )
        among = None if len(folders) == 1 else common  # one alone may fall back to a checkpoint that was about to be replaced
        while True:
            found = [
                folder.load_newest(setting=_setting_of(member), among=among)
                for folder, member in zip(folders, self.members, strict=True)
            ]
            whole = [checkpoint for checkpoint in found if checkpoint is not None]
            if len(whole) < len(found):
                return None
            oldest = min(checkpoint.step for checkpoint in whole)
            if all(checkpoint.step == oldest for checkpoint in whole):
                return whole
            among = {step for step in common if step <= oldest}  # one was damaged: all go back to where it is whole


def _setting_of(member: Member) -> dict[str, Any]:
    return {**member.setting, **member.run.setting, "seed": member.run.streams.seed}


def _recipe_of(member: Member) -> str:
    return str(member.setting.get("recipe", "a run"))


def _name_of(member: Member) -> str:
    return f"{_recipe_of(member)} with seed {member.run.streams.seed}"


def _position_of(data: Any) -> Any:
    return data.state_dict() if hasattr(data, "state_dict") else None


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
