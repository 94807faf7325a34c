"""The tables and the picture of docs/scaling.md, from a record of scaling.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from record import HERE, number
from scaling_model import ring_seconds, step_seconds
from scaling_ranks import WAYS
from torchrex.report.plots import COLOURS, panels

PAGE = HERE.parent / "docs" / "scaling.md"


def gather_table(record: dict[str, Any]) -> str:
    """The gather alone and the model, which is fitted to the quietest tenth."""
    lines = [
        "| ranks | bytes from each | bytes to each | us, quietest tenth | model | us, median (to "
        "90 %) |",
        "|---" * 6 + "|",
    ]
    model = record["model"]
    for g in record["gather"]:
        us, predicted = (
            g["us"],
            1e6 * ring_seconds(g["ranks"], g["bytes"], cores=model["cores"], **model["ring"]),
        )
        shown = (
            f"**{number(us['p10'])}** | {number(predicted)} | {number(us['median'])} "
            f"({number(us['p90'])})"
        )
        lines.append(f"| {g['ranks']} | {g['bytes']:,} | {g['ranks'] * g['bytes']:,} | {shown} |")
    return "\n".join(lines)


def predicted_ms(record: dict[str, Any], r: dict[str, Any]) -> float:
    model = record["model"]
    settings = {**model["work"][r["net"]], "ring": model["ring"], "cores": model["cores"]}
    added = r["sent_by_rank_0"].get("all_reduce", {"calls": 0, "bytes": 0})
    return 1e3 * step_seconds(
        r["replicas"], r["ranks"], r["examples"], **settings, sums=(added["calls"], added["bytes"])
    )


def step_table(record: dict[str, Any]) -> str:
    """Whole steps: every layout, what travels, and the time of it."""
    lines = [
        "| network, replicas | ranks | bytes from each | ms a step, quietest tenth | model | "
        "median (to 90 %) | transport, us "
        "| % of the step (of means) | waiting for a slower rank, % (of means) |",
        "|---" * 9 + "|",
    ]
    for r in record["results"]:
        way = r["ways"].get("overlapped", r["ways"].get("alone"))
        assert way is not None
        ms, sent = way["ms"], r["sent_by_rank_0"]
        size = f"{sum(of['bytes'] for of in sent.values()):,}" if sent else "0"
        shown = f"{number(ms['median'])} ({number(ms['p90'])})"
        parts = ["", "", ""]
        if "transport" in way:
            us = way["transport"]["median"]
            share = {
                (name, of): way[name][of] / (10 * ms[of])
                for name in ("transport", "waiting")
                for of in ("median", "mean")
            }
            parts = [number(us)]
            parts.append(
                f"**{share['transport', 'median']:.2f}** ({share['transport', 'mean']:.2f})"
            )
            parts.append(f"{share['waiting', 'median']:.1f} ({share['waiting', 'mean']:.1f})")
        ranks = (
            f"{r['ranks']}"
            if r["ranks"] <= r["replicas"]
            else f"{r['ranks']} ({r['replicas']} x {r['ranks'] // r['replicas']})"
        )
        ranks += f" of {r['threads']} threads" if r["threads"] > 1 else ""
        model = number(predicted_ms(record, r)) if r["threads"] == 1 else ""
        lines.append(
            f"| {r['net']}, {r['replicas']} | {ranks} | {size} | {number(ms['p10'])} | {model} | "
            f"{shown} | {' | '.join(parts)} |"
        )
    return "\n".join(lines)


def overlap_table(record: dict[str, Any]) -> str:
    """Time in the gather with and without overlap, and processor time."""
    lines = [
        "| network, replicas, ranks | in the gather, overlapped, us (of it transport) | waited "
        "for at once, us (of it transport) "
        "| processor time of a rank, us | step, overlapped / at once / silent, ms |",
        "|---|---|---|---|---|",
    ]
    for r in record["results"]:
        if "silent" not in r["ways"] or r["ranks"] > r["replicas"]:
            continue
        ways = r["ways"]
        inside = [
            ways[way]["waiting"]["median"] + ways[way]["transport"]["median"] for way in WAYS[:2]
        ]
        shown = [
            f"{number(inside[k])} ({number(ways[way]['transport']['median'])})"
            for k, way in enumerate(WAYS[:2])
        ]
        cpu = ways["overlapped"]["cpu"]["median"] + max(
            0.0, ways["overlapped"]["background"]["median"] - ways["silent"]["background"]["median"]
        )
        ms = " / ".join(number(ways[way]["ms"]["median"]) for way in WAYS)
        lines.append(
            f"| {r['net']}, {r['replicas']}, {r['ranks']} | {shown[0]} | {shown[1]} | "
            f"{number(cpu)} | {ms} |"
        )
    return "\n".join(lines)


def besides_table(record: dict[str, Any]) -> str:
    """Predictions and checkpoints."""
    lines = [
        "| ranks | sending 256 x 10 logits, ms | a checkpoint, ms (10 % to 90 %) | its "
        "collectives |",
        "|---|---|---|---|",
    ]
    for r in record["besides"]:
        saving = (
            f"{number(r['saving']['median'])} ({number(r['saving']['p10'])} to "
            f"{number(r['saving']['p90'])})"
        )
        sending = number(r["sending"]["median"]) if r["ranks"] > 1 else "0"
        calls = sum(of["calls"] for of in r["checkpoint"].values())
        lines.append(f"| {r['ranks']} | {sending} | {saving} | {calls} |")
    return "\n".join(lines)


def headline(record: dict[str, Any]) -> str:
    """The answer in words: four ranks of one replica and one rank of four."""
    found = {
        (r["ranks"], r["threads"]): r["ways"]
        for r in record["results"]
        if (r["net"], r["replicas"]) == ("ResNet-20", 4)
    }
    four = found[4, 1]["overlapped"]
    share = {of: four["transport"][of] / (10 * four["ms"][of]) for of in ("median", "mean")}
    alone = [number(found[1, threads]["alone"]["ms"]["median"]) for threads in (1, 2)]
    ring, load = record["model"]["ring"], record["load"]
    work = [4 * four["work"]["median"], found[1, 1]["alone"]["work"]["median"]]
    us, ms = number(four["transport"]["median"]), number(four["ms"]["median"])
    return (
        f"**ResNet-20, 4 ranks x 1 replica on two cores: transport is {us} us of a step of {ms} "
        f"ms, {share['median']:.2f} % "
        f"({share['mean']:.2f} % of means).** Processor time of a step, all ranks together: "
        f"{number(work[0])} ms, against "
        f"{number(work[1])} ms of one rank with all 4 replicas. By the clock that one takes "
        f"{alone[0]} ms with one thread and "
        f"{alone[1]} ms with two; but others used the machine meanwhile (load {min(load):.1f} to "
        f"{max(load):.1f} on "
        f"{record['model']['cores']} cores), and one process gets less of a busy machine than "
        f"four. Constants of the gather: "
        f"base {1e6 * ring['base']:.0f} us, latency {1e6 * ring['latency']:.0f} us, bandwidth "
        f"{ring['bandwidth'] / 1e9:.2g} GB/s."
    )


TABLES = {
    "headline": headline,
    "gather": gather_table,
    "steps": step_table,
    "overlap": overlap_table,
    "besides": besides_table,
}


def picture(record: dict[str, Any], path: Path) -> None:
    """The gather alone against its bytes, measured and modelled."""
    model = record["model"]
    looks = {2: (COLOURS[0], "-", "o"), 4: (COLOURS[1], "--", "s"), 8: (COLOURS[2], "-.", "^")}
    with panels(path, 1, 1, (6.4, 3.8)) as (_, ((axis,),)):
        for ranks, (colour, line, marker) in looks.items():
            found = sorted(
                (g for g in record["gather"] if g["ranks"] == ranks), key=lambda g: g["bytes"]
            )
            sizes, us = [g["bytes"] for g in found], [g["us"] for g in found]
            error = [[u["median"] - u["p10"] for u in us], [u["p90"] - u["median"] for u in us]]
            apart = [
                size * 1.08 ** (ranks // 2 - 2) for size in sizes
            ]  # so that bars do not overlap
            axis.errorbar(
                apart,
                [u["median"] for u in us],
                error,
                color=colour,
                marker=marker,
                linestyle="none",
                capsize=3,
            )
            grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (k / 60) for k in range(61)]
            curve = [
                1e6 * ring_seconds(ranks, size, cores=model["cores"], **model["ring"])
                for size in grid
            ]
            axis.plot(grid, curve, color=colour, linestyle=line, label=f"{ranks} ranks")
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="bytes from each rank",
            ylabel="microseconds of a gather",
        )
        axis.set_title(
            "gloo on two cores: median with 10 % to 90 %, and the model (of the 10 %)", fontsize=10
        )
        axis.set_ylim(200, 1e5)
        axis.legend(ncols=3, loc="upper center")
