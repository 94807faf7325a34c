"""The ladder: one temperature and one learning rate per rung, coldest first, annealed by schedules
of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchrex import notebook
from torchrex.errors import LadderError
from torchrex.schedules import Schedule


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
                f"temperatures must be a sequence, one per rung, got {temperatures}; one rung is ({temperatures},)"
            )
        for name, schedule in (("anneal", anneal), ("decay", decay), ("noise", noise)):
            if schedule is not None and not callable(schedule):
                raise LadderError(
                    f"{name} must be a function of the step, such as schedules.geometric(0.99), got {schedule!r}"
                )
        temperatures = tuple(float(t) for t in temperatures)
        if not temperatures:
            raise LadderError("a ladder needs at least one temperature, got none")
        for rung, temperature in enumerate(temperatures):
            if not (math.isfinite(temperature) and temperature > 0):
                raise LadderError(
                    f"temperatures must be positive and finite, but rung {rung} has {temperature:g}; got {temperatures}. "
                    f"For plain SGD or momentum SGD, which is temperature 0, use Ladder.descent(lr)."
                )
        for rung, (colder, hotter) in enumerate(pairwise(temperatures), start=1):
            if not hotter > colder:
                raise LadderError(
                    f"temperatures must rise from cold to hot, but rung {rung} ({hotter:g}) is not hotter than rung {rung - 1} "
                    f"({colder:g}); got temperatures={temperatures}. For inverse temperatures use Ladder.from_inverse(...)."
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
        rates = (
            (float(lrs),) * len(temperatures)
            if isinstance(lrs, int | float)
            else tuple(float(lr) for lr in lrs)
        )
        if len(rates) != len(temperatures):
            raise LadderError(
                f"give one lr, or one per rung: got {len(rates)} lrs for {len(temperatures)} temperatures"
            )
        for rung, lr in enumerate(rates):
            if not (math.isfinite(lr) and lr >= 0):
                raise LadderError(
                    f"lrs must be finite and >= 0, but rung {rung} has {lr:g}; got {rates}"
                )
        values = {
            "temperatures": temperatures,
            "lrs": rates,
            "anneal": anneal,
            "decay": decay,
            "noise": noise,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

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
                f"a geometric ladder needs 0 < cold < hot and 2 or more rungs, got cold={cold:g}, hot={hot:g}, n_rungs={n_rungs}"
            )
        ratio = hot / cold
        temperatures = [cold * ratio ** (rung / (n_rungs - 1)) for rung in range(n_rungs - 1)] + [
            hot
        ]
        return cls(temperatures, lrs, anneal=anneal, decay=decay)

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
            raise LadderError(
                f"inverse temperatures must be positive, got {tuple(inverse_temperatures)}"
            )
        return cls([1.0 / beta for beta in inverse_temperatures], lrs, anneal=anneal, decay=decay)

    @classmethod
    def descent(cls, lr: float, *, decay: Schedule | None = None) -> Ladder:
        """One rung at temperature 0: SGD or momentum SGD instead of sampling."""
        ladder = object.__new__(cls)
        ladder._fill((0.0,), lr, None, decay)
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

        def factors_of(name: str, schedule: Schedule) -> list[float]:
            steps = range(start, start + n_steps)
            try:
                factors = [float(schedule(step)) for step in steps]
                if all(factor > 0 and math.isfinite(factor) for factor in factors):
                    return factors
            except Exception:
                pass
            return [self._factor(name, step, otherwise=math.nan) for step in steps]

        def column(base: tuple[float, ...], name: str) -> Tensor:
            row, schedule = torch.tensor(base, dtype=dtype, device=device), getattr(self, name)
            if schedule is None:
                return row.expand(
                    n_steps, -1
                )  # no memory, and the compiled loop need not move its pointer
            factors = torch.tensor(factors_of(name, schedule), dtype=torch.float64)
            return factors.to(device)[:, None].mul(row.double()).to(dtype)

        temperature = column(self.temperatures, "anneal")
        kept = temperature if self.noise is None else temperature * column((1.0,), "noise")
        return temperature, column(self.lrs, "decay"), kept

    def refuse(self, step: int) -> NoReturn:
        """Say what is wrong at a step that is about to be taken and has no values."""
        for name in ("anneal", "decay", "noise"):
            if getattr(self, name) is not None:
                self._factor(name, step)
        raise LadderError(
            f"the temperatures or learning rates of {self!r} are not finite at step {step}; look at its schedules"
        )

    def _factor(self, name: str, step: int, *, otherwise: float | None = None) -> float:
        """What a schedule gives at a step; `otherwise` or an error if that cannot be used."""
        schedule: Schedule = getattr(self, name)
        try:
            factor = float(schedule(step))
        except Exception as error:
            if otherwise is not None:
                return otherwise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise LadderError(
                f"the schedule {name} failed at step {step} ({reason}); it must give a number there"
            ) from error
        if math.isfinite(factor) and (factor > 0 or (name == "decay" and factor == 0)):
            return factor
        if otherwise is not None:
            return otherwise
        least = ">= 0" if name == "decay" else "> 0"
        raise LadderError(
            f"the schedule {name} must be finite and {least} at every step taken, but gave {factor} at step {step}"
        )

    def settings(self) -> dict[str, Any]:
        """All that distinguishes one ladder from another; a schedule is known by some of its values."""

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
        moving = [
            name
            for name, schedule in (("annealed", self.anneal), ("decaying", self.decay))
            if schedule
        ]
        values = enumerate(zip(self.temperatures, self.lrs, strict=True))
        rows = [(str(rung), f"{temperature:g}", f"{lr:g}") for rung, (temperature, lr) in values]
        title = ", ".join([f"{self.n_rungs} rung{'s' if self.n_pairs else ''}", *moving])
        return notebook.panel("Ladder", title, notebook.table(("rung", "temperature", "lr"), rows))

    def __repr__(self) -> str:
        temperatures = ", ".join(f"{t:g}" for t in self.temperatures)
        same = len(set(self.lrs)) == 1
        lrs = f"{self.lrs[0]:g}" if same else "(" + ", ".join(f"{lr:g}" for lr in self.lrs) + ")"
        return f"Ladder(({temperatures}), lrs={lrs}{', annealed' if self.anneal else ''}{', decaying' if self.decay else ''})"
