"""Figure 1 comes out: the acceptance rates, weights and variances of an independent implementation
and of the paper.

Means over 64 runs of 100,000 steps; the tolerances are many standard errors wide (rates have errors
below 0.05 points), and each check would fail for the neighbouring value of F.
"""

from __future__ import annotations

import pytest

from torchrex.diagnostics import MixtureQuantiles, wasserstein
from torchrex.experiments.recipes import get_recipe


@pytest.fixture(scope="module")
def metrics():
    """Runs a recipe once and keeps its metrics."""
    cache = {}

    def get(name):
        if name not in cache:
            config = get_recipe(f"figure1/{name}")
            cache[name] = config.measure(config.draw(seed=0))[0]
        return cache[name]

    return get


@pytest.mark.parametrize(
    ("recipe", "metric", "expected", "tolerance"),
    [
        ("case1-resgld", "acceptance_rate", 0.1125, 0.005),
        ("case1-resgld", "left_weight", 0.41, 0.02),
        ("case1-resgld", "noise_variance", 4.0, 0.12),
        ("case1-naive", "acceptance_rate", 0.42, 0.01),
        ("case1-naive", "left_weight", 0.49, 0.02),
        ("case2-resgld", "acceptance_rate", 0.197, 0.005),
        ("case2-resgld", "noise_variance", 1.67, 0.05),
        ("case3-resgld-F1", "acceptance_rate", 0.0, 0.0002),
        ("case3-resgld-F2", "acceptance_rate", 0.0070, 0.0015),
        ("case3-resgld-F2", "noise_variance", 61.0, 1.83),
        ("case3-resgld-F4", "acceptance_rate", 0.087, 0.007),
        ("case3-naive", "acceptance_rate", 0.46, 0.01),
    ],
)
def test_numbers(metrics, recipe, metric, expected, tolerance):
    assert metrics(recipe)[metric] == pytest.approx(expected, abs=tolerance)


def test_the_order_of_the_methods(metrics):
    """Corrected beats naive beats SGLD in distance to the truth; on case 3 F = 2 is best."""
    for case in ("case1", "case2"):
        corrected, naive, sgld = (
            metrics(f"{case}-{method}")["w2"] for method in ("resgld", "naive", "sgld")
        )
        assert corrected < 0.7 * naive < naive < 0.7 * sgld
    best = metrics("case3-resgld-F2")
    for other in ("case3-resgld-F1", "case3-naive", "case3-sgld"):
        assert best["w1"] + 3 * best["w1_se"] < metrics(other)["w1"]


def test_distance_of_exact_draws_is_small_and_of_shifted_ones_is_the_shift():
    mixture = get_recipe("figure1/case1-resgld").mixture()
    draws = mixture.quantile(mixture.cdf(mixture.sample(20_000).flatten()))[None]
    quantiles = MixtureQuantiles(mixture).at_midpoints(20_000)
    assert float(wasserstein(draws, quantiles, 1)) < 0.1
    assert float(wasserstein(quantiles[None] + 0.5, quantiles, 1)) == pytest.approx(0.5)
    assert float(wasserstein(quantiles[None] + 0.5, quantiles, 2)) == pytest.approx(0.5)
    assert float((mixture.quantile(mixture.cdf(quantiles)) - quantiles).abs().max()) < 1e-6
