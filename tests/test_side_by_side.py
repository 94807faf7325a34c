"""Runs side by side: each is, bit for bit, the run it would be alone, whoever is beside it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

import torchrex as tr
from modules import ConvNet as Net
from modules import same
from torchrex.errors import CheckpointError, DeviceError, InvalidArgumentError, NonFiniteEnergyError
from torchrex.exchange import NoSwaps, RepeatedDraws, Smoothing
from torchrex.network import SideBySide, TrainingRun, train_together

N = 200
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]


def jitter(batch, generator):
    x, y = batch
    return x + 0.1 * torch.rand(x.shape, device=x.device, generator=generator), y


def loaders(device):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 3, 8, 8, generator=generator), torch.randint(5, (N,), generator=generator)
    return [
        tr.DeviceLoader((x, y), 32, seed=seed, augment=jitter, device=device) for seed in (3, 4)
    ]


ENERGY = tr.PosteriorEnergy(F.cross_entropy, n_data=N, prior=tr.GaussianPrior(2.0))


def make(method, seed, device, model=Net, lr=1e-5, **options):
    """A run of one method; `re` and `pair` measure repeated energies, `paired` has the free
    variance."""
    ensemble = tr.ModuleEnsemble(model, ENERGY, tr.SGHMC(0.1), device=device)
    if method == "msgd":
        return tr.ModuleExchange(
            ensemble, tr.Ladder.descent(lr), seed=seed, deterministic=True, **options
        )
    noise = (
        tr.PairedVariance(0.3) if method == "paired" else Smoothing(0.3, RepeatedDraws(4, every=7))
    )
    temperatures = (1.0,) if method == "sghmc" else (1.0, 1.002)
    return tr.ModuleExchange(
        ensemble,
        tr.Ladder(temperatures, (lr, 1.5 * lr)[: len(temperatures)]),
        noise=None if method == "sghmc" else noise,
        pairing=NoSwaps() if method == "pair" else None,
        seed=seed,
        deterministic=True,
        **options,
    )


def advance(runs, n, device, data=None):
    data, extra = loaders(device) if data is None else data
    blocks = list(SideBySide(runs).advance(n, data, extra))
    return [torch.cat([block[k].energy for block in blocks]) for k in range(len(runs))]


def numbers(run):
    """Everything a run is, but for its settings and the generators that only a captured step leaves
    alone."""
    state = run.state_dict()
    return {key: state[key] for key in ("n_steps", "exchange", "replicas")}


@pytest.mark.parametrize("device", DEVICES)
def test_each_run_is_the_one_it_would_be_alone(device):
    jobs = [("msgd", 0), ("re", 0), ("pair", 0), ("re", 1), ("paired", 1)]
    together = [make(method, seed, device) for method, seed in jobs]
    energies = advance(together, 40, device)
    assert not torch.equal(energies[1], energies[3])  # seeds differ
    for (method, seed), run, energy in zip(jobs, together, energies, strict=True):
        alone = make(method, seed, device)
        assert torch.equal(advance([alone], 40, device)[0], energy)
        assert same(numbers(alone), numbers(run))
    swapped = [run.state.replica_at[:, 0].tolist() for run in together]
    assert swapped[2] == [0, 1]
    assert float(together[1].state.noise_updates) == 6.0  # at steps 0, 7, 14, ..., 35


@pytest.mark.parametrize("device", DEVICES)
def test_sghmc_is_rung_0_of_the_independent_pair(device):
    """So that a table needs to train only one of them."""
    sghmc, pair = make("sghmc", 5, device), make("pair", 5, device)
    advance([sghmc], 30, device)
    advance([pair], 30, device)
    assert same(sghmc.state_dict()["replicas"][0], pair.state_dict()["replicas"][0])
    assert not same(*pair.state_dict()["replicas"])


@pytest.mark.parametrize("device", DEVICES)
def test_apart_and_together_again(device):
    """Ten steps together, ten apart, ten in other company: still the same run."""
    whole = make("re", 0, device)
    advance([whole], 30, device)
    data = loaders(device)
    run, first, second = (
        make(method, seed, device) for method, seed in (("re", 0), ("msgd", 1), ("pair", 2))
    )
    advance([run, first], 10, device, data)
    advance([run], 10, device, data)
    other = loaders(device)
    advance([second], 20, device, other)
    advance([second, run], 10, device, other)
    assert same(numbers(whole), numbers(run))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_repeated_energies_are_the_eager_ones():
    captured, eager = make("re", 0, "cuda"), make("re", 0, "cuda", compiled=False)
    for run in (captured, eager):
        advance([run], 30, "cuda")
    assert captured.graphs is None or not captured.graphs.failed
    torch.testing.assert_close(
        captured.state.noise_variance, eager.state.noise_variance, rtol=1e-3, atol=0.0
    )
    torch.testing.assert_close(
        captured.ensemble.position, eager.ensemble.position, rtol=1e-3, atol=1e-4
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runs_with_dropout_are_captured_one_by_one(caplog):
    def model():
        return Net(0.3)

    together = [make("paired", seed, "cuda", model) for seed in (0, 1)]
    with caplog.at_level(logging.WARNING, "torchrex"):
        advance(together, 12, "cuda")
    assert "one after another" in caplog.text
    for seed, run in enumerate(together):
        assert run.graphs is not None
        assert not run.graphs.failed
        alone = make("paired", seed, "cuda", model)
        data, _ = loaders("cuda")
        for _ in range(12):
            alone.step(data.next())
        assert same(numbers(alone), numbers(run))


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_diverges_is_left_behind(device):
    good, bad = make("paired", 0, device), make("paired", 1, device, lr=1e30)
    data, extra = loaders(device)
    group = SideBySide([bad, good])
    blocks = list(group.advance(300, data, extra))
    assert isinstance(group.failures[0], NonFiniteEnergyError)
    assert blocks[-1][0] is None
    alone = make("paired", 0, device)
    advance([alone], 300, device)
    assert same(numbers(alone), numbers(good))


def members(folder, jobs, device="cpu", **options):
    return [
        TrainingRun(
            make(method, seed, device, **options),
            [
                tr.PosteriorAverage(
                    [next(iter(loaders(device)[0]))], every=5, burn_in=10, rungs=(0,), history=True
                )
            ],
            tr.Trace(3),
            tr.Checkpoints(folder / f"{method}{seed}"),
            {"method": method},
        )
        for method, seed in jobs
    ]


def trained(group, n_steps, **options):
    """Members that were trained on fresh loaders, with checkpoints at every tenth step."""
    data, extra = loaders("cpu")
    return train_together(group, data, n_steps, extra=extra, checkpoint_every=10, **options)


JOBS = [("msgd", 0), ("re", 0), ("re", 1)]


def test_stopped_and_resumed_together_equals_never_stopped(tmp_path):
    whole = members(tmp_path / "whole", JOBS)
    assert trained(whole, 40).status == "finished"
    assert trained(members(tmp_path / "parts", JOBS), 40, budget=0.0).status == "paused"
    outcome, calls = "paused", 0
    while outcome == "paused":
        parts = members(tmp_path / "parts", JOBS)
        outcome = trained(parts, 40, budget=1e-9).status
        calls += 1
    assert calls > 3
    for one, other in zip(whole, parts, strict=True):
        assert same(numbers(one.run), numbers(other.run))
        assert same(one.averages[0].state_dict(), other.averages[0].state_dict())
        assert same(one.trace.tensors(), other.trace.tensors())


def test_one_that_is_a_checkpoint_behind_takes_the_others_back(tmp_path):
    """A crash between two members' saves: all go on from the step that all have."""
    whole = members(tmp_path / "whole", JOBS)
    trained(whole, 40)
    trained(members(tmp_path / "parts", JOBS), 30)
    for path in sorted((tmp_path / "parts" / "re1").glob("step=000000030/*")):
        path.unlink()
    again = members(tmp_path / "parts", JOBS)
    trained(again, 40)
    for one, other in zip(whole, again, strict=True):
        assert same(numbers(one.run), numbers(other.run))


def test_those_that_measure_know_where_the_extra_batches_are(tmp_path):
    """Runs that paused at the same step, of which only one has taken extra batches."""
    whole = members(tmp_path / "whole", [("re", 0)])
    trained(whole, 40)
    for job in (("msgd", 0), ("re", 0)):
        trained(members(tmp_path / "parts", [job]), 10)
    both = members(tmp_path / "parts", [("msgd", 0), ("re", 0)])
    trained(both, 40)
    assert same(numbers(whole[0].run), numbers(both[1].run))


def test_a_member_whose_last_move_before_a_draw_went_nowhere_is_left_behind(tmp_path):
    group = members(tmp_path, [("paired", 0), ("paired", 1)])
    plain = group[0].averages[0].update

    def update(run):
        if run.n_steps == 15:
            run.ensemble.position[0, 0] = float("nan")
        return plain(run)

    group[0].averages[0].update = update
    assert trained(group, 40).status == "finished"
    assert group[0].failure.step == 15
    assert group[1].failure is None


def test_runs_without_a_common_checkpoint_are_refused(tmp_path):
    for name, steps in (("re", 30), ("msgd", 10)):
        trained(members(tmp_path, [(name, 0)]), steps)
    with pytest.raises(CheckpointError, match="no checkpoint of the same step"):
        trained(members(tmp_path, [("re", 0), ("msgd", 0)]), 40)


def test_a_member_that_diverges_is_named_and_the_others_finish(tmp_path):
    group = [*members(tmp_path, [("paired", 0)]), *members(tmp_path, [("paired", 1)], lr=1e30)]
    assert trained(group, 40).status == "finished"
    assert group[0].failure is None
    assert "checkpoint before it" in str(group[1].failure)
    with pytest.raises(NonFiniteEnergyError):
        trained(members(tmp_path / "lost", [("paired", 0), ("paired", 1)], lr=1e30), 40)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_says_what_to_lower_and_keeps_the_state(tmp_path, monkeypatch, error):
    calls, original = [], Net.forward

    def full(*given):
        calls.append(1)
        if len(calls) > 15:
            raise error
        return original(*given)

    monkeypatch.setattr(Net, "forward", full)
    words = r"5 replicas in 3 runs .* on batches of 32.*step=000000000"
    with pytest.raises(DeviceError, match=words):
        trained(members(tmp_path, JOBS), 40)


def test_what_cannot_go_side_by_side():
    run, ladder = make("re", 0, "cpu"), tr.Ladder((1.0, 2.0), 1e-5)
    data, extra = loaders("cpu")
    noise = Smoothing(0.3, RepeatedDraws(4, every=8))
    other = tr.ModuleExchange(tr.ModuleEnsemble(Net, ENERGY), ladder, noise=noise)
    apart = tr.ModuleExchange(tr.ModuleEnsemble(Net, ENERGY, shared_batches=False), ladder)
    for runs, words in (
        ([run, run], "same run was given twice"),
        ([], "at least one run"),
        ([run, other], r"\[\(0, 7, 4\), \(0, 8, 4\)\]"),
        ([run, apart], "shared_batches=True"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            SideBySide(runs)
    with pytest.raises(InvalidArgumentError, match="second loader as extra"):
        list(SideBySide([run, make("msgd", 0, "cpu")]).advance(3, data))
    advance([run], 3, "cpu")
    with pytest.raises(InvalidArgumentError, match=r"same step, got \[0, 3\]"):
        list(SideBySide([run, make("re", 1, "cpu")]).advance(3, data, extra))
