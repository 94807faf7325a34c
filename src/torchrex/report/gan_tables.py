"""Table 3 in words: for the terminal as wide as it is, in full for a page, with the notes a reader
needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

from torchrex.experiments.gan_recipes import gan_cell
from torchrex.report.gan import (
    FAMILIES,
    METHODS,
    PAPER_STEPS,
    GanCell,
    GanTable,
    contributions,
    row_of,
)
from torchrex.report.image_words import (
    Columns,
    Row,
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

CONTRIBUTIONS_HEAD = (
    "What the swaps contribute (reSGHMC minus the same pair without swaps), and the unlabelled images (SGHMC minus the same "
    "discriminator on the labelled images alone); in points, paired by seed, ± standard error:"
)


def _paper(row: Row) -> str:
    return plus_minus(row["paper"]) or "-"


def other_than_the_recipe(row: Row) -> str:
    """Steps that are not the paper's and settings that are not the recipe's."""
    shorter = [] if row["steps"] == PAPER_STEPS else [f"{row['steps']:,} of {PAPER_STEPS:,} steps"]
    return ", ".join([*shorter, *(f"{name}={value}" for name, value in row["settings"].items())])


WIDE: Columns = {
    "data": lambda row: row["data"],
    "labels": lambda row: str(row["n_labelled"]),
    "settings": lambda row: FAMILIES[row["family"]] or "paper's",
    "method": lambda row: row["method"],
    "paper %": _paper,
    "ours %": lambda row: plus_minus(row["ours"]),
    "n": lambda row: str(row["n"]),
    "off by (s.e.)": z_words,
    "both rungs %": lambda row: plus_minus(row["pooled_accuracy"]) or "-",
    "one net %": mean_of("single_accuracy"),
    "their score %": mean_of("paper_accuracy"),
    "called fake %": mean_of("called_fake", 1),
    "training mode %": mean_of("training_mode_accuracy"),
    "variety": mean_of("variety"),
    "NLL": mean_of("nll", 3),
    "ECE %": mean_of("ece"),
    "swaps": every_seeds_swaps,
    "min": minutes,
}
OTHER = {"not as the recipe": other_than_the_recipe}
SOMETIMES = ("training mode %", "variety", *OTHER)  # columns where some row has them
NARROW: Columns = {
    "paper %": _paper,
    "ours %": WIDE["ours %"],
    "n": WIDE["n"],
    "s.e.\noff": z_words,
    "both\nrungs": mean_of("pooled_accuracy"),
    "one\nnet": WIDE["one net %"],
    "their\nscore": WIDE["their score %"],
    "called\nfake %": WIDE["called fake %"],
    "NLL": WIDE["NLL"],
    "ECE\n%": WIDE["ECE %"],
    "swaps": swaps_words,
    "min": minutes,
}
FIRST_TO_GO = (
    "min",
    "ECE\n%",
    "NLL",
    "one\nnet",
    "swaps",
    "called\nfake %",
    "their\nscore",
)  # where a terminal is narrow


def as_table(table: GanTable, console: Console) -> tuple[Table, list[str]]:
    """The most telling columns, as many of them as the console has room for, and their heads."""
    sections = []
    for cell in table.cells:
        rows = [row_of(cell, method) for method in cell.methods]
        title = f"{cell.name}{'§' if cell.settings.others else ''}"
        sections.append(Section(title, [(row["method"], row) for row in rows]))
    return fitted(sections, NARROW, FIRST_TO_GO, console)


def contribution_lines(table: GanTable) -> list[str]:
    """One line a cell in which two methods can be compared."""
    return [
        f"{_named(cell)}: {'; '.join(words)}"
        for cell in table.cells
        if (words := _contributions_in_words(cell))
    ]


def _named(cell: GanCell) -> str:
    return cell.name + (f" ({cell.settings})" if cell.settings.others else "")


def _contributions_in_words(cell: GanCell) -> list[str]:
    words = []
    for effect in contributions(cell):
        if effect["metric"].endswith("accuracy"):
            claim = "" if effect["paper"] is None else f", the paper {effect['paper']:+.2f}"
            words.append(f"{effect['contribution']} {in_words(effect)}{claim}")
    return words


def notes(table: GanTable, heads: Iterable[str]) -> list[str]:
    """What a reader must know of the rows and columns that are there."""
    rows, shown = table.rows, {" ".join(head.removesuffix("%").split()) for head in heads}
    methods = {row["method"] for row in rows}
    spread = (
        "± 2 standard deviations over n seeds"
        if any(row["ours"]["two_sd"] for row in rows)
        else "one seed"
    )
    said = [
        f"ours: {spread}; accuracy on all test images of the average over draws of the class probabilities given that the image "
        "is real, on rung 0, BatchNorm in evaluation mode."
    ]
    said += off_note(
        next((head for head in ("off by (s.e.)", "s.e. off") if head in shown), ""), rows
    )
    for head, words in (
        ("both rungs", "the average over the draws of both rungs."),
        ("one net", "the newest network of rung 0 alone."),
        (
            "their score",
            "as the authors' code scores: the newest network of rung 0 alone, images that it calls fake left out.",
        ),
        ("called fake", "the test images that are left out so."),
        (
            "training mode",
            "their score with BatchNorm in training mode, as in the authors' code, batch by batch.",
        ),
        (
            "variety",
            "of one generator's images, in units of real images'; 0 where it makes one image only.",
        ),
        ("min", "of the group that trained together."),
    ):
        if head in shown and (head != "both rungs" or any(row["pooled_accuracy"] for row in rows)):
            said.append(f"{head}: {words}")
    for method, words in (
        ("noswaps", "the same two rungs as reSGHMC without swaps, at equal cost."),
        ("supervised", "the same discriminator on the labelled images and nothing else."),
    ):
        if METHODS[method] in methods:
            said.append(f"{METHODS[method]}: {words}")
    if any(row["family"] == "gan-tuned" for row in rows):
        tuned = gan_cell("cifar10", 4000, "resghmc", "gan-tuned")
        said.append(
            f"tuned: a steady learning rate of {tuned.lr_of_mean:g} and {tuned.sampling_lr:g} times that for SGHMC, chosen on "
            f"validation images of CIFAR-10, and a draw every {tuned.average_every} steps; temperatures and F are the "
            "paper's. Not tested against the paper."
        )
    shorter = sorted({row["steps"] for row in rows} - {PAPER_STEPS})
    if shorter:
        said.append(
            f"{', '.join(f'{steps:,}' for steps in shorter)} steps in place of the paper's {PAPER_STEPS:,}: these rows are not "
            "the paper's experiment, and are not tested against it."
        )
    said.extend(
        f"§ {cell.name}: not the recipe's settings ({cell.settings}), and not tested against the paper"
        for cell in table.cells
        if cell.settings.others
    )
    return said


def _some(words: Callable[[Row], str], rows: Iterable[Row]) -> bool:
    return any(words(row) not in ("", "-") for row in rows)


def as_markdown(table: GanTable) -> str:
    """The full table for a page, what swaps and unlabelled images contribute, notes, and what was
    not run.
    """
    rows = table.rows
    columns = {
        head: words
        for head, words in {**WIDE, **OTHER}.items()
        if head not in SOMETIMES or _some(words, rows)
    }
    lines = [
        "# Table 3: semi-supervised Bayesian GANs, test accuracy in %",
        "",
        *markdown_table(columns, rows),
    ]
    contributed = contribution_lines(table)
    lines += (
        ["", CONTRIBUTIONS_HEAD, "", *(f"- {line}" for line in contributed)] if contributed else []
    )
    lines += ["", *(f"- {note}" for note in notes(table, columns))]
    for head, words in (("not run", table.not_run), ("not finished", table.unfinished)):
        lines += ["", f"{head}: {', '.join(words)}"] if words else []
    return "\n".join(lines) + "\n"
