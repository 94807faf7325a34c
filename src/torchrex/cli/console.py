"""Where commands print: results on stdout, the rest on stderr; only the main process prints."""

from __future__ import annotations

from rich.console import Console

from torchrex.processes import is_main_process

stdout = Console(quiet=not is_main_process())
stderr = Console(stderr=True, quiet=not is_main_process())


def say(line: str) -> None:
    """One line as it is, without wrapping or colours."""
    stdout.print(line, highlight=False, markup=False, soft_wrap=True)


def count(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"
