"""Exact laws of two rungs on a grid: what section 4 of the paper speaks of, as numbers.

The state is a pair (x1, x2), the positions of the cold and of the hot rung. It diffuses and jumps
(the paper's replica exchange Langevin diffusion):

    L f = sum_k (tau_k Laplace_k f - grad U . grad_k f) + r a(x1, x2) (f(x2, x1) - f(x1, x2))

where a is min(1, S), or its mean over the noise of the energies. On a grid of N cells this is a
matrix of rates. A law of the pair is an array (N, N) that sums to 1, cold rung first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import linalg as linalg_dense
from scipy import sparse
from scipy.sparse import linalg

from torchrex.exchange import expected_acceptance
from torchrex.targets import Gaussian, GaussianMixture, NoiseModel, StudentT

Array = npt.NDArray[np.float64]
Pair = tuple[float, float]
FASTEST = 40.0  # rate of decay of the functions that `sinc_flow` keeps


class Grid:
    """`n` cells per axis on [-reach, reach]^dim; the energy and its gradient at their centres."""

    def __init__(self, target: GaussianMixture, reach: float, n: int) -> None:
        self.dim, self.n, self.width = target.dim, n, 2.0 * reach / n
        self.axis = (np.arange(n) + 0.5) * self.width - reach
        points = np.stack(np.meshgrid(*[self.axis] * self.dim, indexing="ij"), -1)
        self.points = points.reshape(-1, self.dim)
        energy, gradient = target.energy_and_gradient(torch.as_tensor(self.points), {})
        self.energy: Array = energy.total.numpy()
        self.gradient: Array = gradient.numpy()
        small = 1e-4
        self.laplacian: Array = np.zeros(len(self.points))
        for axis, shift in enumerate(small * np.eye(self.dim)):
            ends = [torch.as_tensor(self.points + sign * shift) for sign in (1, -1)]
            high, low = (target.energy_and_gradient(end, {})[1][:, axis].numpy() for end in ends)
            self.laplacian += (high - low) / (2 * small)

    def gibbs(self, temperature: float) -> Array:
        """exp(-U / tau), normalised over the cells: (N,)."""
        weight = np.exp(-(self.energy - self.energy.min()) / temperature)
        return np.asarray(weight / weight.sum())

    def gibbs_pair(self, temperatures: Pair) -> Array:
        return np.outer(*(self.gibbs(tau) for tau in temperatures))

    def generator(self, temperature: float) -> Any:
        """Rates of one Langevin diffusion, sparse (N, N), reversible with respect to `gibbs`.

        rate(i -> j) = tau / h^2 exp(-(U_j - U_i) / (2 tau))    for neighbours i, j
        """
        cells = np.arange(len(self.energy)).reshape((self.n,) * self.dim)
        rows, columns = [], []
        for axis in range(self.dim):
            low = cells.take(range(self.n - 1), axis).ravel()
            high = cells.take(range(1, self.n), axis).ravel()
            rows += [low, high]
            columns += [high, low]
        i, j = np.concatenate(rows), np.concatenate(columns)
        rise = (self.energy[j] - self.energy[i]) / (2.0 * temperature)
        rates = temperature / self.width**2 * np.exp(-rise)
        return _with_diagonal(sparse.coo_matrix((rates, (i, j)), shape=(cells.size,) * 2))

    def flow(self, temperature: float, time: float) -> Array:
        """Transitions of one Langevin diffusion within `time`: exp(time * generator)."""
        root = np.sqrt(self.gibbs(temperature))
        rates = self.generator(temperature).toarray()
        value, vector = np.linalg.eigh(_symmetric(rates * root[:, None] / root))
        kernel = (vector * np.exp(time * value)) @ vector.T
        return np.asarray(kernel / root[:, None] * root)

    def sinc_flow(self, temperature: float, time: float) -> Array:
        """The same in the law's own metric, precise on a coarse grid: the factor A (N, m) of A A^T,
        which is exp(-time H) up to functions that decay faster than FASTEST.

            H = -tau Laplace + |grad U|^2 / (4 tau) - Laplace U / 2

        is the generator times -sqrt(law) from the left and 1 / sqrt(law) from the right, here in a
        basis of sinc functions.
        """
        apart = np.subtract.outer(np.arange(self.n), np.arange(self.n))
        sign = np.where(apart % 2, -1.0, 1.0)
        kinetic = np.where(apart == 0, np.pi**2 / 3, 2.0 * sign / np.maximum(apart**2, 1))
        kinetic *= temperature / self.width**2
        energy = np.diag((self.gradient**2).sum(1) / (4 * temperature) - self.laplacian / 2)
        for axis in range(self.dim):
            others = (np.eye(self.n**axis), np.eye(self.n ** (self.dim - axis - 1)))
            energy += np.kron(np.kron(others[0], kinetic), others[1])
        value, vector = linalg_dense.eigh(energy, subset_by_value=(-np.inf, FASTEST))
        return np.asarray(vector * np.exp(-0.5 * time * value))

    def euler(self, temperature: float, lr: float) -> Array:
        """Transitions of one SGLD step with exact gradients, in one dimension.

        x' = x - lr grad U(x) + sqrt(2 lr tau) xi
        """
        away = self.axis - (self.axis - lr * self.gradient[:, 0])[:, None]
        kernel = np.exp(-(away**2) / (4.0 * lr * temperature))
        return np.asarray(kernel / kernel.sum(1, keepdims=True))

    def acceptance(
        self, temperatures: Pair, noise: NoiseModel | None = None, correction_factor: float = 1.0
    ) -> Array:
        """E[min(1, S)] of the corrected test at every pair of cells, over the energies' noise."""
        gap = 1.0 / temperatures[0] - 1.0 / temperatures[1]
        difference = gap * (self.energy[:, None] - self.energy)
        return mean_acceptance(difference, gap, noise, correction_factor)

    def pair_generator(self, temperatures: Pair, rate: Array) -> Any:
        """Rates of the pair, sparse (N^2, N^2), with jumps (x1, x2) -> (x2, x1) at `rate`."""
        n = len(self.energy)
        alone = sparse.identity(n)
        cold, hot = (self.generator(tau) for tau in temperatures)
        here = np.arange(n * n).reshape(n, n)
        jumps = sparse.coo_matrix((rate.ravel(), (here.ravel(), here.T.ravel())))
        moves = sparse.kron(cold, alone) + sparse.kron(alone, hot)
        return (moves + _with_diagonal(jumps)).tocsc()


def mean_acceptance(
    difference: Array, gap: float, noise: NoiseModel | None, correction_factor: float
) -> Array:
    """E[min(1, S)] where log S = D + gap (e1 - e2) - gap^2 sigma2 / F has independent noises e1, e2
    of one energy; D is the `difference` times the gap.

        E[min(1, exp(d + z))] = P(z > -d) + integral over z < -d of exp(d + z) p(z)

    Gaussian noise has a closed form. Otherwise p, the law of gap (e1 - e2), is a convolution on a
    fine grid, and the integral a recursion from one of its points to the next.
    """
    if noise is None:
        return np.asarray(np.exp(np.minimum(difference, 0.0)))
    if isinstance(noise, Gaussian):
        std = np.sqrt(2.0) * gap * noise.std
        return expected_acceptance(
            torch.as_tensor(difference), float(std), correction_factor
        ).numpy()
    from scipy import signal, stats  # they load slowly

    assert isinstance(noise, StudentT)
    step, reach = 0.005, 400.0  # in scales of the noise
    z = np.arange(-reach, reach + step / 2, step)
    law = stats.t.pdf(z, noise.degrees)
    law = np.maximum(signal.fftconvolve(law, law, mode="same"), 0.0)
    law /= law.sum()
    step *= gap * noise.scale
    above = law[::-1].cumsum()[::-1] - law / 2
    below = signal.lfilter([1.0], [1.0, -np.exp(-step)], law) - law / 2
    shifted = difference - gap**2 * noise.variance / correction_factor
    return np.asarray(np.interp(shifted, -(gap * noise.scale * z)[::-1], (above + below)[::-1]))


def stationary(generator: Any, likely: int) -> Array:
    """The law that a generator keeps, as a vector; `likely` is a state of which it has much."""
    rest = np.arange(generator.shape[0]) != likely
    flow = generator.T.tocsc()
    law = np.ones(generator.shape[0])
    law[rest] = linalg.spsolve(flow[rest][:, rest], -flow[rest][:, likely].toarray().ravel())
    return np.asarray(law / law.sum())


def gap_of(generator: Any) -> float:
    """The spectral gap: distances to the stationary law fall as exp(-gap t) in the end."""
    return -float(linalg.eigs(generator, k=2, sigma=0.001, return_eigenvectors=False).real.min())


def gap_of_split(grid: Grid, temperatures: Pair, rate: Array, step: float = 0.05) -> float:
    """The spectral gap where N^2 states are too many for a matrix: from the transitions within a
    short time, half a jump, a move, half a jump, which are symmetric in the law's own metric.
    """
    n = len(grid.energy)
    cold, hot = (grid.sinc_flow(tau, step) for tau in temperatures)
    both = np.sqrt(rate * rate.T)  # symmetric: the jumps are reversible
    stay, go = _jump(rate, step / 2)
    go = np.where(rate > 0, go * both / np.maximum(rate, 1e-300), 0.0)

    def transitions(vector: Array) -> Array:
        f = vector.reshape(n, n)
        f = stay * f + go * f.T
        f = cold @ (cold.T @ f @ hot) @ hot.T
        return np.asarray(stay * f + go * f.T).ravel()

    operator = linalg.LinearOperator((n * n, n * n), matvec=transitions, dtype=np.float64)
    value = linalg.eigsh(operator, k=2, which="LA", tol=1e-6, return_eigenvectors=False)
    return float(np.log(value.max() / value.min()) / step)


def diffuse(law: Array, moves: tuple[Array, Array], rate: Array, step: float) -> Iterator[Array]:
    """The law of the pair in continuous time, now and after every `step`: Strang's splitting into
    jumps and the transitions `moves` of each rung within a step.
    """
    stay, go = _jump(rate, step / 2)
    while True:
        yield law
        law = stay * law + (go * law).T
        law = moves[0].T @ law @ moves[1]
        law = stay * law + (go * law).T


def chain(law: Array, moves: tuple[Array, Array], probability: Array, n_steps: int) -> Array:
    """The law after so many steps of Algorithm 1: a swap of this `probability`, then a move."""
    for _ in range(n_steps):
        law = (1.0 - probability) * law + (probability * law).T
        law = moves[0].T @ law @ moves[1]
    return law


def _jump(rate: Array, time: float) -> tuple[Array, Array]:
    """Probabilities to stay and to be in the mirrored state after `time` of jumps alone."""
    both = rate + rate.T
    go = np.where(both > 0, rate / np.maximum(both, 1e-300), 0.5) * -np.expm1(-both * time)
    return 1.0 - go, go


def _with_diagonal(rates: Any) -> Any:
    """A generator: every row of rates sums to 0."""
    rates = rates.tocsr()
    return (rates - sparse.diags(np.asarray(rates.sum(1)).ravel())).tocsr()


def _symmetric(matrix: Any) -> Any:
    """Without the rounding that makes it unsymmetric."""
    return 0.5 * (matrix + matrix.T)
