"""Which commands there are, and how they end: an error of ours is one line and exit code 2.

The modules of the commands load torch and rich only when a command runs, so that help and typing
errors are answered at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import torchrex
from torchrex.cli import look, run
from torchrex.cli.data import data_app
from torchrex.cli.main import Interrupted, interruptible
from torchrex.durable import one_line
from torchrex.errors import ConfigError, RankError, TorchrexError, is_out_of_memory
from torchrex.processes import is_main_process, rank_and_size
from torchrex.screen import has_colors

PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
USAGE_ERROR: Any = typer.BadParameter.__base__  # of click, or of what typer brings in its place

COMMANDS: dict[str, Any] = {
    "list": run.list_recipes,
    "run": run.run,
    "reproduce": run.reproduce,
    "report": look.report,
    "doctor": look.doctor,
    "compare": look.compare,
    "data": data_app,
}


class Commands(TyperGroup):
    """The commands by name; their arguments are read when one is called, in milliseconds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in COMMANDS:  # known for "did you mean"
            self.add_command(TyperCommand(name))
        self._complete: set[str] = set()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self._complete:
            self._complete.add(cmd_name)
            command = COMMANDS[cmd_name]
            if not isinstance(command, typer.Typer):
                alone = typer.Typer(**PLAIN)
                alone.command(cmd_name, cls=Command)(command)
                command = alone
            self.add_command(typer.main.get_command(command), cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """With the full first paragraph of their help."""
        texts = {
            name: each.info.help if name == "data" else each.__doc__
            for name, each in COMMANDS.items()
        }
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, " ".join(text.split("\n\n")[0].split())) for name, text in texts.items()]
            )

    # typer itself exits silently at Ctrl-C, and says what is wrong in four lines.

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        with interruptible(), in_one_line():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        with interruptible(), in_one_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """What typer refuses is an error of ours."""
    try:
        yield
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # it prints the help
            raise
        where = f" (see `{error.ctx.command_path} -h`)" if error.ctx else ""
        raise ConfigError(f"{one_line(error.format_message()).rstrip('.')}{where}") from None


class Command(TyperCommand):
    """A command that says what to do about a setting without a --set of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True  # refused here, with advice
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            settings = [each for each in rest if re.match(r"[A-Za-z][\w.]*=", each)]
            has_set = any("--set" in parameter.opts for parameter in self.params)
            again = _plain(f"--set {each}" for each in settings)
            advice = f"; repeat --set for each setting: {again}" if settings and has_set else ""
            ctx.fail(f"Got unexpected extra argument(s) ({_plain(rest)}){advice}")
        return rest


def _plain(words: Iterable[str]) -> str:
    """In one line, without control characters."""
    return repr(" ".join(words))[1:-1]


app = typer.Typer(
    help="Adaptive replica exchange stochastic gradient MCMC: run recipes, reproduce the paper.",
    no_args_is_help=True,
    cls=Commands,
    **{**PLAIN, "add_completion": True},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"torchrex {torchrex.__version__}")
        raise typer.Exit


class Warnings(logging.Handler):
    """Warnings of the library, on stderr; rich is loaded at the first one."""

    def emit(self, record: logging.LogRecord) -> None:
        from rich.logging import RichHandler

        from torchrex.cli.console import stderr

        RichHandler(console=stderr, show_time=False, show_path=False, markup=False).emit(record)


def call() -> None:
    """Run the command that was typed."""
    if "_TORCHREX_COMPLETE" in os.environ:  # a shell takes each line for a word
        os.environ["COLUMNS"] = "10000"  # so that typer does not wrap descriptions
    warnings, logger = Warnings(), logging.getLogger("torchrex")
    logger.addHandler(warnings)
    try:
        rank_and_size()  # refused here if they make no sense
        app()
    except RankError as error:
        advice = "what was saved is complete, and the same command with --resume continues from it"
        _exit(2, f"{error}; {advice}", error=True, prints=error.speaks)
    except TorchrexError as error:
        _exit(2, str(error), error=True)
    except OSError as error:  # such as a folder without permission, or a name that is too long
        what, why = one_line(error.filename or "a file"), one_line(error.strerror or error)
        _exit(2, f"cannot use {what} ({why}); choose another name or folder", error=True)
    except Interrupted as interrupted:
        _exit(interrupted.exit_code, str(interrupted))
    except KeyboardInterrupt:
        _exit(130, "interrupted")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        words = "lower the batch size, the number of rungs or what runs together"
        _exit(2, f"not enough memory; {words}. What was saved is complete", error=True)
    finally:
        logger.removeHandler(warnings)
        if "torchrex.distributed" in sys.modules:  # otherwise there is nothing to leave
            sys.modules["torchrex.distributed"].leave()


def _exit(code: int, message: str, *, error: bool = False, prints: bool | None = None) -> None:
    if is_main_process() if prints is None else prints:
        line = f"torchrex: {message}"
        typer.echo(typer.style(line, fg="red") if error and has_colors() else line, err=True)
    sys.exit(code)
