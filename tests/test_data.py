"""Image sets: every form gives the same tensors, the cache is checked, an error is one line.

The fixture `tiny` replaces a real set by a small one in the official formats.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from torchrex.errors import DataError
from torchrex.vision.data import (
    ImageSet,
    cache,
    data_folder,
    import_images,
    load_images,
    save_images,
)
from torchrex.vision.data.sources import SOURCES, Source, sha256_of

NAMES = ("cifar10", "cifar100", "svhn")
PER_CLASS = {
    "cifar10": ((5,) * 10, (2,) * 10),
    "cifar100": ((2,) * 100, (1,) * 100),
    "svhn": ((3, 5, 4, 3, 3, 2, 2, 2, 2, 2), (2, 3, 1, 1, 1, 1, 1, 1, 1, 1)),
}
THIRD = "cifar-10-batches-bin/data_batch_3.bin"
SHORT = {"images": "x", "labels": "y", "coarse_labels": "ycoarse"}


def arrays_of(name):
    """Random images; labels in a random order with the right number of each class."""
    random = np.random.default_rng(len(name))
    arrays = {}
    for part, per_class in zip(("train", "test"), PER_CLASS[name], strict=True):
        labels = random.permutation(np.repeat(np.arange(len(per_class)), per_class))
        arrays[f"{part}_images"] = random.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = labels
        if name == "cifar100":
            arrays[f"{part}_coarse_labels"] = labels // 5
    return arrays


def records(arrays, part):
    """The official binary format, picture by picture."""
    out = []
    for k, image in enumerate(arrays[f"{part}_images"]):
        labels = [arrays[f"{part}_labels"][k]]
        if f"{part}_coarse_labels" in arrays:
            labels.insert(0, arrays[f"{part}_coarse_labels"][k])
        out.append(
            bytes(int(label) for label in labels)
            + b"".join(image[:, :, c].tobytes() for c in range(3))
        )
    return out


def binary_files(name, arrays):
    """{name in the archive: bytes}"""
    files = {}
    for part, names in SOURCES[name].files.items():
        rows = records(arrays, part)
        each = len(rows) // len(names)
        files |= {file: b"".join(rows[k * each : (k + 1) * each]) for k, file in enumerate(names)}
    return files


def tar_of(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in {"cifar-readme.html": b"hello", **files}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def official_files(name, arrays):
    """{file: bytes} as the official place has them."""
    if name != "svhn":
        return {SOURCES[name].archives[0].file: tar_of(binary_files(name, arrays))}
    files = {}
    for part in ("train", "test"):
        labels = arrays[f"{part}_labels"].astype(np.uint8)
        buffer = io.BytesIO()
        savemat(
            buffer,
            {
                "X": arrays[f"{part}_images"].transpose(1, 2, 3, 0),
                "y": np.where(labels == 0, 10, labels)[:, None],
            },
            do_compression=True,
        )
        files[f"{part}_32x32.mat"] = buffer.getvalue()
    return files


def write_npy(name, arrays, folder):
    for key, array in arrays.items():
        part, kind = key.split("_", 1)
        np.save(folder / f"{name}_{part}_{SHORT[kind]}.npy", array)


def small_source(name, arrays, files) -> Source:
    train, test = PER_CLASS[name]
    archives = tuple(
        archive._replace(md5=hashlib.md5(files[archive.file]).hexdigest())
        for archive in SOURCES[name].archives
    )
    sha256 = {key: sha256_of(torch.from_numpy(array)) for key, array in arrays.items()}
    return dataclasses.replace(
        SOURCES[name],
        per_class={"train": train, "test": test},
        archives=archives,
        sha256={} if name == "svhn" else sha256,
    )


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Puts a small set in the place of a real one; gives (arrays, official files)."""
    monkeypatch.setenv("TORCHREX_DATA", str(tmp_path / "cache"))

    def replace(name):
        arrays = arrays_of(name)
        files = official_files(name, arrays)
        monkeypatch.setitem(SOURCES, name, small_source(name, arrays, files))
        return arrays, files

    return replace


def put(folder: Path, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / Path(name).name).write_bytes(data)
    return folder


def assert_holds(images: ImageSet, arrays):
    for key, array in arrays.items():
        tensor = getattr(images, key)
        assert tensor.dtype == (torch.uint8 if key.endswith("images") else torch.int64)
        assert torch.equal(tensor, torch.from_numpy(array)), key


def one_line(error) -> str:
    words = str(error.value)
    assert "\n" not in words
    return words


@pytest.mark.parametrize("name", NAMES)
def test_the_official_archive(tiny, tmp_path, name):
    arrays, files = tiny(name)
    path = import_images(name, put(tmp_path / "official", files))
    assert path == tmp_path / "cache" / f"{name}.safetensors"
    images = load_images(name)
    assert_holds(images, arrays)
    assert (images.name, images.n_classes) == (name, len(PER_CLASS[name][0]))
    assert images.provenance.startswith("official")
    assert (images.train_coarse_labels is None) == (name != "cifar100")
    # The archive itself may be given too, and another folder for the cache.
    first = tmp_path / "official" / next(iter(files))
    assert import_images(name, first, tmp_path / "other").parent == tmp_path / "other"
    assert_holds(load_images(name, tmp_path / "other"), arrays)
    if name == "cifar100":
        # By the published layout: labels, 1024 red, 1024 green, 1024 blue, row by row.
        row = binary_files("cifar100", arrays)["cifar-100-binary/test.bin"][:3074]
        assert (row[0], row[1]) == (images.test_coarse_labels[0], images.test_labels[0])
        assert row[2 + 2 * 1024 + 5 * 32 + 9] == images.test_images[0, 5, 9, 2]
    images.train_images.zero_()  # the caller's own: the file stays as it is
    assert_holds(load_images(name), arrays)


@pytest.mark.parametrize("inner", [".", "cifar-10-batches-bin"])
def test_the_extracted_binary_files(tiny, tmp_path, inner):
    arrays, _ = tiny("cifar10")
    put(tmp_path / "extracted" / inner, binary_files("cifar10", arrays))
    import_images("cifar10", tmp_path / "extracted")
    assert_holds(load_images("cifar10"), arrays)
    assert "same bytes as the official set" in load_images("cifar10").provenance


@pytest.mark.parametrize("name", NAMES)
def test_plain_arrays(tiny, tmp_path, name):
    arrays, _ = tiny(name)
    write_npy(name, {**arrays, "train_labels": arrays["train_labels"].astype(">i2")}, tmp_path)
    np.save(tmp_path / f"{name}_train_x.npy", np.asfortranarray(arrays["train_images"]))
    import_images(name, tmp_path)
    assert_holds(load_images(name), arrays)
    words = "not compared bit by bit" if name == "svhn" else "the same bytes as the official set"
    assert words in load_images(name).provenance


def refused(name, folder, words):
    with pytest.raises(DataError, match=words) as error:
        import_images(name, folder)
    one_line(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda good: tar_of({**good, THIRD: good[THIRD] + b"x"}), "data_batch_3.bin has .* bytes"),
        (lambda good: tar_of({f"../{key}": data for key, data in good.items()}), "data_batch_1"),
        (lambda good: tar_of(good)[:-200], "cannot import"),
    ],
)
def test_archives_with_other_content(tiny, tmp_path, monkeypatch, change, words):
    """The md5 is right: only the content shows that something is wrong."""
    arrays, _ = tiny("cifar10")
    data, source = change(binary_files("cifar10", arrays)), SOURCES["cifar10"]
    archive = source.archives[0]._replace(md5=hashlib.md5(data).hexdigest())
    monkeypatch.setitem(SOURCES, "cifar10", dataclasses.replace(source, archives=(archive,)))
    refused("cifar10", put(tmp_path / "official", {archive.file: data}), words)
    assert not (tmp_path / "cache").exists()


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("train_images", lambda x: x[:-1], r"cifar10_train_x.npy .* \(49, 32, 32, 3\)"),
        ("train_images", lambda x: x.transpose(0, 3, 1, 2), r"shape \(50, 3, 32, 32\)"),
        ("train_images", lambda x: x / np.float32(255), "float32"),
        ("train_labels", lambda y: y.astype(float), "cifar10_train_y.npy has float64"),
        ("train_labels", lambda y: y.astype(object), "cannot import cifar10"),
        ("train_labels", lambda y: changed(y, y.argmax(), 10), "from 0 to 10"),
        ("train_labels", lambda y: changed(y, y.argmax(), 0), "class 0 has 6 train images, not 5"),
        ("test_images", lambda x: changed(x, (3, 4, 5, 1), x[3, 4, 5, 1] ^ 1), "have sha256"),
    ],
)
def test_arrays_that_are_not_the_set(tiny, tmp_path, monkeypatch, name, change, words):
    arrays, _ = tiny("cifar10")
    if name != "test_images":  # wrong numbers are found without a checksum
        unknown = dataclasses.replace(SOURCES["cifar10"], sha256={})
        monkeypatch.setitem(SOURCES, "cifar10", unknown)
    write_npy("cifar10", {**arrays, name: change(arrays[name])}, tmp_path)
    refused("cifar10", tmp_path, words)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("inner", ["cifar-10-python.tar.gz", "cifar-10-batches-py", "."])
def test_the_pickled_version_is_refused(tiny, tmp_path, inner):
    tiny("cifar10")
    folder = tmp_path / ("cifar-10-batches-py" if inner == "." else "downloads")
    put(folder, {"data_batch_1": b"\x80\x02}q\x01."})
    (folder / inner).mkdir(exist_ok=True)
    refused("cifar10", folder, r"pickled.*cifar-10-binary\.tar\.gz")
    archive = put(tmp_path / "one", {"cifar-10-python.tar.gz": b"x"}) / "cifar-10-python.tar.gz"
    refused("cifar10", archive, "pickled")
    assert not (tmp_path / "cache").exists()


def test_folders_without_the_set(tiny, tmp_path):
    arrays, _ = tiny("cifar10")
    refused("cifar10", tmp_path / "nowhere", "there is no folder .*nowhere")
    refused("cifar10", put(tmp_path / "empty", {}), "cifar-10-binary.tar.gz there, or arrays")
    incomplete = binary_files("cifar10", arrays)
    del incomplete["cifar-10-batches-bin/data_batch_4.bin"]
    refused("cifar10", put(tmp_path / "some", incomplete), "data_batch_4.bin is missing")
    notes = put(tmp_path / "notes", {"notes.txt": b"x"}) / "notes.txt"
    refused("cifar10", notes, "notes.txt is not an archive of cifar10")
    short = {**incomplete, "cifar-10-batches-bin/data_batch_4.bin": b"short"}
    refused("cifar10", put(tmp_path / "short", short), "data_batch_4.bin has 5 bytes")
    (tmp_path / "file").write_text("x")
    _, official = tiny("cifar10")
    with pytest.raises(DataError, match=r"cannot write .*choose another folder"):
        import_images("cifar10", put(tmp_path / "official", official), tmp_path / "file" / "data")
    _, svhn = tiny("svhn")
    svhn["test_32x32.mat"] += b"x"
    refused("svhn", put(tmp_path / "wrong", svhn), r"test_32x32\.mat has md5 .* instead of")
    assert not (tmp_path / "cache").exists()
    refused("foo", tmp_path, "no image set 'foo'; there are cifar10, cifar100, svhn")
    half = put(tmp_path / "half", {"train_32x32.mat": b"x"})
    refused("svhn", half, "test_32x32.mat is missing")


def test_which_folder_and_how_to_fill_it(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHREX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert data_folder() == tmp_path / "x" / "torchrex" / "data"
    monkeypatch.setenv("TORCHREX_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert data_folder("here") == Path("here")
    with pytest.raises(DataError) as error:
        load_images("cifar10")
    words = one_line(error)
    assert f"cifar10 is not in {tmp_path}" in words
    assert "`torchrex data fetch cifar10`" in words
    assert "`torchrex data import cifar10 --from FOLDER`" in words
    with pytest.raises(DataError, match=f"fetch svhn --to {tmp_path / 'b'}`"):
        load_images("svhn", tmp_path / "b")


@pytest.fixture
def cached(tiny, tmp_path):
    """The cache file of a small cifar10."""
    arrays, files = tiny("cifar10")
    return import_images("cifar10", put(tmp_path / "official", files)), arrays


def test_damage_is_seen(cached):
    path, arrays = cached
    good = path.read_bytes()
    cut = [good[:100], good[:-1], b"", b"\xff" * 200, good.replace(b"schema", b"schemo")]
    flips = [
        good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        for place in (len(good) - 1, len(good) - 100_000, len(good) // 2)
    ]
    for damage in (*cut, *flips):
        path.write_bytes(damage)
        with pytest.raises(DataError, match=r"is damaged .*torchrex data import cifar10") as error:
            load_images("cifar10")
        assert ("another sha256" in one_line(error)) == (damage in flips)
    path.write_bytes(good)
    assert_holds(load_images("cifar10"), arrays)
    path.rename(path.with_name("svhn.safetensors"))
    with pytest.raises(DataError, match="cifar10 in schema 1"):
        load_images("svhn")


def test_a_file_is_hashed_once_until_it_changes(cached, monkeypatch):
    path, _ = cached
    hashed: list[int] = []
    monkeypatch.setattr(cache, "sha256_of", lambda x: hashed.append(1) or sha256_of(x))
    for _ in range(3):
        load_images("cifar10")
    assert len(hashed) == 4  # once for each of its arrays
    path.write_bytes(path.read_bytes())
    load_images("cifar10")
    assert len(hashed) == 8


def test_a_full_disk_leaves_the_old_cache(cached, fill_disk):
    path, arrays = cached
    fill_disk(path.name)
    with pytest.raises(DataError, match=r"No space left on device.*make room") as error:
        save_images(dataclasses.replace(load_images("cifar10"), provenance="new"))
    one_line(error)
    assert [p.name for p in path.parent.iterdir()] == ["cifar10.safetensors"]
    assert_holds(load_images("cifar10"), arrays)


@pytest.mark.slow
@pytest.mark.skipif("TORCHREX_DATA" not in os.environ, reason="TORCHREX_DATA is not set")
@pytest.mark.parametrize(
    ("name", "means"),
    [("cifar10", (0.4914, 0.4822, 0.4465)), ("cifar100", (0.5071, 0.4865, 0.4409))],
)
def test_the_real_sets(name, means):
    """Published statistics of the real data, where it is in the cache."""
    try:
        images = load_images(name)
    except DataError as error:
        pytest.skip(str(error))
    found = images.train_images.float().mean((0, 1, 2)) / 255
    assert torch.allclose(found, torch.tensor(means), atol=5e-5)
    assert images.train_labels.bincount().unique().tolist() == [50_000 // images.n_classes]
