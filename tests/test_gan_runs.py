"""Semi-supervised GANs on the digits, from the command line to result.json."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import types
from functools import partial

import pytest
import torch
from PIL import Image
from torch import nn

import torchrex as tr
from command import refused, run_command, set_words
from modules import same
from torchrex.distributed import ProcessGroup, ReplicaMesh
from torchrex.errors import ConfigError, DataError
from torchrex.experiments import Run, RunOptions, gan, networks
from torchrex.experiments.digits import digit_images
from torchrex.experiments.gan import GanConfig, authors_score
from torchrex.experiments.networks import Kind
from torchrex.experiments.recipes import get_recipe, recipes
from torchrex.experiments.runner import run_recipe, run_together
from torchrex.runs.config import override
from torchrex.runs.folder import png
from torchrex.vision.bayesian_gan import BayesianGAN, Consistency, gan_losses, supervised_losses
from torchrex.vision.data import ImageSet, save_images
from torchrex.vision.feature_matching import Matching, MatchingDiscriminator
from written_runs import outcome

# Six steps of Adam, then six of SGHMC with swaps at nearly every one.
SHORT = [
    *("steps=12", "warm_start=6", "average_every=2", "checkpoint_every=4"),
    *("correction_factor=inf", "hot_temperature=1.0000001"),
]
SMALL = ["batch_size=20", "n_generators=2", "latents=10", "width=4"]
METHODS = ("", "-sghmc", "-noswaps", "-supervised")
CPU = torch.device("cpu")


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    return partial(run_command, monkeypatch, capsys, settings=(*SHORT, *SMALL))


def short(recipe="gan/digits-100", *more):
    return override(get_recipe(recipe), [*SHORT, *SMALL, *more])


def augmented(networks, method="resghmc"):
    """Digits by the networks of gan-augmented or of gan-matching."""
    more = {"method": method, "networks": networks, "augment": True, "width": 8}
    recipe = gan.gan_recipe_name("digits", 100, method)
    config = dataclasses.replace(short(), recipe=recipe, **more)
    config.check()
    return config


# Complete runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("whole")
    return outcome(run_recipe(short(), 0, out).path)


@pytest.mark.parametrize("stops", [2, pytest.param(9, marks=pytest.mark.slow)])
def test_stopped_and_resumed_equals_never_stopped(cli, tmp_path, whole, stops):
    """Bit for bit, also inside the warm start. A budget that is over lets one step be done."""
    words, folder = ["run", "gan/digits-100", "--out", tmp_path], tmp_path / "gan/digits-100/seed=0"
    for k in range(stops):
        code, out, err = cli(*words, *(["--resume"] if k else []), "--budget", "0.001s")
        assert code == 75, err
        assert "the budget is used up" in out
        result = json.loads((folder / "result.json").read_text())
        assert (result["status"], result["steps_done"]) == ("paused", k + 1)
        assert not (folder / "samples.png").exists()
    assert cli(*words, "--resume")[0] == 0
    files = ["checkpoints", "config.json", "result.json", "samples.png", "trace.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert same(outcome(folder), whole)
    assert whole["swaps"][0]["accepted"] > 1, "nothing to be lost at a stop"
    assert whole["metrics"]["n_draws"] == 3


KILLED = """
import os, signal, sys
from torchrex.checkpoint import Checkpoints
from torchrex.cli.main import main
save, saved = Checkpoints.save, []
def and_die(self, *args, **options):
    saved.append(save(self, *args, **options))
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Checkpoints.save = and_die
main()
"""


@pytest.mark.slow
def test_killed_and_resumed_equals_never_stopped(tmp_path, whole):
    """A process that is killed after a checkpoint, inside the warm start."""
    words = ["run", "gan/digits-100", "--out", str(tmp_path), *set_words((*SHORT, *SMALL))]
    command, environment = [sys.executable, "-c", KILLED], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    folder = tmp_path / "gan/digits-100/seed=0"
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step=*"))
    assert saved == ["step=000000000", "step=000000004"]
    run_recipe(short(), 0, tmp_path, resume=True)
    assert same(outcome(folder), whole)


def test_methods_that_train_together_are_the_methods_alone(tmp_path, whole):
    """All four on the same batches; the exchanging pair is the run that the other tests know."""
    runs = [(short(f"gan/digits-100{method}"), 0) for method in METHODS]
    together = [outcome(folder.path) for folder in run_together(runs, tmp_path / "together")]
    assert same(together[0], whole)
    for (config, seed), one in zip(runs[1:], together[1:], strict=True):
        alone = run_recipe(config, seed, tmp_path / "alone")
        assert same(outcome(alone.path), one), config.recipe
    assert together[3]["samples.png"] is None  # it has no generators
    assert len({repr(one["metrics"]) for one in together}) == 4
    assert [len(one["swaps"]) for one in together] == [1, 0, 1, 0]
    assert together[2]["swaps"][0]["accepted"] == 0
    other = outcome(run_recipe(short(), 1, tmp_path / "seed").path)
    assert not same(other["metrics"], whole["metrics"])  # the seed decides


@pytest.mark.parametrize("networks", ["paper", "matching"])
def test_the_stronger_families_from_end_to_end(tmp_path, networks):
    """Stopped twice, inside the warm start, and resumed equals never stopped, bit for bit; so do
    the methods together on equal batches.
    """
    pair = augmented(networks)
    first = outcome(run_recipe(pair, 0, tmp_path / "whole").path)
    for k in range(2):
        run_recipe(pair, 0, tmp_path / "stopped", resume=k > 0, budget=0.001)
    resumed = run_recipe(pair, 0, tmp_path / "stopped", resume=True)
    assert same(outcome(resumed.path), first)
    assert first["swaps"][0]["accepted"] > 1
    assert first["metrics"]["variety"] > 0
    methods = ("sghmc", "supervised", "consistency")
    runs = [(pair, 0), *((augmented(networks, method), 0) for method in methods)]
    together = [outcome(folder.path) for folder in run_together(runs, tmp_path / "together")]
    assert same(together[0], first)
    alone = outcome(run_recipe(*runs[3], tmp_path / "alone").path)
    assert same(together[3], alone)
    assert [one["samples.png"] is None for one in together] == [False, False, True, True]
    assert len({repr(one["trace"]["energy"].tolist()) for one in together}) == 4


def test_rungs_with_generators_of_their_own(tmp_path, whole):
    """Each rung's generators learn from their own discriminator. The cold one alone is SGHMC."""
    pair = outcome(run_recipe(short("gan/digits-100-noswaps", "generators=own"), 0, tmp_path).path)
    alone = outcome(run_recipe(short("gan/digits-100-sghmc"), 0, tmp_path).path)
    assert torch.equal(pair["trace"]["energy"][:, 0], alone["trace"]["energy"][:, 0])
    assert pair["samples.png"] == alone["samples.png"]
    assert pair["samples.png"] != whole["samples.png"]


def test_numbers_of_a_pair(whole):
    kinds = [f"{prefix}{kind}" for prefix in ("", "pooled_") for kind in ("", "single_")]
    each = ("accuracy", "nll", "brier", "ece", "best_accuracy")
    names = {f"{kind}{name}" for kind in kinds for name in each}
    names |= {"n_draws", "mutual_information", "paper_accuracy", "called_fake", "variety"}
    assert set(whole["metrics"]) == names | {"training_mode_accuracy"}
    assert whole["curves"]["draw_step"] == [8, 10, 12]
    assert whole["trace"]["probabilities"].shape == (500, 10)


def run_of(module):
    ensemble = types.SimpleNamespace(casting=lambda: contextlib.nullcontext())
    return types.SimpleNamespace(live_module_at=lambda rung: module, ensemble=ensemble)


def test_the_authors_score_leaves_out_what_is_called_fake():
    """Four images: right, wrong, called fake (its best real class is right), right."""
    logits = torch.tensor([[9.0, 0, 0], [0, 9.0, 0], [4.0, 0, 9.0], [0, 9.0, 0]])

    class Known(nn.Module):
        def forward(self, x):
            return logits[x.long()].roll(1, 1) if self.training else logits[x.long()]

    module = BayesianGAN(2, 0, size=8, channels=1, width=2)
    module.discriminator = Known()
    labels = torch.tensor([0, 0, 0, 1])
    test = [(torch.arange(4)[part], labels[part]) for part in (slice(0, 3), slice(3, 4))]
    # In training mode: wrong, fake, right, fake.
    expected = {"paper_accuracy": 2 / 3, "called_fake": 0.25, "training_mode_accuracy": 0.5}
    assert authors_score(run_of(module), test, 2) == expected
    assert module.training
    assert float((module.eval()(torch.arange(4)).argmax(1) == labels).float().mean()) == 0.75


def test_the_score_in_training_mode_is_that_of_batches():
    """Each batch is normalised by itself, and the running statistics stay as they were."""
    torch.manual_seed(0)
    module = BayesianGAN(2, 0, size=8, channels=1, width=4)
    x, y = torch.randn(200, 1, 8, 8) + 3, torch.arange(200) % 2
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    found = authors_score(run_of(module), [(x[:120], y[:120]), (x[120:], y[120:])], 8)
    assert module.training
    assert same(before, dict(module.named_buffers()))

    def score(votes):
        real = votes < 2
        return float((votes == y)[real].double().mean())

    with torch.no_grad():
        by_batches = score(torch.cat([module.discriminator(part).argmax(1) for part in x.split(8)]))
        together = score(module.discriminator(x).argmax(1))
        alone = score(module.eval().discriminator(x).argmax(1))
    assert len({by_batches, together, alone}) == 3, "the three ways must differ"
    assert found["training_mode_accuracy"] == pytest.approx(by_batches)


# Pictures


def decoded(file):
    """The image of a PNG file: (height, width, channels)."""
    with Image.open(io.BytesIO(file)) as image:
        channels = {"L": 1, "RGB": 3}[image.mode]
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_is_the_picture(channels):
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(256, (5, 7, channels), generator=generator, dtype=torch.uint8)
    assert torch.equal(decoded(png(picture)), picture)
    transposed = picture.transpose(0, 1)  # not contiguous
    assert torch.equal(decoded(png(transposed)), transposed)


def test_the_samples_are_a_row_for_each_generator(whole):
    grid = decoded(whole["samples.png"])
    assert grid.shape == (2 * 34 + 2, 10 * 34 + 2, 1)
    assert grid[2:34, 2:34].float().std() > 0.1, "nothing is drawn"


# Data


def as_bytes(images):
    return [image.contiguous().numpy().tobytes() for image in images]


def test_which_images_have_labels():
    """Equally many of each class, by the seed; with more labels the others keep theirs."""
    config = get_recipe("gan/digits-100")
    (x, y), test = digit_images()
    images, other = config.images(0), config.images(1)
    assert torch.bincount(images.labels).tolist() == [10] * 10
    assert len(images.unlabelled) == config.n_data == 1297 - 100
    assert sorted(as_bytes(images.labelled) + as_bytes(images.unlabelled)) == sorted(as_bytes(x))
    label_of = dict(zip(as_bytes(x), y.tolist(), strict=True))
    assert [label_of[image] for image in as_bytes(images.labelled)] == images.labels.tolist()
    assert not torch.equal(images.labelled, other.labelled)
    more = dataclasses.replace(config, n_labelled=200).images(0)
    assert set(as_bytes(images.labelled)) < set(as_bytes(more.labelled))
    assert same(list(images.held_out), list(test))


@pytest.mark.parametrize("validation", [0, 300])
def test_with_all_labels_the_images_are_also_the_unlabelled_ones(validation):
    """The energy is a sum over all of them."""
    n = 1297 - validation
    config = override(short(), [f"n_labelled={n}", f"validation={validation}"])
    images = config.images(0)
    assert len(images.labels) == len(images.labelled) == config.n_data == n
    assert torch.equal(images.labelled, images.unlabelled)
    (x, y), _ = digit_images()
    label_of = dict(zip(as_bytes(x), y.tolist(), strict=True))
    assert [label_of[image] for image in as_bytes(images.labelled)] == images.labels.tolist()
    assert sorted(as_bytes(torch.cat([images.labelled, images.held_out[0][:validation]]))) == (
        sorted(as_bytes(x))
    )
    run, data = config.run(0, CPU), config.loader(images, 0, CPU)
    assert run.ensemble.n_data == data.n_data == n
    assert run.step(data.next()).energy.isfinite().all()
    assert override(config, ["n_labelled=970"]).n_data == n - 970


def test_what_is_held_out_for_validation_is_not_trained_on():
    """And does not depend on the seed, so that seeds are compared on the same images."""
    config = dataclasses.replace(get_recipe("gan/digits-100"), validation=300)
    images, other = config.images(0), config.images(1)
    assert config.n_data == len(images.unlabelled) == 1297 - 300 - 100
    assert torch.equal(images.held_out[0], other.held_out[0])
    (x, _), (x_test, _) = digit_images()
    held_out = as_bytes(images.held_out[0])
    assert len(held_out) == 300
    every = held_out + as_bytes(images.labelled) + as_bytes(images.unlabelled)
    assert sorted(every) == sorted(as_bytes(x))
    assert not set(held_out) & set(as_bytes(x_test))
    few = dataclasses.replace(config, test_subset=50).images(0)
    assert torch.bincount(few.held_out[1]).tolist() == [5] * 10


# Bad input


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["n_labelled=4005"], "of the 10 classes (the nearest is 4000), or all 50000, got 4005"),
        (["n_labelled=4006"], "the nearest is 4010"),
        (["n_labelled=4"], "the nearest is 10"),
        (["n_labelled=49997"], "the nearest is 49990"),
        (["n_labelled=0"], "at least 10 and at most the 50000 training images, got 0"),
        (["n_labelled=50001"], "at most the 50000 training images, got 50001"),
        (["n_labelled=45000", "validation=10000"], "at most the 40000 training images"),
        (["n_labelled=39999", "validation=10000"], "is 39990), or all 40000, got 39999"),
        (["networks=matching"], "setting 'networks' belongs to the recipe"),
        (["batchnorm=none"], "'batchnorm' must be one of together, apart, got 'none'"),
        (["n_labelled=49990"], "'batch_size' must be from 2 to the 10 unlabelled, got 64"),
        (["generators=other"], "'generators' must be one of shared, own, got 'other'"),
        (["latents=17"], "n_generators x latents, 340, is a multiple of batch_size, got 17"),
        (["latents=1"], "'latents' must be at least 2"),
        (["batch_size=0"], "'batch_size' must be from 2 to the 46000 unlabelled, got 0"),
        (["n_generators=0"], "'n_generators' must be at least 1, got 0"),
        (["warm_start=15000"], "'warm_start' must be at least 0 and less than steps=15000"),
        (["average_every=10001"], "'average_every' must be between 1 and steps - warm_start"),
        (["lr_floor=0"], "'lr_floor' must be in (0, 1]"),
        (["momentum=1"], "'momentum' must be at least 0 and less than 1"),
        (["data=svhn"], "setting 'data' belongs to the recipe"),
        (["validation=300", "test_subset=301"], "must be between 1 and 300, or none, got 301"),
    ],
)
def test_bad_settings_are_one_clear_line(settings, expected):
    with pytest.raises(ConfigError) as caught:
        override(get_recipe("gan/cifar10-4000"), settings)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_consistency_without_augmentation_is_refused():
    """And all labels are fine."""
    config = get_recipe("gan-matching/cifar10-4000-consistency")
    with pytest.raises(ConfigError) as caught:
        override(config, ["augment=false"])
    expected = "'augment' must be true: consistency compares an image augmented twice, got False"
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    matching = get_recipe("gan-matching/cifar10-4000")
    with pytest.raises(ConfigError, match="'augment' must be true: consistency compares"):
        override(matching, ["augment=false"])
    assert override(matching, ["augment=false", "consistency=0", "erase=false"]).augment is False
    with pytest.raises(ConfigError, match="'erase' must be false where augment is false"):
        override(matching, ["augment=false", "consistency=0", "erase=true"])
    every = override(config, ["n_labelled=40000", "validation=10000"])
    assert every.n_data == 40_000
    with pytest.raises(ConfigError, match="'consistency' must be at least 0 and finite, got -1"):
        override(get_recipe("gan-augmented/digits-100-consistency"), ["consistency=-1"])


@pytest.mark.parametrize(
    ("recipe", "settings", "n_processes", "expected"),
    [
        ("gan/digits-100", [], 2, "needs one process, got 2: .*--set generators=own"),
        ("gan/digits-100", ["generators=own"], 2, None),
        ("gan/digits-100", ["generators=own"], 4, r"at most 2 process\(es\), .* got 4"),
        ("gan/digits-100-sghmc", [], 2, r"can use at most 1 process\(es\)"),
        ("gan/digits-100-supervised", [], 2, r"can use at most 1 process\(es\)"),
    ],
)
def test_on_how_many_processes(monkeypatch, recipe, settings, n_processes, expected):
    config = override(get_recipe(recipe), settings)
    group = ProcessGroup(rank=0, size=n_processes)
    monkeypatch.setattr(networks, "replica_mesh", lambda n, device: ReplicaMesh(n, group))
    if expected is None:
        assert list(config.on(CPU)["mesh"].mine) == [0]
    else:
        with pytest.raises(ConfigError, match=expected):
            config.run(0, CPU)


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Saves 800 images as CIFAR-10; those of class `without` get another label."""

    def save(without=None):
        parts = []
        for n in (800, 100):
            labels, generator = torch.arange(n) % 10, torch.Generator().manual_seed(n)
            x = torch.randint(256, (n, 32, 32, 3), generator=generator, dtype=torch.uint8)
            parts += [x, torch.where(labels == without, 0, labels) if without else labels]
        save_images(ImageSet("cifar10", 10, *parts), tmp_path / "data")
        monkeypatch.setenv("TORCHREX_DATA", str(tmp_path / "data"))
        monkeypatch.setitem(networks.KINDS, "cifar10", Kind(800, 100, 10))

    return save


def test_data_without_a_class_to_label(cli, tmp_path, small_cifar):
    words = ["run", "gan/cifar10-4000", "--device", "cpu", "--out", tmp_path / "runs"]
    settings = ["n_labelled=100", "steps=2", "warm_start=1", "average_every=1", "width=2"]

    for without in (3, 9):
        small_cifar(without)
        answer = cli(*words, settings=settings)
        refused(answer, f"has no image of class {without} to label")
        assert not list((tmp_path / "runs").rglob("*.json"))


@pytest.mark.parametrize(
    ("method", "steps", "time"),
    [("-supervised", 2_001, "hours"), ("-sghmc", 2_001, "days"), ("-sghmc", 2_000, None)],
)
def test_how_long_a_cpu_takes_is_reported(cli, tmp_path, small_cifar, caplog, method, steps, time):
    small_cifar()
    settings = [*SMALL, "n_labelled=100", f"steps={steps}", "warm_start=1"]
    words = ["run", f"gan/cifar10-4000{method}", "--device", "cpu", "--budget", "0.001s"]
    code, _, err = cli(*words, "--out", tmp_path / "runs", settings=settings)
    assert code == 75, err
    warnings = [record.message for record in caplog.records if "made for a GPU" in record.message]
    assert len(warnings) == (time is not None)
    assert all(f"2,001 steps on this CPU will take {time};" in message for message in warnings)


def test_a_generator_that_breaks_is_named_by_the_command(cli, tmp_path, monkeypatch):
    """Its weights become NaN after the tenth step."""
    plain = networks.PosteriorAverage.update

    def update(self, run):
        if run.n_steps == 10:
            run.live_module_at(1).generators.layers[0].weight.data[1] = float("nan")
        return plain(self, run)

    monkeypatch.setattr(networks.PosteriorAverage, "update", update)
    answer = cli("run", "gan/digits-100", "--out", tmp_path, "--quiet")  # on a slow machine
    refused(answer, "generator 1 of 2", "step=000000008")  # the last checkpoint before it
    result = json.loads((tmp_path / "gan/digits-100/seed=0/result.json").read_text())
    assert result["status"] == "failed"
    assert "generator 1 of 2" in result["error"]


# Recipes


def test_every_recipe_is_what_its_name_says():
    everything = gan.gan_recipes()
    expected = {f"gan/digits-100{method}" for method in METHODS}
    expected |= {f"gan-augmented/digits-100{method}" for method in (*METHODS, "-consistency")}
    for family in ("gan", "gan-tuned", "gan-augmented", "gan-matching"):
        twice = ("-consistency",) if family in ("gan-augmented", "gan-matching") else ()
        for data in ("cifar10", "cifar100", "svhn"):
            for n in range(2000, 5001, 500):
                expected |= {f"{family}/{data}-{n}{method}" for method in (*METHODS, *twice)}
    few = {name for name in expected if "digits" not in name}
    n_images = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 73_257}
    for family in ("gan-tuned", "gan-augmented", "gan-matching"):
        expected |= {f"{family}/{data}-{n}-supervised" for data, n in n_images.items()}
    assert set(everything) == expected
    assert len(everything) == 9 + 21 * (4 + 4 + 5 + 5) + 9
    for name, config in everything.items():
        config.check()
        assert (recipes()[name], config.recipe) == (config, name)
        family, cell = name.split("/")
        data, n, *method = cell.split("-")
        assert (config.family, config.data, config.n_labelled) == (family, data, int(n))
        assert config.method == (method or ["resghmc"])[0]
        n_rungs = 2 if config.method in ("resghmc", "noswaps") else 1
        assert config.n_rungs == config.ladder().n_rungs == n_rungs
        if int(n) in n_images.values():
            assert config.n_data == int(n)
            continue
        plain = everything[gan.gan_recipe_name(data, int(n), "resghmc", family)]
        assert dataclasses.replace(config, recipe=plain.recipe, method="resghmc") == plain
        assert config.tested_against_paper == (family == "gan")
    of_table = {name for name in few if "000" in name} | (expected - few)
    assert set(gan.table3_recipes()) == {name for name in of_table if "digits" not in name}
    assert set(gan.figure3_recipes()) == few


def test_the_families_differ_where_they_say():
    """From the paper's, in the settings named here and no others."""
    tuned = {"recipe", "lr_of_mean", "lr_floor", "sampling_lr", "average_every"}
    augmented = tuned | {"augment", "n_generators"}
    longer = {"networks", "width", "latents", "steps", "warm_start", "checkpoint_every"}
    differing = {"gan": set(), "gan-tuned": tuned, "gan-augmented": augmented | {"batchnorm"}}
    stronger = {"erase", "certain", "judging"}
    differing["gan-matching"] = augmented | longer | stronger
    names = [field.name for field in dataclasses.fields(GanConfig)]
    for config in gan.figure3_recipes().values():
        other = gan.gan_config(config.data, config.n_labelled, config.method)
        differ = {each for each in names if getattr(config, each) != getattr(other, each)}
        assert differ == differing[config.family]


def test_the_stronger_families_are_what_they_say():
    config = get_recipe("gan-matching/svhn-2000")
    assert (config.networks, config.width, config.augment) == ("matching", 96, True)
    # As many generated images as labelled ones, 64 of each, by two generators.
    assert (config.batch_size, config.n_generators, config.latents) == (64, 2, 32)
    module = config.model()
    assert isinstance(module.discriminator, MatchingDiscriminator)
    assert module.generators.n_generators == 2
    assert module.generators.layers[-1].weight.shape == (2, 64, 25 * 3)  # the paper's width
    assert config.dropout == MatchingDiscriminator.dropout()
    assert config.losses == Matching(1.0, 0.8, 0.1)
    paper = get_recipe("gan-augmented/svhn-2000")
    assert (paper.networks, paper.augment, paper.dropout) == ("paper", True, ())
    assert paper.losses is gan_losses
    for each in (config, paper):
        changed = {
            method: dataclasses.replace(each, method=method, consistency=7.0, width=2)
            for method in gan.GAN_METHODS
        }
        assert changed["supervised"].losses is supervised_losses
        assert changed["consistency"].losses == Consistency(7.0, each.certain)
        assert len({changed[method].losses for method in ("resghmc", "sghmc", "noswaps")}) == 1
        without = {method for method in changed if changed[method].model().generators is None}
        assert without == {"supervised", "consistency"}
        quick = {method for method in changed if changed[method].cpu_warning[0] == "hours"}
        assert quick == (without if each is paper else set())
    for batchnorm in ("together", "apart"):
        module = dataclasses.replace(paper, batchnorm=batchnorm, width=2).model()
        assert module.discriminator.apart == (batchnorm == "apart")


def stronger_of(config):
    """The augmentation of labelled images, and of unlabelled ones the second time."""
    n, size, channels = 20, config.kind.size, config.kind.channels
    x = torch.zeros(n, size, size, channels, dtype=torch.uint8)
    y = torch.arange(n)
    images = gan.GanImages(x, y, x, (x, y))
    return config.loader(images, 0, torch.device("cpu")).augment.stronger


def test_how_images_are_augmented():
    """Photos are flipped; a flipped digit is none. Mutant: a shift of 0 on the small digits."""
    found = {}
    for data in ("cifar10", "cifar100", "svhn", "digits"):
        config = dataclasses.replace(augmented("paper"), data=data)
        augment = config.augmentation
        assert augment.erase is None
        assert augment.mean == augment.std == (0.5,) * config.kind.channels
        assert augment.border == "reflect"
        found[data] = (augment.crop_padding, augment.flip)
        assert dataclasses.replace(config, augment=False).augmentation is None
        assert stronger_of(config) is None
        erasing = stronger_of(dataclasses.replace(config, erase=True))
        assert dataclasses.replace(erasing, erase=None) == augment
        assert erasing.erase.fill == (0.0,) * config.kind.channels
    photo = (4, True)
    assert found == {"cifar10": photo, "cifar100": photo, "svhn": (2, False), "digits": (1, False)}


def test_the_settings_of_the_appendix():
    for data in gan.GAN_DATA:
        for n in gan.N_LABELLED:
            assert gan.gan_config(data, n, "resghmc").n_labelled == n
    cells = {(data, n) for data in gan.GAN_DATA for n in (2000, 3000, 4000, 5000)}
    assert set(gan.PAPER_TABLE3) == cells
    for n, temperature, factor in ((2500, 0.04, 1.0e4), (3500, 0.02, 2.5e4), (4000, 0.01, 5.0e4)):
        config = gan.gan_recipes()[f"gan/cifar100-{n}"]
        assert config.temperatures == pytest.approx((temperature, 1.0))
        assert config.correction_factor == factor


def test_the_learning_rate_falls_as_in_the_paper():
    config = gan.gan_recipes()["gan/cifar10-4000"]
    falling = [config.decay(step) for step in (0, 800, 15_000)]
    assert falling == pytest.approx([1.0, 0.36788, 0.05], rel=1e-4)
    later = dataclasses.replace(config, sampling_lr=50.0)  # of SGHMC alone, from its first step on
    assert [later.decay(step) for step in (0, 4_999, 5_000)] == pytest.approx([1.0, 0.05, 2.5])
    lrs = [lr * config.n_data for lr in config.ladder().lrs]
    assert lrs == pytest.approx([4.5e-4, 7.0e-4])


def test_what_runs_that_train_together_must_share():
    """Whatever shapes a batch or the rhythm of a run, the seed, and nothing else."""
    config = get_recipe("gan/digits-100")
    shared = {"data": "svhn", "n_labelled": 200, "steps": 99, "batch_size": 10, "n_generators": 7}
    shared |= {"latents": 10, "validation": 5, "test_subset": 50, "precision": "float32"}
    shared |= {"deterministic": False, "checkpoint_every": 7}
    shared |= {"networks": "matching", "augment": True, "width": 3}  # masks have the width
    for name, value in shared.items():
        other = dataclasses.replace(config, **{name: value})
        assert other.batch_key(0) != config.batch_key(0), name
    assert config.batch_key(0) != config.batch_key(1)
    for method in METHODS:
        assert get_recipe(f"gan/digits-100{method}").batch_key(0) == config.batch_key(0)
    own = {"warm_start": 3, "average_every": 3, "lr_of_mean": 1e-5, "generators": "own"}
    own |= {"temperature": 0.5, "prior_precision": 0.0, "batchnorm": "apart", "consistency": 2.0}
    assert dataclasses.replace(config, **own).batch_key(0) == config.batch_key(0)


def test_a_run_has_the_settings_of_its_config():
    settings = ["momentum=0.8", "smoothing=0.2", "correction_factor=7", "prior_precision=3"]
    config = override(get_recipe("gan/digits-100"), [*settings, "warm_start=5", "width=4"])
    run = config.run(0, CPU)
    assert (run.rules.swap_start, run.rules.factor.initial) == (5, 7.0)
    assert run.rules.noise == tr.PairedVariance(0.2)
    assert run.ensemble.sampler == tr.AdamStart(tr.SGHMC(0.2), 5, n_data=1197)
    assert run.ensemble.energy.prior == tr.GaussianPrior(3.0)
    assert run.ensemble.n_data == config.n_data == 1197
    first, second = (module.state_dict() for module in run.ensemble.modules)
    assert torch.equal(first["generators.first"], second["generators.first"])
    name = "discriminator.classes.weight"
    assert not torch.equal(first[name], second[name])
    settings = ["warm_start=0", "prior_precision=0", "width=4"]
    apart = override(get_recipe("gan/digits-100-noswaps"), settings).run(0, CPU)
    assert isinstance(apart.rules.pairing, tr.NoSwaps)
    assert apart.ensemble.sampler == tr.SGHMC(0.5)
    assert apart.ensemble.energy.prior is None


def test_runs_that_train_together_share_equal_energies(monkeypatch):
    """By loss and prior; and the seed decides the order of the data."""
    given = []

    def together(training, loader, *arguments, **options):
        given.append(([each.run.ensemble.energy for each in training], loader))
        raise DataError("enough")

    monkeypatch.setattr(networks, "train_together", together)
    pair, _, apart, supervised = (
        override(get_recipe(f"gan/digits-100{method}"), SMALL) for method in METHODS
    )
    configs = [pair, apart, supervised, dataclasses.replace(pair, prior_precision=9.0)]
    for seed in (0, 1):
        runs = [Run(config, seed) for config in configs]
        with pytest.raises(DataError, match="enough"):
            pair.execute(runs, RunOptions(device="cpu"))
    (energies, first), (_, second) = given
    assert energies[0] is energies[1]
    assert [energy.prior.precision for energy in energies] == [1.0, 1.0, 1.0, 9.0]
    assert len(set(map(id, energies))) == 3
    assert first.seed != second.seed


# That it helps


def accuracy_of(recipe, seed):
    """On the 500 test digits, which chose nothing; a run whose energies are not finite is none."""
    run = Run(get_recipe(recipe), seed)
    how, (one,) = run.config.execute([run], RunOptions(device="cpu"))
    assert how.status == "finished"
    assert one.trace.tensors()["energy"].isfinite().all()
    assert one.metrics["n_draws"] == 4
    return one.metrics["accuracy"]


@pytest.mark.slow
def test_unlabelled_digits_help():
    """With 100 labels, end to end, means over 3 seeds of the accuracy on held-out digits.

    Settings were chosen on 300 validation digits with seeds 10 to 14. There and with seeds 20 to 24
    semi-supervised minus supervised was 0.029 on average with a standard deviation of 0.013 between
    seeds, 0.013 at least: a mean over 3 other seeds is below 0.005 in one of 100 choices of them (t
    distribution, 9 degrees of freedom). These ones are fixed, and what may differ between machines
    is rounding.
    """
    supervised, unlabelled = (
        [accuracy_of(f"gan/digits-100-{method}", seed) for seed in (0, 1, 2)]
        for method in ("supervised", "sghmc")
    )
    assert statistics.mean(supervised) > 0.85, supervised  # the line below is a serious one
    more = statistics.mean(unlabelled) - statistics.mean(supervised)
    assert more > 0.005, (supervised, unlabelled)
