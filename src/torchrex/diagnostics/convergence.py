"""Do chains agree (R-hat, ESS and MCSE by ArviZ), do replicas predict different things, and is a
rung at its temperature?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchrex.diagnostics.history import Estimate, mean_of, over_chains
from torchrex.errors import InvalidArgumentError, import_extra
from torchrex.posterior import Draws, coordinate_labels, import_arviz, predictive_entropy
from torchrex.samplers import Sampler

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
    started_at_one_point: bool = False  # then R-hat cannot show a mode that no run has found

    @property
    def worst_rhat(self) -> float:
        """The largest R-hat; NaN if any is, because then nothing is known."""
        return float(self.rhat.max())

    @property
    def least_ess(self) -> float:
        """The smallest of all effective numbers of draws, bulk and tail; NaN if any is."""
        return float(torch.minimum(self.ess_bulk, self.ess_tail).min())

    def summary(self, *, most: int = 10) -> str:
        """A table of at most `most` coordinates, those with the largest R-hat or smallest ESS."""
        badness = -self.ess_bulk if self.rhat.isnan().all() else self.rhat
        order = badness.nan_to_num(nan=math.inf).argsort(descending=True, stable=True)[:most]
        table = Table()
        for column in ("coordinate", "R-hat", "bulk ESS", "tail ESS", "MCSE of mean"):
            table.add_column(column, justify="right")
        for k in sorted(order.tolist()):
            ess = (f"{self.ess_bulk[k]:.0f}", f"{self.ess_tail[k]:.0f}")
            table.add_row(self.names[k], f"{self.rhat[k]:.4f}", *ess, f"{self.mcse_mean[k]:.2g}")
        if len(self.names) > most:
            table.add_row("...", f"{len(self.names) - most} better", "", "", "")
        console = Console(width=80, color_system=None, markup=False, force_jupyter=False)
        with console.capture() as captured:
            console.print(table)
            if self.started_at_one_point:
                console.print(AT_ONE_POINT)
        return captured.get().rstrip()

    def __repr__(self) -> str:
        worst = f"worst R-hat {self.worst_rhat:.4f}, least ESS {self.least_ess:.0f}"
        return f"Convergence({len(self.names)} coordinates, {worst})"


def convergence(draws: Draws | Tensor, names: Sequence[str] | None = None) -> Convergence:
    """R-hat, bulk and tail ESS and MCSE of the mean, of draws or any tensor (chains, draws, dim).

    R-hat near 1 says that the chains agree, not that they have seen every mode: start them apart
    (`sample(initial=)`). Definitions of Vehtari et al. 2021. A coordinate that never moves has no
    R-hat (NaN).
    """
    values = draws.values if isinstance(draws, Draws) else draws
    if values.ndim != 3:
        raise InvalidArgumentError(f"draws must be (chains, draws, dim), got {tuple(values.shape)}")
    n_chains, n_draws, dim = values.shape
    labels = coordinate_labels(names, dim)
    if n_chains < 1 or n_draws < FEWEST_DRAWS:
        raise InvalidArgumentError(
            f"R-hat and ESS need a chain of at least {FEWEST_DRAWS} draws, "
            f"got {n_chains} chains of {n_draws}; draw more"
        )
    arviz, xarray = import_arviz(), import_extra("xarray", "diagnostics")
    # In float64: numpy has no bfloat16, and some functions of ArviZ sum in float32.
    array = values.detach().cpu().double().numpy()
    dataset = xarray.Dataset({"x": (("chain", "draw", "coordinate"), array)})

    def numbers(result: object) -> Tensor:
        return torch.as_tensor(np.array(result["x"], dtype=float)).reshape(dim)  # type: ignore[index]

    with np.errstate(divide="ignore", invalid="ignore"):  # a coordinate that never moves: 0 / 0
        unknown = torch.full((dim,), math.nan, dtype=torch.float64)
        return Convergence(
            names=tuple(str(label) for label in labels),
            rhat=numbers(arviz.rhat(dataset)) if n_chains > 1 else unknown,
            ess_bulk=numbers(arviz.ess(dataset, method="bulk")),
            ess_tail=numbers(arviz.ess(dataset, method="tail")),
            mcse_mean=numbers(arviz.mcse(dataset, method="mean")),
            started_at_one_point=isinstance(draws, Draws)
            and draws.settings.get("started_at_one_point") is True,
        )


class Disagreement(NamedTuple):
    """Between every two replicas, (replicas, replicas), and of all together.

    Errors are those of a finite set of examples.
    """

    differing: Tensor  # fraction of the examples on which their most probable classes differ
    divergence: Tensor  # mean Jensen-Shannon divergence, in nats, at most log 2
    mean_differing: Estimate  # over all pairs of replicas
    mutual_information: Estimate  # of prediction and replica, in nats, at most log(replicas)


def replica_disagreement(probabilities: Tensor) -> Disagreement:
    """How differently replicas predict, from probabilities (replicas, n, classes).

        JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2
        I = H(mean over replicas of p) - mean over replicas of H(p)     (of two replicas, their JS)

    H is the entropy in nats; divergence and information are means over the n examples. The more
    replicas disagree, the more a swap, or an average over them, brings to rung 0.
    """
    p = probabilities.detach().double()
    if p.ndim != 3 or len(p) < 2 or p.shape[1] == 0:
        raise InvalidArgumentError(
            f"give probabilities (replicas, n, classes) of 2 replicas or more, got {tuple(p.shape)}"
        )
    if not bool((p >= 0).all()) or not bool(((p.sum(-1) - 1.0).abs() < 1e-3).all()):
        raise InvalidArgumentError(
            "probabilities must be >= 0 and sum to 1 over the last axis; take the softmax of logits"
        )
    n_replicas, choice, own = len(p), p.argmax(-1), predictive_entropy(p)
    differing = torch.zeros(n_replicas, n_replicas, dtype=torch.float64)
    divergence = torch.zeros_like(differing)
    pairs = [(i, j) for i in range(n_replicas) for j in range(i)]
    per_example = torch.zeros(p.shape[1], dtype=torch.float64)
    for i, j in pairs:
        apart = (choice[i] != choice[j]).double().cpu()
        per_example += apart / len(pairs)
        differing[i, j] = differing[j, i] = apart.mean()
        js = predictive_entropy((p[i] + p[j]) / 2) - (own[i] + own[j]) / 2
        divergence[i, j] = divergence[j, i] = js.mean().cpu()
    information = (predictive_entropy(p.mean(0)) - own.mean(0)).cpu()
    return Disagreement(differing, divergence, over_chains(per_example), over_chains(information))


def kinetic_temperature(velocity: Tensor, *, lr: float, sampler: Sampler) -> Estimate:
    """Temperature from the variance of the velocities, (...).

        tau = <v^2> / (lr * velocity_std^2),    velocity_std^2 = 2 / (2 - friction) for SGHMC

    The factor is that of the discrete recursion as lr -> 0; without it friction 0.1 reads 5 % high.
    """
    if not sampler.velocity_std:
        raise InvalidArgumentError(f"{sampler!r} has no velocities; use equipartition_temperature")
    _require_axes(velocity)
    scale = lr * sampler.velocity_std**2
    if not scale > 0:
        raise InvalidArgumentError(f"the learning rate must be positive, got {lr}")
    return mean_of(velocity.double().square().mean(-1) / scale)


def equipartition_temperature(
    position: Tensor, gradient: Tensor, *, centre: Tensor | None = None
) -> Estimate:
    """Temperature from the work of the forces on the positions, (...): general equipartition.

        tau = <(x - c) . grad U> / dim        for ANY fixed point c

    The integral of div((x - c) exp(-U / tau)) vanishes if the density falls faster than
    1 / |x|^dim; U need not be quadratic, nor have one mode. c changes the error and not the mean.
    By default it is the mean of all draws, which makes the estimate low by a factor
    1 - 1 / (number of independent draws). Gradients must be those at the positions.
    """
    _require_axes(position, gradient)
    x = position.double()
    c = x.mean((-3, -2), keepdim=True) if centre is None else centre.double()
    return mean_of(((x - c) * gradient.double()).mean(-1))


def hypervirial_temperature(
    gradient: Tensor, laplacian: Tensor, *, other_gradient: Tensor | None = None
) -> Estimate:
    """Temperature from exact gradients and the Laplacian (chains, draws), (...) (Rugh 1997).

        tau = <|grad U|^2> / <laplacian U>

    Minibatch gradients make |g|^2 too large by their variance. Give a second, independent minibatch
    gradient at the same positions as `other_gradient`, and g . g' takes its place, which is
    unbiased.
    """
    other = gradient if other_gradient is None else other_gradient
    _require_axes(gradient, other)
    if laplacian.shape != gradient.shape[:-1]:
        raise InvalidArgumentError(
            f"the Laplacian is one number per draw, {tuple(gradient.shape[:-1])}, "
            f"got {tuple(laplacian.shape)}"
        )
    force, curvature = (gradient.double() * other.double()).sum(-1), laplacian.double()
    mean = curvature.mean((-2, -1))
    tau = force.mean((-2, -1)) / mean
    # To first order the ratio errs by the mean of (force - tau * curvature) / mean curvature.
    residual = mean_of(force - tau[..., None, None] * curvature)
    return Estimate(tau, residual.error / mean.abs())


def _require_axes(*tensors: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(len(shape) < 3 for shape in shapes) or len(set(shapes)) > 1:
        got = " and ".join(map(str, shapes))
        raise InvalidArgumentError(f"give equal shapes (..., chains, draws, dim), got {got}")
