"""Counter-based normal numbers: a pure function of (key, step, place), the same eagerly, compiled
and captured, on any device.

Philox2x32-10 of Salmon et al. (2011), written in plain tensor operations so that the compiler fuses
it into the move: noise costs no memory traffic and no generator state, and a resumed run needs to
know the step only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MULTIPLIER, WEYL, MASK = 0xD256D193, 0x9E3779B9, 0xFFFFFFFF


def philox(low: Tensor, high: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Two words from a counter of two words and a key of one; words are int64 tensors of values
    below 2^32, broadcast.
    """
    for _ in range(10):
        product = low * MULTIPLIER  # wraps at 2^64, and the bits are those of the unsigned product
        low, high = ((product >> 32) & MASK) ^ key ^ high, product & MASK
        key = (key + WEYL) & MASK
    return low, high


def keys_of(seeds: list[int], device: torch.device) -> Tensor:
    """Keys (n, 2) from 63-bit seeds: the key proper, and where the counter begins."""
    return torch.tensor(
        [[seed & MASK, seed >> 32] for seed in seeds], dtype=torch.int64, device=device
    )


def normals(keys: Tensor, step: Tensor, size: int) -> Tensor:
    """Standard normal numbers (len(keys), size) of one step, by Box and Muller, in float32."""
    # The sum with a loaded number also keeps the compiler from doing the 64-bit arithmetic in the
    # 32 bits of an index.
    place = (torch.arange(size, device=keys.device, dtype=torch.int64) + keys[:, 1:]) & MASK
    first, second = philox(place, step & MASK, keys[:, :1])
    uniform = (first.float() + 1.0) * 2.0**-32  # in (0, 1]
    angle = second.float() * (2.0 * math.pi * 2.0**-32)
    return (-2.0 * uniform.log()).sqrt() * angle.cos()
