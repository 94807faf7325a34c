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


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], *, sorts: bool = True) -> str:
    """A table; its heads sort it. The first column stays in sight when it is moved sideways."""
    right = [any(isinstance(row[k][1], int | float) for row in rows) for k in range(len(head))]
    button = '<th scope="col" aria-sort="none"{}><button type="button">{}</button></th>'
    each = zip(head, right, strict=True)
    form = button if sorts else "<th{}>{}</th>"
    heads = "".join(form.format(" class=n" * n, escape(name)) for name, n in each)
    body = ""
    for row in rows:
        cells = ""
        for (html, value), n in zip(row, right, strict=True):
            sort = f' data-v="{escape(str(value))}"' if sorts and value is not None else ""
            cells += f"<td{sort}{' class=n' * n}>{html}</td>"
        body += f"<tr>{cells}</tr>"
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table{" class=sortable" * sorts}>{inner}</table></div>'


def plain_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    """Texts in rows, all but the first column numbers; "" for no rows."""
    cells = [[(escape(x), k or None) for k, x in enumerate(row)] for row in rows]
    said = f'<p class="note">{escape(note)}</p>' * bool(note)
    return f"<h4>{escape(title)}</h4>{table(head, cells, sorts=False)}{said}" if rows else ""


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
