"""Observers: who looks at a run while it goes, and what they are told.

Everything they see was brought to the host between two stretches of steps, once for all of them and
the trace: nothing here waits for a device inside a step, and nothing an observer does can change a
number of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.exchange import Ladder, ReplicaExchange, StepInfo
from torchrex.recording.trace import Trace


@dataclass(frozen=True, eq=False)
class Watched:
    """A run as observers know it. Where it stands now is `run.n_steps`."""

    name: str
    run: ReplicaExchange
    n_steps: int  # where it will end
    averages: tuple[Any, ...] = ()
    swaps_before: tuple[tuple[int, int], ...] | None = (
        None  # made and tested of each pair before it goes on; None: not known
    )

    def number_of(self, average: Any) -> int:
        """Which of the run's averages this one is."""
        return next((k for k, one in enumerate(self.averages) if one is average), 0)

    @property
    def ladder(self) -> Ladder:
        return self.run.rules.ladder

    @property
    def seed(self) -> int:
        return self.run.streams.seed


def counted_so_far(trace: Trace | None, n_steps: int) -> tuple[tuple[int, int], ...] | None:
    """For `swaps_before`: what a trace counted in so many steps; None if there is none, or it did
    not see all of them.
    """
    if trace is None or trace.n_steps != n_steps or n_steps == 0:
        return None
    return tuple((int(pair["accepted"]), int(pair["proposed"])) for pair in trace.swaps())


class Average(Protocol):
    """What observers ask of an average after a draw."""

    @property
    def rungs(self) -> tuple[int, ...]: ...
    @property
    def n_draws(self) -> int: ...
    def metrics(self, rung: int | None = 0) -> dict[str, float]: ...


class Observer:
    """Base of all observers: override what you want to know. One object may watch several runs.

    `on_start` and `on_end` come once for each run, whatever happens in between; `on_save` comes
    just before a checkpoint.
    """

    def on_start(self, watched: Watched) -> None:
        """The run is about to go on from `watched.run.n_steps`: 0, or the step of the checkpoint it
        resumes from.
        """

    def on_steps(self, watched: Watched, infos: StepInfo) -> None:
        """Some steps, the last of them number `watched.run.n_steps`, stacked along the first axis,
        on the host.
        """

    def on_draw(self, watched: Watched, average: Any) -> None:
        """An average took a draw."""

    def on_save(self, watched: Watched) -> None:
        """A checkpoint of this step is about to be written: a resumed run may go on from here."""

    def on_end(self, watched: Watched, status: str) -> None:
        """The run is "finished", "paused", "interrupted" or "failed"."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def on_host(infos: StepInfo) -> StepInfo:
    return StepInfo(*(values.cpu() for values in infos))


def values_at(ladder: Ladder, step: int) -> tuple[list[float], list[float]]:
    """Temperatures and learning rates of a step, counted from 0."""
    temperature, lr, _ = ladder.table(step, 1, device=torch.device("cpu"), dtype=torch.float64)
    return temperature[0].tolist(), lr[0].tolist()


def metrics_of(average: Average, rung: int | None = 0) -> dict[str, float]:
    """Accuracy and the other numbers of an average, or nothing where its data have no labels or it
    leaves that rung out.
    """
    try:
        return average.metrics(rung)
    except InvalidArgumentError:
        return {}


class Window(NamedTuple):
    """Steps `first` to `last`, both counted from 1, of one run."""

    first: int
    last: int
    energy: Tensor  # (steps, rungs)
    replica_at: Tensor  # (steps, rungs)
    noise_variance: Tensor  # (steps, pairs)
    correction: Tensor  # (steps, pairs)
    accepted: Tensor  # (steps, pairs)
    proposed: Tensor  # (steps, pairs)


class Windows:
    """Cuts what a run says into windows that end at multiples of `every`, however long its
    stretches were.
    """

    def __init__(self, every: int | float) -> None:
        self.every = every  # infinity: wherever `rest` is asked for
        self._parts: list[StepInfo] = []
        self._held, self._last = 0, 0

    def add(self, infos: StepInfo, last: int) -> Iterator[Window]:
        """Take in steps up to number `last`; gives the windows that are full now."""
        n = len(infos.energy)
        taken, first = 0, last - n  # `first` steps were done before
        while taken < n:
            room = self.every - first % self.every if math.isfinite(self.every) else n
            end = min(n, taken + int(room))
            self._parts.append(
                infos if end - taken == n else StepInfo(*(values[taken:end] for values in infos))
            )
            self._held += end - taken
            first, self._last, taken = first + end - taken, first + end - taken, end
            if self._last % self.every == 0:
                yield from self.rest()

    def rest(self) -> Iterator[Window]:
        """The window that is not full yet, if it holds anything."""
        if not self._held:
            return
        fields = Window._fields[2:]
        window = {
            name: torch.cat([getattr(part, name)[..., 0] for part in self._parts])
            for name in fields
        }
        first, self._parts, self._held = self._last - self._held + 1, [], 0
        yield Window(first, self._last, **window)
