"""Which process holds which replicas, and which part of every minibatch: a mesh of ranks with the
axes replica x data.

With as many ranks as replicas or fewer, each rank holds some of them whole. With more, the ranks of
one replica share every minibatch between them, and average their gradients. Weights stay where they
are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

from torchrex.distributed.joining import join
from torchrex.distributed.process_group import ALONE, ProcessGroup
from torchrex.errors import InvalidArgumentError, TargetError


class ReplicaMesh:
    """The places of `n_replicas` replicas on the processes of a process_group; make it with `replica_mesh`."""

    def __init__(
        self, n_replicas: int, process_group: ProcessGroup = ALONE, mesh: DeviceMesh | None = None
    ) -> None:
        self.n_replicas, self.process_group, self.device_mesh = n_replicas, process_group, mesh
        self.n_data_ranks = max(1, process_group.size // n_replicas)
        self.n_replica_ranks = process_group.size // self.n_data_ranks
        self.replica_rank, self.data_rank = divmod(process_group.rank, self.n_data_ranks)
        self.mine = self.replicas_of(self.replica_rank)

    @property
    def is_spread(self) -> bool:
        """Over more than one process?"""
        return self.process_group.size > 1

    @property
    def shares_examples(self) -> bool:
        """Do several ranks work on one replica?"""
        return self.n_data_ranks > 1

    def replicas_of(self, replica_rank: int) -> range:
        """Neighbouring replicas; where they do not divide evenly, the first ranks have one more."""
        each, more = divmod(self.n_replicas, self.n_replica_ranks)
        first = replica_rank * each + min(replica_rank, more)
        return range(first, first + each + (replica_rank < more))

    def owner_of(self, replica: int) -> int:
        """The rank that speaks for a replica."""
        row = next(row for row in range(self.n_replica_ranks) if replica in self.replicas_of(row))
        return row * self.n_data_ranks

    def local(self, per_replica: Tensor) -> Tensor:
        """The rows of this rank's replicas, of a tensor (replicas, ...)."""
        return per_replica[self.mine.start : self.mine.stop] if self.is_spread else per_replica

    def send_from(self, owner: int, tensor: Any, device: torch.device) -> Tensor:
        """A tensor that one rank has, on all of them."""
        is_one = isinstance(tensor, Tensor)
        form: list[Any] | None = (
            [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] if is_one else None
        )
        said = self.process_group.gather(form, "sending of an output")[owner]
        if said is None:
            raise InvalidArgumentError(
                "on several processes the model's output must be one tensor; return the logits alone"
            )
        if not is_one:
            tensor = torch.empty(said[1], dtype=getattr(torch, said[0]), device=device)
        return self.process_group.broadcast(tensor.contiguous(), owner, "sending of an output")

    # Examples

    def part_of(self, batch: Any) -> tuple[Any, int]:
        """This rank's examples of a minibatch, and how many the minibatch has."""
        sizes = {
            len(leaf)
            for leaf in pytree.tree_leaves(batch)
            if isinstance(leaf, Tensor) and leaf.ndim
        }
        if len(sizes) != 1:
            raise TargetError(
                f"{self.n_data_ranks} ranks share a batch by its first axis, but its tensors have sizes {sorted(sizes)}"
            )
        (n,) = sizes
        if n < self.n_data_ranks:
            raise TargetError(
                f"a batch of {n} examples cannot be shared by {self.n_data_ranks} ranks; use larger batches"
            )
        here = _slices(n, self.n_data_ranks)[self.data_rank]

        def cut(leaf: Any) -> Any:
            return leaf[here] if isinstance(leaf, Tensor) and leaf.ndim else leaf

        return pytree.tree_map(cut, batch), n

    def sum_over_examples(self, tensor: Tensor) -> None:
        """Add up, in place, what the ranks of one replica have."""
        if self.shares_examples:
            assert self.device_mesh is not None
            with self.process_group.collective("sum of the gradients"):
                dist.all_reduce(tensor, group=self.device_mesh.get_group("data"))

    # Energies

    def begin_gather(self, mine: Tensor, n: int) -> Callable[[], Tensor]:
        """Send (my replicas, 1 + my share of n) numbers to all ranks; what is returned gives
        (replicas, 1 + n) when called.

        Column 0 is a replica's own number, for which its first rank speaks; the others are
        examples, in the batch's order. The numbers travel in the background until they are asked
        for.
        """
        shares = _slices(n, self.n_data_ranks)
        padded = mine.new_zeros(
            len(self.replicas_of(0)), 1 + max(share.stop - share.start for share in shares)
        )
        padded[: mine.shape[0], : mine.shape[1]] = mine
        parts = [torch.empty_like(padded) for _ in range(self.process_group.size)]
        with self.process_group.collective("gather of the energies"):
            work = dist.all_gather(parts, padded, async_op=True)

        def of_rank(row: int, column: int) -> Tensor:
            numbers = parts[row * self.n_data_ranks + column][: len(self.replicas_of(row))]
            width = shares[column].stop - shares[column].start
            return numbers[:, (1 if column else 0) : 1 + width]

        def finish() -> Tensor:
            with self.process_group.collective("gather of the energies"):
                work.wait()
            ranks = [
                [of_rank(row, column) for column in range(self.n_data_ranks)]
                for row in range(self.n_replica_ranks)
            ]
            return torch.cat([torch.cat(row, dim=1) for row in ranks])

        return finish

    def __repr__(self) -> str:
        return f"ReplicaMesh({self.n_replicas} replicas on {self.n_replica_ranks} x {self.n_data_ranks} ranks)"


def _slices(n: int, parts: int) -> list[slice]:
    bounds = [round(n * k / parts) for k in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def replica_mesh(n_replicas: int, device: torch.device | str | None = None) -> ReplicaMesh:
    """Where `n_replicas` replicas live: on all processes of `torchrun`, or on this one if it is
    alone.

    The number of ranks must be at most that of the replicas, or a multiple of it. `device` is
    "cuda" or "cpu", else CUDA where there is one.

    >>> replica_mesh(4)
    ReplicaMesh(4 replicas on 1 x 1 ranks)
    """
    if isinstance(n_replicas, bool) or not isinstance(n_replicas, int) or n_replicas < 1:
        raise InvalidArgumentError(f"n_replicas must be a whole number >= 1, got {n_replicas!r}")
    process_group = join()
    if process_group.size > n_replicas and process_group.size % n_replicas:
        raise InvalidArgumentError(
            f"{process_group.size} processes cannot share {n_replicas} replicas evenly; start at most {n_replicas}, or a multiple of it"
        )
    if process_group.size == 1:
        return ReplicaMesh(n_replicas)
    kind = (
        torch.device(device).type
        if device is not None
        else ("cuda" if torch.cuda.is_available() else "cpu")
    )
    data = max(1, process_group.size // n_replicas)
    with process_group.collective("making of the mesh"):
        mesh = _device_mesh(kind, process_group.size // data, data)
    return ReplicaMesh(n_replicas, process_group, mesh)


@functools.cache  # every one opens connections of its own
def _device_mesh(kind: str, n_replica_ranks: int, n_data_ranks: int) -> DeviceMesh:
    return init_device_mesh(
        kind, (n_replica_ranks, n_data_ranks), mesh_dim_names=("replica", "data")
    )
