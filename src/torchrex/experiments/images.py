"""CIFAR-10 and CIFAR-100 by residual networks (section 5.2 of the paper): tables 1 and 2, figure 2.

Times are those of the paper: 500 epochs of 195 steps, which is one pass over 50,000 images at batch
size 256. With other `epochs` every schedule is stretched or compressed alike. At another batch size
an epoch has as many steps: the paper ran "the same iterations".

`icml2020/...` is like for like with the authors' code, where it differs from the paper too: the
noise keeps the initial learning rate, the prior is in the gradient but not in the swap energy,
every swap lowers F, momenta are not rescaled at a swap, the variance comes from ten energies once
an epoch, and a wide network does not swap for 20 epochs after a swap. Their threshold has the sum
of two variances where the paper has one, so their F0 of 3e5 is 1.5e5 here. `clean/...` does it
right, with the free paired variance at every step; that is about a third of the other, and so is F.

A name without a method at its end means reSGHMC; `-independent` is the same ladder without swaps,
the baseline of equal compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from torchrex.errors import ConfigError, InvalidArgumentError
from torchrex.exchange import (
    Ladder,
    NoiseEstimator,
    NoSwaps,
    PairedVariance,
    ProportionalToGap,
    RepeatedDraws,
    Smoothing,
)
from torchrex.exchange.momentum import MomentumPolicy
from torchrex.experiments.networks import (
    EVALUATION_BATCH,
    Batches,
    Difference,
    Intervals,
    Line,
    NetworkConfig,
    PaperTable,
    require_all_images,
    split_images,
)
from torchrex.network import ModuleEnsemble, ModuleExchange
from torchrex.rng import derive_seed
from torchrex.runs.config import Column, Precision, columns
from torchrex.samplers import SGHMC
from torchrex.targets import DeviceLoader, PosteriorEnergy, from_sgd
from torchrex.vision.augment import Augment, Normalise, evaluation_batches
from torchrex.vision.data import load_images, stratified_subset
from torchrex.vision.nets import NETS, build_net

Method = Literal["msgd", "sghmc", "resghmc", "independent"]
PAPER_EPOCHS, PAPER_BATCH = 500, 256
HOLD, LR_RATE = 200, 0.984  # epochs at full lr, and its factor in every later epoch
ANNEALING = 1.02  # of the temperature, in every epoch
TRACES_PER_EPOCH = 15
MANY_IMAGES = 10**6  # more than a CPU trains on in an hour


@dataclass(frozen=True)
class ImageConfig(NetworkConfig):
    """One method on one data set with one network; lr and weight decay are those of a mean loss."""

    unit: ClassVar[str] = "epoch"
    paper_length: ClassVar[int] = PAPER_EPOCHS
    averages: ClassVar = {"": "probabilities", "logits_": "logits", "single_": "last"}
    batch_settings: ClassVar[tuple[str, ...]] = (
        *("data", "net", "epochs", "batch_size", "validation", "subset", "test_subset"),
        *("data_seed", "precision", "deterministic", "checkpoint_every"),
    )

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
    correction_factor: float = 1.5e5  # F at the start; it grows as the ladder cools. Half of the
    # authors' F0, as their test has the sum of two variances (the paper's 3e5 is 150000 here); in
    # clean/ a third of that, as its variance is about a third
    factor_per_swap: float = 1.0  # F is multiplied by it at every swap
    swaps_after: float = 10.0  # epochs of the paper
    rest_after_swap: float = 0.0  # epochs of the paper
    average_after: float = 199.0  # epochs of the paper
    noise_follows_lr: bool = True  # or keeps the initial lr, as in the authors' code
    prior_in_swaps: bool = True  # or only in the gradient
    momentum_at_swap: MomentumPolicy = "rescale"  # rescale: to the law of the new rung; keep: not
    # rescaled, as in the authors' code; refresh: drawn anew
    variance: Literal["paired", "repeated"] = "paired"  # paired: per-example differences at every
    # step; repeated: 10 energies once an epoch
    smoothing: float = 0.3  # of the variance
    validation: int = 0  # so many training images are evaluated in place of the test images
    subset: int | None = None  # train on so many images only
    test_subset: int | None = None  # evaluate on so many only
    data_seed: int = 0  # of the order and the augmentation, which all seeds share
    precision: Precision = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    deterministic: bool = True  # the same bits in every process, about 3 % slower on a GPU
    checkpoint_every: int = 10  # epochs

    def check(self) -> None:
        if self.net not in NETS:
            try:
                build_net(self.net, 10)
            except InvalidArgumentError as error:
                raise ConfigError(f"setting 'net': {error}") from None
        super().check()
        most, n_data = self.kind.n_train - self.validation, self.n_data
        fine = self.subset is None or 1 <= self.subset <= most
        self.require("subset", fine, f"between 1 and {most}, or none")
        fine = 1 <= self.batch_size <= n_data
        self.require("batch_size", fine, f"between 1 and the {n_data} training images")
        fine = 0 <= self.average_after < PAPER_EPOCHS
        self.require("average_after", fine, f"at least 0 and less than {PAPER_EPOCHS}")

    # Sizes

    @property
    def temperatures(self) -> tuple[float, ...]:
        return () if self.method == "msgd" else super().temperatures

    @property
    def n_data(self) -> int:
        return self.subset or self.kind.n_train - self.validation

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.n_data // PAPER_BATCH)

    @property
    def n_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def intervals(self) -> Intervals:
        before = int(self.average_after * self.epochs / PAPER_EPOCHS)
        per_epoch = self.steps_per_epoch
        return Intervals(before * per_epoch, per_epoch, max(1, per_epoch // TRACES_PER_EPOCH))

    @property
    def most_replicas(self) -> int:  # type: ignore[override]
        return {"wrn-28-10": 4, "wrn-16-8": 8}.get(self.net, 16)

    # Parts of a run

    def in_paper_epochs(self, step: int) -> float:
        """The time of a step: that of its epoch, stretched to 500; after the end it is constant."""
        return min(PAPER_EPOCHS, (step // self.steps_per_epoch) * PAPER_EPOCHS / self.epochs)

    def steps_of(self, paper_epochs: float) -> int:
        return round(paper_epochs * self.epochs / PAPER_EPOCHS * self.steps_per_epoch)

    @property
    def swap_start(self) -> int:
        """Not before there is a variance to correct a swap test by."""
        first = self.steps_per_epoch if self.variance == "repeated" else 1
        return max(self.steps_of(self.swaps_after), first)

    @property
    def factor_follows_gap(self) -> bool:
        return True

    @property
    def swap_noise(self) -> float:
        return PAIRED if self.variance == "repeated" else 1.0

    def ladder(self) -> Ladder:
        def decay(step: int) -> float:
            return float(LR_RATE ** max(0.0, self.in_paper_epochs(step) - HOLD))

        def annealing(step: int) -> float:
            return float(ANNEALING ** -self.in_paper_epochs(step))

        def initial_lr(step: int) -> float:
            return 1.0 / decay(step)

        lr = from_sgd(n_data=self.n_data, lr=self.lr_of_mean).lr
        if self.method == "msgd":
            return Ladder.descent(lr, decay=decay)
        return Ladder(
            self.temperatures,
            (lr, self.hot_lr * lr)[: self.n_rungs],
            anneal=annealing,
            decay=decay,
            noise=None if self.noise_follows_lr else initial_lr,
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

    def run(
        self, seed: int, device: torch.device, energy: PosteriorEnergy | None = None
    ) -> ModuleExchange:
        ensemble = ModuleEnsemble(
            lambda: build_net(self.net, self.kind.n_classes),
            energy or self.energy(),
            SGHMC(from_sgd(n_data=1, lr=1.0, momentum=self.momentum).friction),
            **self.on(device),
        )
        return ModuleExchange(
            ensemble,
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

    def batches(self, seed: int, device: torch.device) -> Batches:
        """The order and the augmentation depend on `data_seed` alone, not on the runs."""
        images = load_images(self.data)
        if self.subset is None:
            require_all_images(self, len(images.train_images))
        (x, y), held_out = split_images(
            self,
            (images.train_images, images.train_labels),
            (images.test_images, images.test_labels),
            seed=self.data_seed,
        )
        if self.subset is not None:
            few = stratified_subset(y, self.subset, seed=self.data_seed)
            x, y = x[few], y[few]
        x, y = x.to(device), y.to(device)
        train, extra = (
            DeviceLoader(
                (x, y), self.batch_size, seed=derive_seed(self.data_seed, name), augment=Augment()
            )
            for name in ("training", "repeated energies")
        )
        test = evaluation_batches(*held_out, Normalise(), EVALUATION_BATCH, device)
        return Batches(train, test, extra)

    @property
    def cpu_warning(self) -> tuple[str, str] | None:
        if self.n_steps * self.batch_size <= MANY_IMAGES:
            return None
        small = ("epochs=1", "subset=512", "test_subset=200", "net=resnet8")
        return "days", " ".join(f"--set {setting}" for setting in small)

    # What reports ask

    @property
    def cell(self) -> dict[str, Any]:
        return {"family": self.family, "data": self.data, "net": self.net}

    @property
    def same_run_as(self) -> str | None:
        """SGHMC is rung 0 of the pair without swaps. At temperature 0 the families are the same."""
        if self.method == "sghmc":
            return f"{self.recipe.removesuffix('-sghmc')}-independent"
        if self.method == "msgd" and self.family == "clean":
            return self.recipe.replace("clean/", "icml2020/")
        return None

    @property
    def headline(self) -> str:
        """The authors sum logits and take the best epoch."""
        return "logits_best_accuracy" if self.family == "icml2020" else "accuracy"

    @property
    def columns(self) -> tuple[Column, ...]:
        return columns(
            *("accuracy", "logits_best_accuracy", "single_accuracy", "pooled_accuracy", "nll"),
            *("ece", "brier", "logits_accuracy", "best_accuracy"),
        )

    @property
    def paper_numbers(self) -> dict[str, tuple[float, float | None]]:
        table = {PAPER_BATCH: PAPER_TABLE1, 1024: PAPER_TABLE2}.get(self.batch_size, {})
        if (
            (self.data, self.net) not in table
            or self.method == "independent"
            or "-F" in self.recipe
        ):
            return {}
        mean, two_sd = table[self.data, self.net][METHODS.index(self.method)]
        return {self.headline: (mean / 100, two_sd / 200)}


# Recipes

METHODS: tuple[Method, ...] = ("msgd", "sghmc", "resghmc", "independent")
FAMILIES = ("icml2020", "clean")
DATA = ("cifar10", "cifar100")
FACTORS = (1e5, 2e5, 3e5, 4e5, 5e5, 1e6)  # F0 of figure 2 (c, d), as the authors count it
AUTHORS_F0 = 3e5
# What shared minibatches leave of the variance late in training (0.37 at the end); with that of F a
# swap needs the same gap.
PAIRED = 1 / 3

# (mean, 2 standard deviations over 5 seeds) in %: M-SGD, SGHMC, reSGHMC
PAPER_TABLE1: dict[tuple[str, str], tuple[tuple[float, float], ...]] = {
    ("cifar10", "resnet20"): ((94.21, 0.16), (94.22, 0.12), (94.62, 0.18)),
    ("cifar10", "resnet32"): ((95.15, 0.08), (95.18, 0.06), (95.35, 0.08)),
    ("cifar10", "resnet56"): ((96.01, 0.08), (95.95, 0.10), (96.12, 0.06)),
    ("cifar10", "wrn-16-8"): ((96.71, 0.06), (96.73, 0.08), (96.87, 0.06)),
    ("cifar10", "wrn-28-10"): ((97.33, 0.08), (97.32, 0.06), (97.42, 0.06)),
    ("cifar100", "resnet20"): ((72.45, 0.20), (72.49, 0.18), (74.14, 0.22)),
    ("cifar100", "resnet32"): ((75.01, 0.22), (75.14, 0.28), (76.55, 0.30)),
    ("cifar100", "resnet56"): ((78.96, 0.32), (79.04, 0.30), (80.14, 0.34)),
    ("cifar100", "wrn-16-8"): ((81.70, 0.26), (82.07, 0.22), (82.95, 0.30)),
    ("cifar100", "wrn-28-10"): ((83.79, 0.18), (83.76, 0.14), (84.38, 0.18)),
}
PAPER_TABLE2: dict[tuple[str, str], tuple[tuple[float, float], ...]] = {
    ("cifar10", "resnet20"): ((94.49, 0.12), (94.57, 0.14), (95.01, 0.16)),
    ("cifar100", "resnet20"): ((73.31, 0.18), (73.23, 0.20), (75.11, 0.26)),
}


def image_config(
    family: str, data: Any, net: str, method: Method, *, batch_size: int = 256, factor: float = 3e5
) -> ImageConfig:
    """The recipe of one method in one cell, such as clean/cifar100-wrn-16-8-independent."""
    variant = "" if batch_size == PAPER_BATCH else f"batch{batch_size}"
    if factor != AUTHORS_F0:
        variant = f"F{factor:.0e}".replace("e+0", "e")
    parts = (f"{family}/{data}", net, variant, "" if method == "resghmc" else method)
    name = "-".join(part for part in parts if part)
    config = ImageConfig(name, data, net, method, batch_size=batch_size)
    if family == "clean":
        return replace(config, correction_factor=factor / 2 * PAIRED)
    return replace(
        config,
        correction_factor=factor / 2,
        rest_after_swap=20.0 if net.startswith("wrn") else 0.0,
        factor_per_swap=0.7,
        noise_follows_lr=False,
        prior_in_swaps=False,
        momentum_at_swap="keep",
        variance="repeated",
    )


def _by_name(configs: Iterable[ImageConfig]) -> dict[str, ImageConfig]:
    return {config.recipe: config for config in configs}


def table1_recipes() -> dict[str, ImageConfig]:
    """Five networks, two data sets, two families, four methods."""
    cells = itertools.product(PAPER_TABLE1, FAMILIES, METHODS)
    return _by_name(image_config(family, *at, method) for at, family, method in cells)


def table2_recipes() -> dict[str, ImageConfig]:
    """ResNet-20 at batch size 1024, with as many steps as at 256."""
    cells = itertools.product(PAPER_TABLE2, FAMILIES, METHODS)
    return _by_name(
        image_config(family, *at, method, batch_size=1024) for at, family, method in cells
    )


def figure2_recipes() -> dict[str, ImageConfig]:
    """ResNet-20 with every F0, and reSGHMC of the clean family next to them for (a, b)."""
    clean = [image_config("clean", data, "resnet20", "resghmc") for data in DATA]
    every = itertools.product(DATA, FACTORS)
    return _by_name(
        image_config("icml2020", data, "resnet20", "resghmc", factor=factor)
        for data, factor in every
    ) | _by_name(clean)


def image_recipes() -> dict[str, ImageConfig]:
    return {**table1_recipes(), **table2_recipes(), **figure2_recipes()}


# Tables

MSGD, SGHMC_ALONE = Line("M-SGD", "msgd"), Line("SGHMC", "sghmc")
RESGHMC = Line("reSGHMC", "resghmc")
EXCHANGING = Line("reSGHMC, both rungs", "resghmc", "pooled_")
INDEPENDENT = Line("no swaps, both rungs", "independent", "pooled_")
TABLE1 = PaperTable(
    "Table 1: test accuracy in %, batch size 256",
    table1_recipes,
    (MSGD, SGHMC_ALONE, RESGHMC, EXCHANGING, INDEPENDENT),
    (
        Difference("both rungs minus no swaps", EXCHANGING, INDEPENDENT),
        Difference("rung 0 minus SGHMC", RESGHMC, SGHMC_ALONE),
    ),
    "What the swaps add to the same pair without swaps, and to rung 0 beyond SGHMC",
    {
        "icml2020": "as in the authors' code, which sums logits and reports the best epoch on the "
        "test images.",
        "clean": "reports the average of probabilities at the end.",
    },
    "swaps",
)
TABLE2 = replace(
    TABLE1, title="Table 2: test accuracy in %, batch size 1024", recipes=table2_recipes
)
