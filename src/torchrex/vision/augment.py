"""What happens to images between the data set and the network: crop, flip, normalisation and random
erasing, a batch at a time.

Everything happens on the batch's device and nothing waits for the host, so it can be part of a
captured step. The random numbers of a batch are drawn first, in one call; the rest is a pure
function of images and numbers, which is compiled on a GPU. The order is that of the paper's
authors: the border of a crop is black before normalisation, and what is erased is filled after it,
with the mean colour as it stands and not normalised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.network.compiling import compiled_or_plain

CIFAR_MEAN, CIFAR_STD = (
    (0.4914, 0.4822, 0.4465),
    (0.2023, 0.1994, 0.2010),
)  # CIFAR-10's; the authors take them for both
DOWN, RIGHT, FLIP, ERASE, TOP, LEFT, SIZES = range(
    7
)  # rows of the random numbers; sizes of attempts to erase come last


@dataclass(frozen=True)
class Erasing:
    """Random erasing (Zhong et al. 2020): with `probability`, a rectangle of the image is
    overwritten with the colour `fill`.

        height = round(sqrt(area * aspect)),  width = round(sqrt(area / aspect)),

    area (a fraction of the image) and aspect uniform between their bounds. Sizes that reach a side
    of the image are drawn again.

    The authors try up to 100 times, one after the other. Here `attempts` are made at once and the
    first that fits counts. If none does, nothing is erased: at 32 x 32 with the default bounds one
    attempt is refused with probability 0.0531, all eight with 6.3e-11, which is less than a
    thousandth of an image in 500 epochs of 50,000.
    """

    probability: float = 0.5
    area: tuple[float, float] = (0.02, 0.4)
    aspect: tuple[float, float] = (0.3, 1 / 0.3)
    fill: tuple[float, ...] = CIFAR_MEAN
    attempts: int = 8

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise InvalidArgumentError(
                f"probability must lie between 0 and 1, got {self.probability!r}"
            )
        if not 0.0 < self.area[0] <= self.area[1] <= 1.0:
            raise InvalidArgumentError(
                f"area must be two rising fractions of the image, above 0 and up to 1, got {self.area!r}"
            )
        if not 0.0 < self.aspect[0] <= self.aspect[1] < float("inf"):
            raise InvalidArgumentError(
                f"aspect must be two rising ratios above 0, got {self.aspect!r}"
            )
        if self.attempts < 1:
            raise InvalidArgumentError(f"attempts must be at least 1, got {self.attempts!r}")


@dataclass(frozen=True)
class Normalise:
    """(x / 255 - mean) / std: bytes (n, height, width, channels) to (n, channels, height, width),
    channels last in memory.
    """

    mean: tuple[float, ...] = CIFAR_MEAN
    std: tuple[float, ...] = CIFAR_STD
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.std or min(self.std) <= 0.0:
            raise InvalidArgumentError(
                f"mean and std must have one number per channel, those of std above 0, got mean={self.mean!r}, std={self.std!r}"
            )
        if not self.dtype.is_floating_point:
            raise InvalidArgumentError(f"dtype must be a floating point one, got {self.dtype}")

    def __call__(self, images: Tensor) -> Tensor:
        check_images(images, len(self.mean))
        return normalise(images, self.mean, self.std).to(self.dtype).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Augment:
    """Augmentation for `DeviceLoader(augment=...)`; by default that of the paper's authors for both
    CIFARs.

    A batch is (images of bytes (n, height, width, channels), labels); it becomes (images (n,
    channels, height, width) in `dtype`, channels last in memory, labels). `crop_padding` is how far
    a crop may be shifted, over a black border.

    >>> Augment(erase=None)((torch.zeros(5, 32, 32, 3, dtype=torch.uint8), torch.arange(5)), torch.Generator())[0].shape
    torch.Size([5, 3, 32, 32])
    """

    crop_padding: int = 4
    flip: bool = True
    erase: Erasing | None = Erasing()
    mean: tuple[float, ...] = CIFAR_MEAN
    std: tuple[float, ...] = CIFAR_STD
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if (
            isinstance(self.crop_padding, bool)
            or not isinstance(self.crop_padding, int)
            or self.crop_padding < 0
        ):
            raise InvalidArgumentError(
                f"crop_padding must be a whole number of pixels from 0 on, got {self.crop_padding!r}"
            )
        Normalise(self.mean, self.std, self.dtype)
        if self.erase is not None and not isinstance(self.erase, Erasing):
            raise InvalidArgumentError(
                f"erase must be an Erasing(...), or None for no erasing, got {self.erase!r}"
            )
        if self.erase is not None and len(self.erase.fill) != len(self.mean):
            raise InvalidArgumentError(
                f"the fill of erase must have {len(self.mean)} channels, got fill={self.erase.fill!r}"
            )

    def __call__(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
        images, labels = batch
        check_images(images, len(self.mean))
        # One draw of a size that the settings decide: the same place in the stream for every batch,
        # eager or captured.
        n_rows = ERASE if self.erase is None else SIZES + 2 * self.erase.attempts
        random = torch.rand(
            (n_rows, len(images)), dtype=torch.float32, device=images.device, generator=generator
        )
        work = compiled_transform() if images.is_cuda else transform
        return work(images, random, self), labels


def transform(images: Tensor, random: Tensor, settings: Augment) -> Tensor:
    """The augmented images, given uniform numbers `random` (rows as named above, n)."""
    _, height, width, _ = images.shape
    cropped = crop_and_flip(images, random, settings.crop_padding, flip=settings.flip)
    x = normalise(cropped, settings.mean, settings.std)
    if settings.erase is not None:
        inside = boxes(random, settings.erase, height, width).cover(height, width)
        x = torch.where(inside[..., None], per_channel(settings.erase.fill, x.device), x)
    return x.to(settings.dtype).permute(0, 3, 1, 2)


@functools.cache
def compiled_transform() -> Callable[..., Tensor]:
    return compiled_or_plain(transform)


def integers(uniform: Tensor, n_values: int | Tensor) -> Tensor:
    """0, ..., n_values - 1 with equal chances. Never n_values itself: the product of a float32
    below 1 rounds to less.
    """
    return (uniform * n_values).long()


def crop_and_flip(images: Tensor, random: Tensor, padding: int, *, flip: bool) -> Tensor:
    """Each image shifted by up to `padding` pixels over a border of zeros and, half of them,
    mirrored.
    """
    n, height, width, _ = images.shape
    device = images.device
    column = torch.arange(width, device=device)
    if flip:
        column = torch.where(random[FLIP, :, None] < 0.5, width - 1 - column, column)
    rows = (
        integers(random[DOWN], 2 * padding + 1)[:, None]
        - padding
        + torch.arange(height, device=device)
    )
    columns = integers(random[RIGHT], 2 * padding + 1)[:, None] - padding + column
    known = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
        :, None, :
    ]
    # Three small index tensors that broadcast: neither the padded images nor an index per pixel is
    # ever stored.
    image = torch.arange(n, device=device)[:, None, None]
    pixels = images[
        image, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]
    ]
    return pixels * known[..., None]


class Boxes(NamedTuple):
    """A rectangle of each image; one of no height if nothing is erased."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor

    def cover(self, height: int, width: int) -> Tensor:
        """Which pixels (n, height, width) of the images lie in them."""
        row = torch.arange(height, device=self.top.device)
        column = torch.arange(width, device=self.top.device)
        across = (row >= self.top[:, None]) & (row < (self.top + self.height)[:, None])
        along = (column >= self.left[:, None]) & (column < (self.left + self.width)[:, None])
        return across[:, :, None] & along[:, None, :]


def boxes(random: Tensor, erasing: Erasing, height: int, width: int) -> Boxes:
    """What is to be erased: of the sizes attempted the first that fits, at a place where it does."""
    (least, most), (flattest, tallest) = erasing.area, erasing.aspect
    area = (least + (most - least) * random[SIZES : SIZES + erasing.attempts]) * (height * width)
    aspect = flattest + (tallest - flattest) * random[SIZES + erasing.attempts :]
    heights, widths = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (heights < height) & (widths < width)
    h = w = torch.zeros_like(random[ERASE])
    for attempt in reversed(
        range(erasing.attempts)
    ):  # the first is looked at last, and so has the last word
        h = torch.where(fits[attempt], heights[attempt], h)
        w = torch.where(fits[attempt], widths[attempt], w)
    h = h * (random[ERASE] < erasing.probability)
    return Boxes(
        integers(random[TOP], height - h + 1),
        integers(random[LEFT], width - w + 1),
        h.long(),
        w.long(),
    )


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes (..., channels) to float32 of mean 0 and variance 1 over the data set."""
    return (images.float() / 255 - per_channel(mean, images.device)) / per_channel(
        std, images.device
    )


def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """`values` as a tensor, without the copy from the host that a captured step may not make."""
    channel = torch.arange(len(values), device=device)
    constants = torch.zeros(len(values), dtype=torch.float32, device=device)
    for k, value in enumerate(values):
        constants = constants + value * (channel == k).float()
    return constants


def check_images(images: Tensor, n_channels: int) -> None:
    if images.ndim != 4 or images.dtype != torch.uint8 or images.shape[3] != n_channels:
        raise InvalidArgumentError(
            f"images must be bytes (n, height, width, {n_channels}), got {images.dtype} of shape {tuple(images.shape)}"
        )


def evaluation_batches(
    images: Tensor,
    labels: Tensor,
    normalise: Normalise,
    batch_size: int,
    device: torch.device | str | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """A whole test set in its order, normalised, on the device; the last batch may be smaller."""
    if len(images) != len(labels):
        raise InvalidArgumentError(
            f"there must be a label for each image, got {len(images)} images and {len(labels)} labels"
        )
    if batch_size < 1:
        raise InvalidArgumentError(f"batch_size must be at least 1, got {batch_size!r}")
    device = images.device if device is None else device
    parts = [slice(start, start + batch_size) for start in range(0, len(images), batch_size)]
    return [(normalise(images[part].to(device)), labels[part].to(device)) for part in parts]
