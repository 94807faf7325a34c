"""What does a step of the Bayesian GANs cost on a GPU? The captured step, of both rungs unless the
case says otherwise, against the same step run eagerly.

Random images: the time does not depend on what they show. Batches, variance, swaps and records are
on. Needs a CUDA device; takes two minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from module_step import profile_of, seconds_of
from record import surroundings, write
from torchrex.experiments.gan import GanConfig, GanImages, gan_config


def images(config: GanConfig) -> GanImages:
    generator = torch.Generator().manual_seed(0)

    def some(n: int) -> torch.Tensor:
        return torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, generator=generator)

    labels = torch.arange(config.n_labelled) % config.kind.n_classes
    return GanImages(some(config.n_labelled), labels, some(config.n_data), (some(10), labels[:10]))


def measure(config: GanConfig, *, captured: bool, n_steps: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per step, sorted, and what the first steps took."""
    device = torch.device("cuda")
    run = config.run(0, device, config.energy())
    run.capturing = captured
    loader = config.loader(images(config), 0, device)

    def advance() -> None:
        for _ in run.advance(n_steps, loader):
            pass

    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    advance()
    torch.cuda.synchronize()
    setup = time.perf_counter() - began
    graphs = run.graphs
    assert not captured or (graphs is not None and not graphs.failed and graphs.compiled)
    times = sorted(1000 * seconds_of(advance) / n_steps for _ in range(repeats))
    profiled = profile_of(run, loader) if captured else {}
    return {
        "ms_per_step": times,
        "first_seconds": setup,
        **profiled,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "gan_step.json"
    )
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    arguments = parser.parse_args()
    cell = gan_config("cifar10", 4000, "resghmc")
    cells = {
        "own generators, 20 on each rung": dataclasses.replace(cell, generators="own"),
        "shared generators, 20": cell,
        "augmented, 4 generators": gan_config("cifar10", 4000, "resghmc", "gan-augmented"),
        "matching, one rung": gan_config("cifar10", 4000, "sghmc", "gan-matching"),
        "matching": gan_config("cifar10", 4000, "resghmc", "gan-matching"),
    }
    results: dict[str, Any] = {}
    for name, config in cells.items():
        if arguments.only not in name:
            continue
        found = measure(config, captured=True, n_steps=arguments.steps, repeats=5)
        eager = measure(config, captured=False, n_steps=max(20, arguments.steps // 5), repeats=3)
        ratio = eager["ms_per_step"][1] / found["ms_per_step"][2]
        minutes = found["ms_per_step"][2] * config.steps / 60_000
        results[name] = {
            "captured": found,
            "eager": eager,
            "times_as_fast": ratio,
            "minutes_of_a_run": minutes,
        }
        print(
            f"{name}: captured {found['ms_per_step'][2]:.2f} ms, eager "
            f"{eager['ms_per_step'][1]:.2f} ms, {ratio:.1f} x",
            flush=True,
        )
        print(found.get("microseconds"), found.get("kernels_per_step"), flush=True)
    record = surroundings(__file__, "torch", "triton")
    record["hardware"]["gpu"] = torch.cuda.get_device_name()
    write(arguments.out, {**record, "steps": arguments.steps, "results": results})


if __name__ == "__main__":
    main()
