"""The live display: the state of runs on a terminal while they go; elsewhere a line for every tenth
of the work if a command asks for it, else nothing.

It is drawn by rich between two stretches of steps, by the thread that runs them, and takes a fixed
small share of the time: the slower a picture is to draw, the longer the next one waits. A thread
that draws ten times a second would cost more than 1 % of a small network.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import IO, Self, cast

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from torchrex.exchange import StepInfo
from torchrex.posterior import PosteriorAverage
from torchrex.recording.observer import Observer, Watched, join, metrics_of
from torchrex.screen import Screen

Callback = Callable[[int, int], None]  # (steps done, steps in all)

SHARE = 1 / 250  # of the time, for drawing
AT_LEAST = 0.2  # seconds between two pictures
BETWEEN_REPORTS = 1.0  # seconds between two lines where there is no terminal, at least
MEMORY = 200  # steps over which a shown energy is smoothed
NARROW = 72  # columns that a table takes at least; a narrower terminal shows the bar alone
WIDE = 100  # columns from which on there is space for corrections and learning rates
COMPILING = "compiling the step for this GPU: up to a minute, less the next time"


class Line:
    """What the display knows of one run."""

    def __init__(self, watched: Watched) -> None:
        before = watched.run.exchange()
        self.watched = watched
        self.is_going = True
        self.pending: list[StepInfo] = []  # steps since the last picture
        self.energy: list[float] | None = None  # smoothed, by rung
        self.replica_at = list(range(watched.ladder.n_rungs))
        self.accepted = [pair.accepted for pair in before.pairs]
        self.proposed = [pair.proposed for pair in before.pairs]
        self.counted_since = before.steps_before
        self.noise_variance = self.correction = [float("nan")] * watched.ladder.n_pairs
        self.average: PosteriorAverage | None = None
        self.n_draws = 0  # of the average, when its accuracy was computed
        self.accuracy: float | None = None

    @property
    def compiles(self) -> bool:
        """Is its first step on the way, and captured?"""
        captures = getattr(self.watched.run, "capturing", False)
        return captures and self.energy is None and not self.pending

    def update(self) -> None:
        """Take in the pending steps and draws."""
        if self.pending:
            window = join(self.pending, self.watched.run.n_steps)
            self.pending = []
            fresh, n = window.energy.mean(0).tolist(), len(window.energy)
            weight = 1.0 - (1.0 - 1.0 / MEMORY) ** n
            pairs = zip(self.energy or fresh, fresh, strict=True)
            self.energy = [old + weight * (new - old) for old, new in pairs]
            self.replica_at = window.replica_at[-1].tolist()
            made, tested = window.accepted.sum(0).tolist(), window.proposed.sum(0).tolist()
            self.accepted = [a + b for a, b in zip(self.accepted, made, strict=True)]
            self.proposed = [a + b for a, b in zip(self.proposed, tested, strict=True)]
            self.noise_variance = window.noise_variance[-1].tolist()
            self.correction = window.correction[-1].tolist()
        if self.average is not None and self.average.n_draws != self.n_draws:
            self.n_draws = self.average.n_draws
            self.accuracy = metrics_of(self.average, self.average.rungs[0]).get("accuracy")


class LiveDisplay(Observer):
    """Rungs, energies, swaps, sigma2 and the time left; one line for each of several runs.

    As an observer it is there while runs go; as a context manager from the beginning to the end of
    the block. `progress(done, total)` moves the bar of work that has no observers. One bar may show
    several parts, one after the other: `n_steps` is that of all parts, and each is a `part` block.
    With `reports` there is a line for every tenth of the work where no terminal is.
    """

    def __init__(
        self,
        title: str = "training",
        n_steps: int = 0,
        *,
        console: Console | None = None,
        reports: bool = False,
    ) -> None:
        self.title = title
        if console is None:
            screen = cast(IO[str], Screen(sys.stderr)) if sys.stderr is not None else None
            console = Console(file=screen, stderr=True)
        self.console = console
        self.shows = self.console.is_terminal and not self.console.is_dumb_terminal
        self.reports = reports and not self.shows
        self._bar = Progress(console=self.console, speed_estimate_period=600, auto_refresh=False)
        self._task = self._bar.add_task(title, total=n_steps)
        self._first, self._steps, self._copies = 0, n_steps, 1  # of the part that goes
        self._in_parts = False
        self._live: Live | None = None
        self._is_held = False  # by a `with` block
        self._lines: dict[Watched, Line] = {}
        self._next = 0.0  # when the next picture is due
        self._cost = 0.002  # seconds of a picture
        self._tenth, self._reported = 0, time.monotonic()  # of the newest line
        self._began = self._reported

    def __enter__(self) -> Self:
        self._is_held = True
        self._open()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_held = False
        self._close()

    @contextlib.contextmanager
    def part(self, title: str, n_steps: int, copies: int = 1) -> Iterator[Self]:
        """The next part of the work: `copies` runs of `n_steps` each, which go together. The screen
        is free between two parts.
        """
        self.title, self._steps, self._copies, self._in_parts = title, n_steps, copies, True
        self._move(0, n_steps, begins=True)
        if self.reports:
            self._report()
        try:
            with self:
                yield self
        finally:
            self._lines.clear()  # of a part that failed
            self._first += n_steps * copies

    def progress(self, done: int, total: int) -> None:
        """Steps done so far."""
        if not (self.shows or self.reports):
            return
        self._move(done, total)
        if self.shows and time.monotonic() >= self._next:
            self._draw()
        elif self.reports:
            self._report()

    def _move(self, done: int, total: int, *, begins: bool = False) -> None:
        """Move the bar. Work that begins has a pace of its own, and may have been resumed."""
        if self._in_parts:
            done = self._first + self._copies * self._steps * done // max(1, total)
            total = int(self._bar.tasks[0].total or 0)
        if begins or done < self._bar.tasks[0].completed:
            self._bar.reset(self._task, start=True, total=total, completed=done)
        else:
            self._bar.update(self._task, completed=done, total=total)

    def _report(self) -> None:
        task, now = self._bar.tasks[0], time.monotonic()
        tenth = int(task.percentage // 10)
        if tenth > self._tenth and now - self._reported >= BETWEEN_REPORTS:
            self._tenth, self._reported = tenth, now
            share, left = task.percentage / 100, task.time_remaining
            if left is None:  # a part that has just begun has no pace yet
                left = (now - self._began) * (1 / share - 1)
            self._say(f"{share:.0%}, {timedelta(seconds=int(left))} left: {self.title}")

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def on_start(self, watched: Watched) -> None:
        if self.shows or self.reports:
            self._lines[watched] = line = Line(watched)
            self._move(watched.run.n_steps, watched.n_steps, begins=True)
            self._open()
            if line.compiles:
                self._draw()
                if self.reports and len(self._lines) == 1:
                    self._say(COMPILING)

    def on_steps(self, watched: Watched, infos: StepInfo) -> None:
        if watched in self._lines:
            if self.shows:
                self._lines[watched].pending.append(infos)
            going = [line for line in self._lines.values() if line.is_going]
            if going[-1].watched is watched:  # runs report in turn: draw them at the same step
                self.progress(watched.run.n_steps, watched.n_steps)

    def on_draw(self, watched: Watched, average: PosteriorAverage) -> None:
        if self.shows and watched.number_of(average) == 0:
            self._lines[watched].average = average

    def on_end(self, watched: Watched, status: str) -> None:
        if watched not in self._lines:
            return
        self._lines[watched].is_going = False
        if status != "failed":
            del self._lines[watched]
        if not any(line.is_going for line in self._lines.values()):
            self._lines.clear()
            if not self._is_held:
                self._close()

    def picture(self) -> RenderableType:
        """Title and bar above a table of rungs or of runs; without it in a narrow terminal."""
        width, lines = self.console.width, list(self._lines.values())
        self._bar.columns = BAR if width >= NARROW else SHORT_BAR
        title = Text(self.title, no_wrap=True, overflow="ellipsis")
        bar = Group(title, self._bar.get_renderable())
        if not lines or width < NARROW:
            return bar
        table = rungs_table if len(lines) == 1 else runs_table
        notes = [COMPILING] if any(line.compiles for line in lines if line.is_going) else []
        if len(lines) == 1 and lines[0].average is not None:
            rung = lines[0].average.rungs[0]
            shown = _percent(lines[0].accuracy)
            accuracy = f", accuracy of rung {rung} {shown}" if shown else ""
            notes.append(f"average of {lines[0].n_draws:,} draws{accuracy}")
        if lines[0].counted_since and lines[0].accepted:
            notes.append(f"swaps are counted since step {lines[0].counted_since:,}")
        note = Text("; ".join(notes), no_wrap=True, overflow="ellipsis")
        return Group(bar, table(lines, width >= WIDE), *([note] if notes else []))

    def _open(self) -> None:
        if self.shows and self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
            self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        began = time.perf_counter()
        for line in self._lines.values():
            line.update()
        self._live.update(self.picture(), refresh=True)
        # The first picture loads modules: one slow picture does not delay the next for long.
        self._cost = min(time.perf_counter() - began, 2 * self._cost)
        self._next = time.monotonic() + max(AT_LEAST, self._cost / SHARE)

    def _close(self) -> None:
        """Leave the screen as it was."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __repr__(self) -> str:
        task = self._bar.tasks[0]
        where = f", step {task.completed:,.0f} of {task.total:,.0f}" if task.total else ""
        return f"LiveDisplay({self.title!r}{where}{'' if self.shows else ', silent'})"


@contextlib.contextmanager
def progress_bar(
    title: str, n_steps: int, console: Console | None = None
) -> Iterator[Callback | None]:
    """A callback (done, total) that draws one line, or None where stderr is not a terminal."""
    with LiveDisplay(title, n_steps, console=console) as display:
        yield display.progress if display.shows else None


_END = (TaskProgressColumn(), TimeRemainingColumn(), TextColumn("left"))
SHORT_BAR: tuple[str | ProgressColumn, ...] = (BarColumn(bar_width=20), *_END)
BAR: tuple[str | ProgressColumn, ...] = (
    BarColumn(bar_width=20),
    TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"),
    *_END,
)


def rungs_table(lines: list[Line], is_wide: bool) -> Table:
    """One row per rung of a single run; numbers of a pair are on the row of its colder rung."""
    (line,) = lines
    ladder = line.watched.ladder
    names = ["rung", "temperature", *(["lr"] if is_wide else []), "energy", "replica"]
    if ladder.n_pairs:
        names += ["swaps up", "accepted", "sigma2", *(["correction"] if is_wide else [])]
    table = _table(names)
    temperatures, lrs = line.watched.rungs_at(line.watched.run.n_steps - 1)
    for rung, temperature in enumerate(temperatures):
        cells = [str(rung), f"{temperature:.4g}", *([f"{lrs[rung]:.3g}"] if is_wide else [])]
        cells += [_short(line.energy[rung]) if line.energy else "", str(line.replica_at[rung])]
        if rung < ladder.n_pairs:
            made, tested = line.accepted[rung], line.proposed[rung]
            cells += [f"{made:,}", _rate(made, tested), _short(line.noise_variance[rung])]
            cells += [_short(line.correction[rung])] if is_wide else []
        table.add_row(*cells)
    return table


def runs_table(lines: list[Line], is_wide: bool) -> Table:
    """One row per run: its rung 0, and all its pairs together."""
    names = ["seed", "energy", *(["temperature"] if is_wide else [])]
    table = _table([*names, "swaps", "accepted", "sigma2", "accuracy"], first="run")
    for line in lines:
        head = (Text(line.watched.name), str(line.watched.seed))
        if not line.is_going:
            table.add_row(*head, Text("failed", style="red"))
            continue
        temperatures, _ = line.watched.rungs_at(line.watched.run.n_steps - 1)
        swaps = ["", "", ""]
        if line.accepted:
            made, tested = sum(line.accepted), sum(line.proposed)
            swaps = [f"{made:,}", _rate(made, tested), _short(line.noise_variance[0])]
        table.add_row(
            *head,
            _short(line.energy[0]) if line.energy else "",
            *([f"{temperatures[0]:.4g}"] if is_wide else []),
            *swaps,
            _percent(line.accuracy),
        )
    return table


def _table(columns: list[str], first: str = "") -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    if first:
        table.add_column(first, no_wrap=True, overflow="ellipsis", ratio=1)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def _rate(made: int, tested: int) -> str:
    return f"{100 * made / tested:.3g} %" if tested else ""


def _short(value: float) -> str:
    """Five digits, with commas where it is large."""
    return "" if value != value else f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:#.5g}"
