"""Progress on a terminal; silence everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Callback = Callable[[int, int], None]


@contextmanager
def progress_bar(
    title: str, n_steps: int, console: Console | None = None
) -> Iterator[Callback | None]:
    """A callback (done, total) that draws one line, or None where stderr is not a terminal."""
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=n_steps)
        yield lambda done, total: bar.update(task, completed=done, total=total)
