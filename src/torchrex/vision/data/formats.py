"""The official files and plain arrays: bytes on disk into arrays, in the order of the official
files. No pickle is ever loaded.

CIFAR's binary files hold records of one label byte (CIFAR-100: coarse, then fine) and 3,072 bytes
of picture, plane by plane. SVHN's cropped digits are MATLAB files, with label 10 for the digit 0.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrex.checkpoint import one_line, require_file
from torchrex.errors import DataError
from torchrex.vision.data.packed_coder import UNREADABLE
from torchrex.vision.data.sources import PARTS, PICTURE, Archive, Arrays, Part, Source

PIXELS = 32 * 32 * 3


def check_md5(path: Path, archive: Archive) -> None:
    """Before anything else is done with an official file."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(
                file, lambda: hashlib.md5(usedforsecurity=False)
            ).hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror})") from None
    if found != archive.md5:
        raise DataError(
            f"{path} has md5 {found} instead of {archive.md5} of the official {archive.file}; download it again"
        )


def read_tar(source: Source, path: Path) -> Arrays:
    """CIFAR from its official archive; the members are read in place, nothing is extracted."""
    wanted = {name: _file_size(source, part) for part in PARTS for name in source.files(part)}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if member.name not in wanted:
                    continue
                if not member.isfile() or member.size != wanted[member.name]:
                    raise DataError(
                        f"{member.name} in {path} has {member.size:,} bytes instead of {wanted[member.name]:,}"
                    )
                stream = archive.extractfile(member)
                found[member.name] = b"" if stream is None else stream.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read {path} ({error}); download it again") from None
    if missing := [name for name in wanted if name not in found]:
        raise DataError(
            f"{path} does not hold {missing[0]}; it is not the binary version of {source.name}"
        )
    return _from_records(source, lambda name: found[name])


def read_binary(source: Source, folder: Path) -> Arrays:
    """CIFAR from the extracted files of the official archive."""

    def read(name: str) -> bytes:
        path = folder / Path(name).name
        expected = next(_file_size(source, part) for part in PARTS if name in source.files(part))
        try:
            size = path.stat().st_size
            if size != expected:
                raise DataError(
                    f"{path} has {size:,} bytes instead of {expected:,}; extract the official archive again"
                )
            return path.read_bytes()
        except OSError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"cannot read {path} ({error.strerror})") from None

    return _from_records(source, read)


def read_mat(source: Source, paths: dict[Part, Path]) -> Arrays:
    """SVHN from its official files, which have been checked by md5."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    arrays: Arrays = {}
    for part, path in paths.items():
        try:
            content = loadmat(path, variable_names=["X", "y"])
            pictures, labels = content["X"], content["y"]
            arrays[f"{part}_images"] = np.ascontiguousarray(pictures.transpose(3, 0, 1, 2))
            labels = labels.astype(np.int64).ravel()
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            NotImplementedError,
            EOFError,
            zlib.error,
            MatReadError,
        ) as error:
            raise DataError(
                f"{path} does not hold the pictures X and labels y of {source.name} ({error})"
            ) from None
        if (labels == 0).any():
            raise DataError(f"{path} has label 0; the official files have 10 for the digit 0")
        labels[labels == 10] = 0
        arrays[f"{part}_labels"] = labels
    return arrays


def read_npy(source: Source, folder: Path) -> Arrays:
    """Plain arrays: {set}_{part}_x.npy (n, 32, 32, 3) uint8, _y.npy, and _ycoarse.npy for
    CIFAR-100.
    """
    arrays: Arrays = {}
    for name, file in npy_files(source).items():
        try:
            # Mapped, because a header may promise any size; this reads npy alone and refuses
            # objects, that is pickles.
            require_file(folder / file)
            mapped = np.lib.format.open_memmap(folder / file, mode="r")
        except UNREADABLE as error:
            raise DataError(
                f"cannot read {folder / file} as an array of numbers ({one_line(error)})"
            ) from None
        n = source.count("train" if name.startswith("train") else "test")
        expected = (n, *PICTURE) if name.endswith("images") else (n,)
        kinds = "u" if name.endswith("images") else "iu"
        if mapped.shape != expected or mapped.dtype.kind not in kinds:
            raise DataError(
                f"{folder / file} has {mapped.dtype} of shape {mapped.shape} instead of whole numbers of {expected}"
            )
        arrays[name] = (
            np.array(mapped, order="C") if name.endswith("images") else np.array(mapped, np.int64)
        )
    return arrays


def npy_files(source: Source) -> dict[str, str]:
    """Array name: file name."""
    short = {"images": "x", "labels": "y", "coarse_labels": "ycoarse"}
    split = {name: name.split("_", 1) for name in source.array_names()}
    return {name: f"{source.name}_{part}_{short[kind]}.npy" for name, (part, kind) in split.items()}


def _file_size(source: Source, part: Part) -> int:
    record = PIXELS + (2 if source.n_coarse else 1)
    return source.count(part) // len(source.files(part)) * record


def _from_records(source: Source, read: Callable[[str], bytes]) -> Arrays:
    n_labels = 2 if source.n_coarse else 1
    arrays: Arrays = {}
    for part in PARTS:
        content = b"".join(read(name) for name in source.files(part))
        records: npt.NDArray[Any] = np.frombuffer(content, np.uint8).reshape(-1, n_labels + PIXELS)
        planes = records[:, n_labels:].reshape(-1, 3, 32, 32)
        arrays[f"{part}_images"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"{part}_labels"] = records[:, n_labels - 1].astype(np.int64)
        if source.n_coarse:
            arrays[f"{part}_coarse_labels"] = records[:, 0].astype(np.int64)
    return arrays
