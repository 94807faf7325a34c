"""The digits: a table of the four methods, and a picture of what the replicas did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from torchrex.diagnostics import History, mean_and_error
from torchrex.experiments import RunFolder
from torchrex.experiments.digits import DigitsConfig
from torchrex.report.plots import plot_correction, plot_energies, plot_replica_paths
from torchrex.report.tables import markdown_table, panels, value_and_error

TITLES = {
    "digits/msgd": "momentum SGD",
    "digits/sghmc": "SGHMC",
    "digits/resghmc": "reSGHMC (rung 0)",
    "digits/resghmc pooled": "reSGHMC (both rungs)",
    "digits/independent": "independent pair (both)",
}
COLUMNS = {
    "accuracy": "accuracy %",
    "nll": "NLL",
    "ece": "ECE %",
    "single_nll": "NLL, one net",
    "swaps": "swaps",
}
PERCENT = ("accuracy", "ece")
NOTES = ("In brackets the standard error over seeds; 500 held-out images.",)
Configs = Mapping[str, DigitsConfig]
Folders = Mapping[str, Sequence[RunFolder]]  # by recipe, one for each seed


def rows(configs: Configs, folders: Folders) -> list[dict[str, Any]]:
    """One row per method: mean and standard error over seeds of each number."""
    table = []
    for method, title in TITLES.items():
        recipe, _, pooled = method.partition(" ")
        results = [folder.result or {} for folder in folders.get(recipe, ())]
        if not results:
            continue
        row: dict[str, Any] = {"method": method, "title": title, "seeds": len(results)}
        for column in COLUMNS:
            if column == "swaps":
                values = [sum(pair["accepted"] for pair in result["swaps"]) for result in results]
            else:
                name = f"pooled_{column}" if pooled and not column.startswith("single") else column
                values = [result["metrics"][name] for result in results]
            scale = 100.0 if column in PERCENT else 1.0
            mean, error = mean_and_error(scale * torch.tensor(values, dtype=torch.float64))
            row[column] = {"mean": mean, "se": error if math.isfinite(error) else None}
        table.append(row)
    return table


def cells(row: Mapping[str, Any]) -> list[str]:
    """Title and numbers such as 97.4(2): the error applies to the last digit shown."""
    numbers = (row[column] for column in COLUMNS)
    return [row["title"], *(value_and_error(each["mean"], each["se"]) for each in numbers)]


def as_table(table: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table("method", *COLUMNS.values(), box=None, header_style="bold")
    for row in table:
        shown.add_row(*cells(row))
    return shown


def as_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(markdown_table(["method", *COLUMNS.values()], map(cells, table))) + "\n"


def draw(configs: Configs, folders: Folders, path: Path) -> None:
    """Energies, rungs and the correction of the first seed, of reSGHMC where it was run."""
    shown = "digits/resghmc" if "digits/resghmc" in configs else next(iter(configs))
    config, folder = configs[shown], folders[shown][0]
    history = History.from_traces([folder.trace()], config.ladder(), n_steps=config.n_steps)
    plots = (plot_energies, plot_replica_paths, plot_correction)[: 3 if config.n_rungs > 1 else 2]
    heights = (3, 2, 2)[: len(plots)]
    how: dict[str, Any] = {"dpi": 130, "sharex": True, "height_ratios": heights}
    with panels(path, len(plots), 1, (8, sum(heights)), **how) as (_, axes):
        for axis, plot in zip(axes.flat, plots, strict=True):
            plot(history, axis)
            axis.label_outer()
        seed = folder.path.name.removeprefix("seed=")
        axes[0, 0].set_title(f"{shown}, seed {seed}: energies, rungs and swaps")
