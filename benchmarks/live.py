"""What does watching a run cost? The digits run with and without the live display and the logs, in turns in one process.

`python benchmarks/live.py --out benchmarks/results/live.json`

Two answers. `share` is the processor time spent inside the observer's calls over that of the run around them: exact, but blind to
what watching does to the rest. `ratio` is a watched run over the bare one of the same turn: blind to nothing, but a busy machine
changes its pace by more than 1 % from run to run, so look at its standard error. Every turn runs each contestant once, in an
order that rotates; the first turn warms up and is not counted. The display draws on a pseudo-terminal that is read, as a real one
is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from record import HERE, surroundings, write
from torchrex.experiments import get_recipe
from torchrex.experiments.config import override
from torchrex.experiments.jobs import Job
from torchrex.recording import JsonLines, LiveDisplay, Observer, TensorBoard

CALLS = ("on_start", "on_steps", "on_draw", "on_save", "on_end")
WATCHERS = ("none", "nothing asked", "live display", "jsonl", "tensorboard")


@contextlib.contextmanager
def terminal() -> Iterator[tuple[Console, list[int]]]:
    """A console on a pseudo-terminal of 120 x 30, and how many bytes it has shown."""
    reading, writing = pty.openpty()
    shown = [0]

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(reading, 65536):
                shown[0] += len(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    with open(writing, "w") as file:
        yield Console(file=file, force_terminal=True, width=120, height=30, color_system="256"), shown
    thread.join(timeout=1)
    os.close(reading)


class Timed(Observer):
    """Passes every call on, and adds up how long they take."""

    def __init__(self, inner: Observer) -> None:
        self.inner, self.seconds = inner, 0.0

    def __getattribute__(self, name: str) -> Any:
        if name not in CALLS:
            return super().__getattribute__(name)
        call = getattr(self.inner, name)

        def timed(*arguments: Any) -> None:
            began = time.thread_time()
            call(*arguments)
            self.seconds += time.thread_time() - began

        return timed


def seconds_of(name: str, epochs: int, console: Console) -> tuple[float, float]:
    """Processor time of a digits run, and of its observer; waiting for other processes is not counted."""
    config = override(get_recipe("digits/resghmc"), [f"epochs={epochs}"])
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Callable[[], Observer]] = {
            "nothing asked": Observer,
            "live display": lambda: LiveDisplay(console=console),
            "jsonl": lambda: JsonLines(Path(folder) / "log.jsonl"),
            "tensorboard": lambda: TensorBoard(Path(folder) / "tensorboard"),
        }
        observers = (Timed(made[name]()),) if name in made else ()
        began = time.process_time()
        outcome, _ = config.execute([Job(config, 0, None, observers)], device="cpu")
        assert outcome.status == "finished"
        return time.process_time() - began, sum(observer.seconds for observer in observers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results" / "live.json")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--epochs", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in WATCHERS}
    inside: dict[str, list[float]] = {name: [] for name in WATCHERS}
    with terminal() as (console, shown):
        for turn in range(arguments.turns + 1):
            start = turn % len(WATCHERS)
            for name in WATCHERS[start:] + WATCHERS[:start]:
                took, of_observer = seconds_of(name, arguments.epochs, console)
                if turn:
                    times[name].append(took)
                    inside[name].append(of_observer / (took - of_observer))
        assert shown[0] > 1000, "the display showed nothing"
    results = []
    for name in WATCHERS[1:]:
        ratios = [100 * (with_ / without - 1) for with_, without in zip(times[name], times["none"], strict=True)]
        result = {
            "name": name,
            "share_percent": {
                "median": 100 * statistics.median(inside[name]),
                "min": 100 * min(inside[name]),
                "max": 100 * max(inside[name]),
            },
            "ratio_percent": {
                "median": statistics.median(ratios),
                "mean": statistics.fmean(ratios),
                "se": statistics.stdev(ratios) / len(ratios) ** 0.5,
            },
        }
        results.append(result)
        share, ratio = result["share_percent"], result["ratio_percent"]
        print(
            f"{name:15} share {share['median']:.3f} % (max {share['max']:.3f}), ratio {ratio['mean']:+.2f} ± {ratio['se']:.2f} %"
        )
    record = surroundings(sys.argv[0], "torch", "rich", "tensorboard")
    record |= {"turns": arguments.turns, "epochs": arguments.epochs, "seconds_bare": statistics.median(times["none"])}
    write(arguments.out, {**record, "results": results})


if __name__ == "__main__":
    main()
