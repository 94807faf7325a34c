"""What each image set is: its sizes, classes, official files and checksums. Everything that reads a
set is held to this.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchrex.errors import DataError

Part = Literal["train", "test"]
PARTS: tuple[Part, ...] = ("train", "test")
Arrays = dict[
    str, npt.NDArray[Any]
]  # train_images, train_labels, test_images, test_labels, and coarse labels where there are some
PICTURE = (32, 32, 3)
KRIZ = "https://www.cs.toronto.edu/~kriz"
HOUSENUMBERS = "http://ufldl.stanford.edu/housenumbers"


@dataclass(frozen=True)
class Archive:
    """One official file to download."""

    file: str
    url: str
    md5: str


@dataclass(frozen=True)
class Source:
    """One image set. Tests put small sets of the same form in its place."""

    name: str
    train_per_class: tuple[int, ...]
    test_per_class: tuple[int, ...]
    archives: tuple[Archive, ...]
    train_files: tuple[str, ...] = ()  # the official binary files, as the archive names them
    test_files: tuple[str, ...] = ()
    n_coarse: int = 0
    sha256: Mapping[str, str] = field(
        default_factory=dict
    )  # of the arrays of the official set, where they are known
    recropped: bool = False  # true if the packed form was made anew from the full frames

    @property
    def n_classes(self) -> int:
        return len(self.train_per_class)

    def per_class(self, part: Part) -> tuple[int, ...]:
        return self.train_per_class if part == "train" else self.test_per_class

    def count(self, part: Part) -> int:
        return sum(self.per_class(part))

    def files(self, part: Part) -> tuple[str, ...]:
        return self.train_files if part == "train" else self.test_files

    def array_names(self) -> list[str]:
        kinds = ("images", "labels", "coarse_labels") if self.n_coarse else ("images", "labels")
        return [f"{part}_{kind}" for part in PARTS for kind in kinds]


SOURCES: dict[str, Source] = {
    "cifar10": Source(
        "cifar10",
        train_per_class=(5000,) * 10,
        test_per_class=(1000,) * 10,
        archives=(
            Archive(
                "cifar-10-binary.tar.gz",
                f"{KRIZ}/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        train_files=tuple(f"cifar-10-batches-bin/data_batch_{k}.bin" for k in (1, 2, 3, 4, 5)),
        test_files=("cifar-10-batches-bin/test_batch.bin",),
        sha256={
            "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "train_labels": "f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
            "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "test_labels": "cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
        },
    ),
    "cifar100": Source(
        "cifar100",
        train_per_class=(500,) * 100,
        test_per_class=(100,) * 100,
        archives=(
            Archive(
                "cifar-100-binary.tar.gz",
                f"{KRIZ}/cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
        train_files=("cifar-100-binary/train.bin",),
        test_files=("cifar-100-binary/test.bin",),
        n_coarse=20,
        sha256={
            "train_images": "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
            "train_labels": "8bf4935e7c77a3096270043c6f3b221b6ecb9c63d1a08608e9af66cff17e977a",
            "train_coarse_labels": "9f99c2cdae93cf09da2fc6497c96ab042c6dc02c456a2e86dcffd2305df5a2e9",
            "test_images": "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
            "test_labels": "80031c23f8300724c6fbc588e4bccbe41c6392041782148727bb497b0132c4ad",
            "test_coarse_labels": "e2f01c218d5f70ed60e3d80cb12337f835005bcae62b64fefcaa2b647612af83",
        },
    ),
    # No sha256 here: nothing of ours was ever compared with the whole of the official files, so
    # only their own md5 vouches.
    "svhn": Source(
        "svhn",
        train_per_class=(4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        test_per_class=(1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
        archives=(
            Archive(
                "train_32x32.mat",
                f"{HOUSENUMBERS}/train_32x32.mat",
                "e26dedcc434d2e4c54c9b2d4a06d8373",
            ),
            Archive(
                "test_32x32.mat",
                f"{HOUSENUMBERS}/test_32x32.mat",
                "eb5a983be6a315427106f1b164d9cef3",
            ),
        ),
        recropped=True,
    ),
}


def source_of(name: str) -> Source:
    """The set of that name, or an error that names the nearest one."""
    if name not in SOURCES:
        near = difflib.get_close_matches(str(name).lower(), SOURCES, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}? There" if near else "there"
        raise DataError(f"there is no image set {name!r}; {hint} are {', '.join(SOURCES)}")
    return SOURCES[name]


def sha256_of(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def check_arrays(source: Source, arrays: Arrays, where: str) -> None:
    """Shapes, types, label ranges and the number of images in every class; `where` names the origin
    in the message.
    """

    def wrong(what: str) -> DataError:
        return DataError(f"{where} is not {source.name}: {what}")

    for part in PARTS:
        n = source.count(part)
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if images.shape != (n, *PICTURE) or images.dtype != np.uint8:
            raise wrong(
                f"the {part} images are {images.dtype} of shape {images.shape} instead of uint8 {(n, *PICTURE)}"
            )
        _check_labels(labels, n, source.n_classes, f"{part} labels", wrong)
        per_class = tuple(np.bincount(labels, minlength=source.n_classes).tolist())
        if per_class != source.per_class(part):
            label, found, expected = next(
                (k, a, b)
                for k, (a, b) in enumerate(zip(per_class, source.per_class(part), strict=True))
                if a != b
            )
            raise wrong(f"class {label} has {found:,} {part} images instead of {expected:,}")
        if source.n_coarse:
            _check_labels(
                arrays[f"{part}_coarse_labels"], n, source.n_coarse, f"{part} coarse labels", wrong
            )


def _check_labels(labels: npt.NDArray[Any], n: int, n_classes: int, what: str, wrong: Any) -> None:
    if labels.shape != (n,) or labels.dtype != np.int64:
        raise wrong(
            f"the {what} are {labels.dtype} of shape {labels.shape} instead of int64 ({n},)"
        )
    if labels.min() < 0 or labels.max() >= n_classes:
        raise wrong(
            f"the {what} lie between {labels.min()} and {labels.max()} instead of 0 and {n_classes - 1}"
        )


def check_sha256(arrays: Arrays, expected: Mapping[str, str], where: str) -> None:
    """Compare arrays with checksums by name; names without one pass."""
    for name, sha256 in expected.items():
        found = sha256_of(arrays[name])
        if found != sha256:
            raise DataError(
                f"the {name.replace('_', ' ')} of {where} have sha256 {found} instead of {sha256}; get that data again"
            )
