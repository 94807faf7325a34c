"""Replicas of a user's module: how they begin, what belongs to whom, what a step does to them, and
going on exactly.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchrex as tr
from assertions import assert_mean_is
from modules import (
    N_CLASSES,
    N_DATA,
    N_FEATURES,
    batches,
    buffers_of,
    classes,
    cross_entropy,
    flat_energy,
    joined,
    linear,
    make_run,
    mlp,
    same,
    stacked,
    weights_of,
    with_dropout,
    with_everything,
)
from torchrex.errors import InvalidArgumentError, NoiseError, TargetError
from torchrex.rng import Streams

INF = float("inf")
THREE = tr.Ladder((0.5, 0.7, 1.0), (1e-3, 2e-3, 4e-3))


def losses_of(module, batch):
    """Per-example losses of a copy, so that nothing of the module changes."""
    losses = F.cross_entropy(copy.deepcopy(module)(batch[0]), batch[1], reduction="none")
    return losses.detach().double()


# Beginning


@pytest.mark.parametrize("initial", ["identical", "independent"])
def test_the_seed_alone_decides_the_initial_weights(initial):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make_run(mlp, initial=initial, seed=5).ensemble.position.clone()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    torch.rand(7)
    assert torch.equal(make_run(mlp, initial=initial, seed=5).ensemble.position, first)
    assert not torch.equal(make_run(mlp, initial=initial, seed=6).ensemble.position, first)
    assert torch.equal(first[0], first[1]) == (initial == "identical")
    assert float(first.std()) > 0.1


def test_a_module_is_copied_and_stays_as_it_was():
    """The one that is given, the replicas', and a copy of one of them."""
    mine = with_everything()
    before = copy.deepcopy(mine.state_dict())
    run = make_run(mine, ladder=THREE)
    modules = run.ensemble.modules
    every = (mine, *modules, run.module_at(1))
    pointers = [t.data_ptr() for m in every for t in (*m.parameters(), *m.buffers())]
    assert len(set(pointers)) == len(pointers)
    assert all(same(dict(module.state_dict()), dict(before)) for module in every)
    assert not any(part.training for part in every[-1].modules())
    with torch.no_grad():
        modules[1][0].weight.fill_(7.0)
    assert int((run.ensemble.position == 7.0).sum()) == 6 * N_FEATURES, "no views of the rows"
    for batch in batches(3):
        run.step(batch)
    for unchanged in (mine, every[-1]):
        assert same(dict(unchanged.state_dict()), dict(before))
    assert not same(dict(run.module_at().state_dict()), dict(before))


def test_a_module_stays_in_its_mode():
    still = with_everything().eval()
    still[3].train()
    run = make_run(still)
    run.step(classes(8))
    assert [part.training for part in run.live_module_at()] == [False, False, False, True, False]
    assert int(run.module_at()[1].num_batches_tracked) == 0
    run.predict(classes(8))
    assert [part.training for part in run.live_module_at()] == [False, False, False, True, False]


def test_bfloat16_is_for_the_forward_pass_only():
    batch = classes(8)
    ensemble = tr.ModuleEnsemble(mlp, cross_entropy(), autocast=torch.bfloat16)
    run, single = tr.ModuleExchange(ensemble, THREE, seed=4), make_run(mlp, ladder=THREE, seed=4)
    a, b = run.step(batch).energy, single.step(batch).energy
    assert run.ensemble.position.dtype == torch.float32
    assert run.predict(batch).dtype == torch.float32
    assert not torch.equal(a, b)
    assert torch.allclose(a, b, rtol=0.02)


# What is refused


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = linear(), nn.Linear(3, N_CLASSES, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Mixed, r"body\.bias is float32, head\.bias is float64.*model\.float\(\)"),
        (lambda: linear().bfloat16(), "got torch.bfloat16"),
        (nn.Tanh, "Tanh has no parameters"),
        (lambda: linear().requires_grad_(False), "no parameter that requires a gradient"),
        (lambda: nn.LazyLinear(N_CLASSES), "weight has no shape yet: run one batch"),
    ],
)
def test_modules_that_cannot_be_sampled(model, words):
    for given in (model, model()):
        with pytest.raises(TargetError, match=words):
            make_run(given)


def test_replicas_must_be_alike():
    sizes, biases = iter((3, 4)), iter((True, False))
    with pytest.raises(TargetError, match="different sizes, in weight"):
        make_run(lambda: nn.Linear(N_FEATURES, next(sizes)), initial="independent")
    with pytest.raises(TargetError, match="different parameters"):
        make_run(lambda: nn.Linear(N_FEATURES, N_CLASSES, bias=next(biases)), initial="independent")


def test_bad_arguments():
    energy = cross_entropy()
    for arguments, options, words in (
        (("resnet", energy), {}, "model must be an nn.Module or a function"),
        ((linear, F.cross_entropy), {}, r"energy must be PosteriorEnergy\(loss, n_data="),
        ((linear, energy, "sghmc"), {}, r"SGHMC\(0\.1\), got 'sghmc'"),
        ((linear, energy), {"initial": "random"}, "identical or independent, got 'random'"),
        ((linear(), energy), {"initial": "independent"}, "need a function"),
        ((linear, energy), {"autocast": torch.float16}, "float16 overflows"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            tr.ModuleEnsemble(*arguments, **options)
    with pytest.raises(InvalidArgumentError, match=r"must make an nn\.Module, but made int"):
        make_run(lambda: 3)
    with pytest.raises(InvalidArgumentError, match="compiled=True"):
        make_run(compiled=True)


def test_all_pairs_in_turn_need_fresh_energies():
    with pytest.raises(InvalidArgumentError, match="AllInTurn"):
        make_run(ladder=THREE, pairing=tr.AllInTurn())
    assert make_run(pairing=tr.AllInTurn()).step(classes(8)).accepted.shape == (1, 1)


def test_steps_need_batches():
    run = make_run()
    for attempt, words in (
        (run.step, r"run\.step\(\(x, y\)\)"),
        (lambda: list(run.advance(3)), r"run\.advance\(n_steps, loader\)"),
        (lambda: list(run.advance(-1, batches(1))), "got -1"),
        (lambda: list(run.advance(3, iter(batches(2)))), "can be used once only"),
        (lambda: run.module_at(2), "between 0 and 1, got 2"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            attempt()
    assert list(run.advance(0, batches(1))) == []


# Which parameters


class Frozen(nn.Module):
    """Random features that are not trained, and a head that is."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(N_FEATURES, 6).requires_grad_(False)
        self.head = nn.Linear(6, N_CLASSES)

    def forward(self, x):
        return self.head(self.features(x).tanh())


def test_frozen_parameters_never_change_and_belong_to_the_state():
    energy, options = cross_entropy(prior=tr.GaussianPrior(10.0)), {"correction_factor": INF}
    run, resumed = (
        make_run(Frozen, energy, THREE, sampler=tr.SGHMC(0.1), seed=seed, **options)
        for seed in (1, 2)
    )
    assert run.ensemble.layout.size == 7 * N_CLASSES
    before = [weights_of(run, replica) for replica in range(3)]
    for batch in batches(10):
        run.step(batch)
    for replica in range(3):
        for name, after in weights_of(run, replica).items():
            assert torch.equal(after, before[replica][name]) == name.startswith("features")
    assert not any(p.requires_grad for p in run.module_at().features.parameters())
    resumed.load_state_dict(run.state_dict())
    assert same(resumed.step(classes(8)), run.step(classes(8)))


class Tied(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.encode = nn.Linear(N_FEATURES, N_FEATURES, bias=False, dtype=dtype)
        self.decode = nn.Linear(N_FEATURES, N_FEATURES, dtype=dtype)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x).tanh())


def test_tied_weights_stay_tied_and_count_once():
    model = Tied()
    reference = copy.deepcopy(model)
    run = make_run(model, cross_entropy(prior=tr.GaussianPrior(3.0)), tr.Ladder.descent(1e-2))
    assert run.ensemble.layout.size == N_FEATURES**2 + N_FEATURES
    for x, y in batches(5, dtype=torch.float64):
        prior = 1.5 * sum(p.square().sum() for p in reference.parameters())
        energy = N_DATA / 8 * F.cross_entropy(reference(x), y, reduction="sum") + prior
        gradients = torch.autograd.grad(energy, list(reference.parameters()))
        torch.testing.assert_close(run.step((x, y)).energy[0, 0], energy, rtol=1e-12, atol=0)
        with torch.no_grad():
            for p, g in zip(reference.parameters(), gradients, strict=True):
                p -= 1e-2 * g
        mine = run.module_at()
        assert mine.encode.weight is mine.decode.weight
        for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = linear(torch.float64), nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, x):
        return self.used(x)


def test_parameters_that_the_forward_pass_does_not_use():
    """The data do not move them; a prior and the noise do."""
    batch = classes(8, dtype=torch.float64)
    still = make_run(Unused, ladder=tr.Ladder.descent(0.1))
    before = still.module_at().unused.weight.detach().clone()
    still.step(batch)
    assert torch.equal(still.module_at().unused.weight, before)
    shrinking = make_run(Unused, cross_entropy(prior=tr.GaussianPrior(2.0)), tr.Ladder.descent(0.1))
    shrinking.step(batch)
    assert torch.allclose(shrinking.module_at().unused.weight, 0.8 * before)
    hot = make_run(Unused)
    hot.step(batch)
    assert bool((hot.module_at().unused.weight != before).all())


# The law of a move


class Numbers(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(n))

    def forward(self, batch):
        return 0.0 * self.x.sum() * batch[:, :1]


@pytest.mark.parametrize("friction", [1.0, 0.3])
def test_the_law_of_the_discrete_chain(friction):
    """A Gaussian prior alone: 20,000 independent numbers on three rungs that never swap.

    SGLD is SGHMC with friction 1. The law of (x, v) solves the discrete Lyapunov equation."""
    lrs, temperatures = (0.05, 0.1, 0.15), (0.5, 1.0, 2.0)
    energy = tr.PosteriorEnergy(lambda output: output[:, 0], n_data=5, prior=tr.GaussianPrior(4.0))
    run = make_run(
        lambda: Numbers(20_000), energy, tr.Ladder(temperatures, lrs), seed=11,
        sampler=tr.SGLD() if friction == 1.0 else tr.SGHMC(friction), noise=tr.KnownVariance(1e9),
    )  # fmt: skip
    for info in run.advance(150, [torch.ones(2, 1)]):
        assert not info.accepted.any()
    for rung, (lr, temperature) in enumerate(zip(lrs, temperatures, strict=True)):
        turn = np.array([[1 - 4 * lr, 1 - friction], [-4 * lr, 1 - friction]])
        kick = 2.0 * friction * lr * temperature * np.ones((2, 2))
        expected = scipy.linalg.solve_discrete_lyapunov(turn, kick)[0, 0]
        assert_mean_is(run.ensemble.position[rung].square(), expected)
    if friction == 1.0:  # tau / (a (1 - lr a / 2))
        assert expected == pytest.approx(2.0 / (4.0 * (1.0 - 0.3)), rel=1e-6)


# What a step says


@pytest.mark.parametrize("pairing", [tr.EvenOdd(), tr.RandomPair()])
def test_energies_are_those_of_the_rungs_before_the_swaps(pairing):
    prior, free = tr.GaussianPrior(0.5, groups={"bias": 2.0}), {"correction_factor": INF}
    run = make_run(
        mlp, cross_entropy(prior=prior), THREE, initial="independent", pairing=pairing, **free
    )
    orders, modules = set(), run.ensemble.modules
    for batch in batches(60):
        stood = run.state.replica_at[:, 0].tolist()
        expected = []
        for replica in stood:
            weights = sum(
                p.detach().double().square().sum() * (1.0 if "bias" in n else 0.25)
                for n, p in modules[replica].named_parameters()
            )
            expected.append(N_DATA / 8 * losses_of(modules[replica], batch).sum() + weights)
        info = run.step(batch)
        assert torch.allclose(info.energy[:, 0], torch.stack(expected), rtol=1e-6)
        stands = info.replica_at[:, 0].tolist()
        for pair in range(2):
            swapped = stands[pair : pair + 2] == stood[pair : pair + 2][::-1]
            assert bool(info.accepted[pair, 0]) == swapped
        assert [run.replica_at(rung) for rung in range(3)] == stands
        assert all(run.live_module_at(rung) is modules[stands[rung]] for rung in range(3))
        orders.add(tuple(stands))
    assert orders & {(1, 2, 0), (2, 0, 1)}, "no proper permutation"
    assert info.energy.dtype == torch.float64


def test_the_lr_is_that_of_the_rung():
    """A force of 1 everywhere, no noise to speak of, energies that always swap."""

    def unit_force(module, batch):
        forces = [(p - p.detach()).sum() for p in module.parameters()]
        return torch.stack(forces).sum().expand(len(batch[0]))

    lrs, orders = torch.tensor((0.1, 0.2, 0.4)), set()
    energy = tr.PosteriorEnergy.of(unit_force, n_data=8)
    run = make_run(linear, energy, tr.Ladder((1e-24, 2e-24, 3e-24), lrs.tolist()))
    for batch in batches(6):
        before = run.ensemble.position.clone()
        rung_of = run.step(batch).replica_at[:, 0].argsort()
        moved = before - run.ensemble.position
        assert torch.allclose(moved, 8.0 * lrs[rung_of][:, None].expand_as(before))
        orders.add(tuple(rung_of.tolist()))
    assert len(orders) == 6


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("replacement", [True, False])
def test_the_free_variance_is_that_of_the_losses(paired, replacement):
    """N^2 / n times half the variance of the difference, or the mean of the variances; times
    1 - n / N where the examples of an epoch are drawn without replacement."""
    run = make_run(
        mlp,
        ladder=THREE,
        initial="independent",
        replacement=replacement,
        noise=tr.Smoothing(0.3, tr.PerExample(paired)),
        correction_factor=INF,
    )
    scale = N_DATA**2 / 8 * (1.0 if replacement else 1 - 8 / N_DATA)
    smoothed = None
    for k, batch in enumerate(batches(30)):
        cold_to_hot = [losses_of(run.live_module_at(rung), batch) for rung in range(3)]
        sample = torch.stack(
            [
                scale * (0.5 * (a - b).var() if paired else 0.5 * (a.var() + b.var()))
                for a, b in pairwise(cold_to_hot)
            ]
        )
        smoothed = sample if k == 0 else 0.7 * smoothed + 0.3 * sample
        info = run.step(batch)
        assert torch.allclose(info.noise_variance[:, 0], smoothed, rtol=1e-5)
    assert (run.state.noise_updates == 30).all()
    assert info.replica_at[:, 0].tolist() != [0, 1, 2]


def test_swaps_are_decided_by_the_corrected_energies():
    """At temperatures near 0 the test is a comparison with gap * variance / F."""
    for factor in (INF, 1e12):
        run = make_run(
            mlp, ladder=tr.Ladder((1e-9, 1.0), (1e-4, 1e-2)), initial="independent", seed=4,
            noise=tr.KnownVariance(4.0), correction_factor=factor,
        )  # fmt: skip
        infos = [run.step(batch) for batch in batches(40)]
        needed = torch.tensor((1e9 - 1.0) * 4.0 / factor, dtype=torch.float64)
        for info in infos:
            torch.testing.assert_close(info.correction[0, 0], needed)
            assert bool(info.accepted[0, 0]) == bool(-info.energy.diff(dim=0)[0, 0] > needed)
        assert 0 < sum(int(info.accepted[0, 0]) for info in infos) < 40


# Randomness in the forward pass


def two_ways(make):
    """The same steps in a quiet process and in one that draws numbers all the time."""
    data = batches(6)
    torch.manual_seed(0)
    quiet = make()
    infos = [quiet.step(batch) for batch in data]
    torch.manual_seed(99)
    busy = make()
    for batch, info in zip(data, infos, strict=True):
        torch.randn(3)
        before = torch.get_rng_state()
        assert same(busy.step(batch), info)
        assert torch.equal(torch.get_rng_state(), before)
    assert same(busy.state_dict(), quiet.state_dict())
    return infos


class DropsLater(nn.Module):
    """Dropout that begins after some calls, as with a schedule of its rate."""

    def __init__(self):
        super().__init__()
        self.body, self.calls = linear(), 0

    def forward(self, x):
        self.calls += 1
        return self.body(F.dropout(x, 0.5 if self.calls > 3 else 0.0))


@pytest.mark.parametrize("model", [with_dropout, mlp, DropsLater])
def test_dropout_is_decided_by_the_seed_of_the_run(model):
    infos = two_ways(lambda: make_run(model, seed=3))
    if model is with_dropout:
        assert float(infos[0].energy.diff(dim=0)) != 0, "both replicas got the same mask"
        other = make_run(with_dropout(), seed=4, ladder=tr.Ladder((1e-12, 2e-12), 1e-12))
        again = make_run(copy.deepcopy(other.ensemble.modules[0]), seed=5)
        energy = other.step(classes(8)).energy
        assert not torch.equal(energy, again.step(classes(8)).energy)
        assert not torch.equal(energy, other.step(classes(8)).energy)  # nothing moved but the mask


def test_a_module_put_into_training_mode_later():
    data, quiet = batches(4), with_dropout().eval()

    def go(global_seed):
        torch.manual_seed(global_seed)
        run = make_run(quiet, seed=3)
        run.step(data[0])
        for module in run.ensemble.modules:
            module.train()
        with pytest.warns(UserWarning, match="every replica is in training mode"):
            run.step(data[1])
        return [run.step(batch) for batch in data[2:]]

    assert same(go(1), go(2))


# Batches


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x, z):
        return self.first(x) - self.second(z)


def test_several_inputs_and_dicts_give_the_same_steps():
    def make():
        return make_run(TwoInputs, seed=1)

    pairs, keyed = make(), make()
    for (x, y), (z, _) in zip(batches(4), batches(4, seed=1), strict=True):
        info = pairs.step((x, z, y))
        assert same(keyed.step({"target": y, "z": z, "x": x}), info)
        assert torch.equal(pairs.predict((x, z, y)), keyed.predict({"x": x, "z": z, "target": y}))
        assert torch.equal(pairs.predict((x, z, y)), pairs.module_at()(x, z))


@pytest.mark.filterwarnings("ignore:var")
def test_a_batch_of_one_example_does_not_end_the_swaps():
    """The last batch of 33 examples in batches of 8 that are kept has one."""
    loader = tr.DeviceLoader(classes(33), 8, last="keep")
    run = make_run(linear, cross_entropy(33), correction_factor=INF)
    info = joined(list(run.advance(40, loader)))
    assert bool(info.noise_variance.isfinite().all())
    assert bool(info.accepted[20:].any())


def test_a_loader_of_single_examples_is_refused_before_anything_moves():
    loader = tr.DeviceLoader(classes(), 1)
    for noise in (None, tr.Smoothing(0.3, tr.PerExample(paired=False))):
        run = make_run(noise=noise)
        with pytest.raises(NoiseError, match="got batch_size=1"):
            list(run.advance(3, loader))
        assert run.n_steps == 0
    list(make_run(noise=tr.RunningMean(tr.RepeatedDraws(3, every=2))).advance(3, loader))


def test_independent_minibatches_are_taken_in_turn_from_a_loader():
    by_hand, loaded = (make_run(ladder=THREE, shared_batches=False, seed=2) for _ in range(2))
    a, b = (tr.DeviceLoader(classes(), 8, seed=1, last="wrap") for _ in range(2))
    infos = [by_hand.step([a.next() for _ in range(3)]) for _ in range(5)]
    assert same(joined(list(loaded.advance(5, b))), stacked(infos))


@pytest.mark.parametrize(
    ("sizes", "noise", "shared", "warned"),
    [
        ((1, 1, 1, 1), None, True, True),
        ((1, 1), tr.RunningMean(tr.PerExample(paired=False)), False, True),
        ((1, 8, 1, 1), None, True, False),
        ((8, 1, 1, 1), None, True, False),
        ((1, 1, 1), tr.KnownVariance(1.0), True, False),
    ],
)
def test_a_loop_over_single_examples_is_warned_once(sizes, noise, shared, warned, caplog):
    """One alone is the rest of an epoch, with which a resumed loop may begin."""
    run = make_run(noise=noise, shared_batches=shared)
    for size in sizes:
        batch = classes(size)
        run.step(batch if shared else [batch, batch])
    assert caplog.text.count("batches of at least 2 examples") == warned


def test_batch_norm_on_one_example_says_what_to_do():
    """In the middle of a run, at its beginning and in a measurement; torch's error is the cause."""
    noise = tr.RunningMean(tr.RepeatedDraws(2))
    runs = [make_run(with_everything, noise=noise) for _ in range(3)]
    runs[0].step(classes(8))
    measure = lambda one: runs[2].measure([one, one])  # noqa: E731
    for run, act in zip(runs, [runs[0].step, runs[1].step, measure], strict=True):
        steps = run.n_steps
        with pytest.raises(TargetError, match=r"BatchNorm.*drop_last=True") as caught:
            act(classes(1))
        assert type(caught.value.__cause__) is ValueError
        assert run.n_steps == steps

    def fails(output, target):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):  # any other error stays as it is
        make_run(energy=tr.PosteriorEnergy(fails, n_data=N_DATA)).step(classes(8))


def test_independent_minibatches():
    """Every replica its own batch, whichever its rung."""
    options = {"shared_batches": False, "replacement": True, "correction_factor": INF}
    run = make_run(mlp, ladder=THREE, initial="independent", **options)
    assert run.rules.noise == tr.BatchVariance(tr.PerExample(paired=False))
    for k in range(30):
        three = batches(3, seed=k)
        stood = run.state.replica_at[:, 0].tolist()
        losses = [losses_of(run.ensemble.modules[r], three[r]) for r in stood]
        info = run.step(three)
        expected = torch.stack([N_DATA / 8 * values.sum() for values in losses])
        assert torch.allclose(info.energy[:, 0], expected, rtol=1e-6)
        if k == 0:
            variance = torch.stack([N_DATA**2 / 8 * values.var() for values in losses])
            expected = 0.5 * (variance[:-1] + variance[1:])
            assert torch.allclose(info.noise_variance[:, 0], expected, rtol=1e-5)
    assert info.replica_at[:, 0].tolist() != [0, 1, 2]


def test_paired_noise_needs_a_shared_minibatch():
    for noise in (tr.PairedVariance(), tr.RunningMean(tr.PerExample(paired=True))):
        with pytest.raises(NoiseError, match=r"gives each its own; use PerExample\(paired=False\)"):
            make_run(shared_batches=False, noise=noise)
    with pytest.raises(InvalidArgumentError, match="a list of 3 batches, one for each replica"):
        make_run(ladder=THREE, shared_batches=False).step(classes(8))


# Loaders


def test_a_loop_over_a_loader_is_the_same_as_advance():
    stepped, advanced, in_pieces = (
        make_run(with_everything, sampler=tr.SGHMC(0.1), seed=6) for _ in range(3)
    )
    first, second, third = (tr.DeviceLoader(classes(), 8, seed=1) for _ in range(3))
    infos = [stepped.step(batch) for _ in range(56) for batch in first]
    blocks = list(advanced.advance(280, second))
    assert [len(info.energy) for info in blocks] == [256, 24]
    assert same(joined(blocks), stacked(infos))
    pieces = [block for n in (3, 1, 271, 5) for block in in_pieces.advance(n, third)]
    assert same(joined(pieces), stacked(infos))
    assert same(advanced.state_dict(), stepped.state_dict())
    assert same(in_pieces.state_dict(), stepped.state_dict())


def test_a_torch_data_loader_goes_on_where_it_was_and_begins_anew_when_it_ends():
    x, y = classes()
    data = DataLoader(TensorDataset(x, y), batch_size=9)  # the last batch has 4
    loaded, by_hand = make_run(seed=3), make_run(seed=3)
    infos = [by_hand.step((x[k : k + 9], y[k : k + 9])) for k in (0, 9, 18, 27, 36, 0, 9)]
    pieces = [block for n in (2, 4, 1) for block in loaded.advance(n, data)]
    assert same(joined(pieces), stacked(infos))
    other = batches(2, seed=1)
    assert same(next(loaded.advance(1, other)), stacked([by_hand.step(other[0])]))


class FailsOnce(list):
    """Batches, one of which cannot be read at the first try: a full disk, a worker that died,
    Ctrl-C."""

    tried = False

    def __iter__(self):
        for k, batch in enumerate(super().__iter__()):
            if k == 2 and not self.tried:
                self.tried = True
                raise OSError("cannot read")
            yield batch


def test_a_run_goes_on_after_its_data_failed():
    run, data = make_run(), FailsOnce(batches(4))
    with pytest.raises(OSError, match="cannot read"):
        list(run.advance(4, data))
    assert run.n_steps == 2
    list(run.advance(4, data))
    assert run.n_steps == 6


def test_data_of_another_size_are_warned_of_once():
    x, y = classes(N_DATA - 1)
    for data in (tr.DeviceLoader((x, y), 8), DataLoader(TensorDataset(x, y), batch_size=8)):
        run = make_run()
        with pytest.warns(UserWarning, match="n_data=40 .*pass n_data=39") as caught:
            assert len([*run.advance(2, data), *run.advance(2, data)]) == 2
        (warning,) = caught
        assert warning.filename == __file__, "it points at the library, not at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(make_run().advance(2, tr.DeviceLoader(classes(), 8)))


# Buffers


def test_batch_statistics_belong_to_the_replica_and_travel_with_it():
    """A copy of each replica sees the same batches: the same statistics, whatever its rung."""
    run = measured_run()
    orders, modules = set(), run.ensemble.modules
    for batch in batches(30):
        shadows = [copy.deepcopy(module)[:2] for module in modules]
        for shadow in shadows:
            shadow(batch[0])
        orders.add(tuple(run.step(batch).replica_at[:, 0].tolist()))
        for module, shadow in zip(modules, shadows, strict=True):
            assert same(dict(module[1].named_buffers()), dict(shadow[1].named_buffers()))
    assert len(orders) > 2
    seen = [int(module[1].num_batches_tracked) for module in modules]
    assert seen == [30, 30, 30], "a trial batch left its traces"
    assert not torch.equal(modules[0][1].running_mean, modules[1][1].running_mean)


def test_predictions_use_the_statistics_and_leave_everything_alone():
    run = measured_run()
    data = iter(batches(60))
    while run.replica_at(0) in (0, run.replica_at(1)) or run.n_steps < 10:
        run.step(next(data))
    batch = classes(8, seed=77)
    state, generator = run.state_dict(), torch.get_rng_state()
    for rung in range(3):
        expected = copy.deepcopy(run.ensemble.modules[run.replica_at(rung)]).eval()(batch[0])
        predicted = run.predict(batch, rung)
        assert torch.equal(predicted, expected)
        assert not predicted.requires_grad
    with pytest.raises(RuntimeError):
        run.predict((torch.zeros(2, 99), torch.zeros(2)))
    assert not torch.equal(run.predict(batch, 0), run.predict(batch, 1))
    assert same(run.state_dict(), state)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(part.training for module in run.ensemble.modules for part in module.modules())


# Looking never changes a run


class Counting(nn.Module):
    """Counts its calls in a buffer, in every mode, and keeps what it computed last."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(N_FEATURES, N_CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.last = self.inner(x)
        return self.last


def look(run, rung=0):
    module = run.module_at(rung)
    module.eval()
    module(classes(16)[0])
    module.train()(classes(16)[0])
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()


@pytest.mark.parametrize("model", [with_everything, Counting])
@pytest.mark.parametrize("through", ["step", "advance"])
def test_looking_at_a_module_changes_nothing(model, through):
    """The mutant hands out the live module: evaluation mode then stays, and num_batches_tracked is
    20/40/60 in place of 60."""
    looked_at, alone = (
        make_run(model, ladder=THREE, sampler=tr.SGHMC(0.1), seed=2) for _ in range(2)
    )
    data = batches(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in range(0, 60, 20):
            for run in (looked_at, alone):
                for batch in data[first : first + 20]:
                    run.step(batch) if through == "step" else list(run.advance(1, [batch]))
            for rung in range(3):
                look(looked_at, rung)
                looked_at.predict(classes(4), rung)
    assert same(looked_at.state_dict(), alone.state_dict())
    count = "calls" if model is Counting else "1.num_batches_tracked"
    assert [int(buffers_of(looked_at, replica)[count]) for replica in range(3)] == [60] * 3
    assert all(part.training for module in looked_at.ensemble.modules for part in module.modules())


@pytest.mark.parametrize("through", ["step", "advance", "measure"])
def test_a_mode_that_somebody_changed_is_an_error_until_it_is_put_back(through):
    noise = tr.RunningMean(tr.RepeatedDraws(2, every=100))
    run, data = make_run(with_everything, noise=noise, ladder=THREE), batches(3)
    run.step(data[0])
    verb = {
        "step": lambda: run.step(data[1]),
        "advance": lambda: list(run.advance(2, data)),
        "measure": lambda: run.measure(data[:2]),
    }[through]
    replica, before = run.replica_at(1), run.state_dict()
    run.live_module_at(1)[1].eval()
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=rf"BatchNorm1d\) of replica {replica} "):
            verb()
        assert same(run.state_dict(), before)
        run.load_state_dict(before)
    run.live_module_at(1)[1].train()
    verb()


def test_buffers_that_somebody_changed_are_noticed_once():
    run = make_run(with_everything, ladder=THREE)
    run.step(classes(8))
    replica = run.replica_at(2)
    run.live_module_at(2)(classes(8)[0])  # in training mode
    with pytest.warns(UserWarning, match=f"buffer of replica {replica} "):
        run.step(classes(8))
    run.live_module_at(2)[1].running_mean = torch.zeros(6)  # another tensor in its place
    with pytest.warns(UserWarning, match=f"buffer of replica {replica} "):
        list(run.advance(1, [classes(8)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(classes(8))


def test_what_the_run_itself_does_to_its_buffers_is_no_news():
    """Loading, respawning, measuring, a step that fails, modules that change their own modes."""

    class Switching(nn.Sequential):
        def forward(self, x):
            self[1].eval()
            return super().forward(x)

    data = batches(4)
    noise = tr.RunningMean(tr.RepeatedDraws(2, every=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (with_everything, lambda: Switching(*with_everything())):
            run = make_run(model, ladder=THREE, noise=noise, divergence="respawn")
            list(run.advance(5, data))
            run.measure(data[:2])
            state = run.state_dict()
            list(run.advance(2, data))
            run.load_state_dict(state)
            with pytest.raises(RuntimeError):
                run.step((torch.zeros(8, 99), classes(8)[1]))
            with torch.no_grad():
                run.ensemble.modules[1][0].weight.fill_(float("nan"))
            list(run.advance(3, data))
            assert run.respawns
            run.step(data[0])


# Repeated draws


@pytest.mark.parametrize("paired", [False, True])
def test_repeated_draws_measure_the_variance_of_energies(paired):
    noise = tr.RunningMean(tr.RepeatedDraws(5, every=1000, paired=paired))
    run = make_run(mlp, ladder=THREE, initial="independent", noise=noise, correction_factor=INF)
    data = iter(batches(200))
    while run.state.replica_at[:, 0].tolist() not in ([1, 2, 0], [2, 0, 1]):
        run.step(next(data))  # until rungs and replicas are told apart
    draws, modules = batches(5, seed=9), [run.live_module_at(rung) for rung in range(3)]
    sums = [[N_DATA / 8 * losses_of(module, b).sum() for b in draws] for module in modules]
    energies = torch.tensor(sums, dtype=torch.float64)
    variance, difference = energies.var(1), (energies[:-1] - energies[1:]).var(1)
    expected = 0.5 * (difference if paired else variance[:-1] + variance[1:])
    run.measure(draws)
    assert torch.allclose(run.state.noise_variance[:, 0], expected, rtol=1e-5)
    assert (run.state.noise_updates == 1.0).all()


def measured_run(**options):
    """Three rungs with everything that could be disturbed."""
    options = {"initial": "independent", "correction_factor": INF, "seed": 1, **options}
    return make_run(with_everything, ladder=THREE, **options)


def test_measuring_leaves_weights_momenta_and_buffers_alone():
    run = measured_run(sampler=tr.SGHMC(0.1), noise=tr.RunningMean(tr.RepeatedDraws(3, every=1000)))
    for batch in batches(4):
        run.step(batch)
    before, generator = run.state_dict(), torch.get_rng_state()
    with pytest.raises(InvalidArgumentError, match="needs 3 batches, got 2"):
        run.measure(batches(2))
    assert same(run.state_dict(), before)
    run.measure(batches(3, seed=5))
    after = run.state_dict()
    for replica in (*before["replicas"], *after["replicas"]):
        del replica["forward"]  # dropout went on drawing
    assert same(after["replicas"], before["replicas"])
    now, then = after["exchange"], before["exchange"]
    assert torch.equal(now["replica_at"], then["replica_at"])
    assert not torch.equal(now["noise_variance"], then["noise_variance"])
    assert torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(InvalidArgumentError, match="measures no repeated energies"):
        make_run().measure(batches(3))


def test_advance_measures_by_itself():
    """Before steps 0, 4, 8 and 12 from batches of the same data; and in pieces it does the same."""
    noise = tr.Smoothing(0.3, tr.RepeatedDraws(3, every=4))
    by_hand, advanced, in_pieces = (measured_run(noise=noise) for _ in range(3))
    first, second, third = (tr.DeviceLoader(classes(), 8, seed=1) for _ in range(3))
    infos = []
    for step in range(14):
        if step % 4 == 0:
            by_hand.measure([first.next() for _ in range(3)])
        infos.append(by_hand.step(first.next()))
    assert same(joined(list(advanced.advance(14, second))), stacked(infos))
    pieces = [info for n in (4, 4, 1, 5) for info in in_pieces.advance(n, third)]
    assert same(joined(pieces), stacked(infos))
    assert same(advanced.state_dict(), by_hand.state_dict())
    assert (advanced.state.noise_updates == 4.0).all()


UNMEASURED = "has measured nothing in"


@pytest.mark.parametrize("shared", [True, False])
def test_a_plain_loop_that_never_measures_is_warned_once(shared, caplog):
    noise = tr.Smoothing(0.3, tr.RepeatedDraws(3, every=4))
    run = make_run(noise=noise, shared_batches=shared)
    for k, batch in enumerate(batches(11)):
        run.step(batch if shared else [batch, batch])
        if k == 0:
            assert UNMEASURED not in caplog.text  # a loop may yet measure behind this step
    (record,) = [each for each in caplog.records if UNMEASURED in each.message]
    assert (record.name, record.levelname) == ("torchrex", "WARNING")
    assert ("PairedVariance()" if shared else "PerExample(paired=False)") in record.message


@pytest.mark.parametrize("how", ["train", "advance", "by hand", "resumed", "free"])
def test_who_measures_is_not_warned(how, caplog):
    noise = (
        tr.PairedVariance() if how == "free" else tr.Smoothing(0.3, tr.RepeatedDraws(3, every=4))
    )
    run = make_run(noise=noise)
    if how == "train":
        tr.train(run, batches(5), 12, extra=batches(4))
    elif how == "advance":
        list(run.advance(12, batches(5)))
    elif how == "resumed":
        first = make_run(noise=noise)
        list(first.advance(6, batches(5)))
        run.load_state_dict(first.state_dict())
    for t, batch in enumerate(batches(12)):
        run.step(batch)
        if how == "by hand" and t % 4 == 0:
            run.measure(batches(3))
    assert UNMEASURED not in caplog.text


class Counts(nn.Module):
    """Statistics that are assigned, not written in place."""

    def __init__(self):
        super().__init__()
        self.body = linear()
        self.register_buffer("mean", torch.zeros(N_FEATURES))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.body(x - self.mean)


def test_assigned_buffers_are_left_alone_by_a_trial_and_a_measurement():
    run = make_run(Counts, noise=tr.RunningMean(tr.RepeatedDraws(2)))
    batch = classes(8)
    run.step(batch)
    assert torch.allclose(run.ensemble.modules[0].mean, 0.1 * batch[0].mean(0))
    before = buffers_of(run, 0)
    run.measure(batches(2))
    assert same(buffers_of(run, 0), before)


# Momenta


LRS, TINY = (0.1, 0.2, 0.8), (1e-24, 2e-24, 3e-24)


@pytest.mark.parametrize("policy", ["rescale", "keep"])
def test_momenta_after_a_forced_swap(policy):
    """Without force and kick v' = (1 - friction) v, times sqrt(lr tau of the new rung / lr tau of
    the old one) if rescaled."""
    ladder = tr.Ladder(TINY, LRS)
    run = make_run(linear, flat_energy(), ladder, sampler=tr.SGHMC(0.5), momentum=policy)
    position, (velocity,) = run.ensemble.position, run.ensemble.sampler_state
    velocity.fill_(1.0)
    scale = (torch.tensor(TINY).double() * torch.tensor(LRS).double()).sqrt()
    for k, batch in enumerate(batches(6)):
        stood, before, place = run.state.rung_of[:, 0], velocity.clone(), position.clone()
        info = run.step(batch)
        assert info.accepted[:, 0].tolist() == [k % 2 == 0, k % 2 == 1]
        stands = run.state.rung_of[:, 0]
        ratio = (scale[stands] / scale[stood]).float() if policy == "rescale" else torch.ones(3)
        assert torch.allclose(velocity, 0.5 * ratio[:, None] * before, rtol=1e-6)
        assert torch.allclose(position, place + velocity)
        assert float((ratio - 1.0).abs().max()) > 0.3 or policy == "keep"


def test_refreshed_momenta_have_the_law_of_the_new_rung():
    """v = std sqrt(lr tau) times fresh numbers for those who swapped; then the move, whose numbers
    are known as well."""
    ladder, friction, seed = tr.Ladder((0.5, 1.0, 2.0), (0.01, 0.02, 0.04)), 0.3, 8
    run = make_run(
        mlp, flat_energy(), ladder, sampler=tr.SGHMC(friction), momentum="refresh", seed=seed
    )
    streams, size = Streams(seed), run.ensemble.layout.size
    (velocity,) = run.ensemble.sampler_state
    product = torch.tensor(ladder.lrs) * torch.tensor(ladder.temperatures)
    for batch in batches(5):
        stood, before = run.state.rung_of[:, 0], velocity.clone()
        run.step(batch)
        stands = run.state.rung_of[:, 0]
        assert bool((stood != stands).any())
        for replica in range(3):
            fresh, kick = (
                torch.empty(size).normal_(generator=streams[f"{name}.{replica}"])
                for name in ("refresh", "move")
            )
            rung = stands[replica]
            refreshed = (2 / (2 - friction) * product[rung]).sqrt() * fresh
            v = refreshed if stood[replica] != rung else before[replica]
            expected = (1 - friction) * v + (2 * friction * product[rung]).sqrt() * kick
            assert torch.allclose(velocity[replica], expected, rtol=1e-5, atol=1e-6)


# Stopping and going on exactly

STOPS = (0, 1, 255, 256, 300)
LAST = 310


def interrupted_run(policy="rescale", seed=7):
    return make_run(
        with_everything,
        cross_entropy(prior=tr.GaussianPrior(1.0, groups={"bias": 0.0})),
        tr.Ladder((0.5, 0.6, 0.8), 1e-3, anneal=tr.schedules.geometric(0.999)),
        sampler=tr.SGHMC(0.1), initial="independent", pairing=tr.RandomPair(), momentum=policy,
        correction_factor=tr.TargetAcceptance(0.3, initial=30.0), seed=seed,
    )  # fmt: skip


def interrupted_loader():
    def augment(batch, generator):
        return batch[0] + torch.rand(batch[0].shape, generator=generator), batch[1]

    return tr.DeviceLoader(classes(), 8, seed=3, last="wrap", augment=augment)


@pytest.fixture(scope="module")
def uninterrupted():
    """Infos of all steps, states at the stops, and the last state."""
    run, loader = interrupted_run(), interrupted_loader()
    infos, states = [], {}
    for step in range(LAST):
        if step in STOPS:
            states[step] = {"run": run.state_dict(), "loader": loader.state_dict()}
        infos.append(run.step(loader.next(twice=True)))
    return stacked(infos), states, run.state_dict()


@pytest.mark.parametrize("step", STOPS)
@pytest.mark.parametrize("past", [0, 133])
def test_a_stopped_run_goes_on_exactly(uninterrupted, step, past, tmp_path):
    """Through a checkpoint; also in a run of another seed that has gone some way already."""
    infos, states, last = uninterrupted
    assert 20 < int(infos.accepted.sum()) < LAST
    torch.manual_seed(step)
    run, loader = interrupted_run(seed=8 if past else 7), interrupted_loader()
    list(run.advance(past, loader))
    checkpoints = tr.Checkpoints(tmp_path)
    checkpoints.save(step, {**states[step]["run"], "loader": states[step]["loader"]})
    assert (tmp_path / f"step={step:09d}" / "replica=2.safetensors").exists()
    state = dict(checkpoints.load_newest().state)
    loader.load_state_dict(state.pop("loader"))
    run.load_state_dict(state)
    assert run.n_steps == step
    assert same(run.state_dict(), states[step]["run"]), "what was loaded is not what was saved"
    found = joined(list(run.advance(LAST - step, loader)))
    assert same(found, type(infos)(*(values[step:] for values in infos)))
    assert same(run.state_dict(), last)


@pytest.mark.parametrize("policy", ["keep", "refresh"])
def test_other_policies_go_on_exactly(policy):
    reference, resumed = interrupted_run(policy), interrupted_run(policy)
    for k, batch in enumerate(batches(12)):
        info = reference.step(batch)
        if k > 4:
            assert same(resumed.step(batch), info)
        elif k == 4:
            resumed.load_state_dict(reference.state_dict())
    assert same(resumed.state_dict(), reference.state_dict())


class Flagged(nn.Module):
    """Two models of one name and size, with other buffers or other shapes."""

    def __init__(self, buffer="mean", transposed=False):
        super().__init__()
        self.body = nn.Linear(N_FEATURES, N_CLASSES, bias=False)
        if transposed:
            self.body.weight = nn.Parameter(torch.zeros(N_CLASSES * 2, N_FEATURES // 2))
        self.register_buffer(buffer, torch.zeros(2))

    def forward(self, x):
        return x @ self.body.weight.reshape(N_FEATURES, N_CLASSES)


OTHERS = {
    "ladder": {"ladder": tr.Ladder((0.5, 1.1), (1e-3, 2e-3))},
    "lrs": {"ladder": tr.Ladder((0.5, 1.0), (1e-3, 3e-3))},
    "rungs": {"ladder": THREE},
    "schedule": {"ladder": tr.Ladder((0.5, 1.0), (1e-3, 2e-3), decay=tr.schedules.geometric(0.9))},
    "model": {"model": mlp},
    "n_data": {"energy": cross_entropy(41)},
    "prior": {"energy": cross_entropy(prior=tr.GaussianPrior(1.0))},
    "loss": {"energy": flat_energy()},
    "sampler": {"sampler": tr.SGHMC(0.2)},
    "noise": {"noise": tr.PairedVariance(0.3)},
    "factor": {"correction_factor": 2.0},
    "pairing": {"pairing": tr.RandomPair()},
    "interval": {"swap_interval": 2},
    "policy": {"momentum": "keep"},
    "batches": {"shared_batches": False, "noise": tr.Smoothing(0.3, tr.PerExample(paired=False))},
    "intensity": {"swap_intensity": 0.5},
    "dtype": {"model": lambda: linear(torch.float64)},
}


@pytest.mark.parametrize("what", [*OTHERS, "shapes", "buffers"])
def test_the_state_of_another_run_is_refused(what):
    given, words = {"sampler": tr.SGHMC(0.1)}, "the state is that of another"
    if what in ("shapes", "buffers"):
        words = {"shapes": "another model: its parameters differ", "buffers": "model: its buffers"}[
            what
        ]
        given["model"] = Flagged
        changed = {"model": lambda: Flagged("v") if what == "buffers" else Flagged(transposed=True)}
    else:
        changed = OTHERS[what]
    mine = make_run(**given)
    if what in OTHERS:
        mine.step(classes(8))
    before = mine.state_dict()
    with pytest.raises(InvalidArgumentError, match=words):
        mine.load_state_dict(make_run(**{**given, **changed}).state_dict())
    assert same(mine.state_dict(), before)


def test_one_backward_pass_for_all_replicas_gives_the_same_numbers():
    """How it is done is chosen by the clock, so it must not matter to the last bit."""
    runs = [
        make_run(mlp, ladder=THREE, initial="independent", sampler=tr.SGHMC(0.1), seed=3)
        for _ in range(2)
    ]
    for run, at_once in zip(runs, (True, False), strict=True):
        run.step(batches(1)[0])
        run._network = dataclasses.replace(run._network, backward_at_once=at_once)
        for batch in batches(20):
            run.step(batch)
    assert torch.equal(runs[0].ensemble.position, runs[1].ensemble.position)


def test_a_loaded_state_has_its_own_assignment():
    """At the same step as before, so that nothing remembered of that step may be believed."""
    run = make_run(mlp, ladder=THREE)
    run.step(batches(1)[0])
    standing = [run.replica_at(rung) for rung in range(3)]
    state = run.state_dict()
    state["exchange"]["replica_at"] = state["exchange"]["replica_at"].flip(0)
    run.load_state_dict(state)
    assert [run.replica_at(rung) for rung in range(3)] == standing[::-1]


def test_an_ensemble_serves_many_runs():
    """It is what replicas are made from: every run has its own."""
    ensemble = tr.ModuleEnsemble(linear, cross_entropy())
    runs = [tr.ModuleExchange(ensemble, tr.Ladder((0.5, 1.0), 1e-3)) for _ in range(2)]
    runs[0].step(batches(1)[0])
    assert not torch.equal(runs[0].ensemble.position, runs[1].ensemble.position)


def test_batches_of_changing_shape_keep_the_scale():
    run = make_run(mlp, initial="independent")
    for size in (8, 3, 8, 40, 2, 17):
        batch = classes(size, seed=size)
        expected = torch.stack(
            [N_DATA / size * losses_of(run.live_module_at(rung), batch).sum() for rung in range(2)]
        )
        assert torch.allclose(run.step(batch).energy[:, 0], expected, rtol=1e-6)
