"""Do mutated files crash, hang or fool what reads them? 10,000 inputs, each a real file with
something done to it.

Every one must load as the original does, load in part and say what is damaged, or be refused by an
error of ours in one line. A file without a checksum, or one whose checksum was made right again,
may load as something else that is sound. Takes some minutes.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random

from record import surroundings, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the mutations are those of the tests

from fuzzing import Finding, make_kinds, try_one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    logging.disable(logging.CRITICAL)  # what is said of every damaged file
    outcomes: dict[str, Counter[str]] = {}
    mutations: Counter[str] = Counter()
    findings: list[str] = []
    began = time.monotonic()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kinds = make_kinds(root, stack)
        originals = {kind.name: kind.look(kind.folder) for kind in kinds}
        turns = [kind for kind in kinds for _ in range(kind.weight)]
        for k in range(arguments.inputs):
            kind = turns[k % len(turns)]
            place = Path(tempfile.mkdtemp(dir=root))
            try:
                trial = try_one(kind, originals[kind.name], place, Random(f"{arguments.seed} {k}"))
                outcome = trial.outcome
                mutations[trial.mutation] += 1
            except Finding as finding:
                outcome = "finding"
                findings.append(f"input {k}: {str(finding)[:300].replace(str(place), '')}")
                print(findings[-1], flush=True)
            outcomes.setdefault(kind.name, Counter())[outcome] += 1
            if (k + 1) % 1000 == 0:
                print(
                    f"{k + 1:,} inputs, {len(findings)} findings, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    total = sum(outcomes.values(), Counter())
    print(dict(total))
    if arguments.out is not None:
        record = surroundings(__file__, "torchrex", "torch", "safetensors", "numpy")
        write(
            arguments.out,
            {
                **record,
                "seed": arguments.seed,
                "inputs": arguments.inputs,
                "seconds": round(time.monotonic() - began, 1),
                "outcomes": dict(sorted(total.items())),
                "by_kind": {
                    name: dict(sorted(counts.items())) for name, counts in outcomes.items()
                },
                "by_mutation": dict(sorted(mutations.items())),
                "findings": findings,
            },
        )
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
