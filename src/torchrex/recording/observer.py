"""Observers: who looks at a run while it goes, and what they get.

Everything they see was copied to the host between two stretches of steps, once for all of them and
the trace. Nothing here waits for a device inside a step, and no observer can change a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.exchange import Ladder, ReplicaExchange, StepInfo
from torchrex.posterior import PosteriorAverage
from torchrex.recording.trace import Trace


@dataclass(frozen=True, eq=False)
class Watched:
    """A run as observers know it; `run.n_steps` is its present step."""

    name: str
    run: ReplicaExchange
    n_steps: int  # where it will end
    averages: tuple[PosteriorAverage, ...] = ()
    swaps_before: tuple[tuple[int, int], ...] | None = None  # made and tested by pair, if known

    def number_of(self, average: PosteriorAverage) -> int:
        """Which of the run's averages this one is."""
        return next((k for k, one in enumerate(self.averages) if one is average), 0)

    @property
    def ladder(self) -> Ladder:
        return self.run.rules.ladder

    @property
    def seed(self) -> int:
        return self.run.streams.seed

    def rungs_at(self, step: int) -> tuple[list[float], list[float]]:
        """Temperatures and learning rates of a step, counted from 0."""
        table = self.ladder.table(max(0, step), 1, device=torch.device("cpu"), dtype=torch.float64)
        return table[0][0].tolist(), table[1][0].tolist()


def counted_so_far(trace: Trace | None, n_steps: int) -> tuple[tuple[int, int], ...] | None:
    """For `swaps_before`: the counts of a trace, or None if it did not see all `n_steps`."""
    if trace is None or trace.n_steps != n_steps or n_steps == 0:
        return None
    return tuple((int(pair["accepted"]), int(pair["proposed"])) for pair in trace.swaps())


def on_host(infos: StepInfo) -> StepInfo:
    return StepInfo(*(values.cpu() for values in infos))


def metrics_of(average: PosteriorAverage, rung: int | None = 0) -> dict[str, float]:
    """Accuracy and the other metrics, or nothing where the data have no labels."""
    try:
        return average.metrics(rung)
    except InvalidArgumentError:
        return {}


class Observer:
    """Base of all observers: override what you want to know. One object may watch several runs.

    `on_start` and `on_end` come once for each run, whatever happens in between; `on_save` comes
    just before a checkpoint.
    """

    def on_start(self, watched: Watched) -> None:
        """The run goes on from `watched.run.n_steps`: 0, or the step of its checkpoint."""

    def on_steps(self, watched: Watched, infos: StepInfo) -> None:
        """Steps up to `watched.run.n_steps`, stacked along the first axis, on the host."""

    def on_draw(self, watched: Watched, average: PosteriorAverage) -> None:
        """An average took a draw."""

    def on_save(self, watched: Watched) -> None:
        """A checkpoint of this step is about to be written: a resumed run may go on from here."""

    def on_end(self, watched: Watched, status: str) -> None:
        """The run is "finished", "paused", "interrupted" or "failed"."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


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


def join(parts: list[StepInfo], last: int) -> Window:
    """Consecutive steps up to number `last` as one window."""
    columns = {
        name: torch.cat([getattr(part, name)[..., 0] for part in parts])
        for name in Window._fields[2:]
    }
    return Window(last - len(columns["energy"]) + 1, last, **columns)


class Windows:
    """Cuts the steps of a run into windows that end at multiples of `every`."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._parts: list[StepInfo] = []
        self._last = 0

    def add(self, infos: StepInfo, last: int) -> Iterator[Window]:
        """Take in steps up to number `last`; gives the windows that are full now."""
        before = done = last - len(infos.energy)
        while done < last:
            end = min(last, (done // self.every + 1) * self.every)
            rows = slice(done - before, end - before)
            self._parts.append(StepInfo(*(values[rows] for values in infos)))
            self._last = done = end
            if done % self.every == 0:
                yield from self.rest()

    def rest(self) -> Iterator[Window]:
        """The window that is not full yet, if it holds anything."""
        if self._parts:
            parts, self._parts = self._parts, []
            yield join(parts, self._last)
