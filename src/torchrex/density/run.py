"""The run of a tensor target: all randomness drawn in blocks ahead, and a loop over each block,
compiled where it pays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from torchrex.density.loop import (
    STEPS_WORTH_COMPILING,
    TERMS_OF_A_LONG_STEP,
    Block,
    CompiledLoop,
    EagerLoop,
    Loop,
    block_length,
    draw_block,
    few_threads,
    make_loop,
    swapped_steps,
)
from torchrex.density.tensor_ensemble import TensorEnsemble
from torchrex.errors import InvalidArgumentError, LadderError, NonFiniteEnergyError
from torchrex.exchange.algorithm import ExchangeState, StepInfo
from torchrex.exchange.assignment import Selects
from torchrex.exchange.ladder import Ladder
from torchrex.exchange.noise import NoiseShape
from torchrex.exchange.run import ReplicaExchange, RuleOptions, joined, require_every, require_known
from torchrex.exchange.swap_report import ExchangeReport, SwapCounts
from torchrex.rng import Streams, derive_seed
from torchrex.settings import settings_of
from torchrex.xoshiro import VERSION

# For the shape of the noise: the most runs, minibatches of each position, and energies of each
# where there are no examples.
MOST_RUNS, BATCHES, REPEATS = 64, 25, 500
# Tests between two looks at noise and trips where there are no data: a step is then so fast that
# looking at all would take as long.
TESTS_PER_LOOK = 64


class DensityExchange(ReplicaExchange):
    """Replica exchange on a tensor target, all independent runs at once.

    `compiled=None` compiles where it pays: long runs on a CPU.

    >>> from torchrex import GaussianMixture, Ladder, TensorEnsemble
    >>> mixture = GaussianMixture([0.4, 0.6], means=[-3.0, 2.0], stds=[0.7, 0.5])
    >>> ensemble = TensorEnsemble.start(mixture, n_rungs=2, n_runs=8)
    >>> run = DensityExchange(ensemble, Ladder((1.0, 10.0), 0.03), seed=0)
    >>> info = run.step()
    >>> info.position.shape
    torch.Size([8, 1])
    """

    def __init__(
        self,
        ensemble: TensorEnsemble,
        ladder: Ladder,
        *,
        seed: int = 0,
        compiled: bool | None = None,
        **rules: Unpack[RuleOptions],
    ) -> None:
        if not isinstance(ensemble, TensorEnsemble):
            raise InvalidArgumentError(
                f"DensityExchange needs TensorEnsemble.start(target, n_rungs=2), got {ensemble!r}; "
                "a ModuleEnsemble needs ModuleExchange"
            )
        require_known(rules, "DensityExchange", ("seed", "compiled"))
        super().__init__(ensemble, ladder, **rules)
        replicas, runs, _ = ensemble.position.shape
        if replicas != ladder.n_rungs:
            raise LadderError(
                f"the ladder has {ladder.n_rungs} rungs but the ensemble {replicas} replicas; "
                "make them equal"
            )
        device, dtype = ensemble.position.device, ensemble.position.dtype
        self._ensemble = ensemble
        self._state = ExchangeState.start(self.rules, runs, device=device, dtype=dtype)
        self._counts = SwapCounts.start(self._state.replica_at)
        self.streams = Streams(seed, device)
        self._compiled = compiled
        self._loop: Loop | None = None
        self._compiling_tried = False
        self._block_length = block_length(self.rules, ensemble)
        self._block: Block | None = None
        self._streams_at_block = self.streams.state_dict()

    @property
    def ensemble(self) -> TensorEnsemble:
        """The replicas now, as a copy that later steps do not touch."""
        return self._ensemble.copy()

    def step(self, batch: Any = None) -> StepInfo:
        """One step of every run."""
        info = next(self.advance(1))
        return StepInfo(*(values[0].clone() for values in info))

    def advance(
        self, n_steps: int, data: Any = None, *, every: int | None = None
    ) -> Iterator[StepInfo]:
        """Run `n_steps` steps; yields the information of up to a block of them at a time, stacked
        along a first axis.

        The next block overwrites what is yielded: copy what is to be kept. Raises
        NonFiniteEnergyError after yielding the steps before it. With `every` it yields whenever
        `run.n_steps` is a multiple of `every`, and at the end.
        """
        require_every(every)
        if n_steps < 0:
            raise InvalidArgumentError(f"n_steps must be at least 0, got {n_steps}")
        if data is not None:
            raise InvalidArgumentError(f"{self._ensemble.target!r} has its own data")
        last = self.n_steps + n_steps
        while self.n_steps < last:
            if every is None:
                yield from self.stretch(last - self.n_steps, worth=n_steps)
            else:
                stop = min(last, (self.n_steps // every + 1) * every)
                yield from self._up_to(stop, worth=n_steps)

    def _up_to(self, step: int, *, worth: int) -> Iterator[StepInfo]:
        """All steps before that one, together."""
        done: list[StepInfo] = []
        try:
            while self.n_steps < step:
                for info in self.stretch(step - self.n_steps, worth=worth):
                    only = self.n_steps == step and not done
                    done.append(info if only else StepInfo(*(values.clone() for values in info)))
        except NonFiniteEnergyError:
            if done:
                yield joined(done)
            raise
        yield joined(done)

    def stretch(self, most: int, *, worth: int = 0) -> Iterator[StepInfo]:
        """The next steps, at most so many, by the loop so far or by the one that `worth` steps are
        worth. Where stretches end has no influence on the numbers.
        """
        before = (self.n_steps, self._ensemble, self._state, self._counts)
        try:
            with few_threads(self._ensemble.position.numel()):
                block = self._current_block()
                first = self.n_steps - block.start
                if first >= block.n_usable:
                    self.rules.ladder.refuse(self.n_steps)
                loop = self._choose_loop(worth)
                n = min(most, block.n_usable - first, loop.stretch)
                self._ensemble, self._state, info = loop.run(
                    self._ensemble, self._state, block, first, n
                )
                # The sum is one cheap pass; only if it is not finite is every energy looked at.
                healthy = bool(info.energy.sum().isfinite()) or bool(info.energy.isfinite().all())
                self._count(info)
            self.n_steps += n
        except BaseException:  # Ctrl-C or a failing target: as if this stretch had not begun
            self.n_steps, self._ensemble, self._state, self._counts = before
            raise
        if not healthy:
            yield from self._up_to_failure(info, before[2].replica_at)
        yield info

    @property
    def _look_every(self) -> int:
        per_look = 1 if self._ensemble.n_data is not None else TESTS_PER_LOOK
        return self.rules.swap_interval * per_look

    def _count(self, info: StepInfo) -> None:
        latest = self.rules.ladder.anneal is not None
        self._counts = self._counts.after(
            info, step=self.n_steps, every=self._look_every, latest=latest
        )

    def exchange(self) -> ExchangeReport:
        """What the exchange did over all steps; see `ReplicaExchange.exchange`.

        Round trips are counted in the first 8 runs. A density without data is looked at after every
        64th test: they are then a lower bound, and `draws.exchange()` of all draws has them all.
        """
        exact = self._look_every == self.rules.swap_interval
        return replace(super().exchange(), exact=exact)

    def _swap_cost(self, counts: SwapCounts) -> float:
        return self.swap_cost(counts.first_step, self.n_steps)

    def swap_cost(self, first: int, last: int) -> float:
        """Examples evaluated for the swaps of the steps [first, last) over those evaluated for
        their moves; NaN without data.
        """
        rules, size, n = self.rules, self._ensemble.target.batch_size, last - first
        if self._ensemble.n_data is None or not size or n < 1:
            return math.nan
        rounds = max(1, rules.pairing.n_rounds(rules.ladder.n_pairs))
        if rules.swap_batch is None:
            return float(rounds - 1)
        return len(swapped_steps(rules, first, last)) * rounds * rules.swap_batch / (n * size)

    def _up_to_failure(self, info: StepInfo, first_at: Tensor) -> Iterator[StepInfo]:
        """Yield the good steps of this stretch, then raise for the first non-finite energy."""
        k, rung, run = (int(i) for i in (~info.energy.isfinite()).nonzero()[0])
        replica_at = first_at if k == 0 else info.replica_at[k - 1]
        if k:
            yield StepInfo(*(values[:k] for values in info))
        data = [t for t in getattr(self._ensemble.target, "data", ()) if isinstance(t, Tensor)]
        finite = all(bool(t.isfinite().all()) for t in data if t.is_floating_point())
        raise NonFiniteEnergyError(
            replica=int(replica_at[rung, run]),
            rung=rung,
            run=run,
            step=self.n_steps - len(info.energy) + k,
            value=float(info.energy[k, rung, run]),
            advice="" if finite else "The data of the target hold NaN or infinite values.",
        )

    def noise_shape(self, batch: Any = None, *more: Any) -> NoiseShape | None:
        """Is the energy noise at the present positions Gaussian? From fresh random numbers; None
        without noise or swaps.
        """
        target = self._ensemble.target
        if not target.has_noise or not self.rules.swaps:
            return None
        position = self._ensemble.position[:, :MOST_RUNS]
        replica_at = self._state.replica_at[:, :MOST_RUNS]
        seed = derive_seed(self.streams.seed, "noise shape")
        generator = torch.Generator(position.device).manual_seed(seed)
        own, n_data = self.rules.swap_batch, target.n_data
        if own is not None and own == n_data:
            return None  # all data
        shape = (REPEATS if n_data is None else BATCHES, *position.shape[:2])
        noise = target.draw_noise(generator, 1, shape, position.dtype)
        if own is not None:
            noise = target.draw_swap_batch(generator, 1, tuple(position.shape[:2]), own)
            position = position[None]
        with torch.no_grad(), few_threads(position.numel()):
            energy = target.energy(position, {name: values[0] for name, values in noise.items()})
        gap = (1.0 / self.temperatures_at(max(0, self.n_steps - 1))).neg().diff()
        if energy.per_example is None or target.n_data is None:
            totals = Selects.take(energy.total.movedim(0, -1), replica_at).cpu()
            return NoiseShape.of(totals, gap, paired=True)
        terms = Selects.take(energy.per_example.movedim(0, -2).flatten(-2), replica_at).cpu()
        if own is not None:
            scale = target.n_data * math.sqrt(1.0 - own / target.n_data)
            return NoiseShape.of(terms, gap, paired=True, scale=scale, n_summed=own)
        n, paired = energy.per_example.shape[-1], target.shares_minibatch
        return NoiseShape.of(terms, gap, paired=paired, scale=float(target.n_data), n_summed=n)

    # Compiled and eager steps agree to rounding only: a run that goes on exactly keeps its loop.

    @property
    def is_compiled(self) -> bool:
        """Is the loop so far a compiled one?"""
        return isinstance(self._loop, CompiledLoop)

    def will_compile(self, n_steps: int) -> bool:
        """Would `prepare` try to compile, or has it done so?"""
        return self.is_compiled or (not self._compiling_tried and self._is_worth_compiling(n_steps))

    def prepare(
        self, n_steps: int, *, eager: bool = False, shared: DensityExchange | None = None
    ) -> None:
        """Choose the loop for `n_steps` steps to come: that of the run `shared`, which has the same
        target and rules, if it fits.
        """
        if eager:
            self._loop, self._compiling_tried = EagerLoop(self.rules), True
            return
        with few_threads(self._ensemble.position.numel()):
            self._choose_loop(n_steps, None if shared is None else shared._loop)

    def _is_worth_compiling(self, n_steps: int) -> bool:
        if self._compiled is not None:
            return self._compiled
        position, batch = self._ensemble.position, self._ensemble.target.batch_size
        terms = position.numel() * (batch or 0)  # of the gradient, which take most of a long step
        long = n_steps * (1 + terms / TERMS_OF_A_LONG_STEP) >= STEPS_WORTH_COMPILING
        return long and position.device.type == "cpu"

    def _choose_loop(self, n_steps: int, shared: Loop | None = None) -> Loop:
        """The loop so far, or a compiled one if it is asked for or worth it; it is tried once."""
        compiled = self._is_worth_compiling(n_steps)
        if self._loop is None or (compiled and not self._compiling_tried):
            self._loop = make_loop(
                self.rules, self._ensemble, self._state, compiled=compiled, shared=shared
            )
            self._compiling_tried = compiled
        return self._loop

    def _current_block(self) -> Block:
        if self._block is None or self.n_steps >= self._block.start + self._block.length:
            start = self.n_steps - self.n_steps % self._block_length
            self._streams_at_block = self.streams.state_dict()
            self._block = None  # freed first, so that its memory serves again
            try:
                self._block = draw_block(
                    self.streams, self.rules, self._ensemble, start, self._block_length
                )
            except BaseException:  # Ctrl-C while it is drawn
                self.streams.load_state_dict(self._streams_at_block)
                raise
        return self._block

    def state_dict(self) -> dict[str, Any]:
        drawn = self._block is not None and self.n_steps < self._block.start + self._block.length
        tensors = {"position": self._ensemble.position, **self._ensemble.named_state}
        return {
            "setting": self.setting,
            "seed": self.streams.seed,
            "n_steps": self.n_steps,
            "block_length": self._block_length,
            **{name: each.clone() for name, each in {**tensors, **self._state._asdict()}.items()},
            # As they were before the current block was drawn, or as they are if it is used up.
            "streams": self._streams_at_block if drawn else self.streams.state_dict(),
            "counts": self._counts.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of a run with the same target, ladder and rules. A state of
        another form leaves the run as it was.
        """
        self._require_same(state.get("setting"), self.setting)
        given, here = tuple(state["position"].shape), tuple(self._ensemble.position.shape)
        if given != here:
            raise InvalidArgumentError(f"the state has (rungs, runs, dim) {given}, this run {here}")
        for name, tensor in self._state._asdict().items():
            if (state[name].shape, state[name].dtype) != (tensor.shape, tensor.dtype):
                raise InvalidArgumentError(
                    f"the state has a {name} of another form: {tuple(state[name].shape)} "
                    f"{state[name].dtype}"
                )
        like = self._ensemble.position
        moved = [
            state[name].to(like, copy=True) for name in ("position", *self._ensemble.named_state)
        ]
        ensemble = self._ensemble.with_tensors(moved)
        exchange = ExchangeState(
            *(state[name].to(like.device, copy=True) for name in ExchangeState._fields)
        )
        streams = Streams(state["seed"], like.device)
        streams.load_state_dict(state["streams"])
        n_steps, length = state["n_steps"], state["block_length"]
        start, block = n_steps - n_steps % length, None
        if n_steps > start:
            block = draw_block(streams, self.rules, ensemble, start, length)
        counts = self._counts.loaded(state.get("counts"), exchange.replica_at, n_steps)
        self._ensemble, self._state, self.streams, self._block = ensemble, exchange, streams, block
        self._counts = counts
        self.n_steps, self._block_length, self._streams_at_block = n_steps, length, state["streams"]

    @property
    def setting(self) -> dict[str, Any]:
        """What must agree between a state and the run that loads it."""
        ensemble = self._ensemble
        parts = {"target": settings_of(ensemble.target), "sampler": settings_of(ensemble.sampler)}
        # On a GPU they are torch's, as ever.
        numbers = {"random_numbers": VERSION} if self.streams.device.type == "cpu" else {}
        return {**parts, **numbers, **self._rule_settings()}

    def __repr__(self) -> str:
        return f"DensityExchange({self._ensemble!r}, {self.rules.ladder!r}, step {self.n_steps})"
