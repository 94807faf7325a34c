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
from torchrex.settings import LONGEST_SHOWN, shown

TreePath = tuple[str | int, ...]  # keys and list positions, from the root

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*FLOATS, *INTEGERS)}
DEEPEST = 100


def path_name(root: str, path: TreePath) -> str:
    """A path as a person would write it: state['replicas'][0]['x']."""
    parts = (shown(part) if len(str(part)) > LONGEST_SHOWN else repr(part) for part in path)
    return root + "".join(f"[{part}]" for part in parts)


def tensor_name(path: TreePath) -> str:
    """The name of a tensor in its file, /replicas/0/model/layers.0.weight.

    Slashes, percent signs and non-ASCII characters of a key are percent-encoded, so two paths never
    share a name; the leading slash differs from safetensors' own `__metadata__`.
    """
    return "".join("/" + quote(str(part), safe="", errors="surrogatepass") for part in path)


def encode(root: str, tree: Mapping[str, Any]) -> tuple[Any, dict[TreePath, Tensor]]:
    """The JSON form of a tree, and its tensors by path. `root` is the tree's name in messages."""
    tensors: dict[TreePath, Tensor] = {}

    def refuse(path: TreePath, reason: str) -> CheckpointError:
        return CheckpointError(f"cannot save {path_name(root, path)}: {reason}")

    def walk(node: Any, path: TreePath) -> Any:
        if len(path) > DEEPEST:
            reason = f"it is nested more than {DEEPEST} deep; does it contain itself?"
            raise refuse(path[:3], reason)
        if isinstance(node, Tensor):
            if node.dtype not in DTYPES.values() or node.layout != torch.strided or node.is_meta:
                kind = f"a {node.layout} tensor of {node.dtype} on {node.device}"
                raise refuse(path, f"it is {kind}; make it a dense one of {', '.join(DTYPES)}")
            tensors[path] = node
            dtype = str(node.dtype).removeprefix("torch.")
            return {"tensor": {"dtype": dtype, "shape": list(node.shape)}}
        if isinstance(node, Mapping):
            for key in node:
                if not isinstance(key, str):
                    raise refuse(path, f"its key {shown(key)} is not a string; use str(key)")
            return {"dict": {key: walk(child, (*path, key)) for key, child in node.items()}}
        if isinstance(node, list | tuple):
            return [walk(child, (*path, position)) for position, child in enumerate(node)]
        if type(node) is float and not math.isfinite(node):
            return {"float": repr(node)}
        if type(node) is int and node.bit_length() > 64:  # Python reads no long decimal numbers
            return {"int": hex(node)}
        if node is None or type(node) in (bool, int, float, str):
            return node
        use = "use tensors, dicts, lists, and plain int, float, bool, str or None"
        raise refuse(path, f"it is {shown(node)} of type {type(node).__name__}; {use}")

    return walk(tree, ()), tensors


def decode(node: Any, take: Callable[[TreePath, str, list[int]], Any], path: TreePath = ()) -> Any:
    """The tree of a JSON form. `take(path, dtype, shape)` gives its tensors; any other form is a
    ValueError.
    """
    match node:
        case {"dict": dict(children), **rest} if not rest:
            return {key: decode(child, take, (*path, key)) for key, child in children.items()}
        case {"tensor": {"dtype": str(dtype), "shape": list(shape), **more}, **rest} if not (
            rest or more
        ):
            return take(path, dtype, shape)
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case {"int": str(text), **rest} if not rest:
            return int(text, 16)
        case list():
            return [decode(child, take, (*path, position)) for position, child in enumerate(node)]
        case dict():
            raise ValueError(f"an unknown mark at {path_name('state', path)}")
    return node
