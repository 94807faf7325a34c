"""Semi-supervised Bayesian GANs: several generators, and a discriminator that knows the classes.

A replica has one discriminator with one class more than the data, and its generators (section 5.3):

    discriminator   mean -log p(y | x) of labelled images, mean -log(1 - p_fake) of unlabelled ones,
                    mean -log p_fake of generated ones
    each generator  mean -log(1 - p_fake) of what it generates, for the discriminator as it is

A batch has equally many labelled and unlabelled images, and the number of generated images is a
multiple of theirs. The energy is what the discriminator descends, as a sum over the data. Given the
generators, the discriminator moves in this potential, and swaps compare it. Example i of a batch
has the i-th image of each kind and some generated images, drawn independently. The variance over
examples is that of the sum, except for two effects. BatchNorm in training mode makes examples
depend on each other, which lowers it (benchmarks/batchnorm_variance.py). All generators have the
same share of every batch, which raises it a little where they differ.

`MatchingDiscriminator` and `Matching` in `feature_matching.py` are a stronger network and another
loss of the generators. Two losses without generators are the controls: `supervised_losses`
of the labelled images alone, and `Consistency`, which uses the unlabelled images too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.network import evaluating
from torchrex.targets import frozen, without_tracking
from torchrex.vision.augment import Augment, Normalise

LATENT = 100
SMALLEST = 2  # pixels along the side where both networks change between vectors and images
WEIGHT_STD = 0.02
KERNEL, STRIDE, PADDING = 5, 2, 2
FEW = 4  # channels
ALIGNED = 8  # columns, for the matrix kernels of a GPU
ALL_BROKEN = -2
MARGIN = 2  # pixels between the images of a grid
SMALLEST_SHOWN = 32  # pixels along a side; smaller images are enlarged

Kept = tuple[Tensor, ...]
Dropout = tuple[tuple[float, tuple[int, int, int]], ...]


class GanBatch(NamedTuple):
    """Images are (n, channels, height, width) in [-1, 1]."""

    labelled: Tensor
    labels: Tensor
    unlabelled: Tensor
    latent: Tensor  # (latents, n_generators, latent)
    again: Tensor | None = None  # the unlabelled images, augmented a second time
    # What each dropout of a discriminator keeps, for the images above and then the generated ones:
    # all replicas drop the same, so that only the networks differ at a swap.
    kept: Kept = ()


class Discriminator(nn.Module):
    """Strided convolutions down to 2 x 2, then `n_classes` + 1 logits; the last is "fake".

    With `apart`, BatchNorm in training mode normalises each part of a batch by itself: labelled,
    unlabelled and every generator's images, as in the code of the paper's authors. Otherwise it
    normalises all real images together and all generated ones.
    """

    def __init__(
        self,
        n_classes: int,
        *,
        size: int = 32,
        channels: int = 3,
        width: int = 64,
        apart: bool = False,
    ) -> None:
        super().__init__()
        self.apart = apart
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

    def forward(self, x: Tensor, *, parts: int = 1, kept: Kept = ()) -> Tensor:
        """`parts` is how many equal parts x has; `kept` is for networks with dropout."""
        apart = parts > 1 and self.apart and self.training
        for layer in self.features:
            if apart and isinstance(layer, nn.BatchNorm2d):
                x = normalised_apart(layer, x, parts)
            elif isinstance(layer, nn.Conv2d) and x.is_cuda and x.shape[1] <= FEW:
                x = convolved_as_product(x, layer.weight, layer.bias, STRIDE, PADDING)
            else:
                x = layer(x)
        logits: Tensor = self.classes(x.flatten(1))
        return logits


def convolved_as_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    """`F.conv2d` of few channels as one matrix product; cuDNN's kernels for them are slow."""
    out, _, kernel, _ = weight.shape
    x = F.pad(x.permute(0, 2, 3, 1), (0, 0, *[padding] * 4))
    below, beside = x.shape[1] - kernel + 1, x.shape[2] - kernel + 1
    # Rows, then columns: the compiler makes one kernel of up to 8 parts.
    x = torch.cat([x[:, k : k + below : stride] for k in range(kernel)], -1)
    x = torch.cat([x[:, :, k : k + beside : stride] for k in range(kernel)], -1)
    free = -x.shape[-1] % ALIGNED  # columns of zeros
    matrix = F.pad(weight.permute(0, 3, 2, 1).reshape(out, -1), (0, free))
    return F.linear(F.pad(x, (0, free)), matrix, bias).permute(0, 3, 1, 2)


def normalised_apart(norm: nn.BatchNorm2d, x: Tensor, parts: int) -> Tensor:
    """BatchNorm in training mode of each part of x by itself.

    The running statistics move as by one pass over a part with the mean statistics of all parts.
    """
    each = full(x.view(parts, -1, *x.shape[1:]))
    variance, mean = torch.var_mean(each, (1, 3, 4), correction=0, keepdim=True)
    scale, shift = (p[:, None, None] for p in (norm.weight, norm.bias))
    y = (each - mean) * torch.rsqrt(variance + norm.eps) * scale + shift
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    n = each[0, :, 0].numel()
    with torch.no_grad():
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean.flatten(1).mean(0), norm.momentum)
        norm.running_var.lerp_(variance.flatten(1).mean(0) * (n / (n - 1)), norm.momentum)
    return y.flatten(0, 1).to(x.dtype)


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
        weight: Tensor = self.weight
        columns = weight.shape[2]
        if x.is_cuda:  # matrices of an odd width take ten times as long there
            weight = F.pad(weight, (0, -columns % ALIGNED))
        products = torch.bmm(x.reshape(groups, n * height * width, into), weight)[..., :columns]
        products = products.reshape(groups, n, height, width, KERNEL, KERNEL, -1)
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
    that of each alone. `broken` is the first generator whose output was not finite, -1 for none and
    -2 for all at once.
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
        if int(self.broken) != -1:
            return max(-1, int(self.broken))
        layers = (parameter for layer in self.layers for parameter in layer.parameters())
        bad = [~weight.detach().isfinite().flatten(1).all(1) for weight in (self.first, *layers)]
        broken = torch.stack(bad).any(0).tolist()
        return broken.index(True) if any(broken) and not all(broken) else -1

    @torch.no_grad()
    def _remember_broken(self, images: Tensor) -> None:
        """Keep the first one: afterwards the discriminator spreads it to all generators. All at
        once (-2) is the discriminator's doing.
        """
        bad = ~images.isfinite().all(-1).all(-1).all(-1).all(0)
        found = torch.where(bad.any(), bad.int().argmax(), self.broken)
        found = torch.where(bad.all(), ALL_BROKEN, found)
        self.broken.copy_(torch.where(self.broken == -1, found, self.broken))


class BayesianGAN(nn.Module):
    """One replica: a discriminator and its generators, or with `n_generators=0` no generators.

    Called on images, it gives the logits of the real classes. `discriminator` replaces that of the
    paper: a module with `forward(x, *, parts=1, kept=())` that gives the logits of `n_classes` + 1
    classes. `parts` is how many kinds of images x has, one after the other; `kept` are the masks of
    `WithLabelled(dropout=...)`.
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
        discriminator: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.n_classes = n_classes
        sizes: dict[str, Any] = {"size": size, "channels": channels, "width": width}
        self.discriminator = discriminator or Discriminator(n_classes, **sizes)
        made = Generators(n_generators, **sizes, latent=latent) if n_generators else None
        self.generators = made

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

    It gives a GanBatch. Images are bytes (n, height, width, channels). As many labelled images as
    the batch has unlabelled ones are drawn with replacement; latents are uniform in [-1, 1]. All
    replicas see the same batch, so that only the networks differ at a swap.

    `augment` shifts and flips all real images, and the unlabelled ones twice: `Augment(4, True,
    None, *[(0.5,) * channels] * 2, border="reflect")`, for the pixels of generated images are
    between -1 and 1 too, and they have no border. `stronger` takes its place for labelled images
    and for the second time: the term of the unlabelled real images does not see them.
    `dropout` has a probability and the shape (height, width, channels) of what is dropped, for each
    dropout of the discriminator.
    """

    images: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    n_generators: int
    latents: int
    latent: int = LATENT
    augment: Augment | None = None
    dropout: Dropout = ()
    stronger: Augment | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise InvalidArgumentError(
                f"there must be a label for each labelled image, got {len(self.images)} images and "
                f"{len(self.labels)} labels"
            )
        half = (0.5,) * self.images.shape[-1]
        for each in (self.augment, self.stronger):
            if each is not None and (each.mean, each.std) != (half, half):
                raise InvalidArgumentError(
                    f"augment must bring real images into [-1, 1], where generated ones are: give "
                    f"mean={half} and std={half}, got {each.mean} and {each.std}"
                )
        if self.stronger is not None and self.augment is None:
            raise InvalidArgumentError("stronger=Augment(...) needs augment=Augment(...) too")

    def __call__(self, batch: Any, generator: torch.Generator) -> GanBatch:
        (unlabelled,) = batch
        n, device = len(unlabelled), unlabelled.device
        chosen = torch.randint(len(self.labels), (n,), device=device, generator=generator)
        shape = (self.latents, self.n_generators, self.latent)
        latent = torch.rand(shape, device=device, generator=generator) * 2 - 1
        labelled, labels = (each.index_select(0, chosen) for each in (self.images, self.labels))
        if self.augment is None:
            normalise = to_unit_range(unlabelled.shape[-1])
            given = GanBatch(normalise(labelled), labels, normalise(unlabelled), latent)
        else:
            images = [labelled, unlabelled, unlabelled]

            def augmented(how: Augment, *which: int) -> list[Tensor]:
                joined = torch.cat([images[k] for k in which])
                return list(how((joined, None), generator)[0].chunk(len(which)))

            if self.stronger is None:
                first, second, third = augmented(self.augment, 0, 1, 2)
            else:
                (second,) = augmented(self.augment, 1)
                first, third = augmented(self.stronger, 0, 2)
            given = GanBatch(first, labels, second, latent, third)
        n_real = n * (2 if given.again is None else 3)

        def kept(probability: float, shape: tuple[int, int, int]) -> Tensor:
            n_images = n_real + self.latents * self.n_generators
            mask = torch.empty(n_images, *shape, dtype=torch.bool, device=device)
            return mask.bernoulli_(1.0 - probability, generator=generator).permute(0, 3, 1, 2)

        return given._replace(kept=tuple(kept(*each) for each in self.dropout))


def log_real(logits: Tensor) -> Tensor:
    """log(1 - p_fake) from the logits of all classes, of which the last is "fake"."""
    return logits[..., :-1].logsumexp(-1) - logits.logsumexp(-1)


def log_fake(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[..., -1]


def energy_terms(
    labels: Tensor, known: Tensor, unknown: Tensor, fakes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The discriminator's three losses of every example, (n,) each.

    The last is a mean over the generated images of an example; `fakes` are the logits of all of
    them, (latents, n_generators, classes).
    """
    n, n_generated = len(labels), fakes.shape[:2].numel()
    if len(unknown) != n or n_generated % n:
        raise TargetError(
            f"a batch must have as many unlabelled as labelled images, and latents x generators "
            f"must be a multiple; got {n}, {len(unknown)} and {n_generated}"
        )
    return (
        F.cross_entropy(known, labels, reduction="none"),
        -log_real(unknown),
        -log_fake(fakes).reshape(n, -1).mean(1),
    )


def gan_terms(
    discriminator: nn.Module, batch: GanBatch, generated: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The three losses. Only the real images change the running statistics of BatchNorm, because
    they normalise test images, which are real.
    """
    known, unknown = _real_logits(discriminator, [batch.labelled, batch.unlabelled], batch.kept)
    fakes = _fake_logits(without_tracking(discriminator), batch, generated)
    return energy_terms(batch.labels, known, unknown, fakes)


def _real_logits(discriminator: nn.Module, images: list[Tensor], kept: Kept) -> list[Tensor]:
    """Logits of the labelled and then other images, as far as there are."""
    sizes = [len(each) for each in images]
    kept = tuple(mask[: sum(sizes)] for mask in kept)
    # Of unequal parts none is normalised apart: such a batch is refused.
    parts = len(images) if len(set(sizes)) == 1 else 1
    logits = full(discriminator(torch.cat(images), parts=parts, kept=kept))
    return list(torch.split(logits, sizes))


def _fake_logits(judge: Callable[..., Tensor], batch: GanBatch, generated: Tensor) -> Tensor:
    """(latents, n_generators, classes) from images, each generator's a part of its own."""
    latents, n_generators = generated.shape[:2]
    kept = tuple(mask[-latents * n_generators :] for mask in batch.kept)
    logits = judge(generated.transpose(0, 1).flatten(0, 1), parts=n_generators, kept=kept)
    return full(logits).view(n_generators, latents, -1).transpose(0, 1)


def gan_losses(module: nn.Module, batch: GanBatch) -> tuple[Tensor, Tensor]:
    """For `PosteriorEnergy.of(gan_losses, n_data=...)`: terms of the energy, what is descended."""
    assert isinstance(module, BayesianGAN)
    assert module.generators is not None
    generated = module.generators(batch.latent)
    energy = torch.stack(gan_terms(module.discriminator, batch, generated.detach())).sum(0)
    seen = _fake_logits(frozen(module.discriminator), batch, generated)
    # A sum over generators: each is a sample by itself and has a complete potential.
    deceived = -log_real(seen).mean(0).sum()
    return energy, energy.mean() + deceived


def supervised_losses(module: nn.Module, batch: GanBatch) -> Tensor:
    """The losses of the labelled images alone, by the same discriminator on the same batches."""
    assert isinstance(module, BayesianGAN)
    (known,) = _real_logits(module.discriminator, [batch.labelled], batch.kept)
    return F.cross_entropy(known, batch.labels, reduction="none")


@dataclass(frozen=True)
class Consistency:
    """The losses of the labelled images, and `weight` times `disagreement` on an unlabelled image
    that is augmented twice: what unlabelled images are worth without generated ones.
    """

    weight: float
    certain: float = 0.0

    def __call__(self, module: nn.Module, batch: GanBatch) -> Tensor:
        assert isinstance(module, BayesianGAN)
        images = [batch.labelled, *augmented_twice(batch)]
        labelled, one, other = _real_logits(module.discriminator, images, batch.kept)
        known = F.cross_entropy(labelled, batch.labels, reduction="none")
        return known + self.weight * disagreement(one, other, self.certain)


def augmented_twice(batch: GanBatch) -> tuple[Tensor, Tensor]:
    """The unlabelled images, once and once more."""
    if batch.again is None:
        raise TargetError(
            "consistency needs images that are augmented twice: WithLabelled(augment=...)"
        )
    return batch.unlabelled, batch.again


def disagreement(one: Tensor, other: Tensor, certain: float) -> Tensor:
    """A loss (n,) of two augmentations x and x' of an image, from the logits of all classes.

    With certain = 0 it is |p(y | x) - p(y | x')|^2, y the real classes (Laine & Aila 2017). Else it
    is -log p(y | x') for the likeliest class y of x, where p(y | x) > certain, and 0 elsewhere
    (Sohn et al. 2020). There y changes in jumps only, so backpropagation gives the gradient of this
    loss almost everywhere; at the threshold the loss itself jumps.
    """
    one, other = one[:, :-1], other[:, :-1]
    if not certain:
        return (one.softmax(1) - other.softmax(1)).square().sum(1)
    found, likeliest = one.softmax(1).max(1)
    missed = F.cross_entropy(other, likeliest, reduction="none")
    return torch.where(found > certain, missed, 0.0)


def full(logits: Tensor) -> Tensor:
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
