"""Posterior of tall data: a sum of per-example log likelihoods, estimated from minibatches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.targets.base import Energy, Noise, Target


class TallPosterior(Target):
    """`-log prior(x) - N/n sum_i log_likelihood(x, d_i)` over a minibatch of n of N examples, drawn
    with replacement (Eq. 6).

    `log_likelihood(x, *batch)` gets positions of shape (..., 1, dim) and, for each data tensor of
    shape (N, ...), examples of shape (..., n, ...) that broadcast against them; it returns (...,
    n). `log_prior(x)` maps (..., dim) to (...). A distribution of torch.distributions, of one
    coordinate or of a point, does as well: `sample` then starts every run at its own draw of it.

    With `shared=True` the replicas of a run see the same minibatch, so that their energies are
    strongly correlated and the paired estimator needs a far smaller correction. Different runs
    never share one.
    """

    has_noise = True
    batch_size: int

    def __init__(
        self,
        log_likelihood: Callable[..., Tensor],
        log_prior: Callable[[Tensor], Tensor] | Distribution,
        data: tuple[Tensor, ...],
        dim: int,
        *,
        batch_size: int,
        shared: bool = True,
    ) -> None:
        if not isinstance(data, tuple | list) or not all(isinstance(t, Tensor) for t in data):
            raise TargetError(
                f"data must be a tuple of tensors, such as (features, labels), got {type(data).__name__}"
            )
        data = tuple(data)
        if not data or any(len(t) != len(data[0]) for t in data):
            raise TargetError(
                f"the data tensors must have the same first size, got {[tuple(t.shape) for t in data]}"
            )
        if not 1 <= batch_size <= len(data[0]):
            raise InvalidArgumentError(
                f"batch_size must lie between 1 and the {len(data[0])} examples, got {batch_size}"
            )
        self.prior = log_prior if isinstance(log_prior, Distribution) else None
        self.log_prior = (
            _log_density(log_prior, dim) if isinstance(log_prior, Distribution) else log_prior
        )
        self.log_likelihood, self.data = log_likelihood, data
        self.dim, self.batch_size, self.shares_minibatch = dim, batch_size, shared
        self.n_data = len(data[0])

    def draw_noise(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Noise:
        *lead, rungs, runs = shape
        index_shape = (n, *lead, 1 if self.shares_minibatch else rungs, runs, self.batch_size)
        return {
            "index": torch.randint(
                len(self.data[0]), index_shape, generator=generator, device=generator.device
            )
        }

    def draw_initial(self, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor | None:
        return (
            None
            if self.prior is None
            else draw_points(self.prior, shape, self.dim, generator.initial_seed())
        )

    def energy(self, position: Tensor, noise: Noise) -> Energy:
        index = noise["index"]
        batch = [tensor[index] for tensor in self.data]
        per_example = -self.log_likelihood(position.unsqueeze(-2), *batch)
        expected = (*torch.broadcast_shapes(position.shape[:-1], index.shape[:-1]), self.batch_size)  # type: ignore[no-untyped-call]
        if tuple(per_example.shape) != expected:
            raise TargetError(
                f"log_likelihood must return one value per position and example, shape {expected}, got {tuple(per_example.shape)}"
            )
        prior = self.log_prior(position)
        if not isinstance(prior, Tensor) or prior.shape != position.shape[:-1]:
            got = (
                f"shape {tuple(prior.shape)}" if isinstance(prior, Tensor) else type(prior).__name__
            )
            raise TargetError(
                f"log_prior must return one value per position, shape {tuple(position.shape[:-1])}, got {got}"
            )
        scale = len(self.data[0]) / self.batch_size
        return Energy(scale * per_example.sum(-1) - prior, per_example)

    def check(self, position: Tensor) -> None:
        """Try the likelihood and the prior once, so that a wrong shape is told with all shapes
        involved.
        """
        noise = self.draw_noise(
            torch.Generator(position.device), 1, tuple(position.shape[:-1]), position.dtype
        )
        try:
            self.energy(position, {name: values[0] for name, values in noise.items()})
        except TargetError:
            raise
        except Exception as error:
            shapes = [(*noise["index"].shape[1:], *tensor.shape[1:]) for tensor in self.data]
            raise TargetError(
                f"log_likelihood got positions of shape {(*position.shape[:-1], 1, self.dim)} and data of shapes {shapes}, "
                f"must return {(*position.shape[:-1], self.batch_size)}, and failed with {type(error).__name__}: {error}"
            ) from error

    def full_energy(self, position: Tensor) -> Tensor:
        """Energy over the whole data set, without noise: for references, not for sampling."""
        lead = (1,) * (position.ndim - 1)
        rows = [tensor.view(*lead, *tensor.shape) for tensor in self.data]
        return -self.log_likelihood(position.unsqueeze(-2), *rows).sum(-1) - self.log_prior(
            position
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TallPosterior:
        moved = copy.copy(self)
        moved.data = tuple(
            t.to(device, dtype if t.is_floating_point() else t.dtype) for t in self.data
        )
        return moved

    def __repr__(self) -> str:
        shared = "shared" if self.shares_minibatch else "independent"
        return f"TallPosterior(n_data={self.n_data}, dim={self.dim}, batch_size={self.batch_size}, {shared} minibatches)"


def draw_points(distribution: Distribution, shape: tuple[int, ...], dim: int, seed: int) -> Tensor:
    """Points (*shape, dim) of a distribution of one coordinate, or of a point."""
    of_one_number = not distribution.batch_shape and not distribution.event_shape
    with torch.random.fork_rng(devices=[]):  # distributions take no generator
        torch.manual_seed(seed)
        return distribution.sample((*shape, dim) if of_one_number else shape)


def _log_density(distribution: Distribution, dim: int) -> Callable[[Tensor], Tensor]:
    """Its log density at points (..., dim), without checks of their values, which cannot be
    compiled.
    """
    of_one_number = not distribution.batch_shape and not distribution.event_shape
    # With parameters of their own for each coordinate: the compiler fails on those that are single
    # numbers.
    each = distribution.expand((dim,)) if of_one_number else copy.copy(distribution)
    each._validate_args = False
    return lambda x: each.log_prob(x) if each.event_shape else each.log_prob(x).sum(-1)
