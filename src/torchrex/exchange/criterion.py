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
    degrees_of_freedom: float = math.inf,
    third_cumulant: Tensor | float = 0.0,
) -> Tensor:
    """Log of the corrected swap ratio between a cold and a hot rung (Deng et al. 2020, Eq. 12 with
    F).

        log S = gap * (cold_energy - hot_energy - gap * noise_variance / F)

    `noise_variance` is the variance of ONE energy estimate. If both energies come from the same
    minibatch their noises are correlated: estimate the variance of the difference and pass half of
    it. Energies may have any shape; the result broadcasts.

    If the variance is itself estimated, from the same n examples as the energies, give its
    `degrees_of_freedom` nu: `finite_sample_term` is then subtracted. The variance of skewed terms
    is correlated with their mean, by the `third_cumulant` k3 of the noise of the difference, cold
    minus hot: gap^3 k3 / (6 F) is then added.

    Why a sixth. Let e be the noise of log S and k3 that of e. The test is exact if K(1 + t) =
    K'(-t), with K the cumulant generating function of e - s^2/2 + c k3 and K' that of the reverse
    swap, where e has the other sign. With cov(e, s^2) = k3 the two differ by k3 times c - 1/3 -
    (t + t^2) / 2. At t = -1/2 + i w this is c - 5/24 + w^2 / 2, and the w that matter have w^2
    about 1/12 at s = 1 to 2.5.
    """
    correction = inverse_gap * noise_variance / correction_factor
    log_ratio = inverse_gap * (cold_energy - hot_energy - correction)
    if math.isinf(degrees_of_freedom):
        return log_ratio
    skew = inverse_gap**3 * third_cumulant / (6.0 * correction_factor)
    return log_ratio + skew - finite_sample_term(2.0 * inverse_gap * correction, degrees_of_freedom)


def finite_sample_term(log_variance: Tensor | float, degrees_of_freedom: float) -> Tensor:
    """What the test needs beyond s^2/2 if s^2, the noise variance of log S, is an estimate
    (Ceperley and Dewing 1999).

        s^4 / (4 (nu + 2)) + s^6 / (3 (nu + 2) (nu + 4))

    A correction exp(-s^2/2) with an estimate in it is too large on average, because exp is convex.
    The unbiased estimate of exp(-sigma^2/2) from a sample variance of nu degrees of freedom is
    0F1(nu/2; -nu s^2/4); minus its logarithm is s^2/2 plus these terms plus higher ones, which
    matter where s^2 > nu/4. There hardly any swap is accepted.
    """
    nu, s2 = (
        degrees_of_freedom,
        torch.as_tensor(log_variance).clamp(max=1e9),
    )  # its cube is finite in single precision
    return s2.square() / (4 * (nu + 2)) + s2**3 / (3 * (nu + 2) * (nu + 4))


def acceptance_probability(log_ratio: Tensor, swap_rate: Tensor | float = 1.0) -> Tensor:
    """`swap_rate * min(1, S)`, where swap_rate is r * eta, 1 by default (paper, section 3.1)."""
    return swap_rate * log_ratio.clamp(max=0.0).exp()


def expected_acceptance(
    difference: Tensor | float, noise_std: Tensor | float, correction_factor: Tensor | float = 1.0
) -> Tensor:
    """Mean acceptance of the corrected test under Gaussian noise (Ceperley and Dewing 1999, there F
    = 1).

        E[min(1, S)] = Phi(m/s) + exp(m + s^2/2) Phi(-m/s - s),    m = D - s^2 / (2 F)

    `difference` D is gap * (cold_energy - hot_energy) without noise, `noise_std` s the standard
    deviation of its noise, s^2 = 2 gap^2 noise_variance. At F = 1 and D = 0 it is 2 Phi(-s/2);
    without noise it is min(1, exp(D)).
    """
    d, s, f = (
        torch.as_tensor(value, dtype=torch.float64)
        for value in (difference, noise_std, correction_factor)
    )
    mean = d - s.square() / (2.0 * f)
    safe = torch.where(s > 0, s, 1.0)
    z = mean / safe + safe
    # exp(m + s^2/2) overflows where Phi vanishes; erfcx is their product without either.
    scaled = (
        0.5
        * (-0.5 * (mean / safe).square()).exp()
        * torch.special.erfcx(z.clamp(min=0.0) / math.sqrt(2.0))
    )
    plain = (mean + 0.5 * safe.square()).clamp(max=0.0).exp() * torch.special.ndtr(-z)
    noisy = torch.special.ndtr(mean / safe) + torch.where(z >= 0, scaled, plain)
    return torch.where(s > 0, noisy, mean.clamp(max=0.0).exp())
