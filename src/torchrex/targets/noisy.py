"""Noise models, and a wrapper that adds them to the energy and the gradient of any target."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.targets.density import Energy, Noise, Target
from torchrex.xoshiro import normals, uniforms


class NoiseModel(ABC):
    """A centred law with a known variance."""

    @property
    @abstractmethod
    def variance(self) -> float: ...

    @abstractmethod
    def draw(
        self, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor: ...


@dataclass(frozen=True)
class Gaussian(NoiseModel):
    """N(0, std^2)."""

    std: float

    def __post_init__(self) -> None:
        _require_positive("std", self.std)

    @property
    def variance(self) -> float:
        return self.std**2

    def draw(
        self, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        return normals(shape, generator, dtype).mul_(self.std)


@dataclass(frozen=True)
class StudentT(NoiseModel):
    """scale * t(degrees): heavy tails, variance scale^2 * degrees / (degrees - 2)."""

    degrees: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("degrees", self.degrees)
        _require_positive("scale", self.scale)

    @property
    def variance(self) -> float:
        return self.scale**2 * self.degrees / (self.degrees - 2) if self.degrees > 2 else math.inf

    def draw(
        self, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        # Bailey's polar form (1994), exact from two uniforms; unlike a gamma draw it vectorises.
        u, angle = (uniforms(shape, generator, dtype) for _ in range(2))
        squared = (1.0 - u).pow_(-2.0 / self.degrees).sub_(1.0).mul_(self.degrees * self.scale**2)
        return squared.sqrt_().mul_(angle.mul_(2.0 * math.pi).cos_())


class Noisy(Target):
    """`target` with noise added to every energy and, if given, to every gradient coordinate.

    The noises of replicas, runs and steps are independent.
    """

    has_noise = True

    def __init__(
        self, target: Target, energy: NoiseModel, gradient: NoiseModel | None = None
    ) -> None:
        if not isinstance(target, Target):
            advice = "; wrap it in LogDensity(f, dim)" if callable(target) else ""  # type: ignore[unreachable]
            raise InvalidArgumentError(
                f"target must be a Target such as GaussianMixture(...), got {target!r}{advice}"
            )
        for name, model in (("energy", energy), ("gradient", gradient)):
            if not isinstance(model, NoiseModel) and not (name == "gradient" and model is None):
                raise InvalidArgumentError(f"{name} must be a law: Gaussian(2.0), got {model!r}")
        self.target, self.energy_noise, self.gradient_noise = target, energy, gradient
        self.dim, self.shares_minibatch = target.dim, target.shares_minibatch
        self.n_data = None  # per-example terms do not include the added noise

    def draw_noise(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Noise:
        noise = dict(self.target.draw_noise(generator, n, shape, dtype))
        noise["energy"] = self.energy_noise.draw(generator, (n, *shape), dtype)
        if self.gradient_noise is not None:
            noise["gradient"] = self.gradient_noise.draw(generator, (n, *shape, self.dim), dtype)
        return noise

    def energy(self, position: Tensor, noise: Noise) -> Energy:
        exact = self.target.energy(position, noise)
        return exact._replace(total=exact.total + noise["energy"])

    def energy_and_gradient(self, position: Tensor, noise: Noise) -> tuple[Energy, Tensor]:
        energy, gradient = self.target.energy_and_gradient(position, noise)
        if self.gradient_noise is not None:
            gradient = gradient + noise["gradient"]
        return energy._replace(total=energy.total + noise["energy"]), gradient

    def draw_initial(self, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor | None:
        return self.target.draw_initial(generator, shape)

    def check(self, position: Tensor) -> None:
        self.target.check(position)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Noisy:
        moved = copy.copy(self)
        moved.target = self.target.to(device, dtype)
        return moved

    def __repr__(self) -> str:
        gradient = "" if self.gradient_noise is None else f", gradient={self.gradient_noise}"
        return f"Noisy({self.target!r}, energy={self.energy_noise}{gradient})"


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgumentError(f"{name} of the noise must be positive and finite, got {value}")
