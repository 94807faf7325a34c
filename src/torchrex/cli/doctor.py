"""`torchrex doctor`: what is wrong with a run, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from torchrex.experiments.config import dumps
from torchrex.report.doctor import as_json, as_text, diagnose_folder

STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim", "fine": "green"}


def doctor(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, or a folder that holds some.")],
    json_: Annotated[bool, typer.Option("--json", help="Print the findings for machines.")] = False,
) -> None:
    """Say in plain words what is wrong with a run and what to change, with the numbers behind it."""
    diagnoses = diagnose_folder(folder)
    if json_:
        typer.echo(dumps(as_json(diagnoses)), nl=False)
        return
    console = Console()
    for diagnosis in diagnoses:
        for severity, words in as_text(diagnosis):
            if not severity:
                console.print(Text(words, style="bold"))
                continue
            console.print(Padding(Text.assemble((severity, STYLES[severity]), f": {words}"), (0, 0, 0, 2)))
        console.print(Padding(Text(str(diagnosis.path), style="dim"), (0, 0, 0, 2)), soft_wrap=True)
