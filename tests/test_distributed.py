"""Runs on several processes: the same numbers as on one, checkpoints that move between them, and
errors that reach everybody.
"""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

import torchrex as tr
from modules import classes, cross_entropy, mlp, with_everything
from ranks import run_ranks
from torchrex.distributed import replica_mesh

TEMPERATURES = (0.5, 0.52, 0.55, 0.6)

# What a run is made of besides the replicas. Each way of sharing energies, and each stream of
# random numbers, is in one of them.
KINDS = {
    "paired": {"noise": lambda: tr.PairedVariance(0.3)},
    "repeated": {"noise": lambda: tr.Smoothing(0.3, tr.RepeatedDraws(3, every=7))},
    "refresh": {"noise": lambda: tr.PairedVariance(), "momentum": "refresh"},
    "independent": {
        "noise": lambda: tr.Smoothing(0.3, tr.PerExample(paired=False)),
        "shared_batches": False,
    },
    "exact": {"noise": lambda: tr.KnownVariance(30.0), "model": mlp, "prior": "function"},
}


def squares(parameters):
    return sum(p.square().sum() for p in parameters.values())


def make(kind="paired", *, seed=3, n=4, dtype=torch.float32, **more):
    settings = {
        "model": with_everything,
        "prior": tr.GaussianPrior(3.0),
        "shared_batches": True,
        **KINDS[kind],
        **more,
    }
    ensemble = tr.ModuleEnsemble(
        settings["model"],
        cross_entropy(prior=squares if settings["prior"] == "function" else settings["prior"]),
        tr.SGHMC(0.1),
        initial="independent",
        shared_batches=settings["shared_batches"],
        mesh=replica_mesh(n),
    )
    return tr.ModuleExchange(
        ensemble,
        tr.Ladder(TEMPERATURES[:n], 1e-3),
        noise=settings["noise"](),
        correction_factor=3.0,
        momentum=settings.get("momentum", "rescale"),
        seed=seed,
    )


def whole_run(folder, kind, n_steps, checkpoint_every=25, stop_at=None):
    """Train with everything, from a checkpoint if there is one; what the trace and the averages
    saw.
    """
    run = make(kind)
    average = tr.PosteriorAverage([classes(20, seed=9)], every=10, rungs=(0, 3))
    trace = tr.Trace()
    loader, extra = tr.DeviceLoader(classes(), 8, seed=1), tr.DeviceLoader(classes(), 8, seed=2)
    outcome = tr.train(
        run,
        loader,
        n_steps if stop_at is None else stop_at,
        average=average,
        trace=trace,
        checkpoints=folder,
        checkpoint_every=checkpoint_every,
        extra=extra,
    )
    seen = trace.state_dict()
    digest = hashlib.sha256(
        json.dumps({k: v.tolist() for k, v in sorted(seen["tensors"].items())}).encode()
    ).hexdigest()
    swaps = int(seen["tensors"]["accepted"].sum())
    return {
        "status": outcome.status,
        "trace": digest,
        "swaps": swaps,
        "average": average.probabilities(0).tolist(),
    }


def files_of(folder, step):
    path = folder / f"step={step:09d}"
    files = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
    state = json.loads((path / "manifest.json").read_text())["state"]["dict"]
    state.pop("seconds")
    return files, state


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_processes_changes_nothing(tmp_path, kind):
    """Energies, swaps, weights, buffers, momenta, averages: bit for bit, and byte for byte in the
    files.
    """
    said = {
        n: run_ranks(n, whole_run, tmp_path, str(tmp_path / str(n)), kind, 60) for n in (1, 2, 3, 4)
    }
    assert said[1][0]["status"] == "finished"
    assert said[1][0]["swaps"] > 0
    for n in (2, 3, 4):
        assert said[n] == said[1] * n
        assert files_of(tmp_path / str(n), 60) == files_of(tmp_path / "1", 60)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 2), (2, 3), (3, 4)])
def test_a_run_goes_on_on_another_number_of_processes(tmp_path, before, after):
    whole = run_ranks(1, whole_run, tmp_path, str(tmp_path / "whole"), "repeated", 60)
    run_ranks(before, whole_run, tmp_path, str(tmp_path / "moved"), "repeated", 60, 25, 37)
    moved = run_ranks(after, whole_run, tmp_path, str(tmp_path / "moved"), "repeated", 60)
    assert moved == whole * after
    assert files_of(tmp_path / "moved", 60) == files_of(tmp_path / "whole", 60)


# More processes than replicas: each has a share of every minibatch, and sums are added up in
# another order.

ROUNDING = (
    1e-9  # relative, of energies in float64 after 60 steps; weights begin to differ in the last bit
)


def shares(dtype):
    run = make(
        "exact",
        n=2,
        model=lambda: mlp(dtype),
        prior=tr.GaussianPrior(3.0),
        noise=lambda: tr.PairedVariance(0.3),
    )
    x, y = classes(dtype=dtype)
    infos = next(iter(run.advance(60, tr.DeviceLoader((x, y), 7, seed=1))))
    return {
        "energy": infos.energy[..., 0].tolist(),
        "accepted": infos.accepted[..., 0].tolist(),
        "ranks": run.mesh.n_data_ranks,
    }


@pytest.mark.parametrize("n", [4, 6])
def test_processes_that_share_minibatches_agree_within_rounding(tmp_path, n):
    (alone,) = run_ranks(1, shares, tmp_path, torch.float64)
    together = run_ranks(n, shares, tmp_path, torch.float64)
    assert all(said == together[0] for said in together)
    assert together[0]["ranks"] == n // 2
    assert torch.allclose(
        torch.tensor(together[0]["energy"]), torch.tensor(alone["energy"]), rtol=ROUNDING, atol=0
    )
    assert together[0]["accepted"] == alone["accepted"]
    assert sum(map(sum, alone["accepted"])) > 0


def shared_run(folder, n_steps):
    run = make(n=2)
    return tr.train(
        run, tr.DeviceLoader(classes(), 8, seed=1), n_steps, checkpoints=folder, checkpoint_every=10
    ).status


def test_a_shared_run_goes_on_exactly_and_elsewhere(tmp_path):
    """With dropout and BatchNorm; on as many processes bit for bit, on fewer it goes on."""
    for name, stops in (("whole", (40,)), ("stopped", (17, 40)), ("moved", (17,))):
        for stop in stops:
            assert (
                run_ranks(4, shared_run, tmp_path, str(tmp_path / name), stop) == ["finished"] * 4
            )
    assert files_of(tmp_path / "stopped", 40) == files_of(tmp_path / "whole", 40)
    assert run_ranks(1, shared_run, tmp_path, str(tmp_path / "moved"), 40) == ["finished"]


def shared_statistics():
    """BatchNorm's running means, and whether two shares of one minibatch get the same dropout."""
    run = make(n=2)
    list(run.advance(5, tr.DeviceLoader(classes(), 8, seed=1)))
    module = run.module_at(1)
    here = run.ensemble.modules[0]
    masks = []
    with run.forward, run.forward.turn_of(0):
        masks = torch.nn.functional.dropout(torch.ones(20), 0.5).tolist()
    return {
        "running": module[1].running_mean.tolist(),
        "weights": here[0].weight.tolist(),
        "mask": masks,
    }


def test_shares_have_one_set_of_weights_and_statistics_and_masks_of_their_own(tmp_path):
    said = run_ranks(4, shared_statistics, tmp_path)
    assert all(each["running"] == said[0]["running"] for each in said)
    assert said[0]["weights"] == said[1]["weights"] != said[2]["weights"] == said[3]["weights"]
    assert said[0]["mask"] != said[1]["mask"]


# What every process may ask for


def outputs(n_steps):
    run = make("exact")
    list(run.advance(n_steps, tr.DeviceLoader(classes(), 8, seed=1)))
    batch = classes(6, seed=4)
    return [
        [run.predict(batch, rung).tolist(), run.module_at(rung)[0].weight.tolist()]
        for rung in range(4)
    ]


def test_outputs_and_modules_of_every_rung_are_the_same_everywhere(tmp_path):
    (alone,) = run_ranks(1, outputs, tmp_path, 20)
    assert run_ranks(3, outputs, tmp_path, 20) == [alone] * 3


def broken(n_steps):
    run = make("exact", noise=lambda: tr.PairedVariance(0.3))
    run = tr.ModuleExchange(
        tr.ModuleEnsemble(
            mlp, cross_entropy(), tr.SGHMC(0.1), initial="independent", mesh=replica_mesh(4)
        ),
        tr.Ladder(TEMPERATURES, 1e-3),
        seed=3,
        divergence="respawn",
    )
    loader = tr.DeviceLoader(classes(), 8, seed=1)
    list(run.advance(5, loader))
    if 2 in run.mesh.mine:
        run.ensemble.position[run.mesh.mine.index(2)].fill_(float("nan"))
    list(run.advance(n_steps, loader))
    return [run.respawns, [run.module_at(rung)[0].weight.tolist() for rung in range(4)]]


def test_a_broken_replica_becomes_a_copy_of_one_on_another_process(tmp_path):
    (alone,) = run_ranks(1, broken, tmp_path, 10)
    assert [event["replica"] for event in alone[0]] == [2]
    assert run_ranks(4, broken, tmp_path, 10) == [alone] * 4


def stored(folder, n_steps):
    run = make("refresh")
    store = tr.DrawStore(folder + "/draws", capacity=3)
    average = tr.PosteriorAverage([classes(20, seed=9)], every=5, rungs=(0, 1), store=store)
    loader = tr.DeviceLoader(classes(), 8, seed=1)
    return tr.train(
        run,
        loader,
        n_steps,
        average=average,
        checkpoints=folder + "/checkpoints",
        checkpoint_every=10,
    ).status


def test_draws_are_kept_once_whoever_holds_their_replica(tmp_path):
    assert run_ranks(1, stored, tmp_path, str(tmp_path / "alone"), 32) == ["finished"]
    assert run_ranks(3, stored, tmp_path, str(tmp_path / "spread"), 17) == ["finished"] * 3
    assert run_ranks(2, stored, tmp_path, str(tmp_path / "spread"), 32) == ["finished"] * 2
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "draws").iterdir()}
        for name in ("alone", "spread")
    ]
    assert {name: files[0][name] for name in files[0] if name != "index.json"} == {
        name: files[1][name] for name in files[1] if name != "index.json"
    }
    assert len(tr.DrawStore.load(tmp_path / "spread" / "draws")) == 3


# What is refused, on all processes alike


def refused(what):
    rank = int(__import__("os").environ["RANK"])
    if what == "seeds":
        run = make(seed=rank)
    elif what == "mesh":
        run = make(n=3)
    elif what == "sizes":
        run = make("independent")
        list(run.advance(3, [classes(8), classes(8), classes(8), classes(6)]))
    else:
        run = make()
    loader = tr.DeviceLoader(classes(), 8, seed=rank if what == "batches" else 1)
    if what == "later batches":  # alike for an epoch
        x, y = classes()
        alike, other = (
            [(x[k : k + 8] + s, y[k : k + 8]) for k in range(0, 40, 8)] for s in (0.0, float(rank))
        )
        list(run.advance(600, [*alike, *other]))
    list(run.advance(3, loader))


@pytest.mark.parametrize(
    ("what", "n", "words"),
    [
        ("seeds", 2, "rank 0 has seed 0 and rank 1 has 1; give all processes the same seed"),
        ("batches", 2, "ranks 0 and 1 have different batches"),
        ("later batches", 2, "ranks 0 and 1 have different batches"),
        ("sizes", 2, "the minibatches of all replicas must have one size, got [8, 8, 8, 6]"),
        (
            "mesh",
            4,
            "4 processes cannot share 3 replicas evenly; start at most 3, or a multiple of it",
        ),
    ],
)
def test_what_cannot_be_is_refused_everywhere(tmp_path, what, n, words):
    said = run_ranks(n, refused, tmp_path, what)
    assert all(
        each["error"] in ("InvalidArgumentError", "TargetError") and words in each["said"]
        for each in said
    ), said
