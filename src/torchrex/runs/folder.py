"""A run on disk: `OUT/<recipe>/seed=<s>/` with config.json, result.json, tensors and checkpoints.

A run is written into `seed=S`, and an unfinished one is resumed there. A run that replaces a
finished one is written into `seed=S.new` and takes its place when it is finished: whatever stops
it, the finished run stays as it was. `--resume` continues `seed=S.new` where there is one. Of the
jobs that write a run, `.seed=S.lock` lets one in; looking at a run needs no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import shutil
import stat
import struct
import zlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

import torchrex
from torchrex.checkpoint import Checkpoints, one_line, require_file
from torchrex.density import shard_folders
from torchrex.durable import PART, printable, read_object, replace_file
from torchrex.errors import LARGEST_WHOLE, NonFiniteEnergyError, RunFolderError
from torchrex.lock import one_owner
from torchrex.posterior import checksums, with_another_sha256
from torchrex.recording import Observer, Trace, remove_logs
from torchrex.runs.config import ExperimentConfig, RunOptions, dumps, to_json
from torchrex.settings import fingerprint

logger = logging.getLogger("torchrex")

# It names folders: none above OUT, none from the root.
RECIPE = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*", re.ASCII)
NUMBER = int | float
NEEDED: dict[str, Any] = {"recipe": str, "seed": int, "status": str, "metrics": dict, "swaps": list}
OPTIONAL: dict[str, Any] = {
    **{"date": str, "wall_seconds": NUMBER, "device": str, "versions": dict, "error": str},
    **{"steps_done": int, "replicas_side_by_side": int, "curves": dict, "exchange": dict},
    "config_sha256": str,
}
LARGEST = 1e150  # of a number: its square is finite
# The files of a run, besides its logs and checkpoints; a killed process may leave a part of one.
WRITTEN = re.compile(
    rf"(config\.json|result\.json|(trace|draws)\.safetensors|page\.html|samples\.png)({PART})?"
)
OF_ANOTHER_CONFIG = "it is the result of another config.json"
UNREADABLE = (
    OSError,
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    RecursionError,
)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @staticmethod
    def of(out: Path, recipe: str, seed: int) -> RunFolder:
        named = isinstance(recipe, str) and RECIPE.fullmatch(recipe)
        if not named or type(seed) is not int or not 0 <= seed <= LARGEST_WHOLE:
            raise RunFolderError(
                f"recipe {one_line(repr(recipe), 80)} with seed {one_line(repr(seed), 80)} names "
                "no run folder: a recipe is letters, digits, . _ + - and slashes, a seed a whole "
                "number from 0 to 2^63 - 1"
            )
        return RunFolder(out / recipe / f"seed={seed}")

    # Reading

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, or None if there is none yet."""
        found = self._read("result.json", lambda path: read_result(path, complete=False))
        if found is None:
            return None
        own, config = seed_in(self.path), self.config if "config_sha256" in found else None
        if own is not None and found.get("seed", own) != own:
            raise self._unreadable("result.json", f"it is the result of seed {found['seed']}")
        if config is not None and not belongs_to(found, config):
            raise self._unreadable("result.json", OF_ANOTHER_CONFIG)
        return found

    @property
    def config(self) -> dict[str, Any] | None:
        return self._read("config.json")

    @property
    def status(self) -> str | None:
        """As in `result.json`; None without one, "damaged" if it cannot be read."""
        try:
            return (self.result or {}).get("status")
        except RunFolderError:
            return "damaged"

    @property
    def finished(self) -> bool:
        """Raises if `result.json` cannot be read; `status` does not."""
        return self.result is not None and self.status == "finished"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def steps(self) -> frozenset[int]:
        """The steps that have a checkpoint; empty for a run in shards."""
        return frozenset(Checkpoints(self.checkpoints).steps())

    @property
    def begun(self) -> bool:
        """Whether a step is saved, in one piece or in shards."""
        if not self.checkpoints.is_dir():
            return False
        folders = (self.checkpoints, *shard_folders(self.checkpoints))
        return any(any(Checkpoints(path).steps()) for path in folders)

    def trace(self) -> dict[str, Tensor]:
        path = self.path / "trace.safetensors"
        try:
            return read_tensors(path)
        except UNREADABLE as error:
            message = f"cannot read {path} ({one_line(error)}); run it again with --overwrite"
            raise RunFolderError(message) from None

    def _read(
        self, name: str, how: Callable[[Path], dict[str, Any]] = read_object
    ) -> dict[str, Any] | None:
        try:
            return how(self.path / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise self._unreadable(name, one_line(error)) from None

    def _unreadable(self, name: str, why: str) -> RunFolderError:
        path = self.path / name
        return RunFolderError(
            f"cannot read {path} ({why}); remove it or run again with --overwrite"
        )

    # `seed=S` and `seed=S.new`

    @property
    def replacement(self) -> RunFolder:
        """Where a run is written that replaces the finished run in this folder."""
        return RunFolder(self.path.with_name(f"{self.path.name}.new"))

    @property
    def active(self) -> RunFolder:
        """The folder that `--resume` continues: a replacement once it has a step or a result."""
        new = self.replacement
        return new if new.begun or new.status is not None else self

    def tidy(self) -> None:
        """Complete what a killed process left: a replacement that is finished or has no step."""
        new = self.replacement
        if new.status == "finished":
            new.take_place()
        elif new.path.is_dir() and new.status is None and not new.begun:
            new.clear()
            with contextlib.suppress(OSError):  # it holds something else
                new.path.rmdir()
        if self.path.is_dir():
            self._remove_old()
        if (kept := self.path.with_name(f"{self.path.name}.replaced")).is_dir():
            logger.warning(
                "%s holds a finished run that an older version kept; rename it to "
                "%s to use it, or remove it",
                kept,
                self.path.name,
            )

    def take_place(self) -> None:
        """Rename a finished `seed=S.new` to `seed=S`. A kill in between is completed by `tidy`."""
        if self.path.suffix != ".new":
            return
        final = RunFolder(self.path.with_suffix(""))
        if final.path.exists():
            if final._old.exists():
                final._remove_old()
            os.replace(final.path, final._old)
        os.replace(self.path, final.path)
        final._remove_old()

    @property
    def _old(self) -> Path:
        return self.path.with_name(f".{self.path.name}.old")

    def _remove_old(self) -> None:
        """The run that was replaced; what somebody else has put there moves to the new one."""
        RunFolder(self._old).clear()
        with contextlib.suppress(OSError):
            for each in self._old.iterdir():
                if not os.path.lexists(self.path / each.name):
                    os.rename(each, self.path / each.name)
            self._old.rmdir()

    def clear(self, keep: Container[str] = ()) -> None:
        """Remove what runs write, and nothing else."""
        if not keep:
            remove_logs(self.path)
        with contextlib.suppress(OSError):
            for each in [path for path in self.path.iterdir() if path.name not in keep]:
                if each.name == "checkpoints" and each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each, ignore_errors=True)
                elif WRITTEN.fullmatch(each.name) and (each.is_symlink() or not each.is_dir()):
                    each.unlink()

    # Writing

    def owned(self) -> contextlib.AbstractContextManager[None]:
        """Around everything that changes `seed=S` or its neighbours. The lock is next to them, as
        they are renamed and removed.
        """
        lock = self.path.with_name(f".{self.path.name}.lock")
        return one_owner(lock, self.path, other="another --out")

    def require_no_link(self, out: Path) -> None:
        """Refuse a link between OUT and the run, which leads to a run elsewhere. OUT may be one."""
        between = [path for path in self.path.parents if out in path.parents]
        for path in (self.path, self.replacement.path, self._old, *between):
            try:
                mode = os.lstat(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:  # such as a name that is too long
                message = f"cannot use {one_line(path)} ({error.strerror}); choose another --out"
                raise RunFolderError(message) from None
            if stat.S_ISLNK(mode):
                raise _is_link(path)

    def make(self) -> None:
        """Make the folder, or find it. One with links is refused: they lead out of the folder."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            links = [path for path in (self.path, *self.path.iterdir()) if path.is_symlink()]
        except OSError as failure:
            message = f"cannot make {self.path} ({failure.strerror}); choose another --out"
            raise RunFolderError(message) from None
        if links:
            raise _is_link(links[0])
        if os.path.lexists(self.checkpoints) and not self.checkpoints.is_dir():
            raise RunFolderError(
                f"{one_line(self.checkpoints)} is no folder; remove it, or choose another --out"
            )

    def write_text(self, name: str, text: str) -> None:
        replace_file(self.path / name, text.encode())


def _is_link(path: Path) -> RunFolderError:
    return RunFolderError(
        f"{one_line(path)} is a link, and a run writes into its own folder alone; "
        "remove it, or choose another --out"
    )


NO_FOLDER = RunFolder(Path(os.devnull))


@dataclass(frozen=True)
class Run:
    """One seed of one config. Without a folder nothing is written."""

    config: Any
    seed: int
    folder: RunFolder = NO_FOLDER
    observers: tuple[Observer, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.config.recipe}, seed {self.seed}"

    @property
    def checkpoints(self) -> Path | None:
        return None if self.folder == NO_FOLDER else self.folder.checkpoints


@dataclass(frozen=True)
class RunResult:
    """What came of a run; metrics, curves and tensors are there when it is finished."""

    trace: Trace | None = None  # of a network
    metrics: Mapping[str, Any] = field(default_factory=dict)  # flat: name -> number
    curves: Mapping[str, Any] = field(default_factory=dict)  # name -> few numbers over the run
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # of trace.safetensors
    pictures: Mapping[str, Tensor] = field(default_factory=dict)  # bytes (height, width, channels)
    failure: NonFiniteEnergyError | None = None
    swaps: list[dict[str, Any]] = field(default_factory=list)  # of a density
    exchange: Mapping[str, Any] = field(default_factory=dict)  # numbers of its ExchangeReport
    steps_done: int | None = None


class RunWriter:
    """Writes one run; of several processes the first does."""

    def __init__(self, run: Run, options: RunOptions) -> None:
        self.run, self.folder, self.options = run, run.folder, options
        self.config_sha256 = config_sha256(to_json(run.config))
        self._was_there = set[str]()

    def begin(self) -> None:
        """A new run begins in an empty folder, a resumed one in the folder as it is."""
        if self.options.overwrite:
            self.folder.clear()
        self._was_there = {each.name for each in self.folder.path.iterdir()}
        there = self.folder.config if self.options.resume else None
        if there is None:  # else a result, or an older version, names the config that is there
            self.folder.write_text("config.json", dumps(self.run.config))
        else:
            self.config_sha256 = config_sha256(there)

    def undo(self) -> None:
        """If no step is saved: remove what `begin` wrote."""
        if self.folder.begun or self.folder.status is not None:
            return
        path = self.folder.path
        self.folder.clear(keep=self._was_there)
        with contextlib.suppress(OSError):  # as far as they are empty
            for each in (path, *path.parents[:2]):
                each.rmdir()

    def write(
        self,
        result: RunResult,
        status: str,
        seconds: float,
        *,
        n_processes: int = 1,
        n_replicas: int | None = None,
        signal: int | None = None,
    ) -> None:
        """Everything of a run; result.json, which says what the rest is, comes last."""
        trace, config, path = result.trace, self.run.config, self.folder.path
        tensors = {**(trace.tensors() if trace else {}), **result.tensors}
        if tensors and (status == "finished" or trace is None):
            save_tensors(tensors, path / "trace.safetensors")
        for name, picture in result.pictures.items():
            replace_file(path / f"{name}.png", png(picture))
        device = config.device(self.options.device)
        values = {
            "recipe": config.recipe,
            "seed": self.run.seed,
            "status": status,
            "config_sha256": self.config_sha256,
            "metrics": result.metrics,
            "swaps": trace.swaps() if trace and not result.failure else result.swaps,
            "exchange": result.exchange or None,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_seconds": seconds,
            "device": device_name(device),
            "precision": "float32" if config.autocast(device) is None else "bfloat16",
            "versions": versions(),
            "steps_done": trace.n_steps if trace else result.steps_done,
            "replicas_side_by_side": n_replicas,  # whose time the seconds are
            "processes": n_processes,
            "curves": result.curves or None,
            "signal": signal,
            "error": str(result.failure) if result.failure else None,
        }
        known = {key: value for key, value in values.items() if value is not None}
        self.folder.write_text("result.json", dumps(known))
        if status == "finished":
            if not config.keeps_checkpoints:
                shutil.rmtree(self.folder.checkpoints, ignore_errors=True)
            self.folder.take_place()


def seed_in(path: Path) -> int | None:
    """The seed in the name of a folder, such as seed=3."""
    found = re.match(r"seed=(\d+)", path.name, re.ASCII)
    return int(found[1]) if found else None


def read_result(path: Path, *, complete: bool = True) -> dict[str, Any]:
    """The content of a result.json; OSError or ValueError if no run can have written it. If it need
    not be `complete`, it may lack anything.
    """
    result = read_object(path)
    if complete and (lacking := [name for name in NEEDED if name not in result]):
        raise ValueError(f"it lacks {', '.join(lacking)}")
    for name, kind in {**NEEDED, **OPTIONAL}.items():
        if name in result and not has_type(result[name], kind):
            raise ValueError(f"{name} is {one_line(repr(result[name]), 80)}")
        if name in result and not _is_possible(name, result[name]):
            raise ValueError(f"{name} has a value that no run gives")
    return result


def has_type(value: Any, kind: Any) -> bool:
    """True and False are no numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_possible(name: str, value: Any) -> bool:
    """Are counts counts, and shares shares? What is computed from them relies on it."""
    if name in ("seed", "steps_done", "wall_seconds", "replicas_side_by_side"):
        return bool(0 <= value <= LARGEST)
    if name == "swaps":
        return all(isinstance(each, dict) and _is_pair(each) for each in value)
    if name in (
        "metrics",
        "curves",
        "exchange",
    ):  # a curve is a list, or has one for each rung or pair
        return all(_is_metric(key, each, name == "curves") for key, each in value.items())
    return True


def _is_metric(name: str, value: Any, curve: bool) -> bool:
    """JSON has no NaN and no infinities: they are null and text."""
    if curve and isinstance(value, list):
        return all(_is_metric(name, each, curve) for each in value)
    if value is None or isinstance(value, bool) or (value in ("inf", "-inf") and not curve):
        return True
    if not isinstance(value, NUMBER) or abs(value) > LARGEST:
        return False
    if name.endswith("_se"):
        return value == 0 or value >= 1 / LARGEST
    return not name.endswith(("accuracy", "acceptance_rate")) or 0 <= value <= 1


def _is_pair(pair: dict[str, Any]) -> bool:
    accepted, proposed, rungs = pair.get("accepted", -1), pair.get("proposed"), pair.get("pair")
    if not (isinstance(rungs, list) and len(rungs) == 2):
        return False
    rate = pair.get("acceptance_rate")
    counts = all(has_type(each, int) and each >= 0 for each in (accepted, proposed, *rungs))
    return counts and bool(accepted <= proposed) and (rate is None or has_type(rate, NUMBER))


def config_sha256(config: Mapping[str, Any]) -> str:
    """The hash by which a result names its config.json, in the form in which that is shown."""
    return fingerprint(printable(config))


def belongs_to(result: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Is a result that of the run with this config.json? Older results do not say."""
    return result.get("config_sha256") in (None, config_sha256(config))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    replace_file(path, save(plain, checksums(plain)))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `save_tensors` wrote, checked by its checksums; raises one of UNREADABLE."""
    require_file(path)
    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        words = file.metadata() or {}
    if other := with_another_sha256(tensors, words):
        raise ValueError(f"{', '.join(other[:4])} have another sha256 than the file says")
    return tensors


def png(image: Tensor) -> bytes:
    """The file of an image of bytes (height, width, 1 or 3 channels)."""
    height, width, channels = image.shape
    pixels, length = image.contiguous().numpy().tobytes(), width * channels
    starts = range(0, height * length, length)
    rows = b"".join(b"\0" + pixels[start : start + length] for start in starts)  # 0: no filter
    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    )


def differences(folder: RunFolder, config: ExperimentConfig) -> list[str]:
    """The settings in which a run differs from `config`, as text."""
    there = {**added_later(config), **(folder.config or {})}
    here = to_json(config)
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return [f"{key} {there.get(key)} there, {here.get(key)} here" for key in keys]


def added_later(config: Any) -> dict[str, Any]:
    """Settings that older runs do not know, with the value that changes nothing."""
    return {f.name: to_json(f.default) for f in fields(config) if f.metadata.get("added_later")}


def versions() -> dict[str, str]:
    return {
        "torchrex": torchrex.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """Such as NVIDIA H200, or CPU, x86_64, 8 threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"
