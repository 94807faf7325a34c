"""Running configs into run folders: which runs train together, what is refused, what is written."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchrex.distributed import join
from torchrex.durable import writing
from torchrex.errors import NonFiniteEnergyError, RunFolderError
from torchrex.experiments.density import DensityConfig
from torchrex.recording import open_logs
from torchrex.runs.config import ExperimentConfig, Outcome, RunOptions
from torchrex.runs.folder import Run, RunFolder, RunResult, RunWriter, differences

logger = logging.getLogger("torchrex")


def run_recipe(config: ExperimentConfig, seed: int, out: Path, **options: Any) -> RunFolder:
    """Run one config with one seed into its folder; `options` are those of `RunOptions`.

    A folder that holds a run already is left alone unless `overwrite` or `resume` says otherwise.
    """
    (folder,) = run_together([(config, seed)], out, **options)
    return folder


def run_together(
    pairs: Sequence[tuple[ExperimentConfig, int]], out: Path, **options: Any
) -> list[RunFolder]:
    """Run configs of one `batch_key` together; no result depends on the others."""
    for name in ("observers", "log"):
        options[name] = tuple(options.get(name, ()))
    return run_group([run_in(out, *pair) for pair in pairs], RunOptions(**options))


def run_in(out: Path, config: ExperimentConfig, seed: int) -> Run:
    folder = RunFolder.of(out, config.recipe, seed)
    folder.require_no_link(out)
    return Run(config, seed, folder)


def run_group(runs: Sequence[Run], options: RunOptions) -> list[RunFolder]:
    """Carry out runs together; the folder of each.

    Of several processes the first keeps the folders, and an error of one is an error of all. No
    other job changes them meanwhile.
    """
    with contextlib.ExitStack() as locks:
        return _run_group(runs, options, locks)


def _run_group(
    runs: Sequence[Run], options: RunOptions, locks: contextlib.ExitStack
) -> list[RunFolder]:
    group, config = join(), runs[0].config
    device = config.device(options.device)  # an error before anything is written
    if isinstance(config, DensityConfig) and open_logs(options.log, Path()) and group.is_main:
        logger.warning(
            "--log is for networks; %s keeps all its draws and writes none", config.recipe
        )
    names: list[str | None] = []  # of the folders to write; None for a run that is done
    with group.all_or_none("look at the run folders", RunFolderError):
        if group.is_main:
            for run in runs:
                locks.enter_context(run.folder.owned())
            names = [
                None if is_done(run, options) else _folder_to_write(run, options).path.name
                for run in runs
            ]
    names = group.from_main(names)
    folders = [
        RunFolder(run.folder.path.with_name(name or run.folder.path.name))
        for run, name in zip(runs, names, strict=True)
    ]
    todo = [
        replace(run, folder=folder)
        for run, folder, name in zip(runs, folders, names, strict=True)
        if name
    ]
    if todo:
        _carry_out(todo, options, str(device))
    # A finished run has taken its place; the others are still where they were written.
    return [each if each.path.is_dir() else runs[k].folder for k, each in enumerate(folders)]


def _folder_to_write(run: Run, options: RunOptions) -> RunFolder:
    if not options.overwrite:
        return run.folder.active
    return run.folder.replacement if run.folder.status == "finished" else run.folder


def _carry_out(runs: list[Run], options: RunOptions, device: str) -> None:
    group, began = join(), time.perf_counter()
    options = replace(options, device=device)
    with group.all_or_none("making of the run folders", RunFolderError):
        for k, run in enumerate(runs) if group.is_main else ():
            logs = () if isinstance(run.config, DensityConfig) else options.log
            watching = (*options.observers, *open_logs(logs, run.folder.path))
            run.folder.make()
            runs[k] = replace(run, observers=watching)
    writers = [RunWriter(run, options) for run in runs] if group.is_main else []
    try:
        with _explained(runs[0], options):
            with group.all_or_none("making of the run folders", RunFolderError):
                for writer in writers:
                    writer.begin()
            outcome, results = runs[0].config.execute(runs, options)
    except NonFiniteEnergyError as failure:
        for writer in writers:
            _name(failure, writer.run if len(runs) == 1 else None)
            writer.write(RunResult(failure=failure), "failed", time.perf_counter() - began)
        raise
    except BaseException:
        for writer in writers:
            writer.undo()
        raise
    with group.all_or_none("writing of the results", RunFolderError), _explained(runs[0], options):
        _write(writers, outcome, results, group.size)
    failures = [result.failure for result in results if result.failure is not None]
    if len(failures) == len(results):
        raise failures[-1]
    if outcome.status == "finished" and outcome.signal:
        raise KeyboardInterrupt(outcome.signal)  # it came during the last save: begin no other run


def _write(
    writers: Sequence[RunWriter], outcome: Outcome, results: Sequence[RunResult], n_processes: int
) -> None:
    together = sum(writer.run.config.n_rungs for writer in writers)
    for writer, result in zip(writers, results, strict=bool(writers)):
        network = result.trace is not None and result.failure is None
        if result.failure is not None:
            _name(result.failure, writer.run)
        writer.write(
            result,
            outcome.status if result.failure is None else "failed",
            outcome.total_seconds,
            n_processes=n_processes,
            n_replicas=together if network else None,
            signal=outcome.signal if outcome.status == "interrupted" else None,
        )


def _name(failure: NonFiniteEnergyError, run: Run | None) -> None:
    """Name the run by recipe and seed, not by its number in the group."""
    if run is not None:
        failure.args = (str(failure).replace(f"(run {failure.run})", f"({run.name})"),)


def _explained(run: Run, options: RunOptions) -> contextlib.AbstractContextManager[None]:
    """An error of the disk says which folder cannot be written."""
    advice, room = "choose another --out", "use --resume"
    if options.overwrite:
        room = "use --overwrite again, or --resume if a step was saved"
    return writing(run.folder.path, RunFolderError, advice, room=room)


def is_done(run: Run, options: RunOptions) -> bool:
    """Is there nothing to do? Refuses what was not asked for, or has other settings."""
    run.folder.tidy()
    if options.overwrite:
        return False
    folder = run.folder.active
    status = None if folder.result is None else folder.status or "of unknown status"
    saved = folder.checkpoints.is_dir()
    if options.resume:
        if folder.config is not None and (other := differences(folder, run.config)):
            raise RunFolderError(
                f"{folder.path} holds a run with other settings ({', '.join(other[:3])}); resume "
                "it with the same --set, or choose another --out, or add --overwrite to replace it"
            )
        if status not in (None, "finished") and not saved and not run.config.keeps_checkpoints:
            raise RunFolderError(
                f"{folder.path} holds a run ({status}) without checkpoints to continue from; add "
                "--overwrite to begin it anew, or choose another --out or --seed"
            )
        return status == "finished"
    if status == "finished":
        raise RunFolderError(
            f"{folder.path} already holds a run that is finished; add --resume to keep it and run "
            "only what is missing, --overwrite to replace it, or choose another --out or --seed"
        )
    if status is not None or saved:
        resumable = saved or run.config.keeps_checkpoints
        raise RunFolderError(
            f"{folder.path} holds an unfinished run{f' ({status})' if status else ''}; add "
            f"{'--resume to continue it, or ' if resumable else ''}--overwrite to begin it anew"
        )
    return False


def require_room(runs: Sequence[Run], options: RunOptions) -> None:
    """Refuse what would be refused later, when other runs have taken hours."""
    group = join()
    with group.all_or_none("look at the run folders", RunFolderError):
        for run in runs if group.is_main else ():
            with run.folder.owned():
                is_done(run, options)


@dataclass
class Group:
    """Runs that train together, from a step of which all of them have a checkpoint."""

    runs: list[Run] = field(default_factory=list)
    steps: frozenset[int] = frozenset()  # with checkpoints of all of them; empty: at the beginning

    @property
    def n_replicas(self) -> int:
        return sum(run.config.n_rungs for run in self.runs)

    @property
    def name(self) -> str:
        first, n = self.runs[0], len(self.runs)
        more = f" and {n - 1} more" if n > 1 else ""
        return f"{first.config.recipe} seed {first.seed}{more}"

    def takes(self, run: Run, steps: frozenset[int]) -> bool:
        first, key = self.runs[0], run.config.batch_key(run.seed)
        if key is None or key != first.config.batch_key(first.seed):
            return False
        same_step = bool(steps & self.steps) or not (steps or self.steps)
        return same_step and self.n_replicas + run.config.n_rungs <= run.config.most_replicas


def group_runs(runs: Sequence[Run], *, overwrite: bool) -> list[Group]:
    """Each run in the first group that takes it.

    Runs that failed are likely to fail again: they come last, each alone, so that the others need
    not return to an old checkpoint.
    """
    groups: list[Group] = []
    failed: list[Group] = []
    for run in runs:
        folder = run.folder.active
        unfinished = not overwrite and folder.checkpoints.is_dir() and not folder.finished
        steps = folder.steps if unfinished else frozenset()
        if unfinished and folder.status == "failed":
            failed.append(Group([run], steps))
            continue
        group = next((each for each in groups if each.takes(run, steps)), None)
        if group is None:
            groups.append(Group([run], steps))
        else:
            group.runs.append(run)
            group.steps &= steps
    return groups + failed
