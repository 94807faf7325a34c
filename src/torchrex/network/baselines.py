"""Baselines on the engine and the data of exchange: deep ensembles, SWAG, a ladder without swaps.

Each is a `ModuleExchange` that `train` advances, so seeds, checkpoints, observers, budgets and
exact resume are those of any run. The draws of deep ensembles and of SWAG belong to the last step:
`train` feeds an object of this file, which passes them on to the user's average.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from torchrex.errors import CheckpointError, InvalidArgumentError, known_arguments, require_whole
from torchrex.exchange import KnownVariance, Ladder, NoSwaps, RuleOptions
from torchrex.network.group import swap_batches
from torchrex.network.replicas import ModuleEnsemble, copied, evaluating
from torchrex.network.run import ModuleExchange
from torchrex.network.step import size_of
from torchrex.network.training import Outcome, train
from torchrex.posterior import PosteriorAverage
from torchrex.rng import default_seed, derive_seed
from torchrex.schedules import Schedule, cyclical
from torchrex.targets import Batch, DeviceLoader

OF_RUN = ("seed", "compiled", "divergence", "deterministic")
OF_TRAIN = [name for name in list(inspect.signature(train).parameters)[3:] if name != "average"]


class Cost(NamedTuple):
    """What a method has spent, in all calls."""

    examples: float = math.nan  # evaluated by all replicas: moves, swaps, BatchNorm, tuning
    gradients: float = math.nan  # gradient passes on a minibatch, of all replicas
    seconds: float = math.nan  # wall time, with predictions and checkpoints


@dataclass(frozen=True)
class MethodResult:
    """What a method predicts, and what it has cost; `torchrex.compare` makes a table of several."""

    average: PosteriorAverage
    cost: Cost = field(default_factory=Cost)
    seed: int = 0
    name: str = ""
    rung: int | None = 0  # whose draws are the answer; None pools all rungs
    status: str = "finished"  # as in `Outcome`

    @staticmethod
    def of(
        run: ModuleExchange,
        outcome: Outcome,
        average: PosteriorAverage,
        *,
        name: str = "exchange",
        rung: int | None = 0,
        more_examples: float = 0.0,
    ) -> MethodResult:
        """Of a run that `train` has advanced; `more_examples=tuned.examples` counts tuning too."""
        examples, gradients = run.n_examples + more_examples, run.n_steps * run.n_rungs
        cost = Cost(examples, gradients, outcome.total_seconds)
        return MethodResult(average, cost, run.streams.seed, name, rung, outcome.status)

    def of_rung(self, rung: int | None) -> MethodResult:
        """The same run at the same cost, with the draws of that rung alone as the answer."""
        return dataclasses.replace(self, rung=rung)

    def metrics(self) -> dict[str, float]:
        if self.status != "finished":
            raise InvalidArgumentError(
                f"{self.name or 'the method'} is {self.status}, not finished; make the same call "
                "again with the same checkpoints, and it goes on"
            )
        return self.average.metrics(self.rung)

    def __repr__(self) -> str:
        answer = "all rungs pooled" if self.rung is None else f"rung {self.rung}"
        return (
            f"MethodResult({self.name!r}, {self.average.n_draws} draws of {answer}, "
            f"{self.cost.examples:,.0f} examples, seed {self.seed}, {self.status})"
        )


@known_arguments(*OF_RUN, *OF_TRAIN)
def deep_ensemble(
    ensemble: ModuleEnsemble,
    data: Any,
    *,
    n_members: int,
    n_steps: int,
    lr: float,
    average: PosteriorAverage,
    decay: Schedule | None = None,
    **options: Any,
) -> MethodResult:
    """Networks that descend independently, each from its own initial weights, their predictions
    averaged (Lakshminarayanan et al. 2017).

    `ensemble` says how members are made, what they descend and by which sampler; at temperature 0
    SGHMC is momentum SGD. `lr` is on the scale of the summed energy, as in a ladder, and falls to 0
    by a cosine, or by `decay`. Members see the same minibatches, as replicas do; an ensemble with
    `shared_batches=False` gives each its own. `average` takes one draw of each member, after the
    last step. `options` are those of `ModuleExchange` and `train`.
    """
    require_whole("n_members", n_members, 1)
    _require(ensemble, average, n_steps, n_members)
    made = dataclasses.replace(ensemble, initial="independent")
    ladder = Ladder.descent(lr, decay=decay or cyclical(n_steps), n_rungs=n_members)

    def members(run: ModuleExchange) -> Iterator[_OneDraw]:
        for rung in range(n_members):
            yield _OneDraw(partial(run.predict, rung=rung), partial(run.live_module_at, rung))

    drawn = _AtTheEnd(average, n_steps, members)
    return _trained(made, ladder, data, n_steps, drawn, "deep ensemble", options)


@known_arguments(*OF_RUN, *OF_TRAIN)
def swag(
    ensemble: ModuleEnsemble,
    data: Any,
    *,
    n_steps: int,
    lr: float,
    average: PosteriorAverage,
    descent: int | None = None,
    constant_lr: float | None = None,
    every: int | None = None,
    rank: int = 20,
    n_draws: int = 30,
    **options: Any,
) -> MethodResult:
    """SWAG: a Gaussian around the weights that SGD visits at a constant lr (Maddox et al. 2019).

        w = mean + sqrt(diag / 2) z + D z' / sqrt(2 (K - 1)),    z, z' standard normal

    For `descent` steps (three quarters of `n_steps`) the lr falls by a cosine from `lr` to
    `constant_lr` (half of it) and stays there. Then every `every` steps (a pass over the data) the
    weights enter the mean, the variances diag and, for the latest K = `rank` of them, the
    deviations D from the mean so far. After the last step `n_draws` networks are drawn, BatchNorm's
    statistics are computed anew for each by a pass over `data`, and `average` takes a draw of each.
    `options` are those of `ModuleExchange` and `train`.
    """
    require_whole("n_draws", n_draws, 1)
    _require(ensemble, average, n_steps, n_draws)
    size = getattr(data, "batch_size", None) or ensemble.n_data
    every = max(1, ensemble.n_data // size) if every is None else every
    descent = 3 * n_steps // 4 if descent is None else descent
    for name, value, least in (("descent", descent, 0), ("every", every, 1), ("rank", rank, 2)):
        require_whole(name, value, least)
    constant_lr = lr / 2 if constant_lr is None else constant_lr
    if (n_steps - descent) // every < 2:
        raise InvalidArgumentError(
            f"SWAG needs the weights of 2 steps or more, but between descent={descent} and "
            f"n_steps={n_steps} fewer are multiples of every={every}; lower every or descent"
        )
    if not (lr > 0 and constant_lr > 0):
        raise InvalidArgumentError(
            f"lr and constant_lr must be positive, got {lr!r} and {constant_lr!r}"
        )
    ratio = constant_lr / lr
    falling = cyclical(max(1, descent), end=ratio)
    ladder = Ladder.descent(lr, decay=lambda step: falling(step) if step < descent else ratio)
    drawn = _Swag(average, n_steps, data, descent=descent, every=every, rank=rank, n_draws=n_draws)
    return _trained(ensemble, ladder, data, n_steps, drawn, "SWAG", options)


@known_arguments(*RuleOptions.__annotations__, *OF_RUN, *OF_TRAIN)
def without_swaps(
    ensemble: ModuleEnsemble,
    ladder: Ladder,
    data: Any,
    *,
    n_steps: int,
    average: PosteriorAverage,
    **options: Any,
) -> MethodResult:
    """The replicas of a ladder that never exchange, all rungs pooled; `result.of_rung(0)` is rung 0
    alone. `average` must record every rung.

    `options` are the rules of the run that it is compared with (without its pairing), and those of
    `ModuleExchange` and `train`. Nothing is spent on swaps, so at equal cost it may take more steps
    than a run with a swap batch.
    """
    _require_average(average)
    if not isinstance(ladder, Ladder):
        raise InvalidArgumentError(f"ladder must be a Ladder or tuned.ladder, got {ladder!r}")
    if set(average.rungs) != set(range(ladder.n_rungs)):
        raise InvalidArgumentError(
            f"all {ladder.n_rungs} rungs are pooled, but the average records {average.rungs}; give "
            f"PosteriorAverage(..., rungs=range({ladder.n_rungs}))"
        )
    rules = {name: options.pop(name) for name in RuleOptions.__annotations__ if name in options}
    rules["pairing"] = NoSwaps()
    return _trained(ensemble, ladder, data, n_steps, average, "no swaps", options, rules)


def _trained(
    ensemble: ModuleEnsemble,
    ladder: Ladder,
    data: Any,
    n_steps: int,
    average: Any,
    name: str,
    options: dict[str, Any],
    rules: Mapping[str, Any] | None = None,
) -> MethodResult:
    if rules is None:
        rules = {"pairing": NoSwaps(), "noise": KnownVariance(), "momentum": "keep"}
    own = {key: options.pop(key) for key in OF_RUN if key in options}
    run = ModuleExchange(ensemble, ladder, **own, **rules)
    outcome = train(run, data, n_steps, average=[average], **options)
    of_draws = isinstance(average, _AtTheEnd)
    return MethodResult.of(
        run,
        outcome,
        average.average if of_draws else average,
        name=name,
        rung=0 if of_draws else None,
        more_examples=average.examples if of_draws else 0,
    )


def _require(ensemble: Any, average: Any, n_steps: int, n_draws: int) -> None:
    if not isinstance(ensemble, ModuleEnsemble):
        raise InvalidArgumentError(
            f"a baseline takes ModuleEnsemble(make_model, energy, sampler), got {ensemble!r}"
        )
    if ensemble.shared:
        raise InvalidArgumentError(
            f"shared={tuple(ensemble.shared)} ties the networks together; leave it out"
        )
    require_whole("n_steps", n_steps, n_draws)
    _require_average(average)
    if average.n_draws or tuple(average.rungs) != (0,):
        raise InvalidArgumentError(
            f"the draws of the networks go to rung 0 of an empty average, got {average!r}; "
            "make another PosteriorAverage(data)"
        )


def _require_average(average: Any) -> None:
    if not all(hasattr(average, name) for name in ("update", "metrics", "rungs", "n_draws")):
        raise InvalidArgumentError(f"average must be a PosteriorAverage(data), got {average!r}")


@dataclass
class _OneDraw:
    """One network, as an average sees a run."""

    output: Callable[[Batch], Tensor]
    module: Callable[[], nn.Module]
    n_steps: int = 0
    n_rungs: int = 1

    def predict(self, batch: Batch, rung: int = 0) -> Tensor:
        return self.output(batch)

    def live_module_at(self, rung: int) -> nn.Module:
        return self.module()


class _AtTheEnd:
    """An average for `train` whose draws all belong to the last step; for the rest it is the
    user's average.
    """

    burn_in = 0

    def __init__(
        self,
        average: PosteriorAverage,
        n_steps: int,
        networks: Callable[[ModuleExchange], Iterable[_OneDraw]],
    ) -> None:
        self.average, self.every, self._end = average, n_steps, n_steps
        self._networks = networks
        self._last_step = -1
        self.examples = 0  # evaluated to make the draws

    def __getattr__(self, name: str) -> Any:
        return getattr(self.average, name)

    def update(self, run: ModuleExchange) -> bool:
        """Returns whether the user's average has its draws now."""
        if run.n_steps != self._end or self._last_step == self._end:
            return False
        # The user's average counts by its own rule, so every network comes at a step that is due.
        for k, network in enumerate(self._networks(run), start=1):
            network.n_steps = self.average.burn_in + k * self.average.every
            self.average.update(network)
        self._last_step = self._end
        return True

    def state_dict(self) -> dict[str, Any]:
        done = {"last_step": self._last_step, "examples": self.examples}
        return {**done, "average": self.average.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            last_step, examples = int(state["last_step"]), int(state["examples"])
            average = state["average"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"not the state of this baseline ({error!r})") from None
        self.average.load_state_dict(average)
        self._last_step, self.examples = last_step, examples


class _Swag(_AtTheEnd):
    """Moments of the weights at exact steps, and the draws from them."""

    def __init__(
        self,
        average: PosteriorAverage,
        n_steps: int,
        data: Any,
        *,
        descent: int,
        every: int,
        rank: int,
        n_draws: int,
    ) -> None:
        super().__init__(average, n_steps, self._drawn_networks)
        self._data = data
        self.burn_in, self.every, self._rank, self._wanted = descent, every, rank, n_draws
        self.moments: Moments | None = None

    def update(self, run: ModuleExchange) -> bool:
        step = run.n_steps
        if step > self.burn_in and (step - self.burn_in) % self.every == 0:
            weights = run.ensemble.position[0]
            self.moments = self.moments or Moments.start(weights, self._rank)
            self.moments.add(weights)
        return super().update(run)

    def _drawn_networks(self, run: ModuleExchange) -> Iterator[_OneDraw]:
        assert self.moments is not None
        layout, energy = run.ensemble.layout, run.ensemble.energy
        module = copied(run.live_module_at(0))
        named, row = dict(module.named_parameters()), torch.empty_like(run.ensemble.position[0])

        def output(batch: Batch) -> Any:
            with evaluating(module), run.ensemble.casting():
                given = energy.output(module, run.to_device(batch))
            return given.float() if given.dtype == torch.bfloat16 else given

        for k in range(self._wanted):
            generator = torch.Generator().manual_seed(derive_seed(run.streams.seed, f"swag.{k}"))
            row.copy_(self.moments.draw(generator))
            for name, view in layout.views(row).items():
                named[name].data.copy_(view)
            self.examples += renew_batchnorm(run, module, self._data, k)
            yield _OneDraw(output, lambda: module)

    def _settings(self) -> dict[str, int]:
        names = {"descent": self.burn_in, "every": self.every, "rank": self._rank}
        return {**names, "n_draws": self._wanted}

    def state_dict(self) -> dict[str, Any]:
        moments = None if self.moments is None else vars(self.moments.copy())
        return {**super().state_dict(), "settings": self._settings(), "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("settings") != self._settings():
            raise CheckpointError(
                f"the state is of SWAG with {state.get('settings')}, this is {self._settings()}"
            )
        super().load_state_dict(state)
        moments = state["moments"]
        self.moments = None if moments is None else Moments(**moments).copy()


@dataclass
class Moments:
    """Mean and variances of weights that arrive one by one, and the latest deviations from the mean
    so far: after the n-th, mean_n and w_n - mean_n.
    """

    n: int
    mean: Tensor  # (d,), float64
    squares: Tensor  # (d,), float64: sum of squared deviations from the mean
    deviations: Tensor  # (rank, d); row n % rank is the next to be written

    @staticmethod
    def start(weights: Tensor, rank: int) -> Moments:
        zeros = torch.zeros_like(weights, dtype=torch.float64)
        return Moments(0, zeros, zeros.clone(), weights.new_zeros(rank, len(weights)))

    def copy(self, device: torch.device | None = None) -> Moments:
        tensors = (self.mean, self.squares, self.deviations)
        return Moments(self.n, *(tensor.to(device, copy=True) for tensor in tensors))

    def add(self, weights: Tensor) -> None:
        if self.mean.device != weights.device:  # of a state
            self.__dict__ |= vars(self.copy(weights.device))
        self.n += 1
        before = weights.double() - self.mean
        self.mean += before / self.n
        deviation = weights.double() - self.mean
        self.squares += before * deviation
        self.deviations[(self.n - 1) % len(self.deviations)] = deviation

    def draw(self, generator: torch.Generator) -> Tensor:
        """One draw, (d,): half of its covariance is diagonal, half of low rank."""
        kept = self.deviations[: min(self.n, len(self.deviations))]
        device = self.mean.device
        z = torch.randn(len(self.mean), generator=generator, dtype=torch.float64).to(device)
        z_low = torch.randn(len(kept), generator=generator, dtype=torch.float64).to(device)
        low_rank = (z_low.to(kept.dtype) @ kept).double() / math.sqrt(2 * (len(kept) - 1))
        return self.mean + (self.squares / (2 * self.n)).sqrt() * z + low_rank


def renew_batchnorm(run: ModuleExchange, module: nn.Module, data: Any, k: int) -> int:
    """Compute the statistics of BatchNorm anew by one pass over the data, in training mode; the
    number of examples, 0 without such layers. The position in the data stays.
    """
    # torch's update_bn puts frozen layers into training mode and knows batches (x, y) alone.
    layers = [
        part
        for part in module.modules()
        if isinstance(part, _BatchNorm) and part.training and part.running_mean is not None
    ]
    if not layers:
        return 0
    n, momenta = 0, [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
    with default_seed(derive_seed(run.streams.seed, f"swag.batchnorm.{k}")), torch.no_grad():
        for batch in map(run.to_device, _one_pass(data, k)):
            with run.ensemble.casting():
                run.ensemble.energy.output(module, batch)
            n += size_of(batch)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    return n


def _one_pass(data: Any, k: int) -> Iterable[Batch]:
    """All examples once, in an order that depends on k alone where the data permit it."""
    if isinstance(data, DeviceLoader):
        return swap_batches(data, k, data.n_data, twice=False)
    if isinstance(data, DataLoader):
        with contextlib.suppress(InvalidArgumentError, TypeError):
            return swap_batches(data, k, len(data.dataset), twice=False)  # type: ignore[arg-type]
    return data  # type: ignore[no-any-return]
