"""Plots of one run: data and a matplotlib axis in, the axis back; and the numbers that they and
the page draw. A line style goes with every colour, so that they can be read in grey.

Nothing here makes a figure or imports matplotlib: `figure, axis = plt.subplots();
plot_energies(run.history, axis)`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from scipy import special
from torch import Tensor

from torchrex.diagnostics import History, over_chains
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import acceptance_probability

STYLES = ("-", "--", "-.", ":")
# From dark to light in grey, two by two.
COLOURS = ("#0b3c5d", "#c8553d", "#5a9367", "#8e6bbf", "#c59b1f", "#4f9fc0")


def look(k: int) -> dict[str, Any]:
    """Colour and line style number k."""
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": STYLES[k % len(STYLES)]}


def rung_name(rung: int, n_rungs: int) -> str:
    end = " (coldest)" if rung == 0 else " (hottest)" if rung == n_rungs - 1 else ""
    return f"rung {rung}{end if n_rungs > 1 else ''}"


def plot_energies(history: History, axis: Any, *, chain: int = 0) -> Any:
    """Energy estimates of every rung with their running mean; swaps as ticks below."""
    energy = _chain(history, chain, history.energy)
    window = smoothing_window(len(energy))
    for rung in reversed(range(history.n_rungs)):
        style, label = look(rung), rung_name(rung, history.n_rungs)
        axis.plot(history.steps, energy[:, rung], color=style["color"], linewidth=0.4, alpha=0.35)
        smooth = running_mean(energy[:, rung], window)
        axis.plot(history.steps, smooth, **style, linewidth=1.6, label=label)
    if bool((energy > 0).all()) and float(energy.max() / energy.min()) > 20:
        axis.set_yscale("log")
    _mark_swaps(history, chain, axis)
    return _finish(axis, "energy (nats, summed over the data)")


def plot_replica_paths(history: History, axis: Any, *, chain: int = 0) -> Any:
    """The rung of each replica. Thinned draws show it at the kept steps only."""
    rung_of = _chain(history, chain, history.replica_at).long().argsort(dim=1)
    for replica in range(history.n_rungs):
        # A little apart, so that lines on the same rung can be distinguished.
        shift = 0.12 * (replica - (history.n_rungs - 1) / 2) / max(1, history.n_rungs - 1)
        style = {**look(replica), "linewidth": 1.1, "label": f"replica {replica}"}
        axis.step(history.steps, rung_of[:, replica] + shift, where="post", **style)
    axis.set_yticks(range(history.n_rungs))
    axis.set_ylim(-0.4, history.n_rungs - 0.6)
    return _finish(axis, "rung (0 is coldest)")


def plot_acceptance(history: History, axis: Any) -> Any:
    """Acceptance of every pair over time: swaps made, and what the energies promise."""
    _require_pairs(history)
    step, expected, observed = acceptance_over_time(history)
    if expected is None and observed is None:
        raise InvalidArgumentError(
            "this history has neither swaps nor F; give correction_factor to History.from_draws"
        )
    for pair in range(history.n_pairs):
        style, name = look(pair), f"rungs {pair}, {pair + 1}"
        if expected is not None:
            label = f"{name}: from the energies"
            axis.plot(step, 100 * expected[:, pair], **style, linewidth=1.6, label=label)
        if observed is not None:
            marks = {"color": style["color"], "linestyle": "", "markersize": 4}
            marks |= {"marker": "ox^s"[pair % 4], "fillstyle": "none"}
            axis.plot(step, 100 * observed[:, pair], **marks, label=f"{name}: swaps made")
    axis.set_ylim(bottom=0)
    return _finish(axis, "acceptance (% of swap tests)")


def plot_noise_variance(history: History, axis: Any) -> Any:
    """sigma2 of one energy, of every pair: mean over chains, band of two standard errors."""
    _require_pairs(history)
    mean, error = over_chains(history.noise_variance)
    for pair in range(history.n_pairs):
        label = f"rungs {pair}, {pair + 1}"
        _line_with_band(axis, history.steps, mean[:, pair], error[:, pair], look(pair), label)
    return _finish(axis, "sigma2 of one energy (nats²)")


def plot_correction(history: History, axis: Any, *, pair: int = 0, chain: int = 0) -> Any:
    """The energy difference against the correction it has to exceed for a swap to be certain."""
    _require_pairs(history)
    if history.correction is None:
        raise InvalidArgumentError(
            "this history does not know F; give correction_factor to History.from_draws"
        )
    difference, correction = (
        _chain(history, chain, each)[:, pair]
        for each in (history.energy_difference, history.correction)
    )
    label = f"energy of rung {pair} minus rung {pair + 1}"
    axis.plot(history.steps, difference, ".", color="0.6", markersize=2, label=label)
    label = "correction: above it a swap is certain"
    axis.plot(history.steps, correction, "-", color="black", linewidth=1.6, label=label)
    _mark_swaps(history, chain, axis, pair)
    return _finish(axis, "energy (nats)")


def plot_density(
    edges: Tensor, density: Tensor, axis: Any, *, truth: Callable[[Tensor], Tensor] | None = None
) -> Any:
    """Histogram density (chains, bins) of rung 0, mean over chains, against the exact density
    `truth` of x (n,).

    Chains that are each stuck in one mode can look right on average: the faint lines are single
    chains.
    """
    edges, density = edges.double(), density.double().reshape(-1, len(edges) - 1)
    if truth is not None:
        x = torch.linspace(float(edges[0]), float(edges[-1]), 801, dtype=torch.float64)
        axis.fill_between(x, truth(x), color="0.88", label="truth", zorder=0)
    for k, one in enumerate(density[:5] if len(density) > 1 else ()):
        axis.stairs(one, edges, color="0.55", linewidth=0.5, label=None if k else "single chains")
    label = f"draws of {len(density)} chains"
    axis.stairs(density.mean(0), edges, color=COLOURS[0], linewidth=1.6, label=label)
    axis.set_ylim(bottom=0)
    return _finish(axis, "density (per unit of x)", "x")


def plot_reliability(
    probabilities: Tensor, labels: Tensor, axis: Any, *, bins: int = 15, label: str = "predictions"
) -> Any:
    """Accuracy against confidence, bars of 2 errors; the diagonal is perfect calibration."""
    confidence, accuracy, error, _ = calibration(probabilities, labels, bins)
    axis.plot([0, 100], [0, 100], ":", color="0.5", linewidth=1, label="perfectly calibrated")
    marks = {"color": COLOURS[0], "marker": "o", "markersize": 4, "capsize": 2}
    axis.errorbar(100 * confidence, 100 * accuracy, yerr=200 * error, label=label, **marks)
    axis.set(xlim=(0, 100), ylim=(0, 100))
    return _finish(axis, "right (% of predictions)", "probability of the predicted class (%)")


def plot_accuracy(curves: Mapping[str, Tensor], axis: Any) -> Any:
    """Test accuracy (fractions) after 1, 2, ... draws, one line for each name."""
    lows = []
    for k, (name, accuracy) in enumerate(curves.items()):
        values = 100 * torch.as_tensor(accuracy, dtype=torch.float64)
        axis.plot(torch.arange(1, len(values) + 1), values, **look(k), linewidth=1.5, label=name)
        if "last" not in name and len(values):
            lows.append(float(values[len(values) // 20 :].min()))
    if lows:  # the first few draws lie so far below that all else would be one line
        top = float(axis.dataLim.y1)
        axis.set_ylim(bottom=min(lows) - 0.05 * max(top - min(lows), 1.0))
    return _finish(axis, "test accuracy (%)", "draws in the average")


def plot_distance(
    steps: Tensor,
    w2: Tensor,
    axis: Any,
    *,
    label: str = "W2",
    k: int = 0,
    style: Mapping[str, str] | None = None,
) -> Any:
    """W2 (steps, chains) between the draws so far and the truth: mean over chains, band of two
    standard errors, in look number `k` or in a `style` (color, linestyle).
    """
    mean, error = over_chains(w2.reshape(len(steps), -1))
    _line_with_band(axis, steps, mean, error, style or look(k), label)
    axis.set(xscale="log", yscale="log")
    return _finish(axis, "W2 to the truth (units of x)")


def _line_with_band(
    axis: Any, x: Tensor, mean: Tensor, error: Tensor, style: Mapping[str, str], label: str
) -> None:
    axis.plot(x, mean, **style, linewidth=1.6, label=label)
    if bool(error.isfinite().all()):
        band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
        axis.fill_between(x, mean - 2 * error, mean + 2 * error, **band)


def _chain(history: History, chain: int, values: Tensor) -> Tensor:
    if not 0 <= chain < history.n_chains:
        raise InvalidArgumentError(
            f"there is no chain {chain}: {history} has chains 0 to {history.n_chains - 1}"
        )
    return values[:, :, chain].double()


def _require_pairs(history: History) -> None:
    if history.n_pairs == 0:
        raise InvalidArgumentError(f"{history} has one rung, and one rung makes no swaps")


def _mark_swaps(history: History, chain: int, axis: Any, pair: int | None = None) -> None:
    if history.swaps is None or history.n_pairs == 0:
        return
    mine = history.swaps.chain == chain
    if pair is not None:
        mine &= history.swaps.pair == pair
    when = history.swaps.step[mine]
    marks = {"color": "black", "markersize": 7, "markeredgewidth": 0.7}
    marks |= {"transform": axis.get_xaxis_transform(), "label": f"{len(when):,} swaps"}
    axis.plot(when, torch.full(when.shape, 0.02), "|", **marks)


def _finish(axis: Any, y: str, x: str = "steps") -> Any:
    axis.set(xlabel=x, ylabel=y)
    axis.legend(fontsize=8, frameon=False)
    return axis


FEWEST_SEEDS = 3  # for a test: two seeds can agree by chance whatever their spread


def running_mean(values: Tensor, window: int) -> Tensor:
    """Mean over the last `window` values along the first axis, over fewer at the beginning."""
    sums = values.double().cumsum(0)
    shifted = sums.clone()
    shifted[window:] -= sums[:-window]
    counts = torch.arange(1, len(values) + 1, dtype=torch.float64).clamp(max=window)
    return shifted / counts.view(-1, *[1] * (values.ndim - 1))


def smoothing_window(n_rows: int) -> int:
    """How many recorded rows a smooth line averages: a hundredth of them."""
    return max(1, math.ceil(n_rows / 100))


class AcceptanceOverTime(NamedTuple):
    """Acceptance of every pair in windows of steps; None where the run does not know it."""

    step: Tensor  # (w,): the middle of each window
    expected: Tensor | None  # (w, pairs): mean of min(1, S) over the recorded rows and chains
    observed: Tensor | None  # (w, pairs): swaps over tests, which are taken to be spread evenly


def acceptance_over_time(history: History, windows: int = 40) -> AcceptanceOverTime:
    """Windows of equal length, at least ten recorded rows each on average.

    Draws do not list their swaps: only what the energies promise is known of them over time.
    """
    n_windows = max(1, min(windows, len(history.steps) // 10))
    edges = torch.linspace(0, history.n_steps, n_windows + 1, dtype=torch.float64)

    def summed(values: Tensor, steps: Tensor) -> Tensor:
        window = torch.bucketize(steps.double(), edges, right=True) - 1
        zeros = torch.zeros(n_windows, *values.shape[1:], dtype=torch.float64)
        return zeros.index_add_(0, window.clamp(0, n_windows - 1), values.double())

    expected = observed = None
    if history.correction is not None:
        needed = history.energy_difference - history.correction.double()
        log_ratio = history.inverse_gap[:, :, None] * needed
        rows = acceptance_probability(log_ratio, 1.0).nan_to_num(0.0).mean(2)
        count = summed(torch.ones(len(history.steps), 1), history.steps)
        expected = summed(rows, history.steps) / count  # NaN for a window without rows
    if history.swaps is not None:
        of_pair = torch.nn.functional.one_hot(history.swaps.pair.long(), history.n_pairs)
        tests = history.proposed.double().sum(1) / n_windows
        observed = summed(of_pair, history.swaps.step) / tests
    return AcceptanceOverTime(0.5 * (edges[1:] + edges[:-1]), expected, observed)


class Calibration(NamedTuple):
    """Bins of a reliability diagram that hold anything."""

    confidence: Tensor  # mean probability of the predicted class
    accuracy: Tensor  # how often it was right
    error: Tensor  # binomial standard error of the accuracy
    n: Tensor  # predictions in the bin


def calibration(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """Predictions (n, classes) in bins of equal width by the probability of the predicted class."""
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        given = f"{tuple(probabilities.shape)} and {tuple(labels.shape)}"
        raise InvalidArgumentError(f"need probabilities (n, classes) and labels (n,), got {given}")
    confidence, predicted = probabilities.double().max(1)
    right = (predicted == labels).double()
    # (a, b], as the calibration error counts
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1
    count = torch.bincount(which, minlength=bins)
    there = count > 0
    n = count[there].double()
    mean = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, confidence)[there] / n
    accuracy = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, right)[there] / n
    return Calibration(mean, accuracy, (accuracy * (1 - accuracy) / n).sqrt(), count[there])


def error_of_mean(values: Sequence[float], errors: Sequence[float | None]) -> float | None:
    """Standard error of a mean over runs; `errors` are those that the runs know of themselves.

    A run of many chains knows its own far better than two or three seeds show by their spread, so
    where every run has one they are combined: sqrt(sum e^2) / n. Else it is the spread over runs;
    of a single run nothing is known.
    """
    known = [error for error in errors if error is not None]
    if values and len(known) == len(values):
        return math.sqrt(sum(error * error for error in known)) / len(values)
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def p_of_pairs(mean: float, error: float, n: int) -> float | None:
    """Two-sided p of a mean difference of n pairs: t with n - 1 degrees of freedom.

    Equal differences leave no spread to test against: the sides are the same, or rounding hides the
    spread (None).
    """
    if error > 1e-9 * abs(mean):  # less is rounding
        return float(2 * special.stdtr(n - 1, -abs(mean) / error))
    return 1.0 if mean == 0 else None


def least_of_averages(curves: Mapping[str, Any]) -> float | None:
    """From where the accuracies of averages are worth drawing: their least after the first
    twentieth of the draws. Averages of few draws and single draws are far below.
    """
    names = [name for name in curves if name.endswith("_accuracy") and "last" not in name]
    lists = [curves[name] for name in names if isinstance(curves[name], list)]
    late = [value for each in lists for value in each[len(each) // 20 :]]
    return min((value for value in late if isinstance(value, int | float)), default=None)
