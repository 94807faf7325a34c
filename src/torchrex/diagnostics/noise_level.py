"""How noisy the energies are, what acceptance that leaves, and what would have to change: F, or a
ladder of more rungs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrex.diagnostics.estimate import Estimate, mean_of, over_chains
from torchrex.diagnostics.history import History
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import expected_acceptance


def noise_level(history: History, *, last: bool = False) -> Estimate:
    """Level of the sigma2 trace of every pair, (pairs,), with a standard error that knows of its
    autocorrelation.

    For a smoothed trace (Eq. 14) it is the mean over the recorded steps; leave the burn-in out with
    `history.after`. A running mean (Eq. 13) has averaged already: `last=True` takes its final
    value. The error comes from the spread between chains; one chain of a smoothed trace has its
    batch means, one of a running mean tells no error (NaN).
    """
    if last:
        return over_chains(history.noise_variance[-1])
    return mean_of(history.noise_variance.movedim(0, -1))


def effective_noise(inverse_gap: Tensor | float, noise_variance: Tensor | float) -> Tensor:
    """Standard deviation of the noise in log S: s = sqrt(2) * gap * sigma, for the difference has
    twice the variance of one.
    """
    gap, variance = (
        torch.as_tensor(value, dtype=torch.float64) for value in (inverse_gap, noise_variance)
    )
    return math.sqrt(2.0) * gap * variance.sqrt()


def allowed_acceptance(noise_std: Tensor | float) -> Tensor:
    """What noise of standard deviation s leaves of the swaps at F = 1 and equal energies: 2
    Phi(-s/2).

    It bounds nothing by itself, for a pair may have unequal energies, but it tells at a glance
    whether F = 1 is possible: 62 % at s = 1, 4.6 % at s = 4, 0.006 % at s = 8.
    """
    allowed: Tensor = torch.special.erfc(
        torch.as_tensor(noise_std, dtype=torch.float64) / math.sqrt(8.0)
    )
    return allowed


def factor_for_noise(noise_std: Tensor | float, wanted: float, *, iterations: int = 60) -> Tensor:
    """The F at which Gaussian noise s and equal energies give the acceptance `wanted`.

        expected_acceptance(0, s, F) = wanted

    F is 1 where F = 1 gives it already. At F = infinity the naive test gives 1/2 + exp(s^2/2)
    Phi(-s), always above 1/2; where even that is less than `wanted` the answer is infinite.
    `factor_for_acceptance` asks the same of recorded energies.
    """
    if not 0 < wanted < 1:
        raise InvalidArgumentError(
            f"the wanted acceptance rate must lie between 0 and 1, got {wanted}"
        )
    s = torch.as_tensor(noise_std, dtype=torch.float64)
    low, high = torch.zeros_like(s), torch.full_like(s, 30 * math.log(10.0))  # of log F
    for _ in range(iterations):
        middle = 0.5 * (low + high)
        enough = expected_acceptance(0.0, s, middle.exp()) >= wanted
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    factor = torch.where(expected_acceptance(0.0, s, math.inf) < wanted, math.inf, high.exp())
    return torch.where(expected_acceptance(0.0, s, 1.0) >= wanted, 1.0, factor)


def rungs_for_noise(
    cold: float, hot: float, noise_variance: float, *, noise_std: float = 1.0
) -> int:
    """How many rungs between the temperatures `cold` and `hot` leave every pair a noise of at most
    `noise_std` at F = 1.

        pairs = ceil(sqrt(2) * (1/cold - 1/hot) * sigma / s)

    s = 1 allows 62 % of the swaps. Two rungs are the least. The rejections by real energy
    differences come on top.
    """
    if not 0 < cold < hot:
        raise InvalidArgumentError(
            f"temperatures must satisfy 0 < cold < hot, got cold={cold:g}, hot={hot:g}"
        )
    if not (noise_variance >= 0 and math.isfinite(noise_variance) and noise_std > 0):
        raise InvalidArgumentError(
            f"need a finite noise_variance >= 0 and noise_std > 0, got {noise_variance} and {noise_std}"
        )
    needed = float(effective_noise(1.0 / cold - 1.0 / hot, noise_variance)) / noise_std
    return (
        max(1, math.ceil(needed * (1.0 - 1e-12))) + 1
    )  # a whole number stays one in spite of rounding


def ladder_for_noise(
    cold: float, hot: float, noise_variance: float, *, noise_std: float = 1.0
) -> tuple[float, ...]:
    """The temperatures of that ladder, coldest first, in equal inverse gaps: right for a sigma2
    that is the same on all rungs.
    """
    n_pairs = rungs_for_noise(cold, hot, noise_variance, noise_std=noise_std) - 1
    inner = [
        1.0 / (1.0 / cold + (1.0 / hot - 1.0 / cold) * pair / n_pairs) for pair in range(1, n_pairs)
    ]
    return (float(cold), *inner, float(hot))
