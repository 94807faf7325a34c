"""Algorithm 1 of Deng et al. (2020). A step here is: energies, SA step, swaps, move.

A gradient does not depend on the temperature, so the energies that come with the gradients at the
current positions serve the swap test too, and a step needs one evaluation. With a swap batch the
test has energies of its own: `swap` goes before the step, which then tests nothing. A swap
exchanges rungs and moves no weights.

Everything here is a pure function of tensors, random numbers included. It does not know the kind of
ensemble, nor whether it runs eagerly or compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from torchrex.exchange.assignment import Assignment, Selects
from torchrex.exchange.correction import ConstantFactor, FactorRule
from torchrex.exchange.criterion import acceptance_probability, log_swap_ratio
from torchrex.exchange.ladder import Ladder
from torchrex.exchange.momentum import MomentumPolicy
from torchrex.exchange.noise import (
    BatchVariance,
    KnownVariance,
    NoiseEstimator,
    PerExample,
    RepeatedDraws,
    SwapBatchVariance,
)
from torchrex.exchange.pairing import EvenOdd, NoSwaps, Pairing
from torchrex.targets import Energy, Noise

Tempering = Literal["posterior", "likelihood"]


@dataclass(frozen=True)
class Rules:
    """All choices of the algorithm that are not state."""

    ladder: Ladder
    noise: NoiseEstimator = field(default_factory=KnownVariance)
    factor: FactorRule = field(default_factory=ConstantFactor)
    pairing: Pairing = field(default_factory=EvenOdd)
    swap_interval: int = 1  # attempt swaps at every such step
    swap_batch: int | None = None  # compare energies on so many examples; None: the step's own
    tempering: Tempering = "posterior"  # or the likelihood alone: the prior keeps its temperature 1
    swap_start: int = 0  # and not before this one
    swap_rest: int = 0  # a pair that has swapped is not tested for so many steps
    swap_intensity: float | None = None  # r of the paper; None fixes r * lr = 1
    momentum: MomentumPolicy = "rescale"
    # How values are looked up by rung: a matter of speed, which the ensemble decides.
    assignment: Assignment = field(default=Selects, compare=False)

    @property
    def swaps(self) -> bool:
        """Can any pair swap?"""
        return self.ladder.n_pairs > 0 and not isinstance(self.pairing, NoSwaps)

    def swaps_with_own_batch(self, step: int) -> bool:
        """Does a swap batch come before this step?"""
        due = step % self.swap_interval == 0 and step >= self.swap_start
        return self.swaps and self.swap_batch is not None and due


class ExchangeState(NamedTuple):
    """What the next step needs besides the ensemble."""

    replica_at: Tensor  # (rungs, runs): the only thing a swap changes
    noise_variance: Tensor  # (pairs, runs): sigma2, or the variance of one example's term
    noise_updates: Tensor  # (pairs, runs): SA steps taken so far
    correction_factor: Tensor  # (..., pairs, runs): memory of the rule for F
    resting: Tensor  # (pairs, runs): for how many steps more the pair is not tested

    @property
    def rung_of(self) -> Tensor:
        """(replicas, runs): the rung of each replica, the inverse of replica_at."""
        return Selects.invert(self.replica_at)

    @staticmethod
    def start(
        rules: Rules, n_runs: int, *, device: torch.device, dtype: torch.dtype
    ) -> ExchangeState:
        """Replica k is at rung k."""
        n_rungs, n_pairs = rules.ladder.n_rungs, rules.ladder.n_pairs
        rungs = torch.arange(n_rungs, device=device, dtype=rules.assignment.dtype)
        per_pair = torch.ones(n_pairs, n_runs, device=device, dtype=dtype)
        return ExchangeState(
            replica_at=rungs[:, None].repeat(1, n_runs),
            noise_variance=per_pair * rules.noise.initial,
            noise_updates=torch.zeros_like(per_pair),
            correction_factor=rules.factor.start(per_pair),
            resting=torch.zeros_like(per_pair),
        )


class StepInputs(NamedTuple):
    """All that one step takes from outside: the schedules' values and every random number."""

    temperature: Tensor  # (rungs,)
    lr: Tensor  # (rungs,)
    move_temperature: Tensor  # (rungs,): of the move's noise, the same unless the ladder differs
    first_gap: Tensor  # (pairs,): inverse gaps at step 0
    proposed: Tensor  # (rounds, pairs, runs or 1): which pairs are tested
    uniform: Tensor  # (rounds, pairs, runs)
    step: Tensor  # (): how many steps came before, int64
    target_noise: tuple[Noise, ...]  # one evaluation a round, the first with gradients
    move_noise: Noise


class StepInfo(NamedTuple):
    """What a person may want to know of one step."""

    position: Tensor  # (runs, dim): rung 0 after the move; empty for modules
    # (rungs, runs): what the swaps of the first round compare, before them; of a likelihood that is
    # tempered alone without the prior
    energy: Tensor
    accepted: Tensor  # (pairs, runs): swaps made
    proposed: Tensor  # (pairs, runs or 1)
    noise_variance: Tensor  # (pairs, runs): sigma2
    correction: Tensor  # (pairs, runs): gap * sigma2 / F, what the energy difference had to exceed
    replica_at: Tensor  # (rungs, runs): after the swaps


class Exchanged(NamedTuple):
    """What the ensemble has to do after the swaps of one step; all of shape (replicas, runs)."""

    swapped: Tensor  # has the replica changed rungs?
    scale_before: Tensor  # sqrt(lr * temperature) of the rung before,
    scale_after: Tensor  # and of the rung now
    lr: Tensor  # of the rung now
    temperature: Tensor
    # If the likelihood alone is tempered: its power 1 / T at the rung now. The move is then one of
    # temperature 1 along the gradient of power * likelihood + prior.
    power: Tensor | None = None
    rung: Tensor | None = None  # now, where somebody counts by rungs


class Ensemble(Protocol):
    """Replicas that can be evaluated and moved; the verbs return the ensemble to go on with."""

    @property
    def n_data(self) -> int | None: ...
    # Is no example twice in a minibatch (in a swap batch), and nothing else random?
    @property
    def finite_population(self) -> bool: ...
    @property
    def finite_swap_population(self) -> bool: ...
    def evaluate(self, noise: Noise) -> tuple[Energy, Tensor]: ...
    def energies(self, noise: Noise) -> Energy: ...
    def draw_of(self, replica: Tensor) -> Tensor: ...
    def after_swap(self, noise: Noise, exchanged: Exchanged, *, policy: MomentumPolicy) -> Self: ...
    def move(
        self,
        gradient: Tensor,
        noise: Noise,
        exchanged: Exchanged,
        *,
        policy: MomentumPolicy,
        step: Tensor,
    ) -> Self: ...


E = TypeVar("E", bound=Ensemble)
Exchange = Callable[..., tuple[ExchangeState, Exchanged, StepInfo]]


def step(
    ensemble: E,
    state: ExchangeState,
    inputs: StepInputs,
    rules: Rules,
    *,
    exchange: Exchange | None = None,
) -> tuple[E, ExchangeState, StepInfo]:
    """One step of Algorithm 1 for every run. `exchange` may be a compiled `exchange_rungs`."""
    exchange = exchange_rungs if exchange is None else exchange
    energy, gradient = ensemble.evaluate(inputs.target_noise[0])
    tests = rules.ladder.n_pairs > 0 and rules.swap_batch is None
    # Fresh energies for a later round: a noisy energy is used in one test only.
    later = [ensemble.energies(noise) for noise in inputs.target_noise[1:]]
    state, exchanged, info = exchange(
        state,
        energy,
        [energy, *later] if tests else [],
        inputs,
        rules,
        ensemble.n_data,
        ensemble.finite_population,
    )
    policy = rules.momentum if tests else "keep"
    ensemble = ensemble.move(
        gradient, inputs.move_noise, exchanged, policy=policy, step=inputs.step
    )
    return ensemble, state, info._replace(position=ensemble.draw_of(state.replica_at[0]))


def swap(
    ensemble: E, state: ExchangeState, energies: Sequence[Energy], inputs: StepInputs, rules: Rules
) -> tuple[E, ExchangeState, StepInfo]:
    """Test and swap by the energies of swap batches, one for each round, before a step."""
    state, exchanged, info = exchange_rungs(
        state,
        energies[0],
        energies,
        inputs,
        rules,
        ensemble.n_data,
        ensemble.finite_swap_population,
    )
    ensemble = ensemble.after_swap(inputs.move_noise, exchanged, policy=rules.momentum)
    return ensemble, state, info


def exchange_rungs(
    state: ExchangeState,
    energy: Energy,
    tested: Sequence[Energy],
    inputs: StepInputs,
    rules: Rules,
    n_data: int | None,
    finite_population: bool,
) -> tuple[ExchangeState, Exchanged, StepInfo]:
    """SA step and swaps, from the energies (replicas, runs) of every round that is `tested`; the
    first, or `energy` if there is none, goes into the information.
    """
    before, rested = state.replica_at, state.resting
    accepted = torch.zeros_like(state.noise_variance, dtype=torch.bool)
    correction, noise_variance = torch.zeros_like(state.noise_variance), state.noise_variance
    if rules.swap_batch is not None:  # of a step without a test nothing is known
        correction = torch.full_like(correction, math.nan)
    for round_, (now, proposed) in enumerate(zip(tested, inputs.proposed, strict=False)):
        state, noise = noise_of_energies(state, now, rules, n_data, finite_population)
        state, made, needed = swap_step(
            state,
            now.data_term if rules.tempering == "likelihood" else now.total,
            noise,
            proposed,
            inputs.uniform[round_],
            inputs,
            rules,
        )
        state = remember_pairs(state, now, rules, n_data)
        if round_ == 0:
            accepted, correction, noise_variance = made, needed, noise.sigma2
        else:
            accepted = accepted | made

    if rules.swap_rest:  # counted in steps, however many rounds a step has
        own = rules.swap_batch is not None and len(tested) > 0  # the step that follows counts
        less = rested if own else (rested - 1).clamp(min=0)
        resting = torch.where(accepted, float(rules.swap_rest + own), less)
        state = state._replace(resting=resting)
    take = rules.assignment.take
    lr, temperature = inputs.lr[:, None], inputs.move_temperature[:, None]
    power = 1.0 / inputs.temperature[:, None] if rules.tempering == "likelihood" else None
    if rules.ladder.n_pairs:
        invert = rules.assignment.invert
        rung_of, rung_before = invert(state.replica_at), invert(before)
        scale = (lr * temperature).sqrt()
        exchanged = Exchanged(
            swapped=rung_of != rung_before,
            scale_before=take(scale, rung_before),
            scale_after=take(scale, rung_of),
            lr=take(lr, rung_of),
            temperature=take(temperature, rung_of),
            power=None if power is None else take(power, rung_of),
        )
    else:
        exchanged = Exchanged(accepted, lr, lr, lr, temperature, power)  # nothing to swap with
    proposed = inputs.proposed.any(0) & (len(tested) > 0)
    compared = energy.data_term if rules.tempering == "likelihood" else energy.total
    info = StepInfo(
        position=energy.total[:0],
        energy=take(compared, before) if rules.ladder.n_pairs else compared,
        accepted=accepted,
        proposed=proposed & (rested <= 0) if rules.swap_rest else proposed,
        noise_variance=noise_variance,
        correction=correction,
        replica_at=state.replica_at,
    )
    return state, exchanged, info


class NoiseOfTest(NamedTuple):
    """What a swap test must know of the noise of its energies."""

    sigma2: Tensor  # (pairs, runs)
    degrees_of_freedom: float = math.inf  # of sigma2
    third_cumulant: Tensor | float = 0.0  # of the difference of the energies, cold minus hot


def noise_of_energies(
    state: ExchangeState, energy: Energy, rules: Rules, n_data: int | None, finite_population: bool
) -> tuple[ExchangeState, NoiseOfTest]:
    """The noise for the tests of these energies, after an SA step where sigma2 is a running one."""
    feed, noise = rules.noise.feed, rules.noise
    if not isinstance(feed, PerExample):
        return state, NoiseOfTest(state.noise_variance)
    assert energy.per_example is not None
    assert n_data is not None
    n = energy.per_example.shape[-1]
    scale = feed.scale(n, n_data, finite_population=finite_population)
    if scale == 0.0:  # all data, and nothing random: there is no noise
        return state, NoiseOfTest(torch.zeros_like(state.noise_variance))
    sample = variance_of_pairs(state, energy, feed, n_data, rules.assignment)
    if isinstance(noise, SwapBatchVariance):
        state = sa_step(state, scale * sample, rules)
        terms = rules.assignment.take(energy.per_example, state.replica_at)
        third = feed.third(terms, n_data)
        return state, NoiseOfTest(state.noise_variance, noise.degrees_of_freedom(n), third)
    if isinstance(noise, BatchVariance):
        variance = noise.blended(state.noise_variance, state.noise_updates, sample)
    else:
        state = sa_step(state, sample, rules)
        variance = state.noise_variance
    # Before the first sample the estimator has its initial value, which is a sigma2 already.
    known = (state.noise_updates > 0) | sample.isfinite()
    sigma2 = torch.where(known, scale * variance, variance)
    return state, NoiseOfTest(sigma2, noise.degrees_of_freedom(n))


def remember_pairs(
    state: ExchangeState, energy: Energy, rules: Rules, n_data: int | None
) -> ExchangeState:
    """After the swaps: the variance of the present pairs on this minibatch, for the next tests."""
    if not isinstance(rules.noise, BatchVariance):
        return state
    assert n_data is not None
    sample = variance_of_pairs(state, energy, rules.noise.feed, n_data, rules.assignment)
    return sa_step(state, sample, rules)


def variance_of_pairs(
    state: ExchangeState, energy: Energy, feed: PerExample, n_data: int, assignment: Assignment
) -> Tensor:
    """(pairs, runs): of one example's term, for the replicas that are neighbours now."""
    assert energy.per_example is not None
    take, n = assignment.take, energy.per_example.shape[-1]
    sample = feed.sample(energy.per_example, state.replica_at, take)
    if energy.repeated is None:
        return sample
    change = take(energy.per_example - energy.repeated, state.replica_at)
    return feed.shrunk(sample, change, n / n_data)


def measure(ensemble: Ensemble, state: ExchangeState, noise: Noise, rules: Rules) -> ExchangeState:
    """SA step of the paper: the variance of repeated energy draws at the current positions."""
    feed = rules.noise.feed
    assert isinstance(feed, RepeatedDraws)
    energies = ensemble.energies(noise).total.expand(feed.n_draws, *state.replica_at.shape)
    sample = feed.sample(energies, state.replica_at, rules.assignment.take)
    return sa_step(state, sample, rules)


def sa_step(state: ExchangeState, sample: Tensor, rules: Rules) -> ExchangeState:
    """Feed one sample of the variance to the estimator (Eq. 13 or 14), unless it is not finite."""
    finite = sample.isfinite()
    m = state.noise_updates + finite
    updated = rules.noise.update(state.noise_variance, m, sample)
    return state._replace(
        noise_variance=torch.where(finite, updated, state.noise_variance), noise_updates=m
    )


def swap_step(
    state: ExchangeState,
    energy: Tensor,
    noise: NoiseOfTest,
    proposed: Tensor,
    uniform: Tensor,
    inputs: StepInputs,
    rules: Rules,
) -> tuple[ExchangeState, Tensor, Tensor]:
    """Test the proposed pairs, which are disjoint, and swap the accepted ones; also returns these
    and the corrections.
    """
    inverse_gap = (1.0 / inputs.temperature).neg().diff().unsqueeze(-1)
    energy_at = rules.assignment.take(energy, state.replica_at)
    factor = rules.factor.factor(
        state.correction_factor, inverse_gap, inputs.first_gap.unsqueeze(-1)
    )
    log_ratio = log_swap_ratio(
        energy_at[:-1],
        energy_at[1:],
        inverse_gap=inverse_gap,
        noise_variance=noise.sigma2,
        correction_factor=factor,
        degrees_of_freedom=noise.degrees_of_freedom,
        third_cumulant=noise.third_cumulant,
    )
    swap_rate = 1.0 if rules.swap_intensity is None else rules.swap_intensity * inputs.lr[:-1, None]
    probability = acceptance_probability(log_ratio, swap_rate)
    finite = energy_at.isfinite()  # a replica without a finite energy does not swap
    if rules.swap_rest:
        proposed = proposed & (state.resting <= 0)
    accepted = proposed & (uniform < probability) & finite[:-1] & finite[1:]
    learnt = rules.factor.adapt(
        state.correction_factor, log_ratio.clamp(max=0.0).exp(), proposed, accepted
    )
    state = state._replace(
        replica_at=rules.assignment.swap(state.replica_at, accepted), correction_factor=learnt
    )
    return state, accepted, inverse_gap * noise.sigma2 / factor
