"""All replicas of many independent runs of a tensor target, in one tensor (replicas, runs, dim)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrex.errors import InvalidArgumentError, explain_memory
from torchrex.exchange.algorithm import Exchanged
from torchrex.exchange.assignment import Selects
from torchrex.exchange.momentum import MomentumPolicy, after_swap
from torchrex.rng import Streams, derive_seed
from torchrex.samplers import SGLD, Sampler, State, named_tensors
from torchrex.targets import Energy, LogDensity, Noise, Target
from torchrex.targets.tall import draw_points
from torchrex.xoshiro import normals


@dataclass(frozen=True)
class TensorEnsemble:
    """R replicas x B runs. Immutable: a move returns a new ensemble."""

    target: Target
    sampler: Sampler
    position: Tensor  # (replicas, runs, dim)
    sampler_state: State  # the sampler's own, of tensors shaped like the position

    @staticmethod
    def start(
        target: Target,
        sampler: Sampler | None = None,
        *,
        n_rungs: int,
        n_runs: int = 1,
        initial: Tensor | float = 0.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> TensorEnsemble:
        """Replicas at `initial`: a number, or a tensor that broadcasts to (rungs, runs, dim).
        Samplers start at rest.
        """
        if not isinstance(target, Target):
            raise InvalidArgumentError(
                f"target must be a Target, such as LogDensity(log_density, dim), got {target!r}"
            )
        sampler = SGLD() if sampler is None else sampler
        if not isinstance(sampler, Sampler):
            raise InvalidArgumentError(
                f"sampler must be a sampler such as SGLD() or SGHMC(0.1), got {sampler!r}"
            )
        shape = (n_rungs, n_runs, target.dim)
        start = torch.as_tensor(initial, dtype=dtype, device=device)
        try:
            expanded = start.expand(shape)
        except RuntimeError:
            raise InvalidArgumentError(
                f"initial must be a number or broadcast to (rungs, runs, dim) = {shape}, "
                f"got shape {tuple(start.shape)}"
            ) from None
        many = f"{n_runs:,} runs of {n_rungs} rungs in {target.dim:,} dimensions"
        with explain_memory(
            lambda: f"{start.device} has not enough memory for {many}; lower n_runs"
        ):
            position = expanded.clone()
        if not bool(position.isfinite().all()):
            raise InvalidArgumentError("initial must be finite")
        target = target.to(device, dtype)
        target.check(position)
        return TensorEnsemble(target, sampler, position, sampler.first_state(position))

    @property
    def source_of_noise(self) -> Target:
        """What decides which noise estimators fit."""
        return self.target

    @property
    def n_data(self) -> int | None:
        return self.target.n_data

    @property
    def finite_population(self) -> bool:
        return False  # targets draw their own minibatches with replacement

    @property
    def finite_swap_population(self) -> bool:
        return True  # see `Target.draw_swap_batch`

    def evaluate(self, noise: Noise) -> tuple[Energy, Tensor]:
        """Energies and gradients, in the ensemble's precision whatever the target computes in."""
        energy, gradient = self.target.energy_and_gradient(self.position, noise)
        dtype = self.position.dtype
        return energy._replace(total=energy.total.to(dtype)), gradient.to(dtype)

    def energies(self, noise: Noise) -> Energy:
        """Energies alone; noise with a leading axis gives repeated draws along that axis."""
        energy = self.target.energy(self.position, noise)
        return energy._replace(total=energy.total.to(self.position.dtype))

    def draw_of(self, replica: Tensor) -> Tensor:
        """Position of one replica per run: replica (runs,) to (runs, dim)."""
        return Selects.take(self.position, replica[None]).squeeze(0)

    def after_swap(
        self, noise: Noise, exchanged: Exchanged, *, policy: MomentumPolicy
    ) -> TensorEnsemble:
        """Adjust the sampler states of the replicas that have changed rungs."""
        scales, more = [each.unsqueeze(-1) for each in exchanged[:3]], noise.get("refresh")
        state = after_swap(self.sampler, self.sampler_state, *scales, policy=policy, noise=more)
        return replace(self, sampler_state=state)

    def move(
        self,
        gradient: Tensor,
        noise: Noise,
        exchanged: Exchanged,
        *,
        policy: MomentumPolicy,
        step: Tensor,
    ) -> TensorEnsemble:
        """Adjust the sampler states after a swap, then move every replica with its rung's rates."""
        state = self.after_swap(noise, exchanged, policy=policy).sampler_state
        lr, temperature = exchanged.lr.unsqueeze(-1), exchanged.temperature.unsqueeze(-1)
        if exchanged.power is not None:
            prior, power = self.target.prior_gradient(self.position), exchanged.power.unsqueeze(-1)
            gradient = power * gradient + (1.0 - power) * prior
        position, state = self.sampler.move(
            self.position, state, gradient, noise["move"], lr=lr, temperature=temperature, step=step
        )
        return replace(self, position=position, sampler_state=state)

    def copy(self, runs: slice = slice(None)) -> TensorEnsemble:
        """A copy of all or of some runs."""
        return self.with_tensors([tensor[:, runs].clone() for tensor in self.tensors])

    @property
    def tensors(self) -> list[Tensor]:
        """The positions and what the sampler remembers, for the compiled loop and for copies."""
        return [self.position, *self.sampler_state]

    @property
    def named_state(self) -> dict[str, Tensor]:
        """What the sampler remembers, by its own names, for checkpoints."""
        return named_tensors(self.sampler_state)

    def with_tensors(self, tensors: Sequence[Tensor]) -> TensorEnsemble:
        """The same ensemble with other `tensors`."""
        state = type(self.sampler_state)(*tensors[1:])
        return replace(self, position=tensors[0], sampler_state=state)

    def draw_move_noise(self, generator: torch.Generator, n: int, *, refresh: bool) -> Noise:
        """Standard normals of `n` moves; a second set where momenta are drawn anew at a swap."""
        names = ["move", "refresh"] if refresh and self.sampler.velocity_std else ["move"]
        shape, dtype = (n, *self.position.shape), self.position.dtype
        return {name: normals(shape, generator, dtype) for name in names}

    def __repr__(self) -> str:
        replicas, runs, _ = self.position.shape
        sizes = f"{replicas} replicas x {runs} runs"
        return f"TensorEnsemble({self.target!r}, {self.sampler!r}, {sizes})"


def as_target(target: Target | Callable[[Tensor], Tensor], dim: int | None) -> Target:
    """A function of points (n, dim) becomes a LogDensity."""
    if not isinstance(target, Target):
        if dim is None:
            raise InvalidArgumentError("a log density needs its dimension: sample(f, dim=...)")
        return LogDensity(target, dim)
    if dim not in (None, target.dim):
        raise InvalidArgumentError(f"{target!r} has dim={target.dim}, got dim={dim}")
    return target


def starting_points(
    initial: Tensor | float | Distribution | None,
    target: Target,
    shape: tuple[int, int],
    streams: Streams,
) -> Tensor | float:
    """Drawn on the CPU for all runs at once, so that neither device nor shards change them."""
    if initial is None:
        drawn = target.draw_initial(streams["initial"], shape)
        return 0.0 if drawn is None else drawn
    if not isinstance(initial, Distribution):
        return initial
    return draw_points(initial, shape, target.dim, derive_seed(streams.seed, "initial"))
