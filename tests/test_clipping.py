"""Gradient clipping: the norm of a replica's gradient, and how often it acts, by rungs."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F

import torchrex as tr
from modules import batches, classes, cross_entropy, linear, make_run, mlp, same, with_everything
from ranks import run_ranks
from torchrex.distributed import replica_mesh
from torchrex.errors import InvalidArgumentError

N, PRECISION = 40, 3.0


def prior():
    return tr.GaussianPrior(PRECISION)


def loader(seed=1):
    return tr.DeviceLoader(classes(), 8, seed=seed)


def test_at_temperature_0_it_is_torchs_clip_grad_norm():
    """On the summed energy, the prior included; some steps are clipped and some are not."""
    model, lr, largest = mlp(torch.float64), 2e-3, 16.0
    run = tr.ModuleExchange(
        tr.ModuleEnsemble(model, cross_entropy(prior=prior()), tr.SGHMC(0.1)),
        tr.Ladder.descent(lr),
        clip=largest,
    )
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=lr, momentum=0.9)
    norms = []
    for x, y in batches(30, dtype=torch.float64):
        optimizer.zero_grad()
        energy = N * F.cross_entropy(reference(x), y)
        energy = energy + 0.5 * PRECISION * sum(p.square().sum() for p in reference.parameters())
        energy.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), largest)))
        optimizer.step()
        run.step((x, y))
        for mine, theirs in zip(run.module_at().parameters(), reference.parameters(), strict=True):
            # torch divides by the norm plus 1e-6
            assert torch.allclose(mine, theirs, rtol=0.0, atol=1e-6)
    acted = [norm > largest for norm in norms]
    assert 5 < sum(acted) < 25
    assert run.clipped_share() == (sum(acted[8:]) / 22,)  # since the latest power of two but one


@pytest.mark.parametrize("options", [{}, {"swap_batch": 16}, {"momentum": "refresh"}])
def test_a_clip_that_never_acts_changes_no_bit(options):
    runs = [
        make_run(
            with_everything, cross_entropy(prior=prior()), sampler=tr.SGHMC(0.2), clip=clip,
            correction_factor=1e9, **options,
        )
        for clip in (None, 1e9)
    ]  # fmt: skip
    for run in runs:
        list(run.advance(40, loader()))
    plain, clipped = (run.state_dict() for run in runs)
    assert bool(runs[0].state.replica_at[0].any())
    assert not any(int(replica.pop("clipped").sum()) for replica in clipped["replicas"])
    assert same(plain["replicas"], clipped["replicas"])
    assert runs[1].clipped_share() == (0.0, 0.0)


@pytest.mark.parametrize(
    ("policy", "tempering", "largest"),
    [
        ("rescale", "posterior", 25.0),
        ("refresh", "posterior", 25.0),
        ("rescale", "likelihood", 45.0),
    ],
)
def test_each_replica_has_its_own_norm_and_counts_at_its_rung(policy, tempering, largest):
    """Three rungs that swap all the time, and a norm that lies among theirs: every step's norms are
    computed here once more."""
    temperatures = torch.tensor((0.5, 0.55, 0.6))
    run = make_run(
        mlp, cross_entropy(prior=prior()), tr.Ladder(temperatures.tolist(), (1e-4, 2e-3, 4e-3)),
        initial="independent", sampler=tr.SGHMC(0.2), momentum=policy, tempering=tempering,
        correction_factor=1e9, clip=largest,
    )  # fmt: skip
    acted = []
    for batch in batches(70):
        before = run.ensemble.position.clone()
        assert not run.step(batch).accepted.all()
        power = 1.0 if tempering == "posterior" else 1.0 / temperatures[run.state.rung_of]
        norm = (power * run.ensemble.rows.gradient + PRECISION * before).double().norm(dim=1)
        acted.append((norm > largest)[run.state.replica_at[:, 0]])
        n = len(acted)
        since = max([2**k for k in range(8) if 2 ** (k + 1) < n], default=0)
        expected = torch.stack(acted[since:]).double().mean(0)
        assert run.clipped_share() == pytest.approx(expected.tolist()), n
    shares = torch.stack(acted).double().mean(0)
    assert bool(((shares > 0.02) & (shares < 0.98)).all()), shares
    assert len(set(shares.tolist())) == 3


def test_what_is_shared_has_a_norm_of_its_own():
    ensemble = tr.ModuleEnsemble(mlp, cross_entropy(), shared=("0.",), initial="independent")
    run = tr.ModuleExchange(ensemble, tr.Ladder((1e-24, 2e-24), 1e-3), clip=1e-2)
    before = [rows.position.clone() for rows in run.ensemble.all_rows]
    run.step(batches(1)[0])
    for rows, old in zip(run.ensemble.all_rows, before, strict=True):
        moved = (rows.position - old).norm(dim=1)
        assert torch.allclose(moved, torch.full_like(moved, 1e-5), rtol=1e-2)
    assert run.clipped_share() == (1.0, 1.0)


def clipped_run(seed=0, clip=25.0, **options):
    return make_run(
        with_everything, cross_entropy(prior=prior()), sampler=tr.SGHMC(0.2), seed=seed, clip=clip,
        correction_factor=1e9, **options,
    )  # fmt: skip


def test_runs_side_by_side_are_those_they_are_alone():
    together = [clipped_run(0), clipped_run(1, 30.0), clipped_run(2, None)]
    list(tr.SideBySide(together).advance(40, loader()))
    for seed, (run, clip) in enumerate(zip(together, (25.0, 30.0, None), strict=True)):
        alone = clipped_run(seed, clip)
        list(alone.advance(40, loader()))
        assert same(alone.state_dict(), run.state_dict())
    assert 0.0 < together[1].clipped_share()[0] < together[0].clipped_share()[0] < 1.0


@pytest.mark.parametrize("stop", [1, 30, 33])
def test_a_stopped_run_goes_on_exactly(tmp_path, stop):
    """With its counts, through checkpoints."""
    whole, stopped, resumed = clipped_run(), clipped_run(), clipped_run()
    list(whole.advance(50, loader()))
    tr.train(stopped, loader(), stop, checkpoints=tmp_path)
    tr.train(resumed, loader(), 50, checkpoints=tmp_path)
    assert same(whole.state_dict(), resumed.state_dict())
    assert whole.clipped_share() == resumed.clipped_share()
    assert 0.0 < whole.clipped_share()[0] < 1.0
    with pytest.raises(InvalidArgumentError, match="clip"):
        clipped_run(clip=26.0).load_state_dict(whole.state_dict())


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"clip": 25.0}, True),
        ({"clip": 1e9}, False),
        ({"clip": 25.0, "ladder": tr.Ladder.descent(1e-3)}, False),
        (
            {
                "clip": 25.0,
                "ladder": tr.Ladder((0.5, 1.0), 1e-3, anneal=tr.schedules.geometric(0.99)),
            },
            False,
        ),
    ],
    ids=["acts", "never acts", "descent", "annealed"],
)
def test_who_samples_and_is_clipped_is_warned(caplog, options, warned):
    run = clipped_run(**options)
    with caplog.at_level(logging.WARNING, "torchrex"):
        tr.train(run, loader(), 40)
    found = [record.message for record in caplog.records if "clipped" in record.message]
    share = run.clipped_share()[0]
    assert (share > 0.01) == (options["clip"] == 25.0)
    expected = [f"{100 * share:.1f} % of the later steps on rung 0 were clipped"] if warned else []
    assert [words.split(": it")[0] for words in found] == expected


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf"), float("nan"), "1"])
def test_bad_arguments(clip):
    with pytest.raises(InvalidArgumentError, match="clip must be a norm above 0"):
        make_run(linear, clip=clip)


def on_processes(n_replicas):
    ensemble = tr.ModuleEnsemble(
        mlp, cross_entropy(prior=prior()), tr.SGHMC(0.2), initial="independent",
        mesh=replica_mesh(n_replicas),
    )  # fmt: skip
    ladder = tr.Ladder((0.5, 0.55)[:n_replicas], 2e-3)
    run = tr.ModuleExchange(ensemble, ladder, clip=25.0, correction_factor=1e9)
    list(run.advance(40, loader()))
    weights = [p.tolist() for p in run.module_at(0).parameters()]
    return {"weights": weights, "share": run.clipped_share()}


@pytest.mark.slow
@pytest.mark.parametrize("n_replicas", [2, 1])
def test_on_two_processes(tmp_path, n_replicas):
    """With a replica on each bit for bit; with half of every minibatch on each the norm is that of
    the sum of their gradients, which is the same within rounding."""
    (one,) = run_ranks(1, on_processes, tmp_path, n_replicas)
    two = run_ranks(2, on_processes, tmp_path, n_replicas)
    assert two[0] == two[1]
    assert 0.0 < two[0]["share"][0] < 1.0
    assert two[0]["share"] == one["share"]
    if n_replicas == 2:
        assert two[0] == one
    for mine, its in zip(two[0]["weights"], one["weights"], strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(its), rtol=1e-3, atol=1e-5)
