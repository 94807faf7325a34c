"""All recipes by name. A recipe is one complete frozen config that knows how to carry itself out.

A config for a density draws, and measures what it drew; a config for a network trains. Both save
checkpoints on the way.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from torchrex.density import Progress
from torchrex.errors import RecipeError
from torchrex.experiments.digits import digits_recipes
from torchrex.experiments.gan import gan_recipes
from torchrex.experiments.images import image_recipes
from torchrex.experiments.jobs import Job, Trained
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.place import Place
from torchrex.experiments.tall import tall_recipes
from torchrex.network import Outcome
from torchrex.posterior import Draws
from torchrex.recording import Callback

MOST_NAMED = 4  # recipes in a hint
LEAST_LIKENESS = 0.5  # of a name to one that may have been meant; 1 is the same


class Config(Protocol):
    """What every config has."""

    @property
    def recipe(self) -> str: ...
    @property
    def n_steps(self) -> int: ...

    def place(
        self, device: str
    ) -> Place: ...  # where `--device` puts it; an error in one line if that is not there


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

    def company(
        self, seed: int
    ) -> str | None: ...  # jobs with the same word may train side by side; None: each by itself
    def execute(
        self,
        jobs: Sequence[Job],
        *,
        device: str,
        resume: bool,
        budget: float | None,
        progress: Callback | None,
    ) -> tuple[Outcome, list[Trained]]: ...


def recipes() -> dict[str, Config]:
    return {
        **figure1_recipes(),
        **tall_recipes(),
        **digits_recipes(),
        **image_recipes(),
        **gan_recipes(),
    }


def get_recipe(name: str) -> Config:
    """The recipe of that name, or an error that names those it may have been meant for."""
    known = recipes()
    if name not in known:
        meant, word = nearest(name, list(known))
        hint = f"did you mean {_in_words(meant)}? " if meant else ""
        raise RecipeError(
            f"there is no recipe {name!r}; {hint}`torchrex list{word}` shows all of them"
        )
    return known[name]


def nearest(name: str, known: Sequence[str]) -> tuple[list[str], str]:
    """The names that begin with it, have it in them or all of its parts, and what `list` shows
    these by; else the one that is spelt most like it.
    """
    families = families_of(known)
    for meant in (
        [each for each in known if each.startswith(name)],
        [each for each in known if name in each],
        [each for each in known if matches(name, each, families)],
    ):
        if name and meant:
            return meant, f" {name}"

    def likeness(each: str) -> tuple[float, int]:
        # resnet20 and resnet32 have as many letters in common with resnet21: the one with more of
        # them in a row is nearer.
        compared = difflib.SequenceMatcher(None, each, name)
        return compared.ratio(), compared.find_longest_match().size

    best = max(known, key=likeness)
    return [best] if likeness(best)[0] >= LEAST_LIKENESS else [], ""


def families_of(names: Iterable[str]) -> set[str]:
    return {name.split("/")[0] for name in names}


def matches(only: str, name: str, families: Collection[str] = ()) -> bool:
    """Does every part of `only`, split at "/", occur in the name? Numbers are whole: cifar10 does
    not occur in cifar100, and so is a family at the beginning: gan/cifar10 means no recipe of
    gan-tuned.
    """
    family, _, rest = only.partition("/")
    if family in families:
        return name.startswith(f"{family}/") and matches(rest, name)

    def occurs(part: str) -> bool:
        before, after = (
            (r"(?<!\d)" if part[0].isdigit() else ""),
            (r"(?!\d)" if part[-1].isdigit() else ""),
        )
        return re.search(before + re.escape(part) + after, name) is not None

    return all(occurs(part) for part in only.split("/") if part)


def _in_words(names: Sequence[str]) -> str:
    some = (
        [*names]
        if len(names) <= MOST_NAMED
        else [*names[: MOST_NAMED - 1], f"{len(names) - MOST_NAMED + 1} others"]
    )
    return some[0] if len(some) == 1 else f"{', '.join(some[:-1])} or {some[-1]}"
