"""Independent runs in shards: which process samples which, with which seed, and how the draws
come together.

The number of shards decides the random numbers, the number of processes does not. Each process
samples some shards completely, with nothing sent between them. At the end all processes have the
draws of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrex.checkpoint import Checkpoints
from torchrex.density.tensor_ensemble import TensorEnsemble
from torchrex.distributed import ALONE, ProcessGroup, join
from torchrex.errors import CheckpointError, InvalidArgumentError
from torchrex.posterior import Draws
from torchrex.processes import rank_and_size
from torchrex.rng import derive_seed

# The axis of the chains and that of the draws, of the tensors of `Draws` that have one of chains.
AXES = {
    "values": (0, 1),
    "noise_variance": (2, 0),
    "replica_at": (2, 0),
    "energy": (2, 0),
    "accepted": (1, None),
    "proposed": (1, None),
}


def cut(n: int, parts: int) -> list[range]:
    """`n` things in so many groups of neighbours; if they do not divide evenly, the first groups
    have one more.
    """
    each, more = divmod(n, parts)
    bounds = list(itertools.accumulate((each + (k < more) for k in range(parts)), initial=0))
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def shard_folders(folder: Path) -> list[Path]:
    """The folders of the shards of a run whose checkpoints are there."""
    return sorted(
        path for path in folder.glob("shard=*") if path.is_dir() and not path.is_symlink()
    )


def process_group_for(n_shards: int, n_runs: int) -> ProcessGroup:
    """The processes that share them; refused if a process or a shard would have nothing to do."""
    if n_runs < n_shards:
        raise InvalidArgumentError(
            f"n_runs={n_runs} cannot be divided into shards={n_shards}; give at least as many runs"
        )
    joined = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if joined else rank_and_size()[1]
    if size > n_shards:  # before joining, where the others would have to be waited for
        some = "1 shard" if n_shards == 1 else f"{n_shards} shards"
        raise InvalidArgumentError(
            f"{size} processes cannot share {some}; give shards={size} or more, and at least as "
            "many n_runs, or start fewer processes"
        )
    return join() if size > 1 else ALONE


class Shards:
    """The shards of one call of `sample`; `mine` are those of this process."""

    def __init__(
        self, ensemble: TensorEnsemble, n_shards: int, seed: int, process_group: ProcessGroup
    ) -> None:
        self.all_runs, self.n_shards, self.seed = ensemble, n_shards, seed
        self.process_group = process_group
        self.runs = cut(ensemble.position.shape[1], n_shards)
        self.mine = cut(n_shards, process_group.size)[process_group.rank]

    def ensemble(self, k: int) -> TensorEnsemble:
        return self.all_runs.copy(slice(self.runs[k].start, self.runs[k].stop))

    def seed_of(self, k: int) -> int:
        return self.seed if self.n_shards == 1 else derive_seed(self.seed, f"shard.{k}")

    def checkpoints(self, given: Checkpoints | None, k: int) -> Checkpoints | None:
        """Those of shard k; of a single shard, those in the folder itself."""
        if given is None or self.n_shards == 1:
            return given
        return Checkpoints(given.folder / f"shard={k}", keep=given.keep)

    def name(self, k: int) -> str | None:
        return None if self.n_shards == 1 else f"{k} of {self.n_shards}"

    def require_same_cut(self, given: Checkpoints | None) -> None:
        """A folder of another number of shards holds nothing to go on from."""
        if given is None:
            return
        n = len(shard_folders(given.folder))
        if self.n_shards == 1 and n:
            raise CheckpointError(f"{given.folder} holds a run in {n} shards; give shards={n}")
        if self.n_shards > 1 and given.steps():
            raise CheckpointError(
                f"{given.folder} holds a run in one piece; leave out shards={self.n_shards}, or "
                "give another folder"
            )

    def require_same_everywhere(self, numbers: Mapping[str, Any]) -> None:
        """All processes must have been asked for the same."""
        gathered = self.process_group.gather(dict(numbers), "agreement on the shards")
        for rank, other in enumerate(gathered):
            for name, value in gathered[0].items():
                if other.get(name) != value:
                    raise InvalidArgumentError(
                        f"rank 0 has {name} {value} and rank {rank} {other.get(name)}; give all "
                        f"processes the same {name}"
                    )

    def gather(self, mine: Sequence[Draws | None]) -> Draws | None:
        """The draws of all shards on every process, sent as bytes. None if not all have begun."""
        if self.process_group.size == 1:
            return combine(mine)
        forms = [None if draws is None else _form(draws) for draws in mine]
        gathered = self.process_group.gather(forms, "sending of the draws")
        parts: list[Draws | None] = []
        for rank, of_rank in enumerate(gathered):
            own = iter(mine if rank == self.process_group.rank else ())
            parts += [self._send(rank, next(own, None), form) for form in of_rank]
        return combine(parts)

    def _send(self, owner: int, draws: Draws | None, form: dict[str, Any] | None) -> Draws | None:
        if form is None:
            return None
        tensors: dict[str, Any] = {}
        for name, (dtype, shape) in form.pop("tensors").items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            if draws is not None:
                tensor = getattr(draws, name).contiguous()
            if tensor.numel():  # as bytes: gloo has no int16
                flat = tensor.flatten().view(torch.uint8)
                self.process_group.broadcast(flat, owner, "sending of the draws")
            tensors[name] = tensor
        return Draws(**tensors, **form)


def _form(draws: Draws) -> dict[str, Any]:
    """All of some draws but the numbers in their tensors."""
    values = {field.name: getattr(draws, field.name) for field in fields(draws)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    forms = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in tensors.items()
    }
    return {name: values[name] for name in values.keys() - tensors.keys()} | {"tensors": forms}


def combine(parts: Sequence[Draws | None]) -> Draws | None:
    """The chains of all parts, in their order. Draws go as far as all parts do; swaps are counted
    over what each has done.
    """
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    first, n_draws = there[0], min(part.n_draws for part in there)
    if len(there) == 1:
        return first

    def joined(name: str, chains: int, draws: int | None) -> Tensor:
        tensors: list[Tensor] = [getattr(part, name) for part in there]
        if draws is not None:
            tensors = [tensor.narrow(draws, 0, n_draws) for tensor in tensors]
        return torch.cat(tensors, chains)

    settings = dict(first.settings)
    if "correction_factor" in settings:  # the geometric mean over all chains
        factors = [part.settings["correction_factor"] for part in there]
        chains = torch.tensor([[part.n_chains] for part in there])
        logs = torch.tensor(factors, dtype=torch.float64).log() * chains
        settings["correction_factor"] = (logs.sum(0) / chains.sum()).exp().tolist()
    return Draws(
        **{name: joined(name, *axes) for name, axes in AXES.items()},
        steps=first.steps[:n_draws],
        n_steps=min(part.n_steps for part in there),
        status=first.status,
        settings=settings,
    )
