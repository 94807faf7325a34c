"""What one call of `train` drives: steps of all members, their draws, who watches them, and those
that fail on the way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrex.distributed import ProcessGroup
from torchrex.errors import DeviceError, InvalidArgumentError, NonFiniteEnergyError
from torchrex.exchange import report_pairs, warn_of_dead_pairs
from torchrex.network.divergence import LOWER_IT
from torchrex.network.members import TrainingRun, name_of, recipe_of
from torchrex.network.run import ModuleExchange
from torchrex.network.saving import newest_of, resume, save
from torchrex.network.side_by_side import SideBySide
from torchrex.posterior import PosteriorAverage
from torchrex.recording import Observer, Watched, counted_so_far, on_host

logger = logging.getLogger("torchrex")


class Loop:
    """Runs, averages, traces and observers that go on together."""

    def __init__(self, members: Sequence[TrainingRun], data: Any, extra: Any) -> None:
        self.members, self.data, self.extra = list(members), data, extra
        runs = [member.run for member in members]
        self.together = runs[0].alone if len(runs) == 1 else SideBySide(runs)
        self.saves = members[0].checkpoints is not None
        self.seconds = 0.0
        self.status = "failed"  # unless it ends otherwise
        self._swaps: dict[
            int, tuple[Tensor, ...]
        ] = {}  # by the member's id: made and tested in this call, and the last sigma2s
        self._watching: dict[int, tuple[Watched, list[Observer]]] = {}  # by the member's id

    @property
    def going(self) -> list[TrainingRun]:
        return [member for member in self.members if member.failure is None]

    @property
    def n_steps(self) -> int:
        return self.going[0].run.n_steps

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that train together."""
        return self.members[0].run.mesh.process_group

    def averages(self) -> list[PosteriorAverage]:
        return [average for member in self.going for average in member.averages]

    def save(self) -> None:
        """Save all members that are going."""
        for member in self.going:
            save(
                member,
                self.data,
                self.extra,
                self.seconds,
                about_to=partial(self._tell, member, "on_save"),
            )

    def resume(self) -> None:
        """Go on from the newest step of which every member has a checkpoint that is whole, if there
        is one.
        """
        seconds = resume(self.members, self.data, self.extra)
        self.seconds = self.seconds if seconds is None else seconds

    # Who watches

    @contextlib.contextmanager
    def observed(self, n_steps: int, more: Sequence[Observer]) -> Iterator[None]:
        """Tell the observers of every member, and some more of all of them, where it begins and how
        it ends.
        """
        with contextlib.ExitStack() as ends:
            ends.callback(self._end_all)
            for member in self.members:
                so_far = counted_so_far(member.trace, member.run.n_steps)
                watched = Watched(
                    recipe_of(member), member.run, n_steps, tuple(member.averages), so_far
                )
                _, told = self._watching[id(member)] = (watched, [])
                for observer in (*member.observers, *more) if self.process_group.is_main else ():
                    if not isinstance(observer, Observer):
                        raise InvalidArgumentError(
                            f"observers must derive from torchrex.recording.Observer, got {observer!r}"
                        )
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

    def _end(self, member: TrainingRun, status: str) -> None:
        if id(member) in self._watching:
            watched, told = self._watching.pop(id(member))
            with contextlib.ExitStack() as ends:
                for observer in reversed(told):
                    ends.callback(observer.on_end, watched, status)

    def _is_watched(self, member: TrainingRun) -> bool:
        return bool(self._watching.get(id(member), (None, []))[1])

    def _tell(self, member: TrainingRun, what: str, *more: Any) -> None:
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
                    made, tested = info.accepted.sum((0, 2)), info.proposed.sum((0, 2))
                    before, sigma2 = self._swaps.get(id(member)), info.noise_variance
                    made, tested = (
                        (made, tested) if before is None else (before[0] + made, before[1] + tested)
                    )
                    self._swaps[id(member)] = (made, tested, sigma2)
                    here = on_host(info) if self._is_watched(member) else info
                    if member.trace is not None:
                        member.trace.record(here)
                    self._tell(member, "on_steps", here)
        except NonFiniteEnergyError as failure:
            raise failure.with_checkpoint(newest_of(self.members[0])) from None
        except torch.OutOfMemoryError:
            raise self._out_of_memory() from None
        for k, reason in self.together.failures.items():
            self._leave_behind(self.members[k], reason)
        for member in self.going:
            self._draw(member)

    def _draw(self, member: TrainingRun) -> None:
        try:
            for average in member.averages:
                if average.update(member.run):
                    self._tell(member, "on_draw", average)
        except InvalidArgumentError:
            failure = self._broken(member.run)
            if failure is None:
                raise
            self._leave_behind(
                member, failure
            )  # its last move went nowhere, before an energy could tell

    def _leave_behind(self, member: TrainingRun, failure: NonFiniteEnergyError) -> None:
        """A member that failed; if it was the last, this is the end."""
        if member.failure is None:
            member.failure = failure.with_checkpoint(newest_of(member))
            if not self.going:
                raise member.failure
            self._end(member, "failed")
            logger.warning(
                "%s is left behind, the others go on: %s", name_of(member), member.failure
            )

    def _out_of_memory(self) -> DeviceError:
        replicas = sum(member.run.n_rungs for member in self.members)
        size = getattr(self.data, "batch_size", None)
        newest = newest_of(self.members[0])
        kept = (
            f"; the state of {newest.name} is saved, and --resume goes on from it"
            if newest is not None
            else ""
        )
        return DeviceError(
            f"the device has not enough memory for {replicas} replicas in {len(self.members)} runs side by side"
            f"{'' if size is None else f' on batches of {size}'}; train fewer together, or lower the batch size or the number "
            f"of rungs{kept}"
        )

    def warn_of_swaps(self) -> None:
        """Which pairs of rungs have made no swap, by the trace where it saw all steps, else in this
        call; and odd noise.
        """
        for member in self.going if self.process_group.is_main else ():
            run, seen = member.run, self._swaps.get(id(member))
            if seen is None or not run.rules.ladder.n_pairs:
                continue
            made, tested, sigma2 = seen
            counts = counted_so_far(member.trace, run.n_steps)
            if counts is not None:
                made, tested = torch.tensor(counts).view(-1, 2).T
            gap = -(1.0 / run.temperatures_at(run.n_steps - 1)).diff()
            pairs = report_pairs(
                made, tested, sigma2, inverse_gap=gap, factor=run.correction_factor[:, 0], n_runs=1
            )
            warn_of_dead_pairs(pairs, name_of(member) if len(self.members) > 1 else "")
        self.together.warn_of_noise_shapes()

    def require_finite(self) -> None:
        """The last move is not followed by an energy that would tell."""
        for member in self.going:
            failure = self._broken(member.run)
            if failure is not None:
                self._leave_behind(member, failure)

    @staticmethod
    def _broken(run: ModuleExchange) -> NonFiniteEnergyError | None:
        """What is wrong with weights that are not finite, unless the run will heal them."""
        finite = run.ensemble.finite()
        if all(finite) or run.can_respawn:
            return None
        replica = finite.index(False)
        rung = next(rung for rung in range(run.n_rungs) if run.replica_at(rung) == replica)
        failure = NonFiniteEnergyError(
            replica=replica, rung=rung, run=0, step=run.n_steps, value=float("nan"), advice=LOWER_IT
        )
        culprit = run.ensemble.what_broke(replica)
        return failure if culprit is None else failure.because(culprit)
