"""The loop over the steps of a block: eager, or compiled, with the same numbers from the same
random stream.

In float64 the two agree to about 1e-12 a step with the same swap decisions; in float32 to rounding,
until a swap decision falls within rounding of its threshold (tests/test_loop.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrex.density.block import Block, block_length, draw_block, measured_steps, measures
from torchrex.density.replay import CannotReplayError, Replay
from torchrex.density.tensor_ensemble import TensorEnsemble
from torchrex.exchange.algorithm import ExchangeState, Rules, StepInfo, measure, step
from torchrex.rng import Streams

logger = logging.getLogger("torchrex")

# Compiling takes some seconds, an eager step some hundred microseconds: below this many steps it
# does not pay.
STEPS_WORTH_COMPILING = 10_000


class Loop(Protocol):
    """Runs steps [first, first + n) of a block; n is at most `stretch`, so that progress shows and
    Ctrl-C loses little.
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
        measured = measured_steps(self.rules, block.start, block.start + block.length)
        infos = []
        with (
            torch.no_grad()
        ):  # the gradients of the target are taken by themselves; its parameters need none
            for k in range(first, first + n):
                if block.start + k in measured:
                    noise = _row(block.measure_noise, measured.index(block.start + k))
                    state = measure(ensemble, state, noise, self.rules)
                ensemble, state, info = step(ensemble, state, _row(block.inputs, k), self.rules)
                infos.append(info)
        return (
            ensemble,
            state,
            StepInfo(*(torch.stack(values) for values in zip(*infos, strict=True))),
        )


class CompiledLoop:
    """The whole block in one call of a recorded C loop."""

    def __init__(self, rules: Rules, ensemble: TensorEnsemble, state: ExchangeState) -> None:
        self.rules = rules
        self.stretch = block_length(rules, ensemble)
        self._template = ensemble
        self._n_carried = len(ensemble.tensors) + len(state)
        block = trial_block(rules, ensemble)
        inputs, self._input_form = pytree.tree_flatten(_row(block.inputs, 0))
        feed = measures(rules)
        measure_inputs: list[Tensor] = []
        if feed is not None:
            measure_inputs, self._measure_form = pytree.tree_flatten(_row(block.measure_noise, 0))
        self._replay = Replay(
            self._flat_step,
            self._flatten(ensemble, state),
            inputs,
            self._flat_measure if feed is not None else None,
            measure_inputs,
        )
        self._buffers = self._replay.outputs(self.stretch)

    def run(
        self, ensemble: TensorEnsemble, state: ExchangeState, block: Block, first: int, n: int
    ) -> tuple[TensorEnsemble, ExchangeState, StepInfo]:
        """The returned tensors are the loop's own buffers and change with the next call: copy what
        is to be kept.
        """
        carry = self._replay.carry
        for mine, given in zip(carry, self._flatten(ensemble, state), strict=True):
            if mine is not given:
                mine.copy_(given)
        inputs = _rows_from(block.inputs, first)
        measured = measured_steps(self.rules, block.start, block.start + block.length)
        here = measured_steps(self.rules, block.start + first, block.start + first + n)
        measure_inputs: list[Tensor] = []
        if here:
            skip = measured.index(here[0])
            measure_inputs = _rows_from(block.measure_noise, skip)
        outputs = [buffer[:n] for buffer in self._buffers]
        at, every = (here[0] - block.start - first, here.step) if here else (-1, 0)
        self._replay.run(n, inputs, outputs, measure_inputs, measure_at=at, every=every)
        ensemble, state = self._unflatten(carry)
        return ensemble, state, StepInfo(*outputs)

    def _flat_step(self, *tensors: Tensor) -> Sequence[Tensor]:
        n = self._n_carried
        ensemble, state = self._unflatten(tensors[:n])
        inputs = pytree.tree_unflatten(tensors[n:], self._input_form)
        ensemble, state, info = step(ensemble, state, inputs, self.rules)
        return [*self._flatten(ensemble, state), *info]

    def _flat_measure(self, *tensors: Tensor) -> Sequence[Tensor]:
        n = self._n_carried
        ensemble, state = self._unflatten(tensors[:n])
        noise = pytree.tree_unflatten(tensors[n:], self._measure_form)
        return self._flatten(ensemble, measure(ensemble, state, noise, self.rules))

    def _flatten(self, ensemble: TensorEnsemble, state: ExchangeState) -> list[Tensor]:
        return [*ensemble.tensors, *state]

    def _unflatten(self, tensors: Sequence[Tensor]) -> tuple[TensorEnsemble, ExchangeState]:
        n = len(self._template.tensors)
        return self._template.with_tensors(tensors[:n]), ExchangeState(*tensors[n:])


def make_loop(
    rules: Rules, ensemble: TensorEnsemble, state: ExchangeState, *, compiled: bool
) -> Loop:
    """The compiled loop if asked for and possible; else the eager one, with the reason in the log."""
    eager = EagerLoop(rules)
    if not compiled:
        return eager
    try:
        loop = CompiledLoop(rules, ensemble, state)
        require_same_numbers(eager, loop, ensemble, state)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning(
            "running eagerly, with the same numbers but slower, because the loop cannot be compiled: %s",
            reason[:300],
        )
        return eager
    return loop


def trial_block(rules: Rules, ensemble: TensorEnsemble, length: int = 3) -> Block:
    """A few steps with random numbers of their own, of which the first begins with a measurement if
    there are any.
    """
    feed = measures(rules)
    return draw_block(
        Streams(0, ensemble.position.device), rules, ensemble, feed.every if feed else 0, length
    )


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
    """The rows of every stacked tensor from `first` on, each row contiguous as the kernels expect."""
    leaves = [tensor[first:] for tensor in pytree.tree_leaves(tree)]
    return [tensor if tensor[0].is_contiguous() else tensor.contiguous() for tensor in leaves]
