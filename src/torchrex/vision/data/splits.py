"""Which examples train, validate or have a label: class-balanced choices decided by the seed.

Within a class the seed fixes one order, and a choice takes the first examples of it. So of two
class-balanced choices with the same seed the smaller is part of the larger: a study over numbers
of labels adds labels and does not change them. The choice is the same on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.rng import Streams


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
