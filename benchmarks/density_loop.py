"""Microseconds a step of the loop over a density, against JAX, blackjax and posteriors, all on one
core.

Two rungs: case 1 of figure 1 (0.4 N(-3, 0.7^2) + 0.6 N(2, 0.5^2), energies with noise N(0, 2^2),
temperatures 1 and 10, lr 0.03, sigma2 measured every 100 steps from 10 energies, gain 1/m, F = 1).
One rung: SGLD without the noise. Noise generation is included, compilation is not. Every contestant
must show the right law before its time is stored.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before the libraries start their threads
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"
cache = tempfile.TemporaryDirectory()  # empty, so that the compile times are those of a first run
os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
warnings.filterwarnings("ignore", category=FutureWarning, module="posteriors")

# ruff: noqa: E402
import numpy as np
import torch

import torchrex
from peers import (
    COLD,
    ENERGY_NOISE,
    EVERY,
    HOT,
    LR,
    MEANS,
    N_DRAWS,
    STDS,
    WEIGHTS,
    Segment,
    blackjax_loop,
    jax_loop,
    natural_block,
    posteriors_loop,
    scan_loop,
    tuned_block,
)
from record import density_loop_table, surroundings, write

ACCEPTANCE = 0.112  # of case 1, after the first thousand steps
REPETITIONS = 5


@dataclass
class Contestant:
    name: str
    rungs: int
    runs: int
    start: Callable[[], Segment]  # builds and compiles
    block: int | None = None  # steps a call, where they were chosen by trial
    compile_seconds: float = 0.0
    microseconds: list[float] = field(default_factory=list)
    n_steps: int = 0
    accepted: int = 0
    positions: Any = None

    def prepare(self) -> Contestant:
        """Compile, and leave the first thousand steps behind."""
        began = time.perf_counter()
        self.advance = self.start()
        done, _ = self.advance()
        self.compile_seconds = time.perf_counter() - began
        while done < 1_000:
            done += self.advance()[0]
        return self

    def measure(self, seconds: float) -> None:
        began, steps = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            n, outcome = self.advance()
            steps += n
            if self.rungs == 2:
                self.accepted += outcome
            else:
                self.positions = outcome
        self.microseconds.append(1e6 * elapsed / steps)
        self.n_steps += steps

    def check(self) -> dict[str, float]:
        """The acceptance rate or, with one rung, the mean squared move; raises if it is wrong."""
        if self.rungs == 2:  # swaps are correlated: ten steps count as one
            name, n = "acceptance_rate", self.n_steps * self.runs
            value, low, high = self.accepted / n, ACCEPTANCE, ACCEPTANCE
            slack = 0.004 + 5 * math.sqrt(ACCEPTANCE * (1 - ACCEPTANCE) * 10 / n)
        else:  # E[move^2] = 2 lr tau + lr^2 E[gradient^2]; the last mean is 1 / std^2 per mode
            moves = np.diff(np.asarray(self.positions), axis=0)
            name, value, n = "mean_squared_move", float(np.square(moves).mean()), moves.size
            low, high = (2 * LR * COLD + (LR / std) ** 2 for std in STDS)
            slack = 5 * high * math.sqrt(2 / n)
        if not low - slack < value < high + slack:
            expected = f"{low:.4g} to {high:.4g} +- {slack:.2g}"
            raise AssertionError(
                f"{self.name}, {self.runs} runs: {name} is {value:.4g}, not {expected}"
            )
        return {name: value}

    def result(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name)
            for name in ("name", "rungs", "runs", "block", "n_steps", "compile_seconds")
        }
        spread = {f.__name__: f(self.microseconds) for f in (statistics.median, min, max)}
        return {**plain, "us_per_step": spread, **self.check()}


def fastest(candidates: list[Contestant]) -> Contestant:
    """The best of some variants by a short trial."""
    for candidate in candidates:
        candidate.prepare().measure(0.3)
    best = min(candidates, key=lambda candidate: candidate.microseconds)
    best.microseconds, best.n_steps, best.accepted = [], 0, 0
    return best


def torchrex_loop(rungs: int, runs: int, compiled: bool, steps: int) -> Segment:
    """`advance` in a loop; the swaps are counted from what it yields."""
    mixture = torchrex.GaussianMixture(WEIGHTS, means=MEANS, stds=STDS)
    target = (
        torchrex.Noisy(mixture, energy=torchrex.Gaussian(ENERGY_NOISE)) if rungs == 2 else mixture
    )
    run = torchrex.DensityExchange(
        torchrex.TensorEnsemble.start(target, n_rungs=rungs, n_runs=runs),
        torchrex.Ladder((COLD, HOT)[:rungs], LR),
        noise=torchrex.RunningMean(torchrex.RepeatedDraws(N_DRAWS, EVERY)) if rungs == 2 else None,
        compiled=compiled,
    )

    def segment() -> tuple[int, Any]:
        accepted = 0
        for info in run.advance(steps):
            accepted += int(info.accepted.sum())
        return steps, accepted if rungs == 2 else info.position[..., 0]

    return segment


def contestants(runs: int) -> Iterator[Contestant]:
    """All that compete at this number of runs, compiled; peers with a block length get their best
    one.
    """
    steps = max(2_000, 500_000 // runs)
    lengths = [length for length in (100, 1_000, 10_000, 100_000) if length * runs <= 1_000_000]
    yield Contestant(
        "torchrex, compiled", 2, runs, partial(torchrex_loop, 2, runs, True, steps)
    ).prepare()
    yield fastest(
        [
            Contestant("jax, tuned", 2, runs, partial(jax_loop, tuned_block, k, runs), k)
            for k in lengths
        ]
    )
    yield Contestant(
        "jax, natural", 2, runs, partial(jax_loop, natural_block, 1_000, runs)
    ).prepare()
    yield Contestant("torch scan", 2, runs, partial(scan_loop, runs)).prepare()
    yield Contestant(
        "torchrex, eager", 2, runs, partial(torchrex_loop, 2, runs, False, 200)
    ).prepare()
    if runs <= 64:
        yield Contestant(
            "torchrex, compiled", 1, runs, partial(torchrex_loop, 1, runs, True, steps)
        ).prepare()
        yield fastest(
            [Contestant("blackjax", 1, runs, partial(blackjax_loop, runs, k), k) for k in lengths]
        )
        yield Contestant("posteriors", 1, runs, partial(posteriors_loop, runs, 200)).prepare()


class Refuse(logging.Handler):
    """torchrex says so when it cannot compile; here that is an error."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(record.getMessage())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="time for one measurement of one contestant"
    )
    parser.add_argument(
        "--runs", type=int, nargs="+", default=[1, 64, 1024], help="numbers of independent runs"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrex").addHandler(Refuse())

    everyone = [contestant for runs in args.runs for contestant in contestants(runs)]
    for _ in range(REPETITIONS):  # in turn, so that a disturbance of the machine meets them all
        for contestant in everyone:
            contestant.measure(args.seconds)
    record = {
        **surroundings(__file__, "torch", "torchrex", "jax", "jaxlib", "blackjax", "posteriors"),
        "repetitions": REPETITIONS,
        "seconds": args.seconds,
        "results": [contestant.result() for contestant in everyone],
    }
    write(args.out, record)
    print(density_loop_table(record))


if __name__ == "__main__":
    main()
