"""What docs/scaling.md says: what travels, how the model counts it, and how round trips grow with
the ladder.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from assertions import assert_mean_is, assert_mean_is_not
from modules import classes, cross_entropy, with_everything
from ranks import run_ranks

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import ladder_growth  # noqa: E402
import step_skew  # noqa: E402
import torchrex as tr  # noqa: E402
from scaling_measure import split  # noqa: E402
from scaling_model import bytes_each, fit_ring, ring_seconds, step_seconds  # noqa: E402
from scaling_pages import TABLES  # noqa: E402
from torchrex.distributed import replica_mesh  # noqa: E402

# What travels


def traffic(replicas, n, noise):
    """The collectives of the third step, as (name, bytes)."""
    sys.path.append(str(ROOT / "benchmarks"))
    from scaling_ranks import Counted

    # Dropout on so large a share of the data would be evaluated, and sent, a second time.
    options = {"mesh": replica_mesh(replicas), "random_losses": True}
    ensemble = tr.ModuleEnsemble(with_everything, cross_entropy(), tr.SGHMC(0.1), **options)
    ladder = tr.Ladder([0.5 + 0.01 * rung for rung in range(replicas)], 1e-4)
    run = tr.ModuleExchange(
        ensemble, ladder, noise=tr.PairedVariance() if noise == "paired" else tr.KnownVariance(3.0)
    )
    loader = tr.DeviceLoader(classes(), n, seed=1)
    list(run.advance(2, loader))
    with Counted() as counted:
        list(run.advance(1, loader))
    parameters = sum(p.numel() for p in run.ensemble.modules[0].parameters())
    buffers = sum(b.numel() for b in run.ensemble.modules[0].buffers() if b.is_floating_point())
    return {"seen": counted.seen, "of_replica": [4 * parameters, 4 * buffers]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "ranks", "noise"),
    [(4, 2, "paired"), (5, 2, "paired"), (4, 4, "known"), (3, 6, "paired"), (2, 6, "known")],
)
def test_a_step_sends_losses_in_one_gather_and_weights_never(tmp_path, replicas, ranks, noise):
    """The model's bytes are those that torch.distributed is given; gradients travel only where
    ranks share minibatches."""
    expected = [["all_gather", bytes_each(replicas, ranks, 7, losses=noise == "paired")]]
    for said in run_ranks(ranks, traffic, tmp_path, replicas, 7, noise):
        shared = [["all_reduce", size] for size in said["of_replica"]] if ranks > replicas else []
        assert said["seen"] == expected + shared


def test_bytes_of_written_cases():
    assert bytes_each(4, 4, 256) == 8 * 257
    assert bytes_each(4, 4, 256, losses=False) == 16
    assert bytes_each(5, 2, 10) == 8 * 3 * 11  # the second has two replicas, and a row of zeros
    assert bytes_each(2, 6, 10) == 8 * (1 + 4)  # shares of 3, 4 and 3


# From stamps and times to numbers


def test_waiting_for_a_slower_rank_is_not_transport():
    stamps = torch.tensor(
        [
            [
                [0.0, 1.0, 2.0, 9.0]
            ],  # posted at 1, asked at 2, there at 9: it waited for the second until 7
            [[6.0, 7.0, 7.0, 10.0]],
            [[0.0, 2.0, 8.0, 8.5]],  # asked after all had posted
        ],
        dtype=torch.float64,
    )
    waiting, transport = split(stamps)
    assert waiting[:, 0].tolist() == [5.0, 0.0, 0.0]
    assert transport[:, 0].tolist() == [1.0 + 2.0, 1.0 + 3.0, 2.0 + 0.5]
    on_time = torch.tensor([[[0.0, 1.0, 5.0, 6.0]], [[0.0, 9.0, 9.0, 9.0]]], dtype=torch.float64)
    # A clock that differs by a little never makes it negative.
    assert split(on_time)[0][0].tolist() == [1.0]


@pytest.mark.parametrize("constants", [(1e-4, 5e-5, 2e8), (0.0, 2e-5, 1e9)])
def test_the_fit_finds_the_constants(constants):
    ring = dict(zip(("base", "latency", "bandwidth"), constants, strict=True))
    points = [
        (p, m, ring_seconds(p, m, cores=2, **ring))
        for p in (2, 4, 8)
        for m in (100, 10_000, 300_000)
    ]
    found = fit_ring(points, cores=2)
    assert found == pytest.approx(ring, rel=1e-6, abs=1e-10)
    assert ring_seconds(1, 1e9, **ring) == 0.0
    assert ring_seconds(3, 1_000, **ring) == pytest.approx(
        ring["base"] + 2 * (ring["latency"] + 1_000 / ring["bandwidth"])
    )
    work = {"fixed": 1e-3, "each": 4e-3, "ring": ring}
    assert step_seconds(4, 1, 32, cores=2, **work) == pytest.approx(17e-3)
    four = step_seconds(4, 4, 32, cores=2, **work) - ring_seconds(4, 8 * 33, cores=2, **ring)
    assert four == pytest.approx(2 * 5e-3)  # four ranks of one replica take turns on two cores
    eight = step_seconds(4, 8, 32, cores=8, **work) - ring_seconds(8, 8 * 17, cores=8, **ring)
    assert eight == pytest.approx(1e-3 + 2e-3)  # half of the examples each
    summed = step_seconds(4, 8, 32, cores=8, **work, sums=(2, 6_000)) - step_seconds(
        4, 8, 32, cores=8, **work
    )
    assert summed == pytest.approx(
        2 * (ring["base"] + 2 * ring["latency"]) + 6_000 / ring["bandwidth"]
    )
    assert step_seconds(4, 4, 32, cores=8, **work, sums=(2, 6_000)) == step_seconds(
        4, 4, 32, cores=8, **work
    )


def test_the_slowest_of_many_ranks():
    """Of P draws of 0 or 1 the largest is 0 with probability 2^-P; 2,000 steps, 5 errors."""
    for ranks in (1, 3):
        exact = 1 - 0.5**ranks
        error = math.sqrt(exact * (1 - exact) / step_skew.DRAWS)
        assert abs(step_skew.slowest([0.0, 1.0], ranks, 1) - exact) < 5 * error
    assert step_skew.slowest([2.0], 64, 16) == 32.0


# Round trips


@pytest.mark.parametrize("scheme", ["even-odd", "random parity", "random pair"])
def test_simulated_round_trips_have_the_rate_of_the_formula(scheme):
    """Independent runs, so the false-alarm rate is that of `assert_mean_is`: 5.7e-7. It begins in
    equilibrium."""
    rungs, barrier = 12, 2.5
    accept = ladder_growth.acceptance(rungs, barrier, 0.0)
    attempts = {"even-odd": 600, "random parity": 3_000, "random pair": 6_000}[scheme]
    found = ladder_growth.simulate(scheme, accept, runs=400, attempts=attempts, burn_in=0, seed=1)
    expected = ladder_growth.rate(scheme, accept)
    assert_mean_is(found, expected)
    for factor in (0.9, 1.1):
        assert_mean_is_not(found, factor * expected)
    early = ladder_growth.simulate(scheme, accept, runs=20_000, attempts=20, burn_in=0, seed=2)
    assert_mean_is(early, expected)
    if scheme == "even-odd":
        # The limit of a fine ladder is not yet reached.
        assert_mean_is_not(found, 1 / (2 + 2 * barrier))


def test_noise_adds_to_the_barrier_by_squares():
    """The exponent of an exact test is N(-d^2/2, d^2) in equilibrium; the corrected test under
    noise s accepts as if both were one: 2 Phi(-sqrt(d^2 + s^2) / 2). In a fine ladder Lambda and
    s_total / sqrt(2 pi) add up by squares."""
    for d, s in ((0.3, 0.5), (1.0, 2.0), (2.0, 0.1)):
        z = torch.linspace(-9.0, 9.0, 20_001, dtype=torch.float64)
        weight = torch.exp(-z.square() / 2)
        mean = (weight * tr.expected_acceptance(-(d**2) / 2 + d * z, s)).sum() / weight.sum()
        assert float(mean) == pytest.approx(
            2 * float(torch.special.ndtr(torch.tensor(-math.hypot(d, s) / 2))), rel=1e-5
        )
    without, accept = (
        ladder_growth.acceptance(200, 10.0, 0.0),
        ladder_growth.acceptance(20_001, 3.0, 20.0),
    )
    assert (1 - without).sum() == pytest.approx(10.0)
    assert float((1 - accept).sum()) == pytest.approx(
        math.hypot(3.0, 20.0 / math.sqrt(2 * math.pi)), rel=1e-3
    )
    with pytest.raises(ValueError, match="barrier"):
        ladder_growth.acceptance(4, 3.5, 0.0)


# What is stored


def stored(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_communication_of_resnet20_was_at_most_three_percent():
    """Four ranks of one replica on two cores; transport and the processor time of it, mean and
    median."""
    (four,) = (
        r
        for r in stored("scaling")["results"]
        if (r["net"], r["replicas"], r["ranks"]) == ("ResNet-20", 4, 4)
    )
    way = four["ways"]["overlapped"]
    for of in ("median", "mean"):
        assert way["transport"][of] < 0.03 * 1e3 * way["ms"][of]
    assert four["sent_by_rank_0"] == {
        "all_gather": {"calls": 1, "bytes": bytes_each(4, 4, four["examples"])}
    }


def test_stored_simulations_agree_with_the_formula():
    """Each within 5 standard errors, of 32 runs: Student's t makes it 2e-5 for each."""
    results = [r for r in stored("ladder_growth")["results"] if r["rate"]["simulated"] is not None]
    assert {r["rungs"] for r in results if r["scheme"] == "even-odd"} == set(ladder_growth.RUNGS)
    for r in results:
        assert abs(r["rate"]["simulated"] - r["rate"]["formula"]) < 5 * r["rate"]["se"], r


def test_the_page_has_the_stored_numbers():
    page = (ROOT / "docs" / "scaling.md").read_text()
    for table in TABLES.values():
        assert table(stored("scaling")) in page
    assert ladder_growth.table(stored("ladder_growth")) in page
    assert ladder_growth.growth_table(stored("ladder_growth")) in page
    assert step_skew.table(stored("step_skew")) in page
