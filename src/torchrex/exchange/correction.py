"""Rules for the correction factor F: 1 is unbiased, infinity is the naive test, between them
accuracy is traded for swaps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError


class FactorRule(ABC):
    """Gives F for every pair and run at every step; `learnt` (..., pairs, runs) is its memory."""

    initial: float

    def start(self, ones: Tensor) -> Tensor:
        """The memory before the first step, from ones (pairs, runs)."""
        return self.initial * ones

    @abstractmethod
    def factor(self, learnt: Tensor, inverse_gap: Tensor, first_gap: Tensor) -> Tensor:
        """F, to broadcast against (pairs, runs); gaps have shape (pairs, 1)."""

    def adapt(
        self, learnt: Tensor, acceptance: Tensor, proposed: Tensor, accepted: Tensor
    ) -> Tensor:
        """The memory after a round whose tests had these acceptance probabilities and outcomes."""
        return learnt


@dataclass(frozen=True)
class ConstantFactor(FactorRule):
    """The same F at every step."""

    initial: float = 1.0

    def __post_init__(self) -> None:
        _require_factor(self.initial)

    def factor(self, learnt: Tensor, inverse_gap: Tensor, first_gap: Tensor) -> Tensor:
        return learnt


@dataclass(frozen=True)
class ProportionalToGap(FactorRule):
    """F grows with the inverse gap under annealing: F = initial * gap / gap at step 0 *
    per_swap^(swaps of the pair so far).

    The correction gap * sigma2 / F, which is the threshold in energy units, then does not change
    when the ladder cools. This is how the paper's F is 'adapted to counteract the annealing'.
    `per_swap` below 1 makes every swap harder than the one before; the authors' code has 0.7 to
    0.8, of which the paper does not speak.
    """

    initial: float
    per_swap: float = 1.0

    def __post_init__(self) -> None:
        _require_factor(self.initial)
        if not 0 < self.per_swap <= 1:
            raise InvalidArgumentError(
                f"per_swap must lie in (0, 1], 1 leaves F alone, got {self.per_swap}"
            )

    def factor(self, learnt: Tensor, inverse_gap: Tensor, first_gap: Tensor) -> Tensor:
        return learnt * (inverse_gap / first_gap)

    def adapt(
        self, learnt: Tensor, acceptance: Tensor, proposed: Tensor, accepted: Tensor
    ) -> Tensor:
        if self.per_swap == 1.0:
            return learnt
        return torch.where(accepted, self.per_swap * learnt, learnt)


FASTEST, LARGEST_STEP = 3.0, 0.5


@dataclass(frozen=True)
class TargetAcceptance(FactorRule):
    """F is learnt for each pair so that the mean of its acceptance probabilities a tends to `rate`
    (Robbins and Monro 1951).

        log F <- log F + max(gain, 3 / (1 + sum of all a so far)) * (rate - a)

    by at most 0.5 a test, with 1 <= F <= largest.

    The sum grows with the number of tests only once F lets swaps through: until then F rises fast,
    however far it has to go. After 200 tests of Gaussian noise most runs are within a factor of 1.5
    of the F for `rate` (98 % at a rate of 0.2, 73 % at 0.4, where the acceptance hardly depends on
    F); then F settles, and follows what drifts with `gain`.

    F never falls below 1, where the test is already unbiased. The price of reaching `rate` is the F
    it ends with: look at it in `Draws.summary()` or `run.correction_factor`.
    """

    rate: float
    initial: float = 1.0
    gain: float = 0.01
    largest: float = 1e12

    def __post_init__(self) -> None:
        _require_factor(self.initial)
        if not 0 < self.rate < 1:
            raise InvalidArgumentError(
                f"the target acceptance rate must lie between 0 and 1, got {self.rate}"
            )
        if not (self.gain > 0 and 1 <= self.initial <= self.largest < math.inf):
            raise InvalidArgumentError(
                f"TargetAcceptance needs gain > 0 and 1 <= initial <= largest < inf, got {self}"
            )

    def start(self, ones: Tensor) -> Tensor:
        """F and the sum of the acceptance probabilities: (2, pairs, runs)."""
        return torch.stack([self.initial * ones, torch.zeros_like(ones)])

    def factor(self, learnt: Tensor, inverse_gap: Tensor, first_gap: Tensor) -> Tensor:
        return learnt[0]

    def adapt(
        self, learnt: Tensor, acceptance: Tensor, proposed: Tensor, accepted: Tensor
    ) -> Tensor:
        factor, total = learnt[0], learnt[1]
        gain = (FASTEST / (1.0 + total)).clamp(min=self.gain)
        step = (gain * (self.rate - acceptance)).clamp(-LARGEST_STEP, LARGEST_STEP)
        better = torch.stack([(factor * step.exp()).clamp(1.0, self.largest), total + acceptance])
        return torch.where(proposed & acceptance.isfinite(), better, learnt)


def as_rule(factor: float | FactorRule) -> FactorRule:
    """A number means a constant factor."""
    return factor if isinstance(factor, FactorRule) else ConstantFactor(float(factor))


def _require_factor(factor: float) -> None:
    if not factor > 0:
        raise InvalidArgumentError(
            f"the correction factor F must be positive, got {factor}; 1 is unbiased, "
            "float('inf') is the naive test"
        )
