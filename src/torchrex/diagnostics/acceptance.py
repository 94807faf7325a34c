"""Swaps of every pair: the acceptance, what energies, noise and correction make of it, and cures.

`hill` looks at the assumption behind the correction, that the energy noise has Gaussian tails. With
heavier tails E[exp(gap * noise)] is larger than the correction takes it to be, infinite for a power
law, and the corrected test is biased at any F.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.diagnostics.history import Estimate, History, mean_of, over_chains
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import acceptance_probability, expected_acceptance

LARGEST_LOG_FACTOR = 30 * math.log(10.0)
TAIL_FRACTION = 0.05  # of the sample that counts as tail
FEWEST_IN_TAIL = 10
ALARM = 3.5  # standard deviations beyond what a Gaussian sample shows


def observed_acceptance(history: History) -> Estimate:
    """Accepted over proposed for every pair over all steps, (pairs,); the error is between chains.

        rate = sum_c a_c / sum_c p_c
        error^2 = C / (C - 1) * sum_c (a_c - rate * p_c)^2 / (sum_c p_c)^2

    Tests of one chain are correlated, so one chain has no error (NaN). A pair that was never tested
    has rate NaN.
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
    """Mean of min(1, S) over the recorded steps, (pairs,): what `observed_acceptance` must show.

        log S = gap * (cold_energy - hot_energy - correction)

    `correction_factor` asks what another constant F would have given on the same energies.
    `swap_rate` is r * lr where the run had a swap intensity. Any thinning is fine. A pairing of
    several rounds tests later pairs with fresh energies, which are not recorded: there this is an
    approximation.
    """
    history = history.with_tests()
    probability = _probability(history, _corrections(history, correction_factor), swap_rate)
    return mean_of(probability.movedim(0, -1))


def factor_for_acceptance(history: History, wanted: float, *, iterations: int = 60) -> Tensor:
    """The constant F of every pair, (pairs,), that accepts the recorded energies at rate `wanted`.

    F is 1 where the unbiased test swaps that often already, and infinite where not even the naive
    test does: then the rungs are too far apart, and no F helps.
    """
    history = history.with_tests()
    full = history.inverse_gap[:, :, None] * history.noise_variance.double()

    def rate(factor: Tensor) -> Tensor:
        return _probability(history, full / factor[:, None], 1.0).mean((0, 2))

    return _factor_for(rate, wanted, torch.ones(history.n_pairs, dtype=torch.float64), iterations)


def factor_for_noise(noise_std: Tensor | float, wanted: float, *, iterations: int = 60) -> Tensor:
    """The F at which Gaussian noise s and equal energies give the acceptance `wanted`.

        expected_acceptance(0, s, F) = wanted

    F is 1 where F = 1 gives it already. The naive test, F = infinity, gives 1/2 + exp(s^2/2)
    Phi(-s), always above 1/2; where even that is below `wanted` the answer is infinite.
    """
    s = torch.as_tensor(noise_std, dtype=torch.float64)

    def rate(factor: Tensor) -> Tensor:
        return expected_acceptance(0.0, s, factor)

    return _factor_for(rate, wanted, torch.ones_like(s), iterations)


def _factor_for(
    rate: Callable[[Tensor], Tensor], wanted: float, one: Tensor, iterations: int
) -> Tensor:
    """Solve rate(F) = wanted by bisection in log F; the rate rises with F."""
    if not 0 < wanted < 1:
        raise InvalidArgumentError(f"the wanted rate must lie between 0 and 1, got {wanted}")
    low, high = torch.zeros_like(one), LARGEST_LOG_FACTOR * one
    for _ in range(iterations):
        middle = 0.5 * (low + high)
        enough = rate(middle.exp()) >= wanted
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    factor = torch.where(rate(math.inf * one) < wanted, math.inf, high.exp())
    return torch.where(rate(one) >= wanted, 1.0, factor)


class CorrectionSize(NamedTuple):
    """All (pairs,), in units of energy; `ratio` far above 1 means that swaps are rare."""

    correction: Tensor  # mean over steps and chains
    spread: Tensor  # standard deviation of the energy differences
    ratio: Tensor


def correction_against_spread(
    history: History, *, correction_factor: float | None = None
) -> CorrectionSize:
    """The size of the correction against the fluctuations of the energy difference.

    Under annealing both change: use a part of the run that is short against it.
    """
    history = history.with_tests()
    correction = _corrections(history, correction_factor).mean((0, 2))
    spread = history.energy_difference.movedim(1, 0).flatten(1).std(1)
    return CorrectionSize(correction, spread, correction / spread)


def _corrections(history: History, correction_factor: float | None) -> Tensor:
    if correction_factor is not None:
        return history.inverse_gap[:, :, None] * history.noise_variance.double() / correction_factor
    if history.correction is None:
        raise InvalidArgumentError(
            "this history does not know F, because draws do not record it: give "
            "correction_factor=..., 1 is unbiased and inf naive"
        )
    return history.correction.double()


def _probability(history: History, correction: Tensor, swap_rate: Tensor | float) -> Tensor:
    log_ratio = history.inverse_gap[:, :, None] * (history.energy_difference - correction)
    finite = history.energy.isfinite()  # the algorithm does not swap replicas without an energy
    probability = acceptance_probability(log_ratio, swap_rate)
    return torch.where(finite[:, :-1] & finite[:, 1:], probability, 0.0)


def noise_level(history: History, *, last: bool = False) -> Estimate:
    """Level of the sigma2 trace of every pair, (pairs,); the error knows of its autocorrelation.

    For a smoothed trace (Eq. 14) it is the mean over the recorded steps; leave the burn-in out with
    `history.after`. A running mean (Eq. 13) is averaged already: `last=True` takes its final value,
    which has no error (NaN) for one chain.
    """
    if last:
        return over_chains(history.noise_variance[-1])
    return mean_of(history.noise_variance.movedim(0, -1))


def effective_noise(inverse_gap: Tensor | float, noise_variance: Tensor | float) -> Tensor:
    """Standard deviation of the noise in log S: s = sqrt(2) * gap * sigma.

    The factor is there because the difference has twice the variance of one energy.
    """
    gap, sigma2 = (torch.as_tensor(x, dtype=torch.float64) for x in (inverse_gap, noise_variance))
    return math.sqrt(2.0) * gap * sigma2.sqrt()


def allowed_acceptance(noise_std: Tensor | float) -> Tensor:
    """The acceptance between equal energies at noise s and F = 1: 2 Phi(-s/2).

    It is no bound, for a pair may have unequal energies, but it shows whether F = 1 is possible:
    62 % at s = 1, 4.6 % at s = 4, 0.006 % at s = 8.
    """
    s = torch.as_tensor(noise_std, dtype=torch.float64)
    allowed: Tensor = torch.special.erfc(s / math.sqrt(8.0))
    return allowed


def rungs_for_noise(
    cold: float, hot: float, noise_variance: float, *, noise_std: float = 1.0
) -> int:
    """How many rungs from `cold` to `hot` leave every pair a noise of at most `noise_std` at F = 1.

        pairs = ceil(sqrt(2) * (1/cold - 1/hot) * sigma / s)

    s = 1 allows 62 % of the swaps. Rejections by real energy differences are not counted.
    """
    if not 0 < cold < hot:
        raise InvalidArgumentError(f"temperatures must be 0 < cold < hot, got {cold:g} and {hot:g}")
    if not (noise_variance >= 0 and math.isfinite(noise_variance) and noise_std > 0):
        raise InvalidArgumentError(
            "need a finite noise_variance >= 0 and noise_std > 0, "
            f"got {noise_variance} and {noise_std}"
        )
    needed = float(effective_noise(1.0 / cold - 1.0 / hot, noise_variance)) / noise_std
    # A whole number stays one in spite of rounding.
    return max(1, math.ceil(needed * (1.0 - 1e-12))) + 1


def ladder_for_noise(
    cold: float, hot: float, noise_variance: float, *, noise_std: float = 1.0
) -> tuple[float, ...]:
    """The temperatures of that ladder, coldest first, in equal inverse gaps.

    This is right for a sigma2 that is the same on all rungs.
    """
    n_pairs = rungs_for_noise(cold, hot, noise_variance, noise_std=noise_std) - 1
    step = (1.0 / hot - 1.0 / cold) / n_pairs
    inner = (1.0 / (1.0 / cold + step * pair) for pair in range(1, n_pairs))
    return (float(cold), *inner, float(hot))


@dataclass(frozen=True)
class Tail:
    """The tail of one sample; a power law has an `index` below `gaussian_index`."""

    index: float  # Hill's estimate; smaller is heavier
    error: float  # its standard error
    gaussian_index: float
    sigmas: float  # how far beyond a Gaussian sample the tail reaches
    n_tail: int

    @property
    def too_heavy(self) -> bool:
        """Is the tail beyond what a Gaussian can show, so that the correction cannot hold?

        Alarms measured with the default fraction (40,000 samples a cell, 4,000 at n = 10,000):

                 n    Gaussian    t(10)    t(5)     t(3)
               200      0.2 %      5.5 %   27 %     65 %
             1,000      0.1 %       21 %   87 %   99.9 %
            10,000     0.08 %     99.9 %  100 %    100 %
        """
        return self.sigmas > ALARM


def hill(sample: Tensor, *, fraction: float = TAIL_FRACTION) -> Tail:
    """Hill's tail index of |x - median| over the largest `fraction` of the sample (Hill 1975).

        1 / index = mean over the m largest of log(x_(i) / x_(m+1)),    error = index / sqrt(m)

    Give independent energies drawn at the SAME position, or their differences: along a run energies
    differ by more than noise. At a fixed fraction the index of a power law is biased low, 3.6 for
    t(5); a Gaussian shows 6.0 at 5 %, and the verdict compares with that. Location and scale do not
    matter.
    """
    x = sample.detach().double().flatten()
    if not 0 < fraction <= 0.5:
        raise InvalidArgumentError(f"the tail is a fraction in (0, 0.5], got {fraction}")
    n_tail = round(fraction * len(x))
    if n_tail < FEWEST_IN_TAIL:
        raise InvalidArgumentError(
            f"a tail index needs {FEWEST_IN_TAIL} values in the tail, "
            f"{math.ceil(FEWEST_IN_TAIL / fraction)} in all, got {len(x)}; draw more energies"
        )
    if not bool(x.isfinite().all()):
        n_bad = int((~x.isfinite()).sum())
        raise InvalidArgumentError(f"{n_bad} of {len(x)} energies are not finite; leave them out")
    largest = (x - x.median()).abs().topk(n_tail + 1).values
    mean, variance = gaussian_tail(fraction)
    if float(largest[-1]) == 0.0:  # most values are the same: there is no noise
        return Tail(math.nan, math.nan, 1.0 / mean, -math.inf, n_tail)
    inverse = float((largest[:-1] / largest[-1]).log().mean())
    index = 1.0 / inverse if inverse > 0 else math.inf
    sigmas = (inverse - mean) / math.sqrt(variance / len(x))
    return Tail(index, index / math.sqrt(n_tail), 1.0 / mean, sigmas, n_tail)


@lru_cache
def gaussian_tail(fraction: float) -> tuple[float, float]:
    """Mean h of 1 / index for a large Gaussian sample, and n times its variance.

        h = E[log(X/u) | X > u],    X = |Z|, P(X > u) = fraction
        n * variance = Var[log(X/u) | X > u] / fraction
                       + (dh/du)^2 * fraction * (1 - fraction) / density(u)^2

    The second term is the sampling variance of the threshold u, which is an order statistic.
    """
    from scipy import integrate, stats  # they load slowly

    u = stats.norm.isf(fraction / 2)
    density = 2 * stats.norm.pdf(u)

    def integral(weight: Callable[[float], float]) -> float:
        total = integrate.quad(lambda x: 2 * weight(x) * stats.norm.sf(x) / x, u, 40.0)[0]
        return float(total / fraction)

    mean, square = integral(lambda x: 1.0), integral(lambda x: 2 * math.log(x / u))
    slope = density / fraction * mean - 1.0 / u
    variance = (square - mean**2) / fraction + slope**2 * fraction * (1 - fraction) / density**2
    return mean, float(variance)
