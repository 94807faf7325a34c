"""What is read of a run folder: everything that is there, and in words what is missing or damaged.

Reports look at runs that are unfinished, failed, interrupted or cut short by a full disk. So reading goes up to the damage and
says where that is; only a folder that holds nothing of a run is an error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import struct
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from torchrex.checkpoint import Checkpoints
from torchrex.diagnostics import History
from torchrex.errors import RecipeError, RunFolderError, TorchrexError
from torchrex.exchange import Ladder
from torchrex.experiments.digits import N_TEST, DigitsConfig
from torchrex.experiments.images import ImageConfig
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.experiments.recipes import Config, get_recipe
from torchrex.experiments.tall import LogisticConfig
from torchrex.posterior import Draws

FILES = ("config.json", "result.json", "draws.safetensors", "trace.safetensors", "checkpoints")
ROWS_OF_DRAWS = ("steps", "noise_variance", "replica_at", "energy")  # their first axis is the draws
ROWS_OF_TRACE = ("steps", "energy", "noise_variance", "correction", "replica_at")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class LoadedRun:
    """One run as far as it could be read."""

    path: Path
    recipe: str
    seed: int  # -1 where nothing tells it
    config: dict[str, Any]
    result: dict[str, Any] | None
    status: str  # as in result.json; "unfinished" without one, "damaged" if it cannot be read
    ladder: Ladder | None
    draws: Draws | None
    trace: dict[str, Tensor]
    history: History | None
    problems: tuple[str, ...]  # what is missing or damaged, in words
    settings: Config | None = None  # `config` as the config object of its recipe

    @property
    def metrics(self) -> dict[str, Any]:
        return dict((self.result or {}).get("metrics") or {})

    @property
    def correction_factor(self) -> float | None:
        """F at the start of the run; None where nothing is swapped."""
        swaps = self.ladder is not None and len(self.ladder.temperatures) > 1 and getattr(self.settings, "swaps", True)
        return float(getattr(self.settings, "correction_factor", 1.0)) if swaps else None

    @property
    def name(self) -> str:
        return f"{self.recipe}, seed {self.seed}" if self.seed >= 0 else self.recipe


def find_runs(root: Path) -> list[Path]:
    """Run folders at or below `root`, sorted by recipe and seed. Folders that wait to be replaced are left out."""
    return [path for path in _folders(root) if any((path / name).exists() for name in FILES)]


def find_empty(root: Path) -> list[Path]:
    """Folders at or below `root` that are named like those of a run, but hold nothing of one."""
    return [path for path in _folders(root) if re.match(r"seed=\d", path.name) and not any((path / n).exists() for n in FILES)]


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise RunFolderError(f"there is no folder {root}; give a run folder, or one that holds run folders")
    found = []
    for place, folders, _ in os.walk(root):
        path = Path(place)
        found.append(path)
        if any((path / name).exists() for name in FILES):
            folders.clear()  # what lies in a run folder belongs to that run
        folders[:] = [name for name in folders if not name.endswith(".replaced")]
    return sorted(found, key=lambda path: (str(path.parent), _seed_in(path) or 0, path.name))


def load_run(path: Path) -> LoadedRun:
    """Read a run folder up to whatever damage it has; `problems` says where. RunFolderError only if there is nothing at all."""
    if not path.is_dir():
        raise RunFolderError(f"there is no run folder {path}; it should hold config.json and result.json")
    if not any((path / name).exists() for name in FILES):
        raise RunFolderError(f"{path} holds nothing of a run ({', '.join(FILES)}); give OUT/RECIPE/seed=S of a run")
    problems: list[str] = []
    config, result = _read_json(path / "config.json", problems) or {}, _read_json(path / "result.json", problems)
    recipe = str(config.get("recipe") or (result or {}).get("recipe") or "/".join(path.resolve().parts[-3:-1]))
    seed = (result or {}).get("seed")
    seed = seed if isinstance(seed, int) else _seed_in(path)
    if seed is None:
        problems.append("nothing tells the seed: no result.json and no folder name such as seed=0")
    settings, ladder = _rebuild(recipe, config, problems)
    draws = _read_draws(path / "draws.safetensors", problems)
    trace = _read_trace(path / "trace.safetensors", problems)
    history = _history(settings, ladder, draws, trace, result, problems)
    status = _status(path, result, problems)
    return LoadedRun(
        path=path,
        recipe=recipe,
        seed=-1 if seed is None else seed,
        config=config,
        result=result,
        status=status,
        ladder=ladder,
        draws=draws,
        trace=trace,
        history=history,
        problems=tuple(problems),
        settings=settings,
    )


def _seed_in(path: Path) -> int | None:
    found = re.match(r"seed=(\d+)", path.name)
    return int(found[1]) if found else None


def _status(path: Path, result: dict[str, Any] | None, problems: list[str]) -> str:
    if result is not None:
        return str(result.get("status", "unfinished"))
    if (path / "result.json").exists():
        return "damaged"
    steps = Checkpoints(path / "checkpoints").steps() if (path / "checkpoints").is_dir() else []
    where = f"the newest checkpoint is that of step {max(steps):,}" if steps else "it left no checkpoint"
    problems.append(f"there is no result.json: the run has not ended, or was killed; {where}")
    return "unfinished"


def _read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        if path.name == "config.json":
            problems.append("there is no config.json: with what settings it ran is not known")
    except json.JSONDecodeError as error:
        problems.append(f"{path.name} is damaged at line {error.lineno}, column {error.colno} ({error.msg}); none of it is used")
    except (OSError, ValueError, TypeError) as error:
        problems.append(f"{path.name} cannot be read ({error}); none of it is used")
    return None


# The config object of the recipe


def _rebuild(recipe: str, config: Mapping[str, Any], problems: list[str]) -> tuple[Config | None, Ladder | None]:
    """The config object and its ladder, or None with a problem in words."""
    if not config:
        return None, None
    try:
        settings = config_from_json(get_recipe(recipe), config, problems)
        return settings, ladder_of(settings)
    except RecipeError as error:
        problems.append(f"{error}; so its ladder is not known")
    except (TorchrexError, ValueError, TypeError, ArithmeticError) as error:
        problems.append(f"the settings in config.json cannot be used ({error}); so its ladder is not known")
    return None, None


def config_from_json(base: Config, values: Mapping[str, Any], problems: list[str]) -> Config:
    """`base` with the values of a config.json: what `to_json` wrote, back. Fields that only one side knows are problems."""
    known = {field.name for field in dataclasses.fields(base)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        problems.append(f"config.json has settings that this version does not know: {', '.join(unknown)}")
    if missing := sorted(known - set(values)):
        problems.append(f"config.json lacks {', '.join(missing)}: those of the recipe are taken")
    return typing.cast(Config, _from_json(base, values))


def _from_json(base: Any, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(type(base))
    changes = {}
    for field in dataclasses.fields(base):
        if field.name not in values:
            continue
        value, now = values[field.name], getattr(base, field.name)
        changes[field.name] = _from_json(now, value) if dataclasses.is_dataclass(now) else _plain(value, hints[field.name])
    return dataclasses.replace(base, **changes)


def _plain(value: Any, kind: Any) -> Any:
    """JSON has no tuples and no infinities."""
    if typing.get_origin(kind) is tuple:
        return tuple(_plain(each, typing.get_args(kind)[0]) for each in value)
    return float(value) if kind is float else value


def ladder_of(config: Any) -> Ladder | None:
    """The ladder a config runs on; None for a config of a kind that is not known here."""
    if isinstance(config, MixtureConfig):
        return Ladder(config.temperatures, config.lr)
    if isinstance(config, LogisticConfig):
        return Ladder(config.temperatures, config.lr_of_mean / config.n_data)
    if isinstance(config, DigitsConfig):
        return config.ladder(1797 - N_TEST)
    return config.ladder() if isinstance(config, ImageConfig) else None


# Tensors


def _read_draws(path: Path, problems: list[str]) -> Draws | None:
    if not path.exists():
        return None
    try:
        return Draws.load(path)
    except RunFolderError:
        tensors, meta = salvage(path, problems)
    rows = min((len(tensors[name]) if name in tensors else 0 for name in ROWS_OF_DRAWS), default=0)
    whole = all(name in tensors for name in ("values", "accepted", "proposed")) and tensors["values"].ndim == 3
    if not whole or rows == 0:
        problems.append("too little of draws.safetensors is left to be used")
        return None
    chains = tensors["energy"].shape[-1]
    if len(tensors["values"]) < chains:
        problems.append(f"draws.safetensors has the values of {len(tensors['values'])} of {chains} chains; they are not used")
        return None
    try:
        kept = {name: tensors[name][:rows] for name in ROWS_OF_DRAWS}
        about = json.loads(meta.get("torchrex", "{}"))
        n_steps = int(about.get("n_steps", int(kept["steps"][-1])))
        return Draws(
            values=tensors["values"][:, :rows],
            accepted=tensors["accepted"],
            proposed=tensors["proposed"],
            n_steps=n_steps,
            status=str(about.get("status", "damaged")),
            settings=dict(about.get("settings", {})),
            **kept,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        problems.append(f"what is left of draws.safetensors does not fit together ({error})")
        return None


def _read_trace(path: Path, problems: list[str]) -> dict[str, Tensor]:
    if not path.exists():
        return {}
    try:
        return load_file(path)
    except (OSError, safetensors.SafetensorError):
        tensors, _ = salvage(path, problems)
    if "swap_steps" in tensors and "swap_pairs" in tensors:
        n = min(len(tensors["swap_steps"]), len(tensors["swap_pairs"]))
        tensors |= {name: tensors[name][:n] for name in ("swap_steps", "swap_pairs")}
    rows = min((len(tensors[name]) for name in ROWS_OF_TRACE if name in tensors), default=0)
    return tensors | {name: tensors[name][:rows] for name in ROWS_OF_TRACE if name in tensors}


def salvage(path: Path, problems: list[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What can be read of a safetensors file that was cut short: whole tensors, and the first rows of the one it ends in."""
    try:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        meta = header.pop("__metadata__", {})
        places = {name: (DTYPES[about["dtype"]], tuple(about["shape"]), *about["data_offsets"]) for name, about in header.items()}
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{path.name} cannot be read: its table of contents is damaged ({error})")
        return {}, {}
    body = data[8 + length :]
    tensors: dict[str, Tensor] = {}
    lost = []
    for name, (dtype, shape, begin, end) in places.items():
        size = math.prod(shape) * dtype.itemsize
        if end - begin != size or begin < 0 or min(shape, default=0) < 0:
            lost.append(name)
            continue
        if end > len(body):
            row = math.prod(shape[1:]) * dtype.itemsize
            rows = max(0, len(body) - begin) // row if shape and row else 0
            lost.append(f"{name} after row {rows:,} of {shape[0]:,}" if rows else name)
            if not rows:
                continue
            shape, end = (rows, *shape[1:]), begin + rows * row
        part = bytearray(body[begin:end])
        tensors[name] = torch.frombuffer(part, dtype=dtype).reshape(shape) if part else torch.empty(shape, dtype=dtype)
    whole = 8 + length + max((place[3] for place in places.values()), default=0)
    what = f"it ends at byte {len(data):,} of {whole:,}" if len(data) < whole else "its sizes contradict each other"
    problems.append(f"{path.name} is damaged: {what}; lost are {', '.join(lost) or 'no tensors'}")
    return tensors, dict(meta)


def _history(
    settings: Config | None,
    ladder: Ladder | None,
    draws: Draws | None,
    trace: dict[str, Tensor],
    result: dict[str, Any] | None,
    problems: list[str],
) -> History | None:
    if ladder is None:
        return None
    try:
        if draws is not None and draws.n_draws:
            factor = float(getattr(settings, "correction_factor", 1.0))
            return History.from_draws(draws, ladder, correction_factor=factor)
        if all(name in trace for name in (*ROWS_OF_TRACE, "swap_steps", "swap_pairs", "accepted", "proposed")):
            if len(trace["steps"]) == 0 or len(trace["swap_steps"]) < int(trace["accepted"].sum()):  # round trips need all swaps
                return None
            return History.from_traces([trace], ladder, n_steps=(result or {}).get("steps_done"))
    except (TorchrexError, RuntimeError, IndexError) as error:
        problems.append(f"the course of the run cannot be told ({error})")
    return None
