"""The standard error of a mean of correlated draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

AT_ONCE = 2**24  # numbers whose autocorrelations are computed together


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
