"""A run folder as far as it can be read: everything that is there, and in words what is missing or
damaged.

Reports look at runs that are unfinished, failed, interrupted or cut short by a full disk. So
reading goes up to the damage and says where that is; only a folder that holds nothing of a run is
an error.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from torchrex.checkpoint import MOST_JSON, Checkpoints, one_line, require_file
from torchrex.density import shard_folders
from torchrex.diagnostics import History
from torchrex.errors import RunFolderError, TorchrexError
from torchrex.exchange import Ladder
from torchrex.experiments import ExperimentConfig as Config
from torchrex.experiments.gan import GanConfig
from torchrex.posterior import Draws
from torchrex.report.run_finding import (
    FILES,
    find_empty,
    find_runs,
    holds_a_run,
    recipe_in,
    seed_in,
)
from torchrex.report.run_json import read_json, read_result
from torchrex.report.run_settings import config_from_json, rebuild
from torchrex.report.run_settings import ladder_of as ladder_without_warm_start
from torchrex.report.run_tensors import history_of, read_draws, read_trace
from torchrex.report.salvage import salvage

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedRun:
    """One run as far as it could be read."""

    path: Path
    recipe: str
    seed: int  # -1 where nothing tells it
    config: dict[str, Any]
    result: dict[str, Any] | None  # what is sound of it
    status: str  # as in result.json; "unfinished" without one, "damaged" if that file is
    ladder: Ladder | None
    draws: Draws | None
    trace: dict[str, Tensor]
    history: History | None
    problems: tuple[str, ...]  # what is missing or damaged, in words
    settings: Config | None = None  # `config` as the config object of its recipe
    damaged: tuple[str, ...] = ()  # which of its files are there but not whole

    @property
    def metrics(self) -> dict[str, Any]:
        return dict((self.result or {}).get("metrics") or {})

    @property
    def settings_known(self) -> bool:
        """Whether config.json tells with what the run was made."""
        return bool(self.config) and "config.json" not in self.damaged

    @property
    def correction_factor(self) -> float | None:
        """F at the start of the run; None where nothing is swapped."""
        swaps = (
            self.ladder is not None
            and len(self.ladder.temperatures) > 1
            and getattr(self.settings, "swaps", True)
        )
        return float(getattr(self.settings, "correction_factor", 1.0)) if swaps else None

    @property
    def name(self) -> str:
        return f"{self.recipe}, seed {self.seed}" if self.seed >= 0 else self.recipe


def load_run(path: Path) -> LoadedRun:
    """Read a run folder up to whatever damage it has; `problems` says where. RunFolderError only if
    there is nothing at all.
    """
    if not path.is_dir():
        raise RunFolderError(
            f"there is no run folder {path}; it should hold config.json and result.json"
        )
    if not holds_a_run(path):
        raise RunFolderError(
            f"{path} holds nothing of a run ({', '.join(FILES)}); give OUT/RECIPE/seed=S of a run"
        )
    if not str(
        path
    ).isprintable():  # it is shown in terminals and on pages, which would obey what is in it
        raise RunFolderError(
            f"the name of {one_line(path)} has control characters in it; rename the folder"
        )
    for name in FILES:
        _require_file_or_folder(path / name)
    problems: list[str] = []
    damaged: list[str] = []

    def read(name: str, how: Callable[[Path, list[str]], T]) -> T:
        before = len(problems)
        found = how(path / name, problems)
        if len(problems) > before and (path / name).exists():
            damaged.append(name)
        return found

    config = read("config.json", read_json) or {}
    result = read("result.json", read_result)
    told: tuple[Any, ...] = (config.get("recipe"), (result or {}).get("recipe"), recipe_in(path))
    recipe = next(each for each in told if isinstance(each, str) and each)
    seed = (result or {}).get("seed", seed_in(path))
    if seed is None:
        problems.append("nothing tells the seed: no result.json and no folder name such as seed=0")
    settings, ladder, usable = rebuild(recipe, config, problems)
    if isinstance(settings, GanConfig):
        ladder = _ladder_of_gan(settings, problems)
        settings, usable = (settings, True) if ladder is not None else (None, False)
    if not usable:
        damaged.append("config.json")
    draws = read("draws.safetensors", read_draws)
    trace = read("trace.safetensors", read_trace)
    return LoadedRun(
        path=path,
        recipe=recipe,
        seed=-1 if seed is None else seed,
        config=config,
        result=result,
        status=_status(path, result, "result.json" in damaged, problems),
        ladder=ladder,
        draws=draws,
        trace=trace,
        history=history_of(settings, ladder, draws, trace, result, problems),
        problems=tuple(problems),
        settings=settings,
        damaged=tuple(damaged),
    )


def swap_counts(run: LoadedRun) -> tuple[int, int] | None:
    """Accepted and proposed over all pairs, or None where the run does not say."""
    pairs = (run.result or {}).get("swaps")
    if not isinstance(pairs, list) or not all(isinstance(pair, dict) for pair in pairs):
        return None
    counts = [(pair.get("accepted"), pair.get("proposed")) for pair in pairs]
    whole = [(a, p) for a, p in counts if isinstance(a, int) and isinstance(p, int)]
    return (sum(a for a, _ in whole), sum(p for _, p in whole)) if whole else None


def ladder_of(config: Any) -> Ladder | None:
    """The ladder a config runs on; None for a config of a kind that is not known here."""
    return config.ladder() if isinstance(config, GanConfig) else ladder_without_warm_start(config)


def _ladder_of_gan(settings: GanConfig, problems: list[str]) -> Ladder | None:
    """Its ladder, with a learning rate for the warm start and one for what follows; None, with a
    problem, if it cannot be had.
    """
    try:
        settings.decay(settings.warm_start)  # which is told beside the ladder
        return ladder_of(settings)
    except (TorchrexError, ValueError, ArithmeticError) as error:
        problems.append(
            f"the settings in config.json cannot be used ({one_line(error)}); so its ladder is not known"
        )
        return None


def _require_file_or_folder(path: Path) -> None:
    """A pipe would wait for ever and a device never end, whoever looks for what is left; so would
    JSON of any size in memory.
    """
    try:
        if require_file(path) > MOST_JSON and path.suffix == ".json":
            raise RunFolderError(
                f"{path} has more than {MOST_JSON:,} bytes, and was not written by a run; remove it"
            )
    except RunFolderError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise RunFolderError(f"cannot read {path} ({error.strerror}); remove it") from None


def _status(path: Path, result: dict[str, Any] | None, damaged: bool, problems: list[str]) -> str:
    if damaged:
        return "damaged"
    if result is not None:
        return str(result["status"])
    saved = path / "checkpoints"
    newest: list[int] = [
        max(Checkpoints(each).steps(), default=-1)
        for each in shard_folders(saved) or [saved]
        if each.is_dir()
    ]
    step = min(
        newest, default=-1
    )  # shards are resumed each from its own; this is how far all have come
    where = (
        f"the newest checkpoint is that of step {step:,}" if step >= 0 else "it left no checkpoint"
    )
    problems.append(f"there is no result.json: the run has not ended, or was killed; {where}")
    return "unfinished"


__all__ = [
    "LoadedRun",
    "config_from_json",
    "find_empty",
    "find_runs",
    "ladder_of",
    "load_run",
    "salvage",
]
