"""Tiny networks, data and runs that the tests of modules share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import torchrex as tr

N_DATA, N_FEATURES, N_CLASSES = 40, 4, 3


def classes(n=N_DATA, *, seed=0, dtype=torch.float32):
    """Inputs and labels that a linear map can nearly tell apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, N_FEATURES, generator=generator, dtype=torch.float64)
    y = (
        x[:, :N_CLASSES] + 0.5 * torch.randn(n, N_CLASSES, generator=generator, dtype=torch.float64)
    ).argmax(1)
    return x.to(dtype), y


def batches(n_batches, size=8, *, seed=0, dtype=torch.float32):
    return [classes(size, seed=1000 * seed + k, dtype=dtype) for k in range(1, n_batches + 1)]


def linear(dtype=torch.float32):
    return nn.Linear(N_FEATURES, N_CLASSES, dtype=dtype)


def mlp(dtype=torch.float32):
    return nn.Sequential(
        nn.Linear(N_FEATURES, 5, dtype=dtype),
        nn.Tanh(),
        nn.Linear(5, 5, dtype=dtype),
        nn.Tanh(),
        nn.Linear(5, N_CLASSES, dtype=dtype),
    )


def with_dropout():
    return nn.Sequential(nn.Linear(N_FEATURES, 6), nn.Dropout(0.5), nn.Linear(6, N_CLASSES))


def with_everything():
    """BatchNorm, whose statistics are state, and dropout, which draws."""
    return nn.Sequential(
        nn.Linear(N_FEATURES, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(6, N_CLASSES),
    )


class OfSigns(nn.Embedding):
    """Of the signs of features: row 0 is that of negative ones."""

    def forward(self, x):
        return super().forward(x.sign().long() + 1)


def words():
    """An embedding whose row 0 is padding, and stays 0.5."""
    model = nn.Sequential(
        OfSigns(3, 4, padding_idx=0), nn.Flatten(), nn.Linear(4 * N_FEATURES, N_CLASSES)
    )
    nn.init.constant_(model[0].weight[0], 0.5)
    return model


class ConvNet(nn.Module):
    """A small convolutional net with BatchNorm and, by choice, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(16, 5)

    def forward(self, x):
        return self.linear(self.dropout(F.relu(self.bn(self.conv(x))).mean((2, 3))))


def cross_entropy(n_data=N_DATA, prior=None):
    return tr.PosteriorEnergy(F.cross_entropy, n_data=n_data, prior=prior)


def no_energy(module, batch):
    """Losses of 0 that depend on the parameters: every swap test accepts, and no force moves
    anything."""
    return 0.0 * module(batch[0]).sum(1)


def flat_energy(n_data=N_DATA):
    return tr.PosteriorEnergy.of(no_energy, n_data=n_data)


def make_run(model=linear, energy=None, ladder=None, *, sampler=None, **options):
    """Two rungs close enough to swap now and then, unless the test says otherwise."""
    of_ensemble = {
        name: options.pop(name)
        for name in ("initial", "shared_batches", "replacement", "lr_factors")
        if name in options
    }
    ensemble = tr.ModuleEnsemble(
        model, cross_entropy() if energy is None else energy, sampler, **of_ensemble
    )
    return tr.ModuleExchange(
        ensemble, tr.Ladder((0.5, 1.0), (1e-3, 2e-3)) if ladder is None else ladder, **options
    )


def weights_of(run, replica):
    """A copy of a replica's parameters by name."""
    return {
        name: p.detach().clone() for name, p in run.ensemble.modules[replica].named_parameters()
    }


def buffers_of(run, replica):
    return {name: buffer.clone() for name, buffer in run.ensemble.modules[replica].named_buffers()}


def same(a, b):
    """Two trees, equal down to the last bit; a NaN equals a NaN."""
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def stacked(infos):
    """Single StepInfos put together, as `advance` gives them."""
    return type(infos[0])(*(torch.stack(values) for values in zip(*infos, strict=True)))


def joined(blocks):
    """What `advance` yielded, as one."""
    return type(blocks[0])(*(torch.cat(values) for values in zip(*blocks, strict=True)))
