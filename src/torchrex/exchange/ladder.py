"""The ladder: one temperature and one learning rate per rung, coldest first, annealed by schedules
of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchrex import notebook
from torchrex.errors import LadderError, require_whole
from torchrex.schedules import Schedule

STEP_OF_PRIOR = 0.1  # lr on the prior alone over its variance: SGLD is then 5 % too wide there


@dataclass(frozen=True, init=False)
class Ladder:
    """Rungs from cold to hot.

    `lrs` is one learning rate for all rungs or one per rung; it may be 0. `anneal` and `decay` are
    functions of the step that multiply every temperature and every learning rate, so that the
    ratios between rungs stay as they are; only steps that are taken need a value. `noise`, another
    such function, multiplies the temperature of the moves alone and not that of the swaps: with
    anything but 1 no rung samples its posterior. It is there for code that kept its noise while its
    learning rate fell, as the paper's authors' did.
    """

    temperatures: tuple[float, ...]
    lrs: tuple[float, ...]
    anneal: Schedule | None
    decay: Schedule | None
    noise: Schedule | None

    def __init__(
        self,
        temperatures: Sequence[float],
        lrs: float | Sequence[float],
        *,
        anneal: Schedule | None = None,
        decay: Schedule | None = None,
        noise: Schedule | None = None,
    ) -> None:
        if isinstance(temperatures, int | float):
            raise LadderError(
                f"temperatures must be a sequence, one per rung, got {temperatures}; "
                f"one rung is ({temperatures},)"
            )
        for name, schedule in (("anneal", anneal), ("decay", decay), ("noise", noise)):
            if schedule is not None and not callable(schedule):
                raise LadderError(
                    f"{name} must be a function of the step, such as schedules.geometric(0.99), "
                    f"got {schedule!r}"
                )
        temperatures = _numbers("temperatures", temperatures)
        if not temperatures:
            raise LadderError("a ladder needs at least one temperature, got none")
        for rung, temperature in enumerate(temperatures):
            if not temperature > 0:
                raise LadderError(
                    f"temperatures must be positive, but rung {rung} has {temperature:g}; got "
                    f"{temperatures}. For SGD (temperature 0) use Ladder.descent(lr)."
                )
        for rung, (colder, hotter) in enumerate(pairwise(temperatures), start=1):
            if not hotter > colder:
                raise LadderError(
                    f"temperatures must rise from cold to hot, but rung {rung} ({hotter:g}) is not "
                    f"hotter than rung {rung - 1} ({colder:g}); got temperatures={temperatures}. "
                    "For inverse temperatures use Ladder.from_inverse(...)."
                )
        self._fill(temperatures, lrs, anneal, decay, noise)

    def _fill(
        self,
        temperatures: tuple[float, ...],
        lrs: float | Sequence[float],
        anneal: Schedule | None,
        decay: Schedule | None,
        noise: Schedule | None = None,
    ) -> None:
        n = len(temperatures)
        rates = (float(lrs),) * n if isinstance(lrs, int | float) else _numbers("lrs", lrs)
        if len(rates) != n:
            raise LadderError(f"give one lr or one per rung: got {len(rates)} lrs for {n} rungs")
        for rung, lr in enumerate(rates):
            if not (math.isfinite(lr) and lr >= 0):
                raise LadderError(f"lrs must be finite and >= 0, but rung {rung} has {lr:g}")
        values = (temperatures, rates, anneal, decay, noise)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @classmethod
    def geometric(
        cls,
        cold: float,
        hot: float,
        n_rungs: int,
        *,
        lrs: float | Sequence[float],
        anneal: Schedule | None = None,
        decay: Schedule | None = None,
    ) -> Ladder:
        """Temperatures in equal ratios from `cold` to `hot`."""
        if n_rungs < 2 or not 0 < cold < hot:
            raise LadderError(
                "a geometric ladder needs 0 < cold < hot and 2 or more rungs, "
                f"got cold={cold:g}, hot={hot:g}, n_rungs={n_rungs}"
            )
        top, ratio = n_rungs - 1, hot / cold
        temperatures = [cold * ratio ** (rung / top) for rung in range(top)]
        return cls([*temperatures, hot], lrs, anneal=anneal, decay=decay)

    @classmethod
    def for_likelihood(
        cls, temperatures: Sequence[float], lr: float, *, prior_variance: float
    ) -> Ladder:
        """For `tempering="likelihood"`, where a rung moves at temperature 1 along the gradient of
        its own minus log density, likelihood / T + prior.

            lr_T = 1 / (1 / (lr T) + 1 / (0.1 prior_variance))

        `lr` is that of temperature 1. A flatter likelihood bears larger steps, up to those that the
        prior bears. The hottest temperature may be infinite: that rung samples the prior.
        """
        if not (prior_variance > 0 and lr > 0):
            raise LadderError(
                f"lr and prior_variance must be positive, got {lr} and {prior_variance}"
            )
        if math.isinf(prior_variance) and math.isinf(max(temperatures)):
            raise LadderError(
                "an infinite temperature needs a prior whose variance is known; give one lr per "
                "rung, or a finite temperature"
            )
        lrs = [
            1.0 / (1.0 / (lr * t) + 1.0 / (STEP_OF_PRIOR * prior_variance)) for t in temperatures
        ]
        return cls(temperatures, lrs)

    @classmethod
    def from_inverse(
        cls,
        inverse_temperatures: Sequence[float],
        lrs: float | Sequence[float],
        *,
        anneal: Schedule | None = None,
        decay: Schedule | None = None,
    ) -> Ladder:
        """From inverse temperatures, which fall from cold to hot."""
        if any(beta <= 0 for beta in inverse_temperatures):
            raise LadderError(f"inverse temperatures must be positive: {inverse_temperatures}")
        return cls([1.0 / beta for beta in inverse_temperatures], lrs, anneal=anneal, decay=decay)

    @classmethod
    def descent(cls, lr: float, *, decay: Schedule | None = None, n_rungs: int = 1) -> Ladder:
        """Temperature 0: SGD or momentum SGD instead of sampling. Several such rungs are
        independent descents, and need `NoSwaps()`.
        """
        require_whole("n_rungs", n_rungs, 1)
        ladder = object.__new__(cls)
        ladder._fill((0.0,) * n_rungs, lr, None, decay)
        return ladder

    @property
    def n_rungs(self) -> int:
        return len(self.temperatures)

    @property
    def n_pairs(self) -> int:
        """Pairs of neighbouring rungs."""
        return self.n_rungs - 1

    @property
    def has_schedules(self) -> bool:
        return any(schedule is not None for schedule in (self.anneal, self.decay, self.noise))

    def table(
        self, start: int, n_steps: int, *, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Temperatures, learning rates and the temperatures of the moves, of `n_steps` steps from
        `start`: (n_steps, rungs).

        Tables are made ahead of the steps. A step for which a schedule has no usable value is NaN
        here, and no error until it is taken: see `refuse`.
        """

        def column(base: tuple[float, ...], name: str) -> Tensor:
            row, schedule = torch.tensor(base, dtype=dtype, device=device), getattr(self, name)
            if schedule is None:  # no memory, and the compiled loop need not move its pointer
                return row.expand(n_steps, -1)
            factors = torch.tensor(self._factors(name, start, n_steps), dtype=torch.float64)
            return factors.to(device)[:, None].mul(row.double()).to(dtype)

        temperature = column(self.temperatures, "anneal")
        kept = temperature if self.noise is None else temperature * column((1.0,), "noise")
        return temperature, column(self.lrs, "decay"), kept

    def refuse(self, step: int) -> NoReturn:
        """Raise for a step that is about to be taken and has no values."""
        for name in ("anneal", "decay", "noise"):
            if getattr(self, name) is not None and isinstance(self._factor(name, step), str):
                raise LadderError(self._factor(name, step))
        raise LadderError(
            f"the temperatures or learning rates of {self!r} are not finite at step {step}; "
            "look at its schedules"
        )

    def _factors(self, name: str, start: int, n_steps: int) -> list[float]:
        """What a schedule gives at these steps, NaN where that cannot be used."""
        schedule, steps = getattr(self, name), range(start, start + n_steps)
        try:  # the short way is the fast one
            factors = [float(schedule(step)) for step in steps]
            if all(factor > 0 and math.isfinite(factor) for factor in factors):
                return factors
        except Exception:
            pass
        found = (self._factor(name, step) for step in steps)
        return [math.nan if isinstance(each, str) else each for each in found]

    def _factor(self, name: str, step: int) -> float | str:
        """What a schedule gives at a step, or why that cannot be used."""
        schedule: Schedule = getattr(self, name)
        try:
            factor = float(schedule(step))
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return f"the schedule {name} failed at step {step} ({reason}); it must give a number"
        if math.isfinite(factor) and (factor > 0 or (name == "decay" and factor == 0)):
            return factor
        least = ">= 0" if name == "decay" else "> 0"
        return f"the schedule {name} must be finite and {least}, but gave {factor} at step {step}"

    def settings(self) -> dict[str, Any]:
        """All that distinguishes one ladder from another; of a schedule, some values."""

        def value(schedule: Schedule, step: int) -> Any:
            try:
                return schedule(step)
            except Exception as error:  # past the end of a schedule; where it ends is a value too
                return type(error).__name__

        steps = (1, 10, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
        schedules = {"anneal": self.anneal, "decay": self.decay, "noise": self.noise}
        return {
            "temperatures": self.temperatures,
            "lrs": self.lrs,
            **{name: s and [value(s, step) for step in steps] for name, s in schedules.items()},
        }

    def _repr_html_(self) -> str:
        values = enumerate(zip(self.temperatures, self.lrs, strict=True))
        rows = [(str(rung), f"{temperature:g}", f"{lr:g}") for rung, (temperature, lr) in values]
        title = f"{self.n_rungs} rung{'s' if self.n_pairs else ''}{self._moving()}"
        return notebook.panel("Ladder", title, notebook.table(("rung", "temperature", "lr"), rows))

    def __repr__(self) -> str:
        temperatures = ", ".join(f"{t:g}" for t in self.temperatures)
        same = len(set(self.lrs)) == 1
        lrs = f"{self.lrs[0]:g}" if same else "(" + ", ".join(f"{lr:g}" for lr in self.lrs) + ")"
        return f"Ladder(({temperatures}), lrs={lrs}{self._moving()})"

    def _moving(self) -> str:
        return f"{', annealed' if self.anneal else ''}{', decaying' if self.decay else ''}"


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    """As floats; text is refused, though its characters may be digits."""
    try:
        if isinstance(values, str):
            raise ValueError
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise LadderError(f"{name} must be numbers, one per rung, got {values!r}") from None
