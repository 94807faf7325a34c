"""Draws on disk: what stays, what a crash leaves, what a resume restores, what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import signal
import time
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from assertions import assert_mean_is, assert_mean_is_not
from torchrex.errors import CheckpointError, InvalidArgumentError
from torchrex.posterior import DrawStore
from torchrex.posterior.store_format import load_into, slot_of
from torchrex.rng import derive_seed


class Counter(nn.Module):
    """A module whose only weight says which draw it is."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(value)]))


def filled(folder, n: int, *, first: int = 1, **settings) -> DrawStore:
    store = DrawStore(folder, **{"capacity": 3, **settings})
    for step in range(first, first + n):
        store.add(Counter(step), step=step)
    return store


def files(folder) -> set[str]:
    return {name for name in os.listdir(folder) if name != "index.json"}


def contents(store: DrawStore) -> list[tuple[int, int, float]]:
    return [(step, rung, float(state["weight"])) for step, rung, state in store]


def assert_readable(folder) -> DrawStore:
    """Opens, is full, and every draw carries its own step."""
    store = DrawStore.load(folder)
    assert len(store) == min(store.n_seen, store.capacity)
    assert all(step == weight for step, _, weight in contents(store))
    return store


# Which draws stay


def test_newest_keeps_the_newest(tmp_path):
    store = filled(tmp_path, 7)
    assert store.draws == [(5, 0), (6, 0), (7, 0)]
    assert contents(store) == [(5, 0, 5.0), (6, 0, 6.0), (7, 0, 7.0)]
    assert len(files(tmp_path)) == len(store) == 3
    assert store.n_seen == 7
    assert repr(store) == f"DrawStore({str(tmp_path)!r}, 3 of 7 draws, keep='newest', capacity=3)"


CAPACITY, SEEN, SEEDS = 5, 20, 4000


def survivors(rule) -> Tensor:
    """(seeds, seen): which of SEEN draws are in a reservoir at the end; one store per seed."""
    kept = torch.zeros(SEEDS, SEEN)
    for seed in range(SEEDS):
        slots: dict[int, int] = {}
        for number in range(SEEN):
            if (slot := rule(number, seed)) is not None:
                slots[slot] = number
        kept[seed, list(slots.values())] = 1.0
    return kept


def test_every_draw_is_in_the_reservoir_with_the_same_probability():
    rule = {"keep": "reservoir", "capacity": CAPACITY}
    kept = survivors(lambda number, seed: slot_of(number, seed=seed, **rule))
    assert kept.sum(1).eq(CAPACITY).all()
    for number in range(SEEN):
        assert_mean_is(kept[:, number], CAPACITY / SEEN)
    # Pairs too: P(both) = c (c - 1) / (n (n - 1)) for a simple random sample.
    both = CAPACITY * (CAPACITY - 1) / (SEEN * (SEEN - 1))
    for one, other in ((0, 1), (0, SEEN - 1), (3, 4), (7, 12), (SEEN - 2, SEEN - 1)):
        assert_mean_is(kept[:, one] * kept[:, other], both)


def test_a_reservoir_that_takes_every_draw_is_caught():
    """The mutant replaces a uniform slot at every draw: it keeps new draws too often."""

    def mutant(number, seed):
        return number if number < CAPACITY else derive_seed(seed, f"{number}") % CAPACITY

    kept = survivors(mutant)
    assert_mean_is_not(kept[:, 0], CAPACITY / SEEN)
    assert_mean_is_not(kept[:, SEEN - 1], CAPACITY / SEEN)


def test_a_reservoir_that_counts_one_too_few_is_caught():
    """The mutant draws from 0..k-1 instead of 0..k."""

    def mutant(number, seed):
        slot = number if number < CAPACITY else derive_seed(seed, f"{number}") % number
        return slot if slot < CAPACITY else None

    assert_mean_is_not(survivors(mutant)[:, CAPACITY:].mean(1), CAPACITY / SEEN)


# Tensors


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(7, dtype=torch.int32))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("rounded", torch.randn(3).bfloat16())
        flat = torch.arange(6.0)
        # Two views of one memory that are not the same tensor.
        self.register_buffer("left", flat[:3])
        self.register_buffer("right", flat[3:])
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).T)


def test_awkward_tensors_survive(tmp_path):
    module = Awkward()
    module.norm.num_batches_tracked += 3
    store = DrawStore(tmp_path, capacity=1)
    store.add(module, step=1)
    ((_, _, state),) = DrawStore.load(tmp_path)
    expected = module.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
        assert state[name].dtype == value.dtype, name
    assert state["head.weight"] is state["embed.weight"]
    bytes_once = sum(tensor.nbytes for name, tensor in expected.items() if name != "head.weight")
    assert store._index.draws[0].size < 1.2 * bytes_once + 2000
    fresh = Awkward()
    load_into(fresh, state, "draw")
    assert fresh.head.weight is fresh.embed.weight
    assert fresh.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in expected.items())


def test_the_module_is_not_touched_and_names_are_those_before_compilation(tmp_path):
    inner, wrapped = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Module()
    wrapped._orig_mod = inner  # what torch.compile makes of the names
    store = DrawStore(tmp_path, capacity=2)
    store.add(wrapped, step=1)
    before = {name: value.clone() for name, value in inner.state_dict().items()}
    for parameter in inner.parameters():
        parameter.data += 1
    ((_, _, state),) = store
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert inner.training
    load_into(wrapped, state, "draw")
    assert torch.equal(inner[0].weight, before["0.weight"])


def test_a_state_that_is_no_tensor_is_refused(tmp_path):
    class Extra(Counter):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state): ...

    store = filled(tmp_path, 2)
    with pytest.raises(InvalidArgumentError, match="_extra_state"):
        store.add(Extra(), step=3)
    assert assert_readable(tmp_path).n_seen == 2


# Resume


@pytest.mark.parametrize("keep", ["newest", "reservoir"])
def test_resume_is_exact(tmp_path, keep):
    whole = contents(filled(tmp_path / "whole", 12, keep=keep))
    for halfway in (0, 1, 4, 11):
        for lost in (1, 5):
            folder = tmp_path / f"{halfway}-{lost}"
            store = filled(folder, halfway, keep=keep)
            before, state = contents(store), json.loads(json.dumps(store.state_dict()))
            for step in range(halfway + 1, halfway + 1 + lost):
                store.add(Counter(step), step=step)
            store = DrawStore(folder, capacity=3, keep=keep)
            store.load_state_dict(state)
            assert contents(store) == before
            for step in range(halfway + 1, 13):
                store.add(Counter(step), step=step)
            assert contents(store) == whole
            store.commit()
            assert len(files(folder)) <= 3 + 3  # at most what the newest state and the present need
            store.state_dict()
            store.commit()
            assert len(files(folder)) == 3
            assert contents(assert_readable(folder)) == whole


def test_files_stay_for_the_checkpoints_that_are_kept(tmp_path):
    """Checkpoints every 5 steps, the newest two kept: both can be resumed, disk use is bounded."""
    store, states, seen = DrawStore(tmp_path, capacity=3), {}, {}
    for step in range(1, 41):
        store.add(Counter(step), step=step)
        if step % 5 == 0:
            states[step], seen[step] = store.state_dict(), contents(store)
            store.commit(oldest=step - 5)
        assert len(files(tmp_path)) <= 3 * 3
    for step in range(41, 44):
        store.add(Counter(step), step=step)
    with pytest.raises(CheckpointError, match="step 30"):
        store.load_state_dict(states[30])
    for step in (40, 35):  # the newest first, then further back
        store.load_state_dict(states[step])
        assert contents(store) == seen[step]


def test_rewind(tmp_path):
    store = filled(tmp_path, 4)
    store.state_dict()
    four = contents(store)
    for step in (8, 10, 12):
        store.add(Counter(step), step=step)
    store.rewind(12)
    store.rewind(100)  # nothing came after
    assert [step for step, _ in store.draws] == [8, 10, 12]
    with pytest.raises(CheckpointError, match="back to steps 0 to 0, 4 to 7"):
        store.rewind(9)
    store.rewind(7)  # the run was anywhere between 4 and 7
    assert contents(store) == four
    store.rewind(0)
    assert len(store) == store.n_seen == 0
    assert not files(tmp_path)
    assert contents(filled(tmp_path, 4)) == four


def test_nothing_is_counted_twice(tmp_path):
    store = DrawStore(tmp_path, capacity=4)
    for rung in (1, 0):
        assert store.add(Counter(5), step=5, rung=rung)
        assert DrawStore.load(tmp_path).add(Counter(5), step=5, rung=rung)
    assert DrawStore.load(tmp_path).n_seen == 2
    with pytest.raises(InvalidArgumentError, match=r"step 4 .* step 5"):
        store.add(Counter(4), step=4)
    reservoir = filled(tmp_path / "reservoir", 30, keep="reservoir", capacity=1)
    assert reservoir.add(Counter(30), step=30) == (reservoir.draws == [(30, 0)])
    assert reservoir.n_seen == 30


def test_a_state_of_another_run_is_refused(tmp_path):
    state = filled(tmp_path / "one", 5).state_dict()
    other = DrawStore(tmp_path / "two", capacity=3)
    for step in range(1, 6):
        other.add(Counter(-step), step=step)
    other.state_dict()
    before = other.draws
    for given, words in (
        (state, "another run"),
        ({**state, "capacity": 4}, "capacity"),
        ({**state, "seen": 99}, "99 draws seen"),
        ({"seen": 3}, "not the state"),
    ):
        with pytest.raises(CheckpointError, match=words):
            other.load_state_dict(given)
    assert other.draws == before
    with pytest.raises(CheckpointError, match="settings"):
        DrawStore(tmp_path / "one", capacity=3, keep="reservoir")


# Crashes


def test_a_draw_is_on_disk_for_good_before_the_index_names_it(tmp_path, monkeypatch):
    store, done = DrawStore(tmp_path, capacity=3), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("sync") or fsync(descriptor))
    monkeypatch.setattr(
        os, "replace", lambda part, path: done.append(path.name) or replace(part, path)
    )
    store.add(Counter(1), step=1)
    file_name_folder = ("sync", "{}", "sync")
    assert done == [
        step.format(name)
        for name in ("draw-000000000.safetensors", "index.json")
        for step in file_name_folder
    ]


def test_a_full_disk_is_one_clear_line_and_the_store_stays(tmp_path, monkeypatch):
    store = filled(tmp_path, 4)
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", mock.Mock(side_effect=full))
        with pytest.raises(CheckpointError, match="No space left"):
            store.add(Counter(5), step=5)
    assert store.n_seen == assert_readable(tmp_path).n_seen == 4
    assert store.add(Counter(5), step=5)


class Crash(BaseException):
    pass


@pytest.mark.parametrize("keep", ["newest", "reservoir"])
def test_a_crash_at_any_file_operation_leaves_a_readable_store(tmp_path, monkeypatch, keep):
    """Every file operation of `add` in turn is the last one that happens."""
    crashed = 0
    for last in range(17):
        folder = tmp_path / str(last)
        store = filled(folder, 6, keep=keep)
        store.state_dict()
        (folder / "draw-000000099.safetensors.part").touch()  # something to remove
        before, left = contents(store), [last]

        def dying(real, left=left):
            def operation(*arguments, **keywords):
                if left[0] == 0:
                    raise Crash
                left[0] -= 1
                return real(*arguments, **keywords)

            return operation

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "unlink", "listdir"):
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                for step in (7, 8):
                    store.add(Counter(step), step=step)
            except Crash:
                crashed += 1
        again = assert_readable(folder)
        assert again.n_seen in (6, 7, 8)
        for step in range(again.n_seen + 1, 10):
            again.add(Counter(step), step=step)
        assert files(folder) == {draw.file for draw in again._index.draws}  # no leftovers
        again.rewind(6)
        assert contents(again) == before
    assert 5 < crashed < 17  # the last of them went through


# Damage and malice


def edit_index(folder, **changes) -> None:
    raw = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**raw, **changes}))


def edit_draw(folder, **changes) -> None:
    raw = json.loads((folder / "index.json").read_text())
    raw["draws"][-1].update(changes)
    (folder / "index.json").write_text(json.dumps(raw))


ESCAPE = "\x1b[2J\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "index.json").unlink(), "has no index.json"),
        (lambda f: (f / "index.json").write_text("{"), "not an index"),
        (lambda f: (f / "index.json").write_text("[" * 100_000), "not an index"),
        (lambda f: edit_index(f, schema="x" * 10_000), "schema"),
        (lambda f: edit_index(f, version=2), "version"),
        (lambda f: edit_index(f, keep="oldest"), "keep"),
        (lambda f: edit_index(f, draws=[]), "do not fill"),
        (lambda f: edit_index(f, marks=[]), "marks"),
        (lambda f: edit_index(f, **{ESCAPE: 1}), "not known"),
        (lambda f: edit_draw(f, **{ESCAPE: 1}), "unexpected keyword"),
        (lambda f: edit_draw(f, left=0), "do not fill|left before"),
        (lambda f: edit_draw(f, file="../secret.safetensors"), "file name"),
        (lambda f: edit_draw(f, number="../x"), "whole number"),
        (lambda f: edit_draw(f, sha256="0" * 63), "sha256"),
        (lambda f: (f / "draw-000000004.safetensors").unlink(), "No such file"),
        (lambda f: (f / "draw-000000004.safetensors").write_bytes(b"short"), "5 bytes instead of"),
    ],
)
def test_damage_is_found_when_the_store_is_opened(tmp_path, damage, words):
    filled(tmp_path, 5)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=words) as error:
        DrawStore.load(tmp_path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


def test_a_flipped_bit_is_found_when_the_draw_is_read(tmp_path):
    filled(tmp_path, 3)
    path = tmp_path / "draw-000000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    draws = iter(DrawStore.load(tmp_path))
    assert next(draws)[0] == 1
    with pytest.raises(CheckpointError, match=r"draw-000000001.safetensors has another sha256"):
        next(draws)


class Bomb:
    def __reduce__(self):
        return exec, ("open('exploded', 'w').close()",)


@pytest.mark.parametrize("content", [pickle.dumps(Bomb()), b"", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_pickle_in_place_of_a_draw_is_refused(tmp_path, monkeypatch, content):
    """Even with a matching checksum in the index."""
    monkeypatch.chdir(tmp_path)
    filled(tmp_path, 3)
    (tmp_path / "draw-000000002.safetensors").write_bytes(content)
    edit_draw(tmp_path, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(CheckpointError, match="safetensors format"):
        list(DrawStore.load(tmp_path))
    assert not (tmp_path / "exploded").exists()


def test_only_its_own_files_are_removed(tmp_path):
    others = {"notes.txt", "draw-1.safetensors", "draw-000000000.safetensors.bak"}
    for name in (*others, "draw-000000099.safetensors.part"):
        (tmp_path / name).write_text("text")
    filled(tmp_path, 5)
    ours = {f"draw-00000000{number}.safetensors" for number in (2, 3, 4)}
    assert files(tmp_path) == others | ours


def test_bad_settings_steps_and_folders(tmp_path):
    for settings in ({"capacity": 0}, {"keep": "best"}, {"seed": None}):
        with pytest.raises(InvalidArgumentError, match=next(iter(settings))):
            DrawStore(tmp_path, **{"capacity": 3, **settings})
    for wrong in ({"step": -1}, {"step": 1.5}, {"step": 1, "rung": -1}):
        with pytest.raises(InvalidArgumentError, match="whole number"):
            DrawStore(tmp_path / "store", capacity=2).add(Counter(), **wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="folder"):
        DrawStore(tmp_path / "file", capacity=2)
    with pytest.raises(CheckpointError, match="no store of draws"):
        DrawStore.load(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


@pytest.mark.slow
def test_kill_during_add(tmp_path):
    """Ten children add as fast as they can and are killed; each continues after the last."""
    chance, seen = random.Random(0), 0
    for _ in range(10):
        child = os.fork()
        if child == 0:
            try:
                store = DrawStore(tmp_path, capacity=3, keep="reservoir")
                while True:
                    store.add(Counter(store.n_seen + 1), step=store.n_seen + 1)
                    if store.n_seen % 4 == 0:
                        store.state_dict()
                        store.commit(oldest=store.n_seen - 8)
            finally:
                os._exit(1)
        waited = time.monotonic()
        while time.monotonic() < waited + 10:
            if (tmp_path / "index.json").exists() and seen_by_index(tmp_path) > seen:
                break
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        store = assert_readable(tmp_path)
        assert store.n_seen > seen
        seen = store.n_seen
    store = DrawStore(tmp_path, capacity=3, keep="reservoir")
    store.add(Counter(seen + 1), step=seen + 1)
    assert files(tmp_path) == {draw.file for draw in store._index.draws}
    never_killed = filled(tmp_path / "calm", seen + 1, keep="reservoir")
    assert store.draws == never_killed.draws


def seen_by_index(folder) -> int:
    """An index is complete at any moment."""
    return json.loads((folder / "index.json").read_text())["now"]["seen"]
