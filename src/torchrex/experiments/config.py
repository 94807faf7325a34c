"""Configs: frozen dataclasses of plain values, overridden by `a.b=c`, saved as JSON beside the
result.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import re
import types
import typing
from typing import Any, TypeVar

from torchrex.errors import ConfigError

C = TypeVar("C")


def override(config: C, assignments: typing.Sequence[str]) -> C:
    """`config` with `key=value` assignments applied; keys of nested configs are joined by dots."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ConfigError(f"an override has the form key=value, got {assignment!r}")
        config = _assign(config, key.strip().split("."), text.strip(), key.strip())
    check = getattr(config, "check", None)
    if check is not None:  # when all are applied, whatever their order
        check()
    return config


def _assign(config: C, path: list[str], text: str, key: str) -> C:
    hints = typing.get_type_hints(type(config))
    names = [f.name for f in dataclasses.fields(config) if f.metadata.get("settable", True)]  # type: ignore[arg-type]
    name, *rest = path
    if name not in names and any(f.name == name for f in dataclasses.fields(config)):  # type: ignore[arg-type]
        raise ConfigError(
            f"setting {key!r} belongs to the recipe and is fixed; choose another recipe from `torchrex list`"
        )
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
        raise ConfigError(f"unknown setting {key!r} in --set; {hint}")
    value = getattr(config, name)
    if rest:
        if not dataclasses.is_dataclass(value):
            raise ConfigError(f"setting {name!r} has no parts, so {key!r} cannot be set")
        return dataclasses.replace(config, **{name: _assign(value, rest, text, key)})  # type: ignore[type-var]
    if dataclasses.is_dataclass(value):
        parts = ", ".join(f"{name}.{f.name}" for f in dataclasses.fields(value))
        raise ConfigError(f"setting {key!r} has parts; set one of {parts}")
    return dataclasses.replace(config, **{name: parse(text, hints[name], key)})  # type: ignore[type-var]


def parse(text: str, kind: Any, key: str) -> Any:
    """Read `text` as a value of the annotated type, or say what was expected."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if text.lower() in ("none", "null") and type(None) in args:
            return None
        return parse(text, next(arg for arg in args if arg is not type(None)), key)
    if origin is typing.Literal:
        if text not in args:
            raise ConfigError(
                f"setting {key!r} must be one of {', '.join(map(str, args))}, got {text!r}"
            )
        return text
    if origin is tuple:
        inner = text.strip("()[] ")
        return tuple(parse(part.strip(), args[0], key) for part in inner.split(",") if part.strip())
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"setting {key!r} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        value = kind(text.replace("_", "")) if kind in (int, float) else kind(text)
    except ValueError:
        if kind is int and _is_whole(text):
            return int(float(text))
        word = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise ConfigError(f"setting {key!r} must be {word}, got {text!r}") from None
    if kind is float and math.isnan(value):
        raise ConfigError(f"setting {key!r} must be a number, got {text!r}")
    return value


def _is_whole(text: str) -> bool:
    """1e5 is a whole number too."""
    try:
        return float(text).is_integer()
    except (ValueError, OverflowError):
        return False


def descriptions(config: Any) -> dict[str, str]:
    """What the comments beside the fields of a config, and right below them, say of its settings;
    those that --set cannot change are `fixed`.
    """
    comments = re.findall(
        r"^    (\w+): [^#\n]*# (.+(?:\n    # .+)*)$", inspect.getsource(type(config)), re.MULTILINE
    )
    said = {name: words.replace("\n    # ", " ") for name, words in comments}
    for f in dataclasses.fields(config):
        if not f.metadata.get("settable", True):
            said[f.name] = "fixed"
    return said


def to_json(value: Any) -> Any:
    """Plain JSON: tuples become lists, infinities the strings "inf" and "-inf", NaN becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def dumps(value: Any) -> str:
    """JSON for people: indented, but a list of numbers on one line."""
    text = json.dumps(to_json(value), indent=2, allow_nan=False) + "\n"
    return re.sub(
        r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text
    )
