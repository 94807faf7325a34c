"""Small matrices in the recorded loop: the numbers of torch.linalg, its errors, the fallback."""

from __future__ import annotations

import pytest
import torch

import torchrex as tr
from test_loop import trace
from torchrex.density.linear_algebra import LARGEST_MATRIX
from torchrex.density.replay import Replay

N = 20
PLACES = torch.linspace(0.0, 4.0, N, dtype=torch.float64)
VALUES = torch.sin(2.0 * PLACES) + 0.1 * torch.cos(17.0 * PLACES)


def covariance(x):
    """Of a Gaussian process at 20 places; x: log of length, amplitude and noise."""
    length, amplitude, noise = x.exp()[..., None, None].unbind(-3)
    squares = (PLACES[:, None] - PLACES).square().to(x.dtype)
    smooth = amplitude.square() * torch.exp(-0.5 * squares / length.square())
    return smooth + (noise.square() + 1e-4) * torch.eye(N, dtype=x.dtype)


def prior(x):
    return -0.5 * x.square().sum(-1)


def by_factor(x):
    factor = torch.linalg.cholesky(covariance(x))
    values = VALUES.to(x.dtype).expand(*x.shape[:-1], N)[..., None]
    white = torch.linalg.solve_triangular(factor, values, upper=False)
    size = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return prior(x) - 0.5 * white.square().sum((-2, -1)) - size


def by_upper_factor(x):
    factor = torch.linalg.cholesky(covariance(x), upper=True)
    values = VALUES.to(x.dtype).expand(*x.shape[:-1], N)[..., None]
    weights = torch.cholesky_solve(values, factor, upper=True)
    size = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return prior(x) - 0.5 * (weights * values).sum((-2, -1)) - size


def by_solve(x):
    matrix, values = covariance(x), VALUES.to(x.dtype).expand(*x.shape[:-1], N)
    weights = torch.linalg.solve(matrix, values)
    return prior(x) - 0.5 * (weights * values).sum(-1) - 0.5 * torch.logdet(matrix)


def by_inverse(x):
    matrix, values = covariance(x), VALUES.to(x.dtype)
    square = values @ torch.linalg.inv(matrix) @ values
    return prior(x) - 0.5 * square - 0.5 * torch.linalg.slogdet(matrix)[1]


def by_distribution(x):
    law = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=x.dtype), covariance(x))
    return prior(x) + law.log_prob(VALUES.to(x.dtype))


def make_run(density, compiled, dtype=torch.float64, n_runs=5, batched=True, initial=-0.5):
    target = tr.LogDensity(density, 3, batched=batched)
    ensemble = tr.TensorEnsemble.start(
        target, n_rungs=2, n_runs=n_runs, initial=initial, dtype=dtype
    )
    return tr.DensityExchange(ensemble, tr.Ladder((1.0, 2.0), 1e-3), compiled=compiled)


def is_recorded(run):
    return run.is_compiled and run._loop._replay.is_recorded


@pytest.mark.parametrize(
    ("density", "batched"),
    [
        (by_factor, True),
        (by_factor, False),
        (by_upper_factor, True),
        (by_solve, True),
        (by_solve, False),
        (by_inverse, True),
        (by_distribution, True),
    ],
)
def test_densities_of_a_covariance_are_recorded_and_give_the_eager_numbers(density, batched):
    compiled, eager = (make_run(density, each, batched=batched) for each in (True, False))
    got, expected = trace(compiled, 100), trace(eager, 100)
    assert is_recorded(compiled)
    assert got[2].any(), "no swap was made, so nothing was compared"
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-8, atol=1e-8, equal_nan=True)


def test_float32_agrees_over_a_short_run():
    compiled, eager = (make_run(by_solve, each, torch.float32) for each in (True, False))
    for a, b in zip(trace(compiled, 20), trace(eager, 20), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-3, atol=1e-3, equal_nan=True)
    assert is_recorded(compiled)


def all_functions(matrix, positive, right):
    """Every function that the loop has code for, with its arguments turned in all ways."""
    aten = torch.ops.aten
    lower, info = aten.linalg_cholesky_ex.default(positive)
    upper, _ = aten.linalg_cholesky_ex.default(positive, upper=True)
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(matrix)
    turned = right.mT.contiguous()

    def triangular(a, b, **kind):
        return aten.linalg_solve_triangular.default(a, b, **kind)

    results = [
        lower,
        upper,
        triangular(lower, right, upper=False),
        triangular(lower.mT, right, upper=True),
        triangular(lower, turned, upper=False, left=False),
        triangular(upper, right[..., :1], upper=True),
        triangular(lu, right, upper=False, unitriangular=True),
        aten.cholesky_solve.default(right, lower),
        aten.cholesky_solve.default(right, upper, upper=True),
        aten.linalg_lu_solve.default(lu, pivots, right),
        aten.linalg_lu_solve.default(lu, pivots, right, adjoint=True),
        aten.linalg_lu_solve.default(lu, pivots, turned, left=False),
        torch.linalg.solve(matrix, right),
        torch.linalg.solve(matrix.mT, right),
        torch.linalg.inv(matrix),
        *torch.linalg.slogdet(matrix),
        torch.bmm(matrix, right),
        torch.bmm(right.mT, matrix.mT),
    ]
    rows = [(1.0 * each).reshape(len(each), -1) for each in [*results, lu, pivots, info]]
    return [matrix, *rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "n", "columns"), [(1, 1, 1), (3, 2, 5), (9, 11, 8), (17, 20, 9)])
def test_every_function_gives_the_numbers_of_torch(count, n, columns, dtype):
    """Batches that do not fill the lanes, and matrices that need pivots."""
    generator = torch.Generator().manual_seed(n)
    matrix = torch.randn(count, n, n, generator=generator, dtype=dtype)
    positive = matrix @ matrix.mT + n * torch.eye(n, dtype=dtype)
    right = torch.randn(count, n, columns, generator=generator, dtype=dtype)
    replay = Replay(all_functions, [matrix], [positive, right])
    assert replay.is_recorded
    outputs = replay.outputs(2)
    replay.run(2, [torch.stack([each, each]) for each in (positive, right)], outputs)
    expected = all_functions(matrix, positive, right)[1:]
    tolerance = 2e-3 if dtype == torch.float32 else 1e-9
    for got, right_value in zip(outputs, expected, strict=True):
        for row in got:
            torch.testing.assert_close(row, right_value, rtol=tolerance, atol=tolerance)


def test_a_run_has_the_same_bits_alone_and_among_others():
    """Each number of a register belongs to another matrix."""
    matrix = torch.randn(7, 9, 9, generator=torch.Generator().manual_seed(0))
    positive, right = matrix @ matrix.mT + torch.eye(9), matrix[:, :, :3].contiguous()

    def outputs_of(rows):
        given = [each[rows].contiguous() for each in (matrix, positive, right)]
        replay = Replay(all_functions, given[:1], given[1:])
        outputs = replay.outputs(1)
        replay.run(1, [each[None] for each in given[1:]], outputs)
        return [each[0] for each in outputs]

    for among, alone in zip(outputs_of(slice(None)), outputs_of(slice(5, 6)), strict=True):
        torch.testing.assert_close(among[5:6], alone, rtol=0, atol=0)


@pytest.mark.skipif(
    torch.__version__ < (2, 11), reason="Inductor drops the check: the energy becomes NaN"
)
def test_a_matrix_without_a_factor_is_the_error_of_torch_and_the_run_stays_as_it_was():
    def breaks(x):
        matrix = torch.eye(2, dtype=x.dtype) * (1.0 - x[:, :1, None])
        return torch.linalg.cholesky(matrix).diagonal(dim1=-2, dim2=-1).log().sum(-1) + 9 * x.sum(1)

    runs = [make_run(breaks, compiled, initial=0.0) for compiled in (True, False)]
    messages = []
    for run in runs:
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite") as raised:
            trace(run, 5_000)
        messages.append(str(raised.value))
        assert bool(run.ensemble.position.isfinite().all())
    assert is_recorded(runs[0])
    assert messages[0] == messages[1]


def by_guarded_factor(x):
    """A wall where the correlation matrix has no factor."""
    one = torch.ones_like(x[..., 0])
    rows = [torch.stack([one, x[..., 0]], -1), torch.stack([x[..., 0], one], -1)]
    factor, info = torch.linalg.cholesky_ex(torch.stack(rows, -2))
    inside = 0.1 * factor.square().sum((-1, -2)) - 0.5 * x.square().sum(-1)
    return torch.where(info == 0, inside, -5.0 * x.square().sum(-1))


def test_a_density_may_pass_over_a_matrix_without_a_factor():
    """Mutant: the root of a pivot that is not positive, NaN, which torch.where does not keep out of
    the gradient.
    """
    run = make_run(by_guarded_factor, True, initial=0.0)
    position = torch.cat([info.position[..., 0].flatten() for info in run.advance(5_000)])
    assert is_recorded(run)
    assert position.isfinite().all()
    assert (position.abs() > 1.0).any()


def test_a_large_matrix_is_left_to_lapack():
    n = LARGEST_MATRIX + 1

    def step(matrix):
        return [matrix, 1.0 * torch.linalg.cholesky(matrix)]

    replay = Replay(step, [torch.eye(n).expand(2, n, n).clone()], [])
    assert not replay.is_recorded
    outputs = replay.outputs(1)
    replay.run(1, [], outputs)
    assert torch.equal(outputs[0][0], torch.eye(n).expand(2, n, n))
