"""How long does a step of 64 or 1,024 ranks take, from measured steps, their spread, and gathers?

    python benchmarks/step_skew.py --out benchmarks/results/step_skew.json

Measured on one machine with a GPU: every step of one replica of ResNet-20, eager as it is on
several processes, and the gather of up to 16 processes over gloo, each on a core of its own. From
these a step of P ranks, whose times are drawn from the measured ones independently of each other:

    mean of the slowest of P + gather(P, bytes)

The gather is the ring of scaling_model.py. Nothing of this was run on a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import torchrex
from ladder_growth import EXAMPLES, NETWORKS
from record import HERE, into_page, setting, surroundings, write
from scaling_measure import in_ranks, spread
from scaling_model import bytes_each, fit_ring, ring_seconds
from scaling_pages import PAGE
from scaling_ranks import gathers
from torchrex.vision import resnet20

RESULT = HERE / "results" / "step_skew.json"
LAYOUTS = ((64, 64), (1024, 64), (1024, 1024))  # replicas, ranks
DRAWS = 2_000  # steps of all ranks, to find the mean of the slowest
WARM_UP = 50


def steps(n: int) -> list[float]:
    """Milliseconds of every step of one replica, until the host has its energy."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(5_000, 3, 32, 32, device="cuda", generator=generator)
    y = torch.randint(10, (5_000,), device="cuda", generator=generator)
    ensemble = torchrex.ModuleEnsemble(
        resnet20,
        torchrex.PosteriorEnergy(F.cross_entropy, n_data=5_000, prior=torchrex.GaussianPrior(25.0)),
        torchrex.SGHMC(0.1),
        device="cuda",
        autocast=torch.bfloat16,
        channels_last=True,
    )
    run = torchrex.ModuleExchange(ensemble, torchrex.Ladder((0.01,), 2e-6), compiled=False)
    loader, times = torchrex.DeviceLoader((x, y), EXAMPLES), []
    for _ in range(WARM_UP + n):
        began = time.perf_counter()
        for info in run.advance(1, loader):
            float(info.energy.sum())
        times.append(1e3 * (time.perf_counter() - began))
    return times[WARM_UP:]


def gathers_on_cpu(*arguments: int) -> list[list[float]]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return gathers(*arguments)


def all_gathers(cores: int) -> list[Any]:
    """Ranks, examples, and when each gather began and ended on each rank."""
    return [
        [ranks, n, in_ranks(ranks, gathers_on_cpu, ranks, n, 300)]
        for ranks in (2, 4, 8, 16)
        if ranks <= cores
        for n in (16, EXAMPLES, 4_096)
    ]


def gather_times(measured: list[Any]) -> list[dict[str, Any]]:
    """Microseconds from the moment the last rank began until the last rank has all."""
    found = []
    for ranks, n, said in measured:
        times = torch.tensor(said, dtype=torch.float64)
        took = 1e6 * (times[..., 1].max(0).values - times[..., 0].max(0).values)
        size = bytes_each(ranks, ranks, n)
        found.append({"ranks": ranks, "bytes": size, "us": spread(took.tolist())})
    return found


def slowest(times: list[float], ranks: int, each: int) -> float:
    """The mean over steps of the slowest rank's time, if every rank does `each` replicas."""
    generator = torch.Generator().manual_seed(ranks)
    measured, total = torch.tensor(times, dtype=torch.float64), 0.0
    for _ in range(DRAWS):
        drawn = torch.randint(len(times), (ranks, each), generator=generator)
        total += float(measured[drawn].sum(1).max())
    return total / DRAWS


def table(record: dict[str, Any]) -> str:
    """A step of each layout on each network, and what of it is work."""
    networks = {**NETWORKS, "as measured": record["ring"]}
    lines = [
        "| replicas | ranks | work, ms | slowest rank, ms | "
        + " | ".join(f"{name}: gather, ms | work, %" for name in networks)
        + " |",
        "|---" * (4 + 2 * len(networks)) + "|",
    ]
    for found in record["layouts"]:
        replicas, ranks = found["replicas"], found["ranks"]
        cells = [f"{replicas:,}", f"{ranks:,}", f"{found['work']:.1f}", f"{found['slowest']:.1f}"]
        for ring in networks.values():
            gather = 1e3 * ring_seconds(ranks, bytes_each(replicas, ranks, EXAMPLES), **ring)
            share = 100 * found["work"] / (found["slowest"] + gather)
            cells += [f"{gather:.1f}", f"{share:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(times: list[float], measured: list[Any], cores: int) -> dict[str, Any]:
    """What is stored: the spread of a step, the gather with its constants, and the layouts."""
    of_gather, ordered = gather_times(measured), sorted(times)
    points = [(g["ranks"], g["bytes"], g["us"]["median"] / 1e6) for g in of_gather]
    one = spread(times)
    return {
        "ms": {**one, "p99": ordered[len(ordered) * 99 // 100], "max": ordered[-1]},
        "gather": of_gather,
        "ring": fit_ring(points, cores),
        "layouts": [
            {
                "replicas": replicas,
                "ranks": ranks,
                "work": one["mean"] * replicas / ranks,
                "slowest": slowest(times, ranks, replicas // ranks),
            }
            for replicas, ranks in LAYOUTS
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--pages", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    if not arguments.pages:
        record = surroundings(__file__, "torch")
        record["hardware"]["gpu"] = torch.cuda.get_device_name()
        cores = record["hardware"]["cores_used"]
        times = steps(arguments.steps)
        write(arguments.out, record | summary(times, all_gathers(cores), cores))
    record = json.loads(arguments.out.read_text())
    print(table(record))
    if arguments.out.resolve() == RESULT.resolve():
        into_page(PAGE, "skew", f"{table(record)}\n\n{setting(record)}")


if __name__ == "__main__":
    main()
