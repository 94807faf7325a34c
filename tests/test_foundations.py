"""rng, schedules, errors, processes."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from torch.optim import lr_scheduler

import torchrex
from torchrex import errors, processes, schedules
from torchrex.rng import Streams, derive_seed


def test_streams_are_reproducible_and_independent():
    a, b = Streams(3), Streams(3)
    x = torch.randn(1000, generator=a["move"])
    torch.randn(10, generator=b["swap"])  # another stream in between changes nothing
    assert torch.equal(x, torch.randn(1000, generator=b["move"]))
    y = torch.randn(1000, generator=a["swap"])
    assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 0.17  # 5 standard errors
    assert not torch.equal(x, torch.randn(1000, generator=Streams(4)["move"]))
    names = ("move", "swap", "target")
    assert len({derive_seed(seed, name) for seed in range(200) for name in names}) == 600
    for bad in (-1, 1.5, True, "0", 2**63, 10**5000):
        with pytest.raises(errors.InvalidArgumentError, match="seed"):
            Streams(bad)


def test_only_a_rank_of_torchrun_leaves_with_its_parent(monkeypatch):
    """Another process may outlive the shell that started it, as with nohup or setsid."""
    begun = []
    monkeypatch.setattr(processes, "_parent", None)

    class Thread:
        def __init__(self, **_):
            self.start = lambda: begun.append(self)

    monkeypatch.setattr(processes.threading, "Thread", Thread)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    processes.leave_with_parent()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not begun
    assert not processes.parent_is_gone()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    processes.leave_with_parent()
    processes.leave_with_parent()
    assert len(begun) == 1
    monkeypatch.setattr(os, "getppid", lambda: 2)
    assert processes.parent_is_gone()


def test_streams_save_and_restore():
    streams = Streams(0)
    torch.rand(17, generator=streams["move"])
    saved = streams.state_dict()
    expected = torch.rand(5, generator=streams["move"]), torch.rand(5, generator=streams["new"])
    other = Streams(0)
    torch.rand(3, generator=other["new"])
    other.load_state_dict(saved)
    assert torch.equal(torch.rand(5, generator=other["move"]), expected[0])
    assert torch.equal(
        torch.rand(5, generator=other["new"]), expected[1]
    )  # a stream not in use then starts afresh


def test_schedules():
    assert schedules.constant(2.0)(99) == 2.0
    anneal = schedules.geometric(1 / 1.02, every=10)
    assert anneal(9) == 1.0
    assert anneal(20) == pytest.approx(1.02**-2)
    decay = schedules.hold_then_decay(200, 0.984)
    assert decay(200) == 1.0
    assert decay(203) == pytest.approx(0.984**3)
    gain = schedules.inverse()
    assert [gain(m) for m in range(3)] == [1.0, 0.5, pytest.approx(1 / 3)]
    cosine = schedules.cyclical(10)
    assert cosine(0) == cosine(10) == 1.0
    assert cosine(5) == pytest.approx(0.5)


SCHEDULERS = {
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=30),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=0.01),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.6, total_steps=101, cycle_momentum=False
    ),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10),
            lr_scheduler.ExponentialLR(optimizer, 0.97),
        ],
        [10],
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of SequentialLR in torch 2.8
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_are_schedules(name):
    """The lr of the optimizer after every step over its base, whatever step is asked for first."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler, expected = SCHEDULERS[name](optimizer), []
    for _ in range(100):
        expected.append(optimizer.param_groups[0]["lr"] / 0.3)
        optimizer.step()
        scheduler.step()
    schedule = schedules.from_torch(SCHEDULERS[name], lr=0.3)
    steps = torch.randperm(100, generator=torch.Generator().manual_seed(0)).tolist()
    assert [schedule(step) for step in steps] == [expected[step] for step in steps]
    assert len(set(expected)) > 20
    ladder = torchrex.Ladder((1.0, 3.0), (2.0, 4.0), decay=schedule)
    cpu = {"device": torch.device("cpu"), "dtype": torch.float64}
    temperature, lr, kept = ladder.table(20, 5, **cpu)
    assert lr[:, 1].tolist() == [4.0 * each for each in expected[20:25]]
    assert temperature.tolist() == kept.tolist() == [[1.0, 3.0]] * 5


def test_a_scheduler_that_ends_is_refused_at_that_step_and_later():
    schedule = schedules.from_torch(SCHEDULERS["one cycle"], lr=1.0)
    for step in (102, 102, 150):
        with pytest.raises(ValueError, match="Tried to step 102 times"):
            schedule(step)
    assert schedule(100) == pytest.approx(0.6 / 25 / 1e4)


@pytest.mark.parametrize(
    ("factory", "lr", "words"),
    [
        (lr_scheduler.ReduceLROnPlateau, 1.0, "needs no metric, got ReduceLROnPlateau"),
        (lambda optimizer: 0.5, 1.0, "got float"),
        (SCHEDULERS["cosine"], 0.0, "lr must be positive"),
        (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=9), 1.0, "momentum"),
        (lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0), 1.0, "momentum"),
    ],
)
def test_schedulers_that_are_not_of_the_step_alone_are_refused(factory, lr, words):
    with pytest.raises(errors.InvalidArgumentError, match=words):
        schedules.from_torch(factory, lr=lr)


NAMING_RATES = {
    "eta_min": SCHEDULERS["cosine"],
    "max_lr": SCHEDULERS["one cycle"],
    "max_lrs": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "swa_lr": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
    "eta_min of a part": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o),
            lr_scheduler.ChainedScheduler([lr_scheduler.CosineAnnealingLR(o, 9, eta_min=0.1)]),
        ],
        [5],
    ),
}


@pytest.mark.parametrize("name", NAMING_RATES)
def test_a_scheduler_that_names_rates_needs_the_lr(name):
    """Without it 0.004 would be 0.004 of the lr. The others need none."""
    with pytest.raises(
        errors.InvalidArgumentError, match=rf"rates \({name.split()[0]}\); give .*lr="
    ):
        schedules.from_torch(NAMING_RATES[name])
    assert schedules.from_torch(NAMING_RATES[name], lr=1.0)(3) > 0.0
    for plain in ("restarts", "warm-up", "lambda"):
        assert schedules.from_torch(SCHEDULERS[plain])(0) in (1.0, 0.1)


def test_every_error_is_ours_and_a_builtin():
    members = [error for _, error in inspect.getmembers(errors, inspect.isclass)]
    tree = {error for error in members if issubclass(error, errors.TorchrexError)}
    assert len(tree) >= 9
    for error in tree - {errors.TorchrexError}:
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert builtins[0] is not Exception, f"{error.__name__} is no builtin besides"
