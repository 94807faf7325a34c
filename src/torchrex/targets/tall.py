"""Posteriors of tall data from minibatches; Bayesian logistic regression is the standard one."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal, constraints

from torchrex.errors import InvalidArgumentError, TargetError, is_out_of_memory
from torchrex.rng import default_seed
from torchrex.targets.density import Energy, Noise, Target, described_shape, nan_where_refused

MOST_DRAWN = 2**24  # random numbers at once, for different indices
PRIOR_DRAWS = 10_000  # for the variance of a prior that has no formula of it


class TallPosterior(Target):
    """`-log prior(x) - N/n sum_i log_likelihood(x, d_i)` over a minibatch of n of N examples.

    The minibatch is drawn with replacement (Eq. 6). `log_likelihood(x, *batch)` gets positions of
    shape (..., 1, dim) and, for each data tensor of shape (N, ...), examples of shape (..., n, ...)
    that broadcast against them; it returns (..., n). `log_prior(x)` maps (..., dim) to (...). It
    may be a distribution of torch.distributions, of one coordinate or of a point; `sample` then
    starts every run at a draw of it.

    With `shared=True` the replicas of a run see the same minibatch. Their energies are strongly
    correlated, and the paired estimator needs a far smaller correction. Runs never share one.
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
            kinds = [type(t).__name__ for t in data] if isinstance(data, tuple | list) else data
            kinds = kinds if isinstance(kinds, list) else type(data).__name__
            raise TargetError(f"data must be a tuple of tensors, got {kinds}")
        if not data or any(len(t) != len(data[0]) for t in data):
            shapes = [tuple(t.shape) for t in data]
            raise TargetError(f"the data tensors must have the same first size, got {shapes}")
        if not 1 <= batch_size <= len(data[0]):
            raise InvalidArgumentError(f"batch_size must be in 1..{len(data[0])}, got {batch_size}")
        self.prior: Distribution | None = None
        self._prior_variance = math.inf
        if isinstance(log_prior, Distribution):
            point = (*log_prior.batch_shape, *log_prior.event_shape)
            if point not in ((), (dim,)):
                raise TargetError(
                    f"the prior must be of one coordinate or of {dim} (dim={dim}), got a "
                    f"{type(log_prior).__name__} of shape {point}"
                )
            self._prior_variance = _least_variance(log_prior)
            self.prior, log_prior = log_prior, _log_density(log_prior, dim)
        self.log_prior = log_prior
        self.log_likelihood, self.data, self.n_data = log_likelihood, tuple(data), len(data[0])
        self.dim, self.batch_size, self.shares_minibatch = dim, batch_size, shared

    @property
    def prior_variance(self) -> float:  # type: ignore[override] # known by the prior
        return self._prior_variance

    @property
    def has_proper_prior(self) -> bool:
        return self.prior is not None

    def draw_noise(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Noise:
        *lead, rungs, runs = shape
        of = (n, *lead, 1 if self.shares_minibatch else rungs, runs, self.batch_size)
        n_data = len(self.data[0])
        return {"index": torch.randint(n_data, of, generator=generator, device=generator.device)}

    def draw_swap_batch(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], size: int
    ) -> Noise:
        if size == len(self.data[0]):
            return {}
        index = different_indices(generator, n * shape[-1], len(self.data[0]), size)
        return {"index": index.view(n, 1, shape[-1], size)}

    def draw_initial(self, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor | None:
        if self.prior is None:
            return None
        return draw_points(self.prior, shape, self.dim, generator.initial_seed())

    def energy(self, position: Tensor, noise: Noise) -> Energy:
        at, index = position.shape[:-1], noise.get("index")
        if index is None:  # all data
            batch = [tensor.view(*(1 for _ in at), *tensor.shape) for tensor in self.data]
            n, lead = len(self.data[0]), at
        else:
            batch, n = [tensor[index] for tensor in self.data], index.shape[-1]
            lead = torch.broadcast_shapes(at, index.shape[:-1])  # type: ignore[no-untyped-call]
        per_example = -nan_where_refused(self.log_likelihood, position.unsqueeze(-2), *batch)
        expected = (*lead, n)
        if tuple(per_example.shape) != expected:
            raise TargetError(
                f"log_likelihood must return one value per position and example, shape {expected}, "
                f"got {tuple(per_example.shape)}"
            )
        prior = nan_where_refused(self.log_prior, position)
        if not isinstance(prior, Tensor) or prior.shape != at:
            raise TargetError(
                f"log_prior must return one value per position, shape {tuple(at)}, "
                f"got {described_shape(prior)}"
            )
        total = len(self.data[0]) / n * per_example.sum(-1) - prior
        return Energy(total, per_example, prior=-prior)

    def prior_gradient(self, position: Tensor) -> Tensor:
        log_prior = functools.partial(nan_where_refused, self.log_prior)
        gradient: Tensor = torch.func.grad(lambda x: log_prior(x).sum())(position)
        return -gradient

    def check(self, position: Tensor) -> None:
        """Evaluate once, so that the error of a wrong shape names all shapes."""
        at = tuple(position.shape[:-1])
        noise = self.draw_noise(torch.Generator(position.device), 1, at, position.dtype)
        try:
            self.energy(position, {name: values[0] for name, values in noise.items()})
        except TargetError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            shapes = [(*noise["index"].shape[1:], *tensor.shape[1:]) for tensor in self.data]
            raise TargetError(
                f"log_likelihood got positions of shape {(*at, 1, self.dim)} and data of shapes "
                f"{shapes}, must return {(*at, self.batch_size)}, and failed with "
                f"{type(error).__name__}: {error}"
            ) from error

    def full_energy(self, position: Tensor) -> Tensor:
        """Energy over all data, without noise: for references, not for sampling."""
        return self.energy(position, {}).total

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TallPosterior:
        moved = copy.copy(self)
        moved.data = tuple(
            t.to(device, dtype if t.is_floating_point() else t.dtype) for t in self.data
        )
        return moved

    def __repr__(self) -> str:
        shared = "shared" if self.shares_minibatch else "independent"
        return (
            f"TallPosterior(n_data={self.n_data}, dim={self.dim}, batch_size={self.batch_size}, "
            f"{shared} minibatches)"
        )


def different_indices(generator: torch.Generator, rows: int, n_data: int, size: int) -> Tensor:
    """(rows, size): in each row different numbers below `n_data`, every set of them as likely."""
    device = generator.device
    if 4 * size > n_data:
        most = max(1, MOST_DRAWN // n_data)
        parts = [min(most, rows - first) for first in range(0, rows, most)]
        orders = [
            torch.rand(n, n_data, generator=generator, device=device).argsort(1) for n in parts
        ]
        return (
            torch.cat([order[:, :size] for order in orders]) if orders else _no_rows(size, device)
        )
    # With replacement, and more than needed; then the first `size` different ones of each row.
    drawn = torch.randint(n_data, (rows, size + size // 2 + 8), generator=generator, device=device)
    ordered, place = torch.sort(drawn, dim=1, stable=True)
    again = torch.zeros_like(drawn, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    is_new = torch.empty_like(again).scatter_(1, place, ~again)
    count = is_new.cumsum(1)
    enough = count[:, -1] >= size
    chosen = drawn[enough][(is_new & (count <= size))[enough]].view(-1, size)
    if bool(enough.all()):
        return chosen
    return torch.cat([chosen, different_indices(generator, rows - len(chosen), n_data, size)])


def _no_rows(size: int, device: torch.device) -> Tensor:
    return torch.empty(0, size, dtype=torch.int64, device=device)


def draw_points(distribution: Distribution, shape: tuple[int, ...], dim: int, seed: int) -> Tensor:
    """Points (*shape, dim) of a distribution of one coordinate, or of a point."""
    with default_seed(seed, devices=[]):  # distributions take no generator
        return distribution.sample((*shape, dim) if _of_one_number(distribution) else shape)


def _log_density(distribution: Distribution, dim: int) -> Callable[[Tensor], Tensor]:
    """Its log density at points (..., dim)."""
    # One parameter per coordinate: the compiler fails on parameters that are single numbers.
    each = distribution.expand((dim,)) if _of_one_number(distribution) else copy.copy(distribution)
    # Outside its support many a formula gives a number. All real numbers need no check.
    try:
        support = each.support
    except NotImplementedError:  # a user's class need not say it
        support = constraints.real
    each._validate_args = getattr(support, "base_constraint", support) is not constraints.real
    return lambda x: each.log_prob(x) if each.event_shape else each.log_prob(x).sum(-1)


def _least_variance(distribution: Distribution) -> float:
    """Of a coordinate, or of the narrowest direction; infinite where it is not known."""
    try:
        if isinstance(distribution, MultivariateNormal):
            return float(torch.linalg.eigvalsh(distribution.covariance_matrix).min())
        return float(distribution.variance.min().nan_to_num(nan=math.inf, posinf=math.inf))
    except NotImplementedError:  # a transformed one, for example
        return _least_drawn_variance(distribution)


def _least_drawn_variance(distribution: Distribution) -> float:
    try:
        with default_seed(0, devices=[]):
            points = distribution.sample(torch.Size([PRIOR_DRAWS])).double()
    except NotImplementedError:
        return math.inf
    away = (points - points.mean(0)).reshape(PRIOR_DRAWS, -1)
    covariance = away.T @ away / PRIOR_DRAWS
    if not bool(covariance.isfinite().all()):
        return math.inf
    return float(torch.linalg.eigvalsh(covariance)[0])


def _of_one_number(distribution: Distribution) -> bool:
    return not distribution.batch_shape and not distribution.event_shape


def logistic_regression(
    features: Tensor,
    labels: Tensor,
    *,
    prior_precision: float = 1.0,
    batch_size: int = 256,
    shared: bool = True,
) -> TallPosterior:
    """Posterior of weights w with labels in {0, 1} and P(y = 1) = sigmoid(x . w).

    The prior is N(0, 1 / prior_precision); `sample` starts its runs at draws of it.
    """
    signs = 2.0 * labels.to(features.dtype) - 1.0

    def log_likelihood(weights: Tensor, x: Tensor, sign: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(sign * (x * weights).sum(-1))

    # Zero-dim doubles neither raise nor lower the precision of the points.
    mean, deviation = torch.tensor([0.0, 1.0 / math.sqrt(prior_precision)], dtype=torch.float64)
    data, dim = (features, signs), features.shape[1]
    prior = Normal(mean, deviation)
    return TallPosterior(log_likelihood, prior, data, dim, batch_size=batch_size, shared=shared)


def simulate_logistic(n_data: int, dim: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features (the first column is 1), labels, and the weights that made them."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n_data, dim, generator=generator, dtype=torch.float64)
    features[:, 0] = 1.0
    weights = torch.randn(dim, generator=generator, dtype=torch.float64)
    labels = torch.bernoulli(torch.sigmoid(features @ weights), generator=generator)
    return features, labels, weights


def laplace(
    target: TallPosterior, *, start: Tensor | None = None, iterations: int = 50
) -> tuple[Tensor, Tensor]:
    """Mode and covariance of the full-data Laplace approximation, by Newton's method in float64."""
    target = target.to("cpu", torch.float64)
    x = torch.zeros(target.dim, dtype=torch.float64) if start is None else start.double()
    for _ in range(iterations):
        gradient = torch.func.grad(target.full_energy)(x)
        step = torch.linalg.solve(torch.func.hessian(target.full_energy)(x), gradient)
        x = x - step
        if float(step.abs().max()) < 1e-12:
            break
    return x, torch.linalg.inv(torch.func.hessian(target.full_energy)(x))
