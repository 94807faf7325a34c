"""What each rank does for scaling.py, and how its collectives are counted and timed.

A rank does gathers alone, complete steps, and what comes now and then. All return plain numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchrex
from torchrex.checkpoint import Checkpoints
from torchrex.distributed import ReplicaMesh, replica_mesh
from torchrex.vision import resnet20

WAYS = ("overlapped", "at once", "silent")  # of making the gather of a step; see scaling.py


class Counted:
    """Counts the collectives of torch.distributed and the bytes that this rank gives to each."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __enter__(self) -> Counted:
        self._before = {
            name: getattr(dist, name) for name in ("all_gather", "all_reduce", "broadcast")
        }

        def counting(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                tensor = arguments[1] if name == "all_gather" else arguments[0]
                self.seen.append((name, tensor.numel() * tensor.element_size()))
                return self._before[name](*arguments, **options)

            return call

        for name in self._before:
            setattr(dist, name, counting(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def summary(self) -> dict[str, dict[str, int]]:
        """Calls and bytes by kind."""
        kinds = dict.fromkeys(name for name, _ in self.seen)
        sizes = {kind: [size for name, size in self.seen if name == kind] for kind in kinds}
        return {kind: {"calls": len(of), "bytes": sum(of)} for kind, of in sizes.items()}


class Stopwatch:
    """When each collective of a step began, was posted, was asked for and was complete."""

    def __init__(self) -> None:
        self.way = "overlapped"
        self.stamps: list[list[float]] = []
        begin_gather, sum_over_examples = ReplicaMesh.begin_gather, ReplicaMesh.sum_over_examples

        def timed_gather(mesh: ReplicaMesh, mine: Tensor, n: int) -> Callable[[], Tensor]:
            if self.way == "silent":
                return lambda: mine[:1, :1].expand(mesh.n_replicas, 1 + n).clone()
            cpu, began = time.thread_time(), time.perf_counter()
            finish = begin_gather(mesh, mine, n)
            posted, posting = time.perf_counter(), time.thread_time() - cpu

            def timed_finish() -> Tensor:
                cpu, called = time.thread_time(), time.perf_counter()
                numbers = finish()
                self.stamps.append(
                    [began, posted, called, time.perf_counter(), posting + time.thread_time() - cpu]
                )
                return numbers

            if self.way == "overlapped":
                return timed_finish
            numbers = timed_finish()
            return lambda: numbers

        def timed_sum(mesh: ReplicaMesh, tensor: Tensor) -> None:
            if self.way == "silent" or not mesh.shares_examples:
                return
            cpu, began = time.thread_time(), time.perf_counter()
            sum_over_examples(mesh, tensor)
            self.stamps.append([began, began, began, time.perf_counter(), time.thread_time() - cpu])

        ReplicaMesh.begin_gather, ReplicaMesh.sum_over_examples = timed_gather, timed_sum  # type: ignore[method-assign]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


# Network, shape of an example, examples of a minibatch, steps of a block.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "MLP": (mlp, (64,), 64, 20),
    "ResNet-20": (resnet20, (3, 32, 32), 32, 2),
}


def gathers(replicas: int, n: int, repeats: int) -> list[list[float]]:
    """When each gather began and ended, after a barrier."""
    mesh = replica_mesh(replicas)
    mine = torch.zeros(len(mesh.mine), 1 + n, dtype=torch.float64)
    times = []
    for _ in range(repeats + 20):
        dist.barrier()
        began = time.perf_counter()
        mesh.begin_gather(mine, n)()
        times.append([began, time.perf_counter()])
    return times[20:]


def make_run(net: str, replicas: int) -> tuple[torchrex.ModuleExchange, torchrex.DeviceLoader]:
    make, shape, size, _ = NETS[net]
    generator = torch.Generator().manual_seed(0)
    n_data = 4_096 if net == "MLP" else 512
    x = torch.randn(n_data, *shape, generator=generator)
    y = torch.randint(10, (n_data,), generator=generator)
    prior = torchrex.GaussianPrior(1.0)
    energy = torchrex.PosteriorEnergy(F.cross_entropy, n_data=n_data, prior=prior)
    mesh = replica_mesh(replicas)
    ensemble = torchrex.ModuleEnsemble(make, energy, torchrex.SGHMC(0.1), mesh=mesh)
    ladder = torchrex.Ladder([1.0 + 0.01 * rung for rung in range(replicas)], 1e-6)
    return torchrex.ModuleExchange(ensemble, ladder), torchrex.DeviceLoader((x, y), size)


def steps(net: str, replicas: int, turns: int) -> dict[str, Any]:
    """Blocks of steps in every way, in turns: their begin, end, processor time and stamps."""
    run, loader = make_run(net, replicas)
    n, alone = NETS[net][3], not dist.is_initialized()
    with Counted() as counted:
        for _ in run.advance(2, loader):  # the first looks at the batch as well
            pass
        counted.seen.clear()
        for _ in run.advance(1, loader):
            pass
    watch, blocks = Stopwatch(), []
    for turn in range(turns * (5 if n > 5 else 1)):
        start = turn % len(WAYS)
        for way in ("alone",) if alone else WAYS[start:] + WAYS[:start]:
            watch.way, watch.stamps = way, []
            if not alone:
                dist.barrier()
            main, everything, began = time.thread_time(), time.process_time(), time.perf_counter()
            for _ in run.advance(n, loader):
                pass
            wall = [began, time.perf_counter()]
            spent = {"main": time.thread_time() - main, "cpu": time.process_time() - everything}
            blocks.append({"way": way, "wall": wall, **spent, "stamps": watch.stamps})
    return {"blocks": blocks, "sent": counted.summary()}


def besides(folder: str, repeats: int) -> dict[str, Any]:
    """What is done now and then: a prediction, a checkpoint."""
    run, loader = make_run("ResNet-20", 4)
    with Counted() as counted:
        for _ in run.advance(1, loader):
            pass
        output = torch.zeros(256, 10)
        sending, saving = [], []
        for repeat in range(repeats):
            counted.seen.clear()
            began = time.perf_counter()
            if run.mesh.is_spread:
                run.mesh.send_from(
                    0, output if run.mesh.process_group.rank == 0 else None, run.device
                )
            sending.append(time.perf_counter() - began)
            prediction = counted.summary()
            counted.seen.clear()
            state, began = run.state_dict(), time.perf_counter()
            state = {"replicas": state.pop("replicas"), "run": state}
            Checkpoints(Path(folder)).save(repeat, state, process_group=run.mesh.process_group)
            saving.append(time.perf_counter() - began)
    return {
        "sending": sending,
        "saving": saving,
        "prediction": prediction,
        "checkpoint": counted.summary(),
    }
