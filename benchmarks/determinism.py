"""Do two processes get the same bits from the same seed on a GPU, and what does it cost to make
them?

Each process trains two replicas of ResNet-20 on random images, and stores a hash of all weights
after 1, 5 and 100 steps. Needs a CUDA device; takes two minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import torchrex
from module_step import BATCH, F0, FRICTION, N_TRAIN, PRECISION, data, make_augment, seconds_of
from record import surroundings, write
from torchrex.vision import resnet20


def one_process(*, deterministic: bool) -> dict[str, object]:
    images, labels, _ = data()
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
        hashes[stop] = hashlib.sha256(ensemble.position.cpu().numpy().tobytes()).hexdigest()[:16]
    seconds = seconds_of(lambda: [None for _ in run.advance(400, loader)] and None)
    return {
        "deterministic": deterministic,
        "weights_after_steps": hashes,
        "ms_per_step": seconds / 400 * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--one", choices=("True", "False"), help="one process, for this script itself"
    )
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one_process(deterministic=arguments.one == "True")))
        return
    processes = []
    for deterministic in ("False", "False", "True", "True"):
        command = [sys.executable, __file__, "--one", deterministic]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        processes.append(json.loads(done.stdout.splitlines()[-1]))
        print(processes[-1], flush=True)
    record = surroundings(__file__, "torch", "triton")
    record["hardware"]["gpu"] = torch.cuda.get_device_name()
    write(arguments.out, {**record, "processes": processes})


if __name__ == "__main__":
    main()
