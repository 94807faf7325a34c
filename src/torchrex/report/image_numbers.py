"""Finished runs on images as their folders have them, and the numbers of several seeds: what all
tables and figures of them take.

Runs are taken as they are. Those of one recipe that differ in more than the seed are never put
together.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torchrex.errors import RunFolderError
from torchrex.experiments.config import to_json
from torchrex.experiments.run_folder import RunFolder

PAPER_SEEDS = 5
NEEDED: dict[str, Any] = {
    "metrics": dict,
    "swaps": list,
    "curves": dict,
    "versions": dict,
    "device": str,
    "date": str,
}
NEEDED["wall_seconds"] = int | float
NO_MATTER = ("recipe", "epochs", "steps", "checkpoint_every")  # the length is shown in any case
PERCENT = ("accuracy", "ece", "called_fake")  # shown so, as in the paper


class Recipe(Protocol):
    """What a report asks of a config."""

    @property
    def recipe(self) -> str: ...
    @property
    def data(self) -> str: ...


C = TypeVar("C", bound=Recipe)


class Settings(NamedTuple):
    """What runs must have in common to be one row."""

    length: int  # in epochs or steps
    others: tuple[tuple[str, Any], ...] = ()  # as far as they are not the recipe's

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.others)


@dataclass(frozen=True)
class Run(Generic[C]):
    """A finished run as its folder has it."""

    recipe: C
    seed: int
    path: Path
    config: dict[str, Any]
    result: dict[str, Any]
    unit: str  # the setting that says how long it is: epochs or steps

    @property
    def settings(self) -> Settings:
        usual = {
            name: value for name, value in to_json(self.recipe).items() if name not in NO_MATTER
        }
        others = ((name, self.config.get(name, value)) for name, value in usual.items())
        return Settings(
            self.config[self.unit],
            tuple((name, value) for name, value in others if value != usual[name]),
        )

    @property
    def swaps(self) -> int:
        return sum(pair["accepted"] for pair in self.result["swaps"])

    def number(self, name: str) -> float:
        """A metric; shares in percent, as in the paper."""
        value = self.result["metrics"].get(name)
        if not isinstance(value, int | float):
            raise RunFolderError(
                f"{self.path / 'result.json'} has no number {name!r}; run it again with --overwrite"
            )
        return float(value) * (100 if name.endswith(PERCENT) else 1)


def finished_runs(
    out: Path, recipes: Mapping[str, C], *, unit: str = "epochs"
) -> tuple[list[Run[C]], list[str]]:
    """The finished runs of these recipes, with any settings, and the others in words."""
    runs, unfinished = [], []
    for name, recipe in recipes.items():
        seeds = (re.fullmatch(r"seed=(\d+)", path.name) for path in (out / name).glob("seed=*"))
        for seed in sorted(int(found[1]) for found in seeds if found):
            folder = RunFolder.of(out, name, seed)
            config, result = folder.config, folder.result
            if result is None or result.get("status") != "finished":
                unfinished.append(
                    f"{name} seed {seed} ({'no result' if result is None else result.get('status')})"
                )
                continue
            for key, kind in NEEDED.items():
                if not isinstance(result.get(key), kind):
                    raise RunFolderError(
                        f"{folder.path / 'result.json'} has no {key!r}; run it again with --overwrite"
                    )
            if not all(
                isinstance(pair, dict) and isinstance(pair.get("accepted"), int)
                for pair in result["swaps"]
            ):
                raise RunFolderError(
                    f"{folder.path / 'result.json'} does not count its swaps; run it again with --overwrite"
                )
            if config is None or not isinstance(config.get(unit), int):
                raise RunFolderError(
                    f"{folder.path / 'config.json'} does not say how many {unit} were run; restore it"
                )
            runs.append(Run(recipe, seed, folder.path, config, result, unit))
    return runs, unfinished


def settings_of_most(runs: Sequence[Run[C]]) -> Settings:
    """The settings that most recipes were run with; of equals, the longest runs."""
    kinds = {
        run.settings: {each.recipe.recipe for each in runs if each.settings == run.settings}
        for run in runs
    }
    return max(kinds, key=lambda each: (len(kinds[each]), each.length, str(each)))


def summary(values: Mapping[int, float]) -> dict[str, Any]:
    """Mean, twice the standard deviation over seeds (None for one seed), and the values by seed."""
    each = list(values.values())
    return {
        "mean": statistics.fmean(each),
        "two_sd": 2 * statistics.stdev(each) if len(each) > 1 else None,
        "values": {str(seed): value for seed, value in values.items()},
    }


def z_score(ours: Sequence[float], paper: tuple[float, float]) -> float:
    """Our mean minus the paper's in standard errors of the difference."""
    mean, sd = paper[0], paper[1] / 2
    return (statistics.fmean(ours) - mean) / math.sqrt(
        statistics.variance(ours) / len(ours) + sd**2 / PAPER_SEEDS
    )


def stated(paper: tuple[float, float] | None) -> dict[str, Any] | None:
    """The paper's mean and two standard deviations, as `summary` has ours."""
    return None if paper is None else {"mean": paper[0], "two_sd": paper[1]}


def beside_the_paper(
    ours: Mapping[int, float], paper: tuple[float, float] | None, *, tested: bool
) -> dict[str, Any]:
    """Our number and the paper's, and how far they are apart where the two are of one experiment
    (`tested`).

    One seed tells nothing of our spread, and it need not be the paper's: on GANs it is several
    times as large.
    """
    beside = paper if tested and len(ours) > 1 else None
    return {
        "paper": stated(paper),
        "ours": summary(ours),
        "z": None if beside is None else z_score(list(ours.values()), beside),
    }


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[str, Any]:
    """Differences of seeds that both have: how many, their mean, and its standard error (None for
    fewer than two).
    """
    differences = {
        str(seed): ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())
    }
    each, n = list(differences.values()), len(differences)
    return {
        "n": n,
        "mean": statistics.fmean(each) if n else None,
        "se": statistics.stdev(each) / math.sqrt(n) if n > 1 else None,
        "differences": differences,
    }


def origin(runs: Sequence[Run[C]]) -> dict[str, Any]:
    """How long the runs of a row took, where, with what and when."""
    return {
        "wall_minutes": [run.result["wall_seconds"] / 60 for run in runs],
        "devices": sorted({run.result["device"] for run in runs}),
        "versions": [
            dict(each)
            for each in dict.fromkeys(tuple(run.result["versions"].items()) for run in runs)
        ],
        "dates": sorted({run.result["date"] for run in runs}),
    }
