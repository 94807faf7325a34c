"""Crop, flip, normalisation and random erasing of images, a batch at a time.

Everything happens on the batch's device and nothing waits for the host, so it can be part of a
captured step. The random numbers of a batch are drawn first, in one call. The rest is a pure
function of images and numbers, which is compiled on a GPU. The order is that of the paper's
authors: the border of a crop is black before normalisation, and what is erased is filled after it,
with the mean colour that is not normalised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError, require_whole
from torchrex.network import compiled_or_plain

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)  # CIFAR-10's; the authors use them for CIFAR-100 too
CIFAR_STD = (0.2023, 0.1994, 0.2010)
# Rows of the random numbers; the sizes of the attempts to erase come last.
DOWN, RIGHT, FLIP, ERASE, TOP, LEFT, SIZES = range(7)


@dataclass(frozen=True)
class Erasing:
    """Random erasing (Zhong et al. 2020): with `probability`, a rectangle gets the colour `fill`.

        height = round(sqrt(area * aspect)),  width = round(sqrt(area / aspect)),

    area (a fraction of the image) and aspect uniform between their bounds. Sizes that reach a side
    of the image are drawn again.

    The authors try up to 100 times, one after the other. Here `attempts` are made at once and the
    first that fits counts. If none does, nothing is erased. At 32 x 32 with the default bounds one
    attempt is refused with probability 0.0531, all eight with 6.3e-11.
    """

    probability: float = 0.5
    area: tuple[float, float] = (0.02, 0.4)
    aspect: tuple[float, float] = (0.3, 1 / 0.3)
    fill: tuple[float, ...] = CIFAR_MEAN
    attempts: int = 8

    def __post_init__(self) -> None:
        for name, valid, rule in (
            ("probability", 0.0 <= self.probability <= 1.0, "between 0 and 1"),
            ("area", 0.0 < self.area[0] <= self.area[1] <= 1.0, "two rising fractions, 0 to 1"),
            ("aspect", 0.0 < self.aspect[0] <= self.aspect[1] < float("inf"), "two rising ratios"),
            ("attempts", self.attempts >= 1, "at least 1"),
        ):
            if not valid:
                raise InvalidArgumentError(f"{name} must be {rule}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Normalise:
    """(x / 255 - mean) / std: bytes (n, height, width, channels) to (n, channels, height, width).

    The result is channels-last in memory.
    """

    mean: tuple[float, ...] = CIFAR_MEAN
    std: tuple[float, ...] = CIFAR_STD
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.std or min(self.std) <= 0.0:
            raise InvalidArgumentError(
                f"mean and std must have one number per channel, std above 0, got {self.mean!r} "
                f"and {self.std!r}"
            )
        if not self.dtype.is_floating_point:
            raise InvalidArgumentError(f"dtype must be a floating point one, got {self.dtype}")

    def __call__(self, images: Tensor) -> Tensor:
        check_images(images, len(self.mean))
        return normalise(images, self.mean, self.std).to(self.dtype).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Augment:
    """Augmentation for `DeviceLoader(augment=...)`; by default that of the paper's authors.

    A batch is (images of bytes (n, height, width, channels), labels). The images become (n,
    channels, height, width) in `dtype`, channels-last in memory. `crop_padding` is how far a crop
    may be shifted, over a black border or one that reflects the image.

    >>> batch = torch.zeros(5, 32, 32, 3, dtype=torch.uint8), torch.arange(5)
    >>> Augment(erase=None)(batch, torch.Generator())[0].shape
    torch.Size([5, 3, 32, 32])
    """

    crop_padding: int = 4
    flip: bool = True
    erase: Erasing | None = Erasing()
    mean: tuple[float, ...] = CIFAR_MEAN
    std: tuple[float, ...] = CIFAR_STD
    dtype: torch.dtype = torch.float32
    border: Literal["black", "reflect"] = "black"

    def __post_init__(self) -> None:
        require_whole("crop_padding", self.crop_padding)
        if self.border not in ("black", "reflect"):
            raise InvalidArgumentError(f"border must be black or reflect, got {self.border!r}")
        erase = self.erase
        Normalise(self.mean, self.std, self.dtype)
        if erase is not None and not isinstance(erase, Erasing):
            raise InvalidArgumentError(f"erase must be an Erasing(...) or None, got {erase!r}")
        if erase is not None and len(erase.fill) != len(self.mean):
            raise InvalidArgumentError(
                f"the fill of erase must have {len(self.mean)} channels, got {erase.fill!r}"
            )

    def __call__(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, Any]:
        images, labels = batch
        check_images(images, len(self.mean))
        # One draw, whose size the settings decide: eager and captured steps use the same numbers.
        shape = (ERASE if self.erase is None else SIZES + 2 * self.erase.attempts, len(images))
        random = torch.rand(shape, dtype=torch.float32, device=images.device, generator=generator)
        apply = compiled_transform() if images.is_cuda else transform
        return apply(images, random, self), labels


def transform(images: Tensor, random: Tensor, settings: Augment) -> Tensor:
    """The augmented images, given uniform numbers `random` (rows as named above, n)."""
    _, height, width, _ = images.shape
    reflect = settings.border == "reflect"
    padding = settings.crop_padding
    cropped = crop_and_flip(images, random, padding, flip=settings.flip, reflect=reflect)
    x = normalise(cropped, settings.mean, settings.std)
    if settings.erase is not None:
        inside = erased(random, settings.erase, height, width)
        x = torch.where(inside[..., None], per_channel(settings.erase.fill, x.device), x)
    return x.to(settings.dtype).permute(0, 3, 1, 2)


@functools.cache
def compiled_transform() -> Callable[..., Tensor]:
    return compiled_or_plain(transform)


def integers(uniform: Tensor, n_values: int | Tensor) -> Tensor:
    """0, ..., n_values - 1 with equal chances; the product of a float32 below 1 rounds to less."""
    return (uniform * n_values).long()


def crop_and_flip(
    images: Tensor, random: Tensor, padding: int, *, flip: bool, reflect: bool = False
) -> Tensor:
    """Each image shifted by up to `padding` pixels, over zeros or its reflection in the outermost
    pixels; half are mirrored.
    """
    n, height, width, _ = images.shape
    device = images.device
    column = torch.arange(width, device=device)
    if flip:
        column = torch.where(random[FLIP, :, None] < 0.5, width - 1 - column, column)
    row = torch.arange(height, device=device)
    rows = (integers(random[DOWN], 2 * padding + 1)[:, None] - padding + row)[:, :, None]
    columns = (integers(random[RIGHT], 2 * padding + 1)[:, None] - padding + column)[:, None, :]
    known = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    if reflect:
        rows, columns = (
            size - 1 - (size - 1 - places.abs()).abs()
            for places, size in ((rows, height), (columns, width))
        )
    # Three small index tensors that broadcast: neither padded images nor an index per pixel is
    # stored.
    image = torch.arange(n, device=device)[:, None, None]
    pixels = images[image, rows.clamp(0, height - 1), columns.clamp(0, width - 1)]
    return pixels if reflect else pixels * known[..., None]


def erased(random: Tensor, erasing: Erasing, height: int, width: int) -> Tensor:
    """Pixels (n, height, width) to erase: the first attempted size that fits, where it fits."""
    (least, most), (flattest, tallest) = erasing.area, erasing.aspect
    area = (least + (most - least) * random[SIZES : SIZES + erasing.attempts]) * (height * width)
    aspect = flattest + (tallest - flattest) * random[SIZES + erasing.attempts :]
    heights, widths = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (heights < height) & (widths < width)
    h = w = torch.zeros_like(random[ERASE])
    for attempt in reversed(range(erasing.attempts)):  # the first attempt overwrites the others
        h = torch.where(fits[attempt], heights[attempt], h)
        w = torch.where(fits[attempt], widths[attempt], w)
    h = h * (random[ERASE] < erasing.probability)  # a height of 0 erases nothing
    top = integers(random[TOP], height - h + 1)[:, None]
    left = integers(random[LEFT], width - w + 1)[:, None]
    row, column = (torch.arange(size, device=random.device) for size in (height, width))
    across = (row >= top) & (row < top + h.long()[:, None])
    along = (column >= left) & (column < left + w.long()[:, None])
    return across[:, :, None] & along[:, None, :]


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes (..., channels) to float32 of mean 0 and variance 1 over the data set."""
    device = images.device
    return (images.float() / 255 - per_channel(mean, device)) / per_channel(std, device)


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
            f"images must be bytes (n, height, width, {n_channels}), got {images.dtype} of shape "
            f"{tuple(images.shape)}"
        )


def evaluation_batches(
    images: Tensor,
    labels: Tensor,
    normalise: Normalise,
    batch_size: int,
    device: torch.device | str | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """A test set in its order, normalised, on the device; the last batch may be smaller."""
    if len(images) != len(labels):
        given = f"{len(images)} images and {len(labels)} labels"
        raise InvalidArgumentError(f"there must be a label for each image, got {given}")
    require_whole("batch_size", batch_size, 1)
    device = images.device if device is None else device
    parts = [slice(start, start + batch_size) for start in range(0, len(images), batch_size)]
    return [(normalise(images[part].to(device)), labels[part].to(device)) for part in parts]
