"""Checkpoints of a run: what is in one, when it counts, and every check before a value is used.

    .step=000000123.part          being written; never read
    step=000000123                complete: it was renamed with DONE in it, which is removed first
        replica=0.safetensors     the tensors of state["replicas"][0], ..., where that is a list
        large=0.safetensors       every other tensor of 4 MiB or more, in a file of its own
        shared.safetensors        all other tensors
        manifest.json             schema, version, step, setting and its hash, size and sha256 of
                                  each file above, the tree with its plain values
        DONE                      sha256 of manifest.json
    .step=000000123.old           the one before, while it is replaced; it counts until then
    .torchrex.lock                held by the job that writes, see `owned`

File names follow from the shape of the tree alone, so no content can point outside the folder. One
job writes into a folder; any number of processes may read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import operator
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from torchrex.checkpoint.tree import DTYPES, TreePath, decode, encode, path_name, tensor_name
from torchrex.distributed import ALONE, ProcessGroup
from torchrex.durable import (
    MOST_JSON,
    one_line,
    open_file,
    parse_json,
    remove_folder,
    sync_folder,
    write_synced,
)
from torchrex.errors import (
    CheckpointError,
    DeviceError,
    InvalidArgumentError,
    RankError,
    RunFolderError,
    TorchrexError,
    is_out_of_memory,
)
from torchrex.lock import one_owner
from torchrex.settings import fingerprint, require_same, shown

log = logging.getLogger("torchrex")

SCHEMA, VERSION = "torchrex.checkpoint", 5
LARGE = 2**22  # bytes of a tensor that gets a file of its own: files stay small enough to be sent
FOREVER = 1e12  # seconds, 30,000 years
MANIFEST, DONE, SHARED = "manifest.json", "DONE", "shared.safetensors"


class DamagedError(Exception):
    """What is wrong with one checkpoint; an older one may serve instead."""


class Checkpoint(NamedTuple):
    """A state that passed every check."""

    step: int
    state: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run.

    A state is a tree of dicts with str keys and lists; its leaves are dense tensors and plain int,
    float, bool, str or None. All come back with the same values and types, except that tensors are
    on the CPU and tuples are lists.
    """

    folder: Path
    keep: int = 2  # how many of the newest stay

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if self.keep < 1:
            raise InvalidArgumentError(f"keep must be at least 1, got {self.keep}")

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        setting: Mapping[str, Any] | None = None,
        process_group: ProcessGroup = ALONE,
    ) -> Path:
        """Save a state. When this returns it is on the disk; if it raises, the folder is as before.

        Of this and the earlier steps the newest `keep` stay. Later steps, which a run that went
        back will reach again, are left alone. All processes of a group must call this, each with
        its own replicas and None for the others: it is saved for all of them or for none.
        """
        step = operator.index(step)
        if step < 0:
            raise InvalidArgumentError(f"step must be 0 or more, got {step}")
        name = f"step={step:09d}"
        complete, part = self.folder / name, self.folder / f".{name}.part"
        is_main, moved = process_group.is_main, False
        try:
            with self._saving(complete, process_group):
                tree, tensors = encode("state", state)
                encoded = _encode_setting(setting or {})
                head = {
                    "schema": SCHEMA,
                    "version": VERSION,
                    "step": step,
                    "torch": torch.__version__,
                    "setting": encoded,
                    "setting_sha256": fingerprint(encoded),
                }
                if is_main:
                    if not self.folder.is_dir():
                        self.folder.mkdir(parents=True)
                        sync_folder(self.folder.parent)
                    self._tidy()
                    part.mkdir()
            written: dict[str, Any] = {}
            with self._saving(complete, process_group):
                if not part.is_dir():
                    raise CheckpointError(f"{self.folder} is not shared by all processes")
                for number, replica in enumerate(_replicas(tree)):
                    if replica is not None:
                        here = ("replicas", number)
                        own = {path: t for path, t in tensors.items() if path[:2] == here}
                        about = _write_tensors(part / _replica_file(number), own)
                        written[str(number)] = {"tree": replica, "file": about}
            everybody = process_group.gather(written, "saving of a checkpoint")
            with self._saving(complete, process_group):
                if is_main:
                    _write_rest(part, head, tree, tensors, everybody)
                    if complete.is_dir():
                        os.rename(complete, self.folder / f".{name}.old")
                    os.rename(part, complete)
                    moved = True
                    sync_folder(self.folder)
        except BaseException:
            with contextlib.suppress(OSError):
                if moved:
                    _remove(complete)
                if is_main:
                    self._tidy()
            raise
        if is_main:
            self._remove_surplus(step)
        return complete

    @contextlib.contextmanager
    def _saving(self, complete: Path, process_group: ProcessGroup) -> Iterator[None]:
        with process_group.all_or_none("saving of a checkpoint", CheckpointError):
            try:
                yield
            except CheckpointError:
                raise
            except OSError as failure:
                raise CheckpointError(
                    f"cannot save {complete} ({failure.strerror or failure}); earlier checkpoints "
                    "are unchanged, and a resume goes on from them. Free some space, permit "
                    "writing, or choose another folder"
                ) from None

    def load_newest(
        self,
        *,
        setting: Mapping[str, Any] | None = None,
        among: Collection[int] | None = None,
        process_group: ProcessGroup = ALONE,
        replicas: Collection[int] | None = None,
    ) -> Checkpoint | None:
        """The newest checkpoint (`among` some steps) that passes every check, or None without one.

        Damaged ones are skipped with a warning, but one of another `setting` or schema version is
        an error: older ones would have it too. Each process of a group reads the `replicas` it is
        to hold, and all of them go back to the same step.
        """
        wrong: list[str] = []
        for step in reversed(process_group.from_main(self.steps())):
            if among is not None and step not in among:
                continue
            path, damage, state = self.path_of(step), None, {}
            with process_group.all_or_none("reading of a checkpoint", CheckpointError):
                try:
                    state = read(path, step, setting, replicas)
                except DamagedError as found:
                    damage = " ".join(f"{path.name} {found}".split())
            reports = process_group.gather(damage, "reading of a checkpoint")
            if damaged := [report for report in reports if report is not None]:
                wrong.append(damaged[0])
                continue
            if wrong and process_group.is_main:
                words = "damaged checkpoint skipped in %s: %s; using %s instead"
                log.warning(words, self.folder, "; ".join(wrong), path.name)
            if process_group.is_main:
                _warn_of_another_torch(path)
            return Checkpoint(step, state, path)
        if wrong:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(wrong)}. "
                "Restore one from a copy, or remove them to begin again"
            )
        return None

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, oldest first."""
        return list(self._complete())

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint of that step."""
        return self._complete().get(step, self.folder / f"step={step:09d}")

    def require_none_after(self, step: int) -> None:
        """Refuse a run that begins anew at `step` where later checkpoints would hide its own."""
        if (steps := self.steps()) and steps[-1] > step:
            raise CheckpointError(
                f"{self.folder} holds checkpoints up to step {steps[-1]}; resume from them, or "
                "give another folder"
            )

    def _complete(self) -> dict[int, Path]:
        try:
            both = self._found(".", ".old").items(), self._found().items()
            found = {step: path for paths in both for step, path in paths if _is_complete(path)}
        except OSError as error:
            reason = f"{self.folder} ({error.strerror})"
            raise CheckpointError(f"cannot read {reason}; give another folder") from None
        return dict(sorted(found.items()))

    def _found(self, prefix: str = "", suffix: str = "") -> dict[int, Path]:
        """Folders named for a step, whatever is in them. Links are not read and not removed."""
        number = "step=([0-9]{9}|[1-9][0-9]{9,})"
        pattern = re.compile(f"{re.escape(prefix)}{number}{re.escape(suffix)}")
        try:
            matches = [(pattern.fullmatch(path.name), path) for path in self.folder.iterdir()]
        except FileNotFoundError:
            return {}
        named = [(int(match[1]), path) for match, path in matches if match]
        return {step: path for step, path in named if path.is_dir() and not path.is_symlink()}

    def _tidy(self) -> None:
        """Remove what a crash left, and rename back what was about to be replaced."""
        for path in self._found(".", ".part").values():
            _remove(path)
        for path in self._found().values():
            if not _is_complete(path):
                _remove(path)
        for step, path in self._found(".", ".old").items():
            complete = self.folder / f"step={step:09d}"
            if _is_complete(complete) or not _is_complete(path):
                _remove(path)
            else:
                os.rename(path, complete)

    def _remove_surplus(self, newest: int) -> None:
        """Remove what the new checkpoint replaces. A failure here stops no run."""
        try:
            for path in self._found(".", ".old").values():
                _remove(path)
            for step in [step for step in self.steps() if step <= newest][: -self.keep]:
                _remove(self.folder / f"step={step:09d}")
        except OSError as failure:
            words = "cannot remove old checkpoints in %s (%s); remove them by hand"
            log.warning(words, self.folder, failure.strerror or failure)


def read(
    folder: Path,
    step: int,
    setting: Mapping[str, Any] | None = None,
    replicas: Collection[int] | None = None,
) -> dict[str, Any]:
    """The state in a folder, after every check; DamagedError says what is wrong. If some `replicas`
    are given, the others are None.
    """
    data = _bytes(folder / MANIFEST)
    if _bytes(folder / DONE) != _seal(data):
        raise DamagedError(f"has a {MANIFEST} that does not match the checksum in {DONE}")
    tensors: dict[str, Tensor] = {}

    def take(path: TreePath, dtype: str, shape: list[int]) -> Tensor:
        tensor = tensors[tensor_name(path)]
        if tensor.dtype != DTYPES[dtype] or list(tensor.shape) != shape:
            raise ValueError(f"another dtype or shape of {path_name('state', path)}")
        return tensor

    try:
        manifest = parse_json(data)
        if (found := (manifest["schema"], manifest["version"])) != (SCHEMA, VERSION):
            raise CheckpointError(
                f"{folder} has schema {shown(found[0])} version {shown(found[1])}, but this "
                f"torchrex reads version {VERSION}; use the one that wrote it, or another folder"
            )
        if manifest["step"] != step:
            raise DamagedError(f"is that of step {shown(manifest['step'])}, not of step {step}")
        if setting is not None:
            _require_same_setting(folder, manifest, setting)
        tree, layout = manifest["state"], _layout(manifest["state"])
        for k in range(len(_replicas(tree))):
            if replicas is not None and k not in replicas:
                tree["dict"]["replicas"][k] = None
                del layout[_replica_file(k)]
        for name in layout:
            tensors |= _read_tensors(folder / name, **manifest["files"][name])
        state: dict[str, Any] = decode(tree, take)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, TorchrexError):
            raise
        reason = one_line(f"{type(error).__name__}: {error}")
        raise DamagedError(f"has a {MANIFEST} of another form ({reason})") from None
    return state


def _warn_of_another_torch(path: Path) -> None:
    wrote = parse_json(_bytes(path / MANIFEST)).get("torch")  # older checkpoints do not say
    if wrote is not None and wrote != torch.__version__:
        words = "%s was written with torch %s and this is %s: the run goes on, but not bit for bit"
        log.warning(words, path, one_line(wrote, 40), torch.__version__)


@contextlib.contextmanager
def owned(
    given: Sequence[Checkpoints | None], process_group: ProcessGroup = ALONE
) -> Iterator[None]:
    """Around a run: another job that writes into one of the folders is refused meanwhile. The first
    process holds the locks for all.
    """
    folders = [each.folder for each in given if each is not None]
    with contextlib.ExitStack() as locks:
        if folders:
            with process_group.all_or_none("locking of the checkpoints", RunFolderError):
                for folder in folders if process_group.is_main else ():
                    locks.enter_context(one_owner(folder / ".torchrex.lock", folder))
        yield


@contextlib.contextmanager
def expect_form(path: Path) -> Iterator[None]:
    """A state that passed its checksums may still be of another form than a run expects."""
    try:
        yield
    except (DeviceError, RankError):
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise CheckpointError(
            f"{path} is not a checkpoint of such a run ({reason}); give another folder"
        ) from None


def seconds_in(state: Mapping[str, Any]) -> float:
    """The time that a run took until it was saved."""
    seconds = float(state["seconds"])
    if not 0 <= seconds < FOREVER:
        raise ValueError(f"{seconds:g} seconds")
    return seconds


def _write_rest(
    folder: Path,
    head: dict[str, Any],
    tree: Any,
    tensors: Mapping[TreePath, Tensor],
    replicas: Sequence[Mapping[str, Any]],
) -> None:
    """Write all that is not a replica's, DONE last; `replicas` is what each process wrote."""
    files = {}
    for number, about in (pair for of_rank in replicas for pair in of_rank.items()):
        files[_replica_file(int(number))] = about["file"]
        tree["dict"]["replicas"][int(number)] = about["tree"]
    for name, paths in _layout(tree).items():
        if name not in files:
            files[name] = _write_tensors(folder / name, {path: tensors[path] for path in paths})
    data = json.dumps({**head, "files": files, "state": tree}, allow_nan=False).encode()
    write_synced(folder / MANIFEST, data)
    write_synced(folder / DONE, _seal(data))
    sync_folder(folder)


def _require_same_setting(
    folder: Path, manifest: dict[str, Any], setting: Mapping[str, Any]
) -> None:
    mine = _encode_setting(setting)
    if manifest["setting_sha256"] != fingerprint(mine):
        cure = "Go on with the setting it was saved with, or begin again in another folder"
        what = f"{folder} is a checkpoint"
        stored, mine = decode(manifest["setting"], _no_tensor), decode(mine, _no_tensor)
        require_same(stored, mine, what=what, cure=cure, error=CheckpointError)


def _encode_setting(setting: Mapping[str, Any]) -> Any:
    encoded, tensors = encode("setting", setting)
    for path in tensors:
        name = path_name("setting", path)
        raise CheckpointError(f"cannot save {name}: a setting has no tensors; use .tolist()")
    return encoded


def _no_tensor(path: TreePath, dtype: str, shape: list[int]) -> Tensor:
    raise ValueError("a tensor in the setting")


def _write_tensors(path: Path, tensors: Mapping[TreePath, Tensor]) -> dict[str, Any]:
    # Plain copies, one file at a time: safetensors takes no views that share memory or have gaps.
    data = save_tensors({tensor_name(key): _on_cpu(tensor) for key, tensor in tensors.items()})
    write_synced(path, data)
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _read_tensors(path: Path, *, size: int, sha256: str) -> dict[str, Tensor]:
    data = _bytes(path, most=size + 1)
    is_safetensors = data[8:9] in (b"", b"{")  # where the header of such a file opens
    if not is_safetensors and (data[:4] == b"PK\x03\x04" or data[:1] == b"\x80"):
        raise DamagedError(f"has a pickle in place of {path.name}; it is refused, nothing was run")
    if len(data) != size:
        how = "truncated" if len(data) < size else "too long"
        raise DamagedError(f"has a {how} {path.name}; it should have {size} bytes")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DamagedError(f"has a damaged {path.name}: its checksum is not that in {MANIFEST}")
    try:
        with torch.device("cpu"):  # whatever the default device is
            return load_tensors(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = one_line(error)
        raise DamagedError(f"has a {path.name} that is no safetensors file ({reason})") from None


def _bytes(path: Path, most: int = MOST_JSON) -> bytes:
    """The first `most` bytes of a file."""
    try:
        with open_file(path) as file:
            return file.read(min(most, os.fstat(file.fileno()).st_size))
    except FileNotFoundError:
        raise DamagedError(f"has no {path.name}") from None
    except OSError as error:
        raise DamagedError(f"has a {path.name} that cannot be read ({error.strerror})") from None


def _replicas(tree: Any) -> list[Any]:
    """The list of replicas in the JSON form of a tree, if it has one."""
    replicas = tree["dict"].get("replicas")
    return replicas if isinstance(replicas, list) else []


def _replica_file(k: int) -> str:
    return f"replica={k}.safetensors"


def _layout(tree: Any) -> dict[str, list[TreePath]]:
    """The tensors in each file, from the JSON form of a tree."""
    files: dict[str, list[TreePath]] = {_replica_file(k): [] for k in range(len(_replicas(tree)))}
    large: dict[str, list[TreePath]] = {}
    shared: list[TreePath] = []

    def note(path: TreePath, dtype: str, shape: list[int]) -> None:
        if len(path) > 1 and path[0] == "replicas" and isinstance(path[1], int):
            files[_replica_file(path[1])].append(path)
        elif math.prod(shape) * DTYPES[dtype].itemsize >= LARGE:
            large[f"large={len(large)}.safetensors"] = [path]
        else:
            shared.append(path)

    decode(tree, note)
    return {**files, **large, SHARED: shared}


def _on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def _seal(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}\n".encode()


def _is_complete(path: Path) -> bool:
    return (path / DONE).exists()


def _remove(path: Path) -> None:
    remove_folder(path, first=DONE)
