"""The `torchrex` command: list, run, reproduce. Errors of ours are one line on stderr and exit code 2; Ctrl-C is 130."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

import torchrex
from torchrex.cli.reproduce import FIGURES, reproduce_figure1
from torchrex.errors import TorchrexError
from torchrex.experiments import recipes
from torchrex.experiments.config import override
from torchrex.experiments.recipes import Config, get_recipe
from torchrex.experiments.runner import RunFolder, run_recipe
from torchrex.posterior.progress import progress_bar

app = typer.Typer(
    help="Adaptive replica exchange stochastic gradient MCMC: run recipes, reproduce the paper.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
stdout, stderr = Console(), Console(stderr=True)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. n_steps=2000. May be repeated."),
]
Seed = Annotated[int, typer.Option(min=0, help="First seed.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds to run, counted up from --seed.")]
Out = Annotated[Path, typer.Option(help="Folder for run folders.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace finished runs.")]


class Interrupted(Exception):  # noqa: N818 - not an error
    """Ctrl-C during a run, after what was done has been written."""


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"torchrex {torchrex.__version__}")
        raise typer.Exit


@app.command("list")
def list_recipes() -> None:
    """Show all recipes."""
    table = Table("recipe", "rungs", "F", "steps", "runs", box=None, header_style="bold")
    table.columns[0].no_wrap, table.columns[0].min_width = True, max(map(len, recipes()))
    for name, config in recipes().items():
        rungs = len(getattr(config, "temperatures", ()))
        factor = f"{getattr(config, 'correction_factor', 1.0):g}" if rungs > 1 else "-"
        table.add_row(name, str(rungs), factor, f"{config.n_steps:,}", str(getattr(config, "n_runs", 1)))
    stdout.print(table)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A name from `torchrex list`.")],
    set_: Set = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    out: Out = Path("runs"),
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Run one recipe into OUT/RECIPE/seed=S/."""
    config = override(get_recipe(recipe), set_ or [])
    for s in range(seed, seed + seeds):
        folder = run_one(config, s, out, device=device, overwrite=overwrite)
        result = folder.result or {}
        metrics = Table("metric", "value", box=None, header_style="bold")
        for name, value in result["metrics"].items():
            metrics.add_row(name, "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}")
        stdout.print(f"{recipe}, seed {s}: {result['status']} in {result['wall_seconds']:.1f} s")
        stdout.print(metrics)
        stdout.print(f"run folder: {folder.path}", soft_wrap=True)
        stop_if_interrupted(folder)


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(FIGURES)}.")],
    set_: Set = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    only: Annotated[str, typer.Option(help="Only recipes with this in their name, e.g. case1.")] = "",
    out: Out = Path("runs"),
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Run what is missing of a figure of the paper, draw it, and print our numbers beside the paper's."""

    def one(config: Config, s: int) -> RunFolder:
        folder = run_one(config, s, out, device=device, overwrite=True)
        stop_if_interrupted(folder)
        return folder

    reproduce_figure1(what, set_ or [], range(seed, seed + seeds), only, out, overwrite=overwrite, run_one=one, console=stdout)


def run_one(config: Config, seed: int, out: Path, *, device: str, overwrite: bool) -> RunFolder:
    with progress_bar(f"{config.recipe} seed {seed}", config.n_steps, stderr) as progress:
        return run_recipe(config, seed, out, device=device, overwrite=overwrite, progress=progress)


def stop_if_interrupted(folder: RunFolder) -> None:
    if (folder.result or {}).get("status") == "interrupted":
        raise Interrupted(f"interrupted; what was done is in {folder.path}")


def main() -> None:
    """Entry point: turns our errors into one line and an exit code."""
    handler = RichHandler(console=stderr, show_time=False, show_path=False, markup=False)
    logging.getLogger("torchrex").addHandler(handler)
    try:
        app(standalone_mode=True)
    except TorchrexError as error:
        stderr.print(f"torchrex: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except Interrupted as interrupted:
        stderr.print(f"torchrex: {interrupted}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(130)
    except KeyboardInterrupt:
        stderr.print("torchrex: interrupted before the first steps were done; nothing was written")
        sys.exit(130)
