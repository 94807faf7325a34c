"""Exactness of the whole step: swaps keep the joint law of a ladder, runs tend to that of rung 0,
momenta are carried right.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import torchrex as tr
from assertions import FALSE_ALARM_SIGMAS, assert_mean_is, assert_mean_is_not, intercept, z_score
from torchrex.density.loop import draw_block
from torchrex.exchange import ExchangeInputs
from torchrex.exchange.algorithm import ExchangeState, Rules, step
from torchrex.exchange.assignment import Selects
from torchrex.exchange.correction import as_rule
from torchrex.rng import Streams
from torchrex.samplers import Momentum

RUNS = 800_000
NOISE_STD = 1.0
STILL = 1e-30  # a learning rate at which nothing moves, so that only the swaps act


def gaussian(dim):
    """U = |x|^2 / 2, so pi_tau = N(0, tau)."""
    return tr.LogDensity(lambda x: -0.5 * x.square().sum(-1), dim, gradient=lambda x: -x)


def one_swap_step(
    temperatures,
    pairing,
    *,
    correction_factor=1.0,
    known=NOISE_STD**2,
    reuse_energies=False,
    dim=3,
    attempt=0,
):
    """Exact draws of a Gaussian ladder, one real step of the algorithm, and x^2 / (dim tau) at each
    rung: (rungs, runs)."""
    target = tr.Noisy(gaussian(dim), tr.Gaussian(NOISE_STD))
    ladder = tr.Ladder(temperatures, STILL)
    rules = Rules(ladder, tr.KnownVariance(known), as_rule(correction_factor), pairing)
    tau = torch.tensor(temperatures, dtype=torch.float64)[:, None, None]
    generator, double = torch.Generator().manual_seed(7), {"dtype": torch.float64}
    z = torch.randn(len(temperatures), RUNS, dim, generator=generator, **double)
    ensemble = tr.TensorEnsemble.start(
        target, n_rungs=len(temperatures), n_runs=RUNS, initial=tau.sqrt() * z, **double
    )
    state = ExchangeState.start(rules, RUNS, device=torch.device("cpu"), dtype=torch.float64)
    block = draw_block(Streams(8), rules, ensemble, attempt, 1)
    inputs = block.inputs
    noise = tuple(
        {name: values[0] for name, values in round_.items()} for round_ in inputs.target_noise
    )
    inputs = inputs._replace(
        **{name: getattr(inputs, name)[0] for name in ExchangeInputs._fields},
        target_noise=tuple(noise[0] for _ in noise) if reuse_energies else noise,
        move_noise={"move": inputs.move_noise["move"][0]},
    )
    ensemble, state, info = step(ensemble, state, inputs, rules)
    assert info.accepted.double().mean() > 0.05
    at_rung = Selects.take(ensemble.position, state.replica_at)
    return at_rung.square().sum(-1) / (dim * tau[..., 0])


TWO, FOUR = (1.0, 3.0), (1.0, 2.0, 4.0, 8.0)


@pytest.mark.parametrize(
    ("temperatures", "pairing", "attempt"),
    [
        (TWO, tr.EvenOdd(), 0),
        (FOUR, tr.EvenOdd(), 0),
        (FOUR, tr.EvenOdd(), 1),
        (FOUR, tr.RandomPair(), 0),
        (FOUR, tr.AllInTurn(), 0),
    ],
)
def test_corrected_swaps_keep_the_joint_law(temperatures, pairing, attempt):
    """Detailed balance: a noisy step of swaps applied to exact draws leaves every marginal and
    every product alone."""
    energy = one_swap_step(temperatures, pairing, attempt=attempt)
    for rung in range(len(temperatures)):
        assert_mean_is(energy[rung], 1.0)
        for other in range(rung):
            assert_mean_is(energy[rung] * energy[other], 1.0)
    naive = one_swap_step(temperatures, pairing, correction_factor=math.inf, attempt=attempt)
    slipped = one_swap_step(temperatures, pairing, known=2 * NOISE_STD**2, attempt=attempt)
    touched = 1 if attempt else 0  # at odd attempts the coldest rung is not in a pair
    assert_mean_is_not(naive[touched], 1.0)
    assert_mean_is_not(slipped[touched], 1.0)


def still_rung_0(n_runs=200_000, **options):
    """Exact draws of a Gaussian ladder that only swap, 12 steps with exact energies; x^2 on rung 0,
    one value a run."""
    z = torch.randn(2, n_runs, 1, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ensemble = tr.TensorEnsemble.start(
        gaussian(1),
        n_rungs=2,
        n_runs=n_runs,
        initial=z * torch.tensor(TWO).sqrt().view(2, 1, 1),
        dtype=torch.float64,
    )
    run = tr.DensityExchange(ensemble, tr.Ladder(TWO, STILL), seed=2, **options)
    *_, last = (block.position[-1, :, 0].square() for block in run.advance(12))
    return last


def test_a_rest_after_swaps_breaks_the_law(caplog):
    """The swap test keeps the law at every step, tested at every step or at every sixth; a rest
    that follows swaps does not."""
    assert_mean_is(still_rung_0(), 1.0)
    assert_mean_is(still_rung_0(swap_interval=6), 1.0)
    assert not caplog.records
    assert_mean_is_not(still_rung_0(swap_rest=5), 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "swap_rest=5" in caplog.text
    caplog.clear()  # the paper's recipes anneal and rest; they sample no law
    ladder = tr.Ladder(TWO, STILL, anneal=tr.schedules.geometric(0.99))
    tr.DensityExchange(tr.TensorEnsemble.start(gaussian(1), n_rungs=2), ladder, swap_rest=5)
    assert not caplog.records


def test_one_noisy_energy_in_two_tests_is_not_exact():
    """Why AllInTurn draws fresh energies for every pair: using the same ones breaks the law."""
    reused = one_swap_step(FOUR, tr.AllInTurn(), reuse_energies=True)
    assert max(abs(z_score(each, 1.0)) for each in reused) > 2 * FALSE_ALARM_SIGMAS


def rung0_variance(lr, *, correction_factor, n_runs=8192, n_steps=600):
    """Per run, the time average of x^2 on rung 0 of a full reSGLD run with noisy energies, sigma2
    estimated on the way."""
    draws = tr.sample(
        tr.Noisy(gaussian(1), tr.Gaussian(NOISE_STD)),
        ladder=tr.Ladder((1.0, 3.0), lr),
        noise=tr.RunningMean(tr.RepeatedDraws(n_draws=20, every=20), initial=NOISE_STD**2),
        correction_factor=correction_factor,
        n_steps=n_steps,
        burn_in=100,
        thin=5,
        n_runs=n_runs,
        initial=torch.randn(2, n_runs, 1, generator=torch.Generator().manual_seed(3))
        * torch.tensor([1.0, 3.0]).sqrt().view(2, 1, 1),
        seed=5,
        compiled=True,
    )
    return draws.values[..., 0].square().mean(1)


def test_resgld_tends_to_the_law_of_rung_0():
    """Var x -> tau / a = 1 linearly in lr, with noise, estimation and correction on; the naive test
    misses it."""
    lrs = [0.02, 0.04, 0.08]
    at_zero, error = intercept(lrs, [rung0_variance(lr, correction_factor=1.0) for lr in lrs])
    assert abs(at_zero - 1.0) < FALSE_ALARM_SIGMAS * error, f"{at_zero} +- {error}"
    assert error < 0.01
    at_zero, error = intercept(lrs, [rung0_variance(lr, correction_factor=math.inf) for lr in lrs])
    assert abs(at_zero - 1.0) > 2 * FALSE_ALARM_SIGMAS * error, (
        f"the naive test passes: {at_zero} +- {error}"
    )


FRICTION = 0.2


def rung0_phase_space(lr, policy, swap_interval, *, ratio=3.0, n_runs=8192, n_steps=1000):
    """x^2 and v^2 / its small-lr value on rung 0 of an SGHMC ladder whose hot rung has `ratio`
    times the lr; per run."""
    ladder = tr.Ladder((1.0, 2.0), (lr, ratio * lr))
    tau = torch.tensor(ladder.temperatures).view(2, 1, 1)
    scale = (tau * torch.tensor(ladder.lrs).view(2, 1, 1) * 2 / (2 - FRICTION)).sqrt()
    z = torch.randn(2, 2, n_runs, 1, generator=torch.Generator().manual_seed(4))
    ensemble = tr.TensorEnsemble.start(
        gaussian(1), tr.SGHMC(FRICTION), n_rungs=2, n_runs=n_runs, initial=z[0] * tau.sqrt()
    )
    ensemble = replace(ensemble, sampler_state=Momentum(z[1] * scale))
    run = tr.DensityExchange(
        ensemble, ladder, momentum=policy, swap_interval=swap_interval, seed=6, compiled=True
    )
    x2, v2, n = torch.zeros(n_runs), torch.zeros(n_runs), 0
    for k in range(0, n_steps, 10):
        for _ in run.advance(10):
            pass
        if k >= 300:
            now, cold = run.ensemble, run.state.replica_at[:1]
            x2 += Selects.take(now.position, cold)[0, :, 0].square()
            v = Selects.take(now.sampler_state.velocity, cold)[0, :, 0]
            v2 += v.square() / float(scale[0]) ** 2
            n += 1
    return x2 / n, v2 / n


@pytest.mark.parametrize(
    ("policy", "swap_interval", "ratio", "x_exact", "v_exact"),
    [
        ("rescale", 1, 3.0, True, True),
        ("refresh", 100, 3.0, True, True),
        # A refreshed momentum forgets that it was pushing back: wrong x if all the time.
        ("refresh", 1, 3.0, False, True),
        ("keep", 1, 3.0, False, False),
        ("keep", 1, 1.0, False, False),  # equal lrs do not help: the temperatures differ
    ],
)
def test_momentum_policy(policy, swap_interval, ratio, x_exact, v_exact):
    """Rescaled momenta keep the law of (x, v) as lr -> 0; refreshed ones if swaps are rare; kept
    ones never, at any lrs."""
    lrs = [0.002, 0.004, 0.008]
    results = [rung0_phase_space(lr, policy, swap_interval, ratio=ratio) for lr in lrs]
    x_zero, x_error = intercept(lrs, [x2 for x2, _ in results])
    v_zero, v_error = intercept(lrs, [v2 for _, v2 in results])
    assert max(x_error, v_error) < 0.02
    if x_exact:
        assert abs(x_zero - 1.0) < FALSE_ALARM_SIGMAS * x_error, f"x^2: {x_zero} +- {x_error}"
    elif policy == "refresh":
        assert abs(x_zero - 1.0) > 2 * FALSE_ALARM_SIGMAS * x_error, f"x^2: {x_zero} +- {x_error}"
    if v_exact:
        assert abs(v_zero - 1.0) < FALSE_ALARM_SIGMAS * v_error, f"v^2: {v_zero} +- {v_error}"
    else:
        assert abs(v_zero - 1.0) > 2 * FALSE_ALARM_SIGMAS * v_error, (
            f"keep passes: {v_zero} +- {v_error}"
        )


def test_swap_intensity_scales_the_acceptance():
    target = gaussian(1)
    common = {"temperatures": (1.0, 1.2), "lr": 0.1, "n_steps": 300, "n_runs": 2000, "seed": 1}
    full = tr.sample(target, **common)
    tenth = tr.sample(target, **common, swap_intensity=1.0)  # r * lr = 0.1
    ratio = (tenth.accepted / tenth.proposed).double().flatten() / float(full.acceptance_rate)
    assert_mean_is(ratio, 0.1)
    assert_mean_is_not(ratio, 0.12)


def test_target_acceptance_is_reached():
    common = {"ladder": tr.Ladder((1.0, 4.0), 0.05), "n_runs": 64, "compiled": True}
    common["noise"] = tr.KnownVariance(9.0)
    target = tr.Noisy(gaussian(1), tr.Gaussian(3.0))
    draws = tr.sample(target, correction_factor=tr.TargetAcceptance(0.2), n_steps=2000, **common)
    assert float(draws.acceptance_rate) == pytest.approx(0.2, abs=0.02)
    assert float(tr.sample(target, n_steps=500, **common).acceptance_rate) < 0.1


def test_a_run_says_which_f_it_has():
    ladder = tr.Ladder(TWO, 0.05, anneal=tr.schedules.geometric(0.99))
    for rule in (2.5, tr.ProportionalToGap(2.0), tr.TargetAcceptance(0.2)):
        ensemble = tr.TensorEnsemble.start(
            tr.Noisy(gaussian(1), tr.Gaussian(3.0)), n_rungs=2, n_runs=3
        )
        run = tr.DensityExchange(
            ensemble, ladder, noise=tr.KnownVariance(9.0), correction_factor=rule, seed=1
        )
        for _ in run.advance(50):
            pass
        now = run.correction_factor
        info = run.step()
        gap = (1 - 1 / 3) / 0.99**50
        assert torch.allclose(now, gap * 9.0 / info.correction.double(), rtol=1e-4)
