"""CIFAR-10 and CIFAR-100 by residual networks (section 5.2 of the paper): a config for every cell
of tables 1 and 2 and figure 2.

Times are those of the paper: 500 epochs of 195 steps, which is one pass over 50,000 images at batch
size 256. With other `epochs` every schedule is stretched or compressed alike, so that one number
makes a shorter run of the same shape. At another batch size an epoch still has as many steps: the
paper ran "the same iterations".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchrex.distributed import replica_mesh
from torchrex.errors import ConfigError, InvalidArgumentError
from torchrex.exchange import (
    Ladder,
    NoiseEstimator,
    NoSwaps,
    PairedVariance,
    ProportionalToGap,
    RepeatedDraws,
    Smoothing,
    resolve_device,
)
from torchrex.exchange.momentum import MomentumPolicy
from torchrex.experiments.config import ExperimentConfig
from torchrex.experiments.jobs import Job, Trained
from torchrex.experiments.place import Place, Precision
from torchrex.network import ModuleEnsemble, ModuleExchange, Outcome
from torchrex.recording import Callback
from torchrex.samplers import SGHMC
from torchrex.schedules import Schedule
from torchrex.targets import PosteriorEnergy, from_sgd
from torchrex.vision.nets import NETS, build_net

Method = Literal["msgd", "sghmc", "resghmc", "independent"]
Variance = Literal["paired", "repeated"]
PAPER_EPOCHS, PAPER_BATCH = 500, 256
HOLD, LR_RATE, ANNEALING = (
    200,
    0.984,
    1.02,
)  # epochs at full lr, its factor per epoch after that; the temperature's, from the start
N_TRAINING, N_CLASSES = 50_000, {"cifar10": 10, "cifar100": 100}


@dataclass(frozen=True)
class ImageConfig(ExperimentConfig):
    """One method on one data set with one network; learning rate and weight decay are those of a
    mean loss.
    """

    data: Literal["cifar10", "cifar100"]  # cifar10 or cifar100
    net: str
    method: Method = field(metadata={"settable": False})
    epochs: int = PAPER_EPOCHS  # of N/256 steps each; all schedules are stretched to them
    batch_size: int = PAPER_BATCH  # does not change the number of steps
    lr_of_mean: float = 0.1  # of the cold rung, on the mean loss
    momentum: float = 0.9
    weight_decay: float = 5e-4  # on the mean loss
    temperature: float = 0.01  # of the cold rung, on the summed energy
    hot_temperature: float = 5.0  # of the hot rung, in units of the cold one's
    hot_lr: float = 1.5  # of the hot rung, in units of the cold one's
    correction_factor: float = 1.5e5  # F at the start; it grows as the ladder cools. Half of the authors' F0, as their test has
    # the sum of two variances (the paper's 3e5 is 150000 here); in clean/ a third of that, as its
    # variance is about a third
    factor_per_swap: float = 1.0  # F is multiplied by it at every swap
    swaps_after: float = 10.0  # epochs of the paper
    rest_after_swap: float = 0.0  # epochs of the paper
    average_after: float = 199.0  # epochs of the paper
    noise_follows_lr: bool = True  # or keeps the initial lr, as in the authors' code
    prior_in_swaps: bool = True  # or only in the gradient
    momentum_at_swap: MomentumPolicy = (
        "rescale"  # rescale: to the law of the new rung; keep: not rescaled, as in the authors'
    )
    # code; refresh: drawn anew
    variance: Variance = "paired"  # paired: per-example differences at every step; repeated: 10 energies once an epoch
    smoothing: float = 0.3  # of the variance
    validation: int = (
        0  # so many training images are held out and evaluated in place of the test images
    )
    subset: int | None = None  # train on so many images only
    test_subset: int | None = None  # evaluate on so many only
    data_seed: int = 0  # of the order and the augmentation, which all seeds share
    precision: Precision = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    deterministic: bool = True  # the same bits in every process, about 3 % slower on a GPU
    checkpoint_every: int = 10  # epochs

    def check(self) -> None:
        """Settings that do not go together."""
        if self.net not in NETS:
            try:
                build_net(self.net, 10)
            except InvalidArgumentError as error:
                raise ConfigError(f"setting 'net': {error}") from None
        most = N_TRAINING - self.validation
        for name, fine, wanted in (
            ("epochs", self.epochs >= 1, "at least 1"),
            (
                "validation",
                0 <= self.validation < N_TRAINING,
                f"at least 0 and less than {N_TRAINING}",
            ),
            (
                "subset",
                self.subset is None or 1 <= self.subset <= most,
                f"between 1 and {most}, or none",
            ),
            (
                "test_subset",
                self.test_subset is None or 1 <= self.test_subset <= 10_000,
                "between 1 and 10000, or none",
            ),
            (
                "batch_size",
                1 <= self.batch_size <= self.n_data,
                f"between 1 and the {self.n_data} training images",
            ),
            ("lr_of_mean", self.lr_of_mean > 0, "positive"),
            ("hot_lr", self.hot_lr > 0, "positive"),
            ("temperature", self.temperature > 0, "positive"),
            ("hot_temperature", self.hot_temperature > 1, "above 1"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and less than 1"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("correction_factor", self.correction_factor > 0, "positive"),
            ("factor_per_swap", 0 < self.factor_per_swap <= 1, "in (0, 1]"),
            ("smoothing", 0 < self.smoothing <= 1, "in (0, 1]"),
            ("swaps_after", 0 <= self.swaps_after < math.inf, "at least 0 and finite"),
            ("rest_after_swap", 0 <= self.rest_after_swap < math.inf, "at least 0 and finite"),
            (
                "average_after",
                0 <= self.average_after < PAPER_EPOCHS,
                f"at least 0 and less than {PAPER_EPOCHS}",
            ),
            ("checkpoint_every", self.checkpoint_every >= 1, "at least 1"),
        ):
            if not fine:
                raise ConfigError(f"setting {name!r} must be {wanted}, got {getattr(self, name)}")

    # Sizes

    @property
    def n_rungs(self) -> int:
        return 2 if self.method in ("resghmc", "independent") else 1

    @property
    def swaps(self) -> bool:
        return self.method == "resghmc"

    @property
    def temperatures(self) -> tuple[float, ...]:
        every = (self.temperature, self.hot_temperature * self.temperature)
        return () if self.method == "msgd" else every[: self.n_rungs]

    @property
    def n_data(self) -> int:
        return self.subset or N_TRAINING - self.validation

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.n_data // PAPER_BATCH)

    @property
    def n_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def burn_in(self) -> int:
        """Steps before the epoch whose end gives the first draw."""
        return int(self.average_after * self.epochs / PAPER_EPOCHS) * self.steps_per_epoch

    def company(self, seed: int) -> str:
        """What jobs must have in common to train side by side: data, network, and everything that
        shapes a batch.
        """
        shared = (
            "data",
            "net",
            "epochs",
            "batch_size",
            "validation",
            "subset",
            "test_subset",
            "data_seed",
            "precision",
        )
        return " ".join(
            str(getattr(self, name)) for name in (*shared, "deterministic", "checkpoint_every")
        )

    @property
    def most_replicas(self) -> int:
        return {"wrn-28-10": 4, "wrn-16-8": 8}.get(self.net, 16)

    # Parts of a run

    def in_paper_epochs(self, step: int) -> float:
        """The time of a step: that of the epoch it belongs to, stretched to 500, where it stands
        still.
        """
        return min(PAPER_EPOCHS, (step // self.steps_per_epoch) * PAPER_EPOCHS / self.epochs)

    def steps_of(self, paper_epochs: float) -> int:
        return round(paper_epochs * self.epochs / PAPER_EPOCHS * self.steps_per_epoch)

    @property
    def swap_start(self) -> int:
        """The first step with a swap test: not before there is a variance to correct it by."""
        return max(
            self.steps_of(self.swaps_after),
            self.steps_per_epoch if self.variance == "repeated" else 1,
        )

    @property
    def factor_follows_gap(self) -> bool:
        return True

    @property
    def swap_noise(self) -> float:
        """Energies drawn apart for each replica vary three times as much as on a shared minibatch."""
        return 1 / 3 if self.variance == "repeated" else 1.0

    @property
    def test_size(self) -> int:
        held_out = self.validation or 10_000
        return min(held_out, self.test_subset or held_out)

    def ladder(self) -> Ladder:
        def decay(step: int) -> float:
            return float(LR_RATE ** max(0.0, self.in_paper_epochs(step) - HOLD))

        def annealing(step: int) -> float:
            return float(ANNEALING ** -self.in_paper_epochs(step))

        def kept(step: int) -> float:
            return 1.0 / decay(step)

        lr = from_sgd(n_data=self.n_data, lr=self.lr_of_mean).lr
        if self.method == "msgd":
            return Ladder.descent(lr, decay=decay)
        noise: Schedule | None = None if self.noise_follows_lr else kept
        return Ladder(
            self.temperatures,
            (lr, self.hot_lr * lr)[: self.n_rungs],
            anneal=annealing,
            decay=decay,
            noise=noise,
        )

    def energy(self) -> PosteriorEnergy:
        prior = from_sgd(n_data=self.n_data, lr=1.0, weight_decay=self.weight_decay).prior
        return PosteriorEnergy(
            F.cross_entropy, n_data=self.n_data, prior=prior, prior_in_swaps=self.prior_in_swaps
        )

    def noise(self) -> NoiseEstimator | None:
        if self.n_rungs == 1:
            return None
        if self.variance == "paired":
            return PairedVariance(self.smoothing)
        return Smoothing(self.smoothing, RepeatedDraws(n_draws=10, every=self.steps_per_epoch))

    def model(self) -> nn.Module:
        return build_net(self.net, N_CLASSES[self.data])

    def run(self, seed: int, device: torch.device, energy: PosteriorEnergy) -> ModuleExchange:
        """The run of one seed. `energy` is `self.energy()`, or the equal one of the job beside it,
        which compiles once then.
        """
        run = ModuleExchange(
            ModuleEnsemble(
                self.model,
                energy,
                SGHMC(from_sgd(n_data=1, lr=1.0, momentum=self.momentum).friction),
                device=device,
                autocast=Place.of(device, self.precision).autocast,
                channels_last=True,
                mesh=replica_mesh(self.n_rungs, device),
            ),
            self.ladder(),
            noise=self.noise(),
            correction_factor=ProportionalToGap(
                self.correction_factor, per_swap=self.factor_per_swap
            ),
            pairing=NoSwaps() if self.method == "independent" else None,
            swap_start=self.swap_start,
            swap_rest=self.steps_of(self.rest_after_swap),
            momentum=self.momentum_at_swap,
            deterministic=self.deterministic,
            seed=seed,
        )
        return run

    def place(self, device: str) -> Place:
        return Place.of(resolve_device(device), self.precision)

    def execute(
        self,
        jobs: Sequence[Job],
        *,
        device: str,
        resume: bool,
        budget: float | None,
        progress: Callback | None,
    ) -> tuple[Outcome, list[Trained]]:
        """Train the jobs, this config's own and others of its company, side by side."""
        from torchrex.experiments.image_runs import train_images

        return train_images(jobs, device=device, resume=resume, budget=budget, progress=progress)
