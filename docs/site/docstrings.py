"""Docstrings on the site: their examples (`>>>`) as code blocks, and a table of the parameters.

A parameter's type and default are those of the signature. Its description is the comment beside a
field, or else the first sentence of the docstring that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

FIELDS = ("NamedTuple", "TypedDict")


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for found in objects_in(pkg):
            if found.docstring is not None:
                found.docstring.value = fenced(found.docstring.value) + table_of(found)


def objects_in(module: griffe.Object) -> Iterator[griffe.Object]:
    for member in module.members.values():
        if not member.is_alias:
            yield member
            yield from objects_in(member)


def fenced(text: str) -> str:
    """Each paragraph that begins with >>> between fences."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        f"```pycon\n{p.strip()}\n```" if p.lstrip().startswith(">>>") else p for p in paragraphs
    )


def table_of(found: griffe.Object) -> str:
    """Name, default, type and description of each parameter or field, and what is returned."""
    rows, returns = [], ""
    if isinstance(found, griffe.Function):
        given, text = found.parameters, _text(found) + "\n\n" + _text(found.parent)
        returns = "" if found.returns is None else str(found.returns)
    elif isinstance(found, griffe.Class) and _is_record(found):
        given, text = _fields(found), _text(found)
    elif isinstance(found, griffe.Class) and "__init__" in found.members:
        given, text = found.members["__init__"].parameters, _text(found)
    else:
        return ""
    for one in given:
        if one.name in ("self", "cls") or one.name.startswith("_"):
            continue
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(
            getattr(one.kind, "value", "") if hasattr(one, "kind") else "", ""
        )
        default = None if stars else getattr(one, "default", getattr(one, "value", None))
        name = stars + one.name + ("" if default is None else f"={default}")
        comment = _comment(one) if isinstance(one, griffe.Attribute) else ""
        code = [f"`{cell}`" if cell is not None else "" for cell in (name, one.annotation)]
        words = (comment or sentence_on(one.name, text)).replace("|", r"\|")
        rows.append(f"| {' | '.join([*code, words])} |")
    parts = []
    if rows:
        kind = "field" if isinstance(given, list) else "parameter"
        parts.append("\n".join([f"| {kind} | type | |", "|---|---|---|", *rows]))
    if returns not in ("", "None"):
        parts.append(f"Returns `{returns}`.")
    return "".join(f"\n\n{part}" for part in parts)


def sentence_on(name: str, text: str) -> str:
    """The first sentence that has the name in backquotes, examples left out."""
    for paragraph in text.split("\n\n"):
        if paragraph.lstrip().startswith((">>>", "```", "|")) or paragraph.startswith("    "):
            continue
        sentence = ""
        for part in re.split(r"(?<=[.;])\s+", " ".join(paragraph.split())):
            sentence = f"{sentence} {part}".lstrip()
            if sentence.count("(") > sentence.count(")"):
                continue  # the mark is within brackets
            if re.search(rf"`{name}\b", sentence):
                sentence = sentence.rstrip(";.")
                return f"{sentence[0].upper()}{sentence[1:]}."
            sentence = ""
    return ""


def _text(found: Any) -> str:
    return found.docstring.value if getattr(found, "docstring", None) else ""


def _is_record(found: griffe.Class) -> bool:
    """A dataclass, a named tuple or a typed dict, whose parameters are its fields."""
    bases = {str(base).rsplit(".", 1)[-1] for base in found.bases}
    decorated = any("dataclass" in str(each.value) for each in found.decorators)
    return (decorated and "init=False" not in _decorators(found)) or bool(bases & set(FIELDS))


def _decorators(found: griffe.Class) -> str:
    return " ".join(str(each.value) for each in found.decorators)


def _fields(found: griffe.Class) -> list[griffe.Attribute]:
    return [
        member
        for member in found.members.values()
        if isinstance(member, griffe.Attribute)
        and member.annotation is not None
        and "property" not in member.labels
        and "ClassVar" not in str(member.annotation)
    ]


def _comment(field: griffe.Attribute) -> str:
    """The comment on the lines of a field, or on the lines above it."""
    lines = field.lines_collection[field.filepath]
    own = [
        line.split("  # ", 1)[1]
        for line in lines[field.lineno - 1 : field.endlineno]
        if "  # " in line
    ]
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip()[2:])
    words = " ".join(own or above).rstrip(",")
    return words and words[0].upper() + words[1:]
