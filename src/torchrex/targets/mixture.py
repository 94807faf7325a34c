"""Gaussian mixtures: density, exact draws and, in one dimension, cdf and quantiles."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrex.errors import TargetError
from torchrex.targets.density import Energy, Noise, Target

Numbers = Sequence[float] | Sequence[Sequence[float]] | Tensor


class GaussianMixture(Target):
    """`sum_k w_k N(mean_k, cov_k)`.

    `means` has shape (k,) in one dimension or (k, dim); `stds` (k,) or (k, dim). For full
    covariances pass `covariances` of shape (k, dim, dim) instead of `stds`. Weights are normalised.
    """

    def __init__(
        self,
        weights: Sequence[float] | Tensor,
        means: Numbers,
        stds: Numbers | None = None,
        *,
        covariances: Tensor | None = None,
    ) -> None:
        w = torch.as_tensor(weights, dtype=torch.float64)
        mean = torch.as_tensor(means, dtype=torch.float64)
        mean = mean[:, None] if mean.ndim == 1 else mean
        if w.ndim != 1 or mean.ndim != 2 or len(w) != len(mean) or not bool((w > 0).all()):
            raise TargetError(
                f"a mixture needs one positive weight and one mean per component, got "
                f"{tuple(w.shape)} weights and means of shape {tuple(mean.shape)}"
            )
        if (stds is None) == (covariances is None):
            raise TargetError("a mixture needs either stds or covariances, one of them")
        k, self.dim = mean.shape
        if covariances is not None:
            if tuple(covariances.shape) != (k, self.dim, self.dim):
                given = tuple(covariances.shape)
                raise TargetError(f"covariances must be {(k, self.dim, self.dim)}, got {given}")
            factor, failed = torch.linalg.cholesky_ex(covariances.double())
            if bool(failed.any()):
                raise TargetError("every covariance must be symmetric and positive definite")
        else:
            std = torch.as_tensor(stds, dtype=torch.float64)
            std = (std[:, None] if std.ndim == 1 else std).expand(k, self.dim)
            if not bool((std > 0).all()):
                raise TargetError(f"stds must be positive, got {std.tolist()}")
            factor = torch.diag_embed(std)
        self.weights = w / w.sum()
        self.means = mean
        self.factor = factor  # Cholesky factor of each covariance
        self._diagonal = covariances is None
        self._prepare(torch.device("cpu"), torch.float64)

    def _prepare(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Tensors of the density; they broadcast against positions with components in front."""
        log_det = self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = self.weights.log() - log_det - 0.5 * self.dim * math.log(2 * math.pi)
        whiten = torch.linalg.inv(self.factor)
        if self._diagonal:
            whiten = whiten.diagonal(dim1=-2, dim2=-1)
        # Two axes, so that it is an input of the compiled code, which all mixtures share.
        self._constant = constant[:, None].to(device, dtype)
        self._mean = self.means.to(device, dtype)
        self._whiten = whiten.to(device, dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> GaussianMixture:
        moved = copy.copy(self)
        moved._prepare(device, dtype)
        return moved

    def _components(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log weighted densities (k, ...) at points (..., dim); whitened points (k, ..., dim)."""
        lead = (1,) * (x.ndim - 1)
        centred = x - self._mean.view(-1, *lead, self.dim)
        if self._diagonal:
            white = centred * self._whiten.view(-1, *lead, self.dim)
        else:  # multiply and sum rather than matmul: small, and it fuses into the compiled loop
            whiten = self._whiten.view(-1, *lead, self.dim, self.dim)
            white = (centred.unsqueeze(-2) * whiten).sum(-1)
        return self._constant.view(-1, *lead) - 0.5 * white.square().sum(-1), white

    def log_density(self, x: Tensor) -> Tensor:
        """Exact log density of points (..., dim), as a tensor (...)."""
        return torch.logsumexp(self._components(x)[0], dim=0)

    def energy(self, position: Tensor, noise: Noise) -> Energy:
        return Energy(-self.log_density(position))

    def energy_and_gradient(self, position: Tensor, noise: Noise) -> tuple[Energy, Tensor]:
        """By hand: autograd would compute the exponentials, most of the work, a second time."""
        log_terms, white = self._components(position)
        largest = log_terms.amax(0)
        terms = (log_terms - largest).exp()
        total = terms.sum(0)
        lead = (1,) * (position.ndim - 1)
        if self._diagonal:
            pull = white * self._whiten.view(-1, *lead, self.dim)
        else:
            pull = (white.unsqueeze(-1) * self._whiten.view(-1, *lead, self.dim, self.dim)).sum(-2)
        gradient = (terms.unsqueeze(-1) * pull).sum(0) / total.unsqueeze(-1)
        return Energy(-(largest + total.log())), gradient

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """`n` exact independent draws, shape (n, dim), float64."""
        component = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        z = torch.randn(n, self.dim, 1, dtype=torch.float64, generator=generator)
        away: Tensor = (self.factor[component] @ z).squeeze(-1)
        return self.means[component] + away

    def cdf(self, x: Tensor) -> Tensor:
        """Exact distribution function (one dimension only)."""
        self._require_one_dimension("cdf")
        z = (x.double()[..., None] - self.means[:, 0]) / self.factor[:, 0, 0]
        below: Tensor = torch.special.ndtr(z)
        return (below * self.weights).sum(-1)

    def quantile(self, p: Tensor, *, iterations: int = 80) -> Tensor:
        """Inverse of the cdf by bisection, to machine precision (one dimension only)."""
        self._require_one_dimension("quantile")
        reach = 40.0 * self.factor[:, 0, 0].max()
        low = torch.full_like(p, float(self.means.min() - reach), dtype=torch.float64)
        high = torch.full_like(p, float(self.means.max() + reach), dtype=torch.float64)
        for _ in range(iterations):
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < p
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    def _require_one_dimension(self, what: str) -> None:
        if self.dim != 1:
            raise TargetError(f"{what} is for one dimension, this mixture has dim={self.dim}")

    def __repr__(self) -> str:
        return f"GaussianMixture({len(self.weights)} components, dim={self.dim})"
