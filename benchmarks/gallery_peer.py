"""Two problems of the gallery at equal wall time on one core: the tuned exchange, and parallel
tempering on all data as a plain JAX program.

The JAX program gets the temperatures that tuning found, the larger lr that all data allow, and as
many seconds as the exchange took, tuning included. Compiling counts for neither.

    taskset -c 0 python benchmarks/gallery_peer.py --out benchmarks/results/gallery_peer.json
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import record
import torchrex
from torchrex.density import few_threads
from torchrex.diagnostics import mean_and_error
from torchrex.experiments import period as stars
from torchrex.experiments.gallery import Problem, problems

N_RUNS = 8
BLOCK = 200  # steps of one call of the JAX program; a draw is kept after each


def log_likelihood_of_period(x: jax.Array, t: jax.Array, y: jax.Array) -> jax.Array:
    phase = 2.0 * math.pi * (stars.PRIOR_MEAN + stars.UNIT * x[0]) * t
    return -0.5 * jnp.square(y - x[1] * jnp.cos(phase) - x[2] * jnp.sin(phase)).sum()


def log_likelihood_of_clusters(x: jax.Array, y: jax.Array) -> jax.Array:
    away = jnp.square(y[:, None] - x.reshape(-1, 2)).sum(-1)
    return jax.nn.logsumexp(-0.5 * away, axis=1).sum()


def tempering_in_jax(
    problem: Problem, log_likelihood: Callable[..., jax.Array], temperatures: tuple[float, ...]
) -> tuple[Callable[..., Any], jax.Array]:
    """A block of steps of all runs, and where they start: (runs, rungs, dim) from the prior."""
    target, n_rungs = problem.target, len(temperatures)
    larger = problem.lr * (1.0 + len(target.data[0]) / target.batch_size)
    ladder = torchrex.Ladder.for_likelihood(
        temperatures, larger, prior_variance=target.prior_variance
    )
    data = [jnp.asarray(each.numpy()) for each in target.data]
    mean, sd = (
        jnp.broadcast_to(jnp.asarray(np.asarray(each), jnp.float32), (target.dim,))
        for each in (target.prior.mean, target.prior.stddev)
    )
    inverse = jnp.asarray([0.0 if math.isinf(t) else 1.0 / t for t in temperatures])[:, None]
    lr = jnp.asarray(ladder.lrs)[:, None]
    both = jax.vmap(jax.vmap(jax.value_and_grad(lambda x: log_likelihood(x, *data))))
    gap = (inverse[:-1] - inverse[1:])[:, 0]

    def step(x: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        key, number = now
        of_noise, of_swaps = jax.random.split(key)
        value, gradient = both(x)
        # Even and odd pairs in turn; the energies are those of the current positions.
        log_s = gap * (value[:, 1:] - value[:, :-1])
        u = jax.random.uniform(of_swaps, log_s.shape, minval=1e-38)
        in_turn = (jnp.arange(n_rungs - 1) + number) % 2 == 0
        swaps = (jnp.log(u) < log_s) & in_turn
        none = jnp.zeros((len(x), 1), bool)
        down, up = jnp.concatenate([swaps, none], 1), jnp.concatenate([none, swaps], 1)
        source = jnp.arange(n_rungs) + down.astype(int) - up.astype(int)
        x, gradient = (
            jnp.take_along_axis(each, source[..., None], axis=1) for each in (x, gradient)
        )
        drift = inverse * gradient - (x - mean) / sd**2
        return x + lr * drift + jnp.sqrt(2.0 * lr) * jax.random.normal(of_noise, x.shape), None

    @jax.jit
    def block(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, used = jax.random.split(key)
        inputs = (jax.random.split(used, BLOCK), jnp.arange(BLOCK))
        return key, jax.lax.scan(step, x, inputs)[0]

    shape = (N_RUNS, n_rungs, target.dim)
    return block, mean + sd * jax.random.normal(jax.random.PRNGKey(1), shape)


def compare(
    name: str, log_likelihood: Callable[..., jax.Array], *, share: float = 1.0
) -> dict[str, Any]:
    entry = problems()[name]
    problem = entry.make()
    target = problem.target
    examples = share * entry.n_steps * target.batch_size
    tune = partial(
        torchrex.tune, target, lr=problem.lr, n_steps=int(examples / target.batch_size / 40),
        n_runs=N_RUNS, seed=3, show=False,
    )  # fmt: skip
    tuned = tune()  # compiles
    began = time.perf_counter()
    tune()
    tuning_seconds = time.perf_counter() - began
    n_steps = int(
        (examples - tuned.examples / N_RUNS) / (tuned.ladder.n_rungs * tuned.examples_a_step)
    )
    draw = partial(
        torchrex.sample, target, ladder=tuned, n_steps=n_steps, n_runs=N_RUNS, seed=3,
        thin=max(1, n_steps // 400), burn_in=n_steps // 2,
    )  # fmt: skip
    draw(n_steps=2_000, thin=10, burn_in=0)  # compiles
    began = time.perf_counter()
    draws = draw()
    seconds = tuning_seconds + time.perf_counter() - began

    block, x = tempering_in_jax(problem, log_likelihood, tuned.ladder.temperatures)
    key = jax.random.PRNGKey(0)
    block(key, x)[1].block_until_ready()  # compiles
    kept, began = [], time.perf_counter()
    while time.perf_counter() - began < seconds:
        key, x = block(key, x)
        kept.append(np.asarray(x[:, 0]))
    jax_seconds = time.perf_counter() - began
    second_half = kept[len(kept) // 2 :]
    chosen = second_half[:: max(1, len(second_half) // 200)]
    exact, exact_error = problem.answer()
    with few_threads(0):
        found = {
            "torchrex, tuned exchange": draws.values,
            "jax, exact tempering": torch.tensor(np.stack(chosen, 1)),
        }
        answers = {method: problem.estimate(values).double() for method, values in found.items()}
        modes = {method: float(problem.found(values).mean()) for method, values in found.items()}
    rows = []
    for method, each in answers.items():
        mean, error = mean_and_error(each)
        rows.append({"method": method, "mean": mean, "se": error, "runs": each.tolist(),
                     "in_right_modes": modes[method]})  # fmt: skip
    return {
        "problem": name,
        "words": problem.words,
        "exact": exact,
        "exact_error": exact_error,
        "examples_of_the_exchange": examples,
        "rungs": tuned.ladder.n_rungs,
        "seconds": seconds,
        "tuning_seconds": tuning_seconds,
        "jax_seconds": jax_seconds,
        "jax_steps": BLOCK * len(kept),
        "jax_passes_over_the_data": BLOCK * len(kept) * tuned.ladder.n_rungs,
        "torchrex_steps": n_steps,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=1.0, help="of the examples of the gallery")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    given = {
        "gallery/period": log_likelihood_of_period,
        "gallery/clusters-15": log_likelihood_of_clusters,
    }
    results = [compare(name, each, share=arguments.share) for name, each in given.items()]
    about = record.surroundings(__file__, "torch", "torchrex", "jax", "jaxlib")
    record.write(arguments.out, {**about, "n_runs": N_RUNS, "results": results})
    for result in results:
        print({name: value for name, value in result.items() if name != "rows"})
        for row in result["rows"]:
            print("  ", {name: value for name, value in row.items() if name != "runs"})


if __name__ == "__main__":
    main()
