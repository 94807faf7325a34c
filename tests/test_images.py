"""Image recipes from the command line to result.json, on a small set of coloured squares."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import pytest
import torch

from command import refused, run_command
from modules import same
from torchrex.experiments import Run, RunOptions
from torchrex.experiments import images as made
from torchrex.experiments.images import ImageConfig
from torchrex.experiments.networks import curves_of, metrics_of
from torchrex.experiments.recipes import get_recipe, recipes
from torchrex.posterior import PosteriorAverage
from torchrex.runs.config import override
from torchrex.vision.augment import CIFAR_MEAN, CIFAR_STD
from torchrex.vision.data import ImageSet, load_images, save_images
from written_runs import outcome

# Two steps an epoch. The first epoch of four gives no draw, and the correction is turned off so
# that some swaps are made.
SHORT = [
    *("net=resnet8", "epochs=4", "subset=512", "test_subset=50", "batch_size=32"),
    *("average_after=125", "correction_factor=inf"),
]
NAMES = ["accuracy", "nll", "brier", "ece", "best_accuracy"]
MSGD = "clean/cifar10-resnet20-msgd"


def coloured(n, n_classes, seed):
    """Images of one colour per class, in noise."""
    of_classes = torch.Generator().manual_seed(1000 + n_classes)
    colours = torch.randint(40, 216, (n_classes, 3), generator=of_classes)
    labels, generator = torch.arange(n) % n_classes, torch.Generator().manual_seed(seed)
    noise = torch.randint(-40, 40, (n, 32, 32, 3), generator=generator)
    return (colours[labels][:, None, None] + noise).to(torch.uint8), labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both data sets, with fewer images than the real ones, in a cache of their own."""
    folder = tmp_path_factory.mktemp("data")
    save_images(ImageSet("cifar10", 10, *coloured(800, 10, 0), *coloured(100, 10, 1)), folder)
    train, test = coloured(600, 100, 2), coloured(100, 100, 3)
    save_images(ImageSet("cifar100", 100, *train, *test, train[1] // 5, test[1] // 5), folder)
    return folder


@pytest.fixture
def cli(monkeypatch, capsys, folder):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("TORCHREX_DATA", str(folder))
    return partial(run_command, monkeypatch, capsys)


def short(recipe, *more):
    return override(get_recipe(recipe), [*SHORT, *more])


@pytest.fixture
def trained(monkeypatch, folder):
    """Trains a config by itself, without a run folder."""
    monkeypatch.setenv("TORCHREX_DATA", str(folder))

    def call(config, seed=0):
        how, (one,) = config.execute([Run(config, seed)], RunOptions(device="cpu"))
        assert how.status == "finished"
        return one

    return call


# Complete runs


@pytest.mark.parametrize(
    ("recipe", "more", "stops"),
    [
        ("icml2020/cifar10-resnet20", ["epochs=2", "average_after=0"], 1),
        pytest.param("icml2020/cifar10-resnet20", [], 5, marks=pytest.mark.slow),
        pytest.param(
            "clean/cifar10-resnet20",
            ["net=resnet20", "epochs=2", "average_after=0"],
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stopped_and_resumed_equals_never_stopped(cli, tmp_path, caplog, recipe, more, stops):
    """Bit for bit, with repeated energies; a budget too short for an epoch is reported."""
    settings, words = [*SHORT, *more], ["run", recipe, "--device", "cpu"]
    code, _, err = cli(*words, "--out", tmp_path / "whole", settings=settings)
    assert code == 0, err
    whole, parts = (tmp_path / name / recipe / "seed=0" for name in ("whole", "parts"))
    files = ["checkpoints", "config.json", "result.json", "trace.safetensors"]
    assert sorted(path.name for path in whole.iterdir()) == files
    words += ["--out", tmp_path / "parts"]
    for k in range(stops):  # a budget that is over at once lets one step be done
        caplog.clear()
        resume = ["--resume"] if k else []
        code, out, _ = cli(*words, *resume, "--budget", "0.001s", settings=settings)
        assert (code, "the budget is used up" in out) == (75, True)
        result = json.loads((parts / "result.json").read_text())
        assert (result["status"], result["steps_done"]) == ("paused", k + 1)
        assert "after 1 of the 2 steps of an epoch" in caplog.text
    assert cli(*words, "--resume", settings=settings)[0] == 0
    one, other = outcome(whole), outcome(parts)
    assert same(one, other)
    assert torch.equal(one["trace"]["steps"], torch.arange(len(one["trace"]["steps"])))
    if stops == 5:
        assert one["swaps"][0]["accepted"] > 0, "nothing to be lost at a stop"
        changes = one["trace"]["noise_variance"].diff(dim=0) != 0
        assert int(changes.sum()) == 3  # before steps 2, 4 and 6


def test_another_data_set_and_held_out_images(cli, tmp_path):
    recipe, more = "clean/cifar100-resnet20-msgd", ["validation=100", "subset=256"]
    code, _, err = cli("run", recipe, "--out", tmp_path, settings=[*SHORT, *more])
    assert code == 0, err
    one = outcome(tmp_path / recipe / "seed=0")
    assert one["trace"]["probabilities"].shape == (50, 100)
    assert one["swaps"] == []


# Numbers


def test_metrics_and_curves_of_a_pair(trained):
    config = short("clean/cifar10-resnet20")
    one = trained(config)
    assert (config.n_steps, config.steps_per_epoch, config.intervals.burn_in) == (8, 2, 2)
    averages = [prefix + kind for prefix in ("", "pooled_") for kind in ("", "logits_", "single_")]
    expected = {f"{kind}{name}" for kind in averages for name in NAMES}
    assert set(one.metrics) == {"n_draws", "mutual_information", "seconds_per_epoch", *expected}
    assert all(isinstance(value, int | float) for value in one.metrics.values())
    assert one.metrics["n_draws"] == 3  # at the ends of epochs 2, 3 and 4
    trace, curves = one.trace.tensors(), one.curves
    assert curves["epoch"] == [0, 1, 2, 3]
    assert curves["draw_epoch"] == [2, 3, 4]
    for prefix in ("", "pooled_"):
        for of, kind in (("probabilities", ""), ("logits", "logits_"), ("last", "single_")):
            accuracies, name = curves[f"{prefix}{of}_accuracy"], f"{prefix}{kind}"
            assert len(accuracies) == 3
            assert accuracies[-1] == pytest.approx(one.metrics[f"{name}accuracy"])
            assert max(accuracies) == pytest.approx(one.metrics[f"{name}best_accuracy"])
    assert [len(curves[name]) for name in ("energy", "noise_variance", "correction")] == [2, 1, 1]
    for rung in (0, 1):
        means = trace["energy"][:, rung].view(4, 2).mean(1).tolist()
        assert curves["energy"][rung] == pytest.approx(means, rel=1e-4)
        assert means[-1] < means[0], "nothing was learnt"
    variances = trace["noise_variance"][:, 0].view(4, 2).mean(1).tolist()
    assert curves["noise_variance"][0] == pytest.approx(variances, rel=1e-4)
    assert curves["correction"] == [[0.0] * 4]  # F is infinite
    assert len(curves["swap_epochs"]) == int(trace["accepted"].sum())
    assert one.tensors["probabilities"].shape == (50, 10)
    assert float(one.tensors["probabilities"].sum(1).sub(1.0).abs().max()) < 1e-9


def test_metrics_are_of_what_they_say():
    """Two known draws of two rungs on 40 examples, the first draw the better one."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 10
    right = 3.0 * torch.nn.functional.one_hot(y, 10)
    logits = [
        [right * weight + 2.0 * torch.randn(40, 10, generator=generator) for weight in (1.0, 0.7)]
        for _ in range(2)
    ]
    logits[1] = [each - 0.5 * right for each in logits[1]]

    class Known:
        n_steps, n_rungs = 0, 2

        def predict(self, batch, rung=0):
            return logits[self.n_steps - 1][rung]

    run, average = Known(), PosteriorAverage([(torch.zeros(40, 1), y)], rungs=(0, 1), history=True)
    for run.n_steps in (1, 2):
        average.update(run)
    metrics = metrics_of(short("clean/cifar10-resnet20"), average)

    def nll(probabilities):
        return float(-probabilities.gather(1, y[:, None]).log().mean())

    def accuracy(probabilities):
        return float((probabilities.argmax(1) == y).double().mean())

    table = torch.stack([torch.stack(each) for each in logits]).double()  # (draws, rungs, n, k)
    for prefix, chosen in (("", table[:, :1]), ("pooled_", table)):
        of = {"": chosen.softmax(-1).mean((0, 1)), "logits_": chosen.mean((0, 1)).softmax(-1)}
        of["single_"] = chosen[-1].softmax(-1).mean(0)
        first = chosen[0].softmax(-1).mean(0)
        before = {"": first, "logits_": chosen[0].mean(0), "single_": first}
        for kind, probabilities in of.items():
            name, now = f"{prefix}{kind}", accuracy(probabilities)
            assert metrics[f"{name}nll"] == pytest.approx(nll(probabilities), rel=1e-5)
            assert metrics[f"{name}accuracy"] == pytest.approx(now, abs=1e-6)
            best = max(now, accuracy(before[kind]))
            assert metrics[f"{name}best_accuracy"] == pytest.approx(best, abs=1e-6)
    different = {round(value, 6) for name, value in metrics.items() if name.endswith("nll")}
    assert len(different) == 6, "two averages are the same"
    assert metrics["single_best_accuracy"] > metrics["single_accuracy"] + 0.1
    of_draws = table[:, 0].softmax(-1)
    entropy = torch.special.entr(of_draws).sum(-1).mean(0)
    information = torch.special.entr(of_draws.mean(0)).sum(-1) - entropy
    assert metrics["mutual_information"] == pytest.approx(float(information.mean()))


def test_curves_take_the_mean_of_the_steps_that_were_kept():
    """31 steps an epoch keep every second one: 16 in the first epoch, 15 in the second."""
    config = dataclasses.replace(short(MSGD), subset=31 * 256, epochs=2)
    steps, none = torch.arange(0, 62, 2), torch.zeros(31, 0)

    class NoDraws:
        def history(self, rung):
            accuracies = dict.fromkeys(
                ("probabilities", "logits", "last"), torch.tensor([0.123456])
            )
            return {"step": torch.tensor([62]), **accuracies}

    energy = torch.where(steps < 31, 1.0, 3.0) + steps
    trace = {"steps": steps, "energy": energy[:, None], "swap_steps": steps[:0]}
    trace |= {"noise_variance": none, "correction": none}
    curves = curves_of(config, trace, NoDraws())
    assert curves["energy"] == [[1.0 + 15.0, 3.0 + 46.0]]
    assert (curves["noise_variance"], curves["swap_epochs"], curves["draw_epoch"]) == ([], [], [2])
    assert curves["last_accuracy"] == [0.12346]
    many = curves_of(config, {**trace, "swap_steps": torch.arange(12_000)}, NoDraws())
    assert len(many["swap_epochs"]) == 10_000  # a result.json is read by people too


def test_msgd_is_the_same_in_both_families(trained):
    """But for what its energy is called: that of `clean` has the prior in it."""
    one, other = (trained(short(MSGD.replace("clean", family))) for family in ("clean", "icml2020"))
    assert same(one.tensors, other.tensors)
    timed = {"seconds_per_epoch": 0.0}
    assert one.metrics | timed == other.metrics | timed
    assert {**one.curves, "energy": 0} == {**other.curves, "energy": 0}
    prior = one.trace.tensors()["energy"] - other.trace.tensors()["energy"]
    module = short(MSGD).run(0, torch.device("cpu")).module_at(0)
    squares = sum(float(each.detach().double().square().sum()) for each in module.parameters())
    assert float(prior[0]) == pytest.approx(0.5 * 5e-4 * 512 * squares, rel=1e-5)


@pytest.mark.parametrize("family", ["clean", pytest.param("icml2020", marks=pytest.mark.slow)])
def test_sghmc_is_rung_0_of_the_independent_pair(trained, family):
    configs = [short(f"{family}/cifar10-resnet20-{end}") for end in ("sghmc", "independent")]
    single, pair = (trained(config) for config in configs)
    energies, of_pair = single.trace.tensors()["energy"], pair.trace.tensors()["energy"]
    assert configs[0].same_run_as == configs[1].recipe
    assert torch.equal(energies[:, 0], of_pair[:, 0])
    assert same(single.tensors, pair.tensors)
    del single.metrics["seconds_per_epoch"]
    assert single.metrics.items() <= pair.metrics.items()
    assert not any(name.startswith("pooled") for name in {**single.metrics, **single.curves})
    assert int(pair.trace.tensors()["proposed"].sum()) == 0
    assert not torch.equal(*of_pair.unbind(1))


def as_bytes(images):
    return {image.contiguous().numpy().tobytes() for image in images}


def test_what_is_held_out_is_not_trained_on(monkeypatch, folder):
    monkeypatch.setenv("TORCHREX_DATA", str(folder))
    settings = ["validation=100", "subset=600", "test_subset=60"]
    config, cpu = override(get_recipe("clean/cifar10-resnet20"), settings), torch.device("cpu")
    loader, held_out, extra, _ = config.batches(0, cpu)
    x, y = loader._tensors.values()
    assert torch.bincount(y).tolist() == [60] * 10
    assert torch.bincount(torch.cat([labels for _, labels in held_out])).tolist() == [6] * 10
    everything, mean, std = load_images("cifar10"), *map(torch.tensor, (CIFAR_MEAN, CIFAR_STD))

    def evaluated(test):
        pixels = torch.cat([images.permute(0, 2, 3, 1) * std + mean for images, _ in test])
        return as_bytes((pixels * 255).round().byte())

    assert evaluated(held_out) <= as_bytes(everything.train_images) - as_bytes(x)
    assert same(loader._tensors, extra._tensors)
    assert not torch.equal(next(iter(loader))[1], next(iter(extra))[1])  # in another order
    of_test = dataclasses.replace(config, validation=0).batches(0, cpu).test
    assert evaluated(of_test) <= as_bytes(everything.test_images)


# Bad input


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("net=resnet21", "no network is called 'resnet21'; did you mean 'resnet"),
        ("data=svhn", "'data' must be one of cifar10, cifar100, got 'svhn'"),
        ("batch_size=513", "'batch_size' must be between 1 and the 512 training images"),
        ("epochs=0", "'epochs' must be at least 1, got 0"),
        ("subset=0", "'subset' must be between 1 and 50000, or none, got 0"),
        ("subset=50001", "'subset' must be between 1 and 50000, or none"),
        ("validation=50000", "'validation' must be at least 0 and less than 50000"),
        ("temperature=0", "'temperature' must be positive"),
        ("hot_temperature=1", "'hot_temperature' must be above 1"),
        ("average_after=500", "'average_after' must be at least 0 and less than 500"),
        ("swaps_after=inf", "'swaps_after' must be at least 0 and finite, got inf"),
        ("rest_after_swap=-1", "'rest_after_swap' must be at least 0 and finite, got -1"),
        ("method=msgd", "setting 'method' belongs to the recipe"),
        ("variance=free", "'variance' must be one of paired, repeated"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_2(cli, tmp_path, setting, expected):
    words = ("run", "clean/cifar10-resnet20", "--out", tmp_path)
    refused(cli(*words, settings=[*SHORT, setting]), expected)
    assert not list(tmp_path.iterdir())


def test_data_that_are_not_there_or_not_complete(cli, tmp_path, monkeypatch):
    """The cache has 800 images: without a subset a recipe would train on the wrong number."""
    words = ["run", "clean/cifar10-resnet20", "--device", "cpu", "--out", tmp_path / "runs"]
    incomplete = "800 training images instead of 50,000; import or fetch it again"
    refused(cli(*words, settings=["net=resnet8"]), incomplete)
    monkeypatch.setenv("TORCHREX_DATA", str(tmp_path / "nothing"))
    refused(cli(*words, settings=SHORT), "torchrex data fetch cifar10")
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("epochs", "warned"), [(4, False), (200_000, True)])
def test_days_on_a_cpu_are_reported(cli, tmp_path, caplog, epochs, warned):
    words = ["run", MSGD, "--device", "cpu", "--budget", "0.001s", "--out", tmp_path]
    code, _, err = cli(*words, settings=[*SHORT, f"epochs={epochs}"])
    assert code == 75, err
    assert ("is made for a GPU" in caplog.text) == warned


# Recipes


def test_every_cell_of_the_tables_has_its_recipes():
    """Written out the long way, independently of how they are made."""
    nets = ("resnet20", "resnet32", "resnet56", "wrn-16-8", "wrn-28-10")
    expected = set()
    for family in ("icml2020", "clean"):
        for data in ("cifar10", "cifar100"):
            for end in ("", "-msgd", "-sghmc", "-independent"):
                expected |= {f"{family}/{data}-{net}{end}" for net in nets}
                expected.add(f"{family}/{data}-resnet20-batch1024{end}")
    factors = {"1e5": 1e5, "2e5": 2e5, "4e5": 4e5, "5e5": 5e5, "1e6": 1e6}
    plain = {f"icml2020/{data}-resnet20" for data in ("cifar10", "cifar100")}
    figure2 = {f"{name}-F{f0}": factor for name in plain for f0, factor in factors.items()}
    everything = made.image_recipes()
    assert set(everything) == expected | set(figure2)
    assert len(everything) == 80 + 16 + 10
    for name, config in everything.items():
        assert (config.recipe, recipes()[name]) == (name, config)
    for name, factor in figure2.items():
        usual = everything[name.rsplit("-", 1)[0]]
        assert everything[name].correction_factor == factor / 2
        changed = {"recipe": usual.recipe, "correction_factor": 1.5e5}
        assert dataclasses.replace(everything[name], **changed) == usual
    clean = {name.replace("icml2020", "clean") for name in plain}
    assert set(made.figure2_recipes()) == {*figure2, *plain, *clean}
    assert made.figure2_recipes().items() <= everything.items()  # one name, one config
    for config in made.table2_recipes().values():
        assert (config.batch_size, config.n_steps) == (1024, 97_500)
    assert set(made.PAPER_TABLE1) == {(data, net) for data in made.DATA for net in nets}


def test_every_recipe_is_what_its_name_says():
    for name, config in made.image_recipes().items():
        config.check()
        assert name.split("/")[1].startswith(f"{config.data}-{config.net}")
        end = name.rsplit("-", 1)[1]
        assert config.method == (end if end in ("msgd", "sghmc", "independent") else "resghmc")
        assert config.n_rungs == (2 if config.method in ("resghmc", "independent") else 1)
        assert config.ladder().n_rungs == config.n_rungs
        assert config.n_steps == 500 * 195
        assert config.autocast(torch.device("cpu")) is None
        assert config.autocast(torch.device("cuda")) == torch.bfloat16


def test_the_families_differ_where_they_say():
    expected = {
        "factor_per_swap": (1.0, 0.7),
        "correction_factor": (5e4, 1.5e5),
        "noise_follows_lr": (True, False),
        "prior_in_swaps": (True, False),
        "momentum_at_swap": ("rescale", "keep"),
        "variance": ("paired", "repeated"),
    }
    for name, clean in made.image_recipes().items():
        if name.startswith("clean/"):
            theirs = made.image_recipes()[name.replace("clean/", "icml2020/")]
            rests = {"rest_after_swap": (0.0, 20.0)} if clean.net.startswith("wrn") else {}
            names = [field.name for field in dataclasses.fields(ImageConfig)]
            both = {name: (getattr(clean, name), getattr(theirs, name)) for name in names}
            differ = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
            del differ["recipe"]
            assert differ == {**expected, **rests}


def test_what_runs_that_train_together_must_share():
    """Whatever shapes a batch or the rhythm of a run, and nothing else."""
    config = get_recipe("clean/cifar10-resnet20")
    shared = {"data": "cifar100", "net": "resnet8", "epochs": 3, "batch_size": 32, "validation": 5}
    shared |= {"subset": 600, "test_subset": 50, "data_seed": 1, "precision": "float32"}
    shared |= {"deterministic": False, "checkpoint_every": 2}
    for name, value in shared.items():
        other = dataclasses.replace(config, **{name: value})
        assert other.batch_key(0) != config.batch_key(0), name
    other = get_recipe("icml2020/cifar10-resnet20-msgd")
    own = {field.name for field in dataclasses.fields(ImageConfig)} - set(shared)
    assert dataclasses.replace(config, **{name: getattr(other, name) for name in own}) == other
    assert other.batch_key(0) == config.batch_key(1)
