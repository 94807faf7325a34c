"""Is the free variance of the energy, from the terms of one minibatch, that of the energies of
many?

The terms are taken to be independent. BatchNorm in training mode makes every term depend on the
whole minibatch; in evaluation mode it does not. Measured on the semi-supervised GAN of the digits,
batches of 50, paired: the free estimate over half the variance of the energy difference of the two
replicas, over 1,000 minibatches at the weights after 400 steps. A minute on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from record import surroundings, write
from torchrex.exchange.noise import PerExample
from torchrex.experiments.gan import GanConfig
from torchrex.experiments.recipes import get_recipe

STEPS, BATCHES = 400, 1_000


def ratios(seed: int) -> dict[str, float]:
    """Estimate over truth with BatchNorm in both modes; the standard error of each is about 5 %."""
    recipe = get_recipe("gan/digits-100-noswaps")
    assert isinstance(recipe, GanConfig)
    config = dataclasses.replace(recipe, steps=STEPS + 1, warm_start=STEPS, average_every=1)
    device = torch.device("cpu")
    run, loader = (config.run(seed, device, config.energy()), config.batches(seed, device).train)
    for _ in run.advance(STEPS, loader):
        pass
    feed = run.rules.noise.feed
    assert isinstance(feed, PerExample)
    found = {}
    for mode, training in (("training", True), ("evaluation", False)):
        totals, samples = [], []
        for module in run.ensemble.modules:
            module.train(training)
        with torch.no_grad():
            for _ in range(BATCHES):
                energy = run.energies(loader.next())
                assert energy.per_example is not None
                totals.append(energy.total[:, 0])
                scale = feed.scale(energy.per_example.shape[-1], config.n_data)
                samples.append(scale * feed.sample(energy.per_example, run.state.replica_at)[0, 0])
        difference = torch.stack(totals).diff(dim=1)[:, 0]
        found[mode] = float(torch.stack(samples).mean() / (0.5 * difference.var()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "batchnorm_variance.json"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for seed in (0, 1, 2):
        results.append({"seed": seed, **ratios(seed)})
        print(results[-1], flush=True)
    write(
        arguments.out,
        {**surroundings(__file__, "torch"), "steps": STEPS, "batches": BATCHES, "results": results},
    )


if __name__ == "__main__":
    main()
