"""Problems where exchange may win, and what each method makes of them at equal cost.

The cost of a run is the number of examples it evaluates, those of swaps and of tuning included. One
recipe is one problem with all methods, of which every one has `n_runs` independent runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchrex.density import few_threads
from torchrex.errors import ConfigError, TorchrexError
from torchrex.exchange import Ladder
from torchrex.posterior import Draws
from torchrex.rng import derive_seed
from torchrex.runs.config import Column, ExperimentConfig, Outcome, RunOptions
from torchrex.runs.folder import Run, RunResult
from torchrex.sampling import sample
from torchrex.targets import TallPosterior
from torchrex.targets.density import Noise
from torchrex.tuning import Tuned, tune

METHODS = {
    "one": "one chain",
    "pooled": "independent chains, pooled",
    "best": "independent chains, best of",
    "naive": "naive swaps, step's batch",
    "corrected": "corrected swaps, step's batch",
    "full": "exact tempering, all data",
    "tuned": "tuned exchange",
}
MORE = {"ensemble": "deep ensemble", "restarts": "SGD with restarts"}  # of some problems
INDEPENDENT = ("one", "pooled", "best", *MORE)  # the baselines without swaps
KEPT = 200  # draws of a run that are measured, from its second half
JUDGED = 4  # draws by whose energy on all data the best of independent chains is chosen
GUESSED_RUNGS = 20  # of the tuned ladder, for the number of steps that `tune` is told
WORTH_A_PROCESS = 500_000  # steps of one chain; fewer end before a second process begins


@dataclass(frozen=True)
class Problem:
    """A posterior, a question about it, and the right answer."""

    target: TallPosterior  # its prior is a distribution: where runs start, and the hot end
    lr: float  # of rung 0, on minibatches
    estimate: Callable[[Tensor], Tensor]  # of draws (runs, draws, dim): one number per run
    # What the estimate must be, or what computes it and its error.
    exact: float | Callable[[], tuple[float, float]]
    words: str  # what the number is
    exact_error: float = 0.0
    lower_is_better: bool | None = None  # None: |estimate - exact| is the score, else the estimate
    hot: float = 100.0  # the hottest temperature of a ladder made by hand
    # Of draws (runs, draws, dim): the share of each run that is in the right modes.
    found: Callable[[Tensor], Tensor] | None = None
    # Of draws (runs, draws, dim): at most a few hundred numbers. `plot(axis, {method: numbers},
    # {method: style})` makes a picture of them.
    shown: Callable[[Tensor], Tensor] | None = None
    plot: Callable[[Any, dict[str, Tensor], Mapping[str, Any]], None] | None = None
    # Further baselines by their names in MORE: `f(problem, examples, n_runs, seed=...)` gives what
    # the estimate takes.
    more: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)

    def answer(self) -> tuple[float, float]:
        """What the estimate must be, and the error of that."""
        return self.exact() if callable(self.exact) else (self.exact, self.exact_error)


class Entry(NamedTuple):
    """A problem of the gallery and what a run of it costs."""

    make: Callable[[], Problem]
    n_steps: int  # of one chain
    is_large: bool = False  # not part of `torchrex reproduce gallery`


def problems() -> dict[str, Entry]:
    """Every problem by its recipe."""
    from torchrex.experiments.clusters import clusters  # they import `Problem` from here
    from torchrex.experiments.dynamics import dynamics
    from torchrex.experiments.period import period
    from torchrex.experiments.teacher import teacher

    # The learning rates of the large forms have the bias of the small ones: lr h N / (2 n).
    many_points = partial(clusters, 8, 1_000_000, 1_000, lr=4.5e-9)
    return {
        "gallery/period": Entry(period, 5_000_000),
        "gallery/clusters": Entry(clusters, 1_000_000),
        "gallery/clusters-15": Entry(partial(clusters, 15), 2_000_000),
        "gallery/clusters-25": Entry(partial(clusters, 25), 1_000_000),
        "gallery/dynamics": Entry(dynamics, 3_000_000),
        "gallery/teacher": Entry(teacher, 1_800_000),
        "gallery/clusters-25-long": Entry(partial(clusters, 25), 3_000_000, is_large=True),
        "gallery/teacher-long": Entry(teacher, 3_600_000, is_large=True),
        "gallery/period-200k": Entry(partial(period, 200_000, lr=3e-7), 500_000_000, is_large=True),
        "gallery/clusters-million": Entry(many_points, 30_000_000, is_large=True),
    }


def gallery_recipes(*, large: bool = False) -> dict[str, GalleryConfig]:
    """Those that run in minutes, or the large ones."""
    return {
        name: GalleryConfig(name, each.n_steps)
        for name, each in problems().items()
        if each.is_large == large
    }


@dataclass(frozen=True)
class GalleryConfig(ExperimentConfig):
    """All methods on one problem."""

    n_steps: int = 1_000_000  # of one chain; every method evaluates as many minibatches
    n_runs: int = 8  # independent runs of every method
    keeps_checkpoints: ClassVar[bool] = False

    temperatures = (1.0,)

    def check(self) -> None:
        self.require("n_steps", self.n_steps >= 1, "at least 1")
        self.require("n_runs", self.n_runs >= 2, "at least 2, for a standard error")

    def ladder(self) -> Ladder:
        """That of one chain; the others depend on what tuning finds."""
        return Ladder(self.temperatures, self.problem().lr)

    def problem(self) -> Problem:
        return problems()[self.recipe].make()

    @property
    def columns(self) -> tuple[Column, ...]:
        more = {name: title for name, title in MORE.items() if name in self.problem().more}
        titles = {**METHODS, **more}
        answers = [Column(name, title, decimals=4) for name, title in titles.items()]
        return (*answers, Column("answer_true", "exact", decimals=4))

    def execute(
        self, runs: Sequence[Run], options: RunOptions
    ) -> tuple[Outcome, Sequence[RunResult]]:
        if options.log:
            raise ConfigError(f"--log is for networks; leave it out for {self.recipe}")
        ((run,), began) = runs, time.perf_counter()
        comparison = Comparison(self, self.problem(), run, options)
        try:
            comparison.compare()
            status, result = "finished", comparison.result()
        except _Stopped as stopped:
            status, result = stopped.status, RunResult(steps_done=comparison.steps_done)
        return Outcome(status, total_seconds=time.perf_counter() - began), [result]


class FullData(TallPosterior):
    """All data at every step: moves and swaps without noise."""

    has_noise = False

    @classmethod
    def of(cls, target: TallPosterior) -> FullData:
        prior = target.prior or target.log_prior
        n = len(target.data[0])
        return cls(target.log_likelihood, prior, target.data, target.dim, batch_size=n)

    def draw_noise(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Noise:
        return {}


class Plan(NamedTuple):
    """What one method draws with."""

    ladder: Ladder
    examples: float  # of one run
    rules: Mapping[str, Any] = {}
    target: TallPosterior | None = None  # None: that of the problem
    chains: int = 1  # in one run of the method


class _Stopped(Exception):  # noqa: N818 - not an error
    """The budget is used up, or a signal came."""

    def __init__(self, status: str) -> None:
        self.status = status


class Comparison:
    """Every method on one problem, each with the same number of examples."""

    def __init__(
        self, config: GalleryConfig, problem: Problem, run: Run, options: RunOptions
    ) -> None:
        self.config, self.problem, self.run, self.options = config, problem, run, options
        self.examples = float(config.n_steps * problem.target.batch_size)  # of one run
        self.began = time.monotonic()
        self.metrics: dict[str, Any] = {}
        self.curves: dict[str, list[float]] = {}
        self.done = 0  # methods, of those that draw

    @property
    def steps_done(self) -> int:
        return self.config.n_steps * self.done // (len(METHODS) - 1)

    def compare(self) -> None:
        """Tune, then draw by each method and measure."""
        problem, tuned = self.problem, self.tuned()
        tuning = tuned.examples / self.config.n_runs
        self.metrics |= {
            "rungs": tuned.ladder.n_rungs,
            "tuning_examples": tuning,
            "swap_batch": tuned.rules.get("swap_batch", 0),
            "swap_interval": tuned.rules.get("swap_interval", 1),
        }
        plans, more = self.plans(tuned), {}
        with self.second_process(tuned) as (next_method, wait):
            drawn = {method: self.sampled(method, plans[method]) for method in next_method}
            for name, function in problem.more.items():
                seed = derive_seed(self.run.seed, f"gallery.{name}")
                more[name] = function(problem, self.examples, self.config.n_runs, seed=seed)
            wait()
        for method, plan in plans.items():  # what the other process drew is in its checkpoints
            resume = replace(self.options, resume=True)
            draws = drawn[method] if method in drawn else self.sampled(method, plan, resume)
            if method == "pooled":
                self.independent(draws, plan)
            else:
                examples = self.evaluated(draws, plan.target or problem.target)
                self.measure(method, draws.values, examples, draws)
        self.metrics["tuned_examples"] += tuning
        for name, values in more.items():
            self.measure(name, values, self.examples)

    def plans(self, tuned: Tuned) -> dict[str, Plan]:
        problem, examples = self.problem, self.examples
        target, lr = problem.target, problem.lr
        tuning, rungs = tuned.examples / self.config.n_runs, max(2, tuned.ladder.n_rungs)
        alone = Ladder((1.0,), lr)
        by_hand = Ladder.geometric(1.0, problem.hot, rungs, lrs=lr)
        # Minibatches of n widen a law by lr h N / (2 n) besides the lr h / 2 of the discretisation:
        # without them a larger lr has the same bias.
        larger = lr * (1.0 + len(target.data[0]) / target.batch_size) if target.has_noise else lr
        exact = Ladder.for_likelihood(
            tuned.ladder.temperatures, larger, prior_variance=target.prior_variance
        )
        a_chain = examples / rungs - JUDGED * len(target.data[0])
        return {
            "one": Plan(alone, examples),
            "pooled": Plan(alone, a_chain, chains=rungs),
            "naive": Plan(by_hand, examples, {"correction_factor": math.inf}),
            "corrected": Plan(by_hand, examples),
            "full": Plan(exact, examples, {"tempering": "likelihood"}, FullData.of(target)),
            "tuned": Plan(tuned.ladder, examples - tuning, tuned.rules),
        }

    def tuned(self) -> Tuned:
        """What `tune` chooses. All runs together pay for it, so each pays its part."""
        target, config = self.problem.target, self.config
        n_steps = int(self.examples / (2 * target.batch_size * GUESSED_RUNGS))
        tuned = tune(
            target, lr=self.problem.lr, n_steps=max(1, n_steps), n_runs=config.n_runs,
            seed=derive_seed(self.run.seed, "gallery.tune"), show=False,
        )  # fmt: skip
        if tuned.examples > 0.5 * self.examples * config.n_runs:
            raise ConfigError(
                f"setting 'n_steps' is too small: tuning alone evaluates {tuned.examples:.3g} of "
                f"the {self.examples * config.n_runs:.3g} examples of all runs; raise it"
            )
        return tuned

    def independent(self, draws: Draws, plan: Plan) -> None:
        """The chains without swaps, pooled, and the one of least energy on all data."""
        target, runs, n = self.problem.target, self.config.n_runs, plan.chains
        chains = draws.values.reshape(runs, n, draws.n_draws, -1)  # (runs, chains, draws, dim)
        some = torch.linspace(0, draws.n_draws - 1, JUDGED).long()
        judged = chains[:, :, some].flatten(0, 2)
        energy = torch.cat(
            [target.full_energy(part) for part in judged.chunk(math.ceil(len(judged) / 64))]
        )
        best = energy.view(runs, n, JUDGED).mean(2).argmin(1)
        examples = n * (self.evaluated(draws, target) + JUDGED * len(target.data[0]))
        self.measure("pooled", chains.flatten(1, 2), examples, draws)
        self.measure("best", chains[torch.arange(runs), best], examples, draws)

    def sampled(self, method: str, plan: Plan, options: RunOptions | None = None) -> Draws:
        """As many steps as the examples allow. Draws of the second half are kept, KEPT of a run of
        so many chains.
        """
        ladder, examples, rules, target, chains = plan
        target, options = target or self.problem.target, options or self.options
        size, interval = rules.get("swap_batch") or 0, rules.get("swap_interval", 1)
        per_step = ladder.n_rungs * (target.batch_size + size / interval)
        n_steps = int((examples - ladder.n_rungs * size) / per_step)
        if n_steps < 2 * JUDGED:
            raise ConfigError(
                f"setting 'n_steps' is too small: {METHODS[method]} gets {n_steps} steps; raise it"
            )
        kept = min(max(JUDGED, KEPT // chains), n_steps // 2)
        thin = n_steps // (2 * kept)
        folder = self.run.checkpoints
        draws = sample(
            target, ladder=ladder, n_steps=n_steps, thin=thin,
            n_runs=self.config.n_runs * chains, burn_in=n_steps - kept * thin,
            seed=derive_seed(self.run.seed, f"gallery.{method}"),
            device=self.config.device(options.device), progress=self.progress(),
            checkpoints=None if folder is None else folder / method, resume=options.resume,
            budget=self.budget_left(), on_interrupt="return", **rules,
        )  # fmt: skip
        if draws.status != "finished":
            raise _Stopped(draws.status)
        self.done += 1
        return draws

    @contextlib.contextmanager
    def second_process(self, tuned: Tuned) -> Iterator[tuple[Iterator[str], Callable[[], None]]]:
        """The methods that this process shall draw with, and what waits for the other process,
        which draws with the rest into their checkpoints. If it fails, this process meets the error.
        """
        spawn = multiprocessing.get_context("spawn")
        # "full" takes up to four times as long as another, so it begins.
        methods = sorted(self.plans(tuned), key=lambda method: method != "full")
        short = self.config.n_steps < WORTH_A_PROCESS
        if self.run.checkpoints is None or short or self.options.processes < 2:
            yield iter(methods), lambda: None
            return
        taken, run = spawn.Value("i", 0), replace(self.run, observers=())
        options = replace(self.options, progress=None, observers=(), budget=self.budget_left())
        other = spawn.Process(
            target=_draw_too, args=(self.config, run, options, tuned, methods, taken), daemon=True
        )
        other.start()
        try:
            yield _remaining(methods, taken), other.join
        except KeyboardInterrupt:
            raise _Stopped("interrupted") from None
        finally:
            other.terminate()  # it saves what it has
            other.join()

    def budget_left(self) -> float | None:
        budget = self.options.budget
        return None if budget is None else max(1e-9, budget - (time.monotonic() - self.began))

    def progress(self) -> Callable[[int, int], None] | None:
        show, total, before = self.options.progress, self.config.n_steps, self.steps_done
        if show is None:
            return None
        share = total // (len(METHODS) - 1)
        return lambda done, of: show(before + share * done // of, total)

    @staticmethod
    def evaluated(draws: Draws, target: TallPosterior) -> float:
        """Examples of one run, those of its swaps included."""
        n_rungs, swaps = draws.replica_at.shape[1], draws.settings.get("swap_cost", 0.0)
        return draws.n_steps * n_rungs * target.batch_size * (1.0 + float(swaps))

    def measure(
        self, method: str, values: Tensor, examples: float, draws: Draws | None = None
    ) -> None:
        from torchrex.diagnostics import mean_and_error  # scipy loads slowly

        problem, values = self.problem, values.cpu()
        with few_threads(0):
            each = {"": problem.estimate(values)}
            if problem.found is not None:
                each["_found"] = problem.found(values)
            for ending, numbers in each.items():
                name = method + ending
                self.metrics[name], self.metrics[f"{name}_se"] = mean_and_error(numbers.double())
                self.curves[name] = numbers.tolist()
            if problem.shown is not None:
                self.curves[f"{method}_shown"] = problem.shown(values).tolist()
        self.metrics[f"{method}_examples"] = examples
        if draws is not None and len(draws.accepted):
            self.metrics[f"{method}_acceptance_rate"] = float(draws.acceptance_rate.mean())

    def result(self) -> RunResult:
        exact, error = self.problem.answer()
        answer = {"answer_true": exact, "answer_se": error}
        return RunResult(metrics={**self.metrics, **answer}, curves=self.curves)


def _remaining(methods: Sequence[str], taken: Any) -> Iterator[str]:
    """Those that no process has taken yet; `taken` is shared and counts them."""
    while True:
        with taken.get_lock():
            k, taken.value = taken.value, taken.value + 1
        if k >= len(methods):
            return
        yield methods[k]


def _draw_too(
    config: GalleryConfig,
    run: Run,
    options: RunOptions,
    tuned: Tuned,
    methods: Sequence[str],
    taken: Any,
) -> None:
    """The second process. It leaves when the first asks for it (SIGTERM) or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()  # the first process says the same when it reads the draws
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    comparison = Comparison(config, config.problem(), run, options)
    plans = comparison.plans(tuned)
    with contextlib.suppress(TorchrexError, _Stopped):
        for method in _remaining(methods, taken):
            comparison.sampled(method, plans[method])


def _leave_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)
