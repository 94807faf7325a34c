"""What a target is, and a user's log density as one.

An energy is a minibatch estimate of the negative log posterior, a SUM over the data. A target draws
its randomness (minibatch indices, energy noise) in blocks before it is needed and is otherwise a
pure function. So the eager and the compiled loop use the same random numbers, and a block can be
drawn again when a run is resumed.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from torchrex.errors import TargetError, is_out_of_memory, require_whole

Noise = Mapping[str, Tensor]
MOST_TRIED = 8  # points of more dimensions than this, when a log density is checked
SAME = 1e-3  # of two values of a log density at one point, but for rounding


class Energy(NamedTuple):
    """Energies of a batch of positions, and the per-example terms where the target has data."""

    total: Tensor  # (...)
    per_example: Tensor | None = None  # (..., n): minus log likelihood of each example
    repeated: Tensor | None = None  # (..., n): the same with other random numbers (dropout)
    prior: Tensor | float = 0.0  # (...): the part of the total that is minus the log prior

    @property
    def data_term(self) -> Tensor:
        """Minus the log likelihood."""
        return self.total - self.prior


class Target(ABC):
    """Base of all targets: positions (..., rungs, runs, dim) have energies (..., rungs, runs)."""

    dim: int
    n_data: int | None = None  # how many examples a minibatch energy stands for
    batch_size: int | None = None  # how many are in a minibatch, where that is known before
    has_noise: bool = False  # are energies only estimates?
    shares_minibatch: bool = False  # do the replicas of a run see the same minibatch?
    # The smallest variance of a coordinate under the prior; infinite if that is not known, None if
    # there is no prior apart from the data.
    prior_variance: float | None = None

    @property
    def has_proper_prior(self) -> bool:
        """Is the prior known to be a law that can be sampled?"""
        return False

    @abstractmethod
    def energy(self, position: Tensor, noise: Noise) -> Energy:
        """Energy at each position, traceable: no branch on values, no random numbers of its own."""

    def energy_and_gradient(self, position: Tensor, noise: Noise) -> tuple[Energy, Tensor]:
        """Energy and its gradient, by automatic differentiation unless a target overrides it."""

        def summed(position: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            energy = self.energy(position, noise)
            terms = {name: term for name, term in energy._asdict().items() if term is not None}
            return energy.total.sum(), {n: t for n, t in terms.items() if isinstance(t, Tensor)}

        gradient, terms = torch.func.grad(summed, has_aux=True)(position)
        return Energy(**terms), gradient

    def prior_gradient(self, position: Tensor) -> Tensor:
        """Gradient of minus the log prior, for targets that have one apart from the data."""
        raise NotImplementedError

    def draw_noise(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Noise:
        """Randomness of `n` evaluations at positions of batch shape `shape`; first axis n."""
        return {}

    def draw_swap_batch(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], size: int
    ) -> Noise:
        """`n` times `size` different examples on which to compare the replicas of a run; all data
        need no choice. Only a target with data has them.
        """
        raise NotImplementedError

    def draw_initial(self, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor | None:
        """Starting points (*shape, dim), draws of the prior; None if there is none to draw from."""
        return None

    def check(self, position: Tensor) -> None:  # noqa: B027 - most targets need none
        """Raise a TargetError if it cannot work at positions (rungs, runs, dim); called once."""

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Target:
        """This target with its tensors on `device`; floating tensors become `dtype`."""
        return self


class LogDensity(Target):
    """Any log density, known up to a constant: `log_density(x)` maps (n, dim) to (n,).

    A function of one point, (dim,) to a scalar, is given with `batched=False` and is vmapped.
    `gradient(x)`, if given, is the gradient of the log density, (n, dim) to (n, dim); otherwise
    autograd computes it.
    """

    def __init__(
        self,
        log_density: Callable[[Tensor], Tensor],
        dim: int,
        *,
        gradient: Callable[[Tensor], Tensor] | None = None,
        batched: bool = True,
    ) -> None:
        require_whole("dim", dim, 1)
        self.dim = dim
        self.log_density = log_density if batched else torch.vmap(log_density)

        def checked(points: Tensor) -> Tensor:
            return nan_where_refused(log_density, points)

        self._checked = checked if batched else torch.vmap(checked)
        self.gradient = gradient if gradient is None or batched else torch.vmap(gradient)
        self._hint = f"If it takes one point of shape ({dim},) at a time, use batched=False."

    def energy(self, position: Tensor, noise: Noise) -> Energy:
        points = position.reshape(-1, self.dim)
        value = self._checked(points)
        self._check("log density", value, points.shape[:1], points)
        return Energy(-value.reshape(position.shape[:-1]))

    def energy_and_gradient(self, position: Tensor, noise: Noise) -> tuple[Energy, Tensor]:
        if self.gradient is None:
            return super().energy_and_gradient(position, noise)
        points = position.reshape(-1, self.dim)
        value = self.gradient(points)
        self._check("gradient", value, points.shape, points)
        return self.energy(position, noise), -value.reshape(position.shape)

    def check(self, position: Tensor) -> None:
        """Try it on some points, not `dim` of them: there a function of one point returns a wrong
        shape.
        """
        n_points = self.dim + 1 if self.dim <= MOST_TRIED else MOST_TRIED
        points = position.reshape(-1, self.dim)[:1].expand(n_points, -1).clone()
        try:
            with torch.enable_grad():
                points.requires_grad_(self.gradient is None)
                values = [self.log_density(points) for _ in range(2)]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {str(error).rstrip('.')}. {self._hint}"
            raise TargetError(
                f"the log density failed on points of shape {tuple(points.shape)}: {reason}"
            ) from error
        self._check("log density", values[0], points.shape[:1], points)
        if self.gradient is None and not values[0].requires_grad:
            raise TargetError(
                "the log density does not depend on its points through autograd; give gradient=..."
            )
        if not torch.equal(values[0].nan_to_num(), values[1].nan_to_num()):
            raise TargetError(
                "the log density gives different values at the same point; put a module into eval "
                "mode, or use Noisy for noise of a known law, TallPosterior for minibatches"
            )
        offsets = torch.linspace(0.0, 1.0, n_points, dtype=points.dtype, device=points.device)
        try:
            with torch.no_grad():  # the first point among others, twice
                first, second = (
                    self._checked(points.detach() + k * offsets[:, None])[0] for k in (1, 2)
                )
        except Exception:  # it may refuse other points
            return
        near = torch.isclose(first, second, rtol=SAME, atol=SAME, equal_nan=True)
        if bool(first.isfinite() & second.isfinite() & ~near):
            raise TargetError(
                "the log density of a point depends on the other points of its batch; sum over the "
                "last axis of x alone, or use batched=False for a function of one point"
            )

    def _check(self, what: str, value: object, expected: torch.Size, points: Tensor) -> None:
        if not isinstance(value, Tensor) or value.shape != expected:
            raise TargetError(
                f"the {what} must return a tensor of shape {tuple(expected)} for points of shape "
                f"{tuple(points.shape)}, got {described_shape(value)}. {self._hint}"
            )

    def __repr__(self) -> str:
        return f"LogDensity({getattr(self.log_density, '__name__', 'log_density')}, dim={self.dim})"


class NotedChecks(TorchFunctionMode):
    """Notes what the checks of torch.distributions find. Their branches go on as if all is well.

    It switches the checks on: torch switches them off in a process that compiles anything.
    """

    changing = threading.Lock()
    entered, before = 0, True

    def __init__(self) -> None:
        super().__init__()
        self.valid: list[Tensor] = []

    def __enter__(self) -> Self:
        kind = type(self)
        with self.changing:
            if not kind.entered:
                kind.before = bool(Distribution._validate_args)
                Distribution.set_default_validate_args(True)
            kind.entered += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        kind = type(self)
        with self.changing:
            kind.entered -= 1
            if not kind.entered:
                Distribution.set_default_validate_args(kind.before)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch._is_all_true, Tensor.__bool__):
            caller = sys._getframe(1)
            where = caller.f_globals.get("__name__", "").startswith("torch.distributions.")
            if where and caller.f_code.co_name in ("__init__", "check", "_validate_sample"):
                self.valid.append(args[0])
                return True
        return func(*args, **(kwargs or {}))


def nan_where_refused(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """The value of `function`, NaN where torch.distributions would raise an error: outside the
    support, or at an impossible parameter. So a step has no branch on values, and can be compiled.
    """
    with NotedChecks() as checks:
        value = function(*args)
    for valid in checks.valid if isinstance(value, Tensor) else ():
        if valid.ndim > value.ndim:
            valid = valid.flatten(value.ndim).all(-1) if value.ndim else valid.all()
        fits = all(m in (1, n) for m, n in zip(valid.shape[::-1], value.shape[::-1], strict=False))
        value = torch.where(valid if fits else valid.all(), value, torch.nan)
    return value


def described_shape(value: object) -> str:
    """For messages: the shape of a tensor, or the type of anything else."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
