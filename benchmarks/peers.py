"""The peers in the density-loop benchmark: the two-rung algorithm as a JAX scan, and SGLD of
blackjax and posteriors.

A segment goes on by some steps. It returns how many and, with two rungs, how many swaps were
accepted; with one rung, the positions (steps, runs).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import posteriors
import torch

# Case 1 of figure 1.
WEIGHTS, MEANS, STDS = (0.4, 0.6), (-3.0, 2.0), (0.7, 0.5)
ENERGY_NOISE, LR, COLD, HOT = 2.0, 0.03, 1.0, 10.0
EVERY, N_DRAWS = 100, 10

Segment = Callable[[], tuple[int, Any]]

jax.config.update(
    "jax_threefry_partitionable", False
)  # JAX's older order of counters: up to a fifth faster here


def mixture(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Energy and gradient of the mixture, by hand and from the same exponentials: up to a tenth
    faster than autodiff.

    Components stand in front: at 1,024 runs the whole step is a third faster than with components
    behind.
    """
    weight, mean, std = (
        jnp.array(values).reshape(-1, *(1,) * x.ndim) for values in (WEIGHTS, MEANS, STDS)
    )
    white = (x - mean) / std
    log_parts = jnp.log(weight / std) - 0.5 * jnp.square(white) - 0.5 * math.log(2 * math.pi)
    largest = log_parts.max(axis=0)
    parts = jnp.exp(log_parts - largest)
    total = parts.sum(axis=0)
    return -largest - jnp.log(total), (parts * white / std).sum(axis=0) / total


def jax_step(
    state: Any, inputs: Any, update: Callable[..., jax.Array]
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Energies and gradients once, SA step, swap of temperatures, move; records what
    torchrex.StepInfo does.
    """
    x, replica_at, variance, m = state
    move_noise, energy_noise, uniform, due, sample = inputs
    energy, gradient = mixture(x)
    energy = energy + ENERGY_NOISE * energy_noise
    m = m + due
    variance = update(due, variance, sample, m)
    energy_at = jnp.where(replica_at == 0, energy[0], energy[1])
    gap = 1 / COLD - 1 / HOT
    log_ratio = gap * (energy_at[0] - energy_at[1] - gap * variance)
    accepted = uniform < jnp.exp(jnp.minimum(log_ratio, 0.0))
    replica_at = jnp.where(accepted, replica_at[::-1], replica_at)
    temperature = jnp.where(replica_at[0] == jnp.arange(2)[:, None], COLD, HOT)
    x = x - LR * gradient + jnp.sqrt(2 * LR * temperature) * move_noise
    position = jnp.where(replica_at[0] == 0, x[0], x[1])
    return (x, replica_at, variance, m), (position, energy_at, accepted, variance, replica_at)


def measured_variance(key: jax.Array, lead: tuple[int, ...], runs: int) -> jax.Array:
    """Variance of repeated energies: at one position only their noise varies. Averaged over the two
    replicas.
    """
    draws = ENERGY_NOISE * jax.random.normal(key, (*lead, N_DRAWS, 2, runs))
    return draws.var(axis=-3, ddof=1).mean(axis=-2)


def natural_block(length: int, runs: int, state: Any, key: jax.Array, first: jax.Array) -> Any:
    """The key is split inside the scan."""

    def update(due: jax.Array, variance: jax.Array, key: jax.Array, m: jax.Array) -> jax.Array:
        return jax.lax.cond(
            due,
            lambda: variance + (measured_variance(key, (), runs) - variance) / m,
            lambda: variance,
        )

    def body(carry: Any, step: jax.Array) -> Any:
        state, key = carry
        key, move, noise, swap, measure = jax.random.split(key, 5)
        due = (step % EVERY == 0) & (step > 0)
        normals = (jax.random.normal(key, (2, runs)) for key in (move, noise))
        state, info = jax_step(
            state, (*normals, jax.random.uniform(swap, (runs,)), due, measure), update
        )
        return (state, key), info

    (state, _), info = jax.lax.scan(body, (state, key), first + jnp.arange(length))
    return state, info


def tuned_block(length: int, runs: int, state: Any, key: jax.Array, first: jax.Array) -> Any:
    """All random numbers of the block are drawn before the scan."""

    def update(due: jax.Array, variance: jax.Array, sample: jax.Array, m: jax.Array) -> jax.Array:
        return jnp.where(due, variance + (sample - variance) / m, variance)

    move, noise, swap, measure = jax.random.split(key, 4)
    steps = first + jnp.arange(length)
    due = (steps % EVERY == 0) & (steps > 0)
    normals = (jax.random.normal(key, (length, 2, runs)) for key in (move, noise))
    samples = measured_variance(measure, (length // EVERY,), runs).repeat(EVERY, axis=0)
    inputs = (*normals, jax.random.uniform(swap, (length, runs)), due, samples)
    return jax.lax.scan(partial(jax_step, update=update), state, inputs)


def jax_loop(block: Callable[..., Any], length: int, runs: int) -> Segment:
    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def advance(state: Any, key: jax.Array, first: jax.Array) -> Any:
        key, here = jax.random.split(key)
        state, info = block(length, runs, state, here, first)
        return (state, key, first + length), info, info[2].sum()

    replica_at = jnp.tile(jnp.arange(2, dtype=jnp.int32)[:, None], (1, runs))
    state = (jnp.zeros((2, runs)), replica_at, jnp.zeros(runs), jnp.float32(0))
    carry = (state, jax.random.key(0), jnp.int32(0))

    def segment() -> tuple[int, Any]:
        nonlocal carry
        carry, _, accepted = advance(*carry)
        return length, int(accepted)

    return segment


def scan_loop(runs: int, length: int = 1_000) -> Segment:
    """The same algorithm in torch's `scan`, compiled with Inductor's C++ wrapper: the road not
    taken (see density/replay.py).
    """
    from torch._higher_order_ops.scan import scan
    from torch._inductor import config

    parts = [
        (m, s, math.log(w / s / math.sqrt(2 * math.pi)))
        for w, m, s in zip(WEIGHTS, MEANS, STDS, strict=True)
    ]
    gap = 1 / COLD - 1 / HOT

    def energy_and_gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logs = [c - 0.5 * ((x - m) / s) ** 2 for m, s, c in parts]
        largest = torch.maximum(*logs)
        terms = [(log - largest).exp() for log in logs]
        total = terms[0] + terms[1]
        pull = sum(term * (x - m) / s**2 for term, (m, s, _) in zip(terms, parts, strict=True))
        return -largest - total.log(), pull / total

    def step(state: Any, inputs: Any) -> Any:
        x0, x1, swapped, variance, m = state
        move, noise, uniform, due, sample = inputs
        (e0, g0), (e1, g1) = energy_and_gradient(x0), energy_and_gradient(x1)
        e0, e1 = e0 + ENERGY_NOISE * noise[0], e1 + ENERGY_NOISE * noise[1]
        m = m + due
        variance = torch.where(due > 0, variance + (sample - variance) / m, variance)
        cold, hot = torch.where(swapped, e1, e0), torch.where(swapped, e0, e1)
        accepted = uniform < (gap * (cold - hot - gap * variance)).clamp(max=0.0).exp()
        swapped = swapped ^ accepted
        t0, t1 = torch.where(swapped, HOT, COLD), torch.where(swapped, COLD, HOT)
        x0 = x0 - LR * g0 + (2 * LR * t0).sqrt() * move[0]
        x1 = x1 - LR * g1 + (2 * LR * t1).sqrt() * move[1]
        position = torch.where(swapped, x1, x0)
        return (x0, x1, swapped, variance, m), (
            position,
            cold,
            hot,
            accepted.clone(),
            variance.clone(),
            swapped.clone(),
        )

    state = (
        torch.zeros(runs),
        torch.zeros(runs),
        torch.zeros(runs, dtype=torch.bool),
        torch.zeros(runs),
        torch.zeros(1),
    )
    due = torch.zeros(length, 1)
    due[::EVERY] = 1.0
    with config.patch(cpp_wrapper=True):
        advance = torch.compile(
            lambda state, inputs: scan(step, state, inputs), fullgraph=True, dynamic=False
        )

    def segment() -> tuple[int, Any]:
        nonlocal state
        draws = ENERGY_NOISE * torch.randn(length // EVERY, N_DRAWS, 2, runs)
        sample = torch.zeros(length, runs)
        sample[::EVERY] = draws.var(dim=1).mean(1)
        inputs = (
            torch.randn(length, 2, runs),
            torch.randn(length, 2, runs),
            torch.rand(length, runs),
            due,
            sample,
        )
        with torch.no_grad(), config.patch(cpp_wrapper=True):
            state, info = advance(state, inputs)
        return length, int(info[3].sum())

    return segment


def blackjax_loop(runs: int, length: int) -> Segment:
    """Its SGLD in a jitted scan: a scalar for one run, vmapped for more."""
    sgld = blackjax.sgld(lambda x, minibatch: -mixture(x)[1])

    def one_run(x: jax.Array, key: jax.Array) -> Any:
        def body(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            return (sgld.step(key, x, (), LR, COLD),) * 2

        return jax.lax.scan(body, x, jax.random.split(key, length))

    @partial(jax.jit, donate_argnums=(0, 1))
    def advance(x: jax.Array, key: jax.Array) -> Any:
        key, here = jax.random.split(key)
        many = jax.vmap(one_run, out_axes=(0, 1))
        x, positions = one_run(x, here) if runs == 1 else many(x, jax.random.split(here, runs))
        return (x, key), positions

    carry = (jnp.zeros(() if runs == 1 else runs), jax.random.key(0))

    def segment() -> tuple[int, Any]:
        nonlocal carry
        carry, positions = advance(*carry)
        return length, jax.block_until_ready(positions)

    return segment


def posteriors_loop(runs: int, steps: int) -> Segment:
    """Its SGLD as in its documentation: `update` from a Python loop."""
    components = torch.distributions.Normal(
        torch.tensor(MEANS), torch.tensor(STDS), validate_args=False
    )
    log_weights = torch.tensor(WEIGHTS).log()

    def log_posterior(x: torch.Tensor, batch: None) -> tuple[torch.Tensor, torch.Tensor]:
        return (log_weights + components.log_prob(x)).logsumexp(-1).sum(), torch.tensor([])

    transform = posteriors.sgmcmc.sgld.build(log_posterior, lr=LR, temperature=COLD)
    state = transform.init(torch.zeros(runs, 1))

    def segment() -> tuple[int, Any]:
        nonlocal state
        positions = []
        for _ in range(steps):
            state, _ = transform.update(state, None)
            positions.append(state.params)
        return steps, torch.stack(positions)[..., 0]

    return segment
