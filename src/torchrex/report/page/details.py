"""All that the page says of one run: findings, numbers, pictures, and how to repeat it."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torchrex.checkpoint import read_file
from torchrex.report.findings import number, several, value_and_error
from torchrex.report.page.ladder import Pooled
from torchrex.report.page.markup import badge, badges, items, link_to, plain_table
from torchrex.report.page.rows import label, paper_of, scale, shown
from torchrex.report.reader import LoadedRun, command_to_repeat
from torchrex.runs.config import dumps
from torchrex.runs.folder import NO_FOLDER

SAMPLES = "samples.png"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
LARGEST = 2**20  # bytes of a picture: a grid of 100 images of 32 x 32 pixels has a third of it
MOST_PIXELS = 2**22
MOST_TOGETHER = 2**21  # bytes of all pictures of a page
SMALL = 400  # pixels of width up to which a picture is enlarged, by integers

Picture = dict[str, Any]  # "title", "note", "width" on the page, "src" if it fits on the page


def details_of(
    run: LoadedRun,
    k: int,
    out: Path,
    advice: Mapping[str, Any],
    pictures: Sequence[Picture],
    why: str,
) -> str:
    """A run as an element that opens. Links are relative to `out`; `why` a picture is missing."""
    command, result = command_to_repeat(run), run.result or {}
    seconds, versions = result.get("wall_seconds"), result.get("versions")
    about = {
        "date": result.get("date"),
        "wall time": None if seconds is None else f"{seconds:,.1f} s",
        "device": result.get("device"),
        "versions": versions and ", ".join(f"{name} {each}" for name, each in versions.items()),
        "steps done": result.get("steps_done"),
        "error": result.get("error"),
    }
    problems = items([*run.problems, why])
    parts = [f'<div class="problems">{problems}</div>' * bool(run.problems or why)]
    parts += [_findings(advice), _metrics(run), _ladder(run), *map(_picture, pictures)]
    if command.line:
        parts.append(f'<h4>To repeat it</h4><pre class="command">{escape(command.line)}</pre>')
    if command.note:
        parts.append(f'<p class="note">{escape(command.note)}</p>')
    if run.config:
        config = escape(dumps(run.config))
        parts.append(f"<details><summary>config.json</summary><pre>{config}</pre></details>")
    known = [f"{name}: {escape(str(x))}" for name, x in about.items() if x is not None]
    if run.path != NO_FOLDER.path:  # not draws in memory
        known.insert(0, f"Folder: {link_to(run.path, out)[0]}")
    parts.append(f'<p class="note">{" · ".join(known)}</p>' * bool(known))
    counts = run.swap_counts
    facts = (advice["verdict"], counts and f"{counts[0]:,} swaps", about["wall time"])
    said = escape(" · ".join(each for each in facts if each))
    head = f"{escape(run.name)} {badges(run)} <span class=note>{said}</span>"
    # A link to an id within a closed element opens it.
    return (
        f'<details class="run"><summary>{head}</summary><div id="run-{k}">{"".join(parts)}</div>'
        "</details>"
    )


def _findings(advice: Mapping[str, Any]) -> str:
    """Problems and warnings are open, what is fine is folded."""
    graver = [each for each in advice["findings"] if each[0] in ("problem", "warning")]
    rest = [each for each in advice["findings"] if each not in graver]

    def listed(findings: Sequence[Sequence[str]]) -> str:
        each = (f"<li>{badge(s)} <b>{escape(t)}.</b> {escape(w)}</li>" for s, t, w in findings)
        return f"<ul>{''.join(each)}</ul>"

    made = (
        '<p class="note quick">Only a quick look: a full one may find more.</p>' * advice["quick"]
    )
    verdict = advice["verdict"]
    made += listed(graver) if graver else f"<p>{escape(verdict[:1].upper() + verdict[1:])}.</p>"
    if rest:
        fine = sum(each[0] == "fine" for each in rest)
        notes = [f"{fine} fine"] * bool(fine)
        notes += [several(len(rest) - fine, "note")] * (len(rest) > fine)
        made += f"<details><summary>{', '.join(notes)}</summary>{listed(rest)}</details>"
    return f'<div class="doctor">{made}</div>'


def _ladder(run: LoadedRun) -> str:
    head, note = ["rung", "temperature", "learning rate"], "At the first step, before annealing."
    if run.ladder is None:
        return ""
    note *= run.ladder.anneal is not None or run.ladder.decay is not None
    pairs = zip(run.ladder.temperatures, run.ladder.lrs, strict=True)
    rows = [[str(rung), f"{tau:g}", f"{lr:.4g}"] for rung, (tau, lr) in enumerate(pairs)]
    warm_start = 0 if run.settings is None else run.settings.warm_start
    if warm_start and run.ladder.decay is not None:
        begins = float(run.ladder.decay(warm_start))
        head = ["rung", "temperature", "learning rate of Adam", "of SGHMC"]
        rows = [[*row, f"{lr * begins:.4g}"] for row, lr in zip(rows, run.ladder.lrs, strict=True)]
        note = f"Adam, which has no temperature, descends for {warm_start:,} steps before SGHMC."
        note += " Rates are those at the first step of each, for the summed energy."
    return plain_table("Ladder", head, rows, note)


def swaps_of(ladder: Pooled) -> str:
    """Swaps of every pair with what the energies promise, and the noise that decides it."""
    head = (
        *("rungs", "swaps made", "tested", "accepted, %", "from the energies, %"),
        *("σ², nats²", "noise s", "2Φ(−s/2), %"),
    )
    rows = []
    for pair in ladder.pairs:
        rates = [value_and_error(100 * v, 100 * e) if v == v else "" for v, e in pair[1:3]]
        counts, sigma2 = [f"{pair.accepted:,}", f"{pair.proposed:,}"], pair.noise_variance
        noise = [shown(*sigma2), number(pair.noise, 3), number(100 * pair.allowed, 3)]
        rows.append([pair.name, *counts, *rates, *noise])
    note = (
        "In brackets the standard error of the last digit(s); s and what it allows between equal"
        f" energies are those of the last quarter of the run, as σ² is. Together: {ladder.words}."
    )
    if not ladder.history.noise_variance.any():
        note += " The energies have no noise: σ² is 0 in all recorded rows and is not drawn."
    return plain_table("Swaps", head, rows, note)


def _metrics(run: LoadedRun) -> str:
    metrics, paper = run.numbers, paper_of(run.settings)
    rows = []
    for name, value in metrics.items():
        if not (name.endswith("_se") and name[:-3] in metrics):
            error = metrics.get(f"{name}_se")
            text = shown(value * scale(name), None if error is None else error * scale(name))
            rows.append([label(name), text, paper[name][0] if name in paper else ""])
    there = 3 if any(row[2] for row in rows) else 2
    head = ("metric", "this run", "paper")[:there]
    return plain_table("Numbers", head, [row[:there] for row in rows], "")


# Pictures


def _picture(picture: Picture) -> str:
    note = escape(picture["note"])
    made = f"<h4>{escape(picture['title'])}</h4>"
    if "src" in picture:
        made += (
            f'<img class="samples" src="{picture["src"]}" width="{picture["width"]}" alt="{note}">'
        )
    return f'{made}<p class="note">{note}</p>'


def pictures_of(run: LoadedRun) -> tuple[list[Picture], str]:
    """The pictures of a run, and what is wrong with one that is not shown.

    Anybody may have put anything into a run folder: a picture is a complete PNG of moderate size.
    """
    path = run.path / SAMPLES
    try:
        data = read_file(path, LARGEST)
        width, _ = size_of(data)
    except FileNotFoundError:
        return [], ""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return [], f"{SAMPLES} is not shown: {why}"
    picture = {
        "title": "What the generators make",
        "note": "" if run.settings is None else run.settings.picture_note,
        "width": width * max(1, SMALL // width),
        "src": f"data:image/png;base64,{base64.b64encode(data).decode()}",
    }
    return [picture], ""


def within_the_page(pictures: list[list[Picture]]) -> None:
    """Take what is too much for a page out of the pictures of its runs; the first are kept."""
    left = MOST_TOGETHER
    for picture in (each for of_run in pictures for each in of_run):
        left -= len(picture["src"])
        if left < 0:
            del picture["src"]
            picture["note"] += f" There are too many for this page: see {SAMPLES} in the folder."


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG file; ValueError if it is none, or cut short, or too large."""
    if not data.startswith(SIGNATURE) or data[12:16] != b"IHDR":
        raise ValueError("it is no PNG file")
    if data[-8:-4] != b"IEND":
        raise ValueError("it is cut short")
    width, height = struct.unpack(">II", data[16:24])
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"it has {width:,} x {height:,} pixels")
    return width, height
