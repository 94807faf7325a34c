"""`torchrex report`, `doctor` and `compare`: looking at runs, which never changes them.

What reads and draws runs is loaded when the arguments are understood.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrex.cli.main import loading_torch
from torchrex.cli.run import Json
from torchrex.durable import one_line
from torchrex.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from rich.text import Text

    from torchrex.report.page import Written

SECONDS = 8.0  # of a quick look of doctor at all runs of a page; the page's own takes long to load
STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim", "fine": "green"}
SUFFIXES = (".md", ".json")


class Doctor(StrEnum):
    """How much time doctor gets."""

    QUICK = "quick"
    ALL = "all"
    NONE = "none"


TIME = {Doctor.QUICK: SECONDS, Doctor.ALL: math.inf, Doctor.NONE: 0.0}


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Run folders, or folders that hold some, as --out of a run."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The page to write; an older page there is replaced."),
    ] = Path("page.html"),
    title: Annotated[
        str, typer.Option(help="Heading of the page; by default the names of the folders.")
    ] = "",
    doctor: Annotated[
        Doctor,
        typer.Option(
            help=f"Ask doctor about runs for {SECONDS:g} s, about all of them, or about none."
        ),
    ] = Doctor.QUICK,
) -> None:
    """Write one page about all runs in DIR: tables next to the paper's numbers, charts, advice, and
    how to repeat each run.

    A folder that cannot be read is named on the page with the reason. Exit code: 0 if there is a
    page, 2 if no run could be read.
    """
    require_there(folders)
    with loading_torch():
        from torchrex.cli.console import say, stderr
        from torchrex.report.page import write_page
    with stderr.status("reading runs"):
        written = write_page(folders, out, title=title, doctor_seconds=TIME[doctor])
    size = size_in_words(out.stat().st_size)
    say(f"page: {out} ({in_words(written)}; {size}, opens without a network)")


def require_there(folders: Sequence[Path]) -> None:
    """Refuse a name without a folder before torch is loaded."""
    for folder in folders:
        if not os.path.isdir(folder):  # also one that is too long, or a link in a circle
            reason = f"there is no folder {one_line(folder)}"
            raise RunFolderError(f"{reason}; give a run folder, or one above some")


def in_words(written: Written) -> str:
    """`3 runs, 1 of them not complete (the page says what is missing), 2 empty folders, ...`."""
    from torchrex.cli.console import count

    parts = [count(written.runs, "run")]
    if written.not_whole:
        which = f"{written.not_whole} of them not complete"
        parts.append(f"{which} (the page says what is missing)")
    parts += [count(written.empty, "empty folder")] if written.empty else []
    parts += [count(written.unreadable, "unreadable folder")] if written.unreadable else []
    return ", ".join(parts)


def size_in_words(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 999_500 else f"{n_bytes / 1e3:.0f} kB"


def doctor(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run folder, or a folder that holds some.")
    ],
    json_: Json = False,
) -> None:
    """Say in plain words what is wrong with a run and what to change, with the numbers behind it.

    Problems come first (do not trust the answer), then warnings, notes, and what is fine. Of
    several runs it says last how many have each finding.

    Exit code: 0 if runs were read, whatever was found (look at the verdicts of --json), 2 if DIR
    holds no run that can be read. A folder that cannot be read next to others is a problem.
    """
    require_there([folder])
    with loading_torch():
        from rich.text import Text

        from torchrex.cli.console import stderr, stdout
        from torchrex.durable import printable
        from torchrex.report.doctor import as_json, as_text, diagnose_folder, roll_up
        from torchrex.runs.config import dumps
    with stderr.status("reading runs"):
        diagnoses = diagnose_folder(folder)
    if json_:
        typer.echo(dumps(as_json(diagnoses)), nl=False)
        return

    def show(lines: Sequence[tuple[str, str]]) -> None:
        (_, head), *findings = lines
        stdout.print(Text(head, style="bold"), soft_wrap=True)
        for severity, words in findings:
            _print_hanging(Text.assemble((severity, STYLES[severity]), f": {words}"))

    for k, diagnosis in enumerate(diagnoses):
        if k:
            stdout.print()
        show(as_text(diagnosis))
        stdout.print(Text(f"  {printable(str(diagnosis.path))}", style="dim"), soft_wrap=True)
    if len(diagnoses) > 1:  # last, where a terminal that has scrolled far still shows it
        stdout.print()
        show(roll_up(diagnoses))


def _print_hanging(text: Text) -> None:
    """Indented by two columns, further lines by four; Rich's own padding would add blanks."""
    from torchrex.cli.console import stdout

    for k, line in enumerate(text.wrap(stdout, max(20, stdout.width - 4))):
        line.rstrip()
        stdout.print(line.blank_copy("    " if k else "  ").append_text(line), soft_wrap=True)


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="A B ...", help="Run folders, or folders of recipes with seed=*."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the tables to this file, .md or .json.")
    ] = None,
    json_: Json = False,
) -> None:
    """Compare runs with the first, paired by seed: differences, standard errors, verdicts that do
    not overclaim.
    """
    if out is not None and out.suffix not in SUFFIXES:
        raise ConfigError(f"--out must end in {' or '.join(SUFFIXES)}, got {out}")
    require_there(folders)
    with loading_torch():
        from torchrex.cli.console import say, stderr, stdout
        from torchrex.durable import replace_file, writing
        from torchrex.report.compare import MARK, as_json, as_markdown, compare_folders, lines
        from torchrex.report.reader import require_ours
        from torchrex.runs.config import dumps
    if out is not None:  # every file of ours has one of the marks
        require_ours(out, (MARK, '"not_comparable_because_of"', "paired t"), "compare")
    with stderr.status("reading runs"):
        comparisons = compare_folders(folders)
    width = stdout.width if stdout.is_terminal else None  # a pipe has no width
    for k, comparison in enumerate(() if json_ else comparisons):
        for line in [""] * (k > 0) + lines(comparison, width):
            say(line)
    if out is not None:
        text = as_markdown(comparisons) if out.suffix == ".md" else dumps(as_json(comparisons))
        with writing(out, RunFolderError, "choose another --out"):
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, text.encode())
        if not json_:
            say(f"written: {out}")
    if json_:
        typer.echo(dumps(as_json(comparisons)), nl=False)
