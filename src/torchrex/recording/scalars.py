"""Logs of one run as named numbers at steps: TensorBoard, Weights & Biases, MLflow.

What the numbers are is decided once, here; the three write them under the same names at the same
steps. A point is at the number of steps done. Every checkpoint ends a window, so a resumed run has
the points of one that never stopped, besides that of a crash.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import math
import os
import re
import shutil
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrex.durable import restart_file
from torchrex.errors import ConfigError, InvalidArgumentError, RunFolderError, import_extra
from torchrex.posterior import PosteriorAverage
from torchrex.recording.logs import JSON_LINES, JsonLines, Log, lines_of
from torchrex.recording.observer import Observer, Watched, Window, metrics_of

logger = logging.getLogger("torchrex")

RECORD = "torchrex.jsonl"  # in the folder of a tracked run: its id, and how far it was sent
HISTOGRAMS_EVERY = 10  # windows: a histogram takes ten times the bytes of a scalar
MOST_AT_ONCE, MOST_PARAMETERS, LONGEST_PARAMETER = 1000, 100, 6000  # what MLflow takes in one call


class Scalars(Log):
    """What these logs share: the numbers of windows and of draws, by name.

    Rungs are temperatures and replicas are walkers: after a swap `replica_0` follows its weights,
    `rung_0` the coldest temperature. If a run did not count its first swaps (its state is of an
    older version), the name of the count says since when it counts.
    """

    def _open(self, watched: Watched) -> None:
        report = watched.run.exchange()
        self._swaps = torch.tensor([pair.accepted for pair in report.pairs], dtype=torch.int64)
        since = report.steps_before
        self._count = f"swaps_since_step_{since}" if since else "swaps"

    def on_draw(self, watched: Watched, average: PosteriorAverage) -> None:
        self._put(draw_numbers(watched, average), watched.run.n_steps)

    def _write_window(self, watched: Watched, window: Window) -> None:
        self._put(self._window_numbers(watched, window), window.last)

    def _window_numbers(self, watched: Watched, window: Window) -> dict[str, float]:
        temperature, lr = watched.rungs_at(window.last - 1)
        columns: dict[str, Sequence[float | None]] = {
            "energy/rung": window.energy.mean(0).tolist(),
            "temperature/rung": temperature,
            "lr/rung": lr,
        }
        if watched.ladder.n_pairs:
            made, tested = window.accepted.sum(0), window.proposed.sum(0)
            self._swaps += made
            rates = zip(made.tolist(), tested.tolist(), strict=True)
            columns |= {
                "energy/replica": _by_replica(window).mean(0).tolist(),
                "rung_of/replica": window.replica_at[-1].argsort().tolist(),
                f"{self._count}/pair": self._swaps.tolist(),
                "acceptance_rate/pair": [m / n if n else None for m, n in rates],
                "sigma2/pair": window.noise_variance[-1].tolist(),
                "correction/pair": window.correction[-1].tolist(),
            }
        return {
            f"{name}_{k}": value
            for name, values in columns.items()
            for k, value in enumerate(values)
            if value is not None
        }

    @abstractmethod
    def _put(self, numbers: Mapping[str, float], step: int) -> None: ...


def draw_numbers(watched: Watched, average: PosteriorAverage) -> dict[str, float]:
    """How good an average is after its newest draw."""
    number = watched.number_of(average)
    head = f"average_{number}" if number else "average"
    numbers: dict[str, float] = {f"{head}/n_draws": average.n_draws}
    for rung in (*average.rungs, None) if len(average.rungs) > 1 else average.rungs:
        where = "all_rungs" if rung is None else f"rung_{rung}"
        for name, value in metrics_of(average, rung).items():
            numbers[f"{head}/{name}/{where}"] = value
    return numbers


def final_numbers(watched: Watched) -> dict[str, float]:
    """What a table of runs compares: the exchange over all steps, and the averages."""
    numbers = dict(watched.run.exchange().numbers)
    for average in watched.averages:
        numbers |= draw_numbers(watched, average) if average.n_draws else {}
    return {f"final/{name}": float(value) for name, value in numbers.items() if name != "exact"}


def _by_replica(window: Window) -> torch.Tensor:
    """Energies (steps, replicas). They are from before a step's swaps, `replica_at` is not."""
    replica_at = window.replica_at.clone()
    for pair in range(window.accepted.shape[1]):  # swaps of one step are of disjoint pairs
        made, both = window.accepted[:, pair, None].bool(), replica_at[:, pair : pair + 2]
        replica_at[:, pair : pair + 2] = torch.where(made, both.flip(1), both)
    return torch.empty_like(window.energy).scatter_(1, replica_at.long(), window.energy)


class TensorBoard(Scalars):
    """Writes event files of one run into a folder, a point every `every` steps.

    `replica_0` follows its weights through the swaps, `rung_0` is the coldest temperature. A
    resumed run hides the points beyond its checkpoint.
    """

    def __init__(self, folder: Path | str, *, every: int = 100) -> None:
        super().__init__(folder, every=every)
        self._make = import_extra("torch.utils.tensorboard", "log").SummaryWriter

    def _open(self, watched: Watched) -> None:
        super()._open(watched)
        step = watched.run.n_steps
        self._held: list[Window] = []
        with self._writing():
            # At 0 everything that was there is hidden.
            self._out = self._make(str(self.path), purge_step=step + 1 if step else 0)
        self._out.add_text("run", f"{watched.name}, seed {watched.seed}, {watched.run!r}", step)

    def on_save(self, watched: Watched) -> None:
        self._write_rest(watched)
        self._out.flush()

    def _put(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._out.add_scalar(name, value, step)

    def _write_window(self, watched: Watched, window: Window) -> None:
        super()._write_window(watched, window)
        self._held.append(window)
        if len(self._held) == HISTOGRAMS_EVERY:
            self._write_histograms()

    def _write_histograms(self) -> None:
        """Energies of single steps by rung, and by pair the difference minus its correction."""
        if not self._held:
            return
        held, self._held = self._held, []
        energy = torch.cat([window.energy for window in held])
        correction = torch.cat([window.correction for window in held])
        excess = energy[:, :-1] - energy[:, 1:] - correction
        for name, values in (("energy/rung", energy), ("difference_minus_correction/pair", excess)):
            for k, column in enumerate(values.unbind(1)):
                column = column[column.isfinite()]
                if len(column):
                    self._out.add_histogram(f"{name}_{k}", column, held[-1].last)

    def _write_end(self, watched: Watched, status: str) -> None:
        self._write_histograms()


class Tracker(Scalars):
    """What runs of W&B and MLflow share: parameters first, final numbers last, no step twice.

    `folder` keeps which run it is and how far it was sent: a resumed run goes on in the same one,
    and a point that was sent before is not sent again. It is noted before it is sent, so a killed
    process may lose a point but not repeat it. Windows and every average have a count of their own:
    a crash may lie between a window and a draw of the same step.
    """

    def __init__(self, folder: Path | str | None, *, every: int, run: Any, id: str | None) -> None:
        if (folder is None) == (run is None):
            raise InvalidArgumentError(
                f"{type(self).__name__} needs a folder, for a run of its own, or run=, a run of "
                f"yours; got {'neither' if run is None else 'both'}"
            )
        super().__init__(str(id) if folder is None else folder, every=every)
        self._given = run
        self._id: str | None = id

    def _open(self, watched: Watched) -> None:
        super()._open(watched)
        self._sent: dict[str, int] = {}  # the last step of each part, before this call
        self._record, step = None, watched.run.n_steps
        if self._given is None:
            with self._writing():
                self.path.mkdir(parents=True, exist_ok=True)
                self._id, self._sent = self._recorded() if step else (None, {})
        is_new = self._id is None or self._given is not None
        with self._explained():
            self._id = self._begin(watched, flattened(watched.setting) if is_new else {})
        if self._given is None:
            with self._writing():
                self._record = restart_file(self.path / RECORD, b"")
            for part, sent in (self._sent or {"energy": -1}).items():
                self._note(part, sent)

    def on_save(self, watched: Watched) -> None:
        self._write_rest(watched)

    def _put(self, numbers: Mapping[str, float], step: int) -> None:
        part = next(iter(numbers)).partition("/")[0]  # energy, average, average_1, final
        if step > self._sent.get(part, -1):
            self._note(part, step)
            self._send(numbers, step)

    def _write_end(self, watched: Watched, status: str) -> None:
        self._finish(final_numbers(watched), watched.run.n_steps, status)

    def _close(self, status: str) -> None:
        if self._record is not None:
            self._record.close()

    def _recorded(self) -> tuple[str | None, dict[str, int]]:
        """The run's id, and the last step of each part that was sent."""
        path, sent = self.path / RECORD, {}
        last: str | None = None
        for line, _ in lines_of(path, warn=False) if path.exists() else ():
            match line:
                case {"id": str(id), "part": str(part), "step": int(step)}:
                    last, sent[part] = id, step
        return last, sent

    def _note(self, part: str, step: int) -> None:
        if self._record is not None:
            line = {"id": self._id, "part": part, "step": step}
            with self._writing():
                self._record.write(json.dumps(line).encode() + b"\n")
                self._record.flush()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """An error of the library as one line."""
        try:
            yield
        except self._errors as error:
            why = " ".join(str(error).split())
            raise RunFolderError(f"{type(self).__name__} has no run to write to: {why}") from None

    _errors: tuple[type[Exception], ...]

    @abstractmethod
    def _begin(self, watched: Watched, parameters: Mapping[str, Any]) -> str:
        """Begin the run of `self._id`, or a new one; returns its id."""

    @abstractmethod
    def _send(self, numbers: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def _finish(self, numbers: Mapping[str, float], step: int, status: str) -> None: ...


def flattened(setting: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of a nested setting, by names joined with dots."""
    leaves: dict[str, Any] = {}
    for name, value in setting.items():
        leaf = f"{path}{name}"
        is_inner = isinstance(value, Mapping) and value
        leaves |= flattened(value, f"{leaf}.") if is_inner else {leaf: value}
    return leaves


class WandB(Tracker):
    """Logs a run to Weights & Biases, a point every `every` steps, with TensorBoard's names.

    `folder` is for W&B's files; `options` go to `wandb.init` (`project="torchrex"` unless given).
    Or give a run of yours, `WandB(run=wandb.init(...))`: it is not finished here, and its W&B steps
    are the steps of sampling. The settings are its config, the final numbers its summary. Without
    a network set WANDB_MODE=offline.
    """

    def __init__(
        self, folder: Path | str | None = None, *, every: int = 100, run: Any = None, **options: Any
    ) -> None:
        self._wandb = import_extra("wandb", "wandb")
        self._errors = (self._wandb.Error, ValueError)
        self._options = options
        super().__init__(folder, every=every, run=run, id=getattr(run, "id", None))

    def _begin(self, watched: Watched, parameters: Mapping[str, Any]) -> str:
        self._out = self._given
        if self._out is None:
            chosen = {
                "project": "torchrex",
                "name": f"{watched.name}, seed {watched.seed}",
                "config": parameters,
                "dir": str(self.path),
                "id": self._id,
                "resume": "allow" if self._id else None,
                "reinit": "create_new",  # several runs may train together
            }
            self._out = self._wandb.init(**{**chosen, **self._options})
        else:
            self._out.config.update({"torchrex": parameters}, allow_val_change=True)
            if self._out.step > watched.run.n_steps:
                logger.warning(
                    "the W&B run is at step %d and ignores smaller ones; give WandB a folder, for "
                    "a run of its own",
                    self._out.step,
                )
        return str(self._out.id)

    def _send(self, numbers: Mapping[str, float], step: int) -> None:
        self._out.log(dict(numbers), step=step)

    def _finish(self, numbers: Mapping[str, float], step: int, status: str) -> None:
        self._out.summary.update({**numbers, "status": status})

    def _close(self, status: str) -> None:
        super()._close(status)
        if self._given is None:
            self._out.finish(exit_code=int(status == "failed"))


class MLflow(Tracker):
    """Logs a run to MLflow, a point every `every` steps, with TensorBoard's names.

    It goes where MLflow is set to (MLFLOW_TRACKING_URI) or to `tracking_uri`, into the
    `experiment`; `folder` keeps only which run it is. Or give a run of yours, `MLflow(run=
    mlflow.active_run())`, which is not ended here. The settings are its parameters, the final
    numbers metrics of the last step. If the server fails, the run goes on and sends its points
    later.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        every: int = 100,
        run: Any = None,
        experiment: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        self._mlflow = import_extra("mlflow", "mlflow")
        self._errors = (self._mlflow.exceptions.MlflowException, ImportError)
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "torchrex"
        self._tracking_uri = tracking_uri
        info = getattr(run, "info", None)
        super().__init__(folder, every=every, run=run, id=getattr(info, "run_id", None))

    def _begin(self, watched: Watched, parameters: Mapping[str, Any]) -> str:
        self._out = client = self._mlflow.MlflowClient(self._tracking_uri)
        self._waiting: list[Any] = []
        self._has_warned = False
        run = self._id
        if run is None:
            found = client.get_experiment_by_name(self._experiment)
            where = found.experiment_id if found else client.create_experiment(self._experiment)
            name = f"{watched.name}, seed {watched.seed}"
            run = client.create_run(where, run_name=name).info.run_id
        elif self._given is None:
            client.update_run(run, status="RUNNING")
        known = client.get_run(run).data.params  # which no second value may replace
        new = [
            self._mlflow.entities.Param(name, str(value)[:LONGEST_PARAMETER])
            for name, value in _named_for_mlflow(parameters).items()
            if name not in known
        ]
        for first in range(0, len(new), MOST_PARAMETERS):
            client.log_batch(run, params=new[first : first + MOST_PARAMETERS])
        return str(run)

    def _send(self, numbers: Mapping[str, float], step: int) -> None:
        metric, now = self._mlflow.entities.Metric, time.time_ns() // 1_000_000
        self._waiting += [metric(name, float(v), now, step) for name, v in numbers.items()]
        try:
            while self._waiting:
                self._out.log_batch(self._id, metrics=self._waiting[:MOST_AT_ONCE])
                del self._waiting[:MOST_AT_ONCE]
        except self._errors as error:
            if not self._has_warned:
                why = " ".join(str(error).split())
                logger.warning("MLflow takes no numbers now, they are sent later: %s", why)
            self._has_warned = True

    def _finish(self, numbers: Mapping[str, float], step: int, status: str) -> None:
        if known := {name: value for name, value in numbers.items() if math.isfinite(value)}:
            self._put(known, step)

    def _close(self, status: str) -> None:
        super()._close(status)
        if self._waiting:
            logger.warning("MLflow did not take %d numbers; they are lost", len(self._waiting))
        if self._given is None:
            ends = {"finished": "FINISHED", "failed": "FAILED", "paused": "SCHEDULED"}
            with contextlib.suppress(*self._errors):
                self._out.set_terminated(self._id, ends.get(status, "KILLED"))


def _named_for_mlflow(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in parameters.items()}


LOGS: dict[str, tuple[type[Log], str]] = {  # by the name that `--log` knows, with the file's name
    "jsonl": (JsonLines, JSON_LINES),
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WandB, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}


def open_logs(names: Iterable[str], folder: Path) -> list[Observer]:
    """Observers for the names that `--log` knows; nothing is written before a run starts."""
    chosen: list[Observer] = []
    for name in dict.fromkeys(names):
        if name not in LOGS:
            near = difflib.get_close_matches(name, LOGS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--log must be {' or '.join(LOGS)}, got {name!r}{hint}")
        kind, file = LOGS[name]
        chosen.append(kind(folder / file))
    return chosen


def remove_logs(folder: Path) -> None:
    """Remove the logs of the run before, when a run begins anew in a folder."""
    for _, file in LOGS.values():
        with contextlib.suppress(OSError):  # what cannot be removed is refused when it is opened
            (folder / file).unlink()
        shutil.rmtree(folder / file, ignore_errors=True)
