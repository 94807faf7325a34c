"""The stronger semi-supervised GAN: dropout and feature matching as in Salimans et al. 2016.

The discriminator has their nine convolutions and a logit for each real class; that of "fake" is 0.
Standardised weights (Qiao et al. 2019) take the place of BatchNorm, so each image is judged by
itself. Theirs have weight norm.

The energy has the same three terms as the paper's, the two that tell real images from generated
ones with the weight `judging`, and `consistency` times the disagreement on an unlabelled image that
is augmented twice (`bayesian_gan.disagreement`).

The loss of a generator is

    |mean of h(x) - mean of h(G(z))|, x unlabelled, averaged over the features h,

where h is what the discriminator, as it is, has before its last layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.targets import frozen
from torchrex.vision.bayesian_gan import (
    FEW,
    BayesianGAN,
    Dropout,
    GanBatch,
    Kept,
    augmented_twice,
    convolved_as_product,
    disagreement,
    energy_terms,
    full,
)

SLOPE = 0.2  # of the leaky ReLU
DROPPED = (0.2, 0.5, 0.5)  # of the pixels, and before the second and the third block
SMALLEST = 8  # pixels along a side


class Standardised(nn.Module):
    """Layers whose weights have mean 0 and norm `scale` for each output, whatever `free` is.

    Mean 0: what all inputs have in common, as they do after a leaky ReLU, does not reach the
    outputs. At first the scale is such that each leaky ReLU lets through as much variance as the
    one before it.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.free = nn.Parameter(0.05 * torch.randn(shape))
        self.scale = nn.Parameter(torch.full(shape[:1], math.sqrt(2.0 / (1.0 + SLOPE**2))))
        self.bias = nn.Parameter(torch.zeros(shape[0]))

    @property
    def weight(self) -> Tensor:
        free = self.free.flatten(1)
        centred = free - free.mean(1, keepdim=True)
        norm = centred.square().sum(1, keepdim=True).sqrt()
        return (centred * (self.scale[:, None] / norm)).view_as(self.free)


class Linear(Standardised):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Convolution(Standardised):
    """With the leaky ReLU that follows."""

    def __init__(self, into: int, out: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__(out, into, kernel, kernel)
        self.stride, self.padding = stride, padding

    def forward(self, x: Tensor) -> Tensor:
        form = convolved_as_product if x.is_cuda and x.shape[1] <= FEW else F.conv2d
        y = form(x, self.weight, self.bias, self.stride, self.padding)
        return F.leaky_relu(y, SLOPE)


class Features(nn.Module):
    """Images to (n, 2 width): three blocks of three convolutions, then the mean over pixels."""

    def __init__(self, *, size: int, channels: int, width: int) -> None:
        super().__init__()
        wide, edge = 2 * width, 0 if size > SMALLEST else 1
        blocks = (
            ((channels, width, 3, 1, 1), (width, width, 3, 1, 1), (width, width, 3, 2, 1)),
            ((width, wide, 3, 1, 1), (wide, wide, 3, 1, 1), (wide, wide, 3, 2, 1)),
            ((wide, wide, 3, 1, edge), (wide, wide, 1, 1, 0), (wide, wide, 1, 1, 0)),
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Convolution(*layer) for layer in block)) for block in blocks
        )

    def forward(self, x: Tensor, kept: Kept = ()) -> Tensor:
        for k, (block, probability) in enumerate(zip(self.blocks, DROPPED, strict=True)):
            if kept:
                x = torch.where(kept[k], x * (1.0 / (1.0 - probability)), 0.0)
            x = block(x)
        return x.mean((2, 3))


class MatchingDiscriminator(nn.Module):
    """`n_classes` + 1 logits, of which the last, "fake", is 0. What dropout keeps comes from the
    batch; without it nothing is dropped.
    """

    def __init__(
        self, n_classes: int, *, size: int = 32, channels: int = 3, width: int = 96
    ) -> None:
        super().__init__()
        if size < SMALLEST or size % 4:
            raise InvalidArgumentError(
                f"size must be a multiple of 4 from {SMALLEST} on, got {size}"
            )
        self.features = Features(size=size, channels=channels, width=width)
        self.classes = Linear(n_classes, 2 * width)

    @staticmethod
    def dropout(*, size: int = 32, channels: int = 3, width: int = 96) -> Dropout:
        """For `WithLabelled(dropout=...)`."""
        shapes = (
            (size, size, channels),
            (size // 2, size // 2, width),
            (size // 4, size // 4, 2 * width),
        )
        return tuple(zip(DROPPED, shapes, strict=True))

    def forward(self, x: Tensor, *, parts: int = 1, kept: Kept = ()) -> Tensor:
        return self.logits(self.features(x, kept))

    def logits(self, features: Tensor) -> Tensor:
        return F.pad(self.classes(features), (0, 1))


@dataclass(frozen=True)
class Matching:
    """For `PosteriorEnergy.of(Matching(), n_data=...)`: energy terms, what is descended."""

    consistency: float = 0.0  # weight of the disagreement; 0 needs no second augmentation
    certain: float = 0.0  # of `disagreement`
    judging: float = 1.0  # weight of the two terms that tell real images from generated ones

    def __call__(self, module: nn.Module, batch: GanBatch) -> tuple[Tensor, Tensor]:
        assert isinstance(module, BayesianGAN)
        assert module.generators is not None
        judge, n = module.discriminator, len(batch.labels)
        if not isinstance(judge, MatchingDiscriminator):
            raise TargetError(
                "Matching needs the features of a MatchingDiscriminator; give it to BayesianGAN("
                f"discriminator=...), got {type(judge).__name__}"
            )
        generated = module.generators(batch.latent)
        shape, fakes = generated.shape[:2], generated.flatten(0, 1)
        unlabelled = augmented_twice(batch) if self.consistency else (batch.unlabelled,)
        real = [batch.labelled, *unlabelled]
        of_real = tuple(mask[: n * len(real)] for mask in batch.kept)
        of_fakes = tuple(mask[-len(fakes) :] for mask in batch.kept)
        kept = tuple(torch.cat(both) for both in zip(of_real, of_fakes, strict=True))
        features = judge.features(torch.cat([*real, fakes.detach()]), kept)
        logits = full(judge.logits(features))
        known, unknown, *again, fake = torch.split(logits, [n] * len(real) + [len(fakes)])
        classes, *real_or_not = energy_terms(batch.labels, known, unknown, fake.view(*shape, -1))
        energy = classes + self.judging * sum(real_or_not)
        for each in again:
            energy = energy + self.consistency * disagreement(unknown, each, self.certain)
        # Dropout drops the same places of the generated images as above.
        seen = frozen(judge.features)(fakes, of_fakes)
        wanted = full(features[n : 2 * n]).detach().mean(0)
        # A sum over generators: each is a sample by itself and has a complete potential.
        distance = (full(seen).view(*shape, -1).mean(0) - wanted).abs().mean(1).sum()
        return energy, energy.mean() + distance
