"""Steps in blocks: the random numbers of a block are drawn at once, and a loop runs over its steps.

The block length depends on the sizes of the problem alone and is part of the random stream: a run
of 1,000 steps is the beginning of a run of 100,000, and a resumed run draws its block again.

The loop is eager or compiled, with the same numbers. In float64 the two agree to about 1e-12 a step
with the same swap decisions. In float32 they agree to rounding, until a swap decision falls within
rounding of its threshold (tests/test_loop.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrex.density.replay import CannotReplayError, Occasions, Replay
from torchrex.density.tensor_ensemble import TensorEnsemble
from torchrex.exchange.algorithm import (
    ExchangeState,
    Rules,
    StepInfo,
    StepInputs,
    measure,
    step,
    swap,
)
from torchrex.exchange.inputs import draw_exchange_inputs, n_usable
from torchrex.exchange.noise import RepeatedDraws
from torchrex.rng import Streams
from torchrex.targets import Noise
from torchrex.xoshiro import uniforms

logger = logging.getLogger("torchrex")

# Compiling takes some seconds, an eager step some hundred microseconds.
STEPS_WORTH_COMPILING = 10_000  # of short steps; fewer if a step has many terms of data
TERMS_OF_A_LONG_STEP = 2**14  # that eagerly take as long as all else in a step
# Small enough to stay near the core, long enough that many steps share one Python call.
BYTES_PER_BLOCK = 2**22
SHORTEST, LONGEST = 32, 65536  # steps in a block
LONGEST_STRETCH = 0.5  # seconds in C: then comes a look at signals and at the clock
LONG = 0.5  # seconds of a step that is timed only once
SMALL = 2**16  # numbers in an ensemble that one thread moves fastest


# Torch's usual number of threads, for each thread that has lowered it: one that begins meanwhile
# finds the lowered number, and must not go back to that.
_usual: dict[int, int] = {}
_changing = threading.Lock()


@contextmanager
def few_threads(size: int) -> Iterator[None]:
    """Run the body on one thread if the ensemble has few numbers: on a busy machine two threads
    took 30 s for a run that takes one thread 1 s.
    """
    me = threading.get_ident()
    with _changing:
        usual = max(torch.get_num_threads(), *_usual.values(), 1)
        if size > SMALL or usual == 1 or me in _usual:
            usual = 1
        else:
            _usual[me] = usual
    if usual == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        with _changing:
            torch.set_num_threads(_usual.pop(me))


class Block(NamedTuple):
    """The inputs of `length` steps from step `start`, stacked along a first axis."""

    start: int
    length: int
    inputs: StepInputs
    measure_noise: Noise | None  # one entry for each step of the block at which sigma2 is measured
    swap_noise: tuple[Noise, ...] | None  # of each round, one entry for each step with a swap batch
    n_usable: int  # steps from the first on for which the schedules have values


def measures(rules: Rules) -> RepeatedDraws | None:
    """The feed by repeated draws, if the estimator has one."""
    return rules.noise.feed if isinstance(rules.noise.feed, RepeatedDraws) else None


def measured_steps(rules: Rules, start: int, stop: int) -> range:
    """The steps in [start, stop) that begin with a measurement of sigma2: every 100th, say."""
    feed = measures(rules)
    if feed is None:
        return range(0)
    first = max(rules.noise.first_measurement, -(-start // feed.every) * feed.every)
    return range(first, stop, feed.every)


def swapped_steps(rules: Rules, start: int, stop: int) -> range:
    """The steps in [start, stop) that begin with a swap batch."""
    if rules.swap_batch is None or not rules.swaps:
        return range(0)
    every = rules.swap_interval
    return range(-(-max(start, rules.swap_start) // every) * every, stop, every)


def draw_block(
    streams: Streams, rules: Rules, ensemble: TensorEnsemble, start: int, length: int
) -> Block:
    """Draw the block that begins at `start`. Each stream is read by one consumer, in this order."""
    replicas, runs, _ = ensemble.position.shape
    dtype, device, shape = ensemble.position.dtype, ensemble.position.device, (replicas, runs)
    common = draw_exchange_inputs(
        streams, rules, start, length, runs=runs, device=device, dtype=dtype, uniforms=uniforms
    )
    target, n_rounds = ensemble.target, max(1, rules.pairing.n_rounds(rules.ladder.n_pairs))
    swap_noise = None
    if rules.swap_batch is not None and rules.swaps:
        n, size = len(swapped_steps(rules, start, start + length)), rules.swap_batch
        swap_noise = tuple(
            target.draw_swap_batch(streams["swap batch"], n, shape, size) for _ in range(n_rounds)
        )
        n_rounds = 1  # of the step's own energies
    rounds = tuple(
        target.draw_noise(streams["target"], length, shape, dtype) for _ in range(n_rounds)
    )
    measure_noise, feed = None, measures(rules)
    if feed is not None:
        n = len(measured_steps(rules, start, start + length))
        measure_noise = target.draw_noise(streams["measure"], n, (feed.n_draws, *shape), dtype)
    refresh = rules.momentum == "refresh"
    move_noise = ensemble.draw_move_noise(streams["move"], length, refresh=refresh)
    steps = torch.arange(start, start + length, device=device)
    inputs = StepInputs(*common, step=steps, target_noise=rounds, move_noise=move_noise)
    usable = n_usable(common) if rules.ladder.has_schedules else length
    return Block(start, length, inputs, measure_noise, swap_noise, usable)


def first_of_its_kind(rules: Rules) -> int:
    """A step that has all that steps can have: a measurement, or a swap batch."""
    feed = measures(rules)
    return feed.every if feed else -(-rules.swap_start // rules.swap_interval) * rules.swap_interval


def block_length(rules: Rules, ensemble: TensorEnsemble) -> int:
    """A power of two between SHORTEST and LONGEST, smaller for larger problems."""

    def n_bytes(tree: Any) -> int:
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    feed = measures(rules)
    every = feed.every if feed else 1  # a step with a measurement, if there are any
    first = first_of_its_kind(rules)
    one = draw_block(Streams(0, ensemble.position.device), rules, ensemble, first, 1)
    # Without the number of the step, which is not random: it must not change the stream.
    inputs = one.inputs._replace(step=one.inputs.step[:0])
    now_and_then = (
        n_bytes(one.measure_noise) / every + n_bytes(one.swap_noise) / rules.swap_interval
    )
    fitting = int(BYTES_PER_BLOCK // (n_bytes(inputs) + now_and_then))
    return min(LONGEST, max(SHORTEST, 1 << (max(1, fitting).bit_length() - 1)))


def one_step(
    ensemble: TensorEnsemble,
    state: ExchangeState,
    inputs: StepInputs,
    swap_noise: tuple[Noise, ...] | None,
    rules: Rules,
) -> tuple[TensorEnsemble, ExchangeState, StepInfo]:
    """A step; where there is a swap batch, after its swaps, which its information reports."""
    if swap_noise is None:
        return step(ensemble, state, inputs, rules)
    energies = [ensemble.energies(noise) for noise in swap_noise]
    ensemble, state, swapped = swap(ensemble, state, energies, inputs, rules)
    ensemble, state, info = step(ensemble, state, inputs, rules)
    return ensemble, state, swapped._replace(position=info.position)


class Loop(Protocol):
    """Runs steps [first, first + n) of a block; n is at most `stretch`, so that progress shows and
    Ctrl-C loses little. The information is overwritten by the next call: copy what is to be kept.
    """

    stretch: int

    def run(
        self, ensemble: TensorEnsemble, state: ExchangeState, block: Block, first: int, n: int
    ) -> tuple[TensorEnsemble, ExchangeState, StepInfo]: ...


class EagerLoop:
    """One step after the other, from Python."""

    stretch = 128

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def run(
        self, ensemble: TensorEnsemble, state: ExchangeState, block: Block, first: int, n: int
    ) -> tuple[TensorEnsemble, ExchangeState, StepInfo]:
        span = (block.start, block.start + block.length)
        measured, swapped = measured_steps(self.rules, *span), swapped_steps(self.rules, *span)
        infos = []
        with torch.no_grad():  # a target takes its own gradients; its parameters need none
            for k in range(first, first + n):
                inputs, noise = _row(block.inputs, k), None
                if block.start + k in measured:
                    measured_noise = _row(block.measure_noise, measured.index(block.start + k))
                    state = measure(ensemble, state, measured_noise, self.rules)
                if block.start + k in swapped:
                    noise = _row(block.swap_noise, swapped.index(block.start + k))
                ensemble, state, info = one_step(ensemble, state, inputs, noise, self.rules)
                infos.append(info)
        stacked = StepInfo(*(torch.stack(values) for values in zip(*infos, strict=True)))
        return ensemble, state, stacked


class CompiledLoop:
    """The whole block in one call of a recorded C loop. Runs of the same form may share one."""

    def __init__(self, rules: Rules, ensemble: TensorEnsemble, state: ExchangeState) -> None:
        self.rules = rules
        self.template = ensemble
        self._n_carried = len(ensemble.tensors) + len(state)
        block, feed = trial_block(rules, ensemble), measures(rules)
        inputs, self._input_form = pytree.tree_flatten(_row(block.inputs, 0))
        measure_inputs: list[Tensor] = []
        if feed is not None:
            measure_inputs, self._measure_form = pytree.tree_flatten(_row(block.measure_noise, 0))
        swap_inputs: list[Tensor] = []
        if block.swap_noise is not None:
            swap_inputs, self._swap_form = pytree.tree_flatten(_row(block.swap_noise, 0))
        self._n_inputs = len(inputs)
        self._replay = Replay(
            self._flat_step,
            [*ensemble.tensors, *state],
            inputs,
            self._flat_measure if feed is not None else None,
            measure_inputs,
            self._flat_swap_step if block.swap_noise is not None else None,
            swap_inputs,
        )
        longest = block_length(rules, ensemble) if self._replay.is_recorded else EagerLoop.stretch
        self._buffers = self._replay.outputs(longest)
        self._longest, self.stretch = longest, min(longest, EagerLoop.stretch)

    def run(
        self, ensemble: TensorEnsemble, state: ExchangeState, block: Block, first: int, n: int
    ) -> tuple[TensorEnsemble, ExchangeState, StepInfo]:
        for mine, given in zip(self._replay.carry, [*ensemble.tensors, *state], strict=True):
            mine.copy_(given)

        def of(steps: Callable[..., range], noise: Any) -> Occasions:
            """Where steps of a kind are among these, and what they take."""
            whole = steps(self.rules, block.start, block.start + block.length)
            here = steps(self.rules, block.start + first, block.start + first + n)
            if not here:
                return Occasions()
            inputs = _rows_from(noise, whole.index(here[0]))
            return Occasions(inputs, here[0] - block.start - first, here.step)

        inputs, outputs = _rows_from(block.inputs, first), [buffer[:n] for buffer in self._buffers]
        measured = of(measured_steps, block.measure_noise)
        began = time.perf_counter()
        self._replay.run(n, inputs, outputs, measured, of(swapped_steps, block.swap_noise))
        seconds = (time.perf_counter() - began) / n
        self.stretch = max(1, min(self._longest, int(LONGEST_STRETCH / max(seconds, 1e-9))))
        ensemble, state = self._unflatten([tensor.clone() for tensor in self._replay.carry])
        info = StepInfo(*outputs)
        accepted, proposed = info.accepted.bool(), info.proposed.bool()
        return ensemble, state, info._replace(accepted=accepted, proposed=proposed)

    def _flat_step(self, *tensors: Tensor) -> Sequence[Tensor]:
        ensemble, state = self._unflatten(tensors[: self._n_carried])
        inputs = pytree.tree_unflatten(tensors[self._n_carried :], self._input_form)
        ensemble, state, info = step(ensemble, state, inputs, self.rules)
        return [*ensemble.tensors, *state, *_without_bools(info)]

    def _flat_swap_step(self, *tensors: Tensor) -> Sequence[Tensor]:
        ensemble, state = self._unflatten(tensors[: self._n_carried])
        given = tensors[self._n_carried :]
        inputs = pytree.tree_unflatten(given[: self._n_inputs], self._input_form)
        noise = pytree.tree_unflatten(given[self._n_inputs :], self._swap_form)
        ensemble, state, info = one_step(ensemble, state, inputs, noise, self.rules)
        return [*ensemble.tensors, *state, *_without_bools(info)]

    def _flat_measure(self, *tensors: Tensor) -> Sequence[Tensor]:
        ensemble, state = self._unflatten(tensors[: self._n_carried])
        noise = pytree.tree_unflatten(tensors[self._n_carried :], self._measure_form)
        return [*ensemble.tensors, *measure(ensemble, state, noise, self.rules)]

    def _unflatten(self, tensors: Sequence[Tensor]) -> tuple[TensorEnsemble, ExchangeState]:
        n = len(self.template.tensors)
        return self.template.with_tensors(tensors[:n]), ExchangeState(*tensors[n:])


def _without_bools(info: StepInfo) -> list[Tensor]:
    """Inductor stores bools one by one: at 1,024 runs it was a third of the step."""
    return [values.int() if values.dtype == torch.bool else values for values in info]


def make_loop(
    rules: Rules,
    ensemble: TensorEnsemble,
    state: ExchangeState,
    *,
    compiled: bool,
    shared: Loop | None = None,
) -> Loop:
    """The compiled loop if asked for and possible, else the eager one with the reason in the log.

    `shared` is the loop of another run with the same target and rules. It serves this run too if it
    is compiled for as many numbers.
    """
    eager = EagerLoop(rules)
    if not compiled:
        return eager
    try:
        if isinstance(shared, CompiledLoop) and (
            shared.template.position.shape == ensemble.position.shape
        ):
            loop = shared
        else:
            loop = CompiledLoop(rules, ensemble, state)
        require_same_numbers(eager, loop, ensemble, state)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning(
            "running eagerly, with the same numbers but slower (%.2g ms a step), because the loop "
            "cannot be compiled: %s",
            _milliseconds(eager, ensemble, state),
            reason[:300],
        )
        return eager
    return loop


def _milliseconds(loop: EagerLoop, ensemble: TensorEnsemble, state: ExchangeState) -> float:
    """Of a step: the fastest of three, or the first if it is a long one."""
    block, taken = trial_block(loop.rules, ensemble), list[float]()
    while len(taken) < block.length and sum(taken) < LONG:
        start = time.perf_counter()
        loop.run(ensemble, state, block, len(taken), 1)
        taken.append(time.perf_counter() - start)
    return 1e3 * min(taken)


def trial_block(rules: Rules, ensemble: TensorEnsemble, length: int = 3) -> Block:
    """A few steps with random numbers of their own; the first begins with a measurement or a swap
    batch if there are any.
    """
    streams = Streams(0, ensemble.position.device)
    return draw_block(streams, rules, ensemble, first_of_its_kind(rules), length)


def require_same_numbers(
    eager: EagerLoop, loop: CompiledLoop, ensemble: TensorEnsemble, state: ExchangeState
) -> None:
    """Compare a few steps of the two loops before the compiled one is trusted with the run."""
    block = trial_block(eager.rules, ensemble)
    _, _, expected = eager.run(ensemble, state, block, 0, block.length)
    _, _, got = loop.run(ensemble, state, block, 0, block.length)
    tolerance = 1e-3 if ensemble.position.dtype == torch.float32 else 1e-8
    for name, a, b in zip(StepInfo._fields, expected, got, strict=True):
        if not torch.allclose(
            a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        ):
            raise CannotReplayError(f"its {name} differs from the eager one")


def _row(tree: Any, k: int) -> Any:
    return pytree.tree_map(lambda tensor: tensor[k], tree)


def _rows_from(tree: Any, first: int) -> list[Tensor]:
    """The rows of every stacked tensor from `first` on; kernels expect contiguous rows."""
    leaves = [tensor[first:] for tensor in pytree.tree_leaves(tree)]
    return [tensor if tensor[0].is_contiguous() else tensor.contiguous() for tensor in leaves]
