"""Run folders of scripts: `train(out=...)` and `sample(out=...)` write what a recipe writes, and
`report`, `doctor` and `compare` read it.
"""

from __future__ import annotations

import html
import json
import math

import pytest
import torch

import torchrex as tr
from modules import N_DATA, classes, cross_entropy, linear
from ranks import run_ranks
from torchrex.errors import InvalidArgumentError, NonFiniteEnergyError, RunFolderError
from torchrex.experiments import run_recipe
from torchrex.experiments.recipes import get_recipe
from torchrex.report.compare import compare_folders
from torchrex.report.doctor import as_text, diagnose_folder
from torchrex.report.page import write_page
from torchrex.report.reader import load_run
from torchrex.runs.config import override

MIXTURE = tr.GaussianMixture([0.4, 0.6], [-3.0, 2.0], [0.7, 0.5])
LADDER = tr.Ladder((1.0, 1.5, 2.0), 1e-3)
STEPS = 60


def a_run(seed=0, ladder=LADDER, mesh=None):
    ensemble = tr.ModuleEnsemble(linear, cross_entropy(), mesh=mesh)
    return tr.ModuleExchange(ensemble, ladder, seed=seed)


def an_average():
    return tr.PosteriorAverage([classes(30, seed=1)], every=5, burn_in=20, rungs=(0, 1, 2))


def loader(seed=0):
    return tr.DeviceLoader(classes(), 8, seed=seed)


def trained(out=None, *, seed=0, ladder=LADDER, n_steps=STEPS, mesh=None, **options):
    run, average = a_run(seed, ladder, mesh), an_average()
    outcome = tr.train(run, loader(seed), n_steps, average=average, out=out, **options)
    return run, average, outcome


def sampled(out=None, *, seed=0, n_steps=2_000, **options):
    return tr.sample(
        MIXTURE, temperatures=(1.0, 10.0), lr=0.03, n_steps=n_steps, n_runs=4, seed=seed, out=out,
        compiled=False, **options,
    )  # fmt: skip


def without_times(path):
    values = json.loads((path / "result.json").read_text())
    return {key: value for key, value in values.items() if key not in ("date", "wall_seconds")}


def test_train_writes_what_a_recipe_writes(tmp_path):
    out = tmp_path / "mynet" / "seed=0"
    run, average, outcome = trained(out)
    there = load_run(out)
    assert (there.recipe, there.seed, there.status) == ("mynet", 0, "finished")
    assert there.problems == ()
    assert outcome.status == "finished"
    for name, value in average.metrics(0).items():
        assert there.metrics[name] == value
    for name, value in average.metrics(None).items():
        assert there.metrics[f"pooled_{name}"] == value
    for name, value in average.metrics(0, of="last").items():
        assert there.metrics[f"single_{name}"] == value
    pairs = run.exchange().pairs
    assert [each["accepted"] for each in there.result["swaps"]] == [p.accepted for p in pairs]
    assert sum(each.accepted for each in pairs) > 0
    assert there.ladder.temperatures == LADDER.temperatures
    assert there.history.n_steps == STEPS
    assert there.history.has_every_step
    assert torch.equal(there.trace["probabilities"], average.probabilities(0))
    assert torch.equal(there.labels, average.labels)
    assert there.settings.dim == run.ensemble.position.shape[-1]
    assert (there.settings.n_data, there.settings.batch_size) == (N_DATA, 8)


def test_metrics_of_regression(tmp_path):
    x, _ = classes()
    y = x.sum(1)
    energy = tr.PosteriorEnergy(lambda out, y: 0.5 * (out[:, 0] - y).square(), n_data=N_DATA)
    run = tr.ModuleExchange(tr.ModuleEnsemble(linear, energy), LADDER, seed=0)
    average = tr.PosteriorAverage(
        [(x, y)], every=5, burn_in=20, rungs=(0, 1),
        output=lambda model, batch: model(batch[0])[:, 0],
        likelihood=lambda out: torch.distributions.Normal(out, 1.0),
    )  # fmt: skip
    data = tr.DeviceLoader((x, y), 8, seed=0)
    tr.train(run, data, STEPS, average=average, out=tmp_path / "line")
    there = load_run(tmp_path / "line")
    assert there.problems == ()
    for name, value in average.metrics().items():
        assert there.metrics[name] == value
    assert {"rmse", "nll", "crps", "pooled_rmse"} <= set(there.metrics)
    (diagnosis,) = diagnose_folder(tmp_path / "line")
    assert diagnosis.status == "finished"


def test_a_folder_changes_no_number(tmp_path):
    (run, average, _), (other, same, _) = trained(tmp_path / "mynet"), trained()
    assert torch.equal(run.ensemble.position, other.ensemble.position)
    assert torch.equal(average.probabilities(), same.probabilities())
    assert torch.equal(sampled(tmp_path / "mixture").values, sampled().values)


def test_runs_with_other_settings_have_other_configs(tmp_path):
    def config(name, prior=1.0, **options):
        of_ensemble = {key: options.pop(key) for key in ("lr_factors",) if key in options}
        energy = cross_entropy(prior=tr.GaussianPrior(prior))
        ensemble = tr.ModuleEnsemble(linear, energy, **of_ensemble)
        run = tr.ModuleExchange(ensemble, LADDER, seed=0, **options.pop("rules", {}))
        tr.train(run, loader(), 5, out=tmp_path / name / "net", **options)
        return json.loads((tmp_path / name / "net" / "config.json").read_text())

    plain = config("plain")
    assert config("again") == plain
    others = {
        "prior": config("prior", 2.0),
        "clip": config("clip", rules={"clip": 5.0}),
        "factors": config("factors", lr_factors={"bias": 0.5}),
        "own": config("own", setting={"data": "2024-05"}),
    }
    named = {"prior": "energy", "clip": "clip", "factors": "lr_factors", "own": "settings_sha256"}
    for name, other in others.items():
        different = {key for key in plain if plain[key] != other[key]}
        assert different == {named[name], "settings_sha256"}


def test_doctor_knows_of_clipping_and_of_intervals(tmp_path):
    ensemble = tr.ModuleEnsemble(linear, cross_entropy())
    run = tr.ModuleExchange(ensemble, LADDER, seed=0, clip=1e-3)
    tr.train(run, loader(), STEPS, out=tmp_path / "clipped")
    assert load_run(tmp_path / "clipped").metrics["clipped_share"] == run.clipped_share()[0] > 0.9
    assert "clipped gradients" in str(run.report())
    trained(tmp_path / "free")
    assert "clipped" not in str(tr.report.of_folder(tmp_path / "free"))

    def finding(coverage):
        path = tmp_path / "free" / "result.json"
        values = json.loads(path.read_text())
        values["metrics"] |= {"coverage_90": coverage, "n_test": 500}
        path.write_text(json.dumps(values))
        return str(tr.report.of_folder(tmp_path / "free"))

    assert "intervals are too wide" in finding(0.994)
    assert "intervals are too narrow" in finding(0.7)
    assert "too wide" not in finding(0.91)
    assert "too narrow" not in finding(0.89)


def test_metrics_that_cannot_be_computed_are_named(tmp_path, caplog):
    x, _ = classes()
    energy = tr.PosteriorEnergy(lambda out, y: 0.5 * (out[:, 0] - y).square(), n_data=N_DATA)
    run = tr.ModuleExchange(tr.ModuleEnsemble(linear, energy), LADDER, seed=0)
    data, labelled = tr.DeviceLoader((x, x.sum(1)), 8, seed=0), [(x, x.sum(1))]
    average = tr.PosteriorAverage(  # outputs (n, 3) for targets (n,)
        labelled, every=5, output="values",
        likelihood=lambda out: torch.distributions.Normal(out, 1.0),
    )  # fmt: skip
    tr.train(run, data, 20, average=average, out=tmp_path / "line")
    assert "result.json lacks the metrics" in caplog.text
    assert load_run(tmp_path / "line").status == "finished"


def test_stopped_and_resumed_writes_the_same_folder(tmp_path):
    whole, parts = tmp_path / "mynet" / "seed=0", tmp_path / "stopped" / "mynet" / "seed=0"
    trained(whole, checkpoint_every=7)
    _, _, outcome = trained(parts, checkpoint_every=7, budget=1e-9)
    assert outcome.status == "paused"
    paused = load_run(parts)
    assert paused.status == "paused"
    assert 0 < paused.result["steps_done"] < STEPS
    trained(parts, checkpoint_every=7)
    first, second = without_times(whole), without_times(parts)
    assert first == second
    traces = load_run(whole).trace, load_run(parts).trace
    assert traces[0].keys() == traces[1].keys()
    assert all(torch.equal(traces[0][name], traces[1][name]) for name in traces[0])


def test_a_longer_run_goes_on_in_its_folder(tmp_path):
    out = tmp_path / "mynet"
    trained(out)
    trained(out, n_steps=STEPS + 20)
    there = load_run(out)
    assert (there.settings.n_steps, there.history.n_steps) == (STEPS + 20, STEPS + 20)
    assert there.problems == ()


@pytest.mark.parametrize("make", [trained, sampled])
def test_a_refused_number_of_steps_damages_nothing_and_a_killed_longer_run_is_unfinished(
    tmp_path, make, monkeypatch
):
    out = tmp_path / "mynet"
    make(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(tr.TorchrexError, match="step"):
        make(out, n_steps=20)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    with monkeypatch.context() as at_the_end:
        at_the_end.setattr("torchrex.runs.script.ScriptRun.write", lambda *_, **__: None)
        make(out, n_steps=2_100)
    assert load_run(out).status == "unfinished"
    make(out, n_steps=2_100)
    assert load_run(out).status == "finished"


def test_a_schedule_that_ends_too_early_is_refused_before_the_first_step(tmp_path):
    def short(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, STEPS, cycle_momentum=False)

    ladder = tr.Ladder((1.0, 1.5), 1e-3, decay=tr.schedules.from_torch(short, lr=0.1))
    for options in ({}, {"out": tmp_path / "mynet"}):
        run = a_run(ladder=ladder)
        with pytest.raises(InvalidArgumentError, match=f"OneCycleLR has no step {STEPS + 1} "):
            tr.train(run, loader(), STEPS + 2, **options)
        assert run.n_steps == 0
    assert tr.train(a_run(ladder=ladder), loader(), STEPS).status == "finished"


def test_sample_writes_its_draws(tmp_path):
    out = tmp_path / "mixture" / "seed=3"
    draws = sampled(out, seed=3)
    there = load_run(out)
    assert (there.recipe, there.seed, there.status) == ("mixture", 3, "finished")
    assert there.problems == ()
    assert torch.equal(there.draws.values, draws.values)
    assert there.metrics["acceptance_rate"] == float(draws.acceptance_rate.mean())
    assert there.history is not None
    again = sampled(out, seed=3)  # from its checkpoint
    assert torch.equal(again.values, draws.values)


def test_the_commands_read_both(tmp_path):
    for seed in (0, 1):
        trained(tmp_path / "mynet" / f"seed={seed}", seed=seed)
        trained(
            tmp_path / "colder" / f"seed={seed}", seed=seed, ladder=tr.Ladder((0.5, 0.7, 1.0), 1e-3)
        )
    sampled(tmp_path / "mixture" / "seed=0")
    written = write_page([tmp_path], tmp_path / "page.html")
    assert (written.runs, written.not_whole) == (5, 0)
    diagnoses = diagnose_folder(tmp_path)
    assert len(diagnoses) == 5
    titles = {f.title for each in diagnoses for f in each.findings}
    assert not {"damaged", "missing", "unreadable", "of another version"} & titles
    (comparison,) = compare_folders([tmp_path / "mynet", tmp_path / "colder"])
    assert "temperatures" in comparison.settings


def test_a_schedule_is_written_down(tmp_path):
    cooling = tr.Ladder(
        (1.0, 1.5, 2.0),
        1e-3,
        anneal=tr.schedules.geometric(0.99),
        decay=lambda step: 1 / (1 + step),
    )
    trained(tmp_path / "mynet", ladder=cooling)
    there = load_run(tmp_path / "mynet").ladder
    for step in (0, 7, STEPS - 1):
        assert there.anneal(step) == pytest.approx(0.99**step)
        assert there.decay(step) == pytest.approx(1 / (1 + step))


def test_a_run_that_failed_says_so(tmp_path):
    out = tmp_path / "mynet"
    with pytest.raises(NonFiniteEnergyError):
        trained(out, ladder=tr.Ladder((1.0, 1.5, 2.0), 1e38))
    there = load_run(out)
    assert there.status == "failed"
    assert "Lower the learning rate" in there.result["error"]
    steep = tr.LogDensity(lambda x: -(x**4).sum(-1), 1)
    with pytest.raises(NonFiniteEnergyError):
        tr.sample(steep, temperatures=(1.0, 2.0), lr=1e9, n_steps=100, initial=2.0,
                  out=tmp_path / "steep", compiled=False)  # fmt: skip
    assert load_run(tmp_path / "steep").status == "failed"


@pytest.mark.parametrize("make", [trained, sampled])
def test_what_is_refused(tmp_path, make):
    def refused(out, words, **options):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises((RunFolderError, InvalidArgumentError), match=words):
            make(out, **options)
        assert sorted(tmp_path.rglob("*")) == before

    refused(tmp_path / "my net", "names no run")
    refused(tmp_path / "mynet" / "seed=1", "named for seed 1, but the run has seed 0")
    refused(tmp_path / "mynet", "leave checkpoints out", checkpoints=tmp_path / "elsewhere")
    config = override(get_recipe("figure1/case1-sgld"), ["n_steps=200", "n_runs=2"])
    run_recipe(config, 0, tmp_path)
    recipe = tmp_path / "figure1" / "case1-sgld" / "seed=0"
    refused(recipe, "holds a run of the recipe figure1/case1-sgld")
    make(tmp_path / "mine")
    other = sampled if make is trained else trained
    before = without_times(tmp_path / "mine")
    with pytest.raises(RunFolderError, match="holds a run of"):
        other(tmp_path / "mine")
    assert without_times(tmp_path / "mine") == before


def test_another_run_in_the_folder_is_refused_and_changes_nothing(tmp_path):
    out = tmp_path / "mynet"
    trained(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(tr.TorchrexError, match="temperatures"):
        trained(out, ladder=tr.Ladder((1.0, 1.5, 3.0), 1e-3))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_folder_has_one_owner(tmp_path):
    out, errors = tmp_path / "mynet" / "seed=0", []

    def second(done, total):
        if not errors:
            with pytest.raises(RunFolderError, match="is used by") as error:
                trained(out)
            errors.append(str(error.value))

    trained(out, progress=second)
    assert len(errors) == 1
    assert load_run(out).status == "finished"


def test_reports_of_runs_and_draws(tmp_path):
    run, _, _ = trained(tmp_path / "mynet")
    (diagnosis,) = diagnose_folder(tmp_path / "mynet")
    assert all(words in str(run.report()) for _, words in as_text(diagnosis))
    with pytest.raises(InvalidArgumentError, match="give one: train"):
        trained()[0].report()
    draws = sampled()
    report = draws.report()
    assert "The rungs swapped" in str(report)
    report.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "chains together" in page
    assert "A script made this run" in page
    assert "Folder:" not in page
    assert html.escape(report.page()) in report._repr_html_()
    frozen = sampled(correction_factor=math.inf)
    assert "naive swaps" in str(frozen.report())
    assert "naive swaps" not in str(report)


def of_two_signs(out, temperatures, **options):
    """Only the size of the slope was observed, so that its sign has two modes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2_000, generator=generator)
    y = (2.0 * x).abs() + torch.randn(2_000, generator=generator)
    target = tr.TallPosterior(
        lambda w, x, y: -0.5 * (y - (x * w[..., 0]).abs()).square(),
        torch.distributions.Normal(0.0, 3.0), (x, y), dim=1, batch_size=50,
    )  # fmt: skip
    tr.sample(target, temperatures=temperatures, lr=1e-5, n_steps=2_000, n_runs=4, out=out,
              compiled=False, **options)  # fmt: skip
    (diagnosis,) = diagnose_folder(out)
    return {finding.title: finding for finding in diagnosis.findings}


def test_numbers_of_draws_are_in_the_result(tmp_path):
    draws = sampled(tmp_path / "mixture")
    metrics = load_run(tmp_path / "mixture").metrics
    assert metrics["mean_0"] == float(draws.mean()[0])
    assert metrics["mean_0_se"] == float(draws.standard_error()[0])
    assert metrics["sd_0"] == float(draws.std()[0])
    assert metrics["ess"] == pytest.approx((metrics["sd_0"] / metrics["mean_0_se"]) ** 2)


@pytest.mark.parametrize(("lr", "severity"), [(1.9, "problem"), (0.5, "warning"), (0.02, "fine")])
@pytest.mark.parametrize("noise", [None, 1.0])
def test_doctor_says_that_a_learning_rate_widens_rung_0(tmp_path, lr, severity, noise):
    """SGLD on x^2 / 2 has the variance 1 / (1 - lr / 2): 20, 1.33 and 1.01 times the right one.

    Mutant: the temperature of draws in another order, 0, is colder than nominal.
    """
    target: tr.Target = tr.LogDensity(lambda x: -0.5 * x.square().sum(-1), 2)
    target = target if noise is None else tr.Noisy(target, tr.Gaussian(noise))
    draws = tr.sample(target, temperatures=(1.0,), lr=lr, n_steps=2_000, n_runs=64, burn_in=200,
                      thin=4, compiled=False, out=tmp_path / "wide")  # fmt: skip
    reading, error = draws.settings["equipartition"]
    exact = 1.0 / (1.0 - lr / 2)
    assert error < 0.05 * exact
    assert abs(reading - exact) < 5 * error  # 5.7e-7 for each of six
    for report in (str(draws.report()), str(diagnose_folder(tmp_path / "wide")[0].findings)):
        assert ("rung 0 is hotter than nominal" in report) == (severity != "fine")
    (found,) = [each for each in diagnose_folder(tmp_path / "wide")[0].findings
                if "temperature" in each.numbers]  # fmt: skip
    assert found.severity == severity


@pytest.mark.parametrize("damaged", [None, "1", [1.0], [1.0, "x"], [1.0, math.nan], {"a": 1}])
def test_a_damaged_reading_of_the_temperature_is_none(damaged):
    draws = sampled()
    assert "temperature not known" not in str(draws.report())
    draws.settings["equipartition"] = damaged
    assert "equipartition" not in str(draws.report()).lower()


def test_a_density_that_takes_few_points_has_no_temperature():
    """It must not end the run after its last step. Minibatches have no exact gradients either."""

    def of_few(x):
        if len(x) > 8:
            raise MemoryError
        return -0.5 * x.square().sum(-1)

    common = {"temperatures": (1.0, 2.0), "lr": 0.1, "n_steps": 200, "compiled": False}
    draws = tr.sample(of_few, dim=1, n_runs=3, **common)
    assert "equipartition" not in draws.settings
    y = torch.randn(100, generator=torch.Generator().manual_seed(0))
    target = tr.TallPosterior(
        lambda w, y: -0.5 * (y - w[..., 0]).square(), torch.distributions.Normal(0.0, 10.0), (y,),
        dim=1, batch_size=10,
    )  # fmt: skip
    assert "equipartition" not in tr.sample(target, **{**common, "lr": 1e-3}).settings


@pytest.mark.parametrize(("lr", "wide"), [(1e-3, True), (1e-5, False)])
def test_doctor_says_how_much_minibatches_widen_rung_0(tmp_path, lr, wide):
    """A normal mean: the variance is 1 / N, and minibatches add lr N / (2 n), here 0.01 or 0.0001.

    SGLD on a quadratic of stiffness a has (2 lr + lr^2 N a / n) / (2 lr a - lr^2 a^2).
    """
    y = torch.randn(1_000, generator=torch.Generator().manual_seed(0))
    target = tr.TallPosterior(
        lambda w, y: -0.5 * (y - w[..., 0]).square(), torch.distributions.Normal(0.0, 10.0), (y,),
        dim=1, batch_size=50,
    )  # fmt: skip
    draws = tr.sample(target, temperatures=(1.0,), lr=lr, n_steps=6_000, n_runs=8, compiled=False,
                      out=tmp_path / "mean")  # fmt: skip
    (diagnosis,) = diagnose_folder(tmp_path / "mean")
    found = [each for each in diagnosis.findings if each.title == "gradient noise widens rung 0"]
    assert len(found) == wide
    report = draws.report()  # without the folder
    assert ("Minibatches of 50 of 1,000 add" in str(report)) == wide
    assert f">{lr:.4g}</td></tr></tbody>" in report.page()
    if wide:
        a, n_data, n = 1_000.01, 1_000, 50
        exact = (2 * lr + lr**2 * n_data * a / n) / (2 * lr * a - lr**2 * a**2)
        assert found[0].numbers["least_variance"] == pytest.approx(exact, rel=0.15)
        assert found[0].numbers["added_variance"] == pytest.approx(lr * n_data / (2 * n))
        assert draws.n_chains == 8


def test_all_data_are_tested_on_all_pairs(tmp_path):
    """Noise that pairs share is why small models test one pair at a time; all data have none."""
    y = torch.randn(200, generator=torch.Generator().manual_seed(0))
    target = tr.TallPosterior(
        lambda w, y: -0.5 * (y - w[..., 0]).square(), torch.distributions.Normal(0.0, 10.0), (y,),
        dim=1, batch_size=20,
    )  # fmt: skip
    for size, tests in (("full", 50), (100, 33)):
        draws = tr.sample(target, temperatures=(1.0, 2.0, 4.0, 8.0), lr=1e-4, n_steps=1_000,
                          swap_batch=size, swap_interval=10, compiled=False)  # fmt: skip
        assert abs(int(draws.proposed[0, 0]) - tests) <= (0 if size == "full" else 20)


def test_doctor_knows_what_tune_would_choose(tmp_path):
    found = of_two_signs(tmp_path / "wide", (1.0, 10.0, 100.0))["a cheaper exchange"]
    chosen = found.numbers
    assert chosen["examples_a_visit_then"] < chosen["examples_a_visit_now"] / 3
    rules = {name: chosen[name] for name in ("swap_batch", "swap_interval")}
    ladder = [100.0 ** (k / (chosen["rungs"] - 1)) for k in range(chosen["rungs"])]
    better = of_two_signs(tmp_path / "better", ladder, **rules)
    assert "no swaps" not in better
    assert "a cheaper exchange" not in better


def one_of_two(folder):
    _, average, _ = trained(folder, mesh=tr.replica_mesh(3))
    return average.metrics(0)


def test_of_two_processes_the_first_writes(tmp_path):
    out = tmp_path / "mynet" / "seed=0"
    metrics = run_ranks(2, one_of_two, tmp_path, str(out))
    there = load_run(out)
    assert there.status == "finished"
    assert there.result["processes"] == 2
    assert there.metrics["nll"] == metrics[0]["nll"] == metrics[1]["nll"]
