"""Which recipe or setting a person meant; torch is not needed for the answer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from torchrex.errors import ConfigError, RecipeError

MOST_NAMED = 4  # recipes in a hint
LEAST_LIKENESS = 0.5  # of a name to one that may have been meant; 1 is the same


def require_recipe(name: str, known: Collection[str]) -> None:
    """Refuse a name that is no recipe, with those it may have been meant for."""
    if name in known:
        return
    meant, word = _nearest(name, list(known))
    if len(meant) > MOST_NAMED:
        meant = [*meant[: MOST_NAMED - 1], f"{len(meant) - MOST_NAMED + 1} others"]
    hint = f"did you mean {' or '.join(filter(None, (', '.join(meant[:-1]), *meant[-1:])))}? "
    raise RecipeError(
        f"there is no recipe {name!r}; {hint if meant else ''}"
        f"`torchrex list{word}` shows all of them"
    )


def require_setting(name: str, names: Sequence[str], key: str, where: str = "--set") -> None:
    """Refuse a setting that is none of `names`; `key` is its path in nested settings."""
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
        raise ConfigError(f"unknown setting {key!r} in {where}; {hint}")


def require_free(name: str, fixed: Collection[str], key: str) -> None:
    """Refuse a setting that only a recipe chooses."""
    if name in fixed:
        raise ConfigError(
            f"setting {key!r} belongs to the recipe and is fixed; choose another recipe "
            "from `torchrex list`"
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
