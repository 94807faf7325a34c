"""The run of an ensemble of modules: batches in, steps of Algorithm 1 out, eagerly or as one
captured graph.

Nothing waits for the device inside a step. What the exchange takes from outside (schedules, pairs,
uniforms) is drawn for a block of steps at once; energies, swaps and variances are looked at when a
stretch of steps is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchrex.errors import InvalidArgumentError
from torchrex.exchange import ExchangeInputs, draw_exchange_inputs, n_usable
from torchrex.exchange.algorithm import ExchangeState, StepInfo, StepInputs, sa_step, step
from torchrex.exchange.ladder import Ladder
from torchrex.exchange.noise import (
    BatchVariance,
    NoiseShape,
    PerExample,
    RepeatedDraws,
    warn_of_no_measurement,
)
from torchrex.exchange.run import ReplicaExchange, RuleOptions, require_known
from torchrex.exchange.standing import take
from torchrex.network.capture import Workings
from torchrex.network.compiling import compiled_or_plain
from torchrex.network.cuda_modes import convolutions
from torchrex.network.divergence import Divergence, first_failure, respawn
from torchrex.network.ensemble import ModuleEnsemble
from torchrex.network.forward_rng import ForwardRandomness
from torchrex.network.records import Records
from torchrex.network.replicas import copied
from torchrex.network.side_by_side import BLOCK, SideBySide
from torchrex.network.work import evaluating, telling_of_one, untouched_buffers
from torchrex.rng import Streams
from torchrex.targets import Batch

BLOCK_STREAMS = ("pairing", "swap")
REPLICA_STREAMS = ("move", "refresh")  # one of each for every replica, move.0, move.1, ...


class ModuleExchange(ReplicaExchange):
    """Replica exchange on the posterior of a module.

    `divergence` says what happens when a replica's energy is NaN or infinite: "stop" raises,
    "respawn" makes the replica a copy of the nearest healthy one and writes it down in `respawns`.
    On a GPU energies are looked at when a stretch of up to 256 steps is over, because looking means
    waiting. `deterministic` asks cuDNN for algorithms whose results do not vary from process to
    process. `compiled=None` captures the step as one graph on a GPU.
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
        **options: Unpack[RuleOptions],
    ) -> None:
        if not isinstance(ensemble, ModuleEnsemble):
            raise InvalidArgumentError(
                f"ModuleExchange needs ModuleEnsemble(model, energy), got {ensemble!r}; "
                "a TensorEnsemble needs DensityExchange"
            )
        own = ("seed", "compiled", "divergence", "deterministic")
        require_known(options, "ModuleExchange", own)
        super().__init__(ensemble, ladder, **options)
        rules = self.rules
        if divergence not in ("stop", "respawn"):
            raise InvalidArgumentError(f"divergence must be stop or respawn, got {divergence!r}")
        if divergence == "respawn" and ensemble.shared:
            raise InvalidArgumentError(
                f'divergence="respawn" copies a healthy replica, but through what they share (shared={ensemble.shared}) all of '
                f"them break with the first; leave it out, or let every replica have its own"
            )
        if rules.pairing.n_rounds(rules.ladder.n_pairs) > 1:
            raise InvalidArgumentError(
                f"{rules.pairing!r} needs fresh minibatch energies for every pair, which a step on one batch cannot give; use "
                f"EvenOdd() or RandomPair()"
            )
        self.streams = Streams(seed)
        ensemble.start(rules.ladder.n_rungs, self.streams, gpu_only=bool(compiled))
        self._ensemble, self.device = ensemble, ensemble.device
        on_gpu = self.device.type == "cuda"
        # Energies are sums over all data: single precision would lose what the swap test looks at.
        self._state = ExchangeState.start(
            rules, 1, device=self.device, dtype=torch.float64, standing=torch.int64
        )
        self.mesh = ensemble.mesh
        self.forward = ForwardRandomness(self.streams, self.device, self.mesh)
        ensemble.turn_of = self.forward.turn_of
        ensemble.shares_losses = isinstance(rules.noise.feed, PerExample)
        ensemble.separates_noise = isinstance(rules.noise, BatchVariance)
        self._guest: nn.Module | None = None  # for a replica of another process
        self._looking_writes: bool | None = (
            None  # does a module in evaluation mode write its buffers? None until one was seen
        )
        self._block_start, self._streams_at_block = -1, self.streams.state_dict()
        self._table: ExchangeInputs | None = None
        self._rows: list[ExchangeInputs] = []
        self.records = Records(rules, BLOCK, self.device) if on_gpu else None
        self.capturing = on_gpu and compiled is not False and not self.mesh.is_spread
        self.deterministic = deterministic
        # Without a compiled form the predictions of a thinned average took 5 % of the time of
        # ResNet-20.
        self._output = (
            compiled_or_plain(ensemble.energy.output) if self.capturing else ensemble.energy.output
        )
        self._divergence = divergence
        self.respawns: list[dict[str, int]] = []
        self._standing: tuple[int, list[int]] | None = None
        # The step of the first measurement of repeated energies, until one is made or it is said
        # that there is none.
        self._first_measurement = (
            rules.noise.first_measurement if isinstance(rules.noise.feed, RepeatedDraws) else None
        )
        self.alone = SideBySide([self])

    # Looking at it

    @property
    def can_respawn(self) -> bool:
        """Are diverged replicas respawned?"""
        return self._divergence == "respawn"

    @property
    def ensemble(self) -> ModuleEnsemble:
        return self._ensemble

    def replica_at(self, rung: int) -> int:
        """Who stands on that rung now."""
        if not 0 <= rung < self.n_rungs:
            raise InvalidArgumentError(
                f"rung must lie between 0 and {self.n_rungs - 1}, got {rung}"
            )
        if (
            self._standing is None or self._standing[0] != self.n_steps
        ):  # asked once a step: asking waits for the device
            self._standing = (self.n_steps, self._state.replica_at[:, 0].tolist())
        return self._standing[1][rung]

    def module_at(self, rung: int = 0) -> nn.Module:
        """A copy of the module that stands on that rung now, in evaluation mode: nothing done to it
        changes the run.

        On several processes all of them must ask.
        """
        return copied(self.live_module_at(rung)).eval()

    def live_module_at(self, rung: int = 0) -> nn.Module:
        """The module of the replica itself, not a copy: its weights change with the next step, and
        it is in the run's mode.

        Whoever changes its weights, its mode or its buffers changes the run; a forward pass in
        training mode changes the statistics of BatchNorm. On several processes all of them must
        ask: those that do not hold it get a copy.
        """
        replica, modules = self.replica_at(rung), self._ensemble.modules
        if not self.mesh.is_spread:
            return modules[replica]
        sent = self._ensemble.tensors_from(replica)
        if replica in self.mesh.mine:
            return modules[self.mesh.mine.index(replica)]
        self._guest = copied(modules[0]) if self._guest is None else self._guest
        here = {**dict(self._guest.named_parameters()), **dict(self._guest.named_buffers())}
        for name, tensor in {**sent["parameters"], **sent["buffers"], **sent["frozen"]}.items():
            here[name].data.copy_(tensor)
        return self._guest

    def predict(self, batch: Batch, rung: int = 0) -> Any:
        """Output of that module for a batch as in training, in evaluation mode, without gradients.

        On several processes all of them must ask: the one that holds the module sends its output.
        """
        replica = self.replica_at(rung)
        if not self.mesh.is_spread:
            return self._output_of(replica, batch)
        output = (
            self._output_of(self.mesh.mine.index(replica), batch)
            if replica in self.mesh.mine
            else None
        )
        return self.mesh.send_from(self.mesh.owner_of(replica), output, self.device)

    def _output_of(self, k: int, batch: Batch) -> Any:
        module, ensemble = self._ensemble.modules[k], self._ensemble
        with contextlib.ExitStack() as looking:
            if (
                self._looking_writes is not False
            ):  # a module may count its calls, say: what looking writes is taken back
                looking.enter_context(ensemble.own_work())
                looking.enter_context(untouched_buffers(module))
            before = ensemble.buffer_writes() if self._looking_writes is None else None
            with evaluating(module), ensemble.casting():
                output = self._output(module, self.to_device(batch))
            if before is not None:
                self._looking_writes = ensemble.buffer_writes() != before
        return (
            output.float()
            if isinstance(output, Tensor) and output.dtype == torch.bfloat16
            else output
        )

    # Going on

    def step(self, batch: Any = None) -> StepInfo:
        """One step of every replica on a batch (with independent minibatches: a list of them, one
        for each replica).
        """
        if batch is None:
            raise InvalidArgumentError("a step on a module needs a batch: run.step((x, y))")
        # A step later than it is due: a loop may measure behind the step as well as before it.
        if self._first_measurement is not None and self.n_steps > self._first_measurement:
            self._first_measurement, noise = None, self.rules.noise
            if isinstance(noise.feed, RepeatedDraws) and self.mesh.process_group.is_main:
                warn_of_no_measurement(
                    noise,
                    noise.feed,
                    self.n_steps,
                    shares_minibatch=self._ensemble.shares_minibatch,
                )
        info = self.alone.step(batch)
        if self.records is None:
            self.look(StepInfo(*(values[None] for values in info)), batch)
        elif self.n_steps % BLOCK == 0:
            self.look(self.records.info)
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

    def measure(self, batches: Iterable[Batch]) -> None:
        """SA step of the paper from energies of extra batches at the current weights; `advance`
        does it by itself.
        """
        feed = self.rules.noise.feed
        if not isinstance(feed, RepeatedDraws):
            raise InvalidArgumentError(
                f"{self.rules.noise!r} measures no repeated energies; use Smoothing(0.3, RepeatedDraws(10))"
            )
        batches = list(batches)
        if len(batches) != feed.n_draws:
            raise InvalidArgumentError(f"{feed!r} needs {feed.n_draws} batches, got {len(batches)}")
        with torch.no_grad(), self.forward, self._eager_algorithms(), telling_of_one():
            energies = [
                self._ensemble.energies({"batch": self.to_device(batch)}).total for batch in batches
            ]
        self.learn_variance(torch.stack(energies))

    def noise_shape(self, batch: Any = None, *more: Any) -> NoiseShape | None:
        """Is the energy noise Gaussian, by the losses of this batch and more of its size? None if
        there is nothing to compare.

        On several processes all of them must ask.
        """
        if batch is None:
            raise InvalidArgumentError(
                "the noise of a network's energy is that of a batch: run.noise_shape((x, y))"
            )
        if not self.rules.swaps or not self._ensemble.shares_losses:
            return None
        state = self.forward.state_dict()
        try:
            with torch.no_grad(), self.forward, self._eager_algorithms():
                seen = [
                    self._ensemble.energies({"batch": self.to_device(each)}).per_example
                    for each in (batch, *more)
                ]
        finally:
            self.forward.load_state_dict(state)
        losses = [each for each in seen if each is not None]
        if not losses or losses[0].shape[-1] < 2:
            return None
        n, terms = losses[0].shape[-1], torch.cat(losses, -1)
        gap = (1.0 / self.temperatures_at(max(0, self.n_steps - 1))).neg().diff()
        at_rung = take(terms, self._state.replica_at).cpu()
        paired, scale = self._ensemble.shares_minibatch, float(self._ensemble.n_data)
        return NoiseShape.of(at_rung, gap, paired=paired, scale=scale, n_summed=n)

    # What `SideBySide` asks of a run

    def learn_variance(self, energies: Tensor) -> None:
        """SA step from repeated energies (draws, replicas, 1)."""
        feed = self.rules.noise.feed
        assert isinstance(feed, RepeatedDraws)
        self._first_measurement = None
        self._set_state(
            sa_step(self._state, feed.sample(energies, self._state.replica_at), self.rules)
        )

    def eager_step(self, batch: Batch) -> StepInfo:
        """One step on a batch that is on the device, not captured."""
        inputs = self.prepare()
        self._ensemble.clock.fill_(self.n_steps)
        with torch.no_grad(), self.forward, self._eager_algorithms(), telling_of_one():
            _, state, info = step(
                self._ensemble,
                self._state,
                StepInputs(*inputs, self._ensemble.clock, ({"batch": batch},), move_noise={}),
                self.rules,
            )
        self._set_state(state)
        if self.records is not None:
            self.records.write(self.n_steps % BLOCK, info)
            self._ensemble.clock += 1
        self.n_steps += 1
        return info

    def workings(self) -> Workings:
        """What a captured step of this run reads and writes."""
        self.prepare()
        assert self._table is not None
        assert self.records is not None
        self._ensemble.clock.fill_(self.n_steps)
        return Workings(self._ensemble, self._state, self._table, self.records, self.rules)

    def _eager_algorithms(self) -> contextlib.AbstractContextManager[None]:
        """Deterministic convolutions where they are asked for; otherwise torch as the user has set
        it.
        """
        return convolutions(deterministic=True) if self.deterministic else contextlib.nullcontext()

    def _set_state(self, state: ExchangeState) -> None:
        """Take over a new state; where there may be a graph that reads the old one's memory, by
        copying.
        """
        if self.records is None:
            self._state = state
            return
        for mine, given in zip(self._state, state, strict=True):
            mine.copy_(given)

    def prepare(self) -> ExchangeInputs:
        """What the exchange of the next step takes from outside, drawn if its block has not been."""
        start = self.n_steps - self.n_steps % BLOCK
        if start != self._block_start:
            self._draw_block(start)
        if self.n_steps - start >= self._n_usable:
            self.rules.ladder.refuse(self.n_steps)
        return self._rows[self.n_steps - start]

    def _draw_block(self, start: int) -> None:
        """Draw the inputs of a block, into the memory that a graph reads if there is one."""
        states = self.streams.state_dict()
        self._streams_at_block = {name: states[name] for name in BLOCK_STREAMS if name in states}
        cpu = torch.device("cpu")
        block = draw_exchange_inputs(
            self.streams, self.rules, start, BLOCK, runs=1, device=cpu, dtype=torch.float64
        )
        self._n_usable = n_usable(block)
        if self._table is None:
            self._table = ExchangeInputs(*(tensor.contiguous().to(self.device) for tensor in block))
            self._rows = [
                ExchangeInputs(*row)
                for row in zip(*(tensor.unbind(0) for tensor in self._table), strict=True)
            ]
        else:
            for mine, drawn in zip(self._table, block, strict=True):
                mine.copy_(drawn)
        self._block_start = start

    def look(self, infos: StepInfo, batch: Batch = None) -> None:
        """Are the energies of these latest steps finite? If it is one step, its batch tells whether
        they could be.
        """
        failure = first_failure(
            infos, self.n_steps, batch=batch, together=bool(self._ensemble.shared)
        )
        if failure is None:
            return
        if self._divergence == "stop":
            culprit = self._ensemble.what_broke(failure.replica)
            raise failure if culprit is None else failure.because(culprit)
        self.respawns += respawn(
            self._ensemble, self._state.replica_at, infos.energy[-1], self.n_steps, batch=batch
        )

    # Stopping and going on exactly

    def state_dict(self) -> dict[str, Any]:
        """All that an exact continuation needs. On several processes each has its own replicas in
        it, and None for the others.
        """
        here = {replica: self._state_of(k, replica) for k, replica in enumerate(self.mesh.mine)}
        return {
            "setting": self.setting,
            "seed": self.streams.seed,
            "n_steps": self.n_steps,
            "exchange": {name: tensor.clone() for name, tensor in self._state._asdict().items()},
            "replicas": [here.get(replica) for replica in range(self.n_rungs)],
            "streams": {
                name: s
                for name, s in self._streams_at_step().items()
                if name.split(".")[0] not in REPLICA_STREAMS
            },
            "respawns": [dict(event) for event in self.respawns],
        }

    def _state_of(self, k: int, replica: int) -> dict[str, Any]:
        """The tensors of the k-th replica of this process, and its random generators."""
        states = self.streams.state_dict()
        generators = {
            name: states[f"{name}.{replica}"]
            for name in REPLICA_STREAMS
            if f"{name}.{replica}" in states
        }
        tensors = pytree.tree_map(torch.clone, self._ensemble.tensors_of(k))
        return {**tensors, "generators": generators, "forward": self.forward.state_of(k)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_same(state.get("setting"), self.setting)
        replicas = state["replicas"]
        if len(replicas) != self.n_rungs:
            raise InvalidArgumentError(
                f"the state has {len(replicas)} replicas, this run has {self.n_rungs}"
            )
        here = [replicas[replica] for replica in self.mesh.mine]
        self._ensemble.load_tensors(here)
        exchange = {
            name: state["exchange"][name].to(self.device, copy=True)
            for name in ExchangeState._fields
        }
        self._set_state(ExchangeState(**exchange))
        if bool(state["exchange"]["noise_updates"].any()):
            self._first_measurement = None
        self.n_steps = int(state["n_steps"])
        self.streams.seed = int(state["seed"])
        self._ensemble.take_seed(self.streams.seed)
        streams = dict(state["streams"])
        for k, (replica, saved) in enumerate(zip(self.mesh.mine, here, strict=True)):
            streams |= {
                f"{name}.{replica}": generator for name, generator in saved["generators"].items()
            }
            self.forward.load_state_of(k, saved["forward"])
        self.streams.load_state_dict(streams)
        self.respawns = [dict(event) for event in state["respawns"]]
        self._block_start, self._standing = -1, None
        self.alone.begin_data_anew()
        if self.records is not None:
            for values in self.records.info:
                values.zero_()
        self._ensemble.clock.fill_(self.n_steps)

    def _streams_at_step(self) -> dict[str, Tensor]:
        """The generators now, but those of the block as they were before it was drawn, unless it is
        used up.
        """
        states = self.streams.state_dict()
        if self._block_start >= 0 and self.n_steps < self._block_start + BLOCK:
            states = {
                name: state for name, state in states.items() if name not in BLOCK_STREAMS
            } | self._streams_at_block
        return states

    @property
    def setting(self) -> dict[str, Any]:
        """What must agree between a state and the run that loads it."""
        return {**self._ensemble.setting(), **self._rule_settings()}

    def to_device(self, batch: Batch) -> Batch:
        def move(leaf: Any) -> Any:
            return (
                leaf.to(self.device, non_blocking=True)
                if isinstance(leaf, Tensor) and leaf.device != self.device
                else leaf
            )

        return pytree.tree_map(move, batch)

    def __repr__(self) -> str:
        return f"ModuleExchange({self._ensemble!r}, {self.rules.ladder!r}, step {self.n_steps})"
