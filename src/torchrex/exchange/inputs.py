"""What the exchange of consecutive steps takes from outside, drawn for a block of steps at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.exchange.algorithm import Rules, StepInputs
from torchrex.rng import Streams


class ExchangeInputs(NamedTuple):
    """What the exchange of consecutive steps takes from outside, whatever the ensemble, stacked
    along a first axis.

    NaN where a schedule has no usable value, see `Ladder.table`.
    """

    temperature: Tensor
    lr: Tensor
    move_temperature: Tensor
    first_gap: Tensor
    proposed: Tensor
    uniform: Tensor


def draw_exchange_inputs(
    streams: Streams,
    rules: Rules,
    start: int,
    length: int,
    *,
    runs: int,
    device: torch.device,
    dtype: torch.dtype,
    uniforms: Callable[..., Tensor] | None = None,
) -> ExchangeInputs:
    """The schedules' values, the pairs to be tested and the uniforms of the swaps, for `length`
    steps from `start`. `uniforms` draws those of the swaps; None: torch.
    """
    n_pairs = rules.ladder.n_pairs
    temperature, lr, move_temperature = rules.ladder.table(
        start, length, device=device, dtype=dtype
    )
    if rules.tempering == "likelihood":  # the moves have temperature 1, see `Exchanged.power`
        cooled = torch.where(temperature.isfinite(), move_temperature / temperature, 1.0)
        move_temperature = cooled if rules.ladder.noise else torch.ones_like(temperature)
    first_temperature, *_ = rules.ladder.table(0, 1, device=device, dtype=dtype)
    first_gap = (1.0 / first_temperature).neg().diff() if n_pairs else first_temperature[:, :0]
    steps = torch.arange(start, start + length, device=device)
    if n_pairs:
        every, first = rules.swap_interval, rules.swap_start
        attempts = steps if every == 1 else steps // every  # a division takes as long as a normal
        proposed = rules.pairing.propose(streams["pairing"], attempts, n_pairs, runs)
        if every > 1 or first > 0:
            due = (steps % every == 0) & (steps >= first)
            proposed = proposed & due[:, None, None, None]
    else:
        proposed = torch.zeros(length, 0, 0, 1, dtype=torch.bool, device=device)
    shape = (length, rules.pairing.n_rounds(n_pairs), n_pairs, runs)
    draw = partial(torch.rand, device=device) if uniforms is None else uniforms
    uniform = draw(shape, generator=streams["swap"], dtype=dtype)
    return ExchangeInputs(
        temperature, lr, move_temperature, first_gap.expand(length, -1), proposed, uniform
    )


def n_usable(inputs: ExchangeInputs | StepInputs) -> int:
    """How many steps from the first on have values of all schedules."""
    values = torch.cat([inputs.lr, inputs.move_temperature], 1)
    # A temperature may be infinite, but not unknown.
    usable = values.isfinite().all(1) & ~inputs.temperature.isnan().any(1)
    unusable = (~usable).nonzero()
    return int(unusable[0]) if len(unusable) else len(values)
