"""Counted noise: the published answers, the law of the normals, independence of everything that is
counted, and exact runs.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from modules import batches, flat_energy, linear, make_run, same, with_everything
from torchrex.network import randomness as counted
from torchrex.network.randomness import MASK, keys_of, normals, philox
from torchrex.rng import derive_seed

CPU = torch.device("cpu")


def words(*values):
    return [torch.tensor([value], dtype=torch.int64) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0x00000000, 0x00000000), 0x00000000, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_known_answers_of_random123(counter, key, answer):
    low, high = philox(*words(*counter), *words(key))
    assert (int(low), int(high)) == answer


def test_words_stay_below_two_to_the_32_and_never_repeat():
    """For one key it is a bijection of counters."""
    place = torch.arange(2**18) + 2**32 - 2**17 & MASK
    low, high = philox(place[None], torch.tensor([[0], [1], [7]]), torch.tensor([[123]]))
    for word in (low, high):
        assert int(word.min()) >= 0
        assert int(word.max()) <= MASK
        assert_mean_is(word.double() / 2**32, 0.5)
    # The product wraps, without losing a bit.
    assert len(torch.unique(low * 2**32 + high)) == 3 * 2**18


@pytest.fixture(scope="module")
def numbers():
    """(keys, steps, places): 4 million."""
    keys = keys_of([derive_seed(seed, "move.0") for seed in range(4)], CPU)
    return torch.stack([normals(keys, torch.tensor(step), 100_000) for step in range(10)], dim=1)


def test_moments_and_tails_of_the_normals(numbers):
    assert numbers.dtype == torch.float32
    assert bool(numbers.isfinite().all())
    x = numbers.double()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert_mean_is(x**power, moment)
    assert_mean_is_not((1.005 * x).square(), 1.0)  # such an error would show
    for sigmas, outside in ((1.0, 0.317310508), (2.0, 0.045500264), (4.0, 6.334248e-5)):
        assert_mean_is((numbers.abs() > sigmas).double(), outside)
        assert_mean_is((numbers > sigmas).double(), outside / 2)
    assert 4.7 < float(numbers.abs().max()) < 6.7


@pytest.mark.parametrize("axis", ["keys", "steps", "places"])
def test_nothing_is_correlated(numbers, axis):
    """Neither the numbers nor their sizes, between neighbours along any axis."""
    along = ("keys", "steps", "places").index(axis)
    n = numbers.shape[along]
    for distance in (1, 2, 3):
        a, b = (numbers.narrow(along, start, n - distance).double() for start in (0, distance))
        # Neighbouring products share a factor but are uncorrelated, so their standard error is the
        # plain one.
        assert_mean_is(a * b, 0.0)
        assert_mean_is((a.square() - 1.0) * (b.square() - 1.0), 0.0)


def test_the_edges_of_the_words_give_finite_numbers(monkeypatch):
    """Words of all zeros and all ones: the logarithm sees neither 0 nor more than 1."""
    edges = torch.tensor([0, 1, MASK - 1, MASK])
    grid = torch.meshgrid(edges, edges, indexing="ij")
    monkeypatch.setattr(counted, "philox", lambda *_: tuple(word.flatten()[None] for word in grid))
    found = counted.normals(keys_of([1], CPU), torch.tensor(0), 16)
    assert bool(found.isfinite().all())
    assert float(found.abs().max()) == pytest.approx(6.6604, abs=1e-3)


def test_the_numbers_do_not_depend_on_how_many_are_asked_for():
    keys = keys_of([5, 2**62 + 3], CPU)
    assert torch.equal(
        normals(keys, torch.tensor(9), 100)[:, :40], normals(keys, torch.tensor(9), 40)
    )
    assert torch.equal(
        normals(keys, torch.tensor(9), 40)[1:], normals(keys[1:], torch.tensor(9), 40)
    )
    assert torch.equal(
        normals(keys, torch.tensor(2**32 - 1), 4), normals(keys, torch.tensor(2**32 - 1), 4)
    )


def test_all_bits_of_a_seed_count():
    base = 2**61 + 2**33 + 5
    first = normals(keys_of([base], CPU), torch.tensor(0), 50)
    for bit in (0, 31, 32, 45, 62):
        assert not torch.equal(
            normals(keys_of([base ^ (1 << bit)], CPU), torch.tensor(0), 50), first
        ), bit


# In a run


def counted_run(model=linear, energy=None, **options):
    run = make_run(model, energy, **options)
    run._network = dataclasses.replace(run._network, counted_noise=True)
    return run


def test_the_move_uses_the_numbers_of_the_step():
    """Without force x' = x + sqrt(2 lr tau) times the normals of (replica, step)."""
    ladder = tr.Ladder((0.5, 1.0), (1e-2, 1e-2))
    run = counted_run(linear, flat_energy(), ladder=ladder, seed=3)
    keys = keys_of([derive_seed(3, f"move.{k}") for k in range(2)], CPU)
    for step, batch in enumerate(batches(5)):
        before = run.ensemble.position.clone()
        info = run.step(batch)
        # Of the rung each replica stands on.
        temperature = torch.tensor(ladder.temperatures)[info.replica_at[:, 0].argsort()]
        expected = before + (2e-2 * temperature).sqrt()[:, None] * normals(
            keys, torch.tensor(step), run.ensemble.layout.size
        )
        assert torch.allclose(run.ensemble.position, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("momentum", ["rescale", "refresh"])
def test_a_run_with_counted_noise_resumes_exactly(momentum):
    """A state carries its seed, so a run made with any seed goes on as the one that was saved."""

    def make(seed):
        options = {"momentum": momentum, "correction_factor": float("inf"), "seed": seed}
        return counted_run(with_everything, sampler=tr.SGHMC(0.1), **options)

    data, reference, states, infos = batches(20), make(2), [], []
    for batch in data:
        states.append(reference.state_dict())
        infos.append(reference.step(batch))
    assert any(bool(info.accepted.any()) for info in infos)
    assert not [name for name in reference.streams.state_dict() if name[:4] in ("move", "refr")]
    for k in (1, 13):
        resumed = make(3)
        resumed.load_state_dict(states[k])
        assert same([resumed.step(batch) for batch in data[k:]], infos[k:])
        assert same(resumed.state_dict(), reference.state_dict())
    keys = reference.ensemble.rows.keys  # refreshed momenta are not the noise of the move
    move, refresh = (normals(each, torch.tensor(3), 50) for each in (keys, keys ^ MASK))
    assert not bool((move == refresh).any())
