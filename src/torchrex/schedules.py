"""Schedules: functions of the step (0, 1, 2, ...) that multiply temperatures and learning rates, or
are gains. Any function of your own will do as well.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

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


def from_torch(factory: Callable[[Any], Any], *, lr: float | None = None) -> Schedule:
    """A scheduler of `torch.optim.lr_scheduler` as a schedule: its lr at a step over `lr`.

    `factory` makes the scheduler of an optimizer with the learning rate `lr`, which must be given
    if the scheduler names rates (`eta_min`, `max_lr`). One call of its `step()` is one step here.
    As `Ladder(decay=...)` it multiplies drift and noise variance, so a rung keeps its temperature.
    Values are computed in order and kept; any step may be asked for.

    >>> from torch.optim.lr_scheduler import StepLR
    >>> halved = from_torch(lambda optimizer: StepLR(optimizer, 100, gamma=0.5))
    >>> halved(0), halved(100), halved(99)
    (1.0, 0.5, 1.0)
    """
    import torch

    is_given, lr = lr is not None, 1.0 if lr is None else lr
    if not (math.isfinite(lr) and lr > 0):
        raise InvalidArgumentError(f"lr must be positive and finite, got {lr}")
    optimizer = torch.optim.SGD([torch.zeros(())], lr=lr)
    scheduler = factory(optimizer)
    kinds = torch.optim.lr_scheduler
    metric = isinstance(scheduler, kinds.ReduceLROnPlateau)
    if metric or not isinstance(scheduler, kinds.LRScheduler):
        raise InvalidArgumentError(
            "factory must return a scheduler of torch.optim.lr_scheduler whose step() needs no "
            f"metric, got {type(scheduler).__name__}; a schedule is a function of the step alone"
        )
    if not is_given and (rates := _rates_in(scheduler, optimizer.param_groups[0])):
        raise InvalidArgumentError(
            f"{type(scheduler).__name__} names rates ({', '.join(sorted(rates))}); give "
            "from_torch(..., lr=...), the lr of your optimizer, to which they are relative"
        )
    optimizer.step()  # else torch warns of the order of the two
    factors = array("d", [optimizer.param_groups[0]["lr"] / lr])
    ended: list[Exception] = []  # a scheduler of finite length raises past its end

    def factor(step: int) -> float:
        while len(factors) <= step:
            if ended:
                raise ended[0]
            try:
                scheduler.step()
            except Exception as error:
                reason = " ".join(str(error).split())
                words = f"{type(scheduler).__name__} has no step {len(factors)} ({reason})"
                ended.append(InvalidArgumentError(f"{words}; give it as many steps as the run has"))
                raise ended[0] from error
            factors.append(optimizer.param_groups[0]["lr"] / lr)
        return float(factors[step])

    factor(1)
    if optimizer.param_groups[0]["momentum"]:
        raise InvalidArgumentError(
            f"{type(scheduler).__name__} changes the momentum too, but friction is constant; "
            "give it cycle_momentum=False"
        )
    return factor


def _rates_in(scheduler: Any, group: dict[str, Any]) -> set[str]:
    """The names of rates that a scheduler was given, which are no factors of lr."""
    own = {name for name in ("eta_min", "max_lrs") if getattr(scheduler, name, None)}
    parts = (_rates_in(each, group) for each in getattr(scheduler, "_schedulers", ()))
    return own.union({"max_lr", "swa_lr"} & group.keys(), *parts)


def _require_count(name: str, value: int) -> None:
    if value < 1:
        raise InvalidArgumentError(f"{name} must be at least 1, got {value}")
