"""Checkpoints: what comes back is what was saved, whatever happens to the process, the disk or the
files in between.
"""

from __future__ import annotations

import builtins
import collections
import errno
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import random
import resource
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from torchrex.checkpoint import Checkpoint, Checkpoints, read
from torchrex.checkpoint.tree import DTYPES, encode, tensor_name
from torchrex.errors import CheckpointError, InvalidArgumentError

FILES = (
    "replica=0.safetensors",
    "replica=1.safetensors",
    "shared.safetensors",
    "manifest.json",
    "DONE",
)
SETTING = {"recipe": "figure1", "temperatures": (1.0, 10.0), "prior": {"precision": 25.0}}


def state_at(step, variant=0, size=40):
    """A state that nothing but `step` and `variant` decides."""
    return {
        "replicas": [
            {
                "layers.0.weight": torch.arange(float(size)) + 1000 * step + variant,
                "momentum": [torch.tensor(k), None],
            }
            for k in range(2)
        ],
        "rung_of": torch.tensor([step % 2, 1 - step % 2]),
        "counts": {"steps": step, "variant": variant, "rate": 0.1 * step, "limit": math.inf},
    }


def same(a, b):
    """Equal down to the bits and the types; a tuple may have become a list."""
    if isinstance(a, torch.Tensor):
        if not (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and b.device.type == "cpu"
        ):
            return False
        return bits(a) == bits(b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(b) is list and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (repr(a) == repr(b) if isinstance(a, float) else a == b)


def bits(tensor):
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def snapshot(folder):
    """Every file below a folder with its bytes, and every folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def reseal(path, change):
    """Change the manifest of a checkpoint, and DONE with it, as someone would who knows the format."""
    manifest = json.loads((path / "manifest.json").read_text())
    changed = change(manifest)
    data = json.dumps(manifest if changed is None else changed).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "DONE").write_text(hashlib.sha256(data).hexdigest() + "\n")


@pytest.fixture
def three(tmp_path):
    """Checkpoints of steps 1, 2 and 3."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, state_at(step), setting=SETTING)
    return checkpoints


@pytest.fixture
def warnings_of(caplog):
    caplog.set_level(logging.WARNING, logger="torchrex")
    return lambda: [record.getMessage() for record in caplog.records]


def assert_falls_back(checkpoints, step, lines, *words):
    """Step `step` is used, and one line says why."""
    loaded = checkpoints.load_newest()
    assert loaded.step == step
    assert same(state_at(step), loaded.state)
    (line,) = lines()
    assert "\n" not in line
    for word in ("step=000000003", f"using step={step:09d} instead", *words):
        assert word in line, line


# What comes back


def test_format_on_disk(three):
    path = three.folder / "step=000000003"
    assert sorted(os.listdir(path)) == sorted(FILES)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["schema"], manifest["version"], manifest["step"]) == (
        "torchrex.checkpoint",
        4,
        3,
    )
    for name in FILES[:3]:
        data = (path / name).read_bytes()
        assert manifest["files"][name] == {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    assert (path / "DONE").read_text().strip() == hashlib.sha256(
        (path / "manifest.json").read_bytes()
    ).hexdigest()
    first = load_file(path / "replica=0.safetensors")
    assert set(first) == {"/replicas/0/layers.0.weight", "/replicas/0/momentum/0"}
    assert torch.equal(first["/replicas/0/layers.0.weight"], torch.arange(40.0) + 3000)
    assert set(load_file(path / "shared.safetensors")) == {"/rung_of"}


def test_a_large_tensor_has_a_file_of_its_own(tmp_path):
    """4 MiB and more, wherever it is, but those of a replica stay together; so that files can be
    sent where size is limited.
    """
    large, small = (
        torch.arange(2**19, dtype=torch.float64),
        torch.arange(2**19 - 1, dtype=torch.float64),
    )
    state = {
        "replicas": [{"w": large}],
        "averages": [{"a": large + 1, "b": small}, {"c": large.float().repeat(2)}],
        "x": 1.5,
    }
    path = Checkpoints(tmp_path).save(1, state)
    assert set(load_file(path / "large=0.safetensors")) == {"/averages/0/a"}
    assert set(load_file(path / "large=1.safetensors")) == {"/averages/1/c"}
    assert set(load_file(path / "shared.safetensors")) == {"/averages/0/b"}
    assert sorted(os.listdir(path)) == [
        "DONE",
        *(
            "large=0.safetensors",
            "large=1.safetensors",
            "manifest.json",
            "replica=0.safetensors",
            "shared.safetensors",
        ),
    ]
    assert same(state, Checkpoints(tmp_path).load_newest().state)
    (path / "large=1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks large=1"):
        Checkpoints(tmp_path).load_newest()


def test_the_newest_comes_back(three):
    assert three.steps() == [1, 2, 3]
    loaded = three.load_newest(setting=SETTING)
    assert isinstance(loaded, Checkpoint)
    assert (loaded.step, loaded.path) == (3, three.folder / "step=000000003")
    assert same(state_at(3), loaded.state)
    loaded.state["rung_of"].zero_()  # its memory is its own and may be written
    assert same(state_at(3), three.load_newest().state)


def test_nothing_saved_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path / "absent")
    assert checkpoints.steps() == []
    assert checkpoints.load_newest(setting=SETTING) is None
    assert list(tmp_path.iterdir()) == []  # looking makes nothing


SHAPES = st.lists(st.integers(0, 3), max_size=3)
VIEWS = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: (
        tensor.T if tensor.dim() == 2 else tensor.movedim(0, -1) if tensor.dim() else tensor
    ),
    "strided": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.expand(2, *tensor.shape),
    "with grad": lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor,
}


@st.composite
def tensors(draw):
    """Any bits at all, NaN payloads and signed zeros among them."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    if dtype == torch.bool:
        made = torch.tensor(
            draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape))),
            dtype=dtype,
        )
    else:
        size = math.prod(shape) * dtype.itemsize
        raw = draw(st.binary(min_size=size, max_size=size))
        made = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return VIEWS[draw(st.sampled_from(sorted(VIEWS)))](made.reshape(shape))


KEYS = st.text(max_size=5) | st.sampled_from(
    [
        "a.b",
        "a/b",
        "a%2Fb",
        "/",
        "",
        "0",
        "..",
        "replicas",
        "dict",
        "tensor",
        "float",
        "__metadata__",
        "\ud800",
    ]
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    PLAIN | tensors(),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(KEYS, child, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(KEYS, TREES, max_size=4),
    st.dictionaries(st.text(max_size=3), PLAIN, max_size=3),
)
@example({"replicas": [torch.ones(2), {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}, {}]}, {})
@example(
    {
        "replicas": {"0": torch.ones(2)},
        "a%2Fb": torch.ones(1),
        "a/b": torch.zeros(2),
        "a": {"b": torch.ones(3)},
    },
    {},
)
@example(
    {
        "x": [math.nan, -math.inf, -0.0, 5e-324, 2**63, -(10**5000), True, 1, "\ud800\n"],
        "y": {"float": "inf"},
    },
    {"nan": math.nan},
)
@example({"?": torch.ones(1), "\ud800": torch.ones(2)}, {})
def test_round_trip(state, setting):
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        checkpoints.save(7, state, setting=setting)
        assert same(state, checkpoints.load_newest(setting=setting).state)


@given(st.lists(st.lists(KEYS | st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=2))
def test_two_paths_never_share_a_name(paths):
    first, second = (tuple(map(str, path)) for path in paths)
    assert (tensor_name(first) == tensor_name(second)) == (first == second)
    assert tensor_name(first).isascii()
    assert tensor_name(first) != "__metadata__"


def test_views_that_share_memory_come_back_apart(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    state = {
        "whole": whole,
        "row": whole[1],
        "again": whole,
        "columns": whole.T,
        "one": whole[2, 3],
    }
    Checkpoints(tmp_path).save(0, state)
    loaded = Checkpoints(tmp_path).load_newest().state
    assert same(state, loaded)
    loaded["whole"].zero_()
    assert torch.equal(loaded["row"], whole[1])


def test_tuples_and_other_mappings_become_lists_and_dicts(tmp_path):
    state = {
        "betas": (0.9, (1, 2)),
        "module": collections.OrderedDict(w=torch.ones(1)),
        "shape": torch.ones(2, 3).shape,
    }
    Checkpoints(tmp_path).save(0, state)
    loaded = Checkpoints(tmp_path).load_newest().state
    assert loaded["betas"] == [0.9, [1, 2]]
    assert type(loaded["module"]) is dict
    assert loaded["shape"] == [2, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_the_gpu_come_back_on_the_cpu(tmp_path):
    state = {
        "x": torch.randn(4, 5, device="cuda").T,
        "b": torch.ones(2, dtype=torch.bfloat16, device="cuda"),
    }
    Checkpoints(tmp_path).save(0, state)
    assert same(state, Checkpoints(tmp_path).load_newest().state)


def test_any_default_device_gives_cpu_tensors(tmp_path):
    state = {"x": torch.ones(3), "none": torch.ones(0, 2)}
    with torch.device("meta"):
        Checkpoints(tmp_path).save(0, state)
        loaded = Checkpoints(tmp_path).load_newest().state
    assert same(state, loaded)


# Which stay


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in range(1, 6):
        checkpoints.save(step, state_at(step))
        assert checkpoints.steps() == list(range(1, step + 1))[-keep:]
    assert sorted(os.listdir(tmp_path)) == [f"step={step:09d}" for step in checkpoints.steps()]


def test_order_is_by_number(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (5, 999_999_999, 1_000_000_000, 20_000_000_000):
        checkpoints.save(step, {"step": step})
    assert checkpoints.steps() == [1_000_000_000, 20_000_000_000]
    assert checkpoints.load_newest().state == {"step": 20_000_000_000}


def test_a_run_set_back_keeps_its_own_and_later_ones(three):
    """The damaged step 3 does not push out what the run that goes on from step 1 saves."""
    checkpoints = Checkpoints(three.folder, keep=1)
    checkpoints.save(2, state_at(2, variant=1))
    assert checkpoints.steps() == [2, 3]
    checkpoints.save(3, state_at(3, variant=1))
    assert checkpoints.steps() == [3]
    assert same(state_at(3, variant=1), checkpoints.load_newest().state)


def test_the_same_step_is_replaced(three):
    three.save(3, {"other": torch.ones(1)})
    assert three.steps() == [1, 2, 3]
    assert same({"other": torch.ones(1)}, three.load_newest().state)
    assert sorted(os.listdir(three.folder / "step=000000003")) == [
        "DONE",
        "manifest.json",
        "shared.safetensors",
    ]
    assert not list(three.folder.glob(".*"))


def test_other_things_in_the_folder_are_left_alone(three):
    (three.folder / "notes.txt").write_text("mine")
    (three.folder / "step=best").mkdir()
    (three.folder / "step=0000000004").mkdir()  # ten digits, but none of ours
    Checkpoints(three.folder, keep=1).save(5, state_at(5))
    assert set(os.listdir(three.folder)) == {
        "notes.txt",
        "step=000000005",
        "step=0000000004",
        "step=best",
    }


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Checkpoints("x", keep=0), "keep must"),
        (lambda: Checkpoints("x").save(-1, {}), "step must"),
    ],
)
def test_impossible_arguments(call, words):
    with pytest.raises(InvalidArgumentError, match=words):
        call()


# Crashes


def assert_all_are_whole(folder):
    """Whatever has a DONE passes every check."""
    for done in folder.glob("*step=*/DONE"):
        read(done.parent, int(done.parent.name.removesuffix(".old").rpartition("=")[2]), None)


def in_child(function, *arguments):
    """A forked process, so that it can be killed or limited while it uses the real thing."""
    process = multiprocessing.get_context("fork").Process(
        target=function, args=arguments, daemon=True
    )
    process.start()
    return process


def save_forever(folder, first, reports):
    checkpoints = Checkpoints(folder, keep=1)
    for step in itertools.count(first):
        for variant in (0, 1):  # the second replaces the first
            checkpoints.save(step, state_at(step, variant, size=30_000))
            reports.send_bytes(f"{step} {variant}".encode())


def test_killed_at_random_moments(tmp_path):
    """With keep=1 and every step replaced, there is no second checkpoint to hide behind."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    moments = random.Random(0)
    newest = (0, 0)
    checkpoints.save(0, state_at(0, size=30_000))
    for _ in range(20):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = in_child(save_forever, tmp_path, newest[0] + 1, sender)
        sender.close()
        assert receiver.poll(10), "the child saved nothing"
        time.sleep(moments.uniform(0.0, 0.05))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        returned = newest
        while receiver.poll():
            try:
                returned = tuple(map(int, receiver.recv_bytes().split()))
            except EOFError:
                break
        receiver.close()
        assert_all_are_whole(tmp_path)
        loaded = checkpoints.load_newest()
        newest = (loaded.step, loaded.state["counts"]["variant"])
        assert newest >= returned, "a save had returned, but its checkpoint is gone"
        assert same(state_at(*newest, size=30_000), loaded.state)
    checkpoints.save(newest[0] + 1, state_at(0))
    assert os.listdir(tmp_path) == [f"step={newest[0] + 1:09d}"]


class Faults:
    """Lets `happen` happen at the n-th call that changes the disk, and at all later ones if
    `lasting`.

    A write that is chosen gets half of its bytes onto the disk before.
    """

    def __init__(self, monkeypatch, happen=lambda: None, at=-1, lasting=False):
        self.happen, self.at, self.lasting, self.calls = happen, at, lasting, 0
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, functools.partial(self.call, getattr(os, name)))
        opened = builtins.open
        monkeypatch.setattr(
            builtins, "open", lambda *words, **more: self.watch(opened(*words, **more))
        )

    def call(self, function, *arguments, **more):
        self.calls += 1
        if self.calls == self.at or (self.lasting and self.calls > self.at > 0):
            self.happen()
        return function(*arguments, **more)

    def watch(self, file):
        if not isinstance(file, io.BufferedWriter):
            return file
        faults = self

        class HalfWriter(io.BufferedWriter):
            def write(self, data):
                super().write(data[: len(data) // 2])
                self.flush()
                return faults.call(super().write, data[len(data) // 2 :])

        return HalfWriter(file.detach())


def full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted():
    raise KeyboardInterrupt


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def save_next(folder, step):
    return Checkpoints(folder, keep=1).save(step, state_at(step, variant=9))


def start(folder):
    """One checkpoint, and the traces of two crashes."""
    Checkpoints(folder).save(4, state_at(4))
    for name in (".step=000000005.part", "step=000000003"):
        (folder / name).mkdir()
        (folder / name / "shared.safetensors").write_bytes(b"half")


def n_calls(folder, step):
    start(folder)
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        save_next(folder, step)
    assert os.listdir(folder) == [f"step={step:09d}"]
    assert faults.calls > 20
    return faults.calls


STEPS = pytest.mark.parametrize("step", [4, 5], ids=["replaced", "next"])


@STEPS
@pytest.mark.parametrize("happen", [full_disk, interrupted])
def test_every_call_that_fails_leaves_the_folder_as_it_was(tmp_path, step, happen):
    outcomes = collections.Counter()
    for at in range(1, n_calls(tmp_path / "count", step) + 1):
        folder = tmp_path / str(at)
        start(folder)
        before = snapshot(folder / "step=000000004")
        error = None
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, happen, at)
            try:
                save_next(folder, step)
            except BaseException as raised:
                error = raised
        if happen is interrupted:
            assert isinstance(error, KeyboardInterrupt)
        elif error is not None:
            assert isinstance(error, CheckpointError)
            assert "No space left on device" in str(error)
            assert "\n" not in str(error)
        assert_all_are_whole(folder)
        loaded = Checkpoints(folder).load_newest()
        if (
            loaded.state["counts"]["variant"] == 9
        ):  # the fault came after it was complete, while others were removed
            outcomes["new"] += 1
            assert error is None or happen is interrupted
            assert same(state_at(step, variant=9), loaded.state)
        else:
            outcomes["as before"] += 1
            assert error is not None
            assert snapshot(folder / "step=000000004") == before
            assert same(state_at(4), loaded.state)
            assert Checkpoints(folder).steps() == [4]
            if happen is full_disk:
                assert not (folder / "step=000000005").exists()
        save_next(folder, 6)
        assert os.listdir(folder) == ["step=000000006"]
    assert outcomes["new"] > 0
    assert outcomes["as before"] > 15


@STEPS
def test_a_disk_that_stays_bad(tmp_path, step):
    for at in range(1, n_calls(tmp_path / "count", step) + 1):
        folder = tmp_path / str(at)
        start(folder)
        failed = False
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, full_disk, at, lasting=True)
            try:
                save_next(folder, step)
            except CheckpointError:
                failed = True
        assert_all_are_whole(folder)
        loaded = Checkpoints(folder).load_newest()
        assert same(state_at(4), loaded.state) or same(state_at(step, variant=9), loaded.state)
        assert failed or loaded.state["counts"]["variant"] == 9
        save_next(folder, 6)
        assert os.listdir(folder) == ["step=000000006"]


def save_and_be_killed(folder, step, at):
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, killed, at)
        save_next(folder, step)


@STEPS
def test_killed_at_every_call(tmp_path, step):
    seen = set()
    for at in range(1, n_calls(tmp_path / "count", step) + 1):
        folder = tmp_path / str(at)
        start(folder)
        child = in_child(save_and_be_killed, folder, step, at)
        child.join(20)
        assert child.exitcode == -signal.SIGKILL
        assert_all_are_whole(folder)
        loaded = Checkpoints(folder).load_newest()
        variant = loaded.state["counts"]["variant"]
        seen.add(variant)
        assert same(state_at(step if variant == 9 else 4, variant), loaded.state)
        assert Checkpoints(folder).steps() in ([4], [5], [4, 5])
        save_next(folder, 6)
        assert os.listdir(folder) == ["step=000000006"]
    assert seen == {0, 9}


def test_a_crash_in_the_first_save_leaves_none(tmp_path):
    folder = tmp_path / "checkpoints"
    child = in_child(save_and_be_killed, folder, 5, 8)
    child.join(20)
    assert child.exitcode == -signal.SIGKILL
    assert os.listdir(folder) == [".step=000000005.part"]
    assert Checkpoints(folder).load_newest() is None
    save_next(folder, 5)
    assert os.listdir(folder) == ["step=000000005"]


def test_everything_is_synced_before_it_is_named(tmp_path, monkeypatch):
    """What a power cut leaves cannot be tried here, but the order of calls that decides it can be
    read.
    """
    order = []
    calls = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor):
        order.append(
            ("fsync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        )
        calls["fsync"](descriptor)

    def renaming(name, source, target):
        order.append((name, os.path.relpath(target, tmp_path)))
        calls[name](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", functools.partial(renaming, "rename"))
    monkeypatch.setattr(os, "replace", functools.partial(renaming, "replace"))
    Checkpoints(tmp_path / "new").save(5, state_at(5))
    part, complete = "new/.step=000000005.part", "new/step=000000005"
    assert order == [
        ("fsync", "."),
        *(("fsync", f"{part}/{name}") for name in FILES[:-1]),
        ("fsync", part),
        ("rename", complete),
        ("fsync", "new"),
        ("fsync", f"{complete}/.DONE.part"),
        ("replace", f"{complete}/DONE"),
        ("fsync", complete),
    ]


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    fsync = os.fsync

    def fsync_files_only(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_files_only)
    assert save_next(tmp_path, 5).name == "step=000000005"


# A disk that does not take it


def save_with_limit(folder, limit, answer):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        Checkpoints(folder).save(4, state_at(4, size=10_000))
        answer.send("saved")
    except CheckpointError as error:
        answer.send(str(error))


@pytest.mark.parametrize("limit", [0, 10, 300, 20_000, 40_100])
def test_no_room_for_a_file(three, limit):
    before = snapshot(three.folder)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = in_child(save_with_limit, three.folder, limit, sender)
    sender.close()
    message = receiver.recv()
    child.join()
    assert "cannot save" in message
    assert "step=000000004" in message
    assert os.strerror(errno.EFBIG) in message
    assert "\n" not in message
    assert snapshot(three.folder) == before
    assert same(state_at(3), three.load_newest().state)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_no_folder_there(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot save .*choose another folder"):
        Checkpoints(tmp_path / place).save(1, state_at(1))
    assert snapshot(tmp_path) == {"file": b"in the way"}


def test_a_file_where_the_checkpoint_goes(three):
    (three.folder / "step=000000004").write_text("mine")
    before = snapshot(three.folder)
    with pytest.raises(CheckpointError, match="Not a directory"):
        three.save(4, state_at(4))
    assert snapshot(three.folder) == before


def message_without_rights(folder, use, answer):
    os.chdir(folder)
    if os.geteuid() == 0:
        os.setuid(65534)  # nobody
    try:
        use(Checkpoints("."))
        answer.send("done")
    except CheckpointError as error:
        answer.send(str(error))


@pytest.mark.parametrize(
    ("closed", "use", "words"),
    [
        (
            ".",
            lambda checkpoints: checkpoints.save(4, state_at(4)),
            "cannot save step=000000004 (Permission denied)",
        ),
        (
            "step=000000003",
            lambda checkpoints: checkpoints.load_newest(),
            "cannot look into step=000000003 (Permission denied)",
        ),
    ],
    ids=["save", "load"],
)
def test_no_permission(three, closed, use, words):
    before = snapshot(three.folder)
    mode = (three.folder / closed).stat().st_mode
    (three.folder / closed).chmod(0o555 if closed == "." else 0)
    try:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = in_child(message_without_rights, three.folder, use, sender)
        sender.close()
        message = receiver.recv()
        child.join()
    finally:
        (three.folder / closed).chmod(mode)
    assert words in message
    assert snapshot(three.folder) == before


def test_a_folder_that_is_a_file_cannot_be_read(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot look into"):
        Checkpoints(tmp_path / "file").load_newest()


# Damage


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere(three, warnings_of, caplog, name):
    path = three.folder / "step=000000003" / name
    data = path.read_bytes()
    places = random.Random(name)
    for place in (0, 1, 7, 8, 9, len(data) - 1, *(places.randrange(len(data)) for _ in range(20))):
        flipped = bytearray(data)
        flipped[place] ^= 1 << places.randrange(8)
        path.write_bytes(flipped)
        caplog.clear()
        assert_falls_back(three, 2, warnings_of, name, "checksum")
    path.write_bytes(data)
    caplog.clear()
    assert three.load_newest().step == 3
    assert not warnings_of()


@pytest.mark.parametrize("name", FILES)
def test_truncated_or_too_long(three, warnings_of, caplog, name):
    path = three.folder / "step=000000003" / name
    data = path.read_bytes()
    for damaged in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0"):
        path.write_bytes(damaged)
        caplog.clear()
        words = "too long" if len(damaged) > len(data) else "truncated"
        assert_falls_back(
            three, 2, warnings_of, name, words if name.endswith("safetensors") else "checksum"
        )


@pytest.mark.parametrize("name", FILES[:-1])
def test_a_missing_file(three, warnings_of, name):
    (three.folder / "step=000000003" / name).unlink()
    assert_falls_back(three, 2, warnings_of, f"lacks {name}")


def test_without_done_it_never_was_complete(three, warnings_of):
    (three.folder / "step=000000003" / "DONE").unlink()
    assert three.steps() == [1, 2]
    assert three.load_newest().step == 2
    assert not warnings_of()


def test_a_folder_in_place_of_a_file(three, warnings_of):
    path = three.folder / "step=000000003" / "shared.safetensors"
    path.unlink()
    path.mkdir()
    assert_falls_back(
        three, 2, warnings_of, "shared.safetensors that cannot be read (Is a directory)"
    )


def test_two_damaged_in_one_line_and_all_damaged_is_an_error(three, warnings_of):
    (three.folder / "step=000000003" / "manifest.json").unlink()
    (three.folder / "step=000000002" / "replica=1.safetensors").write_bytes(b"")
    assert_falls_back(
        three,
        1,
        warnings_of,
        "lacks manifest.json",
        "step=000000002 has a truncated replica=1.safetensors",
    )
    (three.folder / "step=000000001" / "shared.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint in .* can be used: .*step=000000003.*step=000000001 lacks",
    ) as error:
        three.load_newest()
    assert "\n" not in str(error.value)
    assert len(warnings_of()) == 1


def test_a_checkpoint_under_another_name(three, warnings_of):
    os.rename(three.folder / "step=000000003", three.folder / "step=000000009")
    assert three.load_newest().step == 2
    assert "step=000000009 is that of step 3, not of step 9" in warnings_of()[0]


def test_files_of_another_checkpoint(three, warnings_of):
    name = "replica=0.safetensors"
    (three.folder / "step=000000003" / name).write_bytes(
        (three.folder / "step=000000002" / name).read_bytes()
    )
    assert_falls_back(three, 2, warnings_of, "checksum")


# Content that means harm


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def pickles(marker):
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"x": Bomb(marker)}, zipped)
    torch.save({"x": Bomb(marker)}, legacy, _use_new_zipfile_serialization=False)
    bare = {
        f"protocol {protocol}": pickle.dumps(Bomb(marker), protocol) for protocol in (2, 3, 4, 5)
    }
    return {"torch.save": zipped.getvalue(), "torch.save, legacy": legacy.getvalue(), **bare}


@pytest.mark.parametrize("sealed", [False, True], ids=["dropped in", "with matching checksums"])
@pytest.mark.parametrize(
    "kind",
    ["torch.save", "torch.save, legacy", *(f"protocol {protocol}" for protocol in (2, 3, 4, 5))],
)
def test_a_pickle_is_refused_and_not_executed(three, tmp_path, warnings_of, kind, sealed):
    marker = tmp_path / "executed"
    data = pickles(marker)[kind]
    torch.load(io.BytesIO(data), weights_only=False) if "torch" in kind else pickle.loads(data)
    assert marker.exists()  # the bomb is live
    marker.unlink()
    path = three.folder / "step=000000003"
    (path / "replica=1.safetensors").write_bytes(data)
    if sealed:
        entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        reseal(path, lambda manifest: manifest["files"].update({"replica=1.safetensors": entry}))
    assert_falls_back(
        three,
        2,
        warnings_of,
        "pickle in place of replica=1.safetensors",
        "refused",
        "nothing in it was executed",
    )
    assert not marker.exists()


def put_tensors(path, name, named):
    """Other tensors, with the right checksums."""
    data = save(named)
    (path / name).write_bytes(data)
    reseal(
        path,
        lambda manifest: manifest["files"].update(
            {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
        ),
    )


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({}, "has no 'int64' tensor of shape [2] for state['rung_of']"),
        ({"/rung_of": torch.zeros(2)}, "has no 'int64' tensor"),
        ({"/rung_of": torch.zeros(3, dtype=torch.int64)}, "has no 'int64' tensor"),
        (
            {"/rung_of": torch.zeros(2, dtype=torch.int64), "/more": torch.zeros(1)},
            "not in its manifest.json",
        ),
    ],
)
def test_tensors_and_manifest_disagree(three, warnings_of, named, words):
    put_tensors(three.folder / "step=000000003", "shared.safetensors", named)
    assert_falls_back(three, 2, warnings_of, words)


def test_safetensors_that_are_none(three, warnings_of):
    data = b'\x08\0\0\0\0\0\0\0{"a": 12'
    path = three.folder / "step=000000003"
    (path / "shared.safetensors").write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    reseal(path, lambda manifest: manifest["files"].update({"shared.safetensors": entry}))
    assert_falls_back(three, 2, warnings_of, "not in safetensors format")


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: [],
        lambda manifest: manifest.pop("state") and None,
        lambda manifest: manifest.update(state=[]),
        lambda manifest: manifest.update(state={"dict": []}),
        lambda manifest: manifest.update(
            state={"dict": {"replicas": [0, 0], "x": {"float": "1e9"}}}
        ),
        lambda manifest: manifest.update(
            state={"dict": {"replicas": [0, 0], "x": {"call": "os.system"}}}
        ),
        lambda manifest: manifest.update(
            state={"dict": {"replicas": [0, 0], "x": {"int": "0xg\n"}}}
        ),
        lambda manifest: manifest.update(files=None),
        lambda manifest: manifest["files"].pop("shared.safetensors") and None,
        lambda manifest: manifest["files"].update(
            {"../../secret.safetensors": manifest["files"]["shared.safetensors"]}
        ),
        lambda manifest: manifest["files"].update({"shared.safetensors": {"size": 1}}),
        lambda manifest: manifest["files"].update(
            {"shared.safetensors": {**manifest["files"]["shared.safetensors"], "path": "/etc"}}
        ),
        lambda manifest: manifest["state"]["dict"]["replicas"].append(
            {"tensor": {"dtype": "float32", "shape": [1]}}
        ),
        lambda manifest: manifest["state"]["dict"].update(
            x={"tensor": {"dtype": "float32", "shape": [1], "file": "../x"}}
        ),
    ],
)
def test_a_manifest_of_another_form(three, warnings_of, change):
    reseal(three.folder / "step=000000003", change)
    assert_falls_back(three, 2, warnings_of)


def test_no_manifest_can_point_outside(three, tmp_path, warnings_of):
    """A tensor file beside the run, listed with its right checksum, is not opened for it."""
    outside = tmp_path / "run" / "outside.safetensors"
    save_file({"/rung_of": torch.tensor([7, 7])}, outside)
    data = outside.read_bytes()
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def redirect(manifest):
        manifest["files"]["../../outside.safetensors"] = entry
        del manifest["files"]["shared.safetensors"]

    reseal(three.folder / "step=000000003", redirect)
    assert_falls_back(three, 2, warnings_of, "lists other files")


@pytest.mark.parametrize(
    "key",
    [
        "..",
        "../..",
        "../../evil",
        "/tmp/evil",
        "a/../../b",
        "~",
        "replica=0.safetensors",
        "DONE",
        "\0",
        "x\n",
    ],
)
def test_keys_name_no_files(tmp_path, key):
    state = {key: torch.ones(1), "replicas": [{key: {key: torch.zeros(1)}}]}
    path = Checkpoints(tmp_path / "a" / "b").save(1, state, setting={key: key})
    assert same(state, Checkpoints(tmp_path / "a" / "b").load_newest(setting={key: key}).state)
    assert sorted(os.listdir(path)) == [
        "DONE",
        "manifest.json",
        "replica=0.safetensors",
        "shared.safetensors",
    ]
    assert [os.listdir(folder) for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")] == [
        ["a"],
        ["b"],
        [path.name],
    ]


# Another version, another setting


@pytest.mark.parametrize(
    ("change", "words"), [({"version": 1}, "version 1,"), ({"schema": "other"}, "schema 'other'")]
)
def test_another_schema(three, warnings_of, change, words):
    reseal(three.folder / "step=000000003", lambda manifest: manifest.update(change))
    with pytest.raises(
        CheckpointError, match=r"understands 'torchrex.checkpoint' version 4; "
    ) as error:
        three.load_newest()
    assert words in str(error.value)
    assert not warnings_of()


def test_another_setting_names_what_differs(three, warnings_of):
    given_now = {
        "recipe": "figure1",
        "temperatures": [1.0, 12.0],
        "prior": {"precision": "x\n" * 500},
        "seed": 3,
    }
    with pytest.raises(CheckpointError) as error:
        three.load_newest(setting=given_now)
    message = str(error.value)
    assert "temperatures.1 was 10.0 and is now 12.0" in message
    assert "prior.precision was 25.0 and is now 'x\\nx\\n" in message
    assert "seed was absent and is now 3" in message
    assert "recipe" not in message.partition("another setting")[2]
    assert "\n" not in message
    assert len(message) < 600
    assert not warnings_of()


def test_many_differences_stay_one_short_line(three):
    with pytest.raises(CheckpointError, match="; and 98 more"):
        three.load_newest(setting={f"key{k}": k for k in range(100)})


def test_the_same_setting_written_otherwise(tmp_path):
    Checkpoints(tmp_path).save(1, {}, setting={"a": (1, math.nan), "b": {"c": math.inf}})
    assert (
        Checkpoints(tmp_path).load_newest(setting={"b": {"c": math.inf}, "a": [1.0, math.nan]}).step
        == 1
    )
    assert Checkpoints(tmp_path).load_newest().step == 1
    with pytest.raises(CheckpointError, match=r"a was \[1, nan\] and is now \[1\]"):
        Checkpoints(tmp_path).load_newest(setting={"b": {"c": math.inf}, "a": [1]})


# What cannot be saved


def loop():
    tree = {}
    tree["x"] = [tree]
    return tree


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"x": object()}, ["state['replicas'][0]['x']", "of type object"]),
        ({"x": [1, {2}]}, ["state['replicas'][0]['x'][1]", "{2} of type set"]),
        ({"x": {3: 1}}, ["state['replicas'][0]['x']", "key 3 is not a string"]),
        ({"x": 1j}, ["of type complex"]),
        ({"x": np.float64(1.0)}, ["of type float64"]),
        ({"x": np.ones(500)}, ["of type ndarray"]),
        ({"x": torch.ones(1, dtype=torch.complex128)}, ["complex128", "float32"]),
        ({"x": torch.eye(2).to_sparse()}, ["sparse_coo"]),
        ({"x": torch.ones(1, device="meta")}, ["meta"]),
        (loop(), ["nested more than 100 deep"]),
    ],
)
def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path, bad, words):
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path / "new").save(1, {"a": torch.ones(1), "replicas": [bad]})
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_setting_holds_no_tensors(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"setting\['x'\]\['y'\]: a setting holds plain values"
    ):
        Checkpoints(tmp_path).save(1, {}, setting={"x": {"y": torch.ones(1)}})
    assert list(tmp_path.iterdir()) == []


def test_a_deep_tree_within_the_limit_is_saved(tmp_path):
    tree = functools.reduce(lambda child, _: [child], range(98), torch.ones(1))
    Checkpoints(tmp_path).save(1, {"x": tree})
    assert same({"x": tree}, Checkpoints(tmp_path).load_newest().state)


def test_the_json_form_is_plain_json():
    encoded, found = encode("state", {"a": [1, math.inf, {"float": "inf"}], "b": torch.ones(2)})
    assert json.loads(json.dumps(encoded, allow_nan=False)) == encoded
    assert list(found) == [("b",)]
    assert encoded["dict"]["a"] == [1, {"float": "inf"}, {"dict": {"float": "inf"}}]
