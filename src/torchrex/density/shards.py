"""Independent runs in shards: who samples which, with which seed, and how the draws of all come
together.

The number of shards decides the random numbers and the number of processes does not: each process
samples some shards whole, with nothing sent between them, and at the end all processes have the
draws of all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrex.checkpoint import Checkpoints
from torchrex.density.sampling_drawing import Drawing
from torchrex.density.sampling_loop import End, draw_all
from torchrex.density.tensor_ensemble import TensorEnsemble
from torchrex.distributed import ALONE, ProcessGroup, Rendezvous, join
from torchrex.errors import (
    CheckpointError,
    InvalidArgumentError,
    NonFiniteEnergyError,
    TorchrexError,
)
from torchrex.exchange.noise import warn_of_shape
from torchrex.posterior import Draws
from torchrex.recording import Callback
from torchrex.rng import derive_seed

CHAIN_AXIS = {
    "values": 0,
    "noise_variance": 2,
    "replica_at": 2,
    "energy": 2,
    "accepted": 1,
    "proposed": 1,
}
DRAW_AXIS = {"values": 1, "noise_variance": 0, "replica_at": 0, "energy": 0, "steps": 0}
STATUSES = (
    "finished",
    "paused",
    "interrupted",
    "failed",
)  # the worst of all shards is that of the whole


def cut(n: int, parts: int) -> list[range]:
    """`n` things in so many groups of neighbours; where they do not divide evenly, the first groups
    have one more.
    """
    each, more = divmod(n, parts)
    bounds = list(itertools.accumulate((each + (k < more) for k in range(parts)), initial=0))
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def process_group_for(shards: int | None, n_runs: int) -> ProcessGroup:
    """The processes that share them; refused if a process would have nothing to do, or a shard."""
    n_shards = 1 if shards is None else shards
    if isinstance(n_shards, bool) or not isinstance(n_shards, int) or n_shards < 1:
        raise InvalidArgumentError(f"shards must be a whole number >= 1, got {shards!r}")
    if n_runs < n_shards:
        raise InvalidArgumentError(
            f"n_runs={n_runs} cannot be divided into shards={n_shards}; give at least as many runs"
        )
    size = (
        dist.get_world_size()
        if dist.is_available() and dist.is_initialized()
        else int(os.environ.get("WORLD_SIZE", "1"))
    )
    if (
        size > n_shards
    ):  # before joining: a process that samples by itself should not wait for the others to hear this
        some = "1 shard" if n_shards == 1 else f"{n_shards} shards"
        raise InvalidArgumentError(
            f"{size} processes cannot share {some}; give shards={size} or more, and at least as many n_runs, "
            f"or start fewer processes"
        )
    return join() if size > 1 else ALONE


class Shards:
    """The shards of one call of `sample`, and those among them that are this process's own."""

    def __init__(
        self, whole: TensorEnsemble, n_shards: int, seed: int, process_group: ProcessGroup
    ) -> None:
        self.whole, self.n_shards, self.seed, self.process_group = (
            whole,
            n_shards,
            seed,
            process_group,
        )
        self.runs = cut(whole.position.shape[1], n_shards)
        self.of_rank = cut(n_shards, process_group.size)
        self.mine = self.of_rank[process_group.rank]

    def ensemble(self, k: int) -> TensorEnsemble:
        if self.n_shards == 1:
            return self.whole
        here = slice(self.runs[k].start, self.runs[k].stop)
        return self.whole.copy(here)

    def seed_of(self, k: int) -> int:
        return self.seed if self.n_shards == 1 else derive_seed(self.seed, f"shard.{k}")

    def checkpoints(self, given: Checkpoints | None, k: int) -> Checkpoints | None:
        """Those of shard k; of a run in one piece, those in the folder itself."""
        if given is None or self.n_shards == 1:
            return given
        return Checkpoints(given.folder / f"shard={k}", keep=given.keep)

    def name(self, k: int) -> str | None:
        return None if self.n_shards == 1 else f"{k} of {self.n_shards}"

    def require_same_cut(self, given: Checkpoints | None) -> None:
        """A folder of another number of shards holds nothing to go on from, and must not be mixed
        with.
        """
        if given is None:
            return
        there = shard_folders(given.folder)
        if self.n_shards == 1 and there:
            raise CheckpointError(
                f"{given.folder} holds a run in {len(there)} shards; give shards={len(there)}, or another folder"
            )
        if self.n_shards > 1 and given.steps():
            raise CheckpointError(
                f"{given.folder} holds a run in one piece; leave out shards={self.n_shards}, or give another folder"
            )

    def require_same_everywhere(self, numbers: Mapping[str, Any]) -> None:
        """All processes must have been asked for the same."""
        said = self.process_group.gather(dict(numbers), "agreement on the shards")
        for rank, other in enumerate(said):
            for name, value in said[0].items():
                if other.get(name) != value:
                    raise InvalidArgumentError(
                        f"rank 0 has {name} {value} and rank {rank} {other.get(name)}; give all processes the same {name}"
                    )

    def draw(
        self,
        make: Callable[[int], Drawing],
        settings: dict[str, Any],
        *,
        resume: bool,
        budget: float | None,
        progress: Callback | None,
    ) -> Draws | None:
        """Sample what is this process's own, wait for the others, and put all together. None if not
        all have begun.
        """
        process_group = self.process_group
        drawings: list[Drawing] = []
        with process_group.all_or_none("reading of the checkpoints", CheckpointError):
            for k in self.mine:
                drawings.append(make(k))
                drawings[-1].find(resume=resume)
        meeting = Rendezvous(process_group)
        met: TorchrexError | OSError | None = None
        end = End("interrupted")
        with process_group.reporting_errors(), _terminating(process_group):
            try:
                end = draw_all(
                    drawings,
                    budget=budget,
                    progress=progress,
                    stop_requested=meeting.stop_requested,
                )
            except (TorchrexError, OSError) as error:
                met = error
            if met is not None or end.status in ("interrupted", "failed"):
                meeting.request_stop()
            meeting.wait("end of the sampling")
        with process_group.all_or_none("sampling", TorchrexError):
            if met is not None:
                raise met
        ends: list[list[Any]] = process_group.gather(
            [end.status, self._failure(end)], "end of the sampling"
        )
        status = max((each for each, _ in ends), key=STATUSES.index)
        draws = combine(self._collect(drawings, status, settings))
        if status == "finished" and process_group.is_main and drawings:
            run = drawings[0].run
            warn_of_shape(run.noise_shape(), run.correction_factor.mean(1))
        for _, failure in ends:
            if failure is not None:
                raise NonFiniteEnergyError(**failure, draws=draws)
        return draws

    def _failure(self, end: End) -> dict[str, Any] | None:
        """An error as plain values, with the run counted among all."""
        if end.failure is None:
            return None
        error, first = end.failure, self.runs[self.mine[end.failed]].start
        named = {
            name: getattr(error, name) for name in ("replica", "rung", "step", "value", "advice")
        }
        return {**named, "run": error.run + first}

    def _collect(
        self, drawings: Sequence[Drawing], status: str, settings: dict[str, Any]
    ) -> list[Draws | None]:
        """The draws of all shards, in their order, on every process. They are sent as bytes."""
        mine = {
            k: drawing.draws(status, settings)
            for k, drawing in zip(self.mine, drawings, strict=True)
        }
        if self.process_group.size == 1:
            return list(mine.values())
        forms = {k: None if draws is None else _form(draws) for k, draws in mine.items()}
        gathered: list[list[list[Any]]] = self.process_group.gather(
            [[k, form] for k, form in forms.items()], "sending of the draws"
        )
        found: list[Draws | None] = []
        for rank, said in enumerate(gathered):
            for k, form in said:
                draws = mine.get(k)
                if form is not None:
                    tensors = {
                        name: self._send(rank, draws, name, *each)
                        for name, each in form["tensors"].items()
                    }
                    draws = Draws(
                        **tensors, n_steps=form["n_steps"], status=status, settings=form["settings"]
                    )
                found.append(draws)
        return found

    def _send(
        self, owner: int, draws: Draws | None, name: str, dtype: str, shape: list[int]
    ) -> Tensor:
        is_here = draws is not None and owner == self.process_group.rank
        tensor = (
            getattr(draws, name).contiguous()
            if is_here
            else torch.empty(shape, dtype=getattr(torch, dtype))
        )
        if tensor.numel():
            self.process_group.broadcast(
                tensor.flatten().view(torch.uint8), owner, "sending of the draws"
            )  # gloo has no int16
        return tensor


@contextlib.contextmanager
def _terminating(process_group: ProcessGroup) -> Iterator[None]:
    """On several processes SIGTERM, which torchrun sends when one of them is gone, saves and stops
    as Ctrl-C does.
    """
    ours = process_group.size > 1 and threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shard_folders(folder: Path) -> list[Path]:
    """The folders of the shards of a run whose checkpoints lie there."""
    return (
        sorted(path for path in folder.glob("shard=*") if path.is_dir()) if folder.is_dir() else []
    )


def _form(draws: Draws) -> dict[str, Any]:
    tensors = {field.name: getattr(draws, field.name) for field in fields(draws)}
    said = {
        name: [str(t.dtype).removeprefix("torch."), list(t.shape)]
        for name, t in tensors.items()
        if isinstance(t, Tensor)
    }
    return {"n_steps": draws.n_steps, "settings": draws.settings, "tensors": said}


def combine(parts: Sequence[Draws | None]) -> Draws | None:
    """The chains of all parts, in their order. Draws go as far as all parts do; swaps are counted
    over what each has done.
    """
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    if len(there) == 1:
        return there[0]
    n_steps = min(part.n_steps for part in there)
    n_draws = min(part.n_draws for part in there)
    first = there[0]
    joined = {
        name: torch.cat([_up_to(part, name, n_draws) for part in there], axis)
        for name, axis in CHAIN_AXIS.items()
    }
    settings = dict(first.settings)
    if "correction_factor" in settings:
        factors = torch.tensor(
            [part.settings["correction_factor"] for part in there], dtype=torch.float64
        )
        chains = torch.tensor([[part.n_chains] for part in there])
        settings["correction_factor"] = (
            ((factors.log() * chains).sum(0) / chains.sum()).exp().tolist()
        )
    return Draws(
        **joined,
        steps=first.steps[:n_draws],
        n_steps=n_steps,
        status=first.status,
        settings=settings,
    )


def _up_to(part: Draws, name: str, n_draws: int) -> Tensor:
    tensor: Tensor = getattr(part, name)
    return tensor.narrow(DRAW_AXIS[name], 0, n_draws) if name in DRAW_AXIS else tensor
