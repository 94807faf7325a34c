"""The packed form: the same bytes as the coder that made it, in any number of processes, and every
damage seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from test_data import PER_CLASS, arrays_of, assert_holds, one_line, small_source, write_npy
from torchrex.errors import DataError, InvalidArgumentError
from torchrex.vision.data import import_images, load_images, packed, packed_coder
from torchrex.vision.data.packed_coder import (
    N_FEATURES,
    TOTAL,
    Model,
    ShardError,
    WordReader,
    decode,
    walk,
)
from torchrex.vision.data.sources import SOURCES, sha256_of

REAL = Path(
    os.environ.get("TORCHREX_PACKED_DATA")
    or Path(__file__).parents[2] / "shared" / "data" / "packed"
)
needs_real = pytest.mark.skipif(
    not (REAL / "manifest.json").is_file(),
    reason=f"no packed image sets in {REAL}; set TORCHREX_PACKED_DATA to their folder",
)


def spread(shape, span):
    """Whole numbers from -span to span, the same on every machine."""
    n = int(np.prod(shape))
    return (
        ((np.arange(n, dtype=np.int64) * 7919 + 13) % (2 * span + 1) - span)
        .astype(np.int32)
        .reshape(shape)
    )


def small_model():
    """The arrays of a small model file; its networks are arbitrary but react to every input."""
    arrays = {}
    for plane, inputs in N_FEATURES.items():
        for k, (out, into, span) in enumerate([(6, inputs, 5), (5, 6, 9), (9, 5, 40)], 1):
            arrays[f"{plane}W{k}"] = spread((out, into), span)
            arrays[f"{plane}b{k}"] = spread((out,), 300)
            arrays[f"{plane}s{k}"] = np.float32((2**-4, 2**-3, 2**-4)[k - 1])
    place, width = np.arange(4608)[None] - 2304, 8 * (np.arange(80)[:, None] + 1)
    arrays["T"] = np.clip(32768 + place * 32768 // width, 0, 65535).astype(np.uint16)
    arrays["E"] = (4096 >> (np.arange(112) // 8)).astype(np.int32)
    return arrays


def encode(model, *shards):
    """[(states, words)] of shards of pictures: the coder run backwards over what the decoder will
    see.
    """
    all_pictures = np.concatenate(shards)
    n = len(all_pictures)
    planes = {
        plane: all_pictures[..., c].reshape(n, 1024).T.astype(np.int32)
        for plane, c in (("R", 0), ("G", 1), ("B", 2))
    }
    lows, counts = np.zeros((2, 3072, n), np.uint64)
    step = iter(range(3072))

    def tell(plane, place, index, weights):
        value, k = planes[plane][place], next(step)
        lows[k] = np.where(value > 0, model.count_below(index, weights, np.maximum(value, 1)), 0)
        counts[k] = (
            np.where(
                value < 255, model.count_below(index, weights, np.minimum(value + 1, 255)), TOTAL
            )
            - lows[k]
        )
        return value.astype(np.int16)

    walk(model, n, tell)
    ends = np.cumsum([len(shard) for shard in shards])
    return [
        write_words(lows[:, a:b], counts[:, a:b]) for a, b in zip([0, *ends], ends, strict=False)
    ]


def write_words(lows, counts):
    sixteen, states, words = np.uint64(16), np.full(lows.shape[1], TOTAL, np.uint64), []
    for low, count in zip(lows[::-1], counts[::-1], strict=True):
        full = states >= (count << sixteen)
        words.append((states[full] & np.uint64(TOTAL - 1)).astype(np.uint16))
        states[full] >>= sixteen
        states = ((states // count) << sixteen) + states % count + low
    return states.astype(np.uint32), np.concatenate(words[::-1])


def pictures(n):
    y, x, c = np.ogrid[:32, :32, :3]
    return np.stack(
        [
            (k * 37 + y * (k + 3) + x * (5 - k) + c * 29 + ((x * y + k) % 7) * (c + 1) * 3) % 256
            for k in range(n)
        ]
    ).astype(np.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.npz"
    np.savez(path, **small_model())
    return Model.load(path)


def test_the_code_is_that_of_the_shards_in_use(model):
    """The checksum is that of the program which made the shards, for this model and these pictures:
    a slip in any feature, layer or count of ours would change the words, even one that coder and
    decoder share.
    """
    [(states, words)] = encode(model, pictures(4))
    found = hashlib.sha256(states.tobytes() + words.tobytes()).hexdigest()
    assert found == "e4a85c489392441230feea45797bae24b64587b0373c5a37ffc954026883c68c"
    assert np.array_equal(decode(model, states, words), pictures(4))


def test_words_that_do_not_come_out_even(model, monkeypatch):
    states = np.full(3, TOTAL, np.uint32)
    with pytest.raises(ShardError, match="end too early"):
        decode(model, states, np.zeros(5, np.uint16))
    # As if all pixels had been read without a word:
    monkeypatch.setattr(
        packed_coder, "walk", lambda model, n, read: [np.zeros((1024, n), np.int16)] * 3
    )
    assert decode(model, states, np.zeros(0, np.uint16)).shape == (3, 32, 32, 3)
    for wrong_states, wrong_words in (
        (states, np.zeros(1, np.uint16)),
        (states + np.uint32(1), np.zeros(0, np.uint16)),
    ):
        with pytest.raises(ShardError, match="come out even"):
            decode(model, wrong_states, wrong_words)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A packed svhn of 12 + 10 pictures, the training part in two shards, and its arrays; encoded
    once.
    """
    folder = tmp_path_factory.mktemp("packed")
    np.savez(folder / "model_small.npz", **small_model())
    model = Model.load(folder / "model_small.npz")
    arrays = arrays_of("svhn")
    for part, labels in (("train", [1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 1, 0]), ("test", range(10))):
        arrays[f"{part}_labels"] = np.array(labels)
        arrays[f"{part}_images"] = (pictures(len(labels)) + (part == "test")).astype(np.uint8)
    pieces = {
        "svhn_train_00": arrays["train_images"][:7],
        "svhn_train_01": arrays["train_images"][7:],
    }
    pieces["svhn_test_00"] = arrays["test_images"]
    for name, (states, words) in zip(pieces, encode(model, *pieces.values()), strict=True):
        np.savez(folder / f"{name}.npz", states=states, words=words)
    sets, labels = {}, {}
    for part in ("train", "test"):
        images = arrays[f"{part}_images"]
        entries = [
            [f"{name}.npz", sha256_of(piece)] for name, piece in pieces.items() if part in name
        ]
        labels[f"svhn_{part}_y"] = arrays[f"{part}_labels"].astype(np.uint8)
        sets[f"svhn_{part}"] = {
            "model": "model_small.npz",
            "sha256": sha256_of(images),
            "shards": entries,
            "sha256_y": sha256_of(arrays[f"{part}_labels"]),
        }
    np.savez(folder / "labels.npz", **labels)
    (folder / "manifest.json").write_text(json.dumps({"sets": sets}))
    return {path.name: path.read_bytes() for path in folder.iterdir()}, arrays, pieces


@pytest.fixture
def folder(shards, monkeypatch, tmp_path):
    """The packed set in a folder of its own, and a source to match."""
    files, *_ = shards
    monkeypatch.setenv("TORCHREX_DATA", str(tmp_path / "cache"))
    monkeypatch.setitem(PER_CLASS, "svhn", ((2, 2, 1, 1, 1, 1, 1, 1, 1, 1), (1,) * 10))
    archives = dict.fromkeys(("train_32x32.mat", "test_32x32.mat"), b"")
    monkeypatch.setitem(SOURCES, "svhn", small_source("svhn", {}, archives))
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def decoded_at_once(shards, monkeypatch):
    """Decoding in this process, without the work: what a shard decodes to is known."""
    pieces = shards[2]
    monkeypatch.setattr(packed_coder, "decode_file", lambda model, shard: pieces[shard.stem])


def assert_imported(folder, arrays, procs):
    told = []
    import_images("svhn", folder, progress=lambda *numbers: told.append(numbers), procs=procs)
    images = load_images("svhn")
    assert_holds(images, arrays)
    assert told == [(0, 22), (7, 22), (12, 22), (22, 22)]
    assert images.provenance == (
        "packed form, re-cropped from the full frames, not compared bit by bit with the official files"
    )


def test_import_of_the_packed_form_in_processes(folder, shards):
    assert_imported(folder, shards[1], procs=3)


@pytest.mark.usefixtures("decoded_at_once")
def test_import_of_the_packed_form_in_this_process(folder, shards):
    assert_imported(folder, shards[1], procs=1)


@pytest.mark.parametrize("procs", [1, 2])
def test_a_shard_that_cannot_be_decoded(folder, shards, procs, monkeypatch):
    started = []

    class Recorded(packed.subprocess.Popen):
        def __init__(self, command, **options):
            whole = "svhn_train_00" not in command[-1]
            super().__init__(
                ["sleep", "60"] if whole else command, **options
            )  # in the middle of its work, whenever that is
            started.extend([self] * whole)

    monkeypatch.setattr(packed.subprocess, "Popen", Recorded)
    files, *_ = shards
    (folder / "svhn_train_00.npz").write_bytes(files["svhn_train_00.npz"][:500])
    with pytest.raises(
        DataError, match=r"cannot decode .*svhn_train_00\.npz with model_small\.npz \(.*zip file"
    ) as error:
        import_images("svhn", folder, procs=procs)
    one_line(error)
    assert not (folder / "cache").exists()
    assert len(started) >= procs - 1
    assert all(process.wait() == -signal.SIGKILL for process in started)  # not waited for


@pytest.mark.usefixtures("decoded_at_once")
def test_a_shard_that_decodes_to_something_else(folder, shards):
    shards[2]["svhn_train_00"][6, 31, 31, 2] ^= 1
    try:
        with pytest.raises(
            DataError,
            match=r"svhn_train_00\.npz decodes to another sha256 than manifest\.json says",
        ) as error:
            import_images("svhn", folder, procs=1)
    finally:
        shards[2]["svhn_train_00"][6, 31, 31, 2] ^= 1
    one_line(error)
    assert not (folder / "cache").exists()


def edit_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest["sets"]["svhn_test"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.usefixtures("decoded_at_once")
def test_manifests(folder, shards, monkeypatch):
    files, *_ = shards
    monkeypatch.setattr(packed, "MOST_PROCESSES", 1)
    import_images("svhn", folder)
    cases = [
        (lambda entry: entry.update(sha256="0" * 64), "the test images of .* have sha256"),
        (lambda entry: entry.update(sha256_y="0" * 64), "the test labels of .* have sha256"),
        (
            lambda entry: entry["shards"][0].__setitem__(0, "../x.npz"),
            r"'\.\./x\.npz' is not a plain file name",
        ),
        (lambda entry: entry.update(model="/x.npz"), r"'/x\.npz' is not a plain file name"),
        (lambda entry: entry.pop("sha256"), "not the manifest of packed image sets"),
        (
            lambda entry: entry["shards"].append(["svhn_test_01.npz", ""]),
            r"\(packed\) is not complete: svhn_test_01\.npz is missing",
        ),
    ]
    for change, words in cases:
        (folder / "manifest.json").write_bytes(files["manifest.json"])
        edit_manifest(folder, change)
        with pytest.raises(DataError, match=words) as error:
            import_images("svhn", folder)
        one_line(error)
    (folder / "manifest.json").write_text("[1]")
    with pytest.raises(DataError, match="not the manifest"):
        import_images("svhn", folder)
    (folder / "manifest.json").write_bytes(files["manifest.json"])
    (folder / "labels.npz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"cannot read .*labels\.npz"):
        import_images("svhn", folder)
    with pytest.raises(InvalidArgumentError, match="procs must be a whole number >= 1, got 0"):
        import_images("svhn", folder, procs=0)


def test_arrays_beside_a_manifest_are_held_to_it(folder, shards):
    _, arrays, _ = shards
    write_npy("svhn", arrays, folder)
    import_images("svhn", folder)
    assert load_images("svhn").provenance.startswith(
        "plain arrays, re-cropped from the full frames"
    )
    arrays = {**arrays, "train_images": arrays["train_images"] ^ 1}
    write_npy("svhn", arrays, folder)
    with pytest.raises(DataError, match=r"the train images of .* have sha256"):
        import_images("svhn", folder)


class Enough(Exception):  # noqa: N818 - not an error
    pass


@needs_real
def test_the_first_row_of_real_pictures():
    """A shard is decoded as a whole, so only the beginning of all its pictures can be had quickly:
    the first green row.
    """
    model = Model.load(REAL / "model_cifar.npz")
    with np.load(REAL / "cifar10_test_00.npz", allow_pickle=False) as shard:
        reader = WordReader(model, shard["states"], shard["words"])
    row = []

    def first_row(*pixel):
        row.append(reader(*pixel).astype(np.uint8))
        if len(row) == 32:
            raise Enough
        return row[-1]

    with pytest.raises(Enough):
        walk(model, len(reader.states), first_row)
    assert (
        sha256_of(np.stack(row, axis=1))
        == "21a222dbed725e5e11aa9aadec2c53d3ebb5abe2bc660f120298a2c61a72bdd9"
    )


@needs_real
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn"])
def test_the_real_manifest_and_labels(name):
    source = SOURCES[name]
    parts = packed.read_manifest(source, REAL)
    labels = packed._read_labels(REAL, parts)
    known = packed.manifest_sha256(parts)
    assert {key: sha256_of(array) for key, array in labels.items()} == {
        key: known[key] for key in labels
    }
    for part in ("train", "test"):
        assert tuple(np.bincount(labels[f"{part}_labels"])) == source.per_class(part)
    assert all(known[key] == sha256 for key, sha256 in source.sha256.items())
