"""`train`: one loop for a run on a module, or for several together: steps, averages, trace,
observers, checkpoints, stopping in time.

Where the loop pauses (for an average, a checkpoint, the clock, a signal) has no influence on the
numbers: stopped and resumed equals never stopped, bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from torchrex.checkpoint import Checkpoint, Checkpoints, expect_form, owned, seconds_in
from torchrex.errors import (
    CheckpointError,
    InvalidArgumentError,
    MissingDependencyError,
    NonFiniteEnergyError,
    OnInterrupt,
    RunFolderError,
    RunInterrupted,
    explain_memory,
    known_arguments,
    require_on_interrupt,
    require_whole,
)
from torchrex.exchange import RepeatedDraws, ReplicaExchange, StepInfo, warn_of_dead_pairs
from torchrex.network.group import SideBySide
from torchrex.network.run import LOWER_IT, ModuleExchange
from torchrex.posterior import PosteriorAverage
from torchrex.processes import stopping_signals
from torchrex.recording import LiveDisplay, Observer, Trace, Watched, on_host
from torchrex.runs.config import Outcome
from torchrex.runs.folder import RunResult
from torchrex.runs.script import ScriptConfig, ScriptRun, name_of, owned_folders

logger = logging.getLogger("torchrex")

SECONDS_BETWEEN_LOOKS = 0.5  # at the clock and for signals

Progress = Callable[[int, int], None] | bool | None


@dataclass
class TrainingRun:
    """One run of several that train together, with what belongs to it alone."""

    run: ModuleExchange
    averages: Sequence[PosteriorAverage] = ()
    trace: Trace | None = None
    checkpoints: Checkpoints | None = None  # or a folder for them
    setting: Mapping[str, Any] = field(default_factory=dict)
    failure: NonFiniteEnergyError | None = None  # why it stopped before the others
    observers: Sequence[Observer] = ()  # several runs may share one
    out: ScriptRun | None = None  # or a path: its run folder, with the checkpoints in it

    def __post_init__(self) -> None:
        given: tuple[Any, ...] = (self.run, self.averages, self.observers, self.checkpoints)
        run, averages, observers, folder = given
        out: Any = self.out
        if not isinstance(run, ModuleExchange):
            raise InvalidArgumentError(f"torchrex.TrainingRun is for runs on a module, got {run!r}")
        self.averages = [averages] if isinstance(averages, PosteriorAverage) else list(averages)
        self.observers = [observers] if isinstance(observers, Observer) else list(observers)
        if out is not None:
            if folder is not None:
                raise InvalidArgumentError(
                    f"out={str(out)!r} holds the checkpoints too; leave checkpoints out"
                )
            self.out = ScriptRun(out, "train", run.streams.seed)
            folder = self.out.checkpoints
        self.checkpoints = Checkpoints(Path(folder)) if isinstance(folder, Path | str) else folder

    @property
    def recipe(self) -> str:
        name = "a run" if self.out is None else name_of(self.out.folder.path)
        return str(self.setting.get("recipe", name))

    @property
    def identity(self) -> dict[str, Any]:
        """The setting by which a checkpoint is known to be one of this run."""
        return {**self.setting, **self.run.setting, "seed": self.run.streams.seed}

    @property
    def newest_checkpoint(self) -> Path | None:
        steps = [] if self.checkpoints is None else self.checkpoints.steps()
        return self.checkpoints.path_of(steps[-1]) if self.checkpoints and steps else None

    def config(self, n_steps: int, data: Any) -> ScriptConfig:
        """The settings that its run folder holds."""
        assert self.out is not None
        assert self.trace is not None
        ensemble, first = self.run.ensemble, next(iter(self.averages), None)
        return ScriptConfig.of(
            self.run,
            self.out.folder.path,
            n_steps,
            setting=dict(self.setting),
            model=self.run.setting["model"],
            energy=repr(ensemble.energy),
            lr_factors=", ".join(f"{k}: {v:g}" for k, v in ensemble.source.lr_factors.items()),
            clip=self.run.setting.get("clip"),
            precision="float32" if ensemble.source.autocast is None else "bfloat16",
            batch_size=getattr(data, "batch_size", None),
            burn_in=0 if first is None else first.burn_in,
            thin=1 if first is None else first.every,
            trace_every=self.trace.every,
        )

    def result(self, exchange: Mapping[str, Any], clipped: float, examples: int) -> RunResult:
        """What its run folder says of it: the metrics of its first average, and its swaps."""
        metrics: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for average in self.averages[:1] if self.failure is None else ():
            metrics, tensors = summary_of(average)
        if self.run.setting.get("clip") is not None:
            metrics["clipped_share"] = clipped
        metrics["examples"] = examples
        return RunResult(
            self.trace, metrics, tensors=tensors, exchange=exchange, failure=self.failure
        )

    def __str__(self) -> str:
        return f"{self.recipe} with seed {self.run.streams.seed}"


@known_arguments()
def train(
    run: ReplicaExchange,
    data: Any,
    n_steps: int,
    *,
    average: PosteriorAverage | Sequence[PosteriorAverage] = (),
    trace: Trace | None = None,
    out: Path | str | None = None,
    checkpoints: Checkpoints | Path | str | None = None,
    checkpoint_every: int = 1000,
    resume: bool = True,
    budget: float | None = None,
    progress: Progress = None,
    setting: Mapping[str, Any] | None = None,
    extra: Any = None,
    observers: Observer | Sequence[Observer] = (),
    on_interrupt: OnInterrupt = "raise",
) -> Outcome:
    """Advance a run on a module to `n_steps` steps in all, on batches of `data`, feeding averages
    and the trace.

    Returns how it ended: look at its `status`. `progress=True` shows the live display, a function
    is called as `progress(done, total)`. `observers` get reports of what the run does:
    `JsonLines(path)`, `TensorBoard(folder)`, `WandB(folder)`, `MLflow(folder)`, or your own.

    `out="runs/mynet/seed=0"` writes a run folder as a recipe does: settings, trace, swaps, metrics
    of the averages, and checkpoints. `torchrex report`, `doctor` and `compare` read it, and so does
    `run.report()`.

    With `checkpoints` (a folder; `out` has its own) everything is saved every `checkpoint_every`
    steps and at the end, and a call that finds checkpoints there goes on from the newest one; with
    `resume=False` it begins anew, in a folder without later ones. After `budget` seconds it saves
    and returns "paused". Ctrl-C, SIGTERM and SIGHUP finish the step and save; then Ctrl-C goes on
    as RunInterrupted, a KeyboardInterrupt, SIGTERM and SIGHUP as SystemExit(143) and
    SystemExit(129), so that nothing that was to follow is begun. With `on_interrupt="return"` they
    return "interrupted". `setting` is written into the checkpoints, and a run with another one
    cannot resume from them. `extra` is where repeated
    energies get their batches, if not from `data`.
    """
    if not isinstance(run, ModuleExchange):
        raise InvalidArgumentError("train is for runs on modules; use collect for densities")
    own: Any = {
        **{"averages": average, "checkpoints": checkpoints},
        **{"observers": observers, "out": out},
    }
    one = TrainingRun(run, trace=trace, setting=dict(setting or {}), **own)
    return train_together(
        [one],
        data,
        n_steps,
        checkpoint_every=checkpoint_every,
        resume=resume,
        budget=budget,
        progress=progress,
        extra=extra,
        on_interrupt=on_interrupt,
    )


@known_arguments()
def train_together(
    runs: Sequence[TrainingRun],
    data: Any,
    n_steps: int,
    *,
    checkpoint_every: int = 1000,
    resume: bool = True,
    budget: float | None = None,
    progress: Progress = None,
    extra: Any = None,
    on_interrupt: OnInterrupt = "raise",
) -> Outcome:
    """`train` for several runs on the same batches, side by side in one captured step; each ends as
    it would alone.

    They go on from the newest step of which all of them have a checkpoint. A run whose energy
    becomes NaN stops, with the reason in its `failure`; the others go on. If none is left, or there
    was only one, it is raised.
    """
    require_whole("n_steps", n_steps, least=1)
    require_whole("checkpoint_every", checkpoint_every, least=1)
    if not all(isinstance(each, TrainingRun) for each in runs):
        raise InvalidArgumentError("train_together takes [torchrex.TrainingRun(run, ...), ...]")
    if len({each.checkpoints is None for each in runs}) > 1:
        raise InvalidArgumentError("give checkpoints to all runs or to none")
    require_on_interrupt(on_interrupt)
    loop = _Loop(runs, data, extra)
    folders, process_group = [each.checkpoints for each in runs], loop.process_group
    with (
        process_group.reporting_errors(),
        explain_memory(loop.out_of_memory),
        owned_folders([each.out for each in runs if each.out is not None], process_group),
        owned(folders, process_group),
    ):
        loop.begin_traces(n_steps)
        if loop.saves:
            loop.resume() if resume else loop.require_nothing_later()
        loop.require_steps(n_steps)
        loop.begin_folders(n_steps)
        try:
            outcome = loop.train(n_steps, checkpoint_every, budget, progress)
        except NonFiniteEnergyError as failure:
            for each in runs:
                each.failure = each.failure or failure
            loop.write_folders(Outcome("failed", total_seconds=loop.seconds))
            raise
        loop.write_folders(outcome)
    if outcome.signal is not None and on_interrupt == "raise":
        how = f"interrupted after {outcome.total_steps:,} of {n_steps:,} steps"
        if outcome.status != "finished":
            saved = "the same call goes on from there"
            how += f"; {saved if loop.saves else 'nothing was saved without checkpoints'}"
        if outcome.signal != signal.SIGINT:
            if loop.process_group.is_main:
                logger.warning("%s", how)
            raise SystemExit(128 + outcome.signal)
        raise RunInterrupted(how, outcome=outcome)
    return outcome


class _Watching:
    """A run and its observers."""

    def __init__(self, one: TrainingRun) -> None:
        self.one = one
        self._watched: Watched | None = None
        self._observers: list[Observer] = []

    def start(self, n_steps: int, observers: Sequence[Any]) -> None:
        one = self.one
        watched = Watched(one.recipe, one.run, n_steps, tuple(one.averages), one.identity)
        self._watched = watched
        for observer in observers:
            if not isinstance(observer, Observer):
                raise InvalidArgumentError(
                    f"observers must derive from torchrex.recording.Observer, got {observer!r}"
                )
            observer.on_start(watched)
            self._observers.append(observer)

    def report(self, what: str, *more: Any) -> None:
        for observer in self._observers:
            getattr(observer, what)(self._watched, *more)

    def end(self, status: str) -> None:
        """The end of every observer that was started, also if that of another fails."""
        with contextlib.ExitStack() as ends:
            for observer in reversed(self._observers):
                ends.callback(observer.on_end, self._watched, status)  # type: ignore[arg-type]
        self._observers = []

    def record(self, info: StepInfo) -> None:
        here = on_host(info) if self._observers else info
        if self.one.trace is not None:
            self.one.trace.record(here)
        self.report("on_steps", here)

    def warn_of_swaps(self, name: str) -> None:
        """Name the pairs without swaps."""
        if self.one.run.rules.swaps:
            report = self.one.run.exchange()
            warn_of_dead_pairs(report.pairs, name, all_steps=report.steps_before == 0)


class _Loop:
    """Runs that go on together, with their averages, traces, observers and checkpoints."""

    def __init__(self, runs: Sequence[TrainingRun], data: Any, extra: Any) -> None:
        self.runs, self.data, self.extra = list(runs), data, extra
        first = runs[0].run
        self.group = first.alone if len(runs) == 1 else SideBySide([each.run for each in runs])
        self.process_group = first.mesh.process_group
        self.saves = runs[0].checkpoints is not None
        self.seconds = 0.0  # of all calls
        self._watching = [_Watching(each) for each in runs]

    @property
    def going(self) -> list[_Watching]:
        return [each for each in self._watching if each.one.failure is None]

    @property
    def n_steps(self) -> int:
        return self.going[0].one.run.n_steps

    def require_steps(self, n_steps: int) -> None:
        """Refuse a total that is behind the runs, or beyond the end of a schedule."""
        if self.n_steps > n_steps:
            raise InvalidArgumentError(
                f"the run is at step {self.n_steps}, beyond n_steps={n_steps}, which is the total"
            )
        for one in self.runs:
            ladder = one.run.rules.ladder
            for schedule in filter(None, (ladder.anneal, ladder.decay, ladder.noise)):
                schedule(n_steps - 1)

    def train(
        self, n_steps: int, checkpoint_every: int, budget: float | None, progress: Progress
    ) -> Outcome:
        began, earlier, first = time.monotonic(), self.seconds, self.n_steps
        process_group, stretch = self.process_group, 1

        def save() -> None:
            self.seconds = earlier + time.monotonic() - began
            self.save()

        def outcome(status: str, number: int | None = None) -> Outcome:
            save()
            self._status = status
            this_call = (self.seconds - earlier, self.n_steps - first)
            return Outcome(status, number, *this_call, self.seconds, self.n_steps)

        with self._observed(n_steps, progress is True), stopping_signals() as received:
            if self.saves and not _has_checkpoints(self.runs):
                save()  # so that a crash before the first one has somewhere to go back to
            while self.n_steps < n_steps:
                averages = [average for each in self.going for average in each.one.averages]
                due = [n_steps, *(_next_draw(average, self.n_steps) for average in averages)]
                if self.saves:
                    due.append((self.n_steps // checkpoint_every + 1) * checkpoint_every)
                looked = time.monotonic()
                here = min(stretch, min(due) - self.n_steps)
                self._advance(here)
                if callable(progress) and process_group.is_main:
                    progress(self.n_steps, n_steps)
                # All processes must stop at the same step: a signal to one is a signal to all.
                now = time.monotonic()
                over = budget is not None and now - began >= budget
                signalled = received[0] if received else 0
                number, used_up, took = process_group.maximum((signalled, over, now - looked))
                if number:
                    received.append(int(number))
                    return outcome("interrupted", int(number))
                if used_up and self.n_steps < n_steps:
                    return outcome("paused")
                if self.saves and self.n_steps % checkpoint_every == 0 and self.n_steps < n_steps:
                    save()
                stretch = max(1, int(here * min(2.0, SECONDS_BETWEEN_LOOKS / max(took, 1e-9))))
            for each in self.going:  # no energy follows the last move
                if (failure := _nonfinite_weights(each.one.run)) is not None:
                    self._stop_one(each, failure)
            (number,) = process_group.maximum((received[0] if received else 0,))
            end = outcome("finished", int(number) or None)
            for each in self.going if process_group.is_main else ():
                each.warn_of_swaps(str(each.one) if len(self.runs) > 1 else "")
            self.group.warn_of_bias()
            return end

    @contextlib.contextmanager
    def _observed(self, n_steps: int, live: bool) -> Iterator[None]:
        """Report to observers where every run begins, and how it ends."""
        self._status = "failed"  # unless it ends otherwise
        more = [LiveDisplay()] if live else []
        is_main = self.process_group.is_main
        with contextlib.ExitStack() as ends:
            for each in self._watching:
                ends.callback(lambda each: each.end(self._status), each)  # the status then
                each.start(n_steps, (*each.one.observers, *more) if is_main else ())
            try:
                yield
            except KeyboardInterrupt:
                self._status = "interrupted"
                raise

    def _advance(self, n_steps: int) -> None:
        try:
            for infos in self.group.advance(n_steps, self.data, self.extra):
                for each, info in zip(self._watching, infos, strict=True):
                    if info is not None:
                        each.record(info)
        except NonFiniteEnergyError as failure:
            raise failure.with_checkpoint(self.runs[0].newest_checkpoint) from None
        for k, reason in self.group.failures.items():
            self._stop_one(self._watching[k], reason)
        for each in self.going:
            try:
                for average in each.one.averages:
                    if average.update(each.one.run):
                        each.report("on_draw", average)
            except InvalidArgumentError:
                failed = _nonfinite_weights(each.one.run)
                if failed is None:
                    raise
                self._stop_one(each, failed)

    def _stop_one(self, each: _Watching, failure: NonFiniteEnergyError) -> None:
        """A run failed; if it was the last, this is the end."""
        one = each.one
        if one.failure is None:
            one.failure = failure.with_checkpoint(one.newest_checkpoint)
            if not self.going:
                raise one.failure
            each.end("failed")
            logger.warning("%s stops, the others go on: %s", one, one.failure)

    def out_of_memory(self) -> str:
        """What to say if memory is exhausted."""
        replicas = sum(each.run.n_rungs for each in self.runs)
        size = getattr(self.data, "batch_size", None)
        batches = "" if size is None else f" on batches of {size}"
        newest = self.runs[0].newest_checkpoint
        saved = f"; {newest.name} is saved, and --resume goes on from it" if newest else ""
        together = f" in {len(self.runs)} runs side by side" if len(self.runs) > 1 else ""
        fewer = "train fewer together, or " if len(self.runs) > 1 else ""
        return (
            f"{self.runs[0].run.device} has not enough memory for {replicas} replicas{together}"
            f"{batches}; {fewer}lower the batch size or the number of rungs{saved}"
        )

    # Run folders

    def begin_traces(self, n_steps: int) -> None:
        for one in self.runs:
            if one.out is not None and one.trace is None:
                one.trace = Trace(one.out.trace_every(n_steps))

    def begin_folders(self, n_steps: int) -> None:
        group = self.process_group
        with group.all_or_none("making of the run folders", RunFolderError):
            for one in self.runs if group.is_main else ():
                if one.out is not None:
                    one.out.begin(one.config(n_steps, self.data), one.run.device)
                    one.run.written_to(one.out.folder.path)

    def write_folders(self, outcome: Outcome) -> None:
        """A result.json for every run that has a folder."""
        group = self.process_group
        written = [one for one in self.runs if one.out is not None]
        # Several processes count together.
        reports = [
            (one.run.exchange().numbers, one.run.clipped_share()[0], one.run.n_examples)
            for one in written
        ]
        with group.all_or_none("writing of the results", RunFolderError):
            for one in self.runs if group.is_main else ():
                if one.out is not None:
                    one.out.write(
                        one.result(*reports.pop(0)),
                        "failed" if one.failure is not None else outcome.status,
                        outcome.total_seconds,
                        n_processes=group.size,
                        n_replicas=sum(each.run.n_rungs for each in self.runs),
                        signal=outcome.signal if outcome.status == "interrupted" else None,
                    )

    # Checkpoints

    def save(self) -> None:
        """Save all runs that go on. Weights that are not finite are not saved, unless the run will
        replace them.
        """
        for each in self.going if self.saves else ():
            one, run = each.one, each.one.run
            assert one.checkpoints is not None
            if not run.can_respawn and not all(run.ensemble.finite()):
                words = "no checkpoint at step %d, because weights are not finite"
                logger.warning(words, run.n_steps)
                continue
            each.report("on_save")
            state = run.state_dict()
            replicas = state.pop("replicas")
            if run.mesh.data_rank:  # another of the ranks that share a replica writes it
                replicas = [None] * len(replicas)
            state = {
                "replicas": replicas,
                "run": state,
                "averages": [average.state_dict() for average in one.averages],
                "trace": None if one.trace is None else one.trace.state_dict(),
                "data": _position_of(self.data),
                "extra": _position_of(self.extra),
                "seconds": self.seconds,
            }
            one.checkpoints.save(
                run.n_steps, state, setting=one.identity, process_group=self.process_group
            )
            for average in one.averages:
                if average.store is not None and self.process_group.is_main:
                    average.store.commit(oldest=one.checkpoints.steps()[0])

    def require_nothing_later(self) -> None:
        for one in self.runs:
            assert one.checkpoints is not None
            one.checkpoints.require_none_after(one.run.n_steps)

    def resume(self) -> None:
        """Go on from the newest step of which every run has a good checkpoint, if there is one."""
        found = _newest_common(self.runs)
        if found is None:
            for one in self.runs:
                for average in one.averages:
                    if average.store is not None and average.store.n_seen:
                        raise CheckpointError(
                            f"{average.store.folder} holds draws of another run, as there is no "
                            f"checkpoint in {one.checkpoints and one.checkpoints.folder}; give "
                            f"another folder for the draws, or the folder of their checkpoints"
                        )
            return
        with expect_form(found[0].path):
            self._load(found)

    def _load(self, found: Sequence[Checkpoint]) -> None:
        extra_positions = []
        for one, (step, state, path) in zip(self.runs, found, strict=True):
            stored = _contents(len(state["averages"]), state["trace"] is not None)
            mine = _contents(len(one.averages), one.trace is not None)
            if stored != mine:
                raise CheckpointError(
                    f"{path} was written with {stored}, but this call has {mine}; give the "
                    f"same, or another folder"
                )
            one.run.load_state_dict({**state["run"], "replicas": state["replicas"]})
            if one.run.n_steps != step:
                raise ValueError(f"a run at step {one.run.n_steps} in a checkpoint of {step}")
            for average, saved in zip(one.averages, state["averages"], strict=True):
                with _naming(path):
                    average.load_state_dict(saved)
                if not 0 <= average.n_draws <= max(0, saved["last_step"]) <= step:
                    raise ValueError(
                        f"{average.n_draws} draws up to step {saved['last_step']} of {step}"
                    )
            if one.trace is not None:
                one.trace.load_state_dict(state["trace"])
            # Only runs that measure move in the extra batches.
            if isinstance(one.run.rules.noise.feed, RepeatedDraws):
                extra_positions.append(state.get("extra"))
        state = found[0].state  # all runs are at the same position in the data
        extra_positions.append(state.get("extra"))
        for source, saved in ((self.data, state["data"]), (self.extra, extra_positions[0])):
            if saved is not None and hasattr(source, "load_state_dict"):
                with _naming(found[0].path):
                    source.load_state_dict(saved)
            elif source is not None:
                logger.warning(
                    "the data cannot restore their position, so the run goes on with a new epoch; "
                    "use DeviceLoader for an exact resume"
                )
        self.seconds = seconds_in(state)


def summary_of(average: PosteriorAverage) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a run folder says of an average: its metrics on its first rung and on all rungs
    (`pooled_`); of a classifier also those of the newest network (`single_`) and the predictions.
    """
    metrics: dict[str, Any] = {"n_draws": average.n_draws}
    tensors: dict[str, Tensor] = {}
    if not average.n_draws:
        return metrics, tensors
    first = average.rungs[0]
    kinds: list[tuple[str, int | None, Literal["probabilities", "last"]]]
    kinds = [("", first, "probabilities")]
    if len(average.rungs) > 1:
        kinds.append(("pooled_", None, "probabilities"))
    if average.is_classifier:
        kinds.append(("single_", first, "last"))
        tensors["probabilities"] = average.probabilities(first)
    try:
        for prefix, rung, of in kinds:
            numbers = average.metrics(rung, of=of)
            metrics |= {f"{prefix}{name}": value for name, value in numbers.items()}
        metrics["n_test"] = len(average.labels)
        if average.is_classifier:
            tensors["labels"] = average.labels
    except MissingDependencyError as error:
        logger.warning("result.json lacks the metrics: %s", error)
    except InvalidArgumentError as error:
        if average.is_labelled:
            logger.warning("result.json lacks the metrics of the average: %s", error)
    return metrics, tensors


def _has_checkpoints(runs: Sequence[TrainingRun]) -> bool:
    # Asked before another rank writes; a slow file system may show something else to other ranks.
    found = any(each.newest_checkpoint is not None for each in runs)
    return runs[0].run.mesh.process_group.from_main(found)


def _newest_common(runs: Sequence[TrainingRun]) -> list[Checkpoint] | None:
    """The checkpoints of the newest step that every run has, all of them undamaged."""
    folders = [one.checkpoints for one in runs if one.checkpoints is not None]
    process_group = runs[0].run.mesh.process_group
    shared = set.intersection(*(set(folder.steps()) for folder in folders))
    common = set(process_group.from_main(sorted(shared)))
    if not common and len(folders) > 1 and _has_checkpoints(runs):
        newest = ", ".join(str(folder.steps()[-1:]) for folder in folders)
        raise CheckpointError(f"the runs have no checkpoint of the same step: {newest}")
    among = None if len(folders) == 1 else common  # one alone may use any
    while True:
        found = []
        for folder, one in zip(folders, runs, strict=True):
            checkpoint = folder.load_newest(
                setting=one.identity,
                among=among,
                process_group=process_group,
                replicas=one.run.mesh.mine,
            )
            if checkpoint is None:
                return None
            found.append(checkpoint)
        oldest = min(checkpoint.step for checkpoint in found)
        if all(checkpoint.step == oldest for checkpoint in found):
            return found
        among = {step for step in common if step <= oldest}  # one was damaged: all go back


def _nonfinite_weights(run: ModuleExchange) -> NonFiniteEnergyError | None:
    """The error for weights that are not finite, unless the run will replace them."""
    finite = run.ensemble.finite()
    if all(finite) or run.can_respawn:
        return None
    replica = finite.index(False)
    rung = next(rung for rung in range(run.n_rungs) if run.replica_at(rung) == replica)
    where = {"replica": replica, "rung": rung, "run": 0, "step": run.n_steps}
    failure = NonFiniteEnergyError(**where, value=float("nan"), advice=LOWER_IT)
    part = run.ensemble.nonfinite_part(replica)
    return failure if part is None else failure.because(part)


def _next_draw(average: PosteriorAverage, step: int) -> int:
    """The next step after `step` at which the average takes a draw."""
    taken = max(0, step - average.burn_in) // average.every
    return average.burn_in + (taken + 1) * average.every


def _position_of(data: Any) -> Any:
    return data.state_dict() if hasattr(data, "state_dict") else None


def _contents(n_averages: int, traced: bool) -> str:
    plural = "s" if n_averages > 1 else ""
    return f"{n_averages or 'no'} average{plural} and {'a' if traced else 'no'} trace"


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error about a part of a checkpoint names its folder, and what to do."""
    try:
        yield
    except (CheckpointError, InvalidArgumentError) as error:
        cure = "; go on with the settings it was saved with, or give another folder"
        known = "another folder" in str(error)
        raise CheckpointError(f"{path}: {error}{'' if known else cure}") from None
