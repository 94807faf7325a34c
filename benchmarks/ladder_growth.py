"""How do round trips and the time of a step grow from 64 to 1,024 rungs, with one replica on each?

    python benchmarks/ladder_growth.py --out benchmarks/results/ladder_growth.json

Swaps are simulated with the package's own pairings and `Indexing.swap`; only the swap test is
replaced by a coin of the right acceptance. A target has a barrier Lambda, the sum of the rejection
rates of all pairs of a fine ladder (Syed et al. 2022), here spread evenly. Minibatch noise adds to
it: if the exponent of the swap ratio has standard deviation d without noise and its noise has s,
which falls with the gap and so with the number of rungs, the corrected test accepts with
probability

    a = 2 Phi(-sqrt(d^2 + s^2) / 2)

Rates are round trips per attempt of all replicas together. The time of a step is that of the model
in scaling_model.py, with latencies and bandwidths that are assumed, not measured.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from record import HERE, into_page, setting, surroundings, write
from scaling_model import bytes_each, ring_seconds
from scaling_pages import PAGE
from torchrex import EvenOdd, RandomPair
from torchrex.diagnostics import even_odd_rate
from torchrex.exchange.assignment import Indexing
from torchrex.report.plots import COLOURS, panels

swapped = Indexing.swap

RESULT = HERE / "results" / "ladder_growth.json"
RUNGS = (64, 128, 256, 512, 1024)
# Scheme, barrier, noise: that of the exponent between the two ends of the ladder, sqrt(2 sigma2)
# (1/tau_coldest - 1/tau_hottest).
CASES = [
    ("even-odd", 1.0, 0.0),
    ("even-odd", 5.0, 0.0),
    ("even-odd", 20.0, 0.0),
    ("even-odd", 5.0, 50.0),
    ("even-odd", 5.0, 400.0),
    ("random parity", 5.0, 0.0),
    ("random pair", 5.0, 0.0),
]
# Assumed: base, latency of a message and bytes per second. Nothing here was measured on such a
# network.
NETWORKS = {
    "fast": {"base": 20e-6, "latency": 5e-6, "bandwidth": 10e9},
    "Ethernet": {"base": 50e-6, "latency": 40e-6, "bandwidth": 1e9},
}
EXAMPLES = 256
BLOCK = 256  # attempts that are proposed at once
MOST_ATTEMPTS = 600_000


def acceptance(rungs: int, barrier: float, noise: float) -> Tensor:
    """Of every pair, (pairs,), if barrier and noise are spread evenly over them."""
    pairs = rungs - 1
    if not 0.0 <= barrier < pairs:
        raise ValueError(
            f"{pairs} pairs cannot have a barrier of {barrier}: it is a sum of rejection rates"
        )
    d = -2.0 * torch.special.ndtri(torch.tensor((1.0 - barrier / pairs) / 2.0, dtype=torch.float64))
    s = noise / pairs
    return (2.0 * torch.special.ndtr(-(d.square() + s**2).sqrt() / 2.0)).expand(pairs)


def rate(scheme: str, accept: Tensor) -> float:
    """Round trips an attempt, all replicas together, if energies are new at every attempt.

    Even-odd is Syed et al. 2022. In the others a replica takes a symmetric walk with steps of
    probability c_i a_i, where c is the chance that a pair is tested; it commutes between the ends
    in R sum 1 / (c_i a_i) attempts, and there are R of them.
    """
    if scheme == "even-odd":
        return even_odd_rate(1.0 - accept)
    tested = 0.5 if scheme == "random parity" else 1.0 / len(accept)
    return float(tested / (1.0 / accept).sum())


def proposals(scheme: str, generator: torch.Generator, first: int, pairs: int, runs: int) -> Tensor:
    """A block of proposals of the package's own pairing, (attempts, pairs, runs or 1)."""
    if scheme == "random parity":  # reversible: even or odd pairs by a coin, one for each run
        coins = torch.randint(2, (BLOCK * runs,), generator=generator)
        return (
            EvenOdd().propose(generator, coins, pairs, runs)[:, 0, :, 0].view(BLOCK, runs, pairs).mT
        )
    pairing = RandomPair() if scheme == "random pair" else EvenOdd()
    return pairing.propose(generator, torch.arange(first, first + BLOCK), pairs, runs)[:, 0]


def from_top(scheme: str, accept: Tensor) -> Tensor:
    """The chance that the replica on each rung saw the top last, (rungs,), before attempt 0, where
    all pairs accept alike.

    Of a symmetric walk it is linear. Of even-odd it is linear for those about to go up and for
    those about to go down, the latter higher by a jump: from p_up(i) = a p_up(i - 1) + r p_down(i)
    and p_down(i) = a p_down(i + 1) + r p_up(i), followed backwards in time.
    """
    pairs, a = len(accept), float(accept[0])
    rung = torch.arange(pairs + 1)
    if scheme != "even-odd":
        return rung / pairs
    slope = (1.0 - a) / ((1.0 - a) * pairs + a)
    chance = slope * rung + (1.0 - slope * pairs) * (rung % 2)  # at attempt 0 odd rungs go down
    chance[-1] = 1.0
    return chance


def simulate(
    scheme: str, accept: Tensor, *, runs: int, attempts: int, burn_in: int, seed: int
) -> Tensor:
    """Arrivals on rung 0 of replicas that come from the top, per attempt, in each of so many
    independent runs.

    In the long run these are as many as round trips. Which end a replica saw last is drawn at first
    as it is in equilibrium.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = len(accept)
    rungs = pairs + 1
    replica_at = torch.arange(rungs)[:, None].repeat(1, runs)
    comes_from_top = (
        torch.rand(rungs, runs, generator=generator) < from_top(scheme, accept)[:, None]
    )
    arrivals = torch.zeros(runs, dtype=torch.int64)
    chance = accept[:, None].float()
    for attempt in range(burn_in + attempts):
        if attempt % BLOCK == 0:
            block = proposals(scheme, generator, attempt, pairs, runs)
        accepted = block[attempt % BLOCK] & (torch.rand(pairs, runs, generator=generator) < chance)
        replica_at = swapped(replica_at, accepted)
        coldest, hottest = replica_at[:1], replica_at[-1:]
        if attempt >= burn_in:
            arrivals += comes_from_top.gather(0, coldest)[0]
        comes_from_top.scatter_(0, coldest, False).scatter_(0, hottest, True)
    return arrivals.double() / attempts


def measure(
    rungs: int, scheme: str, barrier: float, noise: float, *, effort: float, seed: int
) -> dict[str, Any]:
    """The formula's rate, and the simulated one with its standard error, where enough of them can
    be waited for.
    """
    accept = acceptance(rungs, barrier, noise)
    expected = rate(scheme, accept)
    one = {
        "rungs": rungs,
        "scheme": scheme,
        "barrier": barrier,
        "noise": noise,
        "acceptance": float(accept[0]),
    }
    one["rate"] = {"formula": expected, "simulated": None, "se": None}
    runs = 32
    wanted = {"even-odd": 20_000, "random parity": 3_000, "random pair": 1_000}[scheme] * effort
    attempts = max(20 * rungs, math.ceil(wanted / (expected * runs)))
    if attempts <= MOST_ATTEMPTS:
        found = simulate(scheme, accept, runs=runs, attempts=attempts, burn_in=0, seed=seed)
        one["rate"] |= {
            "simulated": float(found.mean()),
            "se": float(found.std() / math.sqrt(runs)),
        }
    return one


def step_ms(
    rungs: int, work: float, network: dict[str, float], *, ranks: int | None = None
) -> float:
    """Milliseconds of a step: `work` seconds for each replica of a rank, then a gather of their
    losses that nothing hides.
    """
    ranks = rungs if ranks is None else ranks
    return 1e3 * (
        work * -(-rungs // ranks)
        + ring_seconds(ranks, bytes_each(rungs, ranks, EXAMPLES), **network)
    )


# Pages


def table(record: dict[str, Any]) -> str:
    """Rates by scheme, simulated and by formula."""
    found = {
        (r["rungs"], r["scheme"], r["barrier"], r["noise"]): r["rate"] for r in record["results"]
    }
    heads = [f"{s}, {b:g}" + (f", noise {n:g}" if n else "") for s, b, n in CASES]
    lines = ["| rungs | " + " | ".join(heads) + " |", "|---" * (len(CASES) + 1) + "|"]
    for rungs in RUNGS:
        cells = []
        for case in CASES:
            one = found[(rungs, *case)]
            formula = f"{1e3 * one['formula']:.3g}"
            shown = (
                ""
                if one["simulated"] is None
                else f"{1e3 * one['simulated']:.3g} ± {1e3 * one['se']:.1g} "
            )
            cells.append(f"{shown}({formula})")
        lines.append(f"| {rungs:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def growth_table(record: dict[str, Any]) -> str:
    """The time of a step, and round trips in an hour, on assumed networks."""
    work = record["seconds_of_a_replica"]
    lines = [
        "| rungs | bytes to each rank | step, fast, ms | gather, % | step, Ethernet, ms | gather, "
        "% | round trips an hour, fast "
        "| Ethernet | 64 ranks, Ethernet: step, ms | trips an hour |",
        "|---" * 10 + "|",
    ]
    for rungs in RUNGS:
        trips = 3.6e6 * rate("even-odd", acceptance(rungs, 5.0, 0.0))
        times = {name: step_ms(rungs, work, network) for name, network in NETWORKS.items()}
        cells = [f"{rungs:,}", f"{rungs * bytes_each(rungs, rungs, EXAMPLES):,}"]
        for ms in times.values():
            cells += [f"{ms:.1f}", f"{100 * (1 - 1e3 * work / ms):.0f}"]
        few = step_ms(rungs, work, NETWORKS["Ethernet"], ranks=64)
        cells += [f"{trips / ms:,.0f}" for ms in times.values()] + [
            f"{few:.1f}",
            f"{trips / few:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(record: dict[str, Any], path: Path) -> None:
    """Left the rates, right the time of a step."""
    colours = COLOURS
    styles = ("-", "--", "-.", ":")
    with panels(path, 2, 1, (6.4, 8)) as (_, ((left,), (right,))):
        grid = [round(64 * 2 ** (k / 8)) for k in range(33)]
        for k, (scheme, barrier, noise) in enumerate(CASES):
            name = f"{scheme}, barrier {barrier:g}" + (f", noise {noise:g}" if noise else "")
            style = {"color": colours[k], "ls": styles[k % 4]}
            left.plot(
                grid,
                [1e3 * rate(scheme, acceptance(r, barrier, noise)) for r in grid],
                **style,
                label=name,
            )
            mine = [
                r
                for r in record["results"]
                if (r["scheme"], r["barrier"], r["noise"]) == (scheme, barrier, noise)
            ]
            mine = [r for r in mine if r["rate"]["simulated"]]
            left.plot(
                [r["rungs"] for r in mine],
                [1e3 * r["rate"]["simulated"] for r in mine],
                "o",
                color=colours[k],
                markersize=4,
            )
        left.set(
            xscale="log",
            yscale="log",
            xlabel="rungs",
            ylabel="round trips per 1,000 attempts",
            ylim=(5e-4, 1e3),
            xlim=(58, 1130),
        )
        left.set_title("All replicas together: formula (lines), simulated (points)", fontsize=10)
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
        work = record["seconds_of_a_replica"]
        for k, (name, network) in enumerate(NETWORKS.items()):
            right.plot(
                grid,
                [step_ms(r, work, network) for r in grid],
                color=colours[k],
                label=f"{name} network, a rank for each replica",
            )
        few = [step_ms(r, work, NETWORKS["Ethernet"], ranks=64) for r in RUNGS]
        right.plot(
            RUNGS,
            few,
            color=colours[2],
            linestyle="-.",
            marker="s",
            markersize=4,
            label="Ethernet, 64 ranks",
        )
        right.axhline(1e3 * work, color="#444444", linestyle=":", label="without communication")
        right.set(xscale="log", yscale="log", xlabel="rungs", ylabel="ms a step")
        right.set_title("A step of ResNet-20, assumed networks, nothing hidden", fontsize=10)
        right.legend()
        for axis in (left, right):
            axis.set_xticks(RUNGS, [f"{r:,}" for r in RUNGS])
            axis.minorticks_off()
        right.set_yticks([15, 20, 30, 50, 100, 200], ["15", "20", "30", "50", "100", "200"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--effort", type=float, default=1.0, help="times as many round trips")
    parser.add_argument(
        "--pages", action="store_true", help="only write tables and picture from what is stored"
    )
    arguments = parser.parse_args()
    if not arguments.pages:
        torch.set_num_threads(1)
        eager = json.loads((HERE / "results" / "module_step.json").read_text())["results"]
        (work,) = (
            min(r["ms_per_step"]) / 1e3
            for r in eager
            if r["name"].startswith("eager") and r["replicas"] == 1
        )
        results = []
        for k, (rungs, case) in enumerate((rungs, case) for rungs in RUNGS for case in CASES):
            results.append(measure(rungs, *case, effort=arguments.effort, seed=k))
            print(results[-1], flush=True)
        record = surroundings(__file__, "torch", "torchrex")
        write(
            arguments.out,
            {
                **record,
                "seconds_of_a_replica": work,
                "networks_assumed": NETWORKS,
                "results": results,
            },
        )
    record = json.loads(arguments.out.read_text())
    if arguments.out.resolve() == RESULT.resolve():
        into_page(PAGE, "ladder", f"{table(record)}\n\n{setting(record)}")
        into_page(PAGE, "growth", growth_table(record))
        picture(record, PAGE.with_name("scaling_ladder.png"))


if __name__ == "__main__":
    main()
