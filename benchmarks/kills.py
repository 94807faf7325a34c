"""Is anything lost when processes die, or when two jobs want one folder? Random `kill -9` of random
processes at random moments, until so many resumes were exact; then fights for a folder.

Jobs run on 1, 2 or 4 processes, are killed, and go on, perhaps on another number of them. What is
checked after every kill stands in tests/faults/killing.py, after every fight in
tests/faults/fighting.py; the first thing that is not as it should be ends this script. It takes
some seconds a kill.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from record import surroundings, write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from faults import jobs
from faults.fighting import Fights
from faults.killing import CommandKiller, Killer

NETWORK = (
    "epochs=6",
    "burn_in_epochs=1",
    "hidden=8",
    "checkpoint_every=20",
    "correction_factor=1e6",
)
DENSITY = ("n_steps=1500", "n_runs=8", "shards=4", "checkpoint_every=150")
JOBS: dict[str, Any] = {  # by name: what kills it, and its part of all kills
    "train": (lambda folder, seed: Killer(jobs.digits, folder, seed=seed), 0.35),
    "sample": (lambda folder, seed: Killer(jobs.mixture, folder, seed=seed), 0.25),
    "run digits/resghmc": (
        lambda folder, seed: CommandKiller(
            "digits/resghmc", NETWORK, ["hidden=4"], folder, sizes=(1, 2), seed=seed
        ),
        0.2,
    ),
    "run figure1/case1-resgld": (
        lambda folder, seed: CommandKiller(
            "figure1/case1-resgld", DENSITY, ["n_steps=300"], folder, seed=seed
        ),
        0.2,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--kills", type=int, default=1000, help="of all jobs together")
    parser.add_argument("--fights", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    args = parser.parse_args()
    results, began = {}, time.monotonic()
    parts = {name: JOBS[name][1] for name in args.jobs}
    for k, name in enumerate(args.jobs):
        with tempfile.TemporaryDirectory() as folder:
            killer = JOBS[name][0](folder, args.seed + k)
            killer.kill(
                round(args.kills * parts[name] / sum(parts.values())),
                tell=lambda kill, name=name: print(name, kill, flush=True),
            )
            results[name] = killer.summary()
    with tempfile.TemporaryDirectory() as folder:
        fights, fought = Fights(folder, Random(args.seed)), []
        for _ in range(args.fights):
            fought.append(fights.fight())
            print(fought[-1], flush=True)
    total = {
        name: sum(result[name] for result in results.values())
        for name in ("kills", "exact_resumes")
    }
    record = {
        **surroundings(__file__, "torch", "torchrex"),
        **total,
        "seconds": round(time.monotonic() - began),
        "jobs": results,
        "fights": {
            "fights": len(fought),
            "mixed": 0,  # one would have ended this
            "commands": {  # how they ended
                name: sum(each[name] for each in fought) for name in ("finished", "refused")
            },
            "kinds": Counter(" | ".join(how or "run" for how in each["kind"]) for each in fought),
        },
    }
    write(args.out, record)
    print(record)


if __name__ == "__main__":
    main()
