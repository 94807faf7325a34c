"""A whole step on a GPU as one CUDA graph: batch, augmentation, all replicas of all runs,
variances, swaps, moves, records.

A replay needs nothing from the host. Replicas run on side streams of their own, because one
replica's kernels do not fill a large GPU; modules, exchange and move are compiled. What cannot be
compiled is captured as it is; what cannot be captured runs eagerly.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from torchrex.network.compiling import compiled_form
from torchrex.network.cuda_modes import no_waiting
from torchrex.network.ensemble import ModuleEnsemble
from torchrex.network.records import RECORDED, Records
from torchrex.network.work import assemble_energy, update_rows
from torchrex.targets import Batch, Energy

WARM_UP = 3  # steps before a capture: compilation, cuDNN's choice of algorithms, the allocator


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
        self._lanes: list[torch.cuda.Stream] | None = (
            None  # one side stream per run while several are captured
        )
        plain: list[Any] = [assemble_energy, update_rows, exchange_and_record]
        assemble, update, exchange = (
            [compiled_form(function) for function in plain] if compiled else plain
        )
        self._exchange: Callable[..., Exchanged] = exchange
        # One compiled form for all runs on the same energy: the compiler takes a method of another
        # object for other code.
        losses = {id(each.ensemble.energy): each.ensemble.energy.losses for each in workings}
        losses = (
            {key: compiled_form(function) for key, function in losses.items()}
            if compiled
            else losses
        )
        for each in workings:
            each.ensemble.use(losses[id(each.ensemble.energy)], assemble, update)
        try:
            self._prepare(generators, moving)
        finally:
            for each in workings:  # steps that are not captured are eager ones
                each.ensemble.use(each.ensemble.energy.losses, assemble_energy, update_rows)

    @abstractmethod
    def _body(self) -> Any:
        """The work itself; what it returns stays alive, because tensors of other streams must not
        be freed during a capture.
        """

    def replay(self) -> None:
        self._graph.replay()

    def _prepare(self, generators: Sequence[torch.Generator], moving: Sequence[Tensor]) -> None:
        """Warm up, then capture."""
        device = self._device
        default = torch.cuda.default_generators[device.index]
        with self._as_if_nothing_happened(generators, moving), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the compiler's advice is not for the user of this package
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                places = [tensor.clone() for tensor in moving]
                for k in range(WARM_UP):
                    state = default.get_state()
                    with no_waiting() if k == WARM_UP - 1 else contextlib.nullcontext():
                        self._body()
                    if len(self._workings) > 1 and not torch.equal(state, default.get_state()):
                        raise RuntimeError(
                            "a module draws random numbers, as dropout does, which runs must not share"
                        )
                    for tensor, place in zip(
                        moving, places, strict=True
                    ):  # never past the end of the data
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
            # The inner context leaves its stream behind if a capture fails; the outer one goes back
            # to ours.
            with (
                torch.cuda.stream(torch.cuda.current_stream(device)),
                torch.cuda.graph(self._graph),
            ):
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
    def _as_if_nothing_happened(
        self, generators: Sequence[torch.Generator], moving: Sequence[Tensor]
    ) -> Iterator[None]:
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
            tensors += [
                *ensemble.rows.moved(),
                *(ensemble.common.moved() if ensemble.common is not None else []),
            ]
        before = [tensor.clone() for tensor in tensors]
        states = [generator.get_state() for generator in generators]
        try:
            yield
            for part, name, buffer in buffers:
                if part._buffers[name] is not buffer:  # a replay would read the old one for ever
                    raise RuntimeError(
                        f"the module puts another tensor in the place of its buffer {name!r}; change it in place"
                    )
        finally:
            torch.cuda.synchronize(
                self._device
            )  # what a failed step has still under way must not come after this
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

        def exchange(
            state: ExchangeState, energy: Energy, *_: Any
        ) -> tuple[ExchangeState, Exchanged, StepInfo]:
            exchanged = self._exchange(
                state,
                energy,
                table,
                records.info,
                ensemble.clock,
                rules,
                ensemble.n_data,
                ensemble.finite_population,
            )
            return state, exchanged, records.info

        inputs = StepInputs(*table, ensemble.clock, ({"batch": batch},), move_noise={})
        return step(ensemble, own_state, inputs, rules, exchange=exchange)


class CapturedEnergies(Captured):
    """Energies of every run's replicas, without a move: what repeated draws measure. They are left
    in `energies`.
    """

    energies: list[Tensor]

    def _body(self) -> Any:
        batch = self._select()
        with torch.no_grad():
            self.energies = [
                workings.ensemble.energies({"batch": batch}).total for workings in self._in_lanes()
            ]
        return batch, self.energies


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
