"""All recipes by name. A recipe is one complete frozen config that knows how to carry itself out.

A config for a density draws, and measures what it drew; a config for a network trains. Both save checkpoints on the way.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from torchrex.errors import RecipeError
from torchrex.experiments.digits import digits_recipes
from torchrex.experiments.gan_recipes import gan_recipes
from torchrex.experiments.image_recipes import image_recipes
from torchrex.experiments.jobs import Job, Trained
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.place import Place
from torchrex.experiments.tall import tall_recipes
from torchrex.posterior import Draws
from torchrex.posterior.progress import Callback
from torchrex.posterior.sampling import Progress
from torchrex.training import Outcome

MOST_NAMED = 4  # recipes in a hint


class Config(Protocol):
    """What every config has."""

    @property
    def recipe(self) -> str: ...
    @property
    def n_steps(self) -> int: ...

    def place(self, device: str) -> Place: ...  # where `--device` puts it; an error in one line if that is not there


@runtime_checkable
class DrawingConfig(Config, Protocol):
    """What the runner asks of a config for a density."""

    def draw(
        self,
        seed: int,
        *,
        device: str,
        progress: Progress | None,
        checkpoints: Path | None,
        resume: bool,
        budget: float | None,
    ) -> Draws: ...
    def measure(self, draws: Draws) -> tuple[dict[str, Any], dict[str, Tensor]]: ...


@runtime_checkable
class TrainingConfig(Config, Protocol):
    """What the runner asks of a config for a network."""

    @property
    def n_rungs(self) -> int: ...
    @property
    def most_replicas(self) -> int: ...  # so many of all jobs together train side by side

    def company(self, seed: int) -> str | None: ...  # jobs with the same word may train side by side; None: each by itself
    def execute(
        self, jobs: Sequence[Job], *, device: str, resume: bool, budget: float | None, progress: Callback | None
    ) -> tuple[Outcome, list[Trained]]: ...


def recipes() -> dict[str, Config]:
    return {**figure1_recipes(), **tall_recipes(), **digits_recipes(), **image_recipes(), **gan_recipes()}


def get_recipe(name: str) -> Config:
    """The recipe of that name, or an error that names those it may have been meant for."""
    known = recipes()
    if name not in known:
        meant, word = nearest(name, list(known))
        hint = f"did you mean {_in_words(meant)}? " if meant else ""
        raise RecipeError(f"there is no recipe {name!r}; {hint}`torchrex list{word}` shows all of them")
    return known[name]


def nearest(name: str, known: Sequence[str]) -> tuple[list[str], str]:
    """The names that begin with it, or have it in them, and what `list` shows these by; else the one that looks most like it."""
    for meant in ([each for each in known if each.startswith(name)], [each for each in known if name in each]):
        if name and meant:
            return meant, f" {name}"
    return difflib.get_close_matches(name, known, n=1, cutoff=0.5), ""


def _in_words(names: Sequence[str]) -> str:
    some = [*names] if len(names) <= MOST_NAMED else [*names[: MOST_NAMED - 1], f"{len(names) - MOST_NAMED + 1} others"]
    return some[0] if len(some) == 1 else f"{', '.join(some[:-1])} or {some[-1]}"
