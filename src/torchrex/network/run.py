"""The run of Algorithm 1 on replicas of a network: steps on batches, looking at it, exact resume.

Nothing waits for the device inside a step. What the exchange takes from outside (schedules, pairs,
uniforms) is drawn for a block of steps at once; energies, swaps and variances are looked at when a
stretch of steps is over. `SideBySide` drives one to n runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchrex.errors import InvalidArgumentError, NonFiniteEnergyError, TargetError
from torchrex.exchange import ExchangeInputs, Ladder, draw_exchange_inputs, n_usable
from torchrex.exchange.algorithm import ExchangeState, StepInfo, StepInputs, sa_step, step, swap
from torchrex.exchange.assignment import Indexing
from torchrex.exchange.noise import NoiseShape, PerExample, RepeatedDraws, warn_of_no_measurement
from torchrex.exchange.run import ReplicaExchange, RuleOptions, require_known
from torchrex.exchange.swap_report import SwapCounts
from torchrex.network.capture import (
    RECORDED,
    CaptureState,
    Graphs,
    compiled_or_plain,
    convolutions,
    empty_records,
)
from torchrex.network.group import BLOCK, SideBySide
from torchrex.network.randomness import ForwardRandomness, RandomLosses
from torchrex.network.replicas import (
    ModuleEnsemble,
    Replicas,
    copied,
    evaluating,
    untouched_buffers,
)
from torchrex.network.step import (
    SWAP,
    Clip,
    Functions,
    NetworkStep,
    explain_batchnorm_error,
    size_of,
)
from torchrex.posterior.average import OutputFunction
from torchrex.rng import Streams
from torchrex.targets import Batch, Energy

logger = logging.getLogger("torchrex")

Divergence = Literal["stop", "respawn"]
BLOCK_STREAMS = ("pairing", "swap")
REPLICA_STREAMS = ("move", "refresh")  # one of each for every replica, move.0, move.1, ...
# Seconds of a forward pass on a CPU. Below, calling autograd costs more than its work, and one call
# for all replicas saves time (a third at four replicas); above, activations of all replicas at once
# fall out of the caches. The numbers are the same.
QUICK = 5e-4

LOWER_IT = "Lower the learning rate of that rung, or check model, loss and data."
NOT_MOVED = "Nothing has moved yet: check the loss, the data and the initial weights."
IN_THE_BATCH = "The batch of this step holds NaN or infinite values: look at the data."
ALL_AT_ONCE = (
    "All replicas failed at this step: look for NaN in its data first, then at the learning rates."
)


class ModuleExchange(ReplicaExchange):
    """Replica exchange on the posterior of a module.

    `divergence` says what happens when a replica's energy is NaN or infinite: "stop" raises,
    "respawn" makes the replica a copy of the nearest healthy one and writes it down in `respawns`.
    On a GPU energies are looked at when a stretch of up to 256 steps is over, because looking means
    waiting. `deterministic` asks cuDNN and the compiler for algorithms whose results do not vary
    from process to process. `compiled=None` captures the step as one graph on a GPU.

    `clip` shortens a replica's gradient of the energy, the prior included, to that norm where it is
    longer; what `shared` names has a norm of its own. It is a guard for the first steps: wherever
    it acts, the law is another one. `clipped_share` says how often it acts.
    """

    def __init__(
        self,
        ensemble: ModuleEnsemble,
        ladder: Ladder,
        *,
        seed: int = 0,
        compiled: bool | None = None,
        divergence: Divergence = "stop",
        deterministic: bool = False,
        clip: float | None = None,
        **options: Unpack[RuleOptions],
    ) -> None:
        if not isinstance(ensemble, ModuleEnsemble):
            raise InvalidArgumentError(
                f"ModuleExchange needs ModuleEnsemble(model, energy), got {ensemble!r}; "
                "a TensorEnsemble needs DensityExchange"
            )
        own = ("seed", "compiled", "divergence", "deterministic", "clip")
        require_known(options, "ModuleExchange", own)
        super().__init__(ensemble, ladder, **options)
        # A single run: indexing takes the fewest operations from Python.
        self.rules = rules = dataclasses.replace(self.rules, assignment=Indexing)
        if clip is not None and not (isinstance(clip, int | float) and 0.0 < clip < math.inf):
            raise InvalidArgumentError(
                f"clip must be a norm above 0 of the summed gradient, or None, got {clip!r}"
            )
        if divergence not in ("stop", "respawn"):
            raise InvalidArgumentError(f"divergence must be stop or respawn, got {divergence!r}")
        if divergence == "respawn" and ensemble.shared:
            raise InvalidArgumentError(
                'divergence="respawn" copies a healthy replica, but through what they share '
                f"(shared={tuple(ensemble.shared)}) all of them break with the first; "
                "leave one of the two out"
            )
        if rules.pairing.n_rounds(rules.ladder.n_pairs) > 1:
            raise InvalidArgumentError(
                f"{rules.pairing!r} needs fresh minibatch energies for every pair, "
                "which a step on one batch cannot give; use EvenOdd() or RandomPair()"
            )
        self.streams = Streams(seed)
        self.ensemble = Replicas(ensemble, rules.ladder.n_rungs, seed)
        self.mesh, self.device = self.ensemble.mesh, self.ensemble.device
        on_gpu = self.device.type == "cuda"
        if compiled and not on_gpu:
            raise InvalidArgumentError(
                f"compiled=True captures a CUDA graph, but the ensemble is on {self.device}; "
                "leave it out"
            )
        # Energies are sums over all data: single precision would lose what the swap test looks at.
        self._state = ExchangeState.start(rules, 1, device=self.device, dtype=torch.float64)
        self._counts = SwapCounts.start(self._state.replica_at)
        self._uncounted: list[StepInfo] = []  # of single steps
        self.forward = ForwardRandomness(seed, self.device, self.mesh)
        self.random_losses = RandomLosses(ensemble.random_losses, rules)
        n = len(self.mesh.mine)
        counts = torch.zeros(n, 2, self.n_rungs, dtype=torch.int64, device=self.device)
        self._network = NetworkStep(
            self.ensemble,
            self.forward,
            self.random_losses,
            rules,
            Functions.plain(self.ensemble.energy),
            self.streams,
            counted_noise=on_gpu,
            clip=None if clip is None else Clip(float(clip), counts),
        )
        self._block_start, self._streams_at_block = -1, self.streams.state_dict()
        self._table: ExchangeInputs | None = None
        self._rows: list[ExchangeInputs] = []
        self._n_usable = 0
        # Of a block of steps, on the device.
        self.records = empty_records(rules, BLOCK, self.device) if on_gpu else None
        self.capturing = on_gpu and compiled is not False and not self.mesh.is_spread
        self.deterministic = deterministic
        # Without a compiled form the predictions of a thinned average took 5 % of the time of
        # ResNet-20.
        output = self.ensemble.energy.output
        if self.capturing:
            output = compiled_or_plain(output, deterministic=deterministic)
        self._output = output
        # Does a module in evaluation mode write its buffers? None until one was seen.
        self._looking_writes: bool | None = None
        self._guest: nn.Module | None = None  # for a replica of another process
        self._replica_at: tuple[int, list[int]] | None = None  # at that step
        self._swapped_before = -1  # which step was the latest swap on a swap batch?
        self._divergence = divergence
        self.respawns: list[dict[str, int]] = []
        # The step of the first measurement of repeated energies, until one is made or it is said
        # that there is none.
        feed, first = rules.noise.feed, rules.noise.first_measurement
        self._first_measurement = first if isinstance(feed, RepeatedDraws) else None
        self.alone = SideBySide([self])

    # Looking at it

    @property
    def can_respawn(self) -> bool:
        """Are diverged replicas respawned?"""
        return self._divergence == "respawn"

    @property
    def graphs(self) -> Graphs | None:
        """What this run has captured by itself."""
        return self.alone.graphs

    def clipped_share(self) -> tuple[float, ...]:
        """Of each rung the share of steps at which `clip` acted; on several processes all ask.

        Of the later half of all steps, or somewhat more: since the latest power of two but one.
        """
        clip, mesh, n = self._network.clip, self.mesh, self.n_steps
        if clip is None:
            return (0.0,) * self.n_rungs
        counts = mesh.process_group.gather(clip.counts.sum((0, 1)).tolist(), "count clipped steps")
        since = 1 << (n - 1).bit_length() >> 2  # where the second of two counts begins
        of_ranks = [counts[row * mesh.n_data_ranks] for row in range(mesh.n_replica_ranks)]
        return tuple(sum(each) / max(1, n - since) for each in zip(*of_ranks, strict=True))

    @property
    def n_examples(self) -> int:
        """Examples that all replicas together have evaluated, for moves and for swaps; without the
        repeated energies of a noise estimator.
        """
        return int(self._counted().examples.sum()) * self.n_rungs

    def replica_at(self, rung: int) -> int:
        """The replica at that rung now."""
        if not 0 <= rung < self.n_rungs:
            raise InvalidArgumentError(
                f"rung must lie between 0 and {self.n_rungs - 1}, got {rung}"
            )
        # Asked once a step: asking waits for the device.
        if self._replica_at is None or self._replica_at[0] != self.n_steps:
            self._replica_at = (self.n_steps, self._state.replica_at[:, 0].tolist())
        return self._replica_at[1][rung]

    def module_at(self, rung: int = 0) -> nn.Module:
        """A copy of the module at that rung, in evaluation mode. On several processes all ask."""
        return copied(self.live_module_at(rung)).eval()

    def live_module_at(self, rung: int = 0) -> nn.Module:
        """The module of the replica itself, not a copy: its weights change with the next step, and
        it is in the run's mode.

        Whoever changes its weights, its mode or its buffers changes the run; a forward pass in
        training mode changes the statistics of BatchNorm. On several processes all of them must
        ask: those that do not hold it get a copy.
        """
        replica, modules = self.replica_at(rung), self.ensemble.modules
        if not self.mesh.is_spread:
            return modules[replica]
        sent = self.ensemble.tensors_from(replica)
        if replica in self.mesh.mine:
            return modules[self.mesh.mine.index(replica)]
        self._guest = copied(modules[0]) if self._guest is None else self._guest
        here = {**dict(self._guest.named_parameters()), **dict(self._guest.named_buffers())}
        for name, tensor in {**sent["parameters"], **sent["buffers"], **sent["frozen"]}.items():
            here[name].data.copy_(tensor)
        return self._guest

    def predict(self, batch: Batch, rung: int = 0, *, output: OutputFunction | None = None) -> Any:
        """Output of that module for a batch as in training, in evaluation mode, without gradients,
        or `output(module, batch)`.

        On several processes all of them must ask: the one that holds the module sends its output.
        """
        replica = self.replica_at(rung)
        if not self.mesh.is_spread:
            return self._output_of(replica, batch, output)
        here = replica in self.mesh.mine
        sent = self._output_of(self.mesh.mine.index(replica), batch, output) if here else None
        return self.mesh.send_from(self.mesh.owner_of(replica), sent, self.device)

    def _output_of(self, k: int, batch: Batch, function: OutputFunction | None) -> Any:
        replicas, module = self.ensemble, self.ensemble.modules[k]
        with contextlib.ExitStack() as looking:
            # A module may count its calls, say: what looking writes is taken back.
            if function is not None or self._looking_writes is not False:
                looking.enter_context(replicas.own_work())
                looking.enter_context(untouched_buffers(module))
            is_first = function is None and self._looking_writes is None
            before = replicas.buffer_writes() if is_first else None
            with evaluating(module), replicas.casting():
                output = (function or self._output)(module, self.to_device(batch))
            if before is not None:
                self._looking_writes = replicas.buffer_writes() != before

        return widened(output)

    def energies(self, batch: Batch, *, shared: bool = False) -> Energy:
        """Energies (replicas, 1) on a batch, in the mode of a step; only dropout moves on. With
        `shared` all replicas see this batch, also if each has its own at a step.
        """
        with self._working(), explain_batchnorm_error():
            return self._network.energies({SWAP if shared else "batch": self.to_device(batch)})

    def noise_shape(self, batch: Any = None, *more: Any) -> NoiseShape | None:
        """Is the energy noise Gaussian, by these batches' losses? On several processes all ask."""
        if batch is None:
            raise InvalidArgumentError(
                "the noise of a network's energy is that of a batch: run.noise_shape((x, y))"
            )
        if not self.rules.swaps or not isinstance(self.rules.noise.feed, PerExample):
            return None
        n_data, own = self.ensemble.n_data, self.rules.swap_batch
        finite = own is not None and self._network.finite_swap_population
        if finite and own == n_data:
            return None  # all data
        own_batches = not self.ensemble.source.shared_batches  # then a batch is a list of batches
        with self.forward.restored():
            seen = [
                self.energies(each[0] if own and own_batches else each, shared=bool(own))
                for each in (batch, *more)
            ]
        losses = [each.per_example for each in seen if each.per_example is not None]
        if not losses or losses[0].shape[-1] < 2:
            return None
        n, terms = losses[0].shape[-1], torch.cat(losses, -1)
        gap = (1.0 / self.temperatures_at(max(0, self.n_steps - 1))).neg().diff()
        at_rung = self.rules.assignment.take(terms, self._state.replica_at).cpu()
        paired, scale = self.ensemble.source.shared_batches, float(n_data)
        if own is not None:
            paired, n = True, own
            scale *= math.sqrt(1.0 - own / n_data) if finite else 1.0
        return NoiseShape.of(at_rung, gap, paired=paired, scale=scale, n_summed=n)

    # Going on

    def step(self, batch: Any = None) -> StepInfo:
        """One step of every replica on a batch (or with own minibatches on a list of them)."""
        if batch is None:
            raise InvalidArgumentError("a step on a module needs a batch: run.step((x, y))")
        if self.rules.swaps_with_own_batch(self.n_steps) and self._swapped_before != self.n_steps:
            raise InvalidArgumentError(
                f"step {self.n_steps} tests swaps on swap_batch={self.rules.swap_batch} other "
                "examples: use run.advance or train with a loader, or call run.swap(batches) before"
            )
        # A step later than it is due: a loop may measure behind the step as well as before it.
        if self._first_measurement is not None and self.n_steps > self._first_measurement:
            self._first_measurement, noise = None, self.rules.noise
            if isinstance(noise.feed, RepeatedDraws) and self.mesh.process_group.is_main:
                shares = self.ensemble.source.shared_batches
                warn_of_no_measurement(noise, noise.feed, self.n_steps, shares_minibatch=shares)
        info = self.alone.step(batch)
        self._count_later(info)
        if self.records is None:
            self.look(StepInfo(*(values[None] for values in info)), batch)
        elif self.n_steps % BLOCK == 0:
            self.look(self.records)
        return info

    def advance(
        self, n_steps: int, data: Any = None, extra: Any = None, *, every: int | None = None
    ) -> Iterator[StepInfo]:
        """`n_steps` steps on the batches of `data`, a DeviceLoader or any iterable of batches that
        is begun anew when it ends.

        Yields up to 256 steps at a time, or with `every` whenever `run.n_steps` is a multiple of
        it, and at the end. With RepeatedDraws the extra batches are taken from `extra`, or else
        from `data` too.
        """
        for (infos,) in self.alone.advance(n_steps, data, extra, every=every):
            assert infos is not None
            yield infos

    def swap(self, batches: Iterable[Batch]) -> StepInfo:
        """Test and swap before the next step, by the energies of all replicas on other examples;
        `advance` does it by itself if the run has a `swap_batch`.
        """
        if not self.rules.swaps_with_own_batch(self.n_steps):
            raise InvalidArgumentError(
                f"no swap is due before step {self.n_steps}: swap_batch={self.rules.swap_batch}, "
                f"swap_interval={self.rules.swap_interval}, swap_start={self.rules.swap_start}"
            )
        if self.has_swapped:
            raise InvalidArgumentError(
                f"the swaps before step {self.n_steps} are made already; take the step"
            )
        (info,) = self.alone.swap_on(batches).values()
        self._count_later(info)
        return info

    @property
    def has_swapped(self) -> bool:
        """Are the swaps on a swap batch before the next step made?"""
        return self._swapped_before == self.n_steps

    def measure(self, batches: Iterable[Batch]) -> None:
        """SA step of the paper from energies of extra batches; `advance` does it by itself."""
        feed = self.rules.noise.feed
        if not isinstance(feed, RepeatedDraws):
            raise InvalidArgumentError(
                f"{self.rules.noise!r} measures no repeated energies; "
                "use Smoothing(0.3, RepeatedDraws(10))"
            )
        batches = list(batches)
        if len(batches) != feed.n_draws:
            raise InvalidArgumentError(f"{feed!r} needs {feed.n_draws} batches, got {len(batches)}")
        self.learn_variance(torch.stack([self.energies(batch).total for batch in batches]))

    # What `SideBySide` asks of a run

    def try_batch(self, batch: Batch) -> int:
        """Evaluate the first batch without consequences, to report errors early; its size."""
        replicas, network = self.ensemble, self._network
        if not replicas.source.shared_batches and not (
            isinstance(batch, list | tuple) and len(batch) == self.n_rungs
        ):
            raise InvalidArgumentError(
                f"with shared_batches=False a step takes a list of {self.n_rungs} batches, "
                "one for each replica"
            )
        module, (mine, n) = replicas.modules[0], network.batch_of({"batch": batch}, 0)
        with (
            self.forward.restored(),
            torch.no_grad(),
            self.forward,
            self.forward.turn_of(0),
            untouched_buffers(module),
            replicas.casting(),
            explain_batchnorm_error(),
        ):
            before = self.forward.now()
            losses = replicas.energy.tried(module, mine, moved=self.n_steps > 0)
            if not all(map(torch.equal, before, self.forward.now())):
                self.random_losses.note("model")
            if self.device.type == "cpu":
                began = time.perf_counter()
                replicas.energy.per_example(module, mine)
                quick = time.perf_counter() - began < QUICK
                self._network = dataclasses.replace(network, backward_at_once=quick)
        if len(losses) > replicas.n_data:
            raise TargetError(
                f"a minibatch of {len(losses)} examples is larger than n_data={replicas.n_data}, "
                "which counts all examples"
            )
        leaves = pytree.tree_leaves(mine)
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if sizes and len(losses) not in sizes:
            raise TargetError(
                f"the loss gave {len(losses)} values for a batch of {sizes[0]} examples; "
                f"it must give one per example, shape ({sizes[0]},)"
            )
        return len(losses) if n is None else n

    def learn_variance(self, energies: Tensor) -> None:
        """SA step from repeated energies (draws, replicas, 1)."""
        feed = self.rules.noise.feed
        assert isinstance(feed, RepeatedDraws)
        self._first_measurement = None
        take = self.rules.assignment.take
        sample = feed.sample(energies, self._state.replica_at, take)
        self._set_state(sa_step(self._state, sample, self.rules))

    def swap_by(self, energy: Energy, n_examples: int) -> StepInfo:
        """Test and swap by the energies of a swap batch, before a step."""
        clock = self.ensemble.clock.fill_(self.n_steps)
        inputs = StepInputs(*self.prepare(), clock, (), move_noise={})
        with self._working():
            _, state, info = swap(self._network, self._state, [energy], inputs, self.rules)
        self._set_state(state)
        self._replica_at, self._swapped_before = None, self.n_steps
        self._counts.examples[1] += n_examples
        return info

    def eager_step(self, batch: Batch) -> StepInfo:
        """One step on a batch that is on the device, not captured."""
        clock = self.ensemble.clock.fill_(self.n_steps)
        inputs = StepInputs(*self.prepare(), clock, ({"batch": batch},), move_noise={})
        with self._working(), explain_batchnorm_error():
            _, state, info = step(self._network, self._state, inputs, self.rules)
        self._set_state(state)
        if self.records is not None:
            for name in RECORDED:
                getattr(self.records, name)[self.n_steps % BLOCK].copy_(getattr(info, name))
            clock += 1
        self.count_step(size_of(batch))
        return info

    def count_step(self, n_examples: int) -> None:
        self.n_steps += 1
        self._counts.examples[0] += n_examples

    def count(self, infos: StepInfo) -> None:
        """Count the swaps of steps, stacked along a first axis. Nothing waits for the device."""
        self._counts = self._counted().after(infos, latest=self.rules.ladder.anneal is not None)

    def _count_later(self, info: StepInfo) -> None:
        """Of a single step, or of swaps before one, together with others."""
        self._uncounted.append(info._replace(position=info.energy[:0]))
        if len(self._uncounted) >= BLOCK:
            self._counted()

    def _counted(self) -> SwapCounts:
        if waiting := self._uncounted:
            self._uncounted = []
            self.count(StepInfo(*(torch.stack(values) for values in zip(*waiting, strict=True))))
        return self._counts

    def _swap_cost(self, counts: SwapCounts) -> float:
        moved, swapped = counts.examples.tolist()
        return swapped / moved if moved else math.nan

    def capture_state(self) -> CaptureState:
        """What a captured step of this run reads and writes."""
        self.prepare()
        assert self._table is not None
        assert self.records is not None
        self.ensemble.clock.fill_(self.n_steps)
        return CaptureState(self._network, self._state, self._table, self.records)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """No gradients unless asked for, the run's own randomness, and deterministic convolutions
        where they are wanted; otherwise torch as the user has set it.
        """
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.no_grad())
            modes.enter_context(self.forward)
            if self.deterministic:
                modes.enter_context(convolutions(deterministic=True))
            yield

    def _set_state(self, state: ExchangeState) -> None:
        """Take over a new state, by copying where a graph may read the old one's memory."""
        if self.records is None:
            self._state = state
            return
        for mine, given in zip(self._state, state, strict=True):
            mine.copy_(given)

    def prepare(self) -> ExchangeInputs:
        """What the exchange of the next step takes from outside, drawn block by block."""
        start = self.n_steps - self.n_steps % BLOCK
        if start != self._block_start:
            states, cpu = self.streams.state_dict(), torch.device("cpu")
            self._streams_at_block = {
                name: states[name] for name in BLOCK_STREAMS if name in states
            }
            block = draw_exchange_inputs(
                self.streams, self.rules, start, BLOCK, runs=1, device=cpu, dtype=torch.float64
            )
            self._n_usable = n_usable(block)
            if self._table is None:
                self._table = ExchangeInputs(*(t.contiguous().to(self.device) for t in block))
                columns = [tensor.unbind(0) for tensor in self._table]
                self._rows = [ExchangeInputs(*row) for row in zip(*columns, strict=True)]
            for mine, drawn in zip(self._table, block, strict=True):
                mine.copy_(drawn)  # into the memory that a graph reads
            self._block_start = start
        if self.n_steps - start >= self._n_usable:
            self.rules.ladder.refuse(self.n_steps)
        return self._rows[self.n_steps - start]

    def to_device(self, batch: Batch) -> Batch:
        def move(leaf: Any) -> Any:
            elsewhere = isinstance(leaf, Tensor) and leaf.device != self.device
            return leaf.to(self.device, non_blocking=True) if elsewhere else leaf

        return pytree.tree_map(move, batch)

    # Divergence. It never spreads: the swap test refuses an energy that is not finite by itself.

    def look(self, infos: StepInfo, batch: Batch = None) -> None:
        """Are the energies of these latest steps finite? Of a single step the batch is known."""
        failure = first_failure(
            infos, self.n_steps, batch=batch, together=bool(self.ensemble.shared)
        )
        if failure is None:
            return
        if not self.can_respawn:
            part = self.ensemble.nonfinite_part(failure.replica)
            raise failure if part is None else failure.because(part)
        energy, replica_at = infos.energy[-1], self._state.replica_at
        self.respawns += respawn(self.ensemble, replica_at, energy, self.n_steps, batch=batch)

    # Stopping and going on exactly

    def state_dict(self) -> dict[str, Any]:
        """All that an exact continuation needs; None for replicas of other processes."""
        here = {replica: self._state_of(k, replica) for k, replica in enumerate(self.mesh.mine)}
        # The generators now, but those of the block as they were before it was drawn, unless it is
        # used up.
        streams = self.streams.state_dict()
        if self._block_start >= 0 and self.n_steps < self._block_start + BLOCK:
            drawn = {name: s for name, s in streams.items() if name not in BLOCK_STREAMS}
            streams = drawn | self._streams_at_block
        return {
            "setting": self.setting,
            "seed": self.streams.seed,
            "n_steps": self.n_steps,
            **({"swapped_before": self.n_steps} if self.has_swapped else {}),
            "exchange": {name: tensor.clone() for name, tensor in self._state._asdict().items()},
            "replicas": [here.get(replica) for replica in range(self.n_rungs)],
            "streams": {
                name: s for name, s in streams.items() if name.split(".")[0] not in REPLICA_STREAMS
            },
            "respawns": [dict(event) for event in self.respawns],
            "counts": self._counted().state_dict(),
        }

    def _state_of(self, k: int, replica: int) -> dict[str, Any]:
        """The tensors of the k-th replica of this process, and its random generators."""
        states = self.streams.state_dict()
        generators = {
            name: states[f"{name}.{replica}"]
            for name in REPLICA_STREAMS
            if f"{name}.{replica}" in states
        }
        tensors = pytree.tree_map(torch.clone, self.ensemble.tensors_of(k))
        clip = self._network.clip
        counts = {} if clip is None else {"clipped": clip.counts[k].clone()}
        return {**tensors, "generators": generators, "forward": self.forward.state_of(k), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_same(state.get("setting"), self.setting)
        replicas = state["replicas"]
        if len(replicas) != self.n_rungs:
            raise InvalidArgumentError(
                f"the state has {len(replicas)} replicas, this run has {self.n_rungs}"
            )
        here = [replicas[replica] for replica in self.mesh.mine]
        self.ensemble.load_tensors(here)
        exchange = {
            name: state["exchange"][name].to(self.device, copy=True)
            for name in ExchangeState._fields
        }
        self._set_state(ExchangeState(**exchange))
        if bool(state["exchange"]["noise_updates"].any()):
            self._first_measurement = None
        self.n_steps = int(state["n_steps"])
        self.streams.seed = int(state["seed"])
        for rows in self.ensemble.all_rows:
            rows.take_seed(self.streams.seed)
        streams = dict(state["streams"])
        for k, (replica, saved) in enumerate(zip(self.mesh.mine, here, strict=True)):
            generators = saved["generators"].items()
            streams |= {f"{name}.{replica}": generator for name, generator in generators}
            self.forward.load_state_of(k, saved["forward"])
            if self._network.clip is not None:
                self._network.clip.counts[k].copy_(saved["clipped"])
        self.streams.load_state_dict(streams)
        self.respawns = [dict(event) for event in state["respawns"]]
        self._uncounted = []
        self._counts = self._counts.loaded(
            state.get("counts"), self._state.replica_at, self.n_steps
        )
        self._block_start, self._replica_at = -1, None
        self._swapped_before = int(state.get("swapped_before", -1))
        self.alone.begin_data_anew()
        if self.records is not None:
            for values in self.records:
                values.zero_()
        self.ensemble.clock.fill_(self.n_steps)

    @property
    def setting(self) -> dict[str, Any]:
        """What must agree between a state and the run that loads it."""
        clip = {} if self._network.clip is None else {"clip": self._network.clip.norm}
        return {**self.ensemble.setting(), **self._rule_settings(), **clip}

    def __repr__(self) -> str:
        return f"ModuleExchange({self.ensemble!r}, {self.rules.ladder!r}, step {self.n_steps})"


def first_failure(
    infos: StepInfo, steps_done: int, *, batch: Batch = None, together: bool = False
) -> NonFiniteEnergyError | None:
    """The first energy that is not finite among the latest steps, stacked along the first axis.

    `batch` is that of a single step, if known; `together`: replicas always break together.
    """
    bad = ~infos.energy.isfinite()
    if not bool(bad.any()):
        return None
    k, rung, run = (int(i) for i in bad.nonzero()[0])
    step = steps_done - len(infos.energy) + k
    return NonFiniteEnergyError(
        replica=int(infos.replica_at[k, rung, run]),  # such a replica has not swapped at this step
        rung=rung,
        run=run,
        step=step,
        value=float(infos.energy[k, rung, run]),
        advice=_advice(step, bad[k], batch, together=together),
    )


def _advice(step: int, bad: Tensor, batch: Batch, *, together: bool) -> str:
    leaves = pytree.tree_leaves(batch)
    numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not all(bool(leaf.isfinite().all()) for leaf in numbers):
        return IN_THE_BATCH
    if step == 0:
        return NOT_MOVED
    all_of_several = len(bad) > 1 and bool(bad.all())
    return ALL_AT_ONCE if batch is None and all_of_several and not together else LOWER_IT


def respawn(
    replicas: Replicas, replica_at: Tensor, energy: Tensor, step: int, *, batch: Batch = None
) -> list[dict[str, int]]:
    """Copy the nearest healthy replica, by rungs and then the colder one, over each broken one;
    what was done is returned.

    Weights, buffers and momentum are copied, the noise is not: the two part from the next move on.
    """
    at, weights = replica_at[:, 0].tolist(), replicas.finite()
    finite = [bool(energy[rung, 0].isfinite()) and weights[at[rung]] for rung in range(len(at))]
    healthy = [rung for rung in range(len(at)) if finite[rung]]
    events = []
    for rung in range(len(at)):
        if finite[rung]:
            continue
        if not healthy:
            advice = _advice(step - 1, ~energy.isfinite(), batch, together=False)
            raise NonFiniteEnergyError(
                replica=at[rung],
                rung=rung,
                run=0,
                step=step - 1,
                value=float(energy[rung, 0]),
                advice=f"{advice} No replica is left to copy it from.",
            )
        source = at[min(healthy, key=lambda other: (abs(other - rung), other))]
        replicas.copy_replica(source, at[rung])
        events.append({"step": step, "replica": at[rung], "rung": rung, "copied_from": source})
        logger.warning(
            f"replica {at[rung]} on rung {rung} diverged before step {step} and is now a copy of "
            f"replica {source}; if it repeats, lower that rung's lr"
        )
    return events


def widened(output: Any) -> Any:
    """A module's output in single precision, where autocast made it half."""

    def wide(leaf: Any) -> Any:
        is_half = isinstance(leaf, Tensor) and leaf.dtype == torch.bfloat16
        return leaf.float() if is_half else leaf

    return pytree.tree_map(wide, output)
