"""Progress on a terminal; silence everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from torchrex.posterior.sampling import Progress as Callback


@contextmanager
def progress_bar(title: str, n_steps: int, console: Console) -> Iterator[Callback | None]:
    """A callback (done, total) that draws one line, or None where stderr is not a terminal."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:,.0f} steps"),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=n_steps)
        yield lambda done, total: bar.update(task, completed=done, total=total)
