"""The swap test: the corrected swap ratio, and what acceptance it leads to.

These are plain functions of tensors and know nothing of ladders or replicas.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_swap_ratio(
    cold_energy: Tensor,
    hot_energy: Tensor,
    *,
    inverse_gap: Tensor | float,
    noise_variance: Tensor | float,
    correction_factor: Tensor | float = 1.0,
) -> Tensor:
    """Log of the corrected swap ratio between a cold and a hot rung (Deng et al. 2020, Eq. 12 with F).

        log S = gap * (cold_energy - hot_energy - gap * noise_variance / F)

    `noise_variance` is the variance of ONE energy estimate. If both energies come from the same minibatch
    their noises are correlated: estimate the variance of the difference and pass half of it.
    Energies may have any shape; the result broadcasts.
    """
    correction = inverse_gap * noise_variance / correction_factor
    return inverse_gap * (cold_energy - hot_energy - correction)


def acceptance_probability(log_ratio: Tensor, swap_rate: Tensor | float = 1.0) -> Tensor:
    """`swap_rate * min(1, S)`, where swap_rate is r * eta, 1 by default (paper, section 3.1)."""
    return swap_rate * log_ratio.clamp(max=0.0).exp()


def expected_acceptance(difference: Tensor | float, noise_std: Tensor | float, correction_factor: Tensor | float = 1.0) -> Tensor:
    """Mean acceptance of the corrected test under Gaussian noise (Ceperley and Dewing 1999, there F = 1).

        E[min(1, S)] = Phi(m/s) + exp(m + s^2/2) Phi(-m/s - s),    m = D - s^2 / (2 F)

    `difference` D is gap * (cold_energy - hot_energy) without noise, `noise_std` s the standard deviation of its noise,
    s^2 = 2 gap^2 noise_variance. At F = 1 and D = 0 it is 2 Phi(-s/2); without noise it is min(1, exp(D)).
    """
    d, s, f = (torch.as_tensor(value, dtype=torch.float64) for value in (difference, noise_std, correction_factor))
    mean = d - s.square() / (2.0 * f)
    safe = torch.where(s > 0, s, 1.0)
    z = mean / safe + safe
    # exp(m + s^2/2) overflows where Phi vanishes; erfcx is their product without either.
    scaled = 0.5 * (-0.5 * (mean / safe).square()).exp() * torch.special.erfcx(z.clamp(min=0.0) / math.sqrt(2.0))
    plain = (mean + 0.5 * safe.square()).clamp(max=0.0).exp() * torch.special.ndtr(-z)
    noisy = torch.special.ndtr(mean / safe) + torch.where(z >= 0, scaled, plain)
    return torch.where(s > 0, noisy, mean.clamp(max=0.0).exp())
