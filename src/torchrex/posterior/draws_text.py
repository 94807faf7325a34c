"""How draws are told in a terminal and in a notebook: the first coordinates, then the swaps of
every pair.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from torchrex import notebook
from torchrex.exchange import count_trips, in_words, percent, rung_of

if TYPE_CHECKING:
    from torchrex.posterior.draws import Draws

MOST_IN_HTML = 10  # coordinates
MOST_CHAINS = 64  # whose round trips are counted
PAIRS = ("rungs", "accepted", "proposed", "rate", "noise allows", "s", "F", "sigma2")


def draws_in_text(draws: Draws, *, most: int) -> str:
    if draws.n_draws == 0:
        return f"no draws: {draws.status} after {draws.n_steps} steps"
    tables = [
        _table(
            "", ("coordinate", "mean", "sd", "se of mean (ESS)"), _coordinates(draws, most, "...")
        )
    ]
    if len(draws.accepted):
        tables.append(_table("swaps", PAIRS, _swaps(draws, "-")))
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(
            f"{draws.n_chains:,} chains x {draws.n_draws:,} draws, {draws.n_steps:,} steps, {draws.status}"
        )
        for table in tables:
            console.print(table)
        for line in _said(draws):
            console.print(line)
    return captured.get().rstrip()


def draws_in_html(draws: Draws) -> str:
    title = f"{draws.n_chains:,} chains × {draws.n_draws:,} draws × {draws.values.shape[2]:,} dim"
    parts = []
    if draws.n_draws:
        parts.append(
            notebook.table(
                ("coordinate", "mean", "sd", "se of mean (ESS)"),
                _coordinates(draws, MOST_IN_HTML, "…"),
            )
        )
    if len(draws.accepted):
        parts.append(notebook.table(PAIRS, _swaps(draws, "–")))
        parts += [notebook.paragraph(line) for line in _said(draws)]
    if draws.settings:
        parts.append(
            notebook.details(
                "settings", ", ".join(f"{name}: {value}" for name, value in draws.settings.items())
            )
        )
    return notebook.panel("Draws", f"{title}, {draws.n_steps:,} steps, {draws.status}", *parts)


def _coordinates(draws: Draws, most: int, dots: str) -> list[tuple[str, ...]]:
    some = replace(draws, values=draws.values[..., :most])
    columns = [numbers.tolist() for numbers in (some.mean(), some.std(), some.standard_error())]
    rows = [
        (str(k), f"{mean:.4g}", f"{std:.4g}", f"{error:.2g}")
        for k, (mean, std, error) in enumerate(zip(*columns, strict=True))
    ]
    more = draws.values.shape[2] - len(rows)
    return [*rows, (dots, f"{more:,} more", "", "")] if more else [*rows]


def _swaps(draws: Draws, dash: str) -> list[tuple[str, ...]]:
    rows = []
    for pair, sigma2 in zip(
        draws.pairs(), draws.noise_variance.mean((0, 2), dtype=torch.float64).tolist(), strict=True
    ):
        rate = "" if not pair.proposed else percent(pair.rate) if pair.accepted else "0 %"
        known = [
            f"{value:.3g}" if math.isfinite(pair.noise_std) else ""
            for value in (pair.noise_std, pair.factor)
        ]
        expected = percent(pair.expected) if math.isfinite(pair.expected) else ""
        rungs = f"{pair.pair} {dash} {pair.pair + 1}"
        rows.append(
            (
                rungs,
                f"{pair.accepted:,}",
                f"{pair.proposed:,}",
                rate,
                expected,
                *known,
                f"{sigma2:.4g}",
            )
        )
    return rows


def _said(draws: Draws) -> list[str]:
    """What follows the table of pairs: round trips, and what to do about pairs that never swapped."""
    if not len(draws.accepted) or not draws.n_draws:
        return []
    chains = range(min(draws.n_chains, MOST_CHAINS))
    trips = [
        float(count_trips(rung_of(draws.replica_at[:, :, [k]]))[1].sum()) for k in chains
    ]  # one by one: memory
    every = draws.n_draws == int(draws.steps[-1]) - int(draws.steps[0]) + 1
    average = sum(trips) / len(trips)
    mean = f"{average:,.0f}" if average >= 100 else f"{average:.3g}"
    said = [
        f"round trips of a chain, its replicas together: {mean if every else f'at least {mean} (thinned draws)'}"
    ]
    dead = in_words(draws.pairs())
    return [*said, f"warning: {dead}"] if dead else said


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title or None)
    for column in head:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
