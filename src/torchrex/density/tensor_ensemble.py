"""All replicas of many independent runs of a tensor target, in one tensor (replicas, runs, dim)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.exchange.momentum import after_swap
from torchrex.exchange.standing import take
from torchrex.samplers import SGLD, Sampler
from torchrex.targets import Energy, Noise, Target


@dataclass(frozen=True)
class TensorEnsemble:
    """R replicas x B runs. Immutable: a move returns a new ensemble, so a step can be traced,
    compiled and repeated.
    """

    target: Target
    sampler: Sampler
    position: Tensor  # (replicas, runs, dim)
    velocity: Tensor | None = None  # the same, for samplers with momentum

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
        Momenta start at 0.
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
        if sampler.has_squares:
            raise InvalidArgumentError(
                f"{sampler!r} is for ensembles of modules; give a density SGLD() or SGHMC(0.1)"
            )
        shape = (n_rungs, n_runs, target.dim)
        start = torch.as_tensor(initial, dtype=dtype, device=device)
        try:
            position = start.expand(shape).clone()
        except RuntimeError:
            raise InvalidArgumentError(
                f"initial must be a number or broadcast to (rungs, runs, dim) = {shape}, got shape {tuple(start.shape)}"
            ) from None
        if not bool(position.isfinite().all()):
            raise InvalidArgumentError("initial must be finite")
        velocity = torch.zeros_like(position) if sampler.has_momentum else None
        target = target.to(device, dtype)
        target.check(position)
        return TensorEnsemble(target, sampler, position, velocity)

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

    def evaluate(self, noise: Noise) -> tuple[Energy, Tensor]:
        """Energies and gradients at the current positions, in the ensemble's own precision whatever
        the target computes in.
        """
        energy, gradient = self.target.energy_and_gradient(self.position, noise)
        return energy._replace(total=energy.total.to(self.position.dtype)), gradient.to(
            self.position.dtype
        )

    def energies(self, noise: Noise) -> Energy:
        """Energies alone; noise with a leading axis gives repeated draws along that axis."""
        energy = self.target.energy(self.position, noise)
        return energy._replace(total=energy.total.to(self.position.dtype))

    def draw_of(self, replica: Tensor) -> Tensor:
        """Position of one replica per run: replica (runs,) to (runs, dim)."""
        return take(self.position, replica[None]).squeeze(0)

    def change_rungs(
        self,
        swapped: Tensor,
        noise: Noise,
        *,
        policy: str,
        scale_before: Tensor,
        scale_after: Tensor,
    ) -> TensorEnsemble:
        """Adjust momenta after a swap; positions stay."""
        if self.velocity is None:
            return self
        fresh = self.sampler.velocity_std * noise["refresh"] if policy == "refresh" else None
        velocity = after_swap(
            self.velocity,
            fresh,
            swapped,
            policy=policy,
            scale_before=scale_before,
            scale_after=scale_after,
        )
        return replace(self, velocity=velocity)

    def move(
        self, gradient: Tensor, noise: Noise, *, lr: Tensor, temperature: Tensor
    ) -> TensorEnsemble:
        """One move of every replica with the lr and temperature (replicas, runs) of its rung."""
        position, velocity = self.sampler.move(
            self.position,
            self.velocity,
            gradient,
            noise["move"],
            lr=lr.unsqueeze(-1),
            temperature=temperature.unsqueeze(-1),
        )
        return replace(self, position=position, velocity=velocity)

    def draw_move_noise(self, generator: torch.Generator, n: int, *, refresh: bool) -> Noise:
        """Standard normals of `n` moves; a second set where momenta are drawn anew at a swap."""

        def normals() -> Tensor:
            return torch.randn(
                (n, *self.position.shape),
                generator=generator,
                dtype=self.position.dtype,
                device=generator.device,
            )

        return {"move": normals()} | (
            {"refresh": normals()} if refresh and self.sampler.has_momentum else {}
        )

    def __repr__(self) -> str:
        replicas, runs, _ = self.position.shape
        return (
            f"TensorEnsemble({self.target!r}, {self.sampler!r}, {replicas} replicas x {runs} runs)"
        )
