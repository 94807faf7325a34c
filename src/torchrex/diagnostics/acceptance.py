"""Swaps of every pair: how many were accepted, how many the criterion promises, and what the
correction takes away.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.diagnostics.estimate import Estimate, mean_of
from torchrex.diagnostics.history import History
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import acceptance_probability


def observed_acceptance(history: History) -> Estimate:
    """Accepted over proposed for every pair over all steps, (pairs,), with its standard error from
    the spread between chains.

        rate = sum_c a_c / sum_c p_c,    error^2 = C / (C - 1) * sum_c (a_c - rate * p_c)^2 / (sum_c p_c)^2

    Tests of one chain are correlated, so one chain tells no error (NaN). A pair that was never
    tested has rate NaN.
    """
    accepted, proposed = history.accepted.double(), history.proposed.double()
    n, total = history.n_chains, proposed.sum(1)
    rate = accepted.sum(1) / total
    if n == 1:
        return Estimate(rate, torch.full_like(rate, math.nan))
    residual = accepted - rate[:, None] * proposed
    return Estimate(rate, (n / (n - 1) * residual.square().sum(1)).sqrt() / total)


def acceptance_from_energies(
    history: History, *, correction_factor: float | None = None, swap_rate: Tensor | float = 1.0
) -> Estimate:
    """Mean of min(1, S) over the recorded energies, variances and corrections, (pairs,): what
    `observed_acceptance` must show.

        log S = gap * (cold_energy - hot_energy - correction)

    `correction_factor` asks what another constant F would have given on the same energies.
    `swap_rate` is r * lr where the run had a swap intensity. Any thinning will do. A pairing of
    several rounds tests later pairs with fresh energies, which are not recorded, so there this is
    an approximation.
    """
    return mean_of(
        _probability(history, _corrections(history, correction_factor), swap_rate).movedim(0, -1)
    )


def factor_for_acceptance(history: History, wanted: float, *, iterations: int = 60) -> Tensor:
    """The constant F of every pair, (pairs,), at which the recorded energies would have been
    accepted at the rate `wanted`.

    The mean of min(1, S) rises with F. F is 1 where the unbiased test swaps that often already, and
    infinite where not even the naive test does: then the rungs are too far apart, and no F helps.
    """
    _require_rate(wanted)
    full = history.inverse_gap[:, :, None] * history.noise_variance.double()

    def rate(inverse_factor: Tensor) -> Tensor:
        return _probability(history, full * inverse_factor[:, None], 1.0).mean((0, 2))

    low, high = (
        torch.zeros(history.n_pairs, dtype=torch.float64),
        torch.ones(history.n_pairs, dtype=torch.float64),
    )
    unbiased, naive = rate(high), rate(low)
    # F may be 1e6 and more, so the logarithm of 1/F is halved; the naive test stands for what lies
    # beyond 1e-30.
    low = torch.full_like(high, -30 * math.log(10.0))
    high = torch.zeros_like(low)
    for _ in range(iterations):
        middle = 0.5 * (low + high)
        enough = rate(middle.exp()) >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    factor = torch.where(naive < wanted, math.inf, (-low).exp())
    return torch.where(unbiased >= wanted, 1.0, factor)


class CorrectionSize(NamedTuple):
    """All (pairs,), in units of energy; `ratio` far above 1 means that the correction decides and
    swaps are rare.
    """

    correction: Tensor  # mean over steps and chains
    spread: Tensor  # standard deviation of the energy differences
    ratio: Tensor


def correction_against_spread(
    history: History, *, correction_factor: float | None = None
) -> CorrectionSize:
    """How large the correction is beside the fluctuations of the energy difference that it is
    subtracted from.

    Under annealing both change: look at a part of the run that is short against it.
    """
    correction = _corrections(history, correction_factor).mean((0, 2))
    spread = history.energy_difference.movedim(1, 0).flatten(1).std(1)
    return CorrectionSize(correction, spread, correction / spread)


def _corrections(history: History, correction_factor: float | None) -> Tensor:
    if correction_factor is not None:
        return history.inverse_gap[:, :, None] * history.noise_variance.double() / correction_factor
    if history.correction is None:
        raise InvalidArgumentError(
            "this history does not know F (draws do not record it): give correction_factor=..., 1 is unbiased and inf naive"
        )
    return history.correction.double()


def _probability(history: History, correction: Tensor, swap_rate: Tensor | float) -> Tensor:
    log_ratio = history.inverse_gap[:, :, None] * (history.energy_difference - correction)
    finite = (
        history.energy.isfinite()
    )  # the algorithm refuses to swap a replica whose energy is not
    return torch.where(
        finite[:, :-1] & finite[:, 1:], acceptance_probability(log_ratio, swap_rate), 0.0
    )


def _require_rate(wanted: float) -> None:
    if not 0 < wanted < 1:
        raise InvalidArgumentError(
            f"the wanted acceptance rate must lie between 0 and 1, got {wanted}"
        )
