"""Samplers: the tests that every sampler inherits, and what is special about each of them.

A new sampler fills in the factory `SamplerSuite` and gets its tests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from modules import N_DATA, batches, cross_entropy, make_run, mlp, same
from torchrex.errors import InvalidArgumentError
from torchrex.samplers import named_tensors

RUNS, STIFFNESS, LR, TEMPERATURE, FRICTION, WARM = 400_000, 2.0, 0.3, 1.7, 0.25, 10


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


def quadratic(x):
    return -0.5 * (torch.tensor([1.0, 3.0], dtype=x.dtype) * x.square()).sum(-1)


def sgld_recursion(lr):
    """x' = A x + noise of covariance Q on a quadratic energy."""
    return np.array([[1 - lr * STIFFNESS]]), np.array([[2 * lr * TEMPERATURE]])


def sghmc_recursion(lr):
    keep, pull = 1 - FRICTION, lr * STIFFNESS
    kick = 2 * FRICTION * lr * TEMPERATURE * np.ones((2, 2))  # the same noise enters v' and x'
    return np.array([[1 - pull, keep], [-pull, keep]]), kick


class SamplerSuite:
    """What every sampler promises. Subclasses fill in what comes before the tests."""

    sampler: tr.samplers.Sampler
    mutant: tr.samplers.Sampler  # with another law
    first_step = 0  # from which on it samples

    @staticmethod
    def recursion(lr):
        """A and Q of the linear recursion of (position, state...) on a quadratic energy."""
        raise NotImplementedError

    def optimiser(self, parameters, lr):
        """What it is at temperature 0."""
        raise NotImplementedError

    def moved(self, sampler, covariance, n_moves=5):
        """Position and state after some moves from draws of N(0, covariance)."""
        generator = torch.Generator().manual_seed(1)
        z = torch.randn(RUNS, len(covariance), generator=generator, dtype=torch.float64)
        x, *own = (z @ torch.as_tensor(np.linalg.cholesky(covariance)).T).unbind(-1)
        at_rest = self.sampler.init(x)
        state = type(at_rest)(*own, *at_rest[len(own) :])
        for k in range(n_moves):
            noise = torch.randn(RUNS, generator=generator, dtype=torch.float64)
            rates = {"lr": tensor(LR), "temperature": tensor(TEMPERATURE)}
            step = torch.tensor(self.first_step + 1 + k)
            x, state = sampler.move(x, state, STIFFNESS * x, noise, step=step, **rates)
        return [x, *state]

    def test_it_keeps_the_law_of_its_recursion(self):
        """Exact draws stay exact draws: all second moments. The mutant is seen in the last."""
        law = scipy.linalg.solve_discrete_lyapunov(*self.recursion(LR))
        values, others = self.moved(self.sampler, law), self.moved(self.mutant, law)
        for i in range(len(law)):
            for j in range(i + 1):
                assert_mean_is(values[i] * values[j], law[i, j])
        assert_mean_is_not(others[len(law) - 1].square(), law[-1, -1])

    def test_the_law_tends_to_gibbs(self):
        """As lr -> 0: tau / a, and the velocity that rescaling relies on."""
        law = scipy.linalg.solve_discrete_lyapunov(*self.recursion(1e-6))
        assert law[0, 0] == pytest.approx(TEMPERATURE / STIFFNESS, rel=1e-4)
        if self.sampler.velocity_std:
            expected = self.sampler.velocity_std**2 * 1e-6 * TEMPERATURE
            assert law[1, 1] == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("rule", ["rescale", "refresh"])
    def test_a_swap_takes_the_velocity_from_law_to_law(self, rule):
        """From N(0, s^2) to N(0, s'^2) on the new rung; whoever stays keeps every bit."""
        if not self.sampler.velocity_std:
            state = self.sampler.init(torch.ones(3))
            given = [torch.ones(3)] * (2 if rule == "rescale" else 3)
            assert same(list(getattr(self.sampler, rule)(state, *given)), list(state))
            return
        generator = torch.Generator().manual_seed(2)
        v, fresh = torch.randn(2, RUNS, generator=generator, dtype=torch.float64)
        before, after = 0.3, 0.8
        state = self.sampler.init(v)
        state = type(state)(self.sampler.velocity_std * before * v, *state[1:])
        changed = torch.arange(RUNS) % 2 == 0

        def new(before, after):
            if rule == "rescale":
                return self.sampler.rescale(state, changed, tensor(after / before))
            return self.sampler.refresh(state, changed, tensor(after), fresh)

        velocity, *rest = new(before, after)
        assert torch.equal(velocity[~changed], state[0][~changed])
        assert same(rest, list(state[1:]))
        wanted = (self.sampler.velocity_std * after) ** 2
        assert_mean_is(velocity[changed].square(), wanted)
        assert_mean_is_not(new(before**2, after**2)[0][changed].square(), wanted)
        if rule == "refresh":
            assert_mean_is(velocity[changed] * v[changed], 0.0)

    def test_temperature_zero_is_its_optimiser(self):
        draws = tr.sample(
            quadratic, dim=2, ladder=tr.Ladder.descent(0.1), sampler=self.sampler, n_steps=50,
            initial=torch.tensor([1.0, -2.0]), dtype=torch.float64,
        )  # fmt: skip
        x = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        optimiser = self.optimiser([x], 0.1)
        for step in range(self.first_step or 50):
            optimiser.zero_grad()
            (-quadratic(x)).backward()
            optimiser.step()
            assert torch.allclose(draws.values[0, step], x.detach(), rtol=1e-12, atol=1e-14)

    def on_a_density(self, compiled):
        return tr.DensityExchange(
            tr.TensorEnsemble.start(
                tr.GaussianMixture([0.4, 0.6], means=[-3.0, 2.0], stds=[0.7, 0.5]),
                self.sampler, n_rungs=3, n_runs=4, dtype=torch.float64,
            ),
            tr.Ladder((1.0, 3.0, 10.0), (0.03, 0.05, 0.1)), swap_start=WARM, compiled=compiled,
        )  # fmt: skip

    def test_compiled_equals_eager(self):
        runs = [self.on_a_density(compiled) for compiled in (False, True)]
        for run in runs:
            for info in run.advance(40):
                assert info.energy.isfinite().all()
        assert runs[1].is_compiled
        eager, compiled = (run.ensemble for run in runs)
        for a, b in zip(eager.tensors, compiled.tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    def on_a_network(self):
        return make_run(
            mlp, sampler=self.sampler, swap_start=WARM, seed=5, correction_factor=1e9,
            noise=tr.PairedVariance(0.3),
        )  # fmt: skip

    @pytest.mark.parametrize("stop", [4, 10, 15])
    def test_stopped_and_resumed_equals_never_stopped(self, tmp_path, stop):
        """On a network and on a density, through a file that has the sampler's own names."""
        data = batches(20)
        whole, first, second = (self.on_a_network() for _ in range(3))
        assert sum(int(whole.step(batch).accepted.sum()) for batch in data) > 0
        for batch in data[:stop]:
            first.step(batch)
        checkpoints = tr.Checkpoints(tmp_path)
        checkpoints.save(stop, first.state_dict())
        second.load_state_dict(checkpoints.load_newest()[1])
        assert set(named_tensors(self.sampler.init(torch.zeros(1)))) < set(
            second.state_dict()["replicas"][0]
        )
        for batch in data[stop:]:
            second.step(batch)
        assert same(whole.state_dict(), second.state_dict())

        whole, first, second = (self.on_a_density(False) for _ in range(3))
        for run, n in ((whole, 20), (first, stop)):
            for _ in run.advance(n):
                pass
        second.load_state_dict(first.state_dict())
        for _ in second.advance(20 - stop):
            pass
        assert same(whole.state_dict(), second.state_dict())

    def test_it_is_a_pure_function(self):
        """The state is named tensors shaped like the position; nothing that is given is changed."""
        x = torch.ones(2, 3)
        state = self.sampler.init(x)
        given = [x, *state, torch.full_like(x, 2.0), torch.full_like(x, 3.0)]
        before = [each.clone() for each in given]
        rates = {"lr": tensor(0.1).float(), "temperature": tensor(1.0).float()}
        moved, new = self.sampler.move(x, state, *given[-2:], step=torch.tensor(0), **rates)
        assert same(given, before)
        assert type(new) is type(state)
        assert all(each.shape == x.shape and each.dtype == x.dtype for each in (moved, *new))


class Halved(tr.SGLD):
    """sqrt(lr tau) instead of sqrt(2 lr tau)."""

    def move(self, position, state, gradient, noise, **rates):
        return super().move(position, state, gradient, 0.5**0.5 * noise, **rates)


class TestSGLD(SamplerSuite):
    sampler = tr.SGLD()
    recursion = staticmethod(sgld_recursion)

    mutant = Halved()

    def optimiser(self, parameters, lr):
        return torch.optim.SGD(parameters, lr)


class TestSGHMC(SamplerSuite):
    sampler, mutant = tr.SGHMC(FRICTION), tr.SGHMC(0.7 * FRICTION)
    recursion = staticmethod(sghmc_recursion)

    def optimiser(self, parameters, lr):
        return torch.optim.SGD(parameters, lr, momentum=1 - FRICTION)


class TestAdamStart(SamplerSuite):
    """Its law is that of the sampler that follows; what it is at temperature 0 it is always."""

    sampler = tr.AdamStart(tr.SGHMC(FRICTION), WARM, n_data=N_DATA)
    mutant = tr.AdamStart(tr.SGHMC(0.7 * FRICTION), WARM, n_data=N_DATA)
    recursion, first_step = staticmethod(sghmc_recursion), WARM

    def optimiser(self, parameters, lr):
        # Adam does not see the scale of an energy, up to eps.
        return torch.optim.Adam(
            parameters, lr * N_DATA, betas=self.sampler.betas, eps=self.sampler.eps * N_DATA
        )


class TestAdamStartOfSGLD(TestAdamStart):
    sampler = tr.AdamStart(tr.SGLD(), WARM, n_data=N_DATA)
    mutant = tr.AdamStart(TestSGLD.mutant, WARM, n_data=N_DATA)
    recursion = staticmethod(sgld_recursion)


# SGLD and SGHMC


def test_the_law_of_sgld_has_the_step_size_in_it():
    suite = TestSGLD()
    exact = TEMPERATURE / (STIFFNESS * (1 - LR * STIFFNESS / 2))
    assert scipy.linalg.solve_discrete_lyapunov(*sgld_recursion(LR))[0, 0] == pytest.approx(exact)
    (x,) = suite.moved(suite.sampler, np.array([[TEMPERATURE / STIFFNESS]]))
    assert_mean_is_not(x.square(), TEMPERATURE / STIFFNESS)


@pytest.mark.parametrize("friction", [0.0, 1.5, float("nan")])
def test_bad_friction(friction):
    with pytest.raises(ValueError, match="friction"):
        tr.SGHMC(friction=friction)


# AdamStart


def double():
    return mlp(torch.float64)


@pytest.mark.parametrize("precision", [None, 7.0])
@pytest.mark.parametrize("more", [{}, {"betas": (0.9, 0.99), "eps": 1e-3}, {"betas": (0.0, 0.0)}])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_it_is_torchs_adam_on_the_mean_loss(precision, more, decay):
    """Batches of 8 out of 40, float64; a prior is weight decay precision / n_data in the gradient,
    and the ladder's decay is that of Adam's lr."""
    lr = 0.02  # of the mean loss, as torch.optim.Adam takes it
    run = make_run(
        double,
        cross_entropy(N_DATA, None if precision is None else tr.GaussianPrior(precision)),
        tr.Ladder.descent(lr / N_DATA, decay=lambda step: decay**step),
        sampler=tr.AdamStart(tr.SGHMC(0.5), 40, n_data=N_DATA, **more),
        seed=3,
    )
    module = run.module_at(0)
    optimiser = torch.optim.Adam(
        module.parameters(),
        lr,
        **{"betas": (0.5, 0.999), **more},
        weight_decay=(precision or 0.0) / N_DATA,
    )
    falling = torch.optim.lr_scheduler.ExponentialLR(optimiser, decay)
    start = run.ensemble.position.clone()
    for x, y in batches(40, dtype=torch.float64):
        run.step((x, y))
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
        falling.step()
    for ours, theirs in zip(run.module_at(0).parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert float((run.ensemble.position - start).norm()) > 0.5, "nothing moved"


def warm(sampler, temperatures=(0.5, 1.0), **options):
    return make_run(
        double,
        cross_entropy(prior=tr.GaussianPrior(1.0)),
        tr.Ladder(temperatures, (1e-3, 2e-3)),
        sampler=sampler,
        initial="independent",
        **options,
    )


@pytest.mark.parametrize("sampler", [tr.SGHMC(0.3), tr.SGLD()])
def test_after_it_the_sampler_begins_from_rest(sampler):
    """The numbers are those of a run of the sampler alone that was put where Adam ended."""
    run = warm(tr.AdamStart(sampler, 10, n_data=N_DATA), pairing=tr.NoSwaps(), seed=5)
    alone = warm(sampler, pairing=tr.NoSwaps(), seed=5)
    data = batches(30, dtype=torch.float64)
    for batch in data[:10]:
        run.step(batch)
        alone.step(batch)  # for the random numbers that it takes
    momentum, squares = run.ensemble.sampler_state
    assert float(momentum.abs().max()) > 1e-3, "there is no momentum to be carried over by mistake"
    assert not torch.allclose(alone.ensemble.position, run.ensemble.position)
    squares = squares.clone()
    alone.ensemble.position.copy_(run.ensemble.position)
    for velocity in alone.ensemble.sampler_state:
        velocity.zero_()
    for batch in data[10:]:
        assert torch.equal(run.step(batch).energy, alone.step(batch).energy)
        assert torch.equal(run.ensemble.position, alone.ensemble.position)
        for velocity in alone.ensemble.sampler_state:
            assert torch.equal(run.ensemble.sampler_state.velocity, velocity)
    assert torch.equal(run.ensemble.sampler_state.squares, squares)


def test_its_steps_have_no_noise_and_no_temperature():
    """Other temperatures: the same descent; with the first step after it they part."""
    ends = []
    for temperatures in ((0.5, 1.0), (50.0, 80.0)):
        sampler = tr.AdamStart(tr.SGHMC(0.3), 10, n_data=N_DATA)
        run = warm(sampler, temperatures, pairing=tr.NoSwaps())
        for k, batch in enumerate(batches(11, dtype=torch.float64)):
            run.step(batch)
            if k >= 9:
                ends.append(run.ensemble.position.clone())
    assert torch.equal(ends[0], ends[2])
    assert not torch.allclose(ends[1], ends[3])


def test_what_does_not_fit_adam_start_is_refused():
    sampler = tr.AdamStart(tr.SGHMC(0.3), 10, n_data=N_DATA)
    with pytest.raises(InvalidArgumentError, match="AdamStart"):  # a state of another sampler
        warm(sampler, swap_start=10).load_state_dict(warm(tr.SGHMC(0.3)).state_dict())
    with pytest.raises(InvalidArgumentError, match="swap_start=10"):
        warm(sampler, swap_start=9)
    warm(sampler, pairing=tr.NoSwaps())
    with pytest.raises(InvalidArgumentError, match=f"n_data=7 examples and the energy {N_DATA}"):
        warm(tr.AdamStart(tr.SGHMC(0.3), 10, n_data=7))
    mixture = tr.GaussianMixture([1.0], means=[0.0], stds=[1.0])
    with pytest.raises(InvalidArgumentError, match="swap_start=10"):
        tr.sample(mixture, temperatures=(1.0, 2.0), lr=0.1, n_steps=10, sampler=sampler)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sampler", [None, "SGHMC", tr.AdamStart(tr.SGLD(), 5, n_data=5)]),
        ("steps", [0, 1.5, True]),
        ("n_data", [0]),
        ("betas", [(0.5, 1.0), (-0.1, 0.5), (0.5,), 0.5, "ab", (float("nan"), 0.9)]),
        ("eps", [0.0, float("nan"), float("inf"), "small"]),
    ],
)
def test_bad_arguments(name, values):
    for value in values:
        with pytest.raises(InvalidArgumentError, match=f"^{name} must be") as caught:
            tr.AdamStart(**{"sampler": tr.SGHMC(0.5), "steps": 5, "n_data": 10, name: value})
        assert "\n" not in str(caught.value)


class Thermostat(NamedTuple):
    velocity: torch.Tensor


class Halved(tr.samplers.Sampler):
    """A sampler with momentum that says nothing about swaps."""

    velocity_std = 1.0

    def __init__(self, state=Thermostat):
        self.state = state

    def init(self, position):
        return self.state(torch.zeros_like(position))

    def move(self, position, state, gradient, noise, *, lr, temperature, step):
        return position, state


@pytest.mark.parametrize(
    ("options", "state", "word"),
    [
        ({}, Thermostat, "rescale"),
        ({"momentum": "refresh"}, Thermostat, "refresh"),
        ({"momentum": "keep"}, lambda x: (x,), "NamedTuple"),
        ({"momentum": "keep"}, lambda x: Thermostat(x.sum()), "NamedTuple"),
    ],
)
def test_a_sampler_that_says_too_little_is_refused(options, state, word):
    """It would run with momenta that are wrong after every swap."""
    common = {"dim": 1, "temperatures": (1.0, 2.0), "lr": 0.1, "n_steps": 2}
    with pytest.raises(InvalidArgumentError, match=word):
        tr.sample(lambda x: -x.square().sum(-1), sampler=Halved(state), **common, **options)
