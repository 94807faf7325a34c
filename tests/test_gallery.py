"""The gallery: equal cost, exact answers, a short run and what is made of it."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal

import torchrex
from assertions import assert_mean_is, assert_mean_is_not
from command import run_command
from torchrex.errors import ConfigError
from torchrex.experiments import RunOptions, gallery, get_recipe, run_recipe
from torchrex.experiments.clusters import clusters, simulate
from torchrex.experiments.gallery import METHODS, Comparison, FullData, GalleryConfig, Problem
from torchrex.experiments.period import exact_law, near, observations, period
from torchrex.report import gallery as report
from torchrex.runs.folder import Run

RESULTS = Path(__file__).parents[1] / "results" / "gallery"
TOY = GalleryConfig("gallery/period", n_steps=6_000, n_runs=2)
QUICK = replace(TOY, n_steps=800)  # with a ladder that needs no tuning
LADDER = torchrex.Ladder.for_likelihood((1.0, 4.0, math.inf), 2e-3, prior_variance=1.0)
TUNING = 2_000.0  # examples that it would have cost
RULES = {"tempering": "likelihood", "swap_batch": 20, "swap_interval": 5}


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
    monkeypatch.setattr(gallery, "KEPT", 20)


@pytest.fixture
def toy(monkeypatch, eager):
    tuned = torchrex.Tuned(LADDER, RULES, examples=TUNING)
    monkeypatch.setattr(gallery, "problems", lambda: {TOY.recipe: gallery.Entry(two_modes, 800)})
    monkeypatch.setattr(gallery, "tune", lambda *given, **more: tuned)


def test_every_method_evaluates_as_many_examples(toy):
    """Counted where they are evaluated. The tuned exchange pays for its tuning; if it did not pay
    for its swaps, it would have 1.4 times as many.
    """
    seen: list[int] = []
    comparison = Comparison(QUICK, two_modes(seen), Run(QUICK, 0), RunOptions())
    counted, sampled = {}, comparison.sampled

    def count(method, *given, **more):
        before = sum(seen)
        draws = sampled(method, *given, **more)
        counted[method] = (sum(seen) - before) / QUICK.n_runs
        return draws

    comparison.sampled = count
    before = sum(seen)
    comparison.compare()
    # The energies by which the best of independent chains is chosen are not those of `sampled`.
    counted["pooled"] += (sum(seen) - before) / QUICK.n_runs - sum(counted.values())
    counted["tuned"] += TUNING / QUICK.n_runs
    budget = QUICK.n_steps * 10
    # Besides its steps a run evaluates a few batches, to look at the shape of the noise.
    assert counted == pytest.approx(dict.fromkeys(counted, budget), rel=0.1)
    said = {method: comparison.metrics[f"{method}_examples"] for method in METHODS}
    assert said == pytest.approx(dict.fromkeys(METHODS, budget), rel=0.01)
    assert len(comparison.curves["tuned"]) == QUICK.n_runs


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
    assert problem.answer()[0] == pytest.approx(0.648, abs=0.001)
    two = problem.found(torch.tensor([[[-3.9, 0, 0], [26.1, 0, 0], [0.0, 0, 0]]]))
    assert float(two) == pytest.approx(2 / 3)


def test_the_answer_of_clusters_is_that_of_a_chain_at_the_global_mode():
    """The Laplace approximation against chains on all data that start at the truth; a mutant: at a
    centre of no cluster.
    """
    problem, (centres, _, _) = clusters(3, 600), simulate(3, 600)
    draws = torchrex.sample(
        FullData.of(problem.target), temperatures=(1.0,), lr=5e-4, n_steps=1_000, burn_in=200,
        thin=10, n_runs=8, initial=centres.flatten(), compiled=False,
    )  # fmt: skip
    exact, _ = problem.answer()
    assert_mean_is(problem.estimate(draws.values), exact)
    assert float(problem.found(draws.values).min()) == 1.0
    wrong = draws.values.clone()
    wrong[..., :2] = wrong[..., 2:4]
    assert_mean_is_not(problem.estimate(wrong), exact)
    assert float(problem.found(wrong).max()) == 0.0


def test_a_short_run_paused_and_resumed_and_what_is_made_of_it(toy, tmp_path, monkeypatch, capsys):
    whole = run_recipe(QUICK, 0, tmp_path / "whole").result
    folder = run_recipe(QUICK, 0, tmp_path, budget=1e-3)
    assert folder.status == "paused"
    folder = run_recipe(QUICK, 0, tmp_path, resume=True)
    assert folder.finished
    assert folder.result["curves"] == whole["curves"]
    metrics = folder.result["metrics"]
    assert all(0 <= metrics[method] <= 1 for method in METHODS)
    assert not folder.checkpoints.exists()
    made = report.numbers(tmp_path, {TOY.recipe: QUICK})
    (row,) = made["rows"]
    assert row["exact"] == two_modes().answer()[0]
    assert row["n_runs"] == 2
    answer = run_command(
        monkeypatch, capsys, "reproduce", "gallery", "--rebuild", "--out", tmp_path
    )
    code, printed, _ = answer
    assert code == 0, answer
    assert "tuned exchange" in printed
    assert (tmp_path / "gallery-period.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "gallery.json").read_text())["rows"][0]["words"] == row["words"]


def test_two_processes_have_the_numbers_of_one(tmp_path, monkeypatch):
    """The first process waits with its first method until the other has drawn with one. Were the
    other to draw with a seed of its own, its checkpoints would be refused.
    """
    tuned = torchrex.Tuned(LADDER, RULES, examples=TUNING)
    monkeypatch.setattr(gallery, "tune", lambda *given, **more: tuned)
    monkeypatch.setattr(gallery, "WORTH_A_PROCESS", 1)
    config = replace(TOY, n_steps=800)
    alone = run_recipe(config, 0, tmp_path / "one").result
    sampled, elsewhere = Comparison.sampled, []

    def wait(comparison, method, plan, options=None):
        folder = comparison.run.checkpoints
        end = time.monotonic() + 120
        while not list(folder.glob("*/step=*/DONE")) and time.monotonic() < end:
            time.sleep(0.1)
        if options is not None:  # it is read from the checkpoints of the other
            elsewhere.append(method)
        return sampled(comparison, method, plan, options)

    monkeypatch.setattr(Comparison, "sampled", wait)
    both = run_recipe(config, 0, tmp_path / "two", processes=2).result
    assert elsewhere
    assert both["curves"] == alone["curves"]
    assert both["metrics"] == alone["metrics"]


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
    assert math.isclose(exact["answer_true"], get_recipe(name).problem().answer()[0], rel_tol=1e-6)
