"""What is a ladder that tunes itself worth? At equal cost in examples evaluated, swap energies and
tuning included, against ladders made by hand on the step's own batch and independent chains.

    location: y ~ N(theta, 1) / 2 + N(-theta, 1) / 2, 400 data, prior N(0.5, 1): two modes with a
              barrier of more than 10 between them; the error of the weight of the right one, which
              quadrature knows
    clusters: the means of 8 clusters in the plane, 2,000 data: in how many runs rung 0 is at the
              global mode at the end, by the held-out log likelihood
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

import torchrex as tr
from record import surroundings, write

EXAMPLES = {"location": 4e6, "clusters": 2e8}  # of one run
HANDMADE = {  # rungs and hottest temperature, tests on each step's batch
    "location": [(2, 10.0), (4, 10.0), (4, 30.0), (8, 30.0), (16, 30.0), (16, 100.0)],
    "clusters": [(8, 300.0), (16, 300.0), (32, 300.0), (64, 300.0)],
}
LR = {"location": 2e-4, "clusters": 5e-5}


class Problem(NamedTuple):
    target: tr.TallPosterior
    score: Any  # of draws (runs, draws, dim): one number for each run, 0 is best


def location() -> Problem:
    generator = torch.Generator().manual_seed(0)
    sign = torch.where(torch.rand(400, generator=generator) < 0.5, 1.0, -1.0)
    data = sign + torch.randn(400, generator=generator)

    def log_likelihood(x: Tensor, y: Tensor) -> Tensor:
        both = torch.stack([-0.5 * (y - x[..., 0]).square(), -0.5 * (y + x[..., 0]).square()])
        return torch.logsumexp(both, 0)

    target = tr.TallPosterior(log_likelihood, Normal(0.5, 1.0), (data,), 1, batch_size=20)
    grid = torch.linspace(-4, 4, 8001, dtype=torch.float64)
    energy = target.to("cpu", torch.float64).full_energy(grid[:, None])
    density = (energy.min() - energy).exp()
    weight = float(density[grid > 0].sum() / density.sum())
    barrier = float(energy[4000] - energy[grid < 0].min())
    assert barrier > 10, barrier
    return Problem(target, lambda values: (values[..., 0] > 0).double().mean(1) - weight)


def clusters(k: int = 8, n: int = 2_000, apart: float = 5.0) -> Problem:
    generator = torch.Generator().manual_seed(0)
    centres = torch.zeros(0, 2)
    while len(centres) < k:
        centre = 24.0 * (torch.rand(1, 2, generator=generator) - 0.5)
        if not len(centres) or float(torch.cdist(centre, centres).min()) > apart:
            centres = torch.cat([centres, centre])

    def points() -> Tensor:
        which = torch.randint(k, (n,), generator=generator)
        return centres[which] + torch.randn(n, 2, generator=generator)

    def log_likelihood(x: Tensor, y: Tensor) -> Tensor:
        means = x.unflatten(-1, (k, 2))
        return torch.logsumexp(-0.5 * (y.unsqueeze(-2) - means).square().sum(-1), -1)

    data, held_out = points(), points()
    best = log_likelihood(centres.flatten(), held_out).mean()

    def score(values: Tensor) -> Tensor:
        """How much less likely the held-out points are, over the last tenth of the draws."""
        last = values[:, -max(1, values.shape[1] // 10) :]
        each = [log_likelihood(x[:, None], held_out).mean() for x in last]
        return best - torch.stack(each)

    return Problem(
        tr.TallPosterior(log_likelihood, Normal(0.0, 8.0), (data,), 2 * k, batch_size=100), score
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--problems", nargs="+", default=["location", "clusters"])
    parser.add_argument("--share", type=float, default=1.0, help="of the examples, for a trial")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrex").setLevel(logging.ERROR)  # dead pairs are a result here
    results = {}
    for name in args.problems:
        problem = {"location": location, "clusters": clusters}[name]()
        results[name] = compared(name, problem, args.share * EXAMPLES[name], args.runs)
    made = {"runs": args.runs, "results": results}
    write(args.out, {**surroundings(__file__, "torch", "torchrex"), **made})


def compared(name: str, problem: Problem, examples: float, runs: int) -> dict[str, Any]:
    target, lr = problem.target, LR[name]
    found: dict[str, Any] = {"examples": examples}

    def tell(method: str, values: Tensor, **more: Any) -> None:
        score = problem.score(values)
        found[method] = {"rms": float(score.square().mean().sqrt()), **more}
        if name == "clusters":
            found[method]["at the global mode"] = int((score < 0.05).sum())
        print(name, method, found[method], flush=True)

    def sampled(ladder: tr.Ladder, left: float, **rules: Any) -> Tensor:
        size, interval = rules.get("swap_batch") or 0, rules.get("swap_interval", 1)
        a_step = ladder.n_rungs * (target.batch_size + size / interval)
        n_steps = int(left / a_step)
        thin = max(1, n_steps // 200)
        draws = tr.sample(
            target, ladder=ladder, n_steps=n_steps, n_runs=runs, burn_in=n_steps // 10, thin=thin,
            seed=1, **rules,
        )  # fmt: skip
        return draws.values

    for tempering in ("posterior", "likelihood"):
        began = time.monotonic()
        n_steps = int(examples / (8 * 2 * target.batch_size))
        tuned = tr.tune(target, lr=lr, n_steps=n_steps, n_runs=8, tempering=tempering)
        spent = tuned.examples / 8  # eight runs were tuned for, of which each pays its part
        values = sampled(tuned.ladder, examples - spent, **tuned.rules)
        tell(
            f"tuned, {tempering}", values, rungs=tuned.ladder.n_rungs,
            hot=tuned.ladder.temperatures[-1], tuning=spent, seconds=time.monotonic() - began,
            **{k: v for k, v in tuned.rules.items() if k.startswith("swap")}, advice=tuned.advice,
        )  # fmt: skip
    for rungs, hot in HANDMADE[name]:
        ladder = tr.Ladder.geometric(1.0, hot, rungs, lrs=lr)
        tell(f"{rungs} rungs to {hot:g}", sampled(ladder, examples), rungs=rungs, hot=hot)
    chains = 16
    n_steps = int(examples / (chains * target.batch_size))
    alone = tr.sample(
        target, temperatures=(1.0,), lr=lr, n_steps=n_steps, n_runs=runs * chains,
        burn_in=n_steps // 10, thin=max(1, n_steps // 50), seed=1,
    )  # fmt: skip
    pooled = alone.values.unflatten(0, (runs, chains)).transpose(1, 2).flatten(1, 2)
    tell(f"{chains} independent chains", pooled)
    return found


if __name__ == "__main__":
    main()
