"""The page: one file, nothing loaded from anywhere, summary first.

Everything that comes from a run folder is text: escaped in the tables here, JSON without a `<` for the script, which makes text
nodes of it. And the page forbids the browser any script but its own, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torchrex
from torchrex.durable import replace_file
from torchrex.errors import RunFolderError
from torchrex.report.page.details import details_of
from torchrex.report.page.overview import Family, Row, cell, columns, families, label, overlays, paper_of, swaps_of
from torchrex.report.runs import LoadedRun, find_empty, find_runs, load_run

MARK = "<!-- torchrex report -->"
HERE = Path(__file__).parent
ASSETS = ("charts.js", "tables.js", "page.js")
FIRST_SHOWN = 2  # runs whose charts are open at the start
Cell = tuple[str, Any]  # HTML, and what to sort by


def write_page(
    roots: Sequence[Path], out: Path, *, title: str = "", progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Read all runs at or below `roots` and write the page; how many runs are on it, and how many of them are not whole."""
    if out.is_dir():
        raise RunFolderError(f"--out {out} is a folder; give the file to write, such as {out / 'page.html'}")
    if out.exists() and MARK.encode() not in out.read_bytes()[:200]:
        raise RunFolderError(f"--out {out} exists and is not a report of torchrex, so it is left alone; give another name")
    paths = list(dict.fromkeys(path.resolve() for root in roots for path in find_runs(root)))
    empty = list(dict.fromkeys(path.resolve() for root in roots for path in find_empty(root)))
    if not paths:
        hint = f" ({len(empty)} folders are named like runs but are empty)" if empty else ""
        raise RunFolderError(f"there is no run in {', '.join(map(str, roots))}{hint}; give a folder that holds RECIPE/seed=S")
    runs = []
    for done, path in enumerate(paths):
        runs.append(load_run(path))
        if progress is not None:
            progress(done + 1, len(paths))
    text = page_of(runs, out, title=title or f"torchrex: {', '.join(root.resolve().name for root in roots)}", empty=empty)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, text.encode())
    except OSError as error:
        raise RunFolderError(f"cannot write {out} ({error}); choose another --out") from None
    return len(runs), sum(not _whole(run) for run in runs)


def page_of(runs: Sequence[LoadedRun], out: Path, *, title: str, empty: Sequence[Path] = ()) -> str:
    """The page as text. Links to run folders are relative to `out`."""
    details = {id(run): details_of(run, out) for run in runs}
    number = {id(run): k for k, run in enumerate(runs)}
    found = families(runs)
    parts = [f"<h1>{escape(title)}</h1>", _summary(runs, details, empty, out)]
    blobs = [(f"run-{number[id(run)]}", details[id(run)]) for run in runs]
    for k, family in enumerate(found):
        side_by_side = overlays(family, {key: each["charts"] for key, each in details.items()})
        blobs.append((f"family-{k}", {"charts": side_by_side, "shared": {}}))
        parts.append(_family(family, k, bool(side_by_side)))
    parts.append(_runs_table(runs, details))
    style = (HERE / "page.css").read_text()
    script = "\n".join((HERE / name).read_text() for name in ASSETS)
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    data = "\n".join(f'<script type="application/json" id="{name}">{_json(value)}</script>' for name, value in blobs)
    return (
        f'<!doctype html>{MARK}\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + f"\n</main>\n<footer>Written by torchrex {escape(torchrex.__version__)} from the run folders named above.</footer>\n"
        + f"{data}\n<script>{script}</script>\n</body></html>\n"
    )


def _json(value: Any) -> str:
    """JSON that cannot end the element it is in; JSON has < > & only inside strings, where the escape means the same."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _whole(run: LoadedRun) -> bool:
    return run.status == "finished" and not run.problems


def _summary(runs: Sequence[LoadedRun], details: dict[int, dict[str, Any]], empty: Sequence[Path], out: Path) -> str:
    finished = sum(run.status == "finished" for run in runs)
    seconds = [(run.result or {}).get("wall_seconds") for run in runs]
    hours = sum(each for each in seconds if isinstance(each, int | float)) / 3600
    time = f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"
    n_recipes = len({run.recipe for run in runs})
    facts = [(str(n), word if n == 1 else f"{word}s") for n, word in ((len(runs), "run"), (n_recipes, "recipe"))]
    facts += [(str(finished), "finished"), (str(len(runs) - finished), "not finished"), (time, "of computing")]
    tiles = "".join(f"<li><b>{escape(value)}</b> {escape(name)}</li>" for value, name in facts)
    lines = []
    for k, run in enumerate(runs):
        if _whole(run):
            continue
        words = list(run.problems) or [f"its status is {run.status!r}"]
        if isinstance((run.result or {}).get("error"), str):
            words.append(str((run.result or {})["error"]))
        inner = "".join(f"<li>{escape(word)}</li>" for word in words)
        lines.append(
            f'<li><a href="#runs" data-show="{k}">{escape(run.name)}</a> {_badge(run.status)}'
            f" in {escape(details[id(run)]['folder']['text'])}<ul>{inner}</ul></li>"
        )
    lines += [
        f"<li>{escape(path.parent.name)}/{escape(path.name)} {_badge('empty')}: it holds nothing of a run</li>" for path in empty
    ]
    trouble = ""
    if lines:
        opened = " open" if len(lines) <= 8 else ""
        trouble = (
            f'<details class="problems"{opened}><summary>{len(lines)} of {len(runs) + len(empty)} folders are not whole: what is '
            f"there is shown, tables use finished runs alone</summary><ul>{''.join(lines)}</ul></details>"
        )
    return (
        f'<section id="summary"><h2>Summary</h2><ul class="facts">{tiles}</ul>{trouble}'
        f"<noscript><p>Charts and the runs one by one need JavaScript; the tables do not.</p></noscript></section>"
    )


def _badge(status: str) -> str:
    kind = status if status in ("finished", "failed", "paused", "interrupted", "unfinished", "damaged", "empty") else "other"
    return f'<span class="badge {kind}">{escape(status)}</span>'


def _family(family: Family, k: int, has_charts: bool) -> str:
    chosen = columns(family)
    papers = {id(row): paper_of(row) for row in family.rows}
    stated = {metric for paper in papers.values() for metric in paper}
    notes = sorted({each.note for paper in papers.values() for each in paper.values() if each.note})
    head = ["recipe", "seeds"]
    for metric in chosen:
        head += [label(metric), *(["paper"] if metric in stated else [])]
    rows = []
    for row in family.rows:
        cells: list[Cell] = [(escape(row.label), row.label), (_seeds(row), len(row.finished))]
        for metric in chosen:
            text, value = cell(row, metric)
            cells.append((escape(text), value))
            if metric in stated:
                paper = papers[id(row)].get(metric)
                cells.append(("", None) if paper is None else (escape(paper.text), paper.value))
        swaps = [counts for run in row.finished if (counts := swaps_of(run)) is not None]
        made, tested = sum(a for a, _ in swaps), sum(p for _, p in swaps)
        cells.append((f"{made:,} of {tested:,}" if swaps else "", made if swaps else None))
        rows.append(cells)
    words = "Means over finished seeds; in brackets the standard error of the last digit."
    words += f" Paper: {'; '.join(notes)}." if notes else ""
    charts = f'<div class="charts" data-charts="family-{k}"></div>' if has_charts else ""
    return (
        f"<section><h2>{escape(family.name)}</h2>{_table([*head, 'swaps'], rows, text_columns=1)}"
        f'<p class="note">{escape(words)}</p>{charts}</section>'
    )


def _seeds(row: Row) -> str:
    finished, n = len(row.finished), len(row.runs)
    return str(n) if finished == n else f"{finished} of {n}"


def _runs_table(runs: Sequence[LoadedRun], details: dict[int, dict[str, Any]]) -> str:
    rows: list[list[Cell]] = []
    shown = set(_first_shown(runs))
    for k, run in enumerate(runs):
        result, folder = run.result or {}, details[id(run)]["folder"]
        counts, seconds = swaps_of(run), result.get("wall_seconds")
        rate = 100 * counts[0] / counts[1] if counts and counts[1] else None
        tick = " checked" if k in shown else ""
        date = result.get("date") if isinstance(result.get("date"), str) else ""
        known = isinstance(seconds, int | float)
        rows.append(
            [
                (f'<input type="checkbox" data-run="{k}" aria-label="show {escape(run.name)}"{tick}>', int(k in shown)),
                (escape(run.recipe), run.recipe),
                ("" if run.seed < 0 else str(run.seed), run.seed),
                (_badge(run.status) + (" !" if run.problems else ""), run.status),
                (f"{counts[0]:,}" if counts else "", counts[0] if counts else None),
                ("" if rate is None else f"{rate:.3g}", rate),
                (f"{seconds:,.1f}" if known else "", seconds if known else None),
                (escape(str(date)[:16].replace("T", " ")), date),
                (f'<a href="{escape(folder["href"])}">{escape(folder["text"])}</a>', folder["text"]),
            ]
        )
    head = ["show", "recipe", "seed", "status", "swaps", "accepted, %", "time, s", "date"]
    return (
        f'<section id="runs"><h2>Runs one by one</h2><p class="tools"><label>Filter <input type="search" id="filter"></label> '
        f'<button type="button" id="none">show none</button> <span id="shown" class="note"></span></p>'
        f'{_table([*head, "folder"], rows, text_columns=2, id_="all-runs")}<div id="panels" class="panels"></div></section>'
    )


def _first_shown(runs: Sequence[LoadedRun]) -> list[int]:
    """Two runs of different recipes that have swaps to look at, if there are."""
    with_swaps: dict[str, int] = {}
    for k, run in enumerate(runs):
        counts = swaps_of(run)
        if run.history is not None and counts and counts[0]:
            with_swaps.setdefault(run.recipe, k)
    return [*with_swaps.values(), *range(len(runs))][:FIRST_SHOWN] if len(runs) > 1 else [0]


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]], *, text_columns: int, id_: str = "") -> str:
    """A table whose heads sort it. The first columns are text, the others are numbers where they can be."""
    heads = "".join(f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}</button></th>' for name in head)
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
