"""`ReplicaExchange`: an ensemble on a ladder, its random streams, and the verbs that move it along.

What the two kinds of run share is here: their rules and their checks. `density_run.py` drives
tensor targets, `module_run.py` networks.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchrex import notebook
from torchrex.errors import InvalidArgumentError
from torchrex.exchange.algorithm import ExchangeState, Rules, StepInfo
from torchrex.exchange.correction import FactorRule, as_rule
from torchrex.exchange.ladder import Ladder
from torchrex.exchange.momentum import POLICIES, MomentumPolicy
from torchrex.exchange.noise import KnownVariance, NoiseEstimator, NoiseShape, default_estimator
from torchrex.exchange.pairing import Pairing, default_pairing
from torchrex.rng import Streams

logger = logging.getLogger("torchrex")


class ReplicaExchange:
    """Adaptive replica exchange stochastic gradient MCMC (Algorithm 1).

    Made from a TensorEnsemble it is a run on a density, whose steps need nothing; from a
    ModuleEnsemble, one on a network, whose steps need batches. Both have `step`, `advance`,
    `ensemble`, `state`, `state_dict` and `load_state_dict`. A run on a network has further
    `replica_at`, `module_at`, `live_module_at`, `predict`, `measure` and the list `respawns`.

    >>> from torchrex import GaussianMixture, Ladder, TensorEnsemble
    >>> mixture = GaussianMixture([0.4, 0.6], means=[-3.0, 2.0], stds=[0.7, 0.5])
    >>> run = ReplicaExchange(TensorEnsemble.start(mixture, n_rungs=2, n_runs=8), Ladder((1.0, 10.0), 0.03), seed=0)
    >>> info = run.step()
    >>> info.position.shape
    torch.Size([8, 1])
    """

    _kinds: ClassVar[dict[type, type[ReplicaExchange]]] = {}
    streams: Streams

    def __init_subclass__(cls, *, ensemble: type) -> None:
        ReplicaExchange._kinds[ensemble] = cls

    def __new__(cls, ensemble: Any, *_: Any, **__: Any) -> ReplicaExchange:
        for kinds in ("density", "network"):
            importlib.import_module(f"torchrex.{kinds}")
        kind = next(
            (run for kind, run in ReplicaExchange._kinds.items() if isinstance(ensemble, kind)),
            None,
        )
        if kind is None:
            raise InvalidArgumentError(
                f"ensemble must be of the kind of TensorEnsemble.start(target, n_rungs=2) or ModuleEnsemble(model, energy), "
                f"got {ensemble!r}"
            )
        return super().__new__(kind)

    def __init__(
        self,
        ensemble: Any,
        ladder: Ladder,
        *,
        noise: NoiseEstimator | None = None,
        correction_factor: float | FactorRule = 1.0,
        pairing: Pairing | None = None,
        swap_interval: int = 1,
        swap_start: int = 0,
        swap_rest: int = 0,
        swap_intensity: float | None = None,
        momentum: MomentumPolicy = "rescale",
        seed: int = 0,
        compiled: bool | None = None,
        **options: Any,
    ) -> None:
        """`noise=None` fits the target (see `default_estimator`). `compiled=None` compiles where it
        pays: long runs on a density on a CPU, and modules on a GPU, where the whole step is
        captured as one graph. Runs on modules take further `options`: see `ModuleExchange`.

        `swap_rest` is for the paper's annealed recipes only: a pair that rests after each swap
        samples another law. With exact energies and temperatures 1 and 3 the variance of rung 0 is
        1.42 times the right one at 5 steps of rest.
        """
        for name, value, kind, example in (
            ("ladder", ladder, Ladder, "Ladder((1.0, 10.0), 0.03)"),
            ("noise", noise, NoiseEstimator, "RunningMean(RepeatedDraws(10))"),
            ("pairing", pairing, Pairing, "EvenOdd()"),
        ):
            if value is not None and not isinstance(value, kind):
                raise InvalidArgumentError(
                    f"{name} must be of the kind of {example}, got {value!r}"
                )
        if swap_interval < 1:
            raise InvalidArgumentError(f"swap_interval must be at least 1, got {swap_interval}")
        for name, steps in (("swap_start", swap_start), ("swap_rest", swap_rest)):
            if steps < 0:
                raise InvalidArgumentError(f"{name} must be a number of steps >= 0, got {steps}")
        if momentum not in POLICIES:
            raise InvalidArgumentError(
                f"momentum must be one of {', '.join(POLICIES)}, got {momentum!r}"
            )
        if swap_intensity is not None and not (
            swap_intensity > 0 and swap_intensity * max(ladder.lrs) <= 1
        ):
            raise InvalidArgumentError(
                f"swap_intensity r must be positive with r * lr <= 1, which is a probability; got r={swap_intensity} with "
                f"lrs={ladder.lrs}"
            )
        target = ensemble.source_of_noise
        if not ladder.n_pairs:
            noise = KnownVariance()  # nothing to swap, nothing to estimate
        elif noise is None:
            noise = default_estimator(target)
        noise.check(target)
        self.rules = Rules(
            ladder=ladder,
            noise=noise,
            factor=as_rule(correction_factor),
            pairing=default_pairing(target, ladder.n_pairs) if pairing is None else pairing,
            swap_interval=swap_interval,
            swap_start=swap_start,
            swap_rest=swap_rest,
            swap_intensity=swap_intensity,
            momentum=momentum,
        )
        _warn_of_biased_rules(self.rules, target)
        known = list(inspect.signature(self._start).parameters)[4:]
        for name in options:
            if name not in known:
                arguments = [*inspect.signature(ReplicaExchange.__init__).parameters, *known]
                near = difflib.get_close_matches(name, arguments, n=1)
                hint = (
                    f"did you mean {near[0]}?"
                    if near
                    else f"it has {', '.join(known)}"
                    if known
                    else "it has no further options"
                )
                raise InvalidArgumentError(f"unknown argument {name!r} of ReplicaExchange; {hint}")
        self.n_steps = 0
        self._state: ExchangeState
        self._start(ensemble, self.rules, seed, compiled, **options)

    def _start(self, ensemble: Any, rules: Rules, seed: int, compiled: bool | None) -> None:
        raise NotImplementedError

    def step(self, batch: Any = None) -> StepInfo:
        """One step of every replica."""
        raise NotImplementedError

    def advance(
        self, n_steps: int, data: Any = None, *, every: int | None = None
    ) -> Iterator[StepInfo]:
        """Run `n_steps` steps; yields the information of some steps at a time, stacked along a
        first axis.

        How many is up to the run, unless `every` says so: then it yields whenever `run.n_steps` is
        a multiple of `every`, and at the end. It is a generator: nothing happens until you loop
        over it.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step needs; with `load_state_dict` a run goes on exactly as if it had
        not stopped.
        """
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of a run with the same target, ladder and rules."""
        raise NotImplementedError

    # Of runs on networks alone, see `ModuleExchange`

    def replica_at(self, rung: int) -> int:
        """On a network: the number of the replica that is at that rung now."""
        raise self._for_networks("replica_at", "run.state.replica_at is that of every run")

    def module_at(self, rung: int = 0) -> nn.Module:
        """On a network: a copy, in evaluation mode, of the module at that rung now."""
        raise self._for_networks("module_at", "its replicas are in run.ensemble.position")

    def live_module_at(self, rung: int = 0) -> nn.Module:
        """On a network: the module of the replica itself; whoever changes it changes the run."""
        raise self._for_networks("live_module_at", "its replicas are in run.ensemble.position")

    def predict(self, batch: Any, rung: int = 0) -> Any:
        """On a network: the output of the module at that rung for a batch, in evaluation mode and
        without gradients.
        """
        raise self._for_networks(
            "predict", "compute what you need from the draws of torchrex.collect"
        )

    def measure(self, batches: Iterable[Any]) -> None:
        """On a network, with RepeatedDraws: feed the variance of the energies of some batches at
        the current weights.
        """
        raise self._for_networks("measure", "a density is measured by itself")

    def noise_shape(self, batch: Any = None, *more: Any) -> NoiseShape | None:
        """Is the energy noise Gaussian, as the swap test takes it to be? None without noise or
        swaps; a network needs batches.
        """
        raise NotImplementedError

    @staticmethod
    def _for_networks(name: str, instead: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{name} is for runs on networks, and this run is on a density: {instead}"
        )

    @property
    def n_rungs(self) -> int:
        """Rungs of the ladder, and as many replicas."""
        return self.rules.ladder.n_rungs

    @property
    def state(self) -> ExchangeState:
        """Who stands where, and what the estimators know, as a copy."""
        return ExchangeState(*(tensor.clone() for tensor in self._state))

    @property
    def correction_factor(self) -> Tensor:
        """F of the next test of each pair, (pairs, runs); at the end of a schedule, of the latest
        one.
        """
        now = self.temperatures_at(self.n_steps)
        now = now if bool(now.isfinite().all()) else self.temperatures_at(self.n_steps - 1)
        first_gap, gap = (
            (1.0 / each).neg().diff().unsqueeze(-1) for each in (self.temperatures_at(0), now)
        )
        learnt = self._state.correction_factor.cpu().double()
        return self.rules.factor.factor(learnt, gap, first_gap).expand(learnt.shape[-2:]).clone()

    def temperatures_at(self, step: int) -> Tensor:
        """Those of a step, counted from 0: (rungs,), in double."""
        temperature, _, _ = self.rules.ladder.table(
            step, 1, device=torch.device("cpu"), dtype=torch.float64
        )
        return temperature[0]

    def _repr_html_(self) -> str:
        """For notebooks: the rungs with what holds at the next step, and the rules."""
        ladder = self.rules.ladder
        temperatures, lrs, _ = ladder.table(
            self.n_steps, 1, device=torch.device("cpu"), dtype=torch.float64
        )
        rows = [
            (
                str(rung),
                *("no value" if value != value else f"{value:g}" for value in (temperature, lr)),
            )
            for rung, (temperature, lr) in enumerate(
                zip(temperatures[0].tolist(), lrs[0].tolist(), strict=True)
            )
        ]
        rules = ", ".join(
            f"{name}: {value}" for name, value in self._rule_settings().items() if name != "ladder"
        )
        return notebook.panel(
            "ReplicaExchange",
            f"{self.n_rungs} rungs, step {self.n_steps:,}",
            notebook.table(("rung", "temperature", "lr"), rows),
            notebook.details("rules", rules),
            notebook.details("ensemble", repr(self)),
        )

    def _rule_settings(self) -> dict[str, str]:
        """What must agree between a state and the run that loads it, as far as the rules go."""
        rules = self.rules
        return {
            "ladder": rules.ladder.in_words(),
            "noise": repr(rules.noise),
            "correction_factor": repr(rules.factor),
            "pairing": repr(rules.pairing),
            "swap_interval": str(rules.swap_interval),
            "swap_start": str(rules.swap_start),
            "swap_rest": str(rules.swap_rest),
            "swap_intensity": str(rules.swap_intensity),
            "momentum": rules.momentum,
        }

    @staticmethod
    def _require_same(stored: Any, mine: dict[str, str]) -> None:
        """Refuse a state that was made with other settings, naming them."""
        stored = stored if isinstance(stored, dict) else {}
        for name in {**mine, **stored}:
            if stored.get(name) != mine.get(name):
                raise InvalidArgumentError(
                    f"the state is that of another run: its {name} is {stored.get(name)}, that of this run is {mine.get(name)}"
                )


# What help() and editors show: the arguments of __init__, not those of __new__, which only chooses
# the kind of run.
ReplicaExchange.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    ReplicaExchange.__init__
).replace(parameters=list(inspect.signature(ReplicaExchange.__init__).parameters.values())[1:])


def require_every(every: int | None) -> None:
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise InvalidArgumentError(f"every must be a whole number >= 1, or None, got {every!r}")


def joined(infos: Sequence[StepInfo]) -> StepInfo:
    """One after the other."""
    return (
        infos[0]
        if len(infos) == 1
        else StepInfo(*(torch.cat(values) for values in zip(*infos, strict=True)))
    )


def _warn_of_biased_rules(rules: Rules, target: Any) -> None:
    """Warn of rules under which rung 0 does not have its law. Where temperatures are annealed
    nothing is sampled anyway.
    """
    ladder = rules.ladder
    if ladder.anneal is not None or not rules.swaps:
        return
    if rules.swap_rest:
        logger.warning(
            "swap_rest=%d changes the law of rung 0: a pair that rests after each swap stays too long where it has just "
            "come to. Use swap_interval=%d for rarer tests",
            rules.swap_rest,
            rules.swap_rest + 1,
        )
    # A swap decides which lr a replica moves with. If it looked at the move's own minibatch, the
    # two are correlated.
    if len(set(ladder.lrs)) > 1 and rules.swap_interval == 1 and target.n_data is not None:
        logger.warning(
            "the rungs have unequal learning rates %s and swaps are tested at every step, on the minibatch of the move: rung 0 "
            "is biased (for example, at a ratio of 3 its variance can be 0.91 of the right one). Use equal learning rates, or "
            "swap_interval=20",
            ladder.lrs,
        )


def steps_on(device: torch.device | str) -> torch.device:
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
