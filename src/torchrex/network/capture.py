"""A step on a GPU as one CUDA graph: batch, augmentation, all replicas of all runs, variances,
swaps, moves, records.

A replay needs nothing from the host. Replicas run on side streams of their own, because one
replica's kernels do not fill a large GPU; modules, exchange and move are compiled. What cannot be
compiled is captured as it is; what cannot be captured runs eagerly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrex.exchange import ExchangeInputs
from torchrex.exchange.algorithm import (
    Exchanged,
    ExchangeState,
    Rules,
    StepInfo,
    StepInputs,
    exchange_rungs,
    step,
)
from torchrex.network.step import Functions, NetworkStep, SideStreams, assemble_energy, update_rows
from torchrex.targets import Batch, DeviceLoader, Energy

logger = logging.getLogger("torchrex")

WARM_UP = 3  # steps before a capture: compilation, cuDNN's choice of algorithms, the allocator
MOST_GRAPHS = 4  # shapes of batches, each captured by itself; data of more shapes run eagerly
# Small kernels that do not wait for each other become one: 6 %.
COMPILER_OPTIONS: dict[str, Any] = {"combo_kernels": True}
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


class CaptureState(NamedTuple):
    """What a captured step of one run reads and writes in place."""

    network: NetworkStep  # with plain functions, without streams
    exchange: ExchangeState
    table: ExchangeInputs  # what a block of steps takes from outside; the clock tells the row
    records: Records

    @property
    def tensors(self) -> list[Tensor]:
        """All that a step changes, besides the buffers of the modules."""
        replicas = self.network.replicas
        moved = [each for rows in replicas.all_rows for each in (rows.position, *rows.state)]
        return [replicas.clock, *self.exchange, *self.records.info, *moved]


class Graph:
    """Work of some runs on batches of one form, ready to be replayed.

    `work` gets a batch of `select`, the states with the functions to compute with, and the streams
    of the runs. `generators` and the tensors `moving` are what `select` uses up besides.
    """

    def __init__(
        self,
        work: Work,
        states: Sequence[CaptureState],
        select: Callable[[], Batch],
        *,
        generators: Sequence[torch.Generator],
        moving: Sequence[Tensor],
        compiled: bool,
    ) -> None:
        plain: list[Any] = [assemble_energy, update_rows, exchange_and_record]
        assemble, update, exchange = map(compiled_form, plain) if compiled else plain
        # One compiled form for all runs on the same energy: the compiler takes a method of another
        # object for other code.
        losses = {
            id(energy): compiled_form(energy.losses) if compiled else energy.losses
            for energy in (each.network.replicas.energy for each in states)
        }
        states = [
            _with(
                each,
                functions=Functions(losses[id(each.network.replicas.energy)], assemble, update),
            )
            for each in states
        ]
        device = states[0].network.replicas.device
        default = torch.cuda.default_generators[device.index]
        with _as_if_nothing_happened(states, generators, moving), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's advice is not for our users
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                places = [tensor.clone() for tensor in moving]
                for k in range(WARM_UP):
                    before = default.get_state()
                    with no_waiting() if k == WARM_UP - 1 else contextlib.nullcontext():
                        work(select(), states, exchange, None)
                    if len(states) > 1 and not torch.equal(before, default.get_state()):
                        raise RuntimeError(
                            "a module draws random numbers, as dropout does, "
                            "which runs must not share"
                        )
                    for tensor, place in zip(moving, places, strict=True):
                        tensor.copy_(place)  # never past the end of the data
            torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        runs = SideStreams(device, len(states)) if len(states) > 1 else None
        states = [_with(each, side_streams=_streams_of(each)) for each in states]
        # The inner context leaves its stream behind if a capture fails; the outer one goes back to
        # ours. What the work returns stays alive: a capture must not free tensors of other streams.
        with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(self._graph):
            batch = select()
            self.result = work(batch, states, exchange, runs)
        self._kept_alive = (batch, states)

    def replay(self) -> None:
        self._graph.replay()


def _with(state: CaptureState, **changes: Any) -> CaptureState:
    return state._replace(network=dataclasses.replace(state.network, **changes))


def _streams_of(state: CaptureState) -> SideStreams | None:
    replicas = state.network.replicas
    n = len(replicas.modules)
    return SideStreams(replicas.device, n) if n > 1 else None


Work = Callable[
    [Batch, Sequence[CaptureState], Callable[..., Exchanged], SideStreams | None], list[Any]
]


def steps_of_runs(
    batch: Batch,
    states: Sequence[CaptureState],
    exchange: Callable[..., Exchanged],
    streams: SideStreams | None,
) -> list[Any]:
    """One step of every run; what they return must stay alive."""
    return [
        _step_of_run(batch, each, exchange)
        for each in (states if streams is None else streams.each(states))
    ]


def _step_of_run(batch: Batch, run: CaptureState, exchange: Callable[..., Exchanged]) -> Any:
    clock, info = run.network.replicas.clock, run.records.info

    def on_device(
        state: ExchangeState, energy: Energy, later: Any, inputs: StepInputs, *rest: Any
    ) -> tuple[ExchangeState, Exchanged, StepInfo]:
        return state, exchange(state, energy, run.table, info, clock, *rest), info

    inputs = StepInputs(*run.table, clock, ({"batch": batch},), move_noise={})
    with torch.no_grad():
        rules = run.network.rules
        outcome = step(run.network, run.exchange, inputs, rules, exchange=on_device)
        clock += 1
    return outcome


def energies_of_runs(
    batch: Batch,
    states: Sequence[CaptureState],
    exchange: Callable[..., Exchanged],
    streams: SideStreams | None,
) -> list[Tensor]:
    """Energies of every run's replicas, without a move: what repeated draws measure."""
    with torch.no_grad():
        return [
            each.network.energies({"batch": batch}).total
            for each in (states if streams is None else streams.each(states))
        ]


def exchange_and_record(
    state: ExchangeState,
    energy: Energy,
    table: ExchangeInputs,
    records: StepInfo,
    clock: Tensor,
    rules: Rules,
    n_data: int,
    finite_population: bool,
) -> Exchanged:
    """`exchange_rungs` with its inputs read from the table's row of this step, state and records
    written in place.
    """
    row = (clock % len(table.lr))[None]
    drawn = ExchangeInputs(*(values.index_select(0, row)[0] for values in table))
    inputs = StepInputs(*drawn, clock, target_noise=(), move_noise={})
    new, exchanged, info = exchange_rungs(
        state, energy, [], inputs, rules, n_data, finite_population
    )
    for name in RECORDED:
        getattr(records, name).index_copy_(0, row, getattr(info, name)[None])
    for old, value in zip(state, new, strict=True):
        old.copy_(value)
    return exchanged


class Graphs:
    """What some runs that go on together have captured, for each form of batch, made when the form
    is first seen: compiled, else as it is, else not at all.
    """

    def __init__(self, states: Sequence[CaptureState], *, deterministic: bool) -> None:
        self._states, self._deterministic = list(states), deterministic
        self._forward = self._states[0].network.forward
        self._graphs: dict[Any, tuple[Graph, Batch]] = {}
        self.failed = False  # once something could not be captured, the runs go on without

    def __len__(self) -> int:
        return len(self._graphs)

    def for_batch(self, batch: Batch) -> Graph | None:
        """The graph for batches of this form, with this batch in its inputs; None if the step has
        to be done eagerly.
        """
        leaves, form = pytree.tree_flatten(batch)
        plain = Tensor | bool | int | float | str | None
        strange = [leaf for leaf in leaves if not isinstance(leaf, plain)]
        if strange:
            if not self.failed:
                self._fail(f"a batch holds a {type(strange[0]).__name__} beside its tensors")
            return None
        key = (
            str(form),
            *(
                (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ),
        )
        if key not in self._graphs and not self.failed:
            inputs = pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch
            )
            self._make(key, inputs, steps_of_runs, self._states, lambda: inputs, [], [])
        if key not in self._graphs:
            return None
        graph, inputs = self._graphs[key]
        for mine, given in zip(pytree.tree_leaves(inputs), leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)
        return graph

    def for_loader(self, loader: DeviceLoader, size: int, *, twice: bool) -> Graph | None:
        """The graph of a step that takes batches of that size from the loader by itself."""
        return self._from_loader("step", steps_of_runs, self._states, loader, size, twice)

    def energies(self, loader: DeviceLoader, size: int, runs: Sequence[int]) -> Graph | None:
        """The graph that measures energies of these runs on the loader's next batch."""
        states = [self._states[k] for k in runs]
        key = ("energies", *runs)
        return self._from_loader(key, energies_of_runs, states, loader, size, False)

    def _from_loader(
        self,
        what: Any,
        work: Work,
        states: Sequence[CaptureState],
        loader: DeviceLoader,
        size: int,
        twice: bool,
    ) -> Graph | None:
        key = (what, id(loader), size, twice)
        if key not in self._graphs:
            generators = [loader.generator, *([loader.repeat_generator] if twice else [])]

            def select() -> Batch:
                return loader.select(size, twice=twice)

            self._make(key, loader, work, states, select, generators, [loader.cursor])
        return self._graphs[key][0] if key in self._graphs else None

    def _make(
        self,
        key: Any,
        inputs: Batch,
        work: Work,
        states: Sequence[CaptureState],
        select: Callable[[], Batch],
        generators: Sequence[torch.Generator],
        moving: Sequence[Tensor],
    ) -> None:
        """Capture with compiled parts, else without, else not at all, with one reason in the log."""
        if self.failed:
            return
        if len(self._graphs) >= MOST_GRAPHS:
            self._fail(
                f"batches came in more than {MOST_GRAPHS} shapes or from more loaders, "
                "and each is a graph of its own"
            )
            return
        device = states[0].network.replicas.device
        used = [torch.cuda.default_generators[device.index], *generators]
        before = [generator.get_state() for generator in used]
        reason = ""
        for compiled in (True, False):
            try:
                with (
                    self._forward.restored(),
                    torch.cuda.device(device),
                    convolutions(deterministic=self._deterministic),
                    self._forward,
                    _many_forms(),
                ):
                    graph = Graph(
                        work,
                        states,
                        select,
                        generators=generators,
                        moving=moving,
                        compiled=compiled,
                    )
                self._graphs[key] = (graph, inputs)
                return
            except Exception as error:
                torch.cuda.synchronize(device)
                self._graphs.clear()  # they hold the states that the generators are released from
                for generator, state in zip(used, before, strict=True):
                    _release(generator, state)
                if isinstance(error, torch.OutOfMemoryError):
                    raise  # without a graph it would take no less
                cause = error.__context__ or error  # a capture that breaks off hides what broke it
                reason = " ".join(str(cause).split())[:300] or type(cause).__name__
                if compiled:
                    logger.info("capturing the step without compiling it, because: %s", reason)
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self.failed = True
        consequence = "running eagerly, with the same numbers but slower, because the step cannot"
        if len(self._states) > 1:
            consequence = "running one after another, because the steps of the runs cannot"
        together = " together" if len(self._states) > 1 else ""
        logger.warning("%s be captured%s: %s", consequence, together, reason)


@contextlib.contextmanager
def _as_if_nothing_happened(
    states: Sequence[CaptureState], generators: Sequence[torch.Generator], moving: Sequence[Tensor]
) -> Iterator[None]:
    """Put weights, buffers, momenta, exchange state and generators back after the warm-up."""
    buffers = [
        (part, name, buffer)
        for each in states
        for module in each.network.replicas.modules
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    tensors = [*moving, *(buffer for _, _, buffer in buffers)]
    tensors += [tensor for each in states for tensor in each.tensors]
    before = [tensor.clone() for tensor in tensors]
    drawn = [generator.get_state() for generator in generators]
    try:
        yield
        for part, name, buffer in buffers:
            if part._buffers[name] is not buffer:  # a replay would read the old one for ever
                raise RuntimeError(
                    f"the module puts another tensor in the place of its buffer {name!r}; "
                    "change it in place"
                )
    finally:
        # What a failed step has still under way must not come after this.
        torch.cuda.synchronize(states[0].network.replicas.device)
        for part, name, buffer in buffers:
            part._buffers[name] = buffer
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        for generator, state in zip(generators, drawn, strict=True):
            generator.set_state(state)


# The compiler, and modes of CUDA that are set for a while and put back


def compiled_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for fixed shapes."""
    return torch.compile(function, dynamic=False, options=COMPILER_OPTIONS)


def compiled_or_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled form of a function, until it fails: from then on the function itself."""
    chosen = compiled = compiled_form(function)

    def call(*arguments: Any) -> Any:
        nonlocal chosen
        if chosen is compiled:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return compiled(*arguments)
            except Exception as error:
                name = getattr(function, "__name__", "a function")
                reason = " ".join(str(error).split())[:300]
                logger.info("running %s without the compiler, because: %s", name, reason)
                chosen = function
        return function(*arguments)

    return call


@contextlib.contextmanager
def _many_forms() -> Iterator[None]:
    """Let the compiler make a form for every kind of run: by default it gives up after eight."""
    from torch._dynamo import config

    before = config.recompile_limit
    config.recompile_limit = max(before, 64)
    try:
        yield
    finally:
        config.recompile_limit = before


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Let everything that waits for the device raise: a capture that fails in the middle is harder
    to recover from.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def convolutions(*, deterministic: bool) -> Iterator[None]:
    """cuDNN held to algorithms that give the same bits in every process, or else free to try all
    and take the fastest.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit
    wanted = not deterministic, deterministic, 0
    cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit = wanted
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit = before


def _release(generator: torch.Generator, state: Tensor) -> None:
    """Put a generator back to a state, with memory of its own: a capture that failed leaves it
    believing it is being captured.
    """
    if generator.device.type != "cuda":
        generator.set_state(state)
        return
    fresh = torch.Generator(generator.device)
    fresh.set_state(state)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
