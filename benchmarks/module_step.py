"""What does a step on ResNet-20 cost on a GPU? Captured replicas against plain PyTorch, one replica
after the other.

Random images on the device: the time does not depend on what they show. Augmentation, variance,
swaps, records and averaging over a test set are on. Needs a CUDA device; takes four minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchrex
from record import surroundings, write
from torchrex.exchange.algorithm import Exchanged
from torchrex.network import capture
from torchrex.vision import nets as vision_nets
from torchrex.vision import resnet20

N_TRAIN, N_TEST, BATCH, AVERAGE_EVERY = 50_000, 10_000, 256, 200
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
FRICTION, PRECISION, F0 = 0.1, 25.0, 3e5


def crop_flip_normalise(padded: Tensor, labels: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Images (n, 40, 40, 3) of bytes to (n, 3, 32, 32): a random place, half of them mirrored. One
    kernel when compiled.
    """
    place = torch.arange(32, device=padded.device)
    down, right = (random[0] * 9).long(), (random[1] * 9).long()
    rows = down[:, None] + place
    columns = right[:, None] + torch.where(random[2][:, None] < 0.5, 31 - place, place)
    image = torch.arange(len(padded), device=padded.device)[:, None, None]
    cropped = padded[image, rows[:, :, None], columns[:, None, :]].float()
    mean, std = (torch.tensor(values, device=padded.device) * 255 for values in (MEAN, STD))
    return ((cropped - mean) / std).permute(0, 3, 1, 2), labels


def make_augment() -> Callable[[Any, torch.Generator], Any]:
    mean, std = (torch.tensor(values, device="cuda") * 255 for values in (MEAN, STD))

    @torch.compile(dynamic=False)
    def transform(padded: Tensor, random: Tensor) -> Tensor:
        place = torch.arange(32, device="cuda")
        down, right = (random[0] * 9).long(), (random[1] * 9).long()
        rows = down[:, None] + place
        columns = right[:, None] + torch.where(random[2][:, None] < 0.5, 31 - place, place)
        image = torch.arange(len(padded), device="cuda")[:, None, None]
        return (
            (padded[image, rows[:, :, None], columns[:, None, :]].float() - mean) / std
        ).permute(0, 3, 1, 2)

    def augment(batch: Any, generator: torch.Generator) -> Any:
        padded, labels = batch
        return transform(
            padded, torch.rand((3, len(padded)), device="cuda", generator=generator)
        ), labels

    return augment


def data() -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Training images padded to 40 x 40, labels, and test batches ready for the net."""
    generator = torch.Generator("cuda").manual_seed(0)
    images = torch.randint(
        0, 256, (N_TRAIN, 40, 40, 3), dtype=torch.uint8, device="cuda", generator=generator
    )
    labels = torch.randint(10, (N_TRAIN,), device="cuda", generator=generator)
    test = torch.randn(N_TEST, 3, 32, 32, device="cuda", generator=generator).to(
        memory_format=torch.channels_last
    )
    truth = torch.randint(10, (N_TEST,), device="cuda", generator=generator)
    return images, labels, list(zip(test.split(1000), truth.split(1000), strict=True))


def seconds_of(work: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def make_run(replicas: int) -> torchrex.ModuleExchange:
    energy = torchrex.PosteriorEnergy(
        F.cross_entropy, n_data=N_TRAIN, prior=torchrex.GaussianPrior(PRECISION)
    )
    ensemble = torchrex.ModuleEnsemble(
        resnet20,
        energy,
        torchrex.SGHMC(FRICTION),
        device="cuda",
        autocast=torch.bfloat16,
        channels_last=True,
    )
    rungs = range(replicas)
    ladder = torchrex.Ladder(
        [0.01 * (1 + 4 * k) for k in rungs],
        [2e-6 * (1 + 0.5 * k / max(1, replicas - 1)) for k in rungs],
    )
    return torchrex.ModuleExchange(ensemble, ladder, correction_factor=F0, seed=0)


def captured(
    replicas: int, n_steps: int, repeats: int, *, averaging: bool = True
) -> dict[str, Any]:
    """The captured step of `replicas` replicas; `averaging` takes a draw of rung 0 over the test
    set every 200 steps.
    """
    images, labels, test = data()
    loader = torchrex.DeviceLoader((images, labels), BATCH, augment=make_augment())
    run = make_run(replicas)
    average = torchrex.PosteriorAverage(test, every=AVERAGE_EVERY)

    def advance() -> None:
        for _ in range(n_steps // AVERAGE_EVERY):
            for _ in run.advance(AVERAGE_EVERY, loader):
                pass
            if averaging:
                average.update(run)

    began = time.perf_counter()
    for _ in run.advance(AVERAGE_EVERY, loader):
        pass
    average.update(run)
    torch.cuda.synchronize()
    setup = time.perf_counter() - began
    graphs = run.graphs
    assert graphs is not None
    assert not graphs.failed
    assert graphs.compiled
    times = sorted(seconds_of(advance) / n_steps for _ in range(repeats))
    return {
        "ms_per_step": [1000 * t for t in times],
        "setup_seconds": setup,
        "run": run,
        "loader": loader,
    }


def without_exchange(replicas: int, n_steps: int, repeats: int) -> list[float]:
    """The captured step with the exchange taken out (no variance, swap or record): the difference
    is what they cost.
    """
    constant: dict[str, Any] = {}

    def stand_still(state: Any, energy: Any, table: Any, *_: Any) -> Exchanged:
        if not constant:
            lr, temperature = table.lr[0][:, None], table.temperature[0][:, None]
            scale = (lr * temperature).sqrt()
            constant["exchanged"] = Exchanged(
                torch.zeros_like(lr, dtype=torch.bool), scale, scale, lr, temperature
            )
        exchanged: Exchanged = constant["exchanged"]
        return exchanged

    original, compiling = capture.exchange_and_record, torch.compile
    capture.exchange_and_record = stand_still  # type: ignore[assignment]
    torch.compile = lambda f=None, **options: f if f is stand_still else compiling(f, **options)  # type: ignore[assignment,misc]
    try:
        times: list[float] = captured(replicas, n_steps, repeats, averaging=False)["ms_per_step"]
        return times
    finally:
        capture.exchange_and_record, torch.compile = original, compiling


def eager(replicas: int, n_steps: int, repeats: int) -> dict[str, Any]:
    """As most people write it, and as the authors did: one replica after the other, float32, swaps
    on the host.
    """
    images, labels, _ = data()
    generator = torch.Generator("cuda").manual_seed(0)
    models = [resnet20().cuda() for _ in range(replicas)]
    velocities = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
    lrs, taus = [2e-6] * replicas, [0.01 * (1 + 4 * k) for k in range(replicas)]

    def steps(n: int) -> None:
        for _ in range(n):
            index = torch.randint(N_TRAIN, (BATCH,), device="cuda", generator=generator)
            random = torch.rand((3, BATCH), device="cuda", generator=generator)
            x, y = crop_flip_normalise(images[index], labels[index], random)
            x = x.contiguous()
            energies = []
            for k, model in enumerate(models):
                model.zero_grad()
                loss = F.cross_entropy(model(x), y) * N_TRAIN
                loss.backward()
                energies.append(loss.detach())
                with torch.no_grad():
                    parameters = list(model.parameters())
                    gradients = [p.grad for p in parameters if p.grad is not None]
                    torch._foreach_add_(gradients, parameters, alpha=PRECISION)
                    torch._foreach_mul_(velocities[k], 1 - FRICTION)
                    torch._foreach_add_(velocities[k], gradients, alpha=-lrs[k])
                    noise = [torch.randn_like(p) for p in parameters]
                    torch._foreach_add_(
                        velocities[k], noise, alpha=(2 * FRICTION * lrs[k] * taus[k]) ** 0.5
                    )
                    torch._foreach_add_(parameters, velocities[k])
            for cold in range(replicas - 1):
                if float(energies[cold] - energies[cold + 1]) > 1e9:
                    models[cold], models[cold + 1] = models[cold + 1], models[cold]

    steps(20)
    times = sorted(seconds_of(lambda: steps(n_steps)) / n_steps for _ in range(repeats))
    return {"ms_per_step": [1000 * t for t in times]}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 12])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []

    def add(name: str, replicas: int, ms: list[float], **more: Any) -> None:
        rate = BATCH * replicas / ms[0] * 1000
        results.append(
            {
                "name": name,
                "replicas": replicas,
                "ms_per_step": ms,
                "images_x_replicas_per_second": rate,
                **more,
            }
        )
        print(
            f"{name}, R={replicas}: {ms[0]:.3f} to {ms[-1]:.3f} ms, {rate:,.0f} images x replicas "
            f"/ s",
            flush=True,
        )

    record = surroundings(__file__, "torch", "triton")
    record["hardware"]["gpu"] = torch.cuda.get_device_name()
    for replicas in arguments.replicas:
        one = captured(replicas, arguments.steps, arguments.repeats)
        more = profile_of(one["run"], one["loader"]) if replicas == 2 else {}
        if more:
            record["profile_of_two_replicas"] = more
            print(more)
        add("torchrex, captured", replicas, one["ms_per_step"], setup_seconds=one["setup_seconds"])
        del one
        torch.cuda.empty_cache()
        write(arguments.out, {**record, "results": results})
    for replicas in (2, 4):
        plain = captured(replicas, arguments.steps, arguments.repeats, averaging=False)[
            "ms_per_step"
        ]
        add("torchrex, captured, no averaging", replicas, plain)
        add(
            "torchrex, captured, no averaging, no exchange",
            replicas,
            without_exchange(replicas, arguments.steps, arguments.repeats),
        )
    ours = vision_nets.NarrowConv2d
    vision_nets.NarrowConv2d = torch.nn.Conv2d  # type: ignore[misc,assignment]
    add(
        "torchrex, captured, convolutions by cuDNN",
        2,
        captured(2, arguments.steps, arguments.repeats)["ms_per_step"],
    )
    for replicas in (1, 2, 4):
        add(
            "eager PyTorch, one after the other",
            replicas,
            eager(replicas, 40, arguments.repeats)["ms_per_step"],
        )
    vision_nets.NarrowConv2d = ours  # type: ignore[misc]
    write(arguments.out, {**record, "results": results})


if __name__ == "__main__":
    main()
