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
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torchrex
from torchrex.durable import one_line, printable, replace_file, writing
from torchrex.errors import RunFolderError
from torchrex.report import doctor
from torchrex.report.findings import several, tally
from torchrex.report.page.charts import overlays
from torchrex.report.page.details import details_of, link_to, within_the_page
from torchrex.report.page.rows import Family, cell, columns, families, label, paper_of
from torchrex.report.reader import LoadedRun, NotRead, read_tree, recipe_in, require_ours
from torchrex.runs.folder import seed_in

MARK = "<!-- torchrex report -->"
HERE = Path(__file__).parent
ASSETS = ("charts.js", "tables.js", "page.js")
STATUSES = (
    *("finished", "paused", "interrupted", "failed", "unfinished", "damaged"),
    *("empty", "unreadable"),
)
SECONDS = 8.0  # for doctor, all runs together; importing ArviZ takes half of it on a busy machine
OPEN = 8  # so many lines are shown without a click
FIRST_SHOWN = 2  # runs whose charts are open at the start
HEAD = (
    *("show", "recipe", "seed", "status", "doctor"),
    *("swaps", "accepted, %", "time, s", "date", "folder"),
)
PAGE = """<!doctype html>{mark}
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style></head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<footer>Written by torchrex {version} from the run folders named above.</footer>
{data}
<script>{script}</script>
</body></html>
"""

Runs = Sequence[LoadedRun]
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
    unreadable: int  # folders that cannot be read


def write_page(
    roots: Sequence[Path], out: Path, *, title: str = "", doctor_seconds: float = SECONDS
) -> Written:
    """Read all runs at or below `roots` and write the page; doctor begins no run after
    `doctor_seconds`.
    """
    if os.path.isdir(out):
        raise RunFolderError(f"--out {out} is a folder; give a file, such as {out / 'page.html'}")
    require_ours(out, [MARK], "report", within=200)
    places = [Path(os.path.realpath(root)) for root in roots]
    found: dict[Path, LoadedRun | NotRead] = {}
    for place in places:
        nothing = NotRead(place, "empty", "it holds nothing of a run")
        for each in list(read_tree(place)) or [nothing]:
            found.setdefault(each.path, each)
    loaded = [each for each in found.values() if isinstance(each, LoadedRun)]
    others = [each for each in found.values() if isinstance(each, NotRead)]
    if not loaded:
        others.sort(key=lambda each: each.status != "unreadable")
        first = [f" (such as {each.path}: {each.words})" for each in others]
        named = f"there is no run in {', '.join(map(str, roots))}{''.join(first[:1])}"
        raise RunFolderError(f"{one_line(named)}; give a folder with RECIPE/seed=S")
    title = printable(title or f"torchrex: {', '.join(place.name for place in places)}")
    text = page_of(loaded, out, title=title, others=others, doctor_seconds=doctor_seconds)
    with writing(out, RunFolderError, "choose another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, text.encode())
    statuses = Counter(each.status for each in others)
    not_whole = sum(not is_complete(run) for run in loaded)
    return Written(len(loaded), not_whole, statuses["empty"], statuses["unreadable"])


def page_of(
    runs: Runs,
    out: Path,
    *,
    title: str,
    others: Sequence[NotRead] = (),
    doctor_seconds: float = SECONDS,
) -> str:
    """The page as text. Links to run folders are relative to `out`."""
    advice = advice_for(runs, doctor_seconds)
    details = {id(run): {**details_of(run, out), "doctor": advice[id(run)]} for run in runs}
    within_the_page([each["pictures"] for each in details.values()])
    parts = [_summary(runs, details, others, out)]
    data = {f"run-{k}": details[id(run)] for k, run in enumerate(runs)}
    for k, family in enumerate(families(runs, others)):
        charts = overlays(family, {key: each["charts"] for key, each in details.items()})
        data[f"family-{k}"] = {"charts": charts, "shared": {}}
        parts.append(_family(family, k, bool(charts)))
    parts.append(_runs_table(runs, details, others, out))
    style = (HERE / "page.css").read_text()
    script = "\n".join((HERE / name).read_text() for name in ASSETS)
    own = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:"
    blobs = [
        f'<script type="application/json" id="{name}">{_json(value)}</script>'
        for name, value in data.items()
    ]
    return PAGE.format(
        mark=MARK,
        policy=f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'",
        title=escape(title),
        style=style,
        body="\n".join(parts),
        version=escape(torchrex.__version__),
        data="\n".join(blobs),
        script=script,
    )


def _json(value: Any) -> str:
    """JSON that cannot end its element: < > & are only inside strings."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def is_complete(run: LoadedRun) -> bool:
    return run.status == "finished" and not run.problems


# What doctor says


def advice_for(runs: Runs, seconds: float = SECONDS) -> dict[int, Advice]:
    """By `id` of the run. Small runs come first, and none is begun after so many seconds."""
    found, until = {}, time.monotonic() + seconds
    for run in sorted(runs, key=lambda run: 0 if run.draws is None else run.draws.values.numel()):
        if time.monotonic() < until:
            found[id(run)] = advice_of(run, quick=math.isfinite(seconds))
        else:
            words = "doctor was not asked, to keep this page quick; use `report --doctor all`"
            found[id(run)] = unknown(words)
    return found


def advice_of(run: LoadedRun, *, quick: bool = False) -> Advice:
    """All findings about one run, without what the page says of its files anyway."""
    try:
        diagnosis = doctor.diagnose(run, quick=quick)
    except Exception as error:  # whatever it is, the page goes on
        return unknown(f"doctor failed on this run ({type(error).__name__}: {error})")
    new = [each for each in diagnosis.findings if not each.words.startswith(run.problems)]
    return {
        "verdict": diagnosis.verdict,
        "quick": diagnosis.quick,
        "findings": [[each.severity, each.title, each.words] for each in new],
        "problems": len(diagnosis.of("problem")),
        "warnings": len(diagnosis.of("warning")),
    }


def unknown(why: str) -> Advice:
    return {"verdict": why, "quick": False, "problems": None, "warnings": None, "findings": []}


# The top


def _summary(runs: Runs, details: Details, others: Sequence[NotRead], out: Path) -> str:
    n, finished = len(runs), sum(run.status == "finished" for run in runs)
    n_recipes = len({run.recipe for run in runs})
    facts: dict[str, Any] = {
        "run" if n == 1 else "runs": n,
        "recipe" if n_recipes == 1 else "recipes": n_recipes,
        "finished": finished,
        "not finished": n - finished,
        **Counter(each.status for each in others),
        "of computing (runs that train together count once)": in_words(total_seconds(runs)),
    }
    tiles = "".join(f"<li><b>{value}</b> {name}</li>" for name, value in facts.items())
    lines = []
    for k, run in enumerate(runs):
        if not is_complete(run):
            error = (run.result or {}).get("error")
            words = [*(run.problems or [f"its status is {run.status!r}"]), error or ""]
            inner = "".join(f"<li>{escape(each)}</li>" for each in words if each)
            link = f'<a href="#runs" data-show="{k}">{escape(run.name)}</a>'
            folder = escape(details[id(run)]["folder"]["text"])
            lines.append(f"<li>{link} {badges(run)} in {folder}<ul>{inner}</ul></li>")
    for each in others:
        name = escape(link_to(each.path, out)["text"])
        lines.append(f"<li>{name} {badge(each.status)} {escape(each.words)}</li>")
    listed, opened = "", " open" if len(lines) <= OPEN else ""
    if lines:
        head = f"Not complete: {len(lines)} of {n + len(others)} folders; tables use finished runs."
        listed = f'<details class="problems"{opened}><summary>{head}</summary>'
        listed += f"<ul>{''.join(lines)}</ul></details>"
    return (
        f'<section id="summary"><h2>Summary</h2><ul class="facts">{tiles}</ul>{listed}'
        f'<p class="note">{escape(_doctor(runs, details))}</p>'
        f"<noscript><p>Charts and the runs one by one need JavaScript.</p></noscript></section>"
    )


def _doctor(runs: Runs, details: Details) -> str:
    """One line; the findings are with each run."""
    asked = [x for run in runs if (x := details[id(run)]["doctor"])["problems"] is not None]
    line = f"Doctor looked at {several(len(asked), 'run')}: " if asked else ""
    line += tally([(each["problems"], each["warnings"]) for each in asked]) + "." * bool(asked)
    if quick := sum(each["quick"] for each in asked):
        line += f" It took only a quick look at {quick}; `report --doctor all` takes a full one."
    if len(asked) < len(runs):
        line += f" It did not look at {len(runs) - len(asked)}; use `report --doctor all`."
    return line.strip()


# Tables


def badge(status: str) -> str:
    kind = status if status in STATUSES else "other"
    return f'<span class="badge {kind}">{escape(status)}</span>'


def badges(run: LoadedRun) -> str:
    """Its status, and that it is damaged where the status does not say so."""
    more = run.damaged and run.status != "damaged"
    return badge(run.status) + (f" {badge('damaged')}" if more else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]], id_: str = "") -> str:
    """A table whose heads sort it."""
    button = '<th scope="col" aria-sort="none"><button type="button">{}</button></th>'
    heads = "".join(button.format(escape(name)) for name in head)
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
        cells: list[Cell] = [(row.title, row.title), (row.seeds, len(row.finished))]
        for metric in chosen:
            cells.append(cell(row, metric))
            if metric in stated:
                cells.append(paper.get(metric, ("-", None)))
        swaps = [counts for run in row.finished if (counts := run.swap_counts) is not None]
        made, tested = sum(a for a, _ in swaps), sum(p for _, p in swaps)
        words = f"{made:,} of {tested:,}" if tested else "none tested"
        cells.append((words, made) if swaps else ("-", None))
        rows.append([(escape(text), value) for text, value in cells])
    settings = [row.settings for row in family.rows if row.settings is not None]
    notes = sorted({each.paper_note for each in settings if each.paper_numbers} - {""})
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


def _runs_table(runs: Runs, details: Details, others: Sequence[NotRead], out: Path) -> str:
    """All runs and other folders, from which a reader chooses what is shown below."""
    first: dict[str, int] = {}  # at the start runs of different recipes that have swaps
    for k, run in enumerate(runs):
        if run.history is not None and (run.swap_counts or (0, 0))[0]:
            first.setdefault(run.recipe, k)
    chosen = list(dict.fromkeys([*first.values(), *range(len(runs))]))[:FIRST_SHOWN]
    clocks = Counter(map(clock, runs))
    rows = []
    for k, run in enumerate(runs):
        rows.append(_row(k, run, details[id(run)], k in chosen, clocks[clock(run)] > 1))
    blank: Cell = ("", None)
    for path, status, _ in others:
        name: list[Cell] = [blank, blank]
        if (seed := seed_in(path)) is not None:
            recipe = printable(recipe_in(path))
            name = [(escape(recipe), recipe), (str(seed), seed)]
        shown: Cell = (badge(status), status)
        rows.append([blank, *name, shown, *[blank] * 5, _link(link_to(path, out))])
    return (
        '<section id="runs"><h2>Runs one by one</h2><p class="tools">'
        '<label>Filter <input type="search" id="filter"></label> '
        '<button type="button" id="none">show none</button> <span id="shown" class="note"></span>'
        '</p><p id="no-match" class="note" hidden>No run matches the filter.</p>'
        f'{_table(HEAD, rows, "all-runs")}<p class="note">* shared with runs that trained with it'
        '</p><div id="panels" class="panels"></div></section>'
    )


def _row(
    k: int, run: LoadedRun, details: Mapping[str, Any], shown: bool, shares: bool
) -> list[Cell]:
    counts, seconds, date = run.swap_counts, clock(run)[0], (run.result or {}).get("date", "")
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


# Time


def clock(run: LoadedRun) -> tuple[float | None, str]:
    """Runs that trained together have one clock: the same seconds to the last digit."""
    result, settings, alone = run.result or {}, run.settings, False
    seconds = result.get("wall_seconds")
    if settings is not None:
        replicas = result.get("replicas_side_by_side", settings.n_rungs + 1)
        alone = settings.batch_key(0) is None or replicas <= settings.n_rungs
    return seconds, str(run.path) if alone or seconds is None else str(result.get("device"))


def total_seconds(runs: Runs) -> float:
    return sum(seconds or 0.0 for seconds, _ in set(map(clock, runs)))


def in_words(seconds: float) -> str:
    """`12 s`, `20.7 min`, `1.9 h`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
