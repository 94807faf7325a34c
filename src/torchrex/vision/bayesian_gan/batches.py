"""Batches for a semi-supervised GAN: unlabelled images in the loader's order, with labelled ones
and latents drawn beside them.

All replicas see the same batch, latents included: what the swap test compares differs by the
networks alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.vision.augment import Normalise
from torchrex.vision.bayesian_gan.nets import LATENT

HALF = 0.5  # mean and standard deviation that take bytes to [-1, 1]


def to_unit_range(channels: int) -> Normalise:
    """Bytes to pixels between -1 and 1, where the generators' tanh lies."""
    return Normalise((HALF,) * channels, (HALF,) * channels)


@dataclass(frozen=True)
class WithLabelled:
    """For `DeviceLoader((unlabelled images,), ..., augment=WithLabelled(...))`: gives (labelled,
    labels, unlabelled, latent).

    Images are bytes (n, height, width, channels) and come out as (n, channels, height, width) in
    [-1, 1]. As many labelled images as the batch has unlabelled ones are drawn, with replacement;
    the latents (latents, n_generators, latent) are uniform there.
    """

    images: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    n_generators: int
    latents: int
    latent: int = LATENT

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise InvalidArgumentError(
                f"there must be a label for each labelled image, got {len(self.images)} images and {len(self.labels)} labels"
            )

    def __call__(
        self, batch: Any, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (unlabelled,) = batch
        n, device = len(unlabelled), unlabelled.device
        normalise = to_unit_range(unlabelled.shape[-1])
        chosen = torch.randint(len(self.labels), (n,), device=device, generator=generator)
        shape = (self.latents, self.n_generators, self.latent)
        latent = torch.rand(shape, device=device, generator=generator) * 2 - 1
        labelled = normalise(self.images.index_select(0, chosen))
        return labelled, self.labels.index_select(0, chosen), normalise(unlabelled), latent
