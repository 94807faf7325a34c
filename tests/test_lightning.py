"""A LightningModule is sampled as it is: the energy is that of its training_step."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchrex as tr
from modules import N_CLASSES, N_DATA, N_FEATURES, classes, same
from torchrex import lightning as ours
from torchrex.errors import InvalidArgumentError, TargetError

lightning = pytest.importorskip("lightning", reason="pip install lightning")
LADDER = tr.Ladder((0.5, 0.6), 1e-3)


class Classifier(lightning.LightningModule):
    """As in Lightning's own examples: a criterion, self.log, preprocessing in training_step."""

    def __init__(self, returns="loss"):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(N_FEATURES, N_CLASSES)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        logits = self(2.0 * x)  # what `forward` alone does not know
        loss = self.criterion(logits, y)
        other = F.mse_loss(logits, torch.zeros_like(logits))
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"size": other})
        return {
            "loss": loss,
            "dict": {"loss": loss, "logits": logits},
            "sum": loss + 0.1 * other,
            "own": -logits.log_softmax(1).gather(1, y[:, None]).mean(),
            "nothing": None,
            "trainer": loss if self.hparams.returns != "trainer" else self.trainer,
        }[self.hparams.returns]

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(2.0 * batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(lightning.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)
        self.train = TensorDataset(*classes())

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8)


def make_trainer(**options):
    quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
    options |= dict.fromkeys(quiet, False)
    return lightning.Trainer(max_epochs=1, accelerator="cpu", **options)


@pytest.fixture(autouse=True)
def quiet():
    """Lightning warns of workers, and its own code of torch's; ours must warn of nothing."""
    with warnings.catch_warnings():
        for module in ("lightning", "pytorch_lightning"):
            warnings.filterwarnings("ignore", module=module)
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        yield


@pytest.mark.parametrize("returns", ["loss", "dict"])
def test_the_energy_is_that_of_training_step_example_by_example(returns):
    torch.manual_seed(0)
    module, (x, y) = Classifier(returns), classes()
    made = ours.ensemble(module, DataLoader(TensorDataset(x, y), batch_size=8))
    losses = made.energy.per_example(module, [x[:8], y[:8]])
    expected = F.cross_entropy(module.net(2.0 * x[:8]), y[:8], reduction="none")
    assert torch.equal(losses, expected)
    assert made.n_data == N_DATA
    assert not {"log", "log_dict"} & set(vars(module))


def test_a_fitted_module_is_sampled_as_by_hand_and_its_draws_are_lightning_modules():
    """Weights, batches and seed being the same, every number is."""
    torch.manual_seed(0)
    module, data = Classifier(), Data()
    trainer = make_trainer()
    trainer.fit(module, datamodule=data)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trace, n_calls = tr.Trace(), len(data.calls)
    average = tr.PosteriorAverage(DataLoader(TensorDataset(*classes(16, seed=1)), 16), every=20)
    with warnings.catch_warnings(action="error"):
        run = ours.sample(
            module, data, ladder=LADDER, n_steps=60, prior=tr.GaussianPrior(1.0),
            sampler=tr.SGHMC(0.1), seed=3, rules={"swap_interval": 2}, trace=trace, average=average,
        )  # fmt: skip
    assert len(data.calls) == n_calls, "the Trainer has set the data up"
    assert same(dict(module.state_dict()), before)
    assert module.trainer is trainer
    assert average.n_draws == 3

    def by_hand(net, batch):
        return F.cross_entropy(net(2.0 * batch[0]), batch[1], reduction="none")

    energy = tr.PosteriorEnergy.of(by_hand, n_data=N_DATA, prior=tr.GaussianPrior(1.0))
    alone = tr.ModuleExchange(
        tr.ModuleEnsemble(module.net, energy, tr.SGHMC(0.1)), LADDER, seed=3, swap_interval=2
    )
    its_trace = tr.Trace()
    tr.train(alone, DataLoader(TensorDataset(*classes()), 8), 60, trace=its_trace)
    assert same(trace.tensors(), its_trace.tensors())
    assert trace.tensors()["accepted"].item() > 0
    draw = run.module_at(0)
    assert isinstance(draw, Classifier)
    assert vars(draw)["_trainer"] is None, "a copy of the Trainer came along"
    assert same(dict(draw.net.state_dict()), dict(alone.module_at(0).state_dict()))
    (found,) = make_trainer().validate(
        draw, DataLoader(TensorDataset(*classes()), 8), verbose=False
    )
    x, y = classes()
    assert found["accuracy"] == pytest.approx((draw(2.0 * x).argmax(1) == y).float().mean().item())


def test_data_that_no_trainer_has_seen_are_set_up():
    data = Data()
    with warnings.catch_warnings(action="error"):  # as of `self.log` without a Trainer
        run = ours.sample(Classifier(), data, ladder=LADDER, n_steps=10)
    assert data.calls == ["prepare", "fit"]
    assert run.n_steps == 10


def test_a_stopped_run_goes_on_as_one_that_never_stopped(tmp_path):
    torch.manual_seed(0)
    module, runs = Classifier(), []
    for stops in ((60,), (25, 60)):
        for stop in stops:
            loader = tr.DeviceLoader(classes(), 8, seed=0)
            folder = tmp_path / str(len(stops))
            run = ours.sample(module, loader, ladder=LADDER, n_steps=stop, checkpoints=folder)
        runs.append(run.state_dict()["replicas"])
    assert same(*runs)


def test_a_module_of_pytorch_lightning_will_do():
    other = pytest.importorskip("pytorch_lightning")

    class Plain(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(N_FEATURES, 1)

        def training_step(self, batch):
            loss = F.mse_loss(self.net(batch[0])[:, 0], batch[1].float())
            self.log("loss", loss)
            return loss

    run = ours.sample(Plain(), tr.DeviceLoader(classes(), 8), ladder=LADDER, n_steps=10)
    assert run.energies(classes(8)).total.isfinite().all()


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ("sum", "must return one loss of torch .* as it is"),
        ("own", "give energy=PosteriorEnergy"),
        ("nothing", "must return one loss"),
        ("trainer", "training_step needs a Trainer .*; give energy="),
    ],
)
def test_a_step_without_terms_is_one_line_and_an_energy_helps(returns, words):
    module, loader = Classifier(returns), tr.DeviceLoader(classes(), 8)
    with pytest.raises(TargetError, match=words) as error:
        ours.sample(module, loader, ladder=LADDER, n_steps=10)
    assert len(str(error.value).splitlines()) == 1
    energy = tr.PosteriorEnergy(F.cross_entropy, n_data=N_DATA)
    run = ours.sample(module, loader, ladder=LADDER, n_steps=10, energy=energy)
    assert run.n_steps == 10


def test_what_cannot_be_sampled_is_refused():
    loader = tr.DeviceLoader(classes(), 8)
    with pytest.raises(InvalidArgumentError, match="must be a LightningModule, got Linear"):
        ours.ensemble(nn.Linear(2, 2), loader)
    with pytest.raises(InvalidArgumentError, match="list does not say how many examples it has"):
        ours.ensemble(Classifier(), [classes()])
    energy = tr.PosteriorEnergy(F.cross_entropy, n_data=N_DATA)
    with pytest.raises(InvalidArgumentError, match="of its own"):
        ours.ensemble(Classifier(), loader, energy=energy, n_data=3)
