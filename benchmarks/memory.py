"""Peak memory of a long run: 1,000,000 steps x 64 runs of mixture case 1, thinned by 100, in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from record import memory_table, surroundings, write

N_STEPS, N_RUNS, THIN = 1_000_000, 64, 100


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB


def sample() -> dict[str, object]:
    """The run itself."""
    import torchrex

    target = torchrex.Noisy(
        torchrex.GaussianMixture([0.4, 0.6], means=[-3.0, 2.0], stds=[0.7, 0.5]),
        energy=torchrex.Gaussian(2.0),
    )
    peaks = {"before sampling, everything imported": peak_mib()}

    def progress(done: int, total: int) -> None:
        peaks.setdefault("after the first block, the loop compiled", peak_mib())

    draws = torchrex.sample(
        target,
        temperatures=(1.0, 10.0),
        lr=0.03,
        n_steps=N_STEPS,
        n_runs=N_RUNS,
        thin=THIN,
        progress=progress,
    )
    peaks["at the end"] = peak_mib()
    stored = (draws.values, draws.noise_variance, draws.replica_at, draws.energy, draws.steps)
    draws_mib = sum(tensor.numel() * tensor.element_size() for tensor in stored) / 2**20
    return {"draws": list(draws.values.shape), "draws_mib": draws_mib, "peak_mib": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(sample()))
        return
    # A fresh interpreter and an empty compiler cache: the peak is that of this run alone,
    # compilation included.
    child = [sys.executable, __file__, "--child", "--out", str(args.out)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    measured = json.loads(done.stdout.splitlines()[-1])
    record = {
        **surroundings(__file__, "torch", "torchrex"),
        "n_steps": N_STEPS,
        "n_runs": N_RUNS,
        "thin": THIN,
        **measured,
    }
    write(args.out, record)
    print(memory_table(record))


if __name__ == "__main__":
    main()
