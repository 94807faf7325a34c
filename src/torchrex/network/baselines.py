"""Baselines on the engine and the data of exchange: deep ensembles and SWAG.

Each is a `ModuleExchange` that `train` advances, so seeds, checkpoints, observers, budgets and
exact resume are those of any run. Their draws belong to the last step: `train` feeds `_FinalDraws`,
which passes them on to the user's average. The third baseline, replicas that never exchange, is the
rule `pairing=NoSwaps()` of any run.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchrex.errors import CheckpointError, InvalidArgumentError, known_arguments, require_whole
from torchrex.exchange import KnownVariance, Ladder, NoSwaps
from torchrex.network.group import swap_batches
from torchrex.network.replicas import ModuleEnsemble, copied, evaluating
from torchrex.network.run import ModuleExchange, widened
from torchrex.network.step import size_of
from torchrex.network.training import train
from torchrex.posterior import PosteriorAverage
from torchrex.posterior.average import OutputFunction
from torchrex.rng import default_seed, derive_seed
from torchrex.runs.config import Outcome
from torchrex.schedules import Schedule, cyclical
from torchrex.targets import Batch

Network = tuple[Callable[..., Any], nn.Module]  # how it predicts, as a run does, and itself
Networks = Callable[[ModuleExchange, "_FinalDraws"], Iterable[Network]]
OF_RUN = ("seed", "clip", "compiled", "divergence", "deterministic")
OF_TRAIN = [name for name in list(inspect.signature(train).parameters)[3:] if name != "average"]


@dataclass(frozen=True)
class MethodResult:
    """What a method predicts and what it has cost in all; `torchrex.compare` compares several."""

    average: PosteriorAverage
    examples: float = math.nan  # evaluated by all replicas, for BatchNorm and tuning too
    gradients: float = math.nan  # gradient passes on a minibatch, of all replicas
    seconds: float = math.nan  # wall time, with predictions and checkpoints
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
        """Of a run that `train` has advanced; `more_examples=tuned.examples` counts tuning too.

        `rung=None` pools all rungs, as replicas that never exchange (`NoSwaps`) should be.
        """
        if rung is None and set(average.rungs) != set(range(run.n_rungs)):
            raise InvalidArgumentError(
                f"all {run.n_rungs} rungs are pooled, but the average records {average.rungs}; "
                f"give PosteriorAverage(..., rungs=range({run.n_rungs}))"
            )
        examples, seed = run.n_examples + more_examples, run.streams.seed
        cost = (examples, run.n_steps * run.n_rungs, outcome.total_seconds)
        return MethodResult(average, *cost, seed, name, rung, outcome.status)

    def metrics(self) -> dict[str, float]:
        if self.status != "finished":
            advice = "repeat the call with the same checkpoints to go on"
            raise InvalidArgumentError(f"{self.name} is {self.status}, not finished; {advice}")
        return self.average.metrics(self.rung)


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
    """Networks that descend independently from their own initial weights, their predictions
    averaged (Lakshminarayanan et al. 2017).

    Model, energy and sampler are those of `ensemble`; at temperature 0 SGHMC is momentum SGD. `lr`,
    of the summed energy as in a ladder, falls to 0 by a cosine or by `decay`. Members see the same
    minibatches, or with `shared_batches=False` in the ensemble their own. `average` takes one draw
    of each after the last step. `options` are those of `ModuleExchange` and `train`.
    """
    require_whole("n_members", n_members, 1)
    _require(ensemble, average, n_steps, n_members)
    ladder = Ladder.descent(lr, decay=decay or cyclical(n_steps), n_rungs=n_members)

    def members(run: ModuleExchange, draws: _FinalDraws) -> Iterator[Network]:
        return ((partial(run.predict, rung=k), run.live_module_at(k)) for k in range(n_members))

    draws = _FinalDraws("deep ensemble", average, n_steps, members, {"n_members": n_members})
    own = dataclasses.replace(ensemble, initial="independent")
    return _trained(own, ladder, data, draws, options)


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

        w = mean + sqrt(diag / 2) z + sum_k D_k z'_k / sqrt(2 (K - 1)),    z, z' standard normal

    For `descent` steps (3/4 of all) the lr falls by a cosine to `constant_lr` (lr / 2) and stays
    there. Then at every `every`-th step (once an epoch) the weights enter the mean, the variances
    diag and the latest K = `rank` deviations D from the mean so far. After the last step `average`
    takes `n_draws` draws, each with statistics of BatchNorm from a pass over `data`. `options` are
    those of `ModuleExchange` and `train`.
    """
    require_whole("n_draws", n_draws, 1)
    _require(ensemble, average, n_steps, n_draws)
    size = getattr(data, "batch_size", None) or ensemble.n_data
    every = max(1, ensemble.n_data // size) if every is None else every
    descent = 3 * n_steps // 4 if descent is None else descent
    for name, value, least in (("descent", descent, 0), ("every", every, 1), ("rank", rank, 2)):
        require_whole(name, value, least)
    if (n_steps - descent) // every < 2:
        raise InvalidArgumentError(
            f"SWAG needs the weights of 2 steps or more, but between descent={descent} and "
            f"n_steps={n_steps} fewer are due with every={every}; lower every or descent"
        )
    rates = [lr] if constant_lr is None else [lr, constant_lr]
    if not all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in rates):
        raise InvalidArgumentError(f"lr and constant_lr must be positive numbers, got {rates}")
    ratio = 0.5 if constant_lr is None else constant_lr / lr
    falling, start = cyclical(max(1, descent), end=ratio), descent
    ladder = Ladder.descent(lr, decay=lambda step: falling(step) if step < start else ratio)
    setting = {"descent": descent, "every": every, "rank": rank, "n_draws": n_draws}
    draws = _FinalDraws("SWAG", average, n_steps, partial(_swag_networks, data), setting)
    return _trained(ensemble, ladder, data, draws, options)


def _require(ensemble: Any, average: Any, n_steps: int, n_draws: int) -> None:
    if not isinstance(ensemble, ModuleEnsemble) or ensemble.shared:
        raise InvalidArgumentError(f"give a ModuleEnsemble with nothing shared, got {ensemble!r}")
    require_whole("n_steps", n_steps, n_draws)
    if getattr(average, "n_draws", None) != 0 or tuple(average.rungs) != (0,):
        raise InvalidArgumentError(
            f"average must be an empty PosteriorAverage(data) of rung 0, got {average!r}"
        )


def _trained(
    ensemble: ModuleEnsemble, ladder: Ladder, data: Any, draws: _FinalDraws, options: dict[str, Any]
) -> MethodResult:
    own = {key: options.pop(key) for key in OF_RUN if key in options}
    alone: Any = {"pairing": NoSwaps(), "noise": KnownVariance(), "momentum": "keep"}
    run = ModuleExchange(ensemble, ladder, **own, **alone)
    given: Any = [draws]  # an average in all that `train` asks of one
    outcome = train(run, data, draws.end, average=given, **options)
    more = draws.examples
    return MethodResult.of(run, outcome, draws.average, name=draws.name, more_examples=more)


@dataclass(frozen=True)
class _Network:
    """One network, as an average sees a run."""

    prediction: Callable[..., Any]
    module: nn.Module
    n_steps: int
    n_rungs: int = 1

    def predict(self, batch: Batch, rung: int = 0, *, output: OutputFunction | None = None) -> Any:
        return self.prediction(batch, output=output)

    def live_module_at(self, rung: int) -> nn.Module:
        return self.module


class _FinalDraws:
    """The user's average, to which all networks come after the last step; before, SWAG's moments
    are taken here.
    """

    def __init__(
        self, name: str, average: Any, end: int, networks: Networks, setting: dict[str, int]
    ) -> None:
        self.name, self.average, self.end, self.setting = name, average, end, setting
        self._networks = networks
        self.burn_in, self.every = setting.get("descent", 0), setting.get("every", end)
        self.moments = Moments()
        self.examples = 0  # evaluated to make the draws

    def __getattr__(self, name: str) -> Any:
        return getattr(self.average, name)

    def update(self, run: ModuleExchange) -> bool:
        """Returns whether the user's average has its draws now."""
        step, rank = run.n_steps, self.setting.get("rank")
        if rank and step > self.burn_in and (step - self.burn_in) % self.every == 0:
            self.moments = self.moments.after(run.ensemble.position[0], rank)
        if step < self.end:
            return False
        for k, (predict, module) in enumerate(self._networks(run, self), start=1):
            # The average counts by its own rule: every network comes at a step that is due.
            due = self.average.burn_in + k * self.average.every
            self.average.update(_Network(predict, module, due))
        return True

    def state_dict(self) -> dict[str, Any]:
        last_step = self.end if self.average.n_draws else -1
        own = {"setting": self.setting, "examples": self.examples, "last_step": last_step}
        return {**own, "average": self.average.state_dict(), "moments": list(self.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("setting") != self.setting:
            given = state.get("setting", "another method")
            raise CheckpointError(f"the state is of {given}, this call has {self.setting}")
        self.average.load_state_dict(state["average"])
        self.examples, self.moments = int(state["examples"]), Moments(*state["moments"])


class Moments(NamedTuple):
    """Of weights, one after the other: mean, mean square, the latest deviations w_n - mean_n."""

    n: int = 0
    mean: Tensor = torch.zeros((), dtype=torch.float64)  # (d,)
    square: Tensor = torch.zeros((), dtype=torch.float64)  # (d,)
    deviations: Sequence[Tensor] = ()

    def after(self, weights: Tensor, rank: int) -> Moments:
        w, n = weights.double(), self.n + 1
        pairs = ((self.mean.to(w), w), (self.square.to(w), w * w))
        mean, square = (old + (new - old) / n for old, new in pairs)
        latest = [*self.deviations, (w - mean).to(weights.dtype)]
        return Moments(n, mean, square, latest[-rank:])

    def draw(self, generator: torch.Generator) -> Tensor:
        """One draw, (d,): half of its covariance is diagonal, half of low rank."""
        d, k = len(self.mean), len(self.deviations)
        z = torch.randn(d + k, generator=generator, dtype=torch.float64).to(self.mean)
        low = sum(z[d + i] * each.to(z) for i, each in enumerate(self.deviations))
        diagonal = (self.square - self.mean.square()).clamp(min=0.0)
        return self.mean + (diagonal / 2).sqrt() * z[:d] + low / math.sqrt(2 * (k - 1))


def _swag_networks(data: Any, run: ModuleExchange, draws: _FinalDraws) -> Iterator[Network]:
    replicas, module = run.ensemble, copied(run.live_module_at(0))
    named, row = dict(module.named_parameters()), torch.empty_like(replicas.position[0])

    def predict(batch: Batch, *, output: OutputFunction | None = None) -> Any:
        with evaluating(module), replicas.casting():
            return widened((output or replicas.energy.output)(module, run.to_device(batch)))

    for k in range(draws.setting["n_draws"]):
        seed = derive_seed(run.streams.seed, f"swag.{k}")
        row.copy_(draws.moments.draw(torch.Generator().manual_seed(seed)))
        for name, view in replicas.layout.views(row).items():
            named[name].data.copy_(view)
        draws.examples += renew_batchnorm(run, module, data, k)
        yield predict, module


def renew_batchnorm(run: ModuleExchange, module: nn.Module, data: Any, k: int) -> int:
    """Statistics of BatchNorm by one pass over the data in training mode; how many examples it had,
    0 without such layers. The position in the data stays.
    """
    # torch's update_bn puts frozen layers into training mode, and knows batches (x, y) alone.
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]
    norms = [part for part in norms if part.running_mean is not None]
    n, momenta = 0, [layer.momentum for layer in norms]
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
    batches: Iterable[Batch] = data
    dataset: Any = getattr(data, "dataset", None)
    counted = hasattr(dataset, "__len__") and getattr(data, "batch_size", None)
    n_data = getattr(data, "n_data", None) or (len(dataset) if counted else 0)
    if n_data:  # in an order that depends on k alone
        batches = swap_batches(data, k, n_data, twice=False)
    with default_seed(derive_seed(run.streams.seed, f"swag.batchnorm.{k}")), torch.no_grad():
        for batch in map(run.to_device, batches if norms else ()):
            with run.ensemble.casting():
                run.ensemble.energy.output(module, batch)
            n += size_of(batch)
    for layer, momentum in zip(norms, momenta, strict=True):
        layer.momentum = momentum
    return n
