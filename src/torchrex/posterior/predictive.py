"""Predictions of any output: mean and variance over all draws, quantiles from the kept ones.

With a `likelihood` p(y | output) it is the observation y that is predicted, otherwise the output:

    mean        E[y] = mean over draws of E[y | output]
    epistemic   variance over draws of E[y | output]: how much the draws disagree
    aleatoric   mean over draws of Var[y | output]: the noise that no data remove
    variance    epistemic + aleatoric, the law of total variance

These four use every draw. Variances divide by the number of draws: they are those of the mixture.
Quantiles and metrics come from K <= `keep` draws, and each draw has the same chance to be among
them. The standard error of a quantile of the output is sqrt(q (1 - q) / K) / density if draws are
independent. The nll lies above that of all draws by a term of order 1/K if K is smaller than their
number; the CRPS does not.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent

from torchrex.durable import one_line
from torchrex.errors import InvalidArgumentError
from torchrex.posterior.prediction import Pass
from torchrex.rng import default_seed, derive_seed

Likelihood = Callable[[Any], Distribution]

HALVINGS = 50  # of the interval that holds a quantile
SHARE = 0.9  # of the interval in `metrics`
VALUES, AT_LEAST = 2**17, 200  # observations drawn for scores: in all, and of each number


@dataclass(repr=False, eq=False)
class Predictive:
    """The distribution of an output over draws, or with a likelihood of an observation.

    Tensors are (n, ...), float64, in the order of the data.
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor | None  # None without a likelihood
    targets: Tensor | None  # of the data, if they have any
    n_draws: int
    outputs: Sequence[Any]  # of the kept draws, each as the likelihood gets it
    likelihood: Likelihood | None

    @property
    def variance(self) -> Tensor:
        """Variance of what is predicted: `epistemic`, plus `aleatoric` if there is one."""
        return self.epistemic if self.aleatoric is None else self.epistemic + self.aleatoric

    @functools.cached_property
    def draws(self) -> Tensor:
        """(K, n, ...): the kept outputs; with a likelihood one observation drawn from each of them,
        always the same one.
        """
        if self.likelihood is None:
            return torch.stack(list(self.outputs))
        with default_seed(derive_seed(0, "predictive")):
            return torch.stack([part.sample() for part in self._parts])

    def quantile(self, q: float) -> Tensor:
        """The value below which lies a share `q` of the probability, for each number by itself.

        With a likelihood it solves  (1/K) sum_k F(y | output_k) = q  where torch has the F of the
        likelihood. Elsewhere it is the rank q (K + 1) among the K sorted outputs, between two of
        them a straight line; with a likelihood (StudentT, Poisson) among 200 or more observations,
        as many from each output. No quantile lies outside of them.
        """
        if not 0 < q < 1:
            raise InvalidArgumentError(f"q must lie between 0 and 1, got {q!r}")
        with contextlib.suppress(NotImplementedError, ValueError):
            level = torch.tensor(q, dtype=torch.float64, device=self.mean.device)
            # The quantile of a mixture lies between the least and the largest of its parts.
            ends = torch.stack([part.icdf(level) for part in self._parts])
            lower, upper = ends.min(0).values, ends.max(0).values
            for _ in range(HALVINGS):
                middle = (lower + upper) / 2
                is_below = self._below(middle) < q
                lower = torch.where(is_below, middle, lower)
                upper = torch.where(is_below, upper, middle)
            return (lower + upper) / 2
        ordered = self._values.flatten(0, 2).sort(0).values
        last = len(ordered) - 1
        rank = min(max(q * (last + 2) - 1, 0.0), float(last))
        low = int(rank)
        return ordered[low].lerp(ordered[min(low + 1, last)], rank - low)

    def interval(self, share: float = SHARE) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval that holds this share of the probability."""
        if not 0 < share < 1:
            raise InvalidArgumentError(f"share must lie between 0 and 1, as 0.9, got {share!r}")
        return self.quantile((1 - share) / 2), self.quantile((1 + share) / 2)

    def metrics(self) -> dict[str, float]:
        """How well the targets y are predicted; numbers of one example count one by one.

        rmse         sqrt of the mean of (mean - y)^2, of all draws
        nll          mean over examples of -log (1/K) sum_k p(y | output_k); needs a likelihood
        coverage_90  share of y in `interval(0.9)`
        crps         mean of E|Y - y| - E|Y - Y'| / 2 for independent Y, Y' of the distribution
                     over all draws (NaN if one of several is kept)
        """
        y = self._targets()
        found = {"rmse": (self.mean - y).square().mean().sqrt()}
        if self.likelihood is not None:
            parts = self._parts
            try:
                for part in parts:
                    part._validate_sample(y)  # also where validation is off
                each = [part.log_prob(y).reshape(len(y), -1).sum(1) for part in parts]
            except ValueError as error:
                reason = one_line(error)
                raise InvalidArgumentError(f"the likelihood refuses targets: {reason}") from None
            found["nll"] = (math.log(len(each)) - torch.stack(each).logsumexp(0)).mean()
        found["coverage_90"] = self._inside(y).double().mean()
        found["crps"] = crps(self._values, y, self.n_draws).mean()
        numbers = torch.stack(list(found.values())).tolist()
        return dict(zip(found, numbers, strict=True))

    def _targets(self) -> Tensor:
        if self.targets is None:
            raise InvalidArgumentError(
                "metrics need targets: give batches (x, y), or name the target of dicts by "
                "target_key=..."
            )
        y = self.targets.to(self.mean.device).double()
        if y.shape != self.mean.shape:
            raise InvalidArgumentError(
                f"targets have shape {tuple(y.shape)} and predictions {tuple(self.mean.shape)}; "
                "give both the same shape, for example by nn.Flatten(0) at the end of the model"
            )
        if not bool(y.isfinite().all()):
            raise InvalidArgumentError("targets are NaN or infinite; leave these examples out")
        return y

    @functools.cached_property
    def _parts(self) -> list[Distribution]:
        """p(y | output) of each kept draw, of each number by itself where they are independent."""
        if self.likelihood is None:
            raise NotImplementedError
        parts: list[Any] = [self.likelihood(output) for output in self.outputs]
        while isinstance(parts[0], Independent):
            parts = [part.base_dist for part in parts]
        return parts

    @functools.cached_property
    def _values(self) -> Tensor:
        """(K, 2, M, n, ...): of each kept draw two independent sets of M observations, always the
        same ones; without a likelihood (K, 1, 1, n, ...), the outputs.
        """
        if self.likelihood is None:
            return self.draws[:, None, None]
        parts = self._parts
        n_sets = 2 * len(parts)
        m = max(-(-AT_LEAST // n_sets), VALUES // (n_sets * self.mean.numel()))
        first = torch.arange(m, dtype=torch.float64).reshape(-1, *[1] * self.mean.ndim)

        def drawn(part: Distribution) -> Tensor:
            try:  # one value from each m-th part of the probability
                level = (first + torch.rand(2, m, *self.mean.shape, dtype=torch.float64)) / m
                found: Tensor = part.icdf(level.to(self.mean.device))
                return found
            except (NotImplementedError, ValueError):
                return part.sample(torch.Size((2, m)))

        with default_seed(derive_seed(0, "predictive.values")):
            return torch.stack([drawn(part) for part in parts])

    def _below(self, y: Tensor) -> Tensor:
        """The probability below y, for each number by itself."""
        below: Tensor = torch.stack([part.cdf(y) for part in self._parts]).mean(0)
        return below

    def _inside(self, y: Tensor) -> Tensor:
        """Is it in the interval of `SHARE`? The probability below it says so without a search."""
        with contextlib.suppress(NotImplementedError, ValueError):
            return (self._below(y) - 0.5).abs() <= SHARE / 2
        lower, upper = self.interval()
        return (lower <= y) & (y <= upper)

    def __repr__(self) -> str:
        what = "an output" if self.likelihood is None else "an observation"
        kept = f"{self.n_draws:,} draws, {len(self.outputs)} kept"
        return f"Predictive({what} of shape {tuple(self.mean.shape)}, {kept})"


def crps(values: Tensor, targets: Tensor, n_draws: int) -> Tensor:
    """Continuous ranked probability score of n draws for targets (...); smaller is better. `values`
    (K, sets, M, ...) are observations of K of the draws, in independent sets.

        mean |x - y|  -  (1 - 1/n) B / 2  -  W / (2 n)

    B is the mean of |x - x'| over pairs of different draws, W over two sets of the same draw, and 0
    for a single value. So it is unbiased for the mixture of all n draws, whatever K >= 2 and M.
    """
    k, n_sets, m = values.shape[:3]
    of_draws, of_sets = values.flatten(1, 2), values.flatten(0, 1)
    within = _differences(of_draws, 1).sum(0)
    score: Tensor = (values - targets).flatten(0, 2).abs().mean(0)
    if n_draws > 1:
        between = _differences(values.flatten(0, 2), 0) - within
        pairs = k * (k - 1) * (n_sets * m) ** 2
        score = score - (1 - 1 / n_draws) * between / (2 * pairs or math.nan)
    if n_sets > 1:
        of_pairs = (within - _differences(of_sets, 1).sum(0)) / (2 * k * m**2)
        score = score - of_pairs / (2 * n_draws)
    return score


def _differences(values: Tensor, dim: int) -> Tensor:
    """The sum of |x - x'| over all ordered pairs along `dim`, without a matrix of the pairs."""
    n = values.shape[dim]
    weights = 2.0 * torch.arange(1, n + 1, dtype=values.dtype, device=values.device) - (n + 1)
    ordered = values.sort(dim).values
    found: Tensor = 2.0 * torch.tensordot(ordered.movedim(dim, -1), weights, dims=1)
    return found


def terms_of(found: Pass, likelihood: Likelihood | None) -> dict[str, Tensor]:
    """What is averaged over draws, (models, n, ...): outputs, and moments of the observation."""
    terms = {f"output.{name}": value.double() for name, value in found.values.items()}
    if likelihood is None:
        return terms
    rows = zip(*found.values.values(), strict=True)
    draws = [dict(zip(found.values, row, strict=True)) for row in rows]
    parts = [likelihood(rebuilt(found.kind, draw)) for draw in draws]
    if not all(isinstance(part, Distribution) for part in parts):
        raise InvalidArgumentError(
            "likelihood must return a torch.distributions.Distribution of the observations, "
            f"got {type(parts[0]).__name__}"
        )
    means, variances = ([getattr(p, of).double() for p in parts] for of in ("mean", "variance"))
    return {**terms, "observation": torch.stack(means), "noise": torch.stack(variances)}


def rebuilt(kind: str, values: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """One draw of the outputs in the form in which the model gave them, in float64."""
    here = {name: value.to(device, torch.float64) for name, value in values.items()}
    if kind == "dict":
        return here
    return tuple(here.values()) if kind == "tuple" else next(iter(here.values()))
