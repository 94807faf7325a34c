"""The captured step on a GPU: the same numbers as the eager one, exact resume, and a fallback with
one reason.
"""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
import torch.nn.functional as F

import torchrex
from modules import ConvNet as Net
from modules import batches, cross_entropy, make_run, same, with_everything, words
from torchrex.errors import NonFiniteEnergyError
from torchrex.network.capture import (
    RECORDED,
    CaptureState,
    empty_records,
    exchange_and_record,
    steps_of_runs,
)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

N = 200


def flip(batch, generator):
    x, y = batch
    flipped = torch.rand(len(x), device=x.device, generator=generator) < 0.5
    return torch.where(flipped[:, None, None, None], x.flip(3), x), y


def data(last="drop", augment=flip):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, 8, 8, generator=generator)
    y = torch.randint(5, (N,), generator=generator)
    return torchrex.DeviceLoader((x, y), 32, seed=3, last=last, augment=augment, device="cuda")


def make(compiled=None, model=Net, rungs=3, **options):
    energy = torchrex.PosteriorEnergy(F.cross_entropy, n_data=N, prior=torchrex.GaussianPrior(2.0))
    ensemble = torchrex.ModuleEnsemble(
        model, energy, torchrex.SGHMC(0.1), device="cuda", initial="independent"
    )
    # Temperatures so close that pairs of one quality swap often: the decisions are part of the
    # comparison.
    ladder = torchrex.Ladder(
        [1.0 + 0.002 * k for k in range(rungs)], [1e-5 * (1 + 0.5 * k) for k in range(rungs)]
    )
    return torchrex.ModuleExchange(ensemble, ladder, seed=1, compiled=compiled, **options)


def everything(run):
    state = run.state_dict()
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)
    ]


def assert_same(a, b):
    for left, right in zip(everything(a), everything(b), strict=True):
        assert torch.equal(left.cpu(), right.cpu())


def ours(caplog):
    """Our own warnings of captures: torch's compiler has its own advice on "the captured graph"."""
    return [
        record
        for record in caplog.records
        if (record.name, record.levelno) == ("torchrex", logging.WARNING)
        and "captured" in record.message
    ]


def infos(run, n, loader):
    blocks = list(run.advance(n, loader))
    return {
        name: torch.cat([getattr(block, name) for block in blocks])
        for name in torchrex.exchange.StepInfo._fields
    }


@on_gpu
def test_captured_and_eager_agree(monkeypatch):
    """Same seed, float32, 20 steps: parameters within 1e-5 relative, the same swap decisions."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    captured, eager = make(), make(compiled=False)
    a, b = infos(captured, 20, data()), infos(eager, 20, data())
    assert captured.graphs is not None
    assert not captured.graphs.failed
    assert captured.graphs.compiled
    assert eager.graphs is None
    assert a["accepted"].any()
    assert torch.equal(a["accepted"], b["accepted"])
    assert torch.equal(a["replica_at"], b["replica_at"])
    torch.testing.assert_close(a["energy"], b["energy"], rtol=1e-5, atol=0)
    for left, right in zip(captured.ensemble.position, eager.ensemble.position, strict=True):
        assert float((left - right).norm() / right.norm()) < 1e-5


@on_gpu
def test_batches_given_one_by_one_equal_the_loader_inside_the_graph():
    inside, outside = make(deterministic=True), make(deterministic=True)
    list(inside.advance(20, data()))
    loader = data()
    for _ in range(20):
        outside.step(loader.next(twice=True))
    assert_same(inside, outside)


@on_gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("stop", [1, 100, 256, 300])
def test_resume_is_exact(dropout, stop):
    """Bit for bit, with cuDNN held to deterministic algorithms; its fastest ones add gradients in
    any order."""

    def make_net():
        return make(model=lambda: Net(dropout), deterministic=True)

    whole = make_net()
    list(whole.advance(310, data()))
    first, loader = make_net(), data()
    list(first.advance(stop, loader))
    saved, position = first.state_dict(), loader.state_dict()
    second, loader = make_net(), data()
    second.load_state_dict(saved)
    loader.load_state_dict(position)
    list(second.advance(310 - stop, loader))
    assert_same(whole, second)


@on_gpu
def test_a_smaller_last_batch_is_a_graph_of_its_own():
    run, eager = make(), make(compiled=False)
    a, b = infos(run, 14, data("keep")), infos(eager, 14, data("keep"))
    assert len(run.graphs) == 2
    torch.testing.assert_close(a["energy"], b["energy"], rtol=1e-4, atol=0)


@on_gpu
def test_too_many_shapes_run_eagerly_and_say_so_once(caplog):
    run = make()
    x, y = torch.randn(40, 3, 8, 8, device="cuda"), torch.randint(5, (40,), device="cuda")
    for n in (10, 11, 12, 13, 14, 15, 10):
        run.step((x[:n], y[:n]))
    (record,) = ours(caplog)
    assert "more than 4 shapes" in record.message
    assert run.n_steps == 7


def padded():
    """Embeddings of whole numbers, with padding and with hooks on gradients."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(7, 4, padding_idx=0), torch.nn.Flatten(), torch.nn.Linear(20, 5)
    )
    torch.nn.init.constant_(model[0].weight[0], 0.5)
    model[2].weight.register_hook(lambda gradient: 2.0 * gradient)
    model[2].bias.register_hook(torch.zeros_like)
    return model


@on_gpu
@pytest.mark.parametrize("momentum", ["rescale", "refresh"])
def test_clips_factors_padding_and_hooks_are_captured(momentum):
    """As the eager step has them: weights, counts, padding rows, and the hooks' gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(7, (N, 5), generator=generator)
    prior = torchrex.GaussianPrior(2.0, groups={"bias": 0.0})
    energy = torchrex.PosteriorEnergy(F.cross_entropy, n_data=N, prior=prior)
    runs = []
    for compiled in (None, False):
        ensemble = torchrex.ModuleEnsemble(
            padded, energy, torchrex.SGHMC(0.1), device="cuda", lr_factors={"2.": 3.0}
        )
        ladder = torchrex.Ladder((1e-6, 1.002e-6, 1.004e-6), 1e-4)
        run = torchrex.ModuleExchange(
            ensemble, ladder, seed=1, compiled=compiled, clip=200.0, momentum=momentum,
            correction_factor=1e9,
        )  # fmt: skip
        bias = run.ensemble.modules[2][2].bias.detach().clone()
        list(run.advance(40, torchrex.DeviceLoader((x, x[:, 0] % 5), 32, seed=3, device="cuda")))
        for module in run.ensemble.modules:
            assert bool((module[0].weight[0] == 0.5).all())
            assert float((module[2].bias.detach() - bias).abs().max()) < 0.01  # noise alone
        runs.append(run)
    captured, eager = runs
    assert captured.graphs is not None
    assert not captured.graphs.failed
    assert eager.graphs is None
    torch.testing.assert_close(
        captured.ensemble.position, eager.ensemble.position, rtol=1e-4, atol=1e-5
    )
    assert captured.clipped_share() == eager.clipped_share()
    assert 0.0 < captured.clipped_share()[0] < 1.0


@on_gpu
@pytest.mark.parametrize("stop", [1, 100, 256])
def test_a_clipped_run_resumes_exactly(stop):
    whole, first, second = (make(clip=60.0, deterministic=True) for _ in range(3))
    list(whole.advance(310, data()))
    loader = data()
    list(first.advance(stop, loader))
    saved, position = first.state_dict(), loader.state_dict()
    second.load_state_dict(saved)
    loader = data()
    loader.load_state_dict(position)
    list(second.advance(310 - stop, loader))
    assert_same(whole, second)
    assert whole.clipped_share() == second.clipped_share()
    assert whole._network.clip.counts.any()


@on_gpu
def test_clipped_runs_side_by_side_are_those_alone():
    def runs():
        return [make(clip=clip, deterministic=True) for clip in (60.0, 80.0)]

    together, alone = runs(), runs()
    list(torchrex.SideBySide(together).advance(60, data()))
    for mine, its in zip(alone, together, strict=True):
        list(mine.advance(60, data()))
        assert_same(mine, its)


class NeedsTheHost(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 if float(x.sum()) > -1e30 else 0.0)


@on_gpu
def test_a_module_that_cannot_be_captured_runs_eagerly_with_the_same_numbers(caplog):
    run, eager = make(model=NeedsTheHost), make(compiled=False)
    a, b = infos(run, 10, data()), infos(eager, 10, data())
    (record,) = ours(caplog)
    assert "cannot be captured" in record.message
    assert run.graphs.failed
    torch.rand(1, device="cuda")  # torch's own generator has survived
    torch.testing.assert_close(a["energy"], b["energy"], rtol=1e-4, atol=0)


@on_gpu
def test_divergence_is_noticed_at_the_end_of_a_stretch_and_healed_at_the_end_of_a_block():
    stop = make()
    list(stop.advance(3, data()))
    stop.ensemble.position[1].fill_(float("nan"))
    with pytest.raises(NonFiniteEnergyError) as caught:
        list(stop.advance(20, data()))
    assert (caught.value.replica, caught.value.step) == (1, 3)
    heal = make(divergence="respawn")
    list(heal.advance(3, data()))
    heal.ensemble.position[1].fill_(float("nan"))
    list(heal.advance(300, data()))
    assert [event["step"] for event in heal.respawns] == [256]
    assert heal.ensemble.position.isfinite().all()


@on_gpu
def test_autocast_and_channels_last():
    energy = torchrex.PosteriorEnergy(F.cross_entropy, n_data=N, prior=torchrex.GaussianPrior(2.0))
    runs = [
        torchrex.ModuleExchange(
            torchrex.ModuleEnsemble(Net, energy, torchrex.SGHMC(0.1), device="cuda", **options),
            torchrex.Ladder((1.0, 1.01), 1e-5),
        )
        for options in ({}, {"autocast": torch.bfloat16, "channels_last": True})
    ]
    plain, fast = (infos(run, 10, data())["energy"] for run in runs)
    torch.testing.assert_close(plain, fast, rtol=0.02, atol=0)
    assert runs[1].ensemble.modules[0].conv.weight.is_contiguous(memory_format=torch.channels_last)


class Reassigning(Net):
    """Puts a new tensor in the place of a buffer, which a graph could not follow."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1.0
        return super().forward(x)


@on_gpu
def test_a_buffer_that_is_replaced_is_not_captured(caplog):
    run = make(model=Reassigning)
    list(run.advance(10, data()))
    (record,) = ours(caplog)
    assert "buffer 'calls'" in record.message
    assert [float(module.calls) for module in run.ensemble.modules] == [10.0, 10.0, 10.0]


@on_gpu
def test_data_on_the_cpu_are_copied_into_the_graph():
    x, y = torch.randn(N, 3, 8, 8), torch.randint(5, (N,))
    inside = torchrex.DeviceLoader((x, y), 32, seed=3, device="cuda")
    outside = torchrex.DeviceLoader((x, y), 32, seed=3)
    runs = [make(deterministic=True), make(deterministic=True)]
    for run, loader in zip(runs, (inside, outside), strict=True):
        list(run.advance(20, loader))
        assert not run.graphs.failed
    assert_same(*runs)


@on_gpu
def test_a_graph_made_late_in_a_block_leaves_the_records_alone():
    """A batch of another size comes first at step 254; its warm-up must not write over what was
    recorded before."""
    run, loader = make(), data()
    first = infos(run, 254, loader)["energy"]
    x, y = torch.randn(7, 3, 8, 8, device="cuda"), torch.randint(5, (7,), device="cuda")
    run.step((x, y))
    assert len(run.graphs) == 2
    assert torch.equal(run.records.energy[:254], first)


@pytest.mark.parametrize("momentum", ["rescale", "refresh"])
@pytest.mark.parametrize("model", [with_everything, words])
@pytest.mark.parametrize("options", [{}, {"clip": 25.0, "lr_factors": {"0.": 2.0}}])
def test_what_a_graph_does_is_an_eager_step(momentum, model, options):
    """The work of a graph, done on a CPU without one, for two runs: the same numbers in place."""

    def counted(seed):
        run = make_run(
            model, cross_entropy(prior=torchrex.GaussianPrior(1.0)), seed=seed,
            sampler=torchrex.SGHMC(0.2), correction_factor=1e9, momentum=momentum, **options,
        )  # fmt: skip
        run._network = dataclasses.replace(run._network, counted_noise=True)
        return run

    eager, captured = [counted(0), counted(1)], [counted(0), counted(1)]
    states = []
    for run in captured:
        run.try_batch(batches(1)[0])
        run.prepare()
        records = empty_records(run.rules, 256, run.device)
        states.append(CaptureState(run._network, run._state, run._table, records))
    infos = [[run.step(batch) for batch in batches(8)] for run in eager]
    assert any(bool(info.accepted.any()) for info in infos[0])
    # What the compiler cannot trace costs two thirds of the speed of a step. Before torch 2.11 it
    # could not trace a change of a named tuple.
    whole = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    exchange = torch.compile(exchange_and_record, dynamic=False, fullgraph=whole, backend="eager")
    with captured[0].ensemble.own_work(), captured[1].ensemble.own_work(), captured[0].forward:
        for batch in batches(8):
            steps_of_runs(batch, states, exchange, None)
    for k, state in enumerate(states):
        for name in RECORDED:
            expected = torch.stack([getattr(info, name) for info in infos[k]])
            assert torch.equal(getattr(state.records, name)[:8], expected), name
        assert same(captured[k].ensemble.tensors_of(1), eager[k].ensemble.tensors_of(1))
        assert int(state.network.replicas.clock) == 8
        if model is words:  # the row of padding_idx
            assert bool((captured[k].ensemble.modules[1][0].weight[0] == 0.5).all())
        if options:
            counts = captured[k]._network.clip.counts
            assert torch.equal(counts, eager[k]._network.clip.counts)
            assert 0 < int(counts.sum()) < counts.shape[-1] * 8
