"""A whole step on a GPU as one CUDA graph: batch, augmentation, all replicas of all runs, variances, swaps, moves, records.

A replay needs nothing from the host. Replicas run on side streams of their own, because one replica's kernels do not fill a large
GPU; modules, exchange and move are compiled. What cannot be compiled is captured as it is; what cannot be captured runs eagerly.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrex.exchange.algorithm import Exchanged, ExchangeState, Rules, StepInfo, StepInputs, exchange_rungs, step
from torchrex.exchange.block import ExchangeInputs
from torchrex.exchange.forward_rng import ForwardRandomness
from torchrex.exchange.module_ensemble import ModuleEnsemble
from torchrex.exchange.module_work import assemble_energy, update_rows
from torchrex.targets import Batch, DeviceLoader, Energy

logger = logging.getLogger("torchrex")

WARM_UP = 3  # steps before a capture: compilation, cuDNN's choice of algorithms, the allocator
MOST_FORMS = 64  # of one function, for runs side by side whose rows have different sizes; torch gives up after 8
MOST_GRAPHS = 4  # shapes of batches, each captured by itself; data of more shapes run eagerly
COMPILER_OPTIONS: dict[str, Any] = {"combo_kernels": True}  # small kernels that do not wait for each other become one: 6 %
RECORDED = ("energy", "accepted", "proposed", "noise_variance", "correction", "replica_at")


class Records:
    """StepInfo of a block of steps, on the device, written by the captured step itself."""

    def __init__(self, rules: Rules, length: int, device: torch.device) -> None:
        rungs, pairs = rules.ladder.n_rungs, rules.ladder.n_pairs

        def rows(n: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(length, n, 1, dtype=dtype, device=device)

        self.info = StepInfo(
            position=torch.zeros(length, 0, device=device),
            energy=rows(rungs, torch.float64),
            accepted=rows(pairs, torch.bool),
            proposed=rows(pairs, torch.bool),
            noise_variance=rows(pairs, torch.float64),
            correction=rows(pairs, torch.float64),
            replica_at=rows(rungs, torch.int64),
        )

    def write(self, row: int, info: StepInfo) -> None:
        """The information of a step that was not captured."""
        for name in RECORDED:
            getattr(self.info, name)[row].copy_(getattr(info, name))

    def read(self, first: int, last: int) -> StepInfo:
        """A copy of rows [first, last)."""
        return StepInfo(*(values[first:last].clone() for values in self.info))


class Workings(NamedTuple):
    """What a captured step reads and writes in place."""

    ensemble: ModuleEnsemble
    state: ExchangeState
    table: ExchangeInputs  # what the exchange of a block of steps takes from outside; the clock says which row
    records: Records
    rules: Rules


class Captured(ABC):
    """Work of some runs on batches of one form, ready to be replayed.

    `generators` and the tensors `moving` are what `select` uses up besides.
    """

    def __init__(
        self,
        workings: Sequence[Workings],
        select: Callable[[], Batch],
        *,
        generators: Sequence[torch.Generator],
        moving: Sequence[Tensor],
        compiled: bool,
    ) -> None:
        self._workings, self._select = workings, select
        self._device = workings[0].ensemble.device
        self._lanes: list[torch.cuda.Stream] | None = None  # one side stream per run while several are captured
        plain: list[Any] = [assemble_energy, update_rows, exchange_and_record]
        assemble, update, exchange = [_compile(function) for function in plain] if compiled else plain
        self._exchange: Callable[..., Exchanged] = exchange
        # One compiled form for all runs on the same energy: the compiler takes a method of another object for other code.
        losses = {id(each.ensemble.energy): each.ensemble.energy.losses for each in workings}
        losses = {key: _compile(function) for key, function in losses.items()} if compiled else losses
        for each in workings:
            each.ensemble.use(losses[id(each.ensemble.energy)], assemble, update)
        try:
            self._prepare(generators, moving)
        finally:
            for each in workings:  # steps that are not captured are eager ones
                each.ensemble.use(each.ensemble.energy.losses, assemble_energy, update_rows)

    @abstractmethod
    def _body(self) -> Any:
        """The work itself; what it returns stays alive, because tensors of other streams must not be freed during a capture."""

    def replay(self) -> None:
        self._graph.replay()

    def _prepare(self, generators: Sequence[torch.Generator], moving: Sequence[Tensor]) -> None:
        """Warm up, then capture."""
        device = self._device
        default = torch.cuda.default_generators[device.index]
        with (
            self._as_if_nothing_happened(generators, moving),
            warnings.catch_warnings(),
            torch._dynamo.config.patch(recompile_limit=MOST_FORMS),
        ):
            warnings.simplefilter("ignore")  # the compiler's advice is not for the user of this package
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                places = [tensor.clone() for tensor in moving]
                for k in range(WARM_UP):
                    state = default.get_state()
                    with no_waiting() if k == WARM_UP - 1 else contextlib.nullcontext():
                        self._body()
                    if len(self._workings) > 1 and not torch.equal(state, default.get_state()):
                        raise RuntimeError("a module draws random numbers, as dropout does, which runs must not share")
                    for tensor, place in zip(moving, places, strict=True):  # never past the end of the data
                        tensor.copy_(place)
            torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        if len(self._workings) > 1:
            self._lanes = [torch.cuda.Stream(device) for _ in self._workings]  # type: ignore[no-untyped-call]
        for each in self._workings:
            if len(each.ensemble.modules) > 1:
                each.ensemble.lanes = [torch.cuda.Stream(device) for _ in each.ensemble.modules]  # type: ignore[no-untyped-call]
        try:
            # The inner context leaves its stream behind if a capture fails; the outer one goes back to ours.
            with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(self._graph):
                self._kept_alive = self._body()
        finally:
            self._lanes = None
            for each in self._workings:
                each.ensemble.lanes = None

    def _in_lanes(self) -> Iterator[Workings]:
        """Run after run; in a capture of several each on its own stream."""
        if self._lanes is None:
            yield from self._workings
            return
        main = torch.cuda.current_stream(self._device)
        for lane, each in zip(self._lanes, self._workings, strict=True):
            lane.wait_stream(main)
            with torch.cuda.stream(lane):
                yield each
        for lane in self._lanes:
            main.wait_stream(lane)

    @contextlib.contextmanager
    def _as_if_nothing_happened(self, generators: Sequence[torch.Generator], moving: Sequence[Tensor]) -> Iterator[None]:
        """Put weights, buffers, momenta, exchange state and generators back after the warm-up."""
        buffers, tensors = [], list(moving)
        for ensemble, state, _, records, _ in self._workings:
            mine = [
                (part, name, buffer)
                for module in ensemble.modules
                for part in module.modules()
                for name, buffer in part.named_buffers(recurse=False)
            ]
            buffers += mine
            tensors += [ensemble.clock, *state, *records.info, *(buffer for _, _, buffer in mine)]
            tensors += [*ensemble.rows.moved(), *(ensemble.common.moved() if ensemble.common is not None else [])]
        before = [tensor.clone() for tensor in tensors]
        states = [generator.get_state() for generator in generators]
        try:
            yield
            for part, name, buffer in buffers:
                if part._buffers[name] is not buffer:  # a replay would read the old one for ever
                    raise RuntimeError(f"the module puts another tensor in the place of its buffer {name!r}; change it in place")
        finally:
            torch.cuda.synchronize(self._device)  # what a failed step has still under way must not come after this
            for part, name, buffer in buffers:
                part._buffers[name] = buffer
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            for generator, generator_state in zip(generators, states, strict=True):
                generator.set_state(generator_state)


class CapturedStep(Captured):
    """One step of every run."""

    def _body(self) -> Any:
        batch = self._select()
        outcomes = []
        for workings in self._in_lanes():
            with torch.no_grad():
                outcomes.append(self._step(workings, batch))
                workings.ensemble.clock += 1
        return batch, outcomes

    def _step(self, workings: Workings, batch: Batch) -> Any:
        ensemble, own_state, table, records, rules = workings

        def exchange(state: ExchangeState, energy: Energy, *_: Any) -> tuple[ExchangeState, Exchanged, StepInfo]:
            exchanged = self._exchange(
                state, energy, table, records.info, ensemble.clock, rules, ensemble.n_data, ensemble.replacement
            )
            return state, exchanged, records.info

        inputs = StepInputs(*table, target_noise=({"batch": batch},), move_noise={})
        return step(ensemble, own_state, inputs, rules, exchange=exchange)


class CapturedEnergies(Captured):
    """Energies of every run's replicas, without a move: what repeated draws measure. They are left in `energies`."""

    energies: list[Tensor]

    def _body(self) -> Any:
        batch = self._select()
        with torch.no_grad():
            self.energies = [workings.ensemble.energies({"batch": batch}).total for workings in self._in_lanes()]
        return batch, self.energies


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, options=COMPILER_OPTIONS)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Let everything that waits for the device raise: a capture that fails in the middle is harder to recover from."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype, which finds not all that waits
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def exchange_and_record(
    state: ExchangeState,
    energy: Energy,
    table: ExchangeInputs,
    records: StepInfo,
    clock: Tensor,
    rules: Rules,
    n_data: int,
    replacement: bool,
) -> Exchanged:
    """`exchange_rungs` with its inputs read from the table's row of this step, state and records written in place."""
    row = (clock % len(table.lr))[None]
    drawn = ExchangeInputs(*(values.index_select(0, row)[0] for values in table))
    inputs = StepInputs(*drawn, target_noise=(), move_noise={})
    new, exchanged, info = exchange_rungs(state, energy, [], inputs, rules, n_data, replacement)
    for name in RECORDED:
        getattr(records, name).index_copy_(0, row, getattr(info, name)[None])
    for old, value in zip(state, new, strict=True):
        old.copy_(value)
    return exchanged


def release(generator: torch.Generator, state: Tensor) -> None:
    """Put a generator back to a state, with memory of its own: a capture that failed leaves it believing it is being captured."""
    if generator.device.type != "cuda":
        generator.set_state(state)
        return
    fresh = torch.Generator(generator.device)
    fresh.set_state(state)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextlib.contextmanager
def convolutions(*, deterministic: bool) -> Iterator[None]:
    """cuDNN held to algorithms that give the same bits in every process, or else free to try all and take the fastest."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit = not deterministic, deterministic, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit = before


def compiled_or_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled form of a function, until it fails: from then on the function itself."""
    chosen = compiled = torch.compile(function, dynamic=False, options=COMPILER_OPTIONS)

    def call(*arguments: Any) -> Any:
        nonlocal chosen
        if chosen is compiled:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return compiled(*arguments)
            except Exception as error:
                name = getattr(function, "__name__", "a function")
                logger.info("running %s without the compiler, because: %s", name, " ".join(str(error).split())[:300])
                chosen = function
        return function(*arguments)

    return call


class Graphs:
    """What some runs that go on together have captured, for each form of batch, made when the form is first seen."""

    def __init__(self, workings: Sequence[Workings], forward: ForwardRandomness, *, deterministic: bool) -> None:
        self._workings, self._forward, self._deterministic = list(workings), forward, deterministic
        self._graphs: dict[Any, tuple[Captured, Batch]] = {}
        self.failed = False  # once something could not be captured, the runs go on without

    def for_batch(self, batch: Batch) -> Captured | None:
        """The graph for batches of this form, with this batch in its inputs; None if the step has to be done eagerly."""
        leaves, form = pytree.tree_flatten(batch)
        strange = next((leaf for leaf in leaves if not isinstance(leaf, Tensor | bool | int | float | str | None)), None)
        if strange is not None and not self.failed:
            self._fail(f"a batch holds a {type(strange).__name__} beside its tensors")
        if strange is not None:
            return None
        key = (str(form), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if key not in self._graphs and not self.failed:
            inputs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
            self._make(key, inputs, CapturedStep, self._workings, lambda: inputs, [], [])
        if key not in self._graphs:
            return None
        graph, inputs = self._graphs[key]
        for mine, given in zip(pytree.tree_leaves(inputs), leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)
        return graph

    def for_loader(self, loader: DeviceLoader, size: int) -> Captured | None:
        """The graph that takes batches of that size from the loader by itself."""
        return self._from_loader("step", CapturedStep, self._workings, loader, size)

    def energies(self, loader: DeviceLoader, size: int, ensembles: Sequence[ModuleEnsemble]) -> CapturedEnergies | None:
        """The graph that measures energies of these ensembles on the loader's next batch."""
        measured = [workings for workings in self._workings if any(workings.ensemble is each for each in ensembles)]
        graph = self._from_loader(("energies", *map(id, ensembles)), CapturedEnergies, measured, loader, size)
        assert graph is None or isinstance(graph, CapturedEnergies)
        return graph

    def _from_loader(
        self, what: Any, kind: type[Captured], workings: Sequence[Workings], loader: DeviceLoader, size: int
    ) -> Captured | None:
        key = (what, id(loader), size)
        if key not in self._graphs:
            self._make(key, loader, kind, workings, lambda: loader.select(size), [loader.generator], [loader.cursor])
        return self._graphs[key][0] if key in self._graphs else None

    def _make(
        self,
        key: Any,
        inputs: Batch,
        kind: type[Captured],
        workings: Sequence[Workings],
        select: Callable[[], Batch],
        generators: Sequence[torch.Generator],
        moving: Sequence[Tensor],
    ) -> None:
        """Capture with compiled parts, else without, else not at all, with one reason in the log."""
        if self.failed:
            return
        if len(self._graphs) >= MOST_GRAPHS:
            self._fail(f"batches came in more than {MOST_GRAPHS} shapes or from more loaders, and each is a graph of its own")
            return
        device = self._workings[0].ensemble.device
        default = torch.cuda.default_generators[device.index]
        states = [generator.get_state() for generator in (default, *generators)]
        reason = ""
        for compiled in (True, False):
            forward = self._forward.state_dict()
            try:
                with torch.cuda.device(device), convolutions(deterministic=self._deterministic), self._forward, many_forms():
                    graph = kind(workings, select, generators=generators, moving=moving, compiled=compiled)
                self._graphs[key] = (graph, inputs)
                return
            except Exception as error:
                torch.cuda.synchronize(device)
                self._graphs.clear()  # they hold on to the states that the generators are released from
                for generator, state in zip((default, *generators), states, strict=True):
                    release(generator, state)
                if isinstance(error, torch.OutOfMemoryError):  # without a graph it would take no less
                    raise
                cause = error.__context__ or error  # a capture that breaks off hides what broke it
                reason = " ".join(str(cause).split())[:300] or type(cause).__name__
                if compiled:
                    logger.info("capturing the step without compiling it, because: %s", reason)
            finally:
                self._forward.load_state_dict(forward)
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self.failed = True
        if len(self._workings) > 1:
            logger.warning("running one after another, because the runs' steps cannot be captured together: %s", reason)
            return
        logger.warning("running eagerly, with the same numbers but slower, because the step cannot be captured: %s", reason)


@contextlib.contextmanager
def many_forms() -> Iterator[None]:
    """Let the compiler make a form for every kind of run: it gives up after eight unless told otherwise."""
    from torch._dynamo import config

    before = config.recompile_limit
    config.recompile_limit = max(before, 64)
    try:
        yield
    finally:
        config.recompile_limit = before
