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

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from torchrex.checkpoint import Checkpoint, Checkpoints, printable, read
from torchrex.checkpoint.folder import VERSION
from torchrex.checkpoint.tree import DTYPES
from torchrex.errors import CheckpointError

TENSORS = ("replica=0.safetensors", "replica=1.safetensors", "shared.safetensors")
FILES = (*TENSORS, "manifest.json", "DONE")
SETTING = {"recipe": "figure1", "temperatures": (1.0, 10.0), "prior": {"precision": 25.0}}


def state_at(step, variant=0, size=40):
    """A state that nothing but `step` and `variant` decides."""
    weight = torch.arange(float(size)) + 1000 * step + variant
    return {
        "replicas": [{"layers.0.weight": weight, "m": [torch.tensor(k), None]} for k in range(2)],
        "rung_of": torch.tensor([step % 2, 1 - step % 2]),
        "counts": {"steps": step, "variant": variant, "rate": 0.1 * step, "limit": math.inf},
    }


def same(a, b):
    """Equal down to the bits and the types; a tuple may have become a list."""
    if isinstance(a, torch.Tensor):
        form = (a.dtype, a.shape, "cpu")
        return (
            isinstance(b, torch.Tensor)
            and form == (b.dtype, b.shape, b.device.type)
            and (bits(a) == bits(b))
        )
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
    paths = folder.rglob("*")
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


def reseal(path, change):
    """Change the manifest of a checkpoint, and DONE with it."""
    manifest = json.loads((path / "manifest.json").read_text())
    changed = change(manifest)
    data = json.dumps(manifest if changed is None else changed).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "DONE").write_text(hashlib.sha256(data).hexdigest() + "\n")


def put(path, name, data):
    """Other bytes in a file, with the right checksums."""
    (path / name).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    reseal(path, lambda manifest: manifest["files"].update({name: entry}))


@pytest.fixture
def three(tmp_path):
    """Checkpoints of steps 1, 2 and 3."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, state_at(step), setting=SETTING)
    return checkpoints


@pytest.fixture
def third(three):
    return three.folder / "step=000000003"


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


def test_format_on_disk(third):
    assert sorted(os.listdir(third)) == sorted(FILES)
    data = (third / "manifest.json").read_bytes()
    manifest = json.loads(data)
    assert (manifest["schema"], manifest["version"]) == ("torchrex.checkpoint", VERSION)
    assert manifest["step"] == 3
    assert manifest["setting"]["dict"]["recipe"] == "figure1"
    for name in TENSORS:
        content = (third / name).read_bytes()
        entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert manifest["files"][name] == entry
    assert (third / "DONE").read_text().strip() == hashlib.sha256(data).hexdigest()
    first = load_file(third / "replica=0.safetensors")
    assert set(first) == {"/replicas/0/layers.0.weight", "/replicas/0/m/0"}
    assert torch.equal(first["/replicas/0/layers.0.weight"], torch.arange(40.0) + 3000)
    assert set(load_file(third / "shared.safetensors")) == {"/rung_of"}


def test_a_large_tensor_has_a_file_of_its_own(tmp_path):
    """4 MiB and more, wherever it is; those of a replica stay together."""
    large = torch.arange(2**19, dtype=torch.float64)
    averages = [{"a": large + 1, "b": large[1:]}, {"c": large.float().repeat(2)}]
    state = {"replicas": [{"w": large}], "averages": averages, "x": 1.5}
    path = Checkpoints(tmp_path).save(1, state)
    assert set(load_file(path / "large=0.safetensors")) == {"/averages/0/a"}
    assert set(load_file(path / "large=1.safetensors")) == {"/averages/1/c"}
    assert set(load_file(path / "shared.safetensors")) == {"/averages/0/b"}
    assert len(os.listdir(path)) == 6
    assert same(state, Checkpoints(tmp_path).load_newest().state)
    (path / "large=1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no large=1"):
        Checkpoints(tmp_path).load_newest()


def test_the_newest_comes_back(three, third, tmp_path):
    assert three.steps() == [1, 2, 3]
    loaded = three.load_newest(setting=SETTING)
    assert isinstance(loaded, Checkpoint)
    assert (loaded.step, loaded.path) == (3, third)
    assert same(state_at(3), loaded.state)
    loaded.state["rung_of"].zero_()  # its memory is its own and may be written
    assert same(state_at(3), three.load_newest().state)
    nowhere = Checkpoints(tmp_path / "absent")
    assert nowhere.steps() == []
    assert nowhere.load_newest(setting=SETTING) is None
    assert not nowhere.folder.exists()  # looking makes nothing


SHAPES = st.lists(st.integers(0, 3), max_size=3)
VIEWS = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.movedim(0, -1) if tensor.dim() else tensor,
    "strided": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.expand(2, *tensor.shape),
    "with grad": lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor,
}


@st.composite
def tensors(draw):
    """Any bits at all, NaN payloads and signed zeros among them."""
    dtype, shape = draw(st.sampled_from(list(DTYPES.values()))), draw(SHAPES)
    n = math.prod(shape)
    if dtype == torch.bool:
        made = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=dtype)
    else:
        raw = draw(st.binary(min_size=n * dtype.itemsize, max_size=n * dtype.itemsize))
        made = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return VIEWS[draw(st.sampled_from(sorted(VIEWS)))](made.reshape(shape))


ODD_KEYS = "a.b a/b a%2Fb / 0 .. replicas dict tensor float __metadata__ \ufffd"
KEYS = st.text(max_size=5) | st.sampled_from(["", *ODD_KEYS.split()])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    PLAIN | tensors(),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(KEYS, child, max_size=3),
    max_leaves=12,
)
ONE = torch.ones(1)


@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(KEYS, TREES, max_size=4),
    st.dictionaries(st.text(max_size=3), PLAIN, max_size=3),
)
@example({"replicas": [ONE, {"a/b": ONE, "a": {"b": -ONE}}, {}]}, {})
@example({"replicas": {"0": ONE}, "a%2Fb": 2 * ONE, "a/b": 3 * ONE, "a": {"b": ONE}}, {})
@example({"x": [math.nan, -0.0, 5e-324, 2**63, -(10**5000), True, "\ud800\n"]}, {"n": math.nan})
@example({"?": ONE, "\ud800": -ONE, "y": {"float": "inf"}}, {})
def test_round_trip(state, setting):
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        checkpoints.save(7, state, setting=setting)
        assert same(state, checkpoints.load_newest(setting=setting).state)


def test_tuples_aliases_and_default_devices(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"whole": whole, "row": whole[1], "betas": (0.9, (1, 2)), "shape": whole.shape}
    with torch.device("meta"):
        Checkpoints(tmp_path).save(0, state)
        loaded = Checkpoints(tmp_path).load_newest().state
    assert same({**state, "shape": [3, 4]}, loaded)
    loaded["whole"].zero_()
    assert torch.equal(loaded["row"], whole[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_the_gpu_come_back_on_the_cpu(tmp_path):
    half = torch.ones(2, dtype=torch.bfloat16, device="cuda")
    state = {"x": torch.randn(4, 5, device="cuda").T, "b": half}
    Checkpoints(tmp_path).save(0, state)
    assert same(state, Checkpoints(tmp_path).load_newest().state)


# Which stay


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_are_kept_in_the_order_of_their_numbers(tmp_path, keep):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    steps = [1, 2, 5, 999_999_999, 1_000_000_000, 20_000_000_000]
    for k, step in enumerate(steps):
        checkpoints.save(step, {"step": step})
        assert checkpoints.steps() == steps[: k + 1][-keep:]
    assert sorted(os.listdir(tmp_path)) == sorted(f"step={step:09d}" for step in steps[-keep:])
    assert checkpoints.load_newest().state == {"step": 20_000_000_000}


def test_a_run_that_went_back_keeps_its_own_later_ones_and_files_of_others(three):
    others = {"notes", "step=0000000004", "step=best"}  # ten digits, but none of ours
    for name in others:
        (three.folder / name).mkdir()
    checkpoints = Checkpoints(three.folder, keep=1)
    checkpoints.save(2, state_at(2, variant=1))
    assert checkpoints.steps() == [2, 3]
    checkpoints.save(3, {"other": ONE})
    assert checkpoints.steps() == [3]
    assert same({"other": ONE}, checkpoints.load_newest().state)
    assert len(os.listdir(three.folder / "step=000000003")) == 3
    assert set(os.listdir(three.folder)) == {"step=000000003", *others}


# Crashes


def assert_all_are_complete(folder):
    """Every folder that counts and has a DONE passes every check."""
    for done in (*folder.glob("step=*/DONE"), *folder.glob(".step=*.old/DONE")):
        read(done.parent, int(done.parent.name.strip(".old").rpartition("=")[2]))


def in_child(function, *arguments):
    """A forked process, so that it can be killed or limited while it uses the real thing."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


class Faults:
    """Calls `happen` at the n-th call that changes the disk; half of a write is done before."""

    def __init__(self, monkeypatch, happen=lambda: None, at=-1):
        self.happen, self.at, self.calls = happen, at, 0
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, functools.partial(self.call, getattr(os, name)))
        opened = builtins.open
        monkeypatch.setattr(builtins, "open", lambda *a, **more: self.watch(opened(*a, **more)))

    def call(self, function, *arguments, **more):
        self.calls += 1
        if self.calls == self.at:
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
    return folder


def n_calls(folder, step):
    start(folder)
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        save_next(folder, step)
    assert os.listdir(folder) == [f"step={step:09d}"]
    assert faults.calls > 20
    return faults.calls


def assert_usable_after(folder, step):
    """What is there is complete and one of the two states; the next save tidies up."""
    assert_all_are_complete(folder)
    loaded = Checkpoints(folder).load_newest()
    is_new = loaded.state["counts"]["variant"] == 9
    assert same(state_at(step, variant=9) if is_new else state_at(4), loaded.state)
    save_next(folder, 6)
    assert os.listdir(folder) == ["step=000000006"]
    return is_new


STEPS = pytest.mark.parametrize("step", [4, 5], ids=["replaced", "next"])


@STEPS
@pytest.mark.parametrize("happen", [full_disk, pytest.param(interrupted, marks=pytest.mark.slow)])
def test_every_call_that_fails_leaves_the_folder_as_it_was(tmp_path, step, happen):
    outcomes = collections.Counter()
    for at in range(1, n_calls(tmp_path / "count", step) + 1):
        folder = start(tmp_path / str(at))
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
        is_new = Checkpoints(folder).load_newest().state["counts"]["variant"] == 9
        if is_new:  # the fault came after it was complete, while others were removed
            assert error is None or happen is interrupted
        else:
            assert error is not None
            assert snapshot(folder / "step=000000004") == before
            assert Checkpoints(folder).steps() == [4]
            if happen is full_disk:
                assert not (folder / "step=000000005").exists()
        outcomes[assert_usable_after(folder, step)] += 1
    assert outcomes[True] > 0
    assert outcomes[False] > 15


def save_and_be_killed(folder, step, at):
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, killed, at)
        save_next(folder, step)


@pytest.mark.slow
@STEPS
def test_killed_at_every_call(tmp_path, step):
    seen = set()
    for at in range(1, n_calls(tmp_path / "count", step) + 1):
        folder = start(tmp_path / str(at))
        child = in_child(save_and_be_killed, folder, step, at)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        assert Checkpoints(folder).steps() in ([4], [5], [4, 5])
        seen.add(assert_usable_after(folder, step))
    assert seen == {True, False}


def test_a_crash_in_the_first_save_leaves_none(tmp_path):
    folder = tmp_path / "checkpoints"
    child = in_child(save_and_be_killed, folder, 5, 8)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert os.listdir(folder) == [".step=000000005.part"]
    assert Checkpoints(folder).load_newest() is None
    save_next(folder, 5)
    assert os.listdir(folder) == ["step=000000005"]


def test_everything_is_synced_before_it_is_named(tmp_path, monkeypatch):
    """What a power cut leaves cannot be tried here; the order of calls that decides it can."""
    order, fsync, rename = [], os.fsync, os.rename

    def note_fsync(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        order.append(("fsync", os.path.relpath(name, tmp_path)))
        fsync(descriptor)

    def note_rename(source, target):
        order.append(("rename", os.path.relpath(target, tmp_path)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    Checkpoints(tmp_path / "new").save(5, state_at(5))
    part = "new/.step=000000005.part"
    files = [("fsync", f"{part}/{name}") for name in FILES]
    named = [("fsync", part), ("rename", "new/step=000000005"), ("fsync", "new")]
    assert order == [("fsync", "."), *files, *named]


# A disk that does not take it


def test_a_file_in_the_way(three, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for name in ("file", "file/below"):
        with pytest.raises(CheckpointError, match="cannot save"):
            Checkpoints(tmp_path / name).save(1, state_at(1))
    with pytest.raises(CheckpointError, match="cannot read"):
        Checkpoints(tmp_path / "file").load_newest()
    assert (tmp_path / "file").read_text() == "in the way"
    (three.folder / "step=000000004").write_text("mine")
    before = snapshot(three.folder)
    with pytest.raises(CheckpointError, match="Not a directory"):
        three.save(4, state_at(4))
    assert snapshot(three.folder) == before


# Damage


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_or_another_length(three, third, warnings_of, caplog, name):
    path, places = third / name, random.Random(name)
    data = path.read_bytes()
    for place in (0, 1, 7, 8, 9, len(data) - 1, *(places.randrange(len(data)) for _ in range(10))):
        flipped = bytearray(data)
        flipped[place] ^= 1 << places.randrange(8)
        path.write_bytes(flipped)
        caplog.clear()
        assert_falls_back(three, 2, warnings_of, name, "checksum")
    for damaged in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0"):
        path.write_bytes(damaged)
        caplog.clear()
        how = "too long" if len(damaged) > len(data) else "truncated"
        assert_falls_back(three, 2, warnings_of, name, how if name in TENSORS else "checksum")
    path.write_bytes(data)
    caplog.clear()
    assert three.load_newest().step == 3
    assert not warnings_of()


def test_a_missing_file_and_two_damaged_in_one_line(three, third, warnings_of):
    (third / "manifest.json").unlink()
    (three.folder / "step=000000002" / "replica=1.safetensors").write_bytes(b"")
    words = "step=000000002 has a truncated replica=1.safetensors"
    assert_falls_back(three, 1, warnings_of, "has no manifest.json", words)
    (three.folder / "step=000000001" / "shared.safetensors").unlink()
    every = "no checkpoint in .* can be used: .*step=000000003.*step=000000001 has no"
    with pytest.raises(CheckpointError, match=every):
        three.load_newest()
    (third / "DONE").unlink()  # it never was complete
    assert three.steps() == [1, 2]


# Content that means harm


def with_state(**more):
    return lambda manifest: manifest.update(state={"dict": {"replicas": [0, 0], **more}})


def outside(manifest):
    """A file next to the run in place of one of ours."""
    manifest["files"]["../../outside.safetensors"] = manifest["files"].pop("shared.safetensors")


def no_tensor_of_that_name(manifest):
    replicas = manifest["state"]["dict"]["replicas"]
    replicas.append({"tensor": {"dtype": "float32", "shape": [1]}})


FORGED = {
    "absent": save({}),
    "dtype": save({"/rung_of": torch.zeros(2)}),
    "shape": save({"/rung_of": torch.zeros(3, dtype=torch.int64)}),
    "no safetensors": b'\x08\0\0\0\0\0\0\0{"a": 12',
    "a list": lambda manifest: [],
    "no state": lambda manifest: manifest.pop("state") and None,
    "a call": with_state(x={"call": "os.system"}),
    "no number": with_state(x={"int": "0xg\n"}),
    "a path": with_state(x={"tensor": {"dtype": "float32", "shape": [1], "file": "../x"}}),
    "outside": outside,
    "another key": lambda manifest: manifest["files"]["shared.safetensors"].update(path="/etc"),
    "no such tensor": no_tensor_of_that_name,
}


@pytest.mark.parametrize("forged", FORGED)
def test_forged_content_with_matching_checksums(three, third, tmp_path, warnings_of, forged):
    save_file({"/rung_of": torch.tensor([1, 0])}, tmp_path / "run" / "outside.safetensors")
    if isinstance(FORGED[forged], bytes):
        put(third, "shared.safetensors", FORGED[forged])
    else:
        reseal(third, FORGED[forged])
    assert_falls_back(three, 2, warnings_of)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("sealed", [False, True], ids=["dropped in", "with matching checksums"])
@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_a_pickle_is_refused_and_not_executed(three, third, tmp_path, warnings_of, kind, sealed):
    marker, file = tmp_path / "executed", io.BytesIO()
    torch.save({"x": Bomb(marker)}, file)
    data = file.getvalue() if kind == "torch" else pickle.dumps(Bomb(marker))
    if sealed:
        put(third, "replica=1.safetensors", data)
    else:
        (third / "replica=1.safetensors").write_bytes(data)
    assert_falls_back(three, 2, warnings_of, "pickle in place of replica=1.safetensors")
    assert not marker.exists()
    pickle.loads(data) if kind == "pickle" else torch.load(io.BytesIO(data), weights_only=False)
    assert marker.exists()  # the bomb is live


def test_nothing_is_shown_that_a_terminal_obeys():
    assert printable({"a\x1b[2J": ["\u202e", "é", 1]}) == {"a\\x1b[2J": ["\\u202e", "é", 1]}


# Another version, another setting


@pytest.mark.parametrize("change", [{"version": 4}, {"schema": "other"}])
def test_another_schema(three, third, warnings_of, change):
    reseal(third, lambda manifest: manifest.update(change))
    with pytest.raises(CheckpointError, match=str(*change.values())):
        three.load_newest()
    assert not warnings_of()


def test_another_torch_is_noticed(three, third, warnings_of):
    three.load_newest()
    reseal(third, lambda manifest: manifest.__delitem__("torch"))  # as older versions wrote it
    three.load_newest()
    assert not warnings_of()
    reseal(third, lambda manifest: manifest.update(torch="2.8.0"))
    assert three.load_newest().step == 3
    assert f"torch 2.8.0 and this is {torch.__version__}" in "".join(warnings_of())


def test_another_setting_names_what_differs(three, warnings_of):
    assert three.load_newest(setting={**SETTING, "temperatures": [1, 10.0]}).step == 3  # the same
    prior = {"precision": "x\n" * 500}
    given_now = {**SETTING, "temperatures": [1.0, 10.0000001], "prior": prior, "seed": 3}
    with pytest.raises(CheckpointError) as error:
        three.load_newest(setting=given_now)
    message = str(error.value)
    assert "temperatures.1 was 10.0 and is now 10.0000001" in message
    assert "prior.precision was 25.0 and is now 'x\\nx\\n" in message
    assert "seed was absent and is now 3" in message
    assert "recipe" not in message.partition("another setting")[2]
    assert "\n" not in message
    assert len(message) < 600
    assert not warnings_of()


# What cannot be saved


def loop():
    tree = {}
    tree["x"] = [tree]
    return tree


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"x": object()}, ["state['replicas'][0]['x']", "of type object"]),
        ({"x": {3: 1}}, ["state['replicas'][0]['x']", "key 3 is not a string"]),
        ({"x": torch.ones(1, dtype=torch.complex128)}, ["complex128", "float32"]),
        ({"x": torch.eye(2).to_sparse()}, ["sparse_coo"]),
        (loop(), ["nested more than 100 deep"]),
    ],
)
def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path, bad, words):
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path / "new").save(1, {"a": ONE, "replicas": [bad]})
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match=r"setting\['x'\]\['y'\]"):
        Checkpoints(tmp_path).save(1, {}, setting={"x": {"y": ONE}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """With keep=1 and every step replaced, there is no second checkpoint to fall back to."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    moments = random.Random(0)
    newest = (0, 0)
    checkpoints.save(0, state_at(0, size=30_000))
    for _ in range(20):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = in_child(save_forever, tmp_path, newest[0] + 1, sender)
        sender.close()
        assert receiver.poll(60), "the child saved nothing"
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
        assert_all_are_complete(tmp_path)
        loaded = checkpoints.load_newest()
        newest = (loaded.step, loaded.state["counts"]["variant"])
        assert newest >= returned, "a save had returned, but its checkpoint is gone"
        assert same(state_at(*newest, size=30_000), loaded.state)
    checkpoints.save(newest[0] + 1, state_at(0))
    assert os.listdir(tmp_path) == [f"step={newest[0] + 1:09d}"]


@pytest.mark.parametrize("limit", [0, 300, 40_100])
def test_no_space_for_a_file(three, limit):
    before = snapshot(three.folder)
    message = answer_of(save_with_limit, three.folder, limit)
    assert f"step=000000004 ({os.strerror(errno.EFBIG)})" in message
    assert snapshot(three.folder) == before
    assert same(state_at(3), three.load_newest().state)


@pytest.mark.parametrize(
    ("closed", "use"),
    [
        (".", lambda checkpoints: checkpoints.save(4, state_at(4))),
        ("step=000000003", lambda checkpoints: checkpoints.load_newest()),
    ],
    ids=["save", "load"],
)
def test_no_permission(three, closed, use):
    before = snapshot(three.folder)
    mode = (three.folder / closed).stat().st_mode
    (three.folder / closed).chmod(0o555 if closed == "." else 0)
    try:
        message = answer_of(without_rights, three.folder, use)
    finally:
        (three.folder / closed).chmod(mode)
    assert "Permission denied" in message
    assert snapshot(three.folder) == before


def test_files_of_another_checkpoint(three, third, warnings_of, caplog):
    name = "replica=0.safetensors"
    content = (third / name).read_bytes()
    (third / name).write_bytes((three.folder / "step=000000002" / name).read_bytes())
    assert_falls_back(three, 2, warnings_of, "checksum")
    (third / name).write_bytes(content)
    os.rename(third, three.folder / "step=000000009")
    caplog.clear()
    assert three.load_newest().step == 2
    assert "step=000000009 is that of step 3, not of step 9" in warnings_of()[0]


def save_forever(folder, first, reports):
    checkpoints = Checkpoints(folder, keep=1)
    for step in itertools.count(first):
        for variant in (0, 1):  # the second replaces the first
            checkpoints.save(step, state_at(step, variant, size=30_000))
            reports.send_bytes(f"{step} {variant}".encode())


def answer_of(function, *arguments):
    """What a function says, or its CheckpointError, in a process of its own."""

    def answering(sender):
        try:
            sender.send(f"done: {function(*arguments)}")
        except CheckpointError as error:
            sender.send(str(error))

    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = in_child(answering, sender)
    sender.close()
    message = receiver.recv()
    child.join()
    return message


def save_with_limit(folder, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    Checkpoints(folder).save(4, state_at(4, size=10_000))


def without_rights(folder, use):
    os.chdir(folder)
    if os.geteuid() == 0:
        os.setuid(65534)  # nobody
    use(Checkpoints("."))
