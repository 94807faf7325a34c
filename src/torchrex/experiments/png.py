"""Pictures of bytes as PNG files, without a library for it."""

from __future__ import annotations

import struct
import zlib

from torch import Tensor


def png(image: Tensor) -> bytes:
    """The file of an image of bytes (height, width, 1 or 3 channels)."""
    height, width, channels = image.shape
    pixels = image.contiguous().numpy().tobytes()
    length = width * channels
    rows = b"".join(
        b"\0" + pixels[row * length : (row + 1) * length] for row in range(height)
    )  # 0: no filter
    colour = {1: 0, 3: 2}[channels]
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    )
