"""The model behind `tune`, what it chooses, and what it refuses."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, IterableDataset

import torchrex as tr
from modules import classes, cross_entropy, mlp, same
from torchrex.errors import InvalidArgumentError, NoiseError, NonFiniteEnergyError, RunInterrupted
from torchrex.exchange import count_trips, rung_of
from torchrex.tuning import rounds
from torchrex.tuning.model import Lengths, Setting, nearest, swap_waits
from torchrex.tuning.trials import Memory

CENTRES = 4.0 * torch.tensor([[0.0, 0.0], [1, 1], [-1, 1], [1, -1], [-1, -1]])
SIZES = [None, *(256 * 2**k for k in range(1, 9)), 100_000]


def five_modes(x):
    return torch.logsumexp(-2.0 * (x[:, None] - CENTRES).square().sum(-1), -1)


def regular(*, d=4, n_data=100_000, batch=256, hot=10.0, relaxation=2_000.0):
    """Between temperatures 1 and `hot`, of a Gaussian posterior of d parameters."""
    inverse = hot ** (-torch.linspace(0, 1, 41, dtype=torch.float64))
    temperature, gap = 1.0 / inverse, -inverse.diff()
    heat = (2.0 * gap * d / 2 * temperature.diff()).sqrt()
    variance = d * (temperature[:-1] + temperature[1:]) / n_data
    return Lengths(inverse, heat, variance, relaxation, batch, n_data)


def test_the_lengths_are_those_of_the_theory():
    """Heat sqrt(d) log(T), noise 2 sqrt(2 d N / n) (1 - T^-1/2); with all data no noise."""
    lengths = regular()
    assert float(lengths.heat.sum()) == pytest.approx(2 * math.log(10), rel=1e-3)
    noise = 2 * math.sqrt(2 * 4 * 100_000 / 256) * (1 - 10**-0.5)
    assert float(lengths.noise(None).sum()) == pytest.approx(noise, rel=1e-2)
    assert float(lengths.noise(100_000).sum()) == 0.0


def test_visits_are_those_of_a_simulation():
    """Renewed visits per million minibatches, measured on logistic regression with d = 4
    (benchmarks/results/swap_energies.json); the model knows no more than a factor of 3, but the
    order, in which many close rungs on the step's own batch come last.
    """
    lengths = regular(relaxation=2_200.0)
    measured = {(4, 20_000, 50): 14.5, (8, 5_000, 20): 12.5, (32, None, 1): 6.6, (60, None, 1): 2.6}
    visits = {each: 256e6 / lengths.examples_a_visit(Setting(*each)) for each in measured}
    assert sorted(visits, key=visits.__getitem__) == sorted(measured, key=measured.__getitem__)
    assert all(1.0 < visits[each] / measured[each] < 3.0 for each in measured), visits


def test_a_label_that_is_faster_than_its_replica_brings_nothing_new():
    """Twice as many trips within a relaxation are worth as much, and cost more."""
    slow, fast = Setting(6, 100_000, 50), Setting(6, 100_000, 25)
    lengths = regular(relaxation=1e6)
    cost = lengths.examples_a_step(fast) / lengths.examples_a_step(slow)
    ratio = lengths.examples_a_visit(fast) / lengths.examples_a_visit(slow)
    assert ratio == pytest.approx(cost, rel=0.01)
    quick = regular(relaxation=1.0)
    assert quick.examples_a_visit(fast) < quick.examples_a_visit(slow)


def test_memory_is_that_of_a_walk_between_two_walls():
    """1,000 walkers on 6 rungs that go up, down or nowhere, each by a third: what is left of the
    slowest mode after t steps is (1 - 2 / 3 (1 - cos(pi / 6)))^t. Its error is that between groups.
    """
    generator = torch.Generator().manual_seed(0)
    at, path = torch.randint(6, (6, 1_000), generator=generator), []
    for _ in range(40):
        at = (at + torch.randint(-1, 2, at.shape, generator=generator)).clamp(0, 5)
        path.append(at)
    whole = Memory.of(torch.stack(path))
    assert whole.lag == 10
    expected = (1 - 2 / 3 * (1 - math.cos(math.pi / 6))) ** 10
    assert abs(whole.value - expected) < 5 * whole.error
    groups = torch.tensor([Memory.of(g).value for g in torch.stack(path).split(20, 2)])
    assert whole.error == pytest.approx(float(groups.std()) / math.sqrt(50), rel=0.3)


def test_the_model_knows_what_replicas_remember():
    """Swaps by halves at each test: a replica goes on in its direction or turns, so (R - 1) / D is
    2 (R - 1) tests; with many rungs the 2 tests more at the ends are few.
    """
    inverse = 10.0 ** (-torch.linspace(0, 1, 41, dtype=torch.float64))
    heat = torch.full((40,), 1.349, dtype=torch.float64)  # 2 Phi(-1.349 / 2) = 0.5
    lengths = Lengths(inverse, heat, torch.zeros(40), 1.0, 256, 100_000)
    generator, lag = torch.Generator().manual_seed(0), 160
    replica_at, path = torch.arange(41)[:, None].repeat(1, 20), []
    for test in range(4 * lag):
        low = torch.arange(test % 2, 40, 2)
        swap = torch.rand(len(low), 20, generator=generator) < 0.5
        cold, hot = replica_at[low], replica_at[low + 1]
        replica_at = replica_at.clone()
        replica_at[low] = torch.where(swap, hot, cold)
        replica_at[low + 1] = torch.where(swap, cold, hot)
        path.append(replica_at)
    seen = Memory.of(torch.stack(path).argsort(1))
    assert lengths.memory(Setting(41, 100_000, 1), seen.lag) == pytest.approx(
        seen.value, abs=5 * seen.error + 0.05 * (1 - seen.value)
    )


def test_few_rungs_reach_a_part_of_the_temperatures():
    """Between exact energies the length of d parameters is sqrt(d) log(T)."""
    reached = regular().up_to(3.0, 100_000)
    assert reached.total(100_000) == pytest.approx(3.0, rel=1e-3)
    assert float(reached.inverse[-1]) == pytest.approx(math.exp(-3.0 / 2), rel=1e-3)
    assert regular().up_to(5.0, 100_000).total(100_000) == pytest.approx(2 * math.log(10), 1e-3)


def test_few_rungs_have_a_swap_batch():
    best = regular().best(6, SIZES, (1, 5, 20, 100))
    assert best.swap_batch is not None
    assert best.n_rungs <= 6


def test_temperatures_are_in_equal_steps_of_heat():
    temperatures = regular().temperatures(Setting(5, 100_000, 1))  # no noise: equal ratios
    assert temperatures == pytest.approx([10 ** (k / 4) for k in range(5)], rel=1e-3)
    assert temperatures[0] == 1.0
    assert temperatures[-1] == 10.0


@pytest.mark.parametrize("heat", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("noise", [0.0, 1.7])
def test_a_swap_takes_the_tests_that_the_acceptance_says(heat, noise):
    """With new energies at every test it is 1 over the mean acceptance."""
    length = math.sqrt(heat**2 + noise**2)
    mean = math.erfc(length / math.sqrt(8))
    assert swap_waits(heat, noise, 1.0) == pytest.approx(1 / mean, rel=0.01)
    # Energies that stay as they are make a swap wait longer, noise alone does not.
    more = swap_waits(heat, noise, 50.0)
    assert more == pytest.approx(1 / mean, rel=0.01) if heat == 0 else more > 1 / mean


def test_the_nearest_temperature_is_that_in_ratio():
    there = torch.tensor([1.0, 0.1, 0.01, 0.0])
    assert nearest(torch.tensor([1.0, 0.4, 0.2, 0.011, 0.0]), there) == [0, 0, 1, 2, 3]


@pytest.fixture(scope="module")
def tuned():
    return tr.tune(five_modes, dim=2, lr=0.02, n_steps=30_000, n_runs=8, seed=1, show=False)


def test_five_modes_are_tuned_without_a_number(tuned):
    assert not tuned.advice
    assert tuned.ladder.temperatures[0] == 1.0
    assert tuned.ladder.temperatures[-1] > 5
    last = tuned.rounds[-1]
    assert last.mean - last.least < 0.15, "equal rejection"
    cost = 30_000 * 8 * tuned.ladder.n_rungs
    assert tuned.examples <= 0.1 * cost


def test_all_five_modes_have_their_weight(tuned):
    """Each run's shares of the five modes against a fifth, by the spread between 32 runs: five
    values of t with 31 degrees of freedom, of which one beyond 4.3 comes once in 1,300 times.
    """
    draws = tr.sample(
        five_modes, dim=2, ladder=tuned, n_steps=4_000, burn_in=1_000, n_runs=32, thin=20, seed=7
    )
    mode = torch.cdist(draws.values.double(), CENTRES.double()).argmin(-1)
    shares = torch.stack([(mode == k).double().mean(1) for k in range(5)])
    z = (shares.mean(1) - 0.2) / (shares.std(1) / math.sqrt(32))
    assert float(z.abs().max()) < 4.3, z
    # And it can fail: one chain stays where it is.
    alone = tr.sample(
        five_modes, dim=2, temperatures=(1.0,), lr=0.02, n_steps=6_000, n_runs=32, thin=20,
        initial=Normal(0.0, 0.1),
    )  # fmt: skip
    assert float((torch.cdist(alone.values, CENTRES).argmin(-1) == 0).double().mean()) > 0.9


def test_the_seed_decides(tuned):
    again = tr.tune(five_modes, dim=2, lr=0.02, n_steps=30_000, n_runs=8, seed=1, show=False)
    assert repr(again) == repr(tuned)


def test_auto_is_tune_and_then_sample(capsys):
    options = {"dim": 2, "n_steps": 1_000, "n_runs": 2, "seed": 3}
    draws = tr.sample(five_modes, ladder="auto", lr=0.02, **options)
    tuned = tr.tune(five_modes, lr=0.02, **options)
    assert capsys.readouterr().err.count("tuning, round") == len(tuned.rounds)
    assert torch.equal(draws.values, tr.sample(five_modes, ladder=tuned, **options).values)


def two_modes(x):
    """Of weights 0.3 and 0.7, 8 standard deviations apart in 20 coordinates."""
    centres = 4.0 / math.sqrt(20) * torch.tensor([[-1.0], [1.0]])
    squares = (x[..., None, :] - centres).square().sum(-1)
    return torch.logsumexp(torch.tensor([0.3, 0.7]).log() - 0.5 * squares, -1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))])
def test_runs_that_are_too_short_get_longer_before_they_get_hotter(seed, monkeypatch):
    """The first have 200 steps, and a coordinate forgets in 40. The mutant takes for stuck what is
    short. With eight seeds it ended at 256 to 65,536, and `tune` at 16 or 64.
    """
    options = {"dim": 20, "lr": 0.05, "n_steps": 20_000, "n_runs": 8, "seed": seed, "show": False}
    assert tr.tune(two_modes, **options).ladder.temperatures[-1] <= 64.0
    monkeypatch.setattr(rounds, "ENOUGH", 0)
    assert tr.tune(two_modes, **options).ladder.temperatures[-1] >= 256.0


def test_one_mode_in_many_coordinates_needs_one_rung():
    options = {"dim": 20, "lr": 0.05, "n_steps": 100_000, "show": False}
    assert tr.tune(lambda x: -0.5 * x.square().sum(-1), **options).ladder.n_rungs == 1


@pytest.mark.slow
def test_runs_that_begin_in_another_mode_ask_for_more_than_one_rung():
    """No hot run finds the narrow mode, so runs that come from there agree at `cold`. The mutant
    looks at these alone. It was so with each of four seeds.
    """
    centre = torch.tensor([9.0, 0.0, 0.0, 0.0])

    def density(x):
        narrow = -8.0 * (x - centre).square().sum(-1) + 4 * math.log(4.0)
        return torch.logaddexp(-0.5 * x.square().sum(-1), narrow)

    options = {"dim": 4, "lr": 0.05, "n_steps": 300_000, "show": False}
    assert tr.tune(density, **options, initial=centre).ladder.temperatures[-1] >= 16.0
    alone = tr.tune(density, **options, initial=0.0)
    assert "unless there is a mode that none of them found" in alone.advice


def test_a_single_row_of_data_is_refused_with_what_it_needs():
    target = tr.TallPosterior(
        lambda w, y: -0.5 * (y - w[..., 0]).square(), Normal(0.0, 1.0), (torch.ones(1),), 1,
        batch_size=1,
    )  # fmt: skip
    with pytest.raises(NoiseError, match="needs at least 2 examples"):
        tr.tune(target, lr=0.05, n_steps=2_000, initial=0.0, show=False)


@pytest.mark.slow
def test_energies_that_stay_undo_swaps_and_tune_says_so(caplog):
    """Each of 16 coordinates is in one of two wells, which it leaves on hot rungs only; the energy
    of the wells stays where it is, and a swap is soon undone. With six seeds of the tuning a
    prediction is 0.4 to 1.0 of the arrivals. That of the acceptance alone is 3.9 to 4.5 of them.
    """

    def wells(x):
        return -(12 * (x.square() - 1).square() + 3.0 * x).sum(-1)

    options = {"dim": 16, "initial": Normal(0.0, 1.0), "n_runs": 8}
    tuned = tr.tune(wells, lr=2e-3, hot=16.0, n_steps=100_000, seed=0, show=False, **options)
    slower = re.search(r"([\d.]+) times more slowly than their acceptance lets", tuned.advice)
    assert slower is not None
    assert tuned.advice in caplog.text
    draws = tr.sample(wells, ladder=tuned, n_steps=20_000, seed=5, **options)
    restarts = float(count_trips(rung_of(draws.replica_at))[0].sum(0).double().mean())
    predicted = 20_000 * tuned.ladder.n_rungs / tuned.examples_a_visit
    assert 0.2 < predicted / restarts < 2.0, (predicted, restarts)
    assert predicted * float(slower[1]) / restarts > 3.0, "the acceptance alone"


def test_one_mode_needs_one_rung(caplog):
    tuned = tr.tune(lambda x: -0.5 * x.square().sum(-1), dim=2, lr=0.1, show=False)
    assert tuned.ladder.n_rungs == 1
    assert "one rung is enough" in tuned.advice
    assert "one rung is enough" in caplog.text


def folded(prior):
    """The sign of the mean of 400 data is not known: two modes."""
    data = 1.0 + torch.randn(400, generator=torch.Generator().manual_seed(0))
    return tr.TallPosterior(
        lambda x, y: -0.5 * (y - x[..., 0].abs()).square(), prior, [data], 1, batch_size=40
    )


def test_a_prior_that_is_a_distribution_is_the_hot_end():
    """Without being told; a log prior that is a function has no draws to begin with."""
    options = {"lr": 2e-4, "n_steps": 10_000, "show": False}
    tuned = tr.tune(folded(Normal(0.0, 3.0)), **options)
    assert math.isinf(tuned.ladder.temperatures[-1])
    assert tuned.rules["tempering"] == "likelihood"
    assert tuned.rules["swap_batch"] in (40, 80, 160, 320, 400)
    assert 2 <= tuned.ladder.n_rungs < 30
    assert tuned.settings()["swap_batch"] == tuned.rules["swap_batch"]
    other = tr.tune(folded(lambda x: -x.square().sum(-1) / 18), **options, hot=50.0)
    assert other.ladder.temperatures[-1] == 50.0
    assert "tempering" not in other.rules


def test_tall_data_of_one_mode_need_one_rung():
    data = 1.0 + torch.randn(400, generator=torch.Generator().manual_seed(0))
    target = tr.TallPosterior(
        lambda x, y: -0.5 * (y - x[..., 0]).square(), Normal(0.0, 3.0), [data], 1, batch_size=40
    )
    assert tr.tune(target, lr=2e-4, n_steps=20_000, show=False).ladder.n_rungs == 1
    # Runs that all start at one point cannot tell.
    from_one = tr.tune(target, lr=2e-4, n_steps=20_000, initial=1.0, show=False)
    assert from_one.ladder.n_rungs > 1


def test_the_barrier_is_measured_by_swaps():
    """Of a Gaussian the length is sqrt(d) log(T) = 11.1, in steps of heat that are equal, and so is
    rejection. All runs start at one point, and the last round is as long as three relaxations.
    """
    tuned = tr.tune(
        lambda x: -0.5 * x.square().sum(-1), dim=16, lr=5e-3, hot=16.0, n_steps=30_000, n_runs=4,
        initial=0.0, show=False,
    )  # fmt: skip
    last = tuned.rounds[-1]
    pairs = last.setting.n_rungs - 1
    expected = pairs * math.erf(11.1 / pairs / math.sqrt(8))
    assert last.barrier == pytest.approx(expected, rel=0.1), tuned.rounds
    assert last.barrier == pytest.approx(pairs * (1 - last.mean), rel=0.05)
    ratios = torch.tensor(tuned.ladder.temperatures).log().diff()
    assert float(ratios.max() / ratios.min()) < 1.5
    assert tuned.examples <= 0.1 * 30_000 * 4 * tuned.ladder.n_rungs


@pytest.mark.filterwarnings("ignore")
def test_a_network_is_tuned_and_is_told_when_exchange_is_not_worth_it(caplog):
    ensemble = tr.ModuleEnsemble(mlp, cross_entropy(), initial="independent")
    loader = tr.DeviceLoader(classes(), 10, seed=0)
    tuned = tr.tune(ensemble, loader, lr=1e-3, n_steps=2_000, show=False)
    assert 1.0 < tuned.ladder.temperatures[-1] <= 10.0, "as hot as 8 rungs make it"
    assert tuned.ladder.n_rungs <= 8
    run = tr.ModuleExchange(ensemble, tuned.ladder, **tuned.rules)
    tr.train(run, loader, 5)
    few = tr.tune(ensemble, loader, lr=1e-3, n_steps=2_000, most_rungs=4, show=False)
    assert "rungs for a factor" not in few.advice, "it is tune that chose the factor"
    caplog.clear()
    poor = tr.tune(ensemble, loader, lr=1e-3, hot=1e4, most_rungs=2, n_steps=2_000, show=False)
    assert "rungs for a factor of 1e+04 in temperature: d is" in poor.advice
    assert "use independent replicas" in caplog.text


BAD = {
    "hot must be above cold": {"hot": 0.5},
    "lr must be a positive": {"lr": -1.0},
    "lr must be a positive, finite number": {"lr": "0.1"},
    "cold must be a positive": {"cold": math.nan},
    "an infinite temperature needs": {"hot": math.inf},
    "tune chooses swap_batch": {"swap_batch": 10},
    "most_rungs must be a whole number": {"most_rungs": 1},
    "n_steps must be a whole number": {"n_steps": 0},
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_in_one_line(words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        tr.tune(five_modes, **{"dim": 2, "lr": 0.02, **BAD[words]})
    assert "\n" not in str(caught.value)


def test_wrong_kinds_are_refused():
    with pytest.raises(InvalidArgumentError, match="a network needs its data"):
        tr.tune(tr.ModuleEnsemble(mlp, cross_entropy()), lr=0.1)
    with pytest.raises(InvalidArgumentError, match='"auto" chooses the temperatures'):
        tr.sample(five_modes, dim=2, ladder="auto", n_steps=10)
    with pytest.raises(InvalidArgumentError, match="ladder must be a Ladder, what tune"):
        tr.sample(five_modes, dim=2, ladder=(1.0, 2.0), n_steps=10)


def test_an_energy_that_is_not_finite_ends_it_in_one_line():
    with pytest.raises(NonFiniteEnergyError, match=r"energy.* from 1 to 2: give hot=\.\.\., or"):
        tr.tune(lambda x: -x.pow(4).sum(-1), dim=1, lr=1.0, hot=2.0, initial=10.0, show=False)


def test_ctrl_c_while_the_ladder_is_tuned(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchrex.sampling.tune", interrupted)
    with pytest.raises(RunInterrupted, match="while the ladder was tuned") as caught:
        tr.sample(five_modes, dim=2, ladder="auto", lr=0.02, n_steps=100)
    assert caught.value.draws is None


def test_the_loader_is_where_it_was():
    """The run to come gets the batches that it would have got."""
    ensemble = tr.ModuleEnsemble(nn.Linear(4, 3), cross_entropy())
    loader = tr.DeviceLoader(classes(), 10, seed=0)
    before = loader.state_dict()
    first, again = (tr.tune(ensemble, loader, lr=1e-4, n_steps=1_000, show=False) for _ in range(2))
    assert same(loader.state_dict(), before)
    assert repr(first) == repr(again)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*classes(), strict=True))


def test_a_stream_in_a_data_loader_has_no_swap_batches():
    ensemble = tr.ModuleEnsemble(nn.Linear(4, 3), cross_entropy())
    loader = DataLoader(Stream(), batch_size=10)
    tuned = tr.tune(ensemble, loader, lr=1e-4, n_steps=1_000, show=False)
    assert "swap_batch" not in tuned.rules


def test_a_plain_data_loader_has_no_swap_batches():
    """A stream without a length is tuned on the batches of the steps."""
    ensemble = tr.ModuleEnsemble(nn.Linear(4, 3), cross_entropy())
    tuned = tr.tune(ensemble, [tuple(classes())], lr=1e-4, hot=2.0, show=False, n_steps=100)
    assert "swap_batch" not in tuned.rules
