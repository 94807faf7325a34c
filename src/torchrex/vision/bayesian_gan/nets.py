"""The networks of the Bayesian GAN: a discriminator with one class more than the data, and generators side by side.

All generators of a replica are one network of grouped convolutions: as many kernels as one generator has, whatever their number,
and BatchNorm over groups of channels is that of each generator alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from torchrex.errors import InvalidArgumentError

LATENT = 100
SMALLEST = 2  # pixels along the side where both networks turn from vectors to images
WEIGHT_STD = 0.02


class Discriminator(nn.Module):
    """Strided convolutions down to 2 x 2, then `n_classes` + 1 logits; the last says "generated"."""

    def __init__(self, n_classes: int, *, size: int = 32, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        n_layers = _layers(size)
        widths = [channels, *(width * 2**k for k in range(n_layers))]
        layers: list[nn.Module] = []
        for k in range(n_layers):
            normalised = 0 < k < 4  # not the first, which would hide the range of the pixels
            layers.append(nn.Conv2d(widths[k], widths[k + 1], 5, stride=2, padding=2, bias=not normalised))
            layers += [nn.BatchNorm2d(widths[k + 1])] if normalised else []
            layers.append(nn.LeakyReLU(0.2))
        self.features = nn.Sequential(*layers)
        self.classes = nn.Linear(widths[-1] * SMALLEST**2, n_classes + 1)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.features(x).flatten(1))
        return logits


class Generators(nn.Module):
    """`n_generators` generators: latent (n, generators, latent) to images (n, generators, channels, size, size) in [-1, 1]."""

    def __init__(self, n_generators: int, *, size: int = 32, channels: int = 3, width: int = 64, latent: int = LATENT) -> None:
        super().__init__()
        if n_generators < 1:
            raise InvalidArgumentError(f"n_generators must be at least 1, got {n_generators}")
        n_layers = _layers(size)
        self.n_generators, self.channels, self.latent = n_generators, channels, latent
        widths = [*(width * 2**k for k in reversed(range(n_layers))), channels]
        self.first = nn.Parameter(torch.empty(n_generators, latent, widths[0] * SMALLEST**2))
        layers: list[nn.Module] = [nn.BatchNorm2d(n_generators * widths[0]), nn.ReLU()]
        for k in range(n_layers):
            into, out, last = n_generators * widths[k], n_generators * widths[k + 1], k == n_layers - 1
            layers.append(nn.ConvTranspose2d(into, out, 5, stride=2, padding=2, output_padding=1, groups=n_generators, bias=last))
            layers += [nn.Tanh()] if last else [nn.BatchNorm2d(out), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.apply(_initialise)
        nn.init.normal_(self.first, std=WEIGHT_STD)

    def forward(self, z: Tensor) -> Tensor:
        n = len(z)
        x = torch.einsum("ngl,glo->ngo", z, self.first).reshape(n, -1, SMALLEST, SMALLEST)
        images: Tensor = self.layers(x)
        return images.view(n, self.n_generators, self.channels, *images.shape[2:])


class BayesianGAN(nn.Module):
    """What a replica is: a discriminator and its generators. Called on images it gives the discriminator's logits."""

    def __init__(
        self, n_classes: int, n_generators: int, *, size: int = 32, channels: int = 3, width: int = 64, latent: int = LATENT
    ) -> None:
        super().__init__()
        self.n_classes = n_classes
        self.discriminator = Discriminator(n_classes, size=size, channels=channels, width=width)
        self.generators = Generators(n_generators, size=size, channels=channels, width=width, latent=latent)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.discriminator(x)
        return logits


def _layers(size: int) -> int:
    """How many halvings lead from an image to 2 x 2."""
    if size < 2 * SMALLEST or size & (size - 1):
        raise InvalidArgumentError(f"size must be a power of 2 from {2 * SMALLEST} on, got {size}")
    return int(math.log2(size // SMALLEST))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
        nn.init.normal_(module.weight, std=WEIGHT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
