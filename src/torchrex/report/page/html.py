"""Pieces of HTML that several parts of the page use: badges, and tables whose heads sort them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from torchrex.report.run_json import STATUSES
from torchrex.report.runs import LoadedRun

Cell = tuple[str, Any]  # HTML, and what to sort by


def badge(status: str) -> str:
    kind = status if status in (*STATUSES, "unfinished", "damaged", "empty") else "other"
    return f'<span class="badge {kind}">{escape(status)}</span>'


def badges(run: LoadedRun) -> str:
    """Its status, and that it is damaged where the status does not say so."""
    both = badge(run.status)
    return both if run.status == "damaged" or not run.damaged else f"{both} {badge('damaged')}"


def plural(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def table(
    head: Sequence[str], rows: Sequence[Sequence[Cell]], *, text_columns: int, id_: str = ""
) -> str:
    """A table whose heads sort it. The first columns are text, the others are numbers where they
    can be.
    """
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}</button></th>'
        for name in head
    )
    body = []
    for row in rows:
        cells = []
        for k, (html, value) in enumerate(row):
            of_numbers = isinstance(value, int | float) and k >= text_columns
            sort = "" if value is None else f' data-v="{escape(str(value))}"'
            cells.append(f"<td{sort}{' class=n' if of_numbers else ''}>{html}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    name = f' id="{id_}"' if id_ else ""
    head_and_body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table class="sortable"{name}>{head_and_body}</table></div>'
