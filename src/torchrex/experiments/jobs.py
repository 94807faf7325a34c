"""What the runner hands to a config that trains, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrex.errors import NonFiniteEnergyError
from torchrex.recording import Observer, Trace


@dataclass(frozen=True)
class Job:
    """One config with one seed."""

    config: Any
    seed: int
    checkpoints: Path | None  # the folder for them
    observers: tuple[Observer, ...] = ()


@dataclass(frozen=True)
class Trained:
    """What came of a job; metrics, curves and tensors are there when it is finished."""

    trace: Trace
    metrics: dict[str, Any] = field(default_factory=dict)  # flat: name -> number
    curves: dict[str, Any] = field(
        default_factory=dict
    )  # name -> numbers over the course of the run, few enough for JSON
    tensors: dict[str, Tensor] = field(default_factory=dict)  # for the run folder
    pictures: dict[str, Tensor] = field(
        default_factory=dict
    )  # bytes (height, width, channels), as PNG files for the run folder
    failure: NonFiniteEnergyError | None = None
