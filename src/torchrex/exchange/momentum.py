"""What happens to a replica's momentum when it changes rungs."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from torchrex.samplers import Sampler, State

MomentumPolicy = Literal["rescale", "keep", "refresh"]
POLICIES: tuple[str, ...] = ("rescale", "keep", "refresh")


def after_swap(
    sampler: Sampler,
    state: State,
    swapped: Tensor,
    scale_before: Tensor,
    scale_after: Tensor,
    *,
    policy: MomentumPolicy,
    noise: Tensor | None = None,
    lr_factor: Tensor | None = None,
) -> State:
    """The sampler's state of each replica on its new rung; replicas that stayed keep theirs.

    The stationary variance of v on a rung is proportional to lr * temperature, and the scales are
    its square root; they broadcast against the state.

    - `rescale` multiplies by the ratio of the scales, which maps one rung's law onto the other's.
      Measured with unequal lrs, exact gradients and swaps at every step, the law of (x, v) is right
      to 0.2 %. A rung with a learning rate of 0 has v = 0 for its law: a replica that comes to it
      stops. One that leaves it keeps what it has, because no factor maps 0 onto the other law.
    - `refresh` draws from the new rung's law. That is right if swaps are rarer than 1 / friction
      steps. Swapping at every step it gives 0.79 of the variance of x: a momentum is correlated
      with the position it came from, and forgetting that at every step is another dynamics.
    - `keep` leaves v alone, as the authors' code does, and is wrong by the ratio until friction has
      worn it off, with equal lrs too: at temperatures 1 and 2, friction 0.1 and swaps at every step
      rung 0 has 1.43 of the variance of v and 1.04 of that of x at lr 0.03, where `rescale` has
      1.01 and 1.00 (benchmarks/biased_rules.py).

    `noise` is standard normal, needed by `refresh` alone. `lr_factor` multiplies the lr of each
    number on every rung: in a ratio it cancels.
    """
    if policy == "keep" or not sampler.velocity_std:
        return state
    dtype = state[0].dtype
    if policy == "rescale":
        ratio = (scale_after / scale_before).to(dtype)
        return sampler.rescale(state, swapped & (scale_before > 0), ratio)
    assert noise is not None
    scale = scale_after.to(dtype)
    scale = scale if lr_factor is None else scale * lr_factor.sqrt()
    return sampler.refresh(state, swapped, scale, noise)
