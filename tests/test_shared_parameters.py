"""Parameters that all replicas share: one and the same in all of them to the last bit, whoever
stands on which rung.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from modules import N_CLASSES, N_DATA, N_FEATURES, batches, same
from torchrex.distributed import ProcessGroup
from torchrex.errors import InvalidArgumentError
from torchrex.network import step as network_step

TEMPERATURES, LRS = (0.5, 0.7, 1.0), (1e-3, 2e-3, 4e-3)
FRICTION, PRECISION, SEED = 0.3, 2.0, 8


class Parts(nn.Module):
    """A part that is shared, with statistics of its own, below one that is not."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.common = nn.Sequential(
            nn.Linear(N_FEATURES, 5, dtype=dtype), nn.BatchNorm1d(5, dtype=dtype), nn.Tanh()
        )
        self.own = nn.Linear(5, N_CLASSES, dtype=dtype)

    def forward(self, x):
        return self.own(self.common(x))


def indifferent(module, batch):
    """An energy of 0, so that every swap test accepts, beside a loss that is descended."""
    loss = F.cross_entropy(module(batch[0]), batch[1], reduction="none")
    return 0.0 * loss, loss.mean()


def make(
    *,
    shared=("common.",),
    sampler=None,
    losses=indifferent,
    model=Parts,
    prior=PRECISION,
    seed=SEED,
    ladder=None,
    **options,
):
    of_ensemble = {
        name: options.pop(name) for name in ("shared_batches", "mesh") if name in options
    }
    energy = tr.PosteriorEnergy.of(losses, n_data=N_DATA, prior=prior and tr.GaussianPrior(prior))
    energy.prior_in_swaps = False  # or it would decide the swaps
    ensemble = tr.ModuleEnsemble(
        model,
        energy,
        tr.SGHMC(FRICTION) if sampler is None else sampler,
        initial="independent",
        shared=shared,
        **of_ensemble,
    )
    return tr.ModuleExchange(
        ensemble, tr.Ladder(TEMPERATURES, LRS) if ladder is None else ladder, seed=seed, **options
    )


def of(run, replica, part="parameters"):
    """A replica's weights (or velocities) by name, those that are shared among them."""
    first, own = (run.ensemble.tensors_of(k)[part] for k in (0, replica))
    return {name: tensor.clone() for name, tensor in {**first, **own}.items()}


def assert_alike(run):
    """What is shared is the same in all replicas to the last bit, statistics included; what is not
    differs."""
    first, *others = [dict(module.state_dict()) for module in run.ensemble.modules]
    for other in others:
        for name in first:
            if name.startswith("common."):
                assert torch.equal(first[name], other[name]), name
            else:
                assert not torch.equal(first[name], other[name]), name


@pytest.mark.parametrize("momentum", ["rescale", "refresh", "keep"])
@pytest.mark.parametrize(
    "sampler", [tr.SGHMC(FRICTION), tr.AdamStart(tr.SGHMC(FRICTION), 20, n_data=N_DATA), tr.SGLD()]
)
def test_they_stay_alike_whatever_happens(sampler, momentum):
    """50 steps with swaps at nearly every one, from the end of the warm start on."""
    warm = sampler.steps if isinstance(sampler, tr.AdamStart) else 0
    run = make(sampler=sampler, momentum=momentum, swap_start=warm)
    assert_alike(run)
    accepted, cold, start = 0, set(), of(run, 0)
    for batch in batches(50 + warm, dtype=torch.float64):
        info = run.step(batch)
        accepted += int(info.accepted.sum())
        cold.add(run.replica_at(0))
        assert_alike(run)
    assert accepted > 30
    assert cold == {0, 1, 2}
    assert float((of(run, 0)["common.0.weight"] - start["common.0.weight"]).norm()) > 0.1, (
        "nothing moved"
    )


class Frozen(Parts):
    """A part of what is shared, made anew for every replica, is not trained."""

    def __init__(self):
        super().__init__()
        self.common[0].weight.requires_grad_(False)


def test_frozen_weights_among_them_are_alike():
    run = make(model=Frozen)
    assert_alike(run)
    before = {name: t.clone() for name, t in run.ensemble.modules[1].state_dict().items()}
    for batch in batches(3, dtype=torch.float64):
        run.step(batch)
    assert_alike(run)
    after = run.ensemble.modules[1].state_dict()
    for name, moves in (("common.0.weight", False), ("common.0.bias", True)):
        assert torch.equal(after[name], before[name]) != moves


def forces(run, batch):
    """Gradients of the summed loss and of the prior of every replica, by copies of the modules."""
    found = []
    for module in map(copy.deepcopy, run.ensemble.modules):
        (N_DATA * F.cross_entropy(module(batch[0]), batch[1])).backward()
        found.append(
            {name: p.grad + PRECISION * p.detach() for name, p in module.named_parameters()}
        )
    return found


def test_one_move_by_hand():
    """Shared: mean force, lr of the coldest rung, no rescaling. Others: as ever. At temperatures
    too low for any noise.

    A swap comes before the move: at many of the steps the replica on the coldest rung has just come
    there."""
    tiny = (1e-24, 2e-24, 3e-24)
    run = make(ladder=tr.Ladder(tiny, LRS))
    scale = [math.sqrt(lr * temperature) for lr, temperature in zip(LRS, tiny, strict=True)]
    arrived = 0
    for batch in batches(12, dtype=torch.float64):
        force = forces(run, batch)
        x, v = ([of(run, k, part) for k in range(3)] for part in ("parameters", "velocity"))
        stood, was_cold = run.state.rung_of[:, 0].tolist(), run.replica_at(0)
        run.step(batch)
        stands = run.state.rung_of[:, 0].tolist()
        arrived += run.replica_at(0) not in (was_cold, 0)
        for k in range(3):
            moved, kicked = of(run, k), of(run, k, "velocity")
            ratio = scale[stands[k]] / scale[stood[k]]
            for name in moved:
                keep = (1 - FRICTION) * v[k][name]
                if name.startswith("common."):
                    expected = keep - LRS[0] * sum(each[name] for each in force) / 3
                else:
                    expected = ratio * keep - LRS[stands[k]] * force[k][name]
                for found, wanted in ((kicked, expected), (moved, x[k][name] + expected)):
                    torch.testing.assert_close(found[name], wanted, rtol=1e-8, atol=1e-10)
    assert arrived >= 2


def test_the_prior_of_what_is_shared_does_not_weigh_in_swaps():
    """It is the same for all: energies differ by the prior of what is a replica's own."""
    run, counted, fresh = make(prior=None), make(), make()
    counted.ensemble.energy.prior_in_swaps = True
    (batch,) = batches(1, dtype=torch.float64)
    difference = (counted.step(batch).energy - run.step(batch).energy)[:, 0]
    own = torch.stack(
        [
            sum(of(fresh, k)[f"own.{name}"].square().sum() for name in ("weight", "bias"))
            for k in fresh.state.replica_at[:, 0].tolist()
        ]
    )
    expected = 0.5 * PRECISION * (own - own[0])
    torch.testing.assert_close(difference - difference[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stop", [1, 7, 12])
def test_stopped_and_resumed_equals_never_stopped(tmp_path, stop):
    def fresh():
        return make(sampler=tr.AdamStart(tr.SGHMC(FRICTION), 8, n_data=N_DATA), swap_start=8)

    data = batches(20, dtype=torch.float64)
    whole, first, second = fresh(), fresh(), fresh()
    assert sum(int(whole.step(batch).accepted.sum()) for batch in data) > 5
    for batch in data[:stop]:
        first.step(batch)
    tr.Checkpoints(tmp_path).save(stop, first.state_dict())
    second.load_state_dict(tr.Checkpoints(tmp_path).load_newest()[1])
    for batch in data[stop:]:
        second.step(batch)
    assert same(whole.state_dict(), second.state_dict())


def test_a_state_brings_the_noise_of_its_seed():
    """On a CPU its generators, on a GPU the keys of counted noise."""
    first, second = make(), make(seed=SEED + 1)
    assert not torch.equal(first.ensemble.common.keys, second.ensemble.common.keys)
    data = batches(3, dtype=torch.float64)
    first.step(data[0])
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.ensemble.common.keys, second.ensemble.common.keys)
    for batch in data[1:]:
        first.step(batch)
        second.step(batch)
    assert same(first.state_dict(), second.state_dict())


def test_a_state_without_sharing_is_refused():
    with pytest.raises(InvalidArgumentError, match="shared"):
        make().load_state_dict(make(shared=()).state_dict())
    assert ", common. shared" in repr(make().ensemble)


# The law of what is not shared

DIM, STIFFNESS = 20_000, 2.0


class Coordinates(nn.Module):
    """So many numbers that move independently of each other, each a chain of its own, and some that
    are shared."""

    def __init__(self):
        super().__init__()
        self.common, self.own = (
            nn.Parameter(torch.zeros(DIM, dtype=torch.float64)) for _ in range(2)
        )


def quadratic(module, batch):
    """The energy STIFFNESS / 2 |own|^2, exactly; it does not depend on what is shared, which
    wanders about."""
    each = 0.5 * STIFFNESS * module.own.square().sum() + 0.0 * module.common.sum()
    return (each / N_DATA).expand(len(batch))


def covariance_of(lr, temperature):
    """Of (x, v) under SGHMC's recursion, by the discrete Lyapunov equation."""
    keep, pull = 1 - FRICTION, lr * STIFFNESS
    transition = np.array([[1 - pull, keep], [-pull, keep]])
    return scipy.linalg.solve_discrete_lyapunov(
        transition, 2 * FRICTION * lr * temperature * np.ones((2, 2))
    )


def stationary(n_steps=10):
    """x and v on each rung after some moves from exact draws, one value per coordinate, with their
    laws and the shared v."""
    lrs, temperatures = (0.15, 0.4), (0.5, 2.0)
    ladder = tr.Ladder(temperatures, lrs)
    run = make(
        model=Coordinates,
        losses=quadratic,
        prior=None,
        shared=("common",),
        ladder=ladder,
        pairing=tr.NoSwaps(),
    )
    laws = [
        covariance_of(lr, temperature) for lr, temperature in zip(lrs, temperatures, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    for replica, law in enumerate(laws):
        drawn = (
            torch.randn(DIM, 2, generator=generator, dtype=torch.float64)
            @ torch.as_tensor(np.linalg.cholesky(law)).T
        )
        tensors = run.ensemble.tensors_of(replica)
        for part, values in zip(("parameters", "velocity"), drawn.unbind(1), strict=True):
            tensors[part]["own"].copy_(values)
    for _ in range(n_steps):
        run.step(torch.zeros(4))
    x, v = ([of(run, k, part)["own"] for k in range(2)] for part in ("parameters", "velocity"))
    return x, v, laws, of(run, 0, "velocity")["common"]


def test_the_law_of_the_others_is_that_of_their_rung():
    """Variances of x and v on both rungs, and replicas that know nothing of each other: 9
    assertions at 5.7e-7 each.

    The shared ones feel no force, so that their velocity is a chain of its own, and shows the cold
    rung's lr and temperature."""
    x, v, laws, common = stationary()
    for rung, law in enumerate(laws):
        assert_mean_is(x[rung].square(), law[0, 0])
        assert_mean_is(v[rung].square(), law[1, 1])
    assert_mean_is(x[0] * x[1], 0.0)
    assert_mean_is(v[0] * v[1], 0.0)
    # From rest: v' = (1 - f) v + sqrt(2 f lr tau) xi, ten times.
    assert_mean_is(
        common.square(),
        sum(2 * FRICTION * 0.15 * 0.5 * (1 - FRICTION) ** (2 * k) for k in range(10)),
    )
    assert_mean_is(common * v[0], 0.0)
    assert_mean_is(common * v[1], 0.0)


def test_mutants_miss_it(monkeypatch):
    """Noise of what is shared that leaks makes replicas follow each other; its lr and temperature
    cool the hot rung."""
    plain = network_step.update_rows

    def leaking(position, state, gradient, numbers, *rest):
        return plain(position, state, gradient, numbers[:1].expand_as(numbers), *rest)

    monkeypatch.setattr("torchrex.network.step.update_rows", leaking)
    _, v, _, _ = stationary()
    assert_mean_is_not(v[0] * v[1], 0.0)

    def cold(*given):
        *rest, exchanged, policy, sampler = given
        coldest = (each[:1].expand_as(each) for each in exchanged if each is not None)
        return plain(*rest, type(exchanged)(*coldest), policy, sampler)

    monkeypatch.setattr("torchrex.network.step.update_rows", cold)
    x, _, laws, _ = stationary()
    assert_mean_is_not(x[1].square(), laws[1][0, 0])
    assert_mean_is(x[0].square(), laws[0][0, 0])


# Bad input


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shared": ("heads",)}, "names no parameter; those of the model are common.0.weight"),
        ({"shared": ("common.", "own.")}, "nothing is left to sample"),
        ({"shared": "common."}, "must be a sequence of .* got 'common.'"),
        ({"shared": ("",)}, "shared must be a sequence"),
        ({"shared": (3,)}, "shared must be a sequence"),
        ({"shared_batches": False}, "on the same minibatches"),
        ({"mesh": tr.ReplicaMesh(3, ProcessGroup(rank=0, size=2))}, "replicas in one process"),
        ({"divergence": "respawn"}, "all of them break with the first"),
    ],
)
def test_bad_input(given, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make(**given)
