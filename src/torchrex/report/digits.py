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
from torchrex.report.figures import rung_colours
from torchrex.report.plots import log_axis, panels, rung_name, running_mean, smoothing_window
from torchrex.report.tables import markdown_table, value_and_error

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
    plots = (_energies, _paths, _correction)[: 3 if config.n_rungs > 1 else 2]
    heights = (3, 2, 3)[: len(plots)]
    how: dict[str, Any] = {"sharex": True, "height_ratios": heights}
    with panels(path, len(plots), 1, (7.5, 0.9 * sum(heights)), **how) as (_, axes):
        for axis, plot in zip(axes.flat, plots, strict=True):
            plot(history, axis)
            if history.swaps is not None and len(when := history.swaps.step):
                marks = {"transform": axis.get_xaxis_transform(), "label": f"{len(when):,} swaps"}
                axis.plot(when, torch.full(when.shape, 0.02), "|", color="black", **marks)
            axis.legend(loc="upper right", ncols=3)
            axis.label_outer()
        seed = folder.path.name.removeprefix("seed=")
        axes[0, 0].set_title(f"{shown}, seed {seed}: energies, rungs and swaps")


def _energies(history: History, axis: Any) -> None:
    energy = history.energy[:, :, 0].double()
    smooth = running_mean(energy, smoothing_window(len(energy)))
    for rung, colour in reversed(list(enumerate(rung_colours(history.n_rungs)))):
        name, ls = rung_name(rung, history.n_rungs), "--" if rung % 2 else "-"
        dense = {"color": colour, "linewidth": 0.4, "alpha": 0.35, "rasterized": True}
        axis.plot(history.steps, energy[:, rung], **dense)
        axis.plot(history.steps, smooth[:, rung], color=colour, ls=ls, label=name)
    axis.set(xlabel="steps", ylabel="energy (nats, summed)")
    log_axis(axis)


def _paths(history: History, axis: Any) -> None:
    rung_of = history.replica_at[:, :, 0].long().argsort(dim=1)
    for k, colour in enumerate(rung_colours(history.n_rungs)):
        style = {"color": colour, "ls": "--" if k % 2 else "-", "label": f"replica {k}"}
        axis.step(history.steps, rung_of[:, k] + 0.06 * k, where="post", linewidth=1.1, **style)
    n = history.n_rungs
    axis.set(yticks=range(n), ylim=(-0.4, n - 0.2), xlabel="steps", ylabel="rung (0: coldest)")


def _correction(history: History, axis: Any) -> None:
    assert history.correction is not None
    difference, correction = history.energy_difference[:, 0, 0], history.correction[:, 0, 0]
    dots = {"color": "0.6", "markersize": 2, "rasterized": True, "label": "energy 0 minus energy 1"}
    axis.plot(history.steps, difference, ".", **dots)
    label = "correction: above it a swap is certain"
    axis.plot(history.steps, correction, color="black", label=label)
    axis.set(xlabel="steps", ylabel="energy (nats)")
