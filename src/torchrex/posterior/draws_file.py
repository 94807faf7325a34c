"""Draws in one safetensors file: what it holds, and what is said of a file that is something else.

tensors    those of SHAPES metadata   "torchrex": JSON with n_steps, status and settings; "sha256":
JSON with that of each tensor, absent in older files
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchrex.checkpoint import one_line, require_file
from torchrex.errors import RunFolderError

SHAPES = {
    "values": ("chains", "draws", "dim"),
    "steps": ("draws",),
    "noise_variance": ("draws", "pairs", "chains"),
    "replica_at": ("draws", "rungs", "chains"),
    "energy": ("draws", "rungs", "chains"),
    "accepted": ("pairs", "chains"),
    "proposed": ("pairs", "chains"),
}
META: dict[str, type] = {"n_steps": int, "status": str, "settings": dict}
WHOLE = ("steps", "replica_at", "accepted", "proposed")  # the others are real numbers
CHECKSUMS, REST = (
    "sha256",
    "(metadata)",
)  # the name in the metadata, and in the checksums that of all else there
LONGEST_HEADER = 100_000_000  # bytes, that safetensors takes
FILE = "draws.safetensors"  # what a run folder calls it


def write_draws(tensors: dict[str, Tensor], meta: dict[str, Any], path: Path) -> None:
    try:
        about = {"torchrex": json.dumps(meta)}
        save_file(tensors, str(path), {**about, **checksums(tensors, about)})
    except (SafetensorError, OSError) as error:
        # safetensors passes on what the system said, after words of its own.
        told = str(error).rpartition("I/O error: ")[2].partition(" (os error")[0]
        raise RunFolderError(
            f"cannot write {path} ({told}); give the name of a file in a folder that exists"
        ) from None


def checksums(
    tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Metadata of a safetensors file from which a flipped bit in its tensors, or in the rest of its
    metadata, can be told.
    """
    return {
        CHECKSUMS: json.dumps(
            {
                **{name: sha256_of(each) for name, each in tensors.items()},
                REST: _sha256_of_rest(about or {}),
            }
        )
    }


def with_another_sha256(tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> list[str]:
    """Which tensors are not those that were written; none if the file is an older one, without
    checksums.
    """
    if CHECKSUMS not in words:
        return []
    stated = json.loads(words[CHECKSUMS])
    if not isinstance(stated, dict):
        raise ValueError("its checksums are no JSON object")
    changed = {name for name, tensor in tensors.items() if stated.get(name) != sha256_of(tensor)}
    changed |= set() if stated.get(REST) == _sha256_of_rest(words) else {REST}
    return sorted(changed | (set(stated) - set(tensors) - {REST}))


def _sha256_of_rest(words: Mapping[str, str]) -> str:
    rest = sorted((name, each) for name, each in words.items() if name != CHECKSUMS)
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def sha256_of(tensor: Tensor) -> str:
    """Of its type, its shape and its bytes: the same bytes in another shape are another tensor."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_draws(path: Path) -> dict[str, Any]:
    """Tensors and metadata by name, checked; anything wrong is said in one line."""
    if path.is_dir():
        inside = path / FILE
        advice = (
            f"load {inside}"
            if inside.is_file()
            else f"give the file itself, in a run folder {FILE}"
        )
        raise RunFolderError(f"{path} is a folder; {advice}")
    try:
        require_file(path)
        with safe_open(str(path), framework="pt") as file:
            names, words = set(file.keys()), file.metadata() or {}
            if "torchrex" not in words or not names >= set(SHAPES):
                holds = one_line(_some(sorted(names)))
                raise RunFolderError(
                    f"{path} is a safetensors file of another kind: it holds {holds}; give what Draws.save wrote"
                )
            tensors = {name: file.get_tensor(name) for name in SHAPES}
        meta = json.loads(words["torchrex"])
        if other := with_another_sha256(tensors, words):
            raise RunFolderError(
                f"{path} is damaged: {_some(other)} have another sha256 than it says; restore it, or sample again"
            )
    except FileNotFoundError:
        raise RunFolderError(f"there is no file {path}") from None
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(f"cannot read {path} ({error.strerror or error})") from None
    except (SafetensorError, ValueError, RecursionError, RuntimeError) as error:
        raise RunFolderError(_what_is_wrong(path, error)) from None
    check_draws(path, tensors, meta)
    return {**tensors, **meta}


def _what_is_wrong(path: Path, error: Exception) -> str:
    """A safetensors file begins with the length of its header in eight bytes, and then the header,
    which is JSON.
    """
    with open(path, "rb") as file:
        start = file.read(9)
    size = path.stat().st_size
    if not size:
        return f"{path} is empty; restore it, or sample again"
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER:
        return f"{path} is damaged, perhaps cut off: it ends after {size:,} bytes ({one_line(error)}); restore it, or sample again"
    return f"{path} is not a safetensors file; give what Draws.save wrote"


def check_draws(path: Path, tensors: Mapping[str, Tensor], meta: Any) -> None:
    """What has the names of draws must have their shapes as well, and hold what draws can hold:
    nobody else looks again.
    """
    if not isinstance(meta, dict):
        meta = {}
    wrong = [
        name
        for name, kind in META.items()
        if not isinstance(meta.get(name), kind) or isinstance(meta.get(name), bool)
    ]
    sizes: dict[str, int] = {}
    for name, axes in SHAPES.items():
        shape = tensors[name].shape
        if len(shape) != len(axes) or any(
            sizes.setdefault(axis, n) != n for axis, n in zip(axes, shape, strict=True)
        ):
            wrong.append(f"{name} of shape {tuple(shape)}")
        elif (
            tensors[name].is_complex()
            or tensors[name].dtype == torch.bool
            or tensors[name].is_floating_point() == (name in WHOLE)
        ):
            wrong.append(f"{name} of {tensors[name].dtype}")
    if not wrong and set(meta) == set(META) and sizes["pairs"] == sizes["rungs"] - 1:
        wrong = _out_of_bounds(tensors, meta["n_steps"])
        wrong += [name for name in ("status", "settings") if not _printable(meta[name])]
        if not wrong:
            return
    raise RunFolderError(
        f"{path} does not hold draws as Draws.save writes them (see its {one_line(_some(wrong or sorted(meta)))})"
    )


def _printable(value: Any) -> bool:
    """Whether its words can be shown in a terminal, which would obey some characters."""
    if isinstance(value, dict):
        return all(_printable(each) for pair in value.items() for each in pair)
    return (
        all(map(_printable, value))
        if isinstance(value, list)
        else not isinstance(value, str) or value.isprintable()
    )


def _out_of_bounds(tensors: Mapping[str, Tensor], n_steps: int) -> list[str]:
    """Which of them have values that no run can have given."""
    steps, rungs = tensors["steps"], tensors["replica_at"].shape[1]
    wrong = [] if n_steps >= 0 else [f"n_steps {n_steps}"]
    if len(steps) and (
        int(steps[0]) < 0
        or bool((steps[1:] <= steps[:-1]).any())
        or int(steps[-1]) > max(n_steps, 0)
    ):
        wrong.append("steps")
    if (
        tensors["replica_at"].numel()
        and not 0 <= int(tensors["replica_at"].min()) <= int(tensors["replica_at"].max()) < rungs
    ):
        wrong.append("replica_at")
    if bool((tensors["accepted"] < 0).any()) or bool(
        (tensors["accepted"] > tensors["proposed"]).any()
    ):
        wrong.append("accepted")
    return wrong


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more
