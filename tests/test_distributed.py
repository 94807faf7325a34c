"""Runs on several processes: the same numbers as on one, checkpoints that move between them, and
errors that reach everybody.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

import torchrex as tr
from modules import classes, cross_entropy, mlp, with_everything
from ranks import run_ranks
from torchrex.distributed import replica_mesh

pytestmark = pytest.mark.slow

TEMPERATURES = (0.5, 0.52, 0.55, 0.6)

# What a run is made of besides the replicas. Each way of sharing energies, and each stream of
# random numbers, is in one of them.
INDEPENDENT = tr.Smoothing(0.3, tr.PerExample(paired=False))
KINDS = {
    "paired": {"noise": tr.PairedVariance(0.3)},
    "repeated": {"noise": tr.Smoothing(0.3, tr.RepeatedDraws(3, every=7))},
    "refresh": {"noise": tr.PairedVariance(), "momentum": "refresh"},
    "independent": {"noise": INDEPENDENT, "shared_batches": False},
    "exact": {"noise": tr.KnownVariance(30.0), "model": mlp, "prior": lambda p: squares(p)},
}


def squares(parameters):
    return sum(p.square().sum() for p in parameters.values())


def make(kind="paired", *, seed=3, n=4, **more):
    settings = {"model": with_everything, "prior": tr.GaussianPrior(3.0), **KINDS[kind], **more}
    ensemble = tr.ModuleEnsemble(
        settings.pop("model"),
        cross_entropy(prior=settings.pop("prior")),
        tr.SGHMC(0.1),
        initial="independent",
        shared_batches=settings.pop("shared_batches", True),
        mesh=replica_mesh(n),
    )
    rules = {"correction_factor": 3.0, **settings}
    return tr.ModuleExchange(ensemble, tr.Ladder(TEMPERATURES[:n], 1e-3), seed=seed, **rules)


def data(seed=1, **options):
    return tr.DeviceLoader(classes(**options), 8, seed=seed)


def trained(folder, kind, n_steps):
    """Train with everything, from a checkpoint if there is one; what trace and averages saw."""
    run, trace = make(kind), tr.Trace()
    store = tr.DrawStore(folder / "draws", capacity=3)
    average = tr.PosteriorAverage([classes(20, seed=9)], every=10, rungs=(0, 3), store=store)
    more = {"checkpoints": folder / "checkpoints", "checkpoint_every": 25, "extra": data(2)}
    outcome = tr.train(run, data(), n_steps, average=average, trace=trace, **more)
    seen = trace.state_dict()["tensors"]
    text = json.dumps({name: tensor.tolist() for name, tensor in sorted(seen.items())})
    batch = classes(6, seed=4)
    return {
        "status": outcome.status,
        "trace": hashlib.sha256(text.encode()).hexdigest(),
        "swaps": int(seen["accepted"].sum()),
        "average": average.probabilities(0).tolist(),
        "outputs": [run.predict(batch, rung).tolist() for rung in range(4)],
        "buffers": [[each.tolist() for each in run.module_at(rung).buffers()] for rung in range(4)],
    }


def broken():
    """Replica 2 becomes NaN, wherever it is, and a copy of another."""
    run = make("exact", divergence="respawn", noise=tr.PairedVariance(0.3))
    loader = data()
    list(run.advance(5, loader))
    if 2 in run.mesh.mine:
        run.ensemble.position[run.mesh.mine.index(2)].fill_(float("nan"))
    list(run.advance(10, loader))
    return [run.respawns, [run.module_at(rung)[0].weight.tolist() for rung in range(4)]]


def everything(folder, stop_at=60):
    """One job for many assertions."""
    kinds = {kind: trained(Path(folder) / kind, kind, stop_at) for kind in KINDS}
    return {"kinds": kinds, "broken": broken()}


def files_of(folder, step=60):
    """All that a run wrote, but for the seconds it took."""
    path = folder / "checkpoints" / f"step={step:09d}"
    files = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
    files |= {file.name: file.read_bytes() for file in (folder / "draws").glob("draw*")}
    state = json.loads((path / "manifest.json").read_text())["state"]["dict"]
    state.pop("seconds")
    return files, state


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    place = tmp_path_factory.mktemp("alone")
    (said,) = run_ranks(1, everything, place, str(place))
    for kind in KINDS:
        assert said["kinds"][kind]["status"] == "finished"
        assert said["kinds"][kind]["swaps"] > 0
    assert [event["replica"] for event in said["broken"][0]] == [2]
    return place, said


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_number_of_processes_changes_nothing(tmp_path, alone, n):
    """Energies, swaps, weights, buffers, momenta, averages, outputs and draws: bit for bit."""
    place, said = alone
    assert run_ranks(n, everything, tmp_path, str(tmp_path)) == [said] * n
    for kind in KINDS:
        assert files_of(tmp_path / kind) == files_of(place / kind)


def moved(folder, stop_at):
    return trained(Path(folder), "repeated", stop_at)


@pytest.mark.parametrize("sizes", [(4, 1, 2), (2, 3, 4)])
def test_a_run_goes_on_on_another_number_of_processes(tmp_path, alone, sizes):
    for n, stop_at in zip(sizes, (17, 37, 60), strict=True):
        said = run_ranks(n, moved, tmp_path, str(tmp_path / "run"), stop_at)
    assert said == [alone[1]["kinds"]["repeated"]] * sizes[-1]
    assert files_of(tmp_path / "run") == files_of(alone[0] / "repeated")


# More processes than replicas: each has a share of every minibatch, and sums are added up in
# another order.

ROUNDING = 1e-9  # relative, of float64 energies after 60 steps; weights differ in the last bit


def shares():
    dtype = torch.float64
    more = {"prior": tr.GaussianPrior(3.0), "noise": tr.PairedVariance(0.3)}
    run = make("exact", n=2, model=lambda: mlp(dtype), **more)
    loader = tr.DeviceLoader(classes(dtype=dtype), 7, seed=1)
    infos = next(iter(run.advance(60, loader)))
    energy, accepted = infos.energy[..., 0].tolist(), infos.accepted[..., 0].tolist()
    return {"energy": energy, "accepted": accepted, "ranks": run.mesh.n_data_ranks}


@pytest.mark.parametrize("n", [4, 6])
def test_processes_that_share_minibatches_agree_within_rounding(tmp_path, n):
    (one,) = run_ranks(1, shares, tmp_path)
    together = run_ranks(n, shares, tmp_path)
    assert all(said == together[0] for said in together)
    assert together[0]["ranks"] == n // 2
    energies = (torch.tensor(said["energy"]) for said in (together[0], one))
    assert torch.allclose(*energies, rtol=ROUNDING, atol=0)
    assert together[0]["accepted"] == one["accepted"]
    assert sum(map(sum, one["accepted"])) > 0


def shared_run(folder, *stops):
    """With dropout and BatchNorm; then weights, statistics and a dropout mask of this process."""
    for stop in stops:
        run = make(n=2)
        more = {"checkpoints": f"{folder}/checkpoints", "checkpoint_every": 10}
        status = tr.train(run, data(), stop, **more).status
    with run.forward, run.forward.turn_of(0):
        mask = torch.nn.functional.dropout(torch.ones(20), 0.5).tolist()
    running = run.module_at(1)[1].running_mean.tolist()
    weights = run.ensemble.modules[0][0].weight.tolist()
    return {"status": status, "running": running, "weights": weights, "mask": mask}


def test_a_shared_run_goes_on_exactly_and_elsewhere(tmp_path):
    """On as many processes bit for bit; on fewer it goes on."""
    for name, stops in (("whole", (40,)), ("stopped", (17, 40)), ("moved", (17,))):
        said = run_ranks(4, shared_run, tmp_path, str(tmp_path / name), *stops)
        assert [each["status"] for each in said] == ["finished"] * 4
    assert all(each["running"] == said[0]["running"] for each in said)
    assert said[0]["weights"] == said[1]["weights"] != said[2]["weights"] == said[3]["weights"]
    assert said[0]["mask"] != said[1]["mask"]
    assert files_of(tmp_path / "stopped", 40) == files_of(tmp_path / "whole", 40)
    assert (
        run_ranks(1, shared_run, tmp_path, str(tmp_path / "moved"), 40)[0]["status"] == "finished"
    )


# What is refused, on all processes alike


def refused(what):
    rank = int(os.environ["RANK"])
    kind = "independent" if what == "sizes" else "paired"
    run = make(kind, seed=rank if what == "seeds" else 3, n=3 if what == "mesh" else 4)
    if what == "sizes":
        list(run.advance(3, [classes(8), classes(8), classes(8), classes(6)]))
    if what == "later batches":  # alike for an epoch
        x, y = classes()
        parts = [slice(k, k + 8) for k in range(0, 40, 8)]
        alike, other = ([(x[p] + s, y[p]) for p in parts] for s in (0.0, float(rank)))
        list(run.advance(600, [*alike, *other]))
    list(run.advance(3, data(rank if what == "batches" else 1)))


@pytest.mark.parametrize(
    ("what", "n", "words"),
    [
        ("seeds", 2, "rank 0 has seed 0 and rank 1 has 1"),
        ("batches", 2, "different batches"),
        ("later batches", 2, "different batches"),
        ("sizes", 2, "[8, 8, 8, 6]"),
        ("mesh", 4, "4 processes cannot share 3 replicas evenly"),
    ],
)
def test_what_cannot_be_is_refused_everywhere(tmp_path, what, n, words):
    for said in run_ranks(n, refused, tmp_path, what):
        assert said["error"] in ("InvalidArgumentError", "TargetError")
        assert words in said["said"]
