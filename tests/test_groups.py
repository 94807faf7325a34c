"""Which runs train side by side, and what becomes of each in its folder."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
import torch

from command import run_command
from modules import same
from torchrex.checkpoint import Checkpoints
from torchrex.errors import NonFiniteEnergyError, RunFolderError
from torchrex.experiments import (
    RunFolder,
    RunOptions,
    dumps,
    get_recipe,
    override,
    run_group,
    run_recipe,
    run_together,
    to_json,
)
from torchrex.experiments.runner import group_runs, run_in
from torchrex.network import ModuleExchange
from torchrex.vision.data import ImageSet, save_images
from written_runs import outcome

# Four epochs of one step each.
TINY = [
    "net=resnet8",
    "epochs=4",
    "subset=256",
    "test_subset=50",
    "batch_size=32",
    "checkpoint_every=2",
]
NAME = "clean/cifar10-resnet20"


def tiny(recipe=NAME, *more):
    return override(get_recipe(recipe), [*TINY, *more])


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path_factory):
    """A few random images in place of CIFAR-10."""
    folder = tmp_path_factory.getbasetemp() / "few images"
    if not folder.exists():
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (360, 32, 32, 3), dtype=torch.uint8, generator=generator)
        labels = torch.arange(360) % 10
        train, test = (images[:300], labels[:300]), (images[300:], labels[300:])
        save_images(ImageSet("cifar10", 10, *train, *test), folder)
    monkeypatch.setenv("TORCHREX_DATA", str(folder))


def group(pairs, out, *, overwrite=False):
    return group_runs([run_in(out, *pair) for pair in pairs], overwrite=overwrite)


def seeds(groups):
    return [[run.seed for run in each.runs] for each in groups]


def sizes(groups):
    return [len(each.runs) for each in groups]


def write_unfinished(out, config, seed, *steps, status=None):
    """A run folder as a run leaves it that was stopped, or has `status`."""
    folder = RunFolder.of(out, config.recipe, seed)
    for step in steps:
        Checkpoints(folder.checkpoints).save(step, {})
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_text("config.json", dumps(config))
    if status is not None:
        folder.write_text("result.json", dumps({"status": status, "metrics": {}}))
    return folder


# Grouping


def test_runs_of_one_batch_key_go_together(tmp_path):
    """All methods of both families; another network, data set or length is another key."""
    families, ends = ("clean", "icml2020"), ("", "-msgd", "-sghmc")
    pairs = [(tiny(f"{family}/cifar10-resnet20{end}"), 0) for family in families for end in ends]
    assert len(group(pairs, tmp_path)) == 1
    others = [
        (tiny(NAME), 0),
        (tiny("clean/cifar10-resnet32", "net=resnet20"), 0),
        (tiny("clean/cifar100-resnet20"), 0),
        (tiny("clean/cifar10-resnet56", "epochs=7"), 0),
        (tiny(NAME), 1),
        (tiny("clean/cifar10-resnet20-batch1024", "batch_size=65"), 0),
    ]
    groups = group(others, tmp_path)
    assert sizes(groups) == [2, 1, 1, 1, 1]
    assert seeds(groups)[0] == [0, 1]
    assert groups[0].name == f"{NAME} seed 0 and 1 more"
    assert groups[1].name == "clean/cifar10-resnet32 seed 0"
    names = ("digits/sghmc", "figure1/case1-sgld")
    alone = [(get_recipe(name), seed) for name in names for seed in (0, 1)]
    assert sizes(group(alone, tmp_path)) == [1, 1, 1, 1]
    assert sizes(group([alone[0], (tiny(), 0), alone[2], (tiny(), 1)], tmp_path)) == [1, 2, 1]


@pytest.mark.parametrize(
    ("net", "expected"), [("wrn-28-10", [2, 2, 1]), ("wrn-16-8", [4, 1]), ("resnet8", [5])]
)
def test_a_group_has_as_many_replicas_as_the_device_carries(tmp_path, net, expected):
    """4, 8 and 16 replicas; a pair has two."""
    pairs = [(tiny(NAME, f"net={net}"), seed) for seed in range(5)]
    groups, most = group(pairs, tmp_path), pairs[0][0].most_replicas
    assert sizes(groups) == expected
    assert all(each.n_replicas == 2 * len(each.runs) <= most for each in groups)
    many = [(tiny(f"{NAME}-msgd", f"net={net}"), seed) for seed in range(17)]
    assert sizes(group(many, tmp_path)) == [most] * (17 // most) + [17 % most]


def test_a_later_run_may_fill_an_earlier_group(tmp_path):
    """Three of 4 replicas are taken: a pair does not fit, but a single one does."""
    ends = ("", "-msgd", "", "-sghmc")
    pairs = [(tiny(f"{NAME}{end}", "net=wrn-28-10"), k) for k, end in enumerate(ends)]
    assert seeds(group(pairs, tmp_path)) == [[0, 1, 3], [2]]


def test_runs_continue_with_those_at_the_same_step(tmp_path):
    """Failed runs come last and alone: they would take the others back to their checkpoint."""
    config = tiny()
    pairs = [(config, seed) for seed in range(8)]
    write_unfinished(tmp_path, config, 1, 2, 4)
    write_unfinished(tmp_path, config, 2, 4, 6)
    write_unfinished(tmp_path, config, 3, 6, 8)  # 2 and 3 share step 6, but 1 has none of it
    write_unfinished(tmp_path, config, 4, 6, status="finished")
    write_unfinished(tmp_path, config, 6, 2, status="failed")
    write_unfinished(tmp_path, config, 7, 4, status="paused")
    groups = group(pairs, tmp_path)
    assert seeds(groups) == [[0, 4, 5], [1, 2, 7], [3], [6]]
    assert [set(each.steps) for each in groups] == [set(), {4}, {6, 8}, {2}]
    assert seeds(group(pairs, tmp_path, overwrite=True)) == [list(range(8))]


def test_a_folder_with_a_damaged_result_is_named(tmp_path):
    write_unfinished(tmp_path, tiny(), 0, 2).write_text("result.json", "{")
    with pytest.raises(RunFolderError, match=r"result\.json"):
        group([(tiny(), 0)], tmp_path)
    assert len(group([(tiny(), 0)], tmp_path, overwrite=True)) == 1


# Running them


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The outcome of a run that nothing trained together with."""
    out, cache = tmp_path_factory.mktemp("alone"), {}

    def get(config, seed):
        if (config, seed) not in cache:
            folder = run_recipe(config, seed, out / str(len(cache)), device="cpu")
            cache[config, seed] = outcome(folder.path)
        return cache[config, seed]

    return get


@pytest.mark.slow
def test_each_run_of_a_group_has_a_folder_as_if_alone(tmp_path, alone):
    """All four methods of a family with one seed, and another seed."""
    short = ("average_after=0", "epochs=3", "batch_size=16")
    ends = ("", "-independent", "-msgd", "-sghmc")
    configs = [tiny(f"icml2020/cifar10-resnet20{end}", *short) for end in ends]
    pairs = [*((config, 3) for config in configs), (configs[0], 4)]
    folders = run_together(pairs, tmp_path, device="cpu")
    for (config, seed), folder in zip(pairs, folders, strict=True):
        assert folder.path == tmp_path / config.recipe / f"seed={seed}"
        assert same(alone(config, seed), outcome(folder.path))
        assert folder.config == to_json(config)
        assert (folder.result["recipe"], folder.result["seed"]) == (config.recipe, seed)


@pytest.mark.slow
def test_a_group_with_a_finished_run_continues_with_the_others(tmp_path, alone):
    """Seed 0 is finished, seeds 1 and 2 were stopped after a step, seed 3 is new."""
    config = tiny()
    first = run_recipe(config, 0, tmp_path, device="cpu")
    stamp = (first.path / "result.json").stat().st_mtime_ns
    with pytest.raises(RunFolderError, match="is finished"):
        run_together([(config, 0), (config, 1)], tmp_path, device="cpu")
    assert not RunFolder.of(tmp_path, NAME, 1).path.exists()
    paused = run_together([(config, 1), (config, 2)], tmp_path, device="cpu", budget=1e-9)
    assert [(each.status, each.result["steps_done"]) for each in paused] == [("paused", 1)] * 2
    groups = group([(config, seed) for seed in range(4)], tmp_path)
    assert seeds(groups) == [[0, 3], [1, 2]]
    for each in groups:
        run_group(each.runs, RunOptions(device="cpu", resume=True))
    for seed in range(4):
        assert same(alone(config, seed), outcome(RunFolder.of(tmp_path, NAME, seed).path))
    assert (first.path / "result.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_that_diverges_does_not_stop_the_others(tmp_path, caplog, alone, bad):
    """The first may be the one: steps, data and time are then those of the others."""
    config = tiny(NAME, "average_after=250")
    pairs = [(replace(config, lr_of_mean=1e20) if k == bad else config, k) for k in range(3)]
    folders = run_together(pairs, tmp_path, device="cpu")
    assert f"seed {bad}" in caplog.text
    failed = folders[bad].result
    assert (failed["status"], failed["metrics"]) == ("failed", {})
    assert all(word in failed["error"] for word in ("became", "at step"))
    assert str(folders[bad].checkpoints) in failed["error"]
    assert not (folders[bad].path / "trace.safetensors").exists()
    for seed in {0, 1, 2} - {bad}:
        assert same(alone(config, seed), outcome(folders[seed].path))


def test_when_all_diverge_it_is_an_error_and_each_folder_has_its_own_reason(tmp_path):
    bad = tiny(NAME, "lr_of_mean=1e20")
    with pytest.raises(NonFiniteEnergyError, match="Lower"):
        run_together([(bad, 0), (bad, 1)], tmp_path, device="cpu")
    for seed in (0, 1):
        folder = RunFolder.of(tmp_path, NAME, seed)
        assert (folder.status, folder.result["seed"]) == ("failed", seed)
        assert str(folder.checkpoints) in folder.result["error"]


def test_the_command_continues_where_one_run_has_failed(tmp_path, monkeypatch, capsys):
    """Seed 0 fails again, seed 1 is finished, and the exit code is 2."""
    step = ModuleExchange.eager_step

    def diverging(run, batch):
        if run.streams.seed == 0:
            run.ensemble.position.fill_(float("nan"))
        return step(run, batch)

    monkeypatch.setattr(ModuleExchange, "eager_step", diverging)
    with pytest.raises(NonFiniteEnergyError):
        run_recipe(tiny(), 0, tmp_path)
    run_recipe(tiny(), 1, tmp_path, budget=1e-9)
    words = ["run", NAME, "--seeds", "2", "--resume", "--device", "cpu", "--out", tmp_path]
    code, _, err = run_command(monkeypatch, capsys, *words, settings=TINY)
    assert (code, "1 of 2 runs failed" in " ".join(err.split())) == (2, True)
    assert [RunFolder.of(tmp_path, NAME, k).status for k in (0, 1)] == ["failed", "finished"]


def test_overwriting_on_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    pairs = [(tiny(), seed) for seed in (0, 1)]
    folders = run_together(pairs, tmp_path)
    before = [outcome(folder.path) for folder in folders]
    write = RunFolder.write_text

    def full(folder, name, text):
        if name == "config.json" and folder.path.name == "seed=1.new":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, name, text)

    monkeypatch.setattr(RunFolder, "write_text", full)
    with pytest.raises(RunFolderError, match="No space left"):
        run_together(pairs, tmp_path, overwrite=True)
    assert same([outcome(folder.path) for folder in folders], before)
    parent = folders[0].path.parent
    assert sorted(path.name for path in parent.iterdir()) == ["seed=0", "seed=1"]
