"""A user's log density as a target."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.targets.base import Energy, Noise, Target


class LogDensity(Target):
    """Any log density, known up to a constant: `log_density(x)` maps (n, dim) to (n,).

    A function of one point, (dim,) to a scalar, is given with `batched=False` and is vmapped.
    `gradient(x)`, if given, is the gradient of the log density, (n, dim) to (n, dim); otherwise
    autograd finds it.
    """

    def __init__(
        self,
        log_density: Callable[[Tensor], Tensor],
        dim: int,
        *,
        gradient: Callable[[Tensor], Tensor] | None = None,
        batched: bool = True,
    ) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise InvalidArgumentError(f"dim must be a whole number >= 1, got {dim!r}")
        self.dim = dim
        self.log_density = log_density if batched else torch.vmap(log_density)
        self.gradient = gradient if gradient is None or batched else torch.vmap(gradient)

    def energy(self, position: Tensor, noise: Noise) -> Energy:
        points = position.reshape(-1, self.dim)
        value = self.log_density(points)
        self._check("log density", value, (points.shape[0],), points)
        return Energy(-value.reshape(position.shape[:-1]))

    def energy_and_gradient(self, position: Tensor, noise: Noise) -> tuple[Energy, Tensor]:
        if self.gradient is None:
            return super().energy_and_gradient(position, noise)
        points = position.reshape(-1, self.dim)
        value = self.gradient(points)
        self._check("gradient", value, tuple(points.shape), points)
        return self.energy(position, noise), -value.reshape(position.shape)

    def check(self, position: Tensor) -> None:
        """Try the density on dim + 1 points: a function of one point at a time gives itself away."""
        points = position.reshape(-1, self.dim)[:1].expand(self.dim + 1, -1).clone()
        hint = f"If it takes one point of shape ({self.dim},) at a time, use LogDensity(..., batched=False)."
        try:
            with torch.enable_grad():
                points.requires_grad_(self.gradient is None)
                values = [self.log_density(points) for _ in range(2)]
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise TargetError(
                f"the log density failed on points of shape {tuple(points.shape)}: {what}. {hint}"
            ) from error
        self._check("log density", values[0], (len(points),), points)
        if self.gradient is None and not values[0].requires_grad:
            raise TargetError(
                "the log density does not depend on its points through autograd; give its gradient: gradient=..."
            )
        if not torch.equal(values[0].nan_to_num(), values[1].nan_to_num()):
            raise TargetError(
                "the log density gives different values at the same point, so it draws random numbers that the swap test cannot "
                "know of; put a module into eval mode, use Noisy for noise of a known law, TallPosterior for minibatches"
            )

    def _check(self, what: str, value: object, expected: tuple[int, ...], points: Tensor) -> None:
        if not isinstance(value, Tensor) or tuple(value.shape) != expected:
            got = (
                f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            raise TargetError(
                f"the {what} must return a tensor of shape {expected} for points of shape {tuple(points.shape)}, got {got}. "
                f"If it takes one point of shape ({self.dim},) at a time, use LogDensity(..., batched=False)."
            )

    def __repr__(self) -> str:
        return f"LogDensity({getattr(self.log_density, '__name__', 'log_density')}, dim={self.dim})"
