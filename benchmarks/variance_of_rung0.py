"""Does the swap test keep the law of rung 0, for every estimator of sigma2, ladder and pairing?

The mean of Gaussian data in `dim` dimensions, whose posterior is exact, N = 1,000 examples and
shared minibatches of 40. The replicas start from the exact law of their rungs and do not move; only
swaps act. If the test is right, rung 0 keeps its law for ever; if it is not, nothing hides the
error. Stored is the variance of rung 0 over the right one. The logarithm of the rate of exponential
data, whose terms are skewed, is the second problem: exp(x) has a Gamma law, and the mean of rung 0
is stored too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchrex
from record import surroundings, write

N, BATCH = 1_000, 40
STILL = 1e-30  # a learning rate at which nothing moves
ESTIMATORS = {
    "present replicas": torchrex.PairedVariance(),
    "smoothing 0.3": torchrex.PairedVariance(0.3),
    "running mean": torchrex.RunningMean(torchrex.PerExample()),
    "naive": torchrex.KnownVariance(0.0),
}


def posterior(dim: int) -> torchrex.TallPosterior:
    """Data of mean 0 and variance 1, so that rung at temperature T has the law N(0, T / N)."""
    data = torch.randn(N, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = (data - data.mean(0)) / data.std(0, correction=0)

    def log_likelihood(x: Tensor, y: Tensor) -> Tensor:
        return -0.5 * (y - x).square().sum(-1)

    def log_prior(x: Tensor) -> Tensor:
        return 0.0 * x.sum(-1)

    return torchrex.TallPosterior(log_likelihood, log_prior, (data,), dim, batch_size=BATCH)


def temperatures(
    noise_std: float, n_rungs: int, dim: int, swap_batch: int = 0
) -> tuple[float, ...]:
    """Equal ratios r, such that the coldest pair has the noise s: s^2 = (1 - 1/r)^2 (N/n) dim (1 +
    r), with 1 / n less 1 / N for a swap batch of n different examples.
    """
    low, high = 1.0, 100.0
    per_example = N / swap_batch - 1.0 if swap_batch else N / BATCH
    for _ in range(100):
        ratio = math.sqrt(low * high)
        below = (1 - 1 / ratio) ** 2 * per_example * dim * (1 + ratio) < noise_std**2
        low, high = (ratio, high) if below else (low, ratio)
    return tuple(low**rung for rung in range(n_rungs))


def variance_of_rung0(
    noise: torchrex.exchange.NoiseEstimator | None,
    noise_std: float,
    n_rungs: int,
    *,
    dim: int = 1,
    pairing: torchrex.exchange.Pairing | None = None,
    swap_batch: int | None = None,
    n_runs: int = 4_000,
    tests: int = 60,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Variance of rung 0 over the right one after many tests of each pair, its standard error, and
    the acceptance rate.
    """
    ladder = torchrex.Ladder(temperatures(noise_std, n_rungs, dim, swap_batch or 0), STILL)
    z = torch.randn(n_rungs, n_runs, dim, generator=torch.Generator().manual_seed(seed))
    start = z * torch.tensor(ladder.temperatures).sqrt()[:, None, None] / math.sqrt(N)
    ensemble = torchrex.TensorEnsemble.start(
        posterior(dim), n_rungs=n_rungs, n_runs=n_runs, initial=start
    )
    run = torchrex.DensityExchange(
        ensemble, ladder, noise=noise, pairing=pairing, swap_batch=swap_batch, seed=seed
    )
    one_by_one = isinstance(run.rules.pairing, torchrex.RandomPair)
    n_steps = tests * (n_rungs - 1 if one_by_one else min(2, n_rungs - 1))
    total, accepted, proposed = torch.zeros(n_runs, dtype=torch.float64), 0.0, 0.0
    for info in steps_one_by_one(run, n_steps):
        accepted += float(info.accepted[0].double().mean())
        proposed += float(info.proposed[0].double().mean())
        if run.n_steps > n_steps // 4:
            total += info.position.double().square().mean(-1) * N
    per_run = total / (n_steps - n_steps // 4)
    # Functions of the start alone, of mean 0, explain most of the spread between runs.
    known = (z.double().square().mean(-1) - 1.0).T
    design = torch.cat(
        [torch.ones(n_runs, 1, dtype=torch.float64), known, known.square() - 2.0 / dim], 1
    )
    fit = torch.linalg.lstsq(design, per_run[:, None]).solution
    rest = per_run - (design @ fit)[:, 0]
    return (
        float(fit[0]),
        float(rest.std() / math.sqrt(n_runs - design.shape[1])),
        accepted / proposed,
    )


def steps_one_by_one(
    run: torchrex.DensityExchange, n_steps: int
) -> Iterator[torchrex.exchange.StepInfo]:
    for _ in range(n_steps):
        yield run.step()


def bias_on_exponential_data(
    noise: torchrex.exchange.NoiseEstimator | None,
    noise_std: float,
    n_rungs: int,
    *,
    swap_batch: int | None = None,
    n_runs: int,
    tests: int = 60,
    seed: int = 0,
) -> tuple[float, float]:
    """How far the mean of rung 0 goes from where it starts, in standard deviations, and its
    standard error.
    """
    data = torch.empty(N, dtype=torch.float64).exponential_(
        generator=torch.Generator().manual_seed(1)
    )
    total = float(data.sum())
    ladder = torchrex.Ladder(temperatures(noise_std, n_rungs, 1, swap_batch or 0), STILL)
    # At temperature T exp(x) ~ Gamma(N / T, total / T).
    shapes = (N / torch.tensor(ladder.temperatures, dtype=torch.float64))[:, None].expand(
        n_rungs, n_runs
    )
    drawn = torch._standard_gamma(shapes, generator=torch.Generator().manual_seed(seed))
    start = (drawn * (N / shapes) / total).log()[..., None]
    target = torchrex.TallPosterior(
        lambda x, y: x[..., 0] - y * x[..., 0].exp(),
        lambda x: 0.0 * x.sum(-1),
        (data,),
        1,
        batch_size=BATCH,
    )
    ensemble = torchrex.TensorEnsemble.start(
        target, n_rungs=n_rungs, n_runs=n_runs, initial=start, dtype=torch.float64
    )
    run = torchrex.DensityExchange(ensemble, ladder, noise=noise, swap_batch=swap_batch, seed=seed)
    n_steps = tests * (n_rungs - 1 if n_rungs > 3 else min(2, n_rungs - 1))
    mean = torch.zeros(n_runs, dtype=torch.float64)
    for info in steps_one_by_one(run, n_steps):
        if run.n_steps > n_steps // 4:
            mean += info.position[:, 0]
    moved = (mean / (n_steps - n_steps // 4) - start[0, :, 0]) * math.sqrt(
        N
    )  # the posterior's sd is 1 / sqrt(N)
    return float(moved.mean()), float(moved.std() / math.sqrt(n_runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "variance_of_rung0.json"
    )
    options = parser.parse_args()
    cases = [
        (name, s, rungs, 1, None)
        for name in ESTIMATORS
        for s in (1.0, 1.5, 2.0)
        for rungs in (2, 4, 8)
    ]
    cases += [
        ("present replicas", 2.0, rungs, dim, torchrex.EvenOdd())
        for dim in (1, 3, 10)
        for rungs in (4, 8)
    ]
    results: list[dict[str, Any]] = []
    for name, s, rungs, dim, pairing in cases:
        n_runs = max(2_000, options.runs * 4 // (rungs * dim)) * (
            4 if pairing is not None and dim == 1 else 1
        )  # a small bias
        ratio, se, rate = variance_of_rung0(
            ESTIMATORS[name], s, rungs, dim=dim, pairing=pairing, n_runs=n_runs
        )
        used = "EvenOdd" if pairing is not None or rungs < 4 else "RandomPair"
        results.append(
            {
                "sigma2": name,
                "s": s,
                "rungs": rungs,
                "dim": dim,
                "pairing": used,
                "variance": ratio,
                "se": se,
                "acceptance": rate,
            }
        )
        print(
            f"{name:16s} s={s:g} {rungs} rungs, dim {dim}, {used}: {ratio:.4f} +- {se:.4f}, "
            f"accepted {rate:.3f}",
            flush=True,
        )
    skewed = []
    for name in ESTIMATORS:
        for rungs in (2, 4):
            bias, se = bias_on_exponential_data(ESTIMATORS[name], 1.5, rungs, n_runs=options.runs)
            skewed.append(
                {"sigma2": name, "s": 1.5, "rungs": rungs, "bias_of_mean": bias, "se": se}
            )
            print(
                f"exponential data, {name}, {rungs} rungs: mean off by {bias:+.3f} +- {se:.3f} sd",
                flush=True,
            )
    found = {"n_data": N, "batch": BATCH, "results": results, "exponential": skewed}
    write(options.out, {**surroundings(__file__, "torch", "torchrex"), **found})


if __name__ == "__main__":
    main()
