"""The page: one file, nothing loaded from anywhere, summary first.

Everything that comes from a run folder is text: escaped in the tables here, JSON without a `<` for
the script, which makes text nodes of it. And the page forbids the browser any script but its own,
by its hash, and any picture that is not in the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torchrex
from torchrex.durable import replace_file
from torchrex.errors import RunFolderError
from torchrex.report.page.advice import SECONDS, advice_for
from torchrex.report.page.details import details_of
from torchrex.report.page.families import family_section
from torchrex.report.page.heading import is_whole, summary
from torchrex.report.page.html import plural
from torchrex.report.page.overview import families, overlays
from torchrex.report.page.pictures import within_the_page
from torchrex.report.page.runs_table import runs_table
from torchrex.report.runs import LoadedRun, find_empty, find_runs, load_run

MARK = "<!-- torchrex report -->"
HERE = Path(__file__).parent
ASSETS = ("charts.js", "tables.js", "page.js")


class Written(NamedTuple):
    """What came on a page."""

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
    """Read all runs at or below `roots` and write the page. After `doctor_seconds` doctor is asked
    about no further run.
    """
    if out.is_dir():
        raise RunFolderError(
            f"--out {out} is a folder; give the file to write, such as {out / 'page.html'}"
        )
    if out.exists() and MARK.encode() not in out.read_bytes()[:200]:
        raise RunFolderError(
            f"--out {out} exists and is not a report of torchrex, so it is left alone; give another name"
        )
    paths = list(dict.fromkeys(path.resolve() for root in roots for path in find_runs(root)))
    # A folder that was asked for and holds no run is as empty as one that is named like a run.
    barren = [
        [root] if not find_runs(root) and not find_empty(root) else find_empty(root)
        for root in roots
    ]
    empty = list(dict.fromkeys(path.resolve() for each in barren for path in each))
    if not paths:
        of_runs = sum(len(find_empty(root)) for root in roots)
        words = f"{plural(of_runs, 'folder')} {'is' if of_runs == 1 else 'are'} named like a run but empty"
        hint = f" ({words})" if of_runs else ""
        raise RunFolderError(
            f"there is no run in {', '.join(map(str, roots))}{hint}; give a folder that holds RECIPE/seed=S"
        )
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
    return Written(len(runs), sum(not is_whole(run) for run in runs), len(empty))


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
    within_the_page([details[id(run)]["pictures"] for run in runs])
    number = {id(run): k for k, run in enumerate(runs)}
    parts = [f"<h1>{escape(title)}</h1>", summary(runs, details, empty, out)]
    blobs = [(f"run-{number[id(run)]}", details[id(run)]) for run in runs]
    for k, family in enumerate(families(runs, empty)):
        side_by_side = overlays(family, {key: each["charts"] for key, each in details.items()})
        blobs.append((f"family-{k}", {"charts": side_by_side, "shared": {}}))
        parts.append(family_section(family, k, bool(side_by_side)))
    parts.append(runs_table(runs, details, empty, out))
    style = (HERE / "page.css").read_text()
    script = "\n".join((HERE / name).read_text() for name in ASSETS)
    own = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:"  # pictures are in the page itself
    policy = f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"
    data = "\n".join(
        f'<script type="application/json" id="{name}">{_json(value)}</script>'
        for name, value in blobs
    )
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
    """JSON that cannot end the element it is in; JSON has < > & only inside strings, where the
    escape means the same.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
