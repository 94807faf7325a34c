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
from torchrex.report.findings import value_and_error
from torchrex.report.tables import markdown_table, panels, pool_seeds

Configs = Mapping[str, MixtureConfig]
Folders = Mapping[str, Sequence[RunFolder]]  # by recipe, one for each seed
Runs = list[tuple[MixtureConfig, Sequence[RunFolder]]]
NOTES = ()
COLUMNS = ("case", "method", "paper acc. %", "ours acc. %", "sigma2", "left weight", "W1", "W2")
SHOWN = ("acceptance_rate", "noise_variance", "left_weight", "w1", "w2")  # with their errors
# Distinct in grey as well: a line style goes with every colour.
STYLES = {
    "SGLD": {"color": "#999999", "linestyle": ":"},
    "naive reSGLD": {"color": "#d95f02", "linestyle": "--"},
    "reSGLD": {"color": "#1b6ca8", "linestyle": "-"},
    "reSGLD, F=1": {"color": "#999999", "linestyle": ":"},
    "reSGLD, F=2": {"color": "#1b6ca8", "linestyle": "-"},
    "reSGLD, F=4": {"color": "#7b5aa6", "linestyle": "-."},
}


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
    """Densities of the three cases against the truth, and distance to the truth against steps."""
    shown = [
        ("case1", plot_densities, "(a) case 1: noise N(0, 2²)"),
        ("case1", plot_distances, "(b) case 1: distance to the truth"),
        ("case2", plot_densities, "(c) case 2: noise t(5)"),
        ("case3", plot_densities, "(d) case 3: noise 7·t(10)"),
    ]

    def of(case: str) -> Runs:
        names = [name for name in configs if f"/{case}-" in name]
        return [(configs[name], folders[name]) for name in names]

    shown = [panel for panel in shown if of(panel[0])]
    with panels(path, 1, len(shown), (4 * len(shown), 3.8), dpi=130) as (_, axes):
        for axis, (case, plot, title) in zip(axes[0], shown, strict=True):
            plot(of(case), axis)
            axis.set_title(title, fontsize=11)


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
        middle = 0.5 * (edges[1:] + edges[:-1])
        named = f"{label}  (W1 {w1:.2f})"
        axis.plot(middle, density.mean(0), **STYLES[label], label=named, linewidth=1.6)
    x = torch.linspace(float(edges[0]), float(edges[-1]), 801, dtype=torch.float64)
    truth = config.exact_density()(x)
    axis.fill_between(x, truth, color="0.88", label="truth", zorder=0)
    axis.set(xlabel="x", ylabel="density", ylim=(0, 1.45 * float(truth.max())))
    axis.legend(fontsize=8, frameon=False)


def plot_distances(runs: Runs, axis: Any) -> None:
    for config, folders in runs:
        label, traces = label_of(config), [folder.trace() for folder in folders]
        steps = traces[0]["curve_steps"]
        mean, error = over_chains(torch.cat([trace["w2"] for trace in traces], dim=1))
        axis.plot(steps, mean, **STYLES[label], linewidth=1.6, label=label)
        band = {"color": STYLES[label]["color"], "alpha": 0.2, "linewidth": 0}
        axis.fill_between(steps, mean - 2 * error, mean + 2 * error, **band)
    axis.set(xscale="log", yscale="log", xlabel="steps", ylabel="W2 to the truth (units of x)")
    axis.legend(fontsize=8, frameon=False)
