"""Tables 1 and 2 in words: for the terminal as wide as it is, in full for a page, with the notes a
reader needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from torchrex.experiments.images import PAPER_EPOCHS
from torchrex.report.image_words import (
    Columns,
    Section,
    every_seeds_swaps,
    fitted,
    in_words,
    markdown_table,
    mean_of,
    minutes,
    off_note,
    plus_minus,
    swaps_words,
    z_words,
)
from torchrex.report.images import (
    EXCHANGING,
    INDEPENDENT,
    MSGD,
    SGHMC,
    ImageTable,
    effects_of,
    row_of,
)

SWAPS_HEAD = (
    "What the swaps did beyond the equal-compute ensemble (the same pair without swaps), and for rung 0 beyond SGHMC; in points, "
    "paired by seed, ± standard error:"
)


def swap_lines(table: ImageTable) -> list[str]:
    """One line a cell."""
    lines = []
    for cell in table.cells:
        beyond, rung_0 = (
            in_words(effect) for effect in effects_of(cell) if effect["metric"] == cell.headline
        )
        more = f", {cell.settings}" if cell.settings.others else ""
        lines.append(
            f"{cell.name}, {cell.settings.length} epochs{more}: both rungs minus no swaps {beyond}; rung 0 minus SGHMC {rung_0}"
        )
    return lines


def marked(row: Mapping[str, Any]) -> str:
    mark = (
        {MSGD.title: "‡", SGHMC.title: "†"}.get(row["method"], "") if row["borrowed_seeds"] else ""
    )
    return f"{row['method']}{mark}"


def epochs_words(row: Mapping[str, Any]) -> str:
    return str(PAPER_EPOCHS) if row["epochs"] == PAPER_EPOCHS else f"{row['epochs']}/{PAPER_EPOCHS}"


WIDE: Columns = {
    "data": lambda row: row["data"],
    "net": lambda row: row["net"] + ("§" if row["settings"] else ""),
    "rules": lambda row: row["family"],
    "method": marked,
    "paper %": lambda row: plus_minus(row["paper"]),
    "ours %": lambda row: plus_minus(row["ours"]),
    "n": lambda row: str(row["n"]),
    "off by (s.e.)": z_words,
    "logits, last": mean_of("logits_accuracy"),
    "logits, best": mean_of("logits_best_accuracy"),
    "prob., last": mean_of("accuracy"),
    "prob., best": mean_of("best_accuracy"),
    "one net": mean_of("single_accuracy"),
    "NLL": mean_of("nll", 3),
    "ECE %": mean_of("ece"),
    "swaps": every_seeds_swaps,
    "epochs": epochs_words,
    "min": minutes,
}
NARROW = {
    "paper %": WIDE["paper %"],
    "ours %": WIDE["ours %"],
    "n": WIDE["n"],
    "s.e.\noff": z_words,
    "prob.\nlast": WIDE["prob., last"],
    "one\nnet": WIDE["one net"],
    "NLL": WIDE["NLL"],
    "ECE\n%": WIDE["ECE %"],
    "swaps": swaps_words,
    "epochs": epochs_words,
}
FIRST_TO_GO = ("one\nnet", "ECE\n%", "NLL", "prob.\nlast")  # where a terminal is narrow


def as_table(table: ImageTable, console: Console) -> tuple[Table, list[str]]:
    """The most telling columns, as many of them as the console has room for, and their heads."""
    sections = []
    for cell in table.cells:
        rows = [row_of(cell, line) for line in cell.lines]
        sections.append(
            Section(
                f"{cell.name}{'§' if cell.settings.others else ''}",
                [(marked(row), row) for row in rows],
            )
        )
    return fitted(sections, NARROW, FIRST_TO_GO, console)


def notes(table: ImageTable, heads: Iterable[str]) -> list[str]:
    """What a reader must know of the rows and columns that are there."""
    rows, shown = table.rows, {" ".join(head.replace(",", "").split()) for head in heads}
    families = {row["family"] for row in rows}
    said = [
        "ours: ± 2 standard deviations over n seeds."
        if any(row["ours"]["two_sd"] for row in rows)
        else "ours: one seed."
    ]
    rules = {
        "icml2020": "icml2020: as in the authors' code, which sums logits and reports the best epoch on the test images",
        "clean": "clean: the average of probabilities at the end",
    }
    said[0] += (
        f" Rules of {'; '.join(words for family, words in rules.items() if family in families)}."
    )
    of_average = [name for name in ("NLL", "ECE %") if name in shown]
    if of_average:
        both = " and ".join(name.removesuffix(" %") for name in of_average)
        said[0] += f" {both}: of the average of probabilities at the end."
    off = next((head for head in ("off by (s.e.)", "s.e. off") if head in shown), "")
    said += off_note(off, rows)
    if "prob. last" in shown and "logits last" not in shown:
        said.append("prob. last: accuracy of the average of probabilities at the end.")
    elif "prob. last" in shown:
        said.append(
            "logits, prob.: accuracy of the sum of logits and of the average of probabilities, at the end or the best epoch."
        )
    if "one net" in shown:
        both_rungs = any(row["method"] in (EXCHANGING.title, INDEPENDENT.title) for row in rows)
        said.append(
            f"one net: the newest network alone{', in rows of both rungs the two newest' if both_rungs else ''}."
        )
    if "min" in shown:
        said.append("min: of the group that trained together.")
    if any(marked(row).endswith("†") for row in rows):
        said.append(
            "† rung 0 of the pair without swaps, where SGHMC was not run by itself: the same run bit for bit."
        )
    if any(marked(row).endswith("‡") for row in rows):
        said.append("‡ the run of icml2020: at temperature 0 the two families are the same.")
    compressed = sorted({row["epochs"] for row in rows} - {PAPER_EPOCHS})
    if compressed:
        said.append(
            f"Compressed: {', '.join(map(str, compressed))} epochs in place of the paper's {PAPER_EPOCHS}, every schedule alike; "
            "these rows are not the paper's experiment, and are not tested against it."
        )
    said.extend(
        f"§ {cell.name}, {cell.settings.length} epochs: not the recipe's settings ({cell.settings})"
        for cell in table.cells
        if cell.settings.others
    )
    return said


def as_markdown(what: str, table: ImageTable) -> str:
    """The full table for a page, what the swaps did, notes, and what was not run."""
    batch = "256" if what == "table1" else "1024"
    lines = [f"# Table {what[-1]}: test accuracy in %, batch size {batch}", ""]
    lines += [*markdown_table(WIDE, table.rows), "", SWAPS_HEAD, ""]
    lines += [f"- {line}" for line in swap_lines(table)] + [
        "",
        *(f"- {note}" for note in notes(table, WIDE)),
    ]
    for head, words in (("not run", table.not_run), ("not finished", table.unfinished)):
        lines += ["", f"{head}: {', '.join(words)}"] if words else []
    return "\n".join(lines) + "\n"
