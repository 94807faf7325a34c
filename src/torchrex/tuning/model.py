"""What exchange costs: the model by which `tune` chooses, from lengths between temperatures.

Between neighbouring temperatures lie the heat h of exact energies and the noise s of the test.
Their squares add in the acceptance, and both grow in proportion to the gap:

    a = 2 Phi(-l / 2),    l^2 = h^2 + s^2

So rungs in equal steps of l have equal rejection.

A cycle of a replica, from the hot end to rung 0 and back, takes R t steps, where t is the time
between two arrivals of the even-odd scheme (Syed et al. 2022), and t of them at the hot end. There
it forgets where it was with probability 1 - exp(-t / relaxation), so a new visit to rung 0 takes

    R t / (1 - exp(-t / relaxation)) steps,    t = K (2 + 2 (R - 1) (W - 1))

of n + m / K examples each, with R rungs, a test on m examples every K steps and W the tests that a
swap takes. The choice has the fewest examples a new visit.

W knows energies that change as fast as at the hot end. Where they stay for longer on cold rungs,
swaps are undone and t is longer. The last round shows by how much: by what is left of the slowest
mode of the rungs of its replicas, next to what t says. That changes the prediction, not the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.exchange import expected_acceptance


class Setting(NamedTuple):
    """What is chosen besides the temperatures."""

    n_rungs: int
    swap_batch: int | None
    swap_interval: int


@dataclass(frozen=True)
class Lengths:
    """What lies between neighbouring temperatures, (pairs,), and what a step costs."""

    inverse: Tensor  # (rungs,): inverse temperatures, falling
    heat: Tensor  # per pair: h
    # Variance of the difference of two energies: of one example each, or of a whole energy where
    # there are no data.
    variance: Tensor
    relaxation: float  # steps at the hot end until a replica has forgotten where it was
    batch: int  # examples a step
    n_data: int | None
    finite_population: bool = False  # is no example twice in a minibatch?
    one_pair_at_a_time: bool = False
    slowness: float = 1.0  # of arrivals, over what the tests of independent energies say

    def noise(self, swap_batch: int | None) -> Tensor:
        """s of each pair."""
        gap = -self.inverse.diff()
        if self.n_data is None:
            return gap * self.variance.sqrt()
        n, n_data = swap_batch or self.batch, self.n_data
        finite = swap_batch is not None or self.finite_population
        per_energy = n_data**2 * (1.0 / n - (1.0 / n_data if finite else 0.0))
        return gap * (max(0.0, per_energy) * self.variance).sqrt()

    def together(self, swap_batch: int | None) -> Tensor:
        """Heat and noise of each pair, whose squares add."""
        return (self.heat.square() + self.noise(swap_batch).square()).sqrt()

    def total(self, swap_batch: int | None) -> float:
        return float(self.together(swap_batch).sum())

    def barrier(self, swap_batch: int | None) -> float:
        """The sum of the rejection rates of these pairs."""
        return float(torch.erf(self.together(swap_batch) / math.sqrt(8.0)).sum())

    def examples_a_visit(self, setting: Setting) -> float:
        """Of all replicas together, for one arrival at rung 0 of a replica that has forgotten at
        the hot end where it was.
        """
        steps = self.slowness * self.steps_an_arrival(setting)
        forgets = -math.expm1(-steps / self.relaxation)
        return setting.n_rungs * steps / forgets * self.examples_a_step(setting)

    def steps_an_arrival(self, setting: Setting) -> float:
        """t, whether a replica has forgotten or not, and were it not for slowness."""
        rungs, size, interval = setting
        together = self.together(size)
        length = float(together.sum()) / (rungs - 1)
        share = float((self.heat.square() / together.clamp(min=1e-12)).sum() / together.sum())
        heat, noise = length * math.sqrt(share), length * math.sqrt(max(0.0, 1.0 - share))
        if self.one_pair_at_a_time and size != self.n_data:
            tests = max(1.0, self.relaxation / (interval * (rungs - 1)))
            return interval * (rungs - 1) ** 2 * swap_waits(heat, noise, tests)
        tests = max(1.0, self.relaxation / (2 * interval))
        waits = swap_waits(heat, noise, tests) - 1.0
        return interval * (2.0 + 2.0 * (rungs - 1) * waits)

    def memory(self, setting: Setting, lag: int) -> float:
        """What is left after so many steps of the slowest mode of the rungs of replicas: a walk
        between two walls that takes (R - 1) / D steps an arrival.
        """
        rungs = setting.n_rungs
        diffusivity = (rungs - 1) / self.steps_an_arrival(setting)
        return math.exp(-2.0 * (1.0 - math.cos(math.pi / rungs)) * diffusivity * lag)

    def examples_a_step(self, setting: Setting) -> float:
        """Of one replica, those of swap batches included."""
        return self.batch + (setting.swap_batch or 0) / setting.swap_interval

    def temperatures(self, setting: Setting) -> tuple[float, ...]:
        """In equal steps of heat and noise together; inside a pair in equal ratios."""
        together = self.together(setting.swap_batch).tolist()
        ends, points = self.inverse.tolist(), [float(self.inverse[0])]
        total, passed, pair = sum(together), 0.0, 0
        for k in range(1, setting.n_rungs - 1):
            wanted = total * k / (setting.n_rungs - 1)
            while pair < len(together) - 1 and passed + together[pair] < wanted:
                passed += together[pair]
                pair += 1
            part = (wanted - passed) / together[pair] if together[pair] else 0.5
            cold, hot = ends[pair], ends[pair + 1]
            inside = cold * (hot / cold) ** part if hot > 0 else cold * (1 - part)
            points.append(inside)
        return tuple(math.inf if b == 0 else 1.0 / b for b in [*points, ends[-1]])

    def up_to(self, total: float, swap_batch: int | None) -> Lengths:
        """The cold part with this total length, or all."""
        together = self.together(swap_batch)
        n = int((together.cumsum(0) < total).sum())  # pairs that are inside
        if n == len(together):
            return self
        part = (total - float(together[:n].sum())) / float(together[n])
        cold, hot = float(self.inverse[n]), float(self.inverse[n + 1])
        end = cold * (hot / cold) ** part if hot > 0 else cold * (1 - part)
        share = (cold - end) / (cold - hot)
        return replace(
            self,
            inverse=torch.cat([self.inverse[: n + 1], self.inverse.new_tensor([end])]),
            heat=torch.cat([self.heat[:n], share * self.heat[n : n + 1]]),
            variance=self.variance[: n + 1],
        )

    def best(
        self, most_rungs: int, sizes: Sequence[int | None], intervals: Sequence[int]
    ) -> Setting:
        """The setting with the fewest examples a visit."""
        candidates = [
            Setting(rungs, size, interval)
            for size in sizes
            for interval in intervals
            for rungs in _numbers_of_rungs(self.total(size), most_rungs)
        ]
        return min(candidates, key=self.examples_a_visit)


def _numbers_of_rungs(total: float, most: int) -> list[int]:
    """Those that are worth a look: from steps of 6 to steps of 0.5."""
    least, largest = math.ceil(total / 6.0) + 1, math.ceil(total / 0.5) + 1
    first, last = max(2, min(least, most)), max(2, min(largest, most))
    return sorted({round(first * (last / first) ** (k / 24)) for k in range(25)})


def swap_waits(heat: float, noise: float, tests: float) -> float:
    """How many tests of a pair one swap takes, with `tests` in the time in which exact energies
    change; their noise is new in each.

    With a(D) the acceptance at the exact difference D, which is normal with mean -heat^2 / 2:

        W = E[(1 - (1 - a)^tests) / a] / E[1 - (1 - a)^tests]
    """
    nodes = torch.linspace(-5.0, 5.0, 101, dtype=torch.float64)
    weights = (-0.5 * nodes.square()).exp()
    accept = expected_acceptance(heat * nodes - 0.5 * heat**2, noise).clamp(1e-300, 1.0)
    swapped = -torch.expm1(tests * torch.log1p(-accept.clamp(max=1 - 1e-12)))
    return float((weights * swapped / accept).sum() / (weights * swapped).sum())


def nearest(wanted: Tensor, there: Tensor) -> list[int]:
    """For each inverse temperature the place of the nearest one that is there, in ratio."""
    tiny = 1e-3 * float(there[there > 0].min())
    distance = ((wanted[:, None] + tiny).log() - (there + tiny).log()).abs()
    return [int(k) for k in distance.argmin(1)]
