"""One run whose draws are collected: what its checkpoints hold, when they are written, and how it
goes on from one.

Where the steps are cut, by a checkpoint, a budget or Ctrl-C, has no influence on the numbers:
stopped and resumed equals never stopped, bit for bit. Compiled and eager steps agree to rounding
only, so which of the two it is is decided once, by the number of all steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchrex.checkpoint import Checkpoint, Checkpoints
from torchrex.density.draw_recorder import DrawRecorder
from torchrex.density.run import DensityExchange
from torchrex.density.threads import few_threads
from torchrex.errors import CheckpointError, InvalidArgumentError
from torchrex.posterior import Draws

logger = logging.getLogger("torchrex")

Folder = Checkpoints | Path | str


class Drawing:
    """A run on a density, the recorder of its draws, and the folder of its checkpoints, if it has
    one.
    """

    def __init__(
        self,
        run: DensityExchange,
        n_steps: int,
        *,
        thin: int,
        burn_in: int,
        checkpoints: Checkpoints | None = None,
        checkpoint_every: int = 100_000,
        shard: str | None = None,
    ) -> None:
        self.run, self.n_steps = run, n_steps
        self.recorder = DrawRecorder(n_steps, thin=thin, burn_in=burn_in)
        self.checkpoints, self.checkpoint_every = checkpoints, checkpoint_every
        self._first = run.n_steps  # what it had done before
        self._setting = self._describe(shard) if checkpoints is not None else {}
        self._found: Checkpoint | None = None
        self._pending: Any = None  # steps that are done and not yet recorded
        self._saved = 0
        self._seconds, self._since = 0.0, time.monotonic()

    @property
    def n_done(self) -> int:
        return self.recorder.n_seen

    def find(self, *, resume: bool) -> None:
        """Look for a checkpoint to go on from, and take its draws. The run itself is set back by
        `prepare`.
        """
        if self.checkpoints is None:
            return
        if not resume:
            later = [step for step in self.checkpoints.steps() if step > self._first]
            if later:
                where = self.checkpoints.folder
                raise CheckpointError(
                    f"{where} holds checkpoints up to step {later[-1]}; resume from them, or give another folder"
                )
            return
        self._found = found = self.checkpoints.load_newest(setting=self._setting)
        if found is None:
            return
        if found.step - self._first > self.n_steps:
            raise InvalidArgumentError(
                f"{found.path} stands at step {found.step - self._first} already, beyond n_steps={self.n_steps}, which is the "
                f"total; give more steps, or another folder"
            )
        with _its_form(found.path):
            self.recorder.load_state_dict(found.state["recorder"])
            if self.n_done + self._first != found.step:
                raise ValueError(f"draws up to step {self.n_done} with a run at step {found.step}")
            self._seconds = float(found.state["seconds"])
        self._saved = self.n_done

    def prepare(self, beside: DensityExchange | None = None) -> None:
        """Choose the loop and, after `find` found something, go there. Nothing is compiled where
        all is done.
        """
        found, self._found, self._since = self._found, None, time.monotonic()
        if self.n_done >= self.n_steps and found is not None:
            self._load(found)
            return
        # From where the run began, even if it is to go on from elsewhere: what is tried before a
        # compiled loop is trusted is then the same, and so is the outcome.
        was_compiled = None if found is None else bool(found.state.get("compiled"))
        self.run.prepare(
            self.n_steps, compiled=False if was_compiled is False else None, beside=beside
        )
        if found is not None:
            if was_compiled and not self.run.is_compiled:
                logger.warning(
                    "%s is of a compiled run; it goes on eagerly, with the same numbers to rounding only",
                    found.path,
                )
            self._load(found)

    def _load(self, found: Checkpoint) -> None:
        with _its_form(found.path):
            self.run.load_state_dict(found.state["run"])

    def go_on(self) -> Iterator[int]:
        """One stretch of steps, recorded, and saved if a checkpoint is due; yields how many are
        done.
        """
        due = self.n_steps
        if self.checkpoints is not None:
            due = min(due, (self.n_done // self.checkpoint_every + 1) * self.checkpoint_every)
        for info in self.run.stretch(due - self.n_done):
            self._pending = info
            self._record()
            yield self.n_done
        if self.checkpoints is not None and self.n_done == due:
            self.save()

    def _record(self) -> None:
        with few_threads(self._pending.energy[0].numel()):
            self.recorder.record(self._pending)
        self._pending = None

    def save(self) -> None:
        """Write a checkpoint of all that is done, unless it is there."""
        if (
            self._pending is not None
            and self.n_done + len(self._pending.position) + self._first == self.run.n_steps
        ):
            self._record()  # Ctrl-C came between the steps and their record
        if self.checkpoints is None or self.n_done <= self._saved:
            return
        if (
            self.n_done + self._first != self.run.n_steps
        ):  # it came in the very moment between the two; an older one serves
            logger.warning("no checkpoint at step %d; the one before is the newest", self.n_done)
            return
        state = {
            "run": self.run.state_dict(),
            "recorder": self.recorder.state_dict(),
            "compiled": self.run.is_compiled,
            "seconds": self._seconds + time.monotonic() - self._since,
        }
        self.checkpoints.save(self.run.n_steps, state, setting=self._setting)
        self._saved = self.n_done

    def draws(self, status: str, settings: dict[str, Any]) -> Draws | None:
        """What was recorded, with the temperatures of the last step and the F of each pair then,
        the geometric mean over runs.
        """
        now: dict[str, Any] = {
            "temperatures": self.run.temperatures_at(max(0, self.run.n_steps - 1)).tolist()
        }
        if self.run.rules.ladder.n_pairs:
            now["correction_factor"] = self.run.correction_factor.log().mean(1).exp().tolist()
        return self.recorder.draws(status, {**settings, **now})

    def _describe(self, shard: str | None) -> dict[str, Any]:
        """What must be the same for a call to go on from a checkpoint. Targets are known by what
        they print.
        """
        run, position = self.run, self.run.ensemble.position
        return {
            **run.setting,
            "seed": run.streams.seed,
            "n_runs": position.shape[1],
            "thin": self.recorder.thin,
            "burn_in": self.recorder.burn_in,
            "start": hashlib.sha256(
                position.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            ).hexdigest()[:16],
            "steps_before": self._first,
            "dtype": str(position.dtype),
            "device": position.device.type,
            "compiled": run.will_compile(self.n_steps),
            "shard": shard,
        }


@contextlib.contextmanager
def _its_form(path: Path) -> Iterator[None]:
    """What a checkpoint holds passed its checksums, but may be of another form than a run on a
    density writes.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{path} is not a checkpoint of such a run ({words}); give another folder"
        ) from None


def as_checkpoints(given: Folder | None) -> Checkpoints | None:
    return given if isinstance(given, Checkpoints) or given is None else Checkpoints(Path(given))
