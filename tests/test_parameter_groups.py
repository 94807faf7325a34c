"""Learning rates and priors by parameter: the law, and what `from_sgd` makes of torch's groups.
Rows of embeddings that stay where they are; hooks.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from modules import (
    N_CLASSES,
    N_DATA,
    batches,
    classes,
    cross_entropy,
    flat_energy,
    linear,
    make_run,
    mlp,
    same,
)
from torchrex.errors import InvalidArgumentError
from torchrex.rng import Streams

# The law: pairs (a, b) of numbers with the energy 0.9 (a + b)^2 / 2 + 2 a^2 / 2, where b has no
# prior and a lr of its own

PAIRS, COUPLING, PRECISION, FACTOR = 20_000, 0.9, 2.0, 2.5
STIFFNESS = np.array([[COUPLING + PRECISION, COUPLING], [COUPLING, COUPLING]])


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Parameter(torch.zeros(PAIRS, dtype=torch.float64))
        self.head = nn.Parameter(torch.zeros(PAIRS, dtype=torch.float64))

    def forward(self, x):
        return 0.5 * COUPLING * (self.body + self.head).square().sum() * x


@dataclass(frozen=True)
class FactorInTheDriftAlone(tr.SGHMC):
    """The mutant: its noise is that of the lr without the factor."""

    def move(self, position, state, gradient, noise, *, lr, temperature, step):
        base = (lr[:, :1] / lr).sqrt()  # the body comes first and has the factor 1
        rates = {"lr": lr, "temperature": temperature}
        return super().move(position, state, gradient, noise * base, **rates, step=step)


def moments(sampler, lrs, temperatures):
    """Squares and products of the pairs of every rung, after 150 steps from 0."""
    energy = tr.PosteriorEnergy(
        lambda output: output / 5, n_data=5, prior=tr.GaussianPrior(PRECISION, groups={"head": 0.0})
    )
    run = make_run(
        Pairs, energy, tr.Ladder(temperatures, lrs), seed=11, sampler=sampler,
        lr_factors={"head": FACTOR}, noise=tr.KnownVariance(1e9),
    )  # fmt: skip
    for info in run.advance(150, [torch.ones(2, dtype=torch.float64)]):
        assert not info.accepted.any()
    for rung in range(run.n_rungs):
        parts = run.ensemble.layout.views(run.ensemble.position[rung])
        a, b = parts["body"], parts["head"]
        yield a * a, b * b, a * b


def law(lr, temperature, friction):
    """Of the recursion: Var a, Var b, Cov, by the discrete Lyapunov equation of (x, v)."""
    factor = np.diag([1.0, FACTOR])
    force, kept = -lr * factor @ STIFFNESS, (1 - friction) * np.eye(2)
    turn = np.block([[np.eye(2) + force, kept], [force, kept]])
    kick = np.kron(np.ones((2, 2)), 2.0 * friction * lr * temperature * factor)
    covariance = scipy.linalg.solve_discrete_lyapunov(turn, kick)
    return covariance[0, 0], covariance[1, 1], covariance[0, 1]


@pytest.mark.parametrize("friction", [1.0, 0.3])
def test_the_law_of_the_discrete_chain(friction):
    """SGLD is SGHMC with friction 1. A factor of the lr is a preconditioner: right in drift and
    noise."""
    lrs, temperatures = (0.1, 0.15), (0.5, 2.0)
    sampler = tr.SGLD() if friction == 1.0 else tr.SGHMC(friction)
    for rung, seen in enumerate(moments(sampler, lrs, temperatures)):
        for values, expected in zip(
            seen, law(lrs[rung], temperatures[rung], friction), strict=True
        ):
            assert_mean_is(values, expected)
    mutant = next(moments(FactorInTheDriftAlone(friction), lrs, temperatures))
    for values, expected in zip(mutant, law(lrs[0], temperatures[0], friction), strict=True):
        assert_mean_is_not(values, expected)


def test_as_lr_tends_to_0_the_factor_is_forgotten():
    exact = np.linalg.inv(STIFFNESS)
    assert law(1e-6, 1.0, 0.3) == pytest.approx((exact[0, 0], exact[1, 1], exact[0, 1]), rel=1e-5)


@pytest.mark.parametrize("policy", ["rescale", "refresh"])
@pytest.mark.parametrize("swap_batch", [None, 8])
def test_momenta_at_a_swap(policy, swap_batch):
    """Rescaled by a ratio that knows no factor; refreshed with the deviation sqrt(lr factor tau) of
    each number. Then the move, whose numbers are known as well."""
    ladder, friction, seed = tr.Ladder((0.5, 1.0, 2.0), (0.01, 0.02, 0.04)), 0.3, 8
    run = make_run(
        mlp, flat_energy(), ladder, sampler=tr.SGHMC(friction), momentum=policy, seed=seed,
        lr_factors={"4.": 3.0, "0.bias": 0.25}, swap_batch=swap_batch, noise=None,
    )  # fmt: skip
    streams, layout = Streams(seed), run.ensemble.layout
    factor = torch.ones(layout.size)
    for name, view in layout.views(factor).items():
        view.fill_(3.0 if name.startswith("4.") else 0.25 if name == "0.bias" else 1.0)
    assert len(factor.unique()) == 3
    (velocity,) = run.ensemble.sampler_state
    product = torch.tensor(ladder.lrs) * torch.tensor(ladder.temperatures)
    for batch in batches(5):
        stood, before = run.state.rung_of[:, 0], velocity.clone()
        if swap_batch:
            run.swap([batch])
        run.step(batch)
        stands = run.state.rung_of[:, 0]
        assert bool((stood != stands).any())
        for replica in range(3):
            names = ("refresh", "move") if policy == "refresh" else ("move",)
            *fresh, kick = (
                torch.empty(layout.size).normal_(generator=streams[f"{name}.{replica}"])
                for name in names
            )
            rung, v = stands[replica], before[replica]
            if stood[replica] != rung:
                ratio = (product[rung] / product[stood[replica]]).sqrt()
                std = (2 / (2 - friction) * product[rung] * factor).sqrt()
                v = std * fresh[0] if fresh else ratio * v
            expected = (1 - friction) * v + (2 * friction * product[rung] * factor).sqrt() * kick
            assert torch.allclose(velocity[replica], expected, rtol=1e-5, atol=1e-6)


# From torch's parameter groups


def in_groups(module, optimizer=torch.optim.SGD, **settings):
    """Biases without decay, a head with another lr, and the rest."""
    named = dict(module.named_parameters())
    head = [p for name, p in named.items() if name.startswith("4.")]
    biases = [p for name, p in named.items() if "bias" in name and not name.startswith("4.")]
    rest = [p for name, p in named.items() if "bias" not in name and not name.startswith("4.")]
    return optimizer(
        [
            {"params": rest},
            {"params": biases, "weight_decay": 0.0},
            {"params": head, "lr": 0.5, "weight_decay": 2e-2},
        ],
        **{"lr": 0.2, "weight_decay": 5e-3, **settings},
    )


def test_converted_groups_take_the_steps_of_sgd():
    model = mlp(torch.float64)
    reference = copy.deepcopy(model)
    optimizer = in_groups(reference, momentum=0.9)
    scale = tr.from_sgd(optimizer, n_data=N_DATA, model=reference)
    assert (scale.lr, scale.friction) == (0.2 / N_DATA, 0.1)
    assert scale.lr_factors == {"4.weight": 2.5, "4.bias": 2.5}
    ensemble = tr.ModuleEnsemble(
        model, cross_entropy(prior=scale.prior), tr.SGHMC(scale.friction),
        lr_factors=scale.lr_factors,
    )  # fmt: skip
    run = tr.ModuleExchange(ensemble, tr.Ladder.descent(scale.lr))
    for x, y in batches(20, dtype=torch.float64):
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        run.step((x, y))
        for mine, theirs in zip(run.module_at().parameters(), reference.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=0.0, atol=1e-10)


def test_adam_start_has_the_lr_of_the_groups():
    run = make_run(
        lambda: mlp(torch.float64), cross_entropy(), tr.Ladder.descent(0.02 / N_DATA),
        sampler=tr.AdamStart(tr.SGHMC(0.5), 40, n_data=N_DATA),
        lr_factors={"4.weight": 2.5, "4.bias": 2.5}, seed=3,
    )  # fmt: skip
    module = run.module_at(0)
    settings = {"lr": 0.02, "weight_decay": 0.0, "betas": (0.5, 0.999)}
    optimizer = in_groups(module, torch.optim.Adam, **settings)
    optimizer.param_groups[2] |= {"lr": 0.05, "weight_decay": 0.0}
    for x, y in batches(40, dtype=torch.float64):
        run.step((x, y))
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    for ours, theirs in zip(run.module_at(0).parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_every_parameter_gets_what_its_group_has(seed):
    """Names that are parts of others, as 1.bias of 11.bias; any parameter in any group."""
    model, chosen = nn.Sequential(*[nn.Linear(2, 2) for _ in range(13)]), random.Random(seed)
    group_of = {name: chosen.randrange(3) for name, _ in model.named_parameters()}
    group_of["3.bias"] = 0
    lrs, decays = (0.1, 0.1, 0.3), (1e-3, 0.0, 1e-3)
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if group_of[name] == k],
            "lr": lrs[k],
            "weight_decay": decays[k],
        }
        for k in range(3)
    ]
    scale = tr.from_sgd(torch.optim.SGD(groups), n_data=100, model=model)
    run = make_run(model, tr.PosteriorEnergy(F.mse_loss, n_data=100, prior=scale.prior),
                   lr_factors=scale.lr_factors)  # fmt: skip
    rows = run.ensemble.rows
    factors, precisions = (rows.layout.views(row) for row in (rows.lr_factor, rows.precision))
    for name, k in group_of.items():
        assert factors[name].unique().tolist() == pytest.approx([lrs[k] / 0.1])
        assert precisions[name].unique().tolist() == pytest.approx([decays[k] * 100])


def without_lr(model):
    optimizer = in_groups(model)
    optimizer.param_groups[0]["lr"] = 0.0
    return optimizer


def two_momenta(model):
    optimizer = in_groups(model)
    optimizer.param_groups[1]["momentum"] = 0.5
    return optimizer


def after_steps(scheduler, n):
    """SGD after so many steps of a scheduler of torch."""
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.02, momentum=0.9)
    made = scheduler(optimizer)
    for _ in range(n):
        optimizer.step()
        made.step()
    return optimizer


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30, eta_min=2e-4)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=30)


def cyclic(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=10)


@pytest.mark.parametrize(
    ("scheduler", "n", "lr", "momentum", "words"),
    [
        (cosine, 0, 0.02, 0.9, ""),
        (cosine, 30, 0.02, 0.9, "initial_lr=0.02, lr=0.0002): from_sgd takes lr=0.02"),
        (one_cycle, 0, 0.002, 0.95, "max_lr=0.05, base_momentum=0.85, max_momentum=0.95"),
        (one_cycle, 5, 0.002, None, "initial_lr=0.002, lr=0.03"),
        (cyclic, 10, 0.01, 0.8, "base_momentum=0.8, max_momentum=0.9): from_sgd takes lr=0.01"),
    ],
)
def test_the_lr_is_that_a_scheduler_began_with(scheduler, n, lr, momentum, words, caplog):
    """After cosine annealing the lr that is left was 100 times too small, and nothing said so."""
    optimizer = after_steps(scheduler, n)
    momentum = optimizer.param_groups[0]["momentum"] if momentum is None else momentum
    scale = tr.from_sgd(optimizer, n_data=40)
    assert scale.lr == pytest.approx(lr / 40)
    assert scale.friction == pytest.approx(1 - momentum)
    assert words in caplog.text
    assert bool(words) == bool(caplog.text)
    if words:
        assert f"takes lr={lr:g} and momentum={momentum:g}" in caplog.text
    caplog.clear()
    chosen = tr.from_sgd(optimizer, n_data=40, lr=0.1, momentum=0.5)
    assert (chosen.lr, chosen.friction) == (0.1 / 40, 0.5)
    assert not caplog.text


def test_groups_have_the_lr_that_a_scheduler_began_with():
    model = mlp()
    optimizer = in_groups(model)
    before = tr.from_sgd(optimizer, n_data=40, model=model)
    scheduler = cosine(optimizer)
    for _ in range(30):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-4)
    assert tr.from_sgd(optimizer, n_data=40, model=model) == before


def one_left_out(model):
    optimizer = in_groups(model)
    optimizer.param_groups[1]["params"].pop()
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: tr.from_sgd(in_groups(m), n_data=40), "give the model"),
        (
            lambda m: tr.from_sgd({"optimizer": in_groups(m)}, n_data=40),
            r'got dict; .*\["optimizer"\]',
        ),
        (lambda m: tr.from_sgd([in_groups(m)], n_data=40), r"got list; .*\[0\]"),
        (lambda m: tr.from_sgd(in_groups(m), n_data=40, model=mlp()), "give the model"),
        (lambda m: tr.from_sgd(one_left_out(m), n_data=40, model=m), "exactly these"),
        (lambda m: tr.from_sgd(without_lr(m), n_data=40, model=m), "a lr above 0"),
        (lambda m: tr.from_sgd(two_momenta(m), n_data=40, model=m), "one momentum"),
        (lambda m: tr.from_sgd(in_groups(m), n_data=40, model=m, lr=0.1), "given again"),
        (lambda m: make_run(m, lr_factors={"head": 2.0}), "'head' of lr_factors fits no parameter"),
        (lambda m: make_run(m, lr_factors={"bias": -1.0}), "factor of the lr must be finite"),
        (lambda m: make_run(m, lr_factors={"bias": "2"}), "factor of the lr must be finite"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make(mlp())


def test_a_state_of_other_factors_is_refused_and_one_of_the_same_goes_on():
    whole, resumed, other = (
        make_run(linear, sampler=tr.SGHMC(0.2), lr_factors={"bias": factor})
        for factor in (2.0, 2.0, 3.0)
    )
    for k, batch in enumerate(batches(12)):
        info = whole.step(batch)
        if k > 4:
            assert same(resumed.step(batch), info)
        elif k == 4:
            resumed.load_state_dict(whole.state_dict())
    assert same(resumed.state_dict(), whole.state_dict())
    with pytest.raises(InvalidArgumentError, match="lr_factors"):
        other.load_state_dict(whole.state_dict())


# The row of `padding_idx`


class Words(nn.Module):
    """Two embeddings; padding is word 0 of one and word 2 of the other."""

    def __init__(self, tied=False):
        super().__init__()
        self.words = nn.Embedding(5, N_CLASSES, padding_idx=0)
        self.marks = nn.EmbeddingBag(6, N_CLASSES, padding_idx=2)
        with torch.no_grad():
            self.words.weight[0], self.marks.weight[2] = 0.7, -0.3
        self.out = nn.Linear(N_CLASSES, 5, bias=False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, words):
        return self.out(self.words(words).mean(1) + self.marks(words))


def sentences(n=16):
    words = torch.randint(5, (n, 4), generator=torch.Generator().manual_seed(0))
    return words, words[:, 0]


def words_run(sampler, tied=False, **options):
    return make_run(
        lambda: Words(tied), cross_entropy(prior=tr.GaussianPrior(2.0)), sampler=sampler,
        initial="independent", correction_factor=1e9, **options,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["rescale", "refresh"])
@pytest.mark.parametrize(
    "sampler",
    [tr.SGLD(), tr.SGHMC(0.2), tr.AdamStart(tr.SGHMC(0.2), 5, n_data=N_DATA)],
    ids=["SGLD", "SGHMC", "AdamStart"],
)
def test_a_padding_row_stays_where_it_is(sampler, policy):
    """In a run alone and side by side with another; all other numbers move."""
    options = {"momentum": policy, "clip": 20.0}
    options |= {"swap_start": 5} if isinstance(sampler, tr.AdamStart) else {}
    runs = [words_run(sampler, seed=seed, **options) for seed in (0, 0, 1)]
    before = [weights(run) for run in runs]
    list(runs[0].advance(20, [sentences()]))
    list(tr.SideBySide(runs[1:]).advance(20, [sentences()]))
    assert same(runs[0].state_dict(), runs[1].state_dict())
    assert bool(runs[0].exchange().pairs[0].accepted)
    for run, old in zip(runs, before, strict=True):
        for mine, its in zip(weights(run), old, strict=True):
            still = {name: (mine[name] == its[name]).nonzero().tolist() for name in mine}
            assert still.pop("words.weight") == [[0, column] for column in range(N_CLASSES)]
            assert still.pop("marks.weight") == [[2, column] for column in range(N_CLASSES)]
            assert still == {"out.weight": []}


def weights(run):
    return [
        {name: p.detach().clone() for name, p in module.named_parameters()}
        for module in run.ensemble.modules
    ]


def test_a_padding_row_that_another_layer_uses_moves():
    """It has a gradient there, with torch's own optimizers too."""
    run = words_run(tr.SGLD(), tied=True)
    (before, _), _ = weights(run), list(run.advance(3, [sentences()]))
    after = weights(run)[0]
    assert not (after["words.weight"] == before["words.weight"]).any()
    still = (after["marks.weight"] == before["marks.weight"]).any(1)
    assert still.nonzero().flatten().tolist() == [2]


# Hooks


def doubled(module):
    """With hooks on the gradients of its parameters: the weight's is doubled, the bias has none."""
    module.weight.register_hook(lambda gradient: 2.0 * gradient)
    module.bias.register_hook(torch.zeros_like)
    return module


@pytest.mark.parametrize("initial", ["given", "identical", "independent"])
def test_hooks_of_parameters_act_in_all_replicas(initial):
    """Three replicas at temperatures near 0, whose step is that of the hooks' gradient."""
    module = doubled(linear(torch.float64)) if initial == "given" else None
    run = make_run(
        module or (lambda: doubled(linear(torch.float64))),
        ladder=tr.Ladder((1e-30, 2e-30, 3e-30), (1e-3,) * 3),
        initial="independent" if initial == "independent" else "identical",
    )
    before = weights(run)
    x, y = classes(8, dtype=torch.float64)
    run.step((x, y))
    for old, new in zip(before, weights(run), strict=True):
        plain = {name: tensor.clone().requires_grad_() for name, tensor in old.items()}
        loss = N_DATA * F.cross_entropy(F.linear(x, plain["weight"], plain["bias"]), y)
        loss.backward()
        expected = old["weight"] - 2e-3 * plain["weight"].grad
        assert torch.allclose(new["weight"], expected, rtol=0, atol=1e-12)
        assert torch.allclose(new["bias"], old["bias"], rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("given", [True, False])
def test_hooks_of_modules_act_in_all_replicas(given):
    """Forward and backward ones; torch copies them with a module."""
    calls = []

    def hooked():
        module = linear()
        module.register_forward_pre_hook(lambda *_: calls.append("before"))
        module.register_forward_hook(lambda module, _, output: 3.0 * output)
        module.register_full_backward_hook(lambda *_: calls.append("backward"))
        return module

    run, (x, y) = make_run(hooked() if given else hooked), classes(8)
    run.step((x, y))  # the first one tries the batch too
    calls.clear()
    energy = run.energies((x, y)).total[:, 0]
    assert calls == ["before"] * 2
    for module, found in zip(weights(run), energy, strict=True):
        output = 3.0 * F.linear(x, module["weight"], module["bias"])
        assert float(found) == pytest.approx(N_DATA * float(F.cross_entropy(output, y)), rel=1e-5)
    calls.clear()
    run.step((x, y))
    assert sorted(calls) == ["backward"] * 2 + ["before"] * 2


def test_hooks_that_would_never_act_are_refused():
    def hooked():
        module = linear()
        module.bias.register_post_accumulate_grad_hook(lambda parameter: None)
        return module

    for model in (hooked, hooked()):
        with pytest.raises(InvalidArgumentError, match=r"bias has a hook .* use register_hook"):
            make_run(model)
