"""What the generators make: as a picture with a row for each of them, and how much it varies."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrex.network.work import evaluating
from torchrex.vision.bayesian_gan.nets import Generators

MARGIN = 2  # pixels between images
SMALLEST_SHOWN = 32  # pixels along a side; smaller images are enlarged


def sample_grid(generators: Generators, n_each: int, seed: int, *, most_rows: int = 10) -> Tensor:
    """(height, width, channels) bytes: `n_each` images of each of the first generators, in
    evaluation mode, by the seed alone.
    """
    return grid_of(_generated(generators, n_each, seed).transpose(0, 1)[:most_rows])


def variety(generators: Generators, real: Tensor, seed: int, *, n_each: int = 100) -> float:
    """How much the images of one generator differ, in units of real ones (n, channels, height,
    width): 0 if it makes one only.

    The standard deviation over images, averaged over pixels and then over generators.
    """
    of_each = _generated(generators, n_each, seed).float().std(0).flatten(1).mean(1)
    return float(of_each.mean().cpu() / real.float().std(0).mean().cpu())


def _generated(generators: Generators, n_each: int, seed: int) -> Tensor:
    """(n_each, generators, channels, height, width), in evaluation mode."""
    shape = (n_each, generators.n_generators, generators.latent)
    latent = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    with evaluating(generators):
        images: Tensor = generators(latent.to(generators.first.device))
    return images


def grid_of(images: Tensor) -> Tensor:
    """Images (rows, columns, channels, height, width) in [-1, 1] on a white ground, as bytes
    (height, width, channels).
    """
    times = max(1, SMALLEST_SHOWN // images.shape[-1])
    images = images.repeat_interleave(times, -1).repeat_interleave(times, -2)
    bytes_ = (
        ((images.float().cpu() + 1) * 127.5)
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
        .permute(0, 1, 3, 4, 2)
    )
    rows, columns, height, width, channels = bytes_.shape
    canvas = torch.full(
        (rows * (height + MARGIN) + MARGIN, columns * (width + MARGIN) + MARGIN, channels),
        255,
        dtype=torch.uint8,
    )
    for row in range(rows):
        for column in range(columns):
            top, left = MARGIN + row * (height + MARGIN), MARGIN + column * (width + MARGIN)
            canvas[top : top + height, left : left + width] = bytes_[row, column]
    return canvas
