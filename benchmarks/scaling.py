"""What does it cost to spread replicas over processes? Bytes, the gather, steps, and a model.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json

Real ranks on this machine, over gloo, one thread each. Every layout is measured in three ways that
take turns block by block:

    overlapped   as it is: the losses travel while the last replica's gradients are computed
    at once      the gather is waited for where it begins
    silent       nothing travels; every rank pretends that the others have its own losses

All ranks read one clock, so the time of a rank in a gather can be split: until the last rank has
posted its numbers it waits for a slower rank (ranks that share cores are never equally fast); what
comes after that is transport. The tables and the picture of docs/scaling.md are made from the
stored numbers (`--pages` makes them again without measuring).

scaling_ranks.py is what a rank does and how it is timed, scaling_measure.py starts ranks and
collects their numbers, scaling_model.py has the model, scaling_pages.py the tables and the picture.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from record import HERE, into_page, setting, surroundings, write
from scaling_measure import measure
from scaling_pages import PAGE, TABLES, picture

RESULT = HERE / "results" / "scaling.json"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--turns", type=int, default=6, help="blocks of each way, in every round")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often all layouts are gone through"
    )
    parser.add_argument(
        "--pages", action="store_true", help="only write tables and picture from what is stored"
    )
    arguments = parser.parse_args()
    if not arguments.pages:
        # Threads that spin on cores which other processes use would be measured too.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        record = surroundings(__file__, "torch", "torchrex")
        write(arguments.out, {**record, **measure(arguments.turns, arguments.rounds)})
    record = json.loads(arguments.out.read_text())
    for name, table in TABLES.items():
        print(table(record), "\n")
        if arguments.out.resolve() == RESULT.resolve():
            into_page(PAGE, name, f"{table(record)}\n\n{setting(record)}")
    if arguments.out.resolve() == RESULT.resolve():
        picture(record, PAGE.with_name("scaling.png"))


if __name__ == "__main__":
    main()
