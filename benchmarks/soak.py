"""Does anything grow in a long run? Memory, open files and disk of every process of a job, while it
trains and saves.

A job is a function of a folder, a number of steps and the steps between checkpoints; what it does
is looked at from outside, in /proc and in the folder. Growth is a straight line through the second
half of the run: the first half warms up.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import surroundings, write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torchrex
from faults import jobs
from ranks import Ranks

KEEP = 2
FEW = 100  # points of the curve that are written down


def digits(folder: str, n_steps: int, every: int) -> dict[str, Any]:
    # Without a trace, which lists every swap: it is asked for, and grows by 16 bytes a swap.
    return jobs.digits(folder, n_steps, every, KEEP, average_every=every, traced=False)


def mixture(folder: str, n_steps: int, every: int) -> dict[str, Any]:
    # A checkpoint holds all draws so far, so they are thinned: 8 chains x 100 draws of a million
    # steps.
    return jobs.mixture(folder, n_steps, every, KEEP, compiled=True, thin=n_steps // 100)


JOBS = {"digits": digits, "mixture": mixture}


def look(folder: Path, pids: Sequence[int]) -> dict[str, Any] | None:
    """What there is now; None when a process has ended."""
    try:
        resident = [
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for pid in pids
        ]
        files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    except (FileNotFoundError, ProcessLookupError):
        return None
    if not all(resident):  # it has ended, and nobody has asked how
        return None
    saved = [torchrex.Checkpoints(each).steps() for each in jobs.folders_of(folder)]
    return {
        "step": min((steps[-1] if steps else 0) for steps in saved),
        "resident_mib": [round(n / 2**20, 2) for n in resident],
        "open_files": files,
        "disk_kib": round(_disk(folder) / 1024, 1),
        "folders": max(
            sum(1 for _ in each.iterdir()) if each.is_dir() else 0
            for each in jobs.folders_of(folder)
        ),
    }


def _disk(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # a checkpoint that was just removed
            continue
    return total


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    square = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / square if square else 0.0


def soak(
    job: str, n_ranks: int, n_steps: int, every: int, folder: Path, seconds: float
) -> dict[str, Any]:
    """Run it, and look `FEW` times or more."""
    began, seen = time.monotonic(), []
    ranks = Ranks(n_ranks, JOBS[job], folder, str(folder / "run"), n_steps, every)
    while (here := look(folder / "run", [process.pid for process in ranks.processes])) is not None:
        seen.append(here)
        time.sleep(seconds)
    said = ranks.wait()
    if any(each is None or each.get("status") != "finished" for each in said):
        raise RuntimeError(f"the job ended otherwise: {said}")
    took = time.monotonic() - began
    half = [here for here in seen if here["step"] >= n_steps / 2]
    memory = [
        slope([(here["step"], here["resident_mib"][rank]) for here in half])
        for rank in range(n_ranks)
    ]
    last = {"step": n_steps, "disk_kib": round(_disk(folder / "run") / 1024, 1)}
    return {
        "job": job,
        "ranks": n_ranks,
        "n_steps": n_steps,
        "checkpoint_every": every,
        "seconds": round(took, 1),
        "looks": len(seen),
        "growth_in_second_half": {
            "resident_kib_per_1000_steps": [round(1000 * 1024 * each, 3) for each in memory],
            "open_files": [
                max(h["open_files"][r] for h in half) - min(h["open_files"][r] for h in half)
                for r in range(n_ranks)
            ],
            "disk_kib_per_1000_steps": round(
                1000 * slope([(here["step"], here["disk_kib"]) for here in half]), 3
            ),
        },
        "most_folders": max(
            here["folders"] for here in seen
        ),  # those kept, and the one being written
        "curve": [*seen[:: max(1, len(seen) // FEW)], last],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--job", choices=JOBS, nargs="+", default=["digits", "digits", "mixture"])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 1], help="one number for each job"
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[200_000, 50_000, 1_000_000],
        help="one number for each job",
    )
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--seconds", type=float, default=1.0, help="between looks")
    args = parser.parse_args()
    results = []
    for job, n_ranks, n_steps in zip(args.job, args.ranks, args.steps, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            results.append(soak(job, n_ranks, n_steps, args.every, Path(folder), args.seconds))
            print({key: value for key, value in results[-1].items() if key != "curve"}, flush=True)
    write(args.out, {**surroundings(__file__, "torch", "torchrex"), "results": results})


if __name__ == "__main__":
    main()
