"""A user's own script under torchrun: it trains, and says how it ended. `script.py FOLDER [N_STEPS]
[STRIKE]`

The strike hits rank 1 in its first life only; torchrun gives it others.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from faults import jobs, strikes
from torchrex.distributed import leave
from torchrex.errors import RankError


def main(folder, n_steps=jobs.N_STEPS, strike=None):
    torch.set_num_threads(1)
    rank, life = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    print(f"rank {rank} life {life} process {os.getpid()}", flush=True)
    if life and rank == 0:
        time.sleep(
            3
        )  # the other comes first, and must not find the address of this one's earlier life
    if strike == "loads":  # for ever, before it joins the others
        time.sleep(600)
    elif strike and rank == 1 and life == 0:
        strikes.STRIKES[strike]()
    try:
        said = jobs.network(folder, int(n_steps))
    except RankError as error:
        sys.exit(f"torchrex: {error}" if error.speaks else 1)
    print(f"rank {rank} life {life} ends {said['status']} at step {said['stands_at']}", flush=True)
    leave()
    if said["signal"]:  # with 0, torchrun would take it for finished
        sys.exit(128 + said["signal"])


if __name__ == "__main__":
    main(*sys.argv[1:])
