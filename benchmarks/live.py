"""What does watching a run cost? The digits run with and without the live display and the logs, in
turns in one process.

`taskset -c 1 python benchmarks/live.py --turns 30`; it also puts its table into
benchmarks/README.md.

Two answers, both in processor time, so that waiting for other processes is not counted:

    share   time of this thread inside the observer's calls, over that of the run around them:
            exact, but without what watching does to the rest (caches, the thread that reads the
            terminal)
    ratio   a watched run over the bare one of the same turn: nothing is left out, but a machine
            that others use changes its pace by more than 1 % from run to run. Hence the median over
            turns, with its standard error from 10,000 resamples of the turns

Every turn runs each contestant once, in an order that rotates; the first turn warms up and is not
counted. "Nothing asked" is an observer that does nothing: its ratio is what the method takes for a
difference where there is none. The display draws on a pseudo-terminal that is read, as a real one
is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import random
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

from record import HERE, into_page, setting, surroundings, write
from torchrex.experiments import Run, RunOptions, get_recipe
from torchrex.recording import JsonLines, LiveDisplay, Observer, TensorBoard
from torchrex.runs.config import override

RESULT = HERE / "results" / "live.json"
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
        yield (
            Console(file=file, force_terminal=True, width=120, height=30, color_system="256"),
            shown,
        )
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
    """Processor time of a digits run, and of its observer; waiting for other processes is not
    counted.
    """
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
        outcome, _ = config.execute([Run(config, 0, observers=observers)], RunOptions(device="cpu"))
        assert outcome.status == "finished"
        return time.process_time() - began, sum(observer.seconds for observer in observers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULT)
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
        ratios = [
            100 * (with_ / without - 1)
            for with_, without in zip(times[name], times["none"], strict=True)
        ]
        shares = [100 * share for share in inside[name]]
        results.append(
            {"name": name, "share_percent": median_of(shares), "ratio_percent": median_of(ratios)}
        )
    record = surroundings(sys.argv[0], "torch", "rich", "tensorboard")
    record |= {
        "turns": arguments.turns,
        "epochs": arguments.epochs,
        "seconds_bare": median_of(times["none"]),
    }
    record["results"] = results
    write(arguments.out, record)
    print(table(record))
    if arguments.out.resolve() == RESULT.resolve():
        into_page(HERE / "README.md", "live", f"{table(record)}\n\n{setting(record)}")


def median_of(values: list[float]) -> dict[str, float]:
    """The median, its standard error by resampling, and the extremes."""
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(10_000)]
    return {
        "median": statistics.median(values),
        "se": statistics.stdev(medians),
        "min": min(values),
        "max": max(values),
    }


def table(record: dict[str, Any]) -> str:
    """Percent of a digits run that each observer takes."""
    lines = [
        "| watching by | inside its calls, % (min to max) | watched over bare run, % |",
        "|---|---|---|",
    ]
    for r in record["results"]:
        share, ratio = r["share_percent"], r["ratio_percent"]
        inside = f"**{share['median']:.2f}** ({share['min']:.2f} to {share['max']:.2f})"
        lines.append(f"| {r['name']} | {inside} | {ratio['median']:+.2f} ± {ratio['se']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
