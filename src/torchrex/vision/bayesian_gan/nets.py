"""The networks of the Bayesian GAN: a discriminator with one class more than the data, and
generators side by side.

All generators of a replica are one network: as many kernels as one generator has, whatever their
number. Their transposed convolutions are batched matrix products, and BatchNorm over all channels
of all generators is that of each generator alone.
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

    def __init__(
        self, n_classes: int, *, size: int = 32, channels: int = 3, width: int = 64
    ) -> None:
        super().__init__()
        n_layers = _layers(size)
        widths = [channels, *(width * 2**k for k in range(n_layers))]
        layers: list[nn.Module] = []
        for k in range(n_layers):
            normalised = 0 < k < 4  # not the first, which would hide the range of the pixels
            layers.append(
                nn.Conv2d(
                    widths[k],
                    widths[k + 1],
                    KERNEL,
                    stride=STRIDE,
                    padding=PADDING,
                    bias=not normalised,
                )
            )
            layers += [nn.BatchNorm2d(widths[k + 1])] if normalised else []
            layers.append(nn.LeakyReLU(0.2))
        self.features = nn.Sequential(*layers)
        self.classes = nn.Linear(widths[-1] * SMALLEST**2, n_classes + 1)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.features(x).flatten(1))
        return logits


class Upsampling(nn.Module):
    """A transposed convolution for each of some groups, which doubles the size: (groups, n, h, w,
    into) to (..., 2h, 2w, out).

    Every pixel gives a matrix product for each place of the kernel. An output pixel in an even row
    takes three of those rows and one in an odd row two, so that nothing is scattered: sums in
    another order would make other numbers on a GPU.
    """

    def __init__(self, groups: int, into: int, out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(groups, into, KERNEL * KERNEL * out) * WEIGHT_STD
        )  # by row, column, channel
        self.bias = nn.Parameter(torch.zeros(groups, out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        groups, n, height, width, into = x.shape
        products = torch.bmm(x.reshape(groups, n * height * width, into), self.weight)
        products = products.view(groups, n, height, width, KERNEL, KERNEL, -1)
        rows = _interleaved(products, across=2, kernel=4)  # (groups, n, 2h, w, 5, out)
        images = _interleaved(rows, across=3, kernel=4)
        return images if self.bias is None else images + self.bias[:, None, None, None]


def _interleaved(products: Tensor, *, across: int, kernel: int) -> Tensor:
    """Twice as many pixels along `across`, from what each pixel gives to its neighbours by the
    places of the kernel.

    Output 2p takes places 0, 2, 4 of the pixels p + 1, p, p - 1; output 2p + 1 takes places 1, 3 of
    p + 1, p.
    """
    before = products.select(kernel, 4)
    zero = torch.zeros_like(before.narrow(across, 0, 1))

    def of_next(place: int) -> Tensor:
        return torch.cat(
            [products.select(kernel, place).narrow(across, 1, products.shape[across] - 1), zero],
            across,
        )

    of_previous = torch.cat([zero, before.narrow(across, 0, products.shape[across] - 1)], across)
    even = of_next(0) + products.select(kernel, 2) + of_previous
    odd = of_next(1) + products.select(kernel, 3)
    return torch.stack([even, odd], across + 1).flatten(across, across + 1)


class Generators(nn.Module):
    """`n_generators` generators: latent (n, generators, latent) to images (n, generators, channels,
    size, size) in [-1, 1].

    A generator that makes something that is not a number is remembered by its place in `broken`.
    """

    broken: Tensor

    def __init__(
        self,
        n_generators: int,
        *,
        size: int = 32,
        channels: int = 3,
        width: int = 64,
        latent: int = LATENT,
    ) -> None:
        super().__init__()
        if n_generators < 1:
            raise InvalidArgumentError(f"n_generators must be at least 1, got {n_generators}")
        n_layers = _layers(size)
        self.n_generators, self.channels, self.latent = n_generators, channels, latent
        widths = [*(width * 2**k for k in reversed(range(n_layers))), channels]
        self.first = nn.Parameter(
            torch.randn(n_generators, latent, SMALLEST**2 * widths[0]) * WEIGHT_STD
        )
        self.layers = nn.ModuleList(
            Upsampling(n_generators, widths[k], widths[k + 1], bias=k == n_layers - 1)
            for k in range(n_layers)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(n_generators * channels) for channels in widths[:-1]
        )
        self.register_buffer("broken", torch.tensor(-1))

    def forward(self, z: Tensor) -> Tensor:
        x = torch.bmm(z.transpose(0, 1), self.first)
        x = x.view(self.n_generators, len(z), SMALLEST, SMALLEST, -1)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            pixels = x.flatten(1, 3).transpose(
                0, 1
            )  # (n h w, generators, channels): each has statistics of its own
            x = layer(
                F.relu(norm(pixels.flatten(1))).view_as(pixels).transpose(0, 1).reshape(x.shape)
            )
        images = x.tanh().permute(1, 0, 4, 2, 3)
        self._look_at(images)
        return images

    def first_broken(self) -> int:
        """The place of the generator that broke first, or whose weights were the first to; -1 if
        none did, or all at once.
        """
        if int(self.broken) >= 0:
            return int(self.broken)
        weights = (
            self.first,
            *(parameter for layer in self.layers for parameter in layer.parameters()),
        )
        finite = (
            torch.stack([weight.detach().isfinite().flatten(1).all(1) for weight in weights])
            .all(0)
            .tolist()
        )
        return finite.index(False) if any(finite) and not all(finite) else -1

    @torch.no_grad()
    def _look_at(self, images: Tensor) -> None:
        """Remember the first generator ever found broken: afterwards the discriminator spreads it
        to all of them.
        """
        bad = ~images.isfinite().all(-1).all(-1).all(-1).all(0)
        found = torch.where(bad.any(), bad.int().argmax(), self.broken)
        self.broken.copy_(torch.where(self.broken < 0, found, self.broken))


class BayesianGAN(nn.Module):
    """What a replica is: a discriminator and its generators, or a discriminator alone with
    `n_generators=0`.

    Called on images it gives the logits of the real classes: what the image shows, if it is no
    generated one.
    """

    def __init__(
        self,
        n_classes: int,
        n_generators: int,
        *,
        size: int = 32,
        channels: int = 3,
        width: int = 64,
        latent: int = LATENT,
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
        broken = -1 if self.generators is None else self.generators.first_broken()
        return (
            None
            if broken < 0 or self.generators is None
            else f"generator {broken} of {self.generators.n_generators}"
        )


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
