"""Do two processes get the same bits from the same seed on a GPU, and what does it cost to make
them?

Each of four processes has a compiler cache of its own, as on another machine. It trains two
replicas of ResNet-20 on random images, and stores a hash of all weights after 1, 5 and 100 steps.
They compile at the same time and are timed one after the other. Needs a CUDA device; takes a
minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import torchrex
from module_step import BATCH, F0, FRICTION, N_TRAIN, PRECISION, data, make_augment, seconds_of
from record import surroundings, write
from torchrex.vision import resnet20


def one_process(*, deterministic: bool) -> None:
    """Print the hashes; after a line of input the time of a step."""
    images, labels = data()
    loader = torchrex.DeviceLoader((images, labels), BATCH, augment=make_augment())
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
    ladder = torchrex.Ladder((0.01, 0.05), (2e-6, 3e-6))
    run = torchrex.ModuleExchange(
        ensemble, ladder, correction_factor=F0, seed=0, deterministic=deterministic
    )
    hashes = {}
    for stop in (1, 5, 100):
        for _ in run.advance(stop - run.n_steps, loader):
            pass
        weights = run.ensemble.position.cpu().numpy().tobytes()
        hashes[stop] = hashlib.sha256(weights).hexdigest()[:16]
    assert run.graphs is not None
    assert run.graphs.compiled
    print(json.dumps({"deterministic": deterministic, "weights_after_steps": hashes}), flush=True)
    sys.stdin.readline()
    times = [seconds_of(lambda: [None for _ in run.advance(400, loader)] and None) for _ in "123"]
    print(json.dumps({"ms_per_step": sorted(each / 400 * 1000 for each in times)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "determinism.json"
    )
    parser.add_argument(
        "--one", choices=("True", "False"), help="one process, for this script itself"
    )
    arguments = parser.parse_args()
    if arguments.one:
        one_process(deterministic=arguments.one == "True")
        return
    processes = []
    with tempfile.TemporaryDirectory() as caches:
        children = []
        for k, deterministic in enumerate(("False", "False", "True", "True")):
            children.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--one", deterministic],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/{k}"},
                )
            )
        outputs = [child.stdout for child in children if child.stdout is not None]
        hashes = [json.loads(output.readline()) for output in outputs]
        for child, found in zip(children, hashes, strict=True):
            processes.append({**found, **json.loads(child.communicate("\n")[0])})
            print(processes[-1], flush=True)
    record = surroundings(__file__, "torch", "triton")
    record["hardware"]["gpu"] = torch.cuda.get_device_name()
    write(arguments.out, {**record, "processes": processes})


if __name__ == "__main__":
    main()
