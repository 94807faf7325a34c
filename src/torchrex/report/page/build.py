"""The page: one file that loads nothing, with the summary first.

Everything that comes from a run folder is text: escaped in the tables here, JSON without a `<` for
the script, which makes text nodes of it. The page forbids the browser any script but its own, by
its hash, and any picture that is not in the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torchrex
from torchrex.durable import replace_file
from torchrex.errors import RunFolderError
from torchrex.report import doctor
from torchrex.report.findings import several
from torchrex.report.page.charts import overlays
from torchrex.report.page.details import details_of, link_to, within_the_page
from torchrex.report.page.rows import Family, cell, columns, families, label, paper_of
from torchrex.report.reader import LoadedRun, find_empty, find_runs, load_run, recipe_in, seed_in

MARK = "<!-- torchrex report -->"
HERE = Path(__file__).parent
ASSETS = ("charts.js", "tables.js", "page.js")
STATUSES = ("finished", "paused", "interrupted", "failed", "unfinished", "damaged", "empty")
SECONDS = 8.0  # for doctor, all runs together; importing ArviZ takes half of it on a busy machine
NOT_ASKED = (
    "doctor was not asked, to keep this page quick; `torchrex doctor` with its folder says more"
)
OPEN = 8  # so many lines are shown without a click
FIRST_SHOWN = 2  # runs whose charts are open at the start
HEAD = (
    *("show", "recipe", "seed", "status", "doctor", "swaps", "accepted, %", "time, s", "date"),
    "folder",
)

Cell = tuple[str, Any]  # HTML, and what to sort by
# "verdict"; "quick": something was left out; "problems" and "warnings": how many, None if not
# known; "findings": severity, title, words
Advice = dict[str, Any]
Details = Mapping[int, Mapping[str, Any]]  # of every run, by `id`


class Written(NamedTuple):
    """What is on a page."""

    runs: int
    not_whole: int  # of those runs
    empty: int  # folders that hold nothing of a run


def write_page(
    roots: Sequence[Path],
    out: Path,
    *,
    title: str = "",
    doctor_seconds: float = SECONDS,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Read all runs at or below `roots` and write the page; doctor begins no run after
    `doctor_seconds`.
    """
    if out.is_dir():
        raise RunFolderError(f"--out {out} is a folder; give a file, such as {out / 'page.html'}")
    if out.exists() and MARK.encode() not in out.read_bytes()[:200]:
        raise RunFolderError(f"--out {out} is not a report of torchrex; give another name")
    paths = list(dict.fromkeys(path.resolve() for root in roots for path in find_runs(root)))
    named = [find_empty(root) for root in roots]
    if not paths:
        n = sum(map(len, named))
        hint = f" (run folders without a run: {n})" if n else ""
        asked = ", ".join(map(str, roots))
        raise RunFolderError(f"there is no run in {asked}{hint}; give a folder with RECIPE/seed=S")
    # A folder that was asked for and holds no run is empty too.
    found = [
        each or ([] if find_runs(root) else [root]) for root, each in zip(roots, named, strict=True)
    ]
    empty = list(dict.fromkeys(path.resolve() for each in found for path in each))
    runs = []
    for done, path in enumerate(paths):
        runs.append(load_run(path))
        if progress is not None:
            progress(done + 1, len(paths))
    title = title or f"torchrex: {', '.join(root.resolve().name for root in roots)}"
    text = page_of(runs, out, title=title, empty=empty, doctor_seconds=doctor_seconds)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, text.encode())
    except OSError as error:
        raise RunFolderError(f"cannot write {out} ({error}); choose another --out") from None
    return Written(len(runs), sum(not is_complete(run) for run in runs), len(empty))


def page_of(
    runs: Sequence[LoadedRun],
    out: Path,
    *,
    title: str,
    empty: Sequence[Path] = (),
    doctor_seconds: float = SECONDS,
) -> str:
    """The page as text. Links to run folders are relative to `out`."""
    advice = advice_for(runs, doctor_seconds)
    details = {id(run): {**details_of(run, out), "doctor": advice[id(run)]} for run in runs}
    within_the_page([each["pictures"] for each in details.values()])
    parts = [f"<h1>{escape(title)}</h1>", _summary(runs, details, empty, out)]
    data = {f"run-{k}": details[id(run)] for k, run in enumerate(runs)}
    for k, family in enumerate(families(runs, empty)):
        charts = overlays(family, {key: each["charts"] for key, each in details.items()})
        data[f"family-{k}"] = {"charts": charts, "shared": {}}
        parts.append(_family(family, k, bool(charts)))
    parts.append(_runs_table(runs, details, empty, out))
    style = (HERE / "page.css").read_text()
    script = "\n".join((HERE / name).read_text() for name in ASSETS)
    own = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:"
    policy = f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"
    blobs = "\n".join(
        f'<script type="application/json" id="{name}">{_json(value)}</script>'
        for name, value in data.items()
    )
    body, version = "\n".join(parts), escape(torchrex.__version__)
    return f"""<!doctype html>{MARK}
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style></head>
<body>
<main>
{body}
</main>
<footer>Written by torchrex {version} from the run folders named above.</footer>
{blobs}
<script>{script}</script>
</body></html>
"""


def _json(value: Any) -> str:
    """JSON that cannot end its element; < > & are only inside strings, where an escape means the
    same.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def is_complete(run: LoadedRun) -> bool:
    return run.status == "finished" and not run.problems


# What doctor says


def advice_for(runs: Sequence[LoadedRun], seconds: float = SECONDS) -> dict[int, Advice]:
    """By `id` of the run. Small runs come first, and none is begun after so many seconds."""
    found, until = {}, time.monotonic() + seconds
    for run in sorted(runs, key=lambda run: 0 if run.draws is None else run.draws.values.numel()):
        in_time = time.monotonic() < until
        quick = math.isfinite(seconds)
        found[id(run)] = advice_of(run, quick=quick) if in_time else unknown(NOT_ASKED)
    return found


def advice_of(run: LoadedRun, *, quick: bool = False) -> Advice:
    """All findings about one run, without what the page says of its files anyway."""
    try:
        diagnosis = doctor.diagnose(run, quick=quick)
    except Exception as error:  # whatever it is, the page goes on
        return unknown(f"doctor failed on this run ({type(error).__name__}: {error})")
    findings = [
        [each.severity, each.title, each.words]
        for each in diagnosis.findings
        if not each.words.startswith(tuple(run.problems))
    ]
    problems, warnings = len(diagnosis.of("problem")), len(diagnosis.of("warning"))
    about = {"verdict": diagnosis.verdict, "quick": diagnosis.quick, "findings": findings}
    return {**about, "problems": problems, "warnings": warnings}


def unknown(why: str) -> Advice:
    return {"verdict": why, "quick": False, "problems": None, "warnings": None, "findings": []}


# The top


def _summary(runs: Sequence[LoadedRun], details: Details, empty: Sequence[Path], out: Path) -> str:
    finished = sum(run.status == "finished" for run in runs)
    n_recipes = len({run.recipe for run in runs})
    facts: list[tuple[Any, str]] = [(len(runs), "run" if len(runs) == 1 else "runs")]
    facts += [(n_recipes, "recipe" if n_recipes == 1 else "recipes"), (finished, "finished")]
    facts += [(len(runs) - finished, "not finished"), *([(len(empty), "empty")] if empty else [])]
    facts += [(in_words(total_seconds(runs)), "of computing")]
    tiles = "".join(f"<li><b>{value}</b> {name}</li>" for value, name in facts)
    shared = ""
    if together := [group for group in groups(runs) if len(group) > 1]:
        n, among = sum(map(len, together)), several(len(together), "group")
        words = f"{n} runs trained together in {among}; the time of a group counts once."
        shared = f'<p class="note">{words}</p>'
    return (
        f'<section id="summary"><h2>Summary</h2><ul class="facts">{tiles}</ul>{shared}'
        f"{_incomplete(runs, details, empty, out)}{_doctor(runs, details)}"
        f"<noscript><p>Charts and the runs one by one need JavaScript.</p></noscript></section>"
    )


def _incomplete(
    runs: Sequence[LoadedRun], details: Details, empty: Sequence[Path], out: Path
) -> str:
    lines = []
    for k, run in enumerate(runs):
        if not is_complete(run):
            error = (run.result or {}).get("error")
            words = [
                *(run.problems or [f"its status is {run.status!r}"]),
                *([error] if error else []),
            ]
            inner = "".join(f"<li>{escape(word)}</li>" for word in words)
            folder = escape(details[id(run)]["folder"]["text"])
            lines.append(
                f'<li><a href="#runs" data-show="{k}">{escape(run.name)}</a> {badges(run)} in'
                f" {folder}<ul>{inner}</ul></li>"
            )
    for path in empty:
        name = f"{escape(link_to(path, out)['text'])} {badge('empty')}"
        lines.append(f"<li>{name} it holds nothing of a run</li>")
    if not lines:
        return ""
    opened = " open" if len(lines) <= OPEN else ""
    return (
        f'<details class="problems"{opened}><summary>Not complete: {len(lines)} of'
        f" {len(runs) + len(empty)} folders. Tables use finished runs alone.</summary>"
        f"<ul>{''.join(lines)}</ul></details>"
    )


def _doctor(runs: Sequence[LoadedRun], details: Details) -> str:
    """One line; the findings are with each run."""
    asked = [x for run in runs if (x := details[id(run)]["doctor"])["problems"] is not None]
    problems = sum(each["problems"] > 0 for each in asked)
    well = sum(each["problems"] == each["warnings"] == 0 for each in asked)
    counts = {"with problems": problems, "with warnings alone": len(asked) - problems - well}
    words = ", ".join(f"{n} {name}" for name, n in {**counts, "with neither": well}.items() if n)
    line = f"Doctor looked at {several(len(asked), 'run')}: {words}." if asked else ""
    if quick := sum(each["quick"] for each in asked):
        line += f" It took only a quick look at {quick}; `report --doctor all` takes a full one."
    if len(asked) < len(runs):
        line += f" It did not look at {len(runs) - len(asked)}; use `report --doctor all`."
    return f'<p class="note">{escape(line.strip())}</p>'


# Tables


def badge(status: str) -> str:
    return (
        f'<span class="badge {status if status in STATUSES else "other"}">{escape(status)}</span>'
    )


def badges(run: LoadedRun) -> str:
    """Its status, and that it is damaged where the status does not say so."""
    more = run.damaged and run.status != "damaged"
    return badge(run.status) + (f" {badge('damaged')}" if more else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]], id_: str = "") -> str:
    """A table whose heads sort it."""
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}</button></th>'
        for name in head
    )
    body = ""
    for row in rows:
        cells = ""
        for html, value in row:
            sort = "" if value is None else f' data-v="{escape(str(value))}"'
            cells += f"<td{sort}{' class=n' if isinstance(value, int | float) else ''}>{html}</td>"
        body += f"<tr>{cells}</tr>"
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="sortable" id="{id_}">{inner}</table></div>'


def _family(family: Family, k: int, has_charts: bool) -> str:
    """A row for every recipe, its numbers next to the paper's."""
    chosen = columns(family)
    papers = [paper_of(row.settings) for row in family.rows]
    stated = {metric for paper in papers for metric in paper}
    head = ["recipe", "seeds"]
    for metric in chosen:
        head += [label(metric), *(["paper"] if metric in stated else [])]
    rows = []
    for row, paper in zip(family.rows, papers, strict=True):
        cells: list[Cell] = [(escape(row.title), row.title), (row.seeds, len(row.finished))]
        for metric in chosen:
            text, value = cell(row, metric)
            cells.append((escape(text), value))
            if metric in stated:
                there = paper.get(metric)
                cells.append(("-", None) if there is None else (escape(there.text), there.value))
        swaps = [counts for run in row.finished if (counts := run.swap_counts) is not None]
        made, tested = sum(a for a, _ in swaps), sum(p for _, p in swaps)
        words = f"{made:,} of {tested:,}" if tested else "none tested"
        cells.append((words, made) if swaps else ("-", None))
        rows.append(cells)
    notes = sorted({each.note for paper in papers for each in paper.values() if each.note})
    words = (
        "Means over finished seeds; in brackets the standard error of the last digit(s), from the"
        " chains of the runs if known, else from the spread over seeds."
    )
    words += f" Paper: {'; '.join(notes)}." if notes else ""
    charts = f'<div class="charts" data-charts="family-{k}"></div>' if has_charts else ""
    return (
        f"<section><h2>{escape(family.name)}</h2>{_table([*head, 'swaps'], rows)}"
        f'<p class="note">{escape(words)}</p>{charts}</section>'
    )


def _runs_table(
    runs: Sequence[LoadedRun], details: Details, empty: Sequence[Path], out: Path
) -> str:
    """All runs and empty folders, from which a reader chooses what is shown below."""
    # At the start two runs of different recipes that have swaps to look at.
    swapping = {
        run.recipe: k
        for k, run in reversed(list(enumerate(runs)))
        if run.history is not None and (run.swap_counts or (0, 0))[0]
    }
    chosen = set(list(dict.fromkeys([*sorted(swapping.values()), *range(len(runs))]))[:FIRST_SHOWN])
    shared = {id(run): len(group) > 1 for group in groups(runs) for run in group}
    rows = [
        _row(k, run, details[id(run)], k in chosen, shared.get(id(run), False))
        for k, run in enumerate(runs)
    ]
    blank: Cell = ("", None)
    for path in empty:
        seed, recipe = seed_in(path), recipe_in(path)
        known: list[Cell] = [(escape(recipe), recipe), (str(seed), seed)]
        first = [blank, *(known if seed is not None else [blank, blank])]
        rows.append([*first, (badge("empty"), "empty"), *[blank] * 5, _link(link_to(path, out))])
    note = "* shared with the runs that trained with it" if any(shared.values()) else ""
    return (
        '<section id="runs"><h2>Runs one by one</h2><p class="tools">'
        '<label>Filter <input type="search" id="filter"></label> '
        '<button type="button" id="none">show none</button> <span id="shown" class="note"></span>'
        '</p><p id="no-match" class="note" hidden>No run matches the filter.</p>'
        f'{_table(HEAD, rows, "all-runs")}<p class="note">{note}</p>'
        '<div id="panels" class="panels"></div></section>'
    )


def _row(
    k: int, run: LoadedRun, details: Mapping[str, Any], shown: bool, shares: bool
) -> list[Cell]:
    counts, seconds, date = run.swap_counts, seconds_of(run), (run.result or {}).get("date", "")
    rate = 100 * counts[0] / counts[1] if counts and counts[1] else None
    problems, warnings = details["doctor"]["problems"], details["doctor"]["warnings"]
    advice: Cell = ("not asked", None)
    if problems is not None:
        found = [several(n, w) for n, w in ((problems, "problem"), (warnings, "warning")) if n]
        quick = " (quick look)" if details["doctor"]["quick"] else ""
        advice = ((", ".join(found) or "fine") + quick, 1000 * problems + warnings)
    checked = " checked" if shown else ""
    box = f'<input type="checkbox" data-run="{k}" aria-label="show {escape(run.name)}"{checked}>'
    odd = " !" if run.problems and not run.damaged and run.status == "finished" else ""
    return [
        (box, int(shown)),
        (escape(run.recipe), run.recipe),
        ("" if run.seed < 0 else str(run.seed), run.seed),
        (badges(run) + odd, run.status),
        advice,
        (f"{counts[0]:,}", counts[0]) if counts else ("", None),
        ("" if rate is None else f"{rate:.3g}", rate),
        ("" if seconds is None else f"{seconds:,.1f}{'*' if shares else ''}", seconds),
        (escape(date[:16].replace("T", " ")), date),
        _link(details["folder"]),
    ]


def _link(folder: Mapping[str, str]) -> Cell:
    """It may be broken into lines at its slashes."""
    text = escape(folder["text"]).replace("/", "/<wbr>")
    return f'<a href="{escape(folder["href"])}">{text}</a>', folder["text"]


# Whose time the seconds of a run are


def seconds_of(run: LoadedRun) -> float | None:
    seconds = (run.result or {}).get("wall_seconds")
    return None if seconds is None else float(seconds)


def groups(runs: Sequence[LoadedRun]) -> list[list[LoadedRun]]:
    """Runs with a known time, those that trained together as one group.

    A group has one clock, so all its runs have the same seconds to the last digit, on the same
    device, and ended less than that time apart.
    """
    clocks: dict[tuple[float, Any], list[list[LoadedRun]]] = {}
    for run in runs:
        if (seconds := seconds_of(run)) is not None:
            found = clocks.setdefault((seconds, (run.result or {}).get("device")), [])
            group = next((each for each in found if _together(each[0], run, seconds)), None)
            if group is None:
                found.append([run])
            else:
                group.append(run)
    return [group for each in clocks.values() for group in each]


def _together(one: LoadedRun, other: LoadedRun, seconds: float) -> bool:
    ends = [_end(run) for run in (one, other) if not _alone(run)]
    known = [end for end in ends if end is not None]
    return len(known) == 2 and abs(known[0] - known[1]) < max(seconds, 1.0)


def _alone(run: LoadedRun) -> bool:
    """Results say how many replicas ran together; the older ones of single runs do not."""
    if run.settings is None:
        return False
    if run.settings.batch_key(0) is None:
        return True
    told = (run.result or {}).get("replicas_side_by_side")
    return isinstance(told, int) and told <= run.settings.n_rungs


def _end(run: LoadedRun) -> float | None:
    try:
        end = datetime.fromisoformat(str((run.result or {}).get("date")))
    except ValueError:
        return None
    return (end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp()


def total_seconds(runs: Sequence[LoadedRun]) -> float:
    return sum(seconds_of(group[0]) or 0.0 for group in groups(runs))


def in_words(seconds: float) -> str:
    """`12 s`, `20.7 min`, `1.9 h`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
