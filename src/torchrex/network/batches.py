"""Batches on their way to a run: from any source, for ever, and looked at once before anything
moves.
"""

from __future__ import annotations

import functools
import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrex.distributed import ProcessGroup
from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.network.ensemble import ModuleEnsemble
from torchrex.network.forward_rng import ForwardRandomness
from torchrex.network.work import telling_of_one, untouched_buffers
from torchrex.targets import Batch, DeviceLoader, require_no_dataset

# Seconds of a forward pass on a CPU. Below, calling autograd costs more than its work, and one call
# for all replicas saves time (a third at four replicas); above, activations of all replicas at once
# fall out of the caches. The numbers are the same.
QUICK = 5e-4


def try_batch(ensemble: ModuleEnsemble, batch: Batch, forward: ForwardRandomness) -> int:
    """Evaluate the first batch without consequences, so that a wrong loss or model is told before
    anything moves.

    Returns how many examples it has.
    """
    replicas = ensemble.mesh.n_replicas
    if not ensemble.shares_minibatch and not (
        isinstance(batch, list | tuple) and len(batch) == replicas
    ):
        raise InvalidArgumentError(
            f"with shared_batches=False a step takes a list of {replicas} batches, one for each replica"
        )
    module, (mine, n) = ensemble.modules[0], ensemble.batch_of({"batch": batch}, 0)
    state = forward.state_dict()
    try:
        with (
            torch.no_grad(),
            forward,
            forward.turn_of(0),
            untouched_buffers(module),
            ensemble.casting(),
            telling_of_one(),
        ):
            before = forward.now()
            losses = ensemble.energy.tried(module, mine)
            if not all(map(torch.equal, before, forward.now())):
                ensemble.note_random_losses("model")
            if ensemble.device.type == "cpu":
                began = time.perf_counter()
                ensemble.energy.per_example(module, mine)
                ensemble.backward_at_once = time.perf_counter() - began < QUICK
    finally:
        forward.load_state_dict(state)
    if len(losses) > ensemble.n_data:
        raise TargetError(
            f"a minibatch of {len(losses)} examples is larger than n_data={ensemble.n_data}, which counts all examples"
        )
    sizes = [
        len(leaf) for leaf in pytree.tree_leaves(mine) if isinstance(leaf, Tensor) and leaf.ndim
    ]
    if sizes and len(losses) not in sizes:
        raise TargetError(
            f"the loss gave {len(losses)} values for a batch of {sizes[0]} examples; it must give one per example, shape "
            f"({sizes[0]},)"
        )
    return len(losses) if n is None else n


def require_same_everywhere(process_group: ProcessGroup, seeds: list[int], batch: Batch) -> None:
    """All processes must show their replicas the same examples and draw the same uniforms: the
    swaps compare their energies.
    """
    if process_group.size == 1:
        return
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(
                leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    said = process_group.gather([seeds, digest.hexdigest()], "look at a batch")
    for rank, (theirs, shown) in enumerate(said):
        if theirs != said[0][0]:
            mine, its = (", ".join(map(str, seeds)) for seeds in (said[0][0], theirs))
            raise InvalidArgumentError(
                f"rank 0 has seed {mine} and rank {rank} has {its}; give all processes the same seed"
            )
        if shown != said[0][1]:
            raise InvalidArgumentError(
                f"ranks 0 and {rank} have different batches, but all replicas must see the same; use DeviceLoader, or give "
                f"the DataLoader a seeded generator"
            )


def warn_of_size(counted: int, data: Any) -> None:
    """Warn if the data are not as many as the energy says: every energy would be on the wrong
    scale.
    """
    n_data = getattr(data, "n_data", None)
    dataset = getattr(data, "dataset", None)
    if n_data is None and dataset is not None and hasattr(dataset, "__len__"):
        n_data = len(dataset)
    if n_data is not None and n_data != counted:
        warnings.warn(
            f"the energy counts n_data={counted:,} examples but the data have {n_data:,}: energies, temperatures and the "
            f"swap test are off by their ratio; pass n_data={n_data}",
            stacklevel=4,
        )


def batches_of(data: Any, n_at_once: int, *, twice: bool = False) -> Callable[[], Batch]:
    """A function that gives the next batch, or a list of `n_at_once` for independent minibatches,
    for ever.

    With `twice` a DeviceLoader augments its examples twice.
    """
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        raise InvalidArgumentError(
            "data must give batches, got one tuple of tensors: use DeviceLoader((x, y), batch_size) or [(x, y)]"
        )
    require_no_dataset(data, shuffle=True)
    following = (
        functools.partial(data.next, twice=twice)
        if isinstance(data, DeviceLoader)
        else _cycle(data).__next__
    )
    return following if n_at_once == 1 else lambda: [following() for _ in range(n_at_once)]


def _cycle(data: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in data:
            empty = False
            yield batch
        if empty:
            raise InvalidArgumentError(
                "the data gave no batch; an iterator can be used once only: give a loader or a list"
            )
