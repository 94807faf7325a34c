"""Which runs train side by side, and what becomes of each in its folder."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file

from command import run_command
from modules import same
from torchrex.checkpoint import Checkpoints
from torchrex.errors import NonFiniteEnergyError, RunFolderError
from torchrex.experiments import RunFolder
from torchrex.experiments.config import dumps, override
from torchrex.experiments.images import ImageConfig
from torchrex.experiments.recipes import get_recipe
from torchrex.experiments.runner import group_runs, run_in, run_recipe, run_together
from torchrex.network import ModuleExchange
from torchrex.vision.data import ImageSet, save_images

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
        train, test = (
            (
                torch.randint(256, (n, 32, 32, 3), dtype=torch.uint8, generator=generator),
                torch.arange(n) % 10,
            )
            for n in (300, 60)
        )
        save_images(ImageSet("cifar10", 10, *train, *test), folder)
    monkeypatch.setenv("TORCHREX_DATA", str(folder))


def group(pairs, out, *, overwrite):
    return group_runs([run_in(out, *pair) for pair in pairs], overwrite=overwrite)


def seeds(groups):
    return [[run.seed for run in each.runs] for each in groups]


def stands_at(out, config, seed, *steps, status=None):
    """A run folder as a run leaves it that was stopped, or has `status`."""
    folder = RunFolder.of(out, config.recipe, seed)
    for step in steps:
        Checkpoints(folder.path / "checkpoints").save(step, {})
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_text("config.json", dumps(config))
    if status is not None:
        folder.write_text("result.json", dumps({"status": status, "metrics": {}}))
    return folder


def outcome(folder):
    """All numbers of a finished run that do not depend on the clock."""
    result = folder.result
    assert result["status"] == "finished", result
    metrics = {
        name: value for name, value in result["metrics"].items() if name != "seconds_per_epoch"
    }
    return metrics, result["swaps"], result["curves"], load_file(folder.path / "trace.safetensors")


# Grouping


def test_one_company_goes_together(tmp_path):
    """All methods of both families, in the order given; another network, data set or length is
    other company.
    """
    jobs = [
        (tiny(f"{family}/cifar10-resnet20{end}"), 0)
        for family in ("clean", "icml2020")
        for end in ("", "-msgd", "-sghmc")
    ]
    assert len(group(jobs, tmp_path, overwrite=False)) == 1
    others = [
        (tiny(NAME), 0),
        (tiny("clean/cifar10-resnet32", "net=resnet20"), 0),
        (tiny("clean/cifar100-resnet20"), 0),
        (tiny("clean/cifar10-resnet56", "epochs=7"), 0),
        (tiny(NAME), 1),
        (tiny("clean/cifar10-resnet20-batch1024", "batch_size=65"), 0),
    ]
    groups = group(others, tmp_path, overwrite=False)
    assert [len(each.runs) for each in groups] == [2, 1, 1, 1, 1]
    assert seeds(groups)[0] == [0, 1]
    assert groups[0].name == f"{NAME} seed 0 and 1 more"
    assert groups[1].name == "clean/cifar10-resnet32 seed 0"


def test_configs_that_train_alone_are_groups_of_one(tmp_path):
    jobs = [
        (get_recipe(name), seed)
        for name in ("digits/sghmc", "figure1/case1-sgld")
        for seed in (0, 1)
    ]
    assert [len(each.runs) for each in group(jobs, tmp_path, overwrite=False)] == [1, 1, 1, 1]

    class Alone(ImageConfig):
        def batch_key(self, seed):
            return None

    alone = Alone(**asdict(tiny()))
    assert [
        len(each.runs) for each in group([(alone, 0), (alone, 1)], tmp_path, overwrite=False)
    ] == [1, 1]
    mixed = [jobs[0], (tiny(), 0), jobs[2], (tiny(), 1)]
    assert [len(each.runs) for each in group(mixed, tmp_path, overwrite=False)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("net", "sizes"), [("wrn-28-10", [2, 2, 1]), ("wrn-16-8", [4, 1]), ("resnet8", [5])]
)
def test_a_group_has_as_many_replicas_as_the_device_carries(tmp_path, net, sizes):
    """4, 8 and 16 replicas; a pair has two."""
    pair = [(tiny(NAME, f"net={net}"), seed) for seed in range(5)]
    groups = group(pair, tmp_path, overwrite=False)
    assert [len(each.runs) for each in groups] == sizes
    assert all(each.n_replicas == 2 * len(each.runs) <= pair[0][0].most_replicas for each in groups)
    many = [(tiny(f"{NAME}-msgd", f"net={net}"), seed) for seed in range(17)]
    most = many[0][0].most_replicas
    assert [len(each.runs) for each in group(many, tmp_path, overwrite=False)] == [most] * (
        17 // most
    ) + [17 % most]


def test_a_later_job_may_fill_an_earlier_group(tmp_path):
    """Three of 4 replicas are taken: a pair has no room, but a single one has."""
    net = "net=wrn-28-10"
    jobs = [
        (tiny(NAME, net), 0),
        (tiny(f"{NAME}-msgd", net), 0),
        (tiny(NAME, net), 1),
        (tiny(f"{NAME}-sghmc", net), 0),
    ]
    groups = group(jobs, tmp_path, overwrite=False)
    assert [[(run.config, run.seed) for run in each.runs] for each in groups] == [
        [jobs[0], jobs[1], jobs[3]],
        [jobs[2]],
    ]


def test_runs_go_on_with_those_at_their_own_step(tmp_path):
    config = tiny()
    stands_at(tmp_path, config, 1, 2, 4)
    stands_at(tmp_path, config, 2, 4, 5)
    stands_at(tmp_path, config, 3, 2)
    stands_at(tmp_path, config, 4, 6, status="finished")
    groups = group([(config, seed) for seed in range(6)], tmp_path, overwrite=False)
    assert seeds(groups) == [[0, 4, 5], [1, 2], [3]]
    assert [set(each.steps) for each in groups] == [set(), {4}, {2}]
    # What is begun anew stands at the beginning.
    assert seeds(group([(config, seed) for seed in range(6)], tmp_path, overwrite=True)) == [
        [0, 1, 2, 3, 4, 5]
    ]


def test_a_step_must_be_common_to_all_of_a_group(tmp_path):
    """0 and 1 share step 4 and 1 and 2 share step 6, but no step is that of all three."""
    config = tiny()
    for seed, steps in enumerate([(2, 4), (4, 6), (6, 8)]):
        stands_at(tmp_path, config, seed, *steps)
    groups = group([(config, seed) for seed in range(3)], tmp_path, overwrite=False)
    assert seeds(groups) == [[0, 1], [2]]
    assert groups[0].steps == {4}


def test_a_folder_with_a_damaged_result_is_named(tmp_path):
    stands_at(tmp_path, tiny(), 0, 2).write_text("result.json", "{")
    with pytest.raises(RunFolderError, match=r"result\.json"):
        group([(tiny(), 0)], tmp_path, overwrite=False)
    assert len(group([(tiny(), 0)], tmp_path, overwrite=True)) == 1


# Running them


def test_each_run_of_a_group_has_a_folder_as_if_alone(tmp_path):
    """All four methods of a family with one seed, and another seed: in the folders is what there
    would be without the others.
    """
    short = ("average_after=0", "epochs=3", "batch_size=16")
    configs = [
        tiny(f"icml2020/cifar10-resnet20{end}", *short)
        for end in ("", "-independent", "-msgd", "-sghmc")
    ]
    jobs = [(config, 3) for config in configs] + [(configs[0], 4)]
    folders = run_together(jobs, tmp_path / "together", device="cpu")
    assert [folder.path for folder in folders] == [
        tmp_path / "together" / config.recipe / f"seed={seed}" for config, seed in jobs
    ]
    for (config, seed), folder in zip(jobs, folders, strict=True):
        alone = run_recipe(config, seed, tmp_path / "alone", device="cpu")
        assert same(outcome(alone), outcome(folder))
        assert alone.config == folder.config
        assert (folder.result["recipe"], folder.result["seed"]) == (config.recipe, seed)


def test_what_is_finished_is_not_run_again(tmp_path):
    config = tiny()
    first = run_recipe(config, 0, tmp_path, device="cpu")
    stamp = (first.path / "result.json").stat().st_mtime_ns
    with pytest.raises(RunFolderError, match="is finished"):
        run_together([(config, 0), (config, 1)], tmp_path, device="cpu")
    assert not RunFolder.of(tmp_path, NAME, 1).path.exists()
    folders = run_together([(config, 0), (config, 1)], tmp_path, device="cpu", resume=True)
    assert (first.path / "result.json").stat().st_mtime_ns == stamp
    assert [folder.finished for folder in folders] == [True, True]
    alone = run_recipe(config, 1, tmp_path / "alone", device="cpu")
    assert same(outcome(alone), outcome(folders[1]))
    assert run_together([(config, 0), (config, 1)], tmp_path, device="cpu", resume=True) == folders
    assert (first.path / "result.json").stat().st_mtime_ns == stamp


def test_a_group_with_a_finished_run_goes_on_with_the_others(tmp_path):
    """Seed 0 is finished, seeds 1 and 2 were stopped after a step, seed 3 is new."""
    config = tiny()
    run_recipe(config, 0, tmp_path, device="cpu")
    paused = run_together([(config, 1), (config, 2)], tmp_path, device="cpu", budget=1e-9)
    assert [(folder.result["status"], folder.result["steps_done"]) for folder in paused] == [
        ("paused", 1)
    ] * 2
    groups = group([(config, seed) for seed in range(4)], tmp_path, overwrite=False)
    assert seeds(groups) == [[0, 3], [1, 2]]
    for each in groups:
        run_together([(config, run.seed) for run in each.runs], tmp_path, device="cpu", resume=True)
    for seed in range(4):
        alone = run_recipe(config, seed, tmp_path / "alone", device="cpu")
        assert same(outcome(alone), outcome(RunFolder.of(tmp_path, NAME, seed)))


def test_one_that_diverges_does_not_hold_up_the_others(tmp_path, caplog):
    config = tiny()
    bad = replace(config, lr_of_mean=1e20)
    folders = run_together([(config, 0), (bad, 1), (config, 2)], tmp_path, device="cpu")
    assert "left behind" in caplog.text
    failed = folders[1].result
    assert failed["status"] == "failed"
    assert "became" in failed["error"]
    assert "at step" in failed["error"]
    assert str(folders[1].path / "checkpoints") in failed["error"]
    assert failed["metrics"] == {}
    assert not (folders[1].path / "trace.safetensors").exists()
    for seed in (0, 2):
        assert same(
            outcome(run_recipe(config, seed, tmp_path / "alone", device="cpu")),
            outcome(folders[seed]),
        )


def test_the_first_may_be_the_one_that_diverges(tmp_path):
    """Steps, data and time are then those of the others."""
    config = tiny(NAME, "average_after=250")
    folders = run_together(
        [(replace(config, lr_of_mean=1e20), 1), (config, 0)], tmp_path, device="cpu"
    )
    assert [folder.result["status"] for folder in folders] == ["failed", "finished"]
    assert same(
        outcome(run_recipe(config, 0, tmp_path / "alone", device="cpu")), outcome(folders[1])
    )


def test_when_all_diverge_it_is_an_error_and_each_folder_says_so(tmp_path):
    bad = tiny(NAME, "lr_of_mean=1e20")
    with pytest.raises(NonFiniteEnergyError, match="Lower"):
        run_together([(bad, 0), (bad, 1)], tmp_path, device="cpu")
    for seed in (0, 1):
        result = json.loads((RunFolder.of(tmp_path, NAME, seed).path / "result.json").read_text())
        assert result["status"] == "failed"
        assert (result["seed"], "became" in result["error"]) == (seed, True)


def test_when_all_diverge_each_folder_has_its_own_reason(tmp_path):
    bad = tiny(NAME, "lr_of_mean=1e20")
    with pytest.raises(NonFiniteEnergyError):
        run_together([(bad, 0), (bad, 1)], tmp_path, device="cpu")
    for seed in (0, 1):
        folder = RunFolder.of(tmp_path, NAME, seed)
        assert str(folder.path / "checkpoints") in folder.result["error"]


def test_runs_that_failed_come_last_and_by_themselves(tmp_path):
    """Or they would take the others back to their last checkpoint, and stand in their way at every
    call.
    """
    config = tiny()
    stands_at(tmp_path, config, 0, 2, status="failed")
    stands_at(tmp_path, config, 1, 2, status="paused")
    stands_at(tmp_path, config, 2, 2, status="paused")
    assert seeds(group([(config, seed) for seed in range(3)], tmp_path, overwrite=False)) == [
        [1, 2],
        [0],
    ]
    assert seeds(group([(config, seed) for seed in range(3)], tmp_path, overwrite=True)) == [
        [0, 1, 2]
    ]


def test_the_others_go_on_where_one_has_failed(tmp_path, monkeypatch, capsys):
    """Through the command: seed 0 fails again, seed 1 is finished, and the exit code tells."""
    step = ModuleExchange.eager_step

    def diverging(run, batch):
        if run.streams.seed == 0:
            run.ensemble.position.fill_(float("nan"))
        return step(run, batch)

    monkeypatch.setattr(ModuleExchange, "eager_step", diverging)
    with pytest.raises(NonFiniteEnergyError):
        run_recipe(tiny(), 0, tmp_path)
    run_recipe(tiny(), 1, tmp_path, budget=1e-9)
    settings = [word for setting in TINY for word in ("--set", setting)]
    words = [
        "run",
        NAME,
        "--seeds",
        "2",
        "--resume",
        "--device",
        "cpu",
        "--out",
        tmp_path,
        *settings,
    ]
    code, _, err = run_command(monkeypatch, capsys, *words)
    assert code == 2
    assert "1 of 2 runs failed" in " ".join(err.split())
    assert [RunFolder.of(tmp_path, NAME, seed).result["status"] for seed in (0, 1)] == [
        "failed",
        "finished",
    ]


def test_overwriting_on_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    config = tiny()
    jobs = [(config, seed) for seed in (0, 1)]
    first, second = run_together(jobs, tmp_path)
    assert first.finished
    assert second.finished
    before = [outcome(folder) for folder in (first, second)]
    write = RunFolder.write_text

    def full(folder, name, text):
        if name == "config.json" and folder.path.name == "seed=1.new":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, name, text)

    monkeypatch.setattr(RunFolder, "write_text", full)
    with pytest.raises(RunFolderError, match="No space left"):
        run_together(jobs, tmp_path, overwrite=True)
    assert same([outcome(folder) for folder in (first, second)], before)
    assert sorted(path.name for path in first.path.parent.iterdir()) == ["seed=0", "seed=1"]
