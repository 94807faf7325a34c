"""Which process holds which replicas, and which part of every minibatch: a mesh replica x data.

With as many ranks as replicas or fewer, each rank holds some complete replicas. With more, the
ranks of one replica share every minibatch, and add their gradients. Weights stay where they are.
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

from torchrex.distributed.process_group import ALONE, ProcessGroup, join
from torchrex.errors import InvalidArgumentError, TargetError, require_whole


class ReplicaMesh:
    """`n_replicas` replicas on the processes of a group; make it with `replica_mesh`."""

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
        """The first rank of those that hold a replica."""
        row = next(row for row in range(self.n_replica_ranks) if replica in self.replicas_of(row))
        return row * self.n_data_ranks

    def local(self, per_replica: Tensor) -> Tensor:
        """The rows of this rank's replicas, of a tensor (replicas, ...)."""
        return per_replica[self.mine.start : self.mine.stop] if self.is_spread else per_replica

    def send_from(self, owner: int, output: Any, device: torch.device) -> Any:
        """A tensor, or tensors in tuples and dicts, that one rank has, on all of them."""
        what = "sending of an output"
        leaves, spec = pytree.tree_flatten(output)
        form: list[Any] | None = None
        if leaves and all(isinstance(leaf, Tensor) for leaf in leaves):
            forms = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in leaves]
            form = [pytree.treespec_dumps(spec), forms]
        sent = self.process_group.gather(form, what)[owner]
        if sent is None:
            raise InvalidArgumentError(
                "on several processes an output must be tensors, alone or in tuples and dicts; "
                "return only those"
            )
        if form is None:
            spec = pytree.treespec_loads(sent[0])
            leaves = [
                torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                for dtype, shape in sent[1]
            ]
        leaves = [self.process_group.broadcast(t.contiguous(), owner, what) for t in leaves]
        return pytree.tree_unflatten(leaves, spec)

    # Examples

    def part_of(self, batch: Any) -> tuple[Any, int]:
        """This rank's examples of a minibatch, and how many the minibatch has."""
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        sizes, ranks = {len(leaf) for leaf in leaves if leaf.ndim}, self.n_data_ranks
        if len(sizes) != 1:
            raise TargetError(
                f"{ranks} ranks share a batch by its first axis, but its tensors have sizes "
                f"{sorted(sizes)}"
            )
        (n,) = sizes
        if n < ranks:
            raise TargetError(f"{ranks} ranks cannot share {n} examples; use larger batches")
        here = _slices(n, ranks)[self.data_rank]

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
        """Send (my replicas, 1 + my share of n) numbers to all ranks; the returned function waits
        for (replicas, 1 + n).

        Column 0 is a replica's own number, from its first rank; the others are examples, in the
        batch's order.
        """
        shares = _slices(n, self.n_data_ranks)
        widths = [share.stop - share.start for share in shares]
        padded = mine.new_zeros(len(self.replicas_of(0)), 1 + max(widths))
        padded[: mine.shape[0], : mine.shape[1]] = mine
        parts = [torch.empty_like(padded) for _ in range(self.process_group.size)]
        with self.process_group.collective("gather of the energies"):
            work = dist.all_gather(parts, padded, async_op=True)

        def of_rank(row: int, column: int) -> Tensor:
            numbers = parts[row * self.n_data_ranks + column][: len(self.replicas_of(row))]
            return numbers[:, (1 if column else 0) : 1 + widths[column]]

        def finish() -> Tensor:
            with self.process_group.collective("gather of the energies"):
                work.wait()
            columns = range(self.n_data_ranks)
            rows = range(self.n_replica_ranks)
            return torch.cat([torch.cat([of_rank(r, c) for c in columns], dim=1) for r in rows])

        return finish

    def __repr__(self) -> str:
        ranks = f"{self.n_replica_ranks} x {self.n_data_ranks} ranks"
        return f"ReplicaMesh({self.n_replicas} replicas on {ranks})"


def _slices(n: int, parts: int) -> list[slice]:
    bounds = [round(n * k / parts) for k in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def replica_mesh(n_replicas: int, device: torch.device | str | None = None) -> ReplicaMesh:
    """`n_replicas` replicas on all processes of `torchrun`, or on this one if it is alone.

    The number of ranks must be at most that of the replicas, or a multiple of it. `device` is
    "cuda" or "cpu", else CUDA where there is one.

    >>> replica_mesh(4)
    ReplicaMesh(4 replicas on 1 x 1 ranks)
    """
    require_whole("n_replicas", n_replicas, least=1)
    process_group = join()
    size = process_group.size
    if size > n_replicas and size % n_replicas:
        raise InvalidArgumentError(
            f"{size} processes cannot share {n_replicas} replicas evenly; start at most "
            f"{n_replicas}, or a multiple of it"
        )
    if size == 1:
        return ReplicaMesh(n_replicas)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    kind = default if device is None else torch.device(device).type
    data = max(1, size // n_replicas)
    with process_group.collective("making of the mesh"):
        mesh = _device_mesh(kind, size // data, data)
    return ReplicaMesh(n_replicas, process_group, mesh)


@functools.cache  # each one opens connections of its own
def _device_mesh(kind: str, n_replica_ranks: int, n_data_ranks: int) -> DeviceMesh:
    shape = (n_replica_ranks, n_data_ranks)
    return init_device_mesh(kind, shape, mesh_dim_names=("replica", "data"))
