"""Experiments on a density: draw, save the draws, then measure them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrex.checkpoint import Checkpoints
from torchrex.density import shard_folders
from torchrex.distributed import join
from torchrex.errors import NonFiniteEnergyError, RunFolderError
from torchrex.posterior import Draws
from torchrex.recording import count_swaps
from torchrex.runs.config import ExperimentConfig, Outcome, RunOptions
from torchrex.runs.folder import Run, RunResult
from torchrex.sampling import sample

FEWEST_DRAWS = 2  # of an unfinished run that are worth measuring


class DensityConfig(ExperimentConfig):
    """Samples a density. All draws are kept, so a finished run needs no checkpoints."""

    keeps_checkpoints = False
    thin: int
    shards: int
    checkpoint_every: int

    def problem(self, seed: int) -> dict[str, Any]:
        """Arguments of `sample` that only this experiment knows, `target` and `noise` first."""
        raise NotImplementedError

    def measure(self, draws: Draws) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metrics and the tensors of trace.safetensors, of finished or unfinished draws."""
        raise NotImplementedError

    def draw(
        self, seed: int, checkpoints: Path | None = None, options: RunOptions | None = None
    ) -> Draws:
        options = options or RunOptions()
        return sample(
            **self.problem(seed),
            ladder=self.ladder(),
            correction_factor=self.correction_factor,
            n_steps=self.n_steps,
            n_runs=self.n_runs,
            thin=self.thin,
            seed=seed,
            device=self.device(options.device),
            progress=options.progress,
            checkpoints=checkpoints,
            checkpoint_every=self.checkpoint_every,
            resume=options.resume,
            budget=options.budget,
            shards=self.shards,
            on_interrupt="return",
        )

    def execute(
        self, runs: Sequence[Run], options: RunOptions
    ) -> tuple[Outcome, Sequence[RunResult]]:
        ((run,), group) = runs, join()
        earlier = 0.0
        with group.all_or_none("look at the checkpoints", RunFolderError):
            if options.resume and group.is_main:
                earlier = _seconds_in(run.folder.checkpoints)
        began, failure = time.perf_counter(), None
        try:
            draws = self.draw(run.seed, run.folder.checkpoints, options)
        except NonFiniteEnergyError as error:
            if error.draws is None:
                raise
            error.args = (
                str(error).replace(f"(run {error.run})", f"(run {error.run} of {run.name})"),
            )
            draws, failure = error.draws, error
        seconds = earlier + time.perf_counter() - began
        metrics: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        with group.all_or_none("writing of the draws", RunFolderError):
            if group.is_main:
                draws.save(run.folder.path / "draws.safetensors")  # before anything can go wrong
                measurable = draws.status == "finished" or draws.n_draws >= FEWEST_DRAWS
                if failure is None and measurable:
                    try:
                        metrics, tensors = self.measure(draws)
                    except KeyboardInterrupt:
                        draws.status = "interrupted"
        unfinished = draws.status in ("paused", "interrupted")
        result = RunResult(
            metrics=metrics,
            tensors=tensors,
            failure=failure,
            swaps=count_swaps(draws.accepted.sum(1), draws.proposed.sum(1)),
            exchange=draws.exchange().numbers,
            steps_done=draws.n_steps if unfinished else None,
        )
        return Outcome(draws.status, total_seconds=seconds), [result]


def _seconds_in(checkpoints: Path) -> float:
    """The seconds that the slowest shard of an unfinished run has taken."""
    found = [Checkpoints(path).load_newest() for path in (checkpoints, *shard_folders(checkpoints))]
    seconds = [each.state.get("seconds") for each in found if each is not None]
    return max((float(each) for each in seconds if isinstance(each, int | float)), default=0.0)
