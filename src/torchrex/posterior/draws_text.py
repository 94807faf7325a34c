"""How draws are told in a terminal and in a notebook: the first coordinates, then the swaps of every pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from torchrex import notebook

if TYPE_CHECKING:
    from torchrex.posterior.draws import Draws

MOST_IN_HTML = 10  # coordinates


def draws_in_text(draws: Draws, *, most: int) -> str:
    if draws.n_draws == 0:
        return f"no draws: {draws.status} after {draws.n_steps} steps"
    tables = [_table("", ("coordinate", "mean", "sd", "se of mean"), _coordinates(draws, most, "..."))]
    if len(draws.accepted):
        newest = [f"{value:.4g}" for value in draws.noise_variance[-1].mean(1).tolist()]
        rows = [(*row, value) for row, value in zip(_swaps(draws, "-"), newest, strict=True)]
        tables.append(_table("swaps", ("rungs", "accepted", "proposed", "rate", "noise variance"), rows))
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(f"{draws.n_chains:,} chains x {draws.n_draws:,} draws, {draws.n_steps:,} steps, {draws.status}")
        for table in tables:
            console.print(table)
    return captured.get().rstrip()


def draws_in_html(draws: Draws) -> str:
    title = f"{draws.n_chains:,} chains × {draws.n_draws:,} draws × {draws.values.shape[2]:,} dim"
    parts = []
    if draws.n_draws:
        parts.append(notebook.table(("coordinate", "mean", "sd", "se of mean"), _coordinates(draws, MOST_IN_HTML, "…")))
    if len(draws.accepted):
        parts.append(notebook.table(("rungs", "swaps accepted", "proposed", "rate"), _swaps(draws, "–")))
    if draws.settings:
        parts.append(notebook.details("settings", ", ".join(f"{name}: {value}" for name, value in draws.settings.items())))
    return notebook.panel("Draws", f"{title}, {draws.n_steps:,} steps, {draws.status}", *parts)


def _coordinates(draws: Draws, most: int, dots: str) -> list[tuple[str, ...]]:
    columns = [numbers[:most].tolist() for numbers in (draws.mean(), draws.std(), draws.standard_error())]
    rows = [
        (str(k), f"{mean:.4g}", f"{std:.4g}", f"{error:.2g}") for k, (mean, std, error) in enumerate(zip(*columns, strict=True))
    ]
    more = draws.values.shape[2] - len(rows)
    return [*rows, (dots, f"{more:,} more", "", "")] if more else [*rows]


def _swaps(draws: Draws, dash: str) -> list[tuple[str, ...]]:
    counts = zip(draws.accepted.sum(1).tolist(), draws.proposed.sum(1).tolist(), draws.acceptance_rate.tolist(), strict=True)
    return [
        (f"{pair} {dash} {pair + 1}", f"{made:,}", f"{tested:,}", f"{100 * rate:.3g} %" if tested else "")
        for pair, (made, tested, rate) in enumerate(counts)
    ]


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title or None)
    for column in head:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
