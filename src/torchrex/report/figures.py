"""Figures of runs by Plotly: data in, `plotly.graph_objects.Figure` out.

The page, a notebook and an export share them. Long series lose rows (`rows_to_keep`), and the
subtitle says how many. Every colour can be read on a light and on a dark ground. Plotly reads some
HTML in its texts: names go through `plain`.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrex.diagnostics import Estimate, History, over_chains, rung_occupancy
from torchrex.diagnostics.history import replay
from torchrex.errors import InvalidArgumentError, import_extra
from torchrex.report.findings import number
from torchrex.report.plots import COLOURS, calibration, rung_name, running_mean, smoothing_window

GREY = COLOURS[-1]
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
RUNGS = ((47, 127, 208), (27, 147, 168), (43, 154, 99), (160, 122, 30), (213, 68, 50))  # from cold
LIGHT = {"ground": "#fdfdfc", "text": "#1c1f22", "soft": "#5d656c", "line": "#dfe2e4"}
DARK = {"ground": "#15181b", "text": "#e4e7e9", "soft": "#a4adb4", "line": "#31373c"}
FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif'
MOST_VALUES = 2400  # rows times rungs
MOST_SMOOTH = 600  # rows of a smooth series
MOST_LINES = 4  # runs in a figure that has a line for each
MOST_TEXTS = 12  # next to each other in a figure
MOST_NAMED = 6  # rungs in a legend
FAR = 20.0  # a ratio of energies that needs a logarithmic axis
MOST_PATHS = 100  # swaps of a chain; of more the occupancy says more than the paths
NEAR_A_SWAP = 8  # rows on either side
SWAPS_IN_FULL = 40
MOST_MARKS = 1000
BURN_IN = 0.1  # of the rows; it may lie outside the axes
MIDDLE = (0.005, 0.995)  # of the values after it
SPOILT = 2.0  # times the span of those
BINS = 15

Trace = dict[str, Any]


class Pair(NamedTuple):
    """What is known of two neighbouring rungs: values with standard errors, NaN if unknown."""

    name: str
    observed: tuple[float, float]  # accepted over tested
    expected: tuple[float, float]  # from the energies
    noise_variance: tuple[float, float]  # sigma2 of one energy
    noise: float  # s
    allowed: float  # 2 Phi(-s/2), between equal energies
    accepted: int
    proposed: int


def plain(text: str) -> str:
    """Text that Plotly shows as it is."""
    return escape(text, quote=False)


def template(ground: Mapping[str, str] = LIGHT) -> dict[str, Any]:
    """The Plotly template of all figures, for one ground."""
    soft = {"color": ground["soft"], "size": 11}
    axis = {"gridcolor": ground["line"], "linecolor": ground["line"], "zeroline": False}
    axis |= {"automargin": True, "title": {"font": {"size": 12}, "standoff": 8}, "tickfont": soft}
    layout = {
        "font": {"family": FONT, "size": 12, "color": ground["text"]},
        "paper_bgcolor": ground["ground"],
        "plot_bgcolor": ground["ground"],
        "colorway": COLOURS,
        "title": {"font": {"size": 14}, "x": 0, "subtitle": {"font": soft}},
        "xaxis": axis,
        "yaxis": axis,
        "legend": {"orientation": "h", "yref": "paper", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": ground["ground"], "namelength": -1},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": ground["soft"]},
    }
    return {"layout": layout}


# The ladder


def acceptance(pairs: Sequence[Pair], *, colour: str = COLOURS[0]) -> Any:
    """Swaps made of every pair next to what its energies promise, with the noise s below."""
    noises = [f"s = {number(pair.noise, 2)}" if pair.noise == pair.noise else "" for pair in pairs]
    x = [pair.name for pair in pairs]
    if len(pairs) <= MOST_TEXTS:
        x = [f"{name}<br>{noise}" for name, noise in zip(x, noises, strict=True)]

    def bars(name: str, chosen: Sequence[tuple[float, float]], **more: Any) -> Trace:
        value, error = 100 * torch.tensor(chosen, dtype=torch.float64).reshape(-1, 2).T
        whiskers = {"array": array(error.nan_to_num()), "thickness": 1.2, "width": 4, "color": GREY}
        shown = {"y": array(value), "error_y": whiskers, "marker": {"color": colour}, **more}
        template = "%{y:.3g} % %{customdata}"
        return {"type": "bar", "name": name, "x": x, "hovertemplate": template, **shown}

    tests = [f"({pair.accepted:,} of {pair.proposed:,} tests)" for pair in pairs]
    made = bars("swaps made", [pair.observed for pair in pairs], customdata=tests)
    blank = [""] * len(pairs)
    promised = [pair.expected for pair in pairs]
    expected = bars("from the energies", promised, customdata=blank, opacity=0.45)
    tick = {"symbol": "line-ew", "size": 26, "line": {"width": 2, "color": GREY}}
    y = array([100 * pair.allowed for pair in pairs])
    more: Trace = {"mode": "markers", "marker": tick, "customdata": noises}
    more["hovertemplate"] = "%{y:.3g} % (%{customdata})"
    traces = [each for each in (made, expected) if not all(map(math.isnan, each["y"]))]
    ends = [each["y"] + each["error_y"]["array"] for each in (made, expected)]
    top = max([1e-3, *(z for each in (*ends, y) for z in each if z == z)])
    return figure(
        *("Acceptance of every pair of rungs", "pair of rungs", "acceptance, %"),
        [*traces, line("allowed by the noise s", x, y, **more)],
        "Error bars: one standard error. s is the noise of log S.",
        xaxis={"type": "category"},
        yaxis={"range": [0, 1.15 * float(top)]},
        bargap=max(0.3, 0.8 - 0.1 * len(pairs)),
    )


def flow(history: History, *, chain: int = 0, of: str = "") -> Any:
    """How replicas travel: their paths, or of more than a hundred swaps a chain the occupancy."""
    many = int(history.accepted[:, chain].sum()) > MOST_PATHS
    return occupancy(history) if many else paths(history, chain=chain, of=of)


def paths(history: History, *, chain: int = 0, of: str = "") -> Any:
    """The rung of every replica of one chain, swap by swap where all swaps are known."""
    steps, rungs = _path(history, chain)
    n, traces = history.n_rungs, list[Trace]()
    named, order = _in_legend(n, "replicas")
    for replica, colour in enumerate(rung_colours(n)):
        shift = 0.12 * (replica - (n - 1) / 2) / max(1, n - 1)  # lines on a rung lie side by side
        y, style = array(rungs[:, replica] + shift), {"color": colour, "width": 1.4, "shape": "hv"}
        more = {"customdata": array(rungs[:, replica]), "hovertemplate": "rung %{customdata}"}
        more["showlegend"] = replica in named
        traces.append(line(f"replica {replica}", array(steps), y, style, **more))
    ticks = {"tickmode": "linear", "dtick": 1, "range": [-0.4, n - 0.6]}
    which = f"chain {chain + 1} of {history.n_chains}." if history.n_chains > 1 else ""
    note = ": ".join(filter(None, (of, which)))
    names = ("Replicas over rungs", "step", "rung (0 is coldest)")
    return figure(*names, traces, note, order, yaxis=ticks)


def occupancy(history: History) -> Any:
    """The share of the steps that each replica spent on each rung; even is 1 / rungs."""
    share = 100 * rung_occupancy(history).share.value.T  # (rungs, replicas)
    n, names = history.n_rungs, [str(k) for k in range(history.n_rungs)]
    few, blue = n <= MOST_TEXTS, "rgba(47,127,208,{})"
    cells: Trace = {"type": "heatmap", "z": array(share), "x": names, "y": names, "xgap": 2}
    cells |= {"zmin": 0, "zmax": max(200 / n, float(share.max())), "ygap": 2}
    cells |= {"colorscale": [[0, blue.format(0.03)], [1, blue.format(0.6)]], "showscale": not few}
    cells |= {"hovertemplate": "replica %{x} on rung %{y}: %{z:.3g} %<extra></extra>"}
    cells |= {"colorbar": {"ticksuffix": " %", "thickness": 10, "outlinewidth": 0}}
    texts = [  # of the colour that goes with the ground
        {"x": x, "y": y, "text": f"{share[y, x]:.0f} %", "showarrow": False}
        for x, y in itertools.product(range(n), repeat=2)
    ]
    note = f"{int(history.accepted.sum()):,} swaps. Even is {100 / n:.3g} % everywhere. A replica "
    note += f"has the number of its first rung; mean over {history.n_chains:,} chains."
    title, axis = "Share of the steps on each rung", {"type": "category", "showgrid": False}
    more: Trace = {"xaxis": axis, "yaxis": axis, "annotations": texts if few else []}
    labels = ("replica", "rung (0 is coldest)")
    return figure(title, *labels, [cells], note, hovermode="closest", **more)


# Over the steps


def energies(history: History, chains: Mapping[str, int] | None = None) -> Any:
    """Energies of every rung: their running mean for each of the `chains` (by name), and the
    recorded values of the first; its swaps as ticks.
    """
    named = dict(list((chains or {"": 0}).items())[:MOST_LINES])
    first, *_ = shown = list(named.values())
    rows, window = rows_to_keep(history, first), smoothing_window(len(history.steps))
    x, raw = array(history.steps[rows]), history.energy[rows, :, first].double()
    smooth = running_mean(history.energy[:, :, shown].double(), window)[rows]
    least, far = _to_subtract(history.energy[:, :, shown].double())
    raw, smooth = raw - least, smooth - least
    log = bool(far) or (bool((raw > 0).all()) and float(raw.max() / raw.min()) > FAR)
    axis, outside = settled_axis([smooth, raw], log=log)
    traces, (in_legend, order) = list[Trace](), _in_legend(history.n_rungs)
    for rung, colour in reversed(list(enumerate(rung_colours(history.n_rungs)))):
        name = rung_name(rung, history.n_rungs)
        group: Trace = {"legendgroup": str(rung)}
        if window > 1:
            style: Trace = {"color": colour, "width": 0.6}
            y = array(raw[:, rung])
            hidden = line(name, x, y, style, opacity=0.35, hoverinfo="skip", **group)
            traces.append(hidden | {"showlegend": False})
        for k, run in enumerate(named):
            style = {"color": colour, "width": 1.7, "dash": DASHES[k % len(DASHES)]}
            called = f"{name}, {plain(run)}" if k else name
            y = array(smooth[:, rung, k])
            group["showlegend"] = k == 0 and rung in in_legend
            traces.append(line(called, x, y, style, **group))
    smoothed = f"Thick: mean of {window:,} recorded rows." * (window > 1)
    words = [far, order, smoothed, _kept(history, rows)]
    if chains and len(chains) > 1:
        words.append(f"{len(named)} of {len(chains)} runs are drawn, all but the first dashed.")
    swaps = swaps_of(history, first)
    if len(swaps) and axis["range"]:
        some = swaps[torch.linspace(0, len(swaps) - 1, min(len(swaps), MOST_MARKS)).long()]
        cut = f", {len(some):,} of them drawn" * (len(some) < len(swaps))
        words.append(f"Ticks below: {len(swaps):,} swaps{cut}.")
        tick = {"symbol": "line-ns", "size": 9, "line": {"width": 1, "color": GREY}}
        bottom = 10 ** axis["range"][0] if log else axis["range"][0]
        more: Trace = {"mode": "markers", "marker": tick, "hoverinfo": "x", "cliponaxis": False}
        y = array(torch.full(some.shape, bottom))
        traces.append(line("swaps", array(some), y, **more))
    names = (
        "Energies of the rungs",
        "step",
        f"energy{' minus the least' * bool(far)} (nats, summed)",
    )
    return figure(*names, traces, *words, outside, yaxis=axis)


def noise(history: History) -> Any:
    """sigma2 of one energy of every pair: mean over chains with a band of two standard errors."""
    if history.n_pairs == 0:
        raise InvalidArgumentError(f"{history} has one rung, and one rung makes no swaps")
    n = len(history.steps)
    rows = torch.linspace(0, n - 1, min(n, MOST_SMOOTH)).long()
    mean, error = over_chains(history.noise_variance[rows])
    x, traces = array(history.steps[rows]), list[Trace]()
    named, order = _in_legend(history.n_pairs, "pairs")
    for pair, colour in enumerate(rung_colours(history.n_pairs + 1)[:-1]):
        name, style = f"rungs {pair}–{pair + 1}", {"color": colour, "width": 1.6}
        traces += _with_band(name, x, Estimate(mean[:, pair], error[:, pair]), style)
        traces[-1]["showlegend"] = pair in named
    band = torch.where(error.isfinite(), 2 * error, 0.0)
    chains, (axis, outside) = history.n_chains, settled_axis([mean], band=band)
    note = f"Mean of {chains:,} chains, band: two standard errors." * (chains > 1)
    names = ("Noise variance σ² of one energy", "step", "σ² (nats²)")
    return figure(*names, traces, note, order, _kept(history, rows), outside, yaxis=axis)


# The answer, of one method or several: what is drawn, and its colour, by name


def density(
    edges: Tensor, drawn: Mapping[str, Tensor], colours: Mapping[str, str],
    truth: Callable[[Tensor], Tensor]
) -> Any:  # fmt: skip
    """Histogram densities (chains, bins) of rung 0 over the exact one."""
    middle = 0.5 * (edges[1:] + edges[:-1]).double()
    x, fill = array(middle), {"fill": "tozeroy", "fillcolor": "rgba(125,134,140,0.3)"}
    traces = [line("truth", x, array(truth(middle)), {"width": 0}, **fill)]
    for name, style in _styles(colours, drawn).items():
        y = array(drawn[name].double().mean(0))
        traces.append(line(plain(name), x, y, {**style, "shape": "hvh"}))
    note = f"Mean over {', '.join(f'{len(each):,}' for each in drawn.values())} chains."
    title = "Density of rung 0 against the truth"
    return figure(title, "x", "density (per unit of x)", traces, note)


def distance(curves: Mapping[str, tuple[Tensor, Tensor]], colours: Mapping[str, str]) -> Any:
    """W2 between the draws so far and the truth: steps, and values (steps, chains)."""
    traces = list[Trace]()
    for name, style in _styles(colours, curves).items():
        mean, error = over_chains(curves[name][1])
        error = torch.minimum(error, (mean - 1e-9).clamp(min=0) / 2)  # the axis is logarithmic
        traces += _with_band(plain(name), array(curves[name][0]), Estimate(mean, error), style)
    log, note = {"type": "log"}, "Band: two standard errors over chains."
    title = "W2 to the truth against steps"
    return figure(title, "step", "W2 (units of x)", traces, note, xaxis=log, yaxis=log)


def averages(
    curves: Mapping[str, Sequence[float]], colours: Mapping[str, str], *, single: str = ""
) -> Any:
    """Test accuracy (fractions) after 1, 2, ... draws. First draws, and those of the name `single`,
    may lie below the axis.
    """
    traces, late, every = [], list[float](), list[float]()
    for name, style in _styles(colours, curves).items():
        y = 100 * torch.tensor(curves[name], dtype=torch.float64)
        mode, x = "lines" if len(y) > 1 else "markers", array(torch.arange(len(y)) + 1)
        traces.append(line(plain(name), x, array(y), style, mode=mode))
        late += y[len(y) // 20 :].tolist() if name != single else []
        every += y.tolist()
    low, top = min(late, default=0.0), max(every, default=0.0)
    margin = 0.05 * max(top - low, 1.0)
    axis = {"range": [low - margin, top + margin]}
    below = sum(y < low - margin for y in every)
    note = f"{below:,} of {len(every):,} values lie below the axis; a double click shows them."
    few = {"dtick": 1} if max(map(len, curves.values()), default=0) <= MOST_TEXTS else {}
    title, x_title = "Accuracy of the average against number of draws", "draws in the average"
    return figure(
        title, x_title, "test accuracy, %", traces, note * (below > 0), xaxis=few, yaxis=axis
    )


def reliability(
    predictions: Mapping[str, Sequence[Tensor]], labels: Tensor, colours: Mapping[str, str]
) -> Any:
    """Accuracy against confidence, with counts below: probabilities (n, classes) of every seed, all
    of the same examples.

    The seeds are pooled. They share the examples, so a band of two standard errors counts every
    example once.
    """
    diagonal = {"color": GREY, "dash": "dot", "width": 1}
    traces = [line("perfectly calibrated", [0, 100], [0, 100], diagonal)]
    for name, style in _styles(colours, predictions).items():
        seeds = predictions[name]
        bins = calibration(torch.cat(list(seeds)), labels.repeat(len(seeds)), BINS)
        n = bins.n.double() / len(seeds)
        share = (bins.accuracy * n + 2) / (n + 4)  # Agresti and Coull: right for few examples too
        error = 100 * (share * (1 - share) / (n + 4)).sqrt()
        x, of = array(100 * bins.confidence), Estimate(100 * bins.accuracy, error)
        both = _with_band(plain(name), x, of, style, mode="lines+markers")
        traces += both if len(predictions) == 1 else both[-1:]
        middle = 100 * ((BINS * bins.confidence).ceil().clamp(min=1) - 0.5) / BINS
        bar = {"type": "bar", "name": plain(name), "x": array(middle), "y": array(n), "yaxis": "y2"}
        bar |= {"marker": {"color": style["color"]}, "opacity": 0.6, "showlegend": False}
        traces.append(bar | {"hovertemplate": "%{y:,.4g} examples"})
    pooled = ", ".join(f"{len(each)}" for each in predictions.values())
    note = (
        f"{len(labels):,} examples, seeds pooled: {pooled}. Below: examples in each of {BINS} bins."
    )
    note += " Band: two standard errors." * (len(predictions) == 1)
    axes: Trace = {
        "xaxis": {"range": [0, 101], "anchor": "y2"},
        "yaxis": {"range": [-2, 102], "domain": [0.3, 1]},
        "yaxis2": {"domain": [0, 0.2], "title": {"text": "examples"}, "nticks": 3},
    }
    names = ("Reliability", "probability of the predicted class, %", "right, %")
    return figure(*names, traces, note, **axes)


# Parts


def figure(title: str, x: str, y: str, traces: Sequence[Trace], *notes: str, **layout: Any) -> Any:
    """A figure with our template; the notes are its subtitle."""
    note = "<br>".join(textwrap.wrap(plain(" ".join(filter(None, notes))), 110))
    made = import_extra("plotly.graph_objects", "report").Figure(list(traces))
    made.update_layout(template=template(), title={"text": title, "subtitle": {"text": note}})
    return made.update_layout(xaxis_title_text=x, yaxis_title_text=y, **layout)


def line(name: str, x: Any, y: Any, style: Mapping[str, Any] | None = None, **more: Any) -> Trace:
    return {"type": "scatter", "name": name, "x": x, "y": y, "mode": "lines", "line": style, **more}


def _styles(colours: Mapping[str, str], names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Lines of one colour in one figure differ in their dashes."""
    used, styles = Counter[str](), {}
    for name in names:
        dash = DASHES[used[colours[name]] % len(DASHES)]
        styles[name] = {"color": colours[name], "dash": dash, "width": 1.6}
        used[colours[name]] += 1
    return styles


def _with_band(
    name: str, x: Any, of: Estimate, style: Mapping[str, Any], *, mode: str = "lines"
) -> list[Trace]:
    """A line, under it two standard errors on either side where they are known."""
    group = {"legendgroup": name}
    marker = {"color": style["color"]}
    traces = [line(name, x, array(of.value), style, mode=mode, marker=marker, **group)]
    known = of.error.isfinite()
    if bool(known.any()):
        wide = torch.where(known, 2 * of.error, 0.0)
        red, green, blue = (int(style["color"][k : k + 2], 16) for k in (1, 3, 5))
        fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.2)"}
        edge = {"showlegend": False, "hoverinfo": "skip", **group}
        ends = [array(of.value - wide), array(of.value + wide)]
        bands = [
            line(name, x, ends[k], {"width": 0}, **edge, **(fill if k else {})) for k in (0, 1)
        ]
        traces = bands + traces
    return traces


def array(values: Any) -> Any:
    """A numpy array of few bytes; Plotly writes it in base64."""
    found = torch.as_tensor(values)
    return found.float().numpy() if found.is_floating_point() else found.int().numpy()


def settled_axis(
    values: Sequence[Tensor], *, log: bool = False, band: Tensor | float = 0.0
) -> tuple[dict[str, Any], str]:
    """A y axis for series (rows, ...), and in words what lies outside: a burn-in or single values
    that would hide the rest. The middle 99 % of the values after the first tenth are inside, with
    the `band` on either side of them.
    """
    kind = "log" if log else "linear"

    def known(part: Sequence[Tensor]) -> Tensor:
        every = torch.cat([x.double().flatten() for x in part])
        every = every[every.isfinite() & ((every > 0) if log else True)]
        return every.log10() if log else every

    every, ends = known(values), [x + side * band for x in values for side in (-1, 1)]
    late = known([x[math.ceil(BURN_IN * len(x)) :] for x in ends])
    if not len(late):
        return {"type": kind, "range": None}, ""
    low, high = late.sort().values[[int(part * (len(late) - 1)) for part in MIDDLE]].tolist()
    least, most = (float(each) for each in known(ends).aminmax())
    if most - least <= SPOILT * (high - low):
        low, high = least, most
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 0.5
    low, high = low - margin, high + margin
    outside = int(((every < low) | (every > high)).sum())
    words = f"{outside:,} of {len(every):,} values lie outside; a double click shows them."
    return {"type": kind, "range": [low, high]}, words if outside else ""


def _kept(history: History, rows: Tensor) -> str:
    n = len(history.steps)
    return f"{len(rows):,} of {n:,} recorded rows are drawn." * (len(rows) < n)


def rung_colours(n: int) -> list[str]:
    """From blue, the coldest, through green to red."""
    at, known = np.linspace(0, len(RUNGS) - 1, n), np.arange(len(RUNGS))
    parts = [np.interp(at, known, part).round().astype(int) for part in zip(*RUNGS, strict=True)]
    return ["#{:02x}{:02x}{:02x}".format(*each) for each in zip(*parts, strict=True)]


def _in_legend(n: int, things: str = "rungs") -> tuple[list[int], str]:
    """Which of many rungs a legend names, the coldest and the hottest among them, and a note."""
    named = np.linspace(0, n - 1, min(n, MOST_NAMED)).round().astype(int).tolist()
    words = f"The legend names {len(named)} of {n} {things}; colours go from blue to red in order."
    return named, words * (len(named) < n)


def _to_subtract(energy: Tensor) -> tuple[float, str]:
    """The least energy (rows, rungs, chains) and words, if the medians of the rungs lie so far
    apart above it that only a logarithmic axis shows them all; else 0 and none.
    """
    least = float(energy.nan_to_num(math.inf).min())
    above = energy[int(BURN_IN * len(energy)) :, :, 0].nanmedian(0).values - least
    far = float(above.max()) > FAR * float(above.min()) and math.isfinite(least)
    return (least, f"The least recorded energy, {least:,.7g}, is subtracted.") if far else (0.0, "")


def swaps_of(history: History, chain: int = 0) -> Tensor:
    """The steps at which one chain swapped; of draws none is known."""
    if history.swaps is None:
        return torch.zeros(0, dtype=torch.long)
    return history.swaps.step[history.swaps.chain == chain]


def _path(history: History, chain: int) -> tuple[Tensor, Tensor]:
    """Steps, and the rung of each replica from then on (steps, replicas)."""
    if history.swaps is None:
        rows = rows_to_keep(history, chain)
        return history.steps[rows], history.replica_at[rows, :, chain].long().argsort(dim=1)
    when = swaps_of(history, chain)
    moves = replay(history, chain)[:, :, 0]  # one row more than there are swaps after the first row
    when = when[len(when) - len(moves) + 1 :]
    steps = torch.cat([history.steps[:1], when, torch.tensor([history.n_steps - 1])])
    return steps, torch.cat([moves, moves[-1:]])


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
    for begin, end in itertools.pairwise(edges):
        if end > begin:
            part = energy[begin:end]
            kept.update((begin + part.argmin(0)).tolist() + (begin + part.argmax(0)).tolist())
    for swap in swaps_of(history, chain)[:SWAPS_IN_FULL].tolist():
        row = int(torch.searchsorted(history.steps, swap))
        kept.update(range(max(0, row - NEAR_A_SWAP), min(n, row + NEAR_A_SWAP + 1)))
    return torch.tensor(sorted(kept))
