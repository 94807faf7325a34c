"""Several runs on the same batches, side by side in one captured step; a run by itself is the case
of one.

Runs share the data, their order and their augmentation, and nothing else: each is, number for
number, the run it would be alone. One replica of a small network does not fill a large GPU, and
neither do two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchrex.errors import InvalidArgumentError, NonFiniteEnergyError
from torchrex.exchange.algorithm import StepInfo
from torchrex.exchange.noise import (
    PerExample,
    RepeatedDraws,
    require_two_examples,
    warn_of_one_example,
    warn_of_shape,
)
from torchrex.exchange.run import joined, require_every
from torchrex.network.batches import batches_of, require_same_everywhere, try_batch, warn_of_size
from torchrex.network.capture import Captured
from torchrex.network.graphs import Graphs
from torchrex.network.work import size_of
from torchrex.targets import Batch, DeviceLoader, Twice

if TYPE_CHECKING:
    from torchrex.network.run import ModuleExchange

BATCHES_LOOKED_AT = 8  # for the shape of the noise, at the end of a run
BLOCK = 256  # steps whose exchange inputs are drawn at once; part of the random stream


class SideBySide:
    """Runs on networks (`ModuleExchange`) that go on together.

    A run whose energy becomes NaN is left out from then on, with the reason in `failures`, and the
    others go on; a run by itself raises it.
    """

    def __init__(self, runs: Sequence[ModuleExchange]) -> None:
        if not runs:
            raise InvalidArgumentError("give at least one run, got none")
        if len(set(map(id, runs))) < len(runs):
            raise InvalidArgumentError("the same run was given twice; make another ModuleExchange")
        devices = sorted({str(run.device) for run in runs})
        if len(devices) > 1:
            raise InvalidArgumentError(
                f"runs side by side must be on one device, got {', '.join(devices)}"
            )
        if len(runs) > 1 and not all(run.ensemble.shares_minibatch for run in runs):
            raise InvalidArgumentError(
                "runs side by side share every batch; make their ensembles with shared_batches=True"
            )
        feeds = [(run.rules.noise.first_measurement, run.rules.noise.feed) for run in runs]
        rhythms = {
            (first, feed.every, feed.n_draws)
            for first, feed in feeds
            if isinstance(feed, RepeatedDraws)
        }
        if len(rhythms) > 1:
            raise InvalidArgumentError(
                f"runs side by side measure repeated energies at the same steps, got (first, every, n_draws) {sorted(rhythms)}"
            )
        self.runs = list(runs)
        self.failures: dict[int, NonFiniteEnergyError] = {}
        self.graphs: Graphs | None = None
        self._device = runs[0].device
        self._feeding: tuple[Any, Any, Callable[[], Batch], Callable[[], Batch]] | None = None
        self._twice = (
            False  # does the loader augment the examples of a step a second time, see `Twice`?
        )
        self._last_batch: Batch | None = None  # of data that are not on the device as a whole
        self._batch_tried = False
        self._first_of_one = False  # had the first batch one example?
        self._compared = False  # with what the other processes see

    def begin_data_anew(self) -> None:
        """Forget the position in data that cannot keep their own."""
        self._feeding = None

    def step(self, batch: Any) -> StepInfo:
        """One step of the only run on a batch."""
        (run,) = self.runs
        with run.ensemble.own_work():
            (info,) = self._step(run.to_device(batch))
        if info is not None:
            return info
        assert run.records is not None
        row = (run.n_steps - 1) % BLOCK
        return StepInfo(*(values[0] for values in run.records.read(row, row + 1)))

    def advance(
        self, n_steps: int, data: Any = None, extra: Any = None, *, every: int | None = None
    ) -> Iterator[list[StepInfo | None]]:
        """`n_steps` steps of all runs; yields up to 256 at a time, for each run its information, or
        None if it has failed.

        With `every` it yields whenever the number of steps is a multiple of it, and at the end.
        Batches for repeated energies come from `extra`, else from `data`.
        """
        require_every(every)
        if n_steps < 0:
            raise InvalidArgumentError(f"n_steps must be at least 0, got {n_steps}")
        if data is None:
            raise InvalidArgumentError("a run on a module needs data: run.advance(n_steps, loader)")
        steps = {run.n_steps for k, run in enumerate(self.runs) if k not in self.failures}
        if len(steps) > 1:
            raise InvalidArgumentError(
                f"runs side by side must stand at the same step, got {sorted(steps)}"
            )
        measuring = [isinstance(run.rules.noise.feed, RepeatedDraws) for run in self.runs]
        if extra is None and any(measuring) and not all(measuring):
            raise InvalidArgumentError(
                "some of the runs take repeated energies from the data and some do not, so that none would see the batches it "
                "sees alone; give a second loader as extra=..."
            )
        if (
            self._feeding is None or self._feeding[0] is not data or self._feeding[1] is not extra
        ):  # else they go on
            for n_data in {run.ensemble.n_data for run in self.runs}:
                warn_of_size(n_data, data)
            if isinstance(
                data, DeviceLoader
            ):  # the batch_size of others may be counted before they are put together
                for run in self.runs:
                    require_two_examples(run.rules.noise, data.batch_size)
                    if data.augment is not None:
                        run.ensemble.note_random_losses("data")
                self._twice = any(
                    run.ensemble.separates_noise_of(data.batch_size) for run in self.runs
                )
            n_at_once = 1 if self.runs[0].ensemble.shares_minibatch else self.runs[0].n_rungs
            following = batches_of(data, n_at_once, twice=self._twice)
            self._feeding = (
                data,
                extra,
                following,
                following if extra is None else batches_of(extra, n_at_once),
            )
        _, _, next_batch, next_extra = self._feeding
        try:
            yield from self._advance(
                n_steps, data, data if extra is None else extra, next_batch, next_extra, every
            )
        except GeneratorExit:
            raise
        except BaseException:
            self._feeding = None  # data that failed in the middle begin anew
            raise

    def _advance(
        self,
        n_steps: int,
        data: Any,
        extra: Any,
        next_batch: Callable[[], Batch],
        next_extra: Callable[[], Batch],
        every: int | None,
    ) -> Iterator[list[StepInfo | None]]:
        remaining = n_steps
        parts: list[list[StepInfo | None]] = []
        while remaining > 0 and len(self.failures) < len(self.runs):
            now = next(run.n_steps for k, run in enumerate(self.runs) if k not in self.failures)
            stretch = min(
                remaining, BLOCK - now % BLOCK, remaining if every is None else every - now % every
            )
            with contextlib.ExitStack() as working:
                for run in self.runs:
                    working.enter_context(run.ensemble.own_work())
                infos = self._stretch(stretch, data, extra, next_batch, next_extra)
            remaining -= stretch
            parts.append(infos)
            if (
                every is None
                or (now + stretch) % every == 0
                or not remaining
                or len(self.failures) == len(self.runs)
            ):
                whole = [
                    [info for info in of_run if info is not None]
                    for of_run in zip(*parts, strict=True)
                ]
                yield [
                    None if k in self.failures else joined(whole[k]) for k in range(len(self.runs))
                ]
                parts = []

    def _stretch(
        self,
        n_steps: int,
        data: Any,
        extra: Any,
        next_batch: Callable[[], Batch],
        next_extra: Callable[[], Batch],
    ) -> list[StepInfo | None]:
        """Steps of one block; of each run what it did."""
        eager: list[list[StepInfo]] = [[] for _ in self.runs]
        for _ in range(n_steps):
            self._measure_if_due(extra, next_extra)
            if self._step_inside(data):
                continue
            batch = self.runs[0].to_device(next_batch())
            for k, info in enumerate(self._step(batch)):
                if info is not None and self.runs[k].records is None:
                    self._look(k, StepInfo(*(values[None] for values in info)), batch)
                    eager[k].append(info)
        return [self._information(k, eager[k], n_steps) for k in range(len(self.runs))]

    def _information(self, k: int, eager: list[StepInfo], stretch: int) -> StepInfo | None:
        """What a run did in the stretch that is over."""
        run = self.runs[k]
        if k in self.failures:
            return None
        if run.records is None:
            return StepInfo(*(torch.stack(values) for values in zip(*eager, strict=True)))
        last = (run.n_steps - 1) % BLOCK + 1
        block = run.records.read(last - stretch, last)
        # Respawning happens at the ends of blocks only, wherever a run was stopped in between.
        if last == BLOCK or not run.can_respawn:
            self._look(k, block)
        return None if k in self.failures else block

    def _look(self, k: int, infos: StepInfo, batch: Batch = None) -> None:
        try:
            self.runs[k].look(infos, batch)
        except NonFiniteEnergyError as failure:
            if len(self.runs) == 1:
                raise
            self.failures[k] = failure

    def warn_of_noise_shapes(self) -> None:
        """Warn of runs whose energy noise is not Gaussian, by the batches that come next, which
        stay the next ones.
        """
        data = None if self._feeding is None else self._feeding[0]
        batches = [] if self._last_batch is None else [self._last_batch]
        if isinstance(data, DeviceLoader):
            position = data.state_dict()
            following = batches_of(
                data, 1 if self.runs[0].ensemble.shares_minibatch else self.runs[0].n_rungs
            )
            batches = [following() for _ in range(BATCHES_LOOKED_AT)]
            data.load_state_dict(position)
        for k, run in enumerate(self.runs):
            if (
                not batches or k in self.failures or run.rules.ladder.anneal is not None
            ):  # annealed runs sample nothing
                continue
            shape = run.noise_shape(*batches)
            if run.mesh.process_group.is_main:
                warn_of_shape(shape, run.correction_factor[:, 0])

    # One step

    def _step(self, batch: Batch) -> list[StepInfo | None]:
        """One step of each run on a batch that is on the device; None where it was captured and is
        in the records.
        """
        if isinstance(batch, Twice):
            for run in self.runs:
                run.ensemble.note_random_losses("data")
        self._try_batch(batch)
        self._last_batch, first = batch, self.runs[0]
        if (
            first.n_steps % BLOCK == 0 or not self._compared
        ):  # loaders may begin alike and part later
            require_same_everywhere(
                first.mesh.process_group, [run.streams.seed for run in self.runs], batch
            )
            self._compared = True
        graphs = self._captured()
        graph = None if graphs is None else graphs.for_batch(batch)
        if graph is not None:
            self._replay(graph)
            return [None] * len(self.runs)
        going = [run for k, run in enumerate(self.runs) if k not in self.failures]
        if (
            graphs is not None and len(self.runs) > 1
        ):  # what cannot be captured together may be captured alone
            done = {id(run): run.alone._step(batch)[0] for run in going}
        else:
            done = {id(run): run.eager_step(batch) for run in going}
        return [done.get(id(run)) for run in self.runs]

    def _step_inside(self, data: Any) -> bool:
        """One captured step that takes its batch from a DeviceLoader by itself; False if that
        cannot be done.
        """
        graphs = self._captured()
        if graphs is None or not self._is_here(data):
            return False
        if not self._batch_tried:
            position = data.state_dict()
            self._try_batch(data.next())
            data.load_state_dict(position)
        size = data.prepare()
        graph = graphs.for_loader(data, size, twice=self._twice)
        if graph is None:
            return False
        self._replay(graph)
        data.advanced(size)
        return True

    def _measure_if_due(self, extra: Any, next_extra: Callable[[], Batch]) -> None:
        """Repeated energies, where it is time for them: from one captured pass over a loader's
        batch, or eagerly.
        """
        # A run that failed stays in the graph: without it there would be another one to compile and
        # to capture.
        measuring = {
            k: run
            for k, run in enumerate(self.runs)
            if isinstance(run.rules.noise.feed, RepeatedDraws)
        }
        going = {k: run for k, run in measuring.items() if k not in self.failures}
        if not going:
            return
        first = next(iter(going.values()))  # all have the same rhythm
        feed = first.rules.noise.feed
        assert isinstance(feed, RepeatedDraws)
        if first.n_steps < first.rules.noise.first_measurement or first.n_steps % feed.every:
            return
        n_draws = feed.n_draws
        graphs = self._captured()
        size = extra.prepare() if graphs is not None and self._is_here(extra) else 0
        graph = (
            None
            if graphs is None or not size
            else graphs.energies(extra, size, [run.ensemble for run in measuring.values()])
        )
        if graph is None:
            batches = [next_extra() for _ in range(n_draws)]
            for run in going.values():
                run.measure(batches)
            return
        repeated: list[list[torch.Tensor]] = []
        for _ in range(n_draws):
            if extra.prepare() != size:
                raise InvalidArgumentError(
                    'repeated energies need batches of one size; make their loader with last="drop" or "wrap"'
                )
            with self.runs[0].forward:
                graph.replay()
            extra.advanced(size)
            repeated.append([energy.clone() for energy in graph.energies])
        for k, energies in zip(measuring, zip(*repeated, strict=True), strict=True):
            if k in going:
                going[k].learn_variance(torch.stack(energies))

    def _replay(self, graph: Captured) -> None:
        for run in self.runs:
            run.prepare()
        with self.runs[0].forward:  # of several runs none draws anything there, see `CapturedStep`
            graph.replay()
        for run in self.runs:
            run.n_steps += 1

    def _captured(self) -> Graphs | None:
        if not all(run.capturing for run in self.runs):
            return None
        if self.graphs is None:
            deterministic = any(run.deterministic for run in self.runs)
            workings = [run.workings() for run in self.runs]
            self.graphs = Graphs(workings, self.runs[0].forward, deterministic=deterministic)
        return self.graphs

    def _is_here(self, data: Any) -> bool:
        """Can a captured step take its batches from these data?"""
        here = isinstance(data, DeviceLoader) and data.cursor.device == self._device
        return here and self.runs[0].ensemble.shares_minibatch

    def _try_batch(self, batch: Batch) -> None:
        if not self._batch_tried:
            sizes = [try_batch(run.ensemble, batch, run.forward) for run in self.runs]
            self._batch_tried, self._first_of_one = True, max(sizes) == 1
        elif self._first_of_one:  # two in a row: a single one may be the rest of an epoch
            self._first_of_one = False
            blind = next(
                (run for run in self.runs if isinstance(run.rules.noise.feed, PerExample)), None
            )
            if blind is not None and size_of(batch) == 1 and blind.mesh.process_group.is_main:
                warn_of_one_example(blind.rules.noise)

    def __repr__(self) -> str:
        return f"SideBySide({len(self.runs)} runs, {sum(run.n_rungs for run in self.runs)} replicas, step {self.runs[0].n_steps})"
