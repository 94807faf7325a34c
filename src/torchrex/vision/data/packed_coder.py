"""The arithmetic of the packed form: a shard's states and words back into pictures.

A picture is coded pixel by pixel: first its green plane G, then R - G, then B - G. For each pixel a
small network of whole numbers looks at the neighbours that are known by then and gives a mixture of
three curves over the 256 values; an arithmetic coder (rANS, a 32-bit state per picture, 16-bit
words) reads the value. All pictures of a shard advance together and share one sequence of words, so
a shard is decoded as a whole. Sums kept as float32 are whole numbers below 2^24 and so exact: every
machine decodes the same bytes.

Also a program, `python packed_coder.py MODEL SHARD`, which writes the pictures' bytes to stdout. It
needs numpy alone.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Plane = Literal["G", "R", "B"]
Array = npt.NDArray[Any]
ReadPixel = Callable[
    [Plane, int, Array, Array], Array
]  # (plane, place, table index, weights) -> values of all pictures

SIDE = 32
N_CURVES = 3
N_WIDTHS = 80  # how wide a curve may be; each width has a row in the table
ROW, ROW_CENTRE = 4608, 2304  # a row of the table, in eighths of a level, and its place of zero
TOTAL = 1 << 16  # counts of one pixel's 256 values sum to this
N_FEATURES: dict[Plane, int] = {"G": 33, "R": 58, "B": 84}
# Neighbours in the plane being read (known so far: above, and to the left), and all around in a
# plane that is complete. fmt: off
KNOWN = [
    (0, -1),
    (-1, 0),
    (-1, -1),
    (-1, 1),
    (0, -2),
    (-2, 0),
    (-1, -2),
    (-1, 2),
    (-2, -1),
    (-2, 1),
    (-2, -2),
    (-2, 2),
    (0, -3),
    (-3, 0),
    (-1, -3),
    (-1, 3),
    (-2, -3),
    (-2, 3),
    (-3, -1),
    (-3, 1),
    (-3, -2),
    (-3, 2),
    (-3, -3),
    (-3, 3),
]
# fmt: on
AROUND = [(dy, dx) for dy in (-2, -1, 0, 1, 2) for dx in (-2, -1, 0, 1, 2) if (dy, dx) != (0, 0)]


MOST_BYTES = 2**31  # of one array in a file, unpacked
MOST_PICTURES = 2**20  # of one shard
UNREADABLE = (  # what reading a file that is not what it says may raise
    *(
        OSError,
        LookupError,
        ValueError,
        TypeError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        SyntaxError,
        ArithmeticError,
    ),
    *(MemoryError, zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)


class ShardError(ValueError):
    """The words of a shard do not belong to its states and this model."""


@dataclass(frozen=True)
class Layer:
    """y = floor((weight x + bias) * scale), exact because all are whole numbers and the scale is a
    power of two.
    """

    weight: Array  # (out, in) float32
    bias: Array  # (out, 1) float32
    scale: Array  # 0-dim float32

    def __call__(self, x: Array) -> Array:
        y: Array = self.weight @ x
        y += self.bias
        y *= self.scale
        return np.floor(y, out=y)


@dataclass(frozen=True)
class Model:
    layers: dict[Plane, list[Layer]]
    cumulative: Array  # (N_WIDTHS * ROW,) int32: the distribution functions, scaled to 2^16
    exponential: Array  # int32: weight of a curve by how far its logarithm lies below the largest

    @classmethod
    def load(cls, path: Path) -> Model:
        file = read_arrays(
            path,
            *(f"{plane}{kind}{k}" for plane in N_FEATURES for kind in "Wbs" for k in (1, 2, 3)),
            "T",
            "E",
        )
        layers: dict[Plane, list[Layer]] = {}
        for plane, inputs in N_FEATURES.items():
            numbers = [
                [file[f"{plane}{kind}{k}"].astype(np.float32) for kind in "Wbs"] for k in (1, 2, 3)
            ]
            for weight, bias, scale in numbers:
                if (
                    weight.shape != (len(bias), inputs)
                    or bias.shape != (len(weight),)
                    or scale.shape != ()
                ):
                    raise ValueError(f"the layers of {plane} do not fit together")
                inputs = len(weight)
            if inputs != 3 * N_CURVES:
                raise ValueError(
                    f"the layers of {plane} give {inputs} numbers instead of {3 * N_CURVES}"
                )
            layers[plane] = [Layer(weight, bias[:, None], scale) for weight, bias, scale in numbers]
        model = cls(layers, file["T"].astype(np.int32).ravel(), file["E"].astype(np.int32))
        if (
            model.cumulative.shape != (N_WIDTHS * ROW,)
            or model.exponential.ndim != 1
            or not len(model.exponential)
        ):
            raise ValueError("the tables T and E have another form")
        if model.exponential[0] < 1 or (model.exponential < 0).any():
            raise ValueError("the table E has no weight for the largest curve")
        return model

    def curves(self, plane: Plane, features: Array, base: Array) -> tuple[Array, Array]:
        """Where each curve's zero lies in the table, and its weight out of 4096; both (N_CURVES, n)
        int32.
        """
        first, second, third = self.layers[plane]
        hidden = first(features)
        hidden = second(np.clip(hidden, 0, 255, out=hidden))
        out = third(np.clip(hidden, 0, 255, out=hidden)).astype(np.int32)
        centre = np.clip(base.astype(np.int32) * 8 + out[:N_CURVES], -256, 2296)
        width = np.clip(out[N_CURVES : 2 * N_CURVES], 0, N_WIDTHS - 1)
        logs = out[2 * N_CURVES :]
        parts = self.exponential[np.minimum(logs.max(0) - logs, self.exponential.size - 1)]
        weights = (parts * 4096 // parts.sum(0)).astype(np.int32)
        weights[0] += 4096 - weights.sum(0, dtype=np.int32)  # what rounding lost
        return width * ROW + (ROW_CENTRE - 4) - centre, weights

    def count_below(self, index: Array, weights: Array, value: Array) -> Array:
        """Cumulative count of the values below `value` (1 to 255); every value has a count of at
        least one.
        """
        mixed = self.cumulative.take(index + (value << 3))
        mixed *= weights
        below = (mixed.sum(0) >> 12).astype(np.uint32)
        counts: Array = ((below * np.uint32(TOTAL - 256)) >> np.uint32(16)).astype(np.int32) + value
        return counts


def walk(model: Model, n: int, read: ReadPixel) -> tuple[Array, Array, Array]:
    """Visit all pixels of n pictures in the order of the code; gives the planes G, R - G and B - G,
    (1024, n) int16.
    """
    green, red, blue = (np.zeros((SIDE * SIDE, n), np.int16) for _ in range(3))
    own: dict[Plane, Array] = {"G": green, "R": red, "B": blue}
    for plane, values in own.items():
        features = np.zeros((N_FEATURES[plane], n), np.float32)
        for y in range(SIDE):
            for x in range(SIDE):
                base = _fill_features(features, plane, y, x, green, red, values)
                place = y * SIDE + x
                pixel = read(plane, place, *model.curves(plane, features, base))
                values[place] = pixel if plane == "G" else pixel - green[place]
    return green, red, blue


def _fill_features(
    features: Array, plane: Plane, y: int, x: int, green: Array, red: Array, own: Array
) -> Array:
    """What the network sees at one pixel of the plane `own`; gives the value it predicts a
    difference from.
    """
    here = y * SIDE + x
    features[:] = 0
    reference = _mean_of_neighbours(own, y, x, default=128 if plane == "G" else 0)
    rows, places = _inside(y, x, KNOWN)
    features[rows] = _clip(own[places] - reference)
    if plane == "G":
        features[24] = _clip(reference - 128)
        base, used = reference, 25
    else:
        rows, places = _inside(y, x, AROUND)
        features[24 + rows] = _clip(green[places] - green[here])
        features[48] = _clip(reference)
        features[49] = _clip(green[here] - 128)
        base, used = np.clip(green[here] + reference, 0, 255), 50
    if plane == "B":
        features[50 + rows] = _clip(red[places] - red[here])
        features[74] = _clip(red[here])
        features[75] = _clip(reference - red[here])
        used = 76
    edges = (y == 0, y == 1, y == 31, x == 0, x == 1, x == 30, x == 31, y >= 30)
    features[used : used + 8] = np.array([64 * edge for edge in edges], np.float32)[:, None]
    return base


def _mean_of_neighbours(plane: Array, y: int, x: int, default: int) -> Array:
    here = y * SIDE + x
    if x and y:
        mean: Array = (plane[here - 1] + plane[here - SIDE]) >> 1
        return mean
    if x or y:
        neighbour: Array = plane[here - 1] if x else plane[here - SIDE]
        return neighbour
    return np.full(plane.shape[1], default, np.int16)


def _inside(y: int, x: int, offsets: list[tuple[int, int]]) -> tuple[Array, Array]:
    """Which of the neighbours lie inside the picture, and where."""
    rows = [k for k, (dy, dx) in enumerate(offsets) if 0 <= y + dy < SIDE and 0 <= x + dx < SIDE]
    places = [(y + offsets[k][0]) * SIDE + x + offsets[k][1] for k in rows]
    return np.array(rows, np.intp), np.array(places, np.intp)


def _clip(a: Array) -> Array:
    clipped: Array = np.clip(a, -127, 127)
    return clipped


class WordReader:
    """The arithmetic decoder: a state per picture, and one sequence of words that all of them draw
    from.
    """

    def __init__(self, model: Model, states: Array, words: Array) -> None:
        self.model, self.states, self.words, self.used = model, states.astype(np.uint64), words, 0

    def __call__(self, plane: Plane, place: int, index: Array, weights: Array) -> Array:
        n = len(self.states)
        slot = (self.states & np.uint64(TOTAL - 1)).astype(np.int32)
        value, below, above = (
            np.zeros(n, np.int32),
            np.zeros(n, np.int32),
            np.full(n, TOTAL, np.int32),
        )
        for step in (
            128,
            64,
            32,
            16,
            8,
            4,
            2,
            1,
        ):  # bisection for the value whose counts hold the slot
            middle = value + step
            count = self.model.count_below(index, weights, middle)
            right = count <= slot
            value, below, above = (
                np.where(right, middle, value),
                np.where(right, count, below),
                np.where(right, above, count),
            )
        self.states >>= np.uint64(16)
        self.states *= (above - below).astype(np.uint64)
        self.states += (slot - below).astype(np.uint64)
        short = np.flatnonzero(self.states < TOTAL)
        if self.used + len(short) > len(self.words):
            raise ShardError("its words end too early")
        self.states[short] = (self.states[short] << np.uint64(16)) | self.words[
            self.used : self.used + len(short)
        ]
        self.used += len(short)
        return value.astype(np.int16)

    def check_end(self) -> None:
        """The code ends where it began: all words used, all states as the coder began with them."""
        if self.used != len(self.words) or not (self.states == TOTAL).all():
            raise ShardError("its words do not come out even")


def decode(model: Model, states: Array, words: Array) -> Array:
    """The pictures of a shard, (n, 32, 32, 3) uint8."""
    reader = WordReader(model, states, words)
    with np.errstate(
        all="ignore"
    ):  # a model that is none may overflow; the checksum of the pictures tells
        green, red, blue = walk(model, len(states), reader)
    reader.check_end()
    pictures = np.stack([(red + green).T, green.T, (blue + green).T], axis=-1)
    return pictures.astype(np.uint8).reshape(len(states), SIDE, SIDE, 3)


def read_arrays(path: Path, *names: str) -> dict[str, Array]:
    """Arrays of an npz file by name. Their headers are read first: one may promise any size, and
    numpy would make room for it.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for ever
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        for name in names:
            with file.zip.open(f"{name}.npy") as member:
                version = np.lib.format.read_magic(member)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read(member)
            size = dtype.itemsize
            for n in shape:
                size *= n
            if dtype.kind not in "iuf" or not 0 <= size <= min(
                MOST_BYTES, file.zip.getinfo(f"{name}.npy").file_size
            ):
                raise ValueError(f"{name} is {dtype} of shape {shape}")
        return {name: file[name] for name in names}


def decode_file(model: Path, shard: Path) -> Array:
    file = read_arrays(shard, "states", "words")
    states, words = file["states"], file["words"]
    if states.ndim != 1 or words.ndim != 1 or states.dtype != np.uint32 or words.dtype != np.uint16:
        raise ValueError(
            f"states are {states.dtype} of shape {states.shape}, words {words.dtype} of shape {words.shape}"
        )
    if not 0 < len(states) <= MOST_PICTURES:
        raise ValueError(f"{len(states):,} pictures in one shard")
    return decode(Model.load(model), states, words)


if __name__ == "__main__":
    sys.stdout.buffer.write(decode_file(Path(sys.argv[1]), Path(sys.argv[2])).tobytes())
