"""The short runs of `tune`, on densities and on networks, and what they show."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrex.density import DensityExchange, TensorEnsemble
from torchrex.density.tensor_ensemble import starting_points
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import Ladder, ReplicaExchange, StepInfo, count_trips, rung_of
from torchrex.rng import Streams, derive_seed
from torchrex.samplers import Sampler
from torchrex.targets import Target
from torchrex.tuning.model import nearest

if TYPE_CHECKING:
    from torchrex.network import ModuleEnsemble, ModuleExchange

FIRST_RUNGS = 8  # of the first round, which has no swaps
ROWS = 128  # times at which positions are looked at
COORDINATES = 64  # and how many of each replica
WALKED = 512  # times at which their rungs are looked at


class Memory(NamedTuple):
    """How much of its place on the ladder a replica keeps: the autocorrelation of the slowest mode
    of a walk between two walls, cos(pi (rung + 1/2) / R).
    """

    lag: int  # in steps
    value: float
    error: float

    @classmethod
    def of(cls, rung: Tensor) -> Memory:
        """Over a quarter of the steps, of the rungs of all replicas (steps, replicas, runs)."""
        apart = max(1, len(rung) // WALKED)
        mode = torch.cos(math.pi * (rung[::apart].double() + 0.5) / rung.shape[1])
        lag = max(1, len(mode) // 4)
        first, second = mode[:-lag], mode[lag:]
        product = (first * second).mean(0)
        square = 0.5 * (first.square() + second.square()).mean(0)
        value = product.sum() / square.sum()
        left = product - value * square  # of each replica; their sum is 0
        error = left.square().sum().sqrt() / square.sum()
        return cls(lag * apart, float(value), float(error))


class Seen(NamedTuple):
    """What a round showed."""

    energy: Tensor  # (rungs,): mean
    variance: Tensor  # (pairs,): of the difference of two energies, by their noise
    accepted: Tensor  # (pairs,)
    proposed: Tensor
    trips: int
    path: Tensor  # (rows, rungs, runs, coordinates): where the replica of each rung was
    memory: Memory  # of their rungs


class Trials:
    """Short runs on one target, each beginning where the one before ended."""

    n_data: int | None
    batch: int = 1
    finite_population = False
    can_have_swap_batches = False
    shares_minibatch = True
    starts_apart = False  # do the runs start at different points?
    prior_variance: float | None = None
    has_proper_prior = False
    data: Any = None
    dim: int
    n_runs: int
    rules: dict[str, Any]

    def begin(self, ladder: Ladder, rules: dict[str, Any]) -> ReplicaExchange:
        raise NotImplementedError

    def positions(self, run: Any) -> Tensor:
        """(rungs, runs, coordinates)"""
        raise NotImplementedError

    def measure(self, ladder: Ladder, rules: dict[str, Any], n_steps: int) -> Seen:
        run, infos, path = self.begin(ladder, rules), [], []
        for info in run.advance(n_steps, self.data, every=max(1, n_steps // ROWS)):
            infos.append(StepInfo(*(values.clone().cpu() for values in info)))
            path.append(self.positions(run)[..., :COORDINATES].cpu())
        self.end(run)
        first = len(infos) // 3  # what comes before is the way from the round before
        late = infos[first:]
        energy = torch.cat([info.energy for info in late]).double()
        sigma2 = torch.cat([info.noise_variance for info in late]).double()
        proposed = torch.cat([i.proposed.expand(len(i.proposed), *sigma2.shape[1:]) for i in late])
        if run.rules.swap_batch is not None:  # rows between the tests know nothing of their noise
            sigma2 = sigma2[proposed.flatten(1).any(1)]
        rung = rung_of(torch.cat([info.replica_at for info in infos]))
        return Seen(
            energy.mean((0, 2)),
            2.0 * sigma2.mean((0, 2)),
            torch.cat([info.accepted for info in late]).sum((0, 2)),
            proposed.sum((0, 2)),
            int(count_trips(rung)[1].sum()),
            torch.stack(path[first:]).double(),
            Memory.of(rung[len(rung) // 3 :]),
        )

    def end(self, run: Any) -> None:
        """Keep what the next round begins with."""
        raise NotImplementedError


class DensityTrials(Trials):
    def __init__(
        self,
        target: Target,
        sampler: Sampler | None,
        n_runs: int,
        initial: Tensor | float | Distribution | None,
        seed: int,
        rules: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.target, self.sampler, self.n_runs, self.rules = target, sampler, n_runs, rules
        self.seed, self.device, self.dtype, self.dim = seed, device, dtype, target.dim
        self.n_data, self.shares_minibatch = target.n_data, target.shares_minibatch
        self.batch = target.batch_size or 1
        self.starts_apart = initial is None or isinstance(initial, Distribution)
        self.can_have_swap_batches = target.n_data is not None
        self.prior_variance = target.prior_variance
        self.has_proper_prior = target.has_proper_prior
        self._rounds = itertools.count()
        self._inverse, self._start = torch.ones(1), torch.zeros(0)
        shape, streams = (FIRST_RUNGS, n_runs), Streams(seed)
        start = starting_points(initial, target, shape, streams)
        self._given = torch.as_tensor(start, dtype=dtype).expand(*shape, self.dim)

    def start_from(self, other: DensityTrials) -> None:
        """Begin where the runs of one temperature have ended."""
        self._inverse, self._start = other._inverse, other._start

    def _next_seed(self) -> int:
        return derive_seed(self.seed, f"tuning.{next(self._rounds)}")

    def begin(self, ladder: Ladder, rules: dict[str, Any]) -> DensityExchange:
        inverse = 1.0 / torch.tensor(ladder.temperatures, dtype=torch.float64)
        start = self._given[: ladder.n_rungs]
        if len(self._start) == 1:  # each rung of a run begins where another run has ended
            start = torch.cat([self._start.roll(k, 1) for k in range(ladder.n_rungs)])
        elif len(self._start):
            start = self._start[nearest(inverse, self._inverse)]
        ensemble = TensorEnsemble.start(
            self.target, self.sampler, n_rungs=ladder.n_rungs, n_runs=self.n_runs, initial=start,
            device=self.device, dtype=self.dtype,
        )  # fmt: skip
        return DensityExchange(ensemble, ladder, seed=self._next_seed(), **{**self.rules, **rules})

    def positions(self, run: DensityExchange) -> Tensor:
        at = run.state.replica_at.long()
        return run.ensemble.position[at, torch.arange(at.shape[1], device=at.device)]

    def end(self, run: DensityExchange) -> None:
        self._inverse, self._start = 1.0 / run.temperatures_at(0), self.positions(run)


class NetworkTrials(Trials):
    n_runs = 1

    def __init__(self, source: ModuleEnsemble, data: Any, seed: int, rules: dict[str, Any]) -> None:
        self.source, self.data, self.seed, self.rules = source, data, seed, rules
        if source.mesh is not None:
            raise InvalidArgumentError("tune works in one process; give an ensemble without mesh")
        self.n_data, self.shares_minibatch = source.n_data, source.shares_minibatch
        self.finite_population = not source.replacement
        self.prior_variance = source.prior_variance
        self.has_proper_prior = source.has_proper_prior
        from torchrex.network.step import size_of

        self.batch = getattr(data, "batch_size", None) or size_of(next(iter(data)))
        whole = getattr(data, "dataset", None)
        has_items = hasattr(whole, "__getitem__") and hasattr(whole, "__len__")
        self.can_have_swap_batches = hasattr(data, "swap_batches") or has_items
        self._rounds = itertools.count()
        self._inverse: Tensor | None = None
        self._start: list[Any] = []

    def begin(self, ladder: Ladder, rules: dict[str, Any]) -> ModuleExchange:
        from torchrex.network import ModuleExchange

        inverse = 1.0 / torch.tensor(ladder.temperatures, dtype=torch.float64)
        seed = derive_seed(self.seed, f"tuning.{next(self._rounds)}")
        run = ModuleExchange(self.source, ladder, seed=seed, **{**self.rules, **rules})
        self.dim = run.ensemble.position.shape[-1]
        if self._inverse is not None and not self.source.shared:
            run.ensemble.load_tensors([self._start[k] for k in nearest(inverse, self._inverse)])
        return run

    def positions(self, run: ModuleExchange) -> Tensor:
        position = run.ensemble.position
        some = position[:, :: -(-position.shape[-1] // COORDINATES)]
        return some[run.state.replica_at[:, 0], None]

    def end(self, run: ModuleExchange) -> None:
        self._inverse = 1.0 / run.temperatures_at(0)
        states = [run.ensemble.tensors_of(int(k)) for k in run.state.replica_at[:, 0]]
        self._start = [
            {part: {n: t.clone() for n, t in tensors.items()} for part, tensors in state.items()}
            for state in states
        ]
