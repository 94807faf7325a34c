"""What a run leaves behind: draws of rung 0 and how the ladder behaved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.exchange import PairReport, report_pairs
from torchrex.posterior.arviz_export import draws_to_datatree, to_arviz
from torchrex.posterior.draws_file import SHAPES, read_draws, write_draws
from torchrex.posterior.draws_plot import plot_draws
from torchrex.posterior.draws_text import draws_in_html, draws_in_text

if TYPE_CHECKING:
    from xarray import DataTree

AT_ONCE = 2**24  # numbers whose autocorrelations are computed together


@dataclass(repr=False)
class Draws:
    """Draws of rung 0 and the traces kept with them. Axes are in ArviZ order: chains (independent
    runs), then draws.
    """

    values: Tensor  # (chains, draws, dim)
    steps: Tensor  # (draws,): after how many steps each was taken
    noise_variance: Tensor  # (draws, pairs, chains): sigma2 trace
    replica_at: Tensor  # (draws, rungs, chains): who stood on each rung
    energy: Tensor  # (draws, rungs, chains): energy estimates per rung
    accepted: Tensor  # (pairs, chains): swaps made over all steps
    proposed: Tensor  # (pairs, chains): swaps tested over all steps
    n_steps: int
    status: str = "finished"  # or "interrupted", "failed"
    settings: dict[str, Any] = field(default_factory=dict)  # how the draws came about, for printing

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
        """The swaps of each pair of rungs, with the noise s of their tests (rms over the draws) and
        F at the end of the run.

        `expected` is the mean acceptance between equal energies at the s of every draw. s and F are
        NaN where the draws do not tell the ladder, as older files do not.
        """
        n_rungs = self.replica_at.shape[1]
        temperature, factor = (
            _numbers(self.settings.get(name), n)
            for name, n in (("temperatures", n_rungs), ("correction_factor", n_rungs - 1))
        )
        gap = -(1.0 / temperature).diff()
        made, tested = self.accepted.sum(1), self.proposed.sum(1)
        return report_pairs(
            made, tested, self.noise_variance, inverse_gap=gap, factor=factor, n_runs=self.n_chains
        )

    def after(self, step: int) -> Draws:
        """The draws after the first `step` steps (burn-in left out); the swap counts stay those of
        the whole run.
        """
        if step > self.n_steps:
            raise InvalidArgumentError(
                f"there is no step {step:,}: the run has {self.n_steps:,}; leave fewer of them out"
            )
        kept = self.steps > step
        return Draws(
            self.values[:, kept],
            self.steps[kept],
            self.noise_variance[kept],
            self.replica_at[kept],
            self.energy[kept],
            self.accepted,
            self.proposed,
            self.n_steps,
            self.status,
            self.settings,
        )

    def mean(self) -> Tensor:
        """Mean of every coordinate over all draws, (dim,)."""
        return self.values.double().mean((0, 1))

    def std(self) -> Tensor:
        """Standard deviation of every coordinate over all draws, (dim,)."""
        return self.values.double().flatten(0, 1).std(0)

    def standard_error(self) -> Tensor:
        """Standard error of the mean, (dim,), from the effective number of draws (see
        `mean_error`).
        """
        return mean_error(self.values)

    def summary(self, *, most: int = 10) -> str:
        """Small tables: coordinates with mean, sd and standard error; pairs of rungs with swaps, s
        and F; then the round trips.

        sigma2 and `expected` are means over the draws, s is its rms; `expected` is the acceptance
        between equal energies, 2 Phi(-s/2) at F = 1. A pair that never swapped is named, with what
        to change.
        """
        return draws_in_text(self, most=most)

    def to_datatree(self, names: Sequence[str] | None = None) -> DataTree:
        """An xarray DataTree in ArviZ's schema (see `arviz_export.py`); `names` are those of the
        coordinates.

        `.to_netcdf(path)` and `.to_zarr(path, consolidated=False)` of the tree write it,
        `xarray.open_datatree(path)` reads it.
        """
        return draws_to_datatree(self, names)

    def to_arviz(self, names: Sequence[str] | None = None) -> Any:
        """What the functions of the installed ArviZ take: `az.summary(draws.to_arviz())`."""
        return to_arviz(self.to_datatree(names))

    def plot(
        self,
        names: Sequence[str] | None = None,
        *,
        axes: Any = None,
        most: int = 8,
        most_chains: int = 8,
    ) -> Any:
        """Density (left) and trace (right) of each of the first `most` coordinates; returns the
        axes, (coordinates, 2).

        The grey area is the histogram of all chains; lines and dots are single chains, the first
        `most_chains` of them, so that chains which stay in different modes are seen. `axes` are
        your own, of the same shape. Long traces show every k-th draw.
        """
        return plot_draws(self, names, axes=axes, most=most, most_chains=most_chains)

    def _repr_html_(self) -> str:
        """For notebooks: the first ten coordinates and the swaps, without style sheets or scripts."""
        return draws_in_html(self)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        meta = {"n_steps": self.n_steps, "status": self.status, "settings": self.settings}
        write_draws({name: getattr(self, name).contiguous() for name in SHAPES}, meta, Path(path))

    @staticmethod
    def load(path: str | Path) -> Draws:
        """Read what `save` wrote. Nothing in the file is executed."""
        return Draws(**read_draws(Path(path)))

    def __repr__(self) -> str:
        rates = ", ".join(f"{100 * rate:.3g} %" for rate in self.acceptance_rate.tolist())
        swaps = f", swaps accepted {rates}" if rates else ""
        return f"Draws({self.n_chains} chains x {self.n_draws} draws x {self.values.shape[2]} dim{swaps}, {self.status})"


def mean_error(values: Tensor) -> Tensor:
    """Standard error of the mean of draws (chains, draws, dim), (dim,), by the effective number of
    draws (Vehtari et al. 2021).

        error^2 = v tau / n,    v = variance within + variance between half chains,    tau = 1 + 2 * sum of autocorrelations

    Autocorrelations are those of all half chains pooled, and know how far these lie apart; the sum
    is Geyer's, which ends where noise begins. Two such errors cover the truth in about 95 % of
    cases with any number of chains, also with one, if the draws are worth 50 independent ones.
    Fewer than 4 draws a chain: the spread between chains, NaN for one.
    """
    n_chains, n_draws, dim = values.shape
    if n_draws < 4:
        means = values.double().mean(1)
        return (
            means.std(0) / math.sqrt(n_chains)
            if n_chains > 1
            else torch.full((dim,), math.nan, dtype=torch.float64)
        )
    columns = max(1, AT_ONCE // (n_chains * n_draws))
    return torch.cat([_mean_error(some.double()) for some in torch.split(values, columns, dim=2)])


def _mean_error(values: Tensor) -> Tensor:
    n = values.shape[1] // 2
    halves = torch.cat([values[:, :n], values[:, -n:]])
    means = halves.mean(1, keepdim=True)
    spectrum = (
        torch.fft.rfft(halves - means, n=2 * n, dim=1).abs().square()
    )  # twice as long: no lag comes round again
    covariance = torch.fft.irfft(spectrum, n=2 * n, dim=1)[:, :n].mean(0) / n  # (lags, dim)
    variance = covariance[0] + means[:, 0].var(0)
    correlation = 1.0 - (covariance[0] * n / (n - 1) - covariance) / variance
    correlation[0] = 1.0
    couples = correlation[: n // 2 * 2 : 2] + correlation[1 : n // 2 * 2 : 2]
    couples = couples.cummin(0).values * (couples > 0).cumprod(0)
    n_all = len(halves) * n
    tau = (2.0 * couples.sum(0) - 1.0).clamp(
        min=1.0 / math.log10(n_all)
    )  # antithetic chains: no better than this is believed
    return torch.where(variance == 0, 0.0, (variance * tau / n_all).sqrt())


def _numbers(value: Any, n: int) -> Tensor:
    """`n` numbers of the settings, which may come from a file: NaN if they are anything else."""
    try:
        found = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = torch.empty(0)
    return found if tuple(found.shape) == (n,) else torch.full((n,), math.nan, dtype=torch.float64)
