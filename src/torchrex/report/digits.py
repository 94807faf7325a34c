"""The digits: a table of the four methods, and a picture of what the replicas did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from torchrex.diagnostics import mean_and_error
from torchrex.errors import MissingDependencyError
from torchrex.experiments import RunFolder
from torchrex.report.tables import value_and_error

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


def rows(runs: Mapping[str, Sequence[RunFolder]]) -> list[dict[str, Any]]:
    """One row a method: mean and standard error over seeds of each number, read from the run
    folders.
    """
    table = []
    for title in TITLES:
        recipe, _, pooled = title.partition(" ")
        results = [folder.result or {} for folder in runs.get(recipe, ())]
        if not results:
            continue
        row: dict[str, Any] = {"method": title, "title": TITLES[title], "seeds": len(results)}
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


def cell(number: Mapping[str, Any]) -> str:
    """Mean and standard error, such as 97.4(2): the error applies to the last digit shown."""
    return value_and_error({"value": number["mean"], "value_se": number["se"]}, "value")


def as_table(table: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table("method", *COLUMNS.values(), box=None, header_style="bold")
    for row in table:
        shown.add_row(row["title"], *(cell(row[column]) for column in COLUMNS))
    return shown


def as_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| method | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [
        f"| {row['title']} | " + " | ".join(cell(row[column]) for column in COLUMNS) + " |"
        for row in table
    ]
    return "\n".join(lines) + "\n"


def draw(trace: Mapping[str, Tensor], path: Path, *, steps_per_epoch: int, title: str) -> None:
    """Energies per rung, the standing of each replica, and the noise against what a swap needed,
    over epochs.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingDependencyError(
            "matplotlib is not installed; pip install 'torchrex[plots]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    epochs = trace["steps"].double() / steps_per_epoch
    swapped = trace["swap_steps"].double() / steps_per_epoch
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2, 2)
    )
    energy, n_rungs = trace["energy"], trace["energy"].shape[1]
    colours = [
        plt.get_cmap("viridis")(0.15 + 0.6 * rung / max(1, n_rungs - 1)) for rung in range(n_rungs)
    ]
    for rung in reversed(range(n_rungs)):
        name = f"rung {rung}" + (
            " (cold)" if rung == 0 else " (hot)" if rung == n_rungs - 1 else ""
        )
        top.plot(epochs, energy[:, rung], color=colours[rung], lw=0.3, alpha=0.5)
        top.plot(
            epochs,
            _smooth(energy[:, rung], steps_per_epoch),
            color=colours[rung],
            lw=1.6,
            label=name,
        )
    top.set(yscale="log", ylabel="energy (summed)", title=title)
    for when in swapped:
        top.axvline(when, ymax=0.06, color="black", lw=0.7)
    top.plot([], [], color="black", marker="|", ls="", label=f"{len(swapped)} swaps")
    top.legend(loc="upper right", frameon=False)
    styles = ("-", "--", ":", "-.")
    for replica in range(1 if n_rungs == 2 else n_rungs):  # of two, one tells where the other is
        rung_of = (trace["replica_at"] == replica).long().argmax(1)
        middle.step(
            epochs,
            rung_of,
            where="post",
            lw=1.0,
            ls=styles[replica % 4],
            label=f"replica {replica}",
            color=colours[replica],
        )
    middle.set(ylabel="stands on rung", yticks=range(n_rungs), ylim=(-0.3, n_rungs - 0.4))
    middle.legend(loc="upper left", frameon=False)
    if n_rungs > 1:
        difference, late = energy[:, 0] - energy[:, 1], len(epochs) // 10
        bottom.plot(epochs, difference, color="0.55", lw=0.4, label="cold minus hot energy")
        bottom.plot(
            epochs,
            trace["correction"][:, 0],
            color="black",
            lw=1.2,
            label="correction: where a swap is certain",
        )
        largest = 1.1 * float(
            torch.cat([difference[late:].abs(), trace["correction"][late:, 0]]).max()
        )
        bottom.set(ylabel="energy", ylim=(-largest, largest))
        bottom.legend(loc="lower right", frameon=False)
    bottom.set(xlabel="epoch")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _smooth(values: Tensor, window: int) -> Tensor:
    """Mean over the last `window` values, fewer at the beginning."""
    sums = values.double().cumsum(0)
    shifted = sums.clone()
    shifted[window:] -= sums[:-window]
    counts = (values.new_ones(len(values)).cumsum(0)).clamp(max=window)
    return shifted / counts
