"""The charts of one run as plain data: what is drawn over what, in which units. The script on the
page draws them.

A chart is a dict with `kind`, `title`, labels and `series`; a series has `name`, `type` (line,
step, dots, area, band), `x` (numbers, or the name of a list that several series share) and `y`.
Charts with the same `over` zoom together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrex.diagnostics import over_chains
from torchrex.errors import MissingDependencyError
from torchrex.experiments.digits import DigitsConfig, digits
from torchrex.experiments.gan import GanConfig
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.report.doctor_evidence import first_test
from torchrex.report.page.thin import few_marks, number, numbers, rows_to_keep, swaps_of
from torchrex.report.plots import rung_name
from torchrex.report.runs import LoadedRun, swap_counts
from torchrex.report.series import (
    acceptance_over_time,
    calibration,
    least_of_averages,
    noise_over_time,
    running_mean,
    smoothing_window,
)

Chart = dict[str, Any]


def charts_of(run: LoadedRun) -> tuple[list[Chart], dict[str, Any]]:
    """Everything that can be drawn of a run, and the lists that its series share."""
    shared: dict[str, Any] = {}
    charts = (
        _of_history(run, shared)
        if run.history is not None and len(run.history.steps)
        else _of_curves(run, shared)
    )
    return [*charts, *_against_truth(run), *_of_predictions(run), *_of_accuracy(run)], shared


def chart(
    kind: str, title: str, x: str, y: str, series: list[dict[str, Any]], **more: Any
) -> Chart:
    return {"kind": kind, "title": title, "xLabel": x, "yLabel": y, "series": series, **more}


def line(name: str, x: Any, y: Any, style: int, type_: str = "line", **more: Any) -> dict[str, Any]:
    return {"name": name, "x": x, "y": y, "style": style, "type": type_, **more}


def _of_history(run: LoadedRun, shared: dict[str, Any]) -> list[Chart]:
    history = run.history
    assert history is not None
    rows = rows_to_keep(history)
    n_rungs, n_pairs = history.n_rungs, history.n_pairs
    shared["steps"] = numbers(history.steps[rows])
    swaps = swaps_of(history)
    marks = (
        {"x": numbers(few_marks(swaps)), "name": f"{len(swaps):,} swaps"} if len(swaps) else None
    )
    of = f" of chain 0 (of {history.n_chains})" if history.n_chains > 1 else ""
    thinned = (
        f"{len(rows):,} of {len(history.steps):,} recorded steps are on this page."
        if len(rows) < len(history.steps)
        else ""
    )
    common = {"over": "steps", "note": " ".join(filter(None, (_warm_start(run), thinned)))}
    energy = history.energy[:, :, 0].double()
    window = smoothing_window(len(energy))
    series = []
    for rung in reversed(range(n_rungs)):
        name = rung_name(rung, n_rungs)
        series.append(line(name, "steps", numbers(energy[rows, rung]), rung, faint=True))
        if window > 1:
            mean = numbers(running_mean(energy[:, rung], window)[rows])
            series.append(line(f"{name}, mean of {window:,} rows", "steps", mean, rung))
        else:
            series[-1].pop("faint")
    log = bool((energy > 0).all()) and float(energy.max() / energy.min()) > 20
    charts = [
        chart(
            "energy",
            f"Energies per rung{of}",
            "step",
            "energy (nats, summed)",
            series,
            yLog=log,
            marks=marks,
            **common,
        )
    ]
    if n_pairs == 0:
        return charts
    rung_of = history.replica_at[rows, :, 0].long().argsort(dim=1)
    series = [
        line(f"replica {k}", "steps", numbers(rung_of[:, k]), k, "step") for k in range(n_rungs)
    ]
    charts.append(
        chart(
            "paths",
            f"Replicas over rungs{of}",
            "step",
            "rung (0 is coldest)",
            series,
            marks=marks,
            whole=True,
            **common,
        )
    )
    charts.append(_acceptance(run))
    level, error = noise_over_time(history)
    series = []
    for pair in range(n_pairs):
        if history.n_chains > 1:
            low, high = (
                numbers(level[rows, pair] + sign * 2 * error[rows, pair]) for sign in (-1, 1)
            )
            series.append(
                line(
                    f"rungs {pair}–{pair + 1} ± 2 se", "steps", [], pair, "band", low=low, high=high
                )
            )
        series.append(line(f"rungs {pair}–{pair + 1}", "steps", numbers(level[rows, pair]), pair))
    charts.append(
        chart("sigma2", "Noise variance σ² of one energy", "step", "σ² (nats²)", series, **common)
    )
    if history.correction is not None:
        for pair in range(min(n_pairs, 4)):
            difference = numbers(history.energy_difference[rows, pair, 0])
            series = [
                line("cold minus hot energy", "steps", difference, 4, "dots"),
                line(
                    "correction: above it a swap is certain",
                    "steps",
                    numbers(history.correction[rows, pair, 0]),
                    0,
                ),
            ]
            title = f"Correction against threshold, rungs {pair}–{pair + 1}{of}"
            charts.append(
                chart("correction", title, "step", "energy (nats)", series, marks=marks, **common)
            )
    return charts


def _acceptance(run: LoadedRun) -> Chart:
    assert run.history is not None
    step, expected, observed = acceptance_over_time(run.history)
    first = first_test(run)
    if (
        first and observed is not None
    ):  # all tests come after it: so many more are in each window there
        observed = observed * (1 - first / run.history.n_steps)
    if first:
        expected, observed = (
            each if each is None else each.where((step >= first)[:, None], torch.nan)
            for each in (expected, observed)
        )
    series = []
    for pair in range(run.history.n_pairs):
        if expected is not None:
            values = numbers(100 * expected[:, pair])
            series.append(
                line(f"rungs {pair}–{pair + 1}, from the energies", numbers(step), values, 2 * pair)
            )
        if observed is not None and bool(run.history.proposed[pair].sum() > 0):
            values = numbers(100 * observed[:, pair])
            series.append(
                line(
                    f"rungs {pair}–{pair + 1}, swaps made",
                    numbers(step),
                    values,
                    2 * pair + 1,
                    "dots",
                )
            )
    tested = bool(run.history.proposed.sum() > 0)
    note = f"Swaps are tested from step {first:,} on." if first and tested else ""
    note = note if tested else "No swap was tested: this is what the energies would have allowed."
    return chart(
        "acceptance",
        "Acceptance over time",
        "step",
        "acceptance (%)",
        series,
        over="steps",
        note=note,
        zero=True,
    )


def _of_curves(run: LoadedRun, shared: dict[str, Any]) -> list[Chart]:
    """A run whose trace is not there may have left curves in its result, by epoch or, of a GAN, by
    step.
    """
    curves = _dict((run.result or {}).get("curves"))
    unit, over, when = (
        ("epoch", "epochs", "swap_epochs") if "epoch" in curves else ("step", "steps", "swap_steps")
    )
    x = numbers(_list(curves.get(unit)))
    if not x:
        return []
    shared[over] = x
    swaps = numbers(_list(curves.get(when)))
    made = (swap_counts(run) or (0, 0))[0]
    listed = f"the first {len(swaps):,} of {made:,}" if len(swaps) < made else f"{len(swaps):,}"
    few = [swaps[k] for k in few_marks(torch.arange(len(swaps))).tolist()]
    marks = {"x": few, "name": f"{listed} swaps"} if swaps else None
    means = (
        "One recorded value an epoch"
        if unit == "epoch"
        else "Means over the steps from one value to the next"
    )
    note = f"{means}: swaps may come from steps between them."
    common = {"over": over, "note": " ".join(filter(None, (_warm_start(run), note)))}
    energies, charts = [numbers(_list(each)) for each in _list(curves.get("energy"))], []
    n = len(energies)
    if n:
        series = [
            line(rung_name(rung, n), over, energies[rung], rung) for rung in reversed(range(n))
        ]
        positive = all(value is not None and value > 0 for each in energies for value in each)
        y = "energy (nats, summed)"
        charts.append(
            chart(
                "energy", "Energies per rung", unit, y, series, yLog=positive, marks=marks, **common
            )
        )
    for pair, values in enumerate(_list(curves.get("noise_variance"))):
        series = [line(f"rungs {pair}–{pair + 1}", over, numbers(_list(values)), pair)]
        title = "Noise variance σ² of one energy"
        charts.append(chart("sigma2", title, unit, "σ² (nats²)", series, **common))
    for pair, values in enumerate(_list(curves.get("correction"))):
        if pair + 1 < n:
            difference = [
                None if a is None or b is None else number(a - b)
                for a, b in zip(*energies[pair : pair + 2], strict=False)
            ]
            series = [
                line("cold minus hot energy", over, difference, 4, "dots"),
                line("correction: above it a swap is certain", over, numbers(_list(values)), 0),
            ]
            title = f"Correction against threshold, rungs {pair}–{pair + 1}"
            charts.append(
                chart("correction", title, unit, "energy (nats)", series, marks=marks, **common)
            )
    return charts


def _warm_start(run: LoadedRun) -> str:
    settings = run.settings
    if not isinstance(settings, GanConfig) or settings.warm_start < 1:
        return ""
    return f"The first {settings.warm_start:,} steps descend by Adam, without noise and swaps."


def _against_truth(run: LoadedRun) -> list[Chart]:
    config, trace = run.settings, run.trace
    if not isinstance(config, MixtureConfig):
        return []
    charts, key = [], f"truth {config.weights} {config.means} {config.stds}"
    if _fits(trace, "edges", "density") and trace["density"].shape[1:] == (
        len(trace["edges"]) - 1,
    ):
        edges = trace["edges"].double()
        middle = 0.5 * (edges[1:] + edges[:-1])
        exact = config.mixture().log_density(middle[:, None]).exp()
        series = [
            line("truth", numbers(middle, 4), numbers(exact, 4), 7, "area", reference=True),
            line(
                "draws of rung 0",
                numbers(middle, 4),
                numbers(trace["density"].double().mean(0), 4),
                0,
                own=True,
            ),
        ]
        title = f"Density against the truth, {len(trace['density'])} chains together"
        charts.append(
            chart("density", title, "x", "density (per unit of x)", series, key=key, zero=True)
        )
    if _fits(trace, "curve_steps", "w2") and len(trace["curve_steps"]) == len(trace["w2"]):
        mean, error = over_chains(trace["w2"])
        steps = numbers(trace["curve_steps"])
        low, high = (numbers((mean + sign * 2 * error).clamp(min=1e-9)) for sign in (-1, 1))
        series = [
            line("± 2 se", steps, [], 0, "band", low=low, high=high, own=True),
            line("W2", steps, numbers(mean), 0, own=True),
        ]
        title = "W2 to the truth against steps"
        charts.append(
            chart("w2", title, "steps", "W2 (units of x)", series, key=key, xLog=True, yLog=True)
        )
    return charts


def _of_predictions(run: LoadedRun) -> list[Chart]:
    """Digits keep the predictions of the test images, whose labels come with the data."""
    if not isinstance(run.settings, DigitsConfig) or "probabilities" not in run.trace:
        return []
    labels, probabilities = _digits_labels(), run.trace["probabilities"]
    if labels is None or probabilities.ndim != 2 or len(probabilities) != len(labels):
        return []
    bins = calibration(probabilities, labels)
    x, y = numbers(100 * bins.confidence, 4), numbers(100 * bins.accuracy, 4)
    low, high = (
        numbers(100 * (bins.accuracy + sign * 2 * bins.error).clamp(0, 1), 4) for sign in (-1, 1)
    )
    series = [
        line("perfectly calibrated", [0, 100], [0, 100], 7, reference=True),
        line("± 2 se", x, [], 0, "band", low=low, high=high, own=True),
        line("predictions", x, y, 0, "dotted", own=True),
    ]
    note = f"{len(labels)} test images in 15 bins; bins of few images scatter."
    x_name, y_name = "probability of the predicted class (%)", "right (%)"
    return [
        chart(
            "reliability",
            "Reliability diagram",
            x_name,
            y_name,
            series,
            key="digits",
            note=note,
            yRange=[0, 100],
        )
    ]


@functools.cache
def _digits_labels() -> Tensor | None:
    """Labels of the test images; None without scikit-learn, which brings them."""
    try:
        return digits()[1][1]
    except MissingDependencyError:
        return None


def _of_accuracy(run: LoadedRun) -> list[Chart]:
    curves = _dict((run.result or {}).get("curves"))
    names = {
        "probabilities_accuracy": "average of probabilities",
        "logits_accuracy": "average of logits",
        "pooled_probabilities_accuracy": "average, both rungs",
        "last_accuracy": "last draw alone",
    }
    series = []
    headline = (
        "logits_accuracy" if _list(curves.get("logits_accuracy")) else "probabilities_accuracy"
    )  # GANs have no other
    for style, (key, name) in enumerate(names.items()):
        values = [value for value in _list(curves.get(key)) if isinstance(value, int | float)]
        if values:
            percent = numbers([100.0 * value for value in values])
            series.append(
                line(name, list(range(1, len(values) + 1)), percent, style, own=key == headline)
            )
    if not series:
        return []
    key = " ".join(
        str(run.config.get(name)) for name in ("data", "net", "epochs", "n_labelled", "steps")
    )
    title = "Accuracy of the average against number of draws"
    zoom = {"yLow": number(100 * low)} if (low := least_of_averages(curves)) is not None else {}
    return [
        chart(
            "accuracy",
            title,
            "draws in the average",
            "test accuracy (%)",
            series,
            key=key,
            of=names[headline],
            **zoom,
        )
    ]


def _fits(trace: Mapping[str, Tensor], one: str, two: str) -> bool:
    return (
        one in trace
        and two in trace
        and trace[one].ndim == 1
        and trace[two].ndim == 2
        and len(trace[two]) > 0
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
