"""`tune`: a ladder, a swap batch and an interval that bring most new visits to rung 0 per example.

Short rounds, each longer than the last, measure between neighbouring temperatures two lengths. The
heat h is that of exact energies, h^2 = 2 gap (mean energy hot - cold), which minibatch energies
show without bias. The noise s is that of the test. Both grow in proportion to the gap, so rungs in
equal steps of sqrt(h^2 + s^2) have equal rejection, and the sum over the ladder is its barrier.

A cycle of a replica, from the hot end to rung 0 and back, takes R times the time between two
arrivals of the even-odd scheme (Syed et al. 2022), and the relaxation at the hot end:

    steps = R K (2 + 2 (R - 1) (W - 1)) + relaxation,    examples a step = n + m / K

with R rungs, a test every K steps and W the tests that a swap takes. The choice has the fewest
examples a cycle.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrex.density import DensityExchange, TensorEnsemble
from torchrex.density.tensor_ensemble import as_target, starting_points
from torchrex.errors import InvalidArgumentError, known_arguments, require_whole
from torchrex.exchange import (
    Ladder,
    NoSwaps,
    ReplicaExchange,
    RuleOptions,
    StepInfo,
    count_trips,
    expected_acceptance,
    resolve_device,
    rung_of,
)
from torchrex.posterior import mean_error
from torchrex.rng import Streams, derive_seed
from torchrex.samplers import Sampler
from torchrex.targets import Target

if TYPE_CHECKING:
    from torchrex.network import ModuleEnsemble, ModuleExchange

logger = logging.getLogger("torchrex")

FIRST_RUNGS = 8  # of the first round, which has no swaps
FIRST_STEPS = 1_000  # of the first round, if nobody says how long the run will be
SHORTEST = 200
SHARE = 0.1  # of the run, which tuning may cost
MOST_ROUNDS = 8
FIRST_HOT = 16.0  # times the coldest temperature, if nobody says how hot the ladder shall be
HOTTER, HOTTEST = 4.0, 1e6  # times that where no rung mixes
MIXED = 1.1  # R-hat of a rung that mixes by itself
LONGEST_STEP = 2.5  # heat and noise of a pair that still swaps: 21 % of the tests
GAIN = 1.1  # fewer examples a visit by this factor are worth a change
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
ROWS = 128  # times at which positions are looked at
COORDINATES = 64  # and how many of each replica


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

    def barrier(self, swap_batch: int | None) -> float:
        return float(self.together(swap_batch).sum())

    def examples_a_visit(self, setting: Setting) -> float:
        """Of all replicas together, for one arrival at rung 0 of a replica that has been hot."""
        rungs, size, interval = setting
        together = self.together(size)
        length = float(together.sum()) / (rungs - 1)
        share = float((self.heat.square() / together.clamp(min=1e-12)).sum() / together.sum())
        heat, noise = length * math.sqrt(share), length * math.sqrt(max(0.0, 1.0 - share))
        if self.one_pair_at_a_time:
            tests = max(1.0, self.relaxation / (interval * (rungs - 1)))
            steps = interval * (rungs - 1) ** 2 * swap_waits(heat, noise, tests)
        else:
            tests = max(1.0, self.relaxation / (2 * interval))
            waits = swap_waits(heat, noise, tests) - 1.0
            steps = interval * (2.0 + 2.0 * (rungs - 1) * waits)
        return (rungs * steps + self.relaxation) * self.examples_a_step(setting)

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

    def best(
        self, most_rungs: int, sizes: Sequence[int | None], intervals: Sequence[int]
    ) -> Setting:
        """The setting with the fewest examples a visit."""
        candidates = [
            Setting(rungs, size, interval)
            for size in sizes
            for interval in intervals
            for rungs in _numbers_of_rungs(self.barrier(size), most_rungs)
        ]
        return min(candidates, key=self.examples_a_visit)


def _numbers_of_rungs(barrier: float, most: int) -> list[int]:
    """Those that are worth a look: from steps of 6 to steps of 0.5."""
    least, largest = math.ceil(barrier / 6.0) + 1, math.ceil(barrier / 0.5) + 1
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


@dataclass(frozen=True)
class Round:
    """One round of tuning, as it is shown."""

    setting: Setting
    hot: float
    n_steps: int
    barrier: float
    least: float  # acceptance of a pair
    mean: float
    trips: int
    overhead: float  # examples for swaps over examples for moves

    def __str__(self) -> str:
        rungs, size, interval = self.setting
        tests = f"{size:,} examples every {interval} steps" if size else f"every {interval} steps"
        tests = "each step's batch" if size is None and interval == 1 else tests
        tests = "no swaps" if math.isnan(self.mean) else f"tests on {tests}"
        rates = "" if math.isnan(self.mean) else f"acceptance {self.least:.2f} to {self.mean:.2f}, "
        return (
            f"{self.n_steps:,} steps, {rungs} rungs to temperature {self.hot:.3g}, {tests}: "
            f"barrier {self.barrier:.3g}, {rates}{self.trips} round trips, "
            f"swaps cost {100 * self.overhead:.0f} % of the moves"
        )


@dataclass(frozen=True)
class Tuned:
    """A ladder and the rules that go with it; `sample(target, ladder=tuned, ...)` takes both."""

    ladder: Ladder
    rules: dict[str, Any]  # swap_batch, swap_interval, and the rules that were given
    rounds: tuple[Round, ...] = ()
    examples: float = 0.0  # that tuning evaluated
    examples_a_visit: float = math.nan  # as predicted, of all replicas
    examples_a_step: float = math.nan
    advice: str = ""  # why exchange is not worth it; empty if it is

    def __repr__(self) -> str:
        chosen = self.settings()
        temperatures, _ = chosen.pop("temperatures"), chosen.pop("lrs")
        rules = "".join(f", {name}={value!r}" for name, value in chosen.items())
        ends = f"{temperatures[0]:g} to {temperatures[-1]:g}"
        return f"Tuned({len(temperatures)} rungs, temperatures {ends}{rules})"

    def settings(self) -> dict[str, Any]:
        """Plain numbers for a config: temperatures, lrs and the chosen rules."""
        names = ("swap_batch", "swap_interval", "tempering")
        chosen = {name: self.rules[name] for name in names if name in self.rules}
        return {
            "temperatures": list(self.ladder.temperatures),
            "lrs": list(self.ladder.lrs),
            **chosen,
        }


@known_arguments(*RuleOptions.__annotations__)
def tune(
    target: Target | ModuleEnsemble | Callable[[Tensor], Tensor],
    data: Any = None,
    *,
    lr: float,
    dim: int | None = None,
    cold: float = 1.0,
    hot: float | None = None,
    n_steps: int | None = None,
    n_runs: int = 8,
    most_rungs: int | None = None,
    seed: int = 0,
    sampler: Sampler | None = None,
    initial: Tensor | float | Distribution | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    show: bool = True,
    **rules: Unpack[RuleOptions],
) -> Tuned:
    """Choose temperatures from `cold` to `hot`, their number, the swap batch and the interval.

    `target` is what `sample` takes, or a ModuleEnsemble with its `data` (a DeviceLoader or a
    DataLoader). `lr` is that of the coldest rung. Rounds get longer until the choice no longer
    changes; with `n_steps` and `n_runs` of the run that is to be tuned they cost at most a tenth of
    it. Without `hot` the ladder ends at the prior if `tempering="likelihood"`, else where
    independent runs begin to agree; that of a network ends at ten times `cold`. `show` writes a
    line per round to stderr. `advice` of the result says if exchange is not worth it, and why.

    >>> tuned = tune(lambda x: -0.5 * x.square().sum(-1), dim=2, lr=0.05, hot=4.0, show=False)
    >>> tuned.ladder.temperatures[0], tuned.ladder.temperatures[-1]
    (1.0, 4.0)
    """
    from torchrex.network import ModuleEnsemble

    for name, number in (("cold", cold), ("lr", lr)):
        if not (number > 0 and math.isfinite(number)):
            raise InvalidArgumentError(f"{name} must be positive and finite, got {number}")
    if hot is not None and not hot > cold:
        raise InvalidArgumentError(f"hot must be above cold, got cold={cold:g} and hot={hot:g}")
    for name in ("swap_batch", "swap_interval", "pairing"):
        if name in rules:
            raise InvalidArgumentError(f"tune chooses {name}; leave it out")
    for name, count, least in (("n_steps", n_steps, 1), ("n_runs", n_runs, 1), ("seed", seed, 0)):
        if count is not None:
            require_whole(name, count, least)
    if most_rungs is not None:
        require_whole("most_rungs", most_rungs, 2)
    trials: _Trials
    if isinstance(target, ModuleEnsemble):
        if data is None:
            raise InvalidArgumentError("a network needs its data: tune(ensemble, loader, lr=...)")
        trials = _NetworkTrials(target, data, seed, dict(rules))
        most = most_rungs or 16
    else:
        trials = _DensityTrials(
            as_target(target, dim), sampler, min(8, max(2, n_runs)), initial, seed, dict(rules),
            resolve_device(device), dtype,
        )  # fmt: skip
        most = most_rungs or 64
    return _Tuning(trials, lr, cold, hot, most, n_steps, n_runs, show=show).tuned()


class _Seen(NamedTuple):
    """What a round showed."""

    energy: Tensor  # (rungs,): mean
    variance: Tensor  # (pairs,): of the difference of two energies, by their noise
    accepted: Tensor  # (pairs,)
    proposed: Tensor
    trips: int
    path: Tensor  # (rows, rungs, runs, coordinates): where the replica of each rung was


class _Trials:
    """Short runs on one target, each beginning where the one before ended."""

    n_data: int | None
    batch: int = 1
    finite_population = False
    can_have_swap_batches = False
    shares_minibatch = True
    prior_variance: float | None = None
    has_proper_prior = False
    data: Any = None
    dim: int
    n_runs: int
    rules: dict[str, Any]

    def begin(self, ladder: Ladder, rules: dict[str, Any]) -> ReplicaExchange:
        raise NotImplementedError

    def positions(self, run: Any) -> Tensor:
        """(rungs, runs, coordinates)"""
        raise NotImplementedError

    def measure(self, ladder: Ladder, rules: dict[str, Any], n_steps: int) -> _Seen:
        run, infos, path = self.begin(ladder, rules), [], []
        for info in run.advance(n_steps, self.data, every=max(1, n_steps // ROWS)):
            infos.append(StepInfo(*(values.clone().cpu() for values in info)))
            path.append(self.positions(run)[..., :COORDINATES].cpu())
        self.end(run)
        first = len(infos) // 3  # what comes before is the way from the round before
        late = infos[first:]
        energy = torch.cat([info.energy for info in late]).double()
        sigma2 = torch.cat([info.noise_variance for info in late]).double()
        proposed = torch.cat([i.proposed.expand(len(i.proposed), *sigma2.shape[1:]) for i in late])
        if run.rules.swap_batch is not None:  # rows between the tests know nothing of their noise
            sigma2 = sigma2[proposed.flatten(1).any(1)]
        replica_at = torch.cat([info.replica_at for info in infos])
        return _Seen(
            energy.mean((0, 2)),
            2.0 * sigma2.mean((0, 2)),
            torch.cat([info.accepted for info in late]).sum((0, 2)),
            proposed.sum((0, 2)),
            int(count_trips(rung_of(replica_at))[1].sum()),
            torch.stack(path[first:]).double(),
        )

    def end(self, run: Any) -> None:
        """Keep what the next round begins with."""
        raise NotImplementedError


class _DensityTrials(_Trials):
    def __init__(
        self,
        target: Target,
        sampler: Sampler | None,
        n_runs: int,
        initial: Tensor | float | Distribution | None,
        seed: int,
        rules: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.target, self.sampler, self.n_runs, self.rules = target, sampler, n_runs, rules
        self.seed, self.device, self.dtype, self.dim = seed, device, dtype, target.dim
        self.n_data, self.shares_minibatch = target.n_data, target.shares_minibatch
        self.batch = target.batch_size or 1
        self.can_have_swap_batches = target.n_data is not None
        self.prior_variance = target.prior_variance
        self.has_proper_prior = target.has_proper_prior
        self._rounds = itertools.count()
        self._inverse, self._start = torch.ones(1), torch.zeros(0)
        shape, streams = (FIRST_RUNGS, n_runs), Streams(seed)
        start = starting_points(initial, target, shape, streams)
        self._given = torch.as_tensor(start, dtype=dtype).expand(*shape, self.dim)

    def spread(self, temperature: float, lr: float, n_steps: int) -> None:
        """All replicas of the first round go their own ways at one temperature."""
        points = self._given.flatten(0, 1)[None]
        ensemble = TensorEnsemble.start(
            self.target, self.sampler, n_rungs=1, n_runs=points.shape[1], initial=points,
            device=self.device, dtype=self.dtype,
        )  # fmt: skip
        run = DensityExchange(ensemble, Ladder((temperature,), lr), seed=self._next_seed())
        for _ in run.advance(n_steps):
            pass
        self._given = run.ensemble.position[0].view_as(self._given)

    def _next_seed(self) -> int:
        return derive_seed(self.seed, f"tuning.{next(self._rounds)}")

    def begin(self, ladder: Ladder, rules: dict[str, Any]) -> DensityExchange:
        inverse = 1.0 / torch.tensor(ladder.temperatures, dtype=torch.float64)
        start = self._given[: ladder.n_rungs]
        if len(self._start):
            start = self._start[nearest(inverse, self._inverse)]
        ensemble = TensorEnsemble.start(
            self.target, self.sampler, n_rungs=ladder.n_rungs, n_runs=self.n_runs, initial=start,
            device=self.device, dtype=self.dtype,
        )  # fmt: skip
        return DensityExchange(ensemble, ladder, seed=self._next_seed(), **{**self.rules, **rules})

    def positions(self, run: DensityExchange) -> Tensor:
        at = run.state.replica_at.long()
        return run.ensemble.position[at, torch.arange(at.shape[1], device=at.device)]

    def end(self, run: DensityExchange) -> None:
        self._inverse, self._start = 1.0 / run.temperatures_at(0), self.positions(run)


class _NetworkTrials(_Trials):
    n_runs = 1

    def __init__(self, source: ModuleEnsemble, data: Any, seed: int, rules: dict[str, Any]) -> None:
        self.source, self.data, self.seed, self.rules = source, data, seed, rules
        if source.mesh is not None:
            raise InvalidArgumentError("tune works in one process; give an ensemble without mesh")
        self.n_data, self.shares_minibatch = source.n_data, source.shares_minibatch
        self.finite_population = not source.replacement
        self.prior_variance = source.prior_variance
        self.has_proper_prior = source.has_proper_prior
        from torchrex.network.step import size_of

        self.batch = getattr(data, "batch_size", None) or size_of(next(iter(data)))
        whole = getattr(data, "dataset", None)
        self.can_have_swap_batches = hasattr(data, "swap_batches") or hasattr(whole, "__getitem__")
        self._rounds = itertools.count()
        self._inverse: Tensor | None = None
        self._start: list[Any] = []

    def begin(self, ladder: Ladder, rules: dict[str, Any]) -> ModuleExchange:
        from torchrex.network import ModuleExchange

        inverse = 1.0 / torch.tensor(ladder.temperatures, dtype=torch.float64)
        seed = derive_seed(self.seed, f"tuning.{next(self._rounds)}")
        run = ModuleExchange(self.source, ladder, seed=seed, **{**self.rules, **rules})
        self.dim = run.ensemble.position.shape[-1]
        if self._inverse is not None and not self.source.shared:
            run.ensemble.load_tensors([self._start[k] for k in nearest(inverse, self._inverse)])
        return run

    def positions(self, run: ModuleExchange) -> Tensor:
        position = run.ensemble.position
        some = position[:, :: -(-position.shape[-1] // COORDINATES)]
        return some[run.state.replica_at[:, 0], None]

    def end(self, run: ModuleExchange) -> None:
        self._inverse = 1.0 / run.temperatures_at(0)
        states = [run.ensemble.tensors_of(int(k)) for k in run.state.replica_at[:, 0]]
        self._start = [
            {part: {n: t.clone() for n, t in tensors.items()} for part, tensors in state.items()}
            for state in states
        ]


def nearest(wanted: Tensor, there: Tensor) -> list[int]:
    """For each inverse temperature the place of the nearest one that is there, in ratio."""
    tiny = 1e-3 * float(there[there > 0].min())
    distance = ((wanted[:, None] + tiny).log() - (there + tiny).log()).abs()
    return [int(k) for k in distance.argmin(1)]


class _Tuning:
    def __init__(
        self,
        trials: _Trials,
        lr: float,
        cold: float,
        hot: float | None,
        most_rungs: int,
        n_steps: int | None,
        n_runs: int,
        *,
        show: bool,
    ) -> None:
        self.trials, self.lr, self.cold, self.most = trials, lr, cold, most_rungs
        self.likelihood = trials.rules.get("tempering") == "likelihood"
        self.searches = hot is None and not isinstance(trials, _NetworkTrials)
        self.hot = FIRST_HOT * cold if hot is None else hot
        if hot is None and isinstance(trials, _NetworkTrials):
            self.hot = 10.0 * cold
        known = trials.prior_variance is not None and math.isfinite(trials.prior_variance)
        if hot is None and self.likelihood and trials.has_proper_prior and known:
            self.hot, self.searches = math.inf, False
        self.n_steps, self.n_runs, self.show = n_steps, n_runs, show
        self.length = FIRST_STEPS if n_steps is None else max(SHORTEST, n_steps // 200)
        self.examples, self.rounds = 0.0, list[Round]()

    def ladder(self, temperatures: Sequence[float]) -> Ladder:
        known = self.trials.prior_variance
        if self.likelihood and known is not None:
            return Ladder.for_likelihood(temperatures, self.lr, prior_variance=known)
        return Ladder(temperatures, self.lr)

    def tuned(self) -> Tuned:
        lengths, mixes = self.first_round()
        if mixes:
            words = f"rung 0 mixes by itself in {self.length:,} steps: one rung is enough"
            return self.result(lengths, None, words)
        sizes, intervals = self.choices()
        setting = lengths.best(self.most, sizes, intervals)
        for _ in range(MOST_ROUNDS):
            self.length = min(2 * self.length, max(SHORTEST, self.steps_left(lengths, setting)))
            ladder = self.ladder(lengths.temperatures(setting))
            rules = {"swap_batch": setting.swap_batch, "swap_interval": setting.swap_interval}
            seen = self.round(ladder, rules, setting, lengths)
            lengths = self.lengths_of(ladder, seen, setting.swap_batch, lengths)
            better = lengths.best(self.most, sizes, intervals)
            gain = lengths.examples_a_visit(setting) / lengths.examples_a_visit(better)
            steps = lengths.together(setting.swap_batch)
            even = float(steps.max()) < 1.5 * float(steps.mean())
            setting = setting if gain < GAIN else better
            if (gain < GAIN and even) or self.steps_left(lengths, setting) < self.length:
                break
        return self.result(lengths, setting, self.verdict(lengths, setting))

    # Rounds

    def first_round(self) -> tuple[Lengths, bool]:
        """Without swaps, so that a rung is a replica: how far the energies are apart, how noisy,
        how long a replica takes to forget; and whether rung 0 needs no exchange at all.
        """
        trials = self.trials
        while True:
            hot = self.hot if math.isfinite(self.hot) else self.cold * (trials.n_data or 1)
            n = min(FIRST_RUNGS, self.most)
            if math.isfinite(self.hot):
                ladder = self.ladder(Ladder.geometric(self.cold, hot, n, lrs=1.0).temperatures)
            else:
                inner = Ladder.geometric(self.cold, hot, max(2, n - 1), lrs=1.0).temperatures
                ladder = self.ladder([*inner, math.inf])
            if self.searches and isinstance(trials, _DensityTrials):
                trials.spread(hot, self.lr, self.length // 2)
                self.examples += FIRST_RUNGS * trials.n_runs * trials.batch * (self.length // 2)
            setting = Setting(ladder.n_rungs, None, 1)
            seen = self.round(ladder, {"pairing": NoSwaps()}, setting, None)
            mixed = [disagreement(seen.path[:, k]) < MIXED for k in range(ladder.n_rungs)]
            lengths = self.lengths_of(ladder, seen, None, None)
            if not self.searches:
                return lengths, False
            # The coldest rung from which on all mix by themselves.
            first = len(mixed) - [*mixed[::-1], False].index(False)
            if first < len(mixed):
                first = max(1, first) if not all(mixed) else 0
                if first:
                    self.hot = ladder.temperatures[first]
                    lengths = up_to(lengths, first, self.relaxation_of(seen, first))
                return lengths, first == 0
            longer = min(2 * self.length, self.steps_left_for_search())
            hotter = self.hot * HOTTER
            if longer < SHORTEST or hotter > HOTTEST * self.cold or len(self.rounds) == MOST_ROUNDS:
                logger.warning(
                    "independent runs do not agree at temperature %g within %s steps; the ladder "
                    "ends there. Give hot=..., more n_steps, or a larger lr",
                    self.hot,
                    f"{self.length:,}",
                )
                return lengths, False
            self.hot, self.length = hotter, longer

    def round(
        self, ladder: Ladder, rules: dict[str, Any], setting: Setting, before: Lengths | None
    ) -> _Seen:
        seen = self.trials.measure(ladder, rules, self.length)
        lengths = self.lengths_of(ladder, seen, setting.swap_batch, before)
        batch, runs = self.trials.batch, self.trials.n_runs
        per_step = lengths.examples_a_step(setting)
        self.examples += self.length * runs * ladder.n_rungs * per_step
        rate = seen.accepted.double() / seen.proposed
        self.rounds.append(
            Round(
                setting, ladder.temperatures[-1], self.length, lengths.barrier(setting.swap_batch),
                float(rate.min()), float(rate.mean()), seen.trips, per_step / batch - 1.0,
            )
        )  # fmt: skip
        if self.show:
            print(f"tuning, round {len(self.rounds)}: {self.rounds[-1]}", file=sys.stderr)
        return seen

    def lengths_of(
        self, ladder: Ladder, seen: _Seen, swap_batch: int | None, before: Lengths | None
    ) -> Lengths:
        trials = self.trials
        inverse = 1.0 / torch.tensor(ladder.temperatures, dtype=torch.float64)
        gap = -inverse.diff()
        # Mean energies rise with the temperature; where noise hides it, they are made to.
        rising, falling = seen.energy.cummax(0).values, seen.energy.flip(0).cummin(0).values.flip(0)
        heat = (2.0 * gap * (0.5 * (rising + falling)).diff()).clamp(min=0.0).sqrt()
        variance, n_data = seen.variance, trials.n_data
        if n_data is not None:
            finite = swap_batch is not None or trials.finite_population
            n = swap_batch or trials.batch
            per_energy = n_data**2 * (1.0 / n - (1.0 / n_data if finite else 0.0))
            if per_energy > 0:
                variance = variance / per_energy
            elif before is not None:  # all data have no noise, and show none
                middle = (inverse[:-1] * inverse[1:]).sqrt()
                old = (before.inverse[:-1] * before.inverse[1:]).sqrt()
                variance = before.variance[nearest(middle + 1e-12, old + 1e-12)]
        return Lengths(
            inverse,
            heat,
            variance,
            self.relaxation_of(seen, -1) if before is None else before.relaxation,
            trials.batch,
            n_data,
            trials.finite_population,
            one_pair_at_a_time=n_data is not None and trials.shares_minibatch and trials.dim < 3,
        )

    def relaxation_of(self, seen: _Seen, rung: int) -> float:
        """Steps until the slowest coordinate of that rung is forgotten."""
        path = seen.path[:, rung].movedim(0, 1)  # (runs, rows, coordinates)
        error, variance = mean_error(path), path.flatten(0, 1).var(0)
        rows = error.square() * path.shape[0] * path.shape[1] / variance.clamp(min=1e-300)
        longest = float(rows.nan_to_num(nan=1.0).max())
        return max(1.0, min(longest, float(path.shape[1])) * max(1, self.length // ROWS))

    # Choices

    def choices(self) -> tuple[list[int | None], Sequence[int]]:
        """Swap batches and intervals to choose from."""
        trials = self.trials
        sizes: list[int | None] = [None]
        if not trials.can_have_swap_batches or trials.n_data is None:
            return sizes, (1,)
        # On the step's own batch replicas must share it, and move by the same rates.
        if not trials.shares_minibatch or self.likelihood:
            sizes = []
        size = 2 * trials.batch
        while size < trials.n_data:
            sizes.append(size)
            size *= 2
        return [*sizes, trials.n_data], INTERVALS

    def steps_left_for_search(self) -> int:
        """Of a first round, until looking for the hot end has cost half of what tuning may, if the
        run has as many rungs and no swap batches.
        """
        if self.n_steps is None:
            return sys.maxsize
        per_step = FIRST_RUNGS * self.trials.batch
        left = 0.5 * SHARE * self.n_steps * self.n_runs * per_step - self.examples
        return int(left / (1.5 * self.trials.n_runs * per_step))

    def steps_left(self, lengths: Lengths, setting: Setting) -> int:
        """Of rounds with this setting, until tuning has cost a tenth of the run."""
        if self.n_steps is None:
            return sys.maxsize
        per_step = setting.n_rungs * lengths.examples_a_step(setting)
        left = SHARE * self.n_steps * self.n_runs * per_step - self.examples
        return int(left / (self.trials.n_runs * per_step))

    def verdict(self, lengths: Lengths, setting: Setting) -> str:
        """Why exchange is not worth it, or nothing."""
        needed = math.ceil(lengths.barrier(setting.swap_batch) / LONGEST_STEP) + 1
        if needed > self.most:
            return (
                f"{needed:,} rungs for a factor of {self.hot / self.cold:.3g} in temperature: d is "
                f"{self.trials.dim:,}; use independent replicas, or a lower hot"
            )
        if self.n_steps is None:
            return ""
        visit = lengths.examples_a_visit(setting)
        run = self.n_steps * setting.n_rungs * lengths.examples_a_step(setting)
        if visit <= run:
            return ""
        return (
            f"a replica needs about {visit / run:.3g} times the {self.n_steps:,} steps of the run "
            "from the hot end to rung 0: use more steps, or independent replicas"
        )

    def result(self, lengths: Lengths, setting: Setting | None, advice: str) -> Tuned:
        if advice:
            logger.warning("%s", advice)
        rules = dict(self.trials.rules)
        if setting is None:
            one = (
                self.ladder((self.cold,)) if not self.likelihood else Ladder((self.cold,), self.lr)
            )
            return Tuned(one, rules, tuple(self.rounds), self.examples, advice=advice)
        if setting.swap_batch is not None:
            rules["swap_batch"] = setting.swap_batch
        rules["swap_interval"] = setting.swap_interval
        return Tuned(
            self.ladder(lengths.temperatures(setting)), rules, tuple(self.rounds), self.examples,
            lengths.examples_a_visit(setting), lengths.examples_a_step(setting), advice,
        )  # fmt: skip


def up_to(lengths: Lengths, rung: int, relaxation: float) -> Lengths:
    """The part below and with that rung."""
    return replace(
        lengths,
        inverse=lengths.inverse[: rung + 1],
        heat=lengths.heat[:rung],
        variance=lengths.variance[:rung],
        relaxation=relaxation,
    )


def disagreement(path: Tensor) -> float:
    """R-hat of the worst coordinate, of half runs (rows, runs, coordinates)."""
    n = len(path) // 2
    halves = torch.cat([path[:n], path[-n:]], 1)
    within, between = halves.var(0).mean(0), halves.mean(0).var(0)
    return float((1.0 + between / within.clamp(min=1e-300)).sqrt().max())
