"""TensorBoard: scalars and histograms of a run, by rung, by replica and by pair of rungs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchrex.errors import InvalidArgumentError, MissingDependencyError
from torchrex.exchange import StepInfo
from torchrex.recording.observer import (
    Average,
    Observer,
    Watched,
    Window,
    Windows,
    metrics_of,
    values_at,
)

FOLDER = "tensorboard"
HISTOGRAMS_EVERY = (
    10  # windows: a histogram of few energies says little and takes ten times the room of a scalar
)


class TensorBoard(Observer):
    """Writes event files of one run into a folder, a point every `every` steps.

    Rungs are temperatures and replicas are walkers: after a swap `replica/0` goes on where its
    weights went, `rung/0` where the coldest temperature is. A resumed run hides the points beyond
    its checkpoint, and its swaps are counted on from there; if its steps before were not logged
    here, the name of the count says since when it counts.
    """

    def __init__(self, folder: Path | str, *, every: int = 100) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidArgumentError(f"every must be a whole number >= 1, got {every!r}")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingDependencyError(
                "the log tensorboard needs that package: pip install 'torchrex[log]'"
            ) from None
        self.folder, self.every = Path(folder), every
        self._make = SummaryWriter
        self._writer: Any = None
        self._watched: Watched | None = None

    def on_start(self, watched: Watched) -> None:
        if self._watched is not None:
            raise InvalidArgumentError(
                f"{self.folder} is the log of {self._watched.name} already; give each run its own TensorBoard"
            )
        step = watched.run.n_steps
        self._watched, self._windows, self._n = watched, Windows(self.every), 0
        self._held: list[Window] = []
        self._counting, counts = _swaps_so_far(self.folder, step, watched.ladder.n_pairs)
        self._swaps = torch.tensor(counts, dtype=torch.int64)
        # A point stands at the number of steps done. At 0 everything that was there before is
        # hidden.
        self._writer = self._make(str(self.folder), purge_step=step + 1 if step else 0)
        self._writer.add_text("run", f"{watched.name}, seed {watched.seed}, {watched.run!r}", step)

    def on_steps(self, watched: Watched, infos: StepInfo) -> None:
        for window in self._windows.add(infos, watched.run.n_steps):
            self._sum_up(watched, window)

    def on_draw(self, watched: Watched, average: Average) -> None:
        number = watched.number_of(average)
        head = f"average_{number}" if number else "average"
        self._writer.add_scalar(f"{head}/n_draws", average.n_draws, watched.run.n_steps)
        for rung in (*average.rungs, None) if len(average.rungs) > 1 else average.rungs:
            for name, value in metrics_of(average, rung).items():
                where = "all_rungs" if rung is None else f"rung_{rung}"
                self._writer.add_scalar(f"{head}/{name}/{where}", value, watched.run.n_steps)

    def on_save(self, watched: Watched) -> None:
        self._rest(watched)
        self._writer.flush()

    def on_end(self, watched: Watched, status: str) -> None:
        if self._writer is None:
            return
        try:
            self._rest(watched)
            self._histograms()
        finally:
            self._writer.close()
            self._writer, self._watched = None, None

    def _rest(self, watched: Watched) -> None:
        for window in self._windows.rest():
            self._sum_up(watched, window)

    def _sum_up(self, watched: Watched, window: Window) -> None:
        def put(name: str, values: list[float]) -> None:
            for k, value in enumerate(values):
                self._writer.add_scalar(f"{name}_{k}", value, window.last)

        temperature, lr = values_at(watched.ladder, window.last - 1)
        put("energy/rung", window.energy.mean(0).tolist())
        put("temperature/rung", temperature)
        put("lr/rung", lr)
        if watched.ladder.n_pairs:
            put("energy/replica", _by_replica(window).mean(0).tolist())
            put("rung_of/replica", window.replica_at[-1].argsort().tolist())
            made, tested = window.accepted.sum(0), window.proposed.sum(0)
            self._swaps += made
            put(f"{self._counting}/pair", self._swaps.tolist())
            for pair, (some, all_) in enumerate(zip(made.tolist(), tested.tolist(), strict=True)):
                if all_:
                    self._writer.add_scalar(
                        f"acceptance_rate/pair_{pair}", some / all_, window.last
                    )
            put("sigma2/pair", window.noise_variance[-1].tolist())
            put("correction/pair", window.correction[-1].tolist())
        self._held.append(window)
        if len(self._held) == HISTOGRAMS_EVERY:
            self._histograms()

    def _histograms(self) -> None:
        """Of single steps: energies by rung, and by pair the difference that a swap needs to exceed
        its correction.
        """
        if not self._held:
            return
        last = self._held[-1].last
        energy, correction = (
            torch.cat([getattr(window, name) for window in self._held])
            for name in ("energy", "correction")
        )
        self._held = []
        excess = energy[:, :-1] - energy[:, 1:] - correction
        for name, values in (("energy/rung", energy), ("difference_minus_correction/pair", excess)):
            for k, column in enumerate(values.unbind(1)):
                column = column[column.isfinite()]
                if len(column):
                    self._writer.add_histogram(f"{name}_{k}", column, last)

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r}, every={self.every})"


def _by_replica(window: Window) -> torch.Tensor:
    """Energies (steps, replicas). They were taken before the swaps of their step, the standings are
    those after it.
    """
    stood = window.replica_at.clone()
    for pair in range(
        window.accepted.shape[1]
    ):  # the swaps of a step are of disjoint pairs, so the order does not matter
        made = window.accepted[:, pair, None].bool()
        stood[:, pair : pair + 2] = torch.where(
            made, stood[:, pair : pair + 2].flip(1), stood[:, pair : pair + 2]
        )
    return torch.empty_like(window.energy).scatter_(1, stood.long(), window.energy)


def _swaps_so_far(folder: Path, step: int, n_pairs: int) -> tuple[str, list[int]]:
    """What the count of swaps is called, and where it stands at a step.

    A checkpoint knows them only if the run keeps a trace. The events always do: every checkpoint
    ends a window and is written after its points, so there is one at just this step, unless the
    steps before were not logged here.
    """
    counts: dict[str, dict[str, float]] = {}  # by the count's name, then by tag
    for event in _events(folder) if step else ():
        if (
            event.HasField("session_log")
            and event.session_log.status == event.session_log.START
            and event.step <= step
        ):
            counts = {}  # a run that began before this step hides what stood here
        for value in event.summary.value if event.step == step else ():
            if value.tag.startswith("swaps"):
                counts.setdefault(value.tag.partition("/")[0], {})[value.tag] = value.simple_value
    for name, found in counts.items():
        tags = [f"{name}/pair_{pair}" for pair in range(n_pairs)]
        if set(tags) <= set(found):
            return name, [round(found[tag]) for tag in tags]
    return f"swaps_since_step_{step}" if step else "swaps", [0] * n_pairs


def _events(folder: Path) -> Iterator[Any]:
    """All events of a folder in the order in which they were written, each file up to where it is
    damaged.
    """
    loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    for path in sorted(
        folder.glob("events.out.tfevents.*")
    ):  # TensorBoard's order: by the second they were made in
        yield from loader.LegacyEventFileLoader(str(path)).Load()
