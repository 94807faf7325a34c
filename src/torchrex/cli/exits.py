"""How the command ends: errors of ours are one line on stderr and exit code 2; Ctrl-C is one line and 130."""

from __future__ import annotations

import logging
import sys

import typer

from torchrex.cli.app import app
from torchrex.cli.interrupts import Interrupted
from torchrex.errors import TorchrexError


class Warnings(logging.Handler):
    """What the library has to say, on stderr; rich is loaded at the first word."""

    def emit(self, record: logging.LogRecord) -> None:
        from rich.logging import RichHandler

        from torchrex.cli.consoles import stderr

        RichHandler(console=stderr, show_time=False, show_path=False, markup=False).emit(record)


def call() -> None:
    """Run the command that was typed."""
    warnings, logger = Warnings(), logging.getLogger("torchrex")
    logger.addHandler(warnings)
    try:
        app()
    except TorchrexError as error:
        typer.secho(f"torchrex: {error}", fg="red", err=True)
        sys.exit(2)
    except Interrupted as interrupted:
        typer.secho(f"torchrex: {interrupted}", err=True)
        sys.exit(interrupted.exit_code)
    except KeyboardInterrupt:
        typer.secho("torchrex: interrupted", err=True)
        sys.exit(130)
    finally:
        logger.removeHandler(warnings)
