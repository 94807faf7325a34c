"""The live display: what a run does, on a terminal, while it does it; silence everywhere else.

It is drawn between two stretches of steps, by the thread that runs them, and gives itself a fixed
small share of the time: the slower a picture is to draw, the longer the next one waits. A thread
that draws ten times a second would cost more than 1 % of a small network.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType

from torchrex.exchange import StepInfo
from torchrex.recording.live_picture import Line, draw
from torchrex.recording.live_resize import extra_rows, reflows
from torchrex.recording.observer import Average, Observer, Watched, Windows, metrics_of

SHARE = 1 / 250  # of the time, for drawing
AT_LEAST = 0.2  # seconds between two pictures
MEMORY = 200  # steps over which a shown energy is smoothed


class LiveDisplay(Observer):
    """Rungs, energies, swaps, sigma2 and the time left; one line for each of several runs; one bar
    where there is no room.

    As an observer it is there while runs go; as a context manager from the beginning to the end of
    the block, with a bar while nothing goes yet. `progress(done, total)` moves the bar of work that
    has no observers.
    """

    def __init__(
        self, title: str = "training", n_steps: int = 0, *, console: Console | None = None
    ) -> None:
        self.title, self.n_steps, self.n_done = title, n_steps, 0
        self.console = Console(stderr=True) if console is None else console
        self.shows = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live: Live | None = None
        self._held = False  # by a `with` block
        self._lines: dict[Watched, Line] = {}
        self._windows: dict[Watched, Windows] = {}
        self._drawn, self._cost = 0.0, 0.0
        self._shown: tuple[RenderableType, ConsoleDimensions] = (
            "",
            self.console.size,
        )  # the picture, and for what terminal
        self._first: tuple[float, int] | None = (
            None  # when the first steps were done, and how many: compilation is no pace
        )

    # For work without observers

    def __enter__(self) -> Self:
        self._held = True
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held = False
        self._close()

    def progress(self, done: int, total: int) -> None:
        """Steps done so far."""
        if self.shows:
            self._move(done, total)
            self._draw_if_due()

    # For runs

    def on_start(self, watched: Watched) -> None:
        if not self.shows:
            return
        self._lines[watched] = Line(watched)
        self._windows[watched] = Windows(float("inf"))
        self.n_done, self.n_steps = watched.run.n_steps, watched.n_steps
        self._open()

    def on_steps(self, watched: Watched, infos: StepInfo) -> None:
        if not self.shows:
            return
        for _ in self._windows[watched].add(
            infos, watched.run.n_steps
        ):  # kept until a picture is due
            raise AssertionError("an endless window is never full")
        if watched is next(
            reversed(self._windows)
        ):  # runs side by side are told one after the other: draw them at one step
            self._move(watched.run.n_steps, watched.n_steps)
            self._draw_if_due()

    def on_draw(self, watched: Watched, average: Average) -> None:
        if self.shows and watched.number_of(average) == 0:
            self._lines[watched].average = average

    def on_end(self, watched: Watched, status: str) -> None:
        if not self.shows:
            return
        self._windows.pop(watched, None)
        if status == "failed" and self._windows:  # the others go on
            self._lines[watched].status = status
        else:
            self._lines.pop(watched, None)
        if not self._windows:
            self._lines.clear()
            if not self._held:
                self._close()

    # Drawing

    def _move(self, done: int, total: int) -> None:
        self.n_done, self.n_steps = done, total
        if self._first is None or done < self._first[1]:
            self._first = (time.monotonic(), done)

    def seconds_left(self) -> float | None:
        """At the pace since the first steps; None before there is one."""
        if self._first is None or self.n_done <= self._first[1]:
            return None
        since, step = self._first
        return (time.monotonic() - since) / (self.n_done - step) * (self.n_steps - self.n_done)

    def _open(self) -> None:
        if self.shows and self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
            self._draw()

    def _close(self) -> None:
        """Leave the screen as it was."""
        live, self._live, self._first = self._live, None, None
        if live is not None:
            with contextlib.suppress(BrokenPipeError):
                self._show(live, "")  # the picture may be taller than the terminal has become
                live.stop()

    def _draw_if_due(self) -> None:
        if self._live is None:
            return
        waited = time.monotonic() - self._drawn
        if waited >= max(AT_LEAST, self._cost / SHARE) or (
            waited >= AT_LEAST and self.console.size != self._shown[1]
        ):
            self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        began = time.perf_counter()
        for watched, windows in self._windows.items():
            for window in windows.rest():
                self._lines[watched].take(window, MEMORY)
        for line in self._lines.values():
            if line.average is not None and line.average.n_draws != line.n_draws:
                line.n_draws = line.average.n_draws
                line.accuracy = metrics_of(line.average, line.average.rungs[0]).get("accuracy")
        picture = draw(
            self.title,
            self.n_done,
            self.n_steps,
            self.seconds_left(),
            list(self._lines.values()),
            *self.console.size,
        )
        self._show(self._live, picture)
        took = time.perf_counter() - began
        # The first picture loads what it needs and says nothing about the next; one slow moment is
        # forgotten soon.
        self._cost = min(took, 2 * self._cost) if self._cost else min(took, 0.002)
        self._drawn = time.monotonic()

    def _show(self, live: Live, picture: RenderableType) -> None:
        """Put a picture in place of the one before."""
        before, size = self._shown[1], self.console.size
        if size.width < before.width and reflows(os.environ):
            # rich goes up as many lines as it wrote; those that the terminal broke since then have
            # become more.
            extra = extra_rows(
                self.console, self._shown[0], drawn_for=before.width, width=size.width
            )
            up = [
                (ControlType.ERASE_IN_LINE, 2),
                *[(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * extra,
            ]
            self.console.control(Control(ControlType.CARRIAGE_RETURN, *up))
        self._shown = (picture, size)
        live.update(picture, refresh=True)

    def __repr__(self) -> str:
        where = f", step {self.n_done:,} of {self.n_steps:,}" if self.n_steps else ""
        return f"LiveDisplay({self.title!r}{where}{'' if self.shows else ', silent'})"
