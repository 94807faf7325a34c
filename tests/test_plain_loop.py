"""The loop in plain PyTorch that benchmarks/module_step.py times does what Algorithm 1 does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import plain_loop
from torchrex.samplers import sghmc


def test_the_update_is_that_of_torchrex():
    lr, temperature = torch.tensor(1e-3), torch.tensor(2.0)
    friction, precision = plain_loop.FRICTION, plain_loop.PRECISION
    position, velocity, gradient = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    rates = torch.stack([lr, (2 * friction * lr * temperature).sqrt()])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise = torch.randn(5, 4)
        expected = sghmc(
            position,
            velocity,
            gradient + precision * position,
            noise,
            lr=lr,
            temperature=temperature,
            friction=friction,
        )
        torch.manual_seed(0)
        plain_loop.update([position], [velocity], [gradient], rates)
    torch.testing.assert_close((position, velocity), expected)


@pytest.mark.parametrize(
    ("parity", "expected"), [(0, [2, 0, 4, 1, 3]), (1, [2, 0, 1, 3, 4])], ids=["even", "odd"]
)
def test_pairs_swap_by_their_energies(parity, expected):
    """Energies so far apart that every test is decided."""
    temperatures, lrs = map(torch.tensor, plain_loop.Ladder.of(5, 1e-3))
    replica_at = torch.tensor([2, 0, 1, 4, 3])
    energies = [torch.tensor(1e3 * u) for u in (1.0, 5.0, 0.0, 0.5, 1.0)]
    rates = torch.zeros(5, 128)
    partner = torch.tensor(plain_loop.pairs_of(5, parity))
    plain_loop.swap(energies, replica_at, partner, temperatures, lrs, rates)
    assert replica_at.tolist() == expected
    std = (2 * plain_loop.FRICTION * lrs * temperatures).sqrt()
    torch.testing.assert_close(rates[replica_at, :2], torch.stack([lrs, std], 1))
