"""A step on a GPU as one CUDA graph: batch, augmentation, all replicas of all runs, variances,
swaps, moves, records.

A replay needs nothing from the host. Replicas run on side streams of their own, because one
replica's kernels do not fill a large GPU; modules, exchange and move are compiled. What cannot be
compiled is captured as it is; what cannot be captured runs eagerly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from torchrex.network.step import (
    SWAP,
    Functions,
    NetworkStep,
    SideStreams,
    assemble_energy,
    update_rows,
)
from torchrex.targets import Batch, DeviceLoader, Energy

logger = logging.getLogger("torchrex")

WARM_UP = 3  # steps before a capture: compilation, cuDNN's choice of algorithms, the allocator
MOST_GRAPHS = 4  # shapes of batches, each captured by itself; data of more shapes run eagerly
# Small kernels that do not wait for each other become one: 6 %.
COMPILER_OPTIONS: dict[str, Any] = {"combo_kernels": True}
RECORDED = StepInfo._fields[1:]  # all but the position


def empty_records(rules: Rules, length: int, device: torch.device) -> StepInfo:
    """Memory for the information of a block of steps, which the captured step itself writes."""
    rungs, pairs = rules.ladder.n_rungs, rules.ladder.n_pairs

    def rows(n: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, n, 1, dtype=dtype, device=device)

    return StepInfo(
        position=torch.zeros(length, 0, device=device),
        energy=rows(rungs, torch.float64),
        accepted=rows(pairs, torch.bool),
        proposed=rows(pairs, torch.bool),
        noise_variance=rows(pairs, torch.float64),
        correction=rows(pairs, torch.float64),
        replica_at=rows(rungs, torch.int64),
    )


class CaptureState(NamedTuple):
    """What a captured step of one run reads and writes in place."""

    network: NetworkStep  # with plain functions, without streams
    exchange: ExchangeState
    table: ExchangeInputs  # what a block of steps takes from outside; the clock is the row
    records: StepInfo  # of a block of steps

    @property
    def tensors(self) -> list[Tensor]:
        """All that a step changes, besides the buffers of the modules."""
        replicas = self.network.replicas
        moved = [each for rows in replicas.all_rows for each in (rows.position, *rows.state)]
        clip = [] if self.network.clip is None else [self.network.clip.counts]
        return [replicas.clock, *self.exchange, *self.records, *moved, *clip]


class Source(NamedTuple):
    """Where a captured step takes its batches from, and what it uses up there."""

    select: Callable[[], Batch]
    generators: Sequence[torch.Generator] = ()
    moving: Sequence[Tensor] = ()


class Graph:
    """Work of some runs on batches of one form, ready to be replayed.

    `work` is done three times before it is captured; then everything is put back.
    """

    def __init__(
        self,
        work: Work,
        states: Sequence[CaptureState],
        source: Source,
        *,
        compiled: bool,
        deterministic: bool,
    ) -> None:
        self.work, self.compiled = work, compiled
        fixed = functools.partial(compiled_form, deterministic=deterministic)
        form: Callable[..., Any] = fixed if compiled else _as_it_is
        assemble, update = form(assemble_energy), form(update_rows)
        exchange = form(exchange_and_record)
        # One compiled form for all runs on the same energy: the compiler takes a method of another
        # object for other code.
        energies = [each.network.replicas.energy for each in states]
        losses = {
            id(energy): form(energy.losses) for energy in {id(e): e for e in energies}.values()
        }
        states = [
            _with(each, functions=Functions(losses[id(energy)], assemble, update))
            for each, energy in zip(states, energies, strict=True)
        ]
        device = states[0].network.replicas.device
        with _as_if_nothing_happened(states, source), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's advice is not for our users
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self._warm_up(work, states, source, exchange)
            torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        for generator in source.generators:
            self._graph.register_generator_state(generator)
        runs = SideStreams(device, len(states)) if len(states) > 1 else None
        states = [_with(each, side_streams=_streams_of(each)) for each in states]
        # The inner context leaves its stream behind if a capture fails; the outer one goes back to
        # ours. What is kept alive holds tensors of other streams, which a capture must not free.
        with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(self._graph):
            batch = source.select()
            self.result = work(batch, states, exchange, runs)
        self._kept_alive = (batch, states)

    @staticmethod
    def _warm_up(
        work: Work, states: Sequence[CaptureState], source: Source, exchange: ExchangeFunction
    ) -> None:
        default = torch.cuda.default_generators[states[0].network.replicas.device.index]
        places = [tensor.clone() for tensor in source.moving]
        for k in range(WARM_UP):
            before = default.get_state()
            with no_waiting() if k == WARM_UP - 1 else contextlib.nullcontext():
                work(source.select(), states, exchange, None)
            if len(states) > 1 and not torch.equal(before, default.get_state()):
                raise RuntimeError(
                    "a module draws random numbers, as dropout does, which runs must not share"
                )
            for tensor, place in zip(source.moving, places, strict=True):
                tensor.copy_(place)  # never past the end of the data

    def replay(self) -> None:
        self._graph.replay()


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _with(state: CaptureState, **changes: Any) -> CaptureState:
    return state._replace(network=dataclasses.replace(state.network, **changes))


def _streams_of(state: CaptureState) -> SideStreams | None:
    replicas = state.network.replicas
    n = len(replicas.modules)
    return SideStreams(replicas.device, n) if n > 1 else None


# What a graph does: a function of the batch, the runs, the exchange and the streams of the runs.
ExchangeFunction = Callable[..., Exchanged]
Runs = Sequence[CaptureState]
Work = Callable[[Batch, Runs, ExchangeFunction, SideStreams | None], list[Any]]


def steps_of_runs(
    batch: Batch, runs: Runs, exchange: ExchangeFunction, streams: SideStreams | None
) -> list[Any]:
    """One step of every run; what they return must stay alive."""

    def step_of(run: CaptureState) -> Any:
        clock, info = run.network.replicas.clock, run.records

        def on_device(
            state: ExchangeState, energy: Energy, tested: Any, inputs: StepInputs, *rest: Any
        ) -> tuple[ExchangeState, Exchanged, StepInfo]:
            return state, exchange(state, energy, tested, run.table, info, clock, *rest), info

        inputs = StepInputs(*run.table, clock, ({"batch": batch},), move_noise={})
        with torch.no_grad():
            rules = run.network.rules
            outcome = step(run.network, run.exchange, inputs, rules, exchange=on_device)
            clock += 1
        return outcome

    return [step_of(run) for run in (runs if streams is None else streams.each(runs))]


def energies_of_runs(
    batch: Batch, runs: Runs, exchange: ExchangeFunction, streams: SideStreams | None
) -> list[Energy]:
    """Energies of every run's replicas, without a move: for repeated draws and swap batches."""
    with torch.no_grad():
        return [
            run.network.energies({SWAP: batch})
            for run in (runs if streams is None else streams.each(runs))
        ]


def exchange_and_record(
    state: ExchangeState,
    energy: Energy,
    tested: Sequence[Energy],
    table: ExchangeInputs,
    records: StepInfo,
    clock: Tensor,
    rules: Rules,
    n_data: int,
    finite_population: bool,
) -> Exchanged:
    """`exchange_rungs` on the table's row of this step; state and records are written in place."""
    row = (clock % len(table.lr))[None]
    drawn = ExchangeInputs(*(values.index_select(0, row)[0] for values in table))
    inputs = StepInputs(*drawn, clock, target_noise=(), move_noise={})
    new, exchanged, info = exchange_rungs(
        state, energy, tested, inputs, rules, n_data, finite_population
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
        self._graphs: dict[Any, tuple[Graph, Batch]] = {}  # with the batch or loader it reads
        self.failed = False  # once something could not be captured, the runs go on without

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def compiled(self) -> bool:
        """Are all of them? A graph of plain parts has the same numbers but is far slower."""
        return all(graph.compiled for graph, _ in self._graphs.values())

    def for_batch(self, batch: Batch, *, energies_of: Sequence[int] | None = None) -> Graph | None:
        """The graph of a step, or of some runs' energies, on batches of this form, with this batch
        in it; None: do it eagerly.
        """
        leaves, form = pytree.tree_flatten(batch)
        plain = Tensor | bool | int | float | str | None
        strange = [leaf for leaf in leaves if not isinstance(leaf, plain)]
        if strange:
            self._fail(f"a batch holds a {type(strange[0]).__name__} besides its tensors")
            return None
        shapes = [(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t for t in leaves]
        key = (str(form), None if energies_of is None else tuple(energies_of), *shapes)
        if key not in self._graphs:
            inputs = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, batch)
            self._make(key, inputs, *self._work(energies_of), Source(lambda: inputs))
        if key not in self._graphs:
            return None
        graph, inputs = self._graphs[key]
        for mine, given in zip(pytree.tree_leaves(inputs), leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)
        return graph

    def for_loader(
        self,
        loader: DeviceLoader,
        size: int,
        *,
        twice: bool = False,
        energies_of: Sequence[int] | None = None,
    ) -> Graph | None:
        """The graph of a step, or of some runs' energies, that takes batches from the loader."""
        key = (id(loader), size, twice, None if energies_of is None else tuple(energies_of))
        if key not in self._graphs:
            work, states = self._work(energies_of)
            generators = [loader.generator, *([loader.repeat_generator] if twice else [])]
            select = functools.partial(loader.select, size, twice=twice)
            self._make(key, loader, work, states, Source(select, generators, [loader.cursor]))
        return self._graphs[key][0] if key in self._graphs else None

    def _work(self, energies_of: Sequence[int] | None) -> tuple[Work, Runs]:
        """What is captured, and of which runs."""
        if energies_of is None:
            return steps_of_runs, self._states
        return energies_of_runs, [self._states[k] for k in energies_of]

    def _make(self, key: Any, inputs: Batch, work: Work, states: Runs, source: Source) -> None:
        """Capture with compiled parts, else without, else not at all, and log the reason."""
        if self.failed:
            return
        steps = sum(graph.work is steps_of_runs for graph, _ in self._graphs.values())
        if steps >= MOST_GRAPHS and work is steps_of_runs:
            self._fail(
                f"batches came in more than {MOST_GRAPHS} shapes or from more loaders, "
                "and each is a graph of its own"
            )
            return
        device = states[0].network.replicas.device
        used = [torch.cuda.default_generators[device.index], *source.generators]
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
                        work, states, source, compiled=compiled, deterministic=self._deterministic
                    )
                    self._graphs[key] = (graph, inputs)
                if not compiled:
                    logger.warning(
                        "the step is captured but not compiled, and therefore slower: %s", reason
                    )
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
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        if self.failed:
            return
        self.failed = True
        what = (
            "running eagerly, with the same numbers but slower, because the step cannot be captured"
        )
        if len(self._states) > 1:
            what = "running one after another, because the runs' steps cannot be captured together"
        logger.warning("%s: %s", what, reason)


@contextlib.contextmanager
def _as_if_nothing_happened(states: Runs, source: Source) -> Iterator[None]:
    """Put weights, buffers, momenta, exchange state and generators back after the warm-up."""
    buffers = [
        (part, name, buffer)
        for each in states
        for module in each.network.replicas.modules
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    tensors = [*source.moving, *(buffer for _, _, buffer in buffers)]
    tensors += [tensor for each in states for tensor in each.tensors]
    before = [tensor.clone() for tensor in tensors]
    drawn = [generator.get_state() for generator in source.generators]
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
        for generator, state in zip(source.generators, drawn, strict=True):
            generator.set_state(state)


# The compiler, and modes of CUDA that are set for a while and put back


def compiled_form(
    function: Callable[..., Any], *, deterministic: bool = False
) -> Callable[..., Any]:
    """Compiled for fixed shapes; `deterministic`: no kernel whose sums depend on what was fastest
    when it was timed, where the compiler can do so (torch 2.10 and newer).
    """
    from torch._inductor import config

    options = dict(COMPILER_OPTIONS)
    if deterministic and hasattr(config, "deterministic"):
        options["deterministic"] = True
    return torch.compile(function, dynamic=False, options=options)


def compiled_or_plain(
    function: Callable[..., Any], *, deterministic: bool = False
) -> Callable[..., Any]:
    """The compiled form of a function, until it fails: from then on the function itself."""
    chosen = compiled = compiled_form(function, deterministic=deterministic)

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
    """Let all that waits for the device raise: a failure inside a capture is harder to mend."""
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
    """cuDNN held to reproducible algorithms, or else free to try all and take the fastest."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit
    wanted = not deterministic, deterministic, 0
    cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit = wanted
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit = before


def _release(generator: torch.Generator, state: Tensor) -> None:
    """Put back a generator that a failed capture left believing it is being captured."""
    if generator.device.type != "cuda":
        generator.set_state(state)
        return
    fresh = torch.Generator(generator.device)
    fresh.set_state(state)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
