"""Runs from the command line: group by group within a budget, then the numbers that matter."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.table import Table

from torchrex.cli.console import advise, count, say, stderr, stdout
from torchrex.cli.main import Interrupted
from torchrex.distributed import join
from torchrex.errors import ConfigError, NonFiniteEnergyError, RunFolderError, RunInterrupted
from torchrex.exchange import exchange_line
from torchrex.experiments import DensityConfig, ExperimentConfig, Run, RunFolder, RunOptions, dumps
from torchrex.experiments.runner import Group, group_runs, require_room, run_group, run_in
from torchrex.processes import UNDER_TORCHRUN, cores, is_main_process, restart_count, terminating
from torchrex.recording import LiveDisplay, open_logs
from torchrex.report.plots import error_of_mean

MOST_NAMED = 6  # runs that were not reached
MOST_SHOWN = 8  # metrics of a run; all are in result.json
BUDGET_USED_UP = 75  # exit code (EX_TEMPFAIL): the same command again goes on
LEAST_BUDGET = 1e-9  # of a budget that is used up: the next run stops at its first chance


def run_seeds(
    config: ExperimentConfig, seeds: Sequence[int], out: Path, options: RunOptions, as_json: bool
) -> None:
    """Run one config with every seed, print the numbers that matter, and their mean over seeds."""
    require_logs([config], options)
    config.device(options.device)
    # torchrun begins again after a rank was lost; nodes count restarts each for itself.
    if max(join().gather(restart_count())) > 0:
        options = replace(options, resume=True, overwrite=False)
    runs = [run_in(out, config, seed) for seed in seeds]
    require_room(runs, options)  # for all of them, before the first begins
    before = states(runs) if options.resume else {}
    groups = group_runs(runs, overwrite=options.overwrite)
    tolerant = len(groups) > 1 and not isinstance(config, DensityConfig)
    session = Session(groups, options, command_again("--resume"), tolerant=tolerant)
    done: list[RunFolder] = []
    try:
        for _, folders in session.run_all():
            show(folders, config, before)
            done += folders
    finally:
        if as_json and is_main_process():
            typer.echo(dumps(as_document(runs, session)), nl=False)
    show_mean(done, config)
    failed = [folder for folder in done if folder.status == "failed"]
    if failed:
        raise RunFolderError(
            f"{len(failed)} of {len(seeds)} runs failed; the first is {failed[0].path}"
        )
    where = shlex.quote(str(done[0].path if len(done) == 1 else out / config.recipe))
    advise(f"next: `torchrex doctor {where}` checks it, `torchrex report {where}` makes a page")


def as_document(runs: Sequence[Run], session: Session) -> dict[str, Any]:
    """For --json: every run with its folder and its result.json, as far as it was reached."""
    documents = []
    for run in runs:
        folder = run.folder.active
        status = folder.status if run in session.reached else "not reached"
        result = folder.result if status not in ("not reached", "damaged") else None
        about = {"recipe": run.config.recipe, "seed": run.seed, "status": status or "unfinished"}
        documents.append({"folder": str(folder.path), **about, **(result or {})})
    is_done = all(each["status"] in ("finished", "failed") for each in documents)
    return {"runs": documents, "continue_with": None if is_done else session.again}


def command_again(*more: str) -> str:
    """The command that goes on with this one, for a shell: never with --overwrite."""
    start = "torchrun ... -m torchrex" if UNDER_TORCHRUN in os.environ else "torchrex"
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", *more)]
    return f"{start} {shlex.join([*words, *more])}"


def require_logs(configs: Iterable[ExperimentConfig], options: RunOptions) -> None:
    """Refuse unknown logs, missing packages and recipes without a log before anything runs."""
    density = next((config for config in configs if isinstance(config, DensityConfig)), None)
    if open_logs(options.log, Path()) and density is not None:
        raise ConfigError(
            f"--log is for networks; {density.recipe} samples a density and keeps all its draws, "
            "so leave it out"
        )


class Session:
    """Runs groups one after the other until the budget is used up or a signal comes.

    `again` is the command that goes on then. With `tolerant` a failed group does not stop the
    others.
    """

    def __init__(
        self, groups: Sequence[Group], options: RunOptions, again: str, *, tolerant: bool
    ) -> None:
        self.groups, self.options, self.again, self.tolerant = groups, options, again, tolerant
        self.began, self.reached = time.monotonic(), list[Run]()
        work = sum(run.config.n_steps for group in groups for run in group.runs)
        self.display = LiveDisplay("", work, console=stderr, reports=True)

    def run_all(
        self, adapted: Callable[[RunOptions, Group], RunOptions] = lambda options, _: options
    ) -> Iterator[tuple[Group, list[RunFolder]]]:
        """The folders of each group, run with the `adapted` options."""
        for k, group in enumerate(self.groups):
            try:
                folders = self._run(group, adapted(self.options, group))
                yield group, folders
                paused = paused_of(folders, self.again)
            except Interrupted:
                self._say_not_reached(self.groups[k + 1 :])
                raise
            if paused:
                self._say_how_far(paused, group.runs[0].config.n_steps)
                self._say_not_reached(self.groups[k + 1 :])
                advise(f"go on with: {self.again}")
                # torchrun starts a rank again whose exit code is not 0.
                raise typer.Exit(0 if UNDER_TORCHRUN in os.environ else BUDGET_USED_UP)

    def _run(self, group: Group, options: RunOptions) -> list[RunFolder]:
        budget, n_steps, n = options.budget, group.runs[0].config.n_steps, len(self.groups)
        if budget is not None:
            budget = max(LEAST_BUDGET, budget - (time.monotonic() - self.began))
        folders = [run.folder for run in group.runs]
        number = f"{self.groups.index(group) + 1} of {n}: " if n > 1 else ""
        self.reached += group.runs
        with (
            self.display.part(number + group.name, n_steps, len(group.runs)) as display,
            explained_if_early(folders, self.again),
        ):
            progress = display.progress if len(group.runs) == 1 else None
            options = replace(
                options, budget=budget, progress=progress, observers=(display,), processes=cores()
            )
            try:
                return run_group(group.runs, options)
            except NonFiniteEnergyError:
                if not self.tolerant:
                    raise
                return [folder.active for folder in folders]  # their results say why

    def _say_how_far(self, paused: Sequence[RunFolder], n_steps: int) -> None:
        runs = [run for group in self.groups for run in group.runs]
        done = sum(run.folder.active.status == "finished" for run in self.reached)
        steps = (paused[0].result or {}).get("steps_done")
        where = "" if steps is None else f" at step {steps:,} of {n_steps:,}"
        are = f"{_named(paused)} {'is' if len(paused) == 1 else 'are'}"
        advise(f"the budget is used up: {done} of {count(len(runs), 'run')} finished, {are}{where}")

    def _say_not_reached(self, groups: Sequence[Group]) -> None:
        """With --overwrite the old runs are still there, and --resume takes them for finished."""
        overwrite = self.options.overwrite
        left = {
            f"{run.config.recipe} seed {run.seed}": run.folder.status == "finished"
            for group in groups
            for run in group.runs
        }
        old = " (still the old run)"
        names = [
            f"{name}{old * is_old}" for name, is_old in left.items() if overwrite or not is_old
        ]
        if not names:
            return
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        advise(f"not reached: {', '.join(names[:MOST_NAMED])}{more}")
        if overwrite and any(left.values()):
            advise(
                f"{sum(left.values())} of them would be taken for finished: give --overwrite again "
                "for these to replace them"
            )


@contextlib.contextmanager
def explained_if_early(folders: Sequence[RunFolder], again: str) -> Iterator[None]:
    """A signal outside the steps of some runs, for example while they compile: one line."""
    with terminating() as received:
        try:
            yield
        except KeyboardInterrupt as interrupt:
            number = received[0] if received else signal.SIGINT
            # The signal that came during the last save.
            if interrupt.args and not isinstance(interrupt, RunInterrupted):
                # A rank that does not see the disk of rank 0 finds none finished.
                done = [folder for folder in folders if folder.status == "finished"] or folders
                finished = f"{_named(done)} {'is' if len(done) == 1 else 'are'} finished"
                raise Interrupted(f"interrupted; {finished}", interrupt.args[0]) from None
            active = [folder.active for folder in folders]
            begun = [
                each for each in active if each.checkpoints.is_dir() and each.status != "finished"
            ]
            message = "interrupted before the first steps were done; nothing was written"
            if begun:
                message = (
                    f"interrupted; the checkpoints are in {_named(begun)}, and `{again}` goes on"
                )
            raise Interrupted(message, number) from None
        if received:  # a density kept its draws, and its result does not know the signal
            raise Interrupted(_what_was_done([each.active for each in folders], again), received[0])


def paused_of(folders: Sequence[RunFolder], again: str) -> list[RunFolder]:
    """Those whose budget is used up; raises if a signal came."""
    results = {folder: folder.result or {} for folder in folders}
    interrupted = [each for each in folders if results[each].get("status") == "interrupted"]
    if interrupted:
        number = results[interrupted[0]].get("signal") or signal.SIGINT
        raise Interrupted(_what_was_done(interrupted, again), number)
    return [each for each in folders if results[each].get("status") == "paused"]


def _what_was_done(folders: Sequence[RunFolder], again: str) -> str:
    advice = f"; `{again}` goes on" if folders[0].checkpoints.is_dir() else ""
    return f"interrupted; what was done is in {_named(folders)}{advice}"


def _named(folders: Sequence[RunFolder]) -> str:
    return f"{folders[0].path}{f' and {len(folders) - 1} more' if len(folders) > 1 else ''}"


# Numbers


class Number(NamedTuple):
    """A number that is shown."""

    value: float
    error: float | None = None  # its standard error, where it is known
    of: int | None = None  # out of so many
    exact: bool = False

    def __str__(self) -> str:
        """With the digits that its error leaves it, such as 0.4012 ± 0.0031; swaps as 12 of 400."""
        if self.of is not None:
            share = f" ({100 * self.value / self.of:.3g} %)" if self.of else ""
            return f"{self.value:,} of {self.of:,}{share}" if self.of else "none tested"
        if self.exact:
            return f"{self.value:.4f}"
        if not self.error or not math.isfinite(self.value):
            return f"{self.value:.4g}"
        digits = max(0, 1 - math.floor(math.log10(self.error)))
        return f"{self.value:,.{digits}f} ± {self.error:,.{digits}f}"


def numbers_of(result: Mapping[str, Any], config: ExperimentConfig) -> dict[str, Number]:
    """What is shown of a result, by title."""
    metrics = result.get("metrics") or {}
    shown: dict[str, Number] = {}
    for column in config.columns[:MOST_SHOWN]:
        value, error = metrics.get(column.metric), metrics.get(f"{column.metric}_se")
        if isinstance(value, int | float):
            known = error if isinstance(error, int | float) else None
            shown[column.title] = Number(value, known, exact=column.metric.endswith("_true"))
    if metrics:
        for pair in result.get("swaps") or ():
            cold, hot = pair["pair"]
            title = f"swaps of rungs {cold} and {hot}"
            shown[title] = Number(pair["accepted"], of=pair["proposed"])
    return shown


def states(runs: Iterable[Run]) -> dict[Path, str]:
    """Which runs are "finished" before a command, and which have "begun" and are resumed."""
    folders = [run.folder.active for run in runs]
    found = {each.path: "finished" if each.finished else "begun" for each in folders}
    return {
        each.path: found[each.path]
        for each in folders
        if found[each.path] == "finished" or each.begun
    }


def took(folder: RunFolder, before: Mapping[Path, str]) -> str:
    """The seconds of a run, of all calls together if it was resumed."""
    seconds = (folder.result or {}).get("wall_seconds", 0.0)
    resumed = "begun" in (before.get(folder.path), before.get(folder.replacement.path))
    return f"{seconds:.1f} s{' in all' if resumed else ''}"


def show(
    folders: Sequence[RunFolder], config: ExperimentConfig, before: Mapping[Path, str]
) -> None:
    """The numbers of finished runs, and how far the others came; `before` is that of `states`."""
    for folder in folders:
        result = folder.result or {}
        status, steps = result.get("status", "unfinished"), result.get("steps_done")
        where = ""
        if status in ("paused", "interrupted") and steps is not None:
            where = f" at step {steps:,} of {config.n_steps:,}"
        others = result.get("replicas_side_by_side", 1) - config.n_rungs
        time_taken = f"in {took(folder, before)}"
        time_taken += f" next to {others} other replicas" if others > 0 else ""
        line = f"{status}{where} {time_taken}"
        if before.get(folder.path) == "finished":
            line = f"finished already ({time_taken})"
        say(f"{config.recipe}, seed {result.get('seed')}: {line}")
        _print_numbers(numbers_of(result, config), exchange_of(result))
        if "error" in result:
            say(result["error"])
        pictures = sorted(path.name for path in folder.path.glob("*.png")) * folder.finished
        look = f" (look at {', '.join(pictures)})" if pictures else ""
        advise(f"run folder: {folder.path}{look}")


def show_mean(folders: Sequence[RunFolder], config: ExperimentConfig) -> None:
    """Mean and standard error over the seeds that are finished, if there are several."""
    results = [folder.result or {} for folder in folders if folder.finished]
    if results:
        advise(f"all numbers: result.json in the run folder{'s' if len(results) > 1 else ''}")
    if len(results) < 2:
        return
    each = [numbers_of(result, config) for result in results]
    means, from_chains = {}, False
    for title in each[0]:
        there = [numbers[title] for numbers in each if title in numbers]
        values, errors = [number.value for number in there], [number.error for number in there]
        from_chains |= all(error is not None for error in errors)
        tested = 0 if all(number.of == 0 for number in there) else None
        error = error_of_mean(values, errors)
        means[title] = Number(statistics.fmean(values), error, tested, there[0].exact)
    how = ", from the chains of each run" if from_chains else ""
    say(f"{config.recipe}: mean ± standard error over {len(results)} seeds{how}")
    _print_numbers(means)


def exchange_of(result: Mapping[str, Any]) -> str:
    """One line about the exchange of a run, if it had one and is finished."""
    return exchange_line(result["exchange"]) if result.get("exchange") else ""


def _print_numbers(numbers: Mapping[str, Number], exchange: str = "") -> None:
    if numbers:
        table = Table(box=None, show_header=False)
        for title, number in numbers.items():
            table.add_row(title, str(number))
        if exchange:
            table.add_row("exchange", exchange)
        stdout.print(table)
