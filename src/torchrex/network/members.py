"""Who trains: a run with what belongs to it alone, and how a call of `train` ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchrex.checkpoint import Checkpoints
from torchrex.errors import InvalidArgumentError, NonFiniteEnergyError
from torchrex.network.run import ModuleExchange
from torchrex.posterior import PosteriorAverage
from torchrex.recording import Observer, Trace


class Outcome(NamedTuple):
    """How a call of `train` ended. Totals include what was done before a resume."""

    status: str  # "finished"; "paused", its budget used up; or "interrupted" by a signal
    signal: int | None = None
    seconds: float = 0.0  # of this call
    steps: int = 0  # of this call
    total_seconds: float = 0.0
    total_steps: int = 0


@dataclass
class TrainingRun:
    """One run of a group that trains together, with what belongs to it alone."""

    run: ModuleExchange
    averages: Sequence[PosteriorAverage] = ()
    trace: Trace | None = None
    checkpoints: Checkpoints | None = None  # or a folder for them
    setting: Mapping[str, Any] = field(default_factory=dict)
    failure: NonFiniteEnergyError | None = None  # why it was left behind
    observers: Sequence[Observer] = ()  # one may be shared between members

    def __post_init__(self) -> None:
        run: Any = self.run
        averages: Any = self.averages
        folder: Any = self.checkpoints
        if not isinstance(run, ModuleExchange):
            raise InvalidArgumentError(
                f"a member is torchrex.TrainingRun(run, ...) with a run on a network, got {run!r}"
            )
        self.averages = [averages] if isinstance(averages, PosteriorAverage) else averages
        self.checkpoints = Checkpoints(Path(folder)) if isinstance(folder, Path | str) else folder


def setting_of(member: TrainingRun) -> dict[str, Any]:
    return {**member.setting, **member.run.setting, "seed": member.run.streams.seed}


def recipe_of(member: TrainingRun) -> str:
    return str(member.setting.get("recipe", "a run"))


def name_of(member: TrainingRun) -> str:
    return f"{recipe_of(member)} with seed {member.run.streams.seed}"
