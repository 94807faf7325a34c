"""What is inside one checkpoint, and every check between the disk and the first use of a value.

    replica=0.safetensors ...   the tensors of state["replicas"][0], ..., where that is a list
    large=0.safetensors ...     each other tensor of 4 MiB or more, by itself: files stay small enough to be sent around
    shared.safetensors          all other tensors
    manifest.json               schema, version, step, setting, size and sha256 of each file above, the tree with its plain values
    DONE                        sha256 of manifest.json, written last

File names follow from the shape of the tree alone and are never read from a file, so no content can
point outside the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from torchrex.checkpoint.files import one_line, parse_json, read_file, require_file
from torchrex.checkpoint.setting import encode_setting, require_same
from torchrex.checkpoint.tree import (
    DTYPES,
    TreePath,
    agrees,
    decode,
    dtype_name,
    encode,
    place,
    short,
    tensor_name,
)
from torchrex.durable import sync_folder, write_synced
from torchrex.errors import CheckpointError

SCHEMA, VERSION = "torchrex.checkpoint", 4
MOST_AXES = 64  # of a tensor
LARGE = 2**22  # bytes of a tensor that gets a file of its own
ITEM_SIZES = {dtype_name(dtype): dtype.itemsize for dtype in DTYPES}
MANIFEST, DONE, SHARED = "manifest.json", "DONE", "shared.safetensors"


class DamagedError(Exception):
    """What is wrong with a checkpoint that cannot be trusted. An older one may serve instead, so
    this never leaves the room.
    """


class Contents:
    """A state made ready for the disk. Whatever cannot be saved is found here, before anything is
    written.

    Several processes may write one checkpoint: each has its own replicas in its state and None for
    the others. The first writes all that is not a replica's, and learns from the others what
    `write_replicas` gave them.
    """

    def __init__(self, step: int, state: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        self.tree, self._tensors = encode("state", state)
        self.head = {
            "schema": SCHEMA,
            "version": VERSION,
            "step": step,
            "setting": encode_setting(setting),
        }

    def write_replicas(self, folder: Path) -> dict[str, Any]:
        """Write the replicas that are here; for each, by its number, its part of the tree and what
        its file has.
        """
        written = {}
        for k, tree in enumerate(_replicas(self.tree)):
            if tree is not None:
                tensors = {
                    path: tensor
                    for path, tensor in self._tensors.items()
                    if path[:2] == ("replicas", k)
                }
                written[str(k)] = {
                    "tree": tree,
                    "file": _write_tensors(folder / _replica_file(k), tensors),
                }
        return written

    def write_rest(self, folder: Path, replicas: Mapping[str, Any]) -> bytes:
        """Write everything else but DONE, with what is known of all replicas; returns what DONE
        shall hold.
        """
        tree = self.tree
        for (
            k,
            written,
        ) in replicas.items():  # one that nobody has is None, as somebody may have wanted
            tree["dict"]["replicas"][int(k)] = written["tree"]
        places = _places(tree)
        files = {_replica_file(int(k)): written["file"] for k, written in replicas.items()}
        for name in _file_names(tree, places):
            if name not in files:
                tensors = {
                    path: tensor for path, tensor in self._tensors.items() if places[path] == name
                }
                files[name] = _write_tensors(folder / name, tensors)
        manifest = json.dumps(
            {**self.head, "files": files, "state": tree}, allow_nan=False
        ).encode()
        write_synced(folder / MANIFEST, manifest)
        sync_folder(folder)
        return _seal(manifest)


def _write_tensors(path: Path, tensors: Mapping[TreePath, Tensor]) -> dict[str, Any]:
    # Plain copies, one file at a time: safetensors takes neither views that share memory nor gaps
    # in it.
    data = save({tensor_name(place): _on_cpu(tensor) for place, tensor in tensors.items()})
    write_synced(path, data)
    return {"size": len(data), "sha256": _sha256(data)}


def read(
    folder: Path,
    step: int,
    setting: Mapping[str, Any] | None,
    replicas: Collection[int] | None = None,
) -> dict[str, Any]:
    """The state in a folder, after every check; DamagedError says why there is none. Of some
    `replicas` only, if they are given: the others are None.
    """
    manifest = _manifest(folder)
    if (found := (manifest.get("schema"), manifest.get("version"))) != (SCHEMA, VERSION):
        raise CheckpointError(
            f"{folder} has schema {short(found[0])} version {short(found[1])}, but this torchrex understands {SCHEMA!r} "
            f"version {VERSION}; read it with the torchrex that wrote it, or begin again in another folder"
        )
    try:
        if type(manifest["step"]) is not int or manifest["step"] != step:
            raise DamagedError(f"is that of step {short(manifest['step'])}, not of step {step}")
        if setting is not None:
            require_same(folder, manifest["setting"], setting)
        tree, listed = manifest["state"], manifest["files"]
        places = _places(tree)
        names = _file_names(tree, places)
        if not isinstance(listed, dict) or set(listed) != set(names):
            raise DamagedError(f"lists other files in {MANIFEST} than its tree needs")
        for k in range(len(_replicas(tree))):
            if replicas is not None and k not in replicas:
                tree["dict"]["replicas"][k] = None
                names.remove(_replica_file(k))
        stored = {name: _tensors(folder / name, **listed[name]) for name in names}

        def take(path: TreePath, dtype: str, shape: list[int]) -> Tensor:
            tensor = stored[places[path]].pop(tensor_name(path), None)
            if tensor is None or not agrees(tensor, dtype, shape):
                raise DamagedError(
                    f"has no {short(dtype)} tensor of shape {short(shape)} for {place('state', path)} in {places[path]}"
                )
            return tensor

        state: dict[str, Any] = decode(tree, take)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise DamagedError(
            f"has a {MANIFEST} of another form ({one_line(f'{type(error).__name__}: {error}')})"
        ) from None
    if extra := [f"{name}: {tensor}" for name, tensors in stored.items() for tensor in tensors]:
        raise DamagedError(f"has a tensor that is not in its {MANIFEST} ({short(extra[0])})")
    return state


def _manifest(folder: Path) -> dict[str, Any]:
    data = _bytes(folder / MANIFEST)
    if _bytes(folder / DONE) != _seal(data):
        raise DamagedError(
            f"has a {MANIFEST} that does not match the checksum in {DONE}: one of the two is damaged"
        )
    try:
        manifest = parse_json(data)
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict):
        raise DamagedError(f"has a {MANIFEST} that is not a JSON object")
    return manifest


def _tensors(path: Path, *, size: int, sha256: str) -> dict[str, Tensor]:
    if type(size) is not int or type(sha256) is not str:
        raise ValueError(f"{short(size)} and {short(sha256)} for size and sha256 of {path.name}")
    data, there = _bytes(path, size), _size(path)
    if _is_pickle(data):
        raise DamagedError(
            f"has a pickle in place of {path.name}, which is refused; nothing in it was executed"
        )
    if there != size:
        raise DamagedError(
            f"has a {'truncated' if there < size else 'too long'} {path.name}, {there} bytes of {size}"
        )
    if _sha256(data) != sha256:
        raise DamagedError(
            f"has a damaged {path.name}, whose checksum is not the one in {MANIFEST}"
        )
    try:
        with torch.device("cpu"):  # whatever the default device is
            return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise DamagedError(
            f"has a {path.name} that is not in safetensors format ({one_line(error)})"
        ) from None


def _is_pickle(data: bytes) -> bool:
    """Whether the first bytes are those of torch.save (a zip file) or of a bare pickle of protocol
    2 to 5.
    """
    if data[8:9] in (b"", b"{"):  # where the header of a safetensors file opens
        return False
    return data.startswith(b"PK\x03\x04") or (data[0] == 0x80 and 2 <= data[1] <= 5)


def _size(path: Path) -> int:
    with _in_words(path):
        return require_file(path)


def _bytes(path: Path, most: int | None = None) -> bytes:
    """What is in a file; of one that is longer than `most` bytes only the beginning."""
    with _in_words(path):
        if most is None:
            return read_file(path)
        there = require_file(path)
        with open(path, "rb") as file:
            return file.read(min(there, max(most, 16)))  # 16 bytes tell a pickle


@contextlib.contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DamagedError(f"lacks {path.name}") from None
    except OSError as error:
        raise DamagedError(f"has a {path.name} that cannot be read ({error.strerror})") from None


def _file_names(tree: Any, places: Mapping[TreePath, str]) -> list[str]:
    large = [name for name in places.values() if name.startswith("large=")]
    return [*(_replica_file(k) for k in range(len(_replicas(tree)))), *large, SHARED]


def _replicas(tree: Any) -> list[Any]:
    """The list of replicas in the JSON form of a tree, if it has one."""
    replicas = tree["dict"].get("replicas")
    return replicas if isinstance(replicas, list) else []


def _replica_file(k: int) -> str:
    return f"replica={k}.safetensors"


def _places(tree: Any) -> dict[TreePath, str]:
    """The file of every tensor of a tree in its JSON form."""
    places: dict[TreePath, str] = {}
    large: list[str] = []

    def note(path: TreePath, dtype: str, shape: list[int]) -> Tensor:
        name = SHARED
        if len(path) > 1 and path[0] == "replicas" and isinstance(path[1], int):
            name = _replica_file(path[1])
        elif math.prod(_whole_shape(shape)) * ITEM_SIZES.get(dtype, 0) >= LARGE:
            large.append(f"large={len(large)}.safetensors")
            name = large[-1]
        places[path] = name
        return torch.empty(0)

    decode(tree, note)
    return places


def _whole_shape(shape: list[Any]) -> list[int]:
    if len(shape) > MOST_AXES or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise ValueError(f"a tensor of shape {short(shape)}")
    return shape


def _on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _seal(manifest: bytes) -> bytes:
    return f"{_sha256(manifest)}\n".encode()
