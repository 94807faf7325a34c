"""Objects in notebooks: a title and tables, everything escaped, without style sheets or scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    style = "text-align:right;padding:0.1em 0.6em"  # no colours: those of the notebook hold, light or dark

    def line(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>"
            + "".join(f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell in cells)
            + "</tr>"
        )

    return f"<table><thead>{line(head, 'th')}</thead><tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def details(summary: str, text: str) -> str:
    """Something that opens at a click."""
    return f"<details><summary>{html.escape(summary)}</summary><code>{html.escape(text)}</code></details>"


def panel(name: str, told: str, *parts: str) -> str:
    """An object called `name`, one line about it, and tables."""
    return f"<div><p><b>{html.escape(name)}</b>: {html.escape(told)}</p>{''.join(parts)}</div>"
