"""`tune`: a ladder, a swap batch and an interval that bring most new visits to rung 0 per example.

Short rounds, each longer than the last, measure heat and noise between neighbouring temperatures.
The heat comes from the swaps of a round. A pair with few swaps, and the first round, which has
none, have h^2 = 2 gap (mean energy hot - cold) instead. Runs of one rung at the hot end measure the
relaxation there. `model.py` then says what a new visit costs.

The step's own minibatch is no choice where there are swap batches: a move that shares the noise of
many swaps makes rung 0 too wide (1.5 times its variance on logistic regression with 60 rungs,
benchmarks/README.md).
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrex.density.tensor_ensemble import as_target
from torchrex.errors import (
    InvalidArgumentError,
    NonFiniteEnergyError,
    known_arguments,
    require_whole,
)
from torchrex.exchange import Ladder, NoSwaps, RuleOptions, resolve_device
from torchrex.posterior import mean_error
from torchrex.samplers import Sampler
from torchrex.targets import Target
from torchrex.tuning.model import Lengths, Setting, nearest
from torchrex.tuning.trials import FIRST_RUNGS, ROWS, DensityTrials, NetworkTrials, Seen, Trials

if TYPE_CHECKING:
    from torchrex.network import ModuleEnsemble

logger = logging.getLogger("torchrex")

FEWEST_RUNGS = 3  # of a run for which the hot end is looked for
ASSUMED_STEPS = 100_000  # of the run to come, if nobody says how long it will be
SHORTEST = 200  # steps of a round
SHARE = 0.09  # of the run, which tuning may cost; the last choice may be cheaper than the rounds
MOST_ROUNDS = 8
FIRST_HOT = 16.0  # times the coldest temperature, if nobody says how hot the ladder shall be
HOTTER, HOTTEST = 4.0, 1e6  # times that where independent runs do not agree
COLDER = 2.0  # by this factor at least down again from where they do
CLOSER = 0.6  # by this factor at least come runs together that were only short, if twice as long
SLOWER = 2.0  # by this factor a colder hot end may forget more slowly
MIXED = 1.1  # R-hat of runs that agree
ENOUGH = 20  # autocorrelation times that half a run needs to be long
RELAXED = 10  # relaxations in a round that measures one
FEWEST_SWAPS, FEWEST_TESTS = 0.02, 50  # share and tests of a pair whose swaps show its length
LONGEST_STEP = 2.5  # heat and noise of a pair that still swaps: 21 % of the tests
LEAST_FACTOR = 1.2  # in temperature, of a ladder that explores
STEP_WITHIN_REACH = 2.0  # where the number of rungs decides how hot the ladder is: 32 %
MOST_OVERHEAD = 2  # examples for swaps over those for moves, of a round
GAIN = 1.1  # fewer examples a visit by this factor are worth another round
SLOW = 2.0  # by this factor slower than the model says, replicas get a warning,
SURE = 3.0, 8, 16  # if it is so many standard errors, in so many tests, of so many replicas
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)


@dataclass(frozen=True)
class Round:
    """One round of tuning, as it is shown."""

    setting: Setting
    hot: float
    n_steps: int
    barrier: float  # the sum of the rejection rates; without swaps, as expected
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
    advice: str = ""  # why exchange may not be worth it; empty if it is

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
    n_runs: int | None = None,
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
    DataLoader). `lr` is that of the coldest rung. Rounds get longer until the choice no
    longer changes. They cost about a tenth of the run that is to be tuned at most, which
    has `n_steps` steps (100,000 if you do not say) and `n_runs` runs (8; 1 of a network). The first
    ones have 200 steps, also if that is more.

    Without `hot` and `tempering`, data with a prior that is a distribution get a ladder of
    likelihoods up to the prior (`tempering="likelihood"`). Other ladders end where independent runs
    agree. That of a network is as hot as `most_rungs` rungs (8) can make it, at most ten
    times `cold`. `show` writes a line per round to stderr. `advice` of the result says if exchange
    is not worth it, and why.

    >>> tuned = tune(lambda x: -0.5 * x.square().sum(-1), dim=2, lr=0.05, hot=4.0, show=False)
    >>> tuned.ladder.temperatures[0], tuned.ladder.temperatures[-1]
    (1.0, 4.0)
    """
    from torchrex.network import ModuleEnsemble

    is_network = isinstance(target, ModuleEnsemble)
    n_steps = ASSUMED_STEPS if n_steps is None else n_steps
    n_runs = (1 if is_network else 8) if n_runs is None else n_runs
    for name, number in (("cold", cold), ("lr", lr)):
        if not (isinstance(number, int | float) and number > 0 and math.isfinite(number)):
            raise InvalidArgumentError(f"{name} must be a positive, finite number, got {number!r}")
    if hot is not None and not hot > cold:
        raise InvalidArgumentError(f"hot must be above cold, got cold={cold:g} and hot={hot:g}")
    for name in ("swap_batch", "swap_interval", "pairing"):
        if name in rules:
            raise InvalidArgumentError(f"tune chooses {name}; leave it out")
    for name, count, least in (("n_steps", n_steps, 1), ("n_runs", n_runs, 1), ("seed", seed, 0)):
        require_whole(name, count, least)
    if most_rungs is not None:
        require_whole("most_rungs", most_rungs, 2)
    trials: Trials
    if isinstance(target, ModuleEnsemble):
        if data is None:
            raise InvalidArgumentError("a network needs its data: tune(ensemble, loader, lr=...)")
        trials = NetworkTrials(target, data, seed, dict(rules))
        most = most_rungs or (16 if hot is not None else 8)
    else:
        trials = DensityTrials(
            as_target(target, dim), sampler, min(8, max(2, n_runs)), initial, seed, dict(rules),
            resolve_device(device), dtype,
        )  # fmt: skip
        most = most_rungs or 64
    if hot == math.inf and not (rules.get("tempering") == "likelihood" and trials.has_proper_prior):
        raise InvalidArgumentError(
            'an infinite temperature needs tempering="likelihood" and a prior that is a '
            f"distribution, got hot=inf for {target!r}; give a finite one, or none"
        )
    restores = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
    position = data.state_dict() if restores else None
    tuning = _Tuning(trials, lr, cold, hot, most, n_steps, n_runs, show=show)
    try:
        return tuning.tuned()
    except NonFiniteEnergyError as error:
        what = f"tune was trying temperatures from {cold:g} to {tuning.hot:g}"
        error.args = (f"{error} {what}: give hot=..., or a lower lr.",)
        raise
    finally:
        if restores:  # the run to come begins with the batches with which it would have begun
            data.load_state_dict(position)


class _Tuning:
    def __init__(
        self,
        trials: Trials,
        lr: float,
        cold: float,
        hot: float | None,
        most_rungs: int,
        n_steps: int,
        n_runs: int,
        *,
        show: bool,
    ) -> None:
        self.trials, self.lr, self.cold, self.most = trials, lr, cold, most_rungs
        is_network = isinstance(trials, NetworkTrials)
        known = trials.prior_variance is not None and math.isfinite(trials.prior_variance)
        to_prior = hot is None and known and trials.has_proper_prior
        # A ladder to the prior needs no search, and its hot rungs take larger steps. At another
        # coldest temperature than 1 rung 0 would have another law.
        self.chooses_prior = (
            to_prior and not is_network and cold == 1.0 and "tempering" not in trials.rules
        )
        if self.chooses_prior:
            trials.rules["tempering"] = "likelihood"
        self.likelihood = trials.rules.get("tempering") == "likelihood"
        self.searches = hot is None and not is_network and not (to_prior and self.likelihood)
        self.takes_what_is_in_reach = hot is None and is_network
        self.hot = (10.0 if is_network else FIRST_HOT) * cold if hot is None else hot
        if to_prior and self.likelihood:
            self.hot = math.inf
        self.n_steps, self.n_runs, self.show = n_steps, n_runs, show
        self.length = max(SHORTEST, n_steps // 100)
        self.examples, self.rounds = 0.0, list[Round]()
        self.hottest = copy.copy(trials)  # runs of one rung, which go on by themselves
        self.relaxation = 1.0  # steps at the hot end until a replica has forgotten where it was
        self.steps_alone = 0  # of the latest of these runs
        self.can_tell = False  # were they long enough to tell whether they agree?

    def ladder(self, temperatures: Sequence[float]) -> Ladder:
        known = self.trials.prior_variance
        if self.likelihood and known is not None:
            return Ladder.for_likelihood(temperatures, self.lr, prior_variance=known)
        return Ladder(temperatures, self.lr)

    def tuned(self) -> Tuned:
        if self.search() if self.searches else self.chooses_prior and self.agrees():
            words = (
                f"{self.trials.n_runs} runs of {self.steps_alone:,} steps agree at temperature "
                f"{self.cold:g}: one rung is enough, unless there is a mode that none of them found"
            )
            return self.result(None, None, words)
        sizes, intervals = self.choices()
        lengths = self.within_reach(self.first_round(), sizes)
        setting, slowness = lengths.best(self.most, sizes, intervals), 1.0
        for _ in range(MOST_ROUNDS):
            self.length = min(2 * self.length, max(SHORTEST, self.steps_left(lengths, setting)))
            if not self.searches and self.relaxation * RELAXED > self.length // 2:
                self.alone(self.hot, self.length)
            ladder = self.ladder(lengths.temperatures(setting))
            tested = self.affordable(setting)
            rules = {"swap_batch": tested.swap_batch, "swap_interval": tested.swap_interval}
            seen = self.round(ladder, rules, tested, lengths)
            lengths = self.lengths_of(ladder, seen, setting.swap_batch, lengths)
            slowness = self.slowness_of(seen, tested, lengths)
            lengths = self.within_reach(lengths, sizes)
            better = lengths.best(self.most, sizes, intervals)
            gain = lengths.examples_a_visit(setting) / lengths.examples_a_visit(better)
            steps = lengths.together(setting.swap_batch)
            even = float(steps.max()) < 1.5 * float(steps.mean())
            setting = better
            if (gain < GAIN and even) or self.steps_left(lengths, setting) < self.length:
                break
        lengths = replace(lengths, slowness=slowness)
        return self.result(lengths, setting, self.verdict(lengths, setting))

    # Rounds

    def search(self) -> bool:
        """Find a hot end: independent runs agree there, and forget about as fast as at hotter ones.
        The search gets hotter until they do, and then bisects, in ratios. Do they agree at `cold`?
        """
        trials, length, tried = self.trials, self.length, list[tuple[float, float]]()
        assert isinstance(trials, DensityTrials)
        from_start = copy.copy(trials)

        def agree(temperature: float) -> bool | None:
            """None where the runs that tuning may cost are too short to tell."""
            nonlocal length
            apart = math.inf
            while (length := min(length, self.steps_left_for_search())) >= SHORTEST or not tried:
                before, rhat = apart, self.alone(temperature, max(length, SHORTEST))
                tried.append((rhat, temperature))
                apart = rhat**2 - 1.0  # of runs that are only short it falls as 1 / length
                if rhat <= MIXED or self.can_tell or apart > CLOSER * before:
                    return rhat <= MIXED
                length *= 2
            return None

        failed = self.cold
        while not (agreed := agree(self.hot)):
            failed, self.hot = self.hot, self.hot * HOTTER
            if agreed is None or self.hot > HOTTEST * self.cold:
                least, self.hot = min(tried)
                prior = 'tempering="likelihood", ' if trials.has_proper_prior else ""
                up_to = max(temperature for _, temperature in tried)
                why = f"independent runs agree at no temperature up to {up_to:.3g}"
                if agreed is None:
                    why = f"runs of {self.steps_alone:,} steps are too short to tell if they agree"
                logger.warning(
                    "%s; the ladder ends at %.3g, where they differ least (R-hat %.3g). Give "
                    "hot=..., %smore n_steps, or a larger lr",
                    why, self.hot, least, prior,
                )  # fmt: skip
                return False
        trials.start_from(cast("DensityTrials", self.hottest))
        relaxation = self.relaxation
        while self.hot * HOTTER <= HOTTEST * self.cold and agree(self.hot * HOTTER):
            if self.relaxation * SLOWER > relaxation:
                break
            failed, self.hot, relaxation = self.hot, self.hot * HOTTER, self.relaxation
        slow, hottest = SLOWER * relaxation, (self.hot, relaxation)
        while self.hot > self.cold:
            colder = math.sqrt(failed * self.hot)
            if colder < COLDER * failed:
                if failed > self.cold:
                    break
                colder = self.cold
            if agree(colder) and self.relaxation < slow:
                self.hot, relaxation, path = colder, self.relaxation, self.path
            elif colder == self.cold or length < SHORTEST:
                break
            else:
                failed = colder
        self.relaxation = relaxation
        if self.hot > self.cold:
            return False
        # Runs that came from the hot end agree. Do those that begin where they should?
        seen = from_start.measure(Ladder((self.cold,), self.lr), {}, self.steps_alone)
        self.examples += self.steps_alone * trials.n_runs * trials.batch
        if disagreement(torch.cat([path, seen.path[:, 0]], 1)) <= MIXED:
            return True
        self.hot, self.relaxation = hottest
        return False

    def agrees(self) -> bool:
        """Do runs agree at `cold`? Only runs that start apart can tell."""
        length = self.length
        if not self.trials.starts_apart:
            return False
        while self.alone(self.cold, length) > MIXED:
            length *= 2
            if length > self.steps_left_for_search():
                return False
        return True

    def alone(self, temperature: float, length: int) -> float:
        """Runs of one rung at this temperature: how they disagree, and their relaxation."""
        hot = self.ladder((self.cold, temperature)) if temperature > self.cold else None
        lr = self.lr if hot is None else hot.lrs[-1]
        seen = self.hottest.measure(Ladder((temperature,), lr), {}, length)
        self.steps_alone = length
        self.examples += length * self.hottest.n_runs * self.trials.batch
        self.path = seen.path[:, 0]
        path = self.path.movedim(0, 1)  # (runs, rows, coordinates)
        apart, n = max(1, length // ROWS), path.shape[1] // 2
        longest = min(slowest(path), float(path.shape[1]))
        self.relaxation = max(1.0, longest * apart)
        halves = torch.cat([path[:, :n], path[:, -n:]])
        self.can_tell = n > ENOUGH * slowest(halves - halves.mean(1, keepdim=True))
        return disagreement(self.path)

    def first_round(self) -> Lengths:
        """Without swaps, so that a rung is a replica: how far the energies are apart, how noisy."""
        n = min(FIRST_RUNGS, self.most)
        if math.isfinite(self.hot):
            temperatures = Ladder.geometric(self.cold, self.hot, n, lrs=1.0).temperatures
        else:
            warmest = self.cold * max(2, self.trials.n_data or 1)
            inner = Ladder.geometric(self.cold, warmest, max(2, n - 1), lrs=1.0).temperatures
            temperatures = (*inner, math.inf)
        ladder = self.ladder(temperatures)
        if not self.searches:
            self.alone(self.hot, self.length)
        seen = self.round(ladder, {"pairing": NoSwaps()}, Setting(ladder.n_rungs, None, 1), None)
        return self.lengths_of(ladder, seen, None, None)

    def round(
        self, ladder: Ladder, rules: dict[str, Any], setting: Setting, before: Lengths | None
    ) -> Seen:
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
        self, ladder: Ladder, seen: Seen, swap_batch: int | None, before: Lengths | None
    ) -> Lengths:
        trials = self.trials
        inverse = 1.0 / torch.tensor(ladder.temperatures, dtype=torch.float64)
        gap = -inverse.diff()
        # Mean energies rise with the temperature; where noise hides it, they are made to.
        rising, falling = seen.energy.cummax(0).values, seen.energy.flip(0).cummin(0).values.flip(0)
        heat = (2.0 * gap * (0.5 * (rising + falling)).diff()).clamp(min=0.0).sqrt()
        swapped = seen.accepted.double() / seen.proposed
        length = -2.0 * torch.special.ndtri(0.5 * swapped.clamp(max=1.0))
        from_swaps = (length.square() - gap.square() * seen.variance).clamp(min=0.0).sqrt()
        shown = (swapped > FEWEST_SWAPS) & (seen.proposed >= FEWEST_TESTS)
        heat = torch.where(shown, from_swaps, heat)
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
            self.relaxation,
            trials.batch,
            n_data,
            trials.finite_population,
            one_pair_at_a_time=n_data is not None and trials.shares_minibatch and trials.dim < 3,
        )

    # Choices

    def choices(self) -> tuple[list[int | None], Sequence[int]]:
        """Swap batches and intervals to choose from."""
        trials = self.trials
        if not trials.can_have_swap_batches or trials.n_data is None:
            return [None], (1,)
        sizes: list[int | None] = []
        size = trials.batch
        while size < trials.n_data:
            sizes.append(size)
            size *= 2
        return [*sizes, trials.n_data], INTERVALS

    def within_reach(self, lengths: Lengths, sizes: Sequence[int | None]) -> Lengths:
        """For a network without a hot end: what the rungs can span, with the largest swap batch."""
        if self.takes_what_is_in_reach:
            lengths = lengths.up_to(STEP_WITHIN_REACH * (self.most - 1), sizes[-1])
            self.hot = 1.0 / float(lengths.inverse[-1])
        return lengths

    def steps_left_for_search(self) -> int:
        """Of runs of one rung, until looking for the hot end has cost half of what tuning may, if
        the run has FEWEST_RUNGS rungs and no swap batches.
        """
        per_step = self.trials.batch
        left = 0.5 * SHARE * self.n_steps * self.n_runs * FEWEST_RUNGS * per_step - self.examples
        return int(left / (self.trials.n_runs * per_step))

    def affordable(self, setting: Setting) -> Setting:
        """With tests so rare that they cost twice the moves at most: enough to measure swaps."""
        least = (setting.swap_batch or 0) / (MOST_OVERHEAD * self.trials.batch)
        intervals = [each for each in INTERVALS if each >= max(least, setting.swap_interval)]
        return setting._replace(swap_interval=intervals[0] if intervals else INTERVALS[-1])

    def steps_left(self, lengths: Lengths, setting: Setting) -> int:
        """Of a round with this setting, until tuning has cost a tenth of the run."""
        setting = self.affordable(setting)
        per_step = setting.n_rungs * lengths.examples_a_step(setting)
        left = SHARE * self.n_steps * self.n_runs * per_step - self.examples
        return int(left / (self.trials.n_runs * (per_step + self.trials.batch)))

    def verdict(self, lengths: Lengths, setting: Setting) -> str:
        """Why exchange is not worth it, or nothing."""
        if self.hot < LEAST_FACTOR * self.cold and self.takes_what_is_in_reach:
            return (
                f"{self.most:,} rungs reach a factor of {self.hot / self.cold:.4g} in temperature: "
                f"d is {self.trials.dim:,}; use independent replicas, or more rungs"
            )
        needed = math.ceil(lengths.total(setting.swap_batch) / LONGEST_STEP) + 1
        if needed > self.most and not self.takes_what_is_in_reach:
            return (
                f"{needed:,} rungs for a factor of {self.hot / self.cold:.3g} in temperature: d is "
                f"{self.trials.dim:,}; use independent replicas, or a lower hot"
            )
        visit = lengths.examples_a_visit(setting)
        run = self.n_steps * setting.n_rungs * lengths.examples_a_step(setting)
        if visit > run:
            return (
                f"a replica needs about {visit / run:.3g} times the {self.n_steps:,} steps of the "
                "run from the hot end to rung 0: use more steps, or independent replicas"
            )
        if lengths.slowness > 1.0:
            return (
                f"replicas move along the ladder {lengths.slowness:.2g} times more slowly than "
                "their acceptance lets expect: most swaps are undone, and a longer run may be "
                "slower still; compare with independent replicas"
            )
        return ""

    def slowness_of(self, seen: Seen, tested: Setting, lengths: Lengths) -> float:
        """How much more slowly replicas moved than the model says; 1 if they did not, or if the
        round cannot tell. The model does not know of energies that on cold rungs change more slowly
        than at the hot end.
        """
        errors, tests, replicas = SURE
        lag, kept, error = seen.memory
        expected = lengths.memory(tested, lag)
        if (
            lag < tests * tested.swap_interval
            or tested.n_rungs * self.trials.n_runs < replicas
            or kept - errors * error < expected ** (1.0 / SLOW)
        ):
            return 1.0
        return math.log(expected) / math.log(min(kept, 1.0 - 1e-6))  # none may have moved

    def result(self, lengths: Lengths | None, setting: Setting | None, advice: str) -> Tuned:
        if advice:
            logger.warning("%s", advice)
        rules = dict(self.trials.rules)
        if setting is None or lengths is None:
            one = (
                self.ladder((self.cold,)) if not self.likelihood else Ladder((self.cold,), self.lr)
            )
            return Tuned(one, rules, tuple(self.rounds), self.examples, advice=advice)
        if setting.swap_batch is not None:
            rules["swap_batch"] = setting.swap_batch
        rules["swap_interval"] = setting.swap_interval
        return Tuned(
            self.ladder(lengths.temperatures(setting)), rules, tuple(self.rounds), self.examples,
            lengths.examples_a_visit(setting), lengths.examples_a_step(setting),
            advice,
        )  # fmt: skip


def slowest(path: Tensor) -> float:
    """Autocorrelation time of the slowest coordinate of runs (runs, rows, coordinates), in rows."""
    error, variance = mean_error(path), path.flatten(0, 1).var(0)
    rows = error.square() * path.shape[0] * path.shape[1] / variance.clamp(min=1e-300)
    return float(rows.nan_to_num(nan=1.0).max())


def disagreement(path: Tensor) -> float:
    """R-hat of the worst coordinate, of half runs (rows, runs, coordinates)."""
    n = len(path) // 2
    halves = torch.cat([path[:n], path[-n:]], 1)
    within, between = halves.var(0).mean(0), halves.mean(0).var(0)
    return float((1.0 + between / within.clamp(min=1e-300)).sqrt().max())
