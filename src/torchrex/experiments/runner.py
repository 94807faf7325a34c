"""Running recipes into run folders: one by itself, or several that train side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from torchrex.distributed import join
from torchrex.errors import NonFiniteEnergyError, RunFolderError, TorchrexError
from torchrex.experiments import beside
from torchrex.experiments.drawing import draw_into, slot_of, tidy
from torchrex.experiments.jobs import Job, Trained
from torchrex.experiments.place import Place
from torchrex.experiments.recipes import Config, DrawingConfig, TrainingConfig
from torchrex.experiments.run_folder import RunFolder, named, same_config
from torchrex.experiments.slot import Slot
from torchrex.network import Outcome
from torchrex.recording import Callback, Observer, open_logs

logger = logging.getLogger("torchrex")


def run_recipe(
    config: Config,
    seed: int,
    out: Path,
    *,
    device: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    budget: float | None = None,
    progress: Callback | None = None,
    observers: Sequence[Observer] = (),
    log: Sequence[str] = (),
) -> RunFolder:
    """Run one config with one seed into its folder.

    A folder that holds a run already is left alone unless `overwrite` or `resume` says otherwise.
    Resuming goes on from the checkpoints of an unfinished run, and does nothing about a finished
    one. `observers` watch, and logs of the names in `log` ("jsonl", "tensorboard") are written into
    the folder; both are for networks.
    """
    if isinstance(config, TrainingConfig):
        (folder,) = run_together(
            [(config, seed)],
            out,
            device=device,
            overwrite=overwrite,
            resume=resume,
            budget=budget,
            progress=progress,
            observers=observers,
            log=log,
        )
        return folder
    assert isinstance(config, DrawingConfig)
    folder = RunFolder.of(out, config.recipe, seed)
    config.place(device)  # before anything is written
    process_group, done = join(), False
    if open_logs(log, folder.path) and process_group.is_main:
        logger.warning(
            "%s samples a density and keeps all its draws: --log is for networks, and writes nothing",
            config.recipe,
        )
    with process_group.all_or_none("look at the run folder", RunFolderError):
        if process_group.is_main:
            done = _is_there(folder, config, seed, overwrite=overwrite, resume=resume)
    if process_group.from_main(done):
        return folder
    return draw_into(
        folder,
        config,
        seed,
        device=device,
        overwrite=overwrite,
        resume=resume,
        budget=budget,
        progress=progress,
    )


def _is_there(
    folder: RunFolder, config: DrawingConfig, seed: int, *, overwrite: bool, resume: bool
) -> bool:
    """Is the run of a density finished? Refuses to go on with a run that was not asked for, or that
    is another one.
    """
    tidy(folder)
    if _is_done(folder, config, overwrite=overwrite, resume=resume):
        return True
    slot_of(folder, config, seed).require_room(overwrite=overwrite, resume=resume)
    return False


def run_together(
    jobs: Sequence[tuple[TrainingConfig, int]],
    out: Path,
    *,
    device: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    budget: float | None = None,
    progress: Callback | None = None,
    observers: Sequence[Observer] = (),
    log: Sequence[str] = (),
) -> list[RunFolder]:
    """Train configs of one company, each with its seed, side by side; no result depends on the
    others.
    """
    place = jobs[0][0].place(device)  # that of all of a company; before anything is written
    process_group = (
        join()
    )  # of several processes the first keeps the folders, and what it meets there all of them meet
    folders = [RunFolder.of(out, config.recipe, seed) for config, seed in jobs]
    slots = [
        Slot(config, seed, folder) for (config, seed), folder in zip(jobs, folders, strict=True)
    ]
    chosen: list[int] = []
    with process_group.all_or_none("look at the run folders", RunFolderError):
        if process_group.is_main:
            for folder in folders:
                beside.tidy(folder)
            chosen = [
                k
                for k, s in enumerate(slots)
                if not _is_done(s.folder, s.config, overwrite=overwrite, resume=resume)
            ]
            for k in chosen:
                slots[k].require_room(overwrite=overwrite, resume=resume)
    slots = [slots[k] for k in process_group.from_main(chosen)]
    if not slots:
        return folders
    watching: list[tuple[Observer, ...]] = [() for _ in slots]
    with process_group.all_or_none("making of the run folders", RunFolderError):
        if process_group.is_main:
            watching = [(*observers, *open_logs(log, slot.folder.path)) for slot in slots]
            for slot in slots:
                slot.folder.make()
    began = time.perf_counter()
    try:
        with process_group.all_or_none("making of the run folders", RunFolderError):
            for slot in slots if process_group.is_main else ():
                slot.begin(overwrite=overwrite)
        outcome, trained = slots[0].config.execute(
            [
                Job(slot.config, slot.seed, slot.checkpoints, each)
                for slot, each in zip(slots, watching, strict=True)
            ],
            device=device,
            resume=resume,
            budget=budget,
            progress=progress,
        )
    except NonFiniteEnergyError as failure:
        if len(slots) == 1:
            named(failure, f"{slots[0].config.recipe}, seed {slots[0].seed}")
        for slot in slots if process_group.is_main else ():
            slot.write_failure(failure, time.perf_counter() - began, place)
        raise
    except BaseException as failure:
        for slot in slots if process_group.is_main else ():
            slot.undo_if_nothing_is_done()
        if isinstance(failure, OSError) and not isinstance(failure, TorchrexError):
            raise _cannot_write(slots[0], failure) from None
        raise
    with process_group.all_or_none("writing of the results", RunFolderError):
        if process_group.is_main:
            _write_all(slots, outcome, trained, place)
    if trained[-1].failure is not None and all(one.failure is not None for one in trained):
        raise trained[-1].failure
    if (
        outcome.status == "finished" and outcome.signal
    ):  # it came during the last save: the next one is not begun
        raise KeyboardInterrupt(outcome.signal)
    return folders


def _write_all(
    slots: Sequence[Slot], outcome: Outcome, trained: Sequence[Trained], place: Place
) -> None:
    try:
        for slot, one in zip(slots, trained, strict=True):
            if one.failure is not None:
                named(one.failure, f"{slot.config.recipe}, seed {slot.seed}")
                slot.write_failure(one.failure, outcome.total_seconds, place)
            else:
                slot.write(outcome, one, sum(each.config.n_rungs for each in slots), place)
    except OSError as failure:
        if isinstance(failure, TorchrexError):
            raise
        raise _cannot_write(slots[0], failure) from None


def _cannot_write(slot: Slot, failure: OSError) -> RunFolderError:
    return RunFolderError(f"cannot write {slot.folder.path} ({failure}); choose another --out")


def require_room(
    jobs: Sequence[tuple[Config, int]], out: Path, *, overwrite: bool, resume: bool
) -> None:
    """Refuse what would be refused later, when others of these jobs have run for hours."""
    process_group = join()
    with process_group.all_or_none("look at the run folders", RunFolderError):
        for config, seed in jobs if process_group.is_main else ():
            folder = RunFolder.of(out, config.recipe, seed)
            if isinstance(config, DrawingConfig):
                _is_there(folder, config, seed, overwrite=overwrite, resume=resume)
                continue
            beside.tidy(folder)
            if not _is_done(folder, config, overwrite=overwrite, resume=resume) and isinstance(
                config, TrainingConfig
            ):
                Slot(config, seed, folder).require_room(overwrite=overwrite, resume=resume)


def _is_done(folder: RunFolder, config: Config, *, overwrite: bool, resume: bool) -> bool:
    """Is there nothing to do? Or is there something in the way?"""
    there = None if overwrite else folder.result
    if there is None:
        return False
    status, same = there.get("status"), same_config(folder, config)
    if resume and status == "finished" and same:
        return True
    goes_on = isinstance(config, TrainingConfig) or (
        status != "finished" and (folder.path / "checkpoints").is_dir()
    )
    if resume and goes_on:
        return False  # and the slot looks at its settings
    ends = {"finished": "that is finished", None: "whose result.json does not say how it ended"}
    holds = ends.get(status, f"that was {status}")
    if resume and not same:
        advice = "with other settings; give the same --set, or add --overwrite to replace it"
    elif resume:
        advice = "and no checkpoints to go on from; add --overwrite to begin it anew"
    elif status == "finished":
        advice = "add --resume to keep it and run only what is missing, --overwrite to replace it"
    else:
        advice = (
            f"add {'--resume to go on with it, ' if goes_on else ''}--overwrite to begin it anew"
        )
    joined = " " if resume else "; "
    raise RunFolderError(
        f"{folder.path} already holds a run {holds}{joined}{advice}, or choose another --out or --seed"
    )
