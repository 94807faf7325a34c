"""How a state tree becomes JSON and named tensors, and how it comes back.

In the JSON every object has one key that says what it is: {"dict": ...}, {"tensor": ...}, {"float":
"inf"} or {"int": "0x..."}. A dict of the state is always wrapped, so none of its keys can be taken
for such a mark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from torchrex.errors import CheckpointError

TreePath = tuple[str | int, ...]  # keys and list positions, from the root

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
DEEPEST = 100
LONGEST_SHOWN = 80  # characters of a value in a message


def place(root: str, path: TreePath) -> str:
    """A place in a tree as a person would write it: state['replicas'][0]['x']."""
    return root + "".join(
        f"[{short(part) if len(str(part)) > LONGEST_SHOWN else repr(part)}]" for part in path
    )


def tensor_name(path: TreePath) -> str:
    """The name of a tensor in its file, /replicas/0/model/layers.0.weight.

    Slashes, percent signs and whatever is not plain ASCII in a key are percent-encoded, so two
    paths never share a name; the leading slash keeps clear of safetensors' own `__metadata__`.
    """
    return "".join("/" + quote(str(part), safe="", errors="surrogatepass") for part in path)


def encode(root: str, tree: Mapping[str, Any]) -> tuple[Any, dict[TreePath, Tensor]]:
    """The JSON form of a tree, and its tensors by path. `root` is the tree's name in messages."""
    tensors: dict[TreePath, Tensor] = {}

    def walk(node: Any, path: TreePath) -> Any:
        if len(path) > DEEPEST:
            raise CheckpointError(
                f"cannot save {place(root, path[:3])}...: it is nested more than {DEEPEST} deep; does it contain itself?"
            )
        if isinstance(node, Tensor):
            if node.dtype not in DTYPES or node.layout is not torch.strided or node.is_meta:
                raise CheckpointError(
                    f"cannot save {place(root, path)}: it is a {node.layout} tensor of {node.dtype} on {node.device}; "
                    f"convert it to a dense one of {', '.join(map(dtype_name, DTYPES))}"
                )
            tensors[path] = node
            return {"tensor": {"dtype": dtype_name(node.dtype), "shape": list(node.shape)}}
        if isinstance(node, Mapping):
            for key in node:
                if not isinstance(key, str):
                    raise CheckpointError(
                        f"cannot save {place(root, path)}: its key {short(key)} is not a string; use str(key)"
                    )
            return {"dict": {key: walk(child, (*path, key)) for key, child in node.items()}}
        if isinstance(node, list | tuple):
            return [walk(child, (*path, position)) for position, child in enumerate(node)]
        if type(node) is float and not math.isfinite(node):
            return {"float": repr(node)}
        if (
            type(node) is int and node.bit_length() > 64
        ):  # Python refuses to read long decimal numbers, not hexadecimal ones
            return {"int": hex(node)}
        if node is None or type(node) in (bool, int, float, str):
            return node
        raise CheckpointError(
            f"cannot save {place(root, path)}: it is {short(node)} of type {type(node).__name__}; "
            f"use tensors, dicts, lists, and plain int, float, bool, str or None"
        )

    return walk(tree, ()), tensors


def decode(
    node: Any, take: Callable[[TreePath, str, list[int]], Tensor], path: TreePath = ()
) -> Any:
    """The tree of a JSON form. `take(path, dtype, shape)` gives its tensors; any other form is a
    ValueError.
    """
    match node:
        case {"dict": dict(children), **rest} if not rest:
            return {key: decode(child, take, (*path, key)) for key, child in children.items()}
        case {"tensor": {"dtype": str(dtype), "shape": list(shape), **more}, **rest} if (
            not rest and not more
        ):
            return take(path, dtype, shape)
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case {"int": str(text), **rest} if not rest:
            return int(text, 16)
        case list():
            return [decode(child, take, (*path, position)) for position, child in enumerate(node)]
        case dict():
            raise ValueError(f"an unknown mark at {place('state', path)}")
    return node


def agrees(tensor: Tensor, dtype: str, shape: list[int]) -> bool:
    return dtype_name(tensor.dtype) == dtype and list(tensor.shape) == shape


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def short(value: Any) -> str:
    """A value in a message: one line, and not all of it if it is long."""
    try:
        text = " ".join(repr(value).split())
    except (
        Exception
    ):  # a number of more digits than Python prints, or an object whose own repr fails
        text = f"something of type {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
