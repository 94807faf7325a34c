"""What each image set is: its sizes, classes, official files and checksums."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.errors import DataError

PARTS = ("train", "test")
IMAGE = (32, 32, 3)
Tensors = dict[str, Tensor]  # train_images, train_labels, test_images, test_labels, ...
KRIZ = "https://www.cs.toronto.edu/~kriz"
HOUSENUMBERS = "http://ufldl.stanford.edu/housenumbers"

CIFAR100_SHA256 = {
    "train_images": "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
    "train_labels": "8bf4935e7c77a3096270043c6f3b221b6ecb9c63d1a08608e9af66cff17e977a",
    "train_coarse_labels": "9f99c2cdae93cf09da2fc6497c96ab042c6dc02c456a2e86dcffd2305df5a2e9",
    "test_images": "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
    "test_labels": "80031c23f8300724c6fbc588e4bccbe41c6392041782148727bb497b0132c4ad",
    "test_coarse_labels": "e2f01c218d5f70ed60e3d80cb12337f835005bcae62b64fefcaa2b647612af83",
}


class Archive(NamedTuple):
    """One official file."""

    file: str
    base_url: str
    md5: str


@dataclass(frozen=True)
class Source:
    """One image set. `per_class` and `files` have an entry for "train" and one for "test"."""

    name: str
    per_class: Mapping[str, tuple[int, ...]]
    archives: tuple[Archive, ...]
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # inside the archive
    n_coarse: int = 0  # coarse classes; only CIFAR-100 has them
    sha256: Mapping[str, str] = field(default_factory=dict)  # of the official arrays, if known

    @property
    def n_classes(self) -> int:
        return len(self.per_class["train"])

    def array_names(self) -> list[str]:
        kinds = ("images", "labels", "coarse_labels") if self.n_coarse else ("images", "labels")
        return [f"{part}_{kind}" for part in PARTS for kind in kinds]


SOURCES: dict[str, Source] = {
    "cifar10": Source(
        "cifar10",
        {"train": (5000,) * 10, "test": (1000,) * 10},
        (Archive("cifar-10-binary.tar.gz", KRIZ, "c32a1d4ab5d03f1284b67883e8d87530"),),
        files={
            "train": tuple(f"cifar-10-batches-bin/data_batch_{k}.bin" for k in range(1, 6)),
            "test": ("cifar-10-batches-bin/test_batch.bin",),
        },
        sha256={
            "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "train_labels": "f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
            "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "test_labels": "cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
        },
    ),
    "cifar100": Source(
        "cifar100",
        {"train": (500,) * 100, "test": (100,) * 100},
        (Archive("cifar-100-binary.tar.gz", KRIZ, "03b5dce01913d631647c71ecec9e9cb8"),),
        files={"train": ("cifar-100-binary/train.bin",), "test": ("cifar-100-binary/test.bin",)},
        n_coarse=20,
        sha256=CIFAR100_SHA256,
    ),
    # No sha256: no arrays here were ever compared with all of the official files.
    "svhn": Source(
        "svhn",
        {
            "train": (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
            "test": (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
        },
        (
            Archive("train_32x32.mat", HOUSENUMBERS, "e26dedcc434d2e4c54c9b2d4a06d8373"),
            Archive("test_32x32.mat", HOUSENUMBERS, "eb5a983be6a315427106f1b164d9cef3"),
        ),
    ),
}


def source_of(name: str) -> Source:
    """The set of that name, or an error that names the nearest one."""
    if name not in SOURCES:
        near = difflib.get_close_matches(str(name).lower(), SOURCES, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}? There" if near else "there"
        raise DataError(f"there is no image set {name!r}; {hint} are {', '.join(SOURCES)}")
    return SOURCES[name]


def sha256_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().data).hexdigest()


def check_tensors(source: Source, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a type, a shape or a label does not belong to the set."""
    for part in PARTS:
        images, n = tensors[f"{part}_images"], tensors[f"{part}_labels"].shape[:1].numel()
        if images.dtype != torch.uint8 or images.shape != (n, *IMAGE):
            found = f"{images.dtype} of shape {tuple(images.shape)}"
            raise ValueError(f"the {part} images are {found} instead of uint8 {(n, *IMAGE)}")
        for kind, n_classes in (("labels", source.n_classes), ("coarse_labels", source.n_coarse)):
            if n_classes:
                _check_labels(tensors[f"{part}_{kind}"], n, n_classes, f"{part} {kind}")


def _check_labels(labels: Tensor, n: int, n_classes: int, what: str) -> None:
    if labels.dtype != torch.int64 or labels.shape != (n,):
        raise ValueError(f"the {what} are {labels.dtype} of shape {tuple(labels.shape)}")
    low, high = (int(labels.min()), int(labels.max())) if n else (0, 0)
    if low < 0 or high >= n_classes:
        raise ValueError(f"the {what} are from {low} to {high} instead of 0 to {n_classes - 1}")


def check_counts(source: Source, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a class has not as many images as in the official set."""
    for part in PARTS:
        counts = torch.bincount(tensors[f"{part}_labels"], minlength=source.n_classes).tolist()
        for label, (found, expected) in enumerate(zip(counts, source.per_class[part], strict=True)):
            if found != expected:
                raise ValueError(f"class {label} has {found:,} {part} images, not {expected:,}")
