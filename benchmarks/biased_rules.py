"""How wrong is rung 0 under the rules that are kept for the paper alone: a rest after a swap, and
momenta that are not rescaled?

Exact energies throughout. `swap_rest` on a Gaussian (temperatures 1 and 3) and on README's mixture
(1 and 10); `momentum` on a Gaussian with SGHMC of friction 0.1, temperatures 1 and 2, swaps at
every step. Stored are ratios to the right value and weights.
"""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path
from typing import Any

import torch

import torchrex
from record import surroundings, write


def gaussian() -> torchrex.LogDensity:
    return torchrex.LogDensity(lambda x: -0.5 * x.square().sum(-1), 1, gradient=lambda x: -x)


def mean_of(per_run: torch.Tensor) -> dict[str, float]:
    return {"mean": float(per_run.mean()), "se": float(per_run.std() / math.sqrt(len(per_run)))}


def rest(steps: int) -> dict[str, Any]:
    """Variance of rung 0 of the Gaussian; left weight of the mixture, whose truth is 0.4."""
    n_runs, scale = 4_000, torch.tensor([1.0, 3.0]).sqrt().view(2, 1, 1)
    start = scale * torch.randn(2, n_runs, 1, generator=torch.Generator().manual_seed(0))
    ensemble = torchrex.TensorEnsemble.start(gaussian(), n_rungs=2, n_runs=n_runs, initial=start)
    run = torchrex.DensityExchange(
        ensemble, torchrex.Ladder((1.0, 3.0), 0.01), swap_rest=steps, compiled=True
    )
    variance = torchrex.collect(run, 4_000, burn_in=1_000, thin=20).values[..., 0].square().mean(
        1
    ) / (1.0 / (1.0 - 0.005))
    mixture = torchrex.GaussianMixture([0.4, 0.6], means=[-3.0, 2.0], stds=[0.7, 0.5])
    ensemble = torchrex.TensorEnsemble.start(mixture, n_rungs=2, n_runs=256)
    run = torchrex.DensityExchange(
        ensemble, torchrex.Ladder((1.0, 10.0), 0.03), swap_rest=steps, compiled=True
    )
    left = (
        torchrex.collect(run, 20_000, burn_in=2_000, thin=10)
        .values[..., 0]
        .lt(-0.5)
        .double()
        .mean(1)
    )
    return {
        "swap_rest": steps,
        "variance_ratio": mean_of(variance.double()),
        "left_weight": mean_of(left),
    }


def momentum(policy: str, lr: float) -> dict[str, Any]:
    """Second moments of x and v on rung 0, over temperature 1 and 2 lr / (2 - friction)."""
    n_runs, friction = 4_000, 0.1
    generator = torch.Generator().manual_seed(1)
    start = torch.tensor([1.0, 2.0]).sqrt().view(2, 1, 1) * torch.randn(
        2, n_runs, 1, generator=generator
    )
    ensemble = torchrex.TensorEnsemble.start(
        gaussian(), torchrex.SGHMC(friction), n_rungs=2, n_runs=n_runs, initial=start
    )
    ladder = torchrex.Ladder((1.0, 2.0), lr)
    run = torchrex.DensityExchange(
        ensemble, ladder, momentum="keep" if policy == "keep" else "rescale", compiled=True
    )
    x2, v2, n = torch.zeros(n_runs), torch.zeros(n_runs), 0
    for _ in run.advance(3_000, every=10):
        if run.n_steps > 500:
            now, cold = run.ensemble, run.state.replica_at[0].long()
            (velocity,) = now.sampler_state
            x2 += now.position[cold, torch.arange(n_runs), 0].square()
            v2 += velocity[cold, torch.arange(n_runs), 0].square() / (2 * lr / (2 - friction))
            n += 1
    return {
        "momentum": policy,
        "lr": lr,
        "x_ratio": mean_of((x2 / n).double()),
        "v_ratio": mean_of((v2 / n).double()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "biased_rules.json"
    )
    options = parser.parse_args()
    logging.getLogger("torchrex").setLevel(
        logging.ERROR
    )  # that they are biased is the question here
    found = {
        "rest": [rest(steps) for steps in (0, 5, 50)],
        "momentum": [momentum(policy, lr) for policy in ("rescale", "keep") for lr in (0.03, 0.1)],
    }
    for row in (*found["rest"], *found["momentum"]):
        print(row, flush=True)
    write(options.out, {**surroundings(__file__, "torch", "torchrex"), **found})


if __name__ == "__main__":
    main()
