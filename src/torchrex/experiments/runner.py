"""Running recipes into run folders: one by itself, or several that train side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from torchrex.errors import NonFiniteEnergyError, RunFolderError, TorchrexError
from torchrex.experiments import beside
from torchrex.experiments.drawing import draw_into
from torchrex.experiments.jobs import Job
from torchrex.experiments.recipes import Config, DrawingConfig, TrainingConfig
from torchrex.experiments.run_folder import RunFolder, named, same_config
from torchrex.experiments.slot import Slot
from torchrex.posterior.progress import Callback
from torchrex.recording import Observer, open_logs

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

    A folder that holds a run already is left alone unless `overwrite` or `resume` says otherwise. Resuming goes on from the
    checkpoints of an unfinished run, and does nothing about a finished one. `observers` watch, and logs of the names in `log`
    ("jsonl", "tensorboard") are written into the folder; both are for networks.
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
    folder = RunFolder.of(out, config.recipe, seed)
    config.place(device)  # before anything is written
    if open_logs(log, folder.path):
        logger.warning("%s samples a density and keeps all its draws: --log is for networks, and writes nothing", config.recipe)
    beside.tidy(folder)
    if _is_done(folder, config, overwrite=overwrite, resume=resume):
        return folder
    if resume:
        logger.warning("%s samples a density and keeps no checkpoints: it begins anew", config.recipe)
    if budget is not None:
        logger.warning("%s samples a density and keeps no checkpoints: it runs to its end whatever --budget says", config.recipe)
    assert isinstance(config, DrawingConfig)
    return draw_into(folder, config, seed, device=device, progress=progress)


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
    """Train configs of one company, each with its seed, side by side; no result depends on the others."""
    place = jobs[0][0].place(device)  # that of all of a company; before anything is written
    folders = [RunFolder.of(out, config.recipe, seed) for config, seed in jobs]
    for folder in folders:
        beside.tidy(folder)
    todo = [
        (config, seed, folder)
        for (config, seed), folder in zip(jobs, folders, strict=True)
        if not _is_done(folder, config, overwrite=overwrite, resume=resume)
    ]
    if not todo:
        return folders
    slots = [Slot(config, seed, folder) for config, seed, folder in todo]
    for slot in slots:
        slot.require_room(overwrite=overwrite, resume=resume)
    watching = [(*observers, *open_logs(log, slot.folder.path)) for slot in slots]
    for slot in slots:
        slot.folder.make()
    try:
        began = time.perf_counter()
        try:
            for slot in slots:
                slot.begin(overwrite=overwrite)
            outcome, trained = todo[0][0].execute(
                [Job(slot.config, slot.seed, slot.checkpoints, each) for slot, each in zip(slots, watching, strict=True)],
                device=device,
                resume=resume,
                budget=budget,
                progress=progress,
            )
        except NonFiniteEnergyError as failure:
            if len(slots) == 1:
                named(failure, f"{slots[0].config.recipe}, seed {slots[0].seed}")
            for slot in slots:
                slot.write_failure(failure, time.perf_counter() - began, place)
            raise
        except BaseException:
            for slot in slots:
                slot.undo_if_nothing_is_done()
            raise
        for slot, one in zip(slots, trained, strict=True):
            if one.failure is not None:
                named(one.failure, f"{slot.config.recipe}, seed {slot.seed}")
                slot.write_failure(one.failure, outcome.seconds, place)
            else:
                slot.write(outcome, one, sum(each.config.n_rungs for each in slots), place)
        if trained[-1].failure is not None and all(one.failure is not None for one in trained):
            raise trained[-1].failure
        if outcome.status == "finished" and outcome.signal:  # it came during the last save: the next one is not begun
            raise KeyboardInterrupt(outcome.signal)
    except OSError as failure:
        if isinstance(failure, TorchrexError):
            raise
        raise RunFolderError(f"cannot write {slots[0].folder.path} ({failure}); choose another --out") from None
    return folders


def require_room(jobs: Sequence[tuple[Config, int]], out: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse what would be refused later, when others of these jobs have run for hours."""
    for config, seed in jobs:
        folder = RunFolder.of(out, config.recipe, seed)
        beside.tidy(folder)
        if not _is_done(folder, config, overwrite=overwrite, resume=resume) and isinstance(config, TrainingConfig):
            Slot(config, seed, folder).require_room(overwrite=overwrite, resume=resume)


def _is_done(folder: RunFolder, config: Config, *, overwrite: bool, resume: bool) -> bool:
    """Is there nothing to do? Or is there something in the way?"""
    there = None if overwrite else folder.result
    if there is None:
        return False
    status, same, training = there.get("status"), same_config(folder, config), isinstance(config, TrainingConfig)
    if resume and status == "finished" and same:
        return True
    if resume and training:
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
        advice = f"add {'--resume to go on with it, ' if training else ''}--overwrite to begin it anew"
    joined = " " if resume else "; "
    raise RunFolderError(f"{folder.path} already holds a run {holds}{joined}{advice}, or choose another --out or --seed")
