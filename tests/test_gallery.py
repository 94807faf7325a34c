"""The gallery: equal cost, exact answers, a short run and what is made of it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import run_command
from torch.distributions import Normal

import torchrex
from assertions import assert_mean_is, assert_mean_is_not
from torchrex.errors import ConfigError
from torchrex.experiments import RunOptions, get_recipe, gallery, run_recipe
from torchrex.experiments.clusters import clusters, simulate
from torchrex.experiments.folder import Run
from torchrex.experiments.gallery import METHODS, Comparison, FullData, GalleryConfig, Problem
from torchrex.experiments.period import exact_law, near, observations, period
from torchrex.report import gallery as report

RESULTS = Path(__file__).parents[1] / "results" / "gallery"
TOY = GalleryConfig("gallery/period", n_steps=30_000, n_runs=2)


def two_modes(seen: list[int] | None = None) -> Problem:
    """Signs of a mean cannot be told apart; the prior prefers the positive one. `seen` gets the
    number of examples of every evaluation.
    """
    data = 1.0 + torch.randn(40, generator=torch.Generator().manual_seed(0))

    def log_likelihood(x, y):
        terms = -0.5 * (y - x[..., 0].abs()).square()
        if seen is not None:
            seen.append(terms.numel())
        return terms

    target = torchrex.TallPosterior(log_likelihood, Normal(0.2, 1.0), (data,), 1, batch_size=10)
    grid = torch.linspace(-4, 4, 4001, dtype=torch.float64)[:, None]
    energy = target.to("cpu", torch.float64).full_energy(grid)
    mass = torch.softmax(-energy, 0)
    return Problem(
        target,
        lr=2e-3,
        estimate=lambda x: (x[..., 0] > 0).double().mean(1),
        exact=float(mass[grid[:, 0] > 0].sum()),
        words="probability of the positive mode",
        hot=10.0,
    )


@pytest.fixture
def eager(monkeypatch):
    """A loop that is not compiled: evaluations can be counted, and short runs begin at once."""
    monkeypatch.setattr("torchrex.density.run.STEPS_WORTH_COMPILING", 10**12)


@pytest.fixture
def toy(monkeypatch, eager):
    monkeypatch.setattr(gallery, "problems", lambda: dict.fromkeys(METHODS_OF, two_modes))


METHODS_OF = ("gallery/period",)


def test_every_method_evaluates_as_many_examples(eager):
    """Counted where they are evaluated, tuning and swaps included; without the cost of swaps the
    tuned exchange would have twice as many.
    """
    seen: list[int] = []
    comparison = Comparison(TOY, two_modes(seen), Run(TOY, 0), RunOptions())
    counted = {}
    sampled, tuned = comparison.sampled, comparison.tuned

    def count(method, call, *given, **more):
        before = sum(seen)
        result = call(*given, **more)
        counted[method] = (sum(seen) - before) / TOY.n_runs
        return result

    comparison.sampled = lambda method, *a, **k: count(method, sampled, method, *a, **k)
    comparison.tuned = lambda: count("tuning", tuned)
    before = sum(seen)
    comparison.compare()
    # The energies by which the best of independent chains is chosen are not those of `sampled`.
    judged = (sum(seen) - before) / TOY.n_runs - sum(counted.values())
    counted["pooled"] += judged
    counted["tuned"] += counted.pop("tuning")
    budget = TOY.n_steps * 10
    for method, examples in counted.items():
        assert examples == pytest.approx(budget, rel=0.02), method
    for method in METHODS:
        assert comparison.metrics[f"{method}_examples"] == pytest.approx(budget, rel=0.01), method
    assert len(comparison.curves["tuned"]) == TOY.n_runs


def test_too_few_steps_are_one_clear_line(eager):
    short = replace(TOY, n_steps=300)
    with pytest.raises(ConfigError, match="'n_steps' is too small"):
        Comparison(short, two_modes(), Run(short, 0), RunOptions()).compare()


def test_full_data_have_no_noise():
    target = two_modes().target
    full, at = FullData.of(target), torch.tensor([[0.3], [-2.0]])
    noise = full.draw_noise(torch.Generator(), 1, (2, 1), torch.float32)
    assert torch.equal(full.energy(at, noise).total, target.full_energy(at))
    assert full.batch_size == target.n_data == 40


def test_the_period_has_the_exact_law_of_the_target_that_is_sampled():
    """a and b on a grid of the target's own energies instead of by hand, at both aliases and at
    frequencies of no use.
    """
    problem = period()
    times, values = observations(2_000)
    grid, mass = exact_law(times, values)
    target = problem.target.to("cpu", torch.float64)
    places = [int(mass[near(grid, k)].argmax() + near(grid, k).nonzero()[0]) for k in (0, 1)]
    places += [places[0] + 2, int((grid - 2.0).abs().argmin())]
    side = torch.linspace(-1.0, 1.0, 121, dtype=torch.float64)
    amplitudes = torch.cartesian_prod(side, side)
    sums = []
    for place in places:
        x = torch.cat([((grid[place] - 1.5) * 30.0).expand(len(amplitudes), 1), amplitudes], 1)
        logs = torch.cat([-target.full_energy(part) for part in x.split(1_000)])
        sums.append(float(logs.logsumexp(0)))
    by_hand = mass[places].log()
    assert torch.allclose(torch.tensor(sums) - sums[0], (by_hand - by_hand[0]).float(), atol=1e-3)
    assert problem.exact == pytest.approx(0.648, abs=0.001)
    two = problem.found(torch.tensor([[[-3.9, 0, 0], [26.1, 0, 0], [0.0, 0, 0]]]))
    assert float(two) == pytest.approx(2 / 3)


def test_the_answer_of_clusters_is_that_of_a_chain_at_the_global_mode():
    """The Laplace approximation against chains on all data that start at the truth; a mutant: at a
    centre of no cluster.
    """
    problem, (centres, _, _) = clusters(3, 600), simulate(3, 600)
    draws = torchrex.sample(
        FullData.of(problem.target), temperatures=(1.0,), lr=5e-4, n_steps=3_000, burn_in=500,
        thin=10, n_runs=8, initial=centres.flatten(), compiled=False,
    )  # fmt: skip
    excess = problem.estimate(draws.values)
    assert_mean_is(excess, problem.exact)
    assert float(problem.found(draws.values).min()) == 1.0
    wrong = draws.values.clone()
    wrong[..., :2] = wrong[..., 2:4]
    assert_mean_is_not(problem.estimate(wrong), problem.exact)
    assert float(problem.found(wrong).max()) == 0.0


def test_a_short_run_and_what_is_made_of_it(toy, tmp_path, monkeypatch, capsys):
    folder = run_recipe(TOY, 0, tmp_path)
    assert folder.finished
    metrics = folder.result["metrics"]
    assert all(0 <= metrics[method] <= 1 for method in METHODS)
    assert not folder.checkpoints.exists()
    made = report.numbers(tmp_path, {TOY.recipe: TOY})
    (row,) = made["rows"]
    assert row["exact"] == two_modes().exact
    assert row["n_runs"] == 2
    answer = run_command(
        monkeypatch, capsys, "reproduce", "gallery", "--rebuild", "--out", tmp_path
    )
    code, printed, _ = answer
    assert code == 0, answer
    assert "tuned exchange" in printed
    assert (tmp_path / "gallery-period.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "gallery.json").read_text())["rows"][0]["words"] == row["words"]


def test_a_paused_run_goes_on_to_the_same_numbers(toy, tmp_path):
    whole = run_recipe(TOY, 0, tmp_path / "whole").result
    folder = run_recipe(TOY, 0, tmp_path / "parts", budget=1e-3)
    assert folder.status == "paused"
    folder = run_recipe(TOY, 0, tmp_path / "parts", resume=True)
    assert folder.result["curves"] == whole["curves"]


def test_a_verdict_needs_both():
    """5 standard errors better than the best baseline, and within 3 of the exact answer."""
    each = {"title": "x", "score": 1.0, "score_se": 0.1, "off": 9.0}
    methods = dict.fromkeys(METHODS, each)
    good = {**each, "score": 0.1, "off": 2.9}
    assert report.verdict({**methods, "tuned": good})["passes"]
    assert not report.verdict({**methods, "tuned": {**good, "off": -3.1}})["passes"]
    assert not report.verdict({**methods, "tuned": {**good, "score": 0.4}})["passes"]
    assert not report.verdict({**methods, "tuned": good, "pooled": good})["passes"]


def test_committed_results_make_the_committed_table(tmp_path, monkeypatch, capsys):
    name = "gallery/period"
    shutil.copytree(RESULTS / name, tmp_path / name)
    command = ("reproduce", "gallery", "--rebuild", "--only", "period", "--out", tmp_path)
    assert run_command(monkeypatch, capsys, *command)[0] == 0
    table = (tmp_path / "gallery-period.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("| period |")]
    assert len(lines) == len(METHODS)
    assert set(lines) <= set((RESULTS / "gallery.md").read_text().splitlines())
    exact = json.loads((RESULTS / name / "seed=0" / "result.json").read_text())["metrics"]
    assert math.isclose(exact["answer_true"], get_recipe(name).problem().exact, rel_tol=1e-6)
