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
from rich.table import Table
from torch import Tensor

from torchrex import notebook
from torchrex.errors import InvalidArgumentError, import_extra
from torchrex.exchange import PairReport, count_trips, in_words, percent, report_pairs, rung_of
from torchrex.posterior.arviz_export import coordinate_titles, draws_to_datatree, to_arviz
from torchrex.posterior.draws_file import SHAPES, read_draws, write_draws

if TYPE_CHECKING:
    from xarray import DataTree

AT_ONCE = 2**24  # numbers whose autocorrelations are computed together
MOST_IN_HTML = 10  # coordinates
MOST_CHAINS = 64  # whose round trips are counted
COORDINATES = ("coordinate", "mean", "sd", "se of mean (ESS)")
PAIRS = ("rungs", "accepted", "proposed", "rate", "noise allows", "s", "F", "sigma2")
LINE_STYLES = ("-", "--", "-.", ":")


@dataclass(repr=False)
class Draws:
    """Draws of rung 0 and the traces kept with them, in ArviZ order: chains, then draws."""

    values: Tensor  # (chains, draws, dim)
    steps: Tensor  # (draws,): the number of steps done when each was taken
    noise_variance: Tensor  # (draws, pairs, chains): sigma2
    replica_at: Tensor  # (draws, rungs, chains): the replica on each rung
    energy: Tensor  # (draws, rungs, chains): energy estimates
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
        """Tables of the coordinates and of the pairs of rungs, then the round trips.

        sigma2 and `noise allows` are means over the draws, s is its rms; of an annealed ladder
        s and `noise allows` are those of the last draw. `noise allows` is the acceptance between
        equal energies, 2 Phi(-s/2) at F = 1. A pair that never swapped is named, with what to
        change.
        """
        if self.n_draws == 0:
            return f"no draws: {self.status} after {self.n_steps} steps"
        console = Console(width=80, color_system=None)
        with console.capture() as captured:
            size = f"{self.n_chains:,} chains x {self.n_draws:,} draws"
            console.print(f"{size}, {self.n_steps:,} steps, {self.status}")
            console.print(_table(None, COORDINATES, self._coordinate_rows(most, "...")))
            if len(self.accepted):
                console.print(_table("swaps", PAIRS, self._pair_rows("-")))
            for line in self._remarks():
                console.print(line)
        return captured.get().rstrip()

    def _repr_html_(self) -> str:
        """For notebooks: the first coordinates and the swaps, without style sheets or scripts."""
        n_chains, n_draws, dim = self.values.shape
        parts = []
        if n_draws:
            parts.append(notebook.table(COORDINATES, self._coordinate_rows(MOST_IN_HTML, "…")))
        if len(self.accepted):
            parts.append(notebook.table(PAIRS, self._pair_rows("–")))
            parts += [notebook.paragraph(line) for line in self._remarks()]
        if self.settings:
            words = ", ".join(f"{name}: {value}" for name, value in self.settings.items())
            parts.append(notebook.details("settings", words))
        size = f"{n_chains:,} chains × {n_draws:,} draws × {dim:,} dim"
        return notebook.panel("Draws", f"{size}, {self.n_steps:,} steps, {self.status}", *parts)

    def _coordinate_rows(self, most: int, dots: str) -> list[tuple[str, ...]]:
        some = replace(self, values=self.values[..., :most])
        columns = (some.mean().tolist(), some.std().tolist(), some.standard_error().tolist())
        rows: list[tuple[str, ...]] = [
            (str(k), f"{mean:.4g}", f"{std:.4g}", f"{error:.2g}")
            for k, (mean, std, error) in enumerate(zip(*columns, strict=True))
        ]
        more = self.values.shape[2] - len(rows)
        return [*rows, (dots, f"{more:,} more", "", "")] if more else rows

    def _pair_rows(self, dash: str) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        sigma2s = self.noise_variance.mean((0, 2), dtype=torch.float64).tolist()
        for pair, sigma2 in zip(self.pairs(), sigma2s, strict=True):
            rate = "" if not pair.proposed else percent(pair.rate) if pair.accepted else "0 %"
            expected = percent(pair.expected) if math.isfinite(pair.expected) else ""
            s, factor = (
                f"{value:.3g}" if math.isfinite(pair.noise_std) else ""
                for value in (pair.noise_std, pair.factor)
            )
            counts = (f"{pair.accepted:,}", f"{pair.proposed:,}", rate)
            rungs = f"{pair.pair} {dash} {pair.pair + 1}"
            rows.append((rungs, *counts, expected, s, factor, f"{sigma2:.4g}"))
        return rows

    def _remarks(self) -> list[str]:
        """The round trips, and what to do about pairs that never swapped."""
        if not len(self.accepted) or not self.n_draws:
            return []
        trips = [  # chain by chain, which needs less memory
            float(count_trips(rung_of(self.replica_at[:, :, [chain]]))[1].sum())
            for chain in range(min(self.n_chains, MOST_CHAINS))
        ]
        mean = sum(trips) / len(trips)
        shown = f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"
        if self.n_draws < int(self.steps[-1]) - int(self.steps[0]) + 1:
            shown = f"at least {shown} (thinned draws)"
        dead = in_words(self.pairs())
        warning = [f"warning: {dead}"] if dead else []
        return [f"round trips of a chain, its replicas together: {shown}", *warning]

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


def mean_error(values: Tensor) -> Tensor:
    """Standard error of the mean of draws (chains, draws, dim), (dim,) (Vehtari et al. 2021).

        error^2 = v tau / n,    v = variance within + variance between half chains
        tau = 1 + 2 * sum of autocorrelations

    Autocorrelations are those of all half chains pooled; Geyer's rule ends the sum where noise
    begins. Two such errors cover the truth in about 95 % of cases with any number of chains, if the
    draws are worth 50 independent ones. With fewer than 4 draws per chain it is the spread between
    chains, NaN for one.
    """
    n_chains, n_draws, dim = values.shape
    if n_draws < 4:
        means = values.double().mean(1)
        unknown = torch.full((dim,), math.nan, dtype=torch.float64)
        return means.std(0) / math.sqrt(n_chains) if n_chains > 1 else unknown
    columns = max(1, AT_ONCE // (n_chains * n_draws))
    return torch.cat([_mean_error(some.double()) for some in torch.split(values, columns, dim=2)])


def _mean_error(values: Tensor) -> Tensor:
    n = values.shape[1] // 2
    halves = torch.cat([values[:, :n], values[:, -n:]])
    means = halves.mean(1, keepdim=True)
    # Padded to twice the length, so that no lag wraps around.
    spectrum = torch.fft.rfft(halves - means, n=2 * n, dim=1).abs().square()
    covariance = torch.fft.irfft(spectrum, n=2 * n, dim=1)[:, :n].mean(0) / n  # (lags, dim)
    variance = covariance[0] + means[:, 0].var(0)
    correlation = 1.0 - (covariance[0] * n / (n - 1) - covariance) / variance
    correlation[0] = 1.0
    couples = correlation[: n // 2 * 2 : 2] + correlation[1 : n // 2 * 2 : 2]
    couples = couples.cummin(0).values * (couples > 0).cumprod(0)
    n_all = len(halves) * n
    # Antithetic chains have a small tau; no smaller one than this is believed.
    tau = (2.0 * couples.sum(0) - 1.0).clamp(min=1.0 / math.log10(n_all))
    return torch.where(variance == 0, 0.0, (variance * tau / n_all).sqrt())


def _numbers(value: Any, n: int) -> Tensor:
    """`n` numbers of the settings, which may come from a file: NaN if they are anything else."""
    try:
        found = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = torch.empty(0)
    return found if tuple(found.shape) == (n,) else torch.full((n,), math.nan, dtype=torch.float64)


def _table(title: str | None, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for column in head:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
