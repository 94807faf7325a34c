"""What happens when a replica's energy is NaN or infinite. It never spreads: the swap test refuses
such an energy by itself.
"""

from __future__ import annotations

import logging
from typing import Literal

from torch import Tensor
from torch.utils import _pytree as pytree

from torchrex.errors import NonFiniteEnergyError
from torchrex.exchange.algorithm import StepInfo
from torchrex.network.ensemble import ModuleEnsemble
from torchrex.targets import Batch

logger = logging.getLogger("torchrex")

LOWER_IT = "Lower the learning rate of that rung, or check model, loss and data."
NOT_MOVED = "Nothing has moved yet, so that no learning rate can help: check the loss, the data and the initial weights."
IN_THE_BATCH = "The batch of this step holds NaN or infinite values: look at the data."
ALL_AT_ONCE = "All replicas failed at this step: look for NaN or infinite values in its data first, then at the learning rates."
Divergence = Literal["stop", "respawn"]


def first_failure(
    infos: StepInfo, steps_done: int, *, batch: Batch = None, together: bool = False
) -> NonFiniteEnergyError | None:
    """The first energy that is not finite among the latest steps, which are stacked along the first
    axis.

    `batch` is that of a single step, where it is at hand. `together` says that replicas break
    together, whatever the reason.
    """
    bad = ~infos.energy.isfinite()
    if not bool(bad.any()):
        return None
    k, rung, run = (int(i) for i in bad.nonzero()[0])
    step = steps_done - len(infos.energy) + k
    return NonFiniteEnergyError(
        replica=int(infos.replica_at[k, rung, run]),  # such a replica has not swapped at this step
        rung=rung,
        run=run,
        step=step,
        value=float(infos.energy[k, rung, run]),
        advice=_advice(step, bad[k], batch, together=together),
    )


def _advice(step: int, bad: Tensor, batch: Batch, *, together: bool) -> str:
    leaves = [
        leaf
        for leaf in pytree.tree_leaves(batch)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if not all(bool(leaf.isfinite().all()) for leaf in leaves):
        return IN_THE_BATCH
    if step == 0:
        return NOT_MOVED
    return (
        ALL_AT_ONCE
        if batch is None and len(bad) > 1 and bool(bad.all()) and not together
        else LOWER_IT
    )


def respawn(
    ensemble: ModuleEnsemble, replica_at: Tensor, energy: Tensor, step: int, *, batch: Batch = None
) -> list[dict[str, int]]:
    """Copy the nearest healthy replica, by rungs and then the colder one, over each broken one;
    what was done is returned.

    Weights, buffers and momentum are copied, the noise is not: the two part from the next move on.
    """
    standing = [int(replica) for replica in replica_at[:, 0]]
    rungs = range(len(standing))
    weights = ensemble.finite()
    finite = [bool(energy[r, 0].isfinite()) and weights[standing[r]] for r in rungs]
    events = []
    for rung in rungs:
        if finite[rung]:
            continue
        near = sorted(
            (other for other in rungs if finite[other]),
            key=lambda other: (abs(other - rung), other),
        )
        if not near:
            raise NonFiniteEnergyError(
                replica=standing[rung],
                rung=rung,
                run=0,
                step=step - 1,
                value=float(energy[rung, 0]),
                advice=_advice(step - 1, ~energy.isfinite(), batch, together=False)
                + " No replica is left to copy it from.",
            )
        source = standing[near[0]]
        ensemble.copy_replica(source, standing[rung])
        events.append(
            {"step": step, "replica": standing[rung], "rung": rung, "copied_from": source}
        )
        logger.warning(
            "replica %d on rung %d diverged before step %d and is now a copy of replica %d; if it repeats, lower that rung's lr",
            standing[rung],
            rung,
            step,
            source,
        )
    return events
