"""What is left of a safetensors file that was cut short."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

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
