"""The real files that are mutated, how each kind is read, and how its checksums are made right
again after a mutation.

`look` reads what lies in a folder, as a user's call would, and gives something that can be
compared. A kind whose files have no checksum, or one that was made right again, may load as
something else: it must then be sound, and `look` checks that as well.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from torchrex.checkpoint import Checkpoints
from torchrex.experiments import get_recipe, run_recipe
from torchrex.experiments.folder import RunFolder
from torchrex.posterior import Draws, DrawStore
from torchrex.recording import read_log
from torchrex.report.compare import compare_folders, lines
from torchrex.report.doctor import as_text, diagnose
from torchrex.report.page.build import page_of
from torchrex.report.reader import load_run
from torchrex.vision.data import ImageSet, load_images, save_images
from torchrex.vision.data.sources import SOURCES, Source

SETTING = {"seed": 3, "lr": 0.1, "rungs": [0.0, math.inf]}


@dataclass(frozen=True)
class Kind:
    """One kind of file: a folder of specimens, which of them are mutated, and how they are read."""

    name: str
    folder: Path
    files: tuple[str, ...]
    look: Callable[[Path], Any]
    seal: Callable[[Path, str], None] | None = (
        None  # makes the checksums right after a mutation of that file
    )
    may_differ: bool = (
        False  # no checksum covers it, so it may load as something else that is sound
    )
    optional: bool = False  # a run without these files is one as well
    specials: bool = True  # pipes, devices, links and pickles in its place
    weight: int = 1


# Checkpoints


def checkpoint_state() -> dict[str, Any]:
    torch.manual_seed(0)
    replicas = [
        {
            "model": {"w": torch.randn(4, 3), "n": torch.tensor(k)},
            "rng": torch.arange(64, dtype=torch.uint8),
        }
        for k in range(2)
    ]
    rest = {
        "rung_of": torch.tensor([1, 0]),
        "F": 2.5,
        "big": 2**70,
        "bad": math.nan,
        "words": ["a", None, True, -3],
        "deep": {"x": {}},
    }
    return {"replicas": replicas, "run": rest, "averages": [], "seconds": 1.5}


def look_at_checkpoint(folder: Path) -> Any:
    found = Checkpoints(folder).load_newest(setting=SETTING)
    assert found is None or found.step == 30
    return None if found is None else plain(found.state)


def seal_checkpoint(folder: Path, name: str) -> None:
    manifest = folder / "step=000000030" / "manifest.json"
    if not name.endswith("manifest.json"):
        about = json.loads(manifest.read_bytes())
        data = (folder / name).read_bytes()
        about["files"][Path(name).name] = {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        manifest.write_text(json.dumps(about))
    (manifest.parent / "DONE").write_text(hashlib.sha256(manifest.read_bytes()).hexdigest() + "\n")


# Run folders


def look_at_run(folder: Path) -> Any:
    """Everything that reads a run folder: the reports, and the runner before it resumes."""
    run = load_run(folder)
    for problem in run.problems:
        assert problem.isprintable(), problem
    RunFolder(folder).result, RunFolder(folder).config, RunFolder(folder).finished
    seen = {
        "config": run.config,
        "result": run.result,
        "problems": run.problems,
        "name": run.name,
        "status": run.status,
    }
    draws = None if run.draws is None else vars(run.draws)
    return plain({**seen, "draws": draws, "trace": run.trace})


def look_at_views(folder: Path) -> Any:
    """What a person sees of a run: doctor, the page, and the comparison with itself."""
    run = load_run(folder)
    said = [words for pair in as_text(diagnose(run, quick=True)) for words in pair]
    page = page_of([run], folder / "page.html", title="fuzz", doctor_seconds=0.0)
    page.encode()
    assert page.count("<script>") == 1, "a script that is not the page's own"
    assert "<img" not in page
    if run.status == "finished":
        for comparison in compare_folders([folder, folder]):
            said += lines(comparison, 100)
    for words in said:
        assert words.isprintable(), repr(words)
    return [words.replace(str(folder), "FOLDER") for words in said]


def look_at_trace(folder: Path) -> Any:
    return plain(RunFolder(folder).trace())


def look_at_draws(folder: Path) -> Any:
    return plain(vars(Draws.load(folder / "draws.safetensors")))


# Stores of draws


def look_at_store(folder: Path) -> Any:
    store = DrawStore.load(folder)
    return plain([store.capacity, store.n_seen, store.draws, list(store)])


def seal_store(folder: Path, name: str) -> None:
    if name == "index.json":
        return
    index = json.loads((folder / "index.json").read_bytes())
    data = (folder / name).read_bytes()
    for draw in index["draws"]:
        if draw["file"] == name:
            draw.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / "index.json").write_text(json.dumps(index))


# Image sets


TINY = Source("cifar10", {"train": (2, 1), "test": (1, 1)}, SOURCES["cifar10"].archives)


def look_at_cache(folder: Path) -> Any:
    return plain(vars(load_images("cifar10", folder)))


def seal_cache(folder: Path, name: str) -> None:
    """A byte of a picture changes, and its checksum with it."""
    path = folder / name
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    body = bytearray(data[8 + length :])
    about = json.loads(table["__metadata__"]["torchrex"])
    for each in about["sha256"]:
        begin, end = table[each]["data_offsets"]
        about["sha256"][each] = hashlib.sha256(body[begin:end]).hexdigest()
    table["__metadata__"]["torchrex"] = json.dumps(about)
    head = json.dumps(table).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(body))


def look_at_log(folder: Path) -> Any:
    return read_log(folder / "log.jsonl")


def plain(value: Any) -> Any:
    """Something that compares bit by bit; whatever is not a plain value of ours is a finding."""
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    assert value is None or type(value) in (bool, int, float, str), type(value)
    return repr(value) if isinstance(value, float) else value


def make_kinds(root: Path, stack: ExitStack) -> list[Kind]:
    """All kinds, with real files below `root`. What the small image set needs is patched until
    `stack` is closed.
    """
    saved = Checkpoints(root / "checkpoint")
    saved.save(30, checkpoint_state(), setting=SETTING)
    inner = "step=000000030"
    tensors = tuple(f"{inner}/{name}.safetensors" for name in ("replica=0", "replica=1", "shared"))
    config = replace(get_recipe("figure1/case1-naive"), n_steps=60, n_runs=3, thin=2)
    density = run_recipe(config, 3, root / "density").path
    network = _network(root)
    store = DrawStore(root / "store", capacity=3)
    for step in range(5):
        torch.manual_seed(step)
        store.add(nn.Linear(3, 2), step=step)
    names = tuple(draw.name for draw in sorted((root / "store").glob("draw-*")))
    stack.enter_context(mock.patch.dict(SOURCES, {"cifar10": TINY}))
    cache = _image_set(root)
    (root / "log").mkdir()
    rows = [{"kind": "start", "step": 0, "name": "x", "temperatures": [1.0, 2.0]}]
    rows += [
        {"kind": "steps", "first": k, "step": k + 9, "energy": [1.5, None], "accepted": [1]}
        for k in range(1, 50, 10)
    ]
    (root / "log" / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = ("config.json", "result.json")
    return [
        Kind(
            "checkpoint",
            root / "checkpoint",
            (f"{inner}/manifest.json", f"{inner}/DONE", *tensors),
            look_at_checkpoint,
            weight=3,
        ),
        Kind(
            "sealed checkpoint",
            root / "checkpoint",
            (f"{inner}/manifest.json",) * 3 + tensors,
            look_at_checkpoint,
            seal_checkpoint,
            True,
            weight=4,
        ),
        Kind("run of a density", density, runs, look_at_run, may_differ=True, weight=2),
        Kind("run of a network", network, runs, look_at_run, may_differ=True, weight=2),
        Kind(
            "draws and trace of a run",
            density,
            ("draws.safetensors", "trace.safetensors"),
            look_at_run,
            optional=True,
        ),
        Kind("trace of a network", network, ("trace.safetensors",), look_at_run, optional=True),
        Kind(
            "views of a density",
            density,
            (*runs, "draws.safetensors", "trace.safetensors"),
            look_at_views,
            may_differ=True,
        ),
        Kind(
            "views of a network",
            network,
            (*runs, "trace.safetensors"),
            look_at_views,
            may_differ=True,
        ),
        Kind("draws", density, ("draws.safetensors",), look_at_draws),
        Kind("trace", network, ("trace.safetensors",), look_at_trace),
        Kind(
            "store",
            root / "store",
            ("index.json", "index.json", *names),
            look_at_store,
            may_differ=True,
            weight=2,
        ),
        Kind("sealed store", root / "store", names, look_at_store, seal_store, True),
        Kind("cache", cache, ("cifar10.safetensors",), look_at_cache),
        Kind("sealed cache", cache, ("cifar10.safetensors",), look_at_cache, seal_cache, True),
        Kind("log", root / "log", ("log.jsonl",), look_at_log, may_differ=True),
    ]


def _network(root: Path) -> Path:
    recipe = get_recipe("digits/resghmc")
    config = replace(recipe, epochs=2, burn_in_epochs=1, hidden=4, checkpoint_every=20)
    return run_recipe(config, 1, root / "network").path


def _image_set(root: Path) -> Path:
    """A cache of five random images."""
    random = np.random.default_rng(0)
    arrays = {"train_labels": np.array([0, 1, 0]), "test_labels": np.array([1, 0])}
    for part, n in (("train", 3), ("test", 2)):
        arrays[f"{part}_images"] = random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save_images(ImageSet("cifar10", 2, **tensors, provenance="made for tests"), root / "cache")
    return root / "cache"
