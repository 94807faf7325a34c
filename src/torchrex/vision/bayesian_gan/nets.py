"""The networks of the Bayesian GAN: a discriminator with one class more than the data, and generators side by side.

All generators of a replica are one network: as many kernels as one generator has, whatever their number. Their transposed
convolutions are batched matrix products, because grouped convolutions are slow on a GPU, and BatchNorm over groups of channels
is that of each generator alone.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.errors import InvalidArgumentError

LATENT = 100
SMALLEST = 2  # pixels along the side where both networks turn from vectors to images
WEIGHT_STD = 0.02
KERNEL, STRIDE, PADDING = 5, 2, 2


class Discriminator(nn.Module):
    """Strided convolutions down to 2 x 2, then `n_classes` + 1 logits; the last says "generated"."""

    def __init__(self, n_classes: int, *, size: int = 32, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        n_layers = _layers(size)
        widths = [channels, *(width * 2**k for k in range(n_layers))]
        layers: list[nn.Module] = []
        for k in range(n_layers):
            normalised = 0 < k < 4  # not the first, which would hide the range of the pixels
            layers.append(nn.Conv2d(widths[k], widths[k + 1], KERNEL, stride=STRIDE, padding=PADDING, bias=not normalised))
            layers += [nn.BatchNorm2d(widths[k + 1])] if normalised else []
            layers.append(nn.LeakyReLU(0.2))
        self.features = nn.Sequential(*layers)
        self.classes = nn.Linear(widths[-1] * SMALLEST**2, n_classes + 1)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.features(x).flatten(1))
        return logits


class Upsampling(nn.Module):
    """A transposed convolution for each of some groups of channels, which doubles the size of (n, groups, into, h, w)."""

    def __init__(self, groups: int, into: int, out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(groups, into, out * KERNEL**2) * WEIGHT_STD)
        self.bias = nn.Parameter(torch.zeros(groups, out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        n, groups, into, height, width = x.shape
        pixels = x.permute(1, 0, 3, 4, 2).reshape(groups, n * height * width, into)
        columns = torch.bmm(pixels, self.weight).view(groups * n, height * width, -1).transpose(1, 2)
        images = F.fold(columns, (2 * height, 2 * width), KERNEL, padding=PADDING, stride=STRIDE)
        images = images.view(groups, n, -1, 2 * height, 2 * width).transpose(0, 1)
        return images if self.bias is None else images + self.bias[..., None, None]


class Generators(nn.Module):
    """`n_generators` generators: latent (n, generators, latent) to images (n, generators, channels, size, size) in [-1, 1].

    A generator that makes something that is not a number is remembered by its place in `broken`.
    """

    broken: Tensor

    def __init__(self, n_generators: int, *, size: int = 32, channels: int = 3, width: int = 64, latent: int = LATENT) -> None:
        super().__init__()
        if n_generators < 1:
            raise InvalidArgumentError(f"n_generators must be at least 1, got {n_generators}")
        n_layers = _layers(size)
        self.n_generators, self.channels, self.latent = n_generators, channels, latent
        widths = [*(width * 2**k for k in reversed(range(n_layers))), channels]
        self.first = nn.Parameter(torch.randn(n_generators, latent, widths[0] * SMALLEST**2) * WEIGHT_STD)
        self.layers = nn.ModuleList(
            Upsampling(n_generators, widths[k], widths[k + 1], bias=k == n_layers - 1) for k in range(n_layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n_generators * channels) for channels in widths[:-1])
        self.register_buffer("broken", torch.tensor(-1))

    def forward(self, z: Tensor) -> Tensor:
        n = len(z)
        x = torch.einsum("ngl,glo->ngo", z, self.first).view(n, self.n_generators, -1, SMALLEST, SMALLEST)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(F.relu(norm(x.flatten(1, 2))).view_as(x))
        images = x.tanh()
        self._look_at(images)
        return images

    @torch.no_grad()
    def _look_at(self, images: Tensor) -> None:
        """Remember the first generator ever found broken: afterwards the discriminator spreads it to all of them."""
        bad = ~images.isfinite().all(-1).all(-1).all(-1).all(0)
        found = torch.where(bad.any(), bad.int().argmax(), self.broken)
        self.broken.copy_(torch.where(self.broken < 0, found, self.broken))


class BayesianGAN(nn.Module):
    """What a replica is: a discriminator and its generators, or a discriminator alone with `n_generators=0`.

    Called on images it gives the logits of the real classes: what the image shows, if it is no generated one.
    """

    def __init__(
        self, n_classes: int, n_generators: int, *, size: int = 32, channels: int = 3, width: int = 64, latent: int = LATENT
    ) -> None:
        super().__init__()
        self.n_classes = n_classes
        self.discriminator = Discriminator(n_classes, size=size, channels=channels, width=width)
        sizes = {"size": size, "channels": channels, "width": width, "latent": latent}
        self.generators = Generators(n_generators, **sizes) if n_generators else None

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.discriminator(x)
        return logits[:, :-1]

    def what_broke(self) -> str | None:
        """For the error message of a run whose energy is not finite."""
        broken = -1 if self.generators is None else int(self.generators.broken)
        return None if broken < 0 or self.generators is None else f"generator {broken} of {self.generators.n_generators}"


def _layers(size: int) -> int:
    """How many halvings lead from an image to 2 x 2."""
    if size < 2 * SMALLEST or size & (size - 1):
        raise InvalidArgumentError(f"size must be a power of 2 from {2 * SMALLEST} on, got {size}")
    return int(math.log2(size // SMALLEST))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.normal_(module.weight, std=WEIGHT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
