"""The work on modules and rows, without state: energies from losses, the move of all rows, and
modes that are put back.

`assemble_energy` and `update_rows` are what a captured step compiles; they must not look at values
on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchrex.errors import TargetError
from torchrex.exchange.algorithm import Exchanged
from torchrex.exchange.momentum import MomentumPolicy, after_swap
from torchrex.network.philox import normals
from torchrex.samplers import Sampler, State
from torchrex.targets import Batch, Energy


def assemble_energy(
    losses: list[Tensor],
    extra: list[Tensor | None],
    position: Tensor,
    precision: Tensor | float | None,
    n_data: int,
) -> Energy:
    """Energies (replicas, 1) from per-example losses (n,) of every replica, the Gaussian prior and
    other terms.
    """
    require_one_size([len(terms) for terms in losses])
    per_example = torch.stack(losses)
    total = (n_data / per_example.shape[1]) * per_example.sum(1, dtype=torch.float64)
    prior = prior_terms(extra, position, precision)
    return Energy(
        (total if prior is None else total + prior)[:, None], per_example[:, None].double()
    )


def require_one_size(sizes: list[int]) -> None:
    if len(set(sizes)) > 1:
        raise TargetError(f"the minibatches of all replicas must have one size, got {sizes}")


def size_of(batch: Batch) -> int:
    """How many examples a batch has, by its first tensor."""
    return next(
        (len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim),
        0,
    )


def prior_terms(
    extra: list[Tensor | None], position: Tensor, precision: Tensor | float | None
) -> Tensor | None:
    """What the prior adds to the energy of every replica, (replicas,)."""
    if extra[0] is not None:
        return torch.stack([term for term in extra if term is not None])
    if precision is None:
        return None
    squares = precision * position.square()
    if (
        position.device.type == "cpu"
    ):  # row by row: how threads divide a sum must not depend on how many replicas are here
        return 0.5 * torch.stack([row.sum(dtype=torch.float64) for row in squares])
    return 0.5 * squares.sum(1, dtype=torch.float64)


def update_rows(
    position: Tensor,
    state: State,
    gradient: Tensor,
    numbers: Tensor | None,
    refreshing: Tensor | None,
    keys: Tensor,
    step: Tensor,
    precision: Tensor | float | None,
    exchanged: Exchanged,
    policy: MomentumPolicy,
    sampler: Sampler,
) -> None:
    """Prior, samplers' states after a swap, noise and move of all rows (replicas, size), in place:
    one pass over memory when compiled.

    One row that several replicas have in common is moved by the mean of their gradients.
    """
    dtype = position.dtype
    lr, temperature = exchanged.lr.to(dtype), exchanged.temperature.to(dtype)
    if numbers is None:
        numbers = normals(keys, step, position.shape[1]).to(dtype)
    if len(gradient) > len(position):
        gradient = gradient.mean(0, keepdim=True)
    if precision is not None:
        gradient = gradient + precision * position
    kept = after_swap(
        sampler,
        state,
        exchanged.swapped,
        policy=policy,
        scale_before=exchanged.scale_before,
        scale_after=exchanged.scale_after,
        noise=refreshing,
    )
    moved, carried = sampler.move(
        position, kept, gradient, numbers, lr=lr, temperature=temperature, step=step
    )
    position.copy_(moved)
    for old, new in zip(state, carried, strict=True):
        old.copy_(new)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every part of the module goes back to the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


@contextlib.contextmanager
def telling_of_one() -> Iterator[None]:
    """What BatchNorm says of one value per channel, with what to do; every other error stays as it
    is.
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise TargetError(
            f"BatchNorm in training mode cannot work on one value per channel, as a batch of one example has ({error}); leave "
            f'such a batch out: DataLoader(..., drop_last=True), or DeviceLoader with last="drop" or "wrap"'
        ) from error


@contextlib.contextmanager
def untouched_buffers(module: nn.Module) -> Iterator[None]:
    """Put the buffers (BatchNorm statistics) back to what they were."""
    parts = [
        (part, name, b)
        for part in module.modules()
        for name, b in part.named_buffers(recurse=False)
    ]
    kept = [(part, name, buffer, buffer.clone()) for part, name, buffer in parts]
    try:
        yield
    finally:
        for part, name, buffer, before in kept:
            buffer.copy_(before)
            part._buffers[name] = buffer  # a module may have put another tensor in its place
