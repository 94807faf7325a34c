"""What does a step of the Bayesian GANs cost on a GPU? The captured step of both rungs, against the
same step run eagerly; of one rung; and of all methods of a cell together.

Random images: the time does not depend on what they show. Batches, variance, swaps and records are
on. Needs a CUDA device; takes three minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from module_step import profile_of, seconds_of
from record import surroundings, write
from torchrex.experiments.gan import GAN_METHODS, GanConfig, GanImages, gan_config
from torchrex.network import SideBySide


def images(config: GanConfig) -> GanImages:
    generator = torch.Generator().manual_seed(0)

    def some(n: int) -> torch.Tensor:
        return torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, generator=generator)

    labels = torch.arange(config.n_labelled) % config.kind.n_classes
    return GanImages(some(config.n_labelled), labels, some(config.n_data), (some(10), labels[:10]))


def measure(
    configs: Sequence[GanConfig], *, captured: bool, n_steps: int, repeats: int
) -> dict[str, Any]:
    """Milliseconds per step of all these runs together, sorted, and what the first steps took."""
    device = torch.device("cuda")
    energies: dict[str, Any] = {}  # an equal one compiles once, as in `torchrex run`
    runs = []
    for config in configs:
        energy = config.energy()
        energy = energies.setdefault(str(energy.settings()), energy)
        runs.append(config.run(0, device, energy))
    for run in runs:
        run.capturing = captured
    group = runs[0].alone if len(runs) == 1 else SideBySide(runs)
    loader = configs[0].loader(images(configs[0]), 0, device)

    def advance(n: int = n_steps) -> None:
        for _ in group.advance(n, loader):
            pass

    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    advance()
    torch.cuda.synchronize()
    setup = time.perf_counter() - began
    graphs = group.graphs
    assert not captured or (graphs is not None and not graphs.failed and graphs.compiled)
    times = sorted(1000 * seconds_of(advance) / n_steps for _ in range(repeats))
    return {
        "ms_per_step": times,
        "first_seconds": setup,
        **(profile_of(group, loader) if captured else {}),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def cases() -> dict[str, list[GanConfig]]:
    paper = gan_config("cifar10", 4000, "resghmc")
    named = {
        "own generators, 20 on each rung": [dataclasses.replace(paper, generators="own")],
        "shared generators, 20": [paper],
    }
    for family, name in (("gan-augmented", "augmented"), ("gan-matching", "matching")):
        every = {method: gan_config("cifar10", 4000, method, family) for method in GAN_METHODS}
        named[name] = [every["resghmc"]]
        named[f"{name}, one rung"] = [every["sghmc"]]
        named[f"{name}, five methods"] = list(every.values())
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "gan_step.json"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    arguments = parser.parse_args()
    chosen = {name: configs for name, configs in cases().items() if arguments.only in name}
    results: dict[str, Any] = {name: {} for name in chosen}
    record = surroundings(__file__, "torch", "triton")
    record["hardware"]["gpu"] = torch.cuda.get_device_name()
    # Before all captured steps, because launches may be slower once a profiler was there.
    for name, configs in chosen.items():
        if "," not in name.replace(", 20", ""):
            n_steps = max(20, arguments.steps // 5)
            results[name]["eager"] = measure(configs, captured=False, n_steps=n_steps, repeats=3)
    for name, configs in chosen.items():
        found = measure(configs, captured=True, n_steps=arguments.steps, repeats=5)
        ms = found["ms_per_step"][2]
        results[name] |= {"captured": found, "minutes_of_a_run": ms * configs[0].steps / 60_000}
        print(f"{name}: captured {ms:.2f} ms", flush=True)
        print(found["microseconds"], found["kernels_per_step"], flush=True)
        if "eager" in results[name]:
            eager = results[name]["eager"]["ms_per_step"][1]
            results[name]["times_as_fast"] = eager / ms
            print(f"{name}: eager {eager:.2f} ms, {eager / ms:.1f} x", flush=True)
        write(arguments.out, {**record, "steps": arguments.steps, "results": results})


if __name__ == "__main__":
    main()
