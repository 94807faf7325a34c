"""Recipes for tables 1 and 2 and figure 2, in two families, with the paper's numbers beside them.

`icml2020/...` is like for like with the authors' code, where it differs from the paper too: the
noise keeps the initial learning rate, the prior is in the gradient but not in the swap energy,
every swap lowers F, momenta are not rescaled at a swap, the variance comes from ten energies once
an epoch, and a wide network swaps no more for 20 epochs after a swap. Their threshold has the sum
of the two variances where the paper has one, so that their F0 of 3e5 is 1.5e5 here. `clean/...`
does it right, with the free paired variance at every step; that being about a third of the other,
so is its F.

Without a method at its end a name means reSGHMC; `-independent` is the same ladder without swaps,
the baseline of equal compute.
"""

from __future__ import annotations

from dataclasses import replace

from torchrex.experiments.images import ImageConfig, Method

METHODS: tuple[Method, ...] = ("msgd", "sghmc", "resghmc", "independent")
TABLE_NETS = ("resnet20", "resnet32", "resnet56", "wrn-16-8", "wrn-28-10")
DATA = ("cifar10", "cifar100")
FACTORS = (1e5, 2e5, 3e5, 4e5, 5e5, 1e6)  # F0 of figure 2 (c, d), as the authors count it
AUTHORS_F0 = 3e5
# What shared minibatches leave of the variance, late in training (0.37 at the end); with that of F
# a swap needs the same gap.
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


def recipe_name(family: str, data: str, net: str, method: str, variant: str = "") -> str:
    """Such as icml2020/cifar10-resnet20 or clean/cifar100-wrn-16-8-independent."""
    return "-".join(
        [
            f"{family}/{data}",
            net,
            *([variant] if variant else []),
            *([method] if method != "resghmc" else []),
        ]
    )


def cell(
    family: str,
    data: str,
    net: str,
    method: Method,
    *,
    batch_size: int = 256,
    factor: float = AUTHORS_F0,
) -> ImageConfig:
    """The config of one method in one cell."""
    variant = "" if batch_size == 256 else f"batch{batch_size}"
    if factor != AUTHORS_F0:
        variant = f"F{factor:.0e}".replace("e+0", "e")
    wide = net.startswith("wrn")
    config = ImageConfig(
        recipe_name(family, data, net, method, variant),
        data,  # type: ignore[arg-type]
        net,
        method,
        batch_size=batch_size,
        correction_factor=factor / 2 if family == "icml2020" else factor / 2 * PAIRED,
        rest_after_swap=20.0 if wide and family == "icml2020" else 0.0,
    )
    if family == "clean":
        return config
    return replace(
        config,
        factor_per_swap=0.7,
        noise_follows_lr=False,
        prior_in_swaps=False,
        momentum_at_swap="keep",
        variance="repeated",
    )


def table1_recipes() -> dict[str, ImageConfig]:
    """Five networks, two data sets, two families, four methods."""
    cells = [
        cell(family, data, net, method)
        for family in ("icml2020", "clean")
        for net in TABLE_NETS
        for data in DATA
        for method in METHODS
    ]
    return {config.recipe: config for config in cells}


def table2_recipes() -> dict[str, ImageConfig]:
    """ResNet-20 at batch size 1024, with as many steps as at 256."""
    cells = [
        cell(family, data, "resnet20", method, batch_size=1024)
        for family in ("icml2020", "clean")
        for data in DATA
        for method in METHODS
    ]
    return {config.recipe: config for config in cells}


def figure2_recipes() -> dict[str, ImageConfig]:
    """ResNet-20 with different F0. The runs of (a, b) are those of table 1."""
    cells = [
        cell("icml2020", data, "resnet20", "resghmc", factor=factor)
        for data in DATA
        for factor in FACTORS
    ]
    return {config.recipe: config for config in cells}


def image_recipes() -> dict[str, ImageConfig]:
    return {**table1_recipes(), **table2_recipes(), **figure2_recipes()}
