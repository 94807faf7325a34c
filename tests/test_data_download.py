"""Downloads against a real server on the loopback: what is whole is checked and imported, what is
not goes on or is removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pooch
import pytest

from test_data import assert_holds, needs_full_disk, one_line, put, tiny  # noqa: F401 - tiny is a fixture
from torchrex.errors import DataError, MissingDependencyError
from torchrex.vision.data import download, fetch_images, import_images, load_images, save_images
from torchrex.vision.data.sources import SOURCES

ARCHIVE = "cifar-10-binary.tar.gz"


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files`. What it does wrong is `server.fault`, for one answer or, with
    `server.always`, for all of them.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append((self.path, asked))
        fault = server.fault
        if not server.always:
            server.fault = ""
        data = server.files.get(self.path.lstrip("/"))
        if data is None:
            return self.send_error(404)
        if fault == "busy":
            return self.send_error(503)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and fault != "no range" else 0
        if start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        if start:
            given = 0 if fault == "wrong range" else start
            self.send_header("Content-Range", f"bytes {given}-{len(data) - 1}/{len(data)}")
        if fault == "no length":
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        body = data[start:]
        if fault in ("cut", "reset"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "reset":
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            self.close_connection = True
            return self.connection.close() if fault == "reset" else None
        self.wfile.write(body)
        self.close_connection |= fault == "no length"
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.fault, server.always = {}, [], "", False
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.handle_error = lambda *_: None  # the client went away
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cifar(server, tiny):  # noqa: F811
    """A small cifar10 on the server."""
    arrays, files = tiny("cifar10")
    server.files = files
    return arrays


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def left_over(cache):
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn"])
def test_a_download(server, tiny, cache, name):  # noqa: F811
    arrays, server.files = tiny(name)
    told = []
    path = fetch_images(
        name, progress=lambda *numbers: told.append(numbers), base_url=server.url + "/"
    )
    assert path == cache / f"{name}.safetensors"
    assert_holds(load_images(name), arrays)
    assert load_images(name).provenance.startswith("official")
    assert [path for path, _ in server.asked] == [f"/{file}" for file in server.files]
    sizes = [len(data) for data in server.files.values()]
    assert [total for done, total in told if done == total] == sizes
    assert left_over(cache) == [path.name], "the archives are in the cache file now"
    assert not (cache / "downloads").exists()
    # A second time nothing is downloaded.
    asked = len(server.asked)
    assert fetch_images(name, base_url=server.url) == path
    assert len(server.asked) == asked


def test_the_official_addresses(server, tiny, monkeypatch):  # noqa: F811
    """Without a mirror each file is asked for where its description says."""
    _, server.files = tiny("svhn")
    source = SOURCES["svhn"]
    moved = tuple(
        dataclasses.replace(archive, url=f"{server.url}/{archive.file}")
        for archive in source.archives
    )
    monkeypatch.setitem(SOURCES, "svhn", dataclasses.replace(source, archives=moved))
    fetch_images("svhn")
    assert [path for path, _ in server.asked] == ["/train_32x32.mat", "/test_32x32.mat"]


def test_the_real_addresses_are_the_published_ones():
    places = {
        archive.file: archive.url for source in SOURCES.values() for archive in source.archives
    }
    assert places == {
        "cifar-10-binary.tar.gz": "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "cifar-100-binary.tar.gz": "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "train_32x32.mat": "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
        "test_32x32.mat": "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
    }


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_a_broken_connection_goes_on(server, cifar, cache, fault, monkeypatch):
    monkeypatch.setattr(download, "BLOCK", 1000)
    server.fault = fault
    with pytest.raises(
        DataError, match=rf"connection to .*{ARCHIVE} broke .*kept, and the same command goes on"
    ) as error:
        fetch_images("cifar10", base_url=server.url)
    one_line(error)
    part = cache / "downloads" / f"{ARCHIVE}.part"
    data = server.files[ARCHIVE]
    have = part.stat().st_size
    assert part.read_bytes() == data[:have]
    assert 0 < have <= len(data) // 2
    assert left_over(cache) == [f"downloads/{ARCHIVE}.part"]
    told = []
    fetch_images("cifar10", progress=lambda *numbers: told.append(numbers), base_url=server.url)
    assert server.asked[-1] == (f"/{ARCHIVE}", f"bytes={have}-")
    assert told[0] == (have + 1000, len(data))
    assert told[-1] == (len(data), len(data))
    assert_holds(load_images("cifar10"), cifar)
    assert left_over(cache) == ["cifar10.safetensors"]


def begun(cache, data):
    put(cache / "downloads", {f"{ARCHIVE}.part": data})


def test_a_server_without_range(server, cifar, cache):
    begun(cache, server.files[ARCHIVE][:1234])
    server.fault = "no range"
    fetch_images("cifar10", base_url=server.url)
    assert server.asked == [(f"/{ARCHIVE}", "bytes=1234-")]
    assert_holds(load_images("cifar10"), cifar)


def test_a_server_that_answers_with_another_range(server, cifar, cache):
    begun(cache, server.files[ARCHIVE][:1234])
    server.fault = "wrong range"
    with pytest.raises(
        DataError, match=r"answered with 'bytes 0-.* to a request from byte 1234; remove .*\.part"
    ):
        fetch_images("cifar10", base_url=server.url)


def test_a_part_that_is_already_whole(server, cifar, cache):
    begun(cache, server.files[ARCHIVE])
    fetch_images("cifar10", base_url=server.url)
    assert len(server.asked) == 1
    assert_holds(load_images("cifar10"), cifar)


def test_a_part_that_is_too_long_begins_anew(server, cifar, cache):
    begun(cache, server.files[ARCHIVE] + b"x")
    fetch_images("cifar10", base_url=server.url)
    assert [asked for _, asked in server.asked] == [
        f"bytes={len(server.files[ARCHIVE]) + 1}-",
        None,
    ]
    assert_holds(load_images("cifar10"), cifar)


def test_a_server_that_does_not_tell_the_length(server, cifar):
    server.fault = "no length"
    told = []
    fetch_images("cifar10", progress=lambda *numbers: told.append(numbers), base_url=server.url)
    assert told[-1] == (len(server.files[ARCHIVE]), 0)
    assert_holds(load_images("cifar10"), cifar)


def test_the_wrong_checksum_is_not_kept(server, cifar, cache):
    good = server.files[ARCHIVE]
    server.files[ARCHIVE] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(
        DataError, match=rf"{ARCHIVE} gave a file with another md5 .*it was removed"
    ) as error:
        fetch_images("cifar10", base_url=server.url)
    one_line(error)
    assert left_over(cache) == []
    # A part that is wrong is found out in the same way, and the next call begins at the beginning.
    server.files[ARCHIVE] = good
    begun(cache, b"wrong beginning")
    with pytest.raises(DataError, match="another md5"):
        fetch_images("cifar10", base_url=server.url)
    fetch_images("cifar10", base_url=server.url)
    assert_holds(load_images("cifar10"), cifar)


def test_http_errors(server, cifar, cache):
    begun(cache, b"beginning")
    server.fault = "busy"
    with pytest.raises(DataError, match=rf"{ARCHIVE} answered 503 Service Unavailable") as error:
        fetch_images("cifar10", base_url=server.url)
    one_line(error)
    assert left_over(cache) == [f"downloads/{ARCHIVE}.part"]
    server.files = {}
    with pytest.raises(DataError, match="answered 404 Not Found"):
        fetch_images("cifar10", base_url=server.url)


def test_no_connection(cifar, cache):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        DataError, match=rf"no connection to http://127\.0\.0\.1:{port}/.*Connection refused"
    ) as error:
        fetch_images("cifar10", base_url=f"http://127.0.0.1:{port}")
    assert "kept" not in one_line(error)
    with pytest.raises(DataError, match=r"cannot download 'nonsense/cifar-10-binary\.tar\.gz'"):
        fetch_images("cifar10", base_url="nonsense")


def test_a_server_that_hangs_up_or_says_nothing(cifar, monkeypatch):
    """It takes the connection and closes it, or never answers."""
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(DataError, match=r"connection to .* broke \(timed out\)") as error:
            fetch_images("cifar10", base_url=url)
        assert "kept" not in one_line(error)
        hang_up = threading.Thread(target=lambda: [listening.accept()[0].close() for _ in range(2)])
        hang_up.start()
        with pytest.raises(DataError, match=r"connection to .* broke|no connection"):
            fetch_images("cifar10", base_url=url)
        hang_up.join()


@needs_full_disk
def test_a_full_disk(server, cifar, cache):
    begun(cache, b"")
    part = cache / "downloads" / f"{ARCHIVE}.part"
    part.unlink()
    part.symlink_to("/dev/full")
    with pytest.raises(
        DataError, match=rf"disk is full, cannot write .*{ARCHIVE}\.part; free some space"
    ) as error:
        fetch_images("cifar10", base_url=server.url)
    one_line(error)
    assert not (cache / "cifar10.safetensors").exists()
    part.unlink()
    fetch_images("cifar10", base_url=server.url)
    assert_holds(load_images("cifar10"), cifar)


def test_a_disk_that_fills_up_keeps_the_beginning(server, cifar, cache, monkeypatch):
    """After 5,000 bytes there is no more room; afterwards there is."""
    room = [5000]

    class Filling(download.io.FileIO):
        def write(self, data):
            if not room[0]:
                raise OSError(28, os.strerror(28))
            taken = min(room[0], len(data), 999)
            room[0] -= taken
            return super().write(data[:taken])

    with monkeypatch.context() as patch:
        patch.setattr(download.io, "FileIO", Filling)
        with pytest.raises(DataError, match="the disk is full"):
            fetch_images("cifar10", base_url=server.url)
    part = cache / "downloads" / f"{ARCHIVE}.part"
    assert part.read_bytes() == server.files[ARCHIVE][:5000]
    fetch_images("cifar10", base_url=server.url)
    assert server.asked[-1] == (f"/{ARCHIVE}", "bytes=5000-")
    assert_holds(load_images("cifar10"), cifar)


def test_a_folder_that_cannot_be(cifar, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"cannot write .*choose another folder") as error:
        fetch_images("cifar10", tmp_path / "file" / "data")
    one_line(error)


def test_ctrl_c_keeps_the_beginning(server, cifar, cache, monkeypatch):
    monkeypatch.setattr(download, "BLOCK", 1000)

    def interrupt(done, total):
        if done == 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_images("cifar10", progress=interrupt, base_url=server.url)
    assert left_over(cache) == [f"downloads/{ARCHIVE}.part"]
    fetch_images("cifar10", base_url=server.url)
    assert server.asked[-1][1] == "bytes=3000-"
    assert_holds(load_images("cifar10"), cifar)


def test_what_is_not_official_is_replaced(server, cifar, cache):
    """A set from another origin is there already; one who fetches wants the official one."""
    fetch_images("cifar10", base_url=server.url)
    save_images(dataclasses.replace(load_images("cifar10"), provenance="plain arrays"))
    fetch_images("cifar10", base_url=server.url)
    assert load_images("cifar10").provenance.startswith("official")
    # And a damaged one too.
    path = cache / "cifar10.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    fetch_images("cifar10", base_url=server.url)
    assert_holds(load_images("cifar10"), cifar)


def test_pooch_is_optional(cifar, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(
        MissingDependencyError, match=r"needs pooch: pip install 'torchrex\[data\]'"
    ):
        fetch_images("cifar10", base_url="http://127.0.0.1:1")
    with pytest.raises(DataError):
        import_images("cifar10", tmp_path / "nowhere")


def test_pooch_is_silent_and_gets_its_voice_back(server, cifar):
    """It announces each download on stderr otherwise."""
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    logger = pooch.get_logger()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        fetch_images("cifar10", base_url=server.url)
        assert logger.level == logging.INFO
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert said == []
