"""Draws in one safetensors file: what it holds, and what is said of a file that is something else.

tensors    those of SHAPES
metadata   "torchrex": JSON with n_steps, status and settings
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

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
LONGEST_HEADER = 100_000_000  # bytes, that safetensors takes
FILE = "draws.safetensors"  # what a run folder calls it


def write_draws(tensors: dict[str, Tensor], meta: dict[str, Any], path: Path) -> None:
    try:
        save_file(tensors, str(path), {"torchrex": json.dumps(meta)})
    except (SafetensorError, OSError) as error:
        # safetensors passes on what the system said, after words of its own.
        told = str(error).rpartition("I/O error: ")[2].partition(" (os error")[0]
        raise RunFolderError(f"cannot write {path} ({told}); give the name of a file in a folder that exists") from None


def read_draws(path: Path) -> dict[str, Any]:
    """Tensors and metadata by name, checked; anything wrong is said in one line."""
    if path.is_dir():
        inside = path / FILE
        advice = f"load {inside}" if inside.is_file() else f"give the file itself, in a run folder {FILE}"
        raise RunFolderError(f"{path} is a folder; {advice}")
    try:
        with safe_open(str(path), framework="pt") as file:
            names, words = set(file.keys()), file.metadata() or {}
            if "torchrex" not in words or not names >= set(SHAPES):
                raise RunFolderError(
                    f"{path} is a safetensors file of another kind: it holds {_some(sorted(names))}; give what Draws.save wrote"
                )
            tensors = {name: file.get_tensor(name) for name in SHAPES}
        meta = json.loads(words["torchrex"])
    except FileNotFoundError:
        raise RunFolderError(f"there is no file {path}") from None
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(f"cannot read {path} ({error})") from None
    except (SafetensorError, ValueError) as error:
        raise RunFolderError(_what_is_wrong(path, error)) from None
    _check(path, tensors, meta)
    return {**tensors, **meta}


def _what_is_wrong(path: Path, error: Exception) -> str:
    """A safetensors file begins with the length of its header in eight bytes, and then the header, which is JSON."""
    with open(path, "rb") as file:
        start = file.read(9)
    size = path.stat().st_size
    if not size:
        return f"{path} is empty; restore it, or sample again"
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER:
        return f"{path} is damaged, perhaps cut off: it ends after {size:,} bytes ({error}); restore it, or sample again"
    return f"{path} is not a safetensors file; give what Draws.save wrote"


def _check(path: Path, tensors: dict[str, Tensor], meta: Any) -> None:
    """What has the names of draws must have their shapes as well."""
    wrong = [name for name, kind in META.items() if not isinstance(meta, dict) or not isinstance(meta.get(name), kind)]
    sizes: dict[str, int] = {}
    for name, axes in SHAPES.items():
        shape = tensors[name].shape
        if len(shape) != len(axes) or any(sizes.setdefault(axis, n) != n for axis, n in zip(axes, shape, strict=True)):
            wrong.append(f"{name} of shape {tuple(shape)}")
    if wrong or set(meta) != set(META) or sizes["pairs"] != sizes["rungs"] - 1:
        raise RunFolderError(f"{path} does not hold draws as Draws.save writes them (see its {_some(wrong or sorted(meta))})")


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more
