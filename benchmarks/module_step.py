"""What does a step of a network cost on a GPU? Our captured step, plain PyTorch (eager, compiled,
as CUDA graphs) and JAX, all in one process.

Random images on the device: the time does not depend on what they show. Every contestant selects a
batch, crops, mirrors and normalises it, computes energies and gradients of all replicas, moves them
by SGHMC with noise, and tests swaps. Needs a CUDA device; takes about seven minutes.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torchrex
from plain_loop import (
    F0,
    FRICTION,
    PLAIN,
    PRECISION,
    Images,
    Ladder,
    PlainLoop,
    compiled,
    crop_flip_normalise,
    scales,
)
from plain_networks import ResNet18, VisionTransformer
from record import surroundings, write
from torchrex.vision import nets as vision_nets
from torchrex.vision import resnet20

N_TRAIN, BATCH = 50_000, 256


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    plain: Callable[[], nn.Module]  # without our kernels
    lr: float  # of the summed energy, small enough that the network does not diverge


def plain_resnet20() -> nn.Module:
    """ResNet-20 with torch's convolutions."""
    ours = vision_nets.NarrowConv2d
    vision_nets.NarrowConv2d = nn.Conv2d  # type: ignore[misc,assignment]
    try:
        return resnet20()
    finally:
        vision_nets.NarrowConv2d = ours  # type: ignore[misc]


NETWORKS = {
    "ResNet-20": Network(resnet20, plain_resnet20, 2e-6),
    "ResNet-18": Network(ResNet18, ResNet18, 5e-7),
    "vision transformer": Network(VisionTransformer, VisionTransformer, 2e-8),
}

OURS, EAGER, COMPILED, GRAPHS, JAX = (
    "torchrex, captured",
    "PyTorch, eager",
    "torch.compile",
    "torch.compile, reduce-overhead",
    "JAX",
)
MODES = {COMPILED: "default", GRAPHS: "reduce-overhead"}
# In the order of what they answer, if the run is cut. JAX is late: what breaks the process there
# breaks little else.
CASES = [
    *(("ResNet-20", 2, name) for name in (OURS, GRAPHS, COMPILED, EAGER)),
    *(("ResNet-18", 2, name) for name in (OURS, GRAPHS, EAGER)),
    *(("vision transformer", 2, name) for name in (OURS, GRAPHS, EAGER)),
    *(("ResNet-20", 12, name) for name in (OURS, GRAPHS, COMPILED, EAGER)),
    *(("ResNet-20", replicas, JAX) for replicas in (2, 12)),
    *((network, 2, COMPILED) for network in ("ResNet-18", "vision transformer")),
]


class Contestant(NamedTuple):
    """A loop that has made its first steps, and was found to compute what it should."""

    advance: Callable[[int], Any]
    finite: Callable[[], bool]  # are the weights?
    first_seconds: float
    facts: dict[str, Any]
    stride: int = 1  # `advance` makes a multiple of so many steps
    waits: bool = False  # is the device ready when `advance` returns?
    profile: Callable[[], dict[str, Any]] | None = None


# Times


def seconds_of(work: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def host_seconds_of(work: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def ms_per_step(contestant: Contestant, seconds: float, repeats: int) -> list[float]:
    """Of each repeat, sorted; a repeat takes about so many seconds."""
    clock = host_seconds_of if contestant.waits else seconds_of

    def measured(n: int) -> float:
        return clock(lambda: contestant.advance(n)) / n

    least = max(4, contestant.stride)
    n = round(seconds / measured(least))
    n = max(least, n - n % contestant.stride)
    return sorted(1000 * measured(n) for _ in range(repeats))


# Data


def data(n: int = N_TRAIN, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Training images padded to 40 x 40, and labels."""
    padded, labels, *_ = Images.random(n, device)
    return padded, labels


def make_augment(device: str = "cuda") -> Callable[[Any, torch.Generator], Any]:
    mean, std = scales(device)
    transform = torch.compile(crop_flip_normalise, dynamic=False)

    def augment(batch: Any, generator: torch.Generator) -> Any:
        padded, labels = batch
        random = torch.rand((3, len(padded)), device=device, generator=generator)
        return transform(padded, random, mean, std), labels

    return augment


# Is it right?


def require_same(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    n_data: int,
    energy: float,
    gradients: Any = None,
) -> dict[str, Any]:
    """Compare an energy, and gradients by name, with those of the model in float32.

    Rounding to bfloat16 changes the energy by 0.1 % and less, and leaves a cosine of 0.95 to 1
    between the gradients.
    """
    x, y = batch
    cudnn = torch.backends.cudnn
    tuning, cudnn.benchmark = cudnn.benchmark, False  # a search would take longer than the passes
    expected = n_data * F.cross_entropy(model(x), y)
    named = dict(model.named_parameters())
    right = [] if gradients is None else torch.autograd.grad(expected, list(named.values()))
    cudnn.benchmark = tuning
    found = {"energy_error": abs(energy / float(expected.detach()) - 1)}
    agree = found["energy_error"] < 0.01
    if gradients is not None:
        flat = [
            torch.cat([each.double().reshape(-1) for each in some])
            for some in (right, [gradients[name] for name in named])
        ]
        found["gradient_cosine"] = float(F.cosine_similarity(*flat, dim=0))
        agree = agree and found["gradient_cosine"] > 0.8
    if not agree:
        raise RuntimeError(f"the step and the network in float32 do not agree: {found}")
    return {**found, "parameters": count(model)}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# The contestants


@cache
def posterior(n_data: int) -> torchrex.PosteriorEnergy:
    """One for all runs, so that they share what was compiled."""
    prior = torchrex.GaussianPrior(PRECISION)
    return torchrex.PosteriorEnergy(F.cross_entropy, n_data=n_data, prior=prior)


def ours(network: Network, replicas: int, images: Images, batch: int) -> Contestant:
    """The captured step. Its first step compiles and captures, and is compared."""
    device, n_data = images.labels.device.type, len(images.labels)
    torch.manual_seed(0)
    ensemble = torchrex.ModuleEnsemble(
        network.make,
        posterior(n_data),
        torchrex.SGHMC(FRICTION),
        device=device,
        autocast=torch.bfloat16,
        channels_last=True,
    )
    ladder = torchrex.Ladder(*Ladder.of(replicas, network.lr))
    run = torchrex.ModuleExchange(ensemble, ladder, correction_factor=F0, seed=0)
    augment = make_augment(device)
    loader, same = (torchrex.DeviceLoader(images[:2], batch, augment=augment) for _ in range(2))

    def advance(n_steps: int) -> None:
        for _ in run.advance(n_steps, loader):
            pass

    before = run.module_at().train()
    infos: list[Any] = []
    first = host_seconds_of(lambda: infos.extend(run.advance(1, loader)))
    if device == "cuda" and (run.graphs is None or run.graphs.failed or not run.graphs.compiled):
        raise RuntimeError("the step was not captured and compiled")
    prior = 0.5 * PRECISION * sum(float(p.detach().square().sum()) for p in before.parameters())
    rows = run.ensemble.rows
    gradients = rows.layout.views(rows.gradient[0])
    energy = float(infos[0].energy.flatten()[0]) - prior
    facts = require_same(before, same.next(), n_data, energy, gradients)
    return Contestant(
        advance,
        lambda: all(run.ensemble.finite()),
        first,
        facts,
        waits=device == "cpu",
        profile=lambda: profile_of(run, loader),
    )


def pytorch(name: str, network: Network, replicas: int, images: Images, batch: int) -> Contestant:
    """Three steps compile, try and record; the fourth is compared."""
    functions = compiled(MODES[name]) if name in MODES else PLAIN
    torch.manual_seed(0)
    models = [network.plain()]
    models += [copy.deepcopy(models[0]) for _ in range(1, replicas)]
    skipped = counters["inductor"]["cudagraph_skips"]
    loop = PlainLoop(models, images, batch, Ladder.of(replicas, network.lr), functions)
    first = host_seconds_of(lambda: loop.advance(3))
    before = copy.deepcopy(loop.models[-1])
    x, y, energy, gradients = loop.step()
    named = dict(zip(dict(before.named_parameters()), gradients, strict=True))
    facts = require_same(before, (x, y), len(images.labels), float(energy), named)
    if name == GRAPHS:  # parts that did not become graphs: there should be none
        facts["skipped"] = counters["inductor"]["cudagraph_skips"] - skipped
    return Contestant(loop.advance, loop.finite, first, facts, waits=not images.labels.is_cuda)


def jax_scan(way: Any, network: Network, replicas: int, images: Images, batch: int) -> Contestant:
    """Its first scan compiles, and its first step is compared."""
    from jax_loop import JaxLoop, jax

    if images.labels.is_cuda and jax.default_backend() != "gpu":
        raise ImportError("jax is installed, but finds no GPU")
    torch.manual_seed(0)
    model = network.plain()
    state = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    loop = JaxLoop(state, images, batch, Ladder.of(replicas, network.lr), way)
    found: list[Any] = []
    first = host_seconds_of(lambda: found.append(loop.advance(loop.length)))
    device, energy = images.labels.device, float(found[0][0, -1])
    x, y = (torch.tensor(each, device=device) for each in loop.first_batch())
    facts = require_same(model.to(device), (x, y.long()), len(images.labels), energy)
    if loop.n_parameters != facts["parameters"]:
        raise RuntimeError(f"JAX has {loop.n_parameters} parameters, not {facts['parameters']}")
    return Contestant(loop.advance, loop.finite, first, facts, stride=loop.length, waits=True)


def profile_of(run: Any, loader: Any, n_steps: int = 20) -> dict[str, Any]:
    """Kernel time of a step by kind of kernel, in microseconds; replicas overlap, so the sum
    exceeds the step.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in run.advance(n_steps, loader):
            pass
        torch.cuda.synchronize()
    kinds = {
        "wgrad": "cuDNN, weight gradient",
        "dgrad": "cuDNN, input gradient",
        "fprop": "cuDNN, forward",
    }
    kinds |= dict.fromkeys(
        ("forward_kernel", "products_kernel", "sum_kernel"), "narrow_conv, all three"
    )
    sums: dict[str, float] = {}
    n_kernels = 0.0
    for event in profiled.key_averages():
        kind = next((name for part, name in kinds.items() if part in event.key), None)
        if kind is None:
            kind = (
                "compiled (BatchNorm, ReLU, move, exchange)" if "triton" in event.key else "other"
            )
        sums[kind] = sums.get(kind, 0.0) + event.device_time_total / n_steps
        n_kernels += event.count / n_steps
    return {
        "microseconds": dict(sorted(sums.items(), key=lambda item: -item[1])),
        "kernels_per_step": n_kernels,
    }


def measure(
    name: str,
    network: Network,
    replicas: int,
    images: Images,
    *,
    way: Any = None,
    batch: int = BATCH,
    seconds: float = 0.5,
    repeats: int = 3,
) -> dict[str, Any]:
    """What one contestant takes for a step, what was found when it was checked, and perhaps a
    function that makes a profile of it.
    """
    arguments = (network, replicas, images, batch)
    if name == OURS:
        contestant = ours(*arguments)
    elif name == JAX:
        contestant = jax_scan(way, *arguments)
    else:
        contestant = pytorch(name, *arguments)
    ms = ms_per_step(contestant, seconds, repeats)
    if not contestant.finite():
        raise RuntimeError("weights are not finite after the last step")
    return {
        "name": name,
        "replicas": replicas,
        "ms_per_step": {"median": statistics.median(ms), "min": ms[0], "max": ms[-1]},
        "images_x_replicas_per_second": batch * replicas / statistics.median(ms) * 1000,
        "first_seconds": contestant.first_seconds,
        **({} if way is None else {"way": way}),
        **contestant.facts,
        "profile": contestant.profile,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose lines contain this")
    arguments = parser.parse_args()
    # For all of PyTorch what torchrex does: cuDNN tries all algorithms.
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0
    torch._dynamo.config.recompile_limit = 64  # the same functions for all networks
    record = surroundings(__file__, "torch", "triton")
    record["hardware"]["gpu"] = torch.cuda.get_device_name()
    results: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    profile: Callable[[], dict[str, Any]] | None = None
    ways = ["vmap", "one after the other"]
    images, began = Images.random(N_TRAIN, "cuda"), time.perf_counter()
    for label, replicas, name in CASES:
        line = f"{label}, R={replicas}, {name}"
        if arguments.only not in line:
            continue
        found: list[dict[str, Any]] = []
        for way in ways if name == JAX else [None]:
            options = {"way": way, "seconds": arguments.seconds, "repeats": arguments.repeats}
            try:
                found.append(measure(name, NETWORKS[label], replicas, images, **options))
            except ImportError as error:
                print(f"{line}: left out, because {error}", flush=True)
            except Exception as error:
                traceback.print_exc()
                reason = " ".join(str(error).split())[:300]
                case = {"network": label, "replicas": replicas, "name": name}
                failed.append({**case, **({} if way is None else {"way": way}), "reason": reason})
                print(f"{line}: FAILED, {reason}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
        if found:
            best, *others = sorted(found, key=lambda each: each["ms_per_step"]["median"])
            made = best.pop("profile")
            if (label, replicas, name) == CASES[0]:
                profile = made
            if name == JAX:  # more replicas go the way that was faster with two
                ways = [best["way"]]
                best["other_ways_ms"] = {r["way"]: r["ms_per_step"]["median"] for r in others}
                record["versions"]["jax"] = version("jax")
            results.append({"network": label, **best})
            print(f"{line}: {described(results[-1])}; ", end="")
            print(f"{time.perf_counter() - began:.0f} s so far", flush=True)
        write(arguments.out, {**record, "results": results, "failed": failed})
    if profile is not None:  # last: launches may be slower once a profiler was there
        record["profile_of_two_replicas"] = profile()
        write(arguments.out, {**record, "results": results, "failed": failed})


def described(found: dict[str, Any]) -> str:
    ms, rest = found["ms_per_step"], dict(found)
    for name in ("network", "name", "replicas", "ms_per_step", "images_x_replicas_per_second"):
        del rest[name]
    return (
        f"{ms['median']:.3f} ms ({ms['min']:.3f} to {ms['max']:.3f}), "
        f"{found['images_x_replicas_per_second']:,.0f} images x replicas / s, {rest}"
    )


if __name__ == "__main__":
    main()
