"""Deep ensembles, SWAG and a ladder without swaps: the same engine as exchange, exact resume, the
law of SWAG's draws, and the table that compares methods.
"""

from __future__ import annotations

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from modules import N_DATA, batches, classes, cross_entropy, linear, mlp, with_everything
from ranks import run_ranks
from torchrex.errors import CheckpointError, InvalidArgumentError
from torchrex.experiments import get_recipe, run_recipe
from torchrex.network.baselines import Moments, renew_batchnorm
from torchrex.report import methods
from torchrex.report.reader import load_run
from torchrex.schedules import cyclical

STEPS, LR = 40, 5e-3
LADDER = tr.Ladder((0.5, 0.6, 0.8), 1e-3)


def ensemble(model=mlp, **more):
    energy = cross_entropy(prior=tr.GaussianPrior(1.0))
    return tr.ModuleEnsemble(model, energy, tr.SGHMC(0.1), **more)


def loader(seed=1):
    return tr.DeviceLoader(classes(), 8, seed=seed)


def average(**options):
    return tr.PosteriorAverage(batches(2), **options)


def deep(model=mlp, data=None, *, n_members=3, **options):
    given = {"n_steps": STEPS, "lr": LR, "average": average(), **options}
    return tr.deep_ensemble(ensemble(model), data or loader(), n_members=n_members, **given)


def swag(model=mlp, data=None, **options):
    given = {"n_steps": STEPS, "lr": LR, "average": average(), "descent": 20, "every": 3}
    given |= {"rank": 4, "n_draws": 6, **options}
    return tr.swag(ensemble(model), data or loader(), **given)


METHODS = {"deep": deep, "swag": swag}


def predicted(result):
    return result.average.probabilities(result.rung)


# The same engine


@pytest.mark.parametrize("model", [mlp, with_everything])
def test_a_deep_ensemble_of_one_is_a_plain_descent(model):
    run = tr.ModuleExchange(ensemble(model), tr.Ladder.descent(LR, decay=cyclical(STEPS)), seed=7)
    plain = average(every=STEPS)
    tr.train(run, loader(), STEPS, average=plain)
    one = deep(model, n_members=1, seed=7)
    assert torch.equal(predicted(one), plain.probabilities())
    assert (one.examples, one.gradients) == (run.n_examples, STEPS) == (STEPS * 8, STEPS)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_any_output_is_averaged_and_written(tmp_path, method):
    """A function of the module, in place of logits."""
    logits = method(average=average(output="values")).average.predictive()
    doubled = method(
        average=average(output=lambda module, batch: 2.0 * module(batch[0])), out=tmp_path / "net"
    )
    assert torch.allclose(doubled.average.predictive().mean, 2.0 * logits.mean)
    assert load_run(tmp_path / "net").status == "finished"
    assert load_run(tmp_path / "net").problems == ()
    (saved,) = tr.load(tmp_path / "net", mlp).averages
    assert torch.equal(saved.predictive().mean, doubled.average.predictive().mean)


def test_the_cost_of_a_folder_counts_the_last_batch_of_an_epoch_as_it_is(tmp_path):
    data = DataLoader(TensorDataset(*classes()), batch_size=24, shuffle=True)  # 24 and 16 of 40
    run, own = tr.ModuleExchange(ensemble(), LADDER, seed=0), average(every=10)
    outcome = tr.train(run, data, STEPS, average=own, out=tmp_path / "net")
    table = tr.compare(
        {"memory": tr.MethodResult.of(run, outcome, own), "folder": tmp_path / "net"}
    )
    assert run.n_examples == STEPS // 2 * 40 * 3
    assert table.values["folder"]["cost"][0] == 1.0
    assert not any("equal cost" in note for note in table.notes)
    assert list(table.values["folder"]) == list(table.values["memory"])


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_clip_is_that_of_any_run_and_no_metric(tmp_path, method):
    free, clipped = method(), method(clip=1.0, out=tmp_path / "net")
    assert not torch.equal(predicted(free), predicted(clipped))
    assert load_run(tmp_path / "net").metrics["clipped_share"] > 0.9
    assert "clipped" not in str(tr.report.of_folder(tmp_path / "net"))  # it samples nothing
    table = tr.compare({"memory": clipped, "folder": tmp_path / "net"})
    assert list(table.values["folder"]) == list(table.values["memory"])
    assert "clipped_share" not in tr.compare({"folder": tmp_path / "net"}).values["folder"]


def test_replicas_that_do_not_exchange_answer_together_from_their_folder_too(tmp_path):
    run = tr.ModuleExchange(ensemble(), LADDER, pairing=tr.NoSwaps(), seed=0)
    own = average(every=10, rungs=(0, 1, 2))
    outcome = tr.train(run, loader(), STEPS, average=own, out=tmp_path / "apart" / "seed=0")
    result = tr.MethodResult.of(run, outcome, own, rung=None)
    table = tr.compare({"memory": result, "folder": tmp_path / "apart" / "seed=0"})
    for name, value in own.metrics(None).items():
        assert table.values["folder"][name][0] == table.values["memory"][name][0] == value


@pytest.mark.parametrize("model", [mlp, with_everything])
def test_the_prediction_is_the_mean_over_the_members_and_they_are_independent(tmp_path, model):
    store = tr.DrawStore(tmp_path, capacity=9)
    five = deep(model, n_members=5, average=average(store=store), seed=2)
    alone = [deep(model, n_members=n, seed=2) for n in (1, 2, 3, 4)]
    parts = torch.stack([predicted(each) * each.average.n_draws for each in (*alone, five)])
    members = torch.cat([parts[:1], parts.diff(dim=0)])  # k members minus k - 1 members
    stored = store.predict(model, batches(2))
    assert torch.allclose(stored.probabilities, predicted(five), atol=1e-7)
    for k, (_, _, weights) in enumerate(store):
        module = model().eval()
        module.load_state_dict(weights)
        with torch.no_grad():
            own = torch.cat([module(x) for x, _ in batches(2)]).double().softmax(-1)
        assert torch.allclose(own, members[k], atol=1e-6), f"member {k} depends on the others"
    assert (members[1:] - members[:-1]).abs().amax((1, 2)).min() > 0.01
    assert five.average.n_draws == 5
    assert float(five.average.mutual_information().mean()) > 0


def test_a_run_counts_the_examples_of_moves_swaps_and_tuning():
    pooled = average(every=5, rungs=range(3))
    exchanging = tr.ModuleExchange(ensemble(), LADDER, swap_batch=10, swap_interval=4)
    outcome = tr.train(exchanging, loader(), STEPS, average=pooled)
    result = tr.MethodResult.of(exchanging, outcome, pooled, more_examples=100.0)
    assert result.examples == 3 * (STEPS * 8 + STEPS // 4 * 10) + 100
    assert result.gradients == 3 * STEPS
    assert result.seconds == outcome.total_seconds > 0
    assert result.metrics() == pooled.metrics(0)
    apart = tr.ModuleExchange(ensemble(), LADDER, pairing=tr.NoSwaps(), swap_batch=10)
    assert tr.train(apart, loader(), STEPS).status == "finished"
    no_swaps = tr.MethodResult.of(apart, outcome, pooled, name="no swaps", rung=None)
    assert no_swaps.examples == 3 * STEPS * 8
    assert no_swaps.metrics() == pooled.metrics(None)
    with pytest.raises(InvalidArgumentError, match=r"rungs=range\(3\)"):
        tr.MethodResult.of(apart, outcome, average(), rung=None)


# SWAG


def collected():
    """Weights of three numbers with a clear mean, variances and correlations."""
    generator = torch.Generator().manual_seed(5)
    mixing = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.5, 0.0], [-0.3, 0.4, 2.0]])
    return torch.randn(9, 3, generator=generator) @ mixing.T + torch.tensor([3.0, -2.0, 50.0])


def test_moments_are_those_of_the_paper():
    weights, moments = collected(), Moments()
    for each in weights:
        moments = moments.after(each, 4)
    x = weights.double()
    so_far = x.cumsum(0) / torch.arange(1, 10)[:, None]
    assert torch.allclose(moments.mean, x.mean(0))
    assert torch.allclose(moments.square, x.square().mean(0))
    assert torch.allclose(torch.stack(list(moments.deviations)), (x - so_far)[-4:].float())


def test_the_law_of_swags_draws():
    """N(mean, diag / 2 + D^T D / (2 (K - 1))): every mean, variance and covariance within 5 sigma;
    without the factor 1/2 none of them would be.
    """
    weights, moments = collected(), Moments()
    for each in weights:
        moments = moments.after(each, 4)
    x = weights.double()
    deviations = (x - x.cumsum(0) / torch.arange(1, 10)[:, None])[-4:]
    diagonal, low_rank = x.var(0, correction=0).diag(), deviations.T @ deviations / 3
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([moments.draw(generator) for _ in range(20_000)]) - x.mean(0)
    for i in range(3):
        assert_mean_is(draws[:, i], 0.0)
        for j in range(i + 1):
            seen = draws[:, i] * draws[:, j]
            assert_mean_is(seen, float((diagonal + low_rank)[i, j] / 2))
            if i == j or abs(low_rank[i, j]) > 0.2:
                assert_mean_is_not(seen, float((diagonal + low_rank)[i, j]))
    assert_mean_is_not(draws[:, 2].square(), float(diagonal[2, 2] / 2))
    assert_mean_is_not(draws[:, 2].square(), float(low_rank[2, 2] / 2))


def test_swag_sees_the_weights_of_the_exact_steps():
    """A run by hand on the same ladder, and its weights at steps 23, 26, ..., 38."""
    falling = cyclical(20, end=0.5)
    decay = lambda step: falling(step) if step < 20 else 0.5  # noqa: E731
    run = tr.ModuleExchange(ensemble(linear), tr.Ladder.descent(LR, decay=decay), seed=4)
    data, weights = loader(), []
    for _ in range(STEPS):
        run.step(data.next())
        if run.n_steps in range(23, 41, 3):
            weights.append(run.ensemble.position[0].clone())
    moments = Moments()
    for each in weights:
        moments = moments.after(each, 4)
    seeds = [tr.rng.derive_seed(4, f"swag.{k}") for k in range(6)]
    drawn = [moments.draw(torch.Generator().manual_seed(seed)).float() for seed in seeds]
    names = run.ensemble.layout.views(drawn[0])
    expected = 0.0
    for row in drawn:
        layer = run.ensemble.layout.views(row)
        assert set(names) == {"weight", "bias"}
        logits = torch.cat([nn.functional.linear(x, **layer) for x, _ in batches(2)])
        expected = expected + logits.double().softmax(-1) / 6
    result = swag(linear, seed=4)
    assert torch.allclose(predicted(result), expected, atol=1e-6)
    assert (result.examples, result.gradients) == (STEPS * 8, STEPS)


@pytest.mark.parametrize("kind", ["device", "loader", "list"])
def test_batchnorm_is_computed_anew_for_every_draw(kind, tmp_path):
    """Statistics are those of all training data under the drawn weights; frozen layers stay."""
    x, y = classes()
    data = {
        "device": loader(),
        "loader": DataLoader(TensorDataset(x, y), 8, shuffle=True),
        "list": [(x[k : k + 8], y[k : k + 8]) for k in range(0, N_DATA, 8)],
    }[kind]

    def model():
        frozen = nn.BatchNorm1d(3).eval()
        frozen.running_mean.fill_(3.0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), frozen)

    store = tr.DrawStore(tmp_path, capacity=9)
    result = swag(model, data, average=average(store=store))
    assert result.examples == STEPS * 8 + 6 * N_DATA
    for _, _, state in store:
        hidden = nn.functional.linear(x, state["0.weight"], state["0.bias"])
        assert torch.allclose(state["1.running_mean"], hidden.mean(0), atol=1e-5)
        assert torch.equal(state["3.running_mean"], torch.full((3,), 3.0))


def test_renewing_batchnorm_leaves_the_position_in_the_data():
    run, data = tr.ModuleExchange(ensemble(with_everything), tr.Ladder.descent(LR)), loader()
    run.step(data.next())
    before = data.state_dict()
    module, random = run.live_module_at(0), torch.get_rng_state()
    assert renew_batchnorm(run, module, data, 0) == N_DATA
    assert module[1].momentum == 0.1
    assert torch.equal(torch.get_rng_state(), random)
    assert {k: v for k, v in before.items() if not isinstance(v, torch.Tensor)} == {
        k: v for k, v in data.state_dict().items() if not isinstance(v, torch.Tensor)
    }


# Stopped and resumed


@pytest.mark.parametrize("name", METHODS)
def test_stopped_and_resumed_equals_never_stopped(name, tmp_path):
    """Stopped in the middle of a descent, among the collected weights, and after the end."""
    method, model = METHODS[name], with_everything
    whole = method(model, seed=1)
    for stop in (10, 31, STEPS):
        folder = tmp_path / str(stop)

        def pause(done, total, stop=stop):
            if done >= stop:
                raise KeyboardInterrupt

        saved = {"checkpoints": folder, "checkpoint_every": 3, "seed": 1}
        if stop < STEPS:
            with pytest.raises(KeyboardInterrupt):
                method(model, progress=pause, **saved)
        else:
            method(model, **saved)
        again = method(model, **saved)
        assert torch.equal(predicted(again), predicted(whole)), f"stopped at {stop}"
        assert again.metrics() == whole.metrics()
        assert (again.examples, again.gradients) == (whole.examples, whole.gradients)


def test_a_finished_run_with_stored_draws_is_found_again(tmp_path):
    def call():
        own = average(store=tr.DrawStore(tmp_path / "draws", capacity=4), every=7, burn_in=3)
        return swag(with_everything, average=own, checkpoints=tmp_path / "c", checkpoint_every=9)

    first = call()
    assert torch.equal(predicted(call()), predicted(first))
    assert len(tr.DrawStore.load(tmp_path / "draws")) == 4


def test_a_paused_run_has_no_metrics_and_goes_on(tmp_path):
    one = deep(budget=0.0, checkpoints=tmp_path)
    assert one.status == "paused"
    with pytest.raises(InvalidArgumentError, match="deep ensemble is paused"):
        one.metrics()
    while one.status == "paused":
        one = deep(checkpoints=tmp_path)
    assert torch.equal(predicted(one), predicted(deep()))


def test_swag_with_other_settings_does_not_resume(tmp_path):
    swag(checkpoints=tmp_path)
    with pytest.raises(CheckpointError, match="n_draws"):
        swag(checkpoints=tmp_path, n_draws=5)


def test_no_pickle_in_the_checkpoints(tmp_path):
    swag(checkpoints=tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ""}


# Observers, threads, processes


def test_observers_hear_of_the_draws_once(tmp_path):
    result = swag(observers=tr.JsonLines(tmp_path / "log.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    drawn = [line for line in lines if "n_draws" in line]
    assert len(drawn) == 1
    assert drawn[0]["n_draws"] == 6
    assert drawn[0]["accuracy"] == pytest.approx(result.metrics()["accuracy"])


def test_methods_in_threads_are_what_they_are_alone():
    """Torch has one default generator for dropout, first weights and loaders, in all threads."""
    jobs = [
        partial(METHODS[name], with_everything, seed=seed) for name in METHODS for seed in (0, 1)
    ]
    alone = [predicted(job()) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = [future.result() for future in [pool.submit(job) for job in jobs]]
    assert all(torch.equal(a, predicted(b)) for a, b in zip(alone, together, strict=True))


def on_ranks():
    """What one of several processes gets."""
    spread = ensemble(with_everything, mesh=tr.replica_mesh(3))
    result = tr.deep_ensemble(
        spread, loader(), n_members=3, n_steps=STEPS, lr=LR, average=average(), seed=6
    )
    return [predicted(result).tolist(), result.examples]


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(tmp_path):
    (alone,) = run_ranks(1, on_ranks, tmp_path)
    assert run_ranks(3, on_ranks, tmp_path) == [alone] * 3


# Bad input


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: deep(n_members=0), "n_members must be a whole number"),
        (lambda: deep(n_step=3), "did you mean n_steps"),
        (lambda: swag(budgett=3.0), "did you mean budget"),
        (lambda: deep(n_members=STEPS + 1), "n_steps must be a whole number >= 41"),
        (lambda: deep(average=None), "empty PosteriorAverage"),
        (lambda: deep(average=average(rungs=(0, 1))), "of rung 0"),
        (lambda: swag(average=swag().average), "empty PosteriorAverage"),
        (lambda: deep(linear(), n_members=2), "need a function that makes the model"),
        (lambda: swag(descent=36), "lower every or descent"),
        (lambda: swag(rank=1), "rank must be a whole number >= 2"),
        (lambda: swag(constant_lr=0.0), "must be positive"),
        (lambda: swag(lr="0.1"), "must be positive"),
        (lambda: deep(lr="0.1"), "must be numbers"),
        (lambda: tr.deep_ensemble(mlp, loader(), n_members=2, n_steps=9, lr=LR, average=average()),
         "give a ModuleEnsemble"),
        (lambda: tr.ModuleExchange(ensemble(), tr.Ladder.descent(LR, n_rungs=2)), "NoSwaps"),
        (lambda: tr.compare({}), "compare takes"),
        (lambda: tr.compare({"a": []}), "has no result"),
        (lambda: tr.compare({"a": 3}), "MethodResult.of"),
        (lambda: tr.compare({"a": [fake(0.5, seed=1), fake(0.6, seed=1)]}), "results of seed 1"),
        (lambda: tr.compare({"a": fake(0.5), "b": fake(0.5, "rmse")}), "no metric in common"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(call, words):
    with pytest.raises(InvalidArgumentError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


# The table


class Fake:
    """An average of another kind: `compare` uses nothing but `metrics`."""

    n_draws = 1

    def __init__(self, **values):
        self.values = values

    def metrics(self, rung=0):
        return self.values


def fake(value, metric="nll", *, seed=0, examples=100.0):
    other = "accuracy" if metric == "nll" else "r2"
    return tr.MethodResult(Fake(**{metric: value, other: 0.5}), examples, 10.0, 2.0, seed)


def test_a_table_has_means_errors_and_paired_differences():
    first = [fake(value, seed=s) for s, value in enumerate((0.5, 0.7, 0.9, 1.1))]
    better = [fake(v - 0.1 - 0.01 * s, seed=s) for s, v in enumerate((0.5, 0.7, 0.9, 1.1))]
    table = tr.compare({"exchange": first, "SWAG": better})
    mean, error = table.values["exchange"]["nll"]
    assert (mean, error) == (pytest.approx(0.8), pytest.approx(math.sqrt(0.2 / 3 / 4)))
    row = table.differences["SWAG"]["nll"]
    assert row.difference == pytest.approx(-0.115)
    assert row.error == pytest.approx(math.sqrt(sum((s - 1.5) ** 2 for s in range(4)) / 12) * 0.01)
    assert any("SWAG: nll lower, better" in note for note in table.notes)
    assert "minus exchange" in str(table)
    assert "0.8(1)" in str(table)
    assert "-0.115(6)" in str(table)
    assert "<script" not in tr.compare({"<script>": first})._repr_html_()


def test_rounding_is_not_shown_as_an_error():
    same = [fake(0.1 + 0.2, seed=s) for s in range(3)]
    text = str(tr.compare({"a": same, "b": [fake(0.4, seed=s) for s in range(3)]}))
    assert "(" not in text
    assert text.split()[-3:] == ["b", "+0.1", "+0"]


def test_unequal_costs_are_said_from_five_percent_on():
    def notes(examples):
        return tr.compare({"a": fake(0.5), "b": fake(0.5, examples=examples)}).notes

    assert not any("equal cost" in note for note in notes(104.0))
    assert any("b has 1.06 times" in note for note in notes(106.0))
    assert any("b has 0.94 times" in note for note in notes(94.0))
    assert any("cost of b is not known" in note for note in notes(math.nan))
    assert any("no claim" in note for note in notes(100.0))


def test_run_folders_and_results_go_into_one_table(tmp_path):
    recipe = dataclasses.replace(get_recipe("digits/resghmc"), epochs=3, burn_in_epochs=1)
    for seed in (0, 1):
        folder = run_recipe(recipe, seed, tmp_path, device="cpu")
    values = {"accuracy": 0.5, "nll": 1.0}
    own = tr.MethodResult(Fake(**values), 3 * 20 * 64 * 2, seed=1)
    table = tr.compare({"recipe": folder.path.parent, "one": folder.path, "own": own})
    assert [*table.values["own"]] == ["accuracy", "nll", "seconds", "cost", "seeds"]
    of_folder = tr.compare({"recipe": folder.path}).values["recipe"]
    assert not any(name.startswith(("single_", "pooled_", "swaps")) for name in of_folder)
    assert [table.values[name]["seeds"][0] for name in ("recipe", "one")] == [2, 1]
    assert table.values["one"]["nll"][0] == folder.result["metrics"]["nll"]
    assert table.values["own"]["cost"][0] == pytest.approx(1.0)
    run = load_run(folder.path)
    swaps = {**run.result, "exchange": {"swap_cost": 0.5}}
    examples = methods._examples_of(dataclasses.replace(run, result=swaps))
    assert examples == 1.5 * methods._examples_of(run) == 1.5 * 3 * 20 * 64 * 2
