"""Which runs train side by side: those of one company that stand at the same step, as many as the
device carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchrex.checkpoint import Checkpoints
from torchrex.experiments.recipes import Config, TrainingConfig
from torchrex.experiments.run_folder import RunFolder


@dataclass
class Group:
    """Jobs that go on together, from a step of which all of them have a checkpoint."""

    jobs: list[tuple[Config, int]] = field(default_factory=list)
    steps: frozenset[int] = frozenset()  # with checkpoints of all of them; empty: at the beginning
    replicas: int = 0

    @property
    def name(self) -> str:
        (config, seed), n = self.jobs[0], len(self.jobs)
        return f"{config.recipe} seed {seed}" + (f" and {n - 1} more" if n > 1 else "")

    def takes(self, config: Config, seed: int, steps: frozenset[int]) -> bool:
        first, seed_of_first = self.jobs[0]
        if not (isinstance(config, TrainingConfig) and isinstance(first, TrainingConfig)):
            return False
        company = config.company(seed)
        if company is None or company != first.company(seed_of_first):
            return False
        together = bool(steps & self.steps) or not (steps or self.steps)
        return together and self.replicas + config.n_rungs <= config.most_replicas

    def add(self, config: Config, seed: int, steps: frozenset[int]) -> None:
        self.steps = self.steps & steps if self.jobs else steps
        self.jobs.append((config, seed))
        self.replicas += config.n_rungs if isinstance(config, TrainingConfig) else 0


def group(jobs: Sequence[tuple[Config, int]], out: Path, *, overwrite: bool) -> list[Group]:
    """All jobs in groups, each job in the first that takes it. Configs that train alone are groups
    of one.

    Runs that failed are likely to do so again: they come last, each by itself, so that they neither
    take the others back to their last checkpoint nor stand in their way.
    """
    groups: list[Group] = []
    apart: list[Group] = []
    for config, seed in jobs:
        folder = RunFolder.of(out, config.recipe, seed)
        checkpoints = folder.path / "checkpoints"
        unfinished = not overwrite and checkpoints.is_dir() and not folder.finished
        steps = frozenset(Checkpoints(checkpoints).steps() if unfinished else ())
        failed = unfinished and folder.failed
        chosen = (
            None
            if failed
            else next((each for each in groups if each.takes(config, seed, steps)), None)
        )
        if chosen is None:
            chosen = Group()
            (apart if failed else groups).append(chosen)
        chosen.add(config, seed, steps)
    return groups + apart
