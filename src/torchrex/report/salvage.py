"""What is left of a safetensors file that was cut short."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrex.checkpoint import one_line, parse_json, read_file
from torchrex.posterior import with_another_sha256

MOST = 2**34  # bytes of a damaged file that are read into memory
MOST_AXES = 64  # of a tensor

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


def salvage(
    path: Path, problems: list[str], why: str = ""
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What can be read of a safetensors file that was cut short: whole tensors, and the first rows
    of the one it ends in.

    `why` is what was said of the file by whoever could not read it; it is told where nothing is
    lost.
    """
    try:
        data = read_file(path, MOST)
        (length,) = struct.unpack("<Q", data[:8])
        header = parse_json(data[8 : 8 + length])
        meta = _words(header.pop("__metadata__", {}))
        places = {name: _place(about) for name, about in header.items()}
        if sum(
            min(end, len(data)) - min(begin, len(data)) for _, _, begin, end in places.values()
        ) > len(data):
            raise ValueError(
                "its tensors overlap"
            )  # else a small file could ask for any amount of memory
    except (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        problems.append(
            f"{path.name} cannot be read: its table of contents is damaged ({one_line(error)})"
        )
        return {}, {}
    body = data[8 + length :]
    tensors: dict[str, Tensor] = {}
    lost = []
    for name, (dtype, shape, begin, end) in places.items():
        size = math.prod(shape) * dtype.itemsize
        if end - begin != size:
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
        tensors[name] = (
            torch.frombuffer(part, dtype=dtype).reshape(shape)
            if part
            else torch.empty(shape, dtype=dtype)
        )
    whole = 8 + length + max((place[3] for place in places.values()), default=0)
    what = (
        f"it ends at byte {len(data):,} of {whole:,}"
        if len(data) < whole
        else "its sizes contradict each other"
    )
    if not lost:
        what = why or what
        lost = _changed(tensors, meta)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in lost}
    problems.append(
        f"{path.name} is damaged: {what}; lost are {one_line(', '.join(lost)) or 'no tensors'}"
    )
    return tensors, meta


def _place(about: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Type, shape, begin and end of a tensor; anything but these in a table of contents is an
    error.
    """
    shape, (begin, end) = about["shape"], about["data_offsets"]
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_AXES
        or not all(type(n) is int for n in (*shape, begin, end))
    ):
        raise ValueError(
            f"a tensor of shape {one_line(shape, 80)} at {one_line(about['data_offsets'], 80)}"
        )
    if min(shape, default=0) < 0 or max(shape, default=0) >= 2**63 or not 0 <= begin <= end:
        return DTYPES[about["dtype"]], (), 0, 0  # which no tensor is: it is lost
    return DTYPES[about["dtype"]], tuple(shape), begin, end


def _words(meta: Any) -> dict[str, str]:
    if not isinstance(meta, dict) or not all(isinstance(each, str) for each in meta.values()):
        raise ValueError("its metadata are not texts by name")
    return meta


def _changed(tensors: dict[str, Tensor], meta: dict[str, str]) -> list[str]:
    """Whole tensors that are not those that were written."""
    try:
        return with_another_sha256(tensors, meta)
    except (ValueError, RecursionError):
        return list(tensors)
