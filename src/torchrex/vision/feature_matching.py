"""The stronger semi-supervised GAN: weight norm, dropout, feature matching (Salimans et al. 2016).

The discriminator has nine convolutions and a logit for each real class; that of "fake" is 0. Weight
norm takes the place of BatchNorm, so each image is judged by itself. The energy has the same three
terms as the paper's. The loss of a generator is

    |mean of h(x) - mean of h(G(z))|, x unlabelled, averaged over the features h,

where h is what the discriminator, as it is, has before its last layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.targets import frozen
from torchrex.vision.bayesian_gan import BayesianGAN, Dropout, GanBatch, Kept, energy_terms, full

SLOPE = 0.2  # of the leaky ReLU
DROPPED = (0.2, 0.5, 0.5)  # of the pixels, and before the second and the third block
SMALLEST = 8  # pixels along a side


class WeightNorm(nn.Module):
    """Layers with weights scale * direction / |direction| for each output (Salimans & Kingma 2016).

    The scale begins where outputs vary as much as the inputs of the leaky ReLU before them.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(0.05 * torch.randn(shape))
        self.scale = nn.Parameter(torch.full(shape[:1], math.sqrt(2.0 / (1.0 + SLOPE**2))))
        self.bias = nn.Parameter(torch.zeros(shape[0]))

    @property
    def weight(self) -> Tensor:
        norm = self.direction.square().flatten(1).sum(1).sqrt()
        return self.direction * (self.scale / norm).view(-1, *[1] * (self.direction.ndim - 1))


class Linear(WeightNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Convolution(WeightNorm):
    """With the leaky ReLU that follows."""

    def __init__(self, into: int, out: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__(out, into, kernel, kernel)
        self.stride, self.padding = stride, padding

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
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


def matching_losses(module: nn.Module, batch: GanBatch) -> tuple[Tensor, Tensor]:
    """For `PosteriorEnergy.of(matching_losses, n_data=...)`: energy terms, what is descended."""
    assert isinstance(module, BayesianGAN)
    assert module.generators is not None
    judge, n = module.discriminator, len(batch.labels)
    if not isinstance(judge, MatchingDiscriminator):
        raise TargetError(
            "matching_losses needs the features of a MatchingDiscriminator; give it to BayesianGAN("
            f"discriminator=...), got {type(judge).__name__}"
        )
    generated = module.generators(batch.latent)
    shape, fakes = generated.shape[:2], generated.flatten(0, 1)
    images = torch.cat([batch.labelled, batch.unlabelled, fakes.detach()])
    features = judge.features(images, batch.kept)
    known, unknown, fake = torch.split(full(judge.logits(features)), [n, n, len(fakes)])
    terms = energy_terms(batch.labels, known, unknown, fake.view(*shape, -1))
    energy = torch.stack(terms).sum(0)
    # Dropout drops the same places of the generated images as above.
    seen = frozen(judge.features)(fakes, tuple(mask[2 * n :] for mask in batch.kept))
    wanted = full(features[n : 2 * n]).detach().mean(0)
    # A sum over generators: each is a sample by itself and has a complete potential.
    distance = (full(seen).view(*shape, -1).mean(0) - wanted).abs().mean(1).sum()
    return energy, energy.mean() + distance
