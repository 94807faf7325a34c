r"""Do estimators of the noise variance agree on a real checkpoint, within standard errors?

Two replicas of a network trained on CIFAR-10, at their last checkpoint and on the same augmented
minibatches, as in a step. The variance of repeated energies (as in the paper, with many more draws
than its ten) is compared with the free ones from per-example losses, unpaired and paired. BatchNorm
uses the statistics of its minibatch, so the examples of a batch are not quite independent.

    python benchmarks/estimators.py --checkpoint RUN/checkpoints/step=... \
        --out results/estimators.json
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from record import surroundings, write
from torchrex.exchange import PerExample, RepeatedDraws
from torchrex.experiments.images import image_config

STANDING = torch.tensor([[0], [1]])  # the variances do not depend on who is on which rung
GROUP = 10  # energies that one measurement of the paper takes


def network(checkpoint: Path, replica: int, model: nn.Module) -> nn.Module:
    """The network of one replica, in training mode."""
    tensors = load_file(checkpoint / f"replica={replica}.safetensors")
    state = {}
    for part in ("parameters", "buffers"):
        prefix = f"/replicas/{replica}/{part}/"
        state |= {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
    model.load_state_dict(state)
    return model.train()


def losses(checkpoint: Path, n_batches: int) -> tuple[Tensor, int]:
    """Per-example losses (batches, replicas, n) on fresh minibatches, and the number of data."""
    config = image_config("icml2020", "cifar10", "resnet20", "resghmc")
    loader = config.batches(0, torch.device("cpu")).train
    networks = [network(checkpoint, replica, config.model()) for replica in (0, 1)]
    energy = config.energy()
    rows = []
    for k in range(n_batches):
        batch = loader.next()
        with torch.no_grad():
            rows.append(torch.stack([energy.per_example(each, batch) for each in networks]))
        if k % 50 == 49:
            print(f"{k + 1} of {n_batches} batches", flush=True)
    return torch.stack(rows).double(), config.n_data


def mean_and_error(values: Tensor) -> dict[str, float]:
    return {"sigma2": float(values.mean()), "se": float(values.std() / math.sqrt(len(values)))}


def compare(per_example: Tensor, n_data: int) -> dict[str, Any]:
    """Each estimator's mean over independent measurements, with the standard error."""
    energies = n_data * per_example.mean(2)  # (batches, replicas)
    groups = energies[: len(energies) // GROUP * GROUP].unflatten(0, (-1, GROUP))
    estimators: dict[str, Any] = {}
    for paired in (False, True):
        name = "paired" if paired else "unpaired"
        repeated = RepeatedDraws(GROUP, paired=paired)
        free = PerExample(paired=paired)
        by_repetition = torch.cat(
            [repeated.sample(group[..., None], STANDING)[0] for group in groups]
        )
        scale = free.scale(per_example.shape[-1], n_data, finite_population=True)
        by_example = scale * torch.cat(
            [free.sample(each[:, None], STANDING)[0] for each in per_example]
        )
        one, other = mean_and_error(by_repetition), mean_and_error(by_example)
        z = (one["sigma2"] - other["sigma2"]) / math.hypot(one["se"], other["se"])
        estimators[name] = {
            f"{GROUP} repeated draws": one,
            "per example, free": other,
            "difference_in_standard_errors": z,
        }
    free = (estimators[name]["per example, free"]["sigma2"] for name in ("paired", "unpaired"))
    estimators["paired_over_unpaired"] = next(free) / next(free)
    return estimators


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    began = time.perf_counter()
    per_example, n_data = losses(given.checkpoint, given.batches)
    estimators = compare(per_example, n_data)
    numbers = {
        "what": "noise variance of summed energies at the last checkpoint of "
        "icml2020/cifar10-resnet20, seed 0, 500 epochs",
        "step": int(given.checkpoint.name.removeprefix("step=")),
        "batches": given.batches,
        "batch_size": per_example.shape[2],
        "mean_loss": per_example.mean((0, 2)).tolist(),
        "estimators": estimators,
        "seconds": time.perf_counter() - began,
    }
    write(given.out, {**numbers, **surroundings(__file__, "torch", "torchrex")})
    print(estimators)


if __name__ == "__main__":
    main()
