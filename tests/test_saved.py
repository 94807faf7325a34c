"""A run folder of `train` for later use: `torchrex.load`."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchrex as tr
from torchrex.errors import CheckpointError, InvalidArgumentError, RunFolderError, TorchrexError

Normal = torch.distributions.Normal


def network(n_outputs=3):
    """With frozen weights, tied weights and the statistics of BatchNorm."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    first.bias.requires_grad = False
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(first, nn.Tanh(), norm, second, nn.Tanh(), nn.Linear(4, n_outputs))


def examples(n=60, seed=0, classes=True):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, torch.randint(3, (n,), generator=generator) if classes else x[:, :1].sin()


def squares(output, target):
    return 0.5 * ((output - target) / 0.2).square()


def trained(folder, *, classes=True, stored=True, n_steps=60, shared=(), **average):
    energy = tr.PosteriorEnergy(F.cross_entropy if classes else squares, n_data=60)
    ensemble = tr.ModuleEnsemble(
        lambda: network(3 if classes else 1),
        energy,
        tr.SGHMC(0.2),
        initial="independent",
        shared=shared,
    )
    run = tr.ModuleExchange(ensemble, tr.Ladder((1.0, 3.0), 1e-5), seed=2)
    store = tr.DrawStore(folder / "draws", capacity=4) if stored else None
    settings = {"every": 10, "burn_in": 10, "store": store, **average}
    one = tr.PosteriorAverage([examples(20, 1, classes)], **settings)
    data = tr.DeviceLoader(examples(60, 0, classes), 15, seed=1)
    tr.train(run, data, n_steps, average=one, checkpoints=folder / "checkpoints")
    return run, one, store


def digests(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {p: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


def test_predictions_of_draws_and_the_stored_average(tmp_path):
    _, average, store = trained(tmp_path)
    before = digests(tmp_path)
    saved = tr.load(str(tmp_path), network)
    assert saved.step == 60
    new = [examples(30, 5)]
    assert torch.equal(saved.predict(new).probabilities, store.predict(network, new).probabilities)
    assert saved.predict(new).n_draws == 4
    assert torch.equal(saved.averages[0].probabilities(), average.probabilities())
    assert saved.averages[0].metrics() == average.metrics()
    assert saved.averages[0].n_draws == 5
    assert repr(saved).startswith("SavedRun(DrawStore(")
    assert digests(tmp_path) == before


def test_a_module_is_copied(tmp_path):
    trained(tmp_path)
    module = network()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    tr.load(tmp_path, module).predict([examples()])
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("shared", [(), ("5.",)])
def test_without_draws_the_last_weights_are_used_and_that_is_said(tmp_path, caplog, shared):
    run, _, _ = trained(tmp_path, stored=False, shared=shared)
    with caplog.at_level(logging.WARNING):
        saved = tr.load(tmp_path, network)
    assert "predictions are those of the last weights of rung 0 alone" in caplog.text
    assert "the last weights alone" in repr(saved)
    new = examples(30, 5)
    found = saved.predict([new])
    assert found.n_draws == 1
    assert torch.equal(found.probabilities, run.predict(new, 0).double().softmax(-1))
    assert not torch.equal(found.probabilities, run.predict(new, 1).double().softmax(-1))
    with pytest.raises(InvalidArgumentError, match="gives rung 0 alone, not rung 1"):
        saved.predict([new], rung=1)


def test_a_store_without_draws_of_rung_0_is_not_used(tmp_path, caplog):
    run, _, _ = trained(tmp_path, rungs=(1,))
    with caplog.at_level(logging.WARNING):
        saved = tr.load(tmp_path, network)
    assert "no draws in" in caplog.text
    new = examples(30, 5)
    assert torch.equal(saved.predict([new]).probabilities, run.predict(new).double().softmax(-1))


def test_draws_alone_are_enough(tmp_path):
    average = trained(tmp_path)[1]
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    saved = tr.load(tmp_path, network)
    assert (saved.step, saved.averages) == (None, [])
    assert saved.predict(average.data).n_draws == 4


def test_observations_need_their_likelihood_again(tmp_path):
    def likelihood(out):
        return Normal(out, 0.2)

    _, average, store = trained(tmp_path, classes=False, output="values", likelihood=likelihood)
    saved = tr.load(tmp_path, lambda: network(1), likelihood=likelihood)
    assert saved.averages[0].metrics() == average.metrics()
    new = [examples(30, 5, classes=False)]
    found = saved.predictive(new)
    expected = store.predictive(lambda: network(1), new, likelihood=likelihood)
    assert found.metrics() == expected.metrics()
    assert saved.predictive(new, likelihood=None).aleatoric is None

    (without,) = tr.load(tmp_path, lambda: network(1)).averages
    assert torch.equal(without.predictive().variance, average.predictive().variance)
    for ask in (without.metrics, lambda: without.predictive().quantile(0.5)):
        with pytest.raises(InvalidArgumentError, match=r"^no checkpoint holds the likelihood"):
            ask()


def test_the_average_of_a_function(tmp_path):
    _, average, _ = trained(tmp_path, output=lambda model, batch: model(batch[0]).softmax(1))
    (stored,) = tr.load(tmp_path, network).averages
    assert torch.equal(stored.predictive().mean, average.predictive().mean)
    assert torch.equal(stored.predictive().draws, average.predictive().draws)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog):
    trained(tmp_path, stored=False, n_steps=30)
    trained(tmp_path, stored=False, n_steps=60)
    newest = tmp_path / "checkpoints" / "step=000000060" / "replica=0.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert tr.load(tmp_path, network).step == 30
    assert "damaged checkpoint skipped" in caplog.text


def other_form(folder):
    """A sealed checkpoint whose state has no run."""
    newest = folder / "checkpoints" / "step=000000060"
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["state"]["dict"]["run"]["dict"]["exchange"]
    data = json.dumps(manifest).encode()
    (newest / "manifest.json").write_bytes(data)
    (newest / "DONE").write_text(hashlib.sha256(data).hexdigest() + "\n")


@pytest.mark.parametrize("stored", [True, False])
def test_what_does_not_fit_is_one_clear_line(tmp_path, stored, caplog):
    trained(tmp_path, stored=stored)
    wide, extra = network(), network()
    wide[5] = nn.Linear(4, 7)
    extra.append(nn.Linear(3, 3))
    shorter = nn.Sequential(*network()[:5])
    for model, words in (
        (wide, r"another model: 5.weight is \[3, 4\] there and \[7, 4\] in this model"),
        (lambda: extra, r"6.weight is absent there and \[3, 3\] in this model"),
        (shorter, r"5.weight is \[3, 4\] there and absent in this model"),
        (3, "model must be an nn.Module or make one, got 3"),
    ):
        with pytest.raises(InvalidArgumentError, match=words) as error:
            tr.load(tmp_path, model)
        assert "\n" not in str(error.value)
    with pytest.raises(RunFolderError, match=r"no run folder .*absent"):
        tr.load(tmp_path / "absent", network)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint in checkpoints/ and no draws"):
        tr.load(tmp_path / "empty", network)
    if not stored:
        other_form(tmp_path)
        with pytest.raises(CheckpointError, match="not a checkpoint of such a run"):
            tr.load(tmp_path, network)
    else:
        (tmp_path / "draws" / "index.json").write_text("{")
        with pytest.raises(TorchrexError, match="not an index of draws"):
            tr.load(tmp_path, network)


def test_no_experiment_is_loaded(tmp_path):
    trained(tmp_path)
    code = (
        "import sys, torch, torchrex\nfrom torch import nn\n"
        "first, second = nn.Linear(4, 4), nn.Linear(4, 4)\nsecond.weight = first.weight\n"
        "net = nn.Sequential(first, nn.Tanh(), nn.BatchNorm1d(4), second, nn.Tanh(), "
        "nn.Linear(4, 3))\n"
        f"print(torchrex.load({str(tmp_path)!r}, net).predict([torch.zeros(2, 4)]).n_draws)\n"
        "print('torchrex.experiments' in sys.modules, 'torchrex.network' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "False", "False"]
