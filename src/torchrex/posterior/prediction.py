"""One pass over data, and how good and how uncertain the predictions of classifiers are.

    accuracy   share of examples whose most probable class is the label
    nll        mean over examples of -log p(label)
    brier      mean over examples of the SUM over classes of (p - onehot(label))^2: 0 to 2,
               twice the binary convention
    ece        15 equal bins of the top probability: sum of share * |accuracy - mean confidence|

Logarithms are natural. Everything is float64, but torchmetrics bins confidences in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrex.errors import InvalidArgumentError, import_extra
from torchrex.rng import taken

ECE_BINS = 15
SUM_TOLERANCE = 1e-3  # of a row of probabilities; wide enough for float16


def classification_metrics(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """`accuracy`, `nll`, `brier` and `ece` of `probabilities` (n, classes) given `labels` (n,).

    A probability that underflowed to 0 counts as the smallest normal number of its dtype, so the
    nll stays finite: at most 87.3 per example in float32, 708.4 in float64. There is one host
    synchronisation, at the end.
    """
    torchmetrics = import_extra("torchmetrics.functional.classification", "metrics")
    shape, is_float = tuple(probabilities.shape), probabilities.is_floating_point()
    if len(shape) != 2 or shape[0] == 0 or shape[1] < 2 or not is_float:
        raise InvalidArgumentError(
            "probabilities must be floating numbers (n, classes) with n >= 1 and 2 classes or more,"
            f" got {probabilities.dtype} of shape {shape}"
        )
    n, n_classes = shape
    if labels.shape != (n,) or labels.is_floating_point() or labels.is_complex():
        raise InvalidArgumentError(
            f"labels must be {n} class numbers, one for each row of probabilities, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    given = labels.to(probabilities.device, torch.long)
    # An index out of range would end the CUDA context; it is reported below.
    label = given.clamp(0, n_classes - 1)
    p = probabilities.detach().double()
    # torchmetrics applies a softmax to anything outside [0, 1]: not to a rounding error.
    unit = p.clamp(0, 1)
    of_label = p.gather(1, label[:, None]).squeeze(1)
    onehot = torch.arange(n_classes, device=p.device) == label[:, None]
    values = {
        "accuracy": (unit.argmax(1) == label).double().mean(),
        "nll": -of_label.clamp(min=torch.finfo(probabilities.dtype).tiny).log().mean(),
        "brier": (p - onehot.double()).square().sum(1).mean(),
        "ece": torchmetrics.multiclass_calibration_error(
            unit, label, num_classes=n_classes, n_bins=ECE_BINS, norm="l1", validate_args=False
        ),
    }
    checks = [(p.sum(1) - 1).abs().max(), p.min(), given.min(), given.max()]
    everything = torch.stack([value.double() for value in [*values.values(), *checks]])
    *numbers, off, lowest, first, last = everything.tolist()
    if not (off <= SUM_TOLERANCE and lowest >= -SUM_TOLERANCE):  # NaN fails as well
        raise InvalidArgumentError(
            f"every row of probabilities must be >= 0 and sum to 1, but a sum is off by {off:.3g} "
            f"and the lowest entry is {lowest:.3g}; for logits pass logits.softmax(1)"
        )
    if first < 0 or last >= n_classes:
        raise InvalidArgumentError(f"labels are from {first:g} to {last:g}, not 0..{n_classes - 1}")
    return dict(zip(values, numbers, strict=True))


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """-sum_c p_c log p_c over the last axis, in nats; a class of probability 0 adds nothing."""
    entropy: Tensor = torch.special.entr(probabilities).sum(-1)
    return entropy


@dataclass(repr=False)
class Prediction:
    """The predictive distribution of a set of draws on a data set."""

    probabilities: Tensor  # (n, classes): mean over draws of softmax(logits)
    labels: Tensor | None  # (n,), or None if the data have no targets
    entropy: Tensor  # (n,): entropy of the mean, the total uncertainty
    mutual_information: Tensor  # (n,): `entropy` minus the mean entropy of the draws
    n_draws: int

    def metrics(self) -> dict[str, float]:
        """`accuracy`, `nll`, `brier` and `ece` of the mean over draws."""
        if self.labels is None:
            raise InvalidArgumentError("metrics need targets: give batches (x, y)")
        return classification_metrics(self.probabilities, self.labels)

    def __repr__(self) -> str:
        n, classes = self.probabilities.shape
        return f"Prediction({self.n_draws} draws on {n:,} examples, {classes} classes)"


@dataclass
class Examples:
    """What one pass over the data showed, to be compared with the next pass."""

    marks: Tensor  # (n, ...): targets, or without targets the mean of each input
    labelled: bool


class Pass(NamedTuple):
    """What every model gave for all examples."""

    kind: str  # of the output: a "tensor", "tuple" or "dict"
    values: dict[str, Tensor]  # (models, n, ...); of classifiers `logits` and `probabilities`
    examples: Examples


def split_batch(batch: Any, target_key: str) -> tuple[Any, Tensor | None]:
    """Inputs and target of `(x, ..., y)` or of a dict; `x` and `(x,)` have no target."""
    if isinstance(batch, Tensor):
        return (batch,), None
    if isinstance(batch, Mapping):
        if target_key not in batch:
            raise InvalidArgumentError(
                f"a batch has no {target_key!r}, only {sorted(batch)}; name it with target_key=..."
            )
        inputs = {name: value for name, value in batch.items() if name != target_key}
        return inputs, batch[target_key]
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) > 0:
        return (tuple(batch[:-1]), batch[-1]) if len(batch) > 1 else (tuple(batch), None)
    raise InvalidArgumentError(f"a batch is (x, ..., y), a dict or a tensor, got {_form(batch)}")


def _form(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"{value.dtype} of shape {tuple(value.shape)}" if is_tensor else type(value).__name__


def _marks_of(batch: Any, n: int, target_key: str, classes: bool) -> tuple[Tensor, bool]:
    """What distinguishes the examples of a batch, (n, ...), and whether these are targets."""
    target: Any = None
    try:
        _, target = split_batch(batch, target_key)
    except InvalidArgumentError:  # a function of the user's may take any batch
        if classes:
            raise
    shape = tuple(target.shape) if isinstance(target, Tensor) else ()
    if classes and target is not None:
        if shape != (n,) or target.is_floating_point() or target.is_complex():
            raise InvalidArgumentError(f"a target must be {n} class numbers, got {_form(target)}")
        return target.detach().long(), True
    if shape:
        if shape[0] != n:
            raise InvalidArgumentError(
                f"outputs must have one row per example, got {n} rows for a target of shape {shape}"
            )
        return target.detach(), True
    tensors = (x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim)
    inputs = next((x for x in tensors if len(x) == n), torch.zeros(n))
    return inputs.detach().reshape(n, -1).double().mean(1), False


def _named_outputs(output: Any, name: str, classes: bool) -> tuple[str, dict[str, Tensor]]:
    """The kind of an output, and its tensors by name, with the examples first."""
    if classes:
        is_matrix = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] >= 2
        if not is_matrix or not output.is_floating_point():
            raise InvalidArgumentError(
                "outputs must be logits (n, classes) of at least two classes, but "
                f"{name} gave {_form(output)}; this average is for classifiers, others need "
                'output="values"'
            )
        return "tensor", {"logits": output}
    kind, named = "tensor", {"output": output}
    if isinstance(output, Mapping):
        kind, named = "dict", {str(key): value for key, value in output.items()}
    elif isinstance(output, tuple | list):
        kind, named = "tuple", {str(k): value for k, value in enumerate(output)}
    are_floats = all(isinstance(v, Tensor) and v.is_floating_point() for v in named.values())
    if not are_floats or len({value.shape[:1] for value in named.values()}) != 1:
        forms = ", ".join(map(_form, named.values()))
        raise InvalidArgumentError(
            "an output must have floating numbers and one row per example, in a tensor or a tuple "
            f"or dict of such, but {name} gave {forms}; choose by output=lambda model, batch: ..."
        )
    return kind, named


def predict_all(
    data: Iterable[Any],
    predict: Callable[[Any, int], Any],
    *,
    names: Sequence[str],
    first: Examples | None,
    target_key: str,
    classes: bool,
) -> Pass:
    """The outputs of one pass over `data`; of classifiers logits, and float64 probabilities.

    `predict(batch, k)` gives the output of model k, called `names[k]` in error messages. The pass
    must show the examples of the `first` pass. There is one host synchronisation, at the end.
    """
    parts: list[list[dict[str, Tensor]]] = [[] for _ in names]
    marks: list[Tensor] = []
    labelled, kind, is_number = True, "", False
    for batch in taken(data):
        for model, name in enumerate(names):
            kind, named = _named_outputs(predict(batch, model), name, classes)
            is_number = not next(iter(named.values())).ndim
            if is_number and marks:
                raise InvalidArgumentError(
                    f"{name} gave one number for each of several batches; data is a list of "
                    "batches: give [x] for a tensor x, or outputs with one row per example"
                )
            # A captured model may write its next output into the same memory, hence the copy.
            copies = {key: value.detach().clone() for key, value in named.items()}
            parts[model].append({k: v[None] if is_number else v for k, v in copies.items()})
        n = len(next(iter(parts[0][-1].values())))
        mark, labelled = _marks_of(None if is_number else batch, n, target_key, classes)
        marks.append(mark)
    if not marks:
        raise InvalidArgumentError("data gave no batches; give a DataLoader that is not empty")
    values = {
        key: torch.stack([torch.cat([part[key] for part in of_model]) for of_model in parts])
        for key in parts[0][0]
    }
    device = next(iter(values.values())).device
    seen = Examples(torch.cat(marks).to(device), labelled)
    n = len(seen.marks)
    first = first or seen
    if (seen.marks.shape, labelled) != (first.marks.shape, first.labelled):
        raise InvalidArgumentError(
            f"data changed between two draws: {len(first.marks)} examples at first, now {n}; every "
            "pass must show the same examples in the same order (shuffle=False, drop_last=False)"
        )
    if classes:
        values["probabilities"] = values["logits"].double().softmax(-1)
        is_bad = values["probabilities"].isnan().any(-1)
    else:
        is_bad = torch.stack([_by_row(~v.isfinite(), 2) for v in values.values()]).any(0)
    before = first.marks.to(device)
    is_missing = seen.marks.isnan() & before.isnan()
    moved = _by_row((seen.marks != before) & ~is_missing, 1).sum()
    *broken, n_moved = torch.cat([is_bad.sum(-1), moved[None]]).tolist()
    if n_moved:
        raise InvalidArgumentError(
            f"{'labels' if labelled else 'inputs'} of {n_moved} of {n} examples differ from the "
            "first pass over data: their order changes; use a DataLoader with shuffle=False"
        )
    what = "logits" if classes else "outputs"
    for name, count in zip(names, broken, strict=True):
        if count:
            raise InvalidArgumentError(
                f"{name} gave NaN or infinite {what} for {count} of {n} examples; the draw was not "
                "added. Lower the learning rate of that rung, or raise burn_in"
            )
    return Pass(kind, values, seen)


def _by_row(flags: Tensor, axes: int) -> Tensor:
    """Is any of the flags set, for each index of the first axes?"""
    shape = flags.shape[:axes]
    return flags.reshape(*shape, math.prod(flags.shape[axes:])).any(-1)
