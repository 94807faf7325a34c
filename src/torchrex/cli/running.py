"""Running recipes from the command line: group by group, with a live display, in the time there is."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import typer

from torchrex.cli.budget import Clock
from torchrex.cli.consoles import stderr, stdout
from torchrex.cli.interrupts import Interrupted, terminating
from torchrex.cli.numbers import show, show_mean, there_before
from torchrex.errors import ConfigError, NonFiniteEnergyError, RunFolderError
from torchrex.experiments.groups import Group, group
from torchrex.experiments.recipes import Config, TrainingConfig
from torchrex.experiments.run_folder import RunFolder, is_finished
from torchrex.experiments.runner import require_room, run_recipe, run_together
from torchrex.recording import LiveDisplay, open_logs

MOST_NAMED = 6


def run_seeds(
    config: Config,
    seeds: Sequence[int],
    out: Path,
    *,
    device: str,
    overwrite: bool,
    resume: bool,
    budget: float | None,
    log: Sequence[str],
) -> None:
    """Run one config with every seed, print the numbers that matter, and their mean over seeds."""
    require_logs([config], log, out)
    config.place(device)
    jobs = [(config, seed) for seed in seeds]
    require_room(
        jobs, out, overwrite=overwrite, resume=resume
    )  # of all of them, before the first begins
    clock, groups = Clock(budget), group(jobs, out, overwrite=overwrite)
    before = (
        there_before(RunFolder.of(out, config.recipe, seed) for seed in seeds) if resume else {}
    )
    how = f"the same command with --resume{' instead of --overwrite' if overwrite else ''}"

    def run(each: Group) -> list[RunFolder]:
        try:
            return run_group(
                each,
                out,
                device=device,
                overwrite=overwrite,
                resume=resume,
                budget=clock.left(),
                how=how,
                log=log,
            )
        except NonFiniteEnergyError:
            if len(groups) == 1 or not isinstance(config, TrainingConfig):
                raise
            return folders_of(each, out)  # it is in their results; the others go on

    done: list[RunFolder] = []
    for _, folders in run_groups(groups, out, run=run, overwrite=overwrite, how=how):
        show(folders, config, before)
        done += folders
    show_mean(done, config)
    failed = [folder for folder in done if folder.failed]
    if failed:
        raise RunFolderError(
            f"{len(failed)} of {len(seeds)} runs failed; the first is {failed[0].path}"
        )


def require_logs(configs: Sequence[Config], log: Sequence[str], out: Path) -> None:
    """Unknown names, missing packages and recipes without a log are told before anything runs."""
    density = next((config for config in configs if not isinstance(config, TrainingConfig)), None)
    if open_logs(log, out) and density is not None:
        raise ConfigError(
            f"--log is for networks; {density.recipe} samples a density and keeps all its draws, so leave it out"
        )


def run_groups(
    groups: Sequence[Group],
    out: Path,
    *,
    run: Callable[[Group], list[RunFolder]],
    overwrite: bool,
    how: str,
) -> Iterator[tuple[Group, list[RunFolder]]]:
    """Run one group after the other until the budget is used up or a signal comes; then say what
    was not reached.
    """
    for k, each in enumerate(groups):
        try:
            folders = run(each)
            yield each, folders
            going = goes_on(folders, how)
        except Interrupted:
            say_not_reached(groups[k + 1 :], out, overwrite=overwrite)
            raise
        if not going:
            say_not_reached(groups[k + 1 :], out, overwrite=overwrite)
            raise typer.Exit


def say_not_reached(groups: Sequence[Group], out: Path, *, overwrite: bool) -> None:
    """With --overwrite the runs that were to be replaced are still the old ones, and to --resume
    they are finished.
    """
    left = {
        f"{c.recipe} seed {seed}": is_finished(RunFolder.of(out, c.recipe, seed))
        for each in groups
        for c, seed in each.jobs
    }
    names = [
        f"{name}{' (still the old run)' if old else ''}"
        for name, old in left.items()
        if overwrite or not old
    ]
    if not names:
        return
    n_old = sum(left.values()) if overwrite else 0
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    _print(f"not reached: {', '.join(names[:MOST_NAMED])}{more}")
    if n_old:
        _print(
            f"{n_old} of them would be taken for finished: give --overwrite again for these to replace them"
        )


def run_group(
    each: Group,
    out: Path,
    *,
    device: str,
    overwrite: bool,
    resume: bool,
    budget: float | None,
    how: str,
    log: Sequence[str] = (),
) -> list[RunFolder]:
    """Run the jobs of a group, with a live display. `how` says how to go on after an interruption."""
    (config, seed), n_steps = each.jobs[0], each.jobs[0][0].n_steps
    with (
        LiveDisplay(each.name, n_steps, console=stderr) as display,
        told_if_early(folders_of(each, out), how),
    ):
        if len(each.jobs) == 1:
            folder = run_recipe(
                config,
                seed,
                out,
                device=device,
                overwrite=overwrite,
                resume=resume,
                budget=budget,
                progress=display.progress,
                observers=[display],
                log=log,
            )
            return [folder]
        jobs = [(config, seed) for config, seed in each.jobs if isinstance(config, TrainingConfig)]
        return run_together(
            jobs,
            out,
            device=device,
            overwrite=overwrite,
            resume=resume,
            budget=budget,
            observers=[display],
            log=log,
        )


def folders_of(each: Group, out: Path) -> list[RunFolder]:
    return [RunFolder.of(out, config.recipe, seed) for config, seed in each.jobs]


@contextlib.contextmanager
def told_if_early(folders: Sequence[RunFolder], how: str) -> Iterator[None]:
    """A signal outside the steps of some runs, while they compile or are measured, for example: one
    line, not silence.
    """
    with terminating() as received:
        try:
            yield
        except KeyboardInterrupt as interrupt:
            number = received[0] if received else signal.SIGINT
            if interrupt.args:  # the signal that came during the last save
                # On a rank that does not see the disk of rank 0 none is finished; but the last save
                # is done.
                done = [folder for folder in folders if is_finished(folder)] or folders
                finished = f"{_named(done)} {'is' if len(done) == 1 else 'are'} finished"
                raise Interrupted(f"interrupted; {finished}", interrupt.args[0]) from None
            begun = [
                folder
                for folder in folders
                if (folder.path / "checkpoints").is_dir() and not is_finished(folder)
            ]
            if begun:
                raise Interrupted(
                    f"interrupted; the checkpoints are in {_named(begun)}, and {how} goes on",
                    number,
                ) from None
            raise Interrupted(
                "interrupted before the first steps were done; nothing was written", number
            ) from None
        if received:  # a density kept the draws of before the signal, and its result does not say which signal it was
            raise Interrupted(_what_was_done(folders, how), received[0])


def goes_on(folders: Sequence[RunFolder], how: str) -> bool:
    """False if the budget is used up; raises if a signal came. `how` says how to go on then."""
    results = {folder: folder.result or {} for folder in folders}
    interrupted = [
        folder for folder, result in results.items() if result.get("status") == "interrupted"
    ]
    if interrupted:
        raise Interrupted(
            _what_was_done(interrupted, how), results[interrupted[0]].get("signal") or signal.SIGINT
        )
    paused = [folder for folder, result in results.items() if result.get("status") == "paused"]
    for folder in paused:
        result = results[folder]
        where = f" at step {result['steps_done']:,}" if "steps_done" in result else ""
        _print(f"the budget is used up{where}; {how} goes on with {folder.path}")
    return not paused


def _what_was_done(folders: Sequence[RunFolder], how: str) -> str:
    advice = f"; {how} goes on" if (folders[0].path / "checkpoints").is_dir() else ""
    return f"interrupted; what was done is in {_named(folders)}{advice}"


def _named(folders: Sequence[RunFolder]) -> str:
    return f"{folders[0].path}{f' and {len(folders) - 1} more' if len(folders) > 1 else ''}"


def _print(words: str) -> None:
    stdout.print(words, highlight=False, markup=False, soft_wrap=True)
