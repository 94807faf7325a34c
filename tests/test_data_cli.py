"""`torchrex data`: what a person sees of fetch, import and list."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from test_data import assert_holds, put, tiny  # noqa: F401 - tiny is a fixture
from test_data_download import cifar, server  # noqa: F401 - fixtures
from torchrex.cli import data as cli_data
from torchrex.cli.main import Interrupted
from torchrex.errors import DataError
from torchrex.vision import data as vision_data
from torchrex.vision.data import load_images
from torchrex.vision.data.sources import SOURCES

app = typer.Typer()
app.add_typer(cli_data.data_app, name="data")


def data(*words):
    return CliRunner().invoke(app, ["data", *map(str, words)])


def test_import_and_list(tiny, tmp_path):  # noqa: F811
    assert tuple(SOURCES) == cli_data.SETS  # written out for the help text, which loads nothing
    arrays, files = tiny("cifar10")
    source, cache = put(tmp_path / "official", files), tmp_path / "[red]cache"
    result = data("import", "cifar10", "--from", source, "--to", cache)
    assert result.exit_code == 0, result.output
    where = cache / "cifar10.safetensors"
    about = f"70 images in {where} (official cifar-10-binary.tar.gz, md5 checked)"
    assert result.stdout == f"cifar10: {about}\n"
    assert result.stderr == "", "silent where stderr is not a terminal"
    assert_holds(load_images("cifar10", cache), arrays)
    absent = [f"cifar100  not there ({cache})", f"svhn      not there ({cache})"]
    assert data("list", "--in", cache).stdout.splitlines() == [f"cifar10   {about}", *absent]
    where.write_bytes(where.read_bytes()[:50])
    assert "is damaged" in data("list", "--in", cache).stdout.splitlines()[0]
    # The command line's main turns errors of ours into one line and exit code 2.
    for words in (["fetch", "cifar11"], ["import", "cifar10", "--from", tmp_path / "nowhere"]):
        assert isinstance(data(*words).exception, DataError)
    assert data("import", "cifar10").exit_code == 2


def test_fetch_has_a_bar_on_a_terminal(server, cifar, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    result = data("fetch", "cifar10", "--to", tmp_path / "there", "--mirror", server.url)
    assert result.exit_code == 0, result.output
    assert "download cifar10" in result.stderr
    assert "100%" in result.stderr
    assert "download" not in result.stdout
    assert_holds(load_images("cifar10", tmp_path / "there"), cifar)


@pytest.mark.parametrize(
    ("command", "words"), [("fetch", "complete files are kept"), ("import", "nothing was written")]
)
def test_ctrl_c(monkeypatch, tmp_path, command, words):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(vision_data, f"{command}_images", interrupted)
    said = data(
        command, "cifar10", *(["--from", tmp_path] if command == "import" else [])
    ).exception
    assert isinstance(said, Interrupted)  # which main prints as one line
    assert said.exit_code == 130
    assert str(said).startswith("interrupted; ")
    assert words in str(said)
