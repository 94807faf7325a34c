"""Downloading the official files: pooch holds them to their checksums, a downloader of ours goes on
where a connection broke.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrex.errors import DataError, MissingDependencyError
from torchrex.recording import Callback
from torchrex.vision.data.cache import cache_path, data_folder, load_images
from torchrex.vision.data.importing import OFFICIAL, import_images
from torchrex.vision.data.sources import Archive, source_of

BLOCK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte


def fetch_images(
    name: str,
    folder: Path | str | None = None,
    progress: Callback | None = None,
    base_url: str | None = None,
) -> Path:
    """Download the official files of an image set, check them, and write the cache; what is there
    already stays.

    After a broken connection the same call goes on. `progress(bytes done, bytes of the file)`
    counts file by file, with 0 for a size the server does not tell. `base_url` is a mirror of the
    official place; the checksums are the same.
    """
    source = source_of(name)
    with contextlib.suppress(DataError):
        if load_images(name, folder).provenance.startswith(OFFICIAL):
            return cache_path(name, folder)
    downloads = data_folder(folder) / "downloads"
    paths = []
    for archive in source.archives:
        url = archive.url if base_url is None else f"{base_url.rstrip('/')}/{archive.file}"
        paths.append(_retrieve(archive, url, downloads, progress))
    written = import_images(name, downloads, folder)
    # The cache holds all of it now.
    for path in paths:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        downloads.rmdir()  # unless another download is on its way there
    return written


def _retrieve(archive: Archive, url: str, folder: Path, progress: Callback | None) -> Path:
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError:
        raise MissingDependencyError(
            "downloading image sets needs pooch: pip install 'torchrex[data]'"
        ) from None
    part = folder / f"{archive.file}.part"
    downloader = ResumingDownloader(part, progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _quiet(pooch.get_logger()):
            return Path(
                pooch.retrieve(
                    url, f"md5:{archive.md5}", archive.file, folder, downloader=downloader
                )
            )
    except DataError:
        raise
    except OSError as error:
        raise _cannot_write(part, error) from None
    except ValueError as error:
        if not downloader.complete:
            raise DataError(f"cannot download {url!r}: {error}") from None
        # The checksum, and pooch has removed the file.
        raise DataError(
            f"{url} gave a file with another md5 than {archive.md5} of the official {archive.file}; it was removed, try again"
        ) from None


class ResumingDownloader:
    """A downloader for pooch that keeps its beginning in `part` and asks the server for the rest
    only.
    """

    def __init__(self, part: Path, progress: Callback | None = None) -> None:
        self.part, self.progress, self.complete = part, progress, False

    def __call__(self, url: str, output_file: Any, pooch: Any) -> None:
        have = self._have()
        try:
            with contextlib.closing(self._open(url, have)) as response:
                self._save(url, response, have)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 416 or not have:
                raise DataError(
                    f"{url} answered {error.code} {error.reason}; try again later, or from a mirror"
                ) from None
            # Nothing comes after what we have: it is the whole file, and the checksum decides, or
            # the file has changed.
            if _total_of(error.headers.get("Content-Range")) != have:
                self.part.unlink()
                return self(url, output_file, pooch)
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            raise DataError(
                f"no connection to {url} ({reason}); try again later, from a mirror (--mirror URL), or import a copy that you "
                f"have (torchrex data import NAME --from FOLDER){self._kept()}"
            ) from None
        except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
            raise self._cut(url, str(error) or type(error).__name__) from None
        os.replace(self.part, output_file)
        self.complete = True

    def _have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _open(self, url: str, have: int) -> http.client.HTTPResponse:
        headers = {"User-Agent": "torchrex"} | ({"Range": f"bytes={have}-"} if have else {})
        response: http.client.HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT
        )
        return response

    def _save(self, url: str, response: http.client.HTTPResponse, have: int) -> None:
        given = response.headers.get("Content-Range") or ""
        goes_on = response.status == 206 and given.startswith(f"bytes {have}-")
        if response.status == 206 and not goes_on:
            raise DataError(
                f"{url} answered with {given!r} to a request from byte {have}; remove {self.part} and try again"
            )
        done = have if goes_on else 0  # a server that ignores Range begins anew
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else 0
        with self._file("ab" if goes_on else "wb") as file:
            while block := self._read(url, response):
                try:
                    rest = memoryview(block)
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError as error:
                    raise _cannot_write(self.part, error) from None
                done += len(block)
                if self.progress is not None:
                    self.progress(done, total)
        if done < total:
            raise self._cut(url, f"{done:,} of {total:,} bytes came")

    def _read(self, url: str, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read(BLOCK)
        except (http.client.HTTPException, OSError) as error:
            raise self._cut(url, str(error) or type(error).__name__) from None

    def _file(self, mode: str) -> io.FileIO:
        # Unbuffered: what a full disk or Ctrl-C leaves is a beginning of the file, and closing it
        # cannot fail.
        try:
            return io.FileIO(self.part, mode)
        except OSError as error:
            raise _cannot_write(self.part, error) from None

    def _cut(self, url: str, why: str) -> DataError:
        return DataError(f"the connection to {url} broke ({why}){self._kept()}")

    def _kept(self) -> str:
        return (
            "; what came is kept, and the same command goes on from there" if self._have() else ""
        )


def _cannot_write(path: Path, error: OSError) -> DataError:
    if error.errno == errno.ENOSPC:
        return DataError(
            f"the disk is full, cannot write {path}; free some space, and the same command goes on from there"
        )
    return DataError(f"cannot write {path} ({error.strerror or error}); choose another folder")


def _total_of(content_range: str | None) -> int | None:
    match = re.fullmatch(r"bytes (?:\*|\d+-\d+)/(\d+)", content_range or "")
    return int(match[1]) if match else None


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """pooch announces each download on stderr; the caller decides what is printed."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
