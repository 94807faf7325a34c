"""Randomness in blocks: everything that a fixed number of consecutive steps takes from outside,
drawn at once.

The block length depends on the sizes of the problem alone and is part of the random stream: a run
of 1,000 steps is the beginning of a run of 100,000, and a resumed run draws the block it was
stopped in again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchrex.density.tensor_ensemble import TensorEnsemble
from torchrex.exchange.algorithm import Rules, StepInputs
from torchrex.exchange.inputs import draw_exchange_inputs, n_usable
from torchrex.exchange.noise import RepeatedDraws
from torchrex.rng import Streams
from torchrex.targets import Noise

BYTES_PER_BLOCK = (
    2**22
)  # little enough to stay near the core, long enough that many steps share one Python call
SHORTEST, LONGEST = 32, 65536


class Block(NamedTuple):
    """The inputs of `length` steps from step `start`, stacked along a first axis."""

    start: int
    length: int
    inputs: StepInputs
    measure_noise: Noise | None  # one entry for each step of the block at which sigma2 is measured
    n_usable: int  # steps from the first on for which the schedules have values


def block_length(rules: Rules, ensemble: TensorEnsemble) -> int:
    """A power of two between SHORTEST and LONGEST, smaller for larger problems."""
    feed = measures(rules)
    every = feed.every if feed else 1
    one = draw_block(
        Streams(0, ensemble.position.device), rules, ensemble, every, 1
    )  # with a measurement, if there are any
    # Without the number of the step, which is not random: it must not change the stream.
    n_bytes = _bytes(one.inputs._replace(step=one.inputs.step[:0]))
    fitting = max(1, int(BYTES_PER_BLOCK // (n_bytes + _bytes(one.measure_noise) / every)))
    return min(LONGEST, max(SHORTEST, 1 << (fitting.bit_length() - 1)))


def _bytes(tree: Any) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in pytree.tree_leaves(tree)
        if tensor is not None
    )


def measures(rules: Rules) -> RepeatedDraws | None:
    """The feed by repeated draws, if the estimator has one."""
    return rules.noise.feed if isinstance(rules.noise.feed, RepeatedDraws) else None


def measured_steps(rules: Rules, start: int, stop: int) -> range:
    """The steps in [start, stop) that begin with a measurement of sigma2: every 100th, say."""
    feed = measures(rules)
    if feed is None:
        return range(0)
    every = feed.every
    first = max(rules.noise.first_measurement, -(-start // every) * every)
    return range(first, stop, every)


def draw_block(
    streams: Streams, rules: Rules, ensemble: TensorEnsemble, start: int, length: int
) -> Block:
    """Draw the block that begins at `start`. Each stream is read by one consumer, in this order,
    whatever the others do.
    """
    replicas, runs, _ = ensemble.position.shape
    dtype, device, shape = ensemble.position.dtype, ensemble.position.device, (replicas, runs)
    common = draw_exchange_inputs(
        streams, rules, start, length, runs=runs, device=device, dtype=dtype
    )
    n_rounds = rules.pairing.n_rounds(rules.ladder.n_pairs)

    target = ensemble.target
    rounds = tuple(
        target.draw_noise(streams["target"], length, shape, dtype) for _ in range(max(1, n_rounds))
    )
    measure_noise, feed = None, measures(rules)
    if feed is not None:
        n_measured = len(measured_steps(rules, start, start + length))
        measure_noise = target.draw_noise(
            streams["measure"], n_measured, (feed.n_draws, *shape), dtype
        )
    move_noise = ensemble.draw_move_noise(
        streams["move"], length, refresh=rules.momentum == "refresh"
    )
    steps = torch.arange(start, start + length, device=device)
    inputs = StepInputs(*common, step=steps, target_noise=rounds, move_noise=move_noise)
    return Block(
        start,
        length,
        inputs,
        measure_noise,
        n_usable(common) if rules.ladder.has_schedules else length,
    )
