"""Figure 1 of the paper from run folders: four panels, and a table next to the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from torchrex.diagnostics import over_chains
from torchrex.experiments import RunFolder
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.posterior import Draws
from torchrex.report.plots import log_axis, look, panels
from torchrex.report.tables import markdown_table, pool_seeds, value_and_error

Configs = Mapping[str, MixtureConfig]
Folders = Mapping[str, Sequence[RunFolder]]  # by recipe, one for each seed
Runs = list[tuple[MixtureConfig, Sequence[RunFolder]]]
NOTES = ()
COLUMNS = ("case", "method", "paper acc. %", "ours acc. %", "sigma2", "left weight", "W1", "W2")
NOISES = {"case1": "noise N(0, 2²)", "case2": "noise t(5)", "case3": "noise 7·t(10)"}
POINTS = 400  # of a path
SHOWN = ("acceptance_rate", "noise_variance", "left_weight", "w1", "w2")  # with their errors


def label_of(config: MixtureConfig) -> str:
    """The method's name as the paper writes it."""
    if config.n_rungs == 1:
        return "SGLD"
    if math.isinf(config.correction_factor):
        return "naive reSGLD"
    return f"reSGLD, F={config.correction_factor:g}" if "case3" in config.recipe else "reSGLD"


def rows(configs: Configs, folders: Folders) -> list[dict[str, Any]]:
    """One row per recipe, with standard errors over independent runs; seeds are pooled."""
    return [
        {
            "recipe": name,
            "case": name.split("/")[1].split("-")[0],
            "method": label_of(config),
            "paper_acceptance_rate": config.paper.get("acceptance_rate"),
            "n_steps": config.n_steps,
            "n_runs": config.n_runs * len(folders[name]),
            **pool_seeds([folder.result or {} for folder in folders[name]]),
        }
        for name, config in configs.items()
    ]


def cells(row: dict[str, Any]) -> list[str]:
    """One row as text, for the columns above."""
    paper = row["paper_acceptance_rate"]
    rates = ("acceptance_rate", "acceptance_rate_se")
    row = row | {name: 100 * row[name] for name in rates if row.get(name) is not None}
    return [
        row["case"].removeprefix("case"),
        row["method"].replace(", ", " "),
        "" if paper is None else ("none" if paper == 0 else f"{100 * paper:g}"),
        *(value_and_error(row.get(name), row.get(f"{name}_se")) for name in SHOWN),
    ]


def as_table(table_rows: list[dict[str, Any]]) -> Table:
    """Acceptance in percent next to the paper's, then how close the draws are to the truth."""
    table = Table(
        title="Figure 1: mean over independent runs (standard error of the last digit)",
        caption="acc.: accepted swaps; true left weight: 0.400; W1, W2: distance to the truth",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in COLUMNS:
        head = "" if column == "case" else column.replace(" ", "\n", 1)
        text = column in ("case", "method")
        table.add_column(head, justify="left" if text else "right", no_wrap=True)
    for k, row in enumerate(table_rows):
        if k and row["case"] != table_rows[k - 1]["case"]:
            table.add_section()
        table.add_row(*cells(row))
    return table


def as_markdown(table_rows: list[dict[str, Any]]) -> str:
    return "\n".join(markdown_table(COLUMNS, map(cells, table_rows))) + "\n"


def draw(configs: Configs, folders: Folders, path: Path) -> None:
    """A row for each case: single runs, and the mean over runs; last the distance to the truth."""
    by_case: dict[str, Runs] = {}
    for name, config in configs.items():
        case = name.split("/")[1].split("-")[0]
        by_case.setdefault(case, []).append((config, folders[name]))
    distances = list(by_case)[:2]  # of case 3 the densities say it
    n_rows = len(by_case) + 1
    with panels(path, n_rows, 2, (7.5, 2.7 * n_rows)) as (_, axes):
        for row, (case, runs) in zip(axes, by_case.items(), strict=False):
            n_runs = runs[0][0].n_runs * len(runs[0][1])
            name = f"Case {case.removeprefix('case')}"
            plot_paths(runs, row[0])
            row[0].set_title(f"{name}, {NOISES[case]}: one run of each")
            plot_densities(runs, row[1])
            row[1].set_title(f"{name}: mean of {n_runs} runs")
        for axis, case in zip(axes[-1], distances, strict=False):
            plot_distances(by_case[case], axis)
            axis.set_title(f"Case {case.removeprefix('case')}: distance to the truth")


def plot_paths(runs: Runs, axis: Any) -> None:
    """The draws of the first run of every method against steps, one method above the other."""
    low, high = min(runs[0][0].means) - 2, max(runs[0][0].means) + 2
    for place, (config, folders) in enumerate(runs[::-1]):
        draws = Draws.load(folders[0].path / "draws.safetensors")
        some = slice(None, None, max(1, draws.n_draws // POINTS))
        x = (draws.values[0, some, 0] - low) / (high - low)
        style = look(label_of(config)).line | {"ls": "-", "lw": 0.5}
        axis.plot(draws.steps[some] / 1000, place + 0.9 * x, **style)
    middles = [place + 0.45 for place in range(len(runs))]
    labels = [label_of(config).replace(" re", "\nre") for config, _ in runs[::-1]]
    axis.set_yticks(middles, labels, fontsize=8.5)
    axis.set_yticks(range(1, len(runs)), minor=True)
    axis.grid(axis="y", which="major", visible=False)
    axis.grid(axis="y", which="minor", color="0.8")
    axis.tick_params(axis="y", which="both", length=0)
    axis.set(xlabel="steps (thousands)", ylim=(-0.05, len(runs)))


def plot_densities(runs: Runs, axis: Any) -> None:
    """Histogram density of rung 0, mean over runs, against the exact density; SGLD does not move in
    case 3 and is left out there.

    A mean over runs that each stay in one mode can look right, so the legend says how far a single
    run is (W1).
    """
    for config, folders in runs:
        label, traces = label_of(config), [folder.trace() for folder in folders]
        edges, density = traces[0]["edges"], torch.cat([trace["density"] for trace in traces])
        if "case3" in config.recipe and label == "SGLD":
            continue
        w1 = pool_seeds([folder.result or {} for folder in folders])["w1"]
        middle, named = 0.5 * (edges[1:] + edges[:-1]), f"{label}  (W1 {w1:.2f})"
        axis.plot(middle, density.mean(0), **look(label).line, label=named)
    x = torch.linspace(float(edges[0]), float(edges[-1]), 401, dtype=torch.float64)
    truth = config.exact_density()(x)
    axis.fill_between(x, truth, color="0.85", label="truth", lw=0, zorder=0)
    axis.set(xlabel="x", ylabel="density", ylim=(0, 1.75 * float(truth.max())))
    axis.legend(loc="upper left")


def plot_distances(runs: Runs, axis: Any) -> None:
    """Mean over runs with two standard errors."""
    for config, folders in runs:
        label, traces = label_of(config), [folder.trace() for folder in folders]
        steps, style = traces[0]["curve_steps"], look(label).line
        mean, error = over_chains(torch.cat([trace["w2"] for trace in traces], dim=1))
        axis.plot(steps, mean, **style, label=label)
        band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
        axis.fill_between(steps, mean - 2 * error, mean + 2 * error, **band)
    axis.set(xscale="log", xlabel="steps", ylabel="W2 (units of x)")
    log_axis(axis)
    axis.legend(loc="lower left")
