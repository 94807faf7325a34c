"""One step, looked at closely, on four rungs, so that a permutation is not its own inverse: moves,
records, measurements.
"""

from __future__ import annotations

import math

import pytest
import torch

import torchrex as tr
from assertions import assert_mean_is
from torchrex.density import run as density_run
from torchrex.density.loop import draw_block, measured_steps
from torchrex.exchange.algorithm import ExchangeState, Rules, measure
from torchrex.exchange.assignment import Selects
from torchrex.rng import Streams
from torchrex.targets import Energy

TINY = (1e-24, 2e-24, 3e-24, 4e-24)  # temperatures at which nothing random is left
LRS = (0.1, 0.2, 0.4, 0.8)
PAIR = tr.Ladder((1.0, 2.0), 0.1)
MIXTURE = tr.GaussianMixture([0.4, 0.6], [-3.0, 2.0], [0.7, 0.5])


def slope():
    """A density with gradient 1 everywhere and energy 0: every test accepts, and a move shows the
    lr of the rung."""
    return tr.LogDensity(lambda x: 0.0 * x.sum(-1), 1, gradient=torch.ones_like)


def rungs_of(replica_at):
    """The rung of each replica, found the slow way: (replicas, runs)."""
    rung_of = torch.empty_like(replica_at)
    for run in range(replica_at.shape[1]):
        for rung, replica in enumerate(replica_at[:, run].tolist()):
            rung_of[replica, run] = rung
    return rung_of.long()


@pytest.mark.parametrize("pairing", [tr.EvenOdd(), tr.RandomPair(), tr.AllInTurn()])
def test_every_replica_moves_with_the_lr_of_its_rung(pairing):
    run = tr.DensityExchange(
        tr.TensorEnsemble.start(slope(), n_rungs=4, n_runs=3), tr.Ladder(TINY, LRS), pairing=pairing
    )
    orders = set()
    for _ in range(12):
        before = run.ensemble.position
        info = run.step()
        moved = (run.ensemble.position - before)[..., 0]
        assert torch.allclose(moved, torch.tensor(LRS)[rungs_of(info.replica_at)])
        orders.add(tuple(info.replica_at[:, 0].tolist()))
    assert any(
        rungs_of(torch.tensor(order)[:, None])[:, 0].tolist() != list(order) for order in orders
    ), "no proper permutation"


def test_what_is_recorded():
    """Energies are those of the rungs before the swaps; the position is that of rung 0 after the
    move."""
    target = tr.LogDensity(lambda x: -0.5 * x.square().sum(-1), 2)
    start = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0))
    run = tr.DensityExchange(
        tr.TensorEnsemble.start(target, n_rungs=4, n_runs=5, initial=start),
        tr.Ladder((1.0, 1.5, 2.0, 3.0), 0.1),
    )
    n_swaps = 0
    for _ in range(30):
        stood, position = run.state.replica_at, run.ensemble.position
        info = run.step()
        at_rung = torch.stack([position[stood[:, b].long(), b] for b in range(5)], dim=1)
        assert torch.allclose(info.energy, 0.5 * at_rung.square().sum(-1))
        coldest = torch.stack(
            [run.ensemble.position[info.replica_at[0, b].long(), b] for b in range(5)]
        )
        assert torch.equal(info.position, coldest)
        assert torch.equal(info.replica_at, run.state.replica_at)
        for pair in range(3):  # a swap was made where the records say so, and nowhere else
            exchanged = (info.replica_at[pair] == stood[pair + 1]) & (
                info.replica_at[pair + 1] == stood[pair]
            )
            assert torch.equal(info.accepted[pair], exchanged)
        n_swaps += int(info.accepted.sum())
    assert n_swaps > 50


class LouderOutside(tr.Target):
    """The noise of its energy is as large as the position."""

    dim, has_noise = 1, True

    def draw_noise(self, generator, n, shape, dtype):
        return {"z": torch.randn(n, *shape, generator=generator, dtype=dtype)}

    def energy(self, position, noise):
        return Energy(position[..., 0] * noise["z"])


def test_measurement_looks_at_the_replicas_on_the_rungs():
    rules = Rules(
        tr.Ladder((1.0, 2.0, 3.0), 0.1), noise=tr.RunningMean(tr.RepeatedDraws(4000, every=1))
    )
    loudness = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    ensemble = tr.TensorEnsemble.start(LouderOutside(), n_rungs=3, initial=loudness)
    state = ExchangeState.start(rules, 1, device=torch.device("cpu"), dtype=torch.float32)
    state = state._replace(replica_at=torch.tensor([[1], [2], [0]], dtype=torch.int32))
    z = torch.randn(4000, 3, 1, generator=torch.Generator().manual_seed(0))
    after = measure(ensemble, state, {"z": z}, rules)
    at_rung = Selects.take(loudness[..., 0], state.replica_at)[:, 0].square()
    expected = 0.5 * (at_rung[:-1] + at_rung[1:])
    assert torch.allclose(after.noise_variance[:, 0], expected, rtol=0.15)  # 10 standard errors
    assert (after.noise_updates == 1.0).all()


def test_energies_of_another_precision_are_taken_in():
    """A float64 density in a float32 ensemble gives the same numbers, compiled or not."""
    target = tr.Noisy(
        tr.LogDensity(lambda x: -0.5 * x.double().square().sum(-1), 1), tr.Gaussian(3.0)
    )
    factors = []
    for compiled in (False, True):
        run = tr.DensityExchange(
            tr.TensorEnsemble.start(target, n_rungs=2, n_runs=4),
            tr.Ladder((1.0, 4.0), 0.05),
            noise=tr.KnownVariance(30.0),
            correction_factor=tr.TargetAcceptance(0.3, gain=0.02),
            compiled=compiled,
        )
        for _ in run.advance(300):
            pass
        factors.append(run.state.correction_factor)
    assert factors[0].dtype == torch.float32
    assert torch.allclose(*factors, rtol=1e-3)


def test_a_density_that_writes_in_place_is_compiled_right():
    def writes_in_place(x):
        return (-0.5 * x.square().sum(-1)).masked_fill_(x[:, 0] > 1.0, -8.0)

    common = {"dim": 2, "n_steps": 300, "n_runs": 4, "dtype": torch.float64, "ladder": PAIR}
    compiled, eager = (tr.sample(writes_in_place, compiled=c, **common) for c in (True, False))
    assert torch.allclose(compiled.values, eager.values, atol=1e-9)
    assert (eager.values[..., 0] > 1.0).any()


def test_an_index_out_of_bounds_in_the_compiled_loop_is_an_error_not_a_crash():
    table = torch.linspace(-3.0, 3.0, 61).square().neg() * 0.5

    def looked_up(x):
        return table[((x[:, 0] + 3.0) * 10.0).long()] + 0.0 * x.sum(-1)

    with pytest.raises(tr.TorchrexError, match="index out of bounds"):
        tr.sample(looked_up, dim=1, ladder=PAIR, n_steps=20_000, n_runs=4, compiled=True)


@pytest.mark.parametrize("where", ["_choose_loop", "draw_block", "run"])
def test_after_ctrl_c_a_run_goes_on_as_if_nothing_had_happened(where, monkeypatch):
    """Before the first step of a block, and in a stretch, which is then taken back.

    The mutant takes the generators as they are after the block was drawn."""

    def make():
        target = tr.Noisy(MIXTURE, tr.Gaussian(2.0))
        ensemble = tr.TensorEnsemble.start(target, n_rungs=2, n_runs=4)
        return tr.DensityExchange(ensemble, tr.Ladder((1.0, 10.0), 0.03), compiled=where == "run")

    run, resumed, undisturbed = make(), make(), make()
    if where == "run":
        list(run.advance(10))
    owner = {"_choose_loop": run, "draw_block": density_run, "run": run._loop}[where]
    plain = getattr(owner, where)

    def interrupted(*arguments):
        if where != "_choose_loop":
            plain(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(run.advance(20))
    done = run.n_steps
    assert done == (10 if where == "run" else 0)
    resumed.load_state_dict(run.state_dict())
    for each, n in ((run, 20), (resumed, 20), (undisturbed, 20 + done)):
        list(each.advance(n))
    assert torch.equal(run.ensemble.position, undisturbed.ensemble.position)
    assert torch.equal(resumed.ensemble.position, undisturbed.ensemble.position)


def test_sigma2_is_measured_at_the_start_and_every_so_many_steps():
    """Without an initial variance the first steps would be naive; with one it holds until step
    `every`, as in the paper."""
    ladder, draws = tr.Ladder((1.0, 2.0), 0.1), tr.RepeatedDraws(10, every=100)
    rules = Rules(ladder, noise=tr.RunningMean(draws))
    assert list(measured_steps(rules, 0, 350)) == [0, 100, 200, 300]
    given = Rules(ladder, noise=tr.RunningMean(draws, initial=100.0))
    assert list(measured_steps(given, 0, 350)) == [100, 200, 300]
    assert list(measured_steps(rules, 200, 301)) == [200, 300]
    assert not measured_steps(rules, 101, 200)


@pytest.mark.parametrize(
    ("ladder", "difference", "rules", "rate"),
    [
        (tr.Ladder((1.0, 2.0), (0.1, 0.3)), 0.0, {"swap_intensity": 2.0}, 0.2),  # r * cold lr
        # Halved temperatures double the inverse gap: exp(-1) instead of exp(-1/2).
        (tr.Ladder((1.0, 2.0), 0.1, anneal=lambda step: 0.5), 1.0, {}, math.exp(-1.0)),
    ],
)
def test_the_rate_of_the_first_swaps(ladder, difference, rules, rate):
    """When the hot replica's energy is higher by `difference`."""
    start = torch.tensor([0.0, difference]).view(2, 1, 1)
    ensemble = tr.TensorEnsemble.start(
        tr.LogDensity(lambda x: -x[:, 0], 1), n_rungs=2, n_runs=200_000, initial=start
    )
    assert_mean_is(tr.DensityExchange(ensemble, ladder, **rules).step().accepted[0], rate)


def test_the_first_gap_is_that_of_step_0():
    ladder = tr.Ladder((1.0, 2.0), 0.1, anneal=tr.schedules.geometric(0.9))
    run = tr.DensityExchange(tr.TensorEnsemble.start(slope(), n_rungs=2), ladder)
    later = draw_block(Streams(0), run.rules, run.ensemble, 64, 3).inputs
    assert torch.allclose(later.first_gap, torch.full((3, 1), 0.5))
    assert torch.allclose(later.temperature[0], torch.tensor([1.0, 2.0]) * 0.9**64)


def test_a_failure_names_the_replica_and_where_it_stood():
    def breaks(x):
        return torch.where(x[:, 0] > 2.0, float("nan"), 0.0 * x[:, 0])

    target = tr.LogDensity(breaks, 1, gradient=torch.ones_like)
    run = tr.DensityExchange(tr.TensorEnsemble.start(target, n_rungs=4), tr.Ladder(TINY, LRS))
    while True:
        stood, position = rungs_of(run.state.replica_at)[:, 0], run.ensemble.position[:, 0, 0]
        try:
            run.step()
        except tr.TorchrexError as raised:
            error = raised
            break
    failed = (position > 2.0).nonzero()[:, 0].tolist()
    coldest = min(failed, key=lambda replica: int(stood[replica]))
    assert (error.replica, error.rung) == (coldest, int(stood[coldest]))
    assert error.replica != error.rung, "nothing was told apart"


def test_every_round_of_a_step_is_recorded():
    run = tr.DensityExchange(
        tr.TensorEnsemble.start(slope(), n_rungs=4, n_runs=3),
        tr.Ladder(TINY, LRS),
        pairing=tr.AllInTurn(),
    )
    info = run.step()
    assert info.accepted.all()  # equal energies: all three pairs swap, one after the other
    assert info.replica_at[:, 0].tolist() == [1, 2, 3, 0]


def test_no_step_of_repeated_draws_is_naive():
    """The mutant measured first at step 100 and had sigma2 = 0 until then."""
    target = tr.Noisy(tr.GaussianMixture([1.0], [0.0], [1.0]), tr.Gaussian(3.0))
    draws = tr.sample(target, temperatures=(1.0, 4.0), lr=0.1, n_steps=20, n_runs=64)
    assert bool((draws.noise_variance > 1.0).all())
