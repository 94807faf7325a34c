"""Semi-supervised Bayesian GANs: several generators, and a discriminator that knows the classes.

A replica has one discriminator with one class more than the data, and its generators (section 5.3):

    discriminator   mean -log p(y | x) of labelled images, mean -log(1 - p_fake) of unlabelled ones,
                    mean -log p_fake of generated ones
    each generator  mean -log(1 - p_fake) of what it generates, for the discriminator as it is

A batch is (labelled images, labels, unlabelled images, latent). It has equally many labelled and
unlabelled images, and the number of generated images is a multiple of theirs. The energy is what
the discriminator descends, as a sum over the data. Given the generators, the discriminator moves in
this potential, and swaps compare it. Example i of a batch has the i-th image of each kind and some
generated images, drawn independently. The variance over examples is that of the sum, except for two
effects. BatchNorm in training mode makes examples depend on each other, which lowers it
(benchmarks/batchnorm_variance.py). All generators have the same share of every batch, which raises
it a little where they differ.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.network import evaluating
from torchrex.targets import frozen, without_tracking
from torchrex.vision.augment import Normalise

LATENT = 100
SMALLEST = 2  # pixels along the side where both networks change between vectors and images
WEIGHT_STD = 0.02
KERNEL, STRIDE, PADDING = 5, 2, 2
MARGIN = 2  # pixels between the images of a grid
SMALLEST_SHOWN = 32  # pixels along a side; smaller images are enlarged

GanBatch = tuple[Tensor, Tensor, Tensor, Tensor]


class Discriminator(nn.Module):
    """Strided convolutions down to 2 x 2, then `n_classes` + 1 logits; the last is "fake"."""

    def __init__(
        self, n_classes: int, *, size: int = 32, channels: int = 3, width: int = 64
    ) -> None:
        super().__init__()
        n_layers = _layers(size)
        widths = [channels, *(width * 2**k for k in range(n_layers))]
        layers: list[nn.Module] = []
        for k, (into, out) in enumerate(itertools.pairwise(widths)):
            normalised = 0 < k < 4  # not the first, which would hide the range of the pixels
            layers.append(nn.Conv2d(into, out, KERNEL, STRIDE, PADDING, bias=not normalised))
            layers += [nn.BatchNorm2d(out)] if normalised else []
            layers.append(nn.LeakyReLU(0.2))
        self.features = nn.Sequential(*layers)
        self.classes = nn.Linear(widths[-1] * SMALLEST**2, n_classes + 1)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.features(x).flatten(1))
        return logits


class Upsampling(nn.Module):
    """A transposed convolution per group: (groups, n, h, w, into) to (groups, n, 2h, 2w, out).

    Every pixel gives a matrix product for each place of the kernel. An output pixel in an even row
    takes three of those rows, one in an odd row takes two. So nothing is scattered: sums in another
    order would give other numbers on a GPU.
    """

    def __init__(self, groups: int, into: int, out: int, *, bias: bool) -> None:
        super().__init__()
        # The last axis counts kernel row, kernel column, channel.
        self.weight = nn.Parameter(torch.randn(groups, into, KERNEL * KERNEL * out) * WEIGHT_STD)
        self.bias = nn.Parameter(torch.zeros(groups, out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        groups, n, height, width, into = x.shape
        products = torch.bmm(x.reshape(groups, n * height * width, into), self.weight)
        products = products.view(groups, n, height, width, KERNEL, KERNEL, -1)
        rows = _interleaved(products, across=2)  # (groups, n, 2h, w, 5, out)
        images = _interleaved(rows, across=3)
        return images if self.bias is None else images + self.bias[:, None, None, None]


def _interleaved(products: Tensor, *, across: int) -> Tensor:
    """Twice as many pixels along `across`; axis 4 is the place in the kernel and is summed.

    Output 2p takes places 0, 2, 4 of the pixels p + 1, p, p - 1; output 2p + 1 takes places 1, 3 of
    the pixels p + 1, p.
    """
    places = products.unbind(4)
    n = products.shape[across]
    zero = torch.zeros_like(places[0].narrow(across, 0, 1))

    def of_next(place: int) -> Tensor:
        return torch.cat([places[place].narrow(across, 1, n - 1), zero], across)

    of_previous = torch.cat([zero, places[4].narrow(across, 0, n - 1)], across)
    even = of_next(0) + places[2] + of_previous
    odd = of_next(1) + places[3]
    return torch.stack([even, odd], across + 1).flatten(across, across + 1)


class Generators(nn.Module):
    """Latents (n, generators, latent) to images (n, generators, channels, size, size) in [-1, 1].

    All generators are one network, with as many kernels as one generator has: transposed
    convolutions are batched matrix products, and BatchNorm over all channels of all generators is
    that of each alone. `broken` is the first generator whose output was not finite, or -1.
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
        self.norms = nn.ModuleList(nn.BatchNorm1d(n_generators * each) for each in widths[:-1])
        self.register_buffer("broken", torch.tensor(-1))

    def forward(self, z: Tensor) -> Tensor:
        x = torch.bmm(z.transpose(0, 1), self.first)
        x = x.view(self.n_generators, len(z), SMALLEST, SMALLEST, -1)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            # (n h w, generators, channels): each generator has statistics of its own.
            pixels = x.flatten(1, 3).transpose(0, 1)
            active = F.relu(norm(pixels.flatten(1))).view_as(pixels)
            x = layer(active.transpose(0, 1).reshape(x.shape))
        images = x.tanh().permute(1, 0, 4, 2, 3)
        self._remember_broken(images)
        return images

    def first_broken(self) -> int:
        """The generator that was not finite first, by output or weights; -1 if none or all."""
        if int(self.broken) >= 0:
            return int(self.broken)
        layers = (parameter for layer in self.layers for parameter in layer.parameters())
        bad = [~weight.detach().isfinite().flatten(1).all(1) for weight in (self.first, *layers)]
        broken = torch.stack(bad).any(0).tolist()
        return broken.index(True) if any(broken) and not all(broken) else -1

    @torch.no_grad()
    def _remember_broken(self, images: Tensor) -> None:
        """Keep the first one: afterwards the discriminator spreads it to all generators."""
        bad = ~images.isfinite().all(-1).all(-1).all(-1).all(0)
        found = torch.where(bad.any(), bad.int().argmax(), self.broken)
        self.broken.copy_(torch.where(self.broken < 0, found, self.broken))


class BayesianGAN(nn.Module):
    """One replica: a discriminator and its generators, or with `n_generators=0` no generators.

    Called on images, it gives the logits of the real classes.
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

    def nonfinite_part(self) -> str | None:
        """For the error message of a run whose energy is not finite."""
        if self.generators is None or (broken := self.generators.first_broken()) < 0:
            return None
        return f"generator {broken} of {self.generators.n_generators}"


def _layers(size: int) -> int:
    """How many halvings there are from an image to 2 x 2."""
    if size < 2 * SMALLEST or size & (size - 1):
        raise InvalidArgumentError(f"size must be a power of 2 from {2 * SMALLEST} on, got {size}")
    return int(math.log2(size // SMALLEST))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.normal_(module.weight, std=WEIGHT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# Batches and losses


def to_unit_range(channels: int) -> Normalise:
    """Bytes to pixels between -1 and 1, the range of the generators' tanh."""
    return Normalise((0.5,) * channels, (0.5,) * channels)


@dataclass(frozen=True)
class WithLabelled:
    """For `DeviceLoader((unlabelled images,), ..., augment=WithLabelled(...))`.

    It gives (labelled, labels, unlabelled, latent). Images are bytes (n, height, width, channels)
    and become (n, channels, height, width) in [-1, 1]. As many labelled images as the batch has
    unlabelled ones are drawn with replacement; latents (latents, n_generators, latent) are uniform
    in [-1, 1]. All replicas see the same batch, so that only the networks differ at a swap.
    """

    images: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    n_generators: int
    latents: int
    latent: int = LATENT

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise InvalidArgumentError(
                f"there must be a label for each labelled image, got {len(self.images)} images and "
                f"{len(self.labels)} labels"
            )

    def __call__(self, batch: Any, generator: torch.Generator) -> GanBatch:
        (unlabelled,) = batch
        n, device = len(unlabelled), unlabelled.device
        normalise = to_unit_range(unlabelled.shape[-1])
        chosen = torch.randint(len(self.labels), (n,), device=device, generator=generator)
        shape = (self.latents, self.n_generators, self.latent)
        latent = torch.rand(shape, device=device, generator=generator) * 2 - 1
        labelled = normalise(self.images.index_select(0, chosen))
        return labelled, self.labels.index_select(0, chosen), normalise(unlabelled), latent


def log_real(logits: Tensor) -> Tensor:
    """log(1 - p_fake) from the logits of all classes, of which the last is "fake"."""
    return logits[..., :-1].logsumexp(-1) - logits.logsumexp(-1)


def log_fake(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[..., -1]


def gan_terms(
    discriminator: nn.Module, batch: GanBatch, generated: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The discriminator's three losses of every example, (n,) each.

    The last is a mean over the generated images of an example. Only the real images change the
    running statistics of BatchNorm, because they normalise test images, which are real.
    """
    labelled, labels, unlabelled, _ = batch
    n, n_generated = len(labels), generated.shape[:2].numel()
    if len(unlabelled) != n or n_generated % n:
        raise TargetError(
            f"a batch must have as many unlabelled as labelled images, and latents x generators "
            f"must be a multiple; got {n}, {len(unlabelled)} and {n_generated}"
        )
    known, unknown = _full(discriminator(torch.cat([labelled, unlabelled]))).chunk(2)
    fakes = _full(without_tracking(discriminator)(generated.flatten(0, 1)))
    return (
        F.cross_entropy(known, labels, reduction="none"),
        -log_real(unknown),
        -log_fake(fakes).view(n, -1).mean(1),
    )


def gan_losses(module: nn.Module, batch: GanBatch) -> tuple[Tensor, Tensor]:
    """For `PosteriorEnergy.of(gan_losses, n_data=...)`: terms of the energy, what is descended."""
    assert isinstance(module, BayesianGAN)
    assert module.generators is not None
    generated = module.generators(batch[3])
    energy = torch.stack(gan_terms(module.discriminator, batch, generated.detach())).sum(0)
    seen = _full(frozen(module.discriminator)(generated.flatten(0, 1)))
    # A sum over generators: each is a sample by itself and has a complete potential.
    deceived = -log_real(seen).view(generated.shape[:2]).mean(0).sum()
    return energy, energy.mean() + deceived


def supervised_losses(module: nn.Module, batch: GanBatch) -> Tensor:
    """The losses of the labelled images alone, by the same discriminator on the same batches."""
    assert isinstance(module, BayesianGAN)
    return F.cross_entropy(_full(module.discriminator(batch[0])), batch[1], reduction="none")


def _full(logits: Tensor) -> Tensor:
    """Log-probabilities need more digits than autocast leaves."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits


# What the generators make


def sample_grid(generators: Generators, n_each: int, seed: int, *, most_rows: int = 10) -> Tensor:
    """(height, width, channels) bytes: `n_each` images in a row for each generator."""
    return grid_of(_generated(generators, n_each, seed).transpose(0, 1)[:most_rows])


def variety(generators: Generators, real: Tensor, seed: int, *, n_each: int = 100) -> float:
    """How much the images of one generator differ, in units of real ones; 0 if all are the same.

    It is the standard deviation over images, averaged over pixels and then over generators. `real`
    is (n, channels, height, width).
    """
    of_each = _generated(generators, n_each, seed).float().std(0).flatten(1).mean(1)
    return float(of_each.mean().cpu() / real.float().std(0).mean().cpu())


def _generated(generators: Generators, n_each: int, seed: int) -> Tensor:
    """(n_each, generators, channels, height, width) in evaluation mode, by the seed alone."""
    shape = (n_each, generators.n_generators, generators.latent)
    latent = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    with evaluating(generators):
        images: Tensor = generators(latent.to(generators.first.device))
    return images


def grid_of(images: Tensor) -> Tensor:
    """Images (rows, columns, channels, h, w) in [-1, 1] as bytes (height, width, channels)."""
    times = max(1, SMALLEST_SHOWN // images.shape[-1])
    images = images.repeat_interleave(times, -1).repeat_interleave(times, -2)
    pixels = ((images.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    framed = F.pad(pixels, (0, MARGIN, 0, MARGIN), value=255).permute(0, 3, 1, 4, 2)
    grid = framed.flatten(2, 3).flatten(0, 1)  # rows x height, columns x width, channels
    return F.pad(grid, (0, 0, MARGIN, 0, MARGIN, 0), value=255)
