"""Figure 1 of the paper from run folders: the four panels and the table, ours beside the paper's
numbers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from torchrex.errors import MissingDependencyError
from torchrex.experiments import RunFolder
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.report.tables import pool_seeds, value_and_error

Runs = dict[
    str, tuple[MixtureConfig, list[RunFolder]]
]  # recipe -> its config and one folder per seed

# Distinct in grey as well: a line style goes with every colour.
STYLES = {
    "SGLD": ("#999999", ":"),
    "naive reSGLD": ("#d95f02", "--"),
    "reSGLD": ("#1b6ca8", "-"),
    "reSGLD, F=1": ("#999999", ":"),
    "reSGLD, F=2": ("#1b6ca8", "-"),
    "reSGLD, F=4": ("#7b5aa6", "-."),
}


def label_of(config: MixtureConfig) -> str:
    """The method's name as the paper writes it."""
    if len(config.temperatures) == 1:
        return "SGLD"
    if math.isinf(config.correction_factor):
        return "naive reSGLD"
    return f"reSGLD, F={config.correction_factor:g}" if "case3" in config.recipe else "reSGLD"


def rows(runs: Runs) -> list[dict[str, Any]]:
    """One row per recipe, each number with its standard error over independent runs; seeds are
    pooled.
    """
    table = []
    for name, (config, folders) in runs.items():
        metrics = pool_seeds([folder.result or {} for folder in folders])
        table.append(
            {
                "recipe": name,
                "case": name.split("/")[1].split("-")[0],
                "method": label_of(config),
                "paper_acceptance_rate": config.paper.get("acceptance_rate"),
                "n_steps": config.n_steps,
                "n_runs": config.n_runs * len(folders),
                **metrics,
            }
        )
    return table


COLUMNS = ("case", "method", "paper acc. %", "ours acc. %", "sigma2", "left weight", "W1", "W2")


def cells(row: dict[str, Any]) -> list[str]:
    """One row as text, for the columns above."""
    paper = row["paper_acceptance_rate"]
    return [
        row["case"].removeprefix("case"),
        row["method"].replace(", ", " "),
        "" if paper is None else ("none" if paper == 0 else f"{100 * paper:g}"),
        value_and_error(row, "acceptance_rate", scale=100),
        value_and_error(row, "noise_variance"),
        value_and_error(row, "left_weight"),
        value_and_error(row, "w1"),
        value_and_error(row, "w2"),
    ]


def as_table(table_rows: list[dict[str, Any]]) -> Table:
    """The table a person reads: acceptance in percent beside the paper's, then how close the draws
    are to the truth.
    """
    table = Table(
        title="Figure 1: mean over independent runs (standard error of the last digit)",
        caption="acc.: accepted swaps; the true left weight is 0.400; W1, W2: distance to the truth",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in COLUMNS:
        head = "" if column == "case" else column.replace(" ", "\n", 1)
        table.add_column(
            head, justify="left" if column in ("case", "method") else "right", no_wrap=True
        )
    previous = None
    for row in table_rows:
        if previous not in (None, row["case"]):
            table.add_section()
        previous = row["case"]
        table.add_row(*cells(row))
    return table


def as_markdown(table_rows: list[dict[str, Any]]) -> str:
    """The same table for a page."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in table_rows]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """The four panels: densities of the three cases against the truth, and distance to the truth
    against steps (case 1).
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise MissingDependencyError(
            "drawing needs matplotlib: pip install 'torchrex[plots]'"
        ) from None

    panels = [
        ("case1", plot_densities, "(a) case 1: noise N(0, 2²)"),
        ("case1", plot_distances, "(b) case 1: distance to the truth"),
        ("case2", plot_densities, "(c) case 2: noise t(5)"),
        ("case3", plot_densities, "(d) case 3: noise 7·t(10)"),
    ]
    chosen = {
        case: {name: run for name, run in runs.items() if f"/{case}-" in name}
        for case, _, _ in panels
    }
    panels = [panel for panel in panels if chosen[panel[0]]]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.8), constrained_layout=True, squeeze=False
    )
    for axis, (case, plot, title) in zip(axes[0], panels, strict=True):
        plot(chosen[case], axis)
        axis.set_title(title, fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_densities(runs: Runs, axis: Any) -> None:
    """Histogram density of rung 0, averaged over runs, against the exact density; SGLD is stuck and
    left out of case 3.

    An average over runs that are each stuck in one mode can look right, so the legend says how far
    a single run is (W1).
    """
    config = next(iter(runs.values()))[0]
    for config, folders in runs.values():
        if "case3" in config.recipe and label_of(config) == "SGLD":
            continue
        traces = [folder.trace() for folder in folders]
        edges, density = traces[0]["edges"], torch.cat([trace["density"] for trace in traces])
        middle = 0.5 * (edges[1:] + edges[:-1])
        colour, style = STYLES[label_of(config)]
        w1 = pool_seeds([folder.result or {} for folder in folders])["w1"]
        axis.plot(
            middle,
            density.mean(0),
            style,
            color=colour,
            label=f"{label_of(config)}  (W1 {w1:.2f})",
            linewidth=1.6,
        )
    x = torch.linspace(float(edges[0]), float(edges[-1]), 801, dtype=torch.float64)
    truth = config.mixture().log_density(x[:, None]).exp()
    axis.fill_between(x, truth, color="0.88", label="truth", zorder=0)
    axis.set_xlabel("x")
    axis.set_ylabel("density")
    axis.set_ylim(0, 1.45 * float(truth.max()))
    axis.legend(fontsize=8, frameon=False)


def plot_distances(runs: Runs, axis: Any) -> None:
    """W2 between the draws so far and the truth: mean over runs, band of two standard errors."""
    for config, folders in runs.values():
        traces = [folder.trace() for folder in folders]
        w2 = torch.cat([trace["w2"] for trace in traces], dim=1)
        steps, mean = traces[0]["curve_steps"], w2.mean(1)
        error = w2.std(1) / w2.shape[1] ** 0.5 if w2.shape[1] > 1 else torch.zeros_like(mean)
        colour, style = STYLES[label_of(config)]
        axis.plot(steps, mean, style, color=colour, label=label_of(config), linewidth=1.6)
        axis.fill_between(
            steps, mean - 2 * error, mean + 2 * error, color=colour, alpha=0.2, linewidth=0
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("steps")
    axis.set_ylabel("W2 distance to the truth")
    axis.legend(fontsize=8, frameon=False)
