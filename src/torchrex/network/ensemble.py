"""R replicas of a user's module. A replica keeps its weights, buffers and momentum; a swap changes
only the rung it stands on.

All parameters of all replicas are rows of one tensor (see `flat.py`), and the modules see views of
them, so that a move of the whole ensemble is one pass. Everything else about a module stays as its
author wrote it: it is called, not rewritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchrex.distributed import ReplicaMesh
from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.exchange import resolve_device
from torchrex.exchange.algorithm import Exchanged
from torchrex.exchange.momentum import MomentumPolicy
from torchrex.network.flat import FlatLayout
from torchrex.network.philox import MASK, keys_of, normals
from torchrex.network.replicas import Model, ModuleReplicas
from torchrex.network.work import (
    assemble_energy,
    prior_terms,
    require_one_size,
    size_of,
    untouched_buffers,
    update_rows,
)
from torchrex.rng import Streams, derive_seed
from torchrex.samplers import SGLD, Sampler
from torchrex.settings import settings_of
from torchrex.targets import Batch, Energy, GaussianPrior, Noise, PosteriorEnergy, Twice

RandomPart = Literal["model", "data"]
SMALL_SHARE = 0.05  # of the data: below, the factor 1 - n / N is left out if the losses are random
LossesOf = tuple[
    Tensor, Tensor | None
]  # per example, and what is descended if it is not their mean


class ModuleEnsemble(ModuleReplicas):
    """Replicas of a module on the posterior of its parameters; `ModuleExchange` makes as many as
    the ladder has rungs.

    `model` is a function that builds a module, or a module to copy. All replicas begin with the
    same weights, as in the paper, or with `initial="independent"` each with its own from the
    function. With `shared_batches=False` every replica gets a minibatch of its own, and a step
    takes a list of them. Minibatches are those of an epoch, each example once; say
    `replacement=True` if yours are drawn with replacement, for then their sums vary more. Losses
    that are random by themselves, by dropout, augmentation or latents, vary even where all examples
    are used: say `random_losses=True` if your data set augments. With None what can be seen is
    found out: whether the model draws random numbers, and whether a DeviceLoader augments. Weights
    stay in float32 or float64; `autocast=torch.bfloat16` is for speed on a GPU, as is
    `channels_last=True` for convolutions. A module stays in the mode (training or evaluation) it is
    given in. With `mesh=replica_mesh(n)` under torchrun every process holds some of the replicas,
    or a part of every minibatch. `shared` names (parts of) parameters that are the same in all
    replicas: they follow the mean of the replicas' gradients at the coldest rung's learning rate
    and temperature, so that who stands on which rung is nothing to them.
    """

    has_noise = True
    batch_size = None  # the data decide

    def __init__(
        self,
        model: Model,
        energy: PosteriorEnergy,
        sampler: Sampler | None = None,
        *,
        initial: Literal["identical", "independent"] = "identical",
        shared_batches: bool = True,
        shared: Sequence[str] = (),
        replacement: bool = False,
        random_losses: bool | None = None,
        device: torch.device | str | None = None,
        autocast: torch.dtype | None = None,
        channels_last: bool = False,
        mesh: ReplicaMesh | None = None,
    ) -> None:
        if mesh is not None and not isinstance(mesh, ReplicaMesh):
            raise InvalidArgumentError(
                f"mesh must be torchrex.replica_mesh(n_replicas), got {mesh!r}"
            )
        if not callable(model):
            raise InvalidArgumentError(
                f"model must be an nn.Module or a function that makes one, got {model!r}"
            )
        if not isinstance(energy, PosteriorEnergy):
            raise InvalidArgumentError(
                f"energy must be PosteriorEnergy(loss, n_data=...), got {energy!r}"
            )
        if sampler is not None and not isinstance(sampler, Sampler):
            raise InvalidArgumentError(
                f"sampler must be a sampler such as SGLD() or SGHMC(0.1), got {sampler!r}"
            )
        if initial not in ("identical", "independent"):
            raise InvalidArgumentError(f"initial must be identical or independent, got {initial!r}")
        if initial == "independent" and isinstance(model, nn.Module):
            raise InvalidArgumentError(
                "independent initial weights need a function that makes the model, but a module was given"
            )
        if isinstance(shared, str) or not all(isinstance(part, str) and part for part in shared):
            raise InvalidArgumentError(
                f"shared must be a sequence of (parts of) parameter names, got {shared!r}"
            )
        if shared and (not shared_batches or (mesh is not None and mesh.is_spread)):
            raise InvalidArgumentError(
                f"shared={tuple(shared)} needs all replicas in one process and on the same minibatches; leave mesh and "
                f"shared_batches=False out, or let every replica have its own"
            )
        if autocast not in (None, torch.bfloat16):
            raise InvalidArgumentError(
                f"autocast must be torch.bfloat16 or None, got {autocast}: float16 overflows"
            )
        self.energy, self.sampler = energy, SGLD() if sampler is None else sampler
        self.shared = tuple(shared)
        self.shares_minibatch, self.replacement, self.initial = shared_batches, replacement, initial
        self._random_losses, self._random_parts = random_losses, set[RandomPart]()
        self._model, self._autocast, self._channels_last = model, autocast, channels_last
        self._device = None if device is None else resolve_device(device)
        self._mesh = mesh
        self.modules: list[nn.Module] = []  # of the replicas of this process

    @property
    def source_of_noise(self) -> ModuleEnsemble:
        """What decides which noise estimators fit."""
        return self

    @property
    def n_data(self) -> int:
        return self.energy.n_data

    @property
    def finite_population(self) -> bool:
        """Are minibatches drawn without replacement, and is nothing else random, so that with all
        data there is no noise?
        """
        random = bool(self._random_parts) if self._random_losses is None else self._random_losses
        return not (self.replacement or random)

    def note_random_losses(self, part: RandomPart) -> None:
        """The losses were seen to be random by themselves: the model draws random numbers, or the
        data are augmented.
        """
        self._random_parts.add(part)

    def separates_noise_of(self, n: int) -> bool:
        """Must what is random in the losses be told from the choice of n examples, by a second
        forward pass on the same ones?

        Not if they are a small share of the data: the error is below that share.
        """
        seen = self._random_losses is None and bool(self._random_parts)
        return (
            seen and self.separates_noise and not self.replacement and n > SMALL_SHARE * self.n_data
        )

    @property
    def n_parameters(self) -> int:
        """Of a replica, with those it shares."""
        return self.layout.size + (0 if self.common is None else self.common.layout.size)

    # Beginning

    def start(self, n_replicas: int, streams: Streams, *, gpu_only: bool = False) -> None:
        """Build the replicas. Initial weights come from the seed, whatever else the process draws."""
        if self.modules:
            raise InvalidArgumentError(
                "this ensemble belongs to a run already; make another ModuleEnsemble for another run"
            )
        self.mesh = ReplicaMesh(n_replicas) if self._mesh is None else self._mesh
        if self.mesh.n_replicas != n_replicas:
            raise InvalidArgumentError(
                f"the mesh is one of {self.mesh.n_replicas} replicas, the ladder has {n_replicas} rungs; make it for as many"
            )
        modules = self.hold(streams, self.sampler)
        if gpu_only and self.device.type != "cuda":
            raise InvalidArgumentError(
                f"compiled=True captures a CUDA graph, but the ensemble is on {self.device}; leave it out"
            )
        if isinstance(self.energy.prior, GaussianPrior):
            self.energy.prior.require_fit(
                [name for name, _ in modules[0].named_parameters()]
            )  # frozen ones are there too
        self._precision = self._precisions(self.layout)
        self._common_precision = (
            None if self.common is None else self._precisions(self.common.layout)
        )
        self._streams = streams
        self._move_keys = self._keys(streams.seed)
        self._common_keys = self._keys_of_common(streams.seed)
        # On a GPU noise is a function of the step, computed inside the move; a CPU's generators are
        # faster than that.
        self.counted_noise = self.device.type == "cuda"
        self.clock = torch.zeros(
            (), dtype=torch.int64, device=self.device
        )  # the step, where a captured graph can read it
        self.use(self.energy.losses, assemble_energy, update_rows)
        self.backward_at_once = False  # one call of autograd for all replicas: the same numbers, see `QUICK` in batches.py
        self._held: list[Tensor] = []
        self.lanes: list[torch.cuda.Stream] | None = (
            None  # one side stream per replica while a step is captured
        )
        self.turn_of: Callable[[int], contextlib.AbstractContextManager[None]] = lambda k: (
            contextlib.nullcontext()
        )
        self.shares_losses = True  # with the other processes, or only their sums
        self.separates_noise = False  # does the estimator of sigma2 want the noise of the losses told from that of sampling?
        self.modules = modules

    def use(
        self,
        losses_of: Callable[..., LossesOf],
        assemble: Callable[..., Energy],
        update: Callable[..., None],
    ) -> None:
        """The functions that do the work: `PosteriorEnergy.losses` and two of `module_work.py`, or
        compiled forms.
        """
        self._losses_of, self._assemble, self._update = losses_of, assemble, update

    def _precisions(self, layout: FlatLayout) -> Tensor | float | None:
        """Prior precision of every number of a row: one for all, or a row of them."""
        prior = self.energy.prior
        if not isinstance(prior, GaussianPrior):
            return None
        each = {name: prior.precision_of(name) for name in layout.names}
        if len(set(each.values())) == 1:
            return next(iter(each.values())) or None
        row = layout.empty_rows(1, self.device)[0]
        for name, view in layout.views(row).items():
            view.fill_(each[name])
        return row

    # The verbs of the algorithm

    def evaluate(self, noise: Noise) -> tuple[Energy, Tensor]:
        """Energies of all replicas, with the gradients of their data terms; those of a Gaussian
        prior join in the move.
        """
        losses, extra, objectives, shared = [], [], [], None
        repeated: list[Tensor] = []
        for replica, module in self._in_lanes():
            batch, n = self.batch_of(noise, replica)
            # Before the pass with gradients, which must find the buffers (BatchNorm statistics) as
            # it left them.
            if (
                self.separates_noise_of(n or size_of(batch))
                and (again := self.repeated_batch_of(noise, replica)) is not None
            ):
                repeated.append(self._losses_alone(module, again))
            with torch.enable_grad():
                with self.casting():
                    terms, descended = self._losses_of(module, batch)
                if len(terms) == 0:
                    raise TargetError("a batch has no examples; leave empty batches out")
                terms = terms if terms.dtype == torch.float64 else terms.float()
                objective = terms.sum() if descended is None else descended * len(terms)
                objective = objective * (self.n_data / (n or len(terms)))
                added = self._function_prior(replica)
                # Once, however many ranks add up their gradients.
                objectives.append(
                    objective if added is None or self.mesh.data_rank else objective + added
                )
            losses.append(terms.detach())
            extra.append(None if added is None else added.detach())
            if self.mesh.is_spread and replica == len(self.modules) - 1:
                shared = self._share(
                    losses, extra, n, repeated
                )  # on their way while the last gradients are computed
            if not self.backward_at_once:
                self._backward([replica], [objectives[replica]])
        if self.backward_at_once:
            self._backward(list(range(len(self.modules))), objectives)
        # A capture must not free what came from another stream.
        self._held = [*losses, *repeated] if self.lanes is not None else []
        if self.mesh.shares_examples:
            self.mesh.sum_over_examples(self.gradient)
            self._average_buffers()
        if shared is not None:
            return shared(), self.gradient
        energy = self._energy(losses, extra)
        return energy if not repeated else energy._replace(
            repeated=torch.stack(repeated)[:, None].double()
        ), self.gradient

    def _backward(self, replicas: list[int], objectives: list[Tensor]) -> None:
        """Write the gradients of some replicas' objectives into their rows."""
        parameters = [parameter for replica in replicas for parameter in self._parameters[replica]]
        gradients = list(torch.autograd.grad(objectives, parameters, allow_unused=True))
        n, n_own = len(self._parameters[0]), len(self.layout.names)
        for k, replica in enumerate(replicas):
            mine = gradients[k * n : (k + 1) * n]
            self.layout.gather(mine[:n_own], self.gradient[replica])
            if self.common is not None:
                self.common.layout.gather(mine[n_own:], self.common.gradient[replica])

    def energies(self, noise: Noise) -> Energy:
        """Energies alone, in the mode of a step; the buffers stay as they were."""
        losses, extra, n = [], [], None
        for replica, module in self._in_lanes():
            batch, n = self.batch_of(noise, replica)
            losses.append(self._losses_alone(module, batch))
            with torch.no_grad():
                extra.append(self._function_prior(replica))
        return (
            self._share(losses, extra, n)() if self.mesh.is_spread else self._energy(losses, extra)
        )

    def _losses_alone(self, module: nn.Module, batch: Batch) -> Tensor:
        """Per-example losses in the mode of a step, without gradients; the buffers stay as they
        were.
        """
        with self.own_work(), torch.no_grad(), untouched_buffers(module), self.casting():
            terms, _ = self._losses_of(module, batch)
        return terms if terms.dtype == torch.float64 else terms.float()

    def _energy(self, losses: list[Tensor], extra: list[Tensor | None]) -> Energy:
        """The energies that the swaps compare, of the replicas of this process.

        Without the prior of what all of them have in common: it is the same for all.
        """
        if not self.energy.prior_in_swaps:
            return self._assemble(losses, [None] * len(losses), self.position, None, self.n_data)
        return self._assemble(losses, extra, self.position, self._precision, self.n_data)

    def _share(
        self,
        losses: list[Tensor],
        extra: list[Tensor | None],
        n: int | None,
        repeated: Sequence[Tensor] = (),
    ) -> Callable[[], Energy]:
        """Begin to send this process's losses and prior terms to all others; the energies of all
        replicas when they are there.
        """
        n = len(losses[0]) if n is None else n
        terms = torch.stack(losses)
        prior = (
            prior_terms(extra, self.position, self._precision)
            if self.energy.prior_in_swaps
            else None
        )
        own = (
            terms.new_zeros(len(terms), dtype=torch.float64) if prior is None else prior.double()
        )[:, None]
        if not self.shares_losses:  # their sums will do, one from each process
            sums = self.mesh.begin_gather(
                torch.cat([own, terms.sum(1, keepdim=True, dtype=torch.float64)], 1),
                self.mesh.n_data_ranks,
            )
            return lambda: _energy_of(sums(), None, n, self.n_data)
        numbers = self.mesh.begin_gather(torch.cat([own, terms.double()], dim=1), n)
        if not repeated:
            return lambda: _energy_of(numbers(), terms.dtype, n, self.n_data)
        others = self.mesh.begin_gather(
            torch.cat([own, torch.stack(list(repeated)).double()], dim=1), n
        )
        return lambda: _energy_of(numbers(), terms.dtype, n, self.n_data)._replace(
            repeated=others()[:, None, 1:]
        )

    def _average_buffers(self) -> None:
        """Running statistics are those of all examples of a minibatch, not of this process's share."""
        buffers = [b for module in self.modules for b in module.buffers() if b.is_floating_point()]
        if buffers:
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self.mesh.sum_over_examples(flat)
            flat /= self.mesh.n_data_ranks
            for buffer, mean in zip(
                buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True
            ):
                buffer.copy_(mean.view_as(buffer))

    def move(
        self,
        gradient: Tensor,
        noise: Noise,
        exchanged: Exchanged,
        *,
        policy: MomentumPolicy,
        step: Tensor,
    ) -> ModuleEnsemble:
        """Move every replica in place with the lr and temperature (replicas, 1) of its rung."""
        # Before any noise of the move is drawn: the order of random numbers is part of a checkpoint.
        refreshes = policy == "refresh" and self.sampler.velocity_std > 0
        refreshing = self._normals("refresh") if refreshes else None
        numbers = None if self.counted_noise else self._normals("move")
        self._update(
            self.rows.position,
            self.rows.state,
            gradient,
            numbers,
            refreshing,
            self._move_keys,
            step,
            self._precision,
            Exchanged(*map(self.mesh.local, exchanged)),
            policy,
            self.sampler,
        )
        if self.common is not None:
            # Which replica is at the coldest rung changes with the swaps.
            coldest = exchanged.temperature.argmin(0, keepdim=True)
            lr, temperature = (
                each.gather(0, coldest) for each in (exchanged.lr, exchanged.temperature)
            )
            self._update(
                self.common.position,
                self.common.state,
                self.common.gradient,
                None if self.counted_noise else self._common_normals(),
                None,
                self._common_keys,
                step,
                self._common_precision,
                exchanged._replace(lr=lr, temperature=temperature),
                "keep",
                self.sampler,
            )
        return self

    def draw_of(self, replica: Tensor) -> Tensor:
        """Nothing: which weights make a draw is the recorders' choice."""
        return self.position[:0, 0]

    # Parts

    def batch_of(self, noise: Noise, replica: int) -> tuple[Batch, int | None]:
        """What the replica of that place on this process is shown, and of how many examples that is
        a share, if it is one.
        """
        return self._part_of(self._given(noise, replica))

    def repeated_batch_of(self, noise: Noise, replica: int) -> Batch | None:
        """The same examples once more: augmented again, or as they are if only the model is random;
        None if unknown.
        """
        given = self._given(noise, replica, repeated=True)
        return None if given is None else self._part_of(given)[0]

    def _given(self, noise: Noise, replica: int, *, repeated: bool = False) -> Batch:
        batch: Any = (
            noise["batch"] if self.shares_minibatch else noise["batch"][self.mesh.mine[replica]]
        )
        if (
            self.mesh.is_spread and not self.shares_minibatch
        ):  # what other processes gather must be as wide as what this one does
            require_one_size([size_of(each) for each in noise["batch"]])
        if isinstance(batch, Twice):
            return batch.repeated if repeated else batch.batch
        return None if repeated and "data" in self._random_parts else batch

    def _part_of(self, batch: Batch) -> tuple[Batch, int | None]:
        return self.mesh.part_of(batch) if self.mesh.shares_examples else (batch, None)

    @contextlib.contextmanager
    def casting(self) -> Iterator[None]:
        """Autocast, if it was asked for."""
        if self._autocast is None:
            yield
            return
        with torch.autocast(self.device.type, dtype=self._autocast):
            yield

    def _in_lanes(self) -> Iterator[tuple[int, nn.Module]]:
        """Replica after replica; in a captured step each on its own stream, so that their kernels
        share the device.
        """
        if self.lanes is None:
            for k, module in enumerate(self.modules):
                with self.turn_of(k):
                    yield k, module
            return
        main = torch.cuda.current_stream(self.device)
        for lane, item in zip(self.lanes, enumerate(self.modules), strict=True):
            lane.wait_stream(main)
            with torch.cuda.stream(lane):
                yield item
        for lane in self.lanes:
            main.wait_stream(lane)

    def _function_prior(self, replica: int) -> Tensor | None:
        prior = self.energy.prior
        if prior is None or isinstance(prior, GaussianPrior):
            return None
        common = () if self.common is None else self.common.layout.names
        energy = prior(
            dict(zip((*self.layout.names, *common), self._parameters[replica], strict=True))
        )
        if not isinstance(energy, Tensor) or energy.ndim != 0:
            got = (
                f"shape {tuple(energy.shape)}"
                if isinstance(energy, Tensor)
                else type(energy).__name__
            )
            raise TargetError(
                f"the prior must return one number, its energy for all parameters, got {got}"
            )
        return energy

    def _normals(self, name: Literal["move", "refresh"]) -> Tensor:
        """Each replica draws from its own stream, so that a run does not depend on where its
        replicas are computed.
        """
        if self.counted_noise:
            keys = self._move_keys ^ (MASK if name == "refresh" else 0)
            return normals(keys, self.clock, self.layout.size).to(self.layout.dtype)
        numbers = torch.empty_like(self.position)
        for replica, row in zip(self.mesh.mine, numbers, strict=True):
            row.normal_(generator=self._streams[f"{name}.{replica}"])
        return numbers

    def _common_normals(self) -> Tensor:
        assert self.common is not None
        return torch.empty_like(self.common.position).normal_(
            generator=self._streams["shared.move"]
        )

    def _keys_of_common(self, seed: int) -> Tensor:
        return keys_of([derive_seed(seed, "shared.move")], self.device)

    def _keys(self, seed: int) -> Tensor:
        return keys_of(
            [derive_seed(seed, f"move.{replica}") for replica in self.mesh.mine], self.device
        )

    # Settings

    def take_seed(self, seed: int) -> None:
        """The counted noise of another seed, in place, because a captured step may read the keys."""
        self._move_keys.copy_(self._keys(seed))
        self._common_keys.copy_(self._keys_of_common(seed))

    def setting(self) -> dict[str, Any]:
        """What must agree between a state and the ensemble that loads it."""
        return {
            "model": f"{type(self.modules[0]).__name__} with {self.n_parameters:,} parameters",
            "dtype": str(self.layout.dtype).removeprefix("torch."),
            "energy": settings_of(self.energy),
            "sampler": settings_of(self.sampler),
            **({"shared": ", ".join(self.shared)} if self.shared else {}),
            "minibatches": "shared" if self.shares_minibatch else "independent",
            "replacement": str(self.replacement),
            "random_losses": str(self._random_losses),
            "device": self.device.type,
            "autocast": str(self._autocast),
        }

    def __repr__(self) -> str:
        if not self.modules:
            return f"ModuleEnsemble({self.energy!r}, {self.sampler!r})"
        said = self.setting()
        shared = f", {said['shared']} shared" if self.shared else ""
        return (
            f"ModuleEnsemble({self.mesh.n_replicas} x {said['model']} of {said['dtype']}{shared}, {self.energy!r}, "
            f"{self.sampler!r}, {said['minibatches']} minibatches)"
        )


def _energy_of(numbers: Tensor, dtype: torch.dtype | None, n: int, n_data: int) -> Energy:
    """Energies from what all processes sent: prior terms, then losses of that dtype, or with None
    sums of them.
    """
    losses = numbers[:, 1:]
    total = (n_data / n) * (losses if dtype is None else losses.to(dtype)).sum(
        1, dtype=torch.float64
    ) + numbers[:, 0]
    return Energy(total[:, None], None if dtype is None else losses[:, None])
