"""Docstring examples (`>>>`) as code blocks on the site; Markdown would run them together."""

from __future__ import annotations

from typing import Any

import griffe


class FencedDoctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Each paragraph that begins with >>> between fences."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        f"```pycon\n{p.strip()}\n```" if p.lstrip().startswith(">>>") else p for p in paragraphs
    )
