"""Draws in one safetensors file with checksums; anything wrong with a file is one line.

tensors    those of SHAPES
metadata   "torchrex": JSON with n_steps, status and settings
           "sha256": JSON with the sha256 of each tensor and of the other metadata;
           files of older versions do not have it
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchrex.checkpoint import one_line, printable, require_file
from torchrex.durable import new_file, open_file, writing
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
WHOLE = ("steps", "replica_at", "accepted", "proposed")  # the others are real numbers
META: dict[str, type] = {"n_steps": int, "status": str, "settings": dict}
CHECKSUMS, REST = "sha256", "(metadata)"  # REST names the checksum of the other metadata
LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors
FILE = "draws.safetensors"  # its name in a run folder


def checksums(tensors: Mapping[str, Tensor], about: Mapping[str, str] = {}) -> dict[str, str]:
    """Metadata that reveal a flipped bit in the tensors or in `about`, the other metadata."""
    stated = {name: sha256_of(tensor) for name, tensor in tensors.items()}
    return {CHECKSUMS: json.dumps({**stated, REST: _sha256_of_rest(about)})}


def with_another_sha256(tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> list[str]:
    """Names of the tensors that changed since they were written; none without checksums."""
    if CHECKSUMS not in words:
        return []
    stated = json.loads(words[CHECKSUMS])
    if not isinstance(stated, dict):
        raise ValueError("its checksums are not a JSON object")
    found = {name: sha256_of(tensor) for name, tensor in tensors.items()}
    found[REST] = _sha256_of_rest(words)
    return sorted(name for name in found | stated if found.get(name) != stated.get(name))


def sha256_of(tensor: Tensor) -> str:
    """Of its dtype, shape and bytes: the same bytes in another shape are another tensor."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _sha256_of_rest(words: Mapping[str, str]) -> str:
    rest = sorted((name, each) for name, each in words.items() if name != CHECKSUMS)
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def write_draws(tensors: dict[str, Tensor], meta: dict[str, Any], path: Path) -> None:
    about = {"torchrex": json.dumps(meta)}
    advice, room = "give the name of a file in a folder that exists", "save again or resume the run"
    with writing(path, RunFolderError, advice, room=room), new_file(path) as file:
        _write_tensors(file, tensors, {**about, **checksums(tensors, about)})


def _write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], words: dict[str, str]) -> None:
    """As safetensors does. Its `save` takes twice the memory of all draws. Its `save_file` makes a
    file for the user alone, which a killed process leaves behind.
    """
    header: dict[str, Any] = {"__metadata__": words}
    in_order = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # all aligned
    end = 0
    for name, tensor in in_order:
        kind, begin = tensor.dtype, end
        end += tensor.numel() * tensor.element_size()
        letter = "F" if kind.is_floating_point else "I" if kind.is_signed else "U"
        code = f"{'B' * (kind == torch.bfloat16)}{letter}{8 * tensor.element_size()}"
        header[name] = {"dtype": code, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in in_order:
        file.write(_bytes_of(tensor))


def read_draws(path: Path) -> dict[str, Any]:
    """Tensors and metadata by name, checked."""
    if path.is_dir():
        inside = path / FILE
        advice = f"load {inside}" if inside.is_file() else f"give the file itself, such as {FILE}"
        raise RunFolderError(f"{path} is a folder; {advice}")
    try:
        require_file(path, follow=True)  # the caller named it
        with safe_open(str(path), framework="pt") as file:
            names, words = set(file.keys()), file.metadata() or {}
            if "torchrex" not in words or not names >= set(SHAPES):
                raise RunFolderError(
                    f"{path} is a safetensors file of another kind: it holds "
                    f"{one_line(_some(sorted(names)))}; give what Draws.save wrote"
                )
            meta = json.loads(words["torchrex"])
            parts = {name: file.get_slice(name) for name in SHAPES}
            forms = {name: (each.get_shape(), each.get_dtype()) for name, each in parts.items()}
            sizes = _check_form(path, forms, meta)  # before any of them is read
            tensors = {name: file.get_tensor(name) for name in SHAPES}
        if changed := with_another_sha256(tensors, words):
            raise RunFolderError(
                f"{path} is damaged: {one_line(_some(changed))} have another sha256 than the file "
                "states; restore it, or sample again"
            )
        _check_values(path, tensors, meta["n_steps"], sizes["rungs"])
    except RunFolderError:
        raise
    except FileNotFoundError:
        raise RunFolderError(f"there is no file {path}") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {path} ({error.strerror or error})") from None
    except (SafetensorError, ValueError, RecursionError, RuntimeError) as error:
        raise RunFolderError(_what_is_wrong(path, error)) from None
    return {**tensors, **meta}


def _what_is_wrong(path: Path, error: Exception) -> str:
    """A safetensors file starts with the length of its header in 8 bytes, then the JSON header."""
    with open_file(path, follow=True) as file:
        start, size = file.read(9), os.fstat(file.fileno()).st_size
    if not size:
        return f"{path} is empty; restore it, or sample again"
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER:
        return (
            f"{path} is damaged, perhaps cut off: it ends after {size:,} bytes "
            f"({one_line(error)}); restore it, or sample again"
        )
    return f"{path} is not a safetensors file; give what Draws.save wrote"


def _check_form(
    path: Path, forms: Mapping[str, tuple[list[int], str]], meta: Any
) -> dict[str, int]:
    """The length of every axis; refuses shapes, types and metadata that no run can have written."""
    meta = meta if isinstance(meta, dict) else {}
    wrong = [name for name, kind in META.items() if type(meta.get(name)) is not kind]
    wrong += [
        name for name in ("status", "settings") if printable(meta.get(name)) != meta.get(name)
    ]
    sizes: dict[str, int] = {}
    for name, axes in SHAPES.items():
        shape, dtype = forms[name]
        if len(shape) != len(axes) or any(
            sizes.setdefault(axis, n) != n for axis, n in zip(axes, shape, strict=True)
        ):
            wrong.append(f"{name} of shape {tuple(shape)}")
        elif not dtype.startswith(("I", "U") if name in WHOLE else ("F", "BF")):
            wrong.append(f"{name} of {dtype}")
    if not wrong and (set(meta) != set(META) or sizes["pairs"] != sizes["rungs"] - 1):
        wrong = sorted(meta)
    _refuse(path, wrong)
    return sizes


def _check_values(path: Path, tensors: Mapping[str, Tensor], n_steps: int, n_rungs: int) -> None:
    """Refuse numbers that no run can have written: nothing checks them again."""
    steps = tensors["steps"]
    bounds: dict[str, tuple[Tensor, int, int | Tensor]] = {  # what each must lie between
        "n_steps": (torch.tensor(n_steps), 0, n_steps),
        "steps": (steps, 0, n_steps),
        "steps in order": (steps.diff(), 1, n_steps),
        "replica_at": (tensors["replica_at"], 0, n_rungs - 1),
        "accepted": (tensors["accepted"], 0, tensors["proposed"]),
    }
    _refuse(
        path, [n for n, (x, low, high) in bounds.items() if bool(((x < low) | (x > high)).any())]
    )


def _refuse(path: Path, wrong: list[str]) -> None:
    if wrong:
        raise RunFolderError(f"{path} does not hold draws (see its {one_line(_some(wrong))})")


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more
