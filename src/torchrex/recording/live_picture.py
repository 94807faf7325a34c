"""How the live display looks: a bar above a table of rungs, a table of runs, or the bar alone,
whichever there is room for.
"""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torchrex.recording.observer import Average, Watched, Window, values_at

NARROW = 72  # columns that a table of rungs or of runs takes at least
WIDE = 100  # columns from which on there is room for corrections and learning rates


class Line:
    """What the display knows of one run."""

    def __init__(self, watched: Watched) -> None:
        n = watched.ladder.n_pairs
        self.watched = watched
        self.energy: list[float] | None = None  # smoothed, by rung
        self.replica_at = list(range(n + 1))
        before = watched.swaps_before or ((0, 0),) * n
        self.accepted, self.proposed = (
            [made for made, _ in before],
            [tested for _, tested in before],
        )
        self.since = (
            watched.run.n_steps if watched.swaps_before is None else 0
        )  # the step from which on swaps are counted
        self.noise_variance, self.correction = [float("nan")] * n, [float("nan")] * n
        self.average: Average | None = None
        self.n_draws = 0  # of the average, when it was looked at last
        self.accuracy: float | None = None
        self.status = ""

    def take(self, window: Window, memory: int) -> None:
        """Some more steps. Energies are smoothed over about `memory` steps."""
        fresh, n = window.energy.mean(0).tolist(), len(window.energy)
        weight = 1.0 if self.energy is None else 1.0 - (1.0 - 1.0 / memory) ** n
        before = fresh if self.energy is None else self.energy
        self.energy = [old + weight * (new - old) for old, new in zip(before, fresh, strict=True)]
        self.replica_at = window.replica_at[-1].tolist()
        self.accepted = [
            a + b for a, b in zip(self.accepted, window.accepted.sum(0).tolist(), strict=True)
        ]
        self.proposed = [
            a + b for a, b in zip(self.proposed, window.proposed.sum(0).tolist(), strict=True)
        ]
        self.noise_variance, self.correction = (
            window.noise_variance[-1].tolist(),
            window.correction[-1].tolist(),
        )


def draw(
    title: str,
    done: int,
    total: int,
    seconds_left: float | None,
    lines: list[Line],
    width: int,
    height: int,
) -> RenderableType:
    """The picture for a terminal of that size."""
    bar = _bar(title, done, total, seconds_left, width)
    if not lines or width < NARROW:
        return bar
    # One line stays free: what fills the terminal cannot be erased to its top.
    if len(lines) == 1 and lines[0].watched.ladder.n_rungs + 4 < height:
        table, told = rungs(lines[0], wide=width >= WIDE), _below(lines[0])
        return Group(bar, table, told) if told else Group(bar, table)
    note = _since(lines[0])
    if len(lines) + (4 if note else 3) < height:
        return Group(bar, runs(lines, width), *([Text(note)] if note else []))
    return bar


def _bar(
    title: str, done: int, total: int, seconds_left: float | None, width: int
) -> RenderableType:
    """One line, whatever the width: the title gives way first, then the bar, then the count."""
    left = "" if seconds_left is None else f"{_clock(seconds_left)} left"
    percent = f"{100 * done / total:3.0f} %" if total else ""
    count = f"{done:,} of {total:,} steps" if total else ""
    parts = [part for part in (count, percent, left) if part]
    while len(parts) > 1 and width < 12 + sum(len(part) + 1 for part in parts):
        parts.pop(0)
    room = width - sum(len(part) + 1 for part in parts)
    length = min(20, max(0, room - 1 - min(len(title), 12)))
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=max(1, room - length - 1))
    cells: list[RenderableType] = [Text(title)]
    if length >= 5:
        cells.append(ProgressBar(total=max(1, total), completed=done, width=length))
    for cell in [*cells[1:], *parts]:
        grid.add_column(no_wrap=True)
        if isinstance(cell, str):
            cells.append(Text(cell))
    grid.add_row(*cells)
    return grid


def rungs(line: Line, *, wide: bool) -> Table:
    """One row a rung; what belongs to a pair stands on the row of its colder rung."""
    table = _table(["rung", "temperature", *(["lr"] if wide else []), "energy", "replica"])
    ladder = line.watched.ladder
    if ladder.n_pairs:
        for name in ("swaps up", "accepted", "sigma2", *(["correction"] if wide else [])):
            table.add_column(name, justify="right", no_wrap=True)
    temperatures, lrs = values_at(ladder, max(0, line.watched.run.n_steps - 1))
    for rung in range(ladder.n_rungs):
        cells = [str(rung), f"{temperatures[rung]:.4g}", *([f"{lrs[rung]:.3g}"] if wide else [])]
        cells += [_energy(line, rung), str(line.replica_at[rung])]
        if rung < ladder.n_pairs:
            cells += [f"{line.accepted[rung]:,}", _rate(line.accepted[rung], line.proposed[rung])]
            cells += [
                _short(line.noise_variance[rung]),
                *([_short(line.correction[rung])] if wide else []),
            ]
        table.add_row(*cells)
    return table


def runs(lines: list[Line], width: int) -> Table:
    """One row a run: rung 0, and all pairs together."""
    wide = width >= WIDE
    table = _table(
        [
            "seed",
            "energy",
            *(["temperature"] if wide else []),
            "swaps",
            "accepted",
            "sigma2",
            "accuracy",
        ],
        first="run",
    )
    room = width - (78 if wide else 61)  # what the numbers leave
    for line in lines:
        name = line.watched.name
        seed = str(line.watched.seed)
        name = (
            name if len(name) <= room else "…" + name[len(name) - room + 1 :]
        )  # runs differ at the end of their names
        if line.status:
            table.add_row(Text(name), seed, Text(line.status, style="red"))
            continue
        temperatures, _ = values_at(line.watched.ladder, max(0, line.watched.run.n_steps - 1))
        pairs = bool(line.accepted)
        table.add_row(
            Text(name),
            seed,
            _energy(line, 0),
            *([f"{temperatures[0]:.4g}"] if wide else []),
            f"{sum(line.accepted):,}" if pairs else "",
            _rate(sum(line.accepted), sum(line.proposed)) if pairs else "",
            _short(line.noise_variance[0]) if pairs else "",
            "" if line.accuracy is None else f"{100 * line.accuracy:.2f} %",
        )
    return table


def _table(columns: list[str], first: str = "") -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 1)
    )
    if first:
        table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _below(line: Line) -> Text | None:
    """What is said of the average, and of swaps that were not counted from the first step on: one
    line, or none.
    """
    told = [note] if (note := _since(line)) else []
    if line.average is not None:
        accuracy = (
            ""
            if line.accuracy is None
            else f", accuracy of rung {line.average.rungs[0]} {100 * line.accuracy:.2f} %"
        )
        told.insert(0, f"average of {line.n_draws:,} draws{accuracy}")
    return Text("; ".join(told), no_wrap=True, overflow="ellipsis") if told else None


def _since(line: Line) -> str:
    return f"swaps are counted since step {line.since:,}" if line.since and line.accepted else ""


def _energy(line: Line, rung: int) -> str:
    return "" if line.energy is None else _short(line.energy[rung])


def _rate(made: int, tested: int) -> str:
    return f"{100 * made / tested:.3g} %" if tested else ""


def _short(value: float) -> str:
    """Five digits, with commas where it is large."""
    return "" if value != value else f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:#.5g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
