"""The runs that are disturbed: each is a function of the folder of its checkpoints, goes on where
they end, and is small.

A run on something else than a network is one more such function.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import nn

import torchrex as tr
from modules import classes, with_everything
from torchrex.distributed import process_group, replica_mesh
from torchrex.durable import replace_file

N_RUNGS = 4
N_STEPS, EVERY = 60, 20  # of `network`, and its steps between checkpoints


def loss(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")


def network(folder, n_steps=N_STEPS, every=EVERY, keep=2):
    """A net with BatchNorm and dropout on 40 points, with an average, a trace, and repeated
    energies from other batches.
    """
    energy = tr.PosteriorEnergy(loss, n_data=40, prior=tr.GaussianPrior(3.0))
    run = _run(
        with_everything,
        energy,
        tr.Ladder((0.5, 0.52, 0.55, 0.6), 1e-3),
        noise=tr.Smoothing(0.3, tr.RepeatedDraws(3, every=7)),
        correction_factor=3.0,
        seed=3,
    )
    loader = tr.DeviceLoader(classes(), 8, seed=1)
    return _train(run, loader, classes(20, seed=9), folder, n_steps, every, keep)


def digits(folder, n_steps=120, every=15, keep=2, **records):
    """A net of 16 hidden units on the handwritten digits."""
    data = _digits(Path(folder).parent)
    energy = tr.PosteriorEnergy(F.cross_entropy, n_data=len(data["x"]), prior=tr.GaussianPrior(3.0))
    run = _run(
        _one_layer,
        energy,
        tr.Ladder((0.1, 0.1025, 0.105, 0.11), 4e-5),
        noise=tr.PairedVariance(0.05),
        correction_factor=30.0,  # swaps from the first steps on: they must come back too
        seed=5,
    )
    loader = tr.DeviceLoader((data["x"], data["y"]), 64, seed=1)
    test = (data["test x"], data["test y"])
    return _train(run, loader, test, folder, n_steps, every, keep, **records)


def mixture(folder, n_steps=1_200, every=100, keep=2, *, compiled=False, thin=100):
    """A density: eight runs in four shards, whose checkpoints lie in folders of their own."""
    process_group.SILENCE = 3.0  # seconds after which a rank is taken for gone
    target = tr.Noisy(tr.GaussianMixture([0.4, 0.6], [-3.0, 2.0], [0.7, 0.5]), tr.Gaussian(2.0))
    draws = tr.sample(
        target,
        temperatures=(1.0, 10.0),
        lr=0.03,
        correction_factor=2.0,
        noise=tr.RunningMean(tr.RepeatedDraws(10, 100), initial=100.0),
        n_steps=n_steps,
        n_runs=8,
        thin=thin,
        seed=5,
        shards=4,
        compiled=compiled,
        checkpoints=tr.Checkpoints(Path(folder), keep=keep),
        checkpoint_every=every,
        on_interrupt="return",
    )
    swaps = int(draws.accepted.sum())
    return {"status": draws.status, "signal": None, "stands_at": draws.n_steps, "swaps": swaps}


def _run(model, energy, ladder, **rules):
    mesh = replica_mesh(N_RUNGS)
    ensemble = tr.ModuleEnsemble(model, energy, tr.SGHMC(0.1), initial="independent", mesh=mesh)
    return tr.ModuleExchange(ensemble, ladder, **rules)


def _train(run, loader, test, folder, n_steps, every, keep, *, average_every=10, traced=True):
    average = tr.PosteriorAverage([test], every=average_every, rungs=(0, 3))
    trace = tr.Trace() if traced else None
    measures = isinstance(run.rules.noise, tr.Smoothing)
    outcome = tr.train(
        run,
        loader,
        n_steps,
        average=average,
        trace=trace,
        checkpoints=tr.Checkpoints(Path(folder), keep=keep),
        checkpoint_every=every,
        extra=tr.DeviceLoader(classes(), 8, seed=2) if measures else None,
        on_interrupt="return",
    )
    swaps = None if trace is None else int(trace.state_dict()["tensors"]["accepted"].sum())
    how = {"status": outcome.status, "signal": outcome.signal}
    return {**how, "stands_at": run.n_steps, "swaps": swaps}


def _one_layer():
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def _digits(place):
    """The data, from a file beside the run: importing scikit-learn takes longer than the run."""
    file = place / "digits.safetensors"
    if not file.exists():
        from torchrex.experiments import digits as experiment

        (x, y), (test_x, test_y) = experiment.digits()
        data = {"x": x, "y": y, "test x": test_x[:100], "test y": test_y[:100]}
        place.mkdir(parents=True, exist_ok=True)
        replace_file(file, save({name: tensor.contiguous() for name, tensor in data.items()}))
    return load_file(file)


def alone(job, folder, *arguments, **options):
    """The job on one process, which is this one. Sums over threads would be others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return job(folder, *arguments, **options)
    finally:
        torch.set_num_threads(threads)


def folders_of(folder):
    """Where the checkpoints of a run lie: in its folder, or in one for each shard."""
    return sorted(Path(folder).glob("shard=*")) or [Path(folder)]


def contents_of(folder, step):
    """All that a checkpoint says, but for the seconds it took: equal means equal bit for bit."""
    path = tr.Checkpoints(folder).path_of(step)
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    manifest = files.pop("manifest.json")
    assert files.pop("DONE").decode().strip() == hashlib.sha256(manifest).hexdigest()
    said = json.loads(manifest)
    said["state"]["dict"].pop("seconds")
    return files, said
