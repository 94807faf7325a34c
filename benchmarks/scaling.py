"""What does it cost to spread replicas over processes? Bytes, the gather alone, whole steps, and a model of them.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json

Real ranks on this machine, over gloo, one thread each. Every layout is measured in three ways that take turns block by block:

    overlapped   as it is: the losses travel while the last replica's gradients are computed
    at once      the gather is waited for where it begins
    silent       nothing travels; every rank pretends that the others have its own losses

All ranks read one clock, so what a rank spends in a gather can be told apart: until the last rank has posted its numbers it waits
for a slower rank (ranks that share cores are never equally fast), and only what comes after that is transport. Tables and the
picture of docs/scaling.md are made from the stored numbers (`--pages` makes them anew without measuring).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchrex
from record import HERE, number, setting, surroundings, write
from torchrex.checkpoint import Checkpoints
from torchrex.distributed import ReplicaMesh, join, leave, replica_mesh
from torchrex.vision import resnet20

RESULT, PAGE = HERE / "results" / "scaling.json", HERE.parent / "docs" / "scaling.md"
WAYS = ("overlapped", "at once", "silent")
CONTEXT = multiprocessing.get_context("forkserver")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


# Network, shape of an example, examples of a minibatch, steps of a block.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "MLP": (mlp, (64,), 64, 20),
    "ResNet-20": (resnet20, (3, 32, 32), 32, 2),
}
# Network, replicas, ranks, threads of a rank. Those of one rank and two replicas are for the model's constants.
LAYOUTS = [
    *(("MLP", replicas, 1, 1) for replicas in (2, 4, 8)),
    *(("MLP", replicas, ranks, 1) for replicas in (4, 8) for ranks in (2, 4, 8)),
    *(("ResNet-20", replicas, 1, 1) for replicas in (2, 4)),
    ("ResNet-20", 4, 1, 2),
    *(("ResNet-20", 4, ranks, 1) for ranks in (2, 4, 8)),
]


# Processes


def in_ranks(n: int, function: Callable[..., Any], *arguments: Any, threads: int = 1, seconds: float = 900.0) -> list[Any]:
    """What `function(*arguments)` returns on each of n processes that know each other as those of torchrun do."""
    CONTEXT.set_forkserver_preload(["torchrex", "torchrex.distributed", "torchrex.vision", "torchrex.checkpoint"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(n):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
            told |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHREX_TIMEOUT": 300}
            environment = {name: str(value) for name, value in told.items()}
            out = Path(folder) / f"{rank}.json"
            process = CONTEXT.Process(target=_one_rank, args=(environment, threads, out, function, arguments), daemon=True)
            process.start()
            processes.append(process)
        try:
            deadline = time.monotonic() + seconds
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(n)]


def _one_rank(environment: dict[str, str], threads: int, out: Path, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(threads)
    join()
    said = function(*arguments)
    leave()
    out.write_text(json.dumps(said))


class Counted:
    """Counts the collectives of torch.distributed and the bytes that this rank gives to each."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __enter__(self) -> Counted:
        self._before = {name: getattr(dist, name) for name in ("all_gather", "all_reduce", "broadcast")}

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
    """Stands between an ensemble and its mesh: when a collective of a step began, was posted, was asked for and was there."""

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
                self.stamps.append([began, posted, called, time.perf_counter(), posting + time.thread_time() - cpu])
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


# What a rank does


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


def make_run(net: str, replicas: int) -> tuple[torchrex.ReplicaExchange, torchrex.DeviceLoader]:
    make, shape, size, _ = NETS[net]
    generator = torch.Generator().manual_seed(0)
    n_data = 4_096 if net == "MLP" else 512
    x, y = torch.randn(n_data, *shape, generator=generator), torch.randint(10, (n_data,), generator=generator)
    energy = torchrex.PosteriorEnergy(F.cross_entropy, n_data=n_data, prior=torchrex.GaussianPrior(1.0))
    ensemble = torchrex.ModuleEnsemble(make, energy, torchrex.SGHMC(0.1), mesh=replica_mesh(replicas))
    ladder = torchrex.Ladder([1.0 + 0.01 * rung for rung in range(replicas)], 1e-6)
    return torchrex.ReplicaExchange(ensemble, ladder), torchrex.DeviceLoader((x, y), size)


def steps(net: str, replicas: int, turns: int) -> dict[str, Any]:
    """Blocks of steps in every way, by turns: when they began and ended, their processor time, and their stamps."""
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
            ended, main, everything = time.perf_counter(), time.thread_time() - main, time.process_time() - everything
            blocks.append({"way": way, "wall": [began, ended], "main": main, "cpu": everything, "stamps": watch.stamps})
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
                run.mesh.send_from(0, output if run.mesh.crew.rank == 0 else None, run.device)
            sending.append(time.perf_counter() - began)
            prediction = counted.summary()
            counted.seen.clear()
            state, began = run.state_dict(), time.perf_counter()
            state = {"replicas": state.pop("replicas"), "run": state}
            Checkpoints(Path(folder)).save(repeat, state, crew=run.mesh.crew)
            saving.append(time.perf_counter() - began)
    return {"sending": sending, "saving": saving, "prediction": prediction, "checkpoint": counted.summary()}


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
    """Seconds that each rank waits for a slower one, and seconds of transport, (ranks, collectives), of stamps (..., 4).

    What the processor does to post the numbers counts as transport.
    """
    began, posted, called, done = stamps.unbind(-1)
    last = posted.max(0).values
    waiting = (torch.minimum(done, last) - called).clamp(min=0.0)
    return waiting, (posted - began) + (done - called) - waiting


def summarise(said: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """Of one layout: milliseconds a step of each block, until all have it; of that processor time, mean over ranks; and
    microseconds a step in collectives, mean over ranks.
    """
    found: dict[str, Any] = {}
    for blocks in zip(*(each["blocks"] for each in said), strict=True):
        of = found.setdefault(
            blocks[0]["way"], {name: [] for name in ("ms", "work", "waiting", "transport", "cpu", "background")}
        )
        walls = [block["wall"] for block in blocks]
        of["ms"].append(1e3 * (max(end for _, end in walls) - min(began for began, _ in walls)) / n)
        of["work"].append(1e3 * statistics.mean(block["main"] for block in blocks) / n)
        of["background"].append(1e6 * statistics.mean(block["cpu"] - block["main"] for block in blocks) / n)
        if blocks[0]["stamps"]:
            stamps = torch.tensor([block["stamps"] for block in blocks], dtype=torch.float64).view(len(blocks), n, -1, 5)
            waiting, transport = split(stamps[..., :4])
            for name, values in (("waiting", waiting), ("transport", transport), ("cpu", stamps[..., 4])):
                of[name] += (1e6 * values.sum(2).mean(0)).tolist()
    return found


# The model


def bytes_each(replicas: int, ranks: int, n: int, *, losses: bool = True) -> int:
    """What a rank gives to the gather of a step: for each of its replicas a prior term and its share of n losses, in float64.

    Where the noise estimator needs no losses, one sum of them. A rank with fewer replicas than the first one fills up with zeros.
    """
    data = max(1, ranks // replicas)
    rows = -(-replicas // (ranks // data))
    cuts = [round(n * k / data) for k in range(data + 1)]
    return 8 * rows * (1 + (max(b - a for a, b in itertools.pairwise(cuts)) if losses else 1))


def ring_seconds(ranks: int, size: float, *, base: float, latency: float, bandwidth: float, cores: float = float("inf")) -> float:
    """A gather on a ring: ranks - 1 rounds, each a message; ranks that share cores take turns.

    base + (ranks - 1) * max(1, ranks / cores) * (latency + size / bandwidth)
    """
    return base + (ranks - 1) * max(1.0, ranks / cores) * (latency + size / bandwidth) if ranks > 1 else 0.0


def fit_ring(measured: list[tuple[int, int, float]], cores: int) -> dict[str, float]:
    """Constants of `ring_seconds` from (ranks, bytes, seconds), by least squares of relative errors; none is negative."""
    from scipy.optimize import nnls

    rounds = [(ranks - 1) * max(1.0, ranks / cores) for ranks, _, _ in measured]
    rows = [[1.0 / t, k / t, k * size / t] for k, (_, size, t) in zip(rounds, measured, strict=True)]
    scale = [max(row[column] for row in rows) for column in range(3)]
    found, _ = nnls([[value / s for value, s in zip(row, scale, strict=True)] for row in rows], [1.0] * len(rows))
    base, latency, per_byte = (float(value / s) for value, s in zip(found, scale, strict=True))
    return {"base": base, "latency": latency, "bandwidth": 1.0 / per_byte if per_byte > 0 else float("inf")}


def step_seconds(
    replicas: int,
    ranks: int,
    n: int,
    *,
    fixed: float,
    each: float,
    ring: dict[str, float],
    cores: float,
    sums: tuple[int, float] = (0, 0.0),
) -> float:
    """A step without overlap: the replicas of a rank one after the other, ranks that share cores in turns, and the gather.

    Ranks that share a replica also add up `sums`, so many tensors of so many bytes together: twice round a ring, each message
    with its part of a tensor.
    """
    data = max(1, ranks // replicas)
    rows = -(-replicas // (ranks // data))
    turns = max(1.0, ranks / cores)
    work = turns * (fixed + rows * each / data)
    calls, size = sums if data > 1 else (0, 0.0)
    messages = 2 * (data - 1) * turns * (calls * ring["latency"] + size / data / ring["bandwidth"])
    return work + ring_seconds(ranks, bytes_each(replicas, ranks, n), cores=cores, **ring) + calls * ring["base"] + messages


def fit_work(results: list[dict[str, Any]], net: str) -> dict[str, float]:
    """A step on one rank of one thread is fixed + replicas * each: the least-squares line of relative errors.

    Of processor time, which others' load on the machine hardly changes.
    """
    points = [
        (r["replicas"], r["ways"]["alone"]["work"]["median"] / 1e3)
        for r in results
        if r["net"] == net and r["ranks"] == r["threads"] == 1
    ]
    rows = torch.tensor([[1.0 / t, replicas / t] for replicas, t in points], dtype=torch.float64)
    fixed, each = torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0].tolist()
    return {"fixed": fixed, "each": each}


# Measuring


def measure(turns: int, rounds: int) -> dict[str, Any]:
    load = [os.getloadavg()[0]]
    alone: dict[tuple[int, int, int], list[float]] = {}
    layouts: dict[tuple[str, int, int, int], dict[str, dict[str, list[float]]]] = {layout: {} for layout in LAYOUTS}
    sent: dict[tuple[str, int, int, int], Any] = {}
    rest: dict[int, dict[str, Any]] = {}
    for _ in range(rounds):
        for ranks in (2, 4, 8):
            for n in (16, 256, 4_096, 32_768):
                said = in_ranks(ranks, gathers, ranks, n, 150)
                times = torch.tensor(said, dtype=torch.float64)  # from the moment the last one began until the last one has it
                took = times[..., 1].max(0).values - times[..., 0].max(0).values
                alone.setdefault((ranks, n, bytes_each(ranks, ranks, n)), []).extend((1e6 * took).tolist())
        for layout in LAYOUTS:
            net, replicas, ranks, threads = layout
            said = in_ranks(ranks, steps, net, replicas, turns, threads=threads)
            sent[layout] = said[0]["sent"]
            for way, values in summarise(said, NETS[net][3]).items():
                of = layouts[layout].setdefault(way, {name: [] for name in values})
                for name, numbers in values.items():
                    of[name] += numbers
            print(layout, {way: f"{statistics.median(v['ms']):.3g} ms" for way, v in layouts[layout].items()}, flush=True)
        for ranks in (1, 2, 4):
            with tempfile.TemporaryDirectory() as folder:
                said = in_ranks(ranks, besides, folder, 15)
            of = rest.setdefault(ranks, {"sending": [], "saving": [], **{k: said[0][k] for k in ("prediction", "checkpoint")}})
            for name in ("sending", "saving"):
                of[name] += [1e3 * max(values) for values in zip(*(each[name] for each in said), strict=True)]
        load.append(os.getloadavg()[0])
    results = []
    for (net, replicas, ranks, threads), ways in layouts.items():
        one = {"net": net, "replicas": replicas, "ranks": ranks, "threads": threads, "examples": NETS[net][2]}
        of_way = {way: {name: spread(v) for name, v in values.items() if v} for way, values in ways.items()}
        results.append({**one, "sent_by_rank_0": sent[net, replicas, ranks, threads], "ways": of_way})
    cores = len(os.sched_getaffinity(0))
    gather = [{"ranks": r, "examples": n, "bytes": size, "us": spread(times)} for (r, n, size), times in alone.items()]
    return {
        "load": load,
        "gather": gather,
        "results": results,
        "besides": [
            {**of, "ranks": ranks, "sending": spread(of["sending"]), "saving": spread(of["saving"])} for ranks, of in rest.items()
        ],
        "model": {
            "cores": cores,
            "ring": fit_ring([(g["ranks"], g["bytes"], g["us"]["p10"] / 1e6) for g in gather], cores),
            "work": {net: fit_work(results, net) for net in NETS},
        },
    }


# Pages


def gather_table(record: dict[str, Any]) -> str:
    """The gather alone beside the model, which is fitted to the quietest tenth."""
    lines = ["| ranks | bytes from each | bytes to each | us, quietest tenth | model | us, median (to 90 %) |", "|---" * 6 + "|"]
    model = record["model"]
    for g in record["gather"]:
        us, predicted = g["us"], 1e6 * ring_seconds(g["ranks"], g["bytes"], cores=model["cores"], **model["ring"])
        told = f"**{number(us['p10'])}** | {number(predicted)} | {number(us['median'])} ({number(us['p90'])})"
        lines.append(f"| {g['ranks']} | {g['bytes']:,} | {g['ranks'] * g['bytes']:,} | {told} |")
    return "\n".join(lines)


def predicted_ms(record: dict[str, Any], r: dict[str, Any]) -> float:
    model = record["model"]
    settings = {**model["work"][r["net"]], "ring": model["ring"], "cores": model["cores"]}
    added = r["sent_by_rank_0"].get("all_reduce", {"calls": 0, "bytes": 0})
    return 1e3 * step_seconds(r["replicas"], r["ranks"], r["examples"], **settings, sums=(added["calls"], added["bytes"]))


def step_table(record: dict[str, Any]) -> str:
    """Whole steps: every layout, what travels, and the time of it."""
    lines = [
        "| network, replicas | ranks | bytes from each | ms a step, quietest tenth | model | median (to 90 %) | transport, us "
        "| % of the step (of means) | waiting for a slower rank, % (of means) |",
        "|---" * 9 + "|",
    ]
    for r in record["results"]:
        way = r["ways"].get("overlapped", r["ways"].get("alone"))
        assert way is not None
        ms, sent = way["ms"], r["sent_by_rank_0"]
        size = f"{sum(of['bytes'] for of in sent.values()):,}" if sent else "0"
        told = f"{number(ms['median'])} ({number(ms['p90'])})"
        parts = ["", "", ""]
        if "transport" in way:
            us = way["transport"]["median"]
            share = {(name, of): way[name][of] / (10 * ms[of]) for name in ("transport", "waiting") for of in ("median", "mean")}
            parts = [number(us)]
            parts.append(f"**{share['transport', 'median']:.2f}** ({share['transport', 'mean']:.2f})")
            parts.append(f"{share['waiting', 'median']:.1f} ({share['waiting', 'mean']:.1f})")
        ranks = (
            f"{r['ranks']}" if r["ranks"] <= r["replicas"] else f"{r['ranks']} ({r['replicas']} x {r['ranks'] // r['replicas']})"
        )
        ranks += f" of {r['threads']} threads" if r["threads"] > 1 else ""
        model = number(predicted_ms(record, r)) if r["threads"] == 1 else ""
        lines.append(
            f"| {r['net']}, {r['replicas']} | {ranks} | {size} | {number(ms['p10'])} | {model} | {told} | {' | '.join(parts)} |"
        )
    return "\n".join(lines)


def overlap_table(record: dict[str, Any]) -> str:
    """Time in the gather with and without overlap, and processor time."""
    lines = [
        "| network, replicas, ranks | in the gather, overlapped, us (of it transport) | waited for at once, us (of it transport) "
        "| processor time of a rank, us | step, overlapped / at once / silent, ms |",
        "|---|---|---|---|---|",
    ]
    for r in record["results"]:
        if "silent" not in r["ways"] or r["ranks"] > r["replicas"]:
            continue
        ways = r["ways"]
        inside = [ways[way]["waiting"]["median"] + ways[way]["transport"]["median"] for way in WAYS[:2]]
        told = [f"{number(inside[k])} ({number(ways[way]['transport']['median'])})" for k, way in enumerate(WAYS[:2])]
        cpu = ways["overlapped"]["cpu"]["median"] + max(
            0.0, ways["overlapped"]["background"]["median"] - ways["silent"]["background"]["median"]
        )
        ms = " / ".join(number(ways[way]["ms"]["median"]) for way in WAYS)
        lines.append(f"| {r['net']}, {r['replicas']}, {r['ranks']} | {told[0]} | {told[1]} | {number(cpu)} | {ms} |")
    return "\n".join(lines)


def besides_table(record: dict[str, Any]) -> str:
    """Predictions and checkpoints."""
    lines = ["| ranks | sending 256 x 10 logits, ms | a checkpoint, ms (10 % to 90 %) | its collectives |", "|---|---|---|---|"]
    for r in record["besides"]:
        saving = f"{number(r['saving']['median'])} ({number(r['saving']['p10'])} to {number(r['saving']['p90'])})"
        sending = number(r["sending"]["median"]) if r["ranks"] > 1 else "0"
        calls = sum(of["calls"] for of in r["checkpoint"].values())
        lines.append(f"| {r['ranks']} | {sending} | {saving} | {calls} |")
    return "\n".join(lines)


def headline(record: dict[str, Any]) -> str:
    """The answer in words: four ranks of one replica beside one rank of four."""
    found = {(r["ranks"], r["threads"]): r["ways"] for r in record["results"] if (r["net"], r["replicas"]) == ("ResNet-20", 4)}
    four = found[4, 1]["overlapped"]
    share = {of: four["transport"][of] / (10 * four["ms"][of]) for of in ("median", "mean")}
    alone = [number(found[1, threads]["alone"]["ms"]["median"]) for threads in (1, 2)]
    ring, load = record["model"]["ring"], record["load"]
    work = [4 * four["work"]["median"], found[1, 1]["alone"]["work"]["median"]]
    us, ms = number(four["transport"]["median"]), number(four["ms"]["median"])
    return (
        f"**ResNet-20, 4 ranks x 1 replica on two cores: transport is {us} us of a step of {ms} ms, {share['median']:.2f} % "
        f"({share['mean']:.2f} % of means).** Processor time of a step, all ranks together: {number(work[0])} ms, against "
        f"{number(work[1])} ms of one rank with all 4 replicas. By the clock that one takes {alone[0]} ms with one thread and "
        f"{alone[1]} ms with two; but others used the machine meanwhile (load {min(load):.1f} to {max(load):.1f} on "
        f"{record['model']['cores']} cores), and one process gets less of a busy machine than four. Constants of the gather: "
        f"base {1e6 * ring['base']:.0f} us, latency {1e6 * ring['latency']:.0f} us, bandwidth {ring['bandwidth'] / 1e9:.2g} GB/s."
    )


TABLES = {"headline": headline, "gather": gather_table, "steps": step_table, "overlap": overlap_table, "besides": besides_table}


def into_page(page: Path, name: str, text: str) -> None:
    """Put a text between its marks in a page."""
    before, mark, rest = page.read_text().partition(f"<!-- {name} -->\n")
    if not mark:
        raise SystemExit(f"{page} has no mark <!-- {name} -->")
    _, _, after = rest.partition("<!-- end -->")
    page.write_text(f"{before}{mark}{text}\n<!-- end -->{after}")


def picture(record: dict[str, Any], path: Path) -> None:
    """The gather alone against its bytes, measured and modelled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    model = record["model"]
    looks = {2: ("#0b3c5d", "-", "o"), 4: ("#c8553d", "--", "s"), 8: ("#5a9367", "-.", "^")}
    for ranks, (colour, line, marker) in looks.items():
        found = sorted((g for g in record["gather"] if g["ranks"] == ranks), key=lambda g: g["bytes"])
        sizes, us = [g["bytes"] for g in found], [g["us"] for g in found]
        error = [[u["median"] - u["p10"] for u in us], [u["p90"] - u["median"] for u in us]]
        apart = [size * 1.08 ** (ranks // 2 - 2) for size in sizes]  # so that their bars can be told apart
        axis.errorbar(apart, [u["median"] for u in us], error, color=colour, marker=marker, linestyle="none", capsize=3)
        grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (k / 60) for k in range(61)]
        curve = [1e6 * ring_seconds(ranks, size, cores=model["cores"], **model["ring"]) for size in grid]
        axis.plot(grid, curve, color=colour, linestyle=line, label=f"{ranks} ranks")
    axis.set(xscale="log", yscale="log", xlabel="bytes from each rank", ylabel="microseconds of a gather")
    axis.set_title("gloo on two cores: median with 10 % to 90 %, and the model (of the 10 %)", fontsize=10)
    axis.grid(alpha=0.25)
    axis.set_ylim(200, 1e5)
    axis.legend(frameon=False, ncols=3, loc="upper center")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--turns", type=int, default=6, help="blocks of each way, in every round")
    parser.add_argument("--rounds", type=int, default=3, help="how often all layouts are gone through")
    parser.add_argument("--pages", action="store_true", help="only write tables and picture from what is stored")
    arguments = parser.parse_args()
    if not arguments.pages:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two threads that spin on cores which others use would measure that
        record = surroundings(__file__, "torch", "torchrex")
        write(arguments.out, {**record, **measure(arguments.turns, arguments.rounds)})
    record = json.loads(arguments.out.read_text())
    for name, table in TABLES.items():
        print(table(record), "\n")
        if arguments.out == RESULT:
            into_page(PAGE, name, f"{table(record)}\n\n{setting(record)}")
    if arguments.out == RESULT:
        picture(record, PAGE.with_name("scaling.png"))


if __name__ == "__main__":
    main()
