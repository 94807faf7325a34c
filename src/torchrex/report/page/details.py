"""All that the page says of one run, as plain data for its script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from torchrex.diagnostics import (
    acceptance_from_energies,
    allowed_acceptance,
    observed_acceptance,
    round_trips,
)
from torchrex.errors import InvalidArgumentError
from torchrex.experiments.config import dumps
from torchrex.experiments.gan import GanConfig
from torchrex.report.doctor_evidence import last_quarter, settled_noise, while_swapping
from torchrex.report.page.charts import charts_of
from torchrex.report.page.command import command_to_repeat
from torchrex.report.page.overview import Row, label, metrics_of, paper_of, scale, shown
from torchrex.report.page.pictures import pictures_of
from torchrex.report.page.thin import number
from torchrex.report.runs import LoadedRun


def details_of(run: LoadedRun, page: Path) -> dict[str, Any]:
    """`page` is where the page will lie: the link to the run folder is relative to it."""
    charts, shared = charts_of(run)
    pictures, not_shown = pictures_of(run)
    command = command_to_repeat(run)
    result = run.result or {}
    about = {
        "date": result.get("date"),
        "wall time": f"{result['wall_seconds']:,.1f} s"
        if isinstance(result.get("wall_seconds"), int | float)
        else None,
        "device": result.get("device"),
        "versions": _versions(result.get("versions")),
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
    relative = os.path.relpath(folder.resolve(), page.resolve().parent)
    # "./" keeps a name such as javascript:... a path
    return {
        "href": "./" + quote(Path(relative).as_posix()) + "/",
        "text": Path(relative).as_posix(),
    }


def table(title: str, head: Sequence[str], rows: list[list[str]], note: str = "") -> dict[str, Any]:
    return {"title": title, "head": list(head), "rows": rows, "note": note}


def _versions(value: Any) -> str | None:
    return (
        ", ".join(f"{name} {each}" for name, each in value.items())
        if isinstance(value, dict)
        else None
    )


def _ladder(run: LoadedRun) -> dict[str, Any]:
    rows, settings = [], run.settings
    if run.ladder is not None and isinstance(settings, GanConfig) and settings.warm_start > 0:
        begins = settings.decay(settings.warm_start)
        pairs = zip(run.ladder.temperatures, run.ladder.lrs, strict=True)
        rows = [
            [str(rung), f"{tau:g}", f"{lr:.4g}", f"{lr * begins:.4g}"]
            for rung, (tau, lr) in enumerate(pairs)
        ]
        note = (
            f"Adam, which has no temperature, descends for {settings.warm_start:,} steps, and SGHMC samples after them. Learning "
            f"rates are those at the first step of each, on the scale of the summed energy."
        )
        return table(
            "Ladder", ("rung", "temperature", "learning rate of Adam", "of SGHMC"), rows, note
        )
    if run.ladder is not None:
        pairs = zip(run.ladder.temperatures, run.ladder.lrs, strict=True)
        rows = [
            [str(rung), f"{temperature:g}", f"{lr:.4g}"]
            for rung, (temperature, lr) in enumerate(pairs)
        ]
    return table(
        "Ladder",
        ("rung", "temperature", "learning rate"),
        rows,
        "At the first step, before annealing.",
    )


def _pairs(run: LoadedRun) -> dict[str, Any]:
    """Swaps of every pair with what the energies promise, and the noise that decides it."""
    head = (
        "rungs",
        "swaps made",
        "tested",
        "accepted, %",
        "from the energies, %",
        "σ², nats²",
        "noise s",
        "2Φ(−s/2), %",
    )
    history = run.history
    if history is None or not len(history.steps) or history.n_pairs == 0:
        return table("Swaps", head, [])
    observed = observed_acceptance(history)
    try:
        expected = acceptance_from_energies(while_swapping(run, history))
    except InvalidArgumentError:
        expected = None
    level, noise = settled_noise(last_quarter(while_swapping(run, history)))
    # One chain of a running mean tells no error.
    error = (
        level.error
        if run.draws is None or history.n_chains > 1
        else torch.full_like(level.error, torch.nan)
    )
    allowed = allowed_acceptance(noise)
    rows = []
    for pair in range(history.n_pairs):
        made, tested = int(history.accepted[pair].sum()), int(history.proposed[pair].sum())
        rows.append(
            [
                f"{pair}–{pair + 1}",
                f"{made:,}",
                f"{tested:,}",
                _with_error(100 * observed.value[pair], 100 * observed.error[pair])
                if tested
                else "",
                ""
                if expected is None
                else _with_error(100 * expected.value[pair], 100 * expected.error[pair]),
                _with_error(level.value[pair], error[pair]),
                f"{float(noise[pair]):.3g}",
                f"{100 * float(allowed[pair]):.3g}",
            ]
        )
    travel = round_trips(history)
    total, chains = int(travel.round_trips.sum()), history.n_chains
    trips = f"{'' if travel.exact else 'at least '}{total:,} round trips, all {history.n_rungs} replicas"
    trips += (
        f" of all {chains} chains together ({total / chains:,.3g} a chain)"
        if chains > 1
        else " together"
    )
    note = (
        f"In brackets the standard error of the last digit(s); σ², s and what it allows are those of the last quarter of the "
        f"run, as doctor tells them; {trips}."
    )
    return table("Swaps", head, rows, note)


def _metrics(run: LoadedRun) -> dict[str, Any]:
    metrics, paper = metrics_of(run), paper_of(Row(run.recipe, run.config, [run]))
    rows = []
    for name, value in metrics.items():
        if name.endswith("_se") and name[:-3] in metrics:
            continue
        error = metrics.get(f"{name}_se")
        text = shown(name, value * scale(name), None if error is None else error * scale(name))
        rows.append([label(name), text, paper[name].text if name in paper else ""])
    return table("Numbers", ("metric", "this run", "paper"), rows)


def _with_error(value: Tensor, error: Tensor) -> str:
    known = bool(torch.isfinite(error))
    return (
        ""
        if number(float(value), 8) is None
        else shown("", float(value), float(error) if known else None)
    )
