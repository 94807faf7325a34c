"""Pairing rules: which neighbouring rungs are tested for a swap, and in how many rounds of one
step.

Within a round the pairs are disjoint, and every round has energies of its own. So no noisy energy
is used twice, which is what makes each test exact; a rule with several rounds pays for the later
ones with one energy evaluation each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Pairing(ABC):
    """A rule that proposes disjoint neighbouring pairs, round by round."""

    def n_rounds(self, n_pairs: int) -> int:
        return min(1, n_pairs)

    @abstractmethod
    def propose(
        self, generator: torch.Generator, attempts: Tensor, n_pairs: int, n_runs: int
    ) -> Tensor:
        """Which pairs are tested at the given swap attempts (0, 1, 2, ...): bool, (attempts,
        rounds, pairs, runs or 1).
        """


@dataclass(frozen=True)
class EvenOdd(Pairing):
    """Pairs (0,1), (2,3), ... at even attempts and (1,2), (3,4), ... at odd ones,
    deterministically.

    Its replicas travel along the ladder rather than diffuse (Okabe et al. 2001; Syed et al. 2022).
    With two rungs there is one pair, tested at every attempt as in the paper.

    Pairs that are tested on one shared minibatch share its noise, and from four rungs on the joint
    law of the replicas is then not exact. With 8 rungs and s = 2 the variance of rung 0 is 1.056(9)
    of the right one for a model of one parameter, 1.012(9) for three and 0.991(4) for ten
    (benchmarks/variance_of_rung0.py). `RandomPair` has no such bias.
    """

    def propose(
        self, generator: torch.Generator, attempts: Tensor, n_pairs: int, n_runs: int
    ) -> Tensor:
        if n_pairs == 1:
            return torch.ones(len(attempts), 1, 1, 1, dtype=torch.bool, device=attempts.device)
        pairs = torch.arange(n_pairs, device=attempts.device)
        return (pairs % 2 == attempts[:, None] % 2)[:, None, :, None]


@dataclass(frozen=True)
class RandomPair(Pairing):
    """One neighbouring pair, chosen uniformly, for each run and attempt."""

    def propose(
        self, generator: torch.Generator, attempts: Tensor, n_pairs: int, n_runs: int
    ) -> Tensor:
        chosen = torch.randint(
            n_pairs, (len(attempts), 1, 1, n_runs), generator=generator, device=attempts.device
        )
        return torch.arange(n_pairs, device=attempts.device)[:, None] == chosen


@dataclass(frozen=True)
class NoSwaps(Pairing):
    """No swaps: independent replicas on the same ladder, the baseline of equal compute."""

    def propose(
        self, generator: torch.Generator, attempts: Tensor, n_pairs: int, n_runs: int
    ) -> Tensor:
        return torch.zeros(len(attempts), 1, n_pairs, 1, dtype=torch.bool, device=attempts.device)


@dataclass(frozen=True)
class AllInTurn(Pairing):
    """Every neighbouring pair once, from cold to hot, so that a replica may climb several rungs in
    one step.

    Each pair is a round and so gets fresh energies: n_pairs - 1 extra energy evaluations a step.
    """

    def n_rounds(self, n_pairs: int) -> int:
        return n_pairs

    def propose(
        self, generator: torch.Generator, attempts: Tensor, n_pairs: int, n_runs: int
    ) -> Tensor:
        one_by_one = torch.eye(n_pairs, dtype=torch.bool, device=attempts.device)
        return one_by_one[None, :, :, None].expand(len(attempts), -1, -1, -1)


def default_pairing(target: object, n_pairs: int, swap_batch: int | None = None) -> Pairing:
    """EvenOdd, unless several pairs would be tested on one shared minibatch of a model with one or
    two parameters. All data have no noise to share.
    """
    if swap_batch is not None and swap_batch == getattr(target, "n_data", None):
        return EvenOdd()
    few = getattr(target, "shares_minibatch", False) and getattr(target, "dim", math.inf) < 3
    return RandomPair() if few and n_pairs > 2 else EvenOdd()
