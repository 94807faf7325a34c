"""The packed form of a set: a manifest with checksums, shards that are decoded in processes, and
labels.

A folder with `manifest.json`, `labels.npz`, `model_*.npz` and shards such as
`cifar10_train_00.npz`. The decoder is in `packed_coder`; here every array is checked against the
manifest.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchrex.checkpoint import one_line, parse_json, read_file
from torchrex.errors import DataError, InvalidArgumentError
from torchrex.recording import Callback
from torchrex.vision.data import packed_coder
from torchrex.vision.data.sources import PARTS, PICTURE, Arrays, Source, sha256_of

MANIFEST, LABELS = "manifest.json", "labels.npz"
MOST_PROCESSES = 16
UNREADABLE = packed_coder.UNREADABLE  # of a file that is not what it says
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # of a file in the folder itself


class Shard(NamedTuple):
    """One file of pictures, by plain names within the folder."""

    model: str
    file: str
    sha256: str


class PackedPart(NamedTuple):
    """What the manifest says of one part of a set."""

    shards: list[Shard]
    images_sha256: str
    labels: dict[str, tuple[str, str]]  # labels or coarse_labels: (name within labels.npz, sha256)


def read_manifest(source: Source, folder: Path) -> dict[str, PackedPart] | None:
    """The parts of a set by name, None where the folder has no manifest or the manifest does not
    know the set.
    """
    path = folder / MANIFEST
    try:
        sets = parse_json(read_file(path))["sets"]
        if not all(f"{source.name}_{part}" in sets for part in PARTS):
            return None
        return {
            part: _part(source, f"{source.name}_{part}", sets[f"{source.name}_{part}"])
            for part in PARTS
        }
    except FileNotFoundError:
        return None
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise DataError(f"{path} is not the manifest of packed image sets ({why})") from None


def _part(source: Source, name: str, entry: dict[str, Any]) -> PackedPart:
    labels = {"labels": (f"{name}_y", str(entry["sha256_y"]))}
    if source.n_coarse:
        labels["coarse_labels"] = (f"{name}_ycoarse", str(entry["sha256_ycoarse"]))
    shards = [
        Shard(str(entry["model"]), str(file), str(sha256)) for file, sha256 in entry["shards"]
    ]
    if stray := [name for shard in shards for name in shard[:2] if not PLAIN_NAME.fullmatch(name)]:
        raise ValueError(f"{one_line(repr(stray[0]), 80)} is not a plain file name")
    sums = [entry["sha256"], *(each for _, each in labels.values())]  # which messages show
    if odd := [
        each
        for each in sums
        if not isinstance(each, str) or not re.fullmatch(r"[0-9a-f]{64}", each)
    ]:
        raise ValueError(f"{one_line(repr(odd[0]), 80)} is no sha256")
    if len({shard.file for shard in shards}) < len(shards):
        raise ValueError(f"a shard is twice in {name}")
    return PackedPart(shards, str(entry["sha256"]), labels)


def manifest_sha256(parts: dict[str, PackedPart]) -> dict[str, str]:
    """The manifest's checksums under the names of the arrays."""
    images = {f"{part}_images": entry.images_sha256 for part, entry in parts.items()}
    labels = {
        f"{part}_{kind}": sha256
        for part, entry in parts.items()
        for kind, (_, sha256) in entry.labels.items()
    }
    return images | labels


def packed_files(parts: dict[str, PackedPart]) -> list[str]:
    """All files that the packed form of a set consists of."""
    shards = [shard for entry in parts.values() for shard in entry.shards]
    return [
        MANIFEST,
        LABELS,
        *sorted({shard.model for shard in shards}),
        *(shard.file for shard in shards),
    ]


def read_packed(
    source: Source,
    folder: Path,
    parts: dict[str, PackedPart],
    *,
    procs: int | None = None,
    progress: Callback | None = None,
) -> Arrays:
    """Decode a set. `procs` processes at once, by default one per core; progress counts pictures.

    Shards are checked here; the whole arrays and their labels are for `check_arrays` and
    `check_sha256`, as in every other form.
    """
    if procs is None:
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        procs = min(cores, MOST_PROCESSES)
    elif isinstance(procs, bool) or procs < 1:
        raise InvalidArgumentError(f"procs must be a whole number >= 1, got {procs!r}")
    arrays = _read_labels(folder, parts)
    room: dict[str, int] = {part: source.count(part) for part in PARTS}
    total, done = sum(room.values()), 0
    shards = [(part, shard) for part, entry in parts.items() for shard in entry.shards]
    if progress is not None:
        progress(0, total)  # the first shards take seconds
    decoded: dict[str, list[npt.NDArray[Any]]] = {part: [] for part in parts}
    with contextlib.closing(_decode_all(folder, [shard for _, shard in shards], procs)) as pictures:
        for (part, shard), images in zip(shards, pictures, strict=True):
            if sum(map(len, decoded[part])) + len(images) > room[part]:
                raise DataError(
                    f"{folder} has more {part} pictures than {source.name}; get these files again"
                )
            if sha256_of(images) != shard.sha256:
                raise DataError(
                    f"{folder / shard.file} decodes to another sha256 than {MANIFEST} says; get that file again"
                )
            decoded[part].append(images)
            done += len(images)
            if progress is not None:
                progress(done, total)
    if empty := [part for part, images in decoded.items() if not images]:
        raise DataError(
            f"{folder / MANIFEST} names no shard of the {empty[0]} part; get that file again"
        )
    return arrays | {f"{part}_images": np.concatenate(images) for part, images in decoded.items()}


def _read_labels(folder: Path, parts: dict[str, PackedPart]) -> Arrays:
    try:
        arrays = {
            f"{part}_{kind}": packed_coder.read_arrays(folder / LABELS, name)[name]
            for part, entry in parts.items()
            for kind, (name, _) in entry.labels.items()
        }
        return {name: array.astype(np.int64) for name, array in arrays.items()}
    except UNREADABLE as error:
        raise DataError(
            f"cannot read {folder / LABELS} ({one_line(error)}); get that file again"
        ) from None


def _decode_all(
    folder: Path, shards: list[Shard], procs: int
) -> Generator[npt.NDArray[Any], None, None]:
    if procs == 1:
        for shard in shards:
            try:
                yield packed_coder.decode_file(folder / shard.model, folder / shard.file)
            except UNREADABLE as error:
                raise _undecodable(folder, shard, str(error)) from None
        return
    running: list[subprocess.Popen[bytes]] = []
    starting = threading.Lock()  # nobody starts a process while the others are being stopped
    stopped = False

    def one(shard: Shard) -> npt.NDArray[Any]:
        # The decoder is run as a program by its path, not through multiprocessing: its processes
        # need neither torch nor the caller's main module, and pass plain bytes. One BLAS thread
        # each, or they would fight for the cores.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [
            sys.executable,
            "-P",
            packed_coder.__file__,
            str(folder / shard.model),
            str(folder / shard.file),
        ]
        with starting:
            if stopped:
                raise _undecodable(folder, shard, "another shard was not")
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | single
            )
            running.append(process)
        out, err = process.communicate()
        if process.returncode or len(out) % np.prod(PICTURE):
            last = err.decode(errors="replace").strip().splitlines()[-1:] or [
                f"exit code {process.returncode}"
            ]
            raise _undecodable(folder, shard, last[0])
        return np.frombuffer(out, np.uint8).reshape(-1, *PICTURE)

    with ThreadPoolExecutor(procs) as pool:
        futures = [pool.submit(one, shard) for shard in shards]
        try:
            for future in futures:
                yield future.result()
        finally:  # also when the caller stops early: an error in one shard, Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            with starting:
                stopped = True
                for process in running:
                    process.kill()


def _undecodable(folder: Path, shard: Shard, why: str) -> DataError:
    return DataError(
        f"cannot decode {folder / shard.file} with {shard.model} ({one_line(why)}); get these files again"
    )
