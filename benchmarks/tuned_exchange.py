"""What is a ladder that tunes itself worth? At equal cost in examples evaluated, swap energies and
tuning included, against ladders made by hand on the step's own batch and independent chains.

    location: y ~ N(theta, 1) / 2 + N(-theta, 1) / 2, 400 data, prior N(0.5, 1): two modes with a
              barrier of more than 10 between them; the error of the weight of the right one, which
              quadrature knows
    clusters: the means of 8 clusters in the plane, 2,000 data: in how many runs rung 0 is at the
              global mode at the end, by the held-out log likelihood
    logistic: regression on 100,000 data up to temperature 10, one mode: visits to rung 0 from the
              hot end per million batches of 256, against every combination of rungs, swap batch
              and interval in BRUTE; and the law of rung 0 against the Laplace approximation
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

import torchrex as tr
from record import surroundings, write
from torchrex.exchange import count_trips, rung_of
from torchrex.targets import laplace, simulate_logistic

EXAMPLES = {"location": 4e6, "clusters": 6e7, "logistic": 3e8}  # of one run
RUNS = {"location": 64, "clusters": 16}
RUNGS = {"location": 8, "clusters": 20}  # for which tuning may cost a tenth
MORE_BY_HAND = {"location": 1, "clusters": 3}  # times as many examples for ladders made by hand
BRUTE = {"rungs": (4, 6, 8, 12, 20, 32, 44, 60), "swap_batch": (2_000, 20_000, 100_000),
         "swap_interval": (10, 50)}  # fmt: skip
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
        """Cluster by cluster, so that the compiler makes loops over the examples."""
        away = [(y - x[..., 2 * j : 2 * j + 2]).square() for j in range(k)]
        logs = [-0.5 * (each[..., 0] + each[..., 1]) for each in away]
        largest = functools.reduce(torch.maximum, logs).detach()
        return largest + sum((each - largest).exp() for each in logs).log()

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
    parser.add_argument("--problems", nargs="+", default=list(EXAMPLES))
    parser.add_argument("--share", type=float, default=1.0, help="of the examples, for a trial")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrex").setLevel(logging.ERROR)  # dead pairs are a result here
    results = {}
    for name in args.problems:
        if name == "logistic":
            results[name] = brute_force(args.share * EXAMPLES[name])
            continue
        problem = {"location": location, "clusters": clusters}[name]()
        results[name] = compared(name, problem, args.share * EXAMPLES[name], RUNS[name])
    write(args.out, {**surroundings(__file__, "torch", "torchrex"), "results": results})


def compared(name: str, problem: Problem, examples: float, runs: int) -> dict[str, Any]:
    target, lr = problem.target, LR[name]
    found: dict[str, Any] = {"examples": examples, "runs": runs}

    def tell(method: str, values: Tensor, **more: Any) -> None:
        score = problem.score(values)
        found[method] = {"rms": float(score.square().mean().sqrt()), **more}
        if name == "clusters":  # at the end, and after every eighth of the run
            n = values.shape[1]
            so_far = [problem.score(values[:, : k * n // 8]) for k in range(1, 9)]
            found[method]["at the global mode"] = [int((each < 0.05).sum()) for each in so_far]
        print(name, method, found[method], flush=True)

    def sampled(ladder: tr.Ladder, left: float, **rules: Any) -> Tensor:
        size, interval = rules.get("swap_batch") or 0, rules.get("swap_interval", 1)
        a_step = ladder.n_rungs * (target.batch_size + size / interval)
        n_steps = int(left / a_step)
        thin = max(1, n_steps // 200)
        draws = tr.sample(
            target, ladder=ladder, n_steps=n_steps, n_runs=runs, thin=thin, seed=1, compiled=True,
            burn_in=0 if name == "clusters" else n_steps // 10, **rules,
        )  # fmt: skip
        return draws.values

    for tempering in ("posterior", "likelihood"):
        began = time.monotonic()
        n_steps = int(examples / (RUNGS[name] * 2 * target.batch_size))
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
        more = MORE_BY_HAND[name] * examples
        tell(f"{rungs} rungs to {hot:g}", sampled(ladder, more), examples=more)
    chains = 16
    n_steps = int(examples / (chains * target.batch_size))
    alone = tr.sample(
        target, temperatures=(1.0,), lr=lr, n_steps=n_steps, n_runs=runs * chains,
        burn_in=n_steps // 10, thin=max(1, n_steps // 50), seed=1,
    )  # fmt: skip
    pooled = alone.values.unflatten(0, (runs, chains)).transpose(1, 2).flatten(1, 2)
    tell(f"{chains} independent chains", pooled)
    return found


def brute_force(examples: float) -> dict[str, Any]:
    """Visits per million batches: label trips, each of which also waits for the relaxation at the
    hot end, since the label of a replica can be faster than the replica.
    """
    features, labels, _ = simulate_logistic(100_000, 4, seed=0)
    target = tr.logistic_regression(features, labels, prior_precision=1.0, batch_size=256)
    mode, covariance = laplace(target)
    lr = 0.004 / 100_000
    relaxation = float((covariance.diagonal() / lr).mean())
    found: dict[str, Any] = {"examples": examples, "relaxation": relaxation}
    start = mode.to(torch.float32)

    def tell(method: str, ladder: tr.Ladder, examples: float, **rules: Any) -> float:
        size, interval = rules.get("swap_batch") or 0, rules.get("swap_interval", 1)
        a_step = ladder.n_rungs * (256 + size / interval)
        n_steps = int(examples / a_step)
        thin = max(1, min(5, n_steps // 1000))
        draws = tr.sample(
            target, ladder=ladder, n_steps=n_steps, burn_in=n_steps // 4, thin=thin, seed=1,
            initial=start, **rules,
        )  # fmt: skip
        restarts = int(count_trips(rung_of(draws.replica_at))[0].sum())
        cycle = 0.75 * n_steps * ladder.n_rungs / max(restarts, 1) + relaxation
        visits = 256e6 / a_step * ladder.n_rungs / cycle if restarts else 0.0
        error = ((draws.mean() - mode).abs() / covariance.diagonal().sqrt()).max()
        ess = (draws.std() / draws.standard_error()).square().min()
        found[method] = {
            "rungs": ladder.n_rungs, **rules, "restarts": restarts, "visits": visits,
            "acceptance": float(draws.acceptance_rate.min()), "n_steps": n_steps,
            "effective samples": float(ess) * 256e6 / (0.75 * examples),
            "mean error in sd": float(error),
        }  # fmt: skip
        print("logistic", method, found[method], flush=True)
        return visits

    n_steps = int(examples / (40 * 256))
    tuned = tr.tune(target, lr=lr, hot=10.0, n_steps=n_steps, n_runs=8, initial=start)
    found["tuning"] = tuned.examples / 8
    tell("tuned", tuned.ladder, examples - tuned.examples / 8, **tuned.rules)
    places = torch.linspace(0, 1, tuned.ladder.n_rungs, dtype=torch.float64)
    logs = torch.tensor(tuned.ladder.temperatures, dtype=torch.float64).log()
    tried = {}
    for rungs in BRUTE["rungs"]:
        even = torch.linspace(0, 1, rungs, dtype=torch.float64)
        spaced = [math.exp(_between(float(at), places, logs)) for at in even]
        settings = {"own batch": (tr.Ladder(spaced, lr), {})}
        for size, interval in itertools.product(BRUTE["swap_batch"], BRUTE["swap_interval"]):
            ladder = tr.Ladder.geometric(1.0, 10.0, rungs, lrs=lr)
            rules = {"swap_batch": size, "swap_interval": interval}
            settings[f"{size:,} every {interval}"] = (ladder, rules)
        for how, (ladder, rules) in settings.items():
            name = f"{rungs} rungs, {how}"
            tried[name] = (tell(name, ladder, examples, **rules), ladder, rules)
    for name in sorted(tried, key=lambda name: -tried[name][0])[:5]:  # the best once more, longer
        _, ladder, rules = tried[name]
        tell(f"{name}, again", ladder, 3 * examples, **rules)
    tell("tuned, again", tuned.ladder, 3 * examples - tuned.examples / 8, **tuned.rules)
    return found


def _between(at: float, places: Tensor, values: Tensor) -> float:
    k = min(int(torch.searchsorted(places, at, right=True)), len(places) - 1)
    share = (at - float(places[k - 1])) / float(places[k] - places[k - 1])
    return float(values[k - 1] + share * (values[k] - values[k - 1]))


if __name__ == "__main__":
    main()
