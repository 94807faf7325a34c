"""HTML of the page. Everything that comes from a run folder is escaped here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchrex.durable import printable
from torchrex.report.reader import LoadedRun

STATUSES = (
    *("finished", "paused", "interrupted", "failed", "unfinished", "damaged", "empty"),
    *("unreadable", "problem", "warning", "note", "fine"),
)
Cell = tuple[str, Any]  # HTML, and what to sort by; a number is on the right of its cell


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], *, id_: str = "") -> str:
    """A table whose heads sort it. The first column stays in sight when it is moved sideways."""
    right = [any(isinstance(row[k][1], int | float) for row in rows) for k in range(len(head))]
    heads = "".join(
        f'<th scope="col" aria-sort="none"{" class=n" * n}><button type="button">{escape(name)}'
        "</button></th>"
        for name, n in zip(head, right, strict=True)
    )
    body = ""
    for row in rows:
        cells = ""
        for (html, value), n in zip(row, right, strict=True):
            sort = "" if value is None else f' data-v="{escape(str(value))}"'
            cells += f"<td{sort}{' class=n' if n else ''}>{html}</td>"
        body += f"<tr>{cells}</tr>"
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="sortable" id="{id_}">{inner}</table></div>'


def plain_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    """Texts in rows, all but the first column numbers; "" for no rows."""
    if not rows:
        return ""

    def line(cells: Sequence[str], tag: str) -> str:
        inner = (f"<{tag}{' class=n' * (k > 0)}>{escape(x)}</{tag}>" for k, x in enumerate(cells))
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    made = f"<thead>{line(head, 'th')}</thead><tbody>{body}</tbody>"
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<h4>{escape(title)}</h4><div class="scroll"><table>{made}</table></div>{said}'


def badge(status: str) -> str:
    kind = status if status in STATUSES else "other"
    return f'<span class="badge {kind}">{escape(status)}</span>'


def badges(run: LoadedRun) -> str:
    """Its status, and that it is damaged where the status does not say so."""
    more = run.damaged and run.status != "damaged"
    return badge(run.status) + (f" {badge('damaged')}" if more else "")


def items(texts: Sequence[str]) -> str:
    """A list of texts."""
    return f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in texts if each)}</ul>"


def link_to(folder: Path, out: Path) -> Cell:
    """A relative address, so that page and runs can be moved together. It may be broken into lines
    at its slashes.
    """
    text = os.path.relpath(os.path.realpath(folder), os.path.dirname(os.path.realpath(out)))
    address = quote(os.fsencode(text))
    shown = escape(printable(text)).replace("/", "/<wbr>")
    # "./" keeps javascript:... a path
    return f'<a href="{escape(f"./{address}/")}">{shown}</a>', printable(text)
