"""One draw in one safetensors file: from a module to bytes, and from a checked file back into a
module.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from torchrex.checkpoint import one_line, require_file
from torchrex.errors import CheckpointError, InvalidArgumentError
from torchrex.posterior.store_index import INDEX, SCHEMA, StoredDraw

MOST_SHOWN = 4  # names in one message


def draw_as_bytes(module: nn.Module, *, step: int, rung: int) -> bytes:
    """Weights and buffers of a module as the content of a draw's file."""
    tensors, names = _flat_state(module)
    # Not save_file: it writes through a temporary name of its own choice, which a killed process
    # would leave behind for good.
    return save(
        tensors,
        {"torchrex": json.dumps({"schema": SCHEMA, "step": step, "rung": rung, "names": names})},
    )


def check_size(folder: Path, draw: StoredDraw) -> None:
    try:
        size = require_file(folder / draw.file)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {folder / draw.file} ({error.strerror}) named in {INDEX}; restore the file"
        ) from None
    if size != draw.size:
        raise CheckpointError(
            f"{folder / draw.file} has {size} bytes instead of {draw.size}; it is damaged, restore the file"
        )


def read_draw(folder: Path, draw: StoredDraw) -> dict[str, Tensor]:
    """The tensors of a draw, after its checksum; safetensors holds numbers and nothing that could
    be executed.
    """
    path = folder / draw.file
    check_size(folder, draw)
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror})") from None
    if sha256 != draw.sha256:
        raise CheckpointError(
            f"{path} has another sha256 than {INDEX} says; it is damaged, restore the file"
        )
    try:
        with safe_open(str(path), framework="pt") as opened:
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            about = json.loads((opened.metadata() or {})["torchrex"])
        found = tuple(about[name] for name in ("schema", "step", "rung"))
        if found != (SCHEMA, draw.step, draw.rung):
            raise ValueError(
                f"it says schema, step and rung {found}, and {INDEX} {(SCHEMA, draw.step, draw.rung)}"
            )
        return {name: state[first] for name, first in about["names"].items()}
    except (
        SafetensorError,
        OSError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise CheckpointError(
            f"{path} does not hold a draw in safetensors format ({one_line(error)}); it was not written here"
        ) from None


def _plain(name: str) -> str:
    """A name as the module had it before torch.compile wrapped it."""
    return name.replace("_orig_mod.", "")


def _flat_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Contiguous CPU copies of weights and buffers, tied ones once, and {name: name it is stored
    under} in the module's order.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    first: dict[Any, str] = {}
    for full_name, value in module.state_dict().items():
        name = _plain(full_name)
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise InvalidArgumentError(
                f"{name} of the module's state dict is {type(value).__name__}, and only dense tensors can be stored"
            )
        place = (
            (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            if value.numel()
            else name
        )
        names[name] = first.setdefault(place, name)
        if names[name] == name:
            tensors[name] = value.detach().to(
                "cpu", copy=True, memory_format=torch.contiguous_format
            )
    return tensors, names


def load_into(module: nn.Module, state: Mapping[str, Tensor], file: str) -> None:
    """Put a draw into a module of the same form; `file` is for the message if it does not fit."""
    own = {
        _plain(name): (name, value)
        for name, value in cast(dict[str, Tensor], module.state_dict()).items()
    }
    problems = {
        "missing from the draw": [name for name in own if name not in state],
        "unknown to the model": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)} for {tuple(value.shape)}"
            for name, (_, value) in own.items()
            if name in state and state[name].shape != value.shape
        ],
    }
    if any(problems.values()):
        words = [
            f"{', '.join(names[:MOST_SHOWN])}{f' and {len(names) - MOST_SHOWN} more' if len(names) > MOST_SHOWN else ''} {what}"
            for what, names in problems.items()
            if names
        ]
        raise InvalidArgumentError(
            f"{file} does not fit the model: {'; '.join(words)}. Give the model of that run"
        )
    module.load_state_dict({name: state[plain] for plain, (name, _) in own.items()})
