"""All recipes by name. A recipe is one complete frozen config that can draw, and measure what it drew."""

from __future__ import annotations

import difflib
from typing import Any, Protocol

from torch import Tensor

from torchrex.errors import RecipeError
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.tall import tall_recipes
from torchrex.posterior import Draws
from torchrex.posterior.sampling import Progress


class Config(Protocol):
    """What the runner asks of a config."""

    @property
    def recipe(self) -> str: ...
    @property
    def n_steps(self) -> int: ...
    def draw(self, seed: int, *, device: str, progress: Progress | None) -> Draws: ...
    def measure(self, draws: Draws) -> tuple[dict[str, Any], dict[str, Tensor]]: ...


def recipes() -> dict[str, Config]:
    return {**figure1_recipes(), **tall_recipes()}


def get_recipe(name: str) -> Config:
    """The recipe of that name, or an error that names the nearest one."""
    known = recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(f"there is no recipe {name!r}; {hint}`torchrex list` shows all of them")
    return known[name]
