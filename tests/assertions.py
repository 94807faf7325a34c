"""Assertions for statistical tests: exact answer, independent values, stated false-alarm rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FALSE_ALARM_SIGMAS = 5.0  # two-sided 5.7e-7 per assertion


def z_score(independent: Tensor, expected: float) -> float:
    """`independent` holds one value per independent run, so std / sqrt(n) is the real standard
    error."""
    x = independent.double().flatten()
    return float((x.mean() - expected) / (x.std() / math.sqrt(x.numel())))


def assert_mean_is(independent: Tensor, expected: float) -> None:
    z = z_score(independent, expected)
    assert abs(z) < FALSE_ALARM_SIGMAS, (
        f"mean {independent.double().mean():.6g} lies {z:+.1f} standard errors from {expected:.6g}"
    )


def assert_mean_is_not(independent: Tensor, expected: float) -> None:
    """The mutant must be caught with room to spare, so that the test has power, not luck."""
    z = z_score(independent, expected)
    assert abs(z) > 2 * FALSE_ALARM_SIGMAS, (
        f"the mutant passes: only {z:+.1f} standard errors from {expected:.6g}"
    )


def intercept(lrs: list[float], per_run: list[Tensor]) -> tuple[float, float]:
    """Value at lr = 0 of the weighted straight line through the means at several lrs, and its
    standard error."""
    x = torch.tensor(lrs, dtype=torch.float64)
    y = torch.stack([values.double().mean() for values in per_run])
    variance = torch.stack([values.double().var() / values.numel() for values in per_run])
    design = torch.stack([torch.ones_like(x), x], dim=1)
    information = design.T @ (design / variance[:, None])
    covariance = torch.linalg.inv(information)
    return float((covariance @ (design.T @ (y / variance)))[0]), float(covariance[0, 0].sqrt())
