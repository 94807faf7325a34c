"""What does a step on a small network cost on one CPU core, compared with posteriors' SGHMC?

An MLP (64-64-10, batch 64), where the time goes into overhead, and a small CNN (two 3x3
convolutions on 16x16 images, batch 64), where it goes into arithmetic. Both libraries sample the
same posterior from the same minibatches of data in memory. torchrex also evaluates energies and,
from two rungs on, the variance and the swap.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchrex
from record import surroundings, write

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import posteriors

N, BATCH, FRICTION = 4096, 64, 0.1


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP": (mlp, (64,), 400),
    "CNN": (cnn, (3, 16, 16), 40),
}


def data(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, *shape, generator=generator), torch.randint(10, (N,), generator=generator)


def ours(
    make: Callable[[], nn.Module], shape: tuple[int, ...], rungs: int
) -> Callable[[int], None]:
    energy = torchrex.PosteriorEnergy(F.cross_entropy, n_data=N, prior=torchrex.GaussianPrior(1.0))
    ladder = torchrex.Ladder([1.0 + 0.01 * rung for rung in range(rungs)], 1e-6)
    run = torchrex.ModuleExchange(
        torchrex.ModuleEnsemble(make, energy, torchrex.SGHMC(FRICTION)), ladder
    )
    loader = torchrex.DeviceLoader(data(shape), BATCH)

    def steps(n: int) -> None:
        for _ in run.advance(n, loader):
            pass

    return steps


def theirs(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[int], None]:
    """As in the documentation of posteriors: a log posterior through functional_call, its batches
    from the same loader.
    """
    module = make()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def log_posterior(values: dict[str, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
        output = torch.func.functional_call(module, values, (batch[0],))
        prior = -0.5 * sum(
            (value.square().sum() for value in values.values()), start=torch.zeros(())
        )
        return prior - N * F.cross_entropy(output, batch[1]), output

    transform = posteriors.sgmcmc.sghmc.build(
        log_posterior, lr=1e-3, alpha=FRICTION, temperature=1.0
    )
    state = transform.init(parameters)
    loader = torchrex.DeviceLoader(data(shape), BATCH)

    def steps(n: int) -> None:
        nonlocal state
        for _ in range(n):
            state, _ = transform.update(state, loader.next())

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for net, (make, shape, n) in NETS.items():
        contestants = {("torchrex", rungs): ours(make, shape, rungs) for rungs in (1, 2, 4)}
        contestants["posteriors", 1] = theirs(make, shape)
        times: dict[Any, list[float]] = {key: [] for key in contestants}
        for repeat in range(arguments.repeats + 1):  # they take turns, and the first turn warms up
            for key, steps in contestants.items():
                began = time.perf_counter()
                steps(n)
                if repeat:
                    times[key].append((time.perf_counter() - began) / n * 1e6)
        base = median(times["torchrex", 1])
        for (name, rungs), values in times.items():
            results.append(
                {
                    "net": net,
                    "name": name,
                    "rungs": rungs,
                    "us_per_step": {
                        "median": median(values),
                        "min": min(values),
                        "max": max(values),
                    },
                    "times_torchrex_one_rung": median(values) / base,
                }
            )
            print(
                f"{net} {name} rungs={rungs}: {median(values):.0f} us a step, "
                f"{median(values) / base:.2f} x",
                flush=True,
            )
    record = surroundings(__file__, "torch", "torchrex", "posteriors")
    write(arguments.out, {**record, "results": results})


if __name__ == "__main__":
    main()
