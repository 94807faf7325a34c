"""Recipes for table 3 and figure 3: semi-supervised Bayesian GANs in two families, with the paper's
settings and numbers.

`gan/...` has the settings of the paper's appendix. SGHMC adds little with them: the learning rate
falls to a twentieth before it begins, and a twentieth of 4.5e-4, which is a rate for Adam, moves
its average by a point or two in 10,000 steps. `gan-tuned/...` has a steady learning rate of 2e-4
and ten times that for SGHMC, both chosen on 5,000 validation images of CIFAR-10 with 4,000 labels
(results/gan/tuning.json) and taken for all data sets, and a draw every 100 steps; all else is as in
`gan/...`.

A name is `FAMILY/DATA-LABELS`, which means reSGHMC; `-sghmc` is the cold rung alone, `-noswaps` the
same ladder without swaps (a baseline of equal compute), `-supervised` the same discriminator on the
labelled images and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torchrex.experiments.gan import GanConfig, GanMethod

GAN_FAMILIES = ("gan", "gan-tuned")
GAN_METHODS: tuple[GanMethod, ...] = ("resghmc", "sghmc", "noswaps", "supervised")
GAN_DATA = ("cifar10", "cifar100", "svhn")
N_LABELLED = (2000, 2500, 3000, 3500, 4000, 4500, 5000)


class Appendix(NamedTuple):
    """A row of the table of appendix B; learning rates are those of a mean loss."""

    data: str
    n_labelled: tuple[int, int]  # from, to
    lr: tuple[float, float]  # cold, hot
    temperature: tuple[float, float]
    correction_factor: float


APPENDIX_B = (
    Appendix("cifar10", (2000, 3500), (4.5e-4, 7.0e-4), (0.01, 1.0), 3.0e5),
    Appendix("cifar10", (4000, 5000), (4.5e-4, 7.0e-4), (0.01, 1.0), 2.0e5),
    Appendix("cifar100", (2000, 2500), (5.0e-4, 7.5e-4), (0.04, 1.0), 1.0e4),
    Appendix("cifar100", (3000, 3500), (5.0e-4, 7.5e-4), (0.02, 1.0), 2.5e4),
    Appendix("cifar100", (4000, 5000), (5.0e-4, 7.5e-4), (0.01, 1.0), 5.0e4),
    Appendix("svhn", (2000, 4000), (4.5e-3, 5.0e-3), (0.01, 1.0), 8.0e4),
    Appendix("svhn", (4500, 5000), (4.5e-3, 7.0e-3), (0.01, 1.0), 8.0e4),
)

# Accuracies in %, means over five runs: SGHMC, reSGHMC.
PAPER_TABLE3: dict[tuple[str, int], tuple[float, float]] = {
    ("cifar10", 2000): (74.72, 77.73),
    ("cifar10", 3000): (77.96, 80.85),
    ("cifar10", 4000): (79.06, 81.61),
    ("cifar10", 5000): (81.74, 84.67),
    ("cifar100", 2000): (50.76, 55.53),
    ("cifar100", 3000): (53.07, 57.09),
    ("cifar100", 4000): (57.05, 62.23),
    ("cifar100", 5000): (59.34, 64.83),
    ("svhn", 2000): (88.75, 91.59),
    ("svhn", 3000): (91.32, 94.03),
    ("svhn", 4000): (91.92, 94.25),
    ("svhn", 5000): (92.63, 94.33),
}

# Two standard deviations over five runs, in %, of these runs.
PAPER_TWO_SD: dict[tuple[str, int], tuple[float, float]] = {
    ("cifar10", 2000): (0.39, 0.31),
    ("cifar10", 3000): (0.32, 0.23),
    ("cifar10", 4000): (0.29, 0.24),
    ("cifar10", 5000): (0.36, 0.28),
    ("cifar100", 2000): (0.71, 0.64),
    ("cifar100", 3000): (0.71, 0.77),
    ("cifar100", 4000): (0.59, 0.69),
    ("cifar100", 5000): (0.64, 0.72),
    ("svhn", 2000): (0.44, 0.38),
    ("svhn", 3000): (0.41, 0.36),
    ("svhn", 4000): (0.41, 0.31),
    ("svhn", 5000): (0.46, 0.34),
}


def gan_recipe_name(data: str, n_labelled: int, method: str, family: str = "gan") -> str:
    """Such as gan/cifar10-4000 or gan-tuned/svhn-2000-supervised."""
    return f"{family}/{data}-{n_labelled}" + (f"-{method}" if method != "resghmc" else "")


def gan_cell(data: str, n_labelled: int, method: GanMethod, family: str = "gan") -> GanConfig:
    """The config of one method with that many labels."""
    row = next(
        row
        for row in APPENDIX_B
        if row.data == data and row.n_labelled[0] <= n_labelled <= row.n_labelled[1]
    )
    config = GanConfig(
        gan_recipe_name(data, n_labelled, method, family),
        data,  # type: ignore[arg-type]
        method,
        n_labelled,
        lr_of_mean=row.lr[0],
        hot_lr=row.lr[1] / row.lr[0],
        temperature=row.temperature[0],
        hot_temperature=row.temperature[1] / row.temperature[0],
        correction_factor=row.correction_factor,
    )
    return (
        config
        if family == "gan"
        else replace(config, lr_of_mean=2e-4, lr_floor=1.0, sampling_lr=10.0, average_every=100)
    )


def digits_cells() -> list[GanConfig]:
    """A small version on scikit-learn's digits, which trains on a CPU in a minute or so. Settings
    by validation images.
    """
    return [
        GanConfig(
            gan_recipe_name("digits", 100, method),
            "digits",
            method,
            100,
            steps=1_500,
            warm_start=1_300,
            average_every=50,
            batch_size=50,
            n_generators=2,
            latents=25,
            width=32,
            lr_of_mean=1e-3,
            hot_lr=1.0,
            lr_floor=1.0,  # the lr does not fall: in so few steps that costs accuracy
            temperature=0.01,
            hot_temperature=1.01,  # so near, and with so large an F, that swaps are common
            correction_factor=1_000.0,
            checkpoint_every=500,
        )
        for method in GAN_METHODS
    ]


def table3_recipes() -> dict[str, GanConfig]:
    """Twelve cells, two families, four methods each."""
    cells = [
        gan_cell(*at, method, family)
        for family in GAN_FAMILIES
        for at in PAPER_TABLE3
        for method in GAN_METHODS
    ]
    return {config.recipe: config for config in cells}


def figure3_recipes() -> dict[str, GanConfig]:
    """The same with 2500, 3500 and 4500 labels as well."""
    every = [(data, n) for data in GAN_DATA for n in N_LABELLED]
    cells = [
        gan_cell(*at, method, family)
        for family in GAN_FAMILIES
        for at in every
        for method in GAN_METHODS
    ]
    return {config.recipe: config for config in cells}


def gan_recipes() -> dict[str, GanConfig]:
    return {**{config.recipe: config for config in digits_cells()}, **figure3_recipes()}
