"""What does it cost that a swap and the move after it look at the same minibatch, when the rungs
have unequal learning rates?

A mean of Gaussian data in one dimension, whose posterior is exact; two rungs at temperatures 1 and
2, SGLD, the paired variance, F = 1. The lr a replica gets then depends on the swap, the swap on the
minibatch, and so does the gradient it is multiplied with. Stored is the variance of rung 0 over
that of the posterior, at several learning rates; SGLD's own excess vanishes with the lr, a bias of
the exchange does not.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchrex
from record import surroundings, write

N, BATCH = 1_024, 64
WAYS = {
    "equal lrs, a swap test at every step": (1.0, 1),
    "hot lr x 1.5, a swap test at every step": (1.5, 1),
    "hot lr x 3, a swap test at every step": (3.0, 1),
    "hot lr x 3, a swap test every 20 steps": (3.0, 20),
}


def target(noise: float) -> tuple[torchrex.TallPosterior, float, float]:
    """Data whose minibatch gradient has `noise` times the variance that the posterior's stiffness
    has; mean and variance.
    """
    generator = torch.Generator().manual_seed(0)
    # y_i of variance v and a likelihood of variance s2: stiffness N / s2, gradient noise N^2 v / (n
    # s2^2) = noise * stiffness.
    spread = noise * BATCH / N
    y = torch.randn(N, generator=generator, dtype=torch.float64)
    y = (y - y.mean()) / y.std(correction=0) * math.sqrt(spread)

    def log_likelihood(w: Tensor, y: Tensor) -> Tensor:
        return -0.5 * (y - w.squeeze(-1)).square()

    def log_prior(w: Tensor) -> Tensor:
        return 0.0 * w.squeeze(-1)

    return (
        torchrex.TallPosterior(log_likelihood, log_prior, (y,), dim=1, batch_size=BATCH),
        0.0,
        1.0 / N,
    )


def measure(
    noise: float, ratio: float, interval: int, lr: float, *, n_runs: int, n_steps: int
) -> dict[str, Any]:
    posterior, mean, variance = target(noise)
    temperatures = (1.0, 2.0)
    generator = torch.Generator().manual_seed(1)
    scales = torch.tensor(temperatures, dtype=torch.float64).mul(variance).sqrt()[:, None, None]
    draws = torchrex.sample(
        posterior,
        temperatures=temperatures,
        lr=[lr / N, ratio * lr / N],
        n_steps=n_steps,
        n_runs=n_runs,
        thin=5,
        burn_in=n_steps // 10,
        noise=torchrex.PairedVariance(0.3),
        swap_interval=interval,
        initial=mean + scales * torch.randn(2, n_runs, 1, generator=generator, dtype=torch.float64),
        dtype=torch.float64,
        seed=2,
    )
    per_run = (draws.values[..., 0] - mean).square().mean(1) / variance
    return {
        "lr_times_stiffness": lr,
        "variance_ratio": float(per_run.mean()),
        "se": float(per_run.std() / math.sqrt(n_runs)),
        "acceptance_rate": float(draws.acceptance_rate[0]),
    }


def limit(results: list[dict[str, Any]]) -> dict[str, float]:
    """The straight line through the two smallest lrs at lr 0, where one is twice the other."""
    *_, larger, smaller = results
    se = math.hypot(2 * smaller["se"], larger["se"])
    return {"variance_ratio": 2 * smaller["variance_ratio"] - larger["variance_ratio"], "se": se}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--noise",
        type=float,
        default=4.0,
        help="variance of the minibatch gradient over the stiffness",
    )
    parser.add_argument("--runs", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name, (ratio, interval) in WAYS.items():
        for lr in (0.02, 0.01, 0.005):
            one = measure(
                arguments.noise, ratio, interval, lr, n_runs=arguments.runs, n_steps=arguments.steps
            )
            results.append({"name": name, **one})
            print(
                f"{name}, lr {lr}: {one['variance_ratio']:.4f} ± {one['se']:.4f}, "
                f"{one['acceptance_rate']:.2f} accepted",
                flush=True,
            )
    limits = {name: limit([r for r in results if r["name"] == name]) for name in WAYS}
    record = surroundings(__file__, "torch", "torchrex")
    write(arguments.out, {**record, "noise": arguments.noise, "results": results, "limits": limits})


if __name__ == "__main__":
    main()
