"""Semi-supervised Bayesian GANs (section 5.3 of the paper): a config for every cell of table 3 and
every point of figure 3.

Times are steps, 15,000 in all. The first `warm_start` of them descend by Adam, without noise and
without swaps; then SGHMC samples, and the average begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from torchrex.distributed import ReplicaMesh, replica_mesh
from torchrex.errors import ConfigError
from torchrex.exchange import Ladder, NoSwaps, PairedVariance, resolve_device
from torchrex.experiments.config import ExperimentConfig
from torchrex.experiments.jobs import Job, Trained
from torchrex.experiments.place import Place, Precision
from torchrex.network import ModuleEnsemble, ModuleExchange, Outcome
from torchrex.recording import Callback
from torchrex.samplers import SGHMC, AdamStart, Sampler
from torchrex.targets import GaussianPrior, PosteriorEnergy, from_sgd
from torchrex.vision.bayesian_gan import BayesianGAN, gan_losses, supervised_losses

GanMethod = Literal["resghmc", "sghmc", "noswaps", "supervised"]
GanData = Literal["cifar10", "cifar100", "svhn", "digits"]


@dataclass(frozen=True)
class Kind:
    """What the networks must know of a data set."""

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


@dataclass(frozen=True)
class GanConfig(ExperimentConfig):
    """One method on one data set with some labels; learning rates are those of a mean loss."""

    data: GanData = field(metadata={"settable": False})
    method: GanMethod = field(metadata={"settable": False})
    n_labelled: int  # class-balanced, chosen by the seed; the rest of the images is unlabelled
    steps: int = 15_000
    warm_start: int = 5_000  # steps of Adam at the beginning; 0: none
    batch_size: int = 64  # labelled images, and as many unlabelled ones
    n_generators: int = 20  # the paper's 10 Monte Carlo samples with 2 draws each
    latents: int = 16  # images that each generator makes in a step
    generators: Literal["shared", "own"] = (
        "shared"  # shared: by all rungs; own: each rung has its own
    )
    width: int = 64  # channels of the first layer
    lr_of_mean: float = 4.5e-4  # of the cold rung
    hot_lr: float = 1.5  # of the hot rung, in units of the cold one's
    lr_time: float = 800.0  # lr falls as exp(-step / lr_time),
    lr_floor: float = 0.05  # down to this part of it
    sampling_lr: float = 1.0  # of SGHMC, in units of what the schedule gives; Adam's and SGHMC's rates have little in common
    momentum: float = 0.5  # 1 - friction
    prior_precision: float = 1.0  # of N(0, 1 / precision) on every weight
    temperature: float = 0.01  # of the cold rung, on the summed energy
    hot_temperature: float = 100.0  # of the hot rung, in units of the cold one's
    correction_factor: float = 2.0e5  # F
    smoothing: float = 0.05  # of the variance
    average_every: int = 250  # steps; the first draw comes so many after the warm start
    validation: int = (
        0  # so many training images are held out and evaluated in place of the test images
    )
    test_subset: int | None = None  # evaluate on so many only
    precision: Precision = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    deterministic: bool = True  # the same bits in every process on a GPU
    checkpoint_every: int = 2_500  # steps

    def check(self) -> None:
        """Settings that do not go together."""
        kind = self.kind
        most, classes = kind.n_train - self.validation, kind.n_classes
        nearest = min(max(1, round(self.n_labelled / classes)), (most - 1) // classes) * classes
        images, held_out = self.n_generators * self.latents, self.validation or kind.n_test
        for name, fine, wanted in (
            (
                "validation",
                0 <= self.validation < kind.n_train,
                f"at least 0 and less than {kind.n_train}",
            ),
            (
                "n_labelled",
                1 <= self.n_labelled < most,
                f"at least {classes} and less than the {most} training images",
            ),
            (
                "n_labelled",
                self.n_labelled % classes == 0,
                f"a multiple of the {classes} classes (the nearest is {nearest})",
            ),
            ("steps", self.steps >= 1, "at least 1"),
            (
                "warm_start",
                0 <= self.warm_start < self.steps,
                f"at least 0 and less than steps={self.steps}",
            ),
            (
                "batch_size",
                2 <= self.batch_size <= most - self.n_labelled,
                f"from 2 to the {most - self.n_labelled} unlabelled",
            ),
            ("n_generators", self.n_generators >= 1, "at least 1"),
            ("latents", self.latents >= 2, "at least 2, for the BatchNorm of a generator"),
            (
                "latents",
                self.method == "supervised" or images % max(1, self.batch_size) == 0,
                f"so many that n_generators x latents, {images}, is a multiple of batch_size",
            ),
            ("width", self.width >= 1, "at least 1"),
            ("lr_of_mean", self.lr_of_mean > 0, "positive"),
            ("hot_lr", self.hot_lr > 0, "positive"),
            ("lr_time", self.lr_time > 0, "positive"),
            ("lr_floor", 0 < self.lr_floor <= 1, "above 0 and up to 1"),
            ("sampling_lr", self.sampling_lr > 0, "positive"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and less than 1"),
            ("prior_precision", self.prior_precision >= 0, "at least 0"),
            ("temperature", self.temperature > 0, "positive"),
            ("hot_temperature", self.hot_temperature > 1, "above 1"),
            ("correction_factor", self.correction_factor > 0, "positive"),
            ("smoothing", 0 < self.smoothing <= 1, "in (0, 1]"),
            (
                "average_every",
                1 <= self.average_every <= self.steps - self.warm_start,
                "between 1 and steps - warm_start",
            ),
            (
                "test_subset",
                self.test_subset is None or 1 <= self.test_subset <= held_out,
                f"between 1 and {held_out}, or none",
            ),
            ("checkpoint_every", self.checkpoint_every >= 1, "at least 1"),
        ):
            if not fine:
                raise ConfigError(f"setting {name!r} must be {wanted}, got {getattr(self, name)}")

    # Sizes

    @property
    def family(self) -> str:
        """Whose settings these are: `gan` or `gan-tuned`."""
        return self.recipe.split("/")[0]

    @property
    def kind(self) -> Kind:
        return KINDS[self.data]

    @property
    def n_steps(self) -> int:
        return self.steps

    @property
    def n_rungs(self) -> int:
        return 2 if self.method in ("resghmc", "noswaps") else 1

    @property
    def swaps(self) -> bool:
        return self.method == "resghmc"

    @property
    def temperatures(self) -> tuple[float, ...]:
        return (self.temperature, self.hot_temperature * self.temperature)[: self.n_rungs]

    @property
    def n_data(self) -> int:
        """What the energy is a sum over: the unlabelled images, each with a labelled one and some
        generated ones beside it.
        """
        return self.kind.n_train - self.validation - self.n_labelled

    def company(self, seed: int) -> str:
        """What jobs must have in common to train side by side: the data, by seed, and everything
        that shapes a batch.
        """
        shared = (
            "data",
            "n_labelled",
            "steps",
            "batch_size",
            "n_generators",
            "latents",
            "validation",
            "test_subset",
        )
        rest = ("precision", "deterministic", "checkpoint_every")
        return " ".join(str(getattr(self, name)) for name in (*shared, *rest)) + f" seed {seed}"

    @property
    def most_replicas(self) -> int:
        return 16

    @property
    def swap_start(self) -> int:
        return max(1, self.warm_start)  # not before there is a variance

    @property
    def test_size(self) -> int:
        held_out = self.validation or self.kind.n_test
        return min(held_out, self.test_subset or held_out)

    @property
    def picture_note(self) -> str:
        shown = min(self.n_generators, 10)
        of = f"{shown} of {self.n_generators}" if shown < self.n_generators else f"{shown}"
        return f"Images by the generators on rung 0 at the end, a row for each of {of} generators."

    # Parts of a run

    def decay(self, step: int) -> float:
        falling = max(self.lr_floor, math.exp(-step / self.lr_time))
        return falling if step < self.warm_start else falling * self.sampling_lr

    def ladder(self) -> Ladder:
        lr = from_sgd(n_data=self.n_data, lr=self.lr_of_mean).lr
        return Ladder(self.temperatures, (lr, self.hot_lr * lr)[: self.n_rungs], decay=self.decay)

    def sampler(self) -> Sampler:
        sampler = SGHMC(from_sgd(n_data=1, lr=1.0, momentum=self.momentum).friction)
        return (
            AdamStart(sampler, self.warm_start, n_data=self.n_data) if self.warm_start else sampler
        )

    def energy(self) -> PosteriorEnergy:
        prior = GaussianPrior(self.prior_precision) if self.prior_precision else None
        losses = supervised_losses if self.method == "supervised" else gan_losses
        return PosteriorEnergy.of(losses, n_data=self.n_data, prior=prior)

    def model(self) -> nn.Module:
        kind = self.kind
        return BayesianGAN(
            kind.n_classes,
            0 if self.method == "supervised" else self.n_generators,
            size=kind.size,
            channels=kind.channels,
            width=self.width,
        )

    def run(self, seed: int, device: torch.device, energy: PosteriorEnergy) -> ModuleExchange:
        """The run of one seed. `energy` is `self.energy()`, or the equal one of the job beside it,
        which compiles once then.
        """
        run = ModuleExchange(
            ModuleEnsemble(
                self.model,
                energy,
                self.sampler(),
                initial="independent",
                shared=self.shared,
                replacement=True,  # labelled images and latents are; of the unlabelled ones a batch is a thousandth
                device=device,
                autocast=Place.of(device, self.precision).autocast,
                channels_last=True,
                mesh=self.mesh(device),
            ),
            self.ladder(),
            noise=PairedVariance(self.smoothing) if self.n_rungs > 1 else None,
            correction_factor=self.correction_factor,
            pairing=None if self.swaps else NoSwaps(),
            swap_start=self.swap_start,
            deterministic=self.deterministic,
            seed=seed,
        )
        return run

    @property
    def shared(self) -> tuple[str, ...]:
        """Which parameters all rungs have in common."""
        return ("generators.",) if self.generators == "shared" and self.n_rungs > 1 else ()

    def mesh(self, device: torch.device) -> ReplicaMesh:
        """Rungs with generators of their own may be on several processes; a batch cannot, for its
        latents are no examples.
        """
        mesh = replica_mesh(self.n_rungs, device)
        if mesh.is_spread and self.shared:
            raise ConfigError(
                f"{self.recipe} needs one process, got {mesh.process_group.size}: its rungs share their generators; start it without "
                f"torchrun, or add --set generators=own"
            )
        if mesh.shares_examples:
            raise ConfigError(
                f"{self.recipe} can use at most {self.n_rungs} process(es), one for each rung, got {mesh.process_group.size}; start fewer"
            )
        return mesh

    def place(self, device: str) -> Place:
        return Place.of(
            resolve_device("cpu" if device == "auto" and self.data == "digits" else device),
            self.precision,
        )

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
        from torchrex.experiments.gan_runs import train_gans

        return train_gans(jobs, device=device, resume=resume, budget=budget, progress=progress)
