"""What runs on densities and on networks share: their rules, with their checks, and what they show.

`density/run.py` drives tensor targets, `network/run.py` networks.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor

import torchrex
from torchrex import notebook
from torchrex.errors import InvalidArgumentError, LadderError, require_names, require_whole
from torchrex.exchange.algorithm import ExchangeState, Rules, StepInfo, Tempering
from torchrex.exchange.correction import FactorRule, as_rule
from torchrex.exchange.ladder import Ladder
from torchrex.exchange.momentum import POLICIES, MomentumPolicy
from torchrex.exchange.noise import (
    KnownVariance,
    NoiseEstimator,
    NoiseShape,
    SwapBatchVariance,
    default_estimator,
)
from torchrex.exchange.pairing import NoSwaps, Pairing, default_pairing
from torchrex.exchange.swap_report import ExchangeReport, SwapCounts, report_pairs, trips_from
from torchrex.processes import is_main_process
from torchrex.rng import Streams
from torchrex.settings import require_same, settings_of

logger = logging.getLogger("torchrex")


NEWEST_TORCH = (2, 15)  # on which `make test-versions` has passed
MOST_ON_OWN_BATCH = 8  # rungs; with more the bias is larger than that of the gradient noise
LATER = ("swap_batch", "tempering")  # rules that older states do not name


@functools.cache
def warn_of_newer_torch(version: str) -> None:
    """Once per process, in the log: a filter of warnings must not turn it into an error."""
    number = re.match(r"(\d+)\.(\d+)", version)
    if number and (int(number[1]), int(number[2])) > NEWEST_TORCH and is_main_process():
        tested = ".".join(map(str, NEWEST_TORCH))
        words = "torch %s is newer than %s, the newest version torchrex %s was tested with"
        logger.warning(words, version, tested, torchrex.__version__)


class RuleOptions(TypedDict, total=False):
    """The rules of the exchange: arguments of `DensityExchange`, `ModuleExchange` and `sample`.

    `swap_rest` is for the paper's annealed recipes only: a pair that rests after each swap samples
    another law. With exact energies and temperatures 1 and 3 the variance of rung 0 is 1.42 times
    the right one at 5 steps of rest.
    """

    noise: NoiseEstimator | None  # None: the one that fits the target, see `default_estimator`
    correction_factor: float | FactorRule  # F; 1 is unbiased, infinity is the naive test
    pairing: Pairing | None  # None: EvenOdd or RandomPair, see `default_pairing`
    # Compare the energies of all replicas on so many other examples, or on all ("full"), instead of
    # on the step's own minibatch.
    swap_batch: int | Literal["full"] | None
    # What the temperature of a rung divides: the whole energy, or minus the log likelihood alone.
    # An infinite temperature is then the prior. See `Ladder.for_likelihood` for learning rates.
    tempering: Tempering
    swap_interval: int  # swaps are tested at every such step,
    swap_start: int  # not before this one,
    swap_rest: int  # and not in so many steps after the pair has swapped
    swap_intensity: float | None  # r of the paper; None fixes r * lr = 1
    momentum: MomentumPolicy  # what a swap does to momenta


def make_rules(ladder: Ladder, target: Any, options: RuleOptions) -> Rules:
    """Check the options and fill in what fits the target."""
    given: dict[str, Any] = {"noise": None, "pairing": None, **options}
    for name, value, kind, example in (
        ("ladder", ladder, Ladder, "a ladder such as Ladder((1.0, 10.0), 0.03) or tuned.ladder"),
        ("noise", given["noise"], NoiseEstimator, "an estimator such as KnownVariance(1.0)"),
        ("pairing", given["pairing"], Pairing, "a rule such as EvenOdd()"),
    ):
        if value is not None and not isinstance(value, kind):
            raise InvalidArgumentError(f"{name} must be {example}, got {value!r}")
    given["swap_batch"] = _swap_batch(given.get("swap_batch"), target, given["noise"])
    if not ladder.n_pairs:
        given["noise"] = KnownVariance()  # nothing to swap, nothing to estimate
    elif given["noise"] is None:
        own = given["swap_batch"] is None
        given["noise"] = default_estimator(target) if own else SwapBatchVariance()
    if given["pairing"] is None:
        given["pairing"] = default_pairing(target, ladder.n_pairs, given["swap_batch"])
    if ladder.n_pairs and not ladder.temperatures[0] and not isinstance(given["pairing"], NoSwaps):
        raise LadderError(f"{ladder!r} has nothing to swap; give pairing=NoSwaps()")
    rules = Rules(ladder, factor=as_rule(given.pop("correction_factor", 1.0)), **given)
    for name, least in (("swap_interval", 1), ("swap_start", 0), ("swap_rest", 0)):
        require_whole(name, getattr(rules, name), least)
    if rules.momentum not in POLICIES:
        raise InvalidArgumentError(
            f"momentum must be one of {', '.join(POLICIES)}, got {rules.momentum!r}"
        )
    r = rules.swap_intensity
    if r is not None and not (r > 0 and r * max(ladder.lrs) <= 1):
        raise InvalidArgumentError(
            "swap_intensity r must be positive with r * lr <= 1, which is a probability; "
            f"got r={r} with lrs={ladder.lrs}"
        )
    _require_tempering(rules, target)
    rules.noise.check(target)
    _warn_of_biased_rules(rules, target)
    return rules


def _swap_batch(size: int | str | None, target: Any, noise: NoiseEstimator | None) -> int | None:
    """The number of examples, checked."""
    if size is None:
        if isinstance(noise, SwapBatchVariance):
            raise InvalidArgumentError(f"{noise!r} needs swap_batch=..., got none")
        return None
    if target.n_data is None:
        raise InvalidArgumentError(
            f"swap_batch={size!r} is a number of examples, but {target!r} has no data; leave it out"
        )
    size = target.n_data if size == "full" else size
    if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= target.n_data:
        raise InvalidArgumentError(
            f'swap_batch must be "full" or a number of examples from 2 to {target.n_data}, which '
            f"are all data, got {size!r}"
        )
    if noise is not None and not isinstance(noise, SwapBatchVariance | KnownVariance):
        raise InvalidArgumentError(
            f"{noise!r} is that of minibatches, but energies are compared on swap_batch={size} "
            "examples; leave noise out"
        )
    return size


def _require_tempering(rules: Rules, target: Any) -> None:
    """Refuse a tempering that the target cannot have."""
    kinds, hottest = get_args(Tempering), rules.ladder.temperatures[-1]
    if rules.tempering not in kinds:
        raise InvalidArgumentError(
            f"tempering must be {' or '.join(kinds)}, got {rules.tempering!r}"
        )
    if rules.tempering == "posterior":
        if not math.isfinite(hottest):
            raise InvalidArgumentError(
                'an infinite temperature needs tempering="likelihood" and a prior that is a '
                f"distribution, got temperatures={rules.ladder.temperatures}"
            )
        return
    if not rules.ladder.temperatures[0] > 0:
        raise InvalidArgumentError('tempering="likelihood" needs temperatures above 0')
    if target.prior_variance is None:
        raise InvalidArgumentError(
            f'tempering="likelihood" needs data with a prior apart from them, which {target!r} '
            "has not: use TallPosterior, or a module with a GaussianPrior"
        )
    if not math.isfinite(hottest) and not target.has_proper_prior:
        raise InvalidArgumentError(
            f"an infinite temperature samples the prior, but that of {target!r} is not known to be "
            "proper; give it as a distribution, or a finite temperature"
        )


def require_known(options: Mapping[str, Any], function: str, others: Iterable[str]) -> None:
    """Refuse an argument that is no rule, with the nearest name among the rules and `others`."""
    require_names(options, [*RuleOptions.__annotations__, *others], function)


class ReplicaExchange:
    """Adaptive replica exchange stochastic gradient MCMC (Algorithm 1), for both kinds of run.

    `DensityExchange` runs on a TensorEnsemble, whose steps need nothing; `ModuleExchange` on a
    ModuleEnsemble, whose steps need batches.
    """

    streams: Streams
    _state: ExchangeState
    _counts: SwapCounts

    def __init__(self, ensemble: Any, ladder: Ladder, **rules: Unpack[RuleOptions]) -> None:
        if type(self) is ReplicaExchange:
            raise InvalidArgumentError(
                "use DensityExchange(TensorEnsemble.start(target, n_rungs=2), ladder) for "
                "densities and ModuleExchange(ModuleEnsemble(model, energy), ladder) for networks"
            )
        warn_of_newer_torch(torch.__version__)
        self.rules = make_rules(ladder, ensemble.source_of_noise, rules)
        swap_start = self.rules.swap_start if self.rules.swaps else None
        ensemble.sampler.check(n_data=ensemble.n_data, swap_start=swap_start)
        if self.rules.swaps:
            ensemble.sampler.require_policy(self.rules.momentum)
        self.n_steps = 0
        self._folder: Path | None = None

    @abstractmethod
    def step(self, batch: Any = None) -> StepInfo:
        """One step of every replica."""

    @abstractmethod
    def advance(
        self, n_steps: int, data: Any = None, *, every: int | None = None
    ) -> Iterator[StepInfo]:
        """Run `n_steps` steps; yields the information of some steps at a time, stacked along a
        first axis.

        How many is up to the run. With `every` it yields whenever `run.n_steps` is a multiple of
        `every`, and at the end. It is a generator: nothing happens until you loop over it.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything the next step needs: with `load_state_dict` a run goes on bit for bit."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of a run with the same target, ladder and rules."""

    @abstractmethod
    def noise_shape(self, batch: Any = None, *more: Any) -> NoiseShape | None:
        """Is the energy noise Gaussian, as the swap test assumes? None without noise or swaps; a
        network needs batches.
        """

    @property
    def n_rungs(self) -> int:
        """Rungs of the ladder, and as many replicas."""
        return self.rules.ladder.n_rungs

    @property
    def state(self) -> ExchangeState:
        """The replica at each rung and what the estimators know, as a copy."""
        return ExchangeState(*(tensor.clone() for tensor in self._state))

    @property
    def correction_factor(self) -> Tensor:
        """F of the next test of each pair, (pairs, runs); at the end of a schedule, of the latest
        one.
        """
        now = self.temperatures_at(self.n_steps)
        now = self.temperatures_at(self.n_steps - 1) if bool(now.isnan().any()) else now
        first_gap, gap = (
            (1.0 / each).neg().diff().unsqueeze(-1) for each in (self.temperatures_at(0), now)
        )
        learnt = self._state.correction_factor.cpu().double()
        return self.rules.factor.factor(learnt, gap, first_gap).expand(learnt.shape[-2:]).clone()

    def exchange(self) -> ExchangeReport:
        """What the exchange did over all steps: swaps, noise, barrier, round trips, cost.

        s is the rms over the tests, of an annealed ladder that of the latest one. After a resume
        from a state of an older version it is that of the steps since.
        """
        counts, n_runs = self._counted(), self._state.replica_at.shape[1]
        sigma2 = (counts.noise[0] / counts.noise[1])[None]
        pairs = report_pairs(
            counts.accepted.sum(1),
            counts.proposed.sum(1),
            sigma2,
            inverse_gap=-(1.0 / self.temperatures_at(max(0, self.n_steps - 1))).diff(),
            factor=self.correction_factor.log().mean(1).exp(),
            n_runs=n_runs,
        )
        trips = trips_from(counts.restarts, counts.first_end, self.n_rungs - 1)
        return ExchangeReport(
            tuple(pairs),
            self.n_steps - counts.first_step,
            float(trips.sum(0).double().mean()),
            float(counts.restarts.sum(0).double().mean()),
            swap_cost=self._swap_cost(counts),
            steps_before=counts.first_step,
        )

    def written_to(self, folder: Path) -> None:
        """Remember the run folder that `train(out=...)` writes."""
        self._folder = folder

    def report(self) -> Any:
        """What doctor says of the run, and its page in a notebook, from its run folder."""
        if self._folder is None:
            raise InvalidArgumentError(
                "a report reads the folder of a run; give one: train(..., out='runs/mynet/seed=0')"
            )
        return torchrex.report.of_folder(self._folder)

    def _counted(self) -> SwapCounts:
        """The counts up to now."""
        return self._counts

    @abstractmethod
    def _swap_cost(self, counts: SwapCounts) -> float:
        """Examples evaluated for swaps over examples evaluated for moves."""

    def temperatures_at(self, step: int) -> Tensor:
        """Those of a step, counted from 0: (rungs,), in double."""
        return self._schedules_at(step)[0]

    def _schedules_at(self, step: int) -> tuple[Tensor, Tensor]:
        cpu = torch.device("cpu")
        temperature, lr, _ = self.rules.ladder.table(step, 1, device=cpu, dtype=torch.float64)
        return temperature[0], lr[0]

    def _repr_html_(self) -> str:
        """For notebooks: the rungs with what holds at the next step, and the rules."""

        def word(value: float) -> str:
            return "no value" if math.isnan(value) else f"{value:g}"

        columns = [map(word, values.tolist()) for values in self._schedules_at(self.n_steps)]
        rows = [(str(rung), *words) for rung, words in enumerate(zip(*columns, strict=True))]
        shown = [field.name for field in fields(self.rules)[1:] if field.compare]
        rules = ", ".join(f"{name}: {getattr(self.rules, name)}" for name in shown)
        return notebook.panel(
            type(self).__name__,
            f"{self.n_rungs} rungs, step {self.n_steps:,}",
            notebook.table(("rung", "temperature", "lr"), rows),
            notebook.details("rules", rules),
            notebook.details("ensemble", repr(self)),
        )

    def _rule_settings(self) -> dict[str, Any]:
        """What must agree between a state and the run that loads it, as far as the rules go."""
        return {
            field.name: settings_of(getattr(self.rules, field.name))
            for field in fields(self.rules)
            if field.compare and not (field.name in LATER and self._is_default(field))
        }

    def _is_default(self, field: Field[Any]) -> bool:
        return bool(getattr(self.rules, field.name) == field.default)

    @staticmethod
    def _require_same(stored: Any, mine: dict[str, Any]) -> None:
        """Refuse a state that was made with other settings, naming them."""
        what, cure = "the state is that of another run,", "Load it into a run with its settings"
        require_same(stored, mine, what=what, cure=cure, error=InvalidArgumentError)


def require_every(every: int | None) -> None:
    if every is not None:
        require_whole("every", every, 1)


def joined(infos: Sequence[StepInfo]) -> StepInfo:
    """One after the other."""
    if len(infos) == 1:
        return infos[0]
    return StepInfo(*(torch.cat(values) for values in zip(*infos, strict=True)))


def _warn_of_biased_rules(rules: Rules, target: Any) -> None:
    """Warn of rules under which rung 0 does not have its law; an annealed run samples none."""
    ladder, rest = rules.ladder, rules.swap_rest
    if ladder.anneal is not None or not rules.swaps:
        return
    if rest:
        logger.warning(
            "swap_rest=%d changes the law of rung 0: after a swap a pair stays too long where it "
            "is. Use swap_interval=%d for rarer tests",
            rest,
            rest + 1,
        )
    # A swap decides the lr of a replica; on the minibatch of the move the two are correlated. What
    # multiplies the gradient of the data is lr / T where the likelihood alone is tempered.
    rates = ladder.lrs
    if rules.tempering == "likelihood":
        rates = tuple(lr / t for lr, t in zip(rates, ladder.temperatures, strict=True))
    own = rules.swap_batch is None and target.n_data is not None and target.has_noise
    if own and rules.swap_interval == 1 and ladder.n_rungs > MOST_ON_OWN_BATCH:
        logger.warning(
            "the swaps of %d rungs are tested on the minibatch of the move: rung 0 is too wide, "
            "the more so the larger lr is (1.5 times its variance with 60 rungs on tall logistic "
            "regression). Use a swap_batch, or torchrex.tune",
            ladder.n_rungs,
        )
    if max(rates) > 1.1 * min(rates) and rules.swap_interval == 1 and own:
        logger.warning(
            "the learning rates %s are unequal and swaps are tested on the minibatch of the move: "
            "rung 0 is biased (at a ratio of 3 its variance can be 0.91 of the right one). "
            "Use equal learning rates, or a swap_batch",
            tuple(float(f"{rate:.3g}") for rate in rates),
        )


def resolve_device(device: torch.device | str) -> torch.device:
    """The device asked for, or an error in one line."""
    name = str(device)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(name)
    except RuntimeError:
        raise InvalidArgumentError(f"device must be auto, cpu or cuda, got {name!r}") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"device {name} was asked for, but torch finds no CUDA device here; use cpu or auto"
        )
    return chosen
