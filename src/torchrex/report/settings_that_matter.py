"""Which settings of two runs differ so that it can matter, and which of those make their results
answer different questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrex.report.runs import LoadedRun

NOT_USED, ABSENT = "not used", "absent"
NAMES = ("recipe", "paper", "checkpoint_every")  # nothing of a run depends on them
# The density that is sampled, or the data that are learned and on which predictions are measured.
# `subset` is none of them: fewer training images are measured on the same test images.
PROBLEM = (
    "weights",
    "means",
    "stds",
    "n_data",
    "dim",
    "prior_precision",
    "data",
    "validation",
    "test_subset",
)
OF_SWAPS = (
    "correction_factor",
    "factor_per_swap",
    "swaps_after",
    "rest_after_swap",
    "prior_in_swaps",
    "momentum_at_swap",
)
OF_VARIANCE = ("variance", "smoothing", "measure_every", "measure_draws", "initial_variance")


def with_known_settings(runs: Sequence[LoadedRun]) -> list[LoadedRun]:
    """Of runs that belong together those that may be averaged or compared.

    Nobody knows whether one whose config.json is missing or damaged was made as the others were.
    Where none has a config they are taken for what they are.
    """
    known = [run for run in runs if run.settings_known]
    return known or list(runs)


def decides_the_problem(key: str, config: Mapping[str, Any]) -> bool:
    """Whether runs that differ in `key` are different problems. A `data_seed` makes or chooses data
    only in some configs.
    """
    if key == "data_seed":
        return (
            "n_data" in config
            or bool(config.get("validation"))
            or config.get("test_subset") is not None
        )
    return key in PROBLEM


def differing_that_matter(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Fields of two configs that differ, without those that matter to neither; "not used" stands
    where one does not matter.
    """
    idle, idle_other = unused(one), unused(other)
    found = {}
    for key, (a, b) in differing(one, other).items():
        part = (key in idle, key in idle_other)
        if part != (True, True) and not (part[0] and b == ABSENT) and not (part[1] and a == ABSENT):
            found[key] = (NOT_USED if part[0] else a, NOT_USED if part[1] else b)
    return found


def differing(
    one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Fields of two configs that differ, nested ones joined by dots; names and the paper's numbers
    do not count.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**one, **other}:
        a, b, name = one.get(key), other.get(key), f"{prefix}{key}"
        if name in NAMES:
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= differing(a, b, f"{name}.")
        elif (key in one) != (key in other) or a != b:
            found[name] = (a if key in one else ABSENT, b if key in other else ABSENT)
    return found


def unused(config: Mapping[str, Any]) -> set[str]:
    """Settings of a config.json that nothing of the run depends on, given its others.

    The energies of a run without swaps are only recorded, so their noise moves nothing; and a
    single rung has no hotter one.
    """
    idle: set[str] = set()
    noise, method, temperatures = (
        config.get("noise"),
        config.get("method"),
        config.get("temperatures"),
    )
    single = method in ("msgd", "sghmc", "supervised") or (
        isinstance(temperatures, list) and len(temperatures) < 2
    )
    if single or method in ("independent", "noswaps") or config.get("swaps") is False:
        idle |= {*OF_SWAPS, *OF_VARIANCE}
        idle |= {f"noise.{part}" for part in noise} if isinstance(noise, Mapping) else set()
    if single:
        idle |= {"hot_temperature", "hot_lr", "swaps", "generators"}
    if method == "msgd":
        idle |= {"temperature", "noise_follows_lr"}
    if isinstance(noise, Mapping) and noise.get("law") == "gaussian":
        idle.add("noise.degrees")
    return idle
