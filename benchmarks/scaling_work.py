"""What each rank does for scaling.py: gathers alone, whole steps, and what comes now and then. All
return plain numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchrex
from scaling_probes import WAYS, Counted, Stopwatch
from torchrex.checkpoint import Checkpoints
from torchrex.distributed import replica_mesh
from torchrex.vision import resnet20


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
    x, y = (
        torch.randn(n_data, *shape, generator=generator),
        torch.randint(10, (n_data,), generator=generator),
    )
    energy = torchrex.PosteriorEnergy(
        F.cross_entropy, n_data=n_data, prior=torchrex.GaussianPrior(1.0)
    )
    ensemble = torchrex.ModuleEnsemble(
        make, energy, torchrex.SGHMC(0.1), mesh=replica_mesh(replicas)
    )
    ladder = torchrex.Ladder([1.0 + 0.01 * rung for rung in range(replicas)], 1e-6)
    return torchrex.ModuleExchange(ensemble, ladder), torchrex.DeviceLoader((x, y), size)


def steps(net: str, replicas: int, turns: int) -> dict[str, Any]:
    """Blocks of steps in every way, by turns: when they began and ended, their processor time, and
    their stamps.
    """
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
            ended, main, everything = (
                time.perf_counter(),
                time.thread_time() - main,
                time.process_time() - everything,
            )
            blocks.append(
                {
                    "way": way,
                    "wall": [began, ended],
                    "main": main,
                    "cpu": everything,
                    "stamps": watch.stamps,
                }
            )
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
