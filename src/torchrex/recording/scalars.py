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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrex.durable import restart_file
from torchrex.errors import ConfigError, RunFolderError, import_extra
from torchrex.posterior import PosteriorAverage
from torchrex.recording.logs import JSON_LINES, JsonLines, Log, lines_of
from torchrex.recording.observer import Observer, Watched, Window, metrics_of

logger = logging.getLogger("torchrex")

RECORD = "torchrex.jsonl"  # in the folder of a tracked run: its id, and how far it was sent
HISTOGRAMS_EVERY = 10  # windows: a histogram takes ten times the bytes of a scalar
MOST_METRICS, MOST_PARAMETERS, LONGEST = 1000, 100, 6000  # what MLflow takes in one call


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
    """A run of W&B or MLflow: its settings first, final numbers last, no step twice.

    `folder` keeps which run it is and how far it was sent: a resumed run goes on in the same one. A
    point is noted before it is sent, so a killed process may lose one but not repeat it. Windows
    and averages are noted apart, for a crash may lie between a window and a draw of one step.
    """

    _errors: tuple[type[Exception], ...]  # of the library

    def _open(self, watched: Watched) -> None:
        super()._open(watched)
        path, begins = self.path / RECORD, watched.run.n_steps == 0
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            lines = [] if begins or not path.exists() else list(lines_of(path, warn=False))
        known = [line for line, _ in lines if {"run", "part", "step"} <= line.keys()]
        before = str(known[-1]["run"]) if known else None
        try:
            self._id = self._begin(watched, before)
        except self._errors as error:
            why = " ".join(str(error).split())
            name = type(self).__name__
            raise RunFolderError(f"{name} has no run to write to ({why}); set it up") from None
        self._sent = {line["part"]: int(line["step"]) for line in known if line["run"] == self._id}
        with self._writing():
            self._record = restart_file(path, b"")
        for part, step in self._sent.items():
            self._note(part, step)

    def _note(self, part: str, step: int) -> None:
        line = json.dumps({"run": self._id, "part": part, "step": step})
        with self._writing():
            self._record.write(f"{line}\n".encode())
            self._record.flush()

    def on_save(self, watched: Watched) -> None:
        self._write_rest(watched)

    def _put(self, numbers: Mapping[str, float], step: int) -> None:
        part = next(iter(numbers), "").partition("/")[0]  # energy, average, average_1, final
        if numbers and step > self._sent.get(part, -1):
            self._note(part, step)
            self._send(numbers, step)

    def _write_end(self, watched: Watched, status: str) -> None:
        """What a table of runs compares: the exchange over all steps, and the averages."""
        numbers = watched.run.exchange().numbers
        numbers.pop("exact", None)
        for average in watched.averages:
            numbers |= draw_numbers(watched, average) if average.n_draws else {}
        final = {f"final/{name}": float(value) for name, value in numbers.items()}
        self._put({k: v for k, v in final.items() if math.isfinite(v)}, watched.run.n_steps)

    def _close(self, status: str) -> None:
        self._record.close()

    @abstractmethod
    def _begin(self, watched: Watched, before: str | None) -> str:
        """Begin a new run, or go on in the one `before`; returns its id."""

    @abstractmethod
    def _send(self, numbers: Mapping[str, float], step: int) -> None: ...


class WandB(Tracker):
    """Logs a run to Weights & Biases, a point every `every` steps, with TensorBoard's names.

    `folder` is for W&B's files; `options` go to `wandb.init`. If a W&B run of yours is active, it
    is used and left open; its W&B steps are the steps of sampling. The settings are in the config
    under `torchrex`, final numbers are in the summary. Without a network set WANDB_MODE=offline.
    """

    def __init__(self, folder: Path | str, *, every: int = 100, **options: Any) -> None:
        super().__init__(folder, every=every)
        self._wandb, self._options = import_extra("wandb", "wandb"), options
        self._errors = (self._wandb.Error, ValueError)

    def _begin(self, watched: Watched, before: str | None) -> str:
        self._is_own = self._wandb.run is None
        chosen = {
            "project": "torchrex",
            "name": f"{watched.name}, seed {watched.seed}",
            "dir": str(self.path),
            "id": before,
            "resume": "allow" if before else None,
            "reinit": "create_new",  # several runs may train together
        }
        self._out = self._wandb.run or self._wandb.init(**{**chosen, **self._options})
        if self._out.id != before:
            self._out.config.update({"torchrex": dict(watched.setting)}, allow_val_change=True)
        return str(self._out.id)

    def _send(self, numbers: Mapping[str, float], step: int) -> None:
        self._out.log(dict(numbers), step=step)

    def _close(self, status: str) -> None:
        super()._close(status)
        if self._is_own:
            self._out.finish(exit_code=int(status == "failed"))


class MLflow(Tracker):
    """Logs a run to MLflow, a point every `every` steps, with TensorBoard's names.

    It goes where MLflow is set to (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME); `folder` keeps
    only which run it is. If an MLflow run of yours is active, it is used and left open. The
    settings are parameters, final numbers are metrics of the last step. If the server fails, the
    run goes on and sends its points later.
    """

    def __init__(self, folder: Path | str, *, every: int = 100) -> None:
        super().__init__(folder, every=every)
        self._mlflow = import_extra("mlflow", "mlflow")
        self._errors = (self._mlflow.exceptions.MlflowException, ImportError)
        self._waiting: list[Any] = []

    def _begin(self, watched: Watched, before: str | None) -> str:
        self._out = client = self._mlflow.MlflowClient()
        active = self._mlflow.active_run()
        self._is_own = active is None
        if active is not None:
            run = active.info.run_id
        elif before is not None:
            client.update_run(run := before, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "torchrex")
            found = client.get_experiment_by_name(name)
            where = found.experiment_id if found else client.create_experiment(name)
            title = f"{watched.name}, seed {watched.seed}"
            run = client.create_run(where, run_name=title).info.run_id
        named = {} if run == before else flattened(watched.setting, "torchrex.")
        parameters = [
            self._mlflow.entities.Param(re.sub(r"[^\w\-. :/]", "_", name), str(value)[:LONGEST])
            for name, value in named.items()
        ]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(run, params=parameters[first : first + MOST_PARAMETERS])
        return str(run)

    def _send(self, numbers: Mapping[str, float], step: int) -> None:
        metric, now = self._mlflow.entities.Metric, time.time_ns() // 1_000_000
        self._waiting += [metric(name, float(v), now, step) for name, v in numbers.items()]
        try:
            while self._waiting:
                self._out.log_batch(self._id, metrics=self._waiting[:MOST_METRICS])
                del self._waiting[:MOST_METRICS]
        except self._errors as error:
            n, why = len(self._waiting), " ".join(str(error).split())
            logger.warning("MLflow did not take %d numbers, they are kept for later: %s", n, why)

    def _close(self, status: str) -> None:
        super()._close(status)
        ends = {"finished": "FINISHED", "failed": "FAILED", "paused": "SCHEDULED"}
        if self._is_own:
            with contextlib.suppress(*self._errors):
                self._out.set_terminated(self._id, ends.get(status, "KILLED"))


def flattened(setting: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of a nested setting, by names joined with dots."""
    leaves: dict[str, Any] = {}
    for name, value in setting.items():
        is_inner = isinstance(value, Mapping) and value
        leaves |= flattened(value, f"{path}{name}.") if is_inner else {f"{path}{name}": value}
    return leaves


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
