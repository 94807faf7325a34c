"""The table of a family: a row for every recipe, its numbers beside the paper's."""

from __future__ import annotations

from html import escape

from torchrex.report.page.html import Cell, table
from torchrex.report.page.overview import Family, Row, cell, columns, label, paper_of
from torchrex.report.runs import swap_counts

AUTHORS_COUNT = (
    "The authors count the newest network alone, without the images that it calls generated."
)


def family_section(family: Family, k: int, has_charts: bool) -> str:
    chosen = columns(family)
    papers = {id(row): paper_of(row) for row in family.rows}
    stated = {metric for paper in papers.values() for metric in paper}
    notes = sorted({each.note for paper in papers.values() for each in paper.values() if each.note})
    head = ["recipe", "seeds"]
    for metric in chosen:
        head += [label(metric), *(["paper"] if metric in stated else [])]
    rows = []
    for row in family.rows:
        cells: list[Cell] = [(escape(row.title), row.title), (_seeds(row), len(row.finished))]
        for metric in chosen:
            text, value = cell(row, metric)
            cells.append((escape(text), value))
            if metric in stated:
                paper = papers[id(row)].get(metric)
                cells.append(("", None) if paper is None else (escape(paper.text), paper.value))
        swaps = [counts for run in row.finished if (counts := swap_counts(run)) is not None]
        made, tested = sum(a for a, _ in swaps), sum(p for _, p in swaps)
        words = f"{made:,} of {tested:,}" if tested else "none tested"
        cells.append((words if swaps else "", made if swaps else None))
        rows.append(cells)
    words = (
        "Means over finished seeds; in brackets the standard error of the last digit(s): from the chains of the runs where they "
        "tell it, else from the spread over seeds."
    )
    words += f" Paper: {'; '.join(notes)}." if notes else ""
    words += f" {AUTHORS_COUNT}" if "paper_accuracy" in chosen else ""
    charts = f'<div class="charts" data-charts="family-{k}"></div>' if has_charts else ""
    return (
        f"<section><h2>{escape(family.name)}</h2>{table([*head, 'swaps'], rows, text_columns=1)}"
        f'<p class="note">{escape(words)}</p>{charts}</section>'
    )


def _seeds(row: Row) -> str:
    """How many are in the means, and what became of the others."""
    finished, n = len(row.finished), len(row.runs) + len(row.empty)
    out = [run for run in row.runs if run not in row.finished]
    damaged = [run for run in out if run.status == "damaged" or "config.json" in run.damaged]
    unknown = [run for run in out if not run.config and run not in damaged]
    counts = {
        "damaged": len(damaged),
        "without config.json": len(unknown),
        "empty": len(row.empty),
        "of the same seed": row.again,
    }
    marks = [f"{count} {word}" for word, count in counts.items() if count]
    return str(n) if finished == n else ", ".join([f"{finished} of {n}", *marks])
