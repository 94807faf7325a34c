"""Handwritten digits (1,797 images of 8 x 8 pixels that come with scikit-learn) by a small network.

Momentum SGD, SGHMC, replica exchange SGHMC, and the baseline that matters: as many independent
replicas on the same ladder without swaps, at equal compute. Settings were chosen on a part of the
training images; the test images decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.checkpoint import Checkpoints
from torchrex.density import few_threads
from torchrex.distributed import replica_mesh
from torchrex.errors import MissingDependencyError
from torchrex.exchange import Ladder, NoSwaps, PairedVariance
from torchrex.network import ModuleEnsemble, ModuleExchange, train
from torchrex.posterior import PosteriorAverage
from torchrex.recording import Trace
from torchrex.runs.config import ExperimentConfig, Outcome, RunOptions
from torchrex.runs.folder import Run, RunResult
from torchrex.samplers import SGHMC
from torchrex.schedules import hold_then_decay
from torchrex.targets import DeviceLoader, PosteriorEnergy, from_sgd

N_TEST, N_TRAINING, SPLIT_SEED = 500, 1297, 0
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DigitsConfig(ExperimentConfig):
    """One method on the digits; learning rates and weight decay are those of a mean loss."""

    temperatures: tuple[float, ...] = ()  # one is SGHMC, none is momentum SGD
    swaps: bool = True  # False: independent replicas, pooled
    hidden: int = 64
    batch_size: int = 64
    epochs: int = 100
    burn_in_epochs: int = 50
    lr_of_mean: float = 0.05
    hot_lr: float = 1.0  # of the hottest rung, in units of the coldest one's
    momentum: float = 0.9
    weight_decay: float = 2e-3
    correction_factor: float = 1.0
    smoothing: float = 0.05
    checkpoint_every: int = 500

    def check(self) -> None:
        self.require_ranges()
        fine = 0 <= self.burn_in_epochs < self.epochs
        self.require("burn_in_epochs", fine, f"at least 0 and less than epochs={self.epochs}")
        fine = 1 <= self.batch_size <= N_TRAINING
        self.require("batch_size", fine, f"between 1 and {N_TRAINING}")

    @property
    def n_data(self) -> int:
        return N_TRAINING

    @property
    def steps_per_epoch(self) -> int:
        return N_TRAINING // self.batch_size

    @property
    def n_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def test_size(self) -> int:
        return N_TEST

    def test_labels(self) -> Tensor | None:
        try:
            return digits()[1][1]
        except MissingDependencyError:
            return None

    @property
    def answer(self) -> int | None:
        """The rung that gives the answer: the coldest, or all (None) where they do not exchange."""
        return 0 if self.swaps else None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def ladder(self) -> Ladder:
        lr = from_sgd(n_data=N_TRAINING, lr=self.lr_of_mean).lr
        if not self.temperatures:
            decay = hold_then_decay(self.n_steps // 2, 0.99, every=self.steps_per_epoch)
            return Ladder.descent(lr, decay=decay)
        last = max(1, self.n_rungs - 1)
        lrs = [lr * self.hot_lr ** (rung / last) for rung in range(self.n_rungs)]
        return Ladder(self.temperatures, lrs)

    def exchange(self, seed: int, device: torch.device) -> ModuleExchange:
        scale = from_sgd(
            n_data=N_TRAINING,
            lr=self.lr_of_mean,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        ensemble = ModuleEnsemble(
            self.model,
            PosteriorEnergy(F.cross_entropy, n_data=N_TRAINING, prior=scale.prior),
            SGHMC(scale.friction),
            initial="independent",
            device=device,
            mesh=replica_mesh(self.n_rungs, device),
        )
        return ModuleExchange(
            ensemble,
            self.ladder(),
            noise=PairedVariance(self.smoothing) if self.n_rungs > 1 else None,
            correction_factor=self.correction_factor,
            pairing=None if self.swaps else NoSwaps(),
            seed=seed,
        )

    def execute(
        self, runs: Sequence[Run], options: RunOptions
    ) -> tuple[Outcome, Sequence[RunResult]]:
        """Train with one seed; each seed has its own order of the data."""
        (run,) = runs
        device, (training, test) = self.device(options.device), digits()
        average = PosteriorAverage(
            [test],
            every=self.steps_per_epoch,
            burn_in=self.burn_in_epochs * self.steps_per_epoch,
            rungs=tuple(range(self.n_rungs)),
        )
        trace, exchange = Trace(), self.exchange(run.seed, device)
        with few_threads(0):
            outcome = train(
                exchange,
                DeviceLoader(training, self.batch_size, seed=run.seed, device=device),
                self.n_steps,
                average=average,
                trace=trace,
                checkpoints=None if run.checkpoints is None else Checkpoints(run.checkpoints),
                checkpoint_every=self.checkpoint_every,
                resume=options.resume,
                budget=options.budget,
                progress=options.progress,
                setting={"recipe": self.recipe},
                observers=run.observers,
                on_interrupt="return",
            )
        if outcome.status != "finished":
            return outcome, [RunResult(trace)]
        tensors = {"probabilities": average.probabilities(self.answer)}
        said = exchange.exchange().numbers
        return outcome, [RunResult(trace, self.metrics(average), tensors=tensors, exchange=said)]

    def metrics(self, average: PosteriorAverage) -> dict[str, Any]:
        """Of the average, of the last network alone (`single_`), of all rungs (`pooled_`)."""
        metrics: dict[str, Any] = {"n_draws": average.n_draws, **average.metrics(self.answer)}
        single = average.metrics(0, of="last")
        metrics |= {f"single_{name}": value for name, value in single.items()}
        if self.n_rungs > 1:
            metrics |= {f"pooled_{name}": value for name, value in average.metrics(None).items()}
        metrics["mutual_information"] = float(average.mutual_information(self.answer).mean())
        return metrics


def digits() -> tuple[Labelled, Labelled]:
    """Training and test images as rows of 64 numbers, standardised by the training images."""
    (x, y), (x_test, y_test) = _split_digits()
    mean, std = x.mean(), x.std()
    return ((x - mean) / std, y), ((x_test - mean) / std, y_test)


def digit_images() -> tuple[Labelled, Labelled]:
    """The same as bytes (n, 8, 8, 1): 0 to 16 shades of grey spread over 0 to 255."""
    training, test = (
        ((x.view(-1, 8, 8, 1) * 255 / 16).round().to(torch.uint8), y) for x, y in _split_digits()
    )
    return training, test


def _split_digits() -> tuple[Labelled, Labelled]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        message = "the digits come with scikit-learn; pip install 'torchrex[data]'"
        raise MissingDependencyError(message) from None
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, training = order[:N_TEST], order[N_TEST:]
    return (x[training], y[training]), (x[test], y[test])


def digits_recipes() -> dict[str, DigitsConfig]:
    """The rungs are so close that the unbiased test, F = 1, accepts swaps in the complete run."""
    cold, hot = 0.1, 0.1025
    configs = (
        DigitsConfig("digits/msgd", ()),
        DigitsConfig("digits/sghmc", (cold,)),
        DigitsConfig("digits/resghmc", (cold, hot)),
        DigitsConfig("digits/independent", (cold, hot), swaps=False),
    )
    return {config.recipe: config for config in configs}
