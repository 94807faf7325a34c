"""Section 4 of the paper from run folders: statements next to measurements, and eight panels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from torchrex.experiments import RunFolder
from torchrex.experiments.theory import TheoryConfig
from torchrex.report.plots import GREEN, PURPLE, Look, log_axis, look, panels
from torchrex.report.tables import markdown_page, markdown_table, missing_words, value_and_error
from torchrex.runs.folder import seed_in

HEADS = ("statement of the paper", "computed", "measured", "agrees?")
ORIGIN = ("seed", "date", "wall_seconds", "device", "versions")
ALONE, NAIVE, CORRECTED = (look(name).line for name in ("SGLD", "naive reSGLD", "reSGLD"))
BY_FACTOR = [look(name) for name in ("reSGLD", "reSGLD, F=2", "reSGLD, F=4", "naive reSGLD")]
LAWS = (("black", "-"), ("#5b3f8c", "--"), (PURPLE, "-."), ("#c3a8e8", ":"))  # to heavier tails
BY_LAW = [Look(color, dash, marker) for (color, dash), marker in zip(LAWS, "osv^", strict=True)]
CONFIDENCE = 2.26  # 95 % of Student's t with 9 degrees of freedom: ten groups of runs


def numbers(out: Path, chosen: Mapping[str, TheoryConfig]) -> dict[str, Any]:
    """The finished run of every recipe with the lowest seed, and the rows of the table."""
    data: dict[str, Any] = {}
    unfinished = []
    for name in chosen:
        found = [RunFolder(path) for path in (out / name).glob("seed=*") if path.is_dir()]
        found = sorted(found, key=lambda folder: seed_in(folder.path) or 0)
        done = [folder for folder in found if folder.finished]
        unfinished += [str(folder.path) for folder in found if not folder.finished]
        if done:
            result = done[0].result or {}
            kept = {key: result[key] for key in (*ORIGIN, "metrics", "curves") if key in result}
            data[name.split("/")[1]] = {"config": done[0].config, **kept}
    return {"data": data, "rows": rows(data), "unfinished": unfinished}


def rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Statement, what the exact law gives, what the runs give, and whether they agree."""
    found: list[Sequence[str]] = []
    for name, words in (
        ("acceleration", _acceleration),
        ("discretisation", _discretisation),
        ("noise", _noise),
        ("variance", _variance),
    ):
        if name in data:
            found += words(data[name]["metrics"], data[name]["curves"], data[name]["config"])
    return [dict(zip(HEADS, row, strict=True)) for row in found]


def _acceleration(m: Any, c: Any, config: Any) -> list[Sequence[str]]:
    r, plane = c["runs_r"], c["plane_runs_r"]
    k = p = -1  # the largest r
    chi2, w2 = _with_errors(c, "chi2_rate"), _with_errors(c, "w2_rate")
    flat = _with_errors(c, "plane_chi2_rate")
    rate, delta = [c["rate"][c["r"].index(each)] for each in r], c["delta"]
    plane_rate = [c["plane_rate"][c["plane_r"].index(each)] for each in plane]
    near = np.abs(np.array(c["plane_chi2_rate"]) / plane_rate - 1).max()
    z, z_w2 = (
        _largest_z(c[name], c[f"{name}_se"], c[f"{name}_exact"])
        for name in ("chi2_rate", "w2_rate")
    )
    faster = c["chi2_rate"][k] - c["chi2_rate"][0] > 5 * c["chi2_rate_se"][k]
    top = int(np.argmax(delta))
    return [
        (
            "Lemma 2: with swaps the distance to the law falls faster",
            f"double well: gap {rate[0]:.3f} at r = 0, {rate[k]:.3f} at r = {r[k]:g}",
            f"chi-square {chi2[0]}, {chi2[k]}; at most {z:.1f} standard errors from the exact law",
            _verdict(faster and z < 4),
        ),
        (
            "the same in two dimensions",
            f"gap {plane_rate[0]:.3f} at r = 0, {plane_rate[p]:.3f} at r = {plane[p]:g}",
            f"chi-square {flat[0]}, {flat[p]}; at most {100 * near:.0f} % from the gap",
            _verdict(near < 0.1),
        ),
        (
            "Lemma 2: the distance that falls so is W2",
            f"{c['w2_rate_exact'][k]:.3f} at r = {r[k]:g} in the same time, less than the gap",
            f"{w2[k]}; at most {z_w2:.1f} standard errors from the exact law",
            "as a bound",
        ),
        (
            "Lemma 2: swaps multiply the rate of the bound by 1 + delta_S",
            f"1 + delta_S = {1 + delta[k]:.3f} at r = {r[k]:g}",
            f"the rate of the runs: by {c['chi2_rate'][k] / c['chi2_rate'][0]:.2f}",
            "as a bound, far from sharp",
        ),
        (
            "After theorem 1: a larger swapping rate boosts delta_S",
            f"delta_S = {delta[top]:.3f} at r = {r[top]:g}, {delta[-1]:.3f} at r = {r[-1]:g}",
            f"rates {chi2[top]} and {chi2[-1]}",
            "yes" if top == len(r) - 1 else "no: the rate grows, delta_S does not",
        ),
    ]


def _discretisation(m: Any, c: Any, config: Any) -> list[Sequence[str]]:
    found: list[Sequence[str]] = []
    for name, words in (
        ("with", "Theorem 1: at a fixed time, lr costs at most O(lr^0.5) in W2 (with swaps)"),
        ("to_limit", "the same without swaps, to the law of the diffusion at that time"),
    ):
        value, half = m[f"slope_{name}"], CONFIDENCE * m[f"slope_{name}_se"]
        sharp = abs(value - 0.5) < half
        verdict = "yes, and sharp" if sharp else "as a bound: better than stated"
        found.append(
            (
                words,
                f"slope {m[f'slope_{name}_exact']:.2f}",
                f"slope {value:.2f} (95 %: {value - half:.2f} to {value + half:.2f})",
                verdict if value + half > 0.5 else "no",
            )
        )
    last = value_and_error(c["without"][-1], c["without_se"][-1])
    swapped = value_and_error(c["with"][-1], c["with_se"][-1])
    found.append(
        (
            f"Theorem 1: at time {m['time']:g} what is left of the decay is added",
            f"W2 to the target without swaps: {m['limit']:.3f} for lr to 0",
            f"{last} without, {swapped} with swaps at lr {c['lr'][-1]:g}",
            "yes",
        )
    )
    return found


def _noise(m: Any, c: Any, config: Any) -> list[Sequence[str]]:
    inverse, names = c["runs_inverse_factor"], ("chain", "runs", "runs_se")
    one, naive = inverse.index(1.0), inverse.index(0.0)
    exact, runs, error = (np.array(c[f"{name}_by_std"]) for name in names)
    laws = [np.array(c[f"{name}_by_factor"]) for name in names]  # Gaussian first
    weight = 1 / error[one] ** 2
    away, spread = np.average((runs - exact)[one], weights=weight), 1 / math.sqrt(weight.sum())
    z = _largest_z(runs, error, exact)
    z_tails = _largest_z(laws[1][1:], laws[2][1:], laws[0][1:])
    biases = {k: value_and_error(laws[1][0][k], laws[2][0][k]) for k in (one, naive)}
    sigma, computed, gap = f"{config['std']:g}", c["bias_by_factor"][0], c["rate_by_factor"]
    return [
        (
            "Section 3.2: F = 1 is unbiased under Gaussian noise, whatever sigma",
            f"left weight off by {max(map(abs, c['bias_by_std'][one])):.5f} at most",
            f"{value_and_error(away, spread)} from the exact law of the chain (which is off by "
            f"{m['chain_offset']:.4f} by lr {config['lr']:g} alone)",
            _verdict(abs(away) < 4 * spread),
        ),
        (
            "Section 3.1: naive swaps are biased",
            f"sigma {sigma}: left weight off by {laws[0][0][naive]:.4f} in the chain",
            f"{biases[naive]}; all F and sigma: at most {z:.1f} standard errors from the exact law",
            _verdict(z < 4),
        ),
        (
            "Theorem 1: noise costs at most (E psi^2)^(1/4) in W2, so sigma^0.5 if small",
            f"naive: sigma^{m['naive_slope']:.2f}; F = 1: nothing, though psi is not 0",
            "",
            "as a bound, far from sharp",
        ),
        (
            "After theorem 1: a larger F accelerates more and injects more bias",
            f"sigma {sigma}: gap {gap[-1]:.3f} at F = 1, {gap[0]:.3f}"
            f" naive; bias {computed[-1]:.4f}, {computed[0]:.4f}",
            f"bias {biases[one]}, {biases[naive]}",
            "yes",
        ),
        (
            "Section 3.2 assumes normal noise; heavier tails of the same variance at F = 1",
            f"t({c['degrees'][-1]:g}): off by {laws[0][-1][one]:.4f}, corrected too much",
            f"{value_and_error(laws[1][-1][one], laws[2][-1][one])}; all t and F: at most "
            f"{z_tails:.1f} standard errors from the exact law",
            "no claim; biased" if z_tails < 4 else "no",
        ),
    ]


def _variance(m: Any, c: Any, config: Any) -> list[Sequence[str]]:
    slopes = {
        name: value_and_error(m[f"slope_{name}"], m[f"slope_{name}_se"])
        for name in ("mean", "mean_t5", "mean_t3")
    }
    near = abs(m["slope_mean"] + 1) < CONFIDENCE * m["slope_mean_se"]
    last, exact = c["smoothing"][-1], c["smoothing_exact"][-1]
    return [
        (
            "Section 3.3: the running mean's error is O(1/m) after m steps, by the CLT",
            "m^-0.5; the mean square is O(1/m)",
            f"m^{slopes['mean']}; t(5): m^{slopes['mean_t5']}",
            "yes" if near else "no: the CLT gives m^-0.5",
        ),
        (
            "the same under t(3), which has no fourth moment (median)",
            "m^(-1/3) for large m",
            f"m^{slopes['mean_t3']}",
            "no claim; slower",
        ),
        (
            f"Section 3.3: a fixed smoothing factor {config['gamma']:g} is less robust",
            f"the error stays at {exact:.3f} of sigma2",
            value_and_error(last, c["smoothing_se"][-1]),
            _verdict(abs(last - exact) < 4 * c["smoothing_se"][-1]),
        ),
    ]


def _with_errors(curves: Any, name: str) -> list[str]:
    return [value_and_error(*each) for each in zip(curves[name], curves[f"{name}_se"], strict=True)]


def _largest_z(found: Any, error: Any, exact: Any) -> float:
    return float(np.max(np.abs(np.array(found) - np.array(exact)) / np.array(error)))


def _verdict(agrees: bool) -> str:
    return "yes" if agrees else "no"


# Words


def _cells(found: Mapping[str, Any]) -> list[list[str]]:
    return [[row[head] for head in HEADS] for row in found["rows"]]


def as_table(found: Mapping[str, Any], console: Console) -> Table:
    table = Table(*HEADS, show_lines=True, title="Section 4 of the paper, measured")
    for row in _cells(found):
        table.add_row(*row)
    return table


def notes(found: Mapping[str, Any]) -> list[str]:
    said = (
        "0.410(2): the standard error applies to the last digit, over groups of independent runs."
    )
    return [said, *missing_words((), found["unfinished"])]


def as_markdown(found: Mapping[str, Any]) -> str:
    table = markdown_table(HEADS, _cells(found))
    return markdown_page("Section 4 of the paper, measured", table, notes(found))


# Picture


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Lines are computed, points are runs with bars of two standard errors."""
    plots = {
        "acceleration": (
            plot_rates,
            partial(plot_decay, "w2", "W2"),
            partial(plot_decay, "chi2", "chi-square"),
        ),
        "discretisation": (plot_lr,),
        "noise": (plot_std, plot_laws, plot_trade),
        "variance": (plot_variance,),
    }
    data = found["data"]
    shown = [(plot, data[name]) for name in plots if name in data for plot in plots[name]]
    n_rows = math.ceil(len(shown) / 2)
    with panels(path, n_rows, 2, (8, 3.2 * n_rows)) as (_, axes):
        for k, (axis, (plot, of)) in enumerate(zip(axes.flat, shown, strict=False)):
            title = plot(of["metrics"], of["curves"], of["config"], axis)
            axis.set_title(f"({chr(97 + k)}) {title}")
            axis.legend(fontsize=8)


def _points(axis: Any, x: Any, y: Any, error: Any, style: Any, **more: Any) -> None:
    shape = {"marker": "o", "ms": 4, "capsize": 2, "elinewidth": 1}
    axis.errorbar(x, y, 2 * np.array(error), **{**shape, **style, "ls": "", **more})


def plot_rates(m: Any, c: Any, config: Any, axis: Any) -> str:
    color = CORRECTED["color"]
    axis.plot(c["r"], c["rate"], color=color, label="double well: gap of the generator")
    axis.plot(c["plane_r"], c["plane_rate"], "--", color=color, label="two dimensions: gap")
    axis.axhline(c["rate"][0], **ALONE, label="double well without swaps: gap")
    bound = c["rate"][0] * (1 + np.array(c["delta"]))
    axis.plot(c["runs_r"], bound, "-.", color="black", lw=1, label="(1 + $\\delta_S$) times that")
    for name, runs_r, marker, fill, words in (
        ("chi2", "runs_r", "o", color, "double well, chi-square"),
        ("w2", "runs_r", "^", "white", "double well, W2"),
        ("plane_chi2", "plane_runs_r", "s", "white", "two dimensions, chi-square"),
    ):
        runs = (c[runs_r], c[f"{name}_rate"], c[f"{name}_rate_se"])
        _points(axis, *runs, CORRECTED, marker=marker, mfc=fill, label=f"runs: {words}")
    axis.set_xscale("symlog", linthresh=0.1, linscale=0.4)
    axis.set(xlabel="swap intensity r", ylabel="rate of decay", ylim=(0, 1.45))
    return "swaps accelerate"


def plot_decay(what: str, words: str, m: Any, c: Any, config: Any, axis: Any) -> str:
    shades = ("#9ecae1", "#4f9fc0", CORRECTED["color"])
    styles = [ALONE, *({"color": shade, "ls": "-"} for shade in shades)]
    shown = np.unique(np.linspace(0, len(c["runs_r"]) - 1, len(styles)).round().astype(int))
    for style, k in zip(styles, shown, strict=False):
        y, error, time = (np.array(each) for each in (c[what][k], c[f"{what}_se"][k], c["time"]))
        axis.plot(time, c[f"{what}_exact"][k], **style, lw=1.4)
        clear = (y > 3 * error) & (np.arange(len(y)) % 2 == 0)
        name = f"r = {c['runs_r'][k]:g}" if c["runs_r"][k] else "no swaps"
        _points(axis, time[clear], y[clear], error[clear], style, label=name)
    axis.set(xlabel="time", ylabel=f"{words} of rung 0 to the target")
    log_axis(axis)
    return f"{words} over time; lines: exact law"


def plot_lr(m: Any, c: Any, config: Any, axis: Any) -> str:
    lr = np.array(c["lr"])
    for name, style, marker, words in (
        ("without", ALONE, "s", "no swaps, to the target"),
        ("with", CORRECTED, "o", "swaps, to the target"),
        ("to_limit", {"color": GREEN, "ls": "--"}, "^", "no swaps, to the diffusion"),
    ):
        axis.plot(lr, c[f"{name}_exact"], **style, lw=1.4)
        _points(axis, lr, c[name], c[f"{name}_se"], style, marker=marker, label=words)
    guide = c["with_exact"][0] * np.sqrt(lr / lr[0])
    axis.plot(lr, guide, ":", color="black", lw=1, label="slope 1/2, the bound's")
    axis.set(xscale="log", xlabel="learning rate")
    log_axis(axis)
    axis.set_xticks(lr, [f"{each:g}" for each in lr], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_ylabel(f"W2 of rung 0 at time {m['time']:g}")
    return "discretisation"


def _biases(c: Any, line: str, runs: str, by: str, names: Any, styles: Any, axis: Any) -> None:
    for k, (name, style) in enumerate(zip(names, styles, strict=False)):
        axis.plot(c[line], c[f"bias_{by}"][k], **style.line, lw=1.4)
        axis.plot(c[runs], c[f"chain_{by}"][k], "_", color=style.color, ms=12)
        _points(axis, c[runs], c[f"runs_{by}"][k], c[f"runs_se_{by}"][k], style.points, label=name)
    axis.axhline(0, color="0.8", lw=0.8, zorder=0)
    axis.set_ylabel("bias of the left weight")


def _factors(c: Any) -> list[str]:
    return [f"F = {1 / each:g}" if each else "naive" for each in c["runs_inverse_factor"]]


def plot_std(m: Any, c: Any, config: Any, axis: Any) -> str:
    _biases(c, "std", "runs_std", "by_std", _factors(c), BY_FACTOR, axis)
    axis.set_xlabel("sigma of one energy's noise")
    return f"Gaussian noise (dashes: chain at lr {config['lr']:g})"


def plot_laws(m: Any, c: Any, config: Any, axis: Any) -> str:
    names = ["Gaussian", *(f"t({degrees:g})" for degrees in c["degrees"])]
    _biases(c, "inverse_factor", "runs_inverse_factor", "by_factor", names, BY_LAW, axis)
    axis.set_xlabel("1 / F (0: naive, 1: corrected)")
    return f"laws of noise with sigma {config['std']:g}"


def plot_trade(m: Any, c: Any, config: Any, axis: Any) -> str:
    curve = (c["bias_by_factor"][0], c["rate_by_factor"])
    axis.plot(*curve, color="0.5", lw=1.2)
    for name, style, each in zip(_factors(c), BY_FACTOR, c["runs_inverse_factor"], strict=False):
        at = (np.interp(each, c["inverse_factor"], values) for values in curve)
        axis.plot(*at, **style.points, ms=7, label=name)
    axis.set(xlabel="bias of the left weight", ylabel="rate of decay")
    return f"what F trades, sigma {config['std']:g} (computed)"


def plot_variance(m: Any, c: Any, config: Any, axis: Any) -> str:
    steps = np.array(c["m"])
    for name, style, fill, words in (
        ("smoothing", BY_LAW[0]._replace(dash="--"), "white", "smoothing, Gaussian"),
        ("mean_t3", BY_LAW[3], None, "running mean, t(3), median"),
        ("mean_t5", BY_LAW[2], None, "running mean, t(5)"),
        ("mean", BY_LAW[0], None, "running mean, Gaussian"),
    ):
        if f"{name}_exact" in c:
            axis.plot(steps, c[f"{name}_exact"], **style.line, lw=1.4)
        _points(axis, steps, c[name], c[f"{name}_se"], style.points, mfc=fill, label=words)
    guide = c["mean"][0] / steps
    seen = guide > 0.3 * min(c["mean"])
    axis.plot(steps[seen], guide[seen], ":", color="black", lw=1, label="1 / m, the paper's")
    axis.set(xscale="log", xlabel="SA steps m", ylabel="error of sigma2, relative")
    log_axis(axis)
    axis.set_ylim(top=15)  # space for the legend
    return "adaptive sigma2"
