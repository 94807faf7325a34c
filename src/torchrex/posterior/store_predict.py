"""Predictions from stored draws: one module takes the weights of one draw after the other, so
memory holds one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrex.posterior.metrics import Prediction, predictive_entropy
from torchrex.posterior.predictions import Examples, predict_all, split_batch
from torchrex.posterior.store_files import load_into, read_draw
from torchrex.posterior.store_index import StoredDraw


@torch.no_grad()
def predict_with(
    model: nn.Module | Callable[[], nn.Module],
    data: Iterable[Any],
    folder: Path,
    chosen: Sequence[StoredDraw],
    *,
    target_key: str,
    forward: Callable[[nn.Module, Any], Tensor] | None,
) -> Prediction:
    """The mean over the chosen draws, at least one, of softmax(logits); see `DrawStore.predict`."""
    module = (copy.deepcopy(model) if isinstance(model, nn.Module) else model()).eval()
    call = forward or (lambda module, batch: _call(module, batch, target_key))
    examples: Examples | None = None
    mean: Tensor | None = None
    entropy: Tensor | None = None
    for draw in chosen:
        load_into(module, read_draw(folder, draw), draw.file)
        name = f"the draw of rung {draw.rung} at step {draw.step}"
        _, (probabilities,), seen = predict_all(
            data,
            lambda batch, _: call(module, batch),
            names=[name],
            first=examples,
            target_key=target_key,
        )
        examples = examples or seen
        mean = probabilities if mean is None else mean + probabilities
        own = predictive_entropy(probabilities)
        entropy = own if entropy is None else entropy + own
    assert mean is not None
    assert entropy is not None
    assert examples is not None
    mean, total = mean / len(chosen), predictive_entropy(mean / len(chosen))
    labels = examples.marks if examples.labelled else None
    return Prediction(mean, labels, total, total - entropy / len(chosen), len(chosen))


def _call(module: nn.Module, batch: Any, target_key: str) -> Tensor:
    inputs, _ = split_batch(batch, target_key)
    here = next(
        (
            tensor.device
            for tensors in (module.parameters(), module.buffers())
            for tensor in tensors
        ),
        torch.device("cpu"),
    )

    def moved(value: Any) -> Any:
        return value.to(here) if isinstance(value, Tensor) else value

    if isinstance(inputs, Mapping):
        return cast(Tensor, module(**{name: moved(value) for name, value in inputs.items()}))
    return cast(Tensor, module(*map(moved, inputs)))
