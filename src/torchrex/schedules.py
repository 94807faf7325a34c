"""Schedules: functions of the step (0, 1, 2, ...) that multiply temperatures and learning rates, or
are gains. Any function of your own will do as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torchrex.errors import InvalidArgumentError

Schedule = Callable[[int], float]


def constant(value: float = 1.0) -> Schedule:
    """The same value at every step."""
    return lambda step: value


def geometric(rate: float, *, every: int = 1, start: float = 1.0) -> Schedule:
    """`start * rate ** (step // every)`; the paper has `geometric(1 / 1.02, every=epoch)`."""
    if not (math.isfinite(rate) and rate > 0):
        raise InvalidArgumentError(f"rate must be positive and finite, got {rate}")
    _require_count("every", every)
    return lambda step: start * rate ** (step // every)


def hold_then_decay(hold: int, rate: float, *, every: int = 1, start: float = 1.0) -> Schedule:
    """`start` for the first `hold` steps, then geometric decay by `rate` every `every` steps."""
    decay = geometric(rate, every=every, start=start)
    return lambda step: decay(max(0, step - hold))


def inverse(*, start: int = 1) -> Schedule:
    """The Robbins-Monro gain 1/m with m = step + start (Eq. 13 of the paper)."""
    _require_count("start", start)
    return lambda step: 1.0 / (step + start)


def cyclical(length: int, *, start: float = 1.0, end: float = 0.0) -> Schedule:
    """Cosine from `start` to `end` over each cycle of `length` steps (Zhang et al. 2020)."""
    _require_count("length", length)
    half = 0.5 * (start - end)
    return lambda step: end + half * (1.0 + math.cos(math.pi * (step % length) / length))


def _require_count(name: str, value: int) -> None:
    if value < 1:
        raise InvalidArgumentError(f"{name} must be at least 1, got {value}")
