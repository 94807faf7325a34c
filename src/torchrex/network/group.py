"""Several runs on the same batches, in one captured step; a run by itself is the case of one.

Runs share the data, their order and their augmentation, and nothing else: each is, number for
number, the run it would be alone. One replica of a small network does not fill a large GPU, and
neither do two.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from torchrex.distributed import ProcessGroup
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
from torchrex.network.capture import RECORDED, Graph, Graphs
from torchrex.network.step import joined_energies, size_of
from torchrex.rng import derive_seed, taken
from torchrex.targets import Batch, DeviceLoader, Energy, Twice, require_no_dataset

logger = logging.getLogger("torchrex")

if TYPE_CHECKING:
    from torchrex.network.run import ModuleExchange

MOST_CLIPPED = 0.01  # share of the steps on rung 0
BATCHES_LOOKED_AT = 8  # for the shape of the noise, at the end of a run
BLOCK = 256  # steps whose exchange inputs are drawn at once; part of the random stream


class Feed(NamedTuple):
    """The data of a call of `advance`, and their next batches."""

    data: Any
    extra: Any  # for repeated energies; the data themselves if nothing else was given
    given: tuple[Any, Any]  # what the caller gave
    twice: bool  # does a DeviceLoader augment the examples of a step a second time, see `Twice`?
    next_batch: Callable[[], Batch]
    next_extra: Callable[[], Batch]


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
        if len(runs) > 1 and not all(run.ensemble.source.shared_batches for run in runs):
            raise InvalidArgumentError(
                "runs side by side share every batch; make their ensembles with shared_batches=True"
            )
        rhythms = {
            (run.rules.noise.first_measurement, feed.every, feed.n_draws)
            for run in runs
            if isinstance(feed := run.rules.noise.feed, RepeatedDraws)
        }
        if len(rhythms) > 1:
            raise InvalidArgumentError(
                "runs side by side measure repeated energies at the same steps, "
                f"got (first, every, n_draws) {sorted(rhythms)}"
            )
        self.runs = list(runs)
        self.failures: dict[int, NonFiniteEnergyError] = {}
        self.graphs: Graphs | None = None
        self._first = runs[0]
        self._n_batches = 1 if runs[0].ensemble.source.shared_batches else runs[0].n_rungs
        self._feed: Feed | None = None
        self._last_batch: Batch | None = None  # of data that are not in a DeviceLoader
        self._batch_tried = False
        self._first_of_one = False  # had the first batch one example?
        self._compared = False  # with what the other processes see

    @property
    def _going(self) -> dict[int, ModuleExchange]:
        return {k: run for k, run in enumerate(self.runs) if k not in self.failures}

    def begin_data_anew(self) -> None:
        """Forget the position in data that cannot keep their own."""
        self._feed = None

    def step(self, batch: Any) -> StepInfo:
        """One step of the only run on a batch."""
        (run,) = self.runs
        with run.ensemble.own_work():
            (info,) = self._step(run.to_device(batch))
        if info is not None:
            return info
        assert run.records is not None
        row = (run.n_steps - 1) % BLOCK
        return StepInfo(*(values[row].clone() for values in run.records))

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
        steps = {run.n_steps for run in self._going.values()}
        if len(steps) > 1:
            raise InvalidArgumentError(
                f"runs side by side must be at the same step, got {sorted(steps)}"
            )
        if self._feed is None or any(
            old is not new for old, new in zip(self._feed.given, (data, extra), strict=True)
        ):  # else they go on
            self._feed = self._feed_from(data, extra)
        try:
            yield from self._advance(n_steps, self._feed, every)
        except GeneratorExit:
            raise
        except BaseException:
            self._feed = None  # data that failed in the middle begin anew
            raise

    def _feed_from(self, data: Any, extra: Any) -> Feed:
        measuring = [isinstance(run.rules.noise.feed, RepeatedDraws) for run in self.runs]
        if extra is None and any(measuring) and not all(measuring):
            raise InvalidArgumentError(
                "only some of the runs take repeated energies from the data, so none would see the "
                "batches it sees alone; give a second loader as extra=..."
            )
        for n_data in {run.ensemble.n_data for run in self.runs}:
            _warn_of_size(n_data, data)
        twice = False
        if isinstance(data, DeviceLoader):  # others may count batch_size differently
            for run in self.runs:
                require_two_examples(run.rules.noise, data.batch_size)
                if data.augment is not None:
                    run.random_losses.note("data")
                source = run.ensemble.source
                twice |= run.random_losses.need_a_second_pass(data.batch_size, source)
        following = _batches_of(data, self._n_batches, twice=twice)
        others = following if extra is None else _batches_of(extra, self._n_batches)
        extra_data = data if extra is None else extra
        return Feed(data, extra_data, (data, extra), twice, following, others)

    def _advance(
        self, n_steps: int, feed: Feed, every: int | None
    ) -> Iterator[list[StepInfo | None]]:
        remaining = n_steps
        parts: list[list[StepInfo]] = [[] for _ in self.runs]
        while remaining > 0 and self._going:
            now = next(iter(self._going.values())).n_steps
            until = remaining if every is None else every - now % every
            stretch = min(remaining, BLOCK - now % BLOCK, until)
            with contextlib.ExitStack() as working:
                for run in self.runs:
                    working.enter_context(run.ensemble.own_work())
                infos = self._stretch(stretch, feed)
            remaining -= stretch
            for part, info in zip(parts, infos, strict=True):
                part += [] if info is None else [info]
            if every is None or stretch == until or not remaining or not self._going:
                yield [joined(parts[k]) if k in self._going else None for k in range(len(parts))]
                parts = [[] for _ in self.runs]

    def _stretch(self, n_steps: int, feed: Feed) -> list[StepInfo | None]:
        """Steps of one block; of each run what it did."""
        eager: list[list[StepInfo]] = [[] for _ in self.runs]
        for _ in range(n_steps):
            self._measure_if_due(feed)
            swapped = self._swap_if_due(feed)
            if self._step_inside(feed):
                self._report(swapped)
                continue
            batch = self._first.to_device(feed.next_batch())
            for k, info in enumerate(self._step(batch)):
                if info is not None and self.runs[k].records is None:
                    info = swapped.get(k, info)._replace(position=info.position)
                    self._look(k, StepInfo(*(values[None] for values in info)), batch)
                    eager[k].append(info)
            self._report(swapped)
        return [self._information(k, eager[k], n_steps) for k in range(len(self.runs))]

    def _information(self, k: int, eager: list[StepInfo], stretch: int) -> StepInfo | None:
        """What a run did in the stretch that is over."""
        run = self.runs[k]
        if k in self.failures:
            return None
        if run.records is None:
            block = StepInfo(*(torch.stack(values) for values in zip(*eager, strict=True)))
            run.count(block)
            return block
        last = (run.n_steps - 1) % BLOCK + 1
        block = StepInfo(*(values[last - stretch : last].clone() for values in run.records))
        run.count(block)
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

    def warn_of_bias(self) -> None:
        """Warn of clipped gradients, and of noise that is not Gaussian in the next batches."""
        data = None if self._feed is None else self._feed.data
        batches = [] if self._last_batch is None else [self._last_batch]
        if isinstance(data, DeviceLoader):
            position = data.state_dict()
            following = _batches_of(data, self._n_batches)
            batches = [following() for _ in range(BATCHES_LOOKED_AT)]
            data.load_state_dict(position)
        for run in self._going.values():
            ladder, is_main = run.rules.ladder, run.mesh.process_group.is_main
            if ladder.anneal is not None or not ladder.temperatures[0]:
                continue  # it samples nothing
            share = run.clipped_share()[0]
            if share > MOST_CLIPPED and is_main:
                words = (
                    "%.1f %% of the later steps on rung 0 were clipped: it samples another law; "
                )
                logger.warning(words + "raise clip, or lower the learning rates", 100.0 * share)
            shape = run.noise_shape(*batches) if batches else None
            if is_main:
                warn_of_shape(shape, run.correction_factor[:, 0])

    # One step

    def _step(self, batch: Batch) -> list[StepInfo | None]:
        """One step of each run on a batch on the device; None where it was captured."""
        if isinstance(batch, Twice):
            for run in self.runs:
                run.random_losses.note("data")
        self._try_batch(batch)
        self._last_batch = batch
        if self._first.n_steps % BLOCK == 0 or not self._compared:
            # Loaders may begin alike and part later.
            seeds = [run.streams.seed for run in self.runs]
            _require_same_everywhere(self._first.mesh.process_group, seeds, batch)
            self._compared = True
        graphs = self._captured()
        graph = None if graphs is None else graphs.for_batch(batch)
        if graph is not None:
            self._replay(graph, size_of(batch))
            return [None] * len(self.runs)
        # What cannot be captured together may be captured alone.
        alone = graphs is not None and len(self.runs) > 1
        infos: list[StepInfo | None] = [None] * len(self.runs)
        for k, run in self._going.items():
            infos[k] = run.alone._step(batch)[0] if alone else run.eager_step(batch)
        return infos

    def _step_inside(self, feed: Feed) -> bool:
        """One captured step that takes its batch from a DeviceLoader by itself; False if that
        cannot be done.
        """
        graphs, data = self._captured(), feed.data
        if graphs is None or not self._is_here(data):
            return False
        if not self._batch_tried:
            position = data.state_dict()
            self._try_batch(data.next())
            data.load_state_dict(position)
        size = data.prepare()
        graph = graphs.for_loader(data, size, twice=feed.twice)
        if graph is None:
            return False
        self._replay(graph, size)
        data.advanced(size)
        return True

    def _measure_if_due(self, feed: Feed) -> None:
        """Repeated energies, where it is time for them: from a captured pass, or eagerly."""
        # A run that failed stays in the graph: without it there would be another one to compile and
        # to capture.
        measuring = [
            k for k, run in enumerate(self.runs) if isinstance(run.rules.noise.feed, RepeatedDraws)
        ]
        going = {k: self.runs[k] for k in measuring if k not in self.failures}
        if not going:
            return
        first = next(iter(going.values()))  # all have the same rhythm
        repeats = first.rules.noise.feed
        assert isinstance(repeats, RepeatedDraws)
        if first.n_steps < first.rules.noise.first_measurement or first.n_steps % repeats.every:
            return
        graphs, extra = self._captured(), feed.extra
        size = extra.prepare() if graphs is not None and self._is_here(extra) else 0
        graph = None
        if graphs is not None and size:
            graph = graphs.for_loader(extra, size, energies_of=measuring)
        if graph is None:
            batches = [feed.next_extra() for _ in range(repeats.n_draws)]
            for run in going.values():
                run.measure(batches)
            return
        repeated: list[list[Tensor]] = []
        for _ in range(repeats.n_draws):
            if extra.prepare() != size:
                raise InvalidArgumentError(
                    "repeated energies need batches of one size; "
                    'make their loader with last="drop" or "wrap"'
                )
            with self._first.forward:
                graph.replay()
            extra.advanced(size)
            repeated.append([energy.total.clone() for energy in graph.result])
        for k, energies in zip(measuring, zip(*repeated, strict=True), strict=True):
            if k in going:
                going[k].learn_variance(torch.stack(energies))

    def _swap_if_due(self, feed: Feed) -> dict[int, StepInfo]:
        """Swaps on swap batches, of the runs for which it is time; what each did."""
        if not self._going:
            return {}
        step = next(iter(self._going.values())).n_steps
        # Failed runs too: a graph of energies is one of the same runs every time.
        due = [k for k, run in enumerate(self.runs) if run.rules.swaps_with_own_batch(step)]
        due = [k for k in due if not self.runs[k].has_swapped]
        if due and not self._batch_tried:  # which also finds out whether losses are random
            size = self.runs[due[0]].rules.swap_batch
            assert size is not None
            self._try_one_part(next(swap_batches(feed.extra, step, size, twice=False)))
        together: dict[tuple[int, bool], list[int]] = {}  # by size, and whether it comes twice
        for k in due:
            run = self.runs[k]
            size = run.rules.swap_batch
            assert size is not None
            source = run.ensemble.source
            twice = run.random_losses.need_a_second_pass(size, source, swaps=True)
            together.setdefault((size, twice), []).append(k)
        done: dict[int, StepInfo] = {}
        for (size, twice), ks in together.items():
            done |= self.swap_on(swap_batches(feed.extra, step, size, twice=twice), ks)
        return done

    def swap_on(self, batches: Iterable[Batch], ks: Sequence[int] = (0,)) -> dict[int, StepInfo]:
        """Swaps of some runs by the energies on these examples, which all replicas share."""
        energies, sizes = [], []
        for batch in map(self._first.to_device, batches):
            self._try_one_part(batch)
            sizes.append(size_of(batch))
            energies.append(self._energies(batch, ks))
        done = {}
        for k, parts in zip(ks, zip(*energies, strict=True), strict=True):
            if k in self._going:
                done[k] = self.runs[k].swap_by(joined_energies(parts, sizes), sum(sizes))
        return done

    def _try_one_part(self, batch: Batch) -> None:
        """The first examples that a run sees are those of a swap batch."""
        if not self._batch_tried:
            part = self._first.to_device(batch.batch if isinstance(batch, Twice) else batch)
            self._try_batch(part if self._n_batches == 1 else [part] * self._n_batches)

    def _energies(self, batch: Batch, ks: Sequence[int]) -> list[Energy]:
        """Energies of some runs on a batch; of one that is there twice with the terms of both."""
        if isinstance(batch, Twice):
            both = [self._energies(part, ks) for part in batch]
            return [
                energy._replace(repeated=again.per_example)
                for energy, again in zip(*both, strict=True)
            ]
        graphs = self._captured()
        graph = None if graphs is None else graphs.for_batch(batch, energies_of=ks)
        if graph is None:
            return [self.runs[k].energies(batch, shared=True) for k in ks]
        with self.runs[ks[0]].forward:
            graph.replay()
        return [
            Energy(
                each.total.clone(), None if each.per_example is None else each.per_example.clone()
            )
            for each in graph.result
        ]

    def _report(self, swapped: dict[int, StepInfo]) -> None:
        """Write what swaps before the latest step did into the records of that step."""
        for k, info in swapped.items():
            run = self.runs[k]
            for name in RECORDED if run.records is not None else ():
                row = (run.n_steps - 1) % BLOCK
                getattr(run.records, name)[row].copy_(getattr(info, name))

    def _replay(self, graph: Graph, n_examples: int) -> None:
        for run in self.runs:
            run.prepare()
        with self._first.forward:  # of several runs none draws anything there, see `Graph`
            graph.replay()
        for run in self.runs:
            run.count_step(n_examples)

    def _captured(self) -> Graphs | None:
        if not all(run.capturing for run in self.runs):
            return None
        if self.graphs is None:
            deterministic = any(run.deterministic for run in self.runs)
            states = [run.capture_state() for run in self.runs]
            self.graphs = Graphs(states, deterministic=deterministic)
        return self.graphs

    def _is_here(self, data: Any) -> bool:
        """Can a captured step take its batches from these data?"""
        here = isinstance(data, DeviceLoader) and data.cursor.device == self._first.device
        return here and self._n_batches == 1

    def _try_batch(self, batch: Batch) -> None:
        if not self._batch_tried:
            sizes = [run.try_batch(batch) for run in self.runs]
            self._batch_tried, self._first_of_one = True, max(sizes) == 1
        elif self._first_of_one:  # two in a row: a single one may be the rest of an epoch
            self._first_of_one = False
            blind = [run for run in self.runs if isinstance(run.rules.noise.feed, PerExample)]
            if blind and size_of(batch) == 1 and self._first.mesh.process_group.is_main:
                warn_of_one_example(blind[0].rules.noise)

    def __repr__(self) -> str:
        replicas = sum(run.n_rungs for run in self.runs)
        return f"SideBySide({len(self.runs)} runs, {replicas} replicas, step {self._first.n_steps})"


def _require_same_everywhere(group: ProcessGroup, seeds: list[int], batch: Batch) -> None:
    """All processes must have the same batches and uniforms: swaps compare their energies."""
    if group.size == 1:
        return
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    reported = group.gather([seeds, digest.hexdigest()], "look at a batch")
    for rank, (theirs, shown) in enumerate(reported):
        if theirs != reported[0][0]:
            mine, its = (", ".join(map(str, seeds)) for seeds in (reported[0][0], theirs))
            raise InvalidArgumentError(
                f"rank 0 has seed {mine} and rank {rank} has {its}; "
                "give all processes the same seed"
            )
        if shown != reported[0][1]:
            raise InvalidArgumentError(
                f"ranks 0 and {rank} have different batches, but all replicas must see the same; "
                "use DeviceLoader, or give the DataLoader a seeded generator"
            )


def _warn_of_size(counted: int, data: Any) -> None:
    """Warn if the energy counts other data than these: its scale would be wrong."""
    n_data = getattr(data, "n_data", None)
    dataset = getattr(data, "dataset", None)
    if n_data is None and dataset is not None and hasattr(dataset, "__len__"):
        n_data = len(dataset)
    if n_data is not None and n_data != counted:
        warnings.warn(
            f"the energy counts n_data={counted:,} examples but the data have {n_data:,}: energies "
            f"and temperatures are off by their ratio; pass n_data={n_data}",
            stacklevel=5,
        )


def swap_batches(data: Any, step: int, size: int, *, twice: bool) -> Iterator[Batch]:
    """`size` different examples of the data, in parts; they depend on the step alone."""
    if isinstance(data, DeviceLoader):
        return data.swap_batches(step, size, twice=twice)
    dataset: Any = getattr(data, "dataset", None)
    n = getattr(data, "batch_size", None)
    has_items = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not isinstance(data, DataLoader) or not has_items or not n:
        raise InvalidArgumentError(
            f"swap_batch={size} needs examples besides those of the steps, which "
            f"{type(data).__name__} cannot give; use a DeviceLoader, or a DataLoader over a "
            "data set with numbered examples, or give one of them as extra=..."
        )
    if size > len(dataset):
        raise InvalidArgumentError(
            f"swap_batch={size} is more than the {len(dataset)} examples of the data"
        )
    generator = torch.Generator().manual_seed(derive_seed(0, f"swap.{step}"))
    index = torch.randperm(len(dataset), generator=generator)[:size]

    def part(places: list[int]) -> Batch:
        return data.collate_fn([dataset[place] for place in places])

    parts = (places.tolist() for places in index.tensor_split(-(-size // n)))
    return (Twice(part(places), part(places)) if twice else part(places) for places in parts)


def _batches_of(data: Any, n_at_once: int, *, twice: bool = False) -> Callable[[], Batch]:
    """A function that gives the next batch, or `n_at_once` independent ones, without end."""
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        raise InvalidArgumentError(
            "data must give batches, got one tuple of tensors: "
            "use DeviceLoader((x, y), batch_size) or [(x, y)]"
        )
    require_no_dataset(data, shuffle=True)
    following = (
        functools.partial(data.next, twice=twice)
        if isinstance(data, DeviceLoader)
        else _cycle(data).__next__
    )
    return following if n_at_once == 1 else lambda: [following() for _ in range(n_at_once)]


def _cycle(data: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in taken(data):
            empty = False
            yield batch
        if empty:
            raise InvalidArgumentError(
                "the data gave no batch; an iterator can be used once only: give a loader or a list"
            )
