"""Averages of any output: exact moments, known laws of quantiles and scores, exact resume."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from ranks import run_ranks
from torchrex.checkpoint import Checkpoints
from torchrex.distributed import replica_mesh
from torchrex.errors import CheckpointError, InvalidArgumentError
from torchrex.posterior import Predictive, crps
from torchrex.posterior.store_format import slot_of

Normal, N, N_RUNGS = torch.distributions.Normal, 7, 2


class Scripted:
    """A run whose draw k gives `outputs(k, rung, batch)`, in memory that it uses again."""

    def __init__(self, outputs, n_rungs=N_RUNGS):
        self.outputs, self.n_rungs, self.n_steps = outputs, n_rungs, 0

    def predict(self, batch, rung=0, *, output=None):
        found = self.outputs(self.n_steps, rung, batch)
        return found if output is None else output(found, batch)

    def feed(self, average, n):
        for _ in range(n):
            self.n_steps += 1
            average.update(self)
        return average


def numbers(step, rung, *shape):
    generator = torch.Generator().manual_seed(100 * step + rung)
    return torch.randn(shape, generator=generator)


def tensor_of(step, rung, batch):
    return numbers(step, rung, len(batch[0]), 2, 3)


def tuple_of(step, rung, batch):
    return numbers(step, rung, len(batch[0])), numbers(step, rung + 50, len(batch[0]), 4)


def dict_of(step, rung, batch):
    return dict(zip(("loc", "scale.x"), tuple_of(step, rung, batch), strict=True))


def data_of(y=None, n=N):
    x = torch.arange(2.0 * n).reshape(n, 2)
    return [(x[:4], y[:4]), (x[4:], y[4:])] if y is not None else [(x[:4],), (x[4:],)]


def averaged(draws: Tensor, y: Tensor | None = None, **settings) -> tr.PosteriorAverage:
    """The average after the draws (draws, n, ...) of one rung."""
    n = draws.shape[1]
    batch = (torch.zeros(n),) if y is None else (torch.zeros(n), y)
    run = Scripted(lambda step, rung, batch: draws[step - 1], 1)
    settings = {"output": "values", **settings}
    return run.feed(tr.PosteriorAverage([batch], **settings), len(draws))


# Moments


@pytest.mark.parametrize(
    ("outputs", "names"),
    [(tensor_of, [None]), (tuple_of, ["0", "1"]), (dict_of, ["loc", "scale.x"])],
)
def test_mean_and_variance_are_those_of_all_draws(outputs, names):
    """Whatever `keep` is, for every form of an output, of each rung and of both together."""
    average = tr.PosteriorAverage(data_of(), output="values", rungs=(1, 0), keep=3)
    Scripted(outputs).feed(average, 20)
    for k, name in enumerate(names):

        def stored(rung, k=k, name=name):
            passes = [[outputs(s, rung, batch) for batch in data_of()] for s in range(1, 21)]
            parts = [
                [p if name is None else list(as_dict(p).values())[k] for p in each]
                for each in passes
            ]
            return torch.stack([torch.cat(each) for each in parts]).double()

        for rung, draws in (
            (0, stored(0)),
            (1, stored(1)),
            (None, torch.cat([stored(0), stored(1)])),
        ):
            found = average.predictive(rung, of=name)
            close = {"rtol": 0, "atol": 1e-13}
            torch.testing.assert_close(found.mean, draws.mean(0), **close)
            torch.testing.assert_close(found.variance, draws.var(0, unbiased=False), **close)
            assert found.n_draws == len(draws)
            assert len(found.draws) == (3 if rung is not None else 6)
            kept = {tuple(draw.flatten().tolist()) for draw in draws}
            assert all(tuple(draw.flatten().tolist()) in kept for draw in found.draws)


def as_dict(output):
    return output if isinstance(output, dict) else dict(enumerate(output))


def test_a_small_variance_around_a_large_mean_is_exact():
    """Sums of squares, the mutant, lose it."""
    noise = torch.randn(500, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draws = 1e9 + noise
    found, exact = averaged(draws).predictive().variance, draws.var(0, unbiased=False)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)
    mutant = draws.square().mean(0) - draws.mean(0).square()
    assert not torch.allclose(mutant, exact, rtol=0.1)


def test_a_function_of_the_module_and_one_number_per_draw():
    run = Scripted(lambda step, rung, batch: numbers(step, rung, 5), 1)
    several = tr.PosteriorAverage(data_of(), output=lambda model, batch: {"top": model.max()})
    with pytest.raises(InvalidArgumentError, match="one number for each of several batches"):
        run.feed(several, 1)
    one = tr.PosteriorAverage([None], output=lambda model, batch: {"top": model.max()})
    top = torch.stack([numbers(step, 0, 5).max() for step in range(2, 12)]).double()
    run.feed(one, 10)
    assert one.predictive(of="top").mean.tolist() == pytest.approx([float(top.mean())], abs=1e-14)
    sure = averaged(torch.ones(4, N, 1), likelihood=lambda out: Normal(out, 2.0)).predictive()
    assert sure.variance.flatten().tolist() == pytest.approx([4.0] * N)


def test_the_law_of_total_variance():
    """Means 0 and 2 with variances 1 and 9: 1 between the draws, 5 within them."""
    draws = torch.tensor([[[0.0, 1.0]], [[2.0, 3.0]]])

    def likelihood(out):
        assert out.shape == (1, 2)
        return Normal(out[:, 0], out[:, 1])

    found = averaged(draws, likelihood=likelihood).predictive()
    numbers = [found.mean, found.epistemic, found.aleatoric, found.variance]
    assert torch.cat(numbers).tolist() == [1.0, 1.0, 5.0, 6.0]
    of_output = averaged(draws, likelihood=likelihood).predictive(of="output")
    assert of_output.aleatoric is None
    assert of_output.variance.tolist() == [[1.0, 1.0]]


# Known laws


def test_quantiles_of_a_mixture_are_exact():
    outs = torch.tensor([[[0.0]], [[1.0]], [[5.0]]], dtype=torch.float64)
    found = averaged(outs, likelihood=lambda out: Normal(out, 0.5)).predictive()
    for q in (1e-6, 0.05, 0.5, 0.61, 0.999):
        below = stats.norm([0.0, 1.0, 5.0], 0.5).cdf(float(found.quantile(q))).mean()
        assert below == pytest.approx(q, rel=1e-9)
    alone = averaged(outs[:1], likelihood=lambda out: Normal(out, 0.5)).predictive()
    lower, upper = alone.interval(0.9)
    assert (float(lower), float(upper)) == pytest.approx(
        stats.norm(0, 0.5).interval(0.9), abs=1e-12
    )
    event = averaged(outs, likelihood=lambda o: torch.distributions.Independent(Normal(o, 0.5), 1))
    assert torch.equal(event.predictive().quantile(0.3), found.quantile(0.3))
    joint = averaged(
        torch.tensor([[[0.0, 0.0]], [[2.0, 4.0]]]),
        torch.tensor([[0.0, 1.0]]),
        likelihood=lambda o: torch.distributions.Independent(Normal(o, 1.0), 1),
    )
    p = stats.norm([[0.0, 0.0], [2.0, 4.0]], 1.0).pdf([0.0, 1.0]).prod(1).mean()
    assert joint.metrics()["nll"] == pytest.approx(-math.log(p), rel=1e-6)


def standard_normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_intervals_of_kept_draws_hold_their_share_of_new_ones():
    """99 draws: ranks 5 and 95. The mutant, the ranks of torch.quantile, holds 88 %."""
    draws = standard_normal(99, 20_000)

    def share_between(lower, upper):
        normal = torch.distributions.Normal(0.0, 1.0)
        return normal.cdf(upper) - normal.cdf(lower)

    assert_mean_is(share_between(*averaged(draws).predictive().interval(0.9)), 0.9)
    mutant = torch.quantile(draws, torch.tensor([0.05, 0.95], dtype=torch.float64), dim=0)
    assert_mean_is_not(share_between(*mutant), 0.9)


def test_coverage_of_targets_from_the_same_law():
    n = 20_000
    y, draws = standard_normal(n, seed=1), standard_normal(99, n, seed=2)
    found = averaged(draws, y).predictive()
    lower, upper = found.interval(0.9)
    inside = ((lower <= y) & (y <= upper)).double()
    assert_mean_is(inside, 0.9)
    assert found.metrics()["coverage_90"] == float(inside.mean())
    # Draws that agree, and noise of the observation: the interval of the output holds nothing.
    sure = averaged(torch.zeros(3, n), y, likelihood=lambda out: Normal(out, 1.0))
    lower, upper = sure.predictive().interval(0.9)
    inside = ((lower <= y) & (y <= upper)).double()
    assert_mean_is(inside, 0.9)
    assert sure.metrics()["coverage_90"] == float(inside.mean())
    assert averaged(torch.zeros(3, n), y).metrics()["coverage_90"] == 0.0


def crps_of_normal(y):
    """Gneiting and Raftery 2007, Eq. 21."""
    normal = stats.norm
    return y * (2 * normal.cdf(y) - 1) + 2 * normal.pdf(y) - 1 / math.sqrt(math.pi)


def crps_of_points(draws, y, n_draws):
    """Of the outputs themselves, without a likelihood."""
    return crps(draws[:, None, None], torch.tensor(y).double(), n_draws)


@pytest.mark.parametrize("y", [0.0, 0.7, -2.5])
def test_the_crps_of_few_draws_has_no_bias(y):
    """4 draws of 10^9 score as N(0, 1) does, 4 of 4 as the 4, and 4 of 8 as the 8."""
    draws = standard_normal(8, 20_000, seed=3)

    def by_pairs(x):
        spread = (x[:, None] - x[None]).abs().sum((0, 1))
        return (x - y).abs().mean(0) - spread / (2 * len(x) ** 2)

    assert_mean_is(crps_of_points(draws[:4], y, 10**9), crps_of_normal(y))
    assert_mean_is_not(by_pairs(draws[:4]), crps_of_normal(y))
    torch.testing.assert_close(crps_of_points(draws[:4], y, 4), by_pairs(draws[:4]))
    assert_mean_is(crps_of_points(draws[:4], y, 8) - by_pairs(draws), 0.0)
    assert_mean_is_not(crps_of_points(draws[:4], y, 10**9) - by_pairs(draws), 0.0)
    torch.testing.assert_close(crps_of_points(draws[:1], y, 1), (draws[0] - y).abs())
    assert crps_of_points(draws[:1], y, 2).isnan().all()


def test_the_crps_of_sets_counts_pairs_of_one_draw_and_of_two():
    values, y = standard_normal(3, 2, 4, 5, seed=6), torch.zeros(5)
    gaps = (values[:, :, :, None, None, None] - values[None, None, None]).abs()
    between = torch.stack([gaps[a, :, :, b] for a in range(3) for b in range(3) if a != b])
    within = torch.stack([gaps[a, 0, :, a, 1] for a in range(3)])
    b, w = between.flatten(0, 4).mean(0), within.flatten(0, 2).mean(0)
    expected = values.abs().mean((0, 1, 2)) - (1 - 1 / 7) * b / 2 - w / 14
    torch.testing.assert_close(crps(values, y, 7), expected)


@pytest.mark.parametrize("family", ["normal", "student"])
def test_the_crps_of_observations_is_that_of_draws_and_noise_together(family):
    """Of the 5 members of an ensemble exactly (Grimit et al. 2006, Eq. 5), not of one observation
    of each. StudentT, without quantiles in torch, is nearly normal with 10^6 degrees of freedom.
    """
    n, sigma = 200, 0.8
    means = 0.6 * standard_normal(5, n, seed=4)
    y = standard_normal(n, seed=5)
    law = {
        "normal": lambda out: Normal(out, sigma),
        "student": lambda out: torch.distributions.StudentT(1e6, out, sigma),
    }[family]

    def expected_distance(mean, sd):
        z = (mean / sd).numpy()
        return torch.tensor(mean.numpy() * (2 * stats.norm.cdf(z) - 1) + 2 * sd * stats.norm.pdf(z))

    pairs = expected_distance(means[:, None] - means[None], math.sqrt(2) * sigma)
    exact = float((expected_distance(means - y, sigma).mean(0) - pairs.mean((0, 1)) / 2).mean())
    # One value of each half of a percent, or 660 values of each number at random.
    error = 1e-3 if family == "normal" else 5 * 0.6 / math.sqrt(n * 660)
    assert averaged(means, y, likelihood=law).metrics()["crps"] == pytest.approx(exact, abs=error)


def test_rmse_and_nll_by_hand():
    """The nll is the log of a mean, of products over the numbers of an example."""
    outs = torch.tensor([[[0.0, 0.0], [1.0, 1.0]], [[2.0, 4.0], [1.0, 3.0]]])
    y = torch.tensor([[0.0, 1.0], [1.0, 2.0]])
    metrics = averaged(outs, y, likelihood=lambda out: Normal(out, 1.0)).metrics()
    assert metrics["rmse"] == pytest.approx(math.sqrt((1 + 1 + 0 + 0) / 4))
    p = stats.norm(outs.numpy(), 1.0).pdf(y.numpy()).prod(2).mean(0)
    assert metrics["nll"] == pytest.approx(-np.log(p).mean(), rel=1e-6)
    assert list(metrics) == ["rmse", "nll", "coverage_90", "crps"]
    assert "nll" not in averaged(outs, y).metrics()


def test_likelihoods_without_a_cdf():
    """Quantiles are those of many observations of each kept draw: 3 draws can be enough."""
    student, exact = torch.distributions.StudentT, stats.t(4)
    for n_draws in (3, 300):
        outs, y = torch.zeros(n_draws, 500), torch.tensor(exact.rvs(500, random_state=0))
        found = averaged(outs, y, keep=n_draws, likelihood=lambda out: student(4.0, out))
        lower, upper = found.predictive().interval(0.9)
        error = math.sqrt(0.05 * 0.95 / 200) / exact.pdf(exact.ppf(0.95))
        assert abs(float(upper.mean()) - exact.ppf(0.95)) < 5 * error / math.sqrt(500) + 0.03
        assert abs(float(lower.mean()) - exact.ppf(0.05)) < 5 * error / math.sqrt(500) + 0.03
        assert abs(found.metrics()["coverage_90"] - 0.9) < 5 * math.sqrt(0.9 * 0.1 / 500)
    counts = averaged(
        torch.full((50, 1), 3.0), torch.tensor([2.0]), likelihood=torch.distributions.Poisson
    ).predictive()
    assert counts.draws.frac().eq(0).all()
    assert counts.variance.tolist() == [3.0]
    assert counts.metrics()["nll"] == pytest.approx(-stats.poisson(3).logpmf(2))


def test_looking_draws_nothing_from_the_generator_of_others():
    average = averaged(standard_normal(9, N), torch.zeros(N), likelihood=lambda o: Normal(o, 1.0))
    before = torch.get_rng_state()
    assert average.metrics() == average.metrics()
    assert torch.equal(torch.get_rng_state(), before)


# State


def test_what_is_kept_and_how_much_memory_it_takes():
    """The draws are those of `slot_of`; nothing grows when the reservoir is full."""
    average, sizes, expected = tr.PosteriorAverage(data_of(), output="values", keep=4), [], {}
    run = Scripted(tensor_of)
    for number in range(40):
        run.feed(average, 1)
        if (slot := slot_of(number, keep="reservoir", capacity=4, seed=0)) is not None:
            expected[slot] = torch.cat([tensor_of(number + 1, 0, batch) for batch in data_of()])
        sizes.append({name: x.shape for name, x in average.state_dict()["tensors"].items()})
    assert sizes[3] == sizes[-1] != sizes[2]
    assert torch.equal(
        average.predictive().draws, torch.stack([expected[k] for k in range(4)]).double()
    )


def new_average(which):
    settings = {
        "tensor": {"keep": 3},
        "function": {"output": lambda model, batch: model[..., 0], "keep": 2},
        "likelihood": {"likelihood": lambda out: Normal(out, 0.3), "keep": 3},
    }[which]
    y = torch.arange(N * 6.0).reshape(N, 2, 3)
    return tr.PosteriorAverage(
        data_of(y), **{"output": "values", "every": 2, "rungs": (1, 0), **settings}
    )


def assert_same(one: Predictive, other: Predictive):
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(one.variance, other.variance)
    assert torch.equal(one.draws, other.draws)
    assert torch.equal(one.quantile(0.2), other.quantile(0.2))
    assert one.n_draws == other.n_draws


@pytest.mark.parametrize("halfway", [0, 3, 9, 16])
@pytest.mark.parametrize("which", ["tensor", "function", "likelihood"])
def test_resume_is_exact(tmp_path, which, halfway):
    never_stopped = Scripted(tensor_of).feed(new_average(which), 20)
    run, before = Scripted(tensor_of), new_average(which)
    run.feed(before, halfway)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(halfway, before.state_dict())
    saved = copy.copy(run)
    run.feed(before, 5)  # goes on for a while and is lost
    after = new_average(which)
    after.load_state_dict(checkpoints.load_newest().state)
    saved.feed(after, 20 - halfway)
    for rung in (0, 1, None):
        assert_same(after.predictive(rung), never_stopped.predictive(rung))
    if which != "function":
        assert after.metrics() == never_stopped.metrics()


def test_a_state_of_other_settings_is_refused():
    state = Scripted(tensor_of).feed(new_average("likelihood"), 4).state_dict()
    with pytest.raises(CheckpointError, match="'likelihood': True"):
        new_average("tensor").load_state_dict(state)
    with pytest.raises(CheckpointError, match="values"):
        tr.PosteriorAverage([], every=2, rungs=(1, 0)).load_state_dict(state)
    del state["kind"]
    with pytest.raises(CheckpointError, match="not the state"):
        new_average("likelihood").load_state_dict(state)


def test_the_state_of_a_classifier_is_as_before():
    average = tr.PosteriorAverage([(torch.zeros(3, 1), torch.zeros(3).long())])
    Scripted(lambda step, rung, batch: numbers(step, rung, 3, 4)).feed(average, 2)
    state = average.state_dict()
    assert list(state) == ["settings", "n_draws", "last_step", "labelled", "tensors", "store"]
    assert state["settings"] == {"every": 1, "burn_in": 0, "rungs": [0]}
    names = ["sum.probabilities", "sum.logits", "sum.entropy", "last", "marks"]
    assert list(state["tensors"]) == names


# Errors


def assert_refused(average, run, words):
    """An update is refused, and the average stays bit for bit as it was."""
    before = average.state_dict()
    with pytest.raises(InvalidArgumentError, match=words):
        run.feed(average, 1)
    after = average.state_dict()
    for name, tensor in before.pop("tensors").items():
        assert torch.equal(tensor.nan_to_num(), after["tensors"][name].nan_to_num())
    assert before == {key: value for key, value in after.items() if key != "tensors"}


def test_nan_outputs_other_shapes_and_shuffled_data_are_not_added():
    y = torch.arange(float(N))
    y[2] = math.nan  # a missing target is not a change
    broken = torch.zeros(N)
    broken[3] = math.inf
    for output, words in (
        (broken, "rung 0 at step 3 gave NaN or infinite outputs for 1 of 7"),
        (torch.zeros(N, 2), r"changed from .*\(1, 7\).* to .*\(1, 7, 2\)"),
        ({"output": torch.zeros(N)}, "changed from"),
    ):
        run = Scripted(lambda step, rung, batch, last=output: last if step > 2 else torch.zeros(N))
        average = tr.PosteriorAverage([(torch.zeros(N), y)], output="values")
        run.feed(average, 2)
        assert_refused(average, run, words)
        with pytest.raises(InvalidArgumentError, match="targets are NaN"):
            average.metrics()
    for y in (torch.arange(float(N)), torch.arange(2.0 * N).reshape(N, 2)):
        average = tr.PosteriorAverage([(torch.zeros(N), y)], output="values")
        run = Scripted(lambda step, rung, batch: torch.zeros(N))
        run.feed(average, 1)
        average.data = [(torch.zeros(N), y.flip(0))]
        assert_refused(average, run, "labels of 6 of 7 examples differ.*shuffle=False")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (torch.zeros(N).long(), "floating numbers.*torch.int64"),
        ((torch.zeros(N), torch.zeros(3)), "one row per example"),
        ((torch.zeros(N), None), "NoneType"),
        ((), "one row per example"),
        (torch.zeros(N + 1), r"got 8 rows for a target of shape \(7,\)"),
    ],
)
def test_outputs_that_cannot_be_averaged(output, words):
    average = tr.PosteriorAverage([(torch.zeros(N), torch.zeros(N))], output="values")
    assert_refused(average, Scripted(lambda step, rung, batch: output), words)


def test_what_cannot_be_asked():
    with pytest.raises(InvalidArgumentError, match=r"shape \(7,\) and .*\(7, 1\).*Flatten"):
        averaged(torch.zeros(3, N, 1), torch.zeros(N)).metrics()
    with pytest.raises(InvalidArgumentError, match="metrics need targets"):
        averaged(torch.zeros(3, N)).metrics()
    values = averaged(torch.zeros(3, N))
    for read in (
        values.probabilities,
        values.mutual_information,
        lambda: values.metrics(of="last"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"output='values': use predictive\(\)"):
            read()
    with pytest.raises(InvalidArgumentError, match="q must lie"):
        values.predictive().quantile(1.0)
    with pytest.raises(InvalidArgumentError, match=r"share must lie .*got 90"):
        values.predictive().interval(90)
    logits = tr.PosteriorAverage([torch.zeros(N, 1)])
    Scripted(lambda step, rung, batch: torch.zeros(N, 2)).feed(logits, 1)
    with pytest.raises(InvalidArgumentError, match='output="values"'):
        logits.predictive()
    both = tr.PosteriorAverage(data_of(), output="values")
    Scripted(dict_of).feed(both, 1)
    with pytest.raises(InvalidArgumentError, match=r"from \['loc', 'scale.x'\], or give a lik"):
        both.predictive()
    for settings, words in (
        ({"keep": 0}, "keep"),
        ({"output": "probabilities"}, "output must be"),
        ({"likelihood": torch.distributions.Poisson}, "a likelihood needs"),
        ({"output": "values", "history": True}, "history needs"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            tr.PosteriorAverage(data_of(), **settings)
    with pytest.raises(InvalidArgumentError, match="data must be batches"):
        tr.PosteriorAverage(torch.zeros(N, 1), output="values")
    wrong = tr.PosteriorAverage([torch.zeros(N, 1)], output="values", likelihood=lambda out: out)
    assert_refused(wrong, Scripted(lambda *_: torch.zeros(N)), "Distribution.*got Tensor")
    with pytest.raises(InvalidArgumentError, match=r"refuses targets: .*support"):
        averaged(
            torch.ones(2, N), -torch.ones(N), likelihood=torch.distributions.Exponential
        ).metrics()


# Runs


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.loc, self.log_scale = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x):
        h = self.norm(torch.tanh(self.body(x)))
        return self.loc(h)[:, 0], self.log_scale(h)[:, 0]


def examples(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, x[:, 0] + 0.1 * torch.randn(n, generator=generator)


def gaussian(module, batch):
    loc, log_scale = module(batch[0])
    return F.gaussian_nll_loss(loc, batch[1], (2 * log_scale).exp(), reduction="none")


def two_heads(out):
    return Normal(out[0], out[1].exp())


def make_run():
    ensemble = tr.ModuleEnsemble(
        TwoHeads,
        tr.PosteriorEnergy.of(gaussian, n_data=40, prior=tr.GaussianPrior(1.0)),
        tr.SGHMC(0.1),
        initial="independent",
        mesh=replica_mesh(3),
    )
    return tr.ModuleExchange(ensemble, tr.Ladder((1.0, 1.5, 2.0), 2e-5), seed=1)


def make_averages(store=None):
    settings = {"every": 5, "burn_in": 10, "keep": 4}
    return [
        tr.PosteriorAverage(
            [examples(9, seed=5)],
            output="values",
            likelihood=two_heads,
            rungs=(0, 2),
            store=store,
            **settings,
        ),
        tr.PosteriorAverage(
            [examples(9, seed=5)],
            output=lambda model, batch: {"size": model.body.weight.norm()},
            **settings,
        ),
    ]


def trained(folder, stops):
    for stop in stops:
        run, averages = make_run(), make_averages()
        data = tr.DeviceLoader(examples(), 8, seed=3)
        tr.train(run, data, stop, average=averages, checkpoints=folder, checkpoint_every=20)
    values, size = averages
    found = [values.predictive(rung) for rung in (0, 2, None)]
    return [
        [[f.mean.tolist(), f.variance.tolist(), f.draws.tolist(), f.metrics()] for f in found],
        size.predictive(of="size").draws.tolist(),
        run.module_at(0).norm.running_mean.tolist(),
    ]


def test_train_resumes_averages_of_outputs_and_of_functions(tmp_path):
    whole = trained(tmp_path / "whole", [60])
    assert trained(tmp_path / "parts", [13, 33, 60]) == whole
    assert len(whole[0][0][2]) == 4
    assert len(whole[1]) == 4


def test_what_a_function_writes_into_a_module_is_taken_back():
    """Also after a first prediction, which wrote nothing."""
    run, batch = make_run(), examples(9)
    run.step(batch)
    before = run.module_at(0).norm.running_mean
    run.predict(batch)
    moved = run.predict(
        batch, output=lambda model, batch: model.norm.running_mean.add_(1.0).clone()
    )
    assert torch.equal(moved, before + 1.0)
    assert torch.equal(run.module_at(0).norm.running_mean, before)


def trained_once(folder):
    return trained(folder, [40])


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_the_number_of_processes_changes_nothing(tmp_path, n):
    """Tuples of outputs, functions of the module, kept draws and metrics: bit for bit."""
    (alone,) = run_ranks(1, trained_once, tmp_path, str(tmp_path / "1"))
    assert run_ranks(n, trained_once, tmp_path, str(tmp_path / str(n))) == [alone] * n


def test_predictions_of_stored_weights_equal_the_average(tmp_path):
    store = tr.DrawStore(tmp_path, capacity=100)
    values, _ = averages = make_averages(store)
    run = make_run()
    tr.train(run, tr.DeviceLoader(examples(), 8, seed=3), 60, average=averages)
    stored = tr.DrawStore.load(tmp_path)
    data = [examples(9, seed=5)]
    found = stored.predictive(TwoHeads, data, likelihood=two_heads, keep=4)
    assert_same(found, values.predictive())
    assert found.metrics() == values.metrics()
    scale = stored.predictive(TwoHeads(), data, of="1", rung=2, keep=4)
    assert_same(scale, values.predictive(2, of="1"))
    size = stored.predictive(TwoHeads, data, output=lambda model, batch: model.body.weight.norm())
    assert size.n_draws == 10
    assert size.mean.shape == (1,)
    broken = TwoHeads()
    broken.loc = nn.Linear(6, 2)
    with pytest.raises(InvalidArgumentError, match=r"loc.weight is \[1, 6\] there and \[2, 6\]"):
        stored.predictive(broken, data)
