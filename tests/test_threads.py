"""Runs in several threads of one process give the numbers that each gives alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

import torchrex as tr
from modules import classes, cross_entropy, mlp, with_dropout
from torchrex.density.loop import few_threads
from torchrex.targets.tall import simulate_logistic


def trained(model, seed, *, n_steps=50):
    """All weights, buffers and generators at the end of a short run."""
    ensemble = tr.ModuleEnsemble(model, cross_entropy(), initial="independent")
    run = tr.ModuleExchange(ensemble, tr.Ladder((1.0, 1.5), 1e-3), seed=seed)
    # A DataLoader draws a number from the default generator whenever it is begun.
    held_out = DataLoader(TensorDataset(*classes()), 8)
    average = tr.PosteriorAverage(held_out, every=2, burn_in=2)
    tr.train(run, tr.DeviceLoader(classes(), 10, seed=seed), n_steps, average=average)
    state = run.state_dict()
    tensors = [state["exchange"]["replica_at"].double()]
    for replica in state["replicas"]:
        tensors += [t.double() for t in replica["parameters"].values()]
        tensors += [t.double() for t in replica["forward"].values()]
    return torch.cat([tensor.flatten() for tensor in tensors])


def sampled(seed, *, compiled=False, n_steps=64):
    """Draws of a run whose starting points come from a distribution, or from a prior."""
    rules = {"n_steps": n_steps, "n_runs": 3, "seed": seed, "compiled": compiled}
    if seed % 2:
        features, labels, _ = simulate_logistic(100, 3)
        target = tr.logistic_regression(features.float(), labels, batch_size=16)
        return tr.sample(target, temperatures=(1.0, 2.0), lr=1e-4, **rules).values
    target = tr.LogDensity(lambda x: -0.5 * x.square().sum(-1), 2)
    start = {"initial": Normal(0.0, 1.0)}
    return tr.sample(target, temperatures=(1.0, 2.0), lr=0.01, **start, **rules).values


def assert_same_in_threads(jobs):
    alone = [job() for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = [future.result() for future in [pool.submit(job) for job in jobs]]
    for job, (expected, got) in enumerate(zip(alone, together, strict=True)):
        assert torch.equal(expected, got), f"job {job} has other numbers in a thread"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("models", [(with_dropout, with_dropout), (mlp, mlp), (with_dropout, mlp)])
def test_networks_in_threads_are_what_they_are_alone(models):
    """Torch has one default generator, for dropout and first weights, in all threads."""
    assert_same_in_threads([lambda m=m, s=s: trained(m, s) for s, m in enumerate(models)])


def test_densities_in_threads_are_what_they_are_alone():
    outside = torch.get_rng_state()
    assert_same_in_threads([lambda s=s: sampled(s) for s in range(4)])
    assert torch.equal(torch.get_rng_state(), outside), "the default generator was disturbed"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_loops_and_networks_in_threads_are_what_they_are_alone(caplog):
    """Inductor's settings and tracing are shared too: one loop is built at a time."""
    compiled = [lambda s=s: sampled(s, compiled=True) for s in range(3)]
    networks = [lambda s=s, m=m: trained(m, s) for s, m in enumerate((with_dropout, mlp))]
    assert_same_in_threads([*compiled, *networks])
    assert "running eagerly" not in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_modules_that_the_user_has_compiled_are_in_threads_what_they_are_alone():
    models = (torch_compiled, torch_compiled, with_dropout)
    assert_same_in_threads([lambda m=m, s=s: trained(m, s) for s, m in enumerate(models)])


def torch_compiled():
    """A user's own compiled module, with dropout."""
    model = with_dropout()
    model.compile(backend="aot_eager")
    return model


def test_a_thread_that_begins_during_a_small_run_gets_all_cores_back():
    usual, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)

    def begins_later():
        with few_threads(1):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    try:
        with few_threads(1):
            thread = threading.Thread(target=begins_later)
            thread.start()
            thread.join()
            seen.append(torch.get_num_threads())
        assert [*seen, torch.get_num_threads()] == [1, 2, 1, 2]
    finally:
        torch.set_num_threads(usual)
