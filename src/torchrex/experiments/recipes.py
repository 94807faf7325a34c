"""All recipes by name. A recipe is one complete frozen config."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from torchrex.errors import RecipeError
from torchrex.experiments.digits import digits_recipes
from torchrex.experiments.gallery import gallery_recipes
from torchrex.experiments.gan import gan_recipes
from torchrex.experiments.images import image_recipes
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.tall import tall_recipes
from torchrex.experiments.theory import theory_recipes
from torchrex.runs.config import ExperimentConfig

MOST_NAMED = 4  # recipes in a hint
LEAST_LIKENESS = 0.5  # of a name to one that may have been meant; 1 is the same


def recipes() -> dict[str, ExperimentConfig]:
    return {
        **figure1_recipes(),
        **theory_recipes(),
        **tall_recipes(),
        **gallery_recipes(),
        **gallery_recipes(large=True),
        **digits_recipes(),
        **image_recipes(),
        **gan_recipes(),
    }


def get_recipe(name: str) -> ExperimentConfig:
    """The recipe of that name, or an error that names those it may have been meant for."""
    known = recipes()
    if name in known:
        return known[name]
    meant, word = _nearest(name, list(known))
    if len(meant) > MOST_NAMED:
        meant = [*meant[: MOST_NAMED - 1], f"{len(meant) - MOST_NAMED + 1} others"]
    hint = f"did you mean {' or '.join(filter(None, (', '.join(meant[:-1]), *meant[-1:])))}? "
    raise RecipeError(
        f"there is no recipe {name!r}; {hint if meant else ''}"
        f"`torchrex list{word}` shows all of them"
    )


def _nearest(name: str, known: Sequence[str]) -> tuple[list[str], str]:
    """The names that begin with it, contain it or all of its parts, and the word by which `list`
    shows them; else the one that is spelt most like it.
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
        # resnet20 and resnet32 share as many letters with resnet21: more of them in a row decide.
        compared = difflib.SequenceMatcher(None, each, name)
        return compared.ratio(), compared.find_longest_match().size

    best = max(known, key=likeness)
    return [best] if likeness(best)[0] >= LEAST_LIKENESS else [], ""


def families_of(names: Iterable[str]) -> set[str]:
    return {name.split("/")[0] for name in names}


def matches(only: str, name: str, families: Collection[str] = ()) -> bool:
    """Does every part of `only`, split at "/", occur in the name?

    Numbers are complete: cifar10 does not occur in cifar100. So is a family at the beginning:
    gan/cifar10 means no recipe of gan-tuned.
    """
    family, _, rest = only.partition("/")
    if family in families:
        return name.startswith(f"{family}/") and matches(rest, name)

    def occurs(part: str) -> bool:
        before = r"(?<!\d)" if part[0].isdigit() else ""
        after = r"(?!\d)" if part[-1].isdigit() else ""
        return re.search(before + re.escape(part) + after, name) is not None

    return all(occurs(part) for part in only.split("/") if part)
