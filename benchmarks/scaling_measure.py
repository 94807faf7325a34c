"""Measures layouts of scaling.py: starts ranks, splits their time into waiting and transport."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaling_model import bytes_each, fit_ring, fit_work
from scaling_ranks import NETS, besides, gathers, steps

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from ranks import Ranks

Layout = tuple[str, int, int, int]
# Network, replicas, ranks, threads of a rank. Those of one rank and two replicas are for the
# model's constants.
LAYOUTS: list[Layout] = [
    *(("MLP", replicas, 1, 1) for replicas in (2, 4, 8)),
    *(("MLP", replicas, ranks, 1) for replicas in (4, 8) for ranks in (2, 4, 8)),
    *(("ResNet-20", replicas, 1, 1) for replicas in (2, 4)),
    ("ResNet-20", 4, 1, 2),
    *(("ResNet-20", 4, ranks, 1) for ranks in (2, 4, 8)),
]


# Processes


def in_ranks(n: int, function: Callable[..., Any], *arguments: Any, threads: int = 1) -> list[Any]:
    """What `function(*arguments)` returns on each of n processes, started as in the tests."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(n, with_threads, folder, threads, function, arguments, timeout=300)
        try:
            said = ranks.wait(seconds=900.0)
        finally:
            ranks.kill()
    for rank, words in enumerate(said):
        if words is None or (isinstance(words, dict) and "error" in words):
            raise SystemExit(
                f"rank {rank} of {n} did not finish {function.__name__}{arguments}: "
                f"{words or 'it was killed'}"
            )
    return said


def with_threads(threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(threads)
    return function(*arguments)


# From stamps to numbers


def spread(values: list[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile, and the mean."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return {
        "median": statistics.median(ordered),
        "p10": ordered[tenth],
        "p90": ordered[-1 - tenth],
        "mean": statistics.mean(ordered),
    }


def split(stamps: Tensor) -> tuple[Tensor, Tensor]:
    """Seconds of waiting for a slower rank, and of transport, (ranks, collectives).

    `stamps` is (..., 4). Processor work to post the numbers counts as transport.
    """
    began, posted, called, done = stamps.unbind(-1)
    last = posted.max(0).values
    waiting = (torch.minimum(done, last) - called).clamp(min=0.0)
    return waiting, (posted - began) + (done - called) - waiting


def summarise(said: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """One layout: milliseconds a step until all ranks have it; means over ranks of the processor
    time of that and of the microseconds in collectives.
    """
    found: dict[str, Any] = {}
    for blocks in zip(*(each["blocks"] for each in said), strict=True):
        of = found.setdefault(
            blocks[0]["way"],
            {name: [] for name in ("ms", "work", "waiting", "transport", "cpu", "background")},
        )
        walls = [block["wall"] for block in blocks]
        of["ms"].append(1e3 * (max(end for _, end in walls) - min(began for began, _ in walls)) / n)
        of["work"].append(1e3 * statistics.mean(block["main"] for block in blocks) / n)
        of["background"].append(
            1e6 * statistics.mean(block["cpu"] - block["main"] for block in blocks) / n
        )
        if blocks[0]["stamps"]:
            stamps = torch.tensor([block["stamps"] for block in blocks], dtype=torch.float64).view(
                len(blocks), n, -1, 5
            )
            waiting, transport = split(stamps[..., :4])
            for name, values in (
                ("waiting", waiting),
                ("transport", transport),
                ("cpu", stamps[..., 4]),
            ):
                of[name] += (1e6 * values.sum(2).mean(0)).tolist()
    return found


# Measuring


def add_gathers(found: dict[tuple[int, int, int], list[float]]) -> None:
    """Microseconds of the gather alone, to those found by (ranks, examples, bytes)."""
    for ranks in (2, 4, 8):
        for n in (16, 256, 4_096, 32_768):
            said = in_ranks(ranks, gathers, ranks, n, 150)
            # From the moment the last rank began until the last rank has it.
            times = torch.tensor(said, dtype=torch.float64)
            took = times[..., 1].max(0).values - times[..., 0].max(0).values
            found.setdefault((ranks, n, bytes_each(ranks, ranks, n)), []).extend(
                (1e6 * took).tolist()
            )


def add_steps(found: dict[Layout, dict[str, Any]], turns: int) -> None:
    """Add the results of `summarise` for every layout; rank 0 sends the same in every round."""
    for layout in LAYOUTS:
        net, replicas, ranks, threads = layout
        said = in_ranks(ranks, steps, net, replicas, turns, threads=threads)
        one = found.setdefault(layout, {"ways": {}})
        one["sent"], ways = said[0]["sent"], one["ways"]
        for way, values in summarise(said, NETS[net][3]).items():
            of = ways.setdefault(way, {name: [] for name in values})
            for name, numbers in values.items():
                of[name] += numbers
        print(
            layout,
            {way: f"{statistics.median(v['ms']):.3g} ms" for way, v in ways.items()},
            flush=True,
        )


def add_besides(found: dict[int, dict[str, Any]]) -> None:
    """Milliseconds until the last rank has sent a prediction and saved a checkpoint, by ranks."""
    for ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            said = in_ranks(ranks, besides, folder, 15)
        of = found.setdefault(
            ranks,
            {"sending": [], "saving": [], **{k: said[0][k] for k in ("prediction", "checkpoint")}},
        )
        for name in ("sending", "saving"):
            of[name] += [
                1e3 * max(values) for values in zip(*(each[name] for each in said), strict=True)
            ]


def measure(turns: int, rounds: int) -> dict[str, Any]:
    """Everything, as often as there are rounds, and the model's constants."""
    alone: dict[tuple[int, int, int], list[float]] = {}
    layouts: dict[Layout, dict[str, Any]] = {}
    rest: dict[int, dict[str, Any]] = {}
    load = [os.getloadavg()[0]]
    for _ in range(rounds):
        add_gathers(alone)
        add_steps(layouts, turns)
        add_besides(rest)
        load.append(os.getloadavg()[0])
    gather: list[dict[str, Any]] = [
        {"ranks": ranks, "examples": n, "bytes": size, "us": spread(times)}
        for (ranks, n, size), times in alone.items()
    ]
    results = []
    for (net, replicas, ranks, threads), found in layouts.items():
        one = {
            "net": net,
            "replicas": replicas,
            "ranks": ranks,
            "threads": threads,
            "examples": NETS[net][2],
        }
        ways = {
            way: {name: spread(v) for name, v in values.items() if v}
            for way, values in found["ways"].items()
        }
        results.append({**one, "sent_by_rank_0": found["sent"], "ways": ways})
    cores = len(os.sched_getaffinity(0))
    return {
        "load": load,
        "gather": gather,
        "results": results,
        "besides": [
            {**of, "ranks": ranks, "sending": spread(of["sending"]), "saving": spread(of["saving"])}
            for ranks, of in rest.items()
        ],
        "model": {
            "cores": cores,
            "ring": fit_ring(
                [(g["ranks"], g["bytes"], g["us"]["p10"] / 1e6) for g in gather], cores
            ),
            "work": {net: fit_work(results, net) for net in NETS},
        },
    }
