"""Observers: who looks at a run while it goes, and what they get; and the trace of a run.

Everything they see was copied to the host between two stretches of steps, once for all of them and
the trace. Nothing here waits for a device inside a step, and no observer can change a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrex import notebook
from torchrex.errors import InvalidArgumentError, require_whole
from torchrex.exchange import Ladder, ReplicaExchange, StepInfo
from torchrex.posterior import PosteriorAverage


@dataclass(frozen=True, eq=False)
class Watched:
    """A run as observers know it; `run.n_steps` is its present step."""

    name: str
    run: ReplicaExchange
    n_steps: int  # where it will end
    averages: tuple[PosteriorAverage, ...] = ()
    setting: Mapping[str, Any] = field(default_factory=dict)  # of the run, as in its checkpoints

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


THINNED = ("energy", "noise_variance", "correction", "replica_at")


def count_swaps(accepted: Tensor, proposed: Tensor) -> list[dict[str, Any]]:
    """The swaps of each pair as in result.json, from counts (pairs,)."""
    return [
        {
            "pair": [pair, pair + 1],
            "proposed": tested,
            "accepted": made,
            "acceptance_rate": made / tested if tested else None,
        }
        for pair, (made, tested) in enumerate(
            zip(accepted.tolist(), proposed.tolist(), strict=True)
        )
    ]


class Trace:
    """Records StepInfo of consecutive steps: every `every`-th step, and the swaps of all steps."""

    def __init__(self, every: int = 1) -> None:
        require_whole("every", every, 1)
        self.every = every
        self.n_steps = 0
        names = ("steps", *THINNED, "swap_steps", "swap_pairs")
        self._parts: dict[str, list[Tensor]] = {name: [] for name in names}
        self._counts: dict[str, Tensor] = {}  # `accepted` and `proposed`, (pairs,)

    def record(self, infos: StepInfo) -> None:
        """Take in one step, or several stacked along a first axis; the last axis has size 1."""
        if infos.energy.ndim == 2:
            infos = StepInfo(*(values[None] for values in infos))
        n = len(infos.energy)
        accepted = infos.accepted[..., 0].cpu()
        for name, tests in (("accepted", accepted), ("proposed", infos.proposed[..., 0].cpu())):
            self._counts[name] = self._counts.get(name, 0) + tests.sum(0)
        steps = torch.arange(self.n_steps, self.n_steps + n)
        when, pair = accepted.nonzero(as_tuple=True)
        rows = slice(-self.n_steps % self.every, n, self.every)
        kept = {name: getattr(infos, name)[rows, ..., 0].cpu() for name in THINNED}
        kept |= {"steps": steps[rows], "swap_steps": steps[when], "swap_pairs": pair}
        for name, values in kept.items():
            self._parts[name].append(values)
        self.n_steps += n

    def tensors(self) -> dict[str, Tensor]:
        """`steps` (k,), `energy` and `replica_at` (k, rungs), `noise_variance` and `correction`
        (k, pairs); every swap as `swap_steps` and `swap_pairs`; `accepted` and `proposed` (pairs,).
        """
        if not self._counts:
            return {}
        self._parts = {name: [torch.cat(parts)] for name, parts in self._parts.items()}
        return {**{name: parts[0] for name, parts in self._parts.items()}, **self._counts}

    def swaps(self) -> list[dict[str, Any]]:
        """For each pair of rungs: proposed, accepted and the rate."""
        return count_swaps(**self._counts) if self._counts else []

    def state_dict(self) -> dict[str, Any]:
        return {"every": self.every, "n_steps": self.n_steps, "tensors": self.tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of a trace with the same `every`."""
        if state["every"] != self.every:
            raise InvalidArgumentError(f"the state is of every={state['every']}, not {self.every}")
        tensors = state["tensors"]
        names = ("accepted", "proposed") if tensors else ()
        self._counts = {name: tensors[name].clone() for name in names}
        self._parts = {name: [tensors[name]] if name in tensors else [] for name in self._parts}
        self.n_steps = int(state["n_steps"])

    def _repr_html_(self) -> str:
        sigma2, rows = self.tensors().get("noise_variance", torch.empty(0, 0)), []
        for swaps in self.swaps():
            (cold, hot), rate = swaps["pair"], swaps["acceptance_rate"]
            counts = (f"{swaps['accepted']:,}", f"{swaps['proposed']:,}")
            share = "" if rate is None else f"{100 * rate:.3g} %"
            newest = f"{float(sigma2[-1, cold]):.4g}" if len(sigma2) else ""
            rows.append((f"{cold} – {hot}", *counts, share, newest))
        head = ("rungs", "swaps accepted", "proposed", "rate", "sigma2 now")
        kept = "all" if self.every == 1 else f"one in {self.every:,}"
        table = [notebook.table(head, rows)] if rows else []
        return notebook.panel("Trace", f"{self.n_steps:,} steps, {kept} kept", *table)

    def __repr__(self) -> str:
        return f"Trace({self.n_steps:,} steps, every={self.every})"
