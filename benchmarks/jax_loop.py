"""The step of plain_loop.py on ResNet-20 in JAX: one jitted scan makes several steps.

Weights are float32, activations bfloat16 and NHWC, and BatchNorm's statistics float32. Replicas go
through the network together (`vmap`) or one after the other; their updates are always together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch is on the same GPU

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plain_loop import F0, FRICTION, MEAN, NOISE_VARIANCE, PRECISION, STD, Images, Ladder, pairs_of

Way = Literal["vmap", "one after the other"]
Arrays = dict[str, jax.Array]  # named as in torch; convolutions are HWIO

BLOCKS = [  # channels in and out, and the stride
    *((16, 16, 1),) * 3,
    *((16, 32, 2), (32, 32, 1), (32, 32, 1)),
    *((32, 64, 2), (64, 64, 1), (64, 64, 1)),
]


def from_torch(state: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
    """Parameters and running statistics from a state dict of torch, as NumPy arrays."""
    known = {name: v for name, v in state.items() if not name.endswith("num_batches_tracked")}
    arrays = {
        name: jnp.asarray(v.transpose(2, 3, 1, 0) if v.ndim == 4 else v)
        for name, v in known.items()
    }
    running = {name: v for name, v in arrays.items() if "running" in name}
    return {name: v for name, v in arrays.items() if name not in running}, running


def convolve(x: jax.Array, weight: jax.Array, stride: int = 1) -> jax.Array:
    side = weight.shape[0] // 2
    return lax.conv_general_dilated(
        x,
        weight.astype(x.dtype),
        (stride, stride),
        ((side, side), (side, side)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def logits_of(
    weights: Arrays, running: Arrays, x: jax.Array, dtype: Any = jnp.bfloat16
) -> tuple[jax.Array, Arrays]:
    """ResNet-20 in training mode, and its new running statistics."""
    updated: Arrays = {}

    def normalised(name: str, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        variance = jnp.square(wide).mean((0, 1, 2)) - jnp.square(mean)
        n = x.size // x.shape[-1]
        for what, value in (("mean", mean), ("var", variance * (n / (n - 1)))):
            key = f"{name}.running_{what}"
            updated[key] = 0.9 * running[key] + 0.1 * lax.stop_gradient(value)
        scale = lax.rsqrt(variance + 1e-5) * weights[f"{name}.weight"]
        return ((wide - mean) * scale + weights[f"{name}.bias"]).astype(dtype)

    x = jax.nn.relu(normalised("bn1", convolve(x.astype(dtype), weights["conv1.weight"])))
    for k, (width_in, width, stride) in enumerate(BLOCKS):
        block = f"blocks.{k}"
        y = convolve(x, weights[f"{block}.conv1.weight"], stride)
        y = jax.nn.relu(normalised(f"{block}.bn1", y))
        y = normalised(f"{block}.bn2", convolve(y, weights[f"{block}.conv2.weight"]))
        if stride != 1 or width_in != width:
            x = convolve(x, weights[f"{block}.shortcut.0.weight"], stride)
            x = normalised(f"{block}.shortcut.1", x)
        x = jax.nn.relu(y + x)
    features = x.astype(jnp.float32).mean((1, 2)).astype(dtype)
    logits = features @ weights["linear.weight"].T.astype(dtype)
    return logits.astype(jnp.float32) + weights["linear.bias"], updated


def energy_of(
    weights: Arrays,
    running: Arrays,
    x: jax.Array,
    y: jax.Array,
    n_data: int,
    dtype: Any = jnp.bfloat16,
) -> tuple[jax.Array, Arrays]:
    logits, updated = logits_of(weights, running, x, dtype)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
    return -n_data * picked.mean(), updated


def select(
    key: jax.Array, padded: jax.Array, labels: jax.Array, batch: int
) -> tuple[jax.Array, jax.Array]:
    """A random batch, cut out, half of it mirrored, and normalised, NHWC."""
    of_index, of_place, of_flip = jax.random.split(key, 3)
    index = jax.random.randint(of_index, (batch,), 0, len(labels))
    down, right = jax.random.randint(of_place, (2, batch, 1), 0, 9)
    place = jnp.arange(32)
    flipped = jax.random.bernoulli(of_flip, 0.5, (batch, 1))
    rows, columns = down + place, right + jnp.where(flipped, 31 - place, place)
    cropped = padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]
    mean, std = (255 * jnp.array(values) for values in (MEAN, STD))
    return (cropped.astype(jnp.float32) - mean) / std, labels[index]


class JaxLoop:
    """Replicas with identical first weights; `first_batch` is what the first step will see."""

    def __init__(
        self,
        state: Mapping[str, np.ndarray],
        images: Images,
        batch: int,
        ladder: Ladder,
        way: Way,
        length: int = 20,
    ) -> None:
        weights, running = from_torch(state)
        self.n_parameters = sum(v.size for v in weights.values())
        self.length, self.batch, self.n_data = length, batch, len(images.labels)
        self._data = tuple(jnp.asarray(each.cpu().numpy()) for each in images[:2])
        n = len(ladder.lrs)
        weights, running = jax.tree.map(
            lambda v: jnp.tile(v, (n, *(1,) * v.ndim)), (weights, running)
        )
        # The counter of the GPU's generator is faster than JAX's own.
        key = jax.random.key(0, impl="rbg")
        velocities = jax.tree.map(jnp.zeros_like, weights)
        self._state = (weights, velocities, running, jnp.arange(n), key, jnp.int32(0))
        self._key = jax.random.clone(key)
        temperatures, lrs = (jnp.array(each) for each in ladder)
        partners = jnp.array([pairs_of(n, 0), pairs_of(n, 1)])
        step = partial(_step, way, batch, self.n_data, temperatures, lrs, partners)

        @partial(jax.jit, donate_argnums=0)
        def advance(state: Any, padded: jax.Array, labels: jax.Array) -> Any:
            return lax.scan(lambda state, _: step(state, padded, labels), state, length=length)

        self._advance = advance

    def advance(self, n_steps: int) -> np.ndarray:
        """A multiple of `length` steps; the energies (length, replicas) of the last scan."""
        for _ in range(n_steps // self.length):
            self._state, energies = self._advance(self._state, *self._data)
        return np.asarray(energies)  # waits for the device

    def first_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Images (n, 3, 32, 32) and labels."""
        of_batch = jax.random.split(self._key, 4)[1]
        x, y = jax.jit(select, static_argnums=3)(of_batch, *self._data, self.batch)
        return np.asarray(x).transpose(0, 3, 1, 2), np.asarray(y)

    def finite(self) -> bool:
        return all(bool(jnp.isfinite(v).all()) for v in self._state[0].values())


def _step(
    way: Way,
    batch: int,
    n_data: int,
    temperatures: jax.Array,
    lrs: jax.Array,
    partners: jax.Array,
    state: Any,
    padded: jax.Array,
    labels: jax.Array,
) -> tuple[Any, jax.Array]:
    weights, velocities, running, replica_at, key, step = state
    key, of_batch, of_noise, of_swap = jax.random.split(key, 4)
    x, y = select(of_batch, padded, labels, batch)

    def one(weights: Arrays, running: Arrays) -> Any:
        return jax.value_and_grad(energy_of, has_aux=True)(weights, running, x, y, n_data)

    if way == "vmap":
        (energies, running), gradients = jax.vmap(one)(weights, running)
    else:
        # Two in a turn of the loop: two replicas need none.
        _, ((energies, running), gradients) = lax.scan(
            lambda _, each: (None, one(*each)), None, (weights, running), unroll=2
        )

    # As in plain_loop.py the move goes before the swap, so it has the rates of the step before.
    rung_of = jnp.zeros_like(replica_at).at[replica_at].set(jnp.arange(len(lrs)))
    lr = lrs[rung_of]
    std = jnp.sqrt(2 * FRICTION * lr * temperatures[rung_of])
    sizes = [w[0].size for w in weights.values()]
    # All noise in one kernel; drawn parameter by parameter it would take two for each.
    kicks = std[:, None] * jax.random.normal(of_noise, (len(lr), sum(sizes)))
    parts = dict(zip(weights, jnp.split(kicks, np.cumsum(sizes)[:-1], 1), strict=True))

    def moved(name: str) -> jax.Array:
        w, v, g = weights[name], velocities[name], gradients[name]
        drift = lr.reshape(-1, *(1,) * (w.ndim - 1)) * (g + PRECISION * w)
        return (1 - FRICTION) * v - drift + parts[name].reshape(w.shape)

    velocities = {name: moved(name) for name in weights}
    weights = {name: w + velocities[name] for name, w in weights.items()}

    partner, energy = partners[step % 2], energies[replica_at]
    gap = 1 / temperatures - 1 / temperatures[partner]
    log_ratio = gap * (energy - energy[partner]) - gap**2 * NOISE_VARIANCE / F0
    uniform = jax.random.uniform(of_swap, partner.shape)
    uniform = uniform[jnp.minimum(partner, jnp.arange(len(partner)))]
    replica_at = jnp.where(jnp.log(uniform) < log_ratio, replica_at[partner], replica_at)
    return (weights, velocities, running, replica_at, key, step + 1), energies
