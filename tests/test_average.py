"""The posterior average: known metrics, exact thinning, and a stream that equals stored means."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchrex.checkpoint import Checkpoints
from torchrex.errors import CheckpointError, InvalidArgumentError, MissingDependencyError
from torchrex.posterior import (
    DrawStore,
    PosteriorAverage,
    classification_metrics,
    predictive_entropy,
)

N, CLASSES, FEATURES = 50, 4, 6


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    )


class WalkingRun:
    """Modules take random steps. Outputs share one memory, as those of a captured graph."""

    def __init__(self, n_rungs: int = 2, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.modules = [make_model() for _ in range(n_rungs)]
        self.n_steps, self.n_rungs = 0, n_rungs
        self._buffers: dict[int, Tensor] = {}

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            for module in self.modules:
                for parameter in module.parameters():
                    parameter.data += 0.1 * torch.randn(parameter.shape, generator=self.generator)
                # The buffers of the batch norm move as well.
                module.train()(torch.randn(8, FEATURES, generator=self.generator))
            self.n_steps += 1

    @torch.no_grad()
    def predict(self, batch, rung: int = 0) -> Tensor:
        x = batch
        if not isinstance(batch, Tensor):
            x = batch["x"] if isinstance(batch, dict) else batch[0]
        output = self.modules[rung].eval()(x)
        return self._buffers.setdefault(len(x), torch.empty_like(output)).copy_(output)

    def live_module_at(self, rung: int) -> nn.Module:
        return self.modules[rung]


@pytest.fixture(scope="module")
def dataset():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(N, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (N,), generator=generator))


@pytest.fixture
def data(dataset):
    return DataLoader(dataset, batch_size=16)  # the last batch is smaller


def random_probabilities(n: int, seed: int = 0, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)
    return logits.softmax(1).to(dtype), torch.randint(CLASSES, (n,), generator=generator)


# Metrics


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_metrics_agree_with_independent_ones(dtype):
    probabilities, labels = random_probabilities(2000, dtype=dtype)
    metrics = classification_metrics(probabilities, labels.int())
    p, y = probabilities.double().numpy(), labels.numpy()
    assert metrics["accuracy"] == pytest.approx(accuracy_score(y, p.argmax(1)), abs=1e-6)
    nll = log_loss(y, p / p.sum(1, keepdims=True), labels=range(CLASSES))
    assert metrics["nll"] == pytest.approx(nll, rel=1e-6)
    brier = sum(((p[:, c] - (y == c)) ** 2).mean() for c in range(CLASSES))
    assert metrics["brier"] == pytest.approx(brier, rel=1e-12)
    confidence, right, ece = p.max(1), p.argmax(1) == y, 0.0
    for k in range(15):
        inside = (confidence >= k / 15) & (confidence < (k + 1) / 15)
        if inside.any():
            ece += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert metrics["ece"] == pytest.approx(ece, abs=1e-5)
    assert all(type(value) is float for value in metrics.values())


def test_nll_stays_finite_where_probabilities_underflow():
    certain, wrong = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([1, 1])
    for probabilities, bits in ((certain, 126), (certain.double(), 1022)):
        nll = classification_metrics(probabilities, wrong)["nll"]
        assert nll == pytest.approx(bits * math.log(2))
    right = classification_metrics(certain, torch.tensor([0, 0]))
    assert right == {"accuracy": 1.0, "nll": 0.0, "brier": 0.0, "ece": 0.0}


@pytest.mark.parametrize(
    ("probabilities", "labels", "words"),
    [
        (torch.randn(5, 3), torch.zeros(5).long(), "softmax"),
        (torch.full((5, 3), math.nan), torch.zeros(5).long(), "sum to 1"),
        (torch.full((5, 4), 0.25), torch.tensor([0, 1, 2, 3, 4]), "from 0 to 4"),
        (torch.full((5, 4), 0.25), torch.zeros(5), "class numbers"),
        (torch.full((5, 4), 0.25), torch.zeros(4).long(), "class numbers"),
        (torch.ones(0, 3), torch.zeros(0).long(), "n >= 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(probabilities, labels, words):
    with pytest.raises(InvalidArgumentError, match=words):
        classification_metrics(probabilities, labels)


def test_without_torchmetrics(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.classification", None)
    with pytest.raises(MissingDependencyError, match=r"torchrex\[metrics\]"):
        classification_metrics(*random_probabilities(5))


# The average


class Scripted(WalkingRun):
    """A run whose draw k gives the logits `script[k]` (n, classes) on every rung."""

    def __init__(self, script: list[Tensor]) -> None:
        super().__init__()
        self.script = script

    def predict(self, batch, rung: int = 0) -> Tensor:
        return self.script[self.n_steps - 1]


def average_of(script: list[list[list[float]]], labels: list[int], **settings) -> PosteriorAverage:
    """The average after the draws of softmax(log p)."""
    run = Scripted([torch.tensor(p).log() for p in script])
    average = PosteriorAverage([(torch.zeros(len(labels), 1), torch.tensor(labels))], **settings)
    for _ in script:
        run.step()
        assert average.update(run)
    return average


def test_uncertainty_of_hand_made_draws():
    """Example 0: the draws agree on a fair coin. Example 1: each is sure, and they disagree."""
    average = average_of([[[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]]], labels=[0, 0])
    log2 = math.log(2)
    for found, expected in (
        (average.probabilities(), [[0.5, 0.5], [0.5, 0.5]]),
        (average.predictive_entropy(), [log2, log2]),
        (average.mutual_information(), [0.0, log2]),
    ):
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_the_three_ways_to_average_differ():
    """Draws 0.9 and 0.5: mean of probabilities 0.7, of logits sqrt(9) : 1 = 0.75, the last 0.5."""
    average = average_of([[[0.9, 0.1]], [[0.5, 0.5]]], labels=[0])
    for of, probability in (("probabilities", 0.7), ("logits", 0.75), ("last", 0.5)):
        assert average.metrics(of=of)["nll"] == pytest.approx(-math.log(probability), rel=1e-6)
    expected = torch.tensor([[math.log(0.45), math.log(0.05)]], dtype=torch.float64)
    torch.testing.assert_close(average.logit_sum(), expected, rtol=1e-6, atol=0)
    with pytest.raises(InvalidArgumentError, match="of must be"):
        average.metrics(of="mean")


def test_the_stream_equals_the_mean_over_stored_predictions(data, dataset):
    run, average, stored = WalkingRun(), PosteriorAverage(data, every=2, rungs=(0, 1)), ([], [])
    inputs, labels = dataset.tensors
    for _ in range(20):
        run.step()
        if average.update(run):
            with torch.no_grad():
                for rung in (0, 1):
                    stored[rung].append(run.modules[rung].eval()(inputs).double())
    assert average.n_draws == len(stored[0]) == 10
    close = {"rtol": 0, "atol": 1e-6}
    for rung, draws in ((0, stored[0]), (1, stored[1]), (None, stored[0] + stored[1])):
        logits = torch.stack(draws)
        p = logits.softmax(-1)
        entropy = predictive_entropy(p.mean(0))
        information = entropy - predictive_entropy(p).mean(0)
        torch.testing.assert_close(average.probabilities(rung), p.mean(0), **close)
        torch.testing.assert_close(average.logit_sum(rung), logits.sum(0), rtol=0, atol=1e-4)
        torch.testing.assert_close(average.predictive_entropy(rung), entropy, **close)
        torch.testing.assert_close(average.mutual_information(rung), information, **close)
        assert average.mutual_information(rung).min() > -1e-12
        nll = classification_metrics(p.mean(0), labels)["nll"]
        assert average.metrics(rung)["nll"] == pytest.approx(nll, rel=1e-6)
    nll = classification_metrics(stored[0][-1].softmax(-1), labels)["nll"]
    assert average.metrics(of="last")["nll"] == pytest.approx(nll, rel=1e-6)
    assert torch.equal(average.labels, labels)


@pytest.mark.parametrize(
    ("every", "burn_in", "expected"),
    [(1, 0, list(range(1, 21))), (4, 6, [10, 14, 18]), (3, 19, []), (20, 0, [20])],
)
def test_thinning_and_burn_in(data, every, burn_in, expected):
    run, average = WalkingRun(), PosteriorAverage(data, every=every, burn_in=burn_in)
    assert not average.update(run)  # before any step
    taken = []
    for _ in range(20):
        run.step()
        if average.update(run):
            taken.append(run.n_steps)
        assert not average.update(run)  # once a step
    assert taken == expected
    assert average.n_draws == len(expected)


def test_memory_does_not_grow_with_draws(data):
    run, average, sizes = WalkingRun(), PosteriorAverage(data), []
    for _ in range(30):
        run.step()
        average.update(run)
        sizes.append({name: x.shape for name, x in average.state_dict()["tensors"].items()})
    assert sizes[0] == sizes[-1]


@pytest.mark.parametrize("halfway", [0, 3, 7, 8])
def test_resume_is_exact(data, tmp_path, halfway):
    def new(folder):
        store = DrawStore(folder, capacity=3, keep="reservoir")
        return PosteriorAverage(data, every=2, rungs=(1, 0), store=store)

    run, average = WalkingRun(), new(tmp_path / "whole")
    for _ in range(20):
        run.step()
        average.update(run)

    run, before = WalkingRun(), new(tmp_path / "stopped")
    for _ in range(halfway):
        run.step()
        before.update(run)
    checkpoints, saved = Checkpoints(tmp_path / "checkpoints"), copy.deepcopy(run)
    checkpoints.save(halfway, before.state_dict())
    last = before.metrics(of="last") if before.n_draws else None
    for _ in range(9):  # goes on for a while and is lost
        run.step()
        before.update(run)
    run, after = saved, new(tmp_path / "stopped")
    after.load_state_dict(checkpoints.load_newest().state)
    assert last == (after.metrics(of="last") if after.n_draws else None)
    while run.n_steps < 20:
        run.step()
        after.update(run)

    assert after.n_draws == average.n_draws == 10
    for rung in (0, 1, None):
        assert torch.equal(after.probabilities(rung), average.probabilities(rung))
        assert torch.equal(after.logit_sum(rung), average.logit_sum(rung))
        assert torch.equal(after.mutual_information(rung), average.mutual_information(rung))
        assert after.metrics(rung, of="last") == average.metrics(rung, of="last")
    assert after.store.draws == average.store.draws
    for one, other in zip(after.store, average.store, strict=True):
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


def test_a_state_of_other_settings_is_refused(data, tmp_path):
    run, average = WalkingRun(), PosteriorAverage(data)
    run.step()
    average.update(run)
    state = average.state_dict()
    with pytest.raises(CheckpointError, match="every"):
        PosteriorAverage(data, every=2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="without one"):
        PosteriorAverage(data, store=DrawStore(tmp_path, capacity=2)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="not the state"):
        PosteriorAverage(data).load_state_dict({"n_draws": 3})
    run.n_steps = 0
    with pytest.raises(InvalidArgumentError, match="load_state_dict"):
        average.update(run)


def assert_untouched(average, run, words):
    """An update is refused, and the average stays bit for bit as it was."""
    before = average.state_dict()
    run.step()
    with pytest.raises(InvalidArgumentError, match=words):
        average.update(run)
    after = average.state_dict()
    for name, tensor in before.pop("tensors").items():
        assert torch.equal(tensor, after["tensors"][name])
    assert before == {key: value for key, value in after.items() if key != "tensors"}


def test_data_that_change_are_noticed(dataset, data):
    """Shuffled labels, shuffled inputs without labels, another number of examples."""
    run, average = WalkingRun(), PosteriorAverage(DataLoader(dataset, batch_size=16, shuffle=True))
    run.step()
    assert average.update(run)
    assert_untouched(average, run, "shuffle=False")

    x = dataset.tensors[0]
    average = PosteriorAverage([x[:20], x[20:]])
    assert average.update(run)
    with pytest.raises(InvalidArgumentError, match="without targets"):
        average.metrics()
    average.data = [x[20:40], torch.cat([x[:20], x[40:]])]
    assert_untouched(average, run, "inputs")

    average = PosteriorAverage(list(data))
    average.update(run)
    average.data.pop()
    assert_untouched(average, run, "50 examples at first, now 48")


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_logits_are_not_added(data, tmp_path, poison):
    run, store = WalkingRun(), DrawStore(tmp_path, capacity=5)
    average = PosteriorAverage(data, rungs=(0, 1), store=store)
    run.step(3)
    average.update(run)
    run.modules[1][3].bias.data[0] = poison
    assert_untouched(average, run, "rung 1 at step 4 .* 50 of 50")
    assert store.draws == [(3, 0), (3, 1)]


NO_LABELS = (torch.zeros(N), torch.zeros(N, CLASSES).long(), torch.zeros(N - 1).long(), "cat")


def test_outputs_that_are_no_logits_and_targets_that_are_no_labels(dataset):
    flat, zeros = torch.zeros(N), torch.zeros(N, 2, 3)
    for output in (flat, flat[:, None], zeros, zeros[:, 0].long(), None):
        run = Scripted([output])
        run.step()
        with pytest.raises(InvalidArgumentError, match="classifiers"):
            PosteriorAverage([dataset.tensors]).update(run)
    run = WalkingRun()
    run.step()
    for target in NO_LABELS:
        with pytest.raises(InvalidArgumentError, match="class numbers"):
            PosteriorAverage([(dataset.tensors[0], target)]).update(run)


def test_bad_settings_data_and_rungs(data):
    for settings in ({"every": 0}, {"burn_in": -1}, {"rungs": ()}, {"rungs": (0, 0)}):
        with pytest.raises(InvalidArgumentError, match=next(iter(settings))):
            PosteriorAverage(data, **settings)
    run = WalkingRun()
    run.step()
    with pytest.raises(InvalidArgumentError, match="no batches"):
        PosteriorAverage([]).update(run)
    with pytest.raises(InvalidArgumentError, match="only once"):
        PosteriorAverage(batch for batch in data)
    with pytest.raises(InvalidArgumentError, match="has 2 rungs"):
        PosteriorAverage(data, rungs=(0, 2)).update(run)
    late = PosteriorAverage(data, every=10, burn_in=5)
    for read in (late.probabilities, late.metrics, lambda: late.labels):
        with pytest.raises(InvalidArgumentError, match="first is due at 15"):
            read()
    PosteriorAverage(data, every=10, burn_in=5).load_state_dict(late.state_dict())  # of no draws
    average = PosteriorAverage(data)
    run.modules[0][3].bias.data[2] = -math.inf  # a masked class is no error
    average.update(run)
    assert average.mutual_information().isfinite().all()
    with pytest.raises(InvalidArgumentError, match="rung 1 is not recorded"):
        average.probabilities(1)


def test_dict_batches(dataset):
    x, y = dataset.tensors
    run = WalkingRun()
    run.step()
    average = PosteriorAverage([{"x": x, "label": y}], target_key="label")
    assert average.update(run)
    assert torch.equal(average.labels, y)
    with pytest.raises(InvalidArgumentError, match=r"'target', only \['label', 'x'\]"):
        PosteriorAverage([{"x": x, "label": y}]).update(run)


# Predictions of stored draws


@pytest.fixture(scope="module")
def stored(tmp_path_factory, dataset):
    """An average, and a store that has kept every draw of it."""
    store = DrawStore(tmp_path_factory.mktemp("draws"), capacity=100)
    run, average = WalkingRun(), PosteriorAverage([dataset[:30]], rungs=(0, 1), store=store)
    for _ in range(6):
        run.step()
        average.update(run)
    return DrawStore.load(store.folder), average


def test_predictions_of_stored_draws_equal_the_average(stored):
    (store, average), made = stored, []
    prediction = store.predict(lambda: made.append(make_model()) or made[-1], average.data)
    assert prediction.n_draws == average.n_draws == 6
    assert torch.equal(prediction.probabilities, average.probabilities())
    assert torch.equal(prediction.entropy, average.predictive_entropy())
    assert torch.equal(prediction.mutual_information, average.mutual_information())
    assert torch.equal(prediction.labels, average.labels)
    assert prediction.metrics() == average.metrics()
    assert len(made) == 1  # one module for all draws
    module = make_model().train()
    before = copy.deepcopy(module.state_dict())
    pooled = store.predict(module, average.data, rung=None)
    torch.testing.assert_close(pooled.probabilities, average.probabilities(None))
    assert pooled.n_draws == 12
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_other_batches_and_wrong_models(stored, tmp_path):
    (store, average), wider = stored, make_model()
    ((x, y),) = average.data
    named = store.predict(make_model, [{"input": x, "label": y}], target_key="label")
    odd = [{"odd": x, "target": y}]
    alone = store.predict(make_model, odd, forward=lambda module, batch: module(batch["odd"]))
    for prediction in (named, alone):
        assert torch.equal(prediction.probabilities, average.probabilities())
    assert store.predict(make_model, [x]).labels is None
    wider[3] = nn.Linear(8, 7)
    with pytest.raises(InvalidArgumentError, match=r"3.weight.*\[7, 8\]"):
        store.predict(wider, average.data)
    with pytest.raises(InvalidArgumentError, match=r"rung 2.*\[0, 1\]"):
        store.predict(make_model, average.data, rung=2)
    with pytest.raises(InvalidArgumentError, match="no draw"):
        DrawStore(tmp_path, capacity=1).predict(make_model, average.data)
