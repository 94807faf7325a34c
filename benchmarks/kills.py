"""Is anything lost when ranks die? Random `kill -9` of random ranks at random moments, until so
many resumes were exact.

Each job runs on 1, 2 or 4 processes, is killed, and goes on, perhaps on another number of them.
What is checked after every kill stands in tests/faults/killing.py; the first thing that is not as
it should be ends this script. It takes some seconds a kill.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from record import surroundings, write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from faults import jobs
from faults.killing import Killer

JOBS = {
    "digits": jobs.digits,
    "mixture": jobs.mixture,
}  # by name, functions of the folder of their checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--kills", type=int, default=100, help="of all jobs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    args = parser.parse_args()
    results, began, left = {}, time.monotonic(), args.kills
    for k, name in enumerate(args.jobs):
        with tempfile.TemporaryDirectory() as folder:
            killer = Killer(JOBS[name], folder, seed=args.seed + k)
            wanted = left // (len(args.jobs) - k)
            left -= wanted
            killer.kill(wanted, tell=lambda kill: print(kill, flush=True))
            results[name] = {**killer.summary(), "each": killer.kills}
    total = {
        name: sum(result[name] for result in results.values())
        for name in ("kills", "exact_resumes")
    }
    record = {
        **surroundings(__file__, "torch", "torchrex"),
        **total,
        "seconds": round(time.monotonic() - began),
        "jobs": results,
    }
    write(args.out, record)
    print(
        {
            name: {key: value for key, value in result.items() if key != "each"}
            for name, result in results.items()
        }
    )


if __name__ == "__main__":
    main()
