"""The compiled loop: the numbers of the eager one, a fallback with a reason, exact continuation."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest
import torch

import torchrex as tr
from densities import MIXTURE, SETUPS
from torchrex.density import loop as block
from torchrex.density.loop import STEPS_WORTH_COMPILING, CompiledLoop, EagerLoop


def make_run(name, compiled, dtype=torch.float64, n_runs=5, seed=3):
    setup = dict(SETUPS[name])
    target, sampler, ladder = setup.pop("target")(), setup.pop("sampler", None), setup.pop("ladder")
    ensemble = tr.TensorEnsemble.start(
        target, sampler, n_rungs=ladder.n_rungs, n_runs=n_runs, initial=0.1, dtype=dtype
    )
    return tr.DensityExchange(ensemble, ladder, **setup, seed=seed, compiled=compiled)


def trace(run, n_steps):
    infos = [tuple(values.clone() for values in info) for info in run.advance(n_steps)]
    return [torch.cat(values) for values in zip(*infos, strict=True)]


@pytest.mark.parametrize("name", SETUPS)
def test_compiled_and_eager_give_the_same_numbers(name):
    """float64, 300 steps: the same swaps, and everything else within 1e-9 of its size."""
    compiled, eager = make_run(name, True), make_run(name, False)
    got, expected = trace(compiled, 300), trace(eager, 300)
    assert isinstance(compiled._loop, CompiledLoop), "the compiled loop was not used"
    assert isinstance(eager._loop, EagerLoop)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        if a.is_floating_point():
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
        else:
            assert torch.equal(a, b)
    for a, b in zip(compiled.state, eager.state, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12)
    if compiled.rules.ladder.n_pairs:
        assert got[2].any(), "no swap was made, so nothing was compared"


def assert_resumes(name, compiled, first, n=200):
    whole = trace(make_run(name, compiled), n)
    stopped = make_run(name, compiled)
    assert stopped._block_length == 64
    beginning = trace(stopped, first)
    continued = make_run(name, compiled, seed=99)
    continued.load_state_dict(stopped.state_dict())
    rest = trace(continued, n - first)
    for a, b, c in zip(whole, beginning, rest, strict=True):
        torch.testing.assert_close(torch.cat([b, c]), a, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", SETUPS)
def test_stopped_and_continued_equals_never_stopped(name, monkeypatch):
    """A run restored from state_dict goes on bit for bit: every sampler, pairing, estimator and
    rule."""
    monkeypatch.setattr(block, "LONGEST", 64)
    assert_resumes(name, False, 100)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", [1, 63, 64, 65, 128])
def test_continuing_at_and_around_the_end_of_a_block(compiled, first, monkeypatch):
    monkeypatch.setattr(block, "LONGEST", 64)
    assert_resumes("sghmc, refreshed, random pairs", compiled, first)


def test_the_state_of_another_run_is_refused():
    state = make_run("the paper's", False).state_dict()
    with pytest.raises(ValueError, match="another run"):
        make_run("all in turn, adaptive factor", False).load_state_dict(state)


def test_a_run_that_began_with_one_step_is_compiled_when_it_pays():
    run = make_run("one rung", None, torch.float32)
    run.step()
    assert isinstance(run._loop, EagerLoop)
    for _ in run.advance(STEPS_WORTH_COMPILING):
        pass
    assert isinstance(run._loop, CompiledLoop)


def test_many_measurements_do_not_make_large_blocks():
    target = tr.Noisy(MIXTURE, tr.Gaussian(2.0))
    ensemble = tr.TensorEnsemble.start(target, n_rungs=2, n_runs=64)
    rules = tr.DensityExchange(
        ensemble, tr.Ladder((1.0, 2.0), 0.1), noise=tr.RunningMean(tr.RepeatedDraws(200, every=1))
    ).rules
    assert block.block_length(rules, ensemble) == block.SHORTEST


def normal(x):
    return -0.5 * x.square().sum(-1)


@pytest.mark.parametrize(
    ("density", "reason"),
    [
        (lambda x: normal(x) if x.sum() > 0 else 0.8 * normal(x), "branches on the values"),
        (lambda x: normal(x) + 0.0 * torch.randn(len(x)), "random numbers of its own"),
    ],
)
def test_what_cannot_be_compiled_runs_eagerly_with_one_reason(density, reason, caplog):
    threads, common = torch.get_num_threads(), {"temperatures": (1.0, 2.0), "lr": 0.1}
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        draws = tr.sample(density, dim=2, **common, n_steps=50, compiled=True)
    assert draws.n_draws == 50
    (message,) = [record.getMessage() for record in caplog.records if record.name == "torchrex"]
    assert reason in message
    assert re.search(r"\([\d.]+ ms a step\)", message)
    assert torch.get_num_threads() == threads


def covariance_at(x):
    """[[1, r], [r, 1]] with r = 0.5, for every point."""
    covariance = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=x.dtype).expand(len(x), 2, 2)
    return covariance + 0.0 * x[:, :1, None]


def by_cholesky(x):
    """log N(x; 0, r), by library functions that no kernel contains; the loop has code for them."""
    factor = torch.linalg.cholesky(covariance_at(x))
    whitened = torch.linalg.solve_triangular(factor, x[:, :, None], upper=False)
    return -0.5 * whitened.square().sum((1, 2))


def by_eigenvalues(x):
    """The same, by library functions that the loop has no code for."""
    values, vectors = torch.linalg.eigh(covariance_at(x))
    return -0.5 * ((vectors.mT @ x[:, :, None])[..., 0].square() / values).sum(1)


def of_library_functions(density, kind, compiled, seed=3):
    """A run with measurements of sigma2, or with swap batches, whose step calls LAPACK."""
    data = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    of_data = tr.TallPosterior(
        lambda w, y: density(torch.stack([w[..., 0] - y, w[..., 1] + y], -1).flatten(0, -2)).view(
            torch.broadcast_shapes(w.shape[:-1], y.shape)
        ),
        lambda w: -0.5 * w.square().sum(-1),
        (data,),
        2,
        batch_size=20,
    )
    noisy = tr.Noisy(tr.LogDensity(density, 2), tr.Gaussian(1.0))
    target, rules = {
        "measured": (noisy, {"noise": tr.RunningMean(tr.RepeatedDraws(10, 7), initial=1.0)}),
        "swap batch": (of_data, {"swap_batch": 100, "swap_interval": 7}),
    }[kind]
    ensemble = tr.TensorEnsemble.start(
        target, n_rungs=2, n_runs=5, initial=0.1, dtype=torch.float64
    )
    ladder = tr.Ladder((1.0, 1.5), 0.05 if kind == "measured" else 1e-3)
    return tr.DensityExchange(ensemble, ladder, seed=seed, compiled=compiled, **rules)


@pytest.mark.parametrize("density", [by_cholesky, by_eigenvalues])
@pytest.mark.parametrize("kind", ["measured", pytest.param("swap batch", marks=pytest.mark.slow)])
def test_a_step_that_calls_library_functions_is_compiled(density, kind, monkeypatch):
    """In the loop, or called from Python. The numbers of the eager loop; stopped within a block and
    continued is never stopped."""
    monkeypatch.setattr(block, "LONGEST", 64)
    compiled, eager = (of_library_functions(density, kind, each) for each in (True, False))
    got, expected = trace(compiled, 150), trace(eager, 150)
    assert isinstance(compiled._loop, CompiledLoop)
    assert compiled._loop._replay.is_recorded == (density is by_cholesky)
    assert got[2].any(), "no swap was made, so nothing was compared"
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
    stopped, continued = (of_library_functions(density, kind, True, seed) for seed in (3, 9))
    beginning = trace(stopped, 75)
    continued.load_state_dict(stopped.state_dict())
    for a, b, c in zip(got, beginning, trace(continued, 75), strict=True):
        torch.testing.assert_close(torch.cat([b, c]), a, rtol=0, atol=0, equal_nan=True)


LAWS = {
    "normal": lambda x: torch.distributions.Normal(0.0, x.new_ones(2)).log_prob(x).sum(-1),
    "mixture": lambda x: (
        torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(x.new_tensor([0.4, 0.6])),
            torch.distributions.Normal(x.new_tensor([-1.0, 1.0]), x.new_tensor([0.5, 0.7])),
        )
        .log_prob(x)
        .sum(-1)
    ),
    "of a point": lambda x: torch.distributions.MultivariateNormal(
        x.new_zeros(2), x.new_tensor([[1.0, 0.5], [0.5, 1.0]])
    ).log_prob(x),
}


@pytest.mark.parametrize("law", LAWS)
def test_checked_distributions_are_compiled_and_give_the_eager_numbers(law):
    def make(compiled):
        target = tr.LogDensity(LAWS[law], 2)
        ensemble = tr.TensorEnsemble.start(
            target, n_rungs=2, n_runs=5, initial=0.1, dtype=torch.float64
        )
        return tr.DensityExchange(ensemble, tr.Ladder((1.0, 3.0), 0.05), compiled=compiled)

    compiled, eager = make(True), make(False)
    for a, b in zip(trace(compiled, 100), trace(eager, 100), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
    assert compiled.is_compiled


def test_matrix_products_are_compiled(caplog):
    precision = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    with caplog.at_level(logging.WARNING, logger="torchrex"):
        target = tr.LogDensity(lambda x: -0.5 * ((x @ precision) * x).sum(-1), 2)
        sizes = {"n_steps": 5000, "n_runs": 32, "compiled": True}
        draws = tr.sample(target, temperatures=(1.0, 2.0), lr=0.02, **sizes)
    assert not [record for record in caplog.records if record.name == "torchrex"]
    covariance = torch.cov(draws.values.flatten(0, 1).T)
    assert torch.allclose(covariance, torch.linalg.inv(precision), atol=0.1)


def test_without_a_compiler_it_runs_eagerly_with_one_warning(tmp_path):
    code = (
        "import torchrex as tr, logging; logging.basicConfig(format='%(name)s %(message)s');"
        "density = lambda x: -0.5 * x.square().sum(-1); ladder = tr.Ladder((1.0, 2.0), 0.1);"
        "print(tr.sample(density, dim=1, ladder=ladder, n_steps=20, compiled=True))"
    )
    missing = {"CXX": "/no/such/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **missing}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert "20 draws" in done.stdout
    assert done.stderr.count("torchrex running eagerly") == 1
    assert "Traceback" not in done.stderr


def test_float32_agrees_over_a_short_run():
    got, expected = (
        trace(make_run("the paper's", compiled, torch.float32), 60) for compiled in (True, False)
    )
    assert torch.equal(got[2], expected[2])
    assert torch.allclose(got[0], expected[0], atol=1e-4)


def test_one_step_at_a_time_is_the_same():
    run, whole = make_run("the paper's", False), make_run("the paper's", False)
    one_by_one = torch.stack([run.step().position for _ in range(30)])
    assert torch.equal(one_by_one, trace(whole, 30)[0])


def test_slow_steps_come_in_short_stretches_with_the_same_numbers(monkeypatch):
    """Signals and the clock are looked at between stretches."""
    fast, slow = make_run("the paper's", True), make_run("the paper's", True)
    expected = trace(fast, 600)
    assert fast._loop.stretch > 128
    monkeypatch.setattr(block, "LONGEST_STRETCH", 1e-9)
    got = trace(slow, 600)
    assert slow._loop.stretch == 1
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
