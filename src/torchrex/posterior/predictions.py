"""One pass of models over data: what a batch is, what the outputs must be, and whether every pass
shows the same examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError


@dataclass
class Examples:
    """What one pass over the data showed, to be compared with the next pass."""

    marks: Tensor  # (n,): labels, or without labels the mean of each input
    labelled: bool


def split_batch(batch: Any, target_key: str) -> tuple[Any, Tensor | None]:
    """Inputs and target of a batch: `(x, ..., y)`, a dict with `target_key`, or inputs alone as a
    tensor or `(x,)`.
    """
    if isinstance(batch, Tensor):
        return (batch,), None
    if isinstance(batch, Mapping):
        if target_key not in batch:
            raise InvalidArgumentError(
                f"a batch has no {target_key!r}, only {sorted(batch)}; name it with target_key=..."
            )
        return {name: value for name, value in batch.items() if name != target_key}, batch[
            target_key
        ]
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) > 0:
        return (tuple(batch[:-1]), batch[-1]) if len(batch) > 1 else (tuple(batch), None)
    raise InvalidArgumentError(
        f"a batch must be a tuple (x, ..., y), a dict or a tensor, got {type(batch).__name__}"
    )


def _marks_of(batch: Any, n: int, target_key: str) -> tuple[Tensor, bool]:
    """What tells the examples of a batch apart, (n,), and whether these are labels."""
    inputs, target = split_batch(batch, target_key)
    if target is None:
        return inputs[0].detach().reshape(n, -1).double().mean(1), False
    if (
        not isinstance(target, Tensor)
        or target.shape != (n,)
        or target.is_floating_point()
        or target.is_complex()
    ):
        got = (
            f"{target.dtype} of shape {tuple(target.shape)}"
            if isinstance(target, Tensor)
            else type(target).__name__
        )
        raise InvalidArgumentError(
            f"the target of a batch of {n} must be {n} class numbers, got {got}"
        )
    return target.detach().long(), True


def predict_all(
    data: Iterable[Any],
    predict: Callable[[Any, int], Tensor],
    *,
    names: Sequence[str],
    first: Examples | None,
    target_key: str,
) -> tuple[Tensor, Tensor, Examples]:
    """Logits (models, n, classes) and float64 probabilities of one pass over `data`, checked
    against the `first` pass.

    `predict(batch, k)` gives the logits of model k, called `names[k]` in error messages. One host
    synchronisation, at the end.
    """
    logits: list[list[Tensor]] = [[] for _ in names]
    marks: list[Tensor] = []
    labelled = True
    for batch in data:
        for model, name in enumerate(names):
            output = predict(batch, model)
            if (
                not isinstance(output, Tensor)
                or output.ndim != 2
                or output.shape[1] < 2
                or not output.is_floating_point()
            ):
                got = (
                    f"{output.dtype} of shape {tuple(output.shape)}"
                    if isinstance(output, Tensor)
                    else type(output).__name__
                )
                raise InvalidArgumentError(
                    f"outputs must be logits (n, classes) of at least two classes, but {name} gave {got}; "
                    "a posterior average is made for classifiers"
                )
            # A captured model may write its next output into the same memory, hence the copy before
            # the next call.
            logits[model].append(output.detach().clone())
        mark, labelled = _marks_of(batch, len(logits[0][-1]), target_key)
        marks.append(mark)
    if not marks:
        raise InvalidArgumentError(
            "data gave no batches; give a DataLoader or a list of batches that is not empty"
        )
    values = torch.stack([torch.cat(of_model) for of_model in logits])
    seen = Examples(torch.cat(marks).to(values.device), labelled)
    probabilities = values.double().softmax(-1)
    if first is not None and (
        len(seen.marks) != len(first.marks) or seen.labelled != first.labelled
    ):
        raise InvalidArgumentError(
            f"data changed between two draws: {len(first.marks)} examples at first, now {len(seen.marks)}; "
            "every pass must show the same examples in the same order (shuffle=False, drop_last=False)"
        )
    moved = (
        torch.zeros_like(seen.marks, dtype=torch.bool)
        if first is None
        else seen.marks != first.marks.to(values.device)
    )
    *broken, n_moved = torch.cat(
        [probabilities.isnan().any(-1).sum(-1), moved.sum()[None]]
    ).tolist()
    if n_moved:
        raise InvalidArgumentError(
            f"{'labels' if labelled else 'inputs'} of {n_moved} of {len(moved)} examples differ from the first pass over data: "
            "the order changes from pass to pass; use a DataLoader with shuffle=False"
        )
    for name, count in zip(names, broken, strict=True):
        if count:
            raise InvalidArgumentError(
                f"{name} gave NaN or infinite logits for {count} of {len(moved)} examples; the draw was not added. "
                "Lower the learning rate of that rung, or raise burn_in"
            )
    return values, probabilities, seen
