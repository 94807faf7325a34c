"""Figures of runs by Plotly: data in, `plotly.graph_objects.Figure` out.

The page, a notebook and an export share them. Steps and energies are those of a `History`. Long
series lose rows (`rows_to_keep`), and the subtitle says how many. Every colour can be read on a
light and on a dark ground. Plotly reads some HTML in its texts: names go through `plain`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrex.diagnostics import Estimate, History, over_chains, rung_occupancy
from torchrex.errors import InvalidArgumentError, import_extra
from torchrex.report.plots import acceptance_over_time, calibration, running_mean, smoothing_window

METHODS = ("#2f7fd0", "#d5552b", "#2b9a63", "#9468d0", "#a07a1e", "#cf4f97", "#1b93a8", "#7d868c")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
COLD, HOT = (47, 127, 208), (213, 68, 50)  # of rungs; those between go through violet
VIOLET, GREY = (150, 100, 205), "#7d868c"
LIGHT = {"ground": "#fdfdfc", "text": "#1c1f22", "soft": "#5d656c", "line": "#dfe2e4"}
DARK = {"ground": "#15181b", "text": "#e4e7e9", "soft": "#a4adb4", "line": "#31373c"}
FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif'
MOST_VALUES = 4000  # rows times rungs
MOST_LINES = 4  # runs in a figure that has a line for each
MOST_PATHS = 100  # swaps of a chain; of more the occupancy says more than the paths
NEAR_A_SWAP = 8  # rows on either side
SWAPS_IN_FULL = 40
MOST_MARKS = 1000
BURN_IN = 0.1  # of the rows; it may lie outside the axes
MIDDLE = (0.005, 0.995)  # of the values after it
SPOILT = 2.0  # times the span of those
ONE_RUN = {"": 0}


@dataclass(frozen=True)
class Look:
    """How the line of one method looks, on every figure."""

    colour: str = METHODS[0]
    dash: str = DASHES[0]


PLAIN = Look()


class Pair(NamedTuple):
    """What is known of two neighbouring rungs: values with standard errors, NaN if unknown."""

    rungs: tuple[int, int]
    observed: tuple[float, float]  # accepted over tested
    expected: tuple[float, float]  # from the energies
    allowed: float  # 2 Phi(-s/2), between equal energies
    noise: float  # s
    noise_variance: tuple[float, float]  # sigma2 of one energy
    accepted: int
    proposed: int

    @property
    def name(self) -> str:
        return f"{self.rungs[0]}–{self.rungs[1]}"


def plain(text: str) -> str:
    """Text that Plotly shows as it is."""
    return escape(text, quote=False)


def template(ground: Mapping[str, str] = LIGHT) -> dict[str, Any]:
    """The Plotly template of all figures, for one ground."""
    axis = {"gridcolor": ground["line"], "linecolor": ground["line"], "zeroline": False}
    axis |= {"automargin": True, "title": {"font": {"size": 12}, "standoff": 8}}
    soft = {"color": ground["soft"], "size": 11}
    return {
        "layout": {
            "font": {"family": FONT, "size": 12, "color": ground["text"]},
            "paper_bgcolor": ground["ground"],
            "plot_bgcolor": ground["ground"],
            "colorway": METHODS,
            "title": {"font": {"size": 14}, "x": 0, "subtitle": {"font": soft}},
            "xaxis": axis | {"tickfont": soft, "exponentformat": "SI"},
            "yaxis": axis | {"tickfont": soft},
            "legend": {"orientation": "h", "yref": "paper", "y": 1.02, "yanchor": "bottom", "x": 0},
            "hovermode": "x unified",
            "hoverlabel": {"bgcolor": ground["ground"], "namelength": -1},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": ground["soft"]},
            "barmode": "group",
            "dragmode": "zoom",
        }
    }


# The ladder


def acceptance(pairs: Sequence[Pair], *, look: Look = PLAIN, note: str = "") -> Any:
    """Swaps made of every pair next to what its energies promise, with the noise s on top."""
    names = [pair.name for pair in pairs]

    def rates(chosen: Sequence[tuple[float, float]]) -> dict[str, Any]:
        value, error = (array([100 * each for each in column]) for column in zip(*chosen, strict=1))
        error = array([0.0 if math.isnan(each) else each for each in error])
        return {"x": names, "y": value, "error_y": {"array": error, "thickness": 1.2, "width": 4}}

    said = [f"s = {pair.noise:.2g}" if math.isfinite(pair.noise) else "" for pair in pairs]
    counts = [[f"{pair.accepted:,} of {pair.proposed:,} tests"] for pair in pairs]
    observed, expected = rates([p.observed for p in pairs]), rates([p.expected for p in pairs])
    bars = [
        {"name": "swaps made", "marker": {"color": look.colour}, "customdata": counts}
        | {"hovertemplate": "%{y:.3g} % (%{customdata[0]})", **observed},
        {"name": "from the energies", "marker": {"color": look.colour}, "opacity": 0.45}
        | {"hovertemplate": "%{y:.3g} %", **expected},
    ]
    tick = {"symbol": "line-ew", "size": 26, "line": {"width": 2, "color": GREY}}
    allowed = {
        **{"x": names, "y": array([100 * pair.allowed for pair in pairs]), "text": said},
        **{"name": "allowed by the noise s", "mode": "markers+text", "marker": tick},
        **{"textposition": "top center", "hovertemplate": "%{y:.3g} % (%{text})"},
    }
    if len(pairs) > 12:  # the texts would lie on each other
        allowed["mode"] = "markers"
    seen = [each for each in bars if not all(map(math.isnan, each["y"]))]
    traces = [("Bar", each) for each in seen] + [("Scatter", allowed)]
    tops = [100 * rate for pair in pairs for rate in (*pair[1:3], (pair.allowed, 0.0))
            for rate in (rate[0],) if math.isfinite(rate)]  # fmt: skip
    y = {"rangemode": "tozero", "range": [0, 1.15 * max([1e-3, *tops])]}
    return figure(
        *("Acceptance of every pair of rungs", "pair of rungs", "acceptance, %", traces),
        note=note or "Error bars: one standard error. s is the noise of log S.",
        xaxis={"type": "category"},
        yaxis=y,
        bargap=max(0.3, 0.8 - 0.1 * len(pairs)),
    )


def paths(history: History, *, chain: int = 0, of: str = "") -> Any:
    """The rung of every replica of one chain, swap by swap where all swaps are known."""
    steps, rungs = _path(history, chain)
    colours = rung_colours(history.n_rungs)
    n = history.n_rungs
    traces = []
    for replica in range(n):
        shift = 0.12 * (replica - (n - 1) / 2) / max(1, n - 1)  # lines on a rung lie side by side
        line = {"color": colours[replica], "width": 1.4, "shape": "hv"}
        y = array(rungs[:, replica] + shift)
        more = {"line": line, "hovertemplate": "rung %{customdata}"}
        name = f"replica {replica}"
        traces.append(_line(name, steps, y, customdata=array(rungs[:, replica].long()), **more))
    ticks = {"tickmode": "linear", "dtick": 1, "range": [-0.4, n - 0.6]}
    note = (
        f"{of}{', ' if of else ''}chain {chain} of {history.n_chains}." if _several(history) else of
    )
    return figure("Replicas over rungs", "step", "rung (0 is coldest)", traces, note, yaxis=ticks)


def occupancy(history: History) -> Any:
    """The share of the steps that each replica spent on each rung; even is 1 / rungs."""
    share = 100 * rung_occupancy(history).share.value.T  # (rungs, replicas)
    n = history.n_rungs
    text = [[f"{x:.0f} %" for x in row] for row in share.tolist()]
    cells = {
        **{"z": array(share), "zmin": 0, "zmax": max(100 / n * 2, float(share.max()))},
        **{"x": [str(k) for k in range(n)], "y": [str(k) for k in range(n)]},
        **{"colorscale": [[0, "rgba(47,127,208,0.04)"], [1, METHODS[0]]], "xgap": 2, "ygap": 2},
        **{"colorbar": {"ticksuffix": " %", "thickness": 10, "outlinewidth": 0}},
        "hovertemplate": "replica %{x} on rung %{y}: %{z:.3g} %<extra></extra>",
    }
    if n <= 12:
        cells |= {"text": text, "texttemplate": "%{text}", "showscale": False}
    made = int(history.accepted.sum())
    note = f"{made:,} swaps. Even is {100 / n:.3g} % everywhere. A replica has the number of the "
    note += f"rung where it started; mean over {history.n_chains:,} chains."
    x, y = ({"type": "category", "showgrid": False} for _ in range(2))
    names = ("Share of the steps on each rung", "replica", "rung (0 is coldest)")
    made = figure(*names, [("Heatmap", cells)], note, xaxis=x, yaxis=y)
    return made.update_layout(hovermode="closest")


def flow(history: History, *, chain: int = 0, of: str = "") -> Any:
    """How replicas travel: their paths, or of more than a hundred swaps a chain the occupancy."""
    if int(history.accepted[:, chain].sum()) > MOST_PATHS:
        return occupancy(history)
    return paths(history, chain=chain, of=of)


# Over the steps


def energies(
    history: History, *, chains: Mapping[str, int] = ONE_RUN, unit: str = "step", scale: float = 1
) -> Any:
    """Energies of every rung: their running mean for each of the `chains` (by name), and the
    recorded values of the first; its swaps as ticks.
    """
    colours, window = rung_colours(history.n_rungs), smoothing_window(len(history.steps))
    shown = dict(list(chains.items())[:MOST_LINES])
    first = next(iter(shown.values()))
    traces: list[tuple[str, dict[str, Any]]] = []
    smooth = {c: running_mean(history.energy[:, :, c].double(), window) for c in shown.values()}
    rows = rows_to_keep(history, first)
    x = array(history.steps[rows] / scale if scale != 1 else history.steps[rows])
    every = history.energy[rows][:, :, list(shown.values())]
    log = bool((every > 0).all()) and float(every.max() / every.min()) > 20
    for rung in reversed(range(history.n_rungs)):
        group = {"legendgroup": str(rung)}
        name = rung_name(rung, history.n_rungs)
        if window > 1:
            y = array(history.energy[rows, rung, first])
            faint = {"line": {"color": colours[rung], "width": 0.6}, "opacity": 0.35}
            traces.append(_line(name, x, y, showlegend=False, hoverinfo="skip", **faint, **group))
        for k, (run, chain) in enumerate(shown.items()):
            line = {"color": colours[rung], "width": 1.7, "dash": DASHES[k % len(DASHES)]}
            called = f"{name}, {plain(run)}" if len(shown) > 1 else name
            y = array(smooth[chain][rows, rung])
            more = {"line": line, "showlegend": k == 0, **group}
            traces.append(_line(name if k == 0 else called, x, y, **more))
    late = [each[rows] for each in smooth.values()]
    axis, outside = settled_axis([*late, history.energy[rows][:, :, first]], log=log)
    swaps = swaps_of(history, first)
    words = [f"Thick: mean of {window:,} recorded rows." * (window > 1)]
    words += [
        f"{len(rows):,} of {len(history.steps):,} rows are drawn."
        * (len(rows) < len(history.steps))
    ]
    if len(chains) > 1:
        words.append(f"{len(shown)} of {len(chains)} runs are drawn, the others dashed.")
    marks = len(swaps) and axis["range"] is not None
    if marks:
        some = swaps[torch.linspace(0, len(swaps) - 1, min(len(swaps), MOST_MARKS)).long()]
        cut = f", {len(some):,} of them drawn" * (len(some) < len(swaps))
        words.append(f"Ticks below: {len(swaps):,} swaps{cut}.")
        low = axis["range"][0]
        tick = {"symbol": "line-ns", "size": 9, "line": {"width": 1, "color": GREY}}
        y = array(torch.full(some.shape, 10**low if log else low))
        marked = {"mode": "markers", "marker": tick, "hoverinfo": "x", "cliponaxis": False}
        traces.append(_line("swaps", array(some / scale if scale != 1 else some), y, **marked))
    note = " ".join(filter(None, [*words, outside]))
    title, y_title = "Energies of the rungs", "energy (nats, summed)"
    return figure(title, unit, y_title, traces, note, yaxis=axis)


def acceptance_by_time(
    history: History, *, first: int = 0, unit: str = "step", scale: float = 1
) -> Any:
    """Acceptance of every pair in windows of steps, all chains together, from step `first` on."""
    _require_pairs(history)
    step, expected, observed = acceptance_over_time(history)
    if first and observed is not None:  # all tests come after it: so many more in each window
        observed = observed * (1 - first / history.n_steps)
    if not int(history.proposed.sum()):
        observed = None
    traces, seen = [], step >= first
    for pair, colour in enumerate(pair_colours(history.n_pairs)):
        name, group = f"{pair}–{pair + 1}", {"legendgroup": str(pair)}
        for rates, words, mode in (
            (expected, "from the energies", "lines"),
            (observed, "swaps made", "markers"),
        ):
            if rates is not None:
                y = array(100 * rates[seen, pair])
                style = {"line": {"color": colour, "width": 1.6}, "marker": {"color": colour}}
                more = {"mode": mode, **style, **group}
                traces.append(_line(f"{name}, {words}", array(step[seen] / scale), y, **more))
    note = f"Swaps are tested from step {first:,} on." if first else ""
    if observed is None and not int(history.proposed.sum()):
        note = "No swap was tested: this is what the energies would have allowed."
    zero = {"rangemode": "tozero"}
    title = "Acceptance over time"
    return figure(title, unit, "acceptance, %", traces, note, yaxis=zero)


def noise(history: History, *, unit: str = "step", scale: float = 1) -> Any:
    """sigma2 of one energy of every pair: mean over chains with a band of two standard errors."""
    _require_pairs(history)
    rows = rows_to_keep(history)
    mean, error = over_chains(history.noise_variance)
    x, traces = array(history.steps[rows] / scale), []
    for pair, colour in enumerate(pair_colours(history.n_pairs)):
        of_pair = Estimate(mean[rows, pair], error[rows, pair])
        traces += _with_band(f"rungs {pair}–{pair + 1}", x, of_pair, Look(colour))
    note = f"Mean of {history.n_chains:,} chains, band: two standard errors." * _several(history)
    axis, outside = settled_axis([mean[rows]])
    note = f"{note} {outside}".strip()
    return figure("Noise variance σ² of one energy", unit, "σ² (nats²)", traces, note, yaxis=axis)


def corrections(history: History, *, chain: int = 0, unit: str = "step", scale: float = 1) -> Any:
    """The energy difference of every pair next to the correction, above which a swap is certain."""
    _require_pairs(history)
    if history.correction is None:
        raise InvalidArgumentError(
            "this history does not know F; give correction_factor to History.from_draws"
        )
    rows, traces = rows_to_keep(history, chain), []
    x = array(history.steps[rows] / scale)
    for pair, colour in enumerate(pair_colours(history.n_pairs)):
        group = {"legendgroup": str(pair), "visible": True if pair == 0 else "legendonly"}
        name, dots = f"rungs {pair}–{pair + 1}", {"color": colour, "size": 3, "opacity": 0.6}
        y = array(history.energy_difference[rows, pair, chain])
        style = {"mode": "markers", "marker": dots}
        traces.append(_line(f"{name}: cold minus hot energy", x, y, **style, **group))
        y = array(history.correction[rows, pair, chain])
        more = {"line": {"color": GREY, "width": 2}, "connectgaps": True}
        traces.append(_line(f"{name}: correction", x, y, **more, **group))
    note = "Above the correction a swap is certain."
    if history.n_pairs > 1:
        note += f" The legend shows and hides each of the {history.n_pairs} pairs."
    parts = [history.energy_difference[rows, :1, chain], history.correction[rows, :1, chain]]
    title, (axis, outside) = "Energy differences against the correction", settled_axis(parts)
    return figure(title, unit, "energy (nats)", traces, f"{note} {outside}".strip(), yaxis=axis)


# The answer


def density(
    edges: Tensor,
    drawn: Mapping[str, Tensor],
    looks: Mapping[str, Look],
    truth: Callable[[Tensor], Tensor],
) -> Any:
    """Histogram densities (chains, bins) of rung 0, by name, over the exact one."""
    edges = edges.double()
    middle = 0.5 * (edges[1:] + edges[:-1])
    area = {"fill": "tozeroy", "line": {"width": 0}, "fillcolor": "rgba(125,134,140,0.3)"}
    traces = [_line("truth", array(middle), array(truth(middle)), **area)]
    for name, found in drawn.items():
        style = {
            "color": looks[name].colour,
            "dash": looks[name].dash,
            "shape": "hvh",
            "width": 1.6,
        }
        y = array(found.double().mean(0))
        traces.append(_line(plain(name), array(middle), y, line=style))
    chains = ", ".join(f"{len(each):,}" for each in drawn.values())
    note = f"Mean over {chains} chains."
    title, zero = "Density of rung 0 against the truth", {"rangemode": "tozero"}
    return figure(title, "x", "density (per unit of x)", traces, note, yaxis=zero)


def distance(curves: Mapping[str, tuple[Tensor, Tensor]], looks: Mapping[str, Look]) -> Any:
    """W2 between the draws so far and the truth, by name: steps, and values (steps, chains)."""
    traces: list[Any] = []
    for name, (steps, w2) in curves.items():
        mean, error = over_chains(w2.reshape(len(steps), -1))
        # The axis is logarithmic.
        of = Estimate(mean, torch.minimum(error, (mean - 1e-9).clamp(min=0) / 2))
        traces += _with_band(plain(name), array(steps), of, looks[name])
    log, note = {"type": "log"}, "Band: two standard errors over chains."
    title = "W2 to the truth against steps"
    return figure(title, "step", "W2 (units of x)", traces, note, xaxis=log, yaxis=log)


def averages(
    curves: Mapping[str, Sequence[Any]], looks: Mapping[str, Look], *, low: float | None = None
) -> Any:
    """Test accuracy (fractions) after 1, 2, ... draws, by name; the axis begins at `low`."""
    traces, tops = [], []
    for name, values in curves.items():
        y = [math.nan if each is None else 100.0 * each for each in values]
        style = {"line": {"color": looks[name].colour, "dash": looks[name].dash, "width": 1.6}}
        mode = "lines" if len(y) > 1 else "markers"
        x = array(torch.arange(1, len(y) + 1))
        traces.append(_line(plain(name), x, array(y), mode=mode, **style))
        tops += [each for each in y if math.isfinite(each)]
    axis: dict[str, Any] = {}
    if low is not None and tops and min(tops) < 100 * low:
        margin = 0.05 * max(max(tops) - 100 * low, 1.0)
        axis = {"range": [100 * low - margin, max(tops) + margin]}
    note = "The first draws lie below the axis; a double click shows them." if axis else ""
    title, x_title = "Accuracy of the average against number of draws", "draws in the average"
    return figure(title, x_title, "test accuracy, %", traces, note, yaxis=axis)


def reliability(
    predictions: Mapping[str, Sequence[Tensor]], labels: Tensor, looks: Mapping[str, Look]
) -> Any:
    """Accuracy against confidence, with counts below: probabilities (n, classes) of every seed, by
    name, all of the same examples.

    The seeds are pooled. They share the examples, so the band of two binomial standard errors
    counts every example once.
    """
    truth = {"color": GREY, "dash": "dot", "width": 1}
    traces = [_line("perfectly calibrated", [0, 100], [0, 100], line=truth)]
    for name, seeds in predictions.items():
        bins = calibration(torch.cat(list(seeds)), labels.repeat(len(seeds)))
        error = 100 * bins.error * math.sqrt(len(seeds))
        x, look = array(100 * bins.confidence), looks[name]
        of = Estimate(100 * bins.accuracy, error)
        traces += _with_band(plain(name), x, of, look, mode="lines+markers")
        bar = {"marker": {"color": look.colour, "opacity": 0.6}, "showlegend": False, "yaxis": "y2"}
        y = array(bins.n.double() / len(seeds))
        bar |= {"hovertemplate": "%{y:,.4g} examples"}
        traces.append(("Bar", {"name": plain(name), "x": x, "y": y, **bar}))
    seeds = ", ".join(f"{len(each)}" for each in predictions.values())
    note = f"{len(labels):,} examples, seeds pooled: {seeds}. Bands: two binomial standard errors. "
    note += "Below: examples in each of 15 bins."
    axes = {
        "xaxis": {"range": [0, 101], "anchor": "y2"},
        "yaxis": {"range": [0, 101], "domain": [0.3, 1]},
        "yaxis2": {"domain": [0, 0.2], "title": {"text": "examples"}, "nticks": 3},
    }
    names = ("Reliability", "probability of the predicted class, %", "right, %")
    return figure(*names, traces, note, **axes)


# Parts


def figure(
    title: str,
    x: str,
    y: str,
    traces: Sequence[tuple[str, dict[str, Any]]],
    note: str = "",
    **more: Any,
) -> Any:
    """A figure of `traces`, (kind, properties) each."""
    go = import_extra("plotly.graph_objects", "report")
    made = go.Figure([getattr(go, kind)(**each) for kind, each in traces])
    subtitle = {"subtitle": {"text": "<br>".join(textwrap.wrap(plain(note), 110))}} if note else {}
    made.update_layout(template=template(), title={"text": title, **subtitle})
    made.update_layout(xaxis_title_text=x, yaxis_title_text=y, **more)
    return made


def _line(name: str, x: Any, y: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "Scatter", {"name": name, "x": x, "y": y, "mode": "lines", **more}


def _with_band(
    name: str, x: Any, of: Estimate, look: Look, *, mode: str = "lines"
) -> list[tuple[str, dict[str, Any]]]:
    """A line, under it two standard errors on either side where they are known."""
    traces, group = [], {"legendgroup": name}
    known = of.error.isfinite()
    if bool(known.any()):
        edge = {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip", **group}
        red, green, blue = (int(look.colour[k : k + 2], 16) for k in (1, 3, 5))
        fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.2)"}
        wide = torch.where(known, 2 * of.error, 0.0)
        traces.append(_line(name, x, array(of.value - wide), **edge))
        traces.append(_line(name, x, array(of.value + wide), **edge, **fill))
    line = {"color": look.colour, "dash": look.dash, "width": 1.6}
    more = {"mode": mode, "line": line, "marker": {"color": look.colour}, **group}
    return [*traces, _line(name, x, array(of.value), **more)]


def array(values: Any) -> Any:
    """A numpy array of few bytes; Plotly writes it in base64."""
    found = torch.as_tensor(values)
    return found.int().numpy() if not found.is_floating_point() else found.float().numpy()


def settled_axis(values: Sequence[Tensor], *, log: bool = False) -> tuple[dict[str, Any], str]:
    """A y axis for series (rows, ...), and in words what lies outside: a burn-in or single values
    that would hide the rest. The middle 99 % of the values after the first tenth are inside.
    """
    kind = "log" if log else "linear"

    def known(part: Sequence[Tensor]) -> Tensor:
        every = torch.cat([x.double().flatten() for x in part])
        every = every[every.isfinite() & ((every > 0) if log else True)]
        return every.log10() if log else every

    every, late = known(values), known([x[math.ceil(BURN_IN * len(x)) :] for x in values])
    if not len(late):
        return {"type": kind, "range": None}, ""
    low, high = late.sort().values[[int(part * (len(late) - 1)) for part in MIDDLE]].tolist()
    least, most = float(every.min()), float(every.max())
    if most - least <= SPOILT * (high - low):
        low, high = least, most
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 0.5
    low, high = low - margin, high + margin
    outside = int(((every < low) | (every > high)).sum())
    words = f"{outside:,} of {len(every):,} values lie outside; a double click shows them."
    return {"type": kind, "range": [low, high]}, words if outside else ""


def rung_name(rung: int, n_rungs: int) -> str:
    end = " (coldest)" if rung == 0 else " (hottest)" if rung == n_rungs - 1 else ""
    return f"rung {rung}{end if n_rungs > 1 else ''}"


def rung_colours(n: int) -> list[str]:
    """From blue, the coldest, through violet to red."""
    ends, found = (COLD, VIOLET, HOT), []
    for k in range(n):
        at = 2 * k / max(1, n - 1)
        low, high, part = ends[min(1, int(at))], ends[min(1, int(at)) + 1], at - min(1, int(at))
        mixed = (round(a + part * (b - a)) for a, b in zip(low, high, strict=True))
        found.append("#{:02x}{:02x}{:02x}".format(*mixed))
    return found


def pair_colours(n: int) -> list[str]:
    return rung_colours(n + 1)[:n]


def _several(history: History) -> bool:
    return history.n_chains > 1


def _require_pairs(history: History) -> None:
    if history.n_pairs == 0:
        raise InvalidArgumentError(f"{history} has one rung, and one rung makes no swaps")


def swaps_of(history: History, chain: int = 0) -> Tensor:
    """The steps at which one chain swapped; of draws none is known."""
    if history.swaps is None:
        return torch.zeros(0, dtype=torch.long)
    return history.swaps.step[history.swaps.chain == chain]


def _path(history: History, chain: int) -> tuple[Any, Tensor]:
    """Steps, and the rung of each replica from then on (steps, replicas)."""
    if history.swaps is None:
        rows = rows_to_keep(history, chain)
        return array(history.steps[rows]), history.replica_at[rows, :, chain].long().argsort(dim=1)
    mine = (history.swaps.chain == chain) & (history.swaps.step > history.steps[0])
    replica_at = history.replica_at[0, :, chain].tolist()
    found = [list(replica_at)]
    for pair in history.swaps.pair[mine].tolist():
        replica_at[pair], replica_at[pair + 1] = replica_at[pair + 1], replica_at[pair]
        found.append(list(replica_at))
    last = torch.tensor([int(history.n_steps) - 1])
    steps = torch.cat([history.steps[:1], history.swaps.step[mine], last])
    return array(steps), torch.tensor([*found, found[-1]]).argsort(dim=1)


def rows_to_keep(history: History, chain: int = 0) -> Tensor:
    """Indices of the recorded rows to draw, rising. Rows are chosen, never averaged: the lowest and
    highest energies of each stretch, and every row near the first swaps.
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
