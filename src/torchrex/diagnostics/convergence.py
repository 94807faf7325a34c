"""Have the chains converged, and how many independent draws are they worth? R-hat, ESS and MCSE of
every coordinate, by ArviZ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchrex.errors import InvalidArgumentError, import_extra
from torchrex.posterior import Draws, coordinate_labels, import_arviz

AT_ONE_POINT = (
    "All runs started at one point: R-hat cannot show a mode that none of them has found."
)
FEWEST_DRAWS = 4  # each half of a split chain needs two


@dataclass(frozen=True, repr=False)
class Convergence:
    """One number for each coordinate, (dim,), float64; NaN where it is not defined."""

    names: tuple[str, ...]
    rhat: Tensor  # rank-normalised split R-hat: 1 when the chains agree, NaN for a single chain
    ess_bulk: Tensor  # effective number of draws, for means and medians
    ess_tail: Tensor  # the smaller of those of the 5 % and 95 % quantiles
    mcse_mean: Tensor  # standard error of the mean of all draws, autocorrelation counted
    started_at_one_point: bool = (
        False  # all runs did, so that R-hat cannot show a mode that none has found
    )

    @property
    def worst_rhat(self) -> float:
        """The largest R-hat; NaN if any is, because then nothing is known."""
        return float(self.rhat.max())

    @property
    def least_ess(self) -> float:
        """The smallest of all effective numbers of draws, bulk and tail; NaN if any is."""
        return float(torch.minimum(self.ess_bulk, self.ess_tail).min())

    def summary(self, *, most: int = 10) -> str:
        """A small table; where there are more coordinates than `most`, those with the largest
        R-hat, or the smallest ESS.
        """
        badness = -self.ess_bulk if self.rhat.isnan().all() else self.rhat
        order = (
            badness.nan_to_num(nan=math.inf)
            .argsort(descending=True, stable=True)[:most]
            .sort()
            .values
        )
        table = Table()
        for column in ("coordinate", "R-hat", "bulk ESS", "tail ESS", "MCSE of mean"):
            table.add_column(column, justify="right")
        for k in order.tolist():
            numbers = (
                f"{self.rhat[k]:.4f}",
                f"{self.ess_bulk[k]:.0f}",
                f"{self.ess_tail[k]:.0f}",
                f"{self.mcse_mean[k]:.2g}",
            )
            table.add_row(self.names[k], *numbers)
        if len(self.names) > most:
            table.add_row("...", f"{len(self.names) - most} better", "", "", "")
        console = Console(width=80, color_system=None, markup=False)
        with console.capture() as captured:
            console.print(table)
            if self.started_at_one_point:
                console.print(AT_ONE_POINT)
        return captured.get().rstrip()

    def __repr__(self) -> str:
        return f"Convergence({len(self.names)} coordinates, worst R-hat {self.worst_rhat:.4f}, least ESS {self.least_ess:.0f})"


def convergence(draws: Draws | Tensor, names: Sequence[str] | None = None) -> Convergence:
    """R-hat, bulk and tail ESS and the Monte Carlo standard error of the mean, for draws or any
    tensor (chains, draws, dim).

    R-hat near 1 says that the chains agree, not that they have seen every mode: start them apart
    (`sample(initial=)`). Definitions of Vehtari et al. 2021. A coordinate that never moves has no
    R-hat (NaN).
    """
    values = draws.values if isinstance(draws, Draws) else draws
    if values.ndim != 3:
        raise InvalidArgumentError(
            f"draws must have the axes (chains, draws, dim), got shape {tuple(values.shape)}"
        )
    labels = coordinate_labels(names, values.shape[2])
    n_chains, n_draws, dim = values.shape
    if n_chains < 1 or n_draws < FEWEST_DRAWS:
        raise InvalidArgumentError(
            f"R-hat and ESS need a chain of at least {FEWEST_DRAWS} draws, got {n_chains} chains of {n_draws}; draw more"
        )
    arviz, xarray = import_arviz(), import_extra("xarray", "diagnostics")
    # In float64: numpy knows no bfloat16, and not every function of ArviZ widens float32 before it
    # sums.
    array = xarray.DataArray(
        values.detach().cpu().double().numpy(), dims=("chain", "draw", "coordinate")
    )
    dataset = xarray.Dataset({"x": array})

    def numbers(result: object) -> Tensor:
        return torch.as_tensor(np.array(result["x"], dtype=float)).reshape(dim)  # type: ignore[index]

    with np.errstate(divide="ignore", invalid="ignore"):  # a coordinate that never moves: 0 / 0
        return Convergence(
            names=tuple(str(label) for label in labels),
            rhat=numbers(arviz.rhat(dataset))
            if n_chains > 1
            else torch.full((dim,), math.nan, dtype=torch.float64),
            ess_bulk=numbers(arviz.ess(dataset, method="bulk")),
            ess_tail=numbers(arviz.ess(dataset, method="tail")),
            mcse_mean=numbers(arviz.mcse(dataset, method="mean")),
            started_at_one_point=isinstance(draws, Draws)
            and draws.settings.get("started_at_one_point") is True,
        )
