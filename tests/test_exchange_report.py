"""What a run says of its exchange: counts, barrier, round trips, cost, and the log evidence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.exchange import SwapCounts, exchange_line
from torchrex.exchange.algorithm import StepInfo
from torchrex.exchange.swap_report import LogEvidence
from torchrex.posterior import log_evidence

# Counts


def by_hand():
    """Three rungs, one run: replica 0 goes up, down and up; replica 2 down, up and down."""
    at = [[0, 1, 2], [0, 2, 1], [2, 0, 1], [2, 1, 0], [1, 2, 0], [1, 0, 2], [0, 1, 2], [0, 2, 1]]
    at += [[2, 0, 1], [2, 1, 0]]
    replica_at = torch.tensor(at)[..., None]
    pair = torch.tensor([-1, 1, 0, 1, 0, 1, 0, 1, 0, 1])  # which swapped
    accepted = (pair[:, None] == torch.arange(2))[..., None]
    proposed = torch.ones_like(accepted)
    proposed[0] = False
    sigma2 = torch.rand(10, 2, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    correction = torch.where(proposed, 0.1, math.nan)
    energy = torch.zeros(10, 3, 1)
    return StepInfo(energy[..., :0], energy, accepted, proposed, sigma2, correction, replica_at)


def counted(*cuts):
    infos, counts = by_hand(), SwapCounts.start(torch.tensor([[0], [1], [2]]))
    for first, last in zip((0, *cuts), (*cuts, 10), strict=True):
        part = StepInfo(*(values[first:last] for values in infos))
        counts = counts.after(part, step=first)
    return counts


def test_counts_of_a_history_by_hand():
    counts = counted()
    assert counts.accepted.flatten().tolist() == [4, 5]
    assert counts.proposed.flatten().tolist() == [9, 9]
    # Replica 0 is on rung 0, at the top (row 3), on rung 0 (row 6), at the top (row 9).
    # Replica 1 is at the top (row 1), on rung 0 (row 4), at the top (row 7).
    # Replica 2 begins at the top, is on rung 0 (row 2), at the top (row 5), on rung 0 (row 8).
    assert counts.restarts.flatten().tolist() == [1, 1, 2]
    assert counts.first_end.flatten().tolist() == [0, 2, 2]
    assert counts.end.flatten().tolist() == [2, 2, 0]
    sigma2 = by_hand().noise_variance[1:].sum(0)
    assert torch.allclose(counts.noise[0], sigma2)
    assert counts.noise[1].flatten().tolist() == [9, 9]


def test_counts_do_not_depend_on_where_a_run_is_cut():
    whole = counted()
    for cuts in ((1,), (5,), (3, 4, 9), tuple(range(1, 10))):
        for a, b in zip(whole[1:], counted(*cuts)[1:], strict=True):
            assert torch.equal(a, b)
    every = SwapCounts.start(torch.tensor([[0], [1], [2]])).after(by_hand(), every=3)
    assert every.accepted.sum() == 9
    assert every.noise[1].flatten().tolist() == [3, 3]  # rows 3, 6 and 9
    latest = SwapCounts.start(torch.tensor([[0], [1], [2]])).after(by_hand(), latest=True)
    assert torch.equal(latest.noise[0], by_hand().noise_variance[-1])


# Densities

N, CENTRE, PRIOR = 64, 1.5, 0.5
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, math.inf)


def conjugate(batch_size=16):
    """The mean of Gaussian data of variance 1, whose empirical variance is 1/16."""
    y = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = CENTRE + 0.25 * (y - y.mean()) / y.std(correction=0)
    prior = Normal(*torch.tensor([0.0, math.sqrt(PRIOR)], dtype=torch.float64))

    def log_likelihood(x, y):
        return -0.5 * (y - x.squeeze(-1)).square() - 0.5 * math.log(2 * math.pi)

    return tr.TallPosterior(log_likelihood, prior, (y,), 1, batch_size=batch_size)


def evidence_of_conjugate():
    (y,) = conjugate().data
    covariance = torch.eye(N, dtype=torch.float64) + PRIOR
    return float(MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y))


def density_run(**rules):
    ensemble = tr.TensorEnsemble.start(conjugate(), n_rungs=3, n_runs=4, dtype=torch.float64)
    ladder = tr.Ladder((1.0, 1.5, 2.25), 1e-3)
    return tr.DensityExchange(ensemble, ladder, seed=3, **rules)


def test_a_run_and_its_draws_report_the_same():
    run = density_run(swap_batch=32, swap_interval=5)
    draws = tr.collect(run, 400)
    mine, theirs = run.exchange(), draws.exchange()
    assert [(p.accepted, p.proposed) for p in mine.pairs] == [
        (p.accepted, p.proposed) for p in theirs.pairs
    ]
    assert mine.round_trips == theirs.round_trips > 0
    assert mine.restarts == theirs.restarts
    assert mine.exact
    assert theirs.exact
    assert mine.swap_cost == theirs.swap_cost == 32 / 5 / 16
    assert mine.barrier == pytest.approx(float((1.0 - draws.acceptance_rate).sum()))
    noise = draws.noise_variance[::5].mean((0, 2))  # of the steps with a test
    assert [p.noise_variance for p in mine.pairs] == pytest.approx(noise.tolist())
    assert mine.log_evidence is None
    text = str(mine)
    assert f"barrier {mine.barrier:.3g}, " in text
    assert "swap cost 40 % of the moves" in text
    assert text.splitlines()[0].startswith("rungs  accepted  proposed")
    assert str(theirs).splitlines()[1] in draws.summary()
    assert "\n" not in repr(mine)


def test_what_is_not_known_is_said():
    run = density_run()
    assert "no swap was tested" in str(run.exchange())
    thinned = tr.collect(run, 400, thin=7)
    assert "at least" in str(thinned.exchange())
    assert run.exchange().swap_cost == 0.0
    mixture = tr.GaussianMixture([0.4, 0.6], means=[-3.0, 2.0], stds=[0.7, 0.5])
    draws = tr.sample(mixture, temperatures=(1.0, 4.0), lr=0.03, n_steps=200)
    assert math.isnan(draws.exchange().swap_cost)
    assert "swap cost" not in str(draws.exchange())
    one = tr.sample(mixture, temperatures=(1.0,), lr=0.03, n_steps=20)
    assert str(one.exchange()) == "no swap was tested"
    later = tr.DensityExchange(
        tr.TensorEnsemble.start(mixture, n_rungs=2), tr.Ladder((1.0, 4.0), 0.03)
    )
    list(later.advance(200))
    assert not later.exchange().exact


def test_large_counts_are_written_out():
    line = exchange_line({"barrier": 0.888, "round_trips": 1863.4, "restarts": 88.25})
    assert "barrier 0.888" in line
    assert "1,863 round trips and 88.2 restarts" in line


def test_a_resumed_density_reports_as_if_it_had_not_stopped():
    for rules in ({}, {"swap_batch": 32, "swap_interval": 5}):
        whole, first, second = density_run(**rules), density_run(**rules), density_run(**rules)
        list(whole.advance(157))
        list(first.advance(83))
        state = first.state_dict()
        second.load_state_dict(state)
        for _ in range(74):
            second.step()
        assert second.exchange() == whole.exchange()
        old = density_run(**rules)
        old.load_state_dict({name: x for name, x in state.items() if name != "counts"})
        list(old.advance(74))
        assert "(of the last 74 steps)" in str(old.exchange())


# Networks


def module_run(**rules):
    energy = tr.PosteriorEnergy(
        lambda out, y: 0.5 * (out.squeeze(-1) - y).square(), n_data=40, prior=tr.GaussianPrior(1.0)
    )
    torch.manual_seed(0)
    ensemble = tr.ModuleEnsemble(lambda: nn.Linear(2, 1), energy, initial="independent")
    return tr.ModuleExchange(ensemble, tr.Ladder((1.0, 1.2, 1.5), 1e-3), seed=1, **rules)


def loader():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    return tr.DeviceLoader((x, x.sum(1)), 8, seed=0)


def test_networks_report_after_training_and_after_a_loop(tmp_path):
    rules = {"swap_batch": 24, "swap_interval": 5}
    trained, traced = module_run(**rules), tr.Trace()
    tr.train(trained, loader(), 300, trace=traced)
    report = trained.exchange()
    tensors = traced.tensors()
    assert [p.accepted for p in report.pairs] == tensors["accepted"].tolist()
    assert [p.proposed for p in report.pairs] == tensors["proposed"].tolist()
    assert sum(p.accepted for p in report.pairs) > 0
    history = tr.diagnostics.History.from_traces([tensors], trained.rules.ladder)
    travel = tr.diagnostics.round_trips(history)
    assert (report.round_trips, report.restarts) == (
        travel.round_trips.sum(),
        travel.restarts.sum(),
    )
    assert report.restarts > 0
    assert report.swap_cost == 24 / 5 / 8
    looped, data = module_run(**rules), loader()
    for step in range(300):
        if step % 5 == 0:
            looped.swap(data.swap_batches(step, 24))
        looped.step(data.next())
    assert looped.exchange() == report
    for n_steps in (123, 300):  # stopped, and resumed in another run
        resumed = module_run(**rules)
        tr.train(resumed, loader(), n_steps, checkpoints=tmp_path, checkpoint_every=50)
    assert resumed.exchange() == report


def test_looking_changes_no_number():
    looked_at, left_alone = module_run(), module_run()
    data, same_data = loader(), loader()
    for _ in range(20):
        a, b = looked_at.step(data.next()), left_alone.step(same_data.next())
        looked_at.exchange()
        assert torch.equal(a.energy, b.energy)
    assert looked_at.exchange() == left_alone.exchange()
    assert looked_at.exchange().swap_cost == 0.0


# The log evidence

BETA = 1.0 / torch.tensor(TEMPERATURES, dtype=torch.float64)


def exact_energies(n_draws, n_repeats, noise_std=0.0):
    """Independent draws of every rung: L (repeats, draws, rungs, 1), with noise if asked for."""
    generator = torch.Generator().manual_seed(1)
    (y,) = conjugate().data
    stiffness = N * BETA + 1.0 / PRIOR
    z = torch.randn(n_repeats, n_draws, len(BETA), generator=generator, dtype=torch.float64)
    x = N * CENTRE * BETA / stiffness + z / stiffness.sqrt()
    constant = 0.5 * N * math.log(2 * math.pi) + 0.5 * float((y - CENTRE).square().sum())
    energy = constant + 0.5 * N * (x - CENTRE).square()
    noise = torch.randn(energy.shape, generator=generator, dtype=torch.float64)
    return (energy + noise_std * noise)[..., None]


def z_scores(energies, temperatures=TEMPERATURES, which="integration"):
    found = [log_evidence(each, torch.tensor(temperatures)) for each in energies]
    truth = evidence_of_conjugate()
    return torch.tensor([(getattr(e, which) - truth) / getattr(e, f"{which}_error") for e in found])


def test_both_estimates_have_the_errors_that_they_state():
    """Independent draws of the exact laws, 200 times. The mutant takes the term of a pair from its
    colder rung.
    """
    energies = exact_energies(1_000, 200)
    for which in ("integration", "stepping_stones"):
        z = z_scores(energies, which=which)
        assert_mean_is(z, 0.0)
        assert z.abs().max() < 4.5
        assert 0.5 < float(z.std()) < 1.2  # the integration adds the error of its rule
    cold = torch.cat([energies[:, :, :1], energies[:, :, :-1]], 2)
    assert_mean_is_not(z_scores(cold, which="stepping_stones"), 0.0)
    slow = energies[:20].sort(1).values  # in an order that no mixing chain has: larger errors
    assert float(z_scores(slow).std()) < 0.2


def test_noise_averages_out_of_the_integral_and_not_of_stepping_stones():
    """Noise of sd 1.5, as that of a minibatch, makes stepping stones too large: why they are left
    out then. The mutant of the integral is the trapezoid.
    """
    energies = exact_energies(2_000, 100, noise_std=1.5)
    assert_mean_is(z_scores(energies), 0.0)
    assert_mean_is_not(z_scores(energies, which="stepping_stones"), 0.0)
    trapezoid = -torch.trapezoid(energies.mean(1)[..., 0].flip(1), BETA.flip(0))
    assert_mean_is_not(trapezoid, evidence_of_conjugate())
    found = log_evidence(energies[0], torch.tensor(TEMPERATURES), noise="because")
    assert math.isnan(found.stepping_stones)
    assert "(because;" in str(found)


def assert_right(draws, truth, *, stones=True):
    """|z| < 4: 6e-5 a time."""
    found = draws.exchange().log_evidence
    assert abs(found.integration - truth) < 4 * found.integration_error < 1.0
    if stones:
        assert abs(found.stepping_stones - truth) < 4 * found.stepping_stones_error < 1.0
    assert math.isnan(found.stepping_stones) is not stones
    assert "log evidence: " in draws.summary()


@pytest.mark.parametrize("swap_batch", ["full", 32, None])
def test_evidence_of_a_conjugate_gaussian(swap_batch):
    draws = tr.sample(
        conjugate(),
        temperatures=TEMPERATURES,
        lr=0.02 / N,
        n_steps=1_500,
        n_runs=24,
        tempering="likelihood",
        swap_batch=swap_batch,
        swap_interval=2,
        dtype=torch.float64,
    )
    assert_right(draws.after(300), evidence_of_conjugate(), stones=swap_batch == "full")
    assert (draws.after(300).exchange().log_evidence.note == "") is (swap_batch == "full")


def test_evidence_of_a_mixture():
    """Two means, of 30 and 70 % of the data: two modes, and their exchange. By quadrature."""
    generator = torch.Generator().manual_seed(2)
    y = torch.randn(50, generator=generator, dtype=torch.float64)
    y[:15] += 2.0
    y[15:] -= 1.0
    log_share = torch.tensor([0.3, 0.7], dtype=torch.float64).log()

    def log_likelihood(x, y):
        terms = -0.5 * (y[..., None] - x).square() - 0.5 * math.log(2 * math.pi)
        return (log_share + terms).logsumexp(-1)

    prior = Normal(*torch.tensor([0.0, 2.0], dtype=torch.float64))
    target = tr.TallPosterior(log_likelihood, prior, (y,), 2, batch_size=50)
    axis = torch.linspace(-9.0, 9.0, 721, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    log_density = torch.cat([-target.full_energy(part) for part in grid.split(20_000)])
    truth = float(log_density.logsumexp(0) + 2 * math.log(18.0 / 720))
    draws = tr.sample(
        target,
        temperatures=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, math.inf),
        lr=0.02 / 50,
        n_steps=2_000,
        n_runs=16,
        thin=4,
        burn_in=401,
        tempering="likelihood",
        swap_batch="full",
        swap_interval=2,
        dtype=torch.float64,
    )
    in_first = (draws.values[..., 0] > draws.values[..., 1]).double().mean()
    assert float(in_first) > 0.02  # of the two modes
    assert_right(draws, truth)


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x))


def test_evidence_of_a_network_from_its_trace():
    energy = tr.PosteriorEnergy(
        lambda out, y: 0.5 * (out - y).square() + 0.5 * math.log(2 * math.pi),
        n_data=N,
        prior=tr.GaussianPrior(1 / PRIOR),
    )
    ladder = tr.Ladder.for_likelihood(TEMPERATURES, 0.05 / N, prior_variance=PRIOR)
    run = tr.ModuleExchange(
        tr.ModuleEnsemble(Weight, energy), ladder, tempering="likelihood", seed=0
    )
    trace = tr.Trace()
    tr.train(run, tr.DeviceLoader((torch.zeros(N), *conjugate().data), 16), 1_200, trace=trace)
    energies = trace.tensors()["energy"][200:, :, None]
    found = log_evidence(energies, torch.tensor(ladder.temperatures), noise="minibatches")
    assert abs(found.integration - evidence_of_conjugate()) < 4 * found.integration_error < 2.0


def test_draws_before_the_first_test_of_a_swap_batch_have_no_energy():
    """The run has made three steps before, and tests at every fifth."""
    ladder = tr.Ladder.for_likelihood((1.0, 4.0, 16.0, math.inf), 0.02 / N, prior_variance=PRIOR)
    ensemble = tr.TensorEnsemble.start(conjugate(), n_rungs=4, dtype=torch.float64)
    rules = {"tempering": "likelihood", "swap_batch": "full", "swap_interval": 5}
    run = tr.DensityExchange(ensemble, ladder, seed=1, **rules)
    list(run.advance(3))
    draws = tr.collect(run, 100)
    assert draws.energy.isnan().flatten(1).all(1).tolist() == [True, True] + 98 * [False]
    found = draws.exchange().log_evidence
    assert (
        found == replace(draws, energy=draws.energy[2:]).exchange().log_evidence
    )  # the first two are left out
    assert found != replace(draws, energy=draws.energy + 1.0).exchange().log_evidence


def test_two_estimates_of_the_evidence_that_disagree_say_so():
    """Three standard errors of their difference, 0.5 here, are the limit."""
    for apart, disagree in ((1.4, False), (1.6, True)):
        line = str(LogEvidence(0.0, 0.3, apart, 0.4))
        assert ("the two disagree" in line) == disagree
        assert "errors leave out the bias of the learning rate" in line
