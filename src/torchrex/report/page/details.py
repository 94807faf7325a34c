"""All that the page says of one run, as plain data: tables, pictures, the command."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from torchrex.checkpoint import printable, read_file
from torchrex.diagnostics import (
    acceptance_from_energies,
    allowed_acceptance,
    observed_acceptance,
    round_trips,
)
from torchrex.errors import InvalidArgumentError
from torchrex.report.page.charts import charts_of
from torchrex.report.page.rows import label, paper_of, scale, shown
from torchrex.report.reader import LoadedRun, command_to_repeat
from torchrex.report.swap_checks import last_quarter, settled_noise, while_swapping
from torchrex.runs.config import dumps

SAMPLES = "samples.png"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
LARGEST = 2**20  # bytes of a picture: a grid of 100 images of 32 x 32 pixels has a third of it
MOST_PIXELS = 2**22
MOST_TOGETHER = 2**23  # bytes of all pictures of a page
SMALL = 400  # pixels of width up to which a picture is enlarged, by integers

Picture = dict[str, Any]  # "title", "note", "width" on the page, "src" if it fits on the page


def details_of(run: LoadedRun, page: Path) -> dict[str, Any]:
    """`page` is the file that is written: the link to the run folder is relative to it."""
    charts, shared = charts_of(run)
    pictures, not_shown = pictures_of(run)
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
    return {
        "name": run.name,
        "status": run.status,
        "damaged": list(run.damaged),
        "problems": [*run.problems, *filter(None, [not_shown])],
        "folder": link_to(run.path, page),
        "command": command.line,
        "note": command.note,
        "config": dumps(run.config) if run.config else "",
        "about": [[name, str(value)] for name, value in about.items() if value is not None],
        "tables": [table for table in (_ladder(run), _pairs(run), _metrics(run)) if table["rows"]],
        "pictures": pictures,
        "charts": charts,
        "shared": shared,
    }


def link_to(folder: Path, page: Path) -> dict[str, str]:
    """A relative address, so that page and runs can be moved together, and the words to show."""
    text = os.path.relpath(os.path.realpath(folder), os.path.dirname(os.path.realpath(page)))
    address = quote(os.fsencode(text))
    return {"href": f"./{address}/", "text": printable(text)}  # "./" keeps javascript:... a path


def table(title: str, head: Sequence[str], rows: list[list[str]], note: str = "") -> dict[str, Any]:
    return {"title": title, "head": list(head), "rows": rows, "note": note}


def _ladder(run: LoadedRun) -> dict[str, Any]:
    head, note = ["rung", "temperature", "learning rate"], "At the first step, before annealing."
    if run.ladder is None:
        return table("Ladder", head, [])
    pairs = zip(run.ladder.temperatures, run.ladder.lrs, strict=True)
    rows = [[str(rung), f"{tau:g}", f"{lr:.4g}"] for rung, (tau, lr) in enumerate(pairs)]
    warm_start = 0 if run.settings is None else run.settings.warm_start
    if warm_start and run.ladder.decay is not None:
        begins = float(run.ladder.decay(warm_start))
        head = ["rung", "temperature", "learning rate of Adam", "of SGHMC"]
        rows = [[*row, f"{lr * begins:.4g}"] for row, lr in zip(rows, run.ladder.lrs, strict=True)]
        note = (
            f"Adam, which has no temperature, descends for {warm_start:,} steps before SGHMC. Rates"
            f" are those at the first step of each, for the summed energy."
        )
    return table("Ladder", head, rows, note)


def _pairs(run: LoadedRun) -> dict[str, Any]:
    """Swaps of every pair with what the energies promise, and the noise that decides it."""
    head = (
        *("rungs", "swaps made", "tested", "accepted, %", "from the energies, %"),
        *("σ², nats²", "noise s", "2Φ(−s/2), %"),
    )
    history = run.history
    if history is None or not len(history.steps) or history.n_pairs == 0:
        return table("Swaps", head, [])
    observed, swapping = observed_acceptance(history), while_swapping(run, history)
    try:
        expected = acceptance_from_energies(swapping)
    except InvalidArgumentError:
        expected = None
    level, noise = settled_noise(last_quarter(swapping))
    # One chain of a running mean has no known error.
    known = run.draws is None or history.n_chains > 1
    rows = []
    for pair in range(history.n_pairs):
        made, tested = int(history.accepted[pair].sum()), int(history.proposed[pair].sum())
        error = level.error[pair] if known else torch.tensor(torch.nan)
        rates = [_percent(each, pair) if each is not None else "" for each in (observed, expected)]
        rates[0] = rates[0] if tested else ""
        sigma2, s = _with_error(level.value[pair], error), f"{float(noise[pair]):.3g}"
        allowed = f"{100 * float(allowed_acceptance(noise)[pair]):.3g}"
        rungs = f"{pair}–{pair + 1}"
        rows.append([rungs, f"{made:,}", f"{tested:,}", *rates, sigma2, s, allowed])
    travel = round_trips(history)
    total, chains = int(travel.round_trips.sum()), history.n_chains
    trips = f"{total:,} round trips, all {history.n_rungs} replicas"
    trips = trips if travel.exact else f"at least {trips}"
    if chains > 1:
        trips += f" of all {chains} chains together ({total / chains:,.3g} a chain)"
    note = (
        "In brackets the standard error of the last digit(s); σ², s and what it allows are those of"
        f" the last quarter of the run; {trips}."
    )
    return table("Swaps", head, rows, note)


def _percent(estimate: Any, pair: int) -> str:
    return _with_error(100 * estimate.value[pair], 100 * estimate.error[pair])


def _with_error(value: Tensor, error: Tensor) -> str:
    if not bool(torch.isfinite(value)):
        return ""
    return shown(float(value), float(error) if bool(torch.isfinite(error)) else None)


def _metrics(run: LoadedRun) -> dict[str, Any]:
    metrics, paper = run.numbers, paper_of(run.settings)
    rows = []
    for name, value in metrics.items():
        if not (name.endswith("_se") and name[:-3] in metrics):
            error = metrics.get(f"{name}_se")
            text = shown(value * scale(name), None if error is None else error * scale(name))
            rows.append([label(name), text, paper[name][0] if name in paper else ""])
    return table("Numbers", ("metric", "this run", "paper"), rows)


# Pictures


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
