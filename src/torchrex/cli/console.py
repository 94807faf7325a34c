"""Where commands print: results on stdout, the rest on stderr; only the main process prints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from torchrex.processes import is_main_process

stdout = Console(quiet=not is_main_process())
stderr = Console(stderr=True, quiet=not is_main_process())


@contextlib.contextmanager
def printing(*, only_results: bool = False, as_json: bool = False) -> Iterator[None]:
    """Everything, only results and errors, or nothing on stdout before the JSON at the end."""
    before = stdout.quiet, stderr.quiet
    stdout.quiet, stderr.quiet = stdout.quiet or as_json, stderr.quiet or only_results
    try:
        yield
    finally:
        stdout.quiet, stderr.quiet = before


def advise(line: str) -> None:
    """A line on stdout that is no result: where to look, what to do next."""
    if not stderr.quiet:
        say(line)


def say(line: str) -> None:
    """One line as it is, without wrapping or colours."""
    stdout.print(line, highlight=False, markup=False, soft_wrap=True)


def count(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"
