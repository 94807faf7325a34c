"""The place of a run that trains: is there room, what waits beside it, what is undone if nothing
came of it, what is written.
"""

from __future__ import annotations

import shutil
from typing import Any

from torchrex.checkpoint import Checkpoints
from torchrex.distributed import join
from torchrex.durable import replace_file
from torchrex.errors import NonFiniteEnergyError, RunFolderError
from torchrex.experiments import beside
from torchrex.experiments.config import dumps, to_json
from torchrex.experiments.jobs import Trained
from torchrex.experiments.networks import png
from torchrex.experiments.place import Place
from torchrex.experiments.recipes import TrainingConfig
from torchrex.experiments.run_folder import (
    RunFolder,
    header,
    is_finished,
    remove_if_empty,
    same_config,
    save_tensors,
)
from torchrex.network import Outcome
from torchrex.recording import remove_logs


class Slot:
    """The folder of one run with checkpoints. A finished run that is overwritten waits beside it
    until the new one is.
    """

    def __init__(self, config: TrainingConfig, seed: int, folder: RunFolder) -> None:
        self.config, self.seed, self.folder = config, seed, folder
        self.checkpoints = folder.path / "checkpoints"

    def require_room(self, *, overwrite: bool, resume: bool) -> None:
        """Refuse to go on with a run that was not asked for, or that is another one."""
        folder = self.folder
        if overwrite:
            return
        if self.checkpoints.exists() and not is_finished(folder) and not resume:
            raise RunFolderError(
                f"{folder.path} holds an unfinished run; add --resume to go on with it, or --overwrite to begin anew"
            )
        if resume and folder.config is not None and not same_config(folder, self.config):
            raise RunFolderError(
                f"{folder.path} holds a run with other settings ({_differences(folder.config, to_json(self.config))}); resume it "
                f"with the same --set, or choose another --out"
            )

    def begin(self, *, overwrite: bool) -> None:
        path = self.folder.path
        if overwrite and is_finished(self.folder):
            beside.set_aside(self.folder)
            path.mkdir()
        elif overwrite:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            (path / "result.json").unlink(
                missing_ok=True
            )  # it speaks of the checkpoints that are gone
            remove_logs(path)
        self.folder.write_text("config.json", dumps(self.config))

    def undo_if_nothing_is_done(self) -> None:
        """Not a step is done: as if nothing had happened."""
        if any(Checkpoints(self.checkpoints).steps()):
            return
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        if not beside.put_back(self.folder) and self.folder.result is None:
            remove_logs(self.folder.path)
            (self.folder.path / "config.json").unlink(missing_ok=True)
            remove_if_empty(self.folder)

    def write_failure(self, failure: NonFiniteEnergyError, seconds: float, place: Place) -> None:
        head = header(self.config, self.seed, "failed", {}, [], seconds, place)
        self.folder.write_text("result.json", dumps({**head, "error": str(failure)}))

    def write(self, outcome: Outcome, trained: Trained, n_replicas: int, place: Place) -> None:
        finished = outcome.status == "finished"
        if finished:
            save_tensors(
                {**trained.trace.tensors(), **trained.tensors},
                self.folder.path / "trace.safetensors",
            )
        result = header(
            self.config,
            self.seed,
            outcome.status,
            trained.metrics,
            trained.trace.swaps(),
            outcome.total_seconds,
            place,
        )
        result["steps_done"] = trained.trace.n_steps
        result["replicas_side_by_side"] = n_replicas  # whose time the seconds are
        result["processes"] = join().size
        result |= {"curves": trained.curves} if trained.curves else {}
        result |= {"signal": outcome.signal} if outcome.status == "interrupted" else {}
        for name, picture in trained.pictures.items():
            replace_file(self.folder.path / f"{name}.png", png(picture))
        self.folder.write_text("result.json", dumps(result))
        if finished:
            beside.let_go(self.folder)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The settings that differ, in words."""
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return ", ".join(f"{key} {one.get(key)} there, {other.get(key)} here" for key in keys[:3])
