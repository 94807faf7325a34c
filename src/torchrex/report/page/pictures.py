"""Pictures that a run left, for the page: what the generators of a GAN make. They are in the page
itself, up to a size.

A picture comes from a run folder, where anybody may have put anything: it is a whole PNG file of
moderate size, or is not shown.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from torchrex.checkpoint import read_file
from torchrex.experiments.gan import GanConfig
from torchrex.report.runs import LoadedRun

SAMPLES = "samples.png"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
LARGEST = 2**20  # bytes of a file: a grid of 100 images of 32 x 32 pixels has a third of it
MOST_PIXELS = 2**22
MOST_TOGETHER = 2**23  # bytes of all pictures of a page; a link tells where the others are
SMALL = 400  # pixels of width up to which a picture is enlarged, by whole numbers

Picture = dict[
    str, Any
]  # "title", "note", "width" on the page, "src"; without "src" it is too much for the page


def pictures_of(run: LoadedRun) -> tuple[list[Picture], str]:
    """The pictures of a run, and what is wrong with one that is not shown, in words."""
    path, settings = run.path / SAMPLES, run.settings
    if not path.exists() and not path.is_symlink():  # a link that leads nowhere is damage
        return [], ""
    try:
        data = read_file(path, LARGEST)
        width, _ = size_of(data)
    except OSError as error:
        return [], f"{SAMPLES} is not shown: {error.strerror}"
    except ValueError as error:
        return [], f"{SAMPLES} is not shown: {error}"
    rows = f", a row for each of {_generators(settings)}" if isinstance(settings, GanConfig) else ""
    picture = {
        "title": "What the generators make",
        "note": f"Images by the generators on rung 0 at the end{rows}.",
        "width": width * max(1, SMALL // width),
        "src": f"data:image/png;base64,{base64.b64encode(data).decode()}",
    }
    return [picture], ""


def within_the_page(pictures: list[list[Picture]]) -> None:
    """Take what is too much for a page out of the pictures of its runs; the first are kept."""
    room = MOST_TOGETHER
    for picture in (each for of_run in pictures for each in of_run):
        room -= len(picture["src"])
        if room < 0:
            del picture["src"]
            picture["note"] = (
                f"{picture['note']} There are too many for this page: see {SAMPLES} in the folder."
            )


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG file; ValueError if it is none, is not whole, or would be too large
    to look at.
    """
    chunks = list(_chunks(data))
    if not chunks or chunks[0][0] != b"IHDR" or len(chunks[0][1]) != 13:
        raise ValueError("it is no PNG file")
    if chunks[-1][0] != b"IEND":
        raise ValueError("it is cut short")
    width, height = struct.unpack(">II", chunks[0][1][:8])
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"it has {width:,} x {height:,} pixels")
    return width, height


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The parts of a PNG file up to its end, as far as their checksums hold."""
    if not data.startswith(SIGNATURE):
        raise ValueError("it is no PNG file")
    at = len(SIGNATURE)
    while at + 12 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body, check = data[at + 8 : at + 8 + length], data[at + 8 + length : at + 12 + length]
        if len(check) < 4:
            return
        if struct.unpack(">I", check)[0] != zlib.crc32(kind + body):
            raise ValueError("it is damaged: a checksum does not hold")
        yield kind, body
        at += 12 + length


def _generators(settings: GanConfig) -> str:
    shown = min(settings.n_generators, 10)
    return (
        f"{shown} generators"
        if shown == settings.n_generators
        else f"{shown} of {settings.n_generators} generators"
    )


__all__ = ["pictures_of", "size_of", "within_the_page"]
