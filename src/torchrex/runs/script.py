"""The run folder of a script: what `train(out=...)` and `sample(out=...)` write.

It is that of a recipe, so that `report`, `doctor` and `compare` read it. Its config has what they
ask for, as plain values: temperatures, rules, sizes. What decides whether a checkpoint belongs to
a run is in the checkpoint itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from torchrex.checkpoint import one_line
from torchrex.distributed import ALONE, ProcessGroup
from torchrex.durable import writing
from torchrex.errors import RunFolderError
from torchrex.exchange import Ladder, ProportionalToGap
from torchrex.runs.config import Column, ExperimentConfig, Precision, RunOptions, columns
from torchrex.runs.folder import (
    RECIPE,
    Run,
    RunFolder,
    RunResult,
    RunWriter,
    config_sha256,
    seed_in,
)
from torchrex.samplers import AdamStart
from torchrex.settings import fingerprint, settings_of

KNOTS = 101  # steps at which the schedules of a ladder are written down
ROWS = 20_000  # of a trace that `train(out=...)` makes by itself, at most
OF_DRAWS = ("acceptance_rate", "ess", "log_evidence")
COLUMNS = (
    *("accuracy", "single_accuracy", "pooled_accuracy", "nll", "ece"),
    *("rmse", "coverage_90", "crps", "acceptance_rate"),
)


@dataclass(frozen=True)
class Interpolated:
    """A schedule from its values at some steps; in equal ratios between them."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, step: int) -> float:
        if min(self.values) <= 0:
            return float(np.interp(step, self.steps, self.values))
        return float(np.exp(np.interp(step, self.steps, np.log(self.values))))


@dataclass(frozen=True)
class ScriptConfig(ExperimentConfig):
    """A run of a script, as far as reports ask."""

    made_by: Literal["train", "sample"] = "train"
    n_steps: int = 1
    n_runs: int = 1
    temperatures: tuple[float, ...] = (1.0,)
    lrs: tuple[float, ...] = (0.0,)
    schedule_steps: tuple[int, ...] = ()  # of the three schedules below, if there are any
    anneal: tuple[float, ...] = ()
    decay: tuple[float, ...] = ()
    noise_schedule: tuple[float, ...] = ()
    tempering: str = "posterior"
    sampler: str = ""
    swaps: bool = True
    correction_factor: float = 1.0  # at the start
    factor_rule: str = ""
    factor_follows_gap: bool = False
    factor_per_swap: float = 1.0
    pairing: str = ""
    noise: str = ""  # the estimator of its variance
    momentum: str = ""
    swap_start: int = 0
    swap_interval: int = 1
    swap_batch: int | None = None
    warm_start: int = 0
    dim: int = 1  # coordinates, or parameters
    n_data: int | None = None
    batch_size: int | None = None
    burn_in: int = 0
    thin: int = 1
    trace_every: int = 1
    model: str = ""
    energy: str = ""  # loss and prior of a network
    lr_factors: str = ""
    clip: float | None = None
    settings_sha256: str = ""  # of all settings of the run, also those that are not named here
    precision: Precision = "float32"

    def ladder(self) -> Ladder:
        def schedule(values: tuple[float, ...]) -> Interpolated | None:
            return Interpolated(self.schedule_steps, values) if values else None

        decay = schedule(self.decay)
        if not any(self.temperatures):
            return Ladder.descent(self.lrs[0], decay=decay, n_rungs=len(self.temperatures))
        anneal, noise = schedule(self.anneal), schedule(self.noise_schedule)
        return Ladder(self.temperatures, self.lrs, anneal=anneal, decay=decay, noise=noise)

    @property
    def has_sgld(self) -> bool:
        return self.sampler.startswith("SGLD")

    @property
    def group(self) -> str:
        return "densities of scripts" if self.is_density else "networks of scripts"

    @property
    def is_density(self) -> bool:
        return self.made_by == "sample"

    @property
    def columns(self) -> tuple[Column, ...]:
        return columns(*(COLUMNS if self.made_by == "train" else OF_DRAWS))

    @classmethod
    def of(cls, run: Any, out: Path, n_steps: int, **more: Any) -> ScriptConfig:
        """The settings of a run that `train` or `sample` writes to `out`."""
        rules, sampler = run.rules, run.ensemble.sampler
        everything = {name: x for name, x in run.setting.items() if name != "device"}
        ladder, factor = rules.ladder, rules.factor
        knots = sorted({(n_steps - 1) * k // (KNOTS - 1) for k in range(KNOTS)})

        def values(name: str) -> tuple[float, ...]:
            schedule = getattr(ladder, name)
            return () if schedule is None else tuple(float(schedule(step)) for step in knots)

        return cls(
            name_of(out),
            n_steps=n_steps,
            temperatures=ladder.temperatures,
            lrs=ladder.lrs,
            schedule_steps=tuple(knots) if ladder.has_schedules else (),
            anneal=values("anneal"),
            decay=values("decay"),
            noise_schedule=values("noise"),
            tempering=rules.tempering,
            sampler=repr(sampler),
            swaps=rules.swaps,
            correction_factor=factor.initial,
            factor_rule=repr(factor),
            factor_follows_gap=isinstance(factor, ProportionalToGap),
            factor_per_swap=getattr(factor, "per_swap", 1.0),
            pairing=repr(rules.pairing),
            noise=repr(rules.noise),
            momentum=rules.momentum,
            swap_start=rules.swap_start,
            swap_interval=rules.swap_interval,
            swap_batch=rules.swap_batch,
            warm_start=sampler.steps if isinstance(sampler, AdamStart) else 0,
            dim=run.ensemble.position.shape[-1],
            n_data=run.ensemble.n_data,
            settings_sha256=fingerprint(settings_of([everything, more.pop("setting", None)]))[:12],
            **more,
        )


def name_of(out: Path) -> str:
    """The name of a run: of runs/mynet/seed=0 and of runs/mynet it is mynet."""
    path = Path(out).absolute()
    name = path.parent.name if seed_in(path) is not None else path.name
    if not RECIPE.fullmatch(name):
        raise RunFolderError(
            f"out={one_line(str(out))!r} names no run; give a folder such as runs/mynet/seed=0, of "
            "letters, digits, . _ + and -"
        )
    return name


class ScriptRun:
    """Writes the folder of one run. It may hold an earlier part of this run, and nothing else."""

    def __init__(self, out: Path | str, made_by: str, seed: int) -> None:
        self.folder, self.made_by, self.seed = RunFolder(Path(out)), made_by, seed
        name_of(self.folder.path)
        if (own := seed_in(self.folder.path)) not in (None, seed):
            raise RunFolderError(
                f"{self.folder.path} is named for seed {own}, but the run has seed {seed}; give "
                f"out=.../seed={seed}"
            )
        self._writer: RunWriter | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder.checkpoints

    def trace_every(self, n_steps: int) -> int:
        """Of which steps a trace keeps rows: as before, or so that it has at most ROWS."""
        before = (self.folder.config or {}).get("trace_every")
        return before if isinstance(before, int) and before > 0 else -(-n_steps // ROWS)

    def require_own(self) -> None:
        """Refuse a folder with a run that this one cannot continue."""
        config, folder = self.folder.config, self.folder
        if config is not None and config.get("made_by") != self.made_by:
            what = config.get("made_by") or f"the recipe {config.get('recipe')}"
            raise RunFolderError(
                f"{folder.path} holds a run of {one_line(str(what))}; choose another out"
            )
        if folder.status is not None and not folder.begun:
            raise RunFolderError(
                f"{folder.path} holds a run ({folder.status}) without checkpoints to continue from;"
                " remove it, or choose another out"
            )

    def begin(self, config: ScriptConfig, device: torch.device) -> None:
        """Write config.json, when nothing can be refused any more."""
        self.folder.make()
        run = Run(config, self.seed, self.folder)
        self._writer = RunWriter(run, RunOptions(device=str(device)))
        there = self.folder.config
        if there is not None and config_sha256(there) != self._writer.config_sha256:
            # The result of fewer steps is not one of this config.
            (self.folder.path / "result.json").unlink(missing_ok=True)
        with self._explained():
            self._writer.begin()

    def write(self, result: RunResult, status: str, seconds: float, **more: Any) -> None:
        """Write result.json and the tensors."""
        assert self._writer is not None
        with self._explained():
            self._writer.write(result, status, seconds, **more)

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return writing(self.folder.path, RunFolderError, "choose another out", room="call again")


@contextlib.contextmanager
def owned_folders(runs: Sequence[ScriptRun], group: ProcessGroup = ALONE) -> Iterator[None]:
    """Around runs that write folders: the first of several processes looks at them and holds the
    locks.
    """
    with contextlib.ExitStack() as locks:
        if runs:
            with group.all_or_none("look at the run folders", RunFolderError):
                for run in runs if group.is_main else ():
                    locks.enter_context(run.folder.owned())
                    run.require_own()
        yield
