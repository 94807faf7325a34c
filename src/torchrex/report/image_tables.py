"""Tables 1 and 2 in words: for the terminal as wide as it is, in full for a page, with the notes a reader needs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from torchrex.experiments.images import PAPER_EPOCHS
from torchrex.report.images import EXCHANGING, INDEPENDENT, MSGD, PAPER_SEEDS, SGHMC, ImageTable, effects_of, row_of

SWAPS_HEAD = (
    "What the swaps did beyond the equal-compute ensemble (the same pair without swaps), and for rung 0 beyond SGHMC; in points, "
    "paired by seed, ± standard error:"
)


def swap_lines(table: ImageTable) -> list[str]:
    """One line a cell."""
    lines = []
    for cell in table.cells:
        beyond, rung_0 = (in_words(effect) for effect in effects_of(cell) if effect["metric"] == cell.headline)
        more = f", {cell.settings}" if cell.settings.others else ""
        lines.append(
            f"{cell.name}, {cell.settings.epochs} epochs{more}: both rungs minus no swaps {beyond}; rung 0 minus SGHMC {rung_0}"
        )
    return lines


def in_words(effect: Mapping[str, Any]) -> str:
    """Such as `+0.12 ± 0.05 (n=3, 2.4 s.e.)`; two seeds are too few to say how many."""
    if not effect["n"]:
        return "- (no seed was run with both)"
    if effect["se"] is None:
        return f"{effect['mean']:+.2f} (n=1)"
    enough = effect["n"] >= 3 and effect["se"] > 0
    many = f", {abs(effect['mean']) / effect['se']:.1f} s.e." if enough else ""
    return f"{effect['mean']:+.2f} ± {effect['se']:.2f} (n={effect['n']}{many})"


def plus_minus(number: Mapping[str, Any] | None) -> str:
    if number is None:
        return ""
    return f"{number['mean']:.2f}" + ("" if number["two_sd"] is None else f"±{number['two_sd']:.2f}")


def marked(row: Mapping[str, Any]) -> str:
    mark = {MSGD.title: "‡", SGHMC.title: "†"}.get(row["method"], "") if row["borrowed_seeds"] else ""
    return f"{row['method']}{mark}"


def z_words(row: Mapping[str, Any]) -> str:
    return "" if row["z"] is None else f"{row['z']:+.1f}{'*' if row['z_has_the_papers_sd'] else ''}"


def epochs_words(row: Mapping[str, Any]) -> str:
    return str(PAPER_EPOCHS) if row["epochs"] == PAPER_EPOCHS else f"{row['epochs']}/{PAPER_EPOCHS}"


def swaps_words(row: Mapping[str, Any]) -> str:
    return "-" if row["swaps"] is None else f"{statistics.fmean(row['swaps']):.3g}"


def _mean(name: str, digits: int = 2) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row[name]['mean']:.{digits}f}"


WIDE: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "data": lambda row: row["data"],
    "net": lambda row: row["net"] + ("§" if row["settings"] else ""),
    "rules": lambda row: row["family"],
    "method": marked,
    "paper %": lambda row: plus_minus(row["paper"]),
    "ours %": lambda row: plus_minus(row["ours"]),
    "n": lambda row: str(row["n"]),
    "off by (s.e.)": z_words,
    "logits, last": _mean("logits_accuracy"),
    "logits, best": _mean("logits_best_accuracy"),
    "prob., last": _mean("accuracy"),
    "prob., best": _mean("best_accuracy"),
    "one net": _mean("single_accuracy"),
    "NLL": _mean("nll", 3),
    "ECE %": _mean("ece"),
    "swaps": lambda row: "-" if row["swaps"] is None else ", ".join(map(str, row["swaps"])),
    "epochs": epochs_words,
    "min": lambda row: f"{statistics.fmean(row['wall_minutes']):.1f}",
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
    for n_gone in range(len(FIRST_TO_GO) + 1):
        heads = [head for head in NARROW if head not in FIRST_TO_GO[:n_gone]]
        shown = _table(table, heads)
        if console.measure(shown, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return shown, heads


def _table(table: ImageTable, heads: Sequence[str]) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    shown.add_column("", no_wrap=True)
    for head in heads:
        shown.add_column(head, justify="right", no_wrap=True)
    for k, cell in enumerate(table.cells):
        if k:
            shown.add_section()
        shown.add_row(f"{cell.name}{'§' if cell.settings.others else ''}", style="bold")
        for row in (row_of(cell, line) for line in cell.lines):
            shown.add_row(f" {marked(row)}", *(NARROW[head](row) for head in heads))
    return shown


def notes(table: ImageTable, heads: Iterable[str]) -> list[str]:
    """What a reader must know of the rows and columns that are there."""
    rows, shown = table.rows, {" ".join(head.replace(",", "").split()) for head in heads}
    families = {row["family"] for row in rows}
    said = ["ours: ± 2 standard deviations over n seeds." if any(row["ours"]["two_sd"] for row in rows) else "ours: one seed."]
    rules = {
        "icml2020": "icml2020: as in the authors' code, which sums logits and reports the best epoch on the test images",
        "clean": "clean: the average of probabilities at the end",
    }
    said[0] += f" Rules of {'; '.join(words for family, words in rules.items() if family in families)}."
    of_average = [name for name in ("NLL", "ECE %") if name in shown]
    if of_average:
        both = " and ".join(name.removesuffix(" %") for name in of_average)
        said[0] += f" {both}: of the average of probabilities at the end."
    off = next((head for head in ("off by (s.e.)", "s.e. off") if head in shown), "")
    if off and any(row["z"] is not None for row in rows):
        said.append(
            f"{off}: (ours - paper) / sqrt(sd_ours²/n + sd_paper²/{PAPER_SEEDS}), the paper's sd being half its ±."
            + (" * one seed only: our sd is taken to be the paper's." if any(row["z_has_the_papers_sd"] for row in rows) else "")
        )
    if "prob. last" in shown and "logits last" not in shown:
        said.append("prob. last: accuracy of the average of probabilities at the end.")
    elif "prob. last" in shown:
        said.append(
            "logits, prob.: accuracy of the sum of logits and of the average of probabilities, at the end or the best epoch."
        )
    if "one net" in shown:
        both_rungs = any(row["method"] in (EXCHANGING.title, INDEPENDENT.title) for row in rows)
        said.append(f"one net: the newest network alone{', in rows of both rungs the two newest' if both_rungs else ''}.")
    if "min" in shown:
        said.append("min: of the group that trained together.")
    if any(marked(row).endswith("†") for row in rows):
        said.append("† rung 0 of the pair without swaps, where SGHMC was not run by itself: the same run bit for bit.")
    if any(marked(row).endswith("‡") for row in rows):
        said.append("‡ the run of icml2020: at temperature 0 the two families are the same.")
    compressed = sorted({row["epochs"] for row in rows} - {PAPER_EPOCHS})
    if compressed:
        said.append(
            f"Compressed: {', '.join(map(str, compressed))} epochs in place of the paper's {PAPER_EPOCHS}, every schedule alike; "
            "these rows are not the paper's experiment, and are not tested against it."
        )
    said.extend(
        f"§ {cell.name}, {cell.settings.epochs} epochs: not the recipe's settings ({cell.settings})"
        for cell in table.cells
        if cell.settings.others
    )
    return said


def as_markdown(what: str, table: ImageTable) -> str:
    """The full table for a page, what the swaps did, notes, and what was not run."""
    batch = "256" if what == "table1" else "1024"
    lines = [f"# Table {what[-1]}: test accuracy in %, batch size {batch}", ""]
    lines += ["| " + " | ".join(WIDE) + " |", "|---" * len(WIDE) + "|"]
    lines += ["| " + " | ".join(words(row) for words in WIDE.values()) + " |" for row in table.rows]
    lines += ["", SWAPS_HEAD, ""]
    lines += [f"- {line}" for line in swap_lines(table)] + ["", *(f"- {note}" for note in notes(table, WIDE))]
    for head, words in (("not run", table.not_run), ("not finished", table.unfinished)):
        lines += ["", f"{head}: {', '.join(words)}"] if words else []
    return "\n".join(lines) + "\n"
