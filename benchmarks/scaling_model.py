"""The model of scaling.py: bytes and seconds of a gather and of a step, and its constants.

Nothing here measures; ladder_growth.py extrapolates with it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch


def shape_of(replicas: int, ranks: int) -> tuple[int, int]:
    """Replicas of the first rank, which has the most, and ranks that share the minibatch of a
    replica.
    """
    data = max(1, ranks // replicas)
    return -(-replicas // (ranks // data)), data


def bytes_each(replicas: int, ranks: int, n: int, *, losses: bool = True) -> int:
    """What a rank gives to the gather of a step: for each of its replicas a prior term and its
    share of n losses, in float64.

    Where the noise estimator needs no losses, one sum of them. A rank with fewer replicas than the
    first one fills up with zeros.
    """
    rows, data = shape_of(replicas, ranks)
    cuts = [round(n * k / data) for k in range(data + 1)]
    return 8 * rows * (1 + (max(b - a for a, b in itertools.pairwise(cuts)) if losses else 1))


def ring_seconds(
    ranks: int,
    size: float,
    *,
    base: float,
    latency: float,
    bandwidth: float,
    cores: float = float("inf"),
) -> float:
    """A gather on a ring: ranks - 1 rounds, each a message; ranks that share cores take turns.

    base + (ranks - 1) * max(1, ranks / cores) * (latency + size / bandwidth)
    """
    return (
        base + (ranks - 1) * max(1.0, ranks / cores) * (latency + size / bandwidth)
        if ranks > 1
        else 0.0
    )


def fit_ring(measured: list[tuple[int, int, float]], cores: int) -> dict[str, float]:
    """Constants of `ring_seconds` from (ranks, bytes, seconds), by least squares of relative
    errors; none is negative.
    """
    from scipy.optimize import nnls

    rounds = [(ranks - 1) * max(1.0, ranks / cores) for ranks, _, _ in measured]
    rows = [
        [1.0 / t, k / t, k * size / t] for k, (_, size, t) in zip(rounds, measured, strict=True)
    ]
    scale = [max(row[column] for row in rows) for column in range(3)]
    found, _ = nnls(
        [[value / s for value, s in zip(row, scale, strict=True)] for row in rows],
        [1.0] * len(rows),
    )
    base, latency, per_byte = (float(value / s) for value, s in zip(found, scale, strict=True))
    return {
        "base": base,
        "latency": latency,
        "bandwidth": 1.0 / per_byte if per_byte > 0 else float("inf"),
    }


def step_seconds(
    replicas: int,
    ranks: int,
    n: int,
    *,
    fixed: float,
    each: float,
    ring: dict[str, float],
    cores: float,
    sums: tuple[int, float] = (0, 0.0),
) -> float:
    """A step without overlap: the replicas of a rank one after the other, ranks that share cores in
    turns, and the gather.

    Ranks that share a replica also add up `sums`, so many tensors of so many bytes together: twice
    round a ring, each message with its part of a tensor.
    """
    rows, data = shape_of(replicas, ranks)
    turns = max(1.0, ranks / cores)
    work = turns * (fixed + rows * each / data)
    calls, size = sums if data > 1 else (0, 0.0)
    messages = 2 * (data - 1) * turns * (calls * ring["latency"] + size / data / ring["bandwidth"])
    return (
        work
        + ring_seconds(ranks, bytes_each(replicas, ranks, n), cores=cores, **ring)
        + calls * ring["base"]
        + messages
    )


def fit_work(results: list[dict[str, Any]], net: str) -> dict[str, float]:
    """A step on one rank of one thread is fixed + replicas * each: the least-squares line of
    relative errors.

    Of processor time, which others' load on the machine hardly changes.
    """
    points = [
        (r["replicas"], r["ways"]["alone"]["work"]["median"] / 1e3)
        for r in results
        if r["net"] == net and r["ranks"] == r["threads"] == 1
    ]
    rows = torch.tensor([[1.0 / t, replicas / t] for replicas, t in points], dtype=torch.float64)
    fixed, each = (
        torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64))
        .solution[:, 0]
        .tolist()
    )
    return {"fixed": fixed, "each": each}
