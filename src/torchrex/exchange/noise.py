"""Estimators of the noise variance sigma2: the variance of ONE energy estimate, kept per pair of rungs and per run.

An estimator is an update rule (known, running mean, smoothing) and a feed (repeated draws, or the free per-example variances).
For a pair whose energies have variances s_cold and s_hot and covariance c, every feed aims at half the variance of the
difference, (s_cold + s_hot) / 2 - c, because that is what the swap ratio needs.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from torchrex.errors import NoiseError
from torchrex.exchange.standing import take

logger = logging.getLogger("torchrex")


class SourceOfNoise(Protocol):
    """What an estimator asks of a target or an ensemble of modules."""

    @property
    def n_data(self) -> int | None: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def has_noise(self) -> bool: ...
    @property
    def shares_minibatch(self) -> bool: ...


@dataclass(frozen=True)
class RepeatedDraws:
    """The paper's feed: every `every` steps, the sample variance of `n_draws` fresh energies at the current positions.

    Unpaired it averages the variances of the two replicas, as the paper does; that is right where their noises are independent.
    Paired it takes half the variance of their difference, which is right where they share a minibatch as well.
    """

    n_draws: int = 10
    every: int = 100
    paired: bool = False

    def __post_init__(self) -> None:
        if self.n_draws < 2 or self.every < 1:
            raise NoiseError(f"RepeatedDraws needs n_draws >= 2 and every >= 1, got {self}")

    def sample(self, energies: Tensor, replica_at: Tensor) -> Tensor:
        """From energies (draws, replicas, runs) to variances (pairs, runs)."""
        at_rung = take(energies.movedim(0, -1), replica_at)  # (rungs, runs, draws)
        if self.paired:
            return 0.5 * (at_rung[:-1] - at_rung[1:]).var(dim=-1)
        variance = at_rung.var(dim=-1)
        return 0.5 * (variance[:-1] + variance[1:])


@dataclass(frozen=True)
class PerExample:
    """The free feed: at every step, from the per-example terms l_i of the minibatch that is there anyway.

    N^2 / n * var(l_i)          for one replica (unpaired)
    N^2 / n * var(l_i - l'_i)   for the difference of two replicas on the same minibatch (paired); half of it is passed on

    Both are for examples drawn with replacement. Without, as in the epochs of a data loader, sums vary less: times 1 - n / N.
    """

    paired: bool = True

    def sample(self, per_example: Tensor, replica_at: Tensor, n_data: int, *, replacement: bool = True) -> Tensor:
        """From per-example energies (replicas, runs, n) to variances (pairs, runs)."""
        at_rung = take(per_example, replica_at)
        n = per_example.shape[-1]
        if n < 2:  # one example has no variance; a sample that is not finite is left out
            return torch.full_like(at_rung[1:, :, 0], math.nan)
        scale = n_data**2 / n * (1.0 if replacement else max(0.0, 1.0 - n / n_data))
        if self.paired:
            return 0.5 * scale * (at_rung[:-1] - at_rung[1:]).var(dim=-1)
        variance = scale * at_rung.var(dim=-1)
        return 0.5 * (variance[:-1] + variance[1:])


Feed = RepeatedDraws | PerExample


def _require_feed(feed: object) -> None:
    if not isinstance(feed, RepeatedDraws | PerExample):
        raise NoiseError(f"feed must be RepeatedDraws(...) or PerExample(...), got {feed!r}")


class NoiseEstimator(ABC):
    """An update rule for sigma2: sigma2 <- sigma2 + gain(m) * (sample - sigma2) at the m-th SA step, m = 1, 2, ..."""

    feed: Feed | None
    initial: float

    @abstractmethod
    def gain(self, m: Tensor) -> Tensor | float: ...

    def update(self, variance: Tensor, m: Tensor, sample: Tensor) -> Tensor:
        """The SA step (Eq. 13 and 14), written so that the estimate stays between its old value and the sample."""
        return variance + self.gain(m) * (sample - variance)

    def check(self, target: SourceOfNoise) -> None:
        """Refuse a feed that this target cannot serve, or that would answer another question than the swaps ask."""
        if isinstance(self.feed, PerExample):
            if target.n_data is None:
                raise NoiseError(f"{self!r} needs per-example energies, which {target!r} does not have; use RepeatedDraws")
            require_two_examples(self, target.batch_size)
            if self.feed.paired and not target.shares_minibatch:
                raise NoiseError(
                    f"the paired variance is that of replicas on the same minibatch, but {target!r} gives each its own; use "
                    f"PerExample(paired=False), or share the minibatch"
                )


@dataclass(frozen=True)
class KnownVariance(NoiseEstimator):
    """sigma2 is known, 0 for an exact energy."""

    initial: float = 0.0
    feed: None = None

    def __post_init__(self) -> None:
        _require_variance(self.initial)

    def gain(self, m: Tensor) -> Tensor | float:
        return 0.0


@dataclass(frozen=True)
class RunningMean(NoiseEstimator):
    """Eq. 13 with gain 1/m: the plain mean of all samples, for a variance that does not change.

    The first sample replaces `initial` altogether, as the paper's formula does; until then `initial` is in force.
    """

    feed: Feed = field(default_factory=RepeatedDraws)
    initial: float = 0.0

    def __post_init__(self) -> None:
        _require_variance(self.initial)
        _require_feed(self.feed)

    def gain(self, m: Tensor) -> Tensor | float:
        return 1.0 / m


@dataclass(frozen=True)
class Smoothing(NoiseEstimator):
    """Eq. 14: exponential smoothing with a constant factor, for a variance that drifts. The first sample is taken whole."""

    gamma: float = 0.3
    feed: Feed = field(default_factory=RepeatedDraws)
    initial: float = 0.0

    def __post_init__(self) -> None:
        _require_variance(self.initial)
        _require_feed(self.feed)
        if not 0 < self.gamma <= 1:
            raise NoiseError(f"the smoothing factor must lie in (0, 1], got {self.gamma}")

    def gain(self, m: Tensor) -> Tensor | float:
        return torch.where(m <= 1, 1.0, self.gamma)


def require_two_examples(noise: NoiseEstimator, batch_size: int | None) -> None:
    """Refuse minibatches in which nothing varies: sigma2 would stay at its initial value, and 0 is the naive test."""
    if isinstance(noise.feed, PerExample) and batch_size == 1:
        raise NoiseError(
            f"{noise!r} needs at least 2 examples in a minibatch, got batch_size=1; raise batch_size, or use "
            f"noise=RunningMean(RepeatedDraws()), which compares whole minibatches"
        )


def warn_of_one_example(noise: NoiseEstimator) -> None:
    logger.warning(
        "the batches so far have one example each, of which %r learns nothing: swaps are tested with sigma2 = %g. "
        "Use batches of at least 2 examples, or noise=RunningMean(RepeatedDraws())",
        noise,
        noise.initial,
    )


def warn_of_no_measurement(noise: NoiseEstimator, feed: RepeatedDraws, n_steps: int, *, shares_minibatch: bool) -> None:
    """Repeated energies need batches besides those of the steps; a loop over `run.step` brings none."""
    logger.warning(
        "%r has measured nothing in %d steps, because run.step(batch) brings no extra batches: swaps are tested with "
        "sigma2 = %g%s. Use train(run, loader, n_steps, extra=loader), call run.measure(batches) every %d steps, or take "
        "noise=%s, which needs no extra batches",
        noise,
        n_steps,
        noise.initial,
        "" if noise.initial else ", which is the naive test",
        feed.every,
        "PairedVariance(0.3)" if shares_minibatch else "Smoothing(0.3, PerExample(paired=False))",
    )


def PairedVariance(smoothing: float | None = None) -> NoiseEstimator:  # noqa: N802 - reads as a class beside the others
    """The free paired variance of shared minibatches, smoothed (Eq. 14) or, with None, averaged over the run (Eq. 13).

    It depends on how far the replicas are apart, and smoothing follows that where an average over the run does not.
    """
    feed = PerExample(paired=True)
    return RunningMean(feed) if smoothing is None else Smoothing(smoothing, feed)


def default_estimator(target: SourceOfNoise) -> NoiseEstimator:
    """What `sample` uses when nothing is asked for: exact energies need none, data give theirs for free, else the paper's way."""
    if not target.has_noise:
        return KnownVariance(0.0)
    if target.n_data is not None:
        return Smoothing(0.3, PerExample(paired=target.shares_minibatch))
    return RunningMean(RepeatedDraws())


def _require_variance(variance: float) -> None:
    if not (math.isfinite(variance) and variance >= 0):
        raise NoiseError(f"a noise variance must be finite and >= 0, got {variance}")
