"""How the command ends: errors of ours are one line on stderr and exit code 2; Ctrl-C is one line
and 130.
"""

from __future__ import annotations

import logging
import sys

import typer

from torchrex.cli.app import app
from torchrex.cli.interrupts import Interrupted
from torchrex.cli.voice import is_main_process
from torchrex.errors import RankError, TorchrexError


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
    except RankError as error:
        how = "what was saved is whole, and the same command with --resume goes on from it"
        _tell(f"{error}; {how}", loudly=error.speaks, red=True)
        sys.exit(2)
    except TorchrexError as error:
        _tell(str(error), loudly=is_main_process(), red=True)
        sys.exit(2)
    except Interrupted as interrupted:
        _tell(str(interrupted), loudly=is_main_process())
        sys.exit(interrupted.exit_code)
    except KeyboardInterrupt:
        _tell("interrupted", loudly=is_main_process())
        sys.exit(130)
    finally:
        logger.removeHandler(warnings)
        if "torchrex.distributed" in sys.modules:  # otherwise there is nothing to leave
            sys.modules["torchrex.distributed"].leave()


def _tell(words: str, *, loudly: bool, red: bool = False) -> None:
    if loudly:
        typer.secho(f"torchrex: {words}", fg="red" if red else None, err=True)
