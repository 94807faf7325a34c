"""A replica whose energy is NaN or infinite: it is named, it never spreads, and on request it is
replaced.
"""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchrex as tr
from modules import (
    N_CLASSES,
    N_DATA,
    N_FEATURES,
    batches,
    classes,
    cross_entropy,
    linear,
    make_run,
    same,
)
from torchrex.errors import InvalidArgumentError, NonFiniteEnergyError
from torchrex.network.run import first_failure

NAN, INF = float("nan"), float("inf")
LADDER = tr.Ladder((0.5, 0.7, 1.0), (1e-3, 1e-3, 1e-3))
FOUR = tr.Ladder((0.5, 0.7, 1.0, 1.4), 1e-3)
NO_SWAPS = {"noise": tr.KnownVariance(1e12), "correction_factor": 1.0}


def with_statistics():
    """No ReLU in front: a NaN must come through."""
    return nn.Sequential(nn.Linear(N_FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, N_CLASSES))


def run_on(ladder=LADDER, model=with_statistics, **options):
    options = {"sampler": tr.SGHMC(0.1), "seed": 1, "correction_factor": INF, **options}
    return make_run(model, cross_entropy(), ladder, **options)


def poison(run, replica, value=NAN):
    with torch.no_grad():
        next(run.ensemble.modules[replica].parameters()).view(-1)[0] = value


def go_on(run, batch):
    """A step whatever the energies."""
    try:
        return run.step(batch)
    except NonFiniteEnergyError as error:
        return error


# Stopping


@pytest.mark.parametrize("replica", [0, 2])
@pytest.mark.parametrize("step", [0, 11])
@pytest.mark.parametrize("through", ["step", "advance"])
def test_the_error_names_replica_rung_and_step(replica, step, through):
    """After some steps rungs and replicas are told apart."""
    run, data = run_on(), batches(14)
    for batch in data[:step]:
        run.step(batch)
    assert (run.state.replica_at[:, 0].tolist() != [0, 1, 2]) == (step > 0)
    rung = int(run.state.rung_of[replica, 0])
    poison(run, replica)
    words = f"replica {replica} on rung {rung} became nan at step {step} "
    with pytest.raises(NonFiniteEnergyError, match=words) as caught:
        run.step(data[step]) if through == "step" else list(run.advance(3, data[step:]))
    error = caught.value
    assert (error.replica, error.rung, error.step, error.run) == (replica, rung, step, 0)
    assert isinstance(error, FloatingPointError)
    assert ("Lower the learning rate of that rung" in str(error)) == (step > 0)


@pytest.mark.parametrize("divergence", ["stop", "respawn"])
@pytest.mark.parametrize("through", ["step", "advance"])
@pytest.mark.parametrize("step", [0, 1])
def test_nan_in_the_data_points_to_the_data(step, divergence, through):
    """The mutant looks at the energies alone and blames the learning rate."""
    run, (x, y) = run_on(divergence=divergence), classes(8)
    for _ in range(step):
        run.step((x, y))
    x[3, 1] = NAN
    with pytest.raises(NonFiniteEnergyError, match=f"at step {step} .*look at the data") as caught:
        run.step((x, y)) if through == "step" else list(run.advance(1, [(x, y)]))
    assert "learning rate" not in str(caught.value)


def test_a_learning_rate_that_is_too_large_ends_in_an_error():
    """Nothing is poisoned: the hot rung overflows by itself, again and again if it is respawned."""
    options = {**NO_SWAPS, "sampler": tr.SGLD(), "ladder": tr.Ladder((0.5, 1.0), (1e-4, 1e30))}
    run = run_on(**options)
    infos = [go_on(run, batch) for batch in batches(20)]
    broken = next(k for k, info in enumerate(infos) if isinstance(info, NonFiniteEnergyError))
    assert 0 < broken < 10
    assert all(bool(info.energy.isfinite().all()) for info in infos[:broken])
    assert (infos[broken].replica, infos[broken].rung, infos[broken].step) == (1, 1, broken)
    run = run_on(**options, divergence="respawn")
    for batch in batches(20):
        run.step(batch)
    assert len(run.respawns) >= 5
    assert {(event["replica"], event["copied_from"]) for event in run.respawns} == {(1, 0)}
    assert bool(run.ensemble.position[0].isfinite().all())


@pytest.fixture
def validation():
    """As in a process that compiles nothing: torch.compile ends the checks of distributions."""
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(True)
    yield
    assert kind._validate_args
    kind.set_default_validate_args(before)


def validated(output, target):
    """-log Normal(mean, sigma): torch refuses NaN and a sigma of 0 by a ValueError."""
    return -torch.distributions.Normal(output[:, 0], output[:, 1].exp()).log_prob(target.float())


def validated_of(module, batch):
    return validated(module(batch[0]), batch[1])


def strict(output, target):
    """A loss with a check of its own."""
    if not bool(output.isfinite().all()):
        raise ValueError("not finite")
    return F.cross_entropy(output, target, reduction="none")


REFUSING = {
    "NaN": (tr.PosteriorEnergy(validated, n_data=N_DATA), NAN),
    "sigma 0": (tr.PosteriorEnergy(validated, n_data=N_DATA), -1e5),
    "of a module": (tr.PosteriorEnergy.of(validated_of, n_data=N_DATA), NAN),
    "its own check": (tr.PosteriorEnergy(strict, n_data=N_DATA), NAN),
}


@pytest.mark.usefixtures("validation")
@pytest.mark.parametrize("swap_batch", [None, 16])
@pytest.mark.parametrize("case", REFUSING)
def test_a_loss_that_refuses_what_a_broken_replica_returns_is_an_energy_of_nan(
    case, swap_batch, tmp_path
):
    """A ValueError in the loss would leave no result, and respawn would do nothing."""
    energy, value = REFUSING[case]

    def broken(divergence, *, begun=True):
        run = make_run(linear, energy, LADDER, seed=1, divergence=divergence, swap_batch=swap_batch)
        data = tr.DeviceLoader(classes(), batch_size=8, seed=0)
        if begun:
            tr.train(run, data, 3)
            with torch.no_grad():
                run.ensemble.modules[0].bias[1] = value
        return run, data

    run, data = broken("stop")
    with pytest.raises(NonFiniteEnergyError, match=r"replica 0 .* at step 3") as caught:
        tr.train(run, data, 6, out=tmp_path / "mynet" / "seed=1")
    assert "Lower the learning rate" in str(caught.value)
    result = json.loads((tmp_path / "mynet" / "seed=1" / "result.json").read_text())
    assert result["status"] == "failed"
    run, data = broken("respawn")
    state, position = copy.deepcopy((run.state_dict(), data.state_dict()))
    tr.train(run, data, 6)
    assert [event["replica"] for event in run.respawns] == [0]
    assert bool(run.ensemble.position.isfinite().all())
    # The first batch of a process is tried on its own: that must not stop a resumed run.
    again, data = broken("respawn", begun=False)
    again.load_state_dict(state)
    data.load_state_dict(position)
    tr.train(again, data, 6)
    assert same(again.state_dict(), run.state_dict())


@pytest.mark.parametrize("broken_at", [0, 2])
def test_a_value_error_of_finite_outputs_is_raised_as_it_is(broken_at):
    def picky(output, target):
        if run.n_steps == broken_at:
            raise ValueError("of its own")
        return F.cross_entropy(output, target, reduction="none")

    run = make_run(linear, tr.PosteriorEnergy(picky, n_data=N_DATA), LADDER, divergence="respawn")
    for batch in batches(broken_at):
        run.step(batch)
    with pytest.raises(ValueError, match="of its own") as caught:
        run.step(classes(8))
    assert type(caught.value) is ValueError
    assert run.n_steps == broken_at
    assert not run.respawns


@pytest.mark.usefixtures("validation")
def test_an_argument_that_is_wrong_from_the_start_is_named_by_torch():
    """Finite outputs of weights that have not moved are no divergence: exp() is missing."""

    def no_exp(output, target):
        return -torch.distributions.Normal(output[:, 0], output[:, 1]).log_prob(target.float())

    run = make_run(linear, tr.PosteriorEnergy(no_exp, n_data=N_DATA), LADDER)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        run.step(classes(8))


def squared_run(**options):
    """Squared errors overflow to inf where cross entropies become NaN."""

    def squared(output, target):
        return (output - F.one_hot(target, N_CLASSES)).square().sum(1)

    energy = tr.PosteriorEnergy(squared, n_data=N_DATA)
    return make_run(linear, energy, tr.Ladder((0.5, 1.0), 1e-4), seed=1, **options)


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize(
    "noise", [None, tr.KnownVariance(), tr.RunningMean(tr.RepeatedDraws(2, every=50))], ids=str
)
def test_an_infinite_energy_stays_where_it_is_and_is_named(replica, noise):
    run = squared_run(noise=noise)
    poison(run, replica, 1e30)
    with pytest.raises(NonFiniteEnergyError, match="became inf") as caught:
        run.step(classes(8))
    assert int(run.state.replica_at[replica, 0]) == replica, "it swapped"
    assert (caught.value.replica, caught.value.rung) == (replica, replica)
    run = squared_run(noise=noise, divergence="respawn")
    poison(run, replica, 1e30)
    run.step(classes(8))
    expected = {"step": 1, "replica": replica, "rung": replica, "copied_from": 1 - replica}
    assert run.respawns == [expected]
    assert bool(run.ensemble.position.isfinite().all())


# It never spreads


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "noise", [None, tr.KnownVariance(), tr.RunningMean(tr.RepeatedDraws(2, every=3))], ids=str
)
def test_a_broken_replica_never_swaps_and_changes_nobody(value, noise):
    """With the middle rung broken nothing can swap: the others move as in a run without swaps."""
    data = batches(15)
    broken, alone = run_on(noise=noise), run_on(**NO_SWAPS)
    poison(broken, 1, value)
    for batch in data:
        if noise is not None and noise.feed is not None and broken.n_steps % 3 == 0:
            broken.measure(data[:2])
        assert isinstance(go_on(broken, batch), NonFiniteEnergyError)
        alone.step(batch)
        assert broken.state.replica_at[:, 0].tolist() == [0, 1, 2]
        for replica in (0, 2):
            tensors = (run.ensemble.tensors_of(replica) for run in (broken, alone))
            assert same(*tensors)
    assert broken.n_steps == 15


def test_healthy_neighbours_still_swap():
    run = run_on(FOUR, noise=tr.KnownVariance())
    poison(run, 0)
    orders = set()
    for batch in batches(80):
        go_on(run, batch)
        orders.add(tuple(run.state.replica_at[:, 0].tolist()))
    assert len(orders) > 1
    assert {order[0] for order in orders} == {0}
    assert bool(run.ensemble.position[1:].isfinite().all())


# Respawning


@pytest.mark.parametrize(
    ("broken_rungs", "copied"),
    [
        ((0,), {0: 1}),
        ((1,), {1: 0}),
        ((3,), {3: 2}),
        ((0, 1), {0: 2, 1: 2}),
        ((1, 2), {1: 0, 2: 3}),
    ],
)
def test_the_nearest_healthy_replica_is_copied(broken_rungs, copied):
    """By rungs, the colder one of two; weights, buffers and momentum."""
    run = run_on(FOUR, divergence="respawn", noise=tr.KnownVariance(), initial="independent")
    data = batches(40)
    for batch in data[:30]:
        run.step(batch)
    standing = run.state.replica_at[:, 0].tolist()
    assert standing != [0, 1, 2, 3], "rungs and replicas are not told apart"
    for rung in broken_rungs:
        poison(run, standing[rung])
    assert run.respawns == []
    run.step(data[30])
    stands = run.state.replica_at[:, 0].tolist()
    assert [stands[rung] for rung in broken_rungs] == [standing[rung] for rung in broken_rungs]
    assert run.respawns == [
        {"step": 31, "replica": standing[rung], "rung": rung, "copied_from": stands[copied[rung]]}
        for rung in broken_rungs
    ]
    pairs = [(event["replica"], event["copied_from"]) for event in run.respawns]
    for a, b in pairs:
        assert same(run.ensemble.tensors_of(a), run.ensemble.tensors_of(b))
    run.step(data[31])
    for a, b in pairs:  # their noises differ, so they part
        assert not torch.equal(run.ensemble.position[a], run.ensemble.position[b])
    assert len(run.respawns) == len(broken_rungs)


def test_a_replica_that_the_last_move_broke_is_no_source():
    """Its energy is still finite, its weights are not: rung 0 is copied over both."""
    run = run_on(divergence="respawn", noise=tr.KnownVariance(), momentum="keep")
    run.ensemble.sampler_state.velocity[1, 0] = INF
    poison(run, 2)
    run.step(classes(8))
    standing = run.state.replica_at[:, 0].tolist()
    broken = {event["replica"]: event["copied_from"] for event in run.respawns}
    assert broken == {1: 0, 2: 0}
    assert sorted(standing) == [0, 1, 2]
    assert bool(run.ensemble.position.isfinite().all())


def test_it_is_logged_and_the_others_are_left_alone(caplog):
    data = batches(10)
    run, alone = run_on(divergence="respawn", **NO_SWAPS), run_on(**NO_SWAPS)
    for batch in data[:4]:
        run.step(batch)
        alone.step(batch)
    poison(run, 1)
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        for batch in data[4:]:
            info = run.step(batch)
            alone.step(batch)
    (record,) = caplog.records
    assert "replica 1 on rung 1 diverged before step 5" in record.getMessage()
    assert bool(info.energy.isfinite().all())
    assert bool(run.ensemble.position.isfinite().all())
    for replica in (0, 2):
        assert torch.equal(run.ensemble.position[replica], alone.ensemble.position[replica])


@pytest.mark.parametrize(
    ("noise", "factor"),
    [
        (None, INF),
        (tr.RunningMean(tr.PerExample()), INF),
        (tr.KnownVariance(), INF),
        (tr.KnownVariance(1.0), tr.TargetAcceptance(0.3)),
    ],
    ids=str,
)
def test_swaps_go_on_after_a_respawn(noise, factor):
    run, data = run_on(divergence="respawn", noise=noise, correction_factor=factor), batches(60)
    for batch in data[:5]:
        run.step(batch)
    poison(run, 1)
    infos = [run.step(batch) for batch in data[5:]]
    assert len(run.respawns) == 1
    assert not infos[0].accepted.any()
    assert bool(run.state.noise_variance.isfinite().all())
    assert bool(run.state.correction_factor.nan_to_num(posinf=1.0).isfinite().all())
    assert all(sum(int(info.accepted[pair]) for info in infos) > 3 for pair in range(2))


def test_a_run_with_respawns_is_reproducible_and_resumable(tmp_path):
    data = batches(24)

    def go(run, first, last, saved=None):
        infos = []
        for k in range(first, last):
            if k in (4, 10, 17):
                poison(run, k % 4)
            if saved is not None:
                saved[k] = run.state_dict()
            infos.append(run.step(data[k]))
        return infos

    def respawning():
        return run_on(FOUR, divergence="respawn", noise=tr.KnownVariance())

    states = {}
    reference, again = respawning(), respawning()
    infos = go(reference, 0, 24, states)
    assert len(reference.respawns) == 3
    assert same(go(again, 0, 24), infos)
    assert same(again.state_dict(), reference.state_dict())
    for k in (4, 5, 11, 20):
        checkpoints = tr.Checkpoints(tmp_path / str(k))
        checkpoints.save(k, states[k])
        resumed = respawning()
        resumed.load_state_dict(checkpoints.load_newest().state)
        if k in (4, 10, 17):
            assert not bool(resumed.ensemble.position.isfinite().all())
        assert same(go(resumed, k, 24), infos[k:])
        assert same(resumed.state_dict(), reference.state_dict())
        assert resumed.respawns == reference.respawns


@pytest.mark.parametrize("policy", ["stop", "respawn"])
@pytest.mark.parametrize("ladder", [LADDER, tr.Ladder((1.0,), 1e-3)])
def test_all_replicas_broken_is_an_error(policy, ladder):
    run = run_on(ladder, divergence=policy)
    for replica in range(ladder.n_rungs):
        poison(run, replica)
    with pytest.raises(NonFiniteEnergyError) as caught:
        run.step(classes(8))
    assert (caught.value.rung, caught.value.step) == (0, 0)
    assert run.respawns == []
    with pytest.raises(InvalidArgumentError, match="stop or respawn, got 'ignore'"):
        run_on(divergence="ignore")


@pytest.mark.parametrize("divergence", ["stop", "respawn"])
@pytest.mark.parametrize("step", [0, 1])
def test_before_the_first_move_no_learning_rate_is_to_blame(step, divergence):
    """With data that are finite."""
    run, (x, y) = run_on(divergence=divergence), classes(8)
    run.ensemble.energy._loss = lambda output, target: (
        output.sum(1) * (NAN if run.n_steps >= step else 1.0)
    )
    for _ in range(step):
        run.step((x, y))
    with pytest.raises(NonFiniteEnergyError, match=f"at step {step} ") as caught:
        run.step((x, y))
    assert ("check the loss, the data and the initial weights" in str(caught.value)) == (step == 0)
    assert ("ower the learning rate" in str(caught.value)) == (step > 0)


def test_replicas_that_fail_together_point_to_the_data_first():
    """Where the batch is not at hand, as on a GPU, and replicas share no weights."""
    info = run_on().step(classes(8))
    blocks = type(info)(*(torch.stack([values, values]) for values in info))

    def advice(bad, **options):
        blocks.energy[1] = torch.tensor(bad)[:, None]
        return str(first_failure(blocks, 8, **options))

    all_bad, one_bad = [NAN, INF, NAN], [1.0, NAN, 1.0]
    assert "at step 7 (run 0). All replicas failed at this step: look for NaN" in advice(all_bad)
    assert "All replicas" not in advice(all_bad, together=True)
    assert "All replicas" not in advice(all_bad, batch=classes(8))
    assert "Lower the learning rate of that rung" in advice(one_bad)
