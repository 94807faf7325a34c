"""The table of all runs and empty folders, from which a reader chooses what is shown side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torchrex.report.page.details import link_to
from torchrex.report.page.html import Cell, badge, badges, table
from torchrex.report.page.wall_time import seconds_of, sharers
from torchrex.report.run_finding import recipe_in, seed_in
from torchrex.report.runs import LoadedRun, swap_counts

FIRST_SHOWN = 2  # runs whose charts are open at the start
HEAD = (
    "show",
    "recipe",
    "seed",
    "status",
    "doctor",
    "swaps",
    "accepted, %",
    "time, s",
    "date",
    "folder",
)


def runs_table(
    runs: Sequence[LoadedRun],
    details: Mapping[int, Mapping[str, Any]],
    empty: Sequence[Path],
    out: Path,
) -> str:
    shown, shared = set(_first_shown(runs)), sharers(runs)
    rows = [
        _row(k, run, details[id(run)], k in shown, shared.get(id(run), 1))
        for k, run in enumerate(runs)
    ]
    rows += [_empty_row(path, out) for path in empty]
    note = (
        "* shared with the runs that trained beside it"
        if max(shared.values(), default=1) > 1
        else ""
    )
    return (
        f'<section id="runs"><h2>Runs one by one</h2><p class="tools"><label>Filter <input type="search" id="filter"></label> '
        f'<button type="button" id="none">show none</button> <span id="shown" class="note"></span></p>'
        f'<p id="no-match" class="note" hidden>No run matches the filter.</p>'
        f'{table(HEAD, rows, text_columns=2, id_="all-runs")}<p class="note">{note}</p>'
        f'<div id="panels" class="panels"></div></section>'
    )


def _row(
    k: int, run: LoadedRun, details: Mapping[str, Any], shown: bool, sharing: int
) -> list[Cell]:
    folder, advice = details["folder"], details["doctor"]
    counts, seconds = swap_counts(run), seconds_of(run)
    rate = 100 * counts[0] / counts[1] if counts and counts[1] else None
    date = str((run.result or {}).get("date") or "")
    mark = "" if seconds is None else f"{seconds:,.1f}{'*' if sharing > 1 else ''}"
    return [
        (
            f'<input type="checkbox" data-run="{k}" aria-label="show {escape(run.name)}"{" checked" if shown else ""}>',
            int(shown),
        ),
        (escape(run.recipe), run.recipe),
        ("" if run.seed < 0 else str(run.seed), run.seed),
        (
            badges(run)
            + (" !" if run.problems and not run.damaged and run.status == "finished" else ""),
            run.status,
        ),
        _advice(advice),
        (f"{counts[0]:,}" if counts else "", counts[0] if counts else None),
        ("" if rate is None else f"{rate:.3g}", rate),
        (mark, seconds),
        (escape(date[:16].replace("T", " ")), date),
        (_link(folder), folder["text"]),
    ]


def _advice(advice: Mapping[str, Any]) -> Cell:
    """Short: the words stand in the panel of the run. Sorted by gravity."""
    problems, warnings = advice["problems"], advice["warnings"]
    if problems is None:
        return "not told", None
    words = [
        f"{n} {word}{'s' if n > 1 else ''}"
        for n, word in ((problems, "problem"), (warnings, "warning"))
        if n
    ]
    return (", ".join(words) or "fine") + (
        " (quick look)" if advice["quick"] else ""
    ), 1000 * problems + warnings


def _empty_row(path: Path, out: Path) -> list[Cell]:
    seed, recipe = seed_in(path), recipe_in(path)
    folder = link_to(path, out)
    blank: Cell = ("", None)
    known: list[Cell] = (
        [(escape(recipe), recipe), (str(seed), seed)] if seed is not None else [blank, blank]
    )
    return [blank, *known, (badge("empty"), "empty"), *[blank] * 5, (_link(folder), folder["text"])]


def _link(folder: Mapping[str, str]) -> str:
    """It may be broken into lines, at its slashes."""
    return f'<a href="{escape(folder["href"])}">{escape(folder["text"]).replace("/", "/<wbr>")}</a>'


def _first_shown(runs: Sequence[LoadedRun]) -> list[int]:
    """Two runs of different recipes that have swaps to look at, if there are."""
    with_swaps: dict[str, int] = {}
    for k, run in enumerate(runs):
        counts = swap_counts(run)
        if run.history is not None and counts and counts[0]:
            with_swaps.setdefault(run.recipe, k)
    return list(dict.fromkeys([*with_swaps.values(), *range(len(runs))]))[:FIRST_SHOWN]
