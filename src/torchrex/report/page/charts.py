"""The charts of one run as plain data: what is drawn over what. The script on the page draws them.

A chart is a dict with `kind`, `title`, labels and `series`; a series has `name`, `type` (line,
step, dots, dotted, area, band), `x` (numbers, or the name of a list that several series share) and
`y`. Charts with the same `over` zoom together. Charts with the same `key` are drawn over each other
for all runs of a family: of those, `own` series are drawn for each, `reference` series once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor

from torchrex.diagnostics import History, over_chains
from torchrex.report.page.rows import Family
from torchrex.report.plots import (
    acceptance_over_time,
    calibration,
    least_of_averages,
    rung_name,
    running_mean,
    smoothing_window,
)
from torchrex.report.reader import LoadedRun
from torchrex.report.swap_checks import history_from_curves

MOST_VALUES = 6000  # rows times rungs
MOST_MARKS = 2000
NEAR_A_SWAP = 8  # rows on either side
SWAPS_IN_FULL = 40
DIGITS = 5
CURVES = {
    "probabilities_accuracy": "average of probabilities",
    "logits_accuracy": "average of logits",
    "pooled_probabilities_accuracy": "average, both rungs",
    "last_accuracy": "last draw alone",
}

Chart = dict[str, Any]


def charts_of(run: LoadedRun) -> tuple[list[Chart], dict[str, Any]]:
    """Everything that can be drawn of a run, and the lists that its series share."""
    shared: dict[str, Any] = {}
    history = run.history if run.history is not None else history_from_curves(run)
    charts = _of_history(run, history, shared) if history is not None else []
    return [*charts, *_against_truth(run), *_of_predictions(run), *_of_accuracy(run)], shared


def chart(kind: str, title: str, x: str, y: str, series: list[Chart], **more: Any) -> Chart:
    return {"kind": kind, "title": title, "xLabel": x, "yLabel": y, "series": series, **more}


def line(name: str, x: Any, y: Any, style: int, type_: str = "line", **more: Any) -> Chart:
    return {"name": name, "x": x, "y": y, "style": style, "type": type_, **more}


def _of_history(run: LoadedRun, history: History, shared: dict[str, Any]) -> list[Chart]:
    """Energies, paths, acceptance, noise and corrections. Curves of result.json are means over an
    epoch, or over the steps between two points, and have no paths.
    """
    averaged = run.history is None
    unit, scale = "step", 1
    if averaged and "epoch" in run.curves and run.settings is not None:
        unit, scale = "epoch", run.settings.steps_per_epoch
    rows = rows_to_keep(history)
    over = f"{unit}s"
    shared[over] = numbers(history.steps[rows] / scale)
    swaps = numbers(swaps_of(history)) if not averaged else run.curves.get(f"swap_{over}", [])
    made = (run.swap_counts or (0, 0))[0] if averaged else len(swaps)
    listed = f"the first {len(swaps):,} of {made:,}" if len(swaps) < made else f"{len(swaps):,}"
    evenly = torch.linspace(0, len(swaps) - 1, MOST_MARKS).long().tolist()
    some = swaps if len(swaps) <= MOST_MARKS else [swaps[k] for k in evenly]
    marks = {"x": some, "name": f"{listed} swaps"} if swaps else None
    notes = []
    if run.settings is not None and (n := run.settings.warm_start):
        notes.append(f"The first {n:,} steps descend by Adam, without noise and swaps.")
    if averaged:
        notes.append(f"Means from one {unit} shown to the next: swaps may come from steps between.")
    elif len(rows) < len(history.steps):
        notes.append(f"{len(rows):,} of {len(history.steps):,} recorded steps are on this page.")
    common: Chart = {"over": over, "note": " ".join(notes)}
    of = f" of chain 0 (of {history.n_chains})" if history.n_chains > 1 else ""
    n_rungs, n_pairs = history.n_rungs, history.n_pairs
    energy = history.energy[:, :, 0].double()
    window = smoothing_window(len(energy))
    series = []
    for rung in reversed(range(n_rungs)):
        name = rung_name(rung, n_rungs)
        faint: Chart = {"faint": True} if window > 1 else {}
        series.append(line(name, over, numbers(energy[rows, rung]), rung, **faint))
        if window > 1:
            mean = numbers(running_mean(energy[:, rung], window)[rows])
            series.append(line(f"{name}, mean of {window:,} rows", over, mean, rung))
    log = bool((energy > 0).all()) and float(energy.max() / energy.min()) > 20
    title, y = f"Energies per rung{of}", "energy (nats, summed)"
    charts = [chart("energy", title, unit, y, series, yLog=log, marks=marks, **common)]
    if n_pairs == 0:
        return charts
    if not averaged:
        rung_of = history.replica_at[rows, :, 0].long().argsort(dim=1)
        paths = enumerate(map(numbers, rung_of.T))
        series = [line(f"replica {k}", over, path, k, "step") for k, path in paths]
        title, y = f"Replicas over rungs{of}", "rung (0 is coldest)"
        charts.append(chart("paths", title, unit, y, series, marks=marks, whole=True, **common))
        charts.append(_acceptance(run, history))
    level, error = over_chains(history.noise_variance)
    series = []
    for pair in range(n_pairs):
        name, y_values = f"rungs {pair}–{pair + 1}", level[rows, pair]
        if history.n_chains > 1:
            series.append(band(f"{name} ± 2 se", over, y_values, error[rows, pair], pair))
        series.append(line(name, over, numbers(y_values), pair))
    title = "Noise variance σ² of one energy"
    charts.append(chart("sigma2", title, unit, "σ² (nats²)", series, **common))
    if history.correction is None:
        return charts
    for pair in range(min(n_pairs, 4)):
        difference = numbers(history.energy_difference[rows, pair, 0])
        threshold = numbers(history.correction[rows, pair, 0])
        series = [
            line("cold minus hot energy", over, difference, 4, "dots"),
            line("correction: above it a swap is certain", over, threshold, 0),
        ]
        title, y = f"Correction against threshold, rungs {pair}–{pair + 1}{of}", "energy (nats)"
        charts.append(chart("correction", title, unit, y, series, marks=marks, **common))
    return charts


def band(name: str, x: Any, mean: Tensor, error: Tensor, style: int, **more: Any) -> Chart:
    """Two standard errors on either side."""
    low, high = numbers(mean - 2 * error), numbers(mean + 2 * error)
    return line(name, x, [], style, "band", low=low, high=high, **more)


def _acceptance(run: LoadedRun, history: History) -> Chart:
    step, expected, observed = acceptance_over_time(history)
    first = 0 if run.settings is None else run.settings.swap_start
    if first and observed is not None:  # all tests come after it: so many more in each window
        observed = observed * (1 - first / history.n_steps)
    tested = bool(history.proposed.sum() > 0)
    series, x = [], numbers(step)
    for pair in range(history.n_pairs):
        name = f"rungs {pair}–{pair + 1}"
        for rates, words, style, kind in (
            (expected, "from the energies", 2 * pair, "line"),
            (observed if tested else None, "swaps made", 2 * pair + 1, "dots"),
        ):
            if rates is not None:
                seen = torch.where(step >= first, 100 * rates[:, pair], torch.nan)
                series.append(line(f"{name}, {words}", x, numbers(seen), style, kind))
    note = f"Swaps are tested from step {first:,} on." if first else ""
    note = note if tested else "No swap was tested: this is what the energies would have allowed."
    more = {"over": "steps", "note": note, "zero": True}
    return chart("acceptance", "Acceptance over time", "step", "acceptance (%)", series, **more)


def _against_truth(run: LoadedRun) -> list[Chart]:
    """The density of rung 0 and the distance to the truth, where that is known."""
    exact = None if run.settings is None else run.settings.exact_density()
    if exact is None:
        return []
    charts, trace = [], run.trace
    key = f"truth {' '.join(str(run.config.get(name)) for name in ('weights', 'means', 'stds'))}"
    if _fits(trace, "edges", "density") and trace["density"].shape[1] == len(trace["edges"]) - 1:
        edges = trace["edges"].double()
        middle = 0.5 * (edges[1:] + edges[:-1])
        x, ours = numbers(middle, 4), numbers(trace["density"].double().mean(0), 4)
        series = [
            line("truth", x, numbers(exact(middle), 4), 7, "area", reference=True),
            line("draws of rung 0", x, ours, 0, own=True),
        ]
        title = f"Density against the truth, {len(trace['density'])} chains together"
        y = "density (per unit of x)"
        charts.append(chart("density", title, "x", y, series, key=key, zero=True))
    if _fits(trace, "curve_steps", "w2") and len(trace["curve_steps"]) == len(trace["w2"]):
        mean, error = over_chains(trace["w2"])
        x = numbers(trace["curve_steps"])
        error = torch.minimum(error, (mean - 1e-9) / 2)  # the axis is logarithmic
        series = [
            band("± 2 se", x, mean, error, 0, own=True),
            line("W2", x, numbers(mean), 0, own=True),
        ]
        more = {"key": key, "xLog": True, "yLog": True}
        title = "W2 to the truth against steps"
        charts.append(chart("w2", title, "steps", "W2 (units of x)", series, **more))
    return charts


def _fits(trace: Mapping[str, Tensor], one: str, two: str) -> bool:
    known = one in trace and two in trace
    return known and trace[one].ndim == 1 and trace[two].ndim == 2 and len(trace[two]) > 0


def _of_predictions(run: LoadedRun) -> list[Chart]:
    """A reliability diagram, where the predictions of the test images and their labels are kept."""
    probabilities = run.trace.get("probabilities")
    if run.settings is None or probabilities is None or probabilities.ndim != 2:
        return []
    labels = run.settings.test_labels()
    if labels is None or len(probabilities) != len(labels):
        return []
    bins = calibration(probabilities, labels)
    x = numbers(100 * bins.confidence, 4)
    accuracy, error = 100 * bins.accuracy, 100 * bins.error
    series = [
        line("perfectly calibrated", [0, 100], [0, 100], 7, reference=True),
        band("± 2 se", x, accuracy, error, 0, own=True),
        line("predictions", x, numbers(accuracy, 4), 0, "dotted", own=True),
    ]
    note = f"{len(labels)} test images in 15 bins; bins of few images scatter."
    more = {"key": run.recipe.split("/")[0], "note": note, "yRange": [0, 100]}
    x_name = "probability of the predicted class (%)"
    return [chart("reliability", "Reliability diagram", x_name, "right (%)", series, **more)]


def _of_accuracy(run: LoadedRun) -> list[Chart]:
    curves = {name: run.curves[name] for name in CURVES if run.curves.get(name)}
    if not curves:
        return []
    headline = "logits_accuracy" if "logits_accuracy" in curves else "probabilities_accuracy"
    series = []
    for name, values in curves.items():
        y = numbers(100.0 * value for value in values if value is not None)
        own, style = name == headline, list(CURVES).index(name)
        series.append(line(CURVES[name], list(range(1, len(y) + 1)), y, style, own=own))
    same = ("data", "net", "epochs", "n_labelled", "steps")
    more: Chart = {"key": " ".join(str(run.config.get(name)) for name in same)}
    if (low := least_of_averages(curves)) is not None:
        more["yLow"] = number(100 * low)
    title, x = "Accuracy of the average against number of draws", "draws in the average"
    return [chart("accuracy", title, x, "test accuracy (%)", series, of=CURVES[headline], **more)]


def overlays(family: Family, charts: Mapping[int, Sequence[Chart]]) -> list[Chart]:
    """Charts of one kind and key with a line for each row: the mean over seeds where their x agree,
    else the first seed. `charts` are those of every run by `id`.
    """
    made: dict[tuple[str, str], Chart] = {}
    members: dict[tuple[str, str], list[str]] = {}
    for row in family.rows:
        own = [[each for each in charts[id(run)] if "key" in each] for run in row.drawn]
        for k, first in enumerate(next((each for each in own if each), [])):
            name = (first["kind"], first["key"])
            same = [c[k] for c in own if len(c) > k and c[k]["kind"] == first["kind"]]
            if name not in made:
                fixed = [each for each in first["series"] if each.get("reference")]
                made[name] = {**first, "series": fixed, "note": ""}
            overlay = made[name]
            if "yLow" in first:
                overlay["yLow"] = min(overlay.get("yLow", first["yLow"]), first["yLow"])
            members.setdefault(name, []).append(row.short)
            for j, each in enumerate(first["series"]):
                if each.get("own") and each["type"] != "band":
                    y, pooled = _mean([other["series"][j] for other in same])
                    if not pooled:
                        overlay["note"] = "Where the x of seeds differ, the first seed is drawn."
                    style = len(members[name]) - 1
                    overlay["series"].append({**each, "name": row.label, "y": y, "style": style})
    for name, overlay in made.items():
        title = overlay["title"]
        if overlay["kind"] == "accuracy":
            title = f"accuracy of the {overlay['of']} against number of draws"
        ends = zip(min(members[name]), max(members[name]), strict=False)
        common = "".join(a for a, _ in takewhile(lambda ab: ab[0] == ab[1], ends)).rstrip("-_ ")
        overlay["title"] = f"{common}: {title}" if common else title
    return [overlay for name, overlay in made.items() if len(members[name]) > 1]


def _mean(lines: list[Chart]) -> tuple[list[Any], bool]:
    """The mean of lines over the same x, and whether all of them are in it."""
    first = lines[0]
    alike = [x["y"] for x in lines if x["x"] == first["x"] and len(x["y"]) == len(first["y"])]
    points = zip(*alike, strict=True)
    mean = [None if None in values else number(statistics.fmean(values)) for values in points]
    return mean, len(alike) == len(lines)


# How a long run becomes small


def rows_to_keep(history: History, chain: int = 0) -> Tensor:
    """Indices of the recorded rows on the page, rising. Rows are chosen, never averaged: the lowest
    and highest energies of each stretch, and every row near the first swaps.
    """
    n, rungs = len(history.steps), history.n_rungs
    most = max(200, MOST_VALUES // rungs)
    if n <= most:
        return torch.arange(n)
    energy = history.energy[:, :, chain].double().nan_to_num()
    edges = torch.linspace(0, n, max(1, most // (2 * rungs)) + 1).long().tolist()
    kept = {0, n - 1}
    for begin, end in pairwise(edges):
        if end > begin:
            part = energy[begin:end]
            kept.update((begin + part.argmin(0)).tolist() + (begin + part.argmax(0)).tolist())
    for swap in swaps_of(history, chain)[:SWAPS_IN_FULL].tolist():
        row = int(torch.searchsorted(history.steps, swap))
        kept.update(range(max(0, row - NEAR_A_SWAP), min(n, row + NEAR_A_SWAP + 1)))
    return torch.tensor(sorted(kept))


def swaps_of(history: History, chain: int = 0) -> Tensor:
    """The steps at which one chain swapped; of draws none is known."""
    if history.swaps is None:
        return torch.zeros(0, dtype=torch.long)
    return history.swaps.step[history.swaps.chain == chain]


def numbers(values: Tensor | Iterable[Any], digits: int = DIGITS) -> list[float | int | None]:
    """For JSON: so many significant digits, and None for what is not finite."""
    each = values.tolist() if isinstance(values, Tensor) else values
    return [number(value, digits) for value in each]


def number(value: Any, digits: int = DIGITS) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if isinstance(value, int):
        return value
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
