"""AdamStart: torch.optim.Adam step for step, then the sampler from rest, and exact to resume on
both sides of the change.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torchrex as tr
from modules import N_DATA, batches, cross_entropy, make_run, mlp, same
from torchrex.errors import InvalidArgumentError

LR = 0.02  # of the mean loss, as torch.optim.Adam takes it


def double():
    return mlp(torch.float64)


def descent(sampler, *, prior=None, decay=None, n_data=N_DATA):
    """One replica at temperature 0, whose lr on the summed energy is LR on its mean."""
    return make_run(
        double,
        cross_entropy(n_data, prior),
        tr.Ladder.descent(LR / n_data, decay=decay),
        sampler=sampler,
        seed=3,
    )


@pytest.mark.parametrize("precision", [None, 7.0])
@pytest.mark.parametrize("more", [{}, {"betas": (0.9, 0.99), "eps": 1e-3}, {"betas": (0.0, 0.0)}])
def test_it_is_torchs_adam_on_the_mean_loss(precision, more):
    """Batches of 8 out of 40, float64; a prior is weight decay precision / n_data, added to the
    gradient.
    """
    prior = None if precision is None else tr.GaussianPrior(precision)
    run = descent(tr.AdamStart(tr.SGHMC(0.5), 60, n_data=N_DATA, **more), prior=prior)
    module = double()
    module.load_state_dict(run.module_at(0).state_dict())
    decayed = 0.0 if precision is None else precision / N_DATA
    optimiser = torch.optim.Adam(
        module.parameters(), lr=LR, **{"betas": (0.5, 0.999), **more}, weight_decay=decayed
    )
    start = torch.cat([p.detach().flatten() for p in module.parameters()])
    for x, y in batches(60, dtype=torch.float64):
        run.step((x, y))
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
        for ours, theirs in zip(run.module_at(0).parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    end = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert float((end - start).norm()) > 1.0, "nothing moved"


def test_the_ladders_decay_is_adams_too():
    run = descent(tr.AdamStart(tr.SGHMC(0.5), 9, n_data=N_DATA), decay=lambda step: 0.5**step)
    module = double()
    module.load_state_dict(run.module_at(0).state_dict())
    optimiser = torch.optim.Adam(module.parameters(), lr=LR, betas=(0.5, 0.999))
    falling = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.5)
    for x, y in batches(9, dtype=torch.float64):
        run.step((x, y))
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
        falling.step()
    for ours, theirs in zip(run.module_at(0).parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def warm(sampler, **options):
    """Two rungs at temperatures that show, without swaps unless the test says otherwise."""
    ladder = tr.Ladder((0.5, 1.0), (1e-3, 2e-3))
    return make_run(
        double,
        cross_entropy(prior=tr.GaussianPrior(1.0)),
        ladder,
        sampler=sampler,
        initial="independent",
        **options,
    )


@pytest.mark.parametrize("sampler", [tr.SGHMC(0.3), tr.SGLD()])
def test_after_it_the_sampler_begins_from_rest(sampler):
    """From where Adam ended, on the same noise: the same numbers as a run of the sampler alone that
    was put there.
    """
    run = warm(tr.AdamStart(sampler, 10, n_data=N_DATA), pairing=tr.NoSwaps(), seed=5)
    alone = warm(sampler, pairing=tr.NoSwaps(), seed=5)
    data = batches(30, dtype=torch.float64)
    for batch in data[:10]:
        run.step(batch)
        alone.step(batch)  # for the random numbers that it takes
    assert float(run.ensemble.velocity.abs().max()) > 1e-3, (
        "Adam left no momentum that could be carried over by mistake"
    )
    assert not torch.allclose(alone.ensemble.position, run.ensemble.position)
    alone.ensemble.position.copy_(run.ensemble.position)
    if alone.ensemble.velocity is not None:
        alone.ensemble.velocity.zero_()
    squares = run.ensemble.squares.clone()
    for batch in data[10:]:
        a, b = run.step(batch), alone.step(batch)
        assert torch.equal(a.energy, b.energy)
        assert torch.equal(run.ensemble.position, alone.ensemble.position)
        if alone.ensemble.velocity is not None:
            assert torch.equal(run.ensemble.velocity, alone.ensemble.velocity)
    assert torch.equal(run.ensemble.squares, squares)


def test_its_steps_have_no_noise_and_no_temperature():
    """Another seed of the noise, other temperatures: the same descent; with the first step after it
    they part.
    """
    ends = []
    for seed, temperatures in ((0, (0.5, 1.0)), (1, (50.0, 80.0))):
        sampler = tr.AdamStart(tr.SGHMC(0.3), 10, n_data=N_DATA)
        torch.manual_seed(0)
        energy, ladder = cross_entropy(), tr.Ladder(temperatures, (1e-3, 2e-3))
        run = make_run(double(), energy, ladder, sampler=sampler, pairing=tr.NoSwaps(), seed=seed)
        data = batches(11, dtype=torch.float64)
        for batch in data[:10]:
            run.step(batch)
        ends.append(run.ensemble.position.clone())
        run.step(data[10])
        ends.append(run.ensemble.position.clone())
    assert torch.equal(ends[0], ends[2])
    assert not torch.allclose(ends[1], ends[3])


@pytest.mark.parametrize("stop", [4, 9, 10, 11, 15])
def test_stopped_and_resumed_equals_never_stopped(tmp_path, stop):
    """In the middle of the warm start, at its end and after it; through a file."""

    def make():
        sampler = tr.AdamStart(tr.SGHMC(0.3), 10, n_data=N_DATA)
        return warm(
            sampler, seed=5, swap_start=10, noise=tr.PairedVariance(0.3), correction_factor=1e9
        )

    data = batches(20, dtype=torch.float64)
    whole, first, second = make(), make(), make()
    accepted = sum(int(whole.step(batch).accepted.sum()) for batch in data)
    assert accepted > 0
    for batch in data[:stop]:
        first.step(batch)
    checkpoints = tr.Checkpoints(tmp_path)
    checkpoints.save(stop, first.state_dict())
    saved = first.state_dict()
    assert same(
        saved["replicas"][0]["squares"],
        dict(first.ensemble.layout.views(first.ensemble.squares[0])),
    )
    second.load_state_dict(checkpoints.load_newest()[1])
    for batch in data[stop:]:
        second.step(batch)
    assert same(whole.state_dict(), second.state_dict())


def test_a_state_of_another_sampler_is_refused():
    run = warm(tr.AdamStart(tr.SGHMC(0.3), 10, n_data=N_DATA), swap_start=10)
    with pytest.raises(InvalidArgumentError, match="AdamStart") as caught:
        run.load_state_dict(warm(tr.SGHMC(0.3)).state_dict())
    assert "\n" not in str(caught.value)


def test_swaps_in_the_warm_start_are_refused():
    sampler = tr.AdamStart(tr.SGHMC(0.3), 10, n_data=N_DATA)
    with pytest.raises(
        InvalidArgumentError,
        match=r"from step 9 on, while Adam descends for 10 steps .*; say swap_start=10",
    ):
        warm(sampler, swap_start=9)
    warm(sampler, swap_start=10)
    warm(sampler, pairing=tr.NoSwaps())


def test_momenta_refreshed_at_a_swap_are_those_of_the_sampler():
    assert tr.AdamStart(tr.SGHMC(0.3), 10, n_data=5).velocity_std == tr.SGHMC(0.3).velocity_std > 0
    assert tr.AdamStart(tr.SGLD(), 10, n_data=5).velocity_std == 0


def test_it_counts_the_examples_of_the_energy():
    with pytest.raises(
        InvalidArgumentError,
        match=f"AdamStart counts n_data=7 examples and the energy {N_DATA}; give both",
    ):
        warm(tr.AdamStart(tr.SGHMC(0.3), 10, n_data=7))


def test_densities_are_refused_in_one_line():
    sampler = tr.AdamStart(tr.SGHMC(0.3), 10, n_data=5)
    mixture = tr.GaussianMixture([1.0], means=[0.0], stds=[1.0])
    for attempt in (
        lambda: tr.TensorEnsemble.start(mixture, sampler, n_rungs=2),
        lambda: tr.sample(mixture, temperatures=(1.0, 2.0), lr=0.1, n_steps=10, sampler=sampler),
    ):
        with pytest.raises(
            InvalidArgumentError, match="is for ensembles of modules; give a density SGLD"
        ) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    one = torch.ones(2)
    with pytest.raises(InvalidArgumentError, match="needs to know the step"):
        sampler.move(one, one, one, one, lr=one, temperature=one)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sampler": None}, "sampler must be what follows, such as SGHMC"),
        ({"sampler": "SGHMC"}, "sampler must be what follows"),
        ({"sampler": tr.AdamStart(tr.SGLD(), 5, n_data=5)}, "sampler must be what follows"),
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"n_data": 0}, "n_data must be a whole number >= 1, got 0"),
        ({"betas": (0.5, 1.0)}, "betas must be two numbers from 0 to below 1"),
        ({"betas": (-0.1, 0.5)}, "betas must be two numbers"),
        ({"betas": (0.5,)}, "betas must be two numbers"),
        ({"betas": 0.5}, "betas must be two numbers"),
        ({"betas": "ab"}, "betas must be two numbers"),
        ({"betas": (float("nan"), 0.9)}, "betas must be two numbers"),
        ({"eps": 0.0}, "eps must be positive and finite, got 0.0"),
        ({"eps": float("nan")}, "eps must be positive"),
        ({"eps": float("inf")}, "eps must be positive and finite"),
        ({"eps": "small"}, "eps must be positive"),
    ],
)
def test_bad_arguments(given, expected):
    with pytest.raises(InvalidArgumentError) as caught:
        tr.AdamStart(**{"sampler": tr.SGHMC(0.5), "steps": 5, "n_data": 10, **given})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
