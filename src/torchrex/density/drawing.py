"""Collecting the draws of runs on densities: what is kept, when it is saved, and how a run resumes.

Where the steps are cut, by a checkpoint, a budget or Ctrl-C, has no influence on the numbers:
stopped and resumed equals never stopped, bit for bit. Compiled and eager steps agree to rounding
only, so the number of all steps decides once between the two.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrex.checkpoint import Checkpoint, Checkpoints, expect_form, seconds_in
from torchrex.density.loop import few_threads
from torchrex.density.run import DensityExchange
from torchrex.errors import (
    InvalidArgumentError,
    NonFiniteEnergyError,
    OnInterrupt,
    require_on_interrupt,
    require_whole,
)
from torchrex.exchange import StepInfo
from torchrex.posterior import Draws
from torchrex.recording import Callback

logger = logging.getLogger("torchrex")

Progress = Callback | bool
FIELDS = ("values", "noise_variance", "replica_at", "energy", "steps")


@dataclass(frozen=True)
class DrawOptions:
    """What `sample` and `collect` have in common; see `sample`."""

    n_steps: int
    thin: int
    burn_in: int
    progress: Progress | None
    checkpoints: Checkpoints | Path | str | None
    checkpoint_every: int
    resume: bool
    budget: float | None
    on_interrupt: OnInterrupt

    def __post_init__(self) -> None:
        for name, least in (("n_steps", 1), ("thin", 1), ("burn_in", 0), ("checkpoint_every", 1)):
            require_whole(name, getattr(self, name), least)
        if self.budget is not None and not (
            isinstance(self.budget, int | float) and self.budget > 0
        ):
            raise InvalidArgumentError(f"budget must be seconds > 0, got {self.budget!r}")
        require_on_interrupt(self.on_interrupt)

    @property
    def folder(self) -> Checkpoints | None:
        given = self.checkpoints
        return Checkpoints(Path(given)) if isinstance(given, Path | str) else given


class DrawRecorder:
    """Collects draws block by block: thins what grows with the steps, sums what does not. Memory is
    that of the draws that will be kept.

    With `swap_batches` the energy of a draw is that of the latest swap test, NaN before the first.
    """

    def __init__(
        self, n_steps: int, *, thin: int, burn_in: int, swap_batches: bool = False
    ) -> None:
        self.thin, self.burn_in, self.swap_batches = thin, burn_in, swap_batches
        self.n_seen = 0
        self._capacity = max(0, (n_steps - burn_in) // thin)
        self._kept = 0
        self._store: dict[str, Tensor] = {}
        self._accepted: Tensor | None = None
        self._proposed: Tensor | None = None
        self._tested: Tensor | None = None  # energies of the latest test, of swap batches

    def record(self, info: StepInfo) -> None:
        """Take in consecutive steps, stacked along the first axis.

        What counts changes in the last lines: steps whose recording was interrupted by Ctrl-C can
        be recorded again.
        """
        n, swaps = len(info.position), info.accepted.shape[1:]
        accepted, proposed = info.accepted.sum(0).cpu(), info.proposed.sum(0).expand(swaps).cpu()
        if self._accepted is not None and self._proposed is not None:
            accepted, proposed = self._accepted + accepted, self._proposed + proposed
        # Step k, counted from 1, is kept if k - burn_in is a positive multiple of thin.
        first = max(self.burn_in + self.thin, self.n_seen + 1)
        first += (self.burn_in - first) % self.thin
        rows = slice(first - self.n_seen - 1, n, self.thin)
        steps = torch.arange(self.n_seen + 1, self.n_seen + n + 1)
        kept = self._kept + len(steps[rows])
        energy = self._of_tests(info) if self.swap_batches else info.energy
        sources = (info.position, info.noise_variance, info.replica_at, energy, steps)
        for name, source in zip(FIELDS, sources, strict=True):
            if name not in self._store:
                dtype = torch.int16 if name == "replica_at" else source.dtype
                self._store[name] = torch.empty((self._capacity, *source.shape[1:]), dtype=dtype)
            self._store[name][self._kept : kept] = source[rows]
        self._accepted, self._proposed = accepted, proposed
        self._tested = energy[-1].clone() if self.swap_batches else None
        self._kept, self.n_seen = kept, self.n_seen + n

    def _of_tests(self, info: StepInfo) -> Tensor:
        """The energies of every step, replaced by those of the latest step with a test."""
        tested = info.proposed.flatten(1).any(1)
        when = torch.arange(1, len(tested) + 1, device=tested.device)
        before = torch.full_like(info.energy[0], math.nan) if self._tested is None else self._tested
        latest = torch.where(tested, when, 0).cummax(0).values
        return torch.cat([before[None], info.energy])[latest]

    def draws(self, status: str, settings: dict[str, Any]) -> Draws | None:
        """What was recorded so far, or None if not a single step was."""
        if self._accepted is None or self._proposed is None:
            return None
        kept = {name: tensor[: self._kept] for name, tensor in self._store.items()}
        return Draws(
            values=kept.pop("values").movedim(1, 0).contiguous(),
            accepted=self._accepted,
            proposed=self._proposed,
            n_steps=self.n_seen,
            status=status,
            settings=settings,
            **kept,
        )

    def state_dict(self) -> dict[str, Any]:
        """The draws so far; the rows are views, to be written before the next steps."""
        rows = {name: tensor[: self._kept] for name, tensor in self._store.items()}
        swaps = {"accepted": self._accepted, "proposed": self._proposed}
        swaps |= {} if self._tested is None else {"tested": self._tested}
        return {"n_seen": self.n_seen, "rows": rows, **swaps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the steps of `state_dict()`, thinned alike. More steps may follow."""
        rows, n_seen = state["rows"], state["n_seen"]
        kept = max(0, n_seen - self.burn_in) // self.thin
        fits = set(rows) == set(FIELDS) and all(len(tensor) == kept for tensor in rows.values())
        if not fits or kept > self._capacity:
            raise ValueError(f"{n_seen} steps must have {kept} rows of each of {', '.join(FIELDS)}")
        for name, tensor in rows.items():
            self._store[name] = tensor.new_empty((self._capacity, *tensor.shape[1:]))
            self._store[name][:kept] = tensor
        self._kept, self.n_seen = kept, n_seen
        self._accepted, self._proposed = state["accepted"], state["proposed"]
        self._tested = state.get("tested")


class Drawing:
    """A run on a density, the recorder of its draws, and the folder of its checkpoints if any."""

    def __init__(
        self,
        run: DensityExchange,
        options: DrawOptions,
        checkpoints: Checkpoints | None,
        shard: str | None,
    ) -> None:
        self.run, self.options, self.checkpoints = run, options, checkpoints
        self.recorder = DrawRecorder(
            options.n_steps,
            thin=options.thin,
            burn_in=options.burn_in,
            swap_batches=run.rules.swap_batch is not None and run.rules.swaps,
        )
        self._first = run.n_steps  # steps of the run before
        self._setting = {} if checkpoints is None else self._describe(shard)
        self._found = None if checkpoints is None else self._find(checkpoints)
        self._pending: StepInfo | None = None  # steps that are done and not yet recorded
        self._saved = self.n_done
        self._seconds = 0.0 if self._found is None else seconds_in(self._found.state)
        self._since = time.monotonic()

    @property
    def n_done(self) -> int:
        return self.recorder.n_seen

    def _describe(self, shard: str | None) -> dict[str, Any]:
        """What must be the same for a call to go on from a checkpoint."""
        run, position = self.run, self.run.ensemble.position
        start = position.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return {
            **run.setting,
            "seed": run.streams.seed,
            "n_runs": position.shape[1],
            "thin": self.options.thin,
            "burn_in": self.options.burn_in,
            "start": hashlib.sha256(start).hexdigest()[:16],
            "steps_before": self._first,
            "dtype": str(position.dtype),
            "device": position.device.type,
            "compiled": run.will_compile(self.options.n_steps),
            "shard": shard,
        }

    def _find(self, checkpoints: Checkpoints) -> Checkpoint | None:
        """Look for a checkpoint to go on from and take its draws; `prepare` loads the run."""
        n_steps = self.options.n_steps
        if not self.options.resume:
            checkpoints.require_none_after(self._first)
            return None
        found = checkpoints.load_newest(setting=self._setting)
        if found is None:
            return None
        if found.step - self._first > n_steps:
            raise InvalidArgumentError(
                f"{found.path} is at step {found.step - self._first} already, beyond the total "
                f"n_steps={n_steps}; give more steps, or another folder"
            )
        with expect_form(found.path):
            self.recorder.load_state_dict(found.state["recorder"])
            if self.n_done + self._first != found.step:
                raise ValueError(f"draws up to step {self.n_done} with a run at step {found.step}")
            seconds_in(found.state)
        return found

    def prepare(self, shared: DensityExchange | None = None) -> None:
        """Choose the loop and load the checkpoint that was found, if any."""
        found, self._found, self._since = self._found, None, time.monotonic()
        if found is None or self.n_done < self.options.n_steps:
            # From where the run began, even if it goes on from elsewhere: what is tried before a
            # compiled loop is trusted is then the same, and so is the outcome.
            was_compiled = found is None or bool(found.state.get("compiled"))
            self.run.prepare(self.options.n_steps, eager=not was_compiled, shared=shared)
            if found is not None and was_compiled and not self.run.is_compiled:
                logger.warning(
                    "%s is of a compiled run; it goes on eagerly, the same to rounding", found.path
                )
        if found is not None:
            with expect_form(found.path):
                self.run.load_state_dict(found.state["run"])

    def go_on(self) -> Iterator[int]:
        """One stretch of steps, recorded, and saved if a checkpoint is due; yields how many are
        done.
        """
        due, every = self.options.n_steps, self.options.checkpoint_every
        if self.checkpoints is not None:
            due = min(due, (self.n_done // every + 1) * every)
        for info in self.run.stretch(due - self.n_done):
            self._record(info)
            yield self.n_done
        if self.n_done == due:
            self.save()

    def _record(self, steps: StepInfo) -> None:
        self._pending = steps
        with few_threads(steps.energy[0].numel()):
            self.recorder.record(steps)
        self._pending = None

    def save(self) -> None:
        """Write a checkpoint of all that is done, unless it exists."""
        n_taken, pending = self.run.n_steps - self._first, self._pending
        if pending is not None and self.n_done + len(pending.position) == n_taken:
            self._record(pending)  # Ctrl-C came between the steps and their record
        if self.checkpoints is None or self.n_done <= self._saved:
            return
        if self.n_done != n_taken:  # Ctrl-C came between two lines of `stretch`
            logger.warning("no checkpoint at step %d; the one before is the newest", self.n_done)
            return
        state = {
            "run": self.run.state_dict(),
            "recorder": self.recorder.state_dict(),
            "compiled": self.run.is_compiled,
            "seconds": self.seconds,
        }
        self.checkpoints.save(self.run.n_steps, state, setting=self._setting)
        self._saved = self.n_done

    @property
    def seconds(self) -> float:
        """What it took until now, with what was done before a resume."""
        return self._seconds + time.monotonic() - self._since

    def draws(self, status: str, settings: dict[str, Any]) -> Draws | None:
        """What was recorded, with the temperatures of the last step and the F of each pair then,
        the geometric mean over runs.
        """
        last, ensemble = self.run.temperatures_at(max(0, self.run.n_steps - 1)), self.run.ensemble
        now: dict[str, Any] = {"temperatures": last.tolist(), "sampler": repr(ensemble.sampler)}
        now |= {"lrs": list(self.run.rules.ladder.lrs)}
        if ensemble.n_data is not None:
            now |= {"n_data": ensemble.n_data, "batch_size": ensemble.target.batch_size}
        now |= {"annealed": True} if self.run.rules.ladder.anneal else {}
        if (size := self.run.rules.swap_batch) is not None:
            now |= {"swap_batch": size, "swap_interval": self.run.rules.swap_interval}
            now |= {"swaps_on_all_data": True} if size == self.run.ensemble.n_data else {}
        if self.run.rules.tempering == "likelihood":
            now["tempering"] = "likelihood"
        if self.run.rules.ladder.n_pairs:
            cost = self.run.swap_cost(self._first, self.run.n_steps)
            now |= {"swap_cost": cost} if math.isfinite(cost) else {}
            now["correction_factor"] = self.run.correction_factor.log().mean(1).exp().tolist()
        return self.recorder.draws(status, {**settings, **now})


class End(NamedTuple):
    """How drawing ended."""

    status: str  # "finished"; "paused", its budget used up; "interrupted"; or "failed"
    failure: NonFiniteEnergyError | None = None
    failed: int = 0  # which of the runs failed


def draw_all(
    drawings: Sequence[Drawing],
    options: DrawOptions,
    progress: Callback | None,
    stop_requested: Callable[[], bool],
) -> End:
    """Bring all runs to their end, always the one that is furthest behind. Ctrl-C saves all."""

    def furthest_behind() -> int:
        return min(range(len(drawings)), key=lambda k: drawings[k].n_done)

    def save_all(status: str) -> End:
        for drawing in drawings:
            drawing.save()
        return End(status)

    began, at, n_steps = time.monotonic(), 0, options.n_steps
    try:
        for k, drawing in enumerate(drawings):
            drawing.prepare(shared=drawings[k - 1].run if k else None)
        at = furthest_behind()
        while drawings[at].n_done < n_steps:
            for _ in drawings[at].go_on():
                if progress is not None:
                    progress(sum(each.n_done for each in drawings) // len(drawings), n_steps)
            at = furthest_behind()
            if 0 < drawings[at].n_done < n_steps:  # all of them have something to show
                if stop_requested():
                    return save_all("interrupted")
                if options.budget is not None and time.monotonic() - began >= options.budget:
                    return save_all("paused")
    except KeyboardInterrupt:
        return save_all("interrupted")
    except NonFiniteEnergyError as failure:
        return End("failed", failure, at)
    return End("finished")
