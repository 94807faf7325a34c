"""Microseconds of CPU time a step of a density that factors a covariance: the posterior of a
Gaussian process's length, amplitude and noise, 20 observations, as a user writes it in four ways.

*loop* is what torchrex does: the factors are computed in its C loop. *from Python* is what it does
with functions that the loop has no code for, here forced: the compiled step calls LAPACK through
torch, once a step. One thread, noise generation included, compilation not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor

import torchrex
from record import covariance_step_table, surroundings, write
from torchrex.density import replay

N, RUNS = 20, 8
REPETITIONS = 7
PLACES = torch.linspace(0.0, 4.0, N)
VALUES = torch.sin(2.0 * PLACES) + 0.2 * torch.randn(N, generator=torch.Generator().manual_seed(0))
SQUARES = (PLACES[:, None] - PLACES).square()


def covariance(x: Tensor) -> Tensor:
    length, amplitude, noise = x.exp()[:, :, None, None].unbind(1)
    smooth = amplitude.square() * torch.exp(-0.5 * SQUARES.to(x.dtype) / length.square())
    return smooth + (noise.square() + 1e-4) * torch.eye(N, dtype=x.dtype)


def prior(x: Tensor) -> Tensor:
    return -0.5 * x.square().sum(-1)


def solve_triangular(x: Tensor) -> Tensor:
    factor = torch.linalg.cholesky(covariance(x))
    values = VALUES.to(x.dtype).expand(len(x), N)[..., None]
    white = torch.linalg.solve_triangular(factor, values, upper=False)[..., 0]
    size = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return prior(x) - 0.5 * white.square().sum(-1) - size


def cholesky_solve(x: Tensor) -> Tensor:
    factor, values = torch.linalg.cholesky(covariance(x)), VALUES.to(x.dtype)
    weights = torch.cholesky_solve(values.expand(len(x), N)[..., None], factor)[..., 0]
    size = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return prior(x) - 0.5 * (weights * values).sum(-1) - size


def solve_and_logdet(x: Tensor) -> Tensor:
    matrix, values = covariance(x), VALUES.to(x.dtype)
    weights = torch.linalg.solve(matrix, values.expand(len(x), N))
    return prior(x) - 0.5 * (weights * values).sum(-1) - 0.5 * torch.logdet(matrix)


def multivariate_normal(x: Tensor) -> Tensor:
    law = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=x.dtype), covariance(x))
    return prior(x) + law.log_prob(VALUES.to(x.dtype))


DENSITIES = (solve_triangular, cholesky_solve, solve_and_logdet, multivariate_normal)
WAYS = ("loop", "from Python", "eager")


def start(
    density: Callable[[Tensor], Tensor], rungs: int, dtype: torch.dtype, way: str
) -> torchrex.DensityExchange:
    """A run, its first steps done; raises if it does not go the way that was asked for."""
    ensemble = torchrex.TensorEnsemble.start(
        torchrex.LogDensity(density, 3), n_rungs=rungs, n_runs=RUNS, initial=-0.5, dtype=dtype
    )
    run = torchrex.DensityExchange(
        ensemble, torchrex.Ladder((1.0, 2.0)[:rungs], 1e-3), compiled=way != "eager"
    )
    record = replay.record
    if way == "from Python":
        replay.record = lambda *arguments: None
    try:
        list(run.advance(100))
    finally:
        replay.record = record
    loop: Any = run._loop
    gone = ("loop" if loop._replay.is_recorded else "from Python") if run.is_compiled else "eager"
    if gone != way:
        raise RuntimeError(f"{density.__name__} ran {gone}, not {way}")
    return run


def cpu_time(run: torchrex.DensityExchange, seconds: float) -> float:
    """Microseconds a step."""
    began, steps = time.process_time(), 0
    while (elapsed := time.process_time() - began) < seconds:
        for _ in run.advance(100):
            pass
        steps += 100
    return 1e6 * elapsed / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one measurement")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for density in DENSITIES:
        for rungs in (1, 2):
            for dtype in (torch.float32, torch.float64):
                runs = {way: start(density, rungs, dtype, way) for way in WAYS}
                taken: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(REPETITIONS):  # in turn
                    for way, run in runs.items():
                        taken[way].append(cpu_time(run, args.seconds))
                for way, us in taken.items():
                    spread = {f.__name__: f(us) for f in (statistics.median, min, max)}
                    about = {"density": density.__name__, "rungs": rungs, "runs": RUNS}
                    about |= {"dtype": str(dtype).removeprefix("torch."), "way": way}
                    results.append({**about, "us_per_step": spread})
    record = {
        **surroundings(__file__, "torch", "torchrex"),
        "size": N,
        "repetitions": REPETITIONS,
        "seconds": args.seconds,
        "results": results,
    }
    write(args.out, record)
    print(covariance_step_table(record))


if __name__ == "__main__":
    main()
