"""The cache: one safetensors file per image set, with its checksums, complete or absent; and
stratified splits of what it holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from torchrex.checkpoint import one_line
from torchrex.durable import replace_file, writing
from torchrex.errors import DataError, InvalidArgumentError
from torchrex.rng import Streams
from torchrex.vision.data.sources import PARTS, check_tensors, sha256_of, source_of

SCHEMA = 1
# Sets checked in this process, by file: loading one for each of many runs hashes it once.
_checked: dict[Path, tuple[int, int, int]] = {}
UNREADABLE = (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """An image set in memory: uint8 images (n, 32, 32, 3), int64 labels."""

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
        n_train, n_test = len(self.train_labels), len(self.test_labels)
        return f"ImageSet({self.name}: {n_train:,} / {n_test:,} images, {self.n_classes} classes)"


class Cached(NamedTuple):
    """What a cache file says about itself, read without its images."""

    path: Path
    provenance: str
    sha256: Mapping[str, str]
    n_images: int


def data_folder(folder: Path | str | None = None) -> Path:
    """`folder`, or TORCHREX_DATA, or torchrex/data in the user's cache folder."""
    if chosen := folder or os.environ.get("TORCHREX_DATA"):
        return Path(chosen).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "torchrex" / "data"


def cache_path(name: str, folder: Path | str | None = None) -> Path:
    return data_folder(folder) / f"{source_of(name).name}.safetensors"


def save_images(images: ImageSet, folder: Path | str | None = None) -> Path:
    """Write the cache file of a set. If the disk is full, an older file stays as it was."""
    path = cache_path(images.name, folder)
    names = source_of(images.name).array_names()
    tensors = {name: getattr(images, name).contiguous() for name in names}
    about = {
        "schema": SCHEMA,
        "name": images.name,
        "provenance": images.provenance,
        "sha256": {name: sha256_of(tensor) for name, tensor in tensors.items()},
    }
    with writing(path, DataError, "choose another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, save(tensors, {"torchrex": json.dumps(about)}))
    return path


def load_images(name: str, folder: Path | str | None = None) -> ImageSet:
    """The image set `name` (cifar10, cifar100 or svhn) from the cache.

    The checksums are checked once per process, and again when the file has changed.
    `folder` is by default TORCHREX_DATA, else torchrex/data in the user's cache folder.
    """
    source, about = source_of(name), read_about(name, folder)
    try:
        with safe_open(str(about.path), framework="pt") as file:
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in source.array_names()}
        check_tensors(source, tensors)
        stat, path = about.path.stat(), about.path.resolve()
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if _checked.get(path) != version:
            for key, tensor in tensors.items():
                if sha256_of(tensor) != about.sha256[key]:
                    raise ValueError(f"the {key.replace('_', ' ')} have another sha256")
            _checked[path] = version
    except UNREADABLE as error:
        raise _damaged(name, about.path, error) from None
    return ImageSet(source.name, source.n_classes, **tensors, provenance=about.provenance)


def read_about(name: str, folder: Path | str | None = None) -> Cached:
    """What the cache file of a set says about itself; DataError if it is missing or damaged."""
    path = cache_path(name, folder)
    try:
        if not path.is_file():
            to = "" if folder is None else f" --to {folder}"
            raise DataError(
                f"{name} is not in {path.parent}; get it with `torchrex data fetch {name}{to}` "
                f"or `torchrex data import {name} --from FOLDER{to}`"
            )
        with safe_open(str(path), framework="pt") as file:
            about = json.loads(file.metadata()["torchrex"])
            n_images = sum(file.get_slice(f"{part}_images").get_shape()[0] for part in PARTS)
        if (about["name"], about["schema"]) != (name, SCHEMA):
            raise ValueError(f"it has {about['name']} in schema {about['schema']}, not {SCHEMA}")
        if not isinstance(about["provenance"], str):
            raise ValueError("its provenance is no text")
        return Cached(path, one_line(about["provenance"]), dict(about["sha256"]), n_images)
    except DataError:
        raise
    except UNREADABLE as error:
        raise _damaged(name, path, error) from None


def _damaged(name: str, path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is damaged ({one_line(error)}); import it again with "
        f"`torchrex data import {name} --from FOLDER --to {path.parent}`, or fetch it"
    )


def stratified_split(labels: Tensor, n_validation: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices for training and for validation.

    Every class gives the validation set equally many, to within one, and keeps one or more to
    train on. The seed chooses the classes that give one more.
    """
    sizes = _class_sizes(labels)
    most = (int(sizes.min()) - 1) * len(sizes)
    _require_count("n_validation", n_validation, most, sizes)
    generator = Streams(seed)["split.validation"]
    order = torch.randperm(len(sizes), generator=generator)
    quota = torch.full((len(sizes),), n_validation // len(sizes))
    quota[order[: n_validation % len(sizes)]] += 1
    chosen = _first_of_each_class(labels, quota, generator)
    return _indices(~chosen, labels), _indices(chosen, labels)


def label_subset(labels: Tensor, n_labelled: int, seed: int) -> Tensor:
    """Indices of the examples that keep their labels: exactly equally many of every class."""
    sizes = _class_sizes(labels)
    n_classes = len(sizes)
    _require_count("n_labelled", n_labelled, int(sizes.min()) * n_classes, sizes)
    if n_labelled % n_classes:
        nearest = max(1, round(n_labelled / n_classes)) * n_classes
        raise InvalidArgumentError(
            f"n_labelled must be a multiple of the {n_classes} classes, got {n_labelled:,}; "
            f"the nearest is {nearest:,}"
        )
    quota = torch.full((n_classes,), n_labelled // n_classes)
    chosen = _first_of_each_class(labels, quota, Streams(seed)["split.labelled"])
    return _indices(chosen, labels)


def stratified_subset(labels: Tensor, n: int, seed: int) -> Tensor:
    """Indices of n examples, as balanced over the classes as their sizes allow."""
    sizes = _class_sizes(labels)
    _require_count("n", n, len(labels), sizes)
    generator = Streams(seed)["split.subset"]
    order = torch.randperm(len(sizes), generator=generator)
    quota = torch.zeros_like(sizes)
    # Divide what is left among the classes that have more examples, until nothing is left.
    while left := n - int(quota.sum()):
        able = order[(quota < sizes)[order]]
        if left < len(able):
            quota[able[:left]] += 1
        else:
            quota[able] = torch.minimum(sizes[able], quota[able] + left // len(able))
    return _indices(_first_of_each_class(labels, quota, generator), labels)


def _class_sizes(labels: Tensor) -> Tensor:
    """Examples of every class 0, 1, ..., or an error if one has none."""
    if not isinstance(labels, Tensor):
        raise InvalidArgumentError(f"labels must be a tensor, got {type(labels).__name__}")
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InvalidArgumentError(
            f"labels must be whole numbers, one per example, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    if not len(labels) or int(labels.min()) < 0:
        given = f"the label {int(labels.min())}" if len(labels) else "none"
        raise InvalidArgumentError(f"labels must be classes 0, 1, 2, ..., got {given}")
    sizes = torch.bincount(labels.cpu())
    if not bool(sizes.all()):
        raise InvalidArgumentError(
            f"class {int(sizes.argmin())} has no examples among labels 0 to {len(sizes) - 1}; "
            f"renumber the classes"
        )
    return sizes


def _require_count(name: str, n: int, most: int, sizes: Tensor) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= most:
        raise InvalidArgumentError(
            f"{name} must be a whole number from 1 to {most:,}, got {n!r}; the smallest "
            f"of {len(sizes)} classes, {int(sizes.argmin())}, has {int(sizes.min()):,} examples"
        )


def _first_of_each_class(labels: Tensor, quota: Tensor, generator: torch.Generator) -> Tensor:
    """A mask with `quota` examples of each class, the first of its order; on the CPU."""
    labels = labels.cpu()
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in enumerate(quota.tolist()):
        members = (labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        chosen[members[order[:count]]] = True
    return chosen


def _indices(chosen: Tensor, labels: Tensor) -> Tensor:
    return chosen.nonzero().squeeze(1).to(labels.device)
