"""The log evidence from the energies of a ladder that tempers the likelihood, up to the prior.

A rung with inverse temperature beta samples exp(-beta L) * prior, where L is minus the log
likelihood. Its normalising constant is 1 at the prior, beta = 0, and the evidence at beta = 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrex.exchange import LogEvidence
from torchrex.posterior.standard_error import mean_error

NODES, WEIGHTS = np.polynomial.legendre.leggauss(8)  # in every interval of the ladder


def log_evidence(energy: Tensor, temperatures: Tensor, *, noise: str = "") -> LogEvidence:
    """Log evidence from energies L (draws, rungs, chains), the last temperature infinite.

        integration:      log Z = -integral over beta, from 0 to 1, of E_beta[L]
        stepping stones:  log Z = sum over pairs of log E_hot[exp(-(beta_cold - beta_hot) L)]

    The integral is that of a monotone cubic through the means of L over log(beta + beta_1), beta_1
    the smallest above 0: there they are smooth. To first order it is linear in the energies, so
    that their noise averages out. Noise of variance v makes a term of the stepping stones too large
    by exp(gap^2 v / 2), so they need exact energies, swap_batch="full"; `noise` says why they are
    left out.

    Standard errors are those of `mean_error` for the sum over all rungs: they cover the spread
    within and between chains, the correlation of draws and of rungs, and the energy noise. That of
    the integration has the largest difference to another spline and to ladders without every second
    rung added, for a ladder with too few rungs.
    They do not know of modes that no replica has seen, nor of the bias that lr and gradient noise
    give every rung.

    It is the evidence only if the log likelihood has all its constants and the coldest temperature
    is 1.
    """
    beta = (1.0 / temperatures.double().cpu()).numpy()
    series = energy.double().cpu().transpose(1, 2)  # (draws, chains, rungs)
    mean = series.mean((0, 1)).numpy()
    value, gradient, rule = _integral(beta, mean)
    integration = (value, math.hypot(_error(series @ torch.from_numpy(gradient)), rule))
    if noise:
        return LogEvidence(*integration, note=noise)
    log_terms = torch.from_numpy(np.diff(beta)) * series[..., 1:]
    n = series.shape[0] * series.shape[1]
    log_means = log_terms.flatten(0, 1).logsumexp(0) - math.log(n)
    terms = (log_terms - log_means).exp().sum(-1)  # log Z moves with its mean, to first order
    return LogEvidence(*integration, float(log_means.sum()), _error(terms))


def _error(series: Tensor) -> float:
    """Of the mean of values (draws, chains)."""
    return float(mean_error(series.T[..., None])[0])


def _integral(beta: np.ndarray, mean: np.ndarray) -> tuple[float, np.ndarray, float]:
    """-integral of L d beta, its gradient by the means of L, and the error of too few rungs."""
    from scipy.interpolate import CubicSpline, PchipInterpolator  # it loads slowly

    u = np.log(beta + beta[-2])[::-1]  # rising
    width = np.diff(u)[:, None]
    at = (u[:-1, None] + 0.5 * width * (1.0 + NODES)).ravel()
    weight = (0.5 * width * WEIGHTS).ravel() * np.exp(at)  # d beta

    def by(interpolator: Any, mean: np.ndarray) -> float:
        return float(-weight @ interpolator(u, mean[::-1])(at))

    def coarser(first: int) -> float:
        """Without every second inner rung."""
        kept = np.ones(len(beta), bool)
        kept[first:-1:2] = False
        knots, values = u[kept[::-1]], mean[kept][::-1]
        return float(-weight @ PchipInterpolator(knots, values)(at))

    value, step = by(PchipInterpolator, mean), 1e-5 * float(np.ptp(mean)) or 1.0
    bumps = step * np.eye(len(mean))
    gradient = np.array([by(PchipInterpolator, mean + bump) - value for bump in bumps]) / step
    others = [by(CubicSpline, mean) if len(mean) > 3 else float(np.trapezoid(mean, beta))]
    others += [coarser(1), coarser(2)] if len(mean) > 3 else []
    return value, gradient, max(abs(value - other) for other in others)
