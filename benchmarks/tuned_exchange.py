"""What is a ladder that tunes itself worth? At equal cost in examples evaluated, swap energies and
tuning included, against ladders made by hand on the step's own batch and independent chains.

    location: y ~ N(theta, 1) / 2 + N(-theta, 1) / 2, 400 data, prior N(0.5, 1): two modes with a
              barrier of more than 10 between them; the error of the weight of the right one, which
              quadrature knows
    clusters: the means of 8 clusters in the plane, 2,000 data: in how many runs rung 0 is at the
              global mode at the end, by the held-out log likelihood
    logistic: regression on 100,000 data up to temperature 10, one mode: visits to rung 0 by
              replicas that have forgotten at the hot end where they were, per million batches of
              256, against every combination of rungs, swap batch and interval in BRUTE; and the
              law of rung 0 against the Laplace approximation
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
from torchrex.targets import laplace, simulate_logistic

EXAMPLES = {"location": 4e6, "clusters": 6e7, "logistic": 4e8}  # of one run
RUNS = {"location": 64, "clusters": 16, "logistic": 8}
RUNGS = {"location": 8, "clusters": 20}  # for which tuning may cost a tenth
MORE_BY_HAND = {"location": 1, "clusters": 3}  # times as many examples for ladders made by hand
BRUTE = {"rungs": (2, 3, 4, 6), "tests": ((20_000, 50), (20_000, 200), (100_000, 500),
         (100_000, 1_000))}  # fmt: skip
OWN_BATCH = (6, 32)  # rungs with tests on the step's own batch
FIRST_LOOK = 0.25  # of the examples, for each of these
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
            results[name] = brute_force(args.share * EXAMPLES[name], RUNS[name])
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
            hot=f"{tuned.ladder.temperatures[-1]:g}", tuning=spent,
            seconds=time.monotonic() - began,
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


def brute_force(examples: float, runs: int) -> dict[str, Any]:
    """Renewed visits of every setting in BRUTE, then of the best ones and the tuned one again."""
    features, labels, _ = simulate_logistic(100_000, 4, seed=0)
    target = tr.logistic_regression(features, labels, prior_precision=1.0, batch_size=256)
    mode, covariance = laplace(target)
    lr = 0.004 / 100_000
    relaxation = float((covariance.diagonal() / lr).mean())
    found: dict[str, Any] = {"examples": examples, "runs": runs, "relaxation": relaxation}
    root = torch.linalg.cholesky(covariance)

    def tell(method: str, ladder: tr.Ladder, examples: float, seed: int, **rules: Any) -> float:
        """Runs that start at draws of the Laplace approximation."""
        size, interval = rules.get("swap_batch") or 0, rules.get("swap_interval", 1)
        a_step = ladder.n_rungs * (256 + size / interval)
        n_steps = int(examples / a_step)
        generator = torch.Generator().manual_seed(seed)
        shape = (ladder.n_rungs, runs, 4)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        spread = torch.tensor(ladder.temperatures, dtype=torch.float64).sqrt()[:, None, None]
        draws = tr.sample(
            target, ladder=ladder, n_steps=n_steps, n_runs=runs, thin=interval, seed=seed,
            initial=(mode + spread * normal @ root.T).float(), compiled=True, **rules,
        )  # fmt: skip
        made = dict(rules, rungs=ladder.n_rungs, n_steps=n_steps)
        if ladder.n_rungs > 1:
            visits = renewed_visits(draws.replica_at, interval / relaxation)
            made["renewed visits"] = mean_and_error(visits * 256e6 / examples)
            made["acceptance"] = float(draws.acceptance_rate.mean())
        away = draws.values.double() - mode
        ratio = (away.square().mean(1) / covariance.diagonal()).mean(1)
        made["variance / Laplace"] = mean_and_error(ratio)
        mean = away.mean(1) / covariance.diagonal().sqrt()
        made["mean, largest |z|"] = float((mean.mean(0) / mean.std(0) * runs**0.5).abs().max())
        found[method] = made
        print("logistic", method, made, flush=True)
        return float(made.get("renewed visits", [0.0])[0])

    tell("one rung", tr.Ladder((1.0,), lr), FIRST_LOOK * examples, 1)
    n_steps = int(examples / (6 * 2 * 256))
    tuned = tr.tune(target, lr=lr, hot=10.0, n_steps=n_steps, n_runs=runs, initial=mode.float())
    spent = tuned.examples / runs
    found["tuning, examples of a run"] = spent
    tried = {}
    settings = [*itertools.product(BRUTE["rungs"], BRUTE["tests"])]
    for rungs, (size, interval) in [*settings, *((rungs, (0, 1)) for rungs in OWN_BATCH)]:
        rules = {"swap_batch": size, "swap_interval": interval} if size else {}
        ladder = tr.Ladder.geometric(1.0, 10.0, rungs, lrs=lr)
        name = f"{rungs} rungs, {f'{size:,} every {interval}' if size else 'own batch'}"
        tried[name] = (tell(name, ladder, FIRST_LOOK * examples, 1, **rules), ladder, rules)
    for name in sorted(tried, key=lambda name: -tried[name][0])[:4]:  # the best once more, longer
        _, ladder, rules = tried[name]
        tell(f"{name}, again", ladder, examples, 2, **rules)
    tell("tuned", tuned.ladder, examples - spent, 2, **tuned.rules)
    return found


def renewed_visits(replica_at: Tensor, relaxations: float) -> Tensor:
    """Visits to rung 0 (runs,) by replicas that have forgotten at the top where they were.

    A replica is new with probability p, which is 0 when it leaves rung 0 and at the top grows as
    1 - exp(-t / relaxation). A visit counts p. `relaxations` pass between two rows of (k, rungs,
    runs).
    """
    _, rungs, runs = replica_at.shape
    new, visits = torch.zeros(rungs, runs), torch.zeros(runs)
    stays = math.exp(-relaxations)
    for ends in replica_at[:, [0, -1]].long():
        cold, top = ends[:1], ends[1:]
        visits += new.gather(0, cold)[0]
        new.scatter_(0, top, 1.0 - stays * (1.0 - new.gather(0, top)))
        new.scatter_(0, cold, 0.0)
    return visits.double()


def mean_and_error(values: Tensor) -> list[float]:
    """Of one value for each run."""
    return [float(values.mean()), float(values.std() / math.sqrt(len(values)))]


if __name__ == "__main__":
    main()
