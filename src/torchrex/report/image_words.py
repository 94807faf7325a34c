"""Words that the tables of runs on images share: numbers with their spread, and a table as wide as
the terminal has room for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from torchrex.report.image_numbers import PAPER_SEEDS
from torchrex.report.series import FEWEST_SEEDS, p_of_pairs

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]


class Section(NamedTuple):
    """A part of a table under its own title."""

    title: str
    rows: list[tuple[str, Row]]  # each under its name


def plus_minus(number: Mapping[str, Any] | None) -> str:
    if number is None:
        return ""
    return f"{number['mean']:.2f}" + (
        "" if number["two_sd"] is None else f"±{number['two_sd']:.2f}"
    )


def z_words(row: Row) -> str:
    return "" if row["z"] is None else f"{row['z']:+.1f}"


def swaps_words(row: Row) -> str:
    return "-" if row["swaps"] is None else f"{statistics.fmean(row['swaps']):.3g}"


def every_seeds_swaps(row: Row) -> str:
    return "-" if row["swaps"] is None else ", ".join(map(str, row["swaps"]))


def minutes(row: Row) -> str:
    return f"{statistics.fmean(row['wall_minutes']):.1f}"


def mean_of(name: str, digits: int = 2) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else f"{row[name]['mean']:.{digits}f}"


def in_words(effect: Mapping[str, Any]) -> str:
    """Such as `+0.12 ± 0.05 (n=3, p = 0.14)`; two seeds are too few for a test."""
    if not effect["n"]:
        return "- (no seed was run with both)"
    if effect["se"] is None:
        return f"{effect['mean']:+.2f} (n=1)"
    p_value = (
        p_of_pairs(effect["mean"], effect["se"], effect["n"])
        if effect["n"] >= FEWEST_SEEDS
        else None
    )
    tested = "" if p_value is None else f", p = {p_value:.2g}"
    return f"{effect['mean']:+.2f} ± {effect['se']:.2f} (n={effect['n']}{tested})"


def off_note(head: str, rows: Sequence[Row]) -> list[str]:
    """What the column of standard errors is, and why there is nothing in it for some rows."""
    tested = [row for row in rows if row["z"] is not None]
    single = any(row["n"] == 1 and row["paper"] for row in rows)
    if not head or not (tested or single):
        return []
    if not tested:
        return [f"{head}: one seed is not tested."]
    alone = " One seed is not tested." if single else ""
    return [
        f"{head}: (ours - paper) / sqrt(sd_ours²/n + sd_paper²/{PAPER_SEEDS}), the paper's sd being half its ±.{alone}"
    ]


def fitted(
    sections: Sequence[Section], columns: Columns, first_to_go: Sequence[str], console: Console
) -> tuple[Table, list[str]]:
    """As many of the columns as the console has room for, and their heads."""
    for n_gone in range(len(first_to_go) + 1):
        heads = [head for head in columns if head not in first_to_go[:n_gone]]
        shown = _table(sections, columns, heads)
        if (
            console.measure(shown, options=console.options.update(width=1000)).maximum
            <= console.width
        ):
            break
    return shown, heads


def _table(sections: Sequence[Section], columns: Columns, heads: Sequence[str]) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    shown.add_column("", no_wrap=True)
    for head in heads:
        shown.add_column(head, justify="right", no_wrap=True)
    for k, section in enumerate(sections):
        if k:
            shown.add_section()
        shown.add_row(section.title, style="bold")
        for name, row in section.rows:
            shown.add_row(f" {name}", *(columns[head](row) for head in heads))
    return shown


def markdown_table(columns: Columns, rows: Iterable[Row]) -> list[str]:
    return markdown_lines(
        list(columns), [[words(row) for words in columns.values()] for row in rows]
    )


def markdown_lines(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
