"""One step of all replicas of a network: losses, gradients, energies, and the move.

`NetworkStep` is what Algorithm 1 drives. All that it needs is given to its constructor: the
replicas, their randomness, the functions it computes with (plain, or compiled for a captured step)
and the CUDA streams of the replicas. `assemble_energy` and `update_rows` are what a captured step
compiles; they must not look at values on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchrex.errors import TargetError
from torchrex.exchange.algorithm import Exchanged, Rules
from torchrex.exchange.momentum import MomentumPolicy, after_swap
from torchrex.exchange.noise import PerExample
from torchrex.network.randomness import MASK, ForwardRandomness, RandomLosses, normals
from torchrex.network.replicas import Replicas, untouched_buffers
from torchrex.network.rows import Rows
from torchrex.rng import Streams
from torchrex.samplers import Sampler, State
from torchrex.targets import Batch, Energy, GaussianPrior, Noise, PosteriorEnergy, Twice

Item = TypeVar("Item")


class Clip(NamedTuple):
    """The largest norm of a replica's gradient, and at how many steps it was larger."""

    norm: float
    # (replicas here, 2, rungs): of the steps since the latest power of two, and of those between
    # the two latest ones. So the steps of a burn-in drop out, however long it was.
    counts: Tensor


SWAP = "swap batch"  # the name under which energies get a batch that all replicas share


class Functions(NamedTuple):
    """What a step computes with: plain functions, or compiled forms of them."""

    losses: Callable[[nn.Module, Batch], tuple[Tensor, Tensor | None]]
    assemble: Callable[..., Energy]
    update: Callable[..., None]

    @staticmethod
    def plain(energy: PosteriorEnergy) -> Functions:
        return Functions(energy.losses, assemble_energy, update_rows)


class SideStreams:
    """One CUDA stream for each of some items that a captured step works on at the same time.

    `kept` holds tensors of other streams: a capture must not free them before it ends.
    """

    def __init__(self, device: torch.device, n: int) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(n)]  # type: ignore[no-untyped-call]
        self.kept: list[Any] = []

    def each(self, items: Sequence[Item]) -> Iterator[Item]:
        """Item after item, each in its stream; all begin and end together."""
        main = torch.cuda.current_stream(self._device)
        for stream, item in zip(self._streams, items, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                yield item
        for stream in self._streams:
            main.wait_stream(stream)


@dataclass(frozen=True)
class NetworkStep:
    """The replicas as Algorithm 1 drives them (`exchange.algorithm.Ensemble`)."""

    replicas: Replicas
    forward: ForwardRandomness
    random_losses: RandomLosses
    rules: Rules
    functions: Functions
    generators: Streams
    # One call of autograd for all replicas: the same numbers, faster for small modules on a CPU.
    backward_at_once: bool = False
    side_streams: SideStreams | None = None  # of the replicas, while a step is captured
    # On a GPU noise is a function of the step, computed inside the move; a CPU's generators are
    # faster than that.
    counted_noise: bool = field(default=False)
    clip: Clip | None = None

    @property
    def n_data(self) -> int:
        return self.replicas.n_data

    @property
    def finite_population(self) -> bool:
        """Has the energy of all data no noise: no replacement, and nothing else random?"""
        return not (self.replicas.source.replacement or self.random_losses.any)

    @property
    def _prior_in_swaps(self) -> bool:
        return self.replicas.energy.prior_in_swaps and self.rules.tempering == "posterior"

    @property
    def finite_swap_population(self) -> bool:
        """The same for a swap batch, which has no example twice."""
        return not self.random_losses.any

    def draw_of(self, replica: Tensor) -> Tensor:
        """Nothing: which weights make a draw is the recorders' choice."""
        return self.replicas.position[:0, 0]

    # Energies

    def evaluate(self, noise: Noise) -> tuple[Energy, Tensor]:
        """Energies and gradients of the data terms; those of a Gaussian prior join in the move."""
        replicas, mesh = self.replicas, self.replicas.mesh
        losses, extra, objectives, gathered = [], [], [], None
        repeated: list[Tensor] = []
        for k, module in self._modules():
            batch, n = self.batch_of(noise, k)
            # Before the pass with gradients, which must find the buffers (BatchNorm statistics) as
            # it left them.
            if self.random_losses.need_a_second_pass(n or size_of(batch), replicas.source):
                again = self._given(noise, k, repeated=True)
                if again is not None:
                    repeated.append(self._losses_alone(module, self._part_of(again)[0]))
            with torch.enable_grad():
                with replicas.casting():
                    terms, descended = self._losses(module, batch)
                if len(terms) == 0:
                    raise TargetError("a batch has no examples; leave empty batches out")
                terms = terms if terms.dtype == torch.float64 else terms.float()
                objective = terms.sum() if descended is None else descended * len(terms)
                objective = objective * (self.n_data / (n or len(terms)))
                added = self._function_prior(k)
                # Once, however many ranks add up their gradients.
                objectives.append(
                    objective if added is None or mesh.data_rank else objective + added
                )
            losses.append(terms.detach())
            extra.append(None if added is None else added.detach())
            if mesh.is_spread and k == len(replicas.modules) - 1:
                # On their way while the last gradients are computed.
                gathered = self._begin_gather(losses, extra, n, repeated)
            if not self.backward_at_once:
                self._backward([k], [objectives[k]])
        if self.backward_at_once:
            self._backward(list(range(len(replicas.modules))), objectives)
        if self.side_streams is not None:
            self.side_streams.kept += [*losses, *repeated]
        gradient = replicas.rows.gradient
        if mesh.shares_examples:
            mesh.sum_over_examples(gradient)
            self._average_buffers()
        if gathered is not None:
            return gathered(), gradient
        energy = self._assembled(losses, extra)
        if repeated:
            energy = energy._replace(repeated=torch.stack(repeated)[:, None].double())
        return energy, gradient

    def energies(self, noise: Noise) -> Energy:
        """Energies alone, in the mode of a step; the buffers stay as they were."""
        losses, extra, n = [], [], None
        for k, module in self._modules():
            batch, n = self.batch_of(noise, k)
            losses.append(self._losses_alone(module, batch))
            with torch.no_grad():
                extra.append(self._function_prior(k))
        if self.side_streams is not None:
            self.side_streams.kept += losses
        if self.replicas.mesh.is_spread:
            return self._begin_gather(losses, extra, n)()
        return self._assembled(losses, extra)

    def _modules(self) -> Iterator[tuple[int, nn.Module]]:
        """Replica after replica; in a captured step each on its own stream."""
        items = list(enumerate(self.replicas.modules))
        if self.side_streams is not None:
            yield from self.side_streams.each(items)
            return
        for k, module in items:
            with self.forward.turn_of(k):
                yield k, module

    def _backward(self, ks: list[int], objectives: list[Tensor]) -> None:
        """Write the gradients of some replicas' objectives into their rows."""
        replicas = self.replicas
        parameters = [parameter for k in ks for parameter in replicas.parameters[k]]
        gradients = list(torch.autograd.grad(objectives, parameters, allow_unused=True))
        n, n_own = len(replicas.parameters[0]), len(replicas.layout.names)
        for i, k in enumerate(ks):
            mine = gradients[i * n : (i + 1) * n]
            replicas.layout.gather(mine[:n_own], replicas.rows.gradient[k])
            if replicas.common is not None:
                replicas.common.layout.gather(mine[n_own:], replicas.common.gradient[k])

    def _losses(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        if self.side_streams is not None:  # a capture must not look at values on the host
            return self.functions.losses(module, batch)
        return self.replicas.energy.losses_or_nan(module, batch, self.functions.losses)

    def _losses_alone(self, module: nn.Module, batch: Batch) -> Tensor:
        """Per-example losses in the mode of a step, without gradients and changed buffers."""
        replicas = self.replicas
        with replicas.own_work(), torch.no_grad(), untouched_buffers(module), replicas.casting():
            terms, _ = self._losses(module, batch)
        return terms if terms.dtype == torch.float64 else terms.float()

    def _assembled(self, losses: list[Tensor], extra: list[Tensor | None]) -> Energy:
        """The energies that the swaps compare, of the replicas of this process.

        Without the prior of what all of them have in common: it is the same for all.
        """
        rows = self.replicas.rows
        precision = rows.precision
        if not self._prior_in_swaps:
            extra, precision = [None] * len(losses), None
        return self.functions.assemble(losses, extra, rows.position, precision, self.n_data)

    def _begin_gather(
        self,
        losses: list[Tensor],
        extra: list[Tensor | None],
        n: int | None,
        repeated: Sequence[Tensor] = (),
    ) -> Callable[[], Energy]:
        """Begin to send losses and prior terms to all processes; calling it gives all energies."""
        mesh, rows = self.replicas.mesh, self.replicas.rows
        n, n_data = len(losses[0]) if n is None else n, self.n_data
        terms, prior = torch.stack(losses), None
        if self._prior_in_swaps:
            prior = prior_terms(extra, rows.position, rows.precision)
        own = terms.new_zeros(len(terms), 1, dtype=torch.float64)
        own = own if prior is None else prior.double()[:, None]
        if not isinstance(self.rules.noise.feed, PerExample):
            # The sums of the losses will do, one from each process.
            summed = terms.sum(1, keepdim=True, dtype=torch.float64)
            sums = mesh.begin_gather(torch.cat([own, summed], 1), mesh.n_data_ranks)
            return lambda: _gathered_energy(sums(), None, n, n_data)
        numbers = mesh.begin_gather(torch.cat([own, terms.double()], dim=1), n)
        if not repeated:
            return lambda: _gathered_energy(numbers(), terms.dtype, n, n_data)
        others = mesh.begin_gather(torch.cat([own, torch.stack(list(repeated)).double()], dim=1), n)
        return lambda: _gathered_energy(numbers(), terms.dtype, n, n_data)._replace(
            repeated=others()[:, None, 1:]
        )

    def _average_buffers(self) -> None:
        """Running statistics are those of all examples of a minibatch, not of one share."""
        mesh, modules = self.replicas.mesh, self.replicas.modules
        buffers = [b for module in modules for b in module.buffers() if b.is_floating_point()]
        if buffers:
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            mesh.sum_over_examples(flat)
            flat /= mesh.n_data_ranks
            means = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, mean in zip(buffers, means, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def _function_prior(self, k: int) -> Tensor | None:
        prior, replicas = self.replicas.energy.prior, self.replicas
        if prior is None or isinstance(prior, GaussianPrior):
            return None
        names = [name for rows in replicas.all_rows for name in rows.layout.names]
        energy = prior(dict(zip(names, replicas.parameters[k], strict=True)))
        if not isinstance(energy, Tensor) or energy.ndim != 0:
            is_one = isinstance(energy, Tensor)
            got = f"shape {tuple(energy.shape)}" if is_one else type(energy).__name__
            raise TargetError(
                f"the prior must return one number, its energy for all parameters, got {got}"
            )
        return energy

    # Batches

    def batch_of(self, noise: Noise, k: int) -> tuple[Batch, int | None]:
        """What the k-th replica here is shown, and of how many examples that is a share, if any."""
        return self._part_of(self._given(noise, k))

    def _given(self, noise: Noise, k: int, *, repeated: bool = False) -> Batch:
        """The examples of a replica; with `repeated` once more: augmented again, or as they are if
        only the model is random, or None if they are not known.
        """
        shares, mesh = self.replicas.source.shared_batches or SWAP in noise, self.replicas.mesh
        given: Any = noise.get(SWAP, noise.get("batch"))
        batch: Any = given if shares else given[mesh.mine[k]]
        if mesh.is_spread and not shares:
            # What other processes gather must be as wide as what this one does.
            require_one_size([size_of(each) for each in noise["batch"]])
        if isinstance(batch, Twice):
            return batch.repeated if repeated else batch.batch
        return None if repeated and self.random_losses.in_data else batch

    def _part_of(self, batch: Batch) -> tuple[Batch, int | None]:
        mesh = self.replicas.mesh
        return mesh.part_of(batch) if mesh.shares_examples else (batch, None)

    # The move

    def after_swap(
        self, noise: Noise, exchanged: Exchanged, *, policy: MomentumPolicy
    ) -> NetworkStep:
        """Adjust the sampler states of the replicas that have changed rungs, in place."""
        rows, sampler = self.replicas.rows, self.replicas.sampler
        if policy == "keep" or not sampler.velocity_std:
            return self
        at, fresh = self._own(exchanged), None
        if policy == "refresh" and self.counted_noise:
            clock, size = self.replicas.clock, rows.position.shape[1]
            fresh = normals(rows.keys ^ MASK, clock, size).to(rows.position.dtype)
        elif policy == "refresh":
            fresh = self._drawn(rows, "refresh")
        kept = after_swap(
            sampler, rows.state, *at[:3], policy=policy, noise=fresh, lr_factor=rows.lr_factor
        )
        for old, new in zip(rows.state, kept, strict=True):
            old.copy_(new)
        return self

    def move(
        self,
        gradient: Tensor,
        noise: Noise,
        exchanged: Exchanged,
        *,
        policy: MomentumPolicy,
        step: Tensor,
    ) -> NetworkStep:
        """Move every replica in place with the lr and temperature (replicas, 1) of its rung."""
        replicas, common = self.replicas, self.replicas.common
        own = self._own(exchanged)
        if self.clip is not None:
            heat = exchanged.temperature if exchanged.power is None else -exchanged.power
            own = own._replace(rung=replicas.mesh.local((heat > heat.T).sum(1, keepdim=True)))
        self._update(replicas.rows, gradient, own, policy, step)
        if common is not None:
            # Which replica is at the coldest rung changes with the swaps.
            coldest = exchanged.temperature.argmin(0, keepdim=True)
            rates = {"lr": exchanged.lr, "temperature": exchanged.temperature}
            if exchanged.power is not None:
                coldest = exchanged.power.argmax(0, keepdim=True)
                rates["power"] = exchanged.power
            cold = exchanged._replace(**{n: each.gather(0, coldest) for n, each in rates.items()})
            self._update(common, common.gradient, cold, "keep", step)
        return self

    def _update(
        self, rows: Rows, gradient: Tensor, at: Exchanged, policy: MomentumPolicy, step: Tensor
    ) -> None:
        sampler = self.replicas.sampler
        policy = policy if sampler.velocity_std else "keep"
        noise: Sequence[Tensor | None] = (None, None)
        if not self.counted_noise:
            fresh = self._drawn(rows, "refresh") if policy == "refresh" else None
            noise = (self._drawn(rows, "move"), fresh)
        given = (gradient, *noise, rows.keys, step, rows.precision, rows.lr_factor, self.clip)
        self.functions.update(rows.position, rows.state, *given, at, policy, sampler)

    def _own(self, exchanged: Exchanged) -> Exchanged:
        """Of the replicas of this process."""
        local = self.replicas.mesh.local
        return Exchanged(*(None if each is None else local(each) for each in exchanged))  # type: ignore[arg-type]

    def _drawn(self, rows: Rows, what: str) -> Tensor:
        """Each row has its own stream, so that a run does not depend on where its replicas are."""
        numbers = torch.empty_like(rows.position)
        for name, row in zip(rows.streams, numbers, strict=True):
            row.normal_(generator=self.generators[name.replace("move", what)])
        return numbers


def assemble_energy(
    losses: list[Tensor],
    extra: list[Tensor | None],
    position: Tensor,
    precision: Tensor | float | None,
    n_data: int,
) -> Energy:
    """Energies (replicas, 1) from every replica's losses (n,), the prior and other terms."""
    require_one_size([len(terms) for terms in losses])
    per_example = torch.stack(losses)
    total = (n_data / per_example.shape[1]) * per_example.sum(1, dtype=torch.float64)
    prior = prior_terms(extra, position, precision)
    total = total if prior is None else total + prior
    return Energy(total[:, None], per_example[:, None].double())


def joined_energies(parts: Sequence[Energy], sizes: Sequence[int]) -> Energy:
    """Energies on a batch, from those on parts of it with so many examples each."""
    n = sum(sizes)
    total = torch.stack([size / n * part.total for size, part in zip(sizes, parts, strict=True)])

    def all_of(name: str) -> Tensor | None:
        terms = [getattr(part, name) for part in parts]
        return None if terms[0] is None else torch.cat(terms, dim=-1)

    return Energy(total.sum(0), all_of("per_example"), all_of("repeated"))


def require_one_size(sizes: list[int]) -> None:
    if len(set(sizes)) > 1:
        raise TargetError(f"the minibatches of all replicas must have one size, got {sizes}")


def size_of(batch: Batch) -> int:
    """How many examples a batch has, by its first tensor."""
    leaves = pytree.tree_leaves(batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)


def prior_terms(
    extra: list[Tensor | None], position: Tensor, precision: Tensor | float | None
) -> Tensor | None:
    """What the prior adds to the energy of every replica, (replicas,)."""
    if extra[0] is not None:
        return torch.stack([term for term in extra if term is not None])
    if precision is None:
        return None
    squares = precision * position.square()
    return 0.5 * _row_sums(squares)


def _row_sums(numbers: Tensor) -> Tensor:
    if numbers.device.type == "cpu":
        # Row by row: how threads divide a sum must not depend on how many replicas are here.
        return torch.stack([row.sum(dtype=torch.float64) for row in numbers])
    return numbers.sum(1, dtype=torch.float64)


def _gathered_energy(numbers: Tensor, dtype: torch.dtype | None, n: int, n_data: int) -> Energy:
    """Energies from what all processes sent: prior terms, then losses, or with None their sums."""
    losses = numbers[:, 1:]
    total = (losses if dtype is None else losses.to(dtype)).sum(1, dtype=torch.float64)
    total = (n_data / n) * total + numbers[:, 0]
    return Energy(total[:, None], None if dtype is None else losses[:, None])


def update_rows(
    position: Tensor,
    state: State,
    gradient: Tensor,
    numbers: Tensor | None,
    fresh: Tensor | None,
    keys: Tensor,
    step: Tensor,
    precision: Tensor | float | None,
    lr_factor: Tensor | None,
    clip: Clip | None,
    exchanged: Exchanged,
    policy: MomentumPolicy,
    sampler: Sampler,
) -> None:
    """Prior, clipping, sampler states after a swap, noise and move of all rows (replicas, size), in
    place: one pass over memory when compiled, two with clipping.

    `numbers` and `fresh` are the noise of the move and of refreshed momenta; None: counted noise.
    A row that several replicas have in common is moved by the mean of their gradients.
    """
    dtype = position.dtype
    lr, temperature = exchanged.lr.to(dtype), exchanged.temperature.to(dtype)
    if numbers is None:
        numbers = normals(keys, step, position.shape[1]).to(dtype)
        if policy == "refresh":
            fresh = normals(keys ^ MASK, step, position.shape[1]).to(dtype)
    if len(gradient) > len(position):
        gradient = gradient.mean(0, keepdim=True)
    if exchanged.power is not None:
        gradient = exchanged.power.to(dtype) * gradient
    if precision is not None:
        gradient = gradient + precision * position
    if clip is not None:
        gradient = clipped(gradient, clip, exchanged.rung, step)
    if lr_factor is not None:
        lr = lr * lr_factor
    kept = after_swap(
        sampler, state, *exchanged[:3], policy=policy, noise=fresh, lr_factor=lr_factor
    )
    moved, carried = sampler.move(
        position, kept, gradient, numbers, lr=lr, temperature=temperature, step=step
    )
    position.copy_(moved)
    for old, new in zip(state, carried, strict=True):
        old.copy_(new)


def clipped(gradient: Tensor, clip: Clip, rung: Tensor | None, step: Tensor) -> Tensor:
    """Every row with a norm of at most `clip.norm`; longer ones are counted at `rung`.

    The drift is then not the gradient of the energy: a bias of the law wherever it acts.
    """
    norm = _row_sums(gradient.double().square())[:, None].sqrt()
    if rung is not None:
        acts = (rung == torch.arange(clip.counts.shape[-1], device=rung.device)) & ~(
            norm <= clip.norm
        )
        begins, (now, before) = (step & (step - 1)) == 0, clip.counts.unbind(1)
        kept = (torch.where(begins, 0, now) + acts, torch.where(begins, now, before))
        clip.counts.copy_(torch.stack(kept, 1))
    # What is not finite becomes NaN, so that the run notices it.
    return gradient * (clip.norm / norm).clamp(max=1.0).to(gradient.dtype)


@contextlib.contextmanager
def explain_batchnorm_error() -> Iterator[None]:
    """What BatchNorm reports about one value per channel, with what to do."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise TargetError(
            "BatchNorm in training mode cannot work on one value per channel, as a batch of one "
            f"example has ({error}); leave such a batch out: DataLoader(..., drop_last=True), or "
            'DeviceLoader with last="drop" or "wrap"'
        ) from error
