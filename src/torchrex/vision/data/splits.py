"""Which examples train, validate or have a label: class-balanced choices that the seed decides, the
same on every device.

Within a class the seed fixes one order, and a choice takes its beginning: of two class-balanced
choices with the same seed the smaller lies within the larger, so a study over numbers of labels
adds labels and does not change them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.rng import Streams


def stratified_split(labels: Tensor, n_validation: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices for training and for validation; every class gives the validation set equally many,
    to within one.

    Which classes give one more, where it does not come out even, is the seed's choice. Every class
    keeps something to train on.
    """
    sizes = _class_sizes(labels)
    n_classes, smallest = len(sizes), int(sizes.min())
    most = (smallest - 1) * n_classes
    if not _is_count(n_validation) or n_validation > most:
        raise InvalidArgumentError(
            f"n_validation must lie between 1 and {most:,}, so that each of {n_classes} classes gives equally many and keeps one "
            f"(class {int(sizes.argmin())} has {smallest:,}); got {n_validation!r}"
        )
    generator = Streams(seed)["split.validation"]
    lucky = torch.randperm(n_classes, generator=generator)
    quota = torch.full((n_classes,), n_validation // n_classes)
    quota[lucky[: n_validation % n_classes]] += 1
    chosen = _first_of_each_class(labels, quota, generator)
    return (~chosen).nonzero().squeeze(1).to(labels.device), chosen.nonzero().squeeze(1).to(
        labels.device
    )


def label_subset(labels: Tensor, n_labelled: int, seed: int) -> Tensor:
    """Indices of the examples that keep their labels: exactly equally many of every class."""
    sizes = _class_sizes(labels)
    n_classes, smallest = len(sizes), int(sizes.min())
    most = smallest * n_classes
    if not _is_count(n_labelled) or n_labelled > most:
        raise InvalidArgumentError(
            f"n_labelled must lie between {n_classes} and {most:,}, equally many of each of {n_classes} classes "
            f"(class {int(sizes.argmin())} has {smallest:,}); got {n_labelled!r}"
        )
    if n_labelled % n_classes:
        nearest = max(1, round(n_labelled / n_classes)) * n_classes
        raise InvalidArgumentError(
            f"n_labelled must be a multiple of the {n_classes} classes, got {n_labelled:,}; the nearest is {nearest:,}"
        )
    quota = torch.full((n_classes,), n_labelled // n_classes)
    return (
        _first_of_each_class(labels, quota, Streams(seed)["split.labelled"])
        .nonzero()
        .squeeze(1)
        .to(labels.device)
    )


def stratified_subset(labels: Tensor, n: int, seed: int) -> Tensor:
    """Indices of n examples, as balanced over the classes as their sizes allow."""
    sizes = _class_sizes(labels)
    if not _is_count(n) or n > len(labels):
        raise InvalidArgumentError(
            f"n must lie between 1 and the {len(labels):,} examples, got {n!r}"
        )
    generator = Streams(seed)["split.subset"]
    lucky = torch.randperm(len(sizes), generator=generator)
    quota = torch.zeros_like(sizes)
    # Share out what is left among the classes that have more to give; a small class that is used up
    # leaves its share to others.
    while left := n - int(quota.sum()):
        able = lucky[(quota < sizes)[lucky]]
        if left < len(able):
            quota[able[:left]] += 1
        else:
            quota[able] = torch.minimum(sizes[able], quota[able] + left // len(able))
    return _first_of_each_class(labels, quota, generator).nonzero().squeeze(1).to(labels.device)


def _class_sizes(labels: Tensor) -> Tensor:
    """Examples of every class 0, 1, ..., or an error if one has none."""
    if (
        not isinstance(labels, Tensor)
        or labels.ndim != 1
        or labels.is_floating_point()
        or labels.dtype == torch.bool
    ):
        given = (
            f"{labels.dtype} of shape {tuple(labels.shape)}"
            if isinstance(labels, Tensor)
            else type(labels).__name__
        )
        raise InvalidArgumentError(
            f"labels must be a tensor of whole numbers with one label per example, got {given}"
        )
    if not len(labels) or int(labels.min()) < 0:
        given = f"the label {int(labels.min())}" if len(labels) else "none"
        raise InvalidArgumentError(f"labels must be classes 0, 1, 2, ..., got {given}")
    sizes = torch.bincount(labels.cpu())
    if not bool(sizes.all()):
        empty = int((sizes == 0).nonzero()[0])
        raise InvalidArgumentError(
            f"class {empty} has no examples among labels 0 to {len(sizes) - 1}; renumber the classes"
        )
    return sizes


def _first_of_each_class(labels: Tensor, quota: Tensor, generator: torch.Generator) -> Tensor:
    """A mask with `quota` examples of each class, the first ones of the class's order; always on
    the CPU.
    """
    labels = labels.cpu()
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in enumerate(quota.tolist()):
        members = (labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        chosen[members[order[:count]]] = True
    return chosen


def _is_count(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 1
