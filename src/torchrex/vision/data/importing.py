"""Bringing an image set into the cache: from a folder, or downloaded by pooch.

A folder may hold the official archives, the binary files extracted from them, or plain arrays.
Archives are checked by md5, the other forms by the sha256 of the official arrays (CIFAR). The
provenance in the cache says which. No pickle is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchrex.checkpoint import one_line
from torchrex.durable import new_file, writing
from torchrex.errors import DataError, MissingDependencyError
from torchrex.vision.data.cache import ImageSet, cache_path, data_folder, load_images, save_images
from torchrex.vision.data.sources import (
    IMAGE,
    PARTS,
    Archive,
    Source,
    Tensors,
    check_counts,
    check_tensors,
    sha256_of,
    source_of,
)

Arrays = dict[str, npt.NDArray[Any]]
Progress = Callable[[int, int], None]  # (bytes done, bytes of the file, 0 if not known)
OFFICIAL = "official"  # first word of the provenance of official archives
PICKLED = ("-python", "batches-py")  # in the names of the pickled version of CIFAR
TIMEOUT = 30.0  # seconds without a byte
MOST_BYTES = 2**28  # of a download; the largest official file has 182 MB
BLOCK = 1 << 18


class Form(NamedTuple):
    """One way in which a set may be stored in a folder."""

    words: str
    folder: Path
    files: list[str]
    read: Callable[[Source, Path], Arrays]

    def missing(self) -> list[str]:
        return [name for name in self.files if not (self.folder / name).is_file()]


def import_images(name: str, source: Path | str, folder: Path | str | None = None) -> Path:
    """Check the image set `name` in the folder or archive `source` and write it to the cache."""
    what, path = source_of(name), Path(source).expanduser()
    try:
        form = _find(what, path)
        arrays = form.read(what, form.folder)
        tensors = {key: torch.from_numpy(arrays[key]) for key in what.array_names()}
        check_tensors(what, tensors)
        check_counts(what, tensors)
        provenance = f"{form.words}, {_compare(what, form, tensors)}"
    except DataError:
        raise
    except Exception as error:  # a file that is not what its name says can fail in any way
        raise DataError(f"cannot import {name} from {path}: {one_line(error)}") from error
    return save_images(ImageSet(name, what.n_classes, **tensors, provenance=provenance), folder)


def _find(source: Source, path: Path) -> Form:
    """The form in which a set is in a folder, or an error that says what is missing."""
    archives = [archive.file for archive in source.archives]
    if any(mark in path.name for mark in PICKLED):
        raise _pickled(source, path)
    if path.is_file() and path.name not in archives:
        raise DataError(f"{path} is not an archive of {source.name}; give {' and '.join(archives)}")
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; --from takes the folder of {source.name}")
    official = f"{OFFICIAL} {' and '.join(archives)}"
    forms = [Form(official, folder, archives, _read_tar if source.files else _read_mat)]
    if source.files:
        inner = Path(source.files["train"][0]).parent  # where the archive extracts to
        binary = [Path(name).name for part in PARTS for name in source.files[part]]
        words = "binary files of the official archive"
        forms += [Form(words, place, binary, _read_binary) for place in (folder, folder / inner)]
    plain = list(_npy_files(source).values())
    forms.append(Form("plain arrays", folder, plain, _read_npy))
    for form in forms:
        if not form.missing():
            return form
    nearest = max(forms, key=lambda form: len(form.files) - len(form.missing()))
    if len(nearest.missing()) < len(nearest.files):
        raise DataError(
            f"{source.name} in {nearest.folder} ({nearest.words}) is not complete: "
            f"{nearest.missing()[0]} is missing"
        )
    if any(mark in inside.name for inside in folder.iterdir() for mark in PICKLED):
        raise _pickled(source, folder)
    raise DataError(
        f"{folder} does not hold {source.name}; put {' and '.join(archives)} there, or arrays "
        f"{', '.join(plain)} (images uint8 n x 32 x 32 x 3, whole-number labels)"
    )


def _pickled(source: Source, path: Path) -> DataError:
    return DataError(
        f"{path} has the python version of {source.name}, which is pickled and is not loaded; "
        f"give {source.archives[0].file}, or use `torchrex data fetch {source.name}`"
    )


def _compare(source: Source, form: Form, tensors: Tensors) -> str:
    """Compare with the official arrays where their sha256 is known; words for the provenance."""
    if form.words.startswith(OFFICIAL):
        return "md5 checked"
    for name, expected in source.sha256.items():
        if (found := sha256_of(tensors[name])) != expected:
            raise DataError(
                f"the {name.replace('_', ' ')} in {form.folder} have sha256 {found} instead of "
                f"{expected}; get that data again"
            )
    if source.sha256:
        return "the same bytes as the official set by sha256"
    return "not compared bit by bit with the official files"


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _check_md5(path: Path, archive: Archive) -> None:
    if (found := _md5_of(path)) != archive.md5:
        raise DataError(f"{path} has md5 {found} instead of {archive.md5}; download it again")


def _read_tar(source: Source, folder: Path) -> Arrays:
    """CIFAR from its official archive; nothing is extracted to disk."""
    (archive,) = source.archives
    _check_md5(folder / archive.file, archive)
    with tarfile.open(folder / archive.file) as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar)
        contents = {name: file.read() for name, file in files if file is not None}
    return _from_records(source, contents.__getitem__)


def _read_binary(source: Source, folder: Path) -> Arrays:
    return _from_records(source, lambda name: (folder / Path(name).name).read_bytes())


def _from_records(source: Source, read: Callable[[str], bytes]) -> Arrays:
    """Records of label bytes (CIFAR-100: coarse, fine) and 3,072 bytes of image by colour."""
    n_labels = 2 if source.n_coarse else 1
    size = n_labels + 3 * 32 * 32
    arrays: Arrays = {}
    for part in PARTS:
        contents = {name: read(name) for name in source.files[part]}
        for name, content in contents.items():
            if len(content) % size:
                raise ValueError(f"{name} has {len(content):,} bytes, no multiple of {size:,}")
        records = np.frombuffer(b"".join(contents.values()), np.uint8).reshape(-1, size)
        planes = records[:, n_labels:].reshape(-1, 3, 32, 32)
        arrays[f"{part}_images"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"{part}_labels"] = records[:, n_labels - 1].astype(np.int64)
        arrays[f"{part}_coarse_labels"] = records[:, 0].astype(np.int64)
    return arrays


def _read_mat(source: Source, folder: Path) -> Arrays:
    """SVHN from its official MATLAB files, which have the label 10 for the digit 0."""
    from scipy.io import loadmat

    arrays: Arrays = {}
    for part, archive in zip(PARTS, source.archives, strict=True):
        _check_md5(folder / archive.file, archive)
        content = loadmat(folder / archive.file, variable_names=["X", "y"])
        arrays[f"{part}_images"] = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
        arrays[f"{part}_labels"] = content["y"].astype(np.int64).ravel() % 10
    return arrays


def _npy_files(source: Source) -> dict[str, str]:
    """The file name of each array."""
    short = {"images": "x", "labels": "y", "coarse_labels": "ycoarse"}
    split = {name: name.split("_", 1) for name in source.array_names()}
    return {name: f"{source.name}_{part}_{short[kind]}.npy" for name, (part, kind) in split.items()}


def _read_npy(source: Source, folder: Path) -> Arrays:
    """Plain arrays: {set}_{part}_x.npy (n, 32, 32, 3) uint8, _y.npy and _ycoarse.npy."""
    arrays: Arrays = {}
    for name, file in _npy_files(source).items():
        # Mapped, because a header may state any size; objects, that is pickles, are refused.
        mapped = np.lib.format.open_memmap(folder / file, mode="r")
        n = sum(source.per_class[name.split("_")[0]])
        is_image = name.endswith("images")
        expected = (n, *IMAGE) if is_image else (n,)
        if mapped.shape != expected or mapped.dtype.kind not in "iu":
            found = f"{mapped.dtype} of shape {mapped.shape}"
            raise ValueError(f"{file} has {found} instead of whole numbers of shape {expected}")
        arrays[name] = np.array(mapped, None if is_image else np.int64, order="C")
    return arrays


def fetch_images(
    name: str,
    folder: Path | str | None = None,
    progress: Progress | None = None,
    base_url: str | None = None,
) -> Path:
    """Download the official files of an image set, check them and write the cache.

    An official set in the cache is not downloaded again. `base_url` is a mirror; the checksums are
    the same.
    """
    with contextlib.suppress(DataError):
        if load_images(name, folder).provenance.startswith(OFFICIAL):
            return cache_path(name, folder)
    downloads = data_folder(folder) / "downloads"
    archives = source_of(name).archives
    for archive in archives:
        url = f"{(base_url or archive.base_url).rstrip('/')}/{archive.file}"
        _download(url, archive, downloads, progress)
    written = import_images(name, downloads, folder)
    for archive in archives:  # the cache has all of them now
        (downloads / archive.file).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        downloads.rmdir()  # not if another download is in progress
    return written


def _download(url: str, archive: Archive, folder: Path, progress: Progress | None) -> None:
    try:
        import pooch  # type: ignore[import-untyped]
        import requests
    except ImportError:
        raise MissingDependencyError("downloads need pooch: pip install 'torchrex[data]'") from None
    bar = False if progress is None else _Bar(progress)
    downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=BLOCK, timeout=TIMEOUT)
    path, shown = folder / archive.file, one_line(url)
    with writing(path, DataError, "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_file() and _md5_of(path) == archive.md5:
            return
        # Not pooch.retrieve: it opens what is at `path`, and a killed one leaves its file behind.
        with new_file(path) as file:
            received = _Received(file)
            try:
                downloader(url, received, None)
            except (requests.RequestException, ValueError) as error:
                raise DataError(
                    f"cannot download {shown} ({one_line(error, 200)}); try again later, from a "
                    "mirror (--mirror URL), or import a copy (torchrex data import NAME --from "
                    "FOLDER)"
                ) from None
            if received.md5.hexdigest() != archive.md5:
                raise DataError(f"{shown} has another md5 than {archive.md5}; it was removed")


class _Received:
    """Takes what a server sends, up to a limit: it may state no length, or a wrong one."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.md5, self.n_bytes = file, hashlib.md5(usedforsecurity=False), 0

    def write(self, data: bytes) -> None:
        self.n_bytes += len(data)
        if self.n_bytes > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes, and no official file has")
        self.md5.update(data)
        self.file.write(data)

    def flush(self) -> None: ...


class _Bar:
    """What pooch takes as a progress bar: calls `progress(bytes done, bytes of the file)`."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.done, self.total = progress, 0, 0

    def update(self, n: int) -> None:
        self.done += n
        self.progress(min(self.done, self.total) if self.total else self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None: ...
