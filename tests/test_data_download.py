"""Downloads from a real server on the loopback address: complete files are checked and imported."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest

from fuzzing import limited
from test_data import assert_holds, one_line, tiny  # noqa: F401 - tiny is a fixture
from torchrex.errors import DataError, MissingDependencyError
from torchrex.vision.data import fetch_images, import_images, importing, load_images, save_images
from torchrex.vision.data.sources import SOURCES

ARCHIVE = "cifar-10-binary.tar.gz"
# pooch leaves the socket of a download that failed to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files`; `server.fault` is what it does wrong."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        data = server.files.get(self.path.lstrip("/"))
        if data is None:
            return self.send_error(404)
        if server.fault == "busy":
            return self.send_error(503)
        if server.fault == "escapes":
            return self.wfile.write(
                b"HTTP/1.1 503 \x1b[31mred\x07\x9b2J\r\nContent-Length: 0\r\n\r\n"
            )
        self.send_response(200)
        if server.fault != "no length":
            words = "many" if server.fault == "words" else str(len(data))
            self.send_header("Content-Length", words)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if server.fault == "cut" else data)
        self.close_connection = True
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.fault = {}, [], ""
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


def files_in(cache):
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def refused(words, url, folder=None):
    with pytest.raises(DataError, match=words) as error:
        fetch_images("cifar10", folder, base_url=url)
    one_line(error)
    del error
    gc.collect()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn"])
def test_a_download(server, tiny, cache, name):  # noqa: F811
    arrays, server.files = tiny(name)
    reported = []
    path = fetch_images(name, progress=lambda *n: reported.append(n), base_url=server.url + "/")
    assert path == cache / f"{name}.safetensors"
    assert_holds(load_images(name), arrays)
    assert load_images(name).provenance.startswith("official")
    assert server.asked == [f"/{file}" for file in server.files]
    sizes = [len(data) for data in server.files.values()]
    assert list(dict.fromkeys(total for done, total in reported if done == total)) == sizes
    assert files_in(cache) == [path.name], "the archives are in the cache file now"
    assert not (cache / "downloads").exists()
    # A second time nothing is downloaded.
    assert fetch_images(name, base_url=server.url) == path
    assert len(server.asked) == len(sizes)


def test_the_official_addresses(server, tiny, monkeypatch):  # noqa: F811
    """Without a mirror each file is asked for at its own address; a complete one is kept."""
    _, files = tiny("svhn")
    server.files = {"train_32x32.mat": files["train_32x32.mat"]}
    source = SOURCES["svhn"]
    moved = tuple(archive._replace(base_url=server.url) for archive in source.archives)
    monkeypatch.setitem(SOURCES, "svhn", dataclasses.replace(source, archives=moved))
    with pytest.raises(DataError, match="404"):
        fetch_images("svhn")
    server.files = files
    fetch_images("svhn")
    assert server.asked == ["/train_32x32.mat", "/test_32x32.mat", "/test_32x32.mat"]


def test_what_a_server_does_wrong(server, cifar, cache):
    """Nothing is kept of a download that broke or has another checksum."""
    good = dict(server.files)
    changed = {ARCHIVE: good[ARCHIVE][:-1] + bytes([good[ARCHIVE][-1] ^ 1])}
    for fault, files, words in (
        ("cut", good, rf"cannot download .*{ARCHIVE}"),
        ("", changed, rf"{ARCHIVE} has another md5 .*it was removed"),
        ("busy", good, "503"),
        ("words", good, "cannot download"),
        ("escapes", good, r"503 .*\\x1b\[31mred\\x07\\x9b2J"),
        ("", {}, "404"),
    ):
        server.fault, server.files = fault, files
        refused(words, server.url)
        assert files_in(cache) == []


def test_a_server_that_gives_no_length(server, cifar):
    server.fault = "no length"
    reported = []
    fetch_images("cifar10", progress=lambda *n: reported.append(n), base_url=server.url)
    assert reported
    assert all(total == 0 for _, total in reported)
    assert_holds(load_images("cifar10"), cifar)


@pytest.mark.parametrize("fault", ["", "no length"])
def test_a_server_that_sends_too_much(server, cifar, cache, monkeypatch, fault):
    server.fault = fault
    monkeypatch.setattr(importing, "MOST_BYTES", len(server.files[ARCHIVE]) - 1)
    monkeypatch.setattr(importing, "BLOCK", 100)
    refused("it has more than .* bytes", server.url)
    assert files_in(cache) == []
    monkeypatch.setattr(importing, "MOST_BYTES", len(server.files[ARCHIVE]))
    fetch_images("cifar10", base_url=server.url)


def test_what_lies_in_the_place_of_a_download(server, cifar, cache):
    """A pipe was waited for; a leftover of a killed download stayed."""
    downloads = cache / "downloads"
    downloads.mkdir(parents=True)
    path = downloads / ARCHIVE
    for plant in (os.mkfifo, os.mkdir):
        plant(path)
        with limited(20.0):
            refused(rf"cannot write .*{ARCHIVE} \(.*choose another folder", server.url)
        assert not path.is_file()
        path.rmdir() if path.is_dir() else path.unlink()
    mine = cache / "mine"
    mine.write_text("mine")
    path.symlink_to(mine)
    (downloads / f"{ARCHIVE}.part").symlink_to(mine)
    (downloads / f"{ARCHIVE}.0123456789abcdef.part").write_text("half")
    fetch_images("cifar10", base_url=server.url)
    assert mine.read_text() == "mine"
    assert sorted(os.listdir(downloads)) == [f"{ARCHIVE}.part"], "which is not ours"
    assert_holds(load_images("cifar10"), cifar)


def test_no_connection_and_no_folder(cifar, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    refused(r"cannot write .*choose another folder", "http://127.0.0.1:1", tmp_path / "file" / "x")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    refused(rf"cannot download http://127\.0\.0\.1:{port}/", f"http://127.0.0.1:{port}")
    refused(r"cannot download nonsense/cifar-10-binary\.tar\.gz", "nonsense")
    monkeypatch.setattr(importing, "TIMEOUT", 0.2)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        refused("timed out", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert not files_in(tmp_path / "cache")


def test_what_is_not_official_is_replaced(server, cifar, cache):
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
    with pytest.raises(MissingDependencyError, match=r"pip install 'torchrex\[data\]'"):
        fetch_images("cifar10", base_url="http://127.0.0.1:1")
    with pytest.raises(DataError):
        import_images("cifar10", tmp_path / "nowhere")


def test_the_real_addresses_are_the_published_ones():
    archives = [archive for source in SOURCES.values() for archive in source.archives]
    assert {archive.file: archive.base_url for archive in archives} == {
        "cifar-10-binary.tar.gz": "https://www.cs.toronto.edu/~kriz",
        "cifar-100-binary.tar.gz": "https://www.cs.toronto.edu/~kriz",
        "train_32x32.mat": "http://ufldl.stanford.edu/housenumbers",
        "test_32x32.mat": "http://ufldl.stanford.edu/housenumbers",
    }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(server, cifar, cache, monkeypatch):
    def full(*_):
        with open("/dev/full", "wb") as file:
            file.write(b"x")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", full)
    refused("No space left on device", server.url)
    assert not files_in(cache)
