"""The cache: one checked safetensors file per image set, there whole or not at all, and where that
file lies.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from torchrex import durable
from torchrex.checkpoint import one_line, parse_json, printable
from torchrex.errors import DataError
from torchrex.vision.data.sources import PARTS, PICTURE, Source, source_of

SCHEMA = 1
# What has been checked in this process: a set that is loaded for each of many runs is hashed once,
# unless its file changes.
_verified: dict[Path, tuple[int, int, int]] = {}


@dataclass(frozen=True, eq=False)
class ImageSet:
    """An image set in memory: uint8 pictures (n, 32, 32, 3), int64 labels."""

    name: str
    n_classes: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    train_coarse_labels: Tensor | None = None  # cifar100 alone has them
    test_coarse_labels: Tensor | None = None
    provenance: str = ""  # where the bytes come from; goes into reports

    def __repr__(self) -> str:
        return f"ImageSet({self.name}: {len(self.train_labels):,} / {len(self.test_labels):,} images, {self.n_classes} classes)"


@dataclass(frozen=True)
class Cached:
    """What a cache file says about itself, read without its images."""

    path: Path
    provenance: str
    sha256: Mapping[str, str]
    n_images: int


def data_folder(folder: Path | str | None = None) -> Path:
    """`folder`, or TORCHREX_DATA, or the user's cache folder."""
    if folder is not None:
        return Path(folder).expanduser()
    if own := os.environ.get("TORCHREX_DATA"):
        return Path(own).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "torchrex" / "data"


def cache_path(name: str, folder: Path | str | None = None) -> Path:
    return data_folder(folder) / f"{source_of(name).name}.safetensors"


def save_images(images: ImageSet, folder: Path | str | None = None) -> Path:
    """Write the cache file of a set. If the disk is full nothing of it stays, and an older file
    stays as it was.
    """
    path = cache_path(images.name, folder)
    tensors = {
        name: getattr(images, name).contiguous() for name in source_of(images.name).array_names()
    }
    about = {
        "schema": SCHEMA,
        "name": images.name,
        "provenance": images.provenance,
        "sha256": {name: _sha256(tensor) for name, tensor in tensors.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace_file(path, save(tensors, {"torchrex": json.dumps(about)}))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.with_name(f"{path.name}.part").unlink()  # the name replace_file writes under
        advice = "free some space" if error.errno == errno.ENOSPC else "choose another folder"
        raise DataError(
            f"cannot write {path} ({error.strerror or error}); nothing was written, {advice}"
        ) from None
    return path


def load_images(name: str, folder: Path | str | None = None) -> ImageSet:
    """The image set `name` (cifar10, cifar100 or svhn) from the cache; its checksums are checked
    once per process.

    `folder` is by default TORCHREX_DATA, else torchrex/data in the user's cache folder.
    """
    source, path = source_of(name), cache_path(name, folder)
    try:
        cached = read_about(name, folder)
        with safe_open(str(path), framework="pt") as file:
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in source.array_names()}
        stat = path.stat()
        _check_form(source, tensors)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise _damaged(source, path, str(error)) from None
    standing = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if _verified.get(path.resolve()) != standing:
        for key, tensor in tensors.items():
            if _sha256(tensor) != cached.sha256.get(key):
                raise _damaged(
                    source,
                    path,
                    f"the {key.replace('_', ' ')} have another sha256 than the file says",
                )
        _verified[path.resolve()] = standing
    return ImageSet(source.name, source.n_classes, **tensors, provenance=cached.provenance)


def read_about(name: str, folder: Path | str | None = None) -> Cached:
    """What the cache file of a set says about itself; DataError if there is none or it cannot be
    read.
    """
    source, path = source_of(name), cache_path(name, folder)
    try:
        there = path.is_file()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); choose another folder") from None
    if not there:
        to = "" if folder is None else f" --to {folder}"
        raise DataError(
            f"{name} is not in {path.parent}; get it with `torchrex data fetch {name}{to}` "
            f"or `torchrex data import {name} --from FOLDER{to}`"
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            about: dict[str, Any] = parse_json((file.metadata() or {})["torchrex"].encode())
            n_images = sum(
                file.get_slice(f"{part}_images").get_shape()[0] for part in ("train", "test")
            )
        if about["schema"] != SCHEMA or about["name"] != source.name:
            raise ValueError(
                f"it holds {about['name']} in schema {about['schema']}, and schema {SCHEMA} is read here"
            )
        if not isinstance(about["provenance"], str):
            raise ValueError("its provenance is no text")
        return Cached(path, printable(about["provenance"]), dict(about["sha256"]), n_images)
    except (
        SafetensorError,
        OSError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise _damaged(source, path, str(error)) from None


def _check_form(source: Source, tensors: Mapping[str, Tensor]) -> None:
    """What the checksums of a file, which it states itself, do not tell. That a set is whole is for
    the one who imports it.
    """
    for part in PARTS:
        images, n = tensors[f"{part}_images"], len(tensors[f"{part}_labels"].reshape(-1))
        if images.dtype != torch.uint8 or tuple(images.shape) != (n, *PICTURE):
            raise ValueError(
                f"the {part} images are {images.dtype} of shape {tuple(images.shape)} for {n} labels"
            )
        for kind, classes in (("labels", source.n_classes), ("coarse_labels", source.n_coarse)):
            labels = tensors.get(f"{part}_{kind}")
            if labels is not None and (labels.dtype != torch.int64 or tuple(labels.shape) != (n,)):
                raise ValueError(
                    f"the {part} {kind} are {labels.dtype} of shape {tuple(labels.shape)}"
                )
            if (
                labels is not None
                and n
                and not 0 <= int(labels.min()) <= int(labels.max()) < classes
            ):
                raise ValueError(
                    f"the {part} {kind} lie between {int(labels.min())} and {int(labels.max())}"
                )


def _damaged(source: Source, path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is damaged ({one_line(why)}); import it again with "
        f"`torchrex data import {source.name} --from FOLDER --to {path.parent}`, or fetch it"
    )


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().data).hexdigest()
