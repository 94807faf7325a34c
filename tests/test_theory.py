"""The exact laws of `torchrex reproduce theory`, and that its numbers come back.

Laws on the grid are compared with what is known of them without a grid: Gibbs laws, the spectrum of
an Ornstein-Uhlenbeck process, the variance of SGLD on a quadratic. Then runs of the library are
compared with the exact law of their chain.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from command import refused, run_command
from torchrex.experiments import dumps, grid_law, run_recipe
from torchrex.experiments.grid_law import Grid, gap_of, mean_acceptance, stationary
from torchrex.experiments.law_distance import chi_square, deviations, jackknife, slope, w2_squared
from torchrex.experiments.theory import REACH, WELLS, start_of, start_on, theory_recipes
from torchrex.report import theory
from torchrex.targets import Gaussian, StudentT

RESULTS = Path(__file__).parents[1] / "results"
PAIR = (1.0, 5.0)


@pytest.fixture(scope="module")
def grid():
    return Grid(WELLS, REACH, 80)


def left_weight(grid, noise, factor):
    rate = 10.0 * grid.acceptance(PAIR, noise, factor)
    likely = int(grid.gibbs_pair(PAIR).argmax())
    law = stationary(grid.pair_generator(PAIR, rate), likely).reshape(grid.n, grid.n)
    return law.sum(1)[grid.axis < 0].sum()


def test_exact_swaps_keep_the_gibbs_law(grid):
    gibbs = grid.gibbs_pair(PAIR)
    generator = grid.pair_generator(PAIR, 3.0 * grid.acceptance(PAIR))
    assert np.abs(generator.T @ gibbs.ravel()).max() < 1e-12
    found = stationary(generator, int(gibbs.argmax())).reshape(gibbs.shape)
    assert np.abs(found - gibbs).max() < 1e-12
    always = grid.pair_generator(PAIR, np.full_like(gibbs, 3.0))  # the mutant: no test at all
    assert np.abs(always.T @ gibbs.ravel()).max() > 1e-3


def test_without_swaps_the_spectrum_is_that_of_the_slower_rung(grid):
    accepted = grid.acceptance(PAIR)
    alone = [gap_of(grid.generator(tau)) for tau in PAIR]
    pair = [gap_of(grid.pair_generator(PAIR, r * accepted)) for r in (0.0, 0.1, 1.0, 10.0)]
    assert pair[0] == pytest.approx(min(alone), rel=1e-8)
    assert pair == sorted(pair)
    assert pair[-1] > 4 * pair[0]


def test_the_gap_of_an_ornstein_uhlenbeck_process_is_its_stiffness():
    """U = x^2 / 2 at any temperature, on the grid and in the basis of sinc functions."""
    for dim in (1, 2):
        target = tr.GaussianMixture([1.0], torch.zeros(1, dim), torch.ones(1, dim))
        coarse = Grid(target, 6.0, 16)
        none = np.zeros((16**dim,) * 2)
        assert grid_law.gap_of_split(coarse, (1.0, 1.5), none) == pytest.approx(1.0, rel=1e-3)
    fine = Grid(tr.GaussianMixture([1.0], [0.0], [1.0]), 10.0, 400)
    for temperature in (1.0, 2.0):
        assert gap_of(fine.generator(temperature)) == pytest.approx(1.0, rel=1e-3)


def test_the_split_spectrum_is_that_of_the_generator():
    fine = Grid(WELLS, REACH, 160)
    for r in (0.0, 1.0, 10.0):
        rate = r * fine.acceptance(PAIR)
        exact = gap_of(fine.pair_generator(PAIR, rate))
        assert grid_law.gap_of_split(fine, PAIR, rate) == pytest.approx(exact, rel=0.01)


def test_corrected_gaussian_jumps_keep_the_law_and_others_do_not(grid):
    exact = grid.gibbs(1.0)[grid.axis < 0].sum()
    for std in (0.5, 2.0, 4.0):
        assert left_weight(grid, Gaussian(std), 1.0) == pytest.approx(exact, abs=1e-9)
    assert left_weight(grid, Gaussian(2.0), 2.0) > exact + 0.02
    assert left_weight(grid, Gaussian(2.0), math.inf) > exact + 0.05
    heavy = StudentT(3.0, 2.0 / math.sqrt(3.0))  # of the same variance: corrected too much
    assert left_weight(grid, heavy, 1.0) < exact - 0.01


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_the_mean_acceptance_under_heavy_tails(factor):
    """Against draws of the library's noise; nearly Gaussian noise has the closed form."""
    difference, gap, noise = np.linspace(-6, 6, 7), 0.8, StudentT(3.0, 1.2)
    found = mean_acceptance(difference, gap, noise, factor)
    generator = torch.Generator().manual_seed(0)
    draw = noise.draw(generator, (2, 200_000), torch.float64)
    for d, expected in zip(difference, found, strict=True):
        log_ratio = d + gap * (draw[0] - draw[1]) - gap**2 * noise.variance / factor
        assert_mean_is(log_ratio.clamp(max=0.0).exp(), expected)
    nearly = mean_acceptance(difference, gap, StudentT(1e6, 1.5), factor)
    assert nearly == pytest.approx(
        mean_acceptance(difference, gap, Gaussian(1.5), factor), abs=1e-5
    )


def test_a_step_on_a_quadratic_has_the_variance_of_the_discrete_chain():
    """tau / (a (1 - lr a / 2)), not tau / a."""
    grid, lr, temperature = Grid(tr.GaussianMixture([1.0], [0.0], [0.5]), 4.0, 200), 0.1, 1.5
    law = np.linalg.matrix_power(grid.euler(temperature, lr), 400)[100]
    expected = temperature / (4.0 * (1.0 - lr * 4.0 / 2.0))
    assert law @ grid.axis**2 == pytest.approx(expected, rel=1e-6)


def test_runs_have_the_exact_law_of_their_chain():
    """After 60 steps from the left well; without swaps, the mutant, more is still there."""
    grid, lr, r, steps = Grid(WELLS, REACH, 160), 0.05, 4.0, 60
    moves = (grid.euler(1.0, lr), grid.euler(5.0, lr))
    start = np.outer(start_on(grid), start_on(grid))
    rules = {"n_steps": steps, "thin": steps, "n_runs": 40_000, "initial": start_of(WELLS)}
    draws = tr.sample(WELLS, temperatures=PAIR, lr=lr, swap_intensity=r, seed=1, **rules)
    left = (draws.values[:, 0, 0] < 0).double()
    for intensity, check in ((r, assert_mean_is), (0.0, assert_mean_is_not)):
        swap = intensity * lr * grid.acceptance(PAIR)
        law = grid_law.chain(start, moves, swap, steps).sum(1)
        check(left, law[grid.axis < 0].sum())


def test_squared_distances_have_no_bias():
    """Of exact draws they are 0 on average, of shifted ones the square of the shift; the plain W2^2
    of the same draws is far above 0."""
    values = WELLS.sample(2_000_000, generator=torch.Generator().manual_seed(0))
    rows = values.reshape(20_000, 100, 1).float()  # 100 times: 100 independent clouds
    draws = tr.sample(WELLS, temperatures=(1.0,), lr=0.1, n_steps=1)
    gaps, counts = deviations(replace(draws, values=rows), WELLS)
    assert_mean_is(torch.tensor(chi_square(counts)), 0.0)
    assert_mean_is(torch.tensor(w2_squared(gaps)), 0.0)
    assert_mean_is(torch.tensor(w2_squared(gaps + 0.1)), 0.01)
    assert_mean_is_not(torch.tensor((gaps**2).mean((0, 1, 3))), 0.0)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    groups = np.random.default_rng(0).normal(size=(10, 1))
    mean, error = jackknife(lambda g: g.mean(0), groups)
    assert error == pytest.approx(groups.std(ddof=1) / math.sqrt(10))
    assert mean == pytest.approx(groups.mean())
    x = np.arange(5.0)
    assert slope(x, 3.0 * x + 1.0, 1.0 + x) == pytest.approx(3.0)


def test_the_law_over_time_decays_at_the_gap_and_keeps_the_gibbs_law(grid):
    gibbs, rate, step = grid.gibbs_pair(PAIR), 3.0 * grid.acceptance(PAIR), 0.02
    moves = (grid.flow(1.0, step), grid.flow(5.0, step))
    kept = next(itertools.islice(grid_law.diffuse(gibbs, moves, rate, step), 50, None))
    assert np.abs(kept - gibbs).max() < 1e-12
    start = np.outer(start_on(grid), start_on(grid))
    laws = itertools.islice(grid_law.diffuse(start, moves, rate, step), 400, 501, 100)
    before, after = (np.sqrt(((law - gibbs) ** 2 / gibbs).sum()) for law in laws)
    gap = gap_of(grid.pair_generator(PAIR, rate))
    assert np.log(before / after) / (100 * step) == pytest.approx(gap, rel=0.01)


# The command


@pytest.fixture
def cli(monkeypatch, capsys):
    return lambda *words, **more: run_command(monkeypatch, capsys, *words, **more)


def test_committed_results_give_the_committed_numbers_and_picture(cli, tmp_path):
    shutil.copytree(RESULTS / "theory", tmp_path / "theory")
    code, out, err = cli("reproduce", "theory", "--rebuild", "--out", tmp_path)
    assert code == 0, err
    assert "delta_S" in out
    made = tmp_path / "theory.json"
    assert json.loads(made.read_text()) == json.loads((RESULTS / "theory.json").read_text())
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")
    page = (Path(__file__).parents[1] / "docs" / "theory.md").read_text()
    rows = [row for row in (tmp_path / "theory.md").read_text().splitlines() if row[:1] == "|"]
    assert all(row in page for row in rows), "docs/theory.md has another table"


def test_small_runs_come_through(tmp_path):
    """Alone they make a table of their own rows, with the same numbers for the same seed."""
    small = {
        "theory/variance": {"n_steps": 100, "n_runs": 40},
        "theory/discretisation": {"n_steps": 20, "n_runs": 400, "lrs": (0.1, 0.05)},
    }
    configs = {name: replace(theory_recipes()[name], **more) for name, more in small.items()}
    for config in configs.values():
        config.check()
        assert run_recipe(config, 3, tmp_path).finished
    found = theory.numbers(tmp_path, configs)
    assert list(found["data"]) == ["variance", "discretisation"]
    assert len(found["rows"]) == 6
    theory.draw(json.loads(dumps(found)), tmp_path / "picture.png")
    again = run_recipe(configs["theory/variance"], 3, tmp_path / "again").result
    assert again["curves"] == found["data"]["variance"]["curves"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("n_runs=25", "a multiple of 10"),
        ("temperatures=1,5,9", "1 and one that is hotter"),
        ("factors=1,2", "1 and inf among them"),
    ],
)
def test_settings_that_do_not_go_together(cli, setting, expected):
    refused(cli("run", "theory/noise", settings=[setting]), expected)


@pytest.mark.parametrize("option", [("--budget", "9m"), ("--log", "jsonl")])
def test_options_that_it_does_not_have(cli, tmp_path, option):
    refused(cli("run", "theory/variance", *option, "--out", tmp_path), "leave out --budget")
    assert not list(tmp_path.rglob("*.json"))
