"""Real processes for the tests of distributed runs: as many as asked for, over gloo, told who they
are as torchrun would.

They are forked from a server that has torchrex imported already, which saves the seconds that an
import takes on each of them. The store that torchrun's agent would host is hosted by the test, so
that any rank may be killed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torchrex", "torchrex.distributed", "torchrex.network"])


class Ranks:
    """Processes that run `function(*arguments)`, which returns plain values; each is on its own."""

    def __init__(self, n, function, folder, *arguments, timeout=60.0):
        self.folder = Path(folder) / f"ranks-{time.monotonic_ns()}"
        self.folder.mkdir(parents=True)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = []
        for rank in range(n):
            told = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": n,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.store.port,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHREX_TIMEOUT": timeout,
            }
            out = self.folder / f"{rank}.json"
            process = CONTEXT.Process(
                target=_one_rank,
                args=({k: str(v) for k, v in told.items()}, out, function, arguments),
            )
            process.start()
            self.processes.append(process)

    def wait(self, seconds=120.0):
        """What each rank returned, or {"error": kind, "said": words, "speaks": bool}, or None for
        one that was killed.
        """
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        assert not hanging, f"ranks {hanging} hang"
        files = [self.folder / f"{rank}.json" for rank in range(len(self.processes))]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]

    def send(self, number, rank):
        os.kill(self.processes[rank].pid, number)

    def kill(self):
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                process.kill()
                process.join()


def run_ranks(n, function, folder, *arguments, seconds=120.0, **options):
    return Ranks(n, function, folder, *arguments, **options).wait(seconds)


def _one_rank(environment, out, function, arguments):
    os.environ.update(environment)
    import torch

    import torchrex.distributed

    torch.set_num_threads(1)
    try:
        said = function(*arguments)
    except BaseException as error:
        if not hasattr(error, "speaks"):
            traceback.print_exc()
        said = {
            "error": type(error).__name__,
            "said": str(error),
            "speaks": getattr(error, "speaks", None),
        }
    part = out.with_suffix(".part")
    part.write_text(json.dumps(said))
    part.rename(out)
    with contextlib.suppress(Exception):
        torchrex.distributed.leave()
    sys.stdout.flush()
    os._exit(0)
