"""Objects in notebooks: a title and tables, everything escaped, without style sheets or scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence

# No colours: those of the notebook hold, light or dark.
STYLE = "text-align:right;padding:0.1em 0.6em"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        inner = (f'<{tag} style="{STYLE}">{html.escape(cell)}</{tag}>' for cell in cells)
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def details(summary: str, text: str) -> str:
    """Something that opens at a click."""
    head = f"<summary>{html.escape(summary)}</summary>"
    return f"<details>{head}<code>{html.escape(text)}</code></details>"


def panel(name: str, line: str, *parts: str) -> str:
    """An object called `name`, one line about it, and tables."""
    return f"<div><p><b>{html.escape(name)}</b>: {html.escape(line)}</p>{''.join(parts)}</div>"
