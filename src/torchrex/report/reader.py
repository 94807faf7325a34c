"""Run folders as reports see them: one reader for finished, unfinished and damaged runs.

A damaged file is one problem in words and is not used; the other files of the run are. Only a
folder that holds nothing of a run is an error.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

import torchrex
from torchrex.checkpoint import Checkpoints, one_line, require_file
from torchrex.density import shard_folders
from torchrex.diagnostics import History
from torchrex.durable import LONGEST_NAME, open_file, read_object
from torchrex.errors import RecipeError, RunFolderError, TorchrexError
from torchrex.exchange import Ladder
from torchrex.experiments import ExperimentConfig, get_recipe
from torchrex.posterior import Draws
from torchrex.runs.config import override, parse, to_json
from torchrex.runs.folder import (
    NO_FOLDER,
    NUMBER,
    OF_ANOTHER_CONFIG,
    UNREADABLE,
    added_later,
    belongs_to,
    has_type,
    read_result,
    read_tensors,
    seed_in,
)
from torchrex.runs.script import ScriptConfig

FILES = ("config.json", "result.json", "draws.safetensors", "trace.safetensors", "checkpoints")
LARGEST_FILE = 2**30  # bytes; of the recipes none has draws of more than 2**24
# Of a trace: axes, and whether its numbers are integers.
TRACE = {
    **dict.fromkeys(("steps", "swap_steps", "swap_pairs", "accepted", "proposed"), (1, True)),
    **dict.fromkeys(("energy", "noise_variance", "correction"), (2, False)),
    "replica_at": (2, True),
}
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedRun:
    """One run, with everything that could be read."""

    path: Path
    recipe: str
    seed: int  # -1 if no file and no folder name says it
    config: dict[str, Any]
    result: dict[str, Any] | None
    status: str  # as in result.json; "unfinished" without one, "damaged" if that file is
    ladder: Ladder | None
    draws: Draws | None
    trace: dict[str, Tensor]
    history: History | None
    problems: tuple[str, ...]  # what is missing or damaged, in words
    settings: ExperimentConfig | None = None  # `config` as the config object of its recipe
    damaged: tuple[str, ...] = ()  # files that are there but cannot be used

    @property
    def metrics(self) -> dict[str, Any]:
        return dict((self.result or {}).get("metrics") or {})

    @property
    def numbers(self) -> dict[str, float]:
        """The finite metrics."""
        return {name: float(v) for name, v in self.metrics.items() if has_type(v, NUMBER)}

    @property
    def curves(self) -> dict[str, list[Any]]:
        return dict((self.result or {}).get("curves") or {})

    @property
    def settings_known(self) -> bool:
        return bool(self.config) and "config.json" not in self.damaged

    @property
    def correction_factor(self) -> float | None:
        """F at the start of the run; None where nothing is swapped."""
        if self.ladder is None or len(self.ladder.temperatures) < 2 or self.settings is None:
            return None
        return float(self.settings.correction_factor) if self.settings.swaps else None

    @property
    def swap_counts(self) -> tuple[int, int] | None:
        """Accepted and proposed over all pairs; None where the run does not say."""
        pairs = (self.result or {}).get("swaps")
        if not pairs:
            return None
        return sum(pair["accepted"] for pair in pairs), sum(pair["proposed"] for pair in pairs)

    @property
    def labels(self) -> Tensor | None:
        """Those of the examples whose predictions the trace holds."""
        if "labels" in self.trace:
            return self.trace["labels"]
        return None if self.settings is None else self.settings.test_labels()

    @property
    def name(self) -> str:
        return f"{self.recipe}, seed {self.seed}" if self.seed >= 0 else self.recipe


# Finding run folders


class NotRead(NamedTuple):
    """A folder of which nothing but its name is shown."""

    path: Path
    status: str  # "empty" or "unreadable"
    words: str  # why


def read_tree(root: Path) -> Iterator[LoadedRun | NotRead]:
    """Everything at or below `root`, sorted by recipe and seed, without replaced runs. A folder
    that cannot be read stops none of the others.
    """
    for path, unreadable in _folders(root):
        if unreadable:
            yield NotRead(path, "unreadable", unreadable)
        elif holds_a_run(path):
            try:
                yield load_run(path)
            except (TorchrexError, OSError, MemoryError) as error:
                yield NotRead(path, "unreadable", why(error, path))
        elif seed_in(path) is not None:
            yield NotRead(path, "empty", "it holds nothing of a run")


def find_runs(root: Path) -> list[Path]:
    """Run folders at or below `root`, sorted by recipe and seed, without replaced ones."""
    return [path for path, unreadable in _folders(root) if not unreadable and holds_a_run(path)]


def holds_a_run(path: Path) -> bool:
    try:
        return not set(FILES).isdisjoint(os.listdir(path))
    except OSError:
        return False


def recipe_in(path: Path) -> str:
    """The recipe in the path of a run folder: OUT/digits/sghmc/seed=0 has digits/sghmc."""
    return "/".join(Path(os.path.realpath(path)).parts[-3:-1])


def _folders(root: Path) -> list[tuple[Path, str]]:
    """The folders at or below `root`, and why one cannot be looked into. Of links only `root` is
    followed. Without recursion, so that any depth will do.
    """
    if not os.path.isdir(root):  # False as well for a name that is too long, or a link in a circle
        reason = f"there is no folder {one_line(root)}"
        raise RunFolderError(f"{reason}; give a run folder, or one above some")
    found, left = list[tuple[Path, str]](), [root]
    while left:
        path, inner, unreadable = left.pop(), set[str](), ""
        try:
            with os.scandir(path) as entries:
                below = {each.name: each.is_dir(follow_symlinks=False) for each in entries}
            if set(FILES).isdisjoint(below):
                inner = {name for name, is_folder in below.items() if is_folder}
                for name in below.keys() - inner:
                    if re.fullmatch(r"seed=\d+", name, re.ASCII):
                        link = os.path.islink(path / name)
                        words = "it is a link, which is not followed" if link else "it is no folder"
                        found.append((path / name, words))
        except OSError as error:
            unreadable = why(error, path)
        found.append((path, unreadable))
        # Next to a run are those that replace it or were replaced by it.
        ends = (".new", ".old", ".replaced")
        waiting = {f"{dot}{name}{end}" for name in inner for dot in ("", ".") for end in ends}
        left += [path / name for name in inner - waiting]
    return sorted(
        found, key=lambda each: (str(each[0].parent), seed_in(each[0]) or 0, each[0].name)
    )


def why(error: BaseException, path: Path) -> str:
    """What is wrong with a file or folder that the words need not name again."""
    if isinstance(error, MemoryError):
        return "there is not enough memory to read it"
    words = error.strerror if isinstance(error, OSError) and error.strerror else error
    return one_line(str(words).replace(str(path), "it"))


def require_ours(out: Path, marks: Sequence[str], command: str, within: int = 2**20) -> None:
    """Refuse to replace a file that has none of `marks` near its beginning."""
    try:
        with open_file(out) as file:
            start = file.read(within).decode(errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(
            f"--out {one_line(out)} cannot be used ({error.strerror}); choose another name"
        ) from None
    if not any(mark in start for mark in marks):
        raise RunFolderError(
            f"--out {out} is a file that `torchrex {command}` did not write; choose another name"
        )


# Reading one


def load_run(path: Path | str) -> LoadedRun:
    """Read a run folder; `problems` says what is missing or damaged."""
    path = Path(path)
    if not holds_a_run(path):
        raise RunFolderError(
            f"{one_line(path)} holds no run ({', '.join(FILES)}); give OUT/RECIPE/seed=S"
        )
    if not str(path).isprintable():  # terminals and pages would obey what is in the name
        raise RunFolderError(f"{one_line(path)} has control characters in its name; rename it")
    problems: list[str] = []
    damaged: list[str] = []

    def read(name: str, how: Callable[[Path], T]) -> T | None:
        file, what = path / name, "cannot be read"
        try:
            require_file(file, LARGEST_FILE)
            what = "is damaged and not used"
            return how(file)
        except FileNotFoundError:
            return None
        except (TorchrexError, MemoryError, *UNREADABLE) as error:
            said = why(error, file).removeprefix("it is damaged: ")
            problems.append(f"{name} {what}: {said}")
            damaged.append(name)
            return None

    config = read("config.json", read_object) or {}
    if not config and not damaged:
        problems.append("there is no config.json: its settings are not known")
    result = read("result.json", read_result)
    if result is not None and config and not belongs_to(result, config):
        problems.append(f"result.json is not used: {OF_ANOTHER_CONFIG}")
        damaged.append("result.json")
        result = None
    names: tuple[Any, ...] = (config.get("recipe"), (result or {}).get("recipe"), recipe_in(path))
    recipe = next(each for each in names if isinstance(each, str) and 0 < len(each) <= LONGEST_NAME)
    seed = (result or {}).get("seed", seed_in(path))
    if seed is None:
        problems.append("the seed is not known: no result.json and no folder name such as seed=0")
    settings = ladder = None
    try:
        if config:
            base = ScriptConfig(recipe) if "made_by" in config else get_recipe(recipe)
            settings = config_from_json(base, config, problems)
            ladder = settings.ladder()
    except RecipeError as error:
        problems.append(f"config.json is not of this version: {one_line(error)}")
    except (TorchrexError, ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        settings = None
        wrote = ((result or {}).get("versions") or {}).get("torchrex", torchrex.__version__)
        about = "the settings in config.json cannot be used"
        if wrote != torchrex.__version__:
            about = f"config.json is not of this version but of {one_line(wrote, 40)}"
        problems.append(f"{about}: {one_line(error)}")
        damaged.append("config.json")
    status = "damaged" if "result.json" in damaged else "unfinished"
    if result is None and status == "unfinished":
        problems.append(f"there is no result.json: the run goes on, or was killed; {_saved(path)}")
    draws = read("draws.safetensors", Draws.load)
    trace = read("trace.safetensors", _read_trace) or {}
    history = None
    try:
        if settings is not None and ladder is not None:
            history = _history(settings, ladder, draws, trace, (result or {}).get("steps_done"))
    except (TorchrexError, RuntimeError, LookupError, ValueError, TypeError) as error:
        problems.append(f"its draws or trace do not fit its settings: {one_line(error)}")
    return LoadedRun(
        path=path,
        recipe=recipe,
        seed=-1 if seed is None else seed,
        config=config,
        result=result,
        status=status if result is None else result["status"],
        ladder=ladder,
        draws=draws,
        trace=trace,
        history=history,
        problems=tuple(problems),
        settings=settings,
        damaged=tuple(damaged),
    )


def checkpoints_of(path: Path) -> list[Checkpoints]:
    """The folders of checkpoints of a run: its own, and those of its shards."""
    saved = path / "checkpoints"
    there = os.path.isdir(saved) and not os.path.islink(saved)
    return [Checkpoints(each) for each in (saved, *shard_folders(saved))] if there else []


def _saved(path: Path) -> str:
    """The newest checkpoint; of shards, which resume one by one, the oldest of the newest."""
    try:
        newest = [max(steps) for each in checkpoints_of(path) if (steps := each.steps())]
    except OSError as error:
        return f"its checkpoints cannot be read ({why(error, path)})"
    return f"its newest checkpoint has step {min(newest):,}" if newest else "it has no checkpoint"


def _read_trace(path: Path) -> dict[str, Tensor]:
    """The tensors of a trace; ValueError if no run can have recorded them."""
    tensors = read_tensors(path)
    for name, (axes, integers) in TRACE.items():
        x = tensors.get(name)
        if x is None:
            continue
        fits = x.ndim == axes and x.is_floating_point() != integers and not x.is_complex()
        if fits and integers:
            fits = bool((x >= 0).all()) and (axes == 1 or bool((x < max(1, x.shape[1])).all()))
        if fits and name.endswith("steps"):
            fits = bool((x[1:] >= x[:-1]).all())
        if not fits:
            raise ValueError(f"no run can have recorded its {name}")
    return tensors


def _history(
    settings: ExperimentConfig,
    ladder: Ladder,
    draws: Draws | None,
    trace: dict[str, Tensor],
    steps_done: int | None,
) -> History | None:
    if draws is not None and draws.n_draws:
        factor = float(settings.correction_factor)
        return History.from_draws(draws, ladder, correction_factor=factor)
    if not set(TRACE) <= set(trace) or len(trace["steps"]) == 0:
        return None
    if len(trace["swap_steps"]) < int(trace["accepted"].sum()):  # round trips need all swaps
        return None
    return History.from_traces([trace], ladder, n_steps=steps_done)


# The config object from its JSON, and the command from the config


def config_from_json(
    base: ExperimentConfig, values: Mapping[str, Any], problems: list[str]
) -> ExperimentConfig:
    """`base` with the values of a config.json, the inverse of `to_json`. Fields that only one side
    has are problems.
    """
    usual = to_json(base)
    if unknown := one_line(", ".join(sorted(set(values) - set(usual)))):
        problems.append(f"config.json has settings that this version does not know: {unknown}")
    if missing := sorted(set(usual) - set(values) - set(added_later(base))):
        problems.append(f"config.json lacks {', '.join(missing)}: those of the recipe are taken")
    kinds = typing.get_type_hints(type(base))
    for name in {"data", "method"} & set(usual) & set(values):  # a recipe may fix them for --set
        base = dataclasses.replace(base, **{name: parse(str(values[name]), kinds[name], name)})
    return override(base, list(_assignments(base, usual, values)))


class Command(NamedTuple):
    """A line for a shell, empty if there is none, and what to know about it."""

    line: str
    note: str


def command_to_repeat(run: LoadedRun, out: str = "runs/again") -> Command:
    """The recipe, the seed, and every setting that is not the recipe's. The settings, applied to
    the recipe, give back the config, or the note says which do not.
    """
    if "made_by" in run.config or run.path == NO_FOLDER.path:
        return Command("", "A script made this run: the same call in it repeats it.")
    try:
        recipe = get_recipe(run.recipe)
    except RecipeError:
        return Command("", "This version has no recipe of that name.")
    if not run.config:
        return Command("", "Its config.json is missing or damaged: its settings are not known.")
    assignments = list(_assignments(recipe, to_json(recipe), run.config))
    try:
        again = to_json(override(recipe, assignments))
    except (TorchrexError, ValueError, TypeError, ArithmeticError) as error:
        return Command("", f"This version refuses the settings of its config.json ({error}).")
    keys = {*again, *run.config}
    different = sorted(key for key in keys if again.get(key) != run.config.get(key))
    note = f"Not the same in this version: {', '.join(different)}." if different else ""
    words = ["torchrex", "run", run.recipe, "--seed", str(max(0, run.seed))]
    words += [word for assignment in assignments for word in ("--set", assignment)]
    return Command(shlex.join([*words, "--out", out]), note)


def _assignments(
    recipe: Any, usual: Mapping[str, Any], there: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """`key=value` for every setting that is not the recipe's, as `--set` reads it."""
    for field in dataclasses.fields(recipe):
        name, value = field.name, there.get(field.name)
        if not field.metadata.get("settable", True) or name not in there or value == usual[name]:
            continue
        part = getattr(recipe, name)
        if dataclasses.is_dataclass(part) and isinstance(value, dict):
            yield from _assignments(part, usual[name], value, f"{prefix}{name}.")
        else:
            each = value if isinstance(value, list) else [value]
            words = (str(x).lower() if x is None or isinstance(x, bool) else str(x) for x in each)
            yield f"{prefix}{name}={','.join(words)}"
