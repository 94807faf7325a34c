"""Draws of rung 0 and how the ladder behaved: as tensors, tables, a plot and a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

import torchrex
from torchrex import notebook
from torchrex.errors import InvalidArgumentError, import_extra
from torchrex.exchange import (
    ExchangeReport,
    LogEvidence,
    PairReport,
    count_trips,
    report_pairs,
    rung_of,
)
from torchrex.posterior.arviz_export import coordinate_titles, draws_to_datatree, to_arviz
from torchrex.posterior.draws_file import SHAPES, read_draws, write_draws
from torchrex.posterior.evidence import log_evidence
from torchrex.posterior.standard_error import mean_error

if TYPE_CHECKING:
    from xarray import DataTree

MOST_IN_HTML = 10  # coordinates
MOST_CHAINS = 64  # whose round trips are counted
COORDINATES = ("coordinate", "mean", "sd", "se of mean", "ESS")
LINE_STYLES = ("-", "--", "-.", ":")


@dataclass(repr=False)
class Draws:
    """Draws of rung 0 and the traces kept with them, in ArviZ order: chains, then draws."""

    values: Tensor  # (chains, draws, dim)
    steps: Tensor  # (draws,): the number of steps done when each was taken
    noise_variance: Tensor  # (draws, pairs, chains): sigma2
    replica_at: Tensor  # (draws, rungs, chains): the replica on each rung
    # (draws, rungs, chains): energy estimates; with swap batches those of the latest test
    energy: Tensor
    accepted: Tensor  # (pairs, chains): swaps made over all steps
    proposed: Tensor  # (pairs, chains): swaps tested over all steps
    n_steps: int
    status: str = "finished"  # or "interrupted", "failed"
    settings: dict[str, Any] = field(default_factory=dict)  # of the run, for printing

    @property
    def n_chains(self) -> int:
        return self.values.shape[0]

    @property
    def n_draws(self) -> int:
        return self.values.shape[1]

    @property
    def acceptance_rate(self) -> Tensor:
        """Accepted over proposed for each pair, over all chains: (pairs,)."""
        return self.accepted.sum(1).double() / self.proposed.sum(1)

    def pairs(self) -> list[PairReport]:
        """Swaps of each pair of rungs, the noise s of their tests (rms over draws), and the last F.

        `expected` is the mean acceptance between equal energies at the s of every draw. Of an
        annealed ladder both are those of the last draw, as its temperatures are those of the last
        step. s and F are NaN in draws of older versions, which do not hold the ladder.
        """
        first = -1 if self.settings.get("annealed") else 0
        n_rungs = self.replica_at.shape[1]
        temperature = _numbers(self.settings.get("temperatures"), n_rungs)
        return report_pairs(
            self.accepted.sum(1),
            self.proposed.sum(1),
            self.noise_variance[first:],
            inverse_gap=-(1.0 / temperature).diff(),
            factor=_numbers(self.settings.get("correction_factor"), n_rungs - 1),
            n_runs=self.n_chains,
        )

    def exchange(self) -> ExchangeReport:
        """What the exchange did: swaps, noise, barrier, round trips, cost, and the log evidence.

        Round trips are counted in the first 64 chains from draw to draw: of thinned draws they are
        a lower bound. The log evidence is there for `tempering="likelihood"` up to an infinite
        temperature, from the draws that are here: leave the burn-in out with `after`. It is the
        evidence if the log likelihood is a normalised one; see `log_evidence`.
        """
        chains = range(min(self.n_chains, MOST_CHAINS)) if self.n_draws else ()
        counted = [  # chain by chain, which needs less memory
            [float(n.sum()) for n in count_trips(rung_of(self.replica_at[:, :, [chain]]))]
            for chain in chains
        ]
        restarts, trips = np.mean(counted, 0).tolist() if counted else (0.0, 0.0)
        between = int(self.steps[-1] - self.steps[0]) + 1 if self.n_draws else self.n_steps
        return ExchangeReport(
            tuple(self.pairs()),
            self.n_steps,
            trips,
            restarts,
            exact=self.n_draws == between,
            swap_cost=float(_numbers([self.settings.get("swap_cost")], 1)),
            log_evidence=self._log_evidence(),
        )

    def report(self) -> Any:
        """What doctor says of these draws, as text and in a notebook."""
        return torchrex.report.of_draws(self)

    def _log_evidence(self) -> LogEvidence | None:
        """None where the ladder does not reach the prior."""
        known = self.settings
        temperature = _numbers(known.get("temperatures"), self.energy.shape[1])
        rising = bool((temperature.diff() > 0).all()) and float(temperature[0]) > 0
        if known.get("tempering") != "likelihood" or known.get("annealed") or not rising:
            return None
        energy = self.energy[~self.energy.isnan().flatten(1).any(1)]  # none before the first test
        exact = bool(known.get("swaps_on_all_data"))
        why = "" if exact else 'stepping stones need exact energies, swap_batch="full"'
        enough = len(energy) > 3 and bool(energy.isfinite().all())
        reaches = math.isinf(temperature[-1]) and len(temperature) > 1
        return log_evidence(energy, temperature, noise=why) if enough and reaches else None

    def after(self, step: int) -> Draws:
        """The draws after the first `step` steps (burn-in); swap counts stay those of all steps."""
        if step > self.n_steps:
            raise InvalidArgumentError(f"there is no step {step:,}: the run has {self.n_steps:,}")
        kept = self.steps > step
        rows = {
            name: getattr(self, name)[kept] for name, axes in SHAPES.items() if axes[0] == "draws"
        }
        return replace(self, values=self.values[:, kept], **rows)

    def mean(self) -> Tensor:
        """Mean of every coordinate over all draws, (dim,)."""
        return self.values.double().mean((0, 1))

    def std(self) -> Tensor:
        """Standard deviation of every coordinate over all draws, (dim,)."""
        return self.values.double().flatten(0, 1).std(0)

    def standard_error(self) -> Tensor:
        """Standard error of the mean, (dim,): see `mean_error`."""
        return mean_error(self.values)

    def to_datatree(self, names: Sequence[str] | None = None) -> DataTree:
        """An xarray DataTree in ArviZ's schema (see `arviz_export.py`), with names of coordinates.

        `.to_netcdf(path)` and `.to_zarr(path, consolidated=False)` of the tree write it,
        `xarray.open_datatree(path)` reads it.
        """
        return draws_to_datatree(self, names)

    def to_arviz(self, names: Sequence[str] | None = None) -> Any:
        """What the functions of the installed ArviZ take: `az.summary(draws.to_arviz())`."""
        return to_arviz(self.to_datatree(names))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        meta = {"n_steps": self.n_steps, "status": self.status, "settings": self.settings}
        write_draws({name: getattr(self, name).contiguous() for name in SHAPES}, meta, Path(path))

    @staticmethod
    def load(path: str | Path) -> Draws:
        """Read what `save` wrote. Nothing in the file is executed."""
        return Draws(**read_draws(Path(path)))

    def summary(self, *, most: int = 10) -> str:
        """A table of the coordinates, and what `exchange()` says of the pairs of rungs.

        `noise allows` is the acceptance between equal energies, 2 Phi(-s/2) at F = 1. A pair that
        never swapped is named, with what to change.
        """
        if self.n_draws == 0:
            return f"no draws: {self.status} after {self.n_steps} steps"
        console = Console(width=80, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            size = f"{self.n_chains:,} chains x {self.n_draws:,} draws"
            console.print(f"{size}, {self.n_steps:,} steps, {self.status}")
            table = Table(*(Column(head, justify="right") for head in COORDINATES))
            for row in self._coordinate_rows(most, "..."):
                table.add_row(*row)
            console.print(table)
            if len(self.accepted):
                report = self.exchange()
                console.print(report.table, soft_wrap=True)
                for line in report.lines:
                    console.print(line)
        return captured.get().rstrip()

    def _repr_html_(self) -> str:
        """For notebooks: the first coordinates and the swaps, without style sheets or scripts."""
        n_chains, n_draws, dim = self.values.shape
        parts = []
        if n_draws:
            parts.append(notebook.table(COORDINATES, self._coordinate_rows(MOST_IN_HTML, "…")))
        if len(self.accepted):
            parts.append(self.exchange()._repr_html_())
        if self.settings:
            words = ", ".join(f"{name}: {value}" for name, value in self.settings.items())
            parts.append(notebook.details("settings", words))
        size = f"{n_chains:,} chains × {n_draws:,} draws × {dim:,} dim"
        return notebook.panel("Draws", f"{size}, {self.n_steps:,} steps, {self.status}", *parts)

    def _coordinate_rows(self, most: int, dots: str) -> list[tuple[str, ...]]:
        some = replace(self, values=self.values[..., :most])
        columns = (some.mean().tolist(), some.std().tolist(), some.standard_error().tolist())
        rows: list[tuple[str, ...]] = [
            (str(k), f"{mean:.4g}", f"{std:.4g}", f"{error:.2g}", _effective(std, error))
            for k, (mean, std, error) in enumerate(zip(*columns, strict=True))
        ]
        more = self.values.shape[2] - len(rows)
        return [*rows, (dots, f"{more:,} more", "", "", "")] if more else rows

    def plot(
        self,
        names: Sequence[str] | None = None,
        *,
        axes: Any = None,
        most: int = 8,
        most_chains: int = 8,
    ) -> Any:
        """Density and trace of the first `most` coordinates; returns axes (coordinates, 2).

        The grey area is the histogram of all chains. Lines and dots are single chains, the first
        `most_chains`, so that chains in different modes are seen. `axes` are your own, of the same
        shape. Long traces show every k-th draw.
        """
        titles = coordinate_titles(names, self.values.shape[2])[:most]
        if self.n_draws == 0 or not titles:
            raise InvalidArgumentError(f"nothing to plot in {self.n_draws} draws x {len(titles)}")
        if axes is None:
            pyplot = import_extra("matplotlib.pyplot", "plots")
            size = (10, 1.0 + 1.7 * len(titles))
            _, axes = pyplot.subplots(
                len(titles), 2, figsize=size, squeeze=False, constrained_layout=True
            )
        axes = np.asarray(axes)
        if axes.size != 2 * len(titles):
            raise InvalidArgumentError(f"axes must be {len(titles)} x 2, got {axes.size} axes")
        axes = axes.reshape(len(titles), 2)
        shown, stride = min(most_chains, self.n_chains), max(1, self.n_draws // 2000)
        bins = min(60, max(10, round(2 * self.n_draws ** (1 / 3))))
        dot_size = 1.5 if self.n_draws > 200 else 4.0
        for k, (density, trace) in enumerate(axes):
            values = self.values[:, :, k].detach().cpu().double().numpy()
            edges = np.histogram_bin_edges(values, bins=bins)
            together = f"{self.n_chains:,} chains together"
            density.hist(values.ravel(), edges, density=True, color="0.8", label=together)
            for chain in range(shown):
                color, label = f"C{chain % 10}", None if chain else f"each alone ({shown} shown)"
                heights, _ = np.histogram(values[chain], edges, density=True)
                # Line styles as well as colours: readable in grey.
                style = LINE_STYLES[chain % 4]
                density.stairs(heights, edges, label=label, color=color, linestyle=style)
                # Dots, because lines between modes would cover everything.
                steps, dots = self.steps[::stride], values[chain, ::stride]
                trace.plot(steps, dots, ".", color=color, markersize=dot_size, alpha=0.6)
            density.set(xlabel=titles[k], ylabel="density")
            trace.set_ylabel(titles[k])
        axes[-1, 1].set_xlabel("steps")
        if self.n_chains > 1:
            axes[0, 0].legend(fontsize=8, frameon=False)
            axes[0, 0].margins(y=0.3)  # space for the legend
        of = "" if shown == self.n_chains else f" of the first {shown} chains"
        axes[0, 0].set_title(f"{self.n_chains:,} chains x {self.n_draws:,} draws", fontsize=10)
        which = "draws" if stride == 1 else f"one draw in {stride}"
        axes[0, 1].set_title(f"{which}{of}", fontsize=10)
        return axes

    def __repr__(self) -> str:
        rates = ", ".join(f"{100 * rate:.3g} %" for rate in self.acceptance_rate.tolist())
        swaps = f", swaps accepted {rates}" if rates else ""
        size = f"{self.n_chains} chains x {self.n_draws} draws x {self.values.shape[2]} dim"
        return f"Draws({size}{swaps}, {self.status})"


def _effective(std: float, error: float) -> str:
    """How many independent draws have that error of the mean."""
    return f"{(std / error) ** 2:,.0f}" if error > 0 else ""


def _numbers(value: Any, n: int) -> Tensor:
    """`n` numbers of the settings, which may come from a file: NaN if they are anything else."""
    try:
        found = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = torch.empty(0)
    return found if tuple(found.shape) == (n,) else torch.full((n,), math.nan, dtype=torch.float64)
