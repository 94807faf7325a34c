"""`torchrex data`: fetch, import and list image sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrex.cli.main import interruptible, loading_torch
from torchrex.errors import DataError

if TYPE_CHECKING:
    from torchrex.recording import Callback

data_app = typer.Typer(
    help="Image sets: get them, and see which are there.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SETS = ("cifar10", "cifar100", "svhn")
Name = Annotated[
    str, typer.Argument(help=f"One of {', '.join(SETS)}.", autocompletion=lambda: list(SETS))
]
To = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Cache folder; by default TORCHREX_DATA, else the user's cache folder.",
    ),
]


@data_app.command()
def fetch(
    name: Name,
    to: To = None,
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="A folder with the official files, by http.")
    ] = None,
) -> None:
    """Download the official files of a set and check them."""
    with loading_torch():
        from torchrex.vision.data import fetch_images
    with (
        _bar(f"download {name}") as progress,
        interruptible("interrupted; complete files are kept, the same command gets the rest"),
    ):
        fetch_images(name, to, progress, mirror)
    _say_where(name, to)


@data_app.command("import")
def import_(
    name: Name,
    from_: Annotated[
        Path,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Holds the official archive, its binary files, or arrays.",
        ),
    ],
    to: To = None,
) -> None:
    """Check a set that lies in a folder and bring it into the cache."""
    with loading_torch():
        from torchrex.vision.data import import_images
    with interruptible("interrupted; nothing was written"):
        import_images(name, from_, to)
    _say_where(name, to)


@data_app.command("list")
def list_(
    folder: Annotated[
        Path | None,
        typer.Option("--in", metavar="FOLDER", help="Cache folder, as --to of the others."),
    ] = None,
) -> None:
    """Show which sets are there, where they are and where they come from."""
    with loading_torch():
        from torchrex.cli.console import say
        from torchrex.vision.data import cache_path, data_folder, read_about
    width = max(map(len, SETS))
    for name in SETS:
        if not cache_path(name, folder).exists():
            say(f"{name:{width}}  not there ({data_folder(folder)})")
            continue
        try:
            about = read_about(name, folder)
            say(f"{name:{width}}  {about.n_images:,} images in {about.path} ({about.provenance})")
        except DataError as error:
            say(f"{name:{width}}  {error}")


def _say_where(name: str, folder: Path | None) -> None:
    from torchrex.cli.console import say
    from torchrex.vision.data import read_about

    about = read_about(name, folder)
    say(f"{name}: {about.n_images:,} images in {about.path} ({about.provenance})")


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callback | None]:
    """A callback (done, total or 0 if unknown); None where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
