"""Estimators of the noise variance sigma2: the variance of ONE energy estimate, per pair of rungs
and per run.

An estimator is an update rule (known, the present batches, running mean, smoothing) and a feed
(repeated draws, or the free per-example variances). A running mean and a smoothed variance are kept
per pair of RUNGS. With three rungs or more, a swap with a third rung brings another replica into
the pair, whose variance is not the remembered one; rung 0 is then too hot. `BatchVariance` follows
the replicas. For a pair whose energies have variances s_cold and s_hot and covariance c, every feed
aims at half the variance of the difference, (s_cold + s_hot) / 2 - c, because that is what the swap
ratio needs.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchrex.errors import NoiseError
from torchrex.exchange.assignment import Selects

logger = logging.getLogger("torchrex")

Take = Callable[[Tensor, Tensor], Tensor]  # looks values up, see `assignment.py`


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
    """The paper's feed: every `every` steps, the sample variance of `n_draws` fresh energies at the
    current positions.

    Unpaired it averages the variances of the two replicas, as the paper does; that is right where
    their noises are independent. Paired it takes half the variance of their difference, which is
    right where they share a minibatch as well. The first measurement is at step 0, or at step
    `every` if the estimator has an `initial` variance that holds until then.
    """

    n_draws: int = 10
    every: int = 100
    paired: bool = False

    def __post_init__(self) -> None:
        if self.n_draws < 2 or self.every < 1:
            raise NoiseError(f"RepeatedDraws needs n_draws >= 2 and every >= 1, got {self}")

    def sample(self, energies: Tensor, replica_at: Tensor, take: Take = Selects.take) -> Tensor:
        """From energies (draws, replicas, runs) to variances (pairs, runs)."""
        at_rung = take(energies.movedim(0, -1), replica_at)  # (rungs, runs, draws)
        if self.paired:
            return 0.5 * (at_rung[:-1] - at_rung[1:]).var(dim=-1)
        variance = at_rung.var(dim=-1)
        return 0.5 * (variance[:-1] + variance[1:])


@dataclass(frozen=True)
class PerExample:
    """The free feed: at every step, from the per-example terms l_i of the minibatch that is there
    anyway.

        var(l_i)               for one replica (unpaired, the mean of both)
        var(l_i - l'_i) / 2    for the difference of two replicas on the same minibatch (paired)

    These do not depend on the size n of the minibatch; times `scale`, N^2 / n, they are sigma2.
    """

    paired: bool = True

    def sample(self, per_example: Tensor, replica_at: Tensor, take: Take = Selects.take) -> Tensor:
        """From energies (replicas, runs, n) to variances of one example's term (pairs, runs)."""
        at_rung = take(per_example, replica_at)
        if per_example.shape[-1] < 2:  # no variance; `sa_step` leaves out what is not finite
            return torch.full_like(at_rung[1:, :, 0], math.nan)
        if self.paired:
            return 0.5 * (at_rung[:-1] - at_rung[1:]).var(dim=-1)
        variance = at_rung.var(dim=-1)
        return 0.5 * (variance[:-1] + variance[1:])

    def shrunk(self, sample: Tensor, change: Tensor, share: float) -> Tensor:
        """The variance less what it loses because n different examples are a share n / N of all.

        Only the choice of examples loses it. What is random in the terms themselves is seen from
        the same examples with other random numbers: half the mean square of the `change`, which is
        (rungs, runs, n).

            var - n / N * (var - within),    within = mean((d_i - d_i')^2) / 2

        where d_i = l_i - l'_i if paired.
        """
        if self.paired:
            within = 0.25 * (change[:-1] - change[1:]).square().mean(dim=-1)
        else:
            square = change.square().mean(dim=-1)
            within = 0.25 * (square[:-1] + square[1:])
        return sample - share * (sample - within).clamp(min=0.0)

    def scale(self, n: int, n_data: int, *, finite_population: bool = False) -> float:
        """Variance of the summed energy over that of one example's term, for n of N examples.

        N^2 / n                if examples are drawn with replacement or have random terms
        N^2 / n * (1 - n / N)  for n different examples, whose terms are not random
        """
        return n_data**2 / n * (max(0.0, 1.0 - n / n_data) if finite_population else 1.0)

    def third(self, terms: Tensor, n_data: int) -> Tensor:
        """Third cumulant (pairs, runs) of the noise of the difference, cold minus hot, of terms
        (rungs, runs, n) of n different examples at their rungs.

            N^3 / n^2 (1 - n/N) (1 - 2 n/N) k3
        """
        n = terms.shape[-1]
        share = n / n_data
        unbiased = n * n / max(1, (n - 1) * (n - 2))
        scale = unbiased * n_data**3 / n**2 * (1.0 - share) * (1.0 - 2.0 * share)
        difference = terms[:-1] - terms[1:]
        return scale * (difference - difference.mean(-1, keepdim=True)).pow(3).mean(-1)

    def degrees_of_freedom(self, n: int) -> float:
        """Those of the sample variance; unpaired it is the mean of two independent ones."""
        return float(n - 1 if self.paired else 2 * (n - 1))


Feed = RepeatedDraws | PerExample


def _require_feed(feed: object) -> None:
    if not isinstance(feed, RepeatedDraws | PerExample):
        raise NoiseError(f"feed must be RepeatedDraws(...) or PerExample(...), got {feed!r}")


class NoiseEstimator(ABC):
    """An update rule for sigma2: sigma2 <- sigma2 + gain(m) * (sample - sigma2) at the m-th SA
    step, m = 1, 2, ...
    """

    feed: Feed | None
    initial: float

    @abstractmethod
    def gain(self, m: Tensor) -> Tensor | float: ...

    def update(self, variance: Tensor, m: Tensor, sample: Tensor) -> Tensor:
        """The SA step (Eq. 13 and 14), written so that the estimate stays between its old value and
        the sample.
        """
        return variance + self.gain(m) * (sample - variance)

    @property
    def first_measurement(self) -> int:
        """The step of the first measurement: 0, unless an initial variance holds for a while."""
        return self.feed.every if self.initial and isinstance(self.feed, RepeatedDraws) else 0

    def degrees_of_freedom(self, n: int) -> float:
        """Those of a sigma2 that is estimated from few examples, n at a time; else infinite."""
        return math.inf

    def check(self, target: SourceOfNoise) -> None:
        """Refuse a feed that does not fit this target."""
        if isinstance(self.feed, PerExample):
            if target.n_data is None:
                raise NoiseError(
                    f"{self!r} needs per-example energies, which {target!r} does not have; "
                    "use RepeatedDraws"
                )
            require_two_examples(self, target.batch_size)
            if self.feed.paired and not target.shares_minibatch:
                raise NoiseError(
                    "the paired variance is that of replicas on the same minibatch, but "
                    f"{target!r} gives each its own; use PerExample(paired=False), or share it"
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
class BatchVariance(NoiseEstimator):
    """sigma2 of the two replicas that are compared, from this minibatch and the one before. The
    default for data.

        sigma2 = own / 3 + 2 / 3 * before

    It belongs to the present replicas, whatever the ladder and however often neighbours swap:
    `before` is taken after the swaps, from the replicas that are neighbours then. Why a third: the
    variance of a sample is correlated with its mean if the terms are skewed, by their third
    cumulant k3. A variance from other examples leaves k3 / 6 in log E[S], one from the same
    examples k3 / 6 - k3 / 2. The mixture leaves nothing of the third order. Its own uncertainty,
    with 9/5 as many degrees of freedom, is corrected for (`criterion.finite_sample_term`). What is
    left is in benchmarks/README.md, for Gaussian and for skewed data.
    """

    feed: PerExample = field(default_factory=PerExample)
    initial: float = 0.0
    own_share: ClassVar[float] = 1.0 / 3.0

    def __post_init__(self) -> None:
        if not isinstance(self.feed, PerExample):
            raise NoiseError(f"feed must be PerExample(...), got {self.feed!r}")

    def gain(self, m: Tensor) -> Tensor | float:
        return 1.0

    def update(self, variance: Tensor, m: Tensor, sample: Tensor) -> Tensor:
        return sample  # nothing of the old value, not even its rounding

    def blended(self, before: Tensor, m: Tensor, own: Tensor) -> Tensor:
        """What the test uses: a part of each, or what there is."""
        mixed = torch.where(m > 0, before + self.own_share * (own - before), own)
        return torch.where(own.isfinite(), mixed, before)

    def degrees_of_freedom(self, n: int) -> float:
        return self.feed.degrees_of_freedom(n) / (self.own_share**2 + (1.0 - self.own_share) ** 2)


@dataclass(frozen=True)
class SwapBatchVariance(NoiseEstimator):
    """sigma2 of the two replicas that are compared, from the swap batch on which they are compared.
    The default with a swap batch.

    Nothing is remembered: there are many examples, and the state at the swap before is an old one.
    That mean and variance of the same skewed terms are correlated is corrected for by their third
    cumulant (`criterion.log_swap_ratio`), which many examples show well.
    """

    feed: PerExample = field(default_factory=PerExample, init=False)  # all on the same examples
    initial: float = field(default=0.0, init=False)

    def gain(self, m: Tensor) -> Tensor | float:
        return 1.0

    def update(self, variance: Tensor, m: Tensor, sample: Tensor) -> Tensor:
        return sample

    def degrees_of_freedom(self, n: int) -> float:
        return self.feed.degrees_of_freedom(n)

    def check(self, target: SourceOfNoise) -> None:
        """All replicas are compared on the same examples, whatever their own minibatches are."""


@dataclass(frozen=True)
class RunningMean(NoiseEstimator):
    """Eq. 13 with gain 1/m: the plain mean of all samples, for a variance that does not change.

    The first sample replaces `initial` altogether, as the paper's formula does; until then
    `initial` is in force. Where sigma2 depends on the states, as it does for data, the test is
    biased (benchmarks/variance_of_rung0.py).
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
    """Eq. 14: exponential smoothing with a constant factor, for a variance that drifts. The first
    sample replaces `initial`.

    With per-example variances it is biased from three rungs on, because it remembers those of other
    replicas: on a Gaussian posterior with s = 1.5 rung 0 has 1.08 times its variance with four
    rungs (benchmarks/variance_of_rung0.py).
    """

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
    """Refuse minibatches of one example: sigma2 would stay at its initial value."""
    if isinstance(noise.feed, PerExample) and batch_size == 1:
        raise NoiseError(
            f"{noise!r} needs at least 2 examples in a minibatch, got batch_size=1; raise it "
            "or use noise=RunningMean(RepeatedDraws()), which compares minibatches"
        )


def warn_of_one_example(noise: NoiseEstimator) -> None:
    logger.warning(
        "batches of one example give %r no variance: swaps are tested with sigma2 = %g. "
        "Use batches of at least 2 examples, or noise=RunningMean(RepeatedDraws())",
        noise,
        noise.initial,
    )


def warn_of_no_measurement(
    noise: NoiseEstimator, feed: RepeatedDraws, n_steps: int, *, shares_minibatch: bool
) -> None:
    """Repeated energies need extra batches, which a loop over `run.step` does not give."""
    logger.warning(
        "%r has measured nothing in %d steps, as run.step(batch) gives no extra batches: swaps "
        "are tested with sigma2 = %g%s. Use train(run, loader, n_steps, extra=loader), call "
        "run.measure(batches) before the first step and every %d steps, or use noise=%s",
        noise,
        n_steps,
        noise.initial,
        "" if noise.initial else ", which is the naive test",
        feed.every,
        "PairedVariance()" if shares_minibatch else "BatchVariance(PerExample(paired=False))",
    )


def PairedVariance(smoothing: float | None = None) -> NoiseEstimator:  # noqa: N802 - reads as a class like the others
    """The free paired variance of the current minibatch (`BatchVariance`), or smoothed (biased)."""
    feed = PerExample(paired=True)
    return BatchVariance(feed) if smoothing is None else Smoothing(smoothing, feed)


def default_estimator(target: SourceOfNoise) -> NoiseEstimator:
    """Exact energies need none, data give theirs for free, else the paper's way."""
    if not target.has_noise:
        return KnownVariance(0.0)
    if target.n_data is not None:
        return BatchVariance(PerExample(paired=target.shares_minibatch))
    return RunningMean(RepeatedDraws())


class NoiseShape(NamedTuple):
    """How the noise of log S departs from a Gaussian, which the correction assumes; (pairs,) each.

    With a sigma2 from other examples a third cumulant k3 and a fourth k4 add k3 / 6 and k4 / 24 to
    log E[S], and no F takes them away. `BatchVariance` removes k3 / 6 from log E[S], though not
    from the mean of min(1, S).
    """

    noise_std: Tensor  # s
    skewness: Tensor  # rms over the runs, without what a Gaussian sample shows by chance
    kurtosis: Tensor  # excess
    is_seen: Tensor  # is either beyond what a Gaussian sample shows?

    @property
    def error(self) -> Tensor:
        """About how much log S is off: |k3| / 6 + k4 / 24."""
        third = self.skewness * self.noise_std**3
        return third / 6 + self.kurtosis.clamp(min=0.0) * self.noise_std**4 / 24

    @staticmethod
    def of(
        terms: Tensor, inverse_gap: Tensor, *, paired: bool, scale: float = 1.0, n_summed: int = 1
    ) -> NoiseShape:
        """From terms at each rung (rungs, runs, m): m energies, or m examples of which the mean of
        `n_summed` times `scale` is an energy. A run in which nothing varies is left out.
        """
        m, runs = terms.shape[2], terms.shape[1]
        parts = [terms[:-1] - terms[1:]] if paired else [terms[:-1], -terms[1:]]
        away = [part.double() - part.double().mean(-1, keepdim=True) for part in parts]
        squares = [part.square().mean(-1) for part in away]
        second = torch.stack(squares).sum(0)
        third = torch.stack([part.pow(3).mean(-1) for part in away]).sum(0)
        fourth = torch.stack(
            [part.pow(4).mean(-1) - 3 * sq.square() for part, sq in zip(away, squares, strict=True)]
        ).sum(0)
        # Of one term; a mean of n terms has 1 / sqrt(n) of the skewness and 1 / n of the kurtosis.
        skewness = (third / second**1.5).square().nanmean(1).nan_to_num()
        kurtosis = (fourth / second.square()).nanmean(1).nan_to_num()
        by_chance = (6.0 + 9.0 * kurtosis.clamp(min=0.0)) / m  # of a symmetric sample, about
        is_skewed = skewness > by_chance * (1 + 12 / math.sqrt(runs))
        noise_std = inverse_gap[:, None] * scale * (second / n_summed).sqrt()
        return NoiseShape(
            noise_std=noise_std.square().mean(1).sqrt(),
            skewness=((skewness - by_chance).clamp(min=0.0) / n_summed).sqrt(),
            kurtosis=kurtosis / n_summed,
            is_seen=is_skewed | (kurtosis > 6 * math.sqrt(24.0 / (m * runs))),
        )


LARGEST_ERROR = 0.25  # of log S, by noise that is not Gaussian, before a run warns
LARGEST_NOISE = 4.0  # s of a pair that may still swap; beyond, the cumulants say little


def warn_of_shape(shape: NoiseShape | None, factor: Tensor) -> None:
    """Warn of the pair with the least Gaussian noise, unless its F (pairs,) biases it more."""
    if shape is None:
        return
    uncorrected = 0.5 * shape.noise_std.square() * (1.0 - 1.0 / factor)
    matters = (shape.error > LARGEST_ERROR + uncorrected) & (shape.noise_std < LARGEST_NOISE)
    bad = shape.is_seen & matters
    if not bool(bad.any()):
        return
    pair = int(torch.where(bad, shape.error, -1.0).argmax())
    shown = (shape.noise_std, shape.skewness, shape.kurtosis, shape.error)
    logger.warning(
        "the energy noise of rungs %d and %d is not Gaussian (s = %.2g, skewness %.2g, excess "
        "kurtosis %.2g): log S may be off by about %.2g, which biases rung 0 at any F. "
        "Use larger minibatches, closer temperatures, or lighter tails",
        *(pair, pair + 1, *(float(values[pair]) for values in shown)),
    )


def _require_variance(variance: float) -> None:
    if not (math.isfinite(variance) and variance >= 0):
        raise NoiseError(f"a noise variance must be finite and >= 0, got {variance}")
