"""`torchrex doctor`: what is wrong with a run, and what to change. What looks at runs is loaded
when they are asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrex.cli.interrupts import loading

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim", "fine": "green"}


def doctor(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run folder, or a folder that holds some.")
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print the findings for machines.")] = False,
) -> None:
    """Say in plain words what is wrong with a run and what to change, with the numbers behind it.

    Problems come first (do not trust the answer), then warnings, notes, and what is fine. Of
    several runs it says last how many have each finding.

    Exit code: 0 if runs were read, whatever was found (look at the verdicts of --json), 2 if DIR
    holds no run.
    """
    with loading():
        from rich.console import Console
        from rich.text import Text

        from torchrex.experiments.config import dumps
        from torchrex.report.doctor import as_json, as_text, diagnose_folder, roll_up
    diagnoses = diagnose_folder(folder)
    if json_:
        typer.echo(dumps(as_json(diagnoses)), nl=False)
        return
    console = Console()

    def show(lines: Sequence[tuple[str, str]]) -> None:
        (_, head), *findings = lines
        console.print(Text(head, style="bold"), soft_wrap=True)
        for severity, words in findings:
            _print_hanging(console, Text.assemble((severity, STYLES[severity]), f": {words}"))

    for k, diagnosis in enumerate(diagnoses):
        if k:
            console.print()
        show(as_text(diagnosis))
        console.print(Text(f"  {diagnosis.path}", style="dim"), soft_wrap=True)
    if (
        len(diagnoses) > 1
    ):  # last, where a terminal that has scrolled by a thousand lines still shows it
        console.print()
        show(roll_up(diagnoses))


def _print_hanging(console: Console, text: Text) -> None:
    """Indented by two columns, further lines by four; Rich's own padding would fill the lines with
    blanks.
    """
    for k, line in enumerate(text.wrap(console, max(20, console.width - 4))):
        line.rstrip()
        console.print(line.blank_copy("    " if k else "  ").append_text(line), soft_wrap=True)
