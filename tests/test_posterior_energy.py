"""The energy of a module: all forms of losses, batches and priors, and the settings of SGD."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchrex as tr
from modules import N_CLASSES, N_DATA, classes, cross_entropy, linear, make_run, mlp, same
from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.targets import frozen

N = 40
WEIGHT = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


def double():
    torch.manual_seed(3)
    return mlp(torch.float64)


def batch_of(n=8):
    return classes(n, seed=5, dtype=torch.float64)


def one_step(model, energy, batch):
    """Energy of a replica and its gradient: at temperature 0 and lr 1 SGLD is x - gradient."""
    run = tr.ModuleExchange(tr.ModuleEnsemble(model, energy), tr.Ladder.descent(1.0))
    before = {name: p.detach().clone() for name, p in run.module_at().named_parameters()}
    info = run.step(batch)
    after = dict(run.module_at().named_parameters())
    return float(info.energy[0, 0]), {name: x - after[name].detach() for name, x in before.items()}


def by_hand(model, total):
    """The same by plain autograd, on a copy."""
    module = copy.deepcopy(model)
    named = dict(module.named_parameters())
    value = total(module, named)
    gradients = torch.autograd.grad(
        value, list(named.values()), allow_unused=True, materialize_grads=True
    )
    return float(value.detach()), dict(zip(named, gradients, strict=True))


def assert_same_energy_and_gradient(model, energy, batch, total):
    value, gradient = one_step(model, energy, batch)
    expected, expected_gradient = by_hand(model, total)
    assert value == pytest.approx(expected, rel=1e-12)
    assert gradient.keys() == expected_gradient.keys()
    for name, g in gradient.items():
        assert torch.allclose(g, expected_gradient[name], rtol=1e-10, atol=1e-10), name
    assert any(g.abs().max() > 1e-3 for g in gradient.values()), "a test of zeros"


def smoothed(output, target):
    """Label smoothing 0.1 written out."""
    log_p = output.log_softmax(1)
    return -0.9 * log_p.gather(1, target[:, None])[:, 0] - 0.1 * log_p.mean(1)


def written_out(output, target):
    return F.nll_loss(output.log_softmax(1), target, reduction="none")


def weighted(output, target):
    return -WEIGHT[target] * output.log_softmax(1).gather(1, target[:, None])[:, 0]


def squared(output, target):
    return (output[range(len(target)), target] - 1.0) ** 2


LOSSES = {
    "function": (F.cross_entropy, written_out),
    "module that sums": (nn.CrossEntropyLoss(reduction="sum"), written_out),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), smoothed),
    "partial": (
        functools.partial(F.cross_entropy, label_smoothing=0.1, reduction="mean"),
        smoothed,
    ),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), weighted),
    "own": (lambda o, t: (o.gather(1, t[:, None])[:, 0] - 1.0) ** 2, squared),
    "own with a column": (lambda o, t: (o.gather(1, t[:, None]) - 1.0) ** 2, squared),
}


@pytest.mark.parametrize(("loss", "expected"), LOSSES.values(), ids=LOSSES)
def test_a_loss_enters_as_the_sum_over_all_data(loss, expected):
    x, y = batch_of(8)
    energy = tr.PosteriorEnergy(loss, n_data=N)
    assert energy.per_example(double(), (x, y)).shape == (8,)
    assert_same_energy_and_gradient(
        double(), energy, (x, y), lambda m, _: N / 8 * expected(m(x), y).sum()
    )


def test_several_numbers_per_example_add_up():
    """A likelihood is a product over outputs: mse_loss on (n, d) is summed over d, not averaged."""
    x, _ = batch_of(8)
    target = classes(8, seed=9, dtype=torch.float64)[0][:, :N_CLASSES]
    energy = tr.PosteriorEnergy(nn.MSELoss(), n_data=N)
    assert_same_energy_and_gradient(
        double(), energy, (x, target), lambda m, _: N / 8 * (m(x) - target).square().sum()
    )


def test_of_takes_models_and_batches_of_any_form():
    x, y = batch_of(8)

    def odd(module, batch):
        return F.cross_entropy(module(batch["where"]["x"]), batch["labels"], reduction="none")

    energy = tr.PosteriorEnergy.of(odd, n_data=N, prior=tr.GaussianPrior(2.0))

    def total(module, parameters):
        prior = sum(w.square().sum() for w in parameters.values())
        return N / 8 * F.cross_entropy(module(x), y, reduction="sum") + prior

    assert_same_energy_and_gradient(double(), energy, {"where": {"x": x}, "labels": y}, total)


# Batches


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(torch.float64), linear(torch.float64)

    def forward(self, x, z):
        return self.first(x) - 2.0 * self.second(z)


@pytest.mark.parametrize("form", ["tuple", "dict with another key"])
def test_several_inputs(form):
    torch.manual_seed(0)
    model = TwoInputs()
    (x, y), (z, _) = batch_of(8), classes(8, seed=6, dtype=torch.float64)
    batch = {"tuple": (x, z, y), "dict with another key": {"label": y, "z": z, "x": x}}[form]
    key = "label" if "another" in form else "target"
    energy = tr.PosteriorEnergy(F.cross_entropy, n_data=N, target_key=key)

    def total(module, _):
        output = module.first(x) - 2.0 * module.second(z)
        return N / 8 * F.cross_entropy(output, y, reduction="sum")

    assert_same_energy_and_gradient(model, energy, batch, total)


# Priors


def spread(parameters):
    """A Laplace prior, and one that ties two parameters."""
    tied = (parameters["0.bias"] * parameters["2.bias"]).sum()
    return sum(p.abs().sum() for p in parameters.values()) + 3.0 * tied


def gaussian(default, **precisions):
    def energy(parameters):
        return sum(
            0.5 * precisions.get(name.replace(".", "_"), default) * w.square().sum()
            for name, w in parameters.items()
        )

    return energy


PRIORS = {
    "none": (None, gaussian(0.0)),
    "scalar": (tr.GaussianPrior(25.0), gaussian(25.0)),
    "zero": (tr.GaussianPrior(0.0), gaussian(0.0)),
    "groups": (
        tr.GaussianPrior(2.0, groups={"bias": 0.0, "0.": 7.0}),
        gaussian(2.0, **{"0_weight": 7.0, "0_bias": 0.0, "2_bias": 0.0, "4_bias": 0.0}),
    ),
    "function": (spread, spread),
}


@pytest.mark.parametrize(("prior", "expected"), PRIORS.values(), ids=PRIORS)
def test_a_prior_is_added_once_whatever_the_batch(prior, expected):
    x, y = batch_of(8)
    energy = tr.PosteriorEnergy(F.cross_entropy, n_data=N, prior=prior)
    assert_same_energy_and_gradient(
        double(),
        energy,
        (x, y),
        lambda m, p: N / 8 * F.cross_entropy(m(x), y, reduction="sum") + expected(p),
    )


def test_the_first_group_that_fits_counts_and_one_that_fits_nothing_is_refused():
    """Parts of a Sequential have numbers for names."""
    prior = tr.GaussianPrior(25.0, groups={"bn": 1.0, "bias": 0.0})
    found = [prior.precision_of(name) for name in ("conv.weight", "bn.bias", "fc.bias")]
    assert found == [25.0, 1.0, 0.0]
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Linear(3, 3))

    def run_with(groups):
        prior = tr.GaussianPrior(25.0, groups=groups)
        energy = tr.PosteriorEnergy(F.cross_entropy, n_data=N, prior=prior)
        return tr.ModuleExchange(tr.ModuleEnsemble(model, energy), tr.Ladder((1.0, 2.0), 1e-3))

    with pytest.raises(InvalidArgumentError, match=r"group 'bn' of .*0\.weight, 0\.bias, 1"):
        run_with({"bias": 0.0, "bn": 0.0})
    run_with({"bias": 0.0, "1.": 0.0, "1.bias": 1.0})  # the last is never reached, but it fits
    model[0].requires_grad_(False)
    run_with({"0.": 0.0})  # frozen, but there


def test_energies_alone_are_those_with_gradients():
    """Repeated draws ask for energies without gradients; these include a function prior."""
    for prior, _ in PRIORS.values():
        energy = tr.PosteriorEnergy(F.cross_entropy, n_data=N, prior=prior)
        run = make_run(double, energy)
        alone = run.energies(batch_of(8)).total
        assert torch.equal(alone, run.step(batch_of(8)).energy)


# From torch.optim.SGD


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-3])
def test_converted_settings_take_the_steps_of_sgd(momentum, weight_decay):
    """The mean loss of torch.optim.SGD and the summed energy at temperature 0 walk the same way for
    20 steps.
    """
    model = double()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(
        reference.parameters(), lr=0.3, momentum=momentum, weight_decay=weight_decay
    )
    scale = tr.from_sgd(optimizer, n_data=N)
    assert scale == tr.from_sgd(n_data=N, lr=0.3, momentum=momentum, weight_decay=weight_decay)
    energy = tr.PosteriorEnergy(F.cross_entropy, n_data=N, prior=scale.prior)
    run = tr.ModuleExchange(
        tr.ModuleEnsemble(model, energy, tr.SGHMC(scale.friction)), tr.Ladder.descent(scale.lr)
    )
    for k in range(20):
        x, y = classes(8 - k % 3, seed=k, dtype=torch.float64)
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        run.step((x, y))
        for mine, theirs in zip(run.module_at().parameters(), reference.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=0.0, atol=1e-10)
    moved = max(
        float((a - b).detach().abs().max())
        for a, b in zip(reference.parameters(), model.parameters(), strict=True)
    )
    assert moved > 0.1


def sgd(**settings):
    return torch.optim.SGD(linear().parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def two_groups():
    groups = [{"params": [parameter]} for parameter in linear().parameters()]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tr.from_sgd(sgd(nesterov=True), n_data=N), "nesterov"),
        (lambda: tr.from_sgd(sgd(maximize=True), n_data=N), "maximize"),
        (lambda: tr.from_sgd(torch.optim.AdamW(linear().parameters()), n_data=N), "AdamW"),
        (lambda: tr.from_sgd(two_groups(), n_data=N), "2 parameter groups"),
        (lambda: tr.from_sgd(n_data=N), "give lr"),
        (lambda: tr.from_sgd(n_data=0, lr=0.1), "n_data"),
        (lambda: tr.PosteriorEnergy("cross_entropy", n_data=N), "loss must be"),
        (lambda: tr.PosteriorEnergy(F.cross_entropy, n_data=0), "n_data must be a whole"),
        (lambda: tr.PosteriorEnergy(F.cross_entropy, n_data=40.0), "n_data must be a whole"),
        (lambda: tr.PosteriorEnergy(F.cross_entropy, n_data=N, prior=25.0), "prior must be"),
        (lambda: tr.GaussianPrior(1.0, groups={"bias": float("nan")}), "bias has"),
        (lambda: tr.GaussianPrior(-1.0), "precision"),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make()


# Modules trained against each other: what is descended is not the energy


class Pair(nn.Module):
    """Two linear maps; the second sees what the first makes."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def against(module, batch):
    made = module.maker(batch[0])
    judged = module.judge(made.detach())
    terms = judged.square().sum(1)
    return terms, terms.mean() - frozen(module.judge)(made).sin().mean()


def test_each_module_follows_its_own_loss():
    """Against two optimizers by hand, at temperature 0."""
    torch.manual_seed(0)
    pair, x = Pair(), torch.randn(6, 3)
    by_hand = copy.deepcopy(pair)
    energy = tr.PosteriorEnergy.of(against, n_data=6)
    run = tr.ModuleExchange(tr.ModuleEnsemble(pair, energy), tr.Ladder.descent(0.1 / 6), seed=0)
    info = run.step((x,))
    made = by_hand.maker(x)
    judged = by_hand.judge(made.detach())
    kept = copy.deepcopy(by_hand.state_dict())
    of_judge = torch.autograd.grad(judged.square().sum(1).mean(), list(by_hand.judge.parameters()))
    fooled = -by_hand.judge(made).sin().mean()
    of_maker = torch.autograd.grad(fooled, list(by_hand.maker.parameters()))
    by_hand.load_state_dict(kept)  # the second look of the judge leaves no trace in its statistics
    with torch.no_grad():
        parameters = [*by_hand.maker.parameters(), *by_hand.judge.parameters()]
        for parameter, gradient in zip(parameters, of_maker + of_judge, strict=True):
            parameter -= 0.1 * gradient
    for name, tensor in run.module_at().state_dict().items():
        assert torch.allclose(tensor, by_hand.state_dict()[name], atol=1e-6), name
    assert torch.allclose(info.energy[0, 0], judged.square().sum().double())


# What torch does not like about the first batch


X, Y = classes(8)


class TwoHeads(nn.Module):
    """Logits and features, as a tuple or under names."""

    def __init__(self, form=tuple):
        super().__init__()
        self.linear, self.form = linear(), form

    def forward(self, x):
        return (self.linear(x), x) if self.form is tuple else {"logits": self.linear(x)}


class TwoNumbers(nn.Module):
    """Mean and log_sigma of shape (n, d), as a tuple or under names."""

    def __init__(self, form=tuple, d=1):
        super().__init__()
        self.linear, self.form = nn.Linear(X.shape[1], 2 * d), form

    def forward(self, x):
        parts = self.linear(x).chunk(2, dim=1)
        return parts if self.form is tuple else dict(zip(("mean", "log_sigma"), parts, strict=True))


def normal_loss(output, target):
    mean, log_sigma = output.values() if isinstance(output, dict) else output
    return -torch.distributions.Normal(mean, log_sigma.exp()).log_prob(target)


@pytest.mark.parametrize("form", [tuple, dict])
def test_losses_of_several_numbers_per_example_of_parts_add_up(form):
    """As large as the outputs is no broadcast, and neither is a loss of a target that is larger."""
    model, energy = TwoNumbers(form, d=3), tr.PosteriorEnergy(normal_loss, n_data=N)
    losses = energy.per_example(model, (X, torch.randn(8, 3)))
    assert losses.shape == (8,)
    one = tr.PosteriorEnergy(lambda o, t: normal_loss(o, t).mean(1, keepdim=True), n_data=N)
    assert one.per_example(model, (X, torch.randn(8, 3))).shape == (8,)
    spread = tr.PosteriorEnergy(normal_loss, n_data=N)
    assert spread.per_example(TwoNumbers(form), (X, torch.randn(8, 5))).shape == (8,)
    whole = torch.compile(energy.losses, backend="eager", fullgraph=True)  # as a captured step does
    batch = (X, torch.randn(8, 3))
    assert torch.equal(whole(model, batch)[0], energy.losses(model, batch)[0])


def test_a_loss_may_be_made_for_such_outputs_and_other_errors_are_its_own():
    def first(output, target):
        return F.cross_entropy(output[0], target, reduction="none")

    model, energy = TwoHeads(), tr.PosteriorEnergy(first, n_data=N)
    expected = F.cross_entropy(model.linear(X), Y, reduction="none")
    whole = torch.compile(energy.losses, backend="eager", fullgraph=True)  # as a captured step does
    assert torch.equal(whole(model, (X, Y))[0], expected)
    with pytest.raises(IndexError):
        tr.PosteriorEnergy(lambda o, t: o[2], n_data=N).per_example(model, (X, Y))


def by(loss=F.cross_entropy, *, n_data=N, **options):
    return tr.PosteriorEnergy(loss, n_data=n_data, **options)


def in_pairs(module, batch):
    return module(batch[0]).sum(1).view(-1, 2).sum(1)


CE, REDUCED, COLUMN = by(), by(lambda o, t: F.cross_entropy(o, t)), torch.randn(8)
NO_NUMBER = by(prior=lambda p: p["weight"].square().sum().reshape(1))
UNFIT = {
    "float labels": (linear, CE, (X, Y.float()), r"float32, shape \(8,\), 0 to 2.*labels.long"),
    "a column of labels": (linear, CE, (X, Y[:, None]), r"shape \(8, 1\).*labels.squeeze\(1\)"),
    "too few labels": (linear, CE, (X, Y[:5]), r"shape \(8, 3\).*shape \(5,\)"),
    "labels from 1": (linear, CE, (X, Y + 1), r"from 0 to 2, .* has 3 outputs.*1 to 3"),
    "negative labels": (linear, by(nn.CrossEntropyLoss()), (X, Y - 1), r"from 0 to 2.*-1 to 1"),
    "binary": (linear, by(nn.BCELoss()), (X, F.one_hot(Y)), r"labels.to\(torch.float32\)"),
    "float64": (linear, CE, (X.double(), Y), r"float32, but .* of float64.*x.to\(torch.float32\)"),
    "a dict of float64": (linear, CE, {"target": Y, "input": X.double()}, "inputs are of float64"),
    "a dict without target": (linear, CE, {"a": X, "label": Y}, r"'a', 'label'.*target_key="),
    "too many features": (linear, CE, (torch.zeros(8, 99), Y), r"takes \d+ features, .*\(8, 99\)"),
    "no labels": (linear, CE, X, "one tensor and no labels"),
    # (n, 1) against (n,) is (n, n) for torch, and every number would be wrong.
    "spread": (lambda: nn.Linear(4, 1), by(F.mse_loss), (X, COLUMN), r"\(8, 8\) for outputs"),
    "a reduced loss": (linear, REDUCED, (X, Y), r'one value per example.*reduction="none"'),
    "pairs": (linear, tr.PosteriorEnergy.of(in_pairs, n_data=N), (X, Y), "gave 4 values for .* 8 "),
    "a prior of no number": (linear, NO_NUMBER, (X, Y), "prior"),
    "too little data": (linear, by(n_data=5), (X, Y), "8 examples is larger than n_data=5"),
    "no examples": (linear, CE, (X[:0], Y[:0]), "no examples"),
    "a tuple": (TwoHeads, CE, (X, Y), r"returned a tuple .*lambda output, target: .*output\[0\]"),
    "a dict": (lambda: TwoHeads(dict), CE, (X, Y), r"returned a dict .*output\['logits'\]"),
    "a loss of three": (TwoHeads, by(nn.GaussianNLLLoss()), (X, Y), "lambda output, target: "),
    "parts spread": (
        TwoNumbers,
        by(normal_loss),
        (X, COLUMN),
        r"\(8, 8\) .*\(8, 1\), \(8, 1\) and",
    ),
    "names spread": (
        lambda: TwoNumbers(dict),
        by(normal_loss),
        (X, COLUMN),
        r"\(8, 8\) for outputs",
    ),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_explained_before_anything_moves(case):
    model, energy, batch, words = UNFIT[case]
    run = make_run(model, energy)
    before = run.state_dict()
    for _ in range(2):
        with pytest.raises(TargetError, match=words):
            list(run.advance(3, [batch]))
    assert same(run.state_dict(), before)


def test_labels_that_are_ignored_are_no_classes():
    for loss, ignored in ((F.cross_entropy, -100), (nn.CrossEntropyLoss(ignore_index=255), 255)):
        labels = Y.clone()
        labels[2] = ignored
        info = make_run(linear, tr.PosteriorEnergy(loss, n_data=N_DATA)).step((X, labels))
        assert bool(info.energy.isfinite().all())


def test_a_dataset_is_no_loader():
    dataset = TensorDataset(*classes(N_DATA))
    with pytest.raises(InvalidArgumentError, match=r"got a TensorDataset.*dataset.tensors"):
        list(make_run().advance(1, dataset))
    with pytest.raises(InvalidArgumentError, match=r"got a TensorDataset.*shuffle=False"):
        tr.PosteriorAverage(dataset)
    list(make_run().advance(1, DataLoader(dataset, 4)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_device_that_is_not_there(device):
    with pytest.raises(InvalidArgumentError, match="torch finds no CUDA device"):
        tr.ModuleEnsemble(linear, cross_entropy(), device=device)
