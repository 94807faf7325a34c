"""What the experiments on images and with GANs share: how their configs train, what `result.json`
says of them, and how a table of the paper is declared.

Runs that see the same batches train together in one step; each ends as it would alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchrex.checkpoint import Checkpoints
from torchrex.density import few_threads
from torchrex.distributed import replica_mesh
from torchrex.errors import DataError, NonFiniteEnergyError
from torchrex.network import ModuleExchange, TrainingRun, train_together
from torchrex.posterior import PosteriorAverage
from torchrex.recording import Trace
from torchrex.runs.config import ExperimentConfig, Outcome, RunOptions
from torchrex.runs.folder import Run, RunResult
from torchrex.targets import DeviceLoader, PosteriorEnergy
from torchrex.vision.data import data_folder, stratified_split, stratified_subset

logger = logging.getLogger("torchrex")

EVALUATION_BATCH = 2500
SIGNIFICANT = 5  # digits of a curve in result.json
CURVE_POINTS = 150
MOST_SWAPS = 10_000  # that a curve lists; the counts are of all
Labelled = tuple[Tensor, Tensor]


class Kind(NamedTuple):
    """What an experiment must know of a data set."""

    n_train: int
    n_test: int
    n_classes: int
    size: int = 32  # pixels along a side
    channels: int = 3


KINDS: dict[str, Kind] = {
    "cifar10": Kind(50_000, 10_000, 10),
    "cifar100": Kind(50_000, 10_000, 100),
    "svhn": Kind(73_257, 26_032, 10),
    "digits": Kind(1_297, 500, 10, size=8, channels=1),
}


class Batches(NamedTuple):
    """The data of some runs on their device."""

    train: DeviceLoader
    test: list[Labelled]
    extra: DeviceLoader | None = None  # for repeated energies: the same images in another order
    real: Tensor | None = None  # what the images of a generator are compared with


class Intervals(NamedTuple):
    """In steps: the first draw of the average comes `draw` steps after `burn_in`."""

    burn_in: int
    draw: int
    trace: int


class NetworkConfig(ExperimentConfig):
    """One method with one or two rungs on one image set; subclasses say what is trained on what."""

    unit: ClassVar[str]  # of time in curves and tables; the setting `{unit}s` is the length
    paper_length: ClassVar[int]  # in these units
    averages: ClassVar[Mapping[str, str]]  # prefix of a metric -> what the average is of
    batch_settings: ClassVar[tuple[str, ...]]  # runs that train together have them in common
    most_replicas: int = 16  # of all runs that train together
    one_thread: ClassVar[bool] = False  # on a CPU

    data: str
    method: str
    temperature: float
    hot_temperature: float
    validation: int
    test_subset: int | None
    deterministic: bool
    checkpoint_every: int  # in units

    # What a subclass adds

    @property
    def intervals(self) -> Intervals:
        raise NotImplementedError

    def energy(self) -> PosteriorEnergy:
        raise NotImplementedError

    def run(
        self, seed: int, device: torch.device, energy: PosteriorEnergy | None = None
    ) -> ModuleExchange:
        """The run of one seed. `energy` is an equal one of another run: it compiles once."""
        raise NotImplementedError

    def batches(self, seed: int, device: torch.device) -> Batches:
        raise NotImplementedError

    @property
    def cpu_warning(self) -> tuple[str, str] | None:
        """How long the run takes on a CPU, if that is long, and what to run in its place."""
        return None

    def finish(
        self, run: ModuleExchange, batches: Batches, seed: int
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Further metrics and pictures of a finished run."""
        return {}, {}

    # What a table of the paper asks

    @property
    def cell(self) -> dict[str, Any]:
        """What the methods of one cell of a table have in common."""
        raise NotImplementedError

    @property
    def same_run_as(self) -> str | None:
        """A recipe whose run has the same numbers on rung 0, bit for bit."""
        return None

    @property
    def tested_against_paper(self) -> bool:
        """Whether a run of full length is the paper's experiment."""
        return True

    @property
    def paper_note(self) -> str:
        return f"{self.paper_length:,} {self.unit}s, 5 seeds, ± 2 standard deviations"

    @property
    def test_size(self) -> int:
        n_test = self.validation or self.kind.n_test
        return min(n_test, self.test_subset or n_test)

    # Settings

    @property
    def family(self) -> str:
        return self.recipe.split("/")[0]

    @property
    def kind(self) -> Kind:
        return KINDS[self.data]

    @property
    def swaps(self) -> bool:
        return self.method == "resghmc"

    @property
    def temperatures(self) -> tuple[float, ...]:
        pair = (self.temperature, self.hot_temperature * self.temperature)
        return pair if self.method in ("resghmc", "independent", "noswaps") else pair[:1]

    def check(self) -> None:
        self.require_ranges()
        most = f"at least 0 and less than {self.kind.n_train}"
        self.require("validation", 0 <= self.validation < self.kind.n_train, most)
        n_test = self.validation or self.kind.n_test
        fine = self.test_subset is None or 1 <= self.test_subset <= n_test
        self.require("test_subset", fine, f"between 1 and {n_test}, or none")

    def batch_key(self, seed: int) -> str:
        """Runs with equal keys train on the same batches."""
        return " ".join(str(getattr(self, name)) for name in self.batch_settings)

    @property
    def auto_device(self) -> str:
        return "auto"

    # Training

    def on(self, device: torch.device) -> dict[str, Any]:
        """Where and how an ensemble computes."""
        return {
            "device": device,
            "autocast": self.autocast(device),
            "channels_last": True,
            "mesh": replica_mesh(self.n_rungs, device),
        }

    def execute(
        self, runs: Sequence[Run], options: RunOptions
    ) -> tuple[Outcome, Sequence[RunResult]]:
        """Train runs of one `batch_key` together; what came of each, in the same order."""
        on = self.device(options.device)
        batches = self.batches(runs[0].seed, on)
        if on.type == "cpu" and self.cpu_warning is not None:
            logger.warning(
                "%s is made for a GPU, and %s steps on this CPU will take %s; to try it here: %s",
                *(self.recipe, f"{self.n_steps:,}", *self.cpu_warning),
            )
        energies: list[PosteriorEnergy] = []
        training = []
        for run in runs:
            own: PosteriorEnergy = run.config.energy()
            equal = [each for each in energies if each.settings() == own.settings()]
            energies += [] if equal else [own]
            exchange = run.config.run(run.seed, on, equal[0] if equal else own)
            training.append(_training_run(run, exchange, batches.test))
        try:
            with few_threads(0) if self.one_thread else nullcontext():
                outcome = train_together(
                    training,
                    batches.train,
                    self.n_steps,
                    checkpoint_every=self.checkpoint_every * self.steps_per_epoch,
                    resume=options.resume,
                    budget=options.budget,
                    progress=options.progress,
                    extra=batches.extra,
                    on_interrupt="return",
                )
        except NonFiniteEnergyError:
            if any(each.failure is None for each in training):
                raise
            outcome = Outcome("failed")  # all of them, each for its own reason
        if outcome.status == "paused" and outcome.steps < self.steps_per_epoch:
            logger.warning(
                "the budget of %.3g s was used up after %d of the %d steps of an epoch; they are "
                "saved, but give it more time",
                options.budget or 0.0,
                outcome.steps,
                self.steps_per_epoch,
            )
        return outcome, [
            _result(run, each, outcome, batches) for run, each in zip(runs, training, strict=True)
        ]


def _training_run(job: Run, run: ModuleExchange, test: list[Labelled]) -> TrainingRun:
    config: NetworkConfig = job.config
    at, rungs = config.intervals, tuple(range(run.n_rungs))
    average = PosteriorAverage(test, every=at.draw, burn_in=at.burn_in, rungs=rungs, history=True)
    return TrainingRun(
        run,
        [average],
        Trace(at.trace),
        None if job.checkpoints is None else Checkpoints(job.checkpoints),
        {"recipe": config.recipe},
        observers=job.observers,
    )


def _result(job: Run, run: TrainingRun, outcome: Outcome, batches: Batches) -> RunResult:
    assert run.trace is not None
    if run.failure is not None or outcome.status != "finished":
        return RunResult(run.trace, failure=run.failure)
    config: NetworkConfig = job.config
    (average,) = run.averages
    metrics, pictures = config.finish(run.run, batches, job.seed)
    seconds = outcome.total_seconds / (config.n_steps / config.steps_per_epoch)
    return RunResult(
        run.trace,
        metrics_of(config, average) | metrics | {f"seconds_per_{config.unit}": seconds},
        curves_of(config, run.trace.tensors(), average),
        {"probabilities": average.probabilities(0)},
        pictures=pictures,
        exchange=run.run.exchange().numbers,
    )


# What result.json says


def _rungs(config: NetworkConfig) -> list[tuple[str, int | None]]:
    """Prefixes of metrics: none for rung 0, `pooled_` for both rungs."""
    return [("", 0), ("pooled_", None)][: config.n_rungs]


def metrics_of(config: NetworkConfig, average: PosteriorAverage) -> dict[str, Any]:
    """Of the average of probabilities, the sum of logits (`logits_`) and the newest network
    (`single_`); `best_` is the best draw on the evaluated images, as the authors reported it.
    """
    metrics: dict[str, Any] = {"n_draws": average.n_draws}
    for prefix, rung in _rungs(config):
        for kind, of in config.averages.items():
            numbers = average.metrics(rung, of=of)  # type: ignore[arg-type]
            metrics |= {f"{prefix}{kind}{name}": value for name, value in numbers.items()}
            metrics[f"{prefix}{kind}best_accuracy"] = float(average.history(rung)[of].max())
    metrics["mutual_information"] = float(average.mutual_information(0).mean())
    return metrics


def curves_of(
    config: NetworkConfig, trace: Mapping[str, Tensor], average: PosteriorAverage
) -> dict[str, Any]:
    """Means over parts of the run, the first swaps, and the accuracies after each draw."""
    unit, per_unit = config.unit, config.steps_per_epoch
    n_epochs = config.n_steps // per_unit
    n_bins = n_epochs if unit == "epoch" else min(CURVE_POINTS, len(trace["steps"]))
    bins = trace["steps"] * n_bins // config.n_steps
    starts = [k * config.n_steps // n_bins // per_unit for k in range(n_bins)]
    curves: dict[str, Any] = {unit: starts}
    for name in ("energy", "noise_variance", "correction"):
        curves[name] = [rounded(binned(values, bins, n_bins)) for values in trace[name].unbind(1)]
    swaps = trace["swap_steps"][:MOST_SWAPS]
    curves[f"swap_{unit}s"] = (
        swaps.tolist() if per_unit == 1 else rounded(swaps.double() / per_unit)
    )
    for prefix, rung in _rungs(config):
        history = average.history(rung)
        curves[f"draw_{unit}"] = (history["step"] // per_unit).tolist()
        for of in config.averages.values():
            curves[f"{prefix}{of}_accuracy"] = rounded(history[of])
    return curves


def binned(values: Tensor, bin_of: Tensor, n_bins: int) -> Tensor:
    """Means over the values of each bin."""
    sums = torch.zeros(n_bins, dtype=torch.float64).index_add_(0, bin_of, values.double())
    return sums / torch.bincount(bin_of, minlength=n_bins)


def rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.{SIGNIFICANT}g}") for value in values.tolist()]


# Data


def split_images(
    config: NetworkConfig, train: Labelled, test: Labelled, *, seed: int
) -> tuple[Labelled, Labelled]:
    """What is trained on and what is evaluated: validation images replace the test images."""
    (x, y), held_out = train, test
    if config.validation:
        chosen, validation = stratified_split(y, config.validation, seed=seed)
        held_out = (x[validation], y[validation])
        x, y = x[chosen], y[chosen]
    if config.test_subset is not None:
        n_test = min(config.test_subset, len(held_out[1]))
        few = stratified_subset(held_out[1], n_test, seed=seed)
        held_out = (held_out[0][few], held_out[1][few])
    return (x, y), held_out


def require_all_images(config: NetworkConfig, n_found: int) -> None:
    if n_found != config.kind.n_train:
        raise DataError(
            f"{config.data} in {data_folder()} has {n_found:,} training images instead of "
            f"{config.kind.n_train:,}; import or fetch it again"
        )


# Tables of the paper


class Line(NamedTuple):
    """A row in every cell of a table."""

    title: str
    method: str
    prefix: str = ""  # of its metrics


class Difference(NamedTuple):
    """Two rows that are compared seed by seed."""

    title: str
    of: Line
    minus: Line
    prefix: str = ""  # of the metrics


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: one row for each line and cell, mean over seeds next to the paper's."""

    title: str
    recipes: Callable[[], Mapping[str, NetworkConfig]]
    lines: tuple[Line, ...]
    differences: tuple[Difference, ...]
    differences_title: str
    notes: Mapping[str, str]  # on a word of a cell or a line
    differences_key: str = "differences"  # in the JSON
