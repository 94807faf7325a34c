"""Finding an image set in a folder, in whichever form it lies there, and bringing it into the
cache.

The forms, in this order: the official archive, its extracted binary files, plain arrays, packed
shards. Each is held to the strongest checksum there is: the official archive to its md5; all other
forms to the sha256 of the official arrays where we know it (CIFAR), and to a manifest's where there
is one. The provenance says which, and goes into the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from torchrex.errors import DataError
from torchrex.recording import Callback
from torchrex.vision.data.cache import ImageSet, save_images
from torchrex.vision.data.formats import (
    check_md5,
    npy_files,
    read_binary,
    read_mat,
    read_npy,
    read_tar,
)
from torchrex.vision.data.packed import (
    LABELS,
    MANIFEST,
    manifest_sha256,
    packed_files,
    read_manifest,
    read_packed,
)
from torchrex.vision.data.sources import (
    PARTS,
    Arrays,
    Source,
    check_arrays,
    check_sha256,
    source_of,
)

OFFICIAL = "official"  # how the provenance of official archives begins
PYTHON_VERSION = ("-python", "batches-py")  # in names of the pickled version of CIFAR


class Form(NamedTuple):
    """One way in which a set may lie in a folder."""

    words: str
    folder: Path
    files: list[str]
    read: Callable[[], tuple[Arrays, str]]  # arrays and provenance

    def missing(self) -> list[str]:
        return [name for name in self.files if not (self.folder / name).is_file()]


def import_images(
    name: str,
    source: Path | str,
    folder: Path | str | None = None,
    progress: Callback | None = None,
    *,
    procs: int | None = None,
) -> Path:
    """Check the image set `name` in the folder (or archive file) `source` and write it to the cache
    in `folder`.

    The forms are listed above. `procs` and `progress(pictures done, of all)` are for the packed
    form, which takes a minute.
    """
    what, place = source_of(name), Path(source).expanduser()
    try:
        form = _find(what, place, progress, procs)
        arrays, provenance = form.read()
    except PermissionError as error:
        raise DataError(f"cannot read {error.filename} ({error.strerror})") from None
    check_arrays(what, arrays, str(place))
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return save_images(
        ImageSet(what.name, what.n_classes, **tensors, provenance=provenance), folder
    )


def _find(source: Source, place: Path, progress: Callback | None, procs: int | None) -> Form:
    if place.is_file() and place.name.endswith((".tar.gz", ".tgz")) and source.train_files:
        if any(mark in place.name for mark in PYTHON_VERSION):
            raise _python_version(source, place)
        return Form(
            "the official archive", place.parent, [place.name], partial(_official, source, [place])
        )
    if place.is_file() and not any(place.name == archive.file for archive in source.archives):
        names = " and ".join(archive.file for archive in source.archives)
        raise DataError(
            f"{place} is not an archive of {source.name}; give {names}, or a folder that holds it"
        )
    folder = place.parent if place.is_file() else place
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}; --from takes the folder that holds {source.name}"
        )
    forms = [
        form for inner in _places(source, folder) for form in _forms(source, inner, progress, procs)
    ]
    for form in forms:
        if not form.missing():
            return form
    # Tell of the form that has most of its files there; of none at all, name what would do.
    nearest = max(forms, key=lambda form: len(form.files) - len(form.missing()))
    missing = nearest.missing()
    if len(missing) < len(nearest.files):
        raise DataError(
            f"{source.name} in {nearest.folder} ({nearest.words}) is not complete: {missing[0]} is missing"
        )
    if any(mark in path.name for path in (folder, *folder.iterdir()) for mark in PYTHON_VERSION):
        raise _python_version(source, folder)
    names = " and ".join(archive.file for archive in source.archives)
    raise DataError(
        f"{folder} does not hold {source.name}; put {names} there, or arrays {', '.join(npy_files(source).values())} (images "
        f"uint8 n x 32 x 32 x 3, whole-number labels), or the packed form ({MANIFEST}, {LABELS}, its model_*.npz and the shards "
        f"{source.name}_train_00.npz ...)"
    )


def _places(source: Source, folder: Path) -> list[Path]:
    """The folder itself, and the one within it that the official archive extracts to."""
    inner = folder / Path(source.train_files[0]).parent if source.train_files else folder
    return [folder] + ([inner] if inner.is_dir() and inner != folder else [])


def _forms(
    source: Source, folder: Path, progress: Callback | None, procs: int | None
) -> list[Form]:
    archives = [archive.file for archive in source.archives]
    forms = [
        Form(
            "the official archive",
            folder,
            archives,
            partial(_official, source, [folder / name for name in archives]),
        )
    ]
    if source.train_files:
        binary = [Path(name).name for part in PARTS for name in source.files(part)]
        forms.append(
            Form("the official binary files", folder, binary, partial(_binary, source, folder))
        )
    forms.append(
        Form("plain arrays", folder, [*npy_files(source).values()], partial(_plain, source, folder))
    )
    if (folder / MANIFEST).is_file() and (parts := read_manifest(source, folder)) is not None:
        forms.append(
            Form(
                "packed",
                folder,
                packed_files(parts),
                partial(_packed, source, folder, progress, procs),
            )
        )
    return forms


def _official(source: Source, paths: list[Path]) -> tuple[Arrays, str]:
    for path, archive in zip(paths, source.archives, strict=True):
        check_md5(path, archive)
    arrays = (
        read_tar(source, paths[0])
        if source.train_files
        else read_mat(source, dict(zip(PARTS, paths, strict=True)))
    )
    return (
        arrays,
        f"{OFFICIAL} {' and '.join(archive.file for archive in source.archives)}, md5 checked",
    )


def _binary(source: Source, folder: Path) -> tuple[Arrays, str]:
    arrays = read_binary(source, folder)
    return arrays, f"binary files of the official archive, {_vouched(source, arrays, folder)}"


def _plain(source: Source, folder: Path) -> tuple[Arrays, str]:
    arrays = read_npy(source, folder)
    parts = read_manifest(source, folder)
    if parts is not None:
        check_sha256(arrays, manifest_sha256(parts), str(folder))
    recropped = (
        ", re-cropped from the full frames" if source.recropped and parts is not None else ""
    )
    return arrays, f"plain arrays{recropped}, {_vouched(source, arrays, folder)}"


def _packed(
    source: Source, folder: Path, progress: Callback | None, procs: int | None
) -> tuple[Arrays, str]:
    parts = read_manifest(source, folder)
    assert parts is not None  # this form is offered only where there is one
    arrays = read_packed(source, folder, parts, procs=procs, progress=progress)
    check_sha256(arrays, manifest_sha256(parts), str(folder))
    origin = "packed form, re-cropped from the full frames" if source.recropped else "packed form"
    return arrays, f"{origin}, {_vouched(source, arrays, folder)}"


def _vouched(source: Source, arrays: Arrays, folder: Path) -> str:
    """Hold the arrays to the official ones where we know their sha256; the words for the
    provenance.
    """
    check_sha256(arrays, source.sha256, str(folder))
    if all(name in source.sha256 for name in source.array_names()):
        return "the same bytes as the official set by sha256"
    return "not compared bit by bit with the official files"


def _python_version(source: Source, place: Path) -> DataError:
    return DataError(
        f"{place} has the python version of {source.name}, which is pickled and is not loaded here; "
        f"give the binary version, {source.archives[0].file}, or `torchrex data fetch {source.name}`"
    )
